//! The extended face of queue pairs and completion queues, memory windows, atomics.

use crate::bed::{ALL, Bed, Patience, Qp, one_sided, patterns, request};
use core::ptr;
use rdma_core_sys::*;

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn requests_are_built_by_functions() {
    let bed = Bed::new();
    let mut init = ibv_qp_init_attr_ex {
        send_cq: bed.cq,
        recv_cq: bed.cq,
        qp_type: IBV_QPT_RC,
        comp_mask: IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
        pd: bed.pd,
        send_ops_flags: IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_SEND,
        ..zeroed()
    };
    (init.cap.max_send_wr, init.cap.max_recv_wr, init.cap.max_send_sge, init.cap.max_recv_sge) = (16, 16, 2, 2);
    init.cap.max_inline_data = 32;
    // SAFETY: all is alive.
    let qp = unsafe { bed.library.ibv_create_qp_ex(bed.context, &raw mut init) }.unwrap().as_ptr();
    let (one, other) = (Qp::from_raw(&bed, qp), bed.queue_pair());
    one.connect(&bed, &bed, &other);
    other.connect(&bed, &bed, &one);
    // SAFETY: alive.
    let ex = unsafe { bed.library.ibv_qp_to_qp_ex(qp) }.unwrap().expect("an extended queue pair").as_ptr();
    // SAFETY: alive.
    let classic = unsafe { bed.library.ibv_qp_to_qp_ex(other.qp) }.unwrap();
    assert!(classic.is_none_or(|classic| ptr::eq(classic.as_ptr().cast(), other.qp)), "none, or the same object");

    let (here, there) = (bed.register(8192, ALL), bed.register(8192, ALL));
    here.fill(1);
    // SAFETY: alive, here and below.
    unsafe { ibv_wr_start(ex) }.unwrap();
    for (wr_id, offset) in [(1_u64, 0_u64), (2, 4096)] {
        // SAFETY: as above.
        unsafe { (*ex).wr_id = wr_id };
        // SAFETY: as above.
        unsafe { (*ex).wr_flags = IBV_SEND_SIGNALED };
        // SAFETY: as above.
        unsafe { ibv_wr_rdma_write(ex, there.rkey(), there.address() + offset) }.unwrap();
        // SAFETY: as above.
        unsafe { ibv_wr_set_sge(ex, here.lkey(), here.address() + offset, 4096) }.unwrap();
    }
    // SAFETY: as above.
    assert_eq!(unsafe { ibv_wr_complete(ex) }, Ok(0));
    for wr_id in 1..3 {
        let wc = bed.completion();
        assert_eq!((wc.wr_id, wc.status), (wr_id, IBV_WC_SUCCESS));
    }
    assert_eq!(there.bytes(), patterns(1, 8192));

    // What is given up is not posted; what was not asked for is not there.
    // SAFETY: as above.
    unsafe { ibv_wr_start(ex) }.unwrap();
    // SAFETY: as above.
    unsafe { ibv_wr_rdma_read(ex, there.rkey(), there.address()) }.unwrap();
    // SAFETY: as above.
    unsafe { ibv_wr_abort(ex) }.unwrap();
    let mut list = [here.slice(0, 64)];
    one.post(&mut [one_sided(3, IBV_WR_RDMA_WRITE, &mut list, there.address(), there.rkey())]).unwrap();
    assert_eq!(bed.completion().wr_id, 3, "both faces of one queue");
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn completions_are_read_by_functions() {
    let bed = Bed::new();
    let mut attr = ibv_cq_init_attr_ex {
        cqe: 64,
        wc_flags: IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_IMM | IBV_WC_EX_WITH_QP_NUM,
        ..zeroed()
    };
    // SAFETY: open.
    let cq = unsafe { bed.library.ibv_create_cq_ex(bed.context, &raw mut attr) }.unwrap().as_ptr();
    let mut init = ibv_qp_init_attr {
        send_cq: ibv_cq_ex_to_cq(cq),
        recv_cq: ibv_cq_ex_to_cq(cq),
        qp_type: IBV_QPT_RC,
        ..zeroed()
    };
    (init.cap.max_send_wr, init.cap.max_recv_wr, init.cap.max_send_sge, init.cap.max_recv_sge) = (8, 8, 1, 1);
    // SAFETY: all is alive.
    let qp = unsafe { bed.library.ibv_create_qp(bed.pd, &raw mut init) }.unwrap().as_ptr();
    let (one, other) = (bed.queue_pair(), Qp::from_raw(&bed, qp));
    one.connect(&bed, &bed, &other);
    other.connect(&bed, &bed, &one);
    let mut ask: ibv_poll_cq_attr = zeroed();
    // SAFETY: alive, here and below.
    assert_eq!(unsafe { ibv_start_poll(cq, &raw mut ask) }, Ok(libc::ENOENT), "empty");
    let region = bed.register(4096, ALL);
    for (wr_id, len) in [(7, 300), (8, 500)] {
        other.receive(wr_id, &mut [region.slice(0, 1000)]);
        let mut list = [region.slice(1000, len)];
        one.post(&mut [request(1, IBV_WR_SEND_WITH_IMM, &mut list).immediate(wr_id as u32)]).unwrap();
        assert_eq!(bed.completion().status, IBV_WC_SUCCESS);
    }
    let mut patience = Patience::new(60);
    // SAFETY: as above.
    while unsafe { ibv_start_poll(cq, &raw mut ask) } == Ok(libc::ENOENT) {
        patience.wait("a completion");
    }
    for (wr_id, len) in [(7, 300), (8, 500)] {
        // SAFETY: as above; nothing changes it but the polling below.
        let current = unsafe { &*cq };
        assert_eq!((current.status, current.wr_id), (IBV_WC_SUCCESS, wr_id));
        // SAFETY: as above.
        assert_eq!(unsafe { ibv_wc_read_opcode(cq) }, Ok(IBV_WC_RECV));
        // SAFETY: as above.
        assert_eq!(unsafe { ibv_wc_read_byte_len(cq) }, Ok(len));
        // SAFETY: as above.
        assert_eq!(unsafe { ibv_wc_read_imm_data(cq) }.map(u32::from_be), Ok(wr_id as u32));
        // SAFETY: as above.
        assert_eq!(unsafe { ibv_wc_read_qp_num(cq) }, Ok(other.number()));
        // SAFETY: as above.
        assert_eq!(unsafe { ibv_next_poll(cq) }, Ok(if wr_id == 7 { 0 } else { libc::ENOENT }));
    }
    // SAFETY: as above.
    unsafe { ibv_end_poll(cq) }.unwrap();
    drop((one, other));
    // SAFETY: alive, once.
    unsafe { bed.library.ibv_destroy_cq(ibv_cq_ex_to_cq(cq)) }.unwrap();
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_window_opens_its_bytes_until_it_is_invalidated() {
    let bed = Bed::new();
    let (one, other) = bed.pair();
    let (here, there) = (bed.register(4096, ALL), bed.register(8192, ALL));
    // SAFETY: alive.
    let mw = unsafe { ibv_alloc_mw(bed.pd, IBV_MW_TYPE_2) }.unwrap().as_ptr();
    // SAFETY: alive.
    let rkey = ibv_inc_rkey(unsafe { (*mw).rkey });
    // The owner of the memory binds bytes 4096.. to a key of their own.
    let mut bind = request(1, IBV_WR_BIND_MW, &mut []);
    bind.wr.bind_mw = ibv_send_wr_bind_mw {
        mw,
        rkey,
        bind_info: ibv_mw_bind_info {
            mr: there.mr,
            addr: there.address() + 4096,
            length: 4096,
            mw_access_flags: IBV_ACCESS_REMOTE_READ.cast_unsigned(),
        },
    };
    other.post(&mut [bind]).unwrap();
    let wc = bed.completion();
    assert_eq!((wc.wr_id, wc.status, wc.opcode), (1, IBV_WC_SUCCESS, IBV_WC_BIND_MW));

    there.fill(1);
    let mut list = [here.slice(0, 4096)];
    one.post(&mut [one_sided(2, IBV_WR_RDMA_READ, &mut list, there.address() + 4096, rkey)]).unwrap();
    assert_eq!(bed.completion().status, IBV_WC_SUCCESS);
    assert_eq!(here.bytes(), patterns(1, 8192)[4096..]);

    let mut invalidate = request(3, IBV_WR_LOCAL_INV, &mut []);
    invalidate.wr.imm_data = rkey;
    other.post(&mut [invalidate]).unwrap();
    let wc = bed.completion();
    assert_eq!((wc.wr_id, wc.status, wc.opcode), (3, IBV_WC_SUCCESS, IBV_WC_LOCAL_INV));
    there.fill(2);
    one.post(&mut [one_sided(4, IBV_WR_RDMA_READ, &mut list, there.address() + 4096, rkey)]).unwrap();
    assert_eq!(bed.completion().status, IBV_WC_REM_ACCESS_ERR, "the key is not valid any more");
    assert_eq!(here.bytes(), patterns(1, 8192)[4096..], "not a byte of what came after");
    // SAFETY: alive, once.
    unsafe { ibv_dealloc_mw(mw) }.unwrap();
    drop((one, other));
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn an_atomic_returns_what_was_there() {
    let bed = Bed::new();
    let (one, _other) = bed.pair();
    let (here, there) = (bed.register(8, ALL), bed.register(8, ALL));
    let add = |wr_id, compare_add| {
        let mut list = [here.slice(0, 8)];
        let remote_addr = there.address();
        let atomic = ibv_send_wr_atomic { remote_addr, compare_add, swap: 0, rkey: there.rkey() };
        let mut request = request(wr_id, IBV_WR_ATOMIC_FETCH_AND_ADD, &mut list);
        request.wr.wr.atomic = atomic;
        one.post(&mut [request]).unwrap();
        let wc = bed.completion();
        assert_eq!((wc.wr_id, wc.status, wc.opcode), (wr_id, IBV_WC_SUCCESS, IBV_WC_FETCH_ADD));
        u64::from_ne_bytes(here.bytes().try_into().unwrap())
    };
    assert_eq!((add(1, 5), add(2, 6)), (0, 5));
    assert_eq!(there.bytes(), 11_u64.to_ne_bytes());
}
