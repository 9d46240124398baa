//! The control session: the machine that both ends of a control connection run.
//!
//! It has no socket, clock or thread. Bytes of the peer go in by [`receive`](Session::receive) (or straight into
//! [`input_buffer`](Session::input_buffer)); [`next_event`](Session::next_event) gives what they say; frames go in by
//! [`send`](Session::send); bytes for the peer come out of [`output`](Session::output).
//!
//! Without a secret both ends send their Hello at once, and the initiator's frames may follow in the same packet. With
//! one, two handshake frames come first, and everything after them, the Hellos too, is encrypted: a peer without the
//! secret learns nothing of this end but that it wants one (I14).
//!
//! However it ends, both ends know why: the end that finds the fault sends a Reject (or, once established, a Goodbye).
//! So when a session fails, its driver still sends what [`output`](Session::output) holds, shuts its direction down, and
//! reads until the peer closes or a deadline comes; closing at once could destroy the last bytes on their way.
//!
//! What one session can hold is bounded (I9): received bytes by [`Limits::max_frame`] and a fixed read-ahead, bytes to
//! be sent by [`Limits::max_backlog`]. How long it may take is for its driver to limit (I10).

mod buffer;
mod error;
#[cfg(feature = "noise")]
mod noise;
#[cfg(not(feature = "noise"))]
#[path = "session/no_noise.rs"]
mod noise;
mod out;
mod secret;

pub use error::{SendError, SessionError};
pub use secret::{Secret, SecretError};

use crate::address::MAX_UNIX_NAME;
use crate::preface::{Preface, Purpose};
use crate::wire::{
    AddressList, Envelope, Frame, Goodbye, GoodbyeCode, Grant, Hello, Kind, MIN_MAX_FRAME, Reject, RejectCode, Versions,
};
use buffer::Inbox;
use core::fmt;
use noise::{MAX_MESSAGE, Noise, TAG_LEN};
use out::{Channel, Out, decrypt};

/// One end of a control session. See the module's page.
pub struct Session {
    role: Role,
    config: SessionConfig,
    state: State,
    peer: Option<Peer>,
    /// As received.
    inbox: Inbox,
    /// Decrypted; unused in clear.
    clear: Inbox,
    out: Out,
}

/// Which end of the connection a session is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// It connected.
    Initiator,
    /// It accepted.
    Responder,
}

/// What a session is made of.
#[derive(Debug, Clone)]
pub struct SessionConfig {
    /// Who this end is.
    pub identity: Identity,
    /// The shared secret. With one, the connection is authenticated and encrypted, and a peer without it is rejected.
    /// Needs the feature `noise`.
    pub secret: Option<Secret>,
    /// Its limits.
    pub limits: Limits,
    /// The protocol versions to speak; [`Versions::SUPPORTED`], or fewer of them.
    pub versions: Versions,
}

impl SessionConfig {
    /// No secret, the default limits, every version.
    #[must_use]
    pub fn new(identity: Identity) -> Self {
        Self { identity, secret: None, limits: Limits::default(), versions: Versions::SUPPORTED }
    }
}

/// What an end says of itself in its Hello.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// 128 random bits drawn when the endpoint started.
    pub incarnation: [u8; 16],
    /// The machine's boot id.
    pub boot_id: [u8; 16],
    /// Names the process within the machine.
    pub process: [u8; 16],
    /// The abstract Unix socket on which the endpoint hands out descriptors; empty if there is none.
    pub unix_name: Vec<u8>,
    /// Where the endpoint can be reached.
    pub advertised: AddressList,
    /// Bits of what the endpoint can do.
    pub features: u64,
}

/// What a session may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The largest frame taken from the peer, with its header, in bytes; at least [`MIN_MAX_FRAME`].
    pub max_frame: u32,
    /// The most bytes waiting to be sent; more are refused. At least twice [`MIN_MAX_FRAME`].
    pub max_backlog: usize,
}

