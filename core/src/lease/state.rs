//! The one word that a payload's state is.

/// Where a payload is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PayloadPhase {
    /// No payload: the slot is free.
    Free,
    /// Published: it can be opened.
    Live,
    /// It takes no new readers, and ends with the last of those it has.
    Retiring,
    /// Nobody reads it, and nobody will: only `release` is left to do.
    Ended,
}

/// Why a payload ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum End {
    /// All its consumers have had it.
    Consumed,
    /// Its owner removed it.
    Removed,
    /// Another took its place.
    Replaced,
    /// It was not used for too long.
    Expired,
}

/// The most readers of one payload at a time.
pub const MAX_READERS: u32 = (1 << READERS_BITS) - 1;
/// The most consumers of one payload, if it is for a number of them.
pub const MAX_CONSUMERS: u32 = UNLIMITED - 1;
/// The longest payload in bytes.
pub const MAX_PAYLOAD: u64 = (1 << WATERMARK_BITS) - 1;

/// A number of seats that is never lowered.
pub(super) const UNLIMITED: u32 = (1 << SEATS_BITS) - 1;

/// A payload's state. `uses` moves each time a reader leaves, so that an expiry that looked at the time before does not
/// mistake the payload for one that was not used since (it wraps after 2^14 uses within one call).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct State {
    pub(super) generation: u32,
    pub(super) uses: u32,
    pub(super) phase: PayloadPhase,
    pub(super) end: End,
    pub(super) readers: u32,
    /// Consumers that may still open it.
    pub(super) seats: u32,
}

// From the lowest bit: seats (12), readers (12), end (2), phase (2), uses (14), generation (22).
const SEATS_BITS: u32 = 12;
const READERS_BITS: u32 = 12;
const READERS_SHIFT: u32 = SEATS_BITS;
const END_SHIFT: u32 = READERS_SHIFT + READERS_BITS;
const PHASE_SHIFT: u32 = END_SHIFT + 2;
const USES_SHIFT: u32 = PHASE_SHIFT + 2;
const USES: u64 = (1 << 14) - 1;
const GENERATION_SHIFT: u32 = USES_SHIFT + 14;
pub(super) const GENERATION: u32 = (1 << 22) - 1;

impl State {
    pub(super) fn unpack(word: u64) -> Self {
        Self {
            generation: (word >> GENERATION_SHIFT) as u32,
            uses: ((word >> USES_SHIFT) & USES) as u32,
            phase: match (word >> PHASE_SHIFT) & 3 {
                0 => PayloadPhase::Free,
                1 => PayloadPhase::Live,
                2 => PayloadPhase::Retiring,
                _ => PayloadPhase::Ended,
            },
            end: match (word >> END_SHIFT) & 3 {
                0 => End::Consumed,
                1 => End::Removed,
                2 => End::Replaced,
                _ => End::Expired,
            },
            readers: (word >> READERS_SHIFT) as u32 & MAX_READERS,
            seats: word as u32 & UNLIMITED,
        }
    }

    pub(super) fn pack(self) -> u64 {
        let phase = match self.phase {
            PayloadPhase::Free => 0,
            PayloadPhase::Live => 1,
            PayloadPhase::Retiring => 2,
            PayloadPhase::Ended => 3,
        };
        let end = match self.end {
            End::Consumed => 0,
            End::Removed => 1,
            End::Replaced => 2,
            End::Expired => 3,
        };
        u64::from(self.seats & UNLIMITED)
            | u64::from(self.readers & MAX_READERS) << READERS_SHIFT
            | end << END_SHIFT
            | phase << PHASE_SHIFT
            | (u64::from(self.uses) & USES) << USES_SHIFT
            | u64::from(self.generation & GENERATION) << GENERATION_SHIFT
    }
}

// A watermark carries the lower 20 bits of its payload's generation above 44 bits of length, so that one who fills a
// payload that is gone does not raise the watermark of the next in its slot.
const WATERMARK_BITS: u32 = 44;

pub(super) fn pack_watermark(generation: u32, bytes: u64) -> u64 {
    u64::from(generation) << WATERMARK_BITS | bytes & MAX_PAYLOAD
}

/// The bytes, if the watermark is of this generation.
pub(super) fn unpack_watermark(generation: u32, word: u64) -> Option<u64> {
    ((word ^ pack_watermark(generation, 0)) >> WATERMARK_BITS == 0).then_some(word & MAX_PAYLOAD)
}
