//! The provider over a libibverbs of fakes: order of teardown, failures at each step, what completes when.

mod cost;
mod fake;
mod posting;
mod probe;
mod regions;
mod windows;

use super::IbvProvider;
use crate::memory::HugePages;
use crate::{
    Access, Cause, Completion, CompletionQueue, CompletionStatus, Device, LocalSlice, Memory, MemoryRegion, Opcode,
    Progress, ProtectionDomain, Provider, QueuePair, QueuePairCapacity, QueuePairState, ReceiveRequest, Result,
    WorkRequest,
};
use fake::{completes, happens, provider, queue_event, world};
use rdma_core_sys::*;
use std::any::Any;

const CAPACITY: QueuePairCapacity = QueuePairCapacity { max_send_wr: 8, max_recv_wr: 4 };

/// All objects, and a queue pair that is connected to itself.
struct All {
    device: Device,
    pd: ProtectionDomain,
    cq: CompletionQueue,
    region: MemoryRegion,
    qp: QueuePair,
}

impl All {
    fn try_new() -> Result<Self> {
        Self::over(&provider())
    }

    fn over(provider: &IbvProvider) -> Result<Self> {
        let device = provider.open("fake0")?;
        let pd = device.alloc_pd()?;
        let cq = device.create_cq(32)?;
        let region = pd.register(Memory::shared(4096, HugePages::Off)?, Access::LOCAL_WRITE | Access::REMOTE_READ)?;
        let qp = pd.create_qp(&cq, &cq, CAPACITY)?;
        qp.connect(&qp.address(), true)?;
        assert_eq!(qp.state(), QueuePairState::ReadyToSend);
        Ok(Self { device, pd, cq, region, qp })
    }

    fn new() -> Self {
        Self::try_new().unwrap()
    }

    fn read(&self, id: u64) -> WorkRequest {
        let local = vec![LocalSlice { region: self.region.clone(), offset: 0, len: 64 }];
        WorkRequest { id, opcode: Opcode::Read, local, remote: Some(self.region.remote(64, 64).unwrap()) }
    }

    #[allow(unsafe_code)]
    fn post(&self, ids: std::ops::Range<u64>) -> Result<()> {
        // SAFETY: the fakes touch no memory.
        unsafe { self.qp.post_send(ids.map(|id| self.read(id)).collect()) }
    }

    #[allow(unsafe_code)]
    fn receive(&self, id: u64) -> Result<()> {
        let local = Some(LocalSlice { region: self.region.clone(), offset: 0, len: 64 });
        // SAFETY: the fakes touch no memory.
        unsafe { self.qp.post_recv(ReceiveRequest { id, local }) }
    }

    fn poll(&self) -> Vec<Completion> {
        poll(&self.cq)
    }
}

fn poll(cq: &CompletionQueue) -> Vec<Completion> {
    let mut out = vec![];
    cq.poll(&mut out, 100);
    out
}

fn ends(completions: &[Completion]) -> Vec<(u64, CompletionStatus)> {
    completions.iter().map(|completion| (completion.id, completion.status)).collect()
}

/// The number that the device knows the last posted request by.
fn last_posted() -> u64 {
    world(|world| world.posted.last().unwrap().0)
}

// B82, B88, B95: one owner, and the only legal order.
#[test]
fn handles_may_go_in_any_order() {
    for round in 0..120usize {
        let all = All::new();
        all.post(0..3).unwrap();
        all.receive(9).unwrap();
        let All { device, pd, cq, region, qp } = all;
        let mut handles: Vec<Box<dyn Any>> =
            vec![Box::new(device), Box::new(pd), Box::new(cq), Box::new(region), Box::new(qp)];
        let mut rest = round;
        while !handles.is_empty() {
            let at = rest % handles.len();
            rest /= handles.len();
            drop(handles.swap_remove(at));
        }
        world(|world| assert_eq!((world.count(), world.busy.len()), (0, 0), "round {round}: {:?}", world.live));
    }
}

