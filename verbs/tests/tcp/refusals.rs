//! What is not allowed, and how one learns it.

use crate::harness::*;
use towline_verbs::{Access, Cause, CompletionStatus, Memory, Opcode, QueuePairCapacity, QueuePairState, RemoteSlice};

/// Posts a read or write of 100 bytes and expects it to be refused, everything behind it to flush, and both ends to be in
/// the error state afterwards.
pub(crate) fn refused(p: &Pair, opcode: Opcode, remote: RemoteSlice) {
    let local = p.a.memory(4096);
    p.a.post(1, opcode, vec![slice(&local, 0, remote.len)], Some(remote));
    p.a.post(2, Opcode::Write, vec![slice(&local, 0, remote.len)], Some(remote));
    let done = completions(&p.a, &p.b, 2);
    assert_eq!((done[0].id, done[0].status, done[0].bytes), (1, CompletionStatus::RemoteAccess, 0));
    assert_eq!((done[1].id, done[1].status), (2, CompletionStatus::Flushed));
    assert_eq!(p.a.qp.state(), QueuePairState::Error);
    assert!(matches!(p.a.qp.failure().unwrap().cause, Cause::Denied { .. }));
    assert!(p.a.qp.is_fenced());
    drive(&[&p.a.device, &p.b.device], || p.b.qp.is_fenced());
    assert!(matches!(p.b.qp.failure().unwrap().cause, Cause::Denied { .. }), "{:?}", p.b.qp.failure());
}

#[test]
fn a_wrong_key() {
    let p = pair();
    let region = p.b.memory(4096);
    let right = region.remote(0, 100).unwrap();
    refused(&p, Opcode::Read, RemoteSlice { rkey: right.rkey ^ 1 << 40, ..right });
}

#[test]
fn a_key_of_a_region_that_is_gone() {
    let p = pair();
    let gone = p.b.memory(4096).remote(0, 100).unwrap();
    refused(&p, Opcode::Read, gone);
}

#[test]
fn out_of_bounds_by_one() {
    let p = pair();
    let region = p.b.memory(4096);
    let end = region.remote(3996, 100).unwrap();
    refused(&p, Opcode::Read, RemoteSlice { address: end.address + 1, ..end });
}

#[test]
fn a_write_out_of_bounds_touches_nothing() {
    let p = pair();
    let region = p.b.memory(4096);
    region.memory().write(0, &[0xCC; 4096]).unwrap();
    let end = region.remote(3996, 100).unwrap();
    refused(&p, Opcode::Write, RemoteSlice { address: end.address + 1, ..end });
    assert_eq!(bytes(&region, 0, 4096), [0xCC; 4096]);
}

#[test]
fn a_write_into_memory_that_may_only_be_read() {
    let p = pair();
    let region = p.b.memory_with(4096, Access::REMOTE_READ);
    refused(&p, Opcode::Write, region.remote(0, 100).unwrap());
}

#[test]
fn a_read_of_memory_that_may_only_be_written() {
    let p = pair();
    let region = p.b.memory_with(4096, Access::REMOTE_WRITE);
    refused(&p, Opcode::Read, region.remote(0, 100).unwrap());
}

#[test]
fn memory_of_another_protection_domain() {
    let p = pair();
    let other = p.b.device.alloc_pd().unwrap();
    let memory = Memory::shared(4096, towline_verbs::memory::HugePages::Off).unwrap();
    let region = other.register(memory, ALL).unwrap();
    refused(&p, Opcode::Read, region.remote(0, 100).unwrap());
}

#[test]
fn a_window_opens_its_bytes_to_its_peer_alone() {
    let p = pair();
    let region = p.b.memory(8192);
    fill(&region, 1);
    let window = region.bind(&p.b.qp, 1000, 500).unwrap();
    let to = p.a.memory(8192);
    p.a.post(1, Opcode::Read, vec![slice(&to, 0, 500)], Some(window.remote()));
    assert_eq!(completion(&p.a, &p.b).status, CompletionStatus::Success);
    check(&to, 0, 1000, 500, 1);
    let before = RemoteSlice { address: window.remote().address - 1, ..window.remote() };
    refused(&p, Opcode::Read, RemoteSlice { len: 100, ..before });
}

