//! The built command, run as a person runs it: two real processes, real endpoints.

#![allow(clippy::unwrap_used, clippy::expect_used)] // a test says by panicking what went wrong

mod machines;
mod processes;
mod refusals;
mod rows;

use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A key, and what its value may be.
type Key = (&'static str, fn(&Value) -> bool);

/// The keys of a row.
const KEYS: [Key; 31] = [
    ("mode", Value::is_string),
    ("path", Value::is_string),
    ("path_reason", Value::is_string),
    ("size_bytes", Value::is_u64),
    ("count", Value::is_u64),
    ("concurrency", Value::is_u64),
    ("consumers", Value::is_u64),
    ("seed", Value::is_u64),
    ("clock", Value::is_string),
    ("p50_us", Value::is_f64),
    ("p90_us", Value::is_f64),
    ("p99_us", Value::is_f64),
    ("max_us", Value::is_f64),
    ("put_us", Value::is_f64),
    ("get_us", Value::is_f64),
    ("bytes_per_s", Value::is_f64),
    ("limit_bytes_per_s", number_or_null),
    ("limit_variant", text_or_null),
    ("efficiency", number_or_null),
    ("rtt_us", Value::is_f64),
    ("spin_rtt_us", number_or_null),
    ("touch_us", number_or_null),
    ("touch_own_us", number_or_null),
    ("cpu_s_per_gb", Value::is_f64),
    ("limit_cpu_s_per_gb", number_or_null),
    ("fallback_bytes", Value::is_u64),
    ("retries", Value::is_u64),
    ("rails", Value::is_u64),
    ("verified", Value::is_boolean),
    ("machine", Value::is_object),
    ("machine", |machine| machine["cores"].as_u64() > Some(0) && machine["transports"].is_array()),
];

fn number_or_null(value: &Value) -> bool {
    value.is_null() || value.is_f64()
}

fn text_or_null(value: &Value) -> bool {
    value.is_null() || value.is_string()
}

fn command(line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
    command.args(line.split_whitespace()).stdin(Stdio::null()).env_remove("TOWLINE_BENCH_CORRUPT");
    command
}

fn run(line: &str) -> Output {
    command(line).output().expect("the command starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("the command writes text")
}

/// The rows that `towline bench` with these options and `--json -` writes; every line of standard output is one.
fn rows(options: &str) -> Vec<Value> {
    let output = run(&format!("bench --json - {options}"));
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{options}: {errors}");
    let rows: Vec<Value> = text(&output.stdout).lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    for row in &rows {
        let object = row.as_object().expect("each line is an object");
        for (key, is_right) in KEYS {
            assert!(object.get(key).is_some_and(is_right), "{options}: {key} is {:?}", object.get(key));
        }
        assert_eq!(object.len(), KEYS.len() - 1, "no other keys: {:?}", object.keys());
    }
    rows
}

/// A command that runs beside the test; killed and reaped at the end of it.
struct Process(Child);

impl Process {
    fn start(line: &str) -> Self {
        Self(command(line).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the command starts"))
    }

    /// The next line of its standard error.
    fn line(&mut self) -> String {
        let mut line = String::new();
        BufReader::with_capacity(1, self.0.stderr.as_mut().unwrap()).read_line(&mut line).unwrap();
        line.trim().to_string()
    }

    /// The address that a listening bench says it has; on loopback the hint names it too.
    fn listening(&mut self) -> String {
        let line = self.line();
        let address = line.strip_prefix("listening on ").and_then(|rest| rest.split(';').next()).expect(&line);
        assert!(line.ends_with(&format!("towline bench --connect {address}")), "{line}");
        address.to_string()
    }

    fn end(&mut self) -> Option<i32> {
        self.0.wait().unwrap().code()
    }

    /// Waits until it has started its second process, whose id comes back.
    fn wait_for_child(&mut self) -> u32 {
        let begin = Instant::now();
        loop {
            assert!(begin.elapsed() < Duration::from_secs(20), "no second process");
            let name = format!("/proc/{0}/task/{0}/children", self.0.id());
            let children = std::fs::read_to_string(name).unwrap_or_default();
            if let Some(child) = children.split_whitespace().next().and_then(|id| id.parse().ok()) {
                let line = std::fs::read(format!("/proc/{child}/cmdline")).unwrap_or_default();
                if String::from_utf8_lossy(&line).contains("bench-worker") {
                    return child;
                }
            }
            std::thread::yield_now();
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only where it has ended and been reaped already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Whether the process runs: it is there, and no zombie that nobody has reaped.
fn is_running(process: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().next()).is_some_and(|state| state != "Z")
}
