//! The examples, run as a person runs them: two real processes.

#![allow(clippy::unwrap_used, clippy::expect_used)] // a test says by panicking what went wrong

use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// The built example. A test run of one test alone does not build the examples: then they are built here.
fn example(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a test knows where it lies");
    let profile = test.ancestors().nth(2).expect("target/PROFILE/deps/TEST");
    let file = profile.join("examples").join(name);
    if !file.exists() {
        let target = profile.parent().expect("the target directory");
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--locked", "--package", "towline", "--example", name, "--target-dir"]).arg(target);
        if profile.ends_with("release") {
            build.arg("--release");
        }
        assert!(build.current_dir(env!("CARGO_MANIFEST_DIR")).status().expect("cargo starts").success());
    }
    file
}

/// A running process; killed and reaped at the end of the test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only where it has ended and been reaped already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_cache_travels_from_one_process_to_the_other() {
    let mut producer =
        Process(Command::new(example("kv_producer")).stdout(Stdio::piped()).spawn().expect("the producer starts"));
    let mut output = BufReader::new(producer.0.stdout.take().unwrap());
    let mut address = String::new();
    output.read_line(&mut address).unwrap();
    let consumer = Command::new(example("kv_consumer")).arg(address.trim()).output().expect("the consumer starts");
    let errors = String::from_utf8_lossy(&consumer.stderr);
    assert!(consumer.status.success(), "{errors}");
    let got = String::from_utf8(consumer.stdout).unwrap();
    let lines: Vec<&str> = got.lines().collect();
    assert_eq!(lines.len(), 9, "{got}");
    assert_eq!(lines[0], "0.k [1024, 1024] of f32: all 0");
    assert_eq!(lines[7], "3.v [1024, 1024] of f32: all 7");
    assert!(lines[8].starts_with("33554432 bytes by shm in "), "{got}");
    let mut rest = String::new();
    output.read_to_string(&mut rest).unwrap();
    assert!(producer.0.wait().unwrap().success(), "{rest}");
    assert_eq!(rest, "done; 0 leases left\n");
}

#[test]
fn a_consumer_without_an_address_is_told_how_to_use_it() {
    let output = Command::new(example("kv_consumer")).output().expect("the consumer starts");
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("usage: kv_consumer ADDRESS"), "{output:?}");
}

#[test]
fn a_get_is_timed_beside_a_ping_pong() {
    let output = Command::new(example("get_latency")).arg("tcp").output().expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let words: Vec<&str> = text.split_whitespace().collect();
    let ["get", get, "us,", "ping-pong", ping, "us"] = words[..] else { panic!("{text}") };
    assert!(get.parse::<f64>().unwrap() > 0.0 && ping.parse::<f64>().unwrap() > 0.0, "{text}");
}
