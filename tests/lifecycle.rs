//! From building to closing: removal, expiry, leases, closing with operations in flight, forks, and that nothing is left.

#![allow(clippy::unwrap_used)] // also in the helpers of tests

mod common;

use common::*;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use towline::{DType, ErrorKind, Gone, Part, PutOptions, Stats};

/// A consumer that has a lease and waits for room: a get in progress that goes no further until its pool is free.
struct Stalled {
    consumer: towline::Endpoint,
    room: Option<towline::Buffer>,
}

impl Stalled {
    fn new(way: Way, lease: Duration) -> Self {
        let consumer = way.options().pool(MIB).lease(lease).build().unwrap();
        let room = consumer.alloc(MIB as usize).unwrap();
        Self { consumer, room: Some(room) }
    }

    /// Lets it go on.
    fn free(&mut self) {
        self.room = None;
    }
}

const LEASE: Duration = Duration::from_secs(30);
const TWO: [Way; 2] = [Way::Direct, Way::Tcp];

// Removal.

#[test]
fn what_is_removed_is_gone_and_its_room_is_free() {
    let endpoint = endpoint(MIB);
    let ticket = Spec::bytes(MIB, 1).put(&endpoint, "key", &PutOptions::default()).unwrap();
    endpoint.remove(&ticket).unwrap();
    assert_whole(&endpoint);
    let error = endpoint.remove(&ticket).unwrap_err();
    assert_eq!(error.kind(), &ErrorKind::Gone(Gone::Removed));
    assert_eq!(endpoint.get(&ticket, LONG).unwrap_err().kind(), &ErrorKind::Gone(Gone::Removed));
    Spec::bytes(MIB, 1).put(&endpoint, "key", &PutOptions::default()).unwrap();
    assert!(endpoint.remove_key("key") && !endpoint.remove_key("key") && !endpoint.remove_key("another"));
    assert_whole(&endpoint);
}

#[test]
fn removing_what_was_consumed_says_so() {
    let (producer, consumer) = (endpoint(MIB), endpoint(MIB));
    let ticket = Spec::bytes(MIB, 1).put(&producer, "key", &PutOptions::default()).unwrap();
    drop(consumer.get(&ticket, LONG).unwrap());
    assert_whole(&producer);
    assert_eq!(producer.remove(&ticket).unwrap_err().kind(), &ErrorKind::Gone(Gone::Consumed));
    assert!(!producer.remove_key("key"));
}

#[test]
fn a_ticket_does_not_remove_the_payload_that_took_its_place() {
    let endpoint = endpoint(MIB);
    let old = Spec::bytes(1000, 1).put(&endpoint, "key", &PutOptions::default()).unwrap();
    let new = Spec::bytes(1000, 2).put(&endpoint, "key", &PutOptions::default()).unwrap();
    assert_eq!(endpoint.remove(&old).unwrap_err().kind(), &ErrorKind::Gone(Gone::Replaced));
    Spec::bytes(1000, 2).check(&endpoint.get(&new, LONG).unwrap());
}

#[test]
fn a_reader_keeps_a_payload_that_is_removed_under_it() {
    for way in TWO {
        let producer = way.options().pool(MIB).build().unwrap();
        let mut stalled = Stalled::new(way, LEASE);
        let spec = Spec::bytes(512 * KIB, 1);
        let ticket = spec.put(&producer, "key", &PutOptions::default()).unwrap();
        std::thread::scope(|scope| {
            let consumer = stalled.consumer.clone();
            let reading = scope.spawn({
                let ticket = ticket.clone();
                move || consumer.get(&ticket, LONG).unwrap()
            });
            until("the reader to have its lease", || producer.stats().leases == 1);
            producer.remove(&ticket).unwrap();
            assert_eq!((producer.stats().payloads, producer.stats().pool_buffers), (0, 1), "the reader holds it");
            // Whatever is allocated meanwhile is other memory.
            let mut other = producer.alloc(512 * KIB as usize).unwrap();
            other.as_mut_slice().fill(0xee);
            stalled.free();
            spec.check(&reading.join().unwrap());
        });
        assert_whole(&producer);
        assert_whole(&stalled.consumer);
    }
}

