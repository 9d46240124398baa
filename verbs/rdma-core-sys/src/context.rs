//! The context of an open device: the table of operations in it, and the larger table in front of it.

use crate::{
    _compat_ibv_port_attr, Error, Unused, ibv_cq, ibv_cq_ex, ibv_cq_init_attr_ex, ibv_device, ibv_device_attr,
    ibv_device_attr_ex, ibv_modify_cq_attr, ibv_mw, ibv_mw_bind, ibv_pd, ibv_port_attr, ibv_qp, ibv_qp_init_attr_ex,
    ibv_query_device_ex_input, ibv_recv_wr, ibv_send_wr, ibv_srq, ibv_wc,
};
use core::ffi::{c_int, c_uint, c_void};
use core::mem::MaybeUninit;
use libc::pthread_mutex_t;

c_types! {
    /// The operations that `static inline` functions of the header call, and slots that only the first libibverbs had.
    #[derive(Debug, Clone, Copy)]
    exact "struct ibv_context_ops" struct ibv_context_ops {
        _compat_query_device: Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_device_attr) -> c_int>,
        _compat_query_port: Option<unsafe extern "C" fn(*mut ibv_context, u8, *mut _compat_ibv_port_attr) -> c_int>,
        _compat_alloc_pd: Unused,
        _compat_dealloc_pd: Unused,
        _compat_reg_mr: Unused,
        _compat_rereg_mr: Unused,
        _compat_dereg_mr: Unused,
        alloc_mw: Option<unsafe extern "C" fn(*mut ibv_pd, c_uint) -> *mut ibv_mw>,
        bind_mw: Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_mw, *mut ibv_mw_bind) -> c_int>,
        dealloc_mw: Option<unsafe extern "C" fn(*mut ibv_mw) -> c_int>,
        _compat_create_cq: Unused,
        poll_cq: Option<unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int>,
        req_notify_cq: Option<unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int>,
        _compat_cq_event: Unused,
        _compat_resize_cq: Unused,
        _compat_destroy_cq: Unused,
        _compat_create_srq: Unused,
        _compat_modify_srq: Unused,
        _compat_query_srq: Unused,
        _compat_destroy_srq: Unused,
        post_srq_recv: Option<unsafe extern "C" fn(*mut ibv_srq, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int>,
        _compat_create_qp: Unused,
        _compat_query_qp: Unused,
        _compat_modify_qp: Unused,
        _compat_destroy_qp: Unused,
        post_send: Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int>,
        post_recv: Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int>,
        _compat_create_ah: Unused,
        _compat_destroy_ah: Unused,
        _compat_attach_mcast: Unused,
        _compat_detach_mcast: Unused,
        _compat_async_event: Unused,
    }

    /// An open device. See `ibv_open_device(3)`.
    #[derive(Debug)]
    exact "struct ibv_context" struct ibv_context {
        device: *mut ibv_device,
        ops: ibv_context_ops,
        cmd_fd: c_int,
        /// Becomes readable when there is an asynchronous event.
        async_fd: c_int,
        num_comp_vectors: c_int,
        mutex: MaybeUninit<pthread_mutex_t>,
        /// [`__VERBS_ABI_IS_EXTENDED`] when this is part of a [`verbs_context`].
        abi_compat: *mut c_void,
    }

    /// The larger table that a context lies at the end of: as much of it as rdma-core 24 has. It grows in front, so it
    /// is only ever reached from the context, and a field only after `sz` said that it is there.
    #[derive(Debug)]
    tail "struct verbs_context" struct verbs_context {
        query_port: Option<unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr, usize) -> c_int>,
        advise_mr: Unused,
        alloc_null_mr: Unused,
        read_counters: Unused,
        attach_counters_point_flow: Unused,
        create_counters: Unused,
        destroy_counters: Unused,
        reg_dm_mr: Unused,
        alloc_dm: Unused,
        free_dm: Unused,
        modify_flow_action_esp: Unused,
        destroy_flow_action: Unused,
        create_flow_action_esp: Unused,
        modify_qp_rate_limit: Unused,
        alloc_parent_domain: Unused,
        dealloc_td: Unused,
        alloc_td: Unused,
        modify_cq: Option<unsafe extern "C" fn(*mut ibv_cq, *mut ibv_modify_cq_attr) -> c_int>,
        post_srq_ops: Unused,
        destroy_rwq_ind_table: Unused,
        create_rwq_ind_table: Unused,
        destroy_wq: Unused,
        modify_wq: Unused,
        create_wq: Unused,
        query_rt_values: Unused,
        create_cq_ex: Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex>,
        r#priv: Unused,
        query_device_ex: Option<
            unsafe extern "C" fn(
                *mut ibv_context, *const ibv_query_device_ex_input, *mut ibv_device_attr_ex, usize,
            ) -> c_int,
        >,
        ibv_destroy_flow: Unused,
        ABI_placeholder2: Unused,
        ibv_create_flow: Unused,
        ABI_placeholder1: Unused,
        open_qp: Unused,
        create_qp_ex: Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_qp_init_attr_ex) -> *mut ibv_qp>,
        get_srq_num: Unused,
        create_srq_ex: Unused,
        open_xrcd: Unused,
        close_xrcd: Unused,
        _ABI_placeholder3: u64,
        /// Length of the whole, in bytes, as the library has it.
        sz: usize,
        context: ibv_context,
    }
}

c_constants! {
    "`__VERBS_ABI_IS_EXTENDED`" usize {
        __VERBS_ABI_IS_EXTENDED = usize::MAX,
    }
}

/// The field of [`verbs_context`] that lies `offset` bytes into it, or null where this library's table does not have it:
/// a context of the first libibverbs, or a table that ends before the field.
///
/// # Safety
/// `context` points to a context that the library opened, or to the member `context` of a [`verbs_context`] of which
/// the last `sz` bytes are there.
unsafe fn extended_field(context: *mut ibv_context, offset: usize) -> *const u8 {
    // SAFETY: the caller's `context` is valid for reads.
    let abi = unsafe { (*context).abi_compat };
    if abi.addr() != __VERBS_ABI_IS_EXTENDED {
        return core::ptr::null();
    }
    let table =
        context.cast::<u8>().wrapping_sub(core::mem::offset_of!(verbs_context, context)).cast::<verbs_context>();
    // The size first: what lies before it may not be there.
    let sz = table.cast::<u8>().wrapping_add(core::mem::offset_of!(verbs_context, sz)).cast::<usize>();
    // SAFETY: the context says that it lies in a `verbs_context`, of which every version has `sz` right before it.
    let sz = unsafe { sz.read() };
    if sz < size_of::<verbs_context>() - offset {
        return core::ptr::null();
    }
    table.cast::<u8>().wrapping_add(offset)
}

/// An operation of the larger table, or [`Error::NoOperation`] where the library's table is too small for it or the
/// device's provider left it empty.
///
/// # Safety
/// As [`extended_field`]; `F` is the type of the field at `offset`, without `Option`.
pub(crate) unsafe fn extended_op<F: Copy>(
    context: *mut ibv_context,
    offset: usize,
    name: &'static str,
) -> Result<F, Error> {
    // SAFETY: passed on to the caller.
    let field = unsafe { extended_field(context, offset) };
    if field.is_null() {
        return Err(Error::NoOperation(name));
    }
    // SAFETY: the field is there, is aligned as all of the table is, and holds an `Option<F>`, as the caller says.
    unsafe { field.cast::<Option<F>>().read() }.ok_or(Error::NoOperation(name))
}
