//! `towline devices`: what each provider offers here.

use super::Failure;
use super::args::Path;
use std::io::Write;
use std::sync::Arc;
use towline_verbs::Provider;
use towline_verbs::ibv::{IbvProvider, PortInfo};
use towline_verbs::shm::{ShmConfig, ShmProvider};
use towline_verbs::tcp::{TcpConfig, TcpProvider};

/// One line of the listing.
#[derive(Debug, PartialEq, Eq)]
struct Entry {
    path: &'static str,
    /// What there is, or why there is nothing.
    state: Result<String, String>,
}

/// Lists them on standard output.
pub(crate) fn run() -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    for entry in entries() {
        let (mark, text) = match &entry.state {
            Ok(text) => ("yes", text),
            Err(text) => ("no", text),
        };
        writeln!(out, "{:<5} {mark:<4} {text}", entry.path).map_err(|e| Failure::failed("standard output", e))?;
    }
    Ok(())
}

/// Why `path` isn't available here, if so.
pub(crate) fn missing(path: Path) -> Option<String> {
    match path {
        Path::Auto => None,
        Path::Shm => shm().err(),
        Path::Tcp => tcp().err(),
        Path::Rdma => match rdma().into_iter().find(|port| port.is_ok()) {
            Some(_usable) => None,
            None => rdma().into_iter().find_map(Result::err),
        },
    }
}

/// Why device memory isn't available here.
pub(crate) fn missing_gpu() -> String {
    match find_library("libcuda.so.1") {
        Some(found) => format!("not in this build, which has no support for device memory yet ({found} is here)"),
        None => "not in this build, which has no support for device memory yet (libcuda.so.1 is not here)".into(),
    }
}

/// The paths that are available here.
pub(crate) fn transports() -> Vec<String> {
    let here = entries().into_iter().filter(|e| e.state.is_ok() && e.path != "gpu");
    let mut paths: Vec<String> = here.map(|e| e.path.to_string()).collect();
    paths.dedup(); // of RDMA there is an entry for each port
    paths
}

fn entries() -> Vec<Entry> {
    let mut entries = vec![Entry { path: "shm", state: shm() }, Entry { path: "tcp", state: tcp() }];
    entries.extend(rdma().into_iter().map(|state| Entry { path: "rdma", state }));
    entries.push(Entry { path: "gpu", state: Err(missing_gpu()) });
    entries
}

fn shm() -> Result<String, String> {
    let host = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    host.map_err(|e| format!("/proc/sys/kernel/random/boot_id, by which one host is told from another: {e}"))?;
    // Neither the name nor the preface matters for what there is: nothing is connected.
    let provider = ShmProvider::new(ShmConfig::new("devices", |_| vec![])).map_err(|e| e.to_string())?;
    list(&provider)
}

fn tcp() -> Result<String, String> {
    // Nothing is connected here either.
    let config = TcpConfig::new(vec![], Arc::new(|_| vec![]));
    let provider = TcpProvider::new(config).map_err(|e| e.to_string())?;
    let allowed = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_available_congestion_control").unwrap_or_default();
    let allowed = allowed.split_whitespace().collect::<Vec<_>>().join(", ");
    Ok(format!("{} (available: {allowed})", list(&provider)?))
}

/// The devices of a provider.
fn list(provider: &dyn Provider) -> Result<String, String> {
    let devices = provider.devices().map_err(|e| e.to_string())?;
    let lines: Vec<_> = devices.iter().map(|device| format!("{}: {}", device.name, device.description)).collect();
    Ok(lines.join("; "))
}

/// Each port of each device, usable or not; or what is missing.
fn rdma() -> Vec<Result<String, String>> {
    let line = |port: &PortInfo| if port.usable.is_ok() { Ok(port.to_string()) } else { Err(port.to_string()) };
    match IbvProvider::survey() {
        Ok(ports) => ports.iter().map(line).collect(),
        Err(absence) => vec![Err(absence.to_string())],
    }
}

/// Where the dynamic loader would find `name`, as far as the usual folders go.
fn find_library(name: &str) -> Option<String> {
    let arch = std::env::consts::ARCH;
    let path = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let usual = [
        format!("/lib/{arch}-linux-gnu"),
        format!("/usr/lib/{arch}-linux-gnu"),
        "/lib64".into(),
        "/usr/lib64".into(),
        "/usr/lib".into(),
        "/usr/local/lib".into(),
    ];
    let folders = path.split(':').filter(|f| !f.is_empty()).map(String::from).chain(usual);
    folders.map(|folder| format!("{folder}/{name}")).find(|file| std::path::Path::new(file).exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_shared_memory_and_tcp() {
        let transports = transports();
        assert_eq!(transports[..2], ["shm", "tcp"]);
        assert_eq!(transports.get(2).is_some_and(|path| path == "rdma"), missing(Path::Rdma).is_none());
        assert_eq!((missing(Path::Shm), missing(Path::Tcp), missing(Path::Auto)), (None, None, None));
    }

    #[test]
    fn what_is_missing_has_a_reason() {
        if let Some(reason) = missing(Path::Rdma) {
            assert!(["libibverbs.so.1", "not usable"].iter().any(|word| reason.contains(word)), "{reason}");
        }
        assert!(missing_gpu().contains("libcuda.so.1"));
        assert_eq!(find_library("libnothing-of-the-sort.so.9"), None);
    }
}
