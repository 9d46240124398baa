//! The peer's requests: writes and sends, done by us in our memory.
//!
//! They are done one after the other, each piece copied from the peer's segment (or from the stream) before the next
//! frame is read, and answered when all is there. Before anything of a finished request is shown to the caller, the
//! connection is looked at once more: a peer that gave the request up closed it first, and may have re-used the bytes
//! that we were copying, so nothing is delivered then (I4).
//!
//! A request that needs a receive when none is posted waits for one, with everything behind it on the stream, until
//! [`receiver_not_ready_timeout`](super::super::ShmConfig::receiver_not_ready_timeout); then it is refused.

use super::super::domain::{Pd, Region};
use super::super::engine::{Job, Keep, Over, Purpose, Stretch};
use super::super::frame::{Frame, Piece, Source, Target};
use super::super::link::malformed;
use super::requester::local_region;
use super::{Garbage, Inner, Out, Qp, most_answers};
use crate::{Access, Cause, Completion, CompletionStatus, Error, Opcode, QueuePairState, ReceiveRequest, Result};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

const VERB: &str = "post_recv";

#[derive(Debug, Default)]
pub(super) struct Responder {
    receives: VecDeque<ReceiveRequest>,
    /// The request whose pieces are coming in.
    request: Option<Served>,
    /// The copy of its last piece, while it runs.
    copying: Option<Arc<Job>>,
    /// A receive is needed, and waited for until then.
    starved: Option<Instant>,
    /// The first piece of a send that waits for its receive. Its bytes, if inline, stay in the link until it is served.
    held: Option<Piece>,
}

/// A request of the peer.
#[derive(Debug)]
struct Served {
    id: u64,
    is_write: bool,
    immediate: Option<u32>,
    total: u64,
    /// Bytes of the pieces that came.
    moved: u64,
    /// All pieces came.
    whole: bool,
    /// Why it isn't done; its other pieces are passed over.
    refused: Option<CompletionStatus>,
    /// The receive that a send fills.
    receive: Option<ReceiveRequest>,
}

/// Checks a receive.
pub(super) fn check(pd: &Arc<Pd>, request: &ReceiveRequest) -> Result<()> {
    if let Some(slice) = &request.local {
        let region = local_region(VERB, pd, slice)?;
        if !region.access().contains(Access::LOCAL_WRITE) {
            return Err(Error::new(VERB, Cause::Denied { what: "LOCAL_WRITE for a receive" }));
        }
    }
    Ok(())
}

impl Responder {
    /// Whether a copier may be in memory of ours.
    pub(super) fn is_copying(&self) -> bool {
        self.copying.is_some()
    }

    /// Whether the stream is read: not while the peer's last request is at work or waits.
    pub(super) fn is_reading(&self) -> bool {
        self.copying.is_none() && self.starved.is_none()
    }

    /// The peer is gone: waiting for a receive is in vain.
    pub(super) fn stop_waiting(&mut self) {
        if let Some(until) = &mut self.starved {
            *until = Instant::now();
        }
    }

    /// Has no further piece copied; returns whether there was a job.
    pub(super) fn abort(&mut self) -> bool {
        let Some(job) = &self.copying else { return false };
        if job.abort().is_some() {
            self.copying = None;
        }
        true
    }
}

impl Inner {
    pub(super) fn post_receive(&mut self, qp: &Qp, request: ReceiveRequest, out: &mut Out) -> Result<()> {
        if self.state == QueuePairState::Error {
            let cause = Cause::State { is: self.state, needs: QueuePairState::ReadyToSend };
            return Err(Error::new(VERB, cause));
        }
        let have = u64::from(qp.recv_credit.capacity());
        let need = u64::from(qp.recv_credit.used()) + 1;
        if need > have {
            return Err(Error::new(VERB, Cause::Limit { what: "max_recv_wr", have, need }));
        }
        qp.recv_credit.take(1);
        self.responder.receives.push_back(request);
        out.come_back |= self.responder.starved.is_some();
        Ok(())
    }

    /// Goes on with a request that waited for a receive, if there is one now or it has waited long enough.
    pub(super) fn resume(&mut self, qp: &Arc<Qp>, out: &mut Out) -> Result<Option<Arc<Job>>> {
        let Some(until) = self.responder.starved else { return Ok(None) };
        if self.responder.receives.is_empty() && Instant::now() < until {
            return Ok(None);
        }
        self.responder.starved = None;
        match self.responder.held.take() {
            Some(piece) => {
                if let Some(request) = &mut self.responder.request {
                    match self.responder.receives.pop_front() {
                        Some(receive) => match_receive(qp, request, receive, out),
                        None => request.refused = Some(CompletionStatus::ReceiverNotReadyExceeded),
                    }
                }
                self.serve_piece(qp, &piece, out)
            }
            None => {
                let starved = self.responder.receives.is_empty();
                if let Some(request) = self.responder.request.as_mut().filter(|_| starved) {
                    request.refused = Some(CompletionStatus::ReceiverNotReadyExceeded);
                }
                self.finish_request(qp, out)?;
                Ok(None)
            }
        }
    }

