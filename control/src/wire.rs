//! The frames of a control session and their bytes.
//!
//! A frame is a 16-byte header (magic, kind, flags, length of the body, CRC32C over these and the body) and a body: a
//! fixed part, then the parts whose lengths stand in it. Integers are little-endian, reserved bits are zero. Decoding
//! borrows from the input and allocates nothing; it never panics, whatever the bytes (I7), and takes exactly what
//! encoding gives: bytes too few or too many, a wrong checksum, a set reserved bit and an unknown kind are errors.

mod code;
mod error;
mod frames;
mod layout;
mod list;

pub use code::{GoodbyeCode, Outcome, QueuePairCode, RefuseCode, RejectCode};
pub use error::{EncodeError, WireError};
pub use frames::{
    Cancel, Close, Get, GetFlags, Goodbye, Grant, GrantFlags, Hello, KeepAlive, KeepAliveAck, QueuePair,
    QueuePairRefuse, Refuse, Reject, Target, Watermark,
};
pub use list::{AddressList, Addresses, CloseEntry, LeaseId, MAX_ADVERTISED, Segment};

use crate::address::MAX_UNIX_NAME;
use layout::{Body, RawHeader};
use zerocopy::{FromBytes, IntoBytes};

/// One message of a control session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Frame<'a> {
    /// Who an end is. First, and once.
    Hello(Hello<'a>),
    /// Why an end does not accept the connection. Last.
    Reject(Reject<'a>),
    /// A message of the Noise handshake, which the session sends and reads by itself.
    Handshake(&'a [u8]),
    /// A queue pair is wanted.
    QueuePairOpen(QueuePair<'a>),
    /// Its other half.
    QueuePairAccept(QueuePair<'a>),
    /// No.
    QueuePairRefuse(QueuePairRefuse<'a>),
    /// A payload is wanted.
    Get(Get<'a>),
    /// A lease on it.
    Grant(Grant<'a>),
    /// No.
    Refuse(Refuse<'a>),
    /// A get is not wanted any more.
    Cancel(Cancel),
    /// Leases ended.
    Close(Close<'a>),
    /// More of a payload can be read.
    Watermark(Watermark),
    /// Leases are still wanted.
    KeepAlive(KeepAlive<'a>),
    /// Leases are extended.
    KeepAliveAck(KeepAliveAck<'a>),
    /// An end leaves. Last.
    Goodbye(Goodbye),
}

/// The kinds of frames, by their numbers on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u16)]
#[allow(missing_docs)] // described at `Frame`
pub enum Kind {
    Hello = 1,
    Reject = 2,
    Handshake = 3,
    QueuePairOpen = 16,
    QueuePairAccept = 17,
    QueuePairRefuse = 18,
    Get = 32,
    Grant = 33,
    Refuse = 34,
    Cancel = 35,
    Close = 36,
    Watermark = 37,
    KeepAlive = 48,
    KeepAliveAck = 49,
    Goodbye = 50,
}

/// A range of protocol versions, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Versions {
    /// The oldest.
    pub min: u16,
    /// The newest.
    pub max: u16,
}

impl Versions {
    /// What this release speaks.
    pub const SUPPORTED: Self = Self { min: 1, max: 1 };

    /// The newest version in both ranges.
    #[must_use]
    pub fn common(self, other: Self) -> Option<u16> {
        let newest = self.max.min(other.max);
        (newest >= self.min.max(other.min)).then_some(newest)
    }
}

/// Bytes of a frame's header.
pub const HEADER_LEN: usize = 16;

/// Longest key, in bytes.
pub const MAX_KEY: usize = 1024;

/// Longest provider address of a queue pair, in bytes.
pub const MAX_ADDRESS: usize = 512;

/// Longest text for a person, in bytes; a longer one is cut when it is written.
pub const MAX_TEXT: usize = 512;

/// Every end takes frames of this many bytes, header included: whatever fits can be sent before the peer's Hello said
/// how much more it takes. The largest Hello, and a get with the longest key, fit.
pub const MIN_MAX_FRAME: u32 = 4096;

/// `towl`, as the bytes lie on the wire.
const MAGIC: u32 = u32::from_le_bytes(*b"towl");

/// What the checksum covers of the header: all but itself.
const CHECKED_LEN: usize = HEADER_LEN - 4;

/// A whole frame at the front of some bytes, its header and checksum checked and its body not yet read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Envelope {
    pub(crate) kind: Kind,
    flags: u16,
    /// Bytes of the frame, header included.
    pub(crate) len: usize,
}

impl Envelope {
    /// Finds the frame at the front of `bytes`; `Ok(None)` if more bytes are needed.
    pub(crate) fn read(bytes: &[u8], max_frame: u32) -> Result<Option<Self>, WireError> {
        let Ok((header, rest)) = RawHeader::ref_from_prefix(bytes) else {
            // What can't become a frame is refused at once: its sender may wait for the answer.
            let magic = MAGIC.to_le_bytes();
            let have = bytes.len().min(magic.len());
            if bytes[..have] != magic[..have] {
                let mut found = [0; 4];
                found[..have].copy_from_slice(&bytes[..have]);
                return Err(WireError::Magic { found: u32::from_le_bytes(found) });
            }
            return Ok(None);
        };
        if header.magic != MAGIC {
            return Err(WireError::Magic { found: header.magic.get() });
        }
        let need = HEADER_LEN as u64 + u64::from(header.len);
        if need > u64::from(max_frame) {
            return Err(WireError::TooLarge { need, limit: max_frame });
        }
        let Some(body) = rest.get(..header.len.get() as usize) else { return Ok(None) };
        let computed = checksum(&bytes[..CHECKED_LEN], body);
        if header.crc != computed {
            return Err(WireError::Checksum { computed, found: header.crc.get() });
        }
        let kind = Kind::from_wire(header.kind.get()).ok_or(WireError::UnknownKind { kind: header.kind.get() })?;
        Ok(Some(Self { kind, flags: header.flags.get(), len: HEADER_LEN + body.len() }))
    }

    /// Reads the body; `frame` is the bytes of exactly this frame.
    pub(crate) fn frame<'a>(&self, frame: &'a [u8]) -> Result<Frame<'a>, WireError> {
        let kind = self.kind;
        let mut body = Body::new(kind, frame.get(HEADER_LEN..).unwrap_or_default());
        if self.flags != 0 && !matches!(kind, Kind::Get | Kind::Grant) {
            return Err(WireError::Value { kind, what: "flags" });
        }
        let frame = match kind {
            Kind::Hello => Frame::Hello(Hello::read(&mut body)?),
            Kind::Reject => Frame::Reject(Reject::read(&mut body)?),
            Kind::Handshake => Frame::Handshake(body.rest()),
            Kind::QueuePairOpen => Frame::QueuePairOpen(QueuePair::read(&mut body)?),
            Kind::QueuePairAccept => Frame::QueuePairAccept(QueuePair::read(&mut body)?),
            Kind::QueuePairRefuse => Frame::QueuePairRefuse(QueuePairRefuse::read(&mut body)?),
            Kind::Get => Frame::Get(Get::read(self.flags, &mut body)?),
            Kind::Grant => Frame::Grant(Grant::read(self.flags, &mut body)?),
            Kind::Refuse => Frame::Refuse(Refuse::read(&mut body)?),
            Kind::Cancel => Frame::Cancel(Cancel::read(&mut body)?),
            Kind::Close => Frame::Close(Close::read(&mut body)?),
            Kind::Watermark => Frame::Watermark(Watermark::read(&mut body)?),
            Kind::KeepAlive => Frame::KeepAlive(KeepAlive::read(&mut body)?),
            Kind::KeepAliveAck => Frame::KeepAliveAck(KeepAliveAck::read(&mut body)?),
            Kind::Goodbye => Frame::Goodbye(Goodbye::read(&mut body)?),
        };
        body.end()?;
        Ok(frame)
    }
}

impl<'a> Frame<'a> {
    /// Reads the frame at the front of `bytes` and says how many bytes it takes; `Ok(None)` if more bytes are needed.
    /// `max_frame` limits the frame, header included.
    ///
    /// # Errors
    /// [`WireError`]; the stream is of no use after it.
    pub fn decode(bytes: &'a [u8], max_frame: u32) -> Result<Option<(Self, usize)>, WireError> {
        let Some(envelope) = Envelope::read(bytes, max_frame)? else { return Ok(None) };
        Ok(Some((envelope.frame(&bytes[..envelope.len])?, envelope.len)))
    }

    /// Appends the frame's bytes to `out`.
    ///
    /// # Errors
    /// [`EncodeError`] if a field is longer than the protocol allows; `out` is then as it was.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let flags = match self {
            Frame::Get(get) => get.flags.bits(),
            Frame::Grant(grant) => grant.flags.bits(),
            _ => 0,
        };
        framed(self.kind(), flags, self.encoded_len(), out, |out| {
            match self {
                Frame::Hello(hello) => hello.write(out)?,
                Frame::Reject(reject) => reject.write(out)?,
                Frame::Handshake(message) => out.extend_from_slice(message),
                Frame::QueuePairOpen(queue_pair) => queue_pair.write(Kind::QueuePairOpen, out)?,
                Frame::QueuePairAccept(queue_pair) => queue_pair.write(Kind::QueuePairAccept, out)?,
                Frame::QueuePairRefuse(refuse) => refuse.write(out)?,
                Frame::Get(get) => get.write(out)?,
                Frame::Grant(grant) => {
                    grant.write(grant.eager.len(), out)?;
                    out.extend_from_slice(grant.eager);
                }
                Frame::Refuse(refuse) => refuse.write(out)?,
                Frame::Cancel(cancel) => cancel.write(out),
                Frame::Close(close) => close.write(out)?,
                Frame::Watermark(watermark) => watermark.write(out),
                Frame::KeepAlive(keep_alive) => keep_alive.write(out)?,
                Frame::KeepAliveAck(ack) => ack.write(out)?,
                Frame::Goodbye(goodbye) => goodbye.write(out),
            }
            Ok(())
        })
    }

    /// How many bytes [`encode`](Self::encode) appends.
    #[must_use]
    pub fn encoded_len(&self) -> usize {
        let body = match self {
            Frame::Hello(hello) => hello.body_len(),
            Frame::Reject(reject) => reject.body_len(),
            Frame::Handshake(message) => message.len(),
            Frame::QueuePairOpen(queue_pair) | Frame::QueuePairAccept(queue_pair) => queue_pair.body_len(),
            Frame::QueuePairRefuse(refuse) => refuse.body_len(),
            Frame::Get(get) => get.body_len(),
            Frame::Grant(grant) => grant.body_len(grant.eager.len()),
            Frame::Refuse(refuse) => refuse.body_len(),
            Frame::Cancel(_) => size_of::<layout::RawCancel>(),
            Frame::Close(close) => close.body_len(),
            Frame::Watermark(_) => size_of::<layout::RawWatermark>(),
            Frame::KeepAlive(keep_alive) => keep_alive.body_len(),
            Frame::KeepAliveAck(ack) => ack.body_len(),
            Frame::Goodbye(_) => size_of::<layout::RawGoodbye>(),
        };
        HEADER_LEN.saturating_add(body)
    }

    /// Its kind.
    #[must_use]
    pub const fn kind(&self) -> Kind {
        match self {
            Frame::Hello(_) => Kind::Hello,
            Frame::Reject(_) => Kind::Reject,
            Frame::Handshake(_) => Kind::Handshake,
            Frame::QueuePairOpen(_) => Kind::QueuePairOpen,
            Frame::QueuePairAccept(_) => Kind::QueuePairAccept,
            Frame::QueuePairRefuse(_) => Kind::QueuePairRefuse,
            Frame::Get(_) => Kind::Get,
            Frame::Grant(_) => Kind::Grant,
            Frame::Refuse(_) => Kind::Refuse,
            Frame::Cancel(_) => Kind::Cancel,
            Frame::Close(_) => Kind::Close,
            Frame::Watermark(_) => Kind::Watermark,
            Frame::KeepAlive(_) => Kind::KeepAlive,
            Frame::KeepAliveAck(_) => Kind::KeepAliveAck,
            Frame::Goodbye(_) => Kind::Goodbye,
        }
    }
}

impl Grant<'_> {
    /// As [`Frame::encode`], with `eager_len` eager bytes that `fill` writes in place of [`eager`](Self::eager): they
    /// are copied once, and may come from memory that is no slice. `fill` is given exactly that many zeroes.
    ///
    /// # Errors
    /// As [`Frame::encode`].
    pub fn encode_with(
        &self,
        eager_len: usize,
        fill: impl FnOnce(&mut [u8]),
        out: &mut Vec<u8>,
    ) -> Result<(), EncodeError> {
        framed(Kind::Grant, self.flags.bits(), self.encoded_len_with(eager_len), out, |out| {
            self.write(eager_len, out)?;
            let start = out.len();
            out.resize(start + eager_len, 0);
            fill(&mut out[start..]);
            Ok(())
        })
    }

    /// How many bytes [`encode_with`](Self::encode_with) appends.
    #[must_use]
    pub const fn encoded_len_with(&self, eager_len: usize) -> usize {
        HEADER_LEN.saturating_add(self.body_len(eager_len))
    }
}

/// Appends a frame of `total` bytes, header included, whose body `write` appends.
fn framed(
    kind: Kind,
    flags: u16,
    total: usize,
    out: &mut Vec<u8>,
    write: impl FnOnce(&mut Vec<u8>) -> Result<(), EncodeError>,
) -> Result<(), EncodeError> {
    let limit = u32::MAX as usize;
    let len = u32::try_from(total - HEADER_LEN);
    let len = len.map_err(|_| EncodeError { kind, what: "body", len: total - HEADER_LEN, limit })?;
    let start = out.len();
    out.reserve(total);
    let mut header = RawHeader {
        magic: MAGIC.into(),
        kind: (kind as u16).into(),
        flags: flags.into(),
        len: len.into(),
        crc: 0.into(),
    };
    out.extend(header.as_bytes());
    if let Err(error) = write(out) {
        out.truncate(start);
        return Err(error);
    }
    let (head, body) = out[start..].split_at_mut(HEADER_LEN);
    debug_assert_eq!(body.len(), total - HEADER_LEN, "the length announced is the length written");
    header.crc = checksum(&head[..CHECKED_LEN], body).into();
    head.copy_from_slice(header.as_bytes());
    Ok(())
}

/// A frame of any kind, flags and body, with the length and checksum that it needs to be looked at.
pub(crate) fn forge(kind: u16, flags: u16, body: &[u8], out: &mut Vec<u8>) {
    let len = (body.len() as u32).into();
    let mut header = RawHeader { magic: MAGIC.into(), kind: kind.into(), flags: flags.into(), len, crc: 0.into() };
    header.crc = checksum(&header.as_bytes()[..CHECKED_LEN], body).into();
    out.extend(header.as_bytes());
    out.extend(body);
}

fn checksum(header: &[u8], body: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(header), body)
}

impl Kind {
    /// Every kind.
    pub const ALL: [Self; 15] = [
        Self::Hello,
        Self::Reject,
        Self::Handshake,
        Self::QueuePairOpen,
        Self::QueuePairAccept,
        Self::QueuePairRefuse,
        Self::Get,
        Self::Grant,
        Self::Refuse,
        Self::Cancel,
        Self::Close,
        Self::Watermark,
        Self::KeepAlive,
        Self::KeepAliveAck,
        Self::Goodbye,
    ];

    fn from_wire(number: u16) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u16 == number)
    }
}
