//! The atomics that everything here is built on: the processor's own, or the model checker's.
//!
//! With `--cfg towline_loom` words are loom's, so that a model explores their interleavings. *Hints* (see
//! [`Word::hint`]) stay the processor's own even then: any value of a hint is legal at any time, which other tests show
//! by filling them with rubbish, and a model with every hint in it would be too large to explore.

pub(crate) use core::sync::atomic::Ordering;
use core::sync::atomic::Ordering::Relaxed;

#[cfg(not(towline_loom))]
use core::sync::atomic::AtomicU64;
#[cfg(towline_loom)]
use loom::sync::atomic::AtomicU64;

/// One word of the storage that a caller supplies for a pool or a table.
///
/// A fresh word is zero. Storage is anything that derefs to a slice of words, `Box<[Word]>`, `Vec<Word>` or a static
/// array among them. Whoever takes storage sets it up anew, whatever it held.
#[derive(Debug)]
#[repr(transparent)]
#[cfg(not(towline_loom))]
pub struct Word(AtomicU64);

/// One word of the storage, as the model checker sees it.
#[derive(Debug)]
#[cfg(towline_loom)]
pub struct Word(AtomicU64, core::sync::atomic::AtomicU64);

impl Word {
    /// A word that is zero.
    #[must_use]
    #[cfg(not(towline_loom))]
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// A word that is zero.
    #[must_use]
    #[cfg(towline_loom)]
    pub fn new() -> Self {
        Self(AtomicU64::new(0), core::sync::atomic::AtomicU64::new(0))
    }

    #[inline]
    pub(crate) fn load(&self, order: Ordering) -> u64 {
        step();
        self.0.load(order)
    }

    #[inline]
    pub(crate) fn store(&self, value: u64, order: Ordering) {
        step();
        self.0.store(value, order);
    }

    #[inline]
    pub(crate) fn compare_exchange(
        &self,
        current: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64> {
        read_modify_write();
        self.0.compare_exchange(current, new, success, failure)
    }

    #[inline]
    pub(crate) fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
        read_modify_write();
        self.0.fetch_add(value, order)
    }

    #[inline]
    pub(crate) fn fetch_max(&self, value: u64, order: Ordering) -> u64 {
        read_modify_write();
        self.0.fetch_max(value, order)
    }

    #[cfg(not(towline_loom))]
    fn hinted(&self) -> &AtomicU64 {
        &self.0
    }

    #[cfg(towline_loom)]
    fn hinted(&self) -> &core::sync::atomic::AtomicU64 {
        &self.1
    }

    /// A hint: any value is legal, so that nothing depends on its order. A word is used for hints or otherwise, not both.
    #[inline]
    pub(crate) fn hint(&self) -> u64 {
        self.hinted().load(Relaxed)
    }

    #[inline]
    pub(crate) fn set_hint(&self, value: u64) {
        self.hinted().store(value, Relaxed);
    }

    #[inline]
    pub(crate) fn hint_add(&self, value: u64) -> u64 {
        read_modify_write();
        self.hinted().fetch_add(value, Relaxed)
    }

    #[inline]
    pub(crate) fn hint_max(&self, value: u64) {
        read_modify_write();
        self.hinted().fetch_max(value, Relaxed);
    }

    /// Sets a word up before it is shared. Storage fresh from the kernel is zero already, and a word that is right is
    /// not written: setting up a large pool does not fault in its storage.
    pub(crate) fn set_up(&self, value: u64) {
        if self.0.load(Relaxed) != value {
            self.0.store(value, Relaxed);
        }
        if self.hint() != value {
            self.set_hint(value);
        }
    }

    /// Changes the word to what `step` makes of it, again until no other thread comes between; gives the value before
    /// and after. `step` says in its error why a value is not to be changed.
    #[inline]
    pub(crate) fn update<E>(&self, mut step: impl FnMut(u64) -> Result<u64, E>) -> Result<(u64, u64), E> {
        let mut before = self.load(Ordering::Acquire);
        loop {
            let after = step(before)?;
            let success = if mutant("update without release") { Ordering::Acquire } else { Ordering::AcqRel };
            match self.compare_exchange(before, after, success, Ordering::Acquire) {
                Ok(_) => return Ok((before, after)),
                Err(now) => before = now,
            }
        }
    }
}

impl Default for Word {
    fn default() -> Self {
        Self::new()
    }
}

