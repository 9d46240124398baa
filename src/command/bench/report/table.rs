//! The rows as a table of 80 columns, with what the columns mean below it.

use super::{Clock, Row};
use crate::command::args::{Mode, Size};
use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Above this efficiency the limit was badly measured.
const TOO_GOOD: f64 = 1.05;

/// From so many pings on, their number says nothing: the time is that of the bytes.
const MANY: f64 = 100.0;

/// The rows as a table, with what its columns mean.
pub(crate) fn table(rows: &[Row]) -> String {
    let mut table = Table::new();
    table.load_style(TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─')));
    table.set_header(["size", "path", "mode", "p50", "p99", "CPU", "GB/s", "limit", "%", "pings"]);
    let last = table.column_count().saturating_sub(1);
    for (index, column) in table.column_iter_mut().enumerate() {
        // Beside the column that the style itself leaves between two.
        column.set_padding((0, u16::from(index < last)));
        if index > 2 {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    for row in rows {
        table.add_row(cells(row));
    }
    let mut text: String = table.to_string().lines().map(|line| format!("{}\n", line.trim_end())).collect();
    text.push_str(&legend(rows));
    text.push_str(&pings(rows));
    text.push_str(&warning(rows));
    for row in rows {
        text.push_str(&notes(row));
    }
    if let Some(row) = rows.first() {
        let _never_fails = writeln!(text, "Machine: {}", row.machine.line());
    }
    text
}

fn cells(row: &Row) -> [String; 10] {
    let dash = || "-".to_string();
    let limit = limit(row);
    let percent = |e: f64| format!("{:.0}{}", e * 100.0, if is_too_good(row) { "!" } else { "" });
    [
        Size(row.size_bytes).to_string(),
        row.path.clone(),
        row.mode.to_string(),
        time(row.p50_us),
        time(row.p99_us),
        time(processor_us(row)),
        if row.mode == Mode::View { "mapped".into() } else { rate(row.bytes_per_s) },
        limit.map_or_else(dash, rate),
        row.efficiency.filter(|_| limit.is_some()).map_or_else(dash, percent),
        Some(row.p50_us / row.rtt_us).filter(|&trips| trips < MANY).map_or_else(dash, short),
    ]
}

/// The limit, where it says something: where the bytes alone would take less than a ping, they are not what takes the
/// time.
fn limit(row: &Row) -> Option<f64> {
    row.limit_bytes_per_s.filter(|limit| row.size_bytes as f64 / limit * 1e6 >= row.rtt_us)
}

/// Processor time of one operation.
fn processor_us(row: &Row) -> f64 {
    row.cpu_s_per_gb * row.size_bytes as f64 * f64::from(row.consumers) / 1e3
}

fn legend(rows: &[Row]) -> String {
    let (mut text, Some(first)) = (String::new(), rows.first()) else { return String::new() };
    let mut entry = |name: &str, lines: &[&str]| {
        for (index, line) in lines.iter().enumerate() {
            let name = if index == 0 { name } else { "" };
            let _never_fails = writeln!(text, "{name:<9} {line}");
        }
    };
    let several = first.consumers > 1;
    entry(
        "p50, p99",
        match (first.clock, several) {
            (Clock::One, false) => &[
                "half of all operations, and 99 %, take no longer: from the call of the",
                "producer's put to the return of the consumer's get",
            ],
            (Clock::One, true) => &[
                "half of all operations, and 99 %, take no longer: from the call of the",
                "producer's put to the return of the last consumer's get",
            ],
            (Clock::Consumer, false) => &[
                "half of all operations, and 99 %, take no longer: from the consumer's",
                "request to the return of its get (two machines have two clocks)",
            ],
            (Clock::Consumer, true) => &[
                "half of all operations, and 99 %, take no longer: from a consumer's",
                "request to the return of its get, that of the slowest",
            ],
        },
    );
    entry("CPU", &["user and system time of all processes of the bench for one operation"]);
    let flight;
    let rated = match (first.concurrency, several) {
        (1, false) => "10^9 bytes a second, by p50",
        (1, true) => "10^9 bytes a second that all consumers get, by p50",
        (concurrency, _) => {
            flight = format!("10^9 bytes a second over all the time, {concurrency} operations in flight");
            &flight
        }
    };
    let views = rows.iter().any(|row| row.mode == Mode::View);
    match views {
        true => entry("GB/s", &[rated, "mapped: a view of the producer's memory, nothing is copied"]),
        false => entry("GB/s", &[rated]),
    }
    entry(
        "limit, %",
        &["GB/s of a plain copy or bare socket moving as much in the same run,", "and the share of it reached"],
    );
    if rows.iter().any(|row| limit(row).is_none()) {
        entry(
            "",
            &[
                "-: none for views, for the serialized way (the naive one), and for",
                "payloads so small that a ping takes longer than their bytes",
            ],
        );
    }
    entry(
        "pings",
        &[
            "p50 in pings: 64 bytes there and back over a bare socket. A get that",
            "waits already needs one way only: half a ping, or a little less",
        ],
    );
    let unverified = rows.iter().any(|row| !row.verified);
    text.push_str(match unverified {
        true => "Nothing was checked: --verify none.\n",
        false => "Every payload arrived as it was put: verified outside of the time measured.\n",
    });
    text
}

/// How long a ping took, by path.
fn pings(rows: &[Row]) -> String {
    let mut by_path: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for row in rows {
        by_path.entry(&row.path).or_default().push(row.rtt_us);
    }
    let range = |times: &[f64]| {
        let (least, most) = times.iter().fold((f64::MAX, 0.0f64), |(a, b), time| (a.min(*time), b.max(*time)));
        if time(least) == time(most) { time(least) } else { format!("{} to {}", time(least), time(most)) }
    };
    let parts: Vec<String> = by_path.iter().map(|(path, times)| format!("{path} {}", range(times))).collect();
    let spinning: Vec<f64> = rows.iter().filter_map(|row| row.spin_rtt_us).collect();
    let mut text = format!("A ping took: {}.\n", parts.join(", "));
    if !spinning.is_empty() {
        let _never_fails = writeln!(text, "Two processes that spin on shared memory (--spin): {}.", range(&spinning));
    }
    text
}

/// Whether limits were badly measured, why that is, and what to do.
fn warning(rows: &[Row]) -> String {
    let Some(row) = rows.iter().find(|row| is_too_good(row)) else { return String::new() };
    let size = Size(row.size_bytes).to_string().replace(' ', "");
    format!(
        "warning: where % has a !, the limit was badly measured, too low: usually\n  something else ran meanwhile. \
         Run it again on an idle machine, or one row:\n  towline bench --path {} --mode {} --size {size}\n",
        row.path, row.mode
    )
}

fn is_too_good(row: &Row) -> bool {
    limit(row).is_some() && row.efficiency.is_some_and(|efficiency| efficiency > TOO_GOOD)
}

/// What the line of the table has no room for.
fn notes(row: &Row) -> String {
    let name = format!("{} {} {}", Size(row.size_bytes), row.path, row.mode);
    let mut text = String::new();
    let mut note = |line: String| text.push_str(&format!("{name}: {line}\n"));
    if let (Some(touch), Some(own)) = (row.touch_us, row.touch_own_us) {
        note(format!("reading a byte a page takes {}; of own memory {}", time(touch), time(own)));
    }
    if row.fallback_bytes > 0 {
        note(format!("{} bytes did not go by the first choice: {}", row.fallback_bytes, row.path_reason));
    }
    if row.retries > 0 {
        note(format!("{} retries: connections or reads failed and were made again", row.retries));
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
        x => format!("{x:.3}"),
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
mod tests {
    use super::super::tests::row;
    use super::*;

    fn view() -> Row {
        Row {
            mode: Mode::View,
            path: "shm".into(),
            limit_bytes_per_s: None,
            limit_variant: None,
            efficiency: None,
            limit_cpu_s_per_gb: None,
            touch_us: Some(1200.0),
            touch_own_us: Some(1100.0),
            ..row()
        }
    }

    #[test]
    fn the_table_says_what_a_person_wants_to_know() {
        let text = table(&[row()]);
        for part in ["190 MiB", "tcp", "zero-copy", "3.98", "4.20", "95", "50.0 ms", "81.7 ms", "verified"] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        assert!(text.contains("producer's put") && text.contains("A ping took: tcp 20.0 us."), "{text}");
        assert!(!text.contains("warning") && !text.contains("view") && !text.contains("-:"), "{text}");
    }

    #[test]
    fn nothing_but_the_machine_is_wider_than_80_columns() {
        let long = [
            Row { mode: Mode::Serialized, size_bytes: 190 << 20, efficiency: Some(1.89), ..row() },
            Row { size_bytes: 1 << 30, p50_us: 123_456.0, p99_us: 99_999_999.0, bytes_per_s: 9.99e9, ..view() },
            Row { efficiency: Some(1.2), concurrency: 256, consumers: 64, spin_rtt_us: Some(0.123), ..row() },
        ];
        let clocks = [Clock::One, Clock::Consumer];
        for row in &long {
            for clock in clocks {
                let text = table(&[Row { clock, ..row.clone() }, view()]);
                for line in text.lines().filter(|line| !line.starts_with("Machine: ")) {
                    assert!(line.chars().count() <= 80, "{} columns: {line}", line.chars().count());
                }
            }
        }
    }

    #[test]
    fn small_payloads_are_rated_in_pings() {
        let small = Row { size_bytes: 4096, p50_us: 25.0, rtt_us: 20.0, efficiency: Some(0.039), ..row() };
        let text = table(&[small]);
        assert!(text.contains(" 1.25\n") && !text.contains(" 4 "), "{text}");
        assert!(text.contains("a ping takes longer"), "{text}");
        assert!(!table(&[row()]).contains("2500"), "not large ones");
    }

    #[test]
    fn an_impossible_efficiency_is_told_with_what_to_do() {
        let odd = Row { efficiency: Some(1.2), ..row() };
        let text = table(&[odd]);
        assert!(text.contains(" 120!") && text.contains("warning: ") && text.contains("badly measured"), "{text}");
        let two = table(&[row(), Row { efficiency: Some(1.3), ..row() }, Row { efficiency: Some(1.2), ..row() }]);
        assert_eq!(two.matches("badly measured").count(), 1, "said once: {two}");
        assert!(text.contains("towline bench --path tcp --mode zero-copy --size 190MiB"), "{text}");
    }

    #[test]
    fn a_view_has_no_rate() {
        let text = table(&[view()]);
        assert!(text.contains("mapped") && !text.contains("3.98"), "{text}");
        assert!(text.contains("1.20 ms") && text.contains("1.10 ms"), "{text}");
    }

    #[test]
    fn captions_are_those_of_the_run() {
        let two = table(&[Row { clock: Clock::Consumer, ..row() }]);
        assert!(two.contains("consumer's\n") && two.contains("two clocks") && !two.contains("producer's put"), "{two}");
        let several = table(&[Row { consumers: 3, ..row() }]);
        assert!(several.contains("last consumer's get") && several.contains("all consumers get"), "{several}");
        assert!(several.contains("245 ms"), "processor time of an operation with three gets: {several}");
        let flight = table(&[Row { concurrency: 4, ..row() }]);
        assert!(flight.contains("4 operations in flight"), "{flight}");
        let spin = table(&[Row { spin_rtt_us: Some(0.25), ..row() }]);
        assert!(spin.contains("spin on shared memory (--spin): 0.25 us"), "{spin}");
        let none = table(&[Row { verified: false, ..row() }]);
        assert!(none.contains("Nothing was checked") && !none.contains("verified outside"), "{none}");
    }

    #[test]
    fn times_and_rates_have_three_digits() {
        assert_eq!(time(0.5), "0.50 us");
        assert_eq!(time(12.34), "12.3 us");
        assert_eq!(time(1234.0), "1.23 ms");
        assert_eq!(time(2.5e6), "2.50 s");
        assert_eq!(rate(9.99e9), "9.99");
        assert_eq!(rate(41e6), "0.041");
    }
}
