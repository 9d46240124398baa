//! How fast reads over the TCP provider are, beside the best bare socket loop of the same run.
//!
//! ```text
//! cargo run --release -p towline-verbs --example tcp_read_bandwidth [MiB] [rounds] [chunk KiB] [in flight]
//! ```
//!
//! Two processes over loopback. A round is one transfer by each bare variant ({the system's congestion control, reno,
//! cubic} x {256 KiB, 1 MiB writes} x {1, 2 streams}, blocking threads, a persistent connection each) and one by the
//! provider between every two of them, all into the same touched memory, timed at the receiver. Printed: medians, user + system time of
//! both processes per 10^9 bytes, and the provider's ratio to the best variant.
#![allow(unsafe_code, clippy::unwrap_used, clippy::expect_used)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Instant;
use towline_verbs::memory::HugePages;
use towline_verbs::tcp::{TcpConfig, TcpProvider, prepare_listener};
use towline_verbs::{
    Access, CompletionQueue, CompletionStatus, Device, LocalSlice, Memory, MemoryRegion, Opcode, Progress, Provider,
    QueuePair, QueuePairCapacity, QueuePairState, RemoteSlice, Token, WorkRequest,
};

/// Streams of the provider's connection.
const STREAMS: u8 = 3;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let number = |at: usize, default: u64| args.get(at).map_or(default, |text| text.parse().expect("a number"));
    if args.get(1).is_some_and(|word| word == "owner") {
        owner(number(2, 0), args[3].parse().unwrap());
    } else {
        reader(number(1, 190) << 20, number(2, 9) as usize, number(3, 0) << 10, number(4, 4));
    }
}

/// One end of the provider's connection.
struct End {
    device: Device,
    queue: CompletionQueue,
    pair: QueuePair,
    region: MemoryRegion,
}

impl End {
    fn new(bytes: u64, advertised: Vec<std::net::SocketAddr>) -> Self {
        let mut config = TcpConfig::new(advertised, Arc::new(|token: Token| token.0.to_vec()));
        config.streams = STREAMS;
        let device = TcpProvider::new(config).unwrap().open("tcp0").unwrap();
        let domain = device.alloc_pd().unwrap();
        let queue = device.create_cq(1024).unwrap();
        let pair = domain.create_qp(&queue, &queue, QueuePairCapacity { max_send_wr: 64, max_recv_wr: 1 }).unwrap();
        let access = Access::LOCAL_WRITE | Access::REMOTE_READ;
        let region = domain.register(Memory::shared(bytes, HugePages::Off).unwrap(), access).unwrap();
        Self { device, queue, pair, region }
    }

    /// Waits until there is something to do, for the provider or on `other`; whether it is `other`.
    fn wait(&self, other: Option<i32>) -> bool {
        let fd = self.device.event_fd().unwrap().as_raw_fd();
        let entry = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let mut list = [entry(fd), entry(other.unwrap_or(-1))];
        // SAFETY: the list is valid for its two entries.
        unsafe { libc::poll(list.as_mut_ptr(), 2, -1) };
        list[1].revents != 0
    }
}

// ---- the owner of what is read: it does as it is told on standard input

