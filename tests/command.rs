//! The built command, run as a person runs it: two real processes, real endpoints.

#![allow(clippy::unwrap_used, clippy::expect_used)] // a test says by panicking what went wrong

use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
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

#[test]
fn each_mode_over_tcp_arrives_verified_with_its_limit() {
    let rows = rows("--path tcp --size 200KiB --size 4097 --count 20 --verify full");
    let modes: Vec<_> = rows.iter().map(|row| row["mode"].as_str().unwrap()).collect();
    let all = ["zero-copy", "copy", "tree", "serialized"];
    assert_eq!(modes, [all, all].concat());
    for row in rows {
        assert_eq!((&row["path"], &row["verified"], &row["clock"]), (&"tcp".into(), &true.into(), &"one".into()));
        assert_eq!((&row["count"], &row["fallback_bytes"], &row["retries"]), (&20.into(), &0.into(), &0.into()));
        let limited = row["mode"] != "serialized";
        for key in ["limit_bytes_per_s", "limit_variant", "efficiency", "limit_cpu_s_per_gb"] {
            assert_eq!(row[key].is_null(), !limited, "{key} of {}", row["mode"]);
        }
        let (size, p50) = (row["size_bytes"].as_f64().unwrap(), row["p50_us"].as_f64().unwrap());
        let rate = row["bytes_per_s"].as_f64().unwrap();
        assert!((rate - size / p50 * 1e6).abs() < 2.0, "the rate is size over p50: {rate}, {p50}");
    }
}

#[test]
fn each_mode_over_shared_memory_arrives_verified() {
    let rows = rows("--path shm --size 200KiB --size 4097 --count 20 --verify full");
    let modes: Vec<_> = rows.iter().map(|row| row["mode"].as_str().unwrap()).collect();
    let all = ["view", "zero-copy", "copy", "tree", "serialized"];
    assert_eq!(modes, [all, all].concat());
    for row in rows {
        assert_eq!((&row["path"], &row["verified"], &row["count"]), (&"shm".into(), &true.into(), &20.into()));
        let in_place = row["mode"] == "view";
        assert_eq!((row["touch_us"].is_null(), row["touch_own_us"].is_null()), (!in_place, !in_place));
        assert_eq!(row["limit_variant"].is_null(), in_place || row["mode"] == "serialized", "{}", row["mode"]);
    }
}

#[test]
fn the_best_path_of_one_host_is_shared_memory() {
    for row in rows("--path auto --mode view --mode zero-copy --size 64KiB --count 3") {
        assert_eq!((&row["path"], &row["verified"]), (&"shm".into(), &true.into()));
        assert!(!row["path_reason"].as_str().unwrap().is_empty());
    }
}

#[test]
fn several_consumers_and_several_in_flight() {
    let rows = rows(
        "--path shm --mode view --mode zero-copy --mode copy --size 64KiB --count 24 --consumers 2 --concurrency 3",
    );
    assert_eq!(rows.len(), 3);
    for row in rows {
        assert_eq!((&row["consumers"], &row["concurrency"], &row["count"]), (&2.into(), &3.into(), &24.into()));
        assert_eq!(row["verified"], true);
    }
}

#[test]
fn spinning_is_measured_when_asked_for_and_verifying_left_out() {
    let rows = rows("--path tcp --mode zero-copy --size 4KiB --count 5 --spin --verify none --seed 77");
    assert!(rows[0]["spin_rtt_us"].as_f64().unwrap() > 0.0);
    assert_eq!((&rows[0]["verified"], &rows[0]["seed"]), (&false.into(), &77.into()));
}

#[test]
fn a_pipe_gets_a_table_and_no_progress_bar() {
    let output = run("bench --path tcp --mode zero-copy --size 4KiB --count 5");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    assert!(table.contains("GB/s") && table.contains("zero-copy") && table.contains("4 KiB"), "{table}");
    assert!(table.contains("limit, %") && table.contains("Machine:"), "{table}");
    let wide = table.lines().find(|line| !line.starts_with("Machine:") && line.chars().count() > 80);
    assert_eq!(wide, None, "80 columns");
    assert!(!table.contains('\u{1b}') && !table.contains('\r'), "no escapes in a pipe");
    assert_eq!(text(&output.stderr), "", "no progress bar in a pipe");
}

