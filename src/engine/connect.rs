//! How a link comes to be: connections of the driver, dialling, and what follows when the peer has said who it is.

use super::end::Failure;
use super::link::{Link, LinkId, Peer, State, Target, Transport, provider_code};
use super::{Action, Engine, Tick, Timer};
use crate::ErrorKind;
use crate::error::Gone;
use towline_control::preface::{Preface, PrefaceError};
use towline_control::session::{Limits as SessionLimits, Role, Session, SessionConfig};
use towline_control::wire::{self, AddressList, Frame, RejectCode};

/// Largest control frame: the layout and segments of a payload of as many parts as are allowed fit.
const MAX_FRAME: u32 = 1 << 20;

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
        self.say_rest(id);
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

/// From dialling to knowing the peer.
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
        let known = target.incarnation.and_then(|incarnation| self.by_incarnation.get(&incarnation)).copied();
        let known = known.filter(|known| self.links.get(known).is_some_and(|link| self.leads_to(link, target)));
        if let Some(id) = known.or_else(|| self.by_address.get(&target.key()).copied()) {
            return Ok(id);
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

    pub(super) fn established(&mut self, id: LinkId, peer: Peer) {
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
        }
        let Some(link) = self.links.get(&id) else { return };
        let (account, vouched) = (self.account_of(link), self.is_vouched_for(link));
        let Some(link) = self.links.get_mut(&id) else { return };
        link.account = account;
        if link.role == Role::Responder {
            if vouched {
                self.by_incarnation.entry(incarnation).or_insert(id);
            }
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
        let target = link.target.clone();
        if let Some(older) = link.upgrade_of.take() {
            self.replace_link(older, id);
        } else if let Some(&other) = self.by_incarnation.get(&incarnation)
            && other != id
            && self.links.get(&other).is_some_and(|other| other.is_open() && self.leads_to(other, &target))
        {
            // Known already under another address, or because it dialled us: one link is enough.
            self.replace_link(id, other);
            return;
        }
        let Some(link) = self.links.get_mut(&id) else { return };
        if link.transport.is_some_and(|transport| !transport.is_unix())
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
        self.fail_link(from, &Failure::Renewed("another link to the same endpoint took its place".to_owned()));
        if self.links.get(&to).is_some_and(Link::is_open) {
            self.send_requests(to);
        }
    }
}
