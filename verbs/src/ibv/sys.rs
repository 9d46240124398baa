//! The library's objects as owned handles: each holds what it depends on, and is destroyed once, in the process that made
//! it. The calls themselves are safe but where memory or work requests go through them.
//!
//! A library that refuses to destroy an object (a device that is gone can do that) leaves it to the kernel, which has the
//! pages of a region pinned until the process ends. Only for a queue pair is that not enough, and [`Pair::destroy`] tells.
//!
//! All of them may be used by any thread at any time: libibverbs and its providers lock for themselves (`verbs(7)`).
#![allow(unsafe_code)]

use super::failed;
use crate::memory::generation;
use crate::{Cause, Error, Result};
use core::ptr::{self, NonNull};
use rdma_core_sys::*;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

/// An open device.
#[derive(Debug)]
pub(super) struct Context {
    library: &'static Library,
    raw: NonNull<ibv_context>,
    generation: u64,
}

// SAFETY: see the head of this file.
unsafe impl Send for Context {}
// SAFETY: see the head of this file.
unsafe impl Sync for Context {}

impl Context {
    pub(super) fn open(library: &'static Library, list: &DeviceList<'_>, index: usize) -> Result<Self> {
        const VERB: &str = "open_device";
        let device = list.get(index).ok_or(Error::new(VERB, Cause::NotFound { what: "RDMA device" }))?;
        prepare_for_forks(library)?;
        // SAFETY: a device of a list that is alive.
        let raw = unsafe { library.ibv_open_device(device.as_ptr()) };
        let raw = raw.map_err(|error| failed(VERB, "ibv_open_device", error))?;
        Ok(Self { library, raw, generation: generation() })
    }

    /// Whether this process is a child of the one that made it (I13): its objects are the parent's.
    pub(super) fn is_inherited(&self) -> bool {
        self.generation != generation()
    }

    pub(super) fn transport(&self) -> i32 {
        // SAFETY: open.
        let device = unsafe { self.raw.as_ref() }.device;
        // SAFETY: an open device keeps its description.
        unsafe { (*device).transport_type }
    }

    pub(super) fn query_device(&self) -> Result<ibv_device_attr> {
        let mut attr = zeroed();
        // SAFETY: open; room for the answer.
        let answer = unsafe { self.library.ibv_query_device(self.raw.as_ptr(), &raw mut attr) };
        answer.map_err(|error| failed("query_device", "ibv_query_device", error))?;
        Ok(attr)
    }

    pub(super) fn query_port(&self, port: u8) -> Result<ibv_port_attr> {
        let mut attr = zeroed();
        // SAFETY: open; room for the answer.
        let answer = unsafe { self.library.ibv_query_port(self.raw.as_ptr(), port, &raw mut attr) };
        answer.map_err(|error| failed("query_port", "ibv_query_port", error))?;
        Ok(attr)
    }

    /// The GIDs of all ports, `room` at most.
    pub(super) fn gids(&self, room: usize) -> Result<Vec<ibv_gid_entry>> {
        let mut entries = vec![zeroed(); room];
        // SAFETY: open.
        let found = unsafe { self.library.ibv_query_gid_table(self.raw.as_ptr(), &mut entries) };
        let found = found.map_err(|error| failed("query_gid", "ibv_query_gid_table", error))?;
        entries.truncate(found);
        Ok(entries)
    }

    /// A partition key, by its index.
    pub(super) fn pkey(&self, port: u8, index: u16) -> Result<u16> {
        let mut pkey = 0;
        // SAFETY: open; room for the answer.
        let answer = unsafe { self.library.ibv_query_pkey(self.raw.as_ptr(), port, index.into(), &raw mut pkey) };
        answer.map_err(|error| failed("query_pkey", "ibv_query_pkey", error))?;
        Ok(u16::from_be(pkey))
    }

