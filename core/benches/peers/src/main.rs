//! The pool beside other allocators of offsets, in one run. One JSON object a row on standard output, a table on standard
//! error.
//!
//! Arguments: `[name filter]`. `BENCH_SECONDS` (0.25) and `REPEATS` (5) set the length of a run.

mod pools;

use pools::{Bare, Buddy, GRANULE, OffsetAllocator, ParkingLot, Pool, Rlsf, StdMutex, Towline};
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: u64) -> u64 {
        ((self.next() >> 32) * n) >> 32
    }
}

#[derive(Clone, Copy)]
enum Mix {
    Uniform,
    Log,
    Small,
}

impl Mix {
    const ALL: [Self; 3] = [Self::Uniform, Self::Log, Self::Small];

    fn name(self) -> &'static str {
        match self {
            Self::Uniform => "uniform 4K-8M",
            Self::Log => "log 4K-8M",
            Self::Small => "uniform 4K-64K",
        }
    }

    fn draw(self, random: &mut Random) -> u64 {
        match self {
            Self::Uniform => 1 + random.below(2048),
            Self::Log => {
                let low = 1 << random.below(11);
                low + random.below(low + 1)
            }
            Self::Small => 1 + random.below(16),
        }
    }

    fn mean(self) -> f64 {
        let mut random = Random(99);
        (0..200_000).map(|_| self.draw(&mut random)).sum::<u64>() as f64 / 200_000.0
    }
}

/// What a thread gives the other to free.
struct Mailbox<T> {
    slots: Vec<std::sync::Mutex<Vec<(T, u64)>>>,
}

struct Thread<'a, P: Pool> {
    pool: &'a P,
    mix: Mix,
    live: Vec<(P::Token, u64)>,
    random: Random,
    failed: u64,
    /// With cross-thread frees: what is on its way to the other thread, handed over 8 at a time.
    out: Option<Vec<(P::Token, u64)>>,
    incoming: Vec<(P::Token, u64)>,
    turn: u64,
    number: usize,
    mail: &'a Mailbox<P::Token>,
}

impl<P: Pool> Thread<'_, P> {
    fn fill(&mut self, count: usize) {
        while self.live.len() < count {
            let n = self.mix.draw(&mut self.random);
            match self.pool.alloc(n) {
                Some(token) => self.live.push((token, n)),
                None => return,
            }
        }
    }

    /// Frees one of the live extents, and allocates another.
    #[inline(always)]
    fn pair(&mut self) {
        let index = self.random.below(self.live.len() as u64) as usize;
        let n = self.mix.draw(&mut self.random);
        let (token, old) = self.live[index];
        self.turn += 1;
        match &mut self.out {
            // Every second extent is released by the other thread, which gives as many in exchange.
            Some(out) if self.turn % 2 == 0 => {
                out.push((token, old));
                if let Some((token, n)) = self.incoming.pop() {
                    self.pool.free(token, n);
                }
                if out.len() >= 8 {
                    self.exchange();
                }
            }
            _ => self.pool.free(token, old),
        }
        match self.pool.alloc(n) {
            Some(token) => self.live[index] = (token, n),
            None => {
                self.failed += 1;
                self.live.swap_remove(index);
                self.fill(self.live.len() + 1);
            }
        }
    }

    #[cold]
    fn exchange(&mut self) {
        let Some(out) = &mut self.out else { return };
        let mut theirs = self.mail.slots[1 - self.number].lock().expect("no panic");
        if theirs.len() < 32 {
            theirs.append(out);
        }
        drop(theirs);
        // The other does not keep up, or does not run: free it here, or the region fills up.
        for (token, n) in out.drain(..) {
            self.pool.free(token, n);
        }
        let mut mine = self.mail.slots[self.number].lock().expect("no panic");
        self.incoming.append(&mut mine);
        drop(mine);
        // What the other was faster to give than we to free.
        while self.incoming.len() > 8 {
            if let Some((token, n)) = self.incoming.pop() {
                self.pool.free(token, n);
            }
        }
    }
}

/// The region of which the mix takes half. A larger region is half full all the same: every second 8 MiB are taken and stay,
/// so that what grows is what the allocator has to look at, and not the number of extents that no cache holds.
const REGION: u64 = 1 << 18;

