//! Which routine, on how many threads: a few copies of each, out of memory and not out of the cache.
//!
//! What is measured is the processor time of the busiest thread and not the time on the wall: the choice is for the life
//! of the process, so it must not depend on what else the machine did in these milliseconds.
#![allow(unsafe_code)]

use super::{Choice, Routine, kernels};
use crate::memory::Mapping;
use core::hint;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// What one thread copies in one run: more than a second-level cache holds of both sides, about 0.2 ms.
const SHARE: usize = 2 << 20;
/// What a run is cut into, as the copies of a queue pair are.
const PIECE: usize = 256 << 10;
/// Runs are repeated until this much time is gone.
const BUDGET: Duration = Duration::from_millis(15);
/// How often that is done where another thread doesn't seem to pay: one disturbed moment must not halve the speed of a
/// process for its life.
const ASKS: usize = 4;
const MAX_ROUNDS: usize = 8;
/// What another thread must bring at least.
const PAYS: f64 = 1.15;
/// What another routine must bring to be taken for faster than one behind it in the list: what these few milliseconds
/// can't tell apart.
const TIE: f64 = 1.06;
/// Most threads that are measured.
const MOST: usize = 4;
/// How many of the best on one thread are measured on more, beside `memcpy`: the order may differ, but not by much.
const FINALISTS: usize = 3;

/// Measures `routines` with 1 thread, 2 and (from 8 processors on) 4, and chooses.
pub(super) fn choose(routines: &[Routine]) -> Choice {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let counts: &[usize] = match processors {
        1 => &[],
        2..=7 => &[2],
        _ => &[2, MOST],
    };
    let most = counts.last().copied().unwrap_or(1);
    let (Some(source), Some(target)) = (Buffer::new(most * SHARE), Buffer::new(most * SHARE)) else {
        // A process with no memory left for this has other worries.
        return Choice { routine: routines[0], threads: 1, bytes_per_second: 1 };
    };
    let crew = Crew {
        routines,
        source,
        target,
        orders: AtomicUsize::new(0),
        busy: AtomicUsize::new(0),
        nanoseconds: Default::default(),
    };
    // Every routine and thread count once, and then again as long as there is time.
    let mut trials: Vec<Trial> = (0..routines.len()).map(|which| Trial::new(which, 1)).collect();
    thread::scope(|scope| {
        let start = |index: &usize| {
            let (crew, index) = (&crew, *index);
            thread::Builder::new().name("towline-measure".into()).spawn_scoped(scope, move || crew.work(index)).is_ok()
        };
        let able = 1 + (1..most).take_while(start).count();
        for trial in &mut trials {
            trial.run(&crew);
        }
        trials.sort_by(|a, b| b.rate.total_cmp(&a.rate));
        let finalist = |(place, trial): &(usize, &Trial)| *place < FINALISTS || trial.which == 0;
        let finalists: Vec<_> = trials.iter().enumerate().filter(finalist).map(|(_, trial)| trial.which).collect();
        for &threads in counts.iter().filter(|threads| **threads <= able) {
            trials.extend(finalists.iter().map(|&which| Trial::new(which, threads)));
        }
        settle(&mut trials, |trials| {
            let deadline = Instant::now() + BUDGET;
            for _ in 0..MAX_ROUNDS {
                for trial in &mut *trials {
                    if Instant::now() < deadline || trial.rate == 0.0 {
                        trial.run(&crew);
                    }
                }
            }
        });
        crew.orders.store(LEAVE, Ordering::Release);
    });
    let best = pick(&mut trials);
    Choice { routine: routines[best.which], threads: best.threads, bytes_per_second: best.rate as u64 }
}

/// Measures until some number of threads above one pays, or has been given up.
fn settle(trials: &mut [Trial], mut measure: impl FnMut(&mut [Trial])) {
    let asks = if trials.iter().any(|trial| trial.threads > 1) { ASKS } else { 1 };
    for _ in 0..asks {
        measure(trials);
        if pick(trials).threads > 1 {
            return;
        }
    }
}

/// The best: on more threads only if that pays, and of those that come within a tie the last routine.
fn pick(trials: &mut [Trial]) -> &Trial {
    trials.sort_by_key(|trial| (trial.threads, trial.which));
    let mut best = &trials[0];
    for trial in trials.iter() {
        let needed = if trial.threads > best.threads { best.rate * PAYS } else { best.rate };
        if trial.rate > needed {
            best = trial;
        }
    }
    let as_good = |trial: &&Trial| trial.threads == best.threads && trial.rate * TIE >= best.rate;
    trials.iter().rfind(as_good).unwrap_or(best)
}

/// A routine on some threads, and the best rate it has shown: what disturbs a run makes it slower, never faster.
struct Trial {
    which: usize,
    threads: usize,
    rate: f64,
}

impl Trial {
    fn new(which: usize, threads: usize) -> Self {
        Self { which, threads, rate: 0.0 }
    }

    fn run(&mut self, crew: &Crew<'_>) {
        let bytes = (self.threads * SHARE) as f64;
        self.rate = self.rate.max(bytes / crew.run(self.which, self.threads));
    }
}

