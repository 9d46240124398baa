//! A thread that is stopped before any atomic step of any call stops no other: all is lock-free.

use crate::Word;
use crate::lease::*;
use crate::pool::{BufferPool, Extent, PoolLayout};
use crate::sync::stop::{stop_at, within};
use crate::transfer::{self, Cause, Reason, TransferTable};
use std::boxed::Box;
use std::vec::Vec;

fn words(n: usize) -> Box<[Word]> {
    (0..n).map(|_| Word::default()).collect()
}

type Pool = BufferPool<Box<[Word]>>;

const GRANULE: u64 = 64;
/// Three levels of the tree.
const GRANULES: u64 = 8 * 64 * 64 + 100;
/// More atomic steps than any call of the pool takes here, and fewer than one that waits would take before long.
const STEPS: usize = 100_000;

fn pool() -> Pool {
    let layout = PoolLayout::new(GRANULES * GRANULE, GRANULE).unwrap();
    BufferPool::new(words(layout.words()), layout).unwrap()
}

/// Stops `call` before its first step, its second, and so on to its end; each time others use the pool meanwhile, and in
/// the end it is whole again.
fn stop_everywhere(prepare: impl Fn(&Pool) -> Vec<Extent>, call: impl Fn(&Pool, &[Extent]) -> Vec<Extent> + Sync) {
    for steps in 0.. {
        let pool = pool();
        let prepared = prepare(&pool);
        let (stopped, left) = stop_at(
            steps,
            || call(&pool, &prepared),
            || {
                within(STEPS, || {
                    // What a stopped call can hold is its own extent and a few words; there is far more.
                    let sizes = [1, 5, 63, 64, 65, 200, 1000, 4096];
                    let extents = sizes.map(|n| pool.allocate(n * GRANULE, 1).expect("there is room"));
                    extents.iter().for_each(|&extent| pool.release(extent).unwrap());
                    let aligned = pool.allocate(64 * 64 * GRANULE, 64 * GRANULE).expect("there is room");
                    let less = pool.shrink(aligned, 10 * GRANULE).unwrap();
                    assert!(pool.allocate(GRANULES * GRANULE, 1).is_err() || prepared.is_empty());
                    pool.release(less).unwrap();
                    assert!(pool.free_granules() <= GRANULES && pool.largest_free_run() >= 4096);
                    assert!(pool.live().count() <= prepared.len() + 2);
                });
            },
        );
        left.into_iter().for_each(|extent| pool.release(extent).unwrap());
        assert_eq!((pool.free_granules(), pool.largest_free_run()), (GRANULES, GRANULES), "stopped at {steps}");
        if !stopped {
            assert!(steps > 3, "the call has hardly any steps");
            return;
        }
    }
}

#[test]
fn allocating_stops_nobody() {
    for granules in [1, 30, 64, 100, 64 * 64, 64 * 64 + 130] {
        stop_everywhere(
            |pool| Vec::from([pool.reserve(7 * GRANULE, GRANULE).unwrap()]),
            |pool, prepared| Vec::from([prepared[0], pool.allocate(granules * GRANULE, 1).unwrap()]),
        );
    }
}

#[test]
fn releasing_stops_nobody() {
    for granules in [1, 30, 64, 100, 64 * 64, 64 * 64 + 130] {
        stop_everywhere(
            |pool| Vec::from([pool.reserve(5 * GRANULE, granules * GRANULE).unwrap()]),
            |pool, prepared| {
                pool.release(prepared[0]).unwrap();
                Vec::new()
            },
        );
    }
}

#[test]
fn shrinking_and_scattering_stop_nobody() {
    stop_everywhere(
        |pool| Vec::from([pool.reserve(5 * GRANULE, 300 * GRANULE).unwrap()]),
        |pool, prepared| Vec::from([pool.shrink(prepared[0], 20 * GRANULE).unwrap()]),
    );
    stop_everywhere(
        |pool| (1..6).map(|n| pool.reserve(n * 6000 * GRANULE, 9 * GRANULE).unwrap()).collect(),
        |pool, prepared| {
            let mut pieces = [None; 8];
            // Refused or not, by what others hold meanwhile: nothing is lost.
            let _ = pool.allocate_at_most(9000 * GRANULE, 1, &mut pieces);
            prepared.iter().copied().chain(pieces.into_iter().flatten()).collect()
        },
    );
}

#[test]
fn transfers_stop_nobody() {
    for steps in 0.. {
        let table = TransferTable::new(words(transfer::storage_words(2)));
        let shared = table.create().unwrap();
        table.post(shared, 2).unwrap();
        let (stopped, ()) = stop_at(
            steps,
            || {
                table.complete(shared, Err(Cause(1))).unwrap();
                let own = table.create().unwrap();
                table.post(own, 1).unwrap();
                table.finish(own).unwrap();
                table.complete(own, Ok(())).unwrap();
                table.release(own).unwrap();
            },
            || {
                within(1_000, || {
                    let _ = table.abandon(shared, Reason::Cancelled);
                    table.complete(shared, Ok(())).unwrap();
                    if let Ok(id) = table.create() {
                        table.finish(id).unwrap();
                        table.release(id).unwrap();
                    }
                });
            },
        );
        if !stopped {
            assert!(steps > 10);
            return;
        }
        table.release(shared).unwrap();
        assert!(table.create().is_ok() && table.create().is_ok() && table.create().is_err());
    }
}

#[test]
fn payloads_and_leases_stop_nobody() {
    for steps in 0.. {
        let payloads = PayloadTable::new(words(payload_words(2)));
        let leases = LeaseTable::new(words(lease_words(2)));
        let publication = Publication { len: 8, filled: 0, consumers: Consumers::Unlimited, keep: 10 };
        let shared = payloads.publish(publication, 0).unwrap();
        let (stopped, ()) = stop_at(
            steps,
            || {
                payloads.open(shared).unwrap();
                let lease = leases.grant(shared, 10).unwrap();
                leases.renew(lease, 20).unwrap();
                payloads.fill(shared, 4).unwrap();
                payloads.close(leases.close(lease).unwrap(), Use::Consumed, 5).unwrap();
            },
            || {
                within(1_000, || {
                    payloads.open(shared).unwrap();
                    let lease = leases.grant(shared, 30).unwrap();
                    payloads.fill(shared, 6).unwrap();
                    assert_eq!(leases.expire(lease, 30), Ok(LeaseExpiry::Ended(shared)));
                    payloads.close(shared, Use::Returned, 6).unwrap();
                    let own = payloads.publish(publication, 0).unwrap();
                    payloads.remove(own, Removal::Removed).unwrap();
                    payloads.release(own).unwrap();
                });
            },
        );
        assert_eq!(payloads.phase(shared), Ok((PayloadPhase::Live, 0)));
        if !stopped {
            assert!(steps > 10);
            return;
        }
    }
}
