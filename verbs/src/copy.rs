//! Copying memory as fast as this processor can.
//!
//! No routine is best everywhere: on one processor a streaming copy that walks four pages in turn moves twice what
//! `memcpy` does, on another it is slower than `memcpy`, and two threads may double either or gain nothing. So what
//! there is is found by the processor's features ([`routines`]) and chosen by a short measurement ([`best`]).
//!
//! Every routine is foreign code to the compiler (assembly, or an opaque call): bytes that another process writes at
//! the same time can come out wrong, but it is not undefined behaviour to copy them.

use core::fmt;
use std::sync::OnceLock;

mod kernels;
mod measure;

/// One way of copying. Any length and any alignment of either side.
#[derive(Clone, Copy)]
pub struct Routine {
    name: &'static str,
    kernel: unsafe fn(*mut u8, *const u8, usize),
}

impl Routine {
    /// Its name: instructions and order (`memcpy`, `avx512 stream, 4 pages`).
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// Copies `len` bytes from `src` to `dst`. When it returns the bytes are visible to every thread that this one
    /// synchronises with (streaming stores are fenced).
    ///
    /// # Safety
    /// `src..src + len` is valid for reads and `dst..dst + len` for writes, and they don't overlap. Others may write
    /// `src` meanwhile (the bytes copied are then any mix of old and new); nobody else uses `dst`.
    #[allow(unsafe_code)]
    pub unsafe fn copy(&self, dst: *mut u8, src: *const u8, len: usize) {
        // SAFETY: passed on to the caller, in the same words.
        unsafe { (self.kernel)(dst, src, len) }
    }
}

impl fmt::Debug for Routine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// What [`best`] chose for large copies.
#[derive(Debug, Clone, Copy)]
pub struct Choice {
    /// The routine.
    pub routine: Routine,
    /// On how many threads at once it is fastest: 1, 2, or 4 where there are 8 processors or more.
    pub threads: usize,
    /// What the measurement saw with these, in bytes a second. A guide, taken from a few megabytes in some
    /// milliseconds; compare with nothing taken elsewhere.
    pub bytes_per_second: u64,
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.threads == 1 { "" } else { "s" };
        write!(f, "{} on {} thread{plural}", self.routine.name, self.threads)
    }
}

/// All routines that this processor has the instructions for; the first is `memcpy`.
#[must_use]
pub fn routines() -> &'static [Routine] {
    static ROUTINES: OnceLock<Vec<Routine>> = OnceLock::new();
    ROUTINES.get_or_init(kernels::available)
}

/// The best routine and number of threads for large copies on this processor. The first call in a process measures,
/// for about 20 ms, and for up to 80 ms where a second thread doesn't seem to pay; the others return what it found.
#[must_use]
pub fn best() -> &'static Choice {
    static CHOICE: OnceLock<Choice> = OnceLock::new();
    CHOICE.get_or_init(|| measure::choose(routines()))
}

/// From this length on copies are made by the best routine, below it by `memcpy`. Streaming stores go past the cache:
/// measured on a Xeon (2 MiB of second-level cache, both sides cold), they copy 64 KiB to 1 MiB in 0.57 of the time of
/// `memcpy`, but whoever reads the bytes next finds them in memory and not in the cache, which costs as much again.
/// Bytes that are few are read at once; many are passed on first.
pub(crate) const LARGE: usize = 128 << 10;

/// Copies by `memcpy` what is small and by the best routine what is large, on the calling thread.
///
/// # Safety
/// As [`Routine::copy`].
#[allow(unsafe_code)]
pub(crate) unsafe fn copy(dst: *mut u8, src: *const u8, len: usize) {
    if len < LARGE {
        // SAFETY: passed on to the caller.
        unsafe { kernels::memcpy(dst, src, len) }
    } else {
        // SAFETY: passed on to the caller.
        unsafe { best().routine.copy(dst, src, len) }
    }
}

#[cfg(test)]
#[allow(unsafe_code)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CANARY: u8 = 0xa5;
    const MARGIN: usize = 4096;

    /// Copies `len` bytes between buffers at the given misalignments and checks every byte, and the margins.
    fn check(routine: &Routine, len: usize, src_skew: usize, dst_skew: usize, seed: u8) {
        let source: Vec<u8> = (0..src_skew + len).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)).collect();
        let mut target = vec![CANARY; MARGIN + dst_skew + len + MARGIN];
        let from = source.as_ptr().wrapping_add(src_skew);
        let start = MARGIN + dst_skew;
        // SAFETY: `source` has `len` bytes after `src_skew`, `target` has `len` after `start`; they are two vectors.
        unsafe { routine.copy(target.as_mut_ptr().wrapping_add(start), from, len) };
        assert!(target[start..start + len] == source[src_skew..], "{routine:?}: {len} bytes are not the same");
        assert!(target[..start].iter().all(|&b| b == CANARY), "{routine:?} wrote before the destination");
        assert!(target[start + len..].iter().all(|&b| b == CANARY), "{routine:?} wrote behind the destination");
    }

    #[test]
    fn the_first_routine_is_memcpy_and_names_differ() {
        let names: Vec<_> = routines().iter().map(Routine::name).collect();
        assert_eq!(names[0], "memcpy");
        let mut sorted = names.clone();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted.len(), names.len());
    }

    #[test]
    fn borders_of_lines_pages_and_blocks() {
        for routine in routines() {
            for around in [0usize, 64, 256, 4096, 4 * 4096, 4 * 4096 + 64, 8 * 4096, 5 * 4096] {
                for len in around.saturating_sub(2)..=around + 2 {
                    for (src_skew, dst_skew) in [(0, 0), (1, 0), (0, 1), (63, 1), (7, 63)] {
                        check(routine, len, src_skew, dst_skew, len as u8);
                    }
                }
            }
        }
    }

    #[test]
    fn every_misalignment_of_a_line() {
        for routine in routines() {
            for skew in 0..64 {
                check(routine, 3 * 4 * 4096 + 777, skew, 0, 1);
                check(routine, 3 * 4 * 4096 + 777, 5, skew, 2);
            }
        }
    }

    #[test]
    fn best_is_one_of_the_routines_and_stays() {
        let first = best();
        assert!(routines().iter().any(|r| r.name == first.routine.name));
        assert!((1..=4).contains(&first.threads));
        assert!(first.bytes_per_second > 0);
        assert!(core::ptr::eq(first, best()));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]
        #[test]
        fn any_length_and_alignment(
            which in any::<prop::sample::Index>(), len in 0usize..200_000, s in 0usize..4096, d in 0usize..4096, seed: u8
        ) {
            check(which.get(routines()), len, s, d, seed);
        }
    }
}
