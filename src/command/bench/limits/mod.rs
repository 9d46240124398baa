//! What this machine can do at best, by the plainest code there is, measured beside the operations in the same run.
//!
//! A limit has variants; it is the best of their medians. Every variant is tried once; then those that can still win
//! are sampled in turn, one sample between every few operations, so that limit and operations see the same weather.

pub(crate) mod memory;
pub(crate) mod rdma;
pub(crate) mod tcp;

use super::stats::Sorted;
use crate::command::Failure;
use crate::command::args::{Mode, Size};
use crate::command::sys::Copier;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Samples that a variant must have to be the limit.
const ENOUGH: usize = 3;
/// Variants that go on being sampled when each has enough.
const FINALISTS: usize = 3;
/// What a first sample must reach of the best one to be tried again: noise is 10 to 30 % on virtual machines.
const HOPELESS: f64 = 0.7;

/// Which limit an operation has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// One copy within a process, between touched memory.
    Memory,
    /// A copy in by one process and out by the other, pipelined through shared memory.
    Through,
    /// A bare pair of TCP sockets.
    Tcp,
    /// A bare loop of reads.
    Rdma,
}

impl Kind {
    /// The limit of `mode` over the path that the operations took; a view moves nothing, and the naive way is there to
    /// be compared, not to be limited.
    pub(crate) fn of(mode: Mode, path: &str) -> Option<Self> {
        match (mode, path) {
            (Mode::View | Mode::Serialized | Mode::Gpu, _) => None,
            (Mode::Copy, "shm") => Some(Self::Through),
            (_, "shm" | "direct") => Some(Self::Memory),
            (_, "tcp") => Some(Self::Tcp),
            (_, "rdma") => Some(Self::Rdma),
            _ => None,
        }
    }
}

/// One way of moving the bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Variant {
    Memory { streaming: bool, threads: u32 },
    Through { streaming: bool, piece: u32 },
    Tcp { line: Line, write: u32, streams: u32 },
    Rdma { piece: u32 },
}

/// TCP connections with one congestion control.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Line {
    pub(crate) index: u32,
    /// The congestion control, and whether it is the system's.
    pub(crate) label: String,
}

impl Variant {
    /// The variants of `kind` for payloads of `size` bytes; `lines` are the connections there are.
    pub(crate) fn all(kind: Kind, size: u64, lines: &[Line]) -> Vec<Self> {
        let copiers = || Copier::available().iter().map(|&c| c == Copier::Streaming);
        let parallel: &[u32] = if size >= 1 << 20 { &[1, 2] } else { &[1] };
        match kind {
            Kind::Memory => copiers()
                .flat_map(|streaming| parallel.iter().map(move |&threads| Self::Memory { streaming, threads }))
                .collect(),
            Kind::Through => copiers()
                .flat_map(|streaming| pieces(size).map(move |piece| Self::Through { streaming, piece }))
                .collect(),
            Kind::Rdma => pieces(size).map(|piece| Self::Rdma { piece }).collect(),
            Kind::Tcp => lines
                .iter()
                .flat_map(|line| pieces(size).map(move |write| (line, write)))
                .flat_map(|(line, write)| {
                    parallel.iter().map(move |&streams| Self::Tcp { line: line.clone(), write, streams })
                })
                .collect(),
        }
    }
}

/// The lengths of single copies and writes; one is enough for payloads that fit into it.
fn pieces(size: u64) -> impl Iterator<Item = u32> {
    [256 << 10, 1 << 20].into_iter().take(if size <= 256 << 10 { 1 } else { 2 })
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let copy = |streaming: bool| if streaming { "streaming copy" } else { "memcpy" };
        let plural = |n: u32, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
        match self {
            Self::Memory { streaming, threads } => write!(f, "{}, {}", copy(*streaming), plural(*threads, "thread")),
            Self::Rdma { piece } => write!(f, "bare reads of {}", Size((*piece).into())),
            Self::Through { streaming, piece } => {
                write!(f, "{} in and out, pieces of {}", copy(*streaming), Size((*piece).into()))
            }
            Self::Tcp { line, write, streams } => {
                write!(f, "tcp {}, writes of {}, {}", line.label, Size((*write).into()), plural(*streams, "stream"))
            }
        }
    }
}

