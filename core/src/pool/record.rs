//! One word for each granule: what the pool knows about the extent that begins there.
//!
//! A record is written only by the owner of its granule, but for the release of an extent, which is one
//! compare-and-swap on the record of its first granule: of two releases of one handle exactly one wins (I2).

use crate::sync::{Ordering, Word, mutant};

/// What a granule is to its extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// No extent begins here: free, or the inner part of one.
    None = 0,
    /// An extent begins here; the payload is its length in bytes.
    Whole = 1,
    /// One begins here whose length has two parts, as every length from 512 MiB on; the payload is the low part.
    First = 2,
    /// The second granule of such an extent; the payload is the high part of the length.
    Second = 3,
    /// An extent begins here whose length is being changed.
    Changing = 4,
}

/// An extent whose length needs more has two granules: no granule is larger than 2 MiB.
const PAYLOAD_BITS: u32 = 29;
const PAYLOAD: u64 = (1 << PAYLOAD_BITS) - 1;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) generation: u32,
    pub(super) kind: Kind,
    payload: u64,
}

impl Record {
    #[inline]
    fn unpack(word: u64) -> Self {
        let kind = match (word >> PAYLOAD_BITS) & 7 {
            1 => Kind::Whole,
            2 => Kind::First,
            3 => Kind::Second,
            4 => Kind::Changing,
            _ => Kind::None,
        };
        Self { generation: (word >> 32) as u32, kind, payload: word & PAYLOAD }
    }

    #[inline]
    fn pack(self) -> u64 {
        (u64::from(self.generation) << 32) | ((self.kind as u64) << PAYLOAD_BITS) | (self.payload & PAYLOAD)
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Records<'a> {
    /// The pool's storage, in which the records begin at `first`.
    pub(super) words: &'a [Word],
    pub(super) first: usize,
}

impl Records<'_> {
    pub(super) fn set_up(self, granules: u64) {
        self.words[self.first..self.first + granules as usize].iter().for_each(|word| word.set_up(0));
    }

    #[inline]
    fn word(&self, granule: u64) -> &Word {
        &self.words[self.first + granule as usize]
    }

    #[inline]
    fn load(self, granule: u64) -> Record {
        Record::unpack(self.word(granule).load(Ordering::Acquire))
    }

    #[inline]
    fn store(self, granule: u64, kind: Kind, payload: u64, order: Ordering) -> u32 {
        let word = self.word(granule);
        let generation = Record::unpack(word.load(Ordering::Relaxed)).generation;
        word.store(Record { generation, kind, payload }.pack(), order);
        generation
    }

    /// Enters an extent whose granules the caller has; gives its generation.
    #[inline]
    pub(super) fn enter(self, first: u64, len: u64) -> u32 {
        if len <= PAYLOAD {
            return self.store(first, Kind::Whole, len, Ordering::Release);
        }
        self.store(first + 1, Kind::Second, len >> PAYLOAD_BITS, Ordering::Relaxed);
        self.store(first, Kind::First, len & PAYLOAD, Ordering::Release)
    }

    /// The record at `granule`, and the length in bytes of the extent that begins there, if one does.
    #[inline]
    pub(super) fn look_up(self, granule: u64) -> (Record, Option<u64>) {
        loop {
            let record = self.load(granule);
            let len = match record.kind {
                Kind::Whole => Some(record.payload),
                Kind::First => Some((self.load(granule + 1).payload << PAYLOAD_BITS) | record.payload),
                _ => None,
            };
            // The second record belongs to the first only if that has not changed meanwhile.
            if record.kind != Kind::First || self.load(granule) == record {
                return (record, len);
            }
        }
    }

    /// Ends the extent that begins at `granule` if it has this generation and length, which is short enough for one word;
    /// true for one caller only, who then has its granules. False says nothing.
    #[inline]
    pub(super) fn end_at_once(self, granule: u64, generation: u32, len: u64) -> bool {
        if len > PAYLOAD {
            return false;
        }
        let seen = Record { generation, kind: Kind::Whole, payload: len };
        let after = Record { generation: generation.wrapping_add(1), kind: Kind::None, payload: 0 };
        self.word(granule).compare_exchange(seen.pack(), after.pack(), Ordering::AcqRel, Ordering::Relaxed).is_ok()
            || mutant("extent ended twice")
    }

    /// Ends the extent that `seen` describes: true for one caller only, who then has its granules.
    #[inline]
    pub(super) fn end(self, granule: u64, seen: Record, kind: Kind) -> bool {
        let after = Record { generation: seen.generation.wrapping_add(1), kind, payload: 0 };
        let ended =
            self.word(granule).compare_exchange(seen.pack(), after.pack(), Ordering::AcqRel, Ordering::Relaxed).is_ok()
                || mutant("extent ended twice");
        if ended && seen.kind == Kind::First {
            self.store(granule + 1, Kind::None, 0, Ordering::Relaxed);
        }
        ended
    }
}
