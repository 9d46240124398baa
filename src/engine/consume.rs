//! The consumer's side: gets, from their call to their one result.
//!
//! | stage | holds | leaves it by |
//! |---|---|---|
//! | `AwaitLink` | nothing | its link opening; a retry's turn |
//! | `Requested` | a request at the producer | grant, refusal |
//! | `AwaitRoom` | a lease, a place in the pool's queue | room |
//! | `AwaitRemote` | a lease, a destination | the queue pair and the producer's segment being there |
//! | `Reading` | a lease, a transfer that owns the destination | the transfer's fence |
//! | `AwaitFence` | the transfer of a failed try | its fence; then it is tried again |
//!
//! From every stage a deadline, a cancel or a final failure leads to the get's one result. A transfer that is still
//! outstanding then keeps its destination until its fence (I3).

use super::fetch::Place;
use super::link::{Link, LinkId, State, Target};
use super::timers::TimerId;
use super::{Action, Engine, OperationId, Tick, Timer};
use crate::error::Gone;
use crate::layout::Layout;
use crate::sys::OwnedBytes;
use crate::{Buffer, Error, ErrorKind, Path, Result};
use std::fmt;
use std::sync::Arc;
use towline_control::address::Address;
use towline_control::wire::{self, CloseEntry, Frame, Get as GetFrame, GetFlags, Outcome, RefuseCode};
use towline_verbs::{Cause, CompletionStatus, MappedView, QueuePairState, RemoteSlice};

/// Where a payload is to be had.
#[derive(Debug, Clone)]
pub enum Source {
    /// From the producer that made this ticket.
    Ticket(Box<crate::Ticket>),
    /// From the endpoint at this address, under this key.
    Key {
        /// Where the endpoint is: a Unix name, or addresses to be tried in order (host names resolved before).
        peers: Vec<Address>,
        /// The key.
        key: Vec<u8>,
    },
}

/// What is to be got, how, and until when.
#[derive(Debug)]
pub struct GetRequest {
    /// Where it is.
    pub source: Source,
    /// A view of the producer's memory instead of the bytes.
    pub view: bool,
    /// Where the bytes go instead of into the pool.
    pub(crate) destination: Option<Arc<OwnedBytes>>,
    /// When it ends at the latest.
    pub deadline: Tick,
}

impl GetRequest {
    /// A get into the pool.
    #[must_use]
    pub fn new(source: Source, deadline: Tick) -> Self {
        Self { source, view: false, destination: None, deadline }
    }
}

/// Where the bytes of a delivered payload are.
#[derive(Debug)]
#[non_exhaustive]
pub enum Storage {
    /// There are none.
    Empty,
    /// In a buffer of the pool, each part at its offset of the layout.
    Pool(Buffer),
    /// In the caller's own memory, likewise.
    #[doc(hidden)]
    Own(OwnBytes),
    /// In the producer's memory: a view for each part, `None` for parts without bytes.
    Views(Vec<Option<MappedView>>),
}

/// The caller's own memory, filled.
#[derive(Debug)]
pub struct OwnBytes(pub(crate) Arc<OwnedBytes>);

/// A payload that a get or view has brought.
#[derive(Debug)]
#[non_exhaustive]
pub struct Delivery {
    /// Its parts.
    pub layout: Layout,
    /// Its bytes.
    pub storage: Storage,
    /// How they travelled.
    pub path: Path,
    /// Why by that path.
    pub reason: String,
    /// How many rails they were spread over.
    pub rails: u32,
    /// How often the get was tried again.
    pub retries: u32,
    /// Bytes that came by another path than the first choice.
    pub fallback_bytes: u64,
    /// For views: what must be given back with [`Engine::release`].
    pub lease: Option<HeldLease>,
}

/// A lease that outlives its get, because views of the producer's memory do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeldLease {
    peer: [u8; 16],
    lease: u64,
}

/// The producer's answer, owned.
pub(super) struct GrantReceived {
    request: u64,
    lease: u64,
    echo: u64,
    lease_time: Tick,
    pub(super) watermark: u64,
    total: u64,
    layout: Vec<u8>,
    pub(super) segments: Vec<RemoteSlice>,
    eager: Option<Vec<u8>>,
}

impl GrantReceived {
    pub(super) fn from_frame(frame: &wire::Grant<'_>) -> Self {
        Self {
            request: frame.request,
            lease: frame.lease,
            echo: frame.echo,
            lease_time: frame.lease_us.saturating_mul(1000),
            watermark: frame.watermark,
            total: frame.total_len,
            layout: frame.layout.to_vec(),
            segments: frame
                .segments
                .iter()
                .map(|s| RemoteSlice { address: s.address(), len: s.len(), rkey: s.rkey() })
                .collect(),
            eager: frame.segments.is_empty().then(|| frame.eager.to_vec()),
        }
    }
}

