//! Nothing is sent over a path that has not brought the right bytes.

use super::fake::{Probes, completes, happens, world};
use super::{All, CAPACITY};
use crate::ibv::queue_pair::{PROBE, SLOT};
use crate::{
    Cause, CompletionQueue, CompletionStatus, Device, Progress, ProtectionDomain, Provider, QueuePair, QueuePairState,
    ReceiveRequest,
};
use rdma_core_sys::*;

/// A device of its own, with what queue pairs need.
fn device() -> (Device, ProtectionDomain, CompletionQueue) {
    let device = super::provider().open("fake0").unwrap();
    let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(64).unwrap());
    (device, pd, cq)
}

/// A queue pair that is connected to itself as the active or passive end, while `probes` become this.
fn connected(pd: &ProtectionDomain, cq: &CompletionQueue, active: bool, probes: Probes) -> QueuePair {
    let qp = pd.create_qp(cq, cq, CAPACITY).unwrap();
    world(|world| {
        world.probes = probes;
        world.probing.clear();
    });
    qp.connect(&qp.address(), active).unwrap();
    qp
}

fn opcodes() -> Vec<u32> {
    world(|world| world.probing.iter().map(|(_, opcode)| *opcode).collect())
}

/// What the greeting that a queue pair awaits completes as.
fn greeting(qp: &QueuePair) {
    let serial = world(|world| *world.greetings_posted.last().unwrap());
    completes(serial, IBV_WC_SUCCESS);
    let _collected = qp.state();
}

#[test]
fn a_queue_pair_is_ready_when_the_right_bytes_have_come() {
    let (_device, pd, cq) = device();
    let qp = connected(&pd, &cq, true, Probes::Silent);
    assert_eq!((qp.state(), opcodes()), (QueuePairState::Connecting, vec![IBV_WR_SEND, IBV_WR_RDMA_READ]));
    drop(qp);
    let qp = connected(&pd, &cq, true, Probes::Answered);
    assert_eq!(qp.state(), QueuePairState::ReadyToSend);
    // The second over the same path reads nothing.
    let other = connected(&pd, &cq, true, Probes::Silent);
    assert_eq!((other.state(), opcodes()), (QueuePairState::Connecting, vec![IBV_WR_SEND]));
    completes(world(|world| world.probing[0].0), IBV_WC_SUCCESS);
    assert_eq!(other.state(), QueuePairState::ReadyToSend);
    drop((qp, other));
    assert_eq!(world(|world| world.live["mr"]), 1, "what the domain shows");
}

// B49, B53: an answer that is not the peer's, or not whole.
#[test]
fn wrong_bytes_are_an_error_that_says_so() {
    let (_device, pd, cq) = device();
    let qp = connected(&pd, &cq, true, Probes::Wrong);
    assert_eq!(qp.state(), QueuePairState::Error);
    let cause = qp.failure().unwrap().cause;
    assert!(matches!(cause, Cause::PathDown { why } if why.contains("other bytes")), "{cause:?}");
    let again = connected(&pd, &cq, true, Probes::Silent);
    assert_eq!((again.state(), opcodes().len()), (QueuePairState::Connecting, 2), "nothing is remembered of it");
}

#[test]
fn a_probe_without_an_answer_is_told_from_a_request_without_one() {
    let (_device, pd, cq) = device();
    let qp = connected(&pd, &cq, true, Probes::Silent);
    completes(world(|world| world.probing[0].0), IBV_WC_RETRY_EXC_ERR);
    completes(world(|world| world.probing[1].0), IBV_WC_WR_FLUSH_ERR);
    assert_eq!(qp.state(), QueuePairState::Error);
    let cause = qp.failure().unwrap().cause;
    assert!(matches!(cause, Cause::PathDown { why } if why.contains("no answer")), "{cause:?}");
    assert!(qp.is_fenced());
    let mut out = vec![];
    assert_eq!(cq.poll(&mut out, 10), 0, "nobody's requests");
}

