//! Remote keys: which memory a peer may touch, and the fence when it may no longer.
//!
//! A key is 64 bits: the number of its slot, and 44 bits from the system's random source that are drawn anew each time
//! the slot is used, so that they are both what a peer can't guess and the generation that tells a stale key. A peer has
//! one guess a connection: the first wrong key ends it.

use super::sys;
use crate::memory::Loan;
use crate::{Access, Cause, Error, Memory, Result};
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::lock;

const SLOT_BITS: u32 = 20;
/// Most keys of one device at a time.
pub(super) const MAX_KEYS: usize = 1 << SLOT_BITS;
/// Random words drawn in one go: a call of the system for 256 windows, not for each.
const DRAWN: usize = 256;

const REVOKED: u64 = 1 << 63;

/// Memory under a key.
#[derive(Debug)]
pub(super) struct Exposure {
    memory: Memory,
    /// First byte, from the start of the memory: addresses on the wire are counted from there too, and tell nothing about
    /// this process (I14).
    offset: u64,
    len: u64,
    access: Access,
    domain: u64,
    /// The one queue pair that may use it, for a window.
    queue_pair: Option<u64>,
    /// Bytes that are read in the place of the memory's, as long as they are lent.
    loan: Option<Arc<Loan>>,
    /// How many copiers are inside, and whether the key is revoked.
    word: AtomicU64,
}

/// A right to be asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) access: Access,
    pub(super) domain: u64,
    pub(super) queue_pair: u64,
    pub(super) address: u64,
    pub(super) len: u64,
}

impl Exposure {
    pub(super) fn new(
        memory: Memory,
        (offset, len): (u64, u64),
        access: Access,
        domain: u64,
        queue_pair: Option<u64>,
    ) -> Self {
        Self { memory, offset, len, access, domain, queue_pair, loan: None, word: AtomicU64::new(0) }
    }

    /// The same, with `loan` in the place of its bytes.
    pub(super) fn lent(self, loan: Arc<Loan>) -> Self {
        Self { loan: Some(loan), ..self }
    }

    pub(super) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The bytes lent in the place of the memory's, and the place of their first one in it.
    pub(super) fn loan(&self) -> Option<(&Loan, u64)> {
        self.loan.as_ref().map(|loan| (&**loan, self.offset))
    }

    /// Whether `claim` is within the rights and the bounds of this key (I7, I14).
    fn allows(&self, claim: &Claim) -> bool {
        let inside = claim.address.checked_sub(self.offset).and_then(|from| from.checked_add(claim.len));
        self.access.contains(claim.access)
            && self.domain == claim.domain
            && self.queue_pair.is_none_or(|one| one == claim.queue_pair)
            && inside.is_some_and(|end| end <= self.len)
    }

    /// Goes into the memory, unless the key is revoked; until the guard is dropped, [`revoke`](Self::revoke) says that
    /// somebody is inside.
    pub(super) fn enter(&self) -> Option<Inside<'_>> {
        // The count and the mark are one word, so that no copier can come in after `revoke` saw none (I3).
        self.word
            .fetch_update(Ordering::Acquire, Ordering::Relaxed, |word| (word & REVOKED == 0).then_some(word + 1))
            .ok()
            .map(|_| Inside(self))
    }

    /// Lets nobody in any more; whether nobody is inside.
    pub(super) fn revoke(&self) -> bool {
        // Acquire pairs with the release of the last copier: what it did to the memory is seen before it is used again.
        self.word.fetch_or(REVOKED, Ordering::AcqRel) & !REVOKED == 0
    }

    /// Whether nobody gets in: the key is revoked, or what was lent was taken back.
    pub(super) fn is_revoked(&self) -> bool {
        self.word.load(Ordering::Relaxed) & REVOKED != 0 || self.loan.as_ref().is_some_and(|loan| loan.is_broken())
    }
}

/// A copier inside the memory of an [`Exposure`].
#[derive(Debug)]
pub(super) struct Inside<'a>(&'a Exposure);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.word.fetch_sub(1, Ordering::Release);
    }
}

/// All keys of a device.
pub(super) struct KeyTable {
    inner: Mutex<Inner>,
}

struct Inner {
    slots: Vec<Option<(u64, Arc<Exposure>)>>,
    free: Vec<u32>,
    drawn: Vec<u64>,
}

impl KeyTable {
    pub(super) fn new() -> Self {
        Self { inner: Mutex::new(Inner { slots: Vec::new(), free: Vec::new(), drawn: Vec::new() }) }
    }

    /// Gives `exposure` a key.
    pub(super) fn insert(&self, verb: &'static str, exposure: Arc<Exposure>) -> Result<u64> {
        let mut inner = lock(&self.inner);
        let secret = inner.draw().map_err(|error| Error::from_io(verb, "getrandom", &error))?;
        let slot = match inner.free.pop() {
            Some(slot) => slot,
            None if inner.slots.len() < MAX_KEYS => {
                inner.slots.push(None);
                inner.slots.len() as u32 - 1
            }
            None => {
                let cause = Cause::Limit { what: "remote keys", have: MAX_KEYS as u64, need: MAX_KEYS as u64 + 1 };
                return Err(Error::new(verb, cause));
            }
        };
        let key = secret << SLOT_BITS | u64::from(slot);
        inner.slots[slot as usize] = Some((key, exposure));
        Ok(key)
    }

