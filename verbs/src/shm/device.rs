//! The one device of this provider: what its queue pairs share, and the driving of all of it.

use super::address::same_token;
use super::completion_queue::{Cq, CqHandle};
use super::domain::Pd;
use super::engine::Engine;
use super::poller::Poller;
use super::queue_pair::Qp;
use super::{MAX_CQE, ShmConfig, lock, sys};
use crate::backend::{CqBackend, DeviceBackend, PdBackend};
use crate::memory::generation;
use crate::{Cause, DeviceInfo, Error, MemoryKind, Progress, Result, Token};
use core::mem;
use core::sync::atomic::{AtomicBool, Ordering};
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

/// How long one call of `progress` copies: long against a piece, short against a person.
const COPY_BUDGET: Duration = Duration::from_millis(2);

#[derive(Debug)]
pub(super) struct ShmDevice {
    info: DeviceInfo,
    config: ShmConfig,
    poller: Arc<Poller>,
    engine: Arc<Engine>,
    table: Mutex<Table>,
    /// Keys of regions that were dropped and that peers have yet to be told of.
    withdrawn: Mutex<Vec<(Weak<Pd>, u64)>>,
    any_withdrawn: AtomicBool,
    /// Queue pairs with something to do that makes no stream ready.
    unfinished: Mutex<Vec<Weak<Qp>>>,
    /// Of the process that opened it.
    generation: u64,
}

#[derive(Debug, Default)]
struct Table {
    queue_pairs: HashMap<u32, Weak<Qp>>,
    last_number: u32,
    /// Queue pairs that a peer may dial, by their tokens.
    waiting: Vec<(Token, u32)>,
    /// Queue pairs that have something to do at a certain time.
    alarms: Vec<(Instant, u32)>,
}

impl ShmDevice {
    pub(super) fn open(info: DeviceInfo, config: ShmConfig, copy_threads: usize) -> Result<Arc<Self>> {
        let poller = Arc::new(Poller::new()?);
        let engine = Engine::new(poller.clone(), copy_threads);
        Ok(Arc::new(Self {
            info,
            config,
            poller,
            engine,
            table: Mutex::default(),
            withdrawn: Mutex::default(),
            any_withdrawn: AtomicBool::new(false),
            unfinished: Mutex::default(),
            generation: generation(),
        }))
    }

    /// Whether this process came into being by a fork after the device was opened. Then every call is refused, and
    /// nothing that belongs to the parent is touched: not even a lock, which a thread of the parent may have held (I13).
    pub(super) fn is_inherited(&self) -> bool {
        self.generation != generation()
    }

    /// The same as an error.
    pub(super) fn check_process(&self, verb: &'static str) -> Result<()> {
        if self.is_inherited() {
            return Err(Error::new(verb, Cause::Unsupported { what: "a handle that came here by fork" }));
        }
        Ok(())
    }

    pub(super) fn poller(&self) -> &Poller {
        &self.poller
    }

    pub(super) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    pub(super) fn unix_name(&self) -> &[u8] {
        &self.config.unix_name
    }

    pub(super) fn preface(&self, token: Token) -> Vec<u8> {
        (self.config.preface)(token)
    }

    /// Whether the user at the other end of a connection is one that we speak to (I14).
    pub(super) fn check_peer(&self, verb: &'static str, stream: BorrowedFd<'_>) -> Result<()> {
        let uid = sys::peer_uid(stream).map_err(|e| Error::from_io(verb, "getsockopt(SO_PEERCRED)", &e))?;
        let allowed = match &self.config.allowed_uids {
            Some(uids) => uids.contains(&uid),
            None => uid == sys::own_uid(),
        };
        if allowed { Ok(()) } else { Err(Error::new(verb, Cause::Denied { what: "the user of the peer process" })) }
    }

    /// Makes a queue pair with a number of its own, and lets peers dial it.
    pub(super) fn enlist(&self, token: Token, make: impl FnOnce(u32) -> Arc<Qp>) -> Arc<Qp> {
        let mut table = lock(&self.table);
        let number = loop {
            table.last_number = table.last_number.wrapping_add(1);
            let number = table.last_number;
            if number != 0 && !table.queue_pairs.contains_key(&number) {
                break number;
            }
        };
        let queue_pair = make(number);
        table.queue_pairs.insert(number, Arc::downgrade(&queue_pair));
        table.waiting.push((token, number));
        queue_pair
    }

    /// Forgets a queue pair.
    pub(super) fn delist(&self, number: u32) {
        let mut table = lock(&self.table);
        table.queue_pairs.remove(&number);
        table.waiting.retain(|&(_, waiting)| waiting != number);
        table.alarms.retain(|&(_, waiting)| waiting != number);
    }

    /// A queue pair that dials by itself is not dialled.
    pub(super) fn waits_no_more(&self, number: u32) {
        lock(&self.table).waiting.retain(|&(_, waiting)| waiting != number);
    }

    /// Has [`Qp::time_has_come`] called at `time`, or somewhat later.
    pub(super) fn wake_at(&self, time: Instant, number: u32) -> Result<()> {
        let mut table = lock(&self.table);
        table.alarms.push((time, number));
        self.set_timer(&table)
    }

