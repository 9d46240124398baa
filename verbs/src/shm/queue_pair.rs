//! Queue pairs: their state, their connection, and the lock around both.
//!
//! Everything about a queue pair is under one lock, which is never held while memory is copied (but for the few
//! kilobytes of an inline piece). What has to happen outside of it is collected in an [`Out`]: jobs to run, and things
//! whose drop may take long.

use super::address::{Address, same_token};
use super::completion_queue::{Cq, Credit};
use super::device::ShmDevice;
use super::domain::{Pd, Region};
use super::engine::{Job, Over};
use super::frame::{FRAME, Frame};
use super::link::{Incoming, Link, malformed};
use super::segment::{Segment, View};
use super::{MAX_RECV_WR, MAX_REGIONS, MAX_SEND_WR, lock, sys};
use crate::backend::{QpBackend, ViewBackend};
use crate::memory_region::check_range;
use crate::{Cause, Error, QueuePairCapacity, QueuePairState, ReceiveRequest, RemoteSlice, Result, Token, WorkRequest};
use core::any::Any;
use core::mem;
use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

mod requester;
mod responder;

use requester::Requester;
use responder::Responder;

/// Frames that one call of [`Qp::service`] handles before it lets the thread do something else.
const FRAMES_AT_ONCE: usize = 256;
/// Small jobs that the thread which posts them copies itself, in bytes a call; the rest is queued.
const COPY_AT_POST: u64 = 256 << 10;
/// When a socket whose backlog is full is dialled again, and how often in all: for two seconds.
const REDIAL: Duration = Duration::from_millis(2);
const MAX_DIALS: u32 = 1000;

#[derive(Debug)]
pub(super) struct Qp {
    number: u32,
    token: Token,
    pd: Arc<Pd>,
    send_cq: Arc<Cq>,
    recv_cq: Arc<Cq>,
    send_credit: Arc<Credit>,
    recv_credit: Arc<Credit>,
    inner: Mutex<Inner>,
}

/// What is under the lock.
#[derive(Debug)]
struct Inner {
    state: QueuePairState,
    failure: Option<Error>,
    /// Set by `connect`: the other end, and whether we dial it.
    peer: Option<(Address, bool)>,
    /// A stream that was adopted before `connect` was called.
    early: Option<OwnedFd>,
    dials: u32,
    link: Option<Link>,
    /// How many requests the peer may have unanswered, by its greeting.
    peer_max_send_wr: u32,
    /// Keys of ours that the peer has been told.
    announced: HashSet<u64>,
    /// Keys of the peer's.
    keys: HashMap<u64, PeerRegion>,
    requester: Requester,
    responder: Responder,
}

/// A region that the peer lets us read.
#[derive(Debug)]
struct PeerRegion {
    segment: Arc<Segment>,
    len: u64,
}

impl PeerRegion {
    /// The `len` bytes at `offset`, if the region has them.
    fn range(&self, offset: u64, len: u64) -> Option<*const u8> {
        check_range("remote", offset, len, self.len).ok()?;
        self.segment.range(offset, len)
    }
}

/// What is left to do without the lock.
#[derive(Debug, Default)]
struct Out {
    jobs: Vec<Arc<Job>>,
    /// Jobs were aborted: the engine may still list them.
    aborted: bool,
    /// The next progress has something to do for this queue pair.
    come_back: bool,
    /// To be dropped: mappings, memory, descriptors.
    garbage: Vec<Garbage>,
}

#[derive(Debug)]
#[allow(dead_code)] // held only to be dropped
enum Garbage {
    Keys(HashMap<u64, PeerRegion>),
    Segment(Arc<Segment>),
    Local(Vec<crate::LocalSlice>),
    Receive(ReceiveRequest),
    Stream(OwnedFd),
}

/// What [`Inner::step`] came to.
enum Step {
    /// Nothing more to do until the stream is ready or a job is over.
    Idle,
    /// There may be more to read.
    More,
    /// A small job to copy at once; then there may be more to read.
    Run(Arc<Job>),
}

impl Qp {
    fn device(&self) -> &Arc<ShmDevice> {
        self.pd.device()
    }

