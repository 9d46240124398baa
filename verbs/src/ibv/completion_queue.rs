//! Completion queues: the device's, and in front of it a queue of what was taken off it or made without it.
//!
//! Locks: a completion queue's may be held when a queue pair's is taken, never the other way round.

use super::device::IbvDevice;
use super::queue_pair::{Core, Freed};
use super::{status, sys};
use crate::backend::CqBackend;
use crate::{Cause, Completion, Error, LocalSlice, Result};
use core::any::Any;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use rdma_core_sys::{IBV_EVENT_CQ_ERR, ibv_wc, zeroed};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Completions that are taken off the device's queue in one call.
const BATCH: usize = 32;

#[derive(Debug)]
pub(super) struct Cq {
    device: Arc<IbvDevice>,
    pub(super) raw: Arc<sys::Queue>,
    /// What callers may attach, of which windows of queue pairs take nothing; the device's queue has `whole`.
    depth: u32,
    whole: u32,
    reserved: Arc<Reserved>,
    armed: AtomicBool,
    /// One more than the number of the device's event that was the next when the next completion was asked to make one; 0
    /// before.
    asked: AtomicU64,
    state: Mutex<State>,
}

/// How much is attached: by callers, and with what queue pairs need besides.
#[derive(Debug, Default)]
struct Reserved {
    callers: AtomicU32,
    all: AtomicU32,
}

/// Completions that were not polled yet, each with the account whose room it holds.
pub(super) type Ready = VecDeque<(Completion, Arc<Account>)>;

/// What was taken off the device's queue, to be dealt with without the lock.
#[derive(Debug, Default)]
pub(super) struct Retired {
    /// What requests held.
    pub(super) held: Vec<Vec<LocalSlice>>,
    pub(super) freed: Freed,
    /// Queue pairs that can post what waited.
    pub(super) waiting: Vec<Arc<Core>>,
}

impl Drop for Retired {
    fn drop(&mut self) {
        for core in self.waiting.drain(..) {
            core.go_on_with_windows();
        }
    }
}

#[derive(Debug, Default)]
struct State {
    ready: Ready,
    /// Queue pairs by their serial numbers, which are part of the numbers of their requests.
    routes: HashMap<u32, Weak<Core>>,
    /// The device's queue does not answer any more.
    broken: bool,
}

/// What one queue of a queue pair has reserved, and how much of it is in use; an unpolled completion holds it.
#[derive(Debug)]
pub(super) struct Account {
    capacity: u32,
    besides: u32,
    used: AtomicU32,
    reserved: Arc<Reserved>,
}

impl Account {
    /// Takes room for `count` requests, or nothing.
    pub(super) fn take(&self, verb: &'static str, what: &'static str, count: u32) -> Result<()> {
        let sum = |used: u32| used.checked_add(count).filter(|sum| *sum <= self.capacity);
        match self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, sum) {
            Ok(_) => Ok(()),
            Err(used) => {
                let need = u64::from(used) + u64::from(count);
                Err(Error::new(verb, Cause::Limit { what, have: self.capacity.into(), need }))
            }
        }
    }

    pub(super) fn give_back(&self, count: u32) {
        self.used.fetch_sub(count, Ordering::Relaxed);
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.reserved.callers.fetch_sub(self.capacity, Ordering::Relaxed);
        self.reserved.all.fetch_sub(self.capacity + self.besides, Ordering::Relaxed);
    }
}

impl Cq {
    /// A queue of `whole` entries, of which queue pairs' own requests get what is above `depth`.
    pub(super) fn new(device: Arc<IbvDevice>, raw: sys::Queue, depth: u32, whole: u32) -> Self {
        let (reserved, armed, asked) = (Arc::default(), AtomicBool::new(false), AtomicU64::new(0));
        Self { device, raw: Arc::new(raw), depth, whole, reserved, armed, asked, state: Mutex::default() }
    }

    pub(super) fn is_of(&self, device: &Arc<IbvDevice>) -> bool {
        Arc::ptr_eq(&self.device, device)
    }

