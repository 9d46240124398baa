//! What takes minutes: `tests/rxe/run --full` runs it.

use crate::bed::*;
use crate::common::*;
use std::time::{Duration, Instant};
use towline::{Error, ErrorKind, Payload};

/// Moments of a get of [`LEN`] bytes, from its call to after its end, at which something happens to one of its ends.
const MOMENTS: u32 = 12;
const LEN: u64 = 16 * MIB;

/// Lets it get to one of its moments. Which one that is does not matter: they lie all over it.
fn moment(number: u32) {
    std::thread::sleep(Duration::from_millis(50) * number);
}

/// The bytes, or an error that names the peer's end.
#[track_caller]
fn right_or_lost(result: &Result<Payload, Error>, spec: &Spec) {
    match result {
        Ok(payload) => spec.check(payload),
        Err(error) => {
            let kind = format!("{:?}", error.kind());
            let kinds = ["PeerLost", "TransferFailed", "PeerUnreachable", "TimedOut", "LeaseExpired"];
            assert!(kinds.iter().any(|expected| kind.starts_with(expected)), "{error}");
            assert_tells(error, "get");
        }
    }
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run --full"]
fn a_consumer_killed_at_any_moment_leaves_the_producer_whole() {
    let producer = on(1).pool(LEN + MIB).build().unwrap();
    let spec = Spec::bytes(LEN, 1);
    let ticket = spec.put(&producer, "key", &for_consumers(1000)).unwrap();
    for number in 0..MOMENTS {
        let consumer = Process::start(&on(0).pool(LEN + MIB));
        let _reading = consumer.begin_get(&ticket, LONG);
        moment(number);
        consumer.kill();
        until("its lease to be over", || producer.stats().leases == 0);
    }
    // One that waits for a key.
    let consumer = Process::start(&on(0));
    let _waiting = consumer.begin_get((producer.address(), "later"), LONG);
    until("its request", || producer.stats().waiting == 1);
    consumer.kill();
    until("its request to be forgotten", || producer.stats().waiting == 0);
    let consumer = Process::start(&on(0).pool(LEN + MIB));
    spec.check_got(&consumer.get(&ticket, LONG).unwrap());
    producer.remove(&ticket).unwrap();
    assert_whole(&producer);
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run --full"]
fn a_producer_killed_at_any_moment_is_noticed_soon() {
    let consumer = on(0).pool(LEN + MIB).build().unwrap();
    let spec = Spec::bytes(LEN, 1);
    for number in 0..MOMENTS {
        let producer = Process::start(&on(1).pool(LEN + MIB));
        let ticket = producer.put("key", &spec).unwrap();
        std::thread::scope(|scope| {
            let reading = scope.spawn(|| consumer.get(&ticket, LONG));
            moment(number);
            let started = Instant::now();
            producer.kill();
            right_or_lost(&reading.join().unwrap(), &spec);
            assert!(started.elapsed() < 2 * SLACK, "{:?}", started.elapsed());
        });
        assert_whole(&consumer);
    }
    // While its answer is waited for.
    let producer = Process::start(&on(1));
    let address = producer.address.clone();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| consumer.get((&address, "later"), LONG).unwrap_err());
        producer.wait_for_consumers("later", 1);
        producer.kill();
        let error = waiting.join().unwrap();
        assert!(matches!(error.kind(), ErrorKind::PeerLost { .. } | ErrorKind::PeerUnreachable { .. }), "{error}");
    });
    assert_whole(&consumer);
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run --full"]
fn a_consumer_stopped_at_any_moment_keeps_no_memory() {
    let lease = Duration::from_millis(1500);
    for windows in [true, false] {
        let producer = on(1).pool(LEN + MIB).lease(lease).windows(windows).build().unwrap();
        let consumer = Process::start(&on(0).pool(LEN + MIB).lease(lease));
        for number in 0..MOMENTS {
            let spec = Spec::bytes(LEN, number.into());
            let ticket = spec.put(&producer, "key", &for_consumers(2)).unwrap();
            let reading = consumer.begin_get(&ticket, LONG);
            moment(number);
            consumer.signal(Signal::Stop);
            producer.remove(&ticket).unwrap();
            assert_whole(&producer); // long before it goes on
            consumer.signal(Signal::Continue);
            match reading.got() {
                Ok(got) => spec.check_got(&got), // it had them all
                Err(failure) => {
                    let kinds =
                        ["LeaseExpired", "Gone(Removed)", "Gone(Unknown)", "PeerLost", "TimedOut", "TransferFailed"];
                    assert!(kinds.iter().any(|kind| failure.is(kind)), "{failure:?}");
                }
            }
            consumer.assert_whole();
        }
    }
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run --full"]
fn a_producer_stopped_at_any_moment_costs_no_more_than_the_deadline() {
    let ends = Ends::new(LEN + MIB);
    let spec = Spec::bytes(LEN, 1);
    let deadline = Duration::from_secs(3);
    for number in 0..MOMENTS {
        let ticket = ends.there.put_with("key", &spec, &for_consumers(2)).unwrap();
        std::thread::scope(|scope| {
            let started = Instant::now();
            let reading = scope.spawn(|| ends.here.get(&ticket, deadline));
            moment(number);
            ends.there.signal(Signal::Stop);
            right_or_lost(&reading.join().unwrap(), &spec);
            assert!(started.elapsed() < deadline + SLACK, "{:?}", started.elapsed());
            ends.there.signal(Signal::Continue);
        });
        until("the fence", || ends.here.stats().quarantined_bytes == 0);
        ends.there.remove(&ticket).unwrap();
        ends.assert_whole();
    }
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run --full"]
fn of_two_rails_one_is_enough_and_both_are_used_again() {
    const LEN: u64 = 64 * MIB;
    let [[first, third], [second, fourth]] = [devices(), second_rail()];
    let there = Process::start(&Options::default().paths("rdma").device(&third).device(&fourth).pool(LEN + MIB));
    let here = Options::default().paths("rdma").device(&first).device(&second).pool(LEN + MIB).build().unwrap();
    let ends = Ends { here, there };
    let spec = Spec::bytes(LEN, 1);
    let ticket = ends.there.put_with("key", &spec, &for_consumers(100)).unwrap();
    let over = |name: &str| format!("{name} here");
    let get = || {
        let payload = ends.here.get(&ticket, LONG).unwrap();
        spec.check(&payload);
        (payload.info().path_reason.clone(), payload.info().retries)
    };
    assert!(get().0.contains(&over(&first)));
    for _ in 0..3 {
        std::thread::scope(|scope| {
            let reading = scope.spawn(get);
            until("the lease", || ends.there.stats()["leases"] == 1);
            let down = Weather::down(std::slice::from_ref(&first));
            let (reason, retries) = reading.join().unwrap();
            assert!(reason.contains(&over(&second)) && retries > 0, "{reason}");
            drop(down);
        });
        // And the other way round, in the middle of a transfer over the second.
        std::thread::scope(|scope| {
            let reading = scope.spawn(get);
            until("the lease", || ends.there.stats()["leases"] == 1);
            let down = Weather::down(std::slice::from_ref(&second));
            let (reason, _) = reading.join().unwrap();
            assert!(reason.contains(&over(&first)), "{reason}");
            drop(down);
        });
    }
    ends.there.remove(&ticket).unwrap();
    ends.assert_whole();
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run --full"]
fn a_large_payload_arrives_over_a_way_that_loses_one_packet_in_a_hundred() {
    let ends = Ends::new(65 * MIB);
    let weather = Weather::netem(&devices(), "loss 1%");
    for seed in 0..2 {
        ends.carry("there", &Spec::bytes(64 * MIB, seed));
    }
    drop(weather);
    ends.assert_whole();
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run --full"]
fn ten_thousand_transfers_leave_what_is_open_as_it_was() {
    crate::transfers::leave_what_is_open_as_it_was("long::ten_thousand_transfers_leave_what_is_open_as_it_was", 10_000);
}
