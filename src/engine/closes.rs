//! What a consumer says of its leases: that they are closed, that requests are cancelled, that it is still there.
//!
//! A producer whose memory is mapped waits for that word, whatever becomes of the link: so it is kept until it is known
//! to have arrived, and said once more over the next link (I11).

use super::Engine;
use super::end::Failure;
use super::gets::unix_name_of;
use super::link::{Link, LinkId, Target};
use super::{Tick, Timer};
use towline_control::wire::{self, CloseEntry, Frame, KeepAlive, LeaseId};

/// Leases of a peer to which no link is open at the moment.
#[derive(Debug, Default)]
pub(super) struct Orphans {
    pub(super) closes: Vec<CloseEntry>,
    /// Requests whose grants, if there were any, nobody here will use.
    pub(super) cancels: Vec<u64>,
}

impl Orphans {
    pub(super) fn is_empty(&self) -> bool {
        self.closes.is_empty() && self.cancels.is_empty()
    }
}

/// Closed leases kept for peers to which no link is open.
const MAX_ORPHANS: usize = 4096;

/// Over the link that is there.
impl Engine {
    /// Reports a lease as closed, with the next frame or after a moment.
    pub(super) fn close_lease_on(&mut self, id: LinkId, entry: CloseEntry) {
        const BATCH: usize = 64;
        let at = self.now + self.config.times.close_batch;
        let Some(link) = self.links.get_mut(&id) else { return };
        link.held.remove(&entry.lease());
        link.closes.push(entry);
        if link.closes.len() >= BATCH {
            self.send_closes(id);
        } else if link.closes_timer.is_none() {
            link.closes_timer = Some(self.timers.set(at, Timer::Closes(id)));
        }
    }

    pub(super) fn send_closes(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(&id) else { return };
        self.timers.cancel(link.closes_timer.take());
        if !link.closes.is_empty() {
            let entries = std::mem::take(&mut link.closes);
            self.note_said(id, |said| said.closes.extend_from_slice(&entries));
            self.send(id, &Frame::Close(wire::Close { entries: &entries }));
            self.confirm_later(id);
        }
    }

    /// Tells the peer that no grant of `request` will be used.
    pub(super) fn cancel_on(&mut self, id: LinkId, request: u64) {
        self.note_said(id, |said| said.cancels.push(request));
        self.send(id, &Frame::Cancel(wire::Cancel { request }));
        self.confirm_later(id);
    }

    /// Notes what is being said where only our word ends a lease, until it is known to have arrived. Elsewhere the peer
    /// fences by itself what it exposed over a link that ends.
    fn note_said(&mut self, id: LinkId, note: impl FnOnce(&mut Orphans)) {
        let Some(link) = self.links.get_mut(&id) else { return };
        if link.rail.is_some_and(|rail| self.rails[rail].device.info().capabilities.mappable) {
            note(&mut link.unconfirmed);
        }
    }

    /// Has a keep-alive follow what was noted: its answer says that it arrived.
    fn confirm_later(&mut self, id: LinkId) {
        const MANY: usize = 1024;
        let Some(link) = self.links.get_mut(&id) else { return };
        if link.unconfirmed.closes.len() + link.unconfirmed.cancels.len() >= MANY {
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
        let Some(orphans) = self.orphans.remove(&incarnation) else { return };
        for entry in orphans.closes {
            self.close_lease_on(id, entry);
        }
        for request in orphans.cancels {
            self.cancel_on(id, request);
        }
    }

    /// Reports a lease of `peer` as closed: over its link or, if there is none, over the next one. A peer on this host
    /// waits for the word of whoever mapped its memory, so it is dialled for that.
    pub(super) fn close_lease_of(&mut self, peer: [u8; 16], entry: CloseEntry) {
        let link = self.by_incarnation.get(&peer).copied();
        if let Some(link) = link.filter(|link| self.links.get(link).is_some_and(Link::is_open)) {
            self.close_lease_on(link, entry);
            return;
        }
        if !self.has_room_for_orphans() {
            return; // the producer's own fences end what is forgotten here: windows by time, mappings with this process
        }
        self.orphans.entry(peer).or_default().closes.push(entry);
        if self.has_shm() {
            let target = Target { addresses: Vec::new(), unix: Some(unix_name_of(&peer)), incarnation: Some(peer) };
            let _no_more_links = self.link_to(&target);
        }
    }

    pub(super) fn has_room_for_orphans(&self) -> bool {
        self.orphans.values().map(|orphans| orphans.closes.len() + orphans.cancels.len()).sum::<usize>() < MAX_ORPHANS
    }
}
