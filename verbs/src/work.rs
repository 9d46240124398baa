//! Work requests and completions.

use crate::{MemoryRegion, RemoteSlice};
use core::fmt;

/// A part of a local region: where a request's bytes come from or go to. Holding it keeps the region registered.
#[derive(Debug, Clone)]
#[doc(alias = "ibv_sge")]
pub struct LocalSlice {
    /// The region.
    pub region: MemoryRegion,
    /// First byte, from the region's start.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// What a work request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[doc(alias = "ibv_wr_opcode")]
pub enum Opcode {
    /// Remote memory into local memory.
    Read,
    /// Local memory into remote memory; complete when delivered.
    Write,
    /// As `Write`, and then consumes one receive of the peer, which completes with the immediate.
    WriteWithImmediate(u32),
    /// Local memory into the peer's oldest posted receive.
    Send,
    /// As `Send`, with an immediate.
    SendWithImmediate(u32),
    /// (In completions only.) A receive that a `Send` filled or a `WriteWithImmediate` consumed.
    Receive,
}

/// A request for the send queue.
#[derive(Debug, Clone)]
#[doc(alias = "ibv_send_wr")]
pub struct WorkRequest {
    /// The caller's number, returned in the completion.
    pub id: u64,
    /// What to do.
    pub opcode: Opcode,
    /// Local memory, in order; at most `max_sge` slices. May be empty (a request of zero bytes).
    pub local: Vec<LocalSlice>,
    /// Remote memory, for reads and writes. Its length equals the sum of the local lengths.
    pub remote: Option<RemoteSlice>,
}

/// A request for the receive queue.
#[derive(Debug, Clone)]
#[doc(alias = "ibv_recv_wr")]
pub struct ReceiveRequest {
    /// The caller's number, returned in the completion.
    pub id: u64,
    /// Where the message goes; `None` for a receive that only takes immediates.
    pub local: Option<LocalSlice>,
}

/// How a work request ended, by the names of the verbs specification.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[doc(alias = "ibv_wc_status")]
#[non_exhaustive]
pub enum CompletionStatus {
    /// Done.
    Success,
    /// Not done: the queue pair went to the error state first. The memory is not touched any more.
    Flushed,
    /// A message was longer than the receive it met.
    LocalLength,
    /// Local memory did not allow the access.
    LocalProtection,
    /// The device could not do it: the queue pair or the device itself is broken, or says no more than that.
    LocalOperation,
    /// The peer refused: key unknown or revoked, out of bounds, or a right missing.
    RemoteAccess,
    /// The peer could not make sense of the request, or had no receive for it.
    RemoteInvalidRequest,
    /// The peer failed while doing it.
    RemoteOperation,
    /// The connection was lost, or the peer stopped answering.
    TransportRetryExceeded,
    /// The peer had no receive posted, for too long.
    ReceiverNotReadyExceeded,
}

impl CompletionStatus {
    /// What it says in plain words.
    #[must_use]
    #[doc(alias = "ibv_wc_status_str")]
    pub const fn text(self) -> &'static str {
        match self {
            Self::Success => "success",
            Self::Flushed => "flushed: the queue pair went to the error state before this request was done",
            Self::LocalLength => "local length error: the message is longer than the receive posted for it",
            Self::LocalProtection => "local protection error",
            Self::LocalOperation => "local operation error",
            Self::RemoteAccess => "remote access error: key unknown or revoked, out of bounds, or a right missing",
            Self::RemoteInvalidRequest => "remote invalid request",
            Self::RemoteOperation => "remote operation error",
            Self::TransportRetryExceeded => "the connection was lost or the peer stopped answering",
            Self::ReceiverNotReadyExceeded => "the peer had no receive posted",
        }
    }
}

impl fmt::Display for CompletionStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

/// The end of one work request. After it the provider does not touch the request's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(alias = "ibv_wc")]
pub struct Completion {
    /// The request's own number.
    pub id: u64,
    /// How it ended.
    pub status: CompletionStatus,
    /// What it was ([`Opcode::Receive`] for receives).
    pub opcode: Opcode,
    /// Bytes moved; 0 unless successful.
    pub bytes: u64,
    /// The immediate that a receive took.
    pub immediate: Option<u32>,
    /// [`QueuePair::number`](crate::QueuePair::number) of the queue pair.
    pub queue_pair: u32,
    /// The provider's own code for a failure (an errno, a vendor syndrome); 0 if it has none.
    pub vendor_error: u32,
}
