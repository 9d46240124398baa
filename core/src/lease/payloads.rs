//! Published payloads: who may open them, and when their memory is free.

use super::state::{
    End, GENERATION, MAX_CONSUMERS, MAX_PAYLOAD, MAX_READERS, PayloadPhase, State, UNLIMITED, pack_watermark,
    unpack_watermark,
};
use crate::Ticks;
use crate::sync::{Ordering, Word, mutant};
use crate::table::{self, Slots};
use core::fmt;

/// Names one payload of one table. The generation moves each time the slot is released and wraps after 2^22 payloads in
/// one slot; until then an id of an earlier payload is always told from that of a live one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PayloadId {
    slot: u32,
    generation: u32,
}

impl PayloadId {
    /// From its parts, as a ticket carries them. Any numbers are legal; what names no live payload is refused.
    #[must_use]
    pub const fn from_parts(slot: u32, generation: u32) -> Self {
        Self { slot, generation }
    }

    /// Its place in the table, below the table's capacity: for a parallel array of the caller's own.
    #[must_use]
    pub const fn slot(self) -> u32 {
        self.slot
    }

    /// Which of the payloads in this slot; below 2^22.
    #[must_use]
    pub const fn generation(self) -> u32 {
        self.generation
    }
}

/// For how many consumers a payload is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Consumers {
    /// For this many: when each has had it, it ends. At least one, [`MAX_CONSUMERS`] at most.
    Count(u32),
    /// For any number: it ends by removal, replacement or expiry only.
    Unlimited,
}

/// What is published.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Publication {
    /// Bytes; [`MAX_PAYLOAD`] at most.
    pub len: u64,
    /// How many of them can be read already: `len` unless it is still being filled.
    pub filled: u64,
    /// For whom.
    pub consumers: Consumers,
    /// How long it is kept after its last use, in nanoseconds; [`Ticks::MAX`] for ever.
    pub keep: Ticks,
}

/// What an event has led to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// The payload is still there.
    Kept {
        /// Who reads it.
        readers: u32,
    },
    /// This very event ended it: nobody reads it, and nobody will. Exactly one caller is told; that one frees the
    /// memory and releases the slot.
    Ended(End),
}

/// Whether a reader has had the payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Use {
    /// It has: one consumer less to wait for.
    Consumed,
    /// It has not: its place is another's, or its own at the next try.
    Returned,
}

/// Why an owner ends a payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Removal {
    /// It is to go.
    Removed,
    /// Another takes its place.
    Replaced,
}

/// What an expiry found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expiry {
    /// Someone reads it: it does not expire.
    InUse {
        /// How many.
        readers: u32,
    },
    /// It is kept until then; look again no earlier.
    NotBefore(Ticks),
    /// It has expired by this call: free the memory and release the slot.
    Ended,
}

// The words of a slot.
const STATE: usize = 0;
const EXPIRES: usize = 1;
const KEEP: usize = 2;
const WATERMARK: usize = 3;
const LEN: usize = 4;
const WIDTH: usize = 5;

/// Words of storage for a table of `capacity` payloads, 2^16 at most.
#[must_use]
pub const fn payload_words(capacity: usize) -> usize {
    table::words(capacity, WIDTH)
}

/// A fixed number of published payloads; see the [module](super). Any thread may call anything.
#[derive(Debug)]
pub struct PayloadTable<S> {
    slots: Slots<S, WIDTH>,
}

impl<S: AsRef<[Word]>> PayloadTable<S> {
    /// A table of as many payloads as the storage holds, all free, whatever the storage held.
    pub fn new(storage: S) -> Self {
        Self { slots: Slots::new(storage) }
    }

