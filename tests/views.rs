//! Views: a payload read where it lies, in its producer's memory, under a lease.

#![allow(clippy::unwrap_used)] // also in the helpers of tests

mod common;

use common::*;
use std::time::Duration;
use towline::{DType, ErrorKind, Gone, Path, PutOptions};

/// What this process may do with the page at `address`, as `/proc/self/maps` has it: `r--s` and the like.
fn rights_at(address: *const u8) -> String {
    let address = address as u64;
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let hex = |text: &str| u64::from_str_radix(text, 16).unwrap();
    let line = maps.lines().find(|line| {
        let (from, to) = line.split(' ').next().unwrap().split_once('-').unwrap();
        (hex(from)..hex(to)).contains(&address)
    });
    line.unwrap().split(' ').nth(1).unwrap().to_owned()
}

#[test]
fn a_view_of_another_process_reads_its_memory_in_place() {
    let pair = Pair::new(Way::Shm, MIB);
    let There::Apart(producer) = &pair.there else { unreachable!() };
    let spec = Spec::of([part("a", DType::F32, &[100, 100], 1), part("b", DType::U8, &[500 * KIB], 2)]);
    let ticket = producer.put("key", &spec).unwrap();
    let view = pair.here.view(&ticket, LONG).unwrap();
    spec.check_got(&Got::of_view(&view));
    assert_eq!((view.info().path, view.info().bytes, view.info().fallback_bytes), (Path::Shm, spec.len(), 0));
    assert!(view.info().path_reason.contains("same host"), "{}", view.info().path_reason);
    let stats = pair.here.stats();
    assert_eq!((stats.pool_buffers, stats.pool_free), (0, MIB), "no byte was copied");
    assert_eq!(rights_at(view.part(1).unwrap().as_ptr()), "r--s", "read-only, and the producer's own pages");
    assert_eq!(producer.stats()["leases"], 1);
    drop(view);
    pair.assert_whole();
}

#[test]
fn a_view_within_one_process_is_direct() {
    let (producer, consumer) = (endpoint(MIB), endpoint(MIB));
    let spec = Spec::tree(1);
    let ticket = spec.put(&producer, "key", &PutOptions::default()).unwrap();
    let view = consumer.view(&ticket, LONG).unwrap();
    spec.check_got(&Got::of_view(&view));
    assert_eq!(view.info().path, Path::Direct);
    assert_eq!(consumer.stats().pool_buffers, 0);
    assert_eq!(rights_at(view.part(0).unwrap().as_ptr()), "r--s");
    drop(view);
    assert_whole(&producer);
}

#[test]
fn a_small_pool_views_what_it_could_not_hold() {
    let producer = Process::start(&Way::Shm.options().pool(128 * MIB));
    let consumer = Way::Shm.options().pool(64 * KIB).build().unwrap();
    let spec = Spec::bytes(128 * MIB, 1);
    let ticket = producer.put("key", &spec).unwrap();
    let view = consumer.view(&ticket, LONG).unwrap();
    spec.check_got(&Got::of_view(&view));
    drop(view);
    producer.assert_whole();
}

#[test]
fn parts_of_a_view_are_read_within_their_bounds() {
    let (producer, consumer) = (endpoint(MIB), endpoint(MIB));
    let spec = Spec::of([
        part("a", DType::U8, &[1000], 1),
        part("none", DType::F32, &[0, 3], 2),
        part("b", DType::U8, &[50 * KIB], 3),
    ]);
    let ticket = spec.put(&producer, "key", &PutOptions::default()).unwrap();
    let view = consumer.view(&ticket, LONG).unwrap();
    assert_eq!(view.layout(), ticket.layout());
    assert_eq!(view.parts().count(), 3);
    assert!(view.part(3).is_none() && view.named("c").is_none());
    let (a, none) = (view.named("a").unwrap(), view.named("none").unwrap());
    let bytes = spec.parts[0].bytes();
    let mut out = [0; 100];
    assert!(a.read(900, &mut out) && out[..] == bytes[900..]);
    let before = out;
    for (offset, len) in [(901, 100), (1000, 1), (1001, 0), (u64::MAX, 1), (u64::MAX - 50, 100)] {
        assert!(!a.read(offset, &mut out[..len]), "{len} bytes from {offset}");
        assert_eq!(out, before, "nothing is copied");
    }
    assert!(a.read(1000, &mut []) && none.read(0, &mut []));
    assert!(!none.read(0, &mut out[..1]) && none.to_vec().is_empty() && none.as_ptr().is_null());
    assert_eq!(view_slice(&a), bytes);
    assert!(view_slice(&none).is_empty());
    assert_eq!(view.named("b").unwrap().to_vec(), spec.parts[2].bytes());
    drop(view);
    assert_whole(&producer);
}

