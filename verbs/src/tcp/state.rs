//! What a queue pair has to do: the requests posted to it, the peer's requests, and what goes on the wire next.
//!
//! This is a state machine without I/O, under one short lock of its queue pair. Data that leaves is cut into segments of
//! at most [`SEGMENT`] bytes, each of which goes over whichever stream is free, so that one large request uses all
//! streams, and a key revoked in the middle of a response is answered soon. Writes, sends and immediates carry a sequence
//! number; the receiver does what must be in order (sends, immediates, reads after writes) only when everything before it
//! has been delivered, whatever stream that came by.
//!
//! Everything is bounded (I9): a requester keeps at most [`MAX_READS`] reads and [`WINDOW`] sequence numbers unanswered,
//! so what a responder has to remember is bounded too, and a peer that goes beyond breaks the protocol.

use super::completion_queue::{Account, Queue};
use super::keys::Exposure;
use super::sys::Pieces;
use super::wire::{HEADER, Header, Op, Refused};
use crate::{Completion, CompletionStatus, Error, LocalSlice, Opcode, QueuePairState, RemoteSlice};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

/// Most bytes of data behind one header, sends excepted.
pub(super) const SEGMENT: u64 = 4 << 20;
/// Most reads that a requester keeps unanswered.
pub(super) const MAX_READS: usize = 64;
/// Most sequence numbers that a requester keeps unacknowledged.
pub(super) const WINDOW: u32 = 128;
/// Most bytes of headers that leave in one call.
pub(super) const HEADERS: usize = 4096;

/// The local memory of one request, kept registered as long as somebody may touch it (I1).
#[derive(Debug)]
pub(super) struct Local {
    slices: Vec<LocalSlice>,
    len: u64,
}

impl Local {
    /// `slices`, whose lengths add up to `len`.
    pub(super) fn new(slices: Vec<LocalSlice>, len: u64) -> Self {
        Self { slices, len }
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Adds up to `max` bytes from `offset` on to `pieces`, and returns how many.
    pub(super) fn gather<'a>(&'a self, offset: u64, max: usize, pieces: &mut Pieces<'a>) -> usize {
        let mut added = 0;
        self.walk(offset, max as u64, |slice: &'a LocalSlice, from, len| {
            let fits = !pieces.is_full() && pieces.memory(slice.region.memory(), from, len as usize);
            added += if fits { len as usize } else { 0 };
            fits
        });
        added
    }

    /// Copies `bytes` to `offset`.
    pub(super) fn write(&self, offset: u64, bytes: &[u8]) {
        let mut rest = bytes;
        self.walk(offset, bytes.len() as u64, |slice, from, len| {
            let (now, later) = rest.split_at(len as usize);
            rest = later;
            slice.region.memory().write(from, now).is_ok()
        });
    }

    fn walk<'a>(&'a self, offset: u64, len: u64, mut visit: impl FnMut(&'a LocalSlice, u64, u64) -> bool) {
        let (mut skip, mut left) = (offset, len);
        for slice in &self.slices {
            if left == 0 {
                return;
            }
            if skip >= slice.len {
                skip -= slice.len;
                continue;
            }
            let now = left.min(slice.len - skip);
            if !visit(slice, slice.offset + skip, now) {
                return;
            }
            (skip, left) = (0, left - now);
        }
    }
}

/// Where data that leaves comes from.
#[derive(Debug, Clone)]
pub(super) enum Source {
    /// A request of our own.
    Own(Arc<Local>),
    /// Memory that the peer may read, as long as it may.
    Exposed(Arc<Exposure>),
    /// Memory that the peer was allowed to read when the segment began: zeros instead.
    Revoked,
}

/// The data behind a header on its way out.
#[derive(Debug)]
pub(super) struct Body {
    pub(super) source: Source,
    /// From the start of the request, or of the exposed memory.
    pub(super) offset: u64,
    pub(super) remaining: u64,
    /// Of which read, if a trailer follows.
    pub(super) answers: Option<u32>,
}

