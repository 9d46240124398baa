//! towline moves large buffers (KV caches, tensors, activations) between processes and machines at the speed of the
//! wire.
//!
//! # Overview
//!
//! Everything begins with an [`Endpoint`], built by [`Endpoint::builder`]. It owns a pool of memory and is producer and
//! consumer at once.
//!
//! - The **producer** fills [`Buffer`]s of the pool ([`Endpoint::alloc`]) and publishes them under a key as one *payload*
//!   of several named, typed [`Part`]s ([`Endpoint::put`]). That copies nothing. Bytes that lie elsewhere are copied in.
//! - A **consumer** gets the payload by the [`Ticket`] that `put` gave, or by the producer's address and the key
//!   ([`Endpoint::get`]), for which it waits if it is not put yet. It reads the producer's memory by itself, into its own
//!   pool; the producer's processor is not needed for that. On the same host [`Endpoint::view`] gives a read-only [`View`]
//!   of the producer's memory without copying a byte.
//! - A payload is for one consumer, and is kept for five minutes after its last use; [`PutOptions`] says otherwise.
//!
//! How the bytes travel is chosen for each pair of endpoints, and each [`TransferInfo`] says which [`Path`] it was and
//! why: memory shared within a host (`shm`, and `direct` within one process), RDMA where both ends have devices, or TCP.
//! [`Builder::allow_paths`] limits the choice; what is not allowed is an error, never a silent fallback.
//!
//! Without further options an endpoint is for its own host. Beyond it, peers share a [`Secret`], or an endpoint is built
//! [`insecure`](Builder::insecure) by name.
//!
//! # Example
//!
//! ```
//! use std::time::Duration;
//! use towline::{DType, Endpoint, Part, Ticket};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // The producer.
//! let producer = Endpoint::builder().pool_size(16 << 20).build()?;
//! let mut keys = producer.alloc(16 * 128 * size_of::<f32>())?;
//! keys.elements_mut::<f32>()?.fill(0.5);
//! let ticket = producer.put("request 42", [Part::buffer("k", DType::F32, &[16, 128], keys)])?.to_string();
//!
//! // The consumer, usually another process or machine, which was handed the ticket: one word of text.
//! let consumer = Endpoint::builder().pool_size(16 << 20).build()?;
//! let payload = consumer.get(ticket.parse::<Ticket>()?, Duration::from_secs(5))?;
//! let keys = payload.named("k").ok_or("no such part")?;
//! assert_eq!(keys.layout().shape, [16, 128]);
//! assert!(keys.elements::<f32>()?.iter().all(|value| *value == 0.5));
//! # Ok(())
//! # }
//! ```
//!
//! Two processes are in `examples/kv_producer.rs` and `examples/kv_consumer.rs` of the repository.
//!
//! # What holds
//!
//! - Memory that a peer or device may still touch belongs to nobody else: buffers are owned, not borrowed, and a
//!   destination comes back only when nothing can write it any more.
//! - What arrives is whole and is what was put, or there is an [`Error`]. Each names the operation, the cause and the way
//!   out: see [`ErrorKind`].
//! - Every wait has a deadline, and everything has a limit: see [`Limits`].
//! - Calls block. An endpoint serves any number of threads and peers with one thread of its own.
//!
//! `DESIGN.md` of the repository states these as numbered invariants, with the tests of each; `SECURITY.md` says what a
//! secret protects and what it does not.
//!
//! # Features
//!
//! `noise` (default): secrets between peers. `cli` (default): the command `towline`; a library user builds without it, by
//! `default-features = false, features = ["noise"]`. The crates below this one, `towline-verbs`, `towline-control` and
//! `towline-core`, are libraries of their own.

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("towline supports 64-bit Linux only");

mod builder;
mod driver;
mod element;
mod endpoint;
// The machine under the endpoint, public for the simulation that tests it and for nobody else: it changes without
// notice.
#[doc(hidden)]
pub mod engine;
mod error;
mod layout;
mod options;
mod path;
mod payload;
mod pool;
mod sys;
mod ticket;

pub use builder::Builder;
pub use element::{Element, TypeError};
pub use endpoint::{Endpoint, Origin};
pub use engine::Stats;
pub use error::{Error, ErrorKind, Gone, Result};
pub use layout::{DType, Layout, MAX_DIMENSIONS, MAX_NAME, MAX_PARTS, PART_ALIGN, PartLayout};
pub use options::{Limits, PutOptions};
pub use path::{Path, Paths};
pub use payload::{Part, PartRef, Payload, TransferInfo, View, ViewPart};
pub use pool::Buffer;
pub use ticket::{TICKET_PREFIX, Ticket};
pub use towline_control::session::{Secret, SecretError};
pub use towline_verbs::ibv::Missing;
pub use towline_verbs::memory::HugePages;

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
