//! What RDMA this machine has: devices, their ports and addresses, or what is missing; and how a port is named.

use super::device::{self, choose_gid};
use super::{IbvProvider, sys};
use crate::Error;
use core::fmt;
use core::str::FromStr;
use rdma_core_sys::{
    IBV_GID_TYPE_IB, IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2, IBV_LINK_LAYER_ETHERNET, IBV_LINK_LAYER_INFINIBAND,
    IBV_PORT_ACTIVE, IBV_PORT_ARMED, IBV_PORT_DOWN, IBV_PORT_INIT, Library, Unavailable, ibv_gid_entry,
};
use std::net::Ipv6Addr;

/// What a machine without RDMA lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Missing {
    /// `libibverbs.so.1`, or one that is new enough: install rdma-core 24 or newer.
    Library,
    /// RDMA in the running kernel: load `ib_uverbs` and the device's own module.
    KernelSupport,
    /// A device with an installed provider.
    Device,
}

/// Why there is no RDMA device here, in one line with the way out.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Absence {
    /// What is missing.
    pub missing: Missing,
    /// The line.
    pub why: String,
}

impl Absence {
    /// So much is missing, and why.
    #[must_use]
    pub fn new(missing: Missing, why: impl Into<String>) -> Self {
        Self { missing, why: why.into() }
    }
}

impl From<Unavailable> for Absence {
    fn from(reason: Unavailable) -> Self {
        let missing = match &reason {
            Unavailable::NoLibrary { .. } | Unavailable::MissingSymbol { .. } => Missing::Library,
            Unavailable::NoKernelSupport => Missing::KernelSupport,
            _ => Missing::Device,
        };
        Self::new(missing, reason.to_string())
    }
}

impl fmt::Display for Absence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.why)
    }
}

impl std::error::Error for Absence {}

/// A port of a device, and the address by which peers reach it: `NAME`, `NAME:PORT` or `NAME:PORT:GID_INDEX`, as in
/// `mlx5_0:1:3`. What is left out is chosen: the first port that is active; on Ethernet the GID of RoCE v2 of an IPv4
/// address, an IPv6 address, or else a link-local one. RoCE v1 is used only when a GID of it is named.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PortName {
    /// The device, as `ibv_devices` calls it.
    pub device: String,
    /// The port, from 1.
    pub port: Option<u8>,
    /// The index of the GID in the port's table.
    pub gid_index: Option<u8>,
}

impl FromStr for PortName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut words = text.split(':');
        let device = words.next().filter(|name| !name.is_empty()).ok_or("it names no device")?;
        let port = words.next().map(|word| word.parse().ok().filter(|port| *port > 0).ok_or("a port is 1 to 255"));
        let gid_index = words.next().map(|word| word.parse().map_err(|_| "the index of a GID is 0 to 255"));
        match words.next() {
            Some(_) => Err("it has more than NAME:PORT:GID_INDEX"),
            None => Ok(Self { device: device.into(), port: port.transpose()?, gid_index: gid_index.transpose()? }),
        }
    }
}

impl fmt::Display for PortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.device)?;
        let Some(port) = self.port else { return Ok(()) };
        write!(f, ":{port}")?;
        self.gid_index.map_or(Ok(()), |index| write!(f, ":{index}"))
    }
}

/// An entry of a port's GID table.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct GidInfo {
    /// Its index.
    pub index: u32,
    /// The address; one of IPv4 is written as one of IPv6 (`::ffff:10.0.0.1`).
    pub gid: Ipv6Addr,
    /// `InfiniBand`, `RoCE v1`, `RoCE v2`, or `of an unknown type`.
    pub kind: &'static str,
}

/// A port, usable or not.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PortInfo {
    /// The device's name.
    pub device: String,
    /// The port's number.
    pub number: u8,
    /// `active`, `down`, `initialising`, `armed`, or `in an unknown state`.
    pub state: &'static str,
    /// `InfiniBand`, `Ethernet`, or `unknown`.
    pub link_layer: &'static str,
    /// Path MTU in bytes.
    pub mtu: u32,
    /// Its GIDs that are set.
    pub gids: Vec<GidInfo>,
    /// The index of the GID that is used unless another is named; or why the port can't be used.
    pub usable: Result<u8, Error>,
}

impl fmt::Display for PortInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}, {}, MTU {}", self.device, self.number, self.link_layer, self.state, self.mtu)?;
        for gid in &self.gids {
            let chosen = if self.usable == Ok(gid.index as u8) { ", used" } else { "" };
            write!(f, "; GID {}: {} ({}{chosen})", gid.index, gid.gid, gid.kind)?;
        }
        self.usable.as_ref().map_or_else(|error| write!(f, "; not usable: {error}"), |_| Ok(()))
    }
}