impl Default for Limits {
    /// Frames of 256 KiB, a backlog of 1 MiB.
    fn default() -> Self {
        Self { max_frame: 256 << 10, max_backlog: 1 << 20 }
    }
}

/// What happened.
#[derive(Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// The peer's Hello is here, and acceptable. First, and once.
    Established(PeerHello<'a>),
    /// A frame of the peer. Never a Hello, Reject or Handshake. After a Goodbye none follows.
    Frame(Frame<'a>),
}

/// The peer as it presents itself.
#[derive(Debug, PartialEq, Eq)]
pub struct PeerHello<'a> {
    /// The protocol version of this session: the newest that both ends speak.
    pub version: u16,
    /// Whether the peer has the secret and the session is encrypted.
    pub encrypted: bool,
    /// Its Hello.
    pub hello: Hello<'a>,
}

/// What a session keeps of its peer's Hello.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// The protocol version of this session.
    pub version: u16,
    /// The largest frame that the peer takes, with its header, in bytes.
    pub max_frame: u32,
    /// The features that both ends have.
    pub features: u64,
}

/// How far a session is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The Noise handshake runs.
    Handshake,
    /// The peer's Hello is awaited.
    Hello,
    /// Frames flow.
    Established,
    /// The peer has said goodbye.
    Left,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Handshake => "during the handshake",
            Self::Hello => "before its Hello",
            Self::Established => "after its Hello",
            Self::Left => "after its Goodbye",
        })
    }
}

enum State {
    Open(Phase),
    Failed(SessionError),
}

/// Bytes received beyond one frame, so that one read of the socket can take several.
const READ_AHEAD: usize = 16 << 10;

/// Handshake frames and Rejects in clear are smaller than what every end takes.
const MAX_CLEAR_FRAME: u32 = MIN_MAX_FRAME;

impl Session {
    /// The end that connected. Its output begins with the preface.
    ///
    /// # Errors
    /// [`SessionError::Config`], [`SessionError::NoNoise`], [`SessionError::Noise`].
    pub fn initiator(config: SessionConfig) -> Result<Self, SessionError> {
        let purpose = if config.secret.is_some() { Purpose::ControlNoise } else { Purpose::Control };
        let preface = Preface::new(purpose).encode();
        let mut session = Self::open(Role::Initiator, config)?;
        session.out.outbox.tail().extend(preface);
        match &session.config.secret {
            None => session.out.hello(&session.config)?,
            Some(secret) => {
                let (noise, message) = Noise::initiator(secret, &preface)?;
                session.out.frame(&Frame::Handshake(&message))?;
                session.out.channel = Channel::Handshake(noise);
            }
        }
        Ok(session)
    }

    /// The end that accepted, and has read `preface` off the connection.
    ///
    /// A peer that comes with a secret where none is set, or without one where one is, is rejected: the session's output
    /// says so and its first [`next_event`](Self::next_event) is the error.
    ///
    /// # Errors
    /// [`SessionError::NotControl`], [`SessionError::Config`], [`SessionError::NoNoise`], [`SessionError::Noise`].
    pub fn responder(config: SessionConfig, preface: &Preface) -> Result<Self, SessionError> {
        let mut session = Self::open(Role::Responder, config)?;
        match (preface.purpose, &session.config.secret) {
            (Purpose::Data { .. }, _) => return Err(SessionError::NotControl),
            (Purpose::Control, None) => session.out.hello(&session.config)?,
            (Purpose::ControlNoise, Some(secret)) => {
                session.out.channel = Channel::Handshake(Noise::responder(secret, &preface.encode())?);
            }
            (Purpose::Control, Some(_)) => session.reject(RejectCode::SecretRequired, ""),
            (Purpose::ControlNoise, None) => session.reject(RejectCode::SecretNotExpected, ""),
        }
        Ok(session)
    }

