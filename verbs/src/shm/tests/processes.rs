//! Two processes; the other is this test's own binary, started anew.

use super::support::*;
use crate::{Access, CompletionStatus, Opcode, QueuePairState, RemoteSlice};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

const ROLE: &str = "TOWLINE_SHM_TEST_ROLE";
const LEN: u64 = 190 << 20;

/// Another process, which runs one of the ignored tests below; it is killed and reaped at the end.
struct Other {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Other {
    fn start(role: &str) -> Self {
        let name = format!("shm::tests::processes::{role}");
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &name, "--ignored", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Self { child, input, output: BufReader::new(output) }
    }

    fn say(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    /// The next line that is meant for us.
    fn hear(&mut self) -> String {
        for line in (&mut self.output).lines() {
            if let Some((_, word)) = line.unwrap().split_once("tell: ") {
                return word.to_owned();
            }
        }
        panic!("the other process said nothing more");
    }

    fn kill(&mut self) {
        self.child.kill().unwrap(); // SIGKILL
        self.child.wait().unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

fn tell(line: &str) {
    println!("tell: {line}");
}

fn listen() -> String {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    line.trim().to_owned()
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

/// The process that owns memory: `LEN` bytes that may be read, and some that may be written.
#[test]
#[ignore = "the other process of the tests below"]
fn owner() {
    if std::env::var(ROLE).is_err() {
        return;
    }
    let end = End::new();
    let readable = end.region(LEN, Access::REMOTE_READ, 42);
    let writable = end.region(4 << 20, Access::REMOTE_WRITE, 43);
    let qp = end.queue_pair();
    post_receive(&qp, 1, None).unwrap();
    tell(&to_hex(&qp.address()));
    tell(&readable.remote(0, LEN).unwrap().rkey.to_string());
    tell(&writable.remote(0, 4 << 20).unwrap().rkey.to_string());
    qp.connect(&from_hex(&listen()), false).unwrap();
    let mut seen = Vec::new();
    drive(&[&end], || {
        seen.extend(end.completions());
        !seen.is_empty()
    });
    if seen[0].status == CompletionStatus::Success {
        let sum: u64 = bytes_of(&writable, 0, 4 << 20).iter().map(|&byte| u64::from(byte)).sum();
        tell(&format!("{:?} {sum}", seen[0].immediate));
    }
    drive(&[&end], || qp.state() == QueuePairState::Error);
    tell(&format!("{:?}", qp.failure().unwrap().cause));
}

struct Met {
    other: Other,
    end: End,
    qp: crate::QueuePair,
    readable: RemoteSlice,
    writable: RemoteSlice,
}

fn meet() -> Met {
    let mut other = Other::start("owner");
    let end = End::new();
    let qp = end.queue_pair();
    let address = from_hex(&other.hear());
    let readable = RemoteSlice { address: 0, len: LEN, rkey: other.hear().parse().unwrap() };
    let writable = RemoteSlice { address: 0, len: 4 << 20, rkey: other.hear().parse().unwrap() };
    other.say(&to_hex(&qp.address()));
    qp.connect(&address, true).unwrap();
    drive(&[&end], || qp.state() != QueuePairState::Connecting);
    assert_eq!(qp.failure(), None);
    Met { other, end, qp, readable, writable }
}

#[test]
fn reads_views_and_writes_between_processes() {
    let Met { mut other, end, qp, readable, writable } = meet();
    let target = end.region(LEN, Access::LOCAL_WRITE | Access::REMOTE_READ, 1);
    let expected = pattern(LEN, 42);
    for (from, len) in [(0, 1), (12_345, 64 << 10), (0, LEN), (4097, 50_000_001)] {
        let remote = RemoteSlice { address: from, len, ..readable };
        post(&qp, vec![request(1, Opcode::Read, vec![slice(&target, 3 & (LEN - len), len)], Some(remote))]).unwrap();
        let done = wait_for(&[&end], &end, 1)[0];
        assert_eq!((done.status, done.bytes), (CompletionStatus::Success, len));
        assert!(bytes_of(&target, 3 & (LEN - len), len) == expected[from as usize..(from + len) as usize]);
    }
    let view = qp.map(RemoteSlice { address: 100, len: 1 << 20, ..readable }).unwrap();
    let mut seen = vec![0; 1 << 20];
    view.read(0, &mut seen).unwrap();
    assert!(seen == expected[100..100 + (1 << 20)]);
    // The view's pages can't be written by us, whatever we do.
    let page = view.as_ptr() as usize & !0xfff;
    // SAFETY: the range is a page of a mapping; if the call worked, nothing would be written to it.
    let rc = unsafe { libc::mprotect(page as *mut libc::c_void, 4096, libc::PROT_READ | libc::PROT_WRITE) };
    assert!(rc < 0, "a peer's segment could be made writable");

    let opcode = Opcode::WriteWithImmediate(77);
    post(&qp, vec![request(2, opcode, vec![slice(&target, 5, 4 << 20)], Some(writable))]).unwrap();
    assert_eq!(wait_for(&[&end], &end, 1)[0].status, CompletionStatus::Success);
    let sum: u64 = bytes_of(&target, 5, 4 << 20).iter().map(|&byte| u64::from(byte)).sum();
    assert_eq!(other.hear(), format!("Some(77) {sum}"));
    qp.to_error();
    assert_eq!(other.hear(), "Disconnected");
    // The view outlives the connection.
    view.read(0, &mut seen).unwrap();
    assert!(seen == expected[100..100 + (1 << 20)]);
}

#[test]
fn a_killed_peer_flushes_and_its_views_stay() {
    let Met { mut other, end, qp, readable, writable } = meet();
    let local = end.region(64 << 20, Access::LOCAL_WRITE | Access::REMOTE_READ, 1);
    let mut view = None;
    drive(&[&end], || {
        view = qp.map(RemoteSlice { len: 1 << 20, ..readable }).ok();
        view.is_some()
    });
    post_receive(&qp, 100, None).unwrap();
    let read =
        request(1, Opcode::Read, vec![slice(&local, 0, 64 << 20)], Some(RemoteSlice { len: 64 << 20, ..readable }));
    // The peer has no second receive, so that this is never answered.
    let write = |id, opcode| request(id, opcode, vec![slice(&local, 0, 4 << 20)], Some(writable));
    post(&qp, vec![read, write(2, Opcode::WriteWithImmediate(1)), write(3, Opcode::WriteWithImmediate(2))]).unwrap();
    let mut done = Vec::new();
    drive(&[&end], || {
        done.extend(end.completions());
        done.len() >= 2
    });
    end.cq.arm();
    other.kill();
    wait_readable(&end);
    drive(&[&end], || {
        done.extend(end.completions());
        done.len() == 4
    });
    let status = |id| done.iter().find(|c| c.id == id).unwrap().status;
    assert_eq!((status(1), status(2)), (CompletionStatus::Success, CompletionStatus::Success));
    assert_eq!((status(3), status(100)), (CompletionStatus::TransportRetryExceeded, CompletionStatus::Flushed));
    assert_eq!(qp.state(), QueuePairState::Error);
    assert!(qp.is_fenced());
    let mut seen = vec![0; 1 << 20];
    view.unwrap().read(0, &mut seen).unwrap();
    assert!(seen == pattern(LEN, 42)[..1 << 20], "the memory of a dead peer is kept by our mapping");
}

#[test]
fn a_peer_killed_in_the_middle_of_its_write_is_fenced() {
    // Here the other process is the requester's victim: it dies while its side copies our memory into its own.
    let Met { mut other, end, qp, writable, .. } = meet();
    let local = end.region(4 << 20, Access::REMOTE_READ, 1);
    let write = |id| request(id, Opcode::Write, vec![slice(&local, 0, 4 << 20)], Some(writable));
    post(&qp, (0..50).map(write).collect()).unwrap();
    let mut done = Vec::new();
    drive(&[&end], || {
        done.extend(end.completions());
        !done.is_empty()
    });
    other.kill();
    drive(&[&end], || {
        done.extend(end.completions());
        done.len() == 50
    });
    assert_eq!(done.iter().map(|c| c.id).collect::<Vec<_>>(), (0..50).collect::<Vec<_>>());
    assert!(qp.is_fenced());
    let ok = done.iter().take_while(|c| c.status == CompletionStatus::Success).count();
    let lost = |c: &&crate::Completion| c.status == CompletionStatus::TransportRetryExceeded;
    assert_eq!(done[ok..].iter().filter(lost).count(), usize::from(ok < 50));
}

/// Descriptors and mappings of this process.
fn resources() -> (usize, usize, usize) {
    let fds = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    (fds, maps.lines().count(), maps.lines().filter(|line| line.contains("memfd:")).count())
}

/// In a process of its own, so that no other test's descriptors are counted.
#[test]
#[ignore = "run in a process of its own by the test below"]
fn nothing_is_left() {
    if std::env::var(ROLE).is_err() {
        return;
    }
    let cycle = || {
        let (a, b) = (End::new(), End::new());
        let source = a.region(2 << 20, Access::REMOTE_READ | Access::REMOTE_WRITE, 1);
        let target = b.region(2 << 20, Access::LOCAL_WRITE | Access::REMOTE_READ, 2);
        let (qa, qb) = connect(&a, &b);
        let remote = source.remote(0, 2 << 20).unwrap();
        let both =
            [Opcode::Read, Opcode::Write].map(|op| request(1, op, vec![slice(&target, 0, 2 << 20)], Some(remote)));
        post(&qb, both.into()).unwrap();
        wait_for(&[&a, &b], &b, 2);
        let _view = qb.map(remote).unwrap();
        post_receive(&qa, 1, None).unwrap();
        // A peer that is refused must leave nothing either.
        let refused = b.queue_pair();
        refused.connect(&a.queue_pair().address(), true).unwrap();
        a.turn();
        let adopted = std::os::unix::net::UnixStream::pair().unwrap();
        b.device.adopt(adopted.0.into(), crate::Token([1; 16])).unwrap_err();
    };
    // Helper threads end by themselves when their device is gone, and their stacks with them.
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let few = threads();
    let settled = || {
        let deadline = std::time::Instant::now() + PATIENCE;
        while threads() > few {
            assert!(std::time::Instant::now() < deadline, "threads were left");
            std::thread::yield_now();
        }
        resources()
    };
    for _ in 0..5 {
        cycle();
    }
    let (fds, maps, memfds) = settled();
    assert_eq!(memfds, 0);
    for _ in 0..100 {
        cycle();
    }
    let after = settled();
    assert_eq!((after.0, after.2), (fds, memfds), "descriptors or segments were left");
    // The allocator keeps some arenas for threads that come; a mapping left in each cycle would be a hundred.
    assert!(after.1 < maps + 50, "{maps} mappings before, {} after", after.1);
    tell("clean");
}

#[test]
fn a_hundred_connections_leave_no_descriptor_and_no_mapping() {
    let mut other = Other::start("nothing_is_left");
    assert_eq!(other.hear(), "clean");
    assert!(other.child.wait().unwrap().success());
}

/// A child made by fork has no mapping of the peer's segment, and the parent's own memory stays whole (I13).
#[test]
#[ignore = "run in a process of its own by the test below: it forks"]
fn forked() {
    if std::env::var(ROLE).is_err() {
        return;
    }
    let (a, b) = (End::new(), End::new());
    let source = a.region(1 << 20, Access::REMOTE_READ, 1);
    let target = b.region(1 << 20, Access::LOCAL_WRITE, 2);
    let (qa, qb) = connect(&a, &b);
    let remote = source.remote(0, 1 << 20).unwrap();
    let mut view = None;
    drive(&[&a, &b], || {
        view = qb.map(remote).ok();
        view.is_some()
    });
    let view = view.unwrap();
    let address = view.as_ptr();
    let own = source.memory().address();
    // SAFETY: no other thread of this process holds a lock of the allocator now; the child leaves by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let mut resident = 0u8;
        // SAFETY: mincore only asks; ENOMEM says that nothing is mapped there.
        let rc = unsafe { libc::mincore(address.cast_mut().cast(), 4096, &mut resident) };
        // SAFETY: the source's memory is inherited, and shared.
        unsafe { own.write_volatile(0x5a) };
        // The handles are refused, and their end does nothing to the parent.
        let inherited = post(&qb, vec![]).is_err()
            && view.is_empty()
            && b.pd.register(source.memory().clone(), Access::REMOTE_READ).is_err()
            && b.device.progress() == crate::Progress::Idle;
        qb.to_error();
        drop((view, qb, qa, source, target, a, b));
        // SAFETY: no precondition.
        unsafe { libc::_exit(if rc < 0 && inherited { 0 } else { 1 }) };
    }
    // The parent writes, too: both see one memory, and so does the peer.
    source.memory().write(1, &[0x5b]).unwrap();
    let mut status = 0;
    // SAFETY: `status` is valid; the child is ours.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "the child has a mapping of the peer's segment");
    post(&qb, vec![request(1, Opcode::Read, vec![slice(&target, 0, 1 << 20)], Some(remote))]).unwrap();
    wait_for(&[&a, &b], &b, 1);
    assert_eq!(bytes_of(&target, 0, 2), [0x5a, 0x5b]);
    assert_eq!(qb.state(), QueuePairState::ReadyToSend);
    tell("whole");
}

#[test]
fn a_fork_leaves_memory_whole() {
    let mut other = Other::start("forked");
    assert_eq!(other.hear(), "whole");
    assert!(other.child.wait().unwrap().success());
}

#[test]
#[ignore = "run in a process of its own by the test below: it lowers a limit"]
fn few_descriptors() {
    if std::env::var(ROLE).is_err() {
        return;
    }
    let (a, b) = (End::new(), End::new());
    let memory = crate::Memory::shared(4096, crate::memory::HugePages::Off).unwrap();
    let (_qa, qb) = connect(&a, &b);
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is valid for the duration of the call.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) }, 0);
    limit.rlim_cur = 3; // all that are open stay open, and none comes to them
    // SAFETY: as above.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
    let _region = a.pd.register(memory, Access::REMOTE_READ).unwrap();
    while qb.state() != QueuePairState::Error {
        b.device.progress();
    }
    tell(&format!("{:?}", qb.failure().unwrap().cause));
}

#[test]
fn no_room_for_a_descriptor_is_told() {
    let mut other = Other::start("few_descriptors");
    let cause = crate::Cause::Os { errno: libc::EMFILE, call: "recvmsg" };
    assert_eq!(other.hear(), format!("{cause:?}"));
}
