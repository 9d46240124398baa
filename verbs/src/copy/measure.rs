//! Which routine, on how many threads: a few copies of each, out of memory and not out of the cache.
#![allow(unsafe_code)]

use super::{Choice, Routine, kernels};
use crate::memory::Mapping;
use core::hint;
use core::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// What one thread copies in one run: more than a second-level cache holds of both sides, about 0.2 ms.
const SHARE: usize = 2 << 20;
/// What a run is cut into, as the copies of a queue pair are.
const PIECE: usize = 256 << 10;
/// Rounds go on until this much time is gone; the first is always whole.
const BUDGET: Duration = Duration::from_millis(14);
const MAX_ROUNDS: usize = 8;
/// What another thread must bring at least.
const PAYS: f64 = 1.15;

/// Measures `routines` with 1 thread, 2 and (from 8 processors on) 4, and chooses.
pub(super) fn choose(routines: &[Routine]) -> Choice {
    let started = Instant::now();
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let counts: &[usize] = match processors {
        1 => &[1],
        2..=7 => &[1, 2],
        _ => &[1, 2, 4],
    };
    let most = counts.last().copied().unwrap_or(1);
    let mut choice = Choice { routine: routines[0], threads: 1, bytes_per_second: 1 };
    let (Some(source), Some(target)) = (Buffer::new(most * SHARE), Buffer::new(most * SHARE)) else {
        return choice; // a process with no memory left for this has other worries
    };
    // Best seconds by thread count and routine: what disturbs a run makes it longer, never shorter.
    let mut seconds = vec![vec![f64::INFINITY; routines.len()]; counts.len()];
    let crew = Crew {
        routines,
        source,
        target,
        orders: AtomicUsize::new(0),
        cursor: AtomicUsize::new(0),
        busy: AtomicUsize::new(0),
    };
    thread::scope(|scope| {
        let workers = (1..most).filter(|&index| {
            let crew = &crew;
            thread::Builder::new().name("towline-measure".into()).spawn_scoped(scope, move || crew.work(index)).is_ok()
        });
        let able = 1 + workers.count();
        for round in 0..MAX_ROUNDS {
            if round > 0 && started.elapsed() > BUDGET {
                break;
            }
            for (best, &threads) in seconds.iter_mut().zip(counts).filter(|(_, threads)| **threads <= able) {
                for (which, time) in best.iter_mut().enumerate() {
                    *time = time.min(crew.run(which, threads));
                }
            }
        }
        crew.orders.store(LEAVE, Ordering::Release);
    });
    let mut rate_to_beat = 0.0;
    for (times, &threads) in seconds.iter().zip(counts) {
        for (&time, routine) in times.iter().zip(routines) {
            let rate = (threads * SHARE) as f64 / time;
            let needed = if threads > choice.threads { rate_to_beat * PAYS } else { rate_to_beat };
            if rate > needed {
                rate_to_beat = rate;
                choice = Choice { routine: *routine, threads, bytes_per_second: rate as u64 };
            }
        }
    }
    choice
}

/// The threads of a measurement. They live through all of it and spin meanwhile, so that no run waits for one to start
/// or to be moved to a processor of its own.
struct Crew<'a> {
    routines: &'a [Routine],
    source: Buffer,
    target: Buffer,
    /// The run at hand: its number, threads and routine; see [`order`].
    orders: AtomicUsize,
    /// The next byte to copy in it.
    cursor: AtomicUsize,
    /// Workers that have not finished it.
    busy: AtomicUsize,
}

/// The order that ends a worker.
const LEAVE: usize = usize::MAX;

/// Packs an order: a number that makes each different from the last, how many threads take part, which routine.
const fn order(number: usize, threads: usize, which: usize) -> usize {
    (number << 16) | (threads << 8) | which
}

impl Crew<'_> {
    /// Seconds for one copy of `threads * SHARE` bytes out of memory.
    fn run(&self, which: usize, threads: usize) -> f64 {
        let bytes = threads * SHARE;
        self.source.evict(bytes);
        self.target.evict(bytes);
        self.cursor.store(0, Ordering::Relaxed);
        self.busy.store(threads - 1, Ordering::Relaxed);
        let number = (self.orders.load(Ordering::Relaxed) >> 16) + 1;
        let start = Instant::now();
        self.orders.store(order(number, threads, which), Ordering::Release);
        self.copy(which, bytes);
        while self.busy.load(Ordering::Acquire) > 0 {
            pause();
        }
        start.elapsed().as_secs_f64()
    }

    /// What worker `index` (from 1) does until it is told to leave.
    fn work(&self, index: usize) {
        let mut last = 0;
        loop {
            let now = self.orders.load(Ordering::Acquire);
            if now == LEAVE {
                return;
            }
            let threads = (now >> 8) & 0xff;
            if now != last && index < threads {
                self.copy(now & 0xff, threads * SHARE);
                self.busy.fetch_sub(1, Ordering::Release);
            }
            last = now;
            pause();
        }
    }

    fn copy(&self, which: usize, bytes: usize) {
        loop {
            let offset = self.cursor.fetch_add(PIECE, Ordering::Relaxed);
            if offset >= bytes {
                break;
            }
            // SAFETY: `offset + PIECE <= bytes`, which both buffers hold; `cursor` gives each piece to one thread, and
            // a run begins when all have left the one before.
            unsafe { self.routines[which].copy(self.target.at(offset), self.source.at(offset), PIECE) }
        }
    }
}

/// Waits a moment; yields, since the one waited for may need this processor.
fn pause() {
    for _ in 0..50 {
        hint::spin_loop();
    }
    thread::yield_now();
}

/// Memory of our own, all of it there.
struct Buffer(Mapping);

impl Buffer {
    fn new(len: usize) -> Option<Self> {
        let map = Mapping::anonymous(len).ok()?;
        map.advise(libc::MADV_HUGEPAGE).ok(); // a wish; small pages only take longer to make
        if map.populate_write(0, len).is_err() {
            map.touch_fresh();
        }
        Some(Self(map))
    }

    fn at(&self, offset: usize) -> *mut u8 {
        self.0.address().wrapping_add(offset)
    }

    fn evict(&self, len: usize) {
        debug_assert!(len <= self.0.len());
        // SAFETY: the mapping has `len` bytes.
        unsafe { kernels::evict(self.0.address(), len) }
    }
}
