//! Posting: what is checked before the device sees it.
//!
//! A batch is checked request by request as it is put together, and posted as a whole or not at all, with one doorbell.
//! What a small send or write takes is copied by the processor then and there (inline), which saves the device a read of
//! memory.

use super::sends::{Asking, number_after};
use super::{Core, RECEIVE};
use crate::ibv::domain::Region;
use crate::ibv::failed;
use crate::ibv::sys::{Chain, Request};
use crate::memory_region::check_range;
use crate::{
    Access, Cause, Error, LocalSlice, MemoryRegion, Opcode, QueuePairState, ReceiveRequest, Result, WorkRequest,
};
use core::ptr;
use rdma_core_sys::*;
use std::sync::Arc;

/// Bytes of a request that are taken when it is posted, where the device can: what most devices have room for beside the
/// rest of a request, without making each place in the send queue larger.
pub(super) const INLINE_BYTES: u32 = 64;

/// Whether a slice lies in its region and is one slice for the device.
#[inline]
fn check_slice(verb: &'static str, slice: &LocalSlice, region: &Region) -> Result<()> {
    check_range(verb, slice.offset, slice.len, region.len())?;
    if slice.len > u32::MAX.into() {
        let cause = Cause::Limit { what: "length of a local slice", have: u32::MAX.into(), need: slice.len };
        return Err(Error::new(verb, cause));
    }
    Ok(())
}

impl Core {
    /// The region behind a slice, if the request may use it so.
    #[inline]
    fn region<'s>(&self, verb: &'static str, slice: &'s LocalSlice, writes: bool) -> Result<&'s Region> {
        let denied = |what| Err(Error::new(verb, Cause::Denied { what }));
        let Some(region) = slice.region.backend.as_any().downcast_ref::<Region>() else {
            return denied("a region of another provider");
        };
        check_slice(verb, slice, region)?;
        if !Arc::ptr_eq(&region.domain, &self.domain) {
            return denied("a region of another protection domain");
        }
        if writes && !region.access.contains(Access::LOCAL_WRITE) {
            return denied("LOCAL_WRITE");
        }
        Ok(region)
    }

