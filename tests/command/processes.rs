//! The bench's processes: none outlives the others.

use crate::*;
use std::io::Read;

#[test]
fn the_second_process_dies_with_the_first() {
    let mut bench = Process::start("bench --path tcp --mode zero-copy --size 4KiB --count 1000000 --warmup 0");
    let worker = bench.wait_for_child();
    bench.0.kill().unwrap();
    bench.0.wait().unwrap();
    let begin = Instant::now();
    while is_running(worker) {
        assert!(begin.elapsed() < Duration::from_secs(20), "the worker outlives its bench");
        std::thread::yield_now();
    }
}

#[test]
fn a_killed_consumer_is_a_failure_that_is_told() {
    let mut bench = Process::start("bench --path tcp --mode zero-copy --size 4KiB --count 1000000 --warmup 0");
    let worker = bench.wait_for_child();
    let killed = Command::new("kill").args(["-KILL", &worker.to_string()]).status().unwrap();
    assert!(killed.success());
    let mut errors = String::new();
    bench.0.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
    assert_eq!(bench.end(), Some(1), "{errors}");
    assert!(errors.contains("consumer 0"), "{errors}");
}
