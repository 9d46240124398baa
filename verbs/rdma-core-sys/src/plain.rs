//! Types whose all-zero bytes are a value, as C's callers have it when they clear a struct before they fill it in.

use core::ffi::c_void;
use core::mem::MaybeUninit;

/// A type of which all zero bytes are a value.
///
/// # Safety
/// All zero bytes are a value of the type.
pub unsafe trait Plain: Sized {}

/// The value whose bytes are all zero.
#[must_use]
pub const fn zeroed<T: Plain>() -> T {
    // SAFETY: `Plain` says that all zero bytes are a value of `T`.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

macro_rules! plain {
    ($($ty:ty)+) => {
        $(
            // SAFETY: an integer.
            unsafe impl Plain for $ty {}
        )+
    };
}
plain!(u8 u16 u32 u64 usize i8 i32);

// SAFETY: a null pointer.
unsafe impl<T> Plain for *mut T {}
// SAFETY: a null pointer.
unsafe impl<T> Plain for *const T {}
// SAFETY: any bytes will do.
unsafe impl<T> Plain for MaybeUninit<T> {}
// SAFETY: zeros in each element.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}

macro_rules! plain_functions {
    ($(($($arg:ident)*))+) => {
        $(
            // SAFETY: `None` of an optional function pointer is null (documentation of `Option`, "Representation").
            unsafe impl<R, $($arg),*> Plain for Option<unsafe extern "C" fn($($arg),*) -> R> {}
        )+
    };
}
plain_functions!(() (A) (A B) (A B C) (A B C D) (A B C D E) (A B C D E F));

/// A slot of one of the library's tables that nothing here calls.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub struct Unused(*const c_void);

// SAFETY: a null pointer.
unsafe impl Plain for Unused {}
