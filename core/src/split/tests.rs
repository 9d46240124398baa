use super::*;
use proptest::prelude::*;
use std::vec::Vec;

fn segment(region: u32, offset: u64, len: u64) -> Segment {
    Segment { region, offset, len }
}

fn split(remote: &[Segment], local: &[Segment], limits: Limits) -> Vec<Chunk> {
    Split::new(remote, local, limits).unwrap().collect()
}

#[test]
fn lists_of_different_lengths_are_refused() {
    let (a, b) = (segment(0, 0, 10), segment(0, 0, 11));
    let limits = Limits::new(4).unwrap();
    assert_eq!(Split::new(&a, &b, limits).unwrap_err(), SplitError::Lengths { remote: 10, local: 11 });
    let long = [segment(0, u64::MAX - 5, 10)];
    assert_eq!(Split::new(&long[..], &a, limits).unwrap_err(), SplitError::TooLong { index: 0 });
    let sum = [segment(0, 0, u64::MAX), segment(1, 0, 1)];
    assert_eq!(Split::new(&sum[..], &a, limits).unwrap_err(), SplitError::TooLong { index: 1 });
    assert_eq!(Limits::new(0), Err(SplitError::ZeroLimit));
    for align in [0, 3, 8] {
        assert_eq!(limits.aligned(align), Err(SplitError::Alignment { align, max: 4 }));
    }
}

#[test]
fn segments_that_touch_are_one_run() {
    let remote: Vec<_> = (0..64).map(|n| segment(3, 4096 * n, 4096)).collect();
    let local = [segment(0, 0, 64 * 4096)];
    let chunks = split(&remote, &local, Limits::new(1 << 20).unwrap());
    assert_eq!(chunks.len(), 1);
    assert_eq!(chunks[0].len, 64 * 4096);
    let chunks = split(&remote, &local, Limits::new(10_000).unwrap());
    assert_eq!(chunks.len(), (64 * 4096_usize).div_ceil(10_000));
    assert_eq!(chunks[1].remote, Place { index: 2, offset: 10_000 - 8192 });
    // Same places in another region do not touch.
    let apart = [segment(0, 0, 4096), segment(1, 4096, 4096)];
    assert_eq!(split(&apart, &[segment(0, 0, 8192)], Limits::new(1 << 20).unwrap()).len(), 2);
}

/// At most 15 ns for a descriptor, of 100,000 that nothing joins, and of 100,000 that touch: the fastest of many runs, so that
/// what else the machine does makes no difference.
#[test]
fn a_descriptor_is_split_in_few_nanoseconds() {
    const COUNT: u64 = 100_000;
    let apart: Vec<_> = (0..COUNT).map(|n| segment((n % 7) as u32, n * 9000, 1000 + n % 4000)).collect();
    let touching: Vec<_> = (0..COUNT).map(|n| segment(3, n * 4096, 4096)).collect();
    let total = |list: &[Segment]| list.iter().map(|segment| segment.len).sum::<u64>();
    let limits = Limits::new(1 << 20).unwrap();
    for list in [&apart, &touching] {
        let local = [segment(0, 0, total(list))];
        let fastest = (0..50)
            .map(|_| {
                let start = std::time::Instant::now();
                let bytes: u64 = Split::new(&list[..], &local[..], limits).unwrap().map(|chunk| chunk.len).sum();
                let elapsed = start.elapsed();
                assert_eq!(bytes, local[0].len);
                elapsed.as_nanos() as f64 / COUNT as f64
            })
            .fold(f64::MAX, f64::min);
        assert!(fastest <= 15.0, "{fastest:.1} ns a descriptor");
    }
}

#[test]
fn empty_lists_and_empty_segments_give_no_chunk() {
    let limits = Limits::new(100).unwrap();
    assert!(split(&[], &[], limits).is_empty());
    assert!(split(&[segment(0, 5, 0)], &[], limits).is_empty());
    let chunks = split(&[segment(0, 0, 0), segment(0, 9, 3), segment(1, 7, 0)], &[segment(0, 0, 3)], limits);
    assert_eq!(chunks, [Chunk { remote: Place { index: 1, offset: 0 }, local: Place { index: 0, offset: 0 }, len: 3 }]);
}

