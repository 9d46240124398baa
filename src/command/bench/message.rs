//! How the bench's processes talk: JSON behind a length, over a Unix or a TCP socket, one answer to each request.

use super::report::Clock;
use super::{limits, mover};
use crate::command::Failure;
use crate::command::args::{Mode, Path, Verify};
use crate::command::sys::{Core, OnCore};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Longest message. Stamps of a batch are the largest that there is.
const LONGEST: usize = 4 << 20;
/// Longest greeting, with its head.
pub(crate) const LONGEST_GREETING: usize = 256;
/// Bytes of a ping: one cache line.
pub(crate) const PING: usize = 64;

/// Why nothing comes from a side that is there.
pub(crate) const SILENT: &str = "no answer in time (it is stopped, or this machine or the network is too busy)";
/// Why nothing comes from a side that is not there any more.
const ENDED: &str = "it ended (a line of its own says why, unless it was killed)";

/// Length of the message that begins with these bytes, its head of 4 bytes included; `None` before the head is whole.
pub(crate) fn message_len(begin: &[u8]) -> Option<usize> {
    begin.first_chunk().map(|len| 4 + u32::from_le_bytes(*len) as usize)
}

/// A stream between two processes.
#[derive(Debug)]
pub(crate) enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Read for Stream {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.read(out),
            Self::Tcp(stream) => stream.read(out),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.write(bytes),
            Self::Tcp(stream) => stream.write(bytes),
        }
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Stream {
    /// A TCP stream that sends small messages at once.
    pub(crate) fn tcp(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        Ok(Self::Tcp(stream))
    }

    fn set_deadline(&self, limit: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.set_read_timeout(limit).and_then(|()| stream.set_write_timeout(limit)),
            Self::Tcp(stream) => stream.set_read_timeout(limit).and_then(|()| stream.set_write_timeout(limit)),
        }
    }

    /// Sends `rounds` pings, each after the answer to the one before; the time of each in nanoseconds. Both ends keep to
    /// a core of their own meanwhile, as a producer and a consumer have: left to itself, the scheduler may put both on one
    /// core, where a round trip is no more than two context switches, and does so in some runs and not in others.
    pub(crate) fn ping(&mut self, rounds: u32) -> io::Result<Vec<u64>> {
        let _core = OnCore::keep(Core::First);
        let mut bytes = [1; PING];
        let mut times = Vec::with_capacity(rounds as usize);
        for _ in 0..rounds {
            let start = crate::command::sys::now_ns();
            self.write_all(&bytes)?;
            self.read_exact(&mut bytes)?;
            times.push(crate::command::sys::now_ns() - start);
        }
        Ok(times)
    }

    /// Answers `rounds` pings.
    pub(crate) fn echo(&mut self, rounds: u32) -> io::Result<()> {
        let _core = OnCore::keep(Core::Last);
        let mut bytes = [0; PING];
        for _ in 0..rounds {
            self.read_exact(&mut bytes)?;
            self.write_all(&bytes)?;
        }
        Ok(())
    }
}

/// One end of a conversation.
#[derive(Debug)]
pub(crate) struct Channel {
    stream: Stream,
    /// Who is at the other end, for errors.
    peer: String,
}

impl Channel {
    /// A conversation over `stream` with `peer`. Without a limit it waits for ever.
    pub(crate) fn new(stream: Stream, peer: impl Into<String>, limit: Option<Duration>) -> Result<Self, Failure> {
        let peer = peer.into();
        stream.set_deadline(limit).map_err(|e| Failure::failed(&peer, e))?;
        Ok(Self { stream, peer })
    }

