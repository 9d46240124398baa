//! Queue pairs, shared receive queues, address handles, and the work requests that they take.

use crate::{Unused, ibv_context, ibv_cq, ibv_gid, ibv_mw, ibv_mw_bind_info, ibv_pd};
use core::ffi::{c_int, c_uint, c_void};
use core::fmt;
use core::mem::MaybeUninit;
use libc::{pthread_cond_t, pthread_mutex_t};

c_types! {
    /// The part of an address that lies in the global routing header: always there on RoCE.
    #[derive(Debug, Clone, Copy)]
    exact "struct ibv_global_route" struct ibv_global_route {
        dgid: ibv_gid,
        flow_label: u32,
        sgid_index: u8,
        hop_limit: u8,
        traffic_class: u8,
    }

    /// Where a peer is. See `ibv_create_ah(3)`.
    #[derive(Debug, Clone, Copy)]
    exact "struct ibv_ah_attr" struct ibv_ah_attr {
        grh: ibv_global_route,
        dlid: u16,
        sl: u8,
        src_path_bits: u8,
        static_rate: u8,
        is_global: u8,
        port_num: u8,
    }

    /// An address handle.
    #[derive(Debug)]
    exact "struct ibv_ah" struct ibv_ah {
        context: *mut ibv_context,
        pd: *mut ibv_pd,
        handle: u32,
    }

    /// How many requests, slices and inline bytes a queue pair holds; creation writes back what it has.
    #[derive(Debug, Clone, Copy)]
    exact "struct ibv_qp_cap" struct ibv_qp_cap {
        max_send_wr: u32,
        max_recv_wr: u32,
        max_send_sge: u32,
        max_recv_sge: u32,
        max_inline_data: u32,
    }

    /// What a queue pair is to be. See `ibv_create_qp(3)`.
    #[derive(Debug, Clone, Copy)]
    exact "struct ibv_qp_init_attr" struct ibv_qp_init_attr {
        qp_context: *mut c_void,
        send_cq: *mut ibv_cq,
        recv_cq: *mut ibv_cq,
        srq: *mut ibv_srq,
        cap: ibv_qp_cap,
        /// `IBV_QPT_*`.
        qp_type: c_uint,
        /// 0: only requests with `IBV_SEND_SIGNALED` complete when they succeed.
        sq_sig_all: c_int,
    }

    /// How received packets are spread; only part of [`ibv_qp_init_attr_ex`].
    #[derive(Debug, Clone, Copy)]
    exact "struct ibv_rx_hash_conf" struct ibv_rx_hash_conf {
        rx_hash_function: u8,
        rx_hash_key_len: u8,
        rx_hash_key: *mut u8,
        rx_hash_fields_mask: u64,
    }

    /// [`ibv_qp_init_attr`] and what was added to it. See `ibv_create_qp_ex(3)`.
    #[derive(Debug, Clone, Copy)]
    exact "struct ibv_qp_init_attr_ex" struct ibv_qp_init_attr_ex {
        qp_context: *mut c_void,
        send_cq: *mut ibv_cq,
        recv_cq: *mut ibv_cq,
        srq: *mut ibv_srq,
        cap: ibv_qp_cap,
        qp_type: c_uint,
        sq_sig_all: c_int,
        /// `IBV_QP_INIT_ATTR_*`: which of the following count.
        comp_mask: u32,
        pd: *mut ibv_pd,
        xrcd: Unused,
        create_flags: u32,
        max_tso_header: u16,
        rwq_ind_tbl: Unused,
        rx_hash_conf: ibv_rx_hash_conf,
        source_qpn: u32,
        /// `IBV_QP_EX_WITH_*`: which `wr_*` functions the queue pair is to have.
        send_ops_flags: u64,
    }

    /// The attributes of a queue pair. See `ibv_modify_qp(3)`.
    #[derive(Debug, Clone, Copy)]
    exact "struct ibv_qp_attr" struct ibv_qp_attr {
        /// `IBV_QPS_*`.
        qp_state: c_uint,
        cur_qp_state: c_uint,
        /// `IBV_MTU_*`.
        path_mtu: c_uint,
        path_mig_state: c_uint,
        qkey: u32,
        /// 24 bits.
        rq_psn: u32,
        /// 24 bits.
        sq_psn: u32,
        dest_qp_num: u32,
        /// `IBV_ACCESS_*`.
        qp_access_flags: c_uint,
        cap: ibv_qp_cap,
        ah_attr: ibv_ah_attr,
        alt_ah_attr: ibv_ah_attr,
        pkey_index: u16,
        alt_pkey_index: u16,
        en_sqd_async_notify: u8,
        sq_draining: u8,
        max_rd_atomic: u8,
        max_dest_rd_atomic: u8,
        /// A code, not a time: 12 is 0.64 ms, 0 is 655 ms.
        min_rnr_timer: u8,
        port_num: u8,
        /// 4.096 us * 2^timeout; 0 is for ever.
        timeout: u8,
        retry_cnt: u8,
        /// 7 is for ever.
        rnr_retry: u8,
        alt_port_num: u8,
        alt_timeout: u8,
        rate_limit: u32,
    }

    /// A queue pair. See `ibv_create_qp(3)`.
    #[derive(Debug)]
    exact "struct ibv_qp" struct ibv_qp {
        context: *mut ibv_context,
        qp_context: *mut c_void,
        pd: *mut ibv_pd,
        send_cq: *mut ibv_cq,
        recv_cq: *mut ibv_cq,
        srq: *mut ibv_srq,
        handle: u32,
        qp_num: u32,
        /// What `ibv_modify_qp` last set, not what the device went to by itself.
        state: c_uint,
        qp_type: c_uint,
        mutex: MaybeUninit<pthread_mutex_t>,
        cond: MaybeUninit<pthread_cond_t>,
        events_completed: u32,
    }

    /// Bytes for an inline send.
    #[derive(Debug, Clone, Copy)]
    exact "struct ibv_data_buf" struct ibv_data_buf {
        addr: *mut c_void,
        length: usize,
    }

    /// A queue pair whose requests are built by functions. See `ibv_wr_post(3)`. The provider allocates it; newer ones
    /// have more functions behind. A function is there only if it was asked for at creation.
    #[derive(Debug)]
    prefix "struct ibv_qp_ex" struct ibv_qp_ex {
        qp_base: ibv_qp,
        comp_mask: u64,
        /// Of the request that is built next.
        wr_id: u64,
        /// `IBV_SEND_*` of the request that is built next.
        wr_flags: c_uint,
        wr_atomic_cmp_swp: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, u64, u64)>,
        wr_atomic_fetch_add: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, u64)>,
        wr_bind_mw: Option<unsafe extern "C" fn(*mut ibv_qp_ex, *mut ibv_mw, u32, *const ibv_mw_bind_info)>,
        wr_local_inv: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32)>,
        wr_rdma_read: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64)>,
        wr_rdma_write: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64)>,
        wr_rdma_write_imm: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, u32)>,
        wr_send: Option<unsafe extern "C" fn(*mut ibv_qp_ex)>,
        wr_send_imm: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32)>,
        wr_send_inv: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32)>,
        wr_send_tso: Unused,
        wr_set_ud_addr: Option<unsafe extern "C" fn(*mut ibv_qp_ex, *mut ibv_ah, u32, u32)>,
        wr_set_xrc_srqn: Unused,
        wr_set_inline_data: Option<unsafe extern "C" fn(*mut ibv_qp_ex, *mut c_void, usize)>,
        wr_set_inline_data_list: Option<unsafe extern "C" fn(*mut ibv_qp_ex, usize, *const ibv_data_buf)>,
        wr_set_sge: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, u32)>,
        wr_set_sge_list: Option<unsafe extern "C" fn(*mut ibv_qp_ex, usize, *const ibv_sge)>,
        wr_start: Option<unsafe extern "C" fn(*mut ibv_qp_ex)>,
        wr_complete: Option<unsafe extern "C" fn(*mut ibv_qp_ex) -> c_int>,
        wr_abort: Option<unsafe extern "C" fn(*mut ibv_qp_ex)>,
    }

    /// A slice of local memory.
    #[derive(Debug, Clone, Copy)]
    exact "struct ibv_sge" struct ibv_sge {
        addr: u64,
        /// Bytes; 0 means 2^31 to some devices.
        length: u32,
        lkey: u32,
    }

    /// The remote side of a read or write.
    #[derive(Debug, Clone, Copy)]
    exact "__typeof__(((struct ibv_send_wr *)0)->wr.rdma)" struct ibv_send_wr_rdma {
        remote_addr: u64,
        rkey: u32,
    }

    /// The remote side of an atomic.
    #[derive(Debug, Clone, Copy)]
    exact "__typeof__(((struct ibv_send_wr *)0)->wr.atomic)" struct ibv_send_wr_atomic {
        remote_addr: u64,
        compare_add: u64,
        swap: u64,
        rkey: u32,
    }

    /// The remote side of a datagram.
    #[derive(Debug, Clone, Copy)]
    exact "__typeof__(((struct ibv_send_wr *)0)->wr.ud)" struct ibv_send_wr_ud {
        ah: *mut ibv_ah,
        remote_qpn: u32,
        remote_qkey: u32,
    }

    /// The remote side of a request; its opcode says which member counts.
    #[derive(Clone, Copy)]
    exact "__typeof__(((struct ibv_send_wr *)0)->wr)" union ibv_send_wr_remote {
        rdma: ibv_send_wr_rdma,
        atomic: ibv_send_wr_atomic,
        ud: ibv_send_wr_ud,
    }

    /// A shared receive queue of the peer, for extended reliable connections.
    #[derive(Debug, Clone, Copy)]
    exact "__typeof__(((struct ibv_send_wr *)0)->qp_type.xrc)" struct ibv_send_wr_xrc {
        remote_srqn: u32,
    }

    /// What the type of the queue pair needs; only extended reliable connections need anything.
    #[derive(Debug, Clone, Copy)]
    exact "__typeof__(((struct ibv_send_wr *)0)->qp_type)" struct ibv_send_wr_qp_type {
        xrc: ibv_send_wr_xrc,
    }

    /// What a request binds a window of type 2 to, and under which key.
    #[derive(Debug, Clone, Copy)]
    exact "__typeof__(((struct ibv_send_wr *)0)->bind_mw)" struct ibv_send_wr_bind_mw {
        mw: *mut ibv_mw,
        rkey: u32,
        bind_info: ibv_mw_bind_info,
    }

    /// A request for the send queue. See `ibv_post_send(3)`.
    #[derive(Debug, Clone, Copy)]
    exact "struct ibv_send_wr" struct ibv_send_wr {
        wr_id: u64,
        next: *mut ibv_send_wr,
        sg_list: *mut ibv_sge,
        num_sge: c_int,
        /// `IBV_WR_*`.
        opcode: c_uint,
        /// `IBV_SEND_*`.
        send_flags: c_uint,
        /// The immediate, in network byte order, or the key to invalidate.
        imm_data: u32,
        wr: ibv_send_wr_remote,
        qp_type: ibv_send_wr_qp_type,
        /// The larger of two members that share this place; the other is for TCP segmentation.
        bind_mw: ibv_send_wr_bind_mw,
    }

    /// A request for a receive queue. See `ibv_post_recv(3)`.
    #[derive(Debug, Clone, Copy)]
    exact "struct ibv_recv_wr" struct ibv_recv_wr {
        wr_id: u64,
        next: *mut ibv_recv_wr,
        sg_list: *mut ibv_sge,
        num_sge: c_int,
    }

    /// The attributes of a shared receive queue. See `ibv_create_srq(3)`.
    #[derive(Debug, Clone, Copy)]
    exact "struct ibv_srq_attr" struct ibv_srq_attr {
        max_wr: u32,
        max_sge: u32,
        srq_limit: u32,
    }

    /// What a shared receive queue is to be.
    #[derive(Debug, Clone, Copy)]
    exact "struct ibv_srq_init_attr" struct ibv_srq_init_attr {
        srq_context: *mut c_void,
        attr: ibv_srq_attr,
    }

    /// A shared receive queue.
    #[derive(Debug)]
    exact "struct ibv_srq" struct ibv_srq {
        context: *mut ibv_context,
        srq_context: *mut c_void,
        pd: *mut ibv_pd,
        handle: u32,
        mutex: MaybeUninit<pthread_mutex_t>,
        cond: MaybeUninit<pthread_cond_t>,
        events_completed: u32,
    }
}

