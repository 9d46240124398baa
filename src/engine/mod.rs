//! The engine: all logic of an endpoint as one machine without I/O.
//!
//! It takes time, the network and the providers from outside. Into it go connections made and lost, bytes received,
//! completions, ticks, and the calls of its user; out of it come [`Action`]s, bytes to send, posted work requests, and
//! wake-ups. There is no thread, socket or clock in it. The driver of the real endpoint feeds it from epoll and the
//! boot clock; the simulation in `tests/simulation` feeds the same machine from a seeded schedule.
//!
//! A driver's duty:
//! 1. after any call, take [`next_action`](Engine::next_action) until there is none, and for a
//!    [`Flush`](Action::Flush) send what [`output`](Engine::output) holds;
//! 2. call [`pump`](Engine::pump) whenever a device may have completed something, whenever
//!    [`next_deadline`](Engine::next_deadline) has passed, and when the wake-up given to [`Engine::new`] was called.
//!
//! Peers, in the words of this module: a *link* is one control connection with its queue pair; the consumer's side of
//! it holds *gets*, the producer's side *grants*.

mod agree;
mod binding;
mod closes;
mod config;
mod connect;
mod consumers;
mod end;
mod fences;
mod fetch;
mod frames;
mod gets;
mod grants;
mod link;
mod orphans;
mod payloads;
mod place;
mod placing;
mod rail;
mod stats;
mod timers;
mod tries;
mod trouble;
mod trust;
mod waiting;

pub use crate::options::{Limits, PutOptions};
pub use config::{Config, Identity, Times, WithoutRdma};
pub use gets::{Delivery, GetRequest, HeldLease, OwnBytes, Source, Storage, unix_name_of};
pub use link::{LinkId, Transport};
pub use payloads::{NewPart, PayloadId};
pub use rail::Rail;
pub use stats::Stats;

use crate::pool::{Pool, Waiter};
use crate::{Error, Result};
use binding::Told;
use consumers::AwaitConsumers;
use fetch::Fetch;
use gets::Get;
use grants::Grant;
use link::{Account, Holding, Link};
use orphans::OrphanTable;
use payloads::PayloadSlot;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::Arc;
use timers::Timers;
use towline_control::address::Address;
use towline_core::transfer::TransferTable;
use towline_verbs::{Completion, Device, Memory};
use trouble::Troubles;

/// Nanoseconds of a clock that also counts while the machine is suspended.
pub type Tick = u64;

/// A get or another operation that somebody waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OperationId(pub u64);

/// What the driver is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Connect: try the Unix name if there is one, then the addresses in order; then call
    /// [`Engine::connected`] or [`Engine::connect_failed`].
    Dial {
        /// The link to be.
        link: LinkId,
        /// Abstract Unix socket to try first.
        unix: Option<Vec<u8>>,
        /// Network addresses.
        addresses: Vec<Address>,
    },
    /// Send the link's output.
    Flush(LinkId),
    /// Bytes that a link which has ended owes its peer: send them as far as the connection takes them at once.
    Last {
        /// The link.
        link: LinkId,
        /// The bytes.
        bytes: Vec<u8>,
    },
    /// Close the connection.
    Close(LinkId),
    /// Tell when the process at the other end of this Unix connection has ended, also after the connection was closed:
    /// [`Engine::process_ended`].
    WatchProcess(LinkId),
    /// Nothing hangs on the end of that process any more.
    UnwatchProcess(LinkId),
    /// The operation has a result: [`Engine::take`].
    Wake(OperationId),
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Timer {
    /// A get's deadline.
    Get(OperationId),
    /// Connected, but not yet known to each other.
    Handshake(LinkId),
    /// The queue pair failed, and why; the connection is about to be given up.
    Broken(LinkId, String),
    /// Leases to be reported as closed.
    Closes(LinkId),
    /// A get of a peer that waits for a payload.
    Waiting(LinkId, u64),
    /// Leases or waiting gets to be kept alive.
    KeepAlive(LinkId),
    /// A granted lease's end.
    Grant(u64),
    /// A look at fences of grants that are not there yet.
    Fences,
    /// The time to live of a payload.
    Payload(PayloadId),
    /// The end of patience with reads that were abandoned.
    Abandoned(u64),
    /// Another look at whether a get's remote memory is there to be read.
    Remote(OperationId),
    /// An operation that waits for consumers.
    Consumers(OperationId),
    /// Whether something has come over a link's queue pair, by the number of its offer, in so much time.
    Proof(LinkId, u32, Tick),
    /// Whether a link can go back to a better path than the one of that offer.
    Return(LinkId, u32),
}