#[test]
fn a_reader_keeps_the_old_payload_when_its_key_is_put_again() {
    for way in TWO {
        let producer = way.options().pool(2 * MIB).build().unwrap();
        let mut stalled = Stalled::new(way, LEASE);
        let (old, new) = (Spec::bytes(512 * KIB, 1), Spec::bytes(512 * KIB, 2));
        old.put(&producer, "key", &PutOptions::default()).unwrap();
        std::thread::scope(|scope| {
            let (consumer, address) = (stalled.consumer.clone(), producer.address());
            let reading = scope.spawn(move || consumer.get((address, "key"), LONG).unwrap());
            until("the reader to have its lease", || producer.stats().leases == 1);
            new.put(&producer, "key", &PutOptions::default()).unwrap();
            // Another get gets the new one, while the first still reads the old one.
            let other = way.options().pool(MIB).build().unwrap();
            new.check(&other.get((producer.address(), "key"), LONG).unwrap());
            stalled.free();
            old.check(&reading.join().unwrap());
        });
        assert_whole(&producer);
    }
}

#[test]
fn a_waiting_get_survives_the_removal_of_a_payload_that_another_has() {
    // Two wait for one payload for one consumer; it is removed while the first reads. The second asked by key: the next
    // payload there is as good.
    let producer = endpoint(4 * MIB);
    let mut stalled = Stalled::new(Way::Direct, LEASE);
    let ticket = Spec::bytes(512 * KIB, 1).put(&producer, "key", &PutOptions::default()).unwrap();
    let second = endpoint(MIB);
    std::thread::scope(|scope| {
        let first = stalled.consumer.clone();
        let address = producer.address();
        let reading = scope.spawn(move || first.get((address, "key"), LONG).unwrap());
        until("the first to have its lease", || producer.stats().leases == 1);
        let waiting = scope.spawn(|| second.get((producer.address(), "key"), LONG).unwrap());
        let refused = endpoint(MIB);
        let by_ticket = scope.spawn({
            let ticket = ticket.clone();
            move || refused.get(&ticket, LONG).unwrap_err()
        });
        producer.remove(&ticket).unwrap();
        assert_eq!(by_ticket.join().unwrap().kind(), &ErrorKind::Gone(Gone::Removed));
        producer.wait_for_consumers("key", 1, LONG).unwrap();
        Spec::bytes(1000, 2).put(&producer, "key", &PutOptions::default()).unwrap();
        Spec::bytes(1000, 2).check(&waiting.join().unwrap());
        stalled.free();
        Spec::bytes(512 * KIB, 1).check(&reading.join().unwrap());
    });
    assert_whole(&producer);
}

// Expiry and leases.

#[test]
fn an_unused_payload_expires() {
    let endpoint = endpoint(MIB);
    let started = Instant::now();
    let ticket = Spec::bytes(MIB, 1).put(&endpoint, "key", &expiring(Duration::from_millis(200))).unwrap();
    assert_eq!(endpoint.stats().payloads, 1);
    assert_whole(&endpoint);
    assert!(started.elapsed() >= Duration::from_millis(200));
    let error = endpoint.get(&ticket, LONG).unwrap_err();
    assert_eq!(error.kind(), &ErrorKind::Gone(Gone::Expired));
    assert_tells(&error, "get");
}

