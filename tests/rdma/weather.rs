//! Loss, and links that go down and come back.

use crate::bed::*;
use crate::common::*;
use std::time::{Duration, Instant};
use towline::Ticket;

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn lost_and_late_packets_change_no_byte() {
    let ends = Ends::new(16 * MIB);
    let weather = Weather::netem(&devices(), "loss 1% delay 1ms");
    for seed in 0..3 {
        ends.carry("there", &Spec::bytes(2 * MIB + seed, seed));
        ends.carry_back("here", &Spec::bytes(MIB + seed, seed));
    }
    drop(weather);
    ends.assert_whole();
}

/// Gets until a payload has come over RDMA again.
#[track_caller]
fn until_it_is_back(ends: &Ends, spec: &Spec, ticket: &Ticket) {
    let started = Instant::now();
    loop {
        let got = ends.here.get(ticket, LONG);
        if let Ok(payload) = &got {
            spec.check(payload);
            if payload.info().path.name() == "rdma" {
                return;
            }
        }
        assert!(started.elapsed() < LONG, "{got:?}");
        std::thread::sleep(Duration::from_millis(50)); // the way back is taken when nothing is under way
    }
}

/// A consumer and a producer that may use RDMA or TCP, and a payload.
fn either(len: u64) -> (Ends, Spec, Ticket) {
    let there = Process::start(&or_tcp(1).pool(len + MIB));
    let here = or_tcp(0).pool(len + MIB).build().unwrap();
    let spec = Spec::bytes(len, 1);
    let ticket = there.put_with("key", &spec, &for_consumers(1000)).unwrap();
    (Ends { here, there }, spec, ticket)
}

/// Gets over TCP, within the time, and checks that the reason says `why`.
#[track_caller]
fn over_tcp(ends: &Ends, spec: &Spec, ticket: &Ticket, time: Duration, why: &[&str]) {
    let started = Instant::now();
    let payload = ends.here.get(ticket, LONG).unwrap();
    assert!(started.elapsed() < time, "{:?}", started.elapsed());
    spec.check(&payload);
    let info = payload.info();
    assert_eq!((info.path.name(), info.fallback_bytes), ("tcp", spec.len()), "{info:?}");
    assert!(why.iter().any(|why| info.path_reason.contains(why)), "{info:?}");
}

const NOTHING_COMES: [&str; 2] = ["nothing came over it in 1000 ms", "a first read had no answer"];

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_get_over_a_link_that_is_down_goes_by_tcp_and_says_why() {
    let (ends, spec, ticket) = either(MIB);
    let down = Weather::down(&devices()[..1]);
    over_tcp(&ends, &spec, &ticket, SLACK, &["the port of the device here is down"]);
    drop(down);
    until_it_is_back(&ends, &spec, &ticket);
    ends.there.remove(&ticket).unwrap();
    // Nobody notices a way that swallows everything but who waits for an answer.
    let (others, spec, ticket) = either(MIB);
    let silent = Weather::netem(&devices(), "loss 100%");
    over_tcp(&others, &spec, &ticket, SLACK + Duration::from_secs(1), &NOTHING_COMES);
    drop(silent);
    until_it_is_back(&others, &spec, &ticket);
    ends.assert_whole();
    others.there.remove(&ticket).unwrap();
    others.assert_whole();
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_link_that_fails_during_a_get_is_left_for_tcp_and_taken_again() {
    let (ends, spec, ticket) = either(64 * MIB);
    for how in ["down", "silent"] {
        std::thread::scope(|scope| {
            let reading = scope.spawn(|| ends.here.get(&ticket, LONG).unwrap());
            until("the lease", || ends.there.stats()["leases"] == 1);
            let weather = match how {
                "down" => Weather::down(&devices()[..1]),
                _ => Weather::netem(&devices(), "loss 100%"),
            };
            let payload = reading.join().unwrap();
            spec.check(&payload);
            let info = payload.info();
            assert_eq!((info.path.name(), info.fallback_bytes), ("tcp", 64 * MIB), "{how}: {info:?}");
            assert!(info.retries > 0 && info.path_reason.contains("not rdma"), "{how}: {info:?}");
            drop(weather);
        });
        until_it_is_back(&ends, &spec, &ticket);
    }
    ends.there.remove(&ticket).unwrap();
    ends.assert_whole();
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_link_that_goes_down_during_a_get_is_an_error_where_rdma_alone_is_allowed() {
    let ends = Ends::new(65 * MIB);
    let spec = Spec::bytes(64 * MIB, 1);
    let ticket = ends.there.put("key", &spec).unwrap();
    let down = std::thread::scope(|scope| {
        let reading = scope.spawn(|| ends.here.get(&ticket, LONG).unwrap_err());
        until("the lease", || ends.there.stats()["leases"] == 1);
        let (down, started) = (Weather::down(&devices()[..1]), Instant::now());
        let error = reading.join().unwrap();
        assert!(started.elapsed() < SLACK, "{:?}", started.elapsed());
        let kinds = ["PathNotAllowed", "PeerLost", "TransferFailed"];
        let kind = format!("{:?}", error.kind());
        assert!(kinds.iter().any(|expected| kind.starts_with(expected)), "{error}");
        assert_tells(&error, "get");
        down
    });
    until("the fences", || ends.here.stats().quarantined_bytes == 0 && ends.there.stats()["leases"] == 0);
    drop(down);
    // The link is back, and the payload was not used up.
    until_it_is_back(&ends, &spec, &ticket);
    ends.assert_whole();
}
