//! What the tests of the whole share: contents that can be checked, endpoints in processes of their own, a meddling
//! network, and peers made by hand.
//!
//! Nothing here sleeps to get an order of events. Orders come from what is said over a socket, from
//! `wait_for_consumers`, and from counters that are looked at until they say so ([`until`]).
#![allow(dead_code, unreachable_pub, unused_imports)] // each test file uses its part
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

mod content;
mod fake;
mod options;
mod process;
mod proxy;
mod sys;

pub use content::{Got, How, Spec, fill, hash, part, words};
pub use fake::{Answer, Asked, Consumer, Granting, Producer, REGION, Said, TCP, deadline, layout, session_config};
pub use options::{Options, lonely};
pub use process::{Failure, Pending, Process, Source, alone};
pub use proxy::Proxy;
pub use sys::{Signal, forked, limit_descriptors, raise_descriptors, view_slice};

use std::net::SocketAddr;
use std::time::{Duration, Instant};
use towline::{Endpoint, Error, ErrorKind, Path, Paths, PutOptions, Stats};

/// The deadline of what is expected to succeed: the machine may be slow and busy with other things.
pub const LONG: Duration = Duration::from_secs(60);

/// A deadline that is expected to pass.
pub const SHORT: Duration = Duration::from_millis(150);

/// How much later than its deadline a call may return on a machine that is busy with other things. Far below [`LONG`], so
/// that a deadline which is not honoured shows.
pub const SLACK: Duration = Duration::from_secs(5);

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;

