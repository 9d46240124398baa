//! The limit of RDMA: a bare loop of reads on one queue pair, as many in flight as an endpoint has, polled without sleep.

use super::Received;
use crate::command::Failure;
use crate::command::sys::{cpu_seconds, now_ns, post_reads};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::{Duration, Instant};
use towline::Limits;
use towline_verbs::ibv::{IbvProvider, PortName};
use towline_verbs::memory::HugePages;
use towline_verbs::{
    Access, CompletionQueue, CompletionStatus, Device, LocalSlice, Memory, MemoryRegion, Opcode, Provider, QueuePair,
    QueuePairCapacity, RemoteSlice, Result, WorkRequest,
};

/// How long a silent device is waited for.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where the consumer's reads go.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Target {
    /// The producer's queue pair.
    pub(crate) queue_pair: Vec<u8>,
    address: u64,
    rkey: u64,
}

// The key is a secret (I14).
impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Target").finish_non_exhaustive()
    }
}

/// One end: a queue pair, and memory for one payload.
#[derive(Debug)]
pub(crate) struct End {
    region: MemoryRegion,
    queue: CompletionQueue,
    queue_pair: QueuePair,
    depth: u32,
    target: Option<Target>,
}

/// The device that is named, or the first that can be used.
fn open(name: Option<&str>) -> Result<Device> {
    let provider = IbvProvider::new()?;
    let first = || provider.devices().map(|devices| devices.first().map_or(String::new(), |d| d.name.clone()));
    let name = name.map_or_else(first, |name| Ok(name.to_owned()))?;
    let whole = PortName { device: name.clone(), port: None, gid_index: None };
    provider.open_port(&name.parse().unwrap_or(whole))
}

fn failure(error: towline_verbs::Error) -> Failure {
    Failure::failed("bare reads", error)
}

impl End {
    /// An end on the device called so, with memory for `size` bytes.
    pub(crate) fn new(device: Option<&str>, size: u64) -> std::result::Result<Self, Failure> {
        let make = || {
            let device = open(device)?;
            let depth = Limits::new().send_queue.min(device.info().capabilities.max_send_wr);
            let (pd, queue) = (device.alloc_pd()?, device.create_cq(depth.saturating_add(16))?);
            let memory = Memory::shared(size, HugePages::Off)?;
            let region = pd.register(memory, Access::LOCAL_WRITE | Access::REMOTE_READ)?;
            let queue_pair = pd.create_qp(&queue, &queue, QueuePairCapacity { max_send_wr: depth, max_recv_wr: 1 })?;
            Ok(Self { region, queue, queue_pair, depth, target: None })
        };
        make().map_err(failure)
    }

    /// What the other end connects to.
    pub(crate) fn address(&self) -> Vec<u8> {
        self.queue_pair.address()
    }

    /// The producer's part of connecting: what the consumer's reads go to.
    pub(crate) fn accept(&self, consumer: &[u8]) -> std::result::Result<Target, Failure> {
        self.queue_pair.connect(consumer, false).map_err(failure)?;
        let RemoteSlice { address, rkey, .. } = self.region.remote(0, self.region.len()).map_err(failure)?;
        Ok(Target { queue_pair: self.address(), address, rkey })
    }

    /// The consumer's.
    pub(crate) fn connect(&mut self, producer: Target) -> std::result::Result<(), Failure> {
        self.queue_pair.connect(&producer.queue_pair, true).map_err(failure)?;
        self.target = Some(producer);
        Ok(())
    }

    /// Reads `size` bytes `rounds` times, `piece` at a time.
    pub(crate) fn read(&self, piece: u32, size: u64, rounds: u32) -> std::result::Result<Received, Failure> {
        let target = self.target.as_ref().ok_or_else(|| Failure::Failed("bare reads lead nowhere".into()))?;
        if size > self.region.len() {
            return Err(Failure::Failed("bare reads have less memory than a payload".into()));
        }
        let piece = u64::from(piece).clamp(1, self.queue_pair.max_message_size().max(1));
        let most = depth(piece, self.depth);
        let mut received = Received { asked: vec![], ends: vec![], cpu: 0.0 };
        let cpu = cpu_seconds();
        for _ in 0..rounds {
            received.asked.push(now_ns());
            self.round(target, piece, size, most)?;
            received.ends.push(now_ns());
        }
        received.cpu = cpu_seconds() - cpu;
        Ok(received)
    }

    fn round(&self, target: &Target, piece: u64, size: u64, most: u32) -> std::result::Result<(), Failure> {
        let (mut next, mut flying) = (0, 0);
        let mut done = vec![];
        let mut until = Instant::now() + PATIENCE;
        while next < size || flying > 0 {
            let mut requests = vec![];
            while next < size && flying < most {
                let len = piece.min(size - next);
                let local = vec![LocalSlice { region: self.region.clone(), offset: next, len }];
                let remote = Some(RemoteSlice { address: target.address + next, len, rkey: target.rkey });
                requests.push(WorkRequest { id: next, opcode: Opcode::Read, local, remote });
                (next, flying) = (next + len, flying + 1);
            }
            if !requests.is_empty() {
                post_reads(&self.queue_pair, requests).map_err(failure)?;
            }
            if self.queue.poll(&mut done, 64) == 0 {
                if Instant::now() > until {
                    return Err(Failure::Failed("bare reads do not complete".into()));
                }
                continue;
            }
            until = Instant::now() + PATIENCE;
            for completion in done.drain(..) {
                if completion.status != CompletionStatus::Success {
                    return Err(Failure::Failed(format!("bare reads: {}", completion.status.text())));
                }
                flying -= 1;
            }
        }
        Ok(())
    }
}

/// Reads of `piece` bytes that an endpoint would have in flight: no more than its queue holds, and of large ones no more
/// than its bytes in flight, but two.
fn depth(piece: u64, queue: u32) -> u32 {
    let of_bytes = (Limits::new().in_flight / piece.max(1)).clamp(2, u64::from(u32::MAX));
    queue.min(of_bytes as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_are_in_flight_as_an_endpoint_has() {
        assert_eq!((depth(1 << 20, 128), depth(256 << 10, 128), depth(256 << 10, 32)), (16, 64, 32));
        assert_eq!((depth(4096, 128), depth(1 << 30, 128)), (128, 2));
    }
}
