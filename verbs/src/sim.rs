//! The simulated provider: queue pairs between nodes of one process, on a virtual clock, with seeded misfortune.
//!
//! A [`SimFabric`] holds everything: nodes with one device (`sim0`) each, the byte connections between them
//! ([`net`]), one clock in nanoseconds and one queue of events. It starts no thread, does no I/O and never looks at the
//! real time. All chance comes from the seed, so that one seed and one sequence of calls give one run, byte for byte:
//! [`SimFabric::trace_hash`] says so in one number.
//!
//! It does what the verbs specification allows a NIC to do, and as little as it demands:
//!
//! - a request's bytes are read and written in pieces, at different times, so that torn and stale data show;
//! - requests of one queue pair start and complete in order; those of different queue pairs overtake each other;
//! - between [`QueuePair::to_error`](crate::QueuePair::to_error) and a request's flushed completion the device still
//!   touches its memory; what has left a failed requester still arrives at the responder, until the *responder's* queue
//!   pair is fenced ([`QueuePair::is_fenced`](crate::QueuePair::is_fenced)) or destroyed, or the key is gone;
//! - a destroyed queue pair's unfinished requests have no completions; those already in the queue stay there;
//! - an invalidated key stops new accesses; one under way may still finish, and `invalidate` says so;
//! - with [`Capabilities::reads_by_cpu`](crate::Capabilities::reads_by_cpu) a read is a copy by the requester out of a
//!   mapping: no end of the responder stops it, not even a crash; the requester's completion is the fence.
//!
//! ```
//! use towline_verbs::sim::{FaultPlan, NodeId, SimFabric};
//! use towline_verbs::{Access, LocalSlice, Memory, Opcode, Provider, QueuePairCapacity, WorkRequest};
//!
//! # fn main() -> towline_verbs::Result<()> {
//! let fabric = SimFabric::new(42, FaultPlan::calm());
//! let end = |node| {
//!     let device = fabric.provider(NodeId(node)).open("sim0")?;
//!     let pd = device.alloc_pd()?;
//!     let cq = device.create_cq(16)?;
//!     let qp = pd.create_qp(&cq, &cq, QueuePairCapacity { max_send_wr: 8, max_recv_wr: 8 })?;
//!     let memory = Memory::shared(4096, Default::default())?;
//!     let region = pd.register(memory, Access::LOCAL_WRITE | Access::REMOTE_READ)?;
//!     Ok((cq, qp, region))
//! };
//! let (cq, reader, destination) = end(1)?;
//! let (_, owner, source) = end(2)?;
//! source.memory().write(0, b"over the wire")?;
//! reader.connect(&owner.address(), true)?;
//! owner.connect(&reader.address(), false)?;
//! let request = WorkRequest {
//!     id: 7,
//!     opcode: Opcode::Read,
//!     local: vec![LocalSlice { region: destination.clone(), offset: 100, len: 13 }],
//!     remote: Some(source.remote(0, 13)?),
//! };
//! // SAFETY: nobody touches the destination until the completion below.
//! unsafe { reader.post_send(vec![request])? };
//! let mut done = Vec::new();
//! while cq.poll(&mut done, 1) == 0 {
//!     fabric.advance_to(fabric.next_event_at().expect("something is under way"));
//! }
//! let mut bytes = [0; 13];
//! destination.memory().read(100, &mut bytes)?;
//! assert_eq!(&bytes, b"over the wire");
//! # Ok(())
//! # }
//! ```

pub mod net;
mod plan;
mod provider;
mod queue_pair;
mod random;
mod requester;
mod responder;
mod state;
#[cfg(test)]
mod tests;
mod trace;

pub use plan::{Chance, FaultPlan, NetPlan, Sabotage, Span};
pub use provider::SimProvider;
pub use random::Random;

use core::fmt;
use net::SimNet;
use state::State;
use std::sync::{Arc, Mutex, PoisonError};

/// A node: one machine or process of the simulation. Nodes come into being when they are first named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u32);

/// What happened so far, to see that a run met what it was meant to meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Counts {
    /// Successful completions.
    pub succeeded: u64,
    /// Flushed completions.
    pub flushed: u64,
    /// Completions with any other failure.
    pub failed: u64,
    /// Requests that a responder refused.
    pub refused: u64,
    /// Times that a key was invalidated, or a queue pair failed, with a peer in the memory.
    pub fenced_inside: u64,
    /// Reads that landed in, or on their way to, memory whose request had been flushed.
    pub landed_late: u64,
    /// Times that a request met no posted receive.
    pub receiver_not_ready: u64,
    /// Connections of queue pairs that the plan took away.
    pub lost_connections: u64,
    /// Stalls of byte connections.
    pub stalls: u64,
    /// Resets of byte connections.
    pub resets: u64,
    /// Byte connections that fell silent.
    pub silences: u64,
}

/// A simulated fabric. Clones are handles of the same one; everything made from it stays part of it.
#[derive(Debug, Clone)]
pub struct SimFabric(Arc<Shared>);