    /// Runs `action` under the lock, sends what it left to send, and does the rest without the lock.
    fn with<T>(self: &Arc<Self>, action: impl FnOnce(&mut Inner, &mut Out) -> T) -> T {
        let mut out = Out::default();
        let result = {
            let mut inner = lock(&self.inner);
            let result = action(&mut inner, &mut out);
            inner.settle(self, &mut out);
            result
        };
        self.finish(out);
        result
    }

    fn finish(self: &Arc<Self>, mut out: Out) {
        if out.aborted {
            self.device().engine().tidy();
        }
        if !out.jobs.is_empty() {
            self.device().engine().submit(mem::take(&mut out.jobs));
        }
        if out.come_back {
            self.device().come_back(self);
        }
    }

    /// Reads the stream and does what it says, for a bounded time; if there may be more, the device comes back to it.
    pub(super) fn service(self: &Arc<Self>) {
        for _ in 0..FRAMES_AT_ONCE {
            match self.with(|inner, out| inner.step(self, out)) {
                Step::Idle => return,
                Step::More => break,
                Step::Run(job) => job.run_alone(),
            }
        }
        // What is in our buffer already makes no stream ready.
        self.device().come_back(self);
    }

    /// The poller found the stream ready; `closed` if the peer has closed it or it broke.
    pub(super) fn stream_is_ready(self: &Arc<Self>, closed: bool) {
        if closed {
            let mut inner = lock(&self.inner);
            let inner = &mut *inner;
            inner.responder.stop_waiting();
            if inner.responder.is_copying() {
                // What is left will be read when the copy is over; until then the stream would only keep us awake.
                if let Some(link) = &mut inner.link {
                    link.unwatch(self.device().poller());
                }
                return;
            }
        }
        self.service();
    }

    /// The time has come that it asked the device for.
    pub(super) fn time_has_come(self: &Arc<Self>) {
        self.dial(); // if it is that which it waits for
        self.service();
    }

    /// A job of a read is over.
    pub(super) fn read_is_over(self: &Arc<Self>, number: u64, over: Over) {
        self.with(|inner, out| {
            inner.requester.read_is_over(number, over);
            inner.deliver(self, out);
            inner.pump(self, out);
        });
    }

    /// A job of the peer's request is over.
    pub(super) fn served_is_over(self: &Arc<Self>, over: Over) {
        self.with(|inner, out| inner.served_is_over(self, over, out));
    }

    /// Tells the peer of a region, if it isn't told yet.
    pub(super) fn announce(self: &Arc<Self>, region: &Region) {
        self.with(|inner, _| inner.announce(region));
    }

    /// Tells the peer that a region is no more, if it knows it.
    pub(super) fn withdraw(self: &Arc<Self>, key: u64) {
        self.with(|inner, _| {
            if inner.announced.remove(&key)
                && let Some(link) = &mut inner.link
                && !link.recall_region(key)
            {
                link.push(Frame::Withdraw { key });
            }
        });
    }

    /// Takes a stream that began with our token.
    pub(super) fn adopt(self: &Arc<Self>, stream: OwnedFd) -> Result<()> {
        self.with(|inner, out| {
            let late = Err(Error::new("adopt", Cause::NotFound { what: "queue pair that waits for this token" }));
            match (inner.state, &inner.peer) {
                (QueuePairState::Reset, None) => inner.early = Some(stream),
                (QueuePairState::Connecting, Some((_, false))) if inner.link.is_none() => {
                    inner.greet(self, stream, &[])
                }
                _ => {
                    out.garbage.push(Garbage::Stream(stream));
                    return late;
                }
            }
            Ok(())
        })
    }

    /// Opens the connection, or has the device come again when the peer's backlog is full.
    pub(super) fn dial(self: &Arc<Self>) {
        let (name, token) = {
            let inner = lock(&self.inner);
            match &inner.peer {
                Some((peer, true)) if inner.is_to_dial() => (peer.name.clone(), peer.token),
                _ => return,
            }
        };
        let dialled = sys::dial(&name);
        let preface = self.device().preface(token); // foreign code, so without the lock
        self.with(|inner, out| {
            if !inner.is_to_dial() {
                return;
            }
            inner.dials += 1;
            let failure = match dialled {
                Ok(stream) => match self.device().check_peer("modify_qp", stream.as_fd()) {
                    Ok(()) => return inner.greet(self, stream, &preface),
                    Err(denied) => denied,
                },
                Err(e) if e.kind() == io::ErrorKind::WouldBlock && inner.dials < MAX_DIALS => {
                    match self.device().wake_at(Instant::now() + REDIAL, self.number) {
                        Ok(()) => return,
                        Err(e) => e,
                    }
                }
                Err(e) => Error::from_io("modify_qp", "connect", &e),
            };
            inner.fail(self, Some(failure), out);
        });
    }
}

