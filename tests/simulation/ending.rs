//! The end of a scenario: the weather clears, everything works again, every pool is whole, everybody closes.

use crate::host::Host;
use crate::ledger::{Check, PartSpec, Wanted, violated};
use crate::scenario::MILLI;
use crate::workload::{ask, fill_payload, put_payload};
use crate::world::{Plant, World};
use towline::DType;
use towline_verbs::sim::{FaultPlan, NodeId};

/// All faults stop, everybody wakes up, and every get comes to its end.
pub(crate) fn fair_weather(world: &mut World) -> Check {
    let mut plan = FaultPlan::calm();
    plan.capabilities = world.scenario.plan.capabilities;
    plan.peer_learns = world.scenario.plan.peer_learns;
    world.fabric.set_plan(plan);
    let nodes: Vec<NodeId> = world.hosts.keys().copied().collect();
    for a in &nodes {
        for b in &nodes {
            world.fabric.cut_link(*a, *b, false);
        }
    }
    for host in world.hosts.values_mut() {
        host.asleep_until = 0;
        if world.plant != Some(Plant::BentByte) {
            host.bends_bytes = None;
        }
    }
    if world.scenario.bends.is_some() && world.plant != Some(Plant::BentByte) {
        // A changed length still lies in wait on some connections for the bytes that it takes for its own.
        let all: Vec<_> = world.hosts.values().flat_map(Host::connections).collect();
        for connection in all {
            world.fabric.net().reset(connection);
        }
    }
    while !world.filling.is_empty() {
        fill_payload(world, 0, true)?;
    }
    let limit = world.fabric.now() + 2_000 * MILLI;
    if !world.settle(limit, |world| world.ledger.pending.is_empty())? {
        return violated("I10", format!("gets without a result: {:?}", world.ledger.pending));
    }
    while !world.held.is_empty() {
        world.give_back(0)?;
    }
    Ok(())
}

/// What is left of broken leases is fenced by its own deadlines, and what is left of broken links ends.
fn rest(world: &mut World) -> Check {
    let rest = 4 * (world.scenario.times.lease + world.scenario.times.drift_margin);
    let now = world.fabric.now();
    world.advance(now + rest)
}

/// After the storm everything works: each endpoint gets a fresh payload from each other one.
pub(crate) fn probe(world: &mut World) -> Check {
    let nodes: Vec<NodeId> = world.hosts.keys().copied().collect();
    all_have_heard(world)?;
    // Old payloads may fill the pools: they go, as far as nobody reads them.
    for node in &nodes {
        let owner = world.incarnation(*node);
        let at = world.fabric.now();
        for key in 0..world.scenario.keys {
            let key = format!("key {key}").into_bytes();
            world.with_host(*node, |host| {
                let now = host.now();
                host.engine.remove_key(now, &key);
            })?;
            world.ledger.withdraw_key(owner, &key, at);
        }
    }
    rest(world)?;
    let patience = 40 * world.scenario.times.lease;
    for producer in &nodes {
        for consumer in &nodes {
            let key = format!("probe of {}", consumer.0).into_bytes();
            let parts = vec![PartSpec { dtype: DType::U8, shape: vec![5000], len: 5000 }];
            let put = put_payload(world, *producer, key.clone(), parts, 1, false, 3_600_000 * MILLI)?;
            let Some(number) = put else {
                let stats = world.hosts[producer].engine.stats();
                return violated("recovery", format!("no room for a payload of 5000 bytes: {stats:?}"));
            };
            let wanted = if world.random.below(2) == 0 { Wanted::Key(*producer, key) } else { Wanted::Payload(number) };
            ask(world, *consumer, wanted, false, patience, true)?;
        }
    }
    let limit = world.fabric.now() + 2 * patience;
    if !world.settle(limit, |world| world.ledger.pending.is_empty())? {
        return violated("I10", format!("gets without a result: {:?}", world.ledger.pending));
    }
    while !world.held.is_empty() {
        world.give_back(0)?;
    }
    Ok(())
}

