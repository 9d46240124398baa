//! Connections: listening, accepting, dialling, reading and writing, all without blocking.
//!
//! An accepted connection says first what it is for (its preface); control connections become links of the engine,
//! data connections go to the device whose queue pair gave out their token. How many may wait with half a preface, and
//! for how long, is limited (I7).

use super::reactor::FIRST_NET;
use crate::engine::{Action, Engine, LinkId, Transport};
use crate::sys;
use mio::unix::SourceFd;
use mio::{Interest, Registry, Token};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use towline_control::address::{Address, UnixName};
use towline_control::preface::{Preface, Purpose};
use towline_control::socket::{Listener, PeerProcess, Received, SocketError, SocketName, Stream};
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

#[derive(Debug, Clone, Copy)]
pub(super) struct Readiness {
    pub(super) readable: bool,
    pub(super) writable: bool,
}

#[derive(Debug)]
enum Entry {
    Listener(Listener),
    Pending { stream: Stream, bytes: [u8; Preface::LEN], got: usize, until: u64 },
    Dialing { link: LinkId, stream: Stream, address: SocketAddr, rest: VecDeque<SocketAddr>, tried: String },
    Link { link: LinkId, stream: Stream, paused: bool },
    Lingering { stream: Stream, until: u64 },
    Process { link: LinkId, process: PeerProcess },
}

impl Entry {
    fn fd(&self) -> i32 {
        match self {
            Self::Listener(listener) => listener.as_fd(),
            Self::Pending { stream, .. }
            | Self::Dialing { stream, .. }
            | Self::Link { stream, .. }
            | Self::Lingering { stream, .. } => stream.as_fd(),
            Self::Process { process, .. } => process.as_fd(),
        }
        .as_raw_fd()
    }
}

/// All connections of an endpoint.
#[derive(Debug)]
pub(super) struct Net {
    registry: Registry,
    entries: BTreeMap<usize, Entry>,
    links: BTreeMap<LinkId, usize>,
    next: usize,
    pending: usize,
    lingering: usize,
    /// Listeners whose queue could not be emptied for want of descriptors.
    starved: Vec<Token>,
    /// Links whose peer's process could not be watched for want of descriptors, with their streams once they have ended:
    /// through the stream the process is still found.
    unwatched: BTreeMap<LinkId, Option<Stream>>,
    devices: Vec<Device>,
}

impl Net {
    pub(super) fn new(registry: Registry, listeners: Vec<Listener>, devices: Vec<Device>) -> io::Result<Self> {
        let mut net = Self {
            registry,
            entries: BTreeMap::new(),
            links: BTreeMap::new(),
            next: FIRST_NET,
            pending: 0,
            lingering: 0,
            starved: Vec::new(),
            unwatched: BTreeMap::new(),
            devices,
        };
        for listener in listeners {
            net.insert(Entry::Listener(listener), Interest::READABLE)?;
        }
        Ok(net)
    }

    /// Keeps `entry`, and watches its descriptor.
    fn insert(&mut self, entry: Entry, interest: Interest) -> io::Result<Token> {
        let token = Token(self.next);
        self.next += 1;
        self.registry.register(&mut SourceFd(&entry.fd()), token, interest)?;
        match &entry {
            Entry::Pending { .. } => self.pending += 1,
            Entry::Lingering { .. } => self.lingering += 1,
            Entry::Dialing { link, .. } | Entry::Link { link, .. } => {
                self.links.insert(*link, token.0);
            }
            Entry::Listener(_) | Entry::Process { .. } => {}
        }
        self.entries.insert(token.0, entry);
        Ok(token)
    }

