//! How fast one end writes into the memory of the other, as perftest's `ib_write_bw` measures it.
//!
//! ```text
//! cargo run --release -p towline-verbs --example write_bandwidth DEVICE listen ADDR:PORT [BYTES] [COUNT] [DEPTH]
//! cargo run --release -p towline-verbs --example write_bandwidth DEVICE connect ADDR:PORT [BYTES] [COUNT] [DEPTH]
//! ```
//!
//! DEVICE is `NAME`, `NAME:PORT` or `NAME:PORT:GID_INDEX` (see the example `show_gids`). The end that connects writes: COUNT
//! (1000) times BYTES (65536), DEPTH (16) at a time. The end that listens checks the last bytes.
#![allow(unsafe_code)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Instant;
use towline_verbs::ibv::{IbvProvider, PortName};
use towline_verbs::memory::HugePages;
use towline_verbs::{
    Access, CompletionStatus, LocalSlice, Memory, Opcode, QueuePairCapacity, QueuePairState, RemoteSlice, WorkRequest,
};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const PATTERN: u8 = 0xA5;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [name, role, address, numbers @ ..] = &*args else {
        return Err("usage: write_bandwidth DEVICE listen|connect ADDR:PORT [BYTES] [COUNT] [DEPTH]".into());
    };
    let number = |at: usize, default: u64| numbers.get(at).map_or(Ok(default), |text| text.parse());
    let (bytes, count, depth) = (number(0, 65536)?, number(1, 1000)?, number(2, 16)?.max(1));
    let writes = role == "connect";
    let mut control = if writes { TcpStream::connect(address)? } else { TcpListener::bind(address)?.accept()?.0 };

    let device = IbvProvider::new()?.open_port(&name.parse::<PortName>()?)?;
    let domain = device.alloc_pd()?;
    let depth = depth.min(device.info().capabilities.max_send_wr.into());
    let queue = device.create_cq(u32::try_from(depth)? + 1)?;
    let capacity = QueuePairCapacity { max_send_wr: u32::try_from(depth)?, max_recv_wr: 1 };
    let pair = domain.create_qp(&queue, &queue, capacity)?;
    // The least rights that do: the end that writes lets nobody in.
    let access = if writes { Access::empty() } else { Access::REMOTE_WRITE };
    let region = domain.register(Memory::shared(bytes, HugePages::Off)?, access)?;
    if writes {
        region.memory().write(0, &vec![PATTERN; usize::try_from(bytes)?])?;
    }

    // Where the memory is, and under which key it may be written: on hardware a secret as good as the memory itself.
    let target = region.remote(0, bytes)?;
    let told = [&target.address.to_le_bytes()[..], &target.rkey.to_le_bytes(), &pair.address()].concat();
    let told = exchange(&mut control, &told)?;
    let (target, remote) = told.split_at_checked(16).ok_or("the peer said too little")?;
    pair.connect(remote, writes)?;
    while pair.state() == QueuePairState::Connecting {
        device.progress();
    }
    if let Some(failure) = pair.failure() {
        return Err(failure.into());
    }

    if writes {
        let word = |at| target[at..at + 8].try_into().map(u64::from_le_bytes);
        let remote = RemoteSlice { address: word(0)?, len: bytes, rkey: word(8)? };
        let local = || vec![LocalSlice { region: region.clone(), offset: 0, len: bytes }];
        let request = |id| WorkRequest { id, opcode: Opcode::Write, local: local(), remote: Some(remote) };
        let (mut posted, mut done, mut completions) = (0, 0, vec![]);
        let started = Instant::now();
        while done < count {
            // As many as there is room for, with one ring of the doorbell.
            let most = count.min(done + depth);
            if posted < most {
                // SAFETY: nobody writes the memory that they are taken from.
                unsafe { pair.post_send((posted..most).map(request).collect()) }?;
                posted = most;
            }
            device.progress();
            queue.poll(&mut completions, 64);
            for completion in completions.drain(..) {
                if completion.status != CompletionStatus::Success {
                    return Err(pair.failure().map_or_else(|| completion.status.to_string().into(), Into::into));
                }
                done += 1;
            }
        }
        let seconds = started.elapsed().as_secs_f64();
        let megabytes = (bytes * count) as f64 / 1e6;
        println!("{count} writes of {bytes} bytes, {depth} at a time: {:.1} MB/s", megabytes / seconds);
    }
    // A write that has completed was delivered. The listening end's device works meanwhile without it.
    exchange(&mut control, b"done")?;
    let mut found = vec![0; usize::try_from(bytes)?];
    region.memory().read(0, &mut found)?;
    if count > 0 && found.iter().any(|byte| *byte != PATTERN) {
        return Err("other bytes arrived than were written".into());
    }
    Ok(())
}

/// Sends and receives a few bytes over the control connection.
fn exchange(control: &mut TcpStream, mine: &[u8]) -> Result<Vec<u8>> {
    control.write_all(&[&u16::try_from(mine.len())?.to_le_bytes(), mine].concat())?;
    let mut len = [0; 2];
    control.read_exact(&mut len)?;
    let mut theirs = vec![0; u16::from_le_bytes(len).into()];
    control.read_exact(&mut theirs)?;
    Ok(theirs)
}
