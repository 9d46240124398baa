//! Grants: the leases that peers hold, from their beginning.
//!
//! A grant's life:
//!
//! | state | memory | leaves it by |
//! |---|---|---|
//! | live | the peer may read it | the peer's close; its deadline; the end of its link |
//! | fencing | the peer may still touch it | the fence of its kind (see below); for shared memory the peer's close too |
//!
//! and then its payload is one reader poorer, which is what gives the memory back (I2, I3). Fences by kind: an eager
//! grant exposed nothing and needs none; windows are invalidated; a queue pair whose keys can't be scoped goes to the
//! error state; mapped shared memory waits for the reader's own word or the end of its process, never for time.

use super::binding::Told;
use super::link::{Account, LinkId};
use super::payloads::{Payload, PayloadId};
use super::timers::TimerId;
use super::waiting::TargetOwned;
use super::{Engine, Tick, Timer};
use std::collections::BTreeSet;
use towline_control::wire::{RefuseCode, Segment};
use towline_verbs::{Cause, MemoryWindow, QueuePair};

/// Keys that one lease may have, to count as one.
const KEYS_A_LEASE: usize = 16;

/// A lease that a peer holds.
pub(super) struct Grant {
    pub(super) link: LinkId,
    pub(super) request: u64,
    pub(super) peer: [u8; 16],
    /// For whom it is counted.
    pub(super) account: Account,
    pub(super) payload: PayloadId,
    pub(super) exposure: Exposure,
    pub(super) deadline: Tick,
    pub(super) timer: Option<TimerId>,
    pub(super) fencing: bool,
    /// Whether its holder has said how it ended.
    pub(super) heard: bool,
    /// Whether somebody in its holder's name, but not known to be him, has said that it was delivered: believed only if he
    /// says nothing himself.
    pub(super) hearsay: bool,
    /// How much of the payload its holder has been told to be there.
    pub(super) told: u64,
    /// Whether bytes are lent to him in the place of the payload's.
    pub(super) lent: bool,
    /// As how many leases it counts.
    pub(super) weight: usize,
}

impl Grant {
    pub(super) fn is_fencing(&self) -> bool {
        self.fencing
    }
}

/// How the peer can reach the memory, and so what fences it.
pub(super) enum Exposure {
    /// The bytes travelled in the grant.
    None,
    /// Keys of its own.
    Windows(Vec<MemoryWindow>),
    /// The region's key, over this queue pair.
    Region(QueuePair),
    /// A mapping of the peer's process.
    Mapped,
}

impl Exposure {
    /// As how many leases it counts: keys are few, and a payload of many parts needs as many.
    fn weight(&self) -> usize {
        match self {
            Self::Windows(windows) => windows.len().div_ceil(KEYS_A_LEASE).max(1),
            Self::None | Self::Region(_) | Self::Mapped => 1,
        }
    }
}

impl Engine {
    /// Grants the payload to those who wait for it, as far as it has consumers left.
    pub(super) fn serve(&mut self, id: PayloadId) {
        loop {
            let Some(payload) = self.payload(id) else { return };
            if payload.gone.is_some() || payload.readers >= payload.consumers_left {
                return;
            }
            // One whose link has much to carry already is passed over until its peer has taken some of that.
            let free = |(link, _): &(LinkId, u64)| self.links.get(link).is_none_or(|link| self.has_room(link));
            let next = self.payload(id).and_then(|payload| payload.waiting.iter().position(free));
            let passed = next.unwrap_or(usize::MAX);
            let Some(payload) = self.payload_mut(id) else { return };
            let put_off: BTreeSet<LinkId> = payload.waiting.iter().take(passed).map(|(link, _)| *link).collect();
            let next = next.and_then(|next| payload.waiting.remove(next));
            for link in put_off {
                self.put_off(link);
            }
            let Some((link, request)) = next else { return };
            self.grant(id, link, request);
        }
    }

    /// After a link has opened: nothing waits for that on the producer's side but gets that came before it did.
    pub(super) fn serve_link(&mut self, id: LinkId) {
        let Some(link) = self.links.get(&id) else { return };
        let payloads: BTreeSet<PayloadId> = link
            .waiting
            .values()
            .filter_map(|get| match &get.target {
                TargetOwned::Payload(payload) => Some(*payload),
                TargetOwned::Key(key) => self.keys.get(key).map(|slot| self.id_of(*slot)),
            })
            .collect();
        for payload in payloads {
            if !self.links.get(&id).is_some_and(|link| self.has_room(link)) {
                self.put_off(id); // in its queues nothing else has been waiting for this
                return;
            }
            self.serve(payload);
        }
    }

    /// Serves a get that has come over link `id`, the last of those that wait for `payload`: nothing changes for the others.
    pub(super) fn serve_newest(&mut self, payload: PayloadId, id: LinkId) {
        if self.links.get(&id).is_some_and(|link| self.has_room(link)) {
            self.serve(payload);
        } else {
            self.put_off(id);
        }
    }