impl fmt::Debug for GrantReceived {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrantReceived").field("lease", &self.lease).field("total", &self.total).finish_non_exhaustive()
    }
}

/// A lease in a get's hands.
#[derive(Debug)]
pub(super) struct Leased {
    /// Whose it is: it is closed over whichever link leads there.
    pub(super) peer: [u8; 16],
    pub(super) lease: u64,
    pub(super) watermark: u64,
    pub(super) layout: Layout,
    pub(super) segments: Vec<RemoteSlice>,
    eager: Option<Vec<u8>>,
}

pub(super) enum Stage {
    AwaitLink,
    Requested(u64),
    AwaitRoom(Leased),
    AwaitRemote(Leased, Option<Place>, Tick),
    Reading(u64),
    AwaitFence,
}

pub(super) struct Get {
    source: Source,
    target: Target,
    view: bool,
    destination: Option<Arc<OwnedBytes>>,
    deadline: Tick,
    timer: Option<TimerId>,
    pub(super) link: Option<LinkId>,
    pub(super) stage: Stage,
    tries: u32,
    /// What the first failed try said, for when later ones can't even connect.
    lost: Option<String>,
    /// How a read of the last try failed, if it was not for want of a connection: status and the provider's code.
    refused: Option<(CompletionStatus, u32)>,
}

impl Get {
    fn name(&self) -> &'static str {
        if self.view { "view" } else { "get" }
    }
}

/// Why a link ended, as its gets see it.
#[derive(Debug, Clone)]
pub(super) enum Failure {
    /// It never came to be.
    Unreachable(ErrorKind),
    /// It broke.
    Lost(String),
    /// The peer can't be talked to.
    Protocol(String),
    /// Trying again would end the same way.
    Final(ErrorKind),
    /// This endpoint is closing.
    Closing,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable(kind) | Self::Final(kind) => kind.fmt(f),
            Self::Lost(why) | Self::Protocol(why) => f.write_str(why),
            Self::Closing => f.write_str("this endpoint is closing"),
        }
    }
}

/// The caller's side.
impl Engine {
    /// Begins a get; its result is there after [`Action::Wake`].
    ///
    /// # Errors
    /// For what can be said at once: a bad key, a deadline in the past, a destination that is too small, a limit.
    pub fn get(&mut self, now: Tick, request: GetRequest) -> Result<OperationId> {
        self.advance(now);
        let name = if request.view { "view" } else { "get" };
        let fail = |kind| Err(Error::new(name, kind));
        self.check_open(name)?;
        if self.gets.len() >= self.config.limits.gets {
            return fail(ErrorKind::Busy { what: "gets", limit: self.config.limits.gets as u64 });
        }
        let target = match &request.source {
            Source::Ticket(ticket) => {
                let mut addresses = Vec::new();
                for text in &ticket.addresses {
                    let address = text
                        .parse::<Address>()
                        .map_err(|_| ErrorKind::TicketMalformed { what: "an address in it is none" });
                    addresses.push(address.map_err(|kind| Error::new(name, kind))?);
                }
                let need = ticket.layout.destination_len();
                if let Some(destination) = &request.destination
                    && (towline_verbs::memory::MemoryBacking::len(&**destination)) < need
                {
                    let have = towline_verbs::memory::MemoryBacking::len(&**destination);
                    return fail(ErrorKind::DestinationTooSmall { need, have });
                }
                let local = ticket.boot == self.config.identity.boot && self.has_shm();
                let unix = local.then(|| unix_name_of(&ticket.incarnation));
                Target { addresses, unix, incarnation: Some(ticket.incarnation) }
            }
            Source::Key { peers, key } => {
                self.check_key(name, key)?;
                let unix = peers.iter().find_map(|peer| match peer {
                    Address::Unix(unix) => Some(unix.as_bytes().to_vec()),
                    _ => None,
                });
                let addresses = peers.iter().filter(|peer| !matches!(peer, Address::Unix(_))).cloned().collect();
                Target { addresses, unix, incarnation: None }
            }
        };
        let target = self.only_secure(target).map_err(|kind| Error::new(name, kind))?;
        if request.deadline <= self.now {
            return fail(ErrorKind::TimedOut { waiting_for: "anything: it was in the past", quarantined: 0 });
        }
        let operation = self.new_operation();
        let timer = self.timers.set(request.deadline, Timer::Get(operation));
        let get = Get {
            source: request.source,
            target,
            view: request.view,
            destination: request.destination,
            deadline: request.deadline,
            timer: Some(timer),
            link: None,
            stage: Stage::AwaitLink,
            tries: 0,
            lost: None,
            refused: None,
        };
        self.gets.insert(operation, get);
        self.try_get(operation);
        Ok(operation)
    }

