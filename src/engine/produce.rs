//! The producer's side: payloads, who waits for them, and the leases granted on them.
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

use super::link::{Link, LinkId};
use super::timers::TimerId;
use super::{Action, Engine, OperationId, Tick, Timer};
use crate::error::Gone;
use crate::layout::{DType, Layout};
use crate::{Buffer, Error, ErrorKind, Result};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use towline_control::wire::{
    self, CloseEntry, Frame, Get, GetFlags, GrantFlags, LeaseId, Outcome, RefuseCode, Segment,
};
use towline_verbs::{MemoryWindow, QueuePair};

/// Names a payload of this endpoint's present incarnation (I4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PayloadId {
    /// Its place in the table.
    pub slot: u32,
    /// How often the place was used before.
    pub generation: u32,
}

/// How a payload is published.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PutOptions {
    /// How many consumers it is for; it is gone when as many have had it.
    pub consumers: u32,
    /// Nanoseconds from its last use to its end; never while a lease is live.
    pub time_to_live: Tick,
}

impl Default for PutOptions {
    fn default() -> Self {
        Self { consumers: 1, time_to_live: 300_000_000_000 }
    }
}

/// One part of a payload to be published.
#[derive(Debug)]
pub struct NewPart<'a> {
    /// Its name.
    pub name: &'a str,
    /// Type of its elements.
    pub dtype: DType,
    /// Extent of each dimension.
    pub shape: &'a [u64],
    /// Its bytes; `None` for none at all.
    pub buffer: Option<Buffer>,
}

/// A slot of the payload table.
#[derive(Debug)]
pub(super) struct PayloadSlot {
    generation: u32,
    /// What became of the payload of the generation before.
    last: Gone,
    payload: Option<Payload>,
}

impl PayloadSlot {
    pub(super) fn is_open(&self) -> bool {
        self.payload.as_ref().is_some_and(|payload| payload.gone.is_none())
    }
}

struct Payload {
    key: Vec<u8>,
    layout: Vec<u8>,
    buffers: Vec<Option<Buffer>>,
    total: u64,
    watermark: u64,
    consumers_left: u32,
    readers: u32,
    /// Whether its producer is still copying bytes in: it keeps its memory until he is done.
    filling: bool,
    /// Why it can't be got any more, though readers may still hold it.
    gone: Option<Gone>,
    waiting: VecDeque<(LinkId, u64)>,
    time_to_live: Tick,
    timer: Option<TimerId>,
}

impl fmt::Debug for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Payload").field("total", &self.total).field("readers", &self.readers).finish_non_exhaustive()
    }
}

/// A lease that a peer holds.
pub(super) struct Grant {
    link: LinkId,
    request: u64,
    peer: [u8; 16],
    payload: PayloadId,
    exposure: Exposure,
    deadline: Tick,
    timer: Option<TimerId>,
    fencing: bool,
}

impl Grant {
    pub(super) fn is_fencing(&self) -> bool {
        self.fencing
    }
}

/// How the peer can reach the memory, and so what fences it.
enum Exposure {
    /// The bytes travelled in the grant.
    None,
    /// Keys of its own.
    Windows(Vec<MemoryWindow>),
    /// The region's key, over this queue pair.
    Region(QueuePair),
    /// A mapping of the peer's process.
    Mapped,
}

/// A get of a peer that has not been answered.
#[derive(Debug, Clone)]
pub(super) struct WaitingGet {
    request: u64,
    target: TargetOwned,
    sent_at: u64,
    max_eager: u32,
    view: bool,
    /// How long its consumer waits.
    wait: Tick,
    timer: Option<TimerId>,
}

