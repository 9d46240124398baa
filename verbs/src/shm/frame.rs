//! What the two queue pairs of a connection say to each other: frames of 64 bytes on their Unix stream, little-endian,
//! some followed by the bytes of a message or accompanied by a descriptor.
//!
//! | bytes | field |
//! |---|---|
//! | 0 | kind |
//! | 1 | flags |
//! | 2..4 | `half` |
//! | 4..8 | `word` |
//! | 8..64 | seven numbers of 64 bits |
//!
//! A field that a kind doesn't use is zero. Whatever breaks a rule is refused (I7).

use crate::{CompletionStatus, Token};

/// Length of every frame.
pub(super) const FRAME: usize = 64;
/// Most bytes that follow a frame.
pub(super) const MAX_INLINE: usize = 32 << 10;
/// Version of the frames, in the greeting.
pub(super) const VERSION: u16 = 1;

/// One frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Frame {
    /// The first of each side. The token is the *receiver's*, which the sender learned over the control connection.
    Hello { number: u32, token: Token, max_send_wr: u32 },
    /// A region that the receiver may read; its segment's descriptor comes with the frame.
    Region { key: u64, len: u64 },
    /// The region is no more.
    Withdraw { key: u64 },
    /// Asks for an answer after all regions that are registered by now.
    Resolve { key: u64 },
    /// That answer.
    Resolved { key: u64 },
    /// A part of a write or send.
    Piece(Piece),
    /// The end of write or send `id`.
    Ack { id: u64, status: CompletionStatus, bytes: u64 },
}

/// A part of a write or send: bytes that lie one after the other on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    /// The requester's number of the request, the same in all its pieces.
    pub(super) id: u64,
    /// Where to: `None` for a send.
    pub(super) target: Option<Target>,
    pub(super) len: u64,
    pub(super) source: Source,
    /// Of the whole request.
    pub(super) total: u64,
    pub(super) immediate: Option<u32>,
    pub(super) first: bool,
    pub(super) last: bool,
}

/// A place in a region of the receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) key: u64,
    pub(super) offset: u64,
}

/// Where the bytes of a piece are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// They follow the frame.
    Inline,
    /// In a region of the sender that it has announced.
    Region { key: u64, offset: u64 },
}

const HELLO: u8 = 1;
const REGION: u8 = 2;
const WITHDRAW: u8 = 3;
const RESOLVE: u8 = 4;
const RESOLVED: u8 = 5;
const PIECE: u8 = 6;
const ACK: u8 = 7;

const FIRST: u8 = 1;
const LAST: u8 = 1 << 1;
const INLINE: u8 = 1 << 2;
const IMMEDIATE: u8 = 1 << 3;
const WRITE: u8 = 1 << 4;

/// The fields as they lie in the bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Raw {
    kind: u8,
    flags: u8,
    half: u16,
    word: u32,
    numbers: [u64; 7],
}

impl Raw {
    fn bytes(&self) -> [u8; FRAME] {
        let mut bytes = [0; FRAME];
        bytes[0] = self.kind;
        bytes[1] = self.flags;
        bytes[2..4].copy_from_slice(&self.half.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.word.to_le_bytes());
        for (place, number) in bytes[8..].chunks_exact_mut(8).zip(self.numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    fn read(bytes: &[u8; FRAME]) -> Self {
        let mut numbers = [0; 7];
        for (number, place) in numbers.iter_mut().zip(bytes[8..].chunks_exact(8)) {
            let mut eight = [0; 8];
            eight.copy_from_slice(place);
            *number = u64::from_le_bytes(eight);
        }
        Self {
            kind: bytes[0],
            flags: bytes[1],
            half: u16::from_le_bytes([bytes[2], bytes[3]]),
            word: u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]),
            numbers,
        }
    }
}

impl Frame {
    pub(super) fn encode(&self) -> [u8; FRAME] {
        self.raw().bytes()
    }

    fn raw(&self) -> Raw {
        match *self {
            Self::Hello { number, token, max_send_wr } => {
                let token = u128::from_le_bytes(token.0);
                let numbers = [token as u64, (token >> 64) as u64, max_send_wr.into(), 0, 0, 0, 0];
                Raw { kind: HELLO, half: VERSION, word: number, numbers, ..Raw::default() }
            }
            Self::Region { key, len } => Raw { kind: REGION, numbers: [key, len, 0, 0, 0, 0, 0], ..Raw::default() },
            Self::Withdraw { key } => Raw { kind: WITHDRAW, numbers: [key, 0, 0, 0, 0, 0, 0], ..Raw::default() },
            Self::Resolve { key } => Raw { kind: RESOLVE, numbers: [key, 0, 0, 0, 0, 0, 0], ..Raw::default() },
            Self::Resolved { key } => Raw { kind: RESOLVED, numbers: [key, 0, 0, 0, 0, 0, 0], ..Raw::default() },
            Self::Piece(piece) => piece.raw(),
            Self::Ack { id, status, bytes } => {
                Raw { kind: ACK, half: status_code(status), numbers: [id, bytes, 0, 0, 0, 0, 0], ..Raw::default() }
            }
        }
    }