    /// The result of a get, once.
    pub fn take(&mut self, operation: OperationId) -> Option<Result<Delivery>> {
        self.results.remove(&operation)
    }

    /// Gives a get up; its result is [`ErrorKind::Cancelled`] if it had none yet.
    pub fn cancel(&mut self, now: Tick, operation: OperationId) {
        self.advance(now);
        self.give_up(operation, ErrorKind::Cancelled);
    }

    /// Gives a view's lease back: nothing of this process reads the producer's memory under it any more.
    pub fn release(&mut self, now: Tick, lease: HeldLease) {
        self.advance(now);
        let entry = CloseEntry::new(lease.lease, Outcome::Delivered);
        self.close_lease_of(lease.peer, entry);
    }

    pub(super) fn cancel_all_gets(&mut self) {
        let gets: Vec<OperationId> = self.gets.keys().copied().collect();
        for operation in gets {
            self.give_up(operation, ErrorKind::Closed);
        }
    }

    /// Without a secret only this host is spoken to, unless that is allowed by name (I14).
    fn only_secure(&self, mut target: Target) -> Result<Target, ErrorKind> {
        if self.config.secret.is_some() || self.config.insecure {
            return Ok(target);
        }
        let beyond = |address: &Address| !matches!(address, Address::Ip(address) if address.ip().is_loopback());
        let refused = target.addresses.iter().find(|address| beyond(address)).map(ToString::to_string);
        target.addresses.retain(|address| !beyond(address));
        match refused {
            Some(address) if target.addresses.is_empty() && target.unix.is_none() => {
                Err(ErrorKind::Insecure { address })
            }
            _ => Ok(target),
        }
    }

    fn has_shm(&self) -> bool {
        self.rails.iter().any(|rail| super::link::provider_code(rail.path) == 1)
            && (self.config.paths.allow(Path::Shm) || self.config.paths.allow(Path::Direct))
    }
}

/// Trying, and trying again.
impl Engine {
    fn try_get(&mut self, operation: OperationId) {
        let Some(get) = self.gets.get(&operation) else { return };
        let target = get.target.clone();
        match self.link_to(&target) {
            Err(kind) => self.finish(operation, Err(kind)),
            Ok(link) => {
                self.move_get(operation, link);
                if let Some(link) = self.links.get_mut(&link) {
                    link.gets.insert(operation);
                }
                if self.links.get(&link).is_some_and(Link::is_open) {
                    self.send_request(link, operation);
                }
            }
        }
    }

    /// The get's link is `link` from now on, and it has no request there yet.
    pub(super) fn move_get(&mut self, operation: OperationId, link: LinkId) {
        if let Some(get) = self.gets.get_mut(&operation) {
            get.link = Some(link);
            get.stage = Stage::AwaitLink;
        }
    }

    /// A read of the get's last try failed in this way.
    pub(super) fn read_refused(&mut self, operation: OperationId, status: CompletionStatus, vendor: u32) {
        let lost = matches!(status, CompletionStatus::Flushed | CompletionStatus::TransportRetryExceeded);
        if let Some(get) = self.gets.get_mut(&operation) {
            get.refused = (!lost).then_some((status, vendor));
        }
    }

    /// The get waits for its link to agree on another path.
    pub(super) fn await_link(&mut self, operation: OperationId) {
        let Some(get) = self.gets.get_mut(&operation) else { return };
        if let Stage::Reading(_) = get.stage {
            get.stage = Stage::AwaitLink;
        } else if let Stage::Requested(request) = get.stage {
            get.stage = Stage::AwaitLink;
            let link = get.link;
            if let Some(link) = link.and_then(|link| self.links.get_mut(&link)) {
                link.requests.remove(&request);
            }
            if let Some(link) = link {
                self.cancel_on(link, request);
            }
        }
    }

    pub(super) fn send_requests(&mut self, id: LinkId) {
        let Some(link) = self.links.get(&id) else { return };
        let gets: Vec<OperationId> = link.gets.iter().copied().collect();
        for operation in gets {
            if self.gets.get(&operation).is_some_and(|get| matches!(get.stage, Stage::AwaitLink)) {
                self.send_request(id, operation);
            }
        }
    }