#[derive(Debug, Clone)]
enum TargetOwned {
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

/// An operation that waits until gets wait for a key.
pub(super) struct AwaitConsumers {
    key: Vec<u8>,
    count: usize,
    timer: TimerId,
    done: Option<Result<()>>,
}

impl AwaitConsumers {
    pub(super) fn is_done(&self) -> bool {
        self.done.is_some()
    }
}

/// Publishing.
impl Engine {
    /// Publishes a payload whose first `watermark` bytes are there already (all of them when its parts are finished
    /// buffers: `None`); with a watermark, [`filled`](Self::filled) must be called in the end. Another payload under the same key is replaced: it can't be got any more, its readers are not
    /// disturbed.
    ///
    /// # Errors
    /// For keys, parts and limits that are not allowed; the buffers are given back to the pool.
    pub fn put(
        &mut self,
        now: Tick,
        key: &[u8],
        parts: Vec<NewPart<'_>>,
        watermark: Option<u64>,
        options: &PutOptions,
    ) -> Result<(PayloadId, Layout)> {
        const PUT: &str = "put";
        self.advance(now);
        self.check_open(PUT)?;
        let fail = |kind| Err(Error::new(PUT, kind));
        self.check_key(PUT, key)?;
        if options.consumers == 0 {
            return fail(ErrorKind::BadOption {
                option: "consumers",
                why: "a payload is for one consumer or more".into(),
            });
        }
        if parts.is_empty() {
            return fail(ErrorKind::PartCount { count: 0, max: crate::layout::MAX_PARTS });
        }
        let mut layout = Layout::default();
        let mut buffers = Vec::with_capacity(parts.len());
        for (index, part) in parts.into_iter().enumerate() {
            if part.buffer.as_ref().is_some_and(|buffer| !std::sync::Arc::ptr_eq(buffer.pool(), &self.pool)) {
                return fail(ErrorKind::ForeignBuffer { part: index });
            }
            let len = part.buffer.as_ref().map_or(0, Buffer::len) as u64;
            layout.push(part.name, part.dtype, part.shape, len).map_err(|kind| Error::new(PUT, kind))?;
            buffers.push(part.buffer);
        }
        let total = layout.payload_len();
        let mut encoded = Vec::new();
        layout.encode(&mut encoded);
        let older = self.keys.get(key).and_then(|slot| self.payloads[*slot as usize].payload.as_ref());
        let makes_room = older.is_some_and(|older| older.readers == 0 && !older.filling);
        let limit = self.config.limits.payloads;
        if self.free_slots.is_empty() && self.payloads.len() >= limit && !makes_room {
            return fail(ErrorKind::Busy { what: "payloads", limit: limit as u64 });
        }
        self.replace_key(key);
        let slot = self.free_slot();
        let entry = &mut self.payloads[slot as usize];
        let id = PayloadId { slot, generation: entry.generation };
        entry.payload = Some(Payload {
            key: key.to_vec(),
            layout: encoded,
            buffers,
            total,
            watermark: watermark.unwrap_or(total).min(total),
            consumers_left: options.consumers,
            readers: 0,
            filling: watermark.is_some(),
            gone: None,
            waiting: VecDeque::new(),
            time_to_live: options.time_to_live,
            timer: None,
        });
        self.keys.insert(key.to_vec(), slot);
        self.stats.puts += 1;
        self.touch(id);
        if let Some(waiting) = self.waiting.remove(key)
            && let Some(payload) = self.payload_mut(id)
        {
            payload.waiting = waiting;
        }
        self.serve(id);
        Ok((id, layout))
    }

    /// More of a payload is there: its first `watermark` bytes, counted over its parts in order without padding.
    /// Nothing if it is gone meanwhile.
    pub fn raise_watermark(&mut self, now: Tick, id: PayloadId, watermark: u64) {
        self.advance(now);
        let Some(payload) = self.payload_mut(id) else { return };
        if watermark <= payload.watermark {
            return;
        }
        payload.watermark = watermark.min(payload.total);
        let watermark = payload.watermark;
        let readers: Vec<(u64, LinkId)> = self
            .grants
            .iter()
            .filter(|(_, grant)| grant.payload == id && !grant.fencing)
            .map(|(lease, grant)| (*lease, grant.link))
            .collect();
        for (lease, link) in readers {
            self.send(link, &Frame::Watermark(wire::Watermark { lease, watermark }));
        }
    }

    /// Whoever published a payload with a watermark copies nothing more into it; every such payload needs this call.
    pub fn filled(&mut self, now: Tick, id: PayloadId) {
        self.advance(now);
        if let Some(payload) = self.payload_mut(id) {
            payload.filling = false;
            self.collect_payload(id);
        }
    }

    /// Takes a payload out: it can't be got any more. Readers that have it keep it until they are done.
    ///
    /// # Errors
    /// [`ErrorKind::Gone`] when it is not there (any more).
    pub fn remove(&mut self, now: Tick, id: PayloadId) -> Result<()> {
        self.advance(now);
        match self.payload_mut(id) {
            Some(payload) if payload.gone.is_none() => {
                self.withdraw(id, Gone::Removed);
                Ok(())
            }
            _ => Err(Error::new("remove", ErrorKind::Gone(self.gone(id)))),
        }
    }

