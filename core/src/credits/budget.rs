//! How many requests may be outstanding on the queues of one completion queue.

use crate::sync::{Ordering, Word};
use core::fmt;

/// The entries of one completion queue, given out to the queues attached to it. Any thread may call anything.
///
/// ```
/// use towline_core::credits::CompletionBudget;
///
/// let budget = CompletionBudget::new(256);
/// budget.attach(128 + 64)?; // a queue pair's send and receive queue in full
/// assert_eq!(budget.attach(128).unwrap_err().free, 64);
/// # Ok::<(), towline_core::credits::BudgetExceeded>(())
/// ```
#[derive(Debug)]
pub struct CompletionBudget {
    capacity: u32,
    attached: Word,
}

impl CompletionBudget {
    /// A completion queue of `capacity` entries with nothing attached.
    #[must_use]
    pub fn new(capacity: u32) -> Self {
        Self { capacity, attached: Word::default() }
    }

    /// Entries in all.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Entries that no attached queue claims.
    #[must_use]
    pub fn free(&self) -> u32 {
        self.capacity - (self.attached.load(Ordering::Acquire) as u32).min(self.capacity)
    }

    /// Claims `entries`: as many as the queue can hold requests, whether they ask for completions or not.
    ///
    /// # Errors
    /// There are not that many left.
    pub fn attach(&self, entries: u32) -> Result<(), BudgetExceeded> {
        self.attached
            .update(|attached| {
                let sum = attached + u64::from(entries);
                let free = self.capacity - (attached as u32).min(self.capacity);
                if sum <= u64::from(self.capacity) { Ok(sum) } else { Err(BudgetExceeded { need: entries, free }) }
            })
            .map(|_| ())
    }

    /// Gives the entries of a queue back that was destroyed, and whose completions were all taken from the completion
    /// queue.
    ///
    /// # Errors
    /// More than is attached: `need` and `free` say what was to be given back, and how much is attached.
    pub fn detach(&self, entries: u32) -> Result<(), BudgetExceeded> {
        self.attached
            .update(|attached| {
                attached.checked_sub(u64::from(entries)).ok_or(BudgetExceeded { need: entries, free: attached as u32 })
            })
            .map(|_| ())
    }
}

/// A completion queue can't hold that much.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BudgetExceeded {
    /// Entries asked for.
    pub need: u32,
    /// Entries there were.
    pub free: u32,
}

impl fmt::Display for BudgetExceeded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "completion queue: need {} entries, {} are left; use a larger or another queue", self.need, self.free)
    }
}

impl core::error::Error for BudgetExceeded {}