    pub(super) fn grant(&mut self, id: PayloadId, link_id: LinkId, request: u64) {
        let lease_time = self.config.times.lease;
        let Some(get) = self.no_longer_waiting(link_id, request) else { return };
        let Some(link) = self.links.get(&link_id) else { return };
        let (Some(peer), Some(account)) = (link.incarnation(), link.account) else { return };
        let echo = link.newest_stamp.max(get.sent_at);
        // What is read one-sided does not wait in the backlog of a peer that is slow to take it. Well below where nothing
        // more is read from him, so that two ends that send each other much do not both wait for the other to read.
        let room = (self.config.limits.backlog / 4).saturating_sub(link.session.backlog());
        let room = room.min(link.session.max_send_frame() as usize);
        let lease = self.next_grant;
        self.next_grant += 1;

        let Some(payload) = self.payloads.get(id.slot as usize).and_then(|entry| entry.payload.as_ref()) else {
            return;
        };
        let complete = payload.watermark == payload.total;
        let room = room.saturating_sub(payload.layout.len() + 512) as u64;
        let eager_limit = u64::from(get.max_eager.min(self.config.limits.eager)).min(room);
        let mut eager = Vec::new();
        let mut segments = Vec::new();
        let exposure = if !get.view && complete && payload.total <= eager_limit {
            eager.reserve(payload.total as usize);
            for buffer in payload.buffers.iter().flatten() {
                eager.extend_from_slice(buffer.as_slice());
            }
            Ok((Exposure::None, false))
        } else {
            self.expose(payload, link_id, get.view, &mut segments)
        };
        let (exposure, lent) = match exposure {
            Ok(exposed) => exposed,
            Err((code, have, text)) => {
                self.refuse(link_id, request, code, have, &text);
                return;
            }
        };
        let told = Told { request, echo, layout: payload.layout.clone(), segments, eager };
        // The producer's end of the lease lies after the consumer's: it begins now, later than the stamp it echoes,
        // and the margin for drifting clocks is added here and taken off there (I4).
        let deadline = self.now + lease_time + self.config.times.drift_margin;
        let timer = self.timers.set(deadline, Timer::Grant(lease));
        let weight = exposure.weight();
        self.grants.insert(
            lease,
            Grant {
                link: link_id,
                request,
                peer,
                account,
                payload: id,
                exposure,
                deadline,
                timer: Some(timer),
                fencing: false,
                heard: false,
                hearsay: false,
                told: 0,
                lent,
                weight,
            },
        );
        if let Some(payload) = self.payload_mut(id) {
            payload.readers += 1;
        }
        self.holding(account).leases += weight;
        if let Some(link) = self.links.get_mut(&link_id) {
            link.granted.insert(lease);
        }
        self.touch(id);
        self.tell_grant(lease, told);
    }

    /// Makes the payload's memory readable for the peer of `link_id`, or what is lent in its place; whether that is so.
    fn expose(
        &self,
        payload: &Payload,
        link_id: LinkId,
        view: bool,
        segments: &mut Vec<Segment>,
    ) -> Result<(Exposure, bool), (RefuseCode, u64, String)> {
        let failed = |error: towline_verbs::Error| match error.cause {
            Cause::Limit { have, .. } => (RefuseCode::TooManyLeases, have, error.to_string()),
            _ => (RefuseCode::Failed, 0, error.to_string()),
        };
        let no_path = || (RefuseCode::NoQueuePair, 0, "no queue pair is agreed on".to_owned());
        let link = self.links.get(&link_id).ok_or_else(no_path)?;
        let (Some(rail), Some(queue_pair)) = (link.rail, &link.queue_pair) else { return Err(no_path()) };
        let rail = &self.rails[rail];
        let capabilities = rail.device.info().capabilities;
        if view && !capabilities.mappable {
            return Err((RefuseCode::Path, 0, format!("{} has no views", link.path)));
        }
        let mut windows = Vec::new();
        let mut lent = false;
        for (part, buffer) in payload.buffers.iter().enumerate() {
            let Some(buffer) = buffer else { continue };
            let (offset, len) = (buffer.offset(), buffer.len() as u64);
            let loan = payload.loans.get(part).and_then(Option::as_ref).filter(|_| capabilities.loans);
            let remote = if capabilities.scoped_keys {
                let window = match loan {
                    Some(loan) => rail.pool.bind_lent(queue_pair, offset, loan),
                    None => rail.pool.bind(queue_pair, offset, len),
                }
                .map_err(failed)?;
                lent |= loan.is_some();
                let remote = window.remote();
                windows.push(window);
                remote
            } else {
                rail.pool.remote(offset, len).map_err(failed)?
            };
            segments.push(Segment::new(remote.address, remote.len, remote.rkey));
        }
        let exposure = if capabilities.mappable {
            Exposure::Mapped
        } else if capabilities.scoped_keys {
            Exposure::Windows(windows)
        } else {
            Exposure::Region(queue_pair.clone())
        };
        Ok((exposure, lent))
    }
}
