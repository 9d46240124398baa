//! Runs the rows: gives both sides their orders, puts their stamps together, and takes the limits between.

use super::limits::{self, Kind, Limit, Line, Order, Received, Sampler, Sent, Variant};
use super::message::{Batch, Channel, Checked, Gets, PutStamps, Puts, SILENT, Setup, Stream, ToConsumer, ToProducer};
use super::mover::{Address, Journey};
use super::plan::Effort;
use super::report::{Clock, Row, percentiles, thousandths};
use crate::command::Failure;
use crate::command::args::{Mode, Verify};
use crate::command::machine::Machine;
use crate::command::sys::{self, Shared};
use std::collections::HashMap;
use std::net::{Ipv4Addr, TcpListener};
use std::time::{Duration, Instant};

/// Pings at a time.
const PINGS: u32 = 64;
/// Pings at the begin of each time that don't count: the processes have just done something else.
const COLD: usize = 4;
/// Rounds of spinning at a time.
const SPINS: u32 = 2000;
/// How long a side may take for one order beyond what a call of the row may wait.
const SLACK: Duration = Duration::from_secs(60);
/// How long the others are listened to after one side failed.
const AFTERMATH: Duration = Duration::from_millis(500);

/// Both sides, and what is known about this run.
#[derive(Debug)]
pub(crate) struct Runner {
    pub(crate) producer: Channel,
    pub(crate) consumers: Vec<Channel>,
    /// Memory shared with the first consumer, for `--spin`.
    pub(crate) spin: Option<Shared>,
    pub(crate) machine: Machine,
    /// How long a side may take for one order.
    patience: Duration,
    /// The TCP connection for pings to the first consumer.
    dialled: Option<Stream>,
    /// The bare TCP connections of the limit, once there are any.
    lines: Option<Vec<Line>>,
    /// The variants that won, by limit and size.
    finalists: HashMap<(Kind, u64), Vec<Variant>>,
}

/// What was measured of one row so far.
#[derive(Debug, Default)]
struct Measured {
    times: Vec<u64>,
    puts: Vec<u64>,
    gets: Vec<u64>,
    wall: u64,
    cpu: f64,
    touch: Vec<u64>,
    touch_own: Vec<u64>,
    rtt: Vec<u64>,
    spin_rtt: Vec<u64>,
    journeys: Vec<Journey>,
}

impl Runner {
    /// A runner over these sides.
    pub(crate) fn new(producer: Channel, consumers: Vec<Channel>, spin: Option<Shared>, machine: Machine) -> Self {
        let finalists = HashMap::new();
        Self { producer, consumers, spin, machine, patience: SLACK, dialled: None, lines: None, finalists }
    }

    /// Runs one row.
    pub(crate) fn row(&mut self, setup: &Setup, effort: &Effort) -> Result<Row, Failure> {
        self.patience = SLACK + Duration::from_secs(setup.patience_s);
        self.set_limit(self.patience)?;
        let address: Address = self.producer.call(&ToProducer::Prepare(setup.clone())).map_err(producer)?;
        for consumer in &mut self.consumers {
            consumer.send(&ToConsumer::Prepare(setup.clone(), address.clone()))?;
        }
        self.consumers_done()?;

        let mut next = 0;
        let mut measured = Measured::default();
        while next < effort.warmup {
            let left = effort.warmup - next;
            let batch = batch_of(setup, &mut next, left);
            self.operations(setup, batch, None, &mut Measured::default())?;
        }
        let mut sampler: Option<Sampler> = None;
        let begin = Instant::now();
        let mut limit_begun = false;
        loop {
            let done = measured.times.len() as u64;
            let enough = match effort.count {
                Some(count) => done >= count,
                None => done >= effort.at_least && begin.elapsed() >= effort.budget,
            };
            if enough {
                break;
            }
            let left = effort.count.map_or(u64::MAX, |count| count - done);
            let batch = batch_of(setup, &mut next, left);
            let path = path_of(&measured).ok();
            self.operations(setup, batch, path.as_deref(), &mut measured)?;
            let path = path_of(&measured)?;
            if !limit_begun {
                limit_begun = true;
                sampler = self.sampler(setup, &path)?;
                if matches!(path.as_str(), "tcp" | "rdma") {
                    self.dial(setup)?;
                }
            }
            if measured.rtt.is_empty() {
                self.meter(setup, &path, &mut measured)?;
            }
            if let Some(sampler) = &mut sampler {
                self.sample(setup, sampler)?;
                while !sampler.is_sifted() {
                    self.sample(setup, sampler)?;
                }
            }
        }
        if let Some(sampler) = &mut sampler {
            while !sampler.is_enough() {
                self.sample(setup, sampler)?;
            }
        }
        self.producer.send(&ToProducer::Finish)?;
        for consumer in &mut self.consumers {
            consumer.call::<()>(&ToConsumer::Finish)?;
        }
        self.producer.answer::<()>().map_err(producer)?;
        let limit = sampler.as_ref().and_then(Sampler::limit);
        if let (Some(sampler), Some(kind)) = (&sampler, Kind::of(setup.mode, &path_of(&measured)?)) {
            self.finalists.insert((kind, setup.size), sampler.finalists());
        }
        self.result(setup, measured, limit)
    }

