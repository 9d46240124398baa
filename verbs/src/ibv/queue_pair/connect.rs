//! The way through the states: what both ends take, and how long answers are waited for.

use super::{Core, State};
use crate::ibv::address::Address;
use crate::ibv::failed;
use crate::{Cause, Error, QueuePairState, Result};
use rdma_core_sys::*;

/// How long an answer is waited for: 4.096 us * 2^15 = 134 ms, at least, and so many times again. Not 7 times, the most
/// that there is: soft-RoCE takes that for ever, and never notices a peer that is gone.
const TIMEOUT: u8 = 15;
const RETRIES: u8 = 6;
/// How long a peer without a receive is left alone: 1.28 ms (verbs specification, table of RNR NAK timers), and how often
/// it is asked again. 7 would be for ever.
const MIN_RNR_TIMER: u8 = 14;
const RNR_RETRIES: u8 = 6;
const HOP_LIMIT: u8 = 64;

impl Core {
    pub(super) fn connect(&self, remote: &[u8], active: bool) -> Result<()> {
        const VERB: &str = "connect";
        let port = &self.device.port;
        let remote = Address::decode(remote)?;
        if let Some(what) = port.unlike(&remote) {
            return Err(Error::new(VERB, Cause::Unsupported { what }));
        }
        let mut state = self.state();
        if state.phase != QueuePairState::Reset {
            let cause = Cause::State { is: state.phase, needs: QueuePairState::Reset };
            return Err(Error::new(VERB, cause));
        }
        let walked = self.post_receives(&mut state, active).and_then(|()| self.walk(&state, &remote)).and_then(|()| {
            state.phase = QueuePairState::Connecting;
            state.max_message = port.max_message.min(remote.max_message);
            self.prove(&mut state, &remote, active)
        });
        if let Err(error) = &walked {
            Self::break_off(&mut state, Some(error.clone()));
        }
        walked
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
}
