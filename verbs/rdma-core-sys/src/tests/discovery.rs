//! The named answers, and what this machine says.

use super::fakes::{library, set_answer};
use super::layout::skip;
use crate::{DeviceList, Library, Unavailable, ibv_device, library};
use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

#[test]
fn no_library_is_named_with_what_the_loader_says() {
    // SAFETY: there is no such file.
    let error = unsafe { Library::open(c"libnothing-of-the-sort.so.9") }.unwrap_err();
    let Unavailable::NoLibrary { reason } = &error else { panic!("{error:?}") };
    assert!(reason.contains("libnothing-of-the-sort.so.9"), "{reason}");
    assert!(error.to_string().contains("install rdma-core"), "{error}");
}

#[test]
fn a_library_that_is_something_else_lacks_symbols() {
    // SAFETY: the C library is loaded already, and has no function that begins with ibv.
    let error = unsafe { Library::open(c"libc.so.6") }.unwrap_err();
    let Unavailable::MissingSymbol { symbol, version } = error else { panic!("{error:?}") };
    assert_eq!((symbol, version), (c"ibv_get_device_list", c"IBVERBS_1.1"));
}

#[test]
fn no_kernel_support_is_named() {
    set_answer(0, libc::ENOSYS);
    let error = library().devices().unwrap_err();
    assert_eq!(error, Unavailable::NoKernelSupport);
    assert!(error.to_string().contains("modprobe ib_uverbs"), "{error}");
}

#[test]
fn a_list_that_fails_otherwise_keeps_its_error_number() {
    set_answer(0, libc::EACCES);
    assert_eq!(library().devices().unwrap_err(), Unavailable::NoList(crate::Error::Errno(libc::EACCES)));
}

#[test]
fn no_device_is_named() {
    // A list, of which the fake says nothing about the length: it stays 0.
    set_answer(0x1000, 0);
    assert_eq!(library().devices().unwrap_err(), Unavailable::NoDevice);
}

#[test]
fn the_answers_differ() {
    let answers = [
        Unavailable::NoLibrary { reason: "not found".into() },
        Unavailable::MissingSymbol { symbol: c"ibv_x", version: c"IBVERBS_1.1" },
        Unavailable::NoKernelSupport,
        Unavailable::NoDevice,
        Unavailable::NoList(crate::Error::Errno(libc::EACCES)),
    ];
    let texts: std::collections::HashSet<_> = answers.iter().map(ToString::to_string).collect();
    assert_eq!(texts.len(), answers.len());
}

static FREED: AtomicUsize = AtomicUsize::new(0);

/// Two devices, the second without a name.
extern "C" fn two_devices(num_devices: *mut c_int) -> *mut *mut ibv_device {
    let list =
        Box::new([ptr::without_provenance_mut::<ibv_device>(8), ptr::without_provenance_mut(16), ptr::null_mut()]);
    // SAFETY: the caller gives a place.
    unsafe { num_devices.write(2) };
    Box::into_raw(list).cast()
}

extern "C" fn free_two(list: *mut *mut ibv_device) {
    FREED.fetch_add(1, Ordering::Relaxed);
    // SAFETY: a list that `two_devices` made.
    drop(unsafe { Box::from_raw(list.cast::<[*mut ibv_device; 3]>()) });
}

extern "C" fn name_of(device: *mut ibv_device) -> *const c_char {
    if device.addr() == 8 { c"rxe0".as_ptr() } else { ptr::null() }
}

#[test]
fn a_list_is_read_within_its_length_and_freed_once() {
    let lookup = |symbol: &CStr, _: &CStr| match symbol.to_str().unwrap() {
        "ibv_get_device_list" => two_devices as *mut c_void,
        "ibv_free_device_list" => free_two as *mut c_void,
        "ibv_get_device_name" => name_of as *mut c_void,
        other => library::fakes::find(other),
    };
    // SAFETY: all are of the declared signatures.
    let library = unsafe { Library::resolve(lookup) }.unwrap();
    let list = library.devices().unwrap();
    assert_eq!((list.len(), list.is_empty()), (2, false));
    assert_eq!((list.name(0), list.name(1), list.name(2)), (Some("rxe0".into()), None, None));
    assert_eq!(list.get(1).map(|device| device.as_ptr().addr()), Some(16));
    assert_eq!(list.get(2), None);
    drop(list);
    assert_eq!(FREED.load(Ordering::Relaxed), 1);
}

#[test]
fn this_machines_library_has_all_that_is_required() {
    match Library::load() {
        Err(Unavailable::NoLibrary { reason }) => skip("this_machines_library_has_all_that_is_required", &reason),
        Err(other) => panic!("{other}"),
        Ok(library) => {
            assert!(ptr::eq(library, Library::load().unwrap()), "loaded once");
            match library.devices().as_ref().map(DeviceList::len) {
                Ok(devices) => println!("{devices} devices"),
                Err(Unavailable::NoKernelSupport) => {
                    assert!(!std::path::Path::new("/sys/class/infiniband_verbs").exists())
                }
                Err(Unavailable::NoDevice) => assert!(std::path::Path::new("/sys/class/infiniband_verbs").exists()),
                Err(other) => panic!("{other}"),
            }
            // SAFETY: any number is allowed.
            let text = unsafe { library.ibv_wc_status_str(crate::IBV_WC_REM_ACCESS_ERR) };
            // SAFETY: the library returns a C string of its own.
            assert_eq!(unsafe { CStr::from_ptr(text) }, c"remote access error");
        }
    }
}

#[test]
fn the_library_is_shared_by_threads() {
    const fn shared<T: Send + Sync>() {}
    shared::<Library>();
    shared::<Unavailable>();
}
