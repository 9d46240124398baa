//! What the tests need: an open device with a queue, memory that is registered, connected queue pairs.

use core::ffi::c_int;
use core::marker::PhantomData;
use core::mem::ManuallyDrop;
use core::ptr;
use rdma_core_sys::*;
use std::time::{Duration, Instant};

/// Where the ports of the devices are, and the tests' values for what connections negotiate.
const PORT: u8 = 1;
const PSN: u32 = 0x00_12_34;
/// 12: about 0.64 ms; soft-RoCE storms at smaller values.
const MIN_RNR_TIMER: u8 = 12;
/// 4.096 us * 2^14: 67 ms.
const TIMEOUT: u8 = 14;

/// All that a peer may do.
pub(crate) const ALL: c_int = IBV_ACCESS_LOCAL_WRITE
    | IBV_ACCESS_REMOTE_WRITE
    | IBV_ACCESS_REMOTE_READ
    | IBV_ACCESS_REMOTE_ATOMIC
    | IBV_ACCESS_MW_BIND;

/// The names of the two devices.
pub(crate) fn names() -> [String; 2] {
    let names = std::env::var("TOWLINE_DEVICES").unwrap_or_else(|_| "rxe0,rxe1".into());
    let (first, second) = names.split_once(',').expect("TOWLINE_DEVICES names two devices");
    [first.into(), second.into()]
}

/// Waits without being misled when the whole machine is stopped for a while: a step counts as a tenth of a second at most.
pub(crate) struct Patience {
    left: Duration,
    last: Instant,
}

impl Patience {
    pub(crate) fn new(seconds: u64) -> Self {
        Self { left: Duration::from_secs(seconds), last: Instant::now() }
    }

    /// Gives the processor to others; fails when the time is up.
    pub(crate) fn wait(&mut self, what: &str) {
        std::thread::yield_now();
        let step = self.last.elapsed().min(Duration::from_millis(100));
        self.last = Instant::now();
        self.left = self.left.saturating_sub(step);
        assert!(!self.left.is_zero(), "waited too long for {what}");
    }
}

/// An open device with a protection domain and a completion queue.
#[derive(Debug)]
pub(crate) struct Bed {
    pub(crate) library: &'static Library,
    pub(crate) context: *mut ibv_context,
    pub(crate) pd: *mut ibv_pd,
    pub(crate) channel: *mut ibv_comp_channel,
    pub(crate) cq: *mut ibv_cq,
}

impl Bed {
    /// Opens the first device.
    pub(crate) fn new() -> Self {
        Self::on(&names()[0])
    }

    pub(crate) fn on(name: &str) -> Self {
        let library = Library::load().unwrap();
        let list = library.devices().unwrap();
        let index = (0..list.len()).find(|&i| list.name(i).as_deref() == Some(name)).expect("the device is there");
        // SAFETY: a device of a list that is alive.
        let context = unsafe { library.ibv_open_device(list.get(index).unwrap().as_ptr()) }.unwrap().as_ptr();
        // SAFETY: open.
        let pd = unsafe { library.ibv_alloc_pd(context) }.unwrap().as_ptr();
        // SAFETY: open.
        let channel = unsafe { library.ibv_create_comp_channel(context) }.unwrap().as_ptr();
        // SAFETY: open, and the channel is of it.
        let cq = unsafe { library.ibv_create_cq(context, 256, ptr::null_mut(), channel, 0) }.unwrap().as_ptr();
        Self { library, context, pd, channel, cq }
    }

    pub(crate) fn device_attr(&self) -> ibv_device_attr {
        let mut attr = zeroed();
        // SAFETY: open.
        unsafe { self.library.ibv_query_device(self.context, &raw mut attr) }.unwrap();
        attr
    }

    pub(crate) fn port_attr(&self) -> ibv_port_attr {
        let mut attr = zeroed();
        // SAFETY: open.
        unsafe { self.library.ibv_query_port(self.context, PORT, &raw mut attr) }.unwrap();
        attr
    }

    /// The GIDs of the port.
    pub(crate) fn gids(&self) -> Vec<ibv_gid_entry> {
        let mut entries = [zeroed(); 64];
        // SAFETY: open.
        let found = unsafe { self.library.ibv_query_gid_table(self.context, &mut entries) }.unwrap();
        entries[..found].to_vec()
    }

