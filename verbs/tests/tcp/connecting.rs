//! How connections come about, and how they don't.

use crate::harness::*;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::time::Duration;
use towline_verbs::{Cause, CompletionStatus, Opcode, QueuePairState, Token};

/// The token in an address: its place is part of the format.
fn token_of(address: &[u8]) -> Token {
    Token(address[8..24].try_into().unwrap())
}

fn closes(stream: &mut TcpStream) -> bool {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    matches!(stream.read(&mut [0]), Ok(0) | Err(_))
}

#[test]
fn every_number_of_streams_works() {
    for streams in 1..=4 {
        let p = pair_with("127.0.0.1", |config| config.streams = streams);
        let (from, to) = (p.b.memory(32 << 20), p.a.memory(32 << 20));
        fill(&from, 1);
        p.a.post(1, Opcode::Read, vec![slice(&to, 0, 32 << 20)], Some(from.remote(0, 32 << 20).unwrap()));
        assert_eq!(completion(&p.a, &p.b).status, CompletionStatus::Success);
        check(&to, 0, 0, 32 << 20, 1);
    }
}

#[test]
fn requests_posted_before_the_connection_is_there_wait_for_it() {
    let endpoints = [Endpoint::new("127.0.0.1"), Endpoint::new("127.0.0.1")];
    let (a, b) = (endpoints[0].end(), endpoints[1].end());
    let (from, to) = (b.memory(4096), a.memory(4096));
    fill(&from, 1);
    let early = a.try_post(1, Opcode::Read, vec![slice(&to, 0, 4096)], Some(from.remote(0, 4096).unwrap()));
    assert!(matches!(early.unwrap_err().cause, Cause::State { is: QueuePairState::Reset, .. }));
    a.qp.connect(&b.qp.address(), true).unwrap();
    assert_eq!(a.qp.state(), QueuePairState::Connecting);
    a.post(1, Opcode::Read, vec![slice(&to, 0, 4096)], Some(from.remote(0, 4096).unwrap()));
    // The passive end is told only when the streams have long been there.
    drive(&[&a.device], || !wait(&[&a.device], Duration::from_millis(50)));
    assert!(a.poll().is_empty());
    b.qp.connect(&a.qp.address(), false).unwrap();
    assert_eq!(completion(&a, &b).status, CompletionStatus::Success);
    check(&to, 0, 0, 4096, 1);
}

#[test]
fn the_addresses_are_tried_in_order() {
    // A port that refuses, one that closes at once, one that never answers, then the endpoint itself.
    let refusing = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let closing = TcpListener::bind("127.0.0.1:0").unwrap();
    let closing_address = closing.local_addr().unwrap();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent_address = silent.local_addr().unwrap();
    let passive = Endpoint::with("127.0.0.1", |config| {
        let own = config.advertised[0];
        config.advertised = vec![refusing, closing_address, silent_address, own];
    });
    let active = Endpoint::with("127.0.0.1", |config| config.connect_timeout = Duration::from_secs(4));
    let closer = std::thread::spawn(move || {
        for _ in 0..2 {
            drop(closing.accept().unwrap());
        }
    });
    let (a, b) = (active.end(), passive.end());
    connect(&a, &b);
    closer.join().unwrap();
    let (from, to) = (b.memory(4096), a.memory(4096));
    a.post(1, Opcode::Read, vec![slice(&to, 0, 4096)], Some(from.remote(0, 4096).unwrap()));
    assert_eq!(completion(&a, &b).status, CompletionStatus::Success);
}

fn connects_to(advertised: Vec<SocketAddr>, timeout: Duration) -> End {
    let passive = Endpoint::with("127.0.0.1", |config| config.advertised = advertised);
    let active = Endpoint::with("127.0.0.1", |config| config.connect_timeout = timeout);
    let (a, b) = (active.end(), passive.end());
    let to = a.memory(4096);
    a.qp.connect(&b.qp.address(), true).unwrap();
    a.post(1, Opcode::Read, vec![slice(&to, 0, 16)], Some(b.memory(4096).remote(0, 16).unwrap()));
    drive(&[&a.device], || a.qp.state() == QueuePairState::Error);
    assert!(a.poll().iter().all(|c| c.status != CompletionStatus::Success && c.id == 1));
    assert!(a.qp.is_fenced());
    a
}