#[test]
fn a_window_of_another_queue_pair() {
    let p = pair();
    let region = p.b.memory(8192);
    let other =
        p.b.pd.create_qp(&p.b.device.create_cq(10).unwrap(), &p.b.device.create_cq(10).unwrap(), CAPACITY).unwrap();
    let window = region.bind(&other, 0, 100).unwrap();
    refused(&p, Opcode::Read, window.remote());
}

const CAPACITY: QueuePairCapacity = QueuePairCapacity { max_send_wr: 8, max_recv_wr: 8 };

#[test]
fn a_window_gives_no_right_to_write() {
    let p = pair();
    let region = p.b.memory(8192);
    let window = region.bind(&p.b.qp, 0, 100).unwrap();
    refused(&p, Opcode::Write, window.remote());
}

#[test]
fn an_invalidated_window_and_a_dropped_one() {
    let p = pair();
    let region = p.b.memory(8192);
    let window = region.bind(&p.b.qp, 0, 100).unwrap();
    assert!(window.invalidate(), "nobody is inside");
    assert!(window.invalidate());
    refused(&p, Opcode::Read, window.remote());

    let p = pair();
    let region = p.b.memory(8192);
    let remote = region.bind(&p.b.qp, 0, 100).unwrap().remote();
    refused(&p, Opcode::Read, remote);
}

#[test]
fn binding_needs_the_right_and_the_same_domain() {
    let p = pair();
    let plain = p.b.memory_with(4096, Access::REMOTE_READ);
    assert!(matches!(plain.bind(&p.b.qp, 0, 1).unwrap_err().cause, Cause::Denied { .. }));
    assert!(matches!(p.a.memory(4096).bind(&p.b.qp, 0, 1).unwrap_err().cause, Cause::Unsupported { .. }));
    assert!(matches!(p.b.memory(4096).bind(&p.b.qp, 4096, 1).unwrap_err().cause, Cause::OutOfRange { .. }));
}

#[test]
fn a_window_revoked_in_the_middle_of_its_read_is_a_fence_at_once() {
    const LEN: u64 = 256 << 20;
    let p = pair();
    let (from, to) = (p.b.memory(LEN), p.a.memory(LEN));
    from.memory().write(0, &vec![0x11; LEN as usize]).unwrap();
    let window = from.bind(&p.b.qp, 0, LEN).unwrap();
    p.a.post(1, Opcode::Read, vec![slice(&to, 0, LEN)], Some(window.remote()));
    // Until the answer is well under way.
    drive(&[&p.a.device, &p.b.device], || bytes(&to, 16 << 20, 1) == [0x11]);
    let fenced = window.invalidate();
    assert!(fenced, "no thread is in a call, so nobody is inside");
    // What is written from now on may not arrive.
    from.memory().write(0, &vec![0x99; LEN as usize]).unwrap();
    let done = completion(&p.a, &p.b);
    assert_eq!(done.status, CompletionStatus::RemoteAccess);
    assert!(p.a.qp.is_fenced());
    assert!(!bytes(&to, 0, LEN).contains(&0x99), "bytes left the memory after the fence");
}

#[test]
fn revoking_races_with_threads_that_copy() {
    for round in 0..30 {
        const LEN: u64 = 8 << 20;
        let p = pair();
        let (from, to) = (p.b.memory(LEN), p.a.memory(LEN));
        from.memory().write(0, &vec![0x11; LEN as usize]).unwrap();
        let window = from.bind(&p.b.qp, 0, LEN).unwrap();
        p.a.post(1, Opcode::Read, vec![slice(&to, 0, LEN)], Some(window.remote()));
        let mut done = Vec::new();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                drive(&[&p.a.device, &p.b.device], || {
                    done.extend(p.a.poll());
                    !done.is_empty()
                });
            });
            // A different moment in each round.
            while bytes(&to, round * (LEN / 40), 1) != [0x11] && p.a.qp.state() != QueuePairState::Error {}
            while !window.invalidate() {}
            from.memory().write(0, &vec![0x99; LEN as usize]).unwrap();
        });
        assert!(matches!(done[0].status, CompletionStatus::Success | CompletionStatus::RemoteAccess));
        assert!(!bytes(&to, 0, LEN).contains(&0x99), "bytes left the memory after the fence");
    }
}

