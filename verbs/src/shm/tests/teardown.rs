//! Going to the error state, closing, and leaving nothing behind.

use super::support::*;
use crate::{Access, Cause, Completion, CompletionStatus, Opcode, QueuePairState};
use std::sync::atomic::{AtomicBool, Ordering};

#[test]
fn to_error_flushes_everything_in_order() {
    let (a, b) = (End::new(), End::new());
    let source = a.region(4096, Access::REMOTE_READ | Access::REMOTE_WRITE, 1);
    let local = b.region(4096, Access::LOCAL_WRITE, 2);
    let qb = b.queue_pair();
    // Not connected: requests wait.
    qb.connect(&a.queue_pair().address(), false).unwrap();
    let remote = Some(source.remote(0, 8).unwrap());
    let ops = [Opcode::Read, Opcode::Write, Opcode::Send, Opcode::WriteWithImmediate(1)];
    let requests = ops.iter().enumerate().map(|(id, &opcode)| {
        request(id as u64, opcode, vec![slice(&local, 0, 8)], remote.filter(|_| opcode != Opcode::Send))
    });
    post(&qb, requests.collect()).unwrap();
    post_receive(&qb, 10, None).unwrap();
    post_receive(&qb, 11, Some(slice(&local, 0, 1))).unwrap();
    assert!(b.completions().is_empty() && !qb.is_fenced());
    qb.to_error();
    qb.to_error();
    let mut done = b.completions();
    assert!(done.iter().all(|c| (c.status, c.bytes, c.immediate) == (CompletionStatus::Flushed, 0, None)));
    let (received, sent): (Vec<_>, Vec<_>) = done.drain(..).partition(|c| c.opcode == Opcode::Receive);
    assert_eq!(received.iter().map(|c| c.id).collect::<Vec<_>>(), [10, 11]);
    assert_eq!(sent.iter().map(|c| (c.id, c.opcode)).collect::<Vec<_>>(), { (0..4).zip(ops).collect::<Vec<_>>() });
    assert!(qb.is_fenced() && qb.failure().is_none());
    assert!(matches!(post_receive(&qb, 1, None).unwrap_err().cause, Cause::State { .. }));
}

/// Statuses that came, while others keep copying.
fn drain(end: &End, all: &mut Vec<Completion>, count: usize) {
    drive(&[end], || {
        all.extend(end.completions());
        all.len() == count
    });
}

#[test]
fn to_error_in_a_large_read_leaves_no_late_byte() {
    let a = End::new();
    let b = End::with(|config| config.copy_threads = Some(2));
    let len = 96 << 20;
    let source = a.region(len, Access::REMOTE_READ, 1);
    let target = b.region(len, Access::LOCAL_WRITE, 2);
    let mut flushed = 0;
    for round in 0..8 {
        let (_qa, qb) = connect(&a, &b);
        drive(&[&a, &b], || qb.map(source.remote(0, 1).unwrap()).is_ok());
        let zeros = vec![0; len as usize];
        target.memory().write(0, &zeros).unwrap();
        let read = |id| request(id, Opcode::Read, vec![slice(&target, 0, len)], Some(source.remote(0, len).unwrap()));
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    b.device.progress();
                }
            });
            post(&qb, vec![read(1), read(2)]).unwrap();
            // Somewhere in the first read: when some bytes of a later and later piece have come.
            let watched = (round * 5) << 20;
            let mut eight = [0; 8];
            while eight == [0; 8] {
                target.memory().read(watched, &mut eight).unwrap();
            }
            qb.to_error();
            let mut done = Vec::new();
            drain(&b, &mut done, 2);
            assert!(qb.is_fenced());
            // From now on the memory is ours: canaries everywhere.
            target.memory().write(0, &vec![0xa5; len as usize]).unwrap();
            flushed += done.iter().filter(|c| c.status == CompletionStatus::Flushed).count();
            assert_eq!(done.iter().map(|c| c.id).collect::<Vec<_>>(), [1, 2]);
            assert_eq!(done[1].status, CompletionStatus::Flushed);
            for _ in 0..50 {
                b.device.progress();
            }
            assert!(bytes_of(&target, 0, len).iter().all(|&byte| byte == 0xa5), "a byte came after the fence");
            stop.store(true, Ordering::Relaxed);
        });
    }
    assert!(flushed > 8, "no read was stopped in the middle");
}

#[test]
fn to_error_of_the_owner_in_a_peers_write_fences_it() {
    let a = End::with(|config| config.copy_threads = Some(2));
    let b = End::new();
    let len = 96 << 20;
    let target = a.region(len, Access::LOCAL_WRITE | Access::REMOTE_WRITE, 1);
    let source = b.region(len, Access::REMOTE_READ, 2);
    let (qa, qb) = connect(&a, &b);
    target.memory().write(0, &vec![0; len as usize]).unwrap();
    let remote = Some(target.remote(0, len).unwrap());
    post(&qb, vec![request(1, Opcode::Write, vec![slice(&source, 0, len)], remote)]).unwrap();
    let mut eight = [0; 8];
    drive(&[&a, &b], || {
        target.memory().read(4 << 20, &mut eight).unwrap();
        eight != [0; 8]
    });
    qa.to_error();
    drive(&[&a], || qa.is_fenced());
    target.memory().write(0, &vec![0xa5; len as usize]).unwrap();
    let done = wait_for(&[&a, &b], &b, 1)[0];
    assert_ne!(done.status, CompletionStatus::Success);
    assert_eq!(qb.failure().unwrap().cause, Cause::Disconnected);
    for _ in 0..50 {
        a.device.progress();
    }
    assert!(bytes_of(&target, 0, len).iter().all(|&byte| byte == 0xa5), "a byte came after the fence");
}