/// What both sides do for one sample.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Order {
    pub(crate) variant: Variant,
    pub(crate) size: u64,
    /// How often: small payloads are moved several times, each timed.
    pub(crate) rounds: u32,
    /// What the source is filled with before the first round, as an operation's payload is.
    pub(crate) fill: u64,
}

impl Order {
    /// Refuses what no bench orders: orders come over the network with `--listen`.
    ///
    /// # Errors
    /// What is out of bounds.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        let (piece, threads) = match self.variant {
            Variant::Memory { threads, .. } => (1, threads),
            Variant::Through { piece, .. } => (piece, 1),
            Variant::Tcp { write, streams, .. } => (write, streams),
            Variant::Rdma { piece } => (piece, 1),
        };
        if self.size == 0 || piece == 0 || !(1..=2).contains(&threads) || !(1..=4096).contains(&self.rounds) {
            return Err(Failure::Refused(format!(
                "a sample of {} bytes by {} is out of bounds",
                self.size, self.variant
            )));
        }
        Ok(())
    }
}

/// The sending side's part of a sample.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sent {
    /// When each round began.
    pub(crate) begins: Vec<u64>,
    /// Processor time of this process in seconds.
    pub(crate) cpu: f64,
}

/// The receiving side's part of a sample.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Received {
    /// When each round was asked for.
    pub(crate) asked: Vec<u64>,
    /// When each round's last byte had arrived.
    pub(crate) ends: Vec<u64>,
    /// Processor time of this process in seconds.
    pub(crate) cpu: f64,
}

/// The limit that came out.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Limit {
    pub(crate) variant: String,
    pub(crate) bytes_per_s: f64,
    pub(crate) cpu_s_per_gb: f64,
}

/// Chooses what to sample next, and keeps what was found.
#[derive(Debug)]
pub(crate) struct Sampler {
    size: u64,
    variants: Vec<Tried>,
    /// Whether every variant had its first sample.
    sifted: bool,
}

#[derive(Debug)]
struct Tried {
    variant: Variant,
    /// Seconds of single rounds, one median a sample.
    seconds: Vec<f64>,
    cpu_s: f64,
    bytes: f64,
    running: bool,
}

impl Sampler {
    /// A sampler of `variants`. With `known`, those that won in an earlier row, only these are sampled.
    pub(crate) fn new(size: u64, variants: Vec<Variant>, known: &[Variant]) -> Self {
        let sifted = known.iter().any(|k| variants.contains(k));
        let tried = |variant: Variant| {
            let running = !sifted || known.contains(&variant);
            Tried { variant, seconds: vec![], cpu_s: 0.0, bytes: 0.0, running }
        };
        Self { size, variants: variants.into_iter().map(tried).collect(), sifted }
    }

    /// Whether every variant has been tried once, or is known to be no better than another.
    pub(crate) fn is_sifted(&self) -> bool {
        self.sifted
    }

    /// Whether there are samples enough for a limit.
    pub(crate) fn is_enough(&self) -> bool {
        self.sifted && self.running().all(|t| t.seconds.len() >= ENOUGH)
    }

    /// The variant whose turn it is.
    pub(crate) fn turn(&self) -> Option<(usize, &Variant)> {
        let running = self.variants.iter().enumerate().filter(|(_, t)| t.running);
        running.min_by_key(|(_, t)| t.seconds.len()).map(|(index, t)| (index, &t.variant))
    }

