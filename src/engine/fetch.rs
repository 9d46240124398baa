//! Fetches: the reads of one get, from its lease to its fence.
//!
//! A fetch owns the destination from its first posted read until nothing of it is outstanding (I1, I3). Whether it has
//! ended is core's transfer table's to say: each read posted is counted there, each completion names its transfer and
//! generation, and a late or foreign one is refused.

use super::end::Failure;
use super::gets::{HeldLease, Stage};
use super::link::{Account, Link, LinkId};
use super::place::Place;
use super::placing::Leased;
use super::{Engine, OperationId, Timer};
use crate::layout::Layout;
use crate::sys;
use crate::{Error, ErrorKind, Result};
use towline_control::wire::{CloseEntry, Outcome};
use towline_core::Word;
use towline_core::transfer::{self, Cause, Progress, Reason, TransferId, TransferTable, WorkRequestId};
use towline_verbs::{
    Access, Completion, CompletionStatus, LocalSlice, Memory, MemoryRegion, Opcode, QueuePair, QueuePairState,
    WorkRequest,
};

/// One contiguous piece to read.
#[derive(Debug, Clone, Copy)]
struct Piece {
    remote: u64,
    rkey: u64,
    /// Place within the local region.
    local: u64,
    len: u64,
    /// Bytes of the payload before it.
    before: u64,
}

#[derive(Debug)]
pub(super) struct Fetch {
    id: TransferId,
    operation: OperationId,
    pub(super) link: LinkId,
    held: HeldLease,
    /// For whom its destination is counted while it is in quarantine.
    account: Option<Account>,
    layout: Layout,
    queue_pair: QueuePair,
    place: Place,
    region: MemoryRegion,
    pieces: Vec<Piece>,
    /// Index of the piece and bytes of it that are posted.
    cursor: (usize, u64),
    chunk: u64,
    chunks: u32,
    watermark: u64,
    total: u64,
    done: u64,
    /// Lengths of posted reads that have not completed, oldest first: reads of one queue pair complete in order.
    posted: std::collections::VecDeque<(u32, u64)>,
    failure: Option<(CompletionStatus, u32)>,
    abandoned: bool,
}

impl Fetch {
    /// Bytes of its destination, if nobody wants it any more but it may still be touched.
    pub(super) fn quarantined(&self) -> Option<u64> {
        self.abandoned.then(|| match &self.place {
            Place::Pool(buffer) => buffer.len() as u64,
            Place::Own(own) => towline_verbs::memory::MemoryBacking::len(&**own),
        })
    }

    /// The next read, if the watermark lets one begin.
    fn next_chunk(&self) -> Option<(Piece, u64)> {
        let (index, within) = self.cursor;
        let piece = self.pieces.get(index)?;
        let visible = self.watermark.saturating_sub(piece.before).min(piece.len);
        let len = visible.saturating_sub(within).min(self.chunk);
        let rest = piece.len - within;
        // Little pieces at the watermark are waited for, unless they are the last of their part.
        let worth = len == rest || len >= self.chunk.min(256 << 10);
        (len > 0 && worth).then_some((
            Piece {
                remote: piece.remote + within,
                local: piece.local + within,
                len,
                before: piece.before + within,
                ..*piece
            },
            len,
        ))
    }

    fn all_posted(&self) -> bool {
        self.cursor.0 >= self.pieces.len()
    }
}

pub(super) fn transfer_table(capacity: usize) -> Result<TransferTable<Box<[Word]>>> {
    let capacity = capacity.min(transfer::MAX_TRANSFERS);
    if capacity == 0 {
        return Err(Error::new("build", ErrorKind::BadOption { option: "limits.gets", why: "it is zero".into() }));
    }
    let mut storage = Vec::new();
    storage.resize_with(transfer::storage_words(capacity), Word::default);
    Ok(TransferTable::new(storage.into_boxed_slice()))
}

fn key(id: TransferId) -> u64 {
    u64::from(id.slot()) << 32 | u64::from(id.generation())
}

