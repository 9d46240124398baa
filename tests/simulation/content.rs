//! The bytes of payloads: a function of seed, payload and place, so that every byte that is not the right one shows.

/// Fills `out` with the bytes of `part` of payload `id` from `offset` on.
pub(crate) fn fill(seed: u64, id: u64, part: usize, offset: u64, out: &mut [u8]) {
    let key = mix(seed ^ mix(id ^ mix((part as u64).wrapping_add(1))));
    let mut at = offset;
    let mut rest = out;
    while !rest.is_empty() {
        let word = mix(key ^ (at / 8)).to_le_bytes();
        let skip = (at % 8) as usize;
        let take = (8 - skip).min(rest.len());
        let (head, tail) = rest.split_at_mut(take);
        head.copy_from_slice(&word[skip..skip + take]);
        rest = tail;
        at += take as u64;
    }
}

/// The bytes of a whole part.
pub(crate) fn part(seed: u64, id: u64, part: usize, len: u64) -> Vec<u8> {
    let mut out = vec![0; len as usize];
    fill(seed, id, part, 0, &mut out);
    out
}

/// Where `seen` first differs from the bytes of `part` of payload `id`.
pub(crate) fn first_difference(seed: u64, id: u64, part: usize, seen: &[u8]) -> Option<usize> {
    let right = self::part(seed, id, part, seen.len() as u64);
    (right != seen).then(|| right.iter().zip(seen).position(|(a, b)| a != b)).flatten()
}

fn mix(z: u64) -> u64 {
    let z = z.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[test]
fn content_depends_on_everything_and_on_no_alignment() {
    let whole = part(1, 2, 3, 100);
    for (offset, len) in [(0, 100), (1, 7), (8, 8), (13, 50), (99, 1)] {
        let mut piece = vec![0; len];
        fill(1, 2, 3, offset as u64, &mut piece);
        assert_eq!(piece, whole[offset..offset + len]);
    }
    for other in [part(9, 2, 3, 100), part(1, 9, 3, 100), part(1, 2, 9, 100)] {
        let same = whole.iter().zip(&other).filter(|(a, b)| a == b).count();
        assert!(same < 10);
    }
    assert_eq!(first_difference(1, 2, 3, &whole), None);
    let mut bent = whole;
    bent[77] ^= 1;
    assert_eq!(first_difference(1, 2, 3, &bent), Some(77));
}
