//! The copy of borrowed bytes into the pool, beside the wire that may have them before.

use super::Shared;
use crate::driver::Hand;
use crate::engine::PayloadId;
use crate::sys;
use crate::{Error, ErrorKind, Result};
use std::sync::Arc;
use std::time::{Duration, Instant};
use towline_verbs::memory::Loan;

/// Bytes copied into the pool between two times that readers are told how far the copy is: large enough that telling
/// costs little, small enough that reading begins early. Measured over shared memory: 1 MiB is 1.3 times as fast as
/// 4 MiB.
pub(super) const FILL_STEP: usize = 1 << 20;

/// How many times slower than the copy the wire may be, to come before it.
const SLOWEST: u32 = 4;

/// Bytes that leave at least in the time that a step of the copy takes, for the wire to come before the copy.
const LEAST_SENT: u64 = FILL_STEP as u64 / SLOWEST as u64;

/// Most steps of the copy between two looks at a wire that takes nothing.
const MOST_REST: u32 = 16;

/// A bound of the time of all of a copy where none of it is known yet; for arithmetic only.
const LONGEST: Duration = Duration::from_secs(3600);

/// Borrowed bytes of one part.
pub(super) struct Fill<'a> {
    pub(super) part: usize,
    /// Where in the pool they go.
    pub(super) offset: u64,
    /// Bytes of the payload before them.
    pub(super) before: u64,
    pub(super) bytes: &'a [u8],
}

impl Shared {
    pub(super) fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.pool.memory().write(offset, bytes).map_err(|error| Error::new("put", ErrorKind::Verbs(error)))
    }
}

struct FillGuard<'a> {
    shared: &'a Shared,
    id: PayloadId,
}

impl Drop for FillGuard<'_> {
    fn drop(&mut self) {
        self.shared.driver.with(|engine| engine.filled(sys::boot_clock(), self.id));
    }
}

/// Copies the bytes in, and tells readers how far it is. Those that are read where they are, are copied while the wire
/// has no use for this thread, and not at all once whoever the payload was for has it.
pub(super) fn fill(shared: &Shared, id: PayloadId, fills: &[Fill<'_>], loans: &[Arc<Loan>], total: u64) -> Result<()> {
    // While it is being filled a payload keeps its memory, whatever becomes of it; and not a moment longer, also
    // when this thread panics.
    let _guard = FillGuard { shared, id };
    let mut wire = Wire::new(shared, id, loans);
    for (index, (fill, loan)) in fills.iter().zip(loans).enumerate() {
        let next = fills.get(index + 1).map_or(total, |next| next.before);
        for (step, bytes) in fill.bytes.chunks(FILL_STEP).enumerate() {
            if wire.serve() {
                return Ok(());
            }
            let done = (step * FILL_STEP) as u64;
            let started = Instant::now();
            shared.write(fill.offset + done, bytes)?;
            if bytes.len() == FILL_STEP {
                wire.copied(started.elapsed());
            }
            let upto = fill.before + done + bytes.len() as u64;
            let watermark = if upto == fill.before + fill.bytes.len() as u64 { next } else { upto };
            shared.driver.with(|engine| engine.raise_watermark(sys::boot_clock(), id, watermark));
        }
        loan.copied();
    }
    Ok(())
}

/// The wire as it takes lent bytes.
struct Wire<'a> {
    shared: &'a Shared,
    id: PayloadId,
    loans: &'a [Arc<Loan>],
    /// Bytes lent.
    all: u64,
    /// The shortest time that a step of the copy has taken; none yet.
    step: Option<Duration>,
    /// How long it was driven.
    driven: Duration,
    /// Steps of the copy until it is looked at again, and how many there will be after the next time that it takes nothing.
    rest: (u32, u32),
    /// Held while it takes bytes: whatever it needs is done here, and by nobody else, also during a step of the copy.
    hand: Option<Hand<'a>>,
    /// Whether it is not driven any more.
    is_left: bool,
}

impl<'a> Wire<'a> {
    fn new(shared: &'a Shared, id: PayloadId, loans: &'a [Arc<Loan>]) -> Self {
        let all = loans.iter().map(|loan| loan.len()).sum();
        Self { shared, id, loans, all, step: None, driven: Duration::ZERO, rest: (0, 1), hand: None, is_left: false }
    }

    /// A whole step of the copy took so long.
    fn copied(&mut self, step: Duration) {
        self.step = Some(self.step.map_or(step, |least| least.min(step)));
    }

    /// How long all of the copy takes, as far as is known.
    fn whole_copy(&self) -> Duration {
        let steps = u32::try_from(self.all.div_ceil(FILL_STEP as u64)).unwrap_or(u32::MAX);
        self.step.map_or(Duration::MAX, |step| step.saturating_mul(steps))
    }

    /// Drives as long as lent bytes leave at a quarter of the copy's speed at least, and no longer than they would need at
    /// that; and all of them once at most. So neither more consumers nor one that reads again and again, or little by little,
    /// keep a put from its copy. A wire that is full for a moment is waited for as long as a step of the copy takes: a step
    /// that is copied meanwhile keeps this thread from it when it goes on, and the memory busy. Whether nobody needs the
    /// bytes any more.
    fn serve(&mut self) -> bool {
        if self.is_left || self.rest.0 > 0 {
            self.rest.0 = self.rest.0.saturating_sub(1);
            return self.shared.driver.with(|engine| engine.is_over(self.id));
        }
        let began = Instant::now();
        let is_over = self.drive();
        self.driven += began.elapsed();
        self.is_left |= self.driven > self.whole_copy().saturating_mul(SLOWEST);
        if self.is_left || self.rest.0 > 0 {
            self.hand = None; // others drive during the copy
        }
        is_over
    }

    /// One time of driving.
    fn drive(&mut self) -> bool {
        let driver = &self.shared.driver;
        let taken = || self.loans.iter().map(|loan| loan.taken()).sum::<u64>();
        // A wire that took nothing when it was looked at last is not waited for.
        let patience = if self.rest.1 > 1 { Duration::ZERO } else { self.step.unwrap_or_default() };
        let mut since = (taken(), Instant::now());
        let until = since.1 + self.whole_copy().min(LONGEST).saturating_mul(SLOWEST).saturating_sub(self.driven);
        loop {
            let (over, lent) = driver.with(|engine| (engine.is_over(self.id), engine.is_lent(self.id)));
            if over || !lent {
                self.hand = None;
                return over;
            }
            if since.0 >= self.all {
                self.is_left = true;
                return false;
            }
            let left = patience.saturating_sub(since.1.elapsed());
            if !self.hand.get_or_insert_with(|| driver.lend_a_hand()).turn(left) {
                // Somebody is in the loop, and leaves it to this thread if he only does it because nobody else did.
                if left.is_zero() {
                    self.rest.0 = self.rest.1 - 1;
                    return false;
                }
                std::thread::yield_now();
                continue;
            }
            let now = taken();
            if now >= (since.0 + LEAST_SENT).min(self.all) {
                since = (now, Instant::now());
                self.rest = (0, 1);
            } else if since.1.elapsed() >= patience {
                self.rest = (self.rest.1, (self.rest.1 * 2).min(MOST_REST));
                return false;
            }
            if Instant::now() >= until {
                return false;
            }
        }
    }
}
