//! Timers: what is due when, in ticks that are passed in.

use super::Tick;
use std::collections::BTreeMap;

/// A set timer, to cancel it by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct TimerId(Tick, u64);

/// Timers of kind `T`, in the order of their time and, among equals, of their setting.
#[derive(Debug)]
pub(super) struct Timers<T> {
    set: BTreeMap<TimerId, T>,
    next: u64,
}

impl<T> Timers<T> {
    pub(super) fn new() -> Self {
        Self { set: BTreeMap::new(), next: 0 }
    }

    pub(super) fn set(&mut self, at: Tick, timer: T) -> TimerId {
        let id = TimerId(at, self.next);
        self.next += 1;
        self.set.insert(id, timer);
        id
    }

    pub(super) fn cancel(&mut self, id: Option<TimerId>) {
        if let Some(id) = id {
            self.set.remove(&id);
        }
    }

    pub(super) fn next_at(&self) -> Option<Tick> {
        self.set.first_key_value().map(|(id, _)| id.0)
    }

    /// One timer that is due at `now`.
    pub(super) fn pop_due(&mut self, now: Tick) -> Option<T> {
        let first = self.set.first_entry()?;
        (first.key().0 <= now).then(|| first.remove())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timers_fire_in_order_and_cancelled_ones_do_not() {
        let mut timers = Timers::new();
        timers.set(20, 'c');
        timers.set(10, 'a');
        let cancelled = timers.set(10, 'x');
        timers.set(10, 'b');
        timers.cancel(Some(cancelled));
        timers.cancel(None);
        assert_eq!(timers.next_at(), Some(10));
        assert_eq!(
            (timers.pop_due(9), timers.pop_due(10), timers.pop_due(10), timers.pop_due(10)),
            (None, Some('a'), Some('b'), None)
        );
        assert_eq!(timers.pop_due(30), Some('c'));
        assert_eq!(timers.next_at(), None);
    }
}
