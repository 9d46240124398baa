//! How a session ends badly, and why a frame is not sent.

use super::Phase;
use crate::wire::{EncodeError, Kind, RejectCode, Versions, WireError};
use core::fmt;

/// Why a session ended. It stays ended: every later call gives the same error.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum SessionError {
    /// The peer does not accept the connection.
    Rejected {
        /// Its reason.
        code: RejectCode,
        /// The protocol versions that the peer speaks.
        versions: Versions,
        /// Its words; printed escaped.
        text: String,
    },
    /// This end does not accept the peer, and has told it so.
    Refused {
        /// The reason.
        code: RejectCode,
        /// The protocol versions that the peer speaks, where they are known.
        versions: Option<Versions>,
    },
    /// The peer's bytes are no frame.
    Wire(WireError),
    /// A frame that has no place where it came.
    Unexpected {
        /// The frame.
        kind: Kind,
        /// How far the session was.
        phase: Phase,
    },
    /// A message under Noise can't be decrypted, or is none: it was changed on its way.
    Decrypt,
    /// Noise failed on this side.
    Noise {
        /// At what.
        what: &'static str,
    },
    /// A secret is set, and this build has no Noise (feature `noise`).
    NoNoise,
    /// The preface is one of a data connection.
    NotControl,
    /// A setting is out of range.
    Config {
        /// Which.
        what: &'static str,
        /// What it is.
        have: u64,
        /// What it has to be: at least or at most this.
        limit: u64,
    },
    /// The stream ended before the session was established, or within a frame.
    EndOfStream {
        /// How far the session was.
        phase: Phase,
        /// Bytes of the frame that was cut.
        unread: usize,
    },
}

impl SessionError {
    /// Whether connecting again, with everything as it is, can help.
    #[must_use]
    pub const fn is_retryable(&self) -> bool {
        match self {
            Self::Rejected { code, .. } | Self::Refused { code, .. } => {
                matches!(code, RejectCode::Busy | RejectCode::Closing | RejectCode::TimedOut)
            }
            Self::Wire(WireError::Checksum { .. }) | Self::Decrypt | Self::EndOfStream { .. } => true,
            _ => false,
        }
    }
}

impl fmt::Display for SessionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("control session: ")?;
        match self {
            Self::Rejected { code: RejectCode::Version, versions, .. } => {
                write!(f, "no common protocol version; the peer speaks {} to {}", versions.min, versions.max)
            }
            Self::Rejected { code, text, .. } => {
                write!(f, "the peer rejected the connection: {code}")?;
                if !text.is_empty() {
                    write!(f, " ({})", text.escape_debug())?;
                }
                Ok(())
            }
            Self::Refused { code: RejectCode::Version, versions: Some(versions) } => {
                write!(f, "no common protocol version; the peer speaks {} to {}", versions.min, versions.max)
            }
            Self::Refused { code, .. } => write!(f, "the peer was rejected: {code}"),
            Self::Wire(error) => error.fmt(f),
            Self::Unexpected { kind, phase } => write!(f, "unexpected {kind:?} frame ({phase})"),
            Self::Decrypt => f.write_str("a message can't be decrypted: it was changed on its way"),
            Self::Noise { what } => write!(f, "Noise failed: {what}"),
            Self::NoNoise => f.write_str("a secret is set, but this build has no Noise (feature `noise`)"),
            Self::NotControl => f.write_str("the preface is one of a data connection"),
            Self::Config { what, have, limit } => write!(f, "{what} is {have}, its limit is {limit}"),
            Self::EndOfStream { phase, unread: 0 } => write!(f, "the peer closed the connection ({phase})"),
            Self::EndOfStream { phase, unread } => {
                write!(f, "the peer closed the connection after {unread} bytes of a frame ({phase})")
            }
        }
    }
}

impl std::error::Error for SessionError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Wire(error) => Some(error),
            _ => None,
        }
    }
}

impl From<WireError> for SessionError {
    fn from(error: WireError) -> Self {
        Self::Wire(error)
    }
}

/// Why a frame was not taken. Nothing of it was sent, and the session goes on.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum SendError {
    /// The session sends frames of this kind by itself.
    Reserved {
        /// The kind.
        kind: Kind,
    },
    /// The session has ended, or this end has said goodbye.
    Ended,
    /// The frame is larger than the peer takes; before its Hello is here, larger than every peer takes.
    TooLarge {
        /// Bytes of the frame, header included.
        need: usize,
        /// Bytes that the peer takes.
        limit: u32,
    },
    /// Too much is waiting to be sent; the peer reads too slowly. Sending helps.
    Backlog {
        /// Bytes of the frame.
        need: usize,
        /// Bytes free.
        have: usize,
    },
    /// A field is too long.
    Encode(EncodeError),
}

impl fmt::Display for SendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("send: ")?;
        match self {
            Self::Reserved { kind } => write!(f, "a {kind:?} frame is the session's own to send"),
            Self::Ended => f.write_str("the session has ended"),
            Self::TooLarge { need, limit } => write!(f, "a frame of {need} bytes; the peer takes {limit}"),
            Self::Backlog { need, have } => write!(f, "a frame of {need} bytes; the backlog has {have} free"),
            Self::Encode(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for SendError {}

impl From<EncodeError> for SendError {
    fn from(error: EncodeError) -> Self {
        Self::Encode(error)
    }
}
