//! How an endpoint is set up: who it is, and what it may hold and do, for how long.

use super::Tick;
use crate::Paths;
use towline_control::address::Address;
use towline_control::session::Secret;

/// How an endpoint is set up.
#[derive(Debug, Clone)]
pub struct Config {
    /// Who it is.
    pub identity: Identity,
    /// The paths it may use.
    pub paths: Paths,
    /// Peers must have the same.
    pub secret: Option<Secret>,
    /// Whether peers beyond this host are met without a secret.
    pub insecure: bool,
    /// Limits.
    pub limits: Limits,
    /// Times.
    pub times: Times,
}

/// Who this endpoint is.
#[derive(Debug, Clone)]
pub struct Identity {
    /// The machine's boot id: the same for all processes of one host between two starts.
    pub boot: [u8; 16],
    /// Drawn at random when the endpoint was built.
    pub incarnation: [u8; 16],
    /// Drawn at random once a process.
    pub process: [u8; 16],
    /// Where others reach it.
    pub advertised: Vec<Address>,
    /// The abstract Unix socket it listens at, if it does.
    pub unix_name: Vec<u8>,
}

/// What an endpoint may hold and do (I9).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Longest key, in bytes; at most 1024.
    pub key: usize,
    /// Payloads published at one time.
    pub payloads: usize,
    /// Control connections, in both directions together.
    pub links: usize,
    /// Leases that one peer may hold.
    pub leases_per_peer: usize,
    /// Gets that one peer may have waiting for a key.
    pub waiting_per_peer: usize,
    /// Gets of this endpoint in progress.
    pub gets: usize,
    /// Bytes that stay in quarantine because of one peer before its queue pair is broken at once.
    pub quarantine_per_peer: u64,
    /// Payloads up to this many bytes travel inside the grant.
    pub eager: u32,
    /// Bytes of control frames that may wait to be sent to one peer before nothing more is read from it.
    pub backlog: usize,
    /// Work requests in flight on one queue pair.
    pub send_queue: u32,
    /// Bytes in flight on one queue pair.
    pub in_flight: u64,
    /// How often a get is tried when connections or reads fail.
    pub tries: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            key: 1024,
            payloads: 65_536,
            links: 1024,
            leases_per_peer: 4096,
            waiting_per_peer: 4096,
            gets: 4096,
            quarantine_per_peer: 1 << 30,
            // Measured over TCP on loopback: 4 KiB take 24 us in the grant and 89 us read, 32 KiB 40 and 117 us, 64 KiB 62
            // and 55 us. Over shared memory the border is at 16 KiB (`consume::EAGER_MAPPED`).
            eager: 32 << 10,
            backlog: 8 << 20,
            send_queue: 128,
            in_flight: 16 << 20,
            tries: 4,
        }
    }
}

/// How long things take at most, in nanoseconds.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Times {
    /// A lease, from the newest frame of the consumer that its grant or renewal echoes.
    pub lease: Tick,
    /// What both ends take off or add for clocks that drift.
    pub drift_margin: Tick,
    /// From connecting until both ends know each other.
    pub handshake: Tick,
    /// How long a finished lease may wait for company before the peer is told.
    pub close_batch: Tick,
    /// How long reads that a deadline overtook may go on before their queue pair is broken.
    pub fence_grace: Tick,
    /// Between two looks at a fence that is not there yet.
    pub fence_poll: Tick,
}

impl Default for Times {
    fn default() -> Self {
        const MS: Tick = 1_000_000;
        Self {
            lease: 30_000 * MS,
            drift_margin: 300 * MS,
            handshake: 5_000 * MS,
            close_batch: MS / 2,
            fence_grace: 250 * MS,
            fence_poll: 2 * MS,
        }
    }
}
