//! Runs of set bits in one word.

pub(super) const ALL: u64 = u64::MAX;

/// The bits `from..to` of a word, of which there is at least one.
#[inline]
pub(super) const fn mask(from: u64, to: u64) -> u64 {
    (ALL << from) & (ALL >> (64 - to))
}

/// The bits that begin a run of at least `least` set bits within the word, one for each such run: its first.
///
/// The same steps whatever the length, since a branch on it would be predicted badly.
#[inline]
pub(super) fn begins(bits: u64, least: u64) -> u64 {
    if least > 64 {
        return 0;
    }
    // Bits that begin 1, 2, 4 … set ones; the longest of these that is not too long, and the rest in one more step.
    let one = bits;
    let two = one & one >> 1;
    let four = two & two >> 2;
    let eight = four & four >> 4;
    let sixteen = eight & eight >> 8;
    let all = sixteen & sixteen >> 16;
    let log = 63 - least.leading_zeros();
    let most = [one, two, four, eight, sixteen, all, all & all >> 32][log as usize];
    let begins = most & most >> (least - (1 << log));
    // Of each run its first: those further in have a set bit below.
    begins & !(bits << 1)
}

/// Where the run of set bits begins that ends before `to`: `to` itself if the bit below it is clear.
#[inline]
pub(super) fn run_start(bits: u64, to: u64) -> u64 {
    let clear = !bits & (1u64.wrapping_shl(to as u32).wrapping_sub(1) | if to == 64 { ALL } else { 0 });
    64 - u64::from(clear.leading_zeros())
}

/// Where the run of set bits ends that begins at `from`, at most 63: `from` itself if that bit is clear.
#[inline]
pub(super) fn run_end(bits: u64, from: u64) -> u64 {
    u64::from((!bits & (ALL << from)).trailing_zeros())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_found_as_one_bit_after_the_other_finds_them() {
        let words =
            [0, ALL, 1, 1 << 63, 0b0111_0110_0000_1000, !(1 << 31), 0xf0f0_ff00_0000_00ff, 0x5555_5555_5555_5555];
        let set = |bits: u64, at: u64| bits >> at & 1 == 1;
        for bits in words {
            for least in 1..=66 {
                let mut want = 0;
                for at in 0..64u64 {
                    let begins = set(bits, at) && (at == 0 || !set(bits, at - 1));
                    if begins && (at..at + least).all(|at| at < 64 && set(bits, at)) {
                        want |= 1 << at;
                    }
                }
                assert_eq!(begins(bits, least), want, "{bits:x} {least}");
            }
            for at in 0..=64u64 {
                let start = (0..at).rev().take_while(|&at| set(bits, at)).last().unwrap_or(at);
                assert_eq!(run_start(bits, at), start, "{bits:x} {at}");
                let end = (at..64).take_while(|&at| set(bits, at)).last().map_or(at, |last| last + 1);
                assert!(at == 64 || run_end(bits, at) == end, "{bits:x} {at}");
            }
        }
    }
}