fn each<P: Pool>(
    pool: &P,
    mix: Mix,
    granules: u64,
    threads: usize,
    cross: bool,
    work: impl Fn(&mut Thread<'_, P>, &Barrier) + Sync,
) -> u64 {
    let count = (granules.min(REGION) as f64 / 2.0 / mix.mean()) as usize / threads;
    let large = (granules - granules.min(REGION)) / 2048;
    let taken: Vec<_> = (0..large).map(|_| pool.alloc(2048).expect("there is room")).collect();
    taken.iter().step_by(2).for_each(|&token| pool.free(token, 2048));
    let mail = Mailbox { slots: (0..2).map(|_| std::sync::Mutex::new(Vec::new())).collect() };
    let (gate, failed) = (Barrier::new(threads), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for number in 0..threads {
            let (mail, gate, failed, work) = (&mail, &gate, &failed, &work);
            scope.spawn(move || {
                let mut thread = Thread {
                    pool,
                    mix,
                    live: Vec::new(),
                    random: Random(7919 * (number as u64 + 1)),
                    failed: 0,
                    out: cross.then(Vec::new),
                    incoming: Vec::new(),
                    turn: 0,
                    number,
                    mail,
                };
                thread.fill(count);
                for _ in 0..count * 4 {
                    thread.pair(); // age it
                }
                thread.failed = 0;
                work(&mut thread, gate);
                failed.fetch_add(thread.failed as usize, Ordering::Relaxed);
                gate.wait();
                for (token, n) in thread.live.into_iter().chain(thread.incoming).chain(thread.out.into_iter().flatten())
                {
                    pool.free(token, n);
                }
            });
        }
    });
    for (token, n) in mail.slots.iter().flat_map(|slot| std::mem::take(&mut *slot.lock().expect("no panic"))) {
        pool.free(token, n);
    }
    failed.into_inner() as u64
}

/// One extent of 1 GiB in a region of 4 GiB that extents of all sizes were in: ns for a pair, and of one allocation the median
/// and the 99.9th percentile.
fn one_gib<P: Pool>(repeats: usize) -> (f64, f64, f64) {
    let pool = P::make(4 * REGION);
    let mut random = Random(77);
    let mut live: Vec<_> =
        std::iter::from_fn(|| Some(Mix::Log.draw(&mut random))).map_while(|n| Some((pool.alloc(n)?, n))).collect();
    while !live.is_empty() {
        let (token, n) = live.swap_remove(random.below(live.len() as u64) as usize);
        pool.free(token, n);
    }
    let mut times = Vec::new();
    let start = Instant::now();
    let count = 1000 * repeats;
    for _ in 0..count {
        let before = Instant::now();
        let token = pool.alloc(REGION).expect("all is free");
        times.push(before.elapsed().as_nanos() as f64);
        pool.free(token, REGION);
    }
    let pair = start.elapsed().as_nanos() as f64 / count as f64;
    times.sort_by(f64::total_cmp);
    (pair, times[count / 2], times[count * 999 / 1000])
}

/// Pairs a second, all threads together.
fn speed<P: Pool>(mix: Mix, granules: u64, threads: usize, cross: bool, seconds: f64) -> f64 {
    let pool = P::make(granules);
    let rates = std::sync::Mutex::new(Vec::new());
    each(&pool, mix, granules, threads, cross, |thread, gate| {
        gate.wait();
        let (start, mut pairs) = (Instant::now(), 0u64);
        while start.elapsed().as_secs_f64() < seconds {
            for _ in 0..64 {
                thread.pair();
            }
            pairs += 64;
        }
        rates.lock().expect("no panic").push(pairs as f64 / start.elapsed().as_secs_f64());
    });
    rates.into_inner().expect("no panic").into_iter().sum()
}

/// Median and 99.9th percentile of one allocation in ns, the clock's own 20 ns or so included.
fn latency<P: Pool>(mix: Mix, granules: u64, threads: usize, cross: bool) -> (f64, f64) {
    let pool = P::make(granules);
    let all = std::sync::Mutex::new(Vec::new());
    each(&pool, mix, granules, threads, cross, |thread, gate| {
        let mut times = Vec::with_capacity(100_000);
        gate.wait();
        for _ in 0..100_000 {
            let index = thread.random.below(thread.live.len() as u64) as usize;
            let n = thread.mix.draw(&mut thread.random);
            let (token, old) = thread.live.swap_remove(index);
            thread.pool.free(token, old);
            let start = Instant::now();
            let got = thread.pool.alloc(n);
            times.push(start.elapsed().as_nanos() as f64);
            thread.live.extend(got.map(|token| (token, n)));
        }
        all.lock().expect("no panic").append(&mut times);
    });
    let mut all = all.into_inner().expect("no panic");
    all.sort_by(f64::total_cmp);
    (all[all.len() / 2], all[all.len() * 999 / 1000])
}