    fn set_limit(&self, limit: Duration) -> Result<(), Failure> {
        std::iter::once(&self.producer).chain(&self.consumers).try_for_each(|channel| channel.set_limit(Some(limit)))
    }

    /// Runs the operations of one batch: fill; take round trips, once the path is known; get and put; check. The round
    /// trips come right before the operations that they are held against, so that both find the machine in one state:
    /// filling and checking a gigabyte leaves nothing of either in the caches.
    fn operations(
        &mut self,
        setup: &Setup,
        batch: Batch,
        path: Option<&str>,
        measured: &mut Measured,
    ) -> Result<(), Failure> {
        self.producer.call::<()>(&ToProducer::Fill(batch)).map_err(producer)?;
        if let Some(path) = path {
            self.meter(setup, path, measured)?;
        }
        for consumer in &mut self.consumers {
            consumer.send(&ToConsumer::Gather(batch))?;
        }
        self.producer.send(&ToProducer::Put(batch))?;
        let (puts, gets) = self.put_and_got()?;
        let settled: f64 = self.producer.call(&ToProducer::Settle).map_err(producer)?;
        for consumer in &mut self.consumers {
            consumer.send(&ToConsumer::Check)?;
        }
        for consumer in &mut self.consumers {
            let checked: Checked = consumer.answer()?;
            measured.touch.extend(checked.touch);
            measured.touch_own.extend(checked.touch_own);
        }
        measured.cpu += settled + gets.iter().map(|g| g.cpu).sum::<f64>();
        measured.add(setup.clock, &puts.stamps, &gets)
    }

