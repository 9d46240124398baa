//! The producer's calls: alloc, put, wait for consumers, remove.

use super::consume::{named, subject};
use super::fill::{FILL_STEP, Fill, fill};
use super::{Endpoint, deadline_of, lock};
use crate::engine::{NewPart, PayloadId};
use crate::layout::Layout;
use crate::payload::{Data, Part};
use crate::sys;
use crate::{Buffer, Error, ErrorKind, PutOptions, Result, Ticket};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use towline_verbs::memory;

/// Whether each part has as many bytes as its dtype and shape say.
fn check_layout(parts: &[Part<'_>]) -> Result<()> {
    let mut layout = Layout::default();
    for part in parts {
        let len = match &part.data {
            Data::Bytes(bytes) => bytes.len(),
            Data::Buffer(buffer) => buffer.len(),
        };
        layout.push(part.name, part.dtype, part.shape, len as u64).map_err(|kind| Error::new(PUT, kind))?;
    }
    Ok(())
}

const ALLOC: &str = "alloc";
const PUT: &str = "put";

/// Who waits for room in the pool, so that a close is told to them.
#[derive(Debug, Default)]
pub(super) struct Room {
    closed: AtomicBool,
    waiting: Mutex<BTreeMap<u64, Sender<()>>>,
}

/// A place among those who wait.
struct Seat<'a> {
    room: &'a Room,
    number: u64,
}

impl Room {
    pub(super) fn check(&self, operation: &'static str) -> Result<()> {
        if self.closed.load(Ordering::SeqCst) { Err(Error::new(operation, ErrorKind::Closed)) } else { Ok(()) }
    }

    /// Joins those who wait: `wake` is sent to when the endpoint is closed.
    fn enter(&self, operation: &'static str, wake: Sender<()>) -> Result<Seat<'_>> {
        let mut waiting = lock(&self.waiting);
        // Under the lock: either this sees the close, or the close sees this.
        self.check(operation)?;
        let number = waiting.last_key_value().map_or(0, |(last, _)| last + 1);
        waiting.insert(number, wake);
        Ok(Seat { room: self, number })
    }

    pub(super) fn close(&self) {
        let waiting = lock(&self.waiting);
        self.closed.store(true, Ordering::SeqCst);
        for waiter in waiting.values() {
            let _left_meanwhile = waiter.send(());
        }
    }
}

impl Seat<'_> {
    /// Leaves; an error if the endpoint was closed meanwhile.
    fn leave(self, operation: &'static str) -> Result<()> {
        self.room.check(operation)
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        lock(&self.room.waiting).remove(&self.number);
    }
}

impl Endpoint {
    /// An exclusive, writable buffer of `len` bytes out of the pool, each byte as its last owner left it. Waits for room
    /// as long as [`Builder::alloc_timeout`](crate::Builder::alloc_timeout) says, 30 seconds by default; first come,
    /// first served.
    ///
    /// # Errors
    /// [`ErrorKind::PoolFull`] after that time, [`ErrorKind::PoolTooSmall`], [`ErrorKind::ZeroLength`],
    /// [`ErrorKind::Closed`].
    pub fn alloc(&self, len: usize) -> Result<Buffer> {
        self.allocate(ALLOC, len, self.shared().deadline)
    }

