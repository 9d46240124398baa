//! The error state, flushing, fences, and giving everything back.

use crate::harness::*;
use towline_verbs::ibv::IbvProvider;
use towline_verbs::{Cause, CompletionStatus, Opcode, Provider, QueuePairState, ReceiveRequest};

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn the_error_state_completes_each_request_once() {
    const CHUNK: u64 = 4 << 20;
    let p = pair();
    let (from, to) = (p.b.memory(32 * CHUNK), p.a.memory(32 * CHUNK));
    fill(&from, 1);
    for id in 0..32 {
        p.a.post(id, Opcode::Read, vec![slice(&to, id * CHUNK, CHUNK)], Some(from.remote(id * CHUNK, CHUNK).unwrap()));
    }
    p.a.receive(100, Some(slice(&to, 0, 1)));
    let mut done = Vec::new();
    drive(&[&p.a.device], || p.a.cq.poll(&mut done, 1) == 1);
    p.a.qp.to_error();
    p.a.qp.to_error();
    assert!(p.a.qp.is_fenced());
    // From here on nobody may touch this memory, whatever is still under way.
    to.memory().write(0, &vec![0xEE; (32 * CHUNK) as usize]).unwrap();
    drive(&[&p.a.device], || {
        done.extend(p.a.poll());
        done.len() >= 33
    });
    assert_eq!(done.len(), 33);
    let receive = done.iter().position(|c| c.opcode == Opcode::Receive).unwrap();
    assert_eq!((done[receive].id, done[receive].status), (100, CompletionStatus::Flushed));
    done.remove(receive);
    assert!(done.iter().zip(0..).all(|(c, id)| c.id == id), "in the order posted");
    let first = done.iter().position(|c| c.status != CompletionStatus::Success).unwrap();
    assert!(first >= 1 && done[first..].iter().all(|c| c.status == CompletionStatus::Flushed && c.bytes == 0));
    assert_eq!(p.a.qp.failure(), None, "asked for, not failed");
    let late = p.a.try_post(vec![]).unwrap_err();
    assert!(matches!(late.cause, Cause::State { is: QueuePairState::Error, .. }));
    // The peer goes on reading what it can no longer be answered: canaries.
    let before = std::time::Instant::now();
    drive(&[&p.a.device], || before.elapsed().as_millis() > 300);
    assert!(bytes(&to, 0, 32 * CHUNK).iter().all(|&byte| byte == 0xEE), "not a byte came late");
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_queue_pair_that_goes_away_flushes_what_it_had() {
    let p = pair();
    let memory = p.a.memory(4096);
    for id in 0..8 {
        p.a.receive(id, Some(slice(&memory, 0, 64)));
    }
    let End { device, cq, qp, .. } = p.a;
    let number = qp.number();
    cq.arm();
    drop(qp);
    assert!(readable(&device, 60_000), "an armed queue is told");
    let mut done = Vec::new();
    drive(&[&device], || {
        cq.poll(&mut done, 3);
        done.len() >= 8
    });
    let ids: Vec<_> = done.iter().map(|c| (c.id, c.status, c.queue_pair)).collect();
    assert_eq!(ids, (0..8).map(|id| (id, CompletionStatus::Flushed, number)).collect::<Vec<_>>());
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_peer_that_goes_away_is_noticed_by_the_next_request() {
    let p = pair();
    let (from, to) = (p.b.memory(4096), p.a.memory(4096));
    let remote = from.remote(0, 100).unwrap();
    drop(p.b.qp);
    p.a.post(1, Opcode::Read, vec![slice(&to, 0, 100)], Some(remote));
    assert_eq!(p.a.completion().status, CompletionStatus::TransportRetryExceeded);
    assert_eq!(p.a.qp.failure().unwrap().cause, Cause::Disconnected);
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_fence_stops_the_peers_reads() {
    const LEN: u64 = 4 << 20;
    let p = pair();
    let (from, to) = (p.b.memory(LEN), p.a.memory(LEN));
    from.memory().write(0, &vec![0x11; LEN as usize]).unwrap();
    for id in 0..16 {
        p.a.post(id, Opcode::Read, vec![slice(&to, 0, LEN)], Some(from.remote(0, LEN).unwrap()));
    }
    let mut done = Vec::new();
    drive(&[&p.a.device], || p.a.cq.poll(&mut done, 1) == 1);
    p.b.qp.to_error();
    assert!(p.b.qp.is_fenced());
    // The owner uses the memory again: no read that is still outstanding may see it.
    from.memory().write(0, &vec![0x22; LEN as usize]).unwrap();
    drive(&[&p.a.device], || {
        done.extend(p.a.poll());
        done.len() >= 16
    });
    assert!(done.iter().any(|c| c.status != CompletionStatus::Success), "it was in the middle");
    assert!(bytes(&to, 0, LEN).iter().all(|&byte| byte == 0x11), "what was read is from before the fence");
}

// The owner of the memory fences it, whatever its peer goes on to write.
#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_fence_stops_the_peers_writes() {
    const LEN: u64 = 4 << 20;
    let p = pair();
    let (from, to) = (p.a.memory(LEN), p.b.memory(LEN));
    from.memory().write(0, &vec![0x11; LEN as usize]).unwrap();
    for id in 0..16 {
        p.b.receive(id, None);
        let remote = Some(to.remote(0, LEN).unwrap());
        p.a.post(id, Opcode::WriteWithImmediate(id as u32), vec![slice(&from, 0, LEN)], remote);
    }
    let mut received = Vec::new();
    drive(&[&p.b.device], || p.b.cq.poll(&mut received, 1) == 1);
    p.b.qp.to_error();
    assert!(p.b.qp.is_fenced());
    // The owner uses the memory again.
    to.memory().write(0, &vec![0xEE; LEN as usize]).unwrap();
    let mut done = Vec::new();
    drive(&[&p.a.device], || {
        done.extend(p.a.poll());
        done.len() >= 16
    });
    assert!(done.iter().any(|c| c.status != CompletionStatus::Success), "it was in the middle");
    assert!(bytes(&to, 0, LEN).iter().all(|&byte| byte == 0xEE), "not a byte came late");
    drive(&[&p.b.device], || {
        received.extend(p.b.poll());
        received.len() >= 16
    });
    let ended: Vec<_> = received.iter().map(|c| c.id).collect();
    assert_eq!(ended, (0..16).collect::<Vec<_>>());
    assert_eq!((received[0].status, received[0].immediate), (CompletionStatus::Success, Some(0)));
    assert_eq!(received[15].status, CompletionStatus::Flushed);
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn handles_are_dropped_in_any_order() {
    let provider = IbvProvider::new().unwrap();
    let [first, second] = names().map(|name| provider.open(&name).unwrap());
    for round in 0..20u32 {
        let (a, b) = (End::new(&first), End::new(&second));
        connect(&a, &b);
        let memory = a.memory(4096);
        a.receive(1, Some(slice(&memory, 0, 64)));
        let End { pd, cq, qp, .. } = a;
        let mut handles: Vec<Box<dyn std::any::Any>> =
            vec![Box::new(pd), Box::new(cq), Box::new(qp), Box::new(memory), Box::new(b)];
        while !handles.is_empty() {
            let at = round as usize % handles.len();
            handles.remove(at);
        }
    }
    drop(first);
    // Everything was given back: the device can be opened anew, and still makes what it could.
    let again = provider.open(&names()[0]).unwrap();
    let end = End::new(&again);
    // SAFETY: the receive has no memory.
    unsafe { end.qp.post_recv(ReceiveRequest { id: 1, local: None }) }.unwrap();
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn nothing_is_left_behind_by_a_thousand_connections() {
    let provider = IbvProvider::new().unwrap();
    let [first, second] = names().map(|name| provider.open(&name).unwrap());
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = descriptors();
    let (from, to) = (End::new(&second), End::new(&first));
    drop((from, to));
    for round in 0..1000 {
        let (a, b) = (End::new(&first), End::new(&second));
        connect(&a, &b);
        if round % 100 == 0 {
            let (from, to) = (b.memory(4096), a.memory(4096));
            a.post(round, Opcode::Read, vec![slice(&to, 0, 4096)], Some(from.remote(0, 4096).unwrap()));
            assert_eq!(a.completion().status, CompletionStatus::Success);
        }
    }
    assert_eq!(descriptors(), before);
}
