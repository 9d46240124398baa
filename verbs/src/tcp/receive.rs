//! The receiving half of a stream.
//!
//! Data lands where it belongs by the call that takes it from the socket; the room behind it in the same call is a small
//! buffer for the headers that follow. (What of the next data came with them is copied: at most the buffer's length.)

use super::keys::{Claim, Exposure};
use super::queue_pair::Core;
use super::state::{AnswerError, Due, Local};
use super::stream::{Socket, Stream};
use super::sys::{self, Destinations};
use super::wire::{HEADER, HELLO, Header, Hello, Op, TRAILER, Trailer};
use crate::{Access, CompletionStatus, QueuePairState};
use core::sync::atomic::Ordering;
use std::io;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Instant;

/// Room for headers. A batch of small requests comes in one call.
const BUFFER: usize = 8 << 10;
/// Most bytes of data taken in one call.
const CALL: usize = 1 << 20;

/// While more data than this is to come, so much is waited for: it wakes the receiver less often, for which the sender
/// pays over loopback, and is little enough to be found in the cache still. Over loopback, operations of 190 MiB in turn,
/// medians: woken by every byte 34.4 ms, by 64 KiB 30.8, 128 KiB 32.0, 256 KiB 32.8. On a wire that is slower it makes
/// no difference: the data has been promised, and is complete no later.
const LOW_WATER: u64 = 64 << 10;

/// What is arriving.
#[derive(Debug)]
pub(super) struct Receiver {
    /// The attempt to connect that this is for.
    attempt: u32,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    expect: Expect,
}

/// What the next bytes are.
#[derive(Debug)]
enum Expect {
    Hello,
    Header,
    Data(Data),
    Trailer { id: u32, len: u64 },
}

/// Data on its way in.
#[derive(Debug)]
struct Data {
    place: Place,
    /// From the start of the request, or of the exposed memory.
    offset: u64,
    remaining: u64,
    then: Then,
}

#[derive(Debug)]
enum Place {
    Own(Arc<Local>),
    Exposed(Arc<Exposure>),
    /// It was refused.
    Nowhere,
}

/// What to do when the data is there.
#[derive(Debug, Clone, Copy)]
enum Then {
    Trailer { id: u32, len: u64 },
    Deliver { seq: u32 },
    Receive { seq: u32, len: u64, immediate: Option<u32> },
    Refuse { seq: u32, status: CompletionStatus },
    Nothing,
}

/// What came of looking at the bytes there are.
enum Outcome {
    /// More bytes are needed.
    Hungry,
    /// The next message can't be dealt with yet.
    Stalled,
}

impl Receiver {
    pub(super) fn new() -> Self {
        Self { attempt: 0, buffer: Box::default(), start: 0, end: 0, expect: Expect::Hello }
    }

    /// Lets go of all memory.
    pub(super) fn clear(&mut self) {
        self.expect = Expect::Header;
        self.buffer = Box::default();
        (self.start, self.end) = (0, 0);
    }

    /// The next `N` bytes, if they are there.
    fn peek<const N: usize>(&self) -> Option<&[u8; N]> {
        self.buffer.get(self.start..self.end)?.first_chunk()
    }

