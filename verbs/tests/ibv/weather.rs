//! Loss, delay, and a link that goes down: needs root, `ip` and `tc`, and devices whose network interfaces are nobody
//! else's.

use crate::harness::*;
use std::process::Command;
use towline_verbs::{Cause, CompletionStatus, Error, Opcode, QueuePairState};

/// Runs a command, which must succeed.
pub(crate) fn run(line: &str) {
    let words: Vec<_> = line.split(' ').collect();
    let status = Command::new(words[0]).args(&words[1..]).status().unwrap();
    assert!(status.success(), "{line}: {status}");
}

/// The network interfaces of the two devices.
pub(crate) fn interfaces() -> [String; 2] {
    names().map(|name| {
        let parent = std::fs::read_to_string(format!("/sys/class/infiniband/{name}/parent")).unwrap();
        parent.trim().to_string()
    })
}

/// Makes the weather fine again, in whatever way a test ends.
pub(crate) struct Fine(pub(crate) &'static str);

impl Drop for Fine {
    fn drop(&mut self) {
        for interface in interfaces() {
            run(&self.0.replace("DEV", &interface));
        }
    }
}

/// How many packets the interface's queue has dropped.
fn dropped(interface: &str) -> u64 {
    let out = Command::new("tc").args(["-s", "qdisc", "show", "dev", interface]).output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    let number = text.split("dropped ").nth(1).unwrap().split(',').next().unwrap();
    number.parse().unwrap()
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn lost_and_late_packets_change_no_byte() {
    const CHUNK: u64 = 64 << 10;
    let p = pair();
    let (from, to) = (p.b.memory(32 * CHUNK), p.a.memory(32 * CHUNK));
    fill(&from, 1);
    let fine = Fine("tc qdisc del dev DEV root");
    for interface in interfaces() {
        run(&format!("tc qdisc add dev {interface} root netem loss 1% delay 1ms limit 10000"));
    }
    let remote = |id| from.remote(id * CHUNK, CHUNK).unwrap();
    // Until a packet was lost: reads that all arrive.
    let mut rounds = 0;
    while rounds < 2 || interfaces().iter().all(|interface| dropped(interface) == 0) {
        rounds += 1;
        assert!(rounds < 50, "no packet was lost");
        to.memory().write(0, &vec![0; (32 * CHUNK) as usize]).unwrap();
        p.a.try_post((0..32).map(|id| read(id, vec![slice(&to, id * CHUNK, CHUNK)], remote(id))).collect()).unwrap();
        let done: Vec<_> = p.a.completions(32).iter().map(|done| (done.id, done.status)).collect();
        assert_eq!(done, (0..32).map(|id| (id, CompletionStatus::Success)).collect::<Vec<_>>());
        assert_eq!(bytes(&to, 0, 32 * CHUNK), content(32 * CHUNK, 1));
    }
    drop(fine);
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_link_that_goes_down_ends_what_is_posted_and_comes_back() {
    let p = pair();
    let (from, to) = (p.b.memory(4096), p.a.memory(4096));
    fill(&from, 2);
    let go = |id| p.a.post(id, Opcode::Read, vec![slice(&to, 0, 4096)], Some(from.remote(0, 4096).unwrap()));
    go(1);
    assert_eq!(p.a.completion().status, CompletionStatus::Success);
    let fine = Fine("ip link set DEV up");
    run(&format!("ip link set {} down", interfaces()[0]));
    go(2);
    go(3);
    let done = p.a.completions(2);
    assert_eq!((done[0].id, done[1].id, done[1].status), (2, 3, CompletionStatus::Flushed));
    assert_ne!(done[0].status, CompletionStatus::Success);
    assert_eq!(p.a.qp.state(), QueuePairState::Error);
    assert_ne!(p.a.qp.failure(), None);
    drop(fine);
    // The devices are opened anew: a port that comes back may have other GIDs.
    let mut patience = 0;
    let again = loop {
        match try_pair() {
            Ok(again) => break again,
            Err(Error { cause: Cause::NotFound { .. } | Cause::Os { .. } | Cause::PathDown { .. }, .. }) => {}
            Err(error) => panic!("{error}"),
        }
        patience += 1;
        assert!(patience < 200, "the port does not come back");
        std::thread::sleep(std::time::Duration::from_millis(50)); // the kernel's to tell; nothing to wait on here
    };
    let (from, to) = (again.b.memory(4096), again.a.memory(4096));
    fill(&from, 3);
    again.a.post(1, Opcode::Read, vec![slice(&to, 0, 4096)], Some(from.remote(0, 4096).unwrap()));
    assert_eq!(again.a.completion().status, CompletionStatus::Success);
    assert_eq!(bytes(&to, 0, 4096), content(4096, 3));
}
