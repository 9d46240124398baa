//! What is not allowed, and how one learns it.

use crate::harness::*;
use towline_verbs::{Access, Cause, CompletionStatus, Opcode, QueuePairState, RemoteSlice, WorkRequest};

/// Posts a read or write and expects it to be refused, and what is behind it to flush.
fn refused(p: &Pair, opcode: Opcode, remote: RemoteSlice) {
    let local = p.a.memory(remote.len);
    let post = |id| WorkRequest { id, opcode, local: vec![slice(&local, 0, remote.len)], remote: Some(remote) };
    p.a.try_post(vec![post(1), post(2)]).unwrap();
    let done = p.a.completions(2);
    assert_eq!((done[0].id, done[0].status, done[0].bytes), (1, CompletionStatus::RemoteAccess, 0));
    assert_eq!((done[1].id, done[1].status), (2, CompletionStatus::Flushed));
    assert_eq!(p.a.qp.state(), QueuePairState::Error);
    assert!(matches!(p.a.qp.failure().unwrap().cause, Cause::Denied { .. }));
    assert!(p.a.qp.is_fenced());
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_wrong_key_or_place_is_refused() {
    let wrong: [fn(RemoteSlice) -> RemoteSlice; 3] = [
        |right| RemoteSlice { rkey: right.rkey ^ 0x55, ..right },
        |right| RemoteSlice { address: right.address + 1, ..right },
        |right| RemoteSlice { address: right.address - 3997, ..right },
    ];
    for wrong in wrong {
        let p = pair();
        let region = p.b.memory(4096);
        refused(&p, Opcode::Read, wrong(region.remote(3996, 100).unwrap()));
    }
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn rights_that_were_not_given_are_not_there() {
    let p = pair();
    let region = p.b.memory_with(4096, Access::REMOTE_READ);
    refused(&p, Opcode::Write, region.remote(0, 100).unwrap());
    assert_eq!(bytes(&region, 0, 4096), [0; 4096]);
    let p = pair();
    let region = p.b.memory_with(4096, Access::REMOTE_WRITE);
    refused(&p, Opcode::Read, region.remote(0, 100).unwrap());
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_region_that_is_gone_and_one_of_another_domain_are_refused() {
    let p = pair();
    let gone = p.b.memory(4096).remote(0, 100).unwrap();
    refused(&p, Opcode::Read, gone);
    let p = pair();
    let other = End::new(&p.b.device);
    refused(&p, Opcode::Read, other.memory(4096).remote(0, 100).unwrap());
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn requests_that_make_no_sense_are_not_posted() {
    let p = pair();
    let (local, there) = (p.a.memory(4096), p.b.memory(4096));
    let remote = there.remote(0, 100).unwrap();
    let cause = |opcode, local: Vec<_>, remote| {
        p.a.try_post(vec![WorkRequest { id: 1, opcode, local, remote }]).unwrap_err().cause
    };
    let at = |offset, len| vec![slice(&local, offset, len)];
    assert!(matches!(cause(Opcode::Read, at(4000, 100), Some(remote)), Cause::OutOfRange { .. }));
    assert!(matches!(cause(Opcode::Read, at(0, 99), Some(remote)), Cause::OutOfRange { .. }));
    assert!(matches!(cause(Opcode::Read, at(0, 100), None), Cause::NotFound { .. }));
    assert!(matches!(cause(Opcode::Send, at(0, 100), Some(remote)), Cause::Unsupported { .. }));
    assert!(matches!(cause(Opcode::Receive, at(0, 100), None), Cause::Unsupported { .. }));
    let many = vec![slice(&local, 0, 1); 100];
    assert!(matches!(cause(Opcode::Send, many, None), Cause::Limit { what: "max_sge", need: 100, .. }));
    let wide = RemoteSlice { rkey: remote.rkey | 1 << 32, ..remote };
    assert!(
        matches!(cause(Opcode::Read, at(0, 100), Some(wide)), Cause::Malformed { .. }),
        "cut it would be another key"
    );
    let read_only = p.a.memory_with(4096, Access::REMOTE_READ);
    assert!(matches!(cause(Opcode::Read, vec![slice(&read_only, 0, 100)], Some(remote)), Cause::Denied { .. }));
    let foreign = End::new(&p.a.device).memory(4096);
    assert!(matches!(cause(Opcode::Read, vec![slice(&foreign, 0, 100)], Some(remote)), Cause::Denied { .. }));
    // All of them or none.
    let bad = WorkRequest { id: 2, opcode: Opcode::Read, local: at(0, 100), remote: None };
    assert!(p.a.try_post(vec![read(1, at(0, 100), remote), bad]).is_err());
    assert_eq!((p.a.qp.state(), p.a.poll().len()), (QueuePairState::ReadyToSend, 0));
    p.a.try_post(vec![read(3, at(0, 100), remote)]).unwrap();
    assert_eq!(p.a.completion().id, 3);
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_message_without_a_receive_fails_after_a_while() {
    let p = pair();
    let local = p.a.memory(4096);
    p.a.post(1, Opcode::Send, vec![slice(&local, 0, 100)], None);
    assert_eq!(p.a.completion().status, CompletionStatus::ReceiverNotReadyExceeded);
    assert_eq!(p.a.qp.state(), QueuePairState::Error);
}
