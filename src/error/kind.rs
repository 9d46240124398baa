//! The kinds of errors, each with what is known of it.

use super::printable;
use crate::Path;
use crate::element::TypeError;
use core::fmt;
use towline_verbs::ibv::Missing;

/// Why an operation failed, what can be done, and whether the same call can succeed later without a change by the caller
/// ([`can_retry`](Self::can_retry)).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A key longer than the limit, in bytes.
    ///
    /// Way out: shorten the key, or use its hash. Retry: no.
    KeyTooLong {
        /// Its length.
        len: usize,
        /// The longest allowed.
        max: usize,
    },
    /// A key of zero bytes.
    ///
    /// Way out: give the payload a key of at least one byte. Retry: no.
    KeyEmpty,
    /// A ticket that is not one, or that was damaged.
    ///
    /// Way out: pass the ticket on whole: one word that begins with `towline1:`. Retry: no.
    TicketMalformed {
        /// Which rule it breaks.
        what: &'static str,
    },
    /// A text that is not an address.
    ///
    /// Way out: write HOST:PORT, IPV4:PORT, \[IPV6\]:PORT, \[IPV6%SCOPE\]:PORT or @NAME. Retry: no.
    AddressMalformed {
        /// The text.
        text: String,
        /// What is wrong with it.
        why: String,
    },
    /// A payload without parts, or with more than allowed.
    ///
    /// Way out: publish at least one part, and many parts as several payloads. Retry: no.
    PartCount {
        /// How many there are.
        count: usize,
        /// The most allowed.
        max: usize,
    },
    /// A part whose name is too long, whose shape has too many dimensions, or whose length is not what its shape and
    /// dtype say.
    ///
    /// Way out: make name, shape, dtype and bytes agree with the limits and with each other. Retry: no.
    PartMalformed {
        /// Index of the part.
        part: usize,
        /// Its name.
        name: String,
        /// Which rule it breaks.
        what: &'static str,
        /// What it has.
        have: u64,
        /// What it needs, or the most allowed.
        need: u64,
    },
    /// A buffer of another endpoint's pool.
    ///
    /// Way out: allocate the buffer from the endpoint that publishes it. Retry: no.
    ForeignBuffer {
        /// Index of the part.
        part: usize,
        /// Its name.
        name: String,
    },
    /// Zero bytes where some are needed.
    ///
    /// Way out: ask for one byte at least; a part without bytes is `Part::bytes` of an empty slice. Retry: no.
    ZeroLength,
    /// More than the whole pool: no waiting helps.
    ///
    /// Way out: build the endpoint with a larger `pool_size`. Retry: no.
    PoolTooSmall {
        /// Bytes needed.
        need: u64,
        /// Bytes of the whole pool.
        pool: u64,
    },
    /// The pool has no room, and had none until the deadline.
    ///
    /// Way out: release buffers and payloads, wait longer, or build the endpoint with a larger `pool_size`. Retry:
    /// yes.
    PoolFull {
        /// Bytes needed.
        need: u64,
        /// Bytes free.
        free: u64,
        /// Largest free run, in bytes.
        largest: u64,
    },
    /// A destination smaller than the payload.
    ///
    /// Way out: give as many bytes as `Layout::destination_len` of the ticket says. Retry: no.
    DestinationTooSmall {
        /// Bytes needed.
        need: u64,
        /// Bytes it has.
        have: u64,
    },
    /// The deadline passed.
    ///
    /// Way out: by what was waited for: check the key, look at the peer's health, use a later deadline. Retry: yes.
    TimedOut {
        /// What the operation was waiting for.
        waiting_for: &'static str,
        /// Bytes of memory that stay ours, and are not used again, until no peer or device can touch them any more.
        quarantined: u64,
    },
    /// No connection could be made.
    ///
    /// Way out: check that the peer runs, its port, and that it advertises an address reachable from here; if the error
    /// number says that this process may open no more files, raise that limit. Retry: yes.
    PeerUnreachable {
        /// Where to.
        address: String,
        /// The system's error number of the last try, 0 if there is none.
        errno: i32,
        /// What was tried.
        tried: String,
    },
    /// The connection to the peer was lost, and could not be made again in time.
    ///
    /// Way out: look at why the peer ended or the network broke, then get again. Retry: yes.
    PeerLost {
        /// The last known cause.
        why: String,
    },
    /// The peer has another secret.
    ///
    /// Way out: give both endpoints the same secret. Retry: no.
    WrongSecret,
    /// The peer wants a secret, and none is set here.
    ///
    /// Way out: set the peer's secret with `Builder::secret`. Retry: no.
    SecretRequired,
    /// A secret is set here, and the peer has none.
    ///
    /// Way out: set the same secret at the peer, or none here. Retry: no.
    SecretNotExpected,
    /// The peer speaks other versions of the protocol.
    ///
    /// Way out: run builds of neighbouring versions at both ends. Retry: no.
    VersionMismatch {
        /// The versions this build speaks.
        ours: (u16, u16),
        /// The versions the peer speaks.
        theirs: (u16, u16),
    },
    /// The peer broke the protocol.
    ///
    /// Way out: check that the address is an endpoint's, and run the same build at both ends. Retry: no.
    Protocol {
        /// How.
        what: String,
    },
    /// The paths that are allowed here do not reach the peer, or the peer does not allow them.
    ///
    /// Way out: allow another path with `Builder::allow_paths`, at both ends. Retry: no.
    PathNotAllowed {
        /// The paths that are allowed.
        allowed: String,
        /// Why none of them works.
        why: String,
    },
    /// The operation needs a path with a feature that the path to this peer does not have.
    ///
    /// Way out: use `get` instead of `view`. Retry: no.
    PathUnsuitable {
        /// The path in use.
        path: Path,
        /// What it lacks.
        lacks: &'static str,
    },
    /// Nothing is published under that ticket any more.
    ///
    /// Way out: by the cause: see [`Gone`]. Retry: no.
    Gone(Gone),
    /// The lease ran out before all bytes had arrived: nothing is delivered, so that no stale byte can be.
    ///
    /// Way out: get again; if the consumer was stopped or the network slow, build the producer with a longer `lease`.
    /// Retry: yes.
    LeaseExpired,
    /// The producer announced other lengths than it published: nothing is delivered.
    ///
    /// Way out: get a new ticket, and run the same build at both ends. Retry: no.
    LayoutMismatch {
        /// What does not fit.
        what: &'static str,
    },
    /// Reading the payload failed, as often as was tried.
    ///
    /// Way out: look at the network and at the peer, then get again. Retry: yes.
    TransferFailed {
        /// The completion's status, in words.
        status: &'static str,
        /// The provider's own code.
        vendor: u32,
        /// How often it was tried.
        tries: u32,
    },
    /// Too many of something.
    ///
    /// Way out: wait until some have ended, or build the endpoint concerned with higher `Limits`. Retry: yes.
    Busy {
        /// Of what.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
    /// The operation was cancelled.
    ///
    /// Way out: call again if the result is still wanted. Retry: no.
    Cancelled,
    /// The endpoint is closed, or being closed.
    ///
    /// Way out: build a new endpoint. Retry: no.
    Closed,
    /// The handle was made by another process and came here by fork.
    ///
    /// Way out: build an endpoint in the child process. Retry: no.
    Forked,
    /// Listening or connecting beyond this host without a secret.
    ///
    /// Way out: set a `secret`, use loopback, or allow it by name with `insecure`. Retry: no.
    Insecure {
        /// The address.
        address: String,
    },
    /// This machine has no RDMA, and the options of the endpoint ask for it: it is the only path allowed, or a device is
    /// named.
    ///
    /// Way out: install or load what is missing, or allow another path with `Builder::allow_paths`. Retry: no.
    NoRdma {
        /// What is missing.
        missing: Missing,
        /// What was found instead, and what provides it.
        why: String,
    },
    /// An option that can't be used.
    ///
    /// Way out: by the option: the text says what it may be. Retry: no.
    BadOption {
        /// Which.
        option: &'static str,
        /// Why.
        why: String,
    },
    /// The operating system said no.
    ///
    /// Way out: by the error number. Retry: no.
    Os {
        /// The system call or step.
        call: &'static str,
        /// The error number.
        errno: i32,
    },
    /// Elements of a part were asked for as what they are not.
    ///
    /// Way out: by its cause: see [`TypeError`]. Retry: no.
    Type(TypeError),
    /// A verb of the provider failed.
    ///
    /// Way out: by its cause: see [`towline_verbs::Error`]. Retry: as
    /// [`is_transient`](towline_verbs::Error::is_transient) says.
    Verbs(towline_verbs::Error),
}

