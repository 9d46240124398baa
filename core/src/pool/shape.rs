//! Where everything lies in a pool's storage.

use super::PoolLayout;
use super::hints::bins_for;

/// Levels of the tree at most: 64^7 granules are more than any region has.
pub(super) const MAX_LEVELS: usize = 7;
/// Words of one stripe of counters: a cache line, and the one that is fetched with it.
pub(super) const STRIPE: usize = 16;
/// Stripes of counters: threads share one only by chance. A model has one, to be small.
pub(super) const STRIPES: usize = if cfg!(towline_loom) { 1 } else { 8 };
/// Sets of hints at most: each thread has one, alone if there are enough, so that threads do not meet there. A model has one.
const SETS: usize = if cfg!(towline_loom) { 1 } else { 8 };
/// From so many granules on there are half as many, to save memory.
const LARGE: u64 = 1 << 20;
/// Words before the tree: what all threads share, then the stripes.
const HEADER: usize = STRIPE + STRIPE * STRIPES;

/// A stack of bitmaps, each with one bit for each word of the one below, down to one word at the top.
#[derive(Debug, Clone, Copy)]
pub(super) struct Levels {
    pub(super) count: usize,
    /// Bits of each level.
    pub(super) bits: [u64; MAX_LEVELS],
    /// The first word of each level.
    pub(super) first: [usize; MAX_LEVELS],
    /// Words in all.
    pub(super) words: usize,
}

impl Levels {
    /// The stack for `bits` bits, its first word at `first`.
    pub(super) const fn new(bits: u64, first: usize) -> Self {
        let mut levels = Self { count: 1, bits: [0; MAX_LEVELS], first: [first; MAX_LEVELS], words: 0 };
        levels.bits[0] = bits;
        levels.words = bits.div_ceil(64) as usize;
        while levels.bits[levels.count - 1] > 64 {
            levels.bits[levels.count] = levels.bits[levels.count - 1].div_ceil(64);
            levels.first[levels.count] = first + levels.words;
            levels.words += levels.bits[levels.count].div_ceil(64) as usize;
            levels.count += 1;
        }
        levels
    }
}

/// The parts of the storage, in order: counters, tree, records, sets of hints, ends of long runs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    /// One bit for each granule at the lowest level.
    pub(super) tree: Levels,
    /// For a bin of hints, one bit for each word of the tree's lowest level, counted from the bin's first word.
    pub(super) hints: Levels,
    /// Sets of hints, which lie one after the other.
    pub(super) sets: usize,
    /// Words of a set: whole cache lines.
    pub(super) set_words: usize,
    /// Words of a set that say which bins have hints; the bitmaps come after them.
    pub(super) bins_words: usize,
    pub(super) bins: usize,
    pub(super) records_first: usize,
    /// The first set: which bins have hints, then the bitmap of each.
    pub(super) hints_first: usize,
    pub(super) long_first: usize,
    pub(super) words: usize,
}

impl Shape {
    pub(super) const fn new(layout: &PoolLayout) -> Self {
        let granules = layout.granules();
        let tree = Levels::new(granules, HEADER);
        let hints = Levels::new(granules.div_ceil(64), 0);
        let bins = bins_for(granules);
        let records_first = HEADER + tree.words;
        let hints_first = (records_first + granules as usize).next_multiple_of(8);
        let sets = if granules < LARGE { SETS } else { SETS.div_ceil(2) };
        let bins_words = bins.div_ceil(64).next_multiple_of(8);
        let set_words = (bins_words + bins * hints.words).next_multiple_of(8);
        let long_first = hints_first + sets * set_words;
        let words = long_first + 2 * hints.bits[0] as usize;
        Self { tree, hints, sets, set_words, bins_words, bins, records_first, hints_first, long_first, words }
    }
}
