//! Where a run of a given length may be found: bins by length, each a set of places.
//!
//! A hint is never trusted: it names a word of the tree's lowest level in which a free run of about that length may
//! begin, and whoever follows it looks at the tree. So hints may be stale, missing or lost between threads, whatever
//! they hold: a search that finds nothing by them reads the tree itself. They decide speed and fit only.
//!
//! Sets are bitmaps in levels with a summary bit above each word. They are written by plain stores, so that two threads
//! that change one word at the same time may lose one of the changes: a run that no hint leads to is found again when a
//! neighbour of it is released, or by a reading of the tree, which notes every run that it passes.

use super::shape::Levels;
use crate::sync::Word;

/// Bins for each doubling of the length: a run is at most a sixteenth longer than its bin says.
const SUB: u32 = 4;
/// Bins that share a bit of the group word.
const GROUP: usize = 16;

/// The bin of runs of this many granules: exact below 32.
#[inline]
pub(super) const fn bin_of(granules: u64) -> usize {
    if granules < 1 << SUB {
        return granules as usize;
    }
    let log = 63 - granules.leading_zeros();
    let sub = (granules >> (log - SUB)) as usize & ((1 << SUB) - 1);
    (((log - SUB + 1) as usize) << SUB) + sub
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

#[derive(Debug, Clone, Copy)]
pub(super) struct Hints<'a> {
    /// One bit for each group of bins that may have hints.
    pub(super) groups: &'a Word,
    /// The top words of all bins, then the lower levels of each.
    pub(super) words: &'a [Word],
    pub(super) levels: &'a Levels,
    pub(super) bins: usize,
}

impl Hints<'_> {
    pub(super) fn set_up(self) {
        self.groups.set_up(0);
        self.words.iter().for_each(|word| word.set_up(0));
    }

    #[inline]
    fn word(&self, bin: usize, level: usize, index: u64) -> &Word {
        if level + 1 == self.levels.count {
            return &self.words[bin];
        }
        let below = self.levels.words - 1; // all levels but the top, which is one word
        &self.words[self.bins + bin * below + self.levels.first[level] + index as usize]
    }

    /// Notes that a run of this many granules begins in the place.
    #[inline]
    pub(super) fn set(self, granules: u64, place: u64) {
        let bin = bin_of(granules);
        let mut at = place;
        for level in 0..self.levels.count {
            let (word, bit) = (self.word(bin, level, at / 64), 1 << (at % 64));
            let bits = word.hint();
            if bits & bit == 0 {
                word.set_hint(bits | bit);
            }
            at /= 64;
        }
        let group = 1 << (bin / GROUP);
        if self.groups.hint() & group == 0 {
            self.groups.hint_or(group);
        }
    }

    /// Notes that none does any more.
    #[inline]
    pub(super) fn clear(self, bin: usize, place: u64) {
        let mut at = place;
        for level in 0..self.levels.count {
            let (word, bit) = (self.word(bin, level, at / 64), 1 << (at % 64));
            let bits = word.hint();
            if bits & bit != 0 {
                word.set_hint(bits & !bit);
            }
            if bits & !bit != 0 {
                return;
            }
            at /= 64;
        }
    }

    /// The first bin from `bin` on that may have hints.
    #[inline]
    pub(super) fn next_bin(self, bin: usize) -> Option<usize> {
        let mut bin = bin;
        while bin < self.bins {
            let groups = self.groups.hint() >> (bin / GROUP);
            if groups == 0 {
                return None;
            }
            let skip = groups.trailing_zeros() as usize;
            if skip > 0 {
                bin = (bin / GROUP + skip) * GROUP;
            }
            let first = bin / GROUP * GROUP;
            let end = (first + GROUP).min(self.bins);
            if let Some(found) = self.words.get(bin..end)?.iter().position(|word| word.hint() != 0) {
                return Some(bin + found);
            }
            if bin == first {
                self.groups.hint_and(!(1 << (bin / GROUP)));
                // A bin may have come to have hints between the two: then say so again.
                if self.words.get(bin..end)?.iter().any(|word| word.hint() != 0) {
                    self.groups.hint_or(1 << (bin / GROUP));
                }
            }
            bin = end;
        }
        None
    }

    /// The first place from `from` on that the bin has a hint for.
    #[inline]
    pub(super) fn next_place(self, bin: usize, from: u64) -> Option<u64> {
        let mut level = 0;
        let mut at = from;
        // Up until a word has a bit at `at` or after it, then down along the first bits.
        loop {
            if at < self.levels.bits[level] {
                let bits = self.word(bin, level, at / 64).hint() & (u64::MAX << (at % 64));
                if bits != 0 {
                    let found = (at & !63) + u64::from(bits.trailing_zeros());
                    if found >= self.levels.bits[level] {
                        return None;
                    }
                    if level == 0 {
                        return Some(found);
                    }
                    let below = self.word(bin, level - 1, found);
                    if below.hint() == 0 {
                        self.forget(bin, level, found);
                        at = found + 1;
                        continue;
                    }
                    level -= 1;
                    at = found * 64;
                    continue;
                }
            }
            if level + 1 == self.levels.count {
                return None;
            }
            at = at / 64 + 1;
            level += 1;
        }
    }

    /// Clears a summary bit above a word that has no bits.
    #[cold]
    fn forget(self, bin: usize, level: usize, at: u64) {
        let (word, bit) = (self.word(bin, level, at / 64), 1 << (at % 64));
        word.set_hint(word.hint() & !bit);
    }
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
        assert!(bins_for(1 << 38) <= GROUP * 64);
    }
}
