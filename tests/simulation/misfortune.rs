//! What befalls the applications: processes that are not scheduled, connections that break, a close in the middle of
//! everything, and the planted faults.

use crate::ledger::{Check, violated};
use crate::scenario::{MICRO, MILLI, Weather};
use crate::workload::{fill_payload, hold_pattern};
use crate::world::{HeldWhat, Plant, World};
use towline_verbs::sim::NodeId;

/// A node that is reading just now.
pub(crate) fn reading(world: &World) -> Option<NodeId> {
    world.hosts.keys().copied().find(|node| !world.fabric.written_by_devices(*node).is_empty())
}

/// A process is not scheduled for a while.
pub(crate) fn nap(world: &mut World, node: NodeId) -> Check {
    let lease = world.scenario.times.lease;
    let (shortest, longest) = match world.scenario.weather {
        Weather::Calm | Weather::Impatient => (0, 100 * MICRO),
        Weather::Sleepy if world.random.below(2) == 0 => (lease, lease * 2),
        Weather::Sleepy => (0, lease * 3),
        _ => (0, 2 * MILLI),
    };
    // Best in the middle of a read.
    let node = reading(world).unwrap_or(node);
    let until = world.fabric.now() + world.random.between(shortest, longest);
    world.fabric.note("nap", &[u64::from(node.0), until]);
    if shortest > 0 && reading(world).is_some() {
        world.count("slept through a lease while reading");
    }
    if let Some(host) = world.hosts.get_mut(&node) {
        host.asleep_until = host.asleep_until.max(until);
    }
    if world.scenario.weather == Weather::Sleepy && world.random.below(4) == 0 {
        world.advance(until)?; // nobody does anything meanwhile: it wakes to find all that it read
    }
    Ok(())
}

/// Faults that come from outside the plan.
pub(crate) fn misfortune(world: &mut World) -> Check {
    match world.scenario.weather {
        Weather::BadRails | Weather::Storm if world.scenario.endpoints > 1 => {
            let (a, b) = (world.any_host(), world.any_host());
            let cut = world.random.below(3) == 0;
            if a != b {
                world.fabric.cut_link(a, b, cut);
                world.count(if cut { "link cut" } else { "link mended" });
            }
        }
        Weather::Calm | Weather::Impatient => return Ok(()),
        _ => {}
    }
    // A connection breaks, and memory that was read over it is wanted at once.
    let any = world.any_host();
    let read = world.hosts.keys().copied().find(|node| !world.fabric.read_by_peers(*node).is_empty());
    let node = read.unwrap_or(any);
    let nth = world.random.next_u64();
    if let Some(conn) = world.hosts[&node].some_connection(nth) {
        world.fabric.net().reset(conn);
        world.count("reset by hand");
        let until = world.fabric.now() + world.random.between(0, 200) * MICRO;
        world.advance(until)?;
        squeeze(world, node)?;
    }
    Ok(())
}

/// An application takes its payloads out and all memory that comes free of it, and writes it full.
pub(crate) fn squeeze(world: &mut World, node: NodeId) -> Check {
    let owner = world.incarnation(node);
    let at = world.fabric.now();
    for key in 0..world.scenario.keys {
        let key = format!("key {key}").into_bytes();
        world.with_host(node, |host| {
            let now = host.now();
            host.engine.remove_key(now, &key);
        })?;
        world.ledger.withdraw_key(owner, &key, at);
    }
    for _ in 0..20 {
        if !hold_pattern(world, node)? {
            break;
        }
    }
    world.count("squeezed");
    Ok(())
}

/// The planted faults of applications.
pub(crate) fn plant(world: &mut World) -> Check {
    match world.plant {
        Some(Plant::WriteIntoPublished) => {
            let open: Vec<_> = world.filling.iter().map(|f| f.payload).collect();
            let written = world.ledger.published.iter().filter(|(number, p)| {
                p.withdrawn_at.is_none() && p.parts[0].len > 0 && !open.contains(number) && p.deliveries == 0
            });
            let places: Vec<_> =
                written.filter_map(|(number, p)| Some((p.owner.node, *world.places.get(number)?))).collect();
            for (node, offset) in places {
                world.hosts[&node].memory.write(offset, b"!").expect("within the pool");
            }
        }
        Some(Plant::LateByte) => {
            for held in &world.held {
                if let HeldWhat::Pattern(_, buffer) = &held.what {
                    let memory = &world.hosts[&held.owner.node].memory;
                    memory.write(buffer.offset(), b"?").expect("within the pool");
                }
            }
        }
        _ => {}
    }
    Ok(())
}

/// An endpoint closes with operations in flight: it drains for a while, then breaks what is left, and its process ends.
pub(crate) fn close(world: &mut World, node: NodeId) -> Check {
    let owner = world.incarnation(node);
    let at = world.fabric.now();
    world.ledger.withdraw_all(owner, at);
    world.with_host(node, |host| {
        let now = host.now();
        host.engine.begin_close(now);
    })?;
    let left: Vec<_> = world.ledger.pending.keys().filter(|(getter, _)| *getter == owner).collect();
    if !left.is_empty() {
        return violated("I10", format!("gets have no result though their endpoint closes: {left:?}"));
    }
    // Views outlive their endpoint until its process ends; half of the time they do.
    let outlives = world.random.below(2) == 0;
    let viewing = |world: &World| world.held.iter().position(|held| held.owner == owner && held.what.lease().is_some());
    while let Some(nth) = viewing(world).filter(|_| !outlives) {
        world.give_back(nth)?;
    }
    while let Some(nth) = world.filling.iter().position(|f| world.ledger.published[&f.payload].owner == owner) {
        fill_payload(world, nth, true)?;
    }
    let patience = world.random.between(0, 30) * MILLI;
    let drained = world.settle(at + patience, |world| world.hosts[&node].engine.is_drained())?;
    world.count(if drained { "closed drained" } else { "closed by force" });
    world.with_host(node, |host| {
        let now = host.now();
        host.engine.abort(now);
    })?;
    world.check_tallies()?;
    if viewing(world).is_some() {
        let at = world.fabric.now() + world.random.between(0, 5) * MILLI;
        world.advance(at)?;
        while let Some(nth) = viewing(world) {
            world.give_back(nth)?;
        }
        world.count("views outlived their endpoint");
        let limit = world.fabric.now() + 100 * MILLI;
        let said = world.settle(limit, |world| !world.hosts[&node].engine.has_last_words())?;
        if !said && matches!(world.scenario.weather, Weather::Calm | Weather::Impatient) {
            return violated("I10", "a closed endpoint could not say that its views are gone");
        }
    }
    let at = world.fabric.now();
    world.end_process(node, at);
    Ok(())
}
