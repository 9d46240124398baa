//! A transport within one process, to test the bench with: a depot of payloads under their keys.

use super::content::{PartSeen, Readable, copy_of};
use super::layout::PartPlan;
use super::mover::{Address, Arrived, Journey, Mover, Needs};
use crate::command::Failure;
use crate::command::args::Path;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, LazyLock, Mutex};
use std::time::Duration;

/// All producers of this process, by address.
static DEPOTS: LazyLock<Mutex<HashMap<Address, Arc<Depot>>>> = LazyLock::new(Mutex::default);

/// What one producer has put, and who waits for it.
#[derive(Debug, Default)]
struct Depot {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    payloads: HashMap<String, (Parts, u32)>,
    waiting: HashMap<String, u32>,
}

type Parts = Arc<Vec<(PartSeen, Vec<u8>)>>;

/// One side.
#[derive(Debug)]
pub(crate) struct Fake {
    depot: Arc<Depot>,
    address: Address,
    path: &'static str,
}

/// What arrived.
#[derive(Debug)]
pub(crate) struct FakePayload {
    parts: Parts,
    path: &'static str,
    own: Option<Vec<u8>>,
}

const PATIENCE: Duration = Duration::from_secs(10);

impl Fake {
    fn take(&self, from: &Address, key: &str) -> Result<Parts, Failure> {
        let depot = Arc::clone(&DEPOTS.lock().unwrap()[from]);
        let mut state = depot.state.lock().unwrap();
        *state.waiting.entry(key.into()).or_default() += 1;
        depot.changed.notify_all();
        let absent = |state: &mut State| !state.payloads.contains_key(key);
        let (mut state, late) = depot.changed.wait_timeout_while(state, PATIENCE, absent).unwrap();
        if late.timed_out() {
            return Err(Failure::Failed(format!("{key} didn't come")));
        }
        let (parts, left) = state.payloads.get_mut(key).unwrap();
        let parts = Arc::clone(parts);
        *left -= 1;
        if *left == 0 {
            state.payloads.remove(key);
        }
        Ok(parts)
    }
}

impl Mover for Fake {
    type Buffer = Vec<u8>;
    type Part<'a> = (PartSeen, Vec<u8>);
    type Payload = FakePayload;

    fn open(needs: &Needs) -> Result<Self, Failure> {
        let depot = Arc::<Depot>::default();
        let mut depots = DEPOTS.lock().unwrap();
        let address = format!("depot {}", depots.len());
        depots.insert(address.clone(), Arc::clone(&depot));
        Ok(Self { depot, address, path: if needs.path == Path::Tcp { "tcp" } else { "shm" } })
    }

    fn address(&self) -> Result<Address, Failure> {
        Ok(self.address.clone())
    }

    fn alloc(&self, len: usize) -> Result<Vec<u8>, Failure> {
        Ok(vec![0; len])
    }

    fn buffer_part(plan: &PartPlan, buffer: Vec<u8>) -> Self::Part<'_> {
        (plan.seen(), buffer)
    }

    fn bytes_part<'a>(plan: &'a PartPlan, bytes: &'a [u8]) -> Self::Part<'a> {
        (plan.seen(), bytes.to_vec())
    }

    fn await_consumers(&self, key: &str, consumers: u32, _: &(dyn Fn() -> bool + Sync)) -> Result<(), Failure> {
        let state = self.depot.state.lock().unwrap();
        let missing = |state: &mut State| state.waiting.get(key).copied().unwrap_or(0) < consumers;
        let (_state, late) = self.depot.changed.wait_timeout_while(state, PATIENCE, missing).unwrap();
        if late.timed_out() { Err(Failure::Failed(format!("nobody waits for {key}"))) } else { Ok(()) }
    }

    fn put(&self, key: &str, parts: Vec<Self::Part<'_>>, consumers: u32) -> Result<(), Failure> {
        let mut state = self.depot.state.lock().unwrap();
        assert_eq!(state.waiting.get(key), Some(&consumers), "the consumers wait before the put");
        let stale = state.payloads.insert(key.into(), (Arc::new(parts), consumers));
        assert!(stale.is_none(), "each key is put once");
        self.depot.changed.notify_all();
        Ok(())
    }

    fn get(&self, from: &Address, key: &str) -> Result<FakePayload, Failure> {
        Ok(FakePayload { parts: self.take(from, key)?, path: self.path, own: None })
    }

    fn view(&self, from: &Address, key: &str) -> Result<FakePayload, Failure> {
        self.get(from, key)
    }

    fn get_into(&self, from: &Address, key: &str, mut own: Vec<u8>) -> Result<FakePayload, Failure> {
        let payload = self.get(from, key)?;
        own.copy_from_slice(&payload.parts[0].1);
        Ok(FakePayload { own: Some(own), ..payload })
    }

    fn close(self) -> Result<(), Failure> {
        let left = self.depot.state.lock().unwrap().payloads.len();
        if left == 0 { Ok(()) } else { Err(Failure::Failed(format!("{left} payloads were never got"))) }
    }
}

impl Readable for FakePayload {
    fn parts(&self) -> Vec<PartSeen> {
        self.parts.iter().map(|(seen, _)| seen.clone()).collect()
    }

    fn read(&self, part: usize, offset: u64, out: &mut [u8]) -> bool {
        copy_of(self.own.as_ref().unwrap_or(&self.parts[part].1), offset, out)
    }
}

impl Arrived for FakePayload {
    fn journey(&self) -> Journey {
        Journey { path: self.path.into(), reason: "a test".into(), rails: 1, retries: 0, fallback_bytes: 0 }
    }

    fn bytes(&self, part: usize) -> Option<&[u8]> {
        Some(&self.parts[part].1)
    }

    fn touch(&self) {
        for (_, bytes) in self.parts.iter() {
            for byte in bytes.iter().step_by(4096) {
                std::hint::black_box(*byte);
            }
        }
    }

    fn into_own(self) -> Option<Vec<u8>> {
        self.own
    }
}
