//! Each function's way of reporting errors, against a list that was made from the manual pages; and each missing symbol.

use super::fakes::{FakeContext, library, library_without, object, set_answer};
use crate::library::fakes::call;
use crate::{
    Error, Unavailable, ibv_alloc_mw, ibv_bind_mw, ibv_cq, ibv_dealloc_mw, ibv_inc_rkey, ibv_mr, ibv_mw, ibv_mw_bind,
    ibv_pd, ibv_poll_cq, ibv_post_recv, ibv_post_send, ibv_post_srq_recv, ibv_qp, ibv_recv_wr, ibv_req_notify_cq,
    ibv_send_wr, ibv_srq, ibv_wc, zeroed,
};
use core::ffi::c_int;
use core::ptr;

/// NULL, and `errno` says why.
const NULL_AND_ERRNO: &[&str] = &[
    "ibv_get_device_list",
    "ibv_open_device",
    "ibv_alloc_pd",
    "ibv_create_comp_channel",
    "ibv_create_cq",
    "ibv_create_srq",
    "ibv_create_qp",
    "ibv_create_ah",
    "ibv_reg_mr_iova2",
    "ibv_reg_dmabuf_mr",
];
/// The error number is returned.
const ERRNO_RETURNED: &[&str] = &[
    "ibv_query_device",
    "ibv_dealloc_pd",
    "ibv_dereg_mr",
    "ibv_destroy_comp_channel",
    "ibv_resize_cq",
    "ibv_destroy_cq",
    "ibv_modify_srq",
    "ibv_query_srq",
    "ibv_destroy_srq",
    "ibv_modify_qp",
    "ibv_query_qp",
    "ibv_destroy_qp",
    "ibv_destroy_ah",
    "ibv_fork_init",
    "_ibv_query_gid_ex",
];
/// -1, and `errno` says why; other values are results.
const MINUS_ONE_AND_ERRNO: &[&str] = &[
    "ibv_close_device",
    "ibv_get_async_event",
    "ibv_query_gid",
    "ibv_query_pkey",
    "ibv_get_cq_event",
    "ibv_get_pkey_index",
    "ibv_get_device_index",
];
/// A count, or the error number negated.
const COUNT: &[&str] = &["_ibv_query_gid_table"];
/// NULL is an answer, and `errno` says nothing.
const NULL_IS_NO: &[&str] = &["ibv_qp_to_qp_ex"];
/// Nothing is returned.
const VOID: &[&str] = &["ibv_free_device_list", "ibv_ack_async_event", "ibv_ack_cq_events"];
/// Can't fail.
const VALUE: &[&str] = &[
    "ibv_get_device_name",
    "ibv_get_device_guid",
    "ibv_wc_status_str",
    "ibv_node_type_str",
    "ibv_port_state_str",
    "ibv_event_type_str",
    "ibv_is_fork_initialized",
    "ibv_query_qp_data_in_order",
];
/// Called by a method of another file, with tests of its own.
const WRAPPED: &[&str] = &["ibv_query_port", "ibv_reg_mr"];

fn said(name: &str, value: i64, errno: c_int) -> String {
    set_answer(value, errno);
    call(&library(), name)
}

#[test]
fn each_function_has_one_convention() {
    let lists = [NULL_AND_ERRNO, ERRNO_RETURNED, MINUS_ONE_AND_ERRNO, COUNT, NULL_IS_NO, VOID, VALUE, WRAPPED];
    let mut listed = lists.concat();
    let mut declared: Vec<_> = crate::library::signatures().iter().map(|signature| signature.name).collect();
    listed.sort_unstable();
    declared.sort_unstable();
    assert_eq!(listed, declared);
}

