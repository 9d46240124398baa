//! How the streams of a queue pair come about: the active end dials, the passive end is given what was accepted.
//!
//! The active end dials each stream, says the preface with the token and a hello, and waits for the passive end's hello,
//! which comes once that end has been told to connect and all its streams are there: from then on either may speak.

use super::queue_pair::Core;
use super::stream::{Socket, Stream};
use super::wire::{Address, Hello, Refused};
use super::{congestion, lock, sys};
use crate::{Cause, Error, QueuePairState, Result};
use core::net::SocketAddr;
use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;
use std::io;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::Mutex;
use std::time::Instant;

/// What is known once `connect` has been called.
#[derive(Debug)]
pub(super) struct Link {
    /// What each stream that this end dials begins with; `None` at the passive end.
    preface: Option<Vec<u8>>,
    addresses: Vec<SocketAddr>,
    deadline: Instant,
    /// How long one address is tried.
    patience: Duration,
    attempts: Mutex<Vec<Attempt>>,
}

/// Where the dialling of one stream stands.
#[derive(Debug, Clone, Copy)]
struct Attempt {
    /// Which address comes next.
    next: usize,
    until: Instant,
    /// Whether the connection is not there yet.
    connecting: bool,
    /// Whether the peer has answered.
    open: bool,
}

/// What counts the streams that are there.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    /// Streams adopted.
    adopted: AtomicU32,
    /// Whether the address, with the token, has been told.
    told: AtomicU32,
    /// Hellos received, a bit for each index.
    hellos: AtomicU32,
}

impl Core {
    pub(super) fn is_active(&self) -> bool {
        self.link().is_some_and(|link| link.preface.is_some())
    }

    /// What a stream that this end has dialled begins with.
    pub(super) fn preface(&self) -> Option<&[u8]> {
        self.link()?.preface.as_deref()
    }

    /// See [`QueuePair::address`](crate::QueuePair::address).
    pub(super) fn address(&self) -> Vec<u8> {
        let config = &self.device.config;
        Address { token: self.token, streams: config.streams, dial: config.advertised.clone() }.encode()
    }

    /// Has the device give streams with this queue pair's token to it, as its address is about to be told.
    pub(super) fn await_streams(self: &std::sync::Arc<Self>) {
        if self.arrivals.told.swap(1, Ordering::SeqCst) == 0 && !self.is_closed() && !self.is_active() {
            let streams = self.make_streams(self.device.config.streams);
            self.device.await_streams(self, streams.len());
        }
    }

    /// See [`QueuePair::connect`](crate::QueuePair::connect).
    pub(super) fn connect(&self, remote: &[u8], active: bool) -> Result<()> {
        const VERB: &str = "connect";
        let malformed = |what| Error::new(VERB, Cause::Malformed { what });
        let mut remote = Address::decode(remote).map_err(malformed)?;
        if active && self.device.config.loopback_only && !remote.dial.is_empty() {
            remote.dial.retain(|address| address.ip().to_canonical().is_loopback());
            if remote.dial.is_empty() {
                let what = "to connect beyond the loopback interface, where the peer's address is";
                return Err(Error::new(VERB, Cause::Denied { what }));
            }
        }
        if active && remote.dial.is_empty() {
            return Err(malformed("an address that names nowhere to dial"));
        }
        let mut state = self.state();
        if state.phase != QueuePairState::Reset {
            let cause = Cause::State { is: state.phase, needs: QueuePairState::Reset };
            return Err(Error::new(VERB, cause));
        }
        let (now, config) = (Instant::now(), &self.device.config);
        let deadline = now + config.connect_timeout;
        let patience = config.connect_timeout / remote.dial.len().max(1) as u32;
        let streams = if active {
            self.device.no_longer_await(self);
            if self.streams().iter().any(|stream| stream.socket().is_some()) {
                return Err(Error::new(VERB, Cause::Unsupported { what: "an active end that was dialled" }));
            }
            self.make_streams(remote.streams)
        } else {
            self.make_streams(config.streams)
        };
        if active && streams.len() != usize::from(remote.streams) {
            return Err(Error::new(VERB, Cause::Unsupported { what: "ends with different numbers of streams" }));
        }
        let attempt = Attempt { next: 0, until: now, connecting: active, open: false };
        self.set_link(Link {
            preface: active.then(|| (config.preface)(remote.token)),
            addresses: remote.dial,
            deadline,
            patience,
            attempts: Mutex::new(vec![attempt; streams.len()]),
        });
        state.phase = QueuePairState::Connecting;
        self.set_deadline(&mut state, if active { deadline.min(now + patience) } else { deadline });
        drop(state);
        if active {
            for stream in streams {
                if let Err((call, error)) = self.dial_next(stream) {
                    self.fail(Error::from_io(VERB, call, &error), None);
                    break;
                }
            }
        } else {
            self.become_ready();
        }
        Ok(())
    }

