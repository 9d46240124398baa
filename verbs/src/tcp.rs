//! The TCP provider.
//!
//! One device, `tcp0`. A queue pair is a few TCP streams to the peer. Reads are answered from the owner's memory and
//! received straight into their destination; writes and sends are acknowledged when they are where they belong, so that
//! every completion means delivered.
//!
//! # Connecting
//!
//! The device listens nowhere: the endpoint above does. [`TcpConfig::advertised`] is where that is, and
//! [`TcpConfig::preface`] makes the bytes by which its listening port knows a data connection. The active end dials and
//! says the preface; the endpoint at the other end reads it and hands the connection to [`Device::adopt`](crate::Device)
//! with the token, which is random, compared in constant time, and good for the streams of one queue pair.
//!
//! # Order
//!
//! Completions of one queue pair come in the order posted. Sends and immediates reach the peer's receives in that order,
//! after all writes posted before them; a read sees the writes posted before it. Writes that are outstanding together
//! are in no order among themselves: they may travel on different streams.
//!
//! # Failure
//!
//! As in the verbs, a request that ends in anything but success moves the queue pair to the error state, and the rest
//! flushes: a refused access, no receive posted for
//! [`receiver_not_ready_timeout`](TcpConfig::receiver_not_ready_timeout), bytes that break the protocol, a lost
//! connection (of which the oldest unfinished request tells:
//! [`TransportRetryExceeded`](crate::CompletionStatus::TransportRetryExceeded) with the error number). The end that
//! refused follows when the peer closes; until then it does nothing more for that peer.
//!
//! # Driving it
//!
//! The provider has no thread. Any number of threads may be in [`Device::progress`](crate::Device::progress); each works
//! on one stream at a time. Who has called it polls the completion queues afterwards, as the completions found by one
//! thread do not wake another unless the queue was armed.

use crate::backend::Provider;
use crate::{Capabilities, Cause, Device, DeviceInfo, Error, ProviderKind, Result, Token};
use core::fmt;
use core::net::SocketAddr;
use core::time::Duration;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard};

mod chooser;
mod completion_queue;
mod congestion;
mod connect;
mod device;
mod keys;
mod memory_region;
mod pace;
mod queue_pair;
mod receive;
mod state;
mod stream;
mod sys;
mod transmit;
mod wire;

/// Most streams of one queue pair.
const MAX_STREAMS: usize = 4;
/// Most local slices of one request.
const MAX_SGE: u32 = 16;
/// Longest request.
const MAX_MESSAGE: u64 = 1 << 40;
/// Most requests that a queue of a queue pair holds.
const MAX_POSTED: u32 = 1 << 14;
/// Most queue pairs of one device.
const MAX_QUEUE_PAIRS: usize = 1 << 16;
/// What an event or a call takes of a budget, however few its bytes: it costs about as much time as copying these.
const LEAST_CHARGE: usize = 16 << 10;
const NAME: &str = "tcp0";

/// Makes the bytes with which a data connection to an endpoint's listening port begins.
pub type Preface = Arc<dyn Fn(Token) -> Vec<u8> + Send + Sync>;

/// How the provider connects, and how patient it is.
#[derive(Clone)]
pub struct TcpConfig {
    /// Where peers reach the listening port of this endpoint, best first. At most 16. May be empty if this endpoint is
    /// never the passive end.
    pub advertised: Vec<SocketAddr>,
    /// What a data connection begins with.
    pub preface: Preface,
    /// How many streams a queue pair has when this is its passive end: 1 to 4. How many carry data is found out by
    /// measuring, as are the congestion control and the size of writes. Where the system's own congestion control paces
    /// (BBR), the last stream is there to try it between hosts, and is used if it is the fastest.
    pub streams: u8,
    /// How long a queue pair may be connecting; shared out among the peer's addresses.
    pub connect_timeout: Duration,
    /// How long a message waits for a receive to be posted.
    pub receiver_not_ready_timeout: Duration,
    /// How long a peer may take nothing of what is sent, or be silent, until it counts as gone (`TCP_USER_TIMEOUT`, and
    /// keep-alive probes from half of it on). A stopped process takes nothing.
    pub peer_timeout: Duration,
    /// Whether only addresses of the loopback interface are dialled, whatever others a peer names.
    pub loopback_only: bool,
}

