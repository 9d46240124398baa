//! The transport that the bench measures: the library's endpoint.

use super::content::{PartSeen, Readable, copy_of};
use super::layout::PartPlan;
use super::mover::{Address, Arrived, Journey, Mover, Needs};
use crate::command::args::Path;
use crate::command::{Failure, sys};
use std::time::{Duration, Instant};
use towline::{
    Buffer, DType, Endpoint, Error, ErrorKind, Part, PartLayout, PartRef, Paths, Payload, PutOptions, TransferInfo,
    View,
};

/// How long closing waits for leases whose end is still on its way.
const DRAIN: Duration = Duration::from_secs(10);

/// One side of a row.
#[derive(Debug)]
pub(crate) struct Transport {
    endpoint: Endpoint,
    patience: Duration,
}

/// What a consumer has.
#[derive(Debug)]
pub(crate) enum Arrival {
    Payload(Payload),
    View(View),
}

impl Mover for Transport {
    type Buffer = Buffer;
    type Part<'a> = Part<'a>;
    type Payload = Arrival;

    fn open(needs: &Needs) -> Result<Self, Failure> {
        let mut builder = Endpoint::builder()
            .bind(needs.bind.to_string())
            .pool_size(needs.pool)
            .allow_paths(allowed(needs.path))
            .alloc_timeout(needs.patience);
        for device in &needs.devices {
            builder = builder.rdma_device(device);
        }
        if needs.remote {
            // What is published is made from a seed: no secret is worth its set-up, and nothing else can be got.
            builder = builder.insecure();
        }
        Ok(Self { endpoint: builder.build().map_err(failure)?, patience: needs.patience })
    }

    fn address(&self) -> Result<Address, Failure> {
        Ok(self.endpoint.address())
    }

    fn alloc(&self, len: usize) -> Result<Buffer, Failure> {
        self.endpoint.alloc(len).map_err(failure)
    }

    fn buffer_part(plan: &PartPlan, buffer: Buffer) -> Part<'_> {
        Part::buffer(&plan.name, plan.dtype, &plan.shape, buffer)
    }

    fn bytes_part<'a>(plan: &'a PartPlan, bytes: &'a [u8]) -> Part<'a> {
        Part::bytes(&plan.name, plan.dtype, &plan.shape, bytes)
    }

    fn await_consumers(&self, key: &str, consumers: u32, gone: &(dyn Fn() -> bool + Sync)) -> Result<(), Failure> {
        /// How long a bench that failed at the other end is not noticed.
        const LOOK: Duration = Duration::from_millis(500);
        let until = Instant::now() + self.patience;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.endpoint.wait_for_consumers(key, consumers as usize, left.min(LOOK)) {
                Err(error) if matches!(error.kind(), ErrorKind::TimedOut { .. }) && left > LOOK => {
                    if gone() {
                        return Err(Failure::Failed("the other end has given the bench up".into()));
                    }
                }
                outcome => return outcome.map_err(failure),
            }
        }
    }

    fn put(&self, key: &str, parts: Vec<Part<'_>>, consumers: u32) -> Result<(), Failure> {
        let options = PutOptions::new().consumers(consumers);
        self.endpoint.put_with(key, parts, &options).map(|_ticket| ()).map_err(failure)
    }

    fn get(&self, from: &Address, key: &str) -> Result<Arrival, Failure> {
        self.endpoint.get((from, key), self.patience).map(Arrival::Payload).map_err(failure)
    }

    fn view(&self, from: &Address, key: &str) -> Result<Arrival, Failure> {
        self.endpoint.view((from, key), self.patience).map(Arrival::View).map_err(failure)
    }

    fn get_into(&self, from: &Address, key: &str, own: Vec<u8>) -> Result<Arrival, Failure> {
        self.endpoint.get_into((from, key), own, self.patience).map(Arrival::Payload).map_err(failure)
    }

    fn close(self) -> Result<(), Failure> {
        let left = self.endpoint.close(DRAIN);
        match (left.leases + left.fencing, left.quarantined_bytes) {
            (0, 0) => Ok(()),
            (leases, bytes) => {
                Err(Failure::Failed(format!("closing left {leases} leases and {bytes} bytes in quarantine")))
            }
        }
    }
}

