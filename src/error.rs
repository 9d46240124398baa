//! What went wrong: the operation, the cause, whether a retry can help, and the way out.

use crate::Path;
use core::fmt;

/// The result of an operation of an endpoint.
pub type Result<T, E = Error> = core::result::Result<T, E>;

/// A failed operation (I8).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    operation: &'static str,
    kind: ErrorKind,
}

/// Why an operation failed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A key longer than the limit, in bytes.
    KeyTooLong {
        /// Its length.
        len: usize,
        /// The longest allowed.
        max: usize,
    },
    /// A key of zero bytes.
    KeyEmpty,
    /// A ticket that is not one, or that was damaged.
    TicketMalformed {
        /// Which rule it breaks.
        what: &'static str,
    },
    /// A text that is not an address.
    AddressMalformed {
        /// The text.
        text: String,
        /// What is wrong with it.
        why: String,
    },
    /// A payload without parts, or with more than allowed.
    PartCount {
        /// How many there are.
        count: usize,
        /// The most allowed.
        max: usize,
    },
    /// A part whose name is too long, whose shape has too many dimensions, or whose length is not what its shape and
    /// dtype say.
    PartMalformed {
        /// Index of the part.
        part: usize,
        /// Which rule it breaks.
        what: &'static str,
        /// What it has.
        have: u64,
        /// What it needs, or the most allowed.
        need: u64,
    },
    /// A buffer of another endpoint's pool.
    ForeignBuffer {
        /// Index of the part.
        part: usize,
    },
    /// Zero bytes where some are needed.
    ZeroLength,
    /// More than the whole pool: no waiting helps.
    PoolTooSmall {
        /// Bytes needed.
        need: u64,
        /// Bytes of the whole pool.
        pool: u64,
    },
    /// The pool has no room, and had none until the deadline.
    PoolFull {
        /// Bytes needed.
        need: u64,
        /// Bytes free.
        free: u64,
        /// Largest free run, in bytes.
        largest: u64,
    },
    /// A destination smaller than the payload.
    DestinationTooSmall {
        /// Bytes needed.
        need: u64,
        /// Bytes it has.
        have: u64,
    },
    /// The deadline passed.
    TimedOut {
        /// What the operation was waiting for.
        waiting_for: &'static str,
        /// Bytes of memory that stay ours, and are not used again, until a peer or device can touch them no more (I3).
        quarantined: u64,
    },
    /// No connection could be made.
    PeerUnreachable {
        /// Where to.
        address: String,
        /// The system's error number of the last try, 0 if there is none.
        errno: i32,
        /// What was tried.
        tried: String,
    },
    /// The connection to the peer was lost, and could not be made again in time.
    PeerLost {
        /// The last known cause.
        why: String,
    },
    /// The peer has another secret.
    WrongSecret,
    /// The peer wants a secret, and none is set here.
    SecretRequired,
    /// A secret is set here, and the peer has none.
    SecretNotExpected,
    /// The peer speaks other versions of the protocol.
    VersionMismatch {
        /// The versions this build speaks.
        ours: (u16, u16),
        /// The versions the peer speaks.
        theirs: (u16, u16),
    },
    /// The peer broke the protocol.
    Protocol {
        /// How.
        what: String,
    },
    /// The paths that are allowed here do not reach the peer, or the peer does not allow them.
    PathNotAllowed {
        /// The paths that are allowed.
        allowed: String,
        /// Why none of them works.
        why: String,
    },
    /// The operation needs a path with a feature that the path to this peer does not have.
    PathUnsuitable {
        /// The path in use.
        path: Path,
        /// What it lacks.
        lacks: &'static str,
    },
    /// Nothing is published under that ticket any more.
    Gone(Gone),
    /// The lease ran out before all bytes had arrived: nothing is delivered (I4).
    LeaseExpired,
    /// The producer announced other lengths than it published (I5).
    LayoutMismatch {
        /// What does not fit.
        what: &'static str,
    },
    /// Reading the payload failed, as often as was tried.
    TransferFailed {
        /// The completion's status, in words.
        status: &'static str,
        /// The provider's own code.
        vendor: u32,
        /// How often it was tried.
        tries: u32,
    },
    /// Too many of something.
    Busy {
        /// Of what.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
    /// The operation was cancelled.
    Cancelled,
    /// The endpoint is closed, or being closed.
    Closed,
    /// The handle was made by another process and came here by fork (I13).
    Forked,
    /// Listening or connecting beyond this host without a secret.
    Insecure {
        /// The address.
        address: String,
    },
    /// An option of the builder that can't be used.
    BadOption {
        /// Which.
        option: &'static str,
        /// Why.
        why: String,
    },
    /// The operating system said no.
    Os {
        /// The system call or step.
        call: &'static str,
        /// The error number.
        errno: i32,
    },
    /// A verb of the provider failed.
    Verbs(towline_verbs::Error),
}

