//! Devices: what a provider offers on this machine, and the opened handle.

use crate::backend::DeviceBackend;
use crate::{CompletionQueue, MemoryKind, ProtectionDomain, Result};
use core::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Which family of transport moves the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum ProviderKind {
    /// Memory shared between processes of one host.
    Shm,
    /// TCP connections.
    Tcp,
    /// libibverbs: InfiniBand, RoCE.
    Ibv,
    /// The simulated network.
    Sim,
}

impl fmt::Display for ProviderKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Ibv => "rdma",
            Self::Sim => "sim",
        })
    }
}

/// What a device can do; queried, never assumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Largest length of one work request, in bytes.
    pub max_message_size: u64,
    /// The length of one work request that moves bytes fastest here; callers split to it.
    pub preferred_chunk: u64,
    /// Largest number of local slices in one work request.
    pub max_sge: u32,
    /// Largest number of outstanding send requests of one queue pair.
    pub max_send_wr: u32,
    /// Largest number of posted receives of one queue pair.
    pub max_recv_wr: u32,
    /// Largest depth of a completion queue.
    pub max_cqe: u32,
    /// Whether [`MemoryRegion::bind`](crate::MemoryRegion::bind) gives a key for a part of a region that can be
    /// revoked by its owner alone.
    pub scoped_keys: bool,
    /// Whether [`MemoryRegion::bind_lent`](crate::MemoryRegion::bind_lent) gives such a key for bytes that are lent.
    pub loans: bool,
    /// Whether [`QueuePair::map`](crate::QueuePair::map) gives a read-only view of remote memory.
    pub mappable: bool,
    /// Whether the memory of a read is touched by this process's processor (a copy) rather than by a NIC or the
    /// peer's kernel.
    pub reads_by_cpu: bool,
}

impl Capabilities {
    /// Capabilities with nothing optional, to be filled by a provider.
    #[must_use]
    pub const fn new(max_message_size: u64, max_send_wr: u32) -> Self {
        Self {
            max_message_size,
            preferred_chunk: max_message_size,
            max_sge: 1,
            max_send_wr,
            max_recv_wr: max_send_wr,
            max_cqe: 1 << 20,
            scoped_keys: false,
            loans: false,
            mappable: false,
            reads_by_cpu: false,
        }
    }
}

/// One device that a provider found.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Name, unique within its provider (`shm0`, `tcp0`, `mlx5_0`).
    pub name: String,
    /// Its provider.
    pub kind: ProviderKind,
    /// What it can do.
    pub capabilities: Capabilities,
    /// One line for a person: congestion control, copy routine, link layer and speed.
    pub description: String,
}

impl DeviceInfo {
    /// A device of `kind` called `name`.
    #[must_use]
    pub fn new(
        name: impl Into<String>,
        kind: ProviderKind,
        capabilities: Capabilities,
        description: impl Into<String>,
    ) -> Self {
        Self { name: name.into(), kind, capabilities, description: description.into() }
    }
}

/// What [`Device::progress`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Nothing to do until [`Device::event_fd`] becomes readable or something is posted.
    Idle,
    /// A bounded piece of work was done, and there is more at hand: call again.
    More,
}

/// The one-time secret that binds a data connection to the control connection over which it was agreed.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token(pub [u8; 16]);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)") // a secret: never printed (I14)
    }
}

/// An opened device.
///
/// Clones are handles of the same device. `Send` and `Sync`: every method may be called from any thread at once.
#[derive(Debug, Clone)]
#[doc(alias = "ibv_context")]
pub struct Device(pub(crate) Arc<dyn DeviceBackend>);

impl Device {
    /// Wraps a backend's device.
    #[must_use]
    pub fn from_backend(backend: Arc<dyn DeviceBackend>) -> Self {
        Self(backend)
    }

    /// Name, kind and capabilities.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        self.0.info()
    }

    /// Whether this device can register memory of `kind`.
    #[must_use]
    pub fn supports(&self, kind: MemoryKind) -> bool {
        self.0.supports(kind)
    }

    /// Allocates a protection domain.
    ///
    /// # Errors
    /// Whatever limit of the device was hit.
    #[doc(alias = "ibv_alloc_pd")]
    pub fn alloc_pd(&self) -> Result<ProtectionDomain> {
        Ok(ProtectionDomain { backend: self.0.clone().alloc_pd()?, device: self.clone() })
    }

    /// Creates a completion queue of at least `depth` entries. It must be at least as deep as all queues attached to
    /// it, or [`ProtectionDomain::create_qp`] refuses.
    ///
    /// # Errors
    /// [`Cause::Limit`](crate::Cause::Limit) when `depth` is 0 or above `max_cqe`.
    #[doc(alias = "ibv_create_cq")]
    pub fn create_cq(&self, depth: u32) -> Result<CompletionQueue> {
        Ok(CompletionQueue { backend: self.0.clone().create_cq(depth)?, device: self.clone() })
    }

    /// The descriptor that becomes readable when [`progress`](Self::progress) has something to do or a completion
    /// reached an armed queue; `None` for a device that never needs to be waited for (the simulation).
    /// Level-triggered: it stays readable until `progress` has dealt with the cause.
    #[must_use]
    pub fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        self.0.event_fd()
    }

    /// Does a bounded piece of the work that this provider does with the processor: reads and writes sockets, copies
    /// memory (at most some milliseconds). Never blocks. Any number of threads may be in it at once; two threads work
    /// on different streams or pieces.
    pub fn progress(&self) -> Progress {
        self.0.progress()
    }

    /// Gives the device a connection that a peer opened and that began with `token`, as told by
    /// [`QueuePair::address`](crate::QueuePair::address). The stream must be positioned after the token.
    ///
    /// # Errors
    /// [`Cause::NotFound`](crate::Cause::NotFound) when no queue pair waits for `token` (the stream is closed);
    /// [`Cause::Unsupported`](crate::Cause::Unsupported) when this device has no connections of that sort.
    pub fn adopt(&self, stream: OwnedFd, token: Token) -> Result<()> {
        self.0.adopt(stream, token)
    }

    /// How near a peer's queue pair, by its [`address`](crate::QueuePair::address), is to this device, to choose among
    /// several of one provider: the larger the nearer. `None` where they can't be connected. For RDMA it is the number of
    /// leading bits in which the GIDs agree, so that of several subnets the common one wins.
    #[must_use]
    pub fn closeness(&self, remote: &[u8]) -> Option<u32> {
        self.0.closeness(remote)
    }
}
