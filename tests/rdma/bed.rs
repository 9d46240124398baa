//! The devices, two ends on them, and what the system says of what is open.

use crate::common::*;
use std::process::Command;
use towline::Endpoint;

/// Two devices whose ports reach each other, from an environment variable or these.
fn pair(variable: &str, default: &str) -> [String; 2] {
    let names = std::env::var(variable).unwrap_or_else(|_| default.into());
    let (first, second) = names.split_once(',').unwrap();
    [first.into(), second.into()]
}

pub(crate) fn devices() -> [String; 2] {
    pair("TOWLINE_DEVICES", "rxe0,rxe1")
}

/// Two more, of another network.
pub(crate) fn second_rail() -> [String; 2] {
    pair("TOWLINE_RAILS", "rxe2,rxe3")
}

/// Options of an endpoint on one side that may use nothing but RDMA; what goes from side 0 to side 1 goes over the wire.
pub(crate) fn on(side: usize) -> Options {
    Options::default().paths("rdma").device(&devices()[side])
}

/// The same, and TCP besides.
pub(crate) fn or_tcp(side: usize) -> Options {
    on(side).paths("rdma,tcp")
}

/// A consumer of this process on one device, and a producer in another on the other.
pub(crate) struct Ends {
    pub(crate) here: Endpoint,
    pub(crate) there: Process,
}

impl Ends {
    #[track_caller]
    pub(crate) fn new(pool: u64) -> Self {
        Self { there: Process::start(&on(1).pool(pool)), here: on(0).pool(pool).build().unwrap() }
    }

    /// Puts there, gets here, checks the content and the way.
    #[track_caller]
    pub(crate) fn carry(&self, key: &str, spec: &Spec) {
        let ticket = self.there.put(key, spec).unwrap();
        let payload = self.here.get(&ticket, LONG).unwrap();
        spec.check(&payload);
        let info = payload.info();
        assert_eq!((info.path.name(), info.bytes, info.fallback_bytes), ("rdma", spec.len(), 0), "{info:?}");
    }

    /// Puts here, gets there, checks likewise.
    #[track_caller]
    pub(crate) fn carry_back(&self, key: &str, spec: &Spec) {
        let ticket = spec.put(&self.here, key, &Default::default()).unwrap();
        let got = self.there.get(&ticket, LONG).unwrap();
        spec.check_got(&got);
        assert_eq!((got.path.as_str(), got.fallback_bytes), ("rdma", 0), "{got:?}");
    }

    #[track_caller]
    pub(crate) fn assert_whole(&self) {
        assert_whole(&self.here);
        self.there.assert_whole();
    }
}

/// Runs a command, which must succeed; what it says.
#[track_caller]
pub(crate) fn run(line: &str) -> String {
    let words: Vec<_> = line.split(' ').collect();
    let output = Command::new(words[0]).args(&words[1..]).output().unwrap();
    assert!(output.status.success(), "{line}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The network interface of a device.
pub(crate) fn interface(device: &str) -> String {
    let parent = std::fs::read_to_string(format!("/sys/class/infiniband/{device}/parent")).unwrap();
    parent.trim().to_owned()
}

/// Makes the weather fine again, in whatever way a test ends.
pub(crate) struct Weather {
    interfaces: Vec<String>,
    end: &'static str,
}

impl Weather {
    /// Runs `begin` for the interface of each of `devices`, in place of `DEV`, and `end` when the weather ends.
    #[track_caller]
    pub(crate) fn begin(devices: &[String], begin: &str, end: &'static str) -> Self {
        let interfaces: Vec<_> = devices.iter().map(|device| interface(device)).collect();
        for interface in &interfaces {
            run(&begin.replace("DEV", interface));
        }
        Self { interfaces, end }
    }

    /// What leaves these devices is lost now and then, or late.
    #[track_caller]
    pub(crate) fn netem(devices: &[String], how: &str) -> Self {
        let begin = format!("tc qdisc add dev DEV root netem {how} limit 100000");
        Self::begin(devices, &begin, "tc qdisc del dev DEV root")
    }

    /// The links of these devices are down.
    #[track_caller]
    pub(crate) fn down(devices: &[String]) -> Self {
        Self::begin(devices, "ip link set DEV down", "ip link set DEV up")
    }
}

impl Drop for Weather {
    fn drop(&mut self) {
        for interface in &self.interfaces {
            run(&self.end.replace("DEV", interface));
        }
    }
}

/// How many objects of a kind (`qp`, `mr`, `cq`, `pd`) all processes have on a device.
#[track_caller]
pub(crate) fn objects(device: &str, kind: &str) -> u64 {
    let line = run(&format!("rdma resource show {device}"));
    let mut words = line.split_whitespace();
    words.find(|word| *word == kind).unwrap_or_else(|| panic!("no {kind} in {line}"));
    words.next().unwrap().parse().unwrap()
}

/// Descriptors that this process has open.
pub(crate) fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}
