//! Reads and views.

use super::support::*;
use crate::{Access, Cause, CompletionStatus, Error, Opcode, QueuePairState, RemoteSlice};

/// Reads `len` bytes at `from` of the first end's region into `to` of the second end's and checks them and what lies
/// around them.
fn check_read(len: u64, from: u64, to: u64) {
    let (a, b) = (End::new(), End::new());
    let source = a.region(from + len, Access::REMOTE_READ, 1);
    let target = b.region(to + len + 4096, Access::LOCAL_WRITE, 2);
    let (_qa, qb) = connect(&a, &b);
    let remote = source.remote(from, len).unwrap();
    post(&qb, vec![request(7, Opcode::Read, vec![slice(&target, to, len)], Some(remote))]).unwrap();
    let done = wait_for(&[&a, &b], &b, 1)[0];
    assert_eq!((done.id, done.status, done.bytes), (7, CompletionStatus::Success, len));
    assert_eq!((done.opcode, done.queue_pair), (Opcode::Read, qb.number()));
    assert!(bytes_of(&target, to, len) == pattern(from + len, 1)[from as usize..]);
    let before = pattern(to + len + 4096, 2);
    assert!(bytes_of(&target, 0, to) == before[..to as usize], "bytes before the destination were changed");
    let end = to + len;
    assert!(bytes_of(&target, end, 4096) == before[end as usize..], "bytes behind the destination were changed");
}

#[test]
fn one_byte() {
    check_read(1, 0, 0);
    check_read(1, 4095, 77);
}

#[test]
fn a_page_and_64_kib() {
    check_read(4096, 0, 0);
    check_read(64 << 10, 0, 0);
    check_read((64 << 10) + 1, 1, 3);
}

#[test]
fn unaligned_megabytes() {
    check_read((3 << 20) + 4321, 1234, 567);
}

#[test]
fn a_kv_cache_of_190_mib() {
    check_read(190 << 20, 0, 0);
}

#[test]
fn scattered_over_regions_and_gathered_in_order() {
    let (a, b) = (End::new(), End::new());
    let source = a.region(8 << 20, Access::REMOTE_READ, 3);
    let one = b.region(2 << 20, Access::LOCAL_WRITE, 4);
    let two = b.region(4 << 20, Access::LOCAL_WRITE, 5);
    let (_qa, qb) = connect(&a, &b);
    let parts = [(&one, 5, 1 << 20), (&two, 1 << 20, 1), (&one, (1 << 20) + 5, 0), (&two, 7, 1_000_000)];
    let len = parts.iter().map(|part| part.2).sum();
    let local = parts.iter().map(|&(region, offset, len)| slice(region, offset, len)).collect();
    post(&qb, vec![request(1, Opcode::Read, local, Some(source.remote(999, len).unwrap()))]).unwrap();
    assert_eq!(wait_for(&[&a, &b], &b, 1)[0].status, CompletionStatus::Success);
    let got: Vec<u8> = parts.iter().flat_map(|&(region, offset, len)| bytes_of(region, offset, len)).collect();
    assert!(got == pattern(8 << 20, 3)[999..999 + len as usize]);
}

#[test]
fn many_in_one_post_complete_in_order() {
    let (a, b) = (End::new(), End::new());
    let source = a.region(16 << 20, Access::REMOTE_READ, 1);
    let target = b.region(16 << 20, Access::LOCAL_WRITE, 2);
    let (_qa, qb) = connect(&a, &b);
    // Large and small in turn: the small ones are copied at once, but complete in their place.
    let mut requests = Vec::new();
    let mut at = 0;
    for id in 0..40 {
        let len = if id % 2 == 0 { 700_000 } else { 4096 };
        let remote = Some(source.remote(at, len).unwrap());
        requests.push(request(id, Opcode::Read, vec![slice(&target, at, len)], remote));
        at += len;
    }
    post(&qb, requests).unwrap();
    let done = wait_for(&[&a, &b], &b, 40);
    assert_eq!(done.iter().map(|done| done.id).collect::<Vec<_>>(), (0..40).collect::<Vec<_>>());
    assert!(done.iter().all(|done| done.status == CompletionStatus::Success));
    assert!(bytes_of(&target, 0, at) == pattern(16 << 20, 1)[..at as usize]);
}

