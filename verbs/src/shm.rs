//! Memory shared between the processes of one host.
//!
//! A region that peers may read lives in a sealed memory file ([`Memory::shared`](crate::Memory::shared)). Its
//! descriptor goes to each connected peer, which maps the file read-only and keeps it mapped. From then on
//!
//! - a **read** is a copy by the reader's own processor out of that mapping, and a [`map`](crate::QueuePair::map) is no
//!   copy at all; the owner's process takes no part in either;
//! - a **write** or **send** is a request over the connection: nobody can write another's memory, so the owner's side
//!   checks the request, copies out of *its* mapping of the requester's segment (or takes the bytes off the stream,
//!   where the source is not a region that the peer can map), and answers.
//!
//! Connections are Unix streams. The passive end's [`address`](crate::QueuePair::address) names the abstract socket on
//! which its endpoint listens and a one-time token; the active end dials it and begins with the endpoint's preface, so
//! that the listener can hand the stream to [`Device::adopt`](crate::Device::adopt).
//!
//! # What it guarantees
//!
//! - Copies are cut into pieces that any number of threads in [`Device::progress`](crate::Device::progress) take, with
//!   no lock held while copying, by the best routine for this processor ([`copy::best`]). Helper
//!   threads, one less than the number on which copying is fastest here and at most three a device, are started when
//!   the first large copy comes, and sleep when there is none. The device starts no other thread.
//! - A peer can't hurt us (I7): its segment is used only if its seals say that it can't shrink under our reads and if it
//!   has paid for its pages; its frames are checked, its regions counted, and descriptors that aren't used are closed.
//! - Only processes of allowed users are spoken to, in both directions (I14).
//! - Peers' segments are not inherited by fork, and our own are shared mappings. In a forked child every call on an
//!   inherited handle is an error, and dropping it does nothing to the parent (I13).
//!
//! # What it doesn't
//!
//! A descriptor opens a whole segment: a peer that may read one region of a memory can read all of that memory until it
//! exits, whatever is deregistered meanwhile ([`Capabilities::scoped_keys`] is false). A peer that has mapped a segment
//! can't be made to let go of it. A connection whose descriptor was inherited by a forked child of the peer ends only
//! when the peer closes it or when the child ends too.

use crate::{
    Capabilities, Cause, Device, DeviceInfo, Error, Memory, Provider, ProviderKind, Result, Token, copy, memory,
};
use core::fmt;
use core::time::Duration;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

mod address;
mod completion_queue;
mod device;
mod domain;
mod engine;
mod frame;
mod link;
mod poller;
mod queue_pair;
mod segment;
mod sys;
#[cfg(test)]
mod tests;

/// Name of the one device.
const NAME: &str = "shm0";
/// Largest length of one request: more than any memory that fits a host.
const MAX_MESSAGE: u64 = 1 << 46;
/// The length to which callers split. Posted all at once, 190 MiB are read equally fast as one request, in requests of
/// 8 MiB and of 1 MiB (measured on two processors: 0.97 to 1.02 of the bare routine). A caller with few bytes in flight
/// needs several requests in them, so that the helpers don't run dry between a completion and the next post.
const CHUNK: u64 = 4 << 20;
const MAX_SGE: u32 = 16;
const MAX_SEND_WR: u32 = 1 << 14;
const MAX_RECV_WR: u32 = 1 << 14;
const MAX_CQE: u32 = 1 << 20;
/// Regions of a protection domain, and so the keys (and at most the mappings) that one peer can have us hold.
const MAX_REGIONS: u64 = 1024;

/// Makes the first bytes of a connection out of the token of the queue pair that is dialled.
pub type Preface = Arc<dyn Fn(Token) -> Vec<u8> + Send + Sync>;

