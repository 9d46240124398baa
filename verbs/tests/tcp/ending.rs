//! The error state, flushing, fences, and giving everything back.

use crate::harness::*;
use towline_verbs::{Cause, CompletionStatus, Opcode, QueuePairState};

#[test]
fn to_error_in_the_middle_flushes_each_request_once_and_is_a_fence() {
    const CHUNK: u64 = 4 << 20;
    let p = pair();
    let (from, to) = (p.b.memory(32 * CHUNK), p.a.memory(32 * CHUNK));
    fill(&from, 1);
    for id in 0..32 {
        p.a.post(id, Opcode::Read, vec![slice(&to, id * CHUNK, CHUNK)], Some(from.remote(id * CHUNK, CHUNK).unwrap()));
    }
    p.a.receive(100, Some(slice(&to, 0, 1)));
    let mut done = Vec::new();
    drive(&[&p.a.device, &p.b.device], || {
        done.extend(p.a.poll());
        done.len() >= 5
    });
    p.a.qp.to_error();
    p.a.qp.to_error();
    assert!(p.a.qp.is_fenced(), "no thread is inside");
    // The canaries: from here on nobody may touch this memory, whatever the peer still sends.
    to.memory().write(0, &vec![0xEE; (32 * CHUNK) as usize]).unwrap();
    done.extend(p.a.poll());
    assert_eq!(done.len(), 33);
    let receive = done.iter().position(|c| c.opcode == Opcode::Receive).unwrap();
    assert_eq!((done[receive].id, done[receive].status), (100, CompletionStatus::Flushed));
    done.remove(receive);
    assert!(done.iter().zip(0..).all(|(c, id)| c.id == id));
    let first_flushed = done.iter().position(|c| c.status != CompletionStatus::Success).unwrap();
    assert!(first_flushed >= 5);
    assert!(done[first_flushed..].iter().all(|c| c.status == CompletionStatus::Flushed && c.bytes == 0));
    drive(&[&p.a.device, &p.b.device], || p.b.qp.is_fenced());
    assert_eq!(p.b.qp.failure().unwrap().cause, Cause::Disconnected);
    assert!(bytes(&to, 0, 32 * CHUNK).iter().all(|&byte| byte == 0xEE));
    assert_eq!(p.a.qp.failure(), None, "asked for, not failed");
    assert!(p.a.poll().is_empty());
    let late = p.a.try_post(1, Opcode::Send, vec![], None).unwrap_err();
    assert!(matches!(late.cause, Cause::State { is: QueuePairState::Error, .. }));
}

#[test]
fn to_error_races_with_threads_that_copy() {
    for round in 0..20 {
        const CHUNK: u64 = 1 << 20;
        let p = pair();
        let (from, to) = (p.b.memory(32 * CHUNK), p.a.memory(32 * CHUNK));
        from.memory().write(0, &vec![0x11; (32 * CHUNK) as usize]).unwrap();
        for id in 0..32 {
            let remote = from.remote(id * CHUNK, CHUNK).unwrap();
            p.a.post(id, Opcode::Read, vec![slice(&to, id * CHUNK, CHUNK)], Some(remote));
        }
        let done = std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| drive(&[&p.a.device, &p.b.device], || p.a.qp.is_fenced() && p.b.qp.is_fenced()));
            }
            while bytes(&to, round * CHUNK, 1) != [0x11] {}
            p.a.qp.to_error();
            let mut done = Vec::new();
            while done.len() < 32 {
                done.extend(p.a.poll());
            }
            assert!(p.a.qp.is_fenced(), "the flush comes after the fence");
            to.memory().write(0, &vec![0xEE; (32 * CHUNK) as usize]).unwrap();
            done
        });
        assert!(done.iter().zip(0..).all(|(c, id)| c.id == id));
        assert!(bytes(&to, 0, 32 * CHUNK).iter().all(|&byte| byte == 0xEE), "round {round}");
        assert!(p.a.poll().is_empty());
    }
}

#[test]
fn the_responder_in_error_touches_its_memory_no_more() {
    const LEN: u64 = 64 << 20;
    let p = pair();
    let (from, to) = (p.a.memory(LEN), p.b.memory(LEN));
    from.memory().write(0, &vec![0x11; LEN as usize]).unwrap();
    p.a.post(1, Opcode::Write, vec![slice(&from, 0, LEN)], Some(to.remote(0, LEN).unwrap()));
    drive(&[&p.a.device, &p.b.device], || bytes(&to, 8 << 20, 1) == [0x11]);
    p.b.qp.to_error();
    assert!(p.b.qp.is_fenced());
    to.memory().write(0, &vec![0xEE; LEN as usize]).unwrap();
    let done = completion(&p.a, &p.b);
    assert_eq!(done.status, CompletionStatus::TransportRetryExceeded);
    assert_ne!(done.vendor_error, 0, "the error number");
    assert!(bytes(&to, 0, LEN).iter().all(|&byte| byte == 0xEE));
}

#[test]
fn dropping_the_last_handle_is_the_end_of_the_queue_pair() {
    let Pair { a, b, _endpoints } = pair();
    let (from, to) = (b.memory(16 << 20), a.memory(16 << 20));
    a.post(1, Opcode::Read, vec![slice(&to, 0, 16 << 20)], Some(from.remote(0, 16 << 20).unwrap()));
    let (device, cq, clone) = (a.device.clone(), a.cq.clone(), a.qp.clone());
    drop(a);
    assert_eq!(clone.state(), QueuePairState::ReadyToSend, "a clone is left");
    drop(clone);
    let mut out = Vec::new();
    assert_eq!(cq.poll(&mut out, 10), 1);
    assert_eq!(out[0].status, CompletionStatus::Flushed);
    drive(&[&device, &b.device], || b.qp.is_fenced());
}

#[test]
fn a_posted_request_keeps_its_memory_when_its_handles_are_dropped() {
    let p = pair();
    let from = p.b.memory(16 << 20);
    fill(&from, 1);
    let to = p.a.memory(16 << 20);
    let memory = to.memory().clone();
    p.a.post(1, Opcode::Read, vec![slice(&to, 0, 16 << 20)], Some(from.remote(0, 16 << 20).unwrap()));
    drop(to);
    assert_eq!(completion(&p.a, &p.b).status, CompletionStatus::Success);
    let again = p.a.pd.register(memory, ALL).unwrap();
    check(&again, 0, 0, 16 << 20, 1);
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// In a process of its own, as other tests open and close descriptors meanwhile.
#[test]
fn a_hundred_connections_leave_nothing_behind() {
    if !crate::processes::alone("ending::a_hundred_connections_leave_nothing_behind") {
        return;
    }
    let endpoints = [Endpoint::new("127.0.0.1"), Endpoint::new("127.0.0.1")];
    let mut at_first = 0;
    for round in 0..100 {
        let (a, b) = (endpoints[0].end(), endpoints[1].end());
        connect(&a, &b);
        let (from, to) = (b.memory(1 << 16), a.memory(1 << 16));
        fill(&from, round);
        a.post(1, Opcode::Read, vec![slice(&to, 0, 1 << 16)], Some(from.remote(0, 1 << 16).unwrap()));
        assert_eq!(completion(&a, &b).status, CompletionStatus::Success);
        check(&to, 0, 0, 1 << 16, round);
        if round % 3 == 0 {
            a.qp.to_error();
        }
        drop((a, from, to));
        drive(&[&endpoints[0].device, &endpoints[1].device], || b.qp.is_fenced());
        drop(b);
        if round == 0 {
            at_first = descriptors();
        }
    }
    assert_eq!(descriptors(), at_first);
}
