//! Messages to and fro over a reliable connection, as `ibv_rc_pingpong` does it: sends into posted receives.
//!
//! ```text
//! cargo run --release -p towline-verbs --example rc_pingpong DEVICE listen ADDR:PORT [BYTES] [ROUNDS]
//! cargo run --release -p towline-verbs --example rc_pingpong DEVICE connect ADDR:PORT [BYTES] [ROUNDS]
//! ```
//!
//! DEVICE is `NAME`, `NAME:PORT` or `NAME:PORT:GID_INDEX` (see the example `show_gids`). The two ends tell each other their
//! queue pairs' addresses over a TCP connection; both have to be told the same BYTES (4096) and ROUNDS (1000).
#![allow(unsafe_code)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Instant;
use towline_verbs::ibv::{IbvProvider, PortName};
use towline_verbs::memory::HugePages;
use towline_verbs::{
    Access, Completion, CompletionQueue, CompletionStatus, Device, LocalSlice, Memory, Opcode, QueuePair,
    QueuePairCapacity, QueuePairState, ReceiveRequest, WorkRequest,
};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [name, role, address, numbers @ ..] = &*args else {
        return Err("usage: rc_pingpong DEVICE listen|connect ADDR:PORT [BYTES] [ROUNDS]".into());
    };
    let bytes: u64 = numbers.first().map_or(Ok(4096), |text| text.parse())?;
    let rounds: u32 = numbers.get(1).map_or(Ok(1000), |text| text.parse())?;
    let begins = role == "connect";
    let mut control = if begins { TcpStream::connect(address)? } else { TcpListener::bind(address)?.accept()?.0 };

    // The five objects, in the order in which each needs the ones before. Dropping them in any order is safe.
    let device = IbvProvider::new()?.open_port(&name.parse::<PortName>()?)?;
    let domain = device.alloc_pd()?;
    let queue = device.create_cq(16)?;
    let pair = domain.create_qp(&queue, &queue, QueuePairCapacity { max_send_wr: 2, max_recv_wr: 2 })?;
    let region = domain.register(Memory::shared(2 * bytes, HugePages::Off)?, Access::LOCAL_WRITE)?;
    // The first half is sent from, the second received into.
    let half = |offset| LocalSlice { region: region.clone(), offset, len: bytes };
    // SAFETY: nobody looks at the second half before the receive has completed.
    let receive = || unsafe { pair.post_recv(ReceiveRequest { id: 1, local: Some(half(bytes)) }) };

    // A receive is there before the peer can send: connecting comes after it.
    receive()?;
    let remote = exchange(&mut control, &pair.address())?;
    pair.connect(&remote, begins)?;
    while pair.state() == QueuePairState::Connecting {
        device.progress();
    }
    if let Some(failure) = pair.failure() {
        return Err(failure.into());
    }
    let mut end = End { device, queue, pair: pair.clone(), early: vec![] };

    let started = Instant::now();
    for round in 0..rounds {
        if begins {
            region.memory().write(0, &round.to_le_bytes()[..bytes.min(4) as usize])?;
            end.send(half(0))?;
        }
        // The peer's message, or the answer to ours.
        end.wait(1)?;
        let mut number = [0; 4];
        region.memory().read(bytes, &mut number[..bytes.min(4) as usize])?;
        assert!(bytes < 4 || u32::from_le_bytes(number) == round, "round {round} brought {number:?}");
        receive()?;
        if !begins {
            region.memory().write(0, &number[..bytes.min(4) as usize])?;
            end.send(half(0))?;
        }
    }
    let microseconds = started.elapsed().as_secs_f64() * 1e6 / f64::from(rounds.max(1));
    println!("{rounds} rounds of {bytes} bytes: {microseconds:.1} us there and back");
    exchange(&mut control, b"done")?;
    Ok(())
}

struct End {
    device: Device,
    queue: CompletionQueue,
    pair: QueuePair,
    /// Completions that nobody has waited for yet.
    early: Vec<Completion>,
}

impl End {
    /// Sends a message, and waits until the peer has it.
    fn send(&mut self, slice: LocalSlice) -> Result<()> {
        let request = WorkRequest { id: 2, opcode: Opcode::Send, local: vec![slice], remote: None };
        // SAFETY: nobody writes the first half before the send has completed.
        unsafe { self.pair.post_send(vec![request]) }?;
        self.wait(2)
    }

    /// Waits for the completion of request `id`; others may come before.
    fn wait(&mut self, id: u64) -> Result<()> {
        loop {
            if let Some(at) = self.early.iter().position(|done| done.id == id) {
                let status = self.early.remove(at).status;
                let failure = || self.pair.failure().map_or_else(|| status.to_string().into(), Into::into);
                return if status == CompletionStatus::Success { Ok(()) } else { Err(failure()) };
            }
            self.device.progress();
            self.queue.poll(&mut self.early, 16);
        }
    }
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
