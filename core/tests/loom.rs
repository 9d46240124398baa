//! Models of every lock-free structure, explored by loom: `ci/loom` runs them, `--cfg towline_loom` builds them.
//!
//! Each names the invariant that it is about. *Memory* that structures hand from owner to owner is a relaxed atomic here:
//! whoever sees an old value in it was not ordered after the one before.
//!
//! What loom does not cover: it takes SeqCst for AcqRel (nothing here needs more), it does not explore a load that sees a
//! store that comes later in another thread's order (load buffering), and its models are small: two or three threads, two
//! words of the pool's tree, one or two slots of a table. With three threads, at most `LOOM_MAX_PREEMPTIONS` involuntary
//! switches are explored. Hints are not modelled: see `src/sync.rs`.
#![cfg(towline_loom)]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use loom::thread;
use towline_core::Word;
use towline_core::credits::{CompletionBudget, ReceiveCredits};
use towline_core::lease::*;
use towline_core::pool::{AllocError, BufferPool, Extent, PoolLayout, ReleaseError};
use towline_core::transfer::{self, Cause, Outcome, Phase, Reason, Refused, TransferTable};

fn words(n: usize) -> Box<[Word]> {
    (0..n).map(|_| Word::new()).collect()
}

type Table = TransferTable<Box<[Word]>>;

fn transfers(capacity: usize) -> Arc<Table> {
    Arc::new(TransferTable::new(words(transfer::storage_words(capacity))))
}

fn fenced(progress: Result<transfer::Progress, Refused>) -> Option<Outcome> {
    match progress {
        Ok(transfer::Progress::Fenced(outcome)) => Some(outcome),
        _ => None,
    }
}

/// I2: of the last completions and the finish, in any order, exactly one ends the transfer; I3: and after it the memory
/// that the work wrote is seen.
#[test]
fn transfer_ends_once_and_publishes_its_memory() {
    loom::model(|| {
        let (table, memory) = (transfers(1), Arc::new(AtomicUsize::new(0)));
        let id = table.create().unwrap();
        table.post(id, 2).unwrap();
        let complete = |table: &Arc<Table>, memory: &Arc<AtomicUsize>| {
            let (table, memory) = (table.clone(), memory.clone());
            thread::spawn(move || {
                memory.fetch_add(1, Relaxed);
                let ended = fenced(table.complete(id, Ok(())));
                if ended.is_some() {
                    assert_eq!(memory.load(Relaxed), 2);
                }
                ended
            })
        };
        let (a, b) = (complete(&table, &memory), complete(&table, &memory));
        let mine = fenced(table.finish(id));
        if mine.is_some() {
            assert_eq!(memory.load(Relaxed), 2);
        }
        let ends = [mine, a.join().unwrap(), b.join().unwrap()];
        assert_eq!(ends.iter().flatten().collect::<Vec<_>>(), [&Outcome::Succeeded]);
        assert_eq!(table.release(id), Ok(Outcome::Succeeded));
    });
}

/// I2, I3: a failure, a cancellation and a completion race; the first of the two that decide stands, and the end comes once.
#[test]
fn transfer_end_is_decided_once() {
    loom::model(|| {
        let table = transfers(1);
        let id = table.create().unwrap();
        table.post(id, 2).unwrap();
        let fail = {
            let table = table.clone();
            thread::spawn(move || {
                let ended = fenced(table.complete(id, Err(Cause(7))));
                (ended, table.state(id).unwrap().outcome())
            })
        };
        let cancelled = table.abandon(id, Reason::Cancelled);
        let mine = fenced(table.complete(id, Ok(())));
        let (theirs, seen) = fail.join().unwrap();
        let ends: Vec<_> = [mine, theirs].into_iter().flatten().collect();
        let want = if cancelled.is_ok() { Outcome::Cancelled } else { Outcome::Failed(Cause(7)) };
        assert_eq!((ends, seen), (vec![want], Some(want)));
    });
}

/// I3: the caller leaves while the last completion comes: either the fence was first, and the memory is the caller's, or it
/// is in quarantine until the one who completes is told.
#[test]
fn transfer_quarantine_or_fence() {
    loom::model(|| {
        let table = transfers(1);
        let id = table.create().unwrap();
        table.post(id, 1).unwrap();
        table.abandon(id, Reason::TimedOut).unwrap();
        let complete = {
            let table = table.clone();
            thread::spawn(move || fenced(table.complete(id, Err(Cause(1)))))
        };
        match table.quarantine(id) {
            Ok(_) => {}
            Err(Refused::Ended { outcome, .. }) => assert_eq!(outcome, Outcome::TimedOut),
            Err(refused) => panic!("{refused}"),
        }
        assert_eq!(complete.join().unwrap(), Some(Outcome::TimedOut));
        assert_eq!(table.state(id).unwrap().phase, Phase::TimedOut);
    });
}

