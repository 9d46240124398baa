//! Closing endpoints, and those that come and go.

use crate::common::*;
use crate::{LEASE, Stalled, TWO};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use towline::{DType, ErrorKind, Gone, Part, PutOptions, Stats};

#[test]
fn closing_twice_and_dropping_after_closing_is_fine() {
    let endpoint = endpoint(MIB);
    Spec::bytes(1000, 1).put(&endpoint, "key", &PutOptions::default()).unwrap();
    let left = endpoint.close(LONG);
    assert_eq!((left.leases, left.quarantined_bytes, left.payloads), (0, 0, 0));
    endpoint.close(LONG);
    endpoint.close(Duration::ZERO);
    drop(endpoint.clone());
    drop(endpoint);
}

#[test]
fn a_closed_endpoint_refuses_everything_new() {
    let (closed, other) = (endpoint(MIB), endpoint(MIB));
    let ticket = Spec::bytes(1000, 1).put(&other, "key", &PutOptions::default()).unwrap();
    let own = Spec::bytes(1000, 1).put(&closed, "own", &PutOptions::default()).unwrap();
    let held = closed.alloc(1).unwrap();
    closed.close(LONG);
    let errors = [
        closed.put("key", [Part::bytes("x", DType::U8, &[1], b"x")]).unwrap_err(),
        closed.get(&ticket, LONG).unwrap_err(),
        closed.view(&ticket, LONG).unwrap_err(),
        closed.get((other.address(), "key"), LONG).unwrap_err(),
        closed.wait_for_consumers("key", 1, LONG).unwrap_err(),
        closed.alloc(1).unwrap_err(),
        closed.alloc_within(1, Duration::ZERO).unwrap_err(),
        closed.put_with("key", [Part::buffer("x", DType::U8, &[1], held)], &for_consumers(2)).unwrap_err(),
        closed.remove(&own).unwrap_err(),
    ];
    for error in errors {
        assert_eq!(error.kind(), &ErrorKind::Closed, "{error}");
    }
    assert_eq!(closed.stats().payloads, 0);
    let started = Instant::now();
    let error = other.get(&own, LONG).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::PeerLost { .. } | ErrorKind::PeerUnreachable { .. }), "{error}");
    assert!(started.elapsed() < SLACK, "a closed peer is known soon: {:?}", started.elapsed());
    Spec::bytes(1000, 1).check(&other.get(&ticket, LONG).unwrap());
}

#[test]
fn those_who_wait_in_alloc_are_told_of_the_close_at_once() {
    const WAITERS: u64 = 4;
    let endpoint = endpoint(MIB);
    let all = endpoint.alloc(MIB as usize).unwrap();
    let bytes = vec![7; 1000];
    std::thread::scope(|scope| {
        let allocs: Vec<_> =
            (0..WAITERS).map(|_| scope.spawn(|| endpoint.alloc_within(1000, Duration::MAX).unwrap_err())).collect();
        let put = scope.spawn(|| endpoint.put("key", [Part::bytes("x", DType::U8, &[1000], &bytes)]).unwrap_err());
        until("all to wait", || endpoint.stats().pool_waiting == WAITERS + 1);
        let started = Instant::now();
        endpoint.close(LONG);
        for (error, operation) in allocs.into_iter().map(|alloc| (alloc, "alloc")).chain([(put, "put")]) {
            let error = error.join().unwrap();
            assert_eq!((error.kind(), error.operation()), (&ErrorKind::Closed, operation), "{error}");
        }
        assert!(started.elapsed() < SLACK, "{:?}", started.elapsed());
    });
    assert_eq!(endpoint.stats().pool_waiting, 0);
    drop(all);
    let stats = endpoint.stats();
    assert_eq!((stats.pool_free, stats.pool_buffers), (stats.pool_bytes, 0), "nobody was served after the close");
}

#[test]
fn dropping_the_last_handle_closes() {
    let (producer, consumer) = (endpoint(MIB), endpoint(MIB));
    let ticket = Spec::bytes(1000, 1).put(&producer, "key", &PutOptions::default()).unwrap();
    let clone = producer.clone();
    drop(producer);
    Spec::bytes(1000, 1).check(&consumer.get(&ticket, LONG).unwrap()); // the clone keeps it open
    let address = clone.address();
    {
        let _context = clone;
    }
    let error = consumer.get((&address, "key"), LONG).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::PeerLost { .. } | ErrorKind::PeerUnreachable { .. }), "{error}");
    // The port is free again.
    let again = Options::default().pool(MIB).bind(&address).build().unwrap();
    assert_eq!(again.address(), address);
}

