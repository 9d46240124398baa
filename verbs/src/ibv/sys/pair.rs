//! Queue pairs.

use super::{Domain, Queue};
use core::ptr::{self, NonNull};
use rdma_core_sys::*;
use std::sync::Arc;

/// A queue pair.
#[derive(Debug)]
pub(in crate::ibv) struct Pair {
    pub(super) domain: Arc<Domain>,
    pub(super) _queues: [Arc<Queue>; 2],
    pub(super) raw: NonNull<ibv_qp>,
    pub(super) is_destroyed: bool,
}

// SAFETY: see the head of `sys`.
unsafe impl Send for Pair {}
// SAFETY: see the head of `sys`.
unsafe impl Sync for Pair {}

impl Pair {
    pub(in crate::ibv) fn new(
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

    pub(in crate::ibv) fn number(&self) -> u32 {
        // SAFETY: alive.
        unsafe { self.raw.as_ref() }.qp_num
    }

    pub(in crate::ibv) fn address(&self) -> usize {
        self.raw.as_ptr().addr()
    }

    pub(in crate::ibv) fn modify(
        &self,
        mut attr: ibv_qp_attr,
        mask: i32,
    ) -> core::result::Result<(), rdma_core_sys::Error> {
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
    pub(in crate::ibv) unsafe fn post_send(
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
    pub(in crate::ibv) unsafe fn post_recv(
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
    pub(in crate::ibv) fn destroy(mut self) -> core::result::Result<(), Self> {
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