    /// Takes out the payload under `key`; whether there was one.
    pub fn remove_key(&mut self, now: Tick, key: &[u8]) -> bool {
        self.advance(now);
        let id = self.keys.get(key).map(|slot| self.id_of(*slot));
        id.is_some_and(|id| self.remove(now, id).is_ok())
    }

    /// An operation that is done when `count` gets wait here for `key`; [`Engine::take_consumers`].
    ///
    /// # Errors
    /// [`ErrorKind::Closed`].
    pub fn await_consumers(&mut self, now: Tick, key: &[u8], count: usize, deadline: Tick) -> Result<OperationId> {
        self.advance(now);
        self.check_open("wait_for_consumers")?;
        let operation = self.new_operation();
        let timer = self.timers.set(deadline, Timer::Consumers(operation));
        self.consumers.insert(operation, AwaitConsumers { key: key.to_vec(), count, timer, done: None });
        self.look_at_consumers();
        Ok(operation)
    }

    /// The result of [`await_consumers`](Self::await_consumers), once.
    pub fn take_consumers(&mut self, operation: OperationId) -> Option<Result<()>> {
        let waiting = self.consumers.get_mut(&operation)?;
        let done = waiting.done.take()?;
        self.consumers.remove(&operation);
        Some(done)
    }

    fn look_at_consumers(&mut self) {
        for (operation, waiting) in &mut self.consumers {
            if waiting.done.is_none() && self.waiting.get(&waiting.key).map_or(0, VecDeque::len) >= waiting.count {
                waiting.done = Some(Ok(()));
                self.timers.cancel(Some(waiting.timer));
                self.actions.push_back(Action::Wake(*operation));
            }
        }
    }

    pub(super) fn consumers_deadline(&mut self, operation: OperationId) {
        let Some(waiting) = self.consumers.get_mut(&operation) else { return };
        if waiting.done.is_none() {
            let kind = ErrorKind::TimedOut { waiting_for: "consumers", quarantined: 0 };
            waiting.done = Some(Err(Error::new("wait_for_consumers", kind)));
            self.actions.push_back(Action::Wake(operation));
        }
    }

    /// Nobody comes any more.
    pub(super) fn end_awaited_consumers(&mut self) {
        for (operation, waiting) in self.consumers.iter_mut().filter(|(_, waiting)| !waiting.is_done()) {
            waiting.done = Some(Err(Error::new("wait_for_consumers", ErrorKind::Closed)));
            self.timers.cancel(Some(waiting.timer));
            self.actions.push_back(Action::Wake(*operation));
        }
    }

    pub(super) fn check_key(&self, operation: &'static str, key: &[u8]) -> Result<()> {
        match key.len() {
            0 => Err(Error::new(operation, ErrorKind::KeyEmpty)),
            len if len > self.config.limits.key => {
                Err(Error::new(operation, ErrorKind::KeyTooLong { len, max: self.config.limits.key }))
            }
            _ => Ok(()),
        }
    }

    fn free_slot(&mut self) -> u32 {
        if let Some(slot) = self.free_slots.pop() {
            return slot;
        }
        self.payloads.push(PayloadSlot { generation: 1, last: Gone::Unknown, payload: None });
        self.payloads.len() as u32 - 1
    }

    fn replace_key(&mut self, key: &[u8]) {
        if let Some(slot) = self.keys.get(key) {
            self.withdraw(self.id_of(*slot), Gone::Replaced);
        }
    }

    pub(super) fn withdraw_all(&mut self) {
        for slot in 0..self.payloads.len() as u32 {
            self.withdraw(self.id_of(slot), Gone::Removed);
        }
    }

    fn id_of(&self, slot: u32) -> PayloadId {
        PayloadId { slot, generation: self.payloads.get(slot as usize).map_or(0, |entry| entry.generation) }
    }

    fn payload_mut(&mut self, id: PayloadId) -> Option<&mut Payload> {
        let entry = self.payloads.get_mut(id.slot as usize)?;
        if entry.generation == id.generation { entry.payload.as_mut() } else { None }
    }

