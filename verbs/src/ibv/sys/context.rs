//! Open devices.

use crate::ibv::failed;
use crate::memory::generation;
use crate::{Cause, Error, Result};
use core::ptr::NonNull;
use rdma_core_sys::*;
use std::io;
use std::os::fd::{BorrowedFd, RawFd};

/// An open device.
#[derive(Debug)]
pub(in crate::ibv) struct Context {
    pub(super) library: &'static Library,
    pub(super) raw: NonNull<ibv_context>,
    pub(super) generation: u64,
}

// SAFETY: see the head of `sys`.
unsafe impl Send for Context {}
// SAFETY: see the head of `sys`.
unsafe impl Sync for Context {}

impl Context {
    pub(in crate::ibv) fn open(library: &'static Library, list: &DeviceList<'_>, index: usize) -> Result<Self> {
        const VERB: &str = "open_device";
        let device = list.get(index).ok_or(Error::new(VERB, Cause::NotFound { what: "RDMA device" }))?;
        prepare_for_forks(library)?;
        // SAFETY: a device of a list that is alive.
        let raw = unsafe { library.ibv_open_device(device.as_ptr()) };
        let raw = raw.map_err(|error| failed(VERB, "ibv_open_device", error))?;
        Ok(Self { library, raw, generation: generation() })
    }

    /// Whether this process is a child of the one that made it (I13): its objects are the parent's.
    pub(in crate::ibv) fn is_inherited(&self) -> bool {
        self.generation != generation()
    }

    pub(in crate::ibv) fn transport(&self) -> i32 {
        // SAFETY: open.
        let device = unsafe { self.raw.as_ref() }.device;
        // SAFETY: an open device keeps its description.
        unsafe { (*device).transport_type }
    }

    pub(in crate::ibv) fn query_device(&self) -> Result<ibv_device_attr> {
        let mut attr = zeroed();
        // SAFETY: open; room for the answer.
        let answer = unsafe { self.library.ibv_query_device(self.raw.as_ptr(), &raw mut attr) };
        answer.map_err(|error| failed("query_device", "ibv_query_device", error))?;
        Ok(attr)
    }

    pub(in crate::ibv) fn query_port(&self, port: u8) -> Result<ibv_port_attr> {
        let mut attr = zeroed();
        // SAFETY: open; room for the answer.
        let answer = unsafe { self.library.ibv_query_port(self.raw.as_ptr(), port, &raw mut attr) };
        answer.map_err(|error| failed("query_port", "ibv_query_port", error))?;
        Ok(attr)
    }

    /// The GIDs of all ports, `room` at most.
    pub(in crate::ibv) fn gids(&self, room: usize) -> Result<Vec<ibv_gid_entry>> {
        let mut entries = vec![zeroed(); room];
        // SAFETY: open.
        let found = unsafe { self.library.ibv_query_gid_table(self.raw.as_ptr(), &mut entries) };
        let found = found.map_err(|error| failed("query_gid", "ibv_query_gid_table", error))?;
        entries.truncate(found);
        Ok(entries)
    }

    /// A partition key, by its index.
    pub(in crate::ibv) fn pkey(&self, port: u8, index: u16) -> Result<u16> {
        let mut pkey = 0;
        // SAFETY: open; room for the answer.
        let answer = unsafe { self.library.ibv_query_pkey(self.raw.as_ptr(), port, index.into(), &raw mut pkey) };
        answer.map_err(|error| failed("query_pkey", "ibv_query_pkey", error))?;
        Ok(u16::from_be(pkey))
    }

    /// The descriptor of asynchronous events, which is made non-blocking.
    pub(in crate::ibv) fn async_fd(&self) -> io::Result<BorrowedFd<'_>> {
        // SAFETY: open.
        let fd = unsafe { self.raw.as_ref() }.async_fd;
        set_nonblocking(fd)?;
        // SAFETY: it stays open as long as the device.
        Ok(unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// Takes the next asynchronous event: `look` is given its type and the address of the queue pair or completion queue
    /// it concerns (or the number of the port), which can't be destroyed (and its address not used again) before `look` has returned.
    pub(in crate::ibv) fn next_event<R>(&self, look: impl FnOnce(u32, usize) -> R) -> Option<R> {
        let mut event: ibv_async_event = zeroed();
        // SAFETY: open; room for the answer.
        unsafe { self.library.ibv_get_async_event(self.raw.as_ptr(), &raw mut event) }.ok()?;
        let whom = match event.event_type {
            // SAFETY: an event of a queue pair.
            IBV_EVENT_QP_FATAL | IBV_EVENT_QP_REQ_ERR | IBV_EVENT_QP_ACCESS_ERR => unsafe { event.element.qp }.addr(),
            // SAFETY: an event of a completion queue.
            IBV_EVENT_CQ_ERR => unsafe { event.element.cq }.addr(),
            // SAFETY: an event of a port.
            IBV_EVENT_PORT_ERR => usize::try_from(unsafe { event.element.port_num }).unwrap_or(0),
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

pub(super) fn set_nonblocking(fd: RawFd) -> io::Result<()> {
    // SAFETY: F_GETFL takes no further argument.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    // SAFETY: F_SETFL takes an integer.
    if flags < 0 || unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
