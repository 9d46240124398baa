//! What is still to be said to peers to which no link is open: which leases are closed, and which requests' grants nobody
//! will use.
//!
//! The table is bounded (I9). When it is full, what is forgotten is the peer's that fills most of it: one who leaves much
//! to be said does not make this endpoint forget what it owes to others (I7). What a producer is not told its own fences
//! end: windows by time, mappings with this process.

use std::collections::BTreeMap;
use towline_control::wire::{CloseEntry, Outcome};

/// Entries of all peers together.
const MAX_ORPHANS: usize = 4096;

/// What is to be said to one peer.
#[derive(Debug, Default)]
pub(super) struct Orphans {
    pub(super) closes: Vec<CloseEntry>,
    /// Requests whose grants, if there were any, nobody here will use.
    pub(super) cancels: Vec<u64>,
    /// Whether only our word ends some of these leases: then it is for the endpoint itself to hear.
    pub(super) mapped: bool,
}

impl Orphans {
    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(super) fn len(&self) -> usize {
        self.closes.len() + self.cancels.len()
    }

    pub(super) fn append(&mut self, mut other: Self) {
        self.closes.append(&mut other.closes);
        self.cancels.append(&mut other.cancels);
        self.mapped |= other.mapped;
    }

    /// What is worth saying again when nothing is mapped: that a payload was delivered. All else the producer's own fences
    /// have done by then.
    pub(super) fn keep_deliveries(&mut self) {
        self.closes.retain(|entry| entry.outcome() == Outcome::Delivered);
        self.cancels.clear();
        self.mapped = false;
    }

    /// Forgets the oldest.
    fn forget(&mut self, entries: usize) {
        let closes = entries.min(self.closes.len());
        self.closes.drain(..closes);
        self.cancels.drain(..(entries - closes).min(self.cancels.len()));
    }
}

/// By peer's incarnation.
#[derive(Debug, Default)]
pub(super) struct OrphanTable {
    peers: BTreeMap<[u8; 16], Orphans>,
    entries: usize,
}

impl OrphanTable {
    pub(super) fn add(&mut self, peer: [u8; 16], orphans: Orphans) {
        if orphans.is_empty() {
            return;
        }
        self.entries += orphans.len();
        self.peers.entry(peer).or_default().append(orphans);
        while self.entries > MAX_ORPHANS {
            // The largest becomes as small as the next, if that much has to go.
            let (mut largest, mut next) = ((0, peer), 0);
            for (peer, orphans) in &self.peers {
                let len = orphans.len();
                if len > largest.0 {
                    next = largest.0;
                    largest = (len, *peer);
                } else {
                    next = next.max(len);
                }
            }
            let too_many = (largest.0 - next).clamp(1, self.entries - MAX_ORPHANS);
            let Some(orphans) = self.peers.get_mut(&largest.1) else { return };
            orphans.forget(too_many);
            self.entries -= too_many;
            if orphans.is_empty() {
                self.peers.remove(&largest.1);
            }
        }
    }

    /// Whether only this endpoint's word ends what is to be said to `peer`.
    pub(super) fn is_mapped(&self, peer: [u8; 16]) -> bool {
        self.peers.get(&peer).is_some_and(|orphans| orphans.mapped)
    }

    /// Takes out what is to be said to `peer`.
    pub(super) fn take(&mut self, peer: [u8; 16]) -> Option<Orphans> {
        let orphans = self.peers.remove(&peer)?;
        self.entries -= orphans.len();
        Some(orphans)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn closes(leases: std::ops::Range<u64>) -> Orphans {
        let closes = leases.map(|lease| CloseEntry::new(lease, Outcome::Delivered)).collect();
        Orphans { closes, ..Orphans::default() }
    }

    #[test]
    fn a_peer_that_leaves_much_to_be_said_makes_nobody_forget_what_is_owed_to_others() {
        let (honest, greedy) = ([1; 16], [2; 16]);
        let mut table = OrphanTable::default();
        table.add(greedy, closes(0..MAX_ORPHANS as u64));
        table.add(honest, closes(0..100));
        table.add(greedy, Orphans { cancels: (0..1000).collect(), ..Orphans::default() });
        assert_eq!(table.take(honest).map(|orphans| orphans.len()), Some(100));
        assert_eq!(table.take(greedy).map(|orphans| orphans.len()), Some(MAX_ORPHANS - 100));
        assert!(table.take(greedy).is_none());
        assert_eq!(table.entries, 0);
    }

    #[test]
    fn many_peers_with_little_to_be_said_are_bounded_together() {
        let mut table = OrphanTable::default();
        for peer in 0..2 * MAX_ORPHANS as u64 {
            let mut name = [0; 16];
            name[..8].copy_from_slice(&peer.to_le_bytes());
            table.add(name, closes(0..1));
        }
        assert_eq!((table.entries, table.peers.len()), (MAX_ORPHANS, MAX_ORPHANS));
    }
}