    /// Takes one call's worth from the socket; how many bytes, and whether that was all the room there was.
    fn fill(&mut self, socket: &TcpStream) -> io::Result<(usize, bool)> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        // The guard is held for this one call: between two, the memory under a revoked key is free at once (I3).
        let exposure = match &self.expect {
            Expect::Data(Data { place: Place::Exposed(exposure), .. }) => Some(exposure.clone()),
            _ => None,
        };
        let inside = exposure.as_ref().map(|exposure| exposure.enter());
        if let (Some(None), Expect::Data(data)) = (&inside, &mut self.expect) {
            data.give_up();
        }
        let mut room = Destinations::new();
        let mut landing = 0;
        let mut behind = true;
        if let Expect::Data(data) = &mut self.expect {
            let wanted = CALL.min(usize::try_from(data.remaining).unwrap_or(usize::MAX));
            landing = match &data.place {
                Place::Own(local) => local.gather(data.offset, wanted, room.memory()),
                Place::Exposed(exposure) => {
                    let within = room.memory().memory(exposure.memory(), data.offset, wanted);
                    if within { wanted } else { 0 }
                }
                Place::Nowhere => {
                    let gone = sys::discard(socket, wanted)?;
                    data.remaining -= gone as u64;
                    return Ok((gone, gone == wanted));
                }
            };
            behind = landing as u64 == data.remaining;
        }
        if behind {
            room.slice(&mut self.buffer[self.end..]);
        }
        let asked = room.bytes();
        let got = room.receive(socket)?;
        drop(inside);
        let landed = got.min(landing);
        if let Expect::Data(data) = &mut self.expect {
            data.offset += landed as u64;
            data.remaining -= landed as u64;
        }
        self.end += got - landed;
        Ok((got, got == asked))
    }

    /// How many bytes are worth waking up for. What a header has promised comes, and comes whole: a responder whose
    /// memory is revoked sends zeros.
    fn low_water(&self) -> u32 {
        match &self.expect {
            Expect::Data(data) => data.remaining.clamp(1, LOW_WATER) as u32,
            _ => 1,
        }
    }

    /// Deals with what has been received, as far as it goes.
    fn consume(&mut self, core: &Core, stream: &Stream) -> Result<Outcome, AnswerError> {
        loop {
            match &mut self.expect {
                Expect::Hello => {
                    let Some(bytes) = self.peek::<HELLO>() else { return Ok(Outcome::Hungry) };
                    core.greeted(stream, Hello::decode(bytes)?)?;
                    self.start += HELLO;
                    self.expect = Expect::Header;
                }
                Expect::Header => {
                    let Some(bytes) = self.peek::<HEADER>() else { return Ok(Outcome::Hungry) };
                    match core.begin(stream, &Header::decode(bytes)?)? {
                        Begun::Whole => self.start += HEADER,
                        Begun::Data(data) => {
                            self.start += HEADER;
                            self.expect = Expect::Data(data);
                        }
                        Begun::Stalled => return Ok(Outcome::Stalled),
                    }
                }
                Expect::Data(data) => {
                    let buffered = &self.buffer[self.start..self.end];
                    let now = buffered.len().min(usize::try_from(data.remaining).unwrap_or(usize::MAX));
                    data.land(&buffered[..now]);
                    self.start += now;
                    if data.remaining > 0 {
                        return Ok(Outcome::Hungry);
                    }
                    self.expect = match data.then {
                        Then::Trailer { id, len } => Expect::Trailer { id, len },
                        then => {
                            core.data_is_there(then)?;
                            Expect::Header
                        }
                    };
                }
                Expect::Trailer { id, len } => {
                    let (id, len) = (*id, *len);
                    let Some(bytes) = self.peek::<TRAILER>() else { return Ok(Outcome::Hungry) };
                    let trailer = Trailer::decode(bytes)?;
                    if trailer.id != id {
                        return Err(AnswerError::Malformed("a trailer of another read"));
                    }
                    core.read_is_there(id, len, trailer.status)?;
                    self.start += TRAILER;
                    self.expect = Expect::Header;
                }
            }
        }
    }
}

impl Data {
    /// The memory may not be written any more: the rest goes nowhere, and the request is refused.
    fn give_up(&mut self) {
        self.place = Place::Nowhere;
        if let Then::Deliver { seq } = self.then {
            self.then = Then::Refuse { seq, status: CompletionStatus::RemoteAccess };
        }
    }

    /// Copies bytes that came with a header to where they belong.
    fn land(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        match &self.place {
            Place::Own(local) => local.write(self.offset, bytes),
            Place::Exposed(exposure) => {
                let exposure = exposure.clone();
                match exposure.enter() {
                    // The range was checked against the key when the request began.
                    Some(_inside) => drop(exposure.memory().write(self.offset, bytes)),
                    None => self.give_up(),
                }
            }
            Place::Nowhere => {}
        }
        self.offset += bytes.len() as u64;
        self.remaining -= bytes.len() as u64;
    }
}

/// What a header begins.
enum Begun {
    /// Nothing follows it.
    Whole,
    Data(Data),
    /// It can't be dealt with yet.
    Stalled,
}

impl Core {
    /// Receives on `stream` what there is, until nothing is left, the next message has to wait, or `budget` is used up.
    /// The caller arms the stream afterwards.
    pub(super) fn receive(&self, stream: &Stream, budget: &mut usize) {
        stream.receiver.run(|receiver| {
            stream.wants_in.store(false, Ordering::SeqCst);
            stream.stalled.store(false, Ordering::SeqCst);
            let open = self.receive_some(stream, receiver, budget);
            let listen = open && !stream.stalled.load(Ordering::SeqCst);
            if listen {
                stream.set_low_water(receiver.low_water());
            }
            stream.wants_in.store(listen, Ordering::SeqCst);
        });
    }

    /// Whether the stream is still good.
    fn receive_some(&self, stream: &Stream, receiver: &mut Receiver, budget: &mut usize) -> bool {
        let Some(Socket { tcp: socket, attempt }) = stream.socket() else { return false };
        if receiver.attempt != attempt {
            let buffer = vec![0; BUFFER].into_boxed_slice();
            *receiver = Receiver { attempt, buffer, ..Receiver::new() };
        }
        let mut drained = false;
        while !self.is_closed() {
            match receiver.consume(self, stream) {
                Ok(Outcome::Hungry) => {}
                Ok(Outcome::Stalled) => return true,
                Err(AnswerError::Malformed(what)) => {
                    self.malformed(what);
                    return false;
                }
                Err(AnswerError::Failed(failed)) => {
                    self.request_failed(failed);
                    return false;
                }
            }
            if drained || *budget == 0 {
                return true;
            }
            match receiver.fill(&socket) {
                Ok((0, _)) => {
                    self.lost(stream, attempt, "recvmsg", &io::Error::from_raw_os_error(libc::ECONNRESET));
                    return false;
                }
                Ok((got, all)) => {
                    // Small messages cost more than their bytes.
                    *budget = budget.saturating_sub(got.max(super::LEAST_CHARGE));
                    drained = !all;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    self.lost(stream, attempt, "recvmsg", &error);
                    return false;
                }
            }
        }
        false
    }