#[test]
fn json_goes_to_a_file_beside_the_table() {
    let file = std::env::temp_dir().join(format!("towline-rows-{}.json", std::process::id()));
    let output = run(&format!("bench --path tcp --mode copy --size 4KiB --count 3 --json {}", file.display()));
    let rows = std::fs::read_to_string(&file).expect("the file is there");
    std::fs::remove_file(&file).expect("it can be removed");
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(rows.lines().count(), 1);
    assert_eq!(serde_json::from_str::<Value>(&rows).unwrap()["mode"], "copy");
    assert!(text(&output.stdout).contains("GB/s"));
}

#[test]
fn a_wrong_byte_is_found_and_told_with_code_1() {
    for (path, mode) in [
        ("shm", "view"),
        ("shm", "zero-copy"),
        ("tcp", "zero-copy"),
        ("tcp", "copy"),
        ("shm", "tree"),
        ("tcp", "serialized"),
    ] {
        let line = format!("bench --json - --path {path} --mode {mode} --size 100KiB --count 3 --verify full");
        let output = command(&line).env("TOWLINE_BENCH_CORRUPT", "70001").output().unwrap();
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{mode}: {errors}");
        for word in ["part ", "offset ", "expected 0x", "found 0x"] {
            assert!(errors.contains(word), "{mode}: {word} in {errors}");
        }
        assert_eq!(text(&output.stdout), "", "{mode}: no row for what arrived wrong");
    }
    let line = "bench --path tcp --mode zero-copy --size 100KiB --count 3 --verify full";
    let output = command(line).env("TOWLINE_BENCH_CORRUPT", "70001").output().unwrap();
    assert!(text(&output.stderr).contains("offset 70001"), "{}", text(&output.stderr));
}

#[test]
fn wrong_use_and_what_is_not_here_end_with_code_2() {
    for (line, help) in [
        ("", "Usage"),
        ("bench --size 1MB", "MiB"),
        ("bench --path carrier-pigeon", "shm"),
        ("bench --surprise", "--help"),
        ("bench --path rdma", "libibverbs"),
        ("bench --path rdma", "not in this build"),
        ("bench --mode gpu", "libcuda"),
        ("bench --mode gpu", "not in this build"),
        ("bench --count 0", "at least 1"),
        ("bench --listen foo", "HOST:PORT"),
        ("bench --connect 127.0.0.1", "HOST:PORT"),
        ("bench --listen 127.0.0.1:0 --count 5", "--listen takes no other option"),
        ("bench --connect 127.0.0.1:1 --spin", "--connect not --spin"),
        ("benhc", "'bench'"),
        ("bench --mode view --path tcp", "one host"),
        ("bench --size 900GiB", "memory"),
        ("bench --json /nowhere/rows.json", "/nowhere"),
        ("bench-worker", "bench"),
    ] {
        let output = run(line);
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{line}: {errors}");
        assert!(errors.contains(help), "{line}: {help} in {errors}");
        assert_eq!(text(&output.stdout), "", "{line}");
        assert!(line == "bench-worker" || !errors.contains("worker"), "{line}: {errors}");
    }
}

#[test]
fn what_goes_wrong_is_one_line_with_the_cause_and_the_way_out() {
    for (line, code, said) in [
        (
            "bench --mode view --path tcp",
            2,
            "--mode view needs both processes on one host and the path shm, not tcp (use --path shm, or another mode)",
        ),
        (
            "bench --mode view --connect 127.0.0.1:1",
            2,
            "--mode view needs both processes on one host and the path shm, not auto (leave --connect out, or name --path \
             shm if it leads to this very host)",
        ),
        (
            "bench --json /nowhere/rows.json",
            2,
            "--json /nowhere/rows.json: No such file or directory (os error 2) (name a file that can be written)",
        ),
        (
            "bench --listen 192.0.2.1:7000",
            1,
            "listening on 192.0.2.1:7000: Cannot assign requested address (os error 99) (0.0.0.0 is every address of this \
             machine)",
        ),
        (
            "bench-worker",
            2,
            "bench-worker is started by `towline bench` only: Socket operation on non-socket (os error 88)",
        ),
    ] {
        let output = run(line);
        assert_eq!(text(&output.stderr), format!("towline: {said}\n"), "{line}");
        assert_eq!((output.status.code(), text(&output.stdout)), (Some(code), String::new()), "{line}");
    }
    let held = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = held.local_addr().unwrap();
    let errors = text(&run(&format!("bench --listen {address}")).stderr);
    assert_eq!(
        errors,
        format!("towline: listening on {address}: Address already in use (os error 98) (take another port)\n")
    );
}

