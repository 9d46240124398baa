//! Connections: listening, accepting, dialling, reading and writing, all without blocking.
//!
//! An accepted connection says first what it is for (its preface); control connections become links of the engine,
//! data connections go to the device whose queue pair gave out their token. How many may wait with half a preface, and
//! for how long, is limited (I7).

use super::reactor::FIRST_NET;
use crate::engine::{Action, Engine, LinkId, Transport};
use crate::sys;
use mio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use mio::unix::SourceFd;
use mio::{Interest, Registry, Token};
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::SocketAddr as UnixAddr;
use towline_control::address::Address;
use towline_control::preface::{Preface, Purpose};
use towline_verbs::{Device, ProviderKind};

/// Connections that have not said yet what they are for.
const MAX_PENDING: usize = 256;
/// How long they have for it, in nanoseconds.
const PREFACE_TIME: u64 = 5_000_000_000;
/// Ended connections whose last bytes are on their way to the peer, and how long they are kept for that.
const MAX_LINGERING: usize = 64;
const LINGER_TIME: u64 = 1_000_000_000;
/// Bytes asked for in one read of a control connection.
const READ: usize = 64 << 10;
/// Reads of one connection in one turn, so that one peer does not keep the others waiting (I7).
const READS: usize = 8;

/// What an endpoint listens at.
#[derive(Debug, Default)]
pub(crate) struct Listeners {
    pub(crate) tcp: Vec<std::net::TcpListener>,
    pub(crate) unix: Option<std::os::unix::net::UnixListener>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Readiness {
    pub(super) readable: bool,
    pub(super) writable: bool,
}

#[derive(Debug)]
enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    fn transport(&self) -> Transport {
        match self {
            Self::Tcp(_) => Transport::Tcp,
            Self::Unix(_) => Transport::Unix,
        }
    }

    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.read(bytes),
            Self::Unix(stream) => stream.read(bytes),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.write(bytes),
            Self::Unix(stream) => stream.write(bytes),
        }
    }

    fn shutdown_write(&self) {
        let _already_closed = match self {
            Self::Tcp(stream) => stream.shutdown(std::net::Shutdown::Write),
            Self::Unix(stream) => stream.shutdown(std::net::Shutdown::Write),
        };
    }

    fn into_fd(self) -> OwnedFd {
        match self {
            Self::Tcp(stream) => OwnedFd::from(std::net::TcpStream::from(stream)),
            Self::Unix(stream) => OwnedFd::from(std::os::unix::net::UnixStream::from(stream)),
        }
    }

    fn source(&mut self) -> &mut dyn mio::event::Source {
        match self {
            Self::Tcp(stream) => stream,
            Self::Unix(stream) => stream,
        }
    }
}

#[derive(Debug)]
enum Entry {
    Tcp(TcpListener),
    Unix(UnixListener),
    Pending { stream: Stream, bytes: [u8; Preface::LEN], got: usize, until: u64 },
    Dialing { link: LinkId, stream: TcpStream, rest: VecDeque<SocketAddr>, tried: String },
    Link { link: LinkId, stream: Stream, paused: bool },
    Lingering { stream: Stream, until: u64 },
    Process { link: LinkId, pidfd: OwnedFd },
}

#[derive(Debug)]
pub(super) struct Net {
    registry: Registry,
    entries: BTreeMap<usize, Entry>,
    links: BTreeMap<LinkId, usize>,
    next: usize,
    pending: usize,
    lingering: usize,
    devices: Vec<Device>,
}

impl Net {
    pub(super) fn new(registry: Registry, listeners: Listeners, devices: Vec<Device>) -> io::Result<Self> {
        let mut net = Self {
            registry,
            entries: BTreeMap::new(),
            links: BTreeMap::new(),
            next: FIRST_NET,
            pending: 0,
            lingering: 0,
            devices,
        };
        for listener in listeners.tcp {
            listener.set_nonblocking(true)?;
            let mut listener = TcpListener::from_std(listener);
            let token = net.token();
            net.registry.register(&mut listener, token, Interest::READABLE)?;
            net.entries.insert(token.0, Entry::Tcp(listener));
        }
        if let Some(listener) = listeners.unix {
            listener.set_nonblocking(true)?;
            let mut listener = UnixListener::from_std(listener);
            let token = net.token();
            net.registry.register(&mut listener, token, Interest::READABLE)?;
            net.entries.insert(token.0, Entry::Unix(listener));
        }
        Ok(net)
    }

    fn token(&mut self) -> Token {
        let token = Token(self.next);
        self.next += 1;
        token
    }

