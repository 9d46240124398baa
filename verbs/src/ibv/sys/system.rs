//! What is asked of the system itself.

use rdma_core_sys::ibv_gid;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// A counter that makes a descriptor readable.
#[derive(Debug)]
pub(in crate::ibv) struct Bell(OwnedFd);

impl Bell {
    pub(in crate::ibv) fn new() -> io::Result<Self> {
        // SAFETY: the call takes integers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just opened, for us alone.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Makes it readable.
    pub(in crate::ibv) fn ring(&self) {
        let one = 1u64;
        // SAFETY: 8 bytes to read; it fails only when the counter is full, and then it is readable.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// Makes it not readable; whether it was.
    pub(in crate::ibv) fn quiet(&self) -> bool {
        let mut count = 0u64;
        // SAFETY: room for 8 bytes.
        unsafe { libc::read(self.0.as_raw_fd(), (&raw mut count).cast(), 8) == 8 }
    }

    pub(in crate::ibv) fn fd(&self) -> BorrowedFd<'_> {
        use std::os::fd::AsFd;
        self.0.as_fd()
    }
}

/// A descriptor that is readable when one of several is.
#[derive(Debug)]
pub(in crate::ibv) struct Any(OwnedFd);

impl Any {
    pub(in crate::ibv) fn of(fds: &[BorrowedFd<'_>]) -> io::Result<Self> {
        // SAFETY: the call takes an integer.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just opened, for us alone.
        let any = Self(unsafe { OwnedFd::from_raw_fd(fd) });
        for fd in fds {
            let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
            // SAFETY: open descriptors and a valid event.
            if unsafe { libc::epoll_ctl(any.0.as_raw_fd(), libc::EPOLL_CTL_ADD, fd.as_raw_fd(), &raw mut event) } < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(any)
    }

    pub(in crate::ibv) fn fd(&self) -> BorrowedFd<'_> {
        use std::os::fd::AsFd;
        self.0.as_fd()
    }

    /// Whether one of them is readable now.
    pub(in crate::ibv) fn is_ready(&self) -> bool {
        let mut poll = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one entry, and no waiting.
        unsafe { libc::poll(&raw mut poll, 1, 0) > 0 }
    }
}

/// A random number of 24 bits.
pub(in crate::ibv) fn random_24() -> io::Result<u32> {
    let mut value = 0u32;
    // SAFETY: room for 4 bytes; so few are given whole or not at all (`getrandom(2)`).
    let got = unsafe { libc::getrandom((&raw mut value).cast(), 4, 0) };
    if got == 4 { Ok(value >> 8) } else { Err(io::Error::last_os_error()) }
}

/// A random number of 64 bits.
pub(in crate::ibv) fn random_64() -> io::Result<u64> {
    let mut value = 0u64;
    // SAFETY: room for 8 bytes; so few are given whole or not at all (`getrandom(2)`).
    let got = unsafe { libc::getrandom((&raw mut value).cast(), 8, 0) };
    if got == 8 { Ok(value) } else { Err(io::Error::last_os_error()) }
}

/// How many bytes this process may have locked or registered, if there is a limit (`ulimit -l`).
pub(in crate::ibv) fn memlock_limit() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: room for the answer.
    let answer = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    (answer == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// The 16 bytes of a GID.
pub(in crate::ibv) fn gid_bytes(gid: &ibv_gid) -> [u8; 16] {
    // SAFETY: every bit pattern is an array of bytes.
    unsafe { gid.raw }
}
