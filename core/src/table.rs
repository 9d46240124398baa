//! A fixed number of slots with a free list: what the tables of transfers, payloads and leases share.
//!
//! The free list is a stack of slot numbers. Its head carries a tag that every change moves, so that a pop that slept
//! through other pops and pushes of the same slot fails instead of taking a stale successor (the ABA problem).

use crate::sync::{Ordering, Word, mutant, ordering};

/// Slots in one table at most: a slot number takes 16 bits in identifiers.
pub(crate) const MAX_SLOTS: usize = 1 << 16;

fn tag_step() -> u64 {
    u64::from(!mutant("slots without tag"))
}

const NONE: u64 = 0xffff_ffff;
const INDEX: u64 = 0xffff_ffff;

/// `WIDTH` words for each slot; the first of them is the table's link while the slot is free only, and the owner's
/// otherwise kept apart: slot words start after it.
#[derive(Debug)]
pub(crate) struct Slots<S, const WIDTH: usize> {
    storage: S,
    capacity: u32,
}

/// Words of storage for `capacity` slots of `width` words each.
pub(crate) const fn words(capacity: usize, width: usize) -> usize {
    1 + capacity * (1 + width)
}

impl<S: AsRef<[Word]>, const WIDTH: usize> Slots<S, WIDTH> {
    /// Takes as many slots as the storage holds, [`MAX_SLOTS`] at most, and sets their words to zero.
    pub(crate) fn new(storage: S) -> Self {
        let words = storage.as_ref();
        let capacity = (words.len().saturating_sub(1) / (1 + WIDTH)).min(MAX_SLOTS);
        if let Some((head, slots)) = words.split_first() {
            head.set_up(if capacity == 0 { NONE } else { 0 });
            for (index, slot) in slots.chunks_exact(1 + WIDTH).take(capacity).enumerate() {
                for (n, word) in slot.iter().enumerate() {
                    let next = if index + 1 == capacity { NONE } else { index as u64 + 1 };
                    word.set_up(if n == 0 { next } else { 0 });
                }
            }
        }
        Self { storage, capacity: capacity as u32 }
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity as usize
    }

    /// The slot's own words; none if there is no such slot. Two dependent loads with the caller's own of a word: the
    /// storage's address, the word.
    #[inline]
    pub(crate) fn get(&self, index: u32) -> Option<&[Word; WIDTH]> {
        if index >= self.capacity {
            return None;
        }
        let first = 2 + index as usize * (1 + WIDTH);
        self.storage.as_ref().get(first..first + WIDTH)?.try_into().ok()
    }

    fn head(&self) -> Option<&Word> {
        self.storage.as_ref().first()
    }

    fn link(&self, index: u64) -> Option<&Word> {
        self.storage.as_ref().get(1 + index as usize * (1 + WIDTH))
    }

    /// Takes a free slot. `None` is exact: at one moment of the call every slot was taken.
    pub(crate) fn take(&self) -> Option<u32> {
        let head = self.head()?;
        let mut top = head.load(Ordering::Acquire);
        loop {
            let index = top & INDEX;
            if index == NONE {
                return None;
            }
            // Another thread may have taken the slot and pushed it again meanwhile: then the tag has moved, and what
            // is read here is not used.
            let next = self.link(index)?.load(Ordering::Relaxed);
            let after = ((top >> 32).wrapping_add(tag_step()) << 32) | next;
            match head.compare_exchange(top, after, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(index as u32),
                Err(now) => top = now,
            }
        }
    }

    /// Gives a slot back. Only its owner may, once.
    pub(crate) fn give(&self, index: u32) {
        let (Some(head), Some(link)) = (self.head(), self.link(u64::from(index))) else { return };
        let mut top = head.load(Ordering::Relaxed);
        loop {
            link.store(top & INDEX, Ordering::Relaxed);
            let after = ((top >> 32).wrapping_add(tag_step()) << 32) | u64::from(index);
            match head.compare_exchange(
                top,
                after,
                ordering("slots give without release", Ordering::Release),
                Ordering::Relaxed,
            ) {
                Ok(_) => return,
                Err(now) => top = now,
            }
        }
    }
}
