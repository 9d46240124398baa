//! Peers that mean harm, peers that are clumsy, and a machine that has run out of something: nothing here may panic, end
//! an honest peer's work, or leave anything behind (I1, I2, I7, I9).

#![allow(clippy::unwrap_used)] // also in the helpers of tests

mod common;

use common::*;
use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};
use towline::{DType, Endpoint, ErrorKind, Limits, Part, Path, Paths, PutOptions};
use towline_control::address::UnixName;
use towline_control::exchange::Connection;
use towline_control::preface::{Preface, Purpose};
use towline_control::socket::SocketName;
use towline_control::wire::{
    Close, CloseEntry, Frame, Get, GetFlags, Grant, GrantFlags, KeepAlive, LeaseId, Outcome, QueuePair as Offer,
    Target, Watermark,
};

/// A get of `key` as bytes on the wire.
fn get_frame(request: u64, key: &str, max_eager: u32) -> Vec<u8> {
    let get = Get {
        request,
        target: Target::Key(key.as_bytes()),
        wait_us: LONG.as_micros() as u64,
        sent_at: request,
        max_eager,
        flags: GetFlags::empty(),
        provider: TCP,
    };
    let mut bytes = Vec::new();
    Frame::Get(get).encode(&mut bytes).unwrap();
    bytes
}

/// What a grant made by hand says, but for its number.
fn grant_frame(request: u64, lease: u64) -> Vec<u8> {
    let layout = layout(&[("x", DType::U8, &[1], 1)]);
    let grant = Grant {
        request,
        lease,
        slot: 0,
        generation: 1,
        echo: 0,
        lease_us: 1_000_000,
        watermark: 1,
        total_len: 1,
        provider: TCP,
        flags: GrantFlags::empty(),
        layout: &layout,
        segments: &[],
        eager: &[7],
    };
    let mut bytes = Vec::new();
    Frame::Grant(grant).encode(&mut bytes).unwrap();
    bytes
}

/// An honest consumer still gets what is put.
#[track_caller]
fn assert_serves(producer: &Endpoint, consumer: &Endpoint) {
    let spec = Spec::bytes(100_000, 99);
    let ticket = spec.put(producer, "honest", &PutOptions::default()).unwrap();
    spec.check(&consumer.get(&ticket, LONG).unwrap());
    let small = Spec::bytes(100, 98);
    let ticket = small.put(producer, "honest", &PutOptions::default()).unwrap();
    small.check(&consumer.get(&ticket, LONG).unwrap());
}

fn connected(endpoint: &Endpoint) -> TcpStream {
    TcpStream::connect(endpoint.address()).unwrap()
}

// What is sent in answers.

#[test]
fn a_burst_of_gets_does_not_break_the_link_over_the_bytes_it_asks_for() {
    const GETS: u64 = 700;
    let producer = endpoint(64 * MIB);
    let bytes = vec![5; 32 << 10];
    for key in 0..GETS {
        producer.put(format!("{key}"), [Part::bytes("x", DType::U8, &[32 << 10], &bytes)]).unwrap();
    }
    let mut consumer = Consumer::connect(&producer.address(), session_config()).open();
    let burst: Vec<u8> = (0..GETS).flat_map(|key| get_frame(key, &key.to_string(), 1 << 20)).collect();
    consumer.send_bytes(&burst);
    let mut granted = Vec::new();
    for _ in 0..GETS {
        let grant = consumer.hear().expect("the link lives").granted();
        granted.push((grant.lease, Outcome::Delivered));
    }
    consumer.close(&granted);
    assert_whole(&producer);
}

#[test]
fn a_put_for_many_who_wait_does_not_break_their_link() {
    const GETS: u64 = 700;
    let producer = endpoint(MIB);
    let mut consumer = Consumer::connect(&producer.address(), session_config()).open();
    let burst: Vec<u8> = (0..GETS).flat_map(|request| get_frame(request, "k", 1 << 20)).collect();
    consumer.send_bytes(&burst);
    producer.wait_for_consumers("k", GETS as usize, LONG).unwrap();
    let bytes = vec![5; 32 << 10];
    let parts = [Part::bytes("x", DType::U8, &[32 << 10], &bytes)];
    producer.put_with("k", parts, &for_consumers(GETS as u32)).unwrap();
    let mut granted = Vec::new();
    for _ in 0..GETS {
        granted.push((consumer.hear().expect("the link lives").granted().lease, Outcome::Delivered));
    }
    consumer.close(&granted);
    assert_whole(&producer);
}

