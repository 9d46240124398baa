//! Posting: one doorbell for a batch, completions that are asked for now and then, bytes that are taken at once.

use super::fake::{completes, provider, world};
use super::{All, CAPACITY, ends, poll};
use crate::ibv::Posting;
use crate::memory::HugePages;
use crate::{
    Access, Cause, CompletionQueue, CompletionStatus, LocalSlice, Memory, MemoryRegion, Opcode, Provider, QueuePair,
    QueuePairCapacity, QueuePairState, Result, WorkRequest,
};
use rdma_core_sys::*;

const DEEP: QueuePairCapacity = QueuePairCapacity { max_send_wr: 64, max_recv_wr: 4 };

/// A queue pair with room for long batches, over a device that posts in this way.
struct Deep {
    cq: CompletionQueue,
    region: MemoryRegion,
    qp: QueuePair,
}

impl Deep {
    fn new(posting: Posting) -> Self {
        world(|world| world.extended = posting == Posting::Extended);
        let device = provider().posting(posting).open("fake0").unwrap();
        let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(128).unwrap());
        let memory = Memory::shared(1 << 20, HugePages::Off).unwrap();
        let region = pd.register(memory, Access::LOCAL_WRITE | Access::REMOTE_READ).unwrap();
        let qp = pd.create_qp(&cq, &cq, DEEP).unwrap();
        qp.connect(&qp.address(), true).unwrap();
        Self { cq, region, qp }
    }

    fn request(&self, id: u64, opcode: Opcode, len: u64) -> WorkRequest {
        let local = vec![LocalSlice { region: self.region.clone(), offset: 0, len }];
        let one_sided = matches!(opcode, Opcode::Read | Opcode::Write | Opcode::WriteWithImmediate(_));
        let remote = one_sided.then(|| self.region.remote(0, len).unwrap());
        WorkRequest { id, opcode, local, remote }
    }

    #[allow(unsafe_code)]
    fn post(&self, requests: Vec<WorkRequest>) -> Result<()> {
        // SAFETY: the fakes touch no memory but what they take at once.
        unsafe { self.qp.post_send(requests) }
    }

    fn reads(&self, ids: std::ops::Range<u64>, len: u64) -> Result<()> {
        self.post(ids.map(|id| self.request(id, Opcode::Read, len)).collect())
    }
}

/// Places, within what was posted, of the requests that ask for a completion.
fn signalled() -> Vec<usize> {
    world(|world| (0..world.flags.len()).filter(|&i| world.flags[i] & IBV_SEND_SIGNALED != 0).collect())
}

fn number(at: usize) -> u64 {
    world(|world| world.posted[at].0)
}

const WAYS: [Posting; 2] = [Posting::Classic, Posting::Extended];

#[test]
fn a_batch_rings_once_and_asks_now_and_then() {
    for posting in WAYS {
        let deep = Deep::new(posting);
        world(|world| (world.doorbells, world.flags) = (0, vec![]));
        deep.reads(0..40, 64).unwrap();
        assert_eq!(world(|world| world.doorbells), 1, "{posting:?}");
        assert_eq!(signalled(), [15, 31, 39], "every sixteenth, and the last");
        world(|world| world.flags.clear());
        deep.reads(40..46, 30 << 10).unwrap();
        assert_eq!(signalled(), [2, 5], "large ones sooner");
        deep.post(vec![]).unwrap();
        assert_eq!(world(|world| world.doorbells), 2, "nothing is nothing");
        world(|world| world.posted.clear());
    }
}

#[test]
fn one_completion_tells_of_those_before_it() {
    for posting in WAYS {
        let deep = Deep::new(posting);
        let first = world(|world| world.posted.len());
        deep.reads(0..40, 64).unwrap();
        completes(number(first + 15), IBV_WC_SUCCESS);
        let done = poll(&deep.cq);
        assert_eq!(ends(&done), (0..16).map(|id| (id, CompletionStatus::Success)).collect::<Vec<_>>());
        assert!(done.iter().all(|done| (done.bytes, done.opcode) == (64, Opcode::Read)));
        // Room is given back for each of them, no more and no less.
        let full = deep.reads(40..81, 64).unwrap_err().cause;
        assert_eq!(full, Cause::Limit { what: "max_send_wr", have: 64, need: 65 });
        deep.reads(40..80, 64).unwrap();
        completes(number(first + 39), IBV_WC_SUCCESS);
        completes(number(first + 79), IBV_WC_SUCCESS);
        assert_eq!(poll(&deep.cq).iter().map(|done| done.id).collect::<Vec<_>>(), (16..80).collect::<Vec<_>>());
    }
}

