use super::*;
use std::boxed::Box;
use std::sync::Mutex;
use std::vec::Vec;

pub(super) const GRANULE: u64 = 64;

/// A pool of `granules` granules, over storage that holds rubbish.
pub(super) fn pool(granules: u64) -> BufferPool<Box<[Word]>> {
    let layout = PoolLayout::new(granules * GRANULE, GRANULE).unwrap();
    let storage: Box<[Word]> = (0..layout.words()).map(|_| Word::default()).collect();
    storage.iter().for_each(|word| word.store(0x5555_5555_5555_5555, Ordering::Relaxed));
    BufferPool::new(storage, layout).unwrap()
}

#[test]
fn layouts_outside_the_limits_are_refused() {
    for granule in [0, 32, 63, 96, 4 << 20] {
        assert_eq!(PoolLayout::new(4 << 20, granule), Err(LayoutError::Granule { granule }));
    }
    for (region_len, granule) in [(0, 64), (100, 64), (4096, 8192), ((16 << 40) + 4096, 4096)] {
        assert_eq!(PoolLayout::new(region_len, granule), Err(LayoutError::Region { region_len, granule }));
    }
    let largest = PoolLayout::new(16 << 40, 64).unwrap();
    assert_eq!(largest.granules(), 1 << 38);
}

#[test]
fn metadata_is_at_most_four_thousandths_of_the_region() {
    for region in [16u64 << 20, 1 << 30, 1 << 40] {
        let layout = PoolLayout::new(region, 4096).unwrap();
        assert!((layout.words() * 8) as f64 <= 0.004 * region as f64, "{region}");
    }
}

#[test]
fn too_little_storage_is_refused() {
    let layout = PoolLayout::new(1 << 20, 4096).unwrap();
    let need = layout.words();
    let storage: Vec<_> = (1..need).map(|_| Word::default()).collect();
    assert_eq!(BufferPool::new(storage, layout).unwrap_err(), StorageTooSmall { need, have: need - 1 });
}

#[test]
fn extents_take_exactly_the_granules_they_need() {
    let pool = pool(1000);
    for (len, granules) in [(1, 1), (64, 1), (65, 2), (64 * 65, 65), (64 * 129 + 1, 130)] {
        let before = pool.free_granules();
        let extent = pool.allocate(len, 1).unwrap();
        assert_eq!((before - pool.free_granules(), extent.len()), (granules, len));
    }
    assert_eq!(pool.allocate(0, 1), Err(AllocError::ZeroLength));
    assert_eq!(pool.allocate(1, 3), Err(AllocError::Alignment { align: 3 }));
    assert_eq!(pool.allocate(1, 0), Err(AllocError::Alignment { align: 0 }));
    assert_eq!(pool.allocate(64_001, 1), Err(AllocError::TooLarge { need: 64_064, capacity: 64_000 }));
    assert!(matches!(pool.allocate(u64::MAX, 1), Err(AllocError::TooLarge { .. })));
}

#[test]
fn one_granule_is_a_pool() {
    let pool = pool(1);
    let extent = pool.allocate(64, 64).unwrap();
    assert_eq!(pool.allocate(1, 1), Err(AllocError::NoSpace { need: 64, free: 0, largest_free_run: 0 }));
    pool.release(extent).unwrap();
    pool.allocate(1, 1).unwrap();
}

#[test]
fn alignment_is_met() {
    let pool = pool(4096);
    pool.allocate(64, 1).unwrap();
    for align in [1, 64, 128, 4096, 65536] {
        let extent = pool.allocate(100, align).unwrap();
        assert_eq!(extent.offset() % align, 0);
    }
    // A run that is long enough, but not where it is aligned.
    let small = self::pool(12);
    small.reserve(0, 64).unwrap();
    assert!(matches!(small.allocate(8 * 64, 8 * 64), Err(AllocError::NoSpace { free: 704, .. })));
    small.allocate(8 * 64, 4 * 64).unwrap();
}

#[test]
fn neighbours_merge() {
    let pool = pool(300);
    let parts: Vec<_> = (0..3).map(|_| pool.allocate(100 * 64, 1).unwrap()).collect();
    assert!(pool.allocate(1, 1).is_err());
    pool.release(parts[0]).unwrap();
    pool.release(parts[2]).unwrap();
    assert_eq!((pool.largest_free_run(), pool.free_granules()), (100, 200));
    assert_eq!(pool.fragmentation(), 0.5);
    pool.release(parts[1]).unwrap();
    assert_eq!((pool.largest_free_run(), pool.fragmentation(), pool.high_water_mark()), (300, 0.0, 300));
    pool.allocate(300 * 64, 1).unwrap();
    assert_eq!(pool.fragmentation(), 0.0);
}

