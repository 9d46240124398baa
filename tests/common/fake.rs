//! Peers made by hand: they speak the protocol over a real session and real TCP queue pairs, and say in it what a test
//! wants said.

use super::{LONG, sys};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use towline::DType;
use towline_control::exchange::{Accepted, Connection, ExchangeError};
use towline_control::preface::{Preface, Purpose};
use towline_control::session::{Identity, SessionConfig};
use towline_control::socket::{Listener, SocketName};
use towline_control::wire::{
    AddressList, Close, CloseEntry, Frame, Get, GetFlags, Grant, GrantFlags, KeepAlive, LeaseId, Outcome,
    QueuePair as Offer, Refuse, RefuseCode, Segment, Target,
};
use towline_verbs::memory::HugePages;
use towline_verbs::tcp::{TcpConfig, TcpProvider};
use towline_verbs::{
    Access, CompletionQueue, CompletionStatus, Device, Memory, MemoryRegion, Opcode, ProtectionDomain, Provider,
    QueuePair, QueuePairCapacity, RemoteSlice, Token,
};

/// The number of TCP on the wire.
pub const TCP: u8 = 3;

/// A time by which an exchange with a peer made by hand is over.
pub fn deadline() -> Instant {
    Instant::now() + LONG
}

/// A peer made by hand, another with every call: on another host than this, so that only TCP leads to it.
pub fn session_config() -> SessionConfig {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let number = NEXT.fetch_add(1, Ordering::Relaxed).to_be_bytes();
    let mut incarnation = [0xab; 16];
    incarnation[8..].copy_from_slice(&number);
    SessionConfig::new(Identity {
        incarnation,
        boot_id: [0xb0; 16],
        process: incarnation.map(|byte| !byte),
        unix_name: Vec::new(),
        advertised: AddressList::new(),
        features: 0,
    })
}

/// A TCP device with everything on it that one peer needs.
struct Rail {
    device: Device,
    pd: ProtectionDomain,
    cq: CompletionQueue,
}

impl Rail {
    fn new(advertised: Vec<SocketAddr>) -> Self {
        let preface = |token: Token| Preface::new(Purpose::Data { token: token.0 }).encode().to_vec();
        let provider = TcpProvider::new(TcpConfig::new(advertised, Arc::new(preface))).unwrap();
        let device = provider.open("tcp0").unwrap();
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(1024).unwrap();
        Self { device, pd, cq }
    }

    fn queue_pair(&self) -> QueuePair {
        self.pd.create_qp(&self.cq, &self.cq, QueuePairCapacity { max_send_wr: 64, max_recv_wr: 1 }).unwrap()
    }

    fn region(&self, len: u64, access: Access) -> MemoryRegion {
        self.pd.register(Memory::shared(len, HugePages::Off).unwrap(), access).unwrap()
    }
}

/// What a consumer asked a producer made by hand.
#[derive(Debug, Clone)]
pub struct Asked {
    pub request: u64,
    pub sent_at: u64,
    /// How often it was asked before.
    pub before: usize,
}

/// What a producer made by hand answers to a get.
#[derive(Debug, Clone)]
pub enum Answer {
    /// Grants.
    Grant(Granting),
    /// Refuses.
    Refuse(RefuseCode, u64),
    /// Says nothing.
    Silence,
    /// Breaks the connection.
    HangUp,
    /// Sends these bytes instead of a frame.
    Bytes(Vec<u8>),
    /// Answers to another request than was asked.
    Elsewhere(Granting),
    /// Grants twice.
    Twice(Granting),
}

/// A grant as it is to be sent, true or not.
#[derive(Debug, Clone)]
pub struct Granting {
    pub layout: Vec<u8>,
    pub total: u64,
    pub watermark: u64,
    pub lease: Duration,
    /// Added to the stamp that is echoed.
    pub echo_shift: i64,
    pub eager: Vec<u8>,
    /// Segments; an address counts from the start of the producer's region.
    pub segments: Vec<(u64, u64)>,
    /// Added to the true key.
    pub key_shift: u64,
}

