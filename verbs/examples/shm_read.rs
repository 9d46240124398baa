//! How fast reads over shared memory are here, beside the bare copy routines in the same run.
//!
//! `cargo run --release -p towline-verbs --example shm_read [MiB] [rounds] [MiB a request] [MiB in flight]`

use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;
use std::{io::Read, thread};
use towline_verbs::memory::HugePages;
use towline_verbs::shm::{ShmConfig, ShmProvider};
use towline_verbs::{
    Access, CompletionStatus, Device, LocalSlice, Memory, Opcode, Progress, Provider, QueuePairCapacity,
    QueuePairState, Token, WorkRequest, copy,
};

type Anything<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Anything<()> {
    let mut arguments = std::env::args().skip(1).map(|word| word.parse::<u64>());
    let mut next = |default| arguments.next().unwrap_or(Ok(default));
    let (len, rounds, chunk, in_flight) = (next(190)? << 20, next(15)?, next(0)? << 20, next(0)? << 20);
    let chunk = if chunk == 0 { len } else { chunk };
    let in_flight = if in_flight == 0 { len } else { in_flight };

    let name = format!("towline-shm-read-{}", std::process::id());
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name)?)?;
    let owner = open(&name)?;
    let reader = open("unused")?;
    println!("{}", reader.info().description);

    let capacity = QueuePairCapacity { max_send_wr: 8192, max_recv_wr: 1 };
    let (owner_pd, owner_cq) = (owner.alloc_pd()?, owner.create_cq(10_000)?);
    let (reader_pd, reader_cq) = (reader.alloc_pd()?, reader.create_cq(10_000)?);
    let passive = owner_pd.create_qp(&owner_cq, &owner_cq, capacity)?;
    let active = reader_pd.create_qp(&reader_cq, &reader_cq, capacity)?;
    let source = owner_pd.register(Memory::shared(len, HugePages::Off)?, Access::REMOTE_READ)?;
    let target = reader_pd.register(Memory::shared(len, HugePages::Off)?, Access::LOCAL_WRITE)?;

    passive.connect(&active.address(), false)?;
    active.connect(&passive.address(), true)?;
    let (mut stream, _) = listener.accept()?;
    let mut token = [0; 16];
    stream.read_exact(&mut token)?;
    owner.adopt(OwnedFd::from(stream), Token(token))?;
    while active.state() != QueuePairState::ReadyToSend || passive.state() != QueuePairState::ReadyToSend {
        owner.progress();
        reader.progress();
    }
    while reader.progress() == Progress::More {} // the mapping is made present

    let read = |from: u64, len: u64| -> Anything<()> {
        let (mut posted, mut completed) = (0, 0);
        let mut done = Vec::new();
        while completed < len {
            let mut requests = Vec::new();
            while posted < len && posted - completed < in_flight {
                let piece = chunk.min(len - posted);
                let local = vec![LocalSlice { region: target.clone(), offset: from + posted, len: piece }];
                let remote = Some(source.remote(from + posted, piece)?);
                requests.push(WorkRequest { id: posted, opcode: Opcode::Read, local, remote });
                posted += piece;
            }
            if !requests.is_empty() {
                #[allow(unsafe_code)]
                // SAFETY: nobody looks at the target before the read has completed.
                unsafe {
                    active.post_send(requests)?
                };
            }
            reader_cq.poll(&mut done, usize::MAX);
            if done.is_empty() {
                reader.progress();
                reader_cq.poll(&mut done, usize::MAX);
            }
            for completion in done.drain(..) {
                assert_eq!(completion.status, CompletionStatus::Success);
                completed += completion.bytes;
            }
        }
        Ok(())
    };

    let mut ours = Vec::new();
    let mut bare = vec![Vec::new(); copy::routines().len() * 2];
    for _ in 0..rounds {
        for (index, times) in bare.iter_mut().enumerate() {
            let routine = &copy::routines()[index / 2];
            let (to, from) = (target.memory().address(), source.memory().address());
            times.push(copy_all(routine, 1 + index % 2, to, from, len as usize));
        }
        let start = Instant::now();
        read(0, len)?;
        ours.push(start.elapsed().as_secs_f64());
    }
    let rate = |times: &mut Vec<f64>| len as f64 / median(times) / 1e9;
    let mut limit: f64 = 0.0;
    for (index, times) in bare.iter_mut().enumerate() {
        let rate = rate(times);
        limit = limit.max(rate);
        println!("{:>26}, {} thread(s): {rate:6.2} GB/s", copy::routines()[index / 2].name(), 1 + index % 2);
    }
    let rate = rate(&mut ours);
    println!("{:>37}: {rate:6.2} GB/s, {:.3} of the best", "read of a queue pair", rate / limit);

    for bytes in [8, 4096, 65536] {
        let mut times = Vec::new();
        for _ in 0..20_000 {
            let start = Instant::now();
            read(0, bytes)?;
            times.push(start.elapsed().as_secs_f64());
        }
        println!("post, copy and poll {bytes} bytes: {:.0} ns", median(&mut times) * 1e9);
    }
    Ok(())
}

fn open(name: &str) -> Anything<Device> {
    Ok(ShmProvider::new(ShmConfig::new(name, |token| token.0.to_vec()))?.open("shm0")?)
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// The plainest copy on some threads, in pieces of 1 MiB; seconds.
fn copy_all(routine: &copy::Routine, threads: usize, to: *mut u8, from: *const u8, len: usize) -> f64 {
    const PIECE: usize = 1 << 20;
    let (to, from, cursor) = (to as usize, from as usize, AtomicUsize::new(0));
    let work = || {
        loop {
            let offset = cursor.fetch_add(PIECE, Ordering::Relaxed);
            if offset >= len {
                return;
            }
            let (to, from) = ((to + offset) as *mut u8, (from + offset) as *const u8);
            #[allow(unsafe_code)]
            // SAFETY: both memories have `len` bytes, and the cursor gives each piece to one thread.
            unsafe {
                routine.copy(to, from, PIECE.min(len - offset))
            };
        }
    };
    let start = Instant::now();
    thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(work);
        }
        work();
    });
    start.elapsed().as_secs_f64()
}
