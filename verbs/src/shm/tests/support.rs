//! Endpoints for tests: a device, a listener as a driver of an endpoint would have one, and waiting with a deadline.

use crate::memory::HugePages;
use crate::shm::{ShmConfig, ShmProvider};
use crate::{
    Access, Completion, CompletionQueue, Device, Error, LocalSlice, Memory, MemoryRegion, Opcode, ProtectionDomain,
    Provider, QueuePair, QueuePairCapacity, QueuePairState, ReceiveRequest, RemoteSlice, Token, WorkRequest,
};
use core::sync::atomic::{AtomicU32, Ordering};
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

pub(super) const PATIENCE: Duration = Duration::from_secs(30);
pub(super) const MAGIC: [u8; 4] = *b"TEST";
pub(super) const ALL: Access = Access::all().difference(Access::MW_BIND);
pub(super) const CAPACITY: QueuePairCapacity = QueuePairCapacity { max_send_wr: 64, max_recv_wr: 16 };

/// What an endpoint sends first.
pub(super) fn preface(token: Token) -> Vec<u8> {
    [&MAGIC[..], &token.0].concat()
}

/// A name that no other test of any process uses.
pub(super) fn fresh_name() -> Vec<u8> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("towline-verbs-test-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)).into_bytes()
}

pub(super) struct End {
    pub(super) device: Device,
    pub(super) pd: ProtectionDomain,
    pub(super) cq: CompletionQueue,
    pub(super) listener: UnixListener,
}

impl End {
    pub(super) fn new() -> Self {
        Self::with(|_| {})
    }

    pub(super) fn with(change: impl FnOnce(&mut ShmConfig)) -> Self {
        let name = fresh_name();
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        listener.set_nonblocking(true).unwrap();
        let mut config = ShmConfig::new(name, preface);
        change(&mut config);
        let device = ShmProvider::new(config).unwrap().open("shm0").unwrap();
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(1 << 12).unwrap();
        Self { device, pd, cq, listener }
    }

    pub(super) fn queue_pair(&self) -> QueuePair {
        self.pd.create_qp(&self.cq, &self.cq, CAPACITY).unwrap()
    }

    /// Memory filled with a pattern of `seed`, registered.
    pub(super) fn region(&self, len: u64, access: Access, seed: u64) -> MemoryRegion {
        let memory = Memory::shared(len, HugePages::Off).unwrap();
        memory.write(0, &pattern(len, seed)).unwrap();
        self.pd.register(memory, access).unwrap()
    }

    /// Accepts what dials, and makes progress.
    pub(super) fn turn(&self) -> crate::Progress {
        if let Ok((stream, _)) = self.listener.accept()
            && let Some(token) = read_preface(&stream)
        {
            let _refused = self.device.adopt(OwnedFd::from(stream), token);
        }
        self.device.progress()
    }

    pub(super) fn completions(&self) -> Vec<Completion> {
        let mut out = Vec::new();
        self.cq.poll(&mut out, usize::MAX);
        out
    }
}

/// The token with which a connection begins; `None` if the peer has closed it already.
pub(super) fn read_preface(mut stream: &UnixStream) -> Option<Token> {
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut bytes = [0; 20];
    stream.read_exact(&mut bytes).ok()?;
    assert_eq!(bytes[..4], MAGIC);
    Some(Token(bytes[4..].try_into().unwrap()))
}

/// Waits until the device wants to make progress.
pub(super) fn wait_readable(end: &End) {
    let fd = end.device.event_fd().unwrap().as_raw_fd();
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one `pollfd`.
    assert_eq!(unsafe { libc::poll(&mut poll, 1, PATIENCE.as_millis() as i32) }, 1);
}

pub(super) fn token_of(qp: &QueuePair) -> Token {
    Token(qp.address()[6..22].try_into().unwrap())
}

/// Drives `ends` until `done`; between, waits for their descriptors as a driver does.
pub(super) fn drive(ends: &[&End], mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let mut idle = true;
        for end in ends {
            end.cq.arm();
            idle &= end.turn() == crate::Progress::Idle;
        }
        if done() {
            return;
        }
        assert!(Instant::now() < deadline, "nothing came within {PATIENCE:?}");
        if idle {
            wait(ends);
        }
    }
}

/// Waits until something is ready, or a second has gone.
fn wait(ends: &[&End]) {
    let fds = ends.iter().flat_map(|end| [end.device.event_fd().unwrap().as_raw_fd(), end.listener.as_raw_fd()]);
    let mut polls: Vec<_> = fds.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 }).collect();
    // SAFETY: the pointer and length are the vector's.
    unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, 1000) };
}

pub(super) fn is_readable(end: &End) -> bool {
    let fd = end.device.event_fd().unwrap().as_raw_fd();
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one `pollfd`, and no waiting.
    unsafe { libc::poll(&mut poll, 1, 0) == 1 }
}

/// Two connected queue pairs: of the first end, which was dialled, and of the second.
pub(super) fn connect(passive: &End, active: &End) -> (QueuePair, QueuePair) {
    let (a, b) = (passive.queue_pair(), active.queue_pair());
    join(passive, &a, active, &b);
    (a, b)
}

pub(super) fn join(passive: &End, a: &QueuePair, active: &End, b: &QueuePair) {
    a.connect(&b.address(), false).unwrap();
    b.connect(&a.address(), true).unwrap();
    let ready = |qp: &QueuePair| {
        assert_ne!(qp.state(), QueuePairState::Error, "{:?}", qp.failure());
        qp.state() == QueuePairState::ReadyToSend
    };
    drive(&[passive, active], || ready(a) && ready(b));
}

/// Waits for `count` completions of `end`.
pub(super) fn wait_for(ends: &[&End], end: &End, count: usize) -> Vec<Completion> {
    let mut all = Vec::new();
    drive(ends, || {
        all.extend(end.completions());
        all.len() >= count
    });
    assert_eq!(all.len(), count, "{all:?}");
    all
}

pub(super) fn slice(region: &MemoryRegion, offset: u64, len: u64) -> LocalSlice {
    LocalSlice { region: region.clone(), offset, len }
}

pub(super) fn request(id: u64, opcode: Opcode, local: Vec<LocalSlice>, remote: Option<RemoteSlice>) -> WorkRequest {
    WorkRequest { id, opcode, local, remote }
}

pub(super) fn post(qp: &QueuePair, requests: Vec<WorkRequest>) -> Result<(), Error> {
    // SAFETY: tests look at the memory only after the completion, or at canaries that a wrong write would change.
    unsafe { qp.post_send(requests) }
}

pub(super) fn post_receive(qp: &QueuePair, id: u64, local: Option<LocalSlice>) -> Result<(), Error> {
    // SAFETY: as in `post`.
    unsafe { qp.post_recv(ReceiveRequest { id, local }) }
}

/// Bytes that differ from place to place and from seed to seed.
pub(super) fn pattern(len: u64, seed: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len as usize + 8);
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    while bytes.len() < len as usize {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bytes.extend_from_slice(&(state ^ (state >> 31)).to_le_bytes());
    }
    bytes.truncate(len as usize);
    bytes
}

pub(super) fn bytes_of(region: &MemoryRegion, offset: u64, len: u64) -> Vec<u8> {
    let mut out = vec![0; len as usize];
    region.memory().read(offset, &mut out).unwrap();
    out
}
