//! The consuming side: gets payloads, checks them, and receives the bare bytes of the limits.

use super::content::{Content, Readable, check};
use super::lanes;
use super::layout::Layout;
use super::limits::{Order, Received, Variant, memory, rdma, tcp};
use super::message::{Batch, Channel, Checked, GetStamps, Gets, Setup, Stream, ToConsumer};
use super::mover::{Address, Arrived, Journey, Mover, Needs};
use super::plan;
use super::producer::{key, reply};
use super::report::Clock;
use super::serialized::Tree;
use crate::command::Failure;
use crate::command::args::Mode;
use crate::command::sys::{PAGE, Pages, Shared, cpu_seconds, now_ns, read_pages};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::time::Duration;

/// Obeys the orders from `channel` until it ends. `shared` is memory shared with the producer, where both are on one
/// host, and otherwise this process's own.
pub(crate) fn serve<M: Mover>(mut channel: Channel, shared: OwnedFd) -> Result<(), Failure> {
    let mut consumer: Consumer<M> =
        Consumer { words: map(&shared, 0)?, fd: shared, dialled: None, connections: None, row: None };
    while let Some(order) = channel.next()? {
        match order {
            ToConsumer::Prepare(setup, producer) => reply(&mut channel, consumer.prepare(setup, producer)),
            ToConsumer::Gather(batch) => reply(&mut channel, consumer.gather(batch)),
            ToConsumer::Check => reply(&mut channel, consumer.check()),
            ToConsumer::Dial(address) => reply(&mut channel, consumer.dial(&address)),
            ToConsumer::Connect(address) => reply(&mut channel, consumer.connect(&address)),
            ToConsumer::OfferReads => reply(&mut channel, consumer.offer_reads()),
            ToConsumer::ConnectReads(target) => reply(&mut channel, consumer.connect_reads(target)),
            ToConsumer::Reset => {
                memory::reset(&consumer.words);
                reply(&mut channel, Ok(()))
            }
            ToConsumer::Sample(order) => reply(&mut channel, consumer.sample(&order)),
            ToConsumer::Echo { rounds, dialled } => {
                let stream = if dialled { consumer.dialled.as_mut() } else { Some(channel.stream()) };
                let stream = stream.ok_or_else(|| Failure::Failed("nothing was dialled".into()))?;
                stream.echo(rounds).map_err(|e| Failure::failed("answering pings", e))
            }
            ToConsumer::Spin(rounds) => {
                let outcome = memory::spin(&consumer.words, false, rounds).map(|_| ());
                reply(&mut channel, outcome)
            }
            ToConsumer::Finish => reply(&mut channel, consumer.finish()),
        }?;
    }
    Ok(())
}

fn map(fd: &OwnedFd, len: usize) -> Result<Shared, Failure> {
    Shared::map(fd, len).map_err(|e| Failure::failed("mapping the shared memory", e))
}

struct Consumer<M: Mover> {
    fd: OwnedFd,
    /// The words of the shared memory.
    words: Shared,
    dialled: Option<Stream>,
    connections: Option<tcp::Connections>,
    row: Option<Row<M>>,
}

/// What it holds for one row.
struct Row<M: Mover> {
    setup: Setup,
    layout: Layout,
    mover: M,
    producer: Address,
    /// Bytes outside the pool, one area an operation of a batch: where mode `copy` and the limits put theirs.
    own: Vec<Vec<u8>>,
    /// The source of the limit that copies within this process, once it is taken.
    second: Option<Pages>,
    /// Memory to compare a view with.
    populated: Option<Pages>,
    shared: Option<Shared>,
    /// Where bare reads put what they read.
    reads: Option<rdma::End>,
    /// What the last batch brought, and its first operation.
    held: Vec<Held<M::Payload>>,
    first: u64,
}

/// One payload that was got and not yet checked.
enum Held<P> {
    /// In the pool, in the consumer's own bytes, or mapped.
    Payload(P),
    /// As tensors.
    Tree(Tree),
}

impl<M: Mover> Consumer<M> {
    fn row(&mut self) -> Result<&mut Row<M>, Failure> {
        self.row.as_mut().ok_or_else(|| Failure::Failed("the consumer has no row".into()))
    }