/// The share of the region that is asked for and live when the first request fails, with churn at every percent from half
/// full on.
fn fill<P: Pool>(mix: Mix, granules: u64, seed: u64) -> f64 {
    let pool = P::make(granules);
    let mut random = Random(seed * 2_654_435_761 + 1);
    let mut live: Vec<(P::Token, u64)> = Vec::new();
    let mut used = 0;
    let mut level = 50;
    let share = 'full: loop {
        let mut top_up = |live: &mut Vec<_>, used: &mut u64| {
            while *used < granules * level / 100 {
                let n = mix.draw(&mut random);
                let Some(token) = pool.alloc(n) else { return false };
                live.push((token, n));
                *used += n;
            }
            true
        };
        if !top_up(&mut live, &mut used) {
            break used as f64 / granules as f64;
        }
        for turn in 0..live.len() * 2 {
            let mut choose = Random(seed ^ ((turn as u64 + 1) * 0x9e37_79b9_7f4a_7c15));
            choose.next();
            let (token, n) = live.swap_remove(choose.below(live.len() as u64) as usize);
            pool.free(token, n);
            used -= n;
            if !top_up(&mut live, &mut used) {
                break 'full used as f64 / granules as f64;
            }
        }
        level += 1;
    };
    let mut sorted: Vec<_> = live.iter().map(|(token, n)| (P::place(token), *n)).collect();
    sorted.sort_unstable();
    assert!(sorted.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "extents overlap");
    live.into_iter().for_each(|(token, n)| pool.free(token, n));
    share
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

struct Options {
    filter: String,
    seconds: f64,
    repeats: usize,
}

fn bench<P: Pool>(options: &Options, peer: &str, threads: &[usize], region: u64, mixes: &[Mix], with_fill: bool) {
    if !peer.contains(&options.filter) {
        return;
    }
    let granules = region / GRANULE;
    for &mix in mixes {
        let filled = with_fill.then(|| median((1..=11).map(|seed| fill::<P>(mix, granules, seed)).collect()));
        for (threads, cross) in threads.iter().flat_map(|&n| [(n, false), (n, true)]).filter(|t| *t != (1, true)) {
            let runs = (0..options.repeats).map(|_| speed::<P>(mix, granules, threads, cross, options.seconds));
            let rate = median(runs.collect());
            let (p50, p999) = latency::<P>(mix, granules, threads, cross);
            let fill = filled.map_or("null".into(), |fill| format!("{fill:.3}"));
            row(peer, mix.name(), threads, cross, region, 1e9 / rate, p50, p999, &fill);
        }
    }
}

#[expect(clippy::too_many_arguments, reason = "the columns of one table")]
fn row(peer: &str, mix: &str, threads: usize, cross: bool, region: u64, ns: f64, p50: f64, p999: f64, fill: &str) {
    let rate = 1e3 / ns;
    let how = if cross { "cross" } else { "own" };
    let mib = region >> 20;
    eprintln!(
        "{peer:<30} {mix:<19} {threads}T {how:<5} {mib:>7} MiB {ns:7.1} ns/pair {rate:7.2} Mpairs/s  p50 {p50:6.0} \
         p99.9 {p999:7.0}  fill {fill}",
    );
    println!(
        "{{\"peer\":\"{peer}\",\"mix\":\"{mix}\",\"threads\":{threads},\"cross_free\":{cross},\
         \"region_bytes\":{region},\"ns_per_pair\":{ns:.2},\"mpairs_per_s\":{rate:.4},\"p50_ns\":{p50:.0},\
         \"p999_ns\":{p999:.0},\"fill\":{fill}}}",
    );
}

fn main() {
    let number = |name: &str, default: f64| std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default);
    let options = Options {
        filter: std::env::args().nth(1).unwrap_or_default(),
        seconds: number("BENCH_SECONDS", 0.25),
        repeats: number("REPEATS", 5.0) as usize,
    };
    let (gib, all) = (1 << 30, &Mix::ALL[..]);
    bench::<Towline>(&options, "towline", &[1, 2], gib, all, true);
    bench::<Towline>(&options, "towline", &[1], 64 * gib, &[Mix::Small], false);
    bench::<Towline>(&options, "towline", &[1], 1024 * gib, &[Mix::Small], false);
    if "towline".contains(&options.filter) {
        let (pair, p50, p999) = one_gib::<Towline>(options.repeats);
        row("towline", "one extent of 1 GiB", 1, false, 4 * gib, pair, p50, p999, "null");
    }
    bench::<Bare<OffsetAllocator>>(&options, "offset-allocator no lock", &[1], gib, all, true);
    bench::<StdMutex<OffsetAllocator>>(&options, "offset-allocator std mutex", &[1, 2], gib, all, false);
    bench::<ParkingLot<OffsetAllocator>>(&options, "offset-allocator parking_lot", &[1, 2], gib, all, false);
    bench::<ParkingLot<Rlsf>>(&options, "rlsf parking_lot", &[1, 2], gib, all, false);
    bench::<StdMutex<Rlsf>>(&options, "rlsf std mutex", &[1, 2], gib, all, false);
    bench::<ParkingLot<Buddy>>(
        &options,
        "buddy_system_allocator parking_lot (powers of two)",
        &[1, 2],
        gib,
        all,
        false,
    );
}
