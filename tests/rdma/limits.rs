//! Limits of the system: locked memory.

use crate::bed::*;
use crate::common::*;
use std::process::Command;
use towline::{ErrorKind, PutOptions};
use towline_verbs::Cause;

/// Runs the test called `name` again as a user who may lock `kib` KiB of memory; `true` in that process.
fn with_little_locked_memory(name: &str, kib: u64) -> bool {
    const LITTLE: &str = "TOWLINE_TEST_MEMLOCK";
    if std::env::var_os(LITTLE).is_some() {
        return true;
    }
    let nobody = ["--reuid", "65534", "--regid", "65534", "--clear-groups", "--inh-caps", "-all"];
    let script = format!("ulimit -l {kib} && exec \"$0\" \"$@\"");
    let output = Command::new("setpriv")
        .args(nobody)
        .args(["bash", "-c", &script])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", name, "--include-ignored", "--nocapture", "--test-threads=1"])
        .env(LITTLE, "yes")
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success() && out.contains("1 passed"), "{}\n{out}\n{err}", output.status);
    false
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_limit_of_locked_memory_is_named_with_its_numbers() {
    // B1, B2: what is allowed, what is needed.
    const KIB_ALLOWED: u64 = 4096;
    if !with_little_locked_memory("limits::a_limit_of_locked_memory_is_named_with_its_numbers", KIB_ALLOWED) {
        return;
    }
    let error = on(0).pool(16 * MIB).build().unwrap_err();
    match error.kind() {
        ErrorKind::Verbs(error) => {
            let limit = Cause::Limit { what: "memlock (ulimit -l)", have: KIB_ALLOWED * KIB, need: 16 * MIB };
            assert_eq!(error.cause, limit);
        }
        _ => panic!("{error}"),
    }
    assert!(error.to_string().contains("`ulimit -l`"), "{error}");
    assert_tells(&error, "build");
    // What fits is registered.
    let there = on(1).pool(MIB).build().unwrap();
    let ticket = Spec::bytes(100 * KIB, 1).put(&there, "key", &for_consumers(2)).unwrap();
    Spec::bytes(100 * KIB, 1).check(&on(0).pool(MIB).build().unwrap().get(&ticket, LONG).unwrap());
    // Where other paths are allowed one of them is used; that is told, and counted.
    let there = Options::default().paths("rdma,tcp").pool(MIB).build().unwrap();
    let here = Options::default().paths("rdma,tcp").pool(16 * MIB).build().unwrap();
    let ticket = Spec::bytes(100 * KIB, 1).put(&there, "key", &PutOptions::default()).unwrap();
    let payload = here.get(&ticket, LONG).unwrap();
    let info = payload.info();
    assert_eq!((info.path.name(), info.fallback_bytes), ("tcp", 100 * KIB), "{info:?}");
    assert!(info.path_reason.contains("memlock"), "{info:?}");
}
