//! Who is let in, what others learn (nothing), and what a peer can't do.

#![cfg(feature = "noise")]
#![allow(clippy::unwrap_used)] // also in the helpers of tests

mod common;

use common::*;
use std::io::{Read, Write};
use std::time::{Duration, Instant};
use towline::{Endpoint, ErrorKind, Path, PutOptions, Secret, Ticket};
use towline_control::preface::{Preface, Purpose};
use towline_control::session::SessionConfig;
use towline_control::wire::{Outcome, Versions};
use towline_verbs::CompletionStatus;

const SECRET: &str = "a secret of more than 16 bytes";
const OTHER: &str = "another one, also long enough";

fn with(secret: Option<&str>, way: Way) -> Options {
    let options = way.options().pool(4 * MIB);
    secret.map_or(options.clone(), |secret| options.secret(secret))
}

// Secrets.

#[test]
fn peers_with_the_same_secret_carry_over_every_way() {
    for way in Way::ALL {
        let options = with(Some(SECRET), way);
        let here = options.build().unwrap();
        for spec in [Spec::bytes(100, 1), Spec::bytes(MIB, 2).copied(), Spec::tree(3)] {
            let (ticket, _producer) = match way {
                Way::Direct => {
                    let endpoint = options.build().unwrap();
                    (spec.put(&endpoint, "key", &PutOptions::default()).unwrap(), There::Here(endpoint))
                }
                _ => {
                    let process = Process::start(&options);
                    (process.put("key", &spec).unwrap(), There::Apart(process))
                }
            };
            let payload = here.get(&ticket, LONG).unwrap();
            spec.check(&payload);
            assert_eq!(payload.info().path, way.path());
        }
    }
}

/// What a consumer is told by a producer, each with its secret or none.
fn told(producer: Option<&str>, consumer: Option<&str>, way: Way) -> towline::Error {
    let producer = with(producer, way).build().unwrap();
    let consumer = with(consumer, way).build().unwrap();
    let spec = Spec::bytes(100 * KIB, 1);
    let ticket = spec.put(&producer, "key", &PutOptions::default()).unwrap();
    let started = Instant::now();
    let by_ticket = consumer.get(&ticket, LONG).unwrap_err();
    let by_key = consumer.get((producer.address(), "key"), LONG).unwrap_err();
    assert!(started.elapsed() < 2 * SLACK, "it is told, not waited for");
    assert_eq!(by_ticket.kind(), by_key.kind());
    assert_tells(&by_ticket, "get");
    assert!(!by_ticket.can_retry(), "the same would happen again");
    let stats = producer.stats();
    assert_eq!((stats.links, stats.leases, stats.payloads, stats.waiting), (0, 0, 1, 0));
    // It goes on for those who know it.
    spec.check(&producer.get(&ticket, LONG).unwrap());
    by_ticket
}

#[test]
fn a_wrong_secret_is_told_to_the_consumer() {
    for way in [Way::Direct, Way::Tcp] {
        assert_eq!(told(Some(SECRET), Some(OTHER), way).kind(), &ErrorKind::WrongSecret);
    }
}

#[test]
fn a_consumer_without_the_secret_is_told_that_it_needs_one() {
    for way in [Way::Direct, Way::Tcp] {
        assert_eq!(told(Some(SECRET), None, way).kind(), &ErrorKind::SecretRequired);
    }
}

#[test]
fn a_consumer_with_a_secret_does_not_talk_to_a_producer_without() {
    for way in [Way::Direct, Way::Tcp] {
        assert_eq!(told(None, Some(SECRET), way).kind(), &ErrorKind::SecretNotExpected);
    }
}

/// What nobody but peers may learn of an endpoint, from a ticket of it.
fn confidential(ticket: &Ticket) -> Vec<(&'static str, Vec<u8>)> {
    let bytes = ticket.to_bytes();
    vec![
        ("boot id", bytes[1..17].to_vec()),
        ("incarnation", bytes[17..33].to_vec()),
        ("key", b"the-name-of-the-key".to_vec()),
        ("part", b"the-name-of-the-part".to_vec()),
        ("address", ticket.addresses()[0].rsplit(':').next().unwrap().as_bytes().to_vec()),
    ]
}

#[track_caller]
fn assert_absent(bytes: &[u8], confidential: &[(&str, Vec<u8>)]) {
    for (name, secret) in confidential {
        assert!(!bytes.windows(secret.len()).any(|window| window == secret), "the {name} can be read on the wire");
    }
}

