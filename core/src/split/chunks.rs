//! The walk through two lists in step.

use super::segments::{Segment, Segments};
use core::fmt;

/// How large a chunk may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    max: u64,
    align: u64,
}

impl Limits {
    /// Chunks of at most `max` bytes: the smaller of the queue pair's largest message and the chunk that the caller
    /// prefers.
    ///
    /// # Errors
    /// `max` is zero.
    pub const fn new(max: u64) -> Result<Self, SplitError> {
        if max == 0 { Err(SplitError::ZeroLimit) } else { Ok(Self { max, align: 1 }) }
    }

    /// Prefers chunks that end at remote offsets that are multiples of `align` bytes, a power of two up to `max`:
    /// page-wise requests, or whole checksum blocks. Only a run's own end, on either side, ends a chunk elsewhere.
    ///
    /// # Errors
    /// `align` is no power of two, or larger than `max`.
    pub const fn aligned(self, align: u64) -> Result<Self, SplitError> {
        if !align.is_power_of_two() || align > self.max {
            return Err(SplitError::Alignment { align, max: self.max });
        }
        Ok(Self { align, ..self })
    }

    /// The length of a chunk that begins at `offset` of a run with `left` bytes.
    fn cut(self, offset: u64, left: u64) -> u64 {
        if left <= self.max {
            return left;
        }
        // `align` divides nothing if the sum would overflow; the run ends below 2^64, so `offset + max` does not.
        let end = (offset + self.max) & !(self.align - 1);
        if end > offset { end - offset } else { self.max }
    }
}

/// A place in a list of segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    /// The segment in which the chunk begins. The chunk goes on into following segments only where they touch.
    pub index: usize,
    /// Bytes from that segment's start.
    pub offset: u64,
}

/// A piece of a transfer that is contiguous on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Chunk {
    /// Where it lies in the remote list.
    pub remote: Place,
    /// Where it lies in the local list.
    pub local: Place,
    /// Bytes; never zero.
    pub len: u64,
}

/// Iterator over the chunks; see the [module](super).
#[derive(Debug)]
pub struct Split<'a, R: ?Sized, L: ?Sized> {
    remote: Walk<'a, R>,
    local: Walk<'a, L>,
    limits: Limits,
}

impl<R: ?Sized, L: ?Sized> Clone for Split<'_, R, L> {
    fn clone(&self) -> Self {
        Self { remote: self.remote.clone(), local: self.local.clone(), limits: self.limits }
    }
}

impl<'a, R: Segments + ?Sized, L: Segments + ?Sized> Split<'a, R, L> {
    /// Both lists, whose lengths must agree.
    ///
    /// # Errors
    /// They do not agree (I5: nothing is ever cut short), or a list is longer than 2^64 - 1 bytes or reaches beyond it.
    pub fn new(remote: &'a R, local: &'a L, limits: Limits) -> Result<Self, SplitError> {
        let (remote_len, local_len) = (total(remote)?, total(local)?);
        if remote_len != local_len {
            return Err(SplitError::Lengths { remote: remote_len, local: local_len });
        }
        Ok(Self { remote: Walk::new(remote), local: Walk::new(local), limits })
    }
}

impl<R: ?Sized, L: ?Sized> Split<'_, R, L> {
    /// Whether the next chunk begins where the last one ended on the remote side, without a gap.
    pub(super) fn remote_goes_on(&self) -> bool {
        self.remote.run_left > 0
    }

    /// The longest chunk.
    pub(super) fn longest(&self) -> u64 {
        self.limits.max
    }
}

fn total<T: Segments + ?Sized>(list: &T) -> Result<u64, SplitError> {
    let mut sum = 0u64;
    for index in 0..list.count() {
        let Segment { offset, len, .. } = list.segment(index);
        offset.checked_add(len).ok_or(SplitError::TooLong { index })?;
        sum = sum.checked_add(len).ok_or(SplitError::TooLong { index })?;
    }
    Ok(sum)
}

