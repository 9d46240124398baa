//! Regions in pieces, and with relaxed ordering.

use crate::harness::*;
use towline_verbs::ibv::IbvProvider;
use towline_verbs::{Access, Cause, CompletionStatus, Opcode, Provider};

const PIECE: u64 = 256 << 10;
const LEN: u64 = 5 * PIECE / 2;

// B8: past the largest region of a device.
#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn memory_in_pieces_is_read_and_written_whole() {
    let provider = IbvProvider::new().unwrap().max_region(PIECE + 1);
    let [first, second] = names().map(|name| provider.open(&name).unwrap());
    let (a, b) = (End::new(&first), End::new(&second));
    connect(&a, &b);
    let (from, to) = (b.memory(LEN), a.memory(LEN));
    assert_eq!((from.piece_len(), to.piece_len()), (PIECE, PIECE));
    fill(&from, 1);
    let pieces = from.remote_pieces(0, LEN).unwrap();
    assert_eq!(pieces.iter().map(|piece| piece.len).collect::<Vec<_>>(), [PIECE, PIECE, PIECE / 2]);
    // Shifted, so that local slices cross borders that the remote ones don't.
    let shift = PIECE / 2 + 100;
    let mut offset = 0;
    for (id, piece) in (0..).zip(&pieces) {
        let len = piece.len.min(LEN - shift - offset);
        let remote = from.remote(offset, len).unwrap();
        a.post(id, Opcode::Read, vec![slice(&to, shift + offset, len)], Some(remote));
        offset += len;
    }
    assert!(a.completions(3).iter().all(|done| done.status == CompletionStatus::Success));
    assert!(bytes(&to, shift, LEN - shift) == content(LEN, 1)[..(LEN - shift) as usize]);
    assert_eq!(bytes(&to, 0, shift), vec![0; shift as usize]);
    // And back, by writes; the key of one piece opens no byte of the next.
    let remote = from.remote(PIECE, 100).unwrap();
    a.post(7, Opcode::Write, vec![slice(&to, PIECE - 50, 100)], Some(remote));
    assert_eq!(a.completion().status, CompletionStatus::Success);
    assert_eq!(bytes(&from, PIECE, 100), bytes(&to, PIECE - 50, 100));
    assert!(matches!(from.remote(PIECE - 1, 2).unwrap_err().cause, Cause::AcrossPieces { .. }));
    let mut beyond = from.remote(PIECE - 1, 1).unwrap();
    beyond.len = 2;
    a.post(8, Opcode::Read, vec![slice(&to, 0, 2)], Some(beyond));
    assert_eq!(a.completion().status, CompletionStatus::RemoteAccess);
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn relaxed_ordering_changes_no_byte() {
    let p = pair();
    let relaxed = Access::RELAXED_ORDERING;
    let from = p.b.memory_with(LEN, Access::REMOTE_READ | relaxed);
    let to = p.a.memory_with(LEN, Access::LOCAL_WRITE | relaxed);
    fill(&from, 2);
    p.a.post(1, Opcode::Read, vec![slice(&to, 0, LEN)], Some(from.remote(0, LEN).unwrap()));
    assert_eq!(p.a.completion().status, CompletionStatus::Success);
    assert!(bytes(&to, 0, LEN) == content(LEN, 2));
}