/// The machine. See the [module](self).
pub struct Engine {
    config: Config,
    pool: Arc<Pool>,
    rails: Vec<Rail>,
    wake: Arc<dyn Fn() + Send + Sync>,
    now: Tick,
    timers: Timers<Timer>,
    actions: VecDeque<Action>,
    closing: bool,

    links: BTreeMap<LinkId, Link>,
    next_link: u64,
    by_address: BTreeMap<String, LinkId>,
    by_incarnation: BTreeMap<[u8; 16], LinkId>,
    queue_pairs: BTreeMap<(usize, u32), LinkId>,
    troubles: Troubles,

    payloads: Vec<PayloadSlot>,
    free_slots: Vec<u32>,
    keys: BTreeMap<Vec<u8>, u32>,
    waiting: BTreeMap<Vec<u8>, VecDeque<(LinkId, u64)>>,
    /// Requests that their consumers do not want any more and that have not come yet.
    unwanted: BTreeSet<([u8; 16], u64)>,
    grants: BTreeMap<u64, Grant>,
    /// Leases that were fenced without a word of their holders, who may yet say that they were delivered: whose, on what.
    unheard: BTreeMap<u64, ([u8; 16], PayloadId)>,
    /// What is held here, by whom it is counted for.
    holdings: BTreeMap<Account, Holding>,
    /// Leases whose peers are not told yet, since their keys are not valid yet.
    unbound: BTreeMap<u64, Told>,
    next_grant: u64,
    fences_timer: bool,
    consumers: BTreeMap<OperationId, AwaitConsumers>,

    gets: BTreeMap<OperationId, Get>,
    results: BTreeMap<OperationId, Result<Delivery>>,
    next_operation: u64,
    room: BTreeMap<OperationId, Arc<Waiter>>,
    remote_waits: BTreeSet<OperationId>,
    fetches: BTreeMap<u64, Fetch>,
    transfers: TransferTable<Box<[towline_core::Word]>>,
    orphans: OrphanTable,
    completions: Vec<(usize, Completion)>,
    posted: BTreeSet<usize>,
    stats: Stats,
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("links", &self.links.len())
            .field("gets", &self.gets.len())
            .field("grants", &self.grants.len())
            .finish_non_exhaustive()
    }
}

impl Engine {
    /// An engine over `pool`, with `rails` in order of preference. `wake` is called, from any thread, when
    /// [`pump`](Self::pump) has something to do for another reason than completions and time.
    ///
    /// # Errors
    /// [`crate::ErrorKind::BadOption`] for limits that can't be.
    pub(crate) fn with_pool(
        config: Config,
        pool: Arc<Pool>,
        rails: Vec<Rail>,
        wake: Arc<dyn Fn() + Send + Sync>,
        now: Tick,
    ) -> Result<Self> {
        let transfers = fetch::transfer_table(config.limits.gets.saturating_mul(2))?;
        Ok(Self {
            config,
            pool,
            rails,
            wake,
            now,
            timers: Timers::new(),
            actions: VecDeque::new(),
            closing: false,
            links: BTreeMap::new(),
            next_link: 1,
            by_address: BTreeMap::new(),
            by_incarnation: BTreeMap::new(),
            queue_pairs: BTreeMap::new(),
            troubles: Troubles::default(),
            payloads: Vec::new(),
            free_slots: Vec::new(),
            keys: BTreeMap::new(),
            waiting: BTreeMap::new(),
            unwanted: BTreeSet::new(),
            grants: BTreeMap::new(),
            unheard: BTreeMap::new(),
            holdings: BTreeMap::new(),
            unbound: BTreeMap::new(),
            next_grant: 1,
            fences_timer: false,
            consumers: BTreeMap::new(),
            gets: BTreeMap::new(),
            results: BTreeMap::new(),
            next_operation: 1,
            room: BTreeMap::new(),
            remote_waits: BTreeSet::new(),
            fetches: BTreeMap::new(),
            transfers,
            orphans: OrphanTable::default(),
            completions: Vec::new(),
            posted: BTreeSet::new(),
            stats: Stats::default(),
        })
    }

    /// As the endpoint's builder does it, for drivers of other authors and for the simulation: a pool over `memory`
    /// with extents of whole `granule`s, and an engine over it.
    ///
    /// # Errors
    /// [`crate::ErrorKind::BadOption`] for a granule or limits that can't be.
    pub fn new(
        config: Config,
        memory: Memory,
        granule: u64,
        rails: Vec<Rail>,
        wake: Arc<dyn Fn() + Send + Sync>,
        now: Tick,
    ) -> Result<Self> {
        Self::with_pool(config, Pool::new(memory, granule)?, rails, wake, now)
    }