/// Looks until `what` is so.
#[track_caller]
pub fn until(what: &str, mut so: impl FnMut() -> bool) {
    let started = Instant::now();
    while !so() {
        assert!(started.elapsed() < LONG, "not in {LONG:?}: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// An endpoint of this process with a pool of `pool` bytes.
#[track_caller]
pub fn endpoint(pool: u64) -> Endpoint {
    Options::default().pool(pool).build().unwrap()
}

/// The same, with TCP as its only path.
#[track_caller]
pub fn tcp_endpoint(pool: u64) -> Endpoint {
    Options::default().pool(pool).paths("tcp").build().unwrap()
}

/// An endpoint of this process that is reached through a relay only.
#[track_caller]
pub fn behind_proxy(options: &Options) -> (Endpoint, Proxy) {
    let proxy = Proxy::new();
    let own = SocketAddr::from((lonely(), 7000)); // told to the relay before it is bound, and free
    let endpoint = options.clone().bind(own).advertise(proxy.address).build().unwrap();
    proxy.target(own);
    (endpoint, proxy)
}

/// Options for `consumers` consumers.
pub fn for_consumers(consumers: u32) -> PutOptions {
    PutOptions::new().consumers(consumers)
}

/// Options for a payload that expires when it was not used for `time`.
pub fn expiring(time: Duration) -> PutOptions {
    PutOptions::new().time_to_live(time)
}

/// Nothing of the pool is in use, and nothing is owed.
#[track_caller]
pub fn assert_whole(endpoint: &Endpoint) {
    until_whole(endpoint, |stats| stats.payloads == 0);
}

/// As [`assert_whole`], once what `also` says is so.
#[track_caller]
pub fn until_whole(endpoint: &Endpoint, also: impl Fn(&Stats) -> bool) {
    let started = Instant::now();
    loop {
        let stats = endpoint.stats();
        if is_whole(&stats) && also(&stats) {
            return;
        }
        assert!(started.elapsed() < LONG, "the pool does not become whole again: {stats:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub fn is_whole(stats: &Stats) -> bool {
    stats.pool_free == stats.pool_bytes
        && stats.pool_largest_free == stats.pool_bytes
        && stats.pool_buffers == 0
        && stats.pool_waiting == 0
        && stats.leases == 0
        && stats.fencing == 0
        && stats.quarantined_bytes == 0
        && stats.gets_in_progress == 0
}

/// The error says its operation, and what can be done, or that a retry helps.
#[track_caller]
pub fn assert_tells(error: &Error, operation: &str) {
    assert_eq!(error.operation(), operation);
    let text = error.to_string();
    assert!(text.starts_with(&format!("{operation}: ")), "{text}");
    assert!(error.way_out().is_some() || error.can_retry(), "{text}: and now?");
    if let Some(way_out) = error.way_out() {
        assert!(text.contains(way_out), "{text}");
    }
}

/// Threads that all begin when the last is there, each with its number; their results in order.
pub fn together<R: Send>(count: usize, run: impl Fn(usize) -> R + Sync) -> Vec<R> {
    let barrier = std::sync::Barrier::new(count);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..count)
            .map(|number| {
                let (barrier, run) = (&barrier, &run);
                std::thread::Builder::new()
                    .stack_size(256 << 10)
                    .spawn_scoped(scope, move || {
                        barrier.wait();
                        run(number)
                    })
                    .unwrap()
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// One of the ways that bytes take, with what a test needs to go it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Both endpoints in this process.
    Direct,
    /// Two processes of this host.
    Shm,
    /// Two processes that may use nothing but TCP.
    Tcp,
}

impl Way {
    pub const ALL: [Self; 3] = [Self::Direct, Self::Shm, Self::Tcp];
    /// Those between two processes.
    pub const APART: [Self; 2] = [Self::Shm, Self::Tcp];

    pub const fn path(self) -> Path {
        match self {
            Self::Direct => Path::Direct,
            Self::Shm => Path::Shm,
            Self::Tcp => Path::Tcp,
        }
    }

    /// Options of an endpoint that goes this way and no other.
    pub fn options(self) -> Options {
        Options::default().paths(self.path().name())
    }
}

/// An endpoint of this process, and another that is elsewhere if the way leads elsewhere.
pub struct Pair {
    pub way: Way,
    pub here: Endpoint,
    pub there: There,
}

/// The other endpoint.
pub enum There {
    Here(Endpoint),
    Apart(Process),
}

impl Pair {
    #[track_caller]
    pub fn new(way: Way, pool: u64) -> Self {
        let options = way.options().pool(pool);
        let here = options.build().unwrap();
        let there = match way {
            Way::Direct => There::Here(options.build().unwrap()),
            Way::Shm | Way::Tcp => There::Apart(Process::start(&options)),
        };
        Self { way, here, there }
    }

    /// Puts there, gets here, checks the content and the way.
    #[track_caller]
    pub fn carry(&self, key: &str, spec: &Spec) {
        let ticket = match &self.there {
            There::Here(endpoint) => spec.put(endpoint, key, &PutOptions::default()).unwrap(),
            There::Apart(process) => process.put(key, spec).unwrap(),
        };
        let payload = self.here.get(&ticket, LONG).unwrap();
        spec.check(&payload);
        let info = payload.info();
        assert_eq!((info.path, info.bytes, info.fallback_bytes), (self.way.path(), spec.len(), 0), "{info:?}");
    }

    /// Puts here, gets there, checks likewise.
    #[track_caller]
    pub fn carry_back(&self, key: &str, spec: &Spec) {
        let ticket = spec.put(&self.here, key, &PutOptions::default()).unwrap();
        let got = match &self.there {
            There::Here(endpoint) => Got::of(&endpoint.get(&ticket, LONG).unwrap()),
            There::Apart(process) => process.get(&ticket, LONG).unwrap(),
        };
        spec.check_got(&got);
        assert_eq!((got.path.as_str(), got.fallback_bytes), (self.way.path().name(), 0), "{got:?}");
    }

    /// Both pools are whole.
    #[track_caller]
    pub fn assert_whole(&self) {
        assert_whole(&self.here);
        match &self.there {
            There::Here(endpoint) => assert_whole(endpoint),
            There::Apart(process) => process.assert_whole(),
        }
    }
}

/// Runs `body` over every way.
#[track_caller]
pub fn every_way(pool: u64, body: impl Fn(&Pair)) {
    for way in Way::ALL {
        eprintln!("over {way:?}");
        body(&Pair::new(way, pool));
    }
}
