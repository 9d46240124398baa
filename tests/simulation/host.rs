//! One endpoint: the engine, and a driver for it on the simulated network and clock.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use towline::engine::{Action, Config, Engine, Identity, LinkId, OperationId, Rail, Tick, Transport};
use towline::{Path, Secret};
use towline_control::preface::{Preface, Purpose};
use towline_verbs::memory::HugePages;
use towline_verbs::sim::net::{ConnId, NetEvent, SimNet};
use towline_verbs::sim::{NodeId, Random, SimFabric};
use towline_verbs::{Memory, Provider};

use crate::scenario::{MICRO, Medium, Scenario};

/// Ports of every node on the byte network.
pub(crate) const TCP: u16 = 1;
pub(crate) const UNIX: u16 = 2;

/// A node's clock: it starts anywhere and runs a little fast or slow.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock {
    pub(crate) base: u64,
    pub(crate) per_million: i64,
}

impl Clock {
    pub(crate) fn at(self, now: u64) -> Tick {
        let drift = i128::from(now) * i128::from(self.per_million) / 1_000_000;
        (i128::from(self.base) + i128::from(now) + drift) as u64
    }

    /// The first moment at which this clock shows `tick`.
    pub(crate) fn when(self, tick: Tick) -> u64 {
        let ahead = i128::from(tick) - i128::from(self.base);
        let mut now = (ahead * 1_000_000 / (1_000_000 + i128::from(self.per_million))).max(0) as u64;
        now = now.saturating_sub(2);
        while self.at(now) < tick {
            now += 1;
        }
        now
    }
}

/// Who can be dialled: present names and addresses of all endpoints.
#[derive(Debug, Default)]
pub(crate) struct Directory {
    pub(crate) unix: BTreeMap<Vec<u8>, NodeId>,
    pub(crate) addresses: BTreeMap<String, NodeId>,
}

pub(crate) fn address_of(node: NodeId) -> String {
    format!("10.0.0.{}:4711", node.0)
}

/// All processes of this world are one user's.
fn transport(port: u16, peer: NodeId) -> Transport {
    match port {
        UNIX => Transport::Unix { user: 1, own: true },
        _ => Transport::Tcp { peer: address_of(peer).parse().expect("an address") },
    }
}

#[derive(Debug)]
enum Conn {
    /// Being dialled for a link; what is to be tried next if it is refused.
    Dialing(LinkId, Transport, VecDeque<(NodeId, u16)>),
    /// Accepted; its preface is not whole yet.
    Unknown(Transport, NodeId, Vec<u8>),
    /// A link's; bytes that the engine does not take yet.
    Open(LinkId, Vec<u8>),
}

/// One endpoint.
pub(crate) struct Host {
    pub(crate) id: NodeId,
    /// How often this node was started before.
    pub(crate) life: u64,
    pub(crate) engine: Engine,
    pub(crate) memory: Memory,
    pub(crate) clock: Clock,
    pub(crate) identity: Identity,
    /// It does nothing until then: its process was not scheduled.
    pub(crate) asleep_until: u64,
    /// Operations that the engine said have a result.
    pub(crate) woken: Vec<OperationId>,
    /// Links whose peer's process is watched, and the peer.
    pub(crate) watching: Vec<(LinkId, NodeId)>,
    /// Links whose peer's process had ended before it was watched.
    pub(crate) mourned: Vec<LinkId>,
    /// How often a byte of what it sends is changed.
    pub(crate) bends_bytes: Option<u64>,
    fabric: SimFabric,
    net: SimNet,
    wake: Arc<AtomicBool>,
    conns: BTreeMap<ConnId, Conn>,
    links: BTreeMap<LinkId, (ConnId, NodeId)>,
    /// Unix names that are being dialled.
    dialled: BTreeMap<LinkId, Vec<u8>>,
    /// Links with output that the socket did not take, and when it will.
    unsent: BTreeMap<LinkId, u64>,
    random: Random,
}