/// A posted send request that has not completed.
#[derive(Debug)]
pub(super) struct Posted {
    pub(super) id: u64,
    pub(super) opcode: Opcode,
    pub(super) local: Arc<Local>,
    pub(super) remote: RemoteSlice,
    /// Bytes that have been handed to streams.
    started: u64,
    /// Messages that have not been acknowledged.
    unacknowledged: u32,
    /// Bytes of a read that have arrived or are arriving.
    claimed: u64,
    /// Bytes of a read that have arrived.
    done: u64,
    ended: Option<CompletionStatus>,
}

impl Posted {
    pub(super) fn new(id: u64, opcode: Opcode, local: Arc<Local>, remote: RemoteSlice) -> Self {
        Self { id, opcode, local, remote, started: 0, unacknowledged: 0, claimed: 0, done: 0, ended: None }
    }
}

/// A posted receive.
#[derive(Debug)]
pub(super) struct Receive {
    pub(super) id: u64,
    pub(super) local: Arc<Local>,
}

/// A read of the peer's that is not wholly on its way.
#[derive(Debug)]
struct Response {
    id: u32,
    exposure: Arc<Exposure>,
    address: u64,
    len: u64,
    started: u64,
}

/// Which sequence numbers have been delivered: all below `base`, and those marked within the window.
#[derive(Debug, Default)]
pub(super) struct Delivered {
    base: u32,
    marks: u128,
}

/// Whether what must be in order may be done now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Due {
    Now,
    Later,
}

impl Delivered {
    /// Marks `seq`; whether `base` moved.
    fn mark(&mut self, seq: u32) -> Result<bool, Refused> {
        let ahead = seq.wrapping_sub(self.base);
        if ahead >= WINDOW {
            return Err("a sequence number outside the window");
        }
        if self.marks & 1 << ahead != 0 {
            return Err("a sequence number twice");
        }
        self.marks |= 1 << ahead;
        let before = self.base;
        while self.marks & 1 != 0 {
            self.marks >>= 1;
            self.base = self.base.wrapping_add(1);
        }
        Ok(before != self.base)
    }

    /// Whether everything below `seq`, which has not been delivered itself, has been.
    fn due(&self, seq: u32) -> Result<Due, Refused> {
        match seq.wrapping_sub(self.base) {
            0 => Ok(Due::Now),
            ahead if ahead < WINDOW => Ok(Due::Later),
            _ => Err("a sequence number outside the window"),
        }
    }

    /// Whether everything below `seq` has been delivered.
    fn passed(&self, seq: u32) -> Result<Due, Refused> {
        match seq.wrapping_sub(self.base) {
            0 => Ok(Due::Now),
            ahead if ahead <= WINDOW => Ok(Due::Later),
            behind if behind > u32::MAX / 2 => Ok(Due::Now),
            _ => Err("a sequence number outside the window"),
        }
    }
}

/// How a request of ours failed: it takes the queue pair with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Failed(pub(super) CompletionStatus);

/// See the module.
#[derive(Debug)]
pub(super) struct State {
    pub(super) phase: QueuePairState,
    /// Why it failed, once it has.
    pub(super) failure: Option<Error>,
    /// Set when it failed as the connection was lost: the error number for the oldest unfinished request.
    pub(super) lost: Option<i32>,
    /// What a refusal of ours was about: the cause, when the peer then closes.
    pub(super) refused: Option<Error>,

    sends: VecDeque<Posted>,
    /// Number of the first of `sends`, counted from the first ever posted.
    first: u64,
    /// Number of the request to start next.
    next: u64,
    reads: usize,
    next_seq: u32,
    /// The requests whose sequence numbers await their acknowledgement, from the oldest on.
    unacknowledged: VecDeque<Option<u64>>,

