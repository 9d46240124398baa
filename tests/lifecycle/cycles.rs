//! Many times over: nothing is left behind.

use crate::common::*;
use std::time::Duration;
use towline::{DType, ErrorKind, Part, PutOptions};

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
    if !alone("cycles::five_hundred_cycles_leave_the_pools_whole_and_no_descriptor_behind") {
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
    if !alone("cycles::endpoints_that_come_and_go_leave_nothing_behind") {
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
    if !alone("cycles::the_number_of_threads_does_not_grow_with_that_of_peers") {
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
