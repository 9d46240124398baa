//! Two sessions in clear: whatever way the bytes are cut, both ends see the same.

#![allow(clippy::unwrap_used)] // in helpers too

mod common;

use common::*;
use proptest::prelude::*;
use towline_control::preface::{Preface, Purpose};
use towline_control::session::{Event, Limits, Phase, SendError, Session, SessionConfig, SessionError};
use towline_control::wire::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn frames_arrive_whole_and_in_order_however_the_bytes_are_cut(
        ours in parts(), theirs in parts(), step in prop_oneof![1..40_usize, 1..20_000_usize], early in any::<bool>(),
    ) {
        let (mut a, mut b) = pair(config(1), config(2));
        if !early {
            talk_until_established(&mut a, &mut b);
        }
        for frame in ours.sendable() {
            a.send(&frame).unwrap();
        }
        for frame in theirs.sendable() {
            b.send(&frame).unwrap();
        }
        let (at_a, at_b) = talk(&mut a, &mut b, step);
        prop_assert_eq!(&at_a.error, &None);
        prop_assert_eq!(&at_b.error, &None);
        prop_assert_eq!(at_b.frames, ours.sendable().iter().map(encoded).collect::<Vec<_>>());
        prop_assert_eq!(at_a.frames, theirs.sendable().iter().map(encoded).collect::<Vec<_>>());
        prop_assert_eq!((a.phase(), b.phase()), (Ok(Phase::Left), Ok(Phase::Left)));
        prop_assert!(a.end_of_input().is_ok() && b.end_of_input().is_ok());
    }

    #[test]
    fn arbitrary_bytes_end_a_session_or_wait_but_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let (mut a, _) = pair(config(1), config(2));
        let taken = a.receive(&bytes).unwrap();
        prop_assert_eq!(taken, bytes.len());
        let outcome = a.next_event().map(|event| event.is_some());
        prop_assert!(outcome == Ok(false) && bytes.is_empty() || outcome.is_err() || b"towl".starts_with(&bytes));
    }
}

fn talk_until_established(a: &mut Session, b: &mut Session) {
    let (at_a, at_b) = talk(a, b, usize::MAX);
    assert!(at_a.established.is_some() && at_b.established.is_some() && at_a.error.is_none() && at_b.error.is_none());
}

/// An established session whose peer is played by the test.
fn established() -> Session {
    let (mut a, mut b) = pair(config(1), config(2));
    talk_until_established(&mut a, &mut b);
    a
}

fn feed(session: &mut Session, bytes: &[u8]) -> Result<(), SessionError> {
    assert_eq!(session.receive(bytes).unwrap(), bytes.len());
    while session.next_event()?.is_some() {}
    Ok(())
}

/// The last frame that a session wants to send.
fn last_words(session: &Session) -> Frame<'_> {
    let mut rest = session.output();
    loop {
        let (frame, len) = Frame::decode(rest, u32::MAX).unwrap().unwrap();
        rest = &rest[len..];
        if rest.is_empty() {
            return frame;
        }
    }
}

#[test]
fn each_end_sees_the_others_hello() {
    let (mut a, mut b) = pair(config(1), SessionConfig { limits: small(), ..config(2) });
    assert_eq!(a.max_send_frame(), MIN_MAX_FRAME);
    b.receive(a.output()).unwrap();
    let Some(Event::Established(peer)) = b.next_event().unwrap() else { panic!("not established") };
    let theirs = identity(1);
    assert_eq!((peer.version, peer.encrypted), (1, false));
    assert_eq!(peer.hello.incarnation, theirs.incarnation);
    assert_eq!(peer.hello.boot_id, theirs.boot_id);
    assert_eq!(peer.hello.process, theirs.process);
    assert_eq!(peer.hello.unix_name, theirs.unix_name);
    assert_eq!(peer.hello.advertised.to_list(), theirs.advertised);
    assert_eq!(peer.hello.features, theirs.features);
    assert_eq!(b.peer().unwrap().features, 0b110, "what both have");
    a.receive(b.output()).unwrap();
    assert!(matches!(a.next_event(), Ok(Some(Event::Established(_)))));
    assert_eq!((a.max_send_frame(), b.max_send_frame()), (MIN_MAX_FRAME, Limits::default().max_frame));
}

#[test]
fn in_clear_the_first_frames_need_no_round_trip() {
    let mut a = Session::initiator(config(1)).unwrap();
    let parts = fixed_parts();
    let get = parts.sendable().into_iter().find(|frame| frame.kind() == Kind::Get).unwrap();
    a.send(&get).unwrap();
    let first_packet = a.output().to_vec();
    let mut b = accept(&mut a, config(2)).unwrap();
    b.receive(&first_packet[Preface::LEN..]).unwrap();
    assert!(matches!(b.next_event(), Ok(Some(Event::Established(_)))));
    assert_eq!(b.next_event(), Ok(Some(Event::Frame(get))));
    assert!(!b.output().is_empty(), "the responder's Hello waits for nothing");
}

