//! What can be done about each kind of error. The documentation of [`ErrorKind`] says the same, and a test compares them.

use super::{ErrorKind, Gone};
use towline_verbs::Cause;

impl ErrorKind {
    /// Whether the same call can succeed later without a change by the caller.
    #[must_use]
    pub fn can_retry(&self) -> bool {
        match self {
            Self::PoolFull { .. }
            | Self::TimedOut { .. }
            | Self::PeerUnreachable { .. }
            | Self::PeerLost { .. }
            | Self::LeaseExpired
            | Self::TransferFailed { .. }
            | Self::Busy { .. } => true,
            Self::Verbs(e) => e.is_transient(),
            _ => false,
        }
    }

    pub(super) fn way_out(&self) -> &'static str {
        match self {
            Self::KeyTooLong { .. } => "shorten the key, or use its hash",
            Self::KeyEmpty => "give the payload a key of at least one byte",
            Self::TicketMalformed { .. } => "pass the ticket on whole: one word that begins with `towline1:`",
            Self::AddressMalformed { .. } => "write HOST:PORT, IPV4:PORT, [IPV6]:PORT, [IPV6%SCOPE]:PORT or @NAME",
            Self::PartCount { .. } => "publish at least one part, and many parts as several payloads",
            Self::PartMalformed { .. } => "make name, shape, dtype and bytes agree with the limits and with each other",
            Self::ForeignBuffer { .. } => "allocate the buffer from the endpoint that publishes it",
            Self::ZeroLength => "ask for one byte at least; a part without bytes is `Part::bytes` of an empty slice",
            Self::PoolTooSmall { .. } => "build the endpoint with a larger `pool_size`",
            Self::PoolFull { .. } => {
                "release buffers and payloads, wait longer, or build the endpoint with a larger `pool_size`"
            }
            Self::DestinationTooSmall { .. } => "give as many bytes as `Layout::destination_len` of the ticket says",
            Self::TimedOut { waiting_for, .. } => timed_out(waiting_for),
            Self::PeerUnreachable { errno: errno @ (libc::EMFILE | libc::ENFILE), .. } => system(*errno),
            Self::PeerUnreachable { .. } => {
                "check that the peer runs, its port, and that it advertises an address reachable from here"
            }
            Self::PeerLost { .. } => "look at why the peer ended or the network broke, then get again",
            Self::WrongSecret => "give both endpoints the same secret",
            Self::SecretRequired => "set the peer's secret with `Builder::secret`",
            Self::SecretNotExpected => "set the same secret at the peer, or none here",
            Self::VersionMismatch { .. } => "run builds of neighbouring versions at both ends",
            Self::Protocol { .. } => "check that the address is an endpoint's, and run the same build at both ends",
            Self::PathNotAllowed { .. } => "allow another path with `Builder::allow_paths`, at both ends",
            Self::PathUnsuitable { .. } => "use `get` instead of `view`",
            Self::Gone(Gone::Consumed) => "publish it for more consumers: `put_with` with `PutOptions::consumers`",
            Self::Gone(Gone::Expired) => "publish it with a longer `PutOptions::time_to_live`",
            Self::Gone(Gone::Removed) => "ask its producer to put it again",
            Self::Gone(Gone::Replaced) => "get it by its key, or by the newest ticket",
            Self::Gone(Gone::OtherIncarnation) => "get a new ticket from the producer",
            Self::Gone(Gone::Unknown) => "get a new ticket from the producer, or get it by its key",
            Self::LeaseExpired => {
                "get again; if the consumer was stopped or the network slow, build the producer with a longer `lease`"
            }
            Self::LayoutMismatch { .. } => "get a new ticket, and run the same build at both ends",
            Self::TransferFailed { .. } => "look at the network and at the peer, then get again",
            Self::Busy { .. } => "wait until some have ended, or build the endpoint concerned with higher `Limits`",
            Self::Cancelled => "call again if the result is still wanted",
            Self::Closed => "build a new endpoint",
            Self::Forked => "build an endpoint in the child process",
            Self::Insecure { .. } => "set a `secret`, use loopback, or allow it by name with `insecure`",
            Self::NoRdma { .. } => "install or load what is missing, or allow another path with `Builder::allow_paths`",
            Self::BadOption { option, .. } => bad_option(option),
            Self::Os { errno, .. } => system(*errno),
            Self::Type(error) => error.way_out(),
            Self::Verbs(error) => match error.cause {
                Cause::Os { errno, .. } => system(errno),
                Cause::Limit { what: "free huge pages", .. } => {
                    "give the machine more of them (`vm.nr_hugepages`), or build with `HugePages::Try`"
                }
                Cause::Limit { what: "free memory of this machine" | "address space", .. } => "ask for less memory",
                Cause::Limit { what: "memlock (ulimit -l)", .. } => {
                    "raise the limit of locked memory (`ulimit -l`), or build the endpoint with a smaller `pool_size`"
                }
                Cause::Limit { .. } => "wait until operations have ended, or raise that limit",
                Cause::PathDown { .. } => {
                    "look at the port, its cable and the switches on the way, or allow another path; then try again"
                }
                Cause::Disconnected => "look at why the peer ended or the network broke, then try again",
                Cause::Unsupported { .. } | Cause::NotFound { .. } => {
                    "see what `towline devices` says of this machine, or allow another path"
                }
                Cause::Malformed { .. } | Cause::Denied { .. } => "run the same build at both ends",
                _ => "this is a fault of towline itself: please report it with this line",
            },
        }
    }
}