    delivered: Delivered,
    acks: VecDeque<Header>,
    responses: VecDeque<Response>,
    responses_turn: bool,

    receives: VecDeque<Receive>,
    /// The receive that a send is arriving in.
    filling: Option<Receive>,
    /// Since when a message has been waiting for a receive to be posted.
    pub(super) not_ready_since: Option<Instant>,
    /// Whether it has been waiting too long.
    pub(super) not_ready_expired: bool,

    /// When the device is going to look at this queue pair, if at all.
    pub(super) deadline: Option<Instant>,

    /// Memory of completed requests, to be let go of outside the lock.
    retired: Vec<Arc<Local>>,
}

impl State {
    pub(super) fn new() -> Self {
        Self {
            phase: QueuePairState::Reset,
            failure: None,
            lost: None,
            refused: None,
            sends: VecDeque::new(),
            first: 0,
            next: 0,
            reads: 0,
            next_seq: 0,
            unacknowledged: VecDeque::new(),
            delivered: Delivered::default(),
            acks: VecDeque::new(),
            responses: VecDeque::new(),
            responses_turn: false,
            receives: VecDeque::new(),
            filling: None,
            not_ready_since: None,
            not_ready_expired: false,
            deadline: None,
            retired: Vec::new(),
        }
    }

    pub(super) fn post(&mut self, request: Posted) {
        self.sends.push_back(request);
    }

    pub(super) fn post_receive(&mut self, receive: Receive) {
        self.receives.push_back(receive);
    }

    // ---- what goes out

    /// Adds headers to `out` for what is to be sent next, up to and including one that is followed by data.
    pub(super) fn pull(&mut self, out: &mut Vec<u8>) -> Option<Body> {
        while out.len() + HEADER <= HEADERS {
            if let Some(ack) = self.acks.pop_front() {
                out.extend_from_slice(&ack.encode());
                continue;
            }
            self.responses_turn = !self.responses_turn;
            let next = if self.responses_turn {
                self.next_response().or_else(|| self.next_request())
            } else {
                self.next_request().or_else(|| self.next_response())
            };
            let (header, body) = next?;
            out.extend_from_slice(&header.encode());
            if body.is_some() {
                return body;
            }
        }
        None
    }

    fn next_response(&mut self) -> Option<(Header, Option<Body>)> {
        let response = self.responses.front_mut()?;
        let id = response.id;
        if response.exposure.is_revoked() {
            self.refuse("a remote key that was revoked in the middle of a read");
            let status = CompletionStatus::RemoteAccess;
            return Some((Header { id, status, ..Header::new(Op::Refusal) }, None));
        }
        let len = SEGMENT.min(response.len - response.started);
        let header = Header { id, address: response.started, len, ..Header::new(Op::ReadData) };
        let body = Body {
            source: Source::Exposed(response.exposure.clone()),
            offset: response.address + response.started,
            remaining: len,
            answers: Some(id),
        };
        response.started += len;
        if response.started == response.len {
            self.responses.pop_front();
        }
        Some((header, Some(body)))
    }

