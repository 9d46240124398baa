//! The examples, as processes of their own: built beside this suite by `tests/rxe/run`.

use crate::harness::names;
use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn example(name: &str) -> Command {
    let built = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../debug/examples").join(name);
    assert!(built.exists(), "{} is not built: cargo build -p towline-verbs --examples --profile test", built.display());
    Command::new(built)
}

fn said(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}\n{text}{}", output.status, String::from_utf8_lossy(&output.stderr));
    text
}

/// Runs an example at both ends; what the end that connects says.
fn both_ends(name: &str, numbers: &[&str]) -> String {
    let [there, here] = names();
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().to_string();
    let mut listens = example(name);
    let mut listens = listens.args([&there, "listen", &free]).args(numbers).stdout(Stdio::piped()).spawn().unwrap();
    // It listens as soon as a connection can be made, which the first of these that gets through has for itself.
    let connected = loop {
        let output = example(name).args([&here, "connect", &free]).args(numbers).output().unwrap();
        let refused = String::from_utf8_lossy(&output.stderr).contains("ConnectionRefused");
        if !refused || listens.try_wait().unwrap().is_some() {
            break output;
        }
    };
    let text = said(&connected);
    said(&listens.wait_with_output().unwrap());
    text
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn devinfo_tells_of_both_devices() {
    let text = said(&example("devinfo").output().unwrap());
    for name in names() {
        assert!(text.contains(&format!("{name} port 1")), "{text}");
    }
    assert!(text.contains("state        active") && text.contains("used         GID"), "{text}");
    let none = example("devinfo").arg("nonesuch0").output().unwrap();
    assert_eq!(none.status.code(), Some(1));
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn show_gids_marks_the_one_that_is_used() {
    let text = said(&example("show_gids").output().unwrap());
    for name in names() {
        let used: Vec<_> = text.lines().filter(|line| line.starts_with(&name) && line.contains(" * ")).collect();
        assert_eq!(used.len(), 1, "{text}");
        assert!(used[0].contains("RoCE v2"), "{text}");
    }
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn messages_go_to_and_fro() {
    let text = both_ends("rc_pingpong", &["5000", "50"]);
    assert!(text.contains("50 rounds of 5000 bytes"), "{text}");
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn writes_arrive() {
    let text = both_ends("write_bandwidth", &["200000", "40", "8"]);
    assert!(text.contains("40 writes of 200000 bytes, 8 at a time"), "{text}");
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn reads_under_a_key_of_one_lease_are_timed() {
    let [name, _] = names();
    let text = said(&example("read_latency").args([&name, "10000", "20"]).output().unwrap());
    assert!(text.contains("20 reads of 10000 bytes under the key of a window: "), "{text}");
}
