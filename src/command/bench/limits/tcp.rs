//! The limit of TCP: bare sockets between the two processes, blocking, whole writes, into touched memory.

use super::{Line, Received, Sent};
use crate::command::Failure;
use crate::command::sys::{congestion, cpu_seconds, now_ns, set_congestion};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Barrier;
use std::time::Duration;

/// The congestion controls tried besides the system's.
const CONTROLS: [&str; 2] = ["reno", "cubic"];
/// Connections with each congestion control.
const STREAMS: usize = 2;
/// How long a silent connection is waited for.
const PATIENCE: Duration = Duration::from_secs(60);

/// The connections of all lines, in one order on both sides: by line, then by stream.
#[derive(Debug)]
pub(crate) struct Connections(Vec<TcpStream>);

impl Connections {
    fn all() -> usize {
        (1 + CONTROLS.len()) * STREAMS
    }

    /// Connects to the producer's listener at `address`.
    pub(crate) fn connect(address: &str) -> io::Result<Self> {
        let connect = |index: usize| {
            let mut stream = ready(TcpStream::connect(address)?)?;
            stream.write_all(&[index as u8])?;
            Ok(stream)
        };
        (0..Self::all()).map(connect).collect::<io::Result<_>>().map(Self)
    }

    /// Accepts what the consumer connected, and sets the congestion control of each line. A line whose congestion
    /// control the system lacks, keeps for root, or has as its own anyway is left out.
    pub(crate) fn accept(listener: &TcpListener) -> io::Result<(Self, Vec<Line>)> {
        let mut streams: Vec<Option<TcpStream>> = (0..Self::all()).map(|_| None).collect();
        while streams.iter().any(Option::is_none) {
            let mut stream = ready(listener.accept()?.0)?;
            let mut index = [0];
            stream.read_exact(&mut index)?;
            let place = streams.get_mut(usize::from(index[0])).filter(|place| place.is_none());
            *place.ok_or_else(|| io::Error::other("a stranger connected"))? = Some(stream);
        }
        let streams: Vec<TcpStream> = streams.into_iter().flatten().collect();
        let system = congestion(&streams[0])?;
        let mut lines = vec![Line { index: 0, label: format!("{system} (system)") }];
        for (index, control) in (1..).zip(CONTROLS).filter(|(_, control)| *control != system) {
            let mut of_line = streams.iter().skip(index * STREAMS).take(STREAMS);
            if of_line.all(|stream| set_congestion(stream, control).is_ok()) {
                lines.push(Line { index: index as u32, label: control.into() });
            }
        }
        Ok((Self(streams), lines))
    }

    fn of(&self, line: &Line, streams: u32) -> Result<&[TcpStream], Failure> {
        let start = line.index as usize * STREAMS;
        self.0.get(start..start + streams as usize).ok_or_else(|| Failure::Failed("no such connection".into()))
    }
}

