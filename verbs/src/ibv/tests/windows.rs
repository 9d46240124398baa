//! Memory windows: keys of one payload, one lease, one queue pair.

use super::fake::{completes, world};
use super::{All, CAPACITY, poll};
use crate::memory::HugePages;
use crate::{Access, Cause, Memory, MemoryRegion, MemoryWindow, QueuePairState, Result};
use rdma_core_sys::*;

/// As [`All`], on a device with windows, and memory that they can be bound to.
struct Opened {
    all: All,
    pool: MemoryRegion,
}

impl Opened {
    fn new() -> Self {
        world(|world| world.windows = true);
        let all = All::new();
        let pool = all.pd.register(Memory::shared(1 << 16, HugePages::Off).unwrap(), Access::MW_BIND).unwrap();
        Self { all, pool }
    }

    fn bind(&self, offset: u64, len: u64) -> Result<MemoryWindow> {
        self.pool.bind(&self.all.qp, offset, len)
    }
}

/// The number of the last request for a window.
fn last() -> u64 {
    let number = |&(number, opcode): &(u64, u32)| matches!(opcode, IBV_WR_BIND_MW | IBV_WR_LOCAL_INV).then_some(number);
    world(|world| world.posted.iter().rev().find_map(number).unwrap())
}

/// The device does what was posted last.
fn done() {
    completes(last(), IBV_WC_SUCCESS);
}

fn windows() -> u32 {
    world(|world| world.live["mw"])
}

#[test]
fn a_device_without_windows_says_so() {
    for (says, has) in [(false, true), (true, false)] {
        world(|world| (world.windows, world.no_windows_after_all) = (says, !has));
        let all = All::new();
        assert!(!all.device.info().capabilities.scoped_keys);
        assert_eq!(all.device.info().capabilities.max_send_wr, 98);
        let region = all.pd.register(Memory::shared(4096, HugePages::Off).unwrap(), Access::MW_BIND).unwrap();
        assert!(matches!(region.bind(&all.qp, 0, 1).unwrap_err().cause, Cause::Unsupported { .. }));
    }
}

#[test]
fn a_window_is_bound_when_the_device_says_so_and_ends_when_the_device_says_so() {
    let opened = Opened::new();
    let can = opened.all.device.info().capabilities;
    assert!(can.scoped_keys && can.max_send_wr == 98 - super::super::queue_pair::WINDOW_REQUESTS);
    let window = opened.bind(4096, 100).unwrap();
    assert!(!window.is_bound(), "the peer must not have the key yet");
    done();
    assert!(window.is_bound());
    let remote = window.remote();
    let (_, address, len) = world(|world| world.open[&(remote.rkey as u32)]);
    assert_eq!((address, len), (remote.address, 100));
    assert_eq!(remote.address, opened.pool.remote(4096, 100).unwrap().address);
    assert_ne!(remote.rkey, opened.pool.remote(4096, 100).unwrap().rkey);

    assert!(!window.invalidate() && !window.invalidate(), "asked for, not done");
    assert!(!window.is_bound());
    done();
    assert!(window.invalidate() && window.invalidate());
    assert_eq!(world(|world| world.keys.len()), 2, "one request each");
    assert!(poll(&opened.all.cq).is_empty(), "nobody's requests");
}

#[test]
fn a_key_is_taken_back_right_behind_its_binding() {
    let opened = Opened::new();
    let window = opened.bind(0, 100).unwrap();
    let bind = last();
    assert!(!window.invalidate());
    completes(bind, IBV_WC_SUCCESS);
    assert!(!window.is_bound() && !window.invalidate(), "bound, and to be made invalid");
    done();
    assert!(window.invalidate());
    // Its owner need not ask.
    drop(opened.bind(0, 100).unwrap());
    done();
    poll(&opened.all.cq);
    let idle = opened.bind(0, 100).unwrap();
    assert_eq!(windows(), 1, "the same window again");
    drop(idle);
}

// Every key is another one, also where a window is bound 255 times: it is freed before its tags come round.
#[test]
fn no_window_has_a_key_twice() {
    let opened = Opened::new();
    for round in 0..600 {
        let window = opened.bind(round % 7, 100).unwrap();
        done();
        assert!(window.is_bound());
        assert!(!window.invalidate());
        done();
        assert!(window.invalidate());
        let keys = world(|world| world.keys.len());
        assert_eq!(keys as u64, 2 * (round + 1));
        assert_eq!(windows(), u32::from((round + 1) % 255 != 0), "round {round}");
    }
    let keys = world(|world| world.keys.iter().step_by(2).copied().collect::<Vec<_>>());
    for lives in keys.chunks(255) {
        let mut distinct = lives.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), lives.len());
        assert!(
            lives.iter().all(|key| key >> 8 == lives[0] >> 8 && key & 0xff != 0xfe),
            "not the one that it came with"
        );
    }
}

#[test]
fn requests_for_windows_wait_for_room_and_take_none_from_callers() {
    let opened = Opened::new();
    let most = CAPACITY.max_send_wr + CAPACITY.max_recv_wr - 1;
    let bound: Vec<_> = (0..u64::from(most) + 5).map(|at| opened.bind(at, 1).unwrap()).collect();
    assert_eq!(world(|world| world.keys.len()), most as usize);
    opened.all.post(0..u64::from(CAPACITY.max_send_wr)).unwrap();
    assert!(!bound[0].invalidate() && world(|world| world.keys.len()) == most as usize, "behind those that wait");
    // One that was not posted was never bound.
    assert!(bound[most as usize + 4].invalidate());
    let numbers =
        world(|world| world.posted.iter().filter(|(_, op)| *op == IBV_WR_BIND_MW).map(|p| p.0).collect::<Vec<_>>());
    for number in numbers {
        completes(number, IBV_WC_SUCCESS);
    }
    assert!(bound[1].is_bound() && !bound[0].is_bound());
    assert_eq!(world(|world| world.keys.len()), most as usize + 5, "four binds, and a key taken back");
    done();
    assert!(bound[0].invalidate());
}

