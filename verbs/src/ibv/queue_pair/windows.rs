//! Memory windows of type 2B: a key for a part of a region, for the peer of this queue pair alone.
//!
//! | state | how it gets there | leaves it by |
//! |---|---|---|
//! | binding | `bind`: a request in the send queue, or waiting for room in it | its completion; `invalidate` |
//! | bound | the bind request completed | `invalidate` |
//! | ending | `invalidate`: a request in the send queue, or waiting for room in it | its completion |
//! | ended | nobody reaches the memory by this key any more | |
//!
//! Requests for windows have places in the send queue and in the completion queue that no caller's request takes, so that a
//! key can be taken back however much is posted. They are done in the order posted, behind the caller's requests that
//! were posted before them: a bind may take as long as those take to be *started*. The peer must not have a key before
//! it is bound ([`MwBackend::is_bound`]).
//!
//! A window is used again after it was invalidated, each time under a key with the next of 256 tags, and freed when its
//! tags have all been used, so that no key of it is valid twice. In the error state nothing can be invalidated by request:
//! windows are freed instead, and so they are before their queue pair is destroyed.

use super::{Core, Handle, SLOT, State, WINDOW};
use crate::backend::{MwBackend, QpBackend};
use crate::ibv::{failed, region::Region, sys};
use crate::{Access, Cause, Error, QueuePairState, RemoteSlice, Result};
use core::fmt;
use core::mem;
use core::sync::atomic::{AtomicU8, Ordering};
use rdma_core_sys::{IBV_WC_SUCCESS, ibv_inc_rkey, ibv_wc};
use std::collections::VecDeque;
use std::sync::Arc;

/// Most requests for windows that the device has at a time.
pub(in crate::ibv) const WINDOW_REQUESTS: u32 = 32;
/// Most windows of a queue pair at a time (I9).
const MAX_WINDOWS: usize = 1 << 14;
/// Most windows that are kept to be bound again.
const MAX_IDLE: usize = 256;
/// Bindings of a window before it is freed: the lowest 8 bits of its key come round after that.
const MAX_BINDS: u8 = 255;
/// How often the completion queue is looked at in `bind` for what most often comes at once.
const LOOKS: u32 = 64;
/// In a request's number: that it makes a key invalid.
const INVALIDATES: u64 = 1 << 28;

const BINDING: u8 = 0;
const BOUND: u8 = 1;
const ENDING: u8 = 2;
const ENDED: u8 = 3;

/// The windows of a queue pair.
#[derive(Default)]
pub(super) struct Windows {
    slots: Vec<Option<Entry>>,
    free: Vec<u32>,
    idle: Vec<Idle>,
    /// Requests that wait for room in the send queue: slot, and whether it is to be made invalid.
    waiting: VecDeque<(u32, bool)>,
    /// Places in the send queue, and how many are taken.
    room: u32,
    posted: u32,
}

/// A window that is not bound: the key that it had last, and how many it has had.
struct Idle {
    window: sys::Window,
    key: u32,
    binds: u8,
}

/// A window that is bound, or being bound.
struct Entry {
    idle: Idle,
    region: Arc<Region>,
    remote: RemoteSlice,
    state: Arc<AtomicU8>,
}

/// What a window held, to be let go of without a lock.
#[derive(Debug, Default)]
pub(in crate::ibv) struct Freed {
    pub(in crate::ibv) regions: Vec<Arc<Region>>,
    windows: Vec<sys::Window>,
}

impl Entry {
    /// Whether its key is to become invalid, or has.
    fn is_ending(&self) -> bool {
        self.state.load(Ordering::Acquire) >= ENDING
    }
}

impl Windows {
    /// Windows whose requests have so many places in the send queue.
    pub(super) fn new(room: u32) -> Self {
        Self { room, ..Self::default() }
    }

