//! Endpoints, fabric, network and clock together; time goes on here, and after every step everything is checked.

use crate::content;
use crate::host::{Clock, Directory, Host, address_of};
use crate::ledger::{Check, Incarnation, Ledger, Published, Tally, check_bytes, violated};
use crate::scenario::{MICRO, MILLI, Medium, Scenario};
use std::collections::BTreeMap;
use std::sync::Arc;
use towline::engine::{Delivery, HeldLease, Identity, LinkId, Storage};
use towline::{Buffer, Path};
use towline_verbs::memory::Loan;
use towline_verbs::sim::{Counts, NodeId, Random, Sabotage, SimFabric};

/// A fault of the world's own making, to see that it is seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Plant {
    /// The producer's application writes into memory that it has published.
    WriteIntoPublished,
    /// A late byte lands in memory that was handed out.
    LateByte,
    /// A delivered buffer is never given back.
    Leak,
    /// A wake-up of the driver is lost: the engine is not pumped when a completion comes or its deadline passes.
    LostWake,
    /// A view is read after its lease was given back.
    ViewAfterRelease,
    /// Control bytes are changed on the way.
    BentByte,
    /// One result is taken for another's.
    SecondResult,
    /// Devices say that memory is fenced while peers are still in it.
    EarlyFence,
    /// Reads land after the completion that said that they were flushed.
    LateLanding,
}

/// Memory in the application's hands, with content that only the application may change.
pub(crate) struct Held {
    pub(crate) owner: Incarnation,
    pub(crate) what: HeldWhat,
}

pub(crate) enum HeldWhat {
    /// A buffer from `allocate`, filled with the pattern of this number.
    Pattern(u64, Buffer),
    /// A delivered payload.
    Delivered(u64, Delivery),
}

impl HeldWhat {
    fn buffer(&self) -> Option<&Buffer> {
        match self {
            Self::Pattern(_, buffer) => Some(buffer),
            Self::Delivered(_, Delivery { storage: Storage::Pool(buffer), .. }) => Some(buffer),
            Self::Delivered(..) => None,
        }
    }

    /// Where its memory is, if it is not somebody else's.
    fn memory(&self, base: usize) -> Option<(usize, usize)> {
        if let Self::Delivered(_, Delivery { storage: Storage::Own(own), .. }) = self {
            let start = own.as_slice().as_ptr().addr();
            return Some((start, start + own.as_slice().len()));
        }
        let buffer = self.buffer()?;
        let start = base + buffer.offset() as usize;
        Some((start, start + buffer.len()))
    }

    pub(crate) fn lease(&self) -> Option<HeldLease> {
        match self {
            Self::Delivered(_, delivery) => delivery.lease,
            Self::Pattern(..) => None,
        }
    }
}

/// A payload whose bytes are still being written, by its number.
pub(crate) struct Filling {
    pub(crate) payload: u64,
    /// Where its parts lie in the pool, and how many of its bytes are there.
    pub(crate) offsets: Vec<u64>,
    pub(crate) done: u64,
    /// What is lent in the place of each part with bytes, if they are.
    pub(crate) loans: Vec<Arc<Loan>>,
}

pub(crate) struct World {
    pub(crate) scenario: Scenario,
    pub(crate) plant: Option<Plant>,
    pub(crate) random: Random,
    pub(crate) fabric: SimFabric,
    pub(crate) hosts: BTreeMap<NodeId, Host>,
    pub(crate) directory: Directory,
    pub(crate) ledger: Ledger,
    pub(crate) held: Vec<Held>,
    pub(crate) filling: Vec<Filling>,
    /// Who everybody is and was.
    pub(crate) identities: BTreeMap<Incarnation, Identity>,
    /// Where the first byte of each payload lies in its producer's pool.
    pub(crate) places: BTreeMap<u64, u64>,
    /// Ends of processes that their watchers have not been told: when, who, which link.
    pub(crate) deaths: Vec<(u64, Incarnation, LinkId)>,
    /// What happened how often.
    pub(crate) seen: BTreeMap<&'static str, u64>,
    next_payload: u64,
    idle_rounds: u64,
}

