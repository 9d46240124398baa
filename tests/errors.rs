//! Bad input: each is an error that says what was wrong and what can be done, and nothing is lost or leaked.

#![allow(clippy::unwrap_used)] // also in the helpers of tests

mod common;

use common::*;
use std::time::{Duration, Instant};
use towline::{
    DType, Endpoint, ErrorKind, Gone, HugePages, Limits, MAX_PARTS, Part, Paths, PutOptions, Secret, Ticket,
};

// Keys and parts.

#[test]
fn keys_too_long_or_empty_are_refused() {
    let endpoint = endpoint(MIB);
    let long = [b'k'; 1025];
    let error = Spec::bytes(10, 1).put(&endpoint, long, &PutOptions::default()).unwrap_err();
    assert_eq!(error.kind(), &ErrorKind::KeyTooLong { len: 1025, max: 1024 });
    assert_tells(&error, "put");
    let error = Spec::bytes(10, 1).put(&endpoint, "", &PutOptions::default()).unwrap_err();
    assert_eq!(error.kind(), &ErrorKind::KeyEmpty);
    assert_tells(&error, "put");
    let error = endpoint.get((endpoint.address(), long), LONG).unwrap_err();
    assert_eq!(error.kind(), &ErrorKind::KeyTooLong { len: 1025, max: 1024 });
    assert_tells(&error, "get");
    let error = endpoint.get((endpoint.address(), ""), LONG).unwrap_err();
    assert_eq!(error.kind(), &ErrorKind::KeyEmpty);
    assert_whole(&endpoint);
}

#[test]
fn a_payload_has_one_part_at_least_and_not_too_many() {
    let endpoint = Options::default().pool(MIB).granule(64).build().unwrap();
    let error = endpoint.put("none", []).unwrap_err();
    assert_eq!(error.kind(), &ErrorKind::PartCount { count: 0, max: MAX_PARTS });
    assert_tells(&error, "put");
    let parts = (0..=MAX_PARTS).map(|_| Part::bytes("x", DType::U8, &[1], b"x"));
    let error = endpoint.put("many", parts).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::PartCount { max: MAX_PARTS, .. }), "{error}");
    assert_whole(&endpoint);
}

#[test]
fn parts_that_break_a_rule_are_named() {
    let endpoint = endpoint(MIB);
    let name = "n".repeat(257);
    let cases: [(Part<'_>, u64, u64); 5] = [
        (Part::bytes(&name, DType::U8, &[1], b"x"), 257, 256),
        (Part::bytes("x", DType::U8, &[1; 9], b"x"), 9, 8),
        (Part::bytes("x", DType::F32, &[2, 2], b"not 16 bytes"), 12, 16),
        (Part::bytes("x", DType::F32, &[], b""), 0, 4),
        (Part::bytes("x", DType::U64, &[u64::MAX, 3], b"12345678"), 8, u64::MAX),
    ];
    for (part, has, needs) in cases {
        let good = Part::bytes("good", DType::U8, &[3], b"abc");
        let error = endpoint.put("bad", [good, part]).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::PartMalformed { part: 1, have, need, .. } if (*have, *need) == (has, needs)),
            "{error}"
        );
        assert!(error.to_string().starts_with("put: key `bad`: part 1 `"));
        assert_whole(&endpoint);
    }
}

#[test]
fn a_buffer_of_another_endpoint_is_refused_and_given_back() {
    let (endpoint, other) = (endpoint(MIB), endpoint(MIB));
    let (own, foreign) = (endpoint.alloc(100).unwrap(), other.alloc(100).unwrap());
    let parts = [Part::buffer("own", DType::U8, &[100], own), Part::buffer("foreign", DType::U8, &[100], foreign)];
    let error = endpoint.put("mixed", parts).unwrap_err();
    assert_eq!(error.kind(), &ErrorKind::ForeignBuffer { part: 1, name: "foreign".into() });
    assert_tells(&error, "put");
    assert_whole(&endpoint);
    assert_whole(&other);
}