    fn add(&mut self, entry: Entry) -> u32 {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() as u32 - 1
        });
        self.slots[slot as usize] = Some(entry);
        slot
    }

    fn take(&mut self, slot: u32) -> Option<Entry> {
        let entry = self.slots.get_mut(slot as usize)?.take()?;
        self.free.push(slot);
        Some(entry)
    }

    fn get(&mut self, slot: u32) -> Option<&mut Entry> {
        self.slots.get_mut(slot as usize)?.as_mut()
    }

    /// Nobody reaches anything by this window's key any more: it can be bound again.
    fn ended(&mut self, slot: u32, freed: &mut Freed) {
        let Some(Entry { idle, region, state, .. }) = self.take(slot) else { return };
        state.store(ENDED, Ordering::Release);
        freed.regions.push(region);
        if idle.binds < MAX_BINDS && self.idle.len() < MAX_IDLE {
            self.idle.push(idle);
        } else {
            freed.windows.push(idle.window);
        }
    }

    /// A request for a window was completed.
    fn completed(&mut self, number: u64, success: bool, freed: &mut Freed) {
        self.posted = self.posted.saturating_sub(1);
        let slot = (number & (INVALIDATES - 1)) as u32;
        if !success {
            return; // the queue pair is in the error state
        }
        if number & INVALIDATES != 0 {
            self.ended(slot, freed);
        } else if let Some(entry) = self.get(slot).filter(|entry| !entry.is_ending()) {
            entry.state.store(BOUND, Ordering::Release);
        }
    }

    /// Whether a request waits that could be posted now.
    fn can_post(&self) -> bool {
        !self.waiting.is_empty() && self.posted < self.room
    }

    /// Frees a window that is bound; whether it is gone.
    fn free(&mut self, slot: u32, freed: &mut Freed) -> bool {
        let Some(Entry { idle, region, remote, state }) = self.take(slot) else { return true };
        let Idle { window, key, binds } = idle;
        match window.free() {
            Ok(()) => {
                state.store(ENDED, Ordering::Release);
                freed.regions.push(region);
                true
            }
            Err(window) => {
                let idle = Idle { window, key, binds };
                self.add(Entry { idle, region, remote, state }); // into the slot that was freed just now
                false
            }
        }
    }

    /// Frees all windows, as far as the library allows.
    pub(super) fn free_all(&mut self, freed: &mut Freed) {
        self.waiting.clear();
        for slot in 0..self.slots.len() as u32 {
            self.free(slot, freed);
        }
        freed.windows.extend(self.idle.drain(..).map(|idle| idle.window));
    }

    /// The queue pair is gone, and with it every way to the memory.
    pub(super) fn end_all(&mut self, freed: &mut Freed) {
        for entry in mem::take(&mut self.slots).into_iter().flatten() {
            entry.state.store(ENDED, Ordering::Release);
            freed.regions.push(entry.region);
            freed.windows.push(entry.idle.window);
        }
        self.free.clear();
    }
}

impl Core {
    /// Binds a window to bytes of `region`, for the peer of this queue pair. It does not wait for the device: see
    /// [`MwBackend::is_bound`].
    pub(super) fn bind(self: &Arc<Self>, region: Arc<Region>, offset: u64, len: u64) -> Result<Arc<dyn MwBackend>> {
        const VERB: &str = "bind_mw";
        if !self.device.info_capabilities().scoped_keys {
            return Err(Error::new(VERB, Cause::Unsupported { what: "a memory window of type 2B" }));
        }
        if !region.access.contains(Access::MW_BIND) {
            return Err(Error::new(VERB, Cause::Denied { what: "MW_BIND" }));
        }
        if !Arc::ptr_eq(&region.domain, &self.domain) {
            return Err(Error::new(VERB, Cause::Denied { what: "a queue pair of another protection domain" }));
        }
        if len == 0 {
            return Err(Error::new(VERB, Cause::OutOfRange { offset, len, size: region.len() }));
        }
        let idle = self.unbound(VERB)?;
        let idle = Idle { key: ibv_inc_rkey(idle.key), binds: idle.binds + 1, ..idle };
        let remote = RemoteSlice { address: region.address(offset), len, rkey: idle.key.into() };
        let state = Arc::new(AtomicU8::new(BINDING));
        let mut freed = Freed::default();
        let slot = {
            let mut all = self.state();
            self.check_usable(&all, VERB)?;
            let slot = all.windows.add(Entry { idle, region, remote, state: state.clone() });
            all.windows.waiting.push_back((slot, false));
            self.post_windows(&mut all);
            if all.phase == QueuePairState::Error {
                all.windows.free(slot, &mut freed);
                let failure = all.failure.clone();
                drop(all);
                let state = Cause::State { is: QueuePairState::Error, needs: QueuePairState::ReadyToSend };
                return Err(failure.unwrap_or(Error::new(VERB, state)));
            }
            slot
        };
        for _ in 0..LOOKS {
            if state.load(Ordering::Acquire) == BOUND {
                break;
            }
            self.sends.0.collect_all();
        }
        Ok(Arc::new(Window { core: self.clone(), slot, remote, state }))
    }

    fn check_usable(&self, state: &State, verb: &'static str) -> Result<()> {
        if state.takes_sends() && !self.device.is_inherited() {
            return Ok(());
        }
        Err(Error::new(verb, Cause::State { is: state.phase, needs: QueuePairState::ReadyToSend }))
    }

    /// A window that is not bound: one that was, or a new one.
    fn unbound(&self, verb: &'static str) -> Result<Idle> {
        {
            let mut state = self.state();
            self.check_usable(&state, verb)?;
            let windows = &mut state.windows;
            if let Some(idle) = windows.idle.pop() {
                return Ok(idle);
            }
            if windows.slots.len() - windows.free.len() >= MAX_WINDOWS {
                let have = MAX_WINDOWS as u64;
                return Err(Error::new(verb, Cause::Limit { what: "windows of a queue pair", have, need: have + 1 }));
            }
        }
        let window = sys::Window::new(&self.domain).map_err(|error| failed(verb, "ibv_alloc_mw", error))?;
        Ok(Idle { key: window.key(), window, binds: 0 })
    }

