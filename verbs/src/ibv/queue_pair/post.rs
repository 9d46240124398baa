//! Posting: what is checked before the device sees it.

use super::{Core, RECEIVE, SLOT};
use crate::ibv::domain::Region;
use crate::ibv::failed;
use crate::memory_region::check_range;
use crate::{Access, Cause, Error, LocalSlice, Opcode, QueuePairState, ReceiveRequest, Result, WorkRequest};
use rdma_core_sys::*;
use std::sync::Arc;

/// A request that was found to be right.
struct Checked {
    id: u64,
    opcode: Opcode,
    bytes: u64,
    held: Vec<LocalSlice>,
    wr: ibv_send_wr,
}

impl Core {
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
    pub(super) fn post_send(&self, requests: Vec<WorkRequest>) -> Result<()> {
        const VERB: &str = "post_send";
        let mut state = self.state();
        if !state.takes_sends() || self.device.is_inherited() {
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
                refused.extend(state.sends.remove(wr.wr_id & SLOT));
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
    pub(super) fn post_recv(&self, request: ReceiveRequest) -> Result<()> {
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
}
