//! An endpoint's options as one line of text, so that they can be told to another process.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use towline::{Builder, Endpoint, Path, Paths, Result, Secret};

/// Options of an endpoint; those not set are the builder's defaults, but for a pool of 16 MiB and a loopback address of
/// its own ([`lonely`]).
#[derive(Debug, Clone, Default)]
pub struct Options(BTreeMap<&'static str, String>);

const NAMES: [&str; 14] = [
    "pool",
    "paths",
    "lease",
    "drift",
    "bind",
    "also_bind",
    "advertise",
    "secret",
    "insecure",
    "alloc",
    "handshake",
    "granule",
    "device",
    "windows",
];

impl Options {
    fn with(mut self, name: &'static str, value: impl ToString) -> Self {
        self.0.insert(name, value.to_string());
        self
    }

    /// Bytes of the pool.
    pub fn pool(self, bytes: u64) -> Self {
        self.with("pool", bytes)
    }

    /// Allowed paths, by their names with commas between.
    pub fn paths(self, names: &str) -> Self {
        self.with("paths", names)
    }

    /// Short leases.
    pub fn lease(self, lease: Duration) -> Self {
        self.with("lease", lease.as_millis()).with("drift", (lease / 20).as_millis())
    }

    pub fn bind(self, address: impl ToString) -> Self {
        self.with("bind", address)
    }

    pub fn also_bind(self, address: impl ToString) -> Self {
        self.with("also_bind", address)
    }

    pub fn advertise(self, address: impl ToString) -> Self {
        self.with("advertise", address)
    }

    pub fn secret(self, secret: &str) -> Self {
        self.with("secret", secret)
    }

    pub fn insecure(self) -> Self {
        self.with("insecure", "yes")
    }

    pub fn alloc_timeout(self, timeout: Duration) -> Self {
        self.with("alloc", timeout.as_millis())
    }

    pub fn handshake_timeout(self, timeout: Duration) -> Self {
        self.with("handshake", timeout.as_millis())
    }

    pub fn granule(self, bytes: u64) -> Self {
        self.with("granule", bytes)
    }

    /// An RDMA device; all that there are, if none is named.
    pub fn device(self, name: &str) -> Self {
        let names = self.0.get("device").map(|names| format!("{names},{name}"));
        self.with("device", names.unwrap_or_else(|| name.to_owned()))
    }

    /// Whether RDMA devices use memory windows.
    pub fn windows(self, windows: bool) -> Self {
        self.with("windows", windows)
    }

    pub fn builder(&self) -> Builder {
        let bind = self.0.get("bind").cloned().unwrap_or_else(|| format!("{}:0", lonely()));
        let mut builder = Endpoint::builder().pool_size(16 << 20).bind(bind);
        for (name, value) in &self.0 {
            let time = || Duration::from_millis(value.parse().unwrap());
            builder = match *name {
                "pool" => builder.pool_size(value.parse().unwrap()),
                "paths" => builder.allow_paths(paths(value)),
                "lease" => builder.lease(time()),
                "drift" => builder.drift_margin(time()),
                "bind" => builder, // the first, before others
                "also_bind" => builder.also_bind(value),
                "advertise" => builder.advertise(value),
                "secret" => builder.secret(secret(value)),
                "insecure" => builder.insecure(),
                "alloc" => builder.alloc_timeout(time()),
                "handshake" => builder.handshake_timeout(time()),
                "granule" => builder.granule(value.parse().unwrap()),
                "device" => value.split(',').fold(builder, |builder, name| builder.rdma_device(name)),
                "windows" => builder.rdma_windows(value.parse().unwrap()),
                other => panic!("no option: {other}"),
            };
        }
        builder
    }

    pub fn build(&self) -> Result<Endpoint> {
        self.builder().build()
    }

    pub fn to_text(&self) -> String {
        self.0.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(";")
    }

    pub fn from_text(text: &str) -> Self {
        let word = |word: &str| {
            let (name, value) = word.split_once('=').unwrap();
            let name = NAMES.iter().find(|known| **known == name).unwrap();
            (*name, value.to_owned())
        };
        Self(text.split(';').filter(|word| !word.is_empty()).map(word).collect())
    }
}

/// A loopback address that is nobody else's on this machine, all but certainly. A port at it that has become free is not
/// given to another test's endpoint, which a consumer would then take for the one it looks for.
pub fn lonely() -> Ipv4Addr {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = std::process::id().wrapping_mul(61).wrapping_add(COUNT.fetch_add(1, Ordering::Relaxed));
    let [_, a, b, c] = number.wrapping_mul(0x9e37_79b1).to_be_bytes();
    Ipv4Addr::new(127, a.max(1), b, c.clamp(1, 254))
}

/// A secret of the bytes of a text.
pub fn secret(text: &str) -> Secret {
    Secret::from_bytes(text.as_bytes()).unwrap()
}

fn paths(names: &str) -> Paths {
    names.split(',').fold(Paths::NONE, |paths, name| {
        paths.and(match name {
            "direct" => Path::Direct,
            "shm" => Path::Shm,
            "rdma" => Path::Rdma,
            "tcp" => Path::Tcp,
            other => panic!("no path: {other}"),
        })
    })
}
