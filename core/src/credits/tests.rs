use super::*;
use crate::Word;
use proptest::prelude::*;
use std::collections::VecDeque;
use std::vec::Vec;

fn queue(depth: usize, interval: u32) -> SendQueue<Vec<Word>> {
    SendQueue::new((0..depth).map(|_| Word::default()).collect(), interval)
}

#[test]
fn a_budget_gives_out_what_it_has() {
    let budget = CompletionBudget::new(10);
    budget.attach(4).unwrap();
    budget.attach(6).unwrap();
    assert_eq!(budget.attach(1), Err(BudgetExceeded { need: 1, free: 0 }));
    budget.detach(4).unwrap();
    assert_eq!(budget.attach(u32::MAX), Err(BudgetExceeded { need: u32::MAX, free: 4 }));
    assert_eq!(budget.detach(7), Err(BudgetExceeded { need: 7, free: 6 }));
    assert_eq!((budget.free(), budget.capacity()), (4, 10));
}

#[test]
fn a_full_send_queue_can_always_drain() {
    let mut queue = queue(3, 100);
    let signals: Vec<_> = (0..3).map(|id| queue.post(id, false).unwrap()).collect();
    assert_eq!(signals[2], Signal::Signalled);
    assert_eq!(queue.post(3, true), Err(QueueFull { depth: 3 }));
    assert_eq!(queue.complete(9, |_| unreachable!()), Err(UnknownRequest { id: 9, outstanding: 3 }));
    assert_eq!(queue.complete(2, |_| ()), Ok(3));
    assert_eq!(queue.complete(2, |_| ()), Err(UnknownRequest { id: 2, outstanding: 0 }));
    assert_eq!(self::queue(0, 1).post(0, true), Err(QueueFull { depth: 0 }));
}

#[test]
fn a_withdrawn_request_gives_its_place_back_and_its_signal_on() {
    let mut queue = queue(8, 4);
    for id in 0..3 {
        assert_eq!(queue.post(id, false), Ok(Signal::Unsignalled));
    }
    assert_eq!(queue.post(3, false), Ok(Signal::Signalled));
    queue.withdraw();
    assert_eq!((queue.outstanding(), queue.needs_flush()), (3, true));
    assert_eq!(queue.post(4, false), Ok(Signal::Signalled));
    let mut done = Vec::new();
    queue.complete(4, |id| done.push(id)).unwrap();
    assert_eq!(done, [0, 1, 2, 4]);
    queue.withdraw();
    assert_eq!(queue.free(), 8);
}

#[test]
fn receive_credits_survive_grants_that_come_twice_late_or_wrapped() {
    let credits = ReceiveCredits::new();
    assert_eq!(credits.take(), Err(NoCredit { granted: 0 }));
    assert_eq!((credits.grant(5), credits.grant(5), credits.grant(3)), (5, 0, 0));
    for _ in 0..5 {
        credits.take().unwrap();
    }
    assert_eq!(credits.take(), Err(NoCredit { granted: 5 }));

    let mut total = 5u32;
    for _ in 0..6 {
        // Through the wrap of the totals.
        total = total.wrapping_add(u32::MAX / 4);
        assert_eq!(credits.grant(total), u32::MAX / 4);
        assert_eq!(credits.available(), u32::MAX / 4);
        let (mut left, step) = (credits.available(), 1 << 20);
        while left > 0 {
            // As if taken one by one.
            let n = left.min(step);
            credits.take_for_test(n);
            left -= n;
        }
    }
}

#[test]
fn threads_take_each_credit_once() {
    let credits = ReceiveCredits::new();
    let taken: usize = std::thread::scope(|scope| {
        let takers: Vec<_> =
            (0..4).map(|_| scope.spawn(|| (0..1000).filter(|_| credits.take().is_ok()).count())).collect();
        for total in 1..=1500 {
            credits.grant(total);
        }
        takers.into_iter().map(|taker| taker.join().unwrap()).sum()
    });
    assert_eq!(taken + credits.available() as usize, 1500);
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Post {
        flush: bool,
    },
    Withdraw,
    /// The oldest completion that is to come is polled.
    Poll,
    /// The queue pair goes to the error state: all that is outstanding completes.
    Flush,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_000))]

    /// Against a queue that completes signalled requests, and every request once it is in the error state.
    #[test]
    fn a_send_queue_neither_overflows_nor_leaks_places(
        depth in 1usize..20,
        interval in 0u32..24,
        steps in proptest::collection::vec(prop_oneof![
            6 => any::<bool>().prop_map(|flush| Step::Post { flush }),
            1 => Just(Step::Withdraw),
            4 => Just(Step::Poll),
            1 => Just(Step::Flush),
        ], 1..120),
    ) {
        let mut queue = queue(depth, interval);
        // What the device holds: posted requests, and completions that were not polled.
        let (mut posted, mut completions) = (VecDeque::new(), VecDeque::new());
        let mut open = VecDeque::new();
        let mut id = 0u64;
        for step in steps {
            match step {
                Step::Post { flush } => {
                    id += 1;
                    match queue.post(id, flush) {
                        Ok(signal) => {
                            posted.push_back((id, signal));
                            open.push_back(id);
                            prop_assert!(!flush || signal == Signal::Signalled);
                        }
                        Err(full) => {
                            prop_assert_eq!((full.depth, open.len()), (depth, depth));
                            // It can drain: a completion is there or will come.
                            prop_assert!(!completions.is_empty() || posted.iter().any(|p| p.1 == Signal::Signalled));
                        }
                    }
                }
                Step::Withdraw => {
                    if posted.pop_back().is_some() {
                        queue.withdraw();
                        open.pop_back();
                    }
                }
                Step::Poll => {
                    while completions.is_empty() {
                        let Some((id, signal)) = posted.pop_front() else { break };
                        if signal == Signal::Signalled {
                            completions.push_back(id);
                        }
                    }
                    if let Some(id) = completions.pop_front() {
                        let mut done = VecDeque::new();
                        queue.complete(id, |id| done.push_back(id)).unwrap();
                        while open.front().is_some_and(|&front| front <= id) {
                            prop_assert_eq!(done.pop_front(), open.pop_front());
                        }
                        prop_assert!(done.is_empty());
                    }
                }
                Step::Flush => completions.extend(posted.drain(..).map(|(id, _)| id)),
            }
            // What the device holds fits, in the send queue and in a completion queue of that depth.
            prop_assert!(posted.len() + completions.len() <= depth);
            prop_assert_eq!(queue.outstanding(), open.len());
        }
    }
}
