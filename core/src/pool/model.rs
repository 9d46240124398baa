//! The pool against a sorted list.

use super::tests::{GRANULE, pool};
use super::*;
use proptest::prelude::*;
use std::vec::Vec;

#[derive(Debug, Clone, Copy)]
enum Step {
    Allocate { len: u64, align: u64 },
    Scatter { len: u64, align: u64, places: usize },
    Reserve { offset: u64, len: u64 },
    Release(usize),
    ReleaseAgain(usize),
    Shrink(usize, u64),
}

/// Two levels of the tree, and three, neither full.
const SMALL: u64 = 200;
const LARGE: u64 = 9_000;

fn step(granules: u64) -> impl Strategy<Value = Step> {
    let len = prop_oneof![
        1u64..=4 * GRANULE,
        1u64..=70 * GRANULE,
        1u64..=granules * GRANULE / 3,
        1u64..=(granules + 1) * GRANULE,
    ];
    let align = (0u32..13).prop_map(|bits| 1u64 << bits);
    prop_oneof![
        6 => (len.clone(), align.clone()).prop_map(|(len, align)| Step::Allocate { len, align }),
        1 => (len.clone(), align, 0usize..5).prop_map(|(len, align, places)| Step::Scatter { len, align, places }),
        1 => (0..granules, len.clone()).prop_map(|(at, len)| Step::Reserve { offset: at * GRANULE, len }),
        5 => any::<usize>().prop_map(Step::Release),
        1 => any::<usize>().prop_map(Step::ReleaseAgain),
        1 => (any::<usize>(), len).prop_map(|(which, to)| Step::Shrink(which, to)),
    ]
}

/// The live extents, sorted by offset.
#[derive(Debug)]
struct Model {
    granules: u64,
    live: Vec<Extent>,
}

fn end(extent: &Extent) -> u64 {
    extent.offset() + extent.len().next_multiple_of(GRANULE)
}

impl Model {
    fn enter(&mut self, extent: Extent) {
        let at = self.live.partition_point(|other| other.offset() < extent.offset());
        assert!(at == 0 || end(&self.live[at - 1]) <= extent.offset(), "{extent:?} overlaps {:?}", self.live[at - 1]);
        assert!(self.live.get(at).is_none_or(|next| end(&extent) <= next.offset()), "{extent:?} overlaps");
        assert!(end(&extent) <= self.granules * GRANULE);
        self.live.insert(at, extent);
    }

    /// Free runs as (offset, length) in bytes.
    fn runs(&self) -> Vec<(u64, u64)> {
        let starts = core::iter::once(0).chain(self.live.iter().map(end));
        let ends = self.live.iter().map(Extent::offset).chain(core::iter::once(self.granules * GRANULE));
        starts.zip(ends).filter(|(start, end)| start < end).map(|(start, end)| (start, end - start)).collect()
    }

    fn fits(&self, len: u64, align: u64) -> bool {
        let len = len.next_multiple_of(GRANULE);
        self.runs().iter().any(|(start, run)| start.next_multiple_of(align.max(GRANULE)) + len <= start + run)
    }
}

fn run(granules: u64, steps: Vec<Step>) -> Result<(), TestCaseError> {
    let pool = pool(granules);
    let mut model = Model { granules, live: Vec::new() };
    let mut dead: Vec<Extent> = Vec::new();
    let mut most = 0;
    for step in steps {
        match step {
            Step::Allocate { len, align } => match pool.allocate(len, align) {
                Ok(extent) => {
                    prop_assert_eq!((extent.len(), extent.offset() % align), (len, 0));
                    model.enter(extent);
                }
                Err(AllocError::NoSpace { need, free, largest_free_run }) => {
                    prop_assert!(!model.fits(len, align));
                    prop_assert_eq!(need, len.next_multiple_of(GRANULE));
                    prop_assert_eq!(free, model.runs().iter().map(|run| run.1).sum::<u64>());
                    prop_assert_eq!(largest_free_run, model.runs().iter().map(|run| run.1).max().unwrap_or(0));
                }
                Err(refused) => {
                    let too_large = matches!(refused, AllocError::TooLarge { .. });
                    prop_assert!(too_large && len > granules * GRANULE, "{}", refused);
                }
            },
            Step::Scatter { len, align, places } => {
                let mut pieces = [None; 5];
                match pool.allocate_at_most(len, align, &mut pieces[..places]) {
                    Ok(used) => {
                        prop_assert_eq!(used, pieces.iter().flatten().count());
                        prop_assert_eq!(pieces.iter().flatten().map(Extent::len).sum::<u64>(), len);
                        for extent in pieces.into_iter().flatten() {
                            prop_assert_eq!(extent.offset() % align, 0);
                            model.enter(extent);
                        }
                    }
                    Err(_) => {
                        prop_assert_eq!(pieces, [None; 5]);
                        prop_assert!(places == 0 || !model.fits(len, align));
                    }
                }
            }
            Step::Reserve { offset, len } => match pool.reserve(offset, len) {
                Ok(extent) => {
                    prop_assert_eq!((extent.offset(), extent.len()), (offset, len));
                    model.enter(extent);
                }
                Err(ReserveError::Taken { offset: at }) => {
                    prop_assert!((offset..offset + len.next_multiple_of(GRANULE)).contains(&at));
                    prop_assert!(model.live.iter().any(|other| (other.offset()..end(other)).contains(&at)));
                }
                Err(_) => prop_assert!(offset + len > granules * GRANULE),
            },
            Step::Release(which) => {
                if !model.live.is_empty() {
                    let extent = model.live.remove(which % model.live.len());
                    prop_assert_eq!(pool.release(extent), Ok(()));
                    dead.push(extent);
                }
            }
            Step::ReleaseAgain(which) => {
                if !dead.is_empty() {
                    prop_assert!(pool.release(dead[which % dead.len()]).is_err());
                }
            }
            Step::Shrink(which, to) => {
                if !model.live.is_empty() {
                    let at = which % model.live.len();
                    let extent = model.live[at];
                    match pool.shrink(extent, to) {
                        Ok(less) => {
                            prop_assert!(to <= extent.len());
                            prop_assert_eq!((less.offset(), less.len()), (extent.offset(), to));
                            model.live[at] = less;
                            dead.push(extent);
                        }
                        Err(_) => prop_assert!(to > extent.len()),
                    }
                }
            }
        }
        let free: u64 = model.runs().iter().map(|run| run.1).sum();
        prop_assert_eq!(pool.free_granules() * GRANULE, free);
        let largest = model.runs().iter().map(|run| run.1).max().unwrap_or(0);
        prop_assert_eq!(pool.largest_free_run() * GRANULE, largest);
        prop_assert!(pool.live().eq(model.live.iter().copied()));
        // A scattered allocation may have taken more for a moment before it gave up.
        most = most.max(granules - free / GRANULE);
        prop_assert!(pool.high_water_mark() >= most && pool.high_water_mark() <= granules);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(50_000))]

    #[test]
    fn a_small_pool_does_what_a_sorted_list_does(steps in proptest::collection::vec(step(SMALL), 1..80)) {
        run(SMALL, steps)?;
    }

    #[test]
    fn a_large_pool_does_what_a_sorted_list_does(steps in proptest::collection::vec(step(LARGE), 1..80)) {
        run(LARGE, steps)?;
    }
}
