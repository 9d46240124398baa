//! One Unix stream between two queue pairs: bytes out of bounded queues, whole frames in, descriptors in order.

use super::frame::{FRAME, Frame, MAX_INLINE, Piece, Source};
use super::poller::Poller;
use super::sys::{self, EpollChange};
use crate::{Cause, Error, Memory, Result};
use core::fmt;
use core::ptr;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Room for received bytes: several frames with what may follow them.
const RECEIVE: usize = 128 << 10;
/// Descriptors that came and whose frames are not read yet. An honest peer sends one with each such frame, and the
/// buffer holds no more frames than it has room for; this bounds what a dishonest one makes us hold (I7).
const MAX_WAITING: usize = 64;

const VERB: &str = "connection";

/// A connected stream. Dropping it without [`close`](Self::close) is fine where it was never watched.
pub(super) struct Link {
    stream: OwnedFd,
    /// Received and not yet used: `buffer[start..end]`.
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// Where the bytes of the inline piece that `next` returned last are.
    payload: core::ops::Range<usize>,
    descriptors: VecDeque<OwnedFd>,
    ended: bool,
    outgoing: VecDeque<Outgoing>,
    /// Bytes of the front of `outgoing` that are sent.
    front_sent: usize,
    /// Answers to the peer's requests, whole frames. They overtake requests of ours, but not within one.
    answers: Vec<u8>,
    answers_sent: usize,
    /// The peer takes nothing any more; what it sent before is still read.
    deaf: bool,
    interest: Option<u32>,
}

/// Something to send.
#[derive(Debug)]
enum Outgoing {
    /// Frames, or the preface.
    Bytes(Vec<u8>),
    /// A region, with the memory whose descriptor goes along.
    Region { key: u64, frame: [u8; FRAME], memory: Memory },
    /// The answer to the peer's question whether we know a key.
    Resolved([u8; FRAME]),
    /// Local memory that goes inline.
    Inline(Inline),
}

/// What is left of a run of local bytes that go inline, piece by piece.
#[derive(Debug)]
struct Inline {
    /// The whole rest as one piece.
    rest: Piece,
    address: *const u8,
    /// The frame of the piece being sent, and how many bytes follow it.
    current: Option<([u8; FRAME], usize)>,
}

// SAFETY: the pointer is only handed to `sys::send`, under the contract of `Link::push_inline`, which names no thread.
#[allow(unsafe_code)]
unsafe impl Send for Inline {}

/// What [`Link::next`] found.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Incoming {
    /// A frame. If it is an inline piece, [`Link::payload`] has its bytes.
    Frame(Frame),
    /// No whole frame: come again when the stream is readable.
    Nothing,
    /// The peer has closed, and everything whole that it sent has been read.
    End,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link")
            .field("received", &(self.end - self.start))
            .field("outgoing", &self.outgoing.len())
            .field("unsent_answers", &self.unsent_answers())
            .field("ended", &self.ended)
            .finish_non_exhaustive()
    }
}

impl Link {
    pub(super) fn new(stream: OwnedFd) -> Self {
        Self {
            stream,
            buffer: vec![0; RECEIVE].into_boxed_slice(),
            start: 0,
            end: 0,
            payload: 0..0,
            descriptors: VecDeque::new(),
            ended: false,
            outgoing: VecDeque::new(),
            front_sent: 0,
            answers: Vec::new(),
            answers_sent: 0,
            deaf: false,
            interest: None,
        }
    }

    /// Sends `bytes` as they are.
    pub(super) fn push_bytes(&mut self, bytes: &[u8]) {
        match self.outgoing.back_mut() {
            Some(Outgoing::Bytes(more)) => more.extend_from_slice(bytes),
            _ => self.outgoing.push_back(Outgoing::Bytes(bytes.to_vec())),
        }
    }

    pub(super) fn push(&mut self, frame: Frame) {
        self.push_bytes(&frame.encode());
    }

    /// Announces a region that is all of `memory`, which has a segment.
    pub(super) fn push_region(&mut self, key: u64, memory: Memory) {
        let frame = Frame::Region { key, len: memory.len() }.encode();
        self.outgoing.push_back(Outgoing::Region { key, frame, memory });
    }

    /// Takes an announcement back that is still whole in the queue, so that the peer never hears of it.
    pub(super) fn recall_region(&mut self, key: u64) -> bool {
        let begun = usize::from(self.front_sent > 0);
        let is_it = |entry: &Outgoing| matches!(entry, Outgoing::Region { key: k, .. } if *k == key);
        let found = self.outgoing.iter().skip(begun).position(is_it);
        found.and_then(|index| self.outgoing.remove(begun + index)).is_some()
    }

