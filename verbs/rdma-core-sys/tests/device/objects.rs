//! What is there, and what is made of it: devices, ports, GIDs, domains, regions, queues, states.

use crate::bed::{ALL, Bed, Patience, Qp, names, raw};
use core::ptr;
use rdma_core_sys::*;

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn devices_are_listed_by_name() {
    let library = Library::load().unwrap();
    let list = library.devices().unwrap();
    let found: Vec<_> = (0..list.len()).map(|i| list.name(i).unwrap()).collect();
    for name in names() {
        let index = found.iter().position(|other| *other == name).expect("the device is listed");
        // SAFETY: a device of a list that is alive.
        assert_ne!(unsafe { library.ibv_get_device_guid(list.get(index).unwrap().as_ptr()) }, 0);
        // SAFETY: as above.
        let device = unsafe { &*list.get(index).unwrap().as_ptr() };
        assert_eq!((device.node_type, device.transport_type), (IBV_NODE_CA, IBV_TRANSPORT_IB));
        let dev_name = device.name.map(|c| c.cast_unsigned());
        assert_eq!(&dev_name[..=name.len()], [name.as_bytes(), b"\0"].concat(), "the struct is read where it is");
    }
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_device_says_what_it_can_do() {
    let bed = Bed::new();
    let attr = bed.device_attr();
    assert!(attr.max_qp > 16 && attr.max_cqe >= 256 && attr.max_sge >= 4 && attr.max_mr > 16, "{attr:?}");
    assert!(attr.max_mr_size >= 1 << 30 && attr.max_qp_rd_atom >= 4 && attr.phys_port_cnt == 1, "{attr:?}");
    assert_ne!(attr.page_size_cap & 4096, 0);
    let mut extended: ibv_device_attr_ex = zeroed();
    // SAFETY: open.
    unsafe { bed.library.ibv_query_device_ex(bed.context, ptr::null(), &raw mut extended) }.unwrap();
    assert_eq!(extended.orig_attr.max_mr_size, attr.max_mr_size);
    assert_eq!(extended.orig_attr.phys_port_cnt, attr.phys_port_cnt, "the last field");
    let input = ibv_query_device_ex_input { comp_mask: 1 };
    // SAFETY: open.
    let refused = unsafe { bed.library.ibv_query_device_ex(bed.context, &raw const input, &raw mut extended) };
    assert_eq!(refused, Err(Error::Errno(libc::EINVAL)));
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_port_says_where_it_stands() {
    for name in names() {
        let port = Bed::on(&name).port_attr();
        assert_eq!((port.state, port.link_layer), (IBV_PORT_ACTIVE, IBV_LINK_LAYER_ETHERNET), "{port:?}");
        assert!((IBV_MTU_256..=IBV_MTU_4096).contains(&port.active_mtu), "{port:?}");
        assert!(port.max_msg_sz >= 1 << 23 && port.gid_tbl_len > 1 && port.pkey_tbl_len >= 1, "{port:?}");
    }
    let bed = Bed::new();
    let mut attr = zeroed();
    // SAFETY: open.
    let refused = unsafe { bed.library.ibv_query_port(bed.context, 99, &raw mut attr) };
    assert!(matches!(refused, Err(Error::Errno(_))), "{refused:?}");
    // SAFETY: any number is allowed.
    let text = unsafe { bed.library.ibv_port_state_str(IBV_PORT_ACTIVE) };
    // SAFETY: the library returns a C string of its own.
    let text = unsafe { core::ffi::CStr::from_ptr(text) }.to_string_lossy().to_lowercase();
    assert!(text.contains("active"), "{text}");
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn gids_have_types_addresses_and_interfaces() {
    for name in names() {
        let bed = Bed::on(&name);
        let chosen = bed.gid();
        assert_ne!(chosen.ndev_ifindex, 0);
        for entry in bed.gids() {
            assert_eq!(entry.port_num, 1);
            let mut one: ibv_gid_entry = zeroed();
            // SAFETY: open.
            unsafe { bed.library.ibv_query_gid_ex(bed.context, 1, entry.gid_index, &raw mut one) }.unwrap();
            assert_eq!(
                (raw(&one.gid), one.gid_type, one.gid_index),
                (raw(&entry.gid), entry.gid_type, entry.gid_index)
            );
            let mut plain: ibv_gid = zeroed();
            // SAFETY: open.
            unsafe { bed.library.ibv_query_gid(bed.context, 1, entry.gid_index as i32, &raw mut plain) }.unwrap();
            assert_eq!(raw(&plain), raw(&entry.gid));
        }
        let mut none: ibv_gid_entry = zeroed();
        // SAFETY: open.
        let empty = unsafe { bed.library.ibv_query_gid_ex(bed.context, 1, 200, &raw mut none) };
        assert_eq!(empty, Err(Error::Errno(libc::ENODATA)), "an entry that is not there");
    }
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn partition_keys_are_found_by_value() {
    let bed = Bed::new();
    let mut pkey = 0;
    // SAFETY: open.
    assert_eq!(unsafe { bed.library.ibv_query_pkey(bed.context, 1, 0, &raw mut pkey) }, Ok(0));
    assert_eq!(u16::from_be(pkey), 0xffff);
    // SAFETY: open.
    assert_eq!(unsafe { bed.library.ibv_get_pkey_index(bed.context, 1, pkey) }, Ok(0));
    // SAFETY: open.
    let missing = unsafe { bed.library.ibv_get_pkey_index(bed.context, 1, 0x1234_u16.to_be()) };
    assert!(matches!(missing, Err(Error::Errno(_))), "{missing:?}");
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_domain_with_a_region_is_busy() {
    let bed = Bed::new();
    let region = bed.register(4096, ALL);
    // SAFETY: alive; what refuses leaves it so.
    let refused = unsafe { bed.library.ibv_dealloc_pd(bed.pd) };
    assert_eq!(refused, Err(Error::Errno(libc::EBUSY)));
    drop(region);
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn regions_have_keys_and_refuse_what_makes_no_sense() {
    let bed = Bed::new();
    let (one, other) = (bed.register(4096, ALL), bed.register(1 << 20, IBV_ACCESS_LOCAL_WRITE));
    assert_ne!(one.lkey(), other.lkey());
    // SAFETY: alive.
    let mr = unsafe { &*other.mr };
    assert_eq!((mr.length, mr.addr.addr() as u64, mr.pd), (1 << 20, other.address(), bed.pd));
    // A hint goes to the function that knows it, and to devices that don't know it.
    assert_ne!(bed.register(4096, ALL | IBV_ACCESS_RELAXED_ORDERING).rkey(), one.rkey());
    // Remote writes without local ones.
    // SAFETY: nothing is registered.
    let refused =
        unsafe { bed.library.ibv_reg_mr(bed.pd, ptr::without_provenance_mut(4096), 4096, IBV_ACCESS_REMOTE_WRITE) };
    assert_eq!(refused.err(), Some(Error::Errno(libc::EINVAL)));
    // An address where nothing is.
    // SAFETY: nothing is registered.
    let refused = unsafe { bed.library.ibv_reg_mr(bed.pd, ptr::without_provenance_mut(4096), 4096, ALL) };
    assert_eq!(refused.err(), Some(Error::Errno(libc::EFAULT)));
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn completion_queues_have_a_depth() {
    let bed = Bed::new();
    let (library, context) = (bed.library, bed.context);
    // SAFETY: open, here and below.
    let cq = unsafe { library.ibv_create_cq(context, 100, ptr::null_mut(), ptr::null_mut(), 0) }.unwrap().as_ptr();
    // SAFETY: alive.
    assert!(unsafe { (*cq).cqe } >= 100);
    // SAFETY: alive.
    unsafe { library.ibv_resize_cq(cq, 1000) }.unwrap();
    // SAFETY: alive.
    assert!(unsafe { (*cq).cqe } >= 1000);
    // SAFETY: alive, once.
    unsafe { library.ibv_destroy_cq(cq) }.unwrap();
    let most = bed.device_attr().max_cqe;
    // SAFETY: open.
    let refused = unsafe { library.ibv_create_cq(context, most + 1, ptr::null_mut(), ptr::null_mut(), 0) };
    assert_eq!(refused.err(), Some(Error::Errno(libc::EINVAL)));
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_queue_pair_walks_through_its_states() {
    let bed = Bed::new();
    let (one, other) = (bed.queue_pair(), bed.queue_pair());
    assert_eq!(one.query().qp_state, IBV_QPS_RESET);
    let skipped = one.modify(ibv_qp_attr { qp_state: IBV_QPS_RTS, ..zeroed() }, IBV_QP_STATE);
    assert_eq!(skipped, Err(Error::Errno(libc::EINVAL)), "a state is left out");
    one.init();
    assert_eq!(one.query().qp_state, IBV_QPS_INIT);
    one.ready_to_receive(&bed, &bed, &other);
    let attr = one.query();
    assert_eq!((attr.qp_state, attr.dest_qp_num), (IBV_QPS_RTR, other.number()));
    assert_eq!(attr.path_mtu, bed.port_attr().active_mtu);
    assert_eq!(raw(&attr.ah_attr.grh.dgid), raw(&bed.gid().gid));
    assert!(attr.cap.max_send_wr >= crate::bed::DEPTH && attr.cap.max_inline_data >= 64, "{attr:?}");
    one.ready_to_send(7, 7);
    assert_eq!(one.query().qp_state, IBV_QPS_RTS);
    one.to_error();
    assert_eq!(one.query().qp_state, IBV_QPS_ERR);
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_queue_pair_beyond_the_limits_is_refused() {
    let bed = Bed::new();
    let mut init = ibv_qp_init_attr { send_cq: bed.cq, recv_cq: bed.cq, qp_type: IBV_QPT_RC, ..zeroed() };
    init.cap.max_send_wr = bed.device_attr().max_qp_wr.cast_unsigned() + 1;
    init.cap.max_send_sge = 1;
    // SAFETY: all is alive.
    let refused = unsafe { bed.library.ibv_create_qp(bed.pd, &raw mut init) };
    assert!(matches!(refused, Err(Error::Errno(libc::EINVAL | libc::ENOMEM))), "{refused:?}");
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn an_asynchronous_event_comes_over_its_descriptor() {
    let bed = Bed::new();
    // SAFETY: open.
    let fd = unsafe { (*bed.context).async_fd };
    // SAFETY: a descriptor that is open.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    // SAFETY: as above.
    assert_eq!(unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) }, 0);
    let mut event: ibv_async_event = zeroed();
    // SAFETY: open.
    let none = unsafe { bed.library.ibv_get_async_event(bed.context, &raw mut event) };
    assert_eq!(none, Err(Error::Errno(libc::EAGAIN)));

    // A shared receive queue that falls below its limit.
    let mut init: ibv_srq_init_attr = zeroed();
    (init.attr.max_wr, init.attr.max_sge) = (16, 1);
    // SAFETY: alive.
    let srq = unsafe { bed.library.ibv_create_srq(bed.pd, &raw mut init) }.unwrap().as_ptr();
    let (one, other) = (bed.queue_pair(), Qp::new(&bed, srq));
    one.connect(&bed, &bed, &other);
    other.connect(&bed, &bed, &one);
    let region = bed.register(4096, ALL);
    let mut list = [region.slice(0, 64)];
    for wr_id in 0..2 {
        let mut wr = ibv_recv_wr { wr_id, sg_list: list.as_mut_ptr(), num_sge: 1, ..zeroed() };
        let mut bad = ptr::null_mut();
        // SAFETY: all is alive.
        unsafe { ibv_post_srq_recv(srq, &raw mut wr, &raw mut bad) }.unwrap();
    }
    let mut attr = ibv_srq_attr { srq_limit: 2, ..zeroed() };
    // SAFETY: alive.
    unsafe { bed.library.ibv_modify_srq(srq, &raw mut attr, IBV_SRQ_LIMIT) }.unwrap();
    one.post(&mut [crate::bed::request(9, IBV_WR_SEND, &mut [region.slice(128, 64)])]).unwrap();
    let mut done = [bed.completion(), bed.completion()];
    done.sort_by_key(|wc| wc.wr_id);
    assert_eq!(done.map(|wc| (wc.wr_id, wc.status)), [(0, IBV_WC_SUCCESS), (9, IBV_WC_SUCCESS)]);

    let mut patience = Patience::new(60);
    // SAFETY: open.
    while let Err(error) = unsafe { bed.library.ibv_get_async_event(bed.context, &raw mut event) } {
        assert_eq!(error, Error::Errno(libc::EAGAIN));
        patience.wait("the event");
    }
    // SAFETY: an event of a shared receive queue.
    assert_eq!((event.event_type, unsafe { event.element.srq }), (IBV_EVENT_SRQ_LIMIT_REACHED, srq));
    // SAFETY: got, and not yet acknowledged; without it the queue could not be destroyed.
    unsafe { bed.library.ibv_ack_async_event(&raw mut event) };
    drop((one, other));
    // SAFETY: alive, once.
    unsafe { bed.library.ibv_destroy_srq(srq) }.unwrap();
}
