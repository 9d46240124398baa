//! The libibverbs provider: InfiniBand and RoCE, through the library of this machine, found at run time.
//!
//! Objects are the library's, one to one, and are destroyed in the only legal order by construction: each holds what it
//! depends on. Completions come through one channel a device, whose descriptor is part of [`Device::event_fd`].
//!
//! # Connecting
//!
//! An address holds queue pair number, GID, LID, partition key, link layer, path MTU, how many reads the end answers at a
//! time, and a random sequence number; both ends take the smaller of what both have, and refuse by name what does not fit
//! (another link layer, partition, or address family). Then each end reads 12 KiB from the other, whose content both can work
//! out from a random number in the address, and is [`ReadyToSend`](crate::QueuePairState::ReadyToSend) when the right bytes have
//! come: a path that loses large packets, or that leads to somebody else, is not used. Where a path has been probed, and has
//! shown no trouble since, an acknowledged message is enough.
//!
//! # Failure
//!
//! A request that ends in anything but success, an asynchronous event of the queue pair, its port or the device, or the caller
//! takes the queue pair to the error state, and what was posted flushes. When the last handle is gone, or when a fence is asked
//! for ([`QueuePair::is_fenced`](crate::QueuePair::is_fenced)), the library's queue pair is destroyed: after that the device touches
//! nothing for it any more, and requests that it had not completed complete as flushed. That matters: soft-RoCE never
//! completes a receive that is posted in the error state.
//!
//! # Windows
//!
//! Where the device has memory windows of type 2B, [`MemoryRegion::bind`](crate::MemoryRegion::bind) gives a key for one range
//! and one peer. It returns before the device has bound it, and
//! [`MemoryWindow::is_bound`](crate::MemoryWindow::is_bound) tells when the peer may have the key.
//! [`IbvProvider::without_windows`] leaves them unused.
//!
//! # Posting
//!
//! A batch is posted as a whole, with one doorbell, or not at all. Sends and writes of a few bytes are taken then and there
//! (inline) where the device can. One request in several asks the device for a completion, which tells of those before it;
//! callers get one for each all the same. Neither send queue nor completion queue can overflow: places are held until the
//! caller has polled. [`Posting::Extended`] builds requests by functions where the device has them.
//!
//! # Regions
//!
//! Memory that is larger than what the device takes in one region is registered in
//! [pieces](crate::MemoryRegion::piece_len), each with keys of its own. Access flags are those that were asked for and no more;
//! [`Access::RELAXED_ORDERING`](crate::Access::RELAXED_ORDERING) is used where library and device have it.
//!
//! # What is not here yet
//!
//! iWARP, device memory.

use crate::backend::Provider;
use crate::{Capabilities, Cause, Device, DeviceInfo, Error, ProviderKind, Result};
use rdma_core_sys::{
    IBV_DEVICE_MEM_WINDOW_TYPE_2B, IBV_LINK_LAYER_INFINIBAND, IBV_PORT_ACTIVE, IBV_TRANSPORT_IB, Library, Unavailable,
    ibv_device_attr,
};
use std::sync::Arc;

mod address;
mod completion_queue;
mod device;
mod domain;
mod probe;
mod queue_pair;
mod region;
mod status;
mod survey;
mod sys;
#[cfg(test)]
mod tests;

pub use survey::{Absence, GidInfo, Missing, PortInfo, PortName};

/// Most local slices of one request that are asked of a device: more cost room in every queue entry.
const MAX_SGE: u32 = 16;
/// Longest request that is proposed to callers: a device is at its speed well below it, and soft-RoCE falls off above.
const PREFERRED_CHUNK: u64 = 1 << 20;

/// Turns what the library's verb answered into an error.
fn failed(verb: &'static str, call: &'static str, error: rdma_core_sys::Error) -> Error {
    use rdma_core_sys::Error as Sys;
    let cause = match error {
        Sys::NoSymbol(_) => Cause::Unsupported { what: "a function of a newer libibverbs" },
        Sys::NoOperation(what) => Cause::Unsupported { what },
        other => Cause::Os { errno: other.errno(), call },
    };
    Error::new(verb, cause)
}