/// The words of the engine for what it waits for, and what each asks for.
fn timed_out(waiting_for: &str) -> &'static str {
    match waiting_for {
        "a payload to be put under the key" => "check the key and that its producer puts it, or use a later deadline",
        "consumers" => "check that consumers get this key from this endpoint, or use a later deadline",
        "anything: it was in the past" => "use a deadline in the future",
        "a connection" => {
            "check that the peer runs and that its address is reachable from here, or use a later deadline"
        }
        _ => "use a later deadline, and look at the peer's health",
    }
}

fn bad_option(option: &str) -> &'static str {
    match option {
        "pool_size" => "give one byte at least",
        "granule" => "give a power of two from 64 to 2,097,152 bytes that is no larger than the pool",
        "allow_paths" => "allow `Path::Shm`, `Path::Tcp` or `Paths::ALL`",
        "rdma_device" => "write NAME, NAME:PORT or NAME:PORT:GID_INDEX as `towline devices` lists them",
        "lease" => "make the lease longer than twice the drift margin",
        "limits.key" => "give 1 to 1024 bytes",
        "limits.backlog" => "give 8 KiB at least",
        "secret" => "give 16 to 1024 bytes",
        "time_to_live" | "handshake_timeout" => "give a time that is longer than nothing",
        "advertise" => "name 1 to 8 addresses that peers reach with `Builder::advertise`",
        "consumers" => "give one consumer at least",
        option if option.starts_with("limits") => "give one at least",
        _ => "see the documentation of that option",
    }
}

fn system(errno: i32) -> &'static str {
    match errno {
        libc::EADDRNOTAVAIL => "bind to an address that this machine has, or to 0.0.0.0 and name one with `advertise`",
        libc::EADDRINUSE => "choose a port that nobody listens at, or port 0 for one of the system's choice",
        libc::EACCES | libc::EPERM => "choose a port from 1024 on, or run with the privilege that this needs",
        libc::EMFILE | libc::ENFILE => "raise the limit of open files (`ulimit -n`)",
        libc::EAGAIN => "raise the limit of processes and threads (`ulimit -u`), or try later",
        libc::ENOMEM | libc::ENOSPC => "build the endpoint with a smaller `pool_size`, or free memory",
        _ => "look this error number up in the manual page of that call",
    }
}