    /// A buffer of the pool, now or not at all.
    ///
    /// # Errors
    /// [`crate::ErrorKind::PoolFull`], [`crate::ErrorKind::PoolTooSmall`], [`crate::ErrorKind::ZeroLength`].
    pub fn allocate(&self, len: u64) -> Result<crate::Buffer> {
        self.pool.allocate("alloc", len)
    }

    /// Asks the completion queues to raise an event for the next completion.
    pub fn arm(&self) {
        for rail in &self.rails {
            rail.arm();
        }
    }

    /// Whether an operation has its result.
    #[must_use]
    pub fn has_result(&self, operation: OperationId) -> bool {
        self.results.contains_key(&operation) || self.consumers.get(&operation).is_some_and(AwaitConsumers::is_done)
    }

    /// The rails to which something was posted since this was last asked: their devices have work.
    pub fn take_posted(&mut self) -> impl Iterator<Item = usize> + use<> {
        std::mem::take(&mut self.posted).into_iter()
    }

    /// Who it is.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.config.identity
    }

    /// The devices that payloads travel by, in order of preference.
    pub fn devices(&self) -> impl Iterator<Item = &Device> {
        self.rails.iter().map(|rail| &rail.device)
    }

    /// What the driver is to do next.
    pub fn next_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// When [`pump`](Self::pump) must be called at the latest.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Tick> {
        self.timers.next_at()
    }

    /// Takes completions from the queues, then looks at the time, then acts on both. The time is taken after the
    /// completions, so that nothing that arrived after a deadline passes for having arrived before it (I4).
    pub fn pump(&mut self, clock: impl FnOnce() -> Tick) {
        self.collect();
        self.advance(clock());
        self.handle_completions();
        self.handle_bindings();
        self.handle_room();
        self.handle_timers();
        self.check_queue_pairs();
        self.post_reads();
    }

    /// Begins to close: new operations are refused, gets in progress end with
    /// [`Closed`](crate::ErrorKind::Closed), and what is published can't be got any more.
    pub fn begin_close(&mut self, now: Tick) {
        self.advance(now);
        self.closing = true;
        self.cancel_all_gets();
        self.end_awaited_consumers();
        self.withdraw_all();
    }

    /// Whether nobody outside can touch the pool any more: no read is outstanding and no peer holds a lease.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.fetches.is_empty() && self.grants.is_empty()
    }

    /// Breaks every connection: queue pairs to the error state, a goodbye to every peer.
    pub fn abort(&mut self, now: Tick) {
        self.advance(now);
        self.closing = true;
        self.cancel_all_gets();
        self.end_awaited_consumers();
        self.withdraw_all();
        self.close_all_links();
    }

    /// An error if the endpoint is closed or being closed.
    fn check_open(&self, operation: &'static str) -> Result<()> {
        if self.closing { Err(Error::new(operation, crate::ErrorKind::Closed)) } else { Ok(()) }
    }

    fn advance(&mut self, now: Tick) {
        // A clock that is passed in from several threads may come out of order by a little: it never runs back here.
        self.now = self.now.max(now);
    }

    fn new_operation(&mut self) -> OperationId {
        let id = OperationId(self.next_operation);
        self.next_operation += 1;
        id
    }

    /// Takes everything that the completion queues hold.
    fn collect(&mut self) {
        const ROOM: usize = 256;
        let mut taken = Vec::new();
        for (rail, objects) in self.rails.iter().enumerate() {
            while objects.poll(&mut taken, ROOM) {
                self.completions.extend(taken.drain(..).map(|completion| (rail, completion)));
            }
        }
    }

    fn handle_timers(&mut self) {
        while let Some(timer) = self.timers.pop_due(self.now) {
            match timer {
                Timer::Get(operation) => self.get_deadline(operation),
                Timer::Handshake(link) => self.handshake_deadline(link),
                Timer::Broken(link, why) => self.broken_deadline(link, why),
                Timer::Closes(link) => self.send_closes(link),
                Timer::Waiting(link, request) => self.waiting_deadline(link, request),
                Timer::KeepAlive(link) => self.send_keep_alive(link),
                Timer::Grant(grant) => self.grant_deadline(grant),
                Timer::Fences => self.look_at_fences(),
                Timer::Payload(payload) => self.payload_deadline(payload),
                Timer::Abandoned(transfer) => self.abandoned_deadline(transfer),
                Timer::Remote(operation) => self.remote_again(operation),
                Timer::Consumers(operation) => self.consumers_deadline(operation),
                Timer::Proof(link, offered, patience) => self.proof_deadline(link, offered, patience),
                Timer::Return(link, offered) => self.return_deadline(link, offered),
            }
        }
    }
}
