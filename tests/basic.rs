//! Putting and getting: buffers, parts, keys, tickets, consumers.

#![allow(clippy::unwrap_used)] // also in the helpers of tests

mod common;

use common::*;
use std::time::Duration;
use towline::{DType, ErrorKind, Gone, PART_ALIGN, Part, Path, PutOptions, Ticket};

// Buffers.

#[test]
fn typed_access_gives_what_was_written() {
    let endpoint = endpoint(MIB);
    let values: Vec<f32> = (0..16).map(|n| n as f32 * 0.25 - 1.0).collect();
    let mut buffer = endpoint.alloc(64).unwrap();
    for (chunk, value) in buffer.as_mut_slice().chunks_exact_mut(4).zip(&values) {
        chunk.copy_from_slice(&value.to_le_bytes());
    }
    assert_eq!((buffer.len(), buffer.is_empty()), (64, false));
    let ticket = endpoint.put("matrix", [Part::buffer("m", DType::F32, &[4, 4], buffer)]).unwrap();
    let payload = endpoint.get(ticket, LONG).unwrap();
    let part = payload.part(0).unwrap();
    assert_eq!(part.elements::<f32>().unwrap(), values);
    assert_eq!((part.layout().dtype, &part.layout().shape[..]), (DType::F32, &[4, 4][..]));
    assert!(part.elements::<f64>().is_err() && part.elements::<u8>().is_err(), "it holds no such elements");
}

#[test]
fn dropping_a_buffer_makes_its_room_free_again() {
    let endpoint = endpoint(MIB);
    let first = endpoint.alloc(MIB as usize).unwrap();
    assert_eq!((endpoint.stats().pool_free, endpoint.stats().pool_buffers), (0, 1));
    let offset = first.offset();
    drop(first);
    assert_whole(&endpoint);
    assert_eq!(endpoint.alloc(MIB as usize).unwrap().offset(), offset, "the same room");
}

#[test]
fn buffers_are_aligned_and_do_not_overlap() {
    for granule in [64, 4096, 64 * KIB] {
        let endpoint = Options::default().pool(4 * MIB).granule(granule).build().unwrap();
        let mut buffers: Vec<_> = [1, 63, 64, 65, 100, 100, 4095, 4096, 4097, 70_000]
            .iter()
            .map(|len| endpoint.alloc(*len).unwrap())
            .collect();
        for (number, buffer) in buffers.iter_mut().enumerate() {
            assert_eq!(buffer.offset() % granule, 0);
            assert_eq!(buffer.as_slice().as_ptr() as u64 % PART_ALIGN, 0);
            buffer.as_mut_slice().fill(number as u8);
        }
        for (number, buffer) in buffers.iter().enumerate() {
            assert!(buffer.iter().all(|byte| *byte == number as u8), "buffer {number} was written by another");
        }
        let taken: u64 = buffers.iter().map(|buffer| (buffer.len() as u64).next_multiple_of(granule)).sum();
        assert_eq!(endpoint.stats().pool_free, 4 * MIB - taken);
    }
}

#[test]
fn a_received_payload_can_be_put_again_without_a_copy() {
    let (first, second) = (endpoint(MIB), endpoint(MIB));
    let spec = Spec::bytes(200 * KIB, 5);
    let ticket = spec.put(&first, "once", &PutOptions::default()).unwrap();
    let payload = second.get(&ticket, LONG).unwrap();
    let at = payload.part(0).unwrap().bytes().as_ptr();
    let buffer = payload.into_buffer().unwrap();
    assert_eq!(buffer.as_slice().as_ptr(), at);
    let again = second.put("twice", [Part::buffer("bytes", DType::U8, &[200 * KIB], buffer)]).unwrap();
    assert_eq!(second.stats().pool_buffers, 1, "no other room was taken");
    spec.check(&first.get(&again, LONG).unwrap());
    for endpoint in [&first, &second] {
        assert_whole(endpoint);
    }
}

// Parts.

#[test]
fn bytes_of_the_caller_arrive_over_every_way() {
    every_way(16 * MIB, |pair| {
        pair.carry("bytes", &Spec::bytes(12_000, 1).copied());
        pair.carry_back("bytes", &Spec::bytes(12_000, 2).copied());
        pair.assert_whole();
    });
}

#[test]
fn four_mebibytes_of_f32_arrive_over_every_way() {
    every_way(16 * MIB, |pair| {
        let spec = Spec::of([part("f32", DType::F32, &[1024, 1024], 3)]);
        pair.carry("tensor", &spec);
        pair.carry_back("tensor", &spec.copied());
        pair.assert_whole();
    });
}