    /// Dials the next addresses until one is not refused at once.
    fn dial_next(&self, stream: &Stream) -> core::result::Result<(), (&'static str, io::Error)> {
        let index = usize::from(self.index_of(stream));
        let Some(link) = self.link() else { return Ok(()) };
        let mut last = ("connect", io::Error::from_raw_os_error(libc::EADDRNOTAVAIL));
        let mut attempts = lock(&link.attempts);
        let attempt = &mut attempts[index];
        while let Some(address) = link.addresses.get(attempt.next) {
            attempt.next += 1;
            attempt.until = Instant::now() + link.patience;
            attempt.connecting = true;
            match self.dial(stream, address) {
                Ok(()) => return Ok(()),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn dial(&self, stream: &Stream, address: &SocketAddr) -> core::result::Result<(), (&'static str, io::Error)> {
        let socket = sys::socket(address).map_err(|error| ("socket", error))?;
        self.configure(&socket).map_err(|error| ("setsockopt", error))?;
        sys::connect(&socket, address).map_err(|error| ("connect", error))?;
        stream.wants_in.store(false, Ordering::SeqCst);
        stream.wants_out.store(true, Ordering::SeqCst);
        stream.open(socket, &self.device.epoll, libc::EPOLLOUT).map_err(|error| ("epoll_ctl", error))
    }

    /// Whether the socket of `stream` is not connected yet.
    pub(super) fn is_dialling(&self, stream: &Stream) -> bool {
        let Some(link) = self.link().filter(|link| link.preface.is_some()) else { return false };
        lock(&link.attempts)[usize::from(self.index_of(stream))].connecting
    }

    /// The socket of `stream` is connected, or is not going to be.
    pub(super) fn on_dialled(&self, stream: &Stream, budget: &mut usize) {
        let (Some(link), Some(Socket { tcp: socket, attempt })) = (self.link(), stream.socket()) else { return };
        let outcome = match socket.take_error() {
            Ok(None) => match (socket.local_addr(), socket.peer_addr()) {
                // A port of ours that nobody listens on can be the very one that the system chose for this socket.
                (Ok(local), Ok(peer)) if local == peer => Err(io::Error::from_raw_os_error(libc::ECONNREFUSED)),
                (_, Err(error)) => Err(error),
                _ => Ok(()),
            },
            Ok(Some(error)) | Err(error) => Err(error),
        };
        if let Err(error) = outcome {
            self.lost(stream, attempt, "connect", &error);
            return;
        }
        lock(&link.attempts)[usize::from(self.index_of(stream))].connecting = false;
        stream.wants_in.store(true, Ordering::SeqCst);
        self.transmit(stream, budget);
    }

    /// After a failure of `stream` before its peer answered: dials the next address. `false` if there is none, or the
    /// connection was there already.
    pub(super) fn dial_again(&self, stream: &Stream, attempt: u32) -> bool {
        let Some(link) = self.link().filter(|link| link.preface.is_some()) else { return false };
        if stream.attempt() != attempt {
            return true; // another thread was here before
        }
        if lock(&link.attempts)[usize::from(self.index_of(stream))].open {
            return false;
        }
        self.dial_next(stream).is_ok()
    }

    /// See [`Device::adopt`](crate::Device::adopt).
    pub(super) fn adopt(&self, socket: TcpStream) -> Result<()> {
        const VERB: &str = "adopt";
        let Some(_inside) = self.enter() else {
            return Err(Error::new(VERB, Cause::NotFound { what: "queue pair that waits for this token" }));
        };
        self.configure(&socket).map_err(|error| Error::from_io(VERB, "setsockopt", &error))?;
        let index = self.arrivals.adopted.fetch_add(1, Ordering::SeqCst) as usize;
        let stream = self.streams().get(index).ok_or(Error::new(VERB, Cause::NotFound { what: "stream to adopt" }))?;
        stream.wants_in.store(true, Ordering::SeqCst);
        stream
            .open(socket, &self.device.epoll, libc::EPOLLIN)
            .map_err(|error| Error::from_io(VERB, "epoll_ctl", &error))
    }

    /// The peer has said hello on `stream`.
    pub(super) fn greeted(&self, stream: &Stream, hello: Hello) -> core::result::Result<(), Refused> {
        if usize::from(hello.streams) != self.streams().len() {
            return Err("a hello with another number of streams");
        }
        if hello.answer != self.is_active() {
            return Err("a hello of the wrong end");
        }
        if let Some(link) = self.link().filter(|link| link.preface.is_some()) {
            let index = self.index_of(stream);
            if hello.index != index {
                return Err("a hello for another stream");
            }
            lock(&link.attempts)[usize::from(index)].open = true;
        }
        stream.called.store(hello.index, Ordering::SeqCst);
        let bit = 1 << hello.index;
        if self.arrivals.hellos.fetch_or(bit, Ordering::SeqCst) & bit != 0 {
            return Err("two streams of one number");
        }
        self.become_ready();
        Ok(())
    }

    /// Once all streams are there and this end has been told to connect: requests go out.
    fn become_ready(&self) {
        let mut state = self.state();
        let all = (1 << self.streams().len()) - 1;
        if state.phase != QueuePairState::Connecting || self.arrivals.hellos.load(Ordering::SeqCst) != all {
            return;
        }
        state.phase = QueuePairState::ReadyToSend;
        drop(state);
        self.start_choosing();
        self.device.wake.notify(); // another thread may be waiting for just that
        for stream in self.streams() {
            self.transmit(stream, &mut { super::queue_pair::POST_BUDGET });
        }
        self.send_what_is_left(&mut { super::queue_pair::POST_BUDGET });
    }

    /// Gives up addresses, and the whole attempt, when their time is over.
    pub(super) fn on_connect_deadline(&self, now: Instant) {
        let Some(link) = self.link() else { return };
        if self.state().phase != QueuePairState::Connecting {
            return;
        }
        if now >= link.deadline {
            let cause = Cause::Os { errno: libc::ETIMEDOUT, call: "connect" };
            self.fail(Error::new("connect", cause), None);
            return;
        }
        let mut next = link.deadline;
        if link.preface.is_some() {
            for (index, stream) in self.streams().iter().enumerate() {
                let Attempt { next: address, until, open, .. } = lock(&link.attempts)[index];
                if open || address >= link.addresses.len() {
                    continue;
                }
                if until <= now {
                    self.lost(stream, stream.attempt(), "connect", &io::Error::from_raw_os_error(libc::ETIMEDOUT));
                }
                next = next.min(until.max(now + Duration::from_millis(1)));
            }
        }
        self.set_deadline(&mut self.state(), next);
    }

    fn configure(&self, socket: &TcpStream) -> io::Result<()> {
        let config = &self.device.config;
        socket.set_nonblocking(true)?;
        socket.set_nodelay(true)?;
        let fd = socket.as_fd();
        congestion::start_unpaced(fd);
        // A peer that does not take what is sent for so long is gone, also when its machine is; so is one that is silent
        // and does not answer three probes.
        let patience = i32::try_from(config.peer_timeout.as_millis()).unwrap_or(i32::MAX);
        sys::set_option(fd, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, patience)?;
        let seconds = i32::try_from(config.peer_timeout.as_secs()).unwrap_or(i32::MAX);
        sys::set_option(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1)?;
        sys::set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, (seconds / 2).max(1))?;
        sys::set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, (seconds / 6).max(1))?;
        sys::set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 3)
    }
}
