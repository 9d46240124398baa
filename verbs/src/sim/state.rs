//! Everything the fabric knows, and its clock.

use super::net::Net;
use super::plan::{FaultPlan, Span};
use super::random::Random;
use super::trace::Trace;
use super::{Counts, NodeId};
use crate::memory::Loan;
use crate::{
    Access, Capabilities, Cause, Completion, CompletionStatus, Error, Memory, Opcode, QueuePairCapacity,
    QueuePairState, RemoteSlice, Result,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// Something due at a moment. Each is a hint: it looks up what it is about and does nothing if that is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Event {
    /// A queue pair becomes ready.
    Ready { qp: u32 },
    /// A queue pair gives up waiting for its peer.
    ConnectTimeout { qp: u32 },
    /// The oldest request not yet started leaves the send queue.
    Start { qp: u32, serial: u64 },
    /// A piece of a write or send is taken from local memory.
    Gather { serial: u64, piece: usize },
    /// A read request reaches the responder.
    Arrive { serial: u64 },
    /// A piece of a write or send reaches the responder.
    ArrivePiece { serial: u64, piece: usize, data: Vec<u8> },
    /// The responder looks again at the oldest request (after a wait for a receive).
    Service { qp: u32 },
    /// A piece of a read is taken from the responder's memory.
    Sample { serial: u64, piece: usize },
    /// A piece of a read reaches the requester's memory.
    Land { serial: u64, piece: usize, data: Vec<u8> },
    /// The requester learns how a request ended.
    Outcome { qp: u32, serial: u64, status: CompletionStatus, from: NodeId, held: u64 },
    /// The requester gives up waiting for an answer.
    GiveUp { qp: u32, serial: u64 },
    /// The oldest send request moves on to its completion.
    DrainSends { qp: u32 },
    /// The oldest receive moves on to its completion.
    DrainReceives { qp: u32 },
    /// A failed queue pair's memory is out of its peer's reach.
    Fence { qp: u32 },
    /// A window's key is valid: its owner has something to look at.
    Bound { node: NodeId },
    /// A queue pair learns that its peer failed.
    PeerGone { qp: u32 },
    /// Something arrives at an end of a byte connection.
    Deliver { end: u64 },
}

/// One node.
#[derive(Debug, Default)]
pub(super) struct Node {
    pub(super) down: bool,
    /// Counts crashes: handles made before the last one are dead.
    pub(super) life: u64,
    pub(super) woken: bool,
}

/// Registered memory.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) node: NodeId,
    pub(super) pd: u64,
    pub(super) memory: Memory,
    /// The simulated virtual address of its first byte.
    pub(super) base: u64,
    /// Posted requests that hold it.
    pub(super) posts: u64,
    pub(super) handle_gone: bool,
}

/// What a remote key opens.
#[derive(Debug, Clone)]
pub(super) struct Key {
    pub(super) region: u64,
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) access: Access,
    /// A window is good for this queue pair alone.
    pub(super) queue_pair: Option<u32>,
    /// Before this moment it opens nothing.
    pub(super) valid_from: u64,
    /// What is lent in the place of its bytes.
    pub(super) loan: Option<Arc<Loan>>,
}

/// A completion queue.
#[derive(Debug)]
pub(super) struct Cq {
    pub(super) node: NodeId,
    pub(super) depth: u32,
    pub(super) entries: VecDeque<Completion>,
    pub(super) armed: bool,
}

/// A local slice of a posted request; counted in its region's `posts`.
#[derive(Debug, Clone)]
pub(super) struct Local {
    pub(super) region: u64,
    pub(super) memory: Memory,
    pub(super) offset: u64,
    pub(super) len: u64,
}

/// A posted send request.
#[derive(Debug)]
pub(super) struct Send {
    pub(super) serial: u64,
    pub(super) id: u64,
    pub(super) opcode: Opcode,
    pub(super) local: Vec<Local>,
    pub(super) remote: Option<RemoteSlice>,
    pub(super) len: u64,
    pub(super) outcome: Option<CompletionStatus>,
}

/// A posted receive.
#[derive(Debug)]
pub(super) struct Receive {
    pub(super) serial: u64,
    pub(super) id: u64,
    pub(super) local: Option<Local>,
    pub(super) taken: bool,
    pub(super) outcome: Option<(CompletionStatus, u64, Option<u32>)>,
}

