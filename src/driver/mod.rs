//! The real driver: feeds the engine from epoll and the boot clock.
//!
//! There is one readiness loop, and one thread in it at a time: whoever holds the *reactor*. A caller that waits for an
//! operation takes the reactor and runs the loop itself, so that the frame he waits for is read, understood and
//! answered by his own thread. A background thread holds the reactor while no caller waits ([`linger`] has how soon it
//! takes it). So the number of threads is fixed whatever the number of peers: the callers' own, and one.
//!
//! Locks, in the order in which they may be taken: `turn` (who holds the reactor; held for moments), `state` (engine and
//! connections; held while frames are worked on and sockets written, never while anything is waited for or a payload's
//! bytes are moved). Payload bytes move in [`Device::progress`], under no lock of this module.

mod linger;
mod net;
mod reactor;

use crate::endpoint::lock;
use crate::engine::{Action, Engine, OperationId, Stats, Tick};
use crate::sys;
use crate::{Error, Result};
use linger::{LINGER, Linger};
use net::Net;
use reactor::Reactor;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};
use towline_control::socket::Listener;
use towline_verbs::Device;

/// Runs an engine; see the [module](self).
#[derive(Debug)]
pub(crate) struct Driver {
    core: Arc<Core>,
    background: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Core {
    state: Mutex<State>,
    turn: Mutex<Turn>,
    background: Condvar,
    waker: Arc<mio::Waker>,
    devices: Vec<Device>,
    /// Devices to which something was posted since they were last looked at.
    posted: Vec<AtomicBool>,
    /// Until when the holder of the reactor sleeps, so that an earlier deadline wakes him.
    sleeping_until: AtomicU64,
}

/// The engine and its connections.
#[derive(Debug)]
struct State {
    engine: Engine,
    net: Net,
    waiting: BTreeMap<OperationId, Thread>,
}

/// Who drives.
#[derive(Debug)]
struct Turn {
    /// The reactor, while nobody holds it.
    reactor: Option<Box<Reactor>>,
    /// Callers that wait for an operation.
    callers: usize,
    /// Those of them that do not hold the reactor.
    parked: VecDeque<Thread>,
    /// How many have begun to.
    entered: u64,
    /// Whether the background thread waits for the next of them, and needs no word when one leaves.
    lingering: bool,
    linger: Linger,
    stop: bool,
}

/// Makes the loop's parts; the waker is needed before the engine is there.
pub(crate) struct Parts {
    reactor: Reactor,
    waker: Arc<mio::Waker>,
}

impl Parts {
    pub(crate) fn new() -> Result<Self> {
        let (reactor, waker) = Reactor::new().map_err(|e| Error::os("build", "epoll", &e))?;
        Ok(Self { reactor, waker: Arc::new(waker) })
    }

    /// What the engine calls when it has something to do for another reason than completions and time.
    pub(crate) fn wake(&self) -> Arc<dyn Fn() + Send + Sync> {
        let waker = self.waker.clone();
        Arc::new(move || {
            let _full_means_woken = waker.wake();
        })
    }
}

impl Driver {
    pub(crate) fn start(parts: Parts, engine: Engine, listeners: Vec<Listener>) -> Result<Self> {
        let os = |call: &'static str| move |e: std::io::Error| Error::os("build", call, &e);
        let Parts { mut reactor, waker } = parts;
        let devices: Vec<Device> = engine.devices().cloned().collect();
        reactor.watch_devices(&devices).map_err(os("epoll"))?;
        let net =
            Net::new(reactor.registry().map_err(os("epoll"))?, listeners, devices.clone()).map_err(os("epoll"))?;
        let core = Arc::new(Core {
            state: Mutex::new(State { engine, net, waiting: BTreeMap::new() }),
            turn: Mutex::new(Turn {
                reactor: Some(Box::new(reactor)),
                callers: 0,
                parked: VecDeque::new(),
                entered: 0,
                lingering: false,
                linger: Linger::default(),
                stop: false,
            }),
            background: Condvar::new(),
            waker,
            posted: devices.iter().map(|_| AtomicBool::new(false)).collect(),
            devices,
            sleeping_until: AtomicU64::new(0),
        });
        let background = {
            let core = core.clone();
            std::thread::Builder::new()
                .name("towline".to_owned())
                .spawn(move || core.run_background())
                .map_err(os("spawn"))?
        };
        Ok(Self { core, background: Mutex::new(Some(background)) })
    }

    /// Calls into the engine, and does what it wants done.
    pub(crate) fn with<R>(&self, call: impl FnOnce(&mut Engine) -> R) -> R {
        self.core.with(call)
    }