impl TcpConfig {
    /// The defaults: 3 streams, 10 seconds to connect, 1 second for a receive, 30 seconds of silence, every
    /// address dialled.
    #[must_use]
    pub fn new(advertised: Vec<SocketAddr>, preface: Preface) -> Self {
        Self {
            advertised,
            preface,
            streams: 3,
            connect_timeout: Duration::from_secs(10),
            receiver_not_ready_timeout: Duration::from_secs(1),
            peer_timeout: Duration::from_secs(30),
            loopback_only: false,
        }
    }
}

impl fmt::Debug for TcpConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpConfig")
            .field("advertised", &self.advertised)
            .field("streams", &self.streams)
            .field("connect_timeout", &self.connect_timeout)
            .field("receiver_not_ready_timeout", &self.receiver_not_ready_timeout)
            .field("peer_timeout", &self.peer_timeout)
            .field("loopback_only", &self.loopback_only)
            .finish_non_exhaustive()
    }
}

/// The TCP provider.
#[derive(Debug, Clone)]
pub struct TcpProvider {
    config: TcpConfig,
}

impl TcpProvider {
    /// A provider with `config`.
    ///
    /// # Errors
    /// [`Cause::Limit`] for a number of streams or addresses out of range; [`Cause::Unsupported`] for an advertised
    /// address that names no single host.
    pub fn new(config: TcpConfig) -> Result<Self> {
        const VERB: &str = "tcp_provider";
        let limit = |what, have: usize, need: usize| {
            Err(Error::new(VERB, Cause::Limit { what, have: have as u64, need: need as u64 }))
        };
        if config.streams == 0 || usize::from(config.streams) > MAX_STREAMS {
            return limit("streams", MAX_STREAMS, usize::from(config.streams));
        }
        if config.advertised.len() > wire::MAX_ADDRESSES {
            return limit("advertised addresses", wire::MAX_ADDRESSES, config.advertised.len());
        }
        if config.advertised.iter().any(|address| wire::is_no_host(address.ip()) || address.port() == 0) {
            return Err(Error::new(
                VERB,
                Cause::Unsupported { what: "an advertised address that names no single host" },
            ));
        }
        Ok(Self { config })
    }
}

/// Prepares a listening socket for data connections, before the first is accepted: they begin with a congestion control
/// that does not pace. (One that was born under BBR, the default of some systems, is paced by timers for life, also under
/// another control: measured on loopback, 10 % more processor time and as much less speed.) Which control is used after
/// that, BBR included, each connection finds out by measuring.
///
/// Where the system doesn't allow it, the socket stays as it is.
pub fn prepare_listener(listener: impl AsFd) {
    congestion::start_unpaced(listener.as_fd());
}

impl Provider for TcpProvider {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Tcp
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        let mut capabilities = Capabilities::new(MAX_MESSAGE, MAX_POSTED);
        capabilities.preferred_chunk = 4 << 20;
        capabilities.max_sge = MAX_SGE;
        capabilities.scoped_keys = true;
        capabilities.loans = true;
        capabilities.reads_by_cpu = true;
        let choices = congestion::choices(self.config.streams, false).controls;
        let names: Vec<_> = choices.iter().map(|control| control.name()).collect();
        let description = format!("TCP; congestion control the fastest of {}", names.join(", "));
        Ok(vec![DeviceInfo::new(NAME, ProviderKind::Tcp, capabilities, description)])
    }

    fn open(&self, name: &str) -> Result<Device> {
        let info = self.devices()?.into_iter().find(|info| info.name == name);
        let info = info.ok_or(Error::new("open_device", Cause::NotFound { what: "TCP device" }))?;
        Ok(Device::from_backend(Arc::new(device::Shared::open(info, self.config.clone())?)))
    }
}

/// Locks, also when a thread has panicked with the lock held: nothing here panics in between two halves of a change.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
