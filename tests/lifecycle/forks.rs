//! Forked processes.

use crate::TWO;
use crate::common::*;
use std::sync::atomic::{AtomicBool, Ordering};
use towline::{DType, ErrorKind, Part, PutOptions, Stats};

#[test]
fn a_forked_child_is_refused_and_the_parents_memory_stays_whole() {
    if !alone("forks::a_forked_child_is_refused_and_the_parents_memory_stays_whole") {
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
    if !alone("forks::a_fork_during_transfers_leaves_the_parents_bytes_right") {
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
    if !alone("forks::a_forked_child_builds_an_endpoint_of_its_own") {
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