impl SimFabric {
    /// A fabric at time 0 whose every chance follows from `seed`.
    #[must_use]
    pub fn new(seed: u64, plan: FaultPlan) -> Self {
        Self(Arc::new(Shared(Mutex::new(State::new(seed, plan)))))
    }

    /// The provider of a node.
    #[must_use]
    pub fn provider(&self, node: NodeId) -> SimProvider {
        self.0.with(|state| {
            state.node(node);
        });
        SimProvider { shared: self.0.clone(), node }
    }

    /// The byte connections.
    #[must_use]
    pub fn net(&self) -> SimNet {
        SimNet(self.0.clone())
    }

    /// The virtual time in nanoseconds.
    #[must_use]
    pub fn now(&self) -> u64 {
        self.0.with(|state| state.now)
    }

    /// When the next event is due; `None` when nothing is under way.
    #[must_use]
    pub fn next_event_at(&self) -> Option<u64> {
        self.0.with(|state| state.next_event_at())
    }

    /// Moves the clock to `now`, executing each event at its own time. Does nothing when `now` is past and nothing is
    /// due.
    pub fn advance_to(&self, now: u64) {
        self.0.with(|state| state.advance_to(now));
    }

    /// Whether a node has been woken since the last call: a completion reached an armed queue, a queue pair changed its
    /// state, or something arrived on a byte connection. What a driver's file descriptors would say.
    #[must_use]
    pub fn take_wake(&self, node: NodeId) -> bool {
        self.0.with(|state| core::mem::take(&mut state.node(node).woken))
    }

    /// Whether completions wait in the node's queues.
    #[must_use]
    pub fn has_completions(&self, node: NodeId) -> bool {
        self.0.with(|state| state.cqs.values().any(|queue| queue.node == node && !queue.entries.is_empty()))
    }

    /// Where devices may still change memory of a node: the local memory of its reads and receives whose completions
    /// are not in a queue yet, and what writes of peers are being put into. Address (as
    /// [`Memory::address`](crate::Memory::address)) and length of each piece. For checks of I1 and I3.
    #[must_use]
    pub fn written_by_devices(&self, node: NodeId) -> Vec<(usize, u64)> {
        self.0.with(|state| state.written_by_devices(node))
    }

    /// Where peers are reading memory of a node at this moment, likewise.
    #[must_use]
    pub fn read_by_peers(&self, node: NodeId) -> Vec<(usize, u64)> {
        self.0.with(|state| state.accessed_by_peers(node, true))
    }

    /// Stops a node at this moment: its queue pairs are dead without completions, its memory does not change any more,
    /// its connections close or fall silent, and what it had sent still arrives. Its handles stay dead also after
    /// [`restart`](Self::restart).
    pub fn crash(&self, node: NodeId) {
        self.0.with(|state| state.crash(node));
    }

    /// Lets a crashed node open its device again.
    pub fn restart(&self, node: NodeId) {
        self.0.with(|state| state.node(node).down = false);
    }

    /// Cuts the link between two nodes, or mends it. While it is cut nothing passes; queue pairs give up after
    /// [`FaultPlan::retry_timeout`], byte connections wait.
    pub fn cut_link(&self, a: NodeId, b: NodeId, cut: bool) {
        self.0.with(|state| {
            state.note("cut-link", &[u64::from(a.0), u64::from(b.0), u64::from(cut)]);
            let link = (a.min(b), a.max(b));
            if cut {
                state.cut_links.insert(link)
            } else {
                state.cut_links.remove(&link)
            };
        });
    }

    /// Takes the connection of the queue pair with this number away.
    pub fn lose_connection(&self, queue_pair: u32) {
        self.0.with(|state| state.lose(queue_pair));
    }

    /// Changes how unkind the fabric is from now on. What devices report stays as it was.
    pub fn set_plan(&self, plan: FaultPlan) {
        self.0.with(|state| state.plan = plan);
    }

    /// What happened so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.0.with(|state| state.counts)
    }

    /// The fold of everything that happened so far, with times and contents. Equal for equal seeds and calls.
    #[must_use]
    pub fn trace_hash(&self) -> u64 {
        self.0.with(|state| state.trace.hash())
    }

    /// Folds something that happened outside the fabric into the trace.
    pub fn note(&self, what: &str, values: &[u64]) {
        self.0.with(|state| state.note(what, values));
    }

    /// Starts (or stops) keeping a line of text for everything that happens.
    pub fn record_trace(&self, on: bool) {
        self.0.with(|state| state.trace.record(on));
    }

    /// The lines kept since the last call.
    #[must_use]
    pub fn take_trace(&self) -> Vec<String> {
        self.0.with(|state| state.trace.take())
    }
}

/// The fabric behind all handles.
struct Shared(Mutex<State>);

impl Shared {
    fn with<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        // A panic under the lock is a failed assertion of the simulation itself; the test that it fails may still look.
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimFabric").finish_non_exhaustive()
    }
}
