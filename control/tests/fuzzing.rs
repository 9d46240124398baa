//! The bodies of the fuzz targets on random bytes and on damaged real ones, so that they stay alive between campaigns.
#![allow(clippy::unwrap_used)] // in helpers too

mod common;

use common::{encoded, fixed_parts, parts};
use proptest::prelude::*;
use towline_control::fuzzing::{fuzz_frame, fuzz_session};
use towline_control::wire::{Frame, HEADER_LEN, Kind};

/// A frame as the bodies want it: its kind by place, its flags, its body.
fn piece(frame: &Frame<'_>) -> Vec<u8> {
    let place = Kind::ALL.iter().position(|kind| *kind == frame.kind()).unwrap();
    let bytes = encoded(frame);
    [&[place as u8, bytes[6]], &bytes[HEADER_LEN..]].concat()
}

/// Appends a piece behind its length.
fn say(conversation: &mut Vec<u8>, piece: &[u8]) {
    conversation.extend((piece.len() as u16).to_le_bytes());
    conversation.extend(piece);
}

#[test]
fn the_session_body_gets_past_the_hello() {
    let parts = fixed_parts();
    let mut conversation = vec![0b010];
    say(&mut conversation, &piece(&parts.frames()[0]));
    for frame in parts.sendable() {
        say(&mut conversation, &piece(&frame));
    }
    assert_eq!(fuzz_session(&conversation), parts.sendable().len());
}

proptest! {
    #[test]
    fn any_bytes(data in prop::collection::vec(any::<u8>(), 0..2000)) {
        fuzz_frame(&data);
        fuzz_session(&data);
    }

    #[test]
    fn damaged_frames(
        mut parts in parts(),
        choice in any::<u8>(),
        all in any::<bool>(),
        damage in prop::collection::vec(any::<(prop::sample::Index, u8)>(), 0..4),
        damaged in any::<prop::sample::Index>(),
    ) {
        // Versions that this end speaks, mostly.
        parts.code %= 4;
        let mut frames = parts.frames();
        if !all {
            frames.retain(|frame| !matches!(frame.kind(), Kind::Reject | Kind::Handshake));
        }
        let damaged = damaged.index(frames.len());
        let mut conversation = vec![choice];
        for (at, frame) in frames.iter().enumerate() {
            let mut piece = piece(frame);
            fuzz_frame(&piece);
            for (place, byte) in damage.iter().filter(|_| at == damaged) {
                let place = place.index(piece.len());
                piece[place] = *byte;
                fuzz_frame(&piece);
            }
            say(&mut conversation, &piece);
        }
        fuzz_session(&conversation);
    }
}