// B89: a failure at each step leaves nothing behind, and is named.
#[test]
fn a_failure_at_each_step_leaves_nothing() {
    drop(All::new());
    let calls = world(|world| std::mem::take(&mut world.calls));
    for expected in ["open_device", "create_comp_channel", "alloc_pd", "create_cq", "reg_mr", "create_qp", "modify_qp"]
    {
        assert!(calls.contains(&expected), "{calls:?}");
    }
    for (at, call) in calls.iter().enumerate() {
        world(|world| {
            world.calls.clear();
            world.fail = Some((at, libc::EIO));
        });
        let error = All::try_new().err().unwrap();
        let Cause::Os { call: named, .. } = error.cause else { panic!("{call}: {error}") };
        assert!(named.contains(call), "{call} failed, and the error says {named}");
        world(|world| assert_eq!((world.count(), world.busy.len()), (0, 0), "{call}: {:?}", world.live));
    }
}

#[test]
fn what_is_chosen_is_what_the_device_has() {
    let all = All::new();
    let info = all.device.info().clone();
    assert_eq!(
        (info.name.as_str(), info.description.as_str()),
        ("fake0", "RoCE, port 2, MTU 4096, GID 3 (::ffff:10.0.0.1)")
    );
    assert_eq!((info.capabilities.max_send_wr, info.capabilities.max_recv_wr, info.capabilities.max_sge), (98, 99, 4));
    let address = super::address::Address::decode(&all.qp.address()).unwrap();
    assert_eq!((address.pkey, address.responder_depth, address.mtu), (0x8001, 16, 5), "a full member, and clamped");
}

#[test]
fn a_request_completes_once_with_its_own_number() {
    let all = All::new();
    all.post(40..42).unwrap();
    let second = last_posted();
    all.receive(43).unwrap();
    completes(last_posted(), IBV_WC_SUCCESS);
    completes(second, IBV_WC_SUCCESS);
    completes(second, IBV_WC_SUCCESS); // a device that says it twice
    let done = all.poll();
    let success = CompletionStatus::Success;
    assert_eq!(ends(&done), [(43, success), (40, success), (41, success)], "the second tells of the first");
    assert_eq!((done[0].opcode, done[0].bytes), (Opcode::Receive, 9));
    assert_eq!((done[2].opcode, done[2].bytes), (Opcode::Read, 64));
    assert!(all.poll().is_empty());
}

#[test]
fn a_completion_of_a_queue_pair_that_is_gone_is_nobodys() {
    let all = All::new();
    all.post(1..2).unwrap();
    let old = last_posted();
    let number = all.qp.number();
    drop(all.qp);
    assert_eq!(ends(&poll(&all.cq)), [(1, CompletionStatus::Flushed)]);
    let second = all.pd.create_qp(&all.cq, &all.cq, CAPACITY).unwrap();
    let third = all.pd.create_qp(&all.cq, &all.cq, CAPACITY).unwrap();
    assert!([second.number(), third.number()].contains(&number), "the number is in use again");
    completes(old, IBV_WC_SUCCESS);
    assert!(poll(&all.cq).is_empty());
}

#[test]
fn an_error_of_a_request_is_the_queue_pairs() {
    let all = All::new();
    all.post(1..3).unwrap();
    completes(last_posted() - 1, IBV_WC_REM_ACCESS_ERR);
    completes(last_posted(), IBV_WC_WR_FLUSH_ERR);
    assert_eq!(ends(&all.poll()), [(1, CompletionStatus::RemoteAccess), (2, CompletionStatus::Flushed)]);
    assert_eq!(all.qp.state(), QueuePairState::Error);
    assert!(matches!(all.qp.failure().unwrap().cause, Cause::Denied { .. }), "the first cause");
    assert_eq!(world(|world| world.states.last().copied()), Some(IBV_QPS_ERR));
    assert!(matches!(all.post(3..4).unwrap_err().cause, Cause::State { .. }));
}

#[test]
fn a_status_that_no_header_knows_is_an_error() {
    let all = All::new();
    all.post(1..2).unwrap();
    completes(last_posted(), 250);
    assert_eq!(ends(&all.poll()), [(1, CompletionStatus::LocalOperation)]);
    assert_eq!(all.qp.state(), QueuePairState::Error);
}