#[test]
fn viewed_memory_is_not_used_again_before_the_view_is_dropped() {
    let pair = Pair::new(Way::Shm, MIB);
    let There::Apart(viewer) = &pair.there else { unreachable!() };
    let spec = Spec::bytes(768 * KIB, 1);
    let ticket = spec.put(&pair.here, "key", &PutOptions::default()).unwrap();
    spec.check_got(&viewer.view_and_keep(&ticket, LONG, "view").unwrap());
    // Not by removal, not by another put, not by want of room.
    pair.here.remove(&ticket).unwrap();
    assert_eq!((pair.here.stats().payloads, pair.here.stats().leases), (0, 1));
    let error = pair.here.alloc_within(512 * KIB as usize, SHORT).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::PoolFull { free, .. } if *free == 256 * KIB), "{error}");
    let mut rest = pair.here.alloc(256 * KIB as usize).unwrap();
    rest.as_mut_slice().fill(0xee);
    spec.check_got(&viewer.look("view"));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| pair.here.alloc_within(768 * KIB as usize, LONG).unwrap());
        until("it to wait", || pair.here.stats().pool_waiting == 1);
        viewer.release("view");
        drop(waiting.join().unwrap());
    });
    drop(rest);
    pair.assert_whole();
}

#[test]
fn a_viewer_that_is_killed_gives_the_memory_back() {
    let producer = Way::Shm.options().pool(MIB).build().unwrap();
    let spec = Spec::bytes(MIB, 1);
    let ticket = spec.put(&producer, "key", &for_consumers(2)).unwrap();
    let viewers = [Process::start(&Way::Shm.options()), Process::start(&Way::Shm.options())];
    for viewer in &viewers {
        spec.check_got(&viewer.view_and_keep(&ticket, LONG, "view").unwrap());
    }
    producer.remove(&ticket).unwrap();
    let [first, second] = viewers;
    first.kill();
    until("the first lease to be over", || producer.stats().leases == 1);
    assert_eq!(producer.stats().pool_free, 0, "the other still reads");
    spec.check_got(&second.look("view"));
    second.kill();
    assert_whole(&producer);
}

#[test]
fn time_does_not_take_memory_from_a_viewer_that_is_stopped() {
    let lease = Duration::from_millis(300);
    let producer = Way::Shm.options().pool(MIB).lease(lease).build().unwrap();
    let viewer = Process::start(&Way::Shm.options().lease(lease));
    let spec = Spec::bytes(MIB, 1);
    let ticket = spec.put(&producer, "key", &PutOptions::default()).unwrap();
    spec.check_got(&viewer.view_and_keep(&ticket, LONG, "view").unwrap());
    producer.remove(&ticket).unwrap();
    viewer.signal(Signal::Stop);
    until("its time to be over", || producer.stats().fencing == 1);
    std::thread::sleep(2 * lease); // that time passes is what is tested
    let stats = producer.stats();
    assert_eq!((stats.leases, stats.pool_free), (1, 0), "a mapping is not fenced by time");
    assert!(producer.alloc_within(1, Duration::ZERO).is_err());
    viewer.signal(Signal::Continue);
    spec.check_got(&viewer.look("view"));
    viewer.release("view");
    assert_whole(&producer);
}

