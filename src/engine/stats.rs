//! What an endpoint has done and holds, as it says itself.

use super::Engine;
use super::fetch::Fetch;
use crate::Path;
use std::collections::BTreeMap;

/// What an endpoint has done and holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Payloads published so far.
    pub puts: u64,
    /// Gets and views that delivered.
    pub gets: u64,
    /// Gets and views that ended with an error.
    pub failures: u64,
    /// Bytes delivered, by path.
    pub bytes: BTreeMap<Path, u64>,
    /// Bytes delivered by another path than the first choice for that peer.
    pub fallback_bytes: u64,
    /// Times that a get was tried again.
    pub retries: u64,
    /// Payloads that can be got now.
    pub payloads: u64,
    /// Gets in progress here.
    pub gets_in_progress: u64,
    /// Gets of peers that wait here for a key.
    pub waiting: u64,
    /// Leases that peers hold.
    pub leases: u64,
    /// Leases that ended without their consumer's word and whose fence has not been seen.
    pub fencing: u64,
    /// Bytes of this endpoint in quarantine: no longer wanted, but a device or peer may still touch them.
    pub quarantined_bytes: u64,
    /// Connected peers.
    pub links: u64,
    /// Bytes of the pool.
    pub pool_bytes: u64,
    /// Bytes of it that are free.
    pub pool_free: u64,
    /// Its largest free run.
    pub pool_largest_free: u64,
    /// Buffers out of it, those of payloads included.
    pub pool_buffers: u64,
    /// Who waits for room in it.
    pub pool_waiting: u64,
}

impl Engine {
    /// What it has done and holds.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let mut stats = self.stats.clone();
        stats.payloads = self.payloads.iter().filter(|slot| slot.is_open()).count() as u64;
        stats.gets_in_progress = self.gets.len() as u64;
        stats.waiting = self.waiting.values().map(|queue| queue.len() as u64).sum();
        stats.leases = self.grants.len() as u64;
        stats.fencing = self.grants.values().filter(|grant| grant.is_fencing()).count() as u64;
        stats.quarantined_bytes = self.fetches.values().filter_map(Fetch::quarantined).sum();
        stats.links = self.links.values().filter(|link| link.is_open()).count() as u64;
        stats.pool_bytes = self.pool.len();
        stats.pool_free = self.pool.free();
        stats.pool_largest_free = self.pool.largest_free_run();
        stats.pool_buffers = self.pool.buffers();
        stats.pool_waiting = self.pool.waiting() as u64;
        stats
    }
}