#[test]
fn aligned_chunks_end_at_aligned_remote_offsets() {
    let chunks =
        split(&[segment(0, 1000, 20_000)], &[segment(0, 0, 20_000)], Limits::new(6000).unwrap().aligned(4096).unwrap());
    assert_eq!(chunks.iter().map(|chunk| chunk.len).collect::<Vec<_>>(), [3096, 4096, 4096, 4096, 4616]);
}

#[test]
fn strided_blocks_are_segments() {
    let rows = Strided::new(1, 100, 10, 64, 5).unwrap();
    let chunks: Vec<_> = Split::new(&rows, &segment(0, 0, 50), Limits::new(8).unwrap()).unwrap().collect();
    assert_eq!(chunks.len(), 10);
    assert_eq!(chunks[3].remote, Place { index: 1, offset: 8 });
    let dense = Strided::new(1, 100, 10, 10, 5).unwrap();
    assert_eq!(Split::new(&dense, &segment(0, 0, 50), Limits::new(64).unwrap()).unwrap().count(), 1);
    assert_eq!(Strided::new(0, 0, 10, 9, 2), Err(StridedError::Overlap { len: 10, stride: 9 }));
    assert!(Strided::new(0, 0, 10, 9, 1).is_ok());
    let (offset, stride, count) = (1, u64::MAX / 2, 3);
    assert_eq!(Strided::new(0, offset, 1, stride, count), Err(StridedError::TooLong { offset, stride, count }));
}

#[test]
fn a_rail_that_is_down_gets_nothing_and_one_that_comes_up_does_not_catch_up() {
    let mut set = [Rail::new(1), Rail::new(1), Rail::new(0)];
    let mut rails = Rails::new(&mut set);
    let first: Vec<_> = (0..100).map(|_| rails.pick(1000).unwrap()).collect();
    assert_eq!([0, 1, 2].map(|rail| first.iter().filter(|&&pick| pick == rail).count()), [50, 50, 0]);
    rails.set_weight(2, 1);
    let then: Vec<_> = (0..30).map(|_| rails.pick(1000).unwrap()).collect();
    assert_eq!([0, 1, 2].map(|rail| then.iter().filter(|&&pick| pick == rail).count()), [10, 10, 10]);
    for rail in 0..4 {
        rails.set_weight(rail, 0);
    }
    assert_eq!(rails.pick(1), None);
    assert_eq!(Rails::new(&mut []).pick(1), None);
}

/// A list of segments of this total length, with gaps and without.
fn list(len: u64) -> impl Strategy<Value = Vec<Segment>> {
    proptest::collection::vec((0u32..2, 0u64..3, 0u64..40), 0..20).prop_map(move |parts| {
        let (mut at, mut left) = ([7u64; 2], len);
        let mut list = Vec::new();
        for (region, gap, part) in parts.into_iter().chain([(0, 1, u64::MAX)]) {
            let part = part.min(left);
            let start = at[region as usize] + gap / 2 * 5;
            list.push(segment(region, start, part));
            at[region as usize] = start + part;
            left -= part;
        }
        list
    })
}

/// The address of every byte of a list, in order.
fn bytes(list: &[Segment]) -> Vec<(u32, u64)> {
    list.iter().flat_map(|s| (s.offset..s.offset + s.len).map(|byte| (s.region, byte))).collect()
}