#[test]
fn buffers_and_payloads_outlive_their_endpoint() {
    let (producer, consumer) = (endpoint(MIB), endpoint(MIB));
    let spec = Spec::bytes(500 * KIB, 1);
    let ticket = spec.put(&producer, "key", &PutOptions::default()).unwrap();
    let payload = consumer.get(&ticket, LONG).unwrap();
    let mut buffer = producer.alloc(1000).unwrap();
    drop(producer);
    consumer.close(LONG);
    drop(consumer);
    buffer.as_mut_slice().fill(7);
    spec.check(&payload);
}

#[test]
fn a_get_that_waits_ends_when_its_own_endpoint_closes() {
    let (producer, consumer) = (endpoint(MIB), endpoint(MIB));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| consumer.get((producer.address(), "never"), LONG).unwrap_err());
        producer.wait_for_consumers("never", 1, LONG).unwrap();
        let started = Instant::now();
        consumer.close(LONG);
        assert_eq!(waiting.join().unwrap().kind(), &ErrorKind::Closed);
        assert!(started.elapsed() < SLACK);
    });
    until("the producer to know", || producer.stats().waiting == 0 && producer.stats().links == 0);
}

#[test]
fn a_get_that_waits_ends_when_the_producer_closes() {
    for (producer, consumer) in [(endpoint(MIB), endpoint(MIB)), (tcp_endpoint(MIB), tcp_endpoint(MIB))] {
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| consumer.get((producer.address(), "never"), LONG).unwrap_err());
            producer.wait_for_consumers("never", 1, LONG).unwrap();
            let started = Instant::now();
            producer.close(LONG);
            let error = waiting.join().unwrap();
            assert!(matches!(error.kind(), ErrorKind::PeerLost { .. }), "{error}");
            assert!(started.elapsed() < SLACK, "{:?}", started.elapsed());
            assert_tells(&error, "get");
        });
        assert_whole(&consumer);
    }
}

#[test]
fn those_who_wait_for_consumers_or_for_room_are_told_of_the_close() {
    let producer = endpoint(MIB);
    let all = producer.alloc(MIB as usize).unwrap();
    let long = Duration::from_secs(20);
    std::thread::scope(|scope| {
        let named = |name: &str| std::thread::Builder::new().name(name.to_owned());
        let consumers = named("for-consumers")
            .spawn_scoped(scope, || producer.wait_for_consumers("never", 1, long).unwrap_err())
            .unwrap();
        let room = named("for-room").spawn_scoped(scope, || producer.alloc_within(1000, long).unwrap_err()).unwrap();
        until("both to wait", || sleeps("for-consumers") && sleeps("for-room") && producer.stats().pool_waiting == 1);
        let started = Instant::now();
        producer.close(LONG);
        for error in [consumers.join().unwrap(), room.join().unwrap()] {
            assert_eq!(error.kind(), &ErrorKind::Closed, "{error}");
        }
        assert!(started.elapsed() < SLACK, "{:?}", started.elapsed());
    });
    drop(all); // a buffer outlives its endpoint
}

/// Whether the thread of this process called `name` waits for something.
fn sleeps(name: &str) -> bool {
    std::fs::read_dir("/proc/self/task").unwrap().filter_map(Result::ok).any(|task| {
        let read = |file: &str| std::fs::read_to_string(task.path().join(file)).unwrap_or_default();
        read("comm").trim() == name && read("stat").rsplit(") ").next().is_some_and(|rest| rest.starts_with('S'))
    })
}

#[test]
fn close_waits_for_readers_and_then_says_that_nothing_is_left() {
    for way in TWO {
        let producer = way.options().pool(MIB).build().unwrap();
        let mut stalled = Stalled::new(way, LEASE);
        let spec = Spec::bytes(512 * KIB, 1);
        let ticket = spec.put(&producer, "key", &PutOptions::default()).unwrap();
        std::thread::scope(|scope| {
            let consumer = stalled.consumer.clone();
            let reading = scope.spawn(move || consumer.get(&ticket, LONG).unwrap());
            until("the reader to have its lease", || producer.stats().leases == 1);
            let closing = scope.spawn(|| producer.close(LONG));
            until("the close to begin", || producer.stats().payloads == 0);
            assert!(!closing.is_finished(), "somebody reads");
            stalled.free();
            spec.check(&reading.join().unwrap());
            let left = closing.join().unwrap();
            assert_eq!((left.leases, left.fencing, left.quarantined_bytes), (0, 0, 0), "{left:?}");
        });
    }
}

