//! How an endpoint is set up.

mod rdma;

use crate::driver::{Driver, Parts};
use crate::endpoint::{Endpoint, parse_address};
use crate::engine::{self, Config, Engine, Identity, Limits, Rail, Tick, Times, WithoutRdma};
use crate::pool::Pool;
use crate::{Error, ErrorKind, Path, Paths, Result};
use crate::{HugePages, Secret, sys};
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use towline_control::address::{Address, UnixName};
use towline_control::preface::{Preface, Purpose};
use towline_control::socket::{self, Listener, SocketError, SocketName};
use towline_control::wire::MIN_MAX_FRAME;
use towline_verbs::ibv::PortName;
use towline_verbs::shm::{ShmConfig, ShmProvider};
use towline_verbs::tcp::{TcpConfig, TcpProvider, prepare_listener};
use towline_verbs::{Device, Memory, Provider};

const BUILD: &str = "build";

/// The options of an endpoint; [`Endpoint::builder`].
///
/// ```
/// use std::time::Duration;
/// use towline::{Endpoint, Limits, Path, Paths, Secret};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let endpoint = Endpoint::builder()
///     .bind("127.0.0.1:0") // beyond this host a secret is needed
///     .secret(Secret::from_bytes(b"sixteen bytes or more")?)
///     .pool_size(64 << 20)
///     .allow_paths(Paths::ALL.except(Path::Rdma))
///     .limits(Limits::new().payloads(1000))
///     .alloc_timeout(Duration::from_secs(1))
///     .build()?;
/// println!("peers reach it at {}", endpoint.address());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Builder {
    bind: Vec<String>,
    advertise: Vec<String>,
    pool_size: u64,
    granule: u64,
    huge_pages: HugePages,
    paths: Paths,
    rdma_devices: Vec<String>,
    rdma_windows: bool,
    secret: Option<Secret>,
    insecure: bool,
    limits: Limits,
    times: Times,
    deadline: Duration,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            bind: vec!["127.0.0.1:0".to_owned()],
            advertise: Vec::new(),
            pool_size: 256 << 20,
            granule: 4096,
            huge_pages: HugePages::Off,
            paths: Paths::ALL,
            rdma_devices: Vec::new(),
            rdma_windows: true,
            secret: None,
            insecure: false,
            limits: Limits::default(),
            times: Times::default(),
            deadline: Duration::from_secs(30),
        }
    }
}

/// What [`Builder::build`] has made.
pub(crate) struct Built {
    pub(crate) boot: [u8; 16],
    pub(crate) incarnation: [u8; 16],
    pub(crate) advertised: Vec<Address>,
    pub(crate) deadline: Duration,
    pub(crate) pool: Arc<Pool>,
    pub(crate) driver: Driver,
}

impl Builder {
    /// Where to listen: `HOST:PORT`, `IPV4:PORT`, `[IPV6%SCOPE]:PORT`; port 0 lets the system choose, and
    /// [`Endpoint::address`] says which it was. Default: `127.0.0.1:0`. Anything but loopback needs a
    /// [`secret`](Self::secret), or [`insecure`](Self::insecure).
    #[must_use]
    pub fn bind(mut self, address: impl Into<String>) -> Self {
        self.bind = vec![address.into()];
        self
    }

    /// Another address to listen at, beside the first.
    #[must_use]
    pub fn also_bind(mut self, address: impl Into<String>) -> Self {
        self.bind.push(address.into());
        self
    }

    /// Where others reach this endpoint, if that is not where it listens (behind a port mapping, or when it listens at
    /// all addresses); port 0 stands for the port that was bound. May be called up to 8 times.
    #[must_use]
    pub fn advertise(mut self, address: impl Into<String>) -> Self {
        self.advertise.push(address.into());
        self
    }

    /// Bytes of the pool; default 256 MiB. All of it is allocated and populated when the endpoint is built.
    #[must_use]
    pub fn pool_size(mut self, bytes: u64) -> Self {
        self.pool_size = bytes;
        self
    }

    /// Bytes that every buffer's length is rounded up to within the pool: a power of two from 64 to 2 MiB; default
    /// 4096.
    #[must_use]
    pub fn granule(mut self, bytes: u64) -> Self {
        self.granule = bytes;
        self
    }

    /// Huge pages for the pool; default: off.
    #[must_use]
    pub fn huge_pages(mut self, huge_pages: HugePages) -> Self {
        self.huge_pages = huge_pages;
        self
    }

    /// The paths that may be used; default: all. What is not allowed is an error, never a fallback.
    #[must_use]
    pub fn allow_paths(mut self, paths: Paths) -> Self {
        self.paths = paths;
        self
    }

