//! Which rows are run, and what each needs.

use super::layout::Layout;
use super::limits::Kind;
use super::message::Setup;
use super::report::Clock;
use super::serialized::encoded_bound;
use crate::command::Failure;
use crate::command::args::{BenchArgs, Mode, Path, Size};
use crate::command::devices;
use crate::command::machine::available_memory;
use std::time::Duration;

/// What a part may take in a pool beyond its length.
const GRANULE: u64 = 4096;
/// What a pool has beyond its payloads.
const SPARE: u64 = 1 << 20;
/// From this size on a payload is large: prepared and checked alone.
const LARGE: u64 = 16 << 20;

/// One row to come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowPlan {
    pub(crate) path: Path,
    pub(crate) mode: Mode,
    pub(crate) size: u64,
}

/// How long a row goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Effort {
    /// Operations before the measured ones.
    pub(crate) warmup: u64,
    /// Exactly this many measured operations, if given.
    pub(crate) count: Option<u64>,
    /// Otherwise at least so many,
    pub(crate) at_least: u64,
    /// and no more after this time.
    pub(crate) budget: Duration,
}

/// The rows that `args` ask for, in order.
///
/// # Errors
/// [`Failure::Refused`] for what this machine doesn't have.
pub(crate) fn rows(args: &BenchArgs) -> Result<Vec<RowPlan>, Failure> {
    let remote = args.connect.is_some();
    let paths = match (&args.path[..], remote) {
        ([], false) => vec![Path::Shm, Path::Tcp],
        ([], true) => vec![Path::Auto],
        (asked, _) => distinct(asked),
    };
    for path in &paths {
        if let Some(reason) = devices::missing(*path) {
            return Err(Failure::Refused(format!("--path {path}: {reason}; see `towline devices` for the others")));
        }
    }
    if args.mode.contains(&Mode::Gpu) {
        return Err(Failure::Refused(format!("--mode gpu: {}; leave it out", devices::missing_gpu())));
    }
    let viewable = |path: Path| path == Path::Shm || (path == Path::Auto && !remote);
    if args.mode.contains(&Mode::View) && !paths.iter().any(|&path| viewable(path)) {
        let asked: Vec<_> = paths.iter().map(ToString::to_string).collect();
        let way_out = match remote {
            true => "leave --connect out, or name --path shm if it leads to this very host",
            false => "use --path shm, or another mode",
        };
        let asked = asked.join(", ");
        let why = format!("--mode view needs both processes on one host and the path shm, not {asked} ({way_out})");
        return Err(Failure::Refused(why));
    }
    let default_modes = [Mode::View, Mode::ZeroCopy, Mode::Copy, Mode::Tree, Mode::Serialized];
    let modes = if args.mode.is_empty() { default_modes.to_vec() } else { distinct(&args.mode) };
    let sizes = if args.size.is_empty() { vec![Size(190 << 20), Size(4 << 10)] } else { distinct(&args.size) };
    let mut rows = vec![];
    for Size(size) in sizes {
        for &path in &paths {
            for &mode in modes.iter().filter(|&&mode| mode != Mode::View || viewable(path)) {
                rows.push(RowPlan { path, mode, size });
            }
        }
    }
    Ok(rows)
}

fn distinct<T: PartialEq + Copy>(asked: &[T]) -> Vec<T> {
    let mut kept = vec![];
    for &item in asked {
        if !kept.contains(&item) {
            kept.push(item);
        }
    }
    kept
}

impl RowPlan {
    /// What both sides are told.
    pub(crate) fn setup(&self, row: u64, args: &BenchArgs) -> Setup {
        let local = args.connect.is_none();
        let same_host = local && matches!(self.path, Path::Shm | Path::Auto);
        let batch = batch(self.size, args.concurrency, args.count);
        Setup {
            row,
            path: self.path,
            devices: if matches!(self.path, Path::Rdma | Path::Auto) { args.device.clone() } else { vec![] },
            mode: self.mode,
            size: self.size,
            seed: args.seed,
            verify: args.verify,
            batch,
            concurrency: args.concurrency,
            consumers: args.consumers,
            clock: if local { Clock::One } else { Clock::Consumer },
            through: same_host && Kind::of(self.mode, "shm") == Some(Kind::Through),
            // A tenth of the slowest rate seen, 0.16 GB/s, and a start that no busy machine misses.
            patience_s: 30 + self.size * u64::from(batch) / 16_000_000,
        }
    }

    /// How long it goes on.
    pub(crate) fn effort(&self, args: &BenchArgs) -> Effort {
        let large = self.size >= LARGE;
        Effort {
            warmup: args.warmup.unwrap_or(match (large, self.mode) {
                (true, Mode::Serialized) => 1,
                (true, _) => 2,
                (false, _) => 64,
            }),
            count: args.count,
            at_least: if self.mode == Mode::Serialized { 3 } else { 5 },
            budget: Duration::from_millis(if large { 2000 } else { 700 }),
        }
    }
}

