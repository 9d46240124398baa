//! Two processes, one of them stopped or killed.

use crate::harness::*;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;
use towline_verbs::{Completion, CompletionStatus, Opcode, QueuePairState, RemoteSlice};

const ROLE: &str = "TOWLINE_TCP_TEST_ROLE";

fn again(test: &str, role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]).env(ROLE, role);
    command
}

/// Whether this is the process in which `test` runs alone; otherwise it has just run there, and passed.
pub(crate) fn alone(test: &str) -> bool {
    if std::env::var(ROLE).is_ok_and(|role| role == "alone") {
        return true;
    }
    assert!(again(test, "alone").status().unwrap().success());
    false
}

const LEN: u64 = 256 << 20;

/// The other process: a connected end with `LEN` bytes of memory, all 0x11, that makes progress until its input closes.
struct Peer {
    child: Child,
    input: ChildStdin,
    remote: RemoteSlice,
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap()).collect()
}

impl Peer {
    /// Starts the process that runs [`the_other_process`], and connects `end` to it.
    fn connect(end: &End) -> Self {
        let mut child =
            again("processes::the_other_process", "peer").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut input = child.stdin.take().unwrap();
        writeln!(input, "{}", hex(&end.qp.address())).unwrap();
        let line = BufReader::new(child.stdout.take().unwrap())
            .lines()
            .find_map(|line| line.unwrap().split_once("PEER ").map(|(_, told)| told.to_owned()))
            .unwrap();
        let (address, rkey) = line.split_once(' ').unwrap();
        end.qp.connect(&unhex(address), true).unwrap();
        drive(&[&end.device], || end.qp.state() == QueuePairState::ReadyToSend);
        let remote = RemoteSlice { address: 0, len: LEN, rkey: rkey.trim().parse().unwrap() };
        Self { child, input, remote }
    }

