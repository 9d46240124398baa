use super::*;
use crate::Word;
use proptest::prelude::*;
use std::fmt::Write as _;
use std::string::String;
use std::sync::atomic::{AtomicU32, Ordering};
use std::vec::Vec;

pub(super) fn table(capacity: usize) -> TransferTable<Vec<Word>> {
    TransferTable::new((0..storage_words(capacity)).map(|_| Word::default()).collect())
}

#[test]
fn the_documented_table_is_the_table() {
    let mut text = String::from(
        "| from | event | with work outstanding after it | with none |\n|------|-------|--------------------------------|-----------|\n",
    );
    let show = |target: Option<Target>| match target {
        None => String::from("refused"),
        Some(Target::To(phase)) => std::format!("{phase:?}"),
        Some(Target::Decided) => String::from("the decided end"),
    };
    for row in TRANSITIONS {
        let (some, none) = (show(row.some_left), show(row.none_left));
        writeln!(text, "| {:?} | {:?} | {some} | {none} |", row.from, row.event).unwrap();
    }
    assert!(include_str!("transitions.md") == text, "transitions.md should be:\n{text}");
}

#[test]
fn the_table_names_each_pair_once() {
    for (n, row) in TRANSITIONS.iter().enumerate() {
        assert!(TRANSITIONS[..n].iter().all(|other| (other.from, other.event) != (row.from, row.event)), "{row:?}");
    }
    let rows =
        TRANSITIONS.iter().map(|row| usize::from(row.some_left.is_some()) + usize::from(row.none_left.is_some()));
    let mut legal = 0;
    for phase in Phase::ALL {
        for event in Event::ALL {
            legal += usize::from(next(phase, event, true).is_some()) + usize::from(next(phase, event, false).is_some());
        }
    }
    assert_eq!(legal, rows.sum::<usize>());
}

#[test]
fn success_needs_finish_and_the_last_completion_in_either_order() {
    let table = table(1);
    let id = table.create().unwrap();
    table.post(id, 1).unwrap();
    assert_eq!(table.complete(id, Ok(())), Ok(Progress::Pending { left: 0 }));
    table.post(id, 1).unwrap();
    assert_eq!(table.complete(id, Ok(())), Ok(Progress::Pending { left: 0 }));
    assert_eq!(table.finish(id), Ok(Progress::Fenced(Outcome::Succeeded)));
    assert_eq!(table.release(id), Ok(Outcome::Succeeded));

    let id = table.create().unwrap();
    table.post(id, 1).unwrap();
    assert_eq!(table.finish(id), Ok(Progress::Pending { left: 1 }));
    let finishing = Refused::NotNow { id, phase: Phase::Finishing, outstanding: 1 };
    assert_eq!(table.post(id, 1), Err(finishing));
    assert_eq!(table.finish(id), Err(finishing));
    assert_eq!(table.complete(id, Ok(())), Ok(Progress::Fenced(Outcome::Succeeded)));
}

#[test]
fn the_first_failure_decides() {
    let table = table(1);
    let id = table.create().unwrap();
    table.post(id, 3).unwrap();
    table.complete(id, Err(Cause(7))).unwrap();
    assert_eq!(table.state(id).unwrap().outcome(), Some(Outcome::Failed(Cause(7))));
    assert_eq!(table.abandon(id, Reason::TimedOut), Err(Refused::NotNow { id, phase: Phase::Fencing, outstanding: 2 }));
    assert_eq!(table.complete(id, Err(Cause(8))), Ok(Progress::Pending { left: 1 }));
    assert_eq!(table.complete(id, Ok(())), Ok(Progress::Fenced(Outcome::Failed(Cause(7)))));
}

#[test]
fn an_abandoned_transfer_with_nothing_outstanding_has_ended() {
    let table = table(1);
    for (reason, outcome) in [
        (Reason::Cancelled, Outcome::Cancelled),
        (Reason::TimedOut, Outcome::TimedOut),
        (Reason::Failed(Cause(255)), Outcome::Failed(Cause(255))),
    ] {
        let id = table.create().unwrap();
        assert_eq!(table.abandon(id, reason), Ok(Progress::Fenced(outcome)));
        assert_eq!(table.abandon(id, reason), Err(Refused::Ended { id, outcome }));
        assert_eq!(table.release(id), Ok(outcome));
    }
}

#[test]
fn a_fence_by_other_means_ends_what_is_fencing_and_refuses_what_comes_late() {
    let table = table(1);
    let id = table.create().unwrap();
    table.post(id, 5).unwrap();
    assert!(matches!(table.fence(id), Err(Refused::NotNow { phase: Phase::Posted, .. })));
    table.abandon(id, Reason::Cancelled).unwrap();
    table.quarantine(id).unwrap();
    assert!(matches!(table.release(id), Err(Refused::NotNow { phase: Phase::Quarantined, outstanding: 5, .. })));
    assert_eq!(table.fence(id), Ok(Progress::Fenced(Outcome::Cancelled)));
    let late = Refused::Ended { id, outcome: Outcome::Cancelled };
    assert_eq!(table.complete(id, Ok(())), Err(late));
    assert_eq!(table.quarantine(id), Err(late));
}

