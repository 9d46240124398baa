//! Links: one control connection with its session and queue pair. What is known of one, from dialling to its end.
//!
//! | state | what is known | leaves it by |
//! |---|---|---|
//! | `Dialing` | the target | `connected`, `connect_failed` |
//! | `Handshaking` | a connection | hello of the peer |
//! | `Upgrading` | the peer, on this host; a Unix connection is being made | that link opening or failing |
//! | `Agreeing` | the peer; a queue pair is offered or awaited | accept, or the last candidate refused |
//! | `Open` | path and queue pair | loss, goodbye, `close` |
//! | `Broken` | the queue pair has failed; the connection may still bring the peer's last words | loss, goodbye, a moment |
//!
//! The end that dialled chooses the path and opens the queue pair; both ends get and put over it. A link that fails
//! takes its queue pair to the error state; gets on it are tried again over a new one, grants wait for their fences.
//!
//! How one comes to be: `connect`; how its ends agree on a queue pair: `agree`; what it brings: `frames`; what is said
//! over it of leases: `closes`; how it ends: `end`.

use super::orphans::Orphans;
use super::timers::TimerId;
use super::waiting::WaitingGet;
use super::{OperationId, Tick};
use crate::Path;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use towline_control::address::Address;
use towline_control::session::{Role, Session};
use towline_control::wire::CloseEntry;
use towline_verbs::QueuePair;

/// One control connection, also after it has ended: numbers are not used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub u64);

/// What a control connection runs over, and what the system says of its other end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// A Unix socket: the peer is on this host, and descriptors can be passed.
    Unix {
        /// The user that the peer's process runs as, by the kernel's word.
        user: u32,
        /// Whether this endpoint's process runs as the same.
        own: bool,
    },
    /// TCP.
    Tcp {
        /// The other end's address: the one that was dialled, or the one that a connection was accepted from.
        peer: SocketAddr,
    },
}

impl Transport {
    /// Whether it is a Unix socket.
    #[must_use]
    pub const fn is_unix(self) -> bool {
        matches!(self, Self::Unix { .. })
    }

    /// Whether its other end is a process of the user that this endpoint runs as. Such a process can do whatever it likes
    /// to this one by other means, so it is believed when it says which endpoint it is.
    pub(super) const fn is_own_user(self) -> bool {
        matches!(self, Self::Unix { own: true, .. })
    }
}

/// Whom is counted for what a link's peer holds here (I7).
///
/// An endpoint for itself where it can be believed who it is: with a secret, or over a Unix socket of this user. Otherwise
/// everything at one address, or of one user, since who connects twice can say two names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Account {
    /// One endpoint, by its incarnation.
    Endpoint([u8; 16]),
    /// All processes of another user of this host.
    User(u32),
    /// All that comes from this address; of IPv6, from its network of 64 bits, which one machine may have for itself.
    Address(IpAddr),
}

impl Account {
    pub(super) fn at(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V6(ip) if !ip.is_loopback() => {
                let [a, b, c, d, ..] = ip.segments();
                Self::Address(IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0)))
            }
            ip => Self::Address(ip),
        }
    }
}

/// How many times as much as one peer may be held for one account of peers that are not known one from another: so that one
/// of them alone, clumsy or not, does not keep the others out, and one that connects a thousand times does not hold a
/// thousand times as much.
const TOGETHER: usize = 4;

impl Account {
    /// What may be held for it where one peer may hold `most`.
    pub(super) const fn most(self, most: usize) -> usize {
        match self {
            Self::Endpoint(_) => most,
            Self::User(_) | Self::Address(_) => most.saturating_mul(TOGETHER),
        }
    }
}

/// What is held here for one [`Account`].
#[derive(Debug, Default)]
pub(super) struct Holding {
    /// Leases that have not ended, fences awaited included.
    pub(super) leases: usize,
    /// Gets without an answer.
    pub(super) waiting: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Dialing,
    Handshaking,
    Upgrading,
    Agreeing,
    Open,
    Broken,
}

/// Who the other end says it is.
#[derive(Debug, Clone)]
pub(super) struct Peer {
    pub(super) boot: [u8; 16],
    pub(super) incarnation: [u8; 16],
    pub(super) process: [u8; 16],
    pub(super) unix_name: Vec<u8>,
}

/// Where a link leads, as its dialer was asked.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) addresses: Vec<Address>,
    pub(super) unix: Option<Vec<u8>>,
    pub(super) incarnation: Option<[u8; 16]>,
}

impl Target {
    /// The name under which links to it are found again.
    pub(super) fn key(&self) -> String {
        match (&self.incarnation, self.addresses.first(), &self.unix) {
            (Some(incarnation), ..) => format!("#{:032x}", u128::from_be_bytes(*incarnation)),
            (None, Some(address), _) => address.to_string(),
            (None, None, Some(name)) => format!("unix:{}", String::from_utf8_lossy(name)),
            (None, None, None) => String::new(),
        }
    }