    /// The frame in `bytes`, or the rule that they break.
    pub(super) fn decode(bytes: &[u8; FRAME]) -> Result<Self, &'static str> {
        let raw = Raw::read(bytes);
        let [a, b, c, d, e, f, g] = raw.numbers;
        let frame = match raw.kind {
            HELLO if raw.half != VERSION => return Err("greeting of another version"),
            HELLO => {
                let token = Token((u128::from(a) | u128::from(b) << 64).to_le_bytes());
                let Ok(max_send_wr) = u32::try_from(c) else { return Err("greeting with a send queue too long") };
                Self::Hello { number: raw.word, token, max_send_wr }
            }
            REGION => Self::Region { key: a, len: b },
            WITHDRAW => Self::Withdraw { key: a },
            RESOLVE => Self::Resolve { key: a },
            RESOLVED => Self::Resolved { key: a },
            PIECE => {
                let flag = |flag| raw.flags & flag != 0;
                let source = if flag(INLINE) { Source::Inline } else { Source::Region { key: e, offset: f } };
                if source == Source::Inline && d > MAX_INLINE as u64 {
                    return Err("more inline bytes than fit a frame");
                }
                Self::Piece(Piece {
                    id: a,
                    target: flag(WRITE).then_some(Target { key: b, offset: c }),
                    len: d,
                    source,
                    total: g,
                    immediate: flag(IMMEDIATE).then_some(raw.word),
                    first: flag(FIRST),
                    last: flag(LAST),
                })
            }
            ACK => {
                let Some(status) = status_of(raw.half) else { return Err("answer with an unknown status") };
                Self::Ack { id: a, status, bytes: b }
            }
            _ => return Err("frame of an unknown kind"),
        };
        // Encoding again catches every unused field and flag that isn't zero.
        if frame.raw() == raw { Ok(frame) } else { Err("frame with a field that must be zero") }
    }
}

impl Piece {
    fn raw(&self) -> Raw {
        let mut flags = 0;
        for (flag, set) in [
            (FIRST, self.first),
            (LAST, self.last),
            (INLINE, self.source == Source::Inline),
            (IMMEDIATE, self.immediate.is_some()),
            (WRITE, self.target.is_some()),
        ] {
            if set {
                flags |= flag;
            }
        }
        let (key, offset) = self.target.map_or((0, 0), |target| (target.key, target.offset));
        let (source_key, source_offset) = match self.source {
            Source::Inline => (0, 0),
            Source::Region { key, offset } => (key, offset),
        };
        Raw {
            kind: PIECE,
            flags,
            half: 0,
            word: self.immediate.unwrap_or(0),
            numbers: [self.id, key, offset, self.len, source_key, source_offset, self.total],
        }
    }
}

/// The statuses that an owner of memory gives, by the numbers of `ibv_wc_status` (libibverbs, verbs.h).
const STATUSES: [(CompletionStatus, u16); 5] = [
    (CompletionStatus::Success, 0),
    (CompletionStatus::RemoteInvalidRequest, 9),
    (CompletionStatus::RemoteAccess, 10),
    (CompletionStatus::RemoteOperation, 11),
    (CompletionStatus::ReceiverNotReadyExceeded, 13),
];

fn status_code(status: CompletionStatus) -> u16 {
    STATUSES.iter().find(|(known, _)| *known == status).map_or(11, |(_, code)| *code)
}

fn status_of(code: u16) -> Option<CompletionStatus> {
    STATUSES.iter().find(|(_, known)| *known == code).map(|(status, _)| *status)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_piece() -> impl Strategy<Value = Frame> {
        let target = prop::option::of((any::<u64>(), any::<u64>()).prop_map(|(key, offset)| Target { key, offset }));
        let source = prop_oneof![
            (0..=MAX_INLINE as u64).prop_map(|len| (Source::Inline, len)),
            (any::<u64>(), any::<u64>(), any::<u64>())
                .prop_map(|(key, offset, len)| (Source::Region { key, offset }, len)),
        ];
        (any::<u64>(), target, source, any::<u64>(), any::<Option<u32>>(), any::<bool>(), any::<bool>()).prop_map(
            |(id, target, (source, len), total, immediate, first, last)| {
                Frame::Piece(Piece { id, target, len, source, total, immediate, first, last })
            },
        )
    }

    fn any_frame() -> impl Strategy<Value = Frame> {
        prop_oneof![
            (any::<u32>(), any::<[u8; 16]>(), any::<u32>()).prop_map(|(number, token, max_send_wr)| Frame::Hello {
                number,
                token: Token(token),
                max_send_wr
            }),
            (any::<u64>(), any::<u64>()).prop_map(|(key, len)| Frame::Region { key, len }),
            any::<u64>().prop_map(|key| Frame::Withdraw { key }),
            any::<u64>().prop_map(|key| Frame::Resolve { key }),
            any::<u64>().prop_map(|key| Frame::Resolved { key }),
            (any::<u64>(), 0..STATUSES.len(), any::<u64>()).prop_map(|(id, which, bytes)| Frame::Ack {
                id,
                status: STATUSES[which].0,
                bytes
            }),
            any_piece(),
        ]
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(frame in any_frame()) {
            prop_assert_eq!(Frame::decode(&frame.encode()), Ok(frame));
        }

        #[test]
        fn a_changed_bit_is_another_frame_or_none(frame in any_frame(), bit in 0..FRAME * 8) {
            let mut bytes = frame.encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            if let Ok(other) = Frame::decode(&bytes) {
                prop_assert_ne!(other, frame);
                prop_assert_eq!(other.encode(), bytes);
            }
        }

        #[test]
        fn noise_never_panics(bytes: [u8; 32], kind in 0u8..12) {
            let mut whole = [0; FRAME];
            whole[..32].copy_from_slice(&bytes);
            whole[0] = kind;
            let _result = Frame::decode(&whole);
        }
    }

    #[test]
    fn inline_bytes_are_bounded() {
        let piece = Piece {
            id: 1,
            target: None,
            len: MAX_INLINE as u64 + 1,
            source: Source::Inline,
            total: 1 << 20,
            immediate: None,
            first: true,
            last: false,
        };
        assert!(Frame::decode(&Frame::Piece(piece).encode()).is_err());
    }
}
