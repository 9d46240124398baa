//! Links: one control connection with its session and queue pair, from dialling to its end.
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

use super::consume::Failure;
use super::timers::TimerId;
use super::{Action, Engine, OperationId, Tick, Timer};
use crate::error::Gone;
use crate::{ErrorKind, Path, Paths};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use towline_control::address::Address;
use towline_control::preface::{Preface, PrefaceError};
use towline_control::session::{Event, Limits as SessionLimits, Role, Session, SessionConfig, SessionError};
use towline_control::wire::{
    self, AddressList, CloseEntry, Frame, Goodbye, GoodbyeCode, KeepAlive, LeaseId, QueuePairCode, QueuePairRefuse,
    RejectCode,
};
use towline_verbs::{QueuePair, QueuePairCapacity, QueuePairState};

/// One control connection, also after it has ended: numbers are not used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub u64);

/// What a control connection runs over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// A Unix socket: the peer is on this host, and descriptors can be passed.
    Unix,
    /// TCP.
    Tcp,
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

/// Leases of a peer to which no link is open at the moment.
#[derive(Debug, Default)]
pub(super) struct Orphans {
    pub(super) closes: Vec<CloseEntry>,
    /// Requests whose grants, if there were any, nobody here will use.
    pub(super) cancels: Vec<u64>,
}

impl Orphans {
    fn is_empty(&self) -> bool {
        self.closes.is_empty() && self.cancels.is_empty()
    }
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
    handshake: Option<TimerId>,
    flush_queued: bool,
    /// Whether frames of the peer are left unread until it has taken some of ours.
    held_back: bool,
    upgrade_of: Option<LinkId>,
    upgrade_tried: bool,
    candidates: VecDeque<usize>,
    offered: u32,
    pub(super) rail: Option<usize>,
    pub(super) queue_pair: Option<QueuePair>,
    /// Whether the queue pair has ever been connected in both directions.
    proven: bool,
    pub(super) path: Path,
    pub(super) reason: String,
    pub(super) fell_back: bool,

    /// Consumer's side: gets that want this link, and requests that await an answer.
    pub(super) gets: BTreeSet<OperationId>,
    pub(super) requests: BTreeMap<u64, OperationId>,
    pub(super) held: BTreeMap<u64, Tick>,
    pub(super) closes: Vec<CloseEntry>,
    closes_timer: Option<TimerId>,
    keep_alive_timer: Option<TimerId>,
    /// Keep-alives sent since anything was heard of the peer.
    unanswered: u32,
    /// What we said about mapped leases, until the peer has answered a later keep-alive: it is said again over the next
    /// link if this one ends before (I11).
    unconfirmed: Orphans,
    confirming: VecDeque<(Tick, Orphans)>,
    /// Work requests and bytes in flight on the queue pair.
    pub(super) outstanding: u32,
    pub(super) in_flight: u64,
    /// Fetches with chunks still to be posted, in turn.
    pub(super) turn: VecDeque<u64>,

    /// Producer's side: the newest stamp of the peer's clock, waiting gets, leases granted.
    pub(super) newest_stamp: u64,
    pub(super) waiting: BTreeMap<u64, super::produce::WaitingGet>,
    pub(super) granted: BTreeSet<u64>,
    /// The leases that the peer's last frame named, if that was a keep-alive: before a goodbye, all that it holds.
    kept_last: Option<Vec<u64>>,
    watched: bool,
}

