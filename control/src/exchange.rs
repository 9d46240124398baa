//! A session over a socket, for a caller who has nothing else to do: each call waits, to a deadline.
//!
//! This is the smallest driver of a [`Session`], for tests, tools and examples. One that serves many peers runs a
//! readiness loop instead, and does what [`Connection`] does in steps.

use crate::preface::{PREFACE_VERSION, Preface, PrefaceError, Purpose};
use crate::session::{Event, Identity, SendError, Session, SessionConfig, SessionError};
use crate::socket::{Listener, Readiness, Received, SocketError, SocketName, Stream, wait};
use crate::wire::{Frame, Hello, Reject, RejectCode, Versions};
use core::fmt;
use std::os::fd::AsFd;
use std::time::Instant;

/// An established session over a socket.
#[derive(Debug)]
pub struct Connection {
    stream: Stream,
    session: Session,
    peer: Identity,
}

/// What an accepted connection is for.
#[derive(Debug)]
pub enum Accepted {
    /// A control session, established.
    Control(Box<Connection>),
    /// Data of the queue pair to which this token was given; its bytes follow.
    Data {
        /// The connection.
        stream: Stream,
        /// The token, which the caller checks.
        token: [u8; 16],
    },
}

impl Connection {
    /// Connects to `name` and runs the session until it is established.
    ///
    /// # Errors
    /// [`ExchangeError`].
    pub fn connect(name: &SocketName, config: SessionConfig, deadline: Instant) -> Result<Self, ExchangeError> {
        let session = Session::initiator(config)?;
        let stream = Stream::connect(name)?;
        while !stream.connected()? {
            ready(&stream, Readiness::Write, deadline, "the connection")?;
        }
        Self::establish(stream, session, deadline)
    }

    /// Waits for one connection and, if it is a control connection, until its session is established.
    ///
    /// # Errors
    /// [`ExchangeError`].
    pub fn accept(listener: &Listener, config: SessionConfig, deadline: Instant) -> Result<Accepted, ExchangeError> {
        let stream = loop {
            if let Some(stream) = listener.accept()? {
                break stream;
            }
            ready(listener, Readiness::Read, deadline, "accept")?;
        };
        let preface = match read_preface(&stream, deadline)? {
            Ok(preface) => preface,
            Err(error) => {
                if matches!(error, PrefaceError::Version { .. }) {
                    let versions = Versions { min: PREFACE_VERSION, max: PREFACE_VERSION };
                    let mut last = Vec::new();
                    let reject = Frame::Reject(Reject { code: RejectCode::Version, versions, text: "preface" });
                    reject.encode(&mut last).map_err(SendError::from)?;
                    part(&stream, &last, deadline);
                }
                return Err(error.into());
            }
        };
        if let Purpose::Data { token } = preface.purpose {
            return Ok(Accepted::Data { stream, token });
        }
        let session = Session::responder(config, &preface)?;
        Ok(Accepted::Control(Box::new(Self::establish(stream, session, deadline)?)))
    }

    fn establish(stream: Stream, session: Session, deadline: Instant) -> Result<Self, ExchangeError> {
        let nobody = Identity {
            incarnation: [0; 16],
            boot_id: [0; 16],
            process: [0; 16],
            unix_name: Vec::new(),
            advertised: crate::wire::AddressList::new(),
            features: 0,
        };
        let mut connection = Self { stream, session, peer: nobody };
        // The first event is the peer's Hello, or there is none.
        connection.peer = connection
            .event(deadline, |event| match event {
                Event::Established(peer) => Some(identity(&peer.hello)),
                Event::Frame(_) => None,
            })?
            .ok_or(ExchangeError::TimedOut { waiting_for: "the peer's Hello" })?;
        connection.flush(deadline)?;
        Ok(connection)
    }

    /// Who the peer says it is.
    #[must_use]
    pub const fn peer(&self) -> &Identity {
        &self.peer
    }

    /// The session.
    #[must_use]
    pub const fn session(&self) -> &Session {
        &self.session
    }

    /// The socket.
    #[must_use]
    pub const fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Sends `frame`; all of it is with the kernel when this returns.
    ///
    /// # Errors
    /// [`ExchangeError`].
    pub fn send(&mut self, frame: &Frame<'_>, deadline: Instant) -> Result<(), ExchangeError> {
        self.session.send(frame)?;
        self.flush(deadline)
    }

