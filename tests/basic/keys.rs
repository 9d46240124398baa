//! Keys and tickets.

use crate::common::*;
use towline::{DType, ErrorKind, Gone, Part, PutOptions, Ticket};

#[test]
fn a_get_by_key_waits_for_the_put() {
    every_way(MIB, |pair| {
        let There::Here(producer) = &pair.there else {
            let There::Apart(process) = &pair.there else { unreachable!() };
            std::thread::scope(|scope| {
                let got = scope.spawn(|| pair.here.get((&process.address, "later"), LONG).unwrap());
                process.wait_for_consumers("later", 1);
                process.put("later", &Spec::bytes(100 * KIB, 1)).unwrap();
                Spec::bytes(100 * KIB, 1).check(&got.join().unwrap());
            });
            return;
        };
        std::thread::scope(|scope| {
            let got = scope.spawn(|| pair.here.get((producer.address(), "later"), LONG).unwrap());
            producer.wait_for_consumers("later", 1, LONG).unwrap();
            Spec::bytes(100 * KIB, 1).put(producer, "later", &PutOptions::default()).unwrap();
            Spec::bytes(100 * KIB, 1).check(&got.join().unwrap());
        });
    });
}

#[test]
fn a_ticket_is_one_word_and_works_as_text_and_bytes() {
    let (producer, consumer) = (endpoint(MIB), endpoint(MIB));
    let spec = Spec::tree(1);
    let ticket = spec.put(&producer, "ticket", &for_consumers(2)).unwrap();
    let text = ticket.to_string();
    assert!(text.starts_with("towline1:") && !text.contains(char::is_whitespace));
    assert_eq!(ticket.addresses(), [producer.address()]);
    assert_eq!(ticket.layout().payload_len(), spec.len());
    spec.check(&consumer.get(text.parse::<Ticket>().unwrap(), LONG).unwrap());
    spec.check(&consumer.get(Ticket::from_bytes(&ticket.to_bytes()).unwrap(), LONG).unwrap());
    assert_whole(&producer);
}

#[test]
fn keys_are_any_bytes_up_to_their_limit() {
    let (producer, consumer) = (endpoint(MIB), endpoint(MIB));
    let keys: [&[u8]; 5] = [b"k", "Schlüssel/\u{1f511}".as_bytes(), &[0], &[0xff; 1024], b"a b\tc\n"];
    for (number, key) in keys.iter().enumerate() {
        Spec::bytes(100, number as u64).put(&producer, key, &PutOptions::default()).unwrap();
    }
    for (number, key) in keys.iter().enumerate().rev() {
        Spec::bytes(100, number as u64).check(&consumer.get((producer.address(), key), LONG).unwrap());
    }
    assert_whole(&producer);
}

#[test]
fn ten_thousand_keys_are_kept_apart() {
    const KEYS: u64 = 10_000;
    let producer = Options::default().pool(MIB).granule(64).build().unwrap();
    let consumer = endpoint(MIB);
    for number in 0..KEYS {
        producer.put(number.to_le_bytes(), [Part::bytes("n", DType::U64, &[], &number.to_le_bytes())]).unwrap();
    }
    assert_eq!(producer.stats().payloads, KEYS);
    // In an order that is not the one in which they were put.
    for step in 0..KEYS {
        let number = step * 7919 % KEYS;
        let payload = consumer.get((producer.address(), number.to_le_bytes()), LONG).unwrap();
        assert_eq!(payload.part(0).unwrap().elements::<u64>().unwrap(), [number]);
    }
    assert_whole(&producer);
    assert_eq!(consumer.stats().gets, KEYS);
}

#[test]
fn an_endpoint_gets_from_itself() {
    for endpoint in [endpoint(4 * MIB), tcp_endpoint(4 * MIB)] {
        for spec in [Spec::bytes(100, 1), Spec::bytes(MIB, 2), Spec::tree(3).copied()] {
            let ticket = spec.put(&endpoint, "self", &PutOptions::default()).unwrap();
            spec.check(&endpoint.get(&ticket, LONG).unwrap());
            std::thread::scope(|scope| {
                let got = scope.spawn(|| endpoint.get((endpoint.address(), "self"), LONG).unwrap());
                endpoint.wait_for_consumers("self", 1, LONG).unwrap();
                spec.put(&endpoint, "self", &PutOptions::default()).unwrap();
                spec.check(&got.join().unwrap());
            });
        }
        assert_whole(&endpoint);
    }
}

#[test]
fn a_put_under_the_same_key_replaces_what_is_there() {
    let (producer, consumer) = (endpoint(MIB), endpoint(MIB));
    let old = Spec::bytes(100 * KIB, 1).put(&producer, "key", &PutOptions::default()).unwrap();
    let new = Spec::bytes(50 * KIB, 2).put(&producer, "key", &PutOptions::default()).unwrap();
    assert_eq!((producer.stats().payloads, producer.stats().pool_buffers), (1, 1), "the old one's room is free");
    let error = consumer.get(&old, LONG).unwrap_err();
    assert_eq!(error.kind(), &ErrorKind::Gone(Gone::Replaced));
    Spec::bytes(50 * KIB, 2).check(&consumer.get((producer.address(), "key"), LONG).unwrap());
    assert_eq!(consumer.get(&new, LONG).unwrap_err().kind(), &ErrorKind::Gone(Gone::Consumed));
    assert_whole(&producer);
}
