//! From connected to proven: a queue pair is ready when bytes that both ends know came back right from the peer.
//!
//! | | the active end | the passive end |
//! |---|---|---|
//! | connects | | posts a receive for the greeting, before all others |
//! | connected | greets, and reads the peer's bytes | waits for the greeting: before it the peer's end can't answer |
//! | greeted | | reads the peer's bytes |
//! | ready | the read brought the right bytes | likewise |
//!
//! Where the path has carried a probe before, and no trouble since, nothing is read: the active end is ready when its greeting
//! was acknowledged, the passive one when it came. These requests have places in the queues that no caller's request takes. The
//! provider has no clock: a probe that a device neither answers nor gives up is for the caller to end.

use super::{Core, PROBE, RECEIVE, State};
use crate::ibv::completion_queue::Retired;
use crate::ibv::probe::{self, Read};
use crate::ibv::{address::Address, failed};
use crate::{Cause, CompletionStatus, Error, QueuePairState, Result};
use core::mem;
use rdma_core_sys::*;

/// Requests of the probe in the send queue.
pub(super) const SENDS: u32 = 2;
/// Receives of the probe.
pub(super) const RECEIVES: u32 = 1;

const GREETING: u64 = 0;
const READ: u64 = 1;

/// How far the probe is.
#[derive(Default)]
pub(super) struct Probe {
    /// The peer, once it is known.
    remote: Option<Address>,
    active: bool,
    /// Whether the path was proven before.
    known: bool,
    /// Whether the peer's greeting has come.
    greeted: bool,
    /// What is being read.
    read: Option<Read>,
}

impl Probe {
    /// What the device may touch no more.
    pub(super) fn take(&mut self) -> Option<Read> {
        self.read.take()
    }
}

fn no_answer() -> Error {
    Error::new("connect", Cause::PathDown { why: "a first read had no answer" })
}

impl Core {
    fn probe_number(&self, number: u64) -> u64 {
        u64::from(self.serial) << 32 | PROBE | number
    }

    /// Posts the receive of the peer's greeting, which has no bytes, if there will be one; then those that callers have posted
    /// until now, which would have met the greeting otherwise.
    #[allow(unsafe_code)]
    pub(super) fn post_receives(&self, state: &mut State, active: bool) -> Result<()> {
        let Some(pair) = &state.pair else { return Err(Error::new("connect", Cause::Disconnected)) };
        let greeting = (!active).then(|| (self.probe_number(RECEIVE | GREETING), None));
        for (number, sge) in greeting.into_iter().chain(mem::take(&mut state.early)) {
            // SAFETY: the slice lies in a region that the receive's slot holds, until it completes or `end` has destroyed the
            // queue pair (I1); that of the greeting names no memory.
            let posted = unsafe { pair.post_recv(number, sge) };
            posted.map_err(|error| failed("connect", "ibv_post_recv", error))?;
        }
        Ok(())
    }

    /// Begins, when this end can send.
    pub(super) fn prove(&self, state: &mut State, remote: &Address, active: bool) -> Result<()> {
        let known = self.device.proven.contains(remote);
        state.probe = Probe { remote: Some(*remote), active, known, greeted: state.probe.greeted, read: None };
        match (active, known) {
            (true, true) => self.post_probe(state, true, false),
            (true, false) => self.post_probe(state, true, true),
            (false, _) if state.probe.greeted => self.greeted(state),
            (false, _) => Ok(()),
        }
    }

    /// Posts the greeting, the read, or both.
    #[allow(unsafe_code)]
    fn post_probe(&self, state: &mut State, greets: bool, reads: bool) -> Result<()> {
        const VERB: &str = "connect";
        let (Some(pair), Some(remote)) = (&state.pair, state.probe.remote) else {
            return Err(Error::new(VERB, Cause::Disconnected));
        };
        let (mut chain, mut slices) = (vec![], vec![]);
        if greets {
            let wr_id = self.probe_number(GREETING);
            chain.push(ibv_send_wr { wr_id, opcode: IBV_WR_SEND, send_flags: IBV_SEND_SIGNALED, ..zeroed() });
        }
        if reads {
            let read = Read::new(&self.domain, remote.probe.nonce)?;
            slices.push(read.region().sge(0, probe::LEN));
            let mut wr = ibv_send_wr { opcode: IBV_WR_RDMA_READ, send_flags: IBV_SEND_SIGNALED, ..zeroed() };
            (wr.wr_id, wr.num_sge) = (self.probe_number(READ), 1);
            wr.wr.rdma = ibv_send_wr_rdma { remote_addr: remote.probe.address, rkey: remote.probe.key };
            chain.push(wr);
            state.probe.read = Some(read);
        }
        // SAFETY: the slice lies in a region that `state.probe` keeps until the read has completed or `end` has destroyed the
        // queue pair (I1).
        let posted = unsafe { pair.post_chain(&mut chain, &mut slices) };
        posted.map_err(|(error, _)| failed(VERB, "ibv_post_send (probe)", error))
    }

    fn greeted(&self, state: &mut State) -> Result<()> {
        if state.probe.known {
            Self::proven(state);
            return Ok(());
        }
        self.post_probe(state, false, true)
    }

    fn proven(state: &mut State) {
        if state.phase == QueuePairState::Connecting {
            state.phase = QueuePairState::ReadyToSend;
        }
    }

    /// The device has completed a request of the probe.
    pub(super) fn probe_completed(
        &self,
        state: &mut State,
        wr_id: u64,
        status: CompletionStatus,
        retired: &mut Retired,
    ) {
        let number = wr_id & (PROBE - 1);
        let success = status == CompletionStatus::Success;
        let read = if wr_id & RECEIVE == 0 && number == READ { state.probe.take() } else { None };
        let right = read.as_ref().is_some_and(|read| success && read.is_right());
        let is_read = read.is_some();
        retired.freed.regions.extend(read.map(Read::into_region));
        if !success || state.phase == QueuePairState::Error {
            return; // it has failed, and says why
        }
        if wr_id & RECEIVE != 0 {
            state.probe.greeted = true;
            // A greeting that comes before this end knows its peer is dealt with when it does.
            let waits = state.phase == QueuePairState::Connecting && !state.probe.active;
            if waits && let Err(error) = self.greeted(state) {
                Self::break_off(state, Some(error));
            }
        } else if !is_read {
            if state.probe.active && state.probe.known {
                Self::proven(state);
            }
        } else if right {
            if let Some(remote) = &state.probe.remote {
                self.device.proven.insert(remote);
            }
            Self::proven(state);
        } else {
            let why = "a first read brought other bytes than the peer has there";
            Self::break_off(state, Some(Error::new("connect", Cause::PathDown { why })));
        }
    }

    /// What a failure is called, and what it says of the path: one that ends a probe says that the path is down, and a path
    /// that carries nothing any more is probed again.
    pub(super) fn judge(&self, state: &State, status: CompletionStatus, failure: Option<Error>) -> Option<Error> {
        let silent =
            matches!(status, CompletionStatus::TransportRetryExceeded | CompletionStatus::ReceiverNotReadyExceeded);
        if silent && let Some(remote) = &state.probe.remote {
            self.device.proven.remove(remote);
        }
        if silent && state.phase == QueuePairState::Connecting { Some(no_answer()) } else { failure }
    }
}
