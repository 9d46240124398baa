//! The producing side: fills payloads, puts them when the consumers wait, and sends the bare bytes of the limits.

use super::content::Content;
use super::lanes;
use super::layout::Layout;
use super::limits::{Order, Sent, Variant, memory, rdma, tcp};
use super::message::{Batch, Channel, PutStamps, Puts, Setup, ToProducer};
use super::mover::{Address, Mover, Needs};
use super::plan;
use super::report::Clock;
use super::serialized::Tree;
use crate::command::Failure;
use crate::command::args::Mode;
use crate::command::sys::{Pages, Shared, cpu_seconds, now_ns, readable};
use serde::Serialize;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::time::Duration;

/// Flips the bits of one byte of every payload, at this offset, after it was filled: the way to see that a wrong byte
/// is found. Read by this filler alone.
const CORRUPT: &str = "TOWLINE_BENCH_CORRUPT";

/// What a producer knows for all rows.
#[derive(Debug)]
pub(crate) struct Surroundings {
    /// Where it listens, with port 0.
    pub(crate) bind: SocketAddr,
    /// Memory shared with the first consumer, where both are on one host.
    pub(crate) shared: Option<OwnedFd>,
}

/// Obeys the orders from `channel` until it ends.
pub(crate) fn serve<M: Mover>(mut channel: Channel, surroundings: Surroundings) -> Result<(), Failure> {
    let mut producer: Producer<M> = Producer::new(surroundings);
    while let Some(order) = channel.next()? {
        match order {
            ToProducer::Prepare(setup) => reply(&mut channel, producer.prepare(setup)),
            ToProducer::Fill(batch) => reply(&mut channel, producer.fill(batch)),
            ToProducer::Put(batch) => {
                // No order comes before the answer to the last: what can be read is the end.
                let gone = || readable(&[channel.readiness()], Duration::ZERO).is_ok_and(|ended| ended[0]);
                let outcome = producer.put(batch, &gone);
                reply(&mut channel, outcome)
            }
            ToProducer::Settle => reply(&mut channel, producer.row().map(|row| cpu_seconds() - row.cpu)),
            ToProducer::Listen => reply(&mut channel, producer.listen()),
            ToProducer::Accept => reply(&mut channel, producer.accept()),
            ToProducer::AcceptReads(consumer) => reply(&mut channel, producer.accept_reads(&consumer)),
            ToProducer::Sample(order) => reply(&mut channel, producer.sample(&order)),
            ToProducer::Echo(rounds) => {
                channel.stream().echo(rounds).map_err(|e| Failure::failed("answering pings", e))
            }
            ToProducer::Finish => reply(&mut channel, producer.finish()),
        }?;
    }
    Ok(())
}

/// Sends the outcome of an order.
pub(crate) fn reply<T: Serialize>(channel: &mut Channel, outcome: Result<T, Failure>) -> Result<(), Failure> {
    channel.send(&outcome)
}

/// The key of an operation.
pub(crate) fn key(row: u64, operation: u64) -> String {
    format!("bench/{row}/{operation}")
}

struct Producer<M: Mover> {
    surroundings: Surroundings,
    corrupt: Option<u64>,
    listener: Option<TcpListener>,
    connections: Option<tcp::Connections>,
    row: Option<Row<M>>,
}

/// What it holds for one row.
struct Row<M: Mover> {
    setup: Setup,
    layout: Layout,
    mover: M,
    /// Bytes outside the pool: the source of mode `copy` and of the limits.
    own: Pages,
    /// The tensors of mode `serialized`, one tree an operation of a batch.
    trees: Vec<Tree>,
    /// Pool buffers that are filled and not yet put, by operation of the batch.
    filled: Vec<Vec<Option<M::Buffer>>>,
    shared: Option<Shared>,
    /// What bare reads read.
    reads: Option<rdma::End>,
    /// Processor time when the last batch began.
    cpu: f64,
}

impl<M: Mover> Producer<M> {
    fn new(surroundings: Surroundings) -> Self {
        let corrupt = std::env::var(CORRUPT).ok().and_then(|offset| offset.parse().ok());
        Self { surroundings, corrupt, listener: None, connections: None, row: None }
    }

    fn row(&mut self) -> Result<&mut Row<M>, Failure> {
        self.row.as_mut().ok_or_else(|| Failure::Failed("the producer has no row".into()))
    }

