//! Why bytes are no frame, and why a frame has no bytes.

use super::Kind;
use core::fmt;

/// Why bytes are not a frame (I7: parsers reject).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum WireError {
    /// They do not begin as a frame does.
    Magic {
        /// What is there.
        found: u32,
    },
    /// The frame is larger than this end takes.
    TooLarge {
        /// Bytes of the frame with its header.
        need: u64,
        /// Bytes allowed.
        limit: u32,
    },
    /// The checksum does not match.
    Checksum {
        /// The checksum of the bytes.
        computed: u32,
        /// The checksum in the header.
        found: u32,
    },
    /// A kind of frame that this version does not know.
    UnknownKind {
        /// Its number.
        kind: u16,
    },
    /// The body ends before what its fields announce.
    Short {
        /// The frame.
        kind: Kind,
        /// The field.
        what: &'static str,
    },
    /// The body goes on after what its fields announce.
    Trailing {
        /// The frame.
        kind: Kind,
        /// Bytes too many.
        bytes: usize,
    },
    /// A field is longer than the protocol allows.
    TooLong {
        /// The frame.
        kind: Kind,
        /// The field.
        what: &'static str,
        /// Its length.
        len: usize,
        /// The longest allowed.
        limit: usize,
    },
    /// A field has a value that the protocol does not allow, or a reserved bit is set.
    Value {
        /// The frame.
        kind: Kind,
        /// The field.
        what: &'static str,
    },
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Magic { found } => write!(f, "frame: begins with {found:#010x}, which is not a frame"),
            Self::TooLarge { need, limit } => write!(f, "frame: {need} bytes, this end takes {limit} (max_frame)"),
            Self::Checksum { computed, found } => {
                write!(f, "frame: checksum {found:#010x}, its bytes have {computed:#010x}")
            }
            Self::UnknownKind { kind } => write!(f, "frame: unknown kind {kind}"),
            Self::Short { kind, what } => write!(f, "{kind:?} frame: ends before the end of {what}"),
            Self::Trailing { kind, bytes } => write!(f, "{kind:?} frame: {bytes} bytes too many"),
            Self::TooLong { kind, what, len, limit } => write!(f, "{kind:?} frame: {what} of {len} (limit {limit})"),
            Self::Value { kind, what } => write!(f, "{kind:?} frame: {what} has a value that is not allowed"),
        }
    }
}

impl std::error::Error for WireError {}

/// Why a frame can't be written: the caller gave a field more than the protocol allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EncodeError {
    /// The frame.
    pub kind: Kind,
    /// The field.
    pub what: &'static str,
    /// Its length.
    pub len: usize,
    /// The longest allowed.
    pub limit: usize,
}

impl fmt::Display for EncodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, what, len, limit } = self;
        write!(f, "{kind:?} frame: {what} of {len} (limit {limit})")
    }
}

impl std::error::Error for EncodeError {}
