//! Bytes that arrive.

use crate::harness::*;
use std::time::Duration;
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

#[test]
fn a_gigabyte_in_one_read_over_all_streams() {
    let p = pair();
    let (from, to) = (p.b.memory(1 << 30), p.a.memory(1 << 30));
    fill(&from, 4);
    p.a.post(1, Opcode::Read, vec![slice(&to, 0, 1 << 30)], Some(from.remote(0, 1 << 30).unwrap()));
    success(&completion(&p.a, &p.b), 1, Opcode::Read, 1 << 30);
    check(&to, 0, 0, 1 << 30, 4);
}

#[test]
fn a_kv_cache_of_190_mib_both_ways_at_once() {
    const LEN: u64 = 190 << 20;
    let p = pair();
    let (a_from, b_from) = (p.a.memory(LEN), p.b.memory(LEN));
    let (a_to, b_to) = (p.a.memory(LEN), p.b.memory(LEN));
    fill(&a_from, 5);
    fill(&b_from, 6);
    p.a.post(1, Opcode::Read, vec![slice(&a_to, 0, LEN)], Some(b_from.remote(0, LEN).unwrap()));
    p.b.post(2, Opcode::Read, vec![slice(&b_to, 0, LEN)], Some(a_from.remote(0, LEN).unwrap()));
    let mut done = Vec::new();
    drive(&[&p.a.device, &p.b.device], || {
        done.extend(p.a.poll());
        done.extend(p.b.poll());
        done.len() == 2
    });
    assert!(done.iter().all(|c| c.status == CompletionStatus::Success && c.bytes == LEN));
    check(&a_to, 0, 0, LEN, 6);
    check(&b_to, 0, 0, LEN, 5);
}

#[test]
fn scattered_and_unaligned_destinations_get_their_bytes_and_no_other() {
    let p = pair();
    let (from, to) = (p.b.memory(10 << 20), p.a.memory(20 << 20));
    fill(&from, 7);
    // Sixteen slices with gaps, of sizes from nothing to megabytes; the gaps keep what they had.
    let lens = [1u64, 0, 4097, 3, 1 << 20, 65_535, 2 << 20, 7, 511, 100_000, 0, 3 << 20, 9, 12_345, 1, 500_000];
    let gap = 13;
    to.memory().write(0, &vec![0xAA; 20 << 20]).unwrap();
    let (mut slices, mut at) = (Vec::new(), gap);
    for len in lens {
        slices.push(slice(&to, at, len));
        at += len + gap;
    }
    let total = lens.iter().sum::<u64>();
    p.a.post(1, Opcode::Read, slices.clone(), Some(from.remote(99, total).unwrap()));
    success(&completion(&p.a, &p.b), 1, Opcode::Read, total);
    let mut place = 99;
    for part in &slices {
        check(&to, part.offset, place, part.len, 7);
        assert_eq!(bytes(&to, part.offset + part.len, gap), vec![0xAA; gap as usize]);
        place += part.len;
    }
    // And gathered, the other way.
    let back = p.b.memory(10 << 20);
    p.a.post(2, Opcode::Write, slices, Some(back.remote(5, total).unwrap()));
    success(&completion(&p.a, &p.b), 2, Opcode::Write, total);
    check(&back, 5, 99, total, 7);
}

#[test]
fn writes_of_many_sizes_are_there_when_they_complete() {
    let p = pair();
    let (from, to) = (p.a.memory(40 << 20), p.b.memory(40 << 20));
    for (id, len) in (0u64..).zip([0, 1, 4096, 65_537, (4 << 20) + 1, 40 << 20]) {
        fill(&from, 10 + id);
        p.a.post(id, Opcode::Write, vec![slice(&from, 0, len)], Some(to.remote(0, len).unwrap()));
        success(&completion(&p.a, &p.b), id, Opcode::Write, len);
        check(&to, 0, 0, len, 10 + id);
    }
}

#[test]
fn a_request_of_zero_bytes_still_checks_its_key() {
    let p = pair();
    let region = p.b.memory(4096);
    p.a.post(1, Opcode::Read, vec![], Some(region.remote(4096, 0).unwrap()));
    success(&completion(&p.a, &p.b), 1, Opcode::Read, 0);
    let mut wrong = region.remote(0, 0).unwrap();
    wrong.rkey ^= 1 << 60;
    p.a.post(2, Opcode::Read, vec![], Some(wrong));
    assert_eq!(completion(&p.a, &p.b).status, CompletionStatus::RemoteAccess);
}

#[test]
fn a_read_sees_the_write_posted_before_it() {
    let p = pair();
    let (from, there, back) = (p.a.memory(8 << 20), p.b.memory(8 << 20), p.a.memory(8 << 20));
    for round in 0..20 {
        fill(&from, round);
        p.a.post(1, Opcode::Write, vec![slice(&from, 0, 8 << 20)], Some(there.remote(0, 8 << 20).unwrap()));
        p.a.post(2, Opcode::Read, vec![slice(&back, 0, 4096)], Some(there.remote((8 << 20) - 4096, 4096).unwrap()));
        let done = completions(&p.a, &p.b, 2);
        success(&done[1], 2, Opcode::Read, 4096);
        check(&back, 0, (8 << 20) - 4096, 4096, round);
    }
}

#[test]
fn more_requests_than_may_be_unanswered_wait_their_turn() {
    let p = pair();
    let (from, to) = (p.a.memory(1 << 20), p.b.memory(1 << 20));
    fill(&from, 8);
    for id in 0..256 {
        let (opcode, here) = if id % 3 == 0 { (Opcode::Read, 600_000) } else { (Opcode::Write, 0) };
        let remote = to.remote(id * 1000, 1000).unwrap();
        p.a.post(id, opcode, vec![slice(&from, here + id * 1000, 1000)], Some(remote));
    }
    let done = completions(&p.a, &p.b, 256);
    assert!(done.iter().zip(0..).all(|(c, id)| c.status == CompletionStatus::Success && c.id == id));
}