#[test]
fn on_the_wire_nothing_of_the_control_connection_can_be_read() {
    let (producer, proxy) = behind_proxy(&with(Some(SECRET), Way::Tcp));
    let consumer = with(Some(SECRET), Way::Tcp).build().unwrap();
    let spec = Spec::of([part("the-name-of-the-part", towline::DType::U8, &[1000], 1)]);
    let ticket = spec.put(&producer, "the-name-of-the-key", &for_consumers(2)).unwrap();
    spec.check(&consumer.get(&ticket, LONG).unwrap());
    spec.check(&consumer.get((producer.address(), "the-name-of-the-key"), LONG).unwrap());
    let control = proxy.control_bytes();
    assert!(control.len() > 2000, "it went through the relay");
    let mut confidential = confidential(&ticket);
    confidential.push(("payload", spec.parts[0].bytes()[..16].to_vec()));
    assert_absent(&control, &confidential);
    // The same without a secret, to see that this looks at the right bytes.
    let (open, proxy) = behind_proxy(&with(None, Way::Tcp));
    let ticket = spec.put(&open, "the-name-of-the-key", &PutOptions::default()).unwrap();
    spec.check(&with(None, Way::Tcp).build().unwrap().get((open.address(), "the-name-of-the-key"), LONG).unwrap());
    let control = proxy.control_bytes();
    let readable = self::confidential(&ticket);
    let found = |secret: &Vec<u8>| control.windows(secret.len()).any(|window| window == secret);
    assert!(readable.iter().take(4).all(|(_, secret)| found(secret)));
}

#[test]
fn a_stranger_learns_nothing() {
    let producer = with(Some(SECRET), Way::Tcp).build().unwrap();
    let ticket = Spec::bytes(1000, 1).put(&producer, "the-name-of-the-key", &PutOptions::default()).unwrap();
    let confidential = confidential(&ticket);
    let listen = |send: &[u8]| {
        let mut stream = std::net::TcpStream::connect(producer.address()).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.write_all(send).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut heard = Vec::new();
        let _reset_or_end = stream.read_to_end(&mut heard);
        heard
    };
    let control = Preface::new(Purpose::Control).encode();
    let noise = Preface::new(Purpose::ControlNoise).encode();
    let data = Preface::new(Purpose::Data { token: [7; 16] }).encode();
    let mut handshake = noise.to_vec();
    handshake.extend([0x5a; 200]);
    for send in [&control[..], &noise[..], &data[..], &handshake, b"GET / HTTP/1.1\r\n\r\n", b""] {
        let heard = listen(send);
        assert!(heard.len() < 200, "{} bytes for a stranger", heard.len());
        assert_absent(&heard, &confidential);
    }
    // Nor one who does it right with the wrong secret, or none.
    let mut wrong = session_config();
    wrong.secret = Some(OTHER.parse().unwrap());
    for config in [wrong, session_config()] {
        assert!(Consumer::try_connect(&producer.address(), config).is_err());
    }
    let mut right = session_config();
    right.secret = Some(SECRET.parse().unwrap());
    let mut friend = Consumer::connect(&producer.address(), right).open();
    assert_eq!(friend.lease("the-name-of-the-key").total, 1000);
}

#[test]
fn secrets_are_not_printed() {
    let secret: Secret = SECRET.parse().unwrap();
    let builder = Endpoint::builder().pool_size(MIB).secret(secret.clone());
    let printed = format!("{secret:?} {builder:?}");
    let endpoint = builder.build().unwrap();
    let ticket = Spec::bytes(10, 1).put(&endpoint, "key", &PutOptions::default()).unwrap();
    let error = with(Some(OTHER), Way::Direct).build().unwrap().get(&ticket, LONG).unwrap_err();
    let printed = format!("{printed} {endpoint:?} {ticket:?} {ticket} {error:?} {error} {:?}", endpoint.stats());
    for text in [SECRET, OTHER] {
        assert!(!printed.contains(text));
        let numbers = format!("{:?}", text.as_bytes());
        assert!(!printed.contains(numbers.trim_matches(['[', ']'])));
    }
}

// Beyond this host.

#[test]
fn listening_beyond_loopback_needs_a_secret_or_insecure_by_name() {
    let everywhere = || Endpoint::builder().pool_size(MIB).bind("0.0.0.0:0").advertise("127.0.0.1:0");
    let error = everywhere().build().unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Insecure { address } if address.starts_with("0.0.0.0")), "{error}");
    assert_tells(&error, "build");
    everywhere().insecure().build().unwrap();
    everywhere().secret(SECRET.parse().unwrap()).build().unwrap();
    // An address that is loopback besides one that is not.
    let error = Endpoint::builder().pool_size(MIB).also_bind("0.0.0.0:0").build().unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Insecure { .. }), "{error}");
}