impl Host {
    pub(crate) fn start(scenario: &Scenario, fabric: &SimFabric, id: NodeId, life: u64, clock: Clock) -> Self {
        let mut random = Random::new(scenario.seed ^ u64::from(id.0) << 32 ^ life << 48 ^ 0x5EED);
        let device = fabric.provider(id).open("sim0").expect("the device of a live node opens");
        let memory = Memory::shared(scenario.pool, HugePages::Off).expect("a small memory can be had");
        let mapped = scenario.medium == Medium::Mapped;
        let path = if mapped { Path::Shm } else { Path::Rdma };
        let mut paths = vec![path];
        if scenario.two_paths {
            // The others do not have the first: what is got from them comes by the second.
            paths = if id.0 == 1 { vec![Path::Rdma, Path::Tcp] } else { vec![Path::Tcp] };
        }
        let rail = |path| Rail::new(path, device.clone(), &memory).expect("the pool can be registered");
        let rails = paths.into_iter().map(rail).collect();
        let mut incarnation = [0; 16];
        random.fill(&mut incarnation);
        let mut process = [0; 16];
        random.fill(&mut process);
        if scenario.one_process {
            process = [9; 16];
        }
        let name = format!("towline-{:032x}", u128::from_be_bytes(incarnation)).into_bytes();
        let identity = Identity {
            boot: if mapped { [7; 16] } else { [id.0 as u8; 16] },
            incarnation,
            process,
            advertised: vec![address_of(id).parse().expect("an address")],
            unix_name: if mapped { name } else { Vec::new() },
        };
        let config = Config {
            identity: identity.clone(),
            paths: Default::default(),
            without_rdma: None,
            secret: scenario.secret.then(|| Secret::from_bytes(b"known to all of this world").expect("long enough")),
            insecure: true,
            limits: scenario.limits.clone(),
            times: scenario.times.clone(),
        };
        let wake = Arc::new(AtomicBool::new(false));
        let waker = wake.clone();
        let waker = Arc::new(move || waker.store(true, Ordering::SeqCst));
        let now = clock.at(fabric.now());
        let engine = Engine::new(config, memory.clone(), scenario.granule, rails, waker, now);
        let net = fabric.net();
        let engine = engine.expect("the options can be");
        engine.arm();
        net.listen(id, TCP, true);
        net.listen(id, UNIX, mapped);
        Self {
            id,
            life,
            engine,
            memory,
            clock,
            identity,
            asleep_until: 0,
            woken: Vec::new(),
            watching: Vec::new(),
            mourned: Vec::new(),
            bends_bytes: scenario.bends,
            fabric: fabric.clone(),
            net,
            wake,
            conns: BTreeMap::new(),
            links: BTreeMap::new(),
            dialled: BTreeMap::new(),
            unsent: BTreeMap::new(),
            random,
        }
    }

    /// Its connections, whatever has become of them.
    pub(crate) fn connections(&self) -> Vec<ConnId> {
        self.conns.keys().copied().collect()
    }

    /// One of its connections.
    pub(crate) fn some_connection(&self, nth: u64) -> Option<ConnId> {
        let open: Vec<ConnId> = self.links.values().map(|(conn, _)| *conn).collect();
        (!open.is_empty()).then(|| open[(nth % open.len() as u64) as usize])
    }

    /// What its driver still has open.
    pub(crate) fn left(&self) -> Option<String> {
        let open = self.conns.values().any(|conn| !matches!(conn, Conn::Unknown(..)));
        (open || !self.links.is_empty()).then(|| format!("{:?}, {:?}", self.conns, self.links))
    }

    pub(crate) fn now(&self) -> Tick {
        self.clock.at(self.fabric.now())
    }

    /// When it has to run at the latest, on the fabric's clock.
    pub(crate) fn due(&self) -> Option<u64> {
        let deadline = self.engine.next_deadline().map(|tick| self.clock.when(tick));
        let unsent = self.unsent.values().min().copied();
        // Whatever came while it slept is dealt with when it wakes.
        let wakes = (self.asleep_until > self.fabric.now()).then_some(self.asleep_until);
        [deadline, unsent, wakes].into_iter().flatten().min().map(|due| due.max(self.asleep_until))
    }