#[test]
fn close_returns_at_its_deadline_and_says_what_was_left() {
    for way in TWO {
        let producer = way.options().pool(MIB).build().unwrap();
        let mut stalled = Stalled::new(way, LEASE);
        let spec = Spec::bytes(512 * KIB, 1);
        let ticket = spec.put(&producer, "key", &PutOptions::default()).unwrap();
        std::thread::scope(|scope| {
            let consumer = stalled.consumer.clone();
            let reading = scope.spawn(move || consumer.get(&ticket, LONG));
            until("the reader to have its lease", || producer.stats().leases == 1);
            let started = Instant::now();
            let left = producer.close(Duration::from_millis(200));
            let took = started.elapsed();
            assert!(took >= Duration::from_millis(200) && took < SLACK, "{took:?}");
            assert_eq!(left.leases, 1, "{left:?}");
            stalled.free();
            // What the reader has or has not is his to see; never wrong bytes.
            match reading.join().unwrap() {
                Ok(payload) => spec.check(&payload),
                Err(error) => {
                    assert!(matches!(error.kind(), ErrorKind::PeerLost { .. } | ErrorKind::LeaseExpired), "{error}")
                }
            }
        });
        assert_whole(&stalled.consumer);
    }
}

#[test]
fn closing_a_consumer_that_has_a_lease_gives_the_lease_back() {
    for way in TWO {
        let producer = way.options().pool(MIB).build().unwrap();
        let stalled = Stalled::new(way, LEASE);
        let spec = Spec::bytes(512 * KIB, 1);
        let ticket = spec.put(&producer, "key", &PutOptions::default()).unwrap();
        std::thread::scope(|scope| {
            let consumer = stalled.consumer.clone();
            let reading = scope.spawn({
                let ticket = ticket.clone();
                move || consumer.get(&ticket, LONG).unwrap_err()
            });
            until("the reader to have its lease", || producer.stats().leases == 1);
            let left = stalled.consumer.close(LONG);
            assert_eq!((left.gets_in_progress, left.quarantined_bytes), (0, 0));
            assert_eq!(reading.join().unwrap().kind(), &ErrorKind::Closed);
        });
        until("the lease to be back", || producer.stats().leases == 0);
        // It was not consumed: another has it.
        let other = way.options().pool(MIB).build().unwrap();
        spec.check(&other.get(&ticket, LONG).unwrap());
        assert_whole(&producer);
    }
}

#[test]
fn stats_and_close_are_safe_while_many_threads_put_and_get() {
    for round in 0..4 {
        let way = TWO[round % 2];
        let (producer, consumer) =
            (way.options().pool(8 * MIB).build().unwrap(), way.options().pool(8 * MIB).build().unwrap());
        let (closed, carried) = (AtomicBool::new(false), std::sync::atomic::AtomicU64::new(0));
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let (producer, consumer, closed, carried) = (&producer, &consumer, &closed, &carried);
                scope.spawn(move || {
                    for number in 0.. {
                        let spec = Spec::bytes(if number % 2 == 0 { 500 } else { 200 * KIB }, thread * 1000 + number);
                        let put = spec.put(producer, format!("{thread}"), &PutOptions::default());
                        let result = put.and_then(|ticket| consumer.get(&ticket, LONG));
                        match result {
                            Ok(payload) => {
                                spec.check(&payload);
                                carried.fetch_add(1, Ordering::Relaxed);
                            }
                            Err(error) => {
                                assert!(closed.load(Ordering::Acquire), "{error}");
                                assert!(
                                    matches!(
                                        error.kind(),
                                        ErrorKind::Closed
                                            | ErrorKind::PeerLost { .. }
                                            | ErrorKind::PeerUnreachable { .. }
                                            | ErrorKind::Gone(Gone::Removed)
                                    ),
                                    "{error}"
                                );
                                return;
                            }
                        }
                    }
                });
            }
            for _ in 0..2 {
                let (producer, consumer, closed) = (&producer, &consumer, &closed);
                scope.spawn(move || {
                    while !closed.load(Ordering::Acquire) {
                        for stats in [producer.stats(), consumer.stats()] {
                            assert!(stats.pool_free <= stats.pool_bytes && stats.pool_largest_free <= stats.pool_bytes);
                        }
                    }
                });
            }
            until("some payloads to be carried", || carried.load(Ordering::Relaxed) > 50);
            closed.store(true, Ordering::Release);
            let (first, second) = if round < 2 { (&producer, &consumer) } else { (&consumer, &producer) };
            let closers = [scope.spawn(|| first.close(LONG)), scope.spawn(|| first.close(LONG))];
            for closer in closers {
                let left: Stats = closer.join().unwrap();
                assert_eq!((left.leases, left.quarantined_bytes), (0, 0), "{left:?}");
            }
            second.close(LONG);
        });
        assert_whole(&producer);
        assert_whole(&consumer);
    }
}
