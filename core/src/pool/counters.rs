//! How much is taken, how much ever was, and what moved.
//!
//! Counters are striped: a thread counts on a stripe of its own, as far as there are enough, and readers add the stripes
//! up. So threads that allocate at the same time do not meet here.

use super::shape::{STRIPE, STRIPES};
use crate::sync::{Ordering, Word, mutant, stripe};

// The words of a stripe.
/// Granules ever taken, and one for each disturbance.
const TAKEN: usize = 0;
/// Granules ever given back, and one for each disturbance. Moved *after* granules became free.
const RELEASED: usize = 1;
/// While the stripe has taken no more than this net of what it gave back, the high-water mark stands.
const QUIET: usize = 2;

#[derive(Debug, Clone, Copy)]
pub(super) struct Counters<'a> {
    /// The most granules ever taken.
    pub(super) high_water: &'a Word,
    pub(super) stripes: &'a [Word],
    pub(super) granules: u64,
}

impl<'a> Counters<'a> {
    pub(super) fn set_up(self) {
        for word in core::iter::once(self.high_water).chain(self.stripes) {
            word.set_up(0);
        }
    }

    #[inline]
    fn own(self) -> &'a [Word] {
        let first = stripe(STRIPES) * STRIPE;
        &self.stripes[first..first + STRIPE]
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
        self.own()[RELEASED].fetch_add(granules, Ordering::AcqRel);
    }

    /// Granules were taken for a moment and are free again.
    pub(super) fn disturb(self) {
        if mutant("disturbance not counted") {
            return;
        }
        self.own()[TAKEN].hint_add(1);
        self.own()[RELEASED].fetch_add(1, Ordering::AcqRel);
    }

    /// Raises the high-water mark if it has to be, and leaves the stripe its share of the room below it.
    #[cold]
    fn raise(self, own: &[Word], net: i64) {
        let taken = self.taken();
        let high = self.high_water.hint().max(taken);
        self.high_water.hint_max(high);
        own[QUIET].set_hint((net + ((high - taken) / STRIPES as u64) as i64) as u64);
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

    fn sum(self, of: impl Fn(&[Word]) -> u64) -> u64 {
        self.stripes.chunks_exact(STRIPE).fold(0, |sum, stripe| sum.wrapping_add(of(stripe)))
    }
}
