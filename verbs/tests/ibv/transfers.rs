//! Bytes from one device to the other.

use crate::harness::*;
use towline_verbs::{CompletionStatus, Opcode};

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_read_brings_the_owners_bytes() {
    let p = pair();
    for len in [1, 7, 4096, 4097, (1 << 20) + 1] {
        let (from, to) = (p.b.memory(len), p.a.memory(len));
        fill(&from, len);
        p.a.post(len, Opcode::Read, vec![slice(&to, 0, len)], Some(from.remote(0, len).unwrap()));
        let done = p.a.completion();
        assert_eq!(
            (done.id, done.status, done.opcode, done.bytes),
            (len, CompletionStatus::Success, Opcode::Read, len)
        );
        assert_eq!((done.queue_pair, done.immediate, done.vendor_error), (p.a.qp.number(), None, 0));
        assert_eq!(bytes(&to, 0, len), content(len, len));
    }
    assert!(p.b.poll().is_empty(), "the owner of the memory has nothing to do");
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_write_is_scattered_and_gathered() {
    let p = pair();
    let (from, to) = (p.a.memory(64 << 10), p.b.memory(64 << 10));
    fill(&from, 1);
    let gathered = vec![slice(&from, 0, 100), slice(&from, 5000, 0), slice(&from, 30_000, 20_000)];
    p.a.post(1, Opcode::Write, gathered, Some(to.remote(1000, 20_100).unwrap()));
    let done = p.a.completion();
    assert_eq!((done.status, done.opcode, done.bytes), (CompletionStatus::Success, Opcode::Write, 20_100));
    let sent = content(64 << 10, 1);
    assert_eq!(bytes(&to, 1000, 20_100), [&sent[..100], &sent[30_000..50_000]].concat());
    assert_eq!(bytes(&to, 0, 1000), [0; 1000]);
    assert!(bytes(&to, 21_100, 44_436).iter().all(|&byte| byte == 0));
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn messages_and_immediates_meet_receives_in_order() {
    let p = pair();
    let (from, to) = (p.a.memory(8192), p.b.memory(8192));
    fill(&from, 2);
    p.b.receive(10, Some(slice(&to, 0, 1000)));
    p.b.receive(11, Some(slice(&to, 1000, 1000)));
    p.b.receive(12, None);
    p.b.receive(13, None);
    p.a.post(1, Opcode::Send, vec![slice(&from, 0, 700)], None);
    p.a.post(2, Opcode::SendWithImmediate(0xdead_beef), vec![slice(&from, 700, 1000)], None);
    p.a.post(3, Opcode::WriteWithImmediate(7), vec![slice(&from, 0, 500)], Some(to.remote(4000, 500).unwrap()));
    p.a.post(4, Opcode::SendWithImmediate(8), vec![], None);
    let sent: Vec<_> = p.a.completions(4).iter().map(|done| (done.id, done.status, done.bytes)).collect();
    let ok = CompletionStatus::Success;
    assert_eq!(sent, [(1, ok, 700), (2, ok, 1000), (3, ok, 500), (4, ok, 0)]);
    let received = p.b.completions(4);
    assert!(received.iter().all(|done| done.opcode == Opcode::Receive && done.status == ok));
    let what: Vec<_> = received.iter().map(|done| (done.id, done.bytes, done.immediate)).collect();
    assert_eq!(what, [(10, 700, None), (11, 1000, Some(0xdead_beef)), (12, 500, Some(7)), (13, 0, Some(8))]);
    let sent = content(8192, 2);
    assert_eq!((bytes(&to, 0, 700), bytes(&to, 1000, 1000)), (sent[..700].to_vec(), sent[700..1700].to_vec()));
    assert_eq!(bytes(&to, 4000, 500), sent[..500]);
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_chain_of_reads_completes_in_order() {
    const CHUNK: u64 = 16 << 10;
    let p = pair();
    let (from, to) = (p.b.memory(64 * CHUNK), p.a.memory(64 * CHUNK));
    fill(&from, 3);
    let remote = |i| from.remote(i * CHUNK, CHUNK).unwrap();
    let chain =
        |ids: std::ops::Range<u64>| ids.map(|i| read(i, vec![slice(&to, i * CHUNK, CHUNK)], remote(i))).collect();
    p.a.try_post(chain(0..64)).unwrap();
    let full = p.a.try_post(chain(0..1)).unwrap_err().cause;
    assert_eq!(full, towline_verbs::Cause::Limit { what: "max_send_wr", have: 64, need: 65 });
    let ids: Vec<_> = p.a.completions(64).iter().map(|done| (done.id, done.status)).collect();
    assert_eq!(ids, (0..64).map(|i| (i, CompletionStatus::Success)).collect::<Vec<_>>());
    assert_eq!(bytes(&to, 0, 64 * CHUNK), content(64 * CHUNK, 3));
    p.a.try_post(chain(0..64)).unwrap();
    p.a.completions(64);
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn an_armed_queue_makes_the_device_readable() {
    let p = pair();
    let (from, to) = (p.b.memory(4096), p.a.memory(4096));
    let go = |id| p.a.post(id, Opcode::Read, vec![slice(&to, 0, 4096)], Some(from.remote(0, 4096).unwrap()));
    go(1);
    p.a.completion();
    assert!(!readable(&p.a.device, 0), "not armed");
    p.a.cq.arm();
    assert!(p.a.poll().is_empty() && !readable(&p.a.device, 0));
    go(2);
    assert!(readable(&p.a.device, 60_000));
    drive(&[&p.a.device], || !readable(&p.a.device, 0));
    assert_eq!(p.a.completion().id, 2);
    go(3);
    p.a.completion();
    assert!(!readable(&p.a.device, 0), "armed for one event");
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn both_ends_read_from_each_other_at_once() {
    const LEN: u64 = 256 << 10;
    let p = pair();
    let memory = [&p.a, &p.b].map(|end| (end.memory(LEN), end.memory(LEN)));
    fill(&memory[0].0, 4);
    fill(&memory[1].0, 5);
    for round in 0..8 {
        p.a.post(round, Opcode::Read, vec![slice(&memory[0].1, 0, LEN)], Some(memory[1].0.remote(0, LEN).unwrap()));
        p.b.post(round, Opcode::Read, vec![slice(&memory[1].1, 0, LEN)], Some(memory[0].0.remote(0, LEN).unwrap()));
    }
    for end in [&p.a, &p.b] {
        assert!(end.completions(8).iter().all(|done| done.status == CompletionStatus::Success));
    }
    assert_eq!(bytes(&memory[0].1, 0, LEN), content(LEN, 5));
    assert_eq!(bytes(&memory[1].1, 0, LEN), content(LEN, 4));
}
