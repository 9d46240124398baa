//! Where a run of a given length may be found: bins by length, each a set of places; and where long runs end.
//!
//! A hint is never trusted: a place names a word of the tree's lowest level in which a free run of about that length may
//! begin, and whoever follows it claims in the tree. So hints may be stale, missing or lost between threads, whatever
//! they hold: a search that finds nothing by them reads the tree itself. They decide speed and fit only.
//!
//! Sets are bitmaps in levels with a summary bit above each word, and one more bit for each bin. They are written by
//! plain stores, so that two threads that change one word at the same time may lose one of the changes: a run that no hint
//! leads to is found again when a neighbour of it is released, or by a reading of the tree, which notes every run that it
//! passes.

use super::shape::Shape;
use super::tree::Run;
use crate::sync::Word;

/// Bins for each doubling of the length: a run is at most a sixteenth longer than its bin says.
const SUB: u32 = 4;

/// The bin of runs of this many granules: exact below 32.
#[inline]
pub(super) const fn bin_of(granules: u64) -> usize {
    // Below 16 each length has a bin of its own; the formula is the same with a shift of none.
    let log = 63 - (granules | 1 << SUB).leading_zeros();
    let shift = log - SUB;
    ((shift as usize) << SUB) + (granules >> shift) as usize
}

pub(super) const fn bins_for(granules: u64) -> usize {
    bin_of(granules) + 1
}

/// The shortest run that is in this bin.
#[inline]
pub(super) const fn shortest(bin: usize) -> u64 {
    if bin < 1 << SUB {
        return bin as u64;
    }
    (1 << SUB | bin as u64 & ((1 << SUB) - 1)) << ((bin >> SUB) - 1)
}

/// One set of hints, and what all of them share.
#[derive(Debug, Clone, Copy)]
pub(super) struct Hints<'a> {
    /// The pool's storage, in which the hints are where `shape` says: for each set one bit for each bin that may have hints,
    /// and for each bin its bitmap of places, the top last; then for each word of the tree's lowest level where the run ends
    /// that begins in it and goes on beyond it, and where the one begins that ends in it and comes from before it.
    pub(super) words: &'a [Word],
    pub(super) shape: &'a Shape,
    /// The set's first word.
    pub(super) first: usize,
}