/// A queue pair.
#[derive(Debug)]
pub(super) struct Qp {
    pub(super) node: NodeId,
    pub(super) pd: u64,
    pub(super) send_cq: u64,
    pub(super) recv_cq: u64,
    pub(super) capacity: QueuePairCapacity,
    pub(super) nonce: u64,
    pub(super) state: QueuePairState,
    pub(super) failure: Option<Error>,
    /// The peer's number and nonce, and whether this end is the active one.
    pub(super) target: Option<(u32, u64, bool)>,
    /// The peer, once both ends have named each other.
    pub(super) peer: Option<u32>,
    pub(super) sends: VecDeque<Send>,
    /// Posted and not yet polled.
    pub(super) send_slots: u32,
    pub(super) receives: VecDeque<Receive>,
    pub(super) receive_slots: u32,
    pub(super) next_start: u64,
    pub(super) draining_sends: bool,
    pub(super) draining_receives: bool,
    /// Requests of the peer, in the order it started them.
    pub(super) incoming: VecDeque<u64>,
    pub(super) rnr_tries: u32,
    pub(super) rnr_waiting: bool,
    /// A request of the peer has failed here or on the way: those after it are not executed.
    pub(super) broken: bool,
    /// A request has failed: those after it flush, also if they have been executed.
    pub(super) flushing: bool,
    pub(super) fenced: bool,
}

/// A request under way between two nodes. It lives on when its requester has failed: what has left arrives.
#[derive(Debug)]
pub(super) struct Flight {
    pub(super) requester: u32,
    pub(super) requester_node: NodeId,
    pub(super) responder: u32,
    pub(super) responder_node: NodeId,
    pub(super) opcode: Opcode,
    pub(super) remote: Option<RemoteSlice>,
    pub(super) len: u64,
    /// Start and length of each piece.
    pub(super) pieces: Vec<(u64, u64)>,
    /// A read request has arrived.
    pub(super) arrived: bool,
    /// Pieces of a write or send that have arrived and wait for their turn.
    pub(super) waiting: BTreeMap<usize, Vec<u8>>,
    /// Pieces written (write, send) or sampled (read) at the responder.
    pub(super) done: usize,
    /// Pieces of a read in local memory.
    pub(super) landed: usize,
    /// The access under way at the responder: key, region, and offset of the first byte in it.
    pub(super) access: Option<(u64, u64, u64)>,
    /// The receive that a send fills.
    pub(super) receive: Option<u64>,
    /// The responder's memory, where the requester's processor copies out of a mapping of it: no end of the responder
    /// stops that, only the requester's own.
    pub(super) mapping: Option<Memory>,
    /// What is lent in the place of the bytes of the key, and where those are in the region.
    pub(super) loan: Option<(Arc<Loan>, u64)>,
    /// Its key was invalidated, and the device stops it.
    pub(super) stopped: bool,
    /// Since when it has been held up by a cut link.
    pub(super) held_since: Option<u64>,
}

/// The whole fabric.
#[derive(Debug)]
pub(super) struct State {
    pub(super) now: u64,
    pub(super) random: Random,
    pub(super) plan: FaultPlan,
    pub(super) capabilities: Capabilities,
    pub(super) trace: Trace,
    pub(super) counts: Counts,
    pub(super) nodes: BTreeMap<NodeId, Node>,
    pub(super) regions: BTreeMap<u64, Region>,
    pub(super) keys: BTreeMap<u64, Key>,
    pub(super) cqs: BTreeMap<u64, Cq>,
    pub(super) qps: BTreeMap<u32, Qp>,
    pub(super) flights: BTreeMap<u64, Flight>,
    /// Where flushed reads were to land, kept only by devices that break their word.
    pub(super) flushed: BTreeMap<u64, Vec<Local>>,
    pub(super) cut_links: BTreeSet<(NodeId, NodeId)>,
    pub(super) net: Net,
    events: BTreeMap<(u64, u64), Event>,
    next: u64,
}

impl State {
    pub(super) fn new(seed: u64, plan: FaultPlan) -> Self {
        Self {
            now: 0,
            random: Random::new(seed),
            capabilities: plan.capabilities,
            plan,
            trace: Trace::default(),
            counts: Counts::default(),
            nodes: BTreeMap::new(),
            regions: BTreeMap::new(),
            keys: BTreeMap::new(),
            cqs: BTreeMap::new(),
            qps: BTreeMap::new(),
            flights: BTreeMap::new(),
            flushed: BTreeMap::new(),
            cut_links: BTreeSet::new(),
            net: Net::default(),
            events: BTreeMap::new(),
            next: 1,
        }
    }

    /// A number that was not given before.
    pub(super) fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(super) fn draw(&mut self, span: Span) -> u64 {
        span.draw(&mut self.random)
    }

