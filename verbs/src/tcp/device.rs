//! The opened device: what all its queue pairs share, and the engine that `progress` is.

use super::chooser::Setting;
use super::completion_queue::Queue;
use super::keys::KeyTable;
use super::memory_region::Domain;
use super::queue_pair::Core;
use super::sys::{Epoll, EventFd, Timer};
use super::{MAX_QUEUE_PAIRS, TcpConfig, lock};
use crate::backend::{CqBackend, DeviceBackend, PdBackend};
use crate::{Cause, Completion, DeviceInfo, Error, MemoryKind, Progress, Result, Token};
use core::any::Any;
use core::fmt;
use core::net::IpAddr;
use core::sync::atomic::{AtomicU64, Ordering};
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

/// Most bytes that one call of `progress` moves: one to two milliseconds at the speed of loopback.
const BUDGET: usize = 4 << 20;

/// Most peers whose fastest setting is remembered; when there are more, all are forgotten and found out anew.
const MAX_KNOWN: usize = 256;

/// Keys of the epoll that are no stream's.
const WAKE: u64 = u64::MAX;
const TIMER: u64 = u64::MAX - 1;

/// Numbers that are never used again, of all devices of this process: an object of one is no other's.
static UNIQUE: AtomicU64 = AtomicU64::new(1);

/// A number that is never used again.
pub(super) fn next_unique() -> u64 {
    UNIQUE.fetch_add(1, Ordering::Relaxed)
}

/// An opened device.
pub(super) struct Shared {
    info: DeviceInfo,
    pub(super) config: TcpConfig,
    pub(super) epoll: Epoll,
    pub(super) wake: Arc<EventFd>,
    timer: Timer,
    pub(super) keys: KeyTable,
    queue_pairs: Mutex<QueuePairs>,
    /// Who waits for streams that begin with which token, and for how many of them.
    waiting: Mutex<Vec<Waiting>>,
    /// Streams that can go on though their sockets have nothing to say.
    ready: Mutex<VecDeque<u64>>,
    deadlines: Mutex<BinaryHeap<Deadline>>,
    /// What connections to each address have found to be fastest.
    known: Mutex<HashMap<IpAddr, Setting>>,
}

#[derive(Debug, Default)]
struct QueuePairs {
    last: u32,
    by_number: HashMap<u32, Arc<Core>>,
}

#[derive(Debug)]
struct Waiting {
    token: Token,
    queue_pair: Weak<Core>,
    streams: usize,
}

/// The earliest comes first out of the heap.
#[derive(Debug, PartialEq, Eq)]
struct Deadline(Instant, u32);

impl Ord for Deadline {
    fn cmp(&self, other: &Self) -> core::cmp::Ordering {
        (other.0, other.1).cmp(&(self.0, self.1))
    }
}

impl PartialOrd for Deadline {
    fn partial_cmp(&self, other: &Self) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// How the epoll names a stream.
pub(super) fn stream_key(queue_pair: u32, index: usize) -> u64 {
    u64::from(queue_pair) << 8 | index as u64
}

impl Shared {
    pub(super) fn open(info: DeviceInfo, config: TcpConfig) -> Result<Self> {
        let os = |call| move |error| Error::from_io("open_device", call, &error);
        let epoll = Epoll::new().map_err(os("epoll_create1"))?;
        let wake = Arc::new(EventFd::new().map_err(os("eventfd"))?);
        let timer = Timer::new().map_err(os("timerfd_create"))?;
        epoll.add(wake.as_fd(), WAKE, libc::EPOLLIN).map_err(os("epoll_ctl"))?;
        epoll.add(timer.as_fd(), TIMER, libc::EPOLLIN).map_err(os("epoll_ctl"))?;
        Ok(Self {
            info,
            config,
            epoll,
            wake,
            timer,
            keys: KeyTable::new(),
            queue_pairs: Mutex::default(),
            waiting: Mutex::default(),
            ready: Mutex::default(),
            deadlines: Mutex::default(),
            known: Mutex::default(),
        })
    }

    /// Makes a queue pair with a number that no living one has.
    pub(super) fn add(&self, make: impl FnOnce(u32) -> Core) -> Result<Arc<Core>> {
        let mut pairs = lock(&self.queue_pairs);
        if pairs.by_number.len() >= MAX_QUEUE_PAIRS {
            let have = MAX_QUEUE_PAIRS as u64;
            return Err(Error::new("create_qp", Cause::Limit { what: "queue pairs", have, need: have + 1 }));
        }
        let mut number = pairs.last;
        loop {
            // 24 bits, as queue pair numbers have in the verbs.
            number = (number + 1) & 0xFF_FFFF;
            if number != 0 && !pairs.by_number.contains_key(&number) {
                break;
            }
        }
        pairs.last = number;
        let core = Arc::new(make(number));
        pairs.by_number.insert(number, core.clone());
        Ok(core)
    }

    /// Forgets a queue pair.
    pub(super) fn remove(&self, core: &Core) {
        let gone = lock(&self.queue_pairs).by_number.remove(&core.number);
        self.no_longer_await(core);
        drop(gone);
    }

    fn find(&self, number: u32) -> Option<Arc<Core>> {
        lock(&self.queue_pairs).by_number.get(&number).cloned()
    }

    /// Streams that begin with the token of `core` are for it from now on.
    pub(super) fn await_streams(&self, core: &Arc<Core>, streams: usize) {
        let waiting = Waiting { token: core.token, queue_pair: Arc::downgrade(core), streams };
        lock(&self.waiting).push(waiting);
    }

