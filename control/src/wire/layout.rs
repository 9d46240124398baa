//! The fixed part of each frame as it lies on the wire, and the reader of what varies behind it.
//!
//! Every struct is unaligned and without padding (the derives refuse others), its integers are little-endian, and its
//! reserved bytes are zero. The lengths of the variable parts stand in the fixed part; the parts follow in the order in
//! which [`frames`](super::frames) reads them.

use super::{Kind, WireError};
use static_assertions::const_assert_eq;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

macro_rules! layouts {
    ($($name:ident, $size:literal { $($field:ident: $ty:ty,)* })*) => {$(
        #[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
        #[repr(C)]
        pub(super) struct $name {
            $(pub(super) $field: $ty,)*
        }
        const_assert_eq!(size_of::<$name>(), $size);
    )*};
}

layouts! {
    RawHeader, 16 { magic: U32, kind: U16, flags: U16, len: U32, crc: U32, }
    RawHello, 72 {
        version_min: U16, version_max: U16, max_frame: U32,
        incarnation: [u8; 16], boot_id: [u8; 16], process: [u8; 16],
        features: U64, unix_len: u8, reserved: [u8; 7],
    }
    RawReject, 8 { code: U16, version_min: U16, version_max: U16, text_len: U16, }
    RawQueuePair, 12 { connection: U32, generation: U32, address_len: U16, provider: u8, reserved: u8, }
    RawQueuePairRefuse, 16 {
        connection: U32, generation: U32, code: U16, text_len: U16, provider: u8, reserved: [u8; 3],
    }
    RawGet, 40 {
        request: U64, wait_us: U64, sent_at: U64,
        slot: U32, generation: U32, max_eager: U32, key_len: U16, target: u8, provider: u8,
    }
    RawGrant, 72 {
        request: U64, lease: U64, echo: U64, lease_us: U64, watermark: U64, total_len: U64,
        slot: U32, generation: U32, layout_len: U32, segment_count: U32, eager_len: U32,
        provider: u8, reserved: [u8; 3],
    }
    RawRefuse, 32 { request: U64, need: U64, have: U64, code: U16, text_len: U16, reserved: [u8; 4], }
    RawCancel, 8 { request: U64, }
    RawClose, 4 { count: U32, }
    RawWatermark, 16 { lease: U64, watermark: U64, }
    RawKeepAlive, 12 { sent_at: U64, count: U32, }
    RawKeepAliveAck, 20 { echo: U64, lease_us: U64, count: U32, }
    RawGoodbye, 4 { code: U16, reserved: [u8; 2], }
}

/// Takes a body apart from the front. Nothing is copied, and each length is checked against what is there.
pub(super) struct Body<'a> {
    kind: Kind,
    bytes: &'a [u8],
}

impl<'a> Body<'a> {
    pub(super) const fn new(kind: Kind, bytes: &'a [u8]) -> Self {
        Self { kind, bytes }
    }

    pub(super) fn fixed<T>(&mut self) -> Result<&'a T, WireError>
    where
        T: FromBytes + KnownLayout + Immutable + Unaligned,
    {
        let (fixed, rest) = T::ref_from_prefix(self.bytes).map_err(|_| self.short("its fields"))?;
        self.bytes = rest;
        Ok(fixed)
    }

    pub(super) fn bytes(&mut self, len: usize, limit: usize, what: &'static str) -> Result<&'a [u8], WireError> {
        if len > limit {
            return Err(WireError::TooLong { kind: self.kind, what, len, limit });
        }
        let (bytes, rest) = self.bytes.split_at_checked(len).ok_or_else(|| self.short(what))?;
        self.bytes = rest;
        Ok(bytes)
    }

    pub(super) fn list<T>(&mut self, count: U32, what: &'static str) -> Result<&'a [T], WireError>
    where
        T: FromBytes + Immutable + Unaligned,
    {
        let (list, rest) =
            <[T]>::ref_from_prefix_with_elems(self.bytes, count.get() as usize).map_err(|_| self.short(what))?;
        self.bytes = rest;
        Ok(list)
    }

    pub(super) fn text(&mut self, len: U16, limit: usize) -> Result<&'a str, WireError> {
        let bytes = self.bytes(len.get().into(), limit, "text")?;
        core::str::from_utf8(bytes).map_err(|_| self.value("text"))
    }

    /// What is left, whatever its length.
    pub(super) fn rest(&mut self) -> &'a [u8] {
        core::mem::take(&mut self.bytes)
    }

    /// Puts back what a reader of its own kind left over.
    pub(super) fn put_back(&mut self, rest: &'a [u8]) {
        self.bytes = rest;
    }

    pub(super) fn zero(&self, reserved: &[u8]) -> Result<(), WireError> {
        if reserved.iter().any(|&byte| byte != 0) {
            return Err(self.value("a reserved byte"));
        }
        Ok(())
    }

    pub(super) const fn end(&self) -> Result<(), WireError> {
        if self.bytes.is_empty() {
            return Ok(());
        }
        Err(WireError::Trailing { kind: self.kind, bytes: self.bytes.len() })
    }

    pub(super) const fn value(&self, what: &'static str) -> WireError {
        WireError::Value { kind: self.kind, what }
    }

    const fn short(&self, what: &'static str) -> WireError {
        WireError::Short { kind: self.kind, what }
    }
}
