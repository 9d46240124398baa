//! A libibverbs of fakes, a world of its own for each thread: one device, whose objects count what depends on them as the
//! kernel does, whose queues complete what a test says, and whose calls fail when a test says so.
#![allow(unsafe_code)]

use crate::ibv::IbvProvider;
use crate::ibv::queue_pair::{PROBE, RECEIVE};
use core::cell::RefCell;
use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use core::ptr;
use rdma_core_sys::*;
use std::collections::{BTreeMap, HashMap, VecDeque};

thread_local! {
    static WORLD: RefCell<World> = RefCell::default();
}

/// What becomes of probes.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) enum Probes {
    /// What is there is read.
    #[default]
    Answered,
    /// Reads bring nothing, and say that they did.
    Wrong,
    /// Nothing becomes of them.
    Silent,
}

/// What this thread's fakes have seen, and what they are to do.
#[derive(Debug, Default)]
pub(super) struct World {
    /// How many of each kind of object there are.
    pub(super) live: BTreeMap<&'static str, u32>,
    /// Objects that were made, by address: kind, and what they depend on.
    objects: HashMap<usize, (&'static str, Vec<usize>)>,
    /// Destructions that were refused, as something still depended on the object.
    pub(super) busy: Vec<&'static str>,
    /// Calls that can fail, in order.
    pub(super) calls: Vec<&'static str>,
    /// Which of these calls, counted from 0, fails; and with which error number.
    pub(super) fail: Option<(usize, c_int)>,
    pub(super) probes: Probes,
    /// Requests of probes that were posted: number and opcode.
    pub(super) probing: Vec<(u64, u32)>,
    /// The receive that awaits a greeting, by queue pair.
    greetings: HashMap<usize, u64>,
    /// All of these receives, in order.
    pub(super) greetings_posted: Vec<u64>,
    /// All receives, in order.
    pub(super) received: Vec<u64>,
    /// Requests of callers and for windows that were posted: number and opcode.
    pub(super) posted: Vec<(u64, u32)>,
    /// Flags of the send requests that were posted.
    pub(super) flags: Vec<u32>,
    /// Bytes that were taken when they were posted.
    pub(super) inlined: Vec<Vec<u8>>,
    /// How often something was posted.
    pub(super) doorbells: u32,
    /// Whether the device has queue pairs whose requests are built by functions.
    pub(super) extended: bool,
    /// Bytes of a request that the device takes when it is posted; more are refused.
    pub(super) max_inline: u32,
    /// What functions have built and not posted yet; `None` outside of that.
    building: Option<Vec<(u64, u32, u32)>>,
    /// Whether the device does next to nothing, and has room for much: to count what is done before it.
    pub(super) lean: bool,
    /// How many requests a call of post_send takes before it fails.
    pub(super) post_takes: Option<usize>,
    pub(super) completions: VecDeque<ibv_wc>,
    pub(super) poll_fails: bool,
    pub(super) destroying_fails: bool,
    /// Asynchronous events that have happened, and the descriptor that tells of them.
    pub(super) events: VecDeque<ibv_async_event>,
    async_fd: c_int,
    /// Events of completion queues that have happened, how often one was asked for, and the channel's descriptor.
    queue_events: u32,
    pub(super) asked: u32,
    pub(super) queue_events_acknowledged: u32,
    channel_fd: c_int,
    /// The queue pair that was made last.
    pub(super) last_qp: usize,
    pub(super) events_acknowledged: u32,
    /// States that queue pairs were set to.
    pub(super) states: Vec<u32>,
    next_number: u32,
    /// The size of a region that the device says it takes at most, if not 1 GiB.
    pub(super) max_mr_size: u64,
    /// Regions that were made: function, address, bytes, access flags.
    pub(super) registered: Vec<(&'static str, usize, usize, c_int)>,
    /// Slices of requests that were posted.
    pub(super) slices: Vec<ibv_sge>,
    /// Whether the device says that it has memory windows.
    pub(super) windows: bool,
    /// Whether it has them.
    pub(super) no_windows_after_all: bool,
    pub(super) freeing_windows_fails: bool,
    windows_made: u32,
    /// Keys that requests for windows were posted with.
    pub(super) keys: Vec<u32>,
    /// The key that each window was bound to last.
    had: HashMap<usize, u32>,
    /// The remote key of the region that each key of a window was bound to.
    pub(super) bound_to: HashMap<u32, u32>,
    /// What each key opens: the window, and bytes.
    pub(super) open: HashMap<u32, (usize, u64, u64)>,
}

/// Looks at or changes this thread's world.
pub(super) fn world<R>(look: impl FnOnce(&mut World) -> R) -> R {
    WORLD.with_borrow_mut(look)
}

impl World {
    /// Notes a call that can fail; whether it does now.
    fn fails(&mut self, call: &'static str) -> bool {
        let at = self.calls.len();
        self.calls.push(call);
        match self.fail {
            Some((when, errno)) if when == at => {
                set_errno(errno);
                true
            }
            _ => false,
        }
    }

    fn made<T>(&mut self, kind: &'static str, object: T, on: &[usize]) -> *mut T {
        let made = Box::into_raw(Box::new(object));
        self.objects.insert(made.addr(), (kind, on.to_vec()));
        *self.live.entry(kind).or_default() += 1;
        made
    }

    /// Takes an object away, unless something depends on it.
    fn unmade<T>(&mut self, object: *mut T) -> c_int {
        let at = object.addr();
        if self.objects.values().any(|(_, on)| on.contains(&at)) {
            self.busy.push(self.objects[&at].0);
            return libc::EBUSY;
        }
        let (kind, _) = self.objects.remove(&at).expect("destroyed once");
        *self.live.get_mut(kind).expect("was made") -= 1;
        // SAFETY: made by `made`, of this type, and taken away once.
        drop(unsafe { Box::from_raw(object) });
        0
    }

    /// A bound window depends on its region and queue pair.
    fn window_request(&mut self, qp: *mut ibv_qp, wr: &ibv_send_wr) {
        match wr.opcode {
            IBV_WR_BIND_MW => {
                let (mw, info) = (wr.bind_mw.mw.addr(), wr.bind_mw.bind_info);
                self.keys.push(wr.bind_mw.rkey);
                self.bound_to.insert(wr.bind_mw.rkey, at(info.mr).rkey);
                let now = at(wr.bind_mw.mw).rkey;
                let had = self.had.insert(mw, wr.bind_mw.rkey);
                assert!(had.is_none_or(|had| had == now), "the key that it has is another");
                let twice = self.open.insert(wr.bind_mw.rkey, (mw, info.addr, info.length));
                assert!(twice.is_none_or(|(other, ..)| other != mw), "bound already");
                self.objects.get_mut(&mw).expect("alive").1.extend([qp.addr(), info.mr.addr()]);
            }
            IBV_WR_LOCAL_INV => {
                self.keys.push(wr.imm_data);
                let (mw, ..) = self.open.remove(&wr.imm_data).expect("a key that is bound");
                self.objects.get_mut(&mw).expect("alive").1.truncate(1);
            }
            _ => {}
        }
    }

    /// A request of a probe: queue pairs are connected to themselves.
    fn probe_request(&mut self, qp: *mut ibv_qp, wr: &ibv_send_wr) {
        self.probing.push((wr.wr_id, wr.opcode));
        if self.probes == Probes::Silent {
            return;
        }
        if wr.opcode == IBV_WR_RDMA_READ && self.probes == Probes::Answered {
            // SAFETY: a read has one slice.
            let to = unsafe { *wr.sg_list };
            // SAFETY: a read has this member.
            let from = unsafe { wr.wr.rdma }.remote_addr;
            let [from, into] = [from, to.addr].map(|address| ptr::with_exposed_provenance_mut::<u8>(address as usize));
            // SAFETY: both are registered memory of so many bytes.
            unsafe { ptr::copy_nonoverlapping(from, into, to.length as usize) };
        }
        let greeted = if wr.opcode == IBV_WR_SEND { self.greetings.remove(&qp.addr()) } else { None };
        for wr_id in greeted.into_iter().chain([wr.wr_id]) {
            self.completions.push_back(ibv_wc { wr_id, status: IBV_WC_SUCCESS, ..zeroed() });
        }
    }

    /// How many objects there are.
    pub(super) fn count(&self) -> u32 {
        self.live.values().sum()
    }
}

/// A completion of a request that was posted.
pub(super) fn completes(wr_id: u64, status: u32) {
    world(|world| world.completions.push_back(ibv_wc { wr_id, status, byte_len: 9, ..zeroed() }));
}

/// An asynchronous event happens, to the queue pair at this address if it is one of a queue pair.
pub(super) fn happens(event_type: u32, qp: usize) {
    let element = ibv_async_event_element { qp: ptr::without_provenance_mut(qp) };
    let fd = world(|world| {
        world.events.push_back(ibv_async_event { element, event_type });
        world.async_fd
    });
    ring(fd);
}

/// A completion queue makes the event that was asked for.
pub(super) fn queue_event() {
    let fd = world(|world| {
        world.queue_events += 1;
        world.channel_fd
    });
    ring(fd);
}

fn ring(fd: c_int) {
    let one = 1u64;
    // SAFETY: a descriptor of ours, 8 bytes.
    unsafe { libc::write(fd, (&raw const one).cast(), 8) };
}

/// Takes what made a descriptor of ours readable; the provider has made it non-blocking.
fn quiet(fd: c_int) {
    let mut count = 0u64;
    // SAFETY: a descriptor of ours; room for 8 bytes.
    unsafe { libc::read(fd, (&raw mut count).cast(), 8) };
}

fn set_errno(errno: c_int) {
    // SAFETY: the call has no precondition.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: this thread's own.
    unsafe { place.write(errno) };
}

/// A descriptor for what wants one.
fn descriptor() -> c_int {
    // SAFETY: the call takes integers.
    unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) }
}