    /// Drives until `take` has a result; it is asked again after each [`Action::Wake`] of `operation`.
    pub(crate) fn wait<R>(&self, operation: OperationId, mut take: impl FnMut(&mut Engine) -> Option<R>) -> R {
        let core = &*self.core;
        {
            let mut state = lock(&core.state);
            if let Some(result) = take(&mut state.engine) {
                return result;
            }
            state.waiting.insert(operation, std::thread::current());
        }
        core.enter();
        let result = loop {
            if let Some(result) = take(&mut lock(&core.state).engine) {
                break result;
            }
            core.take_turn(None);
        };
        core.leave();
        lock(&core.state).waiting.remove(&operation);
        result
    }

    /// A caller that has work of his own helps with the loop's, as long as he keeps this.
    pub(crate) fn lend_a_hand(&self) -> Hand<'_> {
        self.core.enter();
        Hand(&self.core)
    }

    pub(crate) fn close(&self, timeout: Duration) -> Stats {
        const AT_MOST: Tick = 1_000_000_000;
        const LOOK: Duration = Duration::from_millis(2);
        let core = &*self.core;
        let until = sys::boot_clock().saturating_add(u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX / 2));
        core.with(|engine| engine.begin_close(sys::boot_clock()));
        let drained = |until: Tick| {
            core.enter();
            while !lock(&core.state).engine.is_drained() && sys::boot_clock() < until {
                core.take_turn(Some(LOOK));
            }
            core.leave();
        };
        drained(until);
        // Whatever is left is fenced: our reads are flushed, what we exposed is out of reach.
        let left = core.with(|engine| engine.stats());
        core.with(|engine| engine.abort(sys::boot_clock()));
        drained(sys::boot_clock() + AT_MOST.min(until.saturating_sub(sys::boot_clock()).max(AT_MOST / 4)));
        left
    }

    /// After a close: tells those whose memory was viewed until now, if there are any, that it is no longer.
    pub(crate) fn say_last_words(&self) {
        const AT_MOST: Tick = 250_000_000;
        const LOOK: Duration = Duration::from_millis(2);
        let core = &*self.core;
        let until = sys::boot_clock() + AT_MOST;
        core.enter();
        while lock(&core.state).engine.has_last_words() && sys::boot_clock() < until {
            core.take_turn(Some(LOOK));
        }
        core.leave();
    }

    /// Ends the background thread.
    pub(crate) fn stop(&self) {
        lock(&self.core.turn).stop = true;
        self.core.background.notify_all();
        let _full_means_woken = self.core.waker.wake();
        let thread = lock(&self.background).take();
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            let _panicked = thread.join();
        }
    }
}

/// A caller that helps with the loop, but does not wait for it.
pub(crate) struct Hand<'a>(&'a Core);

impl Hand<'_> {
    /// One turn of the loop, which waits no longer than this for something to do; `false`, and nothing done, when somebody
    /// else is in it.
    pub(crate) fn turn(&self, at_most: Duration) -> bool {
        let reactor = lock(&self.0.turn).reactor.take();
        let Some(mut reactor) = reactor else { return false };
        self.0.run(&mut reactor, Some(at_most), true);
        self.0.give_back(reactor);
        true
    }
}

impl Drop for Hand<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

impl Core {
    fn with<R>(&self, call: impl FnOnce(&mut Engine) -> R) -> R {
        let mut state = lock(&self.state);
        let result = call(&mut state.engine);
        let woke = self.settle(&mut state);
        let next = state.engine.next_deadline();
        drop(state);
        let sleeps_too_long = next.is_some_and(|next| next < self.sleeping_until.load(Ordering::Acquire));
        // Whoever has his result may be the one who sleeps with the reactor: unparking does not reach him there.
        if woke || sleeps_too_long || self.posted.iter().any(|posted| posted.load(Ordering::Acquire)) {
            let _full_means_woken = self.waker.wake();
        }
        result
    }

    /// Does what the engine wants done. Whether another thread has its result now.
    fn settle(&self, state: &mut State) -> bool {
        let mut woke = false;
        while let Some(action) = state.engine.next_action() {
            match action {
                Action::Wake(operation) => {
                    if let Some(thread) = state.waiting.get(&operation)
                        && thread.id() != std::thread::current().id()
                    {
                        thread.unpark();
                        woke = true;
                    }
                }
                other => state.net.perform(&mut state.engine, other),
            }
        }
        for rail in state.engine.take_posted() {
            if let Some(posted) = self.posted.get(rail) {
                posted.store(true, Ordering::Release);
            }
        }
        woke
    }

    /// A caller begins to wait: the background thread gives him the reactor.
    fn enter(&self) {
        let mut turn = lock(&self.turn);
        turn.callers += 1;
        turn.entered += 1;
        let held = turn.reactor.is_none();
        let first = turn.callers == 1;
        drop(turn);
        if held && first {
            let _full_means_woken = self.waker.wake();
        }
    }

