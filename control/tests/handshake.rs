//! Sessions with a secret: they establish and encrypt, or end on both ends with the reason; nobody else learns a thing.
#![cfg(feature = "noise")]
#![allow(clippy::unwrap_used)] // in helpers too

mod common;

use common::*;
use proptest::prelude::*;
use towline_control::preface::{Preface, Purpose};
use towline_control::session::{Phase, Secret, SendError, Session, SessionConfig, SessionError};
use towline_control::wire::*;

const SECRET: &str = "correct horse battery staple";

fn with_secret(name: u8, secret: &str) -> SessionConfig {
    SessionConfig { secret: Some(secret.parse().unwrap()), ..config(name) }
}

fn secret_pair() -> (Session, Session) {
    pair(with_secret(1, SECRET), with_secret(2, SECRET))
}

/// Whether `bytes` hold any of what an end says of itself.
fn tells(bytes: &[u8], name: u8) -> bool {
    let identity = identity(name);
    let address = identity.advertised.as_addresses();
    let said: [&[u8]; 5] =
        [&identity.incarnation, &identity.boot_id, &identity.process, &identity.unix_name, &address.as_bytes()[1..]];
    said.into_iter().any(|what| bytes.windows(what.len()).any(|window| window == what))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn frames_arrive_whole_and_in_order_however_the_bytes_are_cut(
        ours in parts(), theirs in parts(), step in prop_oneof![1..40_usize, 1..20_000_usize], early in any::<bool>(),
    ) {
        let (mut a, mut b) = secret_pair();
        if !early {
            talk(&mut a, &mut b, usize::MAX);
        }
        for frame in ours.sendable() {
            a.send(&frame).unwrap();
        }
        for frame in theirs.sendable() {
            b.send(&frame).unwrap();
        }
        let mut wire = Vec::new();
        let (at_a, at_b) = tapped(&mut a, &mut b, step, |_, bytes| wire.extend_from_slice(bytes));
        prop_assert_eq!((&at_a.error, &at_b.error), (&None, &None));
        prop_assert_eq!(early, at_a.encrypted && at_b.encrypted);
        prop_assert_eq!(at_b.frames, ours.sendable().iter().map(encoded).collect::<Vec<_>>());
        prop_assert_eq!(at_a.frames, theirs.sendable().iter().map(encoded).collect::<Vec<_>>());
        prop_assert!(a.end_of_input().is_ok() && b.end_of_input().is_ok());
        prop_assert!(!tells(&wire, 1) && !tells(&wire, 2));
        if ours.bytes.len() > 4 {
            prop_assert!(!wire.windows(ours.bytes.len()).any(|window| window == ours.bytes));
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), at in 0..3_usize) {
        let (mut a, mut b) = secret_pair();
        match at {
            0 => {}
            1 => {
                b.receive(a.output()).unwrap();
                while b.next_event().unwrap().is_some() {}
            }
            _ => {
                talk(&mut a, &mut b, usize::MAX);
            }
        }
        for session in [&mut a, &mut b] {
            session.receive(&bytes).unwrap();
            let mut log = Log::default();
            log.drain(session);
            prop_assert!(log.established.is_none() && log.frames.is_empty());
        }
    }
}

#[test]
fn frames_larger_than_a_message_of_noise_arrive() {
    let (mut a, mut b) = secret_pair();
    talk(&mut a, &mut b, usize::MAX);
    let eager: Vec<u8> = (0..200_000_u32).map(|i| (i * 7) as u8).collect();
    let parts = fixed_parts();
    let Some(Frame::Grant(grant)) = parts.sendable().into_iter().find(|frame| frame.kind() == Kind::Grant) else {
        panic!()
    };
    for _ in 0..5 {
        b.send_grant(&grant, eager.len(), |bytes| bytes.copy_from_slice(&eager)).unwrap();
    }
    let error = b.send_grant(&grant, eager.len(), |_| {}).unwrap_err();
    assert!(matches!(error, SendError::Backlog { .. }), "{error}");
    let (at_a, _) = talk(&mut a, &mut b, 40_000);
    assert_eq!(at_a.error, None);
    assert_eq!(at_a.frames, vec![encoded(&Frame::Grant(Grant { eager: &eager, ..grant })); 5]);
}