    /// The descriptor of asynchronous events, which is made non-blocking.
    pub(super) fn async_fd(&self) -> io::Result<BorrowedFd<'_>> {
        // SAFETY: open.
        let fd = unsafe { self.raw.as_ref() }.async_fd;
        set_nonblocking(fd)?;
        // SAFETY: it stays open as long as the device.
        Ok(unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// Takes the next asynchronous event: `look` is given its type and the address of the queue pair or completion queue
    /// it concerns, which can't be destroyed (and its address not used again) before `look` has returned.
    pub(super) fn next_event<R>(&self, look: impl FnOnce(u32, usize) -> R) -> Option<R> {
        let mut event: ibv_async_event = zeroed();
        // SAFETY: open; room for the answer.
        unsafe { self.library.ibv_get_async_event(self.raw.as_ptr(), &raw mut event) }.ok()?;
        let whom = match event.event_type {
            // SAFETY: an event of a queue pair.
            IBV_EVENT_QP_FATAL | IBV_EVENT_QP_REQ_ERR | IBV_EVENT_QP_ACCESS_ERR => unsafe { event.element.qp }.addr(),
            // SAFETY: an event of a completion queue.
            IBV_EVENT_CQ_ERR => unsafe { event.element.cq }.addr(),
            _ => 0,
        };
        let seen = look(event.event_type, whom);
        // SAFETY: got above, acknowledged once. Whoever destroys the object waits for this.
        unsafe { self.library.ibv_ack_async_event(&raw mut event) };
        Some(seen)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if !self.is_inherited() {
            // SAFETY: open, and nothing of it is left: everything holds it.
            let _refused = unsafe { self.library.ibv_close_device(self.raw.as_ptr()) };
        }
    }
}

/// Has the library keep registered memory out of children, where the kernel does not copy it for them by itself (I13).
fn prepare_for_forks(library: &Library) -> Result<()> {
    // SAFETY: no precondition.
    let needed = unsafe { library.ibv_is_fork_initialized() }.unwrap_or(IBV_FORK_DISABLED) == IBV_FORK_DISABLED;
    if needed {
        // SAFETY: no precondition.
        let done = unsafe { library.ibv_fork_init() };
        done.map_err(|error| failed("open_device", "ibv_fork_init", error))?;
    }
    Ok(())
}

fn set_nonblocking(fd: RawFd) -> io::Result<()> {
    // SAFETY: F_GETFL takes no further argument.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    // SAFETY: F_SETFL takes an integer.
    if flags < 0 || unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// A protection domain.
#[derive(Debug)]
pub(super) struct Domain {
    context: Arc<Context>,
    raw: NonNull<ibv_pd>,
}

// SAFETY: see the head of this file.
unsafe impl Send for Domain {}
// SAFETY: see the head of this file.
unsafe impl Sync for Domain {}

impl Domain {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self> {
        // SAFETY: open.
        let raw = unsafe { context.library.ibv_alloc_pd(context.raw.as_ptr()) };
        let raw = raw.map_err(|error| failed("alloc_pd", "ibv_alloc_pd", error))?;
        Ok(Self { context: context.clone(), raw })
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        if !self.context.is_inherited() {
            // SAFETY: allocated, and regions and queue pairs of it would hold it.
            let _refused = unsafe { self.context.library.ibv_dealloc_pd(self.raw.as_ptr()) };
        }
    }
}

/// A memory region.
#[derive(Debug)]
pub(super) struct Region {
    domain: Arc<Domain>,
    raw: NonNull<ibv_mr>,
}

// SAFETY: see the head of this file.
unsafe impl Send for Region {}
// SAFETY: see the head of this file.
unsafe impl Sync for Region {}

impl Region {
    /// Registers memory.
    ///
    /// # Safety
    /// `start..start + len` stays mapped as long as the region lives, and the holders of the keys may do with it what
    /// `access` (`IBV_ACCESS_*`) says.
    pub(super) unsafe fn register(
        domain: &Arc<Domain>,
        start: *mut u8,
        len: usize,
        access: i32,
    ) -> core::result::Result<Self, rdma_core_sys::Error> {
        // SAFETY: the domain is alive; the rest is the caller's.
        let raw = unsafe { domain.context.library.ibv_reg_mr(domain.raw.as_ptr(), start.cast(), len, access) }?;
        Ok(Self { domain: domain.clone(), raw })
    }

    pub(super) fn local_key(&self) -> u32 {
        // SAFETY: registered.
        unsafe { self.raw.as_ref() }.lkey
    }

    pub(super) fn remote_key(&self) -> u32 {
        // SAFETY: registered.
        unsafe { self.raw.as_ref() }.rkey
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if !self.domain.context.is_inherited() {
            // SAFETY: registered, once; requests that use it would hold it.
            let _refused = unsafe { self.domain.context.library.ibv_dereg_mr(self.raw.as_ptr()) };
        }
    }
}

/// A completion channel.
#[derive(Debug)]
pub(super) struct Channel {
    context: Arc<Context>,
    raw: NonNull<ibv_comp_channel>,
}

// SAFETY: see the head of this file.
unsafe impl Send for Channel {}
// SAFETY: see the head of this file.
unsafe impl Sync for Channel {}

impl Channel {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self> {
        const VERB: &str = "open_device";
        // SAFETY: open.
        let raw = unsafe { context.library.ibv_create_comp_channel(context.raw.as_ptr()) };
        let raw = raw.map_err(|error| failed(VERB, "ibv_create_comp_channel", error))?;
        let channel = Self { context: context.clone(), raw };
        set_nonblocking(channel.fd().as_raw_fd()).map_err(|error| Error::from_io(VERB, "fcntl", &error))?;
        Ok(channel)
    }

    /// Its descriptor: readable when there is an event.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: alive.
        let fd = unsafe { self.raw.as_ref() }.fd;
        // SAFETY: it stays open as long as the channel.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }

    /// Takes an event off it and acknowledges it; false if there was none.
    pub(super) fn take_event(&self) -> bool {
        let (mut cq, mut data) = (ptr::null_mut(), ptr::null_mut());
        let library = self.context.library;
        // SAFETY: alive; room for the answer.
        if unsafe { library.ibv_get_cq_event(self.raw.as_ptr(), &raw mut cq, &raw mut data) }.is_err() {
            return false;
        }
        // SAFETY: got just now; the queue can't be destroyed before this.
        unsafe { library.ibv_ack_cq_events(cq, 1) };
        true
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        if !self.context.is_inherited() {
            // SAFETY: alive, and the queues that use it would hold it.
            let _refused = unsafe { self.context.library.ibv_destroy_comp_channel(self.raw.as_ptr()) };
        }
    }
}

/// A completion queue.
#[derive(Debug)]
pub(super) struct Queue {
    channel: Arc<Channel>,
    raw: NonNull<ibv_cq>,
}

// SAFETY: see the head of this file.
unsafe impl Send for Queue {}
// SAFETY: see the head of this file.
unsafe impl Sync for Queue {}

impl Queue {
    pub(super) fn new(channel: &Arc<Channel>, depth: i32) -> Result<Self> {
        let (context, channel_raw) = (&channel.context, channel.raw.as_ptr());
        // SAFETY: all is alive; no context pointer is asked for.
        let raw =
            unsafe { context.library.ibv_create_cq(context.raw.as_ptr(), depth, ptr::null_mut(), channel_raw, 0) };
        let raw = raw.map_err(|error| failed("create_cq", "ibv_create_cq", error))?;
        Ok(Self { channel: channel.clone(), raw })
    }

    /// Takes up to as many completions as `out` has room for.
    pub(super) fn poll(&self, out: &mut [ibv_wc]) -> core::result::Result<usize, rdma_core_sys::Error> {
        let room = i32::try_from(out.len()).unwrap_or(i32::MAX);
        // SAFETY: alive; room for so many.
        unsafe { ibv_poll_cq(self.raw.as_ptr(), room, out.as_mut_ptr()) }
    }

    /// Has the next completion make an event.
    pub(super) fn request_event(&self) -> core::result::Result<(), rdma_core_sys::Error> {
        // SAFETY: alive.
        unsafe { ibv_req_notify_cq(self.raw.as_ptr(), 0) }
    }

    pub(super) fn address(&self) -> usize {
        self.raw.as_ptr().addr()
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if !self.channel.context.is_inherited() {
            // SAFETY: alive, and the queue pairs that use it would hold it; its events are all acknowledged.
            let _refused = unsafe { self.channel.context.library.ibv_destroy_cq(self.raw.as_ptr()) };
        }
    }
}

/// A queue pair.
#[derive(Debug)]
pub(super) struct Pair {
    domain: Arc<Domain>,
    _queues: [Arc<Queue>; 2],
    raw: NonNull<ibv_qp>,
    is_destroyed: bool,
}

// SAFETY: see the head of this file.
unsafe impl Send for Pair {}
// SAFETY: see the head of this file.
unsafe impl Sync for Pair {}

impl Pair {
    pub(super) fn new(
        domain: &Arc<Domain>,
        send: &Arc<Queue>,
        recv: &Arc<Queue>,
        cap: ibv_qp_cap,
    ) -> core::result::Result<Self, rdma_core_sys::Error> {
        let (send_cq, recv_cq) = (send.raw.as_ptr(), recv.raw.as_ptr());
        let mut init = ibv_qp_init_attr { send_cq, recv_cq, cap, qp_type: IBV_QPT_RC, sq_sig_all: 1, ..zeroed() };
        // SAFETY: all is alive.
        let raw = unsafe { domain.context.library.ibv_create_qp(domain.raw.as_ptr(), &raw mut init) }?;
        Ok(Self { domain: domain.clone(), _queues: [send.clone(), recv.clone()], raw, is_destroyed: false })
    }

    pub(super) fn number(&self) -> u32 {
        // SAFETY: alive.
        unsafe { self.raw.as_ref() }.qp_num
    }

    pub(super) fn address(&self) -> usize {
        self.raw.as_ptr().addr()
    }

    pub(super) fn modify(&self, mut attr: ibv_qp_attr, mask: i32) -> core::result::Result<(), rdma_core_sys::Error> {
        if self.domain.context.is_inherited() {
            return Err(rdma_core_sys::Error::Errno(libc::ECHILD));
        }
        // SAFETY: alive; valid attributes.
        unsafe { self.domain.context.library.ibv_modify_qp(self.raw.as_ptr(), &raw mut attr, mask) }
    }

    /// Posts `requests`, which are chained and given their slices (so many for each, in order) here. The error has the
    /// number of those that were posted.
    ///
    /// # Safety
    /// Each slice names registered memory that stays so until the request completes or the queue pair is destroyed.
    pub(super) unsafe fn post_send(
        &self,
        requests: &mut [ibv_send_wr],
        slices: &mut [ibv_sge],
    ) -> core::result::Result<(), (rdma_core_sys::Error, usize)> {
        let mut rest = slices;
        for request in requests.iter_mut() {
            let taken = usize::try_from(request.num_sge).unwrap_or(0).min(rest.len());
            let (own, after) = rest.split_at_mut(taken);
            request.sg_list = own.as_mut_ptr();
            request.num_sge = taken as i32;
            rest = after;
        }
        let (count, mut first) = (requests.len(), ptr::null_mut());
        for request in requests.iter_mut().rev() {
            request.next = first;
            first = ptr::from_mut(request);
        }
        if count == 0 {
            return Ok(());
        }
        let mut bad = ptr::null_mut();
        // SAFETY: alive; the chain ends within `requests`, whose lists lie within `slices`; memory is the caller's promise.
        let posted = unsafe { ibv_post_send(self.raw.as_ptr(), first, &raw mut bad) };
        posted.map_err(|error| {
            let before = bad.addr().wrapping_sub(first.addr()) / size_of::<ibv_send_wr>();
            (error, if before < count { before } else { 0 })
        })
    }

    /// Posts a receive.
    ///
    /// # Safety
    /// As [`post_send`](Self::post_send).
    pub(super) unsafe fn post_recv(
        &self,
        wr_id: u64,
        slice: Option<ibv_sge>,
    ) -> core::result::Result<(), rdma_core_sys::Error> {
        let mut list = slice.unwrap_or_else(zeroed);
        let num_sge = i32::from(slice.is_some());
        let mut wr = ibv_recv_wr { wr_id, next: ptr::null_mut(), sg_list: &raw mut list, num_sge };
        let mut bad = ptr::null_mut();
        // SAFETY: alive; one request with at most one slice; memory is the caller's promise.
        unsafe { ibv_post_recv(self.raw.as_ptr(), &raw mut wr, &raw mut bad) }
    }
}

impl Pair {
    /// Destroys it: after that the device touches no memory for it. If the library refuses, it comes back.
    pub(super) fn destroy(mut self) -> core::result::Result<(), Self> {
        // SAFETY: alive; what is refused stays so. Its asynchronous events are acknowledged as soon as they are got.
        let answer = unsafe { self.domain.context.library.ibv_destroy_qp(self.raw.as_ptr()) };
        if answer.is_err() {
            return Err(self);
        }
        self.is_destroyed = true;
        Ok(())
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        if !self.is_destroyed && !self.domain.context.is_inherited() {
            // SAFETY: alive, once. Nothing was posted to it: then it is ended by `destroy`, or kept for ever.
            let _refused = unsafe { self.domain.context.library.ibv_destroy_qp(self.raw.as_ptr()) };
        }
    }
}

/// A counter that makes a descriptor readable.
#[derive(Debug)]
pub(super) struct Bell(OwnedFd);

impl Bell {
    pub(super) fn new() -> io::Result<Self> {
        // SAFETY: the call takes integers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just opened, for us alone.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Makes it readable.
    pub(super) fn ring(&self) {
        let one = 1u64;
        // SAFETY: 8 bytes to read; it fails only when the counter is full, and then it is readable.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// Makes it not readable; whether it was.
    pub(super) fn quiet(&self) -> bool {
        let mut count = 0u64;
        // SAFETY: room for 8 bytes.
        unsafe { libc::read(self.0.as_raw_fd(), (&raw mut count).cast(), 8) == 8 }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        use std::os::fd::AsFd;
        self.0.as_fd()
    }
}

/// A descriptor that is readable when one of several is.
#[derive(Debug)]
pub(super) struct Any(OwnedFd);

impl Any {
    pub(super) fn of(fds: &[BorrowedFd<'_>]) -> io::Result<Self> {
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

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        use std::os::fd::AsFd;
        self.0.as_fd()
    }

    /// Whether one of them is readable now.
    pub(super) fn is_ready(&self) -> bool {
        let mut poll = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one entry, and no waiting.
        unsafe { libc::poll(&raw mut poll, 1, 0) > 0 }
    }
}

/// A random number of 24 bits.
pub(super) fn random_24() -> io::Result<u32> {
    let mut value = 0u32;
    // SAFETY: room for 4 bytes; so few are given whole or not at all (`getrandom(2)`).
    let got = unsafe { libc::getrandom((&raw mut value).cast(), 4, 0) };
    if got == 4 { Ok(value >> 8) } else { Err(io::Error::last_os_error()) }
}

/// How many bytes this process may have locked or registered, if there is a limit (`ulimit -l`).
pub(super) fn memlock_limit() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: room for the answer.
    let answer = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    (answer == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// The 16 bytes of a GID.
pub(super) fn gid_bytes(gid: &ibv_gid) -> [u8; 16] {
    // SAFETY: every bit pattern is an array of bytes.
    unsafe { gid.raw }
}
