//! Bodies of fuzz targets: each takes any bytes and panics if a promise is broken. An ordinary test runs them too.

use crate::preface::{Preface, Purpose};
use crate::session::{Event, Identity, Limits, Role, Secret, Session, SessionConfig};
use crate::wire::{self, AddressList, Addresses, Frame, HEADER_LEN, Kind, MIN_MAX_FRAME};

/// Bytes as a frame: as they are, and as kind, flags and body under a checksum that fits.
pub fn fuzz_frame(data: &[u8]) {
    check_frame(data);
    if let Some((kind, flags, body)) = forged(data) {
        let mut bytes = Vec::new();
        wire::forge(kind, flags, body, &mut bytes);
        check_frame(&bytes);
    }
    if let Some((addresses, rest)) = Addresses::decode(data) {
        assert_eq!(addresses.as_bytes().len() + rest.len(), data.len());
        let list: Vec<_> = addresses.iter().collect();
        assert_eq!(list.len(), addresses.len());
        let again = AddressList::from_addresses(&list);
        assert_eq!(again.map(|list| list.as_addresses().as_bytes().to_vec()).as_deref(), Ok(addresses.as_bytes()));
    }
}

/// What is taken for a frame has this one form.
fn check_frame(bytes: &[u8]) {
    if let Ok(Some((frame, len))) = Frame::decode(bytes, u32::MAX) {
        let mut again = Vec::new();
        assert_eq!(frame.encode(&mut again), Ok(()));
        assert_eq!(again, bytes[..len]);
        assert_eq!(frame.encoded_len(), len);
    }
}

/// Kind (one of ours where the first byte allows it), flags, and the rest as a body.
fn forged(data: &[u8]) -> Option<(u16, u16, &[u8])> {
    let (&[kind, flags], body) = data.split_first_chunk()?;
    let kind = Kind::ALL.get(usize::from(kind)).map_or(u16::from(kind), |kind| *kind as u16);
    Some((kind, flags.into(), body))
}

/// Bytes as what a peer sends: the first byte chooses the end, the secret, and whether the rest are frames under
/// checksums that fit; then come pieces, each behind its length. Gives how many frames came through.
pub fn fuzz_session(data: &[u8]) -> usize {
    let Some((&choice, mut rest)) = data.split_first() else { return 0 };
    let secret = choice & 1 != 0 && cfg!(feature = "noise");
    let forge = choice & 2 != 0;
    let role = if choice & 4 != 0 { Role::Initiator } else { Role::Responder };
    let Some(mut session) = session(role, secret) else { panic!("the settings are good") };
    let (mut established, mut frames) = (0, 0);
    while let Some((&[low, high], tail)) = rest.split_first_chunk() {
        let len = usize::from(u16::from_le_bytes([low, high])).min(tail.len());
        let (piece, tail) = tail.split_at(len);
        rest = tail;
        let mut bytes = Vec::new();
        match forged(piece) {
            Some((kind, flags, body)) if forge => wire::forge(kind, flags, body, &mut bytes),
            _ => bytes.extend(piece),
        }
        feed(&mut session, &bytes, &mut established, &mut frames);
    }
    // Nobody who lacks the secret gets in (I14), and whoever gets in does so once.
    assert!(established <= u32::from(!secret));
    assert!(session.end_of_input().is_ok() || session.phase().is_err());
    frames
}

fn feed(session: &mut Session, mut bytes: &[u8], established: &mut u32, frames: &mut usize) {
    loop {
        let failed_before = session.phase().is_err();
        let taken = session.receive(bytes).unwrap_or(bytes.len());
        bytes = &bytes[taken..];
        loop {
            match session.next_event() {
                Ok(Some(Event::Established(_))) => *established += 1,
                Ok(Some(Event::Frame(frame))) => {
                    assert!(*established == 1 && !failed_before, "a frame before the Hello or after the end");
                    check_sendable(&frame);
                    *frames += 1;
                }
                Ok(None) => break,
                Err(error) => {
                    assert_eq!(session.phase(), Err(&error));
                    break;
                }
            }
        }
        assert!(session.backlog() < 2 * MIN_MAX_FRAME as usize, "a peer makes this end say ever more");
        if bytes.is_empty() {
            return;
        }
        assert!(taken > 0, "a drained session takes bytes");
    }
}

fn check_sendable(frame: &Frame<'_>) {
    assert!(!matches!(frame.kind(), Kind::Hello | Kind::Reject | Kind::Handshake));
    assert!(frame.encoded_len() > HEADER_LEN && frame.encoded_len() <= MIN_MAX_FRAME as usize);
}

fn session(role: Role, secret: bool) -> Option<Session> {
    let identity = Identity {
        incarnation: [1; 16],
        boot_id: [2; 16],
        process: [3; 16],
        unix_name: b"fuzz".to_vec(),
        advertised: AddressList::new(),
        features: 1,
    };
    let mut config = SessionConfig::new(identity);
    config.limits = Limits { max_frame: MIN_MAX_FRAME, max_backlog: 4 * MIN_MAX_FRAME as usize };
    config.secret = if secret { Some(Secret::from_bytes(b"sixteen bytes or more").ok()?) } else { None };
    let purpose = if secret { Purpose::ControlNoise } else { Purpose::Control };
    match role {
        Role::Initiator => Session::initiator(config).ok(),
        Role::Responder => Session::responder(config, &Preface::new(purpose)).ok(),
    }
}