fn close(fd: c_int) {
    // SAFETY: a descriptor of ours.
    unsafe { libc::close(fd) };
}

/// What a fake was given is alive.
fn at<'a, T>(pointer: *mut T) -> &'a mut T {
    // SAFETY: the provider hands in what the fakes made, or its own memory, for the time of the call.
    unsafe { &mut *pointer }
}

extern "C" fn get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    *at(count) = 1;
    let mut device: ibv_device = zeroed();
    (device.node_type, device.transport_type) = (IBV_NODE_CA, IBV_TRANSPORT_IB);
    let device = Box::leak(Box::new(device)); // devices stay as long as they are open; these are few
    Box::into_raw(Box::new([ptr::from_mut(device), ptr::null_mut()])).cast()
}

extern "C" fn free_device_list(list: *mut *mut ibv_device) {
    // SAFETY: made by `get_device_list`.
    drop(unsafe { Box::from_raw(list.cast::<[*mut ibv_device; 2]>()) });
}

extern "C" fn get_device_name(_: *mut ibv_device) -> *const c_char {
    c"fake0".as_ptr()
}

extern "C" fn open_device(device: *mut ibv_device) -> *mut ibv_context {
    world(|world| {
        if world.fails("open_device") {
            return ptr::null_mut();
        }
        let mut table: verbs_context = zeroed();
        table.sz = size_of::<verbs_context>();
        table.query_port = Some(query_port);
        table.create_qp_ex = Some(create_qp_ex);
        let context = &mut table.context;
        world.async_fd = descriptor();
        (context.device, context.async_fd) = (device, world.async_fd);
        context.abi_compat = ptr::without_provenance_mut(__VERBS_ABI_IS_EXTENDED);
        context.ops.poll_cq = Some(poll_cq);
        context.ops.req_notify_cq = Some(req_notify_cq);
        context.ops.post_send = Some(if world.lean { lean::post_send } else { post_send });
        context.ops.post_recv = Some(post_recv);
        context.ops.alloc_mw = Some(alloc_mw);
        context.ops.dealloc_mw = Some(dealloc_mw);
        let table = world.made("context", table, &[]);
        // SAFETY: just made.
        unsafe { &raw mut (*table).context }
    })
}

