//! The system calls, each behind a safe function that states what makes it so.
#![allow(unsafe_code)]

use crate::Memory;
use core::marker::PhantomData;
use core::net::SocketAddr;
use core::time::Duration;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Most pieces of memory in one call.
pub(super) const MAX_PIECES: usize = super::MAX_SGE as usize + 4;

/// Fills `out` with bytes that nobody can guess.
pub(super) fn random(out: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < out.len() {
        let rest = &mut out[done..];
        // SAFETY: `rest` is valid for writes of its own length.
        let got = unsafe { libc::getrandom(rest.as_mut_ptr().cast(), rest.len(), 0) };
        match check_size(got) {
            Ok(got) => done += got,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// A socket that is not connected yet, non-blocking, closed on exec.
pub(super) fn socket(family_of: &SocketAddr) -> io::Result<TcpStream> {
    let family = if family_of.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    // SAFETY: no pointers are involved.
    let fd = check(unsafe { libc::socket(family, libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC, 0) })?;
    // SAFETY: `fd` was just opened and nobody else has it.
    Ok(unsafe { TcpStream::from_raw_fd(fd) })
}

/// Begins to connect; whether it succeeded is known when the socket becomes writable.
pub(super) fn connect(socket: &TcpStream, address: &SocketAddr) -> io::Result<()> {
    let fd = socket.as_raw_fd();
    let result = match address {
        SocketAddr::V4(v4) => {
            let name = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                sin_zero: [0; 8],
            };
            // SAFETY: `name` is a whole `sockaddr_in`, and its size goes with it.
            unsafe { libc::connect(fd, (&raw const name).cast(), size_of_val(&name) as libc::socklen_t) }
        }
        SocketAddr::V6(v6) => {
            let name = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: v6.flowinfo(),
                sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                sin6_scope_id: v6.scope_id(),
            };
            // SAFETY: `name` is a whole `sockaddr_in6`, and its size goes with it.
            unsafe { libc::connect(fd, (&raw const name).cast(), size_of_val(&name) as libc::socklen_t) }
        }
    };
    match check(result) {
        Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => Err(error),
        _ => Ok(()),
    }
}

/// Sets an integer option.
pub(super) fn set_option(socket: BorrowedFd<'_>, level: i32, name: i32, value: i32) -> io::Result<()> {
    let len = size_of_val(&value) as libc::socklen_t;
    // SAFETY: `value` is valid for reads of `len` bytes.
    check(unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), len) }).map(drop)
}

/// Sets how many bytes make a socket readable (socket(7), `SO_RCVLOWAT`). The kernel takes at most half of what its
/// receive buffer may grow to.
pub(super) fn set_low_water(socket: BorrowedFd<'_>, bytes: u32) -> io::Result<()> {
    set_option(socket, libc::SOL_SOCKET, libc::SO_RCVLOWAT, bytes as i32)
}

/// Chooses the congestion control by name. The system may refuse: not there, or not for this user.
pub(super) fn set_congestion_control(socket: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    let (at, len) = (name.as_ptr().cast(), name.len() as libc::socklen_t);
    // SAFETY: `name` is valid for reads of its own length; the kernel takes names without a terminating zero.
    check(unsafe { libc::setsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_CONGESTION, at, len) }).map(drop)
}

/// Pieces of memory to send from or to receive into, in order. It borrows the memory it names, so that the memory
/// outlives the call.
#[derive(Debug)]
pub(super) struct Pieces<'a> {
    list: [libc::iovec; MAX_PIECES],
    count: usize,
    bytes: usize,
    borrows: PhantomData<&'a mut [u8]>,
}

impl<'a> Pieces<'a> {
    pub(super) fn new() -> Self {
        let empty = libc::iovec { iov_base: core::ptr::null_mut(), iov_len: 0 };
        Self { list: [empty; MAX_PIECES], count: 0, bytes: 0, borrows: PhantomData }
    }

    /// Bytes of all pieces together.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether no further piece fits.
    pub(super) fn is_full(&self) -> bool {
        self.count == MAX_PIECES
    }

    /// Adds a part of a memory; `false`, and nothing added, when there is no room or the part does not lie within it.
    ///
    /// The kernel alone reads or writes it, during the call; that nobody has a slice of it meanwhile is what callers of
    /// `post_send`, `post_recv` and `Memory::slice` promised.
    pub(super) fn memory(&mut self, memory: &'a Memory, offset: u64, len: usize) -> bool {
        let address = memory.address();
        let inside = offset.checked_add(len as u64).is_some_and(|end| end <= memory.len());
        if address.is_null() || !inside {
            return false;
        }
        self.push(address.wrapping_add(offset as usize), len)
    }