#[test]
fn an_unreachable_producer_is_a_failure() {
    // A port that was bound and is free again: nobody listens there.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let output = run(&format!("bench --connect 127.0.0.1:{port}"));
    assert_eq!(output.status.code(), Some(1));
    let errors = text(&output.stderr);
    assert!(errors.contains(&format!("connecting to 127.0.0.1:{port}")), "{errors}");
    assert!(errors.contains(&format!("is `towline bench --listen 127.0.0.1:{port}` running there?")), "{errors}");
    assert_eq!(errors.lines().count(), 1, "{errors}");
}

#[test]
fn a_server_of_another_kind_is_told_from_a_bench() {
    for answer in [Some("HTTP/1.0 400 Bad Request\r\n\r\n"), Some("x"), None] {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = server.local_addr().unwrap();
        let serving = std::thread::spawn(move || {
            let (mut stream, _) = server.accept().unwrap();
            stream.write_all(answer.unwrap_or_default().as_bytes()).unwrap();
            // Until the client leaves: it must do so by itself.
            let _broken = stream.read_to_end(&mut vec![]);
        });
        let output = run(&format!("bench --connect {address}"));
        serving.join().unwrap();
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{errors}");
        assert!(errors.contains("it does not answer as `towline bench --listen` does"), "{errors}");
        assert!(errors.contains(&address.to_string()), "{errors}");
    }
}

#[test]
fn two_commands_meet_by_listen_and_connect() {
    let mut producer = Process::start("bench --listen 127.0.0.1:0");
    let address = producer.listening();
    let rows = rows(&format!("--connect {address} --path tcp --size 300KiB --count 9 --verify full"));
    assert_eq!(rows.len(), 4);
    for row in rows {
        assert_eq!((&row["clock"], &row["verified"], &row["path"]), (&"consumer".into(), &true.into(), &"tcp".into()));
        assert!(row["rtt_us"].as_f64().unwrap() > 0.0);
        assert_eq!(row["limit_variant"].is_null(), row["mode"] == "serialized");
    }
    assert!(producer.line().ends_with(": a bench begins"));
    assert!(producer.line().ends_with(": the bench has ended"));
    assert_eq!(producer.end(), Some(0), "the listening side ends with the bench");
}

