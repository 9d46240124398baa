//! What the side does whose memory and receives a request meets.

use super::Sabotage;
use super::state::{Event, State, write_locals};
use super::trace::digest;
use crate::memory::Entry;
use crate::{Access, Cause, Completion, CompletionStatus, Opcode, QueuePairState, RemoteSlice};

impl State {
    pub(super) fn arrive(&mut self, serial: u64) {
        if self.held_up(serial, Vec::new(), |_| Event::Arrive { serial }).is_none() {
            return;
        }
        let Some(flight) = self.flights.get_mut(&serial) else { return };
        flight.arrived = true;
        let responder = flight.responder;
        self.answer(responder);
    }

    pub(super) fn arrive_piece(&mut self, serial: u64, piece: usize, data: Vec<u8>) {
        let event = |data| Event::ArrivePiece { serial, piece, data };
        let Some(data) = self.held_up(serial, data, event) else { return };
        let Some(flight) = self.flights.get_mut(&serial) else { return };
        flight.waiting.insert(piece, data);
        let responder = flight.responder;
        self.answer(responder);
    }

    /// The wait for a receive is over: look again.
    pub(super) fn service(&mut self, number: u32) {
        if let Some(qp) = self.qps.get_mut(&number) {
            qp.rnr_waiting = false;
            self.answer(number);
        }
    }

    /// Executes what has arrived for a queue pair, in the order in which its peer started it. A read lets the next
    /// request begin as soon as it has begun itself; everything else is done first.
    fn answer(&mut self, number: u32) {
        loop {
            let Some(qp) = self.qps.get(&number) else { return };
            if qp.fenced || qp.rnr_waiting {
                return;
            }
            let Some(&serial) = qp.incoming.front() else { return };
            let Some(flight) = self.flights.get(&serial) else { return };
            let finished = match flight.opcode {
                Opcode::Read => flight.arrived && self.begin_read(number, serial),
                _ => self.take_in(number, serial),
            };
            if !finished {
                return;
            }
            if let Some(qp) = self.qps.get_mut(&number) {
                qp.incoming.pop_front();
                qp.rnr_tries = 0;
            }
        }
    }

    fn begin_read(&mut self, number: u32, serial: u64) -> bool {
        if !self.begin_access(number, serial, Access::REMOTE_READ) {
            return false;
        }
        let pieces = self.flights.get(&serial).map_or(0, |flight| flight.pieces.len());
        let mut at = self.now;
        for piece in 0..pieces {
            at += self.draw(self.plan.piece_gap);
            self.schedule(at, Event::Sample { serial, piece });
        }
        true
    }

    /// The requester's processor begins to copy out of its mapping of our memory.
    pub(super) fn begin_copy(&mut self, number: u32, serial: u64) {
        if !self.begin_read(number, serial) {
            return;
        }
        let region = self.flights.get(&serial).and_then(|flight| flight.access).map(|(_, region, _)| region);
        let memory = region.and_then(|region| self.regions.get(&region)).map(|region| region.memory.clone());
        if let Some(flight) = self.flights.get_mut(&serial) {
            flight.mapping = memory;
        }
    }

