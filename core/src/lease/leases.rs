//! Leases: each ends exactly once, by being closed or by its deadline.

use super::payloads::PayloadId;
use crate::Ticks;
use crate::sync::{Ordering, Word, mutant};
use crate::table::{self, Slots};
use crate::transfer::TableFull;
use core::fmt;

/// Names one lease of one table. The generation wraps after 2^31 leases in one slot; until then an id of an earlier lease
/// is always told from that of a live one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LeaseId {
    slot: u32,
    generation: u32,
}

impl LeaseId {
    /// From its parts, as a peer gives them. Any numbers are legal; what names no live lease is refused.
    #[must_use]
    pub const fn from_parts(slot: u32, generation: u32) -> Self {
        Self { slot, generation }
    }

    /// Its place in the table, below the table's capacity: for a parallel array of the caller's own.
    #[must_use]
    pub const fn slot(self) -> u32 {
        self.slot
    }

    /// Which of the leases in this slot; below 2^31.
    #[must_use]
    pub const fn generation(self) -> u32 {
        self.generation
    }
}

/// What an expiry found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseExpiry {
    /// The lease runs until then; look again no earlier.
    NotBefore(Ticks),
    /// It has ended by this call: close this payload for it.
    Ended(PayloadId),
}

// The words of a slot. The state is: generation (31 bits), live (1), renewals (32). The count of renewals makes an
// expiry that looked at the deadline before a renewal fail and look again.
const STATE: usize = 0;
const DEADLINE: usize = 1;
const PAYLOAD: usize = 2;
const WIDTH: usize = 3;
const LIVE: u64 = 1 << 32;
const GENERATION_SHIFT: u32 = 33;
const GENERATION: u64 = (1 << 31) - 1;

/// Words of storage for a table of `capacity` leases, 2^16 at most.
#[must_use]
pub const fn lease_words(capacity: usize) -> usize {
    table::words(capacity, WIDTH)
}

/// A fixed number of leases; see the [module](super). Any thread may call anything.
#[derive(Debug)]
pub struct LeaseTable<S> {
    slots: Slots<S, WIDTH>,
}

impl<S: AsRef<[Word]>> LeaseTable<S> {
    /// A table of as many leases as the storage holds, all free, whatever the storage held.
    pub fn new(storage: S) -> Self {
        Self { slots: Slots::new(storage) }
    }

