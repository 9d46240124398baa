//! What was put and what was asked for: the reference that every result is held against.

use crate::content;
use crate::scenario::{Medium, Scenario, Weather};
use std::collections::BTreeMap;
use towline::engine::{Delivery, OperationId, PayloadId, Storage, Tick};
use towline::{DType, Error, ErrorKind, Gone, Layout, Path, Stats};
use towline_verbs::sim::NodeId;

/// A check that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Violation {
    /// What does not hold: a number of the design's invariants, or a word.
    pub(crate) rule: &'static str,
    pub(crate) what: String,
}

pub(crate) type Check<T = ()> = Result<T, Violation>;

pub(crate) fn violated<T>(rule: &'static str, what: impl Into<String>) -> Check<T> {
    Err(Violation { rule, what: what.into() })
}

/// A node in one of its lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Incarnation {
    pub(crate) node: NodeId,
    pub(crate) life: u64,
}

#[derive(Debug, Clone)]
pub(crate) struct PartSpec {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<u64>,
    pub(crate) len: u64,
}

/// A payload that was put.
#[derive(Debug, Clone)]
pub(crate) struct Published {
    pub(crate) owner: Incarnation,
    pub(crate) key: Vec<u8>,
    pub(crate) id: PayloadId,
    pub(crate) layout: Layout,
    pub(crate) parts: Vec<PartSpec>,
    pub(crate) consumers: u32,
    pub(crate) put_at: u64,
    /// When it was removed or replaced: no lease is granted on it after.
    pub(crate) withdrawn_at: Option<u64>,
    pub(crate) deliveries: u32,
}

/// What a get asked for.
#[derive(Debug, Clone)]
pub(crate) enum Wanted {
    Key(NodeId, Vec<u8>),
    Payload(u64),
}

/// A get that has no result yet.
#[derive(Debug, Clone)]
pub(crate) struct Pending {
    pub(crate) wanted: Wanted,
    pub(crate) view: bool,
    pub(crate) own: bool,
    pub(crate) asked_at: u64,
    pub(crate) deadline: Tick,
    pub(crate) patience: u64,
    pub(crate) must_succeed: bool,
}

/// What an endpoint's own statistics must come to.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) puts: u64,
    pub(crate) gets: u64,
    pub(crate) failures: u64,
    pub(crate) bytes: BTreeMap<Path, u64>,
    pub(crate) fallback_bytes: u64,
}

