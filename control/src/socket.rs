//! Sockets under a control session: TCP over IPv4 and IPv6, and Unix sockets with abstract names.
//!
//! Everything here but [`resolve`] and [`Listener::bind`] is non-blocking and made for a readiness loop: [`Listener`]
//! and [`Stream`] lend their descriptor ([`AsFd`]), and each call does one thing or says that it would have to wait.
//! Descriptors are not inherited by programs that this process executes. No call raises SIGPIPE.

mod peer;
mod sys;

pub use peer::PeerProcess;

use crate::address::{Address, UnixName};
use core::fmt;
use std::io::{self, Read};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{self as unix, UnixListener, UnixStream};

pub(crate) use sys::{Readiness, wait};

/// An address that needs no resolver: what a socket binds and connects to.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum SocketName {
    /// TCP at this address and port.
    Tcp(SocketAddr),
    /// A Unix stream socket of this abstract name.
    Unix(UnixName),
}

impl From<SocketAddr> for SocketName {
    fn from(address: SocketAddr) -> Self {
        Self::Tcp(address)
    }
}

impl From<UnixName> for SocketName {
    fn from(name: UnixName) -> Self {
        Self::Unix(name)
    }
}

impl From<SocketName> for Address {
    fn from(name: SocketName) -> Self {
        match name {
            SocketName::Tcp(address) => address.into(),
            SocketName::Unix(name) => Self::Unix(name),
        }
    }
}

impl fmt::Display for SocketName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(name) => name.fmt(f),
        }
    }
}

/// What `address` names, in the resolver's order of preference; never empty. Asks the system's resolver for a host name
/// or an interface's name, which **blocks**, for as long as the resolver is configured to try.
///
/// # Errors
/// [`SocketError`] with the resolver's answer.
pub fn resolve(address: &Address) -> Result<Vec<SocketName>, SocketError> {
    let host = match address {
        Address::Ip(ip) => return Ok(vec![SocketName::Tcp(*ip)]),
        Address::Unix(name) => return Ok(vec![SocketName::Unix(name.clone())]),
        Address::Host(host) => host,
    };
    let error = |source| SocketError { operation: "resolve", name: Some(address.to_string()), source };
    let mut names: Vec<SocketName> = Vec::new();
    for address in (host.name(), host.port()).to_socket_addrs().map_err(error)? {
        if !names.contains(&address.into()) {
            names.push(address.into());
        }
    }
    if names.is_empty() {
        return Err(error(io::Error::new(io::ErrorKind::NotFound, "the name has no address")));
    }
    Ok(names)
}

/// A socket that accepts.
#[derive(Debug)]
pub enum Listener {
    /// TCP.
    Tcp(TcpListener),
    /// Unix.
    Unix(UnixListener),
}

impl Listener {
    /// Listens at `name`. Port 0 takes any free one; [`local_name`](Self::local_name) says which. A port whose last
    /// connections linger (TIME_WAIT) can be bound again at once. `[::]` accepts IPv4 too where the system's
    /// `net.ipv6.bindv6only` is 0.
    ///
    /// # Errors
    /// [`SocketError`] with what the system said.
    pub fn bind(name: &SocketName) -> Result<Self, SocketError> {
        let listen = || match name {
            // `TcpListener::bind` sets SO_REUSEADDR.
            SocketName::Tcp(address) => {
                let listener = TcpListener::bind(address)?;
                listener.set_nonblocking(true)?;
                Ok(Self::Tcp(listener))
            }
            SocketName::Unix(name) => {
                let address = unix::SocketAddr::from_abstract_name(name.as_bytes())?;
                let listener = UnixListener::bind_addr(&address)?;
                listener.set_nonblocking(true)?;
                Ok(Self::Unix(listener))
            }
        };
        listen().map_err(|source| SocketError { operation: "listen", name: Some(name.to_string()), source })
    }