#[test]
fn a_small_read_is_complete_when_the_post_returns() {
    let (a, b) = (End::new(), End::new());
    let source = a.region(64 << 10, Access::REMOTE_READ, 1);
    let target = b.region(64 << 10, Access::LOCAL_WRITE, 2);
    let (_qa, qb) = connect(&a, &b);
    drive(&[&a, &b], || qb.map(source.remote(0, 1).unwrap()).is_ok()); // the key has arrived
    let whole = source.remote(0, 64 << 10).unwrap();
    post(&qb, vec![request(1, Opcode::Read, vec![slice(&target, 0, 64 << 10)], Some(whole))]).unwrap();
    assert_eq!(b.completions().len(), 1);
}

#[test]
fn no_bytes_need_no_memory() {
    let (a, b) = (End::new(), End::new());
    let (_qa, qb) = connect(&a, &b);
    let nowhere = RemoteSlice { address: u64::MAX, len: 0, rkey: 12345 };
    post(&qb, vec![request(3, Opcode::Read, vec![], Some(nowhere))]).unwrap();
    let done = wait_for(&[&a, &b], &b, 1)[0];
    assert_eq!((done.id, done.status, done.bytes), (3, CompletionStatus::Success, 0));
}

#[test]
fn reads_posted_while_connecting_wait() {
    let (a, b) = (End::new(), End::new());
    let source = a.region(1 << 20, Access::REMOTE_READ, 1);
    let target = b.region(1 << 20, Access::LOCAL_WRITE, 2);
    let (qa, qb) = (a.queue_pair(), b.queue_pair());
    let read = || {
        let remote = Some(source.remote(0, 1 << 20).unwrap());
        vec![request(1, Opcode::Read, vec![slice(&target, 0, 1 << 20)], remote)]
    };
    let early = post(&qb, read()).unwrap_err();
    assert!(matches!(early.cause, Cause::State { is: QueuePairState::Reset, .. }), "{early}");
    qb.connect(&qa.address(), true).unwrap();
    post(&qb, read()).unwrap();
    assert!(b.completions().is_empty());
    qa.connect(&qb.address(), false).unwrap();
    assert_eq!(wait_for(&[&a, &b], &b, 1)[0].status, CompletionStatus::Success);
    assert!(bytes_of(&target, 0, 1 << 20) == pattern(1 << 20, 1));
}

/// Posts a read that must fail in the way of `status`, with one before it that succeeds and one behind it that flushes.
fn check_refused(remote: impl Fn(&End, RemoteSlice) -> RemoteSlice) {
    let (a, b) = (End::new(), End::new());
    let source = a.region(1 << 20, Access::REMOTE_READ, 1);
    let target = b.region(1 << 20, Access::LOCAL_WRITE, 2);
    let (qa, qb) = connect(&a, &b);
    let good = source.remote(0, 4096).unwrap();
    let bad = remote(&a, good);
    let read =
        |id, remote: RemoteSlice| request(id, Opcode::Read, vec![slice(&target, id * 4096, remote.len)], Some(remote));
    post(&qb, vec![read(0, good), read(1, bad), read(2, good)]).unwrap();
    let done = wait_for(&[&a, &b], &b, 3);
    let statuses: Vec<_> = done.iter().map(|done| (done.id, done.status, done.bytes)).collect();
    assert_eq!(
        statuses,
        [
            (0, CompletionStatus::Success, 4096),
            (1, CompletionStatus::RemoteAccess, 0),
            (2, CompletionStatus::Flushed, 0)
        ]
    );
    assert!(bytes_of(&target, 4096, 8192) == pattern(1 << 20, 2)[4096..12_288], "refused reads changed memory");
    assert!(matches!(qb.failure(), Some(Error { cause: Cause::Denied { .. }, .. })));
    drive(&[&a, &b], || qa.state() == QueuePairState::Error);
    assert!(qb.is_fenced() && qa.is_fenced());
    let late = post(&qb, vec![read(3, good)]).unwrap_err();
    assert!(matches!(late.cause, Cause::State { is: QueuePairState::Error, .. }), "{late}");
}

#[test]
fn an_unknown_key_is_refused() {
    check_refused(|_, good| RemoteSlice { rkey: good.rkey ^ 1, ..good });
}