    /// Deals with a header.
    fn begin(&self, stream: &Stream, header: &Header) -> Result<Begun, AnswerError> {
        let Header { op, status, id, seq, imm, address, len, rkey } = *header;
        if len > super::MAX_MESSAGE && op != Op::Immediate {
            return Err(AnswerError::Malformed("a message longer than the protocol allows"));
        }
        let claim = |access| Claim { access, domain: self.domain, queue_pair: self.unique, address, len };
        let mut state = self.state();
        if !self.may_speak(&state) {
            return Err(AnswerError::Malformed("a request before the connection was accepted"));
        }
        let ignored = state.refused.is_some();
        let data = |place, offset, then| Begun::Data(Data { place, offset, remaining: len, then });
        Ok(match op {
            Op::ReadRequest if ignored => Begun::Whole,
            Op::ReadRequest if state.passed(seq)? == Due::Later => self.stall(stream),
            Op::ReadRequest => {
                match self.device.keys.find(rkey, &claim(Access::REMOTE_READ)) {
                    Some(exposure) => state.respond(id, exposure, address, len)?,
                    None => state.refuse_read(id)?,
                }
                Begun::Whole
            }
            Op::ReadData => data(Place::Own(state.data_begins(id, address, len)?), address, Then::Trailer { id, len }),
            Op::Write | Op::Send | Op::SendWithImmediate if ignored => data(Place::Nowhere, 0, Then::Nothing),
            Op::Write => match self.device.keys.find(rkey, &claim(Access::REMOTE_WRITE)) {
                Some(exposure) => data(Place::Exposed(exposure), address, Then::Deliver { seq }),
                None => data(Place::Nowhere, 0, Then::Refuse { seq, status: CompletionStatus::RemoteAccess }),
            },
            Op::Immediate if ignored => Begun::Whole,
            Op::Immediate | Op::Send | Op::SendWithImmediate => {
                if state.due(seq)? == Due::Later {
                    return Ok(self.stall(stream));
                }
                let Some(receive) = state.take_receive()? else {
                    if !state.not_ready_expired {
                        let since = *state.not_ready_since.get_or_insert_with(Instant::now);
                        let until = since + self.device.config.receiver_not_ready_timeout;
                        self.set_deadline(&mut state, until);
                        return Ok(self.stall(stream));
                    }
                    let status = CompletionStatus::ReceiverNotReadyExceeded;
                    if op == Op::Immediate {
                        state.refuse_message(seq, status)?;
                        return Ok(Begun::Whole);
                    }
                    return Ok(data(Place::Nowhere, 0, Then::Refuse { seq, status }));
                };
                let local = receive.local.clone();
                if op == Op::Immediate {
                    self.received(&mut state, CompletionStatus::Success, len, Some(imm));
                    let moved = state.deliver(seq)?;
                    self.unlock(state, moved);
                    Begun::Whole
                } else if local.len() < len {
                    self.received(&mut state, CompletionStatus::LocalLength, 0, None);
                    let status = CompletionStatus::RemoteInvalidRequest;
                    self.unlock(state, false);
                    data(Place::Nowhere, 0, Then::Refuse { seq, status })
                } else {
                    let immediate = (op == Op::SendWithImmediate).then_some(imm);
                    data(Place::Own(local), 0, Then::Receive { seq, len, immediate })
                }
            }
            Op::Ack => {
                state.acknowledged(seq, status)?;
                self.retire(&mut state);
                self.unlock(state, false);
                Begun::Whole
            }
            Op::Refusal => return Err(AnswerError::Failed(state.refusal(id, status)?)),
        })
    }

    fn stall(&self, stream: &Stream) -> Begun {
        // Set while the state is locked: who makes the message due sees it.
        stream.stalled.store(true, Ordering::SeqCst);
        Begun::Stalled
    }

    /// Deals with data that is where it belongs.
    fn data_is_there(&self, then: Then) -> Result<(), AnswerError> {
        let mut state = self.state();
        let moved = match then {
            Then::Deliver { seq } => state.deliver(seq)?,
            Then::Receive { seq, len, immediate } => {
                self.received(&mut state, CompletionStatus::Success, len, immediate);
                state.deliver(seq)?
            }
            Then::Refuse { seq, status } => {
                state.refuse_message(seq, status)?;
                false
            }
            Then::Trailer { .. } | Then::Nothing => false,
        };
        self.unlock(state, moved);
        Ok(())
    }

    /// A part of one of our reads is in its place.
    fn read_is_there(&self, id: u32, len: u64, status: CompletionStatus) -> Result<(), AnswerError> {
        let mut state = self.state();
        state.data_ends(id, len, status)?;
        self.retire(&mut state);
        self.unlock(state, false);
        Ok(())
    }

    /// Whether the peer may ask for something: this end dialled, so the peer has accepted; or this end has.
    fn may_speak(&self, state: &super::state::State) -> bool {
        state.phase == QueuePairState::ReadyToSend || self.is_active()
    }
}
