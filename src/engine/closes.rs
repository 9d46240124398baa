//! What a consumer says of its leases: that they are closed, that requests are cancelled, that it is still there.
//!
//! A producer whose memory is mapped waits for that word, whatever becomes of the link; and one that does not hear of a
//! delivery gives the payload to one consumer more. So it is kept until it is known to have arrived, and said once more
//! over the next link (I11).

use super::Engine;
use super::end::Failure;
use super::gets::{HeldLease, unix_name_of};
use super::link::{Link, LinkId, Target};
use super::orphans::Orphans;
use super::{Tick, Timer};
use towline_control::session::Role;
use towline_control::wire::{self, CloseEntry, Frame, KeepAlive, LeaseId, Outcome};

/// Leases that are reported as closed at once when there are as many; fewer wait a moment for company.
const BATCH: usize = 64;

/// Over the link that is there.
impl Engine {
    /// Reports a lease as closed, with the next frame or after a moment.
    pub(super) fn close_lease_on(&mut self, id: LinkId, entry: CloseEntry) {
        let at = self.now + self.config.times.close_batch;
        let Some(link) = self.links.get_mut(&id) else { return };
        link.held.remove(&entry.lease());
        link.closes.push(entry);
        if link.closes.len() + link.unasked.len() >= BATCH {
            self.send_closes(id);
        } else if link.closes_timer.is_none() {
            link.closes_timer = Some(self.timers.set(at, Timer::Closes(id)));
        }
    }

    /// Gives back a grant that nobody waits for. Not remembered beyond this link: if its request was ours, its cancel is,
    /// and of others any peer could send any number.
    pub(super) fn give_back_unasked(&mut self, id: LinkId, lease: u64) {
        let Some(link) = self.links.get_mut(&id) else { return };
        link.unasked.push(CloseEntry::new(lease, Outcome::Cancelled));
        if link.unasked.len() >= BATCH {
            self.send_closes(id);
        } else if link.closes_timer.is_none() {
            let at = self.now + self.config.times.close_batch;
            link.closes_timer = Some(self.timers.set(at, Timer::Closes(id)));
        }
    }

    pub(super) fn send_closes(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(&id) else { return };
        self.timers.cancel(link.closes_timer.take());
        if !link.closes.is_empty() || !link.unasked.is_empty() {
            let mut entries = std::mem::take(&mut link.closes);
            let mut unasked = std::mem::take(&mut link.unasked);
            self.note_said(id, Orphans { closes: entries.clone(), ..Orphans::default() });
            entries.append(&mut unasked);
            self.send(id, &Frame::Close(wire::Close { entries: &entries }));
            self.confirm_later(id);
        }
    }

    /// Tells the peer that no grant of `request` will be used.
    pub(super) fn cancel_on(&mut self, id: LinkId, request: u64) {
        self.note_said(id, Orphans { cancels: vec![request], ..Orphans::default() });
        self.send(id, &Frame::Cancel(wire::Cancel { request }));
        self.confirm_later(id);
    }

    /// Notes what is being said, until it is known to have arrived: all of it where only our word ends a lease, elsewhere
    /// what was delivered.
    fn note_said(&mut self, id: LinkId, mut said: Orphans) {
        let Some(link) = self.links.get_mut(&id) else { return };
        said.mapped = true;
        if !link.rail.is_some_and(|rail| self.rails[rail].device.info().capabilities.mappable) {
            said.keep_deliveries();
        }
        link.unconfirmed.append(said);
    }

    /// Has a keep-alive follow what was noted: its answer says that it arrived.
    fn confirm_later(&mut self, id: LinkId) {
        const MANY: usize = 1024;
        let Some(link) = self.links.get_mut(&id) else { return };
        if link.unconfirmed.len() >= MANY {
            self.timers.cancel(link.keep_alive_timer.take());
            self.send_keep_alive(id);
        } else if !link.unconfirmed.is_empty() {
            self.start_keep_alive(id);
        }
    }

    /// Keeps leases and waiting gets of `id` alive from now on.
    pub(super) fn start_keep_alive(&mut self, id: LinkId) {
        let at = self.now + self.config.times.lease / 4;
        let Some(link) = self.links.get_mut(&id) else { return };
        if link.keep_alive_timer.is_none() {
            link.keep_alive_timer = Some(self.timers.set(at, Timer::KeepAlive(id)));
        }
    }