    /// Does what a driver does when its descriptors or its deadline say so. True if there was anything to do.
    pub(crate) fn run(&mut self, directory: &Directory) -> bool {
        let now = self.fabric.now();
        if now < self.asleep_until {
            return false;
        }
        let mut busy = false;
        while let Some(event) = self.net.poll(self.id) {
            busy = true;
            self.on_event(event, directory);
            self.act(directory);
        }
        let late = self.engine.next_deadline().is_some_and(|tick| tick <= self.clock.at(now));
        let device = self.fabric.take_wake(self.id);
        if self.wake.swap(false, Ordering::SeqCst) | late | device {
            busy = true;
            let clock = self.clock;
            // Armed first, so that a completion in between is not slept through.
            self.engine.arm();
            self.engine.pump(|| clock.at(now));
        }
        let writable: Vec<LinkId> = self.unsent.iter().filter(|(_, at)| **at <= now).map(|(link, _)| *link).collect();
        for link in writable {
            busy = true;
            self.send(link);
        }
        self.feed_all();
        self.act(directory);
        busy
    }

    /// Carries out what the engine asks for.
    pub(crate) fn act(&mut self, directory: &Directory) {
        while let Some(action) = self.engine.next_action() {
            match action {
                Action::Dial { link, unix, addresses } => {
                    let tcp = addresses.iter().filter_map(|a| directory.addresses.get(&a.to_string()));
                    let mut ways: VecDeque<_> = tcp.map(|node| (*node, TCP)).collect();
                    if let Some(name) = unix {
                        match directory.unix.get(&name) {
                            Some(node) => {
                                ways.push_front((*node, UNIX));
                                self.dialled.insert(link, name);
                            }
                            None => self.engine.unix_failed(link, "nobody has that name"),
                        }
                    }
                    self.dial(link, ways, libc::ECONNREFUSED);
                }
                Action::Flush(link) => {
                    self.engine.flushing(link);
                    self.send(link);
                }
                Action::Last { link, bytes } => {
                    if let Some((conn, _)) = self.links.get(&link) {
                        self.net.send(*conn, &bytes);
                    }
                }
                Action::Close(link) => {
                    self.unsent.remove(&link);
                    self.dialled.remove(&link);
                    if let Some((conn, _)) = self.links.remove(&link) {
                        self.conns.remove(&conn);
                        self.net.close(conn);
                    }
                }
                Action::WatchProcess(link) => {
                    self.fabric.note("watch process", &[u64::from(self.id.0), link.0]);
                    if let Some((conn, peer)) = self.links.get(&link) {
                        if self.net.peer_has_crashed(*conn) {
                            self.mourned.push(link);
                        } else {
                            self.watching.push((link, *peer));
                        }
                    }
                }
                Action::UnwatchProcess(link) => {
                    self.fabric.note("unwatch process", &[u64::from(self.id.0), link.0]);
                    self.watching.retain(|(watched, _)| *watched != link);
                }
                Action::Wake(operation) => self.woken.push(operation),
            }
        }
    }

    /// Tries the next way there is; `errno` says how the last one ended.
    fn dial(&mut self, link: LinkId, mut ways: VecDeque<(NodeId, u16)>, errno: i32) {
        match ways.pop_front() {
            Some((node, port)) => {
                let conn = self.net.dial(self.id, node, port);
                let transport = transport(port, node);
                self.conns.insert(conn, Conn::Dialing(link, transport, ways));
                self.links.insert(link, (conn, node));
            }
            None => {
                let now = self.now();
                self.links.remove(&link);
                self.engine.connect_failed(now, link, errno, "every way there is".to_owned());
            }
        }
    }

    /// A dial was refused. A Unix socket is refused only by nobody's name: one that has an owner is dialled again.
    fn refused(
        &mut self,
        link: LinkId,
        transport: Transport,
        mut ways: VecDeque<(NodeId, u16)>,
        directory: &Directory,
    ) {
        if transport.is_unix() {
            let name = self.dialled.remove(&link);
            match name.as_ref().and_then(|name| directory.unix.get(name)) {
                Some(node) => {
                    ways.push_front((*node, UNIX));
                    self.dialled.extend(name.map(|name| (link, name)));
                }
                None => self.engine.unix_failed(link, "refused"),
            }
        }
        self.dial(link, ways, libc::ECONNREFUSED);
    }

