//! The system calls of this provider: Unix sockets with descriptors and credentials, epoll, eventfd, timerfd, random
//! bytes. Safe functions; nothing here keeps state.
#![allow(unsafe_code)]

use core::mem;
use core::ptr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

/// Most descriptors taken from one message; with more the kernel closes the rest and says that it cut (MSG_CTRUNC).
pub(super) const MAX_FDS: usize = 4;

/// Room for a control message with `MAX_FDS` descriptors, aligned as `cmsghdr` is.
#[repr(C, align(8))]
struct ControlBuffer([u8; 64]);

/// What a `-1` of a system call means.
fn checked(rc: libc::c_int) -> io::Result<libc::c_int> {
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(rc) }
}

/// Takes over a descriptor that a system call just returned.
fn owned(rc: libc::c_int) -> io::Result<OwnedFd> {
    let fd = checked(rc)?;
    // SAFETY: the call that made it gave it to us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Fills `bytes` with randomness for secrets and keys.
pub(super) fn random(bytes: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        let rest = &mut bytes[done..];
        // SAFETY: the kernel writes at most `rest.len()` bytes into `rest`.
        let got = unsafe { libc::getrandom(rest.as_mut_ptr().cast(), rest.len(), 0) };
        match got {
            1.. => done += got as usize,
            _ => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}

/// Opens a connection to the abstract Unix socket `name`, without waiting: EAGAIN when its backlog is full.
pub(super) fn dial(name: &[u8]) -> io::Result<OwnedFd> {
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: the call takes integers.
    let socket = owned(unsafe { libc::socket(libc::AF_UNIX, kind, 0) })?;
    // SAFETY: all zeros is a valid `sockaddr_un`.
    let mut address: libc::sockaddr_un = unsafe { mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    if name.len() >= address.sun_path.len() {
        return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
    }
    for (place, &byte) in address.sun_path[1..].iter_mut().zip(name) {
        *place = byte as libc::c_char;
    }
    let len = mem::offset_of!(libc::sockaddr_un, sun_path) + 1 + name.len();
    // SAFETY: `address` is a whole `sockaddr_un`, of which `len` bytes count.
    checked(unsafe { libc::connect(socket.as_raw_fd(), ptr::from_ref(&address).cast(), len as libc::socklen_t) })?;
    Ok(socket)
}

/// Reads a socket option.
fn socket_option<T: Copy>(socket: BorrowedFd<'_>, option: libc::c_int, empty: T) -> io::Result<T> {
    let mut value = empty;
    let mut len = mem::size_of::<T>() as libc::socklen_t;
    let place = ptr::from_mut(&mut value).cast();
    // SAFETY: the kernel writes at most `len` bytes into `value`; the callers' types are plain integers.
    checked(unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, option, place, &mut len) })?;
    if len as usize == mem::size_of::<T>() { Ok(value) } else { Err(io::Error::from_raw_os_error(libc::EINVAL)) }
}

/// Whether it is a Unix stream.
pub(super) fn is_unix_stream(socket: BorrowedFd<'_>) -> bool {
    let is = |option, value: libc::c_int| socket_option(socket, option, 0).is_ok_and(|v: libc::c_int| v == value);
    is(libc::SO_DOMAIN, libc::AF_UNIX) && is(libc::SO_TYPE, libc::SOCK_STREAM)
}

/// The user at the other end, as the kernel took it down when the connection was made (or, for who dials, when the
/// other end began to listen).
pub(super) fn peer_uid(socket: BorrowedFd<'_>) -> io::Result<u32> {
    let nobody = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    Ok(socket_option(socket, libc::SO_PEERCRED, nobody)?.uid)
}

/// The effective user of this process.
pub(super) fn own_uid() -> u32 {
    // SAFETY: the call has no precondition.
    unsafe { libc::geteuid() }
}

/// Makes a socket that somebody else opened non-blocking.
pub(super) fn set_nonblocking(socket: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: F_GETFL takes no further argument.
    let flags = checked(unsafe { libc::fcntl(socket.as_raw_fd(), libc::F_GETFL) })?;
    // SAFETY: F_SETFL takes an integer.
    checked(unsafe { libc::fcntl(socket.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) })?;
    Ok(())
}

/// Whether the other end has closed, whatever there is still to read.
pub(super) fn hung_up(socket: BorrowedFd<'_>) -> bool {
    let mut poll = libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 };
    // SAFETY: one `pollfd`, and no waiting.
    let rc = unsafe { libc::poll(&mut poll, 1, 0) };
    rc < 0 || poll.revents & (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) != 0
}