    /// Payloads that the table holds.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.slots.capacity()
    }

    /// A new payload, live from now on.
    ///
    /// # Errors
    /// Every slot was taken at one moment of the call, or the publication is not legal.
    pub fn publish(&self, publication: Publication, now: Ticks) -> Result<PayloadId, PublishError> {
        let Publication { len, filled, consumers, keep } = publication;
        let seats = match consumers {
            Consumers::Unlimited => UNLIMITED,
            Consumers::Count(n @ 1..=MAX_CONSUMERS) => n,
            Consumers::Count(consumers) => return Err(PublishError::Consumers { consumers }),
        };
        if len > MAX_PAYLOAD || filled > len {
            return Err(PublishError::Length { len, filled });
        }
        let full = PublishError::Full { capacity: self.capacity() };
        let slot = self.slots.take().ok_or(full)?;
        let words = self.slots.get(slot).ok_or(full)?;
        let free = State::unpack(words[STATE].load(Ordering::Relaxed));
        words[EXPIRES].store(now.saturating_add(keep), Ordering::Relaxed);
        words[KEEP].store(keep, Ordering::Relaxed);
        words[LEN].store(len, Ordering::Relaxed);
        // Exchanged, not stored: one who still fills the payload before may be in the middle of a compare-and-swap.
        let mark = pack_watermark(free.generation, filled);
        let Ok(_) = words[WATERMARK].update(|_| Ok::<_, core::convert::Infallible>(mark));
        let live = State { phase: PayloadPhase::Live, readers: 0, seats, ..free };
        words[STATE].store(live.pack(), Ordering::Release);
        Ok(PayloadId { slot, generation: free.generation })
    }

    /// Begins to read: the payload stays until the `close` that belongs to this call. Gives its watermark.
    ///
    /// # Errors
    /// It is gone or going, or all its consumers are served or being served.
    pub fn open(&self, id: PayloadId) -> Result<u64, PayloadRefused> {
        self.step(id, |state| {
            if state.phase != PayloadPhase::Live {
                return Err(PayloadRefused::Ended { id, end: state.end });
            }
            if state.seats == 0 || state.readers == MAX_READERS {
                return Err(PayloadRefused::Taken { id, readers: state.readers });
            }
            let seats = if state.seats == UNLIMITED { UNLIMITED } else { state.seats - 1 };
            Ok(State { readers: state.readers + 1, seats, ..state })
        })?;
        self.watermark(id)
    }

    /// Ends one reading, by a reader that opened it and did not close it yet.
    ///
    /// # Errors
    /// Nobody reads it, or the id is stale: a second close.
    pub fn close(&self, id: PayloadId, how: Use, now: Ticks) -> Result<Progress, PayloadRefused> {
        let words = self.slots.get(id.slot).ok_or(PayloadRefused::Unknown { id })?;
        if self.look(id)?.readers == 0 {
            return Err(PayloadRefused::NotOpen { id });
        }
        // Before the reader leaves: who finds no reader finds this time.
        let keep = words[KEEP].load(Ordering::Relaxed);
        if !mutant("last use not noted") {
            words[EXPIRES].fetch_max(now.saturating_add(keep), Ordering::Relaxed);
        }
        self.step(id, |state| {
            let readers = state.readers.checked_sub(1).ok_or(PayloadRefused::NotOpen { id })?;
            let back = how == Use::Returned && state.seats != UNLIMITED;
            let seats = if back { (state.seats + 1).min(MAX_CONSUMERS) } else { state.seats };
            let uses = state.uses.wrapping_add(u32::from(!mutant("use not counted")));
            Ok(settle(State { readers, seats, uses, ..state }))
        })
    }

    /// Ends the payload for new readers, and altogether if nobody reads it.
    ///
    /// # Errors
    /// It is gone or going already.
    pub fn remove(&self, id: PayloadId, why: Removal) -> Result<Progress, PayloadRefused> {
        let end = match why {
            Removal::Removed => End::Removed,
            Removal::Replaced => End::Replaced,
        };
        self.step(id, |state| {
            if state.phase != PayloadPhase::Live {
                return Err(PayloadRefused::Ended { id, end: state.end });
            }
            Ok(settle(State { phase: PayloadPhase::Retiring, end, ..state }))
        })
    }

    /// Ends the payload if nobody reads it and `keep` has passed since its last use: since it was published, or since
    /// the last reader left.
    ///
    /// # Errors
    /// It is gone or going already.
    pub fn expire(&self, id: PayloadId, now: Ticks) -> Result<Expiry, PayloadRefused> {
        let words = self.slots.get(id.slot).ok_or(PayloadRefused::Unknown { id })?;
        let mut found = Expiry::Ended;
        let stepped = self.step(id, |state| {
            if state.phase != PayloadPhase::Live {
                return Err(PayloadRefused::Ended { id, end: state.end });
            }
            if state.readers > 0 {
                found = Expiry::InUse { readers: state.readers };
                return Err(PayloadRefused::NotOpen { id });
            }
            // Read after the state: it is at least as new as the last close that the state shows.
            let expires = words[EXPIRES].load(Ordering::Relaxed);
            if now < expires || expires == Ticks::MAX {
                found = Expiry::NotBefore(expires);
                return Err(PayloadRefused::NotOpen { id });
            }
            found = Expiry::Ended;
            Ok(State { phase: PayloadPhase::Ended, end: End::Expired, ..state })
        });
        match stepped {
            Ok(_) => Ok(Expiry::Ended),
            Err(PayloadRefused::NotOpen { .. }) => Ok(found),
            Err(refused) => Err(refused),
        }
    }

    /// Bytes up to `filled` can be read from now on. What was written before this call is seen by whoever reads the
    /// watermark and finds it raised. It never falls.
    ///
    /// # Errors
    /// It is gone, or `filled` is beyond its length.
    pub fn fill(&self, id: PayloadId, filled: u64) -> Result<(), PayloadRefused> {
        let words = self.slots.get(id.slot).ok_or(PayloadRefused::Unknown { id })?;
        self.look(id)?;
        let len = words[LEN].load(Ordering::Relaxed);
        if filled > len {
            return Err(PayloadRefused::BeyondEnd { id, filled, len });
        }
        words[WATERMARK]
            .update(|word| {
                let before = unpack_watermark(id.generation, word).ok_or(PayloadRefused::Stale { id })?;
                Ok(pack_watermark(id.generation, before.max(filled)))
            })
            .map(|_| ())
    }

    /// How many bytes can be read.
    ///
    /// # Errors
    /// The id is stale.
    pub fn watermark(&self, id: PayloadId) -> Result<u64, PayloadRefused> {
        let words = self.slots.get(id.slot).ok_or(PayloadRefused::Unknown { id })?;
        self.look(id)?;
        let word = words[WATERMARK].load(Ordering::Acquire);
        unpack_watermark(id.generation, word).ok_or(PayloadRefused::Stale { id })
    }

    /// Phase and number of readers, at about the time of the call.
    ///
    /// # Errors
    /// The id is stale.
    pub fn phase(&self, id: PayloadId) -> Result<(PayloadPhase, u32), PayloadRefused> {
        self.look(id).map(|state| (state.phase, state.readers))
    }

    /// Gives the slot of a payload that has ended back; every copy of its id is stale from then on.
    ///
    /// # Errors
    /// It has not ended, or was released before.
    pub fn release(&self, id: PayloadId) -> Result<End, PayloadRefused> {
        let mut end = End::Removed;
        self.step(id, |state| {
            if state.phase != PayloadPhase::Ended {
                return Err(PayloadRefused::NotEnded { id, readers: state.readers });
            }
            end = state.end;
            let generation = state.generation.wrapping_add(1) & GENERATION;
            Ok(State { generation, phase: PayloadPhase::Free, ..state })
        })?;
        self.slots.give(id.slot);
        Ok(end)
    }

    fn look(&self, id: PayloadId) -> Result<State, PayloadRefused> {
        let words = self.slots.get(id.slot).ok_or(PayloadRefused::Unknown { id })?;
        let state = State::unpack(words[STATE].load(Ordering::Acquire));
        if stale(id, state) { Err(PayloadRefused::Stale { id }) } else { Ok(state) }
    }

    fn step(
        &self,
        id: PayloadId,
        mut step: impl FnMut(State) -> Result<State, PayloadRefused>,
    ) -> Result<Progress, PayloadRefused> {
        let words = self.slots.get(id.slot).ok_or(PayloadRefused::Unknown { id })?;
        let (_, after) = words[STATE].update(|word| {
            let state = State::unpack(word);
            if stale(id, state) { Err(PayloadRefused::Stale { id }) } else { step(state).map(State::pack) }
        })?;
        let after = State::unpack(after);
        Ok(match after.phase {
            PayloadPhase::Ended => Progress::Ended(after.end),
            _ => Progress::Kept { readers: after.readers },
        })
    }
}