#[test]
fn null_and_errno() {
    for name in NULL_AND_ERRNO {
        assert_eq!(said(name, 0, libc::ENOMEM), format!("Err(Errno({}))", libc::ENOMEM), "{name}");
        assert_eq!(said(name, 0, 0), format!("Err(Errno({}))", libc::EIO), "{name} that gives no reason");
        assert_eq!(said(name, 0x1000, libc::ENOMEM), "Ok(0x1000)", "{name}: errno of something else");
    }
}

#[test]
fn the_error_number_returned() {
    for name in ERRNO_RETURNED {
        assert_eq!(said(name, 0, libc::EINVAL), "Ok(())", "{name}: errno of something else");
        // EBUSY is what deallocating a protection domain says that still has a region.
        assert_eq!(said(name, libc::EBUSY.into(), libc::EINVAL), format!("Err(Errno({}))", libc::EBUSY), "{name}");
        assert_eq!(said(name, -i64::from(libc::EBUSY), 0), format!("Err(Errno({}))", libc::EBUSY), "{name} negated");
        assert_eq!(said(name, -1, libc::EBUSY), format!("Err(Errno({}))", libc::EBUSY), "{name} by -1 and errno");
        assert_eq!(said(name, i32::MIN.into(), 0), format!("Err(Errno({}))", i32::MAX), "{name}");
    }
}

#[test]
fn minus_one_and_errno() {
    for name in MINUS_ONE_AND_ERRNO {
        assert_eq!(said(name, -1, libc::EAGAIN), format!("Err(Errno({}))", libc::EAGAIN), "{name}");
        assert_eq!(said(name, 0, libc::EAGAIN), "Ok(0)", "{name}: errno of something else");
        assert_eq!(said(name, 7, libc::EAGAIN), "Ok(7)", "{name}");
    }
}

#[test]
fn a_count_or_the_error_number_negated() {
    for name in COUNT {
        assert_eq!(said(name, 0, libc::EINVAL), "Ok(0)", "{name}");
        assert_eq!(said(name, 3, libc::EINVAL), "Ok(3)", "{name}");
        assert_eq!(said(name, -i64::from(libc::EINVAL), 0), format!("Err(Errno({}))", libc::EINVAL), "{name}");
    }
}

#[test]
fn null_that_is_no_error() {
    for name in NULL_IS_NO {
        assert_eq!(said(name, 0, libc::EINVAL), "Ok(None)", "{name}");
        assert_eq!(said(name, 0x1000, libc::EINVAL), "Ok(Some(0x1000))", "{name}");
    }
}

#[test]
fn what_cannot_fail() {
    for name in VOID {
        assert_eq!(said(name, -1, libc::EINVAL), "()", "{name}");
    }
    for name in VALUE {
        let value = said(name, 1, libc::EINVAL);
        assert!(["1", "0x1", "Ok(1)"].contains(&value.as_str()), "{name}: {value}");
    }
}

#[test]
fn each_missing_symbol_is_named() {
    for signature in crate::library::signatures() {
        let library = library_without(signature.name);
        if signature.required {
            let Err(Unavailable::MissingSymbol { symbol, version }) = library else {
                panic!("{} is required: {library:?}", signature.name);
            };
            assert_eq!((symbol.to_str().unwrap(), version.to_str().unwrap()), (signature.name, signature.version));
        } else {
            set_answer(1, 0);
            let library = library.unwrap();
            assert_eq!(call(&library, signature.name), format!("Err(NoSymbol({:?}))", signature.name));
            assert_eq!(call(&library, "ibv_modify_qp"), format!("Err(Errno({}))", libc::EPERM), "the others are there");
        }
    }
}

extern "C" fn poll_cq(_: *mut ibv_cq, room: c_int, wc: *mut ibv_wc) -> c_int {
    if room == 0 {
        return -2;
    }
    // A status, an opcode and flags that no header knows yet.
    let completion = ibv_wc { wr_id: 5, status: 77, opcode: 300, wc_flags: 1 << 30, ..zeroed() };
    // SAFETY: the test gives room for one.
    unsafe { wc.write(completion) };
    1
}