#[test]
fn no_receive_posted_ends_with_its_own_status_after_a_bounded_wait() {
    for opcode in [Opcode::Send, Opcode::WriteWithImmediate(1)] {
        let patience = std::time::Duration::from_millis(200);
        let p = pair_with("127.0.0.1", |config| config.receiver_not_ready_timeout = patience);
        let (from, to) = (p.a.memory(4096), p.b.memory(4096));
        let remote = (opcode != Opcode::Send).then(|| to.remote(0, 10).unwrap());
        let start = std::time::Instant::now();
        p.a.post(1, opcode, vec![slice(&from, 0, 10)], remote);
        p.a.post(2, opcode, vec![slice(&from, 0, 10)], remote);
        let done = completions(&p.a, &p.b, 2);
        assert_eq!(done[0].status, CompletionStatus::ReceiverNotReadyExceeded);
        assert_eq!(done[1].status, CompletionStatus::Flushed);
        assert!(start.elapsed() >= patience);
        assert_eq!(p.a.qp.state(), QueuePairState::Error);
    }
}

#[test]
fn a_message_waits_for_a_receive_and_is_not_buffered() {
    let p = pair_with("127.0.0.1", |config| config.receiver_not_ready_timeout = PATIENCE);
    let (from, to) = (p.a.memory(64 << 20), p.b.memory(64 << 20));
    fill(&from, 2);
    p.a.post(1, Opcode::Send, vec![slice(&from, 0, 64 << 20)], None);
    p.a.post(2, Opcode::SendWithImmediate(5), vec![slice(&from, 0, 10)], None);
    // Both devices come to rest with the message undelivered: nobody has taken 64 MiB of it in.
    let mut rests = 0;
    drive(&[&p.a.device, &p.b.device], || {
        rests = if wait(&[&p.a.device, &p.b.device], std::time::Duration::ZERO) { 0 } else { rests + 1 };
        rests == 10
    });
    assert!(p.a.poll().is_empty());
    p.b.receive(7, Some(slice(&to, 0, 64 << 20)));
    p.b.receive(8, Some(slice(&to, 0, 10)));
    let got = completions(&p.b, &p.a, 2);
    assert_eq!((got[0].id, got[0].status, got[0].bytes), (7, CompletionStatus::Success, 64 << 20));
    assert_eq!((got[1].id, got[1].immediate), (8, Some(5)));
    check(&to, 10, 10, (64 << 20) - 10, 2);
    assert!(completions(&p.a, &p.b, 2).iter().all(|c| c.status == CompletionStatus::Success));
}

#[test]
fn a_message_longer_than_its_receive() {
    let p = pair();
    let (from, to) = (p.a.memory(4096), p.b.memory(4096));
    p.b.receive(7, Some(slice(&to, 0, 99)));
    p.a.post(1, Opcode::Send, vec![slice(&from, 0, 100)], None);
    assert_eq!(completion(&p.b, &p.a).status, CompletionStatus::LocalLength);
    assert_eq!(completion(&p.a, &p.b).status, CompletionStatus::RemoteInvalidRequest);
    assert_eq!(bytes(&to, 0, 100), [0; 100]);
}

