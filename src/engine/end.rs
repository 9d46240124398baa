//! How a link ends, and why.

use super::link::{Link, LinkId, State};
use super::orphans::Orphans;
use super::{Action, Engine, OperationId};
use crate::ErrorKind;
use std::fmt;
use towline_control::session::{Role, SessionError};
use towline_control::wire::{self, Frame, Goodbye, GoodbyeCode, KeepAlive, LeaseId, RejectCode};

/// Why a link ended, as its gets see it.
#[derive(Debug, Clone)]
pub(super) enum Failure {
    /// It never came to be.
    Unreachable(ErrorKind),
    /// It broke.
    Lost(String),
    /// It works, and another takes its place: its gets lose no try by that.
    Renewed(String),
    /// The peer can't be talked to.
    Protocol(String),
    /// Trying again would end the same way.
    Final(ErrorKind),
    /// This endpoint is closing.
    Closing,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable(kind) | Self::Final(kind) => kind.fmt(f),
            Self::Lost(why) | Self::Renewed(why) | Self::Protocol(why) => f.write_str(why),
            Self::Closing => f.write_str("this endpoint is closing"),
        }
    }
}

impl Engine {
    pub(super) fn broken_deadline(&mut self, id: LinkId, why: String) {
        self.fail_link(id, &Failure::Lost(why));
    }

    /// Whether a closed endpoint has still to tell somebody that views of his memory are gone.
    #[must_use]
    pub fn has_last_words(&self) -> bool {
        self.closing && !self.links.is_empty()
    }

    /// Ends a link. Gets on it are tried again or fail, its grants wait for their fences.
    pub(super) fn fail_link(&mut self, id: LinkId, failure: &Failure) {
        let Some(mut link) = self.links.remove(&id) else { return };
        for timer in [link.handshake.take(), link.closes_timer.take(), link.keep_alive_timer.take()] {
            self.timers.cancel(timer);
        }
        self.by_address.retain(|_, other| *other != id);
        self.by_incarnation.retain(|_, other| *other != id);
        if let Some(queue_pair) = &link.queue_pair {
            queue_pair.to_error();
        }
        self.closing_output(id, &mut link, failure);
        self.actions.push_back(Action::Close(id));
        self.forget_waiting(id, &mut link);
        let mappable = link.rail.is_some_and(|rail| self.rails[rail].device.info().capabilities.mappable);
        if let Some(incarnation) = link.incarnation() {
            let closes = std::mem::take(&mut link.closes);
            // A grant may be on its way to this link: what a mapping exposes stays exposed until we say that we do not
            // use it.
            let cancels: Vec<u64> = std::mem::take(&mut link.requests).into_keys().collect();
            let mut left = std::mem::take(&mut link.unconfirmed);
            left.append(Orphans { closes, cancels, mapped: true });
            for (_, said) in link.confirming.drain(..) {
                left.append(said);
            }
            if !mappable {
                left.keep_deliveries();
            }
            if !matches!(failure, Failure::Closing) {
                self.orphans.add(incarnation, left);
            }
            let same = |link: &Link| {
                link.is_open()
                    && link.incarnation() == Some(incarnation)
                    && (link.role == Role::Initiator || self.is_vouched_for(link))
            };
            let other = self.links.iter().find(|(_, link)| same(link)).map(|(other, _)| *other);
            if let Some(other) = other {
                self.by_incarnation.entry(incarnation).or_insert(other);
                self.say_again(other, incarnation);
            }
        }
        self.fence_grants_of(&link);
        if self.fetches.values().any(|fetch| fetch.link == id) {
            self.look_again();
        }
        if link.watched && !self.has_grants(id) {
            self.actions.push_back(Action::UnwatchProcess(id));
        }
        if let Some(rail) = link.rail
            && let Some(queue_pair) = &link.queue_pair
        {
            // Flush completions of this queue pair find no link any more, only their fetches.
            self.queue_pairs.remove(&(rail, queue_pair.number()));
        }
        let refused =
            matches!(failure, Failure::Unreachable(ErrorKind::PeerUnreachable { errno: libc::ECONNREFUSED, .. }));
        if let (State::Dialing, Some(incarnation), []) =
            (link.state, link.target.incarnation, &link.target.addresses[..])
            && refused
        {
            // Its Unix name, which it alone had, is nobody's any more: that process has nothing mapped.
            let _nobody_hears_it = self.orphans.take(incarnation);
        }
        if let Some(older) = link.upgrade_of {
            if let Some(older) = self.links.get_mut(&older) {
                older.note(&format!("not shm: {failure}"));
                older.fell_back = true;
            }
            self.agree(older);
        }
        let gets: Vec<OperationId> = link.gets.iter().copied().collect();
        for get in gets {
            self.link_failed_under(get, failure);
        }
    }

    /// What a link that ends still owes its peer goes out with its end: leases closed, a goodbye, a session's reject.
    fn closing_output(&mut self, id: LinkId, link: &mut Link, failure: &Failure) {
        if link.state == State::Dialing {
            return;
        }
        if matches!(link.state, State::Open | State::Broken) && !link.closes.is_empty() {
            // Nobody will answer this time: they are said once more over the next link.
            let _best_effort = link.session.send(&Frame::Close(wire::Close { entries: &link.closes }));
        }
        if matches!(failure, Failure::Closing) && link.is_open() {
            // Which leases live on, in views. Grants that are on their way reach nobody any more: without this list the
            // producer could not tell them from those in use, and would wait for a word that nobody can give.
            let leases: Vec<LeaseId> = link.held.keys().map(|lease| LeaseId::new(*lease)).collect();
            let _too_late = link.session.send(&Frame::KeepAlive(KeepAlive { sent_at: self.now, leases: &leases }));
        }
        let goodbye = match failure {
            Failure::Closing => Some(GoodbyeCode::Closing),
            Failure::Protocol(_) => Some(GoodbyeCode::Protocol),
            Failure::Renewed(_) => Some(GoodbyeCode::Replaced),
            _ => None,
        };
        if let Some(code) = goodbye {
            let _not_established = link.session.send(&Frame::Goodbye(Goodbye { code }));
        }
        let output = link.session.output();
        if !output.is_empty() {
            self.actions.push_back(Action::Last { link: id, bytes: output.to_vec() });
        }
    }

    pub(super) fn close_all_links(&mut self) {
        let ids: Vec<LinkId> = self.links.keys().copied().collect();
        for id in ids {
            self.fail_link(id, &Failure::Closing);
        }
    }
}

pub(super) fn session_failure(error: &SessionError) -> Failure {
    let supported = wire::Versions::SUPPORTED;
    let (code, theirs) = match error {
        SessionError::Rejected { code, versions, .. } => (*code, Some(*versions)),
        SessionError::Refused { code, versions } => (*code, *versions),
        SessionError::Wire(_) | SessionError::Unexpected { .. } => return Failure::Protocol(error.to_string()),
        other => return Failure::Lost(other.to_string()),
    };
    let refused_here = matches!(error, SessionError::Refused { .. });
    Failure::Final(match (code, theirs) {
        (RejectCode::WrongSecret, _) => ErrorKind::WrongSecret,
        (RejectCode::SecretRequired, _) if !refused_here => ErrorKind::SecretRequired,
        (RejectCode::SecretNotExpected, _) if !refused_here => ErrorKind::SecretNotExpected,
        (RejectCode::Version, Some(theirs)) => {
            ErrorKind::VersionMismatch { ours: (supported.min, supported.max), theirs: (theirs.min, theirs.max) }
        }
        _ => return Failure::Lost(error.to_string()),
    })
}