extern "C" fn req_notify_cq(_: *mut ibv_cq, solicited_only: c_int) -> c_int {
    solicited_only
}

#[test]
fn polling_counts_or_fails_and_takes_what_no_header_knows() {
    let mut context = FakeContext::new();
    context.table().context.ops.poll_cq = Some(poll_cq);
    context.table().context.ops.req_notify_cq = Some(req_notify_cq);
    let mut cq: ibv_cq = object(&context);
    let mut wc: ibv_wc = zeroed();
    // SAFETY: the queue and the room for one completion are there.
    assert_eq!(unsafe { ibv_poll_cq(&raw mut cq, 1, &raw mut wc) }, Ok(1));
    assert_eq!((wc.wr_id, wc.status, wc.opcode, wc.wc_flags), (5, 77, 300, 1 << 30));
    // SAFETY: as above.
    assert_eq!(unsafe { ibv_poll_cq(&raw mut cq, 0, &raw mut wc) }, Err(Error::Errno(libc::EIO)));
    // SAFETY: as above.
    assert_eq!(unsafe { ibv_req_notify_cq(&raw mut cq, 0) }, Ok(()));
    // SAFETY: as above.
    assert_eq!(unsafe { ibv_req_notify_cq(&raw mut cq, libc::ENOMEM) }, Err(Error::Errno(libc::ENOMEM)));
}

extern "C" fn post_send(_: *mut ibv_qp, wr: *mut ibv_send_wr, bad_wr: *mut *mut ibv_send_wr) -> c_int {
    // SAFETY: the test posts a chain of two.
    let second = unsafe { (*wr).next };
    // SAFETY: the test gives a place.
    unsafe { bad_wr.write(second) };
    libc::ENOMEM
}

extern "C" fn post_recv(_: *mut ibv_qp, _: *mut ibv_recv_wr, _: *mut *mut ibv_recv_wr) -> c_int {
    0
}

extern "C" fn post_srq_recv(_: *mut ibv_srq, _: *mut ibv_recv_wr, _: *mut *mut ibv_recv_wr) -> c_int {
    -libc::EINVAL
}

#[test]
fn posting_says_which_request_was_not_posted() {
    let mut context = FakeContext::new();
    let (mut qp, mut srq): (ibv_qp, ibv_srq) = (object(&context), object(&context));
    let (mut second, mut receive): (ibv_send_wr, ibv_recv_wr) = (zeroed(), zeroed());
    let mut first = ibv_send_wr { next: &raw mut second, ..zeroed() };
    let (mut bad_send, mut bad_receive) = (ptr::null_mut(), ptr::null_mut());

    // A device without the operation: nothing was posted.
    // SAFETY: the objects and requests are there.
    let posted = unsafe { ibv_post_send(&raw mut qp, &raw mut first, &raw mut bad_send) };
    assert_eq!((posted, bad_send), (Err(Error::NoOperation("post_send")), &raw mut first));
    // SAFETY: as above.
    let posted = unsafe { ibv_post_recv(&raw mut qp, &raw mut receive, &raw mut bad_receive) };
    assert_eq!((posted, bad_receive), (Err(Error::NoOperation("post_recv")), &raw mut receive));
    bad_receive = ptr::null_mut();
    // SAFETY: as above.
    let posted = unsafe { ibv_post_srq_recv(&raw mut srq, &raw mut receive, &raw mut bad_receive) };
    assert_eq!((posted, bad_receive), (Err(Error::NoOperation("post_srq_recv")), &raw mut receive));

    let ops = &mut context.table().context.ops;
    ops.post_send = Some(post_send);
    ops.post_recv = Some(post_recv);
    ops.post_srq_recv = Some(post_srq_recv);
    // SAFETY: as above.
    let posted = unsafe { ibv_post_send(&raw mut qp, &raw mut first, &raw mut bad_send) };
    assert_eq!((posted, bad_send), (Err(Error::Errno(libc::ENOMEM)), &raw mut second));
    // SAFETY: as above.
    assert_eq!(unsafe { ibv_post_recv(&raw mut qp, &raw mut receive, &raw mut bad_receive) }, Ok(()));
    // SAFETY: as above.
    let posted = unsafe { ibv_post_srq_recv(&raw mut srq, &raw mut receive, &raw mut bad_receive) };
    assert_eq!(posted, Err(Error::Errno(libc::EINVAL)));
}