#[test]
fn every_misuse_of_a_handle_is_told_and_changes_nothing() {
    let (pool, other) = (pool(100), pool(100));
    let extent = pool.reserve(1280, 640).unwrap();
    let same = other.reserve(1280, 640).unwrap();
    let with = |offset, len, generation| Extent::from_parts(offset, len, generation, pool.id());
    let (offset, len, generation) = (extent.offset(), extent.len(), extent.generation());

    assert_eq!(pool.release(same), Err(ReleaseError::Foreign { extent: same, pool: pool.id() }));
    for wrong in [len - 1, len + 1, len - 64, 1] {
        let wrong = with(offset, wrong, generation);
        assert_eq!(pool.release(wrong), Err(ReleaseError::WrongLength { extent: wrong, len }));
    }
    for outside in [
        with(6400, 1, 0),
        with(0, 6401, 0),
        with(offset + 1, len, generation),
        with(offset, 0, generation),
        with(!63, 640, 0),
        with(64, u64::MAX, 0),
    ] {
        assert_eq!(pool.release(outside), Err(ReleaseError::OutOfRange { extent: outside, region_len: 6400 }));
    }
    let inside = with(offset + 64, 64, 0);
    assert_eq!(pool.release(inside), Err(ReleaseError::Stale { extent: inside, generation: 0 }));
    let future = with(offset, len, generation + 5);
    assert_eq!(pool.release(future), Err(ReleaseError::Stale { extent: future, generation }));
    assert_eq!(pool.free_granules(), 90);
    pool.validate(extent).unwrap();

    pool.release(extent).unwrap();
    assert_eq!(pool.release(extent), Err(ReleaseError::AlreadyReleased { extent }));
    let again = pool.reserve(offset, 640).unwrap();
    assert_eq!(pool.release(extent), Err(ReleaseError::Stale { extent, generation: again.generation() }));
    assert_eq!(pool.shrink(extent, 1), Err(ReleaseError::Stale { extent, generation: again.generation() }));
    pool.release(again).unwrap();
    assert_eq!(pool.free_granules(), 100);
}

#[test]
fn a_generation_survives_being_inside_another_extent() {
    let pool = pool(100);
    let (first, second) = (pool.reserve(0, 64).unwrap(), pool.reserve(64, 64).unwrap());
    pool.release(first).unwrap();
    pool.release(second).unwrap();
    let both = pool.reserve(0, 128).unwrap();
    assert!(pool.release(second).is_err());
    pool.release(both).unwrap();
    let again = pool.reserve(64, 64).unwrap();
    assert_eq!((again.offset(), again.generation()), (second.offset(), second.generation() + 1));
    assert!(matches!(pool.release(second), Err(ReleaseError::Stale { .. })));
}

#[test]
fn shrinking_gives_back_the_tail_and_makes_the_old_handle_stale() {
    let pool = pool(100);
    let extent = pool.allocate(640, 1).unwrap();
    for to in [0, 641, u64::MAX] {
        assert_eq!(pool.shrink(extent, to), Err(ReleaseError::CannotShrink { extent, to }));
    }
    let less = pool.shrink(extent, 630).unwrap(); // in the same granules
    assert_eq!((pool.free_granules(), less.len(), less.offset()), (90, 630, extent.offset()));
    assert!(matches!(pool.release(extent), Err(ReleaseError::Stale { .. })));
    let single = pool.shrink(less, 10).unwrap();
    assert_eq!(pool.free_granules(), 99);
    assert!(matches!(pool.release(less), Err(ReleaseError::Stale { .. })));
    pool.release(single).unwrap();
    assert_eq!((pool.free_granules(), pool.largest_free_run()), (100, 100));
}