    pub(super) fn note(&mut self, what: &str, values: &[u64]) {
        self.trace.event(self.now, what, values);
    }

    /// Has `event` happen at `at`, or now if that is past. Of two at one moment the one scheduled first comes first.
    pub(super) fn schedule(&mut self, at: u64, event: Event) {
        let order = self.fresh();
        self.events.insert((at.max(self.now), order), event);
    }

    /// Has `event` happen after a time drawn from `span`.
    pub(super) fn schedule_in(&mut self, span: Span, event: Event) {
        let delay = self.draw(span);
        self.schedule(self.now.saturating_add(delay), event);
    }

    pub(super) fn next_event_at(&self) -> Option<u64> {
        self.events.first_key_value().map(|((at, _), _)| *at)
    }

    pub(super) fn advance_to(&mut self, now: u64) {
        while let Some(entry) = self.events.first_entry() {
            let at = entry.key().0;
            if at > now {
                break;
            }
            let event = entry.remove();
            self.now = at;
            self.execute(event);
        }
        self.now = self.now.max(now);
    }

    fn execute(&mut self, event: Event) {
        match event {
            Event::Ready { qp } => self.ready(qp),
            Event::ConnectTimeout { qp } => self.connect_timeout(qp),
            Event::Start { qp, serial } => self.start(qp, serial),
            Event::Gather { serial, piece } => self.gather(serial, piece),
            Event::Arrive { serial } => self.arrive(serial),
            Event::ArrivePiece { serial, piece, data } => self.arrive_piece(serial, piece, data),
            Event::Service { qp } => self.service(qp),
            Event::Sample { serial, piece } => self.sample(serial, piece),
            Event::Land { serial, piece, data } => self.land(serial, piece, data),
            Event::Outcome { qp, serial, status, from, held } => self.answered(qp, serial, status, from, held),
            Event::GiveUp { qp, serial } => self.outcome(qp, serial, CompletionStatus::TransportRetryExceeded),
            Event::DrainSends { qp } => self.drain_sends(qp),
            Event::DrainReceives { qp } => self.drain_receives(qp),
            Event::Fence { qp } => self.fence(qp),
            Event::Bound { node } => self.wake(node),
            Event::PeerGone { qp } => self.peer_gone(qp),
            Event::Deliver { end } => self.deliver(end),
        }
    }

    pub(super) fn node(&mut self, id: NodeId) -> &mut Node {
        self.nodes.entry(id).or_default()
    }

    pub(super) fn wake(&mut self, id: NodeId) {
        self.node(id).woken = true;
    }

    pub(super) fn link_is_cut(&self, a: NodeId, b: NodeId) -> bool {
        self.cut_links.contains(&(a.min(b), a.max(b)))
    }

    /// Whether handles of this life of the node still work.
    pub(super) fn alive(&self, verb: &'static str, id: NodeId, life: u64) -> Result<()> {
        match self.nodes.get(&id) {
            Some(node) if !node.down && node.life == life => Ok(()),
            _ => Err(Error::new(verb, Cause::Disconnected)),
        }
    }

    /// Puts a completion into a queue; the slots taken from it keep this from overflowing.
    pub(super) fn push_completion(&mut self, cq: u64, completion: Completion) {
        let Some(queue) = self.cqs.get_mut(&cq) else { return };
        assert!(queue.entries.len() < queue.depth as usize, "a completion queue overflowed (I9)");
        queue.entries.push_back(completion);
        let (node, armed) = (queue.node, core::mem::take(&mut queue.armed));
        if armed {
            self.wake(node);
        }
        match completion.status {
            CompletionStatus::Success => self.counts.succeeded += 1,
            CompletionStatus::Flushed => self.counts.flushed += 1,
            _ => self.counts.failed += 1,
        }
        self.note(
            "completion",
            &[
                u64::from(completion.queue_pair),
                completion.id,
                completion.status as u64,
                completion.bytes,
                u64::from(completion.immediate.unwrap_or(0)),
            ],
        );
    }

    /// How much of a completion queue is spoken for: all queues attached to it in full, and what queue pairs that are
    /// gone have left in it.
    pub(super) fn attached(&self, cq: u64) -> u64 {
        let live: u64 = self
            .qps
            .values()
            .map(|qp| {
                let send = if qp.send_cq == cq { qp.capacity.max_send_wr } else { 0 };
                let receive = if qp.recv_cq == cq { qp.capacity.max_recv_wr } else { 0 };
                u64::from(send) + u64::from(receive)
            })
            .sum();
        let left = self
            .cqs
            .get(&cq)
            .map_or(0, |queue| queue.entries.iter().filter(|entry| !self.qps.contains_key(&entry.queue_pair)).count());
        live + left as u64
    }

