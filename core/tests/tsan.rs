//! Core's structures under ThreadSanitizer: `ci/tsan` builds and runs this. Without the sanitizer it is one more stress test.
//!
//! Threads are started by `pthread_create`, since the standard library's own primitives, which are not instrumented, give
//! false reports. Memory that the structures hand from owner to owner is plain memory here, written without any atomic: the
//! sanitizer reports whoever was not ordered after the owner before. With `TOWLINE_TSAN_RACE` set threads write to what is
//! not theirs any more: the sanitizer has to see that.
#![allow(unsafe_code, clippy::unwrap_used, clippy::expect_used, reason = "a test of memory ordering")]

use std::cell::UnsafeCell;
use std::ffi::c_void;
use towline_core::Word;
use towline_core::lease::*;
use towline_core::pool::{BufferPool, PoolLayout};
use towline_core::transfer::{Progress, TransferTable, storage_words};

const GRANULES: u64 = 64 * 64 + 100;
const GRANULE: u64 = 64;
const THREADS: usize = 4;
const TURNS: usize = 20_000;

struct Memory(Box<[UnsafeCell<u64>]>);

// SAFETY: a cell is written only by who owns its granule, transfer slot or payload; that this holds is what is tested.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(cells: usize) -> Self {
        Self((0..cells).map(|_| UnsafeCell::new(0)).collect())
    }

    fn write(&self, cell: usize) {
        // SAFETY: the caller owns the cell, see above.
        unsafe { *self.0[cell].get() += 1 };
    }
}

struct Shared {
    pool: BufferPool<Box<[Word]>>,
    granules: Memory,
    transfers: TransferTable<Box<[Word]>>,
    slots: Memory,
    payloads: PayloadTable<Box<[Word]>>,
    leases: LeaseTable<Box<[Word]>>,
    contents: Memory,
    race: bool,
}

fn words(n: usize) -> Box<[Word]> {
    (0..n).map(|_| Word::default()).collect()
}

fn use_pool(shared: &Shared, seed: u64) {
    let granules = 1 + (seed >> 33) % [6, 70, 2000][(seed >> 20) as usize % 3];
    if let Ok(extent) = shared.pool.allocate(granules * GRANULE, 1) {
        let first = (extent.offset() / GRANULE) as usize;
        (first..first + granules as usize).for_each(|cell| shared.granules.write(cell));
        let kept = if granules > 1 { shared.pool.shrink(extent, GRANULE).unwrap() } else { extent };
        shared.granules.write(first);
        shared.pool.release(kept).unwrap();
        if shared.race {
            shared.granules.write(first);
        }
    }
}

fn use_transfers(shared: &Shared) {
    if let Ok(id) = shared.transfers.create() {
        shared.slots.write(id.slot() as usize);
        shared.transfers.post(id, 1).unwrap();
        shared.transfers.finish(id).unwrap();
        assert!(matches!(shared.transfers.complete(id, Ok(())), Ok(Progress::Fenced(_))));
        shared.slots.write(id.slot() as usize);
        shared.transfers.release(id).unwrap();
    }
}

fn use_payloads(shared: &Shared) {
    let publication = Publication { len: 8, filled: 0, consumers: Consumers::Count(1), keep: 10 };
    if let Ok(id) = shared.payloads.publish(publication, 0) {
        let slot = id.slot() as usize;
        shared.contents.write(slot);
        shared.payloads.fill(id, 8).unwrap();
        shared.payloads.open(id).unwrap();
        match shared.leases.grant(id, 5) {
            Ok(lease) => assert_eq!(shared.leases.close(lease), Ok(id)),
            Err(full) => assert_eq!(full.capacity, 2),
        }
        let ended = towline_core::lease::Progress::Ended(End::Consumed);
        assert_eq!(shared.payloads.close(id, Use::Consumed, 1), Ok(ended));
        shared.contents.write(slot);
        shared.payloads.release(id).unwrap();
    }
}

extern "C" fn work(argument: *mut c_void) -> *mut c_void {
    // SAFETY: `main` passes a pointer to what it leaked, so that it lives for ever and is only shared.
    let shared = unsafe { &*argument.cast::<Shared>() };
    let mut seed = &raw const shared as u64; // where this thread's stack lies
    for _ in 0..TURNS {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        use_pool(shared, seed);
        use_transfers(shared);
        use_payloads(shared);
    }
    std::ptr::null_mut()
}

fn main() {
    let layout = PoolLayout::new(GRANULES * GRANULE, GRANULE).unwrap();
    let shared = Box::leak(Box::new(Shared {
        pool: BufferPool::new(words(layout.words()), layout).unwrap(),
        granules: Memory::new(GRANULES as usize),
        transfers: TransferTable::new(words(storage_words(3))),
        slots: Memory::new(3),
        payloads: PayloadTable::new(words(payload_words(3))),
        leases: LeaseTable::new(words(lease_words(2))),
        contents: Memory::new(3),
        race: std::env::var_os("TOWLINE_TSAN_RACE").is_some(),
    }));
    let argument = (&raw const *shared).cast_mut().cast::<c_void>();
    let threads: Vec<_> = (0..THREADS)
        .map(|_| {
            let mut thread = 0;
            // SAFETY: `work` has the type it must have, `argument` lives for ever, and `thread` is where the id goes.
            let failed = unsafe { libc::pthread_create(&raw mut thread, std::ptr::null(), work, argument) };
            assert_eq!(failed, 0);
            thread
        })
        .collect();
    for thread in threads {
        // SAFETY: started above, and joined once.
        let failed = unsafe { libc::pthread_join(thread, std::ptr::null_mut()) };
        assert_eq!(failed, 0);
    }
    let whole = (shared.pool.free_granules(), shared.pool.largest_free_run());
    assert_eq!(whole, (GRANULES, GRANULES));
    println!("tsan: {} turns of {THREADS} threads", TURNS);
}
