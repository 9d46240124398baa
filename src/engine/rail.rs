//! Rails: devices with what the engine needs on them.

use crate::Path;
use towline_verbs::{
    Access, Cause, Completion, CompletionQueue, Device, Memory, MemoryRegion, ProtectionDomain, QueuePair,
    QueuePairCapacity, Result,
};

/// Queue pairs that share a completion queue, where a deep one costs memory of the device's.
const SHARERS: u32 = 32;
/// Receives that a queue pair has room for. The engine posts none; no device has a queue pair without any.
const RECEIVES: u32 = 1;

/// A device that payloads travel by, with the objects that the engine uses on it.
#[derive(Debug)]
pub struct Rail {
    pub(crate) path: Path,
    pub(crate) device: Device,
    pub(crate) pd: ProtectionDomain,
    pub(crate) pool: MemoryRegion,
    /// Each is as deep as all queue pairs that it was given need (I9). They are kept when queue pairs go: those to come
    /// use them again.
    queues: Vec<CompletionQueue>,
}

impl Rail {
    /// Opens what is needed on `device`, and registers the pool with it: peers may read it, our own reads may fill it,
    /// nobody may write it from outside (I14).
    ///
    /// # Errors
    /// What the device says.
    pub fn new(path: Path, device: Device, pool: &Memory) -> Result<Self> {
        let pd = device.alloc_pd()?;
        let mut access = Access::LOCAL_WRITE | Access::REMOTE_READ;
        if device.info().capabilities.scoped_keys {
            access |= Access::MW_BIND;
        }
        let pool = pd.register(pool.clone(), access)?;
        Ok(Self { path, device, pd, pool, queues: Vec::new() })
    }

    /// Its path, and its device where there may be several.
    pub(super) fn name(&self) -> String {
        match self.path {
            Path::Rdma => format!("{} ({})", self.path, self.device.info().name),
            path => path.to_string(),
        }
    }

    /// A queue pair for `requests` at a time, or as many as the device has. The number of them is the caller's to limit.
    ///
    /// # Errors
    /// What the device says.
    pub(crate) fn create_queue_pair(&mut self, requests: u32) -> Result<QueuePair> {
        let most = self.device.info().capabilities;
        let capacity = QueuePairCapacity { max_send_wr: requests.min(most.max_send_wr), max_recv_wr: RECEIVES };
        for queue in &self.queues {
            match self.pd.create_qp(queue, queue, capacity) {
                Err(error) if matches!(error.cause, Cause::Limit { .. }) => {} // this one is taken up
                created => return created,
            }
        }
        let need = (capacity.max_send_wr + RECEIVES).saturating_mul(SHARERS);
        let queue = self.device.create_cq(need.min(most.max_cqe))?;
        queue.arm();
        let created = self.pd.create_qp(&queue, &queue, capacity)?;
        self.queues.push(queue);
        Ok(created)
    }

    /// Has the next completion raise an event of the device.
    pub(crate) fn arm(&self) {
        self.queues.iter().for_each(CompletionQueue::arm);
    }

    /// Takes completions, `room` at most; whether there may be more.
    pub(crate) fn poll(&self, out: &mut Vec<Completion>, room: usize) -> bool {
        // Each queue is asked, so that none has to wait for another to be empty.
        let before = out.len();
        for queue in &self.queues {
            queue.poll(out, room);
        }
        out.len() > before
    }
}