    /// An RDMA device to use, and its port and address if that matters: `NAME`, `NAME:PORT` or `NAME:PORT:GID_INDEX`, as
    /// `towline devices` lists them (`mlx5_0`, `mlx5_0:1:3`). May be called up to 16 times; the first is preferred. A device
    /// that is named and can't be used is an error. Default: every device that can be used, in the system's order; of
    /// each the first active port; on Ethernet the address of RoCE v2 and IPv4, if there is one.
    #[must_use]
    pub fn rdma_device(mut self, port: impl Into<String>) -> Self {
        self.rdma_devices.push(port.into());
        self
    }

    /// Whether RDMA devices that have memory windows (type 2B) use them; default: yes. With them each lease has keys of its own,
    /// which end with it. Without, a lease costs the device nothing, its consumer can read the whole pool, and a lease that
    /// runs out breaks the queue pair of all leases of that consumer (see SECURITY.md).
    #[must_use]
    pub fn rdma_windows(mut self, windows: bool) -> Self {
        self.rdma_windows = windows;
        self
    }

    /// A secret that peers must share: control connections are authenticated and encrypted with it.
    #[must_use]
    pub fn secret(mut self, secret: Secret) -> Self {
        self.secret = Some(secret);
        self
    }

    /// Lets peers beyond this host in, and connects to them, without a secret: whoever reaches the port can get what is
    /// published.
    #[must_use]
    pub fn insecure(mut self) -> Self {
        self.insecure = true;
        self
    }