    fn send_request(&mut self, id: LinkId, operation: OperationId) {
        let now = self.now;
        let mut eager = self.config.limits.eager;
        let rail = self.links.get(&id).and_then(|link| link.rail);
        if rail.is_some_and(|rail| self.rails[rail].device.info().capabilities.mappable) {
            eager = eager.min(EAGER_MAPPED);
        }
        let request = self.new_operation().0;
        let Some(get) = self.gets.get_mut(&operation) else { return };
        get.stage = Stage::Requested(request);
        let target = match &get.source {
            Source::Ticket(ticket) => OwnedTarget::Slot { slot: ticket.slot, generation: ticket.generation },
            Source::Key { key, .. } => OwnedTarget::Key(key.clone()),
        };
        let frame = GetFrame {
            request,
            target: match &target {
                OwnedTarget::Slot { slot, generation } => wire::Target::Slot { slot: *slot, generation: *generation },
                OwnedTarget::Key(key) => wire::Target::Key(key),
            },
            wait_us: get.deadline.saturating_sub(now) / 1000,
            sent_at: now,
            max_eager: if get.view { 0 } else { eager },
            flags: if get.view { GetFlags::VIEW } else { GetFlags::empty() },
            provider: 0,
        };
        if let Some(link) = self.links.get_mut(&id) {
            link.requests.insert(request, operation);
        }
        self.send(id, &Frame::Get(frame));
        self.start_keep_alive(id);
    }

    /// The link under a get has ended.
    pub(super) fn link_failed_under(&mut self, operation: OperationId, failure: &Failure, state: State) {
        let Some(get) = self.gets.get_mut(&operation) else { return };
        get.link = None;
        match failure {
            Failure::Closing => self.give_up(operation, ErrorKind::Closed),
            Failure::Final(kind) => self.give_up(operation, kind.clone()),
            Failure::Protocol(what) => self.give_up(operation, ErrorKind::Protocol { what: what.clone() }),
            Failure::Unreachable(kind) => match &get.lost {
                Some(lost) if get.tries >= self.config.limits.tries => {
                    let why = format!("{lost}; then {kind}");
                    self.give_up(operation, ErrorKind::PeerLost { why });
                }
                Some(_) => self.again(operation, &kind.to_string()),
                None => self.give_up(operation, kind.clone()),
            },
            Failure::Lost(why) => {
                let _before = state;
                self.again(operation, why);
            }
        }
    }

    /// Another try, after whatever the last one posted is fenced.
    pub(super) fn again(&mut self, operation: OperationId, why: &str) {
        const FIRST_PAUSE: Tick = 10_000_000;
        let now = self.now;
        let Some(get) = self.gets.get_mut(&operation) else { return };
        get.tries += 1;
        if get.lost.is_none() {
            get.lost = Some(why.to_owned());
        }
        if get.tries > self.config.limits.tries {
            let kind = match get.refused {
                Some((status, vendor)) => {
                    ErrorKind::TransferFailed { status: status.text(), vendor, tries: self.config.limits.tries }
                }
                None => ErrorKind::PeerLost { why: get.lost.clone().unwrap_or_default() },
            };
            self.give_up(operation, kind);
            return;
        }
        self.stats.retries += 1;
        let pause = if get.tries == 1 { 0 } else { FIRST_PAUSE << (get.tries - 2).min(6) };
        let stage = std::mem::replace(&mut get.stage, Stage::AwaitLink);
        match stage {
            Stage::Reading(transfer) => {
                get.stage = Stage::AwaitFence;
                self.abandon_fetch(transfer, towline_core::transfer::Reason::Failed(towline_core::transfer::Cause(0)));
            }
            Stage::AwaitFence => get.stage = Stage::AwaitFence,
            Stage::AwaitRoom(leased) | Stage::AwaitRemote(leased, ..) => {
                self.leave_room(operation);
                self.close_lease_of(leased.peer, CloseEntry::new(leased.lease, Outcome::Failed));
                self.timers.set(now + pause, Timer::Remote(operation));
            }
            Stage::AwaitLink | Stage::Requested(_) => {
                self.timers.set(now + pause, Timer::Remote(operation));
            }
        }
    }

    /// A get's timer: its turn to be tried again, or another look at whether its remote memory is there.
    pub(super) fn remote_again(&mut self, operation: OperationId) {
        let Some(get) = self.gets.get(&operation) else { return };
        match get.stage {
            Stage::AwaitLink => match get.link {
                None => self.try_get(operation),
                Some(link) if self.links.get(&link).is_some_and(Link::is_open) => self.send_request(link, operation),
                Some(_) => {}
            },
            Stage::AwaitRemote(..) => self.try_remote(operation),
            _ => {}
        }
    }

    /// The last try's reads are fenced: on with the next.
    pub(super) fn fetch_fenced(&mut self, operation: OperationId) {
        let Some(get) = self.gets.get_mut(&operation) else { return };
        get.stage = Stage::AwaitLink;
        match get.link {
            Some(link) if self.links.get(&link).is_some_and(Link::is_open) => self.send_request(link, operation),
            Some(_) => {}
            None => self.try_get(operation),
        }
    }

