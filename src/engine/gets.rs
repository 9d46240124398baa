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

use super::link::{LinkId, Target, provider_code};
use super::place::Place;
use super::placing::Leased;
use super::timers::TimerId;
use super::{Action, Engine, OperationId, Tick, Timer};
use crate::layout::Layout;
use crate::sys::OwnedBytes;
use crate::{Buffer, Error, ErrorKind, Path, Result};
use std::sync::Arc;
use towline_control::address::Address;
use towline_control::wire::Outcome;
use towline_verbs::{CompletionStatus, MappedView};

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

    /// The same into memory of the caller's own, which is given away until the transfer of the get has ended; at least
    /// [`Layout::destination_len`] bytes. With none at all it is a get into the pool.
    #[must_use]
    pub fn into_memory(mut self, destination: Vec<u8>) -> Self {
        self.destination = (!destination.is_empty()).then(|| OwnedBytes::new(destination.into_boxed_slice()));
        self
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

impl OwnBytes {
    /// The bytes, each part at its offset of the layout.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        self.0.as_slice()
    }
}

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

/// A lease and where it came from. That of a view outlives its get, because views of the producer's memory do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeldLease {
    /// Who granted it, and over which link.
    pub(super) peer: [u8; 16],
    pub(super) link: LinkId,
    pub(super) lease: u64,
    /// Whether only our word ends it.
    pub(super) mapped: bool,
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
    pub(super) source: Source,
    pub(super) target: Target,
    pub(super) view: bool,
    pub(super) destination: Option<Arc<OwnedBytes>>,
    pub(super) deadline: Tick,
    pub(super) timer: Option<TimerId>,
    pub(super) link: Option<LinkId>,
    pub(super) stage: Stage,
    pub(super) tries: u32,
    /// How often its link was given up for another's sake: such tries cost it nothing.
    pub(super) renewals: u32,
    /// What the first failed try said, for when later ones can't even connect.
    pub(super) lost: Option<String>,
    /// How a read of the last try failed, if it was not for want of a connection: status and the provider's code.
    pub(super) refused: Option<(CompletionStatus, u32)>,
}

impl Get {
    pub(super) fn name(&self) -> &'static str {
        if self.view { "view" } else { "get" }
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
            renewals: 0,
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
        self.close_lease_of(lease, Outcome::Delivered);
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

    pub(super) fn has_shm(&self) -> bool {
        self.rails.iter().any(|rail| provider_code(rail.path) == 1)
            && (self.config.paths.allow(Path::Shm) || self.config.paths.allow(Path::Direct))
    }
}

/// The end of a get.
impl Engine {
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
                self.close_lease_of(leased.held, outcome);
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
}

/// The abstract Unix socket at which the endpoint of an incarnation listens.
#[must_use]
pub fn unix_name_of(incarnation: &[u8; 16]) -> Vec<u8> {
    format!("towline-{:032x}", u128::from_be_bytes(*incarnation)).into_bytes()
}