    /// The one of RoCE v2 with an IPv4 address.
    pub(crate) fn gid(&self) -> ibv_gid_entry {
        let is = |entry: &ibv_gid_entry| entry.gid_type == IBV_GID_TYPE_ROCE_V2 && raw(&entry.gid)[..12] == MAPPED;
        self.gids().into_iter().find(is).expect("a GID of RoCE v2 with an IPv4 address")
    }

    /// Waits for a completion.
    pub(crate) fn completion(&self) -> ibv_wc {
        poll(self.cq)
    }

    /// Registers `bytes`.
    pub(crate) fn register(&self, len: usize, access: c_int) -> Region {
        Region::new(self, len, access)
    }

    pub(crate) fn queue_pair(&self) -> Qp {
        Qp::new(self, ptr::null_mut())
    }

    /// Two queue pairs of this device that are connected to each other.
    pub(crate) fn pair(&self) -> (Qp, Qp) {
        let (one, other) = (self.queue_pair(), self.queue_pair());
        one.connect(self, self, &other);
        other.connect(self, self, &one);
        (one, other)
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        // SAFETY: each is destroyed once, what depends on it before it; the tests drop queue pairs and regions first.
        let cq = unsafe { self.library.ibv_destroy_cq(self.cq) };
        // SAFETY: as above.
        let channel = unsafe { self.library.ibv_destroy_comp_channel(self.channel) };
        // SAFETY: as above.
        let pd = unsafe { self.library.ibv_dealloc_pd(self.pd) };
        // SAFETY: as above.
        let context = unsafe { self.library.ibv_close_device(self.context) };
        ended((cq, channel, pd, context), (Ok(()), Ok(()), Ok(()), Ok(0)));
    }
}

/// Fails when something could not be destroyed, unless the test has failed already.
fn ended<T: PartialEq + core::fmt::Debug>(what: T, expected: T) {
    if !std::thread::panicking() {
        assert_eq!(what, expected, "destroyed");
    }
}

/// The first 12 bytes of an IPv4 address that is written as one of IPv6.
const MAPPED: [u8; 12] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];

pub(crate) fn raw(gid: &ibv_gid) -> [u8; 16] {
    // SAFETY: bytes have every value.
    unsafe { gid.raw }
}

/// Waits for a completion of `cq`.
pub(crate) fn poll(cq: *mut ibv_cq) -> ibv_wc {
    let mut patience = Patience::new(60);
    loop {
        if let Some(wc) = poll_once(cq) {
            return wc;
        }
        patience.wait("a completion");
    }
}

pub(crate) fn poll_once(cq: *mut ibv_cq) -> Option<ibv_wc> {
    let mut wc = zeroed();
    // SAFETY: the queue is alive, and there is room for one.
    let found = unsafe { ibv_poll_cq(cq, 1, &raw mut wc) }.unwrap();
    (found == 1).then_some(wc)
}

/// Registered memory of its own; the bytes are changed and read through raw pointers alone, since the device touches them.
#[derive(Debug)]
pub(crate) struct Region {
    library: &'static Library,
    pub(crate) mr: *mut ibv_mr,
    start: *mut u8,
    len: usize,
}

impl Region {
    fn new(bed: &Bed, len: usize, access: c_int) -> Self {
        let start = Box::into_raw(vec![0u8; len].into_boxed_slice()).cast::<u8>();
        // SAFETY: the memory is freed after the region.
        let mr = unsafe { bed.library.ibv_reg_mr(bed.pd, start.cast(), len, access) }.unwrap().as_ptr();
        Self { library: bed.library, mr, start, len }
    }

    pub(crate) fn address(&self) -> u64 {
        self.start.addr() as u64
    }

    pub(crate) fn lkey(&self) -> u32 {
        // SAFETY: alive.
        unsafe { (*self.mr).lkey }
    }

    pub(crate) fn rkey(&self) -> u32 {
        // SAFETY: alive.
        unsafe { (*self.mr).rkey }
    }

    /// Bytes of it as a slice of a request.
    pub(crate) fn slice(&self, offset: usize, len: usize) -> ibv_sge {
        assert!(offset + len <= self.len);
        ibv_sge { addr: self.address() + offset as u64, length: len as u32, lkey: self.lkey() }
    }

