//! The table: transfers by id, each event one compare-and-swap on the transfer's word.

use super::id::{GENERATION, Immediate, MAX_CHUNK, TransferId};
use super::state::{Cause, Outcome, Phase, Reason, State};
use super::transitions::{Event, Target, next};
use crate::sync::{Ordering, Word, mutant};
use crate::table::{self, MAX_SLOTS, Slots};
use core::fmt;

/// A fixed number of transfers; see the [module](super).
#[derive(Debug)]
pub struct TransferTable<S> {
    slots: Slots<S, 1>,
}

/// What an event has led to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Not ended.
    Pending {
        /// Pieces of work outstanding.
        left: u32,
    },
    /// This very event ended the transfer: nothing is outstanding, and its memory is touched no more. Exactly one
    /// caller is told.
    Fenced(Outcome),
}

/// Transfers in one table at most: a slot number has 16 bits.
pub const MAX_TRANSFERS: usize = MAX_SLOTS;

/// Words of storage for a table of `capacity` transfers.
#[must_use]
pub const fn storage_words(capacity: usize) -> usize {
    table::words(capacity, 1)
}

impl<S: AsRef<[Word]>> TransferTable<S> {
    /// A table of as many transfers as the storage holds, [`MAX_TRANSFERS`] at most, all free, whatever the storage held.
    pub fn new(storage: S) -> Self {
        Self { slots: Slots::new(storage) }
    }

    /// Transfers that the table holds.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.slots.capacity()
    }

    /// A new transfer, in [`Phase::Created`].
    ///
    /// # Errors
    /// At one moment of the call every slot was taken.
    pub fn create(&self) -> Result<TransferId, TableFull> {
        let full = TableFull { capacity: self.capacity() };
        let slot = self.slots.take().ok_or(full)?;
        let [word] = self.slots.get(slot).ok_or(full)?;
        // The slot is ours alone: whoever still has an id of it is refused by the generation, and a compare-and-swap
        // of one who loaded the word before its release fails. So a store will do.
        let free = State::unpack(word.load(Ordering::Relaxed));
        let created = apply(free, Event::Create, 0, None).map_or(free, |(state, _)| state);
        word.store(created.pack(), Ordering::Release);
        Ok(TransferId::new(slot, free.generation))
    }

    /// `n` pieces of work are about to be posted. Call it before the first of them can complete.
    ///
    /// # Errors
    /// The transfer takes no more work; then none of it may be posted.
    pub fn post(&self, id: TransferId, n: u32) -> Result<(), Refused> {
        if n == 0 {
            return self.state(id).map(|_| ());
        }
        self.step(id, |state| {
            let outstanding = state.outstanding.checked_add(n).filter(|&sum| sum <= MAX_CHUNK);
            let outstanding = outstanding.ok_or(Refused::TooMany { id, outstanding: state.outstanding, more: n })?;
            apply(state, Event::Post, outstanding, None).ok_or_else(|| refusal(id, state))
        })
        .map(|_| ())
    }

    /// No more work will be posted.
    ///
    /// # Errors
    /// It was said before, or the transfer will not succeed.
    pub fn finish(&self, id: TransferId) -> Result<Progress, Refused> {
        self.step(id, |state| apply(state, Event::Finish, state.outstanding, None).ok_or_else(|| refusal(id, state)))
    }

    /// One outstanding piece of work has ended: well, or not (a flushed one has not).
    ///
    /// The first failure decides the outcome, unless the transfer was abandoned before.
    ///
    /// # Errors
    /// Nothing is outstanding, or the id is stale: the completion is not of this transfer.
    pub fn complete(&self, id: TransferId, result: Result<(), Cause>) -> Result<Progress, Refused> {
        let (event, reason) = match result {
            Ok(()) => (Event::CompleteOk, None),
            Err(cause) => (Event::CompleteError, Some(Reason::Failed(cause))),
        };
        self.step(id, |state| {
            let left = state.outstanding.checked_sub(1).ok_or_else(|| refusal(id, state))?;
            apply(state, event, left, reason).ok_or_else(|| refusal(id, state))
        })
    }

    /// Gives the transfer up. With work outstanding it is fencing from then on, until the last piece has completed.
    ///
    /// # Errors
    /// It has ended or was given up before: the first reason stands.
    pub fn abandon(&self, id: TransferId, reason: Reason) -> Result<Progress, Refused> {
        self.step(id, |state| {
            apply(state, Event::Abandon, state.outstanding, Some(reason)).ok_or_else(|| refusal(id, state))
        })
    }

    /// The caller leaves before the fence of a transfer that is fencing: from then on the memory is the transport's,
    /// until an event says [`Progress::Fenced`] (I3).
    ///
    /// # Errors
    /// It is not fencing. [`Refused::Ended`] says that the fence came first, and that the memory is the caller's.
    pub fn quarantine(&self, id: TransferId) -> Result<Progress, Refused> {
        self.step(id, |state| {
            apply(state, Event::Quarantine, state.outstanding, None).ok_or_else(|| refusal(id, state))
        })
    }

    /// Everything outstanding of a transfer that is fencing or quarantined is known to be fenced without completions:
    /// the queue pair was destroyed, the copier has left. Completions that come all the same are refused.
    ///
    /// # Errors
    /// It is not fencing: abandon it first, or it has ended.
    pub fn fence(&self, id: TransferId) -> Result<Progress, Refused> {
        self.step(id, |state| apply(state, Event::Fence, 0, None).ok_or_else(|| refusal(id, state)))
    }

    /// Gives the slot of a transfer that has ended back; every copy of its id is stale from then on.
    ///
    /// # Errors
    /// It has not ended, or was released before.
    pub fn release(&self, id: TransferId) -> Result<Outcome, Refused> {
        let mut outcome = None;
        self.step(id, |state| {
            outcome = state.outcome();
            let (mut next, progress) = apply(state, Event::Release, 0, None).ok_or_else(|| refusal(id, state))?;
            next.generation =
                next.generation.wrapping_add(u32::from(!mutant("transfer generation stays"))) & GENERATION;
            Ok((next, progress))
        })?;
        self.slots.give(id.slot());
        outcome.ok_or(Refused::Unknown { id })
    }

    /// The transfer's state at about the time of the call.
    ///
    /// # Errors
    /// The id is stale.
    pub fn state(&self, id: TransferId) -> Result<State, Refused> {
        let [word] = self.slots.get(id.slot()).ok_or(Refused::Unknown { id })?;
        let state = State::unpack(word.load(Ordering::Acquire));
        if stale(id, state) { Err(Refused::Stale { id }) } else { Ok(state) }
    }

    /// The live transfer that a peer's immediate names; `None` if there is none, or another in its slot.
    #[must_use]
    pub fn resolve(&self, immediate: Immediate) -> Option<TransferId> {
        let [word] = self.slots.get(immediate.slot())?;
        let state = State::unpack(word.load(Ordering::Acquire));
        (state.phase != Phase::Free && immediate.names(state.generation))
            .then(|| TransferId::new(immediate.slot(), state.generation))
    }

    #[inline]
    fn step(
        &self,
        id: TransferId,
        mut step: impl FnMut(State) -> Result<(State, Progress), Refused>,
    ) -> Result<Progress, Refused> {
        let [word] = self.slots.get(id.slot()).ok_or(Refused::Unknown { id })?;
        let mut told = Progress::Pending { left: 0 };
        word.update(|bits| {
            let state = State::unpack(bits);
            if stale(id, state) {
                return Err(Refused::Stale { id });
            }
            let (state, progress) = step(state)?;
            told = progress;
            Ok(state.pack())
        })?;
        Ok(told)
    }
}

