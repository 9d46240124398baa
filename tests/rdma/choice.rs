//! Which device and which path: what is named, what is preferred, what is told.

use crate::bed::*;
use crate::common::*;
use towline::{Endpoint, ErrorKind, PutOptions};

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_device_a_port_and_an_address_are_chosen_by_name() {
    let [first, second] = devices();
    for name in [first.clone(), format!("{first}:1"), format!("{first}:1:1")] {
        let here = Options::default().paths("rdma").device(&name).build().unwrap();
        let there = on(1).build().unwrap();
        let spec = Spec::bytes(100 * KIB, 1);
        let ticket = spec.put(&there, "key", &PutOptions::default()).unwrap();
        let payload = here.get(&ticket, LONG).unwrap();
        spec.check(&payload);
        assert!(payload.info().path_reason.contains(&format!("{first} here")), "{:?}", payload.info());
    }
    for name in ["mlx9_9", &format!("{first}:2"), &format!("{second}:1:200")] {
        let error = Options::default().paths("rdma").device(name).build().unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::BadOption { option: "rdma_device", .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains(&format!("`{name}` is not here")) && text.contains(&first), "{text}");
        assert_tells(&error, "build");
    }
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn addresses_of_two_families_do_not_meet_and_the_reason_is_told() {
    let [first, second] = devices();
    // GID 0 is the link-local one of IPv6.
    let here = Options::default().paths("rdma").device(&format!("{first}:1:0")).build().unwrap();
    let there = Options::default().paths("rdma").device(&format!("{second}:1:1")).build().unwrap();
    let ticket = Spec::bytes(100 * KIB, 1).put(&there, "key", &PutOptions::default()).unwrap();
    let error = here.get(&ticket, LONG).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::PathNotAllowed { .. }), "{error}");
    assert!(error.to_string().contains("another family"), "{error}");
    assert_tells(&error, "get");
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn of_the_paths_that_are_there_the_best_is_taken() {
    let spec = Spec::bytes(100 * KIB, 1);
    for (paths, expected) in
        [("direct,shm,rdma,tcp", "shm"), ("shm,rdma,tcp", "shm"), ("rdma,tcp", "rdma"), ("tcp", "tcp")]
    {
        let there = Process::start(&Options::default().paths(paths));
        let here = Options::default().paths(paths).build().unwrap();
        let ticket = there.put("key", &spec).unwrap();
        let payload = here.get(&ticket, LONG).unwrap();
        spec.check(&payload);
        assert_eq!((payload.info().path.name(), payload.info().fallback_bytes), (expected, 0), "{:?}", payload.info());
    }
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn of_several_devices_the_peers_nearest_is_used() {
    // All four here; there only the last, which the first two can't reach.
    let [_, last] = second_rail();
    let there = Options::default().paths("rdma").device(&last).build().unwrap();
    let here = Options::default().paths("rdma").build().unwrap();
    let spec = Spec::bytes(MIB, 1);
    let ticket = spec.put(&here, "key", &PutOptions::default()).unwrap();
    let payload = there.get(&ticket, LONG).unwrap();
    spec.check(&payload);
    assert_eq!(payload.info().retries, 0, "{:?}", payload.info());
    assert_whole(&here);
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_peer_without_rdma_is_reached_by_tcp_and_that_counts_as_a_fallback() {
    let there = Process::start(&Options::default().paths("tcp"));
    let here = Options::default().paths("rdma,tcp").build().unwrap();
    let ticket = there.put("key", &Spec::bytes(100 * KIB, 1)).unwrap();
    let payload = here.get(&ticket, LONG).unwrap();
    let info = payload.info();
    // It has no device of that sort, whatever the reason: the path was no choice of its policy.
    assert_eq!((info.path.name(), info.fallback_bytes), ("tcp", 100 * KIB), "{info:?}");
    assert!(info.path_reason.contains("does not have this path"), "{info:?}");
    // Where RDMA alone is allowed here, that is an error.
    let ticket = there.put("other", &Spec::bytes(100 * KIB, 1)).unwrap();
    let alone: Endpoint = Options::default().paths("rdma").build().unwrap();
    let error = alone.get(&ticket, LONG).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::PathNotAllowed { .. }), "{error}");
}
