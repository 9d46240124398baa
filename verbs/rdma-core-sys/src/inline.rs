//! The verbs that C has as `static inline` functions and that need only the object they are called on: each goes through
//! a table of function pointers that the device's provider filled.

use crate::error::{errno, null, polled};
use crate::{
    Error, ibv_ah, ibv_cq, ibv_cq_ex, ibv_data_buf, ibv_modify_cq_attr, ibv_mw, ibv_mw_bind, ibv_mw_bind_info, ibv_pd,
    ibv_poll_cq_attr, ibv_qp, ibv_qp_ex, ibv_recv_wr, ibv_send_wr, ibv_sge, ibv_srq, ibv_wc, verbs_context,
};
use crate::{IBV_MW_TYPE_1, context};
use core::ffi::{c_int, c_uint, c_void};
use core::mem::offset_of;
use core::ptr::NonNull;

/// An operation of the table of the context that `$object`, which the caller says is alive, belongs to.
macro_rules! op {
    ($object:ident, $field:ident) => {{
        // SAFETY: alive, says the caller.
        let context = unsafe { (*$object).context };
        // SAFETY: a live object has a live context.
        unsafe { (*context).ops.$field }.ok_or(Error::NoOperation(stringify!($field)))
    }};
}

/// Takes up to `num_entries` completions off the queue. See `ibv_poll_cq(3)`.
///
/// # Errors
/// [`Error::Errno`] with `EIO` when the queue is broken (overrun, dead device).
///
/// # Safety
/// `cq` is alive; `wc` is valid for writes of `num_entries` completions.
#[inline]
pub unsafe fn ibv_poll_cq(cq: *mut ibv_cq, num_entries: c_int, wc: *mut ibv_wc) -> Result<usize, Error> {
    let op = op!(cq, poll_cq)?;
    // SAFETY: the caller's.
    polled(unsafe { op(cq, num_entries, wc) })
}

/// Asks for an event at the next completion. See `ibv_req_notify_cq(3)`.
///
/// # Errors
/// What the provider says.
///
/// # Safety
/// `cq` is alive.
#[inline]
pub unsafe fn ibv_req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> Result<(), Error> {
    let op = op!(cq, req_notify_cq)?;
    // SAFETY: the caller's.
    errno(unsafe { op(cq, solicited_only) })
}

/// Posts the chain of requests that begins with `wr`. See `ibv_post_send(3)`.
///
/// # Errors
/// What the provider says; `*bad_wr` is then the first request that was not posted, those before it were.
///
/// # Safety
/// `qp` is alive; the chain and its lists are valid during the call, inline data too; other local memory is left alone
/// until the completion; `bad_wr` is valid for a write.
#[inline]
pub unsafe fn ibv_post_send(qp: *mut ibv_qp, wr: *mut ibv_send_wr, bad_wr: *mut *mut ibv_send_wr) -> Result<(), Error> {
    let op = match op!(qp, post_send) {
        Ok(op) => op,
        Err(error) => {
            // SAFETY: the caller's.
            unsafe { bad_wr.write(wr) };
            return Err(error);
        }
    };
    // SAFETY: the caller's.
    errno(unsafe { op(qp, wr, bad_wr) })
}

/// Posts the chain of receives that begins with `wr`. See `ibv_post_recv(3)`.
///
/// # Errors
/// As [`ibv_post_send`].
///
/// # Safety
/// As [`ibv_post_send`].
#[inline]
pub unsafe fn ibv_post_recv(qp: *mut ibv_qp, wr: *mut ibv_recv_wr, bad_wr: *mut *mut ibv_recv_wr) -> Result<(), Error> {
    let op = match op!(qp, post_recv) {
        Ok(op) => op,
        Err(error) => {
            // SAFETY: the caller's.
            unsafe { bad_wr.write(wr) };
            return Err(error);
        }
    };
    // SAFETY: the caller's.
    errno(unsafe { op(qp, wr, bad_wr) })
}

