//! Two engines that have much to say to each other, over a connection that takes little at a time: neither waits for the
//! other to read first (I7, I9, I10).

#![allow(clippy::unwrap_used)] // also in the helpers of tests

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use towline::engine::{
    Action, Config, Engine, GetRequest, Identity, LinkId, NewPart, OperationId, PutOptions, Rail, Source, Times,
    Transport,
};
use towline::{DType, Limits, Path};
use towline_control::preface::Preface;
use towline_verbs::memory::HugePages;
use towline_verbs::sim::{FaultPlan, NodeId, SimFabric};
use towline_verbs::{Memory, Provider};

/// Bytes that are under way on a connection at most, in each direction.
const PIPE: usize = 2 << 10;

struct End {
    engine: Engine,
    /// Its links, by connection, and what it has been sent on each and has not read.
    links: BTreeMap<usize, (LinkId, VecDeque<u8>)>,
    done: Vec<OperationId>,
}

struct World {
    fabric: SimFabric,
    ends: [End; 2],
    connections: usize,
}

fn address(node: u32) -> String {
    format!("10.0.0.{node}:1")
}

fn end(fabric: &SimFabric, node: u32, limits: &Limits) -> End {
    let memory = Memory::shared(4 << 20, HugePages::Off).unwrap();
    let device = fabric.provider(NodeId(node)).open("sim0").unwrap();
    let identity = Identity {
        boot: [node as u8; 16],
        incarnation: [node as u8; 16],
        process: [node as u8; 16],
        advertised: vec![address(node).parse().unwrap()],
        unix_name: Vec::new(),
    };
    let config = Config {
        identity,
        paths: Default::default(),
        without_rdma: None,
        secret: None,
        insecure: true,
        limits: limits.clone(),
        times: Times::default(),
    };
    let rails = vec![Rail::new(Path::Rdma, device, &memory).unwrap()];
    let engine = Engine::new(config, memory, 64, rails, Arc::new(|| {}), 1).unwrap();
    End { engine, links: BTreeMap::new(), done: Vec::new() }
}

impl World {
    fn new(limits: &Limits) -> Self {
        let fabric = SimFabric::new(1, FaultPlan::calm());
        let ends = [end(&fabric, 1, limits), end(&fabric, 2, limits)];
        Self { fabric, ends, connections: 0 }
    }

    /// Does what the engines ask for; both know of one another from the first dial on.
    fn act(&mut self) {
        let now = self.fabric.now() + 1;
        for from in 0..2 {
            while let Some(action) = self.ends[from].engine.next_action() {
                match action {
                    Action::Dial { link, addresses, .. } => {
                        let to = usize::from(addresses[0].to_string() == address(2));
                        let peer = address(to as u32 + 1).parse().unwrap();
                        self.ends[from].engine.connected(now, link, Transport::Tcp { peer });
                        let mut preface = [0; Preface::LEN];
                        preface.copy_from_slice(&self.ends[from].engine.output(link)[..Preface::LEN]);
                        self.ends[from].engine.sent(link, Preface::LEN);
                        let preface = Preface::decode(&preface).unwrap();
                        let peer = address(from as u32 + 1).parse().unwrap();
                        let theirs = self.ends[to].engine.accepted(now, Transport::Tcp { peer }, preface).unwrap();
                        self.ends[from].links.insert(self.connections, (link, VecDeque::new()));
                        self.ends[to].links.insert(self.connections, (theirs, VecDeque::new()));
                        self.connections += 1;
                    }
                    Action::Flush(link) => self.ends[from].engine.flushing(link),
                    Action::Wake(operation) => self.ends[from].done.push(operation),
                    Action::Close(_) | Action::Last { .. } => panic!("a link of {from} ended"),
                    Action::WatchProcess(_) | Action::UnwatchProcess(_) => {}
                }
            }
        }
    }

    /// Moves bytes as far as the pipes take them and the engines read; whether any moved.
    fn carry(&mut self) -> bool {
        let now = self.fabric.now() + 1;
        let mut moved = false;
        for from in 0..2 {
            let connections: Vec<usize> = self.ends[from].links.keys().copied().collect();
            for connection in connections {
                let [one, other] = &mut self.ends;
                let (sender, receiver) = if from == 0 { (one, other) } else { (other, one) };
                let link = sender.links[&connection].0;
                let (theirs, pipe) = receiver.links.get_mut(&connection).unwrap();
                let take = sender.engine.output(link).len().min(PIPE - pipe.len());
                pipe.extend(&sender.engine.output(link)[..take]);
                sender.engine.sent(link, take);
                while let Some(room) = (!pipe.is_empty()).then(|| receiver.engine.input(*theirs, 256)).flatten() {
                    let take = room.len().min(pipe.len());
                    pipe.drain(..take).zip(room).for_each(|(byte, room)| *room = byte);
                    receiver.engine.received(now, *theirs, take);
                    moved = true;
                }
                moved |= take > 0;
                self.act();
            }
        }
        moved
    }

    /// Goes on until nothing moves any more before the first keep-alive is due.
    fn run(&mut self) {
        loop {
            self.act();
            while self.carry() {}
            let now = self.fabric.now() + 1;
            self.ends.iter_mut().for_each(|end| end.engine.pump(|| now));
            self.act();
            if self.carry() {
                continue;
            }
            let timers = self.ends.iter().filter_map(|end| end.engine.next_deadline()).min();
            let next = [self.fabric.next_event_at(), timers].into_iter().flatten().min();
            match next {
                Some(next) if next < 1_000_000_000 => self.fabric.advance_to(next.max(now)),
                _ => return,
            }
        }
    }
}

#[test]
fn two_ends_with_full_backlogs_do_not_wait_for_each_other() {
    const GETS: usize = 300;
    let mut limits = Limits::default();
    limits.backlog = 16 << 10;
    limits.gets = GETS;
    let mut world = World::new(&limits);
    // Long keys and long layouts: what is asked, and what is answered, is many times the backlog.
    let name = "n".repeat(200);
    let key = |number: usize| format!("{number:0>900}").into_bytes();
    for end in &mut world.ends {
        for number in 0..GETS {
            let mut buffer = end.engine.allocate(100).unwrap();
            buffer.as_mut_slice().fill(number as u8);
            let part = NewPart { name: &name, dtype: DType::U8, shape: &[100], buffer: Some(buffer), loan: None };
            end.engine.put(1, &key(number), vec![part], None, &PutOptions::default()).unwrap();
        }
    }
    let mut asked = [Vec::new(), Vec::new()];
    for number in 0..GETS {
        for (from, end) in world.ends.iter_mut().enumerate() {
            let peer = address(2 - from as u32).parse().unwrap();
            let source = Source::Key { peers: vec![peer], key: key(number) };
            asked[from].push(end.engine.get(2, GetRequest::new(source, 60_000_000_000)).unwrap());
        }
    }
    world.run();
    for (end, asked) in world.ends.iter_mut().zip(asked) {
        let stats = end.engine.stats();
        assert_eq!((stats.gets, stats.failures, stats.retries), (GETS as u64, 0, 0), "{stats:?}");
        assert!(asked.into_iter().all(|operation| end.engine.take(operation).unwrap().is_ok()));
    }
    world.run();
    for end in &world.ends {
        let stats = end.engine.stats();
        assert_eq!((stats.leases, stats.payloads, stats.waiting), (0, 0, 0), "{stats:?}");
    }
}