    pub(super) fn describe(&self) -> String {
        let mut names: Vec<String> = self.addresses.iter().map(ToString::to_string).collect();
        names.extend(self.unix.as_ref().map(|name| format!("unix:{}", String::from_utf8_lossy(name))));
        names.join(", ")
    }
}

pub(super) struct Link {
    pub(super) session: Session,
    pub(super) role: Role,
    pub(super) state: State,
    pub(super) transport: Option<Transport>,
    pub(super) target: Target,
    pub(super) peer: Option<Peer>,
    /// Once the peer is known.
    pub(super) account: Option<Account>,
    pub(super) handshake: Option<TimerId>,
    pub(super) flush_queued: bool,
    /// Whether frames of the peer are left unread until it has taken some of ours.
    pub(super) held_back: bool,
    /// Whether something is left unsaid until the peer has taken more of what was said.
    pub(super) put_off: bool,
    pub(super) upgrade_of: Option<LinkId>,
    pub(super) upgrade_tried: bool,
    pub(super) candidates: VecDeque<usize>,
    pub(super) offered: u32,
    pub(super) rail: Option<usize>,
    pub(super) queue_pair: Option<QueuePair>,
    /// Whether the queue pair has ever been connected in both directions.
    pub(super) proven: bool,
    pub(super) path: Path,
    pub(super) reason: String,
    pub(super) fell_back: bool,

    /// Consumer's side: gets that want this link, and requests that await an answer.
    pub(super) gets: BTreeSet<OperationId>,
    pub(super) requests: BTreeMap<u64, OperationId>,
    pub(super) held: BTreeMap<u64, Tick>,
    pub(super) closes: Vec<CloseEntry>,
    /// Grants of the peer that nobody waits for.
    pub(super) unasked: Vec<CloseEntry>,
    pub(super) closes_timer: Option<TimerId>,
    pub(super) keep_alive_timer: Option<TimerId>,
    /// Keep-alives sent since anything was heard of the peer.
    pub(super) unanswered: u32,
    /// What we said about leases, until the peer has answered a later keep-alive: it is said again over the next link if
    /// this one ends before (I11).
    pub(super) unconfirmed: Orphans,
    pub(super) confirming: VecDeque<(Tick, Orphans)>,
    /// Work requests and bytes in flight on the queue pair.
    pub(super) outstanding: u32,
    pub(super) in_flight: u64,
    /// Fetches with chunks still to be posted, in turn.
    pub(super) turn: VecDeque<u64>,

    /// Producer's side: the newest stamp of the peer's clock, waiting gets, leases granted.
    pub(super) newest_stamp: u64,
    pub(super) waiting: BTreeMap<u64, WaitingGet>,
    pub(super) granted: BTreeSet<u64>,
    /// The leases that the peer's last frame named, if that was a keep-alive: before a goodbye, all that it holds.
    pub(super) kept_last: Option<Vec<u64>>,
    pub(super) watched: bool,
}

impl Link {
    pub(super) fn new(
        session: Session,
        role: Role,
        state: State,
        transport: Option<Transport>,
        target: Target,
    ) -> Self {
        Self {
            session,
            role,
            state,
            transport,
            target,
            peer: None,
            account: None,
            handshake: None,
            flush_queued: false,
            held_back: false,
            put_off: false,
            upgrade_of: None,
            upgrade_tried: false,
            candidates: VecDeque::new(),
            offered: 0,
            rail: None,
            queue_pair: None,
            proven: false,
            path: Path::Tcp,
            reason: String::new(),
            fell_back: false,
            gets: BTreeSet::new(),
            requests: BTreeMap::new(),
            held: BTreeMap::new(),
            closes: Vec::new(),
            unasked: Vec::new(),
            closes_timer: None,
            keep_alive_timer: None,
            unanswered: 0,
            unconfirmed: Orphans::default(),
            confirming: VecDeque::new(),
            outstanding: 0,
            in_flight: 0,
            turn: VecDeque::new(),
            newest_stamp: 0,
            waiting: BTreeMap::new(),
            granted: BTreeSet::new(),
            kept_last: None,
            watched: false,
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.state == State::Open
    }

    pub(super) fn incarnation(&self) -> Option<[u8; 16]> {
        self.peer.as_ref().map(|peer| peer.incarnation)
    }

    pub(super) fn note(&mut self, text: &str) {
        if !self.reason.is_empty() {
            self.reason.push_str("; ");
        }
        self.reason.push_str(text);
    }
}

/// The number of a rail on the wire.
pub(super) const fn provider_code(path: Path) -> u8 {
    match path {
        Path::Direct | Path::Shm => 1,
        Path::Rdma => 2,
        Path::Tcp => 3,
    }
}
