//! Peers that do not keep to the protocol, and what else comes to a port: nothing is lost by it, and others are served.

#![allow(clippy::unwrap_used)] // also in the helpers of tests

mod common;

use common::*;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};
use towline::{DType, Endpoint, ErrorKind, Gone, Limits, Paths, PutOptions, Ticket};
use towline_control::preface::{Preface, Purpose};
use towline_control::wire::{
    Cancel, Frame, Get, GetFlags, Outcome, RefuseCode, Reject, RejectCode, Target, Versions, Watermark,
};

/// What the producer's region holds from its start.
fn region(len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    fill(1, &mut bytes);
    bytes
}

fn answering(granting: Granting) -> Producer {
    Producer::start(session_config(), move |_| Answer::Grant(granting.clone()))
}

// Producers.

#[test]
fn a_producer_made_by_hand_that_keeps_to_the_rules_is_understood() {
    let consumer = tcp_endpoint(4 * MIB);
    let producer = answering(Granting::eager(b"within the grant"));
    let payload = consumer.get((&producer.address, "key"), LONG).unwrap();
    assert_eq!(payload.part(0).unwrap().bytes(), b"within the grant");
    drop(payload);
    assert_eq!(producer.outcome(), Outcome::Delivered);
    let producer = answering(Granting::rendezvous(100_000));
    let payload = consumer.get((&producer.address, "key"), LONG).unwrap();
    assert!(payload.part(0).unwrap().bytes() == region(100_000));
    assert_eq!(producer.outcome(), Outcome::Delivered);
    drop(payload);
    assert_whole(&consumer);
}

#[test]
fn lengths_that_do_not_fit_are_refused_and_the_producer_is_told() {
    let good = Granting::rendezvous(1000);
    let eager = Granting::eager(&[7; 1000]);
    let two = layout(&[("a", DType::U8, &[600], 600), ("b", DType::U8, &[400], 400)]);
    let cases: Vec<(&str, Granting)> = vec![
        ("a total below the layout's", Granting { total: 999, watermark: 999, ..good.clone() }),
        ("a total above the layout's", Granting { total: 1001, ..good.clone() }),
        ("a watermark beyond the total", Granting { watermark: 1001, ..good.clone() }),
        ("a segment too short", Granting { segments: vec![(0, 999)], ..good.clone() }),
        ("a segment too long", Granting { segments: vec![(0, 1001)], ..good.clone() }),
        ("a segment too many", Granting { segments: vec![(0, 1000), (1000, 1)], ..good.clone() }),
        ("one segment for two parts", Granting { layout: two.clone(), ..good.clone() }),
        ("segments in another order", Granting { layout: two, segments: vec![(600, 400), (0, 600)], ..good.clone() }),
        ("fewer bytes than announced", Granting { eager: vec![7; 999], ..eager.clone() }),
        ("more bytes than announced", Granting { eager: vec![7; 1001], ..eager.clone() }),
        ("no bytes at all", Granting { eager: Vec::new(), ..eager.clone() }),
        ("a layout that is none", Granting { layout: vec![0xff; 40], ..good.clone() }),
        ("an empty layout", Granting { layout: Vec::new(), ..good.clone() }),
        ("bytes behind the layout", Granting { layout: [&good.layout[..], b"x"].concat(), ..good.clone() }),
        (
            "a shape that does not give the length",
            Granting { layout: layout(&[("bytes", DType::F32, &[1000], 1000)]), ..good.clone() },
        ),
        (
            "lengths that overflow together",
            Granting {
                layout: layout(&[("a", DType::U8, &[u64::MAX], u64::MAX), ("b", DType::U8, &[1001], 1001)]),
                ..good.clone()
            },
        ),
    ];
    let consumer = tcp_endpoint(MIB);
    for (name, granting) in cases {
        let producer = answering(granting);
        let error = consumer.get((&producer.address, "key"), LONG).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::LayoutMismatch { .. }), "{name}: {error}");
        assert!(error.to_string().starts_with("get: "), "{error}");
        assert_eq!(producer.outcome(), Outcome::Corrupt, "{name}");
        assert_whole(&consumer);
    }
}