    fn signal(&self, signal: i32) {
        // SAFETY: the child has not been waited for, so its number is its own.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    /// Waits until the process is stopped, as the system says of each of its threads: they stop one by one.
    fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let threads = format!("/proc/{}/task", self.child.id());
        let stopped = |thread: std::io::Result<std::fs::DirEntry>| {
            std::fs::read_to_string(thread.unwrap().path().join("stat")).unwrap().contains(") T ")
        };
        while !std::fs::read_dir(&threads).unwrap().all(stopped) {
            std::thread::yield_now();
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Also when a test has failed with the process stopped.
        let _gone = self.child.kill();
        self.child.wait().unwrap();
    }
}

#[test]
fn the_other_process() {
    if std::env::var(ROLE).as_deref() != Ok("peer") {
        return; // not a test by itself
    }
    let endpoint = Endpoint::new("127.0.0.1");
    let end = endpoint.end();
    let region = end.memory(LEN);
    region.memory().write(0, &vec![0x11; LEN as usize]).unwrap();
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    end.qp.connect(&unhex(line.trim()), false).unwrap();
    println!("PEER {} {}", hex(&end.qp.address()), region.remote(0, LEN).unwrap().rkey);
    std::thread::spawn(|| {
        let mut line = String::new();
        let _closed = std::io::stdin().read_line(&mut line);
        std::process::exit(0);
    });
    loop {
        end.device.progress();
        wait(&[&end.device], Duration::from_millis(100));
    }
}

#[test]
fn a_read_from_another_process() {
    let endpoint = Endpoint::new("127.0.0.1");
    let end = endpoint.end();
    let mut peer = Peer::connect(&end);
    let to = end.memory(LEN);
    end.post(1, Opcode::Read, vec![slice(&to, 0, LEN)], Some(peer.remote));
    let mut done = Vec::new();
    drive(&[&end.device], || {
        done.extend(end.poll());
        !done.is_empty()
    });
    assert_eq!(done[0].status, CompletionStatus::Success);
    assert!(bytes(&to, 0, LEN).iter().all(|&byte| byte == 0x11));
    writeln!(peer.input).unwrap();
    drive(&[&end.device], || end.qp.is_fenced());
}

#[test]
fn a_write_to_a_stopped_process_does_not_complete() {
    let endpoint = Endpoint::new("127.0.0.1");
    let end = endpoint.end();
    let peer = Peer::connect(&end);
    let from = end.memory(LEN);
    peer.stop();
    // All of it fits into the buffers of the sockets.
    end.post(1, Opcode::Write, vec![slice(&from, 0, 100)], Some(RemoteSlice { len: 100, ..peer.remote }));
    let mut rests = 0;
    drive(&[&end.device], || {
        rests = if wait(&[&end.device], Duration::from_millis(20)) { 0 } else { rests + 1 };
        rests == 20
    });
    assert!(end.poll().is_empty(), "complete means delivered");
    peer.signal(libc::SIGCONT);
    let mut done = Vec::new();
    drive(&[&end.device], || {
        done.extend(end.poll());
        !done.is_empty()
    });
    assert_eq!((done[0].status, done[0].bytes), (CompletionStatus::Success, 100));
}

#[test]
fn a_killed_peer_flushes_everything() {
    const CHUNK: u64 = 4 << 20;
    let endpoint = Endpoint::new("127.0.0.1");
    let end = endpoint.end();
    let peer = Peer::connect(&end);
    let to = end.memory(LEN);
    for id in 0..LEN / CHUNK {
        let remote = RemoteSlice { address: id * CHUNK, len: CHUNK, ..peer.remote };
        end.post(id, Opcode::Read, vec![slice(&to, id * CHUNK, CHUNK)], Some(remote));
    }
    end.receive(1000, None);
    let mut done = Vec::new();
    drive(&[&end.device], || {
        done.extend(end.poll());
        done.len() >= 3
    });
    peer.signal(libc::SIGKILL);
    drive(&[&end.device], || end.qp.is_fenced());
    done.extend(end.poll());
    assert_eq!(done.len() as u64, LEN / CHUNK + 1);
    let (receives, reads): (Vec<Completion>, Vec<Completion>) = done.iter().partition(|c| c.opcode == Opcode::Receive);
    assert_eq!(receives[0].status, CompletionStatus::Flushed);
    assert!(reads.iter().zip(0..).all(|(c, id)| c.id == id));
    let failed: Vec<_> = reads.iter().filter(|c| c.status != CompletionStatus::Success).collect();
    assert_eq!(failed[0].status, CompletionStatus::TransportRetryExceeded);
    assert!(failed[1..].iter().all(|c| c.status == CompletionStatus::Flushed));
    // What did complete is whole. (A read on another stream can have completed behind the one that was lost.)
    let whole: Vec<u64> = reads.iter().filter(|c| c.status == CompletionStatus::Success).map(|c| c.id).collect();
    assert!(whole.len() >= 3);
    for id in whole {
        assert!(bytes(&to, id * CHUNK, CHUNK).iter().all(|&byte| byte == 0x11), "{id}");
    }
}

#[test]
fn nothing_arrives_after_the_fence_though_the_sender_was_only_stopped() {
    let endpoint = Endpoint::new("127.0.0.1");
    let end = endpoint.end();
    let peer = Peer::connect(&end);
    let to = end.memory(LEN);
    end.post(1, Opcode::Read, vec![slice(&to, 0, LEN)], Some(peer.remote));
    drive(&[&end.device], || bytes(&to, 32 << 20, 1) == [0x11]);
    peer.stop();
    end.qp.to_error();
    assert!(end.qp.is_fenced());
    assert_eq!(end.poll()[0].status, CompletionStatus::Flushed);
    to.memory().write(0, &vec![0xEE; LEN as usize]).unwrap();
    peer.signal(libc::SIGCONT);
    // A second queue pair of this process still works meanwhile, and its transfer outlasts what the first had to come.
    let other = endpoint.end();
    let second = Peer::connect(&other);
    let fresh = other.memory(LEN);
    other.post(1, Opcode::Read, vec![slice(&fresh, 0, LEN)], Some(second.remote));
    let mut done = Vec::new();
    drive(&[&other.device], || {
        done.extend(other.poll());
        !done.is_empty()
    });
    assert_eq!(done[0].status, CompletionStatus::Success);
    assert!(bytes(&to, 0, LEN).iter().all(|&byte| byte == 0xEE));
}

#[test]
fn a_stopped_peer_counts_as_gone_after_its_time() {
    let endpoint = Endpoint::with("127.0.0.1", |config| config.peer_timeout = Duration::from_secs(1));
    let end = endpoint.end();
    let peer = Peer::connect(&end);
    let from = end.memory(LEN);
    peer.stop();
    end.post(1, Opcode::Write, vec![slice(&from, 0, LEN)], Some(peer.remote));
    drive(&[&end.device], || end.qp.is_fenced());
    let done = end.poll();
    assert_eq!(done[0].status, CompletionStatus::TransportRetryExceeded);
    assert_eq!(done[0].vendor_error, libc::ETIMEDOUT as u32);
}