// I9: whatever flushes, each request has its place and its completion, in order.
#[test]
fn an_error_ends_each_request_once() {
    let ways = [
        (IBV_WC_REM_ACCESS_ERR, CompletionStatus::RemoteAccess, CompletionStatus::Success),
        (IBV_WC_RETRY_EXC_ERR, CompletionStatus::TransportRetryExceeded, CompletionStatus::Success),
        // It can't be known whether those before were done.
        (IBV_WC_LOC_PROT_ERR, CompletionStatus::LocalProtection, CompletionStatus::Flushed),
        (IBV_WC_WR_FLUSH_ERR, CompletionStatus::Flushed, CompletionStatus::Flushed),
    ];
    for (status, own, before) in ways {
        // Devices that tell of all that they flush, and devices that tell of what asked.
        for tells_all in [true, false] {
            let deep = Deep::new(Posting::Classic);
            let first = world(|world| world.posted.len());
            deep.reads(0..40, 64).unwrap();
            completes(number(first + 5), status);
            for at in 6..40 {
                if tells_all || [15, 31, 39].contains(&at) {
                    completes(number(first + at), IBV_WC_WR_FLUSH_ERR);
                }
            }
            let done = poll(&deep.cq);
            let expected = (0..40).map(|id| match id {
                0..5 => (id, before),
                5 => (id, own),
                _ => (id, CompletionStatus::Flushed),
            });
            assert_eq!(ends(&done), expected.collect::<Vec<_>>());
            assert!(done.iter().all(|done| done.status == CompletionStatus::Success || done.bytes == 0));
            assert!(deep.qp.is_fenced() && poll(&deep.cq).is_empty());
        }
    }
}

#[test]
fn what_is_refused_is_not_posted_at_all() {
    for posting in WAYS {
        let deep = Deep::new(posting);
        let before = world(|world| world.posted.len());
        let bad = WorkRequest { remote: None, ..deep.request(9, Opcode::Read, 64) };
        let mut batch: Vec<_> = (0..20).map(|id| deep.request(id, Opcode::Read, 64)).collect();
        batch.push(bad);
        assert!(matches!(deep.post(batch).unwrap_err().cause, Cause::NotFound { .. }));
        assert!(deep.reads(0..65, 64).is_err());
        world(|world| world.post_takes = Some(0));
        assert!(matches!(deep.reads(0..20, 64).unwrap_err().cause, Cause::Os { errno: libc::ENOMEM, .. }));
        world(|world| world.post_takes = None);
        assert_eq!(world(|world| world.posted.len()), before);
        assert_eq!(deep.qp.state(), QueuePairState::ReadyToSend);
        // And has left no trace.
        deep.reads(0..64, 64).unwrap();
        completes(number(before + 63), IBV_WC_SUCCESS);
        assert_eq!(poll(&deep.cq).len(), 64);
    }
}

#[test]
fn small_sends_are_taken_at_once_where_the_device_can() {
    for posting in WAYS {
        for max_inline in [0, 64, 4096] {
            world(|world| world.max_inline = max_inline);
            let deep = Deep::new(posting);
            let content: Vec<u8> = (0..100).collect();
            deep.region.memory().write(0, &content).unwrap();
            let first = world(|world| world.flags.len());
            for (opcode, len) in [
                (Opcode::Write, 64),
                (Opcode::SendWithImmediate(1), 3),
                (Opcode::Write, 65),
                (Opcode::Read, 8),
                (Opcode::Send, 0),
            ] {
                deep.post(vec![deep.request(0, opcode, len)]).unwrap();
            }
            let inline = world(|world| world.inlined.split_off(0));
            let most = max_inline.min(4096) as usize;
            let expected = [64, 3, 65].into_iter().filter(|len| *len <= most).map(|len| content[..len].to_vec());
            assert_eq!(inline, expected.collect::<Vec<_>>(), "{posting:?}, {max_inline}");
            let flags = world(|world| world.flags[first + 3]);
            assert_eq!(flags & IBV_SEND_INLINE, 0, "a read has nothing to take");
        }
    }
}

#[test]
fn a_device_without_functions_posts_chains() {
    world(|world| world.extended = false);
    let all = All::over(&provider().posting(Posting::Extended)).unwrap();
    all.post(0..8).unwrap();
    assert_eq!(world(|world| world.posted.len()), CAPACITY.max_send_wr as usize);
    completes(number(7), IBV_WC_SUCCESS);
    assert_eq!(all.poll().len(), 8);
}