/// Turns the reason why there are no devices into an error.
fn unavailable(verb: &'static str, reason: &Unavailable) -> Error {
    let cause = match reason {
        Unavailable::NoLibrary { .. } => Cause::NotFound { what: "libibverbs.so.1 (install rdma-core)" },
        Unavailable::NoKernelSupport => Cause::NotFound { what: "kernel support for RDMA (modprobe ib_uverbs)" },
        Unavailable::NoDevice => Cause::NotFound { what: "RDMA device" },
        Unavailable::NoList(error) => return failed(verb, "ibv_get_device_list", *error),
        _ => Cause::Unsupported { what: "this libibverbs.so.1 (rdma-core 24 or newer is needed)" },
    };
    Error::new(verb, cause)
}

/// How requests are handed to the library.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[doc(alias = "ibv_wr_post")]
pub enum Posting {
    /// As a chain of structs (`ibv_post_send`). Every device has it.
    #[default]
    Classic,
    /// By functions that put each request where the device finds it (`ibv_wr_*`), where the device has them, and as a chain
    /// elsewhere.
    Extended,
}

/// The libibverbs provider.
#[derive(Debug, Clone)]
pub struct IbvProvider {
    library: &'static Library,
    wishes: Wishes,
}

/// How devices are to be used.
#[derive(Debug, Clone, Copy)]
struct Wishes {
    /// Whether their memory windows are.
    windows: bool,
    posting: Posting,
    /// Bytes of a region, instead of what a device says.
    max_region: Option<u64>,
}

impl IbvProvider {
    /// A provider over the libibverbs of this machine.
    ///
    /// # Errors
    /// [`Cause::NotFound`] without the library; [`Cause::Unsupported`] with one that is too old.
    pub fn new() -> Result<Self> {
        match Library::load() {
            Ok(library) => Ok(Self::over(library)),
            Err(reason) => Err(unavailable("load", &reason)),
        }
    }

    /// The same, of devices that are used as if they had no memory windows: no request is needed for the keys of a lease, and
    /// what a region exposes is taken back with the queue pair alone.
    #[must_use]
    pub fn without_windows(self) -> Self {
        Self { wishes: Wishes { windows: false, ..self.wishes }, ..self }
    }

    /// The same, of devices that take at most so many bytes in one region, whatever they say themselves (`max_mr_size`): some
    /// drivers say less than their device takes. Larger memory is registered in
    /// [pieces](crate::MemoryRegion::piece_len).
    #[must_use]
    pub fn max_region(self, bytes: u64) -> Self {
        Self { wishes: Wishes { max_region: Some(bytes), ..self.wishes }, ..self }
    }

    /// Opens a device to use the port, and the address of it, that `name` names.
    ///
    /// # Errors
    /// [`Cause::NotFound`] for a device, port, or GID that is not there; [`Cause::Unsupported`] for iWARP; or what the
    /// library says.
    pub fn open_port(&self, name: &PortName) -> Result<Device> {
        let found = self.open_each("open_device", |other| other == name.device)?.into_iter().next();
        let found = found.ok_or(Error::new("open_device", Cause::NotFound { what: "RDMA device" }))?;
        let (info, port) = found.describe(name.port, name.gid_index)?;
        Ok(Device::from_backend(Arc::new(device::IbvDevice::new(found.context, info, port, self.wishes)?)))
    }

    /// A provider over a table of functions.
    fn over(library: &'static Library) -> Self {
        Self { library, wishes: Wishes { windows: true, posting: Posting::default(), max_region: None } }
    }

    /// How queue pairs of devices that are opened from now on post.
    #[must_use]
    pub fn posting(self, posting: Posting) -> Self {
        Self { wishes: Wishes { posting, ..self.wishes }, ..self }
    }

    /// Opens each device of the list that `wanted` takes by its name.
    fn open_each(&self, verb: &'static str, wanted: impl Fn(&str) -> bool) -> Result<Vec<Found>> {
        let list = self.library.devices().map_err(|reason| unavailable(verb, &reason))?;
        let mut found = vec![];
        for index in 0..list.len() {
            let Some(name) = list.name(index).filter(|name| wanted(name)) else { continue };
            let context = sys::Context::open(self.library, &list, index)?;
            found.push(Found { name, context: Arc::new(context), wishes: self.wishes });
        }
        Ok(found)
    }
}

/// A number of the library's that is never negative.
fn positive(value: i32) -> u32 {
    u32::try_from(value).unwrap_or(0)
}

/// A device that was opened to look at it.
struct Found {
    name: String,
    context: Arc<sys::Context>,
    wishes: Wishes,
}