    fn next_request(&mut self) -> Option<(Header, Option<Body>)> {
        let number = self.next;
        let request = self.sends.get_mut((number - self.first) as usize)?;
        let (len, seq, remote) = (request.local.len(), self.next_seq, request.remote);
        if request.opcode == Opcode::Read {
            if self.reads == MAX_READS {
                return None;
            }
            self.reads += 1;
            self.next += 1;
            let (address, rkey, id) = (remote.address, remote.rkey, number as u32);
            return Some((Header { id, seq, address, len, rkey, ..Header::new(Op::ReadRequest) }, None));
        }
        if self.unacknowledged.len() as u32 == WINDOW {
            return None;
        }
        let data_left = len - request.started;
        let (header, body_len) = match request.opcode {
            Opcode::Send => (Header { seq, len, ..Header::new(Op::Send) }, len),
            Opcode::SendWithImmediate(imm) => (Header { seq, len, imm, ..Header::new(Op::SendWithImmediate) }, len),
            Opcode::WriteWithImmediate(imm) if data_left == 0 => {
                (Header { seq, len, imm, ..Header::new(Op::Immediate) }, 0)
            }
            _ => {
                let len = SEGMENT.min(data_left);
                let address = remote.address + request.started;
                (Header { seq, address, len, rkey: remote.rkey, ..Header::new(Op::Write) }, len)
            }
        };
        let local = request.local.clone();
        let body = (header.op != Op::Immediate).then_some(Body {
            source: Source::Own(local),
            offset: request.started,
            remaining: body_len,
            answers: None,
        });
        request.started += body_len;
        request.unacknowledged += 1;
        let whole = match request.opcode {
            Opcode::WriteWithImmediate(_) => header.op == Op::Immediate,
            _ => request.started == len,
        };
        if whole {
            self.next += 1;
        }
        self.next_seq = seq.wrapping_add(1);
        self.unacknowledged.push_back(Some(number));
        Some((header, body))
    }

    // ---- answers to our requests

    /// Data of one of our reads begins to arrive: where it goes.
    pub(super) fn data_begins(&mut self, id: u32, offset: u64, len: u64) -> Result<Arc<Local>, Refused> {
        let read = self.read(id)?;
        let total = read.local.len();
        let inside = offset.checked_add(len).is_some_and(|end| end <= total) && len <= total - read.claimed;
        if !inside || (len == 0 && total != 0) {
            return Err("data that nobody asked for");
        }
        read.claimed += len;
        Ok(read.local.clone())
    }

    /// Data of one of our reads has arrived.
    pub(super) fn data_ends(&mut self, id: u32, len: u64, status: CompletionStatus) -> Result<(), AnswerError> {
        let read = self.read(id)?;
        if status != CompletionStatus::Success {
            read.ended = Some(status);
            return Err(AnswerError::Failed(Failed(status)));
        }
        read.done += len;
        if read.done == read.local.len() {
            read.ended = Some(CompletionStatus::Success);
            self.reads -= 1;
        }
        Ok(())
    }

    /// One of our reads is refused.
    pub(super) fn refusal(&mut self, id: u32, status: CompletionStatus) -> Result<Failed, Refused> {
        self.read(id)?.ended = Some(status);
        Ok(Failed(status))
    }

    /// The peer has answered the message of sequence number `seq`.
    pub(super) fn acknowledged(&mut self, seq: u32, status: CompletionStatus) -> Result<(), AnswerError> {
        let oldest = self.next_seq.wrapping_sub(self.unacknowledged.len() as u32);
        let at = seq.wrapping_sub(oldest) as usize;
        let number = self.unacknowledged.get_mut(at).and_then(Option::take).ok_or("an acknowledgement of nothing")?;
        while self.unacknowledged.front().is_some_and(Option::is_none) {
            self.unacknowledged.pop_front();
        }
        // A request stays in the queue until its last acknowledgement, so it is there.
        let request = self.sends.get_mut((number - self.first) as usize).ok_or("an acknowledgement of nothing")?;
        if status != CompletionStatus::Success {
            request.ended = Some(status);
            return Err(AnswerError::Failed(Failed(status)));
        }
        request.unacknowledged -= 1;
        if request.unacknowledged == 0 && number < self.next {
            request.ended = Some(CompletionStatus::Success);
        }
        Ok(())
    }

    /// An unanswered read by the low bits of its number.
    fn read(&mut self, id: u32) -> Result<&mut Posted, Refused> {
        let at = id.wrapping_sub(self.first as u32);
        let started = u64::from(at) < self.next - self.first;
        self.sends
            .get_mut(at as usize)
            .filter(|read| started && read.opcode == Opcode::Read && read.ended.is_none())
            .ok_or("an answer to nothing")
    }

