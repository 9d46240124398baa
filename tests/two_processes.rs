//! Two real processes, one of them killed, stopped, closed or started anew at the wrong moment.

#![allow(clippy::unwrap_used)] // also in the helpers of tests

mod common;

use common::*;
use std::time::{Duration, Instant};
use towline::{Endpoint, ErrorKind, Gone, PutOptions};

/// A consumer in another process that has a lease on a payload, and waits for room in its pool.
fn stalled(way: Way, lease: Duration, producer: &Endpoint, from: impl Into<Source>) -> (Process, Pending) {
    let consumer = Process::start(&way.options().pool(MIB).lease(lease));
    consumer.alloc(MIB, Duration::ZERO, "all").unwrap();
    let before = producer.stats().leases;
    let reading = consumer.begin_get(from, LONG);
    until("the consumer to have its lease", || producer.stats().leases == before + 1);
    (consumer, reading)
}

const LEASE: Duration = Duration::from_secs(30);

// Kills.

#[test]
fn a_consumer_killed_with_a_lease_leaves_the_payload_to_others() {
    for way in Way::APART {
        let producer = way.options().pool(MIB).build().unwrap();
        let spec = Spec::bytes(MIB, 1);
        spec.put(&producer, "key", &PutOptions::default()).unwrap();
        let (consumer, _reading) = stalled(way, LEASE, &producer, (producer.address(), "key"));
        let started = Instant::now();
        consumer.kill();
        until("the lease to be over", || producer.stats().leases == 0);
        assert!(started.elapsed() < SLACK, "long before its time: {:?}", started.elapsed());
        assert_eq!(producer.stats().payloads, 1);
        let other = Process::start(&way.options());
        spec.check_got(&other.get((producer.address(), "key"), LONG).unwrap());
        assert_whole(&producer);
    }
}

#[test]
fn a_consumer_killed_while_it_waits_for_a_key_is_forgotten() {
    for way in Way::APART {
        let producer = way.options().build().unwrap();
        let consumer = Process::start(&way.options());
        let _waiting = consumer.begin_get((producer.address(), "key"), LONG);
        producer.wait_for_consumers("key", 1, LONG).unwrap();
        consumer.kill();
        until("it to be forgotten", || producer.stats().waiting == 0);
        // What is put now is not lost on it.
        let spec = Spec::bytes(100 * KIB, 1);
        spec.put(&producer, "key", &PutOptions::default()).unwrap();
        let other = Process::start(&way.options());
        spec.check_got(&other.get((producer.address(), "key"), LONG).unwrap());
        assert_whole(&producer);
    }
}

#[test]
fn a_consumer_killed_at_any_moment_of_a_get_leaves_the_pool_whole() {
    const MOMENTS: u32 = 8;
    for way in Way::APART {
        let options = way.options().pool(64 * MIB);
        let producer = options.build().unwrap();
        let spec = Spec::bytes(48 * MIB, 1);
        let ticket = spec.put(&producer, "key", &for_consumers(1000)).unwrap();
        let whole = {
            let consumer = Process::start(&options);
            drop(consumer.get(&ticket, LONG).unwrap()); // connects
            let started = Instant::now();
            drop(consumer.get(&ticket, LONG).unwrap());
            started.elapsed()
        };
        for moment in 0..MOMENTS {
            let consumer = Process::start(&options);
            let _reading = consumer.begin_get(&ticket, LONG);
            std::thread::sleep(whole * moment / (MOMENTS - 1)); // which moment it is does not matter
            consumer.kill();
            until("its lease to be over", || producer.stats().leases == 0);
        }
        let last = Process::start(&options);
        spec.check_got(&last.get(&ticket, LONG).unwrap());
        producer.remove(&ticket).unwrap();
        assert_whole(&producer);
    }
}

