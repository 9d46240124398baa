//! How the two ends of a link agree on a path and a queue pair, and what happens when one fails by itself.

use super::end::Failure;
use super::link::{Link, LinkId, Peer, State, Transport, provider_code};
use super::{Action, Engine, Rail, Tick, Timer};
use crate::{ErrorKind, Path, Paths};
use std::collections::VecDeque;
use towline_control::session::Role;
use towline_control::wire::{self, Frame, QueuePairCode, QueuePairRefuse};
use towline_verbs::{QueuePair, QueuePairState};

/// How long the last words of a peer whose queue pair failed are waited for.
const LAST_WORDS: Tick = 30_000_000;

/// Offers and answers.
impl Engine {
    /// Which of the paths over shared memory leads to `peer`, if it is on this host.
    pub(super) fn shm_path(&self, peer: &Peer) -> Option<Path> {
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
                    let why = if path == Path::Direct { "both endpoints are in one process, and that is " } else { "" };
                    return Err(format!("not {path}: {why}not allowed here"));
                }
                if !link.transport.is_some_and(Transport::is_unix) {
                    return Err(format!("not {path}: no Unix socket reaches the peer (another network namespace?)"));
                }
                return Ok(path);
            }
            path => path,
        };
        if self.config.paths.allow(path) { Ok(path) } else { Err(format!("not {path}: not allowed here")) }
    }

    /// Works out the candidates and offers the first.
    pub(super) fn agree(&mut self, id: LinkId) {
        let Some(link) = self.links.get(&id) else { return };
        let mut candidates = Vec::new();
        let mut notes: Vec<String> = Vec::new();
        for rail in 0..self.rails.len() {
            match self.path_over(rail, link) {
                Ok(_) => candidates.push(rail),
                Err(note) if notes.contains(&note) => {} // of another device of that path
                Err(note) => notes.push(note),
            }
        }
        let troubles = self.prefer_what_works(link, &mut candidates);
        let Some(link) = self.links.get_mut(&id) else { return };
        link.state = State::Agreeing;
        link.candidates = VecDeque::from(candidates);
        link.fell_back |= !troubles.is_empty();
        notes.extend(troubles);
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
                    let text = format!("not {}: {error}", self.rails[rail].name());
                    self.note_trouble(id, rail, &error.to_string());
                    if let Some(link) = self.links.get_mut(&id) {
                        link.note(&text);
                        link.fell_back = true;
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

    fn create_queue_pair(&mut self, rail: usize) -> towline_verbs::Result<QueuePair> {
        self.rails[rail].create_queue_pair(self.config.limits.send_queue)
    }

    /// The rail for a queue pair that a peer offers: of the devices of its provider the one that is nearest to it, the
    /// first of several.
    fn rail_for(&self, provider: u8, address: &[u8]) -> Option<usize> {
        let of_provider = |(_, rail): &(usize, &Rail)| provider_code(rail.path) == provider;
        let rails: Vec<(usize, &Rail)> = self.rails.iter().enumerate().filter(of_provider).collect();
        let near = rails.iter().filter_map(|(at, rail)| Some((*at, rail.device.closeness(address)?)));
        // One that can't be connected says best itself why not.
        near.rev().max_by_key(|(_, closeness)| *closeness).or(Some((rails.first()?.0, 0))).map(|(at, _)| at)
    }

    /// Why a queue pair of a path is refused that this endpoint has no rail of.
    fn no_provider(&self, provider: u8) -> (QueuePairCode, String) {
        let without = self.config.without_rdma.as_ref().filter(|_| provider == provider_code(Path::Rdma));
        let why = without.map_or_else(String::new, |without| format!(": {}", without.why));
        (QueuePairCode::NoProvider, format!("it does not have this path{why}"))
    }

    pub(super) fn queue_pair_offered(&mut self, id: LinkId, connection: u32, provider: u8, address: &[u8]) {
        let Some(link) = self.links.get(&id) else { return };
        if link.role != Role::Responder || connection <= link.offered {
            return; // a late or repeated offer (I11)
        }
        let rail = self.rail_for(provider, address);
        let path = rail.map(|rail| self.path_over(rail, link));
        let verdict = match (rail, path) {
            (Some(rail), Some(path)) => match path {
                Err(note) => Err((QueuePairCode::NotAllowed, note)),
                Ok(path) => self
                    .create_queue_pair(rail)
                    .and_then(|queue_pair| queue_pair.connect(address, false).map(|()| (rail, path, queue_pair)))
                    .map_err(|error| (QueuePairCode::Failed, error.to_string())),
            },
            _ => Err(self.no_provider(provider)),
        };
        let had_one = self.leave_queue_pair(id);
        let Some(link) = self.links.get_mut(&id) else { return };
        link.fell_back |= had_one;
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
                link.fell_back |= code != QueuePairCode::NotAllowed;
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

    pub(super) fn queue_pair_accepted(&mut self, id: LinkId, connection: u32, address: &[u8]) {
        let Some(link) = self.links.get(&id) else { return };
        if link.state != State::Agreeing || link.role != Role::Initiator || link.offered != connection {
            return; // an answer to an older offer (I11)
        }
        let Some(rail) = link.rail else { return };
        let path = self.path_over(rail, link);
        let same_host = link.peer.as_ref().is_some_and(|peer| peer.boot == self.config.identity.boot);
        let has_shm = self.rails.iter().any(|rail| provider_code(rail.path) == 1);
        let without_rdma = self.config.without_rdma.clone();
        let Some(link) = self.links.get_mut(&id) else { return };
        let Some(queue_pair) = &link.queue_pair else { return };
        match (queue_pair.connect(address, true), path) {
            (Ok(()), Ok(path)) => {
                link.path = path;
                let mut why = match path {
                    Path::Direct => "both endpoints are in one process".to_owned(),
                    Path::Shm => "same host: the boot ids agree and a Unix socket reaches the peer".to_owned(),
                    Path::Rdma => format!("RDMA devices at both ends, {} here", self.rails[rail].device.info().name),
                    Path::Tcp if !same_host => "the peer is on another host, and no RDMA device is in use".to_owned(),
                    Path::Tcp if !has_shm => "same host, but shared memory is not allowed here".to_owned(),
                    Path::Tcp => "same host, without shared memory".to_owned(),
                };
                if let (Path::Tcp, Some(without)) = (path, without_rdma) {
                    why = format!("{why} (not rdma: {})", without.why);
                    link.fell_back |= without.has_device;
                }
                link.reason = if link.reason.is_empty() { why } else { format!("{why}; {}", link.reason) };
                self.opened(id);
            }
            (Err(error), _) => {
                let text = format!("not {}: {error}", self.rails[rail].name());
                link.note(&text);
                self.offer_next(id);
            }
            (_, Err(note)) => {
                link.note(&note);
                self.offer_next(id);
            }
        }
    }

    pub(super) fn queue_pair_refused(&mut self, id: LinkId, connection: u32, code: QueuePairCode, text: &str) {
        let Some(link) = self.links.get(&id) else { return };
        if link.state != State::Agreeing || link.role != Role::Initiator || link.offered != connection {
            return;
        }
        if let (QueuePairCode::Failed, Some(rail)) = (code, link.rail) {
            self.note_trouble(id, rail, &format!("the peer refused: {text}"));
        }
        let Some(link) = self.links.get_mut(&id) else { return };
        link.note(&format!("the peer refused: {text}"));
        // What its policy rules out was no choice; what it lacks or fails at was (I6).
        link.fell_back |= code != QueuePairCode::NotAllowed;
        link.queue_pair = None;
        self.offer_next(id);
    }

    pub(super) fn opened(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(&id) else { return };
        link.state = State::Open;
        self.timers.cancel(link.handshake.take());
        if let (Some(rail), Some(queue_pair)) = (link.rail, &link.queue_pair) {
            self.queue_pairs.insert((rail, queue_pair.number()), id);
        }
        if link.transport.is_some_and(Transport::is_unix) && !link.watched {
            link.watched = true;
            self.actions.push_back(Action::WatchProcess(id));
        }
        let Some(incarnation) = link.incarnation() else { return };
        if self.links.get(&id).is_some_and(|link| link.role == Role::Initiator || self.is_vouched_for(link)) {
            self.by_incarnation.insert(incarnation, id);
        }
        self.await_proof(id);
        self.plan_return(id);
        self.say_again(id, incarnation);
        self.send_closes(id); // first: what is still held counts against what is asked for next
        self.send_requests(id);
        self.serve_link(id);
    }
}

/// Failures, and what may be chosen from.
impl Engine {
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
            let Some(link) = self.links.get(&id) else { continue };
            let failure = link.queue_pair.as_ref().and_then(QueuePair::failure);
            let why = failure.map_or("closed by the peer".to_owned(), |failure| failure.to_string());
            self.queue_pair_failed(id, &why);
        }
    }

    /// The queue pair of a link does not work, or no more: the next candidate if it never did and nothing hangs on it, a new
    /// link otherwise.
    pub(super) fn queue_pair_failed(&mut self, id: LinkId, why: &str) {
        if let Some(rail) = self.links.get(&id).and_then(|link| link.rail) {
            self.note_trouble(id, rail, why);
        }
        let Some(link) = self.links.get_mut(&id) else { return };
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