/// Posts the chain of receives that begins with `wr` to a shared receive queue. See `ibv_post_srq_recv(3)`.
///
/// # Errors
/// As [`ibv_post_send`].
///
/// # Safety
/// As [`ibv_post_send`].
#[inline]
pub unsafe fn ibv_post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> Result<(), Error> {
    let op = match op!(srq, post_srq_recv) {
        Ok(op) => op,
        Err(error) => {
            // SAFETY: the caller's.
            unsafe { bad_wr.write(wr) };
            return Err(error);
        }
    };
    // SAFETY: the caller's.
    errno(unsafe { op(srq, wr, bad_wr) })
}

/// Allocates a memory window of type `IBV_MW_TYPE_*`. See `ibv_alloc_mw(3)`.
///
/// # Errors
/// [`Error::NoOperation`] where the provider has no windows; `errno` otherwise.
///
/// # Safety
/// `pd` is alive.
pub unsafe fn ibv_alloc_mw(pd: *mut ibv_pd, mw_type: c_uint) -> Result<NonNull<ibv_mw>, Error> {
    let op = op!(pd, alloc_mw)?;
    // SAFETY: the caller's.
    null(unsafe { op(pd, mw_type) })
}

/// Frees a memory window; its keys are invalid after that. See `ibv_dealloc_mw(3)`.
///
/// # Errors
/// What the provider says.
///
/// # Safety
/// `mw` is alive, and not after a success.
pub unsafe fn ibv_dealloc_mw(mw: *mut ibv_mw) -> Result<(), Error> {
    let op = op!(mw, dealloc_mw)?;
    // SAFETY: the caller's.
    errno(unsafe { op(mw) })
}

/// Binds a window of type 1. See `ibv_bind_mw(3)`; windows of type 2 are bound by a request with `IBV_WR_BIND_MW`.
///
/// # Errors
/// `EINVAL` for another type, or a length or address without a region; `EPERM` for a region of another protection
/// domain; what the provider says.
///
/// # Safety
/// `qp`, `mw` and the region named in `bind` are alive; `bind` is valid.
pub unsafe fn ibv_bind_mw(qp: *mut ibv_qp, mw: *mut ibv_mw, bind: *mut ibv_mw_bind) -> Result<(), Error> {
    // SAFETY: the caller's.
    let info = unsafe { (*bind).bind_info };
    // SAFETY: a live window.
    let window = unsafe { &*mw };
    if window.r#type != IBV_MW_TYPE_1 || info.mr.is_null() && (info.addr != 0 || info.length != 0) {
        return Err(Error::Errno(libc::EINVAL));
    }
    // SAFETY: the region is alive where there is one.
    if !info.mr.is_null() && unsafe { (*info.mr).pd } != window.pd {
        return Err(Error::Errno(libc::EPERM));
    }
    let op = op!(mw, bind_mw)?;
    // SAFETY: the caller's.
    errno(unsafe { op(qp, mw, bind) })
}

/// The key of a window's next binding: its lowest 8 bits count, and come round after 256.
#[must_use]
pub const fn ibv_inc_rkey(rkey: u32) -> u32 {
    (rkey & !0xff) | (rkey.wrapping_add(1) & 0xff)
}

