//! Queue pairs: their life, their gate, and the posting of requests.

use super::completion_queue::{Account, Queue};
use super::connect::{Arrivals, Link};
use super::device::Shared;
use super::memory_region::Region;
use super::pace::Pace;
use super::state::{Body, Failed, Local, Posted, Receive, State};
use super::stream::Stream;
use super::{MAX_MESSAGE, MAX_SGE, lock, sys};
use crate::backend::{QpBackend, ViewBackend};
use crate::memory_region::check_range;
use crate::{
    Access, Cause, CompletionStatus, Error, LocalSlice, Opcode, QueuePairCapacity, QueuePairState, ReceiveRequest,
    RemoteSlice, Result, Token, WorkRequest,
};
use core::any::Any;
use core::fmt;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Instant;

/// Most bytes that posting a request sends by itself; the rest is `progress`'s.
pub(super) const POST_BUDGET: usize = 64 << 10;

/// The caller's handle: the last one going away is the end of the queue pair.
#[derive(Debug)]
pub(super) struct Handle(pub(super) Arc<Core>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// A queue pair.
pub(super) struct Core {
    pub(super) number: u32,
    /// Never used again, unlike the number: what windows are bound to.
    pub(super) unique: u64,
    pub(super) domain: u64,
    pub(super) token: Token,
    pub(super) device: Arc<Shared>,
    sends: (Arc<Queue>, Arc<Account>),
    receives: (Arc<Queue>, Arc<Account>),
    gate: Gate,
    fenced: AtomicBool,
    link: OnceLock<Link>,
    pub(super) arrivals: Arrivals,
    streams: OnceLock<Box<[Stream]>>,
    state: Mutex<State>,
    pub(super) pace: Pace,
}

/// Who is inside a queue pair: in a socket call, in its memory. After it is closed nobody comes in, and the last one out
/// does the clearing up (I3).
#[derive(Debug, Default)]
struct Gate(AtomicU64);

const CLOSED: u64 = 1 << 63;

impl Gate {
    fn enter(&self) -> bool {
        let open = |word: u64| (word & CLOSED == 0).then_some(word + 1);
        self.0.fetch_update(Ordering::Acquire, Ordering::Relaxed, open).is_ok()
    }

    /// Whether this was the last one out of a closed gate.
    fn leave(&self) -> bool {
        self.0.fetch_sub(1, Ordering::AcqRel) == CLOSED | 1
    }

    fn close(&self) {
        self.0.fetch_or(CLOSED, Ordering::AcqRel);
    }

    fn is_closed(&self) -> bool {
        self.0.load(Ordering::Relaxed) & CLOSED != 0
    }
}

/// A thread inside a queue pair.
pub(super) struct Inside<'a>(&'a Core);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        if self.0.gate.leave() {
            self.0.finish();
        }
    }
}

impl Core {
    pub(super) fn create(
        device: &Arc<Shared>,
        domain: u64,
        send_queue: Arc<Queue>,
        recv_queue: Arc<Queue>,
        capacity: QueuePairCapacity,
    ) -> Result<Arc<Self>> {
        let send_account = send_queue.reserve(capacity.max_send_wr)?;
        let recv_account = recv_queue.reserve(capacity.max_recv_wr)?;
        let mut token = Token([0; 16]);
        sys::random(&mut token.0).map_err(|error| Error::from_io("create_qp", "getrandom", &error))?;
        device.add(|number| Self {
            number,
            unique: super::device::next_unique(),
            domain,
            token,
            device: device.clone(),
            sends: (send_queue, send_account),
            receives: (recv_queue, recv_account),
            gate: Gate::default(),
            fenced: AtomicBool::new(false),
            link: OnceLock::new(),
            arrivals: Arrivals::default(),
            streams: OnceLock::new(),
            state: Mutex::new(State::new()),
            pace: Pace::new(),
        })
    }

    // ---- what the streams ask

    pub(super) fn streams(&self) -> &[Stream] {
        self.streams.get().map_or(&[], |streams| streams)
    }

    /// Makes the streams, without sockets yet.
    pub(super) fn make_streams(&self, count: u8) -> &[Stream] {
        self.streams.get_or_init(|| {
            (0..usize::from(count)).map(|at| Stream::new(super::device::stream_key(self.number, at))).collect()
        })
    }

    pub(super) fn link(&self) -> Option<&Link> {
        self.link.get()
    }

    /// Sets what `connect` was told; once, as the state has only one way out of Reset.
    pub(super) fn set_link(&self, link: Link) {
        let _was_empty = self.link.set(link);
    }