fn owner(bytes: u64, port: u16) {
    let reader_side = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    prepare_listener(&reader_side);
    let end = End::new(bytes, vec![reader_side.local_addr().unwrap()]);
    let whole = vec![7u8; 1 << 20];
    for at in (0..bytes).step_by(1 << 20) {
        end.region.memory().write(at, &whole[..(bytes - at).min(1 << 20) as usize]).unwrap();
    }
    println!("{} {}", hex(&end.pair.address()), hex(&end.region.remote(0, bytes).unwrap().rkey.to_le_bytes()));
    let mut bare: Vec<(Vec<TcpStream>, usize)> = Vec::new();
    let mut commands = BufReader::new(std::io::stdin());
    loop {
        if commands.buffer().is_empty() {
            loop {
                while end.device.progress() == Progress::More {}
                if end.wait(Some(0)) {
                    break;
                }
            }
        }
        let mut line = String::new();
        if commands.read_line(&mut line).unwrap() == 0 {
            return;
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[0] {
            "connect" => {
                end.pair.connect(&unhex(words[1]), false).unwrap();
                for _ in 0..STREAMS {
                    let (mut stream, _) = reader_side.accept().unwrap();
                    let mut token = [0; 16];
                    stream.read_exact(&mut token).unwrap();
                    end.device.adopt(OwnedFd::from(stream), Token(token)).unwrap();
                }
            }
            "dial" => {
                let (control, write, streams) = (words[1], words[2].parse().unwrap(), words[3].parse().unwrap());
                bare.push(((0..streams).map(|_| dial(port, control)).collect(), write));
                println!("ok");
            }
            "send" => {
                let (streams, write) = &bare[words[1].parse::<usize>().unwrap()];
                // SAFETY: nobody writes this memory.
                let data = unsafe { end.region.memory().slice(0, bytes) }.unwrap();
                each(streams, bytes, |mut stream, from, to| {
                    for piece in data[from..to].chunks(*write) {
                        stream.write_all(piece).unwrap();
                    }
                });
            }
            "cpu" => println!("{}", cpu()),
            "chosen" => println!("{:?}", end.pair),
            other => panic!("{other}"),
        }
    }
}

/// A connection whose sending end, the owner, has chosen its congestion control before it connected.
fn dial(port: u16, control: &str) -> TcpStream {
    // SAFETY: no pointers are involved.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if control != "system" {
        let (name, len) = (control.as_ptr().cast(), control.len() as u32);
        // SAFETY: the name is valid for its length.
        let chosen = unsafe { libc::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_CONGESTION, name, len) };
        assert_eq!(chosen, 0, "{control} is not allowed");
    }
    let address = libc::sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: port.to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes([127, 0, 0, 1]) },
        sin_zero: [0; 8],
    };
    // SAFETY: the address is a whole `sockaddr_in`.
    assert_eq!(unsafe { libc::connect(fd, (&raw const address).cast(), 16) }, 0);
    // SAFETY: the descriptor was just opened and nobody else has it.
    let stream = unsafe { <TcpStream as std::os::fd::FromRawFd>::from_raw_fd(fd) };
    stream.set_nodelay(true).unwrap();
    stream
}

/// Has each stream's part moved, by a thread each when there are several.
fn each(streams: &[TcpStream], bytes: u64, work: impl Fn(&TcpStream, usize, usize) + Sync) {
    let part = bytes as usize / streams.len();
    std::thread::scope(|scope| {
        for (at, stream) in streams.iter().enumerate() {
            let to = if at + 1 == streams.len() { bytes as usize } else { (at + 1) * part };
            let work = &work;
            if streams.len() == 1 {
                work(stream, 0, to);
            } else {
                scope.spawn(move || work(stream, at * part, to));
            }
        }
    });
}

// ---- the reader: it measures

