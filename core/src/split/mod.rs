//! Descriptor lists into chunks, without allocation.
//!
//! [`Split`] walks a list of remote segments and a list of local segments of the same total length in step, and yields
//! [`Chunk`]s: each contiguous on both sides, so that each can be one work request. Together they cover every byte once,
//! in order. Segments that touch in one region are walked as one. Lists are [`Segments`]: slices, one segment, or
//! [`Strided`] blocks. [`Gather`] joins chunks that follow each other remotely into requests of several local pieces, and [`Rails`] spreads chunks over paths by weight.
//!
//! ```
//! use towline_core::split::{Limits, Segment, Split};
//!
//! // One remote run into two local buffers, messages of at most 8 KiB.
//! let remote = [Segment { region: 7, offset: 1 << 20, len: 20_000 }];
//! let local = [Segment { region: 0, offset: 0, len: 10_000 }, Segment { region: 1, offset: 64, len: 10_000 }];
//! let chunks: Vec<_> = Split::new(&remote[..], &local[..], Limits::new(8192)?)?.collect();
//! assert_eq!(chunks.iter().map(|c| c.len).collect::<Vec<_>>(), [8192, 1808, 8192, 1808]);
//! assert_eq!((chunks[2].local.index, chunks[2].local.offset), (1, 0));
//! # Ok::<(), towline_core::split::SplitError>(())
//! ```

mod chunks;
mod gather;
mod rails;
mod segments;

#[cfg(test)]
mod tests;

pub use chunks::{Chunk, Limits, Place, Split, SplitError};
pub use gather::{Gather, Request};
pub use rails::{Rail, Rails};
pub use segments::{Segment, Segments, Strided, StridedError};
