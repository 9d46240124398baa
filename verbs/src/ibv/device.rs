//! An opened device: its port, its events, and the queue pairs that events are for.

use super::completion_queue::Cq;
use super::domain::Domain;
use super::queue_pair::Core;
use super::{Wishes, address::Address, can_be_used, probe::Proven, queue_pair, status, sys};
use crate::backend::{CqBackend, DeviceBackend, PdBackend};
use crate::{Capabilities, Cause, DeviceInfo, Error, MemoryKind, Progress, Result, Token};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use rdma_core_sys::{
    IBV_EVENT_CQ_ERR, IBV_EVENT_DEVICE_FATAL, IBV_EVENT_PORT_ERR, IBV_GID_TYPE_ROCE_V2, IBV_LINK_LAYER_INFINIBAND,
    ibv_device_attr, ibv_gid_entry, ibv_port_attr,
};
use std::collections::HashMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Most events that one call of `progress` takes.
const EVENTS: usize = 64;
/// Most GIDs that are looked at.
pub(super) const MAX_GIDS: usize = 1024;
/// Most reads at a time, of those that the device offers: more bring nothing, and the device's total is shared.
const MAX_READS: u8 = 16;

/// The port that is used, and what its queue pairs tell their peers.
#[derive(Debug, Clone)]
pub(super) struct Port {
    pub(super) number: u8,
    pub(super) gid: [u8; 16],
    pub(super) gid_index: u8,
    pub(super) lid: u16,
    pub(super) pkey: u16,
    pub(super) pkey_index: u16,
    pub(super) link_layer: u8,
    /// `IBV_MTU_*`.
    pub(super) mtu: u8,
    pub(super) max_message: u64,
    /// Reads that a queue pair answers at a time.
    pub(super) responder_depth: u8,
    /// Reads that a queue pair has under way at a time.
    pub(super) initiator_depth: u8,
    /// Bytes that one of the device's regions holds at most, and how many of them there can be.
    pub(super) max_region: u64,
    pub(super) max_regions: u64,
}

impl Port {
    pub(super) fn new(
        context: &sys::Context,
        number: u8,
        port: &ibv_port_attr,
        attr: &ibv_device_attr,
        gid_index: Option<u8>,
    ) -> Result<Self> {
        let (gid, gid_index) = choose_gid(&context.gids(MAX_GIDS)?, number, port.link_layer, gid_index)?;
        let (pkey, pkey_index) = choose_pkey(context, number, port.pkey_tbl_len)?;
        let reads = |most: i32| u8::try_from(most.max(0)).unwrap_or(u8::MAX).min(MAX_READS);
        Ok(Self {
            number,
            gid,
            gid_index,
            lid: port.lid,
            pkey,
            pkey_index,
            link_layer: port.link_layer,
            mtu: u8::try_from(port.active_mtu).unwrap_or(1).clamp(1, 5),
            max_message: port.max_msg_sz.into(),
            responder_depth: reads(attr.max_qp_rd_atom),
            initiator_depth: reads(attr.max_qp_init_rd_atom),
            max_region: attr.max_mr_size,
            max_regions: u64::try_from(attr.max_mr).unwrap_or(0),
        })
    }

    /// Why a queue pair at `remote` can't be connected to one of this port, if so.
    pub(super) fn unlike(&self, remote: &Address) -> Option<&'static str> {
        if remote.link_layer != self.link_layer {
            Some("a peer on another link layer (InfiniBand, RoCE)")
        } else if remote.pkey & 0x7fff != self.pkey & 0x7fff {
            Some("a peer in another partition")
        } else if Address::is_ipv4(&remote.gid) != Address::is_ipv4(&self.gid) {
            Some("a peer whose address is of another family (IPv4, IPv6)")
        } else {
            None
        }
    }

    /// The number of leading bits in which the GIDs agree.
    fn closeness(&self, remote: &Address) -> u32 {
        (u128::from_be_bytes(self.gid) ^ u128::from_be_bytes(remote.gid)).leading_zeros()
    }
}

/// The GID by which peers reach the port, and its index: the one that is wanted, or else by type and address, since indices
/// differ from device to device. On Ethernet it is one of RoCE v2, of an IPv4 address, an IPv6 address, or else a
/// link-local one.
pub(super) fn choose_gid(
    entries: &[ibv_gid_entry],
    port: u8,
    link_layer: u8,
    wanted: Option<u8>,
) -> Result<([u8; 16], u8)> {
    let rank = |entry: &&ibv_gid_entry| {
        let bytes = sys::gid_bytes(&entry.gid);
        match bytes {
            _ if Address::is_ipv4(&bytes) => 0,
            [0xfe, second, ..] if second & 0xc0 == 0x80 => 2,
            _ => 1,
        }
    };
    let of_port = |entry: &&ibv_gid_entry| entry.port_num == u32::from(port) && entry.gid_index <= u32::from(u8::MAX);
    let chosen = if let Some(wanted) = wanted {
        entries.iter().filter(of_port).find(|entry| entry.gid_index == u32::from(wanted))
    } else if link_layer == IBV_LINK_LAYER_INFINIBAND {
        entries.iter().filter(of_port).min_by_key(|entry| entry.gid_index)
    } else {
        entries.iter().filter(of_port).filter(|entry| entry.gid_type == IBV_GID_TYPE_ROCE_V2).min_by_key(rank)
    };
    let what = match wanted {
        Some(_) => "GID of that index on this port",
        None => "GID of RoCE v2 on this port (has it an address?)",
    };
    let none = Error::new("query_gid", Cause::NotFound { what });
    chosen.map(|entry| (sys::gid_bytes(&entry.gid), entry.gid_index as u8)).ok_or(none)
}

