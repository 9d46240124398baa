//! A path is not used before it has brought the right bytes.

use crate::harness::*;
use crate::weather::{Fine, interfaces, run};
use std::time::{Duration, Instant};
use towline_verbs::ibv::IbvProvider;
use towline_verbs::{Cause, Provider, QueuePairState};

/// Two ends on two devices, not connected.
fn ends() -> (End, End) {
    let provider = IbvProvider::new().unwrap();
    let [first, second] = names().map(|name| End::new(&provider.open(&name).unwrap()));
    (first, second)
}

/// Connects them, the first as the active end to an address that `change` has changed, and returns why its queue pair failed.
fn failure(change: impl FnOnce(&mut Vec<u8>)) -> Cause {
    let (a, b) = ends();
    let (here, mut there) = (a.qp.address(), b.qp.address());
    change(&mut there);
    b.qp.connect(&here, false).unwrap();
    a.qp.connect(&there, true).unwrap();
    drive(&[&a.device, &b.device], || a.qp.state() != QueuePairState::Connecting);
    assert_eq!(a.qp.state(), QueuePairState::Error);
    assert!(a.poll().is_empty(), "the requests of the probe are nobody's");
    a.qp.failure().unwrap().cause
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn wrong_bytes_and_wrong_keys_are_noticed_before_anything_is_sent() {
    // Of the address: the number that the bytes come from, the key that opens them.
    let cause = failure(|address| address[48] ^= 1);
    assert!(matches!(cause, Cause::PathDown { why } if why.contains("other bytes")), "{cause:?}");
    let cause = failure(|address| address[56] ^= 0x55);
    assert!(matches!(cause, Cause::Denied { .. }), "{cause:?}");
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_path_that_loses_everything_is_given_up() {
    let fine = Fine("tc qdisc del dev DEV root");
    for interface in interfaces() {
        run(&format!("tc qdisc add dev {interface} root netem loss 100%"));
    }
    let started = Instant::now();
    let cause = failure(|_| {});
    assert!(matches!(cause, Cause::PathDown { why } if why.contains("no answer")), "{cause:?}");
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    drop(fine);
    let (a, b) = ends();
    connect(&a, &b);
}

// A packet that is too large for the way vanishes, and all small ones arrive.
#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_path_that_loses_large_packets_is_given_up() {
    let fine = Fine("tc qdisc del dev DEV clsact");
    for interface in interfaces() {
        run(&format!("tc qdisc add dev {interface} clsact"));
        // The length of an IPv4 packet has this bit from 4096 to 8191 bytes.
        run(&format!("tc filter add dev {interface} egress protocol ip u32 match u16 0x1000 0x1000 at 2 action drop"));
    }
    let cause = failure(|_| {});
    assert!(matches!(cause, Cause::PathDown { why } if why.contains("no answer")), "{cause:?}");
    drop(fine);
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_port_that_is_down_has_no_queue_pairs() {
    let provider = IbvProvider::new().unwrap();
    let device = provider.open(&names()[0]).unwrap();
    let end = End::new(&device);
    let fine = Fine("ip link set DEV up");
    run(&format!("ip link set {} down", interfaces()[0]));
    drive(&[&device], || end.qp.state() == QueuePairState::Error);
    let cause = end.qp.failure().unwrap().cause;
    assert!(matches!(cause, Cause::PathDown { why } if why.contains("port")), "{cause:?}");
    let refused = end.pd.create_qp(&end.cq, &end.cq, SMALL).unwrap_err().cause;
    assert_eq!(refused, cause);
    drop(fine);
    drive(&[&device], || end.pd.create_qp(&end.cq, &end.cq, SMALL).is_ok());
}