    /// Reserves room for a queue of `capacity` requests (I9: flushed ones complete too), and `besides` for requests that no
    /// caller makes.
    pub(super) fn reserve(&self, capacity: u32, besides: u32) -> Result<Arc<Account>> {
        let take = |reserved: &AtomicU32, count: u32, have: u32| {
            let sum = |reserved: u32| reserved.checked_add(count).filter(|sum| *sum <= have);
            reserved.fetch_update(Ordering::Relaxed, Ordering::Relaxed, sum).map_err(|reserved| {
                let need = u64::from(reserved) + u64::from(count);
                Error::new("create_qp", Cause::Limit { what: "completion queue depth", have: have.into(), need })
            })
        };
        take(&self.reserved.callers, capacity, self.depth)?;
        if let Err(error) = take(&self.reserved.all, capacity.saturating_add(besides), self.whole) {
            self.reserved.callers.fetch_sub(capacity, Ordering::Relaxed);
            return Err(error);
        }
        Ok(Arc::new(Account { capacity, besides, used: AtomicU32::new(0), reserved: self.reserved.clone() }))
    }

    pub(super) fn attach(&self, serial: u32, core: &Arc<Core>) {
        self.state().routes.insert(serial, Arc::downgrade(core));
    }

    /// Completions with this serial number that the device still has count no more.
    pub(super) fn detach(&self, serial: u32) {
        self.state().routes.remove(&serial);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes all that the device has completed, to be polled later.
    pub(super) fn collect_all(&self) {
        let mut retired = Retired::default();
        self.collect(&mut self.state(), usize::MAX, &mut retired);
    }

    /// Takes completions off the device's queue until there are `room`, or no more.
    fn collect(&self, state: &mut State, room: usize, retired: &mut Retired) {
        let mut batch: [ibv_wc; BATCH] = [zeroed(); BATCH];
        while !state.broken && state.ready.len() < room {
            let wanted = (room - state.ready.len()).min(BATCH);
            let Ok(found) = self.raw.poll(&mut batch[..wanted]) else {
                state.broken = true;
                let cores: Vec<_> = state.routes.values().filter_map(Weak::upgrade).collect();
                for (core, error) in cores.into_iter().zip(core::iter::repeat(status::event(IBV_EVENT_CQ_ERR))) {
                    core.fail(error.unwrap_or(Error::new("poll_cq", Cause::Disconnected)));
                }
                return;
            };
            for wc in &batch[..found] {
                let core = state.routes.get(&((wc.wr_id >> 32) as u32)).and_then(Weak::upgrade);
                if let Some(core) = core {
                    core.completed(wc, &mut state.ready, retired);
                }
            }
            if found < wanted {
                return;
            }
        }
    }

    /// Adds completions that the device does not make.
    pub(super) fn push(&self, completions: Vec<Completion>, account: &Arc<Account>) {
        if completions.is_empty() {
            return;
        }
        self.state().ready.extend(completions.into_iter().map(|completion| (completion, account.clone())));
        // SeqCst on both sides: either this sees the mark, or the poll that follows `arm` sees the entries.
        if self.armed.swap(false, Ordering::SeqCst) {
            self.device.bell.ring();
        }
    }
}

/// The handle that callers have; queue pairs hold the queue itself.
#[derive(Debug)]
pub(super) struct Handle(pub(super) Arc<Cq>);

impl CqBackend for Handle {
    fn poll(&self, out: &mut Vec<Completion>, room: usize) -> usize {
        let cq = &self.0;
        if cq.device.is_inherited() {
            return 0;
        }
        let mut retired = Retired::default();
        let mut state = cq.state();
        cq.collect(&mut state, room, &mut retired);
        let count = room.min(state.ready.len());
        for (completion, account) in state.ready.drain(..count) {
            account.give_back(1);
            out.push(completion);
        }
        drop(state);
        count
    }

    fn arm(&self) {
        let cq = &self.0;
        if cq.device.is_inherited() {
            return;
        }
        cq.armed.store(true, Ordering::SeqCst);
        // Asking is a system call on some devices. What was asked for holds until the event is taken; the number is taken
        // before the event is, so that one that is not counted yet is still there to be taken, and wakes the caller.
        let next = cq.device.next_event();
        if cq.asked.load(Ordering::SeqCst) == next + 1 {
            return;
        }
        if cq.raw.request_event().is_ok() {
            cq.asked.store(next + 1, Ordering::SeqCst);
        } else {
            // No event will come: the caller is woken at once, and finds the queue broken when it polls.
            cq.device.bell.ring();
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
