//! Where a request goes: by the hints to a run that fits well, or by a reading of the whole tree.

use super::hints::{bin_of, shortest};
use super::tree::{Disturbed, Run};
use super::{BufferPool, Word};
use crate::sync::mutant;

impl<S: AsRef<[Word]>> BufferPool<S> {
    /// Claims `granules` that begin at a multiple of `align`, where they fit well.
    pub(super) fn fit(&self, granules: u64, align: u64) -> Option<u64> {
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
                self.hints().set(run.len(), run.start / 64); // in case no hint leads to it
                at = run.end;
            }
            // What was seen taken was taken at that time, and nothing became free since, but for what calls have in
            // hand that are not finished: at this moment no run was free.
            if (!contended && self.counters().moves() == moves) || mutant("refused at the first look") {
                return None;
            }
        }
    }

    /// As [`fit`](Self::fit), in a run that a hint leads to; `None` if none of them does, which proves nothing.
    #[inline]
    fn fit_by_hints(&self, granules: u64, align: u64) -> Option<u64> {
        let hints = self.hints();
        let mut bin = bin_of(granules);
        // Runs found that were of their bin, but too short or not aligned; and claims lost to others.
        let mut misses = 0;
        while let Some(found) = hints.next_bin(bin) {
            bin = found;
            let mut from = 0;
            while let Some(index) = hints.next_place(bin, from) {
                let found = if align == 1 {
                    let run = self.one_in(index, granules.max(shortest(bin)));
                    run.and_then(|run| Some((run, place_in(run, granules, 1)?)))
                } else {
                    self.best_in(index, granules, align)
                };
                match found {
                    Some((run, place)) => {
                        if self.claim_in(run, place) {
                            return Some(place.start);
                        }
                        misses += 1;
                    }
                    None => {
                        from = index + 1;
                        if align == 1 && shortest(bin) >= granules {
                            hints.clear(bin, index);
                        } else {
                            misses += 1;
                        }
                    }
                }
                if misses > MISSES {
                    return None;
                }
            }
            bin += 1;
        }
        None
    }

    /// A run of at least `least` granules that begins in word `index` of the tree: the lowest that ends in it, or the one
    /// that goes on beyond it.
    #[inline]
    fn one_in(&self, index: u64, least: u64) -> Option<Run> {
        let tree = self.tree();
        let free = tree.free_in(index);
        let first = index * 64;
        let (start, end) = match lowest(free, least) {
            Some(start) if start + u64::from((!(free >> start)).trailing_zeros()) < 64 => {
                (start, first + start + u64::from((!(free >> start)).trailing_zeros()))
            }
            _ => {
                let beyond = u64::from(free.leading_ones());
                if beyond == 0 {
                    return None;
                }
                (64 - beyond, tree.next_taken(first + 63).max(first + 64))
            }
        };
        let run = Run { start: first + start, end };
        let began_before = start == 0 && first > 0 && tree.is_granule_free(first - 1);
        (run.len() >= least && !began_before).then_some(run)
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
    #[inline]
    fn claim_in(&self, run: Run, place: Run) -> bool {
        if !self.claim(place) {
            return false;
        }
        let hints = self.hints();
        let head = place.start - run.start;
        let (old, new) = (bin_of(run.len()), bin_of(head));
        if old != new || head == 0 {
            self.forget(run);
            if head > 0 {
                hints.set(head, run.start / 64);
            }
        }
        if place.end < run.end {
            hints.set(run.end - place.end, place.end / 64);
        }
        true
    }

    /// The hint to this run is stale. Another short run of its length may begin in the same word: then the hint stays.
    #[inline]
    fn forget(&self, run: Run) {
        let (len, index) = (run.len(), run.start / 64);
        if len >= 64 || !any_of(self.tree().free_in(index), len) {
            self.hints().clear(bin_of(len), index);
        }
    }

    /// Notes what is free at both sides of a run.
    pub(super) fn note_free_around(&self, run: Run) {
        let start = self.tree().run_start(run.start);
        if start < run.start {
            self.hints().set(run.start - start, start / 64);
        }
        let end = if run.end < self.layout.granules() { self.tree().next_taken(run.end) } else { run.end };
        if end > run.end {
            self.hints().set(end - run.end, run.end / 64);
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

    #[inline]
    pub(super) fn claim(&self, run: Run) -> bool {
        let mut disturbed = Disturbed(false);
        let claimed = self.tree().claim(run, &mut disturbed);
        if claimed {
            self.counters().take(run.len(), disturbed.0);
        } else if disturbed.0 {
            self.counters().disturb();
        }
        claimed
    }

    #[inline]
    pub(super) fn free(&self, run: Run) {
        let tree = self.tree();
        tree.release(run);
        self.counters().release(run.len());
        let start = tree.run_start(run.start);
        let end = tree.next_taken(run.end);
        if start < run.start {
            self.forget(Run { start, end: run.start });
        }
        if end > run.end {
            self.forget(Run { start: run.end, end });
        }
        self.hints().set(end - start, start / 64);
    }
}

/// Where in a run `granules` are to lie that begin at a multiple of `align`: at its end, so that what is left of the run
/// begins where it did.
#[inline]
fn place_in(run: Run, granules: u64, align: u64) -> Option<Run> {
    let start = run.end.checked_sub(granules)? & !(align - 1);
    (start >= run.start).then_some(Run { start, end: start + granules })
}

/// Whether a run of exactly `len` set bits, fewer than 64, lies in the word.
#[inline]
fn any_of(bits: u64, len: u64) -> bool {
    let (mut begins, mut have) = (bits, 1);
    while have < len {
        let step = have.min(len - have);
        begins &= begins >> step;
        have += step;
    }
    // Bits that begin `len` set ones, with none below and none above.
    begins & !(bits << 1) & !(begins >> 1) != 0
}

/// The lowest bit that begins a run of at least `least` set bits, all within the word.
#[inline]
fn lowest(bits: u64, least: u64) -> Option<u64> {
    if least > 64 {
        return None;
    }
    // Bits that begin `have` set ones, in steps that double.
    let (mut begins, mut have) = (bits, 1);
    while have < least {
        let step = have.min(least - have);
        begins &= begins >> step;
        have += step;
    }
    // Of each run its first: those that begin more than enough have no set bit below.
    let begins = begins & !(bits << 1);
    (begins != 0).then(|| u64::from(begins.trailing_zeros()))
}

/// How many runs a search by hints may find that are too short or taken by others, before it reads the tree.
const MISSES: u32 = 32;
