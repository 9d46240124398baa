//! How the benches of two machines meet: one listens, the other connects, and both say which build they are.
//!
//! Whoever else reaches the port (a browser, a scanner, a client that says nothing) is dropped with a line on standard
//! error, and holds up nobody: the listening side waits for all of them at once.

use super::message::{Channel, LONGEST_GREETING, Stream, message_len};
use crate::command::{Failure, sys};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::io::{ErrorKind, Read};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// How long either side may take for its greeting, and the network for a connection.
const GREETING: Duration = Duration::from_secs(5);
/// Connections whose greeting is waited for at one time; one more, and the oldest is dropped.
const STRANGERS: usize = 64;

/// The first message in either direction.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Hello {
    bench: String,
}

impl Hello {
    fn ours() -> Self {
        Self { bench: format!("towline {}", env!("CARGO_PKG_VERSION")) }
    }

    /// Why it is no greeting of the same build, if so.
    fn check(&self) -> Result<(), Failure> {
        if *self == Self::ours() {
            return Ok(());
        }
        let (theirs, ours) = (&self.bench, Self::ours().bench);
        Err(Failure::Refused(format!("the other end is of {theirs}, this one of {ours}; both must be the same")))
    }
}

/// Connects to a bench that listens at `address`.
pub(crate) fn connect(address: &str) -> Result<Channel, Failure> {
    let failed = |why: String| Failure::failed(format!("connecting to {address}"), why);
    let stream = dial(address).map_err(failed)?;
    let stream = Stream::tcp(stream).map_err(|e| failed(e.to_string()))?;
    let mut channel = Channel::new(stream, address, Some(GREETING))?;
    channel.send(&Hello::ours())?;
    let hello: Hello = channel.receive().map_err(|failure| {
        failed(format!("it does not answer as `towline bench --listen` does ({failure}); check host and port"))
    })?;
    hello.check().map_err(|failure| failure.within(address))?;
    Ok(channel)
}

fn dial(address: &str) -> Result<TcpStream, String> {
    let names = address.to_socket_addrs().map_err(|e| format!("{e} (check the host's name)"))?;
    let mut last = "the name has no address (check the host's name)".to_string();
    for name in names {
        match TcpStream::connect_timeout(&name, GREETING) {
            Ok(stream) => return Ok(stream),
            Err(e) => last = format!("{e} (is `towline bench --listen {address}` running there?)"),
        }
    }
    Err(last)
}

/// Listens at `address` until a bench connects; its channel, the address at which it reached this side, and its own.
pub(crate) fn accept(address: &str) -> Result<(Channel, SocketAddr, SocketAddr), Failure> {
    let failed = |e: std::io::Error| Failure::failed(format!("listening on {address}"), e);
    let listener = TcpListener::bind(address).map_err(|e| match e.kind() {
        ErrorKind::AddrNotAvailable => Failure::failed(
            format!("listening on {address}"),
            format!("{e} (0.0.0.0 is every address of this machine)"),
        ),
        ErrorKind::AddrInUse => Failure::failed(format!("listening on {address}"), format!("{e} (take another port)")),
        _ if e.raw_os_error().is_none() => {
            Failure::failed(format!("listening on {address}"), format!("{e} (check the host's name)"))
        }
        _ => failed(e),
    })?;
    listener.set_nonblocking(true).map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    eprintln!("listening on {bound}; {}", hint(bound));
    let mut strangers: VecDeque<Stranger> = VecDeque::new();
    loop {
        let now = Instant::now();
        strangers.retain(|stranger| {
            let late = stranger.until <= now;
            if late {
                stranger.drop_line(&format!("it sent no greeting for {} s", GREETING.as_secs()));
            }
            !late
        });
        let wait = strangers.front().map_or(Duration::MAX, |first| first.until.saturating_duration_since(now));
        let mut streams = vec![listener.as_fd()];
        streams.extend(strangers.iter().map(|stranger| stranger.stream.as_fd()));
        // Rounded up: a wait that ends early would only be begun once more.
        let ready = sys::readable(&streams, wait.saturating_add(Duration::from_millis(1))).map_err(failed)?;
        let (accepting, heard) = ready.split_first().map_or((false, &[][..]), |(first, rest)| (*first, rest));
        let mut heard = heard.iter();
        let mut kept = VecDeque::new();
        for mut stranger in strangers.drain(..) {
            if heard.next() != Some(&true) {
                kept.push_back(stranger);
                continue;
            }
            match stranger.listen() {
                Ok(None) => kept.push_back(stranger),
                Ok(Some(hello)) => {
                    let peer = stranger.peer;
                    match stranger.welcome(&hello) {
                        Ok((channel, local)) => return Ok((channel, local, peer)),
                        Err(failure) => dropped(peer, &failure.to_string()),
                    }
                }
                Err(why) => stranger.drop_line(&why),
            }
        }
        strangers = kept;
        if accepting {
            take(&listener, &mut strangers).map_err(failed)?;
        }
    }
}