#[test]
fn bytes_can_be_read_straight_into_the_session() {
    let parts = fixed_parts();
    let (mut a, mut b) = pair(config(1), config(2));
    talk_until_established(&mut a, &mut b);
    let eager = vec![0xab; 4096];
    let Some(Frame::Grant(grant)) = parts.sendable().into_iter().find(|frame| frame.kind() == Kind::Grant) else {
        panic!()
    };
    a.send_grant(&grant, eager.len(), |bytes| bytes.copy_from_slice(&eager)).unwrap();
    let buffer = b.input_buffer(a.output().len());
    let place = buffer.as_ptr_range();
    buffer[..a.output().len()].copy_from_slice(a.output());
    b.filled(a.output().len());
    let Ok(Some(Event::Frame(Frame::Grant(grant)))) = b.next_event() else { panic!("no grant") };
    assert_eq!(grant.eager, eager);
    assert!(place.contains(&grant.eager.as_ptr()), "the frame lies where it was read");
}

#[test]
fn no_common_version_ends_both_with_what_the_other_speaks() {
    let versions = Versions { min: 2, max: 3 };
    let (mut a, mut b) = pair(config(1), SessionConfig { versions, ..config(2) });
    let (at_a, at_b) = talk(&mut a, &mut b, usize::MAX);
    let code = RejectCode::Version;
    assert_eq!(at_a.error, Some(SessionError::Refused { code, versions: Some(versions) }));
    assert_eq!(at_b.error, Some(SessionError::Refused { code, versions: Some(Versions::SUPPORTED) }));
    assert!(at_a.error.unwrap().to_string().contains("2 to 3"));
}

#[test]
fn the_newest_common_version_is_chosen() {
    for (ours, theirs, common) in [((1, 3), (2, 5), Some(3)), ((4, 4), (1, 9), Some(4)), ((1, 2), (3, 4), None)] {
        let [ours, theirs] = [ours, theirs].map(|(min, max)| Versions { min, max });
        assert_eq!((ours.common(theirs), theirs.common(ours)), (common, common));
    }
}

#[test]
fn a_rejected_peer_is_told_why() {
    let (mut a, mut b) = pair(config(1), config(2));
    b.reject(RejectCode::Busy, "64 peers\n");
    let (at_a, at_b) = talk(&mut a, &mut b, 7);
    let error = at_a.error.unwrap();
    let SessionError::Rejected { code: RejectCode::Busy, versions: Versions::SUPPORTED, text } = &error else {
        panic!("{error}")
    };
    assert_eq!(text, "64 peers\n");
    assert!(error.to_string().contains(r"64 peers\n") && error.is_retryable());
    assert_eq!(at_b.error, Some(SessionError::Refused { code: RejectCode::Busy, versions: None }));
    assert!(a.output().is_empty(), "a Reject is not answered");
}

#[test]
fn frames_out_of_place_end_the_session() {
    let parts = fixed_parts();
    let by_kind = |kind| parts.frames().into_iter().find(|frame| frame.kind() == kind).map(|frame| encoded(&frame));
    for kind in Kind::ALL.into_iter().filter(|kind| !matches!(kind, Kind::Hello | Kind::Reject)) {
        let (mut a, _) = pair(config(1), config(2));
        let error = SessionError::Unexpected { kind, phase: Phase::Hello };
        assert_eq!(feed(&mut a, &by_kind(kind).unwrap()), Err(error));
        assert!(matches!(last_words(&a), Frame::Reject(Reject { code: RejectCode::Malformed, .. })));
    }
    for kind in [Kind::Hello, Kind::Handshake] {
        let mut a = established();
        let error = SessionError::Unexpected { kind, phase: Phase::Established };
        assert_eq!(feed(&mut a, &by_kind(kind).unwrap()), Err(error));
        assert_eq!(last_words(&a), Frame::Goodbye(Goodbye { code: GoodbyeCode::Protocol }));
    }
    let mut a = established();
    let bytes = [by_kind(Kind::Goodbye).unwrap(), by_kind(Kind::Cancel).unwrap()].concat();
    assert_eq!(feed(&mut a, &bytes), Err(SessionError::Unexpected { kind: Kind::Cancel, phase: Phase::Left }));
}

#[test]
fn bad_bytes_end_the_session_for_good() {
    let parts = fixed_parts();
    let good = encoded(&parts.sendable()[0]);
    let mut corrupt = good.clone();
    corrupt[20] ^= 1;
    let mut unknown = good.clone();
    unknown[4] = 200;
    for (bytes, want) in [
        ([&good[..], b"garbage"].concat(), "Magic"),
        (corrupt, "Checksum"),
        (unknown, "Checksum"),
        (b"towl\x01\0\0\0\xff\xff\xff\xff\0\0\0\0".to_vec(), "TooLarge"),
    ] {
        let mut a = established();
        let error = feed(&mut a, &bytes).unwrap_err();
        let SessionError::Wire(wire) = &error else { panic!("{error}") };
        assert!(format!("{wire:?}").starts_with(want), "{wire}");
        assert_eq!(last_words(&a), Frame::Goodbye(Goodbye { code: GoodbyeCode::Protocol }));
        assert_eq!(a.receive(&good), Err(error.clone()));
        assert!(a.input_buffer(1).is_empty());
        assert_eq!(a.next_event(), Err(error.clone()));
        assert_eq!(a.end_of_input(), Err(error));
        assert_eq!(a.send(&parts.sendable()[0]), Err(SendError::Ended));
    }
}

