//! The handle of an extent.

/// A contiguous part of a pool's region: a small handle, checked by the pool at every use.
///
/// It is `Copy`, so that a work request, a log and a debugger can hold it; the pool finds out a handle that is used
/// after its extent was given back. Whoever needs ownership by construction wraps it.
///
/// The generation counts the extents that began at this offset: it moves with every `release` and `shrink` and wraps
/// after 2^32 of them at one and the same granule; until then a stale handle is always told from a live one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Extent {
    offset: u64,
    len: u64,
    generation: u32,
    pool: u32,
}

impl Extent {
    /// A handle from its parts, as the getters gave them: for storing one elsewhere as plain numbers. A handle that no
    /// pool made is harmless: every use of it is refused.
    #[must_use]
    pub const fn from_parts(offset: u64, len: u64, generation: u32, pool: u32) -> Self {
        Self { offset, len, generation, pool }
    }

    /// First byte, from the region's start; a multiple of the granule and of the alignment asked for.
    #[must_use]
    pub const fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes asked for. The extent holds that, rounded up to whole granules.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Always false for an extent of a pool.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Which of the extents that began at this offset.
    #[must_use]
    pub const fn generation(&self) -> u32 {
        self.generation
    }

    /// The [id](crate::pool::BufferPool::id) of the pool it belongs to.
    #[must_use]
    pub const fn pool(&self) -> u32 {
        self.pool
    }
}