    /// Takes a piece of a read from our memory, at this moment.
    pub(super) fn sample(&mut self, serial: u64, piece: usize) {
        let Some(flight) = self.flights.get(&serial) else { return };
        let ((start, len), stopped, access) = (flight.pieces[piece], flight.stopped, flight.access);
        let mut data = vec![0; len as usize];
        if let (Some(memory), Some((.., offset))) = (&flight.mapping, access) {
            assert!(memory.read(offset + start, &mut data).is_ok(), "the range was checked when the copy began");
        } else if let Some((_, region, offset)) = access {
            let at = offset + start;
            let region = self.regions.get(&region).filter(|_| !stopped);
            let lent = flight.loan.as_ref().map(|(loan, from)| (loan, at - from, loan.enter()));
            let read = match (region, lent) {
                (None, _) | (_, Some((.., Entry::Broken))) => false,
                (Some(region), None | Some((.., Entry::Copied))) => region.memory.read(at, &mut data).is_ok(),
                (Some(_), Some((loan, from, Entry::Lent(bytes)))) => {
                    data.copy_from_slice(&bytes[from as usize..][..len as usize]);
                    loan.note_taken(len);
                    true
                }
            };
            if !read {
                self.refuse(serial, CompletionStatus::RemoteAccess);
                return;
            }
        }
        let mut copied = false;
        if let Some(flight) = self.flights.get_mut(&serial) {
            flight.done += 1;
            copied = flight.mapping.is_some();
        }
        self.note("sample", &[serial, piece as u64, digest(&data)]);
        if copied {
            self.put_in_place(serial, piece, data);
            return;
        }
        self.schedule_in(self.plan.latency, Event::Land { serial, piece, data });
    }

    /// Writes what has arrived of a write or send, and ends it when it is whole. True when it has ended well.
    fn take_in(&mut self, number: u32, serial: u64) -> bool {
        while let Some((piece, data)) = self.next_piece(serial) {
            let Some(flight) = self.flights.get(&serial) else { return false };
            let (start, first) = (flight.pieces[piece].0, piece == 0);
            let into_receive = matches!(flight.opcode, Opcode::Send | Opcode::SendWithImmediate(_));
            let begun = !first
                || if into_receive {
                    self.begin_receive(number, serial)
                } else {
                    self.begin_access(number, serial, Access::REMOTE_WRITE)
                };
            if !begun {
                // Refused (the flight is gone), or no receive is posted yet: keep the piece for the next try.
                if let Some(flight) = self.flights.get_mut(&serial) {
                    flight.waiting.insert(piece, data);
                }
                return false;
            }
            let written = if into_receive {
                self.write_receive(number, serial, start, &data)
            } else {
                self.write_region(serial, start, &data)
            };
            if !written {
                self.refuse(serial, CompletionStatus::RemoteAccess);
                return false;
            }
            self.note("write", &[serial, piece as u64, digest(&data)]);
            if let Some(flight) = self.flights.get_mut(&serial) {
                flight.done += 1;
            }
        }
        self.flights.get(&serial).is_some_and(|flight| flight.done == flight.pieces.len()) && self.end(number, serial)
    }

    fn next_piece(&mut self, serial: u64) -> Option<(usize, Vec<u8>)> {
        let flight = self.flights.get_mut(&serial)?;
        let piece = flight.done;
        flight.waiting.remove(&piece).map(|data| (piece, data))
    }

    fn write_region(&mut self, serial: u64, start: u64, data: &[u8]) -> bool {
        let Some(flight) = self.flights.get(&serial) else { return false };
        let Some((_, region, offset)) = flight.access else { return true };
        let region = self.regions.get(&region).filter(|_| !flight.stopped);
        region.is_some_and(|region| region.memory.write(offset + start, data).is_ok())
    }

    /// Writes into the receive that the send took; if that has been flushed meanwhile, nowhere.
    fn write_receive(&mut self, number: u32, serial: u64, start: u64, data: &[u8]) -> bool {
        let receive = self.flights.get(&serial).and_then(|flight| flight.receive);
        let Some(qp) = self.qps.get(&number) else { return false };
        if let Some(receive) = qp.receives.iter().find(|posted| Some(posted.serial) == receive) {
            write_locals(receive.local.as_slice(), start, data);
        }
        true
    }

    /// A write or send is whole: consumes the receive that it owes, and answers.
    fn end(&mut self, number: u32, serial: u64) -> bool {
        let Some(flight) = self.flights.get(&serial) else { return false };
        let (requester, len, opcode, from) = (flight.requester, flight.len, flight.opcode, flight.responder_node);
        let immediate = match opcode {
            Opcode::WriteWithImmediate(immediate) | Opcode::SendWithImmediate(immediate) => Some(immediate),
            _ => None,
        };
        if matches!(opcode, Opcode::WriteWithImmediate(_)) && !self.take_receive(number, serial) {
            return false;
        }
        let receive = self.flights.remove(&serial).and_then(|flight| flight.receive);
        self.finish_receive(number, receive, CompletionStatus::Success, len, immediate);
        let status = CompletionStatus::Success;
        self.schedule_in(self.plan.latency, Event::Outcome { qp: requester, serial, status, from, held: 0 });
        true
    }