#[test]
fn out_of_bounds_is_refused() {
    check_refused(|_, good| RemoteSlice { address: (1 << 20) - 4095, ..good });
    check_refused(|_, good| RemoteSlice { address: u64::MAX, ..good });
}

#[test]
fn a_region_without_the_right_is_refused() {
    let held = std::cell::RefCell::new(Vec::new());
    check_refused(|a, good| {
        let region = a.region(1 << 20, Access::REMOTE_WRITE | Access::LOCAL_WRITE, 7);
        let rkey = region.remote(0, 1).unwrap().rkey;
        held.borrow_mut().push(region);
        RemoteSlice { rkey, ..good }
    });
}

#[test]
fn a_region_of_another_domain_is_refused() {
    let held = std::cell::RefCell::new(Vec::new());
    check_refused(|a, good| {
        let memory = crate::Memory::shared(1 << 20, crate::memory::HugePages::Off).unwrap();
        let region = a.device.alloc_pd().unwrap().register(memory, Access::REMOTE_READ).unwrap();
        let rkey = region.remote(0, 1).unwrap().rkey;
        held.borrow_mut().push(region);
        RemoteSlice { rkey, ..good }
    });
}

#[test]
fn a_region_registered_after_connecting_can_be_read_at_once() {
    let (a, b) = (End::new(), End::new());
    let target = b.region(1 << 20, Access::LOCAL_WRITE, 2);
    let (_qa, qb) = connect(&a, &b);
    for seed in 10..20 {
        // The key is used before `b` has made any progress: it has not read the announcement.
        let source = a.region(1 << 20, Access::REMOTE_READ, seed);
        let remote = source.remote(0, 1 << 20).unwrap();
        post(&qb, vec![request(seed, Opcode::Read, vec![slice(&target, 0, 1 << 20)], Some(remote))]).unwrap();
        assert_eq!(wait_for(&[&a, &b], &b, 1)[0].status, CompletionStatus::Success);
        assert!(bytes_of(&target, 0, 1 << 20) == pattern(1 << 20, seed));
    }
}

#[test]
fn a_deregistered_region_is_withdrawn() {
    let (a, b) = (End::new(), End::new());
    let target = b.region(4096, Access::LOCAL_WRITE, 2);
    let (_qa, qb) = connect(&a, &b);
    let source = a.region(4096, Access::REMOTE_READ, 1);
    let remote = source.remote(0, 4096).unwrap();
    drive(&[&a, &b], || qb.map(remote).is_ok());
    drop(source);
    drive(&[&a, &b], || qb.map(remote).is_err());
    assert!(matches!(qb.map(remote).unwrap_err().cause, Cause::NotFound { .. }));
    post(&qb, vec![request(1, Opcode::Read, vec![slice(&target, 0, 4096)], Some(remote))]).unwrap();
    assert_eq!(wait_for(&[&a, &b], &b, 1)[0].status, CompletionStatus::RemoteAccess);
}

#[test]
fn a_view_shows_the_memory_and_outlives_the_queue_pair() {
    let (a, b) = (End::new(), End::new());
    let source = a.region(3 << 20, Access::REMOTE_READ, 1);
    let (qa, qb) = connect(&a, &b);
    let remote = source.remote(5000, 2 << 20).unwrap();
    let mut view = None;
    drive(&[&a, &b], || {
        view = qb.map(remote).ok();
        view.is_some()
    });
    let view = view.unwrap();
    assert_eq!(view.len(), 2 << 20);
    let mut seen = vec![0; 2 << 20];
    view.read(0, &mut seen).unwrap();
    assert!(seen == pattern(3 << 20, 1)[5000..5000 + (2 << 20)]);
    // Nothing is copied: what the owner writes later shows.
    source.memory().write(5000, b"later").unwrap();
    drop((qa, qb, source, a));
    let mut five = [0; 5];
    view.read(0, &mut five).unwrap();
    assert_eq!(&five, b"later");
    // SAFETY: the view is alive, and the address is valid for its length.
    assert_eq!(unsafe { view.as_ptr().read_volatile() }, b'l');
    assert!(matches!(view.read((2 << 20) - 4, &mut five).unwrap_err().cause, Cause::OutOfRange { .. }));
}