#[test]
fn peers_that_take_small_frames_only_do_not_bring_the_producer_down() {
    // Each peer takes some eight descriptors of this process; an ordinary user may have 1024 at first.
    let peers_at_once = if raise_descriptors(8192) >= 8192 { 400 } else { 60 };
    let producer = endpoint(MIB);
    let mut config = session_config();
    let mut peers = Vec::new();
    for peer in 0..peers_at_once {
        config.identity.incarnation = [peer as u8, (peer >> 8) as u8, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3];
        config.limits.max_frame = 4096;
        let mut consumer = Consumer::connect(&producer.address(), config.clone());
        consumer.ask(Target::Key(b"k"), 1 << 20, GetFlags::empty());
        peers.push(consumer);
    }
    producer.wait_for_consumers("k", peers_at_once, LONG).unwrap();
    let put = || {
        let bytes = vec![5; 20 << 10];
        let parts = [Part::bytes("x", DType::U8, &[20 << 10], &bytes)];
        producer.put_with("k", parts, &for_consumers(peers_at_once as u32 + 1)).unwrap()
    };
    let ticket = std::thread::scope(|scope| {
        std::thread::Builder::new().stack_size(128 << 10).spawn_scoped(scope, put).unwrap().join().unwrap()
    });
    drop(peers);
    let consumer = endpoint(MIB);
    assert_eq!(consumer.get(&ticket, LONG).unwrap().part(0).unwrap().bytes().len(), 20 << 10);
    producer.remove(&ticket).unwrap();
    assert_whole(&producer);
}

// Connections.

#[test]
fn connections_that_say_nothing_do_not_keep_others_out() {
    let (producer, consumer) = (tcp_endpoint(MIB), tcp_endpoint(MIB));
    let silent: Vec<TcpStream> = (0..300).map(|_| connected(&producer)).collect();
    let started = Instant::now();
    assert_serves(&producer, &consumer);
    assert!(started.elapsed() < Duration::from_secs(4), "it waited until the others were thrown out");
    drop(silent);
    assert_whole(&producer);
}

#[test]
fn handshakes_that_are_not_finished_do_not_keep_others_out() {
    let mut limits = Limits::default();
    limits.links = 16;
    let build = || Endpoint::builder().pool_size(MIB).allow_paths(Paths::only(Path::Tcp));
    let producer = build().limits(limits).build().unwrap();
    let consumer = build().build().unwrap();
    let half: Vec<TcpStream> = (0..20)
        .map(|_| {
            let mut stream = connected(&producer);
            stream.write_all(&Preface::new(Purpose::Control).encode()).unwrap();
            stream
        })
        .collect();
    let started = Instant::now();
    assert_serves(&producer, &consumer);
    assert!(started.elapsed() < Duration::from_secs(4), "it waited until the others were thrown out");
    drop(half);
    assert_whole(&producer);
}

#[test]
fn who_connected_while_descriptors_were_short_is_served_when_they_are_not() {
    if !alone("who_connected_while_descriptors_were_short_is_served_when_they_are_not") {
        return;
    }
    let process = Process::start(&Options::default().paths("tcp"));
    let producer = tcp_endpoint(MIB);
    let used = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
    let mut fill = Vec::new();
    let before = limit_descriptors(used + 8);
    while let Ok(file) = std::fs::File::open("/dev/null") {
        fill.push(file);
    }
    let spec = Spec::bytes(100, 1);
    spec.put(&producer, "k", &PutOptions::default()).unwrap();
    let pending = process.begin_get((producer.address(), "k"), LONG);
    assert!(pending.within(Duration::from_millis(300)).is_none(), "there is no descriptor for it");
    drop(fill);
    limit_descriptors(before);
    let started = Instant::now();
    spec.check_got(&pending.got().unwrap());
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
}

