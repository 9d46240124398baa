//! Protection domains.

use super::completion_queue::{Cq, Handle as CqHandle};
use super::device::IbvDevice;
use super::probe::Shown;
use super::queue_pair::{Core, Handle};
use super::region::Region;
use super::sys;
use crate::backend::{CqBackend, MrBackend, PdBackend, QpBackend};
use crate::{Access, Cause, Error, Memory, QueuePairCapacity, Result};
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
    fn register(self: Arc<Self>, memory: Memory, access: Access) -> Result<Arc<dyn MrBackend>> {
        Ok(Arc::new(Region::register(&self, memory, access)?))
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