#[test]
fn the_end_of_the_stream_is_an_error_where_something_is_missing() {
    let (mut a, b) = pair(config(1), config(2));
    assert_eq!(a.end_of_input(), Err(SessionError::EndOfStream { phase: Phase::Hello, unread: 0 }));
    assert!(a.phase().is_err());
    let (mut a, _) = pair(config(1), config(2));
    a.receive(&b.output()[..9]).unwrap();
    assert_eq!(a.next_event(), Ok(None));
    assert_eq!(a.end_of_input(), Err(SessionError::EndOfStream { phase: Phase::Hello, unread: 9 }));
    assert_eq!(established().end_of_input(), Ok(()));
}

#[test]
fn what_a_peer_can_make_a_session_hold_is_bounded() {
    let (mut a, mut b) = pair(SessionConfig { limits: small(), ..config(1) }, config(2));
    talk_until_established(&mut a, &mut b);
    // The start of a frame as large as allowed, and then ever more, without the events being drained.
    let mut held = a.receive(b"towl\x21\0\0\0\xf0\x0f\0\0\0\0\0\0").unwrap();
    loop {
        match a.receive(&[0; 1000]).unwrap() {
            0 => break,
            taken => held += taken,
        }
        assert!(held < 64 << 10, "the input buffer has no end");
    }
    assert!(a.input_buffer(1).is_empty());
    assert!(matches!(a.next_event(), Err(SessionError::Wire(WireError::Checksum { .. }))));
}

#[test]
fn what_is_sent_is_bounded_and_refused_with_the_numbers() {
    let (mut a, mut b) =
        pair(SessionConfig { limits: small(), ..config(1) }, SessionConfig { limits: small(), ..config(2) });
    talk_until_established(&mut a, &mut b);
    let parts = fixed_parts();
    let Some(Frame::Grant(grant)) = parts.sendable().into_iter().find(|frame| frame.kind() == Kind::Grant) else {
        panic!()
    };
    let eager = vec![1; 4000];
    let large = Frame::Grant(Grant { eager: &eager, ..grant });
    let need = large.encoded_len();
    assert_eq!(a.send(&large), Err(SendError::TooLarge { need, limit: MIN_MAX_FRAME }));
    let filled = a.send_grant(&grant, 4000, |_| panic!("filled a grant that is not sent"));
    assert_eq!(filled, Err(SendError::TooLarge { need, limit: MIN_MAX_FRAME }));

    let frame = Frame::Grant(Grant { eager: &eager[..3000], ..grant });
    let sent = (0..).take_while(|_| a.send(&frame).is_ok()).count();
    assert_eq!(sent, 16384 / frame.encoded_len());
    let have = 16384 - a.backlog();
    assert_eq!(a.send(&frame), Err(SendError::Backlog { need: frame.encoded_len(), have }));
    let (_, at_b) = talk(&mut a, &mut b, usize::MAX);
    assert_eq!((at_b.frames.len(), at_b.error), (sent, None), "what was refused left no trace");
    a.send(&frame).unwrap();
}

#[test]
fn the_sessions_own_frames_are_not_the_callers_to_send() {
    let parts = fixed_parts();
    let mut a = established();
    for frame in parts.frames() {
        let kind = frame.kind();
        if matches!(kind, Kind::Hello | Kind::Reject | Kind::Handshake) {
            assert_eq!(a.send(&frame), Err(SendError::Reserved { kind }));
        }
    }
    a.send(&Frame::Goodbye(Goodbye { code: GoodbyeCode::Closing })).unwrap();
    assert_eq!(a.send(&parts.sendable()[0]), Err(SendError::Ended));
}

#[test]
fn settings_out_of_range_are_errors() {
    let bad = |change: &dyn Fn(&mut SessionConfig)| {
        let mut config = config(1);
        change(&mut config);
        match Session::initiator(config) {
            Err(SessionError::Config { what, .. }) => what,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(bad(&|config| config.limits.max_frame = 4095), "max_frame");
    assert_eq!(bad(&|config| config.limits.max_backlog = 8191), "max_backlog");
    assert_eq!(bad(&|config| config.identity.unix_name = vec![0; 108]), "unix_name");
    assert_eq!(bad(&|config| config.versions = Versions { min: 2, max: 1 }), "versions.min");
}

#[test]
fn a_data_connection_has_no_session() {
    let preface = Preface::new(Purpose::Data { token: [1; 16] });
    assert!(matches!(Session::responder(config(1), &preface), Err(SessionError::NotControl)));
}