#[test]
fn data_connections_with_random_tokens_are_dropped() {
    let (producer, consumer) = (tcp_endpoint(MIB), tcp_endpoint(MIB));
    for token in 0..200u8 {
        let mut stream = connected(&producer);
        let _dropped_already = stream.write_all(&Preface::new(Purpose::Data { token: [token; 16] }).encode());
        let _dropped_already = stream.write_all(&[token; 100]);
    }
    assert_serves(&producer, &consumer);
    assert_whole(&producer);
}

// Frames that have no business.

#[test]
fn frames_about_what_is_not_theirs_change_nothing() {
    let producer = endpoint(MIB);
    let spec = Spec::bytes(100_000, 1);
    let ticket = spec.put(&producer, "k", &PutOptions::default()).unwrap();
    let mut owner = Consumer::connect(&producer.address(), session_config()).open();
    let lease = owner.lease("k");
    let mut hostile = Consumer::connect(&producer.address(), session_config()).open();
    let every: Vec<LeaseId> = (0..5000).map(LeaseId::new).collect();
    let closes: Vec<CloseEntry> = (0..2000).map(|lease| CloseEntry::new(lease, Outcome::Delivered)).collect();
    for round in 0..3 {
        hostile.send(&Frame::Close(Close { entries: &closes }));
        hostile.send(&Frame::KeepAlive(KeepAlive { sent_at: u64::MAX, leases: &every }));
        loop {
            match hostile.hear().unwrap() {
                Said::KeptAlive(unknown) => break assert_eq!(unknown.len(), every.len()),
                Said::Other => {} // the close of a lease that nobody asked for
                other => panic!("{other:?}"),
            }
        }
        hostile.send(&Frame::Watermark(Watermark { lease: lease.lease, watermark: u64::MAX }));
        hostile.send(&Frame::Watermark(Watermark { lease: lease.lease, watermark: 0 }));
        hostile.send_bytes(&grant_frame(round, round));
        hostile.send_bytes(&grant_frame(u64::MAX, u64::MAX));
    }
    hostile.ask(Target::Slot { slot: u32::MAX, generation: u32::MAX }, 0, GetFlags::VIEW);
    loop {
        match hostile.hear().unwrap() {
            Said::Refused(..) => break,
            Said::Other | Said::KeptAlive(_) => {}
            other => panic!("{other:?}"),
        }
    }
    // The owner's lease stands, and its bytes can be read.
    let bytes = owner.read(lease.segments[0]).unwrap();
    assert_eq!(hash(&bytes), hash(&spec.parts[0].bytes()));
    assert_eq!(producer.stats().leases, 1);
    // What is stolen from the owner is no use to another queue pair.
    assert!(hostile.read(lease.segments[0]).is_err());
    owner.close(&[(lease.lease, Outcome::Delivered)]);
    until("consumed", || producer.remove(&ticket).is_err());
    assert_whole(&producer);
}

