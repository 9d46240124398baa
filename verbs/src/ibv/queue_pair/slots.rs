//! Receives that the device has. They may complete in any order, so each has a slot.

use crate::LocalSlice;
use core::mem;

/// The receives.
#[derive(Default)]
pub(super) struct Slots {
    slots: Vec<Option<Slot>>,
    free: Vec<u32>,
    posted: u64,
}

/// One of them. It keeps its memory registered.
pub(super) struct Slot {
    pub(super) id: u64,
    pub(super) held: Vec<LocalSlice>,
    order: u64,
}

impl Slots {
    pub(super) fn insert(&mut self, id: u64, held: Vec<LocalSlice>) -> u64 {
        let slot = Slot { id, held, order: self.posted };
        self.posted += 1;
        match self.free.pop() {
            Some(at) => {
                self.slots[at as usize] = Some(slot);
                at.into()
            }
            None => {
                self.slots.push(Some(slot));
                self.slots.len() as u64 - 1
            }
        }
    }

    pub(super) fn remove(&mut self, at: u64) -> Option<Slot> {
        let slot = self.slots.get_mut(usize::try_from(at).ok()?)?.take()?;
        self.free.push(at as u32);
        Some(slot)
    }

    /// All of them, in the order posted.
    pub(super) fn take_all(&mut self) -> Vec<Slot> {
        let mut all: Vec<_> = mem::take(self).slots.into_iter().flatten().collect();
        all.sort_unstable_by_key(|slot| slot.order);
        all
    }
}