#[test]
fn connecting_beyond_loopback_needs_a_secret_or_insecure_by_name() {
    // A documentation address (RFC 5737): nobody answers there.
    let far = ("192.0.2.1:9", "key");
    let error = endpoint(MIB).get(far, LONG).unwrap_err();
    assert_eq!(error.kind(), &ErrorKind::Insecure { address: "192.0.2.1:9".into() });
    assert_tells(&error, "get");
    let allowed = [
        Endpoint::builder().pool_size(MIB).insecure(),
        Endpoint::builder().pool_size(MIB).secret(SECRET.parse().unwrap()),
    ];
    for builder in allowed {
        let consumer = builder.handshake_timeout(Duration::from_millis(500)).build().unwrap();
        let error = consumer.get(far, Duration::from_millis(200)).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::TimedOut { .. } | ErrorKind::PeerUnreachable { .. }),
            "it is tried: {error}"
        );
    }
}

// Versions.

#[test]
fn a_producer_of_another_version_is_told_to_the_consumer() {
    let theirs = Versions { min: 2, max: 3 };
    let producer = Producer::start(SessionConfig { versions: theirs, ..session_config() }, |_| Answer::Silence);
    let consumer = tcp_endpoint(MIB);
    let error = consumer.get((&producer.address, "key"), LONG).unwrap_err();
    assert_eq!(error.kind(), &ErrorKind::VersionMismatch { ours: (1, 1), theirs: (2, 3) });
    assert_tells(&error, "get");
    assert_whole(&consumer);
}

#[test]
fn a_consumer_of_another_version_is_told_by_the_producer() {
    let producer = tcp_endpoint(MIB);
    let config = SessionConfig { versions: Versions { min: 2, max: 3 }, ..session_config() };
    let Err(error) = Consumer::try_connect(&producer.address(), config) else { panic!("let in") };
    assert!(error.to_string().contains("version"), "{error}");
    // A preface of another version is answered with the versions spoken here.
    let mut preface = Preface::new(Purpose::Control).encode();
    preface[8] = 9;
    let mut stream = std::net::TcpStream::connect(producer.address()).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream.write_all(&preface).unwrap();
    let mut heard = Vec::new();
    let _reset_or_end = stream.read_to_end(&mut heard);
    assert!(heard.starts_with(b"towl"), "a frame that says why: {heard:?}");
    assert_eq!(producer.stats().links, 0);
    let ticket = Spec::bytes(10, 1).put(&producer, "key", &PutOptions::default()).unwrap();
    Spec::bytes(10, 1).check(&tcp_endpoint(MIB).get(&ticket, LONG).unwrap());
}

// Rights.

#[test]
fn a_key_is_worth_nothing_after_its_lease() {
    let producer = tcp_endpoint(MIB);
    let spec = Spec::bytes(100 * KIB, 1);
    spec.put(&producer, "key", &for_consumers(10)).unwrap();
    for outcome in [Outcome::Delivered, Outcome::Failed, Outcome::Cancelled] {
        let mut consumer = Consumer::connect(&producer.address(), session_config()).open();
        let granted = consumer.lease("key");
        let segment = granted.segments[0];
        assert!(consumer.read(segment).unwrap() == spec.parts[0].bytes());
        consumer.close(&[(granted.lease, outcome)]);
        until("the lease to be over", || producer.stats().leases == 0);
        assert_eq!(consumer.read(segment), Err(CompletionStatus::RemoteAccess));
    }
    assert_eq!(producer.stats().payloads, 1);
}

#[test]
fn a_key_is_worth_nothing_after_the_leases_time() {
    let options = Way::Tcp.options().pool(MIB).lease(Duration::from_millis(300));
    let producer = options.build().unwrap();
    let spec = Spec::bytes(100 * KIB, 1);
    let ticket = spec.put(&producer, "key", &PutOptions::default()).unwrap();
    let mut consumer = Consumer::connect(&producer.address(), session_config()).open();
    let granted = consumer.lease("key");
    assert_eq!(granted.lease_us, 300_000);
    let started = Instant::now();
    until("the lease to be over", || producer.stats().leases == 0);
    assert!(started.elapsed() < SLACK);
    assert_eq!(consumer.read(granted.segments[0]), Err(CompletionStatus::RemoteAccess));
    // It was not had by this: another gets it.
    spec.check(&options.build().unwrap().get(&ticket, LONG).unwrap());
    assert_whole(&producer);
}

