//! Completion queues.

use super::lock;
use super::sys::EventFd;
use crate::backend::CqBackend;
use crate::{Cause, Completion, Error, Result};
use core::any::Any;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

/// A completion queue: it can't overflow, as every queue attached to it has reserved its room.
#[derive(Debug)]
pub(super) struct Queue {
    depth: u32,
    reserved: Arc<AtomicU32>,
    entries: Mutex<VecDeque<(Completion, Arc<Account>)>>,
    /// Length of `entries`, for pollers that find nothing.
    len: AtomicUsize,
    armed: AtomicBool,
    wake: Arc<EventFd>,
}

/// What one queue of a queue pair has reserved in a completion queue, and how much of it is in use. An unpolled completion
/// holds it, so that its room stays reserved also when its queue pair is gone.
#[derive(Debug)]
pub(super) struct Account {
    capacity: u32,
    used: AtomicU32,
    reserved: Arc<AtomicU32>,
}

impl Account {
    /// Takes room for `count` requests, or nothing.
    pub(super) fn take(&self, verb: &'static str, what: &'static str, count: u32) -> Result<()> {
        let sum = |used: u32| used.checked_add(count).filter(|sum| *sum <= self.capacity);
        match self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, sum) {
            Ok(_) => Ok(()),
            Err(used) => {
                let need = u64::from(used) + u64::from(count);
                Err(Error::new(verb, Cause::Limit { what, have: u64::from(self.capacity), need }))
            }
        }
    }

    fn give_back(&self) {
        self.used.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.reserved.fetch_sub(self.capacity, Ordering::Relaxed);
    }
}

impl Queue {
    pub(super) fn new(depth: u32, wake: Arc<EventFd>) -> Self {
        Self {
            depth,
            reserved: Arc::new(AtomicU32::new(0)),
            entries: Mutex::new(VecDeque::new()),
            len: AtomicUsize::new(0),
            armed: AtomicBool::new(false),
            wake,
        }
    }

    /// Reserves room for a queue of `capacity` requests.
    pub(super) fn reserve(&self, capacity: u32) -> Result<Arc<Account>> {
        let sum = |reserved: u32| reserved.checked_add(capacity).filter(|sum| *sum <= self.depth);
        match self.reserved.fetch_update(Ordering::Relaxed, Ordering::Relaxed, sum) {
            Ok(_) => Ok(Arc::new(Account { capacity, used: AtomicU32::new(0), reserved: self.reserved.clone() })),
            Err(reserved) => {
                let need = u64::from(reserved) + u64::from(capacity);
                let cause = Cause::Limit { what: "completion queue depth", have: u64::from(self.depth), need };
                Err(Error::new("create_qp", cause))
            }
        }
    }

    /// Adds a completion, whose place `account` holds until it has been polled.
    pub(super) fn push(&self, completion: Completion, account: &Arc<Account>) {
        let mut entries = lock(&self.entries);
        entries.push_back((completion, account.clone()));
        self.len.store(entries.len(), Ordering::SeqCst);
        drop(entries);
        // SeqCst on both sides: either this sees the mark, or the poll that follows `arm` sees the entry.
        if self.armed.load(Ordering::SeqCst) && self.armed.swap(false, Ordering::SeqCst) {
            self.wake.notify();
        }
    }

    /// Whether this is the event descriptor of its device.
    pub(super) fn wakes(&self, wake: &Arc<EventFd>) -> bool {
        Arc::ptr_eq(&self.wake, wake)
    }
}

impl CqBackend for Queue {
    fn poll(&self, out: &mut Vec<Completion>, room: usize) -> usize {
        if self.len.load(Ordering::SeqCst) == 0 {
            return 0;
        }
        let mut entries = lock(&self.entries);
        let count = room.min(entries.len());
        for (completion, account) in entries.drain(..count) {
            account.give_back();
            out.push(completion);
        }
        self.len.store(entries.len(), Ordering::SeqCst);
        count
    }

    fn arm(&self) {
        self.armed.store(true, Ordering::SeqCst);
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CompletionStatus, Opcode};

    fn completion(id: u64) -> Completion {
        Completion {
            id,
            status: CompletionStatus::Success,
            opcode: Opcode::Read,
            bytes: 0,
            immediate: None,
            queue_pair: 1,
            vendor_error: 0,
        }
    }

    #[test]
    fn room_is_reserved_in_full_and_comes_back_when_the_last_completion_is_polled() {
        let queue = Queue::new(10, Arc::new(EventFd::new().unwrap()));
        let six = queue.reserve(6).unwrap();
        let refused = queue.reserve(5).unwrap_err();
        assert_eq!(refused.cause, Cause::Limit { what: "completion queue depth", have: 10, need: 11 });
        six.take("post_send", "max_send_wr", 6).unwrap();
        assert!(six.take("post_send", "max_send_wr", 1).is_err());
        for id in 0..6 {
            queue.push(completion(id), &six);
        }
        let mut out = Vec::new();
        assert_eq!(queue.poll(&mut out, 2), 2);
        assert!(six.take("post_send", "max_send_wr", 3).is_err());
        six.take("post_send", "max_send_wr", 2).unwrap();
        drop(six);
        assert!(queue.reserve(5).is_err(), "four completions still hold the room");
        assert_eq!(queue.poll(&mut out, 100), 4);
        assert_eq!(queue.poll(&mut out, 100), 0);
        assert_eq!(out.iter().map(|done| done.id).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
        queue.reserve(10).unwrap();
    }

    #[test]
    fn an_armed_queue_gives_one_event() {
        let wake = Arc::new(EventFd::new().unwrap());
        let epoll = super::super::sys::Epoll::new().unwrap();
        epoll.add(std::os::fd::AsFd::as_fd(&*wake), 1, libc::EPOLLIN).unwrap();
        let queue = Queue::new(10, wake.clone());
        let account = queue.reserve(10).unwrap();
        queue.push(completion(1), &account);
        assert!(epoll.poll().unwrap().is_none(), "not armed");
        queue.arm();
        queue.push(completion(2), &account);
        assert!(epoll.poll().unwrap().is_some());
        wake.drain();
        queue.push(completion(3), &account);
        assert!(epoll.poll().unwrap().is_none(), "armed for one event only");
    }
}
