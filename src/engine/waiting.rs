//! Gets of peers that have not been answered yet.

use super::link::{Link, LinkId};
use super::payloads::PayloadId;
use super::timers::TimerId;
use super::{Engine, Tick, Timer};
use crate::error::Gone;
use std::collections::BTreeSet;
use towline_control::wire::{self, Frame, Get, GetFlags, RefuseCode};

/// Cancelled requests that are remembered until they come (I9).
const MAX_UNWANTED: usize = 4096;

/// A get of a peer that has not been answered.
#[derive(Debug, Clone)]
pub(super) struct WaitingGet {
    request: u64,
    pub(super) target: TargetOwned,
    pub(super) sent_at: u64,
    pub(super) max_eager: u32,
    pub(super) view: bool,
    /// How long its consumer waits.
    wait: Tick,
    timer: Option<TimerId>,
}

#[derive(Debug, Clone)]
pub(super) enum TargetOwned {
    Key(Vec<u8>),
    Payload(PayloadId),
}

impl WaitingGet {
    pub(super) fn from_frame(frame: &Get<'_>) -> Self {
        Self {
            request: frame.request,
            target: match frame.target {
                wire::Target::Key(key) => TargetOwned::Key(key.to_vec()),
                wire::Target::Slot { slot, generation } => TargetOwned::Payload(PayloadId { slot, generation }),
            },
            sent_at: frame.sent_at,
            max_eager: frame.max_eager,
            view: frame.flags.contains(GetFlags::VIEW),
            wait: frame.wait_us.saturating_mul(1000),
            timer: None,
        }
    }
}

impl Engine {
    pub(super) fn get_received(&mut self, id: LinkId, get: WaitingGet) {
        let limits = &self.config.limits;
        let (most_leases, most_waiting) = (limits.leases_per_peer, limits.waiting_per_peer);
        let Some(link) = self.links.get_mut(&id) else { return };
        link.newest_stamp = link.newest_stamp.max(get.sent_at);
        let request = get.request;
        if link.waiting.contains_key(&request) {
            return; // it came twice (I11)
        }
        let peer = link.incarnation();
        let vouched = self.links.get(&id).is_some_and(|link| self.is_vouched_for(link));
        if let Some(peer) = peer.filter(|_| vouched)
            && self.unwanted.remove(&(peer, request))
        {
            return; // it came after its cancel, which came over a newer link
        }
        let Some(link) = self.links.get(&id) else { return };
        let (granted, asked) = (link.granted.len(), link.waiting.len());
        let Some(account) = link.account else { return };
        let (leases, waiting) = self.holdings.get(&account).map_or((0, 0), |held| (held.leases, held.waiting));
        if granted >= most_leases || leases >= account.most(most_leases) {
            self.refuse(id, request, RefuseCode::TooManyLeases, most_leases as u64, "");
            return;
        }
        if asked >= most_waiting || waiting >= account.most(most_waiting) {
            self.refuse(id, request, RefuseCode::TooManyRequests, most_waiting as u64, "");
            return;
        }
        if self.closing {
            self.refuse(id, request, RefuseCode::Closing, 0, "");
            return;
        }
        let target = get.target.clone();
        if let Some(link) = self.links.get_mut(&id) {
            link.waiting.insert(request, get);
            self.holding(account).waiting += 1;
        }
        match target {
            TargetOwned::Payload(payload) => match self.payload_mut(payload) {
                Some(open) if open.gone.is_none() => {
                    open.waiting.push_back((id, request));
                    self.serve_newest(payload, id);
                }
                _ => self.refuse_gone(id, request, self.gone(payload)),
            },
            TargetOwned::Key(key) => match self.keys.get(&key).map(|slot| self.id_of(*slot)) {
                Some(payload) => {
                    if let Some(open) = self.payload_mut(payload) {
                        open.waiting.push_back((id, request));
                    }
                    self.serve_newest(payload, id);
                }
                None => {
                    self.waiting.entry(key).or_default().push_back((id, request));
                    self.look_at_consumers();
                }
            },
        }
        let now = self.now;
        if let Some(get) = self.links.get_mut(&id).and_then(|link| link.waiting.get_mut(&request)) {
            // A little later than its consumer gives up by itself.
            let at = now.saturating_add(get.wait).saturating_add(self.config.times.drift_margin);
            get.timer = Some(self.timers.set(at, Timer::Waiting(id, request)));
        }
    }

    /// A get has waited for as long as its consumer does; he may be gone without a word.
    pub(super) fn waiting_deadline(&mut self, id: LinkId, request: u64) {
        let get = self.links.get(&id).and_then(|link| link.waiting.get(&request)).cloned();
        if let Some(get) = get {
            self.forget_get(id, &get);
            self.refuse(id, request, RefuseCode::TimedOut, 0, "");
        }
    }