/// Takes the connections that wait to be accepted. Where the system gives no more (descriptors, memory), those that came
/// first make way: left in the queue, the others would keep the listener readable without end.
fn take(listener: &TcpListener, strangers: &mut VecDeque<Stranger>) -> std::io::Result<()> {
    loop {
        let (stream, peer) = match listener.accept() {
            Ok(accepted) => accepted,
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
            Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => continue,
            Err(e) => match strangers.pop_front() {
                Some(oldest) => {
                    oldest.drop_line(&format!("another connection could not be accepted: {e}"));
                    continue;
                }
                None => return Err(e),
            },
        };
        if stream.set_nonblocking(true).is_err() {
            continue; // it is gone again
        }
        if strangers.len() >= STRANGERS
            && let Some(oldest) = strangers.pop_front()
        {
            oldest.drop_line("too many connections without a greeting");
        }
        strangers.push_back(Stranger { stream, peer, heard: vec![], until: Instant::now() + GREETING });
    }
}

/// What to run at the other end for a bench that listens at `bound`.
fn hint(bound: SocketAddr) -> String {
    match bound.ip() {
        ip if ip.is_loopback() => format!("from this machine alone: towline bench --connect {bound}"),
        ip if ip.is_unspecified() => {
            format!("on the other machine: towline bench --connect <this machine>:{}", bound.port())
        }
        _ => format!("on the other machine: towline bench --connect {bound}"),
    }
}

fn dropped(peer: SocketAddr, why: &str) {
    eprintln!("{peer}: dropped: {why}; still listening");
}

/// A connection that has not said yet what it is.
struct Stranger {
    stream: TcpStream,
    peer: SocketAddr,
    heard: Vec<u8>,
    until: Instant,
}

impl Stranger {
    /// Takes what has come, and no byte beyond the greeting; the greeting, when it is whole.
    fn listen(&mut self) -> Result<Option<Hello>, String> {
        loop {
            let missing = match message_len(&self.heard) {
                Some(len) if len > LONGEST_GREETING => return Err(self.no_bench()),
                Some(len) => len.saturating_sub(self.heard.len()),
                None => 4 - self.heard.len(),
            };
            if missing == 0 {
                let hello = serde_json::from_slice(self.heard.get(4..).unwrap_or_default());
                return hello.map(Some).map_err(|_| self.no_bench());
            }
            let mut bytes = [0; LONGEST_GREETING];
            match self.stream.read(&mut bytes[..missing]) {
                Ok(0) => return Err("it closed the connection without a greeting".into()),
                Ok(len) => self.heard.extend(&bytes[..len]),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e.to_string()),
            }
        }
    }

    fn no_bench(&self) -> String {
        let begin: String =
            self.heard.iter().take(16).map(|byte| char::from(*byte).escape_default().to_string()).collect();
        format!("it is no `towline bench --connect`: it begins with \"{begin}\"")
    }

    /// Answers a greeting, in any case: who has another build is told which this one is.
    fn welcome(self, hello: &Hello) -> Result<(Channel, SocketAddr), Failure> {
        let Self { stream, peer, .. } = self;
        let failed = |e| Failure::failed(peer, e);
        stream.set_nonblocking(false).map_err(failed)?;
        let local = stream.local_addr().map_err(failed)?;
        let mut channel = Channel::new(Stream::tcp(stream).map_err(failed)?, peer.to_string(), Some(GREETING))?;
        channel.send(&Hello::ours())?;
        hello.check()?;
        channel.set_limit(None)?;
        Ok((channel, local))
    }

    fn drop_line(&self, why: &str) {
        dropped(self.peer, why);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hint_can_be_followed() {
        let hint = |bound: &str| hint(bound.parse().unwrap());
        assert_eq!(hint("127.0.0.1:7000"), "from this machine alone: towline bench --connect 127.0.0.1:7000");
        assert_eq!(hint("[::1]:7000"), "from this machine alone: towline bench --connect [::1]:7000");
        assert!(hint("0.0.0.0:7000").ends_with("--connect <this machine>:7000"));
        assert!(hint("192.0.2.1:7000").ends_with("--connect 192.0.2.1:7000"));
    }

    #[test]
    fn other_builds_are_told_which_this_one_is() {
        let other = Hello { bench: "towline 99.0.0".into() };
        let failure = other.check().unwrap_err();
        assert!(matches!(failure, Failure::Refused(_)), "{failure}");
        assert!(failure.to_string().contains("99.0.0") && failure.to_string().contains(env!("CARGO_PKG_VERSION")));
        assert_eq!(Hello::ours().check(), Ok(()));
    }
}
