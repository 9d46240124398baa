//! Completion queues: a queue under a lock, with room set aside for every request that can be outstanding.

use super::device::ShmDevice;
use super::lock;
use super::poller::Poller;
use crate::backend::CqBackend;
use crate::{Cause, Completion, Error, Result};
use core::any::Any;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

#[derive(Debug)]
pub(super) struct Cq {
    depth: u32,
    device: Arc<ShmDevice>,
    queue: Mutex<Queue>,
    /// Length of `queue.entries`, so that polling an empty queue takes no lock.
    filled: AtomicUsize,
    armed: AtomicBool,
}

#[derive(Debug, Default)]
struct Queue {
    entries: VecDeque<(Completion, Arc<Credit>)>,
    /// Entries promised to attached queues: together with what they hold already it never exceeds the depth (I9).
    reserved: u64,
}

/// How much of its capacity a send or receive queue has in use: requests posted whose completions were not polled yet.
#[derive(Debug)]
pub(super) struct Credit {
    capacity: u32,
    used: AtomicU32,
    /// The queue pair is gone: what is polled of it now gives back its reservation. Written under the queue's lock.
    detached: AtomicBool,
}

impl Credit {
    pub(super) fn used(&self) -> u32 {
        self.used.load(Ordering::Acquire)
    }

    pub(super) fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Takes `count` more; the caller holds the queue pair's lock and has seen that they are free.
    pub(super) fn take(&self, count: u32) {
        self.used.fetch_add(count, Ordering::AcqRel);
    }
}

impl Cq {
    pub(super) fn new(device: Arc<ShmDevice>, depth: u32) -> Self {
        Self { depth, device, queue: Mutex::default(), filled: AtomicUsize::new(0), armed: AtomicBool::new(false) }
    }

    /// Sets `capacity` entries aside for a send or receive queue.
    pub(super) fn attach(&self, capacity: u32) -> Result<Arc<Credit>> {
        let mut queue = lock(&self.queue);
        let need = queue.reserved + u64::from(capacity);
        if need > u64::from(self.depth) {
            let cause = Cause::Limit { what: "depth of the completion queue", have: self.depth.into(), need };
            return Err(Error::new("create_qp", cause));
        }
        queue.reserved = need;
        Ok(Arc::new(Credit { capacity, used: AtomicU32::new(0), detached: AtomicBool::new(false) }))
    }

    /// Gives back what [`attach`](Self::attach) set aside: at once what isn't in use, the rest as it is polled. Nothing
    /// is posted to the queue any more.
    pub(super) fn detach(&self, credit: &Credit) {
        let mut queue = lock(&self.queue);
        if !credit.detached.swap(true, Ordering::AcqRel) {
            queue.reserved -= u64::from(credit.capacity - credit.used());
        }
    }

    pub(super) fn push(&self, completion: Completion, credit: &Arc<Credit>) {
        {
            let mut queue = lock(&self.queue);
            queue.entries.push_back((completion, credit.clone()));
            debug_assert!(queue.entries.len() <= self.depth as usize, "a completion queue overflowed (I9)");
            self.filled.store(queue.entries.len(), Ordering::SeqCst);
        }
        if self.armed.swap(false, Ordering::SeqCst) {
            self.poller().raise();
        }
    }

    pub(super) fn is_of(&self, device: &Arc<ShmDevice>) -> bool {
        Arc::ptr_eq(&self.device, device)
    }

    fn poller(&self) -> &Poller {
        self.device.poller()
    }
}

/// The handle that callers have; queue pairs hold the queue itself.
#[derive(Debug)]
pub(super) struct CqHandle(pub(super) Arc<Cq>);

impl CqBackend for CqHandle {
    fn poll(&self, out: &mut Vec<Completion>, room: usize) -> usize {
        self.0.poll(out, room)
    }

    fn arm(&self) {
        self.0.armed.store(true, Ordering::SeqCst);
    }

    fn as_any(&self) -> &dyn Any {
        &self.0
    }
}

impl Cq {
    fn poll(&self, out: &mut Vec<Completion>, room: usize) -> usize {
        if self.filled.load(Ordering::SeqCst) == 0 || self.device.is_inherited() {
            return 0;
        }
        let mut queue = lock(&self.queue);
        let count = queue.entries.len().min(room);
        let Queue { entries, reserved } = &mut *queue;
        for (completion, credit) in entries.drain(..count) {
            out.push(completion);
            credit.used.fetch_sub(1, Ordering::AcqRel);
            if credit.detached.load(Ordering::Acquire) {
                *reserved -= 1;
            }
        }
        self.filled.store(queue.entries.len(), Ordering::SeqCst);
        count
    }
}