    pub(super) fn get_deadline(&mut self, operation: OperationId) {
        let Some(get) = self.gets.get_mut(&operation) else { return };
        get.timer = None;
        let waiting_for = match &get.stage {
            Stage::AwaitLink => match get.link.and_then(|link| self.links.get(&link)).map(|link| link.state) {
                Some(State::Dialing) | None => "a connection",
                Some(_) => "the peer to agree on a path",
            },
            Stage::Requested(_) => match &get.source {
                Source::Ticket(_) => "the producer's answer",
                Source::Key { .. } => "a payload to be put under the key",
            },
            Stage::AwaitRoom(leased) => {
                let need = leased.layout.destination_len();
                let (free, largest) = (self.pool.free(), self.pool.largest_free_run());
                self.give_up(operation, ErrorKind::PoolFull { need, free, largest });
                return;
            }
            Stage::AwaitRemote(..) => "the data connection",
            Stage::Reading(_) => "the payload's bytes",
            Stage::AwaitFence => "reads of a failed try to end",
        };
        self.give_up(operation, ErrorKind::TimedOut { waiting_for, quarantined: 0 });
    }

    /// Ends a get without its payload. What reads are outstanding keep their destination.
    pub(super) fn give_up(&mut self, operation: OperationId, mut kind: ErrorKind) {
        use towline_core::transfer::Reason;
        let Some(get) = self.gets.get_mut(&operation) else { return };
        let outcome = match &kind {
            ErrorKind::TimedOut { .. } | ErrorKind::PoolFull { .. } => Outcome::TimedOut,
            ErrorKind::Cancelled | ErrorKind::Closed => Outcome::Cancelled,
            ErrorKind::LayoutMismatch { .. } => Outcome::Corrupt,
            _ => Outcome::Failed,
        };
        let link = get.link;
        match std::mem::replace(&mut get.stage, Stage::AwaitLink) {
            Stage::AwaitLink => {}
            Stage::AwaitFence => {
                let bytes = self.quarantine_of(operation);
                if let ErrorKind::TimedOut { quarantined, .. } = &mut kind {
                    *quarantined = bytes;
                }
            }
            Stage::Requested(request) => {
                if let Some(open) = link.and_then(|link| self.links.get_mut(&link)) {
                    open.requests.remove(&request);
                }
                if let Some(link) = link {
                    self.cancel_on(link, request);
                }
            }
            Stage::AwaitRoom(leased) | Stage::AwaitRemote(leased, ..) => {
                self.leave_room(operation);
                self.close_lease_of(leased.peer, CloseEntry::new(leased.lease, outcome));
            }
            Stage::Reading(transfer) => {
                let reason = match outcome {
                    Outcome::TimedOut => Reason::TimedOut,
                    Outcome::Cancelled => Reason::Cancelled,
                    _ => Reason::Failed(towline_core::transfer::Cause(0)),
                };
                let bytes = self.abandon_fetch(transfer, reason);
                if let ErrorKind::TimedOut { quarantined, .. } = &mut kind {
                    *quarantined = bytes;
                }
            }
        }
        self.finish(operation, Err(kind));
    }

    /// The get's one result.
    pub(super) fn finish(&mut self, operation: OperationId, result: Result<Delivery, ErrorKind>) {
        let Some(mut get) = self.gets.remove(&operation) else { return };
        self.timers.cancel(get.timer.take());
        self.remote_waits.remove(&operation);
        if let Some(link) = get.link.and_then(|link| self.links.get_mut(&link)) {
            link.gets.remove(&operation);
        }
        match &result {
            Ok(delivery) => {
                let bytes = delivery.layout.payload_len();
                self.stats.gets += 1;
                *self.stats.bytes.entry(delivery.path).or_default() += bytes;
                self.stats.fallback_bytes += delivery.fallback_bytes;
            }
            Err(_) => self.stats.failures += 1,
        }
        self.results.insert(operation, result.map_err(|kind| Error::new(get.name(), kind)));
        self.actions.push_back(Action::Wake(operation));
    }

    /// Reports a lease of `peer` as closed: over its link or, if there is none, over the next one. A peer on this host
    /// waits for the word of whoever mapped its memory, so it is dialled for that.
    pub(super) fn close_lease_of(&mut self, peer: [u8; 16], entry: CloseEntry) {
        let link = self.by_incarnation.get(&peer).copied();
        if let Some(link) = link.filter(|link| self.links.get(link).is_some_and(Link::is_open)) {
            self.close_lease_on(link, entry);
            return;
        }
        if !self.has_room_for_orphans() {
            return; // the producer's own fences end what is forgotten here: windows by time, mappings with this process
        }
        self.orphans.entry(peer).or_default().closes.push(entry);
        if self.has_shm() {
            let target = Target { addresses: Vec::new(), unix: Some(unix_name_of(&peer)), incarnation: Some(peer) };
            let _no_more_links = self.link_to(&target);
        }
    }
}