    /// What it may hold and do at most: payloads, peers, leases, gets, bytes in flight; default: [`Limits::default`].
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// How long leases last: what a consumer that is gone without a word can hold a payload's memory for over a network,
    /// and how often consumers report that they are alive. Default: 30 seconds.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.times.lease = nanoseconds(lease);
        self
    }

    /// How much the clocks of two machines may drift apart during a lease; default: 300 milliseconds, which is one
    /// percent of the default lease.
    #[must_use]
    pub fn drift_margin(mut self, margin: Duration) -> Self {
        self.times.drift_margin = nanoseconds(margin);
        self
    }

    /// How long connecting and agreeing on a path may take; default: 5 seconds.
    #[must_use]
    pub fn handshake_timeout(mut self, timeout: Duration) -> Self {
        self.times.handshake = nanoseconds(timeout);
        self
    }

    /// How long [`Endpoint::alloc`], and puts of bytes, wait for room in the pool; default: 30 seconds.
    #[must_use]
    pub fn alloc_timeout(mut self, timeout: Duration) -> Self {
        self.deadline = timeout;
        self
    }

    /// Builds and starts the endpoint.
    ///
    /// # Errors
    /// [`ErrorKind::BadOption`], [`ErrorKind::AddressMalformed`], [`ErrorKind::Insecure`]; [`ErrorKind::Os`] for an
    /// address that can't be listened at, [`ErrorKind::Verbs`] for memory that the machine does not have;
    /// [`ErrorKind::NoRdma`] where RDMA alone is allowed, or a device is named, and this machine has none.
    pub fn build(self) -> Result<Endpoint> {
        let bad = |option, why: String| Err(Error::new(BUILD, ErrorKind::BadOption { option, why }));
        if self.pool_size == 0 {
            return bad("pool_size", "it is zero".into());
        }
        if !self.granule.is_power_of_two() || !(64..=2 << 20).contains(&self.granule) {
            return bad("granule", format!("it is {}", self.granule));
        }
        if self.paths == Paths::NONE {
            return bad("allow_paths", "no path is allowed".into());
        }
        if self.times.drift_margin.saturating_mul(2) >= self.times.lease {
            let [lease, margin] = [self.times.lease, self.times.drift_margin].map(Duration::from_nanos);
            return bad("lease", format!("it is {lease:?}, with a drift margin of {margin:?}"));
        }
        if self.limits.key == 0 || self.limits.key > 1024 {
            return bad("limits.key", format!("it is {}", self.limits.key));
        }
        let Limits { send_queue, in_flight, gets, links, tries, backlog, .. } = self.limits;
        let at_least_one = [
            ("limits.send_queue", u64::from(send_queue)),
            ("limits.in_flight", in_flight),
            ("limits.gets", gets as u64),
            ("limits.links", links as u64),
            ("limits.tries", u64::from(tries)),
            ("handshake_timeout", self.times.handshake),
        ];
        if let Some((option, _)) = at_least_one.into_iter().find(|(_, limit)| *limit == 0) {
            return bad(option, "it is zero".into());
        }
        // What a session needs to be able to answer at all.
        if backlog < 2 * MIN_MAX_FRAME as usize {
            return bad("limits.backlog", format!("it is {backlog}"));
        }
        let mut listeners = self.listen()?;
        let advertised = self.advertised(&listeners)?;
        let boot = boot_id()?;
        let incarnation = random()?;
        let process = process_id()?;
        let unix_name = engine::unix_name_of(&incarnation);
        let in_what = if self.huge_pages == HugePages::Require { " in huge pages" } else { "" };
        let memory = Memory::shared(self.pool_size, self.huge_pages)
            .map_err(|error| verbs(error).about(format!("`pool_size` of {} bytes{in_what}", self.pool_size)))?;
        let mut rails: Vec<Rail> = self.rails_of_this_host(&memory, &unix_name)?.into_iter().collect();
        let Rdma { rails: rdma, without: without_rdma } = self.rdma(&memory)?;
        rails.extend(rdma);
        rails.extend(self.rail_over_tcp(&memory, &advertised)?);
        let wants_unix = rails.iter().any(|rail| rail.path == Path::Shm);
        if wants_unix {
            let name = UnixName::new(&unix_name)
                .map_err(|e| Error::new(BUILD, ErrorKind::BadOption { option: "unix name", why: e.to_string() }))?;
            listeners.push(Listener::bind(&SocketName::Unix(name)).map_err(socket_error)?);
        }
        let identity = Identity {
            boot,
            incarnation,
            process,
            advertised: advertised.clone(),
            unix_name: if wants_unix { unix_name } else { Vec::new() },
        };
        let config = Config {
            identity,
            paths: self.paths,
            without_rdma,
            secret: self.secret,
            insecure: self.insecure,
            limits: self.limits,
            times: self.times,
        };
        let pool = Pool::new(memory, self.granule)?;
        let parts = Parts::new()?;
        let engine = Engine::with_pool(config, pool.clone(), rails, parts.wake(), sys::boot_clock())?;
        let driver = Driver::start(parts, engine, listeners)?;
        Endpoint::start(Built { boot, incarnation, advertised, deadline: self.deadline, pool, driver })
    }

    fn listen(&self) -> Result<Vec<Listener>> {
        let mut listeners = Vec::new();
        for text in &self.bind {
            let address = parse_address(BUILD, text)?;
            for address in resolve(BUILD, &address)? {
                if !address.ip().is_loopback() && self.secret.is_none() && !self.insecure {
                    return Err(Error::new(BUILD, ErrorKind::Insecure { address: address.to_string() }));
                }
                // An endpoint can be started again on the port it had (SO_REUSEADDR).
                let listener = Listener::bind(&SocketName::Tcp(address));
                let listener = listener.map_err(|error| socket_error(error).about(format!("`bind` to {address}")))?;
                prepare_listener(&listener); // it accepts data connections too
                listeners.push(listener);
            }
        }
        Ok(listeners)
    }

    fn advertised(&self, listeners: &[Listener]) -> Result<Vec<Address>> {
        let bound: Vec<SocketAddr> = listeners
            .iter()
            .filter_map(|listener| match listener.local_name() {
                Ok(SocketName::Tcp(address)) => Some(address),
                _ => None,
            })
            .collect();
        if self.advertise.is_empty() {
            if let Some(any) = bound.iter().find(|address| address.ip().is_unspecified()) {
                let why = format!("an endpoint that listens at {any} must be told where it can be reached");
                return Err(Error::new(BUILD, ErrorKind::BadOption { option: "advertise", why }));
            }
            return Ok(bound.into_iter().map(Address::Ip).take(8).collect());
        }
        if self.advertise.len() > 8 {
            return Err(Error::new(
                BUILD,
                ErrorKind::BadOption { option: "advertise", why: format!("it has {} addresses", self.advertise.len()) },
            ));
        }
        let port = bound.first().map_or(0, SocketAddr::port);
        self.advertise.iter().map(|text| parse_address(BUILD, text).map(|address| with_port(address, port))).collect()
    }

    fn rails_of_this_host(&self, memory: &Memory, unix_name: &[u8]) -> Result<Option<Rail>> {
        if !self.paths.allow(Path::Shm) && !self.paths.allow(Path::Direct) {
            return Ok(None);
        }
        let provider = ShmProvider::new(ShmConfig::new(unix_name, preface)).map_err(verbs)?;
        let device = open_first(&provider).map_err(verbs)?;
        Rail::new(Path::Shm, device, memory).map(Some).map_err(verbs)
    }

    fn rail_over_tcp(&self, memory: &Memory, advertised: &[Address]) -> Result<Option<Rail>> {
        if !self.paths.allow(Path::Tcp) {
            return Ok(None);
        }
        let mut addresses = Vec::new();
        for address in advertised {
            addresses.extend(resolve(BUILD, address)?);
        }
        let mut config = TcpConfig::new(addresses, Arc::new(preface));
        // As for control connections: where nobody proves who he is, only this host.
        config.loopback_only = self.secret.is_none() && !self.insecure;
        let provider = TcpProvider::new(config).map_err(verbs)?;
        let device = open_first(&provider).map_err(verbs)?;
        Rail::new(Path::Tcp, device, memory).map(Some).map_err(verbs)
    }

    /// The RDMA devices that are named, or those that there are. Where another path is allowed and none is named, there may
    /// be none.
    fn rdma(&self, memory: &Memory) -> Result<Rdma> {
        if !self.paths.allow(Path::Rdma) {
            return match self.rdma_devices.first() {
                None => Ok(Rdma::default()),
                Some(name) => {
                    let why = format!("`{name}` is named, and the path rdma is not allowed");
                    Err(Error::new(BUILD, ErrorKind::BadOption { option: "rdma_device", why }))
                }
            };
        }
        let names = self.rdma_devices.iter().map(|text| {
            let refused = |why| ErrorKind::BadOption { option: "rdma_device", why: format!("`{text}`: {why}") };
            text.parse::<PortName>().map_err(|why| Error::new(BUILD, refused(why)))
        });
        let names = names.collect::<Result<Vec<_>>>()?;
        let needed = !names.is_empty() || self.paths == Paths::only(Path::Rdma);
        match rdma::open(names, self.rdma_windows, memory) {
            Ok(rails) => Ok(Rdma { rails, without: None }),
            Err(error) if needed => Err(error),
            Err(error) => Ok(Rdma { rails: Vec::new(), without: Some(rdma::note(&error)) }),
        }
    }
}