impl Inner {
    fn new() -> Self {
        Self {
            state: QueuePairState::Reset,
            failure: None,
            peer: None,
            early: None,
            dials: 0,
            link: None,
            peer_max_send_wr: 0,
            announced: HashSet::new(),
            keys: HashMap::new(),
            requester: Requester::default(),
            responder: Responder::default(),
        }
    }

    fn is_to_dial(&self) -> bool {
        self.state == QueuePairState::Connecting && self.link.is_none()
    }

    /// Begins to speak on a new stream: the preface, if we dialled, and the greeting.
    fn greet(&mut self, qp: &Qp, stream: OwnedFd, preface: &[u8]) {
        let Some((peer, _)) = &self.peer else { return };
        let mut link = Link::new(stream);
        if !preface.is_empty() {
            link.push_bytes(preface);
        }
        link.push(Frame::Hello { number: qp.number, token: peer.token, max_send_wr: qp.send_credit.capacity() });
        self.link = Some(link);
    }

    /// Sends what waits and tells the poller what to look for.
    fn settle(&mut self, qp: &Arc<Qp>, out: &mut Out) {
        let reading = self.responder.is_reading();
        let Some(link) = &mut self.link else { return };
        let result = link.flush().and_then(|()| link.watch(qp.device().poller(), qp.number, reading));
        if let Err(error) = result {
            self.fail(qp, Some(error), out);
        }
    }

    /// Handles frames until there is none, or one asks for a copy.
    fn step(&mut self, qp: &Arc<Qp>, out: &mut Out) -> Step {
        for _ in 0..FRAMES_AT_ONCE {
            if self.responder.is_copying() {
                return Step::Idle; // the peer's requests are done one after the other
            }
            let Some(link) = &mut self.link else { return Step::Idle };
            let job = if self.responder.is_reading() {
                match link.next() {
                    Ok(Incoming::Nothing) => return Step::Idle,
                    Ok(Incoming::End) => Err(Error::new("connection", Cause::Disconnected)),
                    Ok(Incoming::Frame(frame)) => self.handle(qp, frame, out),
                    Err(error) => Err(error),
                }
            } else {
                match self.resume(qp, out) {
                    Ok(None) if !self.responder.is_reading() => return Step::Idle,
                    outcome => outcome,
                }
            };
            match job {
                Ok(None) => {}
                Ok(Some(job)) if job.is_small() => return Step::Run(job),
                Ok(Some(job)) => {
                    out.jobs.push(job);
                    return Step::Idle;
                }
                Err(error) => {
                    self.fail(qp, Some(error), out);
                    return Step::Idle;
                }
            }
        }
        Step::More
    }

    fn handle(&mut self, qp: &Arc<Qp>, frame: Frame, out: &mut Out) -> Result<Option<Arc<Job>>> {
        match frame {
            Frame::Hello { number, token, max_send_wr } => {
                self.hello(qp, number, &token, max_send_wr)?;
                for region in qp.pd.readable() {
                    self.announce(&region);
                }
                self.pump(qp, out);
            }
            _ if self.state != QueuePairState::ReadyToSend => return Err(malformed("a frame before the greeting")),
            Frame::Region { key, len } => {
                self.learn(key, len, out)?;
                self.pump(qp, out);
            }
            Frame::Withdraw { key } => {
                let Some(region) = self.keys.remove(&key) else { return Err(malformed("withdrawal of no region")) };
                out.garbage.push(Garbage::Segment(region.segment));
            }
            Frame::Resolve { key } => {
                if !self.link.as_mut().is_some_and(|link| link.push_resolved(key)) {
                    return Err(malformed("a question before the answer to the last"));
                }
            }
            Frame::Resolved { key } => {
                self.requester.resolved(key)?;
                self.pump(qp, out);
            }
            Frame::Ack { id, status, bytes } => {
                self.requester.answered(id, status, bytes)?;
                self.deliver(qp, out);
                self.pump(qp, out);
            }
            Frame::Piece(piece) => return self.serve(qp, &piece, out),
        }
        Ok(None)
    }

