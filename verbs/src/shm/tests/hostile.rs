//! A peer that breaks the protocol can end its own connection and nothing else (I7).

use super::support::*;
use crate::memory::{HugePages, SEALS};
use crate::shm::address::Address;
use crate::shm::frame::{FRAME, Frame, Piece, Source, Target};
use crate::shm::{MAX_REGIONS, sys};
use crate::{Access, Cause, CompletionStatus, Memory, Opcode, QueuePair, QueuePairState, RemoteSlice, Token};
use proptest::prelude::*;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

const NUMBER: u32 = 77;
const MAX_SEND_WR: u32 = 4;

/// The other end of a queue pair, in our hands.
struct Fake {
    stream: UnixStream,
}

/// A queue pair whose peer is a fake that has said nothing yet.
fn meet(end: &End) -> (QueuePair, Fake) {
    let qp = end.queue_pair();
    let fake = Address { number: NUMBER, token: Token([5; 16]), name: b"fake".to_vec() };
    qp.connect(&fake.encode(), false).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    end.device.adopt(ours.into(), token_of(&qp)).unwrap();
    theirs.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut fake = Fake { stream: theirs };
    let hello = fake.receive();
    assert!(matches!(hello, Frame::Hello { token: Token([5, ..]), max_send_wr: 64, .. }), "{hello:?}");
    (qp, fake)
}

/// The same, with the greetings exchanged.
fn greet(end: &End) -> (QueuePair, Fake) {
    let (qp, mut fake) = meet(end);
    fake.send(hello(&qp));
    drive(&[end], || qp.state() == QueuePairState::ReadyToSend);
    (qp, fake)
}

fn hello(qp: &QueuePair) -> Frame {
    Frame::Hello { number: NUMBER, token: token_of(qp), max_send_wr: MAX_SEND_WR }
}

impl Fake {
    fn send(&mut self, frame: Frame) {
        self.stream.write_all(&frame.encode()).unwrap();
    }

    fn send_with(&mut self, frame: Frame, descriptor: BorrowedFd<'_>) {
        // SAFETY: there is no tail.
        let sent =
            unsafe { sys::send(self.stream.as_fd(), &frame.encode(), core::ptr::null(), 0, Some(descriptor)).unwrap() };
        assert_eq!(sent, FRAME);
    }

    fn receive(&mut self) -> Frame {
        let mut bytes = [0; FRAME];
        self.stream.read_exact(&mut bytes).unwrap();
        Frame::decode(&bytes).unwrap()
    }
}

fn wait_for_malformed(end: &End, qp: &QueuePair) -> &'static str {
    drive(&[end], || qp.state() == QueuePairState::Error);
    let failure = qp.failure().unwrap();
    let Cause::Malformed { what } = failure.cause else { panic!("{failure}") };
    assert!(qp.is_fenced());
    what
}

fn piece() -> Piece {
    Piece {
        id: 0,
        target: Some(Target { key: 1, offset: 0 }),
        len: 0,
        source: Source::Inline,
        total: 0,
        immediate: None,
        first: true,
        last: true,
    }
}

#[test]
fn a_wrong_greeting_ends_it() {
    let end = End::new();
    let wrong: [fn(&QueuePair) -> Vec<u8>; 6] = [
        |_| [0xff; FRAME].to_vec(),
        |_| Frame::Hello { number: NUMBER, token: Token([5; 16]), max_send_wr: 1 }.encode().to_vec(),
        |qp| Frame::Hello { number: NUMBER + 1, token: token_of(qp), max_send_wr: 1 }.encode().to_vec(),
        |qp| Frame::Hello { number: NUMBER, token: token_of(qp), max_send_wr: u32::MAX }.encode().to_vec(),
        |qp| [hello(qp).encode(), hello(qp).encode()].concat(),
        |qp| {
            let mut later = hello(qp).encode();
            later[2] += 1;
            later.to_vec()
        },
    ];
    for bytes in wrong {
        let (qp, mut fake) = meet(&end);
        fake.stream.write_all(&bytes(&qp)).unwrap();
        wait_for_malformed(&end, &qp);
    }
}

