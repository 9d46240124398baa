//! The bodies of the fuzz targets on random bytes and on damaged real ones, so that they stay alive between campaigns.

mod common;

use common::{encoded, parts};
use proptest::prelude::*;
use towline_control::fuzzing::{fuzz_frame, fuzz_session};
use towline_control::wire::{HEADER_LEN, Kind};

proptest! {
    #[test]
    fn any_bytes(data in prop::collection::vec(any::<u8>(), 0..2000)) {
        fuzz_frame(&data);
        fuzz_session(&data);
    }

    #[test]
    fn damaged_frames(
        parts in parts(),
        choice in any::<u8>(),
        damage in prop::collection::vec(any::<(prop::sample::Index, u8)>(), 0..4),
    ) {
        // As the bodies want them: kind by place, flags, and the body of a real frame; each piece behind its length.
        let mut conversation = vec![choice];
        for frame in parts.frames() {
            let place = Kind::ALL.iter().position(|kind| *kind == frame.kind()).unwrap();
            let mut piece = vec![place as u8, encoded(&frame)[6]];
            piece.extend_from_slice(&encoded(&frame)[HEADER_LEN..]);
            fuzz_frame(&piece);
            for (at, byte) in &damage {
                let at = at.index(piece.len());
                piece[at] = *byte;
                fuzz_frame(&piece);
            }
            conversation.extend((piece.len() as u16).to_le_bytes());
            conversation.extend(piece);
        }
        fuzz_session(&conversation);
    }
}