#[test]
fn a_view_is_kept_alive_for_longer_than_a_lease_lasts() {
    let lease = Duration::from_millis(300);
    let producer = Way::Shm.options().pool(MIB).lease(lease).build().unwrap();
    let viewer = Process::start(&Way::Shm.options().lease(lease));
    let spec = Spec::bytes(MIB, 1);
    let ticket = spec.put(&producer, "key", &expiring(lease / 2)).unwrap();
    if let Err(late) = viewer.view_and_keep(&ticket, LONG, "view") {
        assert!(late.is("Gone(Expired)"), "{late:?}");
        return;
    }
    std::thread::sleep(4 * lease); // that time passes is what is tested
    let stats = producer.stats();
    assert_eq!((stats.leases, stats.fencing, stats.payloads), (1, 0, 1), "alive, and not expired under its lease");
    spec.check_got(&viewer.look("view"));
    viewer.release("view");
    assert_whole(&producer);
}

#[test]
fn over_tcp_there_are_no_views() {
    let pair = Pair::new(Way::Tcp, MIB);
    let There::Apart(producer) = &pair.there else { unreachable!() };
    for spec in [Spec::bytes(100, 1), Spec::bytes(500 * KIB, 2)] {
        let ticket = producer.put("key", &spec).unwrap();
        let error = pair.here.view(&ticket, LONG).unwrap_err();
        assert_eq!(error.kind(), &ErrorKind::PathUnsuitable { path: Path::Tcp, lacks: "views" });
        assert_tells(&error, "view");
        // It can still be got.
        spec.check(&pair.here.get(&ticket, LONG).unwrap());
    }
    pair.assert_whole();
}

#[test]
fn a_view_waits_for_its_key_and_for_all_bytes() {
    let (producer, consumer) = (endpoint(64 * MIB), endpoint(MIB));
    let spec = Spec::of([part("a", DType::U8, &[20 * MIB], 1), part("b", DType::U8, &[20 * MIB], 2)]).copied();
    for round in 0..3 {
        let key = format!("round-{round}");
        std::thread::scope(|scope| {
            let viewing = scope.spawn(|| consumer.view((producer.address(), &key), LONG).unwrap());
            producer.wait_for_consumers(&key, 1, LONG).unwrap();
            spec.put(&producer, &key, &PutOptions::default()).unwrap();
            spec.check_got(&Got::of_view(&viewing.join().unwrap()));
        });
    }
    assert_whole(&producer);
}

#[test]
fn a_key_that_is_never_put_is_no_view() {
    let (producer, consumer) = (endpoint(MIB), endpoint(MIB));
    let error = consumer.view((producer.address(), "never"), SHORT).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::TimedOut { quarantined: 0, .. }), "{error}");
    assert_tells(&error, "view");
    assert_whole(&producer);
}

#[test]
fn a_payload_without_bytes_is_viewed_too() {
    let (producer, consumer) = (endpoint(MIB), endpoint(MIB));
    let spec = Spec::of([part("none", DType::F32, &[0], 1), part("nothing", DType::U8, &[3, 0], 2)]);
    let ticket = spec.put(&producer, "key", &PutOptions::default()).unwrap();
    let view = consumer.view(&ticket, LONG).unwrap();
    spec.check_got(&Got::of_view(&view));
    drop(view);
    assert_whole(&producer);
}

#[test]
fn views_and_gets_share_one_payload() {
    let producer = Way::Shm.options().pool(MIB).build().unwrap();
    let consumers: Vec<_> = (0..3).map(|_| Process::start(&Way::Shm.options())).collect();
    let spec = Spec::bytes(MIB, 1);
    let ticket = spec.put(&producer, "key", &for_consumers(4)).unwrap();
    spec.check_got(&consumers[0].view_and_keep(&ticket, LONG, "view").unwrap());
    spec.check_got(&consumers[1].view_and_keep(&ticket, LONG, "view").unwrap());
    spec.check_got(&consumers[2].get(&ticket, LONG).unwrap());
    spec.check_got(&consumers[0].get(&ticket, LONG).unwrap());
    let failure = consumers[2].get(&ticket, SHORT).unwrap_err();
    // The views may still turn out not to have been had: who comes now waits.
    assert!(failure.is("TimedOut"), "{failure:?}");
    consumers[0].release("view");
    consumers[1].release("view");
    until("all to have had it", || producer.stats().payloads == 0);
    assert!(consumers[2].get(&ticket, LONG).unwrap_err().is("Gone(Consumed)"));
    assert_whole(&producer);
}

