//! Protection domains and memory regions.

use super::completion_queue::Cq;
use super::device::ShmDevice;
use super::queue_pair::{Qp, QpHandle};
use super::{MAX_REGIONS, lock, sys};
use crate::backend::{CqBackend, MrBackend, MwBackend, PdBackend, QpBackend};
use crate::memory::{Loan, SEALS};
use crate::{Access, Cause, Error, Memory, QueuePairCapacity, RemoteSlice, Result};
use core::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

#[derive(Debug)]
pub(super) struct Pd {
    device: Arc<ShmDevice>,
    regions: Mutex<HashMap<u64, Weak<Region>>>,
    queue_pairs: Mutex<Vec<Weak<Qp>>>,
}

/// A region. Peers name bytes of it by their offset from its start.
#[derive(Debug)]
pub(super) struct Region {
    pd: Arc<Pd>,
    key: u64,
    memory: Memory,
    access: Access,
}

impl Pd {
    pub(super) fn new(device: Arc<ShmDevice>) -> Self {
        Self { device, regions: Mutex::default(), queue_pairs: Mutex::default() }
    }

    pub(super) fn device(&self) -> &Arc<ShmDevice> {
        &self.device
    }

    /// The live region under `key`.
    pub(super) fn region(&self, key: u64) -> Option<Arc<Region>> {
        lock(&self.regions).get(&key)?.upgrade()
    }

    /// The regions that peers may read.
    pub(super) fn readable(&self) -> Vec<Arc<Region>> {
        // All are taken out before the lock goes, and none is dropped under it: a region's drop takes it again.
        let mut regions: Vec<_> = lock(&self.regions).values().filter_map(Weak::upgrade).collect();
        regions.retain(|region| region.is_readable());
        regions
    }

    pub(super) fn queue_pairs(&self) -> Vec<Arc<Qp>> {
        lock(&self.queue_pairs).iter().filter_map(Weak::upgrade).collect()
    }

    /// A completion queue, if this device made it.
    fn own_queue(&self, cq: &dyn CqBackend) -> Result<Arc<Cq>> {
        let ours = cq.as_any().downcast_ref::<Arc<Cq>>().filter(|cq| cq.is_of(&self.device));
        ours.cloned()
            .ok_or_else(|| Error::new("create_qp", Cause::Unsupported { what: "a completion queue of another device" }))
    }

    /// Forgets a queue pair that is closed.
    pub(super) fn remove(&self, gone: &Arc<Qp>) {
        lock(&self.queue_pairs).retain(|qp| !core::ptr::eq(qp.as_ptr(), Arc::as_ptr(gone)) && qp.strong_count() > 0);
    }
}

impl Region {
    pub(super) fn key(&self) -> u64 {
        self.key
    }

    pub(super) fn memory(&self) -> &Memory {
        &self.memory
    }

    pub(super) fn access(&self) -> Access {
        self.access
    }

    pub(super) fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// Whether peers may read it, which here means to map it.
    pub(super) fn is_readable(&self) -> bool {
        self.access.contains(Access::REMOTE_READ)
    }

    /// The `len` bytes at `offset`, if the region has them.
    pub(super) fn range(&self, offset: u64, len: u64) -> Option<*mut u8> {
        let end = offset.checked_add(len)?;
        (end <= self.memory.len()).then(|| self.memory.address().wrapping_add(offset as usize))
    }
}

impl Drop for Region {
    /// Takes the key back. This can happen anywhere, also under the lock of a queue pair that drops the last request to
    /// hold the region, so telling the peers is left to the next progress.
    fn drop(&mut self) {
        if self.pd.device.is_inherited() {
            return;
        }
        lock(&self.pd.regions).remove(&self.key);
        if self.is_readable() {
            self.pd.device.withdraw_later(&self.pd, self.key);
        }
    }
}

impl PdBackend for Pd {
    fn register(self: Arc<Self>, memory: Memory, access: Access) -> Result<Arc<dyn MrBackend>> {
        self.device.check_process("reg_mr")?;
        let fail = |cause| Err(Error::new("reg_mr", cause));
        // Peers would refuse anything else, and the connection with it.
        let sealed = |segment| sys::seals(segment).is_ok_and(|seals| seals & SEALS == SEALS);
        if access.contains(Access::REMOTE_READ) && !memory.segment().is_some_and(sealed) {
            return fail(Cause::Unsupported { what: "remote reading of memory that is not a sealed segment" });
        }
        if access.contains(Access::MW_BIND) {
            return fail(Cause::Unsupported { what: "memory windows" });
        }
        self.device.withdraw_now(); // so that peers never hold more keys than there are regions
        let region = {
            let mut regions = lock(&self.regions);
            let need = regions.len() as u64 + 1;
            if need > MAX_REGIONS {
                return fail(Cause::Limit { what: "regions of a protection domain", have: MAX_REGIONS, need });
            }
            let key = loop {
                // Random, so that a key that was taken back never names another region (I4, I14).
                let mut key = [0; 8];
                sys::random(&mut key).map_err(|e| Error::from_io("reg_mr", "getrandom", &e))?;
                let key = u64::from_le_bytes(key);
                if !regions.contains_key(&key) {
                    break key;
                }
            };
            let region = Arc::new(Region { pd: self.clone(), key, memory, access });
            regions.insert(key, Arc::downgrade(&region));
            region
        };
        if region.is_readable() {
            for queue_pair in self.queue_pairs() {
                queue_pair.announce(&region);
            }
        }
        Ok(region)
    }

    fn create_qp(
        self: Arc<Self>,
        send_cq: Arc<dyn CqBackend>,
        recv_cq: Arc<dyn CqBackend>,
        capacity: QueuePairCapacity,
    ) -> Result<Arc<dyn QpBackend>> {
        self.device.check_process("create_qp")?;
        let handle = QpHandle::create(&self, self.own_queue(&*send_cq)?, self.own_queue(&*recv_cq)?, capacity)?;
        lock(&self.queue_pairs).push(Arc::downgrade(handle.queue_pair()));
        Ok(Arc::new(handle))
    }
}

impl MrBackend for Region {
    fn remote(&self, offset: u64, len: u64) -> RemoteSlice {
        RemoteSlice { address: offset, len, rkey: self.key }
    }

    fn bind(
        self: Arc<Self>,
        _queue_pair: &dyn QpBackend,
        _offset: u64,
        _len: u64,
        _loan: Option<Arc<Loan>>,
    ) -> Result<Arc<dyn MwBackend>> {
        Err(Error::new("bind_mw", Cause::Unsupported { what: "memory windows" }))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
