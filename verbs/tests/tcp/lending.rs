//! Windows to bytes that are lent: which bytes are read at which time, and that nobody reads them after their time.

use crate::harness::*;
use crate::refusals::refused;
use std::sync::Arc;
use towline_verbs::memory::{Loan, lend};
use towline_verbs::{Cause, CompletionStatus, MemoryRegion, Opcode, QueuePairState};

const LENT: u8 = 0x11;
const REGION: u8 = 0x22;
const SCRIBBLE: u8 = 0x99;

/// A region of `len` bytes, all of which are [`REGION`].
fn region(end: &End, len: u64) -> MemoryRegion {
    let region = end.memory(len);
    region.memory().write(0, &vec![REGION; len as usize]).unwrap();
    region
}

#[test]
fn lent_bytes_are_read_until_they_are_copied_and_then_the_regions() {
    let p = pair();
    assert!(p.b.device.info().capabilities.loans);
    let from = region(&p.b, 8192);
    let to = p.a.memory(8192);
    let own: Vec<u8> = (0..500).map(|i| (i % 251) as u8).collect();
    lend(&[&own], |loans| {
        let window = from.bind_lent(&p.b.qp, 1000, &loans[0]).unwrap();
        let read = |offset: u64, len: u64| {
            let remote = window.remote();
            let remote = towline_verbs::RemoteSlice { address: remote.address + offset, len, ..remote };
            p.a.post(1, Opcode::Read, vec![slice(&to, 0, len)], Some(remote));
            assert_eq!(completion(&p.a, &p.b).status, CompletionStatus::Success);
            bytes(&to, 0, len)
        };
        assert_eq!(read(0, 500), own);
        assert_eq!(read(123, 300), own[123..423]);
        assert_eq!(loans[0].taken(), 800);
        loans[0].copied();
        assert_eq!(read(0, 500), [REGION; 500]);
        assert_eq!(loans[0].taken(), 800);
        assert!(window.invalidate());
    });
}

#[test]
fn a_loan_opens_its_own_length_and_no_more() {
    let p = pair();
    let from = region(&p.b, 8192);
    let loan = Loan::owned(vec![LENT; 100].into());
    let window = from.bind_lent(&p.b.qp, 1000, &loan).unwrap();
    assert_eq!(window.remote().len, 100);
    assert!(matches!(from.bind_lent(&p.b.qp, 8100, &loan).unwrap_err().cause, Cause::OutOfRange { .. }));
    refused(&p, Opcode::Read, towline_verbs::RemoteSlice { len: 101, ..window.remote() });
}

#[test]
fn after_the_end_of_a_loan_that_was_not_copied_nothing_is_read() {
    let p = pair();
    let from = region(&p.b, 8192);
    let own = vec![LENT; 500];
    let window = lend(&[&own], |loans| from.bind_lent(&p.b.qp, 0, &loans[0]).unwrap());
    refused(&p, Opcode::Read, window.remote());
}

/// Reads much out of a loan, has `meanwhile` happen in the middle, and gives how the read ended and what came.
fn in_the_middle(meanwhile: impl FnOnce(&Arc<Loan>)) -> (CompletionStatus, Vec<u8>) {
    const LEN: u64 = 128 << 20;
    let p = pair();
    let from = region(&p.b, LEN);
    let to = p.a.memory(LEN);
    let mut own = vec![LENT; LEN as usize];
    let _window = lend(&[&own], |loans| {
        let window = from.bind_lent(&p.b.qp, 0, &loans[0]).unwrap();
        p.a.post(1, Opcode::Read, vec![slice(&to, 0, LEN)], Some(window.remote()));
        drive(&[&p.a.device, &p.b.device], || bytes(&to, 16 << 20, 1) == [LENT]);
        meanwhile(&loans[0]);
        window
    });
    own.fill(SCRIBBLE);
    let done = completion(&p.a, &p.b);
    (done.status, bytes(&to, 0, LEN))
}

#[test]
fn a_read_under_way_goes_on_in_the_region_when_the_bytes_are_copied() {
    let (status, came) = in_the_middle(|loan| loan.copied());
    assert_eq!(status, CompletionStatus::Success);
    assert!(!came.contains(&SCRIBBLE), "the lender's memory was read after its time");
    assert!(came.contains(&LENT) && came.contains(&REGION) && !came.contains(&0));
}

#[test]
fn a_read_under_way_ends_with_the_loan_when_the_bytes_are_not_copied() {
    let (status, came) = in_the_middle(|_| {});
    assert_eq!(status, CompletionStatus::RemoteAccess);
    assert!(!came.contains(&SCRIBBLE), "the lender's memory was read after its time");
    assert!(!came.contains(&REGION), "bytes of the region were read that were not the payload's");
}

#[test]
fn the_end_of_a_loan_races_with_threads_that_send() {
    const LEN: u64 = 8 << 20;
    for round in 0..30 {
        let p = pair();
        let (from, to) = (region(&p.b, LEN), p.a.memory(LEN));
        let mut own = vec![LENT; LEN as usize];
        let mut done = Vec::new();
        std::thread::scope(|scope| {
            let window = lend(&[&own], |loans| {
                let window = from.bind_lent(&p.b.qp, 0, &loans[0]).unwrap();
                p.a.post(1, Opcode::Read, vec![slice(&to, 0, LEN)], Some(window.remote()));
                scope.spawn(|| {
                    drive(&[&p.a.device, &p.b.device], || {
                        done.extend(p.a.poll());
                        !done.is_empty()
                    });
                });
                // A different moment in each round.
                while loans[0].taken() < round * (LEN / 40) && p.b.qp.state() != QueuePairState::Error {
                    std::hint::spin_loop();
                }
                if round % 2 == 0 {
                    loans[0].copied();
                }
                window
            });
            own.fill(SCRIBBLE);
            drop(window);
        });
        assert!(matches!(done[0].status, CompletionStatus::Success | CompletionStatus::RemoteAccess));
        assert!(!bytes(&to, 0, LEN).contains(&SCRIBBLE), "round {round}");
    }
}
