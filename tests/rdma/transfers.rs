//! What arrives: sizes, parts, keys and tickets, several consumers and peers.

use crate::bed::*;
use crate::common::*;
use std::time::{Duration, Instant};
use towline::{DType, ErrorKind, PutOptions};

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn payloads_of_every_size_arrive_in_both_directions() {
    let ends = Ends::new(32 * MIB);
    for (seed, len) in
        (1..).zip([1, 4095, 32 * KIB, 32 * KIB + 1, 64 * KIB, MIB - 1, MIB, MIB + 1, 5 * MIB + 7, 16 * MIB])
    {
        ends.carry(&format!("there {len}"), &Spec::bytes(len, seed));
        ends.carry_back(&format!("here {len}"), &Spec::bytes(len, seed + 100));
    }
    ends.assert_whole();
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn without_windows_leases_end_and_their_queue_pair_goes_on() {
    let there = Process::start(&on(1).pool(8 * MIB).windows(false));
    let here = on(0).pool(8 * MIB).windows(false).build().unwrap();
    let ends = Ends { here, there };
    ends.carry("first", &Spec::bytes(MIB, 0));
    ends.carry_back("first back", &Spec::bytes(MIB, 0));
    let pairs = objects(&devices()[0], "qp");
    for seed in 1..20 {
        ends.carry("there", &Spec::bytes(MIB + seed, seed));
        ends.carry_back("here", &Spec::bytes(100 * KIB + seed, seed));
    }
    assert_eq!(objects(&devices()[0], "qp"), pairs);
    assert_eq!(ends.here.stats().retries, 0);
    ends.assert_whole();
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_payload_of_256_mib_arrives() {
    let ends = Ends::new(257 * MIB);
    ends.carry("key", &Spec::bytes(256 * MIB, 1));
    ends.assert_whole();
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn parts_of_unequal_size_arrive_in_their_places() {
    let ends = Ends::new(16 * MIB);
    ends.carry("tree", &Spec::tree(1));
    let scattered: Vec<_> = (0..9).map(|i| part(&format!("part {i}"), DType::U8, &[1 + i * 300_007], i)).collect();
    ends.carry("scattered", &Spec::of(scattered.clone()));
    ends.carry_back("copied", &Spec::of(scattered).copied());
    ends.assert_whole();
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_get_waits_for_its_key_and_its_bytes_go_where_the_caller_says() {
    let ends = Ends::new(8 * MIB);
    let spec = Spec::bytes(3 * MIB, 1);
    std::thread::scope(|scope| {
        let own = vec![0; 3 * MIB as usize];
        let waiting = scope.spawn(|| ends.here.get_into((&ends.there.address, "key"), own, LONG).unwrap());
        ends.there.wait_for_consumers("key", 1);
        ends.there.put("key", &spec).unwrap();
        let payload = waiting.join().unwrap();
        spec.check(&payload);
        assert_eq!(payload.info().path.name(), "rdma");
        let bytes = payload.into_vec().unwrap();
        assert_eq!(hash(&bytes), hash(&spec.parts[0].bytes()));
    });
    // A key that nobody puts.
    let (timeout, started) = (Duration::from_millis(200), Instant::now());
    let error = ends.here.get((&ends.there.address, "other"), timeout).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::TimedOut { quarantined: 0, .. }), "{error}");
    assert!(started.elapsed() >= timeout && started.elapsed() < timeout + SLACK);
    ends.assert_whole();
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn views_are_refused_by_name() {
    let ends = Ends::new(MIB);
    let ticket = ends.there.put("key", &Spec::bytes(100 * KIB, 1)).unwrap();
    let error = ends.here.view(&ticket, LONG).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::PathUnsuitable { .. }), "{error}");
    assert_tells(&error, "view");
    drop(ends.here.get(&ticket, LONG).unwrap());
    ends.assert_whole();
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn two_consumers_read_one_payload_at_once() {
    let producer = Process::start(&on(1).pool(16 * MIB));
    let spec = Spec::bytes(12 * MIB, 1);
    let ticket = producer.put_with("key", &spec, &for_consumers(2)).unwrap();
    let other = Process::start(&on(0).pool(16 * MIB));
    let here = on(0).pool(16 * MIB).build().unwrap();
    let reading = other.begin_get(&ticket, LONG);
    spec.check(&here.get(&ticket, LONG).unwrap());
    spec.check_got(&reading.got().unwrap());
    producer.assert_whole();
    assert_whole(&here);
    other.assert_whole();
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn many_gets_at_once_share_one_queue_pair() {
    const GETS: u64 = 24;
    let ends = Ends::new(32 * MIB);
    let specs: Vec<_> = (0..GETS).map(|i| Spec::bytes(40 * KIB + i * 41_000, i)).collect();
    let tickets: Vec<_> =
        specs.iter().enumerate().map(|(i, spec)| ends.there.put(&format!("key {i}"), spec).unwrap()).collect();
    drop(ends.here.get((&ends.there.address, "key 0"), LONG).unwrap());
    let before = objects(&devices()[0], "qp");
    together(GETS as usize - 1, |i| specs[i + 1].check(&ends.here.get(&tickets[i + 1], LONG).unwrap()));
    assert_eq!(objects(&devices()[0], "qp"), before);
    ends.assert_whole();
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn thirty_two_peers_get_from_one_producer_and_leave_nothing() {
    const PEERS: u64 = 32;
    let producer = Process::start(&on(1).pool(8 * MIB));
    let spec = Spec::bytes(100 * KIB, 1);
    let ticket = producer.put_with("key", &spec, &for_consumers(PEERS as u32)).unwrap();
    let kinds = ["pd", "cq", "qp", "mr"];
    let [device, _] = devices();
    let before = kinds.map(|kind| objects(&device, kind));
    let peers: Vec<_> = (0..PEERS).map(|_| on(0).pool(MIB).build().unwrap()).collect();
    together(PEERS as usize, |peer| spec.check(&peers[peer].get(&ticket, LONG).unwrap()));
    assert!(objects(&device, "qp") >= before[2] + PEERS);
    drop(peers);
    assert_eq!(kinds.map(|kind| objects(&device, kind)), before, "{kinds:?}");
    producer.assert_whole();
    until("the producer's links to be gone", || producer.stats()["links"] == 0);
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_thousand_transfers_leave_what_is_open_as_it_was() {
    leave_what_is_open_as_it_was("transfers::a_thousand_transfers_leave_what_is_open_as_it_was", 1000);
}

/// Runs so many transfers in a process of their own, the test called `name` anew, and looks at what is open and how large the
/// processes are.
pub(crate) fn leave_what_is_open_as_it_was(name: &str, transfers: u64) {
    if !alone(name) {
        return;
    }
    let ends = Ends::new(4 * MIB);
    let spec = Spec::bytes(40 * KIB, 1); // more than travels in a grant
    let carry = |number: u64| {
        let ticket = ends.there.put("key", &spec).unwrap();
        let own = (number % 2 == 1).then(|| vec![0; 40 * KIB as usize]);
        let payload = match own {
            Some(own) => ends.here.get_into(&ticket, own, LONG).unwrap(), // registered for this one get
            None => ends.here.get(&ticket, LONG).unwrap(),
        };
        spec.check(&payload);
    };
    let open = || {
        let on_device = |device: &String| ["pd", "cq", "qp", "mr"].map(|kind| objects(device, kind));
        (descriptors(), devices().map(|device| on_device(&device)))
    };
    for number in 0..100 {
        carry(number);
    }
    let (before, own_kib) = (open(), ends.there.own_kib());
    for number in 0..transfers {
        carry(number);
    }
    assert_eq!(open(), before);
    let grown = ends.there.own_kib().saturating_sub(own_kib);
    assert!(grown < 1024, "the producer has grown by {grown} KiB in {transfers} transfers");
    assert_eq!(ends.here.stats().bytes.len(), 1);
    ends.assert_whole();
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_secret_and_copies_change_nothing() {
    let secret = "known to both of them";
    let there = Process::start(&on(1).secret(secret));
    let here = on(0).secret(secret).build().unwrap();
    let spec = Spec::bytes(2 * MIB + 3, 7).copied();
    let ticket = there.put_with("key", &spec, &PutOptions::default()).unwrap();
    spec.check(&here.get(&ticket, LONG).unwrap());
    there.assert_whole();
    assert_whole(&here);
}