    /// No stream is for `core` any more.
    pub(super) fn no_longer_await(&self, core: &Core) {
        lock(&self.waiting).retain(|waiting| waiting.token != core.token);
    }

    /// Has `progress` go on with a stream.
    pub(super) fn resume(&self, key: u64) {
        let mut ready = lock(&self.ready);
        if !ready.contains(&key) {
            ready.push_back(key);
            drop(ready);
            self.wake.notify();
        }
    }

    /// Has `progress` look at a queue pair at `when`.
    pub(super) fn set_deadline(&self, number: u32, when: Instant) {
        let mut deadlines = lock(&self.deadlines);
        let earliest = deadlines.peek().is_none_or(|first| when < first.0);
        deadlines.push(Deadline(when, number));
        if earliest {
            // It fails for a bad descriptor or time only, and these are neither.
            let _set = self.timer.set(when.saturating_duration_since(Instant::now()));
        }
    }

    /// What connections to `peer` have found to be fastest, if anything.
    pub(super) fn known(&self, peer: IpAddr) -> Option<Setting> {
        lock(&self.known).get(&peer).copied()
    }

    /// Remembers it for the next.
    pub(super) fn learn(&self, peer: IpAddr, best: Setting) {
        let mut known = lock(&self.known);
        if known.len() >= MAX_KNOWN {
            known.clear();
        }
        known.insert(peer, best);
    }

    fn on_timer(&self) {
        self.timer.drain();
        let now = Instant::now();
        let mut due = Vec::new();
        let mut deadlines = lock(&self.deadlines);
        while let Some(Deadline(when, number)) = deadlines.pop() {
            if when > now {
                let _set = self.timer.set(when - now);
                deadlines.push(Deadline(when, number));
                break;
            }
            due.push(number);
        }
        drop(deadlines);
        for core in due.into_iter().filter_map(|number| self.find(number)) {
            core.on_deadline(now);
        }
    }

    fn next_ready(&self) -> Option<u64> {
        lock(&self.ready).pop_front()
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let queue_pairs = lock(&self.queue_pairs).by_number.len();
        f.debug_struct("TcpDevice")
            .field("name", &self.info.name)
            .field("queue_pairs", &queue_pairs)
            .finish_non_exhaustive()
    }
}

impl DeviceBackend for Shared {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn supports(&self, kind: MemoryKind) -> bool {
        kind == MemoryKind::Host
    }

    fn alloc_pd(self: Arc<Self>) -> Result<Arc<dyn PdBackend>> {
        Ok(Arc::new(Domain::new(self)))
    }

    fn create_cq(self: Arc<Self>, depth: u32) -> Result<Arc<dyn CqBackend>> {
        let most = self.info.capabilities.max_cqe;
        if depth == 0 || depth > most {
            let cause = Cause::Limit { what: "max_cqe", have: u64::from(most), need: u64::from(depth) };
            return Err(Error::new("create_cq", cause));
        }
        Ok(Arc::new(Cq(Arc::new(Queue::new(depth, self.wake.clone())))))
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.epoll.as_fd())
    }

    fn progress(&self) -> Progress {
        let mut budget = BUDGET;
        let mut first = true;
        loop {
            // One event at a time, so that another thread takes the next.
            if let Some(key) = self.next_ready() {
                if let Some(core) = self.find((key >> 8) as u32) {
                    core.on_resume((key & 0xFF) as usize, &mut budget);
                }
            } else {
                let Ok(Some(event)) = self.epoll.poll() else { return Progress::Idle };
                match event.key {
                    WAKE if first => self.wake.drain(),
                    // What this call has found may have armed queues tell another thread: that is for the next call to
                    // take back, when the thread that made this one has polled its queues.
                    WAKE => return Progress::Idle,
                    TIMER => self.on_timer(),
                    key => {
                        if let Some(core) = self.find((key >> 8) as u32) {
                            core.on_event((key & 0xFF) as usize, event.ready, &mut budget);
                        }
                    }
                }
            }
            first = false;
            if budget == 0 {
                if !lock(&self.ready).is_empty() {
                    self.wake.notify();
                }
                return Progress::More;
            }
        }
    }

    fn adopt(&self, stream: OwnedFd, token: Token) -> Result<()> {
        let mut waiting = lock(&self.waiting);
        let mut found = None;
        // All of them, each in the same time: how long it takes tells nothing about a token (I14).
        for (at, candidate) in waiting.iter().enumerate() {
            if same(&candidate.token, &token) {
                found = Some(at);
            }
        }
        let core = found.and_then(|at| {
            waiting[at].streams -= 1;
            if waiting[at].streams == 0 { waiting.swap_remove(at).queue_pair } else { waiting[at].queue_pair.clone() }
                .upgrade()
        });
        drop(waiting);
        let core = core.ok_or(Error::new("adopt", Cause::NotFound { what: "queue pair that waits for this token" }))?;
        core.adopt(TcpStream::from(stream))
    }
}

/// Whether two tokens are the same, in a time that doesn't depend on where they differ.
fn same(a: &Token, b: &Token) -> bool {
    let differs = a.0.iter().zip(&b.0).fold(0, |differs, (a, b)| differs | (a ^ b));
    core::hint::black_box(differs) == 0
}

/// The handle of a completion queue.
#[derive(Debug)]
pub(super) struct Cq(pub(super) Arc<Queue>);

impl CqBackend for Cq {
    fn poll(&self, out: &mut Vec<Completion>, room: usize) -> usize {
        self.0.poll(out, room)
    }

    fn arm(&self) {
        self.0.arm();
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