#[test]
fn time_to_live_counts_from_the_last_use() {
    let (producer, consumer) = (endpoint(MIB), endpoint(MIB));
    let time = Duration::from_millis(400);
    let spec = Spec::bytes(100 * KIB, 1);
    let mut options = expiring(time);
    options.consumers = 1000;
    let ticket = spec.put(&producer, "key", &options).unwrap();
    let started = Instant::now();
    // Used again and again for three times its time to live, at most a tenth of it apart (or not at all: then the
    // machine stood still, and this says nothing).
    let mut last = Instant::now();
    while started.elapsed() < 3 * time {
        let result = consumer.get(&ticket, LONG);
        let gap = last.elapsed();
        last = Instant::now();
        match result {
            Ok(payload) => spec.check(&payload),
            Err(error) => {
                assert!(gap >= time / 2, "expired after {gap:?}: {error}");
                return;
            }
        }
        std::thread::sleep(time / 20);
    }
    until("expiry after the last use", || producer.stats().payloads == 0);
    assert_whole(&producer);
}

#[test]
fn nothing_expires_under_a_live_lease() {
    for way in TWO {
        let producer = way.options().pool(MIB).build().unwrap();
        let mut stalled = Stalled::new(way, LEASE);
        let spec = Spec::bytes(512 * KIB, 1);
        let time = Duration::from_millis(50);
        let ticket = spec.put(&producer, "key", &expiring(time)).unwrap();
        std::thread::scope(|scope| {
            let consumer = stalled.consumer.clone();
            let reading = scope.spawn({
                let ticket = ticket.clone();
                move || consumer.get(&ticket, LONG)
            });
            until("the reader to have its lease, or the end of its time", || {
                producer.stats().leases == 1 || producer.stats().payloads == 0
            });
            if producer.stats().leases == 1 {
                let since = Instant::now();
                while since.elapsed() < 8 * time {
                    let stats = producer.stats();
                    assert_eq!(
                        (stats.leases, stats.payloads, stats.pool_buffers),
                        (1, 1, 1),
                        "over {way:?}: {stats:?}, {:?}",
                        stalled.consumer.stats()
                    );
                    std::thread::sleep(time / 5);
                }
            }
            stalled.free();
            match reading.join().unwrap() {
                Ok(payload) => spec.check(&payload),
                Err(error) => assert_eq!(error.kind(), &ErrorKind::Gone(Gone::Expired), "it came too late"),
            }
        });
        assert_whole(&producer);
    }
}

#[test]
fn a_lease_is_kept_alive_for_longer_than_it_lasts() {
    for way in TWO {
        let lease = Duration::from_millis(400);
        let producer = way.options().pool(MIB).lease(lease).build().unwrap();
        let mut stalled = Stalled::new(way, lease);
        let spec = Spec::bytes(512 * KIB, 1);
        let ticket = spec.put(&producer, "key", &PutOptions::default()).unwrap();
        std::thread::scope(|scope| {
            let consumer = stalled.consumer.clone();
            let reading = scope.spawn({
                let ticket = ticket.clone();
                move || consumer.get(&ticket, LONG).unwrap()
            });
            until("the reader to have its lease", || producer.stats().leases == 1);
            std::thread::sleep(4 * lease); // that time passes is what is tested
            stalled.free();
            let payload = reading.join().unwrap();
            spec.check(&payload);
        });
        assert_whole(&producer);
    }
}

#[test]
fn a_get_waits_for_its_key_for_longer_than_a_lease_lasts() {
    let lease = Duration::from_millis(300);
    for way in TWO {
        let producer = way.options().pool(MIB).lease(lease).build().unwrap();
        let consumer = way.options().pool(MIB).lease(lease).build().unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| consumer.get((producer.address(), "key"), LONG).unwrap());
            producer.wait_for_consumers("key", 1, LONG).unwrap();
            std::thread::sleep(3 * lease); // that time passes is what is tested
            Spec::bytes(200 * KIB, 1).put(&producer, "key", &PutOptions::default()).unwrap();
            Spec::bytes(200 * KIB, 1).check(&waiting.join().unwrap());
        });
        assert_whole(&producer);
    }
}

// Many times.

