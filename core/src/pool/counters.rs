//! How much is taken, how much ever was, and what moved.
//!
//! Counters are striped: a thread counts on a stripe of its own, as far as there are enough, and readers add the stripes
//! up. So threads that allocate at the same time do not meet here.

use super::shape::{STRIPE, STRIPES};
use crate::sync::{Ordering, Word, mutant, stripe};

/// The most granules ever taken: the first word of the storage, on a cache line of its own.
const HIGH_WATER: usize = 0;
/// How many stripes have a set of hints.
const SETS: usize = 1;

// The words of a stripe.
/// Granules ever taken, and one for each disturbance.
const TAKEN: usize = 0;
/// Granules ever given back, and one for each disturbance. Moved *after* granules became free.
const RELEASED: usize = 1;
/// While the stripe has taken no more than this net of what it gave back, the high-water mark stands. What it may still take
/// is its *room*: all rooms together are at most what is between the granules taken and the mark. Taking and giving back on
/// a stripe changes both by the same; only who has no room left looks at all stripes, and takes half of what no other has.
const QUIET: usize = 2;

/// The set of hints that the stripe's threads use, and one more; zero before they do. A hint itself.
const SET: usize = 3;

#[derive(Debug, Clone, Copy)]
pub(super) struct Counters<'a> {
    /// The pool's storage, which begins with the counters.
    pub(super) words: &'a [Word],
    pub(super) granules: u64,
    /// The first word of this thread's stripe.
    own: usize,
}

impl<'a> Counters<'a> {
    #[inline]
    pub(super) fn new(words: &'a [Word], granules: u64) -> Self {
        Self { words, granules, own: STRIPE * (stripe(STRIPES) + 1) }
    }

    pub(super) fn set_up(self) {
        self.words[..STRIPE * (STRIPES + 1)].iter().for_each(|word| word.set_up(0));
    }

