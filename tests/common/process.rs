//! Endpoints in processes of their own: this test binary, started again as a child that does what it is told over a
//! socket. A child ends when its parent does.

use super::sys::{self, Signal};
use super::{Got, LONG, Options, Spec};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};
use towline::{Endpoint, Error, Origin, PutOptions, Stats, Ticket};

const ENTRY: &str = "common::process::entry_of_child_processes";

/// Runs `body` in a process that runs no other test at the same time, for tests that count descriptors or threads, or
/// fork: the test called `name` is started again as a child. `true` in that child.
#[track_caller]
pub fn alone(name: &str) -> bool {
    const ALONE: &str = "TOWLINE_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--include-ignored", "--nocapture", "--test-threads=1"])
        .env(ALONE, "yes")
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success() && out.contains("1 passed"), "{}\n{out}\n{err}", output.status);
    false
}

/// How a call in another process failed.
#[derive(Debug, Clone)]
pub struct Failure {
    pub operation: String,
    /// The error's kind as `Debug` shows it.
    pub kind: String,
    /// The error as `Display` shows it.
    pub text: String,
    /// How long the call took, by the clock of that process.
    pub took: Duration,
}

impl Failure {
    /// Whether the error's kind begins with this: `TimedOut`, `Gone(Consumed)`.
    pub fn is(&self, kind: &str) -> bool {
        self.kind.starts_with(kind)
    }
}

type Waiting = Arc<Mutex<BTreeMap<u64, mpsc::Sender<String>>>>;

/// An endpoint in another process. Dropping it kills the process.
#[derive(Debug)]
pub struct Process {
    child: Child,
    socket: UnixStream,
    waiting: Waiting,
    next: AtomicU64,
    pub address: String,
    pub addresses: Vec<String>,
}

/// A call in progress in another process.
#[derive(Debug)]
pub struct Pending(mpsc::Receiver<String>);

impl Pending {
    /// Its answer.
    #[track_caller]
    pub fn wait(self) -> Result<String, Failure> {
        self.within(2 * LONG).expect("the child process ended, or does not answer")
    }

    /// Its answer, if there is one in this time.
    pub fn within(&self, time: Duration) -> Option<Result<String, Failure>> {
        let line = self.0.recv_timeout(time).ok()?;
        let (verdict, rest) = line.split_once('\t').unwrap_or((&line, ""));
        Some(match verdict {
            "ok" => Ok(rest.to_owned()),
            "err" => {
                let fields: Vec<&str> = rest.splitn(4, '\t').collect();
                Err(Failure {
                    took: Duration::from_micros(fields[0].parse().unwrap()),
                    operation: fields[1].to_owned(),
                    kind: fields[2].to_owned(),
                    text: fields[3].to_owned(),
                })
            }
            _ => panic!("the child says `{line}`"),
        })
    }

    /// As [`wait`](Self::wait), of a get or view.
    #[track_caller]
    pub fn got(self) -> Result<Got, Failure> {
        self.wait().map(|text| Got::from_text(&text))
    }
}

impl Process {
    /// Starts one with an endpoint of these options. To be called from a thread that outlives it.
    #[track_caller]
    pub fn start(options: &Options) -> Self {
        Self::try_start(options).unwrap()
    }