#[test]
fn a_request_that_fails_breaks_the_queue_pair_and_the_window_is_freed() {
    let opened = Opened::new();
    let window = opened.bind(0, 100).unwrap();
    let other = opened.bind(100, 100).unwrap();
    completes(last(), IBV_WC_MW_BIND_ERR);
    assert!(!other.is_bound() && !window.is_bound());
    assert_eq!(opened.all.qp.state(), QueuePairState::Error);
    assert!(matches!(opened.all.qp.failure().unwrap().cause, Cause::Denied { .. }));
    assert!(matches!(opened.bind(0, 1).unwrap_err().cause, Cause::State { .. }));
    // Invalidation by request would flush: they are freed.
    let requests = world(|world| world.keys.len());
    assert!(window.invalidate() && other.invalidate());
    assert_eq!((windows(), world(|world| world.keys.len())), (0, requests));

    let opened = Opened::new();
    world(|world| world.post_takes = Some(0));
    assert!(matches!(opened.bind(0, 100).unwrap_err().cause, Cause::Os { errno: libc::ENOMEM, .. }));
    assert_eq!((opened.all.qp.state(), windows()), (QueuePairState::Error, 0));
}

#[test]
fn a_window_that_cannot_be_freed_is_open_until_its_queue_pair_is_gone() {
    let opened = Opened::new();
    let window = opened.bind(0, 100).unwrap();
    done();
    assert!(window.is_bound());
    opened.all.qp.to_error();
    world(|world| (world.freeing_windows_fails, world.destroying_fails) = (true, true));
    assert!(!window.invalidate() && !window.invalidate());
    assert!(!opened.all.qp.is_fenced() && !window.invalidate());
    world(|world| world.freeing_windows_fails = false);
    assert!(window.invalidate(), "by itself");
    assert_eq!(windows(), 0);
    world(|world| world.destroying_fails = false);
}

// Nothing may be bound to what is destroyed, whatever the order in which handles go.
#[test]
fn windows_end_before_their_queue_pair_and_region() {
    for round in 0..24usize {
        let Opened { all, pool } = Opened::new();
        let (bound, binding) = (pool.bind(&all.qp, 0, 10).unwrap(), pool.bind(&all.qp, 10, 10).unwrap());
        let idle = pool.bind(&all.qp, 20, 10).unwrap();
        let _asked = idle.invalidate();
        let mut handles: Vec<Box<dyn std::any::Any>> = vec![Box::new((bound, binding)), Box::new(pool), Box::new(all)];
        handles.push(Box::new(idle));
        let mut rest = round;
        while !handles.is_empty() {
            let at = rest % handles.len();
            rest /= handles.len();
            drop(handles.swap_remove(at));
        }
        world(|world| assert_eq!((world.count(), world.busy.len()), (0, 0), "round {round}: {:?}", world.live));
    }
}

#[test]
fn a_fence_ends_all_windows() {
    let opened = Opened::new();
    let window = opened.bind(0, 100).unwrap();
    done();
    assert!(window.is_bound());
    opened.all.qp.to_error();
    assert!(opened.all.qp.is_fenced());
    assert!(!window.is_bound() && window.invalidate());
    assert_eq!((windows(), world(|world| world.busy.len())), (0, 0));
}

#[test]
fn what_can_not_be_bound_is_refused() {
    let opened = Opened::new();
    let Opened { all, pool } = &opened;
    assert!(matches!(all.region.bind(&all.qp, 0, 1).unwrap_err().cause, Cause::Denied { what: "MW_BIND" }));
    assert!(matches!(pool.bind(&all.qp, pool.len(), 1).unwrap_err().cause, Cause::OutOfRange { .. }));
    assert!(matches!(pool.bind(&all.qp, 0, 0).unwrap_err().cause, Cause::OutOfRange { .. }));
    let early =
        all.pd.create_qp(&all.cq, &all.cq, crate::QueuePairCapacity { max_send_wr: 1, max_recv_wr: 1 }).unwrap();
    assert!(matches!(pool.bind(&early, 0, 1).unwrap_err().cause, Cause::State { is: QueuePairState::Reset, .. }));
    let other = all.device.alloc_pd().unwrap();
    let foreign =
        other.create_qp(&all.cq, &all.cq, crate::QueuePairCapacity { max_send_wr: 1, max_recv_wr: 1 }).unwrap();
    foreign.connect(&all.qp.address(), true).unwrap();
    assert!(matches!(pool.bind(&foreign, 0, 1).unwrap_err().cause, Cause::Denied { .. }));
    world(|world| world.fail = Some((world.calls.len(), libc::ENOMEM)));
    assert!(matches!(opened.bind(0, 1).unwrap_err().cause, Cause::Os { call: "ibv_alloc_mw", .. }));
    assert_eq!(format!("{:?}", opened.bind(0, 1).unwrap()).matches("rkey").count(), 0, "keys are secrets");
}