/// The table that a context lies in.
fn table(context: *mut ibv_context) -> *mut verbs_context {
    context.wrapping_byte_sub(core::mem::offset_of!(verbs_context, context)).cast()
}

extern "C" fn close_device(context: *mut ibv_context) -> c_int {
    let fd = at(context).async_fd;
    let closed = world(|world| world.unmade(table(context)));
    if closed == 0 {
        close(fd);
        return 0;
    }
    set_errno(closed);
    -1
}

extern "C" fn query_device(_: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
    if world(|world| world.fails("query_device")) {
        return libc::EIO;
    }
    *at(attr) = ibv_device_attr {
        phys_port_cnt: 2,
        max_qp_wr: if world(|world| world.lean) { 4096 } else { 100 },
        max_sge: 4,
        max_cqe: if world(|world| world.lean) { 10_000 } else { 1000 },
        max_mr_size: world(|world| if world.max_mr_size > 0 { world.max_mr_size } else { 1 << 30 }),
        max_mr: 100,
        max_qp_rd_atom: 128,
        max_qp_init_rd_atom: 8,
        device_cap_flags: if world(|world| world.windows) { IBV_DEVICE_MEM_WINDOW_TYPE_2B } else { 0 },
        ..zeroed()
    };
    0
}

unsafe extern "C" fn query_port(_: *mut ibv_context, port: u8, attr: *mut ibv_port_attr, _: usize) -> c_int {
    if world(|world| world.fails("query_port")) {
        return libc::EIO;
    }
    *at(attr) = ibv_port_attr {
        // The first port is down.
        state: if port == 1 { IBV_PORT_DOWN } else { IBV_PORT_ACTIVE },
        link_layer: IBV_LINK_LAYER_ETHERNET,
        active_mtu: IBV_MTU_4096,
        max_msg_sz: 1 << 30,
        pkey_tbl_len: 2,
        ..zeroed()
    };
    0
}

