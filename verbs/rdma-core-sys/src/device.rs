//! Devices, their attributes, ports, GIDs, and what happens to them.

use crate::{ibv_cq, ibv_qp, ibv_srq};
use core::ffi::{c_char, c_int, c_uint, c_void};
use core::fmt;

c_opaque! {
    /// The port attributes that the exported `ibv_query_port` fills: those of the first libibverbs, a prefix of
    /// [`ibv_port_attr`]. A type of its own so that it can't be taken for the whole.
    _compat_ibv_port_attr
    /// A work queue; only pointed to.
    ibv_wq
}

c_types! {
    /// A device that the library found, valid until the list it came in is freed or as long as it is open.
    #[derive(Debug)]
    exact "struct ibv_device" struct ibv_device {
        _ops: [*const c_void; 2],
        /// `IBV_NODE_*`.
        node_type: c_int,
        /// `IBV_TRANSPORT_*`.
        transport_type: c_int,
        name: [c_char; 64],
        dev_name: [c_char; 64],
        dev_path: [c_char; 256],
        ibdev_path: [c_char; 256],
    }

    /// What a device can do; limits of it, not of what is free. See `ibv_query_device(3)`.
    #[derive(Debug, Clone, Copy)]
    exact "struct ibv_device_attr" struct ibv_device_attr {
        fw_ver: [c_char; 64],
        /// Network byte order.
        node_guid: u64,
        /// Network byte order.
        sys_image_guid: u64,
        /// Bytes; some devices say less than they take, and one that says 2^64 - 1 has no limit of its own.
        max_mr_size: u64,
        /// A bit for each supported page size.
        page_size_cap: u64,
        vendor_id: u32,
        vendor_part_id: u32,
        hw_ver: u32,
        max_qp: c_int,
        max_qp_wr: c_int,
        /// `IBV_DEVICE_*`.
        device_cap_flags: c_uint,
        max_sge: c_int,
        max_sge_rd: c_int,
        max_cq: c_int,
        max_cqe: c_int,
        max_mr: c_int,
        max_pd: c_int,
        /// Reads and atomics that one queue pair can answer at a time.
        max_qp_rd_atom: c_int,
        max_ee_rd_atom: c_int,
        /// Reads and atomics that the whole device can answer at a time.
        max_res_rd_atom: c_int,
        /// Reads and atomics that one queue pair can have outstanding.
        max_qp_init_rd_atom: c_int,
        max_ee_init_rd_atom: c_int,
        atomic_cap: c_uint,
        max_ee: c_int,
        max_rdd: c_int,
        max_mw: c_int,
        max_raw_ipv6_qp: c_int,
        max_raw_ethy_qp: c_int,
        max_mcast_grp: c_int,
        max_mcast_qp_attach: c_int,
        max_total_mcast_qp_attach: c_int,
        max_ah: c_int,
        max_fmr: c_int,
        max_map_per_fmr: c_int,
        max_srq: c_int,
        max_srq_wr: c_int,
        max_srq_sge: c_int,
        max_pkeys: u16,
        local_ca_ack_delay: u8,
        phys_port_cnt: u8,
    }

    /// What is asked of `query_device_ex`; nothing can be asked yet.
    #[derive(Debug, Clone, Copy)]
    exact "struct ibv_query_device_ex_input" struct ibv_query_device_ex_input {
        comp_mask: u32,
    }

    /// Paging on demand, by transport.
    #[derive(Debug, Clone, Copy)]
    exact "__typeof__(((struct ibv_odp_caps *)0)->per_transport_caps)" struct ibv_odp_caps_per_transport {
        rc_odp_caps: u32,
        uc_odp_caps: u32,
        ud_odp_caps: u32,
    }

    /// Paging on demand.
    #[derive(Debug, Clone, Copy)]
    exact "struct ibv_odp_caps" struct ibv_odp_caps {
        general_caps: u64,
        per_transport_caps: ibv_odp_caps_per_transport,
    }

    /// TCP segmentation.
    #[derive(Debug, Clone, Copy)]
    exact "struct ibv_tso_caps" struct ibv_tso_caps {
        max_tso: u32,
        supported_qpts: u32,
    }

    /// Receive-side scaling.
    #[derive(Debug, Clone, Copy)]
    exact "struct ibv_rss_caps" struct ibv_rss_caps {
        supported_qpts: u32,
        max_rwq_indirection_tables: u32,
        max_rwq_indirection_table_size: u32,
        rx_hash_fields_mask: u64,
        rx_hash_function: u8,
    }

    /// Rate limits, in kbit/s.
    #[derive(Debug, Clone, Copy)]
    exact "struct ibv_packet_pacing_caps" struct ibv_packet_pacing_caps {
        qp_rate_limit_min: u32,
        qp_rate_limit_max: u32,
        supported_qpts: u32,
    }

    /// Tag matching.
    #[derive(Debug, Clone, Copy)]
    exact "struct ibv_tm_caps" struct ibv_tm_caps {
        max_rndv_hdr_size: u32,
        max_num_tags: u32,
        flags: u32,
        max_ops: u32,
        max_sge: u32,
    }

    /// Completion moderation: most completions, and most microseconds, that an event may be held back.
    #[derive(Debug, Clone, Copy)]
    exact "struct ibv_cq_moderation_caps" struct ibv_cq_moderation_caps {
        max_cq_count: u16,
        max_cq_period: u16,
    }

    /// Atomics over PCI Express.
    #[derive(Debug, Clone, Copy)]
    exact "struct ibv_pci_atomic_caps" struct ibv_pci_atomic_caps {
        fetch_add: u16,
        swap: u16,
        compare_swap: u16,
    }

    /// [`ibv_device_attr`] and what was added to it. See `ibv_query_device_ex(3)`.
    #[derive(Debug, Clone, Copy)]
    exact "struct ibv_device_attr_ex" struct ibv_device_attr_ex {
        orig_attr: ibv_device_attr,
        comp_mask: u32,
        odp_caps: ibv_odp_caps,
        completion_timestamp_mask: u64,
        /// kHz.
        hca_core_clock: u64,
        device_cap_flags_ex: u64,
        tso_caps: ibv_tso_caps,
        rss_caps: ibv_rss_caps,
        max_wq_type_rq: u32,
        packet_pacing_caps: ibv_packet_pacing_caps,
        raw_packet_caps: u32,
        tm_caps: ibv_tm_caps,
        cq_mod_caps: ibv_cq_moderation_caps,
        max_dm_size: u64,
        pci_atomic_caps: ibv_pci_atomic_caps,
        xrc_odp_caps: u32,
        /// Since rdma-core 36, in what was padding; 0 before.
        phys_port_cnt_ex: u32,
    }

    /// A port. See `ibv_query_port(3)`. From rdma-core 50 there is another field behind; the library is told this
    /// length and fills no more.
    #[derive(Debug, Clone, Copy)]
    prefix "struct ibv_port_attr" struct ibv_port_attr {
        /// `IBV_PORT_*`.
        state: c_uint,
        /// `IBV_MTU_*`.
        max_mtu: c_uint,
        /// `IBV_MTU_*`.
        active_mtu: c_uint,
        gid_tbl_len: c_int,
        port_cap_flags: u32,
        /// Largest length of a message, in bytes.
        max_msg_sz: u32,
        bad_pkey_cntr: u32,
        qkey_viol_cntr: u32,
        pkey_tbl_len: u16,
        lid: u16,
        sm_lid: u16,
        lmc: u8,
        max_vl_num: u8,
        sm_sl: u8,
        subnet_timeout: u8,
        init_type_reply: u8,
        active_width: u8,
        active_speed: u8,
        phys_state: u8,
        /// `IBV_LINK_LAYER_*`.
        link_layer: u8,
        flags: u8,
        port_cap_flags2: u16,
    }

    /// The halves of a GID, both in network byte order.
    #[derive(Debug, Clone, Copy)]
    exact "__typeof__(((union ibv_gid *)0)->global)" struct ibv_gid_global {
        subnet_prefix: u64,
        interface_id: u64,
    }

    /// A GID. Aligned to 8 bytes, which moves what lies behind it in other structs.
    #[derive(Clone, Copy)]
    exact "union ibv_gid" union ibv_gid {
        raw: [u8; 16],
        global: ibv_gid_global,
    }

    /// An entry of a port's GID table. See `ibv_query_gid_ex(3)`.
    #[derive(Debug, Clone, Copy)]
    exact "struct ibv_gid_entry" struct ibv_gid_entry {
        gid: ibv_gid,
        gid_index: u32,
        port_num: u32,
        /// `IBV_GID_TYPE_*`.
        gid_type: u32,
        /// Index of the network interface behind it; 0 for none (InfiniBand).
        ndev_ifindex: u32,
    }

    /// Whom an asynchronous event concerns; its type says which member counts.
    #[derive(Clone, Copy)]
    exact "__typeof__(((struct ibv_async_event *)0)->element)" union ibv_async_event_element {
        cq: *mut ibv_cq,
        qp: *mut ibv_qp,
        srq: *mut ibv_srq,
        wq: *mut ibv_wq,
        port_num: c_int,
    }

    /// An asynchronous event; each must be acknowledged, or destroying what it concerns waits for ever. See
    /// `ibv_get_async_event(3)`.
    #[derive(Debug, Clone, Copy)]
    exact "struct ibv_async_event" struct ibv_async_event {
        element: ibv_async_event_element,
        /// `IBV_EVENT_*`.
        event_type: c_uint,
    }
}