    /// Waits for the answers of the producer and of all consumers, in whatever order they come: when one side fails,
    /// the other may wait in vain.
    fn put_and_got(&mut self) -> Result<(Puts, Vec<Gets>), Failure> {
        let mut puts = None;
        let mut gets: Vec<Option<Gets>> = self.consumers.iter().map(|_| None).collect();
        let mut failures: Vec<Failure> = vec![];
        let mut until = Instant::now() + self.patience;
        // Side 0 is the producer.
        let mut waited_for: Vec<usize> = (0..=self.consumers.len()).collect();
        while !waited_for.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let channels = waited_for.iter().map(|&side| match side {
                0 => self.producer.readiness(),
                _ => self.consumers[side - 1].readiness(),
            });
            let ready = sys::readable(&channels.collect::<Vec<_>>(), left);
            let ready = ready.map_err(|e| Failure::failed("waiting for both sides", e))?;
            let (answering, silent) = waited_for.iter().zip(ready).partition::<Vec<_>, _>(|(_, ready)| *ready);
            for (&side, _) in answering {
                let outcome = match side {
                    0 => self.producer.answer().map(|answer| puts = Some(answer)).map_err(producer),
                    _ => self.consumers[side - 1].answer().map(|answer| gets[side - 1] = Some(answer)),
                };
                if let Err(failure) = outcome {
                    failures.push(failure);
                    until = until.min(Instant::now() + AFTERMATH); // the other side may know more
                }
            }
            waited_for = silent.into_iter().map(|(&side, _)| side).collect();
        }
        let mut failures = failures.into_iter();
        match (failures.next(), puts, gets.into_iter().collect()) {
            (None, Some(puts), Some(gets)) => Ok((puts, gets)),
            (first, ..) => {
                let first = first.unwrap_or_else(|| Failure::Failed(SILENT.into()));
                Err(failures.fold(first, |all, more| all.and(&more)))
            }
        }
    }

    fn consumers_done(&mut self) -> Result<(), Failure> {
        self.consumers.iter_mut().try_for_each(|consumer| consumer.answer::<()>())
    }

    /// Takes the round trips.
    fn meter(&mut self, setup: &Setup, path: &str, measured: &mut Measured) -> Result<(), Failure> {
        let failed = |e| Failure::failed("pings", e);
        let wire = matches!(path, "tcp" | "rdma");
        let times = if setup.clock == Clock::Consumer {
            self.producer.send(&ToProducer::Echo(PINGS))?;
            self.producer.stream().ping(PINGS).map_err(failed)?
        } else {
            let consumer = &mut self.consumers[0];
            consumer.send(&ToConsumer::Echo { rounds: PINGS, dialled: wire })?;
            let stream = self.dialled.as_mut().filter(|_| wire);
            stream.unwrap_or_else(|| consumer.stream()).ping(PINGS).map_err(failed)?
        };
        measured.rtt.extend(times.into_iter().skip(COLD));
        if let Some(shared) = &self.spin {
            limits::memory::reset(shared);
            self.consumers[0].send(&ToConsumer::Spin(SPINS))?;
            let times = limits::memory::spin(shared, true, SPINS)?;
            self.consumers[0].answer::<()>()?;
            measured.spin_rtt.extend(times.into_iter().skip(COLD));
        }
        Ok(())
    }

    /// Makes the TCP connection for pings between the two processes of this host.
    fn dial(&mut self, setup: &Setup) -> Result<(), Failure> {
        if self.dialled.is_some() || setup.clock == Clock::Consumer {
            return Ok(());
        }
        let failed = |e| Failure::failed("a TCP connection for pings", e);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        self.consumers[0].call::<()>(&ToConsumer::Dial(address.to_string()))?;
        let (stream, _) = listener.accept().map_err(failed)?;
        self.dialled = Some(Stream::tcp(stream).map_err(failed)?);
        Ok(())
    }

    /// The sampler of the row's limit, with what it needs made ready.
    fn sampler(&mut self, setup: &Setup, path: &str) -> Result<Option<Sampler>, Failure> {
        let Some(kind) = Kind::of(setup.mode, path) else { return Ok(None) };
        if kind == Kind::Tcp && self.lines.is_none() {
            let address: String = self.producer.call(&ToProducer::Listen).map_err(producer)?;
            self.consumers[0].call::<()>(&ToConsumer::Connect(address))?;
            self.lines = Some(self.producer.call(&ToProducer::Accept).map_err(producer)?);
        }
        if kind == Kind::Rdma {
            let consumer: Vec<u8> = self.consumers[0].call(&ToConsumer::OfferReads)?;
            let target: limits::rdma::Target =
                self.producer.call(&ToProducer::AcceptReads(consumer)).map_err(producer)?;
            self.consumers[0].call::<()>(&ToConsumer::ConnectReads(target))?;
        }
        let ready = match kind {
            Kind::Through => setup.through,
            Kind::Memory | Kind::Tcp | Kind::Rdma => true,
        };
        if !ready {
            return Ok(None); // --connect to this very host: nothing is shared but what the endpoints share
        }
        let variants = Variant::all(kind, setup.size, self.lines.as_deref().unwrap_or_default());
        let known = self.finalists.get(&(kind, setup.size)).map_or(&[][..], Vec::as_slice);
        Ok(Some(Sampler::new(setup.size, variants, known)))
    }

    /// Takes one sample of the limit.
    fn sample(&mut self, setup: &Setup, sampler: &mut Sampler) -> Result<(), Failure> {
        let Some((index, variant)) = sampler.turn() else { return Ok(()) };
        let rounds = ((256 << 10) / setup.size).clamp(1, 64) as u32;
        let order = Order { variant: variant.clone(), size: setup.size, rounds, fill: setup.seed };
        let two_sides = !matches!(order.variant, Variant::Memory { .. } | Variant::Rdma { .. });
        let consumer = &mut self.consumers[0];
        if matches!(order.variant, Variant::Through { .. }) {
            consumer.call::<()>(&ToConsumer::Reset)?;
        }
        consumer.send(&ToConsumer::Sample(order.clone()))?;
        let sent: Option<Sent> = match two_sides {
            true => Some(self.producer.call(&ToProducer::Sample(order)).map_err(producer)?),
            false => None,
        };
        let received: Received = consumer.answer()?;
        let begins = match (&sent, setup.clock) {
            (Some(sent), Clock::One) => &sent.begins,
            _ => &received.asked,
        };
        let seconds =
            begins.iter().zip(&received.ends).map(|(&begin, &end)| end.saturating_sub(begin).max(1) as f64 / 1e9);
        let seconds: Vec<f64> = seconds.collect();
        sampler.add(index, &seconds, received.cpu + sent.as_ref().map_or(0.0, |sent| sent.cpu));
        Ok(())
    }

    fn result(&self, setup: &Setup, measured: Measured, limit: Option<Limit>) -> Result<Row, Failure> {
        let nothing = || Failure::Failed("no operation was measured".into());
        let [p50_us, p90_us, p99_us, max_us] = percentiles(&measured.times).ok_or_else(nothing)?;
        let median = |times: &[u64]| percentiles(times).map(|p| p[0]);
        let moved_by_one = setup.size as f64 * f64::from(setup.consumers);
        let moved = moved_by_one * measured.times.len() as f64;
        let seconds = match setup.concurrency {
            1 => p50_us / 1e6 * measured.times.len() as f64,
            _ => measured.wall as f64 / 1e9,
        };
        let bytes_per_s = moved / seconds;
        let efficiency = limit.as_ref().map(|limit| thousandths(bytes_per_s / limit.bytes_per_s));
        let first = measured.journeys.first().ok_or_else(nothing)?;
        Ok(Row {
            mode: setup.mode,
            path: first.path.clone(),
            path_reason: first.reason.clone(),
            size_bytes: setup.size,
            count: measured.times.len() as u64,
            concurrency: setup.concurrency,
            consumers: setup.consumers,
            seed: setup.seed,
            clock: setup.clock,
            p50_us,
            p90_us,
            p99_us,
            max_us,
            put_us: median(&measured.puts).ok_or_else(nothing)?,
            get_us: median(&measured.gets).ok_or_else(nothing)?,
            bytes_per_s: bytes_per_s.round(),
            limit_bytes_per_s: limit.as_ref().map(|limit| limit.bytes_per_s.round()),
            limit_variant: limit.as_ref().map(|limit| limit.variant.clone()),
            efficiency,
            rtt_us: median(&measured.rtt).ok_or_else(nothing)?,
            spin_rtt_us: median(&measured.spin_rtt),
            touch_us: median(&measured.touch).filter(|_| setup.mode == Mode::View),
            touch_own_us: median(&measured.touch_own).filter(|_| setup.mode == Mode::View),
            cpu_s_per_gb: thousandths(measured.cpu / (moved / 1e9)),
            limit_cpu_s_per_gb: limit.as_ref().map(|limit| thousandths(limit.cpu_s_per_gb)),
            fallback_bytes: measured.journeys.iter().map(|j| j.fallback_bytes).sum(),
            retries: measured.journeys.iter().map(|j| j.retries).sum(),
            rails: measured.journeys.iter().map(|j| j.rails).max().unwrap_or(0),
            // A check that failed has ended the run before this.
            verified: setup.verify != Verify::None,
            machine: self.machine.clone(),
        })
    }
}