/// A number below `count` that is mostly the same within a thread and mostly another in another: from where the thread's
/// stack lies, since there is nothing else to know threads by here.
#[inline]
pub(crate) fn stripe(count: usize) -> usize {
    if cfg!(towline_loom) {
        return 0; // a model has to run the same way each time
    }
    let here = 0u8;
    let address = &raw const here as usize as u64;
    // Stacks are a mebibyte apart or more; within one, calls are rarely that deep. Fibonacci hashing of the rest, by its
    // upper bits, keeps neighbours apart.
    let hash = (address >> 20).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (((hash >> 32) * count as u64) >> 32) as usize
}

/// The name of the fault that `ci/loom --mutants` plants in this run of the models, if it is `name`.
#[cfg(towline_loom)]
pub(crate) fn mutant(name: &str) -> bool {
    static NAME: std::sync::OnceLock<Option<std::string::String>> = std::sync::OnceLock::new();
    NAME.get_or_init(|| std::env::var("TOWLINE_MUTANT").ok()).as_deref() == Some(name)
}

/// No faults are planted outside of the models' build.
#[cfg(not(towline_loom))]
#[inline(always)]
pub(crate) const fn mutant(_name: &str) -> bool {
    false
}

/// `order`, or none at all where the mutant of this name is planted.
#[inline(always)]
pub(crate) fn ordering(name: &str, order: Ordering) -> Ordering {
    if mutant(name) { Relaxed } else { order }
}

#[cfg(all(test, not(towline_loom)))]
pub(crate) use stop::{read_modify_write, step};

/// Before each atomic step: where tests stop a thread.
#[cfg(not(all(test, not(towline_loom))))]
#[inline(always)]
pub(crate) const fn step() {}

/// Before each step that reads and writes at once.
#[cfg(not(all(test, not(towline_loom))))]
#[inline(always)]
pub(crate) const fn read_modify_write() {}

/// Stops a thread before any atomic step of a call, for tests that show that no other thread waits for it.
#[cfg(all(test, not(towline_loom)))]
#[allow(clippy::unwrap_used, reason = "a part of the tests")]
pub(crate) mod stop {
    use std::cell::{Cell, RefCell};
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::thread_local;

    struct Gate {
        steps: usize,
        stopped: Sender<bool>,
        go: Receiver<()>,
    }

    thread_local! {
        static GATE: RefCell<Option<Gate>> = const { RefCell::new(None) };
        static LEFT: Cell<Option<usize>> = const { Cell::new(None) };
        static READ_MODIFY_WRITES: Cell<usize> = const { Cell::new(0) };
    }

    pub(crate) fn read_modify_write() {
        READ_MODIFY_WRITES.set(READ_MODIFY_WRITES.get() + 1);
        step();
    }

    /// How many read-modify-writes this thread does in `call`.
    pub(crate) fn count_read_modify_writes(call: impl FnOnce()) -> usize {
        let before = READ_MODIFY_WRITES.get();
        call();
        READ_MODIFY_WRITES.get() - before
    }

    pub(crate) fn step() {
        if let Some(left) = LEFT.get() {
            assert!(left > 0, "more steps than any call needs that waits for nobody");
            LEFT.set(Some(left - 1));
        }
        let gate = GATE.with_borrow_mut(|gate| match gate {
            Some(Gate { steps: 0, .. }) => gate.take(),
            Some(gate) => {
                gate.steps -= 1;
                None
            }
            None => None,
        });
        if let Some(gate) = gate {
            gate.stopped.send(true).unwrap();
            gate.go.recv().unwrap();
        }
    }

    /// Runs `call` in this thread, and panics if it takes more than `steps` atomic steps: if it waits for another thread.
    pub(crate) fn within<T>(steps: usize, call: impl FnOnce() -> T) -> T {
        LEFT.set(Some(steps));
        let result = call();
        LEFT.set(None);
        result
    }

    /// Runs `call` in a thread that stops before its atomic step number `steps`, and `meanwhile` while it is stopped;
    /// then lets it go on to its end. False if the call had fewer steps.
    pub(crate) fn stop_at<T: Send>(
        steps: usize,
        call: impl FnOnce() -> T + Send,
        meanwhile: impl FnOnce(),
    ) -> (bool, T) {
        let (stopped, has_stopped) = channel();
        let (go_on, go) = channel();
        std::thread::scope(move |scope| {
            let go_on = go_on; // dropped when `meanwhile` panics: then the stopped thread ends too
            let done = stopped.clone();
            let thread = scope.spawn(move || {
                GATE.set(Some(Gate { steps, stopped, go }));
                let result = call();
                GATE.set(None);
                let _ = done.send(false); // nobody listens any more if it had stopped
                result
            });
            let did_stop = has_stopped.recv().unwrap();
            if did_stop {
                meanwhile();
                go_on.send(()).unwrap();
            }
            (did_stop, thread.join().unwrap())
        })
    }
}
