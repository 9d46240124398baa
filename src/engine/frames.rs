//! Frames: what a link's session brings, owned and handed to whom it concerns; and frames out.

use super::end::{Failure, session_failure};
use super::link::{Link, LinkId, Peer, State};
use super::placing::GrantReceived;
use super::waiting::WaitingGet;
use super::{Action, Engine, Tick, Timer};
use towline_control::session::Event;
use towline_control::wire::{CloseEntry, Frame, GoodbyeCode, QueuePairCode, RefuseCode};

/// A frame of the peer, owned.
#[derive(Debug)]
pub(super) enum Incoming {
    Established(Peer),
    QueuePairOpen { connection: u32, provider: u8, address: Vec<u8> },
    QueuePairAccept { connection: u32, address: Vec<u8> },
    QueuePairRefuse { connection: u32, code: QueuePairCode, text: String },
    Get(WaitingGet),
    Grant(GrantReceived),
    Refuse { request: u64, code: RefuseCode, need: u64, have: u64, text: String },
    Cancel { request: u64 },
    Close(Vec<CloseEntry>),
    Watermark { lease: u64, watermark: u64 },
    KeepAlive { stamp: u64, leases: Vec<u64> },
    KeepAliveAck { echo: u64, lease: Tick, unknown: Vec<u64> },
    Goodbye(GoodbyeCode),
}

impl Engine {
    pub(super) fn process_input(&mut self, id: LinkId) {
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
            Incoming::QueuePairRefuse { connection, code, text } => {
                self.queue_pair_refused(id, connection, code, &text)
            }
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
                // The list comes with that goodbye alone; before another, it is from whenever.
                if let Some(kept) = kept.filter(|_| code == GoodbyeCode::Closing) {
                    self.end_grants_but(id, &kept);
                }
                let why = format!("the peer left: {code}");
                let failure = match code {
                    GoodbyeCode::Replaced => Failure::Renewed(why),
                    _ => Failure::Lost(why),
                };
                self.fail_link(id, &failure);
            }
        }
    }

    pub(super) fn flush(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(&id) else { return };
        let connected = !matches!(link.state, State::Dialing);
        if connected && !link.flush_queued {
            link.flush_queued = true;
            self.actions.push_back(Action::Flush(id));
        }
    }

    /// Whether more may be said on a link whose peer has not taken all of what was said before. Whatever an honest peer can
    /// make this end say much of (grants, gets, watermarks) waits for that: so two ends that have much to say to each other
    /// both stay well below where they would stop reading, and neither waits for the other to begin.
    pub(super) fn has_room(&self, link: &Link) -> bool {
        link.session.backlog() < self.config.limits.backlog / 4
    }

    /// Something is left unsaid on a link until its peer has taken more.
    pub(super) fn put_off(&mut self, id: LinkId) {
        if let Some(link) = self.links.get_mut(&id) {
            link.put_off = true;
        }
    }

    /// The peer has taken something: says what was put off.
    pub(super) fn say_rest(&mut self, id: LinkId) {
        let most = self.config.limits.backlog / 8;
        let Some(link) = self.links.get_mut(&id) else { return };
        if link.put_off && link.session.backlog() <= most {
            link.put_off = false;
            let leases: Vec<u64> = link.granted.iter().copied().collect();
            for lease in leases {
                self.tell_watermark(lease);
            }
            self.send_requests(id);
            self.serve_link(id);
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
        Frame::QueuePairRefuse(f) => {
            Incoming::QueuePairRefuse { connection: f.connection, code: f.code, text: f.text.to_owned() }
        }
        Frame::Get(f) => Incoming::Get(WaitingGet::from_frame(&f)),
        Frame::Grant(f) => Incoming::Grant(GrantReceived::from_frame(&f)),
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