impl Engine {
    /// Begins to read what `leased` names into `place`.
    pub(super) fn start_fetch(&mut self, operation: OperationId, link_id: LinkId, leased: Leased, place: Place) {
        let Some(link) = self.links.get_mut(&link_id) else { return };
        let (Some(rail), Some(queue_pair)) = (link.rail, link.queue_pair.clone()) else { return };
        let rail = &self.rails[rail];
        let prepared = match &place {
            Place::Pool(buffer) => Ok((rail.pool.clone(), buffer.offset())),
            Place::Own(own) => rail
                .pd
                .register(Memory::from_backing(own.clone()), Access::LOCAL_WRITE)
                .map(|region| (region, 0))
                .map_err(ErrorKind::Verbs),
        };
        let prepared = prepared.and_then(|region| match self.transfers.create() {
            Ok(id) => Ok((region, id)),
            Err(_) => Err(ErrorKind::Busy { what: "transfers", limit: self.transfers.capacity() as u64 }),
        });
        let ((region, base), id) = match prepared {
            Ok(prepared) => prepared,
            Err(kind) => {
                self.close_lease_on(link_id, CloseEntry::new(leased.held.lease, Outcome::Failed));
                self.finish(operation, Err(kind));
                return;
            }
        };
        let mut before = 0;
        let mut segments = leased.segments.iter();
        let mut pieces: Vec<Piece> = Vec::with_capacity(leased.segments.len());
        for (part, offset) in leased.layout.parts().iter().zip(leased.layout.offsets()).filter(|(part, _)| part.len > 0)
        {
            let Some(segment) = segments.next() else { break };
            let piece =
                Piece { remote: segment.address, rkey: segment.rkey, local: base + offset, len: part.len, before };
            before += part.len;
            match pieces.last_mut() {
                // Neighbours on both sides are one read.
                Some(last)
                    if last.rkey == piece.rkey
                        && last.remote + last.len == piece.remote
                        && last.local + last.len == piece.local =>
                {
                    last.len += piece.len;
                }
                _ => pieces.push(piece),
            }
        }
        let chunk = rail.device.info().capabilities.preferred_chunk.clamp(1, queue_pair.max_message_size().max(1));
        let fetch = Fetch {
            id,
            operation,
            link: link_id,
            held: leased.held,
            account: link.account,
            total: leased.layout.payload_len(),
            layout: leased.layout,
            queue_pair,
            place,
            region,
            pieces,
            cursor: (0, 0),
            chunk,
            chunks: 0,
            watermark: leased.watermark,
            done: 0,
            posted: std::collections::VecDeque::new(),
            failure: None,
            abandoned: false,
        };
        let key = key(id);
        self.fetches.insert(key, fetch);
        link.turn.push_back(key);
        if let Some(get) = self.gets.get_mut(&operation) {
            get.stage = Stage::Reading(key);
        }
        self.post_link(link_id);
    }

    /// Posts what credits and watermarks allow, on every link.
    pub(super) fn post_reads(&mut self) {
        self.look_at_remotes();
        let links: Vec<LinkId> =
            self.links.iter().filter(|(_, link)| !link.turn.is_empty()).map(|(id, _)| *id).collect();
        for link in links {
            self.post_link(link);
        }
    }

    fn post_link(&mut self, id: LinkId) {
        let (send_queue, most_bytes) = (self.config.limits.send_queue, self.config.limits.in_flight);
        let Some(link) = self.links.get_mut(&id) else { return };
        let (Some(queue_pair), Some(rail)) = (link.queue_pair.clone(), link.rail) else { return };
        // As many as the queue pair was made for.
        let most = send_queue.min(self.rails[rail].device.info().capabilities.max_send_wr);
        let mut requests = Vec::new();
        let mut counted: Vec<(u64, u64)> = Vec::new();
        let mut stalled = 0;
        while stalled < link.turn.len() && link.outstanding < most {
            let Some(turn) = link.turn.pop_front() else { break };
            let Some(fetch) = self.fetches.get_mut(&turn) else { continue };
            if fetch.abandoned || fetch.failure.is_some() {
                continue;
            }
            let Some((piece, len)) = fetch.next_chunk() else {
                if !fetch.all_posted() {
                    link.turn.push_back(turn); // waits for its watermark
                    stalled += 1;
                }
                continue;
            };
            // At least two chunks are in flight, however large they are, so that the wire does not run dry.
            if link.in_flight >= most_bytes.max(fetch.chunk) {
                link.turn.push_front(turn);
                break;
            }
            let Some(work) = fetch.id.work_request(fetch.chunks) else {
                fetch.failure = Some((CompletionStatus::LocalLength, 0)); // more chunks than a work request can number
                continue;
            };
            if self.transfers.post(fetch.id, 1).is_err() {
                continue; // it was given up meanwhile
            }
            fetch.posted.push_back((fetch.chunks, len));
            fetch.chunks += 1;
            fetch.cursor.1 += len;
            if fetch.cursor.1 == fetch.pieces[fetch.cursor.0].len {
                fetch.cursor = (fetch.cursor.0 + 1, 0);
            }
            link.outstanding += 1;
            link.in_flight += len;
            stalled = 0;
            requests.push(WorkRequest {
                id: work.to_u64(),
                opcode: Opcode::Read,
                local: vec![LocalSlice { region: fetch.region.clone(), offset: piece.local, len }],
                remote: Some(towline_verbs::RemoteSlice { address: piece.remote, len, rkey: piece.rkey }),
            });
            counted.push((turn, len));
            if fetch.all_posted() {
                // Fails only if the transfer was given up, and then its completions say so.
                let _ended_elsewhere = self.transfers.finish(fetch.id);
            } else {
                link.turn.push_back(turn);
            }
        }
        if requests.is_empty() {
            return;
        }
        if let Some(rail) = link.rail {
            self.posted.insert(rail);
        }
        if let Err(error) = sys::post_reads(&queue_pair, requests) {
            self.posting_failed(id, &counted, &error);
        }
    }