    fn row_for(&mut self, batch: Batch) -> Result<&mut Row<M>, Failure> {
        let row = self.row()?;
        match batch.count <= row.setup.batch && batch.first.checked_add(batch.count.into()).is_some() {
            true => Ok(row),
            false => Err(Failure::Failed(format!("a batch of {} is larger than was said", batch.count))),
        }
    }

    fn prepare(&mut self, setup: Setup) -> Result<Address, Failure> {
        plan::check(&setup)?;
        let layout = plan::layout(setup.mode, setup.size);
        let mover = M::open(&Needs {
            pool: plan::producer_pool(&setup),
            path: setup.path,
            devices: devices(&setup),
            bind: self.surroundings.bind,
            remote: setup.clock == Clock::Consumer,
            patience: Duration::from_secs(setup.patience_s),
        })?;
        let address = mover.address()?;
        let memory = |e| Failure::failed("memory of the producer's own", e);
        let mut own = Pages::new(plan::own_bytes(&setup)).map_err(memory)?;
        own.touch();
        let trees = match setup.mode {
            Mode::Serialized => (0..setup.batch).map(|_| Tree::new(&layout)).collect(),
            _ => vec![],
        };
        let shared = self.surroundings.shared.as_ref().filter(|_| setup.through);
        let shared = shared.map(|fd| Shared::map(fd, setup.size as usize)).transpose().map_err(memory)?;
        if let Some(shared) = &shared {
            shared.touch(setup.size as usize);
        }
        self.row = Some(Row { setup, layout, mover, own, trees, filled: vec![], shared, reads: None, cpu: 0.0 });
        Ok(address)
    }

    fn fill(&mut self, batch: Batch) -> Result<(), Failure> {
        let corrupt = self.corrupt;
        let row = self.row_for(batch)?;
        let size = row.setup.size as usize;
        row.filled.clear();
        for index in 0..batch.count as usize {
            let content = Content::new(row.setup.seed, batch.first + index as u64);
            let fill = |offset: u64, bytes: &mut [u8]| {
                content.fill(offset, bytes);
                let wrong = corrupt.and_then(|at| bytes.get_mut(usize::try_from(at.checked_sub(offset)?).ok()?));
                if let Some(byte) = wrong {
                    *byte = !*byte;
                }
            };
            match row.setup.mode {
                Mode::Copy => fill(0, &mut row.own[index * size..][..size]),
                Mode::Serialized => {
                    for (part, plan) in row.layout.parts().iter().enumerate() {
                        fill(plan.offset, row.trees[index].data_mut(part));
                    }
                }
                Mode::View | Mode::ZeroCopy | Mode::Tree | Mode::Gpu => {
                    let mut buffers = scattered(&row.mover, &row.layout)?;
                    for (plan, buffer) in row.layout.parts().iter().zip(&mut buffers) {
                        if let Some(buffer) = buffer {
                            fill(plan.offset, buffer.as_mut());
                        }
                    }
                    row.filled.push(buffers);
                }
            }
        }
        Ok(())
    }

