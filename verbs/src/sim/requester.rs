//! The life of a queue pair, and what the side that posts requests does.

use super::state::{Event, Flight, State, read_locals, write_locals};
use super::{NodeId, Sabotage};
use crate::{Cause, Completion, CompletionStatus, Error, Opcode, QueuePairState};

/// Between two tries over a cut link.
const RETRY: u64 = 50_000;

impl State {
    /// Both ends have been told to connect, perhaps: if they named each other, they will be ready.
    pub(super) fn try_connect(&mut self, number: u32) {
        let Some(qp) = self.qps.get(&number) else { return };
        let Some((other, nonce, active)) = qp.target else { return };
        let my_nonce = qp.nonce;
        let Some(peer) = self.qps.get(&other) else { return };
        let agreed = !self.link_is_cut(qp.node, peer.node)
            && peer.nonce == nonce
            && peer.state == QueuePairState::Connecting
            && peer.target == Some((number, my_nonce, !active));
        if !agreed {
            return;
        }
        for (end, peer) in [(number, other), (other, number)] {
            if let Some(qp) = self.qps.get_mut(&end) {
                qp.peer = Some(peer);
            }
            self.schedule_in(self.plan.connect, Event::Ready { qp: end });
        }
    }

    pub(super) fn ready(&mut self, number: u32) {
        let Some(qp) = self.qps.get_mut(&number) else { return };
        if qp.state != QueuePairState::Connecting {
            return;
        }
        qp.state = QueuePairState::ReadyToSend;
        let node = qp.node;
        let posted: Vec<u64> = qp.sends.iter().map(|send| send.serial).collect();
        self.note("ready", &[u64::from(number)]);
        self.wake(node);
        for serial in posted {
            self.schedule_start(number, serial);
        }
    }

    pub(super) fn connect_timeout(&mut self, number: u32) {
        if self.qps.get(&number).is_some_and(|qp| qp.state == QueuePairState::Connecting) {
            self.fail(number, "connect", Cause::Disconnected);
        }
    }

    /// Has a posted request start after the one before it.
    pub(super) fn schedule_start(&mut self, number: u32, serial: u64) {
        let delay = self.draw(self.plan.start);
        let now = self.now;
        let Some(qp) = self.qps.get_mut(&number) else { return };
        qp.next_start = qp.next_start.max(now).saturating_add(delay);
        let at = qp.next_start;
        self.schedule(at, Event::Start { qp: number, serial });
    }

    pub(super) fn start(&mut self, number: u32, serial: u64) {
        let Some(qp) = self.qps.get(&number) else { return };
        if qp.state != QueuePairState::ReadyToSend {
            return;
        }
        let Some(send) = qp.sends.iter().find(|send| send.serial == serial) else { return };
        let (node, peer, opcode, remote, len) = (qp.node, qp.peer, send.opcode, send.remote, send.len);
        if self.plan.lose_connection.draw(&mut self.random) {
            self.lose(number);
            return;
        }
        let peer = peer.filter(|peer| self.qps.get(peer).is_some_and(|peer| !peer.fenced));
        let Some(peer) = peer else {
            self.unreachable(number, serial);
            return;
        };
        let max_pieces = self.plan.max_pieces;
        let pieces = self.cut(len, max_pieces);
        self.note("start", &[u64::from(number), serial, len, pieces.len() as u64]);
        let copied = opcode == Opcode::Read && self.capabilities.reads_by_cpu;
        let Some(responder) = self.qps.get_mut(&peer).filter(|peer| !peer.broken) else { return };
        if !copied {
            responder.incoming.push_back(serial);
        }
        let responder_node = responder.node;
        let gathers = if opcode == Opcode::Read { 0 } else { pieces.len() };
        let flight = Flight {
            requester: number,
            requester_node: node,
            responder: peer,
            responder_node,
            opcode,
            remote,
            len,
            pieces,
            arrived: false,
            waiting: Default::default(),
            done: 0,
            landed: 0,
            access: None,
            receive: None,
            mapping: None,
            loan: None,
            stopped: false,
            held_since: None,
        };
        self.flights.insert(serial, flight);
        if copied {
            self.begin_copy(peer, serial);
        } else if opcode == Opcode::Read {
            self.schedule_in(self.plan.latency, Event::Arrive { serial });
        }
        let mut at = self.now;
        for piece in 0..gathers {
            at += self.draw(self.plan.piece_gap);
            self.schedule(at, Event::Gather { serial, piece });
        }
    }