/// The address of every byte of a chunk on one side, without a look at how the list goes on.
fn chunk_bytes(list: &[Segment], place: Place, len: u64) -> impl Iterator<Item = (u32, u64)> {
    let Segment { region, offset, len: whole } = list[place.index];
    assert!(place.offset < whole, "a place outside of its segment");
    (0..len).map(move |n| (region, offset + place.offset + n))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_000))]

    #[test]
    fn chunks_cover_every_byte_once_and_in_order(
        (remote, local) in (0u64..400).prop_flat_map(|len| (list(len), list(len))),
        max in 1u64..100,
        align_bits in 0u32..7,
    ) {
        let limits = Limits::new(max).unwrap();
        let aligned = limits.aligned(1 << align_bits).unwrap_or(limits);
        let align = if (1 << align_bits) <= max { 1u64 << align_bits } else { 1 };
        let chunks = split(&remote, &local, aligned);
        let covered: Vec<_> = chunks.iter().flat_map(|c| {
            chunk_bytes(&remote, c.remote, c.len).zip(chunk_bytes(&local, c.local, c.len)).collect::<Vec<_>>()
        }).collect();
        let want: Vec<_> = bytes(&remote).into_iter().zip(bytes(&local)).collect();
        prop_assert_eq!(&covered, &want);
        let mut at = 0;
        for (n, chunk) in chunks.iter().enumerate() {
            prop_assert!(chunk.len > 0 && chunk.len <= max);
            at += chunk.len as usize;
            // A chunk ends before the limit only where a run ends, or at an aligned place.
            if n + 1 < chunks.len() && chunk.len < max {
                let (before, after) = (want[at - 1], want[at]);
                let joined = |a: (u32, u64), b: (u32, u64)| a.0 == b.0 && a.1 + 1 == b.1;
                let goes_on = joined(before.0, after.0) && joined(before.1, after.1);
                prop_assert!(!goes_on || after.0.1 % align == 0, "chunk {} of {:?}", n, chunks);
            }
        }
    }

    #[test]
    fn requests_are_the_chunks_and_each_is_one_remote_run(
        (remote, local) in (0u64..400).prop_flat_map(|len| (list(len), list(len))),
        max in 1u64..100,
        max_pieces in 0usize..5,
    ) {
        let split = Split::new(&remote[..], &local[..], Limits::new(max).unwrap()).unwrap();
        let requests: Vec<_> = Gather::new(split.clone(), max_pieces).collect();
        let pieces: Vec<_> = requests.iter().flat_map(|request| request.pieces().collect::<Vec<_>>()).collect();
        prop_assert_eq!(pieces, split.collect::<Vec<_>>());
        for request in &requests {
            let pieces: Vec<_> = request.pieces().collect();
            prop_assert!(pieces.len() <= max_pieces.max(1) && request.len <= max);
            prop_assert_eq!(pieces[0].remote, request.remote);
            prop_assert_eq!(pieces.iter().map(|piece| piece.len).sum::<u64>(), request.len);
            let whole: Vec<_> = pieces.iter().flat_map(|piece| chunk_bytes(&remote, piece.remote, piece.len)).collect();
            prop_assert!(whole.windows(2).all(|pair| pair[0].0 == pair[1].0 && pair[0].1 + 1 == pair[1].1));
        }
    }

    #[test]
    fn rails_are_never_further_from_their_share_than_a_chunk(
        weights in proptest::collection::vec(1u32..1000, 1..6),
        chunks in proptest::collection::vec(1u64..100_000, 1..300),
    ) {
        let mut set: Vec<_> = weights.iter().map(|&weight| Rail::new(weight)).collect();
        let mut rails = Rails::new(&mut set);
        let mut given = std::vec![0u64; weights.len()];
        let largest = *chunks.iter().max().unwrap();
        for &len in &chunks {
            given[rails.pick(len).unwrap()] += len;
        }
        // When all but one would be done, that one has at most one chunk's time left to go.
        for (a, &done) in given.iter().enumerate() {
            for (b, &other) in given.iter().enumerate() {
                let (a, b) = (done as f64 / f64::from(weights[a]), (other + largest) as f64 / f64::from(weights[b]));
                prop_assert!(a <= b + 1e-6);
            }
        }
    }
}
