//! Writes, sends and receives.

use super::support::*;
use crate::{Access, Cause, CompletionStatus, Memory, MemoryRegion, Opcode, QueuePairState, RemoteSlice};
use std::time::Duration;

const WRITABLE: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE);

/// A region of memory without a segment: its bytes go inline. The memory lives as long as the region.
fn private_region(end: &End, len: u64, access: Access, seed: u64) -> MemoryRegion {
    #[derive(Debug)]
    struct Private(std::sync::Mutex<Box<[u8]>>, usize);
    // SAFETY: the bytes are boxed and live as long as the value; only the pointer to them is used.
    unsafe impl crate::memory::MemoryBacking for Private {
        fn kind(&self) -> crate::MemoryKind {
            crate::MemoryKind::Host
        }
        fn len(&self) -> u64 {
            self.0.lock().unwrap().len() as u64
        }
        fn address(&self) -> *mut u8 {
            self.1 as *mut u8
        }
        fn segment(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
            None
        }
        fn page_size(&self) -> u64 {
            4096
        }
        fn read(&self, offset: u64, out: &mut [u8]) {
            // SAFETY: the caller checked the range.
            unsafe { self.address().wrapping_add(offset as usize).copy_to_nonoverlapping(out.as_mut_ptr(), out.len()) }
        }
        fn write(&self, offset: u64, bytes: &[u8]) {
            let to = self.address().wrapping_add(offset as usize);
            // SAFETY: the caller checked the range.
            unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) }
        }
    }
    let mut bytes = pattern(len, seed).into_boxed_slice();
    let address = bytes.as_mut_ptr() as usize;
    let backing = std::sync::Arc::new(Private(std::sync::Mutex::new(bytes), address));
    end.pd.register(Memory::from_backing(backing), access).unwrap()
}

fn check_write(len: u64, from: u64, to: u64, shared: bool) {
    let (a, b) = (End::new(), End::new());
    let target = a.region(to + len + 4096, WRITABLE, 1);
    let source = if shared {
        b.region(from + len, Access::REMOTE_READ, 2)
    } else {
        private_region(&b, from + len, Access::empty(), 2)
    };
    let (_qa, qb) = connect(&a, &b);
    let remote = Some(target.remote(to, len).unwrap());
    post(&qb, vec![request(9, Opcode::Write, vec![slice(&source, from, len)], remote)]).unwrap();
    let done = wait_for(&[&a, &b], &b, 1)[0];
    assert_eq!((done.id, done.status, done.bytes), (9, CompletionStatus::Success, len));
    // The completion means delivered: the owner's memory has it, without another turn of the owner.
    let before = pattern(to + len + 4096, 1);
    let after = bytes_of(&target, 0, to + len + 4096);
    assert!(after[to as usize..(to + len) as usize] == pattern(from + len, 2)[from as usize..]);
    assert!(after[..to as usize] == before[..to as usize], "bytes before were changed");
    assert!(after[(to + len) as usize..] == before[(to + len) as usize..], "bytes behind were changed");
    assert!(a.completions().is_empty(), "a plain write is not seen by the owner");
}

#[test]
fn writes_out_of_a_segment_arrive() {
    for (len, from, to) in [(1, 0, 0), (4096, 1, 2), (64 << 10, 0, 0), ((5 << 20) + 3, 77, 123)] {
        check_write(len, from, to, true);
    }
}

#[test]
fn writes_out_of_private_memory_arrive_inline() {
    for (len, from, to) in [(1, 0, 0), (4096, 1, 2), (32 << 10, 0, 0), ((32 << 10) + 1, 0, 0), ((5 << 20) + 3, 77, 123)]
    {
        check_write(len, from, to, false);
    }
}

#[test]
fn a_write_gathers_shared_and_private_slices() {
    let (a, b) = (End::new(), End::new());
    let target = a.region(8 << 20, WRITABLE, 1);
    let shared = b.region(4 << 20, Access::REMOTE_READ, 2);
    let private = private_region(&b, 1 << 20, Access::empty(), 3);
    let unannounced = b.region(1 << 20, Access::LOCAL_WRITE, 4);
    let (_qa, qb) = connect(&a, &b);
    let parts =
        [(&shared, 5, 2 << 20), (&private, 9, 1_000_000), (&shared, 0, 0), (&unannounced, 1, 1), (&shared, 1, 4096)];
    let local = parts.iter().map(|&(region, offset, len)| slice(region, offset, len)).collect();
    let expected: Vec<u8> = parts.iter().flat_map(|&(region, offset, len)| bytes_of(region, offset, len)).collect();
    let remote = Some(target.remote(321, expected.len() as u64).unwrap());
    post(&qb, vec![request(1, Opcode::Write, local, remote)]).unwrap();
    assert_eq!(wait_for(&[&a, &b], &b, 1)[0].status, CompletionStatus::Success);
    assert!(bytes_of(&target, 321, expected.len() as u64) == expected);
}

