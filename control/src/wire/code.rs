//! The numbers in frames that say why or how: open enums, so that a newer peer's number is shown and not refused.

use core::fmt;

macro_rules! codes {
    ($(#[$meta:meta])* $name:ident: $int:ty { $($(#[$doc:meta])* $variant:ident = $value:literal, $text:literal;)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum $name {
            $($(#[$doc])* $variant,)*
            /// A number that this version has no name for.
            Unknown($int),
        }

        impl From<$int> for $name {
            fn from(number: $int) -> Self {
                match number {
                    $($value => Self::$variant,)*
                    other => Self::Unknown(other),
                }
            }
        }

        impl From<$name> for $int {
            fn from(code: $name) -> Self {
                match code {
                    $($name::$variant => $value,)*
                    $name::Unknown(other) => other,
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Self::$variant => f.write_str($text),)*
                    Self::Unknown(other) => write!(f, "code {other}"),
                }
            }
        }
    };
}

codes! {
    /// Why an end does not accept a connection.
    RejectCode: u16 {
        /// This end has a secret and the peer came without one.
        SecretRequired = 1, "a secret is required";
        /// This end has no secret and the peer came with one.
        SecretNotExpected = 2, "no secret is set here, so none is expected";
        /// The peer's secret is not this end's.
        WrongSecret = 3, "the secrets differ";
        /// No protocol version is spoken by both ends.
        Version = 4, "no common protocol version";
        /// As many peers as this end allows are connected.
        Busy = 5, "too many connections";
        /// This end does not want that peer.
        NotAllowed = 6, "not allowed";
        /// The bytes break the protocol.
        Malformed = 7, "malformed bytes";
        /// This end is closing.
        Closing = 8, "closing";
        /// The peer was not established in time.
        TimedOut = 9, "the handshake took too long";
    }
}

codes! {
    /// Why an end refuses a queue pair.
    QueuePairCode: u16 {
        /// This end's policy does not allow the provider.
        NotAllowed = 1, "this path is not allowed";
        /// This end does not have the provider.
        NoProvider = 2, "this path is not available";
        /// As many queue pairs as this end allows.
        Busy = 3, "too many queue pairs";
        /// The provider can't read the address.
        Address = 4, "the address is not one of this provider";
        /// The peer can't be reached that way.
        Unreachable = 5, "not reachable";
        /// A generation older than the connection's.
        Stale = 6, "an older generation";
        /// The provider failed.
        Failed = 7, "the provider failed";
        /// This end is closing.
        Closing = 8, "closing";
    }
}

codes! {
    /// Why a get is refused.
    RefuseCode: u16 {
        /// No payload of that key was put while the get waited.
        TimedOut = 1, "no payload within the time asked for";
        /// The slot holds no payload, and never will under this generation.
        Gone = 2, "the payload is gone";
        /// As many leases as this peer may hold.
        TooManyLeases = 3, "too many leases";
        /// As many waiting gets as this peer may have.
        TooManyRequests = 4, "too many requests";
        /// This peer may not have it.
        NotAllowed = 5, "not allowed";
        /// The payload was removed, or has expired, while the get waited.
        Removed = 6, "the payload was removed";
        /// Another consumer has it.
        Taken = 7, "another consumer has it";
        /// The layout or segment list does not fit a frame that the peer takes.
        TooLarge = 8, "the description is too large for a frame";
        /// The queue pair that the get names is not there.
        NoQueuePair = 9, "no queue pair of that kind";
        /// The path can't do that (a view over a network).
        Path = 10, "this path can't do that";
        /// The get was cancelled.
        Cancelled = 11, "cancelled";
        /// This end is closing.
        Closing = 12, "closing";
        /// The producer failed.
        Failed = 13, "the producer failed";
    }
}

codes! {
    /// How a lease ended at the consumer.
    Outcome: u8 {
        /// The payload was delivered whole.
        Delivered = 1, "delivered";
        /// The transfer failed; the payload is still wanted.
        Failed = 2, "failed";
        /// The caller's or the lease's deadline came first.
        TimedOut = 3, "timed out";
        /// The consumer gave up.
        Cancelled = 4, "cancelled";
        /// What was read is not what was put.
        Corrupt = 5, "corrupt";
    }
}

codes! {
    /// Why an end leaves.
    GoodbyeCode: u16 {
        /// It closes.
        Closing = 1, "closing";
        /// The peer broke the protocol.
        Protocol = 2, "the peer broke the protocol";
        /// Nothing was heard of the peer in time.
        Silent = 3, "nothing was heard in time";
        /// The peer took nothing off the connection in time.
        Stuck = 4, "the peer reads too slowly";
        /// A newer connection of the same peer took its place.
        Replaced = 5, "replaced by a newer connection";
        /// A failure of its own.
        Failed = 6, "failed";
    }
}
