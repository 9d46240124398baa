//! Full pools, limits, and waiting: first come, first served, to a deadline, and never in silence.

#![allow(clippy::unwrap_used)] // also in the helpers of tests

mod common;

use common::*;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use towline::{Buffer, DType, Endpoint, ErrorKind, Limits, Part, PutOptions};

#[test]
fn a_full_pool_says_need_free_and_largest_at_the_deadline() {
    let endpoint = endpoint(MIB);
    let mut held: Vec<_> = (0..4).map(|_| endpoint.alloc(256 * KIB as usize).unwrap()).collect();
    held.sort_by_key(Buffer::offset);
    let mut held = held.into_iter();
    let (_first, second, _third, fourth) =
        (held.next().unwrap(), held.next().unwrap(), held.next().unwrap(), held.next().unwrap());
    drop((second, fourth)); // two holes of a quarter, not side by side
    let timeout = Duration::from_millis(100);
    let started = Instant::now();
    let error = endpoint.alloc_within(512 * KIB as usize, timeout).unwrap_err();
    assert_eq!(error.kind(), &ErrorKind::PoolFull { need: 512 * KIB, free: 512 * KIB, largest: 256 * KIB });
    assert!(started.elapsed() >= timeout && started.elapsed() < timeout + SLACK);
    assert_tells(&error, "alloc");
    assert!(error.can_retry());
    // What fits is there at once, and nobody waits any more.
    drop(endpoint.alloc_within(256 * KIB as usize, Duration::ZERO).unwrap());
    assert_eq!(endpoint.stats().pool_waiting, 0);
}

#[test]
fn what_can_never_be_put_does_not_wait_for_room() {
    let endpoint = endpoint(MIB);
    let held = endpoint.alloc(MIB as usize).unwrap();
    let bytes = vec![1; 256 << 10];
    let part = |shape| [Part::bytes("part", DType::F32, shape, &bytes)];
    let started = Instant::now();
    let error = endpoint.put("key", part(&[7])).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::PartMalformed { part: 0, .. }), "{error}");
    let error = endpoint.put("k".repeat(5000), part(&[64 << 10])).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::KeyTooLong { .. }), "{error}");
    let error = endpoint.put_with("key", part(&[64 << 10]), &PutOptions::new().consumers(0)).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::BadOption { option: "consumers", .. }), "{error}");
    assert!(started.elapsed() < SLACK);
    drop(held);
    assert_whole(&endpoint);
}

#[test]
fn with_no_time_nobody_waits() {
    let endpoint = endpoint(MIB);
    let _all = endpoint.alloc(MIB as usize).unwrap();
    let error = endpoint.alloc_within(1, Duration::ZERO).unwrap_err();
    assert_eq!(error.kind(), &ErrorKind::PoolFull { need: 1, free: 0, largest: 0 });
}

#[test]
fn an_alloc_that_waits_gets_its_room() {
    let endpoint = endpoint(MIB);
    let all = endpoint.alloc(MIB as usize).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| endpoint.alloc_within(MIB as usize, LONG).unwrap());
        until("it to wait", || endpoint.stats().pool_waiting == 1);
        drop(all);
        assert_eq!(waiting.join().unwrap().len() as u64, MIB);
    });
    assert_whole(&endpoint);
}