impl Granting {
    /// One part of `bytes`, within the grant.
    pub fn eager(bytes: &[u8]) -> Self {
        Self {
            layout: layout(&[("bytes", DType::U8, &[bytes.len() as u64], bytes.len() as u64)]),
            total: bytes.len() as u64,
            watermark: bytes.len() as u64,
            lease: Duration::from_secs(30),
            echo_shift: 0,
            eager: bytes.to_vec(),
            segments: Vec::new(),
            key_shift: 0,
        }
    }

    /// One part of `len` bytes, to be read from the start of the producer's region.
    pub fn rendezvous(len: u64) -> Self {
        Self {
            layout: layout(&[("bytes", DType::U8, &[len], len)]),
            total: len,
            watermark: len,
            eager: Vec::new(),
            segments: vec![(0, len)],
            ..Self::eager(&[])
        }
    }
}

/// The wire form of a layout (`count: u16`, then per part `dtype: u8, dimensions: u8, name_len: u16, len: u64,
/// dimensions x u64, name`).
pub fn layout(parts: &[(&str, DType, &[u64], u64)]) -> Vec<u8> {
    let mut bytes = (parts.len() as u16).to_le_bytes().to_vec();
    for (name, dtype, shape, len) in parts {
        bytes.extend([*dtype as u8, shape.len() as u8]);
        bytes.extend((name.len() as u16).to_le_bytes());
        bytes.extend(len.to_le_bytes());
        for extent in *shape {
            bytes.extend(extent.to_le_bytes());
        }
        bytes.extend(name.as_bytes());
    }
    bytes
}

/// Bytes of a producer's region.
pub const REGION: u64 = 1 << 20;

/// A producer made by hand, on threads of its own until it is dropped.
#[derive(Debug)]
pub struct Producer {
    pub address: String,
    pub incarnation: [u8; 16],
    stop: Arc<AtomicBool>,
    port: SocketAddr,
    /// How each lease that its consumers closed had ended.
    pub closes: mpsc::Receiver<(u64, Outcome)>,
}

impl Producer {
    /// One that answers every get with what `answer` says. Its region holds the content of seed 1.
    pub fn start(config: SessionConfig, answer: impl FnMut(&Asked) -> Answer + Send + 'static) -> Self {
        let incarnation = config.identity.incarnation;
        let listener = Listener::bind(&SocketName::Tcp("127.0.0.1:0".parse().unwrap())).unwrap();
        let SocketName::Tcp(port) = listener.local_name().unwrap() else { panic!("not TCP") };
        let rail = Arc::new(Rail::new(vec![port]));
        let region = rail.region(REGION, Access::LOCAL_WRITE | Access::REMOTE_READ);
        let mut content = vec![0; REGION as usize];
        super::fill(1, &mut content);
        region.memory().write(0, &content).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let (closed, closes) = mpsc::channel();
        let (progressing, stopped) = (rail.clone(), stop.clone());
        std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                if matches!(progressing.device.progress(), towline_verbs::Progress::Idle) {
                    std::thread::sleep(Duration::from_micros(200));
                }
            }
        });
        let (stopped, answer) = (stop.clone(), Arc::new(std::sync::Mutex::new((answer, 0))));
        std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                match Connection::accept(&listener, config.clone(), deadline()) {
                    Ok(Accepted::Control(connection)) => {
                        let (rail, region, closed) = (rail.clone(), region.clone(), closed.clone());
                        let (answer, stopped) = (answer.clone(), stopped.clone());
                        std::thread::spawn(move || {
                            let serving = Serving { connection: *connection, rail, region, closed, queue_pair: None };
                            serving.run(&stopped, |asked| {
                                let mut answer = answer.lock().unwrap();
                                let before = answer.1;
                                answer.1 += 1;
                                (answer.0)(&Asked { before, ..asked })
                            });
                        });
                    }
                    Ok(Accepted::Data { stream, token }) => {
                        let _unknown = rail.device.adopt(stream.as_fd().try_clone_to_owned().unwrap(), Token(token));
                    }
                    Err(_peer_left) => {}
                }
            }
        });
        Self { address: port.to_string(), incarnation, stop, port, closes }
    }

    /// How the consumer says that the next lease ended.
    #[track_caller]
    pub fn outcome(&self) -> Outcome {
        self.closes.recv_timeout(LONG).expect("a lease to be closed").1
    }
}

