//! Elements: the bytes of buffers, parts and views as numbers.

use crate::Buffer;
use crate::layout::DType;
use core::fmt;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Plain numbers: types whose values are any bytes, and the dtypes they stand for.
pub trait Element: FromBytes + IntoBytes + Immutable + KnownLayout + Copy {
    /// The dtypes that a slice of this type may be taken from. Types without a Rust counterpart are given as their
    /// bits (`f16` as `u16`).
    const DTYPES: &'static [DType];
}

macro_rules! elements {
    ($($element:ty: $($dtype:ident),+;)*) => {
        $(impl Element for $element {
            const DTYPES: &'static [DType] = &[$(DType::$dtype),+];
        })*
    };
}

elements! {
    u8: U8, Bool, F8E4M3, F8E5M2;
    i8: I8;
    u16: U16, F16, BF16;
    i16: I16;
    u32: U32;
    i32: I32;
    f32: F32;
    u64: U64;
    i64: I64;
    f64: F64;
    [f32; 2]: Complex64;
    [f64; 2]: Complex128;
}

/// Why bytes can't be seen as elements of some type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TypeError {
    /// It holds elements of this dtype.
    DType(DType),
    /// Its memory is the caller's own, and does not begin at a multiple of the type's alignment.
    Misaligned,
    /// It has so many bytes, which are no whole number of elements.
    Length {
        /// Bytes there are.
        bytes: u64,
        /// Bytes of one element.
        size: u64,
    },
    /// The elements asked for do not all lie within it.
    OutOfRange {
        /// The first element asked for.
        first: u64,
        /// How many were asked for.
        count: u64,
        /// How many there are.
        elements: u64,
    },
}

impl TypeError {
    pub(crate) fn cause(&self) -> String {
        match self {
            Self::DType(dtype) => format!("the part holds elements of dtype {dtype}"),
            Self::Misaligned => "the part's memory is not aligned for the type".to_owned(),
            Self::Length { bytes, size } => format!("{bytes} bytes are no whole number of elements of {size} bytes"),
            Self::OutOfRange { first, count, elements } => {
                format!("{count} elements from number {first} on do not lie within the {elements} that there are")
            }
        }
    }

    pub(crate) fn way_out(&self) -> &'static str {
        match self {
            Self::DType(_) => "ask for the type that it stands for",
            Self::Misaligned => "get it into the pool, or copy its bytes",
            Self::Length { .. } => "allocate a multiple",
            Self::OutOfRange { .. } => "ask for fewer, or from an earlier one on",
        }
    }
}

impl fmt::Display for TypeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.cause(), self.way_out())
    }
}

impl std::error::Error for TypeError {}

/// Whether a part of this dtype can be seen as `T`s.
pub(crate) fn check<T: Element>(dtype: DType) -> Result<(), TypeError> {
    if T::DTYPES.contains(&dtype) { Ok(()) } else { Err(TypeError::DType(dtype)) }
}

/// The bytes as elements.
pub(crate) fn slice_of<T: Element>(bytes: &[u8]) -> Result<&[T], TypeError> {
    <[T]>::ref_from_bytes(bytes).map_err(|_| why::<T>(bytes.len()))
}

/// The elements' own bytes, to write.
pub(crate) fn bytes_of_mut<T: Element>(elements: &mut [T]) -> &mut [u8] {
    elements.as_mut_bytes()
}

fn why<T>(len: usize) -> TypeError {
    if len.is_multiple_of(size_of::<T>()) {
        TypeError::Misaligned
    } else {
        TypeError::Length { bytes: len as u64, size: size_of::<T>() as u64 }
    }
}

/// A buffer begins at a multiple of [`PART_ALIGN`](crate::PART_ALIGN), so that its bytes are aligned for every element.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use towline::{DType, Endpoint, Part};
///
/// let endpoint = Endpoint::builder().pool_size(1 << 20).build()?;
/// let mut activations = endpoint.alloc(1000 * size_of::<f32>())?;
/// for (index, value) in activations.elements_mut::<f32>()?.iter_mut().enumerate() {
///     *value = index as f32;
/// }
/// let part = Part::buffer("activations", DType::F32, &[1000], activations);
/// endpoint.put("layer 0", [part])?;
/// # Ok(())
/// # }
/// ```
impl Buffer {
    /// Its bytes as elements; what a fresh buffer holds is whatever its last owner left there.
    ///
    /// # Errors
    /// [`TypeError::Length`] when they are no whole number of elements.
    pub fn elements<T: Element>(&self) -> Result<&[T], TypeError> {
        slice_of(self.as_slice())
    }

    /// Its bytes as elements, to write.
    ///
    /// # Errors
    /// [`TypeError::Length`] when they are no whole number of elements.
    pub fn elements_mut<T: Element>(&mut self) -> Result<&mut [T], TypeError> {
        let len = self.len();
        <[T]>::mut_from_bytes(self.as_mut_slice()).map_err(|_| why::<T>(len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_do_not_fit_a_type_say_why() {
        let words = [0u64; 4];
        let bytes = words.as_bytes();
        assert_eq!(slice_of::<u32>(bytes).unwrap().len(), 8);
        assert_eq!(slice_of::<u32>(&bytes[..6]), Err(TypeError::Length { bytes: 6, size: 4 }));
        assert_eq!(slice_of::<u32>(&bytes[1..5]), Err(TypeError::Misaligned));
        assert_eq!(check::<u16>(DType::BF16), Ok(()));
        assert_eq!(check::<f32>(DType::F64), Err(TypeError::DType(DType::F64)));
    }
}
