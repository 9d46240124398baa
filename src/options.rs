//! Options: of one payload, and of what an endpoint may hold.

use std::time::Duration;

/// How a payload is published: for how many consumers, and for how long.
///
/// ```
/// use std::time::Duration;
/// use towline::{DType, Endpoint, Part, PutOptions};
///
/// # fn main() -> towline::Result<()> {
/// let endpoint = Endpoint::builder().pool_size(1 << 20).build()?;
/// let options = PutOptions::new().consumers(2).time_to_live(Duration::from_secs(60));
/// let ticket = endpoint.put_with("weights", [Part::bytes("w", DType::U8, &[3], b"abc")], &options)?;
///
/// for _consumer in 0..2 {
///     drop(endpoint.get(&ticket, Duration::from_secs(5))?);
/// }
/// assert!(endpoint.get(&ticket, Duration::from_secs(5)).is_err(), "both have had it");
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PutOptions {
    /// How many consumers it is for; it is gone when as many have had it. A view uses it up as a get does; a get that
    /// failed does not. At least 1; default: 1.
    pub consumers: u32,
    /// How long it is kept after its last use; while a consumer reads it, it is always kept. Default: 5 minutes.
    pub time_to_live: Duration,
}

impl Default for PutOptions {
    fn default() -> Self {
        Self { consumers: 1, time_to_live: Duration::from_secs(300) }
    }
}

impl PutOptions {
    /// The defaults: one consumer, five minutes.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets [`consumers`](Self#structfield.consumers): how many consumers it is for.
    #[must_use]
    pub fn consumers(mut self, consumers: u32) -> Self {
        self.consumers = consumers;
        self
    }

    /// Sets [`time_to_live`](Self#structfield.time_to_live): how long it is kept after its last use.
    #[must_use]
    pub fn time_to_live(mut self, time: Duration) -> Self {
        self.time_to_live = time;
        self
    }
}

/// What an endpoint may hold and do; [`Builder::limits`](crate::Builder::limits). At each limit there is a wait with a
/// deadline or a typed refusal, never silence.
///
/// ```
/// use towline::{Endpoint, Limits};
///
/// # fn main() -> towline::Result<()> {
/// let limits = Limits::new().payloads(100).gets(16);
/// let endpoint = Endpoint::builder().pool_size(1 << 20).limits(limits).build()?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Longest key, in bytes: 1 to 1024; default: 1024.
    pub key: usize,
    /// Payloads published at one time; default: 65,536.
    pub payloads: usize,
    /// Control connections, in both directions together: at least 1; default: 1024.
    pub links: usize,
    /// Leases that one peer may hold: payloads that it reads or views; default: 4096. One that needs more than 16 keys, over
    /// TCP and RDMA one for each part, counts as one for each 16.
    ///
    /// A peer is one endpoint, over all its connections, where it is known to be who it says: with a secret, or over a Unix
    /// socket of this user. Otherwise it is one connection, and all connections from one address (of IPv6: from one network
    /// of 64 bits), or of one other user of this host, may hold four times as much together.
    pub leases_per_peer: usize,
    /// Gets that one peer, in the same sense, may have waiting for a key; default: 4096.
    pub waiting_per_peer: usize,
    /// Gets of this endpoint in progress: at least 1; default: 4096.
    pub gets: usize,
    /// Bytes that stay in quarantine because of one peer before its queue pair is broken at once; default: 1 GiB.
    pub quarantine_per_peer: u64,
    /// Payloads up to this many bytes travel inside the control message that grants them; default: 32 KiB. Over shared
    /// memory the border is 16 KiB at most.
    pub eager: u32,
    /// Bytes of control messages that may wait to be sent to one peer before nothing more is read from it: at least 8
    /// KiB; default: 8 MiB.
    pub backlog: usize,
    /// Work requests in flight on one queue pair: at least 1; default: 128.
    pub send_queue: u32,
    /// Bytes in flight on one queue pair: at least 1; default: 16 MiB.
    pub in_flight: u64,
    /// How often a get is tried when connections or reads fail: at least 1; default: 4.
    pub tries: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            key: 1024,
            payloads: 65_536,
            links: 1024,
            leases_per_peer: 4096,
            waiting_per_peer: 4096,
            gets: 4096,
            quarantine_per_peer: 1 << 30,
            // Measured over TCP on loopback: 4 KiB take 24 us in the grant and 89 us read, 32 KiB 40 and 117 us, 64 KiB 62
            // and 55 us. Over shared memory the border is at 16 KiB (`EAGER_MAPPED` of the engine).
            eager: 32 << 10,
            backlog: 8 << 20,
            send_queue: 128,
            in_flight: 16 << 20,
            tries: 4,
        }
    }
}

macro_rules! setters {
    ($($name:ident: $kind:ty),+ $(,)?) => {
        impl Limits {
            /// The defaults.
            #[must_use]
            pub fn new() -> Self {
                Self::default()
            }

            $(
                #[doc = concat!("Sets [`", stringify!($name), "`](Self#structfield.", stringify!($name), ").")]
                #[must_use]
                pub fn $name(mut self, $name: $kind) -> Self {
                    self.$name = $name;
                    self
                }
            )+
        }
    };
}

setters! {
    key: usize,
    payloads: usize,
    links: usize,
    leases_per_peer: usize,
    waiting_per_peer: usize,
    gets: usize,
    quarantine_per_peer: u64,
    eager: u32,
    backlog: usize,
    send_queue: u32,
    in_flight: u64,
    tries: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setter_sets_its_own_field() {
        let options = PutOptions::new().consumers(3).time_to_live(Duration::from_secs(7));
        assert_eq!((options.consumers, options.time_to_live), (3, Duration::from_secs(7)));
        let limits = Limits::new().key(1).payloads(2).links(3).leases_per_peer(4).waiting_per_peer(5).gets(6);
        let limits = limits.quarantine_per_peer(7).eager(8).backlog(9).send_queue(10).in_flight(11).tries(12);
        let set = Limits {
            key: 1,
            payloads: 2,
            links: 3,
            leases_per_peer: 4,
            waiting_per_peer: 5,
            gets: 6,
            quarantine_per_peer: 7,
            eager: 8,
            backlog: 9,
            send_queue: 10,
            in_flight: 11,
            tries: 12,
        };
        assert_eq!(limits, set);
    }
}
