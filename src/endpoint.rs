//! The endpoint: what applications hold. Any endpoint puts and gets at once, from any number of threads.

use crate::driver::Driver;
use crate::engine::{self, Engine, GetRequest, HeldLease, NewPart, PayloadId, Source, Stats, Tick};
use crate::payload::{Data, Part, Payload, View};
use crate::pool::Pool;
use crate::sys::{self, OwnedBytes};
use crate::{Buffer, Builder, Error, ErrorKind, PutOptions, Result, Ticket};
use core::fmt;
use std::sync::mpsc;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;
use towline_control::address::Address;

/// Bytes copied into the pool between two times that readers are told how far the copy is: large enough that telling
/// costs little, small enough that reading begins early. Measured over shared memory: 1 MiB is 1.3 times as fast as
/// 4 MiB.
const FILL_STEP: usize = 1 << 20;

/// A part of the network that puts and gets payloads. Clones are handles of the same endpoint; it is closed when the
/// last is gone, at once and without draining: call [`close`](Self::close) to drain.
///
/// `Send` and `Sync`. A handle that came into a child process by fork gives [`ErrorKind::Forked`] from every call (I13).
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
    deadline: Duration,
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

/// Where a payload is to be had: a ticket, or a peer's address and a key.
#[derive(Debug, Clone)]
pub struct Origin(Result<Source>);

impl From<&Ticket> for Origin {
    fn from(ticket: &Ticket) -> Self {
        Self(Ok(Source::Ticket(Box::new(ticket.clone()))))
    }
}

impl From<Ticket> for Origin {
    fn from(ticket: Ticket) -> Self {
        Self(Ok(Source::Ticket(Box::new(ticket))))
    }
}

impl<P: AsRef<str>, K: AsRef<[u8]>> From<(P, K)> for Origin {
    fn from((peer, key): (P, K)) -> Self {
        let address = parse_address("get", peer.as_ref());
        Self(address.map(|peer| Source::Key { peers: vec![peer], key: key.as_ref().to_vec() }))
    }
}