impl Tally {
    pub(crate) fn of(stats: &Stats) -> Self {
        let (puts, gets, failures) = (stats.puts, stats.gets, stats.failures);
        Self { puts, gets, failures, bytes: stats.bytes.clone(), fallback_bytes: stats.fallback_bytes }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Ledger {
    pub(crate) tallies: BTreeMap<Incarnation, Tally>,
    pub(crate) published: BTreeMap<u64, Published>,
    pub(crate) pending: BTreeMap<(Incarnation, OperationId), Pending>,
}

impl Ledger {
    /// The name of a part says whose it is.
    pub(crate) fn part_name(id: u64, part: usize) -> String {
        format!("payload {id} part {part}")
    }

    fn id_in(layout: &Layout) -> Option<u64> {
        layout.parts().first()?.name.split(' ').nth(1)?.parse().ok()
    }

    /// Takes the result of a get into account. Gives the number of a payload that was delivered.
    pub(crate) fn result(
        &mut self,
        scenario: &Scenario,
        now: u64,
        getter: Incarnation,
        operation: OperationId,
        result: &Result<Delivery, Error>,
    ) -> Check<Option<u64>> {
        let Some(pending) = self.pending.remove(&(getter, operation)) else {
            return violated("I2", format!("{operation:?} of {getter:?} has a second result: {result:?}"));
        };
        let tally = self.tallies.entry(getter).or_default();
        match result {
            Ok(delivery) => {
                let bytes = delivery.layout.payload_len();
                tally.gets += 1;
                *tally.bytes.entry(delivery.path).or_default() += bytes;
                tally.fallback_bytes += delivery.fallback_bytes;
                if ![0, bytes].contains(&delivery.fallback_bytes) {
                    return violated("I6", format!("{} of {bytes} bytes fell back", delivery.fallback_bytes));
                }
            }
            Err(_) => tally.failures += 1,
        }
        match result {
            Ok(delivery) => self.delivered(scenario, now, &pending, delivery).map(Some),
            Err(error) if pending.must_succeed => violated("recovery", format!("{pending:?} failed: {error}")),
            Err(error) => allowed(scenario, &pending, error).map(|()| None),
        }
    }

    fn delivered(&mut self, scenario: &Scenario, now: u64, pending: &Pending, delivery: &Delivery) -> Check<u64> {
        let known = Self::id_in(&delivery.layout).and_then(|id| Some((id, self.published.get_mut(&id)?)));
        let Some((id, published)) = known else {
            return violated("I5", format!("nobody put {:?}", delivery.layout));
        };
        let right = match &pending.wanted {
            Wanted::Key(node, key) => published.owner.node == *node && published.key == *key,
            Wanted::Payload(wanted) => id == *wanted,
        };
        if !right {
            return violated("I4", format!("{:?} was asked for, payload {id} came: {published:?}", pending.wanted));
        }
        if published.layout != delivery.layout {
            return violated("I5", format!("payload {id} is {:?}, {:?} came", published.layout, delivery.layout));
        }
        if published.withdrawn_at.is_some_and(|end| end < pending.asked_at) {
            return violated(
                "I4",
                format!("payload {id} was withdrawn before the get at {}: {published:?}", pending.asked_at),
            );
        }
        if now < published.put_at {
            return violated("I4", "a payload from the future");
        }
        published.deliveries += 1;
        if scenario.weather == Weather::Calm && published.deliveries > published.consumers {
            return violated("I2", format!("payload {id} is for {} consumers, one more got it", published.consumers));
        }
        if pending.view != matches!(delivery.storage, Storage::Views(_)) && delivery.layout.payload_len() > 0 {
            return violated("I5", format!("view: {}, and {:?} came", pending.view, delivery.storage));
        }
        if pending.own != matches!(delivery.storage, Storage::Own(_)) && delivery.layout.payload_len() > 0 {
            return violated("I5", format!("own memory: {}, and {:?} came", pending.own, delivery.storage));
        }
        check_bytes(scenario.seed, id, delivery)?;
        Ok(id)
    }

    /// Everything of that node's life is withdrawn at `now`.
    pub(crate) fn withdraw_all(&mut self, owner: Incarnation, now: u64) {
        for published in self.published.values_mut().filter(|p| p.owner == owner) {
            published.withdrawn_at.get_or_insert(now);
        }
    }

    pub(crate) fn withdraw_key(&mut self, owner: Incarnation, key: &[u8], now: u64) {
        for published in self.published.values_mut().filter(|p| p.owner == owner && p.key == key) {
            published.withdrawn_at.get_or_insert(now);
        }
    }
}

/// Whether every byte of a delivery is the right one.
pub(crate) fn check_bytes(seed: u64, id: u64, delivery: &Delivery) -> Check {
    for (index, part) in delivery.layout.parts().iter().enumerate() {
        let Some(seen) = part_bytes(delivery, index) else {
            return violated("I5", format!("payload {id} part {index} of {} bytes has no bytes", part.len));
        };
        if seen.len() as u64 != part.len {
            return violated("I5", format!("payload {id} part {index} has {} bytes, not {}", seen.len(), part.len));
        }
        if let Some(at) = content::first_difference(seed, id, index, &seen) {
            let text = format!("payload {id} part {index} of {} bytes is wrong from byte {at} on", part.len);
            return violated("I4", text);
        }
    }
    Ok(())
}

fn part_bytes(delivery: &Delivery, index: usize) -> Option<Vec<u8>> {
    let len = delivery.layout.parts()[index].len as usize;
    match &delivery.storage {
        Storage::Pool(buffer) => {
            let offset = delivery.layout.offsets().nth(index)? as usize;
            buffer.as_slice().get(offset..offset + len).map(<[u8]>::to_vec)
        }
        Storage::Own(own) => {
            let offset = delivery.layout.offsets().nth(index)? as usize;
            own.as_slice().get(offset..offset + len).map(<[u8]>::to_vec)
        }
        Storage::Views(views) => match views.get(index)? {
            Some(view) => {
                let mut out = vec![0; len];
                view.read(0, &mut out).ok()?;
                (view.len() == len as u64).then_some(out)
            }
            None => (len == 0).then(Vec::new),
        },
        _ => (len == 0).then(Vec::new),
    }
}

/// Whether a get may fail like that.
fn allowed(scenario: &Scenario, pending: &Pending, error: &Error) -> Check {
    // What was given up by one get is no misfortune of another.
    let calm = matches!(scenario.weather, Weather::Calm | Weather::Impatient);
    let closing = scenario.close_at.is_some();
    let patient = pending.patience > scenario.times.handshake * 10;
    let fine = match error.kind() {
        ErrorKind::TimedOut { waiting_for, .. } => {
            !(calm && patient && !closing && ["a connection", "the peer to agree on a path"].contains(waiting_for))
        }
        ErrorKind::Gone(Gone::OtherIncarnation) => scenario.crash_at.is_some() || closing,
        ErrorKind::Gone(_)
        | ErrorKind::Cancelled
        | ErrorKind::PoolFull { .. }
        | ErrorKind::PoolTooSmall { .. }
        | ErrorKind::Busy { .. } => true,
        ErrorKind::Closed => closing,
        ErrorKind::PathUnsuitable { .. } => pending.view,
        ErrorKind::LeaseExpired => true,
        ErrorKind::DestinationTooSmall { .. } => pending.own,
        // A changed byte of a handshake can't be told from another secret, one of a greeting from another protocol.
        ErrorKind::Protocol { .. }
        | ErrorKind::WrongSecret
        | ErrorKind::SecretRequired
        | ErrorKind::SecretNotExpected
        | ErrorKind::VersionMismatch { .. } => scenario.bends.is_some(),
        // Shared memory is the only path here, and its Unix socket may fail, or be gone with a peer that closes.
        ErrorKind::PathNotAllowed { .. } => (!calm || closing) && scenario.medium == Medium::Mapped,
        ErrorKind::PeerLost { .. } | ErrorKind::PeerUnreachable { .. } => !calm || closing,
        ErrorKind::TransferFailed { .. } => !calm || closing,
        _ => false,
    };
    if fine { Ok(()) } else { violated("I8", format!("in {:?} weather {pending:?} failed: {error}", scenario.weather)) }
}