/// A ticket as the producer made by hand would have made it.
fn ticket(producer: &Producer, layout: &[u8]) -> Ticket {
    let mut bytes = vec![1];
    bytes.extend([0xb0; 16]);
    bytes.extend(producer.incarnation);
    bytes.extend(0u32.to_le_bytes());
    bytes.extend(1u32.to_le_bytes());
    bytes.extend([1, producer.address.len() as u8]);
    bytes.extend(producer.address.as_bytes());
    bytes.extend((layout.len() as u32).to_le_bytes());
    bytes.extend(layout);
    bytes.extend(crc32c::crc32c(&bytes).to_le_bytes());
    Ticket::from_bytes(&bytes).unwrap()
}

#[test]
fn another_layout_than_the_tickets_is_refused() {
    let consumer = tcp_endpoint(MIB);
    let producer = answering(Granting::rendezvous(1000));
    let true_one = ticket(&producer, &Granting::rendezvous(1000).layout);
    assert!(consumer.get(&true_one, LONG).unwrap().part(0).unwrap().bytes() == region(1000));
    assert_eq!(producer.outcome(), Outcome::Delivered);
    for other in [
        Granting::rendezvous(999).layout,
        layout(&[("other", DType::U8, &[1000], 1000)]),
        layout(&[("bytes", DType::I8, &[1000], 1000)]),
        layout(&[("bytes", DType::U8, &[10, 100], 1000)]),
    ] {
        let error = consumer.get(ticket(&producer, &other), LONG).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::LayoutMismatch { .. }), "{error}");
        assert_eq!(producer.outcome(), Outcome::Corrupt);
    }
    assert_whole(&consumer);
}

#[test]
fn an_announced_length_takes_no_memory_before_it_is_checked() {
    let consumer = tcp_endpoint(MIB);
    let len = 1 << 60;
    let huge = Granting {
        layout: layout(&[("bytes", DType::U8, &[len], len)]),
        total: len,
        watermark: len,
        segments: vec![(0, len)],
        ..Granting::eager(&[])
    };
    let producer = answering(huge);
    let error = consumer.get((&producer.address, "key"), LONG).unwrap_err();
    assert_eq!(error.kind(), &ErrorKind::PoolTooSmall { need: len, pool: MIB });
    assert_eq!(producer.outcome(), Outcome::Failed);
    assert_whole(&consumer);
}

#[test]
fn keys_that_open_nothing_fail_the_transfer_after_some_tries() {
    let consumer = tcp_endpoint(4 * MIB);
    let wrong = Granting { key_shift: 1, ..Granting::rendezvous(100_000) };
    let beyond = Granting { segments: vec![(REGION - 100, 100_000)], ..Granting::rendezvous(100_000) };
    for granting in [wrong, beyond] {
        let producer = answering(granting);
        let started = Instant::now();
        let error = consumer.get((&producer.address, "key"), LONG).unwrap_err();
        let ErrorKind::TransferFailed { status, tries, .. } = error.kind() else { panic!("{error}") };
        assert!(status.contains("remote access error") && *tries > 1, "{error}");
        assert!(started.elapsed() < 2 * SLACK, "{:?}", started.elapsed());
        assert!(error.can_retry());
        assert_whole(&consumer);
    }
}

#[test]
fn a_transfer_that_fails_once_is_tried_again() {
    let consumer = tcp_endpoint(4 * MIB);
    let producer = Producer::start(session_config(), |asked| {
        let key_shift = u64::from(asked.before == 0);
        Answer::Grant(Granting { key_shift, ..Granting::rendezvous(100_000) })
    });
    let payload = consumer.get((&producer.address, "key"), LONG).unwrap();
    assert!(payload.part(0).unwrap().bytes() == region(100_000));
    assert_eq!(payload.info().retries, 1);
    drop(payload);
    assert_whole(&consumer);
}

