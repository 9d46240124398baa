//! Consumers: one or several, early or late, many at once.

use crate::common::*;
use std::time::Duration;
use towline::{ErrorKind, Gone, Path, PutOptions};

#[test]
fn a_payload_is_gone_after_its_one_consumer() {
    every_way(MIB, |pair| {
        let spec = Spec::bytes(200 * KIB, 1);
        let ticket = spec.put(&pair.here, "once", &PutOptions::default()).unwrap();
        match &pair.there {
            There::Here(endpoint) => {
                spec.check(&endpoint.get(&ticket, LONG).unwrap());
                let error = endpoint.get(&ticket, LONG).unwrap_err();
                assert_eq!(error.kind(), &ErrorKind::Gone(Gone::Consumed));
                assert_tells(&error, "get");
            }
            There::Apart(process) => {
                spec.check_got(&process.get(&ticket, LONG).unwrap());
                let failure = process.get(&ticket, LONG).unwrap_err();
                assert!(failure.is("Gone(Consumed)"), "{failure:?}");
            }
        }
        until_whole(&pair.here, |stats| stats.payloads == 0);
    });
}

#[test]
fn a_payload_is_for_as_many_consumers_as_it_says() {
    let producer = endpoint(MIB);
    let spec = Spec::bytes(100 * KIB, 1);
    let ticket = spec.put(&producer, "three", &for_consumers(3)).unwrap();
    let consumers: Vec<_> = (0..4).map(|_| endpoint(MIB)).collect();
    let results = together(4, |number| consumers[number].get(&ticket, LONG));
    let (got, refused): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
    assert_eq!((got.len(), refused.len()), (3, 1));
    for payload in got {
        spec.check(&payload.unwrap());
    }
    assert_eq!(refused[0].as_ref().unwrap_err().kind(), &ErrorKind::Gone(Gone::Consumed));
    assert_whole(&producer);
}

#[test]
fn of_two_receivers_on_one_key_the_other_gets_the_next_payload() {
    let (producer, consumers) = (endpoint(MIB), [endpoint(MIB), endpoint(MIB)]);
    std::thread::scope(|scope| {
        let gets = consumers
            .each_ref()
            .map(|consumer| scope.spawn(|| consumer.get((producer.address(), "key"), LONG).unwrap()));
        producer.wait_for_consumers("key", 2, LONG).unwrap();
        Spec::bytes(60 * KIB, 1).put(&producer, "key", &PutOptions::default()).unwrap();
        // One of them has it before there is another.
        until_whole(&producer, |stats| stats.payloads == 0 && stats.waiting == 1);
        Spec::bytes(60 * KIB, 2).put(&producer, "key", &PutOptions::default()).unwrap();
        let got = gets.map(|get| hash(get.join().unwrap().part(0).unwrap().bytes()));
        let expected = [1, 2].map(|seed| hash(&Spec::bytes(60 * KIB, seed).parts[0].bytes()));
        assert!(got == expected || got == [expected[1], expected[0]], "each payload once");
    });
    assert_whole(&producer);
}

#[test]
fn a_failed_get_does_not_use_up_the_payload() {
    let (producer, small, consumer) = (endpoint(MIB), endpoint(64 * KIB), endpoint(MIB));
    let spec = Spec::bytes(100 * KIB, 1);
    let ticket = spec.put(&producer, "kept", &PutOptions::default()).unwrap();
    let error = small.get(&ticket, LONG).unwrap_err();
    assert_eq!(error.kind(), &ErrorKind::PoolTooSmall { need: 100 * KIB, pool: 64 * KIB });
    spec.check(&consumer.get(&ticket, LONG).unwrap());
    assert_whole(&producer);
    assert_whole(&small);
}

#[test]
fn ten_puts_at_once_all_succeed() {
    let (producer, consumer) = (endpoint(16 * MIB), endpoint(16 * MIB));
    let tickets = together(10, |number| {
        let spec = Spec::bytes(MIB, number as u64);
        let spec = if number % 2 == 0 { spec } else { spec.copied() };
        spec.put(&producer, format!("put-{number}"), &PutOptions::default()).unwrap()
    });
    for (number, ticket) in tickets.iter().enumerate() {
        Spec::bytes(MIB, number as u64).check(&consumer.get(ticket, LONG).unwrap());
    }
    assert_whole(&producer);
}

#[test]
fn ten_threads_with_five_pairs_of_put_and_get_all_succeed() {
    let (left, right) = (endpoint(16 * MIB), endpoint(16 * MIB));
    together(10, |thread| {
        // Half of the threads carry one way, half the other, at the same time.
        let (producer, consumer) = if thread % 2 == 0 { (&left, &right) } else { (&right, &left) };
        for round in 0..5u64 {
            let spec = Spec::bytes(KIB << (2 * round), thread as u64 * 100 + round);
            let ticket = spec.put(producer, format!("{thread}/{round}"), &PutOptions::default()).unwrap();
            spec.check(&consumer.get(&ticket, LONG).unwrap());
        }
    });
    assert_eq!(left.stats().gets + right.stats().gets, 50);
    assert_whole(&left);
    assert_whole(&right);
}

