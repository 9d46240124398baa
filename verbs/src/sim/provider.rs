//! The provider's objects: thin handles into the fabric's state.

use super::plan::Span;
use super::queue_pair::SimQp;
use super::state::{Cq, Event, Key, Qp, Region};
use super::{NodeId, Shared};
use crate::backend::{CqBackend, DeviceBackend, MrBackend, MwBackend, PdBackend, Provider, QpBackend};
use crate::memory::Loan;
use crate::{
    Access, Cause, Completion, Device, DeviceInfo, Error, Memory, MemoryKind, Opcode, Progress, ProviderKind,
    QueuePairCapacity, QueuePairState, RemoteSlice, Result, Token,
};
use core::any::Any;
use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

/// The simulated device of one node.
#[derive(Debug, Clone)]
pub struct SimProvider {
    pub(super) shared: Arc<Shared>,
    pub(super) node: NodeId,
}

impl SimProvider {
    fn info(&self) -> DeviceInfo {
        let capabilities = self.shared.with(|state| state.capabilities);
        DeviceInfo::new("sim0", ProviderKind::Sim, capabilities, format!("simulated device of node {}", self.node.0))
    }
}

impl Provider for SimProvider {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Sim
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        Ok(vec![self.info()])
    }

    fn open(&self, name: &str) -> Result<Device> {
        if name != "sim0" {
            return Err(Error::new("open_device", Cause::NotFound { what: "device" }));
        }
        let life = self.shared.with(|state| {
            let life = state.node(self.node).life;
            state.alive("open_device", self.node, life)?;
            Ok(life)
        })?;
        let backend = SimDevice { shared: self.shared.clone(), node: self.node, life, info: self.info() };
        Ok(Device::from_backend(Arc::new(backend)))
    }
}

#[derive(Debug)]
pub(super) struct SimDevice {
    pub(super) shared: Arc<Shared>,
    node: NodeId,
    /// Which life of the node opened it; handles of a crashed one stay dead.
    life: u64,
    pub(super) info: DeviceInfo,
}

impl DeviceBackend for SimDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn supports(&self, _kind: MemoryKind) -> bool {
        true
    }

    fn alloc_pd(self: Arc<Self>) -> Result<Arc<dyn PdBackend>> {
        let id = self.shared.with(|state| {
            state.alive("alloc_pd", self.node, self.life)?;
            Ok(state.fresh())
        })?;
        Ok(Arc::new(SimPd { device: self, id }))
    }

    fn create_cq(self: Arc<Self>, depth: u32) -> Result<Arc<dyn CqBackend>> {
        let most = self.info.capabilities.max_cqe;
        if depth == 0 || depth > most {
            return Err(limit("create_cq", "max_cqe", most, depth));
        }
        let node = self.node;
        let id = self.shared.with(|state| {
            state.alive("create_cq", node, self.life)?;
            let id = state.fresh();
            state.cqs.insert(id, Cq { node, depth, entries: VecDeque::new(), armed: false });
            Ok(id)
        })?;
        Ok(Arc::new(SimCq { device: self, id }))
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Nothing: only the holder of the fabric moves time.
    fn progress(&self) -> Progress {
        Progress::Idle
    }

    fn adopt(&self, _stream: OwnedFd, _token: Token) -> Result<()> {
        Err(Error::new("adopt", Cause::Unsupported { what: "a data connection of its own" }))
    }
}

#[derive(Debug)]
pub(super) struct SimPd {
    pub(super) device: Arc<SimDevice>,
    id: u64,
}

impl PdBackend for SimPd {
    fn register(self: Arc<Self>, memory: Memory, access: Access) -> Result<Arc<dyn MrBackend>> {
        let device = &self.device;
        let (id, base, rkey) = device.shared.with(|state| {
            state.alive("reg_mr", device.node, device.life)?;
            let (id, rkey) = (state.fresh(), state.random.next_u64());
            // Any page of the lower half of the address space: nobody may take an address for an offset.
            let base = state.random.between(1, 1 << 35) << 12;
            let (node, len) = (device.node, memory.len());
            let region = Region { node, pd: self.id, memory, base, posts: 0, handle_gone: false };
            state.regions.insert(id, region);
            let key = Key { region: id, offset: 0, len, access, queue_pair: None, valid_from: 0, loan: None };
            state.keys.insert(rkey, key);
            state.note("register", &[id, rkey, base, len]);
            Ok((id, base, rkey))
        })?;
        Ok(Arc::new(SimMr { pd: self, id, base, rkey, access }))
    }