#[test]
fn a_lease_that_is_over_before_the_bytes_are_there_delivers_nothing() {
    let consumer = tcp_endpoint(4 * MIB);
    let short = Granting { lease: Duration::from_millis(1), ..Granting::rendezvous(REGION) };
    let future = Granting { echo_shift: 3_600_000_000_000, ..Granting::rendezvous(REGION) };
    let past = Granting { echo_shift: -40_000_000_000, ..Granting::rendezvous(REGION) };
    for (name, granting) in [("too short", short), ("from the future", future), ("long over", past)] {
        let producer = answering(granting);
        let error = consumer.get((&producer.address, "key"), LONG).unwrap_err();
        assert_eq!(error.kind(), &ErrorKind::LeaseExpired, "{name}");
        assert!(error.can_retry());
        assert_ne!(producer.outcome(), Outcome::Delivered, "{name}");
        assert_whole(&consumer);
    }
}

#[test]
fn refusals_are_errors_with_their_cause() {
    let consumer = tcp_endpoint(MIB);
    let cases = [
        (RefuseCode::Gone, 1, ErrorKind::Gone(Gone::Consumed)),
        (RefuseCode::Gone, 2, ErrorKind::Gone(Gone::Expired)),
        (RefuseCode::Gone, 3, ErrorKind::Gone(Gone::Removed)),
        (RefuseCode::Gone, 4, ErrorKind::Gone(Gone::Replaced)),
        (RefuseCode::Gone, 99, ErrorKind::Gone(Gone::Unknown)),
        (RefuseCode::Removed, 0, ErrorKind::Gone(Gone::Removed)),
        (RefuseCode::TooManyLeases, 5, ErrorKind::Busy { what: "leases at that producer", limit: 5 }),
    ];
    for (code, have, expected) in cases {
        let producer = Producer::start(session_config(), move |_| Answer::Refuse(code, have));
        let error = consumer.get((&producer.address, "key"), LONG).unwrap_err();
        assert_eq!(error.kind(), &expected);
    }
    for code in [RefuseCode::NotAllowed, RefuseCode::Failed, RefuseCode::Closing, RefuseCode::Unknown(4711)] {
        let producer = Producer::start(session_config(), move |_| Answer::Refuse(code, 0));
        let error = consumer.get((&producer.address, "key"), LONG).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::PeerLost { .. }), "{error}");
    }
    assert_whole(&consumer);
}

#[test]
fn a_producer_that_hangs_up_is_tried_again_and_then_lost() {
    let consumer = tcp_endpoint(MIB);
    let producer = Producer::start(session_config(), |_| Answer::HangUp);
    let started = Instant::now();
    let error = consumer.get((&producer.address, "key"), LONG).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::PeerLost { .. }), "{error}");
    assert!(started.elapsed() < SLACK && consumer.stats().retries > 1);
    assert_tells(&error, "get");
    let producer = Producer::start(session_config(), |asked| {
        if asked.before < 2 { Answer::HangUp } else { Answer::Grant(Granting::eager(b"at last")) }
    });
    let payload = consumer.get((&producer.address, "key"), LONG).unwrap();
    assert_eq!((payload.part(0).unwrap().bytes(), payload.info().retries), (&b"at last"[..], 2));
}

#[test]
fn bytes_that_are_no_frames_break_the_protocol() {
    let mut unknown = Vec::new();
    Frame::Cancel(Cancel { request: 1 }).encode(&mut unknown).unwrap();
    let mut damaged = unknown.clone();
    *damaged.last_mut().unwrap() ^= 1;
    let mut misplaced = Vec::new();
    let versions = Versions::SUPPORTED;
    let reject = Reject { code: RejectCode::Busy, versions, text: "late" };
    Frame::Reject(reject).encode(&mut misplaced).unwrap();
    let consumer = tcp_endpoint(MIB);
    for (number, bytes) in
        [vec![0; 64], b"HTTP/1.1 200 OK\r\n\r\n".to_vec(), damaged, misplaced].into_iter().enumerate()
    {
        let producer = Producer::start(session_config(), move |_| Answer::Bytes(bytes.clone()));
        let started = Instant::now();
        let error = consumer.get((&producer.address, "key"), LONG).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Protocol { .. } | ErrorKind::PeerLost { .. }),
            "bytes {number}: {error}"
        );
        assert!(started.elapsed() < SLACK);
        assert_whole(&consumer);
    }
}

