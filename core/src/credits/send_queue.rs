//! What is posted to a send queue, and which of it asks for a completion.

use crate::sync::{Ordering, Word};
use core::fmt;

/// Whether a request asks for a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// It does.
    Signalled,
    /// Only if it fails; a later completion tells that it is done.
    Unsignalled,
}

/// The places of one send queue, for the one who posts to it and polls its completions (`&mut`: one thread at a time).
///
/// Requests of a queue pair complete in the order posted, so that one completion tells that all before it are done. A
/// request asks for a completion when [`Signal::Signalled`] is what [`post`](Self::post) returns: every `interval`-th
/// does, and so does one that takes the last place, because without it a full queue could never be known to have
/// drained. What is posted last before a pause asks by `flush`.
///
/// ```
/// use towline_core::{Word, credits::{SendQueue, Signal}};
///
/// let mut queue = SendQueue::new((0..8).map(|_| Word::default()).collect::<Vec<_>>(), 4);
/// let signals: Vec<_> = (100..106).map(|id| queue.post(id, id == 105).unwrap()).collect();
/// assert_eq!(signals.iter().filter(|&&s| s == Signal::Signalled).count(), 2); // 103, and 105 by `flush`
/// let mut done = Vec::new();
/// queue.complete(103, |id| done.push(id))?;
/// assert_eq!(done, [100, 101, 102, 103]);
/// assert_eq!(queue.free(), 6);
/// # Ok::<(), towline_core::credits::UnknownRequest>(())
/// ```
#[derive(Debug)]
pub struct SendQueue<S> {
    ids: S,
    /// Requests ever posted, and ever retired.
    posted: u64,
    retired: u64,
    interval: u32,
    unsignalled: u32,
}

impl<S: AsRef<[Word]>> SendQueue<S> {
    /// A queue of as many places as `ids` has words, of which every `interval`-th request asks for a completion
    /// (0 counts as 1; more than half the places counts as half: the other half can be posted while it is under way).
    pub fn new(ids: S, interval: u32) -> Self {
        let half = (ids.as_ref().len() / 2).clamp(1, u32::MAX as usize) as u32;
        Self { ids, posted: 0, retired: 0, interval: interval.clamp(1, half), unsignalled: 0 }
    }

    /// Places in all.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.ids.as_ref().len()
    }

    /// Places free: requests that may be posted now.
    #[must_use]
    pub fn free(&self) -> usize {
        self.depth() - self.outstanding()
    }

    /// Requests posted and not known to be done.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        (self.posted - self.retired) as usize
    }

    /// Whether requests are outstanding that no completion is going to tell of: a pause now would leave them open. Post
    /// one more with `flush`, or never pause after a post without it.
    #[must_use]
    pub fn needs_flush(&self) -> bool {
        self.unsignalled > 0
    }

    /// Takes a place for a request with this id, which is to be posted right after, in this order; says whether it is
    /// to ask for a completion. `flush`: it is to ask in any case.
    ///
    /// Ids of outstanding requests should differ; of equal ones, a completion retires up to the oldest.
    ///
    /// # Errors
    /// No place is free.
    pub fn post(&mut self, id: u64, flush: bool) -> Result<Signal, QueueFull> {
        let free = self.free();
        if free == 0 {
            return Err(QueueFull { depth: self.depth() });
        }
        self.place(self.posted).store(id, Ordering::Relaxed);
        self.posted += 1;
        self.unsignalled += 1;
        if flush || free == 1 || self.unsignalled >= self.interval {
            self.unsignalled = 0;
            return Ok(Signal::Signalled);
        }
        Ok(Signal::Unsignalled)
    }

    /// Gives the place of the request posted last back, which could not be posted after all; no effect if none is
    /// outstanding.
    pub fn withdraw(&mut self) {
        if self.posted > self.retired {
            self.posted -= 1;
            // It may have been the one that asked: let the next one ask no later than is safe.
            self.unsignalled = self.outstanding() as u32;
        }
    }

    /// A completion of the request `id` came, well or flushed: that request, and those posted before it, are done.
    /// `done` is told the id of each, in the order posted. Those before it have ended well if they had no completion of
    /// their own. Gives the number of places that became free.
    ///
    /// # Errors
    /// No such request is outstanding; nothing has changed.
    pub fn complete(&mut self, id: u64, mut done: impl FnMut(u64)) -> Result<usize, UnknownRequest> {
        let found = (self.retired..self.posted).find(|&at| self.place(at).load(Ordering::Relaxed) == id);
        let last = found.ok_or(UnknownRequest { id, outstanding: self.outstanding() })?;
        (self.retired..=last).for_each(|at| done(self.place(at).load(Ordering::Relaxed)));
        let freed = (last + 1 - self.retired) as usize;
        self.retired = last + 1;
        self.unsignalled = self.unsignalled.min(self.outstanding() as u32);
        Ok(freed)
    }

    fn place(&self, at: u64) -> &Word {
        let ids = self.ids.as_ref();
        &ids[(at % ids.len() as u64) as usize]
    }
}

/// The send queue has no free place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueFull {
    /// Its places, all taken.
    pub depth: usize,
}

impl fmt::Display for QueueFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "send queue: all {} places are taken; wait for a completion", self.depth)
    }
}

impl core::error::Error for QueueFull {}

/// A completion of a request that is not outstanding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnknownRequest {
    /// The id in the completion.
    pub id: u64,
    /// Requests outstanding.
    pub outstanding: usize,
}

impl fmt::Display for UnknownRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "send queue: completion of {:#x}, which is none of the {} outstanding", self.id, self.outstanding)
    }
}

impl core::error::Error for UnknownRequest {}