    /// Keeps a sample of variant `index`: the seconds of its rounds, and the processor time of both sides.
    pub(crate) fn add(&mut self, index: usize, rounds: &[f64], cpu_s: f64) {
        let Some(median) = Sorted::new(rounds.iter().copied()).median() else { return };
        let tried = &mut self.variants[index];
        tried.seconds.push(median);
        tried.cpu_s += cpu_s;
        tried.bytes += self.size as f64 * rounds.len() as f64;
        if !self.sifted && self.running().all(|t| !t.seconds.is_empty()) {
            self.sifted = true;
            let best = self.running().filter_map(Tried::median).fold(f64::INFINITY, f64::min);
            for tried in &mut self.variants {
                tried.running &= tried.median().is_some_and(|seconds| best >= HOPELESS * seconds);
            }
        }
        if self.sifted && self.running().count() > FINALISTS && self.running().all(|t| t.seconds.len() >= ENOUGH) {
            let slowest_finalist = Sorted::new(self.running().filter_map(Tried::median));
            let rank = FINALISTS as f64 / self.running().count() as f64;
            if let Some(bar) = slowest_finalist.percentile(rank) {
                for tried in &mut self.variants {
                    tried.running &= tried.median().is_some_and(|seconds| seconds <= bar);
                }
            }
        }
    }

    /// The best of the medians of those variants that have enough samples.
    pub(crate) fn limit(&self) -> Option<Limit> {
        let enough = self.variants.iter().filter(|t| t.seconds.len() >= ENOUGH);
        let best = enough.filter_map(|t| Some((t, t.median()?))).min_by(|a, b| a.1.total_cmp(&b.1))?;
        let (tried, seconds) = best;
        Some(Limit {
            variant: tried.variant.to_string(),
            bytes_per_s: self.size as f64 / seconds,
            cpu_s_per_gb: tried.cpu_s / (tried.bytes / 1e9),
        })
    }

    /// The variants that can win, for the next row with the same limit.
    pub(crate) fn finalists(&self) -> Vec<Variant> {
        self.running().map(|t| t.variant.clone()).collect()
    }

    fn running(&self) -> impl Iterator<Item = &Tried> {
        self.variants.iter().filter(|t| t.running)
    }
}