#[test]
fn frames_before_the_peer_has_proved_itself_are_kept_back_and_counted() {
    let parts = fixed_parts();
    for frame in parts.sendable() {
        let (mut a, mut b) = secret_pair();
        let before = [a.output().to_vec(), b.output().to_vec()];
        a.send(&frame).unwrap();
        b.send(&frame).unwrap();
        assert_eq!([a.output(), b.output()], [&before[0][..], &before[1][..]]);
        assert_eq!(a.backlog(), a.output().len() + frame.encoded_len());
        let (at_a, at_b) = talk(&mut a, &mut b, usize::MAX);
        assert_eq!([at_a.frames, at_b.frames], [vec![encoded(&frame)], vec![encoded(&frame)]]);
        assert_eq!(a.backlog(), 0);
    }
    let (mut a, _) = pair(SessionConfig { limits: small(), ..with_secret(1, SECRET) }, with_secret(2, SECRET));
    let frame = parts.sendable()[0];
    while a.send(&frame).is_ok() {}
    assert!(matches!(a.send(&frame), Err(SendError::Backlog { .. })) && a.backlog() <= small().max_backlog);
}

#[test]
fn a_wrong_secret_ends_both_and_tells_neither() {
    let (mut a, mut b) = pair(with_secret(1, SECRET), with_secret(2, "another secret that is long enough"));
    a.send(&fixed_parts().sendable()[0]).unwrap();
    let mut wire = Vec::new();
    let (at_a, at_b) = tapped(&mut a, &mut b, 11, |_, bytes| wire.extend_from_slice(bytes));
    let code = RejectCode::WrongSecret;
    assert!(matches!(at_a.error, Some(SessionError::Rejected { code: RejectCode::WrongSecret, .. })), "{at_a:?}");
    assert_eq!(at_b.error, Some(SessionError::Refused { code, versions: None }));
    assert!(at_a.established.is_none() && at_b.established.is_none());
    assert!(!tells(&wire, 1) && !tells(&wire, 2));
    let error = at_a.error.unwrap();
    assert!(error.to_string().contains("the secrets differ") && !error.is_retryable());
}

#[test]
fn a_secret_on_one_side_only_ends_both() {
    let plain = |name| config(name);
    let (mut a, mut b) = pair(plain(1), with_secret(2, SECRET));
    let mut from_b = Vec::new();
    let (at_a, at_b) = tapped(&mut a, &mut b, 5, |from_a, bytes| {
        if !from_a {
            from_b.extend_from_slice(bytes);
        }
    });
    assert!(matches!(at_a.error, Some(SessionError::Rejected { code: RejectCode::SecretRequired, .. })), "{at_a:?}");
    assert_eq!(at_b.error, Some(SessionError::Refused { code: RejectCode::SecretRequired, versions: None }));
    assert!(at_b.established.is_none() && !tells(&from_b, 2), "a peer without the secret learns nothing");

    let (mut a, mut b) = pair(with_secret(1, SECRET), plain(2));
    let mut wire = Vec::new();
    let (at_a, at_b) = tapped(&mut a, &mut b, 5, |_, bytes| wire.extend_from_slice(bytes));
    assert!(matches!(at_a.error, Some(SessionError::Rejected { code: RejectCode::SecretNotExpected, .. })), "{at_a:?}");
    assert_eq!(at_b.error, Some(SessionError::Refused { code: RejectCode::SecretNotExpected, versions: None }));
    assert!(!tells(&wire, 1) && !tells(&wire, 2));
}

#[test]
fn no_common_version_ends_both_inside_the_channel() {
    let versions = Versions { min: 7, max: 9 };
    let (mut a, mut b) = pair(with_secret(1, SECRET), SessionConfig { versions, ..with_secret(2, SECRET) });
    let mut wire = Vec::new();
    let (at_a, at_b) = tapped(&mut a, &mut b, usize::MAX, |_, bytes| wire.extend_from_slice(bytes));
    for (log, theirs) in [(at_a, versions), (at_b, Versions::SUPPORTED)] {
        assert!(log.established.is_none());
        match log.error {
            Some(SessionError::Refused { code: RejectCode::Version, versions: Some(versions) })
            | Some(SessionError::Rejected { code: RejectCode::Version, versions, .. }) => assert_eq!(versions, theirs),
            other => panic!("{other:?}"),
        }
    }
    assert!(!tells(&wire, 1) && !tells(&wire, 2));
}

