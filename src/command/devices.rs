//! `towline devices`: what each provider offers here.

use super::Failure;
use super::args::Path;
use std::io::Write;
use std::sync::Arc;
use towline_verbs::Provider;
use towline_verbs::ibv::IbvProvider;
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
        Path::Rdma => rdma().err(),
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
    entries().into_iter().filter(|e| e.state.is_ok() && e.path != "gpu").map(|e| e.path.to_string()).collect()
}

fn entries() -> Vec<Entry> {
    vec![
        Entry { path: "shm", state: shm() },
        Entry { path: "tcp", state: tcp() },
        Entry { path: "rdma", state: rdma() },
        Entry { path: "gpu", state: Err(missing_gpu()) },
    ]
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

fn rdma() -> Result<String, String> {
    let devices = IbvProvider::new().map_err(|e| e.to_string()).and_then(|provider| list(&provider));
    let here = match devices {
        Ok(devices) => format!("here: {devices}"),
        Err(reason) => format!("here: {reason}"),
    };
    Err(format!("not in this build, whose endpoints do not use the libibverbs provider yet ({here})"))
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
        assert_eq!(transports(), ["shm", "tcp"]);
        assert_eq!((missing(Path::Shm), missing(Path::Tcp), missing(Path::Auto)), (None, None, None));
    }

    #[test]
    fn what_is_missing_has_a_reason() {
        assert!(missing(Path::Rdma).unwrap().contains("libibverbs"));
        assert!(missing_gpu().contains("libcuda.so.1"));
        assert_eq!(find_library("libnothing-of-the-sort.so.9"), None);
    }
}
