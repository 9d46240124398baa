//! The frames: what each says, and how its body is written and read.

use super::layout::*;
use super::*;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U32;

/// The first frame of each end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hello<'a> {
    /// The protocol versions that this end speaks.
    pub versions: Versions,
    /// 128 random bits drawn when the endpoint started.
    pub incarnation: [u8; 16],
    /// The machine's boot id: the same on both ends, the machine may be the same.
    pub boot_id: [u8; 16],
    /// Names the process within the machine.
    pub process: [u8; 16],
    /// The abstract Unix socket on which this endpoint hands out descriptors; empty if there is none.
    pub unix_name: &'a [u8],
    /// Where this endpoint can be reached.
    pub advertised: Addresses<'a>,
    /// The largest frame that this end takes, with its header; at least [`MIN_MAX_FRAME`].
    pub max_frame: u32,
    /// Bits of what this end can do. Ends use what both have; unknown bits are ignored.
    pub features: u64,
}

/// Why an end does not accept a connection. The only frame that an end under Noise may send in clear.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reject<'a> {
    /// The reason.
    pub code: RejectCode,
    /// The protocol versions that the sender speaks.
    pub versions: Versions,
    /// For a person. It comes from the peer: print it escaped.
    pub text: &'a str,
}

/// A queue pair's coordinates: what [`Frame::QueuePairOpen`] proposes and [`Frame::QueuePairAccept`] answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueuePair<'a> {
    /// Names the queue pair within this session; the opening end chooses it.
    pub connection: u32,
    /// The provider, by the number that both ends give it.
    pub provider: u8,
    /// Counts the queue pairs that had this name, so that a late answer is known as one.
    pub generation: u32,
    /// The provider's own address of the queue pair; at most [`MAX_ADDRESS`] bytes.
    pub address: &'a [u8],
}

/// No to a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueuePairRefuse<'a> {
    /// As in the open.
    pub connection: u32,
    /// As in the open.
    pub provider: u8,
    /// As in the open.
    pub generation: u32,
    /// The reason.
    pub code: QueuePairCode,
    /// For a person. It comes from the peer: print it escaped.
    pub text: &'a str,
}

/// What a get wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Target<'a> {
    /// The payload of this key, now or when it is put; at most [`MAX_KEY`] bytes.
    Key(&'a [u8]),
    /// The payload in this slot of the incarnation that the session is with.
    Slot {
        /// The slot.
        slot: u32,
        /// Its generation.
        generation: u32,
    },
}

bitflags::bitflags! {
    /// How a get wants its payload.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub struct GetFlags: u16 {
        /// As a view of the producer's memory.
        const VIEW = 1;
    }

    /// How a payload is granted.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub struct GrantFlags: u16 {
        /// As a view of the producer's memory: the lease ends by the reader's word or its death, never by time.
        const VIEW = 1;
    }
}

/// A consumer's wish for a lease.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Get<'a> {
    /// Names the request within this session; the same number again is the same request (I11).
    pub request: u64,
    /// Which payload.
    pub target: Target<'a>,
    /// How long the producer may keep the request waiting for its payload, in microseconds.
    pub wait_us: u64,
    /// The consumer's clock when it sent this, in its own unit; the grant echoes it (I4).
    pub sent_at: u64,
    /// The largest payload, in bytes, that the consumer takes within the grant.
    pub max_eager: u32,
    /// How.
    pub flags: GetFlags,
    /// The provider over which the consumer will read.
    pub provider: u8,
}

/// A lease.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grant<'a> {
    /// The request that it answers.
    pub request: u64,
    /// Names the lease within this session.
    pub lease: u64,
    /// The payload's slot.
    pub slot: u32,
    /// The slot's generation.
    pub generation: u32,
    /// `sent_at` of the newest frame of the consumer that this answers (I4).
    pub echo: u64,
    /// How long the lease lasts from then on, in microseconds.
    pub lease_us: u64,
    /// How many bytes of the payload, from its start, can be read.
    pub watermark: u64,
    /// Bytes of the whole payload.
    pub total_len: u64,
    /// The provider over which it is to be read.
    pub provider: u8,
    /// How.
    pub flags: GrantFlags,
    /// Parts, names, types, shapes: opaque here.
    pub layout: &'a [u8],
    /// Where the payload lies in the producer's memory, in order. Empty for an eager one.
    pub segments: &'a [Segment],
    /// The payload itself, if it travels in the grant.
    pub eager: &'a [u8],
}