#[test]
fn nobody_there_is_an_error_with_its_errno() {
    let refusing = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let a = connects_to(vec![refusing], Duration::from_secs(10));
    assert_eq!(a.qp.failure().unwrap().cause, Cause::Os { errno: libc::ECONNREFUSED, call: "connect" });
}

#[test]
fn a_port_that_never_answers_runs_into_the_deadline() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let a = connects_to(vec![silent.local_addr().unwrap()], Duration::from_millis(300));
    assert_eq!(a.qp.failure().unwrap().cause, Cause::Os { errno: libc::ETIMEDOUT, call: "connect" });
}

#[test]
fn a_passive_end_that_nobody_dials_runs_into_the_deadline() {
    let endpoint = Endpoint::with("127.0.0.1", |config| config.connect_timeout = Duration::from_millis(300));
    let (a, b) = (endpoint.end(), endpoint.end());
    b.qp.connect(&a.qp.address(), false).unwrap();
    drive(&[&b.device], || b.qp.state() == QueuePairState::Error);
    assert_eq!(b.qp.failure().unwrap().cause, Cause::Os { errno: libc::ETIMEDOUT, call: "connect" });
}

#[test]
fn an_address_that_no_peer_made() {
    let endpoint = Endpoint::new("127.0.0.1");
    let (a, b) = (endpoint.end(), endpoint.end());
    let good = b.qp.address();
    assert!(good.len() <= 512);
    for bad in [&good[..good.len() - 1], b"", b"hello", &[0; 512]] {
        assert!(matches!(a.qp.connect(bad, true).unwrap_err().cause, Cause::Malformed { .. }));
    }
    assert_eq!(a.qp.state(), QueuePairState::Reset);
    a.qp.connect(&good, true).unwrap();
    let twice = a.qp.connect(&good, true).unwrap_err();
    assert!(matches!(twice.cause, Cause::State { needs: QueuePairState::Reset, .. }), "{twice}");
}

#[test]
fn a_peer_can_not_lead_an_end_beyond_loopback_where_that_is_forbidden() {
    // An address that this host has but loopback, where somebody listens: that nobody comes is seen.
    let beyond = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
    let own = beyond.connect("192.0.2.1:9").and_then(|()| beyond.local_addr());
    let elsewhere = own.map_or("192.0.2.1".parse().unwrap(), |own| own.ip());
    let tell = |addresses: Vec<SocketAddr>| Endpoint::with("127.0.0.1", move |config| config.advertised = addresses);
    let careful = Endpoint::with("127.0.0.1", |config| config.loopback_only = true);
    let mapped = SocketAddr::new("::ffff:192.0.2.1".parse().unwrap(), 9);
    for addresses in [vec![SocketAddr::new(elsewhere, 9)], vec![mapped], vec![SocketAddr::new(elsewhere, 9), mapped]] {
        let (hostile, end) = (tell(addresses), careful.end());
        let refused = end.qp.connect(&hostile.end().qp.address(), true).unwrap_err();
        assert!(matches!(refused.cause, Cause::Denied { .. }), "{refused}");
        assert_eq!(end.qp.state(), QueuePairState::Reset);
    }
    // Among others, its loopback addresses are dialled, in the notation of IPv6 too.
    let mixed = Endpoint::with("127.0.0.1", |config| {
        let port = config.advertised[0].port();
        let mapped = SocketAddr::new("::ffff:127.0.0.1".parse().unwrap(), port);
        config.advertised = vec![SocketAddr::new(elsewhere, 9), mapped, config.advertised[0]];
    });
    connect(&careful.end(), &mixed.end());
}