impl Engine {
    pub(super) fn has_room_for_orphans(&self) -> bool {
        self.orphans.values().map(|orphans| orphans.closes.len() + orphans.cancels.len()).sum::<usize>() < MAX_ORPHANS
    }
}

/// Most bytes that travel inside a grant where the producer's memory is mapped: from here on copying them out of there
/// is faster than sending them through a socket (measured at a payload of 16 KiB: 31 against 32 us; 64 KiB: 34 against
/// 55 us).
const EAGER_MAPPED: u32 = 16 << 10;

/// Closed leases kept for peers to which no link is open.
const MAX_ORPHANS: usize = 4096;

enum OwnedTarget {
    Key(Vec<u8>),
    Slot { slot: u32, generation: u32 },
}

/// From the producer's answer to the reads.
impl Engine {
    pub(super) fn grant_received(&mut self, id: LinkId, grant: GrantReceived) {
        let margin = self.config.times.drift_margin;
        let now = self.now;
        let Some(link) = self.links.get_mut(&id) else { return };
        let Some(operation) = link.requests.remove(&grant.request) else {
            // Nobody waits for it any more: it is closed at once, unused (I11).
            self.close_lease_on(id, CloseEntry::new(grant.lease, Outcome::Cancelled));
            return;
        };
        // A lease counts from the newest frame of ours that the grant echoes (I4); one that echoes a time that has not
        // come is no lease at all.
        let until =
            if grant.echo <= now { grant.echo.saturating_add(grant.lease_time).saturating_sub(margin) } else { 0 };
        link.held.insert(grant.lease, until);
        let Some(peer) = link.incarnation() else { return };
        match self.check_grant(operation, &grant) {
            Ok(layout) => {
                let need = layout.destination_len();
                let lease = grant.lease;
                let leased = Leased {
                    peer,
                    lease,
                    watermark: grant.watermark,
                    layout,
                    segments: grant.segments,
                    eager: grant.eager,
                };
                self.place(operation, leased, need);
            }
            Err(kind) => {
                let outcome =
                    if matches!(kind, ErrorKind::LayoutMismatch { .. }) { Outcome::Corrupt } else { Outcome::Failed };
                self.close_lease_on(id, CloseEntry::new(grant.lease, outcome));
                if let Some(get) = self.gets.get_mut(&operation) {
                    get.stage = Stage::AwaitLink;
                }
                self.finish(operation, Err(kind));
            }
        }
    }

    /// Whether what is granted is what was put, and what was asked for (I5).
    fn check_grant(&self, operation: OperationId, grant: &GrantReceived) -> Result<Layout, ErrorKind> {
        let mismatch = |what| Err(ErrorKind::LayoutMismatch { what });
        let Some(get) = self.gets.get(&operation) else { return mismatch("nobody asked for it") };
        let layout = match Layout::decode(&grant.layout) {
            Ok(layout) => layout,
            Err(what) => return mismatch(what),
        };
        if let Source::Ticket(ticket) = &get.source
            && ticket.layout != layout
        {
            return mismatch("the layout is not the ticket's");
        }
        if layout.payload_len() != grant.total || grant.watermark > grant.total {
            return mismatch("the lengths do not add up");
        }
        match &grant.eager {
            Some(eager) if eager.len() as u64 != grant.total || (get.view && grant.total > 0) => {
                return mismatch("the bytes in the grant");
            }
            Some(_) => {}
            None => {
                let lengths = layout.parts().iter().map(|part| part.len).filter(|len| *len > 0);
                if !lengths.eq(grant.segments.iter().map(|segment| segment.len)) {
                    return mismatch("the segments are not the parts");
                }
                if grant.segments.iter().any(|segment| segment.address.checked_add(segment.len).is_none()) {
                    return mismatch("a segment beyond the end of memory");
                }
            }
        }
        if let Some(destination) = &get.destination {
            let have = towline_verbs::memory::MemoryBacking::len(&**destination);
            let need = layout.destination_len();
            if have < need {
                return Err(ErrorKind::DestinationTooSmall { need, have });
            }
        }
        Ok(layout)
    }

