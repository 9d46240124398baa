//! Which way the bytes go, why, and what happens when none is allowed; addresses of every kind.

#![allow(clippy::unwrap_used)] // also in the helpers of tests

mod common;

use common::*;
use std::time::Instant;
use towline::{Endpoint, ErrorKind, Missing, Path, Paths, PutOptions, Ticket};

// Choice.

#[test]
fn within_one_process_the_way_is_direct() {
    let (producer, consumer) = (endpoint(MIB), endpoint(MIB));
    let spec = Spec::bytes(200 * KIB, 1);
    let ticket = spec.put(&producer, "key", &for_consumers(2)).unwrap();
    for payload in [consumer.get(&ticket, LONG).unwrap(), consumer.get((producer.address(), "key"), LONG).unwrap()] {
        spec.check(&payload);
        let info = payload.info();
        assert_eq!((info.path, info.fallback_bytes, info.retries, info.rails), (Path::Direct, 0, 0, 1));
        assert!(info.path_reason.contains("one process"), "{}", info.path_reason);
    }
    assert_eq!(consumer.stats().bytes.keys().collect::<Vec<_>>(), [&Path::Direct]);
}

#[test]
fn between_two_processes_of_a_host_it_is_shared_memory() {
    let (producer, consumer) = (Process::start(&Options::default()), Options::default().build().unwrap());
    let spec = Spec::bytes(200 * KIB, 1);
    let ticket = producer.put_with("key", &spec, &for_consumers(2)).unwrap();
    // By ticket, and by an address of TCP: the better way is found from there.
    for payload in [consumer.get((&producer.address, "key"), LONG).unwrap(), consumer.get(&ticket, LONG).unwrap()] {
        spec.check(&payload);
        let info = payload.info();
        assert_eq!((info.path, info.fallback_bytes), (Path::Shm, 0));
        assert!(info.path_reason.contains("same host"), "{}", info.path_reason);
    }
    assert_eq!(consumer.stats().bytes.keys().collect::<Vec<_>>(), [&Path::Shm]);
    assert_eq!(consumer.stats().links, 1, "the first connection is not kept beside the better one");
}

#[test]
fn tcp_is_taken_when_nothing_else_is_allowed_and_says_so() {
    let producer = Process::start(&Options::default());
    let consumer = tcp_endpoint(4 * MIB);
    let spec = Spec::bytes(200 * KIB, 1);
    let ticket = producer.put("key", &spec).unwrap();
    let payload = consumer.get(&ticket, LONG).unwrap();
    spec.check(&payload);
    let info = payload.info();
    assert_eq!(info.path, Path::Tcp);
    assert!(info.path_reason.contains("not allowed here"), "{}", info.path_reason);
    assert_eq!(info.fallback_bytes, 0, "it is the first choice of those allowed");
}

#[test]
fn what_only_the_producer_does_not_allow_is_told_too() {
    let producer = Process::start(&Options::default().paths("tcp"));
    let consumer = Options::default().build().unwrap();
    let spec = Spec::bytes(200 * KIB, 1);
    let payload = consumer.get(producer.put("key", &spec).unwrap(), LONG).unwrap();
    spec.check(&payload);
    assert_eq!(payload.info().path, Path::Tcp);
    let reason = &payload.info().path_reason;
    assert!(reason.contains("shm") || reason.contains("shared memory"), "why not the better way: {reason}");
}

#[test]
fn ends_that_allow_nothing_in_common_are_an_error_and_no_fallback() {
    for (producer, consumer) in [("tcp", "shm"), ("shm", "tcp"), ("tcp", "direct"), ("direct", "shm")] {
        let there = Process::start(&Options::default().paths(producer));
        let here = Options::default().paths(consumer).build().unwrap();
        let ticket = there.put("key", &Spec::bytes(1000, 1)).unwrap();
        let started = Instant::now();
        for error in [here.get(&ticket, LONG).unwrap_err(), here.get((&there.address, "key"), LONG).unwrap_err()] {
            let ErrorKind::PathNotAllowed { allowed, why } = error.kind() else {
                panic!("{producer}/{consumer}: {error}")
            };
            assert!(allowed.contains(consumer) && !why.is_empty(), "{error}");
            assert_tells(&error, "get");
        }
        assert!(started.elapsed() < 2 * SLACK);
        assert!(here.view(&ticket, LONG).is_err());
        assert_eq!(here.stats().bytes.len(), 0);
    }
}

#[test]
fn direct_alone_does_not_lead_out_of_the_process_and_shm_alone_not_within() {
    let producer = endpoint(MIB);
    let ticket = Spec::bytes(1000, 1).put(&producer, "key", &PutOptions::default()).unwrap();
    let only = |path| Endpoint::builder().pool_size(MIB).allow_paths(Paths::only(path)).build().unwrap();
    let error = only(Path::Shm).get(&ticket, LONG).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::PathNotAllowed { .. }), "{error}");
    let payload = only(Path::Direct).get(&ticket, LONG).unwrap();
    assert_eq!(payload.info().path, Path::Direct);
}

