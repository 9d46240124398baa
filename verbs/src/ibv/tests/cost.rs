//! What posting and polling cost, in instructions: under callgrind with `--toggle-collect='*counted_post*'` (or
//! `counted_poll`) it counts what is done there and nothing else.

use super::fake::{completes, provider, world};
use crate::ibv::Posting;
use crate::memory::HugePages;
use crate::{
    Access, Completion, CompletionQueue, LocalSlice, Memory, Opcode, Provider, QueuePair, QueuePairCapacity,
    WorkRequest,
};
use rdma_core_sys::IBV_WC_SUCCESS;

const BATCH: u64 = 1000;

#[inline(never)]
#[allow(unsafe_code)]
fn counted_post(qp: &QueuePair, batch: Vec<WorkRequest>) {
    // SAFETY: the fakes touch no memory.
    unsafe { qp.post_send(batch) }.unwrap();
}

#[inline(never)]
fn counted_poll(cq: &CompletionQueue, done: &mut Vec<Completion>) {
    while cq.poll(done, 64) > 0 {}
}

fn batches(posting: Posting) {
    world(|world| (world.lean, world.extended) = (true, posting == Posting::Extended));
    let device = provider().posting(posting).open("fake0").unwrap();
    let capacity = QueuePairCapacity { max_send_wr: BATCH as u32, max_recv_wr: 1 };
    let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(2000).unwrap());
    let region = pd.register(Memory::shared(1 << 20, HugePages::Off).unwrap(), Access::LOCAL_WRITE).unwrap();
    let qp = pd.create_qp(&cq, &cq, capacity).unwrap();
    qp.connect(&qp.address(), true).unwrap();
    let remote = region.remote(0, 1024).unwrap();
    let read = |id: u64| {
        let local = vec![LocalSlice { region: region.clone(), offset: id * 1024, len: 1024 }];
        WorkRequest { id, opcode: Opcode::Read, local, remote: Some(remote) }
    };
    let mut done = Vec::with_capacity(BATCH as usize);
    // As the first queue pair of a device is known: serial number 0, and its requests counted from 0.
    for round in 0..3 {
        let batch: Vec<_> = (0..BATCH).map(read).collect();
        if round < 2 {
            // SAFETY: the fakes touch no memory.
            #[allow(unsafe_code)]
            unsafe { qp.post_send(batch) }.unwrap();
        } else {
            counted_post(&qp, batch);
        }
        completes((round + 1) * BATCH - 1, IBV_WC_SUCCESS);
        done.clear();
        if round < 2 {
            while cq.poll(&mut done, 64) > 0 {}
        } else {
            counted_poll(&cq, &mut done);
        }
        assert_eq!(done.len() as u64, BATCH);
    }
    let by_functions = world(|world| world.doorbells);
    assert_eq!(by_functions, if posting == Posting::Extended { 3 } else { 0 }, "it was posted in another way");
}

#[test]
fn a_thousand_descriptors_in_a_chain() {
    batches(Posting::Classic);
}

#[test]
fn a_thousand_descriptors_by_functions() {
    batches(Posting::Extended);
}
