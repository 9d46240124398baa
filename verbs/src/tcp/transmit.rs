//! The sending half of a stream.

use super::queue_pair::Core;
use super::state::{Body, HEADERS, Local, Source};
use super::stream::{Socket, Stream};
use super::sys::Sources;
use super::wire::{Hello, Trailer};
use crate::memory::{Entry, Lent, Loan};
use crate::{CompletionStatus, Memory};
use core::sync::atomic::Ordering;
use std::io;
use std::net::TcpStream;

/// What goes out when a key is revoked behind a header that has already promised bytes.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// Where the data of one call of the system comes from.
enum From<'a> {
    Own(&'a Local),
    Region(&'a Memory),
    Loan(Loaned<'a>),
    Nowhere,
}

/// Lent bytes, held for one call.
struct Loaned<'a> {
    loan: &'a Loan,
    bytes: Lent<'a>,
    /// Where they would be in the region.
    offset: u64,
}

impl<'a> From<'a> {
    /// `inside` says whether the memory of an exposure was entered.
    fn of(source: &'a Source, inside: bool) -> Self {
        match source {
            Source::Own(local) => Self::Own(local),
            Source::Exposed(exposure) if inside => match exposure.loan().map(|(loan, at)| (loan, at, loan.enter())) {
                Some((loan, offset, Entry::Lent(bytes))) => Self::Loan(Loaned { loan, bytes, offset }),
                Some((.., Entry::Broken)) => Self::Nowhere,
                Some((.., Entry::Copied)) | None => Self::Region(exposure.memory()),
            },
            Source::Exposed(_) | Source::Revoked => Self::Nowhere,
        }
    }
}

impl Loaned<'_> {
    fn bytes(&self, offset: u64, len: usize) -> Option<&[u8]> {
        let start = usize::try_from(offset.checked_sub(self.offset)?).ok()?;
        self.bytes.get(start..start.checked_add(len)?)
    }

    fn note_taken(&self, bytes: u64) {
        self.loan.note_taken(bytes);
    }
}

/// What is on its way out.
#[derive(Debug)]
pub(super) struct Transmitter {
    /// The attempt to connect that this is for.
    attempt: u32,
    /// Whether this end's hello is among what has gone out or will.
    greeted: bool,
    /// Bytes that go before the body, and how many of them are out.
    headers: Vec<u8>,
    sent: usize,
    body: Option<Body>,
}

impl Transmitter {
    pub(super) fn new() -> Self {
        Self { attempt: 0, greeted: false, headers: Vec::with_capacity(HEADERS), sent: 0, body: None }
    }

    /// Lets go of all memory.
    pub(super) fn clear(&mut self) {
        self.body = None;
    }

    /// Sends one call's worth, at most `limit` bytes of data; whether the socket took all of it.
    fn send(&mut self, socket: &TcpStream, limit: usize, source: &From<'_>) -> io::Result<(usize, bool)> {
        let mut sources = Sources::new();
        sources.slice(&self.headers[self.sent..]);
        let mut trailer = [0; super::wire::TRAILER];
        if let Some(body) = &self.body {
            let wanted = limit.min(usize::try_from(body.remaining).unwrap_or(usize::MAX));
            let added = match source {
                From::Own(local) => local.gather(body.offset, wanted, sources.memory()),
                From::Region(memory) => {
                    let within = sources.memory().memory(memory, body.offset, wanted);
                    if within { wanted } else { 0 }
                }
                From::Loan(loan) => {
                    let bytes = loan.bytes(body.offset, wanted);
                    if bytes.is_some_and(|bytes| sources.slice(bytes)) { wanted } else { 0 }
                }
                From::Nowhere => {
                    let mut added = 0;
                    while added < wanted {
                        let now = ZEROS.len().min(wanted - added);
                        if !sources.slice(&ZEROS[..now]) {
                            break;
                        }
                        added += now;
                    }
                    added
                }
            };
            if let Some(id) = body.answers {
                let revoked = matches!(source, From::Nowhere);
                let status = if revoked { CompletionStatus::RemoteAccess } else { CompletionStatus::Success };
                trailer = Trailer { status, id }.encode();
                if added as u64 == body.remaining {
                    sources.slice(&trailer);
                }
            }
        }
        let offered = sources.bytes();
        let taken = sources.send(socket)?;
        self.advance(taken, &trailer);
        Ok((taken, taken == offered))
    }