impl World {
    pub(crate) fn new(scenario: Scenario, plant: Option<Plant>) -> Self {
        let mut plan = scenario.plan.clone();
        plan.sabotage = match plant {
            Some(Plant::EarlyFence) => Some(Sabotage::EarlyFence),
            Some(Plant::LateLanding) => Some(Sabotage::LateLanding),
            _ => None,
        };
        let fabric = SimFabric::new(scenario.seed ^ 0xFAB, plan);
        let mut world = Self {
            random: Random::new(scenario.seed ^ 0x3012D),
            scenario,
            plant,
            fabric,
            hosts: BTreeMap::new(),
            directory: Directory::default(),
            ledger: Ledger::default(),
            held: Vec::new(),
            filling: Vec::new(),
            identities: BTreeMap::new(),
            places: BTreeMap::new(),
            deaths: Vec::new(),
            seen: BTreeMap::new(),
            next_payload: 1,
            idle_rounds: 0,
        };
        for node in 1..=world.scenario.endpoints {
            world.start(NodeId(node), 0);
        }
        world
    }

    pub(crate) fn count(&mut self, what: &'static str) {
        *self.seen.entry(what).or_default() += 1;
    }

    pub(crate) fn start(&mut self, id: NodeId, life: u64) {
        let drift = self.scenario.drift as i64;
        let per_million = self.random.between(0, 2 * drift as u64) as i64 - drift;
        let clock = Clock { base: self.random.between(1, 1 << 50), per_million };
        let mut host = Host::start(&self.scenario, &self.fabric, id, life, clock);
        if self.plant == Some(Plant::BentByte) {
            host.bends_bytes = Some(20);
        }
        self.directory.addresses.insert(address_of(id), id);
        self.directory.unix.insert(host.identity.unix_name.clone(), id);
        self.identities.insert(Incarnation { node: id, life }, host.identity.clone());
        self.hosts.insert(id, host);
    }

    pub(crate) fn incarnation(&self, id: NodeId) -> Incarnation {
        Incarnation { node: id, life: self.hosts[&id].life }
    }

    pub(crate) fn any_host(&mut self) -> NodeId {
        let nth = self.random.below(self.hosts.len() as u64) as usize;
        *self.hosts.keys().nth(nth).expect("some node lives")
    }

    pub(crate) fn fresh_payload(&mut self) -> u64 {
        self.next_payload += 1;
        self.next_payload
    }

    /// Lets `act` use a host's engine, and carries out what follows.
    pub(crate) fn with_host<T>(&mut self, id: NodeId, act: impl FnOnce(&mut Host) -> T) -> Check<T> {
        let host = self.hosts.get_mut(&id).expect("a live node");
        let result = act(host);
        host.act(&self.directory);
        self.results(id)?;
        Ok(result)
    }

    /// Lets time go on until `until`, event by event.
    pub(crate) fn advance(&mut self, until: u64) -> Check {
        self.run_hosts()?;
        loop {
            let mut next = until;
            next = next.min(self.fabric.next_event_at().unwrap_or(u64::MAX));
            next = next.min(self.deaths.iter().map(|(at, ..)| *at).min().unwrap_or(u64::MAX));
            if self.plant != Some(Plant::LostWake) {
                next = next.min(self.hosts.values().filter_map(Host::due).min().unwrap_or(u64::MAX));
            }
            let before = self.fabric.now();
            self.fabric.advance_to(next);
            self.run_hosts()?;
            self.idle_rounds = if self.fabric.now() > before { 0 } else { self.idle_rounds + 1 };
            if self.idle_rounds > 10_000 {
                return violated("progress", "an engine asks to be pumped again and again at one moment");
            }
            if self.fabric.now() >= until && self.fabric.next_event_at().is_none_or(|at| at > until) {
                return Ok(());
            }
        }
    }