#[test]
fn anything_before_the_greeting_ends_it() {
    let end = End::new();
    for frame in [Frame::Withdraw { key: 1 }, Frame::Resolve { key: 1 }, Frame::Piece(piece())] {
        let (qp, mut fake) = meet(&end);
        fake.send(frame);
        wait_for_malformed(&end, &qp);
    }
}

#[test]
fn frames_out_of_order_end_it() {
    let end = End::new();
    let more = Piece { total: 10, last: false, ..piece() };
    let wrong: Vec<Vec<Frame>> = vec![
        vec![Frame::Ack { id: 0, status: CompletionStatus::Success, bytes: 0 }],
        vec![Frame::Resolved { key: 1 }],
        vec![Frame::Withdraw { key: 1 }],
        vec![Frame::Piece(Piece { first: false, ..piece() })],
        vec![Frame::Piece(more), Frame::Piece(piece())],
        vec![Frame::Piece(more), Frame::Piece(Piece { id: 1, first: false, ..more })],
        vec![Frame::Piece(more), Frame::Piece(Piece { total: 11, first: false, ..more })],
        vec![Frame::Piece(more), Frame::Piece(Piece { target: None, first: false, ..more })],
        vec![Frame::Piece(Piece { len: 1, source: Source::Region { key: 1, offset: 0 }, ..piece() })],
        vec![Frame::Piece(Piece { total: 1, ..piece() })],
        vec![Frame::Piece(Piece { last: false, ..piece() })],
    ];
    for frames in wrong {
        let (qp, mut fake) = greet(&end);
        for frame in frames {
            fake.send(frame);
        }
        wait_for_malformed(&end, &qp);
    }
}

fn memfd(len: u64, seals: i32) -> File {
    // SAFETY: the name is a NUL-terminated string.
    let fd = unsafe { libc::memfd_create(c"test".as_ptr(), libc::MFD_ALLOW_SEALING | libc::MFD_CLOEXEC) };
    assert!(fd >= 0);
    // SAFETY: just made, and nobody else has it.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(len).unwrap();
    // SAFETY: fallocate and fcntl take integers.
    unsafe {
        assert_eq!(libc::fallocate(fd, 0, 0, len as i64), 0);
    }
    // SAFETY: as above.
    assert_eq!(unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, seals) }, 0);
    file
}

/// Announces a region in a descriptor that must not be used.
fn check_segment_refused(descriptor: OwnedFd, len: u64, why: &str) {
    let end = End::new();
    let (qp, mut fake) = greet(&end);
    fake.send_with(Frame::Region { key: 1, len }, descriptor.as_fd());
    let what = wait_for_malformed(&end, &qp);
    assert!(what.contains(why), "{what}");
    assert!(qp.map(RemoteSlice { address: 0, len: 1, rkey: 1 }).is_err());
}

#[test]
fn a_segment_without_every_seal_is_refused() {
    for missing in [libc::F_SEAL_SHRINK, libc::F_SEAL_GROW, libc::F_SEAL_FUTURE_WRITE, libc::F_SEAL_SEAL] {
        check_segment_refused(memfd(8192, SEALS & !missing).into(), 4096, "seals");
    }
    check_segment_refused(memfd(8192, 0).into(), 4096, "seals");
}

#[test]
fn a_short_segment_is_refused() {
    check_segment_refused(memfd(4096, SEALS).into(), 4097, "shorter");
    check_segment_refused(memfd(4096, SEALS).into(), u64::MAX, "shorter");
}

#[test]
fn a_segment_that_costs_its_owner_nothing_is_refused() {
    // SAFETY: the name is a NUL-terminated string.
    let fd = unsafe { libc::memfd_create(c"test".as_ptr(), libc::MFD_ALLOW_SEALING | libc::MFD_CLOEXEC) };
    // SAFETY: just made, and nobody else has it.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(1 << 40).unwrap();
    // SAFETY: fcntl takes an integer.
    assert_eq!(unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, SEALS) }, 0);
    check_segment_refused(file.into(), 1 << 40, "populated");
}