#[test]
fn a_view_outlives_its_producer() {
    let consumer = Way::Shm.options().pool(MIB).build().unwrap();
    let spec = Spec::bytes(MIB, 1);
    for closed in [true, false] {
        let producer = Process::start(&Way::Shm.options());
        let ticket = producer.put("key", &spec).unwrap();
        let view = consumer.view(&ticket, LONG).unwrap();
        if closed {
            producer.close(SHORT);
        }
        producer.kill();
        until("the end to be known", || consumer.stats().links == 0);
        spec.check_got(&Got::of_view(&view));
        drop(view);
        assert_whole(&consumer);
    }
}

#[test]
fn a_view_outlives_its_endpoint() {
    // In another process: the producer hears of the end of the view, or of the process.
    let producer = Way::Shm.options().pool(MIB).build().unwrap();
    let viewer = Process::start(&Way::Shm.options());
    let spec = Spec::bytes(MIB, 1);
    let ticket = spec.put(&producer, "key", &PutOptions::default()).unwrap();
    spec.check_got(&viewer.view_and_keep(&ticket, LONG, "view").unwrap());
    viewer.close(SHORT);
    producer.remove(&ticket).unwrap();
    spec.check_got(&viewer.look("view"));
    assert_eq!(producer.stats().pool_free, 0);
    viewer.kill();
    assert_whole(&producer);
}

#[test]
fn a_view_dropped_after_its_endpoint_gives_the_memory_back_within_one_process_too() {
    let (producer, consumer) = (endpoint(MIB), endpoint(MIB));
    let spec = Spec::bytes(MIB, 1);
    let ticket = spec.put(&producer, "key", &PutOptions::default()).unwrap();
    let view = consumer.view(&ticket, LONG).unwrap();
    drop(consumer);
    producer.remove(&ticket).unwrap();
    assert_eq!(producer.stats().pool_free, 0);
    spec.check_got(&Got::of_view(&view));
    drop(view);
    assert_whole(&producer);
}

#[test]
fn a_view_of_what_is_gone_says_why() {
    let (producer, consumer) = (endpoint(MIB), endpoint(MIB));
    let ticket = Spec::bytes(1000, 1).put(&producer, "key", &PutOptions::default()).unwrap();
    drop(consumer.view(&ticket, LONG).unwrap());
    until("it to be consumed", || producer.stats().payloads == 0);
    let error = consumer.view(&ticket, LONG).unwrap_err();
    assert_eq!(error.kind(), &ErrorKind::Gone(Gone::Consumed));
    assert_tells(&error, "view");
    assert_whole(&producer);
}

#[test]
fn five_hundred_views_leave_nothing_behind() {
    if !alone("five_hundred_views_leave_nothing_behind") {
        return; // it counts what is mapped into the whole process
    }
    let pair = Pair::new(Way::Shm, 4 * MIB);
    let There::Apart(producer) = &pair.there else { unreachable!() };
    for cycle in 0..500 {
        let spec = Spec::bytes(1 + cycle * 1000, cycle);
        let ticket = producer.put("key", &spec).unwrap();
        let view = pair.here.view(&ticket, LONG).unwrap();
        spec.check_got(&Got::of_view(&view));
    }
    pair.assert_whole();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mapped = maps.lines().filter(|line| line.contains("memfd:") && line.contains("r--s")).count();
    assert!(mapped <= 2, "a peer's memory is mapped once and kept: {mapped} mappings\n{maps}");
}