#[test]
fn a_read_sees_the_write_before_it() {
    let (a, b) = (End::new(), End::new());
    let shared = a.region(4 << 20, Access::REMOTE_WRITE | Access::REMOTE_READ, 1);
    let local = b.region(8 << 20, Access::LOCAL_WRITE | Access::REMOTE_READ, 2);
    let (_qa, qb) = connect(&a, &b);
    let remote = Some(shared.remote(0, 4 << 20).unwrap());
    let write = request(1, Opcode::Write, vec![slice(&local, 0, 4 << 20)], remote);
    let read = request(2, Opcode::Read, vec![slice(&local, 4 << 20, 4 << 20)], remote);
    post(&qb, vec![write, read]).unwrap();
    let done = wait_for(&[&a, &b], &b, 2);
    assert_eq!(done.iter().map(|done| done.id).collect::<Vec<_>>(), [1, 2]);
    assert!(bytes_of(&local, 4 << 20, 4 << 20) == bytes_of(&local, 0, 4 << 20));
}

#[test]
fn write_with_immediate_consumes_a_receive_when_all_is_there() {
    let (a, b) = (End::new(), End::new());
    let target = a.region(4 << 20, WRITABLE, 1);
    let source = b.region(4 << 20, Access::REMOTE_READ, 2);
    let (qa, qb) = connect(&a, &b);
    post_receive(&qa, 50, None).unwrap();
    let remote = Some(target.remote(0, 4 << 20).unwrap());
    let opcode = Opcode::WriteWithImmediate(0xfeed_beef);
    post(&qb, vec![request(1, opcode, vec![slice(&source, 0, 4 << 20)], remote)]).unwrap();
    let seen = wait_for(&[&a, &b], &a, 1)[0];
    assert_eq!((seen.id, seen.status, seen.opcode), (50, CompletionStatus::Success, Opcode::Receive));
    assert_eq!((seen.immediate, seen.bytes, seen.queue_pair), (Some(0xfeed_beef), 4 << 20, qa.number()));
    assert!(bytes_of(&target, 0, 4 << 20) == pattern(4 << 20, 2));
    let done = wait_for(&[&a, &b], &b, 1)[0];
    assert_eq!((done.status, done.opcode, done.immediate), (CompletionStatus::Success, opcode, None));
}

#[test]
fn sends_fill_receives_in_order() {
    let (a, b) = (End::new(), End::new());
    let inbox = a.region(4 << 20, Access::LOCAL_WRITE, 1);
    let shared = b.region(1 << 20, Access::REMOTE_READ, 2);
    let private = private_region(&b, 100_000, Access::empty(), 3);
    let (qa, qb) = connect(&a, &b);
    for id in 0..3u64 {
        post_receive(&qa, id, Some(slice(&inbox, id << 20, 1 << 20))).unwrap();
    }
    post_receive(&qa, 3, None).unwrap();
    post(
        &qb,
        vec![
            request(10, Opcode::Send, vec![slice(&shared, 0, 1 << 20)], None),
            request(11, Opcode::SendWithImmediate(7), vec![slice(&private, 0, 100_000)], None),
            request(12, Opcode::Send, vec![slice(&shared, 3, 5), slice(&private, 0, 5)], None),
            request(13, Opcode::SendWithImmediate(8), vec![], None),
        ],
    )
    .unwrap();
    let mut received = Vec::new();
    let mut sent = Vec::new();
    drive(&[&a, &b], || {
        received.extend(a.completions());
        sent.extend(b.completions());
        received.len() == 4 && sent.len() == 4
    });
    let facts: Vec<_> = received.iter().map(|c| (c.id, c.bytes, c.immediate, c.status)).collect();
    let ok = CompletionStatus::Success;
    assert_eq!(facts, [(0, 1 << 20, None, ok), (1, 100_000, Some(7), ok), (2, 10, None, ok), (3, 0, Some(8), ok)]);
    assert_eq!(sent.iter().map(|c| (c.id, c.status)).collect::<Vec<_>>(), [(10, ok), (11, ok), (12, ok), (13, ok)]);
    assert!(bytes_of(&inbox, 0, 1 << 20) == pattern(1 << 20, 2));
    assert!(bytes_of(&inbox, 1 << 20, 100_000) == pattern(100_000, 3));
    assert!(bytes_of(&inbox, (1 << 20) + 100_000, 100) == pattern(4 << 20, 1)[(1 << 20) + 100_000..][..100]);
    assert_eq!(bytes_of(&inbox, 2 << 20, 10), [&pattern(1 << 20, 2)[3..8], &pattern(100_000, 3)[..5]].concat());
}

