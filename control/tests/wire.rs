//! The frames' bytes: what goes in comes out, and nothing else does.

#![allow(clippy::unwrap_used)] // in helpers too

mod common;

use common::{Parts, address, encoded, fixed_parts, parts};
use proptest::prelude::*;
use towline_control::address::Address;
use towline_control::wire::*;

const NO_LIMIT: u32 = u32::MAX;

/// Encodes `frame` with its kind, flags, or body changed by `change`, and a checksum that fits.
fn forged(frame: &Frame<'_>, change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut bytes = encoded(frame);
    change(&mut bytes);
    let len = u32::try_from(bytes.len() - HEADER_LEN).unwrap();
    bytes[8..12].copy_from_slice(&len.to_le_bytes());
    let crc = crc32c(&[&bytes[..12], &bytes[HEADER_LEN..]].concat());
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());
    bytes
}

/// CRC32C by its definition, so that the wire format does not hang on one crate's idea of it.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 })
    })
}

fn of_kind(parts: &Parts, kind: Kind) -> Frame<'_> {
    parts.frames().into_iter().find(|frame| frame.kind() == kind).unwrap()
}

proptest! {
    #[test]
    fn every_frame_survives_the_wire(parts in parts(), rest in prop::collection::vec(any::<u8>(), 0..40)) {
        for frame in parts.frames() {
            let mut bytes = encoded(&frame);
            let len = bytes.len();
            prop_assert_eq!(len, frame.encoded_len());
            bytes.extend(&rest);
            let (decoded, used) = Frame::decode(&bytes, NO_LIMIT).unwrap().unwrap();
            prop_assert_eq!((decoded, used), (frame, len));
            prop_assert_eq!(encoded(&decoded), &bytes[..len], "one frame, one form");
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = Frame::decode(&bytes, NO_LIMIT);
        let _ = Addresses::decode(&bytes);
    }

    #[test]
    fn arbitrary_bodies_are_refused_or_have_one_form(
        parts in parts(),
        kind in prop::sample::select(Kind::ALL.to_vec()),
        edits in prop::collection::vec(any::<(prop::sample::Index, u8)>(), 1..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let bytes = forged(&of_kind(&parts, kind), |bytes| {
            for (at, byte) in edits {
                let at = HEADER_LEN + at.index(bytes.len() - HEADER_LEN + 1);
                if at < bytes.len() { bytes[at] = byte } else { bytes.push(byte) }
            }
            if let Some(cut) = cut {
                bytes.truncate(HEADER_LEN + cut.index(bytes.len() - HEADER_LEN + 1));
            }
        });
        if let Ok(frame) = Frame::decode(&bytes, NO_LIMIT) {
            let (frame, used) = frame.expect("the frame is whole");
            prop_assert_eq!(used, bytes.len());
            prop_assert_eq!(encoded(&frame), bytes);
        }
    }

    #[test]
    fn address_lists_survive_the_wire(addresses in prop::collection::vec(address(), 0..=MAX_ADVERTISED)) {
        let list = AddressList::from_addresses(&addresses).unwrap();
        let bytes = [list.as_addresses().as_bytes(), b"rest"].concat();
        let (decoded, rest) = Addresses::decode(&bytes).unwrap();
        prop_assert_eq!(decoded.iter().collect::<Vec<_>>(), addresses);
        prop_assert_eq!((decoded.len(), rest), (list.as_addresses().len(), &b"rest"[..]));
        for cut in 0..decoded.as_bytes().len() {
            prop_assert!(Addresses::decode(&bytes[..cut]).is_none());
        }
    }

    #[test]
    fn addresses_survive_their_text(address in address()) {
        prop_assert_eq!(address.to_string().parse::<Address>(), Ok(address));
    }
}

#[test]
fn every_kind_is_tested() {
    let parts = fixed_parts();
    for kind in Kind::ALL {
        assert_eq!(of_kind(&parts, kind).kind(), kind);
    }
}

#[test]
fn the_form_is_pinned() {
    // What peers of other releases send: a change of these bytes is a change of the protocol's version.
    let frame = Frame::Watermark(Watermark { lease: 0x0102, watermark: 0xff00 });
    let body = [2, 1, 0, 0, 0, 0, 0, 0, 0, 0xff, 0, 0, 0, 0, 0, 0];
    let header = [b't', b'o', b'w', b'l', 37, 0, 0, 0, 16, 0, 0, 0];
    let crc = crc32c(&[&header[..], &body[..]].concat()).to_le_bytes();
    assert_eq!(encoded(&frame), [&header[..], &crc[..], &body[..]].concat());
}

#[test]
fn every_truncation_asks_for_more_and_every_flipped_bit_is_seen() {
    let parts = fixed_parts();
    for frame in parts.frames() {
        let bytes = encoded(&frame);
        for cut in 0..bytes.len() {
            assert_eq!(Frame::decode(&bytes[..cut], NO_LIMIT), Ok(None), "{:?} cut at {cut}", frame.kind());
        }
        for bit in 0..bytes.len() * 8 {
            let mut bytes = bytes.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            // A length made larger asks for bytes that never come; with a limit, at most for that many.
            let decoded = Frame::decode(&bytes, NO_LIMIT);
            let larger = (8..12).contains(&(bit / 8)) && bytes[bit / 8] & 1 << (bit % 8) != 0;
            assert_eq!(decoded.is_err(), !larger, "{:?} bit {bit}: {decoded:?}", frame.kind());
            assert!(!larger || decoded == Ok(None));
            bytes.resize(70_000, 0);
            assert!(Frame::decode(&bytes, 70_000).is_err(), "{:?} bit {bit}", frame.kind());
        }
    }
}

#[test]
fn every_shortened_and_lengthened_body_is_refused() {
    let parts = fixed_parts();
    for frame in parts.frames().into_iter().filter(|frame| frame.kind() != Kind::Handshake) {
        let body = encoded(&frame).len() - HEADER_LEN;
        for len in 0..body {
            let bytes = forged(&frame, |bytes| bytes.truncate(HEADER_LEN + len));
            assert!(Frame::decode(&bytes, NO_LIMIT).is_err(), "{:?} with a body of {len}", frame.kind());
        }
        let bytes = forged(&frame, |bytes| bytes.push(0));
        assert_eq!(Frame::decode(&bytes, NO_LIMIT), Err(WireError::Trailing { kind: frame.kind(), bytes: 1 }));
    }
}

#[test]
fn the_limit_holds_before_the_body_is_there() {
    let parts = fixed_parts();
    let bytes = encoded(&of_kind(&parts, Kind::Grant));
    let len = u32::try_from(bytes.len()).unwrap();
    assert!(Frame::decode(&bytes, len).unwrap().is_some());
    let error = WireError::TooLarge { need: len.into(), limit: len - 1 };
    assert_eq!(Frame::decode(&bytes, len - 1), Err(error));
    assert_eq!(Frame::decode(&bytes[..HEADER_LEN], len - 1), Err(error));
}

#[test]
fn each_fault_has_its_own_error() {
    let parts = fixed_parts();
    let decode = |bytes: &[u8]| Frame::decode(bytes, NO_LIMIT).map(|_| ());
    assert_eq!(decode(b"G"), Err(WireError::Magic { found: u32::from_le_bytes(*b"G\0\0\0") }));
    assert_eq!(decode(b"GET / HTTP/1.1\r\n"), Err(WireError::Magic { found: u32::from_le_bytes(*b"GET ") }));
    let goodbye = of_kind(&parts, Kind::Goodbye);
    let unknown = forged(&goodbye, |bytes| bytes[4..6].copy_from_slice(&999_u16.to_le_bytes()));
    assert_eq!(decode(&unknown), Err(WireError::UnknownKind { kind: 999 }));
    let value = |kind, at: usize, byte: u8| decode(&forged(&of_kind(&parts, kind), |bytes| bytes[at] = byte));
    for (kind, at, byte, what) in [
        (Kind::Goodbye, 6, 1, "flags"),
        (Kind::Grant, 6, 2, "flags"),
        (Kind::Get, 7, 0x80, "flags"),
        (Kind::Goodbye, HEADER_LEN + 3, 1, "a reserved byte"),
        (Kind::Hello, HEADER_LEN + 65, 1, "a reserved byte"),
        (Kind::Hello, HEADER_LEN, 99, "versions"),
        (Kind::Hello, HEADER_LEN + 5, 0x0f, "max_frame"),
        (Kind::Get, HEADER_LEN + 38, 7, "target"),
        (Kind::Get, HEADER_LEN + 24, 1, "target"),
        (Kind::Refuse, HEADER_LEN + 32, 0xff, "text"),
    ] {
        assert_eq!(value(kind, at, byte), Err(WireError::Value { kind, what }), "{kind:?} {at}");
    }
    let long_key = forged(&of_kind(&parts, Kind::Get), |bytes| {
        bytes[HEADER_LEN + 36..HEADER_LEN + 38].copy_from_slice(&1025_u16.to_le_bytes());
        bytes.resize(HEADER_LEN + 40 + 1025, 0);
    });
    let error = WireError::TooLong { kind: Kind::Get, what: "key", len: 1025, limit: MAX_KEY };
    assert_eq!(decode(&long_key), Err(error));
    let many = forged(&of_kind(&parts, Kind::Grant), |bytes| bytes[HEADER_LEN + 60..HEADER_LEN + 64].fill(0xff));
    assert_eq!(decode(&many), Err(WireError::Short { kind: Kind::Grant, what: "segments" }));
    for error in [decode(&many), decode(&long_key), decode(b"G")] {
        assert!(!error.unwrap_err().to_string().is_empty());
    }
}

#[test]
fn too_long_fields_are_not_written_and_long_texts_are_cut() {
    let parts = fixed_parts();
    let mut out = b"before".to_vec();
    let Frame::Get(get) = of_kind(&parts, Kind::Get) else { panic!() };
    let error = Frame::Get(Get { target: Target::Key(&[0; 1025]), ..get }).encode(&mut out).unwrap_err();
    assert_eq!(error, EncodeError { kind: Kind::Get, what: "key", len: 1025, limit: MAX_KEY });
    let Frame::QueuePairOpen(open) = of_kind(&parts, Kind::QueuePairOpen) else { panic!() };
    let error = Frame::QueuePairOpen(QueuePair { address: &[0; 513], ..open }).encode(&mut out).unwrap_err();
    assert_eq!((error.what, error.limit), ("address", MAX_ADDRESS));
    assert_eq!(out, b"before");

    let text = "\u{20ac}".repeat(1000);
    let refuse = Frame::Refuse(Refuse { request: 1, code: RefuseCode::Gone, need: 0, have: 0, text: &text });
    let bytes = encoded(&refuse);
    let Frame::Refuse(Refuse { text: cut, .. }) = Frame::decode(&bytes, NO_LIMIT).unwrap().unwrap().0 else { panic!() };
    assert_eq!(cut, &text[..MAX_TEXT / 3 * 3], "cut between characters");
    assert_eq!(bytes.len(), refuse.encoded_len());
}

#[test]
fn eager_bytes_are_filled_in_place() {
    let parts = fixed_parts();
    let Frame::Grant(grant) = of_kind(&parts, Kind::Grant) else { panic!() };
    let eager: Vec<u8> = (0..4096).map(|i| i as u8).collect();
    let mut filled = Vec::new();
    grant.encode_with(eager.len(), |bytes| bytes.copy_from_slice(&eager), &mut filled).unwrap();
    assert_eq!(filled, encoded(&Frame::Grant(Grant { eager: &eager, ..grant })));
    assert_eq!(filled.len(), grant.encoded_len_with(eager.len()));
}

#[test]
fn no_list_holds_more_than_eight_addresses() {
    let address: Address = "192.0.2.1:1".parse().unwrap();
    let mut list = AddressList::from_addresses(&vec![address.clone(); 8]).unwrap();
    assert!(list.push(&address).is_err());
    assert!(list.push(&"@name".parse().unwrap()).is_err());
    assert_eq!(list.as_addresses().len(), 8);
    let mut bytes = list.as_addresses().as_bytes().to_vec();
    bytes.extend_from_slice(&[4, 1, 0, 192, 0, 2, 1]);
    bytes[0] = 9;
    assert!(Addresses::decode(&bytes).is_none());
    for bad in [&b"\x01\x01\0\0\x03a b"[..], b"\x01\x01\0\0\x00", b"\x01\x07\0\0", b"\x01\x01\0\0\x02\xff\xff"] {
        assert!(Addresses::decode(bad).is_none(), "{bad:?}");
    }
}

#[test]
fn what_every_end_takes_is_enough_for_the_largest_hello_and_get() {
    let host = format!("{}:65535", "a".repeat(255));
    let addresses: Vec<Address> = vec![host.parse().unwrap(); 8];
    let mut parts = fixed_parts();
    parts.addresses = AddressList::from_addresses(&addresses).unwrap();
    parts.bytes = vec![b'x'; 107];
    assert!(encoded(&of_kind(&parts, Kind::Hello)).len() <= MIN_MAX_FRAME as usize);
    parts.bytes = vec![b'x'; MAX_KEY];
    assert!(encoded(&of_kind(&parts, Kind::Get)).len() <= MIN_MAX_FRAME as usize);
}

#[test]
fn remote_keys_are_not_printed() {
    let text = format!("{:?}", Segment::new(1, 2, 0xdead_beef));
    assert!(!text.contains("dead") && !text.contains(&0xdead_beef_u64.to_string()), "{text}");
}

#[test]
fn codes_keep_numbers_they_have_no_name_for() {
    for number in 0..=u16::MAX {
        assert_eq!(u16::from(RefuseCode::from(number)), number);
        assert_eq!(u16::from(RejectCode::from(number)), number);
        assert_eq!(u16::from(QueuePairCode::from(number)), number);
        assert_eq!(u16::from(GoodbyeCode::from(number)), number);
    }
    assert_eq!(RefuseCode::from(60_000), RefuseCode::Unknown(60_000));
    assert!((0..=u8::MAX).all(|number| u8::from(Outcome::from(number)) == number));
}