    /// A posted request lets go of its local memory.
    pub(super) fn let_go(&mut self, locals: &[Local]) {
        for local in locals {
            let Some(region) = self.regions.get_mut(&local.region) else { continue };
            region.posts -= 1;
            self.deregister_if_unused(local.region);
        }
    }

    pub(super) fn deregister_if_unused(&mut self, id: u64) {
        if self.regions.get(&id).is_some_and(|region| region.handle_gone && region.posts == 0) {
            self.deregister(id);
        }
    }

    pub(super) fn deregister(&mut self, id: u64) {
        self.regions.remove(&id);
        self.keys.retain(|_, key| key.region != id);
        self.note("deregister", &[id]);
    }

    pub(super) fn written_by_devices(&self, node: NodeId) -> Vec<(usize, u64)> {
        let mut ranges = self.accessed_by_peers(node, false);
        for qp in self.qps.values().filter(|qp| qp.node == node) {
            let reads = qp.sends.iter().filter(|send| send.opcode == Opcode::Read).flat_map(|send| &send.local);
            let receives = qp.receives.iter().filter_map(|receive| receive.local.as_ref());
            ranges.extend(reads.chain(receives).map(|local| (address_of(&local.memory, local.offset), local.len)));
        }
        ranges
    }

    /// Memory of `node` that requests of peers are in.
    pub(super) fn accessed_by_peers(&self, node: NodeId, reading: bool) -> Vec<(usize, u64)> {
        let under_way = self.flights.values().filter(|flight| {
            flight.responder_node == node
                && (flight.opcode == Opcode::Read) == reading
                && flight.done < flight.pieces.len()
        });
        under_way
            .filter_map(|flight| {
                let (_, region, offset) = flight.access?;
                let region = self.regions.get(&region).map(|region| &region.memory);
                Some((address_of(flight.mapping.as_ref().or(region)?, offset), flight.len))
            })
            .collect()
    }

    /// Cuts `len` bytes into pieces at random places: at least one piece, none empty unless `len` is 0.
    pub(super) fn cut(&mut self, len: u64, max_pieces: u64) -> Vec<(u64, u64)> {
        let mut cuts = BTreeSet::from([0, len]);
        for _ in 1..self.random.between(1, max_pieces.max(1)) {
            cuts.insert(self.random.below(len));
        }
        if len == 0 {
            return vec![(0, 0)];
        }
        cuts.iter().zip(cuts.iter().skip(1)).map(|(&start, &end)| (start, end - start)).collect()
    }

    /// A node stops, as if its power went: its requests are gone, its memory does not change any more, its peers find
    /// out by themselves.
    pub(super) fn crash(&mut self, id: NodeId) {
        self.note("crash", &[u64::from(id.0)]);
        let node = self.node(id);
        node.down = true;
        node.life += 1;
        let mine: Vec<u32> = self.qps.iter().filter(|(_, qp)| qp.node == id).map(|(&number, _)| number).collect();
        for number in mine {
            self.tear_down(number, "crash", Cause::Disconnected);
        }
        let regions: Vec<u64> = self.regions.iter().filter(|(_, r)| r.node == id).map(|(&region, _)| region).collect();
        for region in regions {
            self.deregister(region);
        }
        self.crash_net(id);
    }
}

fn address_of(memory: &Memory, offset: u64) -> usize {
    memory.address().addr() + offset as usize
}

/// Copies `out.len()` bytes that begin `at` bytes into `locals` out of them.
pub(super) fn read_locals(locals: &[Local], at: u64, out: &mut [u8]) {
    each_local(locals, at, out.len(), |local, offset, range| {
        assert!(local.memory.read(offset, &mut out[range]).is_ok(), "the range was checked when it was posted");
    });
}

/// Copies `data` to `at` bytes into `locals`.
pub(super) fn write_locals(locals: &[Local], at: u64, data: &[u8]) {
    each_local(locals, at, data.len(), |local, offset, range| {
        assert!(local.memory.write(offset, &data[range]).is_ok(), "the range was checked when it was posted");
    });
}

fn each_local(locals: &[Local], at: u64, len: usize, mut f: impl FnMut(&Local, u64, core::ops::Range<usize>)) {
    let (mut skip, mut done) = (at, 0);
    for local in locals {
        if done == len {
            break;
        }
        if skip >= local.len {
            skip -= local.len;
            continue;
        }
        let take = ((local.len - skip) as usize).min(len - done);
        f(local, local.offset + skip, done..done + take);
        done += take;
        skip = 0;
    }
}
