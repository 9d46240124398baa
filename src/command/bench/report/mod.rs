//! The result of a row: one JSON object, and one line of a table that a person reads.

mod table;

pub(crate) use table::table;

use super::stats::Sorted;
use crate::command::args::Mode;
use crate::command::machine::Machine;
use serde::{Deserialize, Serialize};

/// Which clock the operations were timed by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Clock {
    /// One clock for both ends: from the call of `put` to the return of `get`.
    One,
    /// The consumer's: from its request to the return of `get`.
    Consumer,
}

/// What one row found. The names of the fields are those of the JSON.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(crate) mode: Mode,
    pub(crate) path: String,
    pub(crate) path_reason: String,
    pub(crate) size_bytes: u64,
    pub(crate) count: u64,
    pub(crate) concurrency: u32,
    pub(crate) consumers: u32,
    pub(crate) seed: u64,
    pub(crate) clock: Clock,
    pub(crate) p50_us: f64,
    pub(crate) p90_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) max_us: f64,
    pub(crate) put_us: f64,
    pub(crate) get_us: f64,
    pub(crate) bytes_per_s: f64,
    pub(crate) limit_bytes_per_s: Option<f64>,
    pub(crate) limit_variant: Option<String>,
    pub(crate) efficiency: Option<f64>,
    pub(crate) rtt_us: f64,
    pub(crate) spin_rtt_us: Option<f64>,
    pub(crate) touch_us: Option<f64>,
    pub(crate) touch_own_us: Option<f64>,
    pub(crate) cpu_s_per_gb: f64,
    pub(crate) limit_cpu_s_per_gb: Option<f64>,
    pub(crate) fallback_bytes: u64,
    pub(crate) retries: u64,
    pub(crate) rails: u32,
    pub(crate) verified: bool,
    pub(crate) machine: Machine,
}

/// Rounds to thousandths: a nanosecond of a figure in microseconds.
pub(crate) fn thousandths(x: f64) -> f64 {
    (x * 1e3).round() / 1e3
}

/// The four percentiles of the times of operations, given in nanoseconds, in microseconds.
pub(crate) fn percentiles(times: &[u64]) -> Option<[f64; 4]> {
    let sorted = Sorted::new(times.iter().map(|&ns| ns as f64 / 1e3));
    let at = |share| sorted.percentile(share).map(thousandths);
    Some([at(0.5)?, at(0.9)?, at(0.99)?, sorted.max().map(thousandths)?])
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn row() -> Row {
        Row {
            mode: Mode::ZeroCopy,
            path: "tcp".into(),
            path_reason: "asked for".into(),
            size_bytes: 190 << 20,
            count: 12,
            concurrency: 1,
            consumers: 1,
            seed: 1,
            clock: Clock::One,
            p50_us: 50_000.0,
            p90_us: 51_000.0,
            p99_us: 52_000.0,
            max_us: 53_000.0,
            put_us: 20.0,
            get_us: 50_000.0,
            bytes_per_s: 3.98e9,
            limit_bytes_per_s: Some(4.2e9),
            limit_variant: Some("reno".into()),
            efficiency: Some(0.948),
            rtt_us: 20.0,
            spin_rtt_us: None,
            touch_us: None,
            touch_own_us: None,
            cpu_s_per_gb: 0.41,
            limit_cpu_s_per_gb: Some(0.38),
            fallback_bytes: 0,
            retries: 0,
            rails: 1,
            verified: true,
            machine: Machine::here(vec!["shm".into(), "tcp".into()]),
        }
    }

    #[test]
    fn json_has_exactly_the_keys_of_the_contract() {
        let value = serde_json::to_value(row()).unwrap();
        let mut keys: Vec<_> = value.as_object().unwrap().keys().map(String::as_str).collect();
        keys.sort_unstable();
        let mut contract: Vec<_> =
            "mode path path_reason size_bytes count concurrency consumers seed clock p50_us p90_us \
            p99_us max_us put_us get_us bytes_per_s limit_bytes_per_s limit_variant efficiency rtt_us spin_rtt_us \
            touch_us touch_own_us cpu_s_per_gb limit_cpu_s_per_gb fallback_bytes retries rails verified machine"
                .split_whitespace()
                .collect();
        contract.sort_unstable();
        assert_eq!(keys, contract);
        assert_eq!(value["mode"], "zero-copy");
        assert_eq!(value["clock"], "one");
        assert!(value["spin_rtt_us"].is_null(), "what wasn't measured is null, not missing");
        for (key, value) in value.as_object().unwrap() {
            assert_eq!(value.is_object(), key == "machine", "{key}: flat but for machine");
        }
        let line = serde_json::to_string(&row()).unwrap();
        assert!(!line.contains('\n'));
        assert_eq!(serde_json::from_str::<Row>(&line).unwrap(), row());
    }

    #[test]
    fn percentiles_are_in_microseconds() {
        assert_eq!(percentiles(&[]), None);
        assert_eq!(percentiles(&[1500]), Some([1.5; 4]));
        let times: Vec<u64> = (1..=100).map(|i| i * 1000).collect();
        assert_eq!(percentiles(&times), Some([50.0, 90.0, 99.0, 100.0]));
    }
}