#[test]
fn grants_that_nobody_asked_for_are_given_back_unused() {
    let consumer = tcp_endpoint(MIB);
    let producer = Producer::start(session_config(), |_| Answer::Elsewhere(Granting::rendezvous(1000)));
    let error = consumer.get((&producer.address, "key"), Duration::from_millis(300)).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::TimedOut { .. }), "{error}");
    assert_eq!(producer.outcome(), Outcome::Cancelled);
    // One that comes twice is used once.
    let producer = Producer::start(session_config(), |_| Answer::Twice(Granting::eager(b"twice")));
    let payload = consumer.get((&producer.address, "key"), LONG).unwrap();
    assert_eq!(payload.part(0).unwrap().bytes(), b"twice");
    drop(payload);
    assert_whole(&consumer);
}

// Consumers.

#[test]
fn a_consumer_made_by_hand_reads_by_its_lease() {
    let producer = tcp_endpoint(MIB);
    let spec = Spec::of([part("a", DType::U8, &[40_000], 1), part("b", DType::U8, &[30_000], 2)]);
    spec.put(&producer, "key", &PutOptions::default()).unwrap();
    let mut consumer = Consumer::connect(&producer.address(), session_config()).open();
    let granted = consumer.lease("key");
    assert_eq!((granted.total, granted.watermark, granted.segments.len()), (70_000, 70_000, 2));
    for (segment, part) in granted.segments.iter().zip(&spec.parts) {
        assert!(consumer.read(*segment).unwrap() == part.bytes());
    }
    consumer.close(&[(granted.lease, Outcome::Delivered)]);
    assert_whole(&producer);
}

#[test]
fn requests_that_come_twice_late_or_for_nothing_change_nothing() {
    let producer = tcp_endpoint(MIB);
    Spec::bytes(64 * KIB, 1).put(&producer, "key", &for_consumers(3)).unwrap();
    let mut consumer = Consumer::connect(&producer.address(), session_config()).open();
    let get = |request| {
        let (target, flags) = (Target::Key(b"later"), GetFlags::empty());
        Frame::Get(Get { request, target, wait_us: 60_000_000, sent_at: 1, max_eager: 0, flags, provider: 3 })
    };
    // The same request twice waits once.
    consumer.send(&get(1001));
    consumer.send(&get(1001));
    consumer.send(&Frame::Cancel(Cancel { request: 999 }));
    consumer.close(&[(12345, Outcome::Delivered), (12345, Outcome::Failed), (u64::MAX, Outcome::Unknown(200))]);
    consumer.send(&Frame::Watermark(Watermark { lease: 77, watermark: 1 }));
    consumer.keep_alive(5, &[77, 78]);
    assert!(matches!(consumer.hear().unwrap(), Said::KeptAlive(unknown) if unknown == [77, 78]));
    assert_eq!(producer.stats().waiting, 1);
    Spec::bytes(1000, 2).put(&producer, "later", &for_consumers(3)).unwrap();
    let granted = consumer.hear().unwrap().granted();
    assert_eq!(granted.request, 1001);
    // Closes that come twice count once.
    consumer.close(&[(granted.lease, Outcome::Delivered), (granted.lease, Outcome::Delivered)]);
    consumer.close(&[(granted.lease, Outcome::Delivered)]);
    consumer.keep_alive(6, &[granted.lease]);
    assert!(matches!(consumer.hear().unwrap(), Said::KeptAlive(unknown) if unknown == [granted.lease]));
    // A cancel that comes after its grant gives the lease back, unused; a close after that is too late.
    consumer.send(&get(1002));
    let unused = consumer.hear().unwrap().granted();
    consumer.send(&Frame::Cancel(Cancel { request: 1002 }));
    consumer.send(&Frame::Cancel(Cancel { request: 1002 }));
    consumer.close(&[(unused.lease, Outcome::Delivered)]);
    // Of three consumers, one has had it.
    let real = tcp_endpoint(MIB);
    for _ in 0..2 {
        Spec::bytes(1000, 2).check(&real.get((producer.address(), "later"), LONG).unwrap());
    }
    until("three to have had it", || producer.stats().payloads == 1 && producer.stats().leases == 0);
}