/// The threads of a measurement. They live through all of it and spin meanwhile, so that no run waits for one to start
/// or to be moved to a processor of its own.
struct Crew<'a> {
    routines: &'a [Routine],
    source: Buffer,
    target: Buffer,
    /// The run at hand: its number, threads and routine; see [`order`].
    orders: AtomicUsize,
    /// Workers that have not finished it.
    busy: AtomicUsize,
    /// Processor time that each thread took for it.
    nanoseconds: [AtomicU64; MOST],
}

/// The order that ends a worker.
const LEAVE: usize = usize::MAX;

/// Packs an order: a number that makes each different from the last, how many threads take part, which routine.
const fn order(number: usize, threads: usize, which: usize) -> usize {
    (number << 16) | (threads << 8) | which
}

impl Crew<'_> {
    /// Seconds that the busiest of `threads` took to copy its share out of memory.
    fn run(&self, which: usize, threads: usize) -> f64 {
        let bytes = threads * SHARE;
        self.source.evict(bytes);
        self.target.evict(bytes);
        self.busy.store(threads - 1, Ordering::Relaxed);
        let number = (self.orders.load(Ordering::Relaxed) >> 16) + 1;
        self.orders.store(order(number, threads, which), Ordering::Release);
        self.copy(0, which);
        while self.busy.load(Ordering::Acquire) > 0 {
            pause();
        }
        let longest = self.nanoseconds[..threads].iter().map(|time| time.load(Ordering::Relaxed)).max();
        longest.unwrap_or(0).max(1) as f64 / 1e9
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
                self.copy(index, now & 0xff);
                self.busy.fetch_sub(1, Ordering::Release);
            }
            last = now;
            pause();
        }
    }

    /// Copies the share of a thread and notes how long that took.
    fn copy(&self, thread: usize, which: usize) {
        let start = processor_time();
        for offset in (thread * SHARE..(thread + 1) * SHARE).step_by(PIECE) {
            let (to, from) = (self.target.at(offset), self.source.at(offset));
            // SAFETY: `thread` is below the number of shares that both buffers hold; each thread has its own, and a run
            // begins when all have finished the one before.
            unsafe { self.routines[which].copy(to, from, PIECE) }
        }
        self.nanoseconds[thread].store(processor_time().saturating_sub(start), Ordering::Relaxed);
    }
}

/// Nanoseconds that this thread has run.
fn processor_time() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for the duration of the call. It can't fail for this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    (time.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec as u64)
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
    /// In small pages, as pools are on most machines: in huge ones a second thread seems to gain too little.
    fn new(len: usize) -> Option<Self> {
        let map = Mapping::anonymous(len).ok()?;
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

#[cfg(test)]
mod tests {
    use super::*;

    fn picked(trials: &[(usize, usize, f64)]) -> (usize, usize) {
        let mut trials: Vec<Trial> =
            trials.iter().map(|&(which, threads, rate)| Trial { which, threads, rate }).collect();
        let best = pick(&mut trials);
        (best.which, best.threads)
    }

    #[test]
    fn a_tie_goes_to_the_last_routine_and_a_clear_win_to_the_first() {
        assert_eq!(picked(&[(0, 1, 10.0), (3, 1, 9.9), (5, 1, 9.6)]), (5, 1));
        assert_eq!(picked(&[(0, 1, 10.0), (3, 1, 9.6), (5, 1, 9.0)]), (3, 1));
        assert_eq!(picked(&[(5, 1, 7.0), (0, 1, 10.0)]), (0, 1));
    }

    #[test]
    fn more_threads_are_taken_only_if_they_pay() {
        assert_eq!(picked(&[(0, 1, 10.0), (5, 1, 10.0), (5, 2, 11.0), (0, 2, 9.0)]), (5, 1));
        assert_eq!(picked(&[(0, 1, 10.0), (5, 1, 9.0), (0, 2, 20.0), (5, 2, 19.5)]), (5, 2));
    }
    fn trials() -> Vec<Trial> {
        vec![Trial::new(0, 1), Trial::new(0, 2)]
    }

    #[test]
    fn one_disturbed_moment_does_not_decide_against_more_threads() {
        let (mut trials, mut asked) = (trials(), 0);
        settle(&mut trials, |trials| {
            asked += 1;
            for trial in trials {
                let undisturbed = asked > 2;
                trial.rate = trial.rate.max(if trial.threads == 2 && undisturbed { 18.0 } else { 10.0 });
            }
        });
        assert_eq!((asked, pick(&mut trials).threads), (3, 2));
    }

    #[test]
    fn more_threads_that_never_pay_are_given_up() {
        let (mut both, mut asked) = (trials(), 0);
        settle(&mut both, |trials| {
            asked += 1;
            trials.iter_mut().for_each(|trial| trial.rate = 10.0);
        });
        assert_eq!((asked, pick(&mut both).threads), (ASKS, 1));
        let mut asked = 0;
        settle(&mut trials()[..1], |_| asked += 1);
        assert_eq!(asked, 1, "there is but one processor");
    }
}