    fn set_timer(&self, table: &Table) -> Result<()> {
        let Some(next) = table.alarms.iter().map(|(time, _)| *time).min() else { return Ok(()) };
        let delay = next.saturating_duration_since(Instant::now());
        self.poller.come_again(delay).map_err(|e| Error::from_io("progress", "timerfd_settime", &e))
    }

    /// The queue pairs whose time has come.
    fn due(&self) -> Vec<Arc<Qp>> {
        let mut table = lock(&self.table);
        let now = Instant::now();
        let (due, later) = mem::take(&mut table.alarms).into_iter().partition(|(time, _)| *time <= now);
        table.alarms = later;
        self.set_timer(&table).ok(); // it worked when the alarm was set
        let due: Vec<(Instant, u32)> = due;
        due.iter().filter_map(|(_, number)| table.queue_pairs.get(number)?.upgrade()).collect()
    }

    pub(super) fn receiver_not_ready_timeout(&self) -> Duration {
        self.config.receiver_not_ready_timeout
    }

    /// Has a queue pair served by the next progress.
    pub(super) fn come_back(&self, queue_pair: &Arc<Qp>) {
        lock(&self.unfinished).push(Arc::downgrade(queue_pair));
        self.poller.raise();
    }

    /// Has peers told that a region is gone, by the next progress or registration.
    pub(super) fn withdraw_later(&self, pd: &Arc<Pd>, key: u64) {
        lock(&self.withdrawn).push((Arc::downgrade(pd), key));
        self.any_withdrawn.store(true, Ordering::SeqCst);
        self.poller.raise();
    }

    pub(super) fn withdraw_now(&self) {
        if !self.any_withdrawn.swap(false, Ordering::SeqCst) {
            return;
        }
        let withdrawn = mem::take(&mut *lock(&self.withdrawn));
        for (pd, key) in withdrawn {
            for queue_pair in pd.upgrade().into_iter().flat_map(|pd| pd.queue_pairs()) {
                queue_pair.withdraw(key);
            }
        }
    }

    fn queue_pair(&self, number: u32) -> Option<Arc<Qp>> {
        lock(&self.table).queue_pairs.get(&number)?.upgrade()
    }
}

impl Drop for ShmDevice {
    fn drop(&mut self) {
        if !self.is_inherited() {
            self.engine.close();
        }
    }
}

impl DeviceBackend for ShmDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn supports(&self, kind: MemoryKind) -> bool {
        kind == MemoryKind::Host
    }

    fn alloc_pd(self: Arc<Self>) -> Result<Arc<dyn PdBackend>> {
        self.check_process("alloc_pd")?;
        Ok(Arc::new(Pd::new(self)))
    }

    fn create_cq(self: Arc<Self>, depth: u32) -> Result<Arc<dyn CqBackend>> {
        self.check_process("create_cq")?;
        if depth == 0 || depth > MAX_CQE {
            let cause = Cause::Limit { what: "max_cqe", have: MAX_CQE.into(), need: depth.into() };
            return Err(Error::new("create_cq", cause));
        }
        Ok(Arc::new(CqHandle(Arc::new(Cq::new(self, depth)))))
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.poller.fd())
    }

    fn progress(&self) -> Progress {
        if self.is_inherited() {
            return Progress::Idle; // the epoll instance is the parent's, too
        }
        let ready = self.poller.ready(); // first: what comes after it raises the flag again
        self.withdraw_now();
        if ready.timer {
            for queue_pair in self.due() {
                queue_pair.time_has_come();
            }
        }
        let unfinished = mem::take(&mut *lock(&self.unfinished));
        for queue_pair in unfinished.iter().filter_map(Weak::upgrade) {
            queue_pair.service();
        }
        for &(number, closed) in &ready.streams {
            if let Some(queue_pair) = self.queue_pair(number) {
                queue_pair.stream_is_ready(closed);
            }
        }
        let more_to_copy = self.engine.run(COPY_BUDGET);
        let more = more_to_copy || ready.more || !lock(&self.unfinished).is_empty();
        if more { Progress::More } else { Progress::Idle }
    }

    fn adopt(&self, stream: OwnedFd, token: Token) -> Result<()> {
        self.check_process("adopt")?;
        if !sys::is_unix_stream(stream.as_fd()) {
            return Err(Error::new("adopt", Cause::Unsupported { what: "a connection that is not a Unix stream" }));
        }
        self.check_peer("adopt", stream.as_fd())?; // before the token is used up
        sys::set_nonblocking(stream.as_fd()).map_err(|e| Error::from_io("adopt", "fcntl(F_SETFL)", &e))?;
        let found = {
            let mut table = lock(&self.table);
            // All are compared, so that the time says nothing about which was nearly right.
            let found = table
                .waiting
                .iter()
                .fold(None, |found, (waiting, number)| if same_token(waiting, &token) { Some(*number) } else { found });
            if let Some(found) = found {
                table.waiting.retain(|&(_, waiting)| waiting != found); // once
            }
            found.and_then(|number| table.queue_pairs.get(&number)?.upgrade())
        };
        match found {
            Some(queue_pair) => queue_pair.adopt(stream),
            None => Err(Error::new("adopt", Cause::NotFound { what: "queue pair that waits for this token" })),
        }
    }
}
