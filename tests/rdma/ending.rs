//! Ends: of processes, of time, of links. Memory comes back after its fence and not before.

use crate::bed::*;
use crate::common::*;
use std::time::{Duration, Instant};
use towline::{Endpoint, ErrorKind, Gone, PutOptions};

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_producer_killed_during_a_get_is_an_error_soon() {
    const MOMENTS: u32 = 3;
    let consumer = on(0).pool(64 * MIB).build().unwrap();
    let spec = Spec::bytes(32 * MIB, 1);
    for moment in 0..MOMENTS {
        let producer = Process::start(&on(1).pool(64 * MIB));
        let ticket = producer.put("key", &spec).unwrap();
        std::thread::scope(|scope| {
            let reading = scope.spawn(|| consumer.get(&ticket, LONG).unwrap_err());
            until("the lease", || producer.stats()["leases"] == 1);
            std::thread::sleep(Duration::from_millis(100) * moment); // which moment it is does not matter
            let started = Instant::now();
            producer.signal(Signal::Kill);
            let error = reading.join().unwrap();
            let gone = matches!(error.kind(), ErrorKind::PeerLost { .. } | ErrorKind::TransferFailed { .. });
            assert!(gone, "{error}");
            assert!(started.elapsed() < 2 * SLACK, "{:?}", started.elapsed());
            assert_tells(&error, "get");
        });
        assert_whole(&consumer);
    }
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_consumer_killed_during_a_get_leaves_the_payload_to_others() {
    let producer = on(1).pool(64 * MIB).build().unwrap();
    let spec = Spec::bytes(32 * MIB, 1);
    let ticket = spec.put(&producer, "key", &PutOptions::default()).unwrap();
    let consumer = Process::start(&on(0).pool(64 * MIB));
    let _reading = consumer.begin_get(&ticket, LONG);
    until("its lease", || producer.stats().leases == 1);
    let started = Instant::now();
    consumer.kill();
    until("its lease to be over", || producer.stats().leases == 0);
    assert!(started.elapsed() < SLACK, "long before its time: {:?}", started.elapsed());
    let other = Process::start(&on(0).pool(64 * MIB));
    spec.check_got(&other.get(&ticket, LONG).unwrap());
    assert_whole(&producer);
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_stopped_producer_is_read_all_the_same() {
    let ends = Ends::new(32 * MIB);
    let spec = Spec::bytes(24 * MIB, 1);
    let ticket = ends.there.put("key", &spec).unwrap();
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| ends.here.get(&ticket, LONG).unwrap());
        until("the lease", || ends.there.stats()["leases"] == 1);
        ends.there.signal(Signal::Stop);
        spec.check(&reading.join().unwrap());
        ends.there.signal(Signal::Continue);
    });
    ends.assert_whole();
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_stopped_consumer_loses_its_lease_and_the_memory_is_fenced_first() {
    a_stopped_consumer_loses_its_lease(true);
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn without_windows_the_queue_pair_is_the_fence() {
    a_stopped_consumer_loses_its_lease(false);
}

fn a_stopped_consumer_loses_its_lease(windows: bool) {
    let lease = Duration::from_millis(600);
    let producer = on(1).pool(MIB).lease(lease).windows(windows).build().unwrap();
    let spec = Spec::bytes(MIB, 1);
    let ticket = spec.put(&producer, "key", &PutOptions::default()).unwrap();
    let consumer = Process::start(&on(0).pool(MIB).lease(lease));
    consumer.alloc(MIB, Duration::ZERO, "all").unwrap();
    let reading = consumer.begin_get(&ticket, LONG);
    until("its lease", || producer.stats().leases == 1);
    consumer.signal(Signal::Stop);
    producer.remove(&ticket).unwrap();
    assert_whole(&producer); // what its peer could read by is gone
    Spec::bytes(MIB, 2).put(&producer, "other", &PutOptions::default()).unwrap();
    consumer.signal(Signal::Continue);
    consumer.release("all");
    let failure = reading.got().unwrap_err();
    let kinds = ["LeaseExpired", "Gone(Removed)", "Gone(Unknown)", "PeerLost", "TimedOut"];
    assert!(kinds.iter().any(|kind| failure.is(kind)), "{failure:?}");
    consumer.assert_whole();
    // It goes on, over a new link if need be.
    Spec::bytes(MIB, 2).check_got(&consumer.get((producer.address(), "other"), LONG).unwrap());
}

/// Fills the whole pool, looks at it for a while, and says whether a byte changed by itself.
fn changes(endpoint: &Endpoint, time: Duration) -> bool {
    const CANARY: u8 = 0xa5;
    let mut all = endpoint.alloc(endpoint.stats().pool_bytes as usize).unwrap();
    all.fill(CANARY);
    let started = Instant::now();
    let mut looks = 0;
    while started.elapsed() < time || looks < 2 {
        if all.iter().any(|byte| *byte != CANARY) {
            return true;
        }
        looks += 1;
    }
    false
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn no_late_byte_falls_into_memory_that_a_timed_out_get_gave_back() {
    // B128, B130: the answers to reads are on their way when the deadline passes, and when the fence is seen.
    let ends = Ends::new(8 * MIB);
    ends.carry("first", &Spec::bytes(MIB, 1)); // connects
    let ticket = ends.there.put("key", &Spec::bytes(8 * MIB, 2)).unwrap();
    let late = Weather::netem(&devices()[1..], "delay 900ms");
    let timeout = Duration::from_millis(300);
    let started = Instant::now();
    let error = ends.here.get(&ticket, timeout).unwrap_err();
    assert!(started.elapsed() < timeout + SLACK, "{:?}", started.elapsed());
    match error.kind() {
        ErrorKind::TimedOut { quarantined, .. } => assert_eq!(*quarantined, 8 * MIB, "{error}"),
        _ => panic!("{error}"),
    }
    assert_tells(&error, "get");
    assert_eq!(ends.here.stats().quarantined_bytes, 8 * MIB);
    assert!(ends.here.alloc_within(4096, Duration::ZERO).is_err(), "none of it is anybody's before the fence");
    until("the fence", || ends.here.stats().quarantined_bytes == 0);
    assert!(!changes(&ends.here, Duration::from_secs(2)), "a late byte");
    drop(late);
    // The payload was not used up, and a new queue pair brings it.
    Spec::bytes(8 * MIB, 2).check(&ends.here.get(&ticket, LONG).unwrap());
    ends.assert_whole();
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn the_callers_memory_comes_back_after_the_fence_too() {
    let ends = Ends::new(4 * MIB);
    ends.carry("first", &Spec::bytes(MIB, 1));
    let ticket = ends.there.put("key", &Spec::bytes(4 * MIB, 2)).unwrap();
    let late = Weather::netem(&devices()[1..], "delay 900ms");
    let regions = objects(&devices()[0], "mr");
    let error = ends.here.get_into(&ticket, vec![0; 4 * MIB as usize], Duration::from_millis(300)).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::TimedOut { quarantined: 4_194_304, .. }), "{error}");
    // It stays registered while it may be written; the fence may come before this looks.
    let registered = objects(&devices()[0], "mr");
    assert!(registered > regions || ends.here.stats().quarantined_bytes == 0, "{registered} of {regions}");
    until("the fence", || ends.here.stats().quarantined_bytes == 0);
    assert_eq!(objects(&devices()[0], "mr"), regions);
    drop(late);
    Spec::bytes(4 * MIB, 2).check(&ends.here.get(&ticket, LONG).unwrap());
    ends.assert_whole();
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_producer_started_anew_on_its_port_serves_the_consumers_of_the_old_one() {
    let consumer = on(0).build().unwrap();
    let first = Process::start(&on(1));
    let address = first.address.clone();
    let old = first.put("old", &Spec::bytes(MIB, 1)).unwrap();
    let got = first.put("got", &Spec::bytes(MIB, 2)).unwrap();
    Spec::bytes(MIB, 2).check(&consumer.get(&got, LONG).unwrap());
    first.kill();
    let second = Process::start(&on(1).bind(&address));
    assert_eq!(second.address, address);
    let new = second.put("new", &Spec::bytes(MIB, 3)).unwrap();
    Spec::bytes(MIB, 3).check(&consumer.get(&new, LONG).unwrap());
    let error = consumer.get(&old, LONG).unwrap_err();
    assert_eq!(error.kind(), &ErrorKind::Gone(Gone::OtherIncarnation));
    second.assert_whole();
    assert_whole(&consumer);
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn closing_during_a_get_frees_everything() {
    let producer = on(1).pool(64 * MIB).build().unwrap();
    let spec = Spec::bytes(32 * MIB, 1);
    let ticket = spec.put(&producer, "key", &for_consumers(2)).unwrap();
    let consumer = Process::start(&on(0).pool(64 * MIB));
    let reading = consumer.begin_get(&ticket, LONG);
    until("its lease", || producer.stats().leases == 1);
    let left = consumer.close(LONG);
    assert_eq!((left["gets_in_progress"], left["quarantined"]), (0, 0));
    assert!(reading.got().unwrap_err().is("Closed"));
    until("the lease to be back", || producer.stats().leases == 0);
    // And of the producer, whose memory is being read.
    let consumer = Process::start(&on(0).pool(64 * MIB));
    let reading = consumer.begin_get(&ticket, LONG);
    until("its lease", || producer.stats().leases == 1);
    let started = Instant::now();
    let left = producer.close(Duration::from_millis(100));
    assert!(started.elapsed() < SLACK, "{:?}", started.elapsed());
    assert!(left.leases <= 1, "{left:?}");
    match reading.got() {
        Ok(got) => spec.check_got(&got), // it was in time
        Err(failure) => assert!(failure.is("PeerLost") || failure.is("PeerUnreachable"), "{failure:?}"),
    }
    consumer.assert_whole();
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_forked_child_is_refused_and_the_parents_transfers_stay_right() {
    if !alone("ending::a_forked_child_is_refused_and_the_parents_transfers_stay_right") {
        return;
    }
    let ends = Ends::new(32 * MIB);
    let spec = Spec::bytes(24 * MIB, 1);
    let ticket = ends.there.put("key", &spec).unwrap();
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| ends.here.get_into(&ticket, vec![0; 24 * MIB as usize], LONG).unwrap());
        until("the lease", || ends.there.stats()["leases"] == 1);
        let code = forked(|| {
            let error = ends.here.alloc(1).unwrap_err();
            u8::from(matches!(error.kind(), ErrorKind::Forked))
        });
        assert_eq!(code, 1);
        spec.check(&reading.join().unwrap());
    });
    ends.carry_back("after", &Spec::bytes(MIB, 2));
    ends.assert_whole();
}