#[test]
fn a_key_reads_what_it_was_given_for_and_nothing_else() {
    let producer = tcp_endpoint(MIB);
    // The one that is read lies between others: its neighbours' bytes and those at 0 are there, and not its reader's.
    for key in ["others", "a", "others too"] {
        Spec::bytes(64 * KIB, key.len() as u64).put(&producer, key, &for_consumers(100)).unwrap();
    }
    let cases: [fn(&mut towline_verbs::RemoteSlice); 6] = [
        |segment| segment.len += 1,
        |segment| segment.address -= 1,
        |segment| segment.address += 64 * KIB,
        |segment| segment.address = 0,
        |segment| segment.rkey ^= 1,
        |segment| segment.rkey = 0,
    ];
    for change in cases {
        // A read that is refused breaks the queue pair, so each needs a new one.
        let mut consumer = Consumer::connect(&producer.address(), session_config()).open();
        let mut segment = consumer.lease("a").segments[0];
        change(&mut segment);
        let refused = consumer.read(segment).unwrap_err();
        assert!(
            matches!(refused, CompletionStatus::RemoteAccess | CompletionStatus::RemoteInvalidRequest),
            "{segment:?}: {refused}"
        );
    }
    // Nor does another peer's key work over one's own queue pair.
    let mut owner = Consumer::connect(&producer.address(), session_config()).open();
    let mut thief = Consumer::connect(&producer.address(), session_config()).open();
    let segment = owner.lease("a").segments[0];
    assert_eq!(thief.read(segment), Err(CompletionStatus::RemoteAccess));
    assert!(owner.read(segment).unwrap() == Spec::bytes(64 * KIB, 1).parts[0].bytes());
    assert_ne!(segment.address, 0, "nor did a case above name what it was given");
}

#[test]
fn nobody_writes_into_a_producers_pool() {
    let producer = tcp_endpoint(MIB);
    let spec = Spec::bytes(64 * KIB, 1);
    let ticket = spec.put(&producer, "key", &for_consumers(2)).unwrap();
    let mut consumer = Consumer::connect(&producer.address(), session_config()).open();
    let granted = consumer.lease("key");
    assert_eq!(consumer.write(granted.segments[0], &vec![0xee; 64 << 10]), Err(CompletionStatus::RemoteAccess));
    drop(consumer);
    spec.check(&tcp_endpoint(MIB).get(&ticket, LONG).unwrap());
}

#[test]
fn a_lease_is_its_holders_to_close() {
    let producer = tcp_endpoint(MIB);
    Spec::bytes(64 * KIB, 1).put(&producer, "key", &PutOptions::default()).unwrap();
    let mut holder = Consumer::connect(&producer.address(), session_config()).open();
    let granted = holder.lease("key");
    let mut other = Consumer::connect(&producer.address(), session_config()).open();
    let numbers: Vec<_> = (0..100).map(|number| (number, Outcome::Delivered)).collect();
    other.close(&numbers);
    other.keep_alive(1, &[granted.lease]);
    assert!(matches!(other.hear().unwrap(), Said::KeptAlive(unknown) if unknown == [granted.lease]));
    assert_eq!((producer.stats().leases, producer.stats().payloads), (1, 1));
    assert!(holder.read(granted.segments[0]).unwrap() == Spec::bytes(64 * KIB, 1).parts[0].bytes());
    holder.close(&[(granted.lease, Outcome::Delivered)]);
    assert_whole(&producer);
}

#[test]
fn a_ticket_holds_no_secret_no_key_and_no_address_of_memory() {
    let producer = with(Some(SECRET), Way::Tcp).build().unwrap();
    let mut buffer = producer.alloc(64 << 10).unwrap();
    let address = buffer.as_mut_slice().as_ptr() as u64;
    let parts = [towline::Part::buffer("bytes", towline::DType::U8, &[64 * KIB], buffer)];
    let ticket = producer.put("a key of some length", parts).unwrap();
    let bytes = ticket.to_bytes();
    let holds = |what: &[u8]| bytes.windows(what.len()).any(|window| window == what);
    assert!(!holds(SECRET.as_bytes()) && !holds(b"a key of some length"));
    assert!(!holds(&address.to_le_bytes()) && !holds(&address.to_be_bytes()));
    // Whoever has it must still be let in.
    let error = tcp_endpoint(MIB).get(&ticket, LONG).unwrap_err();
    assert_eq!(error.kind(), &ErrorKind::SecretRequired);
}

#[test]
fn a_data_connection_needs_a_token_that_was_given_out() {
    let (producer, proxy) = behind_proxy(&Way::Tcp.options());
    let consumer = tcp_endpoint(4 * MIB);
    for number in 0..64u8 {
        let mut stream = std::net::TcpStream::connect(producer.address()).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.write_all(&Preface::new(Purpose::Data { token: [number; 16] }).encode()).unwrap();
        let mut heard = Vec::new();
        let _reset_or_end = stream.read_to_end(&mut heard);
        assert!(heard.is_empty());
    }
    let spec = Spec::bytes(MIB, 1);
    let ticket = spec.put(&producer, "key", &PutOptions::default()).unwrap();
    let payload = consumer.get(&ticket, LONG).unwrap();
    spec.check(&payload);
    assert_eq!(payload.info().path, Path::Tcp);
    assert!(proxy.connections() > 64);
}
