//! The traps that headers don't show, a test for each.

use super::fakes::{FakeContext, library, library_without, set_answer};
use crate::{
    __VERBS_ABI_IS_EXTENDED, Error, IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_RELAXED_ORDERING, IBV_QP_INIT_ATTR_PD,
    IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, Library, ibv_context, ibv_cq, ibv_cq_ex, ibv_cq_init_attr_ex, ibv_device_attr_ex,
    ibv_end_poll, ibv_gid, ibv_gid_entry, ibv_modify_cq, ibv_modify_cq_attr, ibv_mr, ibv_pd, ibv_port_attr, ibv_qp,
    ibv_qp_ex, ibv_qp_init_attr_ex, ibv_query_device_ex_input, ibv_start_poll, ibv_wr_start, library, verbs_context,
    zeroed,
};
use core::ffi::{CStr, c_int, c_uint, c_void};
use core::mem::offset_of;
use core::ptr;
use std::cell::RefCell;

thread_local! {
    /// What this thread's fakes were called with.
    static CALLS: RefCell<Vec<String>> = const { RefCell::new(vec![]) };
}

fn called(what: String) {
    CALLS.with_borrow_mut(|calls| calls.push(what));
}

/// What was called since the last time.
fn calls() -> Vec<String> {
    CALLS.take()
}

/// The table of fakes with some functions that note how they were called.
fn noting(missing: &'static str) -> Library {
    let lookup = |symbol: &CStr, _: &CStr| match symbol.to_str().unwrap() {
        name if name == missing => ptr::null_mut(),
        "ibv_query_port" => exported_query_port as *mut c_void,
        "ibv_query_device" => exported_query_device as *mut c_void,
        "ibv_reg_mr" => exported_reg_mr as *mut c_void,
        "ibv_reg_mr_iova2" => exported_reg_mr_iova2 as *mut c_void,
        "ibv_reg_dmabuf_mr" => exported_reg_dmabuf_mr as *mut c_void,
        "ibv_create_qp" => exported_create_qp as *mut c_void,
        "_ibv_query_gid_table" => exported_query_gid_table as *mut c_void,
        other => library::fakes::find(other),
    };
    // SAFETY: all are of the declared signatures.
    unsafe { Library::resolve(lookup) }.unwrap()
}

/// As the real one: it knows the fields of the first libibverbs only.
extern "C" fn exported_query_port(_: *mut ibv_context, port: u8, attr: *mut crate::_compat_ibv_port_attr) -> c_int {
    called(format!("exported query_port({port})"));
    // SAFETY: the attributes begin with the state.
    unsafe { attr.cast::<u32>().write(4) };
    0
}

extern "C" fn exported_query_device(_: *mut ibv_context, attr: *mut crate::ibv_device_attr) -> c_int {
    called("exported query_device".into());
    // SAFETY: valid attributes.
    unsafe { (*attr).max_qp = 9 };
    0
}