#[test]
fn what_was_not_posted_at_all_leaves_room() {
    let all = All::new();
    world(|world| world.post_takes = Some(0));
    for _ in 0..20 {
        let refused = all.post(0..8).unwrap_err().cause;
        assert_eq!(refused, Cause::Os { errno: libc::ENOMEM, call: "ibv_post_send" });
    }
    world(|world| world.post_takes = None);
    all.post(0..8).unwrap();
    assert!(all.poll().is_empty());
    assert_eq!(all.qp.state(), QueuePairState::ReadyToSend);
}

#[test]
fn a_chain_of_which_a_part_was_posted_completes_in_full() {
    let all = All::new();
    world(|world| world.post_takes = Some(2));
    all.post(0..5).unwrap();
    let done = all.poll();
    assert_eq!(ends(&done), (0..5).map(|id| (id, CompletionStatus::Flushed)).collect::<Vec<_>>());
    assert!(matches!(all.qp.failure().unwrap().cause, Cause::Os { errno: libc::ENOMEM, .. }));
    assert_eq!(world(|world| world.live["qp"]), 0, "the device has nothing of it any more");
}

#[test]
fn a_receive_that_was_refused_leaves_room() {
    let all = All::new();
    for round in 0..10 {
        world(|world| world.fail = Some((world.calls.len(), libc::EINVAL)));
        assert!(all.receive(round).is_err());
    }
    for id in 0..4 {
        all.receive(id).unwrap();
    }
    assert!(matches!(all.receive(4).unwrap_err().cause, Cause::Limit { what: "max_recv_wr", have: 4, need: 5 }));
}

// I3: after the fence the device knows nothing of the queue pair, and every request has ended.
#[test]
fn a_fence_destroys_and_flushes_what_the_device_never_completes() {
    let all = All::new();
    all.post(0..3).unwrap();
    completes(last_posted() - 2, IBV_WC_SUCCESS);
    all.receive(7).unwrap();
    assert!(!all.qp.is_fenced());
    all.qp.to_error();
    assert_eq!(world(|world| world.live["qp"]), 1);
    assert!(all.qp.is_fenced());
    assert_eq!(world(|world| world.live["qp"]), 0);
    let flushed = CompletionStatus::Flushed;
    let ended = [(0, CompletionStatus::Success), (1, flushed), (2, flushed), (7, flushed)];
    assert_eq!(ends(&all.poll()), ended);
    assert!(all.qp.is_fenced() && all.poll().is_empty());
}

// I3: what can't be fenced is not given back.
#[test]
fn a_queue_pair_that_cannot_be_destroyed_keeps_its_memory() {
    let all = All::new();
    all.post(0..2).unwrap();
    all.qp.to_error();
    world(|world| world.destroying_fails = true);
    assert!(!all.qp.is_fenced() && !all.qp.is_fenced());
    assert!(all.poll().is_empty(), "no completion says that the device is done");
    world(|world| world.destroying_fails = false);
    assert!(all.qp.is_fenced());
    assert_eq!(all.poll().len(), 2);
    drop(all);

    let all = All::new();
    all.post(0..2).unwrap();
    world(|world| world.destroying_fails = true);
    let memory = all.region.memory().clone();
    let All { device, pd, cq, region, qp } = all;
    drop((qp, region, pd, device));
    assert!(poll(&cq).is_empty());
    drop(cq);
    assert_eq!(
        world(|world| (world.live["qp"], world.live["mr"], world.busy.len())),
        (1, 2, 0),
        "all that it may touch, and what it shows"
    );
    memory.write(0, b"still mapped").unwrap();
}

#[test]
fn a_queue_that_does_not_answer_fails_its_queue_pairs() {
    let all = All::new();
    all.post(0..2).unwrap();
    world(|world| world.poll_fails = true);
    assert!(all.poll().is_empty());
    assert_eq!(all.qp.state(), QueuePairState::Error);
    assert!(all.qp.is_fenced());
    assert_eq!(ends(&all.poll()), [(0, CompletionStatus::Flushed), (1, CompletionStatus::Flushed)]);
}