    /// Checks a request, adds its slices to `chain`, and fills `wr` with it as the device needs it; its bytes. `last`: the
    /// region of the slice before.
    #[inline]
    fn check<'s>(
        &self,
        request: &'s WorkRequest,
        max_message: u64,
        chain: &mut Chain,
        last: &mut Option<(&'s MemoryRegion, &'s Region, bool)>,
        wr: &mut Request,
    ) -> Result<u64> {
        const VERB: &str = "post_send";
        let limit = |what, have: u64, need: u64| Err(Error::new(VERB, Cause::Limit { what, have, need }));
        let WorkRequest { opcode, local, remote, .. } = request;
        if local.len() > self.max_sge {
            return limit("max_sge", self.max_sge as u64, local.len() as u64);
        }
        let is_read = *opcode == Opcode::Read;
        let (mut bytes, mut is_near) = (0u64, !is_read);
        for slice in local {
            // Requests that are posted together often use one region.
            let region = match *last {
                Some((handle, region, writes))
                    if ptr::addr_eq(Arc::as_ptr(&handle.backend), Arc::as_ptr(&slice.region.backend))
                        && (writes || !is_read) =>
                {
                    check_slice(VERB, slice, region)?;
                    region
                }
                _ => {
                    let region = self.region(VERB, slice, is_read)?;
                    *last = Some((&slice.region, region, is_read));
                    region
                }
            };
            bytes += slice.len;
            is_near &= region.is_near;
            // A length of 0 means 2^31 to some devices.
            if slice.len > 0 {
                chain.slice(region.sge(slice.offset, slice.len as u32));
            }
        }
        if bytes > max_message {
            return limit("max_message_size", max_message, bytes);
        }
        wr.flags = if is_near && bytes > 0 && bytes <= self.max_inline { IBV_SEND_INLINE } else { 0 };
        let one_sided;
        (wr.opcode, wr.immediate, one_sided) = match *opcode {
            Opcode::Read => (IBV_WR_RDMA_READ, 0, true),
            Opcode::Write => (IBV_WR_RDMA_WRITE, 0, true),
            Opcode::WriteWithImmediate(value) => {
                (IBV_WR_RDMA_WRITE_WITH_IMM, value.to_be(), bytes > 0 || remote.is_some())
            }
            Opcode::Send => (IBV_WR_SEND, 0, false),
            Opcode::SendWithImmediate(value) => (IBV_WR_SEND_WITH_IMM, value.to_be(), false),
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
                (wr.remote_addr, wr.rkey) = (remote.address, rkey);
            }
            None if !one_sided => (wr.remote_addr, wr.rkey) = (0, 0),
            None => return Err(Error::new(VERB, Cause::NotFound { what: "remote slice in the request" })),
            Some(_) => return Err(Error::new(VERB, Cause::Unsupported { what: "a send to a remote slice" })),
        }
        Ok(bytes)
    }

    #[allow(unsafe_code)]
    pub(super) fn post_send(&self, requests: Vec<WorkRequest>) -> Result<()> {
        const VERB: &str = "post_send";
        let mut guard = self.state();
        let state = &mut *guard;
        if !state.takes_sends() || self.device.is_inherited() {
            return Err(Error::new(VERB, Cause::State { is: state.phase, needs: QueuePairState::ReadyToSend }));
        }
        let Some(pair) = &state.pair else { return Err(Error::new(VERB, Cause::Disconnected)) };
        let (before, count) = (state.sends.len(), requests.len());
        if count == 0 {
            return Ok(());
        }
        let entries = u32::try_from(count).unwrap_or(u32::MAX);
        self.sends.1.take(VERB, "max_send_wr", entries)?;
        let (serial, first, max_message) = (u64::from(self.serial) << 32, state.sends.next_number(), state.max_message);
        let mut wr = Request { wr_id: 0, opcode: 0, flags: 0, immediate: 0, remote_addr: 0, rkey: 0 };
        let (mut asking, mut last) = (Asking::new(count), None);
        pair.begin(&mut state.chain, count);
        for (i, request) in (0..entries).zip(&requests) {
            match self.check(request, max_message, &mut state.chain, &mut last, &mut wr) {
                Ok(bytes) => {
                    wr.wr_id = serial | u64::from(number_after(first, i));
                    if asking.next(bytes) {
                        wr.flags |= IBV_SEND_SIGNALED;
                    }
                    pair.add(&mut state.chain, &wr);
                }
                Err(error) => {
                    pair.give_up();
                    self.sends.1.give_back(entries);
                    drop(guard);
                    return Err(error);
                }
            }
        }
        // Before the device has them: a completion may come at once.
        state.sends.add(requests);
        // SAFETY: every slice lies in a region that `sends` holds, until the request completes or `end` has destroyed the
        // queue pair (I1).
        let Err((error, posted)) = (unsafe { pair.post(&mut state.chain) }) else { return Ok(()) };
        let error = failed(VERB, "ibv_post_send", error);
        if posted == 0 {
            self.sends.1.give_back(entries);
            let withdrawn = state.sends.withdraw(before);
            drop(guard);
            drop(withdrawn);
            return Err(error);
        }
        // Part of the chain is with the device: the rest counts as posted too, and flushes with it.
        Self::break_off(state, Some(error));
        drop(guard);
        let _or_at_the_next_fence = self.end();
        Ok(())
    }

    #[allow(unsafe_code)]
    pub(super) fn post_recv(&self, request: ReceiveRequest) -> Result<()> {
        const VERB: &str = "post_recv";
        let sge = match &request.local {
            Some(slice) => Some(self.region(VERB, slice, true)?.sge(slice.offset, slice.len as u32)),
            None => None,
        };
        let mut state = self.state();
        if state.phase == QueuePairState::Error || self.device.is_inherited() {
            let cause = Cause::State { is: QueuePairState::Error, needs: QueuePairState::ReadyToSend };
            return Err(Error::new(VERB, cause));
        }
        self.receives.1.take(VERB, "max_recv_wr", 1)?;
        let held: Vec<_> = request.local.into_iter().collect();
        let slot = state.receives.insert(request.id, held);
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
