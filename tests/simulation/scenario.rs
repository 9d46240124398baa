//! What one seed stands for: how many endpoints, over what, in which weather.

use towline::engine::{Limits, Times};
use towline_verbs::sim::{Chance, FaultPlan, Random, Span};

pub(crate) const MICRO: u64 = 1_000;
pub(crate) const MILLI: u64 = 1_000_000;

/// What the devices can do, and so which fences there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Medium {
    /// A NIC with memory windows: a key for each lease.
    Windows,
    /// A NIC without: one key for the pool.
    RegionKey,
    /// Shared memory: views.
    Mapped,
}

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Weather {
    /// Delays and reordering only: what should work has to work.
    Calm,
    /// Everything now and then.
    Storm,
    /// Control connections stall, are cut and fall silent.
    BadNet,
    /// Queue pairs lose their connection, links are cut.
    BadRails,
    /// Processes stand still for longer than a lease.
    Sleepy,
    /// Nothing fails, but gets of large payloads are given up in the middle of slow reads, and their memory is wanted.
    Impatient,
}

/// Everything that is drawn before the first event.
#[derive(Debug, Clone)]
pub(crate) struct Scenario {
    pub(crate) seed: u64,
    pub(crate) endpoints: u32,
    pub(crate) medium: Medium,
    pub(crate) weather: Weather,
    pub(crate) plan: FaultPlan,
    pub(crate) limits: Limits,
    pub(crate) times: Times,
    pub(crate) pool: u64,
    pub(crate) granule: u64,
    /// Largest part, in bytes.
    pub(crate) largest: u64,
    pub(crate) keys: u64,
    /// Actions of the workload, and the pause between two.
    pub(crate) steps: u64,
    pub(crate) pace: Span,
    /// One endpoint crashes before this step.
    pub(crate) crash_at: Option<u64>,
    /// One endpoint closes before this step, with operations in flight.
    pub(crate) close_at: Option<u64>,
    /// All endpoints are in one process: nothing ends a mapping but its reader's word.
    pub(crate) one_process: bool,
    /// Peers share a secret: everything between them is encrypted, with keys that no seed draws.
    pub(crate) secret: bool,
    /// Control bytes are changed on their way, one in so many of what is sent at a time.
    pub(crate) bends: Option<u64>,
    /// Some endpoints have a path besides that others lack.
    pub(crate) two_paths: bool,
    /// Drift of the clocks against each other, in millionths; within what the margin allows.
    pub(crate) drift: u64,
}

