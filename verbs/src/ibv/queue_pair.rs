//! Queue pairs: what is posted and not completed, the way through the states, and the end.
//!
//! A request's number, as the device knows it, holds the queue pair's serial number (32 bits), whether it is a receive (1
//! bit), and its slot (31 bits). So a completion finds its request also where the device uses a queue pair's own number
//! again.

use super::address::Address;
use super::completion_queue::{Account, Cq};
use super::device::IbvDevice;
use super::domain::{Domain, Region};
use super::{failed, status, sys};
use crate::backend::{QpBackend, ViewBackend};
use crate::memory_region::check_range;
use crate::{
    Access, Cause, Completion, CompletionStatus, Error, LocalSlice, Opcode, QueuePairCapacity, QueuePairState,
    ReceiveRequest, RemoteSlice, Result, WorkRequest,
};
use core::any::Any;
use core::fmt;
use core::mem;
use rdma_core_sys::*;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How long an answer is waited for: 4.096 us * 2^15 = 134 ms, at least, and so many times again. Not 7 times, the most
/// that there is: soft-RoCE takes that for ever, and never notices a peer that is gone.
const TIMEOUT: u8 = 15;
const RETRIES: u8 = 6;
/// How long a peer without a receive is left alone: 1.28 ms (verbs specification, table of RNR NAK timers), and how often
/// it is asked again. 7 would be for ever.
const MIN_RNR_TIMER: u8 = 14;
const RNR_RETRIES: u8 = 6;
const HOP_LIMIT: u8 = 64;
const RECEIVE: u64 = 1 << 31;

/// A queue pair.
pub(super) struct Core {
    serial: u32,
    number: u32,
    psn: u32,
    at: usize,
    device: Arc<IbvDevice>,
    domain: Arc<sys::Domain>,
    max_sge: usize,
    sends: (Arc<Cq>, Arc<Account>),
    receives: (Arc<Cq>, Arc<Account>),
    state: Mutex<State>,
    /// Held while it is ended; true when it has been.
    ended: Mutex<bool>,
}

struct State {
    phase: QueuePairState,
    failure: Option<Error>,
    /// None once it was destroyed.
    pair: Option<sys::Pair>,
    /// Longest message that both ends take.
    max_message: u64,
    sends: Slots,
    receives: Slots,
}

/// Requests that the device has.
#[derive(Default)]
struct Slots {
    slots: Vec<Option<Slot>>,
    free: Vec<u32>,
    posted: u64,
}

/// One of them. It keeps its memory registered.
struct Slot {
    id: u64,
    opcode: Opcode,
    bytes: u64,
    held: Vec<LocalSlice>,
    order: u64,
}

impl Slots {
    fn insert(&mut self, id: u64, opcode: Opcode, bytes: u64, held: Vec<LocalSlice>) -> u64 {
        let slot = Slot { id, opcode, bytes, held, order: self.posted };
        self.posted += 1;
        match self.free.pop() {
            Some(at) => {
                self.slots[at as usize] = Some(slot);
                at.into()
            }
            None => {
                self.slots.push(Some(slot));
                self.slots.len() as u64 - 1
            }
        }
    }

    fn remove(&mut self, at: u64) -> Option<Slot> {
        let slot = self.slots.get_mut(usize::try_from(at).ok()?)?.take()?;
        self.free.push(at as u32);
        Some(slot)
    }

    /// All of them, in the order posted.
    fn take_all(&mut self) -> Vec<Slot> {
        let mut all: Vec<_> = mem::take(self).slots.into_iter().flatten().collect();
        all.sort_unstable_by_key(|slot| slot.order);
        all
    }
}

/// A request that was found to be right.
struct Checked {
    id: u64,
    opcode: Opcode,
    bytes: u64,
    held: Vec<LocalSlice>,
    wr: ibv_send_wr,
}

