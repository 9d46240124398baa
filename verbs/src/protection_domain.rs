//! Protection domains: what may use what.

use crate::backend::PdBackend;
use crate::{
    Access, Cause, CompletionQueue, Device, Error, Memory, MemoryRegion, QueuePair, QueuePairCapacity, Result,
};
use std::sync::Arc;

/// A protection domain: memory regions and queue pairs of one domain may work together.
#[derive(Debug, Clone)]
#[doc(alias = "ibv_pd")]
pub struct ProtectionDomain {
    pub(crate) backend: Arc<dyn PdBackend>,
    pub(crate) device: Device,
}

impl ProtectionDomain {
    /// The device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Registers all of `memory` with exactly the rights `access`. What is advertised is what is registered (I5): a
    /// region is never shortened.
    ///
    /// # Errors
    /// [`Cause::OutOfRange`] for a length of zero; [`Cause::Unsupported`] for a memory kind that this device does not
    /// reach; [`Cause::Limit`] when a limit of the device or the process is hit.
    #[doc(alias = "ibv_reg_mr")]
    pub fn register(&self, memory: Memory, access: Access) -> Result<MemoryRegion> {
        if memory.is_empty() {
            return Err(Error::new("reg_mr", Cause::OutOfRange { offset: 0, len: 0, size: 0 }));
        }
        if !self.device.supports(memory.kind()) {
            return Err(Error::new("reg_mr", Cause::Unsupported { what: "this kind of memory" }));
        }
        let backend = self.backend.clone().register(memory.clone(), access)?;
        Ok(MemoryRegion { backend, memory, pd: self.clone() })
    }

    /// Creates a queue pair whose completions go to `send_cq` and `recv_cq` (which may be the same).
    ///
    /// # Errors
    /// [`Cause::Limit`] when a capacity is above what the device has, or when a completion queue could overflow: it
    /// must hold all queues attached to it in full, since flushed requests complete too (I9).
    #[doc(alias = "ibv_create_qp")]
    pub fn create_qp(
        &self,
        send_cq: &CompletionQueue,
        recv_cq: &CompletionQueue,
        capacity: QueuePairCapacity,
    ) -> Result<QueuePair> {
        let backend = self.backend.clone().create_qp(send_cq.backend.clone(), recv_cq.backend.clone(), capacity)?;
        Ok(QueuePair { backend, pd: self.clone(), _send_cq: send_cq.clone(), _recv_cq: recv_cq.clone() })
    }
}
