//! The endpoint's pool: one registered memory, the extents handed out of it, and who waits for room.
//!
//! Extents come from core's `BufferPool`. This layer adds owners ([`Buffer`]) and waiting (`pool/waiting.rs`): first come,
//! first served, and no lost wake-up.

mod waiting;

#[cfg(all(test, towline_loom))]
mod models;

use crate::sys;
use crate::{Error, ErrorKind, Result};
use core::fmt;
use core::ops::{Deref, DerefMut};
use std::sync::Arc;
use towline_core::pool::{Extent, PoolLayout};
use towline_verbs::Memory;
use waiting::{Room, Turn};

/// One registered memory and its extents.
pub(crate) struct Pool {
    memory: Memory,
    room: Room,
}

impl Pool {
    /// A pool over all of `memory`.
    pub(crate) fn new(memory: Memory, granule: u64) -> Result<Arc<Self>> {
        let bad = |why: String| Error::new("build", ErrorKind::BadOption { option: "granule", why });
        let layout = PoolLayout::new(memory.len(), granule).map_err(|e| bad(e.to_string()))?;
        let room = Room::new(layout).map_err(|e| bad(e.to_string()))?;
        Ok(Arc::new(Self { memory, room }))
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Bytes of the pool.
    pub(crate) fn len(&self) -> u64 {
        self.layout().region_len()
    }

    pub(crate) fn free(&self) -> u64 {
        self.room.extents().free_granules() * self.layout().granule()
    }

    pub(crate) fn largest_free_run(&self) -> u64 {
        self.room.extents().largest_free_run() * self.layout().granule()
    }

    /// Extents that somebody owns.
    pub(crate) fn buffers(&self) -> u64 {
        self.room.owned()
    }

    /// How many wait for room.
    pub(crate) fn waiting(&self) -> usize {
        self.room.waiting()
    }

    /// A buffer now, or the reason why not. Fails while others wait, since they came first.
    pub(crate) fn allocate(self: &Arc<Self>, operation: &'static str, len: u64) -> Result<Buffer> {
        self.check(operation, len)?;
        match self.room.allocate(len) {
            Some(extent) => Ok(Buffer { pool: self.clone(), extent, len }),
            None => Err(self.full(operation, len)),
        }
    }

    /// Several buffers now, or the reason why not all of them.
    pub(crate) fn allocate_all(self: &Arc<Self>, operation: &'static str, lens: &[u64]) -> Result<Vec<Buffer>> {
        let total = self.check_all(operation, lens)?;
        match self.room.allocate_all(lens) {
            Some(extents) => Ok(self.own(extents, lens)),
            None => Err(self.full(operation, total)),
        }
    }

    /// Joins the queue for `len` bytes. `notify` is called once, without a lock held, when the buffer is there to be
    /// [taken](Waiter::take): from any thread, and from within this call if there is room already.
    pub(crate) fn wait(
        self: &Arc<Self>,
        operation: &'static str,
        len: u64,
        notify: impl Fn() + Send + Sync + 'static,
    ) -> Result<Arc<Waiter>> {
        self.wait_all(operation, vec![len], notify)
    }

    /// The same for several buffers at once: whoever waits for them holds none meanwhile, so that two who need much do
    /// not wait for each other.
    pub(crate) fn wait_all(
        self: &Arc<Self>,
        operation: &'static str,
        lens: Vec<u64>,
        notify: impl Fn() + Send + Sync + 'static,
    ) -> Result<Arc<Waiter>> {
        self.check_all(operation, &lens)?;
        Ok(Arc::new(Waiter { pool: self.clone(), turn: self.room.wait_all(lens, notify) }))
    }

    /// The error that says how full it is.
    pub(crate) fn full(&self, operation: &'static str, need: u64) -> Error {
        Error::new(operation, ErrorKind::PoolFull { need, free: self.free(), largest: self.largest_free_run() })
    }

    fn layout(&self) -> PoolLayout {
        self.room.extents().layout()
    }

    /// Each is at least one byte, and all fit into the pool; their sum.
    fn check_all(&self, operation: &'static str, lens: &[u64]) -> Result<u64> {
        let total = lens.iter().fold(0, |total: u64, len| total.saturating_add(*len));
        lens.iter().try_for_each(|len| self.check(operation, *len))?;
        self.check(operation, total)?;
        Ok(total)
    }

    fn own(self: &Arc<Self>, extents: Vec<Extent>, lens: &[u64]) -> Vec<Buffer> {
        let own = |(extent, len): (Extent, &u64)| Buffer { pool: self.clone(), extent, len: *len };
        extents.into_iter().zip(lens).map(own).collect()
    }

    fn check(&self, operation: &'static str, len: u64) -> Result<()> {
        if len == 0 {
            return Err(Error::new(operation, ErrorKind::ZeroLength));
        }
        if len > self.len() {
            return Err(Error::new(operation, ErrorKind::PoolTooSmall { need: len, pool: self.len() }));
        }
        Ok(())
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("len", &self.len()).field("free", &self.free()).finish_non_exhaustive()
    }
}

/// A place in the queue for room.
pub(crate) struct Waiter {
    pool: Arc<Pool>,
    turn: Arc<Turn>,
}

impl Waiter {
    /// The buffer, once, if it is there.
    pub(crate) fn take(&self) -> Option<Buffer> {
        self.take_all()?.pop()
    }

