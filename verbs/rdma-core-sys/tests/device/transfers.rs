//! Bytes from here to there, and that they are the right ones.

use crate::bed::{ALL, Bed, DEPTH, Patience, names, one_sided, patterns, poll, poll_once, request};
use core::ptr;
use rdma_core_sys::*;

/// Takes as many completions as there are requests and receives, which must all be successful, sorted by number.
fn all_succeed(bed: &Bed, count: usize) -> Vec<ibv_wc> {
    let mut done: Vec<_> = (0..count).map(|_| bed.completion()).collect();
    for wc in &done {
        assert_eq!(wc.status, IBV_WC_SUCCESS, "{wc:?}");
    }
    done.sort_by_key(|wc| wc.wr_id);
    done
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_send_fills_the_oldest_receive() {
    let bed = Bed::new();
    let (one, other) = bed.pair();
    let (from, to) = (bed.register(8192, ALL), bed.register(8192, ALL));
    from.fill(1);
    // Gathered from two slices, scattered over two others.
    other.receive(7, &mut [to.slice(0, 3000), to.slice(4000, 3000)]);
    one.post(&mut [request(1, IBV_WR_SEND, &mut [from.slice(0, 1000), from.slice(1000, 4000)])]).unwrap();
    let done = all_succeed(&bed, 2);
    assert_eq!((done[0].wr_id, done[0].opcode, done[0].qp_num), (1, IBV_WC_SEND, one.number()));
    let receive = &done[1];
    assert_eq!((receive.wr_id, receive.opcode, receive.byte_len), (7, IBV_WC_RECV, 5000));
    assert_eq!((receive.qp_num, receive.wc_flags & IBV_WC_WITH_IMM), (other.number(), 0));
    let (sent, got) = (patterns(1, 8192), to.bytes());
    assert_eq!((&got[..3000], &got[4000..6000]), (&sent[..3000], &sent[3000..5000]));
    assert!(got[3000..4000].iter().chain(&got[6000..]).all(|&byte| byte == 0), "nothing else was touched");
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn an_immediate_arrives_in_network_order() {
    let bed = Bed::new();
    let (one, other) = bed.pair();
    let (from, to) = (bed.register(4096, ALL), bed.register(4096, ALL));
    from.fill(2);
    other.receive(7, &mut [to.slice(0, 4096)]);
    other.receive(8, &mut []);
    let (mut sent, mut written) = ([from.slice(0, 100)], [from.slice(0, 200)]);
    let send = request(1, IBV_WR_SEND_WITH_IMM, &mut sent).immediate(0x0102_0304);
    let write = one_sided(2, IBV_WR_RDMA_WRITE_WITH_IMM, &mut written, to.address() + 1000, to.rkey());
    let write = write.immediate(0x0506_0708);
    one.post(&mut [send, write]).unwrap();
    let done = all_succeed(&bed, 4);
    let received: Vec<_> = done[2..].iter().map(|wc| (wc.wr_id, wc.opcode, u32::from_be(wc.imm_data))).collect();
    assert_eq!(received, [(7, IBV_WC_RECV, 0x0102_0304), (8, IBV_WC_RECV_RDMA_WITH_IMM, 0x0506_0708)]);
    assert!(done[2..].iter().all(|wc| wc.wc_flags & IBV_WC_WITH_IMM != 0));
    assert_eq!(done[3].byte_len, 200);
    assert_eq!(to.bytes()[1000..1200], patterns(2, 200));
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_write_and_a_read_carry_a_mebibyte() {
    let bed = Bed::new();
    let (one, _other) = bed.pair();
    let len = 1 << 20;
    let (here, there) = (bed.register(len, ALL), bed.register(len, ALL));
    here.fill(3);
    one.post(&mut [one_sided(1, IBV_WR_RDMA_WRITE, &mut [here.slice(0, len)], there.address(), there.rkey())]).unwrap();
    let wc = bed.completion();
    assert_eq!((wc.wr_id, wc.status, wc.opcode), (1, IBV_WC_SUCCESS, IBV_WC_RDMA_WRITE));
    assert_eq!(there.bytes(), patterns(3, len));
    there.fill(4);
    one.post(&mut [one_sided(2, IBV_WR_RDMA_READ, &mut [here.slice(0, len)], there.address(), there.rkey())]).unwrap();
    let wc = bed.completion();
    assert_eq!((wc.wr_id, wc.status, wc.opcode), (2, IBV_WC_SUCCESS, IBV_WC_RDMA_READ));
    assert_eq!(here.bytes(), patterns(4, len));
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn inline_data_is_free_once_it_is_posted() {
    let bed = Bed::new();
    let (one, other) = bed.pair();
    let to = bed.register(64, ALL);
    other.receive(7, &mut [to.slice(0, 64)]);
    let mut bytes = [0x5a_u8; 64];
    // No key is needed: the provider copies the bytes while it posts.
    let mut list = [ibv_sge { addr: bytes.as_ptr().addr() as u64, length: 64, lkey: 0 }];
    bytes.as_ptr().expose_provenance();
    let mut wr = request(1, IBV_WR_SEND, &mut list);
    wr.wr.send_flags |= IBV_SEND_INLINE;
    one.post(&mut [wr]).unwrap();
    bytes.fill(0);
    all_succeed(&bed, 2);
    assert_eq!(to.bytes(), [0x5a; 64]);
    assert_eq!(bytes, [0; 64]);
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn one_signalled_request_completes_a_chain() {
    let bed = Bed::new();
    let (one, _other) = bed.pair();
    let (here, there) = (bed.register(16 << 10, ALL), bed.register(16 << 10, ALL));
    here.fill(5);
    let mut lists: Vec<_> = (0..16).map(|i| [here.slice(i << 10, 1 << 10)]).collect();
    let mut chain: Vec<_> = (0..16)
        .zip(&mut lists)
        .map(|(i, list)| one_sided(i, IBV_WR_RDMA_WRITE, list, there.address() + (i << 10), there.rkey()))
        .collect();
    for request in &mut chain[..15] {
        request.wr.send_flags = 0;
    }
    one.post(&mut chain).unwrap();
    assert_eq!(all_succeed(&bed, 1)[0].wr_id, 15);
    assert!(poll_once(bed.cq).is_none());
    assert_eq!(there.bytes(), patterns(5, 16 << 10));
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_full_queue_says_which_request_did_not_fit() {
    let bed = Bed::new();
    let (one, other) = bed.pair();
    let region = bed.register(4096, ALL);
    // What the queue really holds may be more than was asked for.
    let room = one.query().cap.max_send_wr as usize;
    assert!(room >= DEPTH as usize && room < 200, "{room}");
    // Nothing can be sent before the other end has receives: the requests stay in the queue.
    let mut lists = vec![[region.slice(0, 8)]; room + 8];
    let mut chain: Vec<_> = (0..).zip(&mut lists).map(|(i, list)| request(i, IBV_WR_SEND, list)).collect();
    let (error, posted) = one.post(&mut chain).unwrap_err();
    assert_eq!(error, Error::Errno(libc::ENOMEM));
    assert!(posted >= room - 1 && posted <= room, "{posted} of {room}");
    one.to_error();
    for i in 0..posted {
        let wc = bed.completion();
        assert_eq!((wc.wr_id, wc.status), (i as u64, IBV_WC_WR_FLUSH_ERR), "each that was posted completes, no other");
    }
    assert!(poll_once(bed.cq).is_none());
    drop(other);
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn an_armed_queue_wakes_its_channel_once() {
    let bed = Bed::new();
    let (one, _other) = bed.pair();
    let (here, there) = (bed.register(4096, ALL), bed.register(4096, ALL));
    // SAFETY: alive.
    let fd = unsafe { (*bed.channel).fd };
    // SAFETY: a descriptor that is open.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    // SAFETY: as above.
    assert_eq!(unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) }, 0);
    let (mut cq, mut data) = (ptr::null_mut(), ptr::null_mut());
    let mut event = || {
        // SAFETY: alive.
        unsafe { bed.library.ibv_get_cq_event(bed.channel, &raw mut cq, &raw mut data) }.map(|_| cq)
    };
    // SAFETY: alive.
    unsafe { ibv_req_notify_cq(bed.cq, 0) }.unwrap();
    assert_eq!(event(), Err(Error::Errno(libc::EAGAIN)));
    for wr_id in 1..3 {
        let mut list = [here.slice(0, 64)];
        one.post(&mut [one_sided(wr_id, IBV_WR_RDMA_WRITE, &mut list, there.address(), there.rkey())]).unwrap();
        all_succeed(&bed, 1);
    }
    let mut ready = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry.
    assert_eq!(unsafe { libc::poll(&raw mut ready, 1, 60_000) }, 1);
    assert_eq!(event(), Ok(bed.cq));
    assert_eq!(event(), Err(Error::Errno(libc::EAGAIN)), "armed once, one event for two completions");
    // SAFETY: alive; one event was got. Without this the queue could not be destroyed.
    unsafe { bed.library.ibv_ack_cq_events(bed.cq, 1) };
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn two_devices_reach_each_other() {
    let [first, second] = names();
    let (here, there) = (Bed::on(&first), Bed::on(&second));
    let (one, other) = (here.queue_pair(), there.queue_pair());
    one.connect(&here, &there, &other);
    other.connect(&there, &here, &one);
    let len = 256 << 10;
    let (from, to) = (here.register(len, ALL), there.register(len, ALL));
    from.fill(6);
    one.post(&mut [one_sided(1, IBV_WR_RDMA_WRITE, &mut [from.slice(0, len)], to.address(), to.rkey())]).unwrap();
    let wc = poll(here.cq);
    assert_eq!((wc.wr_id, wc.status), (1, IBV_WC_SUCCESS), "{wc:?}");
    assert_eq!(to.bytes(), patterns(6, len));
    // And back, through the other device's queue.
    to.fill(7);
    other.post(&mut [one_sided(2, IBV_WR_RDMA_WRITE, &mut [to.slice(0, len)], from.address(), from.rkey())]).unwrap();
    assert_eq!(poll(there.cq).status, IBV_WC_SUCCESS);
    assert_eq!(from.bytes(), patterns(7, len));
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn many_writes_of_many_queue_pairs_all_arrive() {
    const PAIRS: usize = 4;
    const EACH: usize = 100;
    let bed = Bed::new();
    let pairs: Vec<_> = (0..PAIRS).map(|_| bed.pair()).collect();
    let len = 4096;
    let (from, to) = (bed.register(PAIRS * len, ALL), bed.register(PAIRS * len, ALL));
    let mut posted = [0; PAIRS];
    let mut outstanding = 0;
    let mut done = 0;
    let mut patience = Patience::new(120);
    from.fill(8);
    while done < PAIRS * EACH {
        for (i, (one, _)) in pairs.iter().enumerate() {
            if posted[i] < EACH && outstanding < PAIRS * DEPTH as usize / 2 {
                let mut list = [from.slice(i * len, len)];
                let remote = to.address() + (i * len) as u64;
                one.post(&mut [one_sided(i as u64, IBV_WR_RDMA_WRITE, &mut list, remote, to.rkey())]).unwrap();
                posted[i] += 1;
                outstanding += 1;
            }
        }
        match poll_once(bed.cq) {
            Some(wc) => {
                assert_eq!(wc.status, IBV_WC_SUCCESS, "{wc:?}");
                (done, outstanding) = (done + 1, outstanding - 1);
            }
            None => patience.wait("the writes"),
        }
    }
    assert_eq!(to.bytes(), patterns(8, PAIRS * len));
}