    /// Does what the engine asks for.
    pub(super) fn perform(&mut self, engine: &mut Engine, action: Action) {
        match action {
            Action::Dial { link, unix, addresses } => self.dial(engine, link, unix.as_deref(), &addresses),
            Action::Flush(link) => self.flush(engine, link),
            Action::Last { link, bytes } => self.last(link, &bytes),
            Action::Close(link) => self.close(link),
            Action::WatchProcess(link) => self.watch(engine, link),
            Action::UnwatchProcess(link) => self.unwatch(link),
            Action::Wake(_) => {}
        }
    }

    /// Something can be read from or written to what `token` stands for.
    pub(super) fn event(&mut self, engine: &mut Engine, token: Token, readiness: Readiness) {
        match self.entries.get(&token.0) {
            Some(Entry::Tcp(_) | Entry::Unix(_)) => self.accept(engine, token),
            Some(Entry::Pending { .. }) => self.read_preface(engine, token),
            Some(Entry::Dialing { .. }) => self.dialled(engine, token),
            Some(Entry::Link { link, .. }) => {
                let link = *link;
                if readiness.writable {
                    self.flush(engine, link);
                }
                if readiness.readable {
                    self.read(engine, token);
                }
            }
            Some(Entry::Lingering { .. }) => self.drain(token),
            Some(Entry::Process { link, .. }) => {
                let link = *link;
                self.remove(token.0);
                engine.process_ended(sys::boot_clock(), link);
            }
            None => {} // closed earlier in this turn
        }
    }

    fn accept(&mut self, engine: &mut Engine, listener: Token) {
        loop {
            let accepted = match self.entries.get(&listener.0) {
                Some(Entry::Tcp(listener)) => listener.accept().map(|(stream, _)| {
                    let _only_slower = stream.set_nodelay(true);
                    Stream::Tcp(stream)
                }),
                Some(Entry::Unix(listener)) => listener.accept().map(|(stream, _)| Stream::Unix(stream)),
                _ => return,
            };
            let mut stream = match accepted {
                Ok(stream) => stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // The connection died in the queue, or descriptors ran out; edge-triggered, so go on until it would block.
                Err(error) if matches!(error.raw_os_error(), Some(libc::ECONNABORTED | libc::EINTR)) => continue,
                Err(_) => return,
            };
            self.sweep();
            if self.pending >= MAX_PENDING {
                continue; // dropped: the peer sees a reset and may come again
            }
            let token = self.token();
            if self.registry.register(stream.source(), token, Interest::READABLE | Interest::WRITABLE).is_err() {
                continue;
            }
            self.pending += 1;
            let until = sys::boot_clock() + PREFACE_TIME;
            self.entries.insert(token.0, Entry::Pending { stream, bytes: [0; Preface::LEN], got: 0, until });
            self.read_preface(engine, token);
        }
    }

    /// Drops what has had its time.
    fn sweep(&mut self) {
        let now = sys::boot_clock();
        let late = |entry: &Entry| match entry {
            Entry::Pending { until, .. } | Entry::Lingering { until, .. } => *until < now,
            _ => false,
        };
        let late: Vec<usize> = self.entries.iter().filter(|(_, entry)| late(entry)).map(|(token, _)| *token).collect();
        for token in late {
            self.remove(token);
        }
    }

    fn remove(&mut self, token: usize) -> Option<Entry> {
        let mut entry = self.entries.remove(&token)?;
        let _was_registered = match &mut entry {
            Entry::Tcp(source) => self.registry.deregister(source),
            Entry::Unix(source) => self.registry.deregister(source),
            Entry::Pending { stream, .. } => {
                self.pending -= 1;
                self.registry.deregister(stream.source())
            }
            Entry::Lingering { stream, .. } => {
                self.lingering -= 1;
                self.registry.deregister(stream.source())
            }
            Entry::Dialing { stream, link, .. } => {
                self.links.remove(link);
                self.registry.deregister(stream)
            }
            Entry::Link { stream, link, .. } => {
                self.links.remove(link);
                self.registry.deregister(stream.source())
            }
            Entry::Process { pidfd, .. } => self.registry.deregister(&mut SourceFd(&pidfd.as_raw_fd())),
        };
        Some(entry)
    }

