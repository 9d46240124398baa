//! Deadlines that come first: bytes that arrive late touch nothing that is another's, memory in quarantine is named,
//! counted and given back, and calls return in time.

#![allow(clippy::unwrap_used)] // also in the helpers of tests

mod common;

use common::*;
use std::time::{Duration, Instant};
use towline::{Buffer, Endpoint, ErrorKind, Limits, Path, Paths, PutOptions};

const LEN: u64 = 8 * MIB;

/// A consumer whose get of `LEN` bytes has timed out when the first of them had arrived, and the relay that holds the
/// others back.
fn overtaken(consumer: &Endpoint, key: &str) -> (Endpoint, Proxy, u64) {
    let (producer, proxy) = behind_proxy(&Way::Tcp.options());
    let ticket = Spec::bytes(LEN, 1).put(&producer, key, &PutOptions::default()).unwrap();
    proxy.hold_data_after(MIB + 17);
    let timeout = Duration::from_millis(400);
    let started = Instant::now();
    let error = std::thread::scope(|scope| {
        let getting = scope.spawn(|| consumer.get(&ticket, timeout).unwrap_err());
        proxy.wait_until_held();
        getting.join().unwrap()
    });
    let took = started.elapsed();
    assert!(took >= timeout && took < timeout + SLACK, "{took:?}");
    assert_tells(&error, "get");
    let ErrorKind::TimedOut { waiting_for, quarantined } = error.kind() else { panic!("{error}") };
    assert!(waiting_for.contains("bytes"), "{error}");
    if *quarantined > 0 {
        assert!(error.to_string().contains("quarantine"), "{error}");
    }
    (producer, proxy, *quarantined)
}

/// Takes all that is free and fills it with a pattern.
fn canaries(endpoint: &Endpoint) -> Vec<Buffer> {
    let mut buffers = Vec::new();
    for size in [4 * MIB, MIB, 64 * KIB, 4 * KIB] {
        while let Ok(mut buffer) = endpoint.alloc_within(size as usize, Duration::ZERO) {
            fill(size, &mut buffer);
            buffers.push(buffer);
        }
    }
    buffers
}

#[track_caller]
fn assert_unharmed(buffers: &[Buffer]) {
    for buffer in buffers {
        let mut expected = vec![0; buffer.len()];
        fill(buffer.len() as u64, &mut expected);
        assert!(buffer.as_slice() == expected, "late bytes fell on the buffer at {}", buffer.offset());
    }
}

#[test]
fn late_bytes_fall_on_nobody_and_the_memory_comes_back() {
    let consumer = tcp_endpoint(16 * MIB);
    let (producer, proxy, quarantined) = overtaken(&consumer, "key");
    assert_eq!(quarantined, LEN, "the destination may still be written");
    // What is given out now is other memory, whether the bytes come now or after it was fenced.
    let held = canaries(&consumer);
    proxy.release();
    until("the fence", || consumer.stats().quarantined_bytes == 0);
    let after = canaries(&consumer);
    assert_unharmed(&held);
    assert_unharmed(&after);
    let all: u64 = held.iter().chain(&after).map(|buffer| buffer.len() as u64).sum();
    assert_eq!(all, 16 * MIB, "all of the memory is there again");
    drop((held, after));
    assert_whole(&consumer);
    // The payload was not delivered, and can be got.
    Spec::bytes(LEN, 1).check(&consumer.get((producer.address(), "key"), LONG).unwrap());
    assert_whole(&producer);
}

#[test]
fn memory_in_quarantine_is_counted_and_comes_back_without_the_peers_help() {
    let consumer = tcp_endpoint(16 * MIB);
    let (producer, proxy, quarantined) = overtaken(&consumer, "key");
    assert_eq!(quarantined, LEN);
    // The relay holds on: the bytes never come. The fence is the consumer's own queue pair.
    until("the fence", || consumer.stats().quarantined_bytes == 0);
    assert_whole(&consumer);
    let held = canaries(&consumer);
    proxy.release();
    until("the producer to be free of it", || producer.stats().leases == 0);
    assert_unharmed(&held);
    drop(held);
    Spec::bytes(LEN, 1).check(&consumer.get((producer.address(), "key"), LONG).unwrap());
    assert_whole(&consumer);
}

