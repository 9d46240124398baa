//! The library's statuses and events in this crate's words.

use crate::{Cause, CompletionStatus, Error};
use rdma_core_sys::*;

/// Why a port carries nothing.
pub(super) const PORT_DOWN: Cause = Cause::PathDown { why: "the port of the device here is down" };

/// How a request ended.
pub(super) fn completion(status: u32) -> CompletionStatus {
    match status {
        IBV_WC_SUCCESS => CompletionStatus::Success,
        IBV_WC_WR_FLUSH_ERR => CompletionStatus::Flushed,
        IBV_WC_LOC_LEN_ERR => CompletionStatus::LocalLength,
        IBV_WC_LOC_PROT_ERR | IBV_WC_LOC_ACCESS_ERR | IBV_WC_MW_BIND_ERR => CompletionStatus::LocalProtection,
        IBV_WC_REM_ACCESS_ERR => CompletionStatus::RemoteAccess,
        IBV_WC_REM_INV_REQ_ERR | IBV_WC_REM_INV_RD_REQ_ERR => CompletionStatus::RemoteInvalidRequest,
        IBV_WC_REM_OP_ERR | IBV_WC_REM_ABORT_ERR | IBV_WC_BAD_RESP_ERR => CompletionStatus::RemoteOperation,
        IBV_WC_RETRY_EXC_ERR | IBV_WC_RESP_TIMEOUT_ERR => CompletionStatus::TransportRetryExceeded,
        IBV_WC_RNR_RETRY_EXC_ERR => CompletionStatus::ReceiverNotReadyExceeded,
        // Also what no header knows yet.
        _ => CompletionStatus::LocalOperation,
    }
}

/// How requests before one that ended so have ended, which have no completion of their own. What the peer answered, or never
/// did, was about the oldest that it had not answered yet, so those before were done; where the device gave up by itself that
/// is not known, and the least is told.
pub(super) fn of_earlier(status: CompletionStatus) -> CompletionStatus {
    match status {
        CompletionStatus::Success
        | CompletionStatus::RemoteAccess
        | CompletionStatus::RemoteInvalidRequest
        | CompletionStatus::RemoteOperation
        | CompletionStatus::TransportRetryExceeded
        | CompletionStatus::ReceiverNotReadyExceeded => CompletionStatus::Success,
        CompletionStatus::Flushed
        | CompletionStatus::LocalLength
        | CompletionStatus::LocalProtection
        | CompletionStatus::LocalOperation => CompletionStatus::Flushed,
    }
}

/// What moved the queue pair to the error state when a request ended so; `None` for what did not.
pub(super) fn failure(status: CompletionStatus, vendor: u32) -> Option<Error> {
    let denied = |what| Cause::Denied { what };
    let cause = match status {
        CompletionStatus::Success => return None,
        // Flushed without an error of our own before: it was the peer's doing.
        CompletionStatus::Flushed | CompletionStatus::TransportRetryExceeded => Cause::Disconnected,
        CompletionStatus::RemoteAccess => denied("the peer refused a remote access"),
        CompletionStatus::ReceiverNotReadyExceeded => denied("the peer had no receive posted"),
        CompletionStatus::RemoteInvalidRequest => denied("the peer refused a request"),
        CompletionStatus::RemoteOperation => denied("the peer failed while it did a request"),
        CompletionStatus::LocalProtection => denied("local memory does not allow a request"),
        CompletionStatus::LocalLength => Cause::Malformed { what: "a message longer than the receive posted for it" },
        CompletionStatus::LocalOperation => {
            Cause::Os { errno: libc::EIO, call: if vendor == 0 { "the device" } else { "the device (vendor error)" } }
        }
    };
    Some(Error::new("poll_cq", cause))
}

/// What an asynchronous event of a queue pair means for it; `None` for one that changes nothing.
pub(super) fn event(event_type: u32) -> Option<Error> {
    let cause = match event_type {
        IBV_EVENT_QP_ACCESS_ERR => Cause::Denied { what: "an access by the peer" },
        IBV_EVENT_QP_REQ_ERR => Cause::Malformed { what: "an invalid request" },
        IBV_EVENT_QP_FATAL => Cause::Os { errno: libc::EIO, call: "the device (queue pair fatal)" },
        IBV_EVENT_CQ_ERR => Cause::Os { errno: libc::EIO, call: "the device (completion queue)" },
        IBV_EVENT_PORT_ERR => PORT_DOWN,
        IBV_EVENT_DEVICE_FATAL => Cause::Os { errno: libc::EIO, call: "the device (fatal)" },
        _ => return None,
    };
    Some(Error::new("get_async_event", cause))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_but_success_has_a_failure() {
        for status in 0..200 {
            let status = completion(status);
            assert_eq!(failure(status, 0).is_none(), status == CompletionStatus::Success, "{status:?}");
        }
        assert_eq!(completion(IBV_WC_REM_ACCESS_ERR), CompletionStatus::RemoteAccess);
        assert_eq!(completion(199), CompletionStatus::LocalOperation, "what no header knows is no success");
    }

    #[test]
    fn only_events_that_end_a_queue_pair_fail_it() {
        let fatal: Vec<_> = (0..40).filter(|&event_type| event(event_type).is_some()).collect();
        let expected = [
            IBV_EVENT_CQ_ERR,
            IBV_EVENT_QP_FATAL,
            IBV_EVENT_QP_REQ_ERR,
            IBV_EVENT_QP_ACCESS_ERR,
            IBV_EVENT_DEVICE_FATAL,
            IBV_EVENT_PORT_ERR,
        ];
        assert_eq!(fatal, expected);
    }
}