impl Drop for Producer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _wakes_the_accepting_thread = std::net::TcpStream::connect(self.port);
    }
}

struct Serving {
    connection: Connection,
    rail: Arc<Rail>,
    region: MemoryRegion,
    closed: mpsc::Sender<(u64, Outcome)>,
    queue_pair: Option<QueuePair>,
}

/// A frame as far as a producer made by hand is interested in it.
enum Heard {
    Offer(u32, u32, Vec<u8>),
    Get(Asked),
    Close(Vec<(u64, Outcome)>),
    KeepAlive(u64),
    Goodbye,
    Other,
}

impl Serving {
    fn run(mut self, stopped: &AtomicBool, mut answer: impl FnMut(Asked) -> Answer) {
        while !stopped.load(Ordering::Relaxed) {
            let heard = self.connection.receive(Instant::now() + Duration::from_millis(100), |frame| match frame {
                Frame::QueuePairOpen(offer) => Heard::Offer(offer.connection, offer.generation, offer.address.to_vec()),
                Frame::Get(get) => Heard::Get(Asked { request: get.request, sent_at: get.sent_at, before: 0 }),
                Frame::Close(close) => Heard::Close(close.entries.iter().map(|e| (e.lease(), e.outcome())).collect()),
                Frame::KeepAlive(alive) => Heard::KeepAlive(alive.sent_at),
                Frame::Goodbye(_) => Heard::Goodbye,
                _ => Heard::Other,
            });
            match heard {
                Err(ExchangeError::TimedOut { .. }) | Ok(Heard::Other) => {}
                Err(_) | Ok(Heard::Goodbye) => return,
                Ok(Heard::Offer(connection, generation, address)) => {
                    let queue_pair = self.rail.queue_pair();
                    queue_pair.connect(&address, false).unwrap();
                    let own = queue_pair.address();
                    self.queue_pair = Some(queue_pair);
                    let accept = Frame::QueuePairAccept(Offer { connection, provider: TCP, generation, address: &own });
                    if self.connection.send(&accept, deadline()).is_err() {
                        return;
                    }
                }
                Ok(Heard::KeepAlive(stamp)) => {
                    let ack = towline_control::wire::KeepAliveAck { echo: stamp, lease_us: 30_000_000, unknown: &[] };
                    let _gone = self.connection.send(&Frame::KeepAliveAck(ack), deadline());
                }
                Ok(Heard::Close(entries)) => {
                    for entry in entries {
                        let _nobody_asks = self.closed.send(entry);
                    }
                }
                Ok(Heard::Get(asked)) => {
                    let request = asked.request;
                    let sent = match answer(asked.clone()) {
                        Answer::Grant(granting) => self.grant(request, &asked, &granting),
                        Answer::Elsewhere(granting) => self.grant(request + 1_000_000, &asked, &granting),
                        Answer::Twice(granting) => {
                            self.grant(request, &asked, &granting).and_then(|()| self.grant(request, &asked, &granting))
                        }
                        Answer::Refuse(code, have) => {
                            let refuse = Refuse { request, code, need: 0, have, text: "made by hand" };
                            self.connection.send(&Frame::Refuse(refuse), deadline())
                        }
                        Answer::Silence => Ok(()),
                        Answer::HangUp => return,
                        Answer::Bytes(bytes) => {
                            let mut rest = &bytes[..];
                            while !rest.is_empty() {
                                match self.connection.stream().send(rest) {
                                    Ok(sent) => rest = &rest[sent..],
                                    Err(_) => return,
                                }
                            }
                            Ok(())
                        }
                    };
                    if sent.is_err() {
                        return;
                    }
                }
            }
        }
    }

