//! Bytes that arrive.

use crate::harness::*;
use towline_verbs::{Completion, CompletionStatus, Opcode};

fn success(completion: &Completion, id: u64, opcode: Opcode, bytes: u64) {
    assert_eq!(
        (completion.status, completion.id, completion.opcode, completion.bytes),
        (CompletionStatus::Success, id, opcode, bytes)
    );
}

#[test]
fn reads_of_many_sizes() {
    for bind in ["127.0.0.1", "::1"] {
        let p = pair_with(bind, |_| {});
        let (from, to) = (p.b.memory(20 << 20), p.a.memory(20 << 20));
        fill(&from, 1);
        let sizes = [1, 2, 63, 4095, 4096, 8152, 8153, 8192, 65_537, 1 << 20, (4 << 20) - 1, (4 << 20) + 1, 20 << 20];
        for (id, len) in sizes.into_iter().enumerate() {
            let source = from.remote((20 << 20) - len, len).unwrap();
            p.a.post(id as u64, Opcode::Read, vec![slice(&to, 0, len)], Some(source));
            let done = completion(&p.a, &p.b);
            success(&done, id as u64, Opcode::Read, len);
            assert_eq!(done.queue_pair, p.a.qp.number());
            check(&to, 0, (20 << 20) - len, len, 1);
        }
    }
}

#[test]
fn many_reads_complete_in_the_order_posted() {
    let p = pair();
    let (from, to) = (p.b.memory(64 << 20), p.a.memory(64 << 20));
    fill(&from, 2);
    let chunk = (64 << 20) / 128;
    for id in 0..128 {
        p.a.post(id, Opcode::Read, vec![slice(&to, id * chunk, chunk)], Some(from.remote(id * chunk, chunk).unwrap()));
    }
    let done = completions(&p.a, &p.b, 128);
    for (id, done) in (0..).zip(&done) {
        success(done, id, Opcode::Read, chunk);
    }
    check(&to, 0, 0, 64 << 20, 2);
    assert!(p.b.poll().is_empty(), "the owner of what is read has no completions");
}

#[test]
fn writes_sends_and_immediates_arrive_in_order() {
    let p = pair();
    let (from, to) = (p.a.memory(1 << 20), p.b.memory(1 << 20));
    fill(&from, 3);
    p.b.receive(100, None);
    p.b.receive(101, Some(slice(&to, 600_000, 300)));
    p.b.receive(102, Some(slice(&to, 700_000, 300)));
    p.a.post(1, Opcode::Write, vec![slice(&from, 5, 1000)], Some(to.remote(77, 1000).unwrap()));
    p.a.post(2, Opcode::WriteWithImmediate(9), vec![slice(&from, 9, 500_000)], Some(to.remote(2000, 500_000).unwrap()));
    p.a.post(3, Opcode::Send, vec![slice(&from, 0, 299)], None);
    p.a.post(4, Opcode::SendWithImmediate(u32::MAX), vec![], None);
    let got = completions(&p.b, &p.a, 3);
    let seen = got.iter().map(|c| (c.id, c.status, c.opcode, c.bytes, c.immediate)).collect::<Vec<_>>();
    let row = |id, bytes, immediate| (id, CompletionStatus::Success, Opcode::Receive, bytes, immediate);
    assert_eq!(seen, [row(100, 500_000, Some(9)), row(101, 299, None), row(102, 0, Some(u32::MAX))]);
    check(&to, 77, 5, 1000, 3);
    check(&to, 2000, 9, 500_000, 3);
    check(&to, 600_000, 0, 299, 3);
    let sent = completions(&p.a, &p.b, 4);
    success(&sent[0], 1, Opcode::Write, 1000);
    success(&sent[1], 2, Opcode::WriteWithImmediate(9), 500_000);
    success(&sent[2], 3, Opcode::Send, 299);
    success(&sent[3], 4, Opcode::SendWithImmediate(u32::MAX), 0);
}