#[test]
fn a_get_that_is_cancelled_is_not_granted() {
    let producer = tcp_endpoint(MIB);
    let mut consumer = Consumer::connect(&producer.address(), session_config()).open();
    let request = consumer.ask(Target::Key(b"key"), 0, GetFlags::empty());
    producer.wait_for_consumers("key", 1, LONG).unwrap();
    consumer.send(&Frame::Cancel(Cancel { request }));
    until("it to be forgotten", || producer.stats().waiting == 0);
    Spec::bytes(1000, 1).put(&producer, "key", &PutOptions::default()).unwrap();
    assert_eq!(producer.stats().leases, 0);
    Spec::bytes(1000, 1).check(&tcp_endpoint(MIB).get((producer.address(), "key"), LONG).unwrap());
    assert_whole(&producer);
}

#[test]
fn a_slot_that_was_never_used_or_is_used_again_is_gone() {
    let producer = tcp_endpoint(MIB);
    let mut consumer = Consumer::connect(&producer.address(), session_config()).open();
    let mut refused = |slot, generation| {
        consumer.ask(Target::Slot { slot, generation }, 0, GetFlags::empty());
        match consumer.hear().unwrap() {
            Said::Refused(_, code, have) => (code, have),
            other => panic!("{other:?}"),
        }
    };
    for (slot, generation) in [(0, 0), (0, 1), (u32::MAX, u32::MAX), (1 << 20, 1)] {
        assert_eq!(refused(slot, generation), (RefuseCode::Gone, 0));
    }
    for _ in 0..5 {
        let ticket = Spec::bytes(100, 1).put(&producer, "key", &PutOptions::default()).unwrap();
        producer.remove(&ticket).unwrap();
    }
    assert_eq!(refused(0, 1).0, RefuseCode::Gone);
    assert_whole(&producer);
}

