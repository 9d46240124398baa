//! How unkind a simulated network is.

use super::random::Random;
use crate::Capabilities;

/// A length of virtual time, drawn anew at each use: from the first to the second number of nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span(pub u64, pub u64);

impl Span {
    pub(super) fn draw(self, random: &mut Random) -> u64 {
        random.between(self.0, self.1.max(self.0))
    }
}

/// How often something happens, in a million.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chance(pub u32);

impl Chance {
    /// Never.
    pub const NEVER: Self = Self(0);
    /// Every time.
    pub const ALWAYS: Self = Self(1_000_000);

    pub(super) fn draw(self, random: &mut Random) -> bool {
        random.below(1_000_000) < u64::from(self.0)
    }
}

/// A device that breaks its word: to show that a test would see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Sabotage {
    /// It says that memory is fenced while peers are still in it.
    EarlyFence,
    /// A read whose completion said that it was flushed still lands.
    LateLanding,
}

/// What the simulated devices are, how long things take, and what goes wrong how often.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FaultPlan {
    /// What every device of the fabric reports; `scoped_keys` and `mappable` choose between a NIC with memory windows,
    /// one without, and shared memory.
    pub capabilities: Capabilities,
    /// From posting a request, or from the start of the one before, to its start.
    pub start: Span,
    /// One way between two nodes.
    pub latency: Span,
    /// Largest number of pieces in which a request's bytes are read and written, each at a time of its own.
    pub max_pieces: u64,
    /// Between two pieces.
    pub piece_gap: Span,
    /// From the end of a request to its completion in the queue.
    pub completion: Span,
    /// How often a completion is late by [`late_by`](Self::late_by) on top.
    pub late: Chance,
    /// By how much.
    pub late_by: Span,
    /// From the error state to the first flushed completion, and between two.
    pub flush: Span,
    /// From the error state until no peer can touch the memory any more.
    pub fence: Span,
    /// From the second end's `connect` until an end is ready; each end has its own.
    pub connect: Span,
    /// How long an end waits for the other before it fails.
    pub connect_timeout: u64,
    /// How long a requester tries to reach a peer that does not answer.
    pub retry_timeout: u64,
    /// How long the peer makes a sender wait that met no posted receive.
    pub rnr_delay: Span,
    /// How often it makes it wait before it gives up.
    pub rnr_retries: u32,
    /// How often a request, at its start, loses the connection.
    pub lose_connection: Chance,
    /// How often the other end is told, after a latency, that a queue pair failed (as a socket tells); otherwise it
    /// learns it from its own next request (as a NIC does).
    pub peer_learns: Chance,
    /// How often a refused access moves the responder's queue pair to the error state too.
    pub refusal_kills_responder: Chance,
    /// How often invalidating a key stops an access that is under way, instead of letting it finish first.
    pub invalidate_stops: Chance,
    /// From a window's bind until its key is valid.
    pub bind: Span,
    /// How often the device has no memory window left.
    pub bind_fails: Chance,
    /// What the devices do that they must not; `None` for honest ones.
    pub sabotage: Option<Sabotage>,
    /// The control connections.
    pub net: NetPlan,
}

/// The byte connections of a [`FaultPlan`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetPlan {
    /// One way between two nodes.
    pub latency: Span,
    /// Largest number of pieces in which one `send` arrives.
    pub max_pieces: u64,
    /// How often a piece arrives together with the one before.
    pub glue: Chance,
    /// How often a `send` stalls its direction by [`stall_by`](Self::stall_by).
    pub stall: Chance,
    /// By how much.
    pub stall_by: Span,
    /// How often a `send` resets the connection after a prefix of its bytes.
    pub reset: Chance,
    /// How often, from a `send` on, nothing arrives any more, in either direction, without a word.
    pub silence: Chance,
    /// How often a dial is refused.
    pub refuse: Chance,
    /// How often a crash closes the node's connections (a killed process); otherwise they fall silent (a lost machine).
    pub crash_closes: Chance,
}

impl FaultPlan {
    /// Delays and reordering, and nothing goes wrong.
    #[must_use]
    pub fn calm() -> Self {
        let mut capabilities = Capabilities::new(1 << 30, 64);
        capabilities.preferred_chunk = 16 << 10;
        capabilities.max_sge = 4;
        Self {
            capabilities,
            start: Span(0, 500),
            latency: Span(1_000, 20_000),
            max_pieces: 3,
            piece_gap: Span(10, 2_000),
            completion: Span(50, 2_000),
            late: Chance::NEVER,
            late_by: Span(100_000, 2_000_000),
            flush: Span(100, 50_000),
            fence: Span(100, 100_000),
            connect: Span(1_000, 50_000),
            connect_timeout: 5_000_000,
            retry_timeout: 2_000_000,
            rnr_delay: Span(10_000, 100_000),
            rnr_retries: 6,
            lose_connection: Chance::NEVER,
            peer_learns: Chance(500_000),
            refusal_kills_responder: Chance(500_000),
            invalidate_stops: Chance(500_000),
            bind: Span(0, 0),
            bind_fails: Chance::NEVER,
            sabotage: None,
            net: NetPlan {
                latency: Span(2_000, 40_000),
                max_pieces: 4,
                glue: Chance(300_000),
                stall: Chance::NEVER,
                stall_by: Span(500_000, 20_000_000),
                reset: Chance::NEVER,
                silence: Chance::NEVER,
                refuse: Chance::NEVER,
                crash_closes: Chance(700_000),
            },
        }
    }

    /// As [`calm`](Self::calm), and everything goes wrong now and then.
    #[must_use]
    pub fn stormy() -> Self {
        let mut plan = Self::calm();
        plan.late = Chance(50_000);
        plan.lose_connection = Chance(3_000);
        plan.bind_fails = Chance(5_000);
        plan.net.stall = Chance(20_000);
        plan.net.reset = Chance(4_000);
        plan.net.silence = Chance(1_000);
        plan.net.refuse = Chance(20_000);
        plan
    }
}

impl Default for FaultPlan {
    fn default() -> Self {
        Self::calm()
    }
}
