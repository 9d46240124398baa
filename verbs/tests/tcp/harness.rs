//! Two ends over loopback: what every test needs.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use towline_verbs::memory::HugePages;
use towline_verbs::tcp::{TcpConfig, TcpProvider, prepare_listener};
use towline_verbs::{
    Access, Completion, CompletionQueue, Device, LocalSlice, Memory, MemoryRegion, Opcode, Progress, ProtectionDomain,
    Provider, QueuePair, QueuePairCapacity, QueuePairState, ReceiveRequest, RemoteSlice, Token, WorkRequest,
};

/// How long a test waits for anything.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// What a data connection begins with, before the token.
pub(crate) const PREFACE: &[u8; 8] = b"test-tcp";

pub(crate) fn preface(token: Token) -> Vec<u8> {
    [&PREFACE[..], &token.0].concat()
}

/// A device with the listening port that an endpoint would have.
pub(crate) struct Endpoint {
    pub(crate) device: Device,
    pub(crate) address: SocketAddr,
    stop: Arc<AtomicBool>,
    acceptor: Option<JoinHandle<()>>,
}

impl Endpoint {
    pub(crate) fn new(bind: &str) -> Self {
        Self::with(bind, |_| {})
    }

    pub(crate) fn with(bind: &str, configure: impl FnOnce(&mut TcpConfig)) -> Self {
        let listener = TcpListener::bind((bind, 0)).unwrap();
        prepare_listener(&listener);
        let address = listener.local_addr().unwrap();
        let mut config = TcpConfig::new(vec![address], Arc::new(preface));
        configure(&mut config);
        let device = TcpProvider::new(config).unwrap().open("tcp0").unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let acceptor = std::thread::spawn({
            let (device, stop) = (device.clone(), stop.clone());
            move || accept(&listener, &device, &stop)
        });
        Self { device, address, stop, acceptor: Some(acceptor) }
    }

    pub(crate) fn end(&self) -> End {
        self.end_with(QueuePairCapacity { max_send_wr: 256, max_recv_wr: 64 })
    }

    pub(crate) fn end_with(&self, capacity: QueuePairCapacity) -> End {
        let pd = self.device.alloc_pd().unwrap();
        let cq = self.device.create_cq(capacity.max_send_wr + capacity.max_recv_wr).unwrap();
        let qp = pd.create_qp(&cq, &cq, capacity).unwrap();
        End { device: self.device.clone(), pd, cq, qp }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        drop(TcpStream::connect(self.address));
        self.acceptor.take().unwrap().join().unwrap();
    }
}

fn accept(listener: &TcpListener, device: &Device, stop: &AtomicBool) {
    loop {
        let (mut stream, _) = listener.accept().unwrap();
        if stop.load(Ordering::SeqCst) {
            return;
        }
        let mut bytes = [0; 24];
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        if std::io::Read::read_exact(&mut stream, &mut bytes).is_err() || bytes[..8] != PREFACE[..] {
            continue;
        }
        // An unknown token closes the stream: what the dialling end then sees is a test's to say.
        let _refused = device.adopt(OwnedFd::from(stream), Token(bytes[8..].try_into().unwrap()));
    }
}

/// One end of a connection.
pub(crate) struct End {
    pub(crate) device: Device,
    pub(crate) pd: ProtectionDomain,
    pub(crate) cq: CompletionQueue,
    pub(crate) qp: QueuePair,
}

pub(crate) const ALL: Access = Access::all();

impl End {
    pub(crate) fn memory(&self, len: u64) -> MemoryRegion {
        self.memory_with(len, ALL)
    }

    pub(crate) fn memory_with(&self, len: u64, access: Access) -> MemoryRegion {
        self.pd.register(Memory::shared(len, HugePages::Off).unwrap(), access).unwrap()
    }

    pub(crate) fn post(&self, id: u64, opcode: Opcode, local: Vec<LocalSlice>, remote: Option<RemoteSlice>) {
        self.try_post(id, opcode, local, remote).unwrap();
    }