extern "C" fn query_gid_table(_: *mut ibv_context, entries: *mut ibv_gid_entry, _: usize, _: u32, _: usize) -> isize {
    if world(|world| world.fails("query_gid_table")) {
        return -(libc::EIO as isize);
    }
    let raw = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1];
    *at(entries) = ibv_gid_entry {
        gid: ibv_gid { raw },
        gid_index: 3,
        port_num: 2,
        gid_type: IBV_GID_TYPE_ROCE_V2,
        ndev_ifindex: 1,
    };
    1
}

extern "C" fn query_pkey(_: *mut ibv_context, _: u8, index: c_int, pkey: *mut u16) -> c_int {
    if world(|world| world.fails("query_pkey")) {
        return -1;
    }
    // A limited member, then a full one.
    *at(pkey) = if index == 0 { 0x7fff_u16.to_be() } else { 0x8001_u16.to_be() };
    0
}

extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    world(|world| match world.fails("alloc_pd") {
        true => ptr::null_mut(),
        false => world.made("pd", ibv_pd { context, handle: 0 }, &[table(context).addr()]),
    })
}

extern "C" fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    world(|world| world.unmade(pd))
}

fn registers(call: &'static str, pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr {
    world(|world| match world.fails(call) {
        true => ptr::null_mut(),
        false => {
            world.registered.push((call, addr.addr(), length, access));
            let key = world.registered.len() as u32;
            world.made(
                "mr",
                ibv_mr { pd, addr, length, lkey: key << 8 | 1, rkey: key << 8 | 2, ..zeroed() },
                &[pd.addr()],
            )
        }
    })
}