    fn open(role: Role, config: SessionConfig) -> Result<Self, SessionError> {
        let error = |what, have, limit| Err(SessionError::Config { what, have, limit });
        let Limits { max_frame, max_backlog } = config.limits;
        let least_backlog = 2 * MIN_MAX_FRAME as usize;
        if max_frame < MIN_MAX_FRAME {
            return error("max_frame", max_frame.into(), MIN_MAX_FRAME.into());
        }
        if max_backlog < least_backlog {
            return error("max_backlog", max_backlog as u64, least_backlog as u64);
        }
        if config.identity.unix_name.len() > MAX_UNIX_NAME {
            return error("unix_name", config.identity.unix_name.len() as u64, MAX_UNIX_NAME as u64);
        }
        if config.versions.min > config.versions.max {
            return error("versions.min", config.versions.min.into(), config.versions.max.into());
        }
        if config.secret.is_some() && !noise::AVAILABLE {
            return Err(SessionError::NoNoise);
        }
        let phase = if config.secret.is_some() { Phase::Handshake } else { Phase::Hello };
        let (inbox, clear, out) = (Inbox::default(), Inbox::default(), Out::default());
        Ok(Self { role, config, state: State::Open(phase), peer: None, inbox, clear, out })
    }

    /// Takes bytes of the peer and says how many it took: all of them, unless the input buffer is full; then the events
    /// have to be drained first.
    ///
    /// # Errors
    /// The error that ended the session.
    pub fn receive(&mut self, bytes: &[u8]) -> Result<usize, SessionError> {
        if let State::Failed(error) = &self.state {
            return Err(error.clone());
        }
        let space = self.input_buffer(bytes.len());
        let len = bytes.len().min(space.len());
        space[..len].copy_from_slice(&bytes[..len]);
        self.filled(len);
        Ok(len)
    }

    /// Where the next bytes of the peer go: at least `at_least` bytes of space, unless the input buffer is nearly full.
    /// Empty only if events have to be drained first, or the session has ended. [`filled`](Self::filled) says how many
    /// bytes were written.
    pub fn input_buffer(&mut self, at_least: usize) -> &mut [u8] {
        let frame = self.config.limits.max_frame as usize;
        let whole = if matches!(self.out.channel, Channel::Clear) { frame } else { frame.max(2 + MAX_MESSAGE) };
        match self.state {
            State::Open(_) => self.inbox.space(at_least, whole.saturating_add(READ_AHEAD)),
            State::Failed(_) => &mut [],
        }
    }

    /// `len` bytes of [`input_buffer`](Self::input_buffer) were written.
    ///
    /// # Panics
    /// If the buffer was shorter than that.
    pub fn filled(&mut self, len: usize) {
        self.inbox.filled(len);
    }

    /// The peer has closed its direction. Call it after the events are drained.
    ///
    /// # Errors
    /// [`SessionError::EndOfStream`] if the session was not established or a frame was cut; the error that ended the
    /// session, if it has ended.
    pub fn end_of_input(&mut self) -> Result<(), SessionError> {
        let phase = match &self.state {
            State::Failed(error) => return Err(error.clone()),
            State::Open(phase) => *phase,
        };
        let unread = self.inbox.unread().len() + self.clear.unread().len();
        if unread == 0 && matches!(phase, Phase::Established | Phase::Left) {
            return Ok(());
        }
        let error = SessionError::EndOfStream { phase, unread };
        self.state = State::Failed(error.clone());
        Err(error)
    }

