//! The content of a payload: fresh for every operation, quick to make, and known at every offset, so that the
//! consumer can check any byte without having been told it.

use super::layout::{Layout, PartPlan};
use crate::command::args::Verify;
use std::fmt;

/// Bytes of one block of the sampled check.
pub(crate) const BLOCK: usize = 4096;
/// Blocks at seeded places that the sampled check looks at.
const PLACES: u64 = 64;
/// An odd constant without pattern: the golden ratio in 64 bits.
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// The endless content of one operation.
///
/// Word `i` is `y ^ y >> 32` with `y = base + i * STEP`: the additions vectorise, so that filling runs at the speed of
/// memory, and `base` is drawn from 64 bits, so that bytes of another operation never match.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Content {
    base: u64,
}

impl Content {
    /// The content of operation `operation` of the run with `seed`.
    pub(crate) fn new(seed: u64, operation: u64) -> Self {
        Self { base: mix(mix(seed).wrapping_add(operation)) }
    }

    /// Writes the bytes from `offset` on into `out`.
    pub(crate) fn fill(self, offset: u64, out: &mut [u8]) {
        let skip = (offset % 8) as usize;
        let (head, body) = out.split_at_mut(if skip == 0 { 0 } else { out.len().min(8 - skip) });
        head.copy_from_slice(&self.word(offset / 8)[skip..skip + head.len()]);
        let first = offset.div_ceil(8);
        let last = first + body.len() as u64 / 8;
        let mut words = body.chunks_exact_mut(8);
        for (index, word) in (first..).zip(&mut words) {
            word.copy_from_slice(&self.word(index));
        }
        let tail = words.into_remainder();
        tail.copy_from_slice(&self.word(last)[..tail.len()]);
    }

    #[inline]
    fn word(self, index: u64) -> [u8; 8] {
        let y = self.base.wrapping_add(index.wrapping_mul(STEP));
        (y ^ (y >> 32)).to_le_bytes()
    }
}

/// Spreads every bit of `x` over the whole word (the finaliser of SplitMix64).
pub(crate) fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(STEP);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// What a consumer has received, as the check reads it.
pub(crate) trait Readable {
    /// The parts, in order, with what is known of each.
    fn parts(&self) -> Vec<PartSeen>;
    /// Copies the bytes of part `part` from `offset` on into `out`; `false` if there aren't so many.
    fn read(&self, part: usize, offset: u64, out: &mut [u8]) -> bool;
}

/// Copies the bytes from `offset` on into `out`; `false` if there aren't so many.
pub(crate) fn copy_of(bytes: &[u8], offset: u64, out: &mut [u8]) -> bool {
    let range = usize::try_from(offset).ok().and_then(|start| bytes.get(start..)?.get(..out.len()));
    range.map(|bytes| out.copy_from_slice(bytes)).is_some()
}

/// What the consumer was told of one part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PartSeen {
    pub(crate) name: String,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) len: u64,
}

/// What differs from what was put.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Mismatch {
    /// The parts aren't those that were put.
    Layout {
        /// What differs: `number of parts`, or `part 3 ("layers.1.key"): shape`.
        what: String,
        expected: String,
        found: String,
    },
    /// A byte isn't the one that was put.
    Byte { part: usize, name: String, offset: u64, expected: u8, found: u8 },
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Layout { what, expected, found } => write!(f, "{what}: expected {expected}, found {found}"),
            Self::Byte { part, name, offset, expected, found } => {
                write!(f, "part {part} (\"{name}\") offset {offset}: expected {expected:#04x}, found {found:#04x}")
            }
        }
    }
}

/// Checks what arrived against `layout` and the content of `operation`.
///
/// # Errors
/// The first difference.
pub(crate) fn check(
    layout: &Layout,
    seed: u64,
    operation: u64,
    verify: Verify,
    arrived: &dyn Readable,
) -> Result<(), Mismatch> {
    if verify == Verify::None {
        return Ok(());
    }
    check_layout(layout, &arrived.parts())?;
    let checker = Checker { content: Content::new(seed, operation), arrived };
    for (index, part) in layout.parts().iter().enumerate() {
        if verify == Verify::Full {
            checker.range(index, part, 0, part.len)?;
        } else {
            checker.range(index, part, 0, part.len.min(BLOCK as u64))?;
            checker.range(index, part, part.len.saturating_sub(BLOCK as u64), part.len)?;
        }
    }
    if verify == Verify::Sampled {
        for place in 0..PLACES {
            let at = mix(mix(seed ^ operation).wrapping_add(place)) % layout.size().max(1);
            if let Some((index, part)) = layout.part_at(at) {
                let start = at - part.offset;
                checker.range(index, part, start, part.len.min(start + BLOCK as u64))?;
            }
        }
    }
    Ok(())
}

