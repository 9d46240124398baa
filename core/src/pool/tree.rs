//! Which granules are taken: bitmaps in levels, so that an extent of any length is claimed by a few words.
//!
//! Level 0 has a bit for each granule, level *k* + 1 a bit for each word of level *k*; a set bit is taken. A word below
//! the top is in one of three states, told apart by its parent's bit:
//!
//! | parent's bit | word | state |
//! |---|---|---|
//! | clear | all ones | *closed*: everything below is free, and is claimed by the parent's bit |
//! | set | all ones | taken as a whole: by one extent, by several, or by a call that is just opening or closing it |
//! | set | other, but for zero | *open*: its own bits say what is taken |
//!
//! So a run of granules is claimed by at most two words a level: its ragged ends at level 0, the whole words between
//! them by bits of level 1, whole words of those by bits of level 2. To claim a part of a closed word is to claim it
//! as a whole by the parent's bit and then to store the part: *opening* it. Whoever gives back the last bits of an open
//! word *closes* it: one compare-and-swap from these bits to all ones, by which the word is his as a whole, and then the
//! parent's bit is cleared. An open word is never zero: there is no state in which a word is empty and claimed by nobody.
//!
//! No step waits for another thread. A thread that stops in the middle holds what it has claimed, at most the words
//! that it was opening or closing besides, and everybody else sees those as taken.
//!
//! Claims go in ascending order, and one that meets a taken granule gives back what it has. Two claims cannot make each
//! other fail for ever: whoever fails was stopped at a higher granule than it holds; the one that holds that granule
//! can in turn only fail at a higher one still, and the last of such a chain was stopped by a claim that stood.

use super::bits::{ALL, mask};
use super::shape::Levels;
use crate::sync::{Ordering, Word, mutant, ordering};

/// Granules `start..end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) start: u64,
    pub(super) end: u64,
}

impl Run {
    pub(super) const fn len(self) -> u64 {
        self.end - self.start
    }
}

/// What a call did to granules that are not its own: they were taken for a moment, and are free again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Disturbed(pub(super) bool);

#[derive(Debug, Clone, Copy)]
pub(super) struct Tree<'a> {
    pub(super) words: &'a [Word],
    pub(super) levels: &'a Levels,
}

