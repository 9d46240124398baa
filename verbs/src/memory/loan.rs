//! Loans: bytes of a caller's that peers may read in the place of a region's own, until he takes them back.
//!
//! | state | what a read of the window gets | leaves it by |
//! |---|---|---|
//! | lent | the lender's bytes | `copied`; the end of the loan |
//! | copied | the region's own bytes, which are the same by now | |
//! | broken | nothing: the key counts as revoked | |
//!
//! One word holds the state and the number of those who read the lender's bytes just now, so that nobody can go in after
//! the lender saw that nobody is inside (I1, I3).
#![allow(unsafe_code)]

use core::fmt;
use core::ops::Deref;
use core::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

const COPIED: u64 = 1 << 63;
const BROKEN: u64 = 1 << 62;
const OVER: u64 = COPIED | BROKEN;

/// Bytes lent; see [`lend`] and [`MemoryRegion::bind_lent`](crate::MemoryRegion::bind_lent).
pub struct Loan {
    address: *const u8,
    len: usize,
    /// What the loan owns itself, if the bytes are not another's.
    _own: Option<Box<[u8]>>,
    word: AtomicU64,
    taken: AtomicU64,
}

// SAFETY: the bytes are shared and unchanging as long as they are lent (contract of `Loan::borrowed`; owned ones are
// never written), so any thread may read them.
unsafe impl Send for Loan {}
// SAFETY: as above.
unsafe impl Sync for Loan {}

impl Loan {
    /// Lends bytes that the loan owns from now on.
    #[must_use]
    pub fn owned(bytes: Box<[u8]>) -> Arc<Self> {
        let (address, len) = (bytes.as_ptr(), bytes.len());
        Arc::new(Self { address, len, _own: Some(bytes), word: AtomicU64::new(0), taken: AtomicU64::new(0) })
    }

    /// # Safety
    /// [`end`](Self::end) is called before the borrow that `bytes` is ends.
    unsafe fn borrowed(bytes: &[u8]) -> Arc<Self> {
        let (address, len) = (bytes.as_ptr(), bytes.len());
        Arc::new(Self { address, len, _own: None, word: AtomicU64::new(0), taken: AtomicU64::new(0) })
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many bytes were read out of it so far; those read twice count twice.
    #[must_use]
    pub fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// The region holds the same bytes now, and they are read from now on. (Who is reading the lent ones reads on.)
    pub fn copied(&self) {
        // Release: whoever sees the mark sees the bytes that were copied before. A loan that is broken stays so.
        let _broken = self
            .word
            .fetch_update(Ordering::Release, Ordering::Relaxed, |word| (word & BROKEN == 0).then_some(word | COPIED));
    }

    /// Whether it ended without its bytes being in the region.
    pub(crate) fn is_broken(&self) -> bool {
        self.word.load(Ordering::Relaxed) & BROKEN != 0
    }

    /// Nobody gets in any more, and nobody is inside when this returns. A loan that was not [copied](Self::copied) is broken.
    fn end(&self) {
        let _over = self
            .word
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |word| (word & OVER == 0).then_some(word | BROKEN));
        // A reader is inside for one call of the system that does not block.
        while self.word.load(Ordering::Acquire) & !OVER != 0 {
            std::thread::yield_now();
        }
    }

    /// Where the bytes are to be read now.
    pub(crate) fn enter(&self) -> Entry<'_> {
        let enter = |word: u64| (word & OVER == 0).then_some(word + 1);
        match self.word.fetch_update(Ordering::Acquire, Ordering::Acquire, enter) {
            Ok(_) => Entry::Lent(Lent(self)),
            Err(word) if word & COPIED != 0 => Entry::Copied,
            Err(_) => Entry::Broken,
        }
    }

    /// Notes that bytes were read.
    pub(crate) fn note_taken(&self, bytes: u64) {
        self.taken.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl fmt::Debug for Loan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loan").field("len", &self.len).field("taken", &self.taken()).finish_non_exhaustive()
    }
}

/// Where the bytes of a loan are to be read.
pub(crate) enum Entry<'a> {
    /// Here, as long as this guard is kept.
    Lent(Lent<'a>),
    /// In the region.
    Copied,
    /// Nowhere any more.
    Broken,
}