#[test]
fn offers_of_queue_pairs_without_end_leave_nothing_behind() {
    if !alone("offers_of_queue_pairs_without_end_leave_nothing_behind") {
        return;
    }
    let (producer, consumer) = (tcp_endpoint(MIB), tcp_endpoint(MIB));
    assert_serves(&producer, &consumer);
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = descriptors();
    let mut hostile = Consumer::connect(&producer.address(), session_config()).open();
    let good = hostile.queue_pair_address();
    let mut refused = 0;
    for connection in 2..600u32 {
        let garbage = vec![connection as u8; (connection % 90) as usize];
        let address: &[u8] = if connection % 2 == 0 { &good } else { &garbage };
        let provider = if connection % 7 == 0 { connection as u8 } else { TCP };
        hostile.send(&Frame::QueuePairOpen(Offer { connection, provider, generation: 1, address }));
        match hostile.hear().unwrap() {
            Said::Other => refused += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(refused, 598, "each is answered");
    assert_serves(&producer, &consumer);
    drop(hostile);
    until("descriptors", || descriptors() <= before);
    assert_whole(&producer);
}

// Producers that lie.

#[test]
fn segments_at_the_end_of_the_address_space_are_an_error() {
    let mut granting = Granting::rendezvous(200_000);
    granting.layout = layout(&[("a", DType::U8, &[100_000], 100_000), ("b", DType::U8, &[100_000], 100_000)]);
    granting.segments = vec![(u64::MAX - 10, 100_000), (u64::MAX - 5, 100_000)];
    let lying = granting.clone();
    let producer = Producer::start(session_config(), move |_| Answer::Grant(lying.clone()));
    let consumer = tcp_endpoint(MIB);
    let error = consumer.get((&producer.address, "k"), Duration::from_secs(10)).unwrap_err();
    assert!(!matches!(error.kind(), ErrorKind::TimedOut { .. }), "{error}");
    assert_whole(&consumer);
    assert_serves(&tcp_endpoint(MIB), &consumer);
}

#[test]
fn keys_and_lengths_that_are_not_granted_are_an_error() {
    type Lie = fn(&mut Granting);
    let lies: [(&str, Lie); 9] = [
        ("another key", |g| g.key_shift = 1),
        ("beyond the region", |g| g.segments = vec![(REGION - 100, 100_000)]),
        ("fewer segments", |g| g.segments.clear()),
        ("more segments", |g| g.segments.push((0, 1))),
        ("another length", |g| g.segments = vec![(0, 99_999)]),
        ("another total", |g| g.total = 99_999),
        ("watermark beyond the total", |g| g.watermark = 100_001),
        ("an echo of what was not sent", |g| g.echo_shift = 1 << 40),
        ("a lease of nothing", |g| g.lease = Duration::ZERO),
    ];
    for (name, lie) in lies {
        let mut granting = Granting::rendezvous(100_000);
        lie(&mut granting);
        let producer = Producer::start(session_config(), move |_| Answer::Grant(granting.clone()));
        let consumer = tcp_endpoint(MIB);
        let started = Instant::now();
        let error = consumer.get((&producer.address, "k"), Duration::from_secs(20)).map(|_| ()).expect_err(name);
        assert!(!matches!(error.kind(), ErrorKind::TimedOut { .. }), "{name}: {error} {:?}", started.elapsed());
        assert_whole(&consumer);
    }
}

#[test]
fn bytes_in_a_grant_count_only_while_its_lease_stands() {
    let mut granting = Granting::eager(b"late");
    granting.lease = Duration::ZERO;
    let producer = Producer::start(session_config(), move |_| Answer::Grant(granting.clone()));
    let consumer = tcp_endpoint(MIB);
    let error = consumer.get((&producer.address, "k"), Duration::from_secs(5)).unwrap_err();
    assert_eq!(error.kind(), &ErrorKind::LeaseExpired);
    assert_whole(&consumer);
}

// Clumsy users.

#[test]
fn a_view_that_outlives_its_endpoint_gives_its_lease_back() {
    let producer = endpoint(MIB);
    let consumer = endpoint(MIB);
    let spec = Spec::bytes(100_000, 1);
    let ticket = spec.put(&producer, "k", &PutOptions::default()).unwrap();
    let view = consumer.view(&ticket, LONG).unwrap();
    drop(consumer);
    assert_eq!(hash(&view.part(0).unwrap().to_vec()), hash(&spec.parts[0].bytes()));
    drop(view);
    assert_whole(&producer);
}

#[test]
fn a_view_that_outlives_the_close_of_its_endpoint_gives_its_lease_back() {
    let producer = endpoint(MIB);
    let consumer = endpoint(MIB);
    let spec = Spec::bytes(100_000, 1);
    let ticket = spec.put(&producer, "k", &PutOptions::default()).unwrap();
    let view = consumer.view(&ticket, LONG).unwrap();
    consumer.close(Duration::ZERO);
    drop(view);
    assert_whole(&producer);
}

#[test]
fn a_view_that_outlives_its_producer_can_be_read() {
    let producer = endpoint(MIB);
    let consumer = endpoint(MIB);
    let spec = Spec::bytes(100_000, 1);
    let ticket = spec.put(&producer, "k", &PutOptions::default()).unwrap();
    let view = consumer.view(&ticket, LONG).unwrap();
    drop(producer);
    assert_eq!(hash(&view.part(0).unwrap().to_vec()), hash(&spec.parts[0].bytes()));
    drop(view);
    assert_whole(&consumer);
}

#[test]
fn views_dropped_in_a_forked_child_give_nothing_back() {
    if !alone("views_dropped_in_a_forked_child_give_nothing_back") {
        return;
    }
    let (producer, consumer) = (endpoint(16 * MIB), endpoint(MIB));
    let mut views = Vec::new();
    for key in 0..100 {
        let ticket = Spec::bytes(100_000, key).put(&producer, key.to_string(), &PutOptions::default()).unwrap();
        views.push(consumer.view(&ticket, LONG).unwrap());
    }
    let mut slot = Some(views);
    let status = forked(|| {
        drop(slot.take());
        let _stats = consumer.stats();
        0
    });
    assert_eq!(status, 0);
    let views = slot.unwrap();
    assert_serves(&producer, &consumer);
    until("the parent's views stand, and nothing else", || producer.stats().leases == 100);
    for (key, view) in views.iter().enumerate() {
        assert_eq!(hash(&view.part(0).unwrap().to_vec()), hash(&Spec::bytes(100_000, key as u64).parts[0].bytes()));
    }
    drop(views);
    assert_whole(&producer);
}

#[test]
fn a_put_that_finds_no_place_leaves_what_was_under_its_key() {
    let mut limits = Limits::default();
    limits.payloads = 1;
    let producer = Endpoint::builder().pool_size(MIB).limits(limits).build().unwrap();
    let consumer = endpoint(MIB);
    let spec = Spec::bytes(100_000, 1);
    let ticket = spec.put(&producer, "k", &for_consumers(2)).unwrap();
    let view = consumer.view(&ticket, LONG).unwrap();
    let error = Spec::bytes(100, 2).put(&producer, "k", &PutOptions::default()).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Busy { .. }), "{error}");
    spec.check(&consumer.get(&ticket, LONG).expect("it is still there"));
    drop(view);
    assert_whole(&producer);
}