#[test]
fn a_producer_killed_while_a_get_waits_for_its_key_is_an_error_soon() {
    for way in Way::APART {
        let consumer = way.options().build().unwrap();
        let producer = Process::start(&way.options());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| consumer.get((&producer.address, "key"), LONG).unwrap_err());
            producer.wait_for_consumers("key", 1);
            let started = Instant::now();
            producer.signal(Signal::Kill);
            let error = waiting.join().unwrap();
            assert!(matches!(error.kind(), ErrorKind::PeerLost { .. }), "{error}");
            assert!(started.elapsed() < SLACK, "{:?}", started.elapsed());
            assert_tells(&error, "get");
        });
        assert_whole(&consumer);
    }
}

#[test]
fn a_producer_killed_under_a_lease_is_an_error_soon() {
    for way in Way::APART {
        let consumer = way.options().pool(MIB).build().unwrap();
        let producer = Process::start(&way.options().pool(MIB));
        let ticket = producer.put("key", &Spec::bytes(MIB, 1)).unwrap();
        let all = consumer.alloc(MIB as usize).unwrap();
        std::thread::scope(|scope| {
            let reading = scope.spawn(|| consumer.get(&ticket, LONG).unwrap_err());
            until("the lease", || producer.stats()["leases"] == 1);
            let started = Instant::now();
            producer.signal(Signal::Kill);
            let error = reading.join().unwrap();
            assert!(matches!(error.kind(), ErrorKind::PeerLost { .. }), "{error}");
            assert!(started.elapsed() < SLACK, "{:?}", started.elapsed());
        });
        drop(all);
        assert_whole(&consumer);
    }
}

#[test]
fn a_producer_killed_at_any_moment_of_a_get_gives_right_bytes_or_an_error() {
    const MOMENTS: u32 = 8;
    for way in Way::APART {
        let options = way.options().pool(64 * MIB);
        let consumer = options.build().unwrap();
        let spec = Spec::bytes(48 * MIB, 1);
        let mut whole = Duration::from_millis(30);
        let mut failed = 0;
        for moment in 0..MOMENTS {
            let producer = Process::start(&options);
            let ticket = producer.put_with("key", &spec, &for_consumers(2)).unwrap();
            if moment == 0 {
                drop(consumer.get(&ticket, LONG).unwrap());
                let started = Instant::now();
                drop(consumer.get(&ticket, LONG).unwrap());
                whole = started.elapsed();
                continue;
            }
            let result = std::thread::scope(|scope| {
                let reading = scope.spawn(|| consumer.get(&ticket, LONG));
                std::thread::sleep(whole * moment / MOMENTS); // which moment it is does not matter
                producer.signal(Signal::Kill);
                reading.join().unwrap()
            });
            match result {
                Ok(payload) => spec.check(&payload),
                Err(error) => {
                    failed += 1;
                    assert!(
                        matches!(error.kind(), ErrorKind::PeerLost { .. } | ErrorKind::PeerUnreachable { .. }),
                        "{error}"
                    );
                }
            }
            assert_whole(&consumer);
        }
        eprintln!("over {way:?}: {failed} of {} gets were hit", MOMENTS - 1);
    }
}

#[test]
fn a_producer_killed_between_two_bytes_is_an_error_soon() {
    // The relay holds the data back: the kill comes when some bytes have arrived and others have not.
    let proxy = Proxy::new();
    let producer = Process::start(&Way::Tcp.options().advertise(proxy.address));
    proxy.target(producer_port(&producer));
    let consumer = Way::Tcp.options().build().unwrap();
    let ticket = producer.put("key", &Spec::bytes(8 * MIB, 1)).unwrap();
    proxy.hold_data_after(3 * MIB + 17);
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| consumer.get(&ticket, LONG).unwrap_err());
        proxy.wait_until_held();
        let started = Instant::now();
        producer.signal(Signal::Kill);
        proxy.refuse(true);
        proxy.cut();
        let error = reading.join().unwrap();
        assert!(matches!(error.kind(), ErrorKind::PeerLost { .. }), "{error}");
        assert!(started.elapsed() < SLACK, "{:?}", started.elapsed());
    });
    assert_whole(&consumer);
}

