//! Posting requests together, in the two ways that the library has: a chain of structs, or functions that put each request
//! where the device finds it. Both ring the doorbell once.

use super::Pair;
use core::ptr::{self, NonNull};
use rdma_core_sys::*;

/// What a queue pair whose requests are built by functions is asked to have.
pub(super) const OPERATIONS: u64 = IBV_QP_EX_WITH_RDMA_WRITE
    | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
    | IBV_QP_EX_WITH_SEND
    | IBV_QP_EX_WITH_SEND_WITH_IMM
    | IBV_QP_EX_WITH_RDMA_READ
    | IBV_QP_EX_WITH_LOCAL_INV
    | IBV_QP_EX_WITH_BIND_MW;

/// Most slices of a request whose bytes are taken when it is posted.
const INLINE_SLICES: usize = 16;

/// A request, but for its local memory.
#[derive(Debug, Clone, Copy)]
pub(in crate::ibv) struct Request {
    pub(in crate::ibv) wr_id: u64,
    /// `IBV_WR_*`: a read, write or send.
    pub(in crate::ibv) opcode: u32,
    /// `IBV_SEND_*`.
    pub(in crate::ibv) flags: u32,
    /// In network byte order.
    pub(in crate::ibv) immediate: u32,
    pub(in crate::ibv) remote_addr: u64,
    pub(in crate::ibv) rkey: u32,
}

/// Requests that are posted together, and their slices. It is kept from one time to the next for its room, which is zeroed
/// once: what a request does not say is left as it is.
#[derive(Debug, Default)]
pub(in crate::ibv) struct Chain {
    requests: Vec<ibv_send_wr>,
    slices: Vec<ibv_sge>,
    /// Requests that were added.
    count: usize,
    /// Where the slices of the request that is added next begin, and where they end so far.
    next: (usize, usize),
}

// SAFETY: the pointers in it are only used by `Pair::post`, which sets them just before.
unsafe impl Send for Chain {}

impl Chain {
    /// Empties it, and makes room.
    fn begin(&mut self, count: usize, slices: usize) {
        (self.count, self.next) = (0, (0, 0));
        if self.requests.len() < count {
            self.requests.resize_with(count, zeroed);
        }
        if self.slices.len() < slices {
            self.slices.resize_with(slices, zeroed);
        }
    }

    /// Adds a slice to the request that is added next.
    #[inline]
    pub(in crate::ibv) fn slice(&mut self, slice: ibv_sge) {
        match self.slices.get_mut(self.next.1) {
            Some(place) => *place = slice,
            None => self.slices.push(slice), // more than there were to be
        }
        self.next.1 += 1;
    }

    #[inline]
    fn request(&mut self, request: &Request, slices: usize) {
        let wr = &mut self.requests[self.count];
        wr.wr_id = request.wr_id;
        wr.num_sge = slices as i32;
        wr.opcode = request.opcode;
        wr.send_flags = request.flags;
        wr.imm_data = request.immediate;
        wr.wr.rdma = ibv_send_wr_rdma { remote_addr: request.remote_addr, rkey: request.rkey };
        self.count += 1;
    }
}

/// Whether a queue pair has all the functions that are called below.
pub(super) fn has_functions(ex: NonNull<ibv_qp_ex>) -> bool {
    // SAFETY: alive: it was made just now.
    let ex = unsafe { ex.as_ref() };
    ex.wr_start.is_some()
        && ex.wr_complete.is_some()
        && ex.wr_abort.is_some()
        && ex.wr_rdma_read.is_some()
        && ex.wr_rdma_write.is_some()
        && ex.wr_rdma_write_imm.is_some()
        && ex.wr_send.is_some()
        && ex.wr_send_imm.is_some()
        && ex.wr_set_sge.is_some()
        && ex.wr_set_sge_list.is_some()
        && ex.wr_set_inline_data_list.is_some()
}

impl Pair {
    /// Begins to add requests to `chain`, so many at most and with about so many slices; [`post`](Self::post) or
    /// [`give_up`](Self::give_up) has to follow, and no other call may come between.
    pub(in crate::ibv) fn begin(&self, chain: &mut Chain, count: usize, slices: usize) {
        chain.begin(if self.extended.is_some() { 0 } else { count }, slices);
        if let Some(ex) = self.extended {
            // SAFETY: alive; it has the function.
            let _always = unsafe { ibv_wr_start(ex.as_ptr()) };
        }
    }

    /// Adds a request, with the slices that were added to the chain since the one before.
    ///
    /// # Panics
    /// When there are more than [`begin`](Self::begin) was told.
    pub(in crate::ibv) fn add(&self, chain: &mut Chain, request: &Request) {
        let Some(ex) = self.extended else {
            chain.request(request, chain.next.1 - chain.next.0);
            chain.next.0 = chain.next.1;
            return;
        };
        build(ex, request, &chain.slices[..chain.next.1]);
        chain.next = (0, 0);
    }

    /// The same, for a request of one slice.
    #[inline]
    pub(in crate::ibv) fn add_with(&self, chain: &mut Chain, request: &Request, slice: ibv_sge) {
        let Some(ex) = self.extended else {
            chain.slice(slice);
            chain.next.0 = chain.next.1;
            chain.request(request, 1);
            return;
        };
        build(ex, request, &[slice]);
    }