extern "C" fn reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr {
    registers("reg_mr", pd, addr, length, access)
}

extern "C" fn reg_mr_iova2(pd: *mut ibv_pd, addr: *mut c_void, len: usize, iova: u64, access: c_uint) -> *mut ibv_mr {
    assert_eq!(iova, addr.addr() as u64);
    registers("reg_mr_iova2", pd, addr, len, access as c_int)
}

extern "C" fn dereg_mr(mr: *mut ibv_mr) -> c_int {
    world(|world| world.unmade(mr))
}

unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, mw_type: u32) -> *mut ibv_mw {
    assert_eq!(mw_type, IBV_MW_TYPE_2);
    world(|world| match world.no_windows_after_all || world.fails("alloc_mw") {
        true => {
            set_errno(libc::EOPNOTSUPP);
            ptr::null_mut()
        }
        false => {
            let context = at(pd).context;
            world.windows_made += 1;
            world.made(
                "mw",
                ibv_mw { context, pd, rkey: world.windows_made << 8 | 0xfe, handle: 0, r#type: mw_type },
                &[pd.addr()],
            )
        }
    })
}

unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    world(|world| {
        if world.freeing_windows_fails {
            return libc::EIO;
        }
        world.open.retain(|_, (window, ..)| *window != mw.addr());
        world.had.remove(&mw.addr());
        world.unmade(mw)
    })
}

extern "C" fn create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    world(|world| match world.fails("create_comp_channel") {
        true => ptr::null_mut(),
        false => {
            let channel = ibv_comp_channel { context, fd: descriptor(), refcnt: 0 };
            world.channel_fd = channel.fd;
            world.made("channel", channel, &[table(context).addr()])
        }
    })
}

extern "C" fn destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    let fd = at(channel).fd;
    let destroyed = world(|world| world.unmade(channel));
    if destroyed == 0 {
        close(fd);
    }
    destroyed
}

extern "C" fn create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    _: *mut c_void,
    channel: *mut ibv_comp_channel,
    _: c_int,
) -> *mut ibv_cq {
    world(|world| match world.fails("create_cq") {
        true => ptr::null_mut(),
        false => {
            let cq = ibv_cq { context, channel, cqe, ..zeroed() };
            world.made("cq", cq, &[table(context).addr(), channel.addr()])
        }
    })
}

extern "C" fn destroy_cq(cq: *mut ibv_cq) -> c_int {
    world(|world| world.unmade(cq))
}

extern "C" fn create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    world(|world| {
        if world.fails("create_qp") {
            return ptr::null_mut();
        }
        let (context, init) = (at(pd).context, at(init));
        if init.cap.max_inline_data > world.max_inline {
            set_errno(libc::EINVAL);
            return ptr::null_mut();
        }
        init.cap.max_inline_data = world.max_inline;
        // Numbers come round at once.
        world.next_number = world.next_number % 2 + 1;
        let qp_base = ibv_qp { context, pd, qp_num: world.next_number, ..zeroed() };
        let qp = ibv_qp_ex { qp_base, ..zeroed() };
        let qp = world.made("qp", qp, &[pd.addr(), init.send_cq.addr(), init.recv_cq.addr()]).cast::<ibv_qp>();
        world.last_qp = qp.addr();
        qp
    })
}

extern "C" fn modify_qp(_: *mut ibv_qp, attr: *mut ibv_qp_attr, _: c_int) -> c_int {
    world(|world| {
        world.states.push(at(attr).qp_state);
        // Nothing can be done about a queue pair that does not go to the error state but to destroy it.
        if at(attr).qp_state != IBV_QPS_ERR && world.fails("modify_qp") { libc::EINVAL } else { 0 }
    })
}

extern "C" fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    world(|world| if world.destroying_fails { libc::EIO } else { world.unmade(qp.cast::<ibv_qp_ex>()) })
}