    fn prepare(&mut self, setup: Setup, producer: Address) -> Result<(), Failure> {
        let layout = plan::layout(setup.mode, setup.size);
        let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let mover = M::open(&Needs {
            pool: plan::consumer_pool(&setup),
            path: setup.path,
            devices: setup.devices.clone(),
            bind: loopback, // nobody calls a consumer
            remote: setup.clock == Clock::Consumer,
            patience: Duration::from_secs(setup.patience_s),
        })?;
        let size = setup.size as usize;
        let memory = |e| Failure::failed("memory of the consumer's own", e);
        let areas = plan::own_areas(&setup);
        let own = (0..areas).map(|_| touched(size)).collect();
        let populated = (setup.mode == Mode::View).then(|| Pages::populated_memfd(size).map_err(memory)).transpose()?;
        let shared = setup.through.then(|| map(&self.fd, size)).transpose()?;
        if let Some(shared) = &shared {
            shared.touch(size);
        }
        let (second, reads, held, first) = (None, None, vec![], 0);
        self.row = Some(Row { setup, layout, mover, producer, own, second, populated, shared, reads, held, first });
        Ok(())
    }

    fn gather(&mut self, batch: Batch) -> Result<Gets, Failure> {
        let row = self.row()?;
        row.first = batch.first;
        row.held.clear();
        let Row { setup, mover, producer, own, .. } = row;
        let (setup, mover, producer) = (&*setup, &*mover, &*producer);
        let key = |index: usize| key(setup.row, batch.first + index as u64);
        let indices = 0..batch.count as usize;
        let cpu = cpu_seconds();
        let got = match setup.mode {
            Mode::Copy => {
                let areas = std::mem::take(own).into_iter().take(batch.count as usize);
                lanes::run(setup.concurrency, areas, |index, area| {
                    let key = key(index);
                    let called = now_ns();
                    let payload = mover.get_into(producer, &key, area)?;
                    let returned = now_ns();
                    let journey = payload.journey();
                    Ok((GetStamps { called, returned, end: returned }, journey, Held::Payload(payload)))
                })
            }
            Mode::Serialized => lanes::run(setup.concurrency, indices, |index, _| {
                let key = key(index);
                let called = now_ns();
                let payload = mover.get(producer, &key)?;
                let returned = now_ns();
                let bytes = payload.bytes(0).ok_or_else(|| Failure::Failed("the payload has no bytes".into()))?;
                let tree = Tree::decode(bytes).map_err(Failure::Failed)?;
                Ok((GetStamps { called, returned, end: now_ns() }, payload.journey(), Held::Tree(tree)))
            }),
            Mode::View | Mode::ZeroCopy | Mode::Tree | Mode::Gpu => {
                lanes::run(setup.concurrency, indices, |index, _| {
                    let key = key(index);
                    let called = now_ns();
                    let payload = match setup.mode {
                        Mode::View => mover.view(producer, &key)?,
                        _ => mover.get(producer, &key)?,
                    };
                    let returned = now_ns();
                    let journey = payload.journey();
                    Ok((GetStamps { called, returned, end: returned }, journey, Held::Payload(payload)))
                })
            }
        };
        let got: Vec<(GetStamps, Journey, Held<M::Payload>)> = got?;
        let cpu = cpu_seconds() - cpu;
        let mut gets = Gets { stamps: vec![], cpu, journeys: vec![] };
        for (stamps, journey, held) in got {
            gets.stamps.push(stamps);
            if !gets.journeys.contains(&journey) || journey.retries > 0 || journey.fallback_bytes > 0 {
                gets.journeys.push(journey);
            }
            row.held.push(held);
        }
        Ok(gets)
    }

