//! Keeping several operations in flight.

use crate::command::Failure;
use std::sync::atomic::{AtomicBool, Ordering};

/// Runs `work` on every item, on `lanes` threads: lane `j` takes items `j`, `j + lanes` and so on, in order. With one
/// lane there is no other thread. The results are in the items' order; after a failure no further item is begun.
pub(crate) fn run<I: Send, T: Send>(
    lanes: u32,
    items: impl IntoIterator<Item = I>,
    work: impl Fn(usize, I) -> Result<T, Failure> + Sync,
) -> Result<Vec<T>, Failure> {
    let items = items.into_iter().enumerate();
    if lanes <= 1 {
        return items.map(|(index, item)| work(index, item)).collect();
    }
    let mut of_lane: Vec<Vec<(usize, I)>> = (0..lanes).map(|_| vec![]).collect();
    for (index, item) in items {
        of_lane[index % lanes as usize].push((index, item));
    }
    let failed = AtomicBool::new(false);
    let lane = |items: Vec<(usize, I)>| -> Result<Vec<(usize, T)>, Failure> {
        let mut results = Vec::with_capacity(items.len());
        for (index, item) in items {
            if failed.load(Ordering::Relaxed) {
                break;
            }
            let result = work(index, item).inspect_err(|_| failed.store(true, Ordering::Relaxed))?;
            results.push((index, result));
        }
        Ok(results)
    };
    let mut results = std::thread::scope(|scope| {
        let lane = &lane;
        let running: Vec<_> = of_lane.into_iter().map(|items| scope.spawn(move || lane(items))).collect();
        let mut results = vec![];
        let mut failure = None;
        for thread in running {
            match thread.join() {
                Ok(Ok(of_lane)) => results.extend(of_lane),
                Ok(Err(e)) => failure = failure.or(Some(e)),
                Err(_) => failure = failure.or(Some(Failure::Failed("a thread of the bench panicked".into()))),
            }
        }
        failure.map_or(Ok(results), Err)
    })?;
    results.sort_by_key(|(index, _)| *index);
    Ok(results.into_iter().map(|(_, result)| result).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;

    #[test]
    fn results_are_in_order_and_lanes_run_at_once() {
        let barrier = Barrier::new(4);
        let results = run(4, 0..12u32, |index, item| {
            barrier.wait(); // returns only when four are in flight
            Ok((index, item * 2))
        });
        assert_eq!(results.unwrap(), (0..12).map(|i| (i as usize, i * 2)).collect::<Vec<_>>());
        assert_eq!(run(1, 0..3u32, |_, item| Ok(item)).unwrap(), [0, 1, 2]);
        assert_eq!(run(8, 0..3u32, |_, item| Ok(item)).unwrap(), [0, 1, 2]);
    }

    #[test]
    fn a_failure_is_told_and_stops_the_lanes() {
        for lanes in [1, 3] {
            let failure =
                run(lanes, 0..100u32, |_, item| if item == 5 { Err(Failure::Failed("five".into())) } else { Ok(item) });
            assert_eq!(failure, Err(Failure::Failed("five".into())));
        }
    }
}