#[test]
fn sixty_thousand_keys_in_a_small_pool() {
    let producer = Endpoint::builder().pool_size(4 * MIB).granule(64).build().unwrap();
    let consumer = endpoint(64 * KIB);
    let tickets: Vec<_> = (0..60_000u32)
        .map(|key| producer.put(key.to_le_bytes(), [Part::bytes("", DType::U32, &[1], &key.to_le_bytes())]).unwrap())
        .collect();
    for key in (0..60_000u32).step_by(10) {
        let payload = consumer.get(&tickets[key as usize], LONG).unwrap();
        assert_eq!(payload.part(0).unwrap().bytes(), key.to_le_bytes());
    }
    for key in 0..60_000u32 {
        assert_eq!(producer.remove(&tickets[key as usize]).is_ok(), key % 10 != 0);
    }
    assert_whole(&producer);
}

#[test]
fn both_ends_dial_each_other_at_once() {
    for round in 0..10u64 {
        let (a, b) = (endpoint(MIB), endpoint(MIB));
        let (one, two) = (Spec::bytes(50_000, round), Spec::bytes(50_000, round + 1000));
        let (ta, tb) =
            (one.put(&a, "k", &PutOptions::default()).unwrap(), two.put(&b, "k", &PutOptions::default()).unwrap());
        together(3, |side| match side {
            0 => two.check(&a.get(&tb, LONG).unwrap()),
            1 => one.check(&b.get(&ta, LONG).unwrap()),
            _ => {
                let own = one.put(&a, "own", &PutOptions::default()).unwrap();
                one.check(&a.get(&own, LONG).unwrap());
                let own = a.get((a.address(), "own"), Duration::from_millis(50)).unwrap_err();
                assert!(matches!(own.kind(), ErrorKind::TimedOut { .. }), "{own}");
            }
        });
        assert_whole(&a);
        assert_whole(&b);
    }
}

// Everything at once.

