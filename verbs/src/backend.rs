//! What a provider implements. Callers use the handles of the crate root instead.
//!
//! The handles check what can be checked without the provider (ranges within a region, zero lengths, memory kinds);
//! everything else is the backend's. A backend never blocks in any of these calls but `register`.

use crate::memory::Loan;
use crate::{
    Access, Completion, Device, DeviceInfo, Error, Memory, MemoryKind, Progress, ProviderKind, QueuePairCapacity,
    QueuePairState, ReceiveRequest, RemoteSlice, Result, Token, WorkRequest,
};
use core::any::Any;
use core::fmt::Debug;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

/// A source of devices.
pub trait Provider: Debug + Send + Sync {
    /// Its kind.
    fn kind(&self) -> ProviderKind;

    /// The devices there are on this machine; an error says why there are none.
    ///
    /// # Errors
    /// What is missing: a library, a kernel feature, a right.
    #[doc(alias = "ibv_get_device_list")]
    fn devices(&self) -> Result<Vec<DeviceInfo>>;

    /// Opens a device by name.
    ///
    /// # Errors
    /// [`Cause::NotFound`](crate::Cause::NotFound), or what the system says.
    #[doc(alias = "ibv_open_device")]
    fn open(&self, name: &str) -> Result<Device>;
}

/// An opened device.
pub trait DeviceBackend: Debug + Send + Sync {
    /// See [`Device::info`].
    fn info(&self) -> &DeviceInfo;
    /// See [`Device::supports`].
    fn supports(&self, kind: MemoryKind) -> bool;
    /// See [`Device::alloc_pd`].
    ///
    /// # Errors
    /// As there.
    fn alloc_pd(self: Arc<Self>) -> Result<Arc<dyn PdBackend>>;
    /// See [`Device::create_cq`].
    ///
    /// # Errors
    /// As there.
    fn create_cq(self: Arc<Self>, depth: u32) -> Result<Arc<dyn CqBackend>>;
    /// See [`Device::event_fd`].
    fn event_fd(&self) -> Option<BorrowedFd<'_>>;
    /// See [`Device::progress`].
    fn progress(&self) -> Progress;
    /// See [`Device::adopt`].
    ///
    /// # Errors
    /// As there.
    fn adopt(&self, stream: OwnedFd, token: Token) -> Result<()>;
    /// See [`Device::closeness`].
    fn closeness(&self, _remote: &[u8]) -> Option<u32> {
        Some(0)
    }
}

/// A protection domain.
pub trait PdBackend: Debug + Send + Sync {
    /// See [`ProtectionDomain::register`](crate::ProtectionDomain::register).
    ///
    /// # Errors
    /// As there.
    fn register(self: Arc<Self>, memory: Memory, access: Access) -> Result<Arc<dyn MrBackend>>;
    /// See [`ProtectionDomain::create_qp`](crate::ProtectionDomain::create_qp). The completion queues are ones that
    /// this provider made (downcast by [`CqBackend::as_any`]); others are refused.
    ///
    /// # Errors
    /// As there.
    fn create_qp(
        self: Arc<Self>,
        send_cq: Arc<dyn CqBackend>,
        recv_cq: Arc<dyn CqBackend>,
        capacity: QueuePairCapacity,
    ) -> Result<Arc<dyn QpBackend>>;
}

/// A memory region.
pub trait MrBackend: Debug + Send + Sync {
    /// See [`MemoryRegion::piece_len`](crate::MemoryRegion::piece_len); anything above the region's length where it has
    /// one piece.
    fn piece_len(&self) -> u64 {
        u64::MAX
    }
    /// See [`MemoryRegion::remote`](crate::MemoryRegion::remote); the range has been checked.
    fn remote(&self, offset: u64, len: u64) -> RemoteSlice;
    /// See [`MemoryRegion::bind`](crate::MemoryRegion::bind); the range has been checked. With a loan, which comes only to
    /// devices that are [capable](crate::Capabilities::loans) of it, see
    /// [`MemoryRegion::bind_lent`](crate::MemoryRegion::bind_lent).
    ///
    /// # Errors
    /// As there.
    fn bind(
        self: Arc<Self>,
        queue_pair: &dyn QpBackend,
        offset: u64,
        len: u64,
        loan: Option<Arc<Loan>>,
    ) -> Result<Arc<dyn MwBackend>>;
    /// For the provider's own downcast, when the region comes back in a work request.
    fn as_any(&self) -> &dyn Any;
}

/// A memory window.
pub trait MwBackend: Debug + Send + Sync {
    /// See [`MemoryWindow::remote`](crate::MemoryWindow::remote).
    fn remote(&self) -> RemoteSlice;
    /// See [`MemoryWindow::is_bound`](crate::MemoryWindow::is_bound).
    fn is_bound(&self) -> bool {
        true
    }
    /// See [`MemoryWindow::invalidate`](crate::MemoryWindow::invalidate).
    fn invalidate(&self) -> bool;
}

/// A completion queue.
pub trait CqBackend: Debug + Send + Sync {
    /// See [`CompletionQueue::poll`](crate::CompletionQueue::poll).
    fn poll(&self, out: &mut Vec<Completion>, room: usize) -> usize;
    /// See [`CompletionQueue::arm`](crate::CompletionQueue::arm).
    fn arm(&self);
    /// For the provider's own downcast.
    fn as_any(&self) -> &dyn Any;
}

/// A queue pair. Its last handle going away is `to_error` and destruction.
pub trait QpBackend: Debug + Send + Sync {
    /// See [`QueuePair::number`](crate::QueuePair::number).
    fn number(&self) -> u32;
    /// See [`QueuePair::state`](crate::QueuePair::state).
    fn state(&self) -> QueuePairState;
    /// See [`QueuePair::failure`](crate::QueuePair::failure).
    fn failure(&self) -> Option<Error>;
    /// See [`QueuePair::address`](crate::QueuePair::address).
    fn address(&self) -> Vec<u8>;
    /// See [`QueuePair::connect`](crate::QueuePair::connect).
    ///
    /// # Errors
    /// As there.
    fn connect(&self, remote: &[u8], active: bool) -> Result<()>;
    /// See [`QueuePair::post_send`](crate::QueuePair::post_send).
    ///
    /// # Errors
    /// As there.
    fn post_send(&self, requests: Vec<WorkRequest>) -> Result<()>;
    /// See [`QueuePair::post_recv`](crate::QueuePair::post_recv).
    ///
    /// # Errors
    /// As there.
    fn post_recv(&self, request: ReceiveRequest) -> Result<()>;
    /// See [`QueuePair::max_message_size`](crate::QueuePair::max_message_size); `None` for what the device says.
    fn max_message_size(&self) -> Option<u64> {
        None
    }
    /// See [`QueuePair::to_error`](crate::QueuePair::to_error).
    fn to_error(&self);
    /// See [`QueuePair::is_fenced`](crate::QueuePair::is_fenced).
    fn is_fenced(&self) -> bool;
    /// See [`QueuePair::map`](crate::QueuePair::map).
    ///
    /// # Errors
    /// As there.
    fn map(&self, remote: RemoteSlice) -> Result<Arc<dyn ViewBackend>>;
    /// For the provider's own downcast, when a window is bound to it.
    fn as_any(&self) -> &dyn Any;
}

/// A mapped piece of remote memory.
pub trait ViewBackend: Debug + Send + Sync {
    /// Length in bytes.
    fn len(&self) -> u64;
    /// Address of the first byte.
    fn as_ptr(&self) -> *const u8;
    /// Volatile copy out; the range has been checked.
    fn read(&self, offset: u64, out: &mut [u8]);
    /// Whether it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