#[test]
fn scattered_allocation_holds_the_length_or_nothing() {
    let pool = pool(64);
    let all: Vec<_> = (0..8).map(|_| pool.allocate(8 * 64, 1).unwrap()).collect();
    all.iter().step_by(2).for_each(|&extent| pool.release(extent).unwrap());

    let mut pieces = [None; 4];
    let used = pool.allocate_at_most(3 * 8 * 64 - 30, 1, &mut pieces).unwrap();
    assert_eq!(used, 3);
    let extents: Vec<_> = pieces.iter().flatten().collect();
    assert_eq!(extents.iter().map(|extent| extent.len()).sum::<u64>(), 3 * 8 * 64 - 30);
    assert_eq!(pool.free_granules(), 8);
    for extent in extents {
        pool.release(*extent).unwrap();
    }

    let refused = pool.allocate_at_most(4 * 8 * 64, 1, &mut pieces[..3]);
    assert_eq!(refused, Err(AllocError::NoSpace { need: 2048, free: 512, largest_free_run: 512 }));
    assert_eq!((pool.free_granules(), pieces), (32, [None; 4]));
    // One piece if it fits in one; a run that holds no whole multiple of the alignment is no use.
    assert_eq!(pool.allocate_at_most(8 * 64, 1, &mut pieces), Ok(1));
    assert!(pool.allocate_at_most(20 * 64, 16 * 64, &mut pieces).is_err());
    assert_eq!(pool.allocate_at_most(0, 1, &mut pieces), Err(AllocError::ZeroLength));
}

#[test]
fn a_reservation_takes_the_very_place_or_nothing() {
    let pool = pool(200);
    let extent = pool.reserve(64 * 60, 64 * 80 - 1).unwrap();
    assert_eq!((extent.offset(), extent.len(), pool.free_granules()), (64 * 60, 64 * 80 - 1, 120));
    assert_eq!(pool.reserve(0, 64 * 200), Err(ReserveError::Taken { offset: 64 * 60 }));
    assert_eq!(pool.reserve(64 * 139, 1), Err(ReserveError::Taken { offset: 64 * 139 }));
    assert_eq!(pool.free_granules(), 120);
    for (offset, len) in [(1, 64), (0, 0), (64 * 200, 1), (64, 64 * 200), (u64::MAX, 1)] {
        assert_eq!(pool.reserve(offset, len), Err(ReserveError::OutOfRange { offset, len, region_len: 12_800 }));
    }
    pool.reserve(64 * 140, 64 * 60).unwrap();
}

#[test]
fn the_live_extents_are_listed_in_order() {
    let pool = pool(500);
    let mut extents = [1u64, 64, 65, 64 * 200, 129].map(|len| pool.allocate(len, 1).unwrap()).to_vec();
    pool.release(extents.remove(2)).unwrap();
    extents.sort_by_key(Extent::offset);
    assert!(pool.live().eq(extents.iter().copied()));
}

/// I1 and I2 from many threads: no byte has two owners, and everything comes back.
#[test]
fn threads_never_share_a_granule() {
    let granules = 512;
    let pool = pool(granules);
    let owners: Vec<Mutex<()>> = (0..granules).map(|_| Mutex::new(())).collect();
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let (pool, owners) = (&pool, &owners);
            scope.spawn(move || {
                let mut seed = thread * 77 + 1;
                for _ in 0..2_000 {
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let len = 1 + (seed >> 33) % (90 * 64);
                    let Ok(extent) = pool.allocate(len, 1) else { continue };
                    let first = (extent.offset() / 64) as usize;
                    let held: Vec<_> = owners[first..first + len.div_ceil(64) as usize]
                        .iter()
                        .map(|owner| owner.try_lock().expect("a granule with two owners"))
                        .collect();
                    drop(held);
                    if seed >> 60 == 0 {
                        let less = pool.shrink(extent, len.div_ceil(2)).unwrap();
                        pool.release(less).unwrap();
                    } else {
                        pool.release(extent).unwrap();
                    }
                    assert!(pool.release(extent).is_err());
                }
            });
        }
    });
    assert_eq!((pool.free_granules(), pool.largest_free_run()), (granules, granules));
    assert_eq!(pool.live().count(), 0);
}

/// Threads that together never ask for more places than there are are never refused, though their claims, each over two
/// words, run into each other.
#[test]
fn contention_alone_never_makes_an_allocation_fail() {
    let pool = pool(8 * 128);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..5_000 {
                    let extent = pool.allocate(128 * 64, 128 * 64).unwrap();
                    pool.release(extent).unwrap();
                }
            });
        }
    });
    assert_eq!(pool.free_granules(), 8 * 128);
}