// B112: a device's death makes no completion; its events end what they concern, and nothing else.
#[test]
fn events_reach_whom_they_concern() {
    let all = All::new();
    let first = world(|world| world.last_qp);
    let other = all.pd.create_qp(&all.cq, &all.cq, CAPACITY).unwrap();
    let happen = |event_type, qp| {
        happens(event_type, qp);
        assert_eq!(all.device.progress(), Progress::Idle);
        assert!(world(|world| world.events.is_empty()));
    };
    for harmless in [IBV_EVENT_PORT_ACTIVE, IBV_EVENT_GID_CHANGE, IBV_EVENT_COMM_EST] {
        happen(harmless, first);
    }
    happen(IBV_EVENT_PORT_ERR, 1); // another port's
    assert_eq!((all.qp.state(), other.state()), (QueuePairState::ReadyToSend, QueuePairState::Reset));
    happen(IBV_EVENT_QP_ACCESS_ERR, first);
    assert_eq!((all.qp.state(), other.state()), (QueuePairState::Error, QueuePairState::Reset));
    assert!(matches!(all.qp.failure().unwrap().cause, Cause::Denied { .. }));
    happen(IBV_EVENT_DEVICE_FATAL, 0);
    assert_eq!(other.state(), QueuePairState::Error);
    assert!(matches!(other.failure().unwrap().cause, Cause::Os { .. }));
    assert_eq!(world(|world| world.events_acknowledged), 6, "or what they concern could not be destroyed");
    for _ in 0..200 {
        happens(IBV_EVENT_PORT_ERR, 1);
    }
    assert_eq!(all.device.progress(), Progress::More, "a bounded piece of work");
    while all.device.progress() == Progress::More {}
    assert_eq!(world(|world| world.events_acknowledged), 206);
}

#[test]
fn an_event_is_asked_for_once_until_it_is_taken() {
    let all = All::new();
    let asked = || world(|world| world.asked);
    for _ in 0..3 {
        all.cq.arm();
    }
    assert_eq!(asked(), 1, "it is a system call on some devices");
    let other = all.device.create_cq(8).unwrap();
    other.arm();
    assert_eq!(asked(), 2, "each queue has its own");
    queue_event();
    all.cq.arm();
    assert_eq!(asked(), 2, "what has come and was not taken wakes as well");
    assert_eq!(all.device.progress(), Progress::Idle);
    assert_eq!(world(|world| world.queue_events_acknowledged), 1);
    all.cq.arm();
    assert_eq!(asked(), 3, "the one that was asked for has been taken");
}

// I13: a child must not destroy what is its parent's.
#[test]
#[allow(unsafe_code)]
fn a_forked_child_destroys_nothing() {
    let all = All::new();
    all.post(0..2).unwrap();
    let before = world(|world| world.count());
    // SAFETY: the child drops handles and leaves by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let quiet = all.poll().is_empty() && all.post(2..3).is_err() && all.receive(1).is_err();
        all.qp.to_error();
        let _fenced = all.qp.is_fenced();
        drop(all);
        let untouched = world(|world| world.count() == before && !world.states.contains(&IBV_QPS_ERR));
        // SAFETY: no precondition.
        unsafe { libc::_exit(i32::from(!(quiet && untouched))) };
    }
    let mut status = -1;
    // SAFETY: `status` is valid; the child is ours.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    completes(last_posted(), IBV_WC_SUCCESS);
    let done = [(0, CompletionStatus::Success), (1, CompletionStatus::Success)];
    assert_eq!(ends(&all.poll()), done, "the parent goes on");
}

// B64: three situations, three answers.
#[test]
fn what_is_missing_is_named() {
    let cause = |reason: &Unavailable| super::unavailable("load", reason).cause;
    let answers = [
        cause(&Unavailable::NoLibrary { reason: String::new() }),
        cause(&Unavailable::NoKernelSupport),
        cause(&Unavailable::NoDevice),
        cause(&Unavailable::MissingSymbol { symbol: c"a", version: c"b" }),
        cause(&Unavailable::NoList(Error::Errno(libc::EACCES))),
    ];
    for (i, answer) in answers.iter().enumerate() {
        assert!(answers[..i].iter().all(|earlier| earlier != answer), "{answer:?}");
    }
}
