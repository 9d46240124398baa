//! The parts of a transport that are pure logic: where bytes go, who may touch them, and when they are free again.
//!
//! - [`pool`]: exact extents of a region that this crate never touches, so that the region may be device memory;
//! - [`transfer`]: the life of one transfer in one word, from its creation to the fence that frees its memory;
//! - [`split`]: descriptor lists into chunks for work requests, without allocation;
//! - [`credits`]: counts that make queue overflow impossible, and selective signalling;
//! - [`lease`]: the life of a published payload and of the leases on it.
//!
//! What it guarantees: no allocation (all state lives in [`Word`]s that the caller supplies), no unsafe code, no
//! dependency, no panic on any input unless a function says so, and every type is `Sync` where its storage is. What it
//! does not do: no I/O, no threads, no clock (time is passed in as [`Ticks`]), no waiting (a refusal is an error value;
//! waiting is a layer above). It may know no other crate of the workspace.
//!
//! ```
//! use towline_core::{Word, pool::{BufferPool, PoolLayout}};
//!
//! const LAYOUT: PoolLayout = match PoolLayout::new(64 << 20, 4096) {
//!     Ok(layout) => layout,
//!     Err(_) => panic!("64 MiB in 4 KiB granules is a legal layout"),
//! };
//! let storage: Box<[Word]> = (0..LAYOUT.words()).map(|_| Word::default()).collect();
//! let pool = BufferPool::new(storage, LAYOUT)?;
//! let extent = pool.allocate(5_000_000, 1)?;
//! assert_eq!(pool.free_granules(), 64 * 256 - 1221); // ceil(5_000_000 / 4096), not the next power of two
//! pool.release(extent)?;
//! # Ok::<(), Box<dyn core::error::Error>>(())
//! ```

#![no_std]
#![forbid(unsafe_code)]

#[cfg(any(test, towline_loom))]
extern crate std;

pub mod credits;
pub mod lease;
pub mod pool;
pub mod split;
#[cfg(test)]
mod stopped;
mod sync;
mod table;
pub mod transfer;

pub use sync::Word;

/// A point in time, or a span of it, in nanoseconds. Which clock is the caller's affair, as long as it is one clock
/// that does not go backwards.
pub type Ticks = u64;