impl Found {
    /// Whether windows of type 2B can be had. Not all that say so have them (a provider that is older than the kernel):
    /// one is made.
    fn has_windows(&self, attr: &ibv_device_attr) -> bool {
        self.wishes.windows
            && attr.device_cap_flags & IBV_DEVICE_MEM_WINDOW_TYPE_2B != 0
            && positive(attr.max_qp_wr) > 2 * queue_pair::WINDOW_REQUESTS
            && sys::Domain::new(&self.context).is_ok_and(|domain| sys::Window::new(&Arc::new(domain)).is_ok())
    }

    /// What it is and can do, and the port of it to use: the one that is wanted, or the first that is active.
    fn describe(&self, wanted: Option<u8>, gid_index: Option<u8>) -> Result<(DeviceInfo, device::Port)> {
        const VERB: &str = "open_device";
        let attr = self.context.query_device()?;
        if wanted.is_some_and(|port| port > attr.phys_port_cnt) {
            return Err(Error::new(VERB, Cause::NotFound { what: "port of that number on this device" }));
        }
        let mut chosen = Err(Error::new(VERB, Cause::NotFound { what: "port of this device" }));
        for number in wanted.map_or(1..=attr.phys_port_cnt, |port| port..=port) {
            let port = self.context.query_port(number)?;
            chosen = can_be_used(&self.context, port.state).map(|()| (number, port));
            if chosen.is_ok() {
                break;
            }
        }
        let (number, port) = chosen?;
        let mut capabilities = Capabilities::new(port.max_msg_sz.into(), positive(attr.max_qp_wr));
        capabilities.max_send_wr = capabilities.max_send_wr.saturating_sub(queue_pair::OWN_SENDS);
        capabilities.max_recv_wr = capabilities.max_recv_wr.saturating_sub(queue_pair::OWN_RECEIVES);
        capabilities.preferred_chunk = PREFERRED_CHUNK.min(port.max_msg_sz.into());
        // Some devices take fewer slices for reads; those that say 0 have no limit of their own.
        let reads = if attr.max_sge_rd > 0 { attr.max_sge_rd } else { attr.max_sge };
        capabilities.max_sge = positive(attr.max_sge.min(reads)).clamp(1, MAX_SGE);
        capabilities.max_cqe = positive(attr.max_cqe);
        if self.has_windows(&attr) {
            capabilities.scoped_keys = true;
            capabilities.max_send_wr = capabilities.max_send_wr.saturating_sub(queue_pair::WINDOW_REQUESTS);
        }
        let layer = if port.link_layer == IBV_LINK_LAYER_INFINIBAND { "InfiniBand" } else { "RoCE" };
        let mtu = 128u32 << port.active_mtu.min(5);
        let mut used = device::Port::new(&self.context, number, &port, &attr, gid_index)?;
        used.max_region = self.wishes.max_region.unwrap_or(used.max_region);
        let (index, gid) = (used.gid_index, std::net::Ipv6Addr::from(used.gid));
        let description = format!("{layer}, port {number}, MTU {mtu}, GID {index} ({gid})");
        let info = DeviceInfo::new(self.name.clone(), ProviderKind::Ibv, capabilities, description);
        Ok((info, used))
    }
}

/// Why a port in `state` can't be used, if so.
fn can_be_used(context: &sys::Context, state: u32) -> Result<()> {
    const VERB: &str = "open_device";
    if context.transport() != IBV_TRANSPORT_IB {
        return Err(Error::new(VERB, Cause::Unsupported { what: "iWARP, which needs librdmacm," }));
    }
    if state != IBV_PORT_ACTIVE {
        return Err(Error::new(VERB, Cause::NotFound { what: "active port of this device" }));
    }
    Ok(())
}

impl Provider for IbvProvider {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Ibv
    }

    /// The devices with an active port that this provider can use. If there are some and none of them can be used, the
    /// error is that of the first.
    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        let described: Vec<_> =
            self.open_each("get_device_list", |_| true)?.iter().map(|found| found.describe(None, None)).collect();
        let mut refusal = None;
        let mut infos = vec![];
        for device in described {
            match device {
                Ok((info, _)) => infos.push(info),
                Err(error) => refusal = refusal.or(Some(error)),
            }
        }
        match refusal {
            Some(error) if infos.is_empty() => Err(error),
            _ => Ok(infos),
        }
    }

    fn open(&self, name: &str) -> Result<Device> {
        self.open_port(&PortName { device: name.into(), port: None, gid_index: None })
    }
}