    fn read_preface(&mut self, engine: &mut Engine, token: Token) {
        let Some(Entry::Pending { stream, bytes, got, .. }) = self.entries.get_mut(&token.0) else { return };
        while *got < Preface::LEN {
            match stream.read(&mut bytes[*got..]) {
                Ok(0) => {
                    self.remove(token.0);
                    return;
                }
                Ok(len) => *got += len,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => {
                    self.remove(token.0);
                    return;
                }
            }
        }
        let preface = Preface::decode(bytes);
        let Some(Entry::Pending { stream, .. }) = self.remove(token.0) else { return };
        match preface {
            Ok(Preface { purpose: Purpose::Data { token } }) => {
                let kind = match stream {
                    Stream::Tcp(_) => ProviderKind::Tcp,
                    Stream::Unix(_) => ProviderKind::Shm,
                };
                if let Some(device) = self.devices.iter().find(|device| device.info().kind == kind) {
                    // An unknown token is refused by dropping the connection.
                    let _refused = device.adopt(stream.into_fd(), towline_verbs::Token(token));
                }
            }
            Ok(preface) => {
                if let Ok(link) = engine.accepted(sys::boot_clock(), stream.transport(), preface) {
                    self.open(engine, link, stream);
                }
            }
            Err(error) => {
                // Another version gets an answer that says which ones are spoken here; a stranger gets nothing.
                let mut stream = stream;
                if let Some(answer) = engine.answer_preface(&error) {
                    let _best_effort = stream.write(&answer);
                    self.linger(stream);
                }
            }
        }
    }

    /// The connection is the link's from now on.
    fn open(&mut self, engine: &mut Engine, link: LinkId, mut stream: Stream) {
        let token = self.token();
        if let Err(error) = self.registry.register(stream.source(), token, Interest::READABLE | Interest::WRITABLE) {
            engine.disconnected(sys::boot_clock(), link, &error.to_string());
            return;
        }
        self.links.insert(link, token.0);
        self.entries.insert(token.0, Entry::Link { link, stream, paused: false });
        self.flush(engine, link);
        self.read(engine, token);
    }

    fn dial(&mut self, engine: &mut Engine, link: LinkId, unix: Option<&[u8]>, addresses: &[Address]) {
        let mut tried = String::new();
        if let Some(name) = unix {
            let connected = UnixAddr::from_abstract_name(name).and_then(|address| UnixStream::connect_addr(&address));
            match connected {
                Ok(stream) => {
                    engine.connected(sys::boot_clock(), link, Transport::Unix);
                    self.open(engine, link, Stream::Unix(stream));
                    return;
                }
                Err(error) => {
                    let errno = error.raw_os_error().unwrap_or(libc::EIO);
                    note(&mut tried, &format!("unix:{}", String::from_utf8_lossy(name)), &error);
                    if addresses.is_empty() {
                        engine.connect_failed(sys::boot_clock(), link, errno, tried);
                        return;
                    }
                    engine.unix_failed(link, &error.to_string());
                }
            }
        }
        let ip = |address: &Address| match address {
            Address::Ip(address) => Some(*address),
            Address::Host(_) | Address::Unix(_) => None, // names were resolved before
        };
        let rest = addresses.iter().filter_map(ip).collect();
        self.dial_next(engine, link, rest, tried, libc::EADDRNOTAVAIL);
    }

    fn dial_next(
        &mut self,
        engine: &mut Engine,
        link: LinkId,
        mut rest: VecDeque<SocketAddr>,
        mut tried: String,
        mut errno: i32,
    ) {
        while let Some(address) = rest.pop_front() {
            let token = self.token();
            let connecting = TcpStream::connect(address).and_then(|mut stream| {
                self.registry.register(&mut stream, token, Interest::READABLE | Interest::WRITABLE)?;
                Ok(stream)
            });
            match connecting {
                Ok(stream) => {
                    self.links.insert(link, token.0);
                    self.entries.insert(token.0, Entry::Dialing { link, stream, rest, tried });
                    return;
                }
                Err(error) => {
                    errno = error.raw_os_error().unwrap_or(libc::EIO);
                    note(&mut tried, &address.to_string(), &error);
                }
            }
        }
        engine.connect_failed(sys::boot_clock(), link, errno, tried);
    }

    fn dialled(&mut self, engine: &mut Engine, token: Token) {
        let Some(Entry::Dialing { stream, .. }) = self.entries.get_mut(&token.0) else { return };
        let error = match stream.take_error() {
            Ok(None) => match stream.peer_addr() {
                Ok(_) => None,
                Err(error) if error.kind() == ErrorKind::NotConnected => return, // not yet
                Err(error) => Some(error),
            },
            Ok(Some(error)) | Err(error) => Some(error),
        };
        let address = stream.peer_addr().ok();
        let Some(Entry::Dialing { link, stream, rest, mut tried }) = self.remove(token.0) else { return };
        match error {
            None => {
                let _only_slower = stream.set_nodelay(true);
                engine.connected(sys::boot_clock(), link, Transport::Tcp);
                self.open(engine, link, Stream::Tcp(stream));
            }
            Some(error) => {
                let name = address.map_or_else(|| "the last address".to_owned(), |address| address.to_string());
                note(&mut tried, &name, &error);
                let errno = error.raw_os_error().unwrap_or(libc::EIO);
                self.dial_next(engine, link, rest, tried, errno);
            }
        }
    }