    fn push(&mut self, address: *mut u8, len: usize) -> bool {
        let Some(slot) = self.list.get_mut(self.count) else { return false };
        *slot = libc::iovec { iov_base: address.cast(), iov_len: len };
        self.count += 1;
        self.bytes += len;
        true
    }
}

/// Pieces that are only read.
#[derive(Debug)]
pub(super) struct Sources<'a>(Pieces<'a>);

impl<'a> Sources<'a> {
    pub(super) fn new() -> Self {
        Self(Pieces::new())
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.bytes()
    }

    /// Adds bytes; `false`, and nothing added, when there is no room.
    pub(super) fn slice(&mut self, bytes: &'a [u8]) -> bool {
        self.0.push(bytes.as_ptr().cast_mut(), bytes.len())
    }

    pub(super) fn memory(&mut self) -> &mut Pieces<'a> {
        &mut self.0
    }

    /// Sends as much as fits into the socket's buffer.
    pub(super) fn send(&mut self, socket: &TcpStream) -> io::Result<usize> {
        let message = message(&mut self.0);
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        // SAFETY: every piece is borrowed for `'a`, or part of a `Memory` borrowed for `'a` that is valid for its length
        // (contract of `MemoryBacking`); the kernel only reads them.
        check_size(unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) })
    }
}

/// Pieces that are written.
#[derive(Debug)]
pub(super) struct Destinations<'a>(Pieces<'a>);

impl<'a> Destinations<'a> {
    pub(super) fn new() -> Self {
        Self(Pieces::new())
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.bytes()
    }

    /// Adds room; `false`, and nothing added, when there is none for another piece.
    pub(super) fn slice(&mut self, bytes: &'a mut [u8]) -> bool {
        self.0.push(bytes.as_mut_ptr(), bytes.len())
    }

    pub(super) fn memory(&mut self) -> &mut Pieces<'a> {
        &mut self.0
    }

    /// Receives what there is, up to the room; 0 at the end of the stream.
    pub(super) fn receive(&mut self, socket: &TcpStream) -> io::Result<usize> {
        let mut message = message(&mut self.0);
        // SAFETY: every piece is exclusively borrowed for `'a`, or part of a `Memory` borrowed for `'a` that is valid for
        // its length (contract of `MemoryBacking`).
        check_size(unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) })
    }
}

fn message(pieces: &mut Pieces<'_>) -> libc::msghdr {
    libc::msghdr {
        msg_name: core::ptr::null_mut(),
        msg_namelen: 0,
        msg_iov: pieces.list.as_mut_ptr(),
        msg_iovlen: pieces.count,
        msg_control: core::ptr::null_mut(),
        msg_controllen: 0,
        msg_flags: 0,
    }
}

/// Takes up to `len` bytes out of a TCP socket without copying them anywhere (tcp(7), `MSG_TRUNC`).
pub(super) fn discard(socket: &TcpStream, len: usize) -> io::Result<usize> {
    let flags = libc::MSG_TRUNC | libc::MSG_DONTWAIT;
    // SAFETY: with `MSG_TRUNC` on a TCP socket the kernel writes nothing, so the null pointer is not used.
    check_size(unsafe { libc::recv(socket.as_raw_fd(), core::ptr::null_mut(), len, flags) })
}

/// What an epoll reports.
#[derive(Debug, Clone, Copy)]
pub(super) struct Event {
    /// As given when the descriptor was added.
    pub(super) key: u64,
    /// `EPOLL*` bits.
    pub(super) ready: u32,
}

/// An epoll.
#[derive(Debug)]
pub(super) struct Epoll(OwnedFd);

