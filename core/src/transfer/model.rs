//! The state machine against a plain model of it.

use super::tests::table;
use super::*;
use proptest::prelude::*;
use std::vec::Vec;

#[derive(Debug, Clone, Copy)]
enum Step {
    Create,
    Post(u32),
    Finish,
    Complete(Option<u8>),
    Abandon(Reason),
    Quarantine,
    Fence,
    Release,
}

fn step() -> impl Strategy<Value = Step> {
    let reason = prop_oneof![
        Just(Reason::TimedOut),
        Just(Reason::Cancelled),
        any::<u8>().prop_map(|c| Reason::Failed(Cause(c)))
    ];
    prop_oneof![
        2 => Just(Step::Create),
        3 => (1u32..4).prop_map(Step::Post),
        1 => Just(Step::Finish),
        6 => prop_oneof![4 => Just(None), 1 => any::<u8>().prop_map(Some)].prop_map(Step::Complete),
        1 => reason.prop_map(Step::Abandon),
        1 => Just(Step::Quarantine),
        1 => Just(Step::Fence),
        2 => Just(Step::Release),
    ]
}

/// What the documentation says in words, as plainly as it can be written.
#[derive(Debug, Clone, Copy, Default)]
struct Model {
    released: bool,
    left: u32,
    posted_any: bool,
    finished: bool,
    outcome: Option<Outcome>,
    quarantined: bool,
}

impl Model {
    fn ended(self) -> bool {
        match self.outcome {
            Some(_) => self.left == 0,
            None => false,
        }
    }

    fn phase(self) -> Phase {
        match self.outcome {
            _ if self.released => Phase::Free,
            Some(_) if self.left > 0 && self.quarantined => Phase::Quarantined,
            Some(_) if self.left > 0 => Phase::Fencing,
            Some(Outcome::Succeeded) => Phase::Succeeded,
            Some(Outcome::Failed(_)) => Phase::Failed,
            Some(Outcome::TimedOut) => Phase::TimedOut,
            Some(Outcome::Cancelled) => Phase::Cancelled,
            None if self.finished => Phase::Finishing,
            None if self.posted_any => Phase::Posted,
            None => Phase::Created,
        }
    }

    /// Whether the step is legal; if so, it is done.
    fn apply(&mut self, step: Step) -> bool {
        let legal = !self.released
            && match step {
                Step::Create => false,
                Step::Post(_) | Step::Finish => self.outcome.is_none() && !self.finished,
                Step::Complete(_) => self.left > 0,
                Step::Abandon(_) => self.outcome.is_none(),
                Step::Quarantine => self.outcome.is_some() && self.left > 0 && !self.quarantined,
                Step::Fence => self.outcome.is_some() && self.left > 0,
                Step::Release => self.ended(),
            };
        if legal {
            match step {
                Step::Create => {}
                Step::Post(n) => (self.left, self.posted_any) = (self.left + n, true),
                Step::Finish => self.finished = true,
                Step::Complete(failure) => {
                    self.left -= 1;
                    self.outcome = self.outcome.or(failure.map(|cause| Outcome::Failed(Cause(cause))));
                }
                Step::Abandon(Reason::TimedOut) => self.outcome = Some(Outcome::TimedOut),
                Step::Abandon(Reason::Cancelled) => self.outcome = Some(Outcome::Cancelled),
                Step::Abandon(Reason::Failed(cause)) => self.outcome = Some(Outcome::Failed(cause)),
                Step::Quarantine => self.quarantined = true,
                Step::Fence => self.left = 0,
                Step::Release => self.released = true,
            }
            if self.finished && self.left == 0 && self.outcome.is_none() {
                self.outcome = Some(Outcome::Succeeded);
            }
        }
        legal
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100_000))]

    #[test]
    fn the_state_machine_does_what_its_model_does(steps in proptest::collection::vec((0usize..6, step()), 1..60)) {
        let table = table(3);
        let mut all: Vec<(TransferId, Model)> = Vec::new();
        for (which, step) in steps {
            if let Step::Create = step {
                let live = all.iter().filter(|(_, model)| !model.released).count();
                match table.create() {
                    Ok(id) => {
                        prop_assert!(live < 3);
                        all.push((id, Model::default()));
                    }
                    Err(full) => prop_assert_eq!((live, full), (3, TableFull { capacity: 3 })),
                }
                continue;
            }
            // The newest ones, those with a stale id among them.
            let Some(index) = all.len().checked_sub(1 + which) else { continue };
            let (id, model) = &mut all[index];
            let before = *model;
            let legal = model.apply(step);
            let told = match step {
                Step::Create => continue,
                Step::Post(n) => table.post(*id, n).map(|()| None),
                Step::Finish => table.finish(*id).map(Some),
                Step::Complete(failure) => table.complete(*id, failure.map_or(Ok(()), |c| Err(Cause(c)))).map(Some),
                Step::Abandon(reason) => table.abandon(*id, reason).map(Some),
                Step::Quarantine => table.quarantine(*id).map(Some),
                Step::Fence => table.fence(*id).map(Some),
                Step::Release => table.release(*id).map(|outcome| {
                    assert_eq!(Some(outcome), before.outcome);
                    None
                }),
            };
            prop_assert_eq!(told.is_ok(), legal, "{:?} on {:?}: {:?}", step, before, told);
            match told {
                Ok(Some(Progress::Fenced(outcome))) => {
                    prop_assert!(model.ended() && !before.ended());
                    prop_assert_eq!(Some(outcome), model.outcome);
                }
                Ok(Some(Progress::Pending { left })) => prop_assert_eq!((left, model.ended()), (model.left, false)),
                Ok(None) => {}
                Err(Refused::Stale { .. }) => prop_assert!(before.released),
                Err(Refused::Ended { outcome, .. }) => prop_assert!(before.ended() && Some(outcome) == before.outcome),
                Err(Refused::NotNow { phase, outstanding, .. }) => {
                    prop_assert_eq!((phase, outstanding), (before.phase(), before.left));
                }
                Err(refused) => prop_assert!(false, "{}", refused),
            }
            for (id, model) in &all {
                match table.state(*id) {
                    Ok(state) => prop_assert_eq!((state.phase, state.outstanding), (model.phase(), model.left)),
                    Err(_) => prop_assert!(model.released),
                }
            }
        }
    }
}
