//! Protection domains, memory regions, memory windows.

use crate::ibv_context;
use core::ffi::{c_int, c_uint, c_void};

c_types! {
    /// A protection domain. See `ibv_alloc_pd(3)`.
    #[derive(Debug)]
    exact "struct ibv_pd" struct ibv_pd {
        context: *mut ibv_context,
        handle: u32,
    }

    /// A memory region. See `ibv_reg_mr(3)`.
    #[derive(Debug)]
    exact "struct ibv_mr" struct ibv_mr {
        context: *mut ibv_context,
        pd: *mut ibv_pd,
        /// What was registered; for a dma-buf its *offset*, not an address.
        addr: *mut c_void,
        length: usize,
        handle: u32,
        lkey: u32,
        rkey: u32,
    }

    /// A memory window. See `ibv_alloc_mw(3)`.
    #[derive(Debug)]
    exact "struct ibv_mw" struct ibv_mw {
        context: *mut ibv_context,
        pd: *mut ibv_pd,
        rkey: u32,
        handle: u32,
        /// `IBV_MW_TYPE_*`.
        r#type: c_uint,
    }

    /// What a window is bound to.
    #[derive(Debug, Clone, Copy)]
    exact "struct ibv_mw_bind_info" struct ibv_mw_bind_info {
        mr: *mut ibv_mr,
        addr: u64,
        length: u64,
        /// `IBV_ACCESS_*`.
        mw_access_flags: c_uint,
    }

    /// The binding of a window of type 1. See `ibv_bind_mw(3)`.
    #[derive(Debug, Clone, Copy)]
    exact "struct ibv_mw_bind" struct ibv_mw_bind {
        wr_id: u64,
        send_flags: c_uint,
        bind_info: ibv_mw_bind_info,
    }
}

c_constants! {
    "`enum ibv_access_flags`" c_int {
        IBV_ACCESS_LOCAL_WRITE = 1,
        IBV_ACCESS_REMOTE_WRITE = 1 << 1,
        IBV_ACCESS_REMOTE_READ = 1 << 2,
        IBV_ACCESS_REMOTE_ATOMIC = 1 << 3,
        IBV_ACCESS_MW_BIND = 1 << 4,
        IBV_ACCESS_ZERO_BASED = 1 << 5,
        IBV_ACCESS_ON_DEMAND = 1 << 6,
        IBV_ACCESS_HUGETLB = 1 << 7,
        IBV_ACCESS_RELAXED_ORDERING = 1 << 20,
    }
    "`IB_UVERBS_ACCESS_OPTIONAL_*`" c_int {
        IBV_ACCESS_OPTIONAL_FIRST = 1 << 20,
        IBV_ACCESS_OPTIONAL_RANGE = 0x3ff0_0000,
    }
    "`enum ibv_mw_type`" c_uint {
        IBV_MW_TYPE_1 = 1,
        IBV_MW_TYPE_2 = 2,
    }
}
