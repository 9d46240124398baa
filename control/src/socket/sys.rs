//! The system calls that the standard library does not offer. The only module of this crate with `unsafe`.
#![allow(unsafe_code)]

use super::SocketName;
use crate::address::UnixName;
use std::io;
use std::mem::MaybeUninit;
use std::net::{SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

/// `SO_PEERPIDFD` of Linux 6.5, include/uapi/asm-generic/socket.h (x86-64, Arm, RISC-V, POWER and others).
const SO_PEERPIDFD: libc::c_int = 77;

/// An address as the kernel reads it. Each variant is a C struct that begins with its address family.
enum RawName {
    V4(libc::sockaddr_in),
    V6(libc::sockaddr_in6),
    /// And how many bytes of it count: an abstract name ends with the address.
    Unix(libc::sockaddr_un, usize),
}

impl RawName {
    fn new(name: &SocketName) -> Self {
        match name {
            SocketName::Tcp(SocketAddr::V4(v4)) => Self::V4(raw_v4(v4)),
            SocketName::Tcp(SocketAddr::V6(v6)) => Self::V6(raw_v6(v6)),
            SocketName::Unix(name) => raw_unix(name),
        }
    }

    fn family(&self) -> libc::c_int {
        match self {
            Self::V4(_) => libc::AF_INET,
            Self::V6(_) => libc::AF_INET6,
            Self::Unix(..) => libc::AF_UNIX,
        }
    }

    /// A pointer to the address and the number of bytes, of the struct it points to, that make it up.
    fn as_raw(&self) -> (*const libc::sockaddr, libc::socklen_t) {
        let (address, len) = match self {
            Self::V4(v4) => (std::ptr::from_ref(v4).cast(), size_of_val(v4)),
            Self::V6(v6) => (std::ptr::from_ref(v6).cast(), size_of_val(v6)),
            Self::Unix(unix, len) => (std::ptr::from_ref(unix).cast(), *len),
        };
        (address, len as libc::socklen_t)
    }
}

fn raw_v4(v4: &SocketAddrV4) -> libc::sockaddr_in {
    libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: v4.port().to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
        sin_zero: [0; 8],
    }
}

fn raw_v6(v6: &SocketAddrV6) -> libc::sockaddr_in6 {
    libc::sockaddr_in6 {
        sin6_family: libc::AF_INET6 as libc::sa_family_t,
        sin6_port: v6.port().to_be(),
        sin6_flowinfo: v6.flowinfo(),
        sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
        sin6_scope_id: v6.scope_id(),
    }
}

fn raw_unix(name: &UnixName) -> RawName {
    let mut unix = libc::sockaddr_un { sun_family: libc::AF_UNIX as libc::sa_family_t, sun_path: [0; 108] };
    // Byte 0 of the path stays zero, which makes the name abstract; `UnixName` keeps the rest within 107 bytes.
    for (to, &from) in unix.sun_path[1..].iter_mut().zip(name.as_bytes()) {
        *to = from as libc::c_char;
    }
    RawName::Unix(unix, std::mem::offset_of!(libc::sockaddr_un, sun_path) + 1 + name.as_bytes().len())
}

/// A non-blocking stream socket that has begun to connect to `name`.
pub(super) fn connect(name: &SocketName) -> io::Result<OwnedFd> {
    let name = RawName::new(name);
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: takes integers only.
    let fd = check(unsafe { libc::socket(name.family(), kind, 0) })?;
    let fd = own(fd);
    let (address, len) = name.as_raw();
    // SAFETY: `address` points into `name`, which lives to the end of this function, and `len` is at most the size of
    // the struct it points to (`as_raw`); the kernel only reads it.
    match check(unsafe { libc::connect(fd.as_raw_fd(), address, len) }) {
        Err(error) if !matches!(error.raw_os_error(), Some(libc::EINPROGRESS | libc::EINTR)) => Err(error),
        // An interrupted connect goes on by itself, as one in progress does.
        _ => Ok(fd),
    }
}

/// Sends without raising SIGPIPE.
pub(super) fn send(socket: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<usize> {
    // SAFETY: the kernel reads `bytes.len()` bytes at `bytes`, which is borrowed for the call.
    let sent = unsafe { libc::send(socket.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), libc::MSG_NOSIGNAL) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

pub(super) fn peer_credentials(socket: BorrowedFd<'_>) -> io::Result<libc::ucred> {
    option(socket, libc::SO_PEERCRED, libc::ucred { pid: 0, uid: 0, gid: 0 })
}

pub(super) fn peer_pidfd(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let fd: libc::c_int = option(socket, SO_PEERPIDFD, -1)?;
    if fd < 0 {
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    Ok(own(fd))
}

pub(super) fn pidfd_open(pid: libc::pid_t) -> io::Result<OwnedFd> {
    // SAFETY: takes integers only.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    Ok(own(check(fd as libc::c_int)?))
}

/// What a descriptor may become ready for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Readiness {
    /// Reading.
    Read,
    /// Writing.
    Write,
    /// Reading or writing.
    ReadOrWrite,
}

/// Waits until `fd` is ready, or broken, which a read or write will tell; `false` after `timeout`, rounded up to
/// milliseconds (`None`: no limit), or after a signal.
pub(crate) fn wait(fd: BorrowedFd<'_>, readiness: Readiness, timeout: Option<Duration>) -> io::Result<bool> {
    let events = match readiness {
        Readiness::Read => libc::POLLIN,
        Readiness::Write => libc::POLLOUT,
        Readiness::ReadOrWrite => libc::POLLIN | libc::POLLOUT,
    };
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 };
    let timeout = timeout.map_or(-1, |timeout| {
        let up = timeout.saturating_add(Duration::from_nanos(999_999));
        libc::c_int::try_from(up.as_millis()).unwrap_or(libc::c_int::MAX)
    });
    // SAFETY: the kernel reads and writes one `pollfd`, which `poll` is, and which is borrowed for the call.
    match check(unsafe { libc::poll(&raw mut poll, 1, timeout) }) {
        Ok(ready) => Ok(ready > 0),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(false),
        Err(error) => Err(error),
    }
}

/// Types of integers without padding, for which every value of their bytes is one.
///
/// # Safety
/// The implementor is such a type.
unsafe trait Plain: Copy {}

// SAFETY: an integer.
unsafe impl Plain for libc::c_int {}
// SAFETY: `struct ucred` is three integers of 4 bytes each (socket(7)).
unsafe impl Plain for libc::ucred {}

/// The socket option `name`, whose type is `T`.
fn option<T: Plain>(socket: BorrowedFd<'_>, name: libc::c_int, initial: T) -> io::Result<T> {
    let mut value = MaybeUninit::new(initial);
    let mut len = size_of::<T>() as libc::socklen_t;
    let at = value.as_mut_ptr().cast();
    // SAFETY: the kernel writes at most `len` bytes at `at`, which is as large as that, and sets `len`; both are
    // borrowed for the call.
    check(unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, name, at, &raw mut len) })?;
    // SAFETY: it was initialised above, and whatever bytes the kernel wrote over it make a `T` (`Plain`).
    Ok(unsafe { value.assume_init() })
}

/// Takes ownership of a descriptor that the kernel has just made.
fn own(fd: RawFd) -> OwnedFd {
    // SAFETY: every caller gives a descriptor that a system call returned to it as new, so it is open and nobody else
    // owns it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