extern "C" fn get_async_event(_: *mut ibv_context, event: *mut ibv_async_event) -> c_int {
    match world(|world| world.events.pop_front()) {
        Some(next) => {
            *at(event) = next;
            0
        }
        None => {
            quiet(world(|world| world.async_fd));
            set_errno(libc::EAGAIN);
            -1
        }
    }
}

extern "C" fn ack_async_event(_: *mut ibv_async_event) {
    world(|world| world.events_acknowledged += 1);
}

extern "C" fn get_cq_event(channel: *mut ibv_comp_channel, _: *mut *mut ibv_cq, _: *mut *mut c_void) -> c_int {
    let left = world(|world| world.queue_events.checked_sub(1).map(|left| world.queue_events = left));
    if left.is_some() {
        return 0;
    }
    quiet(at(channel).fd);
    set_errno(libc::EAGAIN);
    -1
}

extern "C" fn ack_cq_events(_: *mut ibv_cq, count: c_uint) {
    world(|world| world.queue_events_acknowledged += count);
}

extern "C" fn is_fork_initialized() -> u32 {
    IBV_FORK_UNNEEDED
}

unsafe extern "C" fn poll_cq(_: *mut ibv_cq, room: c_int, wc: *mut ibv_wc) -> c_int {
    world(|world| {
        if world.poll_fails {
            return -1;
        }
        let count = world.completions.len().min(room as usize);
        for (i, completion) in world.completions.drain(..count).enumerate() {
            *at(wc.wrapping_add(i)) = completion;
        }
        count as c_int
    })
}

unsafe extern "C" fn req_notify_cq(_: *mut ibv_cq, _: c_int) -> c_int {
    world(|world| world.asked += 1);
    0
}

unsafe extern "C" fn post_send(qp: *mut ibv_qp, wr: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> c_int {
    world(|world| {
        world.doorbells += 1;
        let (mut next, mut taken) = (wr, 0);
        while !next.is_null() {
            if world.post_takes == Some(taken) {
                *at(bad) = next;
                return libc::ENOMEM;
            }
            if at(next).wr_id & PROBE == 0 {
                world.posted.push((at(next).wr_id, at(next).opcode));
                world.window_request(qp, at(next));
                world.flags.push(at(next).send_flags);
                world.slices.extend((0..at(next).num_sge as usize).map(|i| *at(at(next).sg_list.wrapping_add(i))));
                if at(next).send_flags & IBV_SEND_INLINE != 0 {
                    let slices = (0..at(next).num_sge as usize).map(|i| *at(at(next).sg_list.wrapping_add(i)));
                    world.inlined.push(slices.flat_map(|sge| bytes(sge.addr as usize, sge.length as usize)).collect());
                }
            } else {
                world.probe_request(qp, at(next));
            }
            taken += 1;
            next = at(next).next;
        }
        0
    })
}

/// Bytes of memory that is mapped.
fn bytes(address: usize, len: usize) -> Vec<u8> {
    let address = ptr::with_exposed_provenance::<u8>(address);
    // SAFETY: what a request takes at once is mapped while it is posted, and nobody writes it.
    unsafe { core::slice::from_raw_parts(address, len) }.to_vec()
}

unsafe extern "C" fn create_qp_ex(_: *mut ibv_context, init: *mut ibv_qp_init_attr_ex) -> *mut ibv_qp {
    if !world(|world| world.extended) {
        set_errno(libc::EOPNOTSUPP);
        return ptr::null_mut();
    }
    let lean = world(|world| world.lean);
    // The attributes of both faces begin alike.
    let qp = create_qp(at(init).pd, init.cast());
    if !qp.is_null() {
        let ex = at(qp.cast::<ibv_qp_ex>());
        ex.wr_start = Some(if lean { lean::nothing } else { wr_start });
        ex.wr_complete = Some(if lean { lean::complete } else { wr_complete });
        ex.wr_abort = Some(if lean { lean::nothing } else { wr_abort });
        ex.wr_rdma_read = Some(if lean { lean::one_sided } else { wr_rdma_read });
        ex.wr_rdma_write = Some(if lean { lean::one_sided } else { wr_rdma_write });
        ex.wr_rdma_write_imm = Some(wr_rdma_write_imm);
        ex.wr_send = Some(wr_send);
        ex.wr_send_imm = Some(wr_send_imm);
        ex.wr_set_sge = Some(if lean { lean::set_sge } else { wr_set_sge });
        ex.wr_set_sge_list = Some(wr_set_sge_list);
        ex.wr_set_inline_data_list = Some(wr_set_inline_data_list);
    }
    qp
}

extern "C" fn qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
    let ex = qp.cast::<ibv_qp_ex>();
    if at(ex).wr_start.is_some() { ex } else { ptr::null_mut() }
}

