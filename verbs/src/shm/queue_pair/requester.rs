//! Our requests: the send queue.
//!
//! Requests are started in the order posted. A read is a job of the engine; a write or send goes to the peer as frames
//! and is over when the peer has answered. A read that follows a write waits for the write's answer, since only then is
//! the write sure to be in the memory that is read (verbs specification, ordering of work requests).

use super::super::domain::{Pd, Region};
use super::super::engine::{Job, Keep, Over, Purpose, Stretch};
use super::super::frame::{Frame, Piece, Source, Target};
use super::super::link::malformed;
use super::super::{MAX_MESSAGE, MAX_SGE};
use super::{Garbage, Inner, Out, Qp};
use crate::memory_region::check_range;
use crate::{
    Access, Cause, Completion, CompletionStatus, Error, LocalSlice, Opcode, QueuePairState, RemoteSlice, Result,
    WorkRequest,
};
use std::collections::VecDeque;
use std::sync::Arc;

const VERB: &str = "post_send";

/// The send queue. A request's number counts all that were ever posted.
#[derive(Debug, Default)]
pub(super) struct Requester {
    requests: VecDeque<Request>,
    /// Number of the front of `requests`.
    base: u64,
    /// Number of the first request not started.
    next: u64,
    /// Writes and sends whose answer is to come, in order.
    unanswered: VecDeque<u64>,
    /// A key that we asked the peer for.
    resolving: Option<u64>,
    /// The key of the last answer.
    resolved: Option<u64>,
    /// A request has failed: none behind it is started.
    failed: bool,
}

/// One request, checked.
#[derive(Debug)]
pub(super) struct Request {
    id: u64,
    opcode: Opcode,
    bytes: u64,
    local: Vec<LocalSlice>,
    remote: RemoteSlice,
    state: State,
}

#[derive(Debug)]
enum State {
    Queued,
    Copying(Arc<Job>),
    Sent,
    Done(CompletionStatus),
}

/// The region of a local slice, if it is one of `pd`.
pub(super) fn local_region<'a>(verb: &'static str, pd: &Arc<Pd>, slice: &'a LocalSlice) -> Result<&'a Region> {
    let region = slice.region.backend.as_any().downcast_ref::<Region>();
    let Some(region) = region.filter(|region| Arc::ptr_eq(region.pd(), pd)) else {
        return Err(Error::new(verb, Cause::Denied { what: "a region of another protection domain" }));
    };
    check_range(verb, slice.offset, slice.len, region.memory().len())?;
    Ok(region)
}

/// Checks what can be checked without the peer.
pub(super) fn check(pd: &Arc<Pd>, request: WorkRequest) -> Result<Request> {
    let fail = |cause| Err(Error::new(VERB, cause));
    let needs_remote = match request.opcode {
        Opcode::Read | Opcode::Write | Opcode::WriteWithImmediate(_) => true,
        Opcode::Send | Opcode::SendWithImmediate(_) => false,
        Opcode::Receive => return fail(Cause::Unsupported { what: "a receive in the send queue" }),
    };
    if request.local.len() > MAX_SGE as usize {
        let (have, need) = (MAX_SGE.into(), request.local.len() as u64);
        return fail(Cause::Limit { what: "max_sge", have, need });
    }
    let mut bytes = 0u64;
    for slice in &request.local {
        let region = local_region(VERB, pd, slice)?;
        if request.opcode == Opcode::Read && !region.access().contains(Access::LOCAL_WRITE) {
            return fail(Cause::Denied { what: "LOCAL_WRITE for the destination of a read" });
        }
        bytes = bytes.saturating_add(slice.len); // 16 lengths of memory that there is never reach this
    }
    if bytes > MAX_MESSAGE {
        return fail(Cause::Limit { what: "max_message_size", have: MAX_MESSAGE, need: bytes });
    }
    let nowhere = RemoteSlice { address: 0, len: 0, rkey: 0 };
    let remote = match request.remote {
        Some(remote) if needs_remote => {
            if remote.len != bytes {
                return fail(Cause::OutOfRange { offset: 0, len: bytes, size: remote.len });
            }
            remote
        }
        None if needs_remote => return fail(Cause::OutOfRange { offset: 0, len: bytes, size: 0 }),
        _ => nowhere,
    };
    let WorkRequest { id, opcode, local, .. } = request;
    Ok(Request { id, opcode, bytes, local, remote, state: State::Queued })
}