    /// What becomes readable when a message is there, or the end.
    pub(crate) fn readiness(&self) -> BorrowedFd<'_> {
        match &self.stream {
            Stream::Unix(stream) => stream.as_fd(),
            Stream::Tcp(stream) => stream.as_fd(),
        }
    }

    /// Waits no longer than `limit` from now on.
    pub(crate) fn set_limit(&self, limit: Option<Duration>) -> Result<(), Failure> {
        self.stream.set_deadline(limit).map_err(|e| Failure::failed(&self.peer, e))
    }

    /// The stream, for pings; no message may be on its way.
    pub(crate) fn stream(&mut self) -> &mut Stream {
        &mut self.stream
    }

    /// Sends `message`.
    pub(crate) fn send(&mut self, message: &impl Serialize) -> Result<(), Failure> {
        let text = serde_json::to_vec(message).map_err(|e| Failure::failed(&self.peer, e))?;
        if text.len() > LONGEST {
            return Err(Failure::failed(&self.peer, format!("a message of {} bytes is too long", text.len())));
        }
        let mut frame = (text.len() as u32).to_le_bytes().to_vec();
        frame.extend(text);
        self.stream.write_all(&frame).map_err(|e| Failure::failed(&self.peer, self.lost(&e)))
    }

    /// Waits for a message.
    pub(crate) fn receive<T: DeserializeOwned>(&mut self) -> Result<T, Failure> {
        self.next()?.ok_or_else(|| Failure::failed(&self.peer, ENDED))
    }

    /// Waits for a message, or for the end of the conversation.
    pub(crate) fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, Failure> {
        let mut len = [0; 4];
        match self.stream.read_exact(&mut len) {
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            Err(e) => return Err(Failure::failed(&self.peer, self.lost(&e))),
            Ok(()) => {}
        }
        let len = u32::from_le_bytes(len) as usize;
        if len > LONGEST {
            return Err(Failure::failed(&self.peer, "what came is not a message of a bench"));
        }
        let mut text = vec![0; len];
        self.stream.read_exact(&mut text).map_err(|e| Failure::failed(&self.peer, self.lost(&e)))?;
        let message = serde_json::from_slice(&text);
        message
            .map(Some)
            .map_err(|e| Failure::failed(&self.peer, format!("what came is not a message of a bench: {e}")))
    }

    /// Waits for the answer to a request.
    pub(crate) fn answer<T: DeserializeOwned>(&mut self) -> Result<T, Failure> {
        self.receive::<Result<T, Failure>>()?
    }

    /// Sends a request and waits for its answer.
    pub(crate) fn call<T: DeserializeOwned>(&mut self, request: &impl Serialize) -> Result<T, Failure> {
        self.send(request)?;
        self.answer()
    }

    fn lost(&self, error: &io::Error) -> String {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => SILENT.into(),
            io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => ENDED.into(),
            _ => error.to_string(),
        }
    }
}

/// What a row is about, for both sides.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Setup {
    /// Number of the row, for keys that no other row has.
    pub(crate) row: u64,
    pub(crate) path: Path,
    /// The RDMA devices that are named.
    pub(crate) devices: Vec<String>,
    pub(crate) mode: Mode,
    pub(crate) size: u64,
    pub(crate) seed: u64,
    pub(crate) verify: Verify,
    /// Operations that are prepared and checked together.
    pub(crate) batch: u32,
    /// Operations in flight.
    pub(crate) concurrency: u32,
    pub(crate) consumers: u32,
    pub(crate) clock: Clock,
    /// Whether the limit copies through shared memory.
    pub(crate) through: bool,
    /// Seconds that one call may wait.
    pub(crate) patience_s: u64,
}

/// Orders to the producer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum ToProducer {
    /// Make ready for a row. Answer: the address of its endpoint.
    Prepare(Setup),
    /// Fill the payloads of these operations.
    Fill(Batch),
    /// Put them, each when all consumers wait for it. Answer: [`Puts`].
    Put(Batch),
    /// All consumers have them. Answer: processor time since the last `Put` began, in seconds.
    Settle,
    /// Listen for the bare streams of a limit. Answer: the address.
    Listen,
    /// Accept them. Answer: [`limits::Line`]s.
    Accept,
    /// Make ready for bare reads by the consumer's queue pair of this address. Answer: [`limits::rdma::Target`].
    AcceptReads(Vec<u8>),
    /// The sending half of a sample. Answer: [`limits::Sent`].
    Sample(limits::Order),
    /// Answer this many pings. No answer besides.
    Echo(u32),
    /// Give the row's memory back.
    Finish,
}

/// Orders to a consumer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum ToConsumer {
    /// Make ready for a row with the producer at this address.
    Prepare(Setup, mover::Address),
    /// Get these operations. Answer: [`Gets`].
    Gather(Batch),
    /// Check what was gathered last and give it back. Answer: [`Checked`].
    Check,
    /// Connect to the bench itself for pings over TCP.
    Dial(String),
    /// Connect the bare streams of a limit.
    Connect(String),
    /// Make a queue pair for bare reads. Answer: its address.
    OfferReads,
    /// Connect it.
    ConnectReads(limits::rdma::Target),
    /// Set the words of the shared memory to zero.
    Reset,
    /// The receiving half of a sample. Answer: [`limits::Received`].
    Sample(limits::Order),
    /// Answer this many pings, over the dialled TCP connection or this one.
    Echo { rounds: u32, dialled: bool },
    /// Answer this many rounds of spinning over shared memory.
    Spin(u32),
    /// Give the row's memory back.
    Finish,
}

