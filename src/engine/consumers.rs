//! Operations of producers that wait until gets wait for a key.

use super::timers::TimerId;
use super::{Action, Engine, OperationId, Tick, Timer};
use crate::{Error, ErrorKind, Result};
use std::collections::VecDeque;

/// An operation that waits until gets wait for a key.
pub(super) struct AwaitConsumers {
    key: Vec<u8>,
    count: usize,
    timer: TimerId,
    done: Option<Result<()>>,
}

impl AwaitConsumers {
    pub(super) fn is_done(&self) -> bool {
        self.done.is_some()
    }
}

impl Engine {
    /// An operation that is done when `count` gets wait here for `key`; [`Engine::take_consumers`].
    ///
    /// # Errors
    /// [`ErrorKind::Closed`].
    pub fn await_consumers(&mut self, now: Tick, key: &[u8], count: usize, deadline: Tick) -> Result<OperationId> {
        self.advance(now);
        self.check_open("wait_for_consumers")?;
        let operation = self.new_operation();
        let timer = self.timers.set(deadline, Timer::Consumers(operation));
        self.consumers.insert(operation, AwaitConsumers { key: key.to_vec(), count, timer, done: None });
        self.look_at_consumers();
        Ok(operation)
    }

    /// The result of [`await_consumers`](Self::await_consumers), once.
    pub fn take_consumers(&mut self, operation: OperationId) -> Option<Result<()>> {
        let waiting = self.consumers.get_mut(&operation)?;
        let done = waiting.done.take()?;
        self.consumers.remove(&operation);
        Some(done)
    }

    pub(super) fn look_at_consumers(&mut self) {
        for (operation, waiting) in &mut self.consumers {
            if waiting.done.is_none() && self.waiting.get(&waiting.key).map_or(0, VecDeque::len) >= waiting.count {
                waiting.done = Some(Ok(()));
                self.timers.cancel(Some(waiting.timer));
                self.actions.push_back(Action::Wake(*operation));
            }
        }
    }

    pub(super) fn consumers_deadline(&mut self, operation: OperationId) {
        let Some(waiting) = self.consumers.get_mut(&operation) else { return };
        if waiting.done.is_none() {
            let kind = ErrorKind::TimedOut { waiting_for: "consumers", quarantined: 0 };
            waiting.done = Some(Err(Error::new("wait_for_consumers", kind)));
            self.actions.push_back(Action::Wake(operation));
        }
    }

    /// Nobody comes any more.
    pub(super) fn end_awaited_consumers(&mut self) {
        for (operation, waiting) in self.consumers.iter_mut().filter(|(_, waiting)| !waiting.is_done()) {
            waiting.done = Some(Err(Error::new("wait_for_consumers", ErrorKind::Closed)));
            self.timers.cancel(Some(waiting.timer));
            self.actions.push_back(Action::Wake(*operation));
        }
    }
}
