//! Two ends on two devices: what every test needs.

use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};
use towline_verbs::ibv::IbvProvider;
use towline_verbs::memory::HugePages;
use towline_verbs::{
    Access, Completion, CompletionQueue, Device, LocalSlice, Memory, MemoryRegion, Opcode, Progress, ProtectionDomain,
    Provider, QueuePair, QueuePairCapacity, QueuePairState, ReceiveRequest, RemoteSlice, WorkRequest,
};

/// The names of the two devices.
pub(crate) fn names() -> [String; 2] {
    let names = std::env::var("TOWLINE_DEVICES").unwrap_or_else(|_| "rxe0,rxe1".into());
    let (first, second) = names.split_once(',').unwrap();
    [first.into(), second.into()]
}

/// One end of a connection.
pub(crate) struct End {
    pub(crate) device: Device,
    pub(crate) pd: ProtectionDomain,
    pub(crate) cq: CompletionQueue,
    pub(crate) qp: QueuePair,
}

pub(crate) const ALL: Access = Access::all();
pub(crate) const CAPACITY: QueuePairCapacity = QueuePairCapacity { max_send_wr: 64, max_recv_wr: 16 };
const DEPTH: u32 = CAPACITY.max_send_wr + CAPACITY.max_recv_wr + SMALL.max_send_wr + SMALL.max_recv_wr;
pub(crate) const SMALL: QueuePairCapacity = QueuePairCapacity { max_send_wr: 4, max_recv_wr: 4 };

impl End {
    pub(crate) fn new(device: &Device) -> Self {
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(DEPTH).unwrap();
        let qp = pd.create_qp(&cq, &cq, CAPACITY).unwrap();
        Self { device: device.clone(), pd, cq, qp }
    }

    pub(crate) fn memory(&self, len: u64) -> MemoryRegion {
        self.memory_with(len, ALL)
    }

    pub(crate) fn memory_with(&self, len: u64, access: Access) -> MemoryRegion {
        self.pd.register(Memory::shared(len, HugePages::Off).unwrap(), access).unwrap()
    }

    pub(crate) fn post(&self, id: u64, opcode: Opcode, local: Vec<LocalSlice>, remote: Option<RemoteSlice>) {
        self.try_post(vec![WorkRequest { id, opcode, local, remote }]).unwrap();
    }

    pub(crate) fn try_post(&self, requests: Vec<WorkRequest>) -> towline_verbs::Result<()> {
        // SAFETY: the tests look at this memory only after the completion.
        unsafe { self.qp.post_send(requests) }
    }

    pub(crate) fn receive(&self, id: u64, local: Option<LocalSlice>) {
        // SAFETY: as above.
        unsafe { self.qp.post_recv(ReceiveRequest { id, local }) }.unwrap();
    }

    /// The completions that have come, without waiting.
    pub(crate) fn poll(&self) -> Vec<Completion> {
        let mut out = Vec::new();
        self.cq.poll(&mut out, 1000);
        out
    }

    /// Waits for so many completions; what comes is no more.
    pub(crate) fn completions(&self, count: usize) -> Vec<Completion> {
        let mut out = Vec::new();
        drive(&[&self.device], || {
            self.cq.poll(&mut out, 1000);
            out.len() >= count
        });
        assert_eq!(out.len(), count, "{out:?}");
        out
    }

    pub(crate) fn completion(&self) -> Completion {
        self.completions(1)[0]
    }
}

pub(crate) fn slice(region: &MemoryRegion, offset: u64, len: u64) -> LocalSlice {
    LocalSlice { region: region.clone(), offset, len }
}

pub(crate) fn read(id: u64, local: Vec<LocalSlice>, remote: RemoteSlice) -> WorkRequest {
    WorkRequest { id, opcode: Opcode::Read, local, remote: Some(remote) }
}

/// Drives devices until `done`. A machine that is stopped for a while does not count as waiting.
pub(crate) fn drive(devices: &[&Device], mut done: impl FnMut() -> bool) {
    let (mut left, mut last) = (Duration::from_secs(60), Instant::now());
    while !done() {
        left = left.saturating_sub(last.elapsed().min(Duration::from_millis(100)));
        last = Instant::now();
        assert!(!left.is_zero(), "nothing happens any more");
        for device in devices {
            let _more = device.progress() == Progress::More;
        }
        std::thread::yield_now();
    }
}

/// Whether the device's descriptor becomes readable within so many milliseconds.
pub(crate) fn readable(device: &Device, ms: i32) -> bool {
    let fd = device.event_fd().unwrap().as_raw_fd();
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry.
    unsafe { libc::poll(&raw mut poll, 1, ms) > 0 }
}

pub(crate) fn connect(a: &End, b: &End) {
    let (here, there) = (a.qp.address(), b.qp.address());
    b.qp.connect(&here, false).unwrap();
    a.qp.connect(&there, true).unwrap();
    let ready = |end: &End| end.qp.state() == QueuePairState::ReadyToSend;
    drive(&[&a.device, &b.device], || {
        assert_eq!((a.qp.failure(), b.qp.failure()), (None, None));
        ready(a) && ready(b)
    });
}

/// Two connected ends, on two devices.
pub(crate) struct Pair {
    pub(crate) a: End,
    pub(crate) b: End,
}

pub(crate) fn pair() -> Pair {
    try_pair().unwrap()
}

pub(crate) fn try_pair() -> towline_verbs::Result<Pair> {
    let provider = IbvProvider::new()?;
    let [first, second] = names();
    let (a, b) = (End::new(&provider.open(&first)?), End::new(&provider.open(&second)?));
    connect(&a, &b);
    Ok(Pair { a, b })
}

/// Fills a region with bytes that tell their place, and `seed`.
pub(crate) fn fill(region: &MemoryRegion, seed: u64) {
    region.memory().write(0, &content(region.len(), seed)).unwrap();
}

/// What [`fill`] writes.
pub(crate) fn content(len: u64, seed: u64) -> Vec<u8> {
    let word = |index: u64| (index ^ seed << 48).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes();
    let mut bytes: Vec<u8> = (0..len.div_ceil(8)).flat_map(word).collect();
    bytes.truncate(len as usize);
    bytes
}

/// All bytes of a range.
pub(crate) fn bytes(region: &MemoryRegion, offset: u64, len: u64) -> Vec<u8> {
    let mut out = vec![0; len as usize];
    region.memory().read(offset, &mut out).unwrap();
    out
}