impl<R: Segments + ?Sized, L: Segments + ?Sized> Iterator for Split<'_, R, L> {
    type Item = Chunk;

    #[inline]
    fn next(&mut self) -> Option<Chunk> {
        self.remote.fill();
        self.local.fill();
        let common = self.remote.run_left.min(self.local.run_left);
        if common == 0 {
            return None;
        }
        let len = self.limits.cut(self.remote.address(), common);
        let chunk = Chunk { remote: self.remote.place, local: self.local.place, len };
        self.remote.advance(len);
        self.local.advance(len);
        Some(chunk)
    }
}

impl<R: Segments + ?Sized, L: Segments + ?Sized> core::iter::FusedIterator for Split<'_, R, L> {}

/// A place in a list, and how far the memory goes on from there without a gap.
#[derive(Debug)]
struct Walk<'a, T: ?Sized> {
    list: &'a T,
    /// Where the walk is.
    place: Place,
    /// First byte and length of the segment at `place`.
    first: u64,
    len: u64,
    /// Bytes from `place` to the end of the run of segments that touch.
    run_left: u64,
    /// The first segment after that run.
    next: usize,
}

impl<T: ?Sized> Clone for Walk<'_, T> {
    fn clone(&self) -> Self {
        Self { ..*self }
    }
}

impl<'a, T: Segments + ?Sized> Walk<'a, T> {
    fn new(list: &'a T) -> Self {
        Self { list, place: Place { index: 0, offset: 0 }, first: 0, len: 0, run_left: 0, next: 0 }
    }

    fn address(&self) -> u64 {
        self.first + self.place.offset
    }

    /// Finds the next run once the last is used up; `run_left` stays zero at the end of the list.
    #[inline]
    fn fill(&mut self) {
        if self.run_left > 0 {
            return;
        }
        let count = self.list.count();
        while self.next < count {
            let first = self.list.segment(self.next);
            self.next += 1;
            if first.len == 0 {
                continue;
            }
            self.place = Place { index: self.next - 1, offset: 0 };
            (self.first, self.len) = (first.offset, first.len);
            self.run_left = first.len;
            while self.next < count {
                let next = self.list.segment(self.next);
                let touches = next.region == first.region && next.offset == first.offset + self.run_left;
                if !touches && next.len > 0 {
                    break;
                }
                self.run_left += next.len;
                self.next += 1;
            }
            return;
        }
    }

    #[inline]
    fn advance(&mut self, len: u64) {
        self.run_left -= len;
        self.place.offset += len;
        // Into the segment of the run where the place is now; at the run's end `fill` goes on.
        while self.run_left > 0 && self.place.offset >= self.len {
            self.place.offset -= self.len;
            self.place.index += 1;
            let Segment { offset, len, .. } = self.list.segment(self.place.index);
            (self.first, self.len) = (offset, len);
        }
    }
}

/// Lists that can't be split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SplitError {
    /// The lists have different lengths in bytes.
    Lengths {
        /// Of the remote list.
        remote: u64,
        /// Of the local list.
        local: u64,
    },
    /// The list up to this segment, or the segment's own end, is beyond 2^64 - 1 bytes.
    TooLong {
        /// The segment.
        index: usize,
    },
    /// A chunk must be able to hold a byte.
    ZeroLimit,
    /// The alignment is no power of two, or larger than a chunk may be.
    Alignment {
        /// As given, in bytes.
        align: u64,
        /// The largest chunk, in bytes.
        max: u64,
    },
}

impl fmt::Display for SplitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lengths { remote, local } => {
                write!(f, "split: {remote} remote bytes do not match {local} local bytes")
            }
            Self::TooLong { index } => write!(f, "split: segment {index} reaches beyond 2^64 - 1 bytes"),
            Self::ZeroLimit => f.write_str("split: chunks of zero bytes"),
            Self::Alignment { align, max } => {
                write!(f, "split: alignment {align} is no power of two up to the largest chunk, {max}")
            }
        }
    }
}

impl core::error::Error for SplitError {}