    /// None of the reads was posted: each is accounted for as one that failed.
    fn posting_failed(&mut self, id: LinkId, counted: &[(u64, u64)], error: &towline_verbs::Error) {
        for (fetch, len) in counted {
            if let Some(link) = self.links.get_mut(&id) {
                link.outstanding -= 1;
                link.in_flight -= len;
            }
            if let Some(fetch) = self.fetches.get_mut(fetch) {
                fetch.posted.pop_back();
            }
            self.read_ended(*fetch, Err((CompletionStatus::Flushed, 0)));
        }
        if !matches!(error.cause, towline_verbs::Cause::State { .. }) {
            self.fail_link(id, &Failure::Lost(format!("a read could not be posted: {error}")));
        }
    }

    pub(super) fn handle_completions(&mut self) {
        if self.completions.is_empty() {
            return;
        }
        for (rail, completion) in std::mem::take(&mut self.completions) {
            self.handle_completion(rail, completion);
        }
    }

    fn handle_completion(&mut self, rail: usize, completion: Completion) {
        if !matches!(completion.opcode, Opcode::Read) {
            return; // the engine posts nothing else
        }
        let work = WorkRequestId::from_u64(completion.id);
        let transfer = key(work.transfer());
        let mut len = 0;
        if let Some(fetch) = self.fetches.get_mut(&transfer)
            && fetch.posted.front().is_some_and(|(chunk, _)| *chunk == work.chunk())
            && let Some((_, posted)) = fetch.posted.pop_front()
        {
            len = posted;
        }
        if let Some(link) = self.queue_pairs.get(&(rail, completion.queue_pair))
            && let Some(link) = self.links.get_mut(link)
        {
            link.outstanding = link.outstanding.saturating_sub(1);
            link.in_flight = link.in_flight.saturating_sub(len);
        }
        let result = match completion.status {
            CompletionStatus::Success => Ok(len),
            status => Err((status, completion.vendor_error)),
        };
        self.read_ended(transfer, result);
    }

    /// One read of a fetch is over, well or not.
    fn read_ended(&mut self, transfer: u64, result: Result<u64, (CompletionStatus, u32)>) {
        let Some(fetch) = self.fetches.get_mut(&transfer) else { return };
        match result {
            Ok(len) => fetch.done += len,
            // The first error that is not a flush says what happened (the flushes are its consequence).
            Err(failure) => match fetch.failure {
                None => fetch.failure = Some(failure),
                Some((CompletionStatus::Flushed, _)) => fetch.failure = Some(failure),
                Some(_) => {}
            },
        }
        let result = result.map(|_| ()).map_err(|_| Cause(1));
        match self.transfers.complete(fetch.id, result) {
            Ok(Progress::Fenced(_)) => self.fetch_ended(transfer),
            Ok(Progress::Pending { .. }) => {}
            Err(_stale) => {} // a completion that is not this transfer's (I2)
        }
    }

    /// Nothing of the fetch is outstanding: its destination is nobody's but ours again.
    fn fetch_ended(&mut self, transfer: u64) {
        let Some(fetch) = self.fetches.remove(&transfer) else { return };
        let _outcome = self.transfers.release(fetch.id);
        let wanted = self.gets.get(&fetch.operation).is_some_and(|get| match get.stage {
            Stage::Reading(reading) => reading == transfer,
            _ => false,
        });
        let fencing = self.gets.get(&fetch.operation).is_some_and(|get| matches!(get.stage, Stage::AwaitFence));
        if wanted && !fetch.abandoned {
            match fetch.failure {
                None => self.fetched(fetch),
                Some((status, vendor)) => self.fetch_failed(&fetch, status, vendor),
            }
            return;
        }
        // Also when its link has ended: what is mapped stays exposed until its reader says that he is done.
        let outcome = if fencing { Outcome::Failed } else { Outcome::TimedOut };
        self.close_lease_of(fetch.held, outcome);
        drop(fetch.place);
        if fencing {
            self.fetch_fenced(fetch.operation);
        }
    }