#[test]
fn memory_of_the_callers_own_is_kept_alive_until_the_fence() {
    let (producer, proxy) = behind_proxy(&Way::Tcp.options());
    let consumer = tcp_endpoint(MIB);
    let ticket = Spec::bytes(LEN, 1).put(&producer, "key", &PutOptions::default()).unwrap();
    proxy.hold_data_after(MIB);
    let error = consumer.get_into(&ticket, vec![0; LEN as usize], Duration::from_millis(300)).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::TimedOut { quarantined, .. } if *quarantined == LEN || *quarantined == 0),
        "{error}"
    );
    // The caller has lost it; allocating as much again would be the same place if it were free.
    let canaries: Vec<Vec<u8>> = (0..4).map(|_| vec![0xc5; LEN as usize]).collect();
    proxy.release();
    until("the fence", || consumer.stats().quarantined_bytes == 0);
    assert!(canaries.iter().flatten().all(|byte| *byte == 0xc5));
    assert_whole(&consumer);
}

#[test]
fn what_one_peer_can_keep_in_quarantine_is_capped() {
    let mut limits = Limits::default();
    limits.quarantine_per_peer = MIB; // less than the payload: its queue pair is broken at once
    let consumer =
        Endpoint::builder().pool_size(16 * MIB).allow_paths(Paths::only(Path::Tcp)).limits(limits).build().unwrap();
    let (producer, proxy, _quarantined) = overtaken(&consumer, "key");
    until("the fence", || consumer.stats().quarantined_bytes == 0);
    proxy.release();
    Spec::bytes(LEN, 1).check(&consumer.get((producer.address(), "key"), LONG).unwrap());
    assert_whole(&consumer);
}

#[test]
fn one_slow_producer_delays_no_other() {
    let consumer = tcp_endpoint(32 * MIB);
    let (slow, proxy) = behind_proxy(&Way::Tcp.options());
    let fast = tcp_endpoint(MIB);
    let ticket = Spec::bytes(LEN, 1).put(&slow, "key", &PutOptions::default()).unwrap();
    proxy.hold_data_after(MIB);
    std::thread::scope(|scope| {
        let getting = scope.spawn(|| consumer.get(&ticket, LONG).unwrap());
        proxy.wait_until_held();
        for round in 0..20 {
            let spec = Spec::bytes(500 * KIB, round);
            let ticket = spec.put(&fast, "key", &PutOptions::default()).unwrap();
            spec.check(&consumer.get(&ticket, LONG).unwrap());
        }
        assert!(!getting.is_finished());
        proxy.release();
        Spec::bytes(LEN, 1).check(&getting.join().unwrap());
    });
    assert_whole(&consumer);
}

#[test]
fn a_time_out_of_one_get_leaves_the_others_of_the_same_producer_right() {
    let consumer = tcp_endpoint(64 * MIB);
    let (producer, proxy) = behind_proxy(&Way::Tcp.options().pool(64 * MIB));
    let tickets: Vec<_> = (0..4)
        .map(|number| Spec::bytes(LEN, number).put(&producer, format!("{number}"), &PutOptions::default()).unwrap())
        .collect();
    proxy.hold_data_after(MIB);
    std::thread::scope(|scope| {
        let impatient = scope.spawn(|| consumer.get(&tickets[0], Duration::from_millis(400)));
        let get = |ticket| consumer.get(ticket, LONG);
        let patient: Vec<_> = tickets[1..].iter().map(|ticket| scope.spawn(move || get(ticket))).collect();
        proxy.wait_until_held();
        assert!(matches!(impatient.join().unwrap().unwrap_err().kind(), ErrorKind::TimedOut { .. }));
        proxy.release();
        for (number, get) in patient.into_iter().enumerate() {
            Spec::bytes(LEN, number as u64 + 1).check(&get.join().unwrap().unwrap());
        }
    });
    Spec::bytes(LEN, 0).check(&consumer.get(&tickets[0], LONG).unwrap());
    assert_whole(&consumer);
    assert_whole(&producer);
}