    pub(super) fn send_keep_alive(&mut self, id: LinkId) {
        /// Counted, not timed: a process that stood still itself has sent none meanwhile.
        const UNANSWERED: u32 = 2;
        let now = self.now;
        let Some(link) = self.links.get_mut(&id) else { return };
        link.keep_alive_timer = None;
        let idle = link.held.is_empty() && link.requests.is_empty();
        if idle && link.unconfirmed.is_empty() && link.confirming.is_empty() {
            return;
        }
        // Each keep-alive is answered: a peer that leaves several unanswered is not there any more, whatever TCP thinks.
        if link.unanswered >= UNANSWERED {
            let why = "keep-alives were not answered for half a lease";
            self.fail_link(id, &Failure::Lost(why.to_owned()));
            return;
        }
        link.unanswered += 1;
        if !link.unconfirmed.is_empty() {
            link.confirming.push_back((now, std::mem::take(&mut link.unconfirmed)));
        }
        let leases: Vec<LeaseId> = link.held.keys().map(|lease| LeaseId::new(*lease)).collect();
        self.send(id, &Frame::KeepAlive(KeepAlive { sent_at: now, leases: &leases }));
        self.start_keep_alive(id);
    }

    pub(super) fn kept_alive(&mut self, id: LinkId, echo: u64, lease: Tick, unknown: &[u64]) {
        let margin = self.config.times.drift_margin;
        let Some(link) = self.links.get_mut(&id) else { return };
        // A stamp that we never sent would lengthen the lease beyond what the producer grants.
        if echo > self.now {
            return;
        }
        // Frames arrive in order: what was said before that keep-alive has arrived.
        while link.confirming.front().is_some_and(|(said, _)| *said <= echo) {
            link.confirming.pop_front();
        }
        let until = echo.saturating_add(lease.min(self.config.times.lease.saturating_mul(100))).saturating_sub(margin);
        for (held, deadline) in &mut link.held {
            if !unknown.contains(held) {
                *deadline = (*deadline).max(until);
            }
        }
    }
}

/// Over the next one.
impl Engine {
    /// Says what an earlier link to the same endpoint may not have brought there.
    pub(super) fn say_again(&mut self, id: LinkId, incarnation: [u8; 16]) {
        let Some(link) = self.links.get(&id) else { return };
        // What only our word ends is said to the endpoint itself, and not to whoever has its name.
        if !self.is_vouched_for(link) && (link.role == Role::Responder || self.orphans.is_mapped(incarnation)) {
            return;
        }
        let Some(orphans) = self.orphans.take(incarnation) else { return };
        for entry in orphans.closes {
            self.close_lease_on(id, entry);
        }
        for request in orphans.cancels {
            self.cancel_on(id, request);
        }
    }

    /// Reports a lease as closed: over the link that it was granted on, over another to the same endpoint or, if there is
    /// none, over the next one. A peer on this host waits for the word of whoever mapped its memory, so it is dialled for
    /// that.
    pub(super) fn close_lease_of(&mut self, held: HeldLease, outcome: Outcome) {
        let entry = CloseEntry::new(held.lease, outcome);
        if self.links.get(&held.link).is_some_and(Link::is_open) {
            self.close_lease_on(held.link, entry);
            return;
        }
        let other = self.by_incarnation.get(&held.peer).copied();
        let speaks = |link: &Link| link.is_open() && self.is_vouched_for(link);
        if let Some(other) = other.filter(|other| self.links.get(other).is_some_and(speaks)) {
            self.close_lease_on(other, entry);
            return;
        }
        if !held.mapped && outcome != Outcome::Delivered {
            return; // the producer's own fences end it
        }
        self.orphans.add(held.peer, Orphans { closes: vec![entry], cancels: Vec::new(), mapped: held.mapped });
        if held.mapped && self.has_shm() {
            let unix = Some(unix_name_of(&held.peer));
            let target = Target { addresses: Vec::new(), unix, incarnation: Some(held.peer) };
            let _no_more_links = self.link_to(&target);
        }
    }
}