impl Tried {
    fn median(&self) -> Option<f64> {
        Sorted::new(self.seconds.iter().copied()).median()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines() -> Vec<Line> {
        let line = |(index, label): (u32, &str)| Line { index, label: label.into() };
        [(0, "bbr (system)"), (1, "reno"), (2, "cubic")].map(line).into()
    }

    #[test]
    fn each_path_and_mode_has_the_limit_of_the_contract() {
        assert_eq!(Kind::of(Mode::ZeroCopy, "shm"), Some(Kind::Memory));
        assert_eq!(Kind::of(Mode::Tree, "shm"), Some(Kind::Memory));
        assert_eq!(Kind::of(Mode::Copy, "shm"), Some(Kind::Through));
        for mode in [Mode::ZeroCopy, Mode::Copy, Mode::Tree] {
            assert_eq!(Kind::of(mode, "tcp"), Some(Kind::Tcp));
        }
        for mode in [Mode::ZeroCopy, Mode::Copy, Mode::Tree] {
            assert_eq!(Kind::of(mode, "rdma"), Some(Kind::Rdma));
        }
        for path in ["shm", "tcp", "rdma"] {
            assert_eq!(Kind::of(Mode::View, path), None);
            assert_eq!(Kind::of(Mode::Serialized, path), None);
        }
    }

    #[test]
    fn all_variants_of_the_contract_are_there() {
        assert_eq!(Variant::all(Kind::Tcp, 190 << 20, &lines()).len(), 3 * 2 * 2);
        let ways = Copier::available().len();
        assert_eq!(Variant::all(Kind::Memory, 190 << 20, &[]).len(), 2 * ways);
        assert_eq!(Variant::all(Kind::Through, 190 << 20, &[]).len(), 2 * ways);
        assert_eq!(Variant::all(Kind::Tcp, 4096, &lines()).len(), 3);
        let reads: Vec<_> = Variant::all(Kind::Rdma, 190 << 20, &[]).iter().map(ToString::to_string).collect();
        assert_eq!(reads, ["bare reads of 256 KiB", "bare reads of 1 MiB"]);
        let named: Vec<_> = Variant::all(Kind::Tcp, 190 << 20, &lines()).iter().map(ToString::to_string).collect();
        assert!(named.contains(&"tcp reno, writes of 1 MiB, 2 streams".to_string()), "{named:?}");
        assert!(named.contains(&"tcp bbr (system), writes of 256 KiB, 1 stream".to_string()), "{named:?}");
    }

    /// Samples until there are `n`, with variant `i` taking `seconds(i, sample)`.
    fn drive(sampler: &mut Sampler, n: usize, seconds: impl Fn(usize, usize) -> f64) -> Vec<usize> {
        let mut counts = vec![0; sampler.variants.len()];
        for _ in 0..n {
            let (index, _) = sampler.turn().unwrap();
            sampler.add(index, &[seconds(index, counts[index])], 0.1);
            counts[index] += 1;
        }
        counts
    }

    #[test]
    fn orders_out_of_bounds_are_refused() {
        let line = Line { index: 0, label: "reno".into() };
        let good = Order { variant: Variant::Tcp { line, write: 4096, streams: 2 }, size: 1, rounds: 1, fill: 0 };
        assert_eq!(good.check(), Ok(()));
        let line = || Line { index: 0, label: "reno".into() };
        for wrong in [
            Order { size: 0, ..good.clone() },
            Order { rounds: 0, ..good.clone() },
            Order { rounds: u32::MAX, ..good.clone() },
            Order { variant: Variant::Tcp { line: line(), write: 0, streams: 1 }, ..good.clone() },
            Order { variant: Variant::Tcp { line: line(), write: 4096, streams: 0 }, ..good.clone() },
            Order { variant: Variant::Through { streaming: false, piece: 0 }, ..good.clone() },
            Order { variant: Variant::Rdma { piece: 0 }, ..good.clone() },
        ] {
            assert!(wrong.check().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn the_best_median_wins_and_hopeless_variants_are_dropped() {
        let mut sampler = Sampler::new(1_000_000_000, Variant::all(Kind::Tcp, 190 << 20, &lines()), &[]);
        let counts = drive(&mut sampler, 60, |i, _| if i == 5 { 0.2 } else { 0.22 + 0.02 * i as f64 });
        let limit = sampler.limit().unwrap();
        assert_eq!(limit.variant, sampler.variants[5].variant.to_string());
        assert!((limit.bytes_per_s - 5e9).abs() < 1.0);
        assert!((limit.cpu_s_per_gb - 0.1).abs() < 1e-9);
        assert_eq!(counts[11], 1, "hopeless after its first sample");
        assert!(counts[5] >= 10, "the time goes to those that can win: {counts:?}");
        assert_eq!(sampler.finalists().len(), FINALISTS);
    }

    #[test]
    fn one_lucky_sample_is_no_limit() {
        let mut sampler = Sampler::new(1_000_000_000, Variant::all(Kind::Memory, 1 << 30, &[]), &[]);
        drive(&mut sampler, 40, |i, sample| match (i, sample) {
            (0, 0) => 0.16,
            (0, _) => 0.22,
            (1, _) => 0.2,
            _ => 0.21,
        });
        assert!((sampler.limit().unwrap().bytes_per_s - 5e9).abs() < 1.0);
    }

    #[test]
    fn too_few_samples_are_no_limit() {
        let mut sampler = Sampler::new(1 << 20, Variant::all(Kind::Memory, 1 << 30, &[]), &[]);
        assert!(!sampler.is_sifted() && !sampler.is_enough() && sampler.limit().is_none());
        let all = sampler.variants.len();
        drive(&mut sampler, all, |_, _| 0.1);
        assert!(sampler.is_sifted() && !sampler.is_enough() && sampler.limit().is_none());
        drive(&mut sampler, 2 * all, |_, _| 0.1);
        assert!(sampler.is_enough() && sampler.limit().is_some());
    }

    #[test]
    fn the_winners_of_an_earlier_row_are_sampled_alone() {
        let all = Variant::all(Kind::Tcp, 190 << 20, &lines());
        let known = [all[2].clone(), all[7].clone()];
        let mut sampler = Sampler::new(1 << 20, all, &known);
        assert!(sampler.is_sifted());
        let counts = drive(&mut sampler, 10, |_, _| 0.1);
        assert_eq!((counts[2], counts[7]), (5, 5));
        assert_eq!(sampler.finalists(), known);
    }
}