#[test]
fn a_failed_put_leaves_what_was_under_the_key() {
    let endpoint = endpoint(MIB);
    let spec = Spec::bytes(1000, 1);
    let ticket = spec.put(&endpoint, "key", &PutOptions::default()).unwrap();
    assert!(endpoint.put("key", [Part::bytes("x", DType::F32, &[1], b"too long")]).is_err());
    assert!(endpoint.put_with("key", [Part::bytes("x", DType::U8, &[1], b"x")], &for_consumers(0)).is_err());
    spec.check(&endpoint.get(&ticket, LONG).unwrap());
    assert_whole(&endpoint);
}

#[test]
fn a_payload_for_no_consumer_is_refused() {
    let endpoint = endpoint(MIB);
    let error = Spec::bytes(10, 1).put(&endpoint, "nobody", &for_consumers(0)).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::BadOption { option: "consumers", .. }), "{error}");
    assert_whole(&endpoint);
}

// Memory.

#[test]
fn buffers_of_no_bytes_and_of_more_than_the_pool_are_refused() {
    let endpoint = endpoint(MIB);
    let error = endpoint.alloc(0).unwrap_err();
    assert_eq!(error.kind(), &ErrorKind::ZeroLength);
    assert_tells(&error, "alloc");
    for len in [MIB + 1, u64::from(u32::MAX), u64::MAX / 2, u64::MAX] {
        let error = endpoint.alloc(len as usize).unwrap_err();
        assert_eq!(error.kind(), &ErrorKind::PoolTooSmall { need: len, pool: MIB }, "no waiting would help");
        assert_tells(&error, "alloc");
    }
    assert_whole(&endpoint);
}

#[test]
fn parts_that_together_are_larger_than_the_pool_are_refused_at_once() {
    let endpoint = Options::default().pool(MIB).alloc_timeout(LONG).build().unwrap();
    let len = 700 * KIB;
    let bytes = vec![1; len as usize];
    let copied = |name| Part::bytes(name, DType::U8, &[700 << 10], &bytes);
    for first in [copied("a"), Part::buffer("a", DType::U8, &[700 << 10], endpoint.alloc(len as usize).unwrap())] {
        let started = Instant::now();
        let error = endpoint.put("k", [first, copied("b")]).unwrap_err();
        assert_eq!(error.kind(), &ErrorKind::PoolTooSmall { need: 2 * len, pool: MIB }, "no waiting would help");
        assert!(started.elapsed() < LONG / 2, "it waited for room that it holds itself");
        assert_tells(&error, "put");
    }
    assert_whole(&endpoint);
}

#[test]
fn a_payload_larger_than_the_consumers_pool_is_refused_over_every_way() {
    every_way(MIB, |pair| {
        let small = pair.way.options().pool(256 * KIB).build().unwrap();
        let spec = Spec::bytes(512 * KIB, 1);
        let ticket = match &pair.there {
            There::Here(endpoint) => spec.put(endpoint, "large", &PutOptions::default()).unwrap(),
            There::Apart(process) => process.put("large", &spec).unwrap(),
        };
        let error = small.get(&ticket, LONG).unwrap_err();
        assert_eq!(error.kind(), &ErrorKind::PoolTooSmall { need: 512 * KIB, pool: 256 * KIB });
        assert_tells(&error, "get");
        assert_whole(&small);
        spec.check(&pair.here.get(&ticket, LONG).unwrap());
        pair.assert_whole();
    });
}

#[test]
fn a_destination_too_small_is_refused_with_and_without_a_ticket() {
    let (producer, consumer) = (endpoint(MIB), endpoint(MIB));
    let spec = Spec::tree(1);
    let ticket = spec.put(&producer, "tree", &PutOptions::default()).unwrap();
    let need = ticket.layout().destination_len();
    for result in [
        consumer.get_into(&ticket, vec![0; need as usize - 1], LONG),
        consumer.get_into((producer.address(), "tree"), vec![0; need as usize - 1], LONG),
    ] {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), &ErrorKind::DestinationTooSmall { need, have: need - 1 });
        assert_tells(&error, "get");
    }
    spec.check(&consumer.get_into(&ticket, vec![0; need as usize], LONG).unwrap());
    assert_whole(&producer);
}