/// Consecutive operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Batch {
    pub(crate) first: u64,
    pub(crate) count: u32,
}

/// Stamps of one put, in nanoseconds of the producer's monotonic clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PutStamps {
    /// The operation's begin: the call of `put`, or of the encoding before it.
    pub(crate) begin: u64,
    pub(crate) called: u64,
    pub(crate) returned: u64,
}

/// Stamps of one get, in nanoseconds of the consumer's monotonic clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GetStamps {
    pub(crate) called: u64,
    pub(crate) returned: u64,
    /// The operation's end: the return of `get`, or of the decoding after it.
    pub(crate) end: u64,
}

/// What putting a batch took.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Puts {
    /// By operation.
    pub(crate) stamps: Vec<PutStamps>,
}

/// What getting a batch took.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Gets {
    /// By operation.
    pub(crate) stamps: Vec<GetStamps>,
    /// Processor time of this process from the first call to the last return, in seconds.
    pub(crate) cpu: f64,
    /// How the payloads travelled.
    pub(crate) journeys: Vec<mover::Journey>,
}

/// What checking a batch found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Checked {
    /// Nanoseconds for reading a byte of every page of each payload; of views only.
    pub(crate) touch: Vec<u64>,
    /// The same of memory of the consumer's own.
    pub(crate) touch_own: Vec<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Channel, Channel) {
        let (a, b) = UnixStream::pair().unwrap();
        let channel = |s| Channel::new(Stream::Unix(s), "the other", Some(Duration::from_secs(10))).unwrap();
        (channel(a), channel(b))
    }

    #[test]
    fn requests_and_answers_cross_whole() {
        let (mut one, mut other) = pair();
        one.send(&ToProducer::Put(Batch { first: 7, count: 2 })).unwrap();
        assert_eq!(other.receive::<ToProducer>().unwrap(), ToProducer::Put(Batch { first: 7, count: 2 }));
        other.send(&Ok::<u64, Failure>(3)).unwrap();
        assert_eq!(one.answer::<u64>().unwrap(), 3);
        other.send(&Err::<u64, Failure>(Failure::Refused("no".into()))).unwrap();
        assert_eq!(one.answer::<u64>(), Err(Failure::Refused("no".into())));
    }

    #[test]
    fn an_end_is_seen_and_garbage_is_refused() {
        let (one, mut other) = pair();
        drop(one);
        assert_eq!(other.next::<ToProducer>(), Ok(None));
        assert!(other.receive::<ToProducer>().unwrap_err().to_string().contains("it ended"));
        let (mut one, mut other) = pair();
        one.stream().write_all(b"GET / HTTP/1.1\r\n").unwrap();
        assert!(other.next::<ToProducer>().unwrap_err().to_string().contains("not a message"));
        let (mut one, mut other) = pair();
        one.stream().write_all(b"\x02\0\0\0{]").unwrap();
        assert!(other.next::<ToProducer>().unwrap_err().to_string().contains("not a message"));
    }

    #[test]
    fn silence_ends_at_the_limit() {
        let (a, _b) = UnixStream::pair().unwrap();
        let mut one = Channel::new(Stream::Unix(a), "the other", Some(Duration::from_millis(20))).unwrap();
        assert_eq!(one.next::<u64>(), Err(Failure::failed("the other", SILENT)));
    }

    #[test]
    fn pings_are_answered_between_messages() {
        let (mut one, mut other) = pair();
        let answering = std::thread::spawn(move || {
            let ToProducer::Echo(rounds) = other.receive().unwrap() else { panic!("an echo was asked for") };
            other.stream().echo(rounds).unwrap();
            other.receive::<u64>().unwrap()
        });
        one.send(&ToProducer::Echo(20)).unwrap();
        let times = one.stream().ping(20).unwrap();
        assert!(times.len() == 20 && times.iter().all(|&t| t > 0));
        one.send(&5u64).unwrap();
        assert_eq!(answering.join().unwrap(), 5);
    }
}