#[test]
fn ids_of_released_transfers_are_stale_and_of_no_slot_unknown() {
    let (table, larger) = (table(1), table(2));
    let id = table.create().unwrap();
    assert_eq!(table.create(), Err(TableFull { capacity: 1 }));
    table.finish(id).unwrap();
    table.release(id).unwrap();
    assert_eq!(table.release(id), Err(Refused::Stale { id }));
    assert_eq!(table.resolve(id.immediate()), None);
    let again = table.create().unwrap();
    assert_eq!((again.slot(), again.generation()), (id.slot(), id.generation() + 1));
    assert_eq!(table.state(id), Err(Refused::Stale { id }));
    assert_eq!(table.resolve(id.immediate()), None);
    assert_eq!(table.resolve(again.immediate()), Some(again));

    larger.create().unwrap();
    let other = larger.create().unwrap();
    assert_eq!(table.state(other), Err(Refused::Unknown { id: other }));
}

#[test]
fn the_count_of_outstanding_work_has_a_limit() {
    let table = table(1);
    let id = table.create().unwrap();
    table.post(id, MAX_CHUNK).unwrap();
    assert_eq!(table.post(id, 1), Err(Refused::TooMany { id, outstanding: MAX_CHUNK, more: 1 }));
    assert_eq!(table.post(id, u32::MAX), Err(Refused::TooMany { id, outstanding: MAX_CHUNK, more: u32::MAX }));
    assert_eq!(table.post(id, 0), Ok(()));
    assert_eq!(table.state(id).unwrap().outstanding, MAX_CHUNK);
}

#[test]
fn a_table_without_storage_is_full() {
    assert_eq!(TransferTable::new(Vec::new()).create(), Err(TableFull { capacity: 0 }));
    assert_eq!(table(3).capacity(), 3);
    assert_eq!(table(MAX_TRANSFERS + 10).capacity(), MAX_TRANSFERS);
}

proptest! {
    #[test]
    fn work_request_ids_and_immediates_carry_what_they_say(slot in 0u32..1 << 16, generation in 0u32..1 << 26, chunk: u32) {
        let id = TransferId::new(slot, generation);
        prop_assert_eq!((id.slot(), id.generation()), (slot, generation));
        let request = id.work_request(chunk);
        prop_assert_eq!(request.is_some(), chunk <= MAX_CHUNK);
        if let Some(request) = request {
            let back = WorkRequestId::from_u64(request.to_u64());
            prop_assert_eq!((back.transfer(), back.chunk()), (id, chunk));
        }
        let immediate = Immediate::from_u32(id.immediate().to_u32());
        prop_assert_eq!(immediate.slot(), slot);
        prop_assert!(immediate.names(generation) && !immediate.names(generation ^ 1));
    }
}

#[test]
fn the_fast_path_takes_few_read_modify_writes() {
    let table = table(1);
    let one_post = crate::sync::stop::count_read_modify_writes(|| {
        let id = table.create().unwrap();
        table.post(id, 8).unwrap();
        table.finish(id).unwrap();
        (0..8).for_each(|_| assert!(table.complete(id, Ok(())).is_ok()));
        table.release(id).unwrap();
    });
    let eight_posts = crate::sync::stop::count_read_modify_writes(|| {
        let id = table.create().unwrap();
        (0..8).for_each(|_| table.post(id, 1).unwrap());
        table.finish(id).unwrap();
        (0..8).for_each(|_| assert!(table.complete(id, Ok(())).is_ok()));
        table.release(id).unwrap();
    });
    assert_eq!((one_post, eight_posts), (13, 20));
}

/// A look-up is two loads that depend on each other: the storage's address, and the slot's word. The second is the only atomic
/// step of it.
#[test]
fn a_slot_is_looked_up_with_one_atomic_load() {
    let table = table(1000);
    let ids: std::vec::Vec<_> = (0..1000).map(|_| table.create().unwrap()).collect();
    for id in ids {
        let state = crate::sync::stop::within(1, || table.state(id));
        assert_eq!(state.map(|state| state.phase), Ok(Phase::Created));
    }
}

/// I2: whatever the threads do to one transfer, one of them is told that it ended, and one releases it.
#[test]
fn many_threads_end_a_transfer_exactly_once() {
    let table = table(4);
    for round in 0..500u32 {
        let id = table.create().unwrap();
        table.post(id, 4).unwrap();
        let (fenced, released) = (AtomicU32::new(0), AtomicU32::new(0));
        let tell = |progress: Result<Progress, Refused>| {
            if let Ok(Progress::Fenced(_)) = progress {
                fenced.fetch_add(1, Ordering::Relaxed);
            }
        };
        std::thread::scope(|scope| {
            for thread in 0..4u32 {
                let (table, tell, released) = (&table, &tell, &released);
                scope.spawn(move || {
                    tell(table.complete(id, if (round + thread) % 3 == 0 { Err(Cause(thread as u8)) } else { Ok(()) }));
                    match thread {
                        0 => tell(table.finish(id)),
                        1 => tell(table.abandon(id, Reason::TimedOut)),
                        2 => drop(table.quarantine(id)),
                        _ => drop(table.state(id)),
                    }
                    while !matches!(table.state(id), Err(Refused::Stale { .. })) {
                        if table.release(id).is_ok() {
                            released.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        assert_eq!((fenced.into_inner(), released.into_inner()), (1, 1), "round {round}");
    }
    assert_eq!((0..4).map(|_| table.create().unwrap().slot()).collect::<std::collections::BTreeSet<_>>().len(), 4);
}
