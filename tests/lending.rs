//! Bytes that are put while a consumer waits are read over TCP where they are; they are the caller's again when his put
//! returns, whatever becomes of the reading.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use std::time::{Duration, Instant};
use towline::{DType, Endpoint, ErrorKind, Part, Ticket};
use towline_control::wire::{GetFlags, Outcome, Target};

const LEN: u64 = 24 * MIB;

/// Puts content that is overwritten as soon as the put returns.
fn put_and_scribble(producer: &Endpoint, key: &str, seed: u64, consumers: u32) -> Ticket {
    let mut bytes = Spec::bytes(LEN, seed).parts[0].bytes();
    let part = Part::bytes("bytes", DType::U8, &[LEN], &bytes);
    let ticket = producer.put_with(key, [part], &for_consumers(consumers)).unwrap();
    bytes.fill(0x99);
    ticket
}

/// A put whose only consumer, which waits for it, is held up a little after the first MiB that it reads.
struct HeldUp {
    producer: Endpoint,
    consumer: Endpoint,
    proxy: Proxy,
}

impl HeldUp {
    fn new() -> Self {
        let (producer, proxy) = behind_proxy(&Way::Tcp.options().pool(2 * LEN));
        Self { producer, consumer: tcp_endpoint(2 * LEN), proxy }
    }

    /// Has `put` put under "key", calls `meanwhile` once the consumer is held up, and then lets it go on. What the get came to.
    fn run(&self, put: impl FnOnce() + Send, meanwhile: impl FnOnce()) -> towline::Result<towline::Payload> {
        self.proxy.hold_data_after(MIB + 17);
        std::thread::scope(|scope| {
            let reading = scope.spawn(|| self.consumer.get((self.proxy.address.to_string(), "key"), LONG));
            self.producer.wait_for_consumers("key", 1, LONG).unwrap();
            let putting = scope.spawn(put);
            self.proxy.wait_until_held();
            meanwhile();
            // It returns though nothing passes any more; what is still to be read is not the caller's.
            putting.join().unwrap();
            self.proxy.release();
            reading.join().unwrap()
        })
    }
}

fn check(payload: &towline::Payload, seed: u64) {
    assert_eq!(hash(payload.part(0).unwrap().bytes()), hash(&Spec::bytes(LEN, seed).parts[0].bytes()));
}

#[test]
fn a_waiting_consumer_gets_what_was_put_and_the_put_gives_the_bytes_back() {
    let (producer, consumer) = (tcp_endpoint(2 * LEN), tcp_endpoint(2 * LEN));
    for seed in 0..10 {
        std::thread::scope(|scope| {
            let reading = scope.spawn(|| consumer.get((producer.address(), "key"), LONG).unwrap());
            producer.wait_for_consumers("key", 1, LONG).unwrap();
            put_and_scribble(&producer, "key", seed, 1);
            check(&reading.join().unwrap(), seed);
        });
        assert_whole(&producer);
    }
}

#[test]
fn a_put_waits_for_no_reader_that_is_held_up() {
    let held = HeldUp::new();
    for seed in 0..3 {
        let put = || {
            put_and_scribble(&held.producer, "key", seed, 1);
            assert_eq!(held.producer.stats().leases, 1, "it is being read");
        };
        check(&held.run(put, || {}).unwrap(), seed);
        assert_whole(&held.producer);
    }
}

#[test]
fn what_a_cut_reader_did_not_get_is_there_for_the_next() {
    let held = HeldUp::new();
    let mut ticket = None;
    let put = || ticket = Some(put_and_scribble(&held.producer, "key", 1, 1));
    // The get itself comes again over the next connection.
    check(&held.run(put, || held.proxy.cut()).unwrap(), 1);
    assert!(matches!(held.consumer.get(ticket.unwrap(), LONG).unwrap_err().kind(), ErrorKind::Gone(_)));
    assert_whole(&held.producer);
    assert_whole(&held.consumer);
}

#[test]
fn readers_over_tcp_and_shared_memory_get_the_same_put() {
    let producer = Options::default().pool(2 * LEN).paths("shm,tcp").build().unwrap();
    let (over_tcp, over_shm) = (tcp_endpoint(2 * LEN), Process::start(&Way::Shm.options().pool(2 * LEN)));
    for seed in 0..5 {
        std::thread::scope(|scope| {
            let reading = scope.spawn(|| over_tcp.get((producer.address(), "key"), LONG).unwrap());
            let copying = over_shm.begin_get((&producer.address(), "key"), LONG);
            producer.wait_for_consumers("key", 2, LONG).unwrap();
            put_and_scribble(&producer, "key", seed, 2);
            check(&reading.join().unwrap(), seed);
            Spec::bytes(LEN, seed).check_got(&copying.got().unwrap());
        });
        assert_whole(&producer);
    }
}

#[test]
fn a_payload_taken_out_while_it_is_lent_ends_well_for_everybody() {
    let held = HeldUp::new();
    let put = || drop(put_and_scribble(&held.producer, "key", 1, 1));
    let got = held.run(put, || {
        held.producer.remove_key("key");
    });
    check(&got.unwrap(), 1); // readers are not disturbed
    assert_whole(&held.producer);
}

#[test]
fn a_close_during_a_lent_put_returns_in_its_time() {
    let held = HeldUp::new();
    let put = || {
        let bytes = Spec::bytes(LEN, 1).parts[0].bytes();
        let _ended_by_the_close = held.producer.put("key", [Part::bytes("bytes", DType::U8, &[LEN], &bytes)]);
    };
    let got = held.run(put, || {
        let started = Instant::now();
        let timeout = Duration::from_millis(300);
        held.producer.close(timeout);
        assert!(started.elapsed() < timeout + SLACK);
    });
    if let Ok(payload) = got {
        check(&payload, 1);
    }
    assert_whole(&held.consumer);
}

#[test]
fn a_reader_that_reads_again_and_again_does_not_keep_a_put_from_returning() {
    let producer = tcp_endpoint(2 * LEN);
    let mut consumer = Consumer::connect(&producer.address(), session_config()).open();
    consumer.ask(Target::Key(b"key"), 0, GetFlags::empty());
    producer.wait_for_consumers("key", 1, LONG).unwrap();
    let passes = std::thread::scope(|scope| {
        let putting = scope.spawn(|| put_and_scribble(&producer, "key", 1, 1));
        let granted = consumer.hear().unwrap().granted();
        assert_eq!(granted.watermark, LEN, "all of it can be read at once");
        let expected = hash(&Spec::bytes(LEN, 1).parts[0].bytes());
        let mut passes = 0;
        while !putting.is_finished() {
            // The put drives one pass; while it copies, in a few milliseconds, other threads may serve some more.
            assert_eq!(hash(&consumer.read(granted.segments[0]).unwrap()), expected);
            passes += 1;
        }
        putting.join().unwrap();
        consumer.close(&[(granted.lease, Outcome::Delivered)]);
        passes
    });
    assert!(passes < 12, "{passes} passes for a payload of {} steps", LEN / MIB);
    assert_whole(&producer);
}
