//! The provider's queue pairs, and views of what they map.

use super::Sabotage;
use super::provider::{SimMr, SimPd, limit};
use super::state::{Event, Local, Qp, Receive, Send, State};
use super::trace::digest;
use crate::backend::{CqBackend, QpBackend, ViewBackend};
use crate::{
    Access, Cause, Error, LocalSlice, Memory, Opcode, QueuePairState, ReceiveRequest, RemoteSlice, Result, WorkRequest,
};
use core::any::Any;
use std::sync::Arc;

#[derive(Debug)]
pub(super) struct SimQp {
    pub(super) pd: Arc<SimPd>,
    pub(super) number: u32,
    pub(super) _queues: (Arc<dyn CqBackend>, Arc<dyn CqBackend>),
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
    pub(super) fn usable(&self, verb: &'static str, number: u32, needs: QueuePairState) -> Result<&Qp> {
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