impl Hints<'_> {
    /// All sets.
    pub(super) fn set_up(self) {
        self.words[self.shape.hints_first..self.shape.words].iter().for_each(|word| word.set_up(0));
    }

    /// The first word of a bin's bitmap.
    #[inline]
    fn base(self, bin: usize) -> usize {
        self.first + self.shape.bins_words + bin * self.shape.hints.words
    }

    /// Notes a free run.
    #[inline]
    pub(super) fn note(self, run: Run) {
        let (first, last) = (run.start / 64, (run.end - 1) / 64);
        if first != last {
            self.note_ends(run);
        }
        self.set(bin_of(run.len()), first);
    }

    /// As [`note`](Self::note), also where a change of a summary was lost.
    pub(super) fn note_surely(self, run: Run) {
        self.note(run);
        let bin = bin_of(run.len());
        self.set_above(self.base(bin), bin, run.start / 64);
    }

    /// Notes how far a run reaches that lies in several words.
    #[inline]
    pub(super) fn note_ends(self, run: Run) {
        let first = self.shape.long_first;
        self.words[first + run.start as usize / 64 * 2].set_hint(run.end);
        self.words[first + (run.end as usize - 1) / 64 * 2 + 1].set_hint(run.start);
    }

    /// Where the run ends that begins in this place and goes on beyond it.
    #[inline]
    pub(super) fn end_from(self, place: u64) -> u64 {
        self.words[self.shape.long_first + place as usize * 2].hint()
    }

    /// Where the run begins that ends in this place and comes from before it.
    #[inline]
    pub(super) fn start_of(self, place: u64) -> u64 {
        self.words[self.shape.long_first + place as usize * 2 + 1].hint()
    }

    /// Notes that a run of this bin begins in the place.
    #[inline]
    pub(super) fn set(self, bin: usize, place: u64) {
        let base = self.base(bin);
        let (word, bit) = (&self.words[base + place as usize / 64], 1 << (place % 64));
        let bits = word.hint();
        if bits & bit == 0 {
            word.set_hint(bits | bit);
        }
        // The bits above are there if others are below them, but for a change that was lost.
        if bits == 0 {
            self.set_above(base, bin, place);
        }
    }

    #[inline]
    fn set_above(self, base: usize, bin: usize, place: u64) {
        if self.shape.hints.count == 2 {
            set_bit(&self.words[base + self.shape.hints.words - 1], place / 64);
            set_bit(&self.words[self.first + bin / 64], bin as u64 % 64);
        } else {
            self.set_all_above(base, bin, place / 64);
        }
    }

    #[inline(never)]
    fn set_all_above(self, base: usize, bin: usize, word: u64) {
        let mut at = word;
        for level in 1..self.shape.hints.count {
            set_bit(&self.words[base + self.shape.hints.first[level] + at as usize / 64], at % 64);
            at /= 64;
        }
        set_bit(&self.words[self.first + bin / 64], bin as u64 % 64);
    }

    /// Notes that none does any more.
    #[inline]
    pub(super) fn clear(self, bin: usize, place: u64) {
        let base = self.base(bin);
        let word = &self.words[base + place as usize / 64];
        let rest = word.hint() & !(1 << (place % 64));
        word.set_hint(rest);
        if rest != 0 {
            return;
        }
        if self.shape.hints.count == 2 {
            if clear_bit(&self.words[base + self.shape.hints.words - 1], place / 64) == 0 {
                clear_bit(&self.words[self.first + bin / 64], bin as u64 % 64);
            }
        } else {
            self.clear_above(bin, 0, place / 64);
        }
    }

    /// Clears the bit above a word of this level that has none.
    #[inline(never)]
    fn clear_above(self, bin: usize, level: usize, word: u64) {
        let base = self.base(bin);
        let mut at = word;
        for level in level + 1..self.shape.hints.count {
            if clear_bit(&self.words[base + self.shape.hints.first[level] + at as usize / 64], at % 64) != 0 {
                return;
            }
            at /= 64;
        }
        clear_bit(&self.words[self.first + bin / 64], bin as u64 % 64);
    }

    /// The first hint of the first bin from `bin` on that has one.
    #[inline(always)]
    pub(super) fn first(self, bin: usize) -> Option<(usize, u64)> {
        let (mut bin, bins) = (bin, self.shape.bins);
        while bin < bins {
            let bits = self.words[self.first + bin / 64].hint() & (u64::MAX << (bin % 64));
            if bits == 0 {
                bin = (bin | 63) + 1;
                continue;
            }
            bin = (bin & !63) + bits.trailing_zeros() as usize;
            if bin < bins
                && let Some(place) = self.first_place(bin)
            {
                return Some((bin, place));
            }
        }
        None
    }

    /// The first hint of a bin. If it gives none, it has cleared a bit of a summary that led to none.
    #[inline(always)]
    fn first_place(self, bin: usize) -> Option<u64> {
        let (levels, base) = (&self.shape.hints, self.base(bin));
        // Two levels, the second of one word, are what regions up to 262,144 granules have.
        if levels.count == 2 {
            let top = self.words[base + levels.words - 1].hint();
            if top != 0 {
                let at = u64::from(top.trailing_zeros());
                let bits = self.words[base + at as usize].hint();
                let place = at * 64 + u64::from(bits.trailing_zeros());
                if bits != 0 && place < levels.bits[0] {
                    return Some(place);
                }
            }
        }
        self.first_place_at(bin)
    }

    #[inline(never)]
    fn first_place_at(self, bin: usize) -> Option<u64> {
        let (levels, base) = (&self.shape.hints, self.base(bin));
        let (mut level, mut at) = (levels.count, 0);
        while level > 0 {
            level -= 1;
            let bits = self.words[base + levels.first[level] + at as usize].hint();
            if bits == 0 {
                self.clear_above(bin, level, at);
                return None;
            }
            at = at * 64 + u64::from(bits.trailing_zeros());
            if at >= levels.bits[level] {
                clear_bit(&self.words[base + levels.first[level] + at as usize / 64], at % 64);
                return None;
            }
        }
        Some(at)
    }
}

#[inline]
fn set_bit(word: &Word, bit: u64) {
    let bits = word.hint();
    if bits >> bit & 1 == 0 {
        word.set_hint(bits | 1 << bit);
    }
}

/// Gives the bits that are left.
#[inline]
fn clear_bit(word: &Word, bit: u64) -> u64 {
    let rest = word.hint() & !(1 << bit);
    word.set_hint(rest);
    rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_are_in_order_and_say_their_shortest_run() {
        let mut last = 0;
        for length in (1..5000u64).chain((13..38).flat_map(|log| [(1 << log) - 1, 1 << log, (1 << log) + 1, 3 << log]))
        {
            let bin = bin_of(length);
            assert!(bin >= last && (length >= 5000 || bin <= last + 1));
            assert!(shortest(bin) <= length && length < shortest(bin + 1), "{length} in {bin}");
            assert!(length - shortest(bin) <= length / 16);
            last = if length > 5000 { 0 } else { bin };
        }
    }
}
