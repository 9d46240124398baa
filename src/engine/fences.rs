//! The ends of grants: by the reader's word, by time, by the end of its link or process; each after its fence (I3).

use super::end::Failure;
use super::grants::Exposure;
use super::link::{Link, LinkId};
use super::payloads::PayloadId;
use super::{Action, Engine, Timer};
use crate::error::Gone;
use towline_control::wire::{self, CloseEntry, Frame, LeaseId, Outcome};
use towline_verbs::MemoryWindow;

/// Leases that are remembered after their fence until their holders say how they ended (I9).
const MAX_UNHEARD: usize = 4096;

impl Engine {
    pub(super) fn closes_received(&mut self, id: LinkId, entries: &[CloseEntry]) {
        let Some(peer) = self.links.get(&id).and_then(Link::incarnation) else { return };
        for entry in entries {
            let (lease, delivered) = (entry.lease(), entry.outcome() == Outcome::Delivered);
            // A lease is its holder's to close, over whichever link he has now.
            let theirs = self.grants.get(&lease).is_some_and(|grant| self.speaks_for(id, grant));
            match self.grants.get_mut(&lease) {
                Some(_) if theirs => self.close_grant(lease, id, delivered),
                Some(grant) => grant.hearsay |= delivered && grant.peer == peer,
                // It was fenced before this word came: a consumer has had the payload all the same.
                None if delivered => {
                    if self.unheard.get(&lease).is_some_and(|(holder, _)| *holder == peer)
                        && let Some((_, payload)) = self.unheard.remove(&lease)
                    {
                        self.consumed(payload);
                    }
                }
                None => {} // it was closed before
            }
        }
    }

    pub(super) fn keep_alive_received(&mut self, id: LinkId, stamp: u64, leases: &[u64]) {
        let now = self.now;
        let (lease, margin) = (self.config.times.lease, self.config.times.drift_margin);
        let Some(link) = self.links.get_mut(&id) else { return };
        link.newest_stamp = link.newest_stamp.max(stamp);
        let mut unknown = Vec::new();
        for number in leases {
            let theirs = self.grants.get(number).is_some_and(|grant| self.speaks_for(id, grant) && !grant.fencing);
            match self.grants.get_mut(number) {
                Some(grant) if theirs => grant.deadline = now + lease + margin,
                _ => unknown.push(LeaseId::new(*number)),
            }
        }
        self.send(
            id,
            &Frame::KeepAliveAck(wire::KeepAliveAck { echo: stamp, lease_us: lease / 1000, unknown: &unknown }),
        );
    }

    pub(super) fn grant_deadline(&mut self, lease: u64) {
        let now = self.now;
        let Some(grant) = self.grants.get_mut(&lease) else { return };
        grant.timer = None;
        if grant.fencing {
            return;
        }
        if grant.deadline > now {
            let at = grant.deadline;
            grant.timer = Some(self.timers.set(at, Timer::Grant(lease))); // it was renewed meanwhile
        } else if matches!(grant.exposure, Exposure::Mapped) {
            // Time is no fence for a mapping: the reader's word or the end of its process is awaited.
            grant.fencing = true;
        } else if let (Exposure::Region(_), link) = (&grant.exposure, grant.link) {
            // Only the end of the queue pair takes a region's key back. What else uses it goes on over another link.
            self.fail_link(link, &Failure::Renewed("a lease ran out, which ends with its queue pair alone".to_owned()));
            if self.grants.get(&lease).is_some_and(|grant| !grant.fencing) {
                self.start_fence(lease);
            }
        } else {
            self.start_fence(lease);
        }
    }

    /// A link has ended: what it granted is fenced.
    pub(super) fn fence_grants_of(&mut self, link: &Link) {
        for lease in link.granted.clone() {
            match self.grants.get_mut(&lease) {
                // The reader's word may still come, over the next link; or its process ends.
                Some(grant) if matches!(grant.exposure, Exposure::Mapped) => grant.fencing = true,
                Some(_) => self.start_fence(lease),
                None => {}
            }
        }
    }

    pub(super) fn fence_by_process(&mut self, id: LinkId) {
        let ended: Vec<u64> = self
            .grants
            .iter()
            .filter(|(_, grant)| grant.link == id && matches!(grant.exposure, Exposure::Mapped))
            .map(|(lease, _)| *lease)
            .collect();
        for lease in ended {
            self.end_grant_of_the_gone(lease);
        }
    }

    /// The peer of link `id` leaves and has said which leases it holds on to: it will use no other of this link.
    pub(super) fn end_grants_but(&mut self, id: LinkId, held: &[u64]) {
        let over: Vec<u64> = self
            .grants
            .iter()
            .filter(|(lease, grant)| {
                grant.link == id && matches!(grant.exposure, Exposure::Mapped) && !held.contains(lease)
            })
            .map(|(lease, _)| *lease)
            .collect();
        for lease in over {
            self.end_grant_of_the_gone(lease);
        }
    }

