//! Completion queues and channels, classic and extended.

use crate::{Unused, ibv_context, ibv_pd};
use core::ffi::{c_int, c_uint, c_void};
use core::mem::MaybeUninit;
use libc::{pthread_cond_t, pthread_mutex_t};

c_types! {
    /// A completion channel: a descriptor that becomes readable when an armed queue has a completion. See
    /// `ibv_create_comp_channel(3)`.
    #[derive(Debug)]
    exact "struct ibv_comp_channel" struct ibv_comp_channel {
        context: *mut ibv_context,
        fd: c_int,
        refcnt: c_int,
    }

    /// A completion queue. See `ibv_create_cq(3)`.
    #[derive(Debug)]
    exact "struct ibv_cq" struct ibv_cq {
        context: *mut ibv_context,
        channel: *mut ibv_comp_channel,
        cq_context: *mut c_void,
        handle: u32,
        /// How many entries it has, which may be more than were asked for.
        cqe: c_int,
        mutex: MaybeUninit<pthread_mutex_t>,
        cond: MaybeUninit<pthread_cond_t>,
        comp_events_completed: u32,
        async_events_completed: u32,
    }

    /// A completion. See `ibv_poll_cq(3)`. If `status` is not success, only `wr_id`, `status`, `qp_num` and
    /// `vendor_err` are valid.
    #[derive(Debug, Clone, Copy)]
    exact "struct ibv_wc" struct ibv_wc {
        wr_id: u64,
        /// `IBV_WC_*` of `enum ibv_wc_status`.
        status: c_uint,
        /// `IBV_WC_*` of `enum ibv_wc_opcode`.
        opcode: c_uint,
        vendor_err: u32,
        byte_len: u32,
        /// With `IBV_WC_WITH_IMM` the immediate, in network byte order; with `IBV_WC_WITH_INV` the key that was
        /// invalidated.
        imm_data: u32,
        qp_num: u32,
        src_qp: u32,
        wc_flags: c_uint,
        pkey_index: u16,
        slid: u16,
        sl: u8,
        dlid_path_bits: u8,
    }

    /// What is asked of `start_poll`; nothing can be asked yet.
    #[derive(Debug, Clone, Copy)]
    exact "struct ibv_poll_cq_attr" struct ibv_poll_cq_attr {
        comp_mask: u32,
    }

    /// A completion queue whose completions are read by functions. See `ibv_create_cq_ex(3)`. A function is there only
    /// if the value it reads was asked for at creation.
    #[derive(Debug)]
    exact "struct ibv_cq_ex" struct ibv_cq_ex {
        context: *mut ibv_context,
        channel: *mut ibv_comp_channel,
        cq_context: *mut c_void,
        handle: u32,
        cqe: c_int,
        mutex: MaybeUninit<pthread_mutex_t>,
        cond: MaybeUninit<pthread_cond_t>,
        comp_events_completed: u32,
        async_events_completed: u32,
        comp_mask: u32,
        /// Of the current completion.
        status: c_uint,
        /// Of the current completion.
        wr_id: u64,
        start_poll: Option<unsafe extern "C" fn(*mut ibv_cq_ex, *mut ibv_poll_cq_attr) -> c_int>,
        next_poll: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> c_int>,
        end_poll: Option<unsafe extern "C" fn(*mut ibv_cq_ex)>,
        read_opcode: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> c_uint>,
        read_vendor_err: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> u32>,
        read_byte_len: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> u32>,
        read_imm_data: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> u32>,
        read_qp_num: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> u32>,
        read_src_qp: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> u32>,
        read_wc_flags: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> c_uint>,
        read_slid: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> u32>,
        read_sl: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> u8>,
        read_dlid_path_bits: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> u8>,
        read_completion_ts: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> u64>,
        read_cvlan: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> u16>,
        read_flow_tag: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> u32>,
        read_tm_info: Unused,
        read_completion_wallclock_ns: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> u64>,
    }

    /// What an extended completion queue is to be. A library older than rdma-core 31 does not look at the last field.
    #[derive(Debug, Clone, Copy)]
    exact "struct ibv_cq_init_attr_ex" struct ibv_cq_init_attr_ex {
        cqe: u32,
        cq_context: *mut c_void,
        channel: *mut ibv_comp_channel,
        comp_vector: u32,
        /// `IBV_WC_EX_WITH_*`.
        wc_flags: u64,
        /// `IBV_CQ_INIT_ATTR_MASK_*`.
        comp_mask: u32,
        /// `IBV_CREATE_CQ_ATTR_*`.
        flags: u32,
        parent_domain: *mut ibv_pd,
    }

    /// How long an event may be held back: completions, microseconds.
    #[derive(Debug, Clone, Copy)]
    exact "struct ibv_moderate_cq" struct ibv_moderate_cq {
        cq_count: u16,
        cq_period: u16,
    }

    /// What to change of a completion queue. See `ibv_modify_cq(3)`.
    #[derive(Debug, Clone, Copy)]
    exact "struct ibv_modify_cq_attr" struct ibv_modify_cq_attr {
        /// `IBV_CQ_ATTR_MODERATE`.
        attr_mask: u32,
        moderate: ibv_moderate_cq,
    }
}

