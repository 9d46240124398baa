//! The exported functions: found by name and version in the library of this machine, called under their C names.

use crate::error::{count, errno, maybe, minus_one, null, plain, plain_ok};
use crate::{
    _compat_ibv_port_attr, Error, Unavailable, ibv_ah, ibv_ah_attr, ibv_async_event, ibv_comp_channel, ibv_context,
    ibv_cq, ibv_device, ibv_device_attr, ibv_gid, ibv_gid_entry, ibv_mr, ibv_pd, ibv_qp, ibv_qp_attr, ibv_qp_ex,
    ibv_qp_init_attr, ibv_srq, ibv_srq_attr, ibv_srq_init_attr,
};
use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use core::mem::transmute;
use core::ptr::NonNull;
use std::sync::OnceLock;

impl Library {
    /// Loads `libibverbs.so.1`, the first time, and keeps it for the life of the process: it is never unloaded, since
    /// the providers that it loads in turn can't be. What is missing is looked for again at the next call.
    ///
    /// Any thread may call it.
    ///
    /// # Errors
    /// [`Unavailable::NoLibrary`], [`Unavailable::MissingSymbol`].
    #[doc(alias = "dlopen")]
    pub fn load() -> Result<&'static Self, Unavailable> {
        static LOADED: OnceLock<Library> = OnceLock::new();
        if let Some(library) = LOADED.get() {
            return Ok(library);
        }
        // SAFETY: this is the name, with its ABI version, of the library whose functions are declared here.
        let library = unsafe { Self::open(c"libibverbs.so.1") }?;
        Ok(LOADED.get_or_init(|| library))
    }

    /// Loads another file: a library that lies outside the loader's paths, by its full path.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    ///
    /// # Safety
    /// Loading `name` runs its constructors. If it has the symbols, they are those of libibverbs.
    pub unsafe fn open(name: &CStr) -> Result<Self, Unavailable> {
        // SAFETY: `name` is a C string; the caller answers for the file's constructors. RTLD_LOCAL, since providers
        // name the library as their own dependency.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(Unavailable::NoLibrary { reason: loader_error() });
        }
        // SAFETY: `handle` is an open library, which is never closed; the caller says that the functions are those
        // declared here.
        unsafe { Self::resolve(|symbol, version| find(handle, symbol, version)) }
    }
}

/// A function by name and version, null if the library does not have it.
#[cfg(target_env = "gnu")]
fn find(handle: *mut c_void, symbol: &CStr, version: &CStr) -> *mut c_void {
    // SAFETY: an open library and two C strings.
    unsafe { libc::dlvsym(handle, symbol.as_ptr(), version.as_ptr()) }
}

/// A function by name: this C library's loader knows no versions.
#[cfg(not(target_env = "gnu"))]
fn find(handle: *mut c_void, symbol: &CStr, _version: &CStr) -> *mut c_void {
    // SAFETY: an open library and a C string.
    unsafe { libc::dlsym(handle, symbol.as_ptr()) }
}

