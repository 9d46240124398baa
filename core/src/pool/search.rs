//! Where a request goes: by the hints to a run that fits well, or by a reading of the whole tree.

use super::bits::{begins, mask, run_end, run_start};
use super::counters::Counters;
use super::hints::{Hints, bin_of, shortest};
use super::tree::{Disturbed, Run};
use super::{BufferPool, Word};
use crate::sync::mutant;

impl<S: AsRef<[Word]>> BufferPool<S> {
    /// Claims `granules` that begin at a multiple of `align`, where they fit well.
    #[inline]
    pub(super) fn fit(&self, granules: u64, align: u64) -> Option<u64> {
        if align == 1 {
            let counters = self.counters();
            let found = self.fit_by(counters, self.hints_of(counters.set(self.shape.sets)), granules);
            if found.is_some() {
                return found;
            }
        }
        self.fit_otherwise(granules, align)
    }

    #[inline(never)]
    fn fit_otherwise(&self, granules: u64, align: u64) -> Option<u64> {
        loop {
            if let Some(first) = self.fit_by_hints(granules, align) {
                return Some(first);
            }
            let moves = self.counters().moves();
            let mut contended = false;
            let mut at = 0;
            while let Some(run) = self.tree().next_run(at) {
                if let Some(place) = place_in(run, granules, align) {
                    if self.claim_in(run, place) {
                        return Some(place.start);
                    }
                    contended = true;
                }
                self.hints().note_surely(run); // in case no hint leads to it
                at = run.end;
            }
            // What was seen taken was taken at that time, and nothing became free since, but for what calls have in
            // hand that are not finished: at this moment no run was free.
            if (!contended && self.counters().moves() == moves) || mutant("refused at the first look") {
                return None;
            }
        }
    }

    /// The short way of [`fit`](Self::fit): in the run that the first hint leads to, if that lies within one word.
    #[inline]
    pub(super) fn fit_at_once(&self, granules: u64) -> Option<u64> {
        let counters = self.counters();
        let hints = self.hints_of(counters.set(self.shape.sets));
        let (bin, index) = hints.first(bin_of(granules))?;
        self.fit_in_word(counters, hints, granules, granules.max(shortest(bin)), bin, index)
    }

    /// Claims at the begin of the lowest run in word `index` that has at least `least` granules and ends within the word.
    #[inline]
    fn fit_in_word(
        &self,
        counters: Counters<'_>,
        hints: Hints<'_>,
        granules: u64,
        least: u64,
        bin: usize,
        index: u64,
    ) -> Option<u64> {
        if least >= 64 {
            return None;
        }
        let tree = self.tree();
        let bits = tree.bits(index);
        let mut starts = begins(!bits, least);
        if starts & 1 == 1 && index > 0 && tree.is_granule_free(index * 64 - 1) {
            starts &= starts - 1; // this run began before
        }
        let start = u64::from(starts.trailing_zeros());
        let end = run_end(!bits, start & 63);
        if start >= 64 || end >= 64 || !tree.claim_in_word(index, bits, mask(start, start + granules)) {
            return None;
        }
        counters.take(granules, false);
        let left = bin_of(end - start - granules);
        if left != bin {
            if starts & (starts - 1) == 0 {
                hints.clear(bin, index);
            }
            if left != 0 {
                hints.set(left, index);
            }
        }
        Some(index * 64 + start)
    }

    /// In a run that a hint of any set leads to, this thread's first; `None` if none of them does, which proves nothing.
    fn fit_by_hints(&self, granules: u64, align: u64) -> Option<u64> {
        let counters = self.counters();
        let (own, sets) = (counters.set(self.shape.sets), self.shape.sets);
        (own..sets).chain(0..own).find_map(|set| {
            let hints = self.hints_of(set);
            if align > 1 { self.fit_aligned_by(hints, granules, align) } else { self.fit_by(counters, hints, granules) }
        })
    }