#[test]
fn mixed_work_on_three_endpoints_of_two_processes_keeps_every_byte() {
    for paths in ["tcp,shm,direct", "tcp"] {
        let options = Options::default().paths(paths).pool(4 * MIB).alloc_timeout(Duration::from_secs(2));
        let process = Process::start(&options);
        let ends = [options.build().unwrap(), options.build().unwrap()];
        let until = Instant::now() + Duration::from_secs(2);
        let done = together(8, |thread| {
            let mut random = words(thread as u64 + 77);
            let mut done = [0u32; 4];
            let mut round = 0u64;
            while Instant::now() < until {
                round += 1;
                let seed = (thread as u64) << 32 | round;
                let pick = random.next().unwrap();
                let len = 1 + pick % if pick.is_multiple_of(3) { 300_000 } else { 40_000 };
                let spec =
                    if pick.is_multiple_of(2) { Spec::bytes(len, seed) } else { Spec::bytes(len, seed).copied() };
                let key = format!("{}", pick % 5);
                let (producer, consumer) = (&ends[pick as usize / 8 % 2], &ends[pick as usize / 16 % 2]);
                let time = Duration::from_millis(1 + pick / 32 % 400);
                let kind = pick / 1024 % 6;
                let ticket = if kind < 2 {
                    process.put(&key, &spec).ok()
                } else {
                    spec.put(producer, &key, &for_consumers(1 + (pick / 64 % 2) as u32)).ok()
                };
                let Some(ticket) = ticket else { continue };
                match kind {
                    0 | 2 => {
                        if let Ok(payload) = consumer.get(&ticket, time) {
                            spec.check(&payload);
                            done[0] += 1;
                        }
                    }
                    1 | 3 => {
                        if let Ok(view) = consumer.view(&ticket, time) {
                            assert_eq!(hash(&view.part(0).unwrap().to_vec()), hash(&spec.parts[0].bytes()));
                            done[1] += 1;
                        }
                    }
                    4 => {
                        if let Ok(got) = process.get(&ticket, time) {
                            spec.check_got(&got);
                            done[2] += 1;
                        }
                    }
                    _ => {
                        if producer.remove(&ticket).is_ok() {
                            done[3] += 1;
                        }
                    }
                }
            }
            done
        });
        let sum = |index: usize| done.iter().map(|done| done[index]).sum::<u32>();
        eprintln!("{paths}: {} gets, {} views, {} gets there, {} removed", sum(0), sum(1), sum(2), sum(3));
        assert!(sum(0) > 0 && sum(2) > 0 && sum(3) > 0);
        for key in 0..5 {
            for end in &ends {
                end.remove_key(key.to_string());
            }
        }
        // What the other process still has under its keys is replaced and got.
        for key in 0..5 {
            let spec = Spec::bytes(64, key);
            let ticket = process.put(&key.to_string(), &spec).unwrap();
            spec.check_got(&Got::of(&ends[0].get(&ticket, LONG).unwrap()));
        }
        for end in &ends {
            assert_whole(end);
        }
        process.assert_whole();
    }
}

#[test]
fn processes_killed_and_stopped_at_random_points_leave_every_byte_right() {
    for paths in ["tcp,shm,direct", "tcp"] {
        let options = Options::default().paths(paths).pool(8 * MIB).lease(Duration::from_secs(1));
        let here = options.build().unwrap();
        let mut random = words(4711);
        for round in 0..6u64 {
            let process = Process::start(&options);
            let specs: Vec<Spec> =
                (0..3).map(|part| Spec::bytes(1_000_000 + round * 7 + part, round * 10 + part)).collect();
            let theirs: Vec<_> =
                specs.iter().enumerate().map(|(n, spec)| process.put(&n.to_string(), spec).unwrap()).collect();
            let ours: Vec<_> = specs
                .iter()
                .enumerate()
                .map(|(n, spec)| spec.put(&here, n.to_string(), &PutOptions::default()).unwrap())
                .collect();
            let pending: Vec<_> = ours.iter().map(|ticket| process.begin_get(ticket, Duration::from_secs(3))).collect();
            let pause = Duration::from_micros(random.next().unwrap() % 4000);
            let stop = round == 4;
            std::thread::scope(|scope| {
                for (ticket, spec) in theirs.iter().zip(&specs) {
                    let here = &here;
                    scope.spawn(move || match here.get(ticket, Duration::from_secs(3)) {
                        Ok(payload) => spec.check(&payload),
                        Err(error) => assert!(!error.to_string().is_empty()),
                    });
                }
                std::thread::sleep(pause);
                if stop {
                    process.signal(Signal::Stop);
                    std::thread::sleep(Duration::from_millis(1500));
                    process.signal(Signal::Continue);
                } else {
                    process.signal(Signal::Kill);
                }
            });
            for (pending, spec) in pending.into_iter().zip(&specs) {
                if let Some(Ok(text)) = pending.within(Duration::from_secs(5)) {
                    spec.check_got(&Got::from_text(&text));
                }
            }
            process.kill();
            for key in 0..3 {
                here.remove_key(key.to_string());
            }
            assert_whole(&here);
        }
    }
}

