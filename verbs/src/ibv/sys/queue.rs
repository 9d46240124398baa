//! Completion channels and completion queues.

use super::Context;
use super::context::set_nonblocking;
use crate::ibv::failed;
use crate::{Error, Result};
use core::ptr::{self, NonNull};
use rdma_core_sys::*;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

/// A completion channel.
#[derive(Debug)]
pub(in crate::ibv) struct Channel {
    pub(super) context: Arc<Context>,
    pub(super) raw: NonNull<ibv_comp_channel>,
}

// SAFETY: see the head of `sys`.
unsafe impl Send for Channel {}
// SAFETY: see the head of `sys`.
unsafe impl Sync for Channel {}

impl Channel {
    pub(in crate::ibv) fn new(context: &Arc<Context>) -> Result<Self> {
        const VERB: &str = "open_device";
        // SAFETY: open.
        let raw = unsafe { context.library.ibv_create_comp_channel(context.raw.as_ptr()) };
        let raw = raw.map_err(|error| failed(VERB, "ibv_create_comp_channel", error))?;
        let channel = Self { context: context.clone(), raw };
        set_nonblocking(channel.fd().as_raw_fd()).map_err(|error| Error::from_io(VERB, "fcntl", &error))?;
        Ok(channel)
    }

    /// Its descriptor: readable when there is an event.
    pub(in crate::ibv) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: alive.
        let fd = unsafe { self.raw.as_ref() }.fd;
        // SAFETY: it stays open as long as the channel.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }

    /// Takes an event off it and acknowledges it; false if there was none.
    pub(in crate::ibv) fn take_event(&self) -> bool {
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
pub(in crate::ibv) struct Queue {
    pub(super) channel: Arc<Channel>,
    pub(super) raw: NonNull<ibv_cq>,
}

// SAFETY: see the head of `sys`.
unsafe impl Send for Queue {}
// SAFETY: see the head of `sys`.
unsafe impl Sync for Queue {}

impl Queue {
    pub(in crate::ibv) fn new(channel: &Arc<Channel>, depth: i32) -> Result<Self> {
        let (context, channel_raw) = (&channel.context, channel.raw.as_ptr());
        // SAFETY: all is alive; no context pointer is asked for.
        let raw =
            unsafe { context.library.ibv_create_cq(context.raw.as_ptr(), depth, ptr::null_mut(), channel_raw, 0) };
        let raw = raw.map_err(|error| failed("create_cq", "ibv_create_cq", error))?;
        Ok(Self { channel: channel.clone(), raw })
    }

    /// Takes up to as many completions as `out` has room for.
    pub(in crate::ibv) fn poll(&self, out: &mut [ibv_wc]) -> core::result::Result<usize, rdma_core_sys::Error> {
        let room = i32::try_from(out.len()).unwrap_or(i32::MAX);
        // SAFETY: alive; room for so many.
        unsafe { ibv_poll_cq(self.raw.as_ptr(), room, out.as_mut_ptr()) }
    }

    /// Has the next completion make an event.
    pub(in crate::ibv) fn request_event(&self) -> core::result::Result<(), rdma_core_sys::Error> {
        // SAFETY: alive.
        unsafe { ibv_req_notify_cq(self.raw.as_ptr(), 0) }
    }

    pub(in crate::ibv) fn address(&self) -> usize {
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