#[test]
fn room_goes_to_who_came_first_and_a_smaller_need_does_not_overtake() {
    let endpoint = endpoint(MIB);
    let mut held: Vec<_> = (0..16).map(|_| endpoint.alloc(64 * KIB as usize).unwrap()).collect();
    held.sort_by_key(Buffer::offset); // so that room given back is in one run
    let order = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        let needs = [256 * KIB, 64 * KIB, 128 * KIB, 64 * KIB];
        for (number, need) in needs.into_iter().enumerate() {
            let (endpoint, order) = (&endpoint, &order);
            scope.spawn(move || {
                let buffer = endpoint.alloc_within(need as usize, LONG).unwrap();
                // Kept with its number, so that its room goes to nobody before the test gives more away.
                order.lock().unwrap().push((number, buffer));
            });
            until("it to wait", || endpoint.stats().pool_waiting == number as u64 + 1);
        }
        // Room for the small ones, but the first needs more.
        held.truncate(14);
        let error = endpoint.alloc_within(1, Duration::ZERO).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::PoolFull { need: 1, .. }), "it would overtake: {error}");
        assert_eq!(endpoint.stats().pool_waiting, 4);
        held.truncate(12);
        until("the first to be served", || order.lock().unwrap().len() == 1);
        assert_eq!(order.lock().unwrap()[0].0, 0);
        drop(std::mem::take(&mut held));
        until("all to be served", || order.lock().unwrap().len() == 4);
    });
    drop(order);
    assert_whole(&endpoint);
}

#[test]
fn who_gives_up_does_not_hold_up_those_behind() {
    let endpoint = endpoint(MIB);
    let most = endpoint.alloc(MIB as usize - 64 * KIB as usize).unwrap();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| endpoint.alloc_within(MIB as usize, Duration::from_millis(300)).unwrap_err());
        until("the first to wait", || endpoint.stats().pool_waiting == 1);
        let second = scope.spawn(|| endpoint.alloc_within(64 * KIB as usize, LONG).unwrap());
        assert!(matches!(first.join().unwrap().kind(), ErrorKind::PoolFull { .. }));
        assert_eq!(second.join().unwrap().len() as u64, 64 * KIB);
    });
    drop(most);
    assert_whole(&endpoint);
}

#[test]
fn a_put_of_bytes_waits_for_room_too() {
    let (producer, consumer) = (endpoint(MIB), endpoint(4 * MIB));
    let first = Spec::bytes(MIB, 1).copied().put(&producer, "first", &PutOptions::default()).unwrap();
    std::thread::scope(|scope| {
        let waiting =
            scope.spawn(|| Spec::bytes(MIB, 2).copied().put(&producer, "second", &PutOptions::default()).unwrap());
        until("it to wait", || producer.stats().pool_waiting == 1);
        Spec::bytes(MIB, 1).check(&consumer.get(&first, LONG).unwrap());
        Spec::bytes(MIB, 2).check(&consumer.get(waiting.join().unwrap(), LONG).unwrap());
    });
    assert_whole(&producer);
}

#[test]
fn a_put_of_bytes_for_which_there_is_no_room_fails_at_the_deadline_and_leaks_nothing() {
    let producer = Options::default().pool(MIB).alloc_timeout(Duration::from_millis(100)).build().unwrap();
    let kept = Spec::bytes(512 * KIB, 1).put(&producer, "kept", &PutOptions::default()).unwrap();
    // There is room for one of its parts, and none for both: neither is kept meanwhile.
    let parts = Spec::of([part("a", DType::U8, &[400 * KIB], 1), part("b", DType::U8, &[400 * KIB], 2)]).copied();
    let error = parts.put(&producer, "kept", &PutOptions::default()).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::PoolFull { need, .. } if *need == 800 * KIB), "{error}");
    assert_eq!((producer.stats().pool_free, producer.stats().payloads), (512 * KIB, 1));
    Spec::bytes(512 * KIB, 1).check(&producer.get(&kept, LONG).unwrap());
    assert_whole(&producer);
}