extern "C" fn alloc_mw(_: *mut ibv_pd, mw_type: u32) -> *mut ibv_mw {
    super::fakes::set_errno(libc::EINVAL);
    if mw_type == crate::IBV_MW_TYPE_1 { ptr::without_provenance_mut(64) } else { ptr::null_mut() }
}

extern "C" fn dealloc_mw(_: *mut ibv_mw) -> c_int {
    libc::EBUSY
}

extern "C" fn bind_mw(_: *mut ibv_qp, _: *mut ibv_mw, _: *mut ibv_mw_bind) -> c_int {
    0
}

#[test]
fn windows_are_checked_as_the_header_does() {
    let mut context = FakeContext::new();
    let (mut qp, mut pd, mut other): (ibv_qp, ibv_pd, ibv_pd) = (object(&context), object(&context), object(&context));
    let mut mw = ibv_mw { pd: &raw mut pd, ..object(&context) };
    // SAFETY: the objects are there, and the fakes look at none, here and below.
    assert_eq!(unsafe { ibv_alloc_mw(&raw mut pd, 1) }.err(), Some(Error::NoOperation("alloc_mw")));
    let ops = &mut context.table().context.ops;
    ops.alloc_mw = Some(alloc_mw);
    ops.dealloc_mw = Some(dealloc_mw);
    ops.bind_mw = Some(bind_mw);
    // SAFETY: as above.
    assert!(unsafe { ibv_alloc_mw(&raw mut pd, crate::IBV_MW_TYPE_1) }.is_ok());
    // SAFETY: as above.
    let refused = unsafe { ibv_alloc_mw(&raw mut pd, crate::IBV_MW_TYPE_2) };
    assert_eq!(refused.err(), Some(Error::Errno(libc::EINVAL)));
    // SAFETY: as above.
    assert_eq!(unsafe { ibv_dealloc_mw(&raw mut mw) }, Err(Error::Errno(libc::EBUSY)));

    let mut region = ibv_mr { pd: &raw mut pd, ..zeroed() };
    let mut bind: ibv_mw_bind = zeroed();
    let mut bound = |mw_type, mr, length| {
        mw.r#type = mw_type;
        bind.bind_info.mr = mr;
        bind.bind_info.length = length;
        // SAFETY: as above.
        unsafe { ibv_bind_mw(&raw mut qp, &raw mut mw, &raw mut bind) }
    };
    assert_eq!(bound(1, &raw mut region, 9), Ok(()));
    assert_eq!(bound(1, ptr::null_mut(), 0), Ok(()), "no region and no length invalidates");
    assert_eq!(bound(1, ptr::null_mut(), 9), Err(Error::Errno(libc::EINVAL)));
    assert_eq!(bound(2, &raw mut region, 9), Err(Error::Errno(libc::EINVAL)));
    let mut region = ibv_mr { pd: &raw mut other, ..zeroed() };
    assert_eq!(bound(1, &raw mut region, 9), Err(Error::Errno(libc::EPERM)));
}

#[test]
fn a_windows_key_counts_in_its_lowest_byte() {
    assert_eq!(ibv_inc_rkey(0x1234_5600), 0x1234_5601);
    assert_eq!(ibv_inc_rkey(0x1234_56ff), 0x1234_5600);
    assert_eq!(ibv_inc_rkey(u32::MAX), 0xffff_ff00);
}
