//! The time to live, and leases.

use crate::common::*;
use crate::{LEASE, Stalled, TWO};
use std::time::{Duration, Instant};
use towline::{ErrorKind, Gone, PutOptions};

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
fn no_time_to_live_is_refused_and_the_shortest_ends_with_its_lease() {
    let (producer, consumer) = (endpoint(MIB), endpoint(MIB));
    let spec = Spec::bytes(100 * KIB, 1);
    let error = spec.put(&producer, "key", &expiring(Duration::ZERO)).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::BadOption { option: "time_to_live", .. }), "{error}");
    assert_tells(&error, "put");
    assert_whole(&producer);
    // It is granted at once, and lives while it is read; meanwhile its producer does everything else.
    std::thread::scope(|scope| {
        let viewing = scope.spawn(|| consumer.view((producer.address(), "key"), LONG).unwrap());
        producer.wait_for_consumers("key", 1, LONG).unwrap();
        spec.put(&producer, "key", &expiring(Duration::from_nanos(1))).unwrap();
        let view = viewing.join().unwrap();
        spec.put(&producer, "other", &PutOptions::default()).unwrap();
        spec.check(&consumer.get((producer.address(), "other"), LONG).unwrap());
        assert_eq!(view.part(0).unwrap().to_vec().len() as u64, 100 * KIB);
    });
    until("the end of the lease and of the payload", || producer.stats().payloads == 0);
    assert_whole(&producer);
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
            let leased = producer.stats().leases == 1;
            if leased {
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
                Err(error) => {
                    assert!(!leased, "over {way:?}, under a lease: {error}");
                    assert_eq!(error.kind(), &ErrorKind::Gone(Gone::Expired), "it came too late");
                }
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