    /// Waits for a receive.
    fn starve(&mut self, qp: &Qp) -> Result<()> {
        let until = Instant::now() + qp.device().receiver_not_ready_timeout();
        self.responder.starved = Some(until);
        qp.device().wake_at(until, qp.number)
    }

    /// Takes a piece of a request; returns the copy that it asks for. An error is a broken rule, and the end of the
    /// connection; a request that isn't allowed is answered.
    pub(super) fn serve(&mut self, qp: &Arc<Qp>, piece: &Piece, out: &mut Out) -> Result<Option<Arc<Job>>> {
        self.accept(piece)?;
        if piece.first && piece.target.is_none() {
            match (self.responder.receives.pop_front(), &mut self.responder.request) {
                (Some(receive), Some(request)) => match_receive(qp, request, receive, out),
                _ => {
                    self.responder.held = Some(*piece);
                    self.starve(qp)?;
                    return Ok(None);
                }
            }
        }
        self.serve_piece(qp, piece, out)
    }

    fn serve_piece(&mut self, qp: &Arc<Qp>, piece: &Piece, out: &mut Out) -> Result<Option<Arc<Job>>> {
        let job = self.copy_piece(qp, piece);
        match job {
            Ok(Some(job)) => {
                self.responder.copying = Some(job.clone());
                Ok(Some(job))
            }
            Ok(None) => {
                self.finish_request(qp, out)?;
                Ok(None)
            }
            Err(status) => {
                if let Some(request) = &mut self.responder.request {
                    request.refused = Some(status);
                }
                self.finish_request(qp, out)?;
                Ok(None)
            }
        }
    }

    /// Begins a request or goes on with the one at hand, by the rules of the protocol.
    fn accept(&mut self, piece: &Piece) -> Result<()> {
        if piece.first {
            if self.responder.request.is_some() {
                return Err(malformed("a request within another"));
            }
            self.responder.request = Some(Served {
                id: piece.id,
                is_write: piece.target.is_some(),
                immediate: piece.immediate,
                total: piece.total,
                moved: 0,
                whole: false,
                refused: None,
                receive: None,
            });
        }
        let Some(request) = &mut self.responder.request else {
            return Err(malformed("the rest of a request that has no beginning"));
        };
        let same = (piece.id, piece.target.is_some(), piece.immediate, piece.total)
            == (request.id, request.is_write, request.immediate, request.total);
        if !same {
            return Err(malformed("pieces that are not of one request"));
        }
        let left = request.total - request.moved;
        if piece.len > left || piece.last != (piece.len == left) {
            return Err(malformed("pieces that are not as long as their request"));
        }
        request.moved += piece.len;
        request.whole = piece.last;
        Ok(())
    }

    /// Copies an inline piece, or makes the job that copies another; `Err` if the piece isn't allowed.
    fn copy_piece(&self, qp: &Arc<Qp>, piece: &Piece) -> Result<Option<Arc<Job>>, CompletionStatus> {
        let Some(request) = &self.responder.request else { return Ok(None) };
        if let Some(status) = request.refused {
            return Err(status);
        }
        if piece.len == 0 {
            return Ok(None);
        }
        let (to, region, local) = match (piece.target, &request.receive) {
            (Some(Target { key, offset }), _) => {
                let region = qp.pd.region(key).filter(|region| region.access().contains(Access::REMOTE_WRITE));
                let Some(region) = region else { return Err(CompletionStatus::RemoteAccess) };
                let Some(to) = region.range(offset, piece.len) else { return Err(CompletionStatus::RemoteAccess) };
                (to, Some(region), Vec::new())
            }
            (None, Some(ReceiveRequest { local: Some(slice), .. })) => {
                let done = request.moved - piece.len; // `accept` has counted this piece
                let region: Option<&Region> = slice.region.backend.as_any().downcast_ref();
                let to = region.and_then(|region| region.range(slice.offset + done, piece.len));
                let Some(to) = to else { return Err(CompletionStatus::RemoteOperation) };
                (to, None, vec![slice.clone()])
            }
            (None, _) => return Err(CompletionStatus::RemoteOperation),
        };
        let len = piece.len as usize;
        match piece.source {
            Source::Inline => {
                let Some(link) = &self.link else { return Err(CompletionStatus::RemoteOperation) };
                let bytes = link.payload();
                debug_assert_eq!(bytes.len(), len);
                // SAFETY: `bytes` are `len` bytes of the link's own buffer; `to` has room for `len` by `range`, in
                // memory that `region` or the receive holds, and that its owner lets the peer write.
                #[allow(unsafe_code)]
                unsafe {
                    crate::copy::copy(to, bytes.as_ptr(), bytes.len())
                };
                Ok(None)
            }
            Source::Region { key, offset } => {
                let found = self.keys.get(&key);
                let from = found.and_then(|region| region.range(offset, piece.len));
                let (Some(from), Some(found)) = (from, found) else {
                    return Err(CompletionStatus::RemoteInvalidRequest);
                };
                let keep = Keep { segment: Some(found.segment.clone()), local, region };
                let purpose = Purpose::Serve { queue_pair: qp.clone() };
                // SAFETY: both ranges were checked; `keep` holds the peer's mapping and our region. The mapping is
                // another one than our memory's, even where both show the same pages.
                #[allow(unsafe_code)]
                Ok(Some(unsafe { Job::copy(purpose, vec![Stretch { to, from, len }], keep) }))
            }
        }
    }