    pub(crate) fn fill(&self, seed: u32) {
        for i in 0..self.len {
            // SAFETY: within the memory.
            let place = unsafe { self.start.add(i) };
            // SAFETY: as above.
            unsafe { place.write_volatile(pattern(seed, i)) };
        }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.len);
        for i in 0..self.len {
            // SAFETY: within the memory.
            let place = unsafe { self.start.add(i) };
            // SAFETY: as above.
            bytes.push(unsafe { place.read_volatile() });
        }
        bytes
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: alive, and of no use to a request any more.
        ended(unsafe { self.library.ibv_dereg_mr(self.mr) }, Ok(()));
        let memory = ptr::slice_from_raw_parts_mut(self.start, self.len);
        // SAFETY: from `Box::into_raw`, once.
        drop(unsafe { Box::from_raw(memory) });
    }
}

/// The byte at `i` of the memory that was filled with `seed`.
pub(crate) fn pattern(seed: u32, i: usize) -> u8 {
    let mixed = (i as u32).wrapping_mul(2_654_435_761) ^ seed.wrapping_mul(40_503);
    (mixed >> 13) as u8
}

pub(crate) fn patterns(seed: u32, len: usize) -> Vec<u8> {
    (0..len).map(|i| pattern(seed, i)).collect()
}

/// A reliable queue pair.
#[derive(Debug)]
pub(crate) struct Qp {
    library: &'static Library,
    pub(crate) qp: *mut ibv_qp,
}

/// Most requests of each of a test's queue pairs.
pub(crate) const DEPTH: u32 = 32;

impl Qp {
    pub(crate) fn new(bed: &Bed, srq: *mut ibv_srq) -> Self {
        let mut init = ibv_qp_init_attr {
            send_cq: bed.cq,
            recv_cq: bed.cq,
            srq,
            qp_type: IBV_QPT_RC,
            cap: ibv_qp_cap {
                max_send_wr: DEPTH,
                max_recv_wr: DEPTH,
                max_send_sge: 4,
                max_recv_sge: 4,
                max_inline_data: 64,
            },
            ..zeroed()
        };
        // SAFETY: all is alive.
        let qp = unsafe { bed.library.ibv_create_qp(bed.pd, &raw mut init) }.unwrap().as_ptr();
        Self { library: bed.library, qp }
    }

    pub(crate) fn from_raw(bed: &Bed, qp: *mut ibv_qp) -> Self {
        Self { library: bed.library, qp }
    }

    pub(crate) fn number(&self) -> u32 {
        // SAFETY: alive.
        unsafe { (*self.qp).qp_num }
    }

    pub(crate) fn modify(&self, mut attr: ibv_qp_attr, mask: c_int) -> Result<(), Error> {
        // SAFETY: alive.
        unsafe { self.library.ibv_modify_qp(self.qp, &raw mut attr, mask) }
    }

    /// To the state in which receives can be posted.
    pub(crate) fn init(&self) {
        let attr = ibv_qp_attr {
            qp_state: IBV_QPS_INIT,
            pkey_index: 0,
            port_num: PORT,
            qp_access_flags: (IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC)
                .cast_unsigned(),
            ..zeroed()
        };
        self.modify(attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS).unwrap();
    }

    /// To the state in which it answers the peer.
    pub(crate) fn ready_to_receive(&self, here: &Bed, there: &Bed, peer: &Self) {
        let mtu = here.port_attr().active_mtu.min(there.port_attr().active_mtu);
        let mut attr = ibv_qp_attr {
            qp_state: IBV_QPS_RTR,
            path_mtu: mtu,
            dest_qp_num: peer.number(),
            rq_psn: PSN,
            max_dest_rd_atomic: 4,
            min_rnr_timer: MIN_RNR_TIMER,
            ..zeroed()
        };
        attr.ah_attr.is_global = 1;
        attr.ah_attr.port_num = PORT;
        attr.ah_attr.grh.dgid = there.gid().gid;
        attr.ah_attr.grh.sgid_index = here.gid().gid_index as u8;
        attr.ah_attr.grh.hop_limit = 64;
        let mask = IBV_QP_STATE
            | IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER;
        self.modify(attr, mask).unwrap();
    }