    fn read(&mut self, engine: &mut Engine, token: Token) {
        for _ in 0..READS {
            let Some(Entry::Link { link, stream, paused }) = self.entries.get_mut(&token.0) else { return };
            let link = *link;
            let Some(room) = engine.input(link, READ) else {
                *paused = true; // the peer takes nothing off our hands: nothing more is taken from it
                return;
            };
            *paused = false;
            let asked = room.len();
            match stream.read(room) {
                Ok(0) => {
                    engine.disconnected(sys::boot_clock(), link, "closed by the peer");
                    return;
                }
                Ok(len) => {
                    engine.received(sys::boot_clock(), link, len);
                    if len < asked {
                        return; // all that was there: the next byte raises another event
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    engine.disconnected(sys::boot_clock(), link, &error.to_string());
                    return;
                }
            }
        }
        // There may be more: ask for another event, which comes at once if there is.
        if let Some(Entry::Link { stream, .. }) = self.entries.get_mut(&token.0) {
            let _stays_registered =
                self.registry.reregister(stream.source(), token, Interest::READABLE | Interest::WRITABLE);
        }
    }

    fn flush(&mut self, engine: &mut Engine, link: LinkId) {
        engine.flushing(link);
        let Some(token) = self.links.get(&link).copied() else { return };
        let Some(Entry::Link { stream, paused, .. }) = self.entries.get_mut(&token) else { return };
        loop {
            let output = engine.output(link);
            if output.is_empty() {
                break;
            }
            match stream.write(output) {
                Ok(len) => engine.sent(link, len),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    engine.disconnected(sys::boot_clock(), link, &error.to_string());
                    return;
                }
            }
        }
        if *paused {
            self.read(engine, Token(token));
        }
    }

    fn last(&mut self, link: LinkId, bytes: &[u8]) {
        let Some(token) = self.links.get(&link) else { return };
        if let Some(Entry::Link { stream, .. }) = self.entries.get_mut(token) {
            let _best_effort = stream.write(bytes);
        }
    }

    /// Ends the connection of `link`. What was sent last gets the time to arrive: a socket that is closed with bytes
    /// unread takes them back.
    fn close(&mut self, link: LinkId) {
        let Some(token) = self.links.get(&link).copied() else { return };
        if let Some(Entry::Link { stream, .. }) = self.remove(token) {
            self.linger(stream);
        }
    }

    fn linger(&mut self, mut stream: Stream) {
        stream.shutdown_write();
        self.sweep();
        if self.lingering >= MAX_LINGERING {
            return;
        }
        let token = self.token();
        if self.registry.register(stream.source(), token, Interest::READABLE).is_ok() {
            self.lingering += 1;
            self.entries.insert(token.0, Entry::Lingering { stream, until: sys::boot_clock() + LINGER_TIME });
            self.drain(token);
        }
    }

    fn drain(&mut self, token: Token) {
        let mut scrap = [0; 4096];
        let Some(Entry::Lingering { stream, .. }) = self.entries.get_mut(&token.0) else { return };
        for _ in 0..64 {
            match stream.read(&mut scrap) {
                Ok(len) if len > 0 => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                _ => break,
            }
        }
        self.remove(token.0);
    }

    fn watch(&mut self, engine: &mut Engine, link: LinkId) {
        let Some(token) = self.links.get(&link) else { return };
        let Some(Entry::Link { stream: Stream::Unix(stream), .. }) = self.entries.get(token) else { return };
        let pidfd = match sys::peer_pidfd(stream) {
            Ok(pidfd) => pidfd,
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {
                engine.process_ended(sys::boot_clock(), link);
                return;
            }
            Err(_) => return, // its word is awaited then, as long as this endpoint lives
        };
        let token = self.token();
        if self.registry.register(&mut SourceFd(&pidfd.as_raw_fd()), token, Interest::READABLE).is_ok() {
            self.entries.insert(token.0, Entry::Process { link, pidfd });
        }
    }
}

impl Net {
    fn unwatch(&mut self, link: LinkId) {
        let watch = |entry: &Entry| matches!(entry, Entry::Process { link: watched, .. } if *watched == link);
        let token = self.entries.iter().find(|(_, entry)| watch(entry)).map(|(token, _)| *token);
        if let Some(token) = token {
            self.remove(token);
        }
    }
}

fn note(tried: &mut String, name: &str, error: &io::Error) {
    if !tried.is_empty() {
        tried.push_str("; ");
    }
    tried.push_str(name);
    tried.push_str(": ");
    tried.push_str(&error.to_string());
}