/// The port at which a child listens, whatever it advertises.
fn producer_port(process: &Process) -> std::net::SocketAddr {
    process.call(&["port"]).unwrap().parse().unwrap()
}

#[test]
fn a_connection_cut_between_two_bytes_is_made_again() {
    let proxy = Proxy::new();
    let producer = Process::start(&Way::Tcp.options().advertise(proxy.address));
    proxy.target(producer_port(&producer));
    let consumer = Way::Tcp.options().build().unwrap();
    let spec = Spec::bytes(8 * MIB, 1);
    let ticket = producer.put("key", &spec).unwrap();
    proxy.hold_data_after(3 * MIB + 17);
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| consumer.get(&ticket, LONG).unwrap());
        proxy.wait_until_held();
        proxy.cut();
        proxy.release();
        let payload = reading.join().unwrap();
        spec.check(&payload);
        assert!(payload.info().retries >= 1);
    });
    assert!(consumer.stats().retries >= 1);
    assert_whole(&consumer);
    producer.assert_whole();
}

// Stops.

#[test]
fn a_stopped_producer_is_a_time_out_at_the_deadline() {
    for way in Way::APART {
        let consumer = way.options().build().unwrap();
        let producer = Process::start(&way.options());
        let spec = Spec::bytes(4 * MIB, 1);
        let ticket = producer.put("key", &spec).unwrap();
        // Connected already, and not yet.
        for connected in [false, true] {
            if connected {
                let first = producer.put("first", &Spec::bytes(100, 2)).unwrap();
                drop(consumer.get(&first, LONG).unwrap());
            }
            producer.signal(Signal::Stop);
            let timeout = Duration::from_millis(300);
            let started = Instant::now();
            let error = consumer.get((&producer.address, "other"), timeout).unwrap_err();
            let took = started.elapsed();
            assert!(matches!(error.kind(), ErrorKind::TimedOut { .. }), "{error}");
            assert!(took >= timeout && took < timeout + SLACK, "{took:?}");
            let started = Instant::now();
            let error = consumer.get(&ticket, timeout).unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::TimedOut { .. }), "{error}");
            assert!(started.elapsed() < timeout + SLACK);
            producer.signal(Signal::Continue);
        }
        // It goes on, and nothing was lost.
        spec.check(&consumer.get(&ticket, LONG).unwrap());
        assert_whole(&consumer);
        producer.assert_whole();
    }
}

#[test]
fn a_stopped_consumer_loses_its_lease_over_tcp_and_never_sees_other_bytes() {
    let lease = Duration::from_millis(400);
    let producer = Way::Tcp.options().pool(MIB).lease(lease).build().unwrap();
    let spec = Spec::bytes(MIB, 1);
    let ticket = spec.put(&producer, "key", &PutOptions::default()).unwrap();
    let (consumer, reading) = stalled(Way::Tcp, lease, &producer, &ticket);
    consumer.signal(Signal::Stop);
    producer.remove(&ticket).unwrap();
    // Its time over, its key is revoked, and the memory is another's.
    assert_whole(&producer);
    Spec::bytes(MIB, 2).put(&producer, "other", &PutOptions::default()).unwrap();
    consumer.signal(Signal::Continue);
    consumer.release("all");
    match reading.got() {
        Ok(got) => panic!("it was not there to be read: {got:?}"),
        Err(failure) => assert!(
            ["LeaseExpired", "Gone(Removed)", "Gone(Unknown)", "PeerLost", "TimedOut"]
                .iter()
                .any(|kind| failure.is(kind)),
            "{failure:?}"
        ),
    }
    consumer.assert_whole();
}