#[test]
fn both_ways_at_once() {
    let (a, b) = (End::new(), End::new());
    let len = 6 << 20;
    let of = |end: &End, seed| end.region(2 * len, WRITABLE | Access::REMOTE_READ, seed);
    let (ra, rb) = (of(&a, 1), of(&b, 2));
    let (qa, qb) = connect(&a, &b);
    for _ in 0..4 {
        post(&qa, vec![request(1, Opcode::Write, vec![slice(&ra, 0, len)], Some(rb.remote(len, len).unwrap()))])
            .unwrap();
        post(&qb, vec![request(1, Opcode::Write, vec![slice(&rb, 0, len)], Some(ra.remote(len, len).unwrap()))])
            .unwrap();
    }
    let (mut of_a, mut of_b) = (Vec::new(), Vec::new());
    drive(&[&a, &b], || {
        of_a.extend(a.completions());
        of_b.extend(b.completions());
        of_a.len() == 4 && of_b.len() == 4
    });
    assert!(of_a.iter().chain(&of_b).all(|done| done.status == CompletionStatus::Success));
    assert!(bytes_of(&ra, len, len) == bytes_of(&rb, 0, len));
    assert!(bytes_of(&rb, len, len) == bytes_of(&ra, 0, len));
}

fn check_write_refused(remote: impl Fn(&End, RemoteSlice) -> RemoteSlice) {
    let (a, b) = (End::new(), End::new());
    let target = a.region(1 << 20, WRITABLE, 1);
    let source = b.region(1 << 20, Access::REMOTE_READ, 2);
    let (qa, qb) = connect(&a, &b);
    let good = target.remote(0, 4096).unwrap();
    let bad = remote(&a, good);
    let write = |id, remote| request(id, Opcode::Write, vec![slice(&source, 0, 4096)], Some(remote));
    post(&qb, vec![write(0, bad), write(1, good)]).unwrap();
    let done = wait_for(&[&a, &b], &b, 2);
    assert_eq!((done[0].id, done[0].status), (0, CompletionStatus::RemoteAccess));
    assert_eq!((done[1].id, done[1].status), (1, CompletionStatus::Flushed));
    assert!(matches!(qb.failure().unwrap().cause, Cause::Denied { .. }));
    drive(&[&a, &b], || qa.state() == QueuePairState::Error);
    assert!(bytes_of(&target, 4096, (1 << 20) - 4096) == pattern(1 << 20, 1)[4096..]);
}

#[test]
fn writes_without_key_bounds_or_right_are_refused_by_the_owner() {
    check_write_refused(|_, good| RemoteSlice { rkey: !good.rkey, ..good });
    check_write_refused(|_, good| RemoteSlice { address: (1 << 20) - 1, ..good });
    check_write_refused(|_, good| RemoteSlice { address: u64::MAX, ..good });
    let held = std::cell::RefCell::new(Vec::new());
    check_write_refused(|a, good| {
        held.borrow_mut().push(a.region(1 << 20, Access::REMOTE_READ | Access::LOCAL_WRITE, 5));
        RemoteSlice { rkey: held.borrow()[0].remote(0, 1).unwrap().rkey, ..good }
    });
}

#[test]
fn a_message_longer_than_its_receive_fails_on_both_sides() {
    let (a, b) = (End::new(), End::new());
    let inbox = a.region(4096, Access::LOCAL_WRITE, 1);
    let source = b.region(8192, Access::REMOTE_READ, 2);
    let (qa, qb) = connect(&a, &b);
    post_receive(&qa, 1, Some(slice(&inbox, 0, 4096))).unwrap();
    post(&qb, vec![request(2, Opcode::Send, vec![slice(&source, 0, 4097)], None)]).unwrap();
    let sent = wait_for(&[&a, &b], &b, 1)[0];
    assert_eq!(sent.status, CompletionStatus::RemoteInvalidRequest);
    let received = wait_for(&[&a, &b], &a, 1)[0];
    assert_eq!((received.id, received.status, received.bytes), (1, CompletionStatus::LocalLength, 0));
    assert!(bytes_of(&inbox, 0, 4096) == pattern(4096, 1));
}