    /// The copy of a piece is over.
    pub(super) fn served_is_over(&mut self, qp: &Arc<Qp>, over: Over, out: &mut Out) {
        self.responder.copying = None;
        if self.state == QueuePairState::Error || over.skipped {
            self.flush_receives(qp, out);
        } else if let Err(error) = self.finish_request(qp, out) {
            self.fail(qp, Some(error), out);
        }
    }

    /// Answers a request that is whole, and shows it to the caller if it takes a receive.
    fn finish_request(&mut self, qp: &Qp, out: &mut Out) -> Result<()> {
        let Some(mut request) = self.responder.request.take_if(|request| request.whole) else { return Ok(()) };
        if request.is_write && request.immediate.is_some() && request.refused.is_none() {
            request.receive = self.responder.receives.pop_front();
            if request.receive.is_none() {
                self.responder.request = Some(request);
                return self.starve(qp);
            }
        }
        let Some(link) = &mut self.link else { return Ok(()) };
        if let Some(receive) = request.receive.take() {
            if link.hung_up() {
                // Not delivered: it goes back, and flushes when the end of the stream is read.
                self.responder.receives.push_front(receive);
                return Ok(());
            }
            let status = request.refused.map_or(CompletionStatus::Success, |_| CompletionStatus::Flushed);
            complete(qp, receive, status, request.total, request.immediate, out);
        }
        let status = request.refused.unwrap_or(CompletionStatus::Success);
        let bytes = if status == CompletionStatus::Success { request.total } else { 0 };
        link.push_answer(Frame::Ack { id: request.id, status, bytes });
        if link.unsent_answers() > most_answers(self.peer_max_send_wr) {
            return Err(malformed("more requests than its send queue holds"));
        }
        Ok(())
    }

    /// Completes all receives of a queue pair that has failed, once nobody copies into one.
    pub(super) fn flush_receives(&mut self, qp: &Qp, out: &mut Out) {
        if self.state != QueuePairState::Error || self.responder.is_copying() {
            return;
        }
        self.responder.starved = None;
        let begun = self.responder.request.take().and_then(|request| request.receive);
        for receive in begun.into_iter().chain(self.responder.receives.drain(..)) {
            complete(qp, receive, CompletionStatus::Flushed, 0, None, out);
        }
    }
}

/// Gives a send the receive that it fills, or refuses it if that is too short.
fn match_receive(qp: &Qp, request: &mut Served, receive: ReceiveRequest, out: &mut Out) {
    let room = receive.local.as_ref().map_or(0, |slice| slice.len);
    if request.total > room {
        request.refused = Some(CompletionStatus::RemoteInvalidRequest);
        complete(qp, receive, CompletionStatus::LocalLength, 0, None, out);
    } else {
        request.receive = Some(receive);
    }
}

fn complete(
    qp: &Qp,
    receive: ReceiveRequest,
    status: CompletionStatus,
    bytes: u64,
    immediate: Option<u32>,
    out: &mut Out,
) {
    let success = status == CompletionStatus::Success;
    let completion = Completion {
        id: receive.id,
        status,
        opcode: Opcode::Receive,
        bytes: if success { bytes } else { 0 },
        immediate: immediate.filter(|_| success),
        queue_pair: qp.number,
        vendor_error: 0,
    };
    qp.recv_cq.push(completion, &qp.recv_credit);
    out.garbage.push(Garbage::Receive(receive));
}