#[test]
fn a_lease_that_nobody_keeps_alive_ends_and_the_payload_is_kept_for_others() {
    let lease = Duration::from_millis(300);
    let options = Way::Tcp.options().pool(MIB).lease(lease);
    let producer = options.build().unwrap();
    let spec = Spec::bytes(MIB, 1);
    let ticket = spec.put(&producer, "key", &PutOptions::default()).unwrap();
    let asked = Instant::now();
    let mut silent = Consumer::connect(&producer.address(), session_config()).open();
    let granted = silent.lease("key");
    // Kept alive, it lasts.
    let started = Instant::now();
    let mut last = asked;
    while started.elapsed() < 3 * lease {
        silent.keep_alive(started.elapsed().as_nanos() as u64, &[granted.lease]);
        let Said::KeptAlive(unknown) = silent.hear().unwrap() else { panic!("no answer") };
        let gap = last.elapsed();
        last = Instant::now();
        if !unknown.is_empty() {
            assert!(gap >= lease / 2, "a lease of {lease:?} ended {gap:?} after it was kept alive");
            return; // this machine stood still for as long as a lease lasts: nothing to be seen
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(producer.stats().leases, 1);
    until("it to end", || producer.stats().leases == 0);
    silent.keep_alive(1, &[granted.lease]);
    assert!(matches!(silent.hear().unwrap(), Said::KeptAlive(unknown) if unknown == [granted.lease]));
    // A close that comes too late says nothing new, but for a delivery: `impostors` has that.
    silent.close(&[(granted.lease, Outcome::Failed)]);
    silent.keep_alive(2, &[]);
    silent.hear().unwrap();
    assert_eq!(producer.stats().payloads, 1);
    spec.check(&options.build().unwrap().get(&ticket, LONG).unwrap());
    assert_whole(&producer);
}

#[test]
fn a_consumer_that_leaves_without_a_word_gives_back_what_it_held() {
    let producer = tcp_endpoint(4 * MIB);
    for number in 0..8u64 {
        let key = format!("{number}");
        Spec::bytes(256 * KIB, number).put(&producer, &key, &PutOptions::default()).unwrap();
        let mut consumer = Consumer::connect(&producer.address(), session_config()).open();
        consumer.lease(&key);
        consumer.ask(Target::Key(b"never"), 0, GetFlags::empty());
        producer.wait_for_consumers("never", 1, LONG).unwrap();
        drop(consumer);
        until("it to be forgotten", || producer.stats().leases == 0 && producer.stats().waiting == 0);
    }
    assert_eq!(producer.stats().payloads, 8, "nothing was delivered");
    for number in 0..8 {
        producer.remove_key(format!("{number}"));
    }
    assert_whole(&producer);
}

#[test]
fn a_peer_that_reads_nothing_is_no_burden() {
    let producer = tcp_endpoint(4 * MIB);
    let small = Spec::bytes(30 * KIB, 1);
    small.put(&producer, "key", &for_consumers(1_000_000)).unwrap();
    let stuck = Consumer::connect(&producer.address(), session_config()).open();
    // Asks for 600 MB of answers and takes none.
    let mut frames = Vec::new();
    for request in 10_000..30_000u64 {
        let (target, flags) = (Target::Key(b"key"), GetFlags::empty());
        let get = Get { request, target, wait_us: 1, sent_at: 1, max_eager: u32::MAX, flags, provider: 3 };
        Frame::Get(get).encode(&mut frames).unwrap();
    }
    let own = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap().trim().to_owned();
        line.trim_end_matches(" kB").parse::<u64>().unwrap()
    };
    let before = own();
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| stuck.send_bytes_within(&frames, Duration::from_secs(3)));
        let consumer = tcp_endpoint(MIB);
        for _ in 0..50 {
            small.check(&consumer.get((producer.address(), "key"), LONG).unwrap());
        }
        asking.join().unwrap();
    });
    let grown = own().saturating_sub(before);
    assert!(grown < 100 << 10, "{grown} KiB more for one peer");
    drop(stuck);
    until("it to be forgotten", || producer.stats().links <= 1 && producer.stats().leases == 0);
}

// Strangers.

fn stranger(endpoint: &Endpoint, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(endpoint.address()).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    let _reset = stream.write_all(bytes);
    let _reset = stream.shutdown(std::net::Shutdown::Write);
    let mut heard = Vec::new();
    let _reset_or_end = stream.read_to_end(&mut heard);
    heard
}

#[track_caller]
fn assert_serves(producer: &Endpoint) {
    let spec = Spec::bytes(100 * KIB, 3);
    let ticket = spec.put(producer, "served", &PutOptions::default()).unwrap();
    spec.check(&tcp_endpoint(MIB).get(&ticket, LONG).unwrap());
}

#[test]
fn garbage_on_the_port_is_dropped_and_others_are_served() {
    let producer = tcp_endpoint(MIB);
    let control = Preface::new(Purpose::Control).encode();
    let mut inputs: Vec<Vec<u8>> = vec![
        Vec::new(),
        b"\n".to_vec(),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec(),
        b"SSH-2.0-OpenSSH_9.6\r\n".to_vec(),
        vec![0; 4096],
        vec![0xff; 100_000],
        control[..31].to_vec(),
        control.to_vec(),
    ];
    for at in 0..Preface::LEN {
        let mut damaged = control.to_vec();
        damaged[at] ^= 0x40;
        inputs.push(damaged);
    }
    for tail in [&b"towl"[..], &[0; 16], &[0xff; 64], b"towl\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"] {
        inputs.push([&control[..], tail].concat());
    }
    for input in &inputs {
        let heard = stranger(&producer, input);
        assert!(heard.len() < 4096, "{} bytes for garbage", heard.len());
    }
    until("them all to be gone", || producer.stats().links == 0);
    assert_serves(&producer);
    assert_whole(&producer);
}