#[test]
fn a_tree_of_64_parts_arrives_over_every_way() {
    every_way(16 * MIB, |pair| {
        pair.carry("tree", &Spec::tree(7));
        pair.carry_back("tree", &Spec::tree(8));
        pair.carry("tree", &Spec::tree(9).copied());
        pair.assert_whole();
    });
}

#[test]
fn a_sequence_of_types_arrives_in_order_over_every_way() {
    every_way(16 * MIB, |pair| {
        let sequence = [
            Spec::of([part("a", DType::F32, &[128, 64], 1)]),
            Spec::of([part("b", DType::F16, &[3, 5, 7, 11], 2)]),
            Spec::of([part("c", DType::I64, &[1000], 3)]),
            Spec::bytes(1_000_000, 4).copied(),
            Spec::tree(5),
        ];
        for (number, spec) in sequence.iter().enumerate() {
            pair.carry(&format!("step-{number}"), spec);
        }
        pair.assert_whole();
    });
}

#[test]
fn every_dtype_and_its_elements_arrive() {
    let (producer, consumer) = (endpoint(MIB), endpoint(MIB));
    let spec = Spec::of(Spec::DTYPES.map(|dtype| part(dtype.name(), dtype, &[3, 2], 11)));
    let ticket = spec.put(&producer, "types", &PutOptions::default()).unwrap();
    let payload = consumer.get(&ticket, LONG).unwrap();
    spec.check(&payload);
    let of = |dtype: DType| payload.named(dtype.name()).unwrap();
    assert_eq!(of(DType::U8).elements::<u8>().unwrap().len(), 6);
    assert_eq!(of(DType::Bool).elements::<u8>().unwrap().len(), 6);
    assert_eq!(of(DType::BF16).elements::<u16>().unwrap().len(), 6);
    assert_eq!(of(DType::I32).elements::<i32>().unwrap().len(), 6);
    assert_eq!(of(DType::U64).elements::<u64>().unwrap().len(), 6);
    assert_eq!(of(DType::F64).elements::<f64>().unwrap().len(), 6);
    assert_eq!(of(DType::Complex128).elements::<[f64; 2]>().unwrap().len(), 6);
    assert!(of(DType::I8).elements::<u8>().is_err());
}

#[test]
fn parts_are_found_by_index_and_name_and_lie_where_the_layout_says() {
    let endpoint = endpoint(MIB);
    let spec = Spec::of([
        part("x", DType::U8, &[70], 1),
        part("y", DType::U16, &[1], 2),
        part("x", DType::U8, &[5], 3),
        part("", DType::U8, &[1], 4),
    ]);
    let ticket = spec.put(&endpoint, "names", &PutOptions::default()).unwrap();
    let payload = endpoint.get(&ticket, LONG).unwrap();
    spec.check(&payload);
    assert_eq!(payload.named("x").unwrap().bytes().len(), 70, "the first of that name");
    assert_eq!(payload.named("").unwrap().bytes().len(), 1);
    assert!(payload.named("z").is_none() && payload.part(4).is_none());
    assert_eq!(payload.layout(), ticket.layout());
    let offsets: Vec<u64> = payload.layout().offsets().collect();
    assert_eq!(offsets, [0, 128, 192, 256]);
    let start = payload.part(0).unwrap().bytes().as_ptr() as u64;
    for (part, offset) in payload.parts().zip(offsets) {
        assert_eq!(part.bytes().as_ptr() as u64, start + offset);
        assert_eq!(part.bytes().as_ptr() as u64 % PART_ALIGN, 0);
    }
}

#[test]
fn zero_length_parts_are_parts_over_every_way() {
    every_way(MIB, |pair| {
        let mixed = Spec::of([
            part("none", DType::F32, &[0], 1),
            part("some", DType::F32, &[100, 100], 2),
            part("nothing", DType::BF16, &[7, 0, 3], 3),
            part("scalar", DType::F64, &[], 4),
        ]);
        pair.carry("mixed", &mixed);
        let nothing = Spec::of([part("none", DType::U8, &[0], 1), part("more of it", DType::I64, &[0, 5], 2)]);
        pair.carry("nothing", &nothing);
        pair.carry_back("nothing", &nothing.copied());
        pair.assert_whole();
    });
}

#[test]
fn one_element_arrives_over_every_way() {
    every_way(MIB, |pair| {
        pair.carry("one", &Spec::of([part("one", DType::F32, &[1], 1)]));
        pair.carry_back("one", &Spec::of([part("one", DType::U8, &[1], 2)]).copied());
        pair.assert_whole();
    });
}