fn stale(id: TransferId, state: State) -> bool {
    !mutant("transfer ids not checked") && (state.generation != id.generation() || state.phase == Phase::Free)
}

fn refusal(id: TransferId, state: State) -> Refused {
    match state.outcome() {
        Some(outcome) if state.phase.is_terminal() => Refused::Ended { id, outcome },
        _ => Refused::NotNow { id, phase: state.phase, outstanding: state.outstanding },
    }
}

/// The state after `event` with `left` outstanding, and what its bringer is told; `None` if the table has no such row.
/// A reason counts only if none has been decided on before.
#[inline]
fn apply(state: State, event: Event, left: u32, reason: Option<Reason>) -> Option<(State, Progress)> {
    let target = next(state.phase, event, left > 0)?;
    let open = matches!(state.phase, Phase::Created | Phase::Posted | Phase::Finishing);
    let mut after = State { outstanding: left, ..state };
    if let (true, Some(reason)) = (open || mutant("transfer end decided anew"), reason) {
        after.decided = reason;
    }
    after.phase = match target {
        Target::To(phase) => phase,
        Target::Decided => after.decided_phase(),
    };
    let progress = match after.outcome() {
        Some(outcome) if after.phase.is_terminal() => Progress::Fenced(outcome),
        _ => Progress::Pending { left },
    };
    Some((after, progress))
}

/// Every slot of the table is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableFull {
    /// How many there are.
    pub capacity: usize,
}

impl fmt::Display for TableFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "all {} slots of the table are taken; release one or wait", self.capacity)
    }
}

impl core::error::Error for TableFull {}

/// Why an event was refused. Nothing has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refused {
    /// The table has no such slot: the id is of another table, or no id at all.
    Unknown {
        /// As given.
        id: TransferId,
    },
    /// The transfer was released; its slot is free or has another transfer.
    Stale {
        /// As given.
        id: TransferId,
    },
    /// Late: the transfer has ended.
    Ended {
        /// As given.
        id: TransferId,
        /// How it ended.
        outcome: Outcome,
    },
    /// The transfer lives, but the event is not legal in its phase: a completion with nothing outstanding, a second
    /// finish or abandonment, a release before the end.
    NotNow {
        /// As given.
        id: TransferId,
        /// The phase it is in.
        phase: Phase,
        /// Pieces of work outstanding.
        outstanding: u32,
    },
    /// More work than a transfer can have outstanding, 2^22 - 1 pieces: post less at a time.
    TooMany {
        /// As given.
        id: TransferId,
        /// Pieces of work outstanding.
        outstanding: u32,
        /// Pieces that were to be added.
        more: u32,
    },
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Unknown { id }
        | Self::Stale { id }
        | Self::Ended { id, .. }
        | Self::NotNow { id, .. }
        | Self::TooMany { id, .. }) = self;
        write!(f, "transfer {} generation {}: ", id.slot(), id.generation())?;
        match self {
            Self::Unknown { .. } => f.write_str("no such slot in this table"),
            Self::Stale { .. } => f.write_str("stale, it was released"),
            Self::Ended { outcome, .. } => write!(f, "late, it has ended: {outcome:?}"),
            Self::NotNow { phase, outstanding, .. } => {
                write!(f, "not legal in phase {phase:?} with {outstanding} outstanding")
            }
            Self::TooMany { outstanding, more, .. } => {
                write!(f, "{outstanding} outstanding and {more} more exceed {MAX_CHUNK}")
            }
        }
    }
}

impl core::error::Error for Refused {}