    /// Checks key, bounds and right; refuses the request if they do not hold.
    fn begin_access(&mut self, number: u32, serial: u64, right: Access) -> bool {
        let Some(flight) = self.flights.get(&serial) else { return false };
        if flight.len == 0 {
            return true; // touches nothing: no key is looked at, as on hardware
        }
        let access = flight.remote.and_then(|remote| self.open(number, remote, right));
        if access.is_none() {
            self.refuse(serial, CompletionStatus::RemoteAccess);
            return false;
        }
        let key = access.and_then(|(rkey, ..)| self.keys.get(&rkey));
        let loan = key.and_then(|key| key.loan.clone().map(|loan| (loan, key.offset)));
        if let Some(flight) = self.flights.get_mut(&serial) {
            flight.access = access;
            flight.loan = loan;
        }
        true
    }

    /// What a key opens to the peer of queue pair `number`: key, region, and offset of the first byte in it.
    pub(super) fn open(&self, number: u32, remote: RemoteSlice, right: Access) -> Option<(u64, u64, u64)> {
        let qp = self.qps.get(&number)?;
        let key = self.keys.get(&remote.rkey)?;
        let region = self.regions.get(&key.region)?;
        let offset = remote.address.checked_sub(region.base)?;
        let end = offset.checked_add(remote.len)?;
        let allowed = region.node == qp.node
            && region.pd == qp.pd
            && key.queue_pair.is_none_or(|bound| bound == number)
            && key.access.contains(right)
            && key.valid_from <= self.now
            && !key.loan.as_ref().is_some_and(|loan| loan.is_broken())
            && offset >= key.offset
            && end <= key.offset + key.len;
        allowed.then_some((remote.rkey, key.region, offset))
    }

    /// Whether a peer is in the memory under a key that was invalidated. The device may stop such an access.
    pub(super) fn invalidate(&mut self, rkey: u64) -> bool {
        if self.keys.remove(&rkey).is_some() {
            self.note("invalidate", &[rkey]);
        }
        let mut fenced = true;
        for flight in self.flights.values_mut() {
            let under_way = flight.access.is_some_and(|(key, ..)| key == rkey) && flight.done < flight.pieces.len();
            if under_way {
                fenced = false;
                flight.stopped |= self.plan.invalidate_stops.draw(&mut self.random);
            }
        }
        self.counts.fenced_inside += u64::from(!fenced);
        fenced || self.plan.sabotage == Some(Sabotage::EarlyFence)
    }

    fn begin_receive(&mut self, number: u32, serial: u64) -> bool {
        if !self.take_receive(number, serial) {
            return false;
        }
        let Some(flight) = self.flights.get(&serial) else { return false };
        let (len, receive) = (flight.len, flight.receive);
        let Some(qp) = self.qps.get(&number) else { return false };
        let posted = qp.receives.iter().find(|posted| Some(posted.serial) == receive);
        let room = posted.and_then(|posted| posted.local.as_ref()).map_or(0, |local| local.len);
        if len > room {
            self.finish_receive(number, receive, CompletionStatus::LocalLength, 0, None);
            self.refuse(serial, CompletionStatus::RemoteInvalidRequest);
            return false;
        }
        true
    }