impl Tree<'_> {
    /// Everything free. What the last words have beyond the region is taken for ever, so that they are never closed.
    pub(super) fn set_up(self) {
        let mut ragged = false;
        for level in 0..self.levels.count {
            let bits = self.levels.bits[level];
            let words = bits.div_ceil(64);
            let beyond = if bits.is_multiple_of(64) { 0 } else { ALL << (bits % 64) };
            let last_child = if ragged { 1 << ((bits - 1) % 64) } else { 0 };
            let top = level + 1 == self.levels.count;
            ragged |= beyond != 0;
            for index in 0..words {
                let open = top || (ragged && index + 1 == words);
                let value = if index + 1 < words { ALL } else { beyond | last_child };
                self.word(level, index).set_up(if open { value } else { ALL });
            }
        }
    }

    #[inline]
    fn word(&self, level: usize, index: u64) -> &Word {
        // In bounds: `index` comes from bits of this level, and `Shape` made room for all levels.
        &self.words[self.levels.first[level] + index as usize]
    }

    #[inline]
    fn is_top(self, level: usize) -> bool {
        level + 1 == self.levels.count
    }

    /// The free bits of a word, as they were seen: of a closed word, all.
    #[inline]
    fn free_bits(self, level: usize, index: u64) -> u64 {
        let bits = self.word(level, index).load(Ordering::Acquire);
        if bits != ALL || self.is_top(level) || !self.is_free(level + 1, index) { !bits } else { ALL }
    }

    #[inline]
    fn is_free(self, level: usize, bit: u64) -> bool {
        let bits = self.word(level, bit / 64).load(Ordering::Acquire);
        if bits != ALL { bits >> (bit % 64) & 1 == 0 } else { self.is_closed_above(level, bit / 64) }
    }

    /// Whether a word that is all ones is closed.
    #[inline(never)]
    fn is_closed_above(self, level: usize, index: u64) -> bool {
        !self.is_top(level) && self.is_free(level + 1, index)
    }

    /// The free granules of word `index` of the lowest level.
    #[inline]
    pub(super) fn free_in(self, index: u64) -> u64 {
        self.free_bits(0, index)
    }

    #[inline]
    pub(super) fn is_granule_free(self, granule: u64) -> bool {
        self.is_free(0, granule)
    }

    /// The first granule from `from` on that is taken; the region's end if none.
    #[inline]
    pub(super) fn next_taken(self, from: u64) -> u64 {
        if from < self.levels.bits[0] {
            let bits = self.word(0, from / 64).load(Ordering::Acquire) >> (from % 64);
            if bits != 0 && bits != ALL >> (from % 64) {
                return from + u64::from(bits.trailing_zeros());
            }
        }
        self.next_taken_at(0, from)
    }

    #[inline(never)]
    fn next_taken_at(self, level: usize, from: u64) -> u64 {
        let bits = self.levels.bits[level];
        if from >= bits {
            return bits;
        }
        let taken = !self.free_bits(level, from / 64) & (ALL << (from % 64));
        if taken != 0 {
            return ((from & !63) + u64::from(taken.trailing_zeros())).min(bits);
        }
        let mut index = from / 64;
        while !self.is_top(level) {
            // Whole words are passed by the bits above. One that is open and empty looks taken from there.
            index = self.next_taken_at(level + 1, index + 1);
            if index * 64 >= bits {
                break;
            }
            let taken = !self.free_bits(level, index);
            if taken != 0 {
                return (index * 64 + u64::from(taken.trailing_zeros())).min(bits);
            }
        }
        bits
    }

    /// The first granule of the free run that ends at `to`: `to` itself if the granule before it is taken.
    #[inline]
    pub(super) fn run_start(self, to: u64) -> u64 {
        if !to.is_multiple_of(64) {
            let bits = self.word(0, to / 64).load(Ordering::Acquire);
            let below = bits << (64 - to % 64);
            if below != 0 && bits != ALL {
                return to - u64::from(below.leading_zeros());
            }
        }
        self.run_start_at(0, to)
    }

    #[inline(never)]
    fn run_start_at(self, level: usize, to: u64) -> u64 {
        if to == 0 {
            return 0;
        }
        let mut index = (to - 1) / 64;
        let taken = !self.free_bits(level, index) & (ALL >> (63 - (to - 1) % 64));
        if taken != 0 {
            return index * 64 + 64 - u64::from(taken.leading_zeros());
        }
        while !self.is_top(level) {
            index = self.run_start_at(level + 1, index);
            if index == 0 {
                break;
            }
            index -= 1;
            let taken = !self.free_bits(level, index);
            if taken != 0 {
                return index * 64 + 64 - u64::from(taken.leading_zeros());
            }
        }
        0
    }

    /// The first free run that begins at `from` or later, as it was seen. Looks at every word of the lowest level.
    pub(super) fn next_run(self, from: u64) -> Option<Run> {
        let granules = self.levels.bits[0];
        let mut at = from;
        while at < granules {
            let free = self.free_bits(0, at / 64) & (ALL << (at % 64));
            if free != 0 {
                let start = (at & !63) + u64::from(free.trailing_zeros());
                return Some(Run { start, end: self.next_taken(start).max(start + 1) });
            }
            at = (at & !63) + 64;
        }
        None
    }

    /// Word `index` of the lowest level as it is: a closed one looks taken.
    #[inline]
    pub(super) fn bits(self, index: u64) -> u64 {
        self.word(0, index).load(Ordering::Acquire)
    }

    /// Takes these bits of a word of the lowest level that was seen to hold `bits`, or none.
    #[inline]
    pub(super) fn claim_in_word(self, index: u64, bits: u64, mask: u64) -> bool {
        self.word(0, index).compare_exchange(bits, bits | mask, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Takes the whole run, or nothing: because some of it is taken, or was for a moment.
    #[inline]
    pub(super) fn claim(self, run: Run, disturbed: &mut Disturbed) -> bool {
        // The short way: within one word that is open.
        if run.start / 64 == (run.end - 1) / 64 {
            let (word, mask) = (self.word(0, run.start / 64), mask(run.start % 64, (run.end - 1) % 64 + 1));
            let bits = word.load(Ordering::Acquire);
            if bits & mask == 0 && word.compare_exchange(bits, bits | mask, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            {
                return true;
            }
        }
        self.claim_in_words(run, disturbed).unwrap_or_else(|| self.claim_at(0, run, disturbed))
    }

    /// As [`claim`](Self::claim), if the words are all below one that is open; `None` otherwise.
    #[inline]
    fn claim_in_words(self, run: Run, disturbed: &mut Disturbed) -> Option<bool> {
        let ends = Ends::of(run);
        if self.levels.count == 1 || ends.first / 64 != ends.last / 64 || ends.first == ends.last {
            return None;
        }
        let (above, base) = (self.word(1, ends.first / 64), ends.first & !63);
        let bits = above.load(Ordering::Acquire);
        if bits == ALL {
            return None;
        }
        // A word whose bit above is clear is closed, and is taken as a whole by that bit; others at the ends are open.
        let left_open = ends.first_mask != ALL && bits >> (ends.first - base) & 1 == 1;
        let right_open = ends.last_mask != ALL && bits >> (ends.last - base) & 1 == 1;
        let whole = Run { start: ends.first + u64::from(left_open), end: ends.last + 1 - u64::from(right_open) };
        let wanted = if whole.start < whole.end { mask(whole.start - base, whole.end - base) } else { 0 };
        if bits & wanted != 0 || left_open && !self.claim_bits(0, ends.first, ends.first_mask) {
            return Some(false);
        }
        if wanted != 0 {
            if above.compare_exchange(bits, bits | wanted, Ordering::AcqRel, Ordering::Relaxed).is_err()
                && !self.claim_bits(1, ends.first / 64, wanted)
            {
                if left_open && !mutant("claim not undone") {
                    self.release(Run { start: run.start, end: ends.first * 64 + 64 });
                    disturbed.0 = true;
                }
                return Some(false);
            }
            // The closed words at the ends are ours as a whole, and nobody writes to them: open them.
            if ends.first_mask != ALL && !left_open {
                self.word(0, ends.first).store(ends.first_mask, ordering("open without release", Ordering::Release));
                disturbed.0 = true;
            }
            if ends.last_mask != ALL && !right_open {
                self.word(0, ends.last).store(ends.last_mask, Ordering::Release);
                disturbed.0 = true;
            }
        }
        if right_open && !self.claim_bits(0, ends.last, ends.last_mask) {
            if !mutant("claim not undone at its end") {
                self.release(Run { start: run.start, end: ends.last * 64 });
            }
            disturbed.0 = true;
            return Some(false);
        }
        Some(true)
    }

    /// Takes all bits of the run at this level, or none.
    #[inline(never)]
    fn claim_at(self, level: usize, run: Run, disturbed: &mut Disturbed) -> bool {
        let ends = Ends::of(run);
        if self.is_top(level) {
            return self.claim_bits(level, ends.first, ends.first_mask);
        }
        let left = ends.first_mask != ALL;
        let right = ends.last > ends.first && ends.last_mask != ALL;
        let left_open = left && !self.is_closed(level, ends.first);
        let right_open = right && !self.is_closed(level, ends.last);
        if left_open && !self.claim_bits(level, ends.first, ends.first_mask) {
            return false;
        }
        let whole = Run { start: ends.first + u64::from(left_open), end: ends.last + 1 - u64::from(right_open) };
        if whole.start < whole.end {
            if !self.claim_at(level + 1, whole, disturbed) {
                if left_open && !mutant("claim not undone") {
                    self.release_at(level, Run { start: run.start, end: run.end.min(ends.first * 64 + 64) });
                    disturbed.0 = true;
                }
                return false;
            }
            // The closed words at the ends are ours as a whole, and nobody writes to them: open them.
            if left && !left_open {
                self.word(level, ends.first)
                    .store(ends.first_mask, ordering("open without release", Ordering::Release));
                disturbed.0 = true;
            }
            if right && !right_open {
                self.word(level, ends.last).store(ends.last_mask, Ordering::Release);
                disturbed.0 = true;
            }
        }
        if right_open && !self.claim_bits(level, ends.last, ends.last_mask) {
            if !mutant("claim not undone at its end") {
                self.release_at(level, Run { start: run.start, end: ends.last * 64 });
            }
            disturbed.0 = true;
            return false;
        }
        true
    }

    #[inline]
    fn is_closed(self, level: usize, index: u64) -> bool {
        self.word(level, index).load(Ordering::Acquire) == ALL && self.is_free(level + 1, index)
    }

    /// Takes these bits of an open word, or none.
    #[inline]
    fn claim_bits(self, level: usize, index: u64, mask: u64) -> bool {
        let word = self.word(level, index);
        let mut bits = word.load(Ordering::Acquire);
        while bits & mask == 0 {
            match word.compare_exchange(bits, bits | mask, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return true,
                Err(now) => bits = now,
            }
        }
        false
    }

    /// Gives back a run that the caller has; and what is free then in the first and the last of the words that it lies in.
    #[inline]
    pub(super) fn release(self, run: Run) -> (u64, u64) {
        let (first, last) = (run.start / 64, (run.end - 1) / 64);
        if first == last {
            let after = self.clear(0, first, mask(run.start % 64, (run.end - 1) % 64 + 1));
            if after == ALL {
                self.release_above(0, Run { start: first, end: first + 1 });
            }
            return (after, after);
        }
        if self.levels.count > 1 && first / 64 == last / 64 {
            // All words are below one.
            let ends = Ends::of(run);
            let left = if ends.first_mask == ALL { ALL } else { self.clear(0, first, ends.first_mask) };
            let right = if ends.last_mask == ALL { ALL } else { self.clear(0, last, ends.last_mask) };
            let whole = Run { start: first + u64::from(left != ALL), end: last + 1 - u64::from(right != ALL) };
            if whole.start < whole.end {
                let (index, base) = (first / 64, first & !63);
                let after = self.clear(1, index, mask(whole.start - base, whole.end - base));
                if after == ALL {
                    self.release_above(1, Run { start: index, end: index + 1 });
                }
            }
            return (left, right);
        }
        self.release_at(0, run)
    }

    #[inline(never)]
    fn release_at(self, level: usize, run: Run) -> (u64, u64) {
        let ends = Ends::of(run);
        // Words that are all ours are all ones already: they become closed by their parent's bit. So do those at the
        // ends whose last bits were ours.
        let (mut start, mut end) = (ends.first, ends.last + 1);
        let (mut left, mut right) = (ALL, ALL);
        if self.is_top(level) || ends.first_mask != ALL {
            left = self.clear(level, ends.first, ends.first_mask);
            start += u64::from(left != ALL);
        }
        if ends.last > ends.first {
            if ends.last_mask != ALL {
                right = self.clear(level, ends.last, ends.last_mask);
                end -= u64::from(right != ALL);
            }
        } else {
            right = left;
        }
        if start < end {
            self.release_above(level, Run { start, end });
        }
        (left, right)
    }

    #[inline]
    fn release_above(self, level: usize, run: Run) {
        if !self.is_top(level) {
            self.release_at(level + 1, run);
        }
    }

    /// Clears bits that the caller has; gives the bits that are free then. If these are all, the word is *closed* by the same
    /// step, and the caller's as a whole: whose bit above is to be cleared next.
    #[inline]
    fn clear(self, level: usize, index: u64, mask: u64) -> u64 {
        let word = self.word(level, index);
        let success = ordering("release without release", Ordering::AcqRel);
        let mut bits = word.load(Ordering::Relaxed);
        loop {
            debug_assert_eq!(bits & mask, mask, "released what was not taken");
            let rest = bits & !mask;
            let empty = rest == 0 && !mutant("emptied word left open");
            let closes = (empty || mutant("close what is not empty")) && !self.is_top(level);
            let after = if closes { ALL } else { rest };
            match word.compare_exchange(bits, after, success, Ordering::Relaxed) {
                Ok(_) => return if closes { ALL } else { !rest },
                Err(now) => bits = now,
            }
        }
    }
}

/// The words that a run lies in, and its bits in the first and the last of them.
struct Ends {
    first: u64,
    last: u64,
    first_mask: u64,
    last_mask: u64,
}

impl Ends {
    #[inline]
    fn of(run: Run) -> Self {
        let (first, last) = (run.start / 64, (run.end - 1) / 64);
        let end = (run.end - 1) % 64 + 1;
        let first_mask = mask(run.start % 64, if first == last { end } else { 64 });
        Self { first, last, first_mask, last_mask: mask(0, end) }
    }
}