#[test]
fn frames_that_have_no_place_or_are_damaged_end_their_connection_only() {
    let producer = tcp_endpoint(4 * MIB);
    let real = tcp_endpoint(MIB);
    assert_serves(&producer);
    let granted = {
        // Frames that a consumer never sends, and frames of which a byte is wrong.
        let mut frames: Vec<Vec<u8>> = Vec::new();
        let mut add = |frame: Frame<'_>| {
            let mut bytes = Vec::new();
            frame.encode(&mut bytes).unwrap();
            frames.push(bytes);
        };
        add(Frame::Cancel(Cancel { request: 1 }));
        add(Frame::Watermark(Watermark { lease: 1, watermark: u64::MAX }));
        frames
    };
    let mut seeds = words(5);
    for round in 0..60u64 {
        let consumer = Consumer::connect(&producer.address(), session_config()).open();
        let mut bytes = granted[round as usize % granted.len()].clone();
        let at = seeds.next().unwrap() as usize % bytes.len();
        bytes[at] ^= 1 << (round % 8);
        consumer.send_bytes(&bytes);
        drop(consumer);
        if round.is_multiple_of(20) {
            let spec = Spec::bytes(100 * KIB, round);
            let ticket = spec.put(&producer, "key", &PutOptions::default()).unwrap();
            spec.check(&real.get(&ticket, LONG).unwrap());
        }
    }
    until("them to be gone", || producer.stats().links <= 1);
    assert_serves(&producer);
}

#[test]
fn a_second_hello_and_other_frames_out_of_order_are_refused() {
    let producer = tcp_endpoint(MIB);
    // What this end of a session sends first, recorded by having it sent to a listener of ours.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let recording = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut bytes = vec![0; 4096];
        let len = stream.read(&mut bytes).unwrap();
        bytes.truncate(len);
        bytes
    });
    let _refused = Consumer::try_connect(&address, session_config());
    let opening = recording.join().unwrap();
    let hello = &opening[Preface::LEN..];
    let twice = [&opening[..], hello].concat();
    let heard = stranger(&producer, &twice);
    assert!(!heard.is_empty(), "the first was answered");
    let mut cancel = Vec::new();
    Frame::Cancel(Cancel { request: 1 }).encode(&mut cancel).unwrap();
    let before = [&opening[..Preface::LEN], &cancel].concat();
    stranger(&producer, &before);
    for cut in (0..opening.len()).step_by(7) {
        stranger(&producer, &opening[..cut]);
    }
    for (bit, at) in (0..opening.len()).enumerate() {
        let mut damaged = opening.clone();
        damaged[at] ^= 1 << (bit % 8);
        stranger(&producer, &damaged);
    }
    until("them all to be gone", || producer.stats().links == 0);
    assert_serves(&producer);
    assert_whole(&producer);
}

#[test]
fn connections_that_say_nothing_keep_nobody_out() {
    let producer = tcp_endpoint(MIB);
    let early = tcp_endpoint(MIB);
    let spec = Spec::bytes(100 * KIB, 1);
    let ticket = spec.put(&producer, "key", &for_consumers(3)).unwrap();
    spec.check(&early.get(&ticket, LONG).unwrap());
    // More than any limit on those that have not said what they are for.
    let silent: Vec<TcpStream> = (0..400).map(|_| TcpStream::connect(producer.address()).unwrap()).collect();
    let half: Vec<TcpStream> = (0..50)
        .map(|_| {
            let mut stream = TcpStream::connect(producer.address()).unwrap();
            let _dropped = stream.write_all(&Preface::new(Purpose::Control).encode()[..20]);
            stream
        })
        .collect();
    let started = Instant::now();
    spec.check(&early.get(&ticket, LONG).unwrap());
    spec.check(&tcp_endpoint(MIB).get(&ticket, LONG).unwrap());
    assert!(started.elapsed() < SLACK, "{:?}", started.elapsed());
    drop((silent, half));
    assert_whole(&producer);
}