impl Epoll {
    pub(super) fn new() -> io::Result<Self> {
        // SAFETY: no pointers are involved.
        let fd = check(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        // SAFETY: `fd` was just opened and nobody else has it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    pub(super) fn add(&self, fd: BorrowedFd<'_>, key: u64, interest: i32) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd.as_raw_fd(), key, interest)
    }

    pub(super) fn modify(&self, fd: BorrowedFd<'_>, key: u64, interest: i32) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd.as_raw_fd(), key, interest)
    }

    fn control(&self, operation: i32, fd: RawFd, key: u64, interest: i32) -> io::Result<()> {
        let mut event = libc::epoll_event { events: interest as u32, u64: key };
        // SAFETY: `event` is valid for reads during the call.
        check(unsafe { libc::epoll_ctl(self.0.as_raw_fd(), operation, fd, &raw mut event) }).map(drop)
    }

    /// One event if there is one; never waits.
    pub(super) fn poll(&self) -> io::Result<Option<Event>> {
        let mut event = libc::epoll_event { events: 0, u64: 0 };
        // SAFETY: `event` has room for the one event asked for.
        let count = check(unsafe { libc::epoll_wait(self.0.as_raw_fd(), &raw mut event, 1, 0) });
        match count {
            Ok(0) => Ok(None),
            Ok(_) => Ok(Some(Event { key: event.u64, ready: event.events })),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl AsFd for Epoll {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A counter that is readable while it is not zero.
#[derive(Debug)]
pub(super) struct EventFd(OwnedFd);

impl EventFd {
    pub(super) fn new() -> io::Result<Self> {
        // SAFETY: no pointers are involved.
        let fd = check(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })?;
        // SAFETY: `fd` was just opened and nobody else has it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Makes it readable. (It fails only when the counter is full: then it is readable.)
    pub(super) fn notify(&self) {
        let one = 1u64;
        // SAFETY: `one` is valid for reads of 8 bytes.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// Makes it not readable.
    pub(super) fn drain(&self) {
        drain(&self.0);
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A timer that is readable once its time has come. It counts on the monotonic clock.
#[derive(Debug)]
pub(super) struct Timer(OwnedFd);

impl Timer {
    pub(super) fn new() -> io::Result<Self> {
        // SAFETY: no pointers are involved.
        let fd = check(unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_CLOEXEC | libc::TFD_NONBLOCK) })?;
        // SAFETY: `fd` was just opened and nobody else has it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Sets it off after `delay` (a nanosecond at least).
    pub(super) fn set(&self, delay: Duration) -> io::Result<()> {
        let delay = delay.max(Duration::from_nanos(1));
        let zero = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let value = libc::timespec {
            tv_sec: libc::time_t::try_from(delay.as_secs()).unwrap_or(libc::time_t::MAX),
            tv_nsec: libc::c_long::from(delay.subsec_nanos() as i32),
        };
        let spec = libc::itimerspec { it_interval: zero, it_value: value };
        // SAFETY: `spec` is valid for reads; a null old value is allowed.
        check(unsafe { libc::timerfd_settime(self.0.as_raw_fd(), 0, &raw const spec, core::ptr::null_mut()) }).map(drop)
    }

    /// Makes it not readable.
    pub(super) fn drain(&self) {
        drain(&self.0);
    }
}

impl AsFd for Timer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn drain(counter: &OwnedFd) {
    let mut value = 0u64;
    // SAFETY: `value` is valid for writes of 8 bytes. That there was nothing to read is fine.
    unsafe { libc::read(counter.as_raw_fd(), (&raw mut value).cast(), 8) };
}

fn check(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn check_size(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::HugePages;

    #[test]
    fn a_piece_outside_its_memory_is_not_taken() {
        let memory = Memory::shared(4096, HugePages::Off).unwrap();
        let mut pieces = Pieces::new();
        assert!(pieces.memory(&memory, 0, 4096));
        assert!(pieces.memory(&memory, 4096, 0));
        assert!(!pieces.memory(&memory, 1, 4096));
        assert!(!pieces.memory(&memory, u64::MAX, 2));
        assert_eq!(pieces.bytes(), 4096);
    }

    #[test]
    fn no_more_pieces_than_there_is_room_for() {
        let memory = Memory::shared(4096, HugePages::Off).unwrap();
        let mut pieces = Pieces::new();
        for _ in 0..MAX_PIECES {
            assert!(!pieces.is_full());
            assert!(pieces.memory(&memory, 0, 1));
        }
        assert!(pieces.is_full());
        assert!(!pieces.memory(&memory, 0, 1));
        assert_eq!(pieces.bytes(), MAX_PIECES);
    }

    #[test]
    fn events_counters_and_timers_work_together() {
        let (epoll, counter, timer) = (Epoll::new().unwrap(), EventFd::new().unwrap(), Timer::new().unwrap());
        epoll.add(counter.as_fd(), 1, libc::EPOLLIN).unwrap();
        epoll.add(timer.as_fd(), 2, libc::EPOLLIN).unwrap();
        assert!(epoll.poll().unwrap().is_none());
        counter.notify();
        counter.notify();
        assert_eq!(epoll.poll().unwrap().map(|event| event.key), Some(1));
        counter.drain();
        assert!(epoll.poll().unwrap().is_none());
        timer.set(Duration::ZERO).unwrap();
        let fired = std::iter::repeat_with(|| epoll.poll().unwrap()).flatten().next();
        assert_eq!(fired.map(|event| event.key), Some(2));
        timer.drain();
        assert!(epoll.poll().unwrap().is_none());
    }

    #[test]
    fn two_draws_differ() {
        let (mut a, mut b) = ([0; 16], [0; 16]);
        random(&mut a).unwrap();
        random(&mut b).unwrap();
        assert_ne!(a, b);
    }
}
