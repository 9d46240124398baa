//! Which granules are taken: bitmaps in levels, so that an extent of any length is claimed by a few words.
//!
//! Level 0 has a bit for each granule, level *k* + 1 a bit for each word of level *k*; a set bit is taken. A word below
//! the top is in one of three states, told apart by its parent's bit:
//!
//! | parent's bit | word | state |
//! |---|---|---|
//! | clear | all ones | *closed*: everything below is free, and is claimed by the parent's bit |
//! | set | all ones | taken as a whole: by one extent, by several, or by a call that is just opening or closing it |
//! | set | other | *open*: its own bits say what is taken |
//!
//! So a run of granules is claimed by at most two words a level: its ragged ends at level 0, the whole words between
//! them by bits of level 1, whole words of those by bits of level 2. To claim a part of a closed word is to claim it
//! as a whole by the parent's bit and then to store the part: *opening* it. Whoever clears the last bit of an open word
//! *closes* it: one compare-and-swap from zero to all ones, after which nobody can claim in it, and then the parent's
//! bit is cleared. A word that is open and all zero is between the two; whoever needs it as a whole closes it himself.
//!
//! No step waits for another thread. A thread that stops in the middle holds what it has claimed, at most the words
//! that it was opening or closing besides, and everybody else sees those as taken.
//!
//! Claims go in ascending order, and one that meets a taken granule gives back what it has. Two claims cannot make each
//! other fail for ever: whoever fails was stopped at a higher granule than it holds; the one that holds that granule
//! can in turn only fail at a higher one still, and the last of such a chain was stopped by a claim that stood.

use super::shape::Levels;
use crate::sync::{Ordering, Word, mutant, ordering};

const ALL: u64 = u64::MAX;

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

/// The bits `from..to` of a word, of which there is at least one.
#[inline]
const fn mask(from: u64, to: u64) -> u64 {
    (ALL << from) & (ALL >> (64 - to))
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
        self.claim_at(0, run, disturbed)
    }

    /// Takes all bits of the run at this level, or none.
    #[inline(never)]
    fn claim_at(self, level: usize, run: Run, disturbed: &mut Disturbed) -> bool {
        let ends = Ends::of(run);
        if self.is_top(level) {
            return self.claim_bits(level, ends.first, ends.first_mask, disturbed);
        }
        let left = ends.first_mask != ALL;
        let right = ends.last > ends.first && ends.last_mask != ALL;
        let left_open = left && !self.is_closed(level, ends.first);
        let right_open = right && !self.is_closed(level, ends.last);
        if left_open && !self.claim_bits(level, ends.first, ends.first_mask, disturbed) {
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
        if right_open && !self.claim_bits(level, ends.last, ends.last_mask, disturbed) {
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

    /// Takes these bits of an open word, or none. Children that are open and empty are closed on the way.
    #[inline]
    fn claim_bits(self, level: usize, index: u64, mask: u64, disturbed: &mut Disturbed) -> bool {
        let word = self.word(level, index);
        let mut bits = word.load(Ordering::Acquire);
        loop {
            if bits & mask != 0 {
                if level == 0
                    || bits == ALL
                    || mutant("empty words not closed for others")
                    || !self.close_children(level, index, bits & mask, disturbed)
                {
                    return false;
                }
                bits = word.load(Ordering::Acquire);
                continue;
            }
            match word.compare_exchange(bits, bits | mask, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return true,
                Err(now) => bits = now,
            }
        }
    }

    /// Closes the children of these bits; false if one of them is not open and empty.
    #[cold]
    fn close_children(self, level: usize, index: u64, mut bits: u64, disturbed: &mut Disturbed) -> bool {
        while bits != 0 {
            let child = index * 64 + u64::from(bits.trailing_zeros());
            if !self.close(level - 1, child) {
                return false;
            }
            self.release_at(level, Run { start: child, end: child + 1 });
            disturbed.0 = true;
            bits &= bits - 1;
        }
        true
    }

    /// Closes a word that is open and empty: true for one caller only, who then owns it as a whole.
    #[inline]
    fn close(self, level: usize, index: u64) -> bool {
        self.word(level, index).compare_exchange(0, ALL, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            || mutant("close what is not empty")
    }

    /// Gives back a run that the caller has.
    #[inline]
    pub(super) fn release(self, run: Run) {
        self.release_at(0, run);
    }

    #[inline(never)]
    fn release_at(self, level: usize, run: Run) {
        let ends = Ends::of(run);
        if self.is_top(level) {
            self.word(level, ends.first)
                .fetch_and(!ends.first_mask, ordering("release without release", Ordering::AcqRel));
            return;
        }
        // Words that are all ours are all ones already: they become closed by their parent's bit. So do those at the
        // ends whose last bits were ours.
        let (mut start, mut end) = (ends.first, ends.last + 1);
        if ends.first_mask != ALL && !self.clear_and_close(level, ends.first, ends.first_mask) {
            start += 1;
        }
        if ends.last > ends.first && ends.last_mask != ALL && !self.clear_and_close(level, ends.last, ends.last_mask) {
            end -= 1;
        }
        if start < end {
            self.release_at(level + 1, Run { start, end });
        }
    }

    #[inline]
    fn clear_and_close(self, level: usize, index: u64, mask: u64) -> bool {
        let before = self.word(level, index).fetch_and(!mask, ordering("release without release", Ordering::AcqRel));
        debug_assert_eq!(before & mask, mask, "released what was not taken");
        before == mask && self.close(level, index)
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