    /// Takes a piece of a write or send from local memory, if its queue pair still works, and sends it off.
    pub(super) fn gather(&mut self, serial: u64, piece: usize) {
        let Some(flight) = self.flights.get(&serial) else { return };
        let (start, len) = flight.pieces[piece];
        let Some(qp) = self.qps.get(&flight.requester) else { return };
        if qp.state != QueuePairState::ReadyToSend {
            return; // the rest of this request never leaves; what has left arrives
        }
        let Some(send) = qp.sends.iter().find(|send| send.serial == serial) else { return };
        let mut data = vec![0; len as usize];
        read_locals(&send.local, start, &mut data);
        self.note("gather", &[serial, piece as u64, super::trace::digest(&data)]);
        self.schedule_in(self.plan.latency, Event::ArrivePiece { serial, piece, data });
    }

    /// Puts a piece of a read into local memory, if the request has not been flushed meanwhile.
    pub(super) fn land(&mut self, serial: u64, piece: usize, data: Vec<u8>) {
        let Some(data) = self.held_up(serial, data, |data| Event::Land { serial, piece, data }) else { return };
        self.put_in_place(serial, piece, data);
    }

    pub(super) fn put_in_place(&mut self, serial: u64, piece: usize, data: Vec<u8>) {
        let Some(flight) = self.flights.get_mut(&serial) else { return };
        let number = flight.requester;
        let start = flight.pieces[piece].0;
        flight.landed += 1;
        let whole = flight.landed == flight.pieces.len();
        let send = self.qps.get(&number).and_then(|qp| qp.sends.iter().find(|send| send.serial == serial));
        self.counts.landed_late += u64::from(send.is_none());
        if let Some(send) = send {
            write_locals(&send.local, start, &data);
            self.note("land", &[serial, piece as u64, super::trace::digest(&data)]);
        } else if let Some(local) = self.flushed.get(&serial) {
            write_locals(local, start, &data);
            self.note("land-late", &[serial, piece as u64]);
        } else {
            self.note("land-nowhere", &[serial, piece as u64]);
        }
        if whole {
            self.flights.remove(&serial);
            self.outcome(number, serial, CompletionStatus::Success);
        }
    }

    /// The requester learns how one of its requests ended; it is told to the caller when its turn comes.
    pub(super) fn outcome(&mut self, number: u32, serial: u64, status: CompletionStatus) {
        let Some(qp) = self.qps.get_mut(&number) else { return };
        if qp.state == QueuePairState::Error {
            return; // it flushes
        }
        let Some(send) = qp.sends.iter_mut().find(|send| send.serial == serial) else { return };
        send.outcome.get_or_insert(status);
        self.drain_sends_later(number);
    }

    fn drain_sends_later(&mut self, number: u32) {
        let mut delay = self.draw(self.plan.completion);
        if self.plan.late.draw(&mut self.random) {
            delay += self.draw(self.plan.late_by);
        }
        let flush = self.draw(self.plan.flush);
        let Some(qp) = self.qps.get_mut(&number) else { return };
        let Some(head) = qp.sends.front() else { return };
        let wait = match (head.outcome, qp.state) {
            (Some(_), _) => delay,
            (None, QueuePairState::Error) => flush,
            (None, _) => return,
        };
        if !core::mem::replace(&mut qp.draining_sends, true) {
            self.schedule(self.now + wait, Event::DrainSends { qp: number });
        }
    }

