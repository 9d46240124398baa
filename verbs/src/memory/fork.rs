//! Which process this is, as far as forks go (I13).
//!
//! A handle keeps the generation of the process that made it. In a child made by fork the generation is another, so that
//! the child finds out for the price of one load, and leaves alone what belongs to its parent: connections, locks that a
//! thread of the parent may hold, addresses where nothing is mapped here.
#![allow(unsafe_code)]

use super::map::{Mapping, page_size};
use core::sync::atomic::{AtomicU64, Ordering};
use std::process;
use std::sync::OnceLock;

/// The generation of this process: the same for as long as it lives, another in every child.
pub(crate) fn generation() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    static PAGE: OnceLock<Option<Mapping>> = OnceLock::new();
    let Some(page) = PAGE.get_or_init(wiped_page) else { return process::id().into() };
    // SAFETY: the page is mapped for ever, aligned, and used as this atomic number alone.
    let here = unsafe { AtomicU64::from_ptr(page.address().cast()) };
    let known = here.load(Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    // The first call in this process: a number above those of all its ancestors, which are in the copy of LAST that it
    // inherited. If two threads are here, one of them decides.
    let fresh = LAST.fetch_add(1, Ordering::Relaxed) + 1;
    here.compare_exchange(0, fresh, Ordering::Relaxed, Ordering::Relaxed).map_or_else(|other| other, |_| fresh)
}

/// A page that is zero in every child (Linux 4.14).
fn wiped_page() -> Option<Mapping> {
    let page = Mapping::anonymous(page_size() as usize).ok()?;
    page.advise(libc::MADV_WIPEONFORK).ok()?;
    Some(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_has_another_and_the_parent_keeps_its_own() {
        let before = generation();
        assert_eq!(before, generation());
        // SAFETY: the child only loads and stores, and leaves by _exit.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let is_new = generation() != before && generation() == generation();
            // SAFETY: no precondition.
            unsafe { libc::_exit(i32::from(!is_new)) };
        }
        let mut status = -1;
        // SAFETY: `status` is valid; the child is ours.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
        assert_eq!(before, generation());
    }
}
