//! Queue pairs.

use super::{Domain, Queue, post};
use core::ptr::{self, NonNull};
use rdma_core_sys::*;
use std::sync::Arc;

/// A queue pair.
#[derive(Debug)]
pub(in crate::ibv) struct Pair {
    pub(super) domain: Arc<Domain>,
    pub(super) _queues: [Arc<Queue>; 2],
    pub(super) raw: NonNull<ibv_qp>,
    /// Where requests are built by functions.
    pub(super) extended: Option<NonNull<ibv_qp_ex>>,
    max_inline: u32,
    pub(super) is_destroyed: bool,
}

// SAFETY: see the head of `sys`.
unsafe impl Send for Pair {}
// SAFETY: see the head of `sys`.
unsafe impl Sync for Pair {}

impl Pair {
    /// Makes one whose completions go to `queues` (sends, receives), with what the device grants of `cap`: bytes that are
    /// taken when a request is posted may be fewer. `wanted`: one whose requests are built by functions, if the device has
    /// such.
    pub(in crate::ibv) fn new(
        domain: &Arc<Domain>,
        queues: [&Arc<Queue>; 2],
        cap: ibv_qp_cap,
        wanted: bool,
    ) -> core::result::Result<Self, Error> {
        let least = ibv_qp_cap { max_inline_data: 0, ..cap };
        let mut refusal = None;
        for (extended, cap) in [(true, cap), (true, least), (false, cap), (false, least)] {
            if extended && !wanted || refusal.is_some_and(|error| !is_too_much(error)) {
                continue;
            }
            match Self::create(domain, queues, cap, extended) {
                Ok(pair) => return Ok(pair),
                Err(error) => refusal = Some(error),
            }
        }
        Err(refusal.unwrap_or(Error::Errno(libc::EINVAL)))
    }

    fn create(
        domain: &Arc<Domain>,
        queues: [&Arc<Queue>; 2],
        cap: ibv_qp_cap,
        extended: bool,
    ) -> core::result::Result<Self, Error> {
        let [send_cq, recv_cq] = queues.map(|queue| queue.raw.as_ptr());
        let (library, context, pd) = (domain.context.library, domain.context.raw.as_ptr(), domain.raw.as_ptr());
        let (raw, cap) = if extended {
            let mut init = ibv_qp_init_attr_ex {
                send_cq,
                recv_cq,
                cap,
                qp_type: IBV_QPT_RC,
                comp_mask: IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
                pd,
                send_ops_flags: post::OPERATIONS,
                ..zeroed()
            };
            // SAFETY: all is alive.
            (unsafe { library.ibv_create_qp_ex(context, &raw mut init) }?, init.cap)
        } else {
            let mut init = ibv_qp_init_attr { send_cq, recv_cq, cap, qp_type: IBV_QPT_RC, ..zeroed() };
            // SAFETY: all is alive.
            (unsafe { library.ibv_create_qp(pd, &raw mut init) }?, init.cap)
        };
        let functions = match extended {
            // SAFETY: just made.
            true => unsafe { library.ibv_qp_to_qp_ex(raw.as_ptr()) }.unwrap_or_default(),
            false => None,
        };
        Ok(Self {
            domain: domain.clone(),
            _queues: queues.map(Arc::clone),
            raw,
            extended: functions.filter(|ex| post::has_functions(*ex)),
            max_inline: cap.max_inline_data,
            is_destroyed: false,
        })
    }

    /// Bytes of a request that are taken when it is posted, at most.
    pub(in crate::ibv) fn max_inline(&self) -> u32 {
        self.max_inline
    }

    pub(in crate::ibv) fn number(&self) -> u32 {
        // SAFETY: alive.
        unsafe { self.raw.as_ref() }.qp_num
    }

    pub(in crate::ibv) fn address(&self) -> usize {
        self.raw.as_ptr().addr()
    }

    pub(in crate::ibv) fn modify(&self, mut attr: ibv_qp_attr, mask: i32) -> core::result::Result<(), Error> {
        if self.domain.context.is_inherited() {
            return Err(Error::Errno(libc::ECHILD));
        }
        // SAFETY: alive; valid attributes.
        unsafe { self.domain.context.library.ibv_modify_qp(self.raw.as_ptr(), &raw mut attr, mask) }
    }

    /// Posts a receive.
    ///
    /// # Safety
    /// As [`post`](Self::post).
    pub(in crate::ibv) unsafe fn post_recv(
        &self,
        wr_id: u64,
        slice: Option<ibv_sge>,
    ) -> core::result::Result<(), Error> {
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

/// Whether less may be granted where so much was refused.
fn is_too_much(error: Error) -> bool {
    matches!(error, Error::NoOperation(_) | Error::NoSymbol(_))
        || matches!(error.errno(), libc::EINVAL | libc::EOPNOTSUPP | libc::ENOSYS)
}
