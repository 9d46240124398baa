//! The streaming copy: stores that bypass the cache, over four pages in turn.

use super::PAGE;
use std::arch::asm;
use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};

const VECTOR: usize = 32;
const LINE: usize = 64;
const BLOCK: usize = 4 * PAGE;

/// # Safety
/// The processor has AVX2; `from` can be read and `to` written for `len` bytes, and the two don't overlap.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn copy(mut to: *mut u8, mut from: *const u8, mut len: usize) {
    let wide = is_x86_feature_detected!("avx512f");
    let head = to.align_offset(LINE).min(len);
    // SAFETY: `head` is at most `len`.
    (to, from) = unsafe { head_of(to, from, head) };
    len -= head;
    while len >= BLOCK {
        if wide {
            // SAFETY: a whole block is left, `to` is aligned since the head, and the processor has AVX-512.
            unsafe { wide_block(to, from) };
        } else {
            // SAFETY: a whole block is left, and `to` is aligned since the head.
            unsafe { block(to, from) };
        }
        // SAFETY: a block has just been copied, so the range goes on at least that far.
        to = unsafe { to.add(BLOCK) };
        // SAFETY: as above.
        from = unsafe { from.add(BLOCK) };
        len -= BLOCK;
    }
    _mm_sfence();
    if wide {
        // SAFETY: the processor has AVX-512, and with it this instruction, which forgets the upper halves of the
        // vector registers: no compiled code keeps anything there across an assembly that says so.
        unsafe { asm!("vzeroupper", clobber_abi("C"), options(nostack, nomem, preserves_flags)) };
    }
    // SAFETY: what is left of both ranges.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
}

/// Copies `head` bytes and returns the pointers behind them.
///
/// # Safety
/// As for [`copy`], with `head` bytes.
unsafe fn head_of(to: *mut u8, from: *const u8, head: usize) -> (*mut u8, *const u8) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, to, head) };
    // SAFETY: the caller's ranges reach that far.
    let to = unsafe { to.add(head) };
    // SAFETY: as above.
    (to, unsafe { from.add(head) })
}

/// Copies one block with AVX2: a line of each of its four pages, and so on.
///
/// # Safety
/// As for [`copy`], with a block; `to` is aligned to a line.
#[target_feature(enable = "avx2")]
unsafe fn block(to: *mut u8, from: *const u8) {
    for line in (0..PAGE).step_by(LINE) {
        for page in 0..4 {
            // SAFETY: the line lies within the block.
            unsafe { line_of(to, from, page * PAGE + line) };
        }
    }
}

/// Copies one block with AVX-512: two lines of each of its four pages, and so on. In assembly, as the compiler
/// that this package still supports has no stable intrinsics for it.
///
/// # Safety
/// As for [`copy`], with a block; `to` is aligned to a line, and the processor has AVX-512.
unsafe fn wide_block(to: *mut u8, from: *const u8) {
    for line in (0..PAGE).step_by(2 * LINE) {
        // SAFETY: two lines of each of the block's four pages; the stores are aligned; what the registers held is
        // given up.
        unsafe {
            asm!(
                "vmovdqu64 zmm0, [{from} + {line}]",
                "vmovdqu64 zmm1, [{from} + {line} + 64]",
                "vmovdqu64 zmm2, [{from} + {line} + 4096]",
                "vmovdqu64 zmm3, [{from} + {line} + 4160]",
                "vmovdqu64 zmm4, [{from} + {line} + 8192]",
                "vmovdqu64 zmm5, [{from} + {line} + 8256]",
                "vmovdqu64 zmm6, [{from} + {line} + 12288]",
                "vmovdqu64 zmm7, [{from} + {line} + 12352]",
                "vmovntdq [{to} + {line}], zmm0",
                "vmovntdq [{to} + {line} + 64], zmm1",
                "vmovntdq [{to} + {line} + 4096], zmm2",
                "vmovntdq [{to} + {line} + 4160], zmm3",
                "vmovntdq [{to} + {line} + 8192], zmm4",
                "vmovntdq [{to} + {line} + 8256], zmm5",
                "vmovntdq [{to} + {line} + 12288], zmm6",
                "vmovntdq [{to} + {line} + 12352], zmm7",
                from = in(reg) from,
                to = in(reg) to,
                line = in(reg) line,
                out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
                options(nostack, preserves_flags)
            );
        }
    }
}

/// Copies the 64 bytes at `at`.
///
/// # Safety
/// As for [`copy`], with the 64 bytes at `at`; `to` and `at` are aligned to a line.
#[target_feature(enable = "avx2")]
unsafe fn line_of(to: *mut u8, from: *const u8, at: usize) {
    // SAFETY: within the caller's range.
    let from = unsafe { from.add(at) };
    // SAFETY: within the caller's range.
    let to = unsafe { to.add(at) };
    // SAFETY: 32 readable bytes; this load needs no alignment.
    let low = unsafe { _mm256_loadu_si256(from.cast::<__m256i>()) };
    // SAFETY: the second 32 of the 64 bytes are within the caller's range.
    let from = unsafe { from.add(VECTOR) };
    // SAFETY: as the first load.
    let high = unsafe { _mm256_loadu_si256(from.cast::<__m256i>()) };
    // SAFETY: 32 writable bytes, aligned.
    unsafe { _mm256_stream_si256(to.cast::<__m256i>(), low) };
    // SAFETY: the second 32 of the 64 bytes are within the caller's range.
    let to = unsafe { to.add(VECTOR) };
    // SAFETY: as the first store.
    unsafe { _mm256_stream_si256(to.cast::<__m256i>(), high) };
}