    /// Forgets a key. (Who holds the exposure is not stopped by that: revoke it first.)
    pub(super) fn remove(&self, key: u64) {
        let mut inner = lock(&self.inner);
        let slot = slot_of(key);
        let gone = inner.slots.get_mut(slot).and_then(|entry| entry.take_if(|(held, _)| *held == key));
        if gone.is_some() {
            inner.free.push(slot as u32);
        }
        drop(inner);
        drop(gone); // perhaps the memory's last handle: not unmapped under the lock
    }

    /// What is under `key`, if `claim` is within its rights.
    pub(super) fn find(&self, key: u64, claim: &Claim) -> Option<Arc<Exposure>> {
        let inner = lock(&self.inner);
        let (held, exposure) = inner.slots.get(slot_of(key))?.as_ref()?;
        (*held == key && exposure.allows(claim) && !exposure.is_revoked()).then(|| exposure.clone())
    }
}

impl fmt::Debug for KeyTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyTable(..)") // full of secrets (I14)
    }
}

impl Inner {
    fn draw(&mut self) -> std::io::Result<u64> {
        if self.drawn.is_empty() {
            let mut bytes = [0; DRAWN * 8];
            sys::random(&mut bytes)?;
            self.drawn.extend(bytes.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_le_bytes)));
        }
        Ok(self.drawn.pop().unwrap_or_default())
    }
}

fn slot_of(key: u64) -> usize {
    (key & ((1 << SLOT_BITS) - 1)) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::HugePages;

    fn exposure(queue_pair: Option<u64>) -> Arc<Exposure> {
        let memory = Memory::shared(8192, HugePages::Off).unwrap();
        Arc::new(Exposure::new(memory, (4096, 100), Access::REMOTE_READ, 1, queue_pair))
    }

    const CLAIM: Claim = Claim { access: Access::REMOTE_READ, domain: 1, queue_pair: 5, address: 4096, len: 100 };

    #[test]
    fn a_key_opens_what_it_is_for_and_nothing_else() {
        let table = KeyTable::new();
        let key = table.insert("bind_mw", exposure(Some(5))).unwrap();
        assert!(table.find(key, &CLAIM).is_some());
        assert!(table.find(key, &Claim { len: 0, address: 4196, ..CLAIM }).is_some());
        let refused = [
            Claim { access: Access::REMOTE_WRITE, ..CLAIM },
            Claim { domain: 2, ..CLAIM },
            Claim { queue_pair: 6, ..CLAIM },
            Claim { address: 4095, ..CLAIM },
            Claim { address: 4097, ..CLAIM },
            Claim { len: 101, ..CLAIM },
            Claim { address: 0, len: 1, ..CLAIM },
            Claim { address: u64::MAX, len: 1, ..CLAIM },
            Claim { len: u64::MAX, ..CLAIM },
        ];
        for claim in refused {
            assert!(table.find(key, &claim).is_none(), "{claim:?}");
        }
        for bit in 0..64 {
            assert!(table.find(key ^ 1 << bit, &CLAIM).is_none(), "bit {bit}");
        }
        assert!(table.find(table.insert("reg_mr", exposure(None)).unwrap(), &CLAIM).is_some());
    }

    #[test]
    fn a_removed_key_stays_wrong_when_its_slot_is_used_again() {
        let table = KeyTable::new();
        let mut old = Vec::new();
        for _ in 0..1000 {
            let key = table.insert("bind_mw", exposure(None)).unwrap();
            assert!(table.find(key, &CLAIM).is_some());
            table.remove(key);
            table.remove(key);
            old.push(key);
        }
        assert_eq!(lock(&table.inner).slots.len(), 1);
        let _live = table.insert("bind_mw", exposure(None)).unwrap();
        assert!(old.iter().all(|key| table.find(*key, &CLAIM).is_none()));
    }

    #[test]
    fn revoking_tells_whether_somebody_is_inside() {
        let exposure = exposure(None);
        let inside = exposure.enter().unwrap();
        assert!(!exposure.revoke());
        assert!(exposure.enter().is_none());
        assert!(!exposure.revoke());
        drop(inside);
        assert!(exposure.revoke());
        assert!(exposure.enter().is_none());
    }

    #[test]
    fn a_revoked_key_is_not_found() {
        let table = KeyTable::new();
        let exposure = exposure(None);
        let key = table.insert("bind_mw", exposure.clone()).unwrap();
        assert!(exposure.revoke());
        assert!(table.find(key, &CLAIM).is_none());
    }

    #[test]
    fn no_copier_is_inside_after_a_fence_whatever_the_timing() {
        for _ in 0..2000 {
            let exposure = exposure(None);
            let inside = AtomicU64::new(0);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while let Some(guard) = exposure.enter() {
                        inside.store(1, Ordering::SeqCst);
                        inside.store(0, Ordering::SeqCst);
                        drop(guard);
                    }
                });
                while !exposure.revoke() {}
                assert_eq!(inside.load(Ordering::SeqCst), 0);
            });
        }
    }

    #[test]
    fn keys_are_limited_in_number() {
        let table = KeyTable::new();
        let exposure = exposure(None);
        for _ in 0..MAX_KEYS {
            table.insert("bind_mw", exposure.clone()).unwrap();
        }
        let refused = table.insert("bind_mw", exposure).unwrap_err();
        assert!(matches!(refused.cause, Cause::Limit { what: "remote keys", .. }), "{refused}");
    }
}