    /// Finds the destination.
    fn place(&mut self, operation: OperationId, leased: Leased, need: u64) {
        let Some(get) = self.gets.get_mut(&operation) else { return };
        let name = get.name();
        let place = if get.view || need == 0 {
            None
        } else if let Some(destination) = &get.destination {
            Some(Place::Own(destination.clone()))
        } else {
            match self.pool.allocate(name, need) {
                Ok(buffer) => Some(Place::Pool(buffer)),
                Err(error) if matches!(error.kind(), ErrorKind::PoolFull { .. }) => {
                    get.stage = Stage::AwaitRoom(leased);
                    let wake = self.wake.clone();
                    match self.pool.wait(name, need, move || wake()) {
                        Ok(waiter) => {
                            self.room.insert(operation, waiter);
                        }
                        Err(error) => self.give_up(operation, error.kind().clone()),
                    }
                    return;
                }
                Err(error) => {
                    get.stage = Stage::AwaitRoom(leased);
                    self.give_up(operation, error.kind().clone());
                    return;
                }
            }
        };
        self.placed(operation, leased, place);
    }

    /// Room that was waited for.
    pub(super) fn handle_room(&mut self) {
        if self.room.is_empty() {
            return;
        }
        let ready: Vec<(OperationId, Buffer)> = self
            .room
            .iter()
            .filter_map(|(operation, waiter)| waiter.take().map(|buffer| (*operation, buffer)))
            .collect();
        for (operation, buffer) in ready {
            self.room.remove(&operation);
            let Some(get) = self.gets.get_mut(&operation) else { continue };
            if let Stage::AwaitRoom(leased) = std::mem::replace(&mut get.stage, Stage::AwaitLink) {
                self.placed(operation, leased, Some(Place::Pool(buffer)));
            }
        }
    }

    fn leave_room(&mut self, operation: OperationId) {
        if let Some(waiter) = self.room.remove(&operation) {
            waiter.cancel();
        }
    }

    fn placed(&mut self, operation: OperationId, mut leased: Leased, place: Option<Place>) {
        let now = self.now;
        let Some(get) = self.gets.get_mut(&operation) else { return };
        if let Some(eager) = leased.eager.take() {
            // A consumer that stood still may come to read a grant when its lease has gone to another (I4).
            let until = get.link.and_then(|link| self.links.get(&link)).and_then(|link| link.held.get(&leased.lease));
            let stored = match place {
                _ if until.is_none_or(|until| *until <= now) => Err(ErrorKind::LeaseExpired),
                Some(place) => place.fill(&leased.layout, &eager),
                None => Ok(Storage::Empty),
            };
            self.deliver(operation, leased.lease, leased.layout, stored);
        } else {
            get.stage = Stage::AwaitRemote(leased, place, now);
            self.try_remote(operation);
        }
    }

    /// Maps or reads, if the queue pair and the producer's memory are there; otherwise looks again soon.
    fn try_remote(&mut self, operation: OperationId) {
        const PATIENCE: Tick = 5_000_000_000;
        const LOOK_AGAIN: Tick = 500_000;
        let now = self.now;
        let Some(get) = self.gets.get_mut(&operation) else { return };
        let (view, link_id) = (get.view, get.link);
        let Stage::AwaitRemote(leased, place, since) = &mut get.stage else { return };
        let Some(link_id) = link_id else { return };
        let Some(link) = self.links.get(&link_id) else { return };
        let (Some(rail), Some(queue_pair)) = (link.rail, &link.queue_pair) else { return };
        let mappable = self.rails[rail].device.info().capabilities.mappable;
        let views = match queue_pair.state() {
            // What happened to it is found and dealt with for the whole link.
            QueuePairState::Error => return,
            QueuePairState::Reset | QueuePairState::Connecting => None,
            QueuePairState::ReadyToSend if mappable => {
                let views: Result<Vec<MappedView>, _> =
                    leased.segments.iter().map(|segment| queue_pair.map(*segment)).collect();
                match views {
                    Ok(views) => Some(views),
                    // Its segment is on its way; or its end of the queue pair is gone, which the link is about to learn.
                    Err(error)
                        if matches!(
                            error.cause,
                            Cause::NotFound { .. } | Cause::Disconnected | Cause::State { .. }
                        ) && now < *since + PATIENCE =>
                    {
                        None
                    }
                    Err(error) => {
                        self.give_up(operation, ErrorKind::Verbs(error));
                        return;
                    }
                }
            }
            QueuePairState::ReadyToSend => Some(Vec::new()),
        };
        let Some(views) = views else {
            self.remote_waits.insert(operation);
            self.timers.set(now + LOOK_AGAIN, Timer::Remote(operation));
            return;
        };
        self.remote_waits.remove(&operation);
        let place = place.take();
        let Stage::AwaitRemote(leased, ..) = std::mem::replace(&mut get.stage, Stage::AwaitLink) else { return };
        if view {
            let mut views = views.into_iter();
            let views =
                leased.layout.parts().iter().map(|part| if part.len == 0 { None } else { views.next() }).collect();
            self.deliver_view(operation, link_id, leased, views);
        } else if let Some(place) = place {
            self.start_fetch(operation, link_id, leased, place);
        } else {
            self.deliver(operation, leased.lease, leased.layout, Ok(Storage::Empty));
        }
    }

