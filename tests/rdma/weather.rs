//! Loss, and links that go down and come back.

use crate::bed::*;
use crate::common::*;
use std::time::Instant;

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

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_link_that_goes_down_during_a_get_is_an_error_where_rdma_alone_is_allowed() {
    let ends = Ends::new(64 * MIB);
    let spec = Spec::bytes(48 * MIB, 1);
    let ticket = ends.there.put("key", &spec).unwrap();
    let down = std::thread::scope(|scope| {
        let reading = scope.spawn(|| ends.here.get(&ticket, LONG).unwrap_err());
        until("the lease", || ends.there.stats()["leases"] == 1);
        let down = Weather::down(&devices()[..1]);
        let error = reading.join().unwrap();
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

/// Gets what could not be got while the link was down.
#[track_caller]
fn until_it_is_back(ends: &Ends, spec: &Spec, ticket: &towline::Ticket) {
    let started = Instant::now();
    loop {
        match ends.here.get(ticket, LONG) {
            Ok(payload) => {
                assert_eq!(payload.info().path.name(), "rdma");
                return spec.check(&payload);
            }
            Err(error) => assert!(started.elapsed() < LONG, "{error}"),
        }
    }
}