    fn run_hosts(&mut self) -> Check {
        let now = self.fabric.now();
        for (node, host) in &mut self.hosts {
            let watcher = Incarnation { node: *node, life: host.life };
            self.deaths.extend(host.mourned.drain(..).map(|link| (now, watcher, link)));
        }
        while let Some(at) = self.deaths.iter().position(|(at, ..)| *at <= now) {
            let (_, watcher, link) = self.deaths.remove(at);
            if self.hosts.get(&watcher.node).is_some_and(|host| host.life == watcher.life) {
                self.fabric.note("process ended", &[u64::from(watcher.node.0), link.0]);
                self.with_host(watcher.node, |host| {
                    let now = host.now();
                    host.engine.process_ended(now, link);
                })?;
            }
        }
        let ids: Vec<NodeId> = self.hosts.keys().copied().collect();
        for id in ids {
            let Some(host) = self.hosts.get_mut(&id) else { continue };
            if self.plant == Some(Plant::LostWake) && host.engine.stats().gets_in_progress > 0 {
                continue;
            }
            if host.run(&self.directory) {
                self.results(id)?;
            }
        }
        self.check()
    }

    /// Takes the results that an engine announced.
    fn results(&mut self, id: NodeId) -> Check {
        let getter = self.incarnation(id);
        let host = self.hosts.get_mut(&id).expect("a live node");
        for operation in core::mem::take(&mut host.woken) {
            let host = self.hosts.get_mut(&id).expect("a live node");
            let Some(result) = host.engine.take(operation) else {
                return violated("I2", format!("{operation:?} was announced and has no result"));
            };
            if host.engine.take(operation).is_some() {
                return violated("I2", format!("{operation:?} has two results"));
            }
            let now = self.fabric.now();
            self.fabric.note("result", &[u64::from(id.0), operation.0, u64::from(result.is_ok())]);
            let delivered = self.ledger.result(&self.scenario, now, getter, operation, &result)?;
            if self.plant == Some(Plant::SecondResult) && result.is_ok() {
                self.ledger.result(&self.scenario, now, getter, operation, &result)?;
            }
            match result {
                Ok(delivery) => {
                    self.count(match &delivery.storage {
                        Storage::Views(_) => "viewed",
                        Storage::Pool(_) => "delivered",
                        Storage::Own(_) => "delivered into own memory",
                        _ => "delivered empty",
                    });
                    if delivery.path == Path::Direct {
                        self.count("delivered within one process");
                    }
                    if delivery.fallback_bytes > 0 {
                        self.count("delivered by a fallback");
                    }
                    if self.scenario.secret {
                        self.count("delivered with a secret");
                    }
                    if delivery.retries > 0 {
                        self.count("delivered after retries");
                    }
                    let what = HeldWhat::Delivered(delivered.expect("checked"), delivery);
                    self.held.push(Held { owner: getter, what });
                }
                Err(error) => {
                    self.fabric.note(&error.to_string(), &[]);
                    self.count(kind_of(&error));
                }
            }
        }
        Ok(())
    }

    /// Everything that holds at every moment.
    fn check(&mut self) -> Check {
        let now = self.fabric.now();
        for (id, host) in &self.hosts {
            let stats = host.engine.stats();
            let overdue = self.ledger.pending.iter().find(|((getter, _), pending)| {
                getter.node == *id && getter.life == host.life && pending.deadline <= host.clock.at(now)
            });
            if let Some((get, pending)) = overdue
                && now >= host.asleep_until
            {
                return violated("I10", format!("{get:?} has no result at its deadline: {pending:?}"));
            }
            let pending = self.ledger.pending.keys().filter(|(getter, _)| getter.node == *id).count() as u64;
            if stats.gets_in_progress != pending {
                return violated("I2", format!("{id:?} has {} gets, {pending} are expected", stats.gets_in_progress));
            }
            let limits = &self.scenario.limits;
            let peers = u64::from(self.scenario.endpoints) * 4;
            let bounded = stats.pool_free <= stats.pool_bytes
                && stats.payloads <= limits.payloads as u64
                && stats.links <= limits.links as u64
                && stats.leases <= peers * limits.leases_per_peer as u64;
            if !bounded {
                return violated("I9", format!("{id:?}: {stats:?}"));
            }
        }
        self.check_touched()?;
        if self.random.below(4) == 0 {
            self.check_free()?;
        }
        if !self.held.is_empty() {
            let nth = self.random.below(self.held.len() as u64) as usize;
            self.check_held(nth)?;
        }
        Ok(())
    }

