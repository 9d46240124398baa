//! The arguments, and what they ask for.

mod values;

pub(crate) use values::{Json, Mode, Path, Size, Verify};

use clap::error::ErrorKind;
use clap::{Args, Parser, Subcommand};
use std::process::ExitCode;
use values::{at_least_one, host_port, port_name};

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
    Bench(Box<BenchArgs>),
    /// Shows what each provider offers here, with the reason when one is missing.
    Devices,
}

/// Examples and the division of labour between two machines.
const BENCH_HELP: &str = "\
Examples:
  towline bench                                      both processes here; under a minute
  towline bench --path shm --mode view --size 1GiB   one row
Two machines:
  on A: towline bench --listen 0.0.0.0:7000          takes no other option, ends with the bench
  on B: towline bench --connect A:7000 --size 1GiB   what is run is said here; not --spin";

/// The arguments of `towline bench`.
#[derive(Debug, Clone, Args)]
#[command(after_help = BENCH_HELP)]
pub(crate) struct BenchArgs {
    /// The path that payloads take; may be repeated [default: shm and tcp; with --connect: auto]
    #[arg(long, value_name = "PATH")]
    pub(crate) path: Vec<Path>,
    /// An RDMA device of this machine to use, with its port and the index of its GID if that matters, such as mlx5_0 or
    /// mlx5_0:1:3; may be repeated [default: all that can be used]
    #[arg(long, value_name = "DEVICE", value_parser = port_name)]
    pub(crate) device: Vec<String>,
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
    #[arg(long, value_name = "N", value_parser = at_least_one)]
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
    /// Measures also the round trip of two processes that spin on shared memory: a line below the table, spin_rtt_us in
    /// the JSON
    #[arg(long)]
    pub(crate) spin: bool,
    /// Produces for one bench that another machine starts with --connect, and ends with it; port 0 lets the system
    /// choose. Whoever reaches the port can start a bench: nothing is published but made-up bytes
    #[arg(long, value_name = "HOST:PORT", help_heading = "Two machines", value_parser = host_port,
        conflicts_with_all = ["path", "device", "mode", "size", "consumers", "count", "warmup", "concurrency", "verify", "seed",
        "json", "connect", "spin"])]
    pub(crate) listen: Option<String>,
    /// Gets the payloads from the machine that runs with --listen; times are then the consumer's
    #[arg(long, value_name = "HOST:PORT", help_heading = "Two machines", value_parser = host_port,
        conflicts_with = "spin")]
    pub(crate) connect: Option<String>,
}

/// The arguments of this process; where they are wrong, or ask for help, the text is written and the code to end with
/// comes back.
pub(crate) fn parse() -> Result<Cli, ExitCode> {
    Cli::try_parse().map_err(|error| {
        let _closed_output = error.print();
        if error.kind() == ErrorKind::ArgumentConflict {
            eprintln!(
                "\nWhat is run is said at the end that connects: --listen takes no other option, --connect not --spin."
            );
        }
        ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn bench(line: &str) -> Result<BenchArgs, clap::Error> {
        let words = ["towline", "bench"].into_iter().chain(line.split_whitespace());
        Cli::try_parse_from(words).map(|cli| match cli.command {
            Command::Bench(args) => *args,
            other => panic!("{other:?}"),
        })
    }

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
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
             --warmup 0 --concurrency 4 --verify full --seed 9 --json - --spin --device mlx5_0 --device mlx5_1:1:3",
        )
        .unwrap();
        assert_eq!(args.path, [Path::Shm, Path::Tcp]);
        assert_eq!(args.mode, [Mode::View, Mode::ZeroCopy]);
        assert_eq!(args.size, [Size(4096), Size(1 << 30)]);
        assert_eq!((args.consumers, args.count, args.warmup), (2, Some(7), Some(0)));
        assert_eq!((args.concurrency, args.verify, args.seed), (4, Verify::Full, 9));
        assert_eq!(args.json, Some(Json::Standard));
        assert!(args.spin);
        assert_eq!(args.device, ["mlx5_0", "mlx5_1:1:3"]);
        assert!(bench("--device mlx5_0:0").unwrap_err().to_string().contains("NAME:PORT:GID_INDEX"));
        assert_eq!(bench("--json rows.json").unwrap().json, Some(Json::File("rows.json".into())));
        assert_eq!(bench("--connect host:7000").unwrap().connect.as_deref(), Some("host:7000"));
    }

    #[test]
    fn a_mistyped_word_leads_to_what_people_use() {
        for line in ["benhc", "bench-worker", "bench_worker", "device"] {
            let error = Cli::try_parse_from(["towline", line]).unwrap_err().to_string();
            assert!(!error.contains("worker'") || line.contains("worker"), "{error}");
        }
        let error = Cli::try_parse_from(["towline", "benhc"]).unwrap_err().to_string();
        assert!(error.contains("'bench'"), "{error}");
    }

    #[test]
    fn the_help_says_what_belongs_to_which_end_and_what_is_not_there() {
        let mut command = Cli::command();
        let bench = command.find_subcommand_mut("bench").unwrap();
        let help = bench.render_long_help().to_string();
        let two = help.find("Two machines:").unwrap();
        assert!(help.find("--listen").unwrap() > two && help.find("--spin").unwrap() < two, "{help}");
        assert_eq!(help.matches("not available in this build").count(), 1, "{help}");
        assert!(help.contains("takes no other option"), "{help}");
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
            "--listen a",
            "--listen 7000",
            "--connect 127.0.0.1",
            "--connect @name",
            "--listen a:1 --size 4KiB",
            "--connect a:1 --spin",
            "--surprise",
        ] {
            let error = bench(line).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{line}");
        }
    }
}