impl Link {
    fn new(session: Session, role: Role, state: State, transport: Option<Transport>, target: Target) -> Self {
        Self {
            session,
            role,
            state,
            transport,
            target,
            peer: None,
            handshake: None,
            flush_queued: false,
            held_back: false,
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

    fn note(&mut self, text: &str) {
        if !self.reason.is_empty() {
            self.reason.push_str("; ");
        }
        self.reason.push_str(text);
    }
}

/// A frame of the peer, owned.
#[derive(Debug)]
pub(super) enum Incoming {
    Established(Peer),
    QueuePairOpen { connection: u32, provider: u8, address: Vec<u8> },
    QueuePairAccept { connection: u32, address: Vec<u8> },
    QueuePairRefuse { connection: u32, text: String },
    Get(super::produce::WaitingGet),
    Grant(super::consume::GrantReceived),
    Refuse { request: u64, code: towline_control::wire::RefuseCode, need: u64, have: u64, text: String },
    Cancel { request: u64 },
    Close(Vec<CloseEntry>),
    Watermark { lease: u64, watermark: u64 },
    KeepAlive { stamp: u64, leases: Vec<u64> },
    KeepAliveAck { echo: u64, lease: Tick, unknown: Vec<u64> },
    Goodbye(GoodbyeCode),
}

/// Largest control frame: the layout and segments of a payload of as many parts as are allowed fit.
const MAX_FRAME: u32 = 1 << 20;

/// How long the last words of a peer whose queue pair failed are waited for.
const LAST_WORDS: Tick = 30_000_000;

/// The number of a rail on the wire.
pub(super) const fn provider_code(path: Path) -> u8 {
    match path {
        Path::Direct | Path::Shm => 1,
        Path::Rdma => 2,
        Path::Tcp => 3,
    }
}

/// Driver's side: connections.
impl Engine {
    /// A connection was accepted, and its preface says that it is for control.
    ///
    /// # Errors
    /// Nothing is kept when the limit of links is reached or the endpoint is closing: drop the connection.
    pub fn accepted(&mut self, now: Tick, transport: Transport, preface: Preface) -> crate::Result<LinkId> {
        self.advance(now);
        self.check_open("accept")?;
        if self.links.len() >= self.config.limits.links {
            // Whoever has not even said who he is makes way, the oldest first (I7).
            let silent = |link: &Link| link.role == Role::Responder && link.state == State::Handshaking;
            if let Some(oldest) = self.links.iter().find(|(_, link)| silent(link)).map(|(oldest, _)| *oldest) {
                self.fail_link(oldest, &Failure::Lost("it made way for another".to_owned()));
            }
        }
        if self.links.len() >= self.config.limits.links {
            return Err(crate::Error::new(
                "accept",
                ErrorKind::Busy { what: "links", limit: self.config.limits.links as u64 },
            ));
        }
        let config = self.session_config().map_err(|kind| crate::Error::new("accept", kind))?;
        let session = Session::responder(config, &preface)
            .map_err(|error| crate::Error::new("accept", ErrorKind::Protocol { what: error.to_string() }))?;
        let mut link = Link::new(session, Role::Responder, State::Handshaking, Some(transport), Target::default());
        let id = self.new_link_id();
        link.handshake = Some(self.timers.set(self.now + self.config.times.handshake, Timer::Handshake(id)));
        self.links.insert(id, link);
        self.flush(id);
        self.process_input(id);
        Ok(id)
    }

    /// The connection that [`Action::Dial`] asked for is there.
    pub fn connected(&mut self, now: Tick, id: LinkId, transport: Transport) {
        self.advance(now);
        let at = self.now + self.config.times.handshake;
        let Some(link) = self.links.get_mut(&id) else {
            self.actions.push_back(Action::Close(id));
            return;
        };
        link.state = State::Handshaking;
        link.transport = Some(transport);
        self.timers.cancel(link.handshake.take());
        link.handshake = Some(self.timers.set(at, Timer::Handshake(id)));
        self.flush(id);
    }

    /// The connection that [`Action::Dial`] asked for can't be had: the system's last error number, and what was tried.
    pub fn connect_failed(&mut self, now: Tick, id: LinkId, errno: i32, tried: String) {
        self.advance(now);
        let Some(link) = self.links.get(&id) else { return };
        let address = link.target.describe();
        self.fail_link(id, &Failure::Unreachable(ErrorKind::PeerUnreachable { address, errno, tried }));
    }

    /// The Unix name of a [`Action::Dial`] does not answer, and its addresses are tried.
    pub fn unix_failed(&mut self, id: LinkId, why: &str) {
        if let Some(link) = self.links.get_mut(&id) {
            link.note(&format!("not shm: the peer's Unix socket does not answer ({why})"));
            link.upgrade_tried = true;
            link.fell_back = true;
        }
    }

    /// What to send to a connection whose preface can't be accepted, before it is closed: an answer that says which
    /// versions are spoken here, or nothing for what is not a peer.
    #[must_use]
    pub fn answer_preface(&self, error: &PrefaceError) -> Option<Vec<u8>> {
        let PrefaceError::Version { .. } = error else { return None };
        let mut answer = Vec::new();
        let reject = wire::Reject { code: RejectCode::Version, versions: wire::Versions::SUPPORTED, text: "" };
        Frame::Reject(reject).encode(&mut answer).ok()?;
        Some(answer)
    }

    /// Room for at least `room` bytes from the link's connection; `None` when nothing is to be read from it now:
    /// it is gone, or its peer takes nothing off our hands.
    pub fn input(&mut self, id: LinkId, room: usize) -> Option<&mut [u8]> {
        let backlog = self.config.limits.backlog;
        let link = self.links.get_mut(&id)?;
        (link.session.backlog() < backlog / 2).then(|| link.session.input_buffer(room))
    }

    /// `len` bytes were put into what [`input`](Self::input) gave.
    pub fn received(&mut self, now: Tick, id: LinkId, len: usize) {
        self.advance(now);
        if let Some(link) = self.links.get_mut(&id) {
            link.session.filled(len);
            self.process_input(id);
        }
    }

    /// What is to be sent on the link.
    #[must_use]
    pub fn output(&self, id: LinkId) -> &[u8] {
        self.links.get(&id).map_or(&[], |link| link.session.output())
    }

    /// The first `len` bytes of [`output`](Self::output) were sent.
    pub fn sent(&mut self, id: LinkId, len: usize) {
        let Some(link) = self.links.get_mut(&id) else { return };
        link.session.consume_output(len);
        if link.held_back && link.session.backlog() < self.config.limits.backlog / 4 {
            self.process_input(id);
        }
    }

    /// The connection ended: `why` in words (`closed by the peer`, an error of the system).
    pub fn disconnected(&mut self, now: Tick, id: LinkId, why: &str) {
        self.advance(now);
        self.fail_link(id, &Failure::Lost(why.to_owned()));
    }

    /// The process at the other end of a Unix link has ended (also after the link did): a fence for whatever it mapped.
    pub fn process_ended(&mut self, now: Tick, id: LinkId) {
        self.advance(now);
        // Nothing more may be granted to it, also if its connection has not broken yet.
        self.fail_link(id, &Failure::Lost("its process has ended".to_owned()));
        self.fence_by_process(id);
    }

    /// Marks that the link's flush action was taken, so that the next frame asks for another.
    pub fn flushing(&mut self, id: LinkId) {
        if let Some(link) = self.links.get_mut(&id) {
            link.flush_queued = false;
        }
    }
}

/// From dialling to open.
impl Engine {
    fn new_link_id(&mut self) -> LinkId {
        let id = LinkId(self.next_link);
        self.next_link += 1;
        id
    }

    fn session_config(&self) -> Result<SessionConfig, ErrorKind> {
        let identity = &self.config.identity;
        let advertised = AddressList::from_addresses(&identity.advertised)
            .map_err(|error| ErrorKind::BadOption { option: "advertise", why: error.to_string() })?;
        let mut config = SessionConfig::new(towline_control::session::Identity {
            incarnation: identity.incarnation,
            boot_id: identity.boot,
            process: identity.process,
            unix_name: identity.unix_name.clone(),
            advertised,
            features: 0,
        });
        config.secret.clone_from(&self.config.secret);
        config.limits = SessionLimits { max_frame: MAX_FRAME, max_backlog: self.config.limits.backlog };
        Ok(config)
    }

    /// A link to `target`: one that is there, or a new one.
    pub(super) fn link_to(&mut self, target: &Target) -> Result<LinkId, ErrorKind> {
        let known = match target.incarnation {
            Some(incarnation) => self.by_incarnation.get(&incarnation),
            None => None,
        };
        if let Some(id) = known.or_else(|| self.by_address.get(&target.key())) {
            return Ok(*id);
        }
        self.dial(target.clone(), None)
    }

    fn dial(&mut self, target: Target, upgrade_of: Option<LinkId>) -> Result<LinkId, ErrorKind> {
        if self.links.len() >= self.config.limits.links {
            return Err(ErrorKind::Busy { what: "links", limit: self.config.limits.links as u64 });
        }
        let id = self.new_link_id();
        let session = Session::initiator(self.session_config()?)
            .map_err(|error| ErrorKind::Protocol { what: error.to_string() })?;
        let mut link = Link::new(session, Role::Initiator, State::Dialing, None, target.clone());
        link.upgrade_of = upgrade_of;
        link.handshake = Some(self.timers.set(self.now + self.config.times.handshake, Timer::Handshake(id)));
        self.links.insert(id, link);
        if upgrade_of.is_none() {
            self.by_address.insert(target.key(), id);
        }
        self.actions.push_back(Action::Dial { link: id, unix: target.unix, addresses: target.addresses });
        Ok(id)
    }

    pub(super) fn handshake_deadline(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(&id) else { return };
        link.handshake = None;
        if link.is_open() {
            return;
        }
        let (waiting_for, address) = match link.state {
            State::Dialing => ("a connection", link.target.describe()),
            State::Handshaking => ("the peer's hello", link.target.describe()),
            _ => ("an agreement on a path", link.target.describe()),
        };
        let tried = format!("no answer in time: waited for {waiting_for}");
        self.fail_link(
            id,
            &Failure::Unreachable(ErrorKind::PeerUnreachable { address, errno: libc::ETIMEDOUT, tried }),
        );
    }

    fn process_input(&mut self, id: LinkId) {
        let most = self.config.limits.backlog / 2;
        loop {
            let Some(link) = self.links.get_mut(&id) else { return };
            // Answers can be larger than what asks for them: one who takes nothing off our hands is asked to wait.
            link.held_back = link.session.backlog() >= most;
            if link.held_back {
                break;
            }
            match link.session.next_event() {
                Ok(None) => break,
                Ok(Some(event)) => match own(event) {
                    Some(incoming) => {
                        link.unanswered = 0;
                        self.handle(id, incoming);
                    }
                    None => {
                        self.fail_link(id, &Failure::Protocol("a frame that has no place here".to_owned()));
                        return;
                    }
                },
                Err(error) => {
                    let failure = session_failure(&error);
                    self.flush(id); // the session may have left a reject for the peer
                    self.fail_link(id, &failure);
                    return;
                }
            }
        }
        if self.links.get(&id).is_some_and(|link| !link.session.output().is_empty()) {
            self.flush(id);
        }
    }

    fn handle(&mut self, id: LinkId, incoming: Incoming) {
        let kept = self.links.get_mut(&id).and_then(|link| link.kept_last.take());
        match incoming {
            Incoming::Established(peer) => self.established(id, peer),
            Incoming::QueuePairOpen { connection, provider, address } => {
                self.queue_pair_offered(id, connection, provider, &address)
            }
            Incoming::QueuePairAccept { connection, address } => self.queue_pair_accepted(id, connection, &address),
            Incoming::QueuePairRefuse { connection, text } => self.queue_pair_refused(id, connection, &text),
            Incoming::Get(get) => self.get_received(id, get),
            Incoming::Grant(grant) => self.grant_received(id, grant),
            Incoming::Refuse { request, code, need, have, text } => self.refused(id, request, code, need, have, text),
            Incoming::Cancel { request } => self.get_cancelled(id, request),
            Incoming::Close(entries) => self.closes_received(id, &entries),
            Incoming::Watermark { lease, watermark } => self.watermark_received(id, lease, watermark),
            Incoming::KeepAlive { stamp, leases } => {
                self.keep_alive_received(id, stamp, &leases);
                if let Some(link) = self.links.get_mut(&id) {
                    link.kept_last = Some(leases);
                }
            }
            Incoming::KeepAliveAck { echo, lease, unknown } => self.kept_alive(id, echo, lease, &unknown),
            Incoming::Goodbye(code) => {
                if let Some(kept) = kept {
                    self.end_grants_but(id, &kept);
                }
                self.fail_link(id, &Failure::Lost(format!("the peer left: {code}")));
            }
        }
    }

    fn established(&mut self, id: LinkId, peer: Peer) {
        let own = &self.config.identity;
        let same_host = peer.boot == own.boot;
        let has_shm = self.rails.iter().any(|rail| provider_code(rail.path) == 1);
        let wants_shm = has_shm && self.shm_path(&peer).is_some_and(|path| self.config.paths.allow(path));
        let Some(link) = self.links.get_mut(&id) else { return };
        let incarnation = peer.incarnation;
        let unix_name = peer.unix_name.clone();
        link.peer = Some(peer);
        if link.role == Role::Responder {
            link.state = State::Agreeing;
            self.by_incarnation.entry(incarnation).or_insert(id);
            return;
        }
        if link.target.incarnation.is_some_and(|expected| expected != incarnation) {
            self.fail_link(id, &Failure::Final(ErrorKind::Gone(Gone::OtherIncarnation)));
            return;
        }
        if self.closing {
            // It was dialled for this alone, by a view that outlived the close of its endpoint.
            self.say_again(id, incarnation);
            self.send_closes(id);
            self.fail_link(id, &Failure::Closing);
            return;
        }
        if let Some(older) = link.upgrade_of.take() {
            self.replace_link(older, id);
        } else if let Some(&other) = self.by_incarnation.get(&incarnation)
            && other != id
            && self.links.get(&other).is_some_and(Link::is_open)
        {
            // Known already under another address, or because it dialled us: one link is enough.
            self.replace_link(id, other);
            return;
        }
        let Some(link) = self.links.get_mut(&id) else { return };
        if link.transport == Some(Transport::Tcp)
            && same_host
            && wants_shm
            && !link.upgrade_tried
            && !unix_name.is_empty()
        {
            link.upgrade_tried = true;
            let target = Target { addresses: Vec::new(), unix: Some(unix_name), incarnation: Some(incarnation) };
            if self.dial(target, Some(id)).is_ok() {
                if let Some(link) = self.links.get_mut(&id) {
                    link.state = State::Upgrading;
                }
                return;
            }
        }
        self.agree(id);
    }

    /// Gets of link `from` continue on link `to`, which leads to the same endpoint.
    fn replace_link(&mut self, from: LinkId, to: LinkId) {
        let Some(older) = self.links.get_mut(&from) else { return };
        let gets = std::mem::take(&mut older.gets);
        let key = older.target.key();
        let incarnation = older.incarnation();
        self.by_address.insert(key, to);
        if let Some(incarnation) = incarnation {
            self.by_incarnation.insert(incarnation, to);
        }
        for get in &gets {
            self.move_get(*get, to);
        }
        if let Some(link) = self.links.get_mut(&to) {
            link.gets.extend(gets);
        }
        self.fail_link(from, &Failure::Lost("another link to the same endpoint took its place".to_owned()));
        if self.links.get(&to).is_some_and(Link::is_open) {
            self.send_requests(to);
        }
    }

    /// Which of the paths over shared memory leads to `peer`, if it is on this host.
    fn shm_path(&self, peer: &Peer) -> Option<Path> {
        let own = &self.config.identity;
        (peer.boot == own.boot).then_some(if peer.process == own.process { Path::Direct } else { Path::Shm })
    }

    /// The path that `rail` would be to the peer of `link`, or why there is none.
    fn path_over(&self, rail: usize, link: &Link) -> Result<Path, String> {
        let Some(peer) = &link.peer else { return Err("the peer is not known yet".to_owned()) };
        let path = match self.rails[rail].path {
            Path::Direct | Path::Shm => {
                let path = self.shm_path(peer).ok_or("not shm: the peer is on another host")?;
                if !self.config.paths.allow(path) {
                    return Err(format!("not {path}: not allowed here"));
                }
                if link.transport != Some(Transport::Unix) {
                    return Err(format!("not {path}: no Unix socket reaches the peer (another network namespace?)"));
                }
                return Ok(path);
            }
            path => path,
        };
        if self.config.paths.allow(path) { Ok(path) } else { Err(format!("not {path}: not allowed here")) }
    }

    /// Works out the candidates and offers the first.
    fn agree(&mut self, id: LinkId) {
        let Some(link) = self.links.get(&id) else { return };
        let mut candidates = VecDeque::new();
        let mut notes = Vec::new();
        for rail in 0..self.rails.len() {
            match self.path_over(rail, link) {
                Ok(_) => candidates.push_back(rail),
                Err(note) => notes.push(note),
            }
        }
        let Some(link) = self.links.get_mut(&id) else { return };
        link.state = State::Agreeing;
        link.candidates = candidates;
        for note in notes {
            link.note(&note);
        }
        self.offer_next(id);
    }

    fn offer_next(&mut self, id: LinkId) {
        loop {
            let had_one = self.leave_queue_pair(id);
            let Some(link) = self.links.get_mut(&id) else { return };
            link.fell_back |= had_one;
            let Some(rail) = link.candidates.pop_front() else {
                let kind =
                    ErrorKind::PathNotAllowed { allowed: self.config.paths.to_string(), why: link.reason.clone() };
                self.fail_link(id, &Failure::Final(kind));
                return;
            };
            match self.create_queue_pair(rail) {
                Ok(queue_pair) => {
                    let address = queue_pair.address();
                    let provider = provider_code(self.rails[rail].path);
                    let Some(link) = self.links.get_mut(&id) else { return };
                    link.offered += 1;
                    link.state = State::Agreeing;
                    link.proven = false;
                    link.rail = Some(rail);
                    link.queue_pair = Some(queue_pair);
                    let connection = link.offered;
                    self.send(
                        id,
                        &Frame::QueuePairOpen(wire::QueuePair {
                            connection,
                            provider,
                            generation: connection,
                            address: &address,
                        }),
                    );
                    return;
                }
                Err(error) => {
                    let text = format!("not {}: {error}", self.rails[rail].path);
                    if let Some(link) = self.links.get_mut(&id) {
                        link.note(&text);
                    }
                }
            }
        }
    }

    /// Breaks the link's queue pair, if it has one: another takes its place.
    fn leave_queue_pair(&mut self, id: LinkId) -> bool {
        let Some(link) = self.links.get_mut(&id) else { return false };
        let Some(queue_pair) = link.queue_pair.take() else { return false };
        queue_pair.to_error();
        if let Some(rail) = link.rail {
            // Its flush completions find no link any more, only their fetches, and are not counted at the next one.
            self.queue_pairs.remove(&(rail, queue_pair.number()));
        }
        (link.outstanding, link.in_flight) = (0, 0);
        true
    }

    fn create_queue_pair(&self, rail: usize) -> towline_verbs::Result<QueuePair> {
        let rail = &self.rails[rail];
        let most = rail.device.info().capabilities.max_send_wr;
        let capacity = QueuePairCapacity { max_send_wr: self.config.limits.send_queue.min(most), max_recv_wr: 1 };
        rail.pd.create_qp(&rail.cq, &rail.cq, capacity)
    }

    fn queue_pair_offered(&mut self, id: LinkId, connection: u32, provider: u8, address: &[u8]) {
        let Some(link) = self.links.get(&id) else { return };
        if link.role != Role::Responder || connection <= link.offered {
            return; // a late or repeated offer (I11)
        }
        let rail = self.rails.iter().position(|rail| provider_code(rail.path) == provider);
        let verdict = match rail {
            None => Err((QueuePairCode::NoProvider, "the peer does not have this path".to_owned())),
            Some(rail) => match self.path_over(rail, link) {
                Err(note) => Err((QueuePairCode::NotAllowed, note)),
                Ok(path) => self
                    .create_queue_pair(rail)
                    .and_then(|queue_pair| queue_pair.connect(address, false).map(|()| (rail, path, queue_pair)))
                    .map_err(|error| (QueuePairCode::Failed, error.to_string())),
            },
        };
        self.leave_queue_pair(id);
        let Some(link) = self.links.get_mut(&id) else { return };
        link.offered = connection;
        link.proven = false;
        match verdict {
            Ok((rail, path, queue_pair)) => {
                let address = queue_pair.address();
                link.rail = Some(rail);
                link.queue_pair = Some(queue_pair);
                link.path = path;
                link.reason = "chosen by the peer, who connected".to_owned();
                self.send(
                    id,
                    &Frame::QueuePairAccept(wire::QueuePair {
                        connection,
                        provider,
                        generation: connection,
                        address: &address,
                    }),
                );
                self.opened(id);
            }
            Err((code, text)) => {
                link.state = State::Agreeing;
                self.send(
                    id,
                    &Frame::QueuePairRefuse(QueuePairRefuse {
                        connection,
                        provider,
                        generation: connection,
                        code,
                        text: clip(&text),
                    }),
                );
            }
        }
    }

    fn queue_pair_accepted(&mut self, id: LinkId, connection: u32, address: &[u8]) {
        let Some(link) = self.links.get(&id) else { return };
        if link.state != State::Agreeing || link.role != Role::Initiator || link.offered != connection {
            return; // an answer to an older offer (I11)
        }
        let Some(rail) = link.rail else { return };
        let path = self.path_over(rail, link);
        let same_host = link.peer.as_ref().is_some_and(|peer| peer.boot == self.config.identity.boot);
        let has_shm = self.rails.iter().any(|rail| provider_code(rail.path) == 1);
        let Some(link) = self.links.get_mut(&id) else { return };
        let Some(queue_pair) = &link.queue_pair else { return };
        match (queue_pair.connect(address, true), path) {
            (Ok(()), Ok(path)) => {
                link.path = path;
                let why = match path {
                    Path::Direct => "both endpoints are in one process",
                    Path::Shm => "same host: the boot ids agree and a Unix socket reaches the peer",
                    Path::Rdma => "RDMA devices at both ends",
                    Path::Tcp if !same_host => "the peer is on another host, and no RDMA device is in use",
                    Path::Tcp if !has_shm => "same host, but shared memory is not allowed here",
                    Path::Tcp => "same host, without shared memory",
                };
                link.reason = if link.reason.is_empty() { why.to_owned() } else { format!("{why}; {}", link.reason) };
                self.opened(id);
            }
            (Err(error), _) => {
                let text = format!("not {}: {error}", self.rails[rail].path);
                link.note(&text);
                self.offer_next(id);
            }
            (_, Err(note)) => {
                link.note(&note);
                self.offer_next(id);
            }
        }
    }

    fn queue_pair_refused(&mut self, id: LinkId, connection: u32, text: &str) {
        let Some(link) = self.links.get_mut(&id) else { return };
        if link.state != State::Agreeing || link.role != Role::Initiator || link.offered != connection {
            return;
        }
        link.note(&format!("the peer refused: {text}"));
        link.queue_pair = None;
        self.offer_next(id);
    }

    fn opened(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(&id) else { return };
        link.state = State::Open;
        self.timers.cancel(link.handshake.take());
        if let (Some(rail), Some(queue_pair)) = (link.rail, &link.queue_pair) {
            self.queue_pairs.insert((rail, queue_pair.number()), id);
        }
        if link.transport == Some(Transport::Unix) && !link.watched {
            link.watched = true;
            self.actions.push_back(Action::WatchProcess(id));
        }
        let Some(incarnation) = link.incarnation() else { return };
        self.by_incarnation.insert(incarnation, id);
        self.say_again(id, incarnation);
        self.send_requests(id);
        self.serve_link(id);
    }

    /// Whether a closed endpoint has still to tell somebody that views of his memory are gone.
    pub(crate) fn has_last_words(&self) -> bool {
        self.closing && !self.links.is_empty()
    }

    /// Says what an earlier link to the same endpoint may not have brought there.
    fn say_again(&mut self, id: LinkId, incarnation: [u8; 16]) {
        let Some(orphans) = self.orphans.remove(&incarnation) else { return };
        for entry in orphans.closes {
            self.close_lease_on(id, entry);
        }
        for request in orphans.cancels {
            self.cancel_on(id, request);
        }
    }

    /// Finds queue pairs that failed by themselves: the next candidate if it never worked, a new link otherwise.
    pub(super) fn check_queue_pairs(&mut self) {
        let mut failed = Vec::new();
        for (id, link) in &mut self.links {
            let Some(queue_pair) = &link.queue_pair else { continue };
            if !link.is_open() {
                continue;
            }
            match queue_pair.state() {
                QueuePairState::ReadyToSend => link.proven = true,
                QueuePairState::Error => failed.push(*id),
                QueuePairState::Reset | QueuePairState::Connecting => {}
            }
        }
        for id in failed {
            let Some(link) = self.links.get_mut(&id) else { continue };
            let why = link
                .queue_pair
                .as_ref()
                .and_then(QueuePair::failure)
                .map_or("closed by the peer".to_owned(), |e| e.to_string());
            let why = format!("the {} queue pair failed: {why}", link.path);
            if link.role == Role::Initiator
                && !link.proven
                && !link.candidates.is_empty()
                && link.granted.is_empty()
                && link.held.is_empty()
            {
                link.note(&why);
                let gets: Vec<_> = link.gets.iter().copied().collect();
                for get in gets {
                    self.await_link(get);
                }
                self.offer_next(id);
            } else if link.role == Role::Responder && !link.proven {
                // The peer's dialer sees the same and offers another path or leaves.
                link.state = State::Agreeing;
                link.handshake = Some(self.timers.set(self.now + self.config.times.handshake, Timer::Handshake(id)));
            } else {
                // A peer that leaves takes its queue pair down and then says goodbye: leases that it closes with its last
                // words are worth waiting for.
                link.state = State::Broken;
                link.note(&why);
                self.timers.set(self.now + LAST_WORDS, Timer::Broken(id, why));
            }
        }
    }

    pub(super) fn broken_deadline(&mut self, id: LinkId, why: String) {
        self.fail_link(id, &Failure::Lost(why));
    }
}

/// Frames out, leases kept and closed, the end.
impl Engine {
    pub(super) fn flush(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(&id) else { return };
        let connected = !matches!(link.state, State::Dialing);
        if connected && !link.flush_queued {
            link.flush_queued = true;
            self.actions.push_back(Action::Flush(id));
        }
    }

    /// Sends a frame; a peer that takes nothing off our hands until the backlog is full is left (I9).
    pub(super) fn send(&mut self, id: LinkId, frame: &Frame<'_>) {
        let Some(link) = self.links.get_mut(&id) else { return };
        match link.session.send(frame) {
            Ok(()) => self.flush(id),
            // Not at once: frames are sent from the middle of everything, also from the end of another link.
            Err(error) if link.state != State::Broken => {
                link.state = State::Broken;
                self.timers.set(self.now, Timer::Broken(id, format!("a frame could not be sent: {error}")));
            }
            Err(_broken_already) => {}
        }
    }

    /// Reports a lease as closed, with the next frame or after a moment.
    pub(super) fn close_lease_on(&mut self, id: LinkId, entry: CloseEntry) {
        const BATCH: usize = 64;
        let at = self.now + self.config.times.close_batch;
        let Some(link) = self.links.get_mut(&id) else { return };
        link.held.remove(&entry.lease());
        link.closes.push(entry);
        if link.closes.len() >= BATCH {
            self.send_closes(id);
        } else if link.closes_timer.is_none() {
            link.closes_timer = Some(self.timers.set(at, Timer::Closes(id)));
        }
    }

    pub(super) fn send_closes(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(&id) else { return };
        self.timers.cancel(link.closes_timer.take());
        if !link.closes.is_empty() {
            let entries = std::mem::take(&mut link.closes);
            self.note_said(id, |said| said.closes.extend_from_slice(&entries));
            self.send(id, &Frame::Close(wire::Close { entries: &entries }));
            self.confirm_later(id);
        }
    }

    /// Tells the peer that no grant of `request` will be used.
    pub(super) fn cancel_on(&mut self, id: LinkId, request: u64) {
        self.note_said(id, |said| said.cancels.push(request));
        self.send(id, &Frame::Cancel(wire::Cancel { request }));
        self.confirm_later(id);
    }

    /// Notes what is being said where only our word ends a lease, until it is known to have arrived. Elsewhere the peer
    /// fences by itself what it exposed over a link that ends.
    fn note_said(&mut self, id: LinkId, note: impl FnOnce(&mut Orphans)) {
        let Some(link) = self.links.get_mut(&id) else { return };
        if link.rail.is_some_and(|rail| self.rails[rail].device.info().capabilities.mappable) {
            note(&mut link.unconfirmed);
        }
    }

    /// Has a keep-alive follow what was noted: its answer says that it arrived.
    fn confirm_later(&mut self, id: LinkId) {
        const MANY: usize = 1024;
        let Some(link) = self.links.get_mut(&id) else { return };
        if link.unconfirmed.closes.len() + link.unconfirmed.cancels.len() >= MANY {
            self.timers.cancel(link.keep_alive_timer.take());
            self.send_keep_alive(id);
        } else if !link.unconfirmed.is_empty() {
            self.start_keep_alive(id);
        }
    }

    /// Keeps leases and waiting gets of `id` alive from now on.
    pub(super) fn start_keep_alive(&mut self, id: LinkId) {
        let at = self.now + self.config.times.lease / 4;
        let Some(link) = self.links.get_mut(&id) else { return };
        if link.keep_alive_timer.is_none() {
            link.keep_alive_timer = Some(self.timers.set(at, Timer::KeepAlive(id)));
        }
    }

    pub(super) fn send_keep_alive(&mut self, id: LinkId) {
        /// Counted, not timed: a process that stood still itself has sent none meanwhile.
        const UNANSWERED: u32 = 2;
        let now = self.now;
        let Some(link) = self.links.get_mut(&id) else { return };
        link.keep_alive_timer = None;
        let idle = link.held.is_empty() && link.requests.is_empty();
        if idle && link.unconfirmed.is_empty() && link.confirming.is_empty() {
            return;
        }
        // Each keep-alive is answered: a peer that leaves several unanswered is not there any more, whatever TCP thinks.
        if link.unanswered >= UNANSWERED {
            let why = "keep-alives were not answered for half a lease";
            self.fail_link(id, &Failure::Lost(why.to_owned()));
            return;
        }
        link.unanswered += 1;
        if !link.unconfirmed.is_empty() {
            link.confirming.push_back((now, std::mem::take(&mut link.unconfirmed)));
        }
        let leases: Vec<LeaseId> = link.held.keys().map(|lease| LeaseId::new(*lease)).collect();
        self.send(id, &Frame::KeepAlive(KeepAlive { sent_at: now, leases: &leases }));
        self.start_keep_alive(id);
    }

    fn kept_alive(&mut self, id: LinkId, echo: u64, lease: Tick, unknown: &[u64]) {
        let margin = self.config.times.drift_margin;
        let Some(link) = self.links.get_mut(&id) else { return };
        // A stamp that we never sent would lengthen the lease beyond what the producer grants.
        if echo > self.now {
            return;
        }
        // Frames arrive in order: what was said before that keep-alive has arrived.
        while link.confirming.front().is_some_and(|(said, _)| *said <= echo) {
            link.confirming.pop_front();
        }
        let until = echo.saturating_add(lease.min(self.config.times.lease.saturating_mul(100))).saturating_sub(margin);
        for (held, deadline) in &mut link.held {
            if !unknown.contains(held) {
                *deadline = (*deadline).max(until);
            }
        }
    }

    /// Ends a link. Gets on it are tried again or fail, its grants wait for their fences.
    pub(super) fn fail_link(&mut self, id: LinkId, failure: &Failure) {
        let Some(mut link) = self.links.remove(&id) else { return };
        for timer in [link.handshake.take(), link.closes_timer.take(), link.keep_alive_timer.take()] {
            self.timers.cancel(timer);
        }
        self.by_address.retain(|_, other| *other != id);
        self.by_incarnation.retain(|_, other| *other != id);
        if let Some(queue_pair) = &link.queue_pair {
            queue_pair.to_error();
        }
        self.closing_output(id, &mut link, failure);
        self.actions.push_back(Action::Close(id));
        self.forget_waiting(id, std::mem::take(&mut link.waiting));
        let mappable = link.rail.is_some_and(|rail| self.rails[rail].device.info().capabilities.mappable);
        if let Some(incarnation) = link.incarnation() {
            let closes = std::mem::take(&mut link.closes);
            // A grant may be on its way to this link: what a mapping exposes stays exposed until we say that we do not
            // use it.
            let cancels: Vec<u64> = std::mem::take(&mut link.requests).into_keys().collect();
            let mut left = std::mem::take(&mut link.unconfirmed);
            left.closes.extend(closes);
            left.cancels.extend(cancels);
            for (_, said) in link.confirming.drain(..) {
                left.closes.extend(said.closes);
                left.cancels.extend(said.cancels);
            }
            // Elsewhere the producer's own fence ends the lease, and there is nothing to be said.
            if !left.is_empty() && mappable && self.has_room_for_orphans() && !matches!(failure, Failure::Closing) {
                let orphans = self.orphans.entry(incarnation).or_default();
                orphans.closes.extend(left.closes);
                orphans.cancels.extend(left.cancels);
            }
            let other = self.links.iter().find(|(_, link)| link.is_open() && link.incarnation() == Some(incarnation));
            if let Some(other) = other.map(|(other, _)| *other) {
                self.by_incarnation.entry(incarnation).or_insert(other);
                self.say_again(other, incarnation);
            }
        }
        self.fence_grants_of(&link);
        if link.watched && !self.has_grants(id) {
            self.actions.push_back(Action::UnwatchProcess(id));
        }
        if let Some(rail) = link.rail
            && let Some(queue_pair) = &link.queue_pair
        {
            // Flush completions of this queue pair find no link any more, only their fetches.
            self.queue_pairs.remove(&(rail, queue_pair.number()));
        }
        let refused =
            matches!(failure, Failure::Unreachable(ErrorKind::PeerUnreachable { errno: libc::ECONNREFUSED, .. }));
        if let (State::Dialing, Some(incarnation), []) =
            (link.state, link.target.incarnation, &link.target.addresses[..])
            && refused
        {
            // Its Unix name, which it alone had, is nobody's any more: that process has nothing mapped.
            self.orphans.remove(&incarnation);
        }
        if let Some(older) = link.upgrade_of {
            if let Some(older) = self.links.get_mut(&older) {
                older.note(&format!("not shm: {failure}"));
                older.fell_back = true;
            }
            self.agree(older);
        }
        let gets: Vec<OperationId> = link.gets.iter().copied().collect();
        for get in gets {
            self.link_failed_under(get, failure, link.state);
        }
    }

    /// What a link that ends still owes its peer goes out with its end: leases closed, a goodbye, a session's reject.
    fn closing_output(&mut self, id: LinkId, link: &mut Link, failure: &Failure) {
        if link.state == State::Dialing {
            return;
        }
        if matches!(link.state, State::Open | State::Broken) && !link.closes.is_empty() {
            // Nobody will answer this time: they are said once more over the next link.
            let _best_effort = link.session.send(&Frame::Close(wire::Close { entries: &link.closes }));
        }
        if matches!(failure, Failure::Closing) && link.is_open() {
            // Which leases live on, in views. Grants that are on their way reach nobody any more: without this list the
            // producer could not tell them from those in use, and would wait for a word that nobody can give.
            let leases: Vec<LeaseId> = link.held.keys().map(|lease| LeaseId::new(*lease)).collect();
            let _too_late = link.session.send(&Frame::KeepAlive(KeepAlive { sent_at: self.now, leases: &leases }));
        }
        let goodbye = match failure {
            Failure::Closing => Some(GoodbyeCode::Closing),
            Failure::Protocol(_) => Some(GoodbyeCode::Protocol),
            _ => None,
        };
        if let Some(code) = goodbye {
            let _not_established = link.session.send(&Frame::Goodbye(Goodbye { code }));
        }
        let output = link.session.output();
        if !output.is_empty() {
            self.actions.push_back(Action::Last { link: id, bytes: output.to_vec() });
        }
    }

    pub(super) fn close_all_links(&mut self) {
        let ids: Vec<LinkId> = self.links.keys().copied().collect();
        for id in ids {
            self.fail_link(id, &Failure::Closing);
        }
    }

    /// Which of the allowed paths are configured at all, for messages.
    #[must_use]
    pub fn paths(&self) -> Paths {
        self.config.paths
    }
}

fn clip(text: &str) -> &str {
    let mut end = text.len().min(200);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

fn session_failure(error: &SessionError) -> Failure {
    let supported = wire::Versions::SUPPORTED;
    let (code, theirs) = match error {
        SessionError::Rejected { code, versions, .. } => (*code, Some(*versions)),
        SessionError::Refused { code, versions } => (*code, *versions),
        SessionError::Wire(_) | SessionError::Unexpected { .. } => return Failure::Protocol(error.to_string()),
        other => return Failure::Lost(other.to_string()),
    };
    let refused_here = matches!(error, SessionError::Refused { .. });
    Failure::Final(match (code, theirs) {
        (RejectCode::WrongSecret, _) => ErrorKind::WrongSecret,
        (RejectCode::SecretRequired, _) if !refused_here => ErrorKind::SecretRequired,
        (RejectCode::SecretNotExpected, _) if !refused_here => ErrorKind::SecretNotExpected,
        (RejectCode::Version, Some(theirs)) => {
            ErrorKind::VersionMismatch { ours: (supported.min, supported.max), theirs: (theirs.min, theirs.max) }
        }
        _ => return Failure::Lost(error.to_string()),
    })
}

fn own(event: Event<'_>) -> Option<Incoming> {
    let frame = match event {
        Event::Established(hello) => {
            return Some(Incoming::Established(Peer {
                boot: hello.hello.boot_id,
                incarnation: hello.hello.incarnation,
                process: hello.hello.process,
                unix_name: hello.hello.unix_name.to_vec(),
            }));
        }
        Event::Frame(frame) => frame,
    };
    Some(match frame {
        Frame::QueuePairOpen(f) => {
            Incoming::QueuePairOpen { connection: f.connection, provider: f.provider, address: f.address.to_vec() }
        }
        Frame::QueuePairAccept(f) => {
            Incoming::QueuePairAccept { connection: f.connection, address: f.address.to_vec() }
        }
        Frame::QueuePairRefuse(f) => Incoming::QueuePairRefuse { connection: f.connection, text: f.text.to_owned() },
        Frame::Get(f) => Incoming::Get(super::produce::WaitingGet::from_frame(&f)),
        Frame::Grant(f) => Incoming::Grant(super::consume::GrantReceived::from_frame(&f)),
        Frame::Refuse(f) => {
            Incoming::Refuse { request: f.request, code: f.code, need: f.need, have: f.have, text: f.text.to_owned() }
        }
        Frame::Cancel(f) => Incoming::Cancel { request: f.request },
        Frame::Close(f) => Incoming::Close(f.entries.to_vec()),
        Frame::Watermark(f) => Incoming::Watermark { lease: f.lease, watermark: f.watermark },
        Frame::KeepAlive(f) => {
            Incoming::KeepAlive { stamp: f.sent_at, leases: f.leases.iter().map(|l| l.get()).collect() }
        }
        Frame::KeepAliveAck(f) => Incoming::KeepAliveAck {
            echo: f.echo,
            lease: f.lease_us.saturating_mul(1000),
            unknown: f.unknown.iter().map(|l| l.get()).collect(),
        },
        Frame::Goodbye(f) => Incoming::Goodbye(f.code),
        _ => return None,
    })
}