/// The first partition that the port is a full member of, and its index.
fn choose_pkey(context: &sys::Context, port: u8, entries: u16) -> Result<(u16, u16)> {
    for index in 0..entries {
        let pkey = context.pkey(port, index)?;
        if pkey & 0x8000 != 0 {
            return Ok((pkey, index));
        }
    }
    Err(Error::new("query_pkey", Cause::NotFound { what: "partition that this port is a full member of" }))
}

/// An opened device.
#[derive(Debug)]
pub(super) struct IbvDevice {
    info: DeviceInfo,
    pub(super) port: Port,
    /// Readable when one of the following is.
    any: sys::Any,
    /// Rung when a completion was made without the device.
    pub(super) bell: sys::Bell,
    channel: Arc<sys::Channel>,
    pub(super) context: Arc<sys::Context>,
    pub(super) wishes: Wishes,
    /// Queue pairs by the address of the library's object.
    pairs: Mutex<HashMap<usize, Weak<Core>>>,
    serial: AtomicU32,
    /// Events of completion queues that were taken, or are just being taken.
    events: AtomicU64,
    /// Ways to peers that carry.
    pub(super) proven: Proven,
}

impl IbvDevice {
    pub(super) fn new(context: Arc<sys::Context>, info: DeviceInfo, port: Port, wishes: Wishes) -> Result<Self> {
        let system = |call| move |error: std::io::Error| Error::from_io("open_device", call, &error);
        let channel = Arc::new(sys::Channel::new(&context)?);
        let bell = sys::Bell::new().map_err(system("eventfd"))?;
        let events = context.async_fd().map_err(system("fcntl"))?;
        let any = sys::Any::of(&[channel.fd(), events, bell.fd()]).map_err(system("epoll"))?;
        let (pairs, serial, events) = (Mutex::default(), AtomicU32::new(0), AtomicU64::new(0));
        Ok(Self { info, port, any, bell, channel, context, wishes, pairs, serial, events, proven: Proven::default() })
    }

    /// A number for a queue pair, which is not used again while completions of another may be about.
    pub(super) fn next_serial(&self) -> u32 {
        self.serial.fetch_add(1, Ordering::Relaxed)
    }

    /// The number of the completion queues' event that is taken next.
    pub(super) fn next_event(&self) -> u64 {
        self.events.load(Ordering::SeqCst)
    }

    /// Takes an event of a completion queue; false if there was none.
    fn take_queue_event(&self) -> bool {
        self.events.fetch_add(1, Ordering::SeqCst);
        self.channel.take_event()
    }

    pub(super) fn info_capabilities(&self) -> &Capabilities {
        &self.info.capabilities
    }

    pub(super) fn is_inherited(&self) -> bool {
        self.context.is_inherited()
    }

    /// Whether its port can carry anything now.
    pub(super) fn check_port(&self, verb: &'static str) -> Result<()> {
        let port = self.context.query_port(self.port.number)?;
        can_be_used(&self.context, port.state).map_err(|error| match error.cause {
            Cause::NotFound { .. } => Error::new(verb, status::PORT_DOWN),
            cause => Error::new(verb, cause),
        })
    }

    pub(super) fn add(&self, at: usize, core: &Arc<Core>) {
        self.pairs().insert(at, Arc::downgrade(core));
    }

    /// Takes a queue pair off, before its object is destroyed: its address may be another's at once.
    pub(super) fn remove(&self, at: usize) -> Option<Weak<Core>> {
        self.pairs().remove(&at)
    }

    /// Puts one back that could not be destroyed.
    pub(super) fn restore(&self, at: usize, core: Weak<Core>) {
        self.pairs().insert(at, core);
    }

    fn pairs(&self) -> MutexGuard<'_, HashMap<usize, Weak<Core>>> {
        self.pairs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes an asynchronous event and fails the queue pairs that it is the end of; false if there was none. A port that goes
    /// down is the end of all of its queue pairs, though the device would try again for a while: what they were to carry can
    /// go another way at once.
    fn take_event(&self) -> bool {
        let concerned = self.context.next_event(|event_type, whom| {
            if event_type == IBV_EVENT_PORT_ERR && whom != usize::from(self.port.number) {
                return None;
            }
            let error = status::event(event_type)?;
            let pairs = self.pairs();
            let cores: Vec<_> = match event_type {
                IBV_EVENT_DEVICE_FATAL | IBV_EVENT_PORT_ERR => pairs.values().filter_map(Weak::upgrade).collect(),
                IBV_EVENT_CQ_ERR => {
                    pairs.values().filter_map(Weak::upgrade).filter(|core| core.uses_queue(whom)).collect()
                }
                _ => pairs.get(&whom).and_then(Weak::upgrade).into_iter().collect(),
            };
            Some((error, cores))
        });
        // Only now: what is dropped here may be the last of its kind, and its destruction wait for the acknowledgement.
        if let Some(Some((error, cores))) = &concerned {
            if error.cause == status::PORT_DOWN {
                self.proven.clear();
            }
            for core in cores {
                core.fail(error.clone());
            }
        }
        concerned.is_some()
    }
}