    /// The buffers, once, if they are there.
    pub(crate) fn take_all(&self) -> Option<Vec<Buffer>> {
        let extents = self.turn.take_all()?;
        Some(self.pool.own(extents, self.turn.needs()))
    }

    /// Leaves the queue; a buffer that was granted meanwhile goes to whoever is next.
    pub(crate) fn cancel(&self) {
        self.pool.room.leave(&self.turn);
    }
}

impl fmt::Debug for Waiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waiter").field("needs", &self.turn.needs()).finish_non_exhaustive()
    }
}

/// An exclusively owned, writable part of an endpoint's pool. Dropping it gives it back.
pub struct Buffer {
    pool: Arc<Pool>,
    extent: Extent,
    len: u64,
}

impl Buffer {
    /// Length in bytes, as asked for.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Never: a pool hands out no buffer of zero bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes. A buffer fresh from the pool holds whatever its last owner left there.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        sys::owned_bytes(self.pool.memory(), self.extent.offset(), self.len)
    }

    /// The bytes, to write.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        sys::owned_bytes_mut(self.pool.memory(), self.extent.offset(), self.len)
    }

    /// Offset of the first byte within the pool.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.extent.offset()
    }

    pub(crate) fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self.as_slice()
    }
}

impl AsMut<[u8]> for Buffer {
    fn as_mut(&mut self) -> &mut [u8] {
        self.as_mut_slice()
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.as_slice()
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.as_mut_slice()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.pool.room.release(self.extent);
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("offset", &self.offset()).field("len", &self.len).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};
    use towline_verbs::memory::HugePages;

    const MIB: u64 = 1 << 20;

    fn pool(len: u64) -> Arc<Pool> {
        Pool::new(Memory::shared(len, HugePages::Off).unwrap(), 4096).unwrap()
    }

    #[test]
    fn a_full_pool_says_need_free_and_largest() {
        let pool = pool(MIB);
        let held = pool.allocate("alloc", MIB / 2).unwrap();
        let error = pool.allocate("alloc", MIB).unwrap_err();
        assert_eq!(error.kind(), &ErrorKind::PoolFull { need: MIB, free: MIB / 2, largest: MIB / 2 });
        assert!(matches!(pool.allocate("alloc", 2 * MIB).unwrap_err().kind(), ErrorKind::PoolTooSmall { .. }));
        assert!(matches!(pool.allocate("alloc", 0).unwrap_err().kind(), ErrorKind::ZeroLength));
        drop(held);
        assert_eq!((pool.free(), pool.buffers()), (MIB, 0));
    }

    #[test]
    fn waiters_are_served_in_order_and_not_overtaken() {
        let pool = pool(MIB);
        let held = pool.allocate("alloc", MIB).unwrap();
        let called = Arc::new(AtomicU32::new(0));
        let counted = |called: &Arc<AtomicU32>| {
            let called = called.clone();
            move || {
                called.fetch_add(1, Ordering::SeqCst);
            }
        };
        let first = pool.wait("alloc", MIB, counted(&called)).unwrap();
        let second = pool.wait("alloc", 4096, counted(&called)).unwrap();
        assert!(pool.allocate("alloc", 4096).is_err(), "nobody overtakes those who wait");
        drop(held);
        let buffer = first.take().expect("the first is served");
        assert!(second.take().is_none(), "the second waits for the first to be done");
        drop(buffer);
        assert!(second.take().is_some());
        assert_eq!(called.load(Ordering::SeqCst), 2);
        assert_eq!((pool.free(), pool.waiting()), (MIB, 0));
    }

    #[test]
    fn a_waiter_that_leaves_lets_the_next_one_in() {
        let pool = pool(MIB);
        let held = pool.allocate("alloc", MIB / 2).unwrap();
        let large = pool.wait("alloc", MIB, || {}).unwrap();
        let small = pool.wait("alloc", 4096, || {}).unwrap();
        assert!(small.take().is_none());
        large.cancel();
        assert!(small.take().is_some());
        drop(held);
        let granted = pool.wait("alloc", MIB, || {}).unwrap();
        granted.cancel();
        assert_eq!((pool.free(), pool.waiting(), pool.buffers()), (MIB, 0, 0));
    }

    #[test]
    fn many_threads_that_wait_all_get_their_turn() {
        let pool = pool(MIB);
        std::thread::scope(|scope| {
            for thread in 0..8u64 {
                let pool = &pool;
                scope.spawn(move || {
                    for round in 0..200u64 {
                        let (sender, receiver) = std::sync::mpsc::channel();
                        let need = 4096 * (1 + (thread * 31 + round * 17) % 256);
                        let waiter = pool.wait("alloc", need, move || sender.send(()).unwrap_or(())).unwrap();
                        let mut buffer = loop {
                            if let Some(buffer) = waiter.take() {
                                break buffer;
                            }
                            receiver.recv_timeout(std::time::Duration::from_secs(20)).expect("no lost wake-up");
                        };
                        buffer.as_mut_slice().fill(thread as u8);
                        assert!(buffer.as_slice().iter().all(|byte| *byte == thread as u8));
                    }
                });
            }
        });
        assert_eq!((pool.free(), pool.waiting(), pool.buffers()), (MIB, 0, 0));
    }
}