#[test]
fn a_stopped_consumer_gets_the_payload_when_it_is_still_there() {
    let lease = Duration::from_millis(400);
    let producer = Way::Tcp.options().pool(MIB).lease(lease).build().unwrap();
    let spec = Spec::bytes(MIB, 1);
    spec.put(&producer, "key", &PutOptions::default()).unwrap();
    let (consumer, reading) = stalled(Way::Tcp, lease, &producer, (producer.address(), "key"));
    consumer.signal(Signal::Stop);
    until("its lease to be over", || producer.stats().leases == 0);
    assert_eq!(producer.stats().payloads, 1, "it was not delivered");
    consumer.signal(Signal::Continue);
    consumer.release("all");
    match reading.got() {
        Ok(got) => spec.check_got(&got),
        Err(failure) => {
            assert!(failure.is("LeaseExpired"), "{failure:?}");
            spec.check_got(&consumer.get((producer.address(), "key"), LONG).unwrap());
        }
    }
    assert_whole(&producer);
}

// Restarts.

#[test]
fn a_producer_started_anew_on_its_port_serves_the_consumers_of_the_old_one() {
    for way in Way::APART {
        let consumer = way.options().build().unwrap();
        let first = Process::start(&way.options());
        let address = first.address.clone();
        let (old, got) =
            (first.put("old", &Spec::bytes(MIB, 1)).unwrap(), first.put("got", &Spec::bytes(MIB, 2)).unwrap());
        Spec::bytes(MIB, 2).check(&consumer.get(&got, LONG).unwrap());
        first.kill();
        let second = Process::start(&way.options().bind(&address));
        assert_eq!(second.address, address);
        let new = second.put("new", &Spec::bytes(MIB, 3)).unwrap();
        second.put("by key", &Spec::bytes(MIB, 4)).unwrap();
        Spec::bytes(MIB, 3).check(&consumer.get(&new, LONG).unwrap());
        Spec::bytes(MIB, 4).check(&consumer.get((&address, "by key"), LONG).unwrap());
        let error = consumer.get(&old, LONG).unwrap_err();
        assert_eq!(error.kind(), &ErrorKind::Gone(Gone::OtherIncarnation), "over {way:?}");
        second.assert_whole();
        assert_whole(&consumer);
    }
}

#[test]
fn a_consumer_started_anew_gets_what_the_old_one_did_not() {
    for way in Way::APART {
        let producer = way.options().build().unwrap();
        let spec = Spec::bytes(MIB, 1);
        let ticket = spec.put(&producer, "key", &PutOptions::default()).unwrap();
        let (consumer, _reading) = stalled(way, LEASE, &producer, (producer.address(), "key"));
        let address = consumer.address.clone();
        consumer.kill();
        let again = Process::start(&way.options().bind(&address));
        spec.check_got(&again.get(&ticket, LONG).unwrap());
        assert_whole(&producer);
    }
}

// Closes.

#[test]
fn a_consumer_closed_during_a_get_gives_its_lease_back() {
    for way in Way::APART {
        let producer = way.options().build().unwrap();
        let spec = Spec::bytes(MIB, 1);
        spec.put(&producer, "key", &PutOptions::default()).unwrap();
        let (consumer, reading) = stalled(way, LEASE, &producer, (producer.address(), "key"));
        let left = consumer.close(LONG);
        assert_eq!((left["gets_in_progress"], left["quarantined"]), (0, 0));
        assert!(reading.got().unwrap_err().is("Closed"));
        until("the lease to be back", || producer.stats().leases == 0);
        let other = Process::start(&way.options());
        spec.check_got(&other.get((producer.address(), "key"), LONG).unwrap());
        assert_whole(&producer);
    }
}

#[test]
fn a_producer_closed_during_a_get_waits_for_the_reader() {
    for way in Way::APART {
        let producer = way.options().build().unwrap();
        let spec = Spec::bytes(MIB, 1);
        spec.put(&producer, "key", &PutOptions::default()).unwrap();
        let (consumer, reading) = stalled(way, LEASE, &producer, (producer.address(), "key"));
        std::thread::scope(|scope| {
            let closing = scope.spawn(|| producer.close(LONG));
            until("the close to begin", || producer.stats().payloads == 0);
            assert!(!closing.is_finished());
            consumer.release("all");
            spec.check_got(&reading.got().unwrap());
            let left = closing.join().unwrap();
            assert_eq!((left.leases, left.fencing), (0, 0));
        });
    }
}