impl Core {
    pub(super) fn create(
        domain: &Arc<Domain>,
        sends: Arc<Cq>,
        receives: Arc<Cq>,
        capacity: QueuePairCapacity,
    ) -> Result<Arc<Self>> {
        const VERB: &str = "create_qp";
        let device = &domain.device;
        let send_account = sends.reserve(capacity.max_send_wr)?;
        let recv_account = receives.reserve(capacity.max_recv_wr)?;
        let max_sge = device.info_capabilities().max_sge;
        let cap = ibv_qp_cap {
            max_send_wr: capacity.max_send_wr.max(1),
            max_recv_wr: capacity.max_recv_wr.max(1),
            max_send_sge: max_sge,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let pair = sys::Pair::new(&domain.raw, &sends.raw, &receives.raw, cap);
        let pair = pair.map_err(|error| failed(VERB, "ibv_create_qp", error))?;
        // Receives can be posted from here on.
        let init = ibv_qp_attr {
            qp_state: IBV_QPS_INIT,
            pkey_index: device.port.pkey_index,
            port_num: device.port.number,
            qp_access_flags: (IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE).cast_unsigned(),
            ..zeroed()
        };
        pair.modify(init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)
            .map_err(|error| failed(VERB, "ibv_modify_qp (INIT)", error))?;
        let psn = sys::random_24().map_err(|error| Error::from_io(VERB, "getrandom", &error))?;
        let core = Arc::new(Self {
            serial: device.next_serial(),
            number: pair.number(),
            psn,
            at: pair.address(),
            device: device.clone(),
            domain: domain.raw.clone(),
            max_sge: max_sge as usize,
            sends: (sends, send_account),
            receives: (receives, recv_account),
            state: Mutex::new(State {
                phase: QueuePairState::Reset,
                failure: None,
                pair: Some(pair),
                max_message: device.port.max_message,
                sends: Slots::default(),
                receives: Slots::default(),
            }),
            ended: Mutex::new(false),
        });
        core.sends.0.attach(core.serial, &core);
        core.receives.0.attach(core.serial, &core);
        device.add(core.at, &core);
        Ok(core)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether its completions go to the library's queue at this address.
    pub(super) fn uses_queue(&self, at: usize) -> bool {
        self.sends.0.raw.address() == at || self.receives.0.raw.address() == at
    }

    fn address(&self) -> Address {
        let port = &self.device.port;
        Address {
            number: self.number,
            psn: self.psn,
            gid: port.gid,
            lid: port.lid,
            pkey: port.pkey,
            link_layer: port.link_layer,
            mtu: port.mtu,
            responder_depth: port.responder_depth,
            max_message: port.max_message,
        }
    }

    // ---- connecting

    fn connect(&self, remote: &[u8]) -> Result<()> {
        const VERB: &str = "connect";
        let port = &self.device.port;
        let remote = Address::decode(remote)?;
        let unlike = |what| Err(Error::new(VERB, Cause::Unsupported { what }));
        if remote.link_layer != port.link_layer {
            return unlike("a peer on another link layer (InfiniBand, RoCE)");
        }
        if remote.pkey & 0x7fff != port.pkey & 0x7fff {
            return unlike("a peer in another partition");
        }
        if Address::is_ipv4(&remote.gid) != Address::is_ipv4(&port.gid) {
            return unlike("a peer whose address is of another family (IPv4, IPv6)");
        }
        let mut state = self.state();
        if state.phase != QueuePairState::Reset {
            let cause = Cause::State { is: state.phase, needs: QueuePairState::Reset };
            return Err(Error::new(VERB, cause));
        }
        match self.walk(&state, &remote) {
            Ok(()) => {
                state.phase = QueuePairState::ReadyToSend;
                state.max_message = port.max_message.min(remote.max_message);
                Ok(())
            }
            Err(error) => {
                Self::break_off(&mut state, Some(error.clone()));
                Err(error)
            }
        }
    }

    /// Takes the queue pair through the states to where it receives and sends.
    fn walk(&self, state: &State, remote: &Address) -> Result<()> {
        const VERB: &str = "connect";
        let port = &self.device.port;
        let Some(pair) = &state.pair else { return Err(Error::new(VERB, Cause::Disconnected)) };
        let mut receive = ibv_qp_attr {
            qp_state: IBV_QPS_RTR,
            path_mtu: port.mtu.min(remote.mtu).into(),
            dest_qp_num: remote.number,
            rq_psn: remote.psn,
            max_dest_rd_atomic: port.responder_depth,
            min_rnr_timer: MIN_RNR_TIMER,
            ..zeroed()
        };
        receive.ah_attr.port_num = port.number;
        receive.ah_attr.dlid = remote.lid;
        receive.ah_attr.is_global = u8::from(port.link_layer != IBV_LINK_LAYER_INFINIBAND);
        receive.ah_attr.grh.dgid = ibv_gid { raw: remote.gid };
        receive.ah_attr.grh.sgid_index = port.gid_index;
        receive.ah_attr.grh.hop_limit = HOP_LIMIT;
        let mask = IBV_QP_STATE
            | IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER;
        pair.modify(receive, mask).map_err(|error| failed(VERB, "ibv_modify_qp (RTR)", error))?;
        let send = ibv_qp_attr {
            qp_state: IBV_QPS_RTS,
            timeout: TIMEOUT,
            retry_cnt: RETRIES,
            rnr_retry: RNR_RETRIES,
            sq_psn: self.psn,
            max_rd_atomic: port.initiator_depth.min(remote.responder_depth),
            ..zeroed()
        };
        let mask = IBV_QP_STATE
            | IBV_QP_TIMEOUT
            | IBV_QP_RETRY_CNT
            | IBV_QP_RNR_RETRY
            | IBV_QP_SQ_PSN
            | IBV_QP_MAX_QP_RD_ATOMIC;
        pair.modify(send, mask).map_err(|error| failed(VERB, "ibv_modify_qp (RTS)", error))
    }

    // ---- posting

    /// The part of a region, as the device knows it.
    fn slice(&self, verb: &'static str, slice: &LocalSlice, writes: bool) -> Result<ibv_sge> {
        check_range(verb, slice.offset, slice.len, slice.region.len())?;
        let denied = |what| Err(Error::new(verb, Cause::Denied { what }));
        let Some(region) = slice.region.backend.as_any().downcast_ref::<Region>() else {
            return denied("a region of another provider");
        };
        if !Arc::ptr_eq(&region.domain, &self.domain) {
            return denied("a region of another protection domain");
        }
        if writes && !region.access.contains(Access::LOCAL_WRITE) {
            return denied("LOCAL_WRITE");
        }
        let Ok(length) = u32::try_from(slice.len) else {
            let cause = Cause::Limit { what: "length of a local slice", have: u32::MAX.into(), need: slice.len };
            return Err(Error::new(verb, cause));
        };
        Ok(ibv_sge { addr: region.address(slice.offset), length, lkey: region.raw.local_key() })
    }

    /// Checks a request and adds its slices to `slices`.
    fn check(&self, request: WorkRequest, max_message: u64, slices: &mut Vec<ibv_sge>) -> Result<Checked> {
        const VERB: &str = "post_send";
        let limit = |what, have: u64, need: u64| Err(Error::new(VERB, Cause::Limit { what, have, need }));
        let WorkRequest { id, opcode, local, remote } = request;
        if local.len() > self.max_sge {
            return limit("max_sge", self.max_sge as u64, local.len() as u64);
        }
        let before = slices.len();
        let mut bytes = 0u64;
        for slice in &local {
            let sge = self.slice(VERB, slice, opcode == Opcode::Read)?;
            bytes += slice.len;
            // A length of 0 means 2^31 to some devices.
            if sge.length > 0 {
                slices.push(sge);
            }
        }
        if bytes > max_message {
            return limit("max_message_size", max_message, bytes);
        }
        let mut wr = ibv_send_wr { num_sge: (slices.len() - before) as i32, send_flags: IBV_SEND_SIGNALED, ..zeroed() };
        let one_sided;
        (wr.opcode, one_sided) = match opcode {
            Opcode::Read => (IBV_WR_RDMA_READ, true),
            Opcode::Write => (IBV_WR_RDMA_WRITE, true),
            Opcode::WriteWithImmediate(value) => {
                wr.imm_data = value.to_be();
                (IBV_WR_RDMA_WRITE_WITH_IMM, bytes > 0 || remote.is_some())
            }
            Opcode::Send => (IBV_WR_SEND, false),
            Opcode::SendWithImmediate(value) => {
                wr.imm_data = value.to_be();
                (IBV_WR_SEND_WITH_IMM, false)
            }
            Opcode::Receive => {
                return Err(Error::new(VERB, Cause::Unsupported { what: "a receive in the send queue" }));
            }
        };
        match remote {
            Some(remote) if one_sided => {
                if remote.len != bytes || remote.address.checked_add(bytes).is_none() {
                    let cause = Cause::OutOfRange { offset: remote.address, len: bytes, size: remote.len };
                    return Err(Error::new(VERB, cause));
                }
                let Ok(rkey) = u32::try_from(remote.rkey) else {
                    return Err(Error::new(VERB, Cause::Malformed { what: "a remote key of more than 32 bits" }));
                };
                wr.wr.rdma = ibv_send_wr_rdma { remote_addr: remote.address, rkey };
            }
            None if !one_sided => {}
            None => return Err(Error::new(VERB, Cause::NotFound { what: "remote slice in the request" })),
            Some(_) => return Err(Error::new(VERB, Cause::Unsupported { what: "a send to a remote slice" })),
        }
        Ok(Checked { id, opcode, bytes, held: local, wr })
    }

    #[allow(unsafe_code)]
    fn post_send(&self, requests: Vec<WorkRequest>) -> Result<()> {
        const VERB: &str = "post_send";
        let mut state = self.state();
        if state.phase != QueuePairState::ReadyToSend || self.device.is_inherited() {
            return Err(Error::new(VERB, Cause::State { is: state.phase, needs: QueuePairState::ReadyToSend }));
        }
        let max_message = state.max_message;
        let mut slices = vec![];
        let checked: Vec<_> =
            requests.into_iter().map(|request| self.check(request, max_message, &mut slices)).collect::<Result<_>>()?;
        let count = u32::try_from(checked.len()).unwrap_or(u32::MAX);
        self.sends.1.take(VERB, "max_send_wr", count)?;
        let mut chain = Vec::with_capacity(checked.len());
        for Checked { id, opcode, bytes, held, mut wr } in checked {
            wr.wr_id = u64::from(self.serial) << 32 | state.sends.insert(id, opcode, bytes, held);
            chain.push(wr);
        }
        let Some(pair) = &state.pair else { return Err(Error::new(VERB, Cause::Disconnected)) };
        // SAFETY: every slice lies in a region that its slot holds, until the request completes or `end` has destroyed the
        // queue pair (I1).
        let Err((error, posted)) = (unsafe { pair.post_send(&mut chain, &mut slices) }) else { return Ok(()) };
        let error = failed(VERB, "ibv_post_send", error);
        if posted == 0 {
            let mut refused = vec![];
            for wr in &chain {
                refused.extend(state.sends.remove(wr.wr_id & (RECEIVE - 1)));
            }
            self.sends.1.give_back(count);
            drop(state);
            drop(refused);
            return Err(error);
        }
        // Part of the chain is with the device: the rest counts as posted too, and flushes with it.
        Self::break_off(&mut state, Some(error));
        drop(state);
        let _or_at_the_next_fence = self.end();
        Ok(())
    }

    #[allow(unsafe_code)]
    fn post_recv(&self, request: ReceiveRequest) -> Result<()> {
        const VERB: &str = "post_recv";
        let sge = request.local.as_ref().map(|slice| self.slice(VERB, slice, true)).transpose()?;
        let mut state = self.state();
        if state.phase == QueuePairState::Error || self.device.is_inherited() {
            let cause = Cause::State { is: QueuePairState::Error, needs: QueuePairState::ReadyToSend };
            return Err(Error::new(VERB, cause));
        }
        self.receives.1.take(VERB, "max_recv_wr", 1)?;
        let held: Vec<_> = request.local.into_iter().collect();
        let slot = state.receives.insert(request.id, Opcode::Receive, 0, held);
        let Some(pair) = &state.pair else { return Err(Error::new(VERB, Cause::Disconnected)) };
        let wr_id = u64::from(self.serial) << 32 | RECEIVE | slot;
        // SAFETY: the slice lies in a region that the slot holds, until the receive completes or `end` has destroyed the
        // queue pair (I1).
        let posted = unsafe { pair.post_recv(wr_id, sge.filter(|sge| sge.length > 0)) };
        posted.map_err(|error| {
            let refused = state.receives.remove(slot);
            self.receives.1.give_back(1);
            drop(state);
            drop(refused);
            failed(VERB, "ibv_post_recv", error)
        })
    }

    // ---- completing

    /// The device has completed a request: what its caller is told, and what it held.
    pub(super) fn completed(&self, wc: &ibv_wc) -> Option<(Completion, Arc<Account>, Vec<LocalSlice>)> {
        let mut state = self.state();
        let is_receive = wc.wr_id & RECEIVE != 0;
        let (slots, account) = match is_receive {
            true => (&mut state.receives, &self.receives.1),
            false => (&mut state.sends, &self.sends.1),
        };
        let slot = slots.remove(wc.wr_id & (RECEIVE - 1))?;
        let status = status::completion(wc.status);
        let success = status == CompletionStatus::Success;
        if !success && state.phase != QueuePairState::Error {
            Self::break_off(&mut state, status::failure(status, wc.vendor_err));
        }
        drop(state);
        let bytes = if is_receive { wc.byte_len.into() } else { slot.bytes };
        let completion = Completion {
            id: slot.id,
            status,
            opcode: slot.opcode,
            bytes: if success { bytes } else { 0 },
            immediate: (success && is_receive && wc.wc_flags & IBV_WC_WITH_IMM != 0).then(|| u32::from_be(wc.imm_data)),
            queue_pair: self.number,
            vendor_error: if success { 0 } else { wc.vendor_err },
        };
        Some((completion, account.clone(), slot.held))
    }

    // ---- the end

    /// Moves it to the error state, with the first cause.
    fn break_off(state: &mut State, failure: Option<Error>) {
        if state.phase == QueuePairState::Error {
            return;
        }
        state.phase = QueuePairState::Error;
        state.failure = failure;
        if let Some(pair) = &state.pair {
            // Where the device refuses, it is the destruction that ends what is posted.
            let _flushing = pair.modify(ibv_qp_attr { qp_state: IBV_QPS_ERR, ..zeroed() }, IBV_QP_STATE);
        }
    }

    /// Moves it to the error state because of `error`.
    pub(super) fn fail(&self, error: Error) {
        Self::break_off(&mut self.state(), Some(error));
    }

    /// Destroys the library's queue pair; whether it is gone. After that the device touches no memory for it any more (I3);
    /// what it has not completed by then completes as flushed. Where the library refuses, nothing more completes and
    /// nothing is given back; it can be tried again.
    fn end(&self) -> bool {
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        if *ended || self.device.is_inherited() {
            return *ended;
        }
        Self::break_off(&mut self.state(), None);
        let collect = || {
            self.sends.0.collect_all();
            self.receives.0.collect_all();
        };
        // Before, as some providers clear a queue of what they destroy; and after, for what came between.
        collect();
        let entry = self.device.remove(self.at);
        let pair = self.state().pair.take();
        if let Some(Err(pair)) = pair.map(sys::Pair::destroy) {
            self.state().pair = Some(pair);
            if let Some(entry) = entry {
                self.device.restore(self.at, entry);
            }
            return false;
        }
        *ended = true;
        collect();
        let (sends, receives) = {
            let mut state = self.state();
            (state.sends.take_all(), state.receives.take_all())
        };
        for (slots, (queue, account)) in [(&sends, &self.sends), (&receives, &self.receives)] {
            let flushed = slots.iter().map(|slot| Completion {
                id: slot.id,
                status: CompletionStatus::Flushed,
                opcode: slot.opcode,
                bytes: 0,
                immediate: None,
                queue_pair: self.number,
                vendor_error: 0,
            });
            queue.push(flushed.collect(), account);
            queue.detach(self.serial);
        }
        true
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (phase, failure) = {
            let state = self.state();
            (state.phase, state.failure.clone())
        };
        f.debug_struct("IbvQueuePair")
            .field("number", &self.number)
            .field("state", &phase)
            .field("failure", &failure)
            .finish_non_exhaustive()
    }
}

/// The handle that callers have. The last one going away is the end; what can't be ended is kept for ever, with the memory
/// that it may touch.
#[derive(Debug)]
pub(super) struct Handle(pub(super) Arc<Core>);

impl Drop for Handle {
    fn drop(&mut self) {
        if !self.0.end() && !self.0.device.is_inherited() {
            mem::forget(self.0.clone());
        }
    }
}

impl QpBackend for Handle {
    fn number(&self) -> u32 {
        self.0.number
    }

    fn state(&self) -> QueuePairState {
        self.0.state().phase
    }

    fn failure(&self) -> Option<Error> {
        self.0.state().failure.clone()
    }

    fn address(&self) -> Vec<u8> {
        self.0.address().encode()
    }

    fn connect(&self, remote: &[u8], _active: bool) -> Result<()> {
        self.0.connect(remote)
    }

    fn post_send(&self, requests: Vec<WorkRequest>) -> Result<()> {
        self.0.post_send(requests)
    }

    fn post_recv(&self, request: ReceiveRequest) -> Result<()> {
        self.0.post_recv(request)
    }

    fn to_error(&self) {
        Core::break_off(&mut self.0.state(), None);
    }

    /// In the error state this destroys the library's queue pair, which is a system call or two.
    fn is_fenced(&self) -> bool {
        if self.0.state().phase != QueuePairState::Error || self.0.device.is_inherited() {
            return false;
        }
        self.0.end()
    }

    fn map(&self, _remote: RemoteSlice) -> Result<Arc<dyn ViewBackend>> {
        Err(Error::new("map", Cause::Unsupported { what: "a view of remote memory" }))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
