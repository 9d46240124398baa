//! Completion queues.

use crate::backend::CqBackend;
use crate::{Completion, Device};
use std::sync::Arc;

/// A completion queue. Clones are handles of the same queue; any thread may poll.
#[derive(Debug, Clone)]
#[doc(alias = "ibv_cq")]
pub struct CompletionQueue {
    pub(crate) backend: Arc<dyn CqBackend>,
    pub(crate) device: Device,
}

impl CompletionQueue {
    /// The device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Moves up to `room` completions to the end of `out`, in the order they happened, and returns how many.
    #[doc(alias = "ibv_poll_cq")]
    pub fn poll(&self, out: &mut Vec<Completion>, room: usize) -> usize {
        self.backend.poll(out, room)
    }

    /// Asks for one event: the next completion makes [`Device::event_fd`](crate::Device::event_fd) readable. Poll once
    /// more after arming and before waiting, as a completion may have come between.
    #[doc(alias = "ibv_req_notify_cq")]
    pub fn arm(&self) {
        self.backend.arm();
    }
}