/// Once everybody has talked to everybody again, a payload that all its consumers have had is nobody's to get (I11): also
/// when the link broke, or the lease was fenced, before its producer heard of it.
fn all_have_heard(world: &mut World) -> Check {
    if world.scenario.crash_at.is_some() || world.scenario.close_at.is_some() {
        return Ok(()); // who is gone says nothing more
    }
    rest(world)?;
    let nodes: Vec<NodeId> = world.hosts.keys().copied().collect();
    let patience = 40 * world.scenario.times.lease;
    for producer in &nodes {
        for consumer in &nodes {
            let key = format!("greeting of {}", consumer.0).into_bytes();
            let parts = vec![PartSpec { dtype: DType::U8, shape: vec![0], len: 0 }];
            if put_payload(world, *producer, key.clone(), parts, 1, false, 3_600_000 * MILLI)?.is_some() {
                ask(world, *consumer, Wanted::Key(*producer, key), false, patience, true)?;
            }
        }
    }
    let limit = world.fabric.now() + 2 * patience;
    if !world.settle(limit, |world| world.ledger.pending.is_empty())? {
        return violated("I10", format!("gets without a result: {:?}", world.ledger.pending));
    }
    while !world.held.is_empty() {
        world.give_back(0)?;
    }
    let now = world.fabric.now();
    world.advance(now + 10 * MILLI + world.scenario.times.close_batch)?;
    let had = world.ledger.published.iter().filter(|(_, p)| p.withdrawn_at.is_none() && p.deliveries >= p.consumers);
    let had: Vec<_> = had.map(|(number, p)| (*number, p.owner.node, p.id)).collect();
    for (number, node, id) in had {
        let removed = world.with_host(node, |host| {
            let now = host.now();
            host.engine.remove(now, id)
        })?;
        if removed.is_ok() {
            let published = &world.ledger.published[&number];
            return violated(
                "I11",
                format!("all consumers of payload {number} have had it, and it is there: {published:?}"),
            );
        }
        world.count("had by all and gone");
    }
    Ok(())
}

/// Nothing is published, held or asked for: every pool is whole again, and nothing is left of any lease.
pub(crate) fn drain(world: &mut World) -> Check {
    let whole = |host: &Host| {
        let stats = host.engine.stats();
        stats.pool_free == stats.pool_bytes
            && stats.pool_buffers == 0
            && stats.payloads + stats.leases + stats.fencing + stats.quarantined_bytes + stats.pool_waiting == 0
            && stats.waiting + stats.gets_in_progress == 0
            && host.engine.is_drained()
    };
    // Gets of a peer that fell silent wait here for as long as they were to wait at most.
    let limit = world.fabric.now() + 20 * world.scenario.times.lease + 400 * MILLI;
    if world.settle(limit, |world| world.hosts.values().all(whole))? {
        return world.check_tallies();
    }
    let left = world.hosts.values().filter(|host| !whole(host));
    let stats: Vec<_> = left.map(|host| (host.id, host.engine.stats())).collect();
    violated("I2", format!("something is left: {stats:?}"))
}

/// Everybody closes, and nothing is left of any connection.
pub(crate) fn farewell(world: &mut World) -> Check {
    let nodes: Vec<NodeId> = world.hosts.keys().copied().collect();
    for node in &nodes {
        world.with_host(*node, |host| {
            let now = host.now();
            host.engine.begin_close(now);
            host.engine.abort(now);
        })?;
    }
    let now = world.fabric.now();
    world.advance(now + 50 * MILLI)?;
    for host in world.hosts.values() {
        let stats = host.engine.stats();
        if stats.links > 0 || !host.engine.is_drained() {
            return violated("I10", format!("{:?} is closed and has {stats:?}", host.id));
        }
        if let Some(left) = host.left() {
            return violated("I2", format!("{:?} is closed, and its driver was never told to close {left}", host.id));
        }
    }
    Ok(())
}