#[test]
fn a_lease_that_ends_during_the_transfer_delivers_nothing_wrong() {
    // The producer is behind a relay that holds data for longer than the lease, with keep-alives cut off too: what comes
    // after the end of the lease must not be delivered, unless it was got anew.
    let lease = Duration::from_millis(400);
    let (producer, proxy) = behind_proxy(&Way::Tcp.options().lease(lease));
    let consumer = Way::Tcp.options().lease(lease).build().unwrap();
    let spec = Spec::bytes(LEN, 1);
    let ticket = spec.put(&producer, "key", &PutOptions::default()).unwrap();
    proxy.hold_data_after(MIB);
    std::thread::scope(|scope| {
        let getting = scope.spawn(|| consumer.get(&ticket, LONG));
        proxy.wait_until_held();
        proxy.hold_control(true);
        until("the lease to be over", || producer.stats().leases == 0);
        producer.remove(&ticket).unwrap();
        let other = Spec::bytes(LEN, 2).put(&producer, "other", &PutOptions::default()).unwrap();
        proxy.hold_control(false);
        proxy.release();
        let error = getting.join().unwrap().unwrap_err();
        assert!(
            matches!(
                error.kind(),
                ErrorKind::LeaseExpired
                    | ErrorKind::Gone(_)
                    | ErrorKind::PeerLost { .. }
                    | ErrorKind::TransferFailed { .. }
            ),
            "{error}"
        );
        Spec::bytes(LEN, 2).check(&consumer.get(&other, LONG).unwrap());
    });
    assert_whole(&consumer);
    assert_whole(&producer);
}

#[test]
fn deadlines_are_kept_whatever_the_get_waits_for() {
    // Nobody accepts, nobody answers, nobody agrees, nobody puts, no room, no bytes.
    let timeout = Duration::from_millis(250);
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = silent.local_addr().unwrap().to_string();
    let mute = Producer::start(session_config(), |_| Answer::Silence);
    let (held, proxy) = behind_proxy(&Way::Tcp.options());
    Spec::bytes(LEN, 1).put(&held, "key", &PutOptions::default()).unwrap();
    proxy.hold_data_after(0);
    let full = tcp_endpoint(MIB);
    let _all = full.alloc(MIB as usize).unwrap();
    let source = tcp_endpoint(MIB);
    Spec::bytes(100 * KIB, 1).put(&source, "key", &PutOptions::default()).unwrap();
    let consumer = tcp_endpoint(16 * MIB);
    let cases = [
        (&consumer, silent, "key"),
        (&consumer, mute.address.clone(), "key"),
        (&consumer, source.address(), "never"),
        (&full, source.address(), "key"),
        (&consumer, held.address(), "key"),
    ];
    for (consumer, address, key) in cases {
        let started = Instant::now();
        let error = consumer.get((&address, key), timeout).unwrap_err();
        let took = started.elapsed();
        assert!(took >= timeout && took < timeout + SLACK, "{took:?}: {error}");
        assert!(matches!(error.kind(), ErrorKind::TimedOut { .. } | ErrorKind::PoolFull { .. }), "{error}");
        assert!(error.can_retry());
    }
    proxy.release();
    assert_whole(&consumer);
}

#[test]
fn a_hundred_gets_with_their_own_deadlines_each_keep_it() {
    let (producer, consumer) = (endpoint(MIB), endpoint(MIB));
    let address = producer.address();
    together(100, |number| {
        let timeout = Duration::from_millis(20 + 5 * number as u64);
        let started = Instant::now();
        let error = consumer.get((&address, "never"), timeout).unwrap_err();
        let took = started.elapsed();
        assert!(matches!(error.kind(), ErrorKind::TimedOut { quarantined: 0, .. }), "{error}");
        assert!(took >= timeout && took < timeout + SLACK, "{took:?} for {timeout:?}");
    });
    until("the producer to have forgotten them", || producer.stats().waiting == 0);
    assert_whole(&consumer);
}

#[test]
fn a_payload_put_as_its_consumers_give_up_is_had_once_or_stays() {
    // The put races the deadline, many times: either the get has it, or the next one does.
    let (producer, consumer) = (endpoint(4 * MIB), endpoint(4 * MIB));
    let address = producer.address();
    for round in 0..60u64 {
        let spec = Spec::bytes(if round.is_multiple_of(2) { 1000 } else { 300 * KIB }, round);
        let timeout = Duration::from_micros(2000 + 100 * round);
        let result = std::thread::scope(|scope| {
            let getting = scope.spawn(|| consumer.get((&address, "key"), timeout));
            std::thread::sleep(timeout); // a race is what is tested
            spec.put(&producer, "key", &PutOptions::default()).unwrap();
            getting.join().unwrap()
        });
        match result {
            Ok(payload) => spec.check(&payload),
            Err(error) => {
                assert!(matches!(error.kind(), ErrorKind::TimedOut { .. }), "{error}");
                spec.check(&consumer.get((&address, "key"), LONG).unwrap());
            }
        }
        until("it to be consumed", || producer.stats().payloads == 0);
    }
    assert_whole(&producer);
    assert_whole(&consumer);
}