    // ---- the peer's requests

    /// Queues a read of the peer's.
    pub(super) fn respond(&mut self, id: u32, exposure: Arc<Exposure>, address: u64, len: u64) -> Result<(), Refused> {
        if self.responses.len() == MAX_READS {
            return Err("more reads at once than the protocol allows");
        }
        self.responses.push_back(Response { id, exposure, address, len, started: 0 });
        Ok(())
    }

    /// Queues a refusal of the read `id`.
    pub(super) fn refuse_read(&mut self, id: u32) -> Result<(), Refused> {
        let status = CompletionStatus::RemoteAccess;
        self.answer(Header { id, status, ..Header::new(Op::Refusal) })?;
        self.refuse("a remote key that is unknown or revoked, out of bounds, or without the right");
        Ok(())
    }

    fn answer(&mut self, answer: Header) -> Result<(), Refused> {
        // A requester counts a message until it has its answer, so a peer that keeps to the window is never here with more.
        if self.acks.len() > WINDOW as usize {
            return Err("more messages at once than the protocol allows");
        }
        self.acks.push_back(answer);
        Ok(())
    }

    /// After a refusal the requester's queue pair goes to the error state, as the verbs have it; until it closes, nothing
    /// more of what it asks is done, so that a connection has one guess at a key.
    pub(super) fn refuse(&mut self, what: &'static str) {
        self.responses.clear();
        if self.refused.is_none() {
            self.refused = Some(Error::new("remote_access", crate::Cause::Denied { what }));
        }
    }

    pub(super) fn due(&self, seq: u32) -> Result<Due, Refused> {
        self.delivered.due(seq)
    }

    pub(super) fn passed(&self, seq: u32) -> Result<Due, Refused> {
        self.delivered.passed(seq)
    }

    /// Acknowledges a message that has been delivered; whether others may be due now.
    pub(super) fn deliver(&mut self, seq: u32) -> Result<bool, Refused> {
        let moved = self.delivered.mark(seq)?;
        self.answer(Header { seq, ..Header::new(Op::Ack) })?;
        Ok(moved)
    }

    /// Refuses a message.
    pub(super) fn refuse_message(&mut self, seq: u32, status: CompletionStatus) -> Result<(), Refused> {
        self.delivered.mark(seq)?;
        self.answer(Header { seq, status, ..Header::new(Op::Ack) })?;
        self.refuse(match status {
            CompletionStatus::ReceiverNotReadyExceeded => "a message for which no receive was posted in time",
            CompletionStatus::RemoteInvalidRequest => "a message longer than the receive posted for it",
            _ => "a remote key that is unknown or revoked, out of bounds, or without the right",
        });
        Ok(())
    }

    /// The oldest receive; it is not in the queue any more, but flushed with it until [`received`](Self::received).
    pub(super) fn take_receive(&mut self) -> Result<Option<&Receive>, Refused> {
        if self.filling.is_some() {
            return Err("two messages of one sequence number");
        }
        self.filling = self.receives.pop_front();
        if self.filling.is_some() {
            self.not_ready_since = None;
            self.not_ready_expired = false;
        }
        Ok(self.filling.as_ref())
    }

    /// Completes the receive that was taken.
    pub(super) fn received(
        &mut self,
        status: CompletionStatus,
        bytes: u64,
        immediate: Option<u32>,
        queue: (&Queue, &Arc<Account>),
        number: u32,
    ) {
        let Some(receive) = self.filling.take() else { return };
        let bytes = if status == CompletionStatus::Success { bytes } else { 0 };
        let (id, opcode) = (receive.id, Opcode::Receive);
        let done = Completion { id, status, opcode, bytes, immediate, queue_pair: number, vendor_error: 0 };
        queue.0.push(done, queue.1);
        self.retired.push(receive.local);
    }

    // ---- ends

