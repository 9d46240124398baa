//! A pool of exact extents in a region that the pool never touches.
//!
//! [`BufferPool`] divides a region of memory, of which it knows nothing but the length, into granules, and hands out
//! contiguous [`Extent`]s of exactly as many granules as the length asked for needs. All its state lies in [`Word`]s
//! that the caller supplies ([`PoolLayout::words`] says how many), so that the region may be device memory, and several
//! regions are several pools.
//!
//! - Any number of threads may call anything at any time; no call waits for another: a thread that is stopped within a
//!   call stops no other, and what it has claimed counts as taken meanwhile.
//! - Every misuse of a handle is detected, in every build, and changes nothing: see [`ReleaseError`].
//! - An allocation fails only if at one moment of the call no run of free granules was long enough. Contention alone
//!   never makes it fail.
//! - Free runs merge by construction: there is no state of free memory but the bits that say so.
//!
//! ```
//! use towline_core::{Word, pool::{AllocError, BufferPool, PoolLayout, ReleaseError}};
//!
//! let layout = PoolLayout::new(200 << 20, 4096)?;
//! let pool = BufferPool::new((0..layout.words()).map(|_| Word::default()).collect::<Vec<_>>(), layout)?;
//!
//! let large = pool.allocate(190 << 20, 1)?; // no rounding to a power of two
//! let refused = pool.allocate(20 << 20, 1);
//! assert_eq!(
//!     refused,
//!     Err(AllocError::NoSpace { need: 20 << 20, free: 10 << 20, largest_free_run: 10 << 20 })
//! );
//! pool.release(large)?;
//! assert_eq!(pool.release(large), Err(ReleaseError::AlreadyReleased { extent: large }));
//! assert_eq!(pool.largest_free_run(), pool.free_granules());
//! # Ok::<(), Box<dyn core::error::Error>>(())
//! ```
//!
#![doc = include_str!("design.md")]

mod bits;
mod counters;
mod error;
mod extent;
mod hints;
mod layout;
mod record;
mod search;
mod shape;
mod tree;

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;

pub use error::{AllocError, ReleaseError, ReserveError, StorageTooSmall};
pub use extent::Extent;
pub use layout::{LayoutError, MAX_GRANULE, MAX_REGION, MIN_GRANULE, PoolLayout};

use crate::sync::{Ordering, Word};
use core::sync::atomic::AtomicU32;
use counters::Counters;
use hints::Hints;
use record::{Kind, Record, Records};
use shape::Shape;
use tree::{Run, Tree};

/// Granules from which on an extent seldom lies within one word of the tree.
const SHORT: u64 = 32;

/// Pools made by this process; the next one's id.
static POOLS: AtomicU32 = AtomicU32::new(1);

/// A pool of exact extents; see the [module](self).
#[derive(Debug)]
pub struct BufferPool<S> {
    storage: S,
    layout: PoolLayout,
    shape: Shape,
    id: u32,
}

impl<S: AsRef<[Word]>> BufferPool<S> {
    /// A pool in which everything is free, its state in `storage`, whatever that held.
    ///
    /// # Errors
    /// There are fewer words than [`PoolLayout::words`].
    pub fn new(storage: S, layout: PoolLayout) -> Result<Self, StorageTooSmall> {
        let (need, have) = (layout.words(), storage.as_ref().len());
        if have < need {
            return Err(StorageTooSmall { need, have });
        }
        let shape = Shape::new(&layout);
        let pool = Self { storage, layout, shape, id: POOLS.fetch_add(1, Ordering::Relaxed) };
        pool.counters().set_up();
        pool.tree().set_up();
        pool.records().set_up(layout.granules());
        pool.hints_of(0).set_up();
        pool.hints().note_surely(Run { start: 0, end: layout.granules() });
        Ok(pool)
    }

    /// What the pool manages.
    #[must_use]
    pub fn layout(&self) -> PoolLayout {
        self.layout
    }