/// No to a get.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Refuse<'a> {
    /// The request that it answers.
    pub request: u64,
    /// The reason.
    pub code: RefuseCode,
    /// What the request needed, in the reason's unit; 0 if that does not apply.
    pub need: u64,
    /// What there was.
    pub have: u64,
    /// For a person. It comes from the peer: print it escaped.
    pub text: &'a str,
}

/// The consumer no longer waits. Ignored if the request is not known (any more).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cancel {
    /// The request.
    pub request: u64,
}

/// Leases that ended at the consumer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Close<'a> {
    /// Which, and how.
    pub entries: &'a [CloseEntry],
}

/// More of a payload that is being filled can be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Watermark {
    /// The lease.
    pub lease: u64,
    /// How many bytes of the payload, from its start, can be read.
    pub watermark: u64,
}

/// The consumer is alive and wants these leases extended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeepAlive<'a> {
    /// The consumer's clock when it sent this, in its own unit; the answer echoes it (I4).
    pub sent_at: u64,
    /// The leases.
    pub leases: &'a [LeaseId],
}

/// The producer's answer: the leases named are extended, but for those it does not know.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeepAliveAck<'a> {
    /// `sent_at` of the keep-alive.
    pub echo: u64,
    /// How long the leases last from then on, in microseconds.
    pub lease_us: u64,
    /// Leases that are not extended.
    pub unknown: &'a [LeaseId],
}

/// The last frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Goodbye {
    /// The reason.
    pub code: GoodbyeCode,
}

const TARGET_KEY: u8 = 1;
const TARGET_SLOT: u8 = 2;

/// A checked length for a field of the fixed part.
fn len<T: TryFrom<usize>>(kind: Kind, what: &'static str, len: usize, limit: usize) -> Result<T, EncodeError> {
    let error = EncodeError { kind, what, len, limit };
    if len > limit {
        return Err(error);
    }
    T::try_from(len).map_err(|_| error)
}

fn count(kind: Kind, what: &'static str, count: usize) -> Result<U32, EncodeError> {
    Ok(len::<u32>(kind, what, count, u32::MAX as usize)?.into())
}

