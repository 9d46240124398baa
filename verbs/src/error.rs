//! What went wrong: the verb, the cause, and what the caller can do.

use core::fmt;

/// The result of a verb.
pub type Result<T, E = Error> = core::result::Result<T, E>;

/// A failed verb (I8: an error names the operation, its cause and the limit that was hit).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    /// The verb that failed, by its name in the verbs specification where it has one (`reg_mr`, `post_send`).
    pub verb: &'static str,
    /// Why.
    pub cause: Cause,
}

/// Why a verb failed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cause {
    /// The operating system said no.
    Os {
        /// The error number.
        errno: i32,
        /// The system call.
        call: &'static str,
    },
    /// A limit of this device or process was reached; waiting for completions, or a larger limit, helps.
    Limit {
        /// What is limited (`max_send_wr`, `memlock`).
        what: &'static str,
        /// What the limit allows.
        have: u64,
        /// What the call needed.
        need: u64,
    },
    /// An argument lies outside the object it refers to.
    OutOfRange {
        /// First byte asked for.
        offset: u64,
        /// Bytes asked for.
        len: u64,
        /// Bytes there are.
        size: u64,
    },
    /// A range crosses the border between two pieces of a region that is larger than what the device takes in one
    /// (`max_mr_size`), and has no single key: each part is for a request of its own.
    AcrossPieces {
        /// First byte asked for.
        offset: u64,
        /// Bytes asked for.
        len: u64,
        /// Bytes of a piece; borders lie at multiples of it.
        piece: u64,
    },
    /// The queue pair's state does not allow the call.
    State {
        /// The state it is in.
        is: QueuePairState,
        /// The state the call needs.
        needs: QueuePairState,
    },
    /// No object of that name or key.
    NotFound {
        /// What was looked up.
        what: &'static str,
    },
    /// This provider or device cannot do that; another may.
    Unsupported {
        /// What it cannot do.
        what: &'static str,
    },
    /// Bytes from the peer break the protocol of this provider.
    Malformed {
        /// Which rule they break.
        what: &'static str,
    },
    /// The peer does not have a right that this operation needs.
    Denied {
        /// The right.
        what: &'static str,
    },
    /// The connection under the queue pair is gone.
    Disconnected,
    /// The way to the peer does not carry what is sent.
    PathDown {
        /// What showed it.
        why: &'static str,
    },
}

/// The states of a queue pair, by their names in the verbs specification. What lies between `Reset` and `ReadyToSend`
/// is one state here: the provider walks through it by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum QueuePairState {
    /// Created, not connected.
    Reset,
    /// Being connected; posts are accepted and wait.
    Connecting,
    /// Connected in both directions.
    ReadyToSend,
    /// Failed or closed: everything flushes, nothing more is accepted.
    Error,
}

impl Error {
    /// An error of `verb`.
    #[must_use]
    pub const fn new(verb: &'static str, cause: Cause) -> Self {
        Self { verb, cause }
    }

    /// The last error of the operating system, met in system call `call` while doing `verb`.
    #[must_use]
    pub fn last_os(verb: &'static str, call: &'static str) -> Self {
        Self::from_io(verb, call, &std::io::Error::last_os_error())
    }

    /// An I/O error met in system call `call` while doing `verb`.
    #[must_use]
    pub fn from_io(verb: &'static str, call: &'static str, error: &std::io::Error) -> Self {
        Self::new(verb, Cause::Os { errno: error.raw_os_error().unwrap_or(libc::EIO), call })
    }

    /// Whether the same call can succeed later without a change by the caller.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self.cause {
            Cause::Limit { .. } | Cause::Disconnected | Cause::PathDown { .. } => true,
            Cause::Os { errno, .. } => matches!(errno, libc::EAGAIN | libc::EINTR | libc::ENOBUFS | libc::ENOMEM),
            _ => false,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.verb)?;
        match &self.cause {
            Cause::Os { errno, call } => {
                write!(f, "{call}: {}", std::io::Error::from_raw_os_error(*errno))
            }
            Cause::Limit { what, have, need } => write!(f, "{what} is {have}, needed {need}"),
            Cause::OutOfRange { offset, len, size } => {
                write!(f, "bytes {offset}..+{len} lie outside the {size} that there are")
            }
            Cause::AcrossPieces { offset, len, piece } => write!(
                f,
                "bytes {offset}..+{len} cross a border of the pieces of {piece} bytes that this device takes at most \
                 (max_mr_size): use each part by itself"
            ),
            Cause::State { is, needs } => write!(f, "queue pair is in {is:?}, the call needs {needs:?}"),
            Cause::NotFound { what } => write!(f, "no such {what}"),
            Cause::Unsupported { what } => write!(f, "{what} is not supported by this provider"),
            Cause::Malformed { what } => write!(f, "the peer broke the protocol: {what}"),
            Cause::Denied { what } => write!(f, "not allowed: {what}"),
            Cause::Disconnected => write!(f, "the connection to the peer is gone"),
            Cause::PathDown { why } => write!(f, "the path to the peer carries nothing: {why}"),
        }
    }
}

impl std::error::Error for Error {}
