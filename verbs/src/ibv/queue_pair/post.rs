//! Posting: what is checked before the device sees it.
//!
//! A batch is checked request by request as it is put together, and posted as a whole or not at all, with one doorbell.
//! What a small send or write takes is copied by the processor then and there (inline), which saves the device a read of
//! memory.

use super::sends::{Asking, number_after};
use super::{Core, RECEIVE};
use crate::backend::MrBackend;
use crate::ibv::failed;
use crate::ibv::region::Region;
use crate::ibv::sys::{Chain, Request};
use crate::memory_region::{check_piece, check_range};
use crate::{
    Access, Cause, Error, LocalSlice, MemoryRegion, Opcode, QueuePairState, ReceiveRequest, Result, WorkRequest,
};
use rdma_core_sys::*;
use std::sync::Arc;

/// Bytes of a request that are taken when it is posted, where the device can: what most devices have room for beside the
/// rest of a request, without making each place in the send queue larger.
pub(super) const INLINE_BYTES: u32 = 64;

/// The region of the slice before, if it has one piece: requests that are posted together often use one.
struct Last<'s> {
    handle: &'s MemoryRegion,
    region: &'s Region,
    /// Whether it was found that requests may write it.
    is_written: bool,
}

const VERB: &str = "post_send";

/// Whether a slice lies in its region and is one slice for the device.
#[inline]
fn check_slice(verb: &'static str, slice: &LocalSlice, region: &Region) -> Result<()> {
    check_range(verb, slice.offset, slice.len, region.len())?;
    if slice.len > u32::MAX.into() {
        return limit(verb, "length of a local slice", u32::MAX.into(), slice.len);
    }
    Ok(())
}

#[cold]
fn limit<T>(verb: &'static str, what: &'static str, have: u64, need: u64) -> Result<T> {
    Err(Error::new(verb, Cause::Limit { what, have, need }))
}