/// A text for a person is cut at [`MAX_TEXT`] rather than refused: it must not keep a refusal from being sent.
pub(super) fn clip(text: &str) -> &str {
    let mut end = text.len().min(MAX_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

impl<'a> Hello<'a> {
    pub(super) const fn body_len(&self) -> usize {
        size_of::<RawHello>() + self.unix_name.len() + self.advertised.as_bytes().len()
    }

    pub(super) fn write(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let raw = RawHello {
            version_min: self.versions.min.into(),
            version_max: self.versions.max.into(),
            max_frame: self.max_frame.into(),
            incarnation: self.incarnation,
            boot_id: self.boot_id,
            process: self.process,
            features: self.features.into(),
            unix_len: len(Kind::Hello, "unix_name", self.unix_name.len(), MAX_UNIX_NAME)?,
            reserved: [0; 7],
        };
        out.extend(raw.as_bytes());
        out.extend(self.unix_name);
        out.extend(self.advertised.as_bytes());
        Ok(())
    }

    pub(super) fn read(body: &mut Body<'a>) -> Result<Self, WireError> {
        let raw: &RawHello = body.fixed()?;
        body.zero(&raw.reserved)?;
        let versions = Versions { min: raw.version_min.get(), max: raw.version_max.get() };
        if versions.min > versions.max {
            return Err(body.value("versions"));
        }
        if raw.max_frame.get() < MIN_MAX_FRAME {
            return Err(body.value("max_frame"));
        }
        let unix_name = body.bytes(raw.unix_len.into(), MAX_UNIX_NAME, "unix_name")?;
        let (advertised, rest) = Addresses::decode(body.rest()).ok_or_else(|| body.value("advertised"))?;
        body.put_back(rest);
        Ok(Self {
            versions,
            incarnation: raw.incarnation,
            boot_id: raw.boot_id,
            process: raw.process,
            unix_name,
            advertised,
            max_frame: raw.max_frame.get(),
            features: raw.features.get(),
        })
    }
}

impl<'a> Reject<'a> {
    pub(super) fn body_len(&self) -> usize {
        size_of::<RawReject>() + clip(self.text).len()
    }

    pub(super) fn write(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let text = clip(self.text);
        let raw = RawReject {
            code: u16::from(self.code).into(),
            version_min: self.versions.min.into(),
            version_max: self.versions.max.into(),
            text_len: len::<u16>(Kind::Reject, "text", text.len(), MAX_TEXT)?.into(),
        };
        out.extend(raw.as_bytes());
        out.extend(text.as_bytes());
        Ok(())
    }

    pub(super) fn read(body: &mut Body<'a>) -> Result<Self, WireError> {
        let raw: &RawReject = body.fixed()?;
        Ok(Self {
            code: raw.code.get().into(),
            versions: Versions { min: raw.version_min.get(), max: raw.version_max.get() },
            text: body.text(raw.text_len, MAX_TEXT)?,
        })
    }
}

impl<'a> QueuePair<'a> {
    pub(super) const fn body_len(&self) -> usize {
        size_of::<RawQueuePair>() + self.address.len()
    }

    pub(super) fn write(&self, kind: Kind, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let raw = RawQueuePair {
            connection: self.connection.into(),
            generation: self.generation.into(),
            address_len: len::<u16>(kind, "address", self.address.len(), MAX_ADDRESS)?.into(),
            provider: self.provider,
            reserved: 0,
        };
        out.extend(raw.as_bytes());
        out.extend(self.address);
        Ok(())
    }

    pub(super) fn read(body: &mut Body<'a>) -> Result<Self, WireError> {
        let raw: &RawQueuePair = body.fixed()?;
        body.zero(&[raw.reserved])?;
        Ok(Self {
            connection: raw.connection.get(),
            provider: raw.provider,
            generation: raw.generation.get(),
            address: body.bytes(raw.address_len.get().into(), MAX_ADDRESS, "address")?,
        })
    }
}

impl<'a> QueuePairRefuse<'a> {
    pub(super) fn body_len(&self) -> usize {
        size_of::<RawQueuePairRefuse>() + clip(self.text).len()
    }

    pub(super) fn write(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let text = clip(self.text);
        let raw = RawQueuePairRefuse {
            connection: self.connection.into(),
            generation: self.generation.into(),
            code: u16::from(self.code).into(),
            text_len: len::<u16>(Kind::QueuePairRefuse, "text", text.len(), MAX_TEXT)?.into(),
            provider: self.provider,
            reserved: [0; 3],
        };
        out.extend(raw.as_bytes());
        out.extend(text.as_bytes());
        Ok(())
    }

    pub(super) fn read(body: &mut Body<'a>) -> Result<Self, WireError> {
        let raw: &RawQueuePairRefuse = body.fixed()?;
        body.zero(&raw.reserved)?;
        Ok(Self {
            connection: raw.connection.get(),
            provider: raw.provider,
            generation: raw.generation.get(),
            code: raw.code.get().into(),
            text: body.text(raw.text_len, MAX_TEXT)?,
        })
    }
}

impl<'a> Get<'a> {
    pub(super) const fn body_len(&self) -> usize {
        let key = match self.target {
            Target::Key(key) => key.len(),
            Target::Slot { .. } => 0,
        };
        size_of::<RawGet>() + key
    }

    pub(super) fn write(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let (target, key, slot, generation): (_, &[u8], _, _) = match self.target {
            Target::Key(key) => (TARGET_KEY, key, 0, 0),
            Target::Slot { slot, generation } => (TARGET_SLOT, &[], slot, generation),
        };
        let raw = RawGet {
            request: self.request.into(),
            wait_us: self.wait_us.into(),
            sent_at: self.sent_at.into(),
            slot: slot.into(),
            generation: generation.into(),
            max_eager: self.max_eager.into(),
            key_len: len::<u16>(Kind::Get, "key", key.len(), MAX_KEY)?.into(),
            target,
            provider: self.provider,
        };
        out.extend(raw.as_bytes());
        out.extend(key);
        Ok(())
    }

    pub(super) fn read(flags: u16, body: &mut Body<'a>) -> Result<Self, WireError> {
        let raw: &RawGet = body.fixed()?;
        let key = body.bytes(raw.key_len.get().into(), MAX_KEY, "key")?;
        let (slot, generation) = (raw.slot.get(), raw.generation.get());
        let target = match raw.target {
            TARGET_KEY if slot == 0 && generation == 0 => Target::Key(key),
            TARGET_SLOT if key.is_empty() => Target::Slot { slot, generation },
            _ => return Err(body.value("target")),
        };
        Ok(Self {
            request: raw.request.get(),
            target,
            wait_us: raw.wait_us.get(),
            sent_at: raw.sent_at.get(),
            max_eager: raw.max_eager.get(),
            flags: GetFlags::from_bits(flags).ok_or_else(|| body.value("flags"))?,
            provider: raw.provider,
        })
    }
}

impl<'a> Grant<'a> {
    pub(super) const fn body_len(&self, eager_len: usize) -> usize {
        size_of::<RawGrant>() + size_of_val(self.segments) + self.layout.len() + eager_len
    }

    /// Writes the body but for the eager bytes, which come last.
    pub(super) fn write(&self, eager_len: usize, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let raw = RawGrant {
            request: self.request.into(),
            lease: self.lease.into(),
            echo: self.echo.into(),
            lease_us: self.lease_us.into(),
            watermark: self.watermark.into(),
            total_len: self.total_len.into(),
            slot: self.slot.into(),
            generation: self.generation.into(),
            layout_len: count(Kind::Grant, "layout", self.layout.len())?,
            segment_count: count(Kind::Grant, "segments", self.segments.len())?,
            eager_len: count(Kind::Grant, "eager", eager_len)?,
            provider: self.provider,
            reserved: [0; 3],
        };
        out.extend(raw.as_bytes());
        out.extend(self.segments.as_bytes());
        out.extend(self.layout);
        Ok(())
    }

    pub(super) fn read(flags: u16, body: &mut Body<'a>) -> Result<Self, WireError> {
        let raw: &RawGrant = body.fixed()?;
        body.zero(&raw.reserved)?;
        Ok(Self {
            request: raw.request.get(),
            lease: raw.lease.get(),
            slot: raw.slot.get(),
            generation: raw.generation.get(),
            echo: raw.echo.get(),
            lease_us: raw.lease_us.get(),
            watermark: raw.watermark.get(),
            total_len: raw.total_len.get(),
            provider: raw.provider,
            flags: GrantFlags::from_bits(flags).ok_or_else(|| body.value("flags"))?,
            segments: body.list(raw.segment_count, "segments")?,
            layout: body.bytes(raw.layout_len.get() as usize, usize::MAX, "layout")?,
            eager: body.bytes(raw.eager_len.get() as usize, usize::MAX, "eager")?,
        })
    }
}

impl<'a> Refuse<'a> {
    pub(super) fn body_len(&self) -> usize {
        size_of::<RawRefuse>() + clip(self.text).len()
    }

    pub(super) fn write(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let text = clip(self.text);
        let raw = RawRefuse {
            request: self.request.into(),
            need: self.need.into(),
            have: self.have.into(),
            code: u16::from(self.code).into(),
            text_len: len::<u16>(Kind::Refuse, "text", text.len(), MAX_TEXT)?.into(),
            reserved: [0; 4],
        };
        out.extend(raw.as_bytes());
        out.extend(text.as_bytes());
        Ok(())
    }

    pub(super) fn read(body: &mut Body<'a>) -> Result<Self, WireError> {
        let raw: &RawRefuse = body.fixed()?;
        body.zero(&raw.reserved)?;
        Ok(Self {
            request: raw.request.get(),
            code: raw.code.get().into(),
            need: raw.need.get(),
            have: raw.have.get(),
            text: body.text(raw.text_len, MAX_TEXT)?,
        })
    }
}

impl Cancel {
    pub(super) fn write(self, out: &mut Vec<u8>) {
        out.extend(RawCancel { request: self.request.into() }.as_bytes());
    }

    pub(super) fn read(body: &mut Body<'_>) -> Result<Self, WireError> {
        Ok(Self { request: body.fixed::<RawCancel>()?.request.get() })
    }
}

impl<'a> Close<'a> {
    pub(super) const fn body_len(&self) -> usize {
        size_of::<RawClose>() + size_of_val(self.entries)
    }

    pub(super) fn write(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        out.extend(RawClose { count: count(Kind::Close, "entries", self.entries.len())? }.as_bytes());
        out.extend(self.entries.as_bytes());
        Ok(())
    }

    pub(super) fn read(body: &mut Body<'a>) -> Result<Self, WireError> {
        let raw: &RawClose = body.fixed()?;
        Ok(Self { entries: body.list(raw.count, "entries")? })
    }
}

impl Watermark {
    pub(super) fn write(self, out: &mut Vec<u8>) {
        out.extend(RawWatermark { lease: self.lease.into(), watermark: self.watermark.into() }.as_bytes());
    }

    pub(super) fn read(body: &mut Body<'_>) -> Result<Self, WireError> {
        let raw: &RawWatermark = body.fixed()?;
        Ok(Self { lease: raw.lease.get(), watermark: raw.watermark.get() })
    }
}

impl<'a> KeepAlive<'a> {
    pub(super) const fn body_len(&self) -> usize {
        size_of::<RawKeepAlive>() + size_of_val(self.leases)
    }

    pub(super) fn write(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let count = count(Kind::KeepAlive, "leases", self.leases.len())?;
        out.extend(RawKeepAlive { sent_at: self.sent_at.into(), count }.as_bytes());
        out.extend(self.leases.as_bytes());
        Ok(())
    }

    pub(super) fn read(body: &mut Body<'a>) -> Result<Self, WireError> {
        let raw: &RawKeepAlive = body.fixed()?;
        Ok(Self { sent_at: raw.sent_at.get(), leases: body.list(raw.count, "leases")? })
    }
}

impl<'a> KeepAliveAck<'a> {
    pub(super) const fn body_len(&self) -> usize {
        size_of::<RawKeepAliveAck>() + size_of_val(self.unknown)
    }

    pub(super) fn write(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let count = count(Kind::KeepAliveAck, "unknown", self.unknown.len())?;
        let raw = RawKeepAliveAck { echo: self.echo.into(), lease_us: self.lease_us.into(), count };
        out.extend(raw.as_bytes());
        out.extend(self.unknown.as_bytes());
        Ok(())
    }

    pub(super) fn read(body: &mut Body<'a>) -> Result<Self, WireError> {
        let raw: &RawKeepAliveAck = body.fixed()?;
        Ok(Self { echo: raw.echo.get(), lease_us: raw.lease_us.get(), unknown: body.list(raw.count, "unknown")? })
    }
}

impl Goodbye {
    pub(super) fn write(self, out: &mut Vec<u8>) {
        out.extend(RawGoodbye { code: u16::from(self.code).into(), reserved: [0; 2] }.as_bytes());
    }

    pub(super) fn read(body: &mut Body<'_>) -> Result<Self, WireError> {
        let raw: &RawGoodbye = body.fixed()?;
        body.zero(&raw.reserved)?;
        Ok(Self { code: raw.code.get().into() })
    }
}