    /// Completes the oldest send request, if it has ended or flushes.
    pub(super) fn drain_sends(&mut self, number: u32) {
        let Some(qp) = self.qps.get_mut(&number) else { return };
        qp.draining_sends = false;
        let status = match (qp.sends.front().and_then(|head| head.outcome), qp.state) {
            (Some(status), _) if !qp.flushing => status,
            (_, QueuePairState::Error) => CompletionStatus::Flushed,
            _ => return,
        };
        qp.flushing |= status != CompletionStatus::Success;
        let Some(send) = qp.sends.pop_front() else { return };
        let cq = qp.send_cq;
        self.stop_copying(send.serial);
        self.let_go(&send.local);
        let bytes = if status == CompletionStatus::Success { send.len } else { 0 };
        if status == CompletionStatus::Flushed && self.plan.sabotage == Some(Sabotage::LateLanding) {
            self.flushed.insert(send.serial, send.local.clone());
        }
        if status != CompletionStatus::Success {
            self.fail(number, "post_send", cause_of(status));
        }
        self.push_completion(
            cq,
            Completion {
                id: send.id,
                status,
                opcode: send.opcode,
                bytes,
                immediate: None,
                queue_pair: number,
                vendor_error: 0,
            },
        );
        self.drain_sends_later(number);
    }

    /// The requester's processor leaves the responder's memory.
    fn stop_copying(&mut self, serial: u64) {
        let honest = self.plan.sabotage != Some(Sabotage::LateLanding);
        if honest && self.flights.get(&serial).is_some_and(|flight| flight.mapping.is_some()) {
            self.flights.remove(&serial);
        }
    }

    /// A request that nobody answers ends after the retries.
    pub(super) fn unreachable(&mut self, number: u32, serial: u64) {
        self.schedule(self.now + self.plan.retry_timeout, Event::GiveUp { qp: number, serial });
    }

    /// The connection of a queue pair is lost: its oldest request says so, the rest flush, and the peer may be told.
    pub(super) fn lose(&mut self, number: u32) {
        self.counts.lost_connections += 1;
        self.note("lose", &[u64::from(number)]);
        if let Some(head) = self.qps.get_mut(&number).and_then(|qp| qp.sends.front_mut()) {
            head.outcome.get_or_insert(CompletionStatus::TransportRetryExceeded);
        }
        self.fail(number, "connection", Cause::Disconnected);
    }

    pub(super) fn peer_gone(&mut self, number: u32) {
        self.fail(number, "connection", Cause::Disconnected);
    }

    /// Moves a queue pair to the error state; only the first cause counts. The peer may be told.
    pub(super) fn fail(&mut self, number: u32, verb: &'static str, cause: Cause) {
        let Some(qp) = self.qps.get(&number) else { return };
        let (peer, news) = (qp.peer, qp.state != QueuePairState::Error);
        self.fail_untold(number, verb, cause);
        if let (Some(peer), true) = (peer, news) {
            self.tell_peer(peer);
        }
    }

    /// As [`fail`](Self::fail), where the peer learns it from an answer.
    pub(super) fn fail_untold(&mut self, number: u32, verb: &'static str, cause: Cause) {
        let Some(qp) = self.qps.get_mut(&number) else { return };
        if qp.state == QueuePairState::Error {
            return;
        }
        qp.state = QueuePairState::Error;
        qp.failure = Some(Error::new(verb, cause));
        let node = qp.node;
        let inside = |flight: &Flight| {
            flight.responder == number && flight.access.is_some() && flight.done < flight.pieces.len()
        };
        self.counts.fenced_inside += u64::from(self.flights.values().any(inside));
        self.note("error", &[u64::from(number)]);
        self.wake(node);
        self.schedule_in(self.plan.fence, Event::Fence { qp: number });
        self.drain_sends_later(number);
        self.drain_receives_later(number);
    }

    fn tell_peer(&mut self, peer: u32) {
        if self.plan.peer_learns.draw(&mut self.random) {
            self.schedule_in(self.plan.latency, Event::PeerGone { qp: peer });
        }
    }

    pub(super) fn fence(&mut self, number: u32) {
        let Some(qp) = self.qps.get_mut(&number) else { return };
        if core::mem::replace(&mut qp.fenced, true) {
            return;
        }
        let node = qp.node;
        qp.incoming.clear();
        self.note("fenced", &[u64::from(number)]);
        self.wake(node);
        self.abandon_flights_to(number);
    }

