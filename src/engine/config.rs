//! How an endpoint is set up: who it is, what it may do, and for how long.

use super::Tick;
use crate::{Limits, Paths};
use towline_control::address::Address;
use towline_control::session::Secret;

/// How an endpoint is set up.
#[derive(Debug, Clone)]
pub struct Config {
    /// Who it is.
    pub identity: Identity,
    /// The paths it may use.
    pub paths: Paths,
    /// Why RDMA, which it may use, is not among its rails.
    pub without_rdma: Option<WithoutRdma>,
    /// Peers must have the same.
    pub secret: Option<Secret>,
    /// Whether peers beyond this host are met without a secret.
    pub insecure: bool,
    /// Limits.
    pub limits: Limits,
    /// Times.
    pub times: Times,
}

/// Why an endpoint that may use RDMA has no rail of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WithoutRdma {
    /// The reason, in words.
    pub why: String,
    /// Whether there is a device: then another path is not the first choice, and its bytes are counted (I6).
    pub has_device: bool,
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
    /// How long a queue pair over a network of its own may take until something has come over it, where another path can be
    /// used instead.
    pub probe: Tick,
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
            probe: 1_000 * MS,
            close_batch: MS / 2,
            fence_grace: 250 * MS,
            fence_poll: 2 * MS,
        }
    }
}