    fn remove(&mut self, token: usize) -> Option<Entry> {
        let entry = self.entries.remove(&token)?;
        let _was_registered = self.registry.deregister(&mut SourceFd(&entry.fd()));
        match &entry {
            Entry::Pending { .. } => self.pending -= 1,
            Entry::Lingering { .. } => self.lingering -= 1,
            Entry::Dialing { link, .. } | Entry::Link { link, .. } => {
                self.links.remove(link);
            }
            Entry::Listener(_) | Entry::Process { .. } => {}
        }
        Some(entry)
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
            Some(Entry::Listener(_)) => self.accept(engine, token),
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

    fn accept(&mut self, engine: &mut Engine, token: Token) {
        loop {
            let Some(Entry::Listener(listener)) = self.entries.get(&token.0) else { return };
            let stream = match listener.accept() {
                Ok(Some(stream)) => stream,
                Ok(None) => return,
                Err(_out_of_descriptors) => {
                    // Events are edge-triggered: it is tried again when a descriptor has become free.
                    self.starved.push(token);
                    return;
                }
            };
            self.sweep();
            if self.pending >= MAX_PENDING {
                // The oldest makes way: an honest peer's preface comes right behind its connection (I7).
                let pending = |entry: &Entry| matches!(entry, Entry::Pending { .. });
                let oldest = self.entries.iter().find(|(_, entry)| pending(entry)).map(|(token, _)| *token);
                oldest.and_then(|token| self.remove(token));
            }
            let until = sys::boot_clock() + PREFACE_TIME;
            let pending = Entry::Pending { stream, bytes: [0; Preface::LEN], got: 0, until };
            if let Ok(token) = self.insert(pending, BOTH) {
                self.read_preface(engine, token);
            }
        }
    }

    /// Whether connections wait to be accepted, or processes to be watched, for want of descriptors. Nothing says when
    /// there are some again.
    pub(super) fn is_starved(&self) -> bool {
        !self.starved.is_empty() || !self.unwatched.is_empty()
    }

    /// Tries again what lacked descriptors.
    pub(super) fn serve_starved(&mut self, engine: &mut Engine) {
        let unwatched: Vec<LinkId> = self.unwatched.keys().copied().collect();
        for link in unwatched {
            self.watch(engine, link);
        }
        for token in std::mem::take(&mut self.starved) {
            self.sweep();
            self.accept(engine, token);
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

    fn read_preface(&mut self, engine: &mut Engine, token: Token) {
        let Some(Entry::Pending { stream, bytes, got, .. }) = self.entries.get_mut(&token.0) else { return };
        while *got < Preface::LEN {
            match stream.receive(&mut bytes[*got..]) {
                Ok(Received::Bytes(len)) => *got += len,
                Ok(Received::Nothing) => return,
                Ok(Received::End) | Err(_) => {
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
                    let _refused = device.adopt(into_fd(stream), towline_verbs::Token(token));
                }
            }
            Ok(preface) => {
                let transport = match &stream {
                    Stream::Tcp(_) => match stream.peer_address() {
                        Ok(Some(peer)) => Transport::Tcp { peer },
                        Ok(None) | Err(_) => return, // gone already
                    },
                    Stream::Unix(_) => unix_transport(&stream),
                };
                if let Ok(link) = engine.accepted(sys::boot_clock(), transport, preface) {
                    self.open(engine, link, stream);
                }
            }
            Err(error) => {
                // Another version gets an answer that says which ones are spoken here; a stranger gets nothing.
                if let Some(answer) = engine.answer_preface(&error) {
                    let _best_effort = stream.send(&answer);
                    self.linger(stream);
                }
            }
        }
    }

    /// The connection is the link's from now on.
    fn open(&mut self, engine: &mut Engine, link: LinkId, stream: Stream) {
        match self.insert(Entry::Link { link, stream, paused: false }, BOTH) {
            Ok(token) => {
                self.flush(engine, link);
                self.read(engine, token);
            }
            Err(error) => engine.disconnected(sys::boot_clock(), link, &error.to_string()),
        }
    }

    fn dial(&mut self, engine: &mut Engine, link: LinkId, unix: Option<&[u8]>, addresses: &[Address]) {
        let mut tried = String::new();
        if let Some(name) = unix {
            let connected = UnixName::new(name).map_err(|error| (libc::EINVAL, error.to_string())).and_then(|name| {
                Stream::connect(&SocketName::Unix(name)).map_err(|error| (errno(&error), error.to_string()))
            });
            let connected = connected.and_then(|stream| match engine.may_connect(link, unix_transport(&stream)) {
                true => Ok(stream),
                false => Err((libc::EACCES, "the Unix socket of that name is another user's".to_owned())),
            });
            match connected {
                Ok(stream) => {
                    engine.connected(sys::boot_clock(), link, unix_transport(&stream));
                    self.open(engine, link, stream);
                    return;
                }
                Err((errno, text)) if addresses.is_empty() => {
                    engine.connect_failed(sys::boot_clock(), link, errno, text);
                    return;
                }
                Err((_, text)) => {
                    engine.unix_failed(link, &text);
                    tried = text;
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
        mut last: i32,
    ) {
        while let Some(address) = rest.pop_front() {
            match Stream::connect(&SocketName::Tcp(address)) {
                Ok(stream) => {
                    let dialing = Entry::Dialing { link, stream, address, rest: rest.clone(), tried: tried.clone() };
                    if let Ok(token) = self.insert(dialing, BOTH) {
                        self.dialled(engine, token);
                        return;
                    }
                }
                Err(error) => {
                    last = errno(&error);
                    note(&mut tried, &error.to_string());
                }
            }
        }
        engine.connect_failed(sys::boot_clock(), link, last, tried);
    }

    fn dialled(&mut self, engine: &mut Engine, token: Token) {
        let Some(Entry::Dialing { stream, .. }) = self.entries.get(&token.0) else { return };
        let connected = match stream.connected() {
            Ok(false) => return, // another event says when
            Ok(true) => Ok(()),
            Err(error) => Err(error),
        };
        let Some(Entry::Dialing { link, stream, address, rest, mut tried }) = self.remove(token.0) else { return };
        match connected {
            Ok(()) => {
                engine.connected(sys::boot_clock(), link, Transport::Tcp { peer: address });
                self.open(engine, link, stream);
            }
            Err(error) => {
                note(&mut tried, &format!("{address}: {error}"));
                self.dial_next(engine, link, rest, tried, errno(&error));
            }
        }
    }

    fn read(&mut self, engine: &mut Engine, token: Token) {
        for _ in 0..READS {
            let Some(Entry::Link { link, stream, paused }) = self.entries.get_mut(&token.0) else { return };
            let link = *link;
            let Some(room) = engine.input(link, READ).filter(|room| !room.is_empty()) else {
                *paused = true; // the peer takes nothing off our hands: nothing more is taken from it
                return;
            };
            *paused = false;
            let asked = room.len();
            match stream.receive(room) {
                Ok(Received::Bytes(len)) => {
                    engine.received(sys::boot_clock(), link, len);
                    if len < asked {
                        return; // all that was there: the next byte raises another event
                    }
                }
                Ok(Received::Nothing) => return,
                Ok(Received::End) => {
                    engine.disconnected(sys::boot_clock(), link, "closed by the peer");
                    return;
                }
                Err(error) => {
                    engine.disconnected(sys::boot_clock(), link, &error.to_string());
                    return;
                }
            }
        }
        // There may be more: ask for another event, which comes at once if there is.
        if let Some(entry) = self.entries.get(&token.0) {
            let _stays_registered = self.registry.reregister(&mut SourceFd(&entry.fd()), token, BOTH);
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
            match stream.send(output) {
                Ok(0) => break,
                Ok(len) => engine.sent(link, len),
                Err(_) => {
                    // Why is for the reading side to say: a reject may be waiting there.
                    self.read(engine, Token(token));
                    engine.disconnected(sys::boot_clock(), link, "the connection broke while sending");
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
        if let Some(Entry::Link { stream, .. }) = self.entries.get(token) {
            let _best_effort = stream.send(bytes);
        }
    }

    /// Ends the connection of `link`. What was sent last gets the time to arrive: a socket that is closed with bytes
    /// unread takes them back.
    fn close(&mut self, link: LinkId) {
        let Some(token) = self.links.get(&link).copied() else { return };
        if let Some(Entry::Link { stream, .. }) = self.remove(token) {
            match self.unwatched.get_mut(&link) {
                Some(kept) => {
                    let _gone_already = stream.shutdown_send();
                    *kept = Some(stream);
                }
                None => self.linger(stream),
            }
        }
    }

    fn linger(&mut self, stream: Stream) {
        let _gone_already = stream.shutdown_send();
        self.sweep();
        if self.lingering >= MAX_LINGERING {
            return;
        }
        let lingering = Entry::Lingering { stream, until: sys::boot_clock() + LINGER_TIME };
        if let Ok(token) = self.insert(lingering, Interest::READABLE) {
            self.drain(token);
        }
    }

    fn drain(&mut self, token: Token) {
        let mut scrap = [0; 4096];
        let Some(Entry::Lingering { stream, .. }) = self.entries.get(&token.0) else { return };
        for _ in 0..64 {
            match stream.receive(&mut scrap) {
                Ok(Received::Bytes(_)) => {}
                Ok(Received::Nothing) => return,
                Ok(Received::End) | Err(_) => break,
            }
        }
        self.remove(token.0);
    }

    fn watch(&mut self, engine: &mut Engine, link: LinkId) {
        let ended = self.unwatched.remove(&link).flatten();
        let open = self.links.get(&link).and_then(|token| self.entries.get(token));
        let stream = match (&ended, open) {
            (Some(stream), _) | (None, Some(Entry::Link { stream, .. })) => stream,
            _ => return,
        };
        let watched = match stream.peer_process() {
            Ok(Some(process)) => self.insert(Entry::Process { link, process }, Interest::READABLE).is_ok(),
            Err(error) if errno(&error) == libc::ESRCH => {
                engine.process_ended(sys::boot_clock(), link);
                true
            }
            // It is tried again: what that process has mapped is held until its end is seen (I3).
            Err(error) => !matches!(errno(&error), libc::EMFILE | libc::ENFILE | libc::ENOMEM),
            Ok(None) => true,
        };
        if !watched {
            self.unwatched.insert(link, ended);
        }
    }
}

/// Both directions: events are edge-triggered, so the interest never changes.
const BOTH: Interest = Interest::READABLE.add(Interest::WRITABLE);

/// A Unix connection, and whose process is at its other end; nobody's known if the kernel does not say.
fn unix_transport(stream: &Stream) -> Transport {
    let user = stream.peer_user().ok().flatten();
    Transport::Unix { user: user.unwrap_or(u32::MAX), own: user == Some(sys::effective_user()) }
}

fn into_fd(stream: Stream) -> OwnedFd {
    match stream {
        Stream::Tcp(stream) => stream.into(),
        Stream::Unix(stream) => stream.into(),
    }
}

fn errno(error: &SocketError) -> i32 {
    error.source.raw_os_error().unwrap_or(libc::EIO)
}

impl Net {
    fn unwatch(&mut self, link: LinkId) {
        self.unwatched.remove(&link);
        let watch = |entry: &Entry| matches!(entry, Entry::Process { link: watched, .. } if *watched == link);
        let token = self.entries.iter().find(|(_, entry)| watch(entry)).map(|(token, _)| *token);
        if let Some(token) = token {
            self.remove(token);
        }
    }
}

fn note(tried: &mut String, text: &str) {
    if !tried.is_empty() {
        tried.push_str("; ");
    }
    tried.push_str(text);
}
