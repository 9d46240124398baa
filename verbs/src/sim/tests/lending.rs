//! Windows to lent bytes.

use super::*;
use crate::memory::{Loan, lend};

fn lending() -> FaultPlan {
    let mut plan = plan();
    plan.capabilities.loans = true;
    plan
}

/// Reads the window's bytes to the start of `to`'s region.
fn read(fabric: &SimFabric, to: &End, window: &crate::MemoryWindow) -> CompletionStatus {
    let remote = window.remote();
    to.read(7, 0, remote);
    let mut out = Vec::new();
    while to.cq.poll(&mut out, 1) == 0 {
        assert!(step(fabric), "the read never ends");
    }
    out[0].status
}

fn first(end: &End, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    end.region.memory().read(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn lent_bytes_are_read_in_the_place_of_the_regions_until_they_are_there() {
    let fabric = SimFabric::new(1, lending());
    let (a, b) = pair(&fabric);
    b.region.memory().write(100, &[0x22; 50]).unwrap();
    let loan = Loan::owned(vec![0x11; 50].into());
    let window = b.region.bind_lent(&b.qp, 100, &loan).unwrap();
    assert_eq!(read(&fabric, &a, &window), CompletionStatus::Success);
    assert_eq!((first(&a, 50), loan.taken()), (vec![0x11; 50], 50));
    loan.copied();
    assert_eq!(read(&fabric, &a, &window), CompletionStatus::Success);
    assert_eq!((first(&a, 50), loan.taken()), (vec![0x22; 50], 50));
}

#[test]
fn what_was_taken_back_is_refused_and_devices_without_loans_say_so() {
    let fabric = SimFabric::new(1, lending());
    let (a, b) = pair(&fabric);
    let window = lend(&[&[0x11; 50]], |loans| b.region.bind_lent(&b.qp, 100, &loans[0]).unwrap());
    assert_eq!(read(&fabric, &a, &window), CompletionStatus::RemoteAccess);
    assert_eq!(first(&a, 50), [0; 50]);

    let fabric = SimFabric::new(1, plan());
    let (_a, b) = pair(&fabric);
    let refused = b.region.bind_lent(&b.qp, 100, &Loan::owned(vec![0; 50].into())).unwrap_err();
    assert!(matches!(refused.cause, Cause::Unsupported { .. }), "{refused}");
}
