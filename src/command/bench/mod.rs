//! `towline bench`: how fast payloads travel between two processes, beside what the machine can do at all.
//!
//! The process that a person starts leads the run and, on one host, produces on a second thread; the consumers are
//! this program once more, each a process of its own. Orders and stamps go over sockets that carry nothing while
//! operations run. With `--connect` the producer is another machine's `--listen`.

mod consumer;
mod content;
#[cfg(test)]
mod fake;
mod lanes;
mod layout;
mod limits;
mod meeting;
mod message;
mod mover;
mod plan;
mod process;
mod producer;
mod progress;
mod report;
mod runner;
mod serialized;
mod stats;
#[cfg(test)]
mod tests;
mod transport;

pub(crate) use process::WORKER;
pub(crate) use transport::Transport;

use super::args::{BenchArgs, Json, Size};
use super::machine::{self, Machine};
use super::sys::{self, Shared};
use super::{Failure, devices};
use message::{Channel, Stream};
use process::Worker;
use producer::Surroundings;
use progress::Progress;
use report::Row;
use runner::Runner;
use std::fs::File;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

/// Runs what the arguments ask for over the transport `M`.
pub(crate) fn run<M: mover::Mover + 'static>(args: &BenchArgs) -> Result<(), Failure> {
    if let Some(address) = &args.listen {
        return listen::<M>(address);
    }
    let rows = plan::rows(args)?;
    check_memory(&rows, args)?;
    let mut output = Output::open(args)?;
    let memories = (0..args.consumers).map(|_| sys::memfd(sys::PAGE)).collect::<Result<Vec<OwnedFd>, _>>();
    let memories = memories.map_err(|e| Failure::failed("memfd_create", e))?;
    let producer = match &args.connect {
        Some(address) => meeting::connect(address)?,
        None => produce::<M>(&memories[0])?,
    };
    let mut workers = vec![];
    let mut consumers = vec![];
    for (index, memory) in memories.iter().enumerate() {
        let (worker, channel) = Worker::start(&format!("consumer {index}"), memory)?;
        workers.push(worker);
        consumers.push(channel);
    }
    let spin = args.spin.then(|| Shared::map(&memories[0], 0)).transpose();
    let spin = spin.map_err(|e| Failure::failed("mapping shared memory", e))?;
    let mut runner = Runner::new(producer, consumers, spin, Machine::here(devices::transports()));

    let progress = Progress::new(rows.len());
    let mut done = vec![];
    let mut outcome = Ok(());
    for (number, plan) in (0..).zip(&rows) {
        let name = format!("{} {} {}", Size(plan.size), plan.path, plan.mode);
        progress.begin(name.clone());
        let row = runner.row(&plan.setup(number, args), &plan.effort(args));
        match row.and_then(|row| output.row(&row).map(|()| row)) {
            Ok(row) => done.push(row),
            Err(failure) => {
                outcome = Err(failure.within(name));
                break;
            }
        }
        progress.end();
    }
    progress.clear();
    if !done.is_empty() {
        output.table(&done)?;
    }
    outcome?;
    drop(runner);
    workers.into_iter().try_for_each(Worker::join)
}

/// What the second process does: obeys until the bench ends.
pub(crate) fn work<M: mover::Mover>() -> Result<(), Failure> {
    let (channel, memory) = process::inherited()?;
    consumer::serve::<M>(channel, memory)
}

/// Produces on a thread of this process.
fn produce<M: mover::Mover + 'static>(memory: &OwnedFd) -> Result<Channel, Failure> {
    let failed = |e| Failure::failed("starting the producer", e);
    let (ours, theirs) = UnixStream::pair().map_err(failed)?;
    let bind = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let surroundings = Surroundings { bind, shared: Some(memory.try_clone().map_err(failed)?) };
    let channel = Channel::new(Stream::Unix(theirs), "the bench", None)?;
    let serving = move || producer::serve::<M>(channel, surroundings);
    // Its end is the end of its channel, seen by the runner; nobody has to wait for it.
    std::thread::Builder::new().name("producer".into()).spawn(serving).map_err(failed)?;
    Channel::new(Stream::Unix(ours), "the producer", None)
}

/// Produces for one bench that connects, and ends with it.
fn listen<M: mover::Mover>(address: &str) -> Result<(), Failure> {
    let (channel, mut bind, peer) = meeting::accept(address)?;
    bind.set_port(0);
    eprintln!("{peer}: a bench begins");
    producer::serve::<M>(channel, Surroundings { bind, shared: None })?;
    eprintln!("{peer}: the bench has ended");
    Ok(())
}

/// Refuses what doesn't fit into memory, before anything is begun.
fn check_memory(rows: &[plan::RowPlan], args: &BenchArgs) -> Result<(), Failure> {
    let Some(available) = machine::available_memory() else { return Ok(()) };
    for plan in rows {
        let need = plan::memory(&plan.setup(0, args));
        if need > available {
            let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
            let (size, path, mode) = (Size(plan.size), plan.path, plan.mode);
            return Err(Failure::Refused(format!(
                "{size} {path} {mode} needs {:.1} GiB of memory and {:.1} GiB are available; a smaller --size, \
                 --concurrency or --consumers needs less",
                gib(need),
                gib(available)
            )));
        }
    }
    Ok(())
}

/// Where the results go.
struct Output {
    json: Option<Box<dyn Write>>,
    /// Whether standard output has the JSON, and the table goes to standard error.
    standard: bool,
}

impl Output {
    fn open(args: &BenchArgs) -> Result<Self, Failure> {
        let json: Option<Box<dyn Write>> = match &args.json {
            None => None,
            Some(Json::Standard) => Some(Box::new(std::io::stdout())),
            Some(Json::File(path)) => {
                let file = File::create(path);
                let refused =
                    |e| Failure::Refused(format!("--json {}: {e} (name a file that can be written)", path.display()));
                Some(Box::new(file.map_err(refused)?))
            }
        };
        Ok(Self { json, standard: args.json == Some(Json::Standard) })
    }

    /// Writes one row as JSON, at once.
    fn row(&mut self, row: &Row) -> Result<(), Failure> {
        let Some(out) = &mut self.json else { return Ok(()) };
        let failed = |e: &dyn std::fmt::Display| Failure::failed("writing JSON", e);
        let text = serde_json::to_string(row).map_err(|e| failed(&e))?;
        writeln!(out, "{text}").and_then(|()| out.flush()).map_err(|e| failed(&e))
    }

    /// Writes the table.
    fn table(&self, rows: &[Row]) -> Result<(), Failure> {
        let text = report::table(rows);
        let written = match self.standard {
            true => write!(std::io::stderr(), "{text}"),
            false => write!(std::io::stdout(), "{text}"),
        };
        written.map_err(|e| Failure::failed("writing the table", e))
    }
}
