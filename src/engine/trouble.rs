//! Ways to peers that have failed: how soon that is noticed, how long other ways are preferred, and the way back.
//!
//! A rail that leads to a peer over a network is used once something has come over it. One that fails, before or after, is
//! offered to that peer behind all others for a while, which doubles each time it fails again and is forgotten when it has
//! worked for as long. A link that had to use another path goes back when that while is over and nothing uses it.

use super::link::{Link, LinkId, State};
use super::{Engine, Tick, Timer};
use crate::Path;
use std::collections::BTreeMap;
use towline_control::session::Role;
use towline_verbs::QueuePairState;

/// How long a way that has failed is not preferred: at first, and at most.
const FIRST: Tick = 1_000_000_000;
const LONGEST: Tick = 60_000_000_000;
/// Most ways that are remembered (I9): those that are over first make room.
const MOST: usize = 1024;
/// Between two looks at whether a link that is to go back is in use.
const LOOK_AGAIN: Tick = 1_000_000_000;

#[derive(Debug)]
struct Trouble {
    until: Tick,
    pause: Tick,
    why: String,
}

/// What has failed lately: which rail, to which peer.
#[derive(Debug, Default)]
pub(super) struct Troubles(BTreeMap<(usize, [u8; 16]), Trouble>);

impl Troubles {
    /// It has failed.
    fn note(&mut self, now: Tick, rail: usize, peer: [u8; 16], why: &str) {
        let pause = match self.0.get(&(rail, peer)) {
            // Failures of one moment are one.
            Some(before) if now < before.until => return,
            Some(before) if now < before.until.saturating_add(before.pause) => (before.pause * 2).min(LONGEST),
            _ => FIRST,
        };
        if self.0.len() >= MOST
            && let Some(first) = self.0.iter().min_by_key(|(_, trouble)| trouble.until).map(|(way, _)| *way)
        {
            self.0.remove(&first);
        }
        self.0.insert((rail, peer), Trouble { until: now + pause, pause, why: why.to_owned() });
    }

    /// Until when it is not preferred, and why.
    pub(super) fn of(&self, now: Tick, rail: usize, peer: [u8; 16]) -> Option<(Tick, &str)> {
        let trouble = self.0.get(&(rail, peer))?;
        (now < trouble.until).then_some((trouble.until, trouble.why.as_str()))
    }
}

impl Engine {
    /// Whether a queue pair of `rail` may be cut off from its peer while the connection for control is not.
    fn is_apart(&self, rail: usize) -> bool {
        self.rails[rail].path == Path::Rdma
    }

    /// The rail of `link` has failed.
    pub(super) fn note_trouble(&mut self, link: LinkId, rail: usize, why: &str) {
        let Some(link) = self.links.get(&link) else { return };
        if let Some(peer) = link.incarnation()
            && link.role == Role::Initiator
            && self.is_apart(rail)
        {
            self.troubles.note(self.now, rail, peer, why);
        }
    }

    /// Waits for the queue pair of a link to show that something comes over it.
    pub(super) fn await_proof(&mut self, id: LinkId) {
        let Some(link) = self.links.get(&id) else { return };
        let (Some(rail), Some(queue_pair)) = (link.rail, &link.queue_pair) else { return };
        if link.role == Role::Initiator && self.is_apart(rail) && queue_pair.state() != QueuePairState::ReadyToSend {
            // Where there is nothing else to use it is waited for as long as for any agreement.
            let patience =
                if link.candidates.is_empty() { self.config.times.handshake } else { self.config.times.probe };
            self.timers.set(self.now + patience, Timer::Proof(id, link.offered, patience));
        }
    }

    /// A queue pair has had its time to show that something comes over it.
    pub(super) fn proof_deadline(&mut self, id: LinkId, offered: u32, patience: Tick) {
        let Some(link) = self.links.get(&id) else { return };
        let Some(queue_pair) = &link.queue_pair else { return };
        let waits = link.is_open() && link.offered == offered && !link.proven;
        if waits && queue_pair.state() == QueuePairState::Connecting {
            self.queue_pair_failed(id, &format!("nothing came over it in {} ms", patience / 1_000_000));
        }
    }