    /// What the peer's bytes say next; `None` when more bytes are needed. It borrows from the session's buffer, which
    /// is not copied.
    ///
    /// # Errors
    /// The error that ended the session. After it nothing more is read; what [`output`](Self::output) holds is still
    /// to be sent.
    pub fn next_event(&mut self) -> Result<Option<Event<'_>>, SessionError> {
        let envelope = match self.next_envelope() {
            Ok(Some(envelope)) => envelope,
            Ok(None) => return Ok(None),
            Err(error) => return Err(Self::fail(&mut self.state, &mut self.out, &self.config, error)),
        };
        let inbox = if matches!(self.out.channel, Channel::Noise(_)) { &mut self.clear } else { &mut self.inbox };
        let bytes = inbox.take(envelope.len);
        let State::Open(phase) = &mut self.state else { return Ok(None) };
        let error = match envelope.frame(bytes) {
            Err(error) => error.into(),
            Ok(Frame::Hello(hello)) if *phase == Phase::Hello => match self.config.versions.common(hello.versions) {
                None => SessionError::Refused { code: RejectCode::Version, versions: Some(hello.versions) },
                Some(version) => {
                    let features = hello.features & self.config.identity.features;
                    self.peer = Some(Peer { version, max_frame: hello.max_frame, features });
                    *phase = Phase::Established;
                    let encrypted = matches!(self.out.channel, Channel::Noise(_));
                    match self.out.release() {
                        Ok(()) => return Ok(Some(Event::Established(PeerHello { version, encrypted, hello }))),
                        Err(error) => error,
                    }
                }
            },
            Ok(Frame::Reject(Reject { code, versions, text })) => {
                SessionError::Rejected { code, versions, text: text.into() }
            }
            Ok(frame) if *phase == Phase::Established && !matches!(frame.kind(), Kind::Hello | Kind::Handshake) => {
                if frame.kind() == Kind::Goodbye {
                    *phase = Phase::Left;
                }
                return Ok(Some(Event::Frame(frame)));
            }
            Ok(frame) => SessionError::Unexpected { kind: frame.kind(), phase: *phase },
        };
        Err(Self::fail(&mut self.state, &mut self.out, &self.config, error))
    }

    /// Takes a frame for the peer.
    ///
    /// Before the session is established a frame of up to [`MIN_MAX_FRAME`] bytes is taken too. In clear it is sent
    /// right behind the Hello; under Noise it is kept, counted in the backlog, and sent once the peer has proved that it
    /// has the secret.
    ///
    /// # Errors
    /// [`SendError`]; nothing of the frame was taken.
    pub fn send(&mut self, frame: &Frame<'_>) -> Result<(), SendError> {
        let kind = frame.kind();
        if matches!(kind, Kind::Hello | Kind::Reject | Kind::Handshake) {
            return Err(SendError::Reserved { kind });
        }
        self.admit(frame.encoded_len())?;
        self.out.append(|bytes| frame.encode(bytes))?;
        self.out.ended = kind == Kind::Goodbye;
        Ok(())
    }

    /// Takes a grant whose `eager_len` eager bytes `fill` writes, in place of [`Grant::eager`]: they are copied once
    /// (twice under Noise).
    ///
    /// # Errors
    /// As [`send`](Self::send); `fill` is then not called.
    pub fn send_grant(
        &mut self,
        grant: &Grant<'_>,
        eager_len: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<(), SendError> {
        self.admit(grant.encoded_len_with(eager_len))?;
        self.out.append(|bytes| grant.encode_with(eager_len, fill, bytes))
    }

    fn admit(&self, need: usize) -> Result<(), SendError> {
        if self.out.ended || matches!(self.state, State::Failed(_)) {
            return Err(SendError::Ended);
        }
        let limit = self.max_send_frame();
        if need > limit as usize {
            return Err(SendError::TooLarge { need, limit });
        }
        // Under Noise a frame grows by a length and a tag for each message it needs.
        let grown = match self.out.channel {
            Channel::Clear => need,
            _ => need + need.div_ceil(MAX_MESSAGE - TAG_LEN) * (2 + TAG_LEN),
        };
        let have = self.config.limits.max_backlog.saturating_sub(self.backlog());
        if grown > have {
            return Err(SendError::Backlog { need: grown, have });
        }
        Ok(())
    }

    /// The largest frame that can be sent now, header included: what the peer takes, or before its Hello
    /// [`MIN_MAX_FRAME`].
    #[must_use]
    pub fn max_send_frame(&self) -> u32 {
        self.peer.map_or(MIN_MAX_FRAME, |peer| peer.max_frame)
    }

    /// Ends the session because this end does not want the peer (too many peers, a policy). The peer is told `code`
    /// and `text`; what was waiting to be sent goes before it, but for frames kept back under Noise.
    pub fn reject(&mut self, code: RejectCode, text: &str) {
        if let State::Open(_) = self.state {
            let versions = self.config.versions;
            // A Reject has no field that could be too long, and a channel that fails has no other way to tell.
            let _ = self.out.last(&Frame::Reject(Reject { code, versions, text }));
            self.state = State::Failed(SessionError::Refused { code, versions: None });
        }
    }

    /// Bytes for the peer.
    #[must_use]
    pub fn output(&self) -> &[u8] {
        self.out.outbox.unsent()
    }

    /// `len` bytes of [`output`](Self::output) were sent.
    ///
    /// # Panics
    /// If there were fewer.
    pub fn consume_output(&mut self, len: usize) {
        self.out.outbox.consume(len);
    }

    /// Bytes waiting to be sent, with those kept back until the session is established.
    #[must_use]
    pub fn backlog(&self) -> usize {
        self.output().len() + self.out.kept.len()
    }

    /// How far the session is, or why it ended.
    ///
    /// # Errors
    /// The error that ended the session.
    pub fn phase(&self) -> Result<Phase, &SessionError> {
        match &self.state {
            State::Open(phase) => Ok(*phase),
            State::Failed(error) => Err(error),
        }
    }

    /// What is kept of the peer's Hello, once it is here.
    #[must_use]
    pub const fn peer(&self) -> Option<&Peer> {
        self.peer.as_ref()
    }

    /// Which end this is.
    #[must_use]
    pub const fn role(&self) -> Role {
        self.role
    }

    /// The next whole frame, after whatever handshake and decryption it takes.
    fn next_envelope(&mut self) -> Result<Option<Envelope>, SessionError> {
        loop {
            if let State::Failed(error) = &self.state {
                return Err(error.clone());
            }
            match &mut self.out.channel {
                Channel::Clear => return Ok(Envelope::read(self.inbox.unread(), self.config.limits.max_frame)?),
                Channel::Noise(noise) => {
                    let envelope = Envelope::read(self.clear.unread(), self.config.limits.max_frame)?;
                    if envelope.is_some() || !decrypt(noise, &mut self.inbox, &mut self.clear)? {
                        return Ok(envelope);
                    }
                }
                Channel::Handshake(_) => {
                    let Some(envelope) = Envelope::read(self.inbox.unread(), MAX_CLEAR_FRAME)? else { return Ok(None) };
                    if envelope.kind != Kind::Handshake {
                        return Ok(Some(envelope));
                    }
                    let Frame::Handshake(message) = envelope.frame(self.inbox.take(envelope.len))? else {
                        return Ok(None);
                    };
                    self.out.handshake(message, &self.config)?;
                    self.state = State::Open(Phase::Hello);
                }
            }
        }
    }

    /// Ends the session, tells the peer, and gives the error back.
    fn fail(state: &mut State, out: &mut Out, config: &SessionConfig, error: SessionError) -> SessionError {
        let State::Open(phase) = state else { return error };
        let reject = |code| Frame::Reject(Reject { code, versions: config.versions, text: "" });
        let last = match (&error, phase) {
            (SessionError::Rejected { .. }, _) => None,
            (SessionError::Refused { code, .. }, _) => Some(reject(*code)),
            (_, Phase::Established | Phase::Left) => Some(Frame::Goodbye(Goodbye { code: GoodbyeCode::Protocol })),
            _ => Some(reject(RejectCode::Malformed)),
        };
        if let Some(frame) = last.filter(|_| !out.ended) {
            // The session ends with `error` whether or not this can be told.
            let _ = out.last(&frame);
        }
        *state = State::Failed(error.clone());
        error
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("role", &self.role)
            .field("phase", &self.phase())
            .field("peer", &self.peer)
            .field("received", &(self.inbox.unread().len() + self.clear.unread().len()))
            .field("backlog", &self.backlog())
            .finish_non_exhaustive()
    }
}