/// A reader inside lent bytes.
pub(crate) struct Lent<'a>(&'a Loan);

impl Deref for Lent<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the bytes are valid until `end` returns or the loan's own box is dropped; neither happens while this
        // guard is counted in the word, and borrows the loan.
        unsafe { core::slice::from_raw_parts(self.0.address, self.0.len) }
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        // Release pairs with the acquire in `end`: what was read was read before.
        self.0.word.fetch_sub(1, Ordering::Release);
    }
}

/// Lends `bytes`, each a loan of its own, while `borrower` runs. When this returns, also by a panic of `borrower`, nobody
/// reads them any more: what was not [copied](Loan::copied) by then is out of reach for whoever had a window to it.
///
/// Returning waits for readers that are inside, each for one call of the system that does not block.
pub fn lend<R>(bytes: &[&[u8]], borrower: impl FnOnce(&[Arc<Loan>]) -> R) -> R {
    struct Ends(Vec<Arc<Loan>>);
    impl Drop for Ends {
        fn drop(&mut self) {
            self.0.iter().for_each(|loan| loan.end());
        }
    }
    // SAFETY: `Ends` ends every loan before this function is left in any way, and the borrows outlive the function. No
    // panic is possible between the making of a loan and its being in `Ends` but that of an allocation, before which the
    // loan is known to nobody.
    let loans = Ends(bytes.iter().map(|bytes| unsafe { Loan::borrowed(bytes) }).collect());
    borrower(&loans.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    fn is_broken(loan: &Loan) -> bool {
        matches!(loan.enter(), Entry::Broken)
    }

    #[test]
    fn lent_bytes_are_read_until_they_are_copied() {
        let own = vec![7u8; 100];
        let kept = lend(&[&own, &own[..3]], |loans| {
            assert_eq!((loans[0].len(), loans[1].len()), (100, 3));
            let Entry::Lent(bytes) = loans[0].enter() else { panic!("not lent") };
            assert_eq!(&*bytes, &own[..]);
            loans[0].note_taken(60);
            loans[0].copied();
            assert_eq!(bytes[99], 7, "whoever is inside reads on");
            drop(bytes);
            assert!(matches!(loans[0].enter(), Entry::Copied));
            assert_eq!((loans[0].taken(), loans[1].taken()), (60, 0));
            loans.to_vec()
        });
        assert!(matches!(kept[0].enter(), Entry::Copied), "the region has them");
        assert!(is_broken(&kept[1]), "nobody has them");
        kept[1].copied();
        assert!(is_broken(&kept[1]), "too late");
    }

    #[test]
    fn a_panic_ends_the_loan_too() {
        let mut kept = None;
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            lend(&[b"bytes"], |loans| {
                kept = Some(loans[0].clone());
                panic!("planned");
            })
        }));
        assert!(outcome.is_err());
        assert!(is_broken(&kept.unwrap()));
    }

    #[test]
    fn owned_bytes_stay_as_long_as_the_loan() {
        let loan = Loan::owned(Box::from(*b"bytes"));
        let Entry::Lent(bytes) = loan.enter() else { panic!("not lent") };
        assert_eq!(&*bytes, b"bytes");
    }

    #[test]
    fn nobody_is_inside_after_the_end_whatever_the_timing() {
        for round in 0..2000 {
            let inside = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let (sender, receiver) = std::sync::mpsc::channel::<Arc<Loan>>();
                let inside = &inside;
                scope.spawn(move || {
                    let loan = receiver.recv().unwrap();
                    while let Entry::Lent(bytes) = loan.enter() {
                        inside.store(true, Ordering::SeqCst);
                        assert_eq!(bytes.len(), 5);
                        inside.store(false, Ordering::SeqCst);
                    }
                });
                lend(&[b"bytes"], |loans| {
                    sender.send(loans[0].clone()).unwrap();
                    if round % 2 == 0 {
                        loans[0].copied();
                    }
                });
                assert!(!inside.load(Ordering::SeqCst));
            });
        }
    }
}
