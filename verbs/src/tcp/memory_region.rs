//! Protection domains, memory regions and windows.

use super::completion_queue::Queue;
use super::device::Shared;
use super::keys::Exposure;
use super::queue_pair::{Core, Handle};
use super::{MAX_POSTED, device};
use crate::backend::{CqBackend, MrBackend, MwBackend, PdBackend, QpBackend};
use crate::memory::Loan;
use crate::{Access, Cause, Error, Memory, QueuePairCapacity, RemoteSlice, Result};
use core::any::Any;
use core::fmt;
use std::sync::Arc;

/// A protection domain.
#[derive(Debug)]
pub(super) struct Domain {
    device: Arc<Shared>,
    number: u64,
}

impl Domain {
    pub(super) fn new(device: Arc<Shared>) -> Self {
        let number = device::next_unique();
        Self { device, number }
    }
}

impl PdBackend for Domain {
    fn register(self: Arc<Self>, memory: Memory, access: Access) -> Result<Arc<dyn MrBackend>> {
        let exposure = Arc::new(Exposure::new(memory.clone(), (0, memory.len()), access, self.number, None));
        let key = self.device.keys.insert("reg_mr", exposure.clone())?;
        Ok(Arc::new(Region { domain: self, memory, access, exposure, key }))
    }

    fn create_qp(
        self: Arc<Self>,
        send_cq: Arc<dyn CqBackend>,
        recv_cq: Arc<dyn CqBackend>,
        capacity: QueuePairCapacity,
    ) -> Result<Arc<dyn QpBackend>> {
        for (what, need) in [("max_send_wr", capacity.max_send_wr), ("max_recv_wr", capacity.max_recv_wr)] {
            if need > MAX_POSTED {
                let cause = Cause::Limit { what, have: u64::from(MAX_POSTED), need: u64::from(need) };
                return Err(Error::new("create_qp", cause));
            }
        }
        let core = Core::create(&self.device, self.number, queue(send_cq, &self)?, queue(recv_cq, &self)?, capacity)?;
        Ok(Arc::new(Handle(core)))
    }
}

/// The queue behind `backend`, which must be of the same device.
fn queue(backend: Arc<dyn CqBackend>, domain: &Domain) -> Result<Arc<Queue>> {
    let ours = backend.as_any().downcast_ref::<device::Cq>().map(|cq| cq.0.clone());
    ours.filter(|queue| queue.wakes(&domain.device.wake))
        .ok_or(Error::new("create_qp", Cause::Unsupported { what: "a completion queue of another device" }))
}

/// A memory region.
pub(super) struct Region {
    domain: Arc<Domain>,
    memory: Memory,
    access: Access,
    exposure: Arc<Exposure>,
    key: u64,
}

impl Region {
    pub(super) fn domain(&self) -> u64 {
        self.domain.number
    }

    pub(super) fn access(&self) -> Access {
        self.access
    }
}

// The keys are secrets (I14).
impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpRegion")
            .field("len", &self.memory.len())
            .field("access", &self.access)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpWindow").field("len", &self.remote.len).finish_non_exhaustive()
    }
}

impl MrBackend for Region {
    fn remote(&self, offset: u64, len: u64) -> RemoteSlice {
        RemoteSlice { address: offset, len, rkey: self.key }
    }

    fn bind(
        self: Arc<Self>,
        queue_pair: &dyn QpBackend,
        offset: u64,
        len: u64,
        loan: Option<Arc<Loan>>,
    ) -> Result<Arc<dyn MwBackend>> {
        if !self.access.contains(Access::MW_BIND) {
            return Err(Error::new("bind_mw", Cause::Denied { what: "MW_BIND" }));
        }
        let core = queue_pair.as_any().downcast_ref::<Handle>().map(|handle| &handle.0);
        let core = core
            .filter(|core| core.domain == self.domain.number)
            .ok_or(Error::new("bind_mw", Cause::Unsupported { what: "a queue pair of another protection domain" }))?;
        let (memory, domain, peer) = (self.memory.clone(), self.domain.number, Some(core.unique));
        let exposure = Exposure::new(memory, (offset, len), Access::REMOTE_READ, domain, peer);
        let exposure = Arc::new(match loan {
            Some(loan) => exposure.lent(loan),
            None => exposure,
        });
        let key = self.domain.device.keys.insert("bind_mw", exposure.clone())?;
        let remote = RemoteSlice { address: offset, len, rkey: key };
        Ok(Arc::new(Window { region: self, exposure, remote }))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // Whoever is inside holds the memory; that nobody is, is told by the queue pairs' fences.
        let _fenced = self.exposure.revoke();
        self.domain.device.keys.remove(self.key);
    }
}

/// A memory window.
struct Window {
    region: Arc<Region>,
    exposure: Arc<Exposure>,
    remote: RemoteSlice,
}

impl MwBackend for Window {
    fn remote(&self) -> RemoteSlice {
        self.remote
    }

    fn invalidate(&self) -> bool {
        self.region.domain.device.keys.remove(self.remote.rkey);
        self.exposure.revoke()
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        let _fenced = self.invalidate();
    }
}