    fn create_qp(
        self: Arc<Self>,
        send_cq: Arc<dyn CqBackend>,
        recv_cq: Arc<dyn CqBackend>,
        capacity: QueuePairCapacity,
    ) -> Result<Arc<dyn QpBackend>> {
        const VERB: &str = "create_qp";
        let device = &self.device;
        let most = device.info.capabilities;
        if capacity.max_send_wr > most.max_send_wr {
            return Err(limit(VERB, "max_send_wr", most.max_send_wr, capacity.max_send_wr));
        }
        if capacity.max_recv_wr > most.max_recv_wr {
            return Err(limit(VERB, "max_recv_wr", most.max_recv_wr, capacity.max_recv_wr));
        }
        let own = |cq: &Arc<dyn CqBackend>| match cq.as_any().downcast_ref::<SimCq>() {
            Some(cq) if Arc::ptr_eq(&cq.device, device) => Ok(cq.id),
            _ => Err(Error::new(VERB, Cause::Denied { what: "a completion queue of another device" })),
        };
        let (send_id, recv_id) = (own(&send_cq)?, own(&recv_cq)?);
        let number = device.shared.with(|state| {
            state.alive(VERB, device.node, device.life)?;
            for (cq, need) in [
                (
                    send_id,
                    u64::from(capacity.max_send_wr)
                        + u64::from(if send_id == recv_id { capacity.max_recv_wr } else { 0 }),
                ),
                (
                    recv_id,
                    u64::from(capacity.max_recv_wr)
                        + u64::from(if send_id == recv_id { capacity.max_send_wr } else { 0 }),
                ),
            ] {
                let depth = state.cqs.get(&cq).map_or(0, |cq| u64::from(cq.depth));
                let need = need + state.attached(cq);
                if need > depth {
                    return Err(Error::new(
                        VERB,
                        Cause::Limit { what: "depth of the completion queue", have: depth, need },
                    ));
                }
            }
            let number = state.fresh() as u32;
            let nonce = state.random.next_u64();
            state.qps.insert(
                number,
                Qp {
                    node: device.node,
                    pd: self.id,
                    send_cq: send_id,
                    recv_cq: recv_id,
                    capacity,
                    nonce,
                    state: QueuePairState::Reset,
                    failure: None,
                    target: None,
                    peer: None,
                    sends: VecDeque::new(),
                    send_slots: 0,
                    receives: VecDeque::new(),
                    receive_slots: 0,
                    next_start: 0,
                    draining_sends: false,
                    draining_receives: false,
                    incoming: VecDeque::new(),
                    rnr_tries: 0,
                    rnr_waiting: false,
                    broken: false,
                    flushing: false,
                    fenced: false,
                },
            );
            state.note("create-qp", &[u64::from(number)]);
            Ok(number)
        })?;
        Ok(Arc::new(SimQp { pd: self, number, _queues: (send_cq, recv_cq) }))
    }
}

#[derive(Debug)]
struct SimCq {
    device: Arc<SimDevice>,
    id: u64,
}

impl CqBackend for SimCq {
    fn poll(&self, out: &mut Vec<Completion>, room: usize) -> usize {
        self.device.shared.with(|state| {
            let Some(queue) = state.cqs.get_mut(&self.id) else { return 0 };
            let count = room.min(queue.entries.len());
            let start = out.len();
            out.extend(queue.entries.drain(..count));
            for completion in &out[start..] {
                let Some(qp) = state.qps.get_mut(&completion.queue_pair) else { continue };
                match completion.opcode {
                    Opcode::Receive => qp.receive_slots -= 1,
                    _ => qp.send_slots -= 1,
                }
            }
            count
        })
    }

