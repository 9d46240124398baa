//! Queue pairs: what is posted and not completed, the way through the states, and the end.
//!
//! A request's number, as the device knows it, holds the queue pair's serial number (32 bits), whether it is a receive, for a
//! window, or of the probe (1 bit each), and its slot or number (29 bits). So a completion finds its request also where the
//! device uses a queue pair's own number again.

use super::address::Address;
use super::completion_queue::{Account, Cq};
use super::device::IbvDevice;
use super::domain::Domain;
use super::probe::Shown;
use super::{Posting, failed, sys};
use crate::backend::{QpBackend, ViewBackend};
use crate::{Cause, Error, QueuePairCapacity, QueuePairState, ReceiveRequest, RemoteSlice, Result, WorkRequest};
use core::any::Any;
use core::fmt;
use core::mem;
use prove::Probe;
use rdma_core_sys::*;
use sends::Sends;
use slots::Slots;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use windows::Windows;

mod connect;
mod end;
mod post;
mod prove;
mod sends;
mod slots;
mod windows;

pub(super) use windows::{Freed, WINDOW_REQUESTS, bind};

/// Requests to send, and receives, that every queue pair makes by itself.
pub(super) const OWN_SENDS: u32 = prove::SENDS;
pub(super) const OWN_RECEIVES: u32 = prove::RECEIVES;

pub(super) const RECEIVE: u64 = 1 << 31;
const WINDOW: u64 = 1 << 30;
pub(super) const PROBE: u64 = 1 << 29;
/// The bits of a slot's number.
pub(super) const SLOT: u64 = PROBE - 1;

/// A queue pair.
pub(super) struct Core {
    serial: u32,
    number: u32,
    psn: u32,
    at: usize,
    device: Arc<IbvDevice>,
    domain: Arc<sys::Domain>,
    max_sge: usize,
    /// Longest request whose bytes are taken when it is posted.
    max_inline: u64,
    sends: (Arc<Cq>, Arc<Account>),
    receives: (Arc<Cq>, Arc<Account>),
    /// What the peer probes the path with.
    shown: Arc<Shown>,
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
    sends: Sends,
    receives: Slots,
    /// Receives that were posted before it was connected: their numbers and slices.
    early: Vec<(u64, Option<ibv_sge>)>,
    chain: sys::Chain,
    windows: Windows,
    probe: Probe,
}

impl State {
    /// Whether the device takes requests to send.
    fn takes_sends(&self) -> bool {
        matches!(self.phase, QueuePairState::Connecting | QueuePairState::ReadyToSend)
    }
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
        device.check_port(VERB)?;
        // No more than callers' own, so that `own_entries` holds.
        let for_windows = match device.info_capabilities().scoped_keys {
            true => WINDOW_REQUESTS
                .min((capacity.max_send_wr.saturating_add(capacity.max_recv_wr)).saturating_sub(1))
                .max(1),
            false => 0,
        };
        let besides = for_windows + prove::SENDS;
        let send_account = sends.reserve(capacity.max_send_wr, besides)?;
        let recv_account = receives.reserve(capacity.max_recv_wr, prove::RECEIVES)?;
        let shown = domain.shown()?;
        let max_sge = device.info_capabilities().max_sge;
        let cap = ibv_qp_cap {
            max_send_wr: capacity.max_send_wr + besides,
            max_recv_wr: capacity.max_recv_wr + prove::RECEIVES,
            max_send_sge: max_sge,
            max_recv_sge: 1,
            max_inline_data: post::INLINE_BYTES,
        };
        let pair =
            sys::Pair::new(&domain.raw, [&sends.raw, &receives.raw], cap, device.wishes.posting == Posting::Extended);
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
            max_inline: pair.max_inline().into(),
            sends: (sends, send_account),
            receives: (receives, recv_account),
            shown,
            state: Mutex::new(State {
                phase: QueuePairState::Reset,
                failure: None,
                pair: Some(pair),
                max_message: device.port.max_message,
                sends: Sends::default(),
                receives: Slots::default(),
                early: vec![],
                chain: sys::Chain::default(),
                windows: Windows::new(for_windows),
                probe: Probe::default(),
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
            probe: self.shown.target(),
        }
    }

    /// Where it stands, also by what the device has completed since.
    fn phase(&self) -> QueuePairState {
        let phase = self.state().phase;
        if phase != QueuePairState::Connecting || self.device.is_inherited() {
            return phase;
        }
        self.sends.0.collect_all();
        self.receives.0.collect_all();
        self.state().phase
    }
}

/// Most entries of a completion queue that its queue pairs need besides callers' requests, where those take `depth` of it.
///
/// A queue pair has at least a send and a receive of its callers', and so with `n` of both at most `n - 1` requests for windows
/// and three of the probe: `3 n` is enough for both. A little more is for queue pairs that have no receives.
pub(super) const fn own_entries(depth: u32) -> u32 {
    depth.saturating_mul(2).saturating_add(4)
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
        self.0.phase()
    }

    fn failure(&self) -> Option<Error> {
        self.0.state().failure.clone()
    }

    fn max_message_size(&self) -> Option<u64> {
        Some(self.0.state().max_message)
    }

    fn address(&self) -> Vec<u8> {
        self.0.address().encode()
    }

    fn connect(&self, remote: &[u8], active: bool) -> Result<()> {
        self.0.connect(remote, active)
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