    /// Takes the oldest receive for a request. Without one the peer has to wait, and in the end to give up.
    fn take_receive(&mut self, number: u32, serial: u64) -> bool {
        let Some(qp) = self.qps.get_mut(&number) else { return false };
        let failed = qp.state == QueuePairState::Error;
        let Some(receive) = qp.receives.iter_mut().find(|receive| !receive.taken).filter(|_| !failed) else {
            qp.rnr_tries += 1;
            self.counts.receiver_not_ready += 1;
            if qp.rnr_tries > self.plan.rnr_retries {
                self.refuse(serial, CompletionStatus::ReceiverNotReadyExceeded);
            } else {
                qp.rnr_waiting = true;
                self.schedule_in(self.plan.rnr_delay, Event::Service { qp: number });
            }
            return false;
        };
        receive.taken = true;
        let taken = receive.serial;
        if let Some(flight) = self.flights.get_mut(&serial) {
            flight.receive = Some(taken);
        }
        true
    }

    fn finish_receive(
        &mut self,
        number: u32,
        receive: Option<u64>,
        status: CompletionStatus,
        bytes: u64,
        immediate: Option<u32>,
    ) {
        let Some(qp) = self.qps.get_mut(&number) else { return };
        let posted = qp.receives.iter_mut().find(|posted| Some(posted.serial) == receive);
        if let Some(posted) = posted {
            posted.outcome = Some((status, bytes, immediate));
            self.drain_receives_later(number);
        }
    }

    pub(super) fn drain_receives_later(&mut self, number: u32) {
        let (delay, flush) = (self.draw(self.plan.completion), self.draw(self.plan.flush));
        let Some(qp) = self.qps.get_mut(&number) else { return };
        let Some(head) = qp.receives.front() else { return };
        let wait = match (head.outcome, qp.state) {
            (Some(_), _) => delay,
            (None, QueuePairState::Error) => flush,
            (None, _) => return,
        };
        if !core::mem::replace(&mut qp.draining_receives, true) {
            self.schedule(self.now + wait, Event::DrainReceives { qp: number });
        }
    }

    /// Completes the oldest receive, if it has ended or flushes.
    pub(super) fn drain_receives(&mut self, number: u32) {
        let Some(qp) = self.qps.get_mut(&number) else { return };
        qp.draining_receives = false;
        let (status, bytes, immediate) = match (qp.receives.front().and_then(|head| head.outcome), qp.state) {
            (Some(outcome), _) => outcome,
            (None, QueuePairState::Error) => (CompletionStatus::Flushed, 0, None),
            (None, _) => return,
        };
        let Some(receive) = qp.receives.pop_front() else { return };
        let cq = qp.recv_cq;
        self.let_go(receive.local.as_slice());
        if status == CompletionStatus::LocalLength {
            self.fail_untold(number, "post_recv", Cause::Malformed { what: "a message longer than its receive" });
        }
        let opcode = Opcode::Receive;
        let id = receive.id;
        self.push_completion(
            cq,
            Completion { id, status, opcode, bytes, immediate, queue_pair: number, vendor_error: 0 },
        );
        self.drain_receives_later(number);
    }

    /// Refuses a request: nothing that its requester sent after it is executed.
    fn refuse(&mut self, serial: u64, status: CompletionStatus) {
        let Some(flight) = self.flights.remove(&serial) else { return };
        self.counts.refused += 1;
        self.note("refuse", &[serial, status as u64]);
        self.break_off(flight.responder);
        let (qp, from) = (flight.requester, flight.responder_node);
        self.schedule_in(self.plan.latency, Event::Outcome { qp, serial, status, from, held: 0 });
        let deadly = status != CompletionStatus::ReceiverNotReadyExceeded;
        if deadly && self.plan.refusal_kills_responder.draw(&mut self.random) {
            self.fail_untold(flight.responder, "remote request", Cause::Denied { what: "access by the peer" });
        }
    }

    /// Drops what waits at a responder: its requester is about to fail.
    pub(super) fn break_off(&mut self, number: u32) {
        let Some(qp) = self.qps.get_mut(&number) else { return };
        qp.broken = true;
        for dropped in core::mem::take(&mut qp.incoming) {
            self.flights.remove(&dropped);
        }
    }
}