    /// What each endpoint says that it has done is what was seen of it.
    pub(crate) fn check_tallies(&self) -> Check {
        for (id, host) in &self.hosts {
            let own = Incarnation { node: *id, life: host.life };
            let said = Tally::of(&host.engine.stats());
            let seen = self.ledger.tallies.get(&own).cloned().unwrap_or_default();
            if said != seen {
                return violated("I6", format!("{own:?} says {said:?}, and did {seen:?}"));
            }
        }
        Ok(())
    }

    /// Memory in the application's hands is in nobody else's: no buffer lies in another, no device is in it (I1, I3).
    fn check_touched(&self) -> Check {
        for (id, host) in &self.hosts {
            let mut ranges: Vec<(usize, usize)> = Vec::new();
            let base = host.memory.address().addr();
            for held in self.held.iter().filter(|held| held.owner.node == *id && held.owner.life == host.life) {
                ranges.extend(held.what.memory(base));
            }
            ranges.sort_unstable();
            if let Some(pair) = ranges.windows(2).find(|pair| pair[0].1 > pair[1].0) {
                return violated("I2", format!("two buffers of {id:?} share memory: {pair:?}"));
            }
            let inside = |(address, len): &(usize, u64)| {
                let end = address + *len as usize;
                *len > 0 && ranges.iter().any(|(from, to)| *address < *to && end > *from)
            };
            if let Some(range) = self.fabric.written_by_devices(*id).iter().find(|range| inside(range)) {
                return violated("I3", format!("a device of {id:?} may write {range:?}, which was handed out"));
            }
            if let Some(range) = self.fabric.read_by_peers(*id).iter().find(|range| inside(range)) {
                return violated("I1", format!("a peer of {id:?} reads {range:?}, which was handed out"));
            }
        }
        Ok(())
    }

    /// Memory that the pool would hand out now is in nobody's hands: no device and no peer is in it (I1, I3).
    fn check_free(&self) -> Check {
        for (id, host) in &self.hosts {
            let mut touched = self.fabric.written_by_devices(*id);
            touched.extend(self.fabric.read_by_peers(*id));
            touched.retain(|(_, len)| *len > 0);
            if touched.is_empty() {
                continue;
            }
            // All of it is taken for a moment. Nothing is, while somebody waits for room.
            let mut free = Vec::new();
            while let Ok(buffer) = host.engine.allocate(host.engine.stats().pool_largest_free) {
                free.push(buffer);
            }
            let base = host.memory.address().addr();
            for buffer in &free {
                let (start, end) = (base + buffer.offset() as usize, base + buffer.offset() as usize + buffer.len());
                let inside = |(address, len): &&(usize, u64)| *address < end && address + *len as usize > start;
                if let Some(range) = touched.iter().find(inside) {
                    return violated("I1", format!("{range:?} of {id:?} is free, and a device or a peer is in it"));
                }
            }
        }
        Ok(())
    }

    pub(crate) fn check_held(&self, nth: usize) -> Check {
        match &self.held[nth].what {
            HeldWhat::Pattern(pattern, buffer) => {
                match content::first_difference(self.scenario.seed, *pattern, usize::MAX, buffer.as_slice()) {
                    Some(at) => violated("I1", format!("a buffer of the application's was changed at byte {at}")),
                    None => Ok(()),
                }
            }
            HeldWhat::Delivered(id, delivery) => check_bytes(self.scenario.seed, *id, delivery)
                .or_else(|wrong| violated("I1", format!("after it was delivered: {}", wrong.what))),
        }
    }

