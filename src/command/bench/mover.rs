//! What the bench needs of a transport: the library's endpoint, or in tests a stand-in.

use super::content::Readable;
use super::layout::PartPlan;
use crate::command::Failure;
use crate::command::args::Path;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::time::Duration;

/// Where a producer is reached, in the transport's own words.
pub(crate) type Address = String;

/// How a payload travelled, as its completion tells.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Journey {
    pub(crate) path: String,
    pub(crate) reason: String,
    pub(crate) rails: u32,
    pub(crate) retries: u64,
    pub(crate) fallback_bytes: u64,
}

/// What one side of a row needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Needs {
    /// Bytes of the pool.
    pub(crate) pool: u64,
    /// The path that is allowed.
    pub(crate) path: Path,
    /// The RDMA devices that are named.
    pub(crate) devices: Vec<String>,
    /// Where to listen.
    pub(crate) bind: SocketAddr,
    /// Whether the other side is another machine.
    pub(crate) remote: bool,
    /// How long one call may wait.
    pub(crate) patience: Duration,
}

/// A transport. Its methods may be called from several threads at once.
pub(crate) trait Mover: Sync + Sized {
    /// A writable buffer of the pool.
    type Buffer: AsMut<[u8]> + Send;
    /// A part that is ready to be put.
    type Part<'a>: Send;
    /// What a consumer received.
    type Payload: Arrived + Send;

    /// Starts one side.
    fn open(needs: &Needs) -> Result<Self, Failure>;
    /// Where consumers reach this side.
    fn address(&self) -> Result<Address, Failure>;
    /// A buffer of the pool, waiting for room.
    fn alloc(&self, len: usize) -> Result<Self::Buffer, Failure>;
    /// A part whose bytes are in the pool.
    fn buffer_part(plan: &PartPlan, buffer: Self::Buffer) -> Self::Part<'_>;
    /// A part whose bytes are the caller's.
    fn bytes_part<'a>(plan: &'a PartPlan, bytes: &'a [u8]) -> Self::Part<'a>;
    /// Waits until `consumers` consumers wait for `key`, and fails when whoever ordered the operation is `gone`.
    fn await_consumers(&self, key: &str, consumers: u32, gone: &(dyn Fn() -> bool + Sync)) -> Result<(), Failure>;
    /// Publishes `parts` for `consumers` consumers.
    fn put(&self, key: &str, parts: Vec<Self::Part<'_>>, consumers: u32) -> Result<(), Failure>;
    /// Gets `key` into the pool, waiting for it.
    fn get(&self, from: &Address, key: &str) -> Result<Self::Payload, Failure>;
    /// Maps `key` in place, waiting for it.
    fn view(&self, from: &Address, key: &str) -> Result<Self::Payload, Failure>;
    /// Gets `key` into the caller's own bytes, waiting for it; [`Arrived::into_own`] gives them back.
    fn get_into(&self, from: &Address, key: &str, own: Vec<u8>) -> Result<Self::Payload, Failure>;
    /// Ends this side, when nothing of it is in use any more.
    fn close(self) -> Result<(), Failure>;
}

/// A payload that arrived.
pub(crate) trait Arrived: Readable {
    /// How it travelled.
    fn journey(&self) -> Journey;
    /// The bytes of a part in the consumer's own pool; `None` of a view, whose memory is the producer's.
    fn bytes(&self, part: usize) -> Option<&[u8]>;
    /// Reads one byte of every page.
    fn touch(&self);
    /// The caller's own bytes that it was got into.
    fn into_own(self) -> Option<Vec<u8>>;
}