    fn hello(&mut self, qp: &Qp, number: u32, token: &Token, max_send_wr: u32) -> Result<()> {
        let Some((peer, _)) = &self.peer else { return Err(malformed("a greeting out of order")) };
        if self.state != QueuePairState::Connecting {
            return Err(malformed("a second greeting"));
        }
        if !same_token(token, &qp.token) || number != peer.number {
            return Err(malformed("a greeting of another queue pair"));
        }
        if max_send_wr > MAX_SEND_WR {
            return Err(malformed("a send queue longer than there is"));
        }
        self.peer_max_send_wr = max_send_wr;
        self.state = QueuePairState::ReadyToSend;
        Ok(())
    }

    fn announce(&mut self, region: &Region) {
        if self.state == QueuePairState::ReadyToSend
            && let Some(link) = &mut self.link
            && self.announced.insert(region.key())
        {
            link.push_region(region.key(), region.memory().clone());
        }
    }

    /// The peer has announced a region.
    fn learn(&mut self, key: u64, len: u64, out: &mut Out) -> Result<()> {
        let descriptor = self.link.as_mut().and_then(Link::take_descriptor);
        let Some(descriptor) = descriptor else { return Err(malformed("a region without a descriptor")) };
        if len == 0 || self.keys.contains_key(&key) || self.keys.len() as u64 >= MAX_REGIONS {
            return Err(malformed("a region of no bytes, twice, or one too many"));
        }
        let (segment, is_new) = Segment::open(descriptor, len)?;
        if is_new {
            out.jobs.push(Job::populate(segment.clone()));
        }
        self.keys.insert(key, PeerRegion { segment, len });
        Ok(())
    }

    /// Moves to the error state: no piece is begun any more, the connection ends, everything flushes. What is being
    /// copied this moment flushes when its copier has left (I3).
    fn fail(&mut self, qp: &Arc<Qp>, cause: Option<Error>, out: &mut Out) {
        if self.state == QueuePairState::Error {
            return;
        }
        self.state = QueuePairState::Error;
        self.failure = cause;
        // The connection ends before any flushed completion can be seen: what the peer still does with a request of
        // ours it then doesn't deliver (see `Responder`).
        if let Some(link) = self.link.take() {
            link.close(qp.device().poller());
        }
        out.garbage.extend(self.early.take().map(Garbage::Stream));
        out.garbage.push(Garbage::Keys(mem::take(&mut self.keys)));
        self.announced.clear();
        // What broke the connection is told by the oldest request that was at work, as in the verbs.
        let lost = matches!(
            &self.failure,
            Some(Error { cause: Cause::Disconnected | Cause::Malformed { .. } | Cause::Os { .. }, .. })
        );
        out.aborted |= self.requester.abort(lost);
        out.aborted |= self.responder.abort();
        self.flush_receives(qp, out);
        self.deliver(qp, out);
    }
}

/// The handle that callers have; its drop is the end of the queue pair.
#[derive(Debug)]
pub(super) struct QpHandle(Arc<Qp>);

impl QpHandle {
    pub(super) fn create(
        pd: &Arc<Pd>,
        send_cq: Arc<Cq>,
        recv_cq: Arc<Cq>,
        capacity: QueuePairCapacity,
    ) -> Result<Self> {
        for (what, have, need) in
            [("max_send_wr", MAX_SEND_WR, capacity.max_send_wr), ("max_recv_wr", MAX_RECV_WR, capacity.max_recv_wr)]
        {
            if need > have {
                return Err(Error::new("create_qp", Cause::Limit { what, have: have.into(), need: need.into() }));
            }
        }
        let mut token = Token([0; 16]);
        sys::random(&mut token.0).map_err(|e| Error::from_io("create_qp", "getrandom", &e))?;
        let send_credit = send_cq.attach(capacity.max_send_wr)?;
        let recv_credit = match recv_cq.attach(capacity.max_recv_wr) {
            Ok(credit) => credit,
            Err(error) => {
                send_cq.detach(&send_credit);
                return Err(error);
            }
        };
        let queue_pair = pd.device().enlist(token, |number| {
            Arc::new(Qp {
                number,
                token,
                pd: pd.clone(),
                send_cq,
                recv_cq,
                send_credit,
                recv_credit,
                inner: Mutex::new(Inner::new()),
            })
        });
        Ok(Self(queue_pair))
    }

