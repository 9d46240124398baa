//! What the applications do: puts, gets, views, removals, cancels.

use crate::content;
use crate::ending::{drain, fair_weather, farewell, probe};
use crate::ledger::{Check, Ledger, PartSpec, Pending, Published, Wanted, violated};
use crate::misfortune::{close, misfortune, nap, plant, reading, squeeze};
use crate::scenario::{MICRO, MILLI, Weather};
use crate::ticket::ticket;
use crate::world::{Filling, Held, HeldWhat, World};
use std::time::Duration;
use towline::engine::{GetRequest, NewPart, PutOptions, Source, Tick};
use towline::{DType, ErrorKind};
use towline_verbs::memory::Loan;
use towline_verbs::sim::NodeId;

/// Runs a scenario from its first event to the empty world at its end.
pub(crate) fn run(world: &mut World) -> Check {
    for step in 0..world.scenario.steps {
        let now = world.fabric.now();
        let pause = world.random.between(world.scenario.pace.0, world.scenario.pace.1);
        world.advance(now + pause)?;
        if world.scenario.crash_at == Some(step) {
            let node = world.any_host();
            world.crash(node)?;
        }
        if world.scenario.close_at == Some(step) {
            let node = world.any_host();
            close(world, node)?;
        }
        act(world)?;
    }
    fair_weather(world)?;
    probe(world)?;
    drain(world)?;
    farewell(world)
}

fn act(world: &mut World) -> Check {
    let node = world.any_host();
    if world.scenario.weather == Weather::Impatient && world.random.below(4) == 0 {
        return cancel(world);
    }
    if world.scenario.weather == Weather::Sleepy && world.random.below(3) == 0 && reading(world).is_some() {
        return nap(world, node);
    }
    match world.random.below(100) {
        0..25 => put(world, node),
        25..50 => get(world, node),
        50..60 => give_back_some(world),
        60..66 => hold_pattern(world, node).map(|_| ()),
        66..72 => remove(world, node),
        72..77 => cancel(world),
        77..87 => fill_on(world),
        87..89 => plant(world),
        89..92 => nap(world, node),
        92..95 => squeeze(world, node),
        _ => misfortune(world),
    }
}

fn key(world: &mut World) -> Vec<u8> {
    let nth = world.random.below(world.scenario.keys);
    format!("key {nth}").into_bytes()
}

fn part_len(world: &mut World) -> u64 {
    let largest = world.scenario.largest;
    match world.random.below(10) {
        0 => 0,
        1..4 => world.random.between(1, 100),
        4..8 => world.random.between(1, (largest / 4).max(1)),
        _ => world.random.between(1, largest),
    }
}

fn put(world: &mut World, node: NodeId) -> Check {
    let key = key(world);
    let parts = (0..world.random.between(1, 4)).map(|_| {
        let len = part_len(world);
        if len > 0 && len.is_multiple_of(4) {
            PartSpec { dtype: DType::F32, shape: vec![len / 4], len }
        } else {
            PartSpec { dtype: DType::U8, shape: vec![len], len }
        }
    });
    let parts = parts.collect();
    let consumers = world.random.between(1, 3) as u32;
    let slowly = world.random.below(5) == 0;
    let life = if world.random.below(6) == 0 { world.random.between(1, 20) * MILLI } else { 3_600_000 * MILLI };
    put_payload(world, node, key, parts, consumers, slowly, life).map(|_| ())
}