    /// To the state in which it sends.
    pub(crate) fn ready_to_send(&self, retry_cnt: u8, rnr_retry: u8) {
        let attr = ibv_qp_attr {
            qp_state: IBV_QPS_RTS,
            timeout: TIMEOUT,
            retry_cnt,
            rnr_retry,
            sq_psn: PSN,
            max_rd_atomic: 4,
            ..zeroed()
        };
        let mask = IBV_QP_STATE
            | IBV_QP_TIMEOUT
            | IBV_QP_RETRY_CNT
            | IBV_QP_RNR_RETRY
            | IBV_QP_SQ_PSN
            | IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify(attr, mask).unwrap();
    }

    /// Through all states.
    pub(crate) fn connect(&self, here: &Bed, there: &Bed, peer: &Self) {
        self.init();
        self.ready_to_receive(here, there, peer);
        self.ready_to_send(7, 7);
    }

    /// Where it stands, and what was set.
    pub(crate) fn query(&self) -> ibv_qp_attr {
        let (mut attr, mut init) = (zeroed(), zeroed());
        let mask = IBV_QP_STATE | IBV_QP_CAP | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN;
        // SAFETY: alive.
        unsafe { self.library.ibv_query_qp(self.qp, &raw mut attr, mask, &raw mut init) }.unwrap();
        attr
    }

    /// Posts requests as one chain. The error has the number of those that were posted.
    pub(crate) fn post(&self, requests: &mut [Request<'_>]) -> Result<(), (Error, usize)> {
        for i in 1..requests.len() {
            requests[i - 1].wr.next = &raw mut requests[i].wr;
        }
        let (first, mut bad) = (&raw mut requests[0].wr, ptr::null_mut());
        // SAFETY: alive; the tests keep the memory until the completion.
        let posted = unsafe { ibv_post_send(self.qp, first, &raw mut bad) };
        posted.map_err(|error| (error, requests.iter().position(|request| ptr::eq(&request.wr, bad)).unwrap()))
    }

    /// Posts a receive.
    pub(crate) fn receive(&self, wr_id: u64, list: &mut [ibv_sge]) {
        let mut wr = ibv_recv_wr { wr_id, sg_list: list.as_mut_ptr(), num_sge: list.len() as c_int, ..zeroed() };
        let mut bad = ptr::null_mut();
        // SAFETY: alive; the tests keep the memory until the completion.
        unsafe { ibv_post_recv(self.qp, &raw mut wr, &raw mut bad) }.unwrap();
    }

    pub(crate) fn to_error(&self) {
        self.modify(ibv_qp_attr { qp_state: IBV_QPS_ERR, ..zeroed() }, IBV_QP_STATE).unwrap();
    }

    /// Destroys it now.
    pub(crate) fn destroy(self) {
        let this = ManuallyDrop::new(self);
        // SAFETY: alive, once.
        unsafe { this.library.ibv_destroy_qp(this.qp) }.unwrap();
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // SAFETY: alive, once.
        ended(unsafe { self.library.ibv_destroy_qp(self.qp) }, Ok(()));
    }
}

/// A request, which can't outlive its list of slices.
#[repr(transparent)]
#[derive(Debug)]
pub(crate) struct Request<'l> {
    pub(crate) wr: ibv_send_wr,
    _list: PhantomData<&'l mut [ibv_sge]>,
}

impl Request<'_> {
    pub(crate) fn immediate(mut self, value: u32) -> Self {
        self.wr.imm_data = value.to_be();
        self
    }
}

/// A request that completes with `wr_id`.
pub(crate) fn request(wr_id: u64, opcode: u32, list: &mut [ibv_sge]) -> Request<'_> {
    let wr = ibv_send_wr {
        wr_id,
        opcode,
        send_flags: IBV_SEND_SIGNALED,
        sg_list: list.as_mut_ptr(),
        num_sge: list.len() as c_int,
        ..zeroed()
    };
    Request { wr, _list: PhantomData }
}

/// The same, with a remote side.
pub(crate) fn one_sided(wr_id: u64, opcode: u32, list: &mut [ibv_sge], remote_addr: u64, rkey: u32) -> Request<'_> {
    let mut request = request(wr_id, opcode, list);
    request.wr.wr.rdma = ibv_send_wr_rdma { remote_addr, rkey };
    request
}