    /// Completes what is done at the head of the queue, in the order posted.
    pub(super) fn retire(&mut self, queue: (&Queue, &Arc<Account>), number: u32) {
        // One that failed waits for the flush: other streams may still be in its memory.
        while self.sends.front().is_some_and(|front| front.ended == Some(CompletionStatus::Success)) {
            let Some(request) = self.sends.pop_front() else { return };
            self.first += 1;
            queue.0.push(completion(&request, CompletionStatus::Success, request.local.len(), number, 0), queue.1);
            self.retired.push(request.local);
        }
    }

    /// Completes everything: what is done at the head of the queue and what failed as it is, the oldest that is not done as
    /// lost if the connection was, the rest as flushed: also what other streams had done before an older one was, as
    /// requests succeed in the order posted. Nobody may be inside the memory any more.
    pub(super) fn flush(&mut self, sends: (&Queue, &Arc<Account>), receives: (&Queue, &Arc<Account>), number: u32) {
        let mut lost = self.lost;
        let mut in_order = true;
        for request in self.sends.drain(..) {
            let (status, errno) = match request.ended {
                Some(CompletionStatus::Success) if !in_order => (CompletionStatus::Flushed, 0),
                Some(status) => (status, 0),
                None => match lost.take() {
                    Some(errno) => (CompletionStatus::TransportRetryExceeded, errno),
                    None => (CompletionStatus::Flushed, 0),
                },
            };
            in_order &= status == CompletionStatus::Success;
            let bytes = if in_order { request.local.len() } else { 0 };
            sends.0.push(completion(&request, status, bytes, number, errno as u32), sends.1);
            self.retired.push(request.local);
        }
        self.next = self.first;
        while self.filling.is_some() || matches!(self.take_receive(), Ok(Some(_))) {
            self.received(CompletionStatus::Flushed, 0, None, receives, number);
        }
        self.responses.clear();
        self.acks.clear();
        self.unacknowledged.clear();
    }

    /// Memory of completed requests; to be dropped outside the lock.
    pub(super) fn take_retired(&mut self) -> Vec<Arc<Local>> {
        core::mem::take(&mut self.retired)
    }
}

/// What an answer of the peer's leads to, other than progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AnswerError {
    /// The request failed.
    Failed(Failed),
    /// The answer breaks the protocol.
    Malformed(Refused),
}

impl From<Refused> for AnswerError {
    fn from(what: Refused) -> Self {
        Self::Malformed(what)
    }
}

