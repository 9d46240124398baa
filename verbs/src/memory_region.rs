//! Memory regions and windows: memory with keys.

use crate::backend::{MrBackend, MwBackend};
use crate::memory::Loan;
use crate::{Cause, Error, Memory, ProtectionDomain, QueuePair, Result};
use std::sync::Arc;

bitflags::bitflags! {
    /// What a memory region allows; the least that is needed (I14). Local reads are always allowed.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    #[doc(alias = "ibv_access_flags")]
    pub struct Access: u32 {
        /// This process's own requests may write into it (destinations of reads and receives).
        const LOCAL_WRITE = 1;
        /// Peers may write into it.
        const REMOTE_WRITE = 1 << 1;
        /// Peers may read it.
        const REMOTE_READ = 1 << 2;
        /// Windows may be bound to it.
        const MW_BIND = 1 << 4;
    }
}

/// Where a peer finds bytes of ours: what a lease carries, and what a work request names as its remote side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RemoteSlice {
    /// Remote address of the first byte, in the owner's terms (a virtual address, or an offset into the region).
    pub address: u64,
    /// Length in bytes.
    pub len: u64,
    /// The remote key.
    pub rkey: u64,
}

const BIND: &str = "bind_mw";

/// Registered memory. Clones are handles of the same region; it is deregistered when the last is gone, and posted work
/// requests hold one.
#[derive(Debug, Clone)]
#[doc(alias = "ibv_mr")]
pub struct MemoryRegion {
    pub(crate) backend: Arc<dyn MrBackend>,
    pub(crate) memory: Memory,
    pub(crate) pd: ProtectionDomain,
}

impl MemoryRegion {
    /// The memory itself.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Its protection domain.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.memory.len()
    }

    /// Never: a region of zero bytes can't be registered.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.memory.is_empty()
    }

    /// Where a peer finds bytes `offset..offset + len` under the region's own key.
    ///
    /// # Errors
    /// [`Cause::OutOfRange`].
    pub fn remote(&self, offset: u64, len: u64) -> Result<RemoteSlice> {
        check_range("remote", offset, len, self.len())?;
        Ok(self.backend.remote(offset, len))
    }

    /// Binds a window: a key for bytes `offset..offset + len` alone, good for reads by the peer of `queue_pair`, from when
    /// it [is bound](MemoryWindow::is_bound) until it is invalidated.
    ///
    /// # Errors
    /// [`Cause::Unsupported`] where [`Capabilities::scoped_keys`](crate::Capabilities::scoped_keys) is false;
    /// [`Cause::OutOfRange`]; [`Cause::Denied`] without [`Access::MW_BIND`]; [`Cause::Limit`].
    #[doc(alias = "ibv_bind_mw")]
    pub fn bind(&self, queue_pair: &QueuePair, offset: u64, len: u64) -> Result<MemoryWindow> {
        self.bind_window(queue_pair, offset, len, None)
    }

    /// Binds a window to the bytes from `offset` on, as many as `loan` has, as [`bind`](Self::bind) does; but the peer
    /// reads the lent bytes in their place until those are [copied](Loan::copied). Only a device whose own code reads on the
    /// peer's behalf can look where they are at each moment; a NIC can't. Whoever lends them puts the same bytes
    /// into the region before he says so.
    ///
    /// # Errors
    /// [`Cause::Unsupported`] where [`Capabilities::loans`](crate::Capabilities::loans) is false, and as `bind`.
    pub fn bind_lent(&self, queue_pair: &QueuePair, offset: u64, loan: &Arc<Loan>) -> Result<MemoryWindow> {
        if !self.pd.device().info().capabilities.loans {
            return Err(Error::new(BIND, Cause::Unsupported { what: "a window to lent bytes" }));
        }
        self.bind_window(queue_pair, offset, loan.len(), Some(loan.clone()))
    }

    fn bind_window(
        &self,
        queue_pair: &QueuePair,
        offset: u64,
        len: u64,
        loan: Option<Arc<Loan>>,
    ) -> Result<MemoryWindow> {
        check_range(BIND, offset, len, self.len())?;
        let backend = self.backend.clone().bind(&*queue_pair.backend, offset, len, loan)?;
        Ok(MemoryWindow { backend, _region: self.clone() })
    }
}

/// A part of a region under a key of its own. Dropping it invalidates the key, but only
/// [`invalidate`](Self::invalidate) tells when no peer can touch the memory any more.
#[derive(Debug)]
#[doc(alias = "ibv_mw")]
pub struct MemoryWindow {
    backend: Arc<dyn MwBackend>,
    _region: MemoryRegion,
}

impl MemoryWindow {
    /// Where the peer finds the window's bytes.
    #[must_use]
    pub fn remote(&self) -> RemoteSlice {
        self.backend.remote()
    }

    /// Whether the key is valid by now. A device binds windows in the order of its send queue: until then an access by the
    /// peer would fail and break the queue pair, so the peer is told of the window only after this has returned `true`.
    /// It becomes true, or the queue pair fails, as the device goes on; a completion queue that is armed makes the device
    /// readable then.
    #[must_use]
    pub fn is_bound(&self) -> bool {
        self.backend.is_bound()
    }

    /// Makes the key invalid: no access starts after this returns. Returns whether that is already a fence: `false`
    /// while an access that started before is still in the memory (ask again). Idempotent.
    #[must_use]
    pub fn invalidate(&self) -> bool {
        self.backend.invalidate()
    }
}

impl Drop for MemoryWindow {
    fn drop(&mut self) {
        let _fenced = self.backend.invalidate();
    }
}

/// Refuses a range that does not lie within `size` bytes, also where the sum overflows.
pub(crate) fn check_range(verb: &'static str, offset: u64, len: u64, size: u64) -> Result<()> {
    match offset.checked_add(len) {
        Some(end) if end <= size => Ok(()),
        _ => Err(Error::new(verb, Cause::OutOfRange { offset, len, size })),
    }
}