// Tickets.

#[test]
fn what_is_no_ticket_is_refused() {
    let endpoint = endpoint(MIB);
    let text = Spec::tree(1).put(&endpoint, "tree", &PutOptions::default()).unwrap().to_string();
    let half = &text[..text.len() / 2];
    let swapped = text.replacen('A', "B", 1);
    for bad in ["", "towline1:", "towline2:AAAA", "http://x", "towline1:????", half, &swapped, &format!("{text}AA")] {
        let error = bad.parse::<Ticket>().unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::TicketMalformed { .. }), "{bad}: {error}");
        assert_tells(&error, "ticket");
    }
    assert!(Ticket::from_bytes(&[]).is_err() && Ticket::from_bytes(&[1; 100]).is_err());
}

#[test]
fn unknown_and_used_tickets_say_why() {
    let (producer, consumer) = (endpoint(MIB), endpoint(MIB));
    let put = |key: &str| Spec::bytes(1000, 1).put(&producer, key, &PutOptions::default()).unwrap();
    let (used, removed, replaced) = (put("used"), put("removed"), put("replaced"));
    let expired = Spec::bytes(1000, 1).put(&producer, "expired", &expiring(Duration::from_millis(1))).unwrap();
    drop(consumer.get(&used, LONG).unwrap());
    producer.remove(&removed).unwrap();
    let last = put("replaced");
    until("expired", || producer.stats().payloads == 1);
    let why = |ticket: &Ticket| consumer.get(ticket, LONG).unwrap_err();
    for (ticket, gone) in
        [(&used, Gone::Consumed), (&removed, Gone::Removed), (&replaced, Gone::Replaced), (&expired, Gone::Expired)]
    {
        let error = why(ticket);
        assert!(
            matches!(error.kind(), ErrorKind::Gone(why) if *why == gone || *why == Gone::Unknown),
            "{gone:?}: {error}"
        );
        assert!(!error.can_retry());
    }
    assert_eq!(why(&removed).kind(), &ErrorKind::Gone(Gone::Removed), "it is told what is still known");
    drop(consumer.get(&last, LONG).unwrap());
    assert_whole(&producer);
}

#[test]
fn a_ticket_of_another_incarnation_is_refused() {
    let first = endpoint(MIB);
    let address = first.address();
    let ticket = Spec::bytes(1000, 1).put(&first, "key", &PutOptions::default()).unwrap();
    drop(first);
    let second = Options::default().pool(MIB).bind(&address).build().unwrap();
    Spec::bytes(1000, 2).put(&second, "key", &PutOptions::default()).unwrap();
    for consumer in [endpoint(MIB), tcp_endpoint(MIB)] {
        let error = consumer.get(&ticket, LONG).unwrap_err();
        assert_eq!(error.kind(), &ErrorKind::Gone(Gone::OtherIncarnation));
        assert_tells(&error, "get");
    }
    let error = second.remove(&ticket).unwrap_err();
    assert_eq!(error.kind(), &ErrorKind::Gone(Gone::OtherIncarnation));
    assert_eq!(second.stats().payloads, 1, "the other payload in that slot is untouched");
}

// Peers.

#[test]
fn a_peer_that_does_not_listen_is_unreachable() {
    let consumer = endpoint(MIB);
    let address = format!("{}:7000", lonely());
    let started = Instant::now();
    let error = consumer.get((&address, "key"), LONG).unwrap_err();
    assert!(started.elapsed() < SLACK, "a refused connection is known at once");
    let ErrorKind::PeerUnreachable { address: named, errno, tried } = error.kind() else { panic!("{error}") };
    assert_eq!((named, *errno), (&address, 111), "ECONNREFUSED");
    assert!(tried.contains(&address), "{tried}");
    assert_tells(&error, "get");
    assert!(error.can_retry());
    assert_whole(&consumer);
}