struct Owner {
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Owner {
    fn tell(&mut self, command: &str) {
        writeln!(self.input, "{command}").unwrap();
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    fn cpu(&mut self) -> f64 {
        self.tell("cpu");
        self.answer().parse().unwrap()
    }
}

#[derive(Default)]
struct Samples {
    seconds: Vec<f64>,
    cpu: Vec<f64>,
}

fn reader(bytes: u64, rounds: usize, chunk: u64, in_flight: u64) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["owner", &bytes.to_string(), &port.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut owner = Owner { input: child.stdin.take().unwrap(), output: BufReader::new(child.stdout.take().unwrap()) };
    std::thread::spawn(move || {
        let status = child.wait().unwrap();
        if !status.success() {
            eprintln!("the owner ended: {status}");
            std::process::exit(1);
        }
    });
    let told = owner.answer();
    let (address, key) = told.split_once(' ').unwrap();
    let end = End::new(bytes, vec![]);
    owner.tell(&format!("connect {}", hex(&end.pair.address())));
    end.pair.connect(&unhex(address), true).unwrap();
    while end.pair.state() != QueuePairState::ReadyToSend {
        if end.device.progress() == Progress::Idle {
            end.wait(None);
        }
    }
    let rkey = u64::from_le_bytes(unhex(key).try_into().unwrap());
    let chunk = if chunk == 0 { end.device.info().capabilities.preferred_chunk } else { chunk };

    let allowed = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_available_congestion_control").unwrap();
    let mut variants = Vec::new();
    for control in ["system", "reno", "cubic"] {
        for write in [256 << 10, 1 << 20] {
            for streams in [1, 2] {
                if control == "system" || allowed.contains(control) {
                    owner.tell(&format!("dial {control} {write} {streams}"));
                    let accepted: Vec<_> = (0..streams).map(|_| listener.accept().unwrap().0).collect();
                    assert_eq!(owner.answer(), "ok");
                    variants.push((format!("{control} {:>4}K x{streams}", write >> 10), accepted, write));
                }
            }
        }
    }
    let mut bare: Vec<Samples> = variants.iter().map(|_| Samples::default()).collect();
    let mut ours = Samples::default();
    for round in 0..=rounds {
        // The first round warms up, and the provider's choices are made in it.
        let measure = |samples: &mut Samples, owner: &mut Owner, work: &mut dyn FnMut(&mut Owner)| {
            let before = cpu() + owner.cpu();
            let start = Instant::now();
            work(owner);
            let seconds = start.elapsed().as_secs_f64();
            if round > 0 {
                samples.seconds.push(seconds);
                samples.cpu.push(cpu() + owner.cpu() - before);
            }
        };
        for (at, (_, streams, write)) in variants.iter().enumerate() {
            measure(&mut bare[at], &mut owner, &mut |owner| {
                owner.tell(&format!("send {at}"));
                // SAFETY: the provider has nothing outstanding, so this memory is this function's alone.
                let room = unsafe { end.region.memory().slice_mut(0, bytes) }.unwrap().as_mut_ptr() as usize;
                each(streams, bytes, |mut stream, from, to| {
                    let mut from = from;
                    while from < to {
                        let piece = *write.min(&(to - from));
                        // SAFETY: each stream has its own part of the room.
                        let piece = unsafe { std::slice::from_raw_parts_mut((room + from) as *mut u8, piece) };
                        from += stream.read(piece).unwrap();
                    }
                });
            });
            measure(&mut ours, &mut owner, &mut |_| read(&end, bytes, rkey, chunk, in_flight));
        }
    }

    let gb = bytes as f64 / 1e9;
    println!("{} MiB, {} KiB chunks, {in_flight} in flight", bytes >> 20, chunk >> 10);
    println!("{:<20} {:>8} {:>10}", "variant", "GB/s", "cpu s/GB");
    let mut best = (0.0, 0.0);
    let mut least = f64::MAX;
    for ((name, ..), samples) in variants.iter().zip(&bare) {
        let (rate, cpu) = (gb / median(&samples.seconds), median(&samples.cpu) / gb);
        println!("{name:<20} {rate:>8.2} {cpu:>10.3}");
        least = f64::min(least, cpu);
        if rate > best.0 {
            best = (rate, cpu);
        }
    }
    let (rate, cpu) = (gb / median(&ours.seconds), median(&ours.cpu) / gb);
    println!("{:<20} {rate:>8.2} {cpu:>10.3}", "provider");
    owner.tell("chosen");
    println!("{}", owner.answer());
    println!(
        "ratio to the best: speed {:.2}, cpu {:.2} (to the least of all {:.2})",
        rate / best.0,
        cpu / best.1,
        cpu / least
    );
}

/// Reads everything in chunks.
fn read(end: &End, bytes: u64, rkey: u64, chunk: u64, in_flight: u64) {
    let (mut posted, mut done, mut out) = (0, 0, Vec::new());
    while done < bytes {
        let mut requests = Vec::new();
        while posted < bytes && posted - done < in_flight * chunk {
            let len = chunk.min(bytes - posted);
            requests.push(WorkRequest {
                id: posted,
                opcode: Opcode::Read,
                local: vec![LocalSlice { region: end.region.clone(), offset: posted, len }],
                remote: Some(RemoteSlice { address: posted, len, rkey }),
            });
            posted += len;
        }
        if !requests.is_empty() {
            // SAFETY: nobody looks at the memory until all has been read.
            unsafe { end.pair.post_send(requests) }.unwrap();
        }
        let idle = end.device.progress() == Progress::Idle;
        if end.queue.poll(&mut out, 64) == 0 {
            if idle {
                end.wait(None);
            }
            continue;
        }
        for completion in out.drain(..) {
            assert_eq!(completion.status, CompletionStatus::Success, "{:?}", end.pair.failure());
            done += completion.bytes;
        }
    }
}

fn median(of: &[f64]) -> f64 {
    let mut sorted = of.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

fn cpu() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the time is valid for writes.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let digit = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(digit).collect()
}
