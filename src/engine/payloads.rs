//! Payloads: what is published here, from its put until nobody can get or read it any more.

use super::link::LinkId;
use super::timers::TimerId;
use super::waiting::TargetOwned;
use super::{Engine, Tick, Timer};
use crate::error::Gone;
use crate::layout::{DType, Layout};
use crate::{Buffer, Error, ErrorKind, PutOptions, Result};
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use towline_control::wire::{self, Frame};
use towline_verbs::memory::Loan;

/// Names a payload of this endpoint's present incarnation (I4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PayloadId {
    /// Its place in the table.
    pub slot: u32,
    /// How often the place was used before.
    pub generation: u32,
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
    /// The bytes that are still to be copied into the buffer, all of them, to be read in its place until then where the
    /// provider can do that. A payload that is put with a watermark has one for each part that is not there yet, or none.
    pub loan: Option<Arc<Loan>>,
}

/// A slot of the payload table.
#[derive(Debug)]
pub(super) struct PayloadSlot {
    generation: u32,
    /// What became of the payload of the generation before.
    last: Gone,
    pub(super) payload: Option<Payload>,
}

impl PayloadSlot {
    pub(super) fn is_open(&self) -> bool {
        self.payload.as_ref().is_some_and(|payload| payload.gone.is_none())
    }
}

pub(super) struct Payload {
    key: Vec<u8>,
    pub(super) layout: Vec<u8>,
    pub(super) buffers: Vec<Option<Buffer>>,
    /// While it is being filled: what may be read in the place of each buffer. Empty when nothing is lent.
    pub(super) loans: Vec<Option<Arc<Loan>>>,
    pub(super) total: u64,
    pub(super) watermark: u64,
    pub(super) consumers_left: u32,
    pub(super) readers: u32,
    /// Whether its producer is still copying bytes in: it keeps its memory until he is done.
    filling: bool,
    /// Why it can't be got any more, though readers may still hold it.
    pub(super) gone: Option<Gone>,
    pub(super) waiting: VecDeque<(LinkId, u64)>,
    time_to_live: Tick,
    timer: Option<TimerId>,
}

impl fmt::Debug for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Payload").field("total", &self.total).field("readers", &self.readers).finish_non_exhaustive()
    }
}

const PUT: &str = "put";

/// Publishing.
impl Engine {
    /// Whether a payload of so many parts may be put under `key` with these options.
    ///
    /// # Errors
    /// As [`put`](Self::put), but for what only the parts tell.
    pub fn check_put(&mut self, now: Tick, key: &[u8], parts: usize, options: &PutOptions) -> Result<()> {
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
        if options.time_to_live.is_zero() {
            return fail(ErrorKind::BadOption { option: "time_to_live", why: "it is zero".into() });
        }
        if parts == 0 {
            return fail(ErrorKind::PartCount { count: 0, max: crate::layout::MAX_PARTS });
        }
        Ok(())
    }

    /// Publishes a payload whose first `watermark` bytes are there already (all of them when its parts are finished
    /// buffers: `None`); with a watermark, [`filled`](Self::filled) must be called in the end. Another payload under the
    /// same key is replaced: it can't be got any more, its readers are not disturbed.
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
        self.check_put(now, key, parts.len(), options)?;
        let fail = |kind| Err(Error::new(PUT, kind));
        let mut layout = Layout::default();
        let mut buffers = Vec::with_capacity(parts.len());
        let mut loans = Vec::with_capacity(parts.len());
        for (index, part) in parts.into_iter().enumerate() {
            if part.buffer.as_ref().is_some_and(|buffer| !Arc::ptr_eq(buffer.pool(), &self.pool)) {
                return fail(ErrorKind::ForeignBuffer { part: index, name: part.name.to_owned() });
            }
            let len = part.buffer.as_ref().map_or(0, Buffer::len) as u64;
            layout.push(part.name, part.dtype, part.shape, len).map_err(|kind| Error::new(PUT, kind))?;
            if part.loan.as_ref().is_some_and(|loan| loan.len() != len) {
                return fail(ErrorKind::LayoutMismatch { what: "a loan of another length than its part" });
            }
            buffers.push(part.buffer);
            loans.push(part.loan.filter(|_| watermark.is_some()));
        }
        if loans.iter().all(Option::is_none) {
            loans.clear();
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
            loans,
            total,
            watermark: watermark.unwrap_or(total).min(total),
            consumers_left: options.consumers,
            readers: 0,
            filling: watermark.is_some(),
            gone: None,
            waiting: VecDeque::new(),
            time_to_live: u64::try_from(options.time_to_live.as_nanos()).unwrap_or(Tick::MAX),
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
        let readers: Vec<u64> =
            self.grants.iter().filter(|(_, grant)| grant.payload == id).map(|(lease, _)| *lease).collect();
        for lease in readers {
            self.tell_watermark(lease);
        }
    }