    /// Whether leases are left that were granted over link `id`.
    pub(super) fn has_grants(&self, id: LinkId) -> bool {
        self.grants.values().any(|grant| grant.link == id)
    }

    fn start_fence(&mut self, lease: u64) {
        self.never_told(lease);
        let Some(grant) = self.grants.get_mut(&lease) else { return };
        grant.fencing = true;
        let fenced = match &grant.exposure {
            Exposure::None => true,
            Exposure::Windows(windows) => invalidated(windows),
            Exposure::Region(queue_pair) => {
                queue_pair.to_error();
                queue_pair.is_fenced()
            }
            Exposure::Mapped => false,
        };
        if fenced {
            self.end_grant(lease);
        } else {
            self.look_again();
        }
    }

    /// Has fences looked at a moment later.
    pub(super) fn look_again(&mut self) {
        if !self.fences_timer {
            self.fences_timer = true;
            self.timers.set(self.now + self.config.times.fence_poll, Timer::Fences);
        }
    }

    pub(super) fn look_at_fences(&mut self) {
        self.fences_timer = false;
        let waiting: Vec<u64> = self
            .grants
            .iter()
            .filter(|(_, grant)| grant.fencing && !matches!(grant.exposure, Exposure::Mapped))
            .map(|(lease, _)| *lease)
            .collect();
        for lease in waiting {
            self.start_fence(lease);
        }
        if self.fence_orphaned_fetches() {
            self.look_again();
        }
    }

    /// Its holder says that he is done. That word frees what he could only read: keys of its own are taken back besides,
    /// and where a copier is still inside, its leaving is awaited.
    pub(super) fn close_grant(&mut self, lease: u64, over: LinkId, delivered: bool) {
        let Some(grant) = self.grants.get_mut(&lease) else { return };
        let counts = delivered && !grant.heard;
        grant.heard = true;
        let payload = grant.payload;
        if counts {
            self.consumed(payload);
        }
        let Some(grant) = self.grants.get(&lease) else { return };
        let inside = match &grant.exposure {
            Exposure::Windows(windows) => !invalidated(windows),
            // His word came past requests of his that may still be on their way over the older queue pair.
            Exposure::Region(queue_pair) => (grant.fencing || grant.link != over) && !queue_pair.is_fenced(),
            Exposure::None | Exposure::Mapped => false,
        };
        if inside {
            self.start_fence(lease);
        } else {
            self.end_grant(lease);
        }
    }

    /// Its holder can't touch the memory any more and will say nothing more about it.
    fn end_grant_of_the_gone(&mut self, lease: u64) {
        if let Some(grant) = self.grants.get_mut(&lease) {
            grant.heard = true;
        }
        self.end_grant(lease);
    }

    /// The peer can't touch the memory of `lease` any more.
    fn end_grant(&mut self, lease: u64) {
        let Some(mut grant) = self.grants.remove(&lease) else { return };
        self.unbound.remove(&lease);
        self.timers.cancel(grant.timer.take());
        if let Some(link) = self.links.get_mut(&grant.link) {
            link.granted.remove(&lease);
        }
        if matches!(grant.exposure, Exposure::Mapped)
            && !self.links.contains_key(&grant.link)
            && !self.has_grants(grant.link)
        {
            self.actions.push_back(Action::UnwatchProcess(grant.link));
        }
        let id = grant.payload;
        self.lease_over(grant.account, grant.weight);
        if !grant.heard && !grant.hearsay {
            self.unheard.insert(lease, (grant.peer, id));
            if self.unheard.len() > MAX_UNHEARD {
                self.unheard.pop_first();
            }
        }
        if let Some(payload) = self.payload_mut(id) {
            payload.readers -= 1;
        }
        if !grant.heard && grant.hearsay {
            self.consumed(id);
        }
        self.touch(id);
        self.collect_payload(id);
        self.serve(id);
    }

    /// One consumer fewer to come.
    fn consumed(&mut self, id: PayloadId) {
        let Some(payload) = self.payload_mut(id) else { return };
        payload.consumers_left = payload.consumers_left.saturating_sub(1);
        if payload.consumers_left == 0 {
            self.withdraw(id, Gone::Consumed);
        }
    }
}

/// Takes keys back; whether nobody is inside any more.
fn invalidated(windows: &[MemoryWindow]) -> bool {
    // Every window is asked, also after one that is not free yet.
    windows.iter().filter(|window| !window.invalidate()).count() == 0
}