fn check_layout(layout: &Layout, seen: &[PartSeen]) -> Result<(), Mismatch> {
    let differ = |what: String, expected: String, found: String| Err(Mismatch::Layout { what, expected, found });
    if seen.len() != layout.parts().len() {
        return differ("number of parts".into(), layout.parts().len().to_string(), seen.len().to_string());
    }
    for (index, (plan, seen)) in layout.parts().iter().zip(seen).enumerate() {
        let what = |aspect: &str| format!("part {index} (\"{}\"): {aspect}", plan.name);
        if seen.name != plan.name {
            return differ(what("name"), plan.name.clone(), seen.name.clone());
        }
        if seen.dtype != plan.dtype.name() {
            return differ(what("dtype"), plan.dtype.to_string(), seen.dtype.clone());
        }
        if seen.shape != plan.shape {
            return differ(what("shape"), format!("{:?}", plan.shape), format!("{:?}", seen.shape));
        }
        if seen.len != plan.len {
            return differ(what("length"), plan.len.to_string(), seen.len.to_string());
        }
    }
    Ok(())
}

struct Checker<'a> {
    content: Content,
    arrived: &'a dyn Readable,
}

impl Checker<'_> {
    fn range(&self, index: usize, part: &PartPlan, start: u64, end: u64) -> Result<(), Mismatch> {
        let (mut expected, mut found) = ([0; BLOCK], [0; BLOCK]);
        let mut offset = start;
        while offset < end {
            let len = (end - offset).min(BLOCK as u64) as usize;
            let (expected, found) = (&mut expected[..len], &mut found[..len]);
            self.content.fill(part.offset + offset, expected);
            if !self.arrived.read(index, offset, found) {
                return Err(Mismatch::Layout {
                    what: format!("part {index} (\"{}\"): elements of dtype {}", part.name, part.dtype),
                    expected: format!("{len} bytes at offset {offset}"),
                    found: "none".into(),
                });
            }
            if expected != found {
                let at = expected.iter().zip(found.iter()).position(|(e, f)| e != f).unwrap_or(0);
                let (expected, found) = (expected[at], found[at]);
                let offset = offset + at as u64;
                return Err(Mismatch::Byte { part: index, name: part.name.clone(), offset, expected, found });
            }
            offset += len as u64;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Received {
        parts: Vec<PartSeen>,
        bytes: Vec<Vec<u8>>,
    }

    impl Received {
        fn of(layout: &Layout, seed: u64, operation: u64) -> Self {
            let content = Content::new(seed, operation);
            let mut received = Self { parts: vec![], bytes: vec![] };
            for part in layout.parts() {
                let mut bytes = vec![0; part.len as usize];
                content.fill(part.offset, &mut bytes);
                received.bytes.push(bytes);
                received.parts.push(part.seen());
            }
            received
        }
    }

    impl Readable for Received {
        fn parts(&self) -> Vec<PartSeen> {
            self.parts.clone()
        }
        fn read(&self, part: usize, offset: u64, out: &mut [u8]) -> bool {
            copy_of(&self.bytes[part], offset, out)
        }
    }

    #[test]
    fn content_is_the_same_in_whatever_pieces_it_is_made() {
        let content = Content::new(7, 3);
        let mut whole = vec![0; 5000];
        content.fill(0, &mut whole);
        for start in [0, 1, 7, 8, 9, 100, 4093] {
            for len in [0, 1, 3, 8, 15, 16, 17, 800] {
                let mut piece = vec![0; len];
                content.fill(start as u64, &mut piece);
                assert_eq!(piece, whole[start..start + len], "{start} {len}");
            }
        }
    }

    #[test]
    fn content_differs_by_operation_and_by_seed_and_has_no_short_period() {
        let make = |seed, operation| {
            let mut bytes = vec![0; 1 << 16];
            Content::new(seed, operation).fill(0, &mut bytes);
            bytes
        };
        let one = make(1, 0);
        for other in [make(1, 1), make(2, 0), make(0, 1)] {
            let same = one.iter().zip(&other).filter(|(a, b)| a == b).count();
            assert!(same < one.len() / 100, "{same} of {} bytes agree by chance", one.len());
        }
        for shift in [8, 64, 4096, 32768] {
            assert_ne!(one[..4096], one[shift..][..4096]);
        }
    }

    #[test]
    fn what_was_put_passes_and_stale_content_does_not() {
        for layout in [Layout::single(1), Layout::single(100_003), Layout::tree(300_001), Layout::tree(77)] {
            let received = Received::of(&layout, 9, 4);
            for verify in [Verify::None, Verify::Sampled, Verify::Full] {
                assert_eq!(check(&layout, 9, 4, verify, &received), Ok(()));
            }
            assert!(check(&layout, 9, 5, Verify::Sampled, &received).is_err());
            assert!(check(&layout, 9, 5, Verify::Full, &received).is_err());
        }
    }

    #[test]
    fn a_mismatch_names_part_offset_expected_and_found() {
        let layout = Layout::tree(3_000_000);
        let mut received = Received::of(&layout, 1, 0);
        let middle = received.bytes[40].len() / 2;
        let good = received.bytes[40][middle];
        received.bytes[40][middle] ^= 0x80;
        let error = check(&layout, 1, 0, Verify::Full, &received).unwrap_err();
        let Mismatch::Byte { part: 40, ref name, offset, expected, found } = error else { panic!("{error}") };
        assert_eq!((name, offset), (&layout.parts()[40].name, middle as u64));
        assert_eq!((expected, found), (good, good ^ 0x80));
        let text = error.to_string();
        assert!(text.contains("part 40") && text.contains(&format!("offset {middle}")), "{text}");
    }

    #[test]
    fn the_sampled_check_sees_first_and_last_bytes_of_every_part() {
        let layout = Layout::tree(3_000_000);
        for part in [0, 31, 63] {
            for last in [false, true] {
                let mut received = Received::of(&layout, 1, 0);
                let at = if last { received.bytes[part].len() - 1 } else { 0 };
                received.bytes[part][at] ^= 1;
                assert!(check(&layout, 1, 0, Verify::Sampled, &received).is_err(), "part {part} byte {at}");
            }
        }
    }

    #[test]
    fn the_sampled_check_looks_at_other_places_in_each_operation() {
        // A gap that one operation's places miss is seen by another's: 1 MiB of 16 is wrong in the middle.
        let layout = Layout::single(16 << 20);
        let seen = (0..20).filter(|&operation| {
            let mut received = Received::of(&layout, 5, operation);
            received.bytes[0][8 << 20..][..64 << 10].fill(0);
            check(&layout, 5, operation, Verify::Sampled, &received).is_err()
        });
        let seen = seen.count();
        assert!((1..20).contains(&seen), "{seen} of 20 operations hit the gap of 64 KiB");
    }

    #[test]
    fn a_part_with_fewer_bytes_than_its_layout_says_is_told() {
        let layout = Layout::tree(3_000_000);
        let mut received = Received::of(&layout, 1, 0);
        received.bytes[7].pop();
        let text = check(&layout, 1, 0, Verify::Sampled, &received).unwrap_err().to_string();
        assert!(text.starts_with("part 7 ") && text.contains("bytes at offset"), "{text}");
    }

    #[test]
    fn a_wrong_layout_is_told() {
        let layout = Layout::tree(1_000_000);
        let wrong = |change: fn(&mut Vec<PartSeen>)| {
            let mut received = Received::of(&layout, 1, 0);
            change(&mut received.parts);
            check(&layout, 1, 0, Verify::Sampled, &received).unwrap_err().to_string()
        };
        assert!(wrong(|p| drop(p.pop())).starts_with("number of parts: expected 64, found 63"));
        assert!(wrong(|p| p[2].name.push('x')).contains("name"));
        assert!(wrong(|p| p[2].dtype = "i3".into()).contains("dtype"));
        assert!(wrong(|p| p[2].shape[0] += 1).contains("shape"));
        assert!(wrong(|p| p[2].len += 1).contains("length"));
    }
}
