//! Peers that say they are somebody else. Without a secret nothing in a greeting is proven, and everybody's name is in the
//! greetings that they give (I4, I7, I14): so a name alone opens nothing.

#![allow(clippy::unwrap_used)] // also in the helpers of tests

mod common;

use common::*;
use std::time::Duration;
use towline::{DType, Endpoint, Limits, Part, PutOptions, Ticket};
use towline_control::session::SessionConfig;
use towline_control::wire::{Cancel, Frame, GetFlags, Outcome, RefuseCode, Target};

fn incarnation_of(ticket: &Ticket) -> [u8; 16] {
    ticket.to_bytes()[17..33].try_into().unwrap()
}

/// A peer that says it is the endpoint of this incarnation.
fn in_the_name_of(incarnation: [u8; 16]) -> SessionConfig {
    let mut config = session_config();
    config.identity.incarnation = incarnation;
    config
}

fn limited(change: impl FnOnce(&mut Limits)) -> Endpoint {
    let mut limits = Limits::default();
    change(&mut limits);
    Options::default().pool(MIB).paths("tcp").builder().limits(limits).build().unwrap()
}

#[test]
fn who_connects_in_a_producers_name_is_not_asked_for_its_payloads() {
    let (producer, consumer) = (tcp_endpoint(MIB), tcp_endpoint(MIB));
    let spec = Spec::bytes(100_000, 1);
    let ticket = spec.put(&producer, "k", &for_consumers(10)).unwrap();
    // Before the consumer has a link to the producer, and while it has one.
    let _first = Consumer::connect(&consumer.address(), in_the_name_of(incarnation_of(&ticket))).open();
    spec.check(&consumer.get(&ticket, LONG).unwrap());
    let _second = Consumer::connect(&consumer.address(), in_the_name_of(incarnation_of(&ticket))).open();
    spec.check(&consumer.get(&ticket, LONG).unwrap());
    spec.check(&consumer.get((producer.address(), "k"), LONG).unwrap());
    producer.remove(&ticket).unwrap();
    assert_whole(&producer);
}

#[test]
fn who_is_asked_at_his_own_address_is_not_asked_for_anothers_payloads() {
    let (producer, consumer) = (tcp_endpoint(MIB), tcp_endpoint(MIB));
    let spec = Spec::bytes(100_000, 2); // not what the other one has
    let ticket = spec.put(&producer, "k", &for_consumers(10)).unwrap();
    let name = incarnation_of(&ticket);
    let forging = Producer::start(in_the_name_of(name), |_| Answer::Grant(Granting::rendezvous(100_000)));
    for _ in 0..3 {
        // The caller asks there by himself, and gets what is there.
        let theirs = consumer.get((&forging.address, "k"), LONG).unwrap();
        assert_eq!(theirs.info().bytes, 100_000);
        spec.check(&consumer.get(&ticket, LONG).unwrap());
        spec.check(&consumer.get((producer.address(), "k"), LONG).unwrap());
    }
    producer.remove(&ticket).unwrap();
    assert_whole(&producer);
    assert_whole(&consumer);
}

#[test]
fn a_lease_is_not_closed_or_renewed_in_its_holders_name() {
    let producer = tcp_endpoint(MIB);
    let spec = Spec::bytes(64 * KIB, 1);
    spec.put(&producer, "key", &PutOptions::default()).unwrap();
    let config = session_config();
    let mut holder = Consumer::connect(&producer.address(), config.clone()).open();
    let granted = holder.lease("key");
    let mut impostor = Consumer::connect(&producer.address(), config).open();
    let every: Vec<_> = (0..100).map(|number| (number, Outcome::Delivered)).collect();
    impostor.close(&every);
    impostor.send(&Frame::Cancel(Cancel { request: granted.request }));
    impostor.keep_alive(1, &[granted.lease]);
    assert!(matches!(impostor.hear().unwrap(), Said::KeptAlive(unknown) if unknown == [granted.lease]));
    assert_eq!((producer.stats().leases, producer.stats().payloads), (1, 1));
    assert!(holder.read(granted.segments[0]).unwrap() == spec.parts[0].bytes());
    holder.close(&[(granted.lease, Outcome::Delivered)]);
    assert_whole(&producer);
}

#[test]
fn gets_are_not_cancelled_in_their_consumers_name() {
    let producer = tcp_endpoint(MIB);
    let config = session_config();
    let mut consumer = Consumer::connect(&producer.address(), config.clone()).open();
    let waits = consumer.ask(Target::Key(b"later"), 0, GetFlags::empty());
    producer.wait_for_consumers("later", 1, LONG).unwrap();
    let mut impostor = Consumer::connect(&producer.address(), config).open();
    for request in 0..50 {
        impostor.send(&Frame::Cancel(Cancel { request }));
    }
    impostor.keep_alive(1, &[]);
    assert!(matches!(impostor.hear().unwrap(), Said::KeptAlive(_)));
    // One that waits, and one that comes only now.
    Spec::bytes(100, 1).put(&producer, "later", &for_consumers(2)).unwrap();
    assert_eq!(consumer.hear().unwrap().granted().request, waits);
    let granted = consumer.lease("later");
    consumer.close(&[(granted.lease, Outcome::Delivered)]);
}