impl Measured {
    fn add(&mut self, clock: Clock, puts: &[PutStamps], gets: &[Gets]) -> Result<(), Failure> {
        let (mut first, mut last) = (u64::MAX, 0);
        for (index, put) in puts.iter().enumerate() {
            let mut time = 0;
            for of_consumer in gets {
                let get = of_consumer.stamps.get(index);
                let get = get.ok_or_else(|| Failure::Failed("a consumer got fewer payloads than were put".into()))?;
                let (begin, called) = match clock {
                    Clock::One => (put.begin, get.called.max(put.called)),
                    Clock::Consumer => (get.called, get.called),
                };
                time = time.max(get.end.saturating_sub(begin));
                self.gets.push(get.returned.saturating_sub(called));
                (first, last) = (first.min(begin), last.max(get.end));
            }
            self.times.push(time);
            self.puts.push(put.returned.saturating_sub(put.called));
        }
        self.wall += last.saturating_sub(first);
        self.journeys.extend(gets.iter().flat_map(|g| g.journeys.iter().cloned()));
        Ok(())
    }
}

/// The next operations, at most `most`.
fn batch_of(setup: &Setup, next: &mut u64, most: u64) -> Batch {
    let count = u64::from(setup.batch).min(most) as u32;
    let batch = Batch { first: *next, count };
    *next += u64::from(count);
    batch
}

