//! Buffers of the pool, and typed access to them.

use crate::common::*;
use towline::{DType, PART_ALIGN, Part, PutOptions, TypeError};

#[test]
fn typed_access_gives_what_was_written() {
    let endpoint = endpoint(MIB);
    let values: Vec<f32> = (0..16).map(|n| n as f32 * 0.25 - 1.0).collect();
    let mut buffer = endpoint.alloc(64).unwrap();
    buffer.elements_mut::<f32>().unwrap().copy_from_slice(&values);
    assert_eq!(buffer.elements::<f32>().unwrap(), values);
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

#[test]
fn buffers_of_every_length_are_aligned_for_every_element() {
    let endpoint = Options::default().pool(MIB).granule(64).build().unwrap();
    let mut held = vec![];
    for len in [1, 16, 63, 64, 65, 100, 4096, 10_000] {
        let mut buffer = endpoint.alloc(len).unwrap();
        assert_eq!(buffer.elements_mut::<u8>().unwrap().len(), len);
        let whole = |size: usize| if len % size == 0 { Ok(len / size) } else { Err(length(len, size)) };
        assert_eq!(buffer.elements_mut::<u16>().map(|elements| elements.len()), whole(2));
        assert_eq!(buffer.elements_mut::<f32>().map(|elements| elements.len()), whole(4));
        assert_eq!(buffer.elements_mut::<i64>().map(|elements| elements.len()), whole(8));
        assert_eq!(buffer.elements::<[f64; 2]>().map(<[_]>::len), whole(16));
        held.push(buffer); // so that the next one begins elsewhere
    }
}

fn length(bytes: usize, size: usize) -> TypeError {
    TypeError::Length { bytes: bytes as u64, size: size as u64 }
}

#[test]
fn a_view_gives_elements_by_copies() {
    let (producer, consumer) = (endpoint(MIB), endpoint(MIB));
    let values: Vec<u32> = (0..10_000).collect();
    let mut buffer = producer.alloc(40_000).unwrap();
    buffer.elements_mut::<u32>().unwrap().copy_from_slice(&values);
    let parts = [Part::buffer("v", DType::U32, &[100, 100], buffer), Part::bytes("none", DType::F64, &[0], b"")];
    let ticket = producer.put("values", parts).unwrap();
    let view = consumer.view(ticket, LONG).unwrap();
    let part = view.named("v").unwrap();
    assert_eq!(part.to_elements::<u32>().unwrap(), values);
    let mut some = [0u32; 3];
    part.read_elements(9_997, &mut some).unwrap();
    assert_eq!(some, [9_997, 9_998, 9_999]);
    for first in [9_998, 10_001, u64::MAX / 4, u64::MAX] {
        let outside = TypeError::OutOfRange { first, count: 3, elements: 10_000 };
        assert_eq!(part.read_elements(first, &mut some), Err(outside));
    }
    assert_eq!(some, [9_997, 9_998, 9_999], "nothing is copied then");
    assert_eq!(part.to_elements::<f32>(), Err(TypeError::DType(DType::U32)));
    assert_eq!(part.read_elements(0, &mut [0i32; 1]), Err(TypeError::DType(DType::U32)));
    assert_eq!(view.named("none").unwrap().to_elements::<f64>(), Ok(vec![]));
    drop(view);
    assert_whole(&producer);
}