/// I2: a late completion and a late release meet the next transfer in the slot, and do nothing to it.
#[test]
fn transfer_late_events_do_not_touch_the_next() {
    loom::model(|| {
        let table = transfers(1);
        let id = table.create().unwrap();
        table.post(id, 1).unwrap();
        table.abandon(id, Reason::Cancelled).unwrap();
        table.complete(id, Ok(())).unwrap();
        let late = {
            let table = table.clone();
            thread::spawn(move || (table.complete(id, Ok(())).is_ok(), table.release(id).is_ok()))
        };
        let released = table.release(id).is_ok();
        let next = table.create().inspect(|&next| table.post(next, 1).unwrap());
        let (completed, also_released) = late.join().unwrap();
        assert!(!completed && released != also_released);
        if let Ok(next) = next {
            let state = table.state(next).unwrap();
            assert_eq!((state.phase, state.outstanding), (Phase::Posted, 1));
        }
    });
}

/// I2: slots that are taken and given back by several threads have one owner at a time, and none is lost.
#[test]
fn table_slots_have_one_owner() {
    loom::model(|| {
        let table = transfers(2);
        let owned = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0)]);
        let take = |table: &Table, owned: &[AtomicUsize; 2]| {
            let id = table.create().ok()?;
            assert_eq!(owned[id.slot() as usize].fetch_add(1, Relaxed), 0, "a slot with two owners");
            table.finish(id).unwrap();
            Some(id)
        };
        let give = |table: &Table, owned: &[AtomicUsize; 2], id: transfer::TransferId| {
            owned[id.slot() as usize].fetch_sub(1, Relaxed);
            table.release(id).unwrap();
        };
        let other = {
            let (table, owned) = (table.clone(), owned.clone());
            thread::spawn(move || {
                let id = take(&table, &owned);
                let another = take(&table, &owned);
                for id in [id, another].into_iter().flatten() {
                    give(&table, &owned, id);
                }
                take(&table, &owned)
            })
        };
        let id = take(&table, &owned);
        if let Some(id) = id {
            give(&table, &owned, id);
        }
        let left = other.join().unwrap();
        let mut free = 0;
        while table.create().is_ok() {
            free += 1;
        }
        assert_eq!(free + usize::from(left.is_some()), 2);
    });
}

type Leases = LeaseTable<Box<[Word]>>;
type Payloads = PayloadTable<Box<[Word]>>;

fn leases() -> Arc<Leases> {
    Arc::new(LeaseTable::new(words(lease_words(1))))
}

fn payload(consumers: Consumers, keep: u64) -> (Arc<Payloads>, PayloadId) {
    let table = PayloadTable::new(words(payload_words(1)));
    let id = table.publish(Publication { len: 8, filled: 0, consumers, keep }, 0).unwrap();
    (Arc::new(table), id)
}

/// I2: a close and an expiry of one lease: one of them is told to close the payload.
#[test]
fn lease_ends_once() {
    loom::model(|| {
        let table = leases();
        let payload = PayloadId::from_parts(0, 9);
        let id = table.grant(payload, 10).unwrap();
        let close = {
            let table = table.clone();
            thread::spawn(move || table.close(id).ok())
        };
        let expired = match table.expire(id, 10) {
            Ok(LeaseExpiry::Ended(payload)) => Some(payload),
            Ok(LeaseExpiry::NotBefore(_)) => panic!("its deadline has passed"),
            Err(_) => None,
        };
        let ends: Vec<_> = [close.join().unwrap(), expired].into_iter().flatten().collect();
        assert_eq!(ends, [payload]);
    });
}

/// I4: a renewal that was granted is not undone by an expiry that looked at the deadline before.
#[test]
fn lease_renewal_holds() {
    loom::model(|| {
        let table = leases();
        let id = table.grant(PayloadId::from_parts(0, 0), 10).unwrap();
        let renew = {
            let table = table.clone();
            thread::spawn(move || {
                let renewed = table.renew(id, 20).is_ok();
                // Nobody's clock is beyond the new deadline.
                assert!(!renewed || table.get(id).is_ok(), "a renewed lease has ended before its deadline");
                renewed
            })
        };
        let expired = matches!(table.expire(id, 15), Ok(LeaseExpiry::Ended(_)));
        assert!(renew.join().unwrap() != expired);
    });
}