#[test]
fn what_is_no_memory_file_is_refused() {
    let exe = File::open(std::env::current_exe().unwrap()).unwrap();
    check_segment_refused(exe.into(), 1, "memory file");
    check_segment_refused(File::open("/dev/zero").unwrap().into(), 1, "memory file");
    check_segment_refused(File::open("/").unwrap().into(), 1, "memory file");
    check_segment_refused(UnixStream::pair().unwrap().0.into(), 1, "memory file");
}

#[test]
fn a_region_needs_a_descriptor_a_length_and_a_new_key() {
    let end = End::new();
    let good = memfd(4096, SEALS);
    let (qp, mut fake) = greet(&end);
    fake.send(Frame::Region { key: 1, len: 4096 });
    assert!(wait_for_malformed(&end, &qp).contains("descriptor"));

    let (qp, mut fake) = greet(&end);
    fake.send_with(Frame::Region { key: 1, len: 0 }, good.as_fd());
    wait_for_malformed(&end, &qp);

    let (qp, mut fake) = greet(&end);
    fake.send_with(Frame::Region { key: 1, len: 4096 }, good.as_fd());
    fake.send_with(Frame::Region { key: 1, len: 4096 }, good.as_fd());
    wait_for_malformed(&end, &qp);
}

#[test]
fn the_regions_of_a_peer_are_counted() {
    let end = End::new();
    let good = memfd(4096, SEALS);
    let (qp, mut fake) = greet(&end);
    for key in 0..MAX_REGIONS {
        fake.send_with(Frame::Region { key, len: 4096 }, good.as_fd());
        if key % 16 == 0 {
            drive(&[&end], || qp.map(RemoteSlice { address: 0, len: 4096, rkey: key }).is_ok());
        }
    }
    fake.send(Frame::Withdraw { key: 0 });
    fake.send_with(Frame::Region { key: MAX_REGIONS, len: 4096 }, good.as_fd());
    drive(&[&end], || qp.map(RemoteSlice { address: 0, len: 1, rkey: MAX_REGIONS }).is_ok());
    fake.send_with(Frame::Region { key: MAX_REGIONS + 1, len: 4096 }, good.as_fd());
    wait_for_malformed(&end, &qp);
}

#[test]
fn regions_of_ours_are_counted() {
    let end = End::new();
    let memory = Memory::shared(4096, HugePages::Off).unwrap();
    let regions: Vec<_> =
        (0..MAX_REGIONS).map(|_| end.pd.register(memory.clone(), Access::REMOTE_READ).unwrap()).collect();
    let error = end.pd.register(memory.clone(), Access::REMOTE_READ).unwrap_err();
    assert!(matches!(error.cause, Cause::Limit { have: MAX_REGIONS, .. }), "{error}");
    drop(regions);
    end.pd.register(memory, Access::REMOTE_READ).unwrap();
}

#[test]
fn descriptors_nobody_asked_for_end_it() {
    let end = End::new();
    // Ten in one message, of which the kernel passes four.
    let (qp, mut fake) = greet(&end);
    send_many(&fake.stream, &[0; 1], 10);
    assert!(wait_for_malformed(&end, &qp).contains("descriptors"));
    assert!(fake.stream.write_all(&[0; FRAME]).is_err());
    // One with every byte of frames that carry none.
    let (qp, fake) = greet(&end);
    let frame = Frame::Piece(Piece { target: None, ..piece() }).encode();
    for byte in frame.iter().cycle().take(3 * FRAME) {
        send_many(&fake.stream, &[*byte], 1);
    }
    assert!(wait_for_malformed(&end, &qp).contains("descriptors"));
}