#[test]
fn beyond_capacity_nothing_is_posted() {
    let endpoint = [Endpoint::new("127.0.0.1"), Endpoint::new("127.0.0.1")];
    let (a, b) = (endpoint[0].end_with(CAPACITY), endpoint[1].end_with(CAPACITY));
    connect(&a, &b);
    let (from, to) = (b.memory(4096), a.memory(4096));
    let request = |id| towline_verbs::WorkRequest {
        id,
        opcode: Opcode::Read,
        local: vec![slice(&to, 0, 16)],
        remote: Some(from.remote(0, 16).unwrap()),
    };
    // SAFETY: the memory is looked at by nobody.
    let post = |ids: core::ops::Range<u64>| unsafe { a.qp.post_send(ids.map(request).collect()) };
    post(0..5).unwrap();
    let refused = post(5..9).unwrap_err();
    assert_eq!(refused.cause, Cause::Limit { what: "max_send_wr", have: 8, need: 9 });
    assert!(refused.is_transient());
    post(9..12).unwrap();
    assert_eq!(completions(&a, &b, 8).iter().map(|c| c.id).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 9, 10, 11]);
    post(5..13).unwrap();
    completions(&a, &b, 8);
    for id in 0..8 {
        a.receive(id, None);
    }
    let more = towline_verbs::ReceiveRequest { id: 8, local: None };
    // SAFETY: there is no memory.
    let refused = unsafe { a.qp.post_recv(more) }.unwrap_err();
    assert_eq!(refused.cause, Cause::Limit { what: "max_recv_wr", have: 8, need: 9 });
}

#[test]
fn requests_that_make_no_sense_are_refused_where_they_are_posted() {
    let p = pair();
    let (region, there) = (p.a.memory(4096), p.b.memory(4096));
    let readable = p.a.memory_with(4096, Access::REMOTE_READ);
    let remote = there.remote(0, 10).unwrap();
    let cause = |opcode, local, remote| p.a.try_post(1, opcode, local, remote).unwrap_err().cause;
    let ten = || vec![slice(&region, 0, 10)];
    assert!(matches!(cause(Opcode::Read, vec![slice(&region, 4090, 10)], Some(remote)), Cause::OutOfRange { .. }));
    assert!(matches!(cause(Opcode::Read, vec![slice(&region, u64::MAX, 10)], Some(remote)), Cause::OutOfRange { .. }));
    assert!(matches!(cause(Opcode::Read, vec![slice(&region, 0, 9)], Some(remote)), Cause::OutOfRange { .. }));
    assert!(matches!(cause(Opcode::Read, ten(), None), Cause::NotFound { .. }));
    assert!(matches!(cause(Opcode::Send, ten(), Some(remote)), Cause::Unsupported { .. }));
    assert!(matches!(cause(Opcode::Receive, ten(), None), Cause::Unsupported { .. }));
    assert_eq!(cause(Opcode::Read, vec![slice(&readable, 0, 10)], Some(remote)), Cause::Denied { what: "LOCAL_WRITE" });
    assert!(matches!(cause(Opcode::Read, vec![slice(&there, 0, 10)], Some(remote)), Cause::Denied { .. }));
    assert!(matches!(cause(Opcode::Send, vec![slice(&region, 0, 1); 17], None), Cause::Limit { what: "max_sge", .. }));
    // Nothing of it was posted.
    p.a.post(2, Opcode::Write, vec![slice(&readable, 0, 10)], Some(remote));
    assert_eq!(completion(&p.a, &p.b).id, 2);
}

#[test]
fn a_completion_queue_that_could_overflow_is_refused() {
    let endpoint = Endpoint::new("127.0.0.1");
    let (pd, cq) = (endpoint.device.alloc_pd().unwrap(), endpoint.device.create_cq(20).unwrap());
    let first = pd.create_qp(&cq, &cq, CAPACITY).unwrap();
    let refused = pd.create_qp(&cq, &cq, CAPACITY).unwrap_err();
    assert!(matches!(refused.cause, Cause::Limit { what: "completion queue depth", have: 20, need: 24 }), "{refused}");
    drop(first);
    pd.create_qp(&cq, &cq, CAPACITY).unwrap();
    assert!(matches!(endpoint.device.create_cq(0).unwrap_err().cause, Cause::Limit { .. }));
}

#[test]
fn the_queues_and_devices_of_others_are_refused() {
    let (one, two) = (Endpoint::new("127.0.0.1"), Endpoint::new("127.0.0.1"));
    let (pd, cq) = (one.device.alloc_pd().unwrap(), two.device.create_cq(100).unwrap());
    assert!(matches!(pd.create_qp(&cq, &cq, CAPACITY).unwrap_err().cause, Cause::Unsupported { .. }));
}