    /// Waits for the peer's next frame and gives it to `read`.
    ///
    /// # Errors
    /// [`ExchangeError`]; [`ExchangeError::Closed`] when the peer has closed the connection between two frames.
    pub fn receive<T>(&mut self, deadline: Instant, read: impl FnOnce(Frame<'_>) -> T) -> Result<T, ExchangeError> {
        // Established comes once, and `establish` took it.
        self.event(deadline, |event| match event {
            Event::Frame(frame) => Some(read(frame)),
            Event::Established(_) => None,
        })?
        .ok_or(ExchangeError::Closed)
    }

    /// Sends until nothing is left; reads nothing.
    fn flush(&mut self, deadline: Instant) -> Result<(), ExchangeError> {
        while !self.session.output().is_empty() {
            match self.stream.send(self.session.output())? {
                0 => ready(&self.stream, Readiness::Write, deadline, "room to send")?,
                sent => self.session.consume_output(sent),
            }
        }
        Ok(())
    }

    /// The next event, after whatever sending and receiving it takes.
    fn event<T>(&mut self, deadline: Instant, read: impl FnOnce(Event<'_>) -> T) -> Result<T, ExchangeError> {
        loop {
            match self.session.next_event() {
                Ok(Some(event)) => return Ok(read(event)),
                Ok(None) => {}
                Err(error) => {
                    part(&self.stream, self.session.output(), deadline);
                    return Err(error.into());
                }
            }
            // A connection that takes nothing more may still have the reason to read, so that comes first.
            let received = match self.stream.receive(self.session.input_buffer(1)) {
                Ok(Received::Bytes(len)) => {
                    self.session.filled(len);
                    continue;
                }
                other => other,
            };
            let sent = match self.session.output() {
                [] => 0,
                output => self.stream.send(output)?,
            };
            self.session.consume_output(sent);
            match received? {
                Received::End => {
                    self.session.end_of_input()?;
                    return Err(ExchangeError::Closed);
                }
                _ if sent > 0 => {}
                _ => {
                    let idle = self.session.output().is_empty();
                    let readiness = if idle { Readiness::Read } else { Readiness::ReadOrWrite };
                    ready(&self.stream, readiness, deadline, "the peer")?;
                }
            }
        }
    }
}

/// The last words of this end: sends them, closes the direction, and reads until the peer has closed too. Closing a
/// socket with bytes unread would reset the connection, and the peer might lose the words.
fn part(stream: &Stream, mut last: &[u8], deadline: Instant) {
    let mut scratch = [0; 4096];
    let mut shut = false;
    loop {
        if !last.is_empty() {
            match stream.send(last) {
                Ok(sent) => last = &last[sent..],
                Err(_) => return,
            }
        }
        if last.is_empty() && !shut {
            shut = true;
            if stream.shutdown_send().is_err() {
                return;
            }
        }
        let readiness = match stream.receive(&mut scratch) {
            Ok(Received::Bytes(_)) => continue,
            Ok(Received::Nothing) if shut => Readiness::Read,
            Ok(Received::Nothing) => Readiness::ReadOrWrite,
            Ok(Received::End) if !shut => Readiness::Write,
            Ok(Received::End) | Err(_) => return,
        };
        if ready(stream, readiness, deadline, "the peer to close").is_err() {
            return;
        }
    }
}

/// Reads exactly the preface, and not one byte of what follows, which may be another's to read.
fn read_preface(stream: &Stream, deadline: Instant) -> Result<Result<Preface, PrefaceError>, ExchangeError> {
    let mut bytes = [0; Preface::LEN];
    let mut have = 0;
    while have < bytes.len() {
        match stream.receive(&mut bytes[have..])? {
            Received::Bytes(len) => have += len,
            Received::Nothing => ready(stream, Readiness::Read, deadline, "the preface")?,
            Received::End => return Err(ExchangeError::Closed),
        }
    }
    Ok(Preface::decode(&bytes))
}

fn ready(
    fd: &impl AsFd,
    readiness: Readiness,
    deadline: Instant,
    waiting_for: &'static str,
) -> Result<(), ExchangeError> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(ExchangeError::TimedOut { waiting_for });
    }
    // Whether it is ready or the time is up, the caller tries again; if in vain, it comes back here.
    wait(fd.as_fd(), readiness, Some(left)).map_err(|error| SocketError::new("poll", error))?;
    Ok(())
}

fn identity(hello: &Hello<'_>) -> Identity {
    Identity {
        incarnation: hello.incarnation,
        boot_id: hello.boot_id,
        process: hello.process,
        unix_name: hello.unix_name.to_vec(),
        advertised: hello.advertised.to_list(),
        features: hello.features,
    }
}

/// Why an exchange ended.
#[derive(Debug)]
#[non_exhaustive]
pub enum ExchangeError {
    /// The socket failed.
    Socket(SocketError),
    /// The peer's first bytes are no preface of ours.
    Preface(PrefaceError),
    /// The session ended.
    Session(SessionError),
    /// The session did not take the frame.
    Send(SendError),
    /// The deadline came first.
    TimedOut {
        /// What was waited for.
        waiting_for: &'static str,
    },
    /// The peer has closed the connection.
    Closed,
}

impl fmt::Display for ExchangeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket(error) => error.fmt(f),
            Self::Preface(error) => error.fmt(f),
            Self::Session(error) => error.fmt(f),
            Self::Send(error) => error.fmt(f),
            Self::TimedOut { waiting_for } => write!(f, "timed out waiting for {waiting_for}"),
            Self::Closed => f.write_str("the peer closed the connection"),
        }
    }
}

impl std::error::Error for ExchangeError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Socket(error) => Some(error),
            Self::Preface(error) => Some(error),
            Self::Session(error) => Some(error),
            Self::Send(error) => Some(error),
            Self::TimedOut { .. } | Self::Closed => None,
        }
    }
}

macro_rules! from {
    ($($error:ident => $variant:ident,)*) => {$(
        impl From<$error> for ExchangeError {
            fn from(error: $error) -> Self {
                Self::$variant(error)
            }
        }
    )*};
}

from! {
    SocketError => Socket,
    PrefaceError => Preface,
    SessionError => Session,
    SendError => Send,
}
