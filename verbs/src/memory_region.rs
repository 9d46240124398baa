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
        /// No right but a permission, for devices on PCI Express: what a device writes into the region may arrive in
        /// another order than it was written in, which is faster on many machines. It is all there once the completion
        /// that tells of it is; but nobody may look at the memory itself to see whether something has come. Where the
        /// device, its library (rdma-core before 28) or its provider doesn't know it, it changes nothing.
        #[doc(alias = "IBV_ACCESS_RELAXED_ORDERING")]
        #[doc(alias = "ibv_reg_mr_iova2")]
        const RELAXED_ORDERING = 1 << 5;
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
const REMOTE: &str = "remote";

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

    /// Bytes of each of the pieces (but the last) in which it is registered, each under keys of its own: where it is larger
    /// than what the device takes in one (`max_mr_size`). Otherwise that is its length. A local slice of a send request may
    /// cross the border between pieces, and then counts as one for each (`max_sge`).
    #[must_use]
    pub fn piece_len(&self) -> u64 {
        self.backend.piece_len().min(self.len())
    }

    /// Where a peer finds bytes `offset..offset + len` under the region's own key.
    ///
    /// # Errors
    /// [`Cause::OutOfRange`]; [`Cause::AcrossPieces`] where they have more than one key:
    /// [`remote_pieces`](Self::remote_pieces) gives all.
    pub fn remote(&self, offset: u64, len: u64) -> Result<RemoteSlice> {
        check_range(REMOTE, offset, len, self.len())?;
        check_piece(REMOTE, offset, len, self.backend.piece_len())?;
        Ok(self.backend.remote(offset, len))
    }

    /// The same, of bytes that may lie in several [pieces](Self::piece_len): one slice for each, in order; none for no bytes.
    ///
    /// # Errors
    /// [`Cause::OutOfRange`].
    pub fn remote_pieces(&self, offset: u64, len: u64) -> Result<Vec<RemoteSlice>> {
        check_range(REMOTE, offset, len, self.len())?;
        let (mut slices, mut at, end) = (Vec::new(), offset, offset + len);
        while at < end {
            let piece = self.backend.piece_len();
            let until = end.min((at / piece + 1).saturating_mul(piece));
            slices.push(self.backend.remote(at, until - at));
            at = until;
        }
        Ok(slices)
    }

    /// Binds a window: a key for bytes `offset..offset + len` alone, good for reads by the peer of `queue_pair`, from when
    /// it [is bound](MemoryWindow::is_bound) until it is invalidated.
    ///
    /// # Errors
    /// [`Cause::Unsupported`] where [`Capabilities::scoped_keys`](crate::Capabilities::scoped_keys) is false;
    /// [`Cause::OutOfRange`]; [`Cause::AcrossPieces`]; [`Cause::Denied`] without [`Access::MW_BIND`]; [`Cause::Limit`].
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
        check_piece(BIND, offset, len, self.backend.piece_len())?;
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

/// Refuses a range, which has been checked, that lies in more than one piece of `piece` bytes.
pub(crate) fn check_piece(verb: &'static str, offset: u64, len: u64, piece: u64) -> Result<()> {
    if len == 0 || offset / piece == (offset + len - 1) / piece {
        return Ok(());
    }
    Err(Error::new(verb, Cause::AcrossPieces { offset, len, piece }))
}
