//! Lists of memory segments.

use core::fmt;

/// A contiguous part of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Segment {
    /// Which region, by the caller's own numbers; two segments can only touch within one region.
    pub region: u32,
    /// First byte: an offset in the region, or an address.
    pub offset: u64,
    /// Length in bytes; may be zero.
    pub len: u64,
}

/// A list of segments that a split walks through.
pub trait Segments {
    /// Number of segments.
    fn count(&self) -> usize;

    /// The segment at `index`, which is below `count`. A segment may not end beyond 2^64 - 1.
    fn segment(&self, index: usize) -> Segment;
}

impl Segments for [Segment] {
    #[inline]
    fn count(&self) -> usize {
        self.len()
    }

    #[inline]
    fn segment(&self, index: usize) -> Segment {
        self[index]
    }
}

impl Segments for Segment {
    #[inline]
    fn count(&self) -> usize {
        1
    }

    #[inline]
    fn segment(&self, _index: usize) -> Segment {
        *self
    }
}

/// `count` blocks of `len` bytes, the first at `offset`, each `stride` bytes after the one before: rows of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Strided {
    region: u32,
    offset: u64,
    len: u64,
    stride: u64,
    count: usize,
}

impl Strided {
    /// Blocks of `len` bytes. `stride` = `len` makes them one run.
    ///
    /// # Errors
    /// The blocks overlap (`stride` < `len`), or the last of them ends beyond 2^64 - 1.
    pub const fn new(region: u32, offset: u64, len: u64, stride: u64, count: usize) -> Result<Self, StridedError> {
        if stride < len && count > 1 {
            return Err(StridedError::Overlap { len, stride });
        }
        let end = match stride.checked_mul(count.saturating_sub(1) as u64) {
            Some(last) => match last.checked_add(len) {
                Some(span) => offset.checked_add(span),
                None => None,
            },
            None => None,
        };
        if end.is_none() {
            return Err(StridedError::TooLong { offset, stride, count });
        }
        Ok(Self { region, offset, len, stride, count })
    }
}

impl Segments for Strided {
    #[inline]
    fn count(&self) -> usize {
        self.count
    }

    #[inline]
    fn segment(&self, index: usize) -> Segment {
        Segment { region: self.region, offset: self.offset + self.stride * index as u64, len: self.len }
    }
}

/// Blocks that no [`Strided`] can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum StridedError {
    /// Each block reaches into the next.
    Overlap {
        /// Bytes in a block.
        len: u64,
        /// Bytes from one block to the next.
        stride: u64,
    },
    /// The last block ends beyond 2^64 - 1.
    TooLong {
        /// First byte of the first block.
        offset: u64,
        /// Bytes from one block to the next.
        stride: u64,
        /// Blocks.
        count: usize,
    },
}

impl fmt::Display for StridedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Overlap { len, stride } => write!(f, "blocks of {len} bytes overlap at a stride of {stride}"),
            Self::TooLong { offset, stride, count } => {
                write!(f, "{count} blocks at a stride of {stride} from {offset} end beyond 2^64 - 1")
            }
        }
    }
}

impl core::error::Error for StridedError {}