    /// Nothing that was added is posted.
    pub(in crate::ibv) fn give_up(&self) {
        if let Some(ex) = self.extended {
            // SAFETY: alive; it has the function; begun.
            let _always = unsafe { ibv_wr_abort(ex.as_ptr()) };
        }
    }

    /// Posts what was added. The error has the number of those that were posted all the same.
    ///
    /// # Safety
    /// Each slice names registered memory that stays so until the request completes or the queue pair is destroyed.
    pub(in crate::ibv) unsafe fn post(&self, chain: &mut Chain) -> core::result::Result<(), (Error, usize)> {
        let Some(ex) = self.extended else {
            // SAFETY: the caller's.
            return unsafe { self.post_chain(&mut chain.requests[..chain.count], &mut chain.slices[..chain.next.1]) };
        };
        // SAFETY: alive; it has the function; begun. Memory is the caller's promise.
        match unsafe { ibv_wr_complete(ex.as_ptr()) } {
            Ok(0) => Ok(()),
            Ok(errno) => Err((Error::Errno(errno.saturating_abs()), 0)),
            Err(error) => Err((error, 0)),
        }
    }

    /// Posts `requests`, which are chained and given their slices (so many for each, in order) here. The error has the
    /// number of those that were posted.
    ///
    /// # Safety
    /// As [`post`](Self::post).
    pub(in crate::ibv) unsafe fn post_chain(
        &self,
        requests: &mut [ibv_send_wr],
        slices: &mut [ibv_sge],
    ) -> core::result::Result<(), (Error, usize)> {
        let count = requests.len();
        let first = requests.as_mut_ptr();
        let (mut list, mut next, mut taken) = (slices.as_mut_ptr(), first, 0);
        for request in &mut *requests {
            next = next.wrapping_add(1);
            (request.next, request.sg_list) = (next, list);
            list = list.wrapping_add(request.num_sge as usize);
            taken += request.num_sge as usize;
        }
        let Some(last) = requests.last_mut() else { return Ok(()) };
        last.next = ptr::null_mut();
        assert_eq!(taken, slices.len(), "requests and their slices");
        let mut bad = ptr::null_mut();
        // SAFETY: alive; the chain ends within `requests`, whose lists lie within `slices`; memory is the caller's promise.
        let posted = unsafe { ibv_post_send(self.raw.as_ptr(), first, &raw mut bad) };
        posted.map_err(|error| {
            let before = bad.addr().wrapping_sub(first.addr()) / size_of::<ibv_send_wr>();
            (error, if before < count { before } else { 0 })
        })
    }
}

/// Puts a request where the device finds it once its doorbell rings.
#[inline(always)]
fn build(ex: NonNull<ibv_qp_ex>, request: &Request, slices: &[ibv_sge]) {
    let raw = ex.as_ptr();
    let Request { rkey, remote_addr, immediate, .. } = *request;
    // SAFETY: alive, and only used under the lock of the queue pair's state.
    unsafe { (*raw).wr_id = request.wr_id };
    // SAFETY: as above.
    unsafe { (*raw).wr_flags = request.flags & !IBV_SEND_INLINE };
    let _always = match request.opcode {
        // SAFETY: alive; it has the function; begun. So it is below.
        IBV_WR_RDMA_READ => unsafe { ibv_wr_rdma_read(raw, rkey, remote_addr) },
        // SAFETY: as above.
        IBV_WR_RDMA_WRITE => unsafe { ibv_wr_rdma_write(raw, rkey, remote_addr) },
        // SAFETY: as above.
        IBV_WR_RDMA_WRITE_WITH_IMM => unsafe { ibv_wr_rdma_write_imm(raw, rkey, remote_addr, immediate) },
        // SAFETY: as above.
        IBV_WR_SEND_WITH_IMM => unsafe { ibv_wr_send_imm(raw, immediate) },
        // SAFETY: as above.
        _ => unsafe { ibv_wr_send(raw) },
    };
    let _always = match slices {
        // SAFETY: as above.
        [one] if request.flags & IBV_SEND_INLINE == 0 => unsafe { ibv_wr_set_sge(raw, one.lkey, one.addr, one.length) },
        _ if request.flags & IBV_SEND_INLINE != 0 => {
            let mut list = [ibv_data_buf { addr: ptr::null_mut(), length: 0 }; INLINE_SLICES];
            for (to, from) in list.iter_mut().zip(slices) {
                let addr = ptr::with_exposed_provenance_mut(from.addr as usize);
                *to = ibv_data_buf { addr, length: from.length as usize };
            }
            // SAFETY: as above; the list is read now, and the bytes that it names, which are mapped.
            unsafe { ibv_wr_set_inline_data_list(raw, slices.len().min(INLINE_SLICES), list.as_ptr()) }
        }
        // SAFETY: as above; the list is read now.
        _ => unsafe { ibv_wr_set_sge_list(raw, slices.len(), slices.as_ptr()) },
    };
}
