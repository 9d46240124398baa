//! Where everything lies in a pool's storage.

use super::PoolLayout;
use super::hints::bins_for;

/// Levels of the tree at most: 64^7 granules are more than any region has.
pub(super) const MAX_LEVELS: usize = 7;
/// Words of one stripe of counters: a cache line, and the one that is fetched with it.
pub(super) const STRIPE: usize = 16;
/// Stripes of counters: threads share one only by chance. A model has one, to be small.
pub(super) const STRIPES: usize = if cfg!(towline_loom) { 1 } else { 8 };
/// Words before the tree: what all threads share, then the stripes.
const HEADER: usize = STRIPE + STRIPE * STRIPES;

/// A stack of bitmaps, each with one bit for each word of the one below, down to one word at the top.
#[derive(Debug, Clone, Copy)]
pub(super) struct Levels {
    pub(super) count: usize,
    /// Bits of each level.
    pub(super) bits: [u64; MAX_LEVELS],
    /// The first word of each level, from the stack's first.
    pub(super) first: [usize; MAX_LEVELS],
    /// Words in all.
    pub(super) words: usize,
}

impl Levels {
    pub(super) const fn new(bits: u64) -> Self {
        let mut levels = Self { count: 1, bits: [0; MAX_LEVELS], first: [0; MAX_LEVELS], words: 0 };
        levels.bits[0] = bits;
        levels.words = bits.div_ceil(64) as usize;
        while levels.bits[levels.count - 1] > 64 {
            levels.bits[levels.count] = levels.bits[levels.count - 1].div_ceil(64);
            levels.first[levels.count] = levels.words;
            levels.words += levels.bits[levels.count].div_ceil(64) as usize;
            levels.count += 1;
        }
        levels
    }
}

/// The parts of the storage, in order: counters, tree, records, hints.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    /// One bit for each granule at the lowest level.
    pub(super) tree: Levels,
    /// For each bin, one bit for each word of the tree's lowest level. The top level of all bins comes first.
    pub(super) hints: Levels,
    pub(super) bins: usize,
    pub(super) tree_first: usize,
    pub(super) records_first: usize,
    pub(super) hints_first: usize,
    pub(super) words: usize,
}

impl Shape {
    pub(super) const fn new(layout: &PoolLayout) -> Self {
        let granules = layout.granules();
        let tree = Levels::new(granules);
        let hints = Levels::new(granules.div_ceil(64));
        let bins = bins_for(granules);
        let records_first = HEADER + tree.words;
        let hints_first = records_first + granules as usize;
        let words = hints_first + bins * hints.words;
        Self { tree, hints, bins, tree_first: HEADER, records_first, hints_first, words }
    }
}