#[test]
fn a_get_waits_for_room_and_its_deadline_says_what_was_missing() {
    for way in [Way::Direct, Way::Tcp] {
        let producer = way.options().pool(MIB).build().unwrap();
        let consumer = way.options().pool(MIB).build().unwrap();
        let spec = Spec::bytes(512 * KIB, 1);
        let ticket = spec.put(&producer, "key", &PutOptions::default()).unwrap();
        let held = consumer.alloc(768 * KIB as usize).unwrap();
        let timeout = Duration::from_millis(200);
        let started = Instant::now();
        let error = consumer.get(&ticket, timeout).unwrap_err();
        assert_eq!(error.kind(), &ErrorKind::PoolFull { need: 512 * KIB, free: 256 * KIB, largest: 256 * KIB });
        assert!(started.elapsed() >= timeout && started.elapsed() < timeout + SLACK);
        assert_tells(&error, "get");
        // The lease is given back, the payload is still there, and with room it is had.
        until("the lease to be back", || producer.stats().leases == 0);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| consumer.get(&ticket, LONG).unwrap());
            until("it to wait for room", || consumer.stats().pool_waiting == 1);
            drop(held);
            spec.check(&waiting.join().unwrap());
        });
        assert_whole(&producer);
        assert_whole(&consumer);
    }
}

#[test]
fn a_get_that_waits_for_room_holds_up_no_other() {
    let (producer, consumer) = (endpoint(4 * MIB), endpoint(MIB));
    let (large, small) = (Spec::bytes(MIB, 1), Spec::bytes(2 * KIB, 2));
    let large_ticket = large.put(&producer, "large", &PutOptions::default()).unwrap();
    let small_ticket = small.put(&producer, "small", &PutOptions::default()).unwrap();
    let held = consumer.alloc(MIB as usize / 2).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| consumer.get(&large_ticket, LONG).unwrap());
        until("it to wait for room", || consumer.stats().pool_waiting == 1);
        // Into memory of the caller's own, no room in the pool is needed.
        small.check(&consumer.get_into(&small_ticket, vec![0; 2 * KIB as usize], LONG).unwrap());
        drop(held);
        large.check(&waiting.join().unwrap());
    });
    assert_whole(&consumer);
}

#[test]
fn two_endpoints_full_of_unread_payloads_that_get_from_each_other_are_not_stuck() {
    for way in [Way::Direct, Way::Tcp] {
        let ends = [way.options().pool(MIB).build().unwrap(), way.options().pool(MIB).build().unwrap()];
        let tickets: Vec<_> = ends
            .iter()
            .enumerate()
            .map(|(number, end)| {
                let spec = Spec::bytes(MIB, number as u64);
                spec.put(end, "full", &PutOptions::default()).unwrap()
            })
            .collect();
        let started = Instant::now();
        let results = together(2, |number| ends[number].get(&tickets[1 - number], Duration::from_millis(500)));
        assert!(started.elapsed() < SLACK);
        for (number, result) in results.into_iter().enumerate() {
            match result {
                Ok(payload) => Spec::bytes(MIB, 1 - number as u64).check(&payload),
                Err(error) => assert!(matches!(error.kind(), ErrorKind::PoolFull { .. }), "{error}"),
            }
        }
        // Nothing is lost by it.
        for (number, end) in ends.iter().enumerate() {
            if end.stats().payloads == 1 {
                let payload = ends[1 - number].get_into(&tickets[number], vec![0; MIB as usize], LONG).unwrap();
                Spec::bytes(MIB, number as u64).check(&payload);
            }
        }
        ends.iter().for_each(assert_whole);
    }
}

#[test]
fn a_pool_much_smaller_than_what_passes_through_it_is_enough() {
    let (producer, consumer) = (endpoint(MIB), endpoint(MIB));
    let (sender, receiver) = std::sync::mpsc::channel();
    let receiver = Mutex::new(receiver);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (producer, sender) = (&producer, sender.clone());
            scope.spawn(move || {
                for round in 0..16 {
                    let spec = Spec::bytes(300 * KIB + thread * 1000, thread * 100 + round).copied();
                    // Waits until earlier ones have been had.
                    let ticket = spec.put(producer, format!("{thread}/{round}"), &PutOptions::default()).unwrap();
                    sender.send((spec, ticket)).unwrap();
                }
            });
        }
        drop(sender);
        for _ in 0..3 {
            let (consumer, receiver) = (&consumer, &receiver);
            scope.spawn(move || {
                loop {
                    let next = receiver.lock().unwrap().recv();
                    let Ok((spec, ticket)) = next else { return };
                    spec.check(&consumer.get(&ticket, LONG).unwrap());
                }
            });
        }
    });
    assert_eq!(consumer.stats().gets, 64);
    assert_whole(&producer);
    assert_whole(&consumer);
}