/// Changes how long events are held back. See `ibv_modify_cq(3)`.
///
/// # Errors
/// [`Error::NoOperation`] where the library or provider can't; what the provider says.
///
/// # Safety
/// `cq` is alive; `attr` is valid.
pub unsafe fn ibv_modify_cq(cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> Result<(), Error> {
    type Op = unsafe extern "C" fn(*mut ibv_cq, *mut ibv_modify_cq_attr) -> c_int;
    // SAFETY: a live queue.
    let context = unsafe { (*cq).context };
    // SAFETY: a live queue has a live context; `Op` is the type of the field.
    let op: Op = unsafe { context::extended_op(context, offset_of!(verbs_context, modify_cq), "modify_cq") }?;
    // SAFETY: the caller's.
    errno(unsafe { op(cq, attr) })
}

/// The classic face of an extended completion queue: the same object.
#[must_use]
pub const fn ibv_cq_ex_to_cq(cq: *mut ibv_cq_ex) -> *mut ibv_cq {
    cq.cast()
}

/// Functions that lie in the object itself. An empty one was not asked for when the object was made.
macro_rules! own_functions {
    ($object:ident: $($(#[$meta:meta])* fn $name:ident = $field:ident($($arg:ident: $ty:ty),*) -> $ret:ty;)+) => {
        $(
            #[doc = concat!("`", stringify!($name), "`: see its manual page.")]
            $(#[$meta])*
            ///
            /// # Errors
            /// [`Error::NoOperation`] where the object does not have the function.
            ///
            /// # Safety
            /// The object is alive; what the manual page asks for besides.
            #[inline]
            pub unsafe fn $name(object: *mut $object $(, $arg: $ty)*) -> Result<$ret, Error> {
                // SAFETY: a live object.
                let function = unsafe { (*object).$field }.ok_or(Error::NoOperation(stringify!($field)))?;
                // SAFETY: the caller's.
                Ok(unsafe { function(object $(, $arg)*) })
            }
        )+
    };
}

own_functions! { ibv_cq_ex:
    /// 0 for a first completion, `ENOENT` for an empty queue; after 0 alone `ibv_end_poll` is due.
    fn ibv_start_poll = start_poll(attr: *mut ibv_poll_cq_attr) -> c_int;
    /// 0 for another completion, `ENOENT` for none.
    fn ibv_next_poll = next_poll() -> c_int;
    fn ibv_end_poll = end_poll() -> ();
    fn ibv_wc_read_opcode = read_opcode() -> c_uint;
    fn ibv_wc_read_vendor_err = read_vendor_err() -> u32;
    fn ibv_wc_read_byte_len = read_byte_len() -> u32;
    /// Network byte order.
    fn ibv_wc_read_imm_data = read_imm_data() -> u32;
    fn ibv_wc_read_qp_num = read_qp_num() -> u32;
    fn ibv_wc_read_src_qp = read_src_qp() -> u32;
    fn ibv_wc_read_wc_flags = read_wc_flags() -> c_uint;
    fn ibv_wc_read_completion_ts = read_completion_ts() -> u64;
    fn ibv_wc_read_completion_wallclock_ns = read_completion_wallclock_ns() -> u64;
}

own_functions! { ibv_qp_ex:
    fn ibv_wr_atomic_cmp_swp = wr_atomic_cmp_swp(rkey: u32, remote_addr: u64, compare: u64, swap: u64) -> ();
    fn ibv_wr_atomic_fetch_add = wr_atomic_fetch_add(rkey: u32, remote_addr: u64, add: u64) -> ();
    fn ibv_wr_bind_mw = wr_bind_mw(mw: *mut ibv_mw, rkey: u32, bind_info: *const ibv_mw_bind_info) -> ();
    fn ibv_wr_local_inv = wr_local_inv(invalidate_rkey: u32) -> ();
    fn ibv_wr_rdma_read = wr_rdma_read(rkey: u32, remote_addr: u64) -> ();
    fn ibv_wr_rdma_write = wr_rdma_write(rkey: u32, remote_addr: u64) -> ();
    /// The immediate is in network byte order.
    fn ibv_wr_rdma_write_imm = wr_rdma_write_imm(rkey: u32, remote_addr: u64, imm_data: u32) -> ();
    fn ibv_wr_send = wr_send() -> ();
    /// The immediate is in network byte order.
    fn ibv_wr_send_imm = wr_send_imm(imm_data: u32) -> ();
    fn ibv_wr_send_inv = wr_send_inv(invalidate_rkey: u32) -> ();
    fn ibv_wr_set_ud_addr = wr_set_ud_addr(ah: *mut ibv_ah, remote_qpn: u32, remote_qkey: u32) -> ();
    fn ibv_wr_set_inline_data = wr_set_inline_data(addr: *mut c_void, length: usize) -> ();
    fn ibv_wr_set_inline_data_list = wr_set_inline_data_list(num_buf: usize, buf_list: *const ibv_data_buf) -> ();
    fn ibv_wr_set_sge = wr_set_sge(lkey: u32, addr: u64, length: u32) -> ();
    fn ibv_wr_set_sge_list = wr_set_sge_list(num_sge: usize, sg_list: *const ibv_sge) -> ();
    fn ibv_wr_start = wr_start() -> ();
    /// 0, or an error number; then none of the requests since `ibv_wr_start` was posted.
    fn ibv_wr_complete = wr_complete() -> c_int;
    fn ibv_wr_abort = wr_abort() -> ();
}
