//! Tests of the simulated provider; `queues` about queue pairs, `memory` about keys, `net` about byte connections.
#![allow(unsafe_code)]

use super::net::{ConnId, NetEvent, SimNet};
use super::*;
use crate::{
    Access, Capabilities, Cause, Completion, CompletionQueue, CompletionStatus, Device, LocalSlice, Memory,
    MemoryRegion, Opcode, ProtectionDomain, Provider, QueuePair, QueuePairCapacity, QueuePairState, ReceiveRequest,
    RemoteSlice, WorkRequest,
};

mod lending;
mod memory;
mod net_tests;
mod queues;

const CAPACITY: QueuePairCapacity = QueuePairCapacity { max_send_wr: 32, max_recv_wr: 16 };
const ALL: Access = Access::all();

/// One end of a connection: a queue pair and a region of 64 KiB.
struct End {
    device: Device,
    pd: ProtectionDomain,
    cq: CompletionQueue,
    qp: QueuePair,
    region: MemoryRegion,
}

fn plan() -> FaultPlan {
    let mut plan = FaultPlan::calm();
    plan.capabilities.scoped_keys = true;
    plan
}

fn end(fabric: &SimFabric, node: u32, access: Access) -> End {
    let device = fabric.provider(NodeId(node)).open("sim0").unwrap();
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(256).unwrap();
    let qp = pd.create_qp(&cq, &cq, CAPACITY).unwrap();
    let region = pd.register(Memory::shared(64 << 10, Default::default()).unwrap(), access).unwrap();
    End { device, pd, cq, qp, region }
}

/// Two connected ends on nodes 1 and 2.
fn pair(fabric: &SimFabric) -> (End, End) {
    let (a, b) = (end(fabric, 1, ALL), end(fabric, 2, ALL));
    connect(fabric, &a.qp, &b.qp);
    (a, b)
}

fn connect(fabric: &SimFabric, a: &QueuePair, b: &QueuePair) {
    a.connect(&b.address(), true).unwrap();
    b.connect(&a.address(), false).unwrap();
    while a.state() != QueuePairState::ReadyToSend || b.state() != QueuePairState::ReadyToSend {
        assert!(step(fabric), "the queue pairs never became ready");
    }
}

/// Executes what is due next; false when nothing is.
fn step(fabric: &SimFabric) -> bool {
    fabric.next_event_at().inspect(|&at| fabric.advance_to(at)).is_some()
}

fn run(fabric: &SimFabric) {
    while step(fabric) {}
}

fn run_until(fabric: &SimFabric, what: impl Fn() -> bool) {
    while !what() {
        assert!(step(fabric), "it never came to that");
    }
}

fn request(
    id: u64,
    opcode: Opcode,
    from: &MemoryRegion,
    offset: u64,
    len: u64,
    remote: Option<RemoteSlice>,
) -> WorkRequest {
    WorkRequest { id, opcode, local: vec![LocalSlice { region: from.clone(), offset, len }], remote }
}

impl End {
    fn post(&self, requests: Vec<WorkRequest>) -> crate::Result<()> {
        // SAFETY: the tests look at this memory only through `Memory::read` and `Memory::write`.
        unsafe { self.qp.post_send(requests) }
    }

    fn read(&self, id: u64, offset: u64, remote: RemoteSlice) {
        self.post(vec![request(id, Opcode::Read, &self.region, offset, remote.len, Some(remote))]).unwrap();
    }

    fn write(&self, id: u64, offset: u64, remote: RemoteSlice) {
        self.post(vec![request(id, Opcode::Write, &self.region, offset, remote.len, Some(remote))]).unwrap();
    }

    fn send(&self, id: u64, offset: u64, len: u64) {
        self.post(vec![request(id, Opcode::SendWithImmediate(id as u32), &self.region, offset, len, None)]).unwrap();
    }

    fn receive(&self, id: u64, offset: u64, len: u64) {
        let local = Some(LocalSlice { region: self.region.clone(), offset, len });
        // SAFETY: as in `post`.
        unsafe { self.qp.post_recv(ReceiveRequest { id, local }) }.unwrap();
    }

    fn poll(&self) -> Vec<Completion> {
        let mut out = Vec::new();
        self.cq.poll(&mut out, usize::MAX);
        out
    }

    fn fill(&self, offset: u64, len: u64, byte: u8) {
        self.region.memory().write(offset, &vec![byte; len as usize]).unwrap();
    }

    fn bytes(&self, offset: u64, len: u64) -> Vec<u8> {
        let mut out = vec![0; len as usize];
        self.region.memory().read(offset, &mut out).unwrap();
        out
    }
}

fn statuses(completions: &[Completion]) -> Vec<(u64, CompletionStatus)> {
    completions.iter().map(|completion| (completion.id, completion.status)).collect()
}