impl fmt::Debug for ibv_send_wr_remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ibv_send_wr_remote").finish_non_exhaustive()
    }
}

c_constants! {
    "`enum ibv_qp_type`" c_uint {
        IBV_QPT_RC = 2,
        IBV_QPT_UC = 3,
        IBV_QPT_UD = 4,
    }
    "`enum ibv_qp_state`" c_uint {
        IBV_QPS_RESET = 0,
        IBV_QPS_INIT = 1,
        IBV_QPS_RTR = 2,
        IBV_QPS_RTS = 3,
        IBV_QPS_SQD = 4,
        IBV_QPS_SQE = 5,
        IBV_QPS_ERR = 6,
        IBV_QPS_UNKNOWN = 7,
    }
    "`enum ibv_mig_state`" c_uint {
        IBV_MIG_MIGRATED = 0,
        IBV_MIG_REARM = 1,
        IBV_MIG_ARMED = 2,
    }
    "`enum ibv_qp_attr_mask`" c_int {
        IBV_QP_STATE = 1 << 0,
        IBV_QP_CUR_STATE = 1 << 1,
        IBV_QP_EN_SQD_ASYNC_NOTIFY = 1 << 2,
        IBV_QP_ACCESS_FLAGS = 1 << 3,
        IBV_QP_PKEY_INDEX = 1 << 4,
        IBV_QP_PORT = 1 << 5,
        IBV_QP_QKEY = 1 << 6,
        IBV_QP_AV = 1 << 7,
        IBV_QP_PATH_MTU = 1 << 8,
        IBV_QP_TIMEOUT = 1 << 9,
        IBV_QP_RETRY_CNT = 1 << 10,
        IBV_QP_RNR_RETRY = 1 << 11,
        IBV_QP_RQ_PSN = 1 << 12,
        IBV_QP_MAX_QP_RD_ATOMIC = 1 << 13,
        IBV_QP_ALT_PATH = 1 << 14,
        IBV_QP_MIN_RNR_TIMER = 1 << 15,
        IBV_QP_SQ_PSN = 1 << 16,
        IBV_QP_MAX_DEST_RD_ATOMIC = 1 << 17,
        IBV_QP_PATH_MIG_STATE = 1 << 18,
        IBV_QP_CAP = 1 << 19,
        IBV_QP_DEST_QPN = 1 << 20,
        IBV_QP_RATE_LIMIT = 1 << 25,
    }
    "`enum ibv_qp_init_attr_mask`" u32 {
        IBV_QP_INIT_ATTR_PD = 1 << 0,
        IBV_QP_INIT_ATTR_CREATE_FLAGS = 1 << 2,
        IBV_QP_INIT_ATTR_SEND_OPS_FLAGS = 1 << 6,
    }
    "`enum ibv_qp_create_send_ops_flags`" u64 {
        IBV_QP_EX_WITH_RDMA_WRITE = 1 << 0,
        IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM = 1 << 1,
        IBV_QP_EX_WITH_SEND = 1 << 2,
        IBV_QP_EX_WITH_SEND_WITH_IMM = 1 << 3,
        IBV_QP_EX_WITH_RDMA_READ = 1 << 4,
        IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP = 1 << 5,
        IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD = 1 << 6,
        IBV_QP_EX_WITH_LOCAL_INV = 1 << 7,
        IBV_QP_EX_WITH_BIND_MW = 1 << 8,
        IBV_QP_EX_WITH_SEND_WITH_INV = 1 << 9,
    }
    "`enum ibv_wr_opcode`" c_uint {
        IBV_WR_RDMA_WRITE = 0,
        IBV_WR_RDMA_WRITE_WITH_IMM = 1,
        IBV_WR_SEND = 2,
        IBV_WR_SEND_WITH_IMM = 3,
        IBV_WR_RDMA_READ = 4,
        IBV_WR_ATOMIC_CMP_AND_SWP = 5,
        IBV_WR_ATOMIC_FETCH_AND_ADD = 6,
        IBV_WR_LOCAL_INV = 7,
        IBV_WR_BIND_MW = 8,
        IBV_WR_SEND_WITH_INV = 9,
    }
    "`enum ibv_send_flags`" c_uint {
        IBV_SEND_FENCE = 1 << 0,
        IBV_SEND_SIGNALED = 1 << 1,
        IBV_SEND_SOLICITED = 1 << 2,
        IBV_SEND_INLINE = 1 << 3,
        IBV_SEND_IP_CSUM = 1 << 4,
    }
    "`enum ibv_srq_attr_mask`" c_int {
        IBV_SRQ_MAX_WR = 1 << 0,
        IBV_SRQ_LIMIT = 1 << 1,
    }
}