    /// The same, for options that may be refused.
    pub fn try_start(options: &Options) -> Result<Self, Failure> {
        let (socket, theirs) = UnixStream::pair().unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", ENTRY, "--ignored", "--nocapture", "--test-threads=1"])
            .stdin(Stdio::from(std::os::fd::OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let waiting = Waiting::default();
        let answers = BufReader::new(socket.try_clone().unwrap());
        let waiting_for_answers = waiting.clone();
        std::thread::spawn(move || {
            for line in answers.lines() {
                let Ok(line) = line else { break };
                let (id, answer) = line.split_once('\t').unwrap();
                let waiting = waiting_for_answers.lock().unwrap().remove(&id.parse().unwrap());
                let _gone = waiting.map(|waiting| waiting.send(answer.to_owned()));
            }
            waiting_for_answers.lock().unwrap().clear(); // whoever waits is told that nothing comes
        });
        let next = AtomicU64::new(1);
        let mut process = Self { child, socket, waiting, next, address: String::new(), addresses: Vec::new() };
        let addresses = process.call(&["build", &options.to_text()])?;
        process.addresses = addresses.split('\t').map(str::to_owned).collect();
        process.address.clone_from(&process.addresses[0]);
        Ok(process)
    }

    /// Begins a call.
    pub fn begin(&self, words: &[&str]) -> Pending {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = mpsc::channel();
        self.waiting.lock().unwrap().insert(id, sender);
        let line = format!("{id}\t{}\n", words.join("\t"));
        (&self.socket).write_all(line.as_bytes()).unwrap();
        Pending(receiver)
    }

    #[track_caller]
    pub fn call(&self, words: &[&str]) -> Result<String, Failure> {
        self.begin(words).wait()
    }

    /// Publishes for one consumer.
    #[track_caller]
    pub fn put(&self, key: &str, spec: &Spec) -> Result<Ticket, Failure> {
        self.put_with(key, spec, &PutOptions::default())
    }

    #[track_caller]
    pub fn put_with(&self, key: &str, spec: &Spec, options: &PutOptions) -> Result<Ticket, Failure> {
        let (consumers, time) = (options.consumers.to_string(), options.time_to_live.as_nanos().to_string());
        self.call(&["put", key, &consumers, &time, &spec.to_text()]).map(|text| text.parse().unwrap())
    }

    #[track_caller]
    pub fn get(&self, from: impl Into<Source>, timeout: Duration) -> Result<Got, Failure> {
        self.begin_get(from, timeout).got()
    }

    pub fn begin_get(&self, from: impl Into<Source>, timeout: Duration) -> Pending {
        self.begin(&["get", &from.into().0, &timeout.as_millis().to_string()])
    }

    /// As [`get`](Self::get), and keeps the payload under `name`.
    #[track_caller]
    pub fn get_and_keep(&self, from: impl Into<Source>, timeout: Duration, name: &str) -> Result<Got, Failure> {
        self.begin(&["get", &from.into().0, &timeout.as_millis().to_string(), name]).got()
    }

    /// A view that is read and dropped.
    #[track_caller]
    pub fn view(&self, from: impl Into<Source>, timeout: Duration) -> Result<Got, Failure> {
        self.begin(&["view", &from.into().0, &timeout.as_millis().to_string()]).got()
    }

    /// A view that is kept under `name`.
    #[track_caller]
    pub fn view_and_keep(&self, from: impl Into<Source>, timeout: Duration, name: &str) -> Result<Got, Failure> {
        self.begin(&["view", &from.into().0, &timeout.as_millis().to_string(), name]).got()
    }

    /// Reads again what is kept under `name`.
    #[track_caller]
    pub fn look(&self, name: &str) -> Got {
        self.begin(&["look", name]).got().unwrap()
    }

    /// Drops what is kept under `name`.
    #[track_caller]
    pub fn release(&self, name: &str) {
        self.call(&["release", name]).unwrap();
    }

    /// Takes `len` bytes of the pool, and keeps them under `name`.
    #[track_caller]
    pub fn alloc(&self, len: u64, timeout: Duration, name: &str) -> Result<String, Failure> {
        self.call(&["alloc", &len.to_string(), &timeout.as_millis().to_string(), name])
    }

    #[track_caller]
    pub fn wait_for_consumers(&self, key: &str, count: usize) {
        self.call(&["wait", key, &count.to_string(), &LONG.as_millis().to_string()]).unwrap();
    }

    #[track_caller]
    pub fn remove(&self, ticket: &Ticket) -> Result<String, Failure> {
        self.call(&["remove", &ticket.to_string()])
    }

    #[track_caller]
    pub fn close(&self, timeout: Duration) -> BTreeMap<String, u64> {
        numbers(&self.call(&["close", &timeout.as_millis().to_string()]).unwrap())
    }

    #[track_caller]
    pub fn stats(&self) -> BTreeMap<String, u64> {
        numbers(&self.call(&["stats"]).unwrap())
    }

    /// Kibibytes of its memory that are neither a file's nor shared.
    #[track_caller]
    pub fn own_kib(&self) -> u64 {
        self.call(&["own_kib"]).unwrap().parse().unwrap()
    }

    #[track_caller]
    pub fn assert_whole(&self) {
        let mut stats = BTreeMap::new();
        let started = Instant::now();
        while started.elapsed() < LONG {
            stats = self.stats();
            let zero = ["payloads", "buffers", "leases", "fencing", "quarantined", "gets_in_progress", "pool_waiting"];
            if zero.iter().all(|name| stats[*name] == 0) && stats["free"] == stats["pool"] {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        panic!("the pool of the child does not become whole again: {stats:?}");
    }

    pub fn signal(&self, signal: Signal) {
        sys::send(self.child.id(), signal);
    }

    /// Kills it with SIGKILL, and waits until it is gone.
    pub fn kill(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let _ended_already = self.child.kill();
        let _status = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
    }
}

fn numbers(text: &str) -> BTreeMap<String, u64> {
    let number = |word: &str| {
        let (name, value) = word.split_once('=').unwrap();
        (name.to_owned(), value.parse().unwrap())
    };
    text.split(' ').map(number).collect()
}

/// Where a payload is to be had, in a command.
#[derive(Debug, Clone)]
pub struct Source(String);

impl From<&Ticket> for Source {
    fn from(ticket: &Ticket) -> Self {
        Self(ticket.to_string())
    }
}

impl<A: AsRef<str>, K: AsRef<str>> From<(A, K)> for Source {
    fn from((address, key): (A, K)) -> Self {
        Self(format!("{}|{}", address.as_ref(), key.as_ref()))
    }
}

/// The child's side: commands come in lines over standard input, which is a socket, and answers go back over it.
#[test]
#[ignore = "the entry of processes that other tests start"]
fn entry_of_child_processes() {
    sys::die_with_parent();
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        print(panic);
        std::process::exit(101); // the parent, who waits for an answer, sees that none comes
    }));
    let socket = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    let answers = Arc::new(Mutex::new(socket.try_clone().unwrap()));
    let state: Arc<OnceState> = Arc::default();
    for line in BufReader::new(socket).lines() {
        let Ok(line) = line else { break };
        let (answers, state) = (answers.clone(), state.clone());
        let run = move || {
            let mut words = line.split('\t');
            let id = words.next().unwrap();
            let words: Vec<&str> = words.collect();
            let started = Instant::now();
            let answer = match state.run(&words) {
                Ok(text) => format!("ok\t{text}"),
                Err(error) => {
                    let text = format!("{:?}\t{error}", error.kind()).replace('\n', " ");
                    format!("err\t{}\t{}\t{text}", started.elapsed().as_micros(), error.operation())
                }
            };
            let _parent_gone = answers.lock().unwrap().write_all(format!("{id}\t{answer}\n").as_bytes());
        };
        std::thread::Builder::new().stack_size(256 << 10).spawn(run).unwrap();
    }
    std::process::exit(0);
}

#[derive(Default)]
struct OnceState {
    endpoint: std::sync::OnceLock<Endpoint>,
    kept: Mutex<BTreeMap<String, Kept>>,
}

enum Kept {
    Payload(towline::Payload),
    View(towline::View),
    Buffer { _held: towline::Buffer },
}

impl OnceState {
    fn run(&self, words: &[&str]) -> Result<String, Error> {
        let time = |word: &str| Duration::from_millis(word.parse().unwrap());
        if let ["build", options] = words {
            let endpoint = Options::from_text(options).build()?;
            let addresses = endpoint.addresses();
            assert!(self.endpoint.set(endpoint).is_ok(), "built twice");
            return Ok(addresses.join("\t"));
        }
        let endpoint = self.endpoint.get().expect("build comes first");
        let keep = |name: &str, kept| self.kept.lock().unwrap().insert(name.to_owned(), kept);
        Ok(match words {
            ["put", key, consumers, time_to_live, spec] => {
                let time = Duration::from_nanos(time_to_live.parse().unwrap());
                let options = PutOptions::new().consumers(consumers.parse().unwrap()).time_to_live(time);
                Spec::from_text(spec).put(endpoint, key, &options)?.to_string()
            }
            ["get", from, timeout, name @ ..] => {
                let payload = endpoint.get(origin(from), time(timeout))?;
                let got = Got::of(&payload).to_text();
                if let [name] = name {
                    keep(name, Kept::Payload(payload));
                }
                got
            }
            ["view", from, timeout, name @ ..] => {
                let view = endpoint.view(origin(from), time(timeout))?;
                let got = Got::of_view(&view).to_text();
                if let [name] = name {
                    keep(name, Kept::View(view));
                }
                got
            }
            ["look", name] => match &self.kept.lock().unwrap()[*name] {
                Kept::Payload(payload) => Got::of(payload).to_text(),
                Kept::View(view) => Got::of_view(view).to_text(),
                Kept::Buffer { .. } => String::new(),
            },
            ["release", name] => {
                let kept = self.kept.lock().unwrap().remove(*name);
                assert!(kept.is_some(), "nothing is kept under {name}");
                String::new()
            }
            ["alloc", len, timeout, name] => {
                let held = endpoint.alloc_within(len.parse().unwrap(), time(timeout))?;
                keep(name, Kept::Buffer { _held: held });
                String::new()
            }
            ["wait", key, count, timeout] => {
                endpoint.wait_for_consumers(key, count.parse().unwrap(), time(timeout))?;
                String::new()
            }
            ["remove", ticket] => {
                endpoint.remove(&ticket.parse().unwrap())?;
                String::new()
            }
            ["close", timeout] => stats_text(&endpoint.close(time(timeout))),
            ["stats"] => stats_text(&endpoint.stats()),
            ["port"] => listening_at(),
            ["own_kib"] => {
                let status = std::fs::read_to_string("/proc/self/status").unwrap();
                let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
                line.trim().trim_end_matches(" kB").to_owned()
            }
            other => panic!("no command: {other:?}"),
        })
    }
}

/// The one address of IPv4 and port at which this process listens, whatever it advertises.
fn listening_at() -> String {
    const LISTEN: &str = "0A";
    let own: Vec<String> = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
        .filter_map(|link| Some(link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned()))
        .collect();
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let address = table.lines().skip(1).find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let ours = fields[3] == LISTEN && own.iter().any(|inode| inode == fields[9]);
        ours.then(|| {
            let (ip, port) = fields[1].split_once(':').unwrap();
            // Printed as a number, whose bytes lie in memory as on the wire.
            let ip = u32::from_str_radix(ip, 16).unwrap().to_ne_bytes();
            std::net::SocketAddr::from((ip, u16::from_str_radix(port, 16).unwrap()))
        })
    });
    address.expect("it listens").to_string()
}

fn origin(text: &str) -> Origin {
    match text.split_once('|') {
        Some((address, key)) => Origin::from((address, key)),
        None => Origin::from(&text.parse::<Ticket>().unwrap()),
    }
}

fn stats_text(stats: &Stats) -> String {
    format!(
        "puts={} gets={} failures={} payloads={} waiting={} leases={} fencing={} quarantined={} links={} pool={} free={} \
         buffers={} gets_in_progress={} pool_waiting={} bytes={} fallback={} retries={}",
        stats.puts,
        stats.gets,
        stats.failures,
        stats.payloads,
        stats.waiting,
        stats.leases,
        stats.fencing,
        stats.quarantined_bytes,
        stats.links,
        stats.pool_bytes,
        stats.pool_free,
        stats.pool_buffers,
        stats.gets_in_progress,
        stats.pool_waiting,
        stats.bytes.values().sum::<u64>(),
        stats.fallback_bytes,
        stats.retries,
    )
}
