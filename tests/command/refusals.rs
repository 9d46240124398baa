//! What the command refuses and how it says so; what it says of the machine.

use crate::*;
use std::net::TcpListener;

#[test]
fn wrong_use_and_what_is_not_here_end_with_code_2() {
    for (line, help) in [
        ("", "Usage"),
        ("bench --size 1MB", "MiB"),
        ("bench --path carrier-pigeon", "shm"),
        ("bench --surprise", "--help"),
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
fn devices_lists_every_provider_with_its_reason() {
    let output = run("devices");
    assert_eq!(output.status.code(), Some(0));
    let listing = text(&output.stdout);
    let lines: Vec<Vec<&str>> = listing.lines().map(|line| line.split_whitespace().collect()).collect();
    assert!(lines.iter().all(|words| words.len() > 2), "each has a reason or a device: {listing}");
    let state = |path: &str| lines.iter().find(|words| words[0] == path).map(|words| words[1]);
    assert_eq!(
        (state("shm"), state("tcp"), state("gpu"), state("rdma").is_some()),
        (Some("yes"), Some("yes"), Some("no"), true)
    );
    assert!(listing.contains("libcuda.so.1"), "{listing}");
    if lines.iter().any(|words| words[..2] == ["rdma", "yes"]) {
        return;
    }
    // What is said there is why nothing can be measured.
    let reason = listing.lines().find_map(|line| line.strip_prefix("rdma  no   ")).unwrap();
    let output = run("bench --path rdma");
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{errors}");
    assert!(errors.contains(&format!("--path rdma: {reason}; see `towline devices`")), "{errors}");
}
