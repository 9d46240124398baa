//! From one byte to two gibibytes, around every border on the way, checked to the last byte.

#![allow(clippy::unwrap_used)] // also in the helpers of tests

mod common;

use common::*;
use std::sync::{Mutex, MutexGuard, PoisonError};
use towline::{DType, ErrorKind, Path, PutOptions};

/// The large ones run one at a time: they share the memory of the machine.
fn one_at_a_time() -> MutexGuard<'static, ()> {
    static LARGE: Mutex<()> = Mutex::new(());
    LARGE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Around the granule and the page, what travels within one message, the step in which bytes are copied in, and the
/// length of one work request.
fn borders() -> Vec<u64> {
    let borders = [64, 4 * KIB, 32 * KIB, 64 * KIB, MIB, 4 * MIB, 8 * MIB];
    let mut sizes = vec![1, 2, 3, 7, 8, 9];
    sizes.extend(borders.iter().flat_map(|border| [border - 1, *border, border + 1]));
    sizes
}

fn carry_all(way: Way) {
    let pair = Pair::new(way, 32 * MIB);
    for (number, size) in borders().into_iter().enumerate() {
        let spec = Spec::bytes(size, number as u64);
        let spec = if number % 2 == 0 { spec } else { spec.copied() };
        if number % 3 == 0 { pair.carry_back("size", &spec) } else { pair.carry("size", &spec) }
    }
    pair.assert_whole();
}

#[test]
fn sizes_around_every_border_arrive_within_one_process() {
    carry_all(Way::Direct);
}

#[test]
fn sizes_around_every_border_arrive_over_shared_memory() {
    carry_all(Way::Shm);
}

#[test]
fn sizes_around_every_border_arrive_over_tcp() {
    carry_all(Way::Tcp);
}

#[test]
fn seeded_sizes_and_splits_arrive_over_every_way() {
    every_way(32 * MIB, |pair| {
        let mut random = words(pair.way as u64);
        let mut next = |below: u64| random.next().unwrap() % below;
        for round in 0..30 {
            let count = 1 + next(12);
            let parts: Vec<_> = (0..count)
                .map(|index| {
                    let bits = 4 + next(18);
                    let size = if next(5) == 0 { 0 } else { next(1 << bits) };
                    part(&format!("part {index}"), DType::U8, &[size], round * 100 + index)
                })
                .collect();
            let spec = Spec::of(parts);
            let spec = if next(2) == 0 { spec } else { spec.copied() };
            if next(2) == 0 { pair.carry("seeded", &spec) } else { pair.carry_back("seeded", &spec) }
        }
        pair.assert_whole();
    });
}

#[test]
fn a_thousand_and_twenty_four_parts_arrive_over_every_way() {
    every_way(16 * MIB, |pair| {
        let parts: Vec<_> = (0..1024).map(|n| part(&format!("leaf/{n}"), DType::U8, &[1 + n % 300], n)).collect();
        pair.carry("leaves", &Spec::of(parts.clone()));
        pair.carry_back("leaves", &Spec::of(parts).copied());
        pair.assert_whole();
    });
}

#[test]
fn a_hundred_megabytes_arrive_over_every_way() {
    let _alone = one_at_a_time();
    every_way(128 * MIB, |pair| {
        pair.carry("large", &Spec::bytes(100_000_000, 1));
        pair.carry_back("large", &Spec::bytes(100_000_000, 2).copied());
        pair.assert_whole();
    });
}

#[test]
fn five_hundred_megabytes_arrive_over_shared_memory() {
    let _alone = one_at_a_time();
    let pair = Pair::new(Way::Shm, 512 * MIB);
    pair.carry("larger", &Spec::bytes(500_000_000, 1));
    pair.assert_whole();
}

#[test]
fn five_hundred_megabytes_arrive_over_tcp() {
    let _alone = one_at_a_time();
    let pair = Pair::new(Way::Tcp, 512 * MIB);
    pair.carry("larger", &Spec::bytes(500_000_000, 1));
    pair.assert_whole();
}

/// Two gibibytes from another process, which has no memory for them but its pool, to this one, likewise.
fn two_gibibytes(way: Way) {
    const LEN: u64 = 2 << 30;
    let _alone = one_at_a_time();
    let pair = Pair::new(way, LEN);
    let There::Apart(process) = &pair.there else { unreachable!() };
    let ticket = process.put("largest", &Spec::bytes(LEN, 9)).unwrap();
    let payload = pair.here.get(&ticket, 2 * LONG).unwrap();
    assert_eq!((payload.info().path, payload.info().bytes, payload.info().retries), (way.path(), LEN, 0));
    let bytes = payload.part(0).unwrap().bytes();
    assert_eq!(bytes.len() as u64, LEN);
    for (number, (chunk, word)) in bytes.chunks_exact(8).zip(words(9)).enumerate() {
        if chunk != word.to_le_bytes() {
            panic!("wrong bytes at {}", number * 8);
        }
    }
    // The pools are shared memory, which does not count as a process's own.
    assert!(process.own_kib() < 128 << 10, "the producer holds {} KiB besides its pool", process.own_kib());
    drop(payload);
    pair.assert_whole();
}

#[test]
fn two_gibibytes_arrive_over_shared_memory_in_bounded_memory() {
    two_gibibytes(Way::Shm);
}

#[test]
fn two_gibibytes_arrive_over_tcp_in_bounded_memory() {
    two_gibibytes(Way::Tcp);
}

#[test]
fn a_payload_of_the_whole_pool_arrives_and_one_byte_more_does_not() {
    every_way(2 * MIB, |pair| {
        pair.carry("whole", &Spec::bytes(2 * MIB, 1));
        let error = Spec::bytes(2 * MIB + 1, 2).put(&pair.here, "more", &PutOptions::default()).unwrap_err();
        assert_eq!(error.kind(), &ErrorKind::PoolTooSmall { need: 2 * MIB + 1, pool: 2 * MIB });
        pair.carry_back("whole", &Spec::bytes(2 * MIB, 3).copied());
        pair.assert_whole();
    });
}

#[test]
fn what_travels_in_one_message_and_what_is_read_are_the_same() {
    // Two consumers of one payload at the border: within the grant for one, read by the other (whose parts need
    // padding, so that both ways of placing them are compared).
    let (producer, consumer) = (tcp_endpoint(4 * MIB), tcp_endpoint(4 * MIB));
    for len in [32 * KIB - 100, 32 * KIB + 100] {
        let spec = Spec::of([part("a", DType::U8, &[77], 1), part("b", DType::U8, &[len - 77], 2)]);
        let ticket = spec.put(&producer, "border", &for_consumers(2)).unwrap();
        let first = consumer.get(&ticket, LONG).unwrap();
        let second = consumer.get_into(&ticket, vec![0; 64 << 10], LONG).unwrap();
        assert_eq!((first.info().path, second.info().path), (Path::Tcp, Path::Tcp));
        spec.check(&first);
        spec.check(&second);
    }
    assert_whole(&producer);
}