impl DeviceBackend for IbvDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn supports(&self, kind: MemoryKind) -> bool {
        kind == MemoryKind::Host
    }

    fn alloc_pd(self: Arc<Self>) -> Result<Arc<dyn PdBackend>> {
        let raw = sys::Domain::new(&self.context)?;
        Ok(Arc::new(Domain::new(self, raw)))
    }

    fn create_cq(self: Arc<Self>, depth: u32) -> Result<Arc<dyn CqBackend>> {
        let have = self.info.capabilities.max_cqe;
        if depth == 0 || depth > have {
            let cause = Cause::Limit { what: "max_cqe", have: have.into(), need: depth.into() };
            return Err(Error::new("create_cq", cause));
        }
        // What queue pairs post by themselves completes here too.
        let whole = have.min(depth.saturating_add(queue_pair::own_entries(depth)));
        let raw = sys::Queue::new(&self.channel, i32::try_from(whole).unwrap_or(i32::MAX))?;
        Ok(Arc::new(super::completion_queue::Handle(Arc::new(Cq::new(self, raw, depth, whole)))))
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.any.fd())
    }

    fn progress(&self) -> Progress {
        if self.is_inherited() || !self.any.is_ready() {
            return Progress::Idle;
        }
        self.bell.quiet();
        let mut taken = 0;
        while taken < EVENTS && self.take_queue_event() {
            taken += 1;
        }
        while taken < 2 * EVENTS && self.take_event() {
            taken += 1;
        }
        if taken < EVENTS { Progress::Idle } else { Progress::More }
    }

    fn adopt(&self, _stream: OwnedFd, _token: Token) -> Result<()> {
        Err(Error::new("adopt", Cause::Unsupported { what: "a connection besides the device's own" }))
    }

    fn closeness(&self, remote: &[u8]) -> Option<u32> {
        let remote = Address::decode(remote).ok()?;
        self.port.unlike(&remote).is_none().then(|| self.port.closeness(&remote))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rdma_core_sys::{IBV_GID_TYPE_IB, IBV_GID_TYPE_ROCE_V1, IBV_LINK_LAYER_ETHERNET, ibv_gid, zeroed};

    const V4: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1];
    const LINK_LOCAL: [u8; 16] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
    const V6: [u8; 16] = [0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];

    fn entry(gid_index: u32, raw: [u8; 16], gid_type: u32, port_num: u32) -> ibv_gid_entry {
        ibv_gid_entry { gid: ibv_gid { raw }, gid_index, gid_type, port_num, ..zeroed() }
    }

    // B45, B56: the first entry of the table is the wrong one.
    #[test]
    fn a_gid_is_chosen_by_type_and_address() {
        let table = [
            entry(0, LINK_LOCAL, IBV_GID_TYPE_ROCE_V1, 1),
            entry(1, LINK_LOCAL, IBV_GID_TYPE_ROCE_V2, 1),
            entry(2, V6, IBV_GID_TYPE_ROCE_V2, 1),
            entry(3, V4, IBV_GID_TYPE_ROCE_V1, 1),
            entry(4, V4, IBV_GID_TYPE_ROCE_V2, 2),
            entry(5, V4, IBV_GID_TYPE_ROCE_V2, 1),
        ];
        let choose = |entries: &[ibv_gid_entry]| choose_gid(entries, 1, IBV_LINK_LAYER_ETHERNET, None).ok();
        assert_eq!(choose(&table), Some((V4, 5)));
        assert_eq!(choose(&table[..5]), Some((V6, 2)), "that of another port does not count");
        assert_eq!(choose(&table[..2]), Some((LINK_LOCAL, 1)));
        assert_eq!(choose(&table[..1]), None, "RoCE v1 only");
        let infiniband = [entry(0, LINK_LOCAL, IBV_GID_TYPE_IB, 1), entry(1, V6, IBV_GID_TYPE_IB, 1)];
        assert_eq!(choose_gid(&infiniband, 1, IBV_LINK_LAYER_INFINIBAND, None), Ok((LINK_LOCAL, 0)));
        let named = |index| choose_gid(&table, 1, IBV_LINK_LAYER_ETHERNET, Some(index)).ok();
        assert_eq!(named(3), Some((V4, 3)), "RoCE v1, as it is asked for");
        assert_eq!((named(4), named(6)), (None, None), "of another port, and not there");
    }
}