c_constants! {
    "`enum ibv_wc_status`" c_uint {
        IBV_WC_SUCCESS = 0,
        IBV_WC_LOC_LEN_ERR = 1,
        IBV_WC_LOC_QP_OP_ERR = 2,
        IBV_WC_LOC_EEC_OP_ERR = 3,
        IBV_WC_LOC_PROT_ERR = 4,
        IBV_WC_WR_FLUSH_ERR = 5,
        IBV_WC_MW_BIND_ERR = 6,
        IBV_WC_BAD_RESP_ERR = 7,
        IBV_WC_LOC_ACCESS_ERR = 8,
        IBV_WC_REM_INV_REQ_ERR = 9,
        IBV_WC_REM_ACCESS_ERR = 10,
        IBV_WC_REM_OP_ERR = 11,
        IBV_WC_RETRY_EXC_ERR = 12,
        IBV_WC_RNR_RETRY_EXC_ERR = 13,
        IBV_WC_LOC_RDD_VIOL_ERR = 14,
        IBV_WC_REM_INV_RD_REQ_ERR = 15,
        IBV_WC_REM_ABORT_ERR = 16,
        IBV_WC_INV_EECN_ERR = 17,
        IBV_WC_INV_EEC_STATE_ERR = 18,
        IBV_WC_FATAL_ERR = 19,
        IBV_WC_RESP_TIMEOUT_ERR = 20,
        IBV_WC_GENERAL_ERR = 21,
        IBV_WC_TM_ERR = 22,
        IBV_WC_TM_RNDV_INCOMPLETE = 23,
    }
    "`enum ibv_wc_opcode`" c_uint {
        IBV_WC_SEND = 0,
        IBV_WC_RDMA_WRITE = 1,
        IBV_WC_RDMA_READ = 2,
        IBV_WC_COMP_SWAP = 3,
        IBV_WC_FETCH_ADD = 4,
        IBV_WC_BIND_MW = 5,
        IBV_WC_LOCAL_INV = 6,
        IBV_WC_TSO = 7,
        IBV_WC_RECV = 1 << 7,
        IBV_WC_RECV_RDMA_WITH_IMM = 129,
    }
    "`enum ibv_wc_flags`" c_uint {
        IBV_WC_GRH = 1 << 0,
        IBV_WC_WITH_IMM = 1 << 1,
        IBV_WC_IP_CSUM_OK = 1 << 2,
        IBV_WC_WITH_INV = 1 << 3,
    }
    "`enum ibv_create_cq_wc_flags`" u64 {
        IBV_WC_EX_WITH_BYTE_LEN = 1 << 0,
        IBV_WC_EX_WITH_IMM = 1 << 1,
        IBV_WC_EX_WITH_QP_NUM = 1 << 2,
        IBV_WC_EX_WITH_SRC_QP = 1 << 3,
        IBV_WC_EX_WITH_SLID = 1 << 4,
        IBV_WC_EX_WITH_SL = 1 << 5,
        IBV_WC_EX_WITH_DLID_PATH_BITS = 1 << 6,
        IBV_WC_EX_WITH_COMPLETION_TIMESTAMP = 1 << 7,
        IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK = 1 << 11,
    }
    "`enum ibv_cq_init_attr_mask`" u32 {
        IBV_CQ_INIT_ATTR_MASK_FLAGS = 1 << 0,
        IBV_CQ_INIT_ATTR_MASK_PD = 1 << 1,
    }
    "`enum ibv_create_cq_attr_flags`" u32 {
        IBV_CREATE_CQ_ATTR_SINGLE_THREADED = 1 << 0,
        IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN = 1 << 1,
    }
    "`enum ibv_cq_attr_mask`" u32 {
        IBV_CQ_ATTR_MODERATE = 1 << 0,
    }
}