/// Operations prepared together: small ones many, so that the messages between them don't weigh; with several in
/// flight enough that they stay in flight, as far as a quarter of a GiB goes.
fn batch(size: u64, concurrency: u32, count: Option<u64>) -> u32 {
    let wanted = match concurrency {
        1 => (LARGE / size).clamp(1, 16) as u32,
        c => {
            let rounds = ((256 << 20) / (size * u64::from(c))).clamp(1, 8) as u32;
            c * rounds.max(u32::from(size < LARGE) * 2)
        }
    };
    wanted.min(u32::try_from(count.unwrap_or(u64::MAX)).unwrap_or(u32::MAX))
}

/// The parts of a payload.
pub(crate) fn layout(mode: Mode, size: u64) -> Layout {
    match mode {
        Mode::Tree | Mode::Serialized => Layout::tree(size),
        Mode::View | Mode::ZeroCopy | Mode::Copy | Mode::Gpu => Layout::single(size),
    }
}

/// Bytes of the producer's pool. The buffers of a tree are taken while those of the tree before are given back, and
/// lie between them: that takes room for both.
pub(crate) fn producer_pool(setup: &Setup) -> u64 {
    let payloads = u64::from(setup.batch) * if setup.mode == Mode::Tree { 2 } else { 1 };
    SPARE + payloads * in_pool(setup)
}

/// Bytes of a consumer's pool.
pub(crate) fn consumer_pool(setup: &Setup) -> u64 {
    match setup.mode {
        Mode::View | Mode::Copy => SPARE,
        _ => SPARE + u64::from(setup.batch) * in_pool(setup),
    }
}

/// Whether a producer can do what it is told: orders come over the network with `--listen`.
///
/// # Errors
/// What is out of bounds.
pub(crate) fn check(setup: &Setup) -> Result<(), Failure> {
    let bounds = [
        ("size", setup.size, 1 << 40),
        ("batch", setup.batch.into(), 1 << 16),
        ("concurrency", setup.concurrency.into(), 256),
        ("consumers", setup.consumers.into(), 64),
        ("patience", setup.patience_s, 1 << 32),
    ];
    for (what, value, most) in bounds {
        if value == 0 || value > most {
            return Err(Failure::Refused(format!("{what} is {value}, allowed are 1 to {most}")));
        }
    }
    let need = producer_pool(setup).saturating_add(own_bytes(setup) as u64);
    match available_memory() {
        Some(available) if need > available => Err(Failure::Refused(format!(
            "the producer needs {need} bytes of memory and has {available} (a smaller --size or --concurrency needs less)"
        ))),
        _ => Ok(()),
    }
}

/// What one payload takes in a pool.
fn in_pool(setup: &Setup) -> u64 {
    let layout = layout(setup.mode, setup.size);
    match setup.mode {
        Mode::Serialized => encoded_bound(&layout).next_multiple_of(GRANULE),
        _ => layout.parts().iter().map(|part| part.len.max(1).next_multiple_of(GRANULE)).sum(),
    }
}

/// Payloads that each side has room for outside the pools: those of mode `copy`, and an end for the limits.
pub(crate) fn own_areas(setup: &Setup) -> usize {
    match setup.mode {
        Mode::Copy => setup.batch as usize,
        Mode::ZeroCopy | Mode::Tree => 1,
        Mode::View | Mode::Serialized | Mode::Gpu => 0,
    }
}

/// Bytes outside the pool that each side has.
pub(crate) fn own_bytes(setup: &Setup) -> usize {
    setup.size as usize * own_areas(setup)
}