    /// The responder of these requests is gone: they end at their requesters after the retries.
    pub(super) fn abandon_flights_to(&mut self, number: u32) {
        let lost: Vec<(u64, u32)> =
            self.flights.iter().filter(|(_, f)| f.responder == number).map(|(&s, f)| (s, f.requester)).collect();
        for (serial, requester) in lost {
            // A read that has been sampled whole is on its way already and needs the responder no more, and a mapping
            // outlives whoever made it.
            let needless = |f: &Flight| f.mapping.is_some() || (f.opcode == Opcode::Read && f.done == f.pieces.len());
            if self.flights.get(&serial).is_some_and(needless) {
                continue;
            }
            self.flights.remove(&serial);
            self.unreachable(requester, serial);
        }
    }

    /// Ends a queue pair at once, without completions: it is destroyed, or its node has crashed.
    pub(super) fn tear_down(&mut self, number: u32, verb: &'static str, cause: Cause) {
        let Some(qp) = self.qps.get_mut(&number) else { return };
        let told = core::mem::replace(&mut qp.state, QueuePairState::Error) == QueuePairState::Error;
        qp.failure.get_or_insert(Error::new(verb, cause));
        qp.fenced = true;
        qp.incoming.clear();
        let sends = core::mem::take(&mut qp.sends);
        let receives = core::mem::take(&mut qp.receives);
        let peer = qp.peer;
        for send in &sends {
            self.let_go(&send.local);
            self.stop_copying(send.serial);
        }
        for receive in &receives {
            self.let_go(receive.local.as_slice());
        }
        self.note("torn-down", &[u64::from(number)]);
        self.abandon_flights_to(number);
        if let (Some(peer), false) = (peer, told) {
            self.tell_peer(peer);
        }
    }

    /// If the link under a flight is cut: sends `event` round again later, and gives the flight up when that has been
    /// so for too long. Gives the data back if the way is free.
    pub(super) fn held_up(
        &mut self,
        serial: u64,
        data: Vec<u8>,
        event: impl FnOnce(Vec<u8>) -> Event,
    ) -> Option<Vec<u8>> {
        let flight = self.flights.get_mut(&serial)?;
        let (a, b) = (flight.requester_node, flight.responder_node);
        if !self.cut_links.contains(&(a.min(b), a.max(b))) {
            flight.held_since = None;
            return Some(data);
        }
        let since = *flight.held_since.get_or_insert(self.now);
        if self.now - since <= self.plan.retry_timeout {
            self.schedule(self.now + RETRY, event(data));
            return None;
        }
        let (requester, responder, executed) = (flight.requester, flight.responder, flight.done == flight.pieces.len());
        self.flights.remove(&serial);
        if !executed {
            self.break_off(responder);
        }
        self.outcome(requester, serial, CompletionStatus::TransportRetryExceeded);
        None
    }

    /// The responder's answer arrives, unless the link is cut: then it is sent again until the requester gives up.
    pub(super) fn answered(&mut self, number: u32, serial: u64, status: CompletionStatus, from: NodeId, held: u64) {
        let Some(qp) = self.qps.get(&number) else { return };
        if !self.link_is_cut(qp.node, from) {
            self.outcome(number, serial, status);
        } else if held > self.plan.retry_timeout {
            self.outcome(number, serial, CompletionStatus::TransportRetryExceeded);
        } else {
            let event = Event::Outcome { qp: number, serial, status, from, held: held + RETRY };
            self.schedule(self.now + RETRY, event);
        }
    }
}

fn cause_of(status: CompletionStatus) -> Cause {
    match status {
        CompletionStatus::RemoteAccess => Cause::Denied { what: "remote access" },
        CompletionStatus::RemoteInvalidRequest => Cause::Malformed { what: "a message that its receive can't hold" },
        CompletionStatus::ReceiverNotReadyExceeded => Cause::NotFound { what: "posted receive" },
        _ => Cause::Disconnected,
    }
}