/// Ends both directions of a connection, for every copy of the descriptor.
pub(super) fn shut_down(socket: BorrowedFd<'_>) {
    // SAFETY: the call takes integers. It can only fail where the connection is gone already.
    unsafe { libc::shutdown(socket.as_raw_fd(), libc::SHUT_RDWR) };
}

/// Sends what fits of `head` and then of the `tail_len` bytes at `tail`, with a descriptor if there is one; returns how
/// many bytes went. The descriptor goes with the first of them.
///
/// # Safety
/// `tail..tail + tail_len` is valid for reads. (Others may write it meanwhile.)
pub(super) unsafe fn send(
    socket: BorrowedFd<'_>,
    head: &[u8],
    tail: *const u8,
    tail_len: usize,
    descriptor: Option<BorrowedFd<'_>>,
) -> io::Result<usize> {
    let mut parts = [
        libc::iovec { iov_base: head.as_ptr().cast_mut().cast(), iov_len: head.len() },
        libc::iovec { iov_base: tail.cast_mut().cast(), iov_len: tail_len },
    ];
    let mut control = ControlBuffer([0; 64]);
    // SAFETY: all zeros is a valid `msghdr`.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = parts.as_mut_ptr();
    message.msg_iovlen = if tail_len > 0 { 2 } else { 1 };
    if let Some(descriptor) = descriptor {
        const FD: u32 = mem::size_of::<RawFd>() as u32;
        message.msg_control = control.0.as_mut_ptr().cast();
        // SAFETY: arithmetic only.
        message.msg_controllen = unsafe { libc::CMSG_SPACE(FD) } as _;
        // SAFETY: `message` has a control buffer of `CMSG_SPACE` bytes, so that there is a first header in it.
        let header = unsafe { libc::CMSG_FIRSTHDR(&message) };
        // SAFETY: arithmetic only.
        let len = unsafe { libc::CMSG_LEN(FD) };
        // SAFETY: the header lies in `control`, which is aligned for it.
        unsafe {
            header.write(libc::cmsghdr {
                cmsg_len: len as _,
                cmsg_level: libc::SOL_SOCKET,
                cmsg_type: libc::SCM_RIGHTS,
            })
        };
        // SAFETY: arithmetic on a header in `control`.
        let data = unsafe { libc::CMSG_DATA(header) };
        // SAFETY: behind the header there is room for one descriptor (CMSG_SPACE).
        unsafe { data.cast::<RawFd>().write_unaligned(descriptor.as_raw_fd()) };
    }
    loop {
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        // SAFETY: `message` points to two parts that are valid for reads, `tail` by the caller's promise, and to a
        // control buffer that holds one whole control message.
        let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &message, flags) };
        if sent >= 0 {
            return Ok(sent as usize);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// What [`receive`] got.
pub(super) struct Received {
    /// Bytes; 0 at the end of the stream.
    pub(super) len: usize,
    /// Whether descriptors were left out because there were too many.
    pub(super) cut: bool,
}

/// Receives into `buffer`; each descriptor that came is given to `take`, close-on-exec.
pub(super) fn receive(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    mut take: impl FnMut(OwnedFd),
) -> io::Result<Received> {
    let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    let mut control = ControlBuffer([0; 64]);
    // SAFETY: all zeros is a valid `msghdr`.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = &mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    // SAFETY: arithmetic only.
    message.msg_controllen = unsafe { libc::CMSG_SPACE((MAX_FDS * mem::size_of::<RawFd>()) as u32) } as _;
    let len = loop {
        let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
        // SAFETY: the kernel writes at most `buffer.len()` bytes into `buffer` and `msg_controllen` into `control`.
        let got = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, flags) };
        if got >= 0 {
            break got as usize;
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    };
    // SAFETY: the kernel has set `msg_control` and `msg_controllen` to what it wrote.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(&message) };
    while !header.is_null() {
        // SAFETY: a header that the kernel wrote, in `control`, which is aligned for it.
        let found = unsafe { header.read() };
        if found.cmsg_level == libc::SOL_SOCKET && found.cmsg_type == libc::SCM_RIGHTS {
            // SAFETY: arithmetic on a header in `control`.
            let data = unsafe { libc::CMSG_DATA(header) }.cast::<RawFd>();
            // SAFETY: arithmetic only.
            let before = unsafe { libc::CMSG_LEN(0) } as usize;
            let count = (found.cmsg_len as usize).saturating_sub(before) / mem::size_of::<RawFd>();
            for index in 0..count {
                // SAFETY: the kernel wrote `count` descriptors behind the header.
                let fd = unsafe { data.wrapping_add(index).read_unaligned() };
                // SAFETY: the kernel made this descriptor for us alone.
                take(unsafe { OwnedFd::from_raw_fd(fd) });
            }
        }
        // SAFETY: `message` and `header` are as the kernel left them.
        header = unsafe { libc::CMSG_NXTHDR(&message, header) };
    }
    Ok(Received { len, cut: message.msg_flags & libc::MSG_CTRUNC != 0 })
}