    /// By one set of hints.
    fn fit_by(&self, counters: Counters<'_>, hints: Hints<'_>, granules: u64) -> Option<u64> {
        let tree = self.tree();
        let mut bin = bin_of(granules);
        for _ in 0..MISSES {
            let (found, index) = hints.first(bin)?;
            let least = granules.max(shortest(found));
            if let Some(first) = self.fit_in_word(counters, hints, granules, least, found, index) {
                return Some(first);
            }
            let Some(run) = self.long_in(index, tree.free_in(index)).filter(|run| run.len() >= least) else {
                if shortest(found) >= granules {
                    hints.clear(found, index);
                } else {
                    bin += 1; // its runs may be shorter than the request
                }
                continue;
            };
            let own = self.hints_of(counters.set(self.shape.sets));
            let start = if hints.first == own.first { run.start } else { share_of(run, granules) };
            let place = Run { start, end: start + granules };
            hints.clear(found, index);
            if self.claim_by(counters, place) {
                if run.start < start {
                    hints.note(Run { start: run.start, end: start });
                }
                if place.end < run.end {
                    own.note(Run { start: place.end, end: run.end });
                }
                return Some(start);
            }
            // Another was faster, or the run ends elsewhere than is noted.
            hints.note(Run { start: run.start, end: tree.next_taken(run.start).max(run.start + 1) });
        }
        None
    }

    /// The run that begins in word `index` and reaches its end.
    #[inline]
    fn long_in(&self, index: u64, free: u64) -> Option<Run> {
        let tree = self.tree();
        let first = index * 64;
        let start = first + run_start(free, 64);
        let border = first + 64;
        if start == border || start == first && first > 0 && tree.is_granule_free(first - 1) {
            return None;
        }
        let end = if border < self.layout.granules() && tree.is_granule_free(border) {
            let noted = self.hints_of(0).end_from(index);
            if noted > border && noted <= self.layout.granules() { noted } else { tree.next_taken(border) }
        } else {
            border
        };
        Some(Run { start, end })
    }

    /// As [`fit_by`](Self::fit_by), where the place is to begin at a multiple of `align`.
    fn fit_aligned_by(&self, hints: Hints<'_>, granules: u64, align: u64) -> Option<u64> {
        let mut bin = bin_of(granules);
        for _ in 0..MISSES {
            let (found, index) = hints.first(bin)?;
            match self.best_in(index, granules, align) {
                Some((run, place)) if self.claim_in(run, place) => return Some(place.start),
                Some(_) => {}
                None => bin = found + 1,
            }
        }
        None
    }

    /// The shortest free run that begins in word `index` of the tree and holds what is asked for, and where in it.
    #[inline]
    fn best_in(&self, index: u64, granules: u64, align: u64) -> Option<(Run, Run)> {
        let tree = self.tree();
        let mut free = tree.free_in(index);
        let first = index * 64;
        if free & 1 == 1 && first > 0 && tree.is_granule_free(first - 1) {
            free &= free.wrapping_add(1); // this run began before
        }
        let mut best: Option<(Run, Run)> = None;
        while free != 0 {
            let low = u64::from(free.trailing_zeros());
            let above = free.wrapping_add(1 << low);
            let start = first + low;
            let end = if above == 0 {
                tree.next_taken(start).max(start + 1)
            } else {
                first + u64::from(above.trailing_zeros())
            };
            free &= above;
            let run = Run { start, end };
            let shorter = best.is_none_or(|(best, _)| run.len() < best.len());
            if let Some(place) = place_in(run, granules, align).filter(|_| shorter) {
                best = Some((run, place));
            }
        }
        best
    }

    /// Claims `place` in `run` and keeps the hints.
    fn claim_in(&self, run: Run, place: Run) -> bool {
        if !self.claim(place) {
            return false;
        }
        let hints = self.hints();
        hints.clear(bin_of(run.len()), run.start / 64);
        if run.start < place.start {
            hints.note(Run { start: run.start, end: place.start });
        }
        if place.end < run.end {
            hints.note(Run { start: place.end, end: run.end });
        }
        true
    }

    /// Notes what is free at both sides of a run.
    pub(super) fn note_free_around(&self, run: Run) {
        let start = self.tree().run_start(run.start);
        if start < run.start {
            self.hints().note(Run { start, end: run.start });
        }
        let end = if run.end < self.layout.granules() { self.tree().next_taken(run.end) } else { run.end };
        if end > run.end {
            self.hints().note(Run { start: run.end, end });
        }
    }