/// Sends bytes with `count` copies of a descriptor.
fn send_many(stream: &UnixStream, bytes: &[u8], count: usize) {
    let fds = vec![stream.as_raw_fd(); count];
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let size = (count * size_of::<i32>()) as u32;
    let mut control = vec![0u64; 64];
    // SAFETY: all zeros is a valid `msghdr`.
    let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
    message.msg_iov = &mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    // SAFETY: arithmetic only.
    message.msg_controllen = unsafe { libc::CMSG_SPACE(size) } as _;
    // SAFETY: there is room for a header.
    let header = unsafe { libc::CMSG_FIRSTHDR(&message) };
    // SAFETY: arithmetic only.
    let len = unsafe { libc::CMSG_LEN(size) };
    // SAFETY: the header lies in `control`.
    unsafe {
        header.write(libc::cmsghdr { cmsg_len: len as _, cmsg_level: libc::SOL_SOCKET, cmsg_type: libc::SCM_RIGHTS })
    };
    // SAFETY: arithmetic only.
    let data = unsafe { libc::CMSG_DATA(header) };
    // SAFETY: `control` has room for all of `fds` behind the header.
    unsafe { data.copy_from_nonoverlapping(fds.as_ptr().cast(), size as usize) };
    // SAFETY: `message` is whole.
    let sent = unsafe { libc::sendmsg(stream.as_raw_fd(), &message, libc::MSG_NOSIGNAL) };
    assert!(sent == bytes.len() as isize || sent < 0);
}

#[test]
fn a_flood_of_requests_without_reading_answers_ends_it() {
    let end = End::new();
    let (qp, mut fake) = greet(&end);
    fake.stream.set_nonblocking(true).unwrap();
    let frames = Frame::Piece(piece()).encode().repeat(64);
    let mut sent = 0;
    while qp.state() != QueuePairState::Error {
        sent += fake.stream.write(&frames).unwrap_or(0);
        end.turn();
        assert!(sent < 64 << 20, "answers are queued without bound");
    }
    wait_for_malformed(&end, &qp);
}

#[test]
fn a_flood_of_questions_ends_it() {
    let end = End::new();
    let (qp, mut fake) = greet(&end);
    fake.stream.set_nonblocking(true).unwrap();
    let mut sent = 0;
    while qp.state() != QueuePairState::Error {
        sent += fake.stream.write(&Frame::Resolve { key: 5 }.encode().repeat(64)).unwrap_or(0);
        end.turn();
        assert!(sent < 64 << 20, "answers are queued without bound");
    }
    wait_for_malformed(&end, &qp);
}

#[test]
fn requests_that_name_what_is_not_theirs_are_answered() {
    let end = End::new();
    let region = end.region(1 << 20, Access::REMOTE_WRITE, 1);
    let key = region.remote(0, 1).unwrap().rkey;
    let good = memfd(4096, SEALS);
    let (qp, mut fake) = greet(&end);
    fake.send_with(Frame::Region { key: 9, len: 4096 }, good.as_fd());
    let mut ask = |target: Option<Target>, source: Source| {
        fake.send(Frame::Piece(Piece { target, len: 4096, total: 4096, source, ..piece() }));
        end.turn();
        let Frame::Ack { id: 0, status, bytes } = fake.receive() else { panic!() };
        (status, bytes)
    };
    let ours = |offset| Some(Target { key, offset });
    let theirs = |key, offset| Source::Region { key, offset };
    assert_eq!(ask(ours(0), theirs(9, 1)), (CompletionStatus::RemoteInvalidRequest, 0));
    assert_eq!(ask(ours(0), theirs(9, u64::MAX)), (CompletionStatus::RemoteInvalidRequest, 0));
    assert_eq!(ask(ours(0), theirs(8, 0)), (CompletionStatus::RemoteInvalidRequest, 0));
    assert_eq!(ask(ours((1 << 20) - 1), theirs(9, 0)), (CompletionStatus::RemoteAccess, 0));
    assert_eq!(ask(ours(u64::MAX - 10), theirs(9, 0)), (CompletionStatus::RemoteAccess, 0));
    assert_eq!(ask(Some(Target { key: !key, offset: 0 }), theirs(9, 0)), (CompletionStatus::RemoteAccess, 0));
    assert!(bytes_of(&region, 0, 1 << 20) == pattern(1 << 20, 1), "a refused write wrote");
    assert_eq!(ask(ours(4096), theirs(9, 0)), (CompletionStatus::Success, 4096));
    assert_eq!(bytes_of(&region, 4096, 4096), [0; 4096]);
    assert_eq!(qp.state(), QueuePairState::ReadyToSend);
}

