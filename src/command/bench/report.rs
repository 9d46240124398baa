//! The result of a row: one JSON object, and one line of a table that a person reads.

use super::stats::Sorted;
use crate::command::args::{Mode, Size};
use crate::command::machine::Machine;
use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};
use serde::{Deserialize, Serialize};

/// Above this efficiency the limit was badly measured.
const TOO_GOOD: f64 = 1.05;

/// From so many round trips on, their number says nothing: the time is that of the bytes.
const MANY: f64 = 100.0;

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

/// The rows as a table, with what its columns mean.
pub(crate) fn table(rows: &[Row]) -> String {
    let mut table = Table::new();
    table.load_style(TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─')));
    let head =
        ["size", "path", "mode", "p50", "p99", "GB/s", "limit", "% of limit", "round trips", "CPU s/GB", "verified"];
    table.set_header(head);
    for column in table.column_iter_mut().skip(3) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    for row in rows {
        table.add_row(cells(row));
    }
    let mut text = format!("{table}\n{}", legend(rows));
    for row in rows {
        text.push_str(&notes(row));
    }
    if let Some(row) = rows.first() {
        text.push_str(&format!("Machine: {}\n", row.machine.line()));
    }
    text
}

fn cells(row: &Row) -> [String; 11] {
    let dash = || "-".to_string();
    let in_place = row.mode == Mode::View;
    // Where the bytes alone would take less than a round trip, they are not what takes the time.
    let limit = row.limit_bytes_per_s.filter(|limit| row.size_bytes as f64 / limit * 1e6 >= row.rtt_us);
    let percent = |e: f64| format!("{:.0} %{}", e * 100.0, if e > TOO_GOOD { " (!)" } else { "" });
    [
        Size(row.size_bytes).to_string(),
        row.path.clone(),
        row.mode.to_string(),
        time(row.p50_us),
        time(row.p99_us),
        if in_place { "in place".into() } else { rate(row.bytes_per_s) },
        limit.map_or_else(dash, rate),
        row.efficiency.filter(|_| limit.is_some()).map_or_else(dash, percent),
        Some(row.p50_us / row.rtt_us).filter(|&trips| trips < MANY).map_or_else(dash, short),
        if in_place { dash() } else { processor(row) },
        if row.verified { "yes".into() } else { "no".into() },
    ]
}

fn processor(row: &Row) -> String {
    match row.limit_cpu_s_per_gb {
        Some(limit) => format!("{} ({})", short(row.cpu_s_per_gb), short(limit)),
        None => short(row.cpu_s_per_gb),
    }
}

fn legend(rows: &[Row]) -> String {
    let mut text = String::from(
        "One operation lasts from the producer's put to the return of the consumer's get (p50: half were faster).\n\
         limit: GB/s of the plainest copy or socket that moves as much, in the same run; % of limit: GB/s beside it.\n\
         round trips: p50 in bare 64-byte ping-pongs over the same kind of socket, where that is what takes the time.\n\
         CPU s/GB: user and system time of both processes, and the limit's.\n",
    );
    if rows.iter().any(|row| row.clock == Clock::Consumer) {
        text.push_str(
            "Between two machines an operation lasts from the consumer's request to the return of its get.\n",
        );
    }
    if rows.iter().any(|row| row.mode == Mode::View) {
        text.push_str(
            "in place: a view is a mapping of the producer's memory; nothing was copied, whatever the size.\n",
        );
    }
    text
}

/// What the line of the table has no room for.
fn notes(row: &Row) -> String {
    let name = format!("{} {} {}", Size(row.size_bytes), row.path, row.mode);
    let mut text = String::new();
    let mut note = |line: String| text.push_str(&format!("{name}: {line}\n"));
    if let Some(efficiency) = row.efficiency.filter(|&e| e > TOO_GOOD) {
        note(format!("warning: {efficiency:.2} of the limit; more than {TOO_GOOD} means that it was badly measured"));
    }
    if let (Some(touch), Some(own)) = (row.touch_us, row.touch_own_us) {
        note(format!("reading each page once takes {}, of the consumer's own memory {}", time(touch), time(own)));
    }
    if row.fallback_bytes > 0 {
        note(format!("warning: {} bytes went another way than asked", row.fallback_bytes));
    }
    if row.retries > 0 {
        note(format!("{} retries", row.retries));
    }
    text
}

/// A number with three digits that count.
fn short(x: f64) -> String {
    match x {
        x if x >= 100.0 => format!("{x:.0}"),
        x if x >= 10.0 => format!("{x:.1}"),
        x => format!("{x:.2}"),
    }
}

fn rate(bytes_per_s: f64) -> String {
    match bytes_per_s / 1e9 {
        x if x >= 0.1 => short(x),
        x => format!("{x:.4}"),
    }
}

fn time(us: f64) -> String {
    match us {
        us if us >= 1e6 => format!("{} s", short(us / 1e6)),
        us if us >= 1e3 => format!("{} ms", short(us / 1e3)),
        us => format!("{} us", short(us)),
    }
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
    fn the_table_says_what_a_person_wants_to_know() {
        let text = table(&[row()]);
        for part in ["190 MiB", "tcp", "zero-copy", "3.98", "4.20", "95 %", "50.0 ms", "0.41 (0.38)", "yes"] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        assert!(text.contains("limit:") && !text.contains("warning"), "{text}");
    }

    #[test]
    fn small_payloads_are_rated_in_round_trips() {
        let small = Row { size_bytes: 4096, p50_us: 25.0, rtt_us: 20.0, efficiency: Some(0.039), ..row() };
        let text = table(&[small]);
        assert!(text.contains(" 1.25 ") && !text.contains("4 %"), "{text}");
        assert!(!table(&[row()]).contains("2500"), "not large ones");
    }

    #[test]
    fn an_impossible_efficiency_is_told() {
        let odd = Row { efficiency: Some(1.2), ..row() };
        let text = table(&[odd]);
        assert!(text.contains("(!)") && text.contains("warning: 1.20 of the limit"), "{text}");
    }

    #[test]
    fn a_view_has_no_rate() {
        let view = Row {
            mode: Mode::View,
            path: "shm".into(),
            limit_bytes_per_s: None,
            limit_variant: None,
            efficiency: None,
            limit_cpu_s_per_gb: None,
            touch_us: Some(1200.0),
            touch_own_us: Some(1100.0),
            ..row()
        };
        let text = table(&[view]);
        assert!(text.contains("in place") && !text.contains("3.98"), "{text}");
        assert!(text.contains("1.20 ms") && text.contains("1.10 ms"), "{text}");
    }

    #[test]
    fn percentiles_are_in_microseconds() {
        assert_eq!(percentiles(&[]), None);
        assert_eq!(percentiles(&[1500]), Some([1.5; 4]));
        let times: Vec<u64> = (1..=100).map(|i| i * 1000).collect();
        assert_eq!(percentiles(&times), Some([50.0, 90.0, 99.0, 100.0]));
    }

    #[test]
    fn times_and_rates_have_three_digits() {
        assert_eq!((time(0.5), time(12.34), time(1234.0), time(2.5e6)).0, "0.50 us");
        assert_eq!(time(12.34), "12.3 us");
        assert_eq!(time(1234.0), "1.23 ms");
        assert_eq!(time(2.5e6), "2.50 s");
        assert_eq!(rate(9.99e9), "9.99");
        assert_eq!(rate(41e6), "0.0410");
    }
}