/// Hints decide speed and fit only: filled with rubbish again and again, also by another thread, they change no answer.
#[test]
fn rubbish_in_the_hints_changes_no_answer() {
    let pool = pool(5000);
    let rubbish = |seed: u64| {
        let mut seed = seed | 1;
        let shape = pool.shape;
        for word in &pool.storage[shape.hints_first..shape.words] {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            word.set_hint(if seed.is_multiple_of(3) { seed } else { seed & (seed >> 9) & (seed << 11) });
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| (0..500).for_each(|seed| rubbish(2 * seed + 77)));
        let mut live = Vec::new();
        let mut seed = 5u64;
        for turn in 0..20_000u64 {
            if turn % 40 == 0 {
                rubbish(turn);
            }
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let len = 1 + (seed >> 33) % if turn % 7 == 0 { 900 * 64 } else { 20 * 64 };
            match pool.allocate(len, 1) {
                Ok(extent) => live.push(extent),
                Err(AllocError::NoSpace { need, largest_free_run, .. }) => {
                    assert!(largest_free_run < need, "refused what fits");
                    live.drain(..live.len() / 2).for_each(|extent| pool.release(extent).unwrap());
                }
                Err(refused) => panic!("{refused}"),
            }
        }
        live.drain(..).for_each(|extent| pool.release(extent).unwrap());
    });
    assert_eq!((pool.free_granules(), pool.largest_free_run()), (5000, 5000));
}

/// Threads that find only what others have noted take a part of the region, and not the next place in it; nothing is lost by
/// that.
#[test]
fn threads_take_parts_of_the_region_for_themselves() {
    const GRANULES: u64 = 1 << 17;
    let pool = pool(GRANULES);
    let together = std::sync::Barrier::new(8);
    let mut all: Vec<Extent> = std::thread::scope(|scope| {
        let work = || {
            together.wait();
            let extents: Vec<_> = (0..10).map(|_| pool.allocate(100 * GRANULE, 1).unwrap()).collect();
            together.wait();
            extents
        };
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    all.sort_by_key(Extent::offset);
    assert!(all.windows(2).all(|pair| pair[0].offset() + pair[0].len() <= pair[1].offset()), "extents overlap");
    let apart = (all[79].offset() - all[0].offset()) / GRANULE;
    assert!(apart >= GRANULES / 4, "all within {apart} granules");
    all.into_iter().for_each(|extent| pool.release(extent).unwrap());
    assert_eq!((pool.free_granules(), pool.largest_free_run()), (GRANULES, GRANULES));
    pool.allocate(GRANULES * GRANULE, 1).unwrap();
}

/// I1, I2 with far more threads than processors: extents of all sizes, given away to other threads to release.
#[test]
fn sixty_four_threads_share_a_pool() {
    const GRANULES: u64 = 64 * 64 * 3 + 17;
    let pool = pool(GRANULES);
    let owners: Vec<_> = (0..GRANULES).map(|_| std::sync::atomic::AtomicBool::new(false)).collect();
    let own = |extent: Extent, take: bool| {
        let first = (extent.offset() / GRANULE) as usize;
        for owner in &owners[first..first + extent.len().div_ceil(GRANULE) as usize] {
            assert_eq!(owner.swap(take, Ordering::Relaxed), !take, "a granule with two owners");
        }
    };
    let shared = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for thread in 0..64u64 {
            let (pool, own, shared) = (&pool, &own, &shared);
            scope.spawn(move || {
                let mut seed = thread + 1;
                for turn in 0..500u64 {
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let granules = 1 + (seed >> 33) % [8, 70, 400, 5000][(turn % 4) as usize];
                    if let Ok(extent) = pool.allocate(granules * GRANULE, 1) {
                        own(extent, true);
                        shared.lock().unwrap().push(extent);
                    }
                    let given = shared.lock().unwrap().pop();
                    if let Some(extent) = given.filter(|_| seed >> 62 != 0) {
                        own(extent, false);
                        pool.release(extent).unwrap();
                    } else {
                        shared.lock().unwrap().extend(given);
                    }
                }
            });
        }
    });
    for extent in shared.into_inner().unwrap() {
        own(extent, false);
        pool.release(extent).unwrap();
    }
    assert_eq!((pool.free_granules(), pool.largest_free_run(), pool.live().count()), (GRANULES, GRANULES, 0));
}