    fn leave(&self) {
        let mut turn = lock(&self.turn);
        turn.callers -= 1;
        let next = turn.parked.pop_front();
        let last = turn.callers == 0 && !turn.lingering;
        drop(turn);
        if let Some(next) = next {
            next.unpark();
        } else if last {
            self.background.notify_one();
        }
    }

    /// One turn of the loop with the reactor, or a rest until the reactor or a result is there.
    fn take_turn(&self, at_most: Option<Duration>) {
        let mut turn = lock(&self.turn);
        let Some(mut reactor) = turn.reactor.take() else {
            turn.parked.push_back(std::thread::current());
            drop(turn);
            // Whoever puts the reactor back, or brings the result, unparks this thread; the time limit only bounds the
            // harm of a holder that is stuck in a long copy.
            std::thread::park_timeout(at_most.unwrap_or(Duration::from_millis(100)));
            let me = std::thread::current().id();
            lock(&self.turn).parked.retain(|thread| thread.id() != me);
            return;
        };
        drop(turn);
        self.run(&mut reactor, at_most, true);
        self.give_back(reactor);
    }

    fn give_back(&self, reactor: Box<Reactor>) {
        let mut turn = lock(&self.turn);
        turn.reactor = Some(reactor);
        let next = turn.parked.pop_front();
        drop(turn);
        if let Some(next) = next {
            next.unpark();
        }
    }

    /// One turn of the loop.
    fn run(&self, reactor: &mut Reactor, at_most: Option<Duration>, caller: bool) {
        const STARVED: Duration = Duration::from_millis(50);
        let starved;
        let me = std::thread::current().id();
        let timeout = {
            let mut state = lock(&self.state);
            // Armed before they are looked at once more, so that a completion in between is not slept through.
            state.engine.arm();
            state.engine.pump(sys::boot_clock);
            self.settle(&mut state);
            if caller
                && state
                    .waiting
                    .iter()
                    .any(|(operation, thread)| thread.id() == me && state.engine.has_result(*operation))
            {
                return;
            }
            starved = state.net.is_starved();
            let next = state.engine.next_deadline().unwrap_or(Tick::MAX);
            self.sleeping_until.store(next, Ordering::Release);
            next.saturating_sub(sys::boot_clock())
        };
        let mut timeout = Duration::from_nanos(timeout.min(3_600_000_000_000));
        if let Some(at_most) = at_most {
            timeout = timeout.min(at_most);
        }
        if starved {
            timeout = timeout.min(STARVED);
        }
        for (device, posted) in self.posted.iter().enumerate() {
            if posted.swap(false, Ordering::AcqRel) {
                reactor.mark_ready(device);
            }
        }
        if reactor.any_ready() {
            timeout = Duration::ZERO;
        }
        reactor.poll(timeout);
        self.sleeping_until.store(0, Ordering::Release);
        if reactor.has_net_events() || starved {
            let mut state = lock(&self.state);
            let State { engine, net, .. } = &mut *state;
            net.serve_starved(engine);
            reactor.dispatch(|token, readiness| net.event(engine, token, readiness));
            self.settle(&mut state);
        }
        if reactor.progress(&self.devices) {
            let mut state = lock(&self.state);
            state.engine.pump(sys::boot_clock);
            self.settle(&mut state);
        }
    }

    /// Waits for the next caller, if that is worth it, as long as they come.
    fn linger<'t>(&self, mut turn: MutexGuard<'t, Turn>) -> MutexGuard<'t, Turn> {
        let come = turn.entered;
        if !turn.linger.is_worth_it(come) {
            return turn;
        }
        turn.lingering = true;
        while turn.callers == 0 && !turn.stop {
            let until = Instant::now() + LINGER;
            while !turn.stop {
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                let waited = self.background.wait_timeout(turn, left);
                turn = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
            }
            let come = turn.entered;
            if !turn.linger.was_worth_it(come) {
                break;
            }
        }
        turn.lingering = false;
        turn
    }

    fn run_background(&self) {
        loop {
            let mut turn = lock(&self.turn);
            let mut reactor = loop {
                if turn.stop {
                    return;
                }
                if turn.callers == 0 && turn.reactor.is_some() {
                    turn = self.linger(turn);
                    if !turn.stop
                        && turn.callers == 0
                        && let Some(reactor) = turn.reactor.take()
                    {
                        break reactor;
                    }
                    continue;
                }
                turn = self.background.wait(turn).unwrap_or_else(std::sync::PoisonError::into_inner);
            };
            drop(turn);
            self.run(&mut reactor, None, false);
            self.give_back(reactor);
        }
    }
}