    pub(crate) fn try_post(
        &self,
        id: u64,
        opcode: Opcode,
        local: Vec<LocalSlice>,
        remote: Option<RemoteSlice>,
    ) -> towline_verbs::Result<()> {
        // SAFETY: the tests look at this memory only after the completion, or as the one who says otherwise.
        unsafe { self.qp.post_send(vec![WorkRequest { id, opcode, local, remote }]) }
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
}

pub(crate) fn slice(region: &MemoryRegion, offset: u64, len: u64) -> LocalSlice {
    LocalSlice { region: region.clone(), offset, len }
}

/// Drives the devices until `done`.
pub(crate) fn drive(devices: &[&Device], mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "nothing happens any more");
        let idle = devices.iter().filter(|device| device.progress() == Progress::Idle).count();
        if idle == devices.len() && !done() {
            wait(devices, Duration::from_millis(20));
        }
    }
}

/// Waits until one of the devices has something to do; whether one has.
pub(crate) fn wait(devices: &[&Device], at_most: Duration) -> bool {
    let mut fds: Vec<_> = devices
        .iter()
        .map(|device| {
            let fd = device.event_fd().unwrap().as_raw_fd();
            libc::pollfd { fd, events: libc::POLLIN, revents: 0 }
        })
        .collect();
    // SAFETY: the list is valid for its own length.
    unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, at_most.as_millis() as i32) > 0 }
}

/// Drives both ends until `end` has `count` completions.
pub(crate) fn completions(end: &End, other: &End, count: usize) -> Vec<Completion> {
    let mut out = Vec::new();
    drive(&[&end.device, &other.device], || {
        end.cq.poll(&mut out, 1000);
        out.len() >= count
    });
    assert_eq!(out.len(), count, "{out:?}");
    out
}

pub(crate) fn completion(end: &End, other: &End) -> Completion {
    completions(end, other, 1)[0]
}

pub(crate) fn connect(active: &End, passive: &End) {
    let (here, there) = (active.qp.address(), passive.qp.address());
    passive.qp.connect(&here, false).unwrap();
    active.qp.connect(&there, true).unwrap();
    drive(&[&active.device, &passive.device], || {
        active.qp.state() == QueuePairState::ReadyToSend && passive.qp.state() == QueuePairState::ReadyToSend
    });
}

/// Two connected ends: the first has dialled.
pub(crate) struct Pair {
    pub(crate) a: End,
    pub(crate) b: End,
    pub(crate) _endpoints: [Endpoint; 2],
}

pub(crate) fn pair() -> Pair {
    pair_with("127.0.0.1", |_| {})
}

pub(crate) fn pair_with(bind: &str, configure: impl Fn(&mut TcpConfig)) -> Pair {
    let endpoints = [Endpoint::with(bind, &configure), Endpoint::with(bind, &configure)];
    let (a, b) = (endpoints[0].end(), endpoints[1].end());
    connect(&a, &b);
    Pair { a, b, _endpoints: endpoints }
}

/// Fills a region with content that tells its place, and `seed`.
pub(crate) fn fill(region: &MemoryRegion, seed: u64) {
    let mut block = vec![0u8; 1 << 16];
    let mut at = 0;
    while at < region.len() {
        let now = (region.len() - at).min(block.len() as u64) as usize;
        for (word, bytes) in block[..now].chunks_mut(8).enumerate() {
            bytes.copy_from_slice(&word_at(at / 8 + word as u64, seed).to_le_bytes()[..bytes.len()]);
        }
        region.memory().write(at, &block[..now]).unwrap();
        at += now as u64;
    }
}

fn word_at(index: u64, seed: u64) -> u64 {
    (index ^ seed << 48).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// Checks that `len` bytes at `offset` are what [`fill`] with `seed` put at `from`.
pub(crate) fn check(region: &MemoryRegion, offset: u64, from: u64, len: u64, seed: u64) {
    let mut block = vec![0u8; 1 << 16];
    let mut done = 0;
    while done < len {
        let now = (len - done).min(block.len() as u64) as usize;
        region.memory().read(offset + done, &mut block[..now]).unwrap();
        for (at, byte) in block[..now].iter().enumerate() {
            let place = from + done + at as u64;
            let wanted = word_at(place / 8, seed).to_le_bytes()[(place % 8) as usize];
            assert_eq!(*byte, wanted, "byte {} of {len}", done + at as u64);
        }
        done += now as u64;
    }
}

/// All bytes of a range.
pub(crate) fn bytes(region: &MemoryRegion, offset: u64, len: u64) -> Vec<u8> {
    let mut out = vec![0; len as usize];
    region.memory().read(offset, &mut out).unwrap();
    out
}