    /// Why `id` can't be got.
    fn gone(&self, id: PayloadId) -> Gone {
        let Some(entry) = self.payloads.get(id.slot as usize) else { return Gone::Unknown };
        if entry.generation == id.generation {
            entry.payload.as_ref().and_then(|payload| payload.gone).unwrap_or(Gone::Unknown)
        } else if entry.generation == id.generation.wrapping_add(1) {
            entry.last
        } else {
            Gone::Unknown
        }
    }

    /// Nobody gets it from now on; its memory goes when the last reader has left.
    fn withdraw(&mut self, id: PayloadId, gone: Gone) {
        let Some(payload) = self.payload_mut(id) else { return };
        if payload.gone.is_some() {
            return;
        }
        payload.gone = Some(gone);
        let waiting = std::mem::take(&mut payload.waiting);
        let timer = payload.timer.take();
        let key = std::mem::take(&mut payload.key);
        self.timers.cancel(timer);
        if self.keys.get(&key) == Some(&id.slot) {
            self.keys.remove(&key);
        }
        for (link, request) in waiting {
            let by_key = self
                .links
                .get(&link)
                .and_then(|l| l.waiting.get(&request))
                .is_some_and(|get| matches!(get.target, TargetOwned::Key(_)));
            if by_key && !self.closing {
                // It asked for whatever is under the key: the next payload there is as good.
                self.waiting.entry(key.clone()).or_default().push_back((link, request));
            } else {
                self.refuse_gone(link, request, gone);
            }
        }
        self.look_at_consumers();
        self.collect_payload(id);
    }

    /// Frees the slot when nobody can get or read its payload any more.
    fn collect_payload(&mut self, id: PayloadId) {
        let Some(entry) = self.payloads.get_mut(id.slot as usize) else { return };
        if entry.generation != id.generation {
            return;
        }
        let Some(payload) = &entry.payload else { return };
        if let (Some(gone), 0, false) = (payload.gone, payload.readers, payload.filling) {
            entry.last = gone;
            entry.payload = None; // gives its buffers back to the pool
            entry.generation = entry.generation.wrapping_add(1);
            self.free_slots.push(id.slot);
        }
    }

    /// A use: its time to live begins anew.
    fn touch(&mut self, id: PayloadId) {
        let now = self.now;
        let Some(payload) = self.payload_mut(id) else { return };
        if payload.gone.is_some() {
            return;
        }
        let at = now.saturating_add(payload.time_to_live);
        let before = payload.timer.take();
        self.timers.cancel(before);
        let timer = self.timers.set(at, Timer::Payload(id));
        if let Some(payload) = self.payload_mut(id) {
            payload.timer = Some(timer);
        }
    }