impl Requester {
    /// Whether a copier may be in memory of ours.
    pub(super) fn is_copying(&self) -> bool {
        self.requests.iter().any(|request| matches!(request.state, State::Copying(_)))
    }

    fn request(&mut self, number: u64) -> Option<&mut Request> {
        let index = number.checked_sub(self.base)?;
        self.requests.get_mut(usize::try_from(index).ok()?)
    }

    pub(super) fn read_is_over(&mut self, number: u64, over: Over) {
        if let Some(request) = self.request(number) {
            request.end(if over.skipped { CompletionStatus::Flushed } else { CompletionStatus::Success });
        }
    }

    /// The peer has answered a write or send.
    pub(super) fn answered(&mut self, id: u64, status: CompletionStatus, bytes: u64) -> Result<()> {
        if self.unanswered.pop_front() != Some(id) {
            return Err(malformed("an answer to no request"));
        }
        let Some(request) = self.request(id) else { return Err(malformed("an answer to no request")) };
        if bytes != if status == CompletionStatus::Success { request.bytes } else { 0 } {
            return Err(malformed("an answer with a wrong length"));
        }
        request.end(status);
        self.failed |= status != CompletionStatus::Success;
        Ok(())
    }

    /// The peer has told all regions that it had when we asked.
    pub(super) fn resolved(&mut self, key: u64) -> Result<()> {
        if self.resolving.take() != Some(key) {
            return Err(malformed("an answer to no question"));
        }
        self.resolved = Some(key);
        Ok(())
    }

    /// Ends everything that is not being copied this moment; returns whether jobs were stopped. If the connection was
    /// lost, the oldest request says so, unless it is a read whose bytes are being copied anyway.
    pub(super) fn abort(&mut self, lost: bool) -> bool {
        let mut stopped = false;
        let oldest = self.base;
        for (number, request) in (oldest..).zip(&mut self.requests) {
            match &request.state {
                State::Copying(job) => {
                    stopped = true;
                    if job.abort().is_none() {
                        continue; // a copier is in it, or about to tell; it ends the request
                    }
                }
                State::Queued | State::Sent => {}
                State::Done(_) => continue,
            }
            let first_lost = lost && number == oldest;
            request.end(if first_lost { CompletionStatus::TransportRetryExceeded } else { CompletionStatus::Flushed });
        }
        self.next = self.base + self.requests.len() as u64;
        self.unanswered.clear();
        stopped
    }
}

impl Request {
    fn end(&mut self, status: CompletionStatus) {
        self.state = State::Done(status);
    }
}

impl Inner {
    /// Takes requests into the send queue: all or none.
    pub(super) fn post(&mut self, qp: &Qp, requests: Vec<Request>) -> Result<()> {
        if matches!(self.state, QueuePairState::Reset | QueuePairState::Error) {
            let cause = Cause::State { is: self.state, needs: QueuePairState::ReadyToSend };
            return Err(Error::new(VERB, cause));
        }
        let have = u64::from(qp.send_credit.capacity());
        let need = u64::from(qp.send_credit.used()) + requests.len() as u64;
        if need > have {
            return Err(Error::new(VERB, Cause::Limit { what: "max_send_wr", have, need }));
        }
        qp.send_credit.take(requests.len() as u32);
        self.requester.requests.extend(requests);
        Ok(())
    }

    /// Starts what can be started.
    pub(super) fn pump(&mut self, qp: &Arc<Qp>, out: &mut Out) {
        while self.state == QueuePairState::ReadyToSend && !self.requester.failed {
            let number = self.requester.next;
            let Some(request) = self.requester.request(number) else { break };
            let started = match request.opcode {
                Opcode::Read => self.start_read(qp, number, out),
                _ => self.start_write(qp, number),
            };
            if !started {
                break;
            }
            self.requester.next += 1;
        }
        self.deliver(qp, out);
    }

