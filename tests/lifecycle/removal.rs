//! Removing and replacing payloads.

use crate::common::*;
use crate::{LEASE, Stalled, TWO};
use towline::{ErrorKind, Gone, PutOptions};

#[test]
fn what_is_removed_is_gone_and_its_room_is_free() {
    let endpoint = endpoint(MIB);
    let ticket = Spec::bytes(MIB, 1).put(&endpoint, "key", &PutOptions::default()).unwrap();
    endpoint.remove(&ticket).unwrap();
    assert_whole(&endpoint);
    let error = endpoint.remove(&ticket).unwrap_err();
    assert_eq!(error.kind(), &ErrorKind::Gone(Gone::Removed));
    assert_eq!(endpoint.get(&ticket, LONG).unwrap_err().kind(), &ErrorKind::Gone(Gone::Removed));
    Spec::bytes(MIB, 1).put(&endpoint, "key", &PutOptions::default()).unwrap();
    assert!(endpoint.remove_key("key") && !endpoint.remove_key("key") && !endpoint.remove_key("another"));
    assert_whole(&endpoint);
}

#[test]
fn removing_what_was_consumed_says_so() {
    let (producer, consumer) = (endpoint(MIB), endpoint(MIB));
    let ticket = Spec::bytes(MIB, 1).put(&producer, "key", &PutOptions::default()).unwrap();
    drop(consumer.get(&ticket, LONG).unwrap());
    assert_whole(&producer);
    assert_eq!(producer.remove(&ticket).unwrap_err().kind(), &ErrorKind::Gone(Gone::Consumed));
    assert!(!producer.remove_key("key"));
}

#[test]
fn a_ticket_does_not_remove_the_payload_that_took_its_place() {
    let endpoint = endpoint(MIB);
    let old = Spec::bytes(1000, 1).put(&endpoint, "key", &PutOptions::default()).unwrap();
    let new = Spec::bytes(1000, 2).put(&endpoint, "key", &PutOptions::default()).unwrap();
    assert_eq!(endpoint.remove(&old).unwrap_err().kind(), &ErrorKind::Gone(Gone::Replaced));
    Spec::bytes(1000, 2).check(&endpoint.get(&new, LONG).unwrap());
}

#[test]
fn a_reader_keeps_a_payload_that_is_removed_under_it() {
    for way in TWO {
        let producer = way.options().pool(MIB).build().unwrap();
        let mut stalled = Stalled::new(way, LEASE);
        let spec = Spec::bytes(512 * KIB, 1);
        let ticket = spec.put(&producer, "key", &PutOptions::default()).unwrap();
        std::thread::scope(|scope| {
            let consumer = stalled.consumer.clone();
            let reading = scope.spawn({
                let ticket = ticket.clone();
                move || consumer.get(&ticket, LONG).unwrap()
            });
            until("the reader to have its lease", || producer.stats().leases == 1);
            producer.remove(&ticket).unwrap();
            assert_eq!((producer.stats().payloads, producer.stats().pool_buffers), (0, 1), "the reader holds it");
            // Whatever is allocated meanwhile is other memory.
            let mut other = producer.alloc(512 * KIB as usize).unwrap();
            other.as_mut_slice().fill(0xee);
            stalled.free();
            spec.check(&reading.join().unwrap());
        });
        assert_whole(&producer);
        assert_whole(&stalled.consumer);
    }
}

#[test]
fn a_reader_keeps_the_old_payload_when_its_key_is_put_again() {
    for way in TWO {
        let producer = way.options().pool(2 * MIB).build().unwrap();
        let mut stalled = Stalled::new(way, LEASE);
        let (old, new) = (Spec::bytes(512 * KIB, 1), Spec::bytes(512 * KIB, 2));
        old.put(&producer, "key", &PutOptions::default()).unwrap();
        std::thread::scope(|scope| {
            let (consumer, address) = (stalled.consumer.clone(), producer.address());
            let reading = scope.spawn(move || consumer.get((address, "key"), LONG).unwrap());
            until("the reader to have its lease", || producer.stats().leases == 1);
            new.put(&producer, "key", &PutOptions::default()).unwrap();
            // Another get gets the new one, while the first still reads the old one.
            let other = way.options().pool(MIB).build().unwrap();
            new.check(&other.get((producer.address(), "key"), LONG).unwrap());
            stalled.free();
            old.check(&reading.join().unwrap());
        });
        assert_whole(&producer);
    }
}

#[test]
fn a_waiting_get_survives_the_removal_of_a_payload_that_another_has() {
    // Two wait for one payload for one consumer; it is removed while the first reads. The second asked by key: the next
    // payload there is as good.
    let producer = endpoint(4 * MIB);
    let mut stalled = Stalled::new(Way::Direct, LEASE);
    let ticket = Spec::bytes(512 * KIB, 1).put(&producer, "key", &PutOptions::default()).unwrap();
    let second = endpoint(MIB);
    std::thread::scope(|scope| {
        let first = stalled.consumer.clone();
        let address = producer.address();
        let reading = scope.spawn(move || first.get((address, "key"), LONG).unwrap());
        until("the first to have its lease", || producer.stats().leases == 1);
        let waiting = scope.spawn(|| second.get((producer.address(), "key"), LONG).unwrap());
        let refused = endpoint(MIB);
        let by_ticket = scope.spawn({
            let ticket = ticket.clone();
            move || refused.get(&ticket, LONG).unwrap_err()
        });
        producer.remove(&ticket).unwrap();
        assert_eq!(by_ticket.join().unwrap().kind(), &ErrorKind::Gone(Gone::Removed));
        producer.wait_for_consumers("key", 1, LONG).unwrap();
        Spec::bytes(1000, 2).put(&producer, "key", &PutOptions::default()).unwrap();
        Spec::bytes(1000, 2).check(&waiting.join().unwrap());
        stalled.free();
        Spec::bytes(512 * KIB, 1).check(&reading.join().unwrap());
    });
    assert_whole(&producer);
}