#[test]
fn a_view_out_of_range_is_refused() {
    let (a, b) = (End::new(), End::new());
    let source = a.region(1 << 20, Access::REMOTE_READ, 1);
    let (_qa, qb) = connect(&a, &b);
    let whole = source.remote(0, 1 << 20).unwrap();
    drive(&[&a, &b], || qb.map(whole).is_ok());
    for (address, len) in [(1, 1 << 20), (1 << 20, 1), (u64::MAX, 1), (0, u64::MAX)] {
        let error = qb.map(RemoteSlice { address, len, ..whole }).unwrap_err();
        assert!(matches!(error.cause, Cause::OutOfRange { .. }), "{error}");
    }
    assert!(qb.map(RemoteSlice { address: 1 << 20, len: 0, ..whole }).unwrap().is_empty());
}

#[test]
fn what_a_post_can_refuse_it_refuses_whole() {
    let (a, b) = (End::new(), End::new());
    let source = a.region(1 << 20, Access::REMOTE_READ, 1);
    let target = b.region(1 << 20, Access::LOCAL_WRITE, 2);
    let constant = b.region(4096, Access::REMOTE_READ, 2);
    let foreign = a.region(4096, Access::LOCAL_WRITE, 3);
    let (_qa, qb) = connect(&a, &b);
    let remote = Some(source.remote(0, 4096).unwrap());
    let good = || request(0, Opcode::Read, vec![slice(&target, 0, 4096)], remote);
    let cause = |bad| post(&qb, vec![good(), bad]).unwrap_err().cause;
    let read = |local| request(1, Opcode::Read, local, remote);

    assert!(matches!(cause(read(vec![slice(&constant, 0, 4096)])), Cause::Denied { .. }), "no LOCAL_WRITE");
    assert!(matches!(cause(read(vec![slice(&foreign, 0, 4096)])), Cause::Denied { .. }), "another domain");
    assert!(matches!(cause(read(vec![slice(&target, (1 << 20) - 1, 4096)])), Cause::OutOfRange { .. }), "range");
    assert!(matches!(cause(read(vec![slice(&target, u64::MAX, 4096)])), Cause::OutOfRange { .. }), "overflow");
    assert!(matches!(cause(read(vec![slice(&target, 0, 4095)])), Cause::OutOfRange { .. }), "lengths differ");
    let no_remote = request(1, Opcode::Read, vec![slice(&target, 0, 4096)], None);
    assert!(matches!(cause(no_remote), Cause::OutOfRange { .. }), "nowhere to read from");
    let many = (0..4096).step_by(128).map(|offset| slice(&target, offset, 128)).collect();
    assert!(matches!(cause(read(many)), Cause::Limit { what: "max_sge", have: 16, need: 32 }));
    let receive = request(1, Opcode::Receive, vec![], None);
    assert!(matches!(cause(receive), Cause::Unsupported { .. }));
    let flood = (0..=u64::from(CAPACITY.max_send_wr)).map(|_| good()).collect();
    assert!(matches!(post(&qb, flood).unwrap_err().cause, Cause::Limit { what: "max_send_wr", have: 64, need: 65 }));
    assert!(b.completions().is_empty(), "a refused post did something");
    post(&qb, vec![good()]).unwrap();
    assert_eq!(wait_for(&[&a, &b], &b, 1)[0].status, CompletionStatus::Success);
}

#[test]
fn the_send_queue_has_room_again_when_completions_are_polled() {
    let (a, b) = (End::new(), End::new());
    let source = a.region(4096, Access::REMOTE_READ, 1);
    let target = b.region(4096, Access::LOCAL_WRITE, 2);
    let (_qa, qb) = connect(&a, &b);
    let remote = Some(source.remote(0, 1).unwrap());
    let one = |id| request(id, Opcode::Read, vec![slice(&target, 0, 1)], remote);
    post(&qb, (0..64).map(one).collect()).unwrap();
    assert_eq!(wait_for(&[&a, &b], &b, 64).len(), 64);
    post(&qb, (0..64).map(one).collect()).unwrap();
    let full = post(&qb, vec![one(1)]).unwrap_err();
    assert!(full.is_transient(), "{full}");
    let mut one_done = Vec::new();
    drive(&[&a, &b], || b.cq.poll(&mut one_done, 1) == 1);
    post(&qb, vec![one(1)]).unwrap();
    assert_eq!(wait_for(&[&a, &b], &b, 64).len(), 64);
}

