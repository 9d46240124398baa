//! How the C types and constants are declared: once, so that the test which compares them with the headers can't miss a
//! field or a value.

/// Declares C structs and unions. Each is given its C spelling and how it relates to the header's:
///
/// - `exact`: all of it;
/// - `prefix`: its first fields; newer headers have more at the end (callers pass its length, or the library allocates
///   it);
/// - `tail`: its last fields, counted back from its member `context`; newer headers have more in front.
macro_rules! c_types {
    ($(
        $(#[$meta:meta])*
        $form:ident $c:literal $kind:tt $name:ident {
            $($(#[$field_meta:meta])* $field:ident: $ty:ty,)+
        }
    )+) => {
        $(
            $(#[$meta])*
            #[doc = concat!("\n\nIn C: `", $c, "`, `infiniband/verbs.h`.")]
            #[repr(C)]
            #[allow(missing_docs, reason = "fields have their C names; the manual page of the verb explains them")]
            pub $kind $name {
                $($(#[$field_meta])* pub $field: $ty,)+
            }

            const _: () = {
                const fn plain<T: crate::Plain>() {}
                $(plain::<$ty>();)+
            };
            // SAFETY: the lines above hold only if all zeros is a value of every field's type.
            unsafe impl crate::Plain for $name {}

            #[cfg(test)]
            impl crate::tests::c::CType for $name {
                fn declare(inner: String) -> String {
                    format!("{} {inner}", $c)
                }
            }
        )+

        #[cfg(test)]
        pub(crate) fn layouts() -> Vec<crate::tests::layout::Layout> {
            use crate::tests::{c::CType, layout::{Field, Form, Layout}};
            vec![$(Layout {
                c: $c,
                form: Form::$form,
                size: size_of::<$name>(),
                fields: vec![$(Field {
                    name: stringify!($field),
                    offset: core::mem::offset_of!($name, $field),
                    size: size_of::<$ty>(),
                    ty: <$ty as CType>::declare(String::new()),
                },)+],
            },)+]
        }
    };
}

/// Declares the values of C enumerations and macros, by their C names.
macro_rules! c_constants {
    ($($c:literal $ty:ident { $($name:ident = $value:expr,)+ })+) => {
        $($(
            #[doc = concat!("`", stringify!($name), "`, from ", $c, " of `infiniband/verbs.h`.")]
            pub const $name: $ty = $value;
        )+)+

        #[cfg(test)]
        pub(crate) const CONSTANTS: &[(&str, i64)] = &[$($((stringify!($name), $name as i64),)+)+];
    };
}

/// Declares types that are only ever pointed to.
macro_rules! c_opaque {
    ($($(#[$meta:meta])* $name:ident)+) => {
        $(
            $(#[$meta])*
            #[repr(C)]
            #[derive(Debug)]
            pub struct $name {
                _private: [u8; 0],
            }

            #[cfg(test)]
            impl crate::tests::c::CType for $name {
                fn declare(inner: String) -> String {
                    format!("struct {} {inner}", stringify!($name))
                }
            }
        )+
    };
}
