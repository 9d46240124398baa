//! Why the pool refused.

use super::Extent;
use core::fmt;

/// Why nothing was allocated. All figures are in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AllocError {
    /// No run of free granules was long enough: a retry can help once something is released.
    NoSpace {
        /// What the request takes, in whole granules.
        need: u64,
        /// Free in all, at about the time of the call.
        free: u64,
        /// The longest free run, at about the time of the call.
        largest_free_run: u64,
    },
    /// The request is larger than the whole region: no retry can help, a larger pool would.
    TooLarge {
        /// What the request takes, in whole granules.
        need: u64,
        /// The whole region.
        capacity: u64,
    },
    /// The alignment is no power of two, or larger than [`MAX_REGION`](super::MAX_REGION).
    Alignment {
        /// As given.
        align: u64,
    },
    /// An extent holds at least one byte.
    ZeroLength,
}

impl fmt::Display for AllocError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSpace { need, free, largest_free_run } => write!(
                f,
                "pool allocation: need {need} bytes in one run; {free} bytes are free, {largest_free_run} in the \
                 longest run; release something or wait"
            ),
            Self::TooLarge { need, capacity } => {
                write!(f, "pool allocation: need {need} bytes, the whole pool has {capacity}; use a larger pool")
            }
            Self::Alignment { align } => {
                write!(f, "pool allocation: alignment {align} is no power of two up to 16 TiB")
            }
            Self::ZeroLength => f.write_str("pool allocation: zero bytes asked for"),
        }
    }
}

impl core::error::Error for AllocError {}

/// Why an extent was not released, shrunk or looked up. Nothing has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReleaseError {
    /// The extent was released before, and no other extent began at its offset since.
    AlreadyReleased {
        /// As given.
        extent: Extent,
    },
    /// The handle is of an earlier extent at this offset (or of the same extent before it was shrunk).
    Stale {
        /// As given.
        extent: Extent,
        /// The generation that the offset is at now.
        generation: u32,
    },
    /// The handle is of another pool.
    Foreign {
        /// As given.
        extent: Extent,
        /// The id of this pool.
        pool: u32,
    },
    /// The extent lives, but has another length.
    WrongLength {
        /// As given.
        extent: Extent,
        /// Its length in bytes.
        len: u64,
    },
    /// (Shrinking only.) The new length is zero, or larger than the extent's.
    CannotShrink {
        /// As given.
        extent: Extent,
        /// The length asked for, in bytes.
        to: u64,
    },
    /// The handle reaches outside the region, is empty, or begins at no granule.
    OutOfRange {
        /// As given.
        extent: Extent,
        /// Bytes in the region.
        region_len: u64,
    },
}

impl fmt::Display for ReleaseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::AlreadyReleased { extent }
        | Self::Stale { extent, .. }
        | Self::Foreign { extent, .. }
        | Self::WrongLength { extent, .. }
        | Self::CannotShrink { extent, .. }
        | Self::OutOfRange { extent, .. }) = self;
        write!(
            f,
            "extent at {} of {} bytes, generation {}, pool {}: ",
            extent.offset(),
            extent.len(),
            extent.generation(),
            extent.pool()
        )?;
        match self {
            Self::AlreadyReleased { .. } => f.write_str("released already"),
            Self::Stale { generation, .. } => write!(f, "stale, its offset is at generation {generation} now"),
            Self::Foreign { pool, .. } => write!(f, "belongs to another pool, this one is {pool}"),
            Self::WrongLength { len, .. } => write!(f, "wrong length, the extent has {len} bytes"),
            Self::CannotShrink { to, .. } => write!(f, "cannot shrink to {to} bytes"),
            Self::OutOfRange { region_len, .. } => {
                write!(f, "not a place where an extent of this region of {region_len} bytes can be")
            }
        }
    }
}

impl core::error::Error for ReleaseError {}

/// Why a range was not reserved. Nothing has changed. All figures are in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReserveError {
    /// Some of it is taken.
    Taken {
        /// Where the first granule lies that was found taken.
        offset: u64,
    },
    /// The range is empty, reaches outside the region, or does not begin at a granule.
    OutOfRange {
        /// As given.
        offset: u64,
        /// As given.
        len: u64,
        /// Bytes in the region.
        region_len: u64,
    },
}

impl fmt::Display for ReserveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Taken { offset } => write!(f, "pool reservation: the granule at {offset} is taken"),
            Self::OutOfRange { offset, len, region_len } => write!(
                f,
                "pool reservation: {len} bytes at {offset} are empty, outside the region of {region_len} bytes, or do \
                 not begin at a granule"
            ),
        }
    }
}

impl core::error::Error for ReserveError {}

/// The storage given for a pool is too small.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StorageTooSmall {
    /// Words needed: [`PoolLayout::words`](super::PoolLayout::words).
    pub need: usize,
    /// Words given.
    pub have: usize,
}

impl fmt::Display for StorageTooSmall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pool storage: need {} words, have {}", self.need, self.have)
    }
}

impl core::error::Error for StorageTooSmall {}
