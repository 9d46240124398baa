//! The atomics that everything here is built on: the processor's own, or the model checker's.

pub(crate) use core::sync::atomic::Ordering;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// One word of the storage that a caller supplies for a pool or a table.
///
/// A fresh word is zero. Storage is anything that derefs to a slice of words, `Box<[Word]>`, `Vec<Word>` or a static
/// array among them. Whoever takes storage sets it up anew, whatever it held.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Word(AtomicU64);

impl Word {
    /// A word that is zero.
    #[must_use]
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    #[inline]
    pub(crate) fn load(&self, order: Ordering) -> u64 {
        self.0.load(order)
    }

    #[inline]
    pub(crate) fn store(&self, value: u64, order: Ordering) {
        self.0.store(value, order);
    }

    #[inline]
    pub(crate) fn compare_exchange(
        &self,
        current: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64> {
        self.0.compare_exchange(current, new, success, failure)
    }

    #[inline]
    pub(crate) fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
        self.0.fetch_add(value, order)
    }

    #[inline]
    pub(crate) fn fetch_and(&self, value: u64, order: Ordering) -> u64 {
        self.0.fetch_and(value, order)
    }

    #[inline]
    pub(crate) fn fetch_max(&self, value: u64, order: Ordering) -> u64 {
        self.0.fetch_max(value, order)
    }

    /// A hint: any value is legal, so that nothing depends on its order.
    #[inline]
    pub(crate) fn hint(&self) -> u64 {
        self.0.load(Relaxed)
    }

    #[inline]
    pub(crate) fn set_hint(&self, value: u64) {
        self.0.store(value, Relaxed);
    }

    #[inline]
    pub(crate) fn hint_or(&self, value: u64) {
        self.0.fetch_or(value, Relaxed);
    }

    #[inline]
    pub(crate) fn hint_and(&self, value: u64) {
        self.0.fetch_and(value, Relaxed);
    }

    #[inline]
    pub(crate) fn hint_add(&self, value: u64) -> u64 {
        self.0.fetch_add(value, Relaxed)
    }

    #[inline]
    pub(crate) fn hint_max(&self, value: u64) {
        self.0.fetch_max(value, Relaxed);
    }

    /// Sets a word up before it is shared. Storage fresh from the kernel is zero already, and a word that is right is
    /// not written: setting up a large pool does not fault in its storage.
    pub(crate) fn set_up(&self, value: u64) {
        if self.load(Relaxed) != value {
            self.store(value, Relaxed);
        }
    }

    /// Changes the word to what `step` makes of it, again until no other thread comes between; gives the value before
    /// and after. `step` says in its error why a value is not to be changed.
    #[inline]
    pub(crate) fn update<E>(&self, mut step: impl FnMut(u64) -> Result<u64, E>) -> Result<(u64, u64), E> {
        let mut before = self.load(Ordering::Acquire);
        loop {
            let after = step(before)?;
            match self.compare_exchange(before, after, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Ok((before, after)),
                Err(now) => before = now,
            }
        }
    }
}

/// A number below `count` that is mostly the same within a thread and mostly another in another: from where the thread's
/// stack lies, since there is nothing else to know threads by here.
#[inline]
pub(crate) fn stripe(count: usize) -> usize {
    let here = 0u8;
    let address = &raw const here as usize as u64;
    // Stacks are a mebibyte apart or more; within one, calls are rarely that deep. Fibonacci hashing of the rest.
    ((address >> 20).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize % count
}