    fn check(&mut self) -> Result<Checked, Failure> {
        let row = self.row()?;
        let mut checked = Checked { touch: vec![], touch_own: vec![] };
        if let Some(populated) = &row.populated {
            for held in &row.held {
                if let Held::Payload(view) = held {
                    checked.touch.push(timed(|| view.touch()));
                    checked.touch_own.push(timed(|| read_pages(populated)));
                }
            }
        }
        for (index, held) in row.held.drain(..).enumerate() {
            let operation = row.first + index as u64;
            let check =
                |arrived: &dyn Readable| check(&row.layout, row.setup.seed, operation, row.setup.verify, arrived);
            let outcome = match &held {
                Held::Payload(payload) => check(payload),
                Held::Tree(tree) => check(tree),
            };
            outcome.map_err(|mismatch| Failure::Failed(format!("operation {operation} arrived wrong: {mismatch} (that is a fault: please report it with the options of this run)")))?;
            if let (Mode::Copy, Held::Payload(payload)) = (row.setup.mode, held) {
                let own = payload.into_own();
                row.own.push(own.ok_or_else(|| Failure::Failed("the caller's own bytes didn't come back".into()))?);
            }
        }
        while row.own.len() < plan::own_areas(&row.setup) {
            row.own.push(touched(row.setup.size as usize)); // the areas that a smaller batch didn't need
        }
        Ok(checked)
    }

    fn dial(&mut self, address: &str) -> Result<(), Failure> {
        let stream = TcpStream::connect(address).and_then(Stream::tcp);
        self.dialled = Some(stream.map_err(|e| Failure::failed(format!("connecting to {address}"), e))?);
        Ok(())
    }

    fn connect(&mut self, address: &str) -> Result<(), Failure> {
        let connections = tcp::Connections::connect(address);
        self.connections = Some(connections.map_err(|e| Failure::failed(format!("connecting to {address}"), e))?);
        Ok(())
    }

    fn offer_reads(&mut self) -> Result<Vec<u8>, Failure> {
        let row = self.row()?;
        let end = rdma::End::new(row.setup.devices.first().map(String::as_str), row.setup.size)?;
        Ok(row.reads.insert(end).address())
    }

    fn connect_reads(&mut self, target: rdma::Target) -> Result<(), Failure> {
        let reads = self.row()?.reads.as_mut();
        reads.ok_or_else(|| Failure::Failed("no bare reads were offered".into()))?.connect(target)
    }

    fn sample(&mut self, order: &Order) -> Result<Received, Failure> {
        let row = self.row.as_mut().ok_or_else(|| Failure::Failed("the consumer has no row".into()))?;
        let size = order.size as usize;
        if let (Variant::Rdma { piece }, Some(reads)) = (&order.variant, &row.reads) {
            return reads.read(*piece, order.size, order.rounds);
        }
        let Some(own) = row.own.first_mut().filter(|own| own.len() == size) else {
            return Err(Failure::Failed("the consumer's own memory is too small".into()));
        };
        match (&order.variant, &row.shared, &self.connections) {
            (Variant::Memory { streaming, threads }, ..) => {
                let memory = |e| Failure::failed("memory to copy from", e);
                let second = match row.second.take() {
                    Some(second) => second,
                    None => Pages::new(size).map_err(memory)?,
                };
                let second = row.second.insert(second);
                Content::new(order.fill, order.size).fill(0, second);
                Ok(memory::copy(*streaming, *threads, own, second, order.rounds))
            }
            (Variant::Through { streaming, .. }, Some(shared), _) => {
                memory::copy_out(*streaming, shared, own, order.rounds)
            }
            (Variant::Tcp { line, write, streams }, _, Some(connections)) => {
                tcp::receive(connections, line, *streams, *write as usize, own, order.rounds)
            }
            _ => Err(Failure::Failed(format!("the consumer isn't ready for {}", order.variant))),
        }
    }

    fn finish(&mut self) -> Result<(), Failure> {
        match self.row.take() {
            Some(row) => {
                drop(row.held);
                row.mover.close()
            }
            None => Ok(()),
        }
    }
}

fn timed(work: impl FnOnce()) -> u64 {
    let begin = now_ns();
    work();
    now_ns() - begin
}

/// Bytes whose pages are all there.
fn touched(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    for byte in bytes.iter_mut().step_by(PAGE) {
        *std::hint::black_box(byte) = 1;
    }
    bytes
}