/// Publishes a payload with content of its own; `None` when there is no room.
pub(crate) fn put_payload(
    world: &mut World,
    node: NodeId,
    key: Vec<u8>,
    parts: Vec<PartSpec>,
    consumers: u32,
    slowly: bool,
    time_to_live: Tick,
) -> Check<Option<u64>> {
    let number = world.fresh_payload();
    let seed = world.scenario.seed;
    let owner = world.incarnation(node);
    let put_at = world.fabric.now();
    let names: Vec<String> = (0..parts.len()).map(|part| Ledger::part_name(number, part)).collect();
    let total: u64 = parts.iter().map(|part| part.len).sum();
    let slowly = slowly && total > 0;
    let lends = slowly && world.random.below(2) == 0;
    let put = world.with_host(node, |host| {
        let mut new_parts = Vec::new();
        let mut offsets = Vec::new();
        let mut loans = Vec::new();
        for (index, part) in parts.iter().enumerate() {
            let (mut buffer, mut loan) = (None, None);
            if part.len > 0 {
                let mut fresh = host.engine.allocate(part.len)?;
                let bytes = fresh.as_mut_slice();
                // What a slow producer has not written yet is somebody else's old bytes: poison.
                if slowly {
                    bytes.fill(0xEE)
                } else {
                    content::fill(seed, number, index, 0, bytes)
                }
                offsets.push(fresh.offset());
                buffer = Some(fresh);
                if lends {
                    let lent = Loan::owned(content::part(seed, number, index, part.len).into());
                    loans.push(lent.clone());
                    loan = Some(lent);
                }
            }
            new_parts.push(NewPart { name: &names[index], dtype: part.dtype, shape: &part.shape, buffer, loan });
        }
        let options = PutOptions::new().consumers(consumers).time_to_live(Duration::from_nanos(time_to_live));
        let now = host.now();
        let put = host.engine.put(now, &key, new_parts, slowly.then_some(0), &options)?;
        Ok::<_, towline::Error>((put, offsets, loans))
    })?;
    match put {
        Ok(((id, layout), offsets, loans)) => {
            world.ledger.withdraw_key(owner, &key, put_at);
            let published =
                Published { owner, key, id, layout, parts, consumers, put_at, withdrawn_at: None, deliveries: 0 };
            world.ledger.published.insert(number, published);
            if let Some(first) = offsets.first() {
                world.places.insert(number, *first);
            }
            world.ledger.tallies.entry(owner).or_default().puts += 1;
            world.count("put");
            if slowly {
                world.count("put slowly");
                world.filling.push(Filling { payload: number, offsets, done: 0, loans });
            }
            Ok(Some(number))
        }
        Err(error) => match error.kind() {
            ErrorKind::PoolFull { .. } | ErrorKind::PoolTooSmall { .. } | ErrorKind::Busy { .. } => {
                world.count("put refused");
                Ok(None)
            }
            _ => violated("I8", format!("a put failed: {error}")),
        },
    }
}

/// Writes more of a payload that is published already, and says so; or stops if nobody needs it any more.
fn fill_on(world: &mut World) -> Check {
    if world.filling.is_empty() {
        return Ok(());
    }
    let nth = world.random.below(world.filling.len() as u64) as usize;
    let filling = &world.filling[nth];
    let published = &world.ledger.published[&filling.payload];
    let (id, node, taken) = (published.id, published.owner.node, filling.loans.iter().any(|loan| loan.taken() > 0));
    if taken {
        world.count("read what is lent");
    }
    if world.hosts[&node].engine.is_over(id) {
        world.count("needed no more copying");
        world.filling.swap_remove(nth);
        return world.with_host(node, |host| {
            let now = host.now();
            host.engine.filled(now, id);
        });
    }
    fill_payload(world, nth, false)
}

pub(crate) fn fill_payload(world: &mut World, nth: usize, whole: bool) -> Check {
    let payload = world.filling[nth].payload;
    let published = world.ledger.published[&payload].clone();
    let total: u64 = published.parts.iter().map(|part| part.len).sum();
    let done = world.filling[nth].done;
    let upto = if whole { total } else { (done + world.random.between(1, total)).min(total) };
    let (seed, node) = (world.scenario.seed, published.owner.node);
    let memory = world.hosts[&node].memory.clone();
    let mut before = 0;
    let mut offsets = world.filling[nth].offsets.iter();
    for (index, part) in published.parts.iter().enumerate().filter(|(_, part)| part.len > 0) {
        let offset = offsets.next().expect("a place for each part with bytes");
        let from = done.max(before).min(before + part.len) - before;
        let to = upto.max(before).min(before + part.len) - before;
        let mut bytes = vec![0; (to - from) as usize];
        content::fill(seed, payload, index, from, &mut bytes);
        memory.write(offset + from, &bytes).expect("within the pool");
        before += part.len;
    }
    world.filling[nth].done = upto;
    let finished = upto == total;
    if finished {
        let filled = world.filling.swap_remove(nth);
        filled.loans.iter().for_each(|loan| loan.copied());
    }
    world.with_host(node, |host| {
        let now = host.now();
        host.engine.raise_watermark(now, published.id, upto);
        if finished {
            host.engine.filled(now, published.id);
        }
    })
}

