//! The endpoint: what applications hold. Any endpoint puts and gets at once, from any number of threads.

mod consume;
mod fill;
mod produce;

pub use consume::Origin;
pub(crate) use consume::parse_address;

use crate::driver::Driver;
use crate::engine::{self, HeldLease, Stats, Tick};
use crate::pool::Pool;
use crate::sys;
use crate::{Builder, Error, ErrorKind, Result};
use core::fmt;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;
use towline_control::address::Address;

/// An application's end of towline: it owns a pool of memory that others can read, publishes payloads in it
/// ([`put`](Self::put)), and gets or views the payloads of others ([`get`](Self::get), [`view`](Self::view)). A process
/// usually has one; every endpoint is producer and consumer at once.
///
/// ```
/// use std::time::Duration;
/// use towline::{DType, Endpoint, Part};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let producer = Endpoint::builder().pool_size(16 << 20).build()?;
/// let consumer = Endpoint::builder().pool_size(16 << 20).build()?; // usually in another process
///
/// let mut keys = producer.alloc(1024 * size_of::<f32>())?; // published as it is, without a copy
/// keys.elements_mut::<f32>()?.fill(0.5);
/// producer.put("layer 0", [Part::buffer("k", DType::F32, &[8, 128], keys)])?;
///
/// let payload = consumer.get((producer.address(), "layer 0"), Duration::from_secs(5))?;
/// let keys = payload.named("k").ok_or("no part of that name")?;
/// assert_eq!(keys.elements::<f32>()?[1023], 0.5);
/// # Ok(())
/// # }
/// ```
///
/// Clones are handles of the same endpoint, `Send` and `Sync`. It is closed when the last handle is gone, at once and
/// without draining: call [`close`](Self::close) to drain. Buffers, payloads and views outlive it. A handle that came
/// into a child process by fork gives [`ErrorKind::Forked`] from every call.
#[derive(Clone)]
pub struct Endpoint(Arc<Handle>);

struct Handle(Arc<Shared>);

/// What handles, views and the background thread share.
pub(crate) struct Shared {
    pub(crate) driver: Driver,
    pub(crate) pool: Arc<Pool>,
    /// The incarnation, for tickets.
    boot: [u8; 16],
    incarnation: [u8; 16],
    advertised: Vec<Address>,
    /// How long `alloc` waits.
    deadline: Duration,
    room: produce::Room,
    process: u32,
}

impl Shared {
    pub(crate) fn release(&self, lease: HeldLease) {
        // A forked child's copy of a view is not the reader whose word the producer waits for (I13).
        if self.check("view").is_ok() {
            self.driver.with(|engine| engine.release(sys::boot_clock(), lease));
        }
    }

    fn check(&self, operation: &'static str) -> Result<()> {
        if std::process::id() == self.process { Ok(()) } else { Err(Error::new(operation, ErrorKind::Forked)) }
    }
}

impl Endpoint {
    /// An endpoint with the default options: loopback, a port of the system's choice, a pool of 256 MiB, every path.
    #[must_use]
    pub fn builder() -> Builder {
        Builder::default()
    }

    pub(crate) fn start(parts: crate::builder::Built) -> Result<Self> {
        let shared = Arc::new(Shared {
            boot: parts.boot,
            incarnation: parts.incarnation,
            advertised: parts.advertised,
            deadline: parts.deadline,
            room: produce::Room::default(),
            process: std::process::id(),
            pool: parts.pool,
            driver: parts.driver,
        });
        Ok(Self(Arc::new(Handle(shared))))
    }

    fn shared(&self) -> &Arc<Shared> {
        &self.0.0
    }

    /// The first address at which it says it can be reached, for [`get`](Self::get) by key: `IP:PORT`, or `@NAME` of a
    /// Unix socket if it listens at no network address.
    #[must_use]
    pub fn address(&self) -> String {
        self.shared().advertised.first().map_or_else(
            || format!("@{}", String::from_utf8_lossy(&engine::unix_name_of(&self.shared().incarnation))),
            ToString::to_string,
        )
    }

    /// All addresses at which it says it can be reached.
    #[must_use]
    pub fn addresses(&self) -> Vec<String> {
        self.shared().advertised.iter().map(ToString::to_string).collect()
    }

    /// What it has done and holds; nothing in a forked child.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let shared = self.shared();
        if shared.check("stats").is_err() {
            return Stats::default();
        }
        shared.driver.with(|engine| engine.stats())
    }

    /// Closes the endpoint: new operations are refused, and those that wait end, with [`ErrorKind::Closed`]; consumers
    /// that read just now are waited for until `timeout`; then every connection is broken. Returns what was left: leases
    /// that did not end in time and bytes that stay in quarantine, all zero after a drained close. Safe with operations
    /// in flight, and more than once. The port that it listens at is free again when its handles and
    /// views are dropped.
    pub fn close(&self, timeout: Duration) -> Stats {
        let shared = self.shared();
        if shared.check("close").is_err() {
            return Stats::default();
        }
        shared.room.close();
        shared.driver.close(timeout)
    }
}

fn deadline_of(now: Tick, timeout: Duration) -> Tick {
    now.saturating_add(u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX / 2))
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.0.check("close").is_ok() {
            self.0.driver.close(Duration::ZERO);
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // The last handle is gone, and the last view with it: only now nothing has to be told to anybody.
        if self.check("close").is_ok() {
            self.driver.say_last_words();
            self.driver.stop();
        }
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint").field("address", &self.address()).finish_non_exhaustive()
    }
}

/// Locks a mutex that no panic can leave half changed.
pub(crate) fn lock<T>(mutex: &std::sync::Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