#[test]
fn a_requester_that_gives_up_delivers_nothing() {
    let a = End::with(|config| config.copy_threads = Some(1));
    let b = End::new();
    let len = 64 << 20;
    let target = a.region(len, Access::LOCAL_WRITE | Access::REMOTE_WRITE, 1);
    let source = b.region(len, Access::REMOTE_READ, 2);
    let (qa, qb) = connect(&a, &b);
    post_receive(&qa, 5, None).unwrap();
    let remote = Some(target.remote(0, len).unwrap());
    post(&qb, vec![request(1, Opcode::WriteWithImmediate(9), vec![slice(&source, 0, len)], remote)]).unwrap();
    // The owner has begun to copy when the requester fails and re-uses its memory.
    let first = pattern(8, 2);
    drive(&[&a], || bytes_of(&target, 0, 8) == first);
    qb.to_error();
    assert_eq!(b.completions()[0].status, CompletionStatus::Flushed);
    source.memory().write(0, &vec![0; len as usize]).unwrap();
    let seen = wait_for(&[&a, &b], &a, 1)[0];
    assert_eq!((seen.id, seen.status, seen.immediate), (5, CompletionStatus::Flushed, None));
    assert_eq!(qa.state(), QueuePairState::Error);
}

#[test]
fn a_closed_peer_is_noticed_and_everything_flushes() {
    let (a, b) = (End::new(), End::new());
    let target = a.region(4096, Access::REMOTE_WRITE | Access::LOCAL_WRITE, 1);
    let local = b.region(4096, Access::LOCAL_WRITE, 2);
    let (qa, qb) = connect(&a, &b);
    post_receive(&qb, 7, Some(slice(&local, 0, 1))).unwrap();
    drive(&[&b], || b.device.progress() == crate::Progress::Idle);
    b.cq.arm();
    let remote = Some(target.remote(0, 8).unwrap());
    post(&qb, vec![request(1, Opcode::Write, vec![slice(&local, 0, 8)], remote)]).unwrap();
    post(&qb, vec![request(2, Opcode::Write, vec![slice(&local, 0, 8)], remote)]).unwrap();
    drop(qa); // without having read the requests
    assert!(is_readable(&b));
    let mut done = wait_for(&[&b], &b, 3);
    done.sort_by_key(|c| c.id);
    assert_eq!((done[0].id, done[0].status), (1, CompletionStatus::TransportRetryExceeded));
    assert_eq!((done[1].id, done[1].status), (2, CompletionStatus::Flushed));
    assert_eq!((done[2].id, done[2].status), (7, CompletionStatus::Flushed));
    assert_eq!(qb.failure().unwrap().cause, Cause::Disconnected);
    assert!(qb.is_fenced());
    drive(&[&b], || b.device.progress() == crate::Progress::Idle);
    assert!(!is_readable(&b), "a closed connection keeps the device awake");
}

#[test]
fn dropping_a_queue_pair_in_a_read_is_to_error() {
    let (a, b) = (End::new(), End::new());
    let len = 32 << 20;
    let source = a.region(len, Access::REMOTE_READ, 1);
    let target = b.region(len, Access::LOCAL_WRITE, 2);
    let (qa, qb) = connect(&a, &b);
    drive(&[&a, &b], || qb.map(source.remote(0, 1).unwrap()).is_ok());
    let remote = Some(source.remote(0, len).unwrap());
    let reads = (0..4).map(|id| request(id, Opcode::Read, vec![slice(&target, 0, len)], remote)).collect();
    post(&qb, reads).unwrap();
    drop(qb);
    let done = wait_for(&[&b], &b, 4);
    assert_eq!(done.iter().map(|c| c.id).collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert_eq!(done[3].status, CompletionStatus::Flushed);
    drive(&[&a], || qa.state() == QueuePairState::Error);
}

#[test]
fn a_request_keeps_its_memory() {
    let (a, b) = (End::new(), End::new());
    let len = 16 << 20;
    let source = a.region(len, Access::REMOTE_READ, 1);
    let target = b.region(len, Access::LOCAL_WRITE, 2);
    let kept = target.memory().clone();
    let (_qa, qb) = connect(&a, &b);
    let read = request(1, Opcode::Read, vec![slice(&target, 0, len)], Some(source.remote(0, len).unwrap()));
    post(&qb, vec![read]).unwrap();
    drop(target);
    assert_eq!(wait_for(&[&a, &b], &b, 1)[0].status, CompletionStatus::Success);
    let mut bytes = vec![0; len as usize];
    kept.read(0, &mut bytes).unwrap();
    assert!(bytes == pattern(len, 1));
}