// Many.

#[test]
fn a_thousand_gets_wait_and_all_are_served() {
    const GETS: usize = 1000;
    let (producer, consumer) = (endpoint(8 * MIB), endpoint(8 * MIB));
    let address = producer.address();
    std::thread::scope(|scope| {
        let gets: Vec<_> = (0..GETS)
            .map(|number| {
                let (consumer, address) = (&consumer, &address);
                std::thread::Builder::new()
                    .stack_size(128 << 10)
                    .spawn_scoped(scope, move || {
                        let payload = consumer.get((address, format!("key-{}", number % 250)), LONG).unwrap();
                        payload.part(0).unwrap().elements::<u64>().unwrap()[0]
                    })
                    .unwrap()
            })
            .collect();
        for key in 0..250 {
            producer.wait_for_consumers(format!("key-{key}"), GETS / 250, LONG).unwrap();
        }
        assert_eq!(producer.stats().waiting as usize, GETS);
        // Each payload is for the four that wait for its key.
        for key in (0..250u64).rev() {
            let bytes = key.to_le_bytes();
            let parts = [Part::bytes("n", DType::U64, &[1], &bytes)];
            producer.put_with(format!("key-{key}"), parts, &for_consumers(4)).unwrap();
        }
        for (number, get) in gets.into_iter().enumerate() {
            assert_eq!(get.join().unwrap(), number as u64 % 250);
        }
    });
    assert_eq!(consumer.stats().gets as usize, GETS);
    assert_whole(&producer);
    assert_whole(&consumer);
}

// Limits.

fn limited(change: impl FnOnce(&mut Limits)) -> Endpoint {
    let mut limits = Limits::default();
    change(&mut limits);
    Endpoint::builder().pool_size(4 * MIB).limits(limits).build().unwrap()
}

#[test]
fn no_more_payloads_than_the_limit() {
    let endpoint = limited(|limits| limits.payloads = 3);
    let put = |key: &str| Spec::bytes(100, 1).put(&endpoint, key, &PutOptions::default());
    let tickets = ["a", "b", "c"].map(|key| put(key).unwrap());
    let error = put("d").unwrap_err();
    assert_eq!(error.kind(), &ErrorKind::Busy { what: "payloads", limit: 3 });
    assert!(error.can_retry());
    endpoint.remove(&tickets[1]).unwrap();
    put("d").unwrap();
    for key in ["a", "c", "d"] {
        assert!(endpoint.remove_key(key));
    }
    assert_whole(&endpoint);
}

#[test]
fn puts_of_several_parts_do_not_wait_for_each_other() {
    let endpoint = endpoint(MIB);
    let bytes = vec![7; 400 << 10];
    // Any two of these puts have room for one part each, and none for a second.
    let put = |key: &str| {
        let part = |name| Part::bytes(name, DType::U8, &[400 << 10], &bytes);
        endpoint.put(key, [part("a"), part("b")])
    };
    together(4, |thread| {
        for round in 0..50 {
            let ticket = put(&format!("{thread}")).unwrap_or_else(|error| panic!("{thread}, {round}: {error}"));
            endpoint.remove(&ticket).unwrap();
        }
    });
    assert_whole(&endpoint);
    let error = endpoint
        .put("too much", ["a", "b", "c"].map(|name| Part::bytes(name, DType::U8, &[400 << 10], &bytes)))
        .unwrap_err();
    assert_eq!(error.kind(), &ErrorKind::PoolTooSmall { need: 1200 << 10, pool: MIB });
    assert_whole(&endpoint);
}