    fn arm(&self) {
        self.device.shared.with(|state| {
            if let Some(queue) = state.cqs.get_mut(&self.id) {
                queue.armed = true;
            }
        });
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for SimCq {
    fn drop(&mut self) {
        self.device.shared.with(|state| state.cqs.remove(&self.id));
    }
}

#[derive(Debug)]
pub(super) struct SimMr {
    pub(super) pd: Arc<SimPd>,
    pub(super) id: u64,
    base: u64,
    rkey: u64,
    pub(super) access: Access,
}

impl MrBackend for SimMr {
    fn remote(&self, offset: u64, len: u64) -> RemoteSlice {
        RemoteSlice { address: self.base + offset, len, rkey: self.rkey }
    }

    fn bind(
        self: Arc<Self>,
        queue_pair: &dyn QpBackend,
        offset: u64,
        len: u64,
        loan: Option<Arc<Loan>>,
    ) -> Result<Arc<dyn MwBackend>> {
        const VERB: &str = "bind_mw";
        let device = &self.pd.device;
        if !device.info.capabilities.scoped_keys {
            return Err(Error::new(VERB, Cause::Unsupported { what: "a memory window" }));
        }
        if !self.access.contains(Access::MW_BIND) {
            return Err(Error::new(VERB, Cause::Denied { what: "binding a window to this region" }));
        }
        let queue_pair = queue_pair.as_any().downcast_ref::<SimQp>().filter(|qp| Arc::ptr_eq(&qp.pd, &self.pd));
        let Some(queue_pair) = queue_pair.map(|qp| qp.number) else {
            return Err(Error::new(VERB, Cause::Denied { what: "a queue pair of another protection domain" }));
        };
        let rkey = device.shared.with(|state| {
            state.usable(VERB, queue_pair, QueuePairState::Reset)?;
            if state.plan.bind_fails.draw(&mut state.random) {
                let held = state.keys.values().filter(|key| key.queue_pair.is_some()).count() as u64;
                return Err(Error::new(VERB, Cause::Limit { what: "max_mw", have: held, need: held + 1 }));
            }
            let rkey = state.random.next_u64();
            let mut valid_from = state.now;
            if state.plan.bind != Span(0, 0) {
                valid_from += state.draw(state.plan.bind);
                state.schedule(valid_from, Event::Bound { node: device.node });
            }
            let (access, queue_pair_only) = (Access::REMOTE_READ, Some(queue_pair));
            let key = Key { region: self.id, offset, len, access, queue_pair: queue_pair_only, valid_from, loan };
            state.keys.insert(rkey, key);
            state.note("bind", &[u64::from(queue_pair), rkey, offset, len]);
            Ok(rkey)
        })?;
        let remote = RemoteSlice { address: self.base + offset, len, rkey };
        Ok(Arc::new(SimMw { region: self, remote }))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for SimMr {
    fn drop(&mut self) {
        self.pd.device.shared.with(|state| {
            if let Some(region) = state.regions.get_mut(&self.id) {
                region.handle_gone = true;
                state.deregister_if_unused(self.id);
            }
        });
    }
}

#[derive(Debug)]
struct SimMw {
    region: Arc<SimMr>,
    remote: RemoteSlice,
}

impl MwBackend for SimMw {
    fn remote(&self) -> RemoteSlice {
        self.remote
    }

    fn is_bound(&self) -> bool {
        self.region
            .pd
            .device
            .shared
            .with(|state| state.keys.get(&self.remote.rkey).is_some_and(|key| key.valid_from <= state.now))
    }

    fn invalidate(&self) -> bool {
        self.region.pd.device.shared.with(|state| state.invalidate(self.remote.rkey))
    }
}

pub(super) fn limit(verb: &'static str, what: &'static str, have: u32, need: u32) -> Error {
    Error::new(verb, Cause::Limit { what, have: u64::from(have), need: u64::from(need) })
}