/// I1, I2: a reader and a removal: while the reader has the payload its memory is not freed; then it is, once.
#[test]
fn payload_removal_waits_for_the_reader() {
    loom::model(|| {
        let (table, id) = payload(Consumers::Unlimited, 10);
        let freed = Arc::new(AtomicUsize::new(0));
        let end = |freed: &AtomicUsize, progress| {
            if let Ok(Progress::Ended(_)) = progress {
                assert_eq!(freed.fetch_add(1, Relaxed), 0, "freed twice");
            }
        };
        let reader = {
            let (table, freed) = (table.clone(), freed.clone());
            thread::spawn(move || {
                if table.open(id).is_ok() {
                    assert_eq!(freed.load(Relaxed), 0, "freed under its reader");
                    end(&freed, table.close(id, Use::Consumed, 1));
                }
            })
        };
        end(&freed, table.remove(id, Removal::Removed));
        reader.join().unwrap();
        assert_eq!(freed.load(Relaxed), 1);
    });
}

/// I2: the last two consumers leave at once, and one of them is told; I1: what they read from the memory comes before.
#[test]
fn payload_last_consumer_frees() {
    loom::model(|| {
        let (table, id) = payload(Consumers::Count(2), 10);
        let read = Arc::new(AtomicUsize::new(0));
        let consume = move |table: Arc<Payloads>, read: Arc<AtomicUsize>| {
            table.open(id).unwrap();
            read.fetch_add(1, Relaxed);
            let ended = table.close(id, Use::Consumed, 1).unwrap() == Progress::Ended(End::Consumed);
            assert!(!ended || read.load(Relaxed) == 2, "freed before it was read");
            ended
        };
        let other = {
            let (table, read) = (table.clone(), read.clone());
            thread::spawn(move || consume(table, read))
        };
        let mine = consume(table.clone(), read);
        assert!(mine != other.join().unwrap());
        assert_eq!(table.release(id), Ok(End::Consumed));
    });
}

/// I4: expiry counts from the last use: an expiry that runs while the payload is used does not end it early.
#[test]
fn payload_expires_after_its_last_use() {
    loom::model(|| {
        let (table, id) = payload(Consumers::Unlimited, 10);
        let user = {
            let table = table.clone();
            thread::spawn(move || {
                if table.open(id).is_ok() {
                    table.close(id, Use::Consumed, 10).unwrap();
                    // Used at 10, kept until 20; the other's clock says 15.
                    assert_eq!(table.phase(id).map(|(phase, _)| phase), Ok(PayloadPhase::Live));
                    assert_eq!(table.expire(id, 19), Ok(Expiry::NotBefore(20)));
                }
            })
        };
        let _ = table.expire(id, 15);
        user.join().unwrap();
    });
}

/// I5: what lies below a watermark was written before; and the watermark of a payload that is gone does not raise that of
/// the next.
#[test]
fn payload_watermark_publishes_what_is_below() {
    loom::model(|| {
        let (table, id) = payload(Consumers::Unlimited, 10);
        let memory = Arc::new(AtomicUsize::new(0));
        let filler = {
            let (table, memory) = (table.clone(), memory.clone());
            thread::spawn(move || {
                memory.store(1, Relaxed);
                let _ = table.fill(id, 4);
            })
        };
        if table.watermark(id) == Ok(4) {
            assert_eq!(memory.load(Relaxed), 1);
        }
        table.remove(id, Removal::Removed).unwrap();
        table.release(id).unwrap();
        let publication = Publication { len: 8, filled: 0, consumers: Consumers::Unlimited, keep: 10 };
        let next = table.publish(publication, 0).unwrap();
        filler.join().unwrap();
        assert_eq!(table.watermark(next), Ok(0));
    });
}

/// I9: two takers and a grant that comes twice: no credit is taken twice, and none is lost.
#[test]
fn receive_credits_are_taken_once() {
    loom::model(|| {
        let credits = Arc::new(ReceiveCredits::new());
        credits.grant(1);
        let other = {
            let credits = credits.clone();
            thread::spawn(move || (credits.grant(2), usize::from(credits.take().is_ok())))
        };
        let granted = credits.grant(2);
        let mine = usize::from(credits.take().is_ok());
        let (also_granted, theirs) = other.join().unwrap();
        assert_eq!(granted + also_granted, 1);
        assert_eq!(mine + theirs + credits.available() as usize, 2);
    });
}

