//! How Rust types are spelled in C.

use crate::Unused;
use core::ffi::c_void;
use core::mem::MaybeUninit;

/// A type with a spelling in C.
pub(crate) trait CType {
    /// The declaration of `inner` (a name, or nothing) as this type; empty for what is not compared.
    fn declare(inner: String) -> String;
}

macro_rules! spelled {
    ($($ty:ty = $c:literal)+) => {
        $(impl CType for $ty {
            fn declare(inner: String) -> String {
                format!("{} {inner}", $c)
            }
        })+
    };
}
spelled! {
    u16 = "uint16_t"
    u32 = "uint32_t"
    u64 = "uint64_t"
    i32 = "int"
    usize = "size_t"
    isize = "ssize_t"
    c_void = "void"
    () = "void"
    libc::pthread_mutex_t = "pthread_mutex_t"
    libc::pthread_cond_t = "pthread_cond_t"
}

// Where C's `char` has no sign, `c_char` is `u8`; it is only ever pointed to, and bytes are never pointed to as const.
impl CType for u8 {
    fn declare(inner: String) -> String {
        if cfg!(target_arch = "x86_64") || !inner.starts_with("const *") {
            format!("uint8_t {inner}")
        } else {
            format!("char {inner}")
        }
    }
}

impl CType for i8 {
    fn declare(inner: String) -> String {
        format!("char {inner}")
    }
}

impl CType for Unused {
    fn declare(_: String) -> String {
        String::new()
    }
}

impl<T: CType> CType for MaybeUninit<T> {
    fn declare(inner: String) -> String {
        T::declare(inner)
    }
}

impl<T: CType> CType for *mut T {
    fn declare(inner: String) -> String {
        T::declare(format!("*{inner}"))
    }
}

impl<T: CType> CType for *const T {
    fn declare(inner: String) -> String {
        T::declare(format!("const *{inner}"))
    }
}

// An array decays to a pointer when C looks at it: its size is compared, its type is not.
impl<T: CType, const N: usize> CType for [T; N] {
    fn declare(_: String) -> String {
        String::new()
    }
}

macro_rules! functions {
    ($(($($arg:ident)*))+) => {
        $(impl<R: CType, $($arg: CType),*> CType for Option<unsafe extern "C" fn($($arg),*) -> R> {
            fn declare(inner: String) -> String {
                let args: &[String] = &[$($arg::declare(String::new())),*];
                let args = if args.is_empty() { "void".into() } else { args.join(", ") };
                R::declare(format!("(*{inner})({args})"))
            }
        })+
    };
}
functions!(() (A) (A B) (A B C) (A B C D) (A B C D E) (A B C D E F));

#[test]
fn declarations_read_as_c() {
    type Compare = Option<unsafe extern "C" fn(*const c_void, *mut *mut u32) -> i32>;
    assert_eq!(u32::declare("x".into()), "uint32_t x");
    assert_eq!(<*const *mut u64>::declare("x".into()), "uint64_t *const *x");
    assert_eq!(Compare::declare("f".into()), "int (*f)(void const *, uint32_t **)");
    assert_eq!(<Option<unsafe extern "C" fn() -> ()>>::declare(String::new()), "void (*)(void)");
}
