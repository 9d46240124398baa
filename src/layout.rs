//! The layout of a payload: its parts, each with name, dtype, shape and length, and their places in a destination.
//!
//! Wire form, little-endian: `count: u16`, then per part `dtype: u8, dimensions: u8, name_len: u16, len: u64,
//! dimensions x u64, name`. In a destination every part begins at a multiple of [`PART_ALIGN`], in order, so that both
//! ends compute the same places from the layout alone.

use crate::{ErrorKind, Result};
use core::fmt;

/// Every part of a received payload begins at a multiple of this many bytes: a cache line, and the alignment that
/// vector loads of any current processor ask for.
pub const PART_ALIGN: u64 = 64;

/// Most parts of a payload.
pub const MAX_PARTS: usize = 1024;

/// Most bytes of a part's name.
pub const MAX_NAME: usize = 256;

/// Most dimensions of a part's shape.
pub const MAX_DIMENSIONS: usize = 8;

/// The type of a part's elements. towline moves bytes and never converts them: this is a label that arrives with them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum DType {
    U8 = 0,
    I8 = 1,
    Bool = 2,
    U16 = 3,
    I16 = 4,
    F16 = 5,
    BF16 = 6,
    U32 = 7,
    I32 = 8,
    F32 = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
    F8E4M3 = 13,
    F8E5M2 = 14,
    Complex64 = 15,
    Complex128 = 16,
}

impl DType {
    const TABLE: [(Self, &'static str, u64); 17] = [
        (Self::U8, "u8", 1),
        (Self::I8, "i8", 1),
        (Self::Bool, "bool", 1),
        (Self::U16, "u16", 2),
        (Self::I16, "i16", 2),
        (Self::F16, "f16", 2),
        (Self::BF16, "bf16", 2),
        (Self::U32, "u32", 4),
        (Self::I32, "i32", 4),
        (Self::F32, "f32", 4),
        (Self::U64, "u64", 8),
        (Self::I64, "i64", 8),
        (Self::F64, "f64", 8),
        (Self::F8E4M3, "f8e4m3", 1),
        (Self::F8E5M2, "f8e5m2", 1),
        (Self::Complex64, "complex64", 8),
        (Self::Complex128, "complex128", 16),
    ];

    /// Bytes of one element.
    #[must_use]
    pub const fn size(self) -> u64 {
        Self::TABLE[self as usize].2
    }

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        Self::TABLE[self as usize].1
    }

    fn from_code(code: u8) -> Option<Self> {
        Self::TABLE.get(usize::from(code)).map(|row| row.0)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One part of a payload, without its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PartLayout {
    /// Name, unique or not; at most [`MAX_NAME`] bytes.
    pub name: String,
    /// Type of the elements.
    pub dtype: DType,
    /// Extent of each dimension; empty for a scalar.
    pub shape: Vec<u64>,
    /// Length in bytes: the product of the shape times the size of the dtype.
    pub len: u64,
}

/// The parts of a payload, in order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Layout {
    parts: Vec<PartLayout>,
}

impl Layout {
    /// Adds a part of `len` bytes.
    ///
    /// # Errors
    /// The kind of error, when a limit is exceeded or the length is not what shape and dtype say.
    pub(crate) fn push(&mut self, name: &str, dtype: DType, shape: &[u64], len: u64) -> Result<(), ErrorKind> {
        let part = self.parts.len();
        let malformed =
            |what, have, need| Err(ErrorKind::PartMalformed { part, name: name.to_owned(), what, have, need });
        if part >= MAX_PARTS {
            return Err(ErrorKind::PartCount { count: part + 1, max: MAX_PARTS });
        }
        if name.len() > MAX_NAME {
            return malformed("length of its name", name.len() as u64, MAX_NAME as u64);
        }
        if shape.len() > MAX_DIMENSIONS {
            return malformed("number of dimensions", shape.len() as u64, MAX_DIMENSIONS as u64);
        }
        // A product with a zero in it is zero, wherever the zero stands and however large the rest is.
        let bytes = match shape.contains(&0) {
            true => Some(0),
            false => shape.iter().try_fold(dtype.size(), |product, extent| product.checked_mul(*extent)),
        };
        if bytes != Some(len) {
            return malformed("length against shape and dtype", len, bytes.unwrap_or(u64::MAX));
        }
        self.parts.push(PartLayout { name: name.to_owned(), dtype, shape: shape.to_vec(), len });
        Ok(())
    }

    /// The parts.
    #[must_use]
    pub fn parts(&self) -> &[PartLayout] {
        &self.parts
    }

    /// Bytes of all parts together.
    #[must_use]
    pub fn payload_len(&self) -> u64 {
        self.parts.iter().map(|part| part.len).sum()
    }

    /// Where each part begins in a destination.
    pub fn offsets(&self) -> impl Iterator<Item = u64> + '_ {
        self.parts.iter().scan(0, |end: &mut u64, part| {
            let start = end.next_multiple_of(PART_ALIGN);
            *end = start + part.len;
            Some(start)
        })
    }

    /// Bytes that a destination needs.
    #[must_use]
    pub fn destination_len(&self) -> u64 {
        self.offsets().last().unwrap_or(0) + self.parts.last().map_or(0, |part| part.len)
    }