/// I9: two queues that are attached at once do not get more entries than there are.
#[test]
fn completion_budget_is_not_exceeded() {
    loom::model(|| {
        let budget = Arc::new(CompletionBudget::new(5));
        let other = {
            let budget = budget.clone();
            thread::spawn(move || budget.attach(3).is_ok())
        };
        let mine = budget.attach(3).is_ok();
        assert!(mine != other.join().unwrap());
        assert_eq!(budget.free(), 2);
    });
}

type Pool = BufferPool<Box<[Word]>>;

const GRANULE: u64 = 64;

/// Two words of the tree's lowest level and the one above, `granules` of them.
fn pool(granules: u64) -> Arc<Pool> {
    let layout = PoolLayout::new(granules * GRANULE, GRANULE).unwrap();
    Arc::new(BufferPool::new(words(layout.words()), layout).unwrap())
}

fn allocate(pool: &Pool, granules: u64) -> Result<Extent, AllocError> {
    pool.allocate(granules * GRANULE, 1)
}

fn assert_whole(pool: &Pool) {
    let granules = pool.layout().granules();
    assert_eq!((pool.free_granules(), pool.largest_free_run()), (granules, granules));
    pool.release(allocate(pool, granules).expect("the whole pool in one extent")).unwrap();
}

/// I1, and a refusal is true: of two requests of which one fits, one is met, and everything comes back.
#[test]
fn pool_one_of_two_fits() {
    loom::model(|| {
        let pool = pool(128);
        let other = {
            let pool = pool.clone();
            thread::spawn(move || allocate(&pool, 70).ok())
        };
        let mine = allocate(&pool, 70).ok();
        let theirs = other.join().unwrap();
        assert!(mine.is_some() != theirs.is_some());
        for extent in [mine, theirs].into_iter().flatten() {
            pool.release(extent).unwrap();
        }
        assert_whole(&pool);
    });
}

/// Contention alone never makes an allocation fail: two threads that each need half of the pool, aligned, have it always.
#[test]
fn pool_contention_alone_refuses_nothing() {
    loom::model(|| {
        let pool = pool(128);
        let use_half = |pool: &Pool| {
            let extent = pool.allocate(64 * GRANULE, 64 * GRANULE).expect("half of the pool is free");
            pool.release(extent).unwrap();
        };
        let other = {
            let pool = pool.clone();
            thread::spawn(move || use_half(&pool))
        };
        use_half(&pool);
        other.join().unwrap();
        assert_whole(&pool);
    });
}

/// I1: two extents that share a word of the tree, taken and given back at once: the word is opened and closed under both.
#[test]
fn pool_word_opens_and_closes_under_two() {
    loom::model(|| {
        let pool = pool(128);
        let owner = Arc::new(AtomicUsize::new(0));
        let work = |pool: &Pool, owner: &AtomicUsize, granules: u64| {
            let extent = allocate(pool, granules).expect("both fit");
            // A bit for every ten granules: all lengths are multiples of that.
            let bits = ((1 << (granules / 10)) - 1) << (extent.offset() / GRANULE / 10);
            assert_eq!(owner.fetch_add(bits, Relaxed) & bits, 0, "two owners");
            owner.fetch_sub(bits, Relaxed);
            pool.release(extent).unwrap();
        };
        let other = {
            let (pool, owner) = (pool.clone(), owner.clone());
            thread::spawn(move || work(&pool, &owner, 20))
        };
        work(&pool, &owner, 30);
        other.join().unwrap();
        assert_whole(&pool);
    });
}

/// I1: what the owner before did to the memory is seen by the next owner, also where the word between them was closed and
/// opened by a third.
#[test]
fn pool_hands_memory_over() {
    loom::model(|| {
        let (pool, memory) = (pool(128), Arc::new(AtomicUsize::new(0)));
        let before = allocate(&pool, 128).unwrap();
        let others: Vec<_> = (0..2)
            .map(|_| {
                let (pool, memory) = (pool.clone(), memory.clone());
                thread::spawn(move || {
                    if allocate(&pool, 20).is_ok() {
                        assert_eq!(memory.load(Relaxed), 1, "not ordered after the owner before");
                    }
                })
            })
            .collect();
        memory.store(1, Relaxed);
        pool.release(before).unwrap();
        others.into_iter().for_each(|other| other.join().unwrap());
    });
}

/// I2: of two releases of one extent one is done, and the other told so.
#[test]
fn pool_releases_once() {
    loom::model(|| {
        let pool = pool(128);
        let extent = allocate(&pool, 70).unwrap();
        let other = {
            let pool = pool.clone();
            thread::spawn(move || pool.release(extent))
        };
        let mine = pool.release(extent);
        let theirs = other.join().unwrap();
        let refused = Err(ReleaseError::AlreadyReleased { extent });
        assert!((mine, theirs) == (Ok(()), refused) || (mine, theirs) == (refused, Ok(())));
        assert_whole(&pool);
    });
}