unsafe extern "C" fn wr_start(_: *mut ibv_qp_ex) {
    world(|world| assert!(world.building.replace(vec![]).is_none(), "begun twice"));
}

unsafe extern "C" fn wr_abort(_: *mut ibv_qp_ex) {
    world(|world| assert!(world.building.take().is_some(), "not begun"));
}

unsafe extern "C" fn wr_complete(_: *mut ibv_qp_ex) -> c_int {
    world(|world| {
        world.doorbells += 1;
        let built = world.building.take().expect("begun");
        if world.post_takes.is_some() {
            return libc::ENOMEM;
        }
        for (wr_id, opcode, flags) in built {
            world.posted.push((wr_id, opcode));
            world.flags.push(flags);
        }
        0
    })
}

fn built(ex: *mut ibv_qp_ex, opcode: u32) {
    let (wr_id, flags) = (at(ex).wr_id, at(ex).wr_flags);
    world(|world| world.building.as_mut().expect("begun").push((wr_id, opcode, flags)));
}

unsafe extern "C" fn wr_rdma_read(ex: *mut ibv_qp_ex, _: u32, _: u64) {
    built(ex, IBV_WR_RDMA_READ);
}

unsafe extern "C" fn wr_rdma_write(ex: *mut ibv_qp_ex, _: u32, _: u64) {
    built(ex, IBV_WR_RDMA_WRITE);
}

unsafe extern "C" fn wr_rdma_write_imm(ex: *mut ibv_qp_ex, _: u32, _: u64, _: u32) {
    built(ex, IBV_WR_RDMA_WRITE_WITH_IMM);
}

unsafe extern "C" fn wr_send(ex: *mut ibv_qp_ex) {
    built(ex, IBV_WR_SEND);
}

unsafe extern "C" fn wr_send_imm(ex: *mut ibv_qp_ex, _: u32) {
    built(ex, IBV_WR_SEND_WITH_IMM);
}

unsafe extern "C" fn wr_set_sge(_: *mut ibv_qp_ex, _: u32, _: u64, length: u32) {
    assert!(length > 0, "2^31 to some devices");
}

unsafe extern "C" fn wr_set_sge_list(_: *mut ibv_qp_ex, count: usize, list: *const ibv_sge) {
    for i in 0..count {
        assert!(at(list.cast_mut().wrapping_add(i)).length > 0, "2^31 to some devices");
    }
}

unsafe extern "C" fn wr_set_inline_data_list(_: *mut ibv_qp_ex, count: usize, list: *const ibv_data_buf) {
    let list = (0..count).map(|i| *at(list.cast_mut().wrapping_add(i)));
    let taken = list.flat_map(|buf| bytes(buf.addr.addr(), buf.length)).collect();
    world(|world| world.inlined.push(taken));
}

/// What a device does at the least with a request: it reads it.
mod lean {
    use super::*;
    use core::hint::black_box;

    pub(super) unsafe extern "C" fn post_send(
        _: *mut ibv_qp,
        mut wr: *mut ibv_send_wr,
        _: *mut *mut ibv_send_wr,
    ) -> c_int {
        while !wr.is_null() {
            black_box(at(wr).wr_id);
            wr = at(wr).next;
        }
        0
    }

    pub(super) unsafe extern "C" fn nothing(_: *mut ibv_qp_ex) {}