    /// Appends the wire form.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.extend((self.parts.len() as u16).to_le_bytes());
        for part in &self.parts {
            out.push(part.dtype as u8);
            out.push(part.shape.len() as u8);
            out.extend((part.name.len() as u16).to_le_bytes());
            out.extend(part.len.to_le_bytes());
            for extent in &part.shape {
                out.extend(extent.to_le_bytes());
            }
            out.extend(part.name.as_bytes());
        }
    }

    /// Reads the wire form; nothing may be left over.
    ///
    /// # Errors
    /// What is wrong with it. Sums of lengths fit in 63 bits after this.
    pub(crate) fn decode(mut bytes: &[u8]) -> Result<Self, &'static str> {
        let count = usize::from(u16::from_le_bytes(take(&mut bytes)?));
        if count > MAX_PARTS {
            return Err("too many parts");
        }
        let mut layout = Self { parts: Vec::with_capacity(count) };
        let mut total = 0u64;
        for _ in 0..count {
            let [dtype, dimensions] = take(&mut bytes)?;
            let dtype = DType::from_code(dtype).ok_or("unknown dtype")?;
            let name_len = usize::from(u16::from_le_bytes(take(&mut bytes)?));
            let len = u64::from_le_bytes(take(&mut bytes)?);
            if usize::from(dimensions) > MAX_DIMENSIONS {
                return Err("too many dimensions");
            }
            let mut shape = [0; MAX_DIMENSIONS];
            for extent in &mut shape[..usize::from(dimensions)] {
                *extent = u64::from_le_bytes(take(&mut bytes)?);
            }
            let (name, rest) = bytes.split_at_checked(name_len).ok_or("truncated layout")?;
            bytes = rest;
            let name = core::str::from_utf8(name).map_err(|_| "a part's name is not UTF-8")?;
            total = total.checked_add(len).and_then(|t| t.checked_add(PART_ALIGN)).ok_or("lengths overflow")?;
            if total > i64::MAX as u64 {
                return Err("lengths overflow");
            }
            layout.push(name, dtype, &shape[..usize::from(dimensions)], len).map_err(|_| "a part breaks a rule")?;
        }
        if bytes.is_empty() { Ok(layout) } else { Err("bytes after the layout") }
    }
}

fn take<const N: usize>(bytes: &mut &[u8]) -> Result<[u8; N], &'static str> {
    let (head, rest) = bytes.split_first_chunk::<N>().ok_or("truncated layout")?;
    *bytes = rest;
    Ok(*head)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Layout {
        let mut layout = Layout::default();
        layout.push("k", DType::F32, &[3, 5], 60).unwrap();
        layout.push("empty", DType::BF16, &[0, 7], 0).unwrap();
        layout.push("scalar", DType::F64, &[], 8).unwrap();
        layout
    }

    #[test]
    fn parts_begin_at_cache_lines_in_order() {
        let layout = sample();
        assert_eq!(layout.offsets().collect::<Vec<_>>(), [0, 64, 64]);
        assert_eq!(layout.payload_len(), 68);
        assert_eq!(layout.destination_len(), 72);
        assert_eq!(Layout::default().destination_len(), 0);
    }

    #[test]
    fn wire_form_round_trips_and_every_truncation_is_refused() {
        let layout = sample();
        let mut bytes = Vec::new();
        layout.encode(&mut bytes);
        assert_eq!(Layout::decode(&bytes), Ok(layout));
        for cut in 0..bytes.len() {
            assert!(Layout::decode(&bytes[..cut]).is_err(), "cut at {cut}");
        }
        bytes.push(0);
        assert_eq!(Layout::decode(&bytes), Err("bytes after the layout"));
    }

    #[test]
    fn wrong_lengths_and_limits_are_told_apart() {
        let mut layout = Layout::default();
        assert!(matches!(
            layout.push("x", DType::F32, &[2], 7),
            Err(ErrorKind::PartMalformed { part: 0, have: 7, need: 8, .. })
        ));
        assert!(layout.push("x", DType::F32, &[u64::MAX, 2], 8).is_err());
        assert!(layout.push(&"n".repeat(257), DType::U8, &[1], 1).is_err());
        assert!(layout.push("x", DType::U8, &[1; 9], 1).is_err());
        for shape in [[0, u64::MAX, 2], [u64::MAX, 0, 2], [u64::MAX, 2, 0]] {
            let mut layout = Layout::default();
            layout.push("no element", DType::F64, &shape, 0).unwrap();
            assert!(layout.push("no element", DType::F64, &shape, 8).is_err());
            let mut bytes = Vec::new();
            layout.encode(&mut bytes);
            assert_eq!(Layout::decode(&bytes), Ok(layout));
        }
        for _ in 0..MAX_PARTS {
            layout.push("x", DType::U8, &[1], 1).unwrap();
        }
        assert!(matches!(layout.push("x", DType::U8, &[1], 1), Err(ErrorKind::PartCount { .. })));
    }

    #[test]
    fn lengths_that_overflow_together_are_refused() {
        let mut bytes = 2u16.to_le_bytes().to_vec();
        for _ in 0..2 {
            bytes.extend([DType::U8 as u8, 1, 0, 0]);
            bytes.extend((u64::MAX / 2).to_le_bytes());
            bytes.extend((u64::MAX / 2).to_le_bytes());
        }
        assert_eq!(Layout::decode(&bytes), Err("lengths overflow"));
    }

    #[test]
    fn the_dtype_table_is_in_the_order_of_its_codes() {
        for (code, row) in DType::TABLE.iter().enumerate() {
            assert_eq!(row.0 as usize, code);
            assert_eq!(DType::from_code(code as u8), Some(row.0));
        }
        assert_eq!(DType::from_code(17), None);
    }
}
