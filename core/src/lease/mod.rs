//! The life of a published payload, and of the leases on it.
//!
//! A *payload* is published for a number of consumers and may be read up to its watermark while it is being filled. It
//! ends when all its consumers have had it, when it is removed or replaced, or when it was not used for too long; never
//! while someone reads it. A *lease* is one consumer's right to read one payload until a deadline; it ends by being
//! closed or by its deadline, whichever comes first.
//!
//! [`PayloadTable`] counts readers, and tells exactly one caller that a payload has ended (I2): that one frees its memory
//! and then releases the slot. [`LeaseTable`] makes sure that each lease is given back exactly once, whatever races: who
//! is told that a lease ended closes the payload for it. Deadlines are ticks that the caller passes in.
//!
//! ```
//! use towline_core::Word;
//! use towline_core::lease::*;
//!
//! fn words(n: usize) -> Vec<Word> {
//!     (0..n).map(|_| Word::default()).collect()
//! }
//! let payloads = PayloadTable::new(words(payload_words(8)));
//! let leases = LeaseTable::new(words(lease_words(32)));
//!
//! let payload = payloads.publish(Publication { len: 4096, filled: 4096, consumers: Consumers::Count(1), keep: 1_000 }, 0)?;
//! payloads.open(payload)?;
//! let lease = leases.grant(payload, 500)?;
//!
//! assert_eq!(payloads.expire(payload, 5_000)?, Expiry::InUse { readers: 1 });
//! assert_eq!(leases.close(lease)?, payload); // the deadline can't end it any more
//! assert_eq!(payloads.close(payload, Use::Consumed, 400)?, Progress::Ended(End::Consumed)); // free the memory, then
//! payloads.release(payload)?;
//! # Ok::<(), Box<dyn core::error::Error>>(())
//! ```

mod leases;
mod payloads;
mod state;

#[cfg(test)]
mod tests;

pub use crate::transfer::TableFull;
pub use leases::{LeaseExpiry, LeaseId, LeaseRefused, LeaseTable, lease_words};
pub use payloads::{
    Consumers, Expiry, PayloadId, PayloadRefused, PayloadTable, Progress, Publication, PublishError, Removal, Use,
    payload_words,
};
pub use state::{End, MAX_CONSUMERS, MAX_PAYLOAD, MAX_READERS, PayloadPhase};