/// Bytes of memory that the row needs, all processes of this host together.
pub(crate) fn memory(setup: &Setup) -> u64 {
    let consumers = u64::from(setup.consumers);
    let producer = if setup.clock == Clock::One { producer_pool(setup) + own_bytes(setup) as u64 } else { 0 };
    let copies = matches!(setup.path, Path::Shm | Path::Auto) && Kind::of(setup.mode, "shm") == Some(Kind::Memory);
    let second = if copies { setup.size } else { 0 };
    let consumer = consumer_pool(setup) + own_bytes(setup) as u64 + second;
    let populated = if setup.mode == Mode::View { setup.size } else { 0 };
    let through = u64::from(setup.through) * setup.size;
    // Of the bare reads, at both ends.
    let reads = if matches!(setup.path, Path::Rdma | Path::Auto) { 2 * setup.size } else { 0 };
    // The tensors, their encoding that grows by doubling, and the tensors decoded.
    let serialized = if setup.mode == Mode::Serialized { setup.size * u64::from(setup.batch) * 3 } else { 0 };
    producer + consumers * (consumer + populated + through) + reads + serialized
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::args::{Cli, Command};
    use clap::Parser;

    fn args(line: &str) -> BenchArgs {
        let words = ["towline", "bench"].into_iter().chain(line.split_whitespace());
        match Cli::parse_from(words).command {
            Command::Bench(args) => *args,
            other => panic!("{other:?}"),
        }
    }

    fn setup(line: &str) -> Setup {
        let args = args(line);
        rows(&args).unwrap()[0].setup(0, &args)
    }

    #[test]
    fn the_default_run_is_the_one_of_the_contract() {
        let rows = rows(&args("")).unwrap();
        assert_eq!(rows.len(), 2 * (5 + 4));
        assert!(rows.iter().all(|row| row.mode != Mode::View || row.path == Path::Shm));
        assert_eq!(rows[0], RowPlan { path: Path::Shm, mode: Mode::View, size: 190 << 20 });
        assert_eq!(rows[17], RowPlan { path: Path::Tcp, mode: Mode::Serialized, size: 4096 });
        let budget: Duration = rows.iter().map(|row| row.effort(&args("")).budget).sum();
        assert!(budget < Duration::from_secs(30), "half of the minute that the default run may take: {budget:?}");
    }

    #[test]
    fn the_default_run_fits_into_8_gib() {
        let args = args("");
        for row in rows(&args).unwrap() {
            assert!(memory(&row.setup(0, &args)) < 3 << 30, "{row:?}");
        }
    }

    #[test]
    fn what_is_asked_for_is_run_once_each() {
        let rows = rows(&args("--path tcp --path tcp --mode copy --mode zero-copy --size 1KiB --size 2KiB")).unwrap();
        assert_eq!(rows.len(), 4);
        assert_eq!(rows[0], RowPlan { path: Path::Tcp, mode: Mode::Copy, size: 1024 });
    }

    #[test]
    fn what_the_machine_lacks_is_refused_with_the_reason() {
        for (line, reason) in [
            ("--mode gpu", "libcuda"),
            ("--mode view --path tcp", "one host"),
            ("--mode view --connect host:1", "one host"),
        ] {
            match rows(&args(line)) {
                Err(Failure::Refused(why)) => assert!(why.contains(reason), "{line}: {why}"),
                other => panic!("{line}: {other:?}"),
            }
        }
        assert!(rows(&args("--mode view --path tcp --path shm")).is_ok());
        match (devices::missing(Path::Rdma), rows(&args("--path shm --path rdma"))) {
            (None, rows) => assert!(rows.is_ok()),
            (Some(reason), Err(Failure::Refused(why))) => assert!(why.contains(&reason), "{why}"),
            (Some(reason), rows) => panic!("{reason}: {rows:?}"),
        }
    }

    #[test]
    fn large_payloads_come_alone_and_small_ones_together() {
        assert_eq!(setup("--size 1GiB").batch, 1);
        assert_eq!(setup("--size 4KiB").batch, 16);
        assert_eq!(setup("--size 4KiB --count 3").batch, 3);
        assert_eq!(setup("--size 1GiB --concurrency 4").batch, 4);
        assert_eq!(setup("--size 4KiB --concurrency 4").batch, 32);
        assert_eq!(setup("--size 190MiB --concurrency 4 --count 2").batch, 2);
    }

    #[test]
    fn a_producer_refuses_what_is_out_of_bounds() {
        let good = setup("--size 4KiB");
        assert_eq!(check(&good), Ok(()));
        for wrong in [
            Setup { size: 0, ..good.clone() },
            Setup { size: u64::MAX, ..good.clone() },
            Setup { batch: 0, ..good.clone() },
            Setup { batch: u32::MAX, ..good.clone() },
            Setup { concurrency: 0, ..good.clone() },
            Setup { consumers: 65, ..good.clone() },
            Setup { size: 1 << 40, batch: 1 << 16, ..good.clone() },
        ] {
            assert!(matches!(check(&wrong), Err(Failure::Refused(_))), "{wrong:?}");
        }
    }

    #[test]
    fn pools_hold_their_batch() {
        for line in
            ["--size 4KiB --mode tree", "--size 190MiB --mode zero-copy", "--size 1 --mode copy --concurrency 9"]
        {
            let setup = setup(line);
            let all = u64::from(setup.batch) * setup.size;
            let own = own_bytes(&setup) as u64;
            assert!(producer_pool(&setup) >= all && consumer_pool(&setup).max(own) >= all, "{line}");
        }
        assert!(consumer_pool(&setup("--mode view --path shm --size 1GiB")) < 64 << 20, "a view needs no pool");
        assert_eq!(own_bytes(&setup("--mode view --path shm")), 0);
        assert_eq!(own_bytes(&setup("--mode copy --size 4KiB")), 16 * 4096);
    }
}