    /// The next connection, if one is waiting. A connection that was gone before it was accepted is passed over.
    ///
    /// # Errors
    /// [`SocketError`], such as too many open files: the connection stays in the queue, so a readiness loop should wait
    /// a little before it tries again.
    pub fn accept(&self) -> Result<Option<Stream>, SocketError> {
        loop {
            let accepted = match self {
                Self::Tcp(listener) => listener.accept().and_then(|(stream, _)| Stream::tcp(stream)),
                Self::Unix(listener) => listener.accept().and_then(|(stream, _)| {
                    stream.set_nonblocking(true)?;
                    Ok(Stream::Unix(stream))
                }),
            };
            match accepted {
                Ok(stream) => return Ok(Some(stream)),
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return Ok(None),
                    // The last: set-up of a connection that its peer has already reset.
                    io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted | io::ErrorKind::InvalidInput => {}
                    _ => return Err(SocketError::new("accept", error)),
                },
            }
        }
    }

    /// Where it listens, with the real port.
    ///
    /// # Errors
    /// [`SocketError`] with what the system said.
    pub fn local_name(&self) -> Result<SocketName, SocketError> {
        let error = |source| SocketError::new("getsockname", source);
        match self {
            Self::Tcp(listener) => Ok(listener.local_addr().map_err(error)?.into()),
            Self::Unix(listener) => unix_name(&listener.local_addr().map_err(error)?).map_err(error),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(listener) => listener.as_fd(),
            Self::Unix(listener) => listener.as_fd(),
        }
    }
}

/// One end of a connection. Its calls take `&self`; the kernel orders those of several threads.
#[derive(Debug)]
pub enum Stream {
    /// TCP, without Nagle's delay.
    Tcp(TcpStream),
    /// Unix.
    Unix(UnixStream),
}

/// What a read found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Received {
    /// This many bytes, at least one.
    Bytes(usize),
    /// Nothing yet.
    Nothing,
    /// The peer has closed its direction; nothing more will come.
    End,
}

