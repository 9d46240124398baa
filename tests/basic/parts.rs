//! Parts: names, types, shapes, and how their bytes arrive.

use crate::common::*;
use towline::{DType, PART_ALIGN, Part, PutOptions};

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
