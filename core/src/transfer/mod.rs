//! The life of a transfer, in one word, and a table of them.
//!
//! A transfer is created, has work posted and completed any number of times, and ends in exactly one [`Outcome`] (I2).
//! It ends only when nothing of it is outstanding, because until then its memory may still be touched (I3): a transfer
//! that fails, times out or is cancelled with work outstanding is *fencing* first.
//!
//! # The rule for success
//!
//! A transfer whose posted work has all completed well is idle, not ended: more may be posted. Its owner calls
//! [`finish`](TransferTable::finish) once when it will post no more, before, between or after the last completions; the
//! transfer has succeeded as soon as it is finished and nothing is outstanding. So a transfer that posts everything at
//! once is `create`, `post(n)`, `finish`, n × `complete`, and the last `complete` says [`Progress::Fenced`].
//!
//! # Who does what
//!
//! Any thread may deliver any event at any time. Events of a transfer that has ended, or whose slot was released and
//! taken again, are refused by name and change nothing. Exactly one caller is told [`Progress::Fenced`], and exactly
//! one `release` succeeds.
//!
//! What it cannot tell: which of several outstanding pieces a completion belongs to. Whoever could deliver one
//! completion twice while others are outstanding has to stop that himself; a provider delivers each once.
//!
//! # Transitions
//!
//! "The decided end" is Failed, TimedOut or Cancelled, as the first failure or abandonment decided.
//!
#![doc = include_str!("transitions.md")]
//!
//! ```
//! use towline_core::{Word, transfer::{Cause, Outcome, Progress, Reason, Refused, TransferTable, storage_words}};
//!
//! let table = TransferTable::new((0..storage_words(16)).map(|_| Word::default()).collect::<Vec<_>>());
//!
//! let id = table.create()?;
//! table.post(id, 2)?;
//! table.finish(id)?;
//! assert_eq!(table.complete(id, Ok(()))?, Progress::Pending { left: 1 });
//! assert_eq!(table.complete(id, Ok(()))?, Progress::Fenced(Outcome::Succeeded));
//! assert_eq!(table.release(id)?, Outcome::Succeeded);
//! assert_eq!(table.complete(id, Ok(())), Err(Refused::Stale { id }));
//!
//! let id = table.create()?;
//! table.post(id, 2)?;
//! assert_eq!(table.abandon(id, Reason::TimedOut)?, Progress::Pending { left: 2 });
//! table.quarantine(id)?; // the caller has left; the memory stays ours
//! table.complete(id, Err(Cause(5)))?;
//! assert_eq!(table.complete(id, Err(Cause(5)))?, Progress::Fenced(Outcome::TimedOut));
//! # Ok::<(), Box<dyn core::error::Error>>(())
//! ```

mod id;
mod state;
mod table;
mod transitions;

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;

pub use id::{Immediate, MAX_CHUNK, TransferId, WorkRequestId};
pub use state::{Cause, Outcome, Phase, Reason, State};
pub use table::{MAX_TRANSFERS, Progress, Refused, TableFull, TransferTable, storage_words};
pub use transitions::{Event, TRANSITIONS, Target, Transition, next};
