//! How requests fail: the status, and that everything behind is flushed.

use crate::bed::{ALL, Bed, one_sided, poll_once, request};
use core::ffi::CStr;
use rdma_core_sys::*;

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_wrong_key_ends_in_a_remote_access_error() {
    let bed = Bed::new();
    let (one, other) = bed.pair();
    let (here, there) = (bed.register(4096, ALL), bed.register(4096, ALL));
    let wrong = there.rkey() ^ 0x55;
    let (mut first, mut second) = ([here.slice(0, 64)], [here.slice(0, 64)]);
    one.post(&mut [
        one_sided(1, IBV_WR_RDMA_WRITE, &mut first, there.address(), wrong),
        one_sided(2, IBV_WR_RDMA_WRITE, &mut second, there.address(), there.rkey()),
    ])
    .unwrap();
    let (bad, behind) = (bed.completion(), bed.completion());
    assert_eq!((bad.wr_id, bad.status, bad.qp_num), (1, IBV_WC_REM_ACCESS_ERR, one.number()));
    assert_eq!((behind.wr_id, behind.status), (2, IBV_WC_WR_FLUSH_ERR));
    assert_eq!(there.bytes(), [0; 4096], "nothing was written");
    assert_eq!(one.query().qp_state, IBV_QPS_ERR);
    // SAFETY: any number is allowed.
    let text = unsafe { bed.library.ibv_wc_status_str(bad.status) };
    // SAFETY: the library returns a C string of its own.
    assert_eq!(unsafe { CStr::from_ptr(text) }, c"remote access error");
    drop(other);
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn bytes_outside_the_region_are_refused() {
    let bed = Bed::new();
    let (one, _other) = bed.pair();
    let (here, there) = (bed.register(8192, ALL), bed.register(4096, ALL));
    let mut list = [here.slice(0, 4097)];
    one.post(&mut [one_sided(1, IBV_WR_RDMA_READ, &mut list, there.address(), there.rkey())]).unwrap();
    let wc = bed.completion();
    assert_eq!((wc.wr_id, wc.status), (1, IBV_WC_REM_ACCESS_ERR));
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_region_that_may_not_be_written_is_not() {
    let bed = Bed::new();
    let (one, _other) = bed.pair();
    let here = bed.register(4096, ALL);
    let there = bed.register(4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
    here.fill(1);
    let mut list = [here.slice(0, 64)];
    one.post(&mut [one_sided(1, IBV_WR_RDMA_WRITE, &mut list, there.address(), there.rkey())]).unwrap();
    assert_eq!(bed.completion().status, IBV_WC_REM_ACCESS_ERR);
    assert_eq!(there.bytes(), [0; 4096]);
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_wrong_local_key_is_a_local_error() {
    let bed = Bed::new();
    let (one, _other) = bed.pair();
    let (here, there) = (bed.register(4096, ALL), bed.register(4096, ALL));
    let mut list = [ibv_sge { lkey: here.lkey() ^ 0x55, ..here.slice(0, 64) }];
    one.post(&mut [one_sided(1, IBV_WR_RDMA_WRITE, &mut list, there.address(), there.rkey())]).unwrap();
    let wc = bed.completion();
    // The specification says protection; soft-RoCE of Linux 6.1 says operation.
    assert!(wc.wr_id == 1 && [IBV_WC_LOC_PROT_ERR, IBV_WC_LOC_QP_OP_ERR].contains(&wc.status), "{wc:?}");
    assert_eq!(there.bytes(), [0; 4096]);
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_message_longer_than_its_receive_fails_at_both_ends() {
    let bed = Bed::new();
    let (one, other) = bed.pair();
    let region = bed.register(4096, ALL);
    other.receive(7, &mut [region.slice(0, 100)]);
    one.post(&mut [request(1, IBV_WR_SEND, &mut [region.slice(1000, 101)])]).unwrap();
    let mut done = [bed.completion(), bed.completion()];
    done.sort_by_key(|wc| wc.wr_id);
    let [sender, receiver] = done;
    assert_eq!((sender.wr_id, receiver.wr_id), (1, 7));
    // The specification says invalid request and length; soft-RoCE of Linux 6.1 says operation at both ends.
    assert!([IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_OP_ERR].contains(&sender.status), "{sender:?}");
    assert!([IBV_WC_LOC_LEN_ERR, IBV_WC_LOC_QP_OP_ERR].contains(&receiver.status), "{receiver:?}");
    assert_eq!(region.bytes()[..100], [0; 100]);
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_send_without_a_receive_gives_up_when_told_to() {
    let bed = Bed::new();
    let (one, other) = (bed.queue_pair(), bed.queue_pair());
    other.connect(&bed, &bed, &one);
    one.init();
    one.ready_to_receive(&bed, &bed, &other);
    one.ready_to_send(7, 0);
    let region = bed.register(4096, ALL);
    one.post(&mut [request(1, IBV_WR_SEND, &mut [region.slice(0, 64)])]).unwrap();
    let wc = bed.completion();
    assert_eq!((wc.wr_id, wc.status), (1, IBV_WC_RNR_RETRY_EXC_ERR));
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_peer_that_is_gone_is_noticed() {
    let bed = Bed::new();
    let (one, other) = (bed.queue_pair(), bed.queue_pair());
    other.connect(&bed, &bed, &one);
    one.init();
    one.ready_to_receive(&bed, &bed, &other);
    one.ready_to_send(1, 7);
    other.destroy();
    let region = bed.register(4096, ALL);
    one.post(&mut [request(1, IBV_WR_SEND, &mut [region.slice(0, 64)])]).unwrap();
    let wc = bed.completion();
    assert_eq!((wc.wr_id, wc.status), (1, IBV_WC_RETRY_EXC_ERR));
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn the_error_state_flushes_every_receive() {
    let bed = Bed::new();
    let (one, other) = bed.pair();
    let region = bed.register(4096, ALL);
    for wr_id in 0..8 {
        other.receive(wr_id, &mut [region.slice(0, 64)]);
    }
    other.to_error();
    for wr_id in 0..8 {
        let wc = bed.completion();
        assert_eq!((wc.wr_id, wc.status, wc.qp_num), (wr_id, IBV_WC_WR_FLUSH_ERR, other.number()));
    }
    assert!(poll_once(bed.cq).is_none());
    drop(one);
}
