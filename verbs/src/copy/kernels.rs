//! The copy kernels themselves: assembly, or the C library's `memcpy` called in a way that the compiler can't look
//! through. For the language both are foreign code, so that memory which another process writes at the same time gives
//! wrong bytes and never undefined behaviour.
#![allow(unsafe_code)]

use super::Routine;
use core::arch::asm;

type MemcpyFn = unsafe extern "C" fn(*mut libc::c_void, *const libc::c_void, libc::size_t) -> *mut libc::c_void;

/// The C library's own choice.
///
/// # Safety
/// As [`Routine::copy`].
pub(super) unsafe fn memcpy(dst: *mut u8, src: *const u8, len: usize) {
    let mut function: MemcpyFn = libc::memcpy;
    // SAFETY: no instruction is emitted. The pointer goes through a register that the compiler must take as changed,
    // which makes the call below one of an unknown foreign function.
    unsafe { asm!("/* {0} */", inout(reg) function, options(nostack, preserves_flags)) }
    // SAFETY: `function` still is `memcpy`; the caller promises both ranges.
    unsafe { function(dst.cast(), src.cast(), len) };
}

/// Every routine that this processor can run; `memcpy` is always the first. Of those that a short measurement can't tell
/// apart the last is taken: the widest loop over four pages, the fastest of long measurements.
pub(super) fn available() -> Vec<Routine> {
    let mut all = vec![Routine { name: "memcpy", kernel: memcpy }];
    #[cfg(target_arch = "x86_64")]
    x86::add(&mut all);
    all
}