    /// The words of this thread's stripe.
    #[inline]
    fn own(self) -> &'a [Word] {
        &self.words[self.own..][..STRIPE]
    }

    /// This thread's set of hints, of so many.
    #[inline]
    pub(super) fn set(self, sets: usize) -> usize {
        let set = self.own()[SET].hint() as usize;
        if set == 0 || set > sets { self.first_set(sets) } else { set - 1 }
    }

    /// Stripes take one after the other.
    #[cold]
    fn first_set(self, sets: usize) -> usize {
        let set = self.words[SETS].hint_add(1) as usize % sets;
        self.own()[SET].set_hint(set as u64 + 1);
        set
    }

    /// The most granules ever taken.
    pub(super) fn high_water(self) -> u64 {
        self.words[HIGH_WATER].hint()
    }

    /// Granules were taken; `disturbed` if others were for a moment besides.
    #[inline]
    pub(super) fn take(self, granules: u64, disturbed: bool) {
        let own = self.own();
        let disturbed = disturbed && !mutant("disturbance not counted");
        let more = granules + u64::from(disturbed);
        let taken = own[TAKEN].hint_add(more).wrapping_add(more);
        let released = if disturbed {
            own[RELEASED].fetch_add(1, Ordering::AcqRel) + 1
        } else {
            own[RELEASED].load(Ordering::Relaxed)
        };
        let net = taken.wrapping_sub(released) as i64;
        if net > own[QUIET].hint() as i64 {
            self.raise(own, net);
        }
    }

    /// Granules became free.
    #[inline]
    pub(super) fn release(self, granules: u64) {
        let own = self.own();
        let released = own[RELEASED].fetch_add(granules, Ordering::AcqRel).wrapping_add(granules);
        let net = own[TAKEN].hint().wrapping_sub(released) as i64;
        if own[QUIET].hint() as i64 - net > self.most_room() {
            own[QUIET].set_hint((net + self.most_room() / 2) as u64);
        }
    }

    /// The most that a stripe keeps for itself, though it gives back more than it takes.
    #[inline]
    const fn most_room(self) -> i64 {
        (self.granules / (2 * STRIPES as u64)) as i64
    }

    /// Granules were taken for a moment and are free again.
    pub(super) fn disturb(self) {
        if mutant("disturbance not counted") {
            return;
        }
        self.own()[TAKEN].hint_add(1);
        self.own()[RELEASED].fetch_add(1, Ordering::AcqRel);
    }

    /// Raises the high-water mark if it has to be, and gives the stripe half of the room that no other has.
    #[cold]
    fn raise(self, own: &[Word], net: i64) {
        let taken = self.taken();
        let mut high = self.high_water();
        if taken > high {
            self.words[HIGH_WATER].hint_max(taken);
            high = taken;
        }
        let above = high - taken;
        // This stripe's own room is none, or it would not be here.
        let net_of =
            |stripe: &[Word]| stripe[TAKEN].hint().wrapping_sub(stripe[RELEASED].load(Ordering::Relaxed)) as i64;
        let mut rooms = self.sum(|stripe| {
            (stripe[QUIET].hint() as i64).wrapping_sub(net_of(stripe)).clamp(0, self.granules as i64) as u64
        });
        if rooms > above {
            // What was taken here just now was another's to take without a look: he has to look next time.
            self.stripes().for_each(|stripe| stripe[QUIET].set_hint(net_of(stripe) as u64));
            rooms = 0;
        }
        own[QUIET].set_hint((net + ((above - rooms) / 2) as i64) as u64);
    }

    /// A number that moves whenever granules became free, and that never comes back to a value it had (it wraps after
    /// 2^64 granules).
    pub(super) fn moves(self) -> u64 {
        self.sum(|stripe| stripe[RELEASED].load(Ordering::Acquire))
    }

    /// Granules taken, at about the time of the call.
    pub(super) fn taken(self) -> u64 {
        let taken = self.sum(|stripe| stripe[TAKEN].hint());
        let released = self.sum(|stripe| stripe[RELEASED].load(Ordering::Relaxed));
        (taken.wrapping_sub(released) as i64).clamp(0, self.granules as i64) as u64
    }

    fn stripes(self) -> impl Iterator<Item = &'a [Word]> {
        self.words[STRIPE..STRIPE * (STRIPES + 1)].chunks_exact(STRIPE)
    }

    fn sum(self, of: impl Fn(&[Word]) -> u64) -> u64 {
        self.stripes().fold(0, |sum, stripe| sum.wrapping_add(of(stripe)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    /// Whoever takes and whoever gives back, one after the other: the mark is what it was at most.
    #[test]
    fn the_high_water_mark_is_exact_whoever_takes_and_gives_back() {
        const GRANULES: u64 = 1000;
        let words: Vec<Word> = (0..STRIPE * (STRIPES + 1)).map(|_| Word::default()).collect();
        let on =
            |stripe: u64| Counters { words: &words, granules: GRANULES, own: STRIPE * (stripe as usize % STRIPES + 1) };
        let (mut taken, mut most, mut seed) = (0, 0, 9u64);
        for turn in 0..100_000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (stripe, granules) = (seed >> 33, 1 + (seed >> 40) % 60);
            // Up to three quarters, later up to all, in long waves.
            let limit = if turn < 50_000 { GRANULES * 3 / 4 } else { GRANULES };
            let rising = turn / 500 % 2 == 0;
            // In every third wave some only take, and the others only give back.
            let taker = if turn / 500 % 3 == 0 { stripe % 8 < 3 } else { (seed >> 60) < if rising { 10 } else { 6 } };
            if taker && taken + granules <= limit {
                on(stripe).take(granules, seed >> 50 & 7 == 0);
                taken += granules;
            } else if !taker && granules <= taken {
                on(stripe).release(granules);
                taken -= granules;
            }
            most = most.max(taken);
            assert_eq!((on(0).taken(), on(0).high_water()), (taken, most), "turn {turn}");
        }
        assert!(most > GRANULES * 9 / 10);
    }
}