    /// Sends what a link has to send; the socket takes all of it or a part.
    fn send(&mut self, link: LinkId) {
        self.unsent.remove(&link);
        let Some((conn, _)) = self.links.get(&link) else { return };
        let output = self.engine.output(link);
        if output.is_empty() {
            return;
        }
        let full = self.random.below(8) > 0;
        let taken = if full { output.len() } else { self.random.below(output.len() as u64) as usize };
        let mut bytes = output[..taken].to_vec();
        if taken > 0 && self.bends_bytes.is_some_and(|one_in| self.random.below(one_in) == 0) {
            let nth = self.random.below(taken as u64) as usize;
            bytes[nth] ^= 0x10;
        }
        self.net.send(*conn, &bytes);
        self.engine.sent(link, taken);
        if !full {
            let at = self.fabric.now() + self.random.between(1, 200) * MICRO;
            self.unsent.insert(link, at);
        }
    }

    fn on_event(&mut self, event: NetEvent, directory: &Directory) {
        let now = self.now();
        match event {
            NetEvent::Accepted { conn, from, port } => {
                let transport = transport(port, from);
                self.conns.insert(conn, Conn::Unknown(transport, from, Vec::new()));
            }
            NetEvent::Connected { conn } => {
                if let Some(Conn::Dialing(link, transport, _)) = self.conns.get(&conn) {
                    let (link, transport) = (*link, *transport);
                    self.dialled.remove(&link);
                    self.conns.insert(conn, Conn::Open(link, Vec::new()));
                    self.engine.connected(now, link, transport);
                }
            }
            NetEvent::Refused { conn } => {
                if let Some(Conn::Dialing(link, transport, ways)) = self.conns.remove(&conn) {
                    self.refused(link, transport, ways, directory);
                }
            }
            NetEvent::Bytes { conn, data } => match self.conns.get_mut(&conn) {
                Some(Conn::Open(_, pending)) => {
                    pending.extend(data);
                    self.feed(conn);
                }
                Some(Conn::Unknown(_, _, bytes)) => {
                    bytes.extend(data);
                    self.preface(conn);
                }
                Some(Conn::Dialing(..)) | None => {}
            },
            NetEvent::Closed { conn } => match self.conns.remove(&conn) {
                Some(Conn::Open(link, _)) => {
                    self.links.remove(&link);
                    self.unsent.remove(&link);
                    self.engine.disconnected(now, link, "closed by the peer");
                }
                Some(Conn::Dialing(link, _, ways)) => self.dial(link, ways, libc::ECONNRESET),
                Some(Conn::Unknown(..)) | None => {}
            },
        }
    }

    /// Looks at the first bytes of an accepted connection.
    fn preface(&mut self, conn: ConnId) {
        let now = self.now();
        let Some(Conn::Unknown(transport, from, bytes)) = self.conns.get(&conn) else { return };
        let Some((head, rest)) = bytes.split_first_chunk::<{ Preface::LEN }>() else { return };
        let (transport, from, rest) = (*transport, *from, rest.to_vec());
        let link = match Preface::decode(head) {
            Ok(preface) => {
                // A bent byte may make it one of a data connection, which sim does not have.
                let control = matches!(preface.purpose, Purpose::Control | Purpose::ControlNoise);
                control.then(|| self.engine.accepted(now, transport, preface).ok()).flatten()
            }
            Err(error) => {
                if let Some(answer) = self.engine.answer_preface(&error) {
                    self.net.send(conn, &answer);
                }
                None
            }
        };
        if let Some(link) = link {
            self.conns.insert(conn, Conn::Open(link, rest));
            self.links.insert(link, (conn, from));
            self.feed(conn);
        } else {
            self.conns.remove(&conn);
            self.net.close(conn);
        }
    }

    fn feed_all(&mut self) {
        let stuck = |conn: &Conn| matches!(conn, Conn::Open(_, pending) if !pending.is_empty());
        let waiting: Vec<ConnId> = self.conns.iter().filter(|(_, conn)| stuck(conn)).map(|(id, _)| *id).collect();
        for conn in waiting {
            self.feed(conn);
        }
    }

    /// Gives the engine what it takes of a connection's bytes.
    fn feed(&mut self, conn: ConnId) {
        let now = self.now();
        while let Some(Conn::Open(link, pending)) = self.conns.get_mut(&conn) {
            let link = *link;
            if pending.is_empty() {
                return;
            }
            let Some(room) = self.engine.input(link, 16) else { return };
            let take = room.len().min(pending.len());
            room[..take].copy_from_slice(&pending[..take]);
            pending.drain(..take);
            self.engine.received(now, link, take);
        }
    }
}