#[test]
fn several_threads_copy_one_read() {
    let a = End::new();
    let b = End::with(|config| config.copy_threads = Some(4));
    let len = 64 << 20;
    let source = a.region(len, Access::REMOTE_READ, 1);
    let target = b.region(len, Access::LOCAL_WRITE, 2);
    let (_qa, qb) = connect(&a, &b);
    for _ in 0..5 {
        target.memory().write(0, &vec![0; len as usize]).unwrap();
        let remote = Some(source.remote(0, len).unwrap());
        post(&qb, vec![request(1, Opcode::Read, vec![slice(&target, 0, len)], remote)]).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| while b.device.progress() == crate::Progress::More {});
            }
            assert_eq!(wait_for(&[&a, &b], &b, 1)[0].status, CompletionStatus::Success);
        });
        assert!(bytes_of(&target, 0, len) == pattern(len, 1));
    }
}

#[test]
fn the_descriptor_wakes_whoever_waits_for_a_read() {
    let a = End::new();
    let b = End::with(|config| config.copy_threads = Some(1)); // no helper: nobody copies but progress
    let len = 32 << 20;
    let source = a.region(len, Access::REMOTE_READ, 1);
    let target = b.region(len, Access::LOCAL_WRITE, 2);
    let (_qa, qb) = connect(&a, &b);
    drive(&[&a, &b], || qb.map(source.remote(0, 1).unwrap()).is_ok());
    drive(&[&b], || b.device.progress() == crate::Progress::Idle);
    assert!(!is_readable(&b), "readable with nothing to do");
    let remote = Some(source.remote(0, len).unwrap());
    post(&qb, vec![request(1, Opcode::Read, vec![slice(&target, 0, len)], remote)]).unwrap();
    assert!(is_readable(&b), "a copy waits and nobody is told");
    b.cq.arm();
    while b.device.progress() == crate::Progress::More {
        assert!(is_readable(&b), "a copy was left half done and nobody is told");
    }
    assert!(is_readable(&b), "an armed queue has a completion and nobody is told");
    assert_eq!(b.completions().len(), 1);
    b.device.progress();
    assert!(!is_readable(&b));
}

#[test]
fn the_helper_alone_finishes_a_read_and_wakes() {
    let a = End::new();
    let b = End::with(|config| config.copy_threads = Some(2));
    let len = 32 << 20;
    let source = a.region(len, Access::REMOTE_READ, 1);
    let target = b.region(len, Access::LOCAL_WRITE, 2);
    let (_qa, qb) = connect(&a, &b);
    drive(&[&a, &b], || qb.map(source.remote(0, 1).unwrap()).is_ok());
    let remote = Some(source.remote(0, len).unwrap());
    b.cq.arm();
    post(&qb, vec![request(1, Opcode::Read, vec![slice(&target, 0, len)], remote)]).unwrap();
    // No call of progress from here on.
    let mut done = Vec::new();
    let deadline = std::time::Instant::now() + PATIENCE;
    while done.is_empty() {
        assert!(std::time::Instant::now() < deadline);
        std::thread::yield_now();
        done = b.completions();
    }
    assert_eq!(done[0].status, CompletionStatus::Success);
    assert!(is_readable(&b));
    assert!(bytes_of(&target, 0, len) == pattern(len, 1));
}

/// With huge pages where the machine has them free, else without: the segment's checks and mapping hold for both.
#[test]
fn huge_pages_are_shared_like_others() {
    let (a, b) = (End::new(), End::new());
    let memory = |end: &End, access| {
        let memory = crate::Memory::shared(3 << 20, crate::memory::HugePages::Try).unwrap();
        end.pd.register(memory, access).unwrap()
    };
    let (source, target) = (memory(&a, Access::REMOTE_READ), memory(&b, Access::LOCAL_WRITE));
    source.memory().write(0, &pattern(source.len(), 1)).unwrap();
    let (_qa, qb) = connect(&a, &b);
    let remote = source.remote(0, source.len()).unwrap();
    post(&qb, vec![request(1, Opcode::Read, vec![slice(&target, 0, source.len())], Some(remote))]).unwrap();
    assert_eq!(wait_for(&[&a, &b], &b, 1)[0].status, CompletionStatus::Success);
    assert!(bytes_of(&target, 0, target.len()) == pattern(source.len(), 1));
    println!("pages of {} bytes", source.memory().page_size());
}