#[test]
fn an_answer_that_lies_about_the_length_ends_it() {
    let end = End::new();
    let region = end.region(4096, Access::LOCAL_WRITE, 1);
    let remote = Some(RemoteSlice { address: 0, len: 8, rkey: 1 });
    for (id, status, bytes) in
        [(0, CompletionStatus::Success, 9), (0, CompletionStatus::RemoteAccess, 8), (1, CompletionStatus::Success, 8)]
    {
        let (qp, mut fake) = greet(&end);
        post(&qp, vec![request(3, Opcode::Write, vec![slice(&region, 0, 8)], remote)]).unwrap();
        fake.send(Frame::Ack { id, status, bytes });
        wait_for_malformed(&end, &qp);
        assert_eq!(end.completions()[0].status, CompletionStatus::TransportRetryExceeded);
    }
}

#[test]
fn frames_may_come_byte_by_byte() {
    let end = End::new();
    let region = end.region(4096, Access::REMOTE_WRITE, 1);
    let key = region.remote(0, 1).unwrap().rkey;
    let (qp, mut fake) = meet(&end);
    let write = Piece { target: Some(Target { key, offset: 10 }), len: 5, total: 5, ..piece() };
    let bytes = [&hello(&qp).encode()[..], &Frame::Piece(write).encode(), b"hello"].concat();
    for byte in bytes {
        fake.stream.write_all(&[byte]).unwrap();
        end.turn();
    }
    assert_eq!(fake.receive(), Frame::Ack { id: 0, status: CompletionStatus::Success, bytes: 5 });
    assert_eq!(bytes_of(&region, 10, 5), b"hello");
}

#[test]
fn a_connection_that_ends_within_a_frame_is_only_gone() {
    let end = End::new();
    let (qp, mut fake) = greet(&end);
    fake.stream.write_all(&Frame::Resolve { key: 1 }.encode()[..40]).unwrap();
    drop(fake);
    drive(&[&end], || qp.state() == QueuePairState::Error);
    assert_eq!(qp.failure().unwrap().cause, Cause::Disconnected);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    /// Frames with some right fields, in any order and cut anywhere: no panic, no byte out of place, and the queue pair
    /// is either well or in the error state.
    #[test]
    fn noise_ends_in_one_state_or_the_other(
        frames in prop::collection::vec((1u8..8, 0u8..32, any::<[u8; 8]>(), prop::collection::vec(0u64..5000, 7)), 0..40),
        cut in 0usize..64,
    ) {
        let end = End::new();
        let region = end.region(8192, Access::REMOTE_WRITE | Access::LOCAL_WRITE, 1);
        let key = region.remote(0, 1).unwrap().rkey;
        let (qp, mut fake) = greet(&end);
        post_receive(&qp, 1, Some(slice(&region, 8000, 100))).unwrap();
        let mut bytes = Vec::new();
        for (kind, flags, noise, numbers) in frames {
            let mut frame = [0; FRAME];
            frame[0] = kind;
            frame[1] = flags;
            if noise[0] == 0 {
                frame[..8].copy_from_slice(&noise);
            }
            for (place, number) in frame[8..].chunks_exact_mut(8).zip(&numbers) {
                place.copy_from_slice(&number.to_le_bytes());
            }
            if noise[1] < 200 {
                frame[16..24].copy_from_slice(&key.to_le_bytes());
            }
            bytes.extend_from_slice(&frame);
        }
        bytes.truncate(bytes.len().saturating_sub(cut));
        fake.stream.write_all(&bytes).ok();
        drop(fake);
        drive(&[&end], || qp.state() == QueuePairState::Error);
        prop_assert!(qp.is_fenced());
    }
}