#[test]
fn allowed_paths_that_this_machine_does_not_have_are_told_when_building() {
    let rdma = |paths| Endpoint::builder().pool_size(MIB).allow_paths(paths);
    let error = match rdma(Paths::only(Path::Rdma)).build() {
        Ok(_) => return eprintln!("this machine has RDMA"),
        Err(error) => error,
    };
    match error.kind() {
        ErrorKind::NoRdma { missing, why } => {
            let word = match missing {
                Missing::Library => "libibverbs.so.1",
                Missing::KernelSupport => "kernel",
                _ => "device",
            };
            assert!(why.contains(word), "{error}");
        }
        ErrorKind::Verbs(_) => {} // there is a device, which can't be used
        _ => panic!("{error}"),
    }
    assert_tells(&error, "build");
    // Where another path is allowed, that is no error.
    rdma(Paths::only(Path::Rdma).and(Path::Tcp)).build().unwrap();
}

#[test]
fn sets_of_paths_are_what_they_say() {
    let some = Paths::only(Path::Tcp).and(Path::Shm);
    assert!(some.allow(Path::Tcp) && some.allow(Path::Shm) && !some.allow(Path::Direct) && !some.allow(Path::Rdma));
    assert_eq!(some.except(Path::Shm), Paths::only(Path::Tcp));
    for path in [Path::Direct, Path::Shm, Path::Rdma, Path::Tcp] {
        assert!(Paths::ALL.allow(path) && !Paths::NONE.allow(path));
        assert_eq!(Paths::ALL.except(path).and(path), Paths::ALL);
    }
}

#[test]
fn one_link_serves_both_directions() {
    let (left, right) = (endpoint(MIB), endpoint(MIB));
    for round in 0..4 {
        let spec = Spec::bytes(100 * KIB, round);
        let ticket = spec.put(&left, "key", &PutOptions::default()).unwrap();
        spec.check(&right.get(&ticket, LONG).unwrap());
        let ticket = spec.put(&right, "key", &PutOptions::default()).unwrap();
        spec.check(&left.get(&ticket, LONG).unwrap());
    }
    assert_eq!((left.stats().links, right.stats().links), (1, 1));
}

// Addresses.

/// Carries one payload by ticket and one by address to an endpoint that listens at `bind`.
fn reached_at(bind: &str, by: impl Fn(&Endpoint) -> String) -> Option<Endpoint> {
    let producer = match Options::default().pool(MIB).bind(bind).build() {
        Ok(producer) => producer,
        // A machine without this kind of address says so with the system's error; there is nothing more to see there.
        Err(error) => {
            assert!(matches!(error.kind(), ErrorKind::Os { errno: 99 | 97, .. }), "{error}");
            eprintln!("no {bind} here: {error}");
            return None;
        }
    };
    let spec = Spec::bytes(100 * KIB, 1);
    for consumer in [endpoint(MIB), tcp_endpoint(MIB)] {
        let ticket = spec.put(&producer, "ticket", &PutOptions::default()).unwrap();
        spec.check(&consumer.get(&ticket, LONG).unwrap());
        spec.put(&producer, "address", &PutOptions::default()).unwrap();
        spec.check(&consumer.get((by(&producer), "address"), LONG).unwrap());
    }
    assert_whole(&producer);
    Some(producer)
}

#[test]
fn an_endpoint_is_reached_at_ipv4() {
    let producer = reached_at("127.0.0.1:0", Endpoint::address).unwrap();
    let port = producer.address().rsplit(':').next().unwrap().parse::<u16>().unwrap();
    assert_ne!(port, 0, "the real one is published");
}

#[test]
fn an_endpoint_is_reached_at_ipv6() {
    if let Some(producer) = reached_at("[::1]:0", Endpoint::address) {
        assert!(producer.address().starts_with("[::1]:"));
    }
}

#[test]
fn an_endpoint_is_reached_by_host_name() {
    let port = |endpoint: &Endpoint| endpoint.address().rsplit(':').next().unwrap().to_owned();
    reached_at("127.0.0.1:0", |endpoint| format!("localhost:{}", port(endpoint)));
    reached_at("localhost:0", |endpoint| format!("localhost:{}", port(endpoint)));
}

#[test]
fn an_endpoint_is_reached_at_its_unix_name() {
    let producer = endpoint(MIB);
    let spec = Spec::bytes(100 * KIB, 1);
    let ticket = spec.put(&producer, "key", &PutOptions::default()).unwrap();
    // The incarnation lies behind version and boot id in a ticket's bytes.
    let incarnation: [u8; 16] = ticket.to_bytes()[17..33].try_into().unwrap();
    let name = String::from_utf8(towline::engine::unix_name_of(&incarnation)).unwrap();
    let payload = endpoint(MIB).get((format!("@{name}"), "key"), LONG).unwrap();
    spec.check(&payload);
    assert_eq!(payload.info().path, Path::Direct);
    assert_whole(&producer);
}

