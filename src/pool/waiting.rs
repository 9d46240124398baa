//! Extents, and who waits for room: first come, first served, and no lost wake-up.
//!
//! While anybody waits, nobody overtakes him, not even with a smaller need: a release serves the queue from its front, as
//! far as there is room. A deadline is the waiter's own affair: he [leaves](Room::leave), and the next one is served.
//!
//! No lost wake-up: a waiter counts itself in `waiting` and then tries once more; a release frees its extent and then
//! looks at `waiting`. With a full fence between the two steps on both sides, one of them sees the other.
//!
//! The models in `models.rs` explore this with loom (`ci/loom`), over core's pool as it is.

#[cfg(not(towline_loom))]
use std::sync::Mutex;
#[cfg(not(towline_loom))]
use std::sync::atomic::{AtomicUsize, fence};

#[cfg(towline_loom)]
use loom::sync::Mutex;
#[cfg(towline_loom)]
use loom::sync::atomic::{AtomicUsize, fence};

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LockResult, PoisonError};
use towline_core::Word;
use towline_core::pool::{BufferPool, Extent, PoolLayout, StorageTooSmall};

/// Extents and the queue for them.
pub(super) struct Room {
    extents: BufferPool<Box<[Word]>>,
    /// Places in the queue: changes under the queue's lock only, and is read without it.
    waiting: AtomicUsize,
    queue: Mutex<VecDeque<Arc<Turn>>>,
    /// Extents that somebody owns; a statistic.
    owned: AtomicU64,
}

/// A place in the queue.
pub(super) struct Turn {
    /// One extent for each, all or none: who waits for several holds none of them meanwhile.
    needs: Vec<u64>,
    state: Mutex<State>,
    notify: Box<dyn Fn() + Send + Sync>,
}

enum State {
    /// In the queue.
    Waiting,
    /// Out of it, with the extents to be taken.
    Granted(Vec<Extent>),
    /// Out of it, with nothing.
    Done,
}

impl Room {
    pub(super) fn new(layout: PoolLayout) -> Result<Self, StorageTooSmall> {
        let mut storage = Vec::new();
        storage.resize_with(layout.words(), Word::default);
        Ok(Self {
            extents: BufferPool::new(storage.into_boxed_slice(), layout)?,
            waiting: AtomicUsize::new(0),
            queue: Mutex::default(),
            owned: AtomicU64::new(0),
        })
    }

    pub(super) fn extents(&self) -> &BufferPool<Box<[Word]>> {
        &self.extents
    }