#[test]
fn one_address_has_four_times_the_leases_of_a_peer_however_often_it_connects() {
    let producer = limited(|limits| limits.leases_per_peer = 1);
    Spec::bytes(64 * KIB, 1).put(&producer, "key", &for_consumers(10)).unwrap();
    let mut peers: Vec<Consumer> =
        (0..5).map(|_| Consumer::connect(&producer.address(), session_config()).open()).collect();
    let leases: Vec<_> = peers.iter_mut().take(4).map(|peer| peer.lease("key")).collect();
    for peer in [0, 4] {
        peers[peer].ask(Target::Key(b"key"), 0, GetFlags::empty());
        assert!(matches!(peers[peer].hear().unwrap(), Said::Refused(_, RefuseCode::TooManyLeases, 1)));
    }
    peers[0].close(&[(leases[0].lease, Outcome::Failed)]);
    until("a lease to be over", || producer.stats().leases == 3);
    peers[4].lease("key");
}

#[test]
fn a_lease_of_many_keys_counts_as_many() {
    let producer = limited(|limits| limits.leases_per_peer = 2);
    let names: Vec<String> = (0..128).map(|part| part.to_string()).collect();
    let parts = names.iter().map(|name| Part::bytes(name, DType::U8, &[100], &[7; 100]));
    producer.put_with("many", parts, &for_consumers(10)).unwrap();
    let mut peer = Consumer::connect(&producer.address(), session_config()).open();
    let lease = peer.lease("many"); // 128 keys, as eight leases: all that one address may have
    peer.ask(Target::Key(b"many"), 0, GetFlags::empty());
    assert!(matches!(peer.hear().unwrap(), Said::Refused(_, RefuseCode::TooManyLeases, 2)));
    peer.close(&[(lease.lease, Outcome::Failed)]);
    until("the lease to be over", || producer.stats().leases == 0);
    peer.lease("many");
}

#[test]
fn one_address_has_four_times_the_waiting_gets_of_a_peer_however_often_it_connects() {
    let producer = limited(|limits| limits.waiting_per_peer = 1);
    let mut peers: Vec<Consumer> =
        (0..5).map(|_| Consumer::connect(&producer.address(), session_config()).open()).collect();
    for peer in &mut peers[..4] {
        peer.ask(Target::Key(b"key"), 0, GetFlags::empty());
    }
    producer.wait_for_consumers("key", 4, LONG).unwrap();
    for peer in [0, 4] {
        peers[peer].ask(Target::Key(b"key"), 0, GetFlags::empty());
        assert!(matches!(peers[peer].hear().unwrap(), Said::Refused(_, RefuseCode::TooManyRequests, 1)));
    }
    // Those of a connection that ends count no more.
    peers.remove(0);
    until("one to have left", || producer.stats().waiting == 3);
    peers[3].ask(Target::Key(b"key"), 0, GetFlags::empty());
    producer.wait_for_consumers("key", 4, LONG).unwrap();
}

#[test]
fn with_a_secret_each_endpoint_counts_for_itself() {
    let mut limits = Limits::default();
    limits.waiting_per_peer = 1;
    let secret = "known to all of them";
    let producer = Options::default().pool(MIB).paths("tcp").secret(secret).builder().limits(limits).build().unwrap();
    let consumers: Vec<_> =
        (0..3).map(|_| Options::default().pool(MIB).paths("tcp").secret(secret).build().unwrap()).collect();
    std::thread::scope(|scope| {
        let gets: Vec<_> = consumers
            .iter()
            .map(|consumer| scope.spawn(|| consumer.get((producer.address(), "key"), LONG).unwrap()))
            .collect();
        producer.wait_for_consumers("key", 3, LONG).unwrap();
        Spec::bytes(100, 1).put(&producer, "key", &for_consumers(3)).unwrap();
        for get in gets {
            Spec::bytes(100, 1).check(&get.join().unwrap());
        }
    });
}

#[test]
fn a_delivery_that_is_told_after_its_lease_was_fenced_still_counts() {
    let lease = Duration::from_millis(700);
    let producer = Options::default().pool(MIB).paths("tcp").lease(lease).build().unwrap();
    let ticket = Spec::bytes(64 * KIB, 1).put(&producer, "key", &PutOptions::default()).unwrap();
    let config = session_config();
    let mut consumer = Consumer::connect(&producer.address(), config.clone()).open();
    let granted = consumer.lease("key");
    until("the lease to be fenced", || producer.stats().leases == 0);
    assert_eq!(producer.stats().payloads, 1, "another consumer may have it, as far as is known");
    consumer.close(&[(granted.lease, Outcome::Delivered)]);
    until("the payload to be had", || producer.stats().payloads == 0);
    assert!(producer.remove(&ticket).is_err());
    assert_whole(&producer);
    // Also when it is told over another link, and once however often it is told.
    let ticket = Spec::bytes(64 * KIB, 1).put(&producer, "key", &for_consumers(2)).unwrap();
    let granted = consumer.lease("key");
    drop(consumer);
    until("the lease to be fenced", || producer.stats().leases == 0);
    let mut consumer = Consumer::connect(&producer.address(), config).open();
    for _ in 0..3 {
        consumer.close(&[(granted.lease, Outcome::Delivered)]);
    }
    let last = consumer.lease("key");
    consumer.close(&[(last.lease, Outcome::Delivered)]);
    until("the payload to be had", || producer.remove(&ticket).is_err());
}