    pub(super) fn payload_deadline(&mut self, id: PayloadId) {
        let Some(payload) = self.payload_mut(id) else { return };
        payload.timer = None;
        if payload.readers > 0 {
            self.touch(id); // never while a lease is live
        } else {
            self.withdraw(id, Gone::Expired);
        }
    }
}

/// Cancelled requests that are remembered until they come (I9).
const MAX_UNWANTED: usize = 4096;

/// Gets of peers.
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
        if let Some(peer) = link.incarnation()
            && self.unwanted.remove(&(peer, request))
        {
            return; // it came after its cancel, which came over a newer link
        }
        if link.granted.len() >= most_leases {
            self.refuse(id, request, RefuseCode::TooManyLeases, most_leases as u64, "");
            return;
        }
        if link.waiting.len() >= most_waiting {
            self.refuse(id, request, RefuseCode::TooManyRequests, most_waiting as u64, "");
            return;
        }
        if self.closing {
            self.refuse(id, request, RefuseCode::Closing, 0, "");
            return;
        }
        let target = get.target.clone();
        link.waiting.insert(request, get);
        match target {
            TargetOwned::Payload(payload) => match self.payload_mut(payload) {
                Some(open) if open.gone.is_none() => {
                    open.waiting.push_back((id, request));
                    self.serve(payload);
                }
                _ => self.refuse_gone(id, request, self.gone(payload)),
            },
            TargetOwned::Key(key) => match self.keys.get(&key).map(|slot| self.id_of(*slot)) {
                Some(payload) => {
                    if let Some(open) = self.payload_mut(payload) {
                        open.waiting.push_back((id, request));
                    }
                    self.serve(payload);
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

    fn no_longer_waiting(&mut self, id: LinkId, request: u64) -> Option<WaitingGet> {
        let mut get = self.links.get_mut(&id)?.waiting.remove(&request)?;
        self.timers.cancel(get.timer.take());
        Some(get)
    }

    /// The peer does not wait for `request` any more.
    pub(super) fn get_cancelled(&mut self, id: LinkId, request: u64) {
        let Some(peer) = self.links.get(&id).and_then(Link::incarnation) else { return };
        // It may have come over an older link, which has ended for the peer and not yet here.
        let own = |link: &&Link| link.incarnation() == Some(peer) && link.waiting.contains_key(&request);
        let link = self.links.iter().find(|(_, link)| own(link)).map(|(link, _)| *link);
        if let Some(link) = link
            && let Some(get) = self.no_longer_waiting(link, request)
        {
            self.forget_get(link, &get);
            return;
        }
        // It was granted: over this link, or over one that ended before the grant arrived. It will not be used.
        let granted = self.grants.iter().find(|(_, grant)| grant.peer == peer && grant.request == request);
        if let Some(lease) = granted.map(|(lease, _)| *lease) {
            self.close_grant(lease, id, false);
        } else {
            // Or it is still on its way, over that older link.
            self.unwanted.insert((peer, request));
            if self.unwanted.len() > MAX_UNWANTED {
                self.unwanted.pop_first();
            }
        }
    }

    /// A link has ended with gets of its peer waiting: each queue that one of them is in is gone through once, however
    /// many there are in it.
    pub(super) fn forget_waiting(&mut self, id: LinkId, mut waiting: BTreeMap<u64, WaitingGet>) {
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

    /// Grants the payload to those who wait for it, as far as it has consumers left.
    fn serve(&mut self, id: PayloadId) {
        loop {
            let Some(payload) = self.payload_mut(id) else { return };
            if payload.gone.is_some() || payload.readers >= payload.consumers_left {
                return;
            }
            let Some((link, request)) = payload.waiting.pop_front() else { return };
            self.grant(id, link, request);
        }
    }

    /// After a link has opened: nothing waits for that on the producer's side but gets that came before it did.
    pub(super) fn serve_link(&mut self, id: LinkId) {
        let Some(link) = self.links.get(&id) else { return };
        let payloads: Vec<PayloadId> = link
            .waiting
            .values()
            .filter_map(|get| match &get.target {
                TargetOwned::Payload(payload) => Some(*payload),
                TargetOwned::Key(key) => self.keys.get(key).map(|slot| self.id_of(*slot)),
            })
            .collect();
        for payload in payloads {
            self.serve(payload);
        }
    }

    fn grant(&mut self, id: PayloadId, link_id: LinkId, request: u64) {
        let lease_time = self.config.times.lease;
        let Some(get) = self.no_longer_waiting(link_id, request) else { return };
        let Some(link) = self.links.get(&link_id) else { return };
        let Some(peer) = link.incarnation() else { return };
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
            Ok(Exposure::None)
        } else {
            self.expose(payload, link_id, get.view, &mut segments)
        };
        let exposure = match exposure {
            Ok(exposure) => exposure,
            Err((code, text)) => {
                self.refuse(link_id, request, code, 0, &text);
                return;
            }
        };
        let layout = payload.layout.clone();
        let (watermark, total) = (payload.watermark, payload.total);
        let frame = wire::Grant {
            request,
            lease,
            slot: id.slot,
            generation: id.generation,
            echo,
            lease_us: lease_time / 1000,
            watermark,
            total_len: total,
            provider: 0,
            flags: GrantFlags::empty(),
            layout: &layout,
            segments: &segments,
            eager: &eager,
        };
        // The producer's end of the lease lies after the consumer's: it begins now, later than the stamp it echoes,
        // and the margin for drifting clocks is added here and taken off there (I4).
        let deadline = self.now + lease_time + self.config.times.drift_margin;
        let timer = self.timers.set(deadline, Timer::Grant(lease));
        self.grants.insert(
            lease,
            Grant { link: link_id, request, peer, payload: id, exposure, deadline, timer: Some(timer), fencing: false },
        );
        if let Some(payload) = self.payload_mut(id) {
            payload.readers += 1;
        }
        if let Some(link) = self.links.get_mut(&link_id) {
            link.granted.insert(lease);
        }
        self.touch(id);
        self.send(link_id, &Frame::Grant(frame));
    }

    /// Makes the payload's memory readable for the peer of `link_id`.
    fn expose(
        &self,
        payload: &Payload,
        link_id: LinkId,
        view: bool,
        segments: &mut Vec<Segment>,
    ) -> Result<Exposure, (RefuseCode, String)> {
        let failed = |error: towline_verbs::Error| (RefuseCode::Failed, error.to_string());
        let no_path = || (RefuseCode::NoQueuePair, "no queue pair is agreed on".to_owned());
        let link = self.links.get(&link_id).ok_or_else(no_path)?;
        let (Some(rail), Some(queue_pair)) = (link.rail, &link.queue_pair) else { return Err(no_path()) };
        let rail = &self.rails[rail];
        let capabilities = rail.device.info().capabilities;
        if view && !capabilities.mappable {
            return Err((RefuseCode::Path, format!("{} has no views", link.path)));
        }
        let mut windows = Vec::new();
        for buffer in payload.buffers.iter().flatten() {
            let (offset, len) = (buffer.offset(), buffer.len() as u64);
            let remote = if capabilities.scoped_keys {
                let window = rail.pool.bind(queue_pair, offset, len).map_err(failed)?;
                let remote = window.remote();
                windows.push(window);
                remote
            } else {
                rail.pool.remote(offset, len).map_err(failed)?
            };
            segments.push(Segment::new(remote.address, remote.len, remote.rkey));
        }
        Ok(if capabilities.mappable {
            Exposure::Mapped
        } else if capabilities.scoped_keys {
            Exposure::Windows(windows)
        } else {
            Exposure::Region(queue_pair.clone())
        })
    }

    fn refuse(&mut self, link: LinkId, request: u64, code: RefuseCode, have: u64, text: &str) {
        let _answered = self.no_longer_waiting(link, request);
        self.send(link, &Frame::Refuse(wire::Refuse { request, code, need: 0, have, text }));
    }

    fn refuse_gone(&mut self, link: LinkId, request: u64, gone: Gone) {
        if self.closing {
            self.refuse(link, request, RefuseCode::Closing, 0, "");
        } else {
            self.refuse(link, request, RefuseCode::Gone, gone_code(gone), "");
        }
    }
}

/// The ends of leases.
impl Engine {
    pub(super) fn closes_received(&mut self, id: LinkId, entries: &[CloseEntry]) {
        let Some(peer) = self.links.get(&id).and_then(Link::incarnation) else { return };
        for entry in entries {
            // A lease is its holder's to close, over whichever link he has now; one that is unknown was closed before.
            if self.grants.get(&entry.lease()).is_some_and(|grant| grant.peer == peer) {
                self.close_grant(entry.lease(), id, entry.outcome() == Outcome::Delivered);
            }
        }
    }

    pub(super) fn keep_alive_received(&mut self, id: LinkId, stamp: u64, leases: &[u64]) {
        let now = self.now;
        let (lease, margin) = (self.config.times.lease, self.config.times.drift_margin);
        let Some(link) = self.links.get_mut(&id) else { return };
        link.newest_stamp = link.newest_stamp.max(stamp);
        let Some(peer) = link.incarnation() else { return };
        let mut unknown = Vec::new();
        for number in leases {
            match self.grants.get_mut(number) {
                Some(grant) if grant.peer == peer && !grant.fencing => grant.deadline = now + lease + margin,
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
            self.end_grant(lease);
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
            self.end_grant(lease);
        }
    }

    /// Whether leases are left that were granted over link `id`.
    pub(super) fn has_grants(&self, id: LinkId) -> bool {
        self.grants.values().any(|grant| grant.link == id)
    }

    fn start_fence(&mut self, lease: u64) {
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
        } else if !self.fences_timer {
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
    }

    /// Its holder says that he is done. That word frees what he could only read: keys of its own are taken back besides,
    /// and where a copier is still inside, its leaving is awaited.
    fn close_grant(&mut self, lease: u64, over: LinkId, delivered: bool) {
        if delivered {
            self.consumed(lease);
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

    /// The peer can't touch the memory of `lease` any more.
    fn end_grant(&mut self, lease: u64) {
        let Some(mut grant) = self.grants.remove(&lease) else { return };
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
        if let Some(payload) = self.payload_mut(id) {
            payload.readers -= 1;
        }
        self.touch(id);
        self.collect_payload(id);
        self.serve(id);
    }

    /// One consumer fewer to come.
    fn consumed(&mut self, lease: u64) {
        let Some(grant) = self.grants.get(&lease) else { return };
        let id = grant.payload;
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