    pub(super) fn no_longer_waiting(&mut self, id: LinkId, request: u64) -> Option<WaitingGet> {
        let link = self.links.get_mut(&id)?;
        let mut get = link.waiting.remove(&request)?;
        self.timers.cancel(get.timer.take());
        if let Some(account) = link.account {
            self.waiting_over(account, 1);
        }
        Some(get)
    }

    /// The peer does not wait for `request` any more.
    pub(super) fn get_cancelled(&mut self, id: LinkId, request: u64) {
        let Some(peer) = self.links.get(&id).and_then(Link::incarnation) else { return };
        // It may have come over an older link, which has ended for the peer and not yet here.
        let vouched = self.links.get(&id).is_some_and(|link| self.is_vouched_for(link));
        let own = |other: LinkId, link: &Link| {
            (other == id || vouched) && link.incarnation() == Some(peer) && link.waiting.contains_key(&request)
        };
        let link = self.links.iter().find(|(other, link)| own(**other, link)).map(|(link, _)| *link);
        if let Some(link) = link
            && let Some(get) = self.no_longer_waiting(link, request)
        {
            self.forget_get(link, &get);
            return;
        }
        // It was granted: over this link, or over one that ended before the grant arrived. It will not be used.
        let granted = self
            .grants
            .iter()
            .find(|(_, grant)| grant.peer == peer && grant.request == request && self.speaks_for(id, grant));
        if let Some(lease) = granted.map(|(lease, _)| *lease) {
            self.close_grant(lease, id, false);
        } else if vouched {
            // Or it is still on its way, over that older link.
            self.unwanted.insert((peer, request));
            if self.unwanted.len() > MAX_UNWANTED {
                self.unwanted.pop_first();
            }
        }
    }

    /// A link has ended with gets of its peer waiting: each queue that one of them is in is gone through once, however
    /// many there are in it.
    pub(super) fn forget_waiting(&mut self, id: LinkId, link: &mut Link) {
        let mut waiting = std::mem::take(&mut link.waiting);
        if let Some(account) = link.account {
            self.waiting_over(account, waiting.len());
        }
        let other = |entry: &(LinkId, u64)| entry.0 != id;
        let mut payloads = BTreeSet::new();
        let mut keys = BTreeSet::new();
        for get in waiting.values_mut() {
            self.timers.cancel(get.timer.take());
            match &get.target {
                TargetOwned::Payload(payload) => drop(payloads.insert(*payload)),
                TargetOwned::Key(key) => drop(keys.insert(key)),
            }
        }
        for key in keys {
            if let Some(queue) = self.waiting.get_mut(key) {
                queue.retain(other);
                if queue.is_empty() {
                    self.waiting.remove(key);
                }
            }
            payloads.extend(self.keys.get(key).map(|slot| self.id_of(*slot)));
        }
        for payload in payloads {
            if let Some(payload) = self.payload_mut(payload) {
                payload.waiting.retain(other);
            }
        }
    }

    fn forget_get(&mut self, id: LinkId, get: &WaitingGet) {
        let other = |entry: &(LinkId, u64)| *entry != (id, get.request);
        let payload = match &get.target {
            TargetOwned::Payload(payload) => Some(*payload),
            TargetOwned::Key(key) => {
                if let Some(queue) = self.waiting.get_mut(key) {
                    queue.retain(other);
                    if queue.is_empty() {
                        self.waiting.remove(key);
                    }
                }
                self.keys.get(key).map(|slot| self.id_of(*slot))
            }
        };
        if let Some(payload) = payload.and_then(|id| self.payload_mut(id)) {
            payload.waiting.retain(other);
        }
    }

    pub(super) fn refuse(&mut self, link: LinkId, request: u64, code: RefuseCode, have: u64, text: &str) {
        let _answered = self.no_longer_waiting(link, request);
        self.send(link, &Frame::Refuse(wire::Refuse { request, code, need: 0, have, text }));
    }

    pub(super) fn refuse_gone(&mut self, link: LinkId, request: u64, gone: Gone) {
        if self.closing {
            self.refuse(link, request, RefuseCode::Closing, 0, "");
        } else {
            self.refuse(link, request, RefuseCode::Gone, gone_code(gone), "");
        }
    }
}

/// The number of a [`Gone`] in a refusal.
fn gone_code(gone: Gone) -> u64 {
    match gone {
        Gone::Unknown => 0,
        Gone::Consumed => 1,
        Gone::Expired => 2,
        Gone::Removed => 3,
        Gone::Replaced => 4,
        Gone::OtherIncarnation => 5,
    }
}

pub(super) fn gone_from_code(code: u64) -> Gone {
    match code {
        1 => Gone::Consumed,
        2 => Gone::Expired,
        3 => Gone::Removed,
        4 => Gone::Replaced,
        5 => Gone::OtherIncarnation,
        _ => Gone::Unknown,
    }
}
