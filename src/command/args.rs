//! The arguments, and what they ask for.

use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Moves large buffers between processes and machines at the speed of the wire.
#[derive(Debug, Parser)]
#[command(name = "towline", version, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What can be done.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Measures how fast payloads travel between two processes, beside what this machine can do at all.
    Bench(BenchArgs),
    /// Shows what each provider offers here, with the reason when one is missing.
    Devices,
    /// The bench's second process: takes its orders from standard input. Not for people.
    #[command(name = "bench-worker", hide = true)]
    Worker,
}

/// The arguments of `towline bench`.
#[derive(Debug, Clone, Args)]
pub(crate) struct BenchArgs {
    /// The path that payloads take; may be repeated [default: shm and tcp; with --connect: auto]
    #[arg(long, value_name = "PATH")]
    pub(crate) path: Vec<Path>,
    /// The way of use that is measured; may be repeated [default: view over shm, zero-copy, copy, tree, serialized]
    #[arg(long, value_name = "MODE")]
    pub(crate) mode: Vec<Mode>,
    /// Bytes of a payload, such as 4KiB, 190MiB, 1GiB or 12345; may be repeated [default: 190MiB and 4KiB]
    #[arg(long, value_name = "SIZE")]
    pub(crate) size: Vec<Size>,
    /// Processes that each get every payload; an operation ends when the last of them has it
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) consumers: u32,
    /// Measured operations of each row [default: what fits in about two seconds]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) count: Option<u64>,
    /// Operations before the measured ones [default: 2 of large payloads, more of small ones]
    #[arg(long, value_name = "N")]
    pub(crate) warmup: Option<u64>,
    /// Operations that are kept in flight
    #[arg(long, value_name = "C", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) concurrency: u32,
    /// How much of each payload the consumer checks, outside of the time measured
    #[arg(long, value_name = "HOW", default_value = "sampled")]
    pub(crate) verify: Verify,
    /// What the contents of the payloads are made from
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
    /// Writes one JSON object a row to FILE; with - to standard output, and the table to standard error
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<Json>,
    /// Produces for a bench that another machine starts with --connect; ends when that one ends. Whoever reaches ADDR
    /// can start it: nothing is published but made-up bytes
    #[arg(long, value_name = "ADDR", conflicts_with_all = ["path", "mode", "size", "consumers", "count", "warmup",
        "concurrency", "verify", "seed", "json", "connect", "spin"])]
    pub(crate) listen: Option<String>,
    /// Gets the payloads from a machine that runs with --listen ADDR; times are then the consumer's
    #[arg(long, value_name = "ADDR", conflicts_with = "spin")]
    pub(crate) connect: Option<String>,
    /// Measures also the round trip of two processes that spin on shared memory
    #[arg(long)]
    pub(crate) spin: bool,
}

/// The path asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Path {
    /// The best that there is
    Auto,
    /// Shared memory
    Shm,
    /// TCP
    Tcp,
    /// RDMA through libibverbs
    Rdma,
}

/// The way of use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Mode {
    /// Mapped in place on the same host: no byte is copied
    View,
    /// From the producer's pool to the consumer's
    ZeroCopy,
    /// From bytes outside the producer's pool to bytes outside the consumer's
    Copy,
    /// 64 tensors of unequal size in scattered buffers
    Tree,
    /// The same tensors through a general serializer: the naive way
    Serialized,
    /// From device memory to device memory
    Gpu,
}

/// How much is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Verify {
    /// Nothing
    None,
    /// Layout, lengths, first and last block of each part, and 64 blocks of 4 KiB at seeded places
    Sampled,
    /// Every byte
    Full,
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Rdma => "rdma",
        })
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::View => "view",
            Self::ZeroCopy => "zero-copy",
            Self::Copy => "copy",
            Self::Tree => "tree",
            Self::Serialized => "serialized",
            Self::Gpu => "gpu",
        })
    }
}

/// Where the JSON goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Json {
    /// Standard output, which then has nothing else.
    Standard,
    /// This file.
    File(PathBuf),
}

impl FromStr for Json {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "" => Err("the name of a file, or - for standard output".into()),
            "-" => Ok(Self::Standard),
            name => Ok(Self::File(name.into())),
        }
    }
}

/// A number of bytes, written as people do: with KiB, MiB or GiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Size(pub(crate) u64);