#[test]
fn a_producer_that_can_not_wait_closes_at_its_deadline_and_its_reader_is_told() {
    for way in Way::APART {
        let producer = way.options().build().unwrap();
        let spec = Spec::bytes(MIB, 1);
        spec.put(&producer, "key", &PutOptions::default()).unwrap();
        let (consumer, reading) = stalled(way, LEASE, &producer, (producer.address(), "key"));
        let started = Instant::now();
        let left = producer.close(Duration::from_millis(200));
        assert_eq!(left.leases, 1);
        assert!(started.elapsed() < SLACK);
        drop(producer);
        consumer.release("all");
        match reading.got() {
            Ok(got) => spec.check_got(&got),
            Err(failure) => assert!(failure.is("PeerLost") || failure.is("LeaseExpired"), "{failure:?}"),
        }
        consumer.assert_whole();
    }
}

// Many.

#[test]
fn two_processes_carry_both_ways_at_once() {
    for way in Way::APART {
        let pair = Pair::new(way, 32 * MIB);
        let There::Apart(there) = &pair.there else { unreachable!() };
        together(4, |thread| {
            for round in 0..12u64 {
                let spec = Spec::bytes((1 << (8 + round)) + thread as u64, thread as u64 * 100 + round);
                let key = format!("{thread}/{round}");
                if thread % 2 == 0 {
                    let ticket = spec.put(&pair.here, &key, &PutOptions::default()).unwrap();
                    spec.check_got(&there.get(&ticket, LONG).unwrap());
                } else {
                    let ticket = there.put(&key, &spec).unwrap();
                    spec.check(&pair.here.get(&ticket, LONG).unwrap());
                }
            }
        });
        pair.assert_whole();
    }
}

#[test]
fn four_producers_in_processes_of_their_own_and_one_consumer() {
    for way in Way::APART {
        let consumer = way.options().build().unwrap();
        let producers: Vec<_> = (0..4).map(|_| Process::start(&way.options().pool(4 * MIB))).collect();
        together(4, |number| {
            for round in 0..4u64 {
                let spec = Spec::bytes(MIB, number as u64 * 10 + round);
                let ticket = producers[number].put(&format!("round-{round}"), &spec).unwrap();
                spec.check(&consumer.get(&ticket, LONG).unwrap());
            }
        });
        for producer in &producers {
            producer.assert_whole();
        }
        assert_whole(&consumer);
    }
}

#[test]
fn one_payload_for_three_consumers_in_processes_of_their_own() {
    for way in Way::APART {
        let producer = way.options().build().unwrap();
        let consumers: Vec<_> = (0..3).map(|_| Process::start(&way.options())).collect();
        let waiting: Vec<_> =
            consumers.iter().map(|consumer| consumer.begin_get((producer.address(), "key"), LONG)).collect();
        producer.wait_for_consumers("key", 3, LONG).unwrap();
        let spec = Spec::tree(1).copied();
        spec.put(&producer, "key", &for_consumers(3)).unwrap();
        for get in waiting {
            spec.check_got(&get.got().unwrap());
        }
        assert_whole(&producer);
    }
}

#[test]
fn of_two_processes_that_wait_for_one_payload_one_gets_it() {
    for way in Way::APART {
        let producer = way.options().build().unwrap();
        let consumers = [Process::start(&way.options()), Process::start(&way.options())];
        let first = Spec::bytes(MIB, 1);
        let ticket = first.put(&producer, "key", &PutOptions::default()).unwrap();
        let by_ticket = consumers.each_ref().map(|consumer| consumer.begin_get(&ticket, LONG));
        let results = by_ticket.map(Pending::got);
        let (got, refused) = match &results {
            [Ok(got), Err(refused)] | [Err(refused), Ok(got)] => (got, refused),
            other => panic!("{other:?}"),
        };
        first.check_got(got);
        assert!(refused.is("Gone(Consumed)"), "{refused:?}");
        assert_whole(&producer);
    }
}