#[test]
fn a_buffer_written_in_place_is_published_where_it_lies() {
    let (producer, consumer) = (endpoint(8 * MIB), endpoint(8 * MIB));
    let mut buffer = producer.alloc(4 * MIB as usize).unwrap();
    fill(21, &mut buffer);
    let (offset, before) = (buffer.offset(), producer.stats());
    let ticket = producer.put("in place", [Part::buffer("bytes", DType::U8, &[4 * MIB], buffer)]).unwrap();
    let after = producer.stats();
    assert_eq!((after.pool_buffers, after.pool_free), (before.pool_buffers, before.pool_free), "nothing was copied");
    Spec::bytes(4 * MIB, 21).check(&consumer.get(&ticket, LONG).unwrap());
    assert_whole(&producer);
    assert_eq!(producer.alloc(4 * MIB as usize).unwrap().offset(), offset);
}

#[test]
fn copied_and_in_place_parts_of_one_payload_are_both_right() {
    let (producer, consumer) = (endpoint(32 * MIB), endpoint(32 * MIB));
    let spec = Spec::of([
        part("in place", DType::U8, &[3 * MIB], 1),
        part("copied", DType::U8, &[9 * MIB + 5], 2),
        part("little", DType::U8, &[3], 3),
        part("in place too", DType::U8, &[MIB], 4),
    ]);
    let copied = [spec.parts[1].bytes(), spec.parts[2].bytes()];
    let in_place = |index: usize| {
        let mut buffer = producer.alloc(spec.parts[index].len() as usize).unwrap();
        fill(spec.parts[index].seed, &mut buffer);
        let part = &spec.parts[index];
        Part::buffer(&part.name, part.dtype, &part.shape, buffer)
    };
    let copy = |index: usize, bytes| {
        let part = &spec.parts[index];
        Part::bytes(&part.name, part.dtype, &part.shape, bytes)
    };
    let parts = [in_place(0), copy(1, &copied[0]), copy(2, &copied[1]), in_place(3)];
    let ticket = producer.put("both", parts).unwrap();
    spec.check(&consumer.get(&ticket, LONG).unwrap());
    assert_whole(&producer);
}

#[test]
fn a_consumer_that_waits_reads_behind_the_copy() {
    let (producer, consumer) = (tcp_endpoint(128 * MIB), tcp_endpoint(128 * MIB));
    // Copied in steps; the reader is told how far they are, and must not be faster than they are.
    let spec = Spec::of([part("a", DType::U8, &[40 * MIB], 1), part("b", DType::U8, &[24 * MIB + 1], 2)]).copied();
    for round in 0..3 {
        let key = format!("behind-{round}");
        std::thread::scope(|scope| {
            let got = scope.spawn(|| consumer.get((producer.address(), &key), LONG).unwrap());
            producer.wait_for_consumers(&key, 1, LONG).unwrap();
            spec.put(&producer, &key, &PutOptions::default()).unwrap();
            spec.check(&got.join().unwrap());
        });
    }
    assert_whole(&producer);
    assert_whole(&consumer);
}

#[test]
fn a_payload_goes_into_memory_of_the_callers_own() {
    let (producer, consumer) = (endpoint(MIB), endpoint(MIB));
    for spec in [Spec::bytes(100, 1), Spec::tree(2), Spec::bytes(500 * KIB, 3)] {
        let ticket = spec.put(&producer, "own", &PutOptions::default()).unwrap();
        let need = ticket.layout().destination_len() as usize;
        let destination = vec![0xaa; need + 100];
        let at = destination.as_ptr();
        let payload = consumer.get_into(&ticket, destination, LONG).unwrap();
        spec.check(&payload);
        assert_eq!(consumer.stats().pool_buffers, 0, "the pool is not used");
        let offsets: Vec<u64> = ticket.layout().offsets().collect();
        let bytes = payload.into_vec().unwrap();
        assert_eq!((bytes.as_ptr(), bytes.len()), (at, need + 100), "the same memory comes back");
        for (part, offset) in spec.parts.iter().zip(offsets) {
            let offset = offset as usize;
            assert_eq!(&bytes[offset..offset + part.len() as usize], part.bytes());
        }
        assert!(bytes[need..].iter().all(|byte| *byte == 0xaa), "nothing is written behind the payload");
        assert_whole(&producer);
    }
}

// Keys and tickets.

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

// Consumers.

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
