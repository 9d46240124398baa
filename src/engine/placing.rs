//! From the producer's answer to the reads: whether the grant is what was asked for, where its bytes go, and whether the
//! producer's memory is there.

use super::gets::{Delivery, HeldLease, Source, Stage, Storage};
use super::link::LinkId;
use super::place::Place;
use super::waiting::gone_from_code;
use super::{Engine, OperationId, Tick, Timer};
use crate::error::Gone;
use crate::layout::Layout;
use crate::{Buffer, ErrorKind, Path, Result};
use std::fmt;
use towline_control::wire::{self, CloseEntry, Outcome, RefuseCode};
use towline_verbs::{Cause, MappedView, QueuePairState, RemoteSlice};

/// The producer's answer, owned.
pub(super) struct GrantReceived {
    request: u64,
    lease: u64,
    echo: u64,
    lease_time: Tick,
    pub(super) watermark: u64,
    total: u64,
    layout: Vec<u8>,
    pub(super) segments: Vec<RemoteSlice>,
    eager: Option<Vec<u8>>,
}

impl GrantReceived {
    pub(super) fn from_frame(frame: &wire::Grant<'_>) -> Self {
        Self {
            request: frame.request,
            lease: frame.lease,
            echo: frame.echo,
            lease_time: frame.lease_us.saturating_mul(1000),
            watermark: frame.watermark,
            total: frame.total_len,
            layout: frame.layout.to_vec(),
            segments: frame
                .segments
                .iter()
                .map(|s| RemoteSlice { address: s.address(), len: s.len(), rkey: s.rkey() })
                .collect(),
            eager: frame.segments.is_empty().then(|| frame.eager.to_vec()),
        }
    }
}

impl fmt::Debug for GrantReceived {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrantReceived").field("lease", &self.lease).field("total", &self.total).finish_non_exhaustive()
    }
}

/// A lease in a get's hands.
#[derive(Debug)]
pub(super) struct Leased {
    pub(super) held: HeldLease,
    pub(super) watermark: u64,
    pub(super) layout: Layout,
    pub(super) segments: Vec<RemoteSlice>,
    eager: Option<Vec<u8>>,
}

impl Engine {
    pub(super) fn grant_received(&mut self, id: LinkId, grant: GrantReceived) {
        let margin = self.config.times.drift_margin;
        let now = self.now;
        let Some(link) = self.links.get_mut(&id) else { return };
        let Some(operation) = link.requests.remove(&grant.request) else {
            // Nobody waits for it any more: it is closed at once, unused (I11).
            self.give_back_unasked(id, grant.lease);
            return;
        };
        // A lease counts from the newest frame of ours that the grant echoes (I4); one that echoes a time that has not
        // come is no lease at all.
        let until =
            if grant.echo <= now { grant.echo.saturating_add(grant.lease_time).saturating_sub(margin) } else { 0 };
        link.held.insert(grant.lease, until);
        let Some(peer) = link.incarnation() else { return };
        let mapped = link.rail.is_some_and(|rail| self.rails[rail].device.info().capabilities.mappable);
        match self.check_grant(operation, &grant) {
            Ok(layout) => {
                let need = layout.destination_len();
                let leased = Leased {
                    held: HeldLease { peer, link: id, lease: grant.lease, mapped },
                    watermark: grant.watermark,
                    layout,
                    segments: grant.segments,
                    eager: grant.eager,
                };
                self.place(operation, leased, need);
            }
            Err(kind) => {
                let outcome =
                    if matches!(kind, ErrorKind::LayoutMismatch { .. }) { Outcome::Corrupt } else { Outcome::Failed };
                self.close_lease_on(id, CloseEntry::new(grant.lease, outcome));
                if let Some(get) = self.gets.get_mut(&operation) {
                    get.stage = Stage::AwaitLink;
                }
                self.finish(operation, Err(kind));
            }
        }
    }

    /// Whether what is granted is what was put, and what was asked for (I5).
    fn check_grant(&self, operation: OperationId, grant: &GrantReceived) -> Result<Layout, ErrorKind> {
        let mismatch = |what| Err(ErrorKind::LayoutMismatch { what });
        let Some(get) = self.gets.get(&operation) else { return mismatch("nobody asked for it") };
        let layout = match Layout::decode(&grant.layout) {
            Ok(layout) => layout,
            Err(what) => return mismatch(what),
        };
        if let Source::Ticket(ticket) = &get.source
            && ticket.layout != layout
        {
            return mismatch("the layout is not the ticket's");
        }
        if layout.payload_len() != grant.total || grant.watermark > grant.total {
            return mismatch("the lengths do not add up");
        }
        match &grant.eager {
            Some(eager) if eager.len() as u64 != grant.total || (get.view && grant.total > 0) => {
                return mismatch("the bytes in the grant");
            }
            Some(_) => {}
            None => {
                let lengths = layout.parts().iter().map(|part| part.len).filter(|len| *len > 0);
                if !lengths.eq(grant.segments.iter().map(|segment| segment.len)) {
                    return mismatch("the segments are not the parts");
                }
                if grant.segments.iter().any(|segment| segment.address.checked_add(segment.len).is_none()) {
                    return mismatch("a segment beyond the end of memory");
                }
            }
        }
        if let Some(destination) = &get.destination {
            let have = towline_verbs::memory::MemoryBacking::len(&**destination);
            let need = layout.destination_len();
            if have < need {
                return Err(ErrorKind::DestinationTooSmall { need, have });
            }
        }
        Ok(layout)
    }

