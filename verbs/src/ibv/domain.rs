//! Protection domains and memory regions.

use super::completion_queue::{Cq, Handle as CqHandle};
use super::device::IbvDevice;
use super::probe::Shown;
use super::queue_pair::{Core, Handle, bind};
use super::{failed, sys};
use crate::backend::{CqBackend, MrBackend, MwBackend, PdBackend, QpBackend};
use crate::memory::Loan;
use crate::{Access, Cause, Error, Memory, MemoryKind, QueuePairCapacity, RemoteSlice, Result};
use core::any::Any;
use core::fmt;
use rdma_core_sys::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_MW_BIND, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE, ibv_sge,
};
use std::sync::{Arc, Mutex, PoisonError};

/// A protection domain.
#[derive(Debug)]
pub(super) struct Domain {
    pub(super) device: Arc<IbvDevice>,
    pub(super) raw: Arc<sys::Domain>,
    /// What its queue pairs' peers read first; made with the first queue pair.
    shown: Mutex<Option<Arc<Shown>>>,
}

impl PdBackend for Domain {
    #[allow(unsafe_code)]
    fn register(self: Arc<Self>, memory: Memory, access: Access) -> Result<Arc<dyn MrBackend>> {
        const VERB: &str = "reg_mr";
        let (have, need) = (self.device.port.max_region, memory.len());
        if need > have {
            return Err(Error::new(VERB, Cause::Limit { what: "max_mr_size", have, need }));
        }
        // SAFETY: the memory is mapped as long as a clone of it lives, and the region keeps one; it gives the rights that the
        // caller asked for.
        let raw = unsafe { sys::Region::register(&self.raw, memory.address(), memory.len() as usize, rights(access)) };
        let raw = raw.map_err(|error| match (error.errno(), sys::memlock_limit()) {
            (libc::ENOMEM, Some(have)) if have < need => {
                Error::new(VERB, Cause::Limit { what: "memlock (ulimit -l)", have, need })
            }
            _ => failed(VERB, "ibv_reg_mr", error),
        })?;
        Ok(Arc::new(Region::new(raw, self.raw.clone(), memory, access)))
    }

    fn create_qp(
        self: Arc<Self>,
        send_cq: Arc<dyn CqBackend>,
        recv_cq: Arc<dyn CqBackend>,
        capacity: QueuePairCapacity,
    ) -> Result<Arc<dyn QpBackend>> {
        let capabilities = self.device.info_capabilities();
        for (what, have, need) in [
            ("max_send_wr", capabilities.max_send_wr, capacity.max_send_wr),
            ("max_recv_wr", capabilities.max_recv_wr, capacity.max_recv_wr),
        ] {
            if need > have {
                let cause = Cause::Limit { what, have: have.into(), need: need.into() };
                return Err(Error::new("create_qp", cause));
            }
        }
        let (sends, receives) = (self.queue(send_cq.as_ref())?, self.queue(recv_cq.as_ref())?);
        Ok(Arc::new(Handle(Core::create(&self, sends, receives, capacity)?)))
    }
}

impl Domain {
    pub(super) fn new(device: Arc<IbvDevice>, raw: sys::Domain) -> Self {
        Self { device, raw: Arc::new(raw), shown: Mutex::default() }
    }

    /// What peers of its queue pairs may read.
    pub(super) fn shown(&self) -> Result<Arc<Shown>> {
        let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(shown) = &*shown {
            return Ok(shown.clone());
        }
        let new = Arc::new(Shown::new(&self.raw)?);
        *shown = Some(new.clone());
        Ok(new)
    }

    /// The queue behind `backend`, which must be of the same device.
    fn queue(&self, backend: &dyn CqBackend) -> Result<Arc<Cq>> {
        let ours = backend.as_any().downcast_ref::<CqHandle>().map(|handle| handle.0.clone());
        ours.filter(|queue| queue.is_of(&self.device))
            .ok_or(Error::new("create_qp", Cause::Unsupported { what: "a completion queue of another device" }))
    }
}

/// `IBV_ACCESS_*` for the rights. A device gives a peer the right to write only where it may write itself.
fn rights(access: Access) -> i32 {
    let mut rights = 0;
    for (ours, theirs) in [
        (Access::LOCAL_WRITE, IBV_ACCESS_LOCAL_WRITE),
        (Access::REMOTE_WRITE, IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_LOCAL_WRITE),
        (Access::REMOTE_READ, IBV_ACCESS_REMOTE_READ),
        (Access::MW_BIND, IBV_ACCESS_MW_BIND),
    ] {
        if access.contains(ours) {
            rights |= theirs;
        }
    }
    rights
}

/// A memory region. The device lets go of the memory before we do: `raw` is dropped first.
pub(super) struct Region {
    pub(super) raw: sys::Region,
    pub(super) domain: Arc<sys::Domain>,
    pub(super) access: Access,
    /// Whether this process's processor reaches it too.
    pub(super) is_near: bool,
    /// The address of the first byte, as the device knows it.
    base: u64,
    len: u64,
    memory: Memory,
}

// The keys are secrets (I14).
impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IbvRegion").field("len", &self.len).field("access", &self.access).finish_non_exhaustive()
    }
}

impl Region {
    pub(super) fn new(raw: sys::Region, domain: Arc<sys::Domain>, memory: Memory, access: Access) -> Self {
        // Exposed, as the library's provider makes a pointer of it when it takes bytes at once.
        let base = memory.address().expose_provenance() as u64;
        Self { raw, domain, access, is_near: memory.kind() == MemoryKind::Host, base, len: memory.len(), memory }
    }

    pub(super) fn memory(&self) -> &Memory {
        &self.memory
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Bytes `offset..offset + length`, for a request; the range has been checked.
    #[inline]
    pub(super) fn sge(&self, offset: u64, length: u32) -> ibv_sge {
        ibv_sge { addr: self.base + offset, length, lkey: self.raw.local_key() }
    }

    /// The address of the byte at `offset`, as the device knows it.
    pub(super) fn address(&self, offset: u64) -> u64 {
        self.base + offset
    }
}

impl MrBackend for Region {
    fn remote(&self, offset: u64, len: u64) -> RemoteSlice {
        RemoteSlice { address: self.address(offset), len, rkey: self.raw.remote_key().into() }
    }

    fn bind(
        self: Arc<Self>,
        queue_pair: &dyn QpBackend,
        offset: u64,
        len: u64,
        _loan: Option<Arc<Loan>>,
    ) -> Result<Arc<dyn MwBackend>> {
        bind(self, queue_pair, offset, len)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_are_the_least_that_the_device_takes() {
        assert_eq!(rights(Access::empty()), 0);
        assert_eq!(rights(Access::REMOTE_READ), IBV_ACCESS_REMOTE_READ);
        assert_eq!(rights(Access::LOCAL_WRITE), IBV_ACCESS_LOCAL_WRITE);
        assert_eq!(rights(Access::REMOTE_WRITE), IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_LOCAL_WRITE);
        assert_eq!(rights(Access::all()), 0b1_0111);
    }
}