    /// As [`alloc`](Self::alloc), with a deadline of its own; [`Duration::ZERO`] does not wait.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn alloc_within(&self, len: usize, timeout: Duration) -> Result<Buffer> {
        self.allocate(ALLOC, len, timeout)
    }

    fn allocate(&self, operation: &'static str, len: usize, timeout: Duration) -> Result<Buffer> {
        let mut buffers = self.allocate_all(operation, vec![len as u64], timeout)?;
        buffers.pop().ok_or_else(|| Error::new(operation, ErrorKind::ZeroLength))
    }

    /// Buffers of these lengths, all or none: who waits for room holds none of them meanwhile, so that two puts of several
    /// parts do not wait for each other.
    fn allocate_all(&self, operation: &'static str, lens: Vec<u64>, timeout: Duration) -> Result<Vec<Buffer>> {
        let shared = self.shared();
        shared.check(operation)?;
        shared.room.check(operation)?;
        let pool = &shared.pool;
        match pool.allocate_all(operation, &lens) {
            Err(error) if matches!(error.kind(), ErrorKind::PoolFull { .. }) && !timeout.is_zero() => {}
            other => return other,
        }
        let (sender, receiver) = mpsc::channel();
        let seat = shared.room.enter(operation, sender.clone())?;
        let total = lens.iter().sum();
        let waiter = pool.wait_all(operation, lens, move || {
            let _gone_meanwhile = sender.send(());
        })?;
        if let Some(buffers) = waiter.take_all() {
            return Ok(buffers);
        }
        let _granted_closed_or_late = receiver.recv_timeout(timeout);
        // Whatever else ended the wait, the buffers count if they are there.
        let error = match seat.leave(operation) {
            Ok(()) => match waiter.take_all() {
                Some(buffers) => return Ok(buffers),
                None => pool.full(operation, total),
            },
            Err(closed) => closed,
        };
        waiter.cancel();
        Err(error)
    }

    /// Publishes a payload for one consumer, and gives the ticket that names it. It is kept until that consumer has got
    /// or viewed it, it is removed, another one is put under its key, or nobody has used it for five minutes;
    /// [`put_with`](Self::put_with) says otherwise.
    ///
    /// Parts that are pool buffers are published without a copy. Parts that are bytes are copied into the pool, which
    /// waits for room as [`alloc`](Self::alloc) does. A consumer that waits already reads behind the copy, and over TCP
    /// the bytes themselves: then the rest is not copied once it has got them. When this returns nobody reads them any
    /// more, and it never waits for a consumer.
    ///
    /// # Errors
    /// For keys and parts that are not allowed, and as [`alloc`](Self::alloc). The buffers are given back to the pool.
    pub fn put<'a>(&self, key: impl AsRef<[u8]>, parts: impl IntoIterator<Item = Part<'a>>) -> Result<Ticket> {
        self.put_with(key, parts, &PutOptions::default())
    }

    /// As [`put`](Self::put), with options: for more consumers, or kept longer.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use towline::{DType, Endpoint, Part, PutOptions};
    /// # fn main() -> towline::Result<()> {
    /// # let endpoint = Endpoint::builder().pool_size(1 << 20).build()?;
    /// let options = PutOptions::new().consumers(2).time_to_live(Duration::from_secs(3600));
    /// endpoint.put_with("weights", [Part::bytes("w", DType::U8, &[3], b"abc")], &options)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub fn put_with<'a>(
        &self,
        key: impl AsRef<[u8]>,
        parts: impl IntoIterator<Item = Part<'a>>,
        options: &PutOptions,
    ) -> Result<Ticket> {
        let key = key.as_ref();
        self.publish(key, parts, options).map_err(|error| error.about(named(key)))
    }

    fn publish<'a>(
        &self,
        key: &[u8],
        parts: impl IntoIterator<Item = Part<'a>>,
        options: &PutOptions,
    ) -> Result<Ticket> {
        let shared = self.shared();
        shared.check(PUT)?;
        let parts: Vec<Part<'a>> = parts.into_iter().collect();
        // What can't be put is not waited for.
        shared.driver.with(|engine| engine.check_put(sys::boot_clock(), key, parts.len(), options))?;
        check_layout(&parts)?;
        let copied = parts.iter().filter_map(|part| match &part.data {
            Data::Bytes(bytes) if !bytes.is_empty() => Some(bytes.len() as u64),
            Data::Bytes(_) | Data::Buffer(_) => None,
        });
        let lens: Vec<u64> = copied.collect();
        if !lens.is_empty() {
            // What this very put holds of the pool does not become free by waiting for it.
            let own = parts.iter().filter_map(|part| match &part.data {
                Data::Buffer(buffer) if Arc::ptr_eq(buffer.pool(), &shared.pool) => Some(buffer.len() as u64),
                _ => None,
            });
            let (need, pool) = (own.sum::<u64>().saturating_add(lens.iter().sum()), shared.pool.len());
            if need > pool {
                return Err(Error::new(PUT, ErrorKind::PoolTooSmall { need, pool }));
            }
        }
        let buffers = if lens.is_empty() { Vec::new() } else { self.allocate_all(PUT, lens, shared.deadline)? };
        let mut buffers = buffers.into_iter();
        let mut new_parts = Vec::new();
        let mut fills = Vec::new();
        let mut total = 0u64;
        for (index, part) in parts.into_iter().enumerate() {
            let buffer = match part.data {
                Data::Buffer(buffer) => Some(buffer),
                Data::Bytes([]) => None,
                Data::Bytes(bytes) => {
                    let buffer = buffers.next();
                    let fill = |buffer: &Buffer| Fill { part: index, offset: buffer.offset(), before: total, bytes };
                    fills.extend(buffer.as_ref().map(fill));
                    buffer
                }
            };
            total += buffer.as_ref().map_or(0, Buffer::len) as u64;
            new_parts.push(NewPart { name: part.name, dtype: part.dtype, shape: part.shape, buffer, loan: None });
        }
        let to_fill: usize = fills.iter().map(|fill| fill.bytes.len()).sum();
        let put = |parts, watermark| {
            shared.driver.with(|engine| engine.put(sys::boot_clock(), key, parts, watermark, options))
        };
        let (id, layout) = if to_fill <= FILL_STEP {
            // A small payload is copied before it is published: it may then travel in one message.
            for fill in &fills {
                shared.write(fill.offset, fill.bytes)?;
            }
            put(new_parts, None)?
        } else {
            let bytes: Vec<&[u8]> = fills.iter().map(|fill| fill.bytes).collect();
            memory::lend(&bytes, |loans| {
                for (fill, loan) in fills.iter().zip(loans) {
                    new_parts[fill.part].loan = Some(loan.clone());
                }
                let (id, layout) = put(new_parts, Some(fills.first().map_or(total, |fill| fill.before)))?;
                fill(shared, id, &fills, loans, total)?;
                Ok::<_, Error>((id, layout))
            })?
        };
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

    /// Waits until `count` gets of peers wait here for `key`, which is not put yet.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`], [`ErrorKind::Closed`].
    pub fn wait_for_consumers(&self, key: impl AsRef<[u8]>, count: usize, timeout: Duration) -> Result<()> {
        let (shared, key) = (self.shared(), key.as_ref());
        shared.check("wait_for_consumers")?;
        let now = sys::boot_clock();
        let deadline = deadline_of(now, timeout);
        let waiting = shared.driver.with(|engine| engine.await_consumers(now, key, count, deadline));
        let outcome =
            waiting.and_then(|operation| shared.driver.wait(operation, |engine| engine.take_consumers(operation)));
        outcome.map_err(|error| error.about(named(key)))
    }

    /// Takes a payload of this endpoint out: nobody gets it any more. Consumers that read it just now are not disturbed,
    /// and its memory goes back to the pool when they are done.
    ///
    /// # Errors
    /// [`ErrorKind::Gone`] when it is not there any more, or is another endpoint's; [`ErrorKind::Closed`].
    pub fn remove(&self, ticket: &Ticket) -> Result<()> {
        const REMOVE: &str = "remove";
        let shared = self.shared();
        shared.check(REMOVE)?;
        shared.room.check(REMOVE)?;
        if ticket.incarnation != shared.incarnation {
            return Err(
                Error::new(REMOVE, ErrorKind::Gone(crate::Gone::OtherIncarnation)).about_subject(subject(ticket))
            );
        }
        let id = PayloadId { slot: ticket.slot, generation: ticket.generation };
        let removed = shared.driver.with(|engine| engine.remove(sys::boot_clock(), id));
        removed.map_err(|error| error.about_subject(subject(ticket)))
    }

    /// Takes out the payload under `key`, if there is one, and says whether there was.
    pub fn remove_key(&self, key: impl AsRef<[u8]>) -> bool {
        let shared = self.shared();
        shared.check("remove").is_ok()
            && shared.driver.with(|engine| engine.remove_key(sys::boot_clock(), key.as_ref()))
    }
}