#[test]
fn ten_producers_of_a_mebibyte_each_and_one_consumer() {
    let producers: Vec<_> = (0..10).map(|_| endpoint(2 * MIB)).collect();
    let consumer = endpoint(16 * MIB);
    let tickets = together(10, |number| {
        Spec::bytes(MIB, number as u64).put(&producers[number], "mine", &PutOptions::default()).unwrap()
    });
    let payloads: Vec<_> = tickets.iter().map(|ticket| consumer.get(ticket, LONG).unwrap()).collect();
    for (number, payload) in payloads.iter().enumerate() {
        Spec::bytes(MIB, number as u64).check(payload);
    }
    for producer in &producers {
        assert_whole(producer);
    }
    drop(payloads);
    assert_whole(&consumer);
}

#[test]
fn eight_producers_overlap_with_a_consumer() {
    let (producer, consumer) = (endpoint(16 * MIB), endpoint(8 * MIB));
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let (producer, sender) = (&producer, sender.clone());
            scope.spawn(move || {
                for round in 0..8 {
                    let spec = Spec::bytes(300 * KIB + thread, thread * 10 + round);
                    let ticket = spec.put(producer, format!("{thread}/{round}"), &PutOptions::default()).unwrap();
                    sender.send((spec, ticket)).unwrap();
                }
            });
        }
        drop(sender);
        let mut count = 0;
        for (spec, ticket) in receiver {
            spec.check(&consumer.get(&ticket, LONG).unwrap());
            count += 1;
        }
        assert_eq!(count, 64);
    });
    assert_whole(&producer);
    assert_whole(&consumer);
}

#[test]
fn many_keys_of_one_sender_go_to_one_receiver_and_many_senders_too() {
    // As ranks of a group do: one reads the keys of N, or N read the keys of one.
    let (one, many) = (endpoint(8 * MIB), (0..4).map(|_| endpoint(4 * MIB)).collect::<Vec<_>>());
    let spec = |rank: usize| Spec::bytes(256 * KIB, rank as u64);
    for (rank, sender) in many.iter().enumerate() {
        spec(rank).put(sender, format!("rank-{rank}"), &PutOptions::default()).unwrap();
    }
    let got = together(4, |rank| one.get((many[rank].address(), format!("rank-{rank}")), LONG).unwrap());
    for (rank, payload) in got.iter().enumerate() {
        spec(rank).check(payload);
    }
    drop(got);
    for rank in 0..4 {
        spec(rank).put(&one, format!("rank-{rank}"), &PutOptions::default()).unwrap();
    }
    together(4, |rank| spec(rank).check(&many[rank].get((one.address(), format!("rank-{rank}")), LONG).unwrap()));
    assert_whole(&one);
}

#[test]
fn a_get_that_comes_too_early_and_one_that_comes_late_get_the_same() {
    let (producer, early, late) = (endpoint(MIB), endpoint(MIB), endpoint(MIB));
    let spec = Spec::bytes(40 * KIB, 3);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| early.get((producer.address(), "key"), LONG).unwrap());
        producer.wait_for_consumers("key", 1, LONG).unwrap();
        spec.put(&producer, "key", &for_consumers(2)).unwrap();
        spec.check(&waiting.join().unwrap());
    });
    spec.check(&late.get((producer.address(), "key"), LONG).unwrap());
    assert_whole(&producer);
}

#[test]
fn what_was_carried_is_counted() {
    let (producer, consumer) = (endpoint(MIB), endpoint(MIB));
    for number in 0..3 {
        let ticket = Spec::bytes(1000, number).put(&producer, "n", &PutOptions::default()).unwrap();
        let payload = consumer.get(&ticket, LONG).unwrap();
        assert_eq!((payload.info().bytes, payload.info().retries, payload.info().rails), (1000, 0, 1));
        assert!(!payload.info().path_reason.is_empty());
    }
    assert!(consumer.get((producer.address(), "n"), SHORT).is_err());
    let (produced, consumed) = (producer.stats(), consumer.stats());
    assert_eq!((produced.puts, produced.gets), (3, 0));
    assert_eq!((consumed.gets, consumed.failures, consumed.retries), (3, 1, 0));
    assert_eq!(consumed.bytes.get(&Path::Direct), Some(&3000));
    assert_eq!((consumed.fallback_bytes, consumed.links), (0, 1));
}

#[test]
fn waiting_for_consumers_ends_at_its_deadline() {
    let producer = endpoint(MIB);
    let started = std::time::Instant::now();
    let error = producer.wait_for_consumers("nobody", 1, Duration::from_millis(100)).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::TimedOut { .. }), "{error}");
    assert!(started.elapsed() >= Duration::from_millis(100) && started.elapsed() < SLACK);
    producer.wait_for_consumers("nobody", 0, LONG).unwrap();
}