    pub(super) fn index_of(&self, stream: &Stream) -> u8 {
        self.streams().iter().position(|other| core::ptr::eq(other, stream)).unwrap_or_default() as u8
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Ends the use of the state: what completed is let go of outside the lock, and if something may be `due` now, stalled
    /// streams go on.
    pub(super) fn unlock(&self, mut state: MutexGuard<'_, State>, due: bool) {
        let retired = state.take_retired();
        drop(state);
        drop(retired);
        if due {
            self.resume_stalled();
        }
    }

    fn resume_stalled(&self) {
        for (at, stream) in self.streams().iter().enumerate() {
            if stream.stalled.load(Ordering::SeqCst) {
                self.device.resume(super::device::stream_key(self.number, at));
            }
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.gate.is_closed()
    }

    pub(super) fn is_ready(&self) -> bool {
        self.state().phase == QueuePairState::ReadyToSend
    }

    /// What to send next.
    pub(super) fn pull(&self, headers: &mut Vec<u8>) -> Option<Body> {
        let mut state = self.state();
        if state.phase == QueuePairState::ReadyToSend { state.pull(headers) } else { None }
    }

    pub(super) fn arm(&self, stream: &Stream) {
        if let Err(error) = stream.arm(&self.device.epoll) {
            self.fail(Error::from_io("progress", "epoll_ctl", &error), None);
        }
    }

    /// Completes what is done at the head of the send queue.
    pub(super) fn retire(&self, state: &mut State) {
        state.retire((&self.sends.0, &self.sends.1), self.number);
    }

    /// Completes the receive that was taken.
    pub(super) fn received(&self, state: &mut State, status: CompletionStatus, bytes: u64, immediate: Option<u32>) {
        state.received(status, bytes, immediate, (&self.receives.0, &self.receives.1), self.number);
    }

    pub(super) fn refuse(&self, what: &'static str) {
        self.state().refuse(what);
    }

    // ---- events

    /// A stream's socket has something to say.
    pub(super) fn on_event(&self, index: usize, ready: u32, budget: &mut usize) {
        let (Some(_inside), Some(stream)) = (self.enter(), self.streams().get(index)) else { return };
        stream.disarm();
        *budget = budget.saturating_sub(super::LEAST_CHARGE);
        let is = |bits: i32| ready & bits as u32 != 0;
        if self.is_dialling(stream) {
            self.on_dialled(stream, budget);
        } else {
            if is(!libc::EPOLLOUT) {
                self.receive(stream, budget);
                if is(libc::EPOLLRDHUP | libc::EPOLLHUP | libc::EPOLLERR) && stream.stalled.load(Ordering::SeqCst) {
                    self.lost(stream, stream.attempt(), "epoll_wait", &io::Error::from_raw_os_error(libc::ECONNRESET));
                }
            }
            if is(libc::EPOLLOUT) {
                self.transmit(stream, budget);
            }
        }
        self.send_what_is_left(budget);
        self.arm(stream);
    }

    /// A stream can go on though its socket has nothing to say.
    pub(super) fn on_resume(&self, index: usize, budget: &mut usize) {
        let (Some(_inside), Some(stream)) = (self.enter(), self.streams().get(index)) else { return };
        self.receive(stream, budget);
        self.send_what_is_left(budget);
        self.arm(stream);
    }

    /// Sends on every stream that is not full.
    pub(super) fn send_what_is_left(&self, budget: &mut usize) {
        loop {
            let carriers = self.carriers();
            for (at, stream) in self.streams().iter().enumerate() {
                if carriers & 1 << at != 0 && !stream.wants_out.load(Ordering::SeqCst) {
                    self.transmit(stream, budget);
                }
            }
            // What has been sent may have led to another choice; a stream that carries from now on is not forgotten.
            if self.carriers() == carriers {
                return;
            }
        }
    }

    /// A time has come that [`set_deadline`](Self::set_deadline) asked for.
    pub(super) fn on_deadline(&self, now: Instant) {
        let Some(_inside) = self.enter() else { return };
        let mut state = self.state();
        state.deadline = None;
        let patience = self.device.config.receiver_not_ready_timeout;
        let mut expired = false;
        if let Some(since) = state.not_ready_since {
            expired = now >= since + patience;
            state.not_ready_expired |= expired;
            if !expired {
                self.set_deadline(&mut state, since + patience);
            }
        }
        self.unlock(state, expired);
        self.on_connect_deadline(now);
    }

    /// Has [`on_deadline`](Self::on_deadline) called at `when` or before.
    pub(super) fn set_deadline(&self, state: &mut State, when: Instant) {
        if state.deadline.is_none_or(|earlier| when < earlier) {
            state.deadline = Some(when);
            self.device.set_deadline(self.number, when);
        }
    }

    // ---- the end

    pub(super) fn enter(&self) -> Option<Inside<'_>> {
        self.gate.enter().then(|| Inside(self))
    }

    /// Moves to the error state for `error`. `lost`: the error number with which the connection went.
    pub(super) fn fail(&self, error: Error, lost: Option<i32>) {
        let Some(_inside) = self.enter() else { return };
        let mut state = self.state();
        if state.phase != QueuePairState::Error {
            state.phase = QueuePairState::Error;
            state.lost = lost;
            state.failure = Some(state.refused.take().unwrap_or(error));
        }
        drop(state);
        self.device.wake.notify(); // another thread may be waiting for just that
        self.shut();
    }

    /// Moves to the error state as the caller asks.
    fn close(&self) {
        let Some(_inside) = self.enter() else { return };
        let mut state = self.state();
        state.phase = QueuePairState::Error;
        drop(state);
        self.shut();
    }

    fn shut(&self) {
        self.gate.close();
        // Whoever is in a socket call comes out at its next look at the gate; none of the calls waits.
        for socket in self.streams().iter().filter_map(Stream::socket) {
            let _already_gone = socket.tcp.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Bytes of the peer's that break the protocol.
    pub(super) fn malformed(&self, what: &'static str) {
        self.fail(Error::new("progress", Cause::Malformed { what }), None);
    }

    /// A request that failed takes the queue pair with it, as the verbs have it.
    pub(super) fn request_failed(&self, failed: Failed) {
        let what = match failed.0 {
            CompletionStatus::ReceiverNotReadyExceeded => "the peer had no receive posted",
            CompletionStatus::RemoteInvalidRequest => "the peer's receive was shorter than the message",
            CompletionStatus::RemoteAccess => "the peer refused a remote access",
            _ => "the peer refused a request",
        };
        self.fail(Error::new("post_send", Cause::Denied { what }), None);
    }

    /// The socket of `stream` failed.
    pub(super) fn lost(&self, stream: &Stream, attempt: u32, call: &'static str, error: &io::Error) {
        if self.dial_again(stream, attempt) {
            return;
        }
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        let cause = match errno {
            libc::ECONNRESET | libc::EPIPE => Cause::Disconnected,
            _ => Cause::Os { errno, call },
        };
        self.fail(Error::new("progress", cause), Some(errno));
    }

    /// The last one out of a closed gate: nobody is in a socket call or in the memory, and nobody comes in.
    fn finish(&self) {
        self.device.remove(self);
        for stream in self.streams() {
            stream.close();
            stream.receiver.alone().clear();
            stream.transmitter.alone().clear();
        }
        // The flush completions come after the fence, so that who has seen them all has seen it too.
        self.fenced.store(true, Ordering::Release);
        let mut state = self.state();
        state.flush((&self.sends.0, &self.sends.1), (&self.receives.0, &self.receives.1), self.number);
        self.unlock(state, false);
    }

    // ---- posting

    fn check_local(&self, verb: &'static str, slice: &LocalSlice, writes: bool) -> Result<()> {
        check_range(verb, slice.offset, slice.len, slice.region.len())?;
        let denied = |what| Err(Error::new(verb, Cause::Denied { what }));
        let Some(region) = slice.region.backend.as_any().downcast_ref::<Region>() else {
            return denied("a region of another provider");
        };
        if region.domain() != self.domain {
            return denied("a region of another protection domain");
        }
        if writes && !region.access().contains(Access::LOCAL_WRITE) {
            return denied("LOCAL_WRITE");
        }
        Ok(())
    }

    fn check(&self, request: WorkRequest) -> Result<Posted> {
        const VERB: &str = "post_send";
        let limit = |what, have: u64, need: u64| Err(Error::new(VERB, Cause::Limit { what, have, need }));
        let WorkRequest { id, opcode, local, remote } = request;
        if local.len() > MAX_SGE as usize {
            return limit("max_sge", u64::from(MAX_SGE), local.len() as u64);
        }
        let mut len = 0u64;
        for slice in &local {
            self.check_local(VERB, slice, opcode == Opcode::Read)?;
            len = len.saturating_add(slice.len);
        }
        if len > MAX_MESSAGE {
            return limit("max_message_size", MAX_MESSAGE, len);
        }
        let one_sided = match opcode {
            Opcode::Read | Opcode::Write => true,
            Opcode::WriteWithImmediate(_) => len > 0 || remote.is_some(),
            Opcode::Send | Opcode::SendWithImmediate(_) => false,
            Opcode::Receive => {
                return Err(Error::new(VERB, Cause::Unsupported { what: "a receive in the send queue" }));
            }
        };
        let remote = match remote {
            Some(remote) if one_sided => {
                if remote.len != len || remote.address.checked_add(len).is_none() {
                    let cause = Cause::OutOfRange { offset: remote.address, len, size: remote.len };
                    return Err(Error::new(VERB, cause));
                }
                remote
            }
            None if !one_sided => RemoteSlice { address: 0, len: 0, rkey: 0 },
            None => return Err(Error::new(VERB, Cause::NotFound { what: "remote slice in the request" })),
            Some(_) => return Err(Error::new(VERB, Cause::Unsupported { what: "a send to a remote slice" })),
        };
        Ok(Posted::new(id, opcode, Arc::new(Local::new(local, len)), remote))
    }

    fn needs(verb: &'static str, is: QueuePairState) -> Error {
        Error::new(verb, Cause::State { is, needs: QueuePairState::ReadyToSend })
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state();
        let (phase, failure) = (state.phase, state.failure.clone());
        drop(state);
        f.debug_struct("TcpQueuePair")
            .field("number", &self.number)
            .field("state", &phase)
            .field("failure", &failure)
            .field("streams", &self.streams().len())
            .field("sending", &self.setting().map(|(setting, _)| setting))
            .field("settled", &self.setting().is_some_and(|(_, settled)| settled))
            .finish_non_exhaustive()
    }
}

impl QpBackend for Handle {
    fn number(&self) -> u32 {
        self.0.number
    }

    fn state(&self) -> QueuePairState {
        self.0.state().phase
    }

    fn failure(&self) -> Option<Error> {
        self.0.state().failure.clone()
    }

    fn address(&self) -> Vec<u8> {
        self.0.await_streams();
        self.0.address()
    }

    fn connect(&self, remote: &[u8], active: bool) -> Result<()> {
        let Some(_inside) = self.0.enter() else {
            let cause = Cause::State { is: QueuePairState::Error, needs: QueuePairState::Reset };
            return Err(Error::new("connect", cause));
        };
        self.0.connect(remote, active)
    }

    fn post_send(&self, requests: Vec<WorkRequest>) -> Result<()> {
        let core = &self.0;
        let count = u32::try_from(requests.len()).unwrap_or(u32::MAX);
        let posted = requests.into_iter().map(|request| core.check(request)).collect::<Result<Vec<_>>>()?;
        let Some(_inside) = core.enter() else { return Err(Core::needs("post_send", QueuePairState::Error)) };
        let mut state = core.state();
        if matches!(state.phase, QueuePairState::Error | QueuePairState::Reset) {
            return Err(Core::needs("post_send", state.phase));
        }
        core.sends.1.take("post_send", "max_send_wr", count)?;
        for request in posted {
            state.post(request);
        }
        drop(state);
        core.send_what_is_left(&mut { POST_BUDGET });
        Ok(())
    }

    fn post_recv(&self, request: ReceiveRequest) -> Result<()> {
        let core = &self.0;
        if let Some(slice) = &request.local {
            core.check_local("post_recv", slice, true)?;
        }
        let len = request.local.as_ref().map_or(0, |slice| slice.len);
        let receive = Receive { id: request.id, local: Arc::new(Local::new(request.local.into_iter().collect(), len)) };
        let Some(_inside) = core.enter() else { return Err(Core::needs("post_recv", QueuePairState::Error)) };
        let mut state = core.state();
        if state.phase == QueuePairState::Error {
            return Err(Core::needs("post_recv", state.phase));
        }
        core.receives.1.take("post_recv", "max_recv_wr", 1)?;
        state.post_receive(receive);
        core.unlock(state, true);
        Ok(())
    }

    fn to_error(&self) {
        self.0.close();
    }

    fn is_fenced(&self) -> bool {
        self.0.fenced.load(Ordering::Acquire)
    }

    fn map(&self, _remote: RemoteSlice) -> Result<Arc<dyn ViewBackend>> {
        Err(Error::new("map", Cause::Unsupported { what: "a view of remote memory" }))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