/// What the loader says of its last failure in this thread.
fn loader_error() -> String {
    // SAFETY: the call has no precondition; it returns null or a C string that stays until this thread's next call.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "the loader gives no reason".into();
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// The type of an exported function.
macro_rules! function {
    (($($ty:ty),*) -> $ret:ty) => { unsafe extern "C" fn($($ty),*) -> $ret };
}

/// Declares the exported functions: how each reports errors, its symbol version, its signature, what its method returns.
/// `required` and `optional` ones get a method; `wrapped` ones are required and are called by a method elsewhere.
macro_rules! symbols {
    (
        required { $($conv:ident $version:literal fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty => $result:ty;)+ }
        wrapped { $($w_version:literal fn $w_name:ident($($w_arg:ident: $w_ty:ty),*) -> $w_ret:ty;)+ }
        optional {
            $($o_conv:ident $o_version:literal fn $o_name:ident($($o_arg:ident: $o_ty:ty),*) -> $o_ret:ty => $o_result:ty;)+
        }
    ) => {
        /// The functions of a loaded libibverbs.
        ///
        /// `Send` and `Sync`; which verbs may be called at once is said by their manual pages (almost all of them).
        #[derive(Debug, Clone)]
        pub struct Library {
            $($name: function!(($($ty),*) -> $ret),)+
            $(pub(crate) $w_name: function!(($($w_ty),*) -> $w_ret),)+
            $($o_name: Option<function!(($($o_ty),*) -> $o_ret)>,)+
        }

        impl Library {
            /// Builds the table from whatever `lookup` finds under a name and a version: another loader, or fakes.
            ///
            /// # Errors
            /// [`Unavailable::MissingSymbol`] for the first required function that is null.
            ///
            /// # Safety
            /// What `lookup` returns is null or a function of that name's signature and meaning, for ever.
            pub unsafe fn resolve(
                mut lookup: impl FnMut(&'static CStr, &'static CStr) -> *mut c_void,
            ) -> Result<Self, Unavailable> {
                let mut find = |symbol: &'static str, version: &'static str| {
                    let (symbol, version) = (c_string(symbol), c_string(version));
                    NonNull::new(lookup(symbol, version)).ok_or(Unavailable::MissingSymbol { symbol, version })
                };
                Ok(Self {
                    $($name: {
                        let address = find(concat!(stringify!($name), "\0"), concat!($version, "\0"))?;
                        // SAFETY: a function of this signature, says the caller.
                        unsafe { transmute::<NonNull<c_void>, function!(($($ty),*) -> $ret)>(address) }
                    },)+
                    $($w_name: {
                        let address = find(concat!(stringify!($w_name), "\0"), concat!($w_version, "\0"))?;
                        // SAFETY: a function of this signature, says the caller.
                        unsafe { transmute::<NonNull<c_void>, function!(($($w_ty),*) -> $w_ret)>(address) }
                    },)+
                    $($o_name: {
                        let address = find(concat!(stringify!($o_name), "\0"), concat!($o_version, "\0")).ok();
                        // SAFETY: none, or a function of this signature, says the caller; `None` is null for both.
                        unsafe {
                            transmute::<Option<NonNull<c_void>>, Option<function!(($($o_ty),*) -> $o_ret)>>(address)
                        }
                    },)+
                })
            }

            $(
                #[doc = concat!("`", stringify!($name), "`: see its manual page.")]
                ///
                /// # Safety
                /// What the manual page asks for: handles are ones that this library made and that are not destroyed,
                /// other pointers are valid for what is read and written through them.
                #[inline]
                pub unsafe fn $name(&self, $($arg: $ty),*) -> $result {
                    // SAFETY: the caller's, in full.
                    $conv(unsafe { (self.$name)($($arg),*) })
                }
            )+
            $(
                #[doc = concat!("`", stringify!($o_name), "`, from symbol version ", $o_version, " on: see its manual page.")]
                ///
                /// # Errors
                /// [`Error::NoSymbol`] where this machine's library does not have it.
                ///
                /// # Safety
                /// What the manual page asks for: handles are ones that this library made and that are not destroyed,
                /// other pointers are valid for what is read and written through them.
                #[inline]
                pub unsafe fn $o_name(&self, $($o_arg: $o_ty),*) -> $o_result {
                    let function = self.$o_name.ok_or(Error::NoSymbol(stringify!($o_name)))?;
                    // SAFETY: the caller's, in full.
                    $o_conv(unsafe { function($($o_arg),*) })
                }
            )+
        }

        /// A fake of each function: it answers what the test told it to.
        #[cfg(test)]
        pub(crate) mod fakes {
            use super::*;
            use crate::tests::fakes::answer;

            $(pub(crate) extern "C" fn $name($(_: $ty),*) -> $ret { answer() })+
            $(pub(crate) extern "C" fn $w_name($(_: $w_ty),*) -> $w_ret { answer() })+
            $(pub(crate) extern "C" fn $o_name($(_: $o_ty),*) -> $o_ret { answer() })+

            /// The fake of a function, null for an unknown name.
            pub(crate) fn find(name: &str) -> *mut c_void {
                $(if name == stringify!($name) { return $name as *mut c_void; })+
                $(if name == stringify!($w_name) { return $w_name as *mut c_void; })+
                $(if name == stringify!($o_name) { return $o_name as *mut c_void; })+
                core::ptr::null_mut()
            }

            /// Calls the method of that name with zeros, and says what it returned.
            pub(crate) fn call(library: &Library, name: &str) -> String {
                $(if name == stringify!($name) {
                    // SAFETY: the fakes look at no argument.
                    return format!("{:?}", unsafe { library.$name($(crate::zeroed::<$ty>()),*) });
                })+
                $(if name == stringify!($o_name) {
                    // SAFETY: the fakes look at no argument.
                    return format!("{:?}", unsafe { library.$o_name($(crate::zeroed::<$o_ty>()),*) });
                })+
                "no method".into()
            }
        }

        /// Name, symbol version, whether required, and C type of each function.
        #[cfg(test)]
        pub(crate) fn signatures() -> Vec<crate::tests::layout::Signature> {
            use crate::tests::{c::CType, layout::Signature};
            vec![
                $(Signature {
                    name: stringify!($name),
                    version: $version,
                    required: true,
                    ty: <Option<function!(($($ty),*) -> $ret)> as CType>::declare(String::new()),
                },)+
                $(Signature {
                    name: stringify!($w_name),
                    version: $w_version,
                    required: true,
                    ty: <Option<function!(($($w_ty),*) -> $w_ret)> as CType>::declare(String::new()),
                },)+
                $(Signature {
                    name: stringify!($o_name),
                    version: $o_version,
                    required: false,
                    ty: <Option<function!(($($o_ty),*) -> $o_ret)> as CType>::declare(String::new()),
                },)+
            ]
        }
    };
}

/// A literal that ends in a zero byte, as a C string.
fn c_string(text: &'static str) -> &'static CStr {
    CStr::from_bytes_with_nul(text.as_bytes()).unwrap_or_default()
}

symbols! {
    required {
        null "IBVERBS_1.1" fn ibv_get_device_list(num_devices: *mut c_int) -> *mut *mut ibv_device
            => Result<NonNull<*mut ibv_device>, Error>;
        plain "IBVERBS_1.1" fn ibv_free_device_list(list: *mut *mut ibv_device) -> () => ();
        plain "IBVERBS_1.1" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char => *const c_char;
        plain "IBVERBS_1.1" fn ibv_get_device_guid(device: *mut ibv_device) -> u64 => u64;
        null "IBVERBS_1.1" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context
            => Result<NonNull<ibv_context>, Error>;
        minus_one "IBVERBS_1.1" fn ibv_close_device(context: *mut ibv_context) -> c_int => Result<c_int, Error>;
        minus_one "IBVERBS_1.1" fn ibv_get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int
            => Result<c_int, Error>;
        plain "IBVERBS_1.1" fn ibv_ack_async_event(event: *mut ibv_async_event) -> () => ();
        errno "IBVERBS_1.1" fn ibv_query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int
            => Result<(), Error>;
        minus_one "IBVERBS_1.1" fn ibv_query_gid(context: *mut ibv_context, port: u8, index: c_int, gid: *mut ibv_gid)
            -> c_int => Result<c_int, Error>;
        minus_one "IBVERBS_1.1" fn ibv_query_pkey(context: *mut ibv_context, port: u8, index: c_int, pkey: *mut u16)
            -> c_int => Result<c_int, Error>;
        null "IBVERBS_1.1" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd => Result<NonNull<ibv_pd>, Error>;
        errno "IBVERBS_1.1" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int => Result<(), Error>;
        errno "IBVERBS_1.1" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int => Result<(), Error>;
        null "IBVERBS_1.0" fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel
            => Result<NonNull<ibv_comp_channel>, Error>;
        errno "IBVERBS_1.0" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int => Result<(), Error>;
        null "IBVERBS_1.1" fn ibv_create_cq(
            context: *mut ibv_context, cqe: c_int, cq_context: *mut c_void, channel: *mut ibv_comp_channel,
            comp_vector: c_int
        ) -> *mut ibv_cq => Result<NonNull<ibv_cq>, Error>;
        errno "IBVERBS_1.1" fn ibv_resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int => Result<(), Error>;
        errno "IBVERBS_1.1" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int => Result<(), Error>;
        minus_one "IBVERBS_1.1" fn ibv_get_cq_event(
            channel: *mut ibv_comp_channel, cq: *mut *mut ibv_cq, cq_context: *mut *mut c_void
        ) -> c_int => Result<c_int, Error>;
        plain "IBVERBS_1.1" fn ibv_ack_cq_events(cq: *mut ibv_cq, nevents: c_uint) -> () => ();
        null "IBVERBS_1.1" fn ibv_create_srq(pd: *mut ibv_pd, init_attr: *mut ibv_srq_init_attr) -> *mut ibv_srq
            => Result<NonNull<ibv_srq>, Error>;
        errno "IBVERBS_1.1" fn ibv_modify_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, attr_mask: c_int) -> c_int
            => Result<(), Error>;
        errno "IBVERBS_1.1" fn ibv_query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int => Result<(), Error>;
        errno "IBVERBS_1.1" fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int => Result<(), Error>;
        null "IBVERBS_1.1" fn ibv_create_qp(pd: *mut ibv_pd, init_attr: *mut ibv_qp_init_attr) -> *mut ibv_qp
            => Result<NonNull<ibv_qp>, Error>;
        errno "IBVERBS_1.1" fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, attr_mask: c_int) -> c_int
            => Result<(), Error>;
        errno "IBVERBS_1.1" fn ibv_query_qp(
            qp: *mut ibv_qp, attr: *mut ibv_qp_attr, attr_mask: c_int, init_attr: *mut ibv_qp_init_attr
        ) -> c_int => Result<(), Error>;
        errno "IBVERBS_1.1" fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int => Result<(), Error>;
        null "IBVERBS_1.1" fn ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah
            => Result<NonNull<ibv_ah>, Error>;
        errno "IBVERBS_1.1" fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int => Result<(), Error>;
        errno "IBVERBS_1.1" fn ibv_fork_init() -> c_int => Result<(), Error>;
        plain "IBVERBS_1.1" fn ibv_wc_status_str(status: c_uint) -> *const c_char => *const c_char;
        plain "IBVERBS_1.1" fn ibv_node_type_str(node_type: c_int) -> *const c_char => *const c_char;
        plain "IBVERBS_1.1" fn ibv_port_state_str(port_state: c_uint) -> *const c_char => *const c_char;
        plain "IBVERBS_1.1" fn ibv_event_type_str(event: c_uint) -> *const c_char => *const c_char;
    }
    wrapped {
        "IBVERBS_1.1" fn ibv_query_port(context: *mut ibv_context, port: u8, attr: *mut _compat_ibv_port_attr) -> c_int;
        "IBVERBS_1.1" fn ibv_reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr;
    }
    optional {
        minus_one "IBVERBS_1.5" fn ibv_get_pkey_index(context: *mut ibv_context, port: u8, pkey: u16) -> c_int
            => Result<c_int, Error>;
        maybe "IBVERBS_1.6" fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex
            => Result<Option<NonNull<ibv_qp_ex>>, Error>;
        null "IBVERBS_1.8" fn ibv_reg_mr_iova2(
            pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64, access: c_uint
        ) -> *mut ibv_mr => Result<NonNull<ibv_mr>, Error>;
        minus_one "IBVERBS_1.9" fn ibv_get_device_index(device: *mut ibv_device) -> c_int => Result<c_int, Error>;
        errno "IBVERBS_1.11" fn _ibv_query_gid_ex(
            context: *mut ibv_context, port: u32, index: u32, entry: *mut ibv_gid_entry, flags: u32, entry_size: usize
        ) -> c_int => Result<(), Error>;
        count "IBVERBS_1.11" fn _ibv_query_gid_table(
            context: *mut ibv_context, entries: *mut ibv_gid_entry, max_entries: usize, flags: u32, entry_size: usize
        ) -> isize => Result<usize, Error>;
        null "IBVERBS_1.12" fn ibv_reg_dmabuf_mr(
            pd: *mut ibv_pd, offset: u64, length: usize, iova: u64, fd: c_int, access: c_int
        ) -> *mut ibv_mr => Result<NonNull<ibv_mr>, Error>;
        plain_ok "IBVERBS_1.13" fn ibv_is_fork_initialized() -> c_uint => Result<c_uint, Error>;
        plain_ok "IBVERBS_1.14" fn ibv_query_qp_data_in_order(qp: *mut ibv_qp, op: c_uint, flags: u32) -> c_int
            => Result<c_int, Error>;
    }
}
