//! The RDMA devices of an endpoint: those that are named, or all that can be used.

use super::{BUILD, verbs};
use crate::engine::{Rail, WithoutRdma};
use crate::{Error, ErrorKind, Path, Result};
use towline_verbs::ibv::{Absence, IbvProvider, Missing, PortInfo, PortName};
use towline_verbs::{Cause, Memory};

/// Most devices of one endpoint.
const MOST: usize = 16;

/// Opens the ports of these names, or of all devices that can be used if there are none, and registers `memory` with each;
/// with memory windows, where they have them, or without.
///
/// # Errors
/// What the machine lacks; a name that is no port's here; or why no device could be used.
pub(super) fn open(names: Vec<PortName>, windows: bool, memory: &Memory) -> Result<Vec<Rail>> {
    let ports = IbvProvider::survey().map_err(absent)?;
    let mut provider = IbvProvider::new().map_err(verbs)?;
    if !windows {
        provider = provider.without_windows();
    }
    let rail = |name: &PortName| Rail::new(Path::Rdma, provider.open_port(name)?, memory);
    if names.len() > MOST {
        return bad_name(format!("there are {} of them, allowed are {MOST}", names.len()));
    }
    if let Some(unknown) = names.iter().find(|name| !is_there(name, &ports)) {
        return bad_name(format!("`{unknown}` is not here; here are {}", list(&ports)));
    }
    if !names.is_empty() {
        let named = |name: &PortName| rail(name).map_err(|error| verbs(error).about(format!("`rdma_device` {name}")));
        return names.iter().map(named).collect();
    }
    let mut rails = Vec::new();
    let mut refusal = None;
    let mut last = None;
    for port in &ports {
        let used = last == Some(&port.device); // of each device one port
        if used || rails.len() == MOST {
            continue;
        }
        let name = PortName { device: port.device.clone(), port: Some(port.number), gid_index: None };
        let opened = port.usable.clone().and_then(|_| rail(&name));
        match opened {
            Ok(rail) => {
                rails.push(rail);
                last = Some(&port.device);
            }
            Err(error) => refusal = refusal.or(Some((name, error))),
        }
    }
    match refusal {
        Some((name, error)) if rails.is_empty() => Err(verbs(error).about(format!("RDMA device {name}"))),
        None if rails.is_empty() => Err(absent(Absence::new(Missing::Device, "no device of the list has a name"))),
        _ => Ok(rails),
    }
}

fn absent(absence: Absence) -> Error {
    Error::new(BUILD, ErrorKind::NoRdma { missing: absence.missing, why: absence.why })
}

fn bad_name<T>(why: String) -> Result<T> {
    Err(Error::new(BUILD, ErrorKind::BadOption { option: "rdma_device", why }))
}

fn is_there(name: &PortName, ports: &[PortInfo]) -> bool {
    let fits = |port: &PortInfo| {
        port.device == name.device
            && name.port.is_none_or(|number| number == port.number)
            && name.gid_index.is_none_or(|index| port.gids.iter().any(|gid| gid.index == u32::from(index)))
    };
    ports.iter().any(fits)
}

fn list(ports: &[PortInfo]) -> String {
    let port = |port: &PortInfo| {
        let gids: Vec<_> = port.gids.iter().map(|gid| gid.index.to_string()).collect();
        format!("{}:{} (GIDs {})", port.device, port.number, gids.join(", "))
    };
    ports.iter().map(port).collect::<Vec<_>>().join(", ")
}

/// What completions say where another path takes over.
pub(super) fn note(error: &Error) -> WithoutRdma {
    let has_device = !matches!(error.kind(), ErrorKind::NoRdma { .. }) && !is_idle(error);
    WithoutRdma { why: error.kind().to_string(), has_device }
}

/// Whether the error only says that no device is set up: no port active or with an address.
fn is_idle(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Verbs(error) if matches!(error.cause, Cause::NotFound { .. }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_device_that_could_be_used_makes_other_paths_a_fallback() {
        let of = |kind| note(&Error::new(BUILD, kind)).has_device;
        let cause = |cause| ErrorKind::Verbs(towline_verbs::Error::new("open_device", cause));
        assert!(!of(ErrorKind::NoRdma { missing: Missing::Library, why: String::new() }));
        assert!(!of(cause(Cause::NotFound { what: "active port of this device" })));
        assert!(of(cause(Cause::Limit { what: "memlock (ulimit -l)", have: 1, need: 2 })));
        assert!(of(cause(Cause::Os { errno: libc::EIO, call: "ibv_alloc_pd" })));
    }
}
