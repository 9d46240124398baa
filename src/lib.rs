//! towline moves large buffers (KV caches, tensors, activations) between processes and machines at the speed of the
//! wire.

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("towline supports 64-bit Linux only");

mod builder;
mod driver;
mod endpoint;
pub mod engine;
mod error;
mod layout;
mod path;
mod payload;
mod pool;
mod sys;
mod ticket;

pub use builder::Builder;
pub use endpoint::{Endpoint, Origin};
pub use engine::{Limits, PutOptions, Stats};
pub use error::{Error, ErrorKind, Gone, Result};
pub use layout::{DType, Layout, MAX_DIMENSIONS, MAX_NAME, MAX_PARTS, PART_ALIGN, PartLayout};
pub use path::{Path, Paths};
pub use payload::{Element, Part, PartRef, Payload, TransferInfo, TypeError, View, ViewPart};
pub use pool::Buffer;
pub use ticket::{TICKET_PREFIX, Ticket};
pub use towline_control::session::{Secret, SecretError};
pub use towline_verbs::memory::HugePages;

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