#[test]
fn a_unix_name_at_which_nobody_listens_is_unreachable() {
    let consumer = endpoint(MIB);
    let error = consumer.get(("@towline-nobody-is-here", "key"), LONG).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::PeerUnreachable { .. }), "{error}");
    assert_tells(&error, "get");
}

#[test]
fn what_is_no_address_is_refused() {
    let consumer = endpoint(MIB);
    for bad in ["", "nowhere", "127.0.0.1", "127.0.0.1:port", "[::1:80", "a b:1", "127.0.0.1:99999", ":80", "@"] {
        let error = consumer.get((bad, "key"), LONG).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::AddressMalformed { text, .. } if text == bad), "{bad}: {error}");
        assert_tells(&error, "get");
        assert!(Endpoint::builder().bind(bad).build().is_err(), "{bad}");
    }
}

#[test]
fn a_host_name_that_is_not_known_is_unreachable() {
    let consumer = endpoint(MIB);
    let error = consumer.get(("name.invalid:9", "key"), LONG).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::PeerUnreachable { .. } | ErrorKind::Insecure { .. }),
        "names under .invalid are never known: {error}"
    );
    assert_tells(&error, "get");
}

#[test]
fn a_port_that_is_taken_is_told_with_the_systems_error() {
    let first = endpoint(MIB);
    let error = Endpoint::builder().bind(first.address()).build().unwrap_err();
    assert_eq!(error.kind(), &ErrorKind::Os { call: "listen", errno: 98 }, "EADDRINUSE");
    let text = error.to_string();
    assert!(text.starts_with(&format!("build: `bind` to {}: listen: ", first.address())), "{text}");
    assert!(text.contains("port"), "{text}");
}

// What the text of an error names.

/// The text has these in it once each, and is one line.
#[track_caller]
fn assert_names(error: &towline::Error, names: &[&str]) {
    let text = error.to_string();
    for name in names {
        assert_eq!(text.matches(name).count(), 1, "`{name}` once in: {text}");
    }
    assert!(!text.contains('\n'), "{text}");
}

#[test]
fn errors_name_key_peer_part_and_option_once() {
    let (producer, consumer) = (endpoint(MIB), endpoint(MIB));
    let nobody = format!("{}:7000", lonely());
    let error = consumer.get((&nobody, "step 7"), LONG).unwrap_err();
    assert_names(&error, &["key `step 7`", &nobody, "refused", "check that the peer runs"]);
    let address = producer.address();
    let error = consumer.get((&address, "a\nb"), Duration::from_millis(20)).unwrap_err();
    assert_names(&error, &["key `a\\nb`", &address, "put under the key", "check the key"]);
    let error = producer.wait_for_consumers("lonely", 1, Duration::from_millis(1)).unwrap_err();
    assert_names(&error, &["key `lonely`", "check that consumers get this key"]);
    let ticket = Spec::bytes(10, 1).put(&producer, "once", &PutOptions::default()).unwrap();
    drop(consumer.get(&ticket, LONG).unwrap());
    until("the consumer's word", || producer.stats().payloads == 0);
    let error = consumer.get(&ticket, LONG).unwrap_err();
    assert_names(&error, &["payload 0.", &address, "the payload is not there"]);
    assert_names(&producer.remove(&ticket).unwrap_err(), &["remove: payload 0."]);
    let error = producer.put("tensors", [Part::bytes("w", DType::F32, &[3], b"abcd")]).unwrap_err();
    assert_names(&error, &["key `tensors`", "part 0 `w`", "has 4, needs 12"]);
    let error =
        producer.put("large", [Part::bytes("w", DType::U8, &[2 * MIB], &vec![0; 2 * MIB as usize])]).unwrap_err();
    assert_names(&error, &["put: key `large`", "`pool_size`"]);
    let error = consumer.get(("localhost", "k"), LONG).unwrap_err();
    assert_names(&error, &["`localhost` is not an address", "HOST:PORT", "@NAME"]);
    let error = Endpoint::builder().bind("198.51.100.7:0").insecure().build().unwrap_err();
    assert_names(&error, &["build: `bind` to 198.51.100.7:0", "listen", "bind to an address that this machine has"]);
    let rdma = Endpoint::builder().allow_paths(Paths::only(towline::Path::Rdma));
    let error = rdma.rdma_device("no such device").build().unwrap_err();
    match error.kind() {
        ErrorKind::NoRdma { .. } => assert_names(&error, &["no RDMA on this machine", "`Builder::allow_paths`"]),
        _ => assert_names(&error, &["`no such device` is not here", "`towline devices`"]),
    }
    let error =
        Endpoint::builder().allow_paths(Paths::only(towline::Path::Tcp)).rdma_device("a:1").build().unwrap_err();
    assert_names(&error, &["option `rdma_device`", "`a:1`", "not allowed"]);
    let error = Endpoint::builder().rdma_device("a:0").build().unwrap_err();
    assert_names(&error, &["option `rdma_device`", "`a:0`: a port is 1 to 255", "NAME:PORT:GID_INDEX"]);
    let error = Endpoint::builder().bind("192.0.2.1:9").build().unwrap_err();
    assert_names(&error, &["192.0.2.1:9", "`insecure`"]);
}