fn stale(id: PayloadId, state: State) -> bool {
    state.generation != id.generation || state.phase == PayloadPhase::Free
}

/// Ends a payload that nobody reads and nobody will.
fn settle(state: State) -> State {
    match state.phase {
        PayloadPhase::Live if state.readers == 0 && state.seats == 0 => {
            State { phase: PayloadPhase::Ended, end: End::Consumed, ..state }
        }
        PayloadPhase::Retiring if state.readers == 0 || mutant("ended under its readers") => {
            State { phase: PayloadPhase::Ended, ..state }
        }
        _ => state,
    }
}

/// Why nothing was published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PublishError {
    /// Every slot of the table is taken: wait for a payload to end.
    Full {
        /// How many there are.
        capacity: usize,
    },
    /// For no consumer, or for more than [`MAX_CONSUMERS`].
    Consumers {
        /// As given.
        consumers: u32,
    },
    /// Longer than [`MAX_PAYLOAD`], or filled beyond its length.
    Length {
        /// As given, in bytes.
        len: u64,
        /// As given, in bytes.
        filled: u64,
    },
}

impl fmt::Display for PublishError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full { capacity } => write!(f, "publish: all {capacity} payload slots are taken; remove one or wait"),
            Self::Consumers { consumers } => {
                write!(f, "publish: for {consumers} consumers; must be 1 to {MAX_CONSUMERS}, or any number")
            }
            Self::Length { len, filled } => {
                write!(f, "publish: {filled} of {len} bytes filled; at most all, and {MAX_PAYLOAD} bytes")
            }
        }
    }
}