impl IbvProvider {
    /// All ports of all devices, in the library's order.
    ///
    /// # Errors
    /// What is missing.
    pub fn survey() -> Result<Vec<PortInfo>, Absence> {
        Self::over(Library::load().map_err(Absence::from)?).ports()
    }

    pub(super) fn ports(&self) -> Result<Vec<PortInfo>, Absence> {
        let list = self.library.devices()?;
        let mut ports = vec![];
        for index in 0..list.len() {
            let Some(device) = list.name(index) else { continue };
            let context = match sys::Context::open(self.library, &list, index) {
                Ok(context) => context,
                Err(error) => {
                    ports.push(closed(device, 1, error));
                    continue;
                }
            };
            let count = context.query_device().map_or(1, |attr| attr.phys_port_cnt);
            ports.extend((1..=count).map(|number| look(&context, &device, number)));
        }
        Ok(ports)
    }
}

/// A port of which nothing is known but why.
fn closed(device: String, number: u8, why: Error) -> PortInfo {
    let (state, link_layer) = ("in an unknown state", "unknown");
    PortInfo { device, number, state, link_layer, mtu: 0, gids: vec![], usable: Err(why) }
}

fn look(context: &sys::Context, device: &str, number: u8) -> PortInfo {
    let (port, entries) = match context.query_port(number).and_then(|port| Ok((port, context.gids(device::MAX_GIDS)?)))
    {
        Ok(known) => known,
        Err(error) => return closed(device.into(), number, error),
    };
    let chosen = choose_gid(&entries, number, port.link_layer, None);
    let usable = super::can_be_used(context, port.state).and(chosen.map(|(_, index)| index));
    PortInfo {
        device: device.into(),
        number,
        state: match port.state {
            IBV_PORT_DOWN => "down",
            IBV_PORT_INIT => "initialising",
            IBV_PORT_ARMED => "armed",
            IBV_PORT_ACTIVE => "active",
            _ => "in an unknown state",
        },
        link_layer: match port.link_layer {
            IBV_LINK_LAYER_INFINIBAND => "InfiniBand",
            IBV_LINK_LAYER_ETHERNET => "Ethernet",
            _ => "unknown",
        },
        mtu: 128 << port.active_mtu.min(5),
        gids: entries.iter().filter(|entry| entry.port_num == u32::from(number)).map(gid).collect(),
        usable,
    }
}

fn gid(entry: &ibv_gid_entry) -> GidInfo {
    let kind = match entry.gid_type {
        IBV_GID_TYPE_IB => "InfiniBand",
        IBV_GID_TYPE_ROCE_V1 => "RoCE v1",
        IBV_GID_TYPE_ROCE_V2 => "RoCE v2",
        _ => "of an unknown type",
    };
    GidInfo { index: entry.gid_index, gid: sys::gid_bytes(&entry.gid).into(), kind }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_named_in_three_ways() {
        let name = |device: &str, port, gid_index| PortName { device: device.into(), port, gid_index };
        for (text, expected) in [
            ("mlx5_0", name("mlx5_0", None, None)),
            ("mlx5_0:2", name("mlx5_0", Some(2), None)),
            ("rxe0:1:3", name("rxe0", Some(1), Some(3))),
        ] {
            assert_eq!(text.parse(), Ok(expected.clone()));
            assert_eq!(expected.to_string(), text);
        }
        for (text, why) in [
            ("", "it names no device"),
            (":1", "it names no device"),
            ("a:0", "a port is 1 to 255"),
            ("a:x", "a port is 1 to 255"),
            ("a:", "a port is 1 to 255"),
            ("a:1:256", "the index of a GID is 0 to 255"),
            ("a:1:2:3", "it has more than NAME:PORT:GID_INDEX"),
        ] {
            assert_eq!(text.parse::<PortName>(), Err(why), "{text}");
        }
    }

    #[test]
    fn each_thing_that_can_be_missing_is_told_apart() {
        let missing = |reason| Absence::from(reason).missing;
        assert_eq!(missing(Unavailable::NoLibrary { reason: "none".into() }), Missing::Library);
        assert_eq!(missing(Unavailable::MissingSymbol { symbol: c"f", version: c"V" }), Missing::Library);
        assert_eq!(missing(Unavailable::NoKernelSupport), Missing::KernelSupport);
        assert_eq!(missing(Unavailable::NoDevice), Missing::Device);
        let absence = Absence::from(Unavailable::NoKernelSupport);
        assert!(absence.to_string().contains("modprobe ib_uverbs"), "{absence}");
    }
}