/// The seals of a file; an error for a file that can have none. Never waits for a file system.
pub(super) fn seals(file: BorrowedFd<'_>) -> io::Result<i32> {
    // SAFETY: F_GET_SEALS takes no further argument.
    checked(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) })
}

pub(super) fn epoll() -> io::Result<OwnedFd> {
    // SAFETY: the call takes an integer.
    owned(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })
}

/// What [`epoll_set`] does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EpollChange {
    Add,
    Modify,
    Remove,
}

/// Adds, changes or removes what an epoll instance watches.
pub(super) fn epoll_set(
    epoll: BorrowedFd<'_>,
    change: EpollChange,
    fd: BorrowedFd<'_>,
    interest: u32,
    data: u64,
) -> io::Result<()> {
    let operation = match change {
        EpollChange::Add => libc::EPOLL_CTL_ADD,
        EpollChange::Modify => libc::EPOLL_CTL_MOD,
        EpollChange::Remove => libc::EPOLL_CTL_DEL,
    };
    let mut event = libc::epoll_event { events: interest, u64: data };
    // SAFETY: `event` is a valid event for the duration of the call.
    checked(unsafe { libc::epoll_ctl(epoll.as_raw_fd(), operation, fd.as_raw_fd(), &mut event) })?;
    Ok(())
}

/// What is ready now, without waiting.
pub(super) fn epoll_ready<'a>(
    epoll: BorrowedFd<'_>,
    events: &'a mut [libc::epoll_event],
) -> io::Result<&'a [libc::epoll_event]> {
    let room = events.len() as libc::c_int;
    loop {
        // SAFETY: the kernel writes at most `room` events into `events`.
        match checked(unsafe { libc::epoll_wait(epoll.as_raw_fd(), events.as_mut_ptr(), room, 0) }) {
            Ok(count) => return Ok(&events[..count as usize]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

pub(super) fn eventfd() -> io::Result<OwnedFd> {
    // SAFETY: the call takes integers.
    owned(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })
}

/// Makes an eventfd readable.
pub(super) fn eventfd_raise(fd: BorrowedFd<'_>) {
    let one = 1u64.to_ne_bytes();
    // SAFETY: eight bytes are read from `one`. The only failure is a full counter, which is readable already.
    unsafe { libc::write(fd.as_raw_fd(), one.as_ptr().cast(), one.len()) };
}

/// Makes an eventfd or timerfd unreadable.
pub(super) fn counter_clear(fd: BorrowedFd<'_>) {
    let mut count = [0u8; 8];
    // SAFETY: at most eight bytes are written into `count`. The only failure is that it isn't readable.
    unsafe { libc::read(fd.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
}

pub(super) fn timerfd() -> io::Result<OwnedFd> {
    // SAFETY: the call takes integers.
    owned(unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_CLOEXEC | libc::TFD_NONBLOCK) })
}

/// Makes a timerfd readable once, after `delay`.
pub(super) fn timerfd_after(fd: BorrowedFd<'_>, delay: Duration) -> io::Result<()> {
    // SAFETY: all zeros is a valid `itimerspec`.
    let mut when: libc::itimerspec = unsafe { mem::zeroed() };
    when.it_value.tv_sec = delay.as_secs() as libc::time_t;
    when.it_value.tv_nsec = delay.subsec_nanos().max(1).into();
    // SAFETY: `when` is valid for the duration of the call, and no old value is asked for.
    checked(unsafe { libc::timerfd_settime(fd.as_raw_fd(), 0, &when, ptr::null_mut()) })?;
    Ok(())
}