#[test]
fn an_endpoint_listens_at_several_addresses_and_publishes_them() {
    let producer = Options::default().pool(MIB).bind("127.0.0.1:0").also_bind("127.0.0.2:0").build().unwrap();
    let addresses = producer.addresses();
    assert_eq!(addresses.len(), 2);
    assert!(addresses[0].starts_with("127.0.0.1:") && addresses[1].starts_with("127.0.0.2:"));
    for address in &addresses {
        let spec = Spec::bytes(100 * KIB, 1);
        let ticket = spec.put(&producer, "key", &PutOptions::default()).unwrap();
        assert_eq!(ticket.addresses(), addresses);
        spec.check(&tcp_endpoint(MIB).get((address, "key"), LONG).unwrap());
    }
}

#[test]
fn of_several_advertised_addresses_one_that_answers_is_found() {
    let dead = format!("{}:7000", lonely());
    let producer = Endpoint::builder()
        .pool_size(MIB)
        .advertise(&dead)
        .advertise("127.0.0.1:0") // the port that was bound
        .build()
        .unwrap();
    assert_eq!(producer.address(), dead);
    let spec = Spec::bytes(100 * KIB, 1);
    let ticket = spec.put(&producer, "key", &PutOptions::default()).unwrap();
    let payload = tcp_endpoint(MIB).get(&ticket, LONG).unwrap();
    spec.check(&payload);
    assert_eq!(payload.info().path, Path::Tcp);
}

#[test]
fn a_host_name_in_a_ticket_is_looked_up_by_who_gets_it() {
    let unknown = "no-such-host.invalid:7000"; // RFC 6761 keeps `.invalid` from ever being one
    let producer = Endpoint::builder().pool_size(MIB).advertise("localhost:0").advertise(unknown).build();
    let unresolved = producer.unwrap_err();
    assert!(matches!(unresolved.kind(), ErrorKind::AddressMalformed { .. }), "{unresolved}");
    assert!(
        unresolved.to_string().starts_with("build: `no-such-host.invalid:7000` is not an address: "),
        "{unresolved}"
    );
    let producer = Endpoint::builder().pool_size(MIB).advertise("localhost:0").build().unwrap();
    assert!(producer.address().starts_with("localhost:") && !producer.address().ends_with(":0"));
    let spec = Spec::bytes(100 * KIB, 1);
    let ticket = spec.put(&producer, "key", &PutOptions::default()).unwrap();
    assert_eq!(ticket.addresses(), producer.addresses());
    let word: Ticket = ticket.to_string().parse().unwrap();
    let payload = tcp_endpoint(MIB).get(word, LONG).unwrap();
    spec.check(&payload);
    assert_eq!(payload.info().path, Path::Tcp);
}

#[test]
fn an_advertised_address_is_where_consumers_go() {
    let (producer, proxy) = behind_proxy(&Way::Tcp.options().pool(MIB));
    assert_eq!(producer.addresses(), [proxy.address.to_string()]);
    let spec = Spec::bytes(200 * KIB, 1);
    let ticket = spec.put(&producer, "key", &PutOptions::default()).unwrap();
    spec.check(&tcp_endpoint(MIB).get(&ticket, LONG).unwrap());
    assert!(proxy.connections() >= 2 && proxy.data_bytes() >= 200 * KIB, "control and data both went through it");
}

#[test]
fn listening_everywhere_needs_to_be_told_what_to_advertise() {
    let error = Endpoint::builder().pool_size(MIB).bind("0.0.0.0:0").insecure().build().unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::BadOption { option: "advertise", .. }), "{error}");
    let everywhere =
        Endpoint::builder().pool_size(MIB).bind("0.0.0.0:0").advertise("127.0.0.1:0").insecure().build().unwrap();
    assert!(everywhere.address().starts_with("127.0.0.1:") && !everywhere.address().ends_with(":0"));
    let spec = Spec::bytes(1000, 1);
    let ticket = spec.put(&everywhere, "key", &PutOptions::default()).unwrap();
    spec.check(&tcp_endpoint(MIB).get(&ticket, LONG).unwrap());
}

#[test]
fn data_connections_that_overtake_one_another_are_told_apart() {
    for round in 0..4 {
        let (producer, proxy) = behind_proxy(&Way::Tcp.options());
        proxy.let_overtake();
        let spec = Spec::bytes(8 * MIB, round);
        let ticket = spec.put(&producer, "key", &PutOptions::default()).unwrap();
        let payload = tcp_endpoint(16 * MIB).get(&ticket, LONG).unwrap();
        spec.check(&payload);
        assert_eq!(payload.info().retries, 0);
    }
}