    /// Answers [`Frame::Resolve`], after all regions announced before. `false` when the answer to the last such question
    /// hasn't even left: a peer waits for each.
    pub(super) fn push_resolved(&mut self, key: u64) -> bool {
        if self.outgoing.iter().any(|entry| matches!(entry, Outgoing::Resolved(_))) {
            return false;
        }
        self.outgoing.push_back(Outgoing::Resolved(Frame::Resolved { key }.encode()));
        true
    }

    /// Sends local bytes inline, as the run of bytes that `rest` describes.
    ///
    /// # Safety
    /// `address` is valid for reads of `rest.len` bytes until the link is dropped or the peer has answered the request.
    #[allow(unsafe_code)]
    pub(super) unsafe fn push_inline(&mut self, rest: Piece, address: *const u8) {
        self.outgoing.push_back(Outgoing::Inline(Inline { rest, address, current: None }));
    }

    /// Answers a request of the peer.
    pub(super) fn push_answer(&mut self, frame: Frame) {
        self.answers.extend_from_slice(&frame.encode());
    }

    /// Bytes of answers that the peer has not taken.
    pub(super) fn unsent_answers(&self) -> usize {
        self.answers.len() - self.answers_sent
    }

    /// Sends what the socket takes. That the peer has closed is no error here: `next` tells, after all that came before.
    pub(super) fn flush(&mut self) -> Result<()> {
        while !self.deaf {
            match self.send_some() {
                Ok(true) => {}
                Ok(false) => break,
                Err(e) if is_disconnect(&e) => self.deaf = true,
                Err(e) => return Err(Error::from_io(VERB, "sendmsg", &e)),
            }
        }
        if self.deaf {
            self.outgoing.clear();
            self.front_sent = 0;
            self.answers.clear();
            self.answers_sent = 0;
        }
        Ok(())
    }

    /// Sends a part; `false` when there is nothing to send or no room.
    fn send_some(&mut self) -> io::Result<bool> {
        let answer_begun = !self.answers_sent.is_multiple_of(FRAME);
        if answer_begun || (self.front_sent == 0 && self.unsent_answers() > 0) {
            let sent = send(self.stream.as_fd(), &self.answers[self.answers_sent..], None)?;
            self.answers_sent += sent;
            if self.answers_sent == self.answers.len() {
                self.answers.clear();
                self.answers_sent = 0;
            }
            return Ok(sent > 0);
        }
        let skip = self.front_sent;
        let stream = self.stream.as_fd();
        let (sent, whole) = match self.outgoing.front_mut() {
            None => return Ok(false),
            Some(Outgoing::Bytes(bytes)) => (send(stream, &bytes[skip..], None)?, bytes.len()),
            Some(Outgoing::Region { frame, memory, .. }) => {
                let descriptor = if skip == 0 { memory.segment() } else { None };
                (send(stream, &frame[skip..], descriptor)?, FRAME)
            }
            Some(Outgoing::Resolved(frame)) => (send(stream, &frame[skip..], None)?, FRAME),
            Some(Outgoing::Inline(inline)) => inline.send(stream, skip)?,
        };
        self.front_sent += sent;
        if self.front_sent == whole {
            self.front_sent = 0;
            let finished = match self.outgoing.front_mut() {
                Some(Outgoing::Inline(inline)) => inline.advance(),
                _ => true,
            };
            if finished {
                self.outgoing.pop_front();
            }
        }
        Ok(sent > 0)
    }

    /// The next frame, read from the socket if need be.
    pub(super) fn next(&mut self) -> Result<Incoming> {
        loop {
            if let Some(frame) = self.whole_frame()? {
                return Ok(Incoming::Frame(frame));
            }
            if self.ended {
                return Ok(Incoming::End);
            }
            if !self.fill()? {
                return Ok(Incoming::Nothing);
            }
        }
    }

    /// The bytes of the inline piece that [`next`](Self::next) returned last.
    pub(super) fn payload(&self) -> &[u8] {
        &self.buffer[self.payload.clone()]
    }

    /// The oldest descriptor that came and was not taken.
    pub(super) fn take_descriptor(&mut self) -> Option<OwnedFd> {
        self.descriptors.pop_front()
    }

    fn whole_frame(&mut self) -> Result<Option<Frame>> {
        let received = &self.buffer[self.start..self.end];
        let Some(bytes) = received.first_chunk::<FRAME>() else { return Ok(None) };
        let frame = Frame::decode(bytes).map_err(malformed)?;
        let follow = match frame {
            Frame::Piece(Piece { source: Source::Inline, len, .. }) => len as usize, // at most MAX_INLINE, by `decode`
            _ => 0,
        };
        if received.len() < FRAME + follow {
            return Ok(None);
        }
        self.payload = self.start + FRAME..self.start + FRAME + follow;
        self.start += FRAME + follow;
        Ok(Some(frame))
    }