// Deadlines.

#[test]
fn a_deadline_in_the_past_is_told_at_once() {
    let (producer, consumer) = (endpoint(MIB), endpoint(MIB));
    let ticket = Spec::bytes(1000, 1).put(&producer, "key", &PutOptions::default()).unwrap();
    let error = consumer.get(&ticket, Duration::ZERO).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::TimedOut { quarantined: 0, .. }), "{error}");
    assert_tells(&error, "get");
    Spec::bytes(1000, 1).check(&consumer.get(&ticket, LONG).unwrap());
}

#[test]
fn a_key_that_is_never_put_ends_at_the_deadline() {
    every_way(MIB, |pair| {
        let address = match &pair.there {
            There::Here(endpoint) => endpoint.address(),
            There::Apart(process) => process.address.clone(),
        };
        for timeout in [Duration::from_millis(50), Duration::from_millis(300)] {
            let started = Instant::now();
            let error = pair.here.get((&address, "never"), timeout).unwrap_err();
            let took = started.elapsed();
            assert!(
                matches!(error.kind(), ErrorKind::TimedOut { waiting_for, quarantined: 0 } if waiting_for.contains("key")),
                "{error}"
            );
            assert!(took >= timeout && took < timeout + SLACK, "{took:?} for {timeout:?}");
            assert_tells(&error, "get");
        }
        // The producer does not wait for it any more either: a payload put now stays for the next.
        match &pair.there {
            There::Here(endpoint) => until("the producer to know", || endpoint.stats().waiting == 0),
            There::Apart(process) => until("the producer to know", || process.stats()["waiting"] == 0),
        }
    });
}

#[test]
fn the_longest_time_there_is_is_no_deadline() {
    let (producer, consumer) = (endpoint(MIB), endpoint(MIB));
    let ticket = Spec::bytes(1000, 1).put(&producer, "key", &PutOptions::default()).unwrap();
    Spec::bytes(1000, 1).check(&consumer.get(&ticket, Duration::MAX).unwrap());
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| consumer.get((producer.address(), "later"), Duration::MAX));
        producer.wait_for_consumers("later", 1, Duration::MAX).unwrap();
        Spec::bytes(1000, 2).put(&producer, "later", &PutOptions::default()).unwrap();
        Spec::bytes(1000, 2).check(&waiting.join().unwrap().unwrap());
    });
    drop(consumer.alloc_within(1000, Duration::MAX).unwrap());
    producer.close(LONG);
}

// Options.