fn ready(stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// The producer's half: says on each stream of a line that it is ready, and sends `from`, each stream its share, when the
/// consumer asks.
pub(crate) fn send(
    connections: &Connections,
    line: &Line,
    streams: u32,
    write: usize,
    from: &[u8],
    rounds: u32,
) -> Result<Sent, Failure> {
    let streams = connections.of(line, streams)?;
    let share = from.len().div_ceil(streams.len()).max(1);
    let send = |mut stream: &TcpStream, bytes: &[u8]| -> io::Result<Vec<u64>> {
        let mut begins = vec![];
        stream.write_all(&[1])?;
        for _ in 0..rounds {
            stream.read_exact(&mut [0])?;
            begins.push(now_ns());
            for piece in bytes.chunks(write) {
                stream.write_all(piece)?;
            }
        }
        Ok(begins)
    };
    let cpu = cpu_seconds();
    let begins = std::thread::scope(|scope| {
        let mut shares = streams.iter().zip(from.chunks(share));
        let first = shares.next();
        let others: Vec<_> = shares.map(|(stream, bytes)| scope.spawn(move || send(stream, bytes))).collect();
        let mut begins = vec![first.map_or(Ok(vec![]), |(stream, bytes)| send(stream, bytes))?];
        for other in others {
            begins.push(other.join().map_err(|_| io::Error::other("a sender panicked"))??);
        }
        Ok(begins)
    });
    let begins: Vec<Vec<u64>> = begins.map_err(|e: io::Error| Failure::failed("bare TCP", e))?;
    let earliest = |round: usize| begins.iter().map(|of_stream| of_stream[round]).min().unwrap_or(0);
    Ok(Sent { begins: (0..rounds as usize).map(earliest).collect(), cpu: cpu_seconds() - cpu })
}

/// The consumer's half: asks once the producer is ready, for the time until then belongs to nobody, and receives into
/// `to`.
pub(crate) fn receive(
    connections: &Connections,
    line: &Line,
    streams: u32,
    read: usize,
    to: &mut [u8],
    rounds: u32,
) -> Result<Received, Failure> {
    let streams = connections.of(line, streams)?;
    let share = to.len().div_ceil(streams.len()).max(1);
    let barrier = Barrier::new(to.chunks(share).count());
    let receive = |mut stream: &TcpStream, bytes: &mut [u8]| -> io::Result<Vec<(u64, u64)>> {
        let mut stamps = vec![];
        let mut failure = stream.read_exact(&mut [0]).err();
        for _ in 0..rounds {
            barrier.wait(); // a stream that failed keeps step, so that the others don't wait for ever
            let asked = now_ns();
            let round = |mut stream: &TcpStream, bytes: &mut [u8]| {
                stream.write_all(&[1])?;
                bytes.chunks_mut(read).try_for_each(|piece| stream.read_exact(piece))
            };
            if failure.is_none() {
                failure = round(stream, bytes).err();
            }
            stamps.push((asked, now_ns()));
        }
        stream.flush()?;
        failure.map_or(Ok(stamps), Err)
    };
    let cpu = cpu_seconds();
    let stamps = std::thread::scope(|scope| {
        let mut shares = streams.iter().zip(to.chunks_mut(share));
        let first = shares.next();
        let receive = &receive;
        let others: Vec<_> = shares.map(|(stream, bytes)| scope.spawn(move || receive(stream, bytes))).collect();
        let mut stamps = vec![first.map_or(Ok(vec![]), |(stream, bytes)| receive(stream, bytes))?];
        for other in others {
            stamps.push(other.join().map_err(|_| io::Error::other("a receiver panicked"))??);
        }
        Ok(stamps)
    });
    let stamps: Vec<Vec<(u64, u64)>> = stamps.map_err(|e: io::Error| Failure::failed("bare TCP", e))?;
    let asked = |round: usize| stamps.iter().map(|of_stream| of_stream[round].0).min().unwrap_or(0);
    let end = |round: usize| stamps.iter().map(|of_stream| of_stream[round].1).max().unwrap_or(0);
    let rounds = rounds as usize;
    Ok(Received {
        asked: (0..rounds).map(asked).collect(),
        ends: (0..rounds).map(end).collect(),
        cpu: cpu_seconds() - cpu,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_carries_every_byte_on_one_stream_and_two() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let connecting = std::thread::spawn(move || Connections::connect(&address).unwrap());
        let (sending, lines) = Connections::accept(&listener).unwrap();
        let receiving = connecting.join().unwrap();
        assert!(lines[0].label.ends_with("(system)"));
        let controls = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_allowed_congestion_control").unwrap();
        if controls.contains("reno") {
            assert!(lines.iter().any(|line| line.label.starts_with("reno")), "{lines:?}");
        }
        let from: Vec<u8> = (0..2_000_001u32).map(|i| ((i * 13) >> 2) as u8).collect();
        for line in &lines {
            for (streams, rounds) in [(1, 1), (2, 3)] {
                let mut to = vec![0; from.len()];
                let ((ready, sent), received) = std::thread::scope(|scope| {
                    let sender = scope.spawn(|| {
                        let ready = now_ns();
                        (ready, send(&sending, line, streams, 256 << 10, &from, rounds).unwrap())
                    });
                    let received = receive(&receiving, line, streams, 256 << 10, &mut to, rounds).unwrap();
                    (sender.join().unwrap(), received)
                });
                assert!(ready < received.asked[0], "a producer that is not ready is waited for, outside the time");
                assert!(to == from, "{line:?} {streams}");
                assert_eq!((sent.begins.len(), received.ends.len()), (rounds as usize, rounds as usize));
                assert!(sent.begins.iter().zip(&received.ends).all(|(begin, end)| begin < end));
                assert!(received.asked.iter().zip(&sent.begins).all(|(asked, begin)| asked < begin));
            }
        }
    }
}