/// How a device connects.
#[derive(Clone)]
#[non_exhaustive]
pub struct ShmConfig {
    /// Abstract name of the Unix socket on which this endpoint listens, without the leading zero; 1 to 107 bytes.
    pub unix_name: Vec<u8>,
    /// What a queue pair sends first when it dials a peer: whatever tells the peer's listener that this is a connection
    /// for its shared-memory device, and the token.
    pub preface: Preface,
    /// Users whose processes may connect to us or be connected to; `None` for this process's effective user alone.
    pub allowed_uids: Option<Vec<u32>>,
    /// On how many threads at most a copy runs, the caller's included; `None` for what was measured to be fastest.
    /// One less than that many helper threads are started, at most 3.
    pub copy_threads: Option<usize>,
    /// How long a send, or a write with immediate, waits at its receiver for a receive to be posted. What the peer sends
    /// behind it waits too. Then it completes with
    /// [`ReceiverNotReadyExceeded`](crate::CompletionStatus::ReceiverNotReadyExceeded). 1 s by default.
    pub receiver_not_ready_timeout: Duration,
}

impl ShmConfig {
    /// The configuration of an endpoint that listens on abstract name `unix_name`.
    #[must_use]
    pub fn new(unix_name: impl Into<Vec<u8>>, preface: impl Fn(Token) -> Vec<u8> + Send + Sync + 'static) -> Self {
        Self {
            unix_name: unix_name.into(),
            preface: Arc::new(preface),
            allowed_uids: None,
            copy_threads: None,
            receiver_not_ready_timeout: Duration::from_secs(1),
        }
    }
}

impl fmt::Debug for ShmConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShmConfig")
            .field("unix_name", &self.unix_name.escape_ascii().to_string())
            .field("allowed_uids", &self.allowed_uids)
            .field("copy_threads", &self.copy_threads)
            .field("receiver_not_ready_timeout", &self.receiver_not_ready_timeout)
            .finish_non_exhaustive()
    }
}

/// The provider; has one device, `shm0`.
#[derive(Debug)]
pub struct ShmProvider {
    config: ShmConfig,
}

impl ShmProvider {
    /// A provider whose device connects as `config` says.
    ///
    /// # Errors
    /// [`Cause::OutOfRange`] for a name that is empty or too long.
    pub fn new(config: ShmConfig) -> Result<Self> {
        let len = config.unix_name.len() as u64;
        if len == 0 || len > address::MAX_NAME as u64 {
            let cause = Cause::OutOfRange { offset: 0, len, size: address::MAX_NAME as u64 };
            return Err(Error::new("open_device", cause));
        }
        Ok(Self { config })
    }

    fn copy_threads(&self) -> usize {
        self.config.copy_threads.unwrap_or_else(|| copy::best().threads).clamp(1, 4)
    }

    fn info(&self) -> DeviceInfo {
        let capabilities = Capabilities {
            preferred_chunk: CHUNK,
            max_sge: MAX_SGE,
            max_recv_wr: MAX_RECV_WR,
            max_cqe: MAX_CQE,
            mappable: true,
            reads_by_cpu: true,
            ..Capabilities::new(MAX_MESSAGE, MAX_SEND_WR)
        };
        let choice = copy::Choice { threads: self.copy_threads(), ..*copy::best() };
        DeviceInfo::new(NAME, ProviderKind::Shm, capabilities, format!("shared memory, copied by {choice}"))
    }
}

impl Provider for ShmProvider {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Shm
    }

    /// The first call in a process measures copy routines, for about 20 ms.
    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        // A kernel without memfd, or without the seals, has no such device.
        Memory::shared(1, memory::HugePages::Off)?;
        Ok(vec![self.info()])
    }

    fn open(&self, name: &str) -> Result<Device> {
        if name != NAME {
            return Err(Error::new("open_device", Cause::NotFound { what: "device of shared memory" }));
        }
        let device = device::ShmDevice::open(self.info(), self.config.clone(), self.copy_threads())?;
        Ok(Device::from_backend(device))
    }
}

/// Locks a mutex whose data no panic can leave half changed: a thread that panicked under it only ever did so in an
/// assertion of a debug build.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