impl Stream {
    fn tcp(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Self::Tcp(stream))
    }

    /// Begins to connect. When the descriptor is writable, [`connected`](Self::connected) says how it went.
    ///
    /// # Errors
    /// [`SocketError`] with what the system said. A Unix listener whose queue is full is an error
    /// ([`WouldBlock`](io::ErrorKind::WouldBlock)) at once.
    pub fn connect(name: &SocketName) -> Result<Self, SocketError> {
        let connect = || {
            let fd = sys::connect(name)?;
            match name {
                SocketName::Tcp(_) => Self::tcp(fd.into()),
                SocketName::Unix(_) => Ok(Self::Unix(fd.into())),
            }
        };
        connect().map_err(|source| SocketError { operation: "connect", name: Some(name.to_string()), source })
    }

    /// Whether the connection that [`connect`](Self::connect) began is there.
    ///
    /// # Errors
    /// [`SocketError`]: it failed.
    pub fn connected(&self) -> Result<bool, SocketError> {
        let (failed, peer) = match self {
            Self::Tcp(stream) => (stream.take_error(), stream.peer_addr().map(|_| ())),
            Self::Unix(stream) => (stream.take_error(), stream.peer_addr().map(|_| ())),
        };
        match (failed, peer) {
            (Ok(None), Ok(())) => Ok(true),
            (Ok(None), Err(error)) if error.kind() == io::ErrorKind::NotConnected => Ok(false),
            (Ok(Some(error)) | Err(error), _) | (_, Err(error)) => Err(SocketError::new("connect", error)),
        }
    }

    /// Reads into `buffer`, which must not be empty.
    ///
    /// # Errors
    /// [`SocketError`]: the connection is broken.
    pub fn receive(&self, buffer: &mut [u8]) -> Result<Received, SocketError> {
        debug_assert!(!buffer.is_empty(), "a read of nothing looks like the end of the stream");
        loop {
            let read = match self {
                Self::Tcp(stream) => (&*stream).read(buffer),
                Self::Unix(stream) => (&*stream).read(buffer),
            };
            return match read {
                Ok(0) => Ok(Received::End),
                Ok(len) => Ok(Received::Bytes(len)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Received::Nothing),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => Err(SocketError::new("receive", error)),
            };
        }
    }

    /// Writes from the front of `bytes` and says how many bytes it took; 0 if it would have to wait.
    ///
    /// # Errors
    /// [`SocketError`]: the connection is broken. There may still be something to read that says why.
    pub fn send(&self, bytes: &[u8]) -> Result<usize, SocketError> {
        loop {
            match sys::send(self.as_fd(), bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(0),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                sent => return sent.map_err(|error| SocketError::new("send", error)),
            }
        }
    }

    /// Closes the direction to the peer, behind what was sent. What the peer sends can still be read.
    ///
    /// # Errors
    /// [`SocketError`]; a connection that is gone already is none.
    pub fn shutdown_send(&self) -> Result<(), SocketError> {
        let shut = match self {
            Self::Tcp(stream) => stream.shutdown(Shutdown::Write),
            Self::Unix(stream) => stream.shutdown(Shutdown::Write),
        };
        match shut {
            Err(error) if error.kind() != io::ErrorKind::NotConnected => Err(SocketError::new("shutdown", error)),
            _ => Ok(()),
        }
    }

    /// The other end's address; `None` for a Unix socket, whose connecting end has no name. An IPv4 peer of an IPv6
    /// listener is given as what it is.
    ///
    /// # Errors
    /// [`SocketError`] if it is not connected.
    pub fn peer_address(&self) -> Result<Option<SocketAddr>, SocketError> {
        match self {
            Self::Tcp(stream) => {
                Ok(Some(canonical(stream.peer_addr().map_err(|e| SocketError::new("getpeername", e))?)))
            }
            Self::Unix(_) => Ok(None),
        }
    }

    /// This end's address, as [`peer_address`](Self::peer_address): the one that reaches the peer.
    ///
    /// # Errors
    /// [`SocketError`] if it is not connected.
    pub fn local_address(&self) -> Result<Option<SocketAddr>, SocketError> {
        match self {
            Self::Tcp(stream) => {
                Ok(Some(canonical(stream.local_addr().map_err(|e| SocketError::new("getsockname", e))?)))
            }
            Self::Unix(_) => Ok(None),
        }
    }

    /// Which user the process at the other end of a Unix socket ran as when it connected or began to listen, by the
    /// kernel's word; `None` for TCP.
    ///
    /// # Errors
    /// [`SocketError`] with what the system said.
    pub fn peer_user(&self) -> Result<Option<u32>, SocketError> {
        match self {
            Self::Tcp(_) => Ok(None),
            Self::Unix(stream) => match sys::peer_credentials(stream.as_fd()) {
                Ok(credentials) => Ok(Some(credentials.uid)),
                Err(error) => Err(SocketError::new("SO_PEERCRED", error)),
            },
        }
    }

    /// Which process is at the other end of a Unix socket, by the kernel's word; `None` for TCP.
    ///
    /// # Errors
    /// [`SocketError`], such as a process that is gone.
    pub fn peer_process(&self) -> Result<Option<PeerProcess>, SocketError> {
        match self {
            Self::Tcp(_) => Ok(None),
            Self::Unix(stream) => PeerProcess::of(stream.as_fd()).map(Some),
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
        }
    }
}

fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        ip if ip.is_ipv4() => SocketAddr::new(ip, address.port()),
        _ => address,
    }
}

fn unix_name(address: &unix::SocketAddr) -> io::Result<SocketName> {
    let name = address.as_abstract_name().and_then(|name| UnixName::new(name).ok());
    name.map(SocketName::Unix).ok_or_else(|| io::Error::new(io::ErrorKind::AddrNotAvailable, "not an abstract name"))
}

/// A socket call that failed (I8: which, on what, and what the system said).
#[derive(Debug)]
pub struct SocketError {
    /// The call.
    pub operation: &'static str,
    /// The address it was about, where there is one.
    pub name: Option<String>,
    /// What the system said.
    pub source: io::Error,
}

impl SocketError {
    pub(crate) const fn new(operation: &'static str, source: io::Error) -> Self {
        Self { operation, name: None, source }
    }

    /// Whether the same call can work later, with nothing changed on this side.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        use io::ErrorKind::*;
        let transient = [
            AddrInUse,
            BrokenPipe,
            ConnectionAborted,
            ConnectionRefused,
            ConnectionReset,
            HostUnreachable,
            NetworkDown,
            NetworkUnreachable,
            TimedOut,
            WouldBlock,
        ];
        transient.contains(&self.source.kind())
    }
}

impl fmt::Display for SocketError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            Some(name) => write!(f, "{} {name}: {}", self.operation, self.source),
            None => write!(f, "{}: {}", self.operation, self.source),
        }
    }
}

impl std::error::Error for SocketError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}