const UNITS: [(&str, u64); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

impl FromStr for Size {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let help = "a number of bytes, or with a unit: 4KiB, 190MiB, 1GiB";
        let text = text.trim();
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let number: u64 = number.parse().map_err(|_| help.to_string())?;
        let scale = match unit.trim() {
            "" | "B" => 1,
            unit => {
                let known = UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit));
                known.ok_or_else(|| format!("the unit {unit} is none of KiB, MiB, GiB"))?.1
            }
        };
        match number.checked_mul(scale) {
            Some(0) => Err("a payload has at least one byte".into()),
            Some(bytes) if bytes <= 1 << 40 => Ok(Self(bytes)),
            _ => Err("more than 1 TiB".into()),
        }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS.iter().find(|(_, scale)| self.0 >= *scale && self.0.is_multiple_of(*scale)) {
            Some((name, scale)) => write!(f, "{} {name}", self.0 / scale),
            None => write!(f, "{} B", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn bench(line: &str) -> Result<BenchArgs, clap::Error> {
        let words = ["towline", "bench"].into_iter().chain(line.split_whitespace());
        Cli::try_parse_from(words).map(|cli| match cli.command {
            Command::Bench(args) => args,
            other => panic!("{other:?}"),
        })
    }

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn sizes_are_read_as_written() {
        let size = |text: &str| text.parse::<Size>().map(|s| s.0);
        assert_eq!(size("4KiB"), Ok(4096));
        assert_eq!(size("190MiB"), Ok(190 << 20));
        assert_eq!(size("1GiB"), Ok(1 << 30));
        assert_eq!(size("1 gib"), Ok(1 << 30));
        assert_eq!(size("12345"), Ok(12345));
        assert_eq!(size("7B"), Ok(7));
        for wrong in ["", "0", "0KiB", "-1", "x", "KiB", "1MB", "1.5GiB", "99999999999999999999", "99999999999GiB"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
        assert!(size("1MB").unwrap_err().contains("MiB"));
    }

    #[test]
    fn sizes_are_written_as_read() {
        for (bytes, text) in [(4096, "4 KiB"), (190 << 20, "190 MiB"), (1 << 30, "1 GiB"), (1000, "1000 B")] {
            assert_eq!(Size(bytes).to_string(), text);
        }
    }

    #[test]
    fn defaults() {
        let args = bench("").unwrap();
        assert!(args.path.is_empty() && args.mode.is_empty() && args.size.is_empty());
        assert_eq!((args.consumers, args.concurrency, args.seed), (1, 1, 1));
        assert_eq!((args.count, args.warmup, args.json), (None, None, None));
        assert_eq!(args.verify, Verify::Sampled);
        assert!(!args.spin);
    }

    #[test]
    fn every_option() {
        let args = bench(
            "--path shm --path tcp --mode view --mode zero-copy --size 4KiB --size 1GiB --consumers 2 --count 7 \
             --warmup 0 --concurrency 4 --verify full --seed 9 --json - --spin",
        )
        .unwrap();
        assert_eq!(args.path, [Path::Shm, Path::Tcp]);
        assert_eq!(args.mode, [Mode::View, Mode::ZeroCopy]);
        assert_eq!(args.size, [Size(4096), Size(1 << 30)]);
        assert_eq!((args.consumers, args.count, args.warmup), (2, Some(7), Some(0)));
        assert_eq!((args.concurrency, args.verify, args.seed), (4, Verify::Full, 9));
        assert_eq!(args.json, Some(Json::Standard));
        assert!(args.spin);
        assert_eq!(bench("--json rows.json").unwrap().json, Some(Json::File("rows.json".into())));
        assert_eq!(bench("--connect host:7000").unwrap().connect.as_deref(), Some("host:7000"));
    }

    #[test]
    fn wrong_use_is_refused_with_code_2() {
        for line in [
            "--path ib",
            "--mode fast",
            "--size 1MB",
            "--size 0",
            "--count 0",
            "--consumers 0",
            "--concurrency 0",
            "--verify some",
            "--listen a:1 --connect b:2",
            "--listen a:1 --size 4KiB",
            "--connect a:1 --spin",
            "--surprise",
        ] {
            let error = bench(line).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{line}");
        }
    }
}
