//! Counts that make queue overflow impossible, and selective signalling.
//!
//! Three queues can overflow, and each has its count:
//!
//! - the *send queue*: [`SendQueue`] admits a request only while there is a place, remembers the ids of what is
//!   posted, and retires requests when a completion shows that they are done;
//! - the *completion queue*: [`CompletionBudget`] lets queues be attached only while it can hold all of them in full.
//!   That is the only rule that is safe: when a queue pair goes to the error state every request completes, those too
//!   that were posted without asking for a completion;
//! - the *receive queue of the peer*: [`ReceiveCredits`], granted by the peer as a running total, so that a grant may
//!   arrive twice, late or out of order (I11).

mod budget;
mod receive;
mod send_queue;

#[cfg(test)]
mod tests;

pub use budget::{BudgetExceeded, CompletionBudget};
pub use receive::{NoCredit, ReceiveCredits, ReceiveGrants};
pub use send_queue::{QueueFull, SendQueue, Signal, UnknownRequest};