    /// Receives once; `false` when nothing has come.
    fn fill(&mut self) -> Result<bool> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.buffer.len() - self.end < FRAME + MAX_INLINE {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let mut came = 0;
        let descriptors = &mut self.descriptors;
        let take = |fd| {
            descriptors.push_back(fd);
            came += 1;
        };
        match sys::receive(self.stream.as_fd(), &mut self.buffer[self.end..], take) {
            Ok(received) => {
                if received.cut && came < sys::MAX_FDS {
                    // It was not for want of room in the message: this process may have no more open.
                    return Err(Error::new(VERB, Cause::Os { errno: libc::EMFILE, call: "recvmsg" }));
                }
                if received.cut || self.descriptors.len() > MAX_WAITING {
                    return Err(malformed("more descriptors than frames that carry one"));
                }
                self.end += received.len;
                self.ended = received.len == 0;
                Ok(true)
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(e) if is_disconnect(&e) => {
                self.ended = true;
                Ok(true)
            }
            Err(e) => Err(Error::from_io(VERB, "recvmsg", &e)),
        }
    }

    /// Whether the peer has closed, though there may be something to read still.
    pub(super) fn hung_up(&self) -> bool {
        self.deaf || self.ended || sys::hung_up(self.stream.as_fd())
    }

    /// Has `poller` watch for what is of use now: room to send while something waits, and input if `reading`.
    pub(super) fn watch(&mut self, poller: &Poller, number: u32, reading: bool) -> Result<()> {
        let sending = !self.deaf && (!self.outgoing.is_empty() || self.unsent_answers() > 0);
        let flag = |wanted, flag: i32| if wanted { flag as u32 } else { 0 };
        let interest = flag(reading, libc::EPOLLIN) | flag(sending, libc::EPOLLOUT);
        if self.interest == Some(interest) {
            return Ok(());
        }
        let change = if self.interest.is_some() { EpollChange::Modify } else { EpollChange::Add };
        poller
            .watch(change, self.stream.as_fd(), interest, number)
            .map_err(|e| Error::from_io(VERB, "epoll_ctl", &e))?;
        self.interest = Some(interest);
        Ok(())
    }

    /// Has `poller` not watch until [`watch`](Self::watch) is called again: a closed stream is always ready, whether it
    /// is of use or not.
    pub(super) fn unwatch(&mut self, poller: &Poller) {
        if self.interest.take().is_some() {
            // It can only fail for a descriptor that isn't watched.
            poller.watch(EpollChange::Remove, self.stream.as_fd(), 0, 0).ok();
        }
    }

    /// Ends the connection for both sides, also where a forked child has a copy of the descriptor.
    pub(super) fn close(mut self, poller: &Poller) {
        self.unwatch(poller);
        sys::shut_down(self.stream.as_fd());
    }
}

impl Inline {
    /// Sends a part of the current piece; returns how much, and the length of the piece with its frame.
    fn send(&mut self, stream: BorrowedFd<'_>, skip: usize) -> io::Result<(usize, usize)> {
        let (frame, len) = *self.current.get_or_insert_with(|| {
            let len = self.rest.len.min(MAX_INLINE as u64);
            let last = self.rest.last && len == self.rest.len;
            (Frame::Piece(Piece { len, last, ..self.rest }).encode(), len as usize)
        });
        let sent_of_tail = skip.saturating_sub(FRAME);
        let head = &frame[skip.min(FRAME)..];
        let tail = self.address.wrapping_add(sent_of_tail);
        // SAFETY: `len <= rest.len`, and `address` is valid for that many by the contract of `push_inline`.
        #[allow(unsafe_code)]
        let sent = would_block(unsafe { sys::send(stream, head, tail, len - sent_of_tail, None) })?;
        Ok((sent, FRAME + len))
    }

    /// Goes on behind the current piece; returns whether it was the last.
    fn advance(&mut self) -> bool {
        let len = self.current.take().map_or(0, |(_, len)| len);
        self.address = self.address.wrapping_add(len);
        self.rest.len -= len as u64;
        self.rest.first = false;
        if let Some(target) = &mut self.rest.target {
            target.offset = target.offset.wrapping_add(len as u64); // the owner checks it
        }
        self.rest.len == 0
    }
}

fn send(stream: BorrowedFd<'_>, bytes: &[u8], descriptor: Option<BorrowedFd<'_>>) -> io::Result<usize> {
    // SAFETY: the tail is empty.
    #[allow(unsafe_code)]
    would_block(unsafe { sys::send(stream, bytes, ptr::null(), 0, descriptor) })
}

/// No room is no bytes.
fn would_block(result: io::Result<usize>) -> io::Result<usize> {
    match result {
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(0),
        other => other,
    }
}

fn is_disconnect(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EPIPE | libc::ECONNRESET | libc::ENOTCONN))
}

/// The peer broke a rule.
pub(super) fn malformed(what: &'static str) -> Error {
    Error::new(VERB, Cause::Malformed { what })
}