    /// The application is done with something that it held: looks at it once more and gives it back.
    pub(crate) fn give_back(&mut self, nth: usize) -> Check {
        self.check_held(nth)?;
        let Held { owner, what } = self.held.swap_remove(nth);
        let lease = what.lease();
        match (self.plant, what) {
            (Some(Plant::Leak), HeldWhat::Delivered(_, delivery)) => core::mem::forget(delivery),
            (Some(Plant::ViewAfterRelease), HeldWhat::Delivered(id, mut delivery)) if lease.is_some() => {
                delivery.lease = None;
                self.held.push(Held { owner, what: HeldWhat::Delivered(id, delivery) });
            }
            (_, what) => drop(what),
        }
        let alive = self.hosts.get(&owner.node).is_some_and(|host| host.life == owner.life);
        if let (Some(lease), true) = (lease, alive) {
            self.with_host(owner.node, |host| {
                let now = host.now();
                host.engine.release(now, lease);
            })?;
        }
        Ok(())
    }

    /// A node's process ends, without a word. Everything that it had is gone; it starts again under the same address.
    pub(crate) fn crash(&mut self, id: NodeId) -> Check {
        let now = self.fabric.now();
        self.fabric.crash(id);
        self.end_process(id, now);
        self.fabric.restart(id);
        self.count("crashed");
        Ok(())
    }

    /// What the end of a process means for the rest of the world; the node is started anew.
    pub(crate) fn end_process(&mut self, id: NodeId, now: u64) {
        let dead = self.incarnation(id);
        let host = self.hosts.remove(&id).expect("a live node");
        self.directory.unix.remove(&host.identity.unix_name);
        self.ledger.withdraw_all(dead, now);
        self.ledger.pending.retain(|(getter, _), _| *getter != dead);
        self.filling.retain(|filling| self.ledger.published[&filling.payload].owner != dead);
        self.held.retain(|held| held.owner != dead);
        drop(host);
        for (watcher, host) in &mut self.hosts {
            let watcher = Incarnation { node: *watcher, life: host.life };
            let (ended, left): (Vec<_>, Vec<_>) = host.watching.drain(..).partition(|(_, peer)| *peer == id);
            host.watching = left;
            for (link, _) in ended {
                self.deaths.push((now + self.random.between(10, 5_000) * MICRO, watcher, link));
            }
        }
        self.fabric.crash(id);
        self.fabric.restart(id);
        self.start(id, dead.life + 1);
    }

    /// Lets time go on in little steps until `done`, at most until `limit`. Whether it came to that.
    pub(crate) fn settle(&mut self, limit: u64, done: impl Fn(&Self) -> bool) -> Check<bool> {
        while !done(self) {
            if self.fabric.now() >= limit {
                return Ok(false);
            }
            let step = (self.fabric.now() + MILLI).min(limit);
            self.advance(step)?;
        }
        Ok(true)
    }

    pub(crate) fn counts(&self) -> Counts {
        self.fabric.counts()
    }

    pub(crate) fn published_mut(&mut self, id: u64) -> Option<&mut Published> {
        self.ledger.published.get_mut(&id)
    }

    pub(crate) fn is_mapped(&self) -> bool {
        self.scenario.medium == Medium::Mapped
    }
}

fn kind_of(error: &towline::Error) -> &'static str {
    use towline::ErrorKind as K;
    match error.kind() {
        K::TimedOut { quarantined, .. } if *quarantined > 0 => "timed out with quarantine",
        K::TimedOut { .. } => "timed out",
        K::Gone(_) => "gone",
        K::Cancelled => "cancelled",
        K::Closed => "closed",
        K::PoolFull { .. } | K::PoolTooSmall { .. } => "pool full",
        K::Busy { .. } => "busy",
        K::PeerLost { .. } => "peer lost",
        K::PeerUnreachable { .. } => "peer unreachable",
        K::TransferFailed { .. } => "transfer failed",
        K::LeaseExpired => "lease expired",
        _ => "another error",
    }
}