    /// Finds the destination.
    pub(super) fn place(&mut self, operation: OperationId, leased: Leased, need: u64) {
        let Some(get) = self.gets.get_mut(&operation) else { return };
        let name = get.name();
        let place = if get.view || need == 0 {
            None
        } else if let Some(destination) = &get.destination {
            Some(Place::Own(destination.clone()))
        } else {
            match self.pool.allocate(name, need) {
                Ok(buffer) => Some(Place::Pool(buffer)),
                Err(error) if matches!(error.kind(), ErrorKind::PoolFull { .. }) => {
                    get.stage = Stage::AwaitRoom(leased);
                    let wake = self.wake.clone();
                    match self.pool.wait(name, need, move || wake()) {
                        Ok(waiter) => {
                            self.room.insert(operation, waiter);
                        }
                        Err(error) => self.give_up(operation, error.kind().clone()),
                    }
                    return;
                }
                Err(error) => {
                    get.stage = Stage::AwaitRoom(leased);
                    self.give_up(operation, error.kind().clone());
                    return;
                }
            }
        };
        self.placed(operation, leased, place);
    }

    /// Room that was waited for.
    pub(super) fn handle_room(&mut self) {
        if self.room.is_empty() {
            return;
        }
        let ready: Vec<(OperationId, Buffer)> = self
            .room
            .iter()
            .filter_map(|(operation, waiter)| waiter.take().map(|buffer| (*operation, buffer)))
            .collect();
        for (operation, buffer) in ready {
            self.room.remove(&operation);
            let Some(get) = self.gets.get_mut(&operation) else { continue };
            if let Stage::AwaitRoom(leased) = std::mem::replace(&mut get.stage, Stage::AwaitLink) {
                self.placed(operation, leased, Some(Place::Pool(buffer)));
            }
        }
    }

    pub(super) fn leave_room(&mut self, operation: OperationId) {
        if let Some(waiter) = self.room.remove(&operation) {
            waiter.cancel();
        }
    }

    fn placed(&mut self, operation: OperationId, mut leased: Leased, place: Option<Place>) {
        let now = self.now;
        let Some(get) = self.gets.get_mut(&operation) else { return };
        if let Some(eager) = leased.eager.take() {
            // A consumer that stood still may come to read a grant when its lease has gone to another (I4).
            let until =
                get.link.and_then(|link| self.links.get(&link)).and_then(|link| link.held.get(&leased.held.lease));
            let stored = match place {
                _ if until.is_none_or(|until| *until <= now) => Err(ErrorKind::LeaseExpired),
                Some(place) => place.fill(&leased.layout, &eager),
                None => Ok(Storage::Empty),
            };
            self.deliver(operation, leased.held.lease, leased.layout, stored);
        } else {
            get.stage = Stage::AwaitRemote(leased, place, now);
            self.try_remote(operation);
        }
    }

    /// Maps or reads, if the queue pair and the producer's memory are there; otherwise looks again soon.
    pub(super) fn try_remote(&mut self, operation: OperationId) {
        const PATIENCE: Tick = 5_000_000_000;
        const LOOK_AGAIN: Tick = 500_000;
        let now = self.now;
        let Some(get) = self.gets.get_mut(&operation) else { return };
        let (view, link_id) = (get.view, get.link);
        let Stage::AwaitRemote(leased, place, since) = &mut get.stage else { return };
        let Some(link_id) = link_id else { return };
        let Some(link) = self.links.get(&link_id) else { return };
        let (Some(rail), Some(queue_pair)) = (link.rail, &link.queue_pair) else { return };
        let mappable = self.rails[rail].device.info().capabilities.mappable;
        let views = match queue_pair.state() {
            // What happened to it is found and dealt with for the whole link.
            QueuePairState::Error => return,
            QueuePairState::Reset | QueuePairState::Connecting => None,
            QueuePairState::ReadyToSend if mappable => {
                let views: Result<Vec<MappedView>, _> =
                    leased.segments.iter().map(|segment| queue_pair.map(*segment)).collect();
                match views {
                    Ok(views) => Some(views),
                    // Its segment is on its way; or its end of the queue pair is gone, which the link is about to learn.
                    Err(error)
                        if matches!(
                            error.cause,
                            Cause::NotFound { .. } | Cause::Disconnected | Cause::State { .. }
                        ) && now < *since + PATIENCE =>
                    {
                        None
                    }
                    Err(error) => {
                        self.give_up(operation, ErrorKind::Verbs(error));
                        return;
                    }
                }
            }
            QueuePairState::ReadyToSend => Some(Vec::new()),
        };
        let Some(views) = views else {
            self.remote_waits.insert(operation);
            self.timers.set(now + LOOK_AGAIN, Timer::Remote(operation));
            return;
        };
        self.remote_waits.remove(&operation);
        let place = place.take();
        let Stage::AwaitRemote(leased, ..) = std::mem::replace(&mut get.stage, Stage::AwaitLink) else { return };
        if view {
            let mut views = views.into_iter();
            let views =
                leased.layout.parts().iter().map(|part| if part.len == 0 { None } else { views.next() }).collect();
            self.deliver_view(operation, leased, views);
        } else if let Some(place) = place {
            self.start_fetch(operation, link_id, leased, place);
        } else {
            self.deliver(operation, leased.held.lease, leased.layout, Ok(Storage::Empty));
        }
    }