    /// Puts the rails that have failed lately behind the others, if there are any; says why.
    pub(super) fn prefer_what_works(&self, link: &Link, candidates: &mut [usize]) -> Vec<String> {
        let Some(peer) = link.incarnation() else { return Vec::new() };
        let trouble = |rail: &usize| self.troubles.of(self.now, *rail, peer);
        if candidates.iter().all(|rail| trouble(rail).is_some()) {
            return Vec::new();
        }
        candidates.sort_by_key(|rail| trouble(rail).is_some());
        let note = |rail: &usize| trouble(rail).map(|(_, why)| format!("not {} now: {why}", self.rails[*rail].name()));
        candidates.iter().filter_map(note).collect()
    }

    /// After a link has opened over another path than its first choice: looks for the way back when that may be well again.
    pub(super) fn plan_return(&mut self, id: LinkId) {
        let Some(link) = self.links.get(&id) else { return };
        let (Some(peer), Some(used)) = (link.incarnation(), link.rail) else { return };
        if link.role != Role::Initiator || self.is_apart(used) {
            return;
        }
        let over = (0..used).filter_map(|rail| self.troubles.of(self.now, rail, peer)).map(|(until, _)| until).min();
        if let Some(over) = over {
            self.timers.set(over, Timer::Return(id, link.offered));
        }
    }

    /// The path that a link should have used may be well again.
    pub(super) fn return_deadline(&mut self, id: LinkId, offered: u32) {
        let Some(link) = self.links.get(&id) else { return };
        if link.state != State::Open || link.offered != offered {
            return;
        }
        let idle = link.gets.is_empty()
            && link.requests.is_empty()
            && link.held.is_empty()
            && link.granted.is_empty()
            && link.waiting.is_empty()
            && link.outstanding == 0
            && !self.has_grants(id)
            && !self.fetches.values().any(|fetch| fetch.link == id);
        if !idle {
            self.timers.set(self.now + LOOK_AGAIN, Timer::Return(id, offered));
            return;
        }
        if let Some(link) = self.links.get_mut(&id) {
            link.reason.clear();
            link.fell_back = false;
            link.handshake = Some(self.timers.set(self.now + self.config.times.handshake, Timer::Handshake(id)));
        }
        self.agree(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: [u8; 16] = [1; 16];

    #[test]
    fn what_fails_again_is_left_alone_for_longer_and_what_works_is_forgiven() {
        let mut troubles = Troubles::default();
        let mut now = 0;
        for pause in [1, 2, 4, 8, 16, 32, 60, 60] {
            troubles.note(now, 3, PEER, "why");
            troubles.note(now, 3, PEER, "its consequence");
            let (until, why) = troubles.of(now, 3, PEER).unwrap();
            assert_eq!((until - now, why), (pause * 1_000_000_000, "why"));
            assert!(troubles.of(until, 3, PEER).is_none());
            now = until;
        }
        troubles.note(now + LONGEST, 3, PEER, "after all");
        assert_eq!(troubles.of(now + LONGEST, 3, PEER), Some((now + LONGEST + FIRST, "after all")));
        assert!(troubles.of(now, 2, PEER).is_none() && troubles.of(now, 3, [2; 16]).is_none(), "others");
    }

    #[test]
    fn no_more_is_remembered_than_there_is_room_for() {
        let mut troubles = Troubles::default();
        for n in 0..3 * MOST as u64 {
            let mut peer = PEER;
            peer[..8].copy_from_slice(&n.to_le_bytes());
            troubles.note(n, 0, peer, "why");
            assert!(troubles.of(n, 0, peer).is_some());
        }
        assert_eq!(troubles.0.len(), MOST);
    }
}