    /// Posts requests for windows that wait, as far as there is room.
    #[allow(unsafe_code)]
    fn post_windows(&self, state: &mut State) {
        while state.takes_sends() && state.windows.can_post() {
            let Some((slot, invalidates)) = state.windows.waiting.pop_front() else { return };
            let Some(entry) = state.windows.get(slot) else { continue };
            let mut number = u64::from(slot);
            let mut wr = if invalidates {
                number |= INVALIDATES;
                sys::Window::invalidate(entry.idle.key)
            } else {
                let RemoteSlice { address, len, .. } = entry.remote;
                entry.idle.window.bind(entry.idle.key, entry.region.piece_of(address), address, len)
            };
            wr.wr_id = u64::from(self.serial) << 32 | WINDOW | number;
            let Some(pair) = &state.pair else { return };
            // SAFETY: a bind opens memory of a region that the entry holds until its key is invalid or the queue pair gone.
            match unsafe { pair.post_chain(core::slice::from_mut(&mut wr), &mut []) } {
                Ok(()) => {
                    state.windows.posted += 1;
                    if let Some(entry) = state.windows.get(slot).filter(|_| !invalidates) {
                        entry.idle.window.posted(entry.idle.key);
                    }
                }
                // There is room, so the device is at its end. What was bound is freed by those who hold it, or by the end.
                Err((error, _)) => {
                    Self::break_off(state, Some(failed("bind_mw", "ibv_post_send (window)", error)));
                }
            }
        }
    }

    /// The device has completed a request for a window; whether more can be posted now, without the completion queue's lock.
    pub(super) fn window_completed(&self, state: &mut State, wc: &ibv_wc, freed: &mut Freed) -> bool {
        state.windows.completed(wc.wr_id & SLOT, wc.status == IBV_WC_SUCCESS, freed);
        state.windows.can_post()
    }

    /// Posts what waited for the completion of others.
    pub(in crate::ibv) fn go_on_with_windows(&self) {
        self.post_windows(&mut self.state());
    }

    /// Takes the key of a window back.
    fn invalidate(&self, slot: u32, ended: &AtomicU8) {
        let mut freed = Freed::default();
        let mut state = self.state();
        if ended.load(Ordering::Acquire) == ENDED {
            return; // the slot may be another's
        }
        if state.phase == QueuePairState::Error {
            state.windows.free(slot, &mut freed);
        } else if let Some(entry) = state.windows.get(slot).filter(|entry| !entry.is_ending()) {
            entry.state.store(ENDING, Ordering::Release);
            match state.windows.waiting.iter().position(|waiting| *waiting == (slot, false)) {
                // It was never bound.
                Some(at) => {
                    state.windows.waiting.remove(at);
                    state.windows.ended(slot, &mut freed);
                }
                None => {
                    state.windows.waiting.push_back((slot, true));
                    self.post_windows(&mut state);
                }
            }
        }
        drop(state); // before what is freed
    }
}

/// A window, as its owner has it.
struct Window {
    core: Arc<Core>,
    slot: u32,
    remote: RemoteSlice,
    state: Arc<AtomicU8>,
}

/// Binds a window for the peer of `queue_pair`, which must be one of this provider.
pub(in crate::ibv) fn bind(
    region: Arc<Region>,
    queue_pair: &dyn QpBackend,
    offset: u64,
    len: u64,
) -> Result<Arc<dyn MwBackend>> {
    match queue_pair.as_any().downcast_ref::<Handle>() {
        Some(Handle(core)) => core.bind(region, offset, len),
        None => Err(Error::new("bind_mw", Cause::Unsupported { what: "a queue pair of another provider" })),
    }
}

impl MwBackend for Window {
    fn remote(&self) -> RemoteSlice {
        self.remote
    }

    fn is_bound(&self) -> bool {
        if self.state.load(Ordering::Acquire) == BINDING && !self.core.device.is_inherited() {
            self.core.sends.0.collect_all();
        }
        self.state.load(Ordering::Acquire) == BOUND
    }

    fn invalidate(&self) -> bool {
        let is_ended = || self.state.load(Ordering::Acquire) == ENDED;
        if is_ended() || self.core.device.is_inherited() {
            return is_ended();
        }
        self.core.invalidate(self.slot, &self.state);
        if !is_ended() {
            self.core.sends.0.collect_all();
        }
        is_ended()
    }
}

// The keys are secrets (I14).
impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IbvWindow").field("len", &self.remote.len).finish_non_exhaustive()
    }
}