#[test]
fn many_queue_pairs_share_two_devices() {
    let endpoints = [Endpoint::new("127.0.0.1"), Endpoint::new("127.0.0.1")];
    let ends: Vec<_> = (0..16).map(|_| (endpoints[0].end(), endpoints[1].end())).collect();
    for (a, b) in &ends {
        connect(a, b);
    }
    let regions: Vec<_> = ends.iter().map(|(a, b)| (a.memory(1 << 20), b.memory(1 << 20))).collect();
    for (seed, ((a, _), (to, from))) in (0..).zip(ends.iter().zip(&regions)) {
        fill(from, seed);
        for part in 0..8 {
            let (at, len) = (part << 17, 1 << 17);
            a.post(part, Opcode::Read, vec![slice(to, at, len)], Some(from.remote(at, len).unwrap()));
        }
    }
    let mut left = 16 * 8;
    drive(&[&endpoints[0].device, &endpoints[1].device], || {
        left -= ends.iter().map(|(a, _)| a.poll().len()).sum::<usize>();
        left == 0
    });
    for (seed, (to, _)) in (0..).zip(&regions) {
        check(to, 0, 0, 1 << 20, seed);
    }
    let numbers: std::collections::HashSet<_> = ends.iter().map(|(a, _)| a.qp.number()).collect();
    assert_eq!(numbers.len(), 16);
}

#[test]
fn several_threads_drive_one_device() {
    let p = pair();
    let (from, to) = (p.b.memory(128 << 20), p.a.memory(128 << 20));
    fill(&from, 9);
    for part in 0..128 {
        p.a.post(
            part,
            Opcode::Read,
            vec![slice(&to, part << 20, 1 << 20)],
            Some(from.remote(part << 20, 1 << 20).unwrap()),
        );
    }
    let done = std::sync::Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for device in [&p.a.device, &p.b.device, &p.a.device, &p.b.device] {
            let (p, done) = (&p, &done);
            scope.spawn(move || {
                drive(&[device], || {
                    let mut done = done.lock().unwrap();
                    p.a.cq.poll(&mut done, 1000);
                    done.len() == 128
                });
            });
        }
    });
    assert!(
        done.into_inner().unwrap().iter().zip(0..).all(|(c, id)| c.status == CompletionStatus::Success && c.id == id)
    );
    check(&to, 0, 0, 128 << 20, 9);
}

#[test]
fn an_armed_queue_wakes_who_waits_for_the_device() {
    let p = pair();
    let (from, to) = (p.b.memory(4096), p.a.memory(4096));
    p.a.post(1, Opcode::Read, vec![slice(&to, 0, 4096)], Some(from.remote(0, 4096).unwrap()));
    p.a.cq.arm();
    assert!(p.a.poll().is_empty());
    // Another thread does the work of both devices until the completion is there, and nothing after it.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut told = false;
            drive(&[&p.b.device], || {
                if !told && wait(&[&p.a.device], Duration::from_millis(1)) {
                    p.a.device.progress();
                    // What is left is the event of the armed queue alone.
                    told = wait(&[&p.a.device], Duration::ZERO);
                }
                told
            });
        });
    });
    assert_eq!(p.a.poll().len(), 1);
    p.a.device.progress();
    assert!(!wait(&[&p.a.device], Duration::ZERO), "progress has dealt with it");
}

/// What the first hundreds of megabytes are used for: the data sender tries its choices and then stays with one, and
/// every byte arrives while it changes between streams.
#[test]
fn a_connection_finds_out_how_to_send_and_the_next_one_knows() {
    const LEN: u64 = 64 << 20;
    let endpoints = [Endpoint::new("127.0.0.1"), Endpoint::new("127.0.0.1")];
    let (a, b) = (endpoints[0].end(), endpoints[1].end());
    connect(&a, &b);
    let (from, to) = (b.memory(LEN), a.memory(LEN));
    let settled = |end: &End| format!("{:?}", end.qp).contains("settled: true");
    assert!(!settled(&b));
    for round in 0..200 {
        fill(&from, round);
        a.post(round, Opcode::Read, vec![slice(&to, 0, LEN)], Some(from.remote(0, LEN).unwrap()));
        success(&completion(&a, &b), round, Opcode::Read, LEN);
        check(&to, 0, 0, LEN, round);
        if settled(&b) {
            break;
        }
    }
    assert!(settled(&b), "{:?}", b.qp);
    assert!(!settled(&a), "it has sent nothing");
    let (c, d) = (endpoints[0].end(), endpoints[1].end());
    connect(&c, &d);
    assert!(settled(&d), "the same device knows the peer's address");
}

/// `cargo test --release -p towline-verbs --test tcp -- --ignored --nocapture binding`
#[test]
#[ignore = "prints a time; for a quiet machine"]
fn binding_a_window_takes_how_long() {
    let p = pair();
    let region = p.b.memory(1 << 20);
    let mut rounds: Vec<_> = (0..21)
        .map(|_| {
            let start = std::time::Instant::now();
            for at in 0..10_000 {
                let window = region.bind(&p.b.qp, at, 100).unwrap();
                assert!(window.invalidate());
            }
            start.elapsed() / 10_000
        })
        .collect();
    rounds.sort();
    println!("bind, invalidate and drop: {:?} in the median, {:?} at best", rounds[10], rounds[0]);
    assert!(rounds[10] < Duration::from_micros(10));
}