// Over a Unix socket.

#[test]
fn nonsense_over_the_unix_socket_changes_nothing() {
    let (producer, consumer) = (endpoint(MIB), endpoint(MIB));
    let ticket = Spec::bytes(100_000, 1).put(&producer, "k", &for_consumers(1000)).unwrap();
    let view = consumer.view(&ticket, LONG).unwrap();
    let name = unix_name_of(&ticket);
    for round in 0..40u8 {
        let mut config = session_config();
        config.identity.boot_id = boot_id();
        let mut hostile = Connection::connect(&name, config, deadline()).unwrap();
        let garbage: Vec<u8> = words(round.into()).take(20).flat_map(u64::to_le_bytes).collect();
        let address = &garbage[..usize::from(round) * 2];
        let offer = Offer { connection: 1, provider: 1, generation: 1, address };
        hostile.send(&Frame::QueuePairOpen(offer), deadline()).unwrap();
        hostile.receive(deadline(), |frame| assert!(matches!(frame, Frame::QueuePairRefuse(_)), "{frame:?}")).unwrap();
        for flags in [GetFlags::empty(), GetFlags::VIEW] {
            let get = Get {
                request: 9,
                target: Target::Key(b"k"),
                wait_us: u64::MAX,
                sent_at: u64::MAX,
                max_eager: u32::MAX,
                flags,
                provider: 1,
            };
            hostile.send(&Frame::Get(get), deadline()).unwrap();
            hostile.receive(deadline(), |frame| assert!(matches!(frame, Frame::Refuse(_)), "{frame:?}")).unwrap();
        }
        if round % 2 == 0 {
            let goodbye = towline_control::wire::Goodbye { code: towline_control::wire::GoodbyeCode::Closing };
            hostile.send(&Frame::Goodbye(goodbye), deadline()).unwrap();
        }
    }
    assert_eq!(hash(&view.part(0).unwrap().to_vec()), hash(&Spec::bytes(100_000, 1).parts[0].bytes()));
    assert_serves(&producer, &consumer);
    drop(view);
    producer.remove(&ticket).unwrap();
    assert_whole(&producer);
}

fn unix_name_of(ticket: &towline::Ticket) -> SocketName {
    let bytes = ticket.to_bytes();
    let incarnation: [u8; 16] = bytes[17..33].try_into().unwrap();
    SocketName::Unix(UnixName::new(&towline::engine::unix_name_of(&incarnation)).unwrap())
}

fn boot_id() -> [u8; 16] {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    u128::from_str_radix(&text.trim().replace('-', ""), 16).unwrap().to_be_bytes()
}

// Shortage.

#[test]
fn a_consumer_that_dies_while_descriptors_are_short_gives_back_what_it_held() {
    if !alone("a_consumer_that_dies_while_descriptors_are_short_gives_back_what_it_held") {
        return;
    }
    let options = Options::default().paths("shm");
    let (process, producer) = (Process::start(&options), options.build().unwrap());
    let ticket = Spec::bytes(100_000, 1).put(&producer, "k", &PutOptions::default()).unwrap();
    let used = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
    let before = limit_descriptors(used + 8);
    let mut fill = Vec::new();
    while let Ok(file) = std::fs::File::open("/dev/null") {
        fill.push(file);
    }
    drop(fill.pop()); // for the control connection; none is left to watch the consumer's process
    let pending = process.begin_get(&ticket, LONG);
    until("the consumer has a lease", || producer.stats().leases == 1);
    process.kill();
    drop(pending);
    until("its link has ended", || producer.stats().links == 0);
    assert_eq!(producer.stats().leases, 1, "nothing says yet that the process is gone");
    drop(fill);
    limit_descriptors(before);
    producer.remove(&ticket).unwrap();
    assert_whole(&producer);
}