/// I2: a shrink and a release of one extent: one is done; and the granules come back whole.
#[test]
fn pool_shrinks_or_releases() {
    loom::model(|| {
        let pool = pool(128);
        let extent = allocate(&pool, 100).unwrap();
        let other = {
            let pool = pool.clone();
            thread::spawn(move || pool.shrink(extent, 10 * GRANULE))
        };
        let released = pool.release(extent);
        match other.join().unwrap() {
            Ok(less) => {
                assert!(matches!(released, Err(ReleaseError::Stale { .. })));
                pool.release(less).unwrap();
            }
            Err(_) => assert_eq!(released, Ok(())),
        }
        assert_whole(&pool);
    });
}

/// I1: a large claim over both words meets a release in one of them and a claim in the other: all or nothing, and what was
/// taken on the way comes back.
#[test]
fn pool_large_claim_is_all_or_nothing() {
    loom::model(|| {
        let pool = pool(128);
        let low = pool.reserve(0, 10 * GRANULE).unwrap();
        let high = pool.reserve(118 * GRANULE, 10 * GRANULE).unwrap();
        let other = {
            let pool = pool.clone();
            thread::spawn(move || {
                pool.release(low).unwrap();
                allocate(&pool, 5).unwrap()
            })
        };
        let large = allocate(&pool, 110).ok();
        let small = other.join().unwrap();
        for extent in [Some(high), Some(small), large].into_iter().flatten() {
            pool.release(extent).unwrap();
        }
        assert_whole(&pool);
    });
}

/// As above, where the claim is stopped at the end of its run, in a word that is open before.
#[test]
fn pool_claim_gives_back_what_it_took_before_its_end() {
    loom::model(|| {
        let pool = pool(128);
        let low = pool.reserve(0, 10 * GRANULE).unwrap();
        let high = pool.reserve(118 * GRANULE, 10 * GRANULE).unwrap();
        let other = {
            let pool = pool.clone();
            thread::spawn(move || pool.reserve(70 * GRANULE, 5 * GRANULE).ok())
        };
        let large = allocate(&pool, 100).ok();
        let small = other.join().unwrap();
        assert!(large.is_some() != small.is_some());
        for extent in [Some(low), Some(high), small, large].into_iter().flatten() {
            pool.release(extent).unwrap();
        }
        assert_whole(&pool);
    });
}

/// As above, where the claim is stopped in the middle, between the ends of its run.
#[test]
fn pool_claim_gives_back_what_it_took() {
    loom::model(|| {
        let pool = pool(192);
        let low = pool.reserve(0, 10 * GRANULE).unwrap();
        let other = {
            let pool = pool.clone();
            thread::spawn(move || pool.reserve(70 * GRANULE, 5 * GRANULE).ok())
        };
        let large = allocate(&pool, 150).ok();
        let small = other.join().unwrap();
        assert!(large.is_some() != small.is_some());
        for extent in [Some(low), small, large].into_iter().flatten() {
            pool.release(extent).unwrap();
        }
        assert_whole(&pool);
    });
}

/// Lock-free: a release that empties a word closes it by the same step, so that whoever needs it as a whole meets no state in
/// between that it would have to wait for; and it is whole again.
#[test]
fn pool_empty_word_is_closed_by_who_empties_it() {
    loom::model(|| {
        let pool = pool(128);
        let extent = pool.reserve(30 * GRANULE, 20 * GRANULE).unwrap();
        let other = {
            let pool = pool.clone();
            thread::spawn(move || pool.release(extent).unwrap())
        };
        let all = allocate(&pool, 128);
        other.join().unwrap();
        if let Ok(all) = all {
            pool.release(all).unwrap();
        }
        assert_whole(&pool);
    });
}

/// A refusal is true of one moment: a word that is being opened is taken as a whole for a moment, and what was free
/// elsewhere then is taken later; there is always room, and the request is met.
#[test]
fn pool_refusal_is_true_of_one_moment() {
    loom::model(|| {
        let pool = pool(128);
        let other = {
            let pool = pool.clone();
            thread::spawn(move || {
                let first = pool.reserve(0, 20 * GRANULE).ok();
                first.and_then(|_| pool.reserve(64 * GRANULE, 64 * GRANULE).ok())
            })
        };
        // In a thread of its own, so that few involuntary switches lead to all that matters.
        let asking = thread::spawn(move || assert!(allocate(&pool, 40).is_ok()));
        other.join().unwrap();
        asking.join().unwrap();
    });
}
