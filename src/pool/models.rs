//! Models of the waiting layer, explored by loom: `ci/loom` runs them. Each names the invariant that it is about.
//!
//! Core's pool is in them as it is, with its words as loom's. What loom does not cover is said in core's models.

use super::waiting::Room;
use loom::thread;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use towline_core::pool::PoolLayout;

const GRANULE: u64 = 64;

fn room(granules: u64) -> Arc<Room> {
    Arc::new(Room::new(PoolLayout::new(granules * GRANULE, GRANULE).unwrap()).unwrap())
}

/// Counts calls. No step of the models: a call that is there is seen after the thread that made it has been joined.
fn bell() -> (Arc<AtomicUsize>, impl Fn() + Send + Sync + 'static) {
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = calls.clone();
    (calls, move || {
        counted.fetch_add(1, Relaxed);
    })
}

/// I10, no lost wake-up: a waiter and a release, in any order: the waiter is notified once, and has the extent.
#[test]
fn waiter_is_woken_by_a_release() {
    loom::model(|| {
        let room = room(1);
        let held = room.allocate(GRANULE).unwrap();
        let release = {
            let room = room.clone();
            thread::spawn(move || room.release(held))
        };
        let (calls, ring) = bell();
        let turn = room.wait(GRANULE, ring);
        release.join().unwrap();
        assert_eq!(calls.load(Relaxed), 1, "not woken");
        room.release(turn.take().expect("woken for an extent"));
        assert_eq!((room.waiting(), room.owned(), room.extents().free_granules()), (0, 0, 1));
    });
}

/// First come, first served: who does not wait comes behind who does, though its need is smaller.
#[test]
fn waiter_is_not_overtaken() {
    loom::model(|| {
        let room = room(2);
        let held = room.allocate(2 * GRANULE).unwrap();
        let first = room.wait(2 * GRANULE, || {});
        let release = {
            let room = room.clone();
            thread::spawn(move || room.release(held))
        };
        assert!(room.allocate(GRANULE).is_none(), "overtook who waits");
        release.join().unwrap();
        room.release(first.take().expect("room for it, and it is the first"));
    });
}

/// A deadline: when the front leaves while an extent is released, the next one is served, whichever was first.
#[test]
fn waiter_that_leaves_lets_the_next_in() {
    loom::model(|| {
        let room = room(2);
        let (low, high) = (room.allocate(GRANULE).unwrap(), room.allocate(GRANULE).unwrap());
        let first = room.wait(2 * GRANULE, || {});
        let (calls, ring) = bell();
        let second = room.wait(GRANULE, ring);
        let release = {
            let room = room.clone();
            thread::spawn(move || room.release(low))
        };
        room.leave(&first);
        release.join().unwrap();
        assert_eq!((calls.load(Relaxed), room.waiting()), (1, 0), "the second waits on");
        room.release(second.take().expect("notified"));
        room.release(high);
        assert_eq!(room.extents().free_granules(), 2);
    });
}

/// I2: a deadline that comes while the extent is granted: it is taken or goes back, and is not lost.
#[test]
fn waiter_that_leaves_loses_no_grant() {
    loom::model(|| {
        let room = room(1);
        let held = room.allocate(GRANULE).unwrap();
        let turn = room.wait(GRANULE, || {});
        let release = {
            let room = room.clone();
            thread::spawn(move || room.release(held))
        };
        if let Some(extent) = turn.take() {
            room.release(extent);
        } else {
            room.leave(&turn);
            assert!(turn.take().is_none(), "it has left");
        }
        release.join().unwrap();
        assert_eq!((room.waiting(), room.owned(), room.extents().free_granules()), (0, 0, 1));
    });
}

/// I9: who waits is counted while it waits, neither before nor after: nobody is refused for a waiter that there is not.
#[test]
fn waiters_are_counted() {
    loom::model(|| {
        let room = room(2);
        let held = room.allocate(GRANULE).unwrap();
        let other = {
            let room = room.clone();
            thread::spawn(move || {
                let turn = room.wait(2 * GRANULE, || {});
                let extent = turn.take();
                if extent.is_none() {
                    room.leave(&turn);
                }
                extent
            })
        };
        let release = {
            let room = room.clone();
            thread::spawn(move || room.release(held))
        };
        assert!(room.waiting() <= 1, "more waiters than threads that wait");
        release.join().unwrap();
        let extents = [other.join().unwrap()];
        assert_eq!(room.waiting(), 0);
        extents.into_iter().flatten().for_each(|extent| room.release(extent));
        assert_eq!(room.extents().free_granules(), 2);
    });
}