#[test]
fn a_small_pool_filled_and_cleared_takes_puts_again() {
    let endpoint = endpoint(64 * KIB);
    for round in 0..3 {
        let mut tickets = Vec::new();
        loop {
            let spec = Spec::bytes(4000, round);
            match endpoint.alloc_within(4000, Duration::ZERO) {
                Ok(mut buffer) => {
                    fill(round, &mut buffer);
                    let parts = [Part::buffer("bytes", DType::U8, &[4000], buffer)];
                    tickets.push((spec, endpoint.put(format!("key-{}", tickets.len()), parts).unwrap()));
                }
                Err(error) => {
                    assert_eq!(error.kind(), &ErrorKind::PoolFull { need: 4000, free: 0, largest: 0 });
                    break;
                }
            }
        }
        assert_eq!(tickets.len(), 16);
        for (_, ticket) in &tickets {
            endpoint.remove(ticket).unwrap();
        }
        assert_whole(&endpoint);
    }
    Spec::bytes(64 * KIB, 1).put(&endpoint, "all", &PutOptions::default()).unwrap();
}

#[test]
fn fifty_cycles_of_put_and_remove_leave_room_for_a_full_sized_put() {
    let (producer, consumer) = (endpoint(4 * MIB), endpoint(4 * MIB));
    for cycle in 0..50 {
        let spec = if cycle % 2 == 0 { Spec::bytes(3 * MIB + cycle, cycle) } else { Spec::tree(cycle).copied() };
        let ticket = spec.put(&producer, "cycle", &PutOptions::default()).unwrap();
        producer.remove(&ticket).unwrap();
    }
    let full = Spec::bytes(4 * MIB, 1);
    let ticket = full.put(&producer, "full", &PutOptions::default()).unwrap();
    full.check(&consumer.get(&ticket, LONG).unwrap());
    assert_whole(&producer);
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn five_hundred_cycles_leave_the_pools_whole_and_no_descriptor_behind() {
    if !alone("five_hundred_cycles_leave_the_pools_whole_and_no_descriptor_behind") {
        return;
    }
    for way in Way::ALL {
        let pair = Pair::new(way, 4 * MIB);
        let mut before = 0;
        for cycle in 0..500u64 {
            let spec = match cycle % 5 {
                0 => Spec::tree(cycle),
                1 => Spec::bytes(MIB + cycle, cycle),
                2 => Spec::bytes(cycle + 1, cycle).copied(),
                3 => Spec::bytes(33 * KIB + cycle, cycle),
                _ => Spec::bytes(100 * KIB + cycle, cycle).copied(),
            };
            if cycle % 2 == 0 {
                pair.carry("cycle", &spec)
            } else {
                pair.carry_back("cycle", &spec)
            }
            if cycle == 10 {
                before = descriptors();
            }
        }
        pair.assert_whole();
        let after = descriptors();
        assert!(after <= before, "over {way:?}: {before} descriptors after ten cycles, {after} after 500");
    }
}

#[test]
fn endpoints_that_come_and_go_leave_nothing_behind() {
    if !alone("endpoints_that_come_and_go_leave_nothing_behind") {
        return;
    }
    let cycle = |number: u64| {
        let (producer, consumer) =
            (endpoint(MIB), if number.is_multiple_of(2) { endpoint(MIB) } else { tcp_endpoint(MIB) });
        let spec = Spec::bytes(100 * KIB, number);
        let ticket = spec.put(&producer, "key", &PutOptions::default()).unwrap();
        spec.check(&consumer.get(&ticket, LONG).unwrap());
    };
    let mappings = || std::fs::read_to_string("/proc/self/maps").unwrap().matches("memfd:").count();
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    cycle(0);
    cycle(1);
    let before = (descriptors(), mappings(), threads());
    (2..42).for_each(cycle);
    // A thread that has ended may be seen for a moment longer.
    until("all that 40 pairs of endpoints had to be gone", || (descriptors(), mappings(), threads()) <= before);
}

#[test]
fn the_number_of_threads_does_not_grow_with_that_of_peers() {
    if !alone("the_number_of_threads_does_not_grow_with_that_of_peers") {
        return;
    }
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let producer = endpoint(4 * MIB);
    let options = for_consumers(100);
    let spec = Spec::bytes(100 * KIB, 1);
    let ticket = spec.put(&producer, "key", &options).unwrap();
    let before = threads();
    let consumers: Vec<_> = (0..20).map(|n| if n % 2 == 0 { endpoint(MIB) } else { tcp_endpoint(MIB) }).collect();
    let (built, per_endpoint) = (threads(), (threads() - before) / consumers.len());
    for consumer in &consumers {
        spec.check(&consumer.get(&ticket, LONG).unwrap());
    }
    assert_eq!(producer.stats().links, 20);
    assert!(threads() <= built, "{built} threads before there were links, {} after", threads());
    assert!(per_endpoint <= 4, "{per_endpoint} threads an endpoint");
}

// Closing.

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

// Forks.

#[test]
fn a_forked_child_is_refused_and_the_parents_memory_stays_whole() {
    if !alone("a_forked_child_is_refused_and_the_parents_memory_stays_whole") {
        return;
    }
    let (producer, consumer) = (endpoint(4 * MIB), endpoint(4 * MIB));
    let spec = Spec::bytes(MIB, 1);
    let ticket = spec.put(&producer, "key", &for_consumers(2)).unwrap();
    spec.check(&consumer.get(&ticket, LONG).unwrap());
    let forked_error = |result: Result<(), towline::Error>| result.is_err_and(|e| *e.kind() == ErrorKind::Forked);
    let status = forked(|| {
        let results = [
            consumer.get(&ticket, LONG).map(drop),
            consumer.view(&ticket, LONG).map(drop),
            producer.put("other", [Part::bytes("x", DType::U8, &[1], b"x")]).map(drop),
            producer.alloc(100).map(drop),
            producer.remove(&ticket),
            producer.wait_for_consumers("key", 1, LONG),
        ];
        let refused = results.into_iter().filter(|result| forked_error(result.clone())).count();
        let quiet = !producer.remove_key("key") && producer.close(LONG) == Stats::default();
        if quiet { refused as u8 } else { 100 }
    });
    assert_eq!(status, 6, "calls that gave Forked");
    // Also a child that drops the handles does the parent no harm.
    let status = forked(|| {
        drop(producer.clone());
        0
    });
    assert_eq!(status, 0);
    spec.check(&consumer.get(&ticket, LONG).unwrap());
    assert_whole(&producer);
}

#[test]
fn a_fork_during_transfers_leaves_the_parents_bytes_right() {
    if !alone("a_fork_during_transfers_leaves_the_parents_bytes_right") {
        return;
    }
    for way in TWO {
        let (producer, consumer) =
            (way.options().pool(16 * MIB).build().unwrap(), way.options().pool(16 * MIB).build().unwrap());
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 0.. {
                    if stop.load(Ordering::Acquire) {
                        return;
                    }
                    let spec = Spec::bytes(4 * MIB, number);
                    let ticket = spec.put(&producer, "key", &PutOptions::default()).unwrap();
                    spec.check(&consumer.get(&ticket, LONG).unwrap());
                }
            });
            for _ in 0..20 {
                // With copy-on-write, the parent's next write would go to a page that its peers do not see.
                assert_eq!(forked(|| 0), 0);
            }
            stop.store(true, Ordering::Release);
        });
        assert_whole(&producer);
        assert_whole(&consumer);
    }
}

#[test]
fn a_forked_child_builds_an_endpoint_of_its_own() {
    if !alone("a_forked_child_builds_an_endpoint_of_its_own") {
        return;
    }
    let parent = endpoint(MIB);
    let spec = Spec::bytes(100 * KIB, 1);
    let ticket = spec.put(&parent, "key", &PutOptions::default()).unwrap();
    let status = forked(|| {
        let child = endpoint(MIB);
        let payload = child.get(&ticket, LONG).unwrap();
        spec.check(&payload);
        // Another process: never the direct path.
        u8::from(payload.info().path != towline::Path::Shm)
    });
    assert_eq!(status, 0);
    assert_whole(&parent);
}