    /// Looks again at gets whose remote memory was not there, after devices made progress.
    pub(super) fn look_at_remotes(&mut self) {
        for operation in std::mem::take(&mut self.remote_waits) {
            self.try_remote(operation);
        }
    }

    fn deliver_view(&mut self, operation: OperationId, link: LinkId, leased: Leased, views: Vec<Option<MappedView>>) {
        let Some(peer) = self.links.get(&link).and_then(Link::incarnation) else { return };
        let lease = HeldLease { peer, lease: leased.lease };
        let total = leased.layout.payload_len();
        if leased.watermark < total {
            // A view of what is not there yet could be read too early: the bytes are waited for.
            if let Some(get) = self.gets.get_mut(&operation) {
                get.stage = Stage::AwaitRemote(leased, None, self.now);
            }
            self.remote_waits.insert(operation);
            return;
        }
        let delivery = self.delivery(operation, leased.layout, Storage::Views(views), Some(lease));
        self.finish(operation, Ok(delivery));
    }

    /// A get's bytes are all there: the lease is closed and the result given, unless the lease had run out (I4).
    pub(super) fn deliver(
        &mut self,
        operation: OperationId,
        lease: u64,
        layout: Layout,
        storage: Result<Storage, ErrorKind>,
    ) {
        let link = self.gets.get(&operation).and_then(|get| get.link);
        let outcome = if storage.is_ok() { Outcome::Delivered } else { Outcome::Failed };
        if let Some(link) = link {
            self.close_lease_on(link, CloseEntry::new(lease, outcome));
        }
        let result = storage.map(|storage| self.delivery(operation, layout, storage, None));
        self.finish(operation, result);
    }

    fn delivery(&self, operation: OperationId, layout: Layout, storage: Storage, lease: Option<HeldLease>) -> Delivery {
        let get = self.gets.get(&operation);
        let link = get.and_then(|get| get.link).and_then(|link| self.links.get(&link));
        let bytes = layout.payload_len();
        Delivery {
            layout,
            storage,
            path: link.map_or(Path::Tcp, |link| link.path),
            reason: link.map_or_else(String::new, |link| link.reason.clone()),
            rails: 1,
            retries: get.map_or(0, |get| get.tries),
            fallback_bytes: if link.is_some_and(|link| link.fell_back) { bytes } else { 0 },
            lease,
        }
    }

    pub(super) fn refused(&mut self, id: LinkId, request: u64, code: RefuseCode, _need: u64, have: u64, text: String) {
        let Some(link) = self.links.get_mut(&id) else { return };
        let Some(operation) = link.requests.remove(&request) else { return };
        let path = link.path;
        let Some(get) = self.gets.get_mut(&operation) else { return };
        get.stage = Stage::AwaitLink;
        let kind = match code {
            RefuseCode::Gone => ErrorKind::Gone(super::produce::gone_from_code(have)),
            RefuseCode::Removed => ErrorKind::Gone(Gone::Removed),
            RefuseCode::TimedOut => {
                ErrorKind::TimedOut { waiting_for: "a payload to be put under the key", quarantined: 0 }
            }
            RefuseCode::TooManyLeases => ErrorKind::Busy { what: "leases at that producer", limit: have },
            RefuseCode::TooManyRequests => ErrorKind::Busy { what: "gets that wait at that producer", limit: have },
            RefuseCode::Path => ErrorKind::PathUnsuitable { path, lacks: "views" },
            RefuseCode::Closing => ErrorKind::PeerLost { why: "it is closing".to_owned() },
            other => {
                let text = if text.is_empty() { other.to_string() } else { format!("{other}: {text}") };
                ErrorKind::PeerLost { why: text }
            }
        };
        self.finish(operation, Err(kind));
    }

    pub(super) fn watermark_received(&mut self, id: LinkId, lease: u64, watermark: u64) {
        self.raise_fetch(id, lease, watermark);
        let waiting = self.gets.iter_mut().find_map(|(operation, get)| match &mut get.stage {
            Stage::AwaitRoom(leased) | Stage::AwaitRemote(leased, ..)
                if get.link == Some(id) && leased.lease == lease =>
            {
                leased.watermark = leased.watermark.max(watermark.min(leased.layout.payload_len()));
                Some(*operation)
            }
            _ => None,
        });
        if let Some(operation) = waiting {
            self.remote_again(operation);
        }
    }
}

/// The abstract Unix socket at which the endpoint of an incarnation listens.
#[must_use]
pub fn unix_name_of(incarnation: &[u8; 16]) -> Vec<u8> {
    format!("towline-{:032x}", u128::from_be_bytes(*incarnation)).into_bytes()
}
