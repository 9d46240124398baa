//! The provider's objects: thin handles into the fabric's state.

use super::state::{Cq, Event, Key, Local, Qp, Receive, Region, Send, State};
use super::trace::digest;
use super::{NodeId, Sabotage, Shared};
use crate::backend::{CqBackend, DeviceBackend, MrBackend, MwBackend, PdBackend, Provider, QpBackend, ViewBackend};
use crate::{
    Access, Cause, Completion, Device, DeviceInfo, Error, LocalSlice, Memory, MemoryKind, Opcode, Progress,
    ProviderKind, QueuePairCapacity, QueuePairState, ReceiveRequest, RemoteSlice, Result, Token, WorkRequest,
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
struct SimDevice {
    shared: Arc<Shared>,
    node: NodeId,
    /// Which life of the node opened it; handles of a crashed one stay dead.
    life: u64,
    info: DeviceInfo,
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
struct SimPd {
    device: Arc<SimDevice>,
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
            state.keys.insert(rkey, Key { region: id, offset: 0, len, access, queue_pair: None });
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
struct SimMr {
    pd: Arc<SimPd>,
    id: u64,
    base: u64,
    rkey: u64,
    access: Access,
}

impl MrBackend for SimMr {
    fn remote(&self, offset: u64, len: u64) -> RemoteSlice {
        RemoteSlice { address: self.base + offset, len, rkey: self.rkey }
    }

    fn bind(self: Arc<Self>, queue_pair: &dyn QpBackend, offset: u64, len: u64) -> Result<Arc<dyn MwBackend>> {
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
            let key = Key { region: self.id, offset, len, access: Access::REMOTE_READ, queue_pair: Some(queue_pair) };
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

    fn invalidate(&self) -> bool {
        self.region.pd.device.shared.with(|state| state.invalidate(self.remote.rkey))
    }
}

#[derive(Debug)]
struct SimQp {
    pd: Arc<SimPd>,
    number: u32,
    _queues: (Arc<dyn CqBackend>, Arc<dyn CqBackend>),
}

impl SimQp {
    fn with<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        self.pd.device.shared.with(f)
    }

    /// A local slice of this domain's own regions that allows `access`; without a handle, so that what is posted does
    /// not keep the fabric alive.
    fn local(&self, verb: &'static str, slice: &LocalSlice, access: Access) -> Result<(u64, Local)> {
        let region = slice.region.backend.as_any().downcast_ref::<SimMr>();
        let Some(region) = region.filter(|region| Arc::ptr_eq(&region.pd, &self.pd)) else {
            return Err(Error::new(verb, Cause::Denied { what: "a region of another protection domain" }));
        };
        if !region.access.contains(access) {
            return Err(Error::new(verb, Cause::Denied { what: "writing into this region" }));
        }
        crate::memory_region::check_range(verb, slice.offset, slice.len, slice.region.len())?;
        let local =
            Local { region: region.id, memory: slice.region.memory.clone(), offset: slice.offset, len: slice.len };
        Ok((slice.len, local))
    }

    fn check_send(&self, request: &WorkRequest) -> Result<(Vec<Local>, u64)> {
        const VERB: &str = "post_send";
        let most = self.pd.device.info.capabilities;
        if request.local.len() > most.max_sge as usize {
            return Err(limit(VERB, "max_sge", most.max_sge, request.local.len() as u32));
        }
        let access = if request.opcode == Opcode::Read { Access::LOCAL_WRITE } else { Access::empty() };
        let (mut locals, mut total) = (Vec::with_capacity(request.local.len()), 0u64);
        for slice in &request.local {
            let (len, local) = self.local(VERB, slice, access)?;
            total = total.saturating_add(len);
            locals.push(local);
        }
        if total > most.max_message_size {
            return Err(Error::new(
                VERB,
                Cause::Limit { what: "max_message_size", have: most.max_message_size, need: total },
            ));
        }
        match (request.opcode, request.remote) {
            (Opcode::Receive, _) => Err(Error::new(VERB, Cause::Unsupported { what: "a receive in the send queue" })),
            (Opcode::Send | Opcode::SendWithImmediate(_), _) => Ok((locals, total)),
            (_, None) => Err(Error::new(VERB, Cause::NotFound { what: "remote memory in the request" })),
            (_, Some(remote)) if remote.len != total => {
                Err(Error::new(VERB, Cause::OutOfRange { offset: 0, len: total, size: remote.len }))
            }
            _ => Ok((locals, total)),
        }
    }
}

impl QpBackend for SimQp {
    fn number(&self) -> u32 {
        self.number
    }

    fn state(&self) -> QueuePairState {
        self.with(|state| state.qps.get(&self.number).map_or(QueuePairState::Error, |qp| qp.state))
    }

    fn failure(&self) -> Option<Error> {
        self.with(|state| state.qps.get(&self.number).and_then(|qp| qp.failure.clone()))
    }

    fn address(&self) -> Vec<u8> {
        let nonce = self.with(|state| state.qps.get(&self.number).map_or(0, |qp| qp.nonce));
        let mut bytes = Vec::with_capacity(ADDRESS_LEN);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&self.number.to_le_bytes());
        bytes.extend_from_slice(&nonce.to_le_bytes());
        let check = digest(&bytes);
        bytes.extend_from_slice(&check.to_le_bytes());
        bytes
    }

    fn connect(&self, remote: &[u8], active: bool) -> Result<()> {
        const VERB: &str = "connect";
        let (other, nonce) = parse_address(remote)
            .ok_or(Error::new(VERB, Cause::Malformed { what: "address of a simulated queue pair" }))?;
        self.with(|state| {
            let timeout = state.now + state.plan.connect_timeout;
            let Some(qp) = state.qps.get_mut(&self.number) else { return Err(Error::new(VERB, Cause::Disconnected)) };
            if qp.state != QueuePairState::Reset {
                let needs = QueuePairState::Reset;
                return Err(Error::new(VERB, Cause::State { is: qp.state, needs }));
            }
            qp.state = QueuePairState::Connecting;
            qp.target = Some((other, nonce, active));
            state.note(VERB, &[u64::from(self.number), u64::from(other)]);
            state.schedule(timeout, Event::ConnectTimeout { qp: self.number });
            state.try_connect(self.number);
            Ok(())
        })
    }

    fn post_send(&self, requests: Vec<WorkRequest>) -> Result<()> {
        const VERB: &str = "post_send";
        let checked = requests.iter().map(|request| self.check_send(request)).collect::<Result<Vec<_>>>()?;
        self.with(|state| {
            let qp = state.usable(VERB, self.number, QueuePairState::Connecting)?;
            let need = u64::from(qp.send_slots) + requests.len() as u64;
            if need > u64::from(qp.capacity.max_send_wr) {
                let have = u64::from(qp.capacity.max_send_wr);
                return Err(Error::new(VERB, Cause::Limit { what: "max_send_wr", have, need }));
            }
            let ready = qp.state == QueuePairState::ReadyToSend;
            for (request, (local, len)) in requests.iter().zip(checked) {
                let serial = state.fresh();
                state.note("post", &[u64::from(self.number), serial, request.id, len]);
                state.hold(local.as_slice());
                let WorkRequest { id, opcode, remote, .. } = *request;
                let Some(qp) = state.qps.get_mut(&self.number) else { break };
                qp.send_slots += 1;
                qp.sends.push_back(Send { serial, id, opcode, local, remote, len, outcome: None });
                if ready {
                    state.schedule_start(self.number, serial);
                }
            }
            Ok(())
        })
    }

    fn post_recv(&self, request: ReceiveRequest) -> Result<()> {
        const VERB: &str = "post_recv";
        let local = request.local.as_ref().map(|slice| self.local(VERB, slice, Access::LOCAL_WRITE)).transpose()?;
        let local = local.map(|(_, local)| local);
        self.with(|state| {
            let qp = state.usable(VERB, self.number, QueuePairState::Reset)?;
            if qp.receive_slots >= qp.capacity.max_recv_wr {
                return Err(limit(VERB, "max_recv_wr", qp.capacity.max_recv_wr, qp.receive_slots + 1));
            }
            let serial = state.fresh();
            state.note("post-receive", &[u64::from(self.number), serial, request.id]);
            state.hold(local.as_slice());
            if let Some(qp) = state.qps.get_mut(&self.number) {
                qp.receive_slots += 1;
                qp.receives.push_back(Receive { serial, id: request.id, local, taken: false, outcome: None });
            }
            Ok(())
        })
    }

    fn to_error(&self) {
        self.with(|state| state.fail(self.number, "to_error", Cause::Disconnected));
    }

    fn is_fenced(&self) -> bool {
        self.with(|state| {
            let Some(qp) = state.qps.get(&self.number) else { return true };
            let lies = state.plan.sabotage == Some(Sabotage::EarlyFence);
            qp.fenced || (lies && qp.state == QueuePairState::Error)
        })
    }

    fn map(&self, remote: RemoteSlice) -> Result<Arc<dyn ViewBackend>> {
        const VERB: &str = "map";
        if !self.pd.device.info.capabilities.mappable {
            return Err(Error::new(VERB, Cause::Unsupported { what: "a view of remote memory" }));
        }
        self.with(|state| {
            let qp = state.usable(VERB, self.number, QueuePairState::ReadyToSend)?;
            let peer = qp.peer.filter(|peer| state.qps.get(peer).is_some_and(|peer| !peer.fenced));
            let Some(peer) = peer else { return Err(Error::new(VERB, Cause::Disconnected)) };
            let Some(key) = state.keys.get(&remote.rkey) else {
                return Err(Error::new(VERB, Cause::NotFound { what: "remote key" }));
            };
            let (from, size) = (key.offset, key.len);
            let Some((_, region, offset)) = state.open(peer, remote, Access::REMOTE_READ) else {
                let base = state.regions.get(&key.region).map_or(0, |region| region.base);
                let offset = remote.address.wrapping_sub(base).wrapping_sub(from);
                return Err(Error::new(VERB, Cause::OutOfRange { offset, len: remote.len, size }));
            };
            let Some(region) = state.regions.get(&region) else {
                return Err(Error::new(VERB, Cause::NotFound { what: "remote region" }));
            };
            let view: Arc<dyn ViewBackend> =
                Arc::new(SimView { memory: region.memory.clone(), offset, len: remote.len });
            state.note(VERB, &[u64::from(self.number), remote.rkey, offset, remote.len]);
            Ok(view)
        })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for SimQp {
    fn drop(&mut self) {
        self.with(|state| {
            state.tear_down(self.number, "destroy_qp", Cause::Disconnected);
            state.qps.remove(&self.number);
        });
    }
}

impl State {
    /// The queue pair, if its state is `needs` or a later one but not the error state.
    fn usable(&self, verb: &'static str, number: u32, needs: QueuePairState) -> Result<&Qp> {
        let Some(qp) = self.qps.get(&number) else { return Err(Error::new(verb, Cause::Disconnected)) };
        let rank = |state| match state {
            QueuePairState::Reset => 1,
            QueuePairState::Connecting => 2,
            QueuePairState::ReadyToSend => 3,
            QueuePairState::Error => 0,
        };
        if rank(qp.state) < rank(needs) {
            return Err(Error::new(verb, Cause::State { is: qp.state, needs }));
        }
        Ok(qp)
    }

    fn hold(&mut self, locals: &[Local]) {
        for local in locals {
            if let Some(region) = self.regions.get_mut(&local.region) {
                region.posts += 1;
            }
        }
    }
}

/// A view of another node's memory; it stays readable whatever becomes of the lease, as a mapping does.
#[derive(Debug)]
struct SimView {
    memory: Memory,
    offset: u64,
    len: u64,
}

impl ViewBackend for SimView {
    fn len(&self) -> u64 {
        self.len
    }

    fn as_ptr(&self) -> *const u8 {
        self.memory.address().wrapping_add(self.offset as usize)
    }

    fn read(&self, offset: u64, out: &mut [u8]) {
        // The caller checked the range against `len`, and `map` checked `len` against the memory.
        let _ = self.memory.read(self.offset + offset, out);
    }
}

const MAGIC: &[u8; 8] = b"towl-sim";
const ADDRESS_LEN: usize = 8 + 4 + 8 + 8;

fn parse_address(bytes: &[u8]) -> Option<(u32, u64)> {
    let (body, check) = bytes.split_last_chunk::<8>()?;
    let well_formed =
        bytes.len() == ADDRESS_LEN && body.starts_with(MAGIC) && digest(body) == u64::from_le_bytes(*check);
    if !well_formed {
        return None;
    }
    let number = u32::from_le_bytes(body[8..12].try_into().ok()?);
    let nonce = u64::from_le_bytes(body[12..20].try_into().ok()?);
    Some((number, nonce))
}

fn limit(verb: &'static str, what: &'static str, have: u32, need: u32) -> Error {
    Error::new(verb, Cause::Limit { what, have: u64::from(have), need: u64::from(need) })
}
