//! The one word that a transfer's state is.

use super::id::{GENERATION, MAX_CHUNK};

/// Where a transfer is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Phase {
    /// No transfer: the slot is free.
    Free = 0,
    /// Nothing posted yet.
    Created = 1,
    /// Work was posted, all of it that is done went well, and more may be posted.
    Posted = 2,
    /// As `Posted`, but no more will be posted: the last completion ends it.
    Finishing = 3,
    /// It will not succeed; some of its work is still outstanding, and its memory may still be touched.
    Fencing = 4,
    /// As `Fencing`, and the caller has left: the memory is the transport's until the fence (I3).
    Quarantined = 5,
    /// All its work ended well.
    Succeeded = 6,
    /// It failed, and nothing is outstanding.
    Failed = 7,
    /// Its deadline passed, and nothing is outstanding.
    TimedOut = 8,
    /// It was cancelled, and nothing is outstanding.
    Cancelled = 9,
}

impl Phase {
    /// All phases.
    pub const ALL: [Self; 10] = [
        Self::Free,
        Self::Created,
        Self::Posted,
        Self::Finishing,
        Self::Fencing,
        Self::Quarantined,
        Self::Succeeded,
        Self::Failed,
        Self::TimedOut,
        Self::Cancelled,
    ];

    /// Whether the transfer has ended: nothing is outstanding, its memory is its owner's again, and only `release` is
    /// left to do.
    #[must_use]
    pub const fn is_terminal(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed | Self::TimedOut | Self::Cancelled)
    }
}

/// Why a piece of work or a transfer failed: a number of the caller's choosing, kept and given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Cause(pub u8);

/// How a transfer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// All its work ended well.
    Succeeded,
    /// The first failure's cause.
    Failed(Cause),
    /// Given up because a deadline passed.
    TimedOut,
    /// Given up because its owner wanted so.
    Cancelled,
}

/// Why a transfer is given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// A deadline passed.
    TimedOut,
    /// Its owner wants no more of it.
    Cancelled,
    /// Something outside its own work requests failed.
    Failed(Cause),
}

/// A transfer's state as one load saw it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct State {
    pub(super) generation: u32,
    pub(super) decided: Reason,
    /// Where it is in its life.
    pub phase: Phase,
    /// Pieces of work posted and not yet completed; 2^22 - 1 at most.
    pub outstanding: u32,
}

// From the lowest bit: outstanding (22), cause (8), reason (2), phase (4), two bits unused, generation (26).
const CAUSE_SHIFT: u32 = 22;
const REASON_SHIFT: u32 = 30;
const PHASE_SHIFT: u32 = 32;
const GENERATION_SHIFT: u32 = 38;

impl State {
    /// How the transfer ended or, while it is being fenced, will have ended; `None` if that is open.
    #[must_use]
    pub const fn outcome(self) -> Option<Outcome> {
        match self.phase {
            Phase::Free | Phase::Created | Phase::Posted | Phase::Finishing => None,
            Phase::Succeeded => Some(Outcome::Succeeded),
            _ => Some(match self.decided {
                Reason::TimedOut => Outcome::TimedOut,
                Reason::Cancelled => Outcome::Cancelled,
                Reason::Failed(cause) => Outcome::Failed(cause),
            }),
        }
    }

    /// The terminal phase that the reason decided on.
    pub(super) const fn decided_phase(self) -> Phase {
        match self.decided {
            Reason::TimedOut => Phase::TimedOut,
            Reason::Cancelled => Phase::Cancelled,
            Reason::Failed(_) => Phase::Failed,
        }
    }

    #[inline]
    pub(super) const fn unpack(word: u64) -> Self {
        let cause = Cause((word >> CAUSE_SHIFT) as u8);
        Self {
            generation: (word >> GENERATION_SHIFT) as u32,
            decided: match (word >> REASON_SHIFT) & 3 {
                0 => Reason::Failed(cause),
                1 => Reason::TimedOut,
                _ => Reason::Cancelled,
            },
            // The field is four bits wide; only the ten phases are ever packed.
            phase: match (word >> PHASE_SHIFT) & 15 {
                1 => Phase::Created,
                2 => Phase::Posted,
                3 => Phase::Finishing,
                4 => Phase::Fencing,
                5 => Phase::Quarantined,
                6 => Phase::Succeeded,
                7 => Phase::Failed,
                8 => Phase::TimedOut,
                9 => Phase::Cancelled,
                _ => Phase::Free,
            },
            outstanding: word as u32 & MAX_CHUNK,
        }
    }

    #[inline]
    pub(super) const fn pack(self) -> u64 {
        let (reason, cause) = match self.decided {
            Reason::Failed(Cause(cause)) => (0, cause),
            Reason::TimedOut => (1, 0),
            Reason::Cancelled => (2, 0),
        };
        (self.outstanding & MAX_CHUNK) as u64
            | (cause as u64) << CAUSE_SHIFT
            | reason << REASON_SHIFT
            | (self.phase as u64) << PHASE_SHIFT
            | ((self.generation & GENERATION) as u64) << GENERATION_SHIFT
    }
}