pub(crate) fn parse_address(operation: &'static str, text: &str) -> Result<Address> {
    text.parse().map_err(|error: towline_control::address::AddressError| {
        Error::new(operation, ErrorKind::AddressMalformed { text: text.to_owned(), why: error.to_string() })
    })
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
            process: std::process::id(),
            pool: parts.pool,
            driver: parts.driver,
        });
        Ok(Self(Arc::new(Handle(shared))))
    }

    fn shared(&self) -> &Arc<Shared> {
        &self.0.0
    }

    /// The first address at which it says it can be reached, for [`get`](Self::get) by key.
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

    /// An exclusive, writable buffer of `len` bytes out of the pool, each byte as its last owner left it. Waits for room
    /// for the endpoint's default deadline; first come, first served.
    ///
    /// # Errors
    /// [`ErrorKind::PoolFull`] after the deadline, [`ErrorKind::PoolTooSmall`], [`ErrorKind::ZeroLength`].
    pub fn alloc(&self, len: usize) -> Result<Buffer> {
        self.alloc_within(len, self.shared().deadline)
    }

    /// As [`alloc`](Self::alloc), with a deadline of its own; [`Duration::ZERO`] does not wait.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn alloc_within(&self, len: usize, timeout: Duration) -> Result<Buffer> {
        const ALLOC: &str = "alloc";
        let shared = self.shared();
        shared.check(ALLOC)?;
        let pool = &shared.pool;
        match pool.allocate(ALLOC, len as u64) {
            Err(error) if matches!(error.kind(), ErrorKind::PoolFull { .. }) && !timeout.is_zero() => {}
            other => return other,
        }
        let (sender, receiver) = mpsc::channel();
        let waiter = pool.wait(ALLOC, len as u64, move || {
            let _gone_meanwhile = sender.send(());
        })?;
        if let Some(buffer) = waiter.take() {
            return Ok(buffer);
        }
        let _granted_or_late = receiver.recv_timeout(timeout);
        // Whatever ended the wait, the buffer counts if it is there.
        match waiter.take() {
            Some(buffer) => Ok(buffer),
            None => {
                let error = pool.full(ALLOC, len as u64);
                waiter.cancel();
                Err(error)
            }
        }
    }

    /// Publishes a payload for one consumer; it is kept until that consumer has had it, it is removed or replaced, or
    /// nobody has used it for five minutes.
    ///
    /// Parts that are pool buffers are published without a copy. Parts that are bytes are copied into the pool, which
    /// waits for room as [`alloc`](Self::alloc) does; a consumer that waits already reads behind the copy.
    ///
    /// # Errors
    /// For keys and parts that are not allowed, and as [`alloc`](Self::alloc). The buffers are given back to the pool.
    pub fn put<'a>(&self, key: impl AsRef<[u8]>, parts: impl IntoIterator<Item = Part<'a>>) -> Result<Ticket> {
        self.put_with(key, parts, &PutOptions::default())
    }

    /// As [`put`](Self::put), with options.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub fn put_with<'a>(
        &self,
        key: impl AsRef<[u8]>,
        parts: impl IntoIterator<Item = Part<'a>>,
        options: &PutOptions,
    ) -> Result<Ticket> {
        const PUT: &str = "put";
        let shared = self.shared();
        shared.check(PUT)?;
        let mut new_parts = Vec::new();
        let mut fills = Vec::new();
        let mut total = 0u64;
        for part in parts {
            let buffer = match part.data {
                Data::Buffer(buffer) => Some(buffer),
                Data::Bytes([]) => None,
                Data::Bytes(bytes) => {
                    let buffer = self.alloc(bytes.len())?;
                    fills.push(Fill { offset: buffer.offset(), before: total, bytes });
                    Some(buffer)
                }
            };
            total += buffer.as_ref().map_or(0, Buffer::len) as u64;
            new_parts.push(NewPart { name: part.name, dtype: part.dtype, shape: part.shape, buffer });
        }
        let to_fill: usize = fills.iter().map(|fill| fill.bytes.len()).sum();
        // A small payload is copied before it is published: it may then travel in one message.
        let behind = to_fill > FILL_STEP;
        if !behind {
            for fill in &fills {
                shared.write(fill.offset, fill.bytes)?;
            }
        }
        let watermark = if behind { Some(fills.first().map_or(total, |fill| fill.before)) } else { None };
        let put = |engine: &mut Engine| engine.put(sys::boot_clock(), key.as_ref(), new_parts, watermark, options);
        let (id, layout) = shared.driver.with(put)?;
        if behind {
            self.fill(id, &fills, total)?;
        }
        let addresses = self.addresses();
        Ok(Ticket {
            boot: shared.boot,
            incarnation: shared.incarnation,
            slot: id.slot,
            generation: id.generation,
            addresses,
            layout,
        })
    }

    /// Copies the bytes in, and tells readers how far it is.
    fn fill(&self, id: PayloadId, fills: &[Fill<'_>], total: u64) -> Result<()> {
        let shared = self.shared();
        // While it is being filled a payload keeps its memory, whatever becomes of it; and not a moment longer, also
        // when this thread panics.
        let _guard = FillGuard { shared, id };
        for (index, fill) in fills.iter().enumerate() {
            let next = fills.get(index + 1).map_or(total, |next| next.before);
            for (step, bytes) in fill.bytes.chunks(FILL_STEP).enumerate() {
                let done = (step * FILL_STEP) as u64;
                shared.write(fill.offset + done, bytes)?;
                let upto = fill.before + done + bytes.len() as u64;
                let watermark = if upto == fill.before + fill.bytes.len() as u64 { next } else { upto };
                shared.driver.with(|engine| engine.raise_watermark(sys::boot_clock(), id, watermark));
            }
        }
        Ok(())
    }

    /// Gets a payload into the pool: named by a ticket, or by `(peer address, key)`, for which it waits if it is not
    /// there yet. `timeout` counts from the call.
    ///
    /// # Errors
    /// Typed, with the way out: see [`ErrorKind`]. The deadline gives [`ErrorKind::TimedOut`]; no room in the pool until
    /// then gives [`ErrorKind::PoolFull`].
    pub fn get(&self, from: impl Into<Origin>, timeout: Duration) -> Result<Payload> {
        self.run("get", from.into(), timeout, false, None).map(Payload::new)
    }

    /// As [`get`](Self::get), into memory of the caller's own instead of the pool: `destination` must have at least
    /// [`Layout::destination_len`](crate::Layout::destination_len) bytes, and comes back by
    /// [`Payload::into_vec`]. It is given away and not lent, so that it lives until nothing touches it any more, also
    /// when the deadline comes first.
    ///
    /// # Errors
    /// As [`get`](Self::get), and [`ErrorKind::DestinationTooSmall`]. The destination is lost with the error.
    pub fn get_into(&self, from: impl Into<Origin>, destination: Vec<u8>, timeout: Duration) -> Result<Payload> {
        if destination.is_empty() {
            return self.get(from, timeout);
        }
        let own = OwnedBytes::new(destination.into_boxed_slice());
        self.run("get", from.into(), timeout, false, Some(own)).map(Payload::new)
    }

    /// A read-only view of a payload in its producer's memory: same host only, no byte is copied. The payload's memory
    /// stays the producer's until the view is dropped.
    ///
    /// # Errors
    /// As [`get`](Self::get), and [`ErrorKind::PathUnsuitable`] where the path has no views.
    pub fn view(&self, from: impl Into<Origin>, timeout: Duration) -> Result<View> {
        let delivery = self.run("view", from.into(), timeout, true, None)?;
        Ok(View::new(delivery, self.shared().clone()))
    }

    fn run(
        &self,
        name: &'static str,
        from: Origin,
        timeout: Duration,
        view: bool,
        destination: Option<Arc<OwnedBytes>>,
    ) -> Result<engine::Delivery> {
        let shared = self.shared();
        shared.check(name)?;
        let mut source = from.0?;
        resolve_names(name, &mut source)?;
        let now = sys::boot_clock();
        let mut request = GetRequest::new(source, deadline_of(now, timeout));
        request.view = view;
        request.destination = destination;
        let operation = shared.driver.with(|engine| engine.get(now, request))?;
        shared.driver.wait(operation, |engine| engine.take(operation))
    }

    /// Waits until `count` gets of peers wait here for `key`, which is not put yet.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`], [`ErrorKind::Closed`].
    pub fn wait_for_consumers(&self, key: impl AsRef<[u8]>, count: usize, timeout: Duration) -> Result<()> {
        let shared = self.shared();
        shared.check("wait_for_consumers")?;
        let now = sys::boot_clock();
        let deadline = deadline_of(now, timeout);
        let operation = shared.driver.with(|engine| engine.await_consumers(now, key.as_ref(), count, deadline))?;
        shared.driver.wait(operation, |engine| engine.take_consumers(operation))
    }

    /// Takes a payload of this endpoint out: nobody gets it any more. Consumers that read it just now are not disturbed,
    /// and its memory goes back to the pool when they are done.
    ///
    /// # Errors
    /// [`ErrorKind::Gone`] when it is not there any more, or is another endpoint's.
    pub fn remove(&self, ticket: &Ticket) -> Result<()> {
        const REMOVE: &str = "remove";
        let shared = self.shared();
        shared.check(REMOVE)?;
        if ticket.incarnation != shared.incarnation {
            return Err(Error::new(REMOVE, ErrorKind::Gone(crate::Gone::OtherIncarnation)));
        }
        let id = PayloadId { slot: ticket.slot, generation: ticket.generation };
        shared.driver.with(|engine| engine.remove(sys::boot_clock(), id))
    }

    /// Takes out the payload under `key`, if there is one, and says whether there was.
    pub fn remove_key(&self, key: impl AsRef<[u8]>) -> bool {
        let shared = self.shared();
        shared.check("remove").is_ok()
            && shared.driver.with(|engine| engine.remove_key(sys::boot_clock(), key.as_ref()))
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

    /// Closes the endpoint: new operations are refused, gets in progress end with [`ErrorKind::Closed`], and consumers
    /// that read just now are waited for until `timeout`; then every connection is broken. Returns what was left: leases
    /// that did not end in time and bytes that stay in quarantine, all zero after a drained close. Safe with operations
    /// in flight, and more than once.
    pub fn close(&self, timeout: Duration) -> Stats {
        let shared = self.shared();
        if shared.check("close").is_err() {
            return Stats::default();
        }
        shared.driver.close(timeout)
    }
}

impl Shared {
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.pool.memory().write(offset, bytes).map_err(|error| Error::new("put", ErrorKind::Verbs(error)))
    }
}

/// Host names become addresses here, in the caller's thread, since looking them up may take long.
fn resolve_names(operation: &'static str, source: &mut Source) -> Result<()> {
    if let Source::Key { peers, .. } = source {
        let mut resolved = Vec::new();
        for peer in peers.drain(..) {
            match peer {
                Address::Host(_) => {
                    resolved.extend(crate::builder::resolve(operation, &peer)?.into_iter().map(Address::Ip))
                }
                other => resolved.push(other),
            }
        }
        *peers = resolved;
    }
    Ok(())
}

struct Fill<'a> {
    offset: u64,
    before: u64,
    bytes: &'a [u8],
}

struct FillGuard<'a> {
    shared: &'a Shared,
    id: PayloadId,
}

impl Drop for FillGuard<'_> {
    fn drop(&mut self) {
        self.shared.driver.with(|engine| engine.filled(sys::boot_clock(), self.id));
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