/// What there is of RDMA.
#[derive(Debug, Default)]
struct Rdma {
    rails: Vec<Rail>,
    without: Option<WithoutRdma>,
}

/// What a data connection to an endpoint begins with.
fn preface(token: towline_verbs::Token) -> Vec<u8> {
    Preface::new(Purpose::Data { token: token.0 }).encode().to_vec()
}

fn open_first(provider: &dyn Provider) -> towline_verbs::Result<Device> {
    let devices = provider.devices()?;
    let first = devices.first().map_or("", |device| device.name.as_str());
    provider.open(first)
}

fn verbs(error: towline_verbs::Error) -> Error {
    Error::new(BUILD, ErrorKind::Verbs(error))
}

fn socket_error(error: SocketError) -> Error {
    Error::os(BUILD, error.operation, &error.source)
}

/// The addresses behind a name; looking it up may take long.
pub(crate) fn resolve(operation: &'static str, address: &Address) -> Result<Vec<SocketAddr>> {
    let names = socket::resolve(address).map_err(|error| {
        let errno = error.source.raw_os_error().unwrap_or(0);
        let tried = error.source.to_string();
        if operation == BUILD {
            return Error::new(BUILD, ErrorKind::AddressMalformed { text: address.to_string(), why: tried });
        }
        Error::new(operation, ErrorKind::PeerUnreachable { address: address.to_string(), errno, tried })
    })?;
    let tcp = names.into_iter().map(|name| match name {
        SocketName::Tcp(address) => Ok(address),
        SocketName::Unix(name) => {
            let why = "a name in the Unix domain, where an address in the network is needed".to_owned();
            Err(Error::new(operation, ErrorKind::AddressMalformed { text: format!("{name:?}"), why }))
        }
    });
    tcp.collect()
}

fn with_port(address: Address, port: u16) -> Address {
    match address {
        Address::Ip(mut address) if address.port() == 0 => {
            address.set_port(port);
            Address::Ip(address)
        }
        Address::Host(host) if host.port() == 0 => {
            towline_control::address::Host::new(host.name(), port).map_or(Address::Host(host), Address::Host)
        }
        other => other,
    }
}

/// The machine's boot id: `/proc/sys/kernel/random/boot_id` (`random(4)`), 128 bits as a UUID.
fn boot_id() -> Result<[u8; 16]> {
    const FILE: &str = "/proc/sys/kernel/random/boot_id";
    let text = std::fs::read_to_string(FILE).map_err(|e| Error::os(BUILD, "boot_id", &e))?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    u128::from_str_radix(&digits, 16).map(u128::to_be_bytes).map_err(|_| {
        Error::new(BUILD, ErrorKind::BadOption { option: "boot_id", why: format!("{FILE} holds no UUID") })
    })
}

fn random() -> Result<[u8; 16]> {
    sys::random_16().map_err(|e| Error::os(BUILD, "getrandom", &e))
}

/// Names this process within the machine; a forked child draws its own.
fn process_id() -> Result<[u8; 16]> {
    static DRAWN: OnceLock<(u32, [u8; 16])> = OnceLock::new();
    let own = std::process::id();
    if let Some((process, id)) = DRAWN.get() {
        // After a fork the value is the parent's: an endpoint of the child gets one for itself.
        return if *process == own { Ok(*id) } else { random() };
    }
    let id = random()?;
    Ok(DRAWN.get_or_init(|| (own, id)).1)
}

fn nanoseconds(duration: Duration) -> Tick {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX / 4)
}