    /// Tells the holder of a lease how much of its payload is there, if he does not know; not now if his link has much to
    /// carry already.
    pub(super) fn tell_watermark(&mut self, lease: u64) {
        if self.unbound.contains_key(&lease) {
            return; // the grant will say it
        }
        let Some(grant) = self.grants.get(&lease).filter(|grant| !grant.fencing) else { return };
        let (link, told) = (grant.link, grant.told);
        let Some(watermark) = self.payload(grant.payload).map(|payload| payload.watermark) else { return };
        if watermark <= told {
            return;
        }
        if !self.links.get(&link).is_some_and(|link| self.has_room(link)) {
            self.put_off(link);
            return;
        }
        if let Some(grant) = self.grants.get_mut(&lease) {
            grant.told = watermark;
        }
        self.send(link, &Frame::Watermark(wire::Watermark { lease, watermark }));
    }

    /// Whoever published a payload with a watermark copies nothing more into it; every such payload needs this call. One
    /// that has not all its bytes by then is taken out.
    pub fn filled(&mut self, now: Tick, id: PayloadId) {
        self.advance(now);
        if let Some(payload) = self.payload_mut(id) {
            payload.filling = false;
            payload.loans.clear();
            if payload.watermark < payload.total {
                self.withdraw(id, Gone::Removed);
            }
            self.collect_payload(id);
        }
    }

    /// Whether anybody reads what is lent in the place of a payload's buffers.
    pub fn is_lent(&self, id: PayloadId) -> bool {
        self.payload(id).is_some_and(|payload| payload.readers > 0 && !payload.loans.is_empty())
            && self.grants.values().any(|grant| grant.payload == id && grant.lent && !grant.fencing)
    }

    /// Whether nobody can get or read a payload any more.
    pub fn is_over(&self, id: PayloadId) -> bool {
        self.payload(id).is_none_or(|payload| payload.gone.is_some() && payload.readers == 0)
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
}

/// From a payload's name to its end.
impl Engine {
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

    pub(super) fn id_of(&self, slot: u32) -> PayloadId {
        PayloadId { slot, generation: self.payloads.get(slot as usize).map_or(0, |entry| entry.generation) }
    }

    pub(super) fn payload_mut(&mut self, id: PayloadId) -> Option<&mut Payload> {
        let entry = self.payloads.get_mut(id.slot as usize)?;
        if entry.generation == id.generation { entry.payload.as_mut() } else { None }
    }

    pub(super) fn payload(&self, id: PayloadId) -> Option<&Payload> {
        let entry = self.payloads.get(id.slot as usize)?;
        if entry.generation == id.generation { entry.payload.as_ref() } else { None }
    }

    /// Why `id` can't be got.
    pub(super) fn gone(&self, id: PayloadId) -> Gone {
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
    pub(super) fn withdraw(&mut self, id: PayloadId, gone: Gone) {
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
    pub(super) fn collect_payload(&mut self, id: PayloadId) {
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
    pub(super) fn touch(&mut self, id: PayloadId) {
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
        // Never while a lease is live: the end of the last begins the time anew.
        if payload.readers == 0 {
            self.withdraw(id, Gone::Expired);
        }
    }
}