#[test]
fn sessions_that_agree_on_nothing_are_ended() {
    let producer = Way::Tcp.options().pool(MIB).handshake_timeout(Duration::from_millis(300)).build().unwrap();
    // Established, but no queue pair is ever offered; and one that never says its Hello.
    let mut idle = Consumer::connect(&producer.address(), session_config());
    let mut mute = TcpStream::connect(producer.address()).unwrap();
    mute.set_read_timeout(Some(LONG)).unwrap();
    mute.write_all(&Preface::new(Purpose::Control).encode()).unwrap();
    let started = Instant::now();
    loop {
        match idle.hear() {
            Ok(_) => {}
            Err(error) => {
                assert!(!error.to_string().contains("timed out"), "{error}");
                break;
            }
        }
    }
    let mut heard = Vec::new();
    let _reset_or_end = mute.read_to_end(&mut heard);
    assert!(started.elapsed() < SLACK, "{:?}", started.elapsed());
    assert_serves(&producer);
}

#[test]
fn a_flood_of_connections_that_come_and_go_is_survived() {
    let producer = tcp_endpoint(MIB);
    let consumer = tcp_endpoint(MIB);
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (producer, stop) = (&producer, &stop);
        for thread in 0..2u8 {
            scope.spawn(move || {
                for number in 0..600u32 {
                    if stop.load(std::sync::atomic::Ordering::Relaxed) {
                        return;
                    }
                    let Ok(mut stream) = TcpStream::connect(producer.address()) else { continue };
                    let _reset = match (u32::from(thread) + number) % 3 {
                        0 => Ok(()),
                        1 => stream.write_all(&Preface::new(Purpose::Control).encode()),
                        _ => stream.write_all(&[thread; 100]),
                    };
                }
            });
        }
        for round in 0..30 {
            let spec = Spec::bytes(100 * KIB, round);
            let ticket = spec.put(producer, "key", &PutOptions::default()).unwrap();
            spec.check(&consumer.get(&ticket, LONG).unwrap());
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    until("them to be gone", || producer.stats().links == 1);
    assert_serves(&producer);
    assert_whole(&producer);
}

#[test]
fn no_more_sessions_than_the_limit_and_the_rest_go_on() {
    let mut limits = Limits::default();
    limits.links = 8;
    let producer =
        Endpoint::builder().pool_size(MIB).allow_paths(Paths::only(towline::Path::Tcp)).limits(limits).build().unwrap();
    let real = tcp_endpoint(MIB);
    let spec = Spec::bytes(100 * KIB, 1);
    let ticket = spec.put(&producer, "key", &for_consumers(100)).unwrap();
    spec.check(&real.get(&ticket, LONG).unwrap());
    let mut others: Vec<Consumer> =
        (0..7).map(|_| Consumer::connect(&producer.address(), session_config()).open()).collect();
    assert_eq!(producer.stats().links, 8);
    assert!(Consumer::try_connect(&producer.address(), session_config()).is_err());
    spec.check(&real.get(&ticket, LONG).unwrap());
    others.pop();
    until("one to be gone", || producer.stats().links == 7);
    Consumer::connect(&producer.address(), session_config()).open();
}

#[test]
fn a_consumer_that_breaks_its_queue_pair_and_comes_back_is_served() {
    let producer = tcp_endpoint(MIB);
    let spec = Spec::bytes(64 * KIB, 1);
    spec.put(&producer, "key", &for_consumers(100)).unwrap();
    let config = session_config();
    for round in 0..40 {
        let mut consumer = Consumer::connect(&producer.address(), config.clone()).open();
        let granted = consumer.lease("key");
        let segment = granted.segments[0];
        assert!(consumer.read(segment).unwrap() == spec.parts[0].bytes());
        if round % 2 == 0 {
            consumer.close(&[(granted.lease, Outcome::Failed)]);
            until("the lease to be over", || producer.stats().leases == 0);
        }
        // Comes back at once, before the end of this connection is dealt with.
        consumer.read(towline_verbs::RemoteSlice { rkey: !segment.rkey, ..segment }).unwrap_err();
    }
    until("it to be gone", || producer.stats().leases == 0);
}