    /// Starts a read; `false` if it has to wait.
    fn start_read(&mut self, qp: &Arc<Qp>, number: u64, out: &mut Out) -> bool {
        let waits_for_writes = !self.requester.unanswered.is_empty();
        let (resolving, resolved) = (self.requester.resolving, self.requester.resolved);
        let Some(request) = self.requester.request(number) else { return false };
        let remote = request.remote;
        if request.bytes == 0 {
            request.end(CompletionStatus::Success);
            return true;
        }
        if waits_for_writes {
            return false;
        }
        let Some(region) = self.keys.get(&remote.rkey) else {
            if resolved == Some(remote.rkey) {
                request.end(CompletionStatus::RemoteAccess);
                self.requester.failed = true;
                return true;
            }
            if resolving.is_none() {
                // The region may be announced on this stream later than we heard of its key elsewhere.
                if let Some(link) = &mut self.link {
                    link.push(Frame::Resolve { key: remote.rkey });
                    self.requester.resolving = Some(remote.rkey);
                }
            }
            return false;
        };
        let Some(mut from) = region.range(remote.address, remote.len) else {
            request.end(CompletionStatus::RemoteAccess);
            self.requester.failed = true;
            return true;
        };
        let mut stretches = Vec::with_capacity(request.local.len());
        for slice in request.local.iter().filter(|slice| slice.len > 0) {
            let to = slice.region.memory.address().wrapping_add(slice.offset as usize);
            let len = slice.len as usize;
            stretches.push(Stretch { to, from, len });
            from = from.wrapping_add(len);
        }
        let local = core::mem::take(&mut request.local);
        let keep = Keep { segment: Some(region.segment.clone()), local, region: None };
        let purpose = Purpose::Read { queue_pair: qp.clone(), number };
        // SAFETY: `check` saw that every local range lies in its region, which allows writing; `keep` holds the regions
        // and the segment, whose range was just checked, and whose mapping is never the memory of a region. That nobody
        // else uses the destination is what the caller of `post_send` promised.
        #[allow(unsafe_code)]
        let job = unsafe { Job::copy(purpose, stretches, keep) };
        request.state = State::Copying(job.clone());
        out.jobs.push(job);
        self.requester.resolved = None;
        true
    }

    /// Sends the frames of a write or send; `false` if there is no connection.
    fn start_write(&mut self, qp: &Qp, number: u64) -> bool {
        let Some(link) = &mut self.link else { return false };
        let Some(request) = self.requester.request(number) else { return false };
        let (is_write, immediate) = match request.opcode {
            Opcode::WriteWithImmediate(value) => (true, Some(value)),
            Opcode::SendWithImmediate(value) => (false, Some(value)),
            opcode => (opcode == Opcode::Write, None),
        };
        let mut piece = Piece {
            id: number,
            target: is_write.then_some(Target { key: request.remote.rkey, offset: request.remote.address }),
            len: 0,
            source: Source::Inline,
            total: request.bytes,
            immediate,
            first: true,
            last: request.bytes == 0,
        };
        if request.bytes == 0 {
            link.push(Frame::Piece(piece));
        }
        let mut left = request.bytes;
        for slice in request.local.iter().filter(|slice| slice.len > 0) {
            left -= slice.len;
            piece.len = slice.len;
            piece.last = left == 0;
            let known = local_region(VERB, &qp.pd, slice).ok().map(Region::key);
            if let Some(key) = known.filter(|key| self.announced.contains(key)) {
                piece.source = Source::Region { key, offset: slice.offset };
                link.push(Frame::Piece(piece));
            } else {
                piece.source = Source::Inline;
                let address = slice.region.memory.address().wrapping_add(slice.offset as usize);
                // SAFETY: `check` saw that the range lies in the region, which the request holds until it is answered
                // or, after the link is dropped, flushed.
                #[allow(unsafe_code)]
                unsafe {
                    link.push_inline(piece, address)
                };
            }
            piece.first = false;
            if let Some(target) = &mut piece.target {
                target.offset = target.offset.wrapping_add(slice.len); // the owner checks it
            }
        }
        request.state = State::Sent;
        self.requester.unanswered.push_back(number);
        true
    }

    /// Completes what is over, in the order posted.
    pub(super) fn deliver(&mut self, qp: &Arc<Qp>, out: &mut Out) {
        while let Some(Request { state: State::Done(status), .. }) = self.requester.requests.front() {
            let status = *status;
            let Some(request) = self.requester.requests.pop_front() else { break };
            self.requester.base += 1;
            self.requester.next = self.requester.next.max(self.requester.base);
            let completion = Completion {
                id: request.id,
                status,
                opcode: request.opcode,
                bytes: if status == CompletionStatus::Success { request.bytes } else { 0 },
                immediate: None,
                queue_pair: qp.number,
                vendor_error: 0,
            };
            qp.send_cq.push(completion, &qp.send_credit);
            if !request.local.is_empty() {
                out.garbage.push(Garbage::Local(request.local));
            }
            if status != CompletionStatus::Success {
                // As in the verbs specification: a request that fails takes its queue pair to the error state.
                self.fail(qp, Some(Error::new(VERB, Cause::Denied { what: status.text() })), out);
            }
        }
    }
}
