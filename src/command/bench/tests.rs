//! The whole bench over a stand-in transport, both sides as threads of this process.

use super::consumer;
use super::fake::Fake;
use super::message::{Channel, Stream};
use super::plan;
use super::producer::{self, Surroundings};
use super::report::{Clock, Row};
use super::runner::Runner;
use crate::command::Failure;
use crate::command::args::{Cli, Command, Mode};
use crate::command::machine::Machine;
use crate::command::sys::{self, Shared};
use clap::Parser;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Runs `towline bench` with these arguments over the stand-in.
fn bench(line: &str) -> Result<Vec<Row>, Failure> {
    let words = ["towline", "bench"].into_iter().chain(line.split_whitespace());
    let Command::Bench(args) = Cli::parse_from(words).command else { panic!("{line}") };
    let channel = |stream| Channel::new(Stream::Unix(stream), "the other", Some(Duration::from_secs(30))).unwrap();
    let memory = sys::memfd(0).unwrap();
    std::thread::scope(|scope| {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let theirs = channel(theirs);
        let bind = SocketAddr::from(([127, 0, 0, 1], 0));
        let surroundings = Surroundings { bind, shared: Some(memory.try_clone().unwrap()) };
        scope.spawn(move || producer::serve::<Fake>(theirs, surroundings));
        let producer = channel(ours);
        let consumers = (0..args.consumers).map(|_| {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let (theirs, memory) = (channel(theirs), memory.try_clone().unwrap());
            scope.spawn(move || consumer::serve::<Fake>(theirs, memory));
            channel(ours)
        });
        let spin = args.spin.then(|| Shared::map(&memory, 0).unwrap());
        let mut runner = Runner::new(producer, consumers.collect(), spin, Machine::here(vec![]));
        let rows = (0..).zip(plan::rows(&args)?);
        rows.map(|(number, plan)| runner.row(&plan.setup(number, &args), &plan.effort(&args))).collect()
    })
}

#[test]
fn every_mode_over_every_path_is_measured_and_verified() {
    let rows = bench("--size 300KiB --count 9 --warmup 1 --verify full").unwrap();
    assert_eq!(rows.len(), 9);
    for row in &rows {
        let name = format!("{} {}", row.path, row.mode);
        assert_eq!((row.count, row.size_bytes, row.concurrency, row.consumers), (9, 300 << 10, 1, 1), "{name}");
        assert!(row.verified && row.clock == Clock::One && row.rtt_us > 0.0 && row.spin_rtt_us.is_none(), "{name}");
        assert!(0.0 < row.p50_us && row.p50_us <= row.p90_us, "{name}");
        assert!(row.p90_us <= row.p99_us && row.p99_us <= row.max_us, "{name}");
        assert!((row.bytes_per_s - 300.0 * 1024.0 / (row.p50_us / 1e6)).abs() <= 1.0, "{name}");
        assert!(row.put_us > 0.0 && row.get_us > 0.0 && row.get_us <= row.max_us, "{name}");
        assert!(row.cpu_s_per_gb >= 0.0, "{name}");
        let limited = !matches!(row.mode, Mode::View | Mode::Serialized);
        assert_eq!(row.limit_bytes_per_s.is_some(), limited, "{name}");
        assert_eq!(row.limit_variant.is_some(), limited, "{name}");
        assert_eq!(row.limit_cpu_s_per_gb.is_some(), limited, "{name}");
        if let (Some(limit), Some(efficiency)) = (row.limit_bytes_per_s, row.efficiency) {
            assert!((efficiency - row.bytes_per_s / limit).abs() < 0.001, "{name}");
        }
        assert_eq!(row.touch_us.is_some() && row.touch_own_us.is_some(), row.mode == Mode::View, "{name}");
    }
    let variant = |path: &str, mode: Mode| {
        let row = rows.iter().find(|row| row.path == path && row.mode == mode).unwrap();
        row.limit_variant.clone().unwrap()
    };
    assert!(variant("shm", Mode::ZeroCopy).contains("1 thread"));
    assert!(variant("shm", Mode::Copy).contains("in and out"));
    assert!(variant("tcp", Mode::Tree).starts_with("tcp "));
}

#[test]
fn several_in_flight_are_rated_by_the_wall() {
    let rows = bench("--path shm --mode zero-copy --size 64KiB --count 50 --concurrency 4").unwrap();
    assert_eq!((rows[0].count, rows[0].concurrency), (50, 4));
    assert!(rows[0].verified && rows[0].bytes_per_s > 0.0);
}

#[test]
fn every_consumer_gets_what_was_put_once() {
    let rows = bench("--path shm --mode copy --mode view --size 20KiB --count 20 --consumers 3").unwrap();
    for row in rows {
        assert_eq!((row.count, row.consumers, row.verified), (20, 3, true));
        let delivered = 3.0 * 20.0 * 1024.0 / (row.p50_us / 1e6);
        assert!((row.bytes_per_s - delivered).abs() <= 1.0, "the bytes of all consumers count");
    }
}

#[test]
fn what_is_not_verified_is_not_said_to_be() {
    let rows = bench("--path tcp --mode zero-copy --size 1KiB --count 2 --warmup 0 --verify none").unwrap();
    assert!(!rows[0].verified && rows[0].count == 2);
}

#[test]
fn spinning_is_measured_when_asked_for() {
    let rows = bench("--path shm --mode view --size 4KiB --count 3 --spin").unwrap();
    assert!(rows[0].spin_rtt_us.unwrap() > 0.0);
}

#[test]
fn a_time_budget_ends_a_row_without_a_count() {
    let rows = bench("--path shm --mode zero-copy --size 4KiB").unwrap();
    assert!(rows[0].count >= 100, "{}", rows[0].count);
}