#[test]
fn a_send_waits_for_a_receive() {
    let (a, b) = (End::new(), End::new());
    let inbox = a.region(1 << 20, Access::LOCAL_WRITE, 1);
    let target = a.region(4096, WRITABLE, 1);
    let source = b.region(1 << 20, Access::REMOTE_READ, 2);
    let private = private_region(&b, 5000, Access::empty(), 3);
    let (qa, qb) = connect(&a, &b);
    let remote = Some(target.remote(0, 4096).unwrap());
    post(
        &qb,
        vec![
            request(1, Opcode::Send, vec![slice(&private, 0, 5000)], None),
            request(2, Opcode::Send, vec![slice(&source, 0, 1 << 20)], None),
            request(3, Opcode::WriteWithImmediate(5), vec![slice(&source, 0, 4096)], remote),
        ],
    )
    .unwrap();
    for id in 0..3u64 {
        drive(&[&a, &b], || b.device.progress() == crate::Progress::Idle);
        assert!(a.completions().is_empty() && b.completions().is_empty());
        post_receive(&qa, id, Some(slice(&inbox, 0, 1 << 20))).unwrap();
        assert_eq!(wait_for(&[&a, &b], &a, 1)[0].id, id);
        assert_eq!(wait_for(&[&a, &b], &b, 1)[0].status, CompletionStatus::Success);
        match id {
            0 => assert!(bytes_of(&inbox, 0, 5000) == pattern(5000, 3)),
            1 => assert!(bytes_of(&inbox, 0, 1 << 20) == pattern(1 << 20, 2)),
            _ => assert!(bytes_of(&target, 0, 4096) == pattern(1 << 20, 2)[..4096]),
        }
    }
}

#[test]
fn without_a_receive_for_too_long_it_is_told() {
    for opcode in [Opcode::Send, Opcode::WriteWithImmediate(1)] {
        let a = End::with(|config| config.receiver_not_ready_timeout = Duration::from_millis(20));
        let b = End::new();
        let target = a.region(4096, WRITABLE, 1);
        let source = b.region(4096, Access::REMOTE_READ, 2);
        let (qa, qb) = connect(&a, &b);
        let remote = Some(target.remote(0, 4096).unwrap()).filter(|_| opcode != Opcode::Send);
        post(&qb, vec![request(1, opcode, vec![slice(&source, 0, 4096)], remote)]).unwrap();
        let done = wait_for(&[&a, &b], &b, 1)[0];
        assert_eq!(done.status, CompletionStatus::ReceiverNotReadyExceeded);
        assert_eq!(qb.state(), QueuePairState::Error);
        drive(&[&a, &b], || qa.state() == QueuePairState::Error);
    }
}

#[test]
fn receives_are_bounded_and_checked() {
    let (a, b) = (End::new(), End::new());
    let inbox = a.region(4096, Access::LOCAL_WRITE, 1);
    let constant = a.region(4096, Access::REMOTE_READ, 1);
    let foreign = b.region(4096, Access::LOCAL_WRITE, 1);
    let qa = a.queue_pair();
    for id in 0..u64::from(CAPACITY.max_recv_wr) {
        post_receive(&qa, id, Some(slice(&inbox, 0, 1))).unwrap();
    }
    let cause = |local| post_receive(&qa, 99, local).unwrap_err().cause;
    assert!(matches!(cause(None), Cause::Limit { what: "max_recv_wr", have: 16, need: 17 }));
    assert!(matches!(cause(Some(slice(&constant, 0, 1))), Cause::Denied { .. }));
    assert!(matches!(cause(Some(slice(&foreign, 0, 1))), Cause::Denied { .. }));
    assert!(matches!(cause(Some(slice(&inbox, 4096, 1))), Cause::OutOfRange { .. }));
    qa.to_error();
    let flushed = a.completions();
    assert_eq!(flushed.len(), 16);
    assert!(flushed.iter().all(|c| (c.status, c.opcode) == (CompletionStatus::Flushed, Opcode::Receive)));
}

#[test]
fn remote_reads_need_a_segment_and_windows_are_not_supported() {
    let a = End::new();
    let mut own = vec![0u8; 4096];
    // SAFETY: `own` outlives the memory.
    let memory = unsafe { Memory::borrowed(own.as_mut_ptr(), own.len()) };
    let error = a.pd.register(memory.clone(), Access::REMOTE_READ).unwrap_err();
    assert!(matches!(error.cause, Cause::Unsupported { .. }), "{error}");
    let region = a.pd.register(memory, ALL.difference(Access::REMOTE_READ)).unwrap();
    let error = region.bind(&a.queue_pair(), 0, 1).unwrap_err();
    assert!(matches!(error.cause, Cause::Unsupported { .. }), "{error}");
    assert!(!a.device.info().capabilities.scoped_keys);
}