/// Why a payload is not there any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Gone {
    /// As many consumers as it was for have had it.
    ///
    /// Way out: publish it for more consumers: `put_with` with `PutOptions::consumers`.
    Consumed,
    /// Nobody used it for longer than its time to live.
    ///
    /// Way out: publish it with a longer `PutOptions::time_to_live`.
    Expired,
    /// It was removed by its producer.
    ///
    /// Way out: ask its producer to put it again.
    Removed,
    /// Another payload was put under its key.
    ///
    /// Way out: get it by its key, or by the newest ticket.
    Replaced,
    /// The producer was started anew since the ticket was made.
    ///
    /// Way out: get a new ticket from the producer.
    OtherIncarnation,
    /// The producer does not remember it.
    ///
    /// Way out: get a new ticket from the producer, or get it by its key.
    Unknown,
}

impl fmt::Display for Gone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Consumed => "all its consumers have had it",
            Self::Expired => "it expired",
            Self::Removed => "its producer removed it",
            Self::Replaced => "another payload was put under its key",
            Self::OtherIncarnation => "it is another endpoint's, or its producer was started anew since",
            Self::Unknown => "its producer does not know it",
        })
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
            Self::PartMalformed { part, name, what, have, need } => {
                write!(f, "part {part} `{}`: {what}: has {have}, needs {need}", printable(name.as_bytes()))
            }
            Self::ForeignBuffer { part, name } => {
                let name = printable(name.as_bytes());
                write!(f, "part {part} `{name}`: its buffer belongs to another endpoint's pool")
            }
            Self::ZeroLength => write!(f, "a buffer of zero bytes"),
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
            Self::PeerUnreachable { address, errno, tried } => unreachable(f, address, *errno, tried),
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
            Self::NoRdma { why, .. } => write!(f, "no RDMA on this machine: {why}"),
            Self::BadOption { option, why } => write!(f, "option `{option}`: {why}"),
            Self::Os { call, errno } => write!(f, "{call}: {}", std::io::Error::from_raw_os_error(*errno)),
            Self::Type(e) => f.write_str(&e.cause()),
            Self::Verbs(e) => write!(f, "{e}"),
        }
    }
}

/// What could not be connected to and why, each said once although the attempts name them again.
fn unreachable(f: &mut fmt::Formatter<'_>, address: &str, errno: i32, tried: &str) -> fmt::Result {
    let system = if errno == 0 { String::new() } else { std::io::Error::from_raw_os_error(errno).to_string() };
    let tried = tried.strip_prefix("connect ").unwrap_or(tried);
    match (tried.contains(address), tried.contains(&system)) {
        (true, true) => write!(f, "no connection to {tried}"),
        (true, false) => write!(f, "no connection to {tried}: {system}"),
        (false, true) if tried.is_empty() => write!(f, "no connection to {address}"),
        (false, true) => write!(f, "no connection to {address}: {tried}"),
        (false, false) if tried.is_empty() => write!(f, "no connection to {address}: {system}"),
        (false, false) => write!(f, "no connection to {address}: {tried}: {system}"),
    }
}