fn allowed(path: Path) -> Paths {
    match path {
        Path::Auto => Paths::ALL,
        Path::Shm => Paths::only(towline::Path::Shm),
        Path::Tcp => Paths::only(towline::Path::Tcp),
        Path::Rdma => Paths::only(towline::Path::Rdma),
    }
}

/// What isn't available here is refused; everything else has failed.
fn failure(error: Error) -> Failure {
    match error.kind() {
        ErrorKind::PathNotAllowed { .. } | ErrorKind::PathUnsuitable { .. } | ErrorKind::NoRdma { .. } => {
            Failure::Refused(error.to_string())
        }
        _ => Failure::Failed(error.to_string()),
    }
}

impl Arrival {
    fn info(&self) -> &TransferInfo {
        match self {
            Self::Payload(payload) => payload.info(),
            Self::View(view) => view.info(),
        }
    }
}

impl Readable for Arrival {
    fn parts(&self) -> Vec<PartSeen> {
        let layout = match self {
            Self::Payload(payload) => payload.layout(),
            Self::View(view) => view.layout(),
        };
        let seen = |part: &PartLayout| PartSeen {
            name: part.name.clone(),
            dtype: part.dtype.to_string(),
            shape: part.shape.clone(),
            len: part.len,
        };
        layout.parts().iter().map(seen).collect()
    }

    fn read(&self, part: usize, offset: u64, out: &mut [u8]) -> bool {
        match self {
            Self::Payload(payload) => {
                payload.part(part).is_some_and(|part| is_typed(&part) && copy_of(part.bytes(), offset, out))
            }
            Self::View(view) => view.part(part).is_some_and(|part| part.read(offset, out)),
        }
    }
}

/// Whether the part can be had as a slice of its elements' type.
fn is_typed(part: &PartRef<'_>) -> bool {
    match part.layout().dtype {
        DType::U8 => part.elements::<u8>().is_ok(),
        DType::F16 | DType::BF16 => part.elements::<u16>().is_ok(),
        DType::F32 => part.elements::<f32>().is_ok(),
        DType::I64 => part.elements::<i64>().is_ok(),
        _ => false, // no layout of the bench has others
    }
}

impl Arrived for Arrival {
    fn journey(&self) -> Journey {
        let info = self.info();
        Journey {
            path: info.path.to_string(),
            reason: info.path_reason.clone(),
            rails: info.rails,
            retries: info.retries.into(),
            fallback_bytes: info.fallback_bytes,
        }
    }

    fn bytes(&self, part: usize) -> Option<&[u8]> {
        match self {
            Self::Payload(payload) => payload.part(part).map(|part| part.bytes()),
            Self::View(_) => None,
        }
    }

    fn touch(&self) {
        match self {
            Self::Payload(payload) => payload.parts().for_each(|part| sys::read_pages(part.bytes())),
            Self::View(view) => view.parts().for_each(|part| sys::read_pages_of(&part)),
        }
    }

    fn into_own(self) -> Option<Vec<u8>> {
        match self {
            Self::Payload(payload) => payload.into_vec(),
            Self::View(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consumers_that_will_not_come_are_not_waited_for() {
        let bind = "127.0.0.1:0".parse().unwrap();
        let patience = Duration::from_secs(60);
        let begin = Instant::now();
        let needs = Needs { pool: 1 << 20, path: Path::Tcp, devices: vec![], bind, remote: false, patience };
        let producer = Transport::open(&needs).unwrap();
        let failure = producer.await_consumers("key", 1, &|| true).unwrap_err();
        assert!(failure.to_string().contains("given the bench up"), "{failure}");
        assert!(begin.elapsed() < patience / 2, "{:?}", begin.elapsed());
        // Who comes late, but comes, is waited for.
        let consumer = Transport::open(&needs).unwrap();
        let address = producer.address().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| consumer.get(&address, "key").unwrap());
            producer.await_consumers("key", 1, &|| false).unwrap();
            let data = [7; 100];
            let part = Part::bytes("", DType::U8, &[100], &data);
            producer.put("key", vec![part], 1).unwrap();
        });
    }
}
