//! What is there, and the limits of what can be made of it.

use crate::harness::*;
use towline_verbs::ibv::IbvProvider;
use towline_verbs::memory::HugePages;
use towline_verbs::{Access, Cause, Memory, MemoryKind, Provider, ProviderKind, QueuePairCapacity, QueuePairState};

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn devices_are_described_and_opened_by_name() {
    let provider = IbvProvider::new().unwrap();
    assert_eq!(provider.kind(), ProviderKind::Ibv);
    let found = provider.devices().unwrap();
    for name in names() {
        let info = found.iter().find(|info| info.name == name).unwrap();
        let can = &info.capabilities;
        assert!(can.max_message_size >= 1 << 23 && can.max_send_wr >= 64 && can.max_cqe >= 128, "{info:?}");
        assert!(can.preferred_chunk <= can.max_message_size && (1..=16).contains(&can.max_sge), "{info:?}");
        assert!(can.scoped_keys && !can.mappable && !can.reads_by_cpu, "{info:?}");
        assert!(info.description.starts_with("RoCE, port 1, MTU "), "{}", info.description);
        let device = provider.open(&name).unwrap();
        assert_eq!(device.info(), info);
        assert!(device.supports(MemoryKind::Host) && !device.supports(MemoryKind::Device));
    }
    let missing = provider.open("mlx5_99").unwrap_err();
    assert_eq!(missing.cause, Cause::NotFound { what: "RDMA device" });
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn limits_are_named_with_what_there_is_and_what_was_needed() {
    let device = IbvProvider::new().unwrap().open(&names()[0]).unwrap();
    let can = device.info().capabilities;
    let deep = device.create_cq(can.max_cqe + 1).unwrap_err().cause;
    assert_eq!(deep, Cause::Limit { what: "max_cqe", have: can.max_cqe.into(), need: u64::from(can.max_cqe) + 1 });
    let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(100).unwrap());
    let create = |max_send_wr, max_recv_wr| pd.create_qp(&cq, &cq, QueuePairCapacity { max_send_wr, max_recv_wr });
    // B85: a completion queue that could overflow.
    let first = create(60, 30).unwrap();
    let second = create(10, 1).unwrap_err().cause;
    assert_eq!(second, Cause::Limit { what: "completion queue depth", have: 100, need: 101 });
    drop(first);
    create(99, 1).unwrap();
    let many = create(can.max_send_wr + 1, 1).unwrap_err().cause;
    assert!(matches!(many, Cause::Limit { what: "max_send_wr", .. }), "{many:?}");
}

// B1, B4: the limit of the process, named.
#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn the_limit_of_locked_memory_is_named() {
    // In a child without the right to ignore the limit.
    let exe = std::env::current_exe().unwrap();
    let inner = "objects::inner::registers_less_than_it_wants";
    let out = std::process::Command::new("prlimit")
        .args(["--memlock=65536:65536", "setpriv", "--reuid=nobody", "--clear-groups", "--inh-caps=-all"])
        .arg("--bounding-set=-all")
        .arg(exe)
        .args(["--ignored", "--exact", inner, "--nocapture"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success() && text.contains("memlock (ulimit -l) is 65536, needed 1048576"), "{out:?}");
}

/// What tests above run in a child; `tests/rxe/run` leaves it out.
mod inner {
    use super::*;

    #[test]
    #[ignore = "the inner half of the_limit_of_locked_memory_is_named"]
    fn registers_less_than_it_wants() {
        let pd = IbvProvider::new().unwrap().open(&names()[0]).unwrap().alloc_pd().unwrap();
        let error = pd.register(Memory::shared(1 << 20, HugePages::Off).unwrap(), Access::REMOTE_READ).unwrap_err();
        println!("{error}");
    }
}

#[test]
#[ignore = "needs RDMA devices: tests/rxe/run"]
fn a_queue_pair_connects_once_and_only_to_what_fits() {
    let provider = IbvProvider::new().unwrap();
    let [first, second] = names().map(|name| provider.open(&name).unwrap());
    let (a, b) = (End::new(&first), End::new(&second));
    assert_eq!(a.qp.state(), QueuePairState::Reset);
    let right = b.qp.address();
    let with = |at: usize, byte: u8| {
        let mut address = right.clone();
        address[at] = byte;
        a.qp.connect(&address, true).unwrap_err().cause
    };
    assert!(matches!(with(0, 9), Cause::Malformed { .. }));
    assert!(matches!(with(1, 1), Cause::Unsupported { .. }), "another link layer");
    assert!(matches!(with(12, 0x20), Cause::Unsupported { .. }), "another address family");
    assert!(matches!(with(30, 0x55), Cause::Unsupported { .. }), "another partition");
    assert!(matches!(a.qp.connect(&right[1..], true).unwrap_err().cause, Cause::Malformed { .. }));
    assert_eq!(a.qp.state(), QueuePairState::Reset, "nothing was done");
    let early = a.try_post(vec![]).unwrap_err().cause;
    assert!(matches!(early, Cause::State { is: QueuePairState::Reset, .. }), "{early:?}");
    connect(&a, &b);
    assert_eq!((a.qp.state(), b.qp.state()), (QueuePairState::ReadyToSend, QueuePairState::ReadyToSend));
    let again = a.qp.connect(&right, true).unwrap_err().cause;
    assert!(matches!(again, Cause::State { is: QueuePairState::ReadyToSend, .. }), "{again:?}");
}