#[test]
fn an_end_without_a_port_can_only_be_the_active_one() {
    let (portless, ordinary) =
        (Endpoint::with("127.0.0.1", |config| config.advertised.clear()), Endpoint::new("127.0.0.1"));
    let (a, b) = (portless.end(), ordinary.end());
    assert!(matches!(b.qp.connect(&a.qp.address(), true).unwrap_err().cause, Cause::Malformed { .. }));
    connect(&a, &b);
}

#[test]
fn a_wrong_token_is_refused_and_its_stream_closed() {
    let endpoint = Endpoint::new("127.0.0.1");
    let end = endpoint.end();
    let mut token = token_of(&end.qp.address());
    token.0[15] ^= 1;
    let mut stream = TcpStream::connect(endpoint.address).unwrap();
    stream.write_all(&preface(token)).unwrap();
    assert!(closes(&mut stream));
    let (here, _there) = std::os::unix::net::UnixStream::pair().unwrap();
    let refused = endpoint.device.adopt(OwnedFd::from(here), token).unwrap_err();
    assert!(matches!(refused.cause, Cause::NotFound { .. }));
}

#[test]
fn a_token_is_good_for_the_streams_of_its_queue_pair_and_no_more() {
    let p = pair();
    let token = token_of(&p.b.qp.address());
    let mut late = TcpStream::connect(p._endpoints[1].address).unwrap();
    late.write_all(&preface(token)).unwrap();
    assert!(closes(&mut late));
    // The connection that is there does not mind.
    let (from, to) = (p.b.memory(4096), p.a.memory(4096));
    p.a.post(1, Opcode::Read, vec![slice(&to, 0, 4096)], Some(from.remote(0, 4096).unwrap()));
    assert_eq!(completion(&p.a, &p.b).status, CompletionStatus::Success);
}

#[test]
fn a_token_is_worth_nothing_once_its_queue_pair_is_gone() {
    let endpoint = Endpoint::new("127.0.0.1");
    let end = endpoint.end();
    let token = token_of(&end.qp.address());
    drop(end);
    let mut stream = TcpStream::connect(endpoint.address).unwrap();
    stream.write_all(&preface(token)).unwrap();
    assert!(closes(&mut stream));
}

#[test]
fn tokens_differ_and_are_not_printed() {
    let endpoint = Endpoint::new("127.0.0.1");
    let (a, b) = (endpoint.end(), endpoint.end());
    assert_ne!(token_of(&a.qp.address()), token_of(&b.qp.address()));
    assert_eq!(token_of(&a.qp.address()), token_of(&a.qp.address()));
    let secret = format!("{:?}", token_of(&a.qp.address()).0);
    assert!(!format!("{:?}", a.qp).contains(&secret[1..secret.len() - 1]));
}

#[test]
fn a_configuration_out_of_range_is_refused() {
    use towline_verbs::Provider;
    use towline_verbs::tcp::{TcpConfig, TcpProvider};
    let config = |advertised: Vec<&str>, streams| {
        let advertised = advertised.iter().map(|text| text.parse().unwrap()).collect();
        TcpProvider::new(TcpConfig { streams, ..TcpConfig::new(advertised, std::sync::Arc::new(preface)) })
    };
    assert!(matches!(config(vec![], 0).unwrap_err().cause, Cause::Limit { what: "streams", .. }));
    assert!(matches!(config(vec![], 5).unwrap_err().cause, Cause::Limit { what: "streams", .. }));
    assert!(matches!(config(vec!["127.0.0.1:1"; 17], 1).unwrap_err().cause, Cause::Limit { .. }));
    assert!(matches!(config(vec!["0.0.0.0:1"], 1).unwrap_err().cause, Cause::Unsupported { .. }));
    assert!(matches!(config(vec!["127.0.0.1:0"], 1).unwrap_err().cause, Cause::Unsupported { .. }));
    let provider = config(vec!["[fe80::1%2]:9"], 4).unwrap();
    let info = &provider.devices().unwrap()[0];
    assert_eq!(info.name, "tcp0");
    assert!(info.capabilities.scoped_keys && !info.capabilities.mappable && info.capabilities.max_sge > 1);
    assert!(matches!(provider.open("tcp1").unwrap_err().cause, Cause::NotFound { .. }));
}