/// Why a payload is not there any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Gone {
    /// As many consumers as it was for have had it.
    Consumed,
    /// Nobody used it for longer than its time to live.
    Expired,
    /// It was removed by its producer.
    Removed,
    /// Another payload was put under its key.
    Replaced,
    /// The producer was started anew since the ticket was made.
    OtherIncarnation,
    /// The producer does not remember it.
    Unknown,
}

impl Error {
    pub(crate) const fn new(operation: &'static str, kind: ErrorKind) -> Self {
        Self { operation, kind }
    }

    pub(crate) fn os(operation: &'static str, call: &'static str, error: &std::io::Error) -> Self {
        Self::new(operation, ErrorKind::Os { call, errno: error.raw_os_error().unwrap_or(libc::EIO) })
    }

    /// The operation that failed: `put`, `get`, `alloc`, ...
    #[must_use]
    pub const fn operation(&self) -> &'static str {
        self.operation
    }

    /// Why it failed.
    #[must_use]
    pub const fn kind(&self) -> &ErrorKind {
        &self.kind
    }

    /// Whether the same call can succeed later without a change by the caller.
    #[must_use]
    pub fn can_retry(&self) -> bool {
        match &self.kind {
            ErrorKind::PoolFull { .. }
            | ErrorKind::TimedOut { .. }
            | ErrorKind::PeerUnreachable { .. }
            | ErrorKind::PeerLost { .. }
            | ErrorKind::LeaseExpired
            | ErrorKind::TransferFailed { .. }
            | ErrorKind::Busy { .. } => true,
            ErrorKind::Verbs(e) => e.is_transient(),
            _ => false,
        }
    }

    /// What the caller can do about it, where that is known.
    #[must_use]
    pub fn way_out(&self) -> Option<&'static str> {
        Some(match &self.kind {
            ErrorKind::KeyTooLong { .. } => "shorten the key, or use its hash",
            ErrorKind::KeyEmpty => "give the payload a key",
            ErrorKind::TicketMalformed { .. } => "pass the ticket on whole: one word that begins with `towline1:`",
            ErrorKind::AddressMalformed { .. } => "write HOST:PORT, IPV4:PORT or [IPV6%SCOPE]:PORT",
            ErrorKind::PartCount { .. } => "publish several payloads",
            ErrorKind::ForeignBuffer { .. } => "allocate the buffer from the endpoint that publishes it",
            ErrorKind::PoolTooSmall { .. } => "build the endpoint with a larger `pool_size`",
            ErrorKind::PoolFull { .. } => "release buffers and payloads, wait longer, or build a larger pool",
            ErrorKind::DestinationTooSmall { .. } => "give a larger destination",
            ErrorKind::TimedOut { .. } => "use a later deadline, and look at the peer's health",
            ErrorKind::PeerUnreachable { .. } => {
                "check that the peer runs, its port, and that it advertises an address reachable from here"
            }
            ErrorKind::PeerLost { .. } => "look at why the peer ended or the network broke; get again",
            ErrorKind::WrongSecret => "give both endpoints the same secret",
            ErrorKind::SecretRequired => "set the peer's secret with `secret`",
            ErrorKind::SecretNotExpected => "set the same secret at the peer, or none here",
            ErrorKind::VersionMismatch { .. } => "run builds of neighbouring versions at both ends",
            ErrorKind::PathNotAllowed { .. } => "allow another path with `allow_paths`",
            ErrorKind::PathUnsuitable { .. } => "use `get` instead of `view`",
            ErrorKind::Gone(Gone::Consumed) => "publish it for more consumers: `put_with` with `PutOptions::consumers`",
            ErrorKind::Gone(Gone::Expired) => "publish it with a longer `time_to_live`",
            ErrorKind::Gone(Gone::OtherIncarnation) => "get a new ticket from the producer",
            ErrorKind::Forked => "build an endpoint in the child process",
            ErrorKind::Insecure { .. } => "set a `secret`, bind to loopback, or allow it by name with `insecure`",
            _ => return None,
        })
    }
}