    /// Looks again at gets whose remote memory was not there, after devices made progress.
    pub(super) fn look_at_remotes(&mut self) {
        for operation in std::mem::take(&mut self.remote_waits) {
            self.try_remote(operation);
        }
    }

    fn deliver_view(&mut self, operation: OperationId, leased: Leased, views: Vec<Option<MappedView>>) {
        let total = leased.layout.payload_len();
        if leased.watermark < total {
            // A view of what is not there yet could be read too early: the bytes are waited for.
            if let Some(get) = self.gets.get_mut(&operation) {
                get.stage = Stage::AwaitRemote(leased, None, self.now);
            }
            self.remote_waits.insert(operation);
            return;
        }
        let delivery = self.delivery(operation, leased.layout, Storage::Views(views), Some(leased.held));
        self.finish(operation, Ok(delivery));
    }

    /// A get's bytes are all there: the lease is closed and the result given, unless the lease had run out (I4).
    pub(super) fn deliver(
        &mut self,
        operation: OperationId,
        lease: u64,
        layout: Layout,
        storage: Result<Storage, ErrorKind>,
    ) {
        let link = self.gets.get(&operation).and_then(|get| get.link);
        let outcome = if storage.is_ok() { Outcome::Delivered } else { Outcome::Failed };
        if let Some(link) = link {
            self.close_lease_on(link, CloseEntry::new(lease, outcome));
        }
        let result = storage.map(|storage| self.delivery(operation, layout, storage, None));
        self.finish(operation, result);
    }

    pub(super) fn delivery(
        &self,
        operation: OperationId,
        layout: Layout,
        storage: Storage,
        lease: Option<HeldLease>,
    ) -> Delivery {
        let get = self.gets.get(&operation);
        let link = get.and_then(|get| get.link).and_then(|link| self.links.get(&link));
        let bytes = layout.payload_len();
        Delivery {
            layout,
            storage,
            path: link.map_or(Path::Tcp, |link| link.path),
            reason: link.map_or_else(String::new, |link| link.reason.clone()),
            rails: 1,
            retries: get.map_or(0, |get| get.tries + get.renewals),
            fallback_bytes: if link.is_some_and(|link| link.fell_back) { bytes } else { 0 },
            lease,
        }
    }

    pub(super) fn refused(&mut self, id: LinkId, request: u64, code: RefuseCode, _need: u64, have: u64, text: String) {
        let Some(link) = self.links.get_mut(&id) else { return };
        let Some(operation) = link.requests.remove(&request) else { return };
        let path = link.path;
        let Some(get) = self.gets.get_mut(&operation) else { return };
        get.stage = Stage::AwaitLink;
        let kind = match code {
            RefuseCode::Gone => ErrorKind::Gone(gone_from_code(have)),
            RefuseCode::Removed => ErrorKind::Gone(Gone::Removed),
            RefuseCode::TimedOut => {
                ErrorKind::TimedOut { waiting_for: "a payload to be put under the key", quarantined: 0 }
            }
            RefuseCode::TooManyLeases => ErrorKind::Busy { what: "leases at that producer", limit: have },
            RefuseCode::TooManyRequests => ErrorKind::Busy { what: "gets that wait at that producer", limit: have },
            RefuseCode::Path => ErrorKind::PathUnsuitable { path, lacks: "views" },
            RefuseCode::Closing => ErrorKind::PeerLost { why: "it is closing".to_owned() },
            other => {
                let text = if text.is_empty() { other.to_string() } else { format!("{other}: {text}") };
                ErrorKind::PeerLost { why: text }
            }
        };
        self.finish(operation, Err(kind));
    }

    pub(super) fn watermark_received(&mut self, id: LinkId, lease: u64, watermark: u64) {
        self.raise_fetch(id, lease, watermark);
        let waiting = self.gets.iter_mut().find_map(|(operation, get)| match &mut get.stage {
            Stage::AwaitRoom(leased) | Stage::AwaitRemote(leased, ..)
                if get.link == Some(id) && leased.held.lease == lease =>
            {
                leased.watermark = leased.watermark.max(watermark.min(leased.layout.payload_len()));
                Some(*operation)
            }
            _ => None,
        });
        if let Some(operation) = waiting {
            self.remote_again(operation);
        }
    }
}