    /// How many wait.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::SeqCst)
    }

    /// Extents that somebody owns.
    pub(super) fn owned(&self) -> u64 {
        self.owned.load(Ordering::Relaxed)
    }

    /// An extent now, if there is room and nobody waits: who waits came first.
    pub(super) fn allocate(&self, len: u64) -> Option<Extent> {
        if self.waiting() > 0 && !mutant("overtakes who waits") {
            return None;
        }
        self.claim(len)
    }

    /// Several extents now, or none of them.
    pub(super) fn allocate_all(&self, needs: &[u64]) -> Option<Vec<Extent>> {
        if self.waiting() > 0 {
            return None;
        }
        let extents = self.claim_all(needs);
        if extents.is_none() {
            // Whoever joined the queue meanwhile may have found what was claimed here for a moment.
            fence(Ordering::SeqCst);
            if self.waiting() > 0 {
                self.serve();
            }
        }
        extents
    }

    /// Joins the queue for `len` bytes, of which there are as many in the pool. `notify` is called once, without a lock
    /// held, when the extent is there to be [taken](Turn::take): from any thread, and from within this call if there is
    /// room already.
    #[cfg(all(test, towline_loom))]
    pub(super) fn wait(&self, len: u64, notify: impl Fn() + Send + Sync + 'static) -> Arc<Turn> {
        self.wait_all(vec![len], notify)
    }

    /// The same for several extents at once.
    pub(super) fn wait_all(&self, needs: Vec<u64>, notify: impl Fn() + Send + Sync + 'static) -> Arc<Turn> {
        let turn = Arc::new(Turn { needs, state: Mutex::new(State::Waiting), notify: Box::new(notify) });
        let mut queue = held(self.queue.lock());
        queue.push_back(turn.clone());
        if !mutant("counted late") {
            self.waiting.fetch_add(1, Ordering::SeqCst);
        }
        drop(queue);
        if !mutant("waiter without fence") {
            fence(Ordering::SeqCst);
        }
        self.serve();
        if mutant("counted late") {
            self.waiting.fetch_add(1, Ordering::SeqCst);
        }
        turn
    }

    /// Gives an extent back, and serves who waits.
    pub(super) fn release(&self, extent: Extent) {
        self.owned.fetch_sub(1, Ordering::Relaxed);
        let released = self.extents.release(extent);
        debug_assert!(released.is_ok(), "a buffer is the only owner of its extent: {released:?}");
        if !mutant("release without fence") {
            fence(Ordering::SeqCst);
        }
        if self.waiting() > 0 {
            self.serve();
        }
    }

    /// Leaves the queue, as at a deadline; an extent that was granted meanwhile goes to whoever is next.
    pub(super) fn leave(&self, turn: &Turn) {
        let mut queue = held(self.queue.lock());
        let before = std::mem::replace(&mut *held(turn.state.lock()), State::Done);
        if matches!(before, State::Waiting) {
            queue.retain(|other| !std::ptr::eq(&raw const **other, turn));
            self.waiting.fetch_sub(1, Ordering::SeqCst);
        }
        drop(queue);
        match before {
            State::Granted(_) if mutant("grant of who left lost") => {}
            State::Granted(extents) => extents.into_iter().for_each(|extent| self.release(extent)),
            State::Waiting if mutant("who leaves serves nobody") => {}
            State::Waiting => self.serve(), // it may have been the front that held the others up
            State::Done => {}
        }
    }

    /// Serves the queue from its front as far as there is room.
    fn serve(&self) {
        let mut served = Vec::new();
        {
            let mut queue = held(self.queue.lock());
            while let Some(front) = queue.front() {
                let Some(extents) = self.claim_all(&front.needs) else { break };
                *held(front.state.lock()) = State::Granted(extents);
                served.extend(queue.pop_front());
                self.waiting.fetch_sub(1, Ordering::SeqCst);
            }
        }
        for turn in served {
            (turn.notify)();
        }
    }

    /// All or none.
    fn claim_all(&self, needs: &[u64]) -> Option<Vec<Extent>> {
        let mut extents = Vec::with_capacity(needs.len());
        for need in needs {
            if let Some(extent) = self.claim(*need) {
                extents.push(extent);
                continue;
            }
            for extent in extents {
                self.owned.fetch_sub(1, Ordering::Relaxed);
                let released = self.extents.release(extent);
                debug_assert!(released.is_ok(), "it was claimed just now: {released:?}");
            }
            return None;
        }
        Some(extents)
    }

    fn claim(&self, len: u64) -> Option<Extent> {
        let extent = self.extents.allocate(len, crate::layout::PART_ALIGN).ok()?;
        self.owned.fetch_add(1, Ordering::Relaxed);
        Some(extent)
    }
}

impl Turn {
    /// The extent, once, if it is there.
    #[cfg(all(test, towline_loom))]
    pub(super) fn take(&self) -> Option<Extent> {
        self.take_all()?.pop()
    }

    /// The extents, once, if they are there.
    pub(super) fn take_all(&self) -> Option<Vec<Extent>> {
        let mut state = held(self.state.lock());
        match std::mem::replace(&mut *state, State::Done) {
            State::Granted(extents) => Some(extents),
            before => {
                *state = before;
                None
            }
        }
    }

    /// Bytes asked for, each extent's.
    pub(super) fn needs(&self) -> &[u64] {
        &self.needs
    }
}

/// A lock's guard, also after a panic under it: nothing here is left half done by one.
fn held<G>(locked: LockResult<G>) -> G {
    locked.unwrap_or_else(PoisonError::into_inner)
}

/// The fault that `ci/loom --mutants` plants, in the models' build alone.
#[cfg(towline_loom)]
fn mutant(name: &str) -> bool {
    std::env::var_os("TOWLINE_MUTANT").is_some_and(|planted| planted == name)
}

#[cfg(not(towline_loom))]
#[inline(always)]
const fn mutant(_name: &str) -> bool {
    false
}
