//! Receives that the peer has posted.

use crate::sync::{Ordering, Word};
use core::fmt;

/// The sender's side: how many more messages the peer has receives for. Any thread may call anything.
///
/// Totals are 32 bits on the wire and wrap; they are compared by their distance, so that at most 2^31 - 1 receives may
/// be granted ahead.
#[derive(Debug, Default)]
pub struct ReceiveCredits {
    /// Low half: total granted; high half: total used.
    totals: Word,
}

impl ReceiveCredits {
    /// No credit yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Messages that may be sent now.
    #[must_use]
    pub fn available(&self) -> u32 {
        let (granted, used) = unpack(self.totals.load(Ordering::Acquire));
        granted.wrapping_sub(used)
    }

    /// Takes the credit for one message.
    ///
    /// # Errors
    /// There is none: wait for a grant.
    pub fn take(&self) -> Result<(), NoCredit> {
        self.totals
            .update(|totals| {
                let (granted, used) = unpack(totals);
                if granted == used { Err(NoCredit { granted }) } else { Ok(pack(granted, used.wrapping_add(1))) }
            })
            .map(|_| ())
    }

    /// The peer says that it has granted `total` receives since the connection began. One that is late or comes again
    /// changes nothing (I11). Gives the number of credits that are new.
    pub fn grant(&self, total: u32) -> u32 {
        let changed = self.totals.update(|totals| {
            let (granted, used) = unpack(totals);
            let ahead = total.wrapping_sub(granted);
            if ahead == 0 || ahead > u32::MAX / 2 { Err(()) } else { Ok(pack(total, used)) }
        });
        changed.map_or(0, |(before, _)| total.wrapping_sub(unpack(before).0))
    }
}

fn unpack(totals: u64) -> (u32, u32) {
    (totals as u32, (totals >> 32) as u32)
}

fn pack(granted: u32, used: u32) -> u64 {
    u64::from(granted) | u64::from(used) << 32
}

/// The receiver's side: counts receives posted, and says when the peer is worth telling. For the one who posts them.
///
/// ```
/// use towline_core::credits::{ReceiveCredits, ReceiveGrants};
///
/// let (mut grants, credits) = (ReceiveGrants::new(4), ReceiveCredits::new());
/// credits.grant(grants.posted(8).expect("the batch is full"));
/// assert_eq!(credits.available(), 8);
/// assert_eq!(grants.posted(3), None); // told with the next frame that goes anyway, or with the batch
/// assert_eq!(grants.total(), 11);
/// ```
#[derive(Debug)]
pub struct ReceiveGrants {
    posted: u32,
    told: u32,
    batch: u32,
}

impl ReceiveGrants {
    /// The peer is to be told each time `batch` more receives were posted (0 counts as 1).
    #[must_use]
    pub fn new(batch: u32) -> Self {
        Self { posted: 0, told: 0, batch: batch.max(1) }
    }

    /// `n` more receives were posted; gives the total to tell the peer if a batch is full.
    pub fn posted(&mut self, n: u32) -> Option<u32> {
        self.posted = self.posted.wrapping_add(n);
        (self.posted.wrapping_sub(self.told) >= self.batch).then(|| self.total())
    }

    /// The total to tell the peer now, in a frame that goes anyway.
    pub fn total(&mut self) -> u32 {
        self.told = self.posted;
        self.posted
    }
}

/// The peer has no receive posted for another message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoCredit {
    /// The running total that the peer granted, all used.
    pub granted: u32,
}

impl fmt::Display for NoCredit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "receive credits: all {} that the peer granted are used; wait for its next grant", self.granted)
    }
}

impl core::error::Error for NoCredit {}

#[cfg(test)]
impl ReceiveCredits {
    pub(super) fn take_for_test(&self, n: u32) {
        let (granted, used) = unpack(self.totals.load(Ordering::Acquire));
        assert!(n <= granted.wrapping_sub(used));
        self.totals.store(pack(granted, used.wrapping_add(n)), Ordering::Release);
    }
}