impl fmt::Display for Gone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Consumed => "all its consumers have had it",
            Self::Expired => "it expired",
            Self::Removed => "its producer removed it",
            Self::Replaced => "another payload was put under its key",
            Self::OtherIncarnation => "its producer was started anew since",
            Self::Unknown => "its producer does not know it",
        })
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.operation, self.kind)?;
        if let Some(way_out) = self.way_out() {
            write!(f, " ({way_out})")?;
        }
        Ok(())
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::KeyTooLong { len, max } => write!(f, "the key has {len} bytes, at most {max} are allowed"),
            Self::KeyEmpty => write!(f, "the key is empty"),
            Self::TicketMalformed { what } => write!(f, "not a ticket: {what}"),
            Self::AddressMalformed { text, why } => write!(f, "`{text}` is not an address: {why}"),
            Self::PartCount { count, max } => write!(f, "{count} parts, allowed are 1 to {max}"),
            Self::PartMalformed { part, what, have, need } => {
                write!(f, "part {part}: {what}: has {have}, needs {need}")
            }
            Self::ForeignBuffer { part } => write!(f, "part {part}: its buffer belongs to another endpoint's pool"),
            Self::ZeroLength => write!(f, "zero bytes"),
            Self::PoolTooSmall { need, pool } => write!(f, "{need} bytes needed, the whole pool has {pool}"),
            Self::PoolFull { need, free, largest } => {
                write!(f, "{need} bytes needed, the pool has {free} free, the largest free run is {largest}")
            }
            Self::DestinationTooSmall { need, have } => {
                write!(f, "the destination has {have} bytes, the payload needs {need}")
            }
            Self::TimedOut { waiting_for, quarantined } => {
                write!(f, "the deadline passed while waiting for {waiting_for}")?;
                if *quarantined > 0 {
                    write!(f, "; {quarantined} bytes stay in quarantine until nobody can touch them")?;
                }
                Ok(())
            }
            Self::PeerUnreachable { address, errno, tried } => {
                write!(f, "no connection to {address}")?;
                if *errno != 0 {
                    write!(f, ": {}", std::io::Error::from_raw_os_error(*errno))?;
                }
                if !tried.is_empty() {
                    write!(f, "; {tried}")?;
                }
                Ok(())
            }
            Self::PeerLost { why } => write!(f, "the peer is gone: {why}"),
            Self::WrongSecret => write!(f, "the peer has another secret"),
            Self::SecretRequired => write!(f, "the peer wants a secret and none is set here"),
            Self::SecretNotExpected => write!(f, "a secret is set here and the peer has none"),
            Self::VersionMismatch { ours, theirs } => write!(
                f,
                "the peer speaks versions {} to {} of the protocol, this build {} to {}",
                theirs.0, theirs.1, ours.0, ours.1
            ),
            Self::Protocol { what } => write!(f, "the peer broke the protocol: {what}"),
            Self::PathNotAllowed { allowed, why } => {
                write!(f, "no path to the peer among those allowed ({allowed}): {why}")
            }
            Self::PathUnsuitable { path, lacks } => write!(f, "the path to this peer is {path}, which has no {lacks}"),
            Self::Gone(gone) => write!(f, "the payload is not there: {gone}"),
            Self::LeaseExpired => write!(f, "the lease ran out before all bytes had arrived; nothing was delivered"),
            Self::LayoutMismatch { what } => write!(f, "the payload is not as announced: {what}"),
            Self::TransferFailed { status, vendor, tries } => {
                write!(f, "reading failed {tries} times: {status} (code {vendor})")
            }
            Self::Busy { what, limit } => write!(f, "too many {what}: the limit is {limit}"),
            Self::Cancelled => write!(f, "cancelled"),
            Self::Closed => write!(f, "the endpoint is closed"),
            Self::Forked => write!(f, "the endpoint belongs to the parent process"),
            Self::Insecure { address } => write!(f, "{address} lies beyond this host and no secret is set"),
            Self::BadOption { option, why } => write!(f, "option `{option}`: {why}"),
            Self::Os { call, errno } => write!(f, "{call}: {}", std::io::Error::from_raw_os_error(*errno)),
            Self::Verbs(e) => write!(f, "{e}"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.kind {
            ErrorKind::Verbs(e) => Some(e),
            _ => None,
        }
    }
}