/// The path that all operations took.
fn path_of(measured: &Measured) -> Result<String, Failure> {
    let mut paths = measured.journeys.iter().map(|journey| &journey.path);
    let first = paths.next().ok_or_else(|| Failure::Failed("no operation told its path".into()))?;
    match paths.find(|path| *path != first) {
        Some(other) => Err(Failure::Failed(format!(
            "mixed paths: some operations went over {first}, some over {other} (name the one to be measured with --path)"
        ))),
        None => Ok(first.clone()),
    }
}

fn producer(failure: Failure) -> Failure {
    failure.within("producer")
}

#[cfg(test)]
mod tests {
    use super::super::message::GetStamps;
    use super::*;

    fn gets(path: &str, stamps: &[(u64, u64)]) -> Gets {
        let stamps = stamps.iter().map(|&(called, end)| GetStamps { called, returned: end - 1, end }).collect();
        let journey = Journey { path: path.into(), reason: "a test".into(), rails: 1, retries: 0, fallback_bytes: 0 };
        Gets { stamps, cpu: 0.0, journeys: vec![journey] }
    }

    const PUTS: [PutStamps; 2] =
        [PutStamps { begin: 100, called: 110, returned: 115 }, PutStamps { begin: 200, called: 210, returned: 215 }];

    #[test]
    fn an_operation_lasts_from_the_put_to_the_last_get() {
        let mut measured = Measured::default();
        let both = [gets("tcp", &[(10, 150), (151, 260)]), gets("tcp", &[(20, 170), (171, 240)])];
        measured.add(Clock::One, &PUTS, &both).unwrap();
        assert_eq!(measured.times, [70, 60]);
        assert_eq!(measured.puts, [5, 5]);
        // A get counts from the put that it waits for.
        assert_eq!(measured.gets, [149 - 110, 169 - 110, 259 - 210, 239 - 210]);
        assert_eq!(measured.wall, 260 - 100);
    }

    #[test]
    fn the_consumers_clock_counts_from_its_request() {
        let mut measured = Measured::default();
        measured.add(Clock::Consumer, &PUTS, &[gets("tcp", &[(5_000, 5_070), (5_080, 5_180)])]).unwrap();
        assert_eq!(measured.times, [70, 100]);
        assert_eq!(measured.gets, [69, 99]);
        assert_eq!(measured.wall, 180);
    }

    #[test]
    fn mixed_paths_are_an_error() {
        let mut measured = Measured::default();
        measured.add(Clock::One, &PUTS, &[gets("tcp", &[(10, 150), (151, 260)])]).unwrap();
        assert_eq!(path_of(&measured), Ok("tcp".into()));
        measured.add(Clock::One, &PUTS, &[gets("shm", &[(10, 150), (151, 260)])]).unwrap();
        assert!(path_of(&measured).unwrap_err().to_string().contains("mixed paths"));
    }

    #[test]
    fn fewer_gets_than_puts_are_an_error() {
        assert!(Measured::default().add(Clock::One, &PUTS, &[gets("tcp", &[(10, 150)])]).is_err());
    }
}
