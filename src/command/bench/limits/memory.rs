//! The limits of memory: a copy within one process, and a copy in and out through memory that two share.

use super::{Received, Sent};
use crate::command::Failure;
use crate::command::sys::{Copier, Shared, cpu_seconds, now_ns};
use std::sync::atomic::Ordering;

/// The word that says how many rounds the consumer is ready for.
const READY: usize = 0;
/// The word that says how many bytes the producer has put in, over all rounds.
const FILLED: usize = 1;
/// The words of the spinning ping-pong.
const SPIN: [usize; 2] = [2, 3];
/// How long a spinning process waits for the other.
const PATIENCE_NS: u64 = 20_000_000_000;

fn copier(streaming: bool) -> Copier {
    if streaming { Copier::Streaming } else { Copier::Plain }
}

/// Copies `from` to `to` `rounds` times.
pub(crate) fn copy(streaming: bool, threads: u32, to: &mut [u8], from: &[u8], rounds: u32) -> Received {
    let copier = copier(streaming);
    let mut received = Received { asked: vec![], ends: vec![], cpu: 0.0 };
    let cpu = cpu_seconds();
    for _ in 0..rounds {
        received.asked.push(now_ns());
        if threads < 2 {
            copier.copy(to, from);
        } else {
            let middle = (to.len() / 2).next_multiple_of(4096).min(to.len());
            let (first, second) = to.split_at_mut(middle);
            std::thread::scope(|scope| {
                scope.spawn(|| copier.copy(second, &from[middle..]));
                copier.copy(first, &from[..middle]);
            });
        }
        received.ends.push(now_ns());
    }
    received.cpu = cpu_seconds() - cpu;
    received
}

/// The producer's half of copying through `shared`: copies `from` in, piece by piece.
pub(crate) fn copy_in(
    streaming: bool,
    piece: usize,
    shared: &Shared,
    from: &[u8],
    rounds: u32,
) -> Result<Sent, Failure> {
    let mut sent = Sent { begins: vec![], cpu: 0.0 };
    let mut cpu = 0.0;
    let mut filled = 0;
    for round in 0..u64::from(rounds) {
        wait(shared, READY, |ready| ready > round)?;
        if round == 0 {
            cpu = cpu_seconds();
        }
        sent.begins.push(now_ns());
        for (index, bytes) in from.chunks(piece).enumerate() {
            shared.write(index * piece, bytes, copier(streaming));
            filled += bytes.len() as u64;
            shared.word(FILLED).store(filled, Ordering::Release);
        }
    }
    sent.cpu = cpu_seconds() - cpu;
    Ok(sent)
}

/// The consumer's half: copies out to `to` what is there, as it comes.
pub(crate) fn copy_out(streaming: bool, shared: &Shared, to: &mut [u8], rounds: u32) -> Result<Received, Failure> {
    let mut received = Received { asked: vec![], ends: vec![], cpu: 0.0 };
    let cpu = cpu_seconds();
    for round in 0..u64::from(rounds) {
        received.asked.push(now_ns());
        shared.word(READY).store(round + 1, Ordering::Release);
        let (base, mut done) = (round * to.len() as u64, 0);
        while done < to.len() {
            let filled = wait(shared, FILLED, |filled| filled > base + done as u64)?;
            let end = usize::try_from(filled - base).unwrap_or(usize::MAX).min(to.len());
            shared.read(done, &mut to[done..end], copier(streaming));
            done = end;
        }
        received.ends.push(now_ns());
    }
    received.cpu = cpu_seconds() - cpu;
    Ok(received)
}

/// Sets all words to zero. Neither process may be in one of the other functions.
pub(crate) fn reset(shared: &Shared) {
    for word in [READY, FILLED, SPIN[0], SPIN[1]] {
        shared.word(word).store(0, Ordering::Release);
    }
}

/// Half of a ping-pong of two spinning processes; the time of each round in nanoseconds.
pub(crate) fn spin(shared: &Shared, starting: bool, rounds: u32) -> Result<Vec<u64>, Failure> {
    let (mine, others) = if starting { (SPIN[0], SPIN[1]) } else { (SPIN[1], SPIN[0]) };
    let mut times = Vec::with_capacity(rounds as usize);
    for round in 1..=u64::from(rounds) {
        let begin = now_ns();
        if starting {
            shared.word(mine).store(round, Ordering::Release);
        }
        wait(shared, others, |other| other >= round)?;
        if !starting {
            shared.word(mine).store(round, Ordering::Release);
        }
        times.push(now_ns() - begin);
    }
    Ok(times)
}

/// Spins until a word is as wanted, letting others run now and then: there may be one core only.
fn wait(shared: &Shared, word: usize, wanted: impl Fn(u64) -> bool) -> Result<u64, Failure> {
    let mut deadline = None;
    loop {
        for _ in 0..2000 {
            let value = shared.word(word).load(Ordering::Acquire);
            if wanted(value) {
                return Ok(value);
            }
            std::hint::spin_loop();
        }
        std::thread::yield_now();
        let now = now_ns();
        if now > *deadline.get_or_insert(now + PATIENCE_NS) {
            return Err(Failure::Failed("the other process doesn't answer over shared memory".into()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::sys::memfd;

    #[test]
    fn copies_arrive_whole_with_one_thread_and_two() {
        let from: Vec<u8> = (0..3_000_001u32).map(|i| (i >> 4) as u8).collect();
        for (streaming, threads) in [(false, 1), (false, 2), (true, 1), (true, 2)] {
            let mut to = vec![0; from.len()];
            let received = copy(streaming, threads, &mut to, &from, 2);
            assert!(to == from, "{streaming} {threads}");
            assert_eq!((received.asked.len(), received.ends.len()), (2, 2));
            assert!(received.asked[0] < received.ends[0] && received.ends[0] <= received.asked[1]);
        }
    }

    #[test]
    fn bytes_go_through_shared_memory_in_any_number_of_rounds() {
        let fd = memfd(0).unwrap();
        let from: Vec<u8> = (0..1_000_003u32).map(|i| ((i * 7) >> 3) as u8).collect();
        let (one, other) = (Shared::map(&fd, from.len()).unwrap(), Shared::map(&fd, from.len()).unwrap());
        for (streaming, piece) in [(false, 256 << 10), (true, 256 << 10), (true, 1 << 20)] {
            reset(&one);
            let mut to = vec![0; from.len()];
            let (sent, received) = std::thread::scope(|scope| {
                let sending = scope.spawn(|| copy_in(streaming, piece, &one, &from, 3).unwrap());
                let received = copy_out(streaming, &other, &mut to, 3).unwrap();
                (sending.join().unwrap(), received)
            });
            assert!(to == from);
            assert_eq!((sent.begins.len(), received.ends.len()), (3, 3));
            assert!(sent.begins.iter().zip(&received.ends).all(|(begin, end)| begin < end));
        }
    }

    #[test]
    fn two_spin_in_turn() {
        let fd = memfd(0).unwrap();
        let (one, other) = (Shared::map(&fd, 0).unwrap(), Shared::map(&fd, 0).unwrap());
        reset(&one);
        std::thread::scope(|scope| {
            scope.spawn(|| spin(&other, false, 1000).unwrap());
            assert_eq!(spin(&one, true, 1000).unwrap().len(), 1000);
        });
        assert_eq!(one.word(SPIN[1]).load(Ordering::Acquire), 1000);
    }
}