    /// Notes that `taken` bytes are out: headers, data, and then bytes of the trailer.
    fn advance(&mut self, taken: usize, trailer: &[u8]) {
        let headers = taken.min(self.headers.len() - self.sent);
        self.sent += headers;
        if self.sent < self.headers.len() {
            return;
        }
        self.headers.clear();
        self.sent = 0;
        let Some(body) = &mut self.body else { return };
        let data = body.remaining.min((taken - headers) as u64);
        body.remaining -= data;
        body.offset += data;
        if body.remaining == 0 {
            if body.answers.is_some() {
                self.headers.extend_from_slice(&trailer[taken - headers - data as usize..]);
            }
            self.body = None;
        }
    }
}

impl Core {
    /// Sends on `stream` what there is to send, until nothing is left, the socket is full or `budget` is used up.
    pub(super) fn transmit(&self, stream: &Stream, budget: &mut usize) {
        stream.transmitter.run(|transmitter| {
            stream.wants_out.store(false, Ordering::SeqCst);
            let more = self.transmit_some(stream, transmitter, budget);
            stream.wants_out.store(more, Ordering::SeqCst);
        });
        if stream.wants_out.load(Ordering::SeqCst) {
            self.arm(stream);
        }
    }

    /// Whether there is more to send.
    fn transmit_some(&self, stream: &Stream, transmitter: &mut Transmitter, budget: &mut usize) -> bool {
        let Some(Socket { tcp: socket, attempt }) = stream.socket() else { return false };
        if !self.greet(stream, transmitter, attempt) {
            return false;
        }
        while !self.is_closed() {
            if transmitter.body.is_none() && self.carries(stream) {
                transmitter.body = self.pull(&mut transmitter.headers);
            }
            if transmitter.body.is_none() && transmitter.headers.is_empty() {
                self.rests();
                return false;
            }
            if *budget == 0 {
                return true;
            }
            let source = transmitter.body.as_ref().map_or(Source::Revoked, |body| body.source.clone());
            // The guards are held for one call alone: between two, the memory of a revoked key is free at once (I3), and
            // lent bytes are their lender's again.
            let inside = if let Source::Exposed(exposure) = &source { exposure.enter() } else { None };
            let from = From::of(&source, inside.is_some());
            if let (Source::Exposed(_), From::Nowhere, Some(body)) = (&source, &from, &mut transmitter.body) {
                self.refuse("a remote key that was revoked in the middle of a read");
                body.source = Source::Revoked;
            }
            let left = |transmitter: &Transmitter| transmitter.body.as_ref().map_or(0, |body| body.remaining);
            let (is_data, before) = (transmitter.body.is_some(), left(transmitter));
            let result = transmitter.send(&socket, self.write_size(), &from);
            if let From::Loan(loan) = &from {
                loan.note_taken(before - left(transmitter));
            }
            drop(from);
            drop(inside);
            match result {
                Ok((taken, all)) => {
                    *budget = budget.saturating_sub(taken);
                    if is_data {
                        self.sent(taken);
                    }
                    if !all {
                        return true;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    self.lost(stream, attempt, "sendmsg", &error);
                    return false;
                }
            }
        }
        false
    }

    /// Says hello first; `false` while this end has nothing to say yet.
    fn greet(&self, stream: &Stream, transmitter: &mut Transmitter, attempt: u32) -> bool {
        if transmitter.attempt != attempt {
            *transmitter = Transmitter { attempt, ..Transmitter::new() };
        }
        if transmitter.greeted {
            return true;
        }
        let streams = self.streams().len() as u8;
        let (answer, index) = match self.preface() {
            Some(preface) => {
                transmitter.headers.extend_from_slice(preface);
                (false, self.index_of(stream))
            }
            // Ready means that the hellos of all streams are there, and with them their numbers.
            None if self.is_ready() => (true, stream.called.load(Ordering::SeqCst)),
            None => return false,
        };
        transmitter.headers.extend_from_slice(&Hello { index, streams, answer }.encode());
        transmitter.greeted = true;
        true
    }
}