fn get(world: &mut World, node: NodeId) -> Check {
    let by_ticket = world.random.below(3) == 0;
    let view = world.is_mapped() && world.random.below(2) == 0 || world.random.below(50) == 0;
    let patience = match world.random.below(4) {
        0 => world.random.between(1, 300) * MICRO,
        1 => world.random.between(1, 20) * MILLI,
        _ => world.random.between(20, 400) * MILLI,
    };
    let from_oneself = world.random.below(12) == 0;
    if by_ticket {
        let theirs = |(_, p): &(&u64, &Published)| (p.owner.node == node) == from_oneself;
        let known: Vec<u64> = world.ledger.published.iter().filter(theirs).map(|(number, _)| *number).collect();
        if known.is_empty() {
            return Ok(());
        }
        // Mostly one of the newest, sometimes one that has long gone.
        let back = if world.random.below(4) == 0 { known.len() } else { known.len().min(4) };
        let nth = known.len() - 1 - world.random.below(back as u64) as usize;
        return ask(world, node, Wanted::Payload(known[nth]), view, patience, false);
    }
    let others: Vec<NodeId> = world.hosts.keys().copied().filter(|other| (*other == node) == from_oneself).collect();
    let peer = others[world.random.below(others.len() as u64) as usize];
    let key = key(world);
    ask(world, node, Wanted::Key(peer, key), view, patience, false)
}

pub(crate) fn ask(
    world: &mut World,
    node: NodeId,
    wanted: Wanted,
    view: bool,
    patience: u64,
    must_succeed: bool,
) -> Check {
    let asked_at = world.fabric.now();
    let source = match &wanted {
        Wanted::Key(peer, key) => {
            let peer = crate::host::address_of(*peer).parse().expect("an address");
            Source::Key { peers: vec![peer], key: key.clone() }
        }
        Wanted::Payload(number) => {
            let published = &world.ledger.published[number];
            // The ticket was written when it was put, by the incarnation that put it.
            let identity = &world.identities[&published.owner];
            Source::Ticket(Box::new(ticket(identity, published.id, &published.layout)))
        }
    };
    let getter = world.incarnation(node);
    let host = world.hosts.get_mut(&node).expect("a live node");
    let now = host.now();
    let deadline = now + patience;
    let mut request = GetRequest::new(source, deadline);
    request.view = view;
    // Into memory of the caller's own, now and then of too few bytes.
    let own = !view && !must_succeed && world.random.below(6) == 0;
    if own {
        let len = world.random.between(1, 5 * world.scenario.largest);
        request = request.into_memory(vec![0x55; len as usize]);
    }
    let host = world.hosts.get_mut(&node).expect("a live node");
    match host.engine.get(now, request) {
        Ok(operation) => {
            let pending = Pending { wanted, view, own, asked_at, deadline, patience, must_succeed };
            world.fabric.note("get", &[u64::from(node.0), operation.0, patience]);
            world.ledger.pending.insert((getter, operation), pending);
            world.count("asked");
            world.with_host(node, |_| ())
        }
        Err(error) if matches!(error.kind(), ErrorKind::Busy { .. }) && !must_succeed => Ok(()),
        Err(error) if matches!(error.kind(), ErrorKind::DestinationTooSmall { .. }) && own => Ok(()),
        Err(error) => violated("I8", format!("a get was refused: {error}")),
    }
}