/// Writes the range back to memory and out of every cache, where the processor has an instruction for that: so that a
/// short measurement over a few megabytes sees memory, as a long copy does, and not the cache.
///
/// # Safety
/// The range is valid for reads.
pub(super) unsafe fn evict(start: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: passed on to the caller.
    unsafe {
        x86::evict(start, len)
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (start, len);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Routine, asm, memcpy};
    use core::arch::x86_64::__cpuid_count;

    const LINE: usize = 64;
    const PAGE: usize = 4096;

    pub(super) fn add(all: &mut Vec<Routine>) {
        all.push(Routine { name: "rep movsb", kernel: rep_movsb });
        if has(|leaf7| leaf7.ecx & 1 << 28 != 0) {
            all.push(Routine { name: "movdir64b, 4 pages", kernel: movdir64b_stream4 });
        }
        if std::arch::is_x86_feature_detected!("avx2") {
            all.push(Routine { name: "avx2 stream", kernel: avx2_stream });
            all.push(Routine { name: "avx2 stream, 4 pages", kernel: avx2_stream4 });
        }
        if std::arch::is_x86_feature_detected!("avx512f") {
            all.push(Routine { name: "avx512 stream", kernel: avx512_stream });
            all.push(Routine { name: "avx512 stream, 4 pages", kernel: avx512_stream4 });
        }
    }

    /// Asks leaf 7 of CPUID (Intel SDM volume 2, CPUID), whose bits need no support by the operating system.
    fn has(bit: impl Fn(core::arch::x86_64::CpuidResult) -> bool) -> bool {
        core::arch::x86_64::__cpuid(0).eax >= 7 && bit(__cpuid_count(7, 0))
    }

    /// The string instruction.
    ///
    /// # Safety
    /// As [`Routine::copy`].
    unsafe fn rep_movsb(dst: *mut u8, src: *const u8, len: usize) {
        // SAFETY: the caller promises both ranges; the direction flag is clear on entry to an asm block (Rust
        // reference, inline assembly), so that it counts upwards.
        unsafe {
            asm!(
                "rep movsb",
                inout("rcx") len => _, inout("rdi") dst => _, inout("rsi") src => _,
                options(nostack, preserves_flags)
            );
        }
    }

    /// Makes a kernel out of a loop over whole blocks whose destination is aligned to a line: `memcpy` brings the
    /// destination to a line and moves what is left behind the last block.
    macro_rules! kernel {
        ($(#[$doc:meta])* $name:ident, blocks of $block:expr, $body:path) => {
            $(#[$doc])*
            ///
            /// # Safety
            /// As [`Routine::copy`], on a processor that has the instructions.
            unsafe fn $name(dst: *mut u8, src: *const u8, len: usize) {
                let head = dst.align_offset(LINE).min(len);
                // SAFETY: `head <= len`, and the caller promises `len` bytes on both sides.
                unsafe { memcpy(dst, src, head) };
                let blocks = (len - head) / $block;
                if blocks > 0 {
                    // SAFETY: `head + blocks * $block <= len`; `dst + head` is aligned to a line, since `head < len`.
                    unsafe { $body(dst.wrapping_add(head), src.wrapping_add(head), blocks) };
                }
                let done = head + blocks * $block;
                // SAFETY: `done <= len`.
                unsafe { memcpy(dst.wrapping_add(done), src.wrapping_add(done), len - done) };
            }
        };
    }

    /// A loop that copies blocks of four pages, two registers from each in turn: four streams for the prefetcher, four
    /// open rows of memory, and whole lines even where a register is half of one. Ends with a store fence, as streaming
    /// stores are weakly ordered.
    macro_rules! four_pages {
        (
            $name:ident, $load:literal, $store:literal, $width:literal,
            $a:tt $b:tt $c:tt $d:tt $e:tt $f:tt $g:tt $h:tt, $end:literal
        ) => {
            unsafe fn $name(dst: *mut u8, src: *const u8, blocks: usize) {
                // SAFETY: the loop reads and writes exactly `blocks * 4 * PAGE` bytes, which the caller promises, and
                // the registers it changes are named.
                unsafe {
                    asm!(
                        "2:",
                        "mov {step:e}, {steps}",
                        "3:",
                        concat!($load, " ", $a, ", [{src}]"),
                        concat!($load, " ", $b, ", [{src} + ", $width, "]"),
                        concat!($load, " ", $c, ", [{src} + 4096]"),
                        concat!($load, " ", $d, ", [{src} + 4096 + ", $width, "]"),
                        concat!($load, " ", $e, ", [{src} + 8192]"),
                        concat!($load, " ", $f, ", [{src} + 8192 + ", $width, "]"),
                        concat!($load, " ", $g, ", [{src} + 12288]"),
                        concat!($load, " ", $h, ", [{src} + 12288 + ", $width, "]"),
                        concat!($store, " [{dst}], ", $a),
                        concat!($store, " [{dst} + ", $width, "], ", $b),
                        concat!($store, " [{dst} + 4096], ", $c),
                        concat!($store, " [{dst} + 4096 + ", $width, "], ", $d),
                        concat!($store, " [{dst} + 8192], ", $e),
                        concat!($store, " [{dst} + 8192 + ", $width, "], ", $f),
                        concat!($store, " [{dst} + 12288], ", $g),
                        concat!($store, " [{dst} + 12288 + ", $width, "], ", $h),
                        concat!("add {src}, 2*", $width),
                        concat!("add {dst}, 2*", $width),
                        "dec {step:e}",
                        "jnz 3b",
                        "add {src}, 12288",
                        "add {dst}, 12288",
                        "dec {blocks}",
                        "jnz 2b",
                        "sfence",
                        $end,
                        step = out(reg) _,
                        src = inout(reg) src => _,
                        dst = inout(reg) dst => _,
                        blocks = inout(reg) blocks => _,
                        steps = const PAGE / (2 * $width),
                        out($a) _, out($b) _, out($c) _, out($d) _, out($e) _, out($f) _, out($g) _, out($h) _,
                        options(nostack),
                    );
                }
            }
        };
    }

    /// A loop that copies blocks of four registers, one after the other.
    macro_rules! one_stream {
        ($name:ident, $load:literal, $store:literal, $width:literal, $a:tt $b:tt $c:tt $d:tt, $end:literal) => {
            unsafe fn $name(dst: *mut u8, src: *const u8, blocks: usize) {
                // SAFETY: the loop reads and writes exactly `blocks * 4 * $width` bytes, which the caller promises,
                // and the registers it changes are named.
                unsafe {
                    asm!(
                        "2:",
                        concat!($load, " ", $a, ", [{src}]"),
                        concat!($load, " ", $b, ", [{src} + ", $width, "]"),
                        concat!($load, " ", $c, ", [{src} + 2*", $width, "]"),
                        concat!($load, " ", $d, ", [{src} + 3*", $width, "]"),
                        concat!($store, " [{dst}], ", $a),
                        concat!($store, " [{dst} + ", $width, "], ", $b),
                        concat!($store, " [{dst} + 2*", $width, "], ", $c),
                        concat!($store, " [{dst} + 3*", $width, "], ", $d),
                        concat!("add {src}, 4*", $width),
                        concat!("add {dst}, 4*", $width),
                        "dec {blocks}",
                        "jnz 2b",
                        "sfence",
                        $end,
                        src = inout(reg) src => _,
                        dst = inout(reg) dst => _,
                        blocks = inout(reg) blocks => _,
                        out($a) _, out($b) _, out($c) _, out($d) _,
                        options(nostack),
                    );
                }
            }
        };
    }

    // The 512-bit loops use the upper sixteen registers, which leave no state behind that slows SSE code down.
    four_pages!(
        avx2_four_pages, "vmovdqu", "vmovntdq", 32,
        "ymm0" "ymm1" "ymm2" "ymm3" "ymm4" "ymm5" "ymm6" "ymm7", "vzeroupper"
    );
    four_pages!(
        avx512_four_pages, "vmovdqu64", "vmovntdq", 64,
        "zmm16" "zmm17" "zmm18" "zmm19" "zmm20" "zmm21" "zmm22" "zmm23", ""
    );
    one_stream!(avx2_one_stream, "vmovdqu", "vmovntdq", 32, "ymm0" "ymm1" "ymm2" "ymm3", "vzeroupper");
    one_stream!(avx512_one_stream, "vmovdqu64", "vmovntdq", 64, "zmm16" "zmm17" "zmm18" "zmm19", "");

    /// As `four_pages!`, a line in one instruction.
    unsafe fn movdir64b_four_pages(dst: *mut u8, src: *const u8, blocks: usize) {
        // SAFETY: the loop reads and writes exactly `blocks * 4 * PAGE` bytes, which the caller promises; every
        // destination is aligned to a line, as MOVDIR64B demands, since `dst` is and all steps are multiples of it.
        unsafe {
            asm!(
                "2:",
                "mov {step:e}, 64",
                "3:",
                "lea {second}, [{dst} + 4096]",
                "lea {third}, [{dst} + 8192]",
                "lea {fourth}, [{dst} + 12288]",
                "movdir64b {dst}, [{src}]",
                "movdir64b {second}, [{src} + 4096]",
                "movdir64b {third}, [{src} + 8192]",
                "movdir64b {fourth}, [{src} + 12288]",
                "add {src}, 64",
                "add {dst}, 64",
                "dec {step:e}",
                "jnz 3b",
                "add {src}, 12288",
                "add {dst}, 12288",
                "dec {blocks}",
                "jnz 2b",
                "sfence",
                step = out(reg) _,
                second = out(reg) _,
                third = out(reg) _,
                fourth = out(reg) _,
                src = inout(reg) src => _,
                dst = inout(reg) dst => _,
                blocks = inout(reg) blocks => _,
                options(nostack),
            );
        }
    }

    kernel!(
        /// Streaming stores of 32 bytes, in order.
        avx2_stream, blocks of 4 * 32, avx2_one_stream
    );
    kernel!(
        /// Streaming stores of 32 bytes, four pages in turn.
        avx2_stream4, blocks of 4 * PAGE, avx2_four_pages
    );
    kernel!(
        /// Streaming stores of 64 bytes, in order.
        avx512_stream, blocks of 4 * 64, avx512_one_stream
    );
    kernel!(
        /// Streaming stores of 64 bytes, four pages in turn.
        avx512_stream4, blocks of 4 * PAGE, avx512_four_pages
    );
    kernel!(
        /// Direct stores of a line, four pages in turn.
        movdir64b_stream4, blocks of 4 * PAGE, movdir64b_four_pages
    );

    pub(super) unsafe fn evict(start: *const u8, len: usize) {
        let weak = has(|leaf7| leaf7.ebx & 1 << 23 != 0);
        for line in (0..len).step_by(LINE) {
            let address = start.wrapping_add(line);
            if weak {
                // SAFETY: flushing a line that the caller promises to be readable changes no byte; CLFLUSHOPT is there.
                unsafe { asm!("clflushopt [{}]", in(reg) address, options(nostack, preserves_flags)) }
            } else {
                // SAFETY: as above; every 64-bit processor has CLFLUSH.
                unsafe { asm!("clflush [{}]", in(reg) address, options(nostack, preserves_flags)) }
            }
        }
        // SAFETY: a fence has no precondition.
        unsafe { asm!("mfence", options(nostack, preserves_flags)) }
    }
}