impl fmt::Debug for ibv_gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // SAFETY: every bit pattern is an array of bytes, and both members cover the whole union.
        let raw = unsafe { self.raw };
        write!(f, "{}", core::net::Ipv6Addr::from(raw))
    }
}

impl fmt::Debug for ibv_async_event_element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ibv_async_event_element").finish_non_exhaustive()
    }
}

c_constants! {
    "`enum ibv_node_type`" c_int {
        IBV_NODE_UNKNOWN = -1,
        IBV_NODE_CA = 1,
        IBV_NODE_SWITCH = 2,
        IBV_NODE_ROUTER = 3,
        IBV_NODE_RNIC = 4,
        IBV_NODE_USNIC = 5,
        IBV_NODE_USNIC_UDP = 6,
        IBV_NODE_UNSPECIFIED = 7,
    }
    "`enum ibv_transport_type`" c_int {
        IBV_TRANSPORT_UNKNOWN = -1,
        IBV_TRANSPORT_IB = 0,
        IBV_TRANSPORT_IWARP = 1,
        IBV_TRANSPORT_USNIC = 2,
        IBV_TRANSPORT_USNIC_UDP = 3,
        IBV_TRANSPORT_UNSPECIFIED = 4,
    }
    "`enum ibv_device_cap_flags`" c_uint {
        IBV_DEVICE_RESIZE_MAX_WR = 1,
        IBV_DEVICE_PORT_ACTIVE_EVENT = 1 << 10,
        IBV_DEVICE_RC_RNR_NAK_GEN = 1 << 12,
        IBV_DEVICE_SRQ_RESIZE = 1 << 13,
        IBV_DEVICE_MEM_WINDOW = 1 << 17,
        IBV_DEVICE_XRC = 1 << 20,
        IBV_DEVICE_MEM_MGT_EXTENSIONS = 1 << 21,
        IBV_DEVICE_MEM_WINDOW_TYPE_2A = 1 << 23,
        IBV_DEVICE_MEM_WINDOW_TYPE_2B = 1 << 24,
    }
    "`enum ibv_atomic_cap`" c_uint {
        IBV_ATOMIC_NONE = 0,
        IBV_ATOMIC_HCA = 1,
        IBV_ATOMIC_GLOB = 2,
    }
    "`enum ibv_odp_general_caps`" u64 {
        IBV_ODP_SUPPORT = 1 << 0,
        IBV_ODP_SUPPORT_IMPLICIT = 1 << 1,
    }
    "`enum ibv_mtu`" c_uint {
        IBV_MTU_256 = 1,
        IBV_MTU_512 = 2,
        IBV_MTU_1024 = 3,
        IBV_MTU_2048 = 4,
        IBV_MTU_4096 = 5,
    }
    "`enum ibv_port_state`" c_uint {
        IBV_PORT_NOP = 0,
        IBV_PORT_DOWN = 1,
        IBV_PORT_INIT = 2,
        IBV_PORT_ARMED = 3,
        IBV_PORT_ACTIVE = 4,
        IBV_PORT_ACTIVE_DEFER = 5,
    }
    "the link layers" u8 {
        IBV_LINK_LAYER_UNSPECIFIED = 0,
        IBV_LINK_LAYER_INFINIBAND = 1,
        IBV_LINK_LAYER_ETHERNET = 2,
    }
    "`enum ib_uverbs_query_port_flags`" u8 {
        IBV_QPF_GRH_REQUIRED = 1 << 0,
    }
    "`enum ibv_gid_type`" u32 {
        IBV_GID_TYPE_IB = 0,
        IBV_GID_TYPE_ROCE_V1 = 1,
        IBV_GID_TYPE_ROCE_V2 = 2,
    }
    "`enum ibv_fork_status`" c_uint {
        IBV_FORK_DISABLED = 0,
        IBV_FORK_ENABLED = 1,
        IBV_FORK_UNNEEDED = 2,
    }
    "`enum ibv_event_type`" c_uint {
        IBV_EVENT_CQ_ERR = 0,
        IBV_EVENT_QP_FATAL = 1,
        IBV_EVENT_QP_REQ_ERR = 2,
        IBV_EVENT_QP_ACCESS_ERR = 3,
        IBV_EVENT_COMM_EST = 4,
        IBV_EVENT_SQ_DRAINED = 5,
        IBV_EVENT_PATH_MIG = 6,
        IBV_EVENT_PATH_MIG_ERR = 7,
        IBV_EVENT_DEVICE_FATAL = 8,
        IBV_EVENT_PORT_ACTIVE = 9,
        IBV_EVENT_PORT_ERR = 10,
        IBV_EVENT_LID_CHANGE = 11,
        IBV_EVENT_PKEY_CHANGE = 12,
        IBV_EVENT_SM_CHANGE = 13,
        IBV_EVENT_SRQ_ERR = 14,
        IBV_EVENT_SRQ_LIMIT_REACHED = 15,
        IBV_EVENT_QP_LAST_WQE_REACHED = 16,
        IBV_EVENT_CLIENT_REREGISTER = 17,
        IBV_EVENT_GID_CHANGE = 18,
        IBV_EVENT_WQ_FATAL = 19,
    }
}