    /// Names this pool within the process: its extents carry it. Wraps after 2^32 pools.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.id
    }

    /// One extent that holds `len` bytes, in exactly [`PoolLayout::granules_for`]`(len)` granules. Its offset is a
    /// multiple of `align` bytes, counted from the region's start (whose own alignment is the owner's affair); an
    /// alignment up to the granule is always met.
    ///
    /// # Errors
    /// [`AllocError::NoSpace`] if at one moment of the call there was no run to hold it; others if there never will be.
    pub fn allocate(&self, len: u64, align: u64) -> Result<Extent, AllocError> {
        let (granules, align) = self.request(len, align)?;
        if align == 1
            && granules < SHORT
            && let Some(first) = self.fit_at_once(granules)
        {
            return Ok(self.enter(first, len));
        }
        self.allocate_otherwise(len, granules, align)
    }

    #[inline(never)]
    fn allocate_otherwise(&self, len: u64, granules: u64, align: u64) -> Result<Extent, AllocError> {
        if granules > self.layout.granules() {
            let need = granules.saturating_mul(self.layout.granule());
            return Err(AllocError::TooLarge { need, capacity: self.layout.region_len() });
        }
        self.fit(granules, align).map(|first| self.enter(first, len)).ok_or_else(|| AllocError::NoSpace {
            need: granules << self.layout.granule_bits(),
            free: self.free_granules() << self.layout.granule_bits(),
            largest_free_run: self.largest_free_run() << self.layout.granule_bits(),
        })
    }

    /// Extents that together hold `len` bytes, at most as many as `pieces` has places; gives their number, and puts
    /// them into `pieces` in the order of the bytes. All but the last are whole multiples of `align` and of the granule.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate); [`AllocError::NoSpace`] also if more pieces would have been needed. What was
    /// taken on the way is given back, and `pieces` is all `None`.
    pub fn allocate_at_most(&self, len: u64, align: u64, pieces: &mut [Option<Extent>]) -> Result<usize, AllocError> {
        let (granules, align_granules) = self.request(len, align)?;
        if granules > self.layout.granules() {
            let need = granules.saturating_mul(self.layout.granule());
            return Err(AllocError::TooLarge { need, capacity: self.layout.region_len() });
        }
        let bits = self.layout.granule_bits();
        pieces.fill(None);
        let mut left = len;
        let mut used = 0;
        while left > 0 && used < pieces.len() {
            let want = self.layout.granules_for(left);
            let found = match self.fit(want, align_granules) {
                Some(first) => Some((first, left)),
                None => {
                    // The longest run there is, in whole multiples of the alignment.
                    let largest = self.largest_aligned(align_granules);
                    let most = if largest < want { largest & !(align_granules - 1) } else { want };
                    if most == 0 {
                        break;
                    }
                    let bytes = left.min(most << bits);
                    self.fit(most, align_granules).map(|first| (first, bytes))
                }
            };
            // None: another thread has taken the run that was seen. Look again.
            let Some((first, bytes)) = found else { continue };
            pieces[used] = Some(self.enter(first, bytes));
            used += 1;
            left -= bytes;
        }
        if left == 0 {
            return Ok(used);
        }
        let refusal = AllocError::NoSpace {
            need: granules << bits,
            free: self.free_granules() << bits,
            largest_free_run: self.largest_free_run() << bits,
        };
        for extent in pieces.iter_mut().filter_map(Option::take) {
            let released = self.release(extent);
            debug_assert!(released.is_ok(), "a piece just allocated: {released:?}");
        }
        Err(refusal)
    }

    /// Takes the very bytes `offset..offset + len`, rounded up to whole granules.
    ///
    /// # Errors
    /// Some of it is taken, or it is no place where an extent can be.
    pub fn reserve(&self, offset: u64, len: u64) -> Result<Extent, ReserveError> {
        let region_len = self.layout.region_len();
        let fits = len > 0
            && offset.is_multiple_of(self.layout.granule())
            && offset < region_len
            && len <= region_len - offset;
        if !fits {
            return Err(ReserveError::OutOfRange { offset, len, region_len });
        }
        let start = offset >> self.layout.granule_bits();
        let granules = self.layout.granules_for(len);
        let run = Run { start, end: start + granules };
        while !self.claim(run) {
            // Something in it was taken: if it still is, that is the answer.
            let taken = if self.tree().is_granule_free(start) { self.tree().next_taken(start) } else { start };
            if taken < run.end {
                return Err(ReserveError::Taken { offset: taken << self.layout.granule_bits() });
            }
        }
        self.note_free_around(run);
        Ok(self.enter(start, len))
    }

    /// Gives an extent back. Its handle, and every copy of it, is dead from then on.
    ///
    /// # Errors
    /// The handle is not that of a live extent of this pool; the error says in which way.
    pub fn release(&self, extent: Extent) -> Result<(), ReleaseError> {
        let first = self.place(extent)?;
        if !self.records().end_at_once(first, extent.generation(), extent.len()) {
            while !self.records().end(first, self.check(extent, first)?, Kind::None) {}
        }
        self.free(Run { start: first, end: first + self.layout.granules_for(extent.len()) });
        Ok(())
    }

    /// Gives back all but the first `len` bytes; the handle that it returns takes the place of the old one, which is
    /// stale from then on, also if no granule became free.
    ///
    /// # Errors
    /// As [`release`](Self::release); [`ReleaseError::CannotShrink`] if `len` is zero or larger than the extent's.
    pub fn shrink(&self, extent: Extent, len: u64) -> Result<Extent, ReleaseError> {
        let first = self.place(extent)?;
        loop {
            let record = self.check(extent, first)?;
            if len == 0 || len > extent.len() {
                return Err(ReleaseError::CannotShrink { extent, to: len });
            }
            if self.records().end(first, record, Kind::Changing) {
                let (before, after) = (self.layout.granules_for(extent.len()), self.layout.granules_for(len));
                let generation = self.records().enter(first, len);
                if after < before {
                    self.free(Run { start: first + after, end: first + before });
                }
                return Ok(Extent::from_parts(extent.offset(), len, generation, self.id));
            }
        }
    }

    /// Whether the handle is that of a live extent of this pool; the error says in which way it is not.
    ///
    /// # Errors
    /// As [`release`](Self::release).
    pub fn validate(&self, extent: Extent) -> Result<(), ReleaseError> {
        let first = self.place(extent)?;
        self.check(extent, first).map(|_| ())
    }

    /// The live extents in ascending order, for a debugger: what comes and goes while it runs may be seen or not.
    pub fn live(&self) -> Live<'_, S> {
        Live { pool: self, at: 0 }
    }

    /// Granules that are free: exact if nothing changes meanwhile. A few loads.
    #[must_use]
    pub fn free_granules(&self) -> u64 {
        self.layout.granules() - self.counters().taken()
    }

    /// Granules in the longest free run: exact if nothing changes meanwhile, an estimate otherwise.
    #[must_use]
    pub fn largest_free_run(&self) -> u64 {
        self.largest_aligned(1)
    }

    /// The most granules that were ever taken at once: exact for what one thread did, and low at most by what others
    /// took at that very time.
    #[must_use]
    pub fn high_water_mark(&self) -> u64 {
        self.counters().high_water()
    }

    /// The share of the free granules that is outside the longest free run: 0 if all are in one run or none is free.
    #[must_use]
    pub fn fragmentation(&self) -> f64 {
        let free = self.free_granules();
        if free == 0 {
            return 0.0;
        }
        1.0 - self.largest_free_run().min(free) as f64 / free as f64
    }

    /// Length and alignment of a request, in granules.
    #[inline]
    fn request(&self, len: u64, align: u64) -> Result<(u64, u64), AllocError> {
        if len == 0 {
            return Err(AllocError::ZeroLength);
        }
        if !align.is_power_of_two() || align > MAX_REGION {
            return Err(AllocError::Alignment { align });
        }
        Ok((self.layout.granules_for(len), (align >> self.layout.granule_bits()).max(1)))
    }

    #[inline]
    fn enter(&self, first: u64, len: u64) -> Extent {
        let generation = self.records().enter(first, len);
        Extent::from_parts(first << self.layout.granule_bits(), len, generation, self.id)
    }

    /// The granule that the handle begins at, if it could be one of this pool's.
    #[inline]
    fn place(&self, extent: Extent) -> Result<u64, ReleaseError> {
        if extent.pool() != self.id {
            return Err(ReleaseError::Foreign { extent, pool: self.id });
        }
        let region_len = self.layout.region_len();
        let first = extent.offset() >> self.layout.granule_bits();
        let fits = !extent.is_empty()
            && first << self.layout.granule_bits() == extent.offset()
            && extent.offset() < region_len
            && extent.len() <= region_len - extent.offset();
        if !fits {
            return Err(ReleaseError::OutOfRange { extent, region_len });
        }
        Ok(first)
    }

    /// The record of the live extent that the handle names.
    #[inline]
    fn check(&self, extent: Extent, first: u64) -> Result<Record, ReleaseError> {
        let (record, len) = self.records().look_up(first);
        match len {
            Some(len) if record.generation == extent.generation() => {
                if len == extent.len() {
                    Ok(record)
                } else {
                    Err(ReleaseError::WrongLength { extent, len })
                }
            }
            None if record.kind == Kind::None && record.generation == extent.generation().wrapping_add(1) => {
                Err(ReleaseError::AlreadyReleased { extent })
            }
            _ => Err(ReleaseError::Stale { extent, generation: record.generation }),
        }
    }

    // `new` has seen that the storage is long enough; a storage whose `as_ref` changes its mind panics in these.

    #[inline]
    fn counters(&self) -> Counters<'_> {
        Counters::new(self.storage.as_ref(), self.layout.granules())
    }

    #[inline]
    fn tree(&self) -> Tree<'_> {
        Tree { words: self.storage.as_ref(), levels: &self.shape.tree }
    }

    #[inline]
    fn records(&self) -> Records<'_> {
        Records { words: self.storage.as_ref(), first: self.shape.records_first }
    }

    /// This thread's set of hints.
    #[inline]
    fn hints(&self) -> Hints<'_> {
        self.hints_of(self.counters().set(self.shape.sets))
    }

    #[inline]
    fn hints_of(&self, set: usize) -> Hints<'_> {
        let shape = &self.shape;
        Hints { words: self.storage.as_ref(), shape, first: shape.hints_first + set * shape.set_words }
    }
}

/// Iterator over the live extents of a pool, see [`BufferPool::live`].
#[derive(Debug)]
pub struct Live<'a, S> {
    pool: &'a BufferPool<S>,
    at: u64,
}

impl<S: AsRef<[Word]>> Iterator for Live<'_, S> {
    type Item = Extent;

    fn next(&mut self) -> Option<Extent> {
        let layout = self.pool.layout;
        loop {
            let first = self.pool.tree().next_taken(self.at);
            if first >= layout.granules() {
                return None;
            }
            let (record, len) = self.pool.records().look_up(first);
            match len {
                Some(len) => {
                    self.at = first + layout.granules_for(len);
                    let offset = first << layout.granule_bits();
                    return Some(Extent::from_parts(offset, len, record.generation, self.pool.id));
                }
                None => self.at = first + 1,
            }
        }
    }
}