    pub(super) unsafe extern "C" fn complete(_: *mut ibv_qp_ex) -> c_int {
        world(|world| world.doorbells += 1);
        0
    }

    pub(super) unsafe extern "C" fn one_sided(ex: *mut ibv_qp_ex, _: u32, _: u64) {
        black_box(at(ex).wr_id);
    }

    pub(super) unsafe extern "C" fn set_sge(_: *mut ibv_qp_ex, lkey: u32, _: u64, _: u32) {
        black_box(lkey);
    }
}

unsafe extern "C" fn post_recv(qp: *mut ibv_qp, wr: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int {
    world(|world| {
        if world.fails("post_recv") {
            *at(bad) = wr;
            return libc::EINVAL;
        }
        match at(wr).wr_id {
            greeting if greeting & PROBE != 0 => {
                assert_eq!(greeting & RECEIVE, RECEIVE);
                world.greetings.insert(qp.addr(), greeting);
                world.greetings_posted.push(greeting);
                world.received.push(greeting);
            }
            own => {
                world.posted.push((own, u32::MAX));
                world.received.push(own);
            }
        }
        0
    })
}

/// Stands for functions that the provider does not call.
extern "C" fn not_called() {
    std::process::abort();
}

fn lookup(symbol: &CStr, _: &CStr) -> *mut c_void {
    match symbol.to_str().unwrap_or_default() {
        "ibv_get_device_list" => get_device_list as *mut c_void,
        "ibv_free_device_list" => free_device_list as *mut c_void,
        "ibv_get_device_name" => get_device_name as *mut c_void,
        "ibv_open_device" => open_device as *mut c_void,
        "ibv_close_device" => close_device as *mut c_void,
        "ibv_query_device" => query_device as *mut c_void,
        "_ibv_query_gid_table" => query_gid_table as *mut c_void,
        "ibv_query_pkey" => query_pkey as *mut c_void,
        "ibv_alloc_pd" => alloc_pd as *mut c_void,
        "ibv_dealloc_pd" => dealloc_pd as *mut c_void,
        "ibv_reg_mr" => reg_mr as *mut c_void,
        "ibv_reg_mr_iova2" => reg_mr_iova2 as *mut c_void,
        "ibv_dereg_mr" => dereg_mr as *mut c_void,
        "ibv_create_comp_channel" => create_comp_channel as *mut c_void,
        "ibv_destroy_comp_channel" => destroy_comp_channel as *mut c_void,
        "ibv_create_cq" => create_cq as *mut c_void,
        "ibv_destroy_cq" => destroy_cq as *mut c_void,
        "ibv_create_qp" => create_qp as *mut c_void,
        "ibv_qp_to_qp_ex" => qp_to_qp_ex as *mut c_void,
        "ibv_modify_qp" => modify_qp as *mut c_void,
        "ibv_destroy_qp" => destroy_qp as *mut c_void,
        "ibv_get_async_event" => get_async_event as *mut c_void,
        "ibv_ack_async_event" => ack_async_event as *mut c_void,
        "ibv_get_cq_event" => get_cq_event as *mut c_void,
        "ibv_ack_cq_events" => ack_cq_events as *mut c_void,
        "ibv_is_fork_initialized" => is_fork_initialized as *mut c_void,
        _ => not_called as *mut c_void,
    }
}

/// A provider over the fakes.
pub(super) fn provider() -> IbvProvider {
    provider_without("")
}

/// The same, of a library that lacks this function.
pub(super) fn provider_without(symbol: &str) -> IbvProvider {
    let lookup = |name: &'static CStr, version: &'static CStr| {
        if name.to_str() == Ok(symbol) { ptr::null_mut() } else { lookup(name, version) }
    };
    // SAFETY: each fake has the signature of the function that it stands for; what is not called ends the test.
    let library = unsafe { Library::resolve(lookup) }.unwrap();
    IbvProvider::over(Box::leak(Box::new(library)))
}