#[test]
fn the_passive_end_waits_for_the_greeting_and_then_reads_too() {
    let (_device, pd, cq) = device();
    let qp = connected(&pd, &cq, false, Probes::Silent);
    assert_eq!((qp.state(), opcodes()), (QueuePairState::Connecting, vec![]));
    greeting(&qp);
    assert_eq!((qp.state(), opcodes()), (QueuePairState::Connecting, vec![IBV_WR_RDMA_READ]));
    drop(qp);
    let qp = connected(&pd, &cq, false, Probes::Answered);
    greeting(&qp);
    assert_eq!(qp.state(), QueuePairState::ReadyToSend);
    let known = connected(&pd, &cq, false, Probes::Silent);
    greeting(&known);
    assert_eq!((known.state(), opcodes()), (QueuePairState::ReadyToSend, vec![]));
}

fn receive(qp: &QueuePair, id: u64) {
    // SAFETY: it has no memory.
    #[allow(unsafe_code)]
    unsafe { qp.post_recv(ReceiveRequest { id, local: None }) }.unwrap();
}

/// The receives that the device has, callers' by their place among callers' and the probe's as -1.
fn received() -> Vec<i64> {
    world(|world| world.received.iter().map(|&id| if id & PROBE != 0 { -1 } else { (id & SLOT) as i64 }).collect())
}

#[test]
fn the_greeting_meets_no_receive_of_a_caller() {
    let (_device, pd, cq) = device();
    for active in [false, true] {
        world(|world| (world.probes, world.received) = (Probes::Silent, vec![]));
        let qp = pd.create_qp(&cq, &cq, CAPACITY).unwrap();
        receive(&qp, 0);
        receive(&qp, 1);
        assert_eq!(received(), []);
        qp.connect(&qp.address(), active).unwrap();
        assert_eq!(received(), if active { vec![0, 1] } else { vec![-1, 0, 1] });
        receive(&qp, 2);
        assert_eq!(received().last(), Some(&2));
        qp.to_error();
        assert!(qp.is_fenced());
        let mut out = vec![];
        assert_eq!(cq.poll(&mut out, 10), 3, "one for each that a caller posted");
        assert!(out.iter().all(|done| done.status == CompletionStatus::Flushed));
    }
}

#[test]
fn a_receive_that_the_device_refuses_at_last_ends_the_queue_pair() {
    let (_device, pd, cq) = device();
    let qp = pd.create_qp(&cq, &cq, CAPACITY).unwrap();
    receive(&qp, 7);
    world(|world| {
        world.calls.clear();
        world.fail = Some((0, libc::EINVAL));
    });
    let error = qp.connect(&qp.address(), false).unwrap_err();
    assert!(matches!(error.cause, Cause::Os { call: "ibv_post_recv", .. }), "{error}");
    assert_eq!(qp.state(), QueuePairState::Error);
    assert!(qp.is_fenced());
    let mut out = vec![];
    assert_eq!((cq.poll(&mut out, 10), out[0].id), (1, 7));
}

#[test]
fn receives_of_a_queue_pair_that_is_never_connected_flush() {
    let (_device, pd, cq) = device();
    let qp = pd.create_qp(&cq, &cq, CAPACITY).unwrap();
    receive(&qp, 7);
    drop(qp);
    let mut out = vec![];
    assert_eq!((cq.poll(&mut out, 10), out[0].id), (1, 7));
}

// A path is probed again after trouble.
#[test]
fn a_path_that_carried_nothing_is_probed_again() {
    let all = All::new();
    let reads = || {
        let qp = connected(&all.pd, &all.cq, true, Probes::Silent);
        drop(qp);
        opcodes().contains(&IBV_WR_RDMA_READ)
    };
    assert!(!reads());
    all.post(1..2).unwrap();
    completes(super::last_posted(), IBV_WC_REM_ACCESS_ERR);
    assert_eq!(all.poll().len(), 1);
    assert!(!reads(), "a refusal has come over the path");
    let qp = connected(&all.pd, &all.cq, true, Probes::Answered);
    assert_eq!(qp.state(), QueuePairState::ReadyToSend);
    drop(all.qp);
    happens(IBV_EVENT_PORT_ERR, 2);
    assert_eq!(all.device.progress(), Progress::Idle);
    assert_eq!(qp.state(), QueuePairState::Error);
    let cause = qp.failure().unwrap().cause;
    assert!(matches!(cause, Cause::PathDown { why } if why.contains("port")), "{cause:?}");
}