fn completion(
    request: &Posted,
    status: CompletionStatus,
    bytes: u64,
    queue_pair: u32,
    vendor_error: u32,
) -> Completion {
    let (id, opcode) = (request.id, request.opcode);
    Completion { id, status, opcode, bytes, immediate: None, queue_pair, vendor_error }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::HugePages;
    use crate::{Access, Memory};
    use proptest::prelude::*;

    const NOWHERE: RemoteSlice = RemoteSlice { address: 0, len: 0, rkey: 0 };

    fn queue(capacity: u32) -> (Queue, Arc<Account>) {
        let queue = Queue::new(capacity, Arc::new(super::super::sys::EventFd::new().unwrap()));
        let account = queue.reserve(capacity).unwrap();
        (queue, account)
    }

    /// A request of `len` bytes whose memory nobody looks at.
    fn request(id: u64, opcode: Opcode, len: u64) -> Posted {
        Posted::new(id, opcode, Arc::new(Local::new(Vec::new(), len)), NOWHERE)
    }

    fn exposure() -> Arc<Exposure> {
        let memory = Memory::shared(4096, HugePages::Off).unwrap();
        Arc::new(Exposure::new(memory, (0, 4096), Access::REMOTE_READ, 1, None))
    }

    /// The next headers that go out, and whether data follows the last.
    fn pulled(state: &mut State) -> (Vec<Header>, Option<Body>) {
        let mut bytes = Vec::new();
        let body = state.pull(&mut bytes);
        let headers = bytes.chunks_exact(HEADER).map(|one| Header::decode(one.first_chunk().unwrap()).unwrap());
        (headers.collect(), body)
    }

    /// Everything that would go out now.
    fn all(state: &mut State) -> Vec<Header> {
        let mut out = Vec::new();
        loop {
            let (headers, _) = pulled(state);
            if headers.is_empty() {
                return out;
            }
            out.extend(headers);
        }
    }

    #[test]
    fn data_is_cut_into_segments_that_cover_it_exactly() {
        for len in [0, 1, SEGMENT, SEGMENT + 1, 5 * SEGMENT - 1] {
            let mut state = State::new();
            state.post(request(1, Opcode::Write, len));
            let mut at = 0;
            for header in all(&mut state) {
                assert_eq!((header.op, header.address), (Op::Write, at));
                assert!(header.len <= SEGMENT);
                at += header.len;
            }
            assert_eq!(at, len);
        }
    }

    #[test]
    fn reads_and_sequence_numbers_beyond_the_window_wait() {
        let mut state = State::new();
        for id in 0..MAX_READS as u64 + 10 {
            state.post(request(id, Opcode::Read, 1));
        }
        assert_eq!(all(&mut state).len(), MAX_READS);
        state.data_begins(0, 0, 1).unwrap();
        state.data_ends(0, 1, CompletionStatus::Success).unwrap();
        assert_eq!(all(&mut state).len(), 1);

        let mut state = State::new();
        for id in 0..u64::from(WINDOW) + 10 {
            state.post(request(id, Opcode::Write, 1));
        }
        assert_eq!(all(&mut state).len(), WINDOW as usize);
        // An acknowledgement out of order frees nothing until the oldest is there.
        state.acknowledged(1, CompletionStatus::Success).unwrap();
        assert_eq!(all(&mut state).len(), 0);
        state.acknowledged(0, CompletionStatus::Success).unwrap();
        assert_eq!(all(&mut state).len(), 2);
        assert!(state.acknowledged(0, CompletionStatus::Success).is_err(), "twice");
    }

    #[test]
    fn completions_come_in_the_order_posted_whatever_the_order_of_answers() {
        let mut state = State::new();
        let (queue, account) = queue(8);
        for id in 0..4 {
            state.post(request(id, Opcode::Read, 10));
        }
        all(&mut state);
        let seen = |state: &mut State| {
            state.retire((&queue, &account), 1);
            let mut out = Vec::new();
            crate::backend::CqBackend::poll(&queue, &mut out, 8);
            out.iter().map(|done| done.id).collect::<Vec<_>>()
        };
        for (id, complete) in [(2, vec![]), (0, vec![0]), (3, vec![]), (1, vec![1, 2, 3])] {
            state.data_begins(id, 0, 10).unwrap();
            state.data_ends(id, 10, CompletionStatus::Success).unwrap();
            assert_eq!(seen(&mut state), complete);
        }
    }

    #[test]
    fn what_is_done_behind_what_is_not_flushes_with_it() {
        let mut state = State::new();
        let (queue, account) = queue(8);
        for id in 0..4 {
            state.post(request(id, Opcode::Read, 10));
        }
        all(&mut state);
        for id in [0, 2] {
            state.data_begins(id, 0, 10).unwrap();
            state.data_ends(id, 10, CompletionStatus::Success).unwrap();
        }
        state.flush((&queue, &account), (&queue, &account), 1);
        let mut out = Vec::new();
        crate::backend::CqBackend::poll(&queue, &mut out, 8);
        let seen: Vec<_> = out.iter().map(|done| (done.id, done.status, done.bytes)).collect();
        let flushed = |id| (id, CompletionStatus::Flushed, 0);
        assert_eq!(seen, [(0, CompletionStatus::Success, 10), flushed(1), flushed(2), flushed(3)]);
    }

    #[test]
    fn a_failed_request_completes_with_the_flush_only() {
        let mut state = State::new();
        let (queue, account) = queue(8);
        for id in 0..3 {
            state.post(request(id, Opcode::Read, 10));
        }
        all(&mut state);
        assert_eq!(state.refusal(1, CompletionStatus::RemoteAccess), Ok(Failed(CompletionStatus::RemoteAccess)));
        state.data_begins(0, 0, 10).unwrap();
        state.data_ends(0, 10, CompletionStatus::Success).unwrap();
        state.retire((&queue, &account), 1);
        state.lost = Some(libc::ECONNRESET);
        state.flush((&queue, &account), (&queue, &account), 1);
        let mut out = Vec::new();
        crate::backend::CqBackend::poll(&queue, &mut out, 8);
        let seen: Vec<_> = out.iter().map(|done| (done.id, done.status)).collect();
        let wanted = [
            (0, CompletionStatus::Success),
            (1, CompletionStatus::RemoteAccess),
            (2, CompletionStatus::TransportRetryExceeded),
        ];
        assert_eq!(seen, wanted);
    }

    #[test]
    fn acknowledgements_go_first_and_reads_of_both_ends_take_turns() {
        let mut state = State::new();
        state.respond(7, exposure(), 0, 4096).unwrap();
        for id in 0..2 {
            state.post(request(id, Opcode::Write, 1));
        }
        state.deliver(0).unwrap();
        let ops: Vec<_> = all(&mut state).iter().map(|header| header.op).collect();
        assert_eq!(ops[0], Op::Ack);
        assert_eq!(ops.len(), 4);
        assert_ne!(ops[1..], [Op::Write, Op::Write, Op::ReadData], "the answer is not last in the queue");
    }

    #[test]
    fn a_response_under_a_revoked_key_is_a_refusal() {
        let mut state = State::new();
        let exposure = exposure();
        state.respond(7, exposure.clone(), 0, 4096).unwrap();
        assert!(exposure.revoke());
        let headers = all(&mut state);
        assert_eq!((headers[0].op, headers[0].id, headers.len()), (Op::Refusal, 7, 1));
        assert!(state.refused.is_some());
    }

    #[test]
    fn what_a_peer_can_make_us_remember_is_bounded() {
        let mut state = State::new();
        let exposure = exposure();
        let accepted = (0..1000).take_while(|id| state.respond(*id, exposure.clone(), 0, 1).is_ok()).count();
        assert_eq!(accepted, MAX_READS);
        let accepted = (0..1000).take_while(|seq| state.deliver(*seq).is_ok()).count();
        assert!(accepted <= WINDOW as usize + 1, "{accepted}");
    }

    proptest! {
        /// Against the plain model: a set of what has been delivered.
        #[test]
        fn delivery_is_tracked_over_any_order_and_over_the_wrap(
            start in prop_oneof![Just(0u32), Just(u32::MAX - 20), any::<u32>()],
            steps in proptest::collection::vec(0u32..200, 1..300),
        ) {
            let mut delivered = Delivered { base: start, marks: 0 };
            let mut model = std::collections::BTreeSet::new();
            let mut low = 0u32;
            for ahead in steps {
                let (number, seq) = (low + ahead, start.wrapping_add(low + ahead));
                let fits = ahead < WINDOW && !model.contains(&number);
                prop_assert_eq!(delivered.mark(seq).is_ok(), fits);
                if fits {
                    model.insert(number);
                }
                while model.contains(&low) {
                    low += 1;
                }
                prop_assert_eq!(delivered.base, start.wrapping_add(low));
                prop_assert_eq!(delivered.due(start.wrapping_add(low)), Ok(Due::Now));
                prop_assert_eq!(delivered.passed(start.wrapping_add(low)), Ok(Due::Now));
                prop_assert_eq!(delivered.passed(start.wrapping_add(low + 1)), Ok(Due::Later));
            }
        }
    }
}
