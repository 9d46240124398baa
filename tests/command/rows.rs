//! What the bench measures and writes.

use crate::*;

#[test]
fn each_mode_over_tcp_arrives_verified_with_its_limit() {
    let rows = rows("--path tcp --size 200KiB --size 4097 --count 20 --verify full");
    let modes: Vec<_> = rows.iter().map(|row| row["mode"].as_str().unwrap()).collect();
    let all = ["zero-copy", "copy", "tree", "serialized"];
    assert_eq!(modes, [all, all].concat());
    for row in rows {
        assert_eq!((&row["path"], &row["verified"], &row["clock"]), (&"tcp".into(), &true.into(), &"one".into()));
        assert_eq!((&row["count"], &row["fallback_bytes"], &row["retries"]), (&20.into(), &0.into(), &0.into()));
        let limited = row["mode"] != "serialized";
        for key in ["limit_bytes_per_s", "limit_variant", "efficiency", "limit_cpu_s_per_gb"] {
            assert_eq!(row[key].is_null(), !limited, "{key} of {}", row["mode"]);
        }
        let (size, p50) = (row["size_bytes"].as_f64().unwrap(), row["p50_us"].as_f64().unwrap());
        let rate = row["bytes_per_s"].as_f64().unwrap();
        assert!((rate - size / p50 * 1e6).abs() < 2.0, "the rate is size over p50: {rate}, {p50}");
    }
}

#[test]
fn each_mode_over_shared_memory_arrives_verified() {
    let rows = rows("--path shm --size 200KiB --size 4097 --count 20 --verify full");
    let modes: Vec<_> = rows.iter().map(|row| row["mode"].as_str().unwrap()).collect();
    let all = ["view", "zero-copy", "copy", "tree", "serialized"];
    assert_eq!(modes, [all, all].concat());
    for row in rows {
        assert_eq!((&row["path"], &row["verified"], &row["count"]), (&"shm".into(), &true.into(), &20.into()));
        let in_place = row["mode"] == "view";
        assert_eq!((row["touch_us"].is_null(), row["touch_own_us"].is_null()), (!in_place, !in_place));
        assert_eq!(row["limit_variant"].is_null(), in_place || row["mode"] == "serialized", "{}", row["mode"]);
    }
}

#[test]
fn the_best_path_of_one_host_is_shared_memory() {
    for row in rows("--path auto --mode view --mode zero-copy --size 64KiB --count 3") {
        assert_eq!((&row["path"], &row["verified"]), (&"shm".into(), &true.into()));
        assert!(!row["path_reason"].as_str().unwrap().is_empty());
    }
}

#[test]
fn several_consumers_and_several_in_flight() {
    let rows = rows(
        "--path shm --mode view --mode zero-copy --mode copy --size 64KiB --count 24 --consumers 2 --concurrency 3",
    );
    assert_eq!(rows.len(), 3);
    for row in rows {
        assert_eq!((&row["consumers"], &row["concurrency"], &row["count"]), (&2.into(), &3.into(), &24.into()));
        assert_eq!(row["verified"], true);
    }
}

#[test]
fn spinning_is_measured_when_asked_for_and_verifying_left_out() {
    let rows = rows("--path tcp --mode zero-copy --size 4KiB --count 5 --spin --verify none --seed 77");
    assert!(rows[0]["spin_rtt_us"].as_f64().unwrap() > 0.0);
    assert_eq!((&rows[0]["verified"], &rows[0]["seed"]), (&false.into(), &77.into()));
}

#[test]
fn a_pipe_gets_a_table_and_no_progress_bar() {
    let output = run("bench --path tcp --mode zero-copy --size 4KiB --count 5");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    assert!(table.contains("GB/s") && table.contains("zero-copy") && table.contains("4 KiB"), "{table}");
    assert!(table.contains("limit, %") && table.contains("Machine:"), "{table}");
    let wide = table.lines().find(|line| !line.starts_with("Machine:") && line.chars().count() > 80);
    assert_eq!(wide, None, "80 columns");
    assert!(!table.contains('\u{1b}') && !table.contains('\r'), "no escapes in a pipe");
    assert_eq!(text(&output.stderr), "", "no progress bar in a pipe");
}

#[test]
fn json_goes_to_a_file_beside_the_table() {
    let file = std::env::temp_dir().join(format!("towline-rows-{}.json", std::process::id()));
    let output = run(&format!("bench --path tcp --mode copy --size 4KiB --count 3 --json {}", file.display()));
    let rows = std::fs::read_to_string(&file).expect("the file is there");
    std::fs::remove_file(&file).expect("it can be removed");
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(rows.lines().count(), 1);
    assert_eq!(serde_json::from_str::<Value>(&rows).unwrap()["mode"], "copy");
    assert!(text(&output.stdout).contains("GB/s"));
}

#[test]
fn a_wrong_byte_is_found_and_told_with_code_1() {
    for (path, mode) in [
        ("shm", "view"),
        ("shm", "zero-copy"),
        ("tcp", "zero-copy"),
        ("tcp", "copy"),
        ("shm", "tree"),
        ("tcp", "serialized"),
    ] {
        let line = format!("bench --json - --path {path} --mode {mode} --size 100KiB --count 3 --verify full");
        let output = command(&line).env("TOWLINE_BENCH_CORRUPT", "70001").output().unwrap();
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{mode}: {errors}");
        for word in ["part ", "offset ", "expected 0x", "found 0x"] {
            assert!(errors.contains(word), "{mode}: {word} in {errors}");
        }
        assert_eq!(text(&output.stdout), "", "{mode}: no row for what arrived wrong");
    }
    let line = "bench --path tcp --mode zero-copy --size 100KiB --count 3 --verify full";
    let output = command(line).env("TOWLINE_BENCH_CORRUPT", "70001").output().unwrap();
    assert!(text(&output.stderr).contains("offset 70001"), "{}", text(&output.stderr));
}