    fn grant(&mut self, request: u64, asked: &Asked, granting: &Granting) -> Result<(), ExchangeError> {
        let all = self.region.remote(0, self.region.len()).unwrap();
        let segments: Vec<Segment> = granting
            .segments
            .iter()
            .map(|(offset, len)| {
                Segment::new(all.address.wrapping_add(*offset), *len, all.rkey.wrapping_add(granting.key_shift))
            })
            .collect();
        let grant = Grant {
            request,
            lease: request ^ 0x5555,
            slot: 0,
            generation: 1,
            echo: asked.sent_at.wrapping_add_signed(granting.echo_shift),
            lease_us: granting.lease.as_micros() as u64,
            watermark: granting.watermark,
            total_len: granting.total,
            provider: TCP,
            flags: GrantFlags::empty(),
            layout: &granting.layout,
            segments: &segments,
            eager: &granting.eager,
        };
        self.connection.send(&Frame::Grant(grant), deadline())
    }
}

/// A lease that a consumer made by hand was granted.
#[derive(Debug, Clone)]
pub struct Granted {
    pub request: u64,
    pub lease: u64,
    pub slot: u32,
    pub generation: u32,
    pub echo: u64,
    pub lease_us: u64,
    pub watermark: u64,
    pub total: u64,
    pub segments: Vec<RemoteSlice>,
    pub eager: Vec<u8>,
}

/// What a consumer made by hand hears.
#[derive(Debug, Clone)]
pub enum Said {
    Granted(Granted),
    Refused(u64, RefuseCode, u64),
    KeptAlive(Vec<u64>),
    Goodbye,
    Other,
}

impl Said {
    #[track_caller]
    pub fn granted(self) -> Granted {
        match self {
            Self::Granted(granted) => granted,
            other => panic!("not a grant: {other:?}"),
        }
    }
}

/// A consumer made by hand.
pub struct Consumer {
    pub connection: Connection,
    rail: Rail,
    queue_pair: Option<QueuePair>,
    next: u64,
}

impl Consumer {
    /// Connects to an endpoint, without a queue pair yet.
    #[track_caller]
    pub fn connect(address: &str, config: SessionConfig) -> Self {
        Self::try_connect(address, config).unwrap()
    }

    pub fn try_connect(address: &str, config: SessionConfig) -> Result<Self, ExchangeError> {
        let name = SocketName::Tcp(address.parse().unwrap());
        let connection = Connection::connect(&name, config, deadline())?;
        Ok(Self { connection, rail: Rail::new(Vec::new()), queue_pair: None, next: 1 })
    }

    /// Agrees on a queue pair over TCP and connects it.
    #[track_caller]
    pub fn open(mut self) -> Self {
        let queue_pair = self.rail.queue_pair();
        let own = queue_pair.address();
        let offer = Offer { connection: 1, provider: TCP, generation: 1, address: &own };
        self.send(&Frame::QueuePairOpen(offer));
        let address = self.connection.receive(deadline(), |frame| match frame {
            Frame::QueuePairAccept(accept) => accept.address.to_vec(),
            other => panic!("not accepted: {other:?}"),
        });
        queue_pair.connect(&address.unwrap(), true).unwrap();
        self.queue_pair = Some(queue_pair);
        self
    }

    /// The address of its queue pair, as offers carry it.
    pub fn queue_pair_address(&self) -> Vec<u8> {
        self.queue_pair.as_ref().expect("open comes first").address()
    }

    #[track_caller]
    pub fn send(&mut self, frame: &Frame<'_>) {
        self.connection.send(frame, deadline()).unwrap();
    }

    /// Sends bytes that need be no frame.
    pub fn send_bytes(&self, bytes: &[u8]) {
        self.send_bytes_within(bytes, LONG);
    }

    /// As far as they are taken in this time.
    pub fn send_bytes_within(&self, mut bytes: &[u8], time: Duration) {
        let until = Instant::now() + time;
        while !bytes.is_empty() && Instant::now() < until {
            match self.connection.stream().send(bytes) {
                Ok(0) => std::thread::sleep(Duration::from_millis(1)),
                Ok(sent) => bytes = &bytes[sent..],
                Err(_closed) => return,
            }
        }
    }

    /// Asks for a payload; the number of the request.
    #[track_caller]
    pub fn ask(&mut self, target: Target<'_>, max_eager: u32, flags: GetFlags) -> u64 {
        let request = self.next;
        self.next += 1;
        let wait_us = LONG.as_micros() as u64;
        self.send(&Frame::Get(Get {
            request,
            target,
            wait_us,
            sent_at: request * 1000,
            max_eager,
            flags,
            provider: TCP,
        }));
        request
    }