#[test]
fn a_consumer_without_descriptors_is_told_and_recovers() {
    if !alone("a_consumer_without_descriptors_is_told_and_recovers") {
        return;
    }
    for paths in ["tcp", "shm"] {
        let process = Process::start(&Options::default().paths(paths));
        let spec = Spec::bytes(100_000, 1);
        let ticket = process.put_with("k", &spec, &for_consumers(1)).unwrap();
        let consumer = Options::default().paths(paths).build().unwrap();
        let used = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
        for spare in 0..12 {
            let before = limit_descriptors(used + spare);
            match consumer.get(&ticket, Duration::from_secs(2)) {
                Ok(payload) => spec.check(&payload),
                Err(error) => assert!(error.way_out().is_some() || error.can_retry(), "{error}"),
            }
            limit_descriptors(before);
        }
        if let Ok(payload) = consumer.get(&ticket, LONG) {
            spec.check(&payload);
        }
        let again = process.put("k", &spec).unwrap();
        spec.check(&consumer.get(&again, LONG).unwrap());
        assert_whole(&consumer);
        process.assert_whole();
    }
}

#[test]
fn a_thousand_consumers_of_one_payload_in_one_process() {
    let (producer, consumer) = (endpoint(MIB), endpoint(MIB));
    let spec = Spec::bytes(40_000, 1);
    let ticket = spec.put(&producer, "k", &for_consumers(1000)).unwrap();
    together(10, |thread| {
        for round in 0..100 {
            if (thread + round) % 2 == 0 {
                spec.check(&consumer.get(&ticket, LONG).unwrap());
            } else {
                let view = consumer.view(&ticket, LONG).unwrap();
                assert_eq!(hash(&view.part(0).unwrap().to_vec()), hash(&spec.parts[0].bytes()));
            }
        }
    });
    until("consumed", || consumer.get(&ticket, LONG).is_err());
    assert_whole(&producer);
    assert_whole(&consumer);
}

#[test]
fn gets_into_a_pool_that_is_too_small_for_all_end_once_each() {
    let producer = endpoint(16 * MIB);
    let consumer = Options::default().pool(64 * KIB).granule(64).build().unwrap();
    let done = together(8, |thread| {
        let mut ok = 0;
        for round in 0..40u64 {
            let spec = Spec::bytes(30_000 + (thread as u64 * 40 + round) * 80, round);
            let ticket = spec.put(&producer, format!("{thread}"), &PutOptions::default()).unwrap();
            match consumer.get(&ticket, Duration::from_millis(200)) {
                Ok(payload) => {
                    spec.check(&payload);
                    ok += 1;
                }
                Err(error) => {
                    assert!(matches!(error.kind(), ErrorKind::PoolFull { .. } | ErrorKind::TimedOut { .. }), "{error}")
                }
            }
        }
        ok
    });
    assert!(done.iter().sum::<u32>() > 100, "{done:?}");
    for thread in 0..8 {
        producer.remove_key(format!("{thread}"));
    }
    assert_whole(&producer);
    assert_whole(&consumer);
}

#[test]
fn secrets_of_any_length_are_told_apart() {
    let long = "s".repeat(64);
    let longer = "s".repeat(65);
    let with = |secret: &str| Options::default().paths("tcp").secret(secret).build().unwrap();
    let producer = with(&long);
    let ticket = Spec::bytes(100, 1).put(&producer, "k", &PutOptions::default()).unwrap();
    for other in [&longer[..], &"s".repeat(32), &"s".repeat(63), &"s".repeat(500)] {
        let error = with(other).get(&ticket, LONG).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::WrongSecret), "{error}");
    }
    Spec::bytes(100, 1).check(&with(&long).get(&ticket, LONG).unwrap());
    assert_whole(&producer);
}