extern "C" fn exported_reg_mr(_: *mut ibv_pd, _: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr {
    called(format!("reg_mr({length}, {access:#x})"));
    ptr::without_provenance_mut(64)
}

extern "C" fn exported_reg_mr_iova2(
    _: *mut ibv_pd,
    _: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    called(format!("reg_mr_iova2({length}, {iova:#x}, {access:#x})"));
    ptr::without_provenance_mut(64)
}

extern "C" fn exported_reg_dmabuf_mr(
    _: *mut ibv_pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr {
    called(format!("reg_dmabuf_mr(offset {offset}, length {length}, iova {iova}, fd {fd}, access {access})"));
    ptr::without_provenance_mut(64)
}

extern "C" fn exported_create_qp(_: *mut ibv_pd, attr: *mut crate::ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: valid attributes.
    called(format!("create_qp({})", unsafe { (*attr).cap.max_send_wr }));
    ptr::without_provenance_mut(64)
}

extern "C" fn exported_query_gid_table(
    _: *mut ibv_context,
    _: *mut ibv_gid_entry,
    max_entries: usize,
    flags: u32,
    entry_size: usize,
) -> isize {
    called(format!("query_gid_table({max_entries}, {flags}, {entry_size})"));
    1
}

unsafe extern "C" fn op_query_port(_: *mut ibv_context, port: u8, attr: *mut ibv_port_attr, len: usize) -> c_int {
    called(format!("op query_port({port}, {len})"));
    // SAFETY: valid attributes.
    unsafe { (*attr).link_layer = crate::IBV_LINK_LAYER_ETHERNET };
    0
}

/// Asks a context for a port, in attributes that are full of ones before.
fn query_port(library: &Library, context: *mut ibv_context) -> (ibv_port_attr, Vec<String>) {
    let mut attr: ibv_port_attr = zeroed();
    // SAFETY: every bit pattern is a value of these integers.
    unsafe { (&raw mut attr).write_bytes(0xff, 1) };
    calls();
    // SAFETY: a fake context, and room for the answer.
    unsafe { library.ibv_query_port(context, 1, &raw mut attr) }.unwrap();
    (attr, calls())
}

#[test]
fn the_extended_table_is_known_by_all_ones() {
    let library = noting("");
    let mut context = FakeContext::new();
    context.table().query_port = Some(op_query_port);
    let (attr, how) = query_port(&library, context.context());
    assert_eq!((attr.link_layer, how), (crate::IBV_LINK_LAYER_ETHERNET, vec!["op query_port(1, 52)".into()]));
    for other in [0, 1, 2, usize::MAX - 1, usize::MAX >> 1] {
        context.table().context.abi_compat = ptr::without_provenance_mut(other);
        let (_, how) = query_port(&library, context.context());
        assert_eq!(how, ["exported query_port(1)"], "abi_compat {other:#x}");
    }
}

#[test]
fn the_exported_query_port_leaves_no_rubbish() {
    let (attr, how) = query_port(&noting(""), FakeContext::new().context());
    assert_eq!(how, ["exported query_port(1)"], "the operation is empty");
    assert_eq!((attr.state, attr.link_layer, attr.port_cap_flags2, attr.gid_tbl_len), (4, 0, 0, 0));
}

#[test]
fn an_operation_is_read_only_if_the_table_reaches_it() {
    let library = noting("");
    let mut context = FakeContext::new();
    context.table().query_port = Some(op_query_port);
    context.table().sz = size_of::<verbs_context>() - 1;
    let (_, how) = query_port(&library, context.context());
    assert_eq!(how, ["exported query_port(1)"]);
    // A table of a newer library, with more in front.
    context.table().sz = size_of::<verbs_context>() + 48;
    let (_, how) = query_port(&library, context.context());
    assert_eq!(how, ["op query_port(1, 52)"]);
}

#[test]
fn nothing_in_front_of_a_short_table_is_touched() {
    // A table that has only its size and the context, at the beginning of a page; the page in front can't be read.
    let page = 4096;
    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping.
    let map = unsafe { libc::mmap(ptr::null_mut(), 2 * page, libc::PROT_READ | libc::PROT_WRITE, kind, -1, 0) };
    assert_ne!(map, libc::MAP_FAILED);
    // SAFETY: within the mapping.
    let sz = unsafe { map.byte_add(page) }.cast::<usize>();
    // SAFETY: within the mapping, with room for a context behind it.
    let context = unsafe { sz.add(1) }.cast::<ibv_context>();
    let len = size_of::<usize>() + size_of::<ibv_context>();
    assert_eq!(offset_of!(verbs_context, context) - offset_of!(verbs_context, sz), size_of::<usize>());
    // SAFETY: within the mapping, and aligned as a page is.
    unsafe { sz.write(len) };
    // SAFETY: as above.
    unsafe { context.write(zeroed()) };
    // SAFETY: as above.
    unsafe { (*context).abi_compat = ptr::without_provenance_mut(__VERBS_ABI_IS_EXTENDED) };
    // SAFETY: the first page of the mapping, which nothing refers to.
    assert_eq!(unsafe { libc::mprotect(map, page, libc::PROT_NONE) }, 0);
    let library = noting("");
    assert_eq!(query_port(&library, context).1, ["exported query_port(1)"]);
    let mut attr: ibv_cq_init_attr_ex = zeroed();
    // SAFETY: a fake context.
    let refused = unsafe { library.ibv_create_cq_ex(context, &raw mut attr) };
    assert_eq!(refused.err(), Some(Error::NoOperation("create_cq_ex")));
    // SAFETY: the mapping made above; nothing refers to it any more.
    assert_eq!(unsafe { libc::munmap(map, 2 * page) }, 0);
}

#[test]
fn optional_access_flags_go_to_the_function_that_knows_them() {
    let address = ptr::without_provenance_mut(0x7000);
    let (plain, relaxed) = (IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_RELAXED_ORDERING);
    let register = |library: &Library, access| {
        calls();
        // SAFETY: the fakes look at nothing.
        unsafe { library.ibv_reg_mr(ptr::null_mut(), address, 9, access) }.unwrap();
        calls()
    };
    let library = noting("");
    assert_eq!(register(&library, plain), ["reg_mr(9, 0x1)"]);
    assert_eq!(register(&library, relaxed), ["reg_mr_iova2(9, 0x7000, 0x100001)"]);
    // A library from before: the flags are hints, and are dropped.
    assert_eq!(register(&noting("ibv_reg_mr_iova2"), relaxed), ["reg_mr(9, 0x1)"]);
}

#[test]
fn a_failed_registration_keeps_its_error_number() {
    set_answer(0, libc::ENOMEM);
    for (library, access) in [
        (library(), IBV_ACCESS_LOCAL_WRITE),
        (library(), IBV_ACCESS_RELAXED_ORDERING),
        (library_without("ibv_reg_mr_iova2").unwrap(), IBV_ACCESS_RELAXED_ORDERING),
    ] {
        // SAFETY: the fakes look at nothing.
        let region = unsafe { library.ibv_reg_mr(ptr::null_mut(), ptr::null_mut(), 9, access) };
        assert_eq!(region.err(), Some(Error::Errno(libc::ENOMEM)));
    }
}

#[test]
fn a_dma_buf_is_given_by_offset_and_descriptor() {
    calls();
    // SAFETY: the fakes look at nothing.
    unsafe { noting("").ibv_reg_dmabuf_mr(ptr::null_mut(), 1, 2, 3, 4, 5) }.unwrap();
    assert_eq!(calls(), ["reg_dmabuf_mr(offset 1, length 2, iova 3, fd 4, access 5)"]);
}

#[test]
fn a_gid_is_aligned_as_its_halves_are() {
    assert_eq!(align_of::<ibv_gid>(), 8);
    assert_eq!((size_of::<ibv_gid_entry>(), size_of::<crate::ibv_ah_attr>()), (32, 32));
    let mut raw = [0; 16];
    (raw[10], raw[11], raw[12], raw[15]) = (0xff, 0xff, 10, 1);
    assert_eq!(format!("{:?}", ibv_gid { raw }), "::ffff:10.0.0.1");
}

#[test]
fn the_gid_table_is_asked_with_the_size_of_an_entry() {
    calls();
    let mut entries = [zeroed::<ibv_gid_entry>(); 3];
    // SAFETY: the fakes look at nothing.
    let found = unsafe { noting("").ibv_query_gid_table(ptr::null_mut(), &mut entries) };
    assert_eq!((found, calls()), (Ok(1), vec!["query_gid_table(3, 0, 32)".into()]));
    // SAFETY: as above.
    let found = unsafe { noting("_ibv_query_gid_table").ibv_query_gid_table(ptr::null_mut(), &mut entries) };
    assert_eq!(found, Err(Error::NoSymbol("_ibv_query_gid_table")));
    // SAFETY: as above.
    let found = unsafe { noting("_ibv_query_gid_ex").ibv_query_gid_ex(ptr::null_mut(), 1, 0, &raw mut entries[0]) };
    assert_eq!(found, Err(Error::NoSymbol("_ibv_query_gid_ex")));
}

thread_local! {
    /// What the operation `query_device_ex` answers.
    static DEVICE_EX: std::cell::Cell<c_int> = const { std::cell::Cell::new(0) };
}

unsafe extern "C" fn op_query_device(
    _: *mut ibv_context,
    _: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    len: usize,
) -> c_int {
    called(format!("op query_device_ex({len})"));
    // SAFETY: valid attributes.
    unsafe { (*attr).max_dm_size = 5 };
    DEVICE_EX.get()
}

#[test]
fn a_device_that_knows_only_the_old_query_is_asked_that() {
    let library = noting("");
    let mut context = FakeContext::new();
    let mut attr: ibv_device_attr_ex = zeroed();
    let mut ask = |context: &FakeContext, input: *const ibv_query_device_ex_input| {
        calls();
        // SAFETY: a fake context, and room for the answer.
        let answer = unsafe { library.ibv_query_device_ex(context.context(), input, &raw mut attr) };
        (answer, calls().join(", "), attr.orig_attr.max_qp, attr.max_dm_size)
    };
    assert_eq!(ask(&context, ptr::null()), (Ok(()), "exported query_device".into(), 9, 0));
    context.table().query_device_ex = Some(op_query_device);
    assert_eq!(ask(&context, ptr::null()).1, "op query_device_ex(400)");
    for old in [libc::EOPNOTSUPP, libc::ENOSYS] {
        DEVICE_EX.set(old);
        let both = "op query_device_ex(400), exported query_device";
        assert_eq!(ask(&context, ptr::null()), (Ok(()), both.into(), 9, 0), "nothing stays of the failed answer");
    }
    DEVICE_EX.set(libc::EIO);
    assert_eq!(ask(&context, ptr::null()).0, Err(Error::Errno(libc::EIO)));
    let input = ibv_query_device_ex_input { comp_mask: 1 };
    assert_eq!(ask(&context, &raw const input).0, Err(Error::Errno(libc::EINVAL)));
}

unsafe extern "C" fn op_create_qp(_: *mut ibv_context, attr: *mut ibv_qp_init_attr_ex) -> *mut ibv_qp {
    // SAFETY: valid attributes.
    called(format!("op create_qp_ex({:#x})", unsafe { (*attr).send_ops_flags }));
    super::fakes::set_errno(libc::ENOSPC);
    ptr::null_mut()
}

#[test]
fn a_queue_pair_with_nothing_new_is_a_classic_one() {
    let library = noting("");
    let mut context = FakeContext::new();
    let create = |context: &FakeContext, comp_mask| {
        let mut attr = ibv_qp_init_attr_ex { comp_mask, send_ops_flags: 3, ..zeroed() };
        attr.cap.max_send_wr = 7;
        calls();
        // SAFETY: a fake context, valid attributes.
        let made = unsafe { library.ibv_create_qp_ex(context.context(), &raw mut attr) };
        (made.err(), calls().join(""))
    };
    let extended = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    assert_eq!(create(&context, IBV_QP_INIT_ATTR_PD), (None, "create_qp(7)".into()));
    assert_eq!(create(&context, extended), (Some(Error::NoOperation("create_qp_ex")), String::new()));
    context.table().create_qp_ex = Some(op_create_qp);
    let refused = (Some(Error::Errno(libc::ENOSPC)), "op create_qp_ex(0x3)".into());
    assert_eq!(create(&context, extended), refused);
}

unsafe extern "C" fn op_modify_cq(_: *mut ibv_cq, _: *mut ibv_modify_cq_attr) -> c_int {
    libc::EINVAL
}

#[test]
fn an_empty_operation_is_told_from_one_that_fails() {
    let mut context = FakeContext::new();
    let mut cq: ibv_cq = super::fakes::object(&context);
    let mut attr: ibv_modify_cq_attr = zeroed();
    // SAFETY: the queue is there.
    let answer = unsafe { ibv_modify_cq(&raw mut cq, &raw mut attr) };
    assert_eq!(answer, Err(Error::NoOperation("modify_cq")));
    context.table().modify_cq = Some(op_modify_cq);
    // SAFETY: as above.
    assert_eq!(unsafe { ibv_modify_cq(&raw mut cq, &raw mut attr) }, Err(Error::Errno(libc::EINVAL)));
    assert_eq!((Error::NoOperation("x").errno(), Error::NoSymbol("x").errno()), (libc::EOPNOTSUPP, libc::EOPNOTSUPP));
}

unsafe extern "C" fn start_poll(_: *mut ibv_cq_ex, _: *mut crate::ibv_poll_cq_attr) -> c_int {
    libc::ENOENT
}

#[test]
fn a_function_that_was_not_asked_for_is_no_crash() {
    let (mut cq, mut qp): (ibv_cq_ex, ibv_qp_ex) = (zeroed(), zeroed());
    // SAFETY: the objects are there, here and below.
    assert_eq!(unsafe { ibv_end_poll(&raw mut cq) }, Err(Error::NoOperation("end_poll")));
    // SAFETY: as above.
    assert_eq!(unsafe { ibv_wr_start(&raw mut qp) }, Err(Error::NoOperation("wr_start")));
    cq.start_poll = Some(start_poll);
    let mut attr = zeroed();
    // SAFETY: as above.
    assert_eq!(unsafe { ibv_start_poll(&raw mut cq, &raw mut attr) }, Ok(libc::ENOENT), "empty is no error");
}
