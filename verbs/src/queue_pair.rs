//! Queue pairs.

use crate::backend::{QpBackend, ViewBackend};
use crate::{
    CompletionQueue, Error, ProtectionDomain, QueuePairState, ReceiveRequest, RemoteSlice, Result, WorkRequest,
};
use std::sync::Arc;

/// How many requests a queue pair holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(alias = "ibv_qp_cap")]
pub struct QueuePairCapacity {
    /// Outstanding send requests (reads and writes too): posted and not yet polled as completions.
    pub max_send_wr: u32,
    /// Posted receives.
    pub max_recv_wr: u32,
}

/// A reliable, connected queue pair. Clones are handles of the same one; when the last is gone it goes to the error
/// state and is destroyed.
///
/// `Send` and `Sync`. Requests posted from several threads at once are started in some order.
#[derive(Debug, Clone)]
#[doc(alias = "ibv_qp")]
pub struct QueuePair {
    pub(crate) backend: Arc<dyn QpBackend>,
    pub(crate) pd: ProtectionDomain,
    pub(crate) _send_cq: CompletionQueue,
    pub(crate) _recv_cq: CompletionQueue,
}

impl QueuePair {
    /// Its number, unique within the device while it lives.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.backend.number()
    }

    /// The protection domain.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// Where it stands.
    #[must_use]
    pub fn state(&self) -> QueuePairState {
        self.backend.state()
    }

    /// The first cause that moved it to the error state.
    #[must_use]
    pub fn failure(&self) -> Option<Error> {
        self.backend.failure()
    }

    /// What the other end needs to connect to this one: opaque bytes, at most 512, to be carried by a connection that
    /// is trusted as much as the memory is (it may hold a one-time [`Token`](crate::Token)).
    #[must_use]
    pub fn address(&self) -> Vec<u8> {
        self.backend.address()
    }

    /// Largest length of one work request, in bytes: the smaller of what both ends' devices take, once it is connected.
    #[must_use]
    pub fn max_message_size(&self) -> u64 {
        let most = self.pd.device().info().capabilities.max_message_size;
        self.backend.max_message_size().map_or(most, |agreed| agreed.min(most))
    }

    /// Connects to the queue pair whose [`address`](Self::address) is `remote`. Exactly one end is `active`: it opens
    /// whatever connections the provider needs. Both ends must call it. Returns at once; the state goes to
    /// [`QueuePairState::Connecting`] and, as the device makes progress, to `ReadyToSend` or `Error`. Requests may be
    /// posted from now on.
    ///
    /// # Errors
    /// [`Cause::Malformed`](crate::Cause::Malformed) for an address that no peer of this provider made;
    /// [`Cause::State`](crate::Cause::State) when called twice.
    #[doc(alias = "ibv_modify_qp")]
    pub fn connect(&self, remote: &[u8], active: bool) -> Result<()> {
        self.backend.connect(remote, active)
    }

    /// Posts `requests` in order. Either all are accepted or, with an error, none.
    ///
    /// # Errors
    /// [`Cause::Limit`](crate::Cause::Limit) when the send queue has no room for them (nothing was posted; poll and
    /// come again); [`Cause::OutOfRange`](crate::Cause::OutOfRange), [`Cause::Denied`](crate::Cause::Denied) for local
    /// memory that does not allow it; [`Cause::State`](crate::Cause::State) in the error state.
    ///
    /// # Safety
    /// From this call until the request's completion has been polled, the caller lets nobody read local memory that a
    /// read is filling and nobody write local memory that a write or send is taking from.
    #[doc(alias = "ibv_post_send")]
    #[allow(unsafe_code)]
    pub unsafe fn post_send(&self, requests: Vec<WorkRequest>) -> Result<()> {
        self.backend.post_send(requests)
    }

    /// Posts a receive.
    ///
    /// # Errors
    /// As [`post_send`](Self::post_send).
    ///
    /// # Safety
    /// From this call until the receive's completion has been polled, the caller lets nobody touch its memory.
    #[doc(alias = "ibv_post_recv")]
    #[allow(unsafe_code)]
    pub unsafe fn post_recv(&self, request: ReceiveRequest) -> Result<()> {
        self.backend.post_recv(request)
    }

    /// Moves it to the error state: what is posted flushes, each request with a completion. Idempotent.
    pub fn to_error(&self) {
        self.backend.to_error();
    }

    /// Whether no peer can touch our memory through this queue pair any more: it is in the error state and its
    /// connection is gone. (The fence of memory that was exposed to the peer.)
    #[must_use]
    pub fn is_fenced(&self) -> bool {
        self.backend.is_fenced()
    }

    /// A read-only view of remote memory, where [`Capabilities::mappable`](crate::Capabilities::mappable) says so.
    /// The mapping is made once a region and kept; a view of it costs nothing.
    ///
    /// # Errors
    /// [`Cause::Unsupported`](crate::Cause::Unsupported), [`Cause::NotFound`](crate::Cause::NotFound) for an unknown
    /// key, [`Cause::OutOfRange`](crate::Cause::OutOfRange).
    pub fn map(&self, remote: RemoteSlice) -> Result<MappedView> {
        Ok(MappedView(self.backend.map(remote)?))
    }
}

/// A read-only view of memory that belongs to another process (or to another endpoint of this one).
///
/// The owner may write it at any time if it breaks the rules of its lease, so there is no `&[u8]` here: bytes are
/// copied out by [`read`](Self::read), and the bare address is for callers who take the contract on themselves.
#[derive(Debug, Clone)]
pub struct MappedView(Arc<dyn ViewBackend>);

impl MappedView {
    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.0.len()
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Address of the first byte; valid for reads of `len` bytes while a clone of this view lives.
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.0.as_ptr()
    }

    /// Copies `out.len()` bytes from `offset` by volatile reads: what another process writes at the same time can make
    /// the bytes wrong, but not the program.
    ///
    /// # Errors
    /// [`Cause::OutOfRange`](crate::Cause::OutOfRange).
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        crate::memory_region::check_range("read_view", offset, out.len() as u64, self.len())?;
        self.0.read(offset, out);
        Ok(())
    }
}