    fn put(&mut self, batch: Batch, gone: &(dyn Fn() -> bool + Sync)) -> Result<Puts, Failure> {
        let row = self.row_for(batch)?;
        row.cpu = cpu_seconds();
        let filled = std::mem::take(&mut row.filled);
        let Row { setup, layout, mover, own, trees, .. } = row;
        // What the lanes share, without the buffers, each of which is one lane's own.
        let (setup, layout, mover, own, trees) = (&*setup, &*layout, &*mover, &own[..], &trees[..]);
        let (size, consumers) = (setup.size as usize, setup.consumers);
        let key = |index: usize| key(setup.row, batch.first + index as u64);
        let indices = 0..batch.count as usize;
        let stamps = match setup.mode {
            Mode::Copy => lanes::run(setup.concurrency, indices, |index, _| {
                let parts = vec![M::bytes_part(&layout.parts()[0], &own[index * size..][..size])];
                let key = key(index);
                mover.await_consumers(&key, consumers, gone)?;
                let called = now_ns();
                mover.put(&key, parts, consumers)?;
                Ok(PutStamps { begin: called, called, returned: now_ns() })
            }),
            Mode::Serialized => lanes::run(setup.concurrency, indices, |index, _| {
                let key = key(index);
                mover.await_consumers(&key, consumers, gone)?;
                let begin = now_ns();
                let bytes = trees[index].encode().map_err(Failure::Failed)?;
                let layout = Layout::single(bytes.len() as u64);
                let called = now_ns();
                mover.put(&key, vec![M::bytes_part(&layout.parts()[0], &bytes)], consumers)?;
                Ok(PutStamps { begin, called, returned: now_ns() })
            }),
            Mode::View | Mode::ZeroCopy | Mode::Tree | Mode::Gpu => {
                lanes::run(setup.concurrency, filled, |index, buffers| {
                    let parts = layout.parts().iter().zip(buffers);
                    let part = |(plan, buffer): (_, Option<_>)| match buffer {
                        Some(buffer) => M::buffer_part(plan, buffer),
                        None => M::bytes_part(plan, &[]),
                    };
                    let parts = parts.map(part).collect();
                    let key = key(index);
                    mover.await_consumers(&key, consumers, gone)?;
                    let called = now_ns();
                    mover.put(&key, parts, consumers)?;
                    Ok(PutStamps { begin: called, called, returned: now_ns() })
                })
            }
        };
        Ok(Puts { stamps: stamps? })
    }

    fn listen(&mut self) -> Result<String, Failure> {
        let failed = |e| Failure::failed("listening for bare TCP", e);
        let listener = TcpListener::bind(self.surroundings.bind).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?.to_string();
        self.listener = Some(listener);
        Ok(address)
    }

    fn accept(&mut self) -> Result<Vec<super::limits::Line>, Failure> {
        let listener = self.listener.take().ok_or_else(|| Failure::Failed("nobody listens for bare TCP".into()))?;
        let accepted = tcp::Connections::accept(&listener);
        let (connections, lines) = accepted.map_err(|e| Failure::failed("accepting bare TCP", e))?;
        self.connections = Some(connections);
        Ok(lines)
    }

    fn accept_reads(&mut self, consumer: &[u8]) -> Result<rdma::Target, Failure> {
        let row = self.row()?;
        let end = rdma::End::new(devices(&row.setup).first().map(String::as_str), row.setup.size)?;
        let target = end.accept(consumer)?;
        row.reads = Some(end);
        Ok(target)
    }

    fn sample(&mut self, order: &Order) -> Result<Sent, Failure> {
        order.check()?;
        let row = self.row.as_mut().ok_or_else(|| Failure::Failed("the producer has no row".into()))?;
        let own = row.own.get_mut(..order.size as usize);
        let own = own.ok_or_else(|| Failure::Failed("the producer's own memory is too small".into()))?;
        Content::new(order.fill, order.size).fill(0, own);
        match (&order.variant, &row.shared, &self.connections) {
            (Variant::Through { streaming, piece }, Some(shared), _) => {
                memory::copy_in(*streaming, *piece as usize, shared, own, order.rounds)
            }
            (Variant::Tcp { line, write, streams }, _, Some(connections)) => {
                tcp::send(connections, line, *streams, *write as usize, own, order.rounds)
            }
            _ => Err(Failure::Failed(format!("the producer isn't ready for {}", order.variant))),
        }
    }

    fn finish(&mut self) -> Result<(), Failure> {
        match self.row.take() {
            Some(row) => {
                drop(row.filled);
                row.mover.close()
            }
            None => Ok(()),
        }
    }
}

/// The devices that are named, if it was on this machine.
fn devices(setup: &Setup) -> Vec<String> {
    if setup.clock == Clock::One { setup.devices.clone() } else { vec![] }
}

/// A buffer for each part of `layout` that has bytes, in the parts' order, but not side by side: a tree's tensors lie
/// scattered.
fn scattered<M: Mover>(mover: &M, layout: &Layout) -> Result<Vec<Option<M::Buffer>>, Failure> {
    let parts = layout.parts();
    let mut buffers: Vec<Option<M::Buffer>> = parts.iter().map(|_| None).collect();
    for turn in 0..parts.len() {
        let index = turn * 37 % parts.len(); // 37 and the numbers of parts, 64 and 1, have no common divisor
        if parts[index].len > 0 {
            buffers[index] = Some(mover.alloc(parts[index].len as usize)?);
        }
    }
    Ok(buffers)
}
