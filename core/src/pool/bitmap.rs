//! One bit for each granule: set while it is taken. Claims and releases go word by word, in ascending order.
//!
//! A claim that meets a taken granule gives back what it has claimed so far. Two claims cannot make each other fail for
//! ever: whoever fails was stopped at a higher granule than it holds, the one that holds that granule can in turn only
//! fail at a higher one still, and the last of such a chain was stopped by a claim that stood.

use crate::sync::{Ordering, Word};

#[derive(Debug, Clone, Copy)]
pub(super) struct Bitmap<'a> {
    words: &'a [Word],
    granules: u64,
}

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

    /// The words that the run lies in, each with the bits of the run in it.
    fn masks(self) -> impl Iterator<Item = (usize, u64)> {
        let last = (self.end - 1) / 64;
        (self.start / 64..=last).map(move |word| {
            let low = if word == self.start / 64 { u64::MAX << (self.start % 64) } else { u64::MAX };
            let high = if word == last { u64::MAX >> (63 - (self.end - 1) % 64) } else { u64::MAX };
            (word as usize, low & high)
        })
    }
}

impl<'a> Bitmap<'a> {
    pub(super) fn new(words: &'a [Word], granules: u64) -> Self {
        Self { words, granules }
    }

    /// All granules free; what the last word has beyond the region counts as taken for ever.
    pub(super) fn set_up(self) {
        for (index, word) in self.words.iter().enumerate() {
            let left = self.granules - (index as u64 * 64).min(self.granules);
            word.set_up(if left >= 64 { 0 } else { u64::MAX << left });
        }
    }

    fn word(self, index: usize) -> u64 {
        self.words.get(index).map_or(u64::MAX, |word| word.load(Ordering::Acquire))
    }

    /// The first granule from `from` on whose bit is clear (or set, with `flip` all ones), the region's end if none.
    fn next(self, from: u64, flip: u64) -> u64 {
        let mut at = from;
        while at < self.granules {
            let bits = !(self.word((at / 64) as usize) ^ flip) & (u64::MAX << (at % 64));
            if bits != 0 {
                return ((at & !63) + u64::from(bits.trailing_zeros())).min(self.granules);
            }
            at = (at & !63) + 64;
        }
        self.granules
    }

    pub(super) fn next_free(self, from: u64) -> u64 {
        self.next(from, 0)
    }

    pub(super) fn next_taken(self, from: u64) -> u64 {
        self.next(from, u64::MAX)
    }

    /// The first free run that begins at `from` or later, as it was seen.
    pub(super) fn next_run(self, from: u64) -> Option<Run> {
        let start = self.next_free(from);
        (start < self.granules).then(|| Run { start, end: self.next_taken(start) })
    }

    /// Takes the whole run, or nothing and says which granule was taken.
    pub(super) fn claim(self, run: Run) -> Result<(), u64> {
        for (index, mask) in run.masks() {
            let claimed = match self.words.get(index) {
                None => Err(u64::MAX),
                Some(word) => word.update(|bits| if bits & mask == 0 { Ok(bits | mask) } else { Err(bits) }),
            };
            if let Err(bits) = claimed {
                let first = index as u64 * 64;
                if run.start < first {
                    self.free(Run { start: run.start, end: first });
                }
                return Err(first + u64::from((bits & mask).trailing_zeros()));
            }
        }
        Ok(())
    }

    /// Gives back a run that the caller has.
    pub(super) fn free(self, run: Run) {
        for (index, mask) in run.masks() {
            if let Some(word) = self.words.get(index) {
                let before = word.fetch_and(!mask, Ordering::Release);
                debug_assert_eq!(before & mask, mask, "granules released that were not taken");
            }
        }
    }
}