    /// All reads went well. The bytes count only if the lease still stood when the last of them had arrived (I4).
    fn fetched(&mut self, fetch: Fetch) {
        let now = self.now;
        let mapped = self
            .links
            .get(&fetch.link)
            .and_then(|link| link.rail)
            .is_some_and(|rail| self.rails[rail].device.info().capabilities.mappable);
        let stands = match self.links.get(&fetch.link).and_then(|link| link.held.get(&fetch.held.lease)) {
            Some(until) => now < *until || mapped,
            None => false, // the link is gone, and the producer may have ended the lease since
        };
        let whole = fetch.done == fetch.total;
        if whole && stands {
            self.deliver(fetch.operation, fetch.held.lease, fetch.layout, Ok(fetch.place.into_storage()));
            return;
        }
        let kind =
            if whole { ErrorKind::LeaseExpired } else { ErrorKind::LayoutMismatch { what: "bytes that arrived" } };
        fetch.place.poison();
        self.deliver(fetch.operation, fetch.held.lease, fetch.layout, Err(kind));
    }

    /// Reads failed, by themselves or because their queue pair broke: another try, or the error.
    fn fetch_failed(&mut self, fetch: &Fetch, status: CompletionStatus, vendor: u32) {
        let operation = fetch.operation;
        self.close_lease_of(fetch.held, Outcome::Failed);
        self.read_refused(operation, status, vendor);
        self.await_link(operation);
        // A failed read breaks its queue pair, and that the whole link: its gets are tried again together when it is
        // gone, whether that was noticed before the completion or will be after it.
        let breaks = |link: &Link| {
            !link.is_open() || link.queue_pair.as_ref().is_none_or(|qp| qp.state() == QueuePairState::Error)
        };
        if !self.links.get(&fetch.link).is_some_and(breaks) {
            self.again(operation, status.text());
        }
    }

    /// Gives a fetch up; returns the bytes that stay in quarantine, 0 when nothing was outstanding.
    pub(super) fn abandon_fetch(&mut self, transfer: u64, reason: Reason) -> u64 {
        let grace = self.now + self.config.times.fence_grace;
        let Some(fetch) = self.fetches.get_mut(&transfer) else { return 0 };
        fetch.abandoned = true;
        match self.transfers.abandon(fetch.id, reason) {
            Ok(Progress::Fenced(_)) => {
                self.fetch_ended(transfer);
                0
            }
            Ok(Progress::Pending { .. }) => {
                let _quarantined = self.transfers.quarantine(fetch.id);
                let bytes = fetch.quarantined().unwrap_or(0);
                let link = fetch.link;
                let account = fetch.account;
                let total: u64 =
                    self.fetches.values().filter(|other| other.account == account).filter_map(Fetch::quarantined).sum();
                if total > self.config.limits.quarantine_per_peer || !self.links.contains_key(&link) {
                    self.abandoned_deadline(transfer);
                } else {
                    self.timers.set(grace, Timer::Abandoned(transfer));
                }
                bytes
            }
            // It has failed before: its last completions are on their way and end it.
            Err(_refused) => fetch.quarantined().unwrap_or(0),
        }
    }

    pub(super) fn quarantine_of(&self, operation: OperationId) -> u64 {
        self.fetches.values().filter(|fetch| fetch.operation == operation).filter_map(Fetch::quarantined).sum()
    }

    /// Patience is over: the queue pair is broken, so that its flushes come.
    pub(super) fn abandoned_deadline(&mut self, transfer: u64) {
        let Some(fetch) = self.fetches.get(&transfer) else { return };
        let link = fetch.link;
        fetch.queue_pair.to_error();
        self.fail_link(link, &Failure::Renewed("reads that a deadline overtook had to be stopped".to_owned()));
    }

    /// Asks for the fence of reads whose link is gone; whether any is still awaited. Their flushes usually come by
    /// themselves: a device that makes none is made to let go (I3).
    pub(super) fn fence_orphaned_fetches(&self) -> bool {
        let mut any = false;
        for fetch in self.fetches.values().filter(|fetch| !self.links.contains_key(&fetch.link)) {
            any = true;
            let _its_flushes_say_so = fetch.queue_pair.is_fenced();
        }
        any
    }

    pub(super) fn raise_fetch(&mut self, link: LinkId, lease: u64, watermark: u64) {
        let mut raised = false;
        for fetch in self.fetches.values_mut().filter(|fetch| fetch.link == link && fetch.held.lease == lease) {
            fetch.watermark = fetch.watermark.max(watermark.min(fetch.total));
            raised = true;
        }
        if raised {
            self.post_link(link);
        }
    }
}