#[test]
fn no_more_gets_than_the_limit() {
    let (producer, consumer) = (endpoint(MIB), limited(|limits| limits.gets = 2));
    std::thread::scope(|scope| {
        let gets: Vec<_> =
            (0..2).map(|_| scope.spawn(|| consumer.get((producer.address(), "key"), LONG).unwrap())).collect();
        producer.wait_for_consumers("key", 2, LONG).unwrap();
        let error = consumer.get((producer.address(), "key"), LONG).unwrap_err();
        assert_eq!(error.kind(), &ErrorKind::Busy { what: "gets", limit: 2 });
        Spec::bytes(100, 1).put(&producer, "key", &for_consumers(3)).unwrap();
        for get in gets {
            Spec::bytes(100, 1).check(&get.join().unwrap());
        }
    });
    Spec::bytes(100, 1).check(&consumer.get((producer.address(), "key"), LONG).unwrap());
    assert_whole(&producer);
}

#[test]
fn one_peer_has_no_more_waiting_gets_at_a_producer_than_the_limit() {
    let (producer, greedy, other) = (limited(|limits| limits.waiting_per_peer = 2), endpoint(MIB), endpoint(MIB));
    std::thread::scope(|scope| {
        let gets: Vec<_> =
            (0..2).map(|_| scope.spawn(|| greedy.get((producer.address(), "key"), LONG).unwrap())).collect();
        producer.wait_for_consumers("key", 2, LONG).unwrap();
        let error = greedy.get((producer.address(), "key"), LONG).unwrap_err();
        assert_eq!(error.kind(), &ErrorKind::Busy { what: "gets that wait at that producer", limit: 2 });
        // Another peer is not kept out by it.
        let waiting = scope.spawn(|| other.get((producer.address(), "key"), LONG).unwrap());
        producer.wait_for_consumers("key", 3, LONG).unwrap();
        Spec::bytes(100, 1).put(&producer, "key", &for_consumers(3)).unwrap();
        for get in gets {
            Spec::bytes(100, 1).check(&get.join().unwrap());
        }
        Spec::bytes(100, 1).check(&waiting.join().unwrap());
    });
    assert_whole(&producer);
}

#[test]
fn one_peer_has_no_more_leases_at_a_producer_than_the_limit() {
    let producer = limited(|limits| limits.leases_per_peer = 2);
    let (greedy, other) = (endpoint(MIB), endpoint(MIB));
    let spec = Spec::bytes(512 * KIB, 1);
    let ticket = spec.put(&producer, "key", &for_consumers(10)).unwrap();
    let views: Vec<_> = (0..2).map(|_| greedy.view(&ticket, LONG).unwrap()).collect();
    let error = greedy.get(&ticket, LONG).unwrap_err();
    assert_eq!(error.kind(), &ErrorKind::Busy { what: "leases at that producer", limit: 2 });
    spec.check(&other.get(&ticket, LONG).unwrap());
    drop(views);
    until("the leases to be back", || producer.stats().leases == 0);
    spec.check(&greedy.get(&ticket, LONG).unwrap());
    producer.remove(&ticket).unwrap();
    assert_whole(&producer);
}

#[test]
fn no_more_links_than_the_limit() {
    let producer = limited(|limits| limits.links = 3);
    let spec = Spec::bytes(100, 1);
    let ticket = spec.put(&producer, "key", &for_consumers(10)).unwrap();
    // Each comes over one connection, as only TCP is allowed there.
    let mut consumers: Vec<_> = (0..3).map(|_| tcp_endpoint(MIB)).collect();
    for consumer in &consumers {
        spec.check(&consumer.get(&ticket, LONG).unwrap());
    }
    let refused = tcp_endpoint(MIB);
    let error = refused.get(&ticket, LONG).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::PeerLost { .. } | ErrorKind::Busy { .. }), "{error}");
    assert!(error.can_retry());
    for consumer in &consumers {
        spec.check(&consumer.get(&ticket, LONG).unwrap());
    }
    consumers.pop();
    until("a link to be free", || producer.stats().links == 2);
    spec.check(&refused.get(&ticket, LONG).unwrap());
}