/// The applications give back a half of what they hold, or one thing.
fn give_back_some(world: &mut World) -> Check {
    let many = world.random.below(4) == 0;
    for _ in 0..if many { world.held.len().div_ceil(2) } else { world.held.len().min(1) } {
        let nth = world.random.below(world.held.len() as u64) as usize;
        world.give_back(nth)?;
    }
    Ok(())
}

/// The application takes a buffer and writes its own bytes into it.
pub(crate) fn hold_pattern(world: &mut World, node: NodeId) -> Check<bool> {
    let len = part_len(world).max(1);
    let (seed, number) = (world.scenario.seed, world.fresh_payload());
    if let Ok(mut buffer) = world.hosts[&node].engine.allocate(len) {
        content::fill(seed, number, usize::MAX, 0, buffer.as_mut_slice());
        let owner = world.incarnation(node);
        world.held.push(Held { owner, what: HeldWhat::Pattern(number, buffer) });
        world.count("held");
        return Ok(true);
    }
    Ok(false)
}

fn remove(world: &mut World, node: NodeId) -> Check {
    let owner = world.incarnation(node);
    let at = world.fabric.now();
    let mine: Vec<u64> =
        world.ledger.published.iter().filter(|(_, p)| p.owner == owner).map(|(number, _)| *number).collect();
    if mine.is_empty() {
        return Ok(());
    }
    let nth = world.random.below(mine.len() as u64) as usize;
    let published = world.ledger.published[&mine[nth]].clone();
    if world.random.below(2) == 0 {
        world.with_host(node, |host| {
            let now = host.now();
            host.engine.remove_key(now, &published.key)
        })?;
        world.ledger.withdraw_key(owner, &published.key, at);
    } else {
        let removed = world.with_host(node, |host| {
            let now = host.now();
            host.engine.remove(now, published.id)
        })?;
        if let Err(error) = &removed
            && !matches!(error.kind(), ErrorKind::Gone(_))
        {
            return violated("I8", format!("a removal failed: {error}"));
        }
        if removed.is_ok() && published.withdrawn_at.is_some() {
            return violated("I4", format!("payload {} was removed twice, or another in its place", mine[nth]));
        }
        if let Some(published) = world.published_mut(mine[nth]) {
            published.withdrawn_at.get_or_insert(at);
        }
    }
    world.count("removed");
    Ok(())
}

fn cancel(world: &mut World) -> Check {
    let mut pending: Vec<_> = world.ledger.pending.keys().copied().collect();
    if pending.is_empty() {
        return Ok(());
    }
    let reads = |node| !world.fabric.written_by_devices(node).is_empty();
    if pending.iter().any(|(getter, _)| reads(getter.node)) {
        pending.retain(|(getter, _)| reads(getter.node));
    }
    let (getter, operation) = pending[world.random.below(pending.len() as u64) as usize];
    let producer = match &world.ledger.pending[&(getter, operation)].wanted {
        Wanted::Key(node, _) => Some(*node),
        Wanted::Payload(number) => world.ledger.published.get(number).map(|published| published.owner.node),
    };
    world.with_host(getter.node, |host| {
        let now = host.now();
        host.engine.cancel(now, operation);
    })?;
    if world.ledger.pending.contains_key(&(getter, operation)) {
        return violated("I2", format!("{operation:?} was cancelled and has no result"));
    }
    if world.random.below(2) == 0 {
        // What it was being read into, and from, is wanted as soon as it comes free.
        let mut until = world.fabric.now() + world.scenario.times.fence_grace;
        for _ in 0..6 {
            until += world.random.between(0, 30) * MICRO;
            world.advance(until)?;
            squeeze(world, getter.node)?;
            if let Some(producer) = producer {
                squeeze(world, producer)?;
            }
        }
        world.advance(until + 500 * MICRO)?;
        while let Some(nth) = world.held.iter().position(|held| matches!(held.what, HeldWhat::Pattern(..))) {
            world.give_back(nth)?;
        }
    }
    Ok(())
}
