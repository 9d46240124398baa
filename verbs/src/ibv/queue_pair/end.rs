//! Completions, the error state, and the end.

use super::{Core, Freed, PROBE, RECEIVE, SLOT, State, WINDOW};
use crate::ibv::completion_queue::{Ready, Retired};
use crate::ibv::probe::Read;
use crate::ibv::{status, sys};
use crate::{Completion, CompletionStatus, Error, Opcode, QueuePairState};
use rdma_core_sys::*;
use std::sync::{Arc, PoisonError};

impl Core {
    /// The device has completed a request: what its caller is told goes to `ready`, and what it held to `retired`.
    pub(in crate::ibv) fn completed(self: &Arc<Self>, wc: &ibv_wc, ready: &mut Ready, retired: &mut Retired) {
        let mut state = self.state();
        let status = status::completion(wc.status);
        let success = status == CompletionStatus::Success;
        if !success && state.phase != QueuePairState::Error {
            let failure = self.judge(&state, status, status::failure(status, wc.vendor_err));
            Self::break_off(&mut state, failure);
        }
        if wc.wr_id & PROBE != 0 {
            self.probe_completed(&mut state, wc.wr_id, status, retired);
            return;
        }
        let number = wc.wr_id & SLOT;
        if wc.wr_id & RECEIVE != 0 {
            let Some(slot) = state.receives.remove(number) else { return };
            drop(state);
            let immediate = success && wc.wc_flags & IBV_WC_WITH_IMM != 0;
            let completion = Completion {
                bytes: if success { wc.byte_len.into() } else { 0 },
                immediate: immediate.then(|| u32::from_be(wc.imm_data)),
                vendor_error: if success { 0 } else { wc.vendor_err },
                ..self.completion(slot.id, Opcode::Receive, status)
            };
            ready.push_back((completion, self.receives.1.clone()));
            retired.held.push(slot.held);
        } else if wc.wr_id & WINDOW != 0 {
            if self.window_completed(&mut state, wc, &mut retired.freed) {
                retired.waiting.push(self.clone());
            }
        } else if let Some(sends) = state.sends.done(number as u32) {
            let last = sends.len() - 1;
            for (i, send) in sends.enumerate() {
                // Those before it asked for no completion of their own.
                let status = if i == last { status } else { status::of_earlier(status) };
                let success = status == CompletionStatus::Success;
                let completion = Completion {
                    bytes: if success { send.local.iter().map(|slice| slice.len).sum() } else { 0 },
                    vendor_error: if success || i < last { 0 } else { wc.vendor_err },
                    ..self.completion(send.id, send.opcode, status)
                };
                ready.push_back((completion, self.sends.1.clone()));
                retired.held.push(send.local);
            }
        }
    }

    /// A completion without bytes.
    fn completion(&self, id: u64, opcode: Opcode, status: CompletionStatus) -> Completion {
        Completion { id, status, opcode, bytes: 0, immediate: None, queue_pair: self.number, vendor_error: 0 }
    }

    /// Moves it to the error state, with the first cause.
    pub(super) fn break_off(state: &mut State, failure: Option<Error>) {
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
    pub(in crate::ibv) fn fail(&self, error: Error) {
        Self::break_off(&mut self.state(), Some(error));
    }

    /// Destroys the library's queue pair; whether it is gone. After that the device touches no memory for it any more (I3);
    /// what it has not completed by then completes as flushed. Where the library refuses, nothing more completes and
    /// nothing is given back; it can be tried again.
    pub(super) fn end(&self) -> bool {
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
        // Nothing may be bound to a queue pair that is destroyed.
        let mut freed = Freed::default();
        self.state().windows.free_all(&mut freed);
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
            state.windows.end_all(&mut freed);
            freed.regions.extend(state.probe.take().map(Read::into_region));
            (state.sends.take_all(), state.receives.take_all())
        };
        let flushed = CompletionStatus::Flushed;
        let sends: Vec<_> = sends.iter().map(|send| self.completion(send.id, send.opcode, flushed)).collect();
        let receives: Vec<_> = receives.iter().map(|slot| self.completion(slot.id, Opcode::Receive, flushed)).collect();
        for (flushed, (queue, account)) in [(sends, &self.sends), (receives, &self.receives)] {
            queue.push(flushed, account);
            queue.detach(self.serial);
        }
        true
    }
}