#[cold]
fn refused<T>(cause: Cause) -> Result<T> {
    Err(Error::new(VERB, cause))
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

    /// The request of most batches: a read or write of one slice, of the region that the request before used. `None` where
    /// it is another, or is not right.
    #[inline(always)]
    fn check_plain(
        &self,
        request: &WorkRequest,
        max_message: u64,
        last: &Option<Last<'_>>,
    ) -> Option<(Request, ibv_sge)> {
        let ([slice], Some(remote), Some(last)) = (&*request.local, &request.remote, last) else { return None };
        let bytes = slice.len;
        let is_right = Arc::ptr_eq(&last.handle.backend, &slice.region.backend)
            && slice.offset.checked_add(bytes).is_some_and(|end| end <= last.region.len())
            && bytes.wrapping_sub(1) < max_message
            && bytes == remote.len
            && remote.address.checked_add(bytes).is_some();
        let rkey = u32::try_from(remote.rkey).ok()?;
        let (opcode, flags) = match request.opcode {
            Opcode::Read if last.is_written => (IBV_WR_RDMA_READ, 0),
            Opcode::Write => (IBV_WR_RDMA_WRITE, self.inline_flag(last.region.is_near, bytes)),
            _ => return None,
        };
        let wr = Request { wr_id: 0, opcode, flags, immediate: 0, remote_addr: remote.address, rkey };
        is_right.then(|| (wr, last.region.sge(slice.offset, bytes as u32)))
    }

    /// Whether the bytes of a request that sends are taken when it is posted.
    #[inline]
    fn inline_flag(&self, is_near: bool, bytes: u64) -> u32 {
        if is_near && bytes > 0 && bytes <= self.max_inline { IBV_SEND_INLINE } else { 0 }
    }

    /// Checks a request, adds its slices to `chain`, and gives it as the device needs it, with its bytes.
    fn check<'s>(
        &self,
        request: &'s WorkRequest,
        max_message: u64,
        chain: &mut Chain,
        last: &mut Option<Last<'s>>,
    ) -> Result<(Request, u64)> {
        let WorkRequest { opcode, local, remote, .. } = request;
        if local.len() > self.max_sge {
            return limit(VERB, "max_sge", self.max_sge as u64, local.len() as u64);
        }
        let is_read = matches!(opcode, Opcode::Read);
        let (mut bytes, mut is_near, mut slices) = (0u64, !is_read, 0);
        for slice in local {
            let region = self.region(VERB, slice, is_read)?;
            *last = region.is_whole().then_some(Last { handle: &slice.region, region, is_written: is_read });
            bytes += slice.len;
            is_near &= region.is_near;
            // None where there are no bytes: a length of 0 means 2^31 to some devices.
            for sge in region.sges(slice.offset, slice.len as u32) {
                slices += 1;
                chain.slice(sge);
            }
        }
        if slices > self.max_sge {
            return limit(VERB, "max_sge", self.max_sge as u64, slices as u64);
        }
        if bytes > max_message {
            return limit(VERB, "max_message_size", max_message, bytes);
        }
        let flags = self.inline_flag(is_near, bytes);
        let (opcode, immediate, one_sided) = match *opcode {
            Opcode::Read => (IBV_WR_RDMA_READ, 0, true),
            Opcode::Write => (IBV_WR_RDMA_WRITE, 0, true),
            Opcode::WriteWithImmediate(value) => {
                (IBV_WR_RDMA_WRITE_WITH_IMM, value.to_be(), bytes > 0 || remote.is_some())
            }
            Opcode::Send => (IBV_WR_SEND, 0, false),
            Opcode::SendWithImmediate(value) => (IBV_WR_SEND_WITH_IMM, value.to_be(), false),
            Opcode::Receive => {
                return refused(Cause::Unsupported { what: "a receive in the send queue" });
            }
        };
        let (remote_addr, rkey) = match remote {
            Some(remote) if one_sided => {
                if remote.len != bytes || remote.address.checked_add(bytes).is_none() {
                    return refused(Cause::OutOfRange { offset: remote.address, len: bytes, size: remote.len });
                }
                let Ok(rkey) = u32::try_from(remote.rkey) else {
                    return refused(Cause::Malformed { what: "a remote key of more than 32 bits" });
                };
                (remote.address, rkey)
            }
            None if !one_sided => (0, 0),
            None => return refused(Cause::NotFound { what: "remote slice in the request" }),
            Some(_) => return refused(Cause::Unsupported { what: "a send to a remote slice" }),
        };
        Ok((Request { wr_id: 0, opcode, flags, immediate, remote_addr, rkey }, bytes))
    }

    #[allow(unsafe_code)]
    pub(super) fn post_send(&self, requests: Vec<WorkRequest>) -> Result<()> {
        let mut guard = self.state();
        let state = &mut *guard;
        if !state.takes_sends() || self.device.is_inherited() {
            return Err(Error::new(VERB, Cause::State { is: state.phase, needs: QueuePairState::ReadyToSend }));
        }
        let Some(pair) = &state.pair else { return Err(Error::new(VERB, Cause::Disconnected)) };
        let count = requests.len();
        if count == 0 {
            return Ok(());
        }
        let entries = u32::try_from(count).unwrap_or(u32::MAX);
        self.sends.1.take(VERB, "max_send_wr", entries)?;
        let (serial, first, max_message) = (u64::from(self.serial) << 32, state.sends.next_number(), state.max_message);
        let (mut asking, mut last) = (Asking::new(count), None);
        let slices = requests.iter().map(|request| request.local.len()).sum();
        pair.begin(&mut state.chain, count, slices);
        let mut number = |wr: &mut Request, i, bytes| {
            wr.wr_id = serial | u64::from(number_after(first, i));
            if asking.next(bytes) {
                wr.flags |= IBV_SEND_SIGNALED;
            }
        };
        for (i, request) in (0..entries).zip(&requests) {
            if let Some((mut wr, sge)) = self.check_plain(request, max_message, &last) {
                number(&mut wr, i, sge.length.into());
                pair.add_with(&mut state.chain, &wr, sge);
                continue;
            }
            match self.check(request, max_message, &mut state.chain, &mut last) {
                Ok((mut wr, bytes)) => {
                    number(&mut wr, i, bytes);
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
            let withdrawn = state.sends.withdraw();
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
            Some(slice) => {
                let region = self.region(VERB, slice, true)?;
                check_piece(VERB, slice.offset, slice.len, region.piece_len())?;
                region.sges(slice.offset, slice.len as u32).next()
            }
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
        let wr_id = u64::from(self.serial) << 32 | RECEIVE | slot;
        if state.phase == QueuePairState::Reset {
            state.early.push((wr_id, sge));
            return Ok(());
        }
        let Some(pair) = &state.pair else { return Err(Error::new(VERB, Cause::Disconnected)) };
        // SAFETY: the slice lies in a region that the slot holds, until the receive completes or `end` has destroyed the
        // queue pair (I1).
        let posted = unsafe { pair.post_recv(wr_id, sge) };
        posted.map_err(|error| {
            let refused = state.receives.remove(slot);
            self.receives.1.give_back(1);
            drop(state);
            drop(refused);
            failed(VERB, "ibv_post_recv", error)
        })
    }
}