#[test]
fn options_that_can_not_be_are_refused_by_name() {
    let limits = |change: fn(&mut towline::Limits)| {
        let mut limits = towline::Limits::default();
        change(&mut limits);
        Endpoint::builder().pool_size(MIB).limits(limits)
    };
    let small = || Endpoint::builder().pool_size(MIB);
    let second = Duration::from_secs(1);
    let cases = [
        ("pool_size", Endpoint::builder().pool_size(0)),
        ("granule", small().granule(0)),
        ("granule", small().granule(100)),
        ("granule", small().granule(32)),
        ("granule", small().granule(4 * MIB)),
        ("allow_paths", small().allow_paths(Paths::NONE)),
        ("lease", small().lease(second).drift_margin(second)),
        ("lease", small().lease(Duration::ZERO)),
        ("limits.key", limits(|limits| limits.key = 0)),
        ("limits.key", limits(|limits| limits.key = 1025)),
        ("limits.send_queue", limits(|limits| limits.send_queue = 0)),
        ("limits.in_flight", limits(|limits| limits.in_flight = 0)),
        ("limits.gets", limits(|limits| limits.gets = 0)),
        ("limits.links", limits(|limits| limits.links = 0)),
        ("limits.tries", limits(|limits| limits.tries = 0)),
        ("limits.backlog", limits(|limits| limits.backlog = 8191)),
        ("handshake_timeout", small().handshake_timeout(Duration::ZERO)),
    ];
    for (named, builder) in cases {
        let error = builder.build().unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::BadOption { option, .. } if *option == named), "{named}: {error}");
        assert!(error.to_string().starts_with("build: option `"), "{error}");
        assert_tells(&error, "build");
    }
    // The largest of all are as good as none.
    let huge = Limits::new().payloads(usize::MAX).links(usize::MAX).gets(usize::MAX).backlog(usize::MAX);
    let huge = huge.leases_per_peer(usize::MAX).waiting_per_peer(usize::MAX).quarantine_per_peer(u64::MAX);
    let endpoint = small().limits(huge.eager(u32::MAX).send_queue(u32::MAX).in_flight(u64::MAX).tries(u32::MAX));
    let endpoint = endpoint.build().unwrap();
    let spec = Spec::bytes(100 * KIB, 1);
    let ticket = spec.put(&endpoint, "key", &PutOptions::default()).unwrap();
    spec.check(&endpoint.get(&ticket, LONG).unwrap());
    let nine = (0..9).fold(small(), |builder, port| builder.advertise(format!("127.0.0.1:{}", 9000 + port)));
    assert!(matches!(nine.build().unwrap_err().kind(), ErrorKind::BadOption { option: "advertise", .. }));
}

#[test]
fn a_pool_that_the_machine_does_not_have_is_refused() {
    let error = Endpoint::builder().pool_size(1 << 50).build().unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::Verbs(_) | ErrorKind::BadOption { .. } | ErrorKind::Os { .. }),
        "{error}"
    );
    assert!(error.to_string().starts_with("build: `pool_size` of 1125899906842624 bytes: "), "{error}");
    assert_tells(&error, "build");
}

#[test]
fn huge_pages_are_used_or_refused() {
    // What the machine has decides; what it says must hold.
    match Endpoint::builder().pool_size(4 * MIB).huge_pages(HugePages::Require).build() {
        Ok(endpoint) => {
            let spec = Spec::bytes(3 * MIB, 1);
            let ticket = spec.put(&endpoint, "huge", &PutOptions::default()).unwrap();
            spec.check(&endpoint.get(&ticket, LONG).unwrap());
        }
        Err(error) => {
            assert!(matches!(error.kind(), ErrorKind::Verbs(_) | ErrorKind::Os { .. }), "{error}");
            assert!(
                error.to_string().contains("bytes in huge pages: ") && error.to_string().contains("nr_hugepages"),
                "{error}"
            );
        }
    }
}

#[test]
fn a_secret_too_short_is_refused() {
    assert!(Secret::from_bytes(b"short").is_err());
    assert!("also short".parse::<Secret>().is_err());
    assert!(Secret::from_bytes(&[7; 16]).is_ok());
}
