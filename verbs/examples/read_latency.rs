//! How long a read takes under the key of one lease, a memory window where the device has them, as perftest's `ib_read_lat`
//! measures reads: one at a time, polled for without sleep. Both queue pairs are on one device and in this process; the
//! processor that is read from has no part in it.
//!
//! ```text
//! cargo run --release -p towline-verbs --example read_latency DEVICE [BYTES] [COUNT]
//! ```
//!
//! DEVICE is `NAME`, `NAME:PORT` or `NAME:PORT:GID_INDEX` (see the example `show_gids`).
#![allow(unsafe_code)]

use std::time::Instant;
use towline_verbs::ibv::{IbvProvider, PortName};
use towline_verbs::memory::HugePages;
use towline_verbs::{
    Access, CompletionQueue, CompletionStatus, Device, LocalSlice, Memory, Opcode, ProtectionDomain, QueuePair,
    QueuePairCapacity, QueuePairState, WorkRequest,
};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const PATTERN: u8 = 0xA5;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [name, numbers @ ..] = &*args else { return Err("usage: read_latency DEVICE [BYTES] [COUNT]".into()) };
    let number = |at: usize, default: u64| numbers.get(at).map_or(Ok(default), |text| text.parse());
    let (bytes, count) = (number(0, 4096)?, number(1, 1000)?.max(1));

    let device = IbvProvider::new()?.open_port(&name.parse::<PortName>()?)?;
    let domain = device.alloc_pd()?;
    let (reader, queue) = end(&device, &domain)?;
    let (owner, _) = end(&device, &domain)?;
    owner.connect(&reader.address(), false)?;
    reader.connect(&owner.address(), true)?;
    while [&reader, &owner].iter().any(|pair| pair.state() == QueuePairState::Connecting) {
        device.progress();
    }
    if let Some(failure) = reader.failure().or(owner.failure()) {
        return Err(failure.into());
    }

    // The least rights that do: a window gives the peer's queue pair alone its key.
    let scoped = device.info().capabilities.scoped_keys;
    let shown = if scoped { Access::MW_BIND } else { Access::REMOTE_READ };
    let source = domain.register(Memory::shared(bytes, HugePages::Off)?, shown | Access::LOCAL_WRITE)?;
    source.memory().write(0, &vec![PATTERN; usize::try_from(bytes)?])?;
    let window = if scoped { Some(source.bind(&owner, 0, bytes)?) } else { None };
    while window.as_ref().is_some_and(|window| !window.is_bound()) {
        device.progress();
    }
    let remote = match &window {
        Some(window) => window.remote(),
        None => source.remote(0, bytes)?,
    };

    let target = domain.register(Memory::shared(bytes, HugePages::Off)?, Access::LOCAL_WRITE)?;
    let (mut times, mut completions) = (vec![], vec![]);
    for id in 0..count {
        let local = vec![LocalSlice { region: target.clone(), offset: 0, len: bytes }];
        let read = WorkRequest { id, opcode: Opcode::Read, local, remote: Some(remote) };
        let begin = Instant::now();
        // SAFETY: nobody else reads or writes the memory that they go to.
        unsafe { reader.post_send(vec![read]) }?;
        while queue.poll(&mut completions, 1) == 0 {}
        times.push(begin.elapsed());
        if completions.drain(..).any(|completion| completion.status != CompletionStatus::Success) {
            return Err(reader.failure().map_or_else(|| "a read failed".into(), Into::into));
        }
    }
    let mut found = vec![0; usize::try_from(bytes)?];
    target.memory().read(0, &mut found)?;
    if found.iter().any(|byte| *byte != PATTERN) {
        return Err("other bytes arrived than are there".into());
    }
    times.sort_unstable();
    let key = if scoped { "a window" } else { "a region" };
    let median = times[times.len() / 2].as_secs_f64() * 1e6;
    println!("{count} reads of {bytes} bytes under the key of {key}: {median:.1} us");
    Ok(())
}

/// A queue pair with a completion queue of its own.
fn end(device: &Device, domain: &ProtectionDomain) -> Result<(QueuePair, CompletionQueue)> {
    let queue = device.create_cq(2)?;
    let pair = domain.create_qp(&queue, &queue, QueuePairCapacity { max_send_wr: 1, max_recv_wr: 1 })?;
    Ok((pair, queue))
}