    /// Leases that the table holds.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.slots.capacity()
    }

    /// A lease on a payload that its caller has opened, until `deadline`.
    ///
    /// # Errors
    /// Every slot was taken at one moment of the call: close the payload again.
    pub fn grant(&self, payload: PayloadId, deadline: Ticks) -> Result<LeaseId, TableFull> {
        let full = TableFull { capacity: self.capacity() };
        let slot = self.slots.take().ok_or(full)?;
        let words = self.slots.get(slot).ok_or(full)?;
        let generation = words[STATE].load(Ordering::Relaxed) >> GENERATION_SHIFT;
        words[DEADLINE].store(deadline, Ordering::Relaxed);
        words[PAYLOAD].store(u64::from(payload.slot()) << 32 | u64::from(payload.generation()), Ordering::Relaxed);
        words[STATE].store(generation << GENERATION_SHIFT | LIVE, Ordering::Release);
        Ok(LeaseId { slot, generation: generation as u32 })
    }

    /// Moves the deadline to `deadline`, if that is later than it is.
    ///
    /// # Errors
    /// The lease has ended, or the id is stale: what was read under it may not be delivered (I4).
    pub fn renew(&self, id: LeaseId, deadline: Ticks) -> Result<(), LeaseRefused> {
        let words = self.slots.get(id.slot).ok_or(LeaseRefused::Unknown { id })?;
        let state = words[STATE].load(Ordering::Acquire);
        live(id, state)?;
        // The deadline first: an expiry that sees this renewal counted sees its deadline. If the lease ends in between
        // its deadline no longer matters; if the slot has another lease already, that one's is moved out at most.
        if !mutant("renewal counted first") {
            words[DEADLINE].fetch_max(deadline, Ordering::Relaxed);
        }
        words[STATE]
            .update(|state| {
                live(id, state)?;
                Ok(state & !0xffff_ffff
                    | u64::from((state as u32).wrapping_add(u32::from(!mutant("renewal not counted")))))
            })
            .map(|_| {
                if mutant("renewal counted first") {
                    words[DEADLINE].fetch_max(deadline, Ordering::Relaxed);
                }
            })
    }

    /// Ends the lease because its holder is done; gives the payload to close for it.
    ///
    /// # Errors
    /// It has ended: its payload was or is being closed by who was told so.
    pub fn close(&self, id: LeaseId) -> Result<PayloadId, LeaseRefused> {
        let words = self.slots.get(id.slot).ok_or(LeaseRefused::Unknown { id })?;
        words[STATE].update(|state| {
            live(id, state)?;
            Ok(after(state))
        })?;
        Ok(self.give(id.slot, words))
    }

    /// Ends the lease if its deadline has passed.
    ///
    /// # Errors
    /// It has ended: its payload was or is being closed by who was told so.
    pub fn expire(&self, id: LeaseId, now: Ticks) -> Result<LeaseExpiry, LeaseRefused> {
        let words = self.slots.get(id.slot).ok_or(LeaseRefused::Unknown { id })?;
        let mut deadline = 0;
        let ended = words[STATE].update(|state| {
            live(id, state).map_err(Some)?;
            // Read after the state: it is at least as new as the last renewal that the state counts.
            deadline = words[DEADLINE].load(Ordering::Relaxed);
            if now < deadline { Err(None) } else { Ok(after(state)) }
        });
        match ended {
            Ok(_) => Ok(LeaseExpiry::Ended(self.give(id.slot, words))),
            Err(None) => Ok(LeaseExpiry::NotBefore(deadline)),
            Err(Some(refused)) => Err(refused),
        }
    }

    /// The payload of a live lease, and its deadline at about the time of the call.
    ///
    /// # Errors
    /// It has ended.
    pub fn get(&self, id: LeaseId) -> Result<(PayloadId, Ticks), LeaseRefused> {
        let words = self.slots.get(id.slot).ok_or(LeaseRefused::Unknown { id })?;
        live(id, words[STATE].load(Ordering::Acquire))?;
        let found = (payload(words), words[DEADLINE].load(Ordering::Acquire));
        // If it lived all the while, what was read in between is its own.
        live(id, words[STATE].load(Ordering::Acquire))?;
        Ok(found)
    }

    /// By the one caller who ended the lease.
    fn give(&self, slot: u32, words: &[Word; WIDTH]) -> PayloadId {
        let payload = payload(words);
        self.slots.give(slot);
        payload
    }
}

fn payload(words: &[Word; WIDTH]) -> PayloadId {
    let bits = words[PAYLOAD].load(Ordering::Acquire);
    PayloadId::from_parts((bits >> 32) as u32, bits as u32)
}

fn live(id: LeaseId, state: u64) -> Result<(), LeaseRefused> {
    let generation = state >> GENERATION_SHIFT;
    if generation == u64::from(id.generation) && state & LIVE != 0 { Ok(()) } else { Err(LeaseRefused::Ended { id }) }
}

/// The state of the free slot after a lease.
fn after(state: u64) -> u64 {
    ((state >> GENERATION_SHIFT).wrapping_add(1) & GENERATION) << GENERATION_SHIFT
}

/// Why an event was refused. Nothing has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LeaseRefused {
    /// The table has no such slot.
    Unknown {
        /// As given.
        id: LeaseId,
    },
    /// The lease was closed, or its deadline passed.
    Ended {
        /// As given.
        id: LeaseId,
    },
}

impl fmt::Display for LeaseRefused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Unknown { id } | Self::Ended { id }) = self;
        write!(f, "lease {} generation {}: ", id.slot, id.generation)?;
        match self {
            Self::Unknown { .. } => f.write_str("no such slot in this table"),
            Self::Ended { .. } => f.write_str("has ended: it was closed, or its deadline passed"),
        }
    }
}

impl core::error::Error for LeaseRefused {}