impl Scenario {
    pub(crate) fn draw(seed: u64) -> Self {
        let random = &mut Random::new(seed);
        let one_in = |random: &mut Random, n| random.below(n) == 0;
        let medium = [Medium::Windows, Medium::RegionKey, Medium::Mapped][random.below(3) as usize];
        let weather =
            [Weather::Calm, Weather::Storm, Weather::BadNet, Weather::BadRails, Weather::Sleepy, Weather::Impatient]
                [random.below(6) as usize];
        let mut plan = match weather {
            Weather::Storm => FaultPlan::stormy(),
            _ => FaultPlan::calm(),
        };
        if weather == Weather::BadNet {
            plan.net.stall = Chance(60_000);
            plan.net.reset = Chance(15_000);
            plan.net.silence = Chance(6_000);
            plan.net.refuse = Chance(50_000);
        }
        if weather == Weather::BadRails {
            plan.lose_connection = Chance(20_000);
            plan.late = Chance(100_000);
            plan.bind_fails = Chance(20_000);
        }
        if one_in(random, 2) || weather == Weather::Impatient {
            // Slow responders: leases and deadlines end in the middle of reads.
            plan.piece_gap = Span(1_000, 3 * MILLI);
        }
        if one_in(random, 2) {
            // A long way: much is under way when something ends.
            plan.latency = Span(MICRO, 300 * MICRO);
            plan.flush = Span(0, 2 * MICRO);
            plan.fence = Span(100, MILLI);
        }
        if medium == Medium::Mapped {
            plan.peer_learns = Chance::ALWAYS; // the end of a process of the same host is always told
        }
        plan.max_pieces = random.between(1, 6);
        plan.capabilities.scoped_keys = medium == Medium::Windows;
        if medium == Medium::Windows && seed.is_multiple_of(2) {
            plan.bind = Span(0, 200 * MICRO); // behind what the device does already
        }
        plan.capabilities.loans = medium == Medium::Windows;
        plan.capabilities.mappable = medium == Medium::Mapped;
        plan.capabilities.reads_by_cpu = medium == Medium::Mapped;
        plan.capabilities.preferred_chunk = 1 << random.between(8, 14);
        plan.capabilities.max_send_wr = random.between(2, 32) as u32;
        let mut limits = Limits::default();
        limits.eager = [0, 64, 1024][random.below(3) as usize];
        limits.send_queue = random.between(2, 40) as u32;
        limits.in_flight = 1 << random.between(9, 16);
        if weather == Weather::Sleepy {
            // Whole payloads are in flight at once, and may all arrive while their reader sleeps.
            plan.capabilities.preferred_chunk = 1 << 14;
            limits.in_flight = 1 << 20;
        }
        limits.gets = 64;
        limits.payloads = random.between(8, 64) as usize;
        limits.leases_per_peer = random.between(2, 32) as usize;
        limits.waiting_per_peer = random.between(4, 32) as usize;
        limits.quarantine_per_peer = 1 << random.between(10, 18);
        let mut times = Times::default();
        times.lease = random.between(4, 30) * MILLI;
        times.drift_margin = times.lease / 50;
        times.handshake = 5 * MILLI;
        times.close_batch = 50 * MICRO;
        times.fence_grace = if one_in(random, 2) { 0 } else { random.between(0, 2_000) * MICRO };
        if weather == Weather::Impatient {
            limits.eager = 0;
            times.fence_grace = 0;
        }
        if weather == Weather::Calm {
            // Reads that were given up are waited for, however long, and break no queue pair under the others.
            times.fence_grace = 1_000 * MILLI;
            limits.quarantine_per_peer = 1 << 30;
        }
        times.fence_poll = 50 * MICRO;
        let granule = 1 << random.between(6, 12);
        let largest = 1 << random.between(if weather == Weather::Impatient { 12 } else { 8 }, 15);
        let failing = !matches!(weather, Weather::Calm | Weather::Impatient);
        let steps = random.between(30, 120);
        let one_process = medium == Medium::Mapped && one_in(random, 3);
        let secret = one_in(random, 4);
        let bends = (failing && one_in(random, 5)).then(|| random.between(20, 200));
        if one_in(random, 4) {
            // What is said of much at once does not fit: it waits for the peer to take some of it.
            limits.backlog = 8 << 10;
            limits.eager = limits.eager.min(64);
        }
        if one_in(random, 2) {
            // Much breaks, and ends by itself, before a producer is told what its consumers have had.
            times.close_batch = random.between(times.lease / 50, times.lease / 4);
        }
        if weather == Weather::Impatient {
            limits.tries = 1; // nothing fails here but what somebody else gave up
        }
        Self {
            seed,
            endpoints: random.between(2, 3) as u32,
            medium,
            weather,
            plan,
            limits,
            times,
            pool: (largest << random.between(1, 4)).max(64 << 10),
            granule,
            largest,
            keys: random.between(2, 8),
            steps,
            pace: Span(0, random.between(20, 800) * MICRO),
            crash_at: (failing && !one_process && one_in(random, 2)).then(|| random.below(steps)),
            close_at: one_in(random, 4).then(|| random.below(steps)),
            one_process,
            secret,
            bends,
            two_paths: medium != Medium::Mapped && one_in(random, 2),
            drift: random.below(5_000),
        }
    }
}