#[test]
fn strangers_are_dropped_with_a_line_and_hold_up_nobody() {
    let mut producer = Process::start("bench --listen 127.0.0.1:0");
    let address = producer.listening();
    let silent = TcpStream::connect(&address).unwrap();
    let dripping = TcpStream::connect(&address).unwrap();
    (&dripping).write_all(b"\x20\0").unwrap();
    let other_build = br#"{"bench":"towline 0.0.1"}"#;
    let other_build = [&(other_build.len() as u32).to_le_bytes()[..], other_build].concat();
    let cases: [(&[u8], &str); 5] = [
        (b"GET / HTTP/1.0\r\n\r\n", "it begins with \"GET \""),
        (b"\xff\xff\xff\xff", "it is no `towline bench --connect`"),
        (b"\x02\0\0\0{]", "it is no `towline bench --connect`"),
        (b"", "closed the connection without a greeting"),
        (&other_build, "the other end is of towline 0.0.1"),
    ];
    for (bytes, why) in cases {
        let mut stranger = TcpStream::connect(&address).unwrap();
        let own = stranger.local_addr().unwrap();
        stranger.write_all(bytes).unwrap();
        let _dropped_already = stranger.shutdown(Shutdown::Write);
        let line = producer.line();
        assert!(line.starts_with(&format!("{own}: dropped: ")), "{line}");
        assert!(line.contains(why) && line.ends_with("still listening"), "{line}");
        let mut answer = vec![];
        let _reset = stranger.read_to_end(&mut answer);
        assert_eq!(answer.is_empty(), !why.contains("0.0.1"), "who has another build is told: {answer:?}");
    }
    let rows = rows(&format!("--connect {address} --path tcp --mode zero-copy --size 4KiB --count 3"));
    assert_eq!(rows.len(), 1, "the silent ones are still there and hold up nobody");
    // More than five seconds may have passed under load: then the two were dropped before.
    let lines: Vec<String> = std::iter::from_fn(|| Some(producer.line()).filter(|line| !line.is_empty())).collect();
    assert!(lines.iter().filter(|line| line.contains("dropped")).count() <= 2, "{lines:?}");
    assert!(lines.iter().any(|line| line.ends_with("a bench begins")), "{lines:?}");
    assert_eq!(producer.end(), Some(0));
    drop((silent, dripping));
}

#[test]
fn the_silent_are_dropped_in_time_and_never_too_many() {
    const MOST: usize = 64;
    let mut producer = Process::start("bench --listen 127.0.0.1:0");
    let address = producer.listening();
    let strangers: Vec<_> = (0..=MOST).map(|_| TcpStream::connect(&address).unwrap()).collect();
    let named = |index: usize| strangers[index].local_addr().unwrap().to_string();
    let line = producer.line();
    assert!(line.starts_with(&named(0)) && line.contains("too many connections"), "{line}");
    for index in 1..=MOST {
        let line = producer.line();
        assert!(line.starts_with(&named(index)) && line.contains("no greeting for 5 s"), "{index}: {line}");
    }
    for mut stranger in strangers {
        assert_eq!(stranger.read(&mut [0]).unwrap(), 0, "it is closed");
    }
    assert_eq!(rows(&format!("--connect {address} --mode zero-copy --size 4KiB --count 1")).len(), 1);
    assert_eq!(producer.end(), Some(0));
}

#[test]
fn devices_lists_every_provider_with_its_reason() {
    let output = run("devices");
    assert_eq!(output.status.code(), Some(0));
    let listing = text(&output.stdout);
    let lines: Vec<Vec<&str>> = listing.lines().map(|line| line.split_whitespace().collect()).collect();
    assert!(lines.iter().all(|words| words.len() > 2), "each has a reason or a device: {listing}");
    let state = |path: &str| lines.iter().find(|words| words[0] == path).map(|words| words[1]);
    assert_eq!(
        (state("shm"), state("tcp"), state("rdma"), state("gpu")),
        (Some("yes"), Some("yes"), Some("no"), Some("no"))
    );
    assert!(listing.contains("libibverbs") && listing.contains("libcuda.so.1"), "{listing}");
}

#[test]
fn the_second_process_dies_with_the_first() {
    let mut bench = Process::start("bench --path tcp --mode zero-copy --size 4KiB --count 1000000 --warmup 0");
    let worker = bench.wait_for_child();
    bench.0.kill().unwrap();
    bench.0.wait().unwrap();
    let begin = Instant::now();
    while is_running(worker) {
        assert!(begin.elapsed() < Duration::from_secs(20), "the worker outlives its bench");
        std::thread::yield_now();
    }
}

#[test]
fn a_killed_consumer_is_a_failure_that_is_told() {
    let mut bench = Process::start("bench --path tcp --mode zero-copy --size 4KiB --count 1000000 --warmup 0");
    let worker = bench.wait_for_child();
    let killed = Command::new("kill").args(["-KILL", &worker.to_string()]).status().unwrap();
    assert!(killed.success());
    let mut errors = String::new();
    bench.0.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
    assert_eq!(bench.end(), Some(1), "{errors}");
    assert!(errors.contains("consumer 0"), "{errors}");
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
