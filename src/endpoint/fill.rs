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

/// Bytes that leave at least in the time that a step of the copy takes, for the wire to come before the copy.
const LEAST_SENT: u64 = FILL_STEP as u64 / 4;

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
    let mut wire = Wire { shared, id, loans, hand: None, step: Duration::ZERO, stalled: false };
    for (index, (fill, loan)) in fills.iter().zip(loans).enumerate() {
        let next = fills.get(index + 1).map_or(total, |next| next.before);
        for (step, bytes) in fill.bytes.chunks(FILL_STEP).enumerate() {
            if wire.serve() {
                return Ok(());
            }
            let done = (step * FILL_STEP) as u64;
            let started = Instant::now();
            shared.write(fill.offset + done, bytes)?;
            wire.step = started.elapsed();
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
    /// Held as long as bytes are lent.
    hand: Option<Hand<'a>>,
    /// How long a step of the copy takes.
    step: Duration,
    /// Whether it took hardly anything in the time of a step.
    stalled: bool,
}

impl Wire<'_> {
    /// Drives as long as lent bytes leave at some speed, all of them once at most: neither more consumers nor one that reads
    /// again and again, or little by little, keep a put from its copy. A wire that is full for a moment is waited for as
    /// long as a step of the copy takes: a step that is copied meanwhile keeps this thread from it when it goes on, and the
    /// memory busy. Whether nobody needs the bytes any more.
    fn serve(&mut self) -> bool {
        let driver = &self.shared.driver;
        let taken = || self.loans.iter().map(|loan| loan.taken()).sum::<u64>();
        let all = self.loans.iter().map(|loan| loan.len()).sum::<u64>();
        let mut since = (taken(), Instant::now());
        loop {
            let (over, lent) = driver.with(|engine| (engine.is_over(self.id), engine.is_lent(self.id)));
            if over || !lent {
                self.hand = None;
                return over;
            }
            let patience = if self.stalled { Duration::ZERO } else { self.step };
            let left = patience.saturating_sub(since.1.elapsed());
            if !self.hand.get_or_insert_with(|| driver.lend_a_hand()).turn(left) || since.0 >= all {
                return false;
            }
            let now = taken();
            if now >= (since.0 + LEAST_SENT).min(all) {
                since = (now, Instant::now());
                self.stalled = false;
            } else if since.1.elapsed() >= patience {
                self.stalled = true;
                return false;
            }
        }
    }
}