#[test]
fn a_peer_can_be_rejected_at_every_phase() {
    for steps in 0..4 {
        let (mut a, mut b) = secret_pair();
        let (mut at_a, mut at_b) = (Log::default(), Log::default());
        for step in 0..steps {
            let (from, to, log) = if step % 2 == 0 { (&mut a, &mut b, &mut at_b) } else { (&mut b, &mut a, &mut at_a) };
            to.receive(from.output()).unwrap();
            from.consume_output(from.output().len());
            log.drain(to);
        }
        b.reject(RejectCode::NotAllowed, "not on this list");
        let (at_a, at_b) = talk(&mut a, &mut b, 3);
        let Some(SessionError::Rejected { code: RejectCode::NotAllowed, text, .. }) = at_a.error else {
            panic!("{steps} steps: {at_a:?}")
        };
        assert_eq!(text, "not on this list");
        assert_eq!(at_b.error, Some(SessionError::Refused { code: RejectCode::NotAllowed, versions: None }));
    }
}

#[test]
fn every_changed_bit_is_seen() {
    // The whole conversation: the handshake, both Hellos and a frame each way.
    let parts = fixed_parts();
    let converse = |changed: Option<usize>| {
        let (mut a, mut b) = secret_pair();
        a.send(&parts.sendable()[0]).unwrap();
        b.send(&parts.sendable()[1]).unwrap();
        let mut at = 0;
        let logs = tapped(&mut a, &mut b, usize::MAX, |_, bytes| {
            for byte in bytes {
                if changed == Some(at) {
                    *byte ^= 1 << (at % 8);
                }
                at += 1;
            }
        });
        let ends = [a.end_of_input(), b.end_of_input()];
        (at, logs, ends)
    };
    let (len, (clean_a, clean_b), ends) = converse(None);
    assert_eq!((clean_a.frames.len(), clean_b.frames.len(), ends), (1, 1, [Ok(()), Ok(())]));
    for at in 0..len {
        let (_, logs, ends) = converse(Some(at));
        assert!(ends.iter().any(Result::is_err), "byte {at} of {len}: {logs:?}");
        for (log, clean) in [(logs.0, &clean_a), (logs.1, &clean_b)] {
            assert!(log.established.is_none() || log.established == clean.established);
            // An end that was told why the other left has that frame more.
            let goodbye = encoded(&Frame::Goodbye(Goodbye { code: GoodbyeCode::Protocol }));
            let frames: Vec<_> = log.frames.into_iter().filter(|frame| *frame != goodbye).collect();
            assert!(frames.is_empty() || frames == clean.frames, "a changed frame was delivered");
        }
    }
}

#[test]
fn a_replayed_handshake_establishes_nothing() {
    let mut a = Session::initiator(with_secret(1, SECRET)).unwrap();
    let mut b = accept(&mut a, with_secret(2, SECRET)).unwrap();
    let mut recorded = Vec::new();
    tapped(&mut a, &mut b, usize::MAX, |from_a, bytes| {
        if from_a {
            recorded.extend_from_slice(bytes);
        }
    });
    let mut victim = Session::responder(with_secret(3, SECRET), &Preface::new(Purpose::ControlNoise)).unwrap();
    victim.receive(&recorded).unwrap();
    let mut log = Log::default();
    log.drain(&mut victim);
    assert_eq!((log.established, log.error), (None, Some(SessionError::Decrypt)));
    assert!(!tells(victim.output(), 3));
}

#[test]
fn the_end_of_the_stream_says_how_far_it_was() {
    let (mut a, mut b) = secret_pair();
    assert_eq!(b.end_of_input(), Err(SessionError::EndOfStream { phase: Phase::Handshake, unread: 0 }));
    let (_, mut c) = secret_pair();
    c.receive(a.output()).unwrap();
    assert_eq!(c.next_event(), Ok(None));
    assert_eq!(c.phase(), Ok(Phase::Hello));
    a.receive(&c.output()[..20]).unwrap();
    assert_eq!(a.next_event(), Ok(None));
    assert_eq!(a.end_of_input(), Err(SessionError::EndOfStream { phase: Phase::Handshake, unread: 20 }));
}

#[test]
fn secrets_are_not_printed() {
    let config = with_secret(1, SECRET);
    let session = Session::initiator(config.clone()).unwrap();
    let secret: Secret = SECRET.parse().unwrap();
    let text = format!("{config:?} {session:?} {secret:?}");
    assert!(!text.contains("horse") && text.contains("redacted"), "{text}");
}

#[test]
fn a_secret_read_from_a_file_with_a_line_end_is_the_same() {
    let (mut a, mut b) = pair(with_secret(1, SECRET), with_secret(2, &format!("{SECRET}\n")));
    let (at_a, at_b) = talk(&mut a, &mut b, usize::MAX);
    assert!(at_a.established.is_some() && at_b.established.is_some());
}