impl core::error::Error for PublishError {}

/// Why an event was refused. Nothing has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PayloadRefused {
    /// The table has no such slot.
    Unknown {
        /// As given.
        id: PayloadId,
    },
    /// The payload was released; its slot is free or has another payload.
    Stale {
        /// As given.
        id: PayloadId,
    },
    /// The payload has ended, or takes no new readers and will end.
    Ended {
        /// As given.
        id: PayloadId,
        /// Why.
        end: End,
    },
    /// All consumers that it is for have had it or are reading it: a retry helps if one of them gives it back.
    Taken {
        /// As given.
        id: PayloadId,
        /// Who reads it.
        readers: u32,
    },
    /// A close without an open.
    NotOpen {
        /// As given.
        id: PayloadId,
    },
    /// A release before the end.
    NotEnded {
        /// As given.
        id: PayloadId,
        /// Who reads it.
        readers: u32,
    },
    /// A watermark beyond the payload's end.
    BeyondEnd {
        /// As given.
        id: PayloadId,
        /// As given, in bytes.
        filled: u64,
        /// The payload's length in bytes.
        len: u64,
    },
}

impl fmt::Display for PayloadRefused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Unknown { id }
        | Self::Stale { id }
        | Self::Ended { id, .. }
        | Self::Taken { id, .. }
        | Self::NotOpen { id }
        | Self::NotEnded { id, .. }
        | Self::BeyondEnd { id, .. }) = self;
        write!(f, "payload {} generation {}: ", id.slot, id.generation)?;
        match self {
            Self::Unknown { .. } => f.write_str("no such slot in this table"),
            Self::Stale { .. } => f.write_str("stale, it was released"),
            Self::Ended { end, .. } => write!(f, "takes no new readers: {end:?}"),
            Self::Taken { readers, .. } => write!(f, "all consumers served or being served, {readers} read it now"),
            Self::NotOpen { .. } => f.write_str("nobody reads it"),
            Self::NotEnded { readers, .. } => write!(f, "has not ended, {readers} read it"),
            Self::BeyondEnd { filled, len, .. } => write!(f, "filled to {filled} of {len} bytes"),
        }
    }
}

impl core::error::Error for PayloadRefused {}