    /// What the endpoint says next.
    pub fn hear(&mut self) -> Result<Said, ExchangeError> {
        self.connection.receive(deadline(), |frame| match frame {
            Frame::Grant(grant) => Said::Granted(Granted {
                request: grant.request,
                lease: grant.lease,
                slot: grant.slot,
                generation: grant.generation,
                echo: grant.echo,
                lease_us: grant.lease_us,
                watermark: grant.watermark,
                total: grant.total_len,
                segments: grant
                    .segments
                    .iter()
                    .map(|s| RemoteSlice { address: s.address(), len: s.len(), rkey: s.rkey() })
                    .collect(),
                eager: grant.eager.to_vec(),
            }),
            Frame::Refuse(refuse) => Said::Refused(refuse.request, refuse.code, refuse.have),
            Frame::KeepAliveAck(ack) => Said::KeptAlive(ack.unknown.iter().map(|lease| lease.get()).collect()),
            Frame::Goodbye(_) => Said::Goodbye,
            _ => Said::Other,
        })
    }

    /// Asks for the payload under `key`, to be read and not in the grant, and takes the lease.
    #[track_caller]
    pub fn lease(&mut self, key: &str) -> Granted {
        self.ask(Target::Key(key.as_bytes()), 0, GetFlags::empty());
        self.hear().unwrap().granted()
    }

    /// Says that these leases have ended.
    #[track_caller]
    pub fn close(&mut self, entries: &[(u64, Outcome)]) {
        let entries: Vec<CloseEntry> = entries.iter().map(|(lease, how)| CloseEntry::new(*lease, *how)).collect();
        self.send(&Frame::Close(Close { entries: &entries }));
    }

    /// Says that it is alive and wants these leases kept.
    #[track_caller]
    pub fn keep_alive(&mut self, sent_at: u64, leases: &[u64]) {
        let leases: Vec<LeaseId> = leases.iter().map(|lease| LeaseId::new(*lease)).collect();
        self.send(&Frame::KeepAlive(KeepAlive { sent_at, leases: &leases }));
    }

    /// Reads remote memory over its queue pair.
    #[track_caller]
    pub fn read(&mut self, remote: RemoteSlice) -> Result<Vec<u8>, CompletionStatus> {
        let region = self.rail.region(remote.len.max(1), Access::LOCAL_WRITE);
        self.complete(Opcode::Read, &region, remote)?;
        let mut bytes = vec![0; remote.len as usize];
        region.memory().read(0, &mut bytes).unwrap();
        Ok(bytes)
    }

    /// Writes remote memory over its queue pair.
    #[track_caller]
    pub fn write(&mut self, remote: RemoteSlice, bytes: &[u8]) -> Result<(), CompletionStatus> {
        let region = self.rail.region(remote.len, Access::LOCAL_WRITE);
        region.memory().write(0, bytes).unwrap();
        self.complete(Opcode::Write, &region, remote)
    }

    #[track_caller]
    fn complete(&mut self, opcode: Opcode, region: &MemoryRegion, remote: RemoteSlice) -> Result<(), CompletionStatus> {
        let queue_pair = self.queue_pair.as_ref().expect("open comes first");
        let id = self.next;
        self.next += 1;
        if sys::post(queue_pair, id, opcode, region, remote).is_err() {
            return Err(CompletionStatus::Flushed); // in the error state already
        }
        let until = deadline();
        let mut completions = Vec::new();
        loop {
            assert!(Instant::now() < until, "the request does not end");
            if matches!(self.rail.device.progress(), towline_verbs::Progress::Idle) {
                std::thread::sleep(Duration::from_micros(200));
            }
            self.rail.cq.poll(&mut completions, 16);
            if let Some(completion) = completions.iter().find(|completion| completion.id == id) {
                return match completion.status {
                    CompletionStatus::Success => Ok(()),
                    status => Err(status),
                };
            }
        }
    }
}