    /// Granules in the longest part of a free run that begins at a multiple of `align` granules.
    pub(super) fn largest_aligned(&self, align: u64) -> u64 {
        let tree = self.tree();
        let mut largest = 0;
        let mut at = 0;
        while let Some(run) = tree.next_run(at) {
            largest = largest.max(run.end.saturating_sub(run.start.next_multiple_of(align)));
            at = run.end;
        }
        largest
    }

    pub(super) fn claim(&self, run: Run) -> bool {
        self.claim_by(self.counters(), run)
    }

    #[inline]
    fn claim_by(&self, counters: Counters<'_>, run: Run) -> bool {
        let mut disturbed = Disturbed(false);
        let claimed = self.tree().claim(run, &mut disturbed);
        if claimed {
            counters.take(run.len(), disturbed.0);
        } else if disturbed.0 {
            counters.disturb();
        }
        claimed
    }

    /// Gives back a run that the caller has, and notes the run that it is now a part of.
    #[inline]
    pub(super) fn free(&self, run: Run) {
        let (left, right) = self.tree().release(run);
        let counters = self.counters();
        counters.release(run.len());
        let first = run.start & !63;
        let last = (run.end - 1) & !63;
        let mut start = first + run_start(left, run.start - first);
        let mut end = last + run_end(right, run.end - 1 - last);
        if start == first && first > 0 {
            start = self.start_before(run.start, first);
        }
        if end == last + 64 && end < self.layout.granules() {
            end = self.end_beyond(run.end, end);
        }
        let hints = self.hints_of(counters.set(self.shape.sets));
        // At most one run of 64 granules or more begins in a word: the hints to those that this one takes in are stale now.
        if run.start - start >= 64 {
            hints.clear(bin_of(run.start - start), start / 64);
        }
        if end - run.end >= 64 {
            hints.clear(bin_of(end - run.end), run.end / 64);
        }
        hints.note(Run { start, end });
    }

    /// Where the free run begins that ends at `to` and reaches down to the border of a word.
    #[inline(never)]
    fn start_before(&self, to: u64, border: u64) -> u64 {
        let tree = self.tree();
        if !tree.is_granule_free(border - 1) {
            return border;
        }
        // The run ends in the word that begins at the border, or in the one before.
        let mut border = border;
        if to == border {
            let first = border - 64;
            let start = first + run_start(tree.free_in(first / 64), 64);
            if start > first || first == 0 || !tree.is_granule_free(first - 1) {
                return start;
            }
            border = first;
        }
        let noted = self.hints_of(0).start_of((to - 1) / 64);
        if noted < border { noted } else { tree.run_start(border) }
    }

    /// Where the free run ends that begins at `from` and reaches up to the border of a word.
    #[inline(never)]
    fn end_beyond(&self, from: u64, border: u64) -> u64 {
        let (tree, granules) = (self.tree(), self.layout.granules());
        if !tree.is_granule_free(border) {
            return border;
        }
        let mut border = border;
        if from == border {
            let end = border + run_end(tree.free_in(border / 64), 0);
            if end < border + 64 || end >= granules || !tree.is_granule_free(end) {
                return end;
            }
            border = end;
        }
        let noted = self.hints_of(0).end_from(from / 64);
        if noted > border && noted <= granules { noted } else { tree.next_taken(border) }
    }
}

/// Where in a run `granules` are to lie that begin at a multiple of `align`: as low as they can. So extents begin where
/// others began before, and their records are in the cache.
#[inline]
fn place_in(run: Run, granules: u64, align: u64) -> Option<Run> {
    let start = run.start.next_multiple_of(align);
    (start < run.end && run.end - start >= granules).then_some(Run { start, end: start + granules })
}

/// Where to begin in a run that another thread has noted: in the middle of a large one, so that both have a part of the
/// region for themselves.
#[inline]
fn share_of(run: Run, granules: u64) -> u64 {
    let half = (run.len() / 2) & !(SHARE - 1);
    if half < SHARE || half < granules { run.start } else { run.start + half }
}

/// How many runs a search by hints may find that are too short or taken by others, before it reads the tree.
const MISSES: u32 = 32;
/// Granules that a thread takes over at least, of those that another has noted: so many share a cache line one level up.
const SHARE: u64 = 8 * 64 * 64;