    pub(super) fn queue_pair(&self) -> &Arc<Qp> {
        &self.0
    }
}

impl Drop for QpHandle {
    fn drop(&mut self) {
        let qp = &self.0;
        if qp.device().is_inherited() {
            mem::forget(qp.clone()); // what it holds is the parent's
            return;
        }
        self.to_error();
        qp.device().delist(qp.number);
        qp.pd.remove(qp);
        qp.send_cq.detach(&qp.send_credit);
        qp.recv_cq.detach(&qp.recv_credit);
    }
}

impl QpBackend for QpHandle {
    fn number(&self) -> u32 {
        self.0.number
    }

    fn state(&self) -> QueuePairState {
        lock(&self.0.inner).state
    }

    fn failure(&self) -> Option<Error> {
        lock(&self.0.inner).failure.clone()
    }

    fn address(&self) -> Vec<u8> {
        let name = self.0.device().unix_name().to_vec();
        Address { number: self.0.number, token: self.0.token, name }.encode()
    }

    fn connect(&self, remote: &[u8], active: bool) -> Result<()> {
        let qp = &self.0;
        qp.device().check_process("modify_qp")?;
        let peer = Address::decode(remote)?;
        qp.with(|inner, out| {
            if inner.state != QueuePairState::Reset {
                let cause = Cause::State { is: inner.state, needs: QueuePairState::Reset };
                return Err(Error::new("modify_qp", cause));
            }
            inner.state = QueuePairState::Connecting;
            inner.peer = Some((peer, active));
            match inner.early.take() {
                Some(stream) if active => out.garbage.push(Garbage::Stream(stream)),
                Some(stream) => inner.greet(qp, stream, &[]),
                None => {}
            }
            Ok(())
        })?;
        if active {
            qp.device().waits_no_more(qp.number);
            qp.dial();
        }
        Ok(())
    }

    fn post_send(&self, requests: Vec<WorkRequest>) -> Result<()> {
        let qp = &self.0;
        qp.device().check_process("post_send")?;
        let mut checked = Vec::with_capacity(requests.len());
        for request in requests {
            checked.push(requester::check(&qp.pd, request)?);
        }
        let mut out = Out::default();
        {
            let mut inner = lock(&qp.inner);
            inner.post(qp, checked)?;
            inner.pump(qp, &mut out);
            inner.settle(qp, &mut out);
        }
        let mut room = COPY_AT_POST;
        out.jobs.retain(|job| {
            let mine = job.is_small() && room > 0;
            if mine {
                room = room.saturating_sub(job.bytes());
                job.run_alone();
            }
            !mine
        });
        qp.finish(out);
        Ok(())
    }

    fn post_recv(&self, request: ReceiveRequest) -> Result<()> {
        let qp = &self.0;
        qp.device().check_process("post_recv")?;
        responder::check(&qp.pd, &request)?;
        qp.with(|inner, out| inner.post_receive(qp, request, out))
    }

    fn to_error(&self) {
        if self.0.device().is_inherited() {
            return; // it would end the parent's connection
        }
        self.0.with(|inner, out| inner.fail(&self.0, None, out));
    }

    fn is_fenced(&self) -> bool {
        let inner = lock(&self.0.inner);
        inner.state == QueuePairState::Error && !inner.requester.is_copying() && !inner.responder.is_copying()
    }

    fn map(&self, remote: RemoteSlice) -> Result<Arc<dyn ViewBackend>> {
        self.0.device().check_process("map")?;
        let find = || {
            let inner = lock(&self.0.inner);
            inner.keys.get(&remote.rkey).map(|region| (region.segment.clone(), region.len))
        };
        let found = find().or_else(|| {
            self.0.service(); // it may have been announced a moment ago
            find()
        });
        let Some((segment, len)) = found else {
            return Err(Error::new("map", Cause::NotFound { what: "region of the peer" }));
        };
        check_range("map", remote.address, remote.len, len)?;
        match View::new(segment, remote.address, remote.len) {
            Some(view) => Ok(Arc::new(view)),
            None => Err(Error::new("map", Cause::NotFound { what: "segment of the peer" })),
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Most bytes of answers that a peer with `max_send_wr` unanswered requests can be owed.
fn most_answers(max_send_wr: u32) -> usize {
    (max_send_wr as usize + 1) * FRAME
}
