//! The legal transitions: one table that the code, the documentation and the tests share.

use super::Phase;

/// What can happen to a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Event {
    /// A slot is taken for it.
    Create = 0,
    /// Work is posted.
    Post = 1,
    /// It is said that no more work will be posted.
    Finish = 2,
    /// A posted piece of work ended well.
    CompleteOk = 3,
    /// A posted piece of work failed or was flushed.
    CompleteError = 4,
    /// It is given up: timed out, cancelled, or failed for a reason of the caller's.
    Abandon = 5,
    /// The caller leaves before the fence.
    Quarantine = 6,
    /// Everything outstanding is known to be fenced by other means: its queue pair was destroyed.
    Fence = 7,
    /// Its slot is given back.
    Release = 8,
}

impl Event {
    /// All events.
    pub const ALL: [Self; 9] = [
        Self::Create,
        Self::Post,
        Self::Finish,
        Self::CompleteOk,
        Self::CompleteError,
        Self::Abandon,
        Self::Quarantine,
        Self::Fence,
        Self::Release,
    ];
}

/// Where a transition leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// To this phase.
    To(Phase),
    /// To the end that the first failure or the first abandonment decided: failed, timed out or cancelled.
    Decided,
}

/// One row: from `from`, `event` leads to `some_left` if work is outstanding after it, and to `none_left` if not.
/// `None` where that is refused or cannot be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transition {
    /// The phase before.
    pub from: Phase,
    /// What happens.
    pub event: Event,
    /// The phase after, with work outstanding.
    pub some_left: Option<Target>,
    /// The phase after, with none outstanding.
    pub none_left: Option<Target>,
}

const fn row(from: Phase, event: Event, some_left: Option<Target>, none_left: Option<Target>) -> Transition {
    Transition { from, event, some_left, none_left }
}

const fn to(phase: Phase) -> Option<Target> {
    Some(Target::To(phase))
}

const DECIDED: Option<Target> = Some(Target::Decided);

/// Every legal transition; what is not here is refused and changes nothing.
pub const TRANSITIONS: [Transition; 23] = {
    use Event as E;
    use Phase as P;
    [
        row(P::Free, E::Create, None, to(P::Created)),
        row(P::Created, E::Post, to(P::Posted), None),
        row(P::Created, E::Finish, None, to(P::Succeeded)),
        row(P::Created, E::Abandon, None, DECIDED),
        row(P::Posted, E::Post, to(P::Posted), None),
        row(P::Posted, E::Finish, to(P::Finishing), to(P::Succeeded)),
        row(P::Posted, E::CompleteOk, to(P::Posted), to(P::Posted)),
        row(P::Posted, E::CompleteError, to(P::Fencing), DECIDED),
        row(P::Posted, E::Abandon, to(P::Fencing), DECIDED),
        row(P::Finishing, E::CompleteOk, to(P::Finishing), to(P::Succeeded)),
        row(P::Finishing, E::CompleteError, to(P::Fencing), DECIDED),
        row(P::Finishing, E::Abandon, to(P::Fencing), None),
        row(P::Fencing, E::CompleteOk, to(P::Fencing), DECIDED),
        row(P::Fencing, E::CompleteError, to(P::Fencing), DECIDED),
        row(P::Fencing, E::Quarantine, to(P::Quarantined), None),
        row(P::Fencing, E::Fence, None, DECIDED),
        row(P::Quarantined, E::CompleteOk, to(P::Quarantined), DECIDED),
        row(P::Quarantined, E::CompleteError, to(P::Quarantined), DECIDED),
        row(P::Quarantined, E::Fence, None, DECIDED),
        row(P::Succeeded, E::Release, None, to(P::Free)),
        row(P::Failed, E::Release, None, to(P::Free)),
        row(P::TimedOut, E::Release, None, to(P::Free)),
        row(P::Cancelled, E::Release, None, to(P::Free)),
    ]
};

type Targets = [Option<Target>; 2];

/// The table by phase and event, made from the rows when this crate is compiled.
const NEXT: [[Targets; Event::ALL.len()]; Phase::ALL.len()] = {
    let mut next = [[[None; 2]; Event::ALL.len()]; Phase::ALL.len()];
    let mut n = 0;
    while n < TRANSITIONS.len() {
        let row = TRANSITIONS[n];
        next[row.from as usize][row.event as usize] = [row.none_left, row.some_left];
        n += 1;
    }
    next
};

/// Where `event` leads from `from`, with or without work outstanding after it.
#[must_use]
pub const fn next(from: Phase, event: Event, left: bool) -> Option<Target> {
    NEXT[from as usize][event as usize][left as usize]
}
