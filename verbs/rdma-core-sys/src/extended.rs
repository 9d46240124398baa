//! The verbs that C has as `static inline` functions and that need an exported one too: as a way back where the larger
//! table of a context does not have them, or behind a macro.

use crate::context::extended_op;
use crate::error::{errno, null};
use crate::{
    Error, IBV_ACCESS_OPTIONAL_RANGE, IBV_QP_INIT_ATTR_PD, Library, ibv_context, ibv_cq_ex, ibv_cq_init_attr_ex,
    ibv_device_attr_ex, ibv_gid_entry, ibv_mr, ibv_pd, ibv_port_attr, ibv_qp, ibv_qp_init_attr_ex,
    ibv_query_device_ex_input, verbs_context, zeroed,
};
use core::ffi::{c_int, c_void};
use core::mem::offset_of;
use core::ptr::NonNull;

type QueryPort = unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr, usize) -> c_int;
type QueryDevice =
    unsafe extern "C" fn(*mut ibv_context, *const ibv_query_device_ex_input, *mut ibv_device_attr_ex, usize) -> c_int;
type CreateCq = unsafe extern "C" fn(*mut ibv_context, *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex;
type CreateQp = unsafe extern "C" fn(*mut ibv_context, *mut ibv_qp_init_attr_ex) -> *mut ibv_qp;

impl Library {
    /// Asks for the attributes of a port, counted from 1. See `ibv_query_port(3)`. The exported function, which fills
    /// only the fields that the first libibverbs had (the others are zero then), is called where there is nothing better.
    ///
    /// # Errors
    /// What the provider says.
    ///
    /// # Safety
    /// `context` is open; `attr` is valid for writes.
    pub unsafe fn ibv_query_port(
        &self,
        context: *mut ibv_context,
        port: u8,
        attr: *mut ibv_port_attr,
    ) -> Result<(), Error> {
        // SAFETY: an open context; `QueryPort` is the type of the field.
        let op = unsafe { extended_op::<QueryPort>(context, offset_of!(verbs_context, query_port), "query_port") };
        if let Ok(op) = op {
            // SAFETY: the caller's; the op is told how much it may fill.
            return errno(unsafe { op(context, port, attr, size_of::<ibv_port_attr>()) });
        }
        // SAFETY: the caller's.
        unsafe { attr.write(zeroed()) };
        // SAFETY: the caller's; the function fills a prefix of `attr`.
        errno(unsafe { (self.ibv_query_port)(context, port, attr.cast()) })
    }

    /// Asks for the attributes of a device. See `ibv_query_device_ex(3)`. Where only the older verb is there, what it does
    /// not know is zero.
    ///
    /// # Errors
    /// `EINVAL` when `input` asks for anything; what the provider says.
    ///
    /// # Safety
    /// `context` is open; `input` is null or valid; `attr` is valid for writes.
    pub unsafe fn ibv_query_device_ex(
        &self,
        context: *mut ibv_context,
        input: *const ibv_query_device_ex_input,
        attr: *mut ibv_device_attr_ex,
    ) -> Result<(), Error> {
        // SAFETY: valid where not null, says the caller.
        if !input.is_null() && unsafe { (*input).comp_mask } != 0 {
            return Err(Error::Errno(libc::EINVAL));
        }
        let offset = offset_of!(verbs_context, query_device_ex);
        // SAFETY: an open context; `QueryDevice` is the type of the field.
        if let Ok(op) = unsafe { extended_op::<QueryDevice>(context, offset, "query_device_ex") } {
            // SAFETY: the caller's; the op is told how much it may fill.
            match errno(unsafe { op(context, input, attr, size_of::<ibv_device_attr_ex>()) }) {
                Err(Error::Errno(libc::EOPNOTSUPP | libc::ENOSYS)) => {}
                other => return other,
            }
        }
        // SAFETY: the caller's.
        unsafe { attr.write(zeroed()) };
        // SAFETY: the caller's; `orig_attr` is the first field of `attr`.
        unsafe { self.ibv_query_device(context, attr.cast()) }
    }

    /// Registers memory. See `ibv_reg_mr(3)`. In C this is a macro: flags of the optional range (relaxed ordering) go to
    /// `ibv_reg_mr_iova2`, which drops them for devices that don't know them; a library without it knows none of them, and
    /// they are dropped here.
    ///
    /// # Errors
    /// `errno`.
    ///
    /// # Safety
    /// `pd` is alive; `addr..addr + length` stays mapped until the region is deregistered, and whoever holds the keys is
    /// allowed to touch it.
    pub unsafe fn ibv_reg_mr(
        &self,
        pd: *mut ibv_pd,
        addr: *mut c_void,
        length: usize,
        access: c_int,
    ) -> Result<NonNull<ibv_mr>, Error> {
        if access & IBV_ACCESS_OPTIONAL_RANGE != 0 {
            // SAFETY: the caller's.
            let region = unsafe { self.ibv_reg_mr_iova2(pd, addr, length, addr.addr() as u64, access.cast_unsigned()) };
            if !matches!(region, Err(Error::NoSymbol(_))) {
                return region;
            }
        }
        // SAFETY: the caller's.
        null(unsafe { (self.ibv_reg_mr)(pd, addr, length, access & !IBV_ACCESS_OPTIONAL_RANGE) })
    }

    /// Asks for one entry of a port's GID table. See `ibv_query_gid_ex(3)`.
    ///
    /// # Errors
    /// `ENODATA` for an empty entry; [`Error::NoSymbol`] before rdma-core 32.
    ///
    /// # Safety
    /// `context` is open; `entry` is valid for writes.
    pub unsafe fn ibv_query_gid_ex(
        &self,
        context: *mut ibv_context,
        port: u32,
        index: u32,
        entry: *mut ibv_gid_entry,
    ) -> Result<(), Error> {
        // SAFETY: the caller's; the function is told the size of an entry.
        unsafe { self._ibv_query_gid_ex(context, port, index, entry, 0, size_of::<ibv_gid_entry>()) }
    }

    /// Fills `entries` with what the GID tables of all ports hold, and returns how many. See `ibv_query_gid_table(3)`.
    ///
    /// # Errors
    /// `EINVAL` when there are more; [`Error::NoSymbol`] before rdma-core 32.
    ///
    /// # Safety
    /// `context` is open.
    pub unsafe fn ibv_query_gid_table(
        &self,
        context: *mut ibv_context,
        entries: &mut [ibv_gid_entry],
    ) -> Result<usize, Error> {
        let (first, len) = (entries.as_mut_ptr(), entries.len());
        // SAFETY: the caller's; `len` entries of the size given.
        unsafe { self._ibv_query_gid_table(context, first, len, 0, size_of::<ibv_gid_entry>()) }
    }

    /// Creates a completion queue that is read by functions. See `ibv_create_cq_ex(3)`.
    ///
    /// # Errors
    /// [`Error::NoOperation`] where the library or provider can't; `errno`.
    ///
    /// # Safety
    /// `context` is open; `attr` and what it names are valid.
    pub unsafe fn ibv_create_cq_ex(
        &self,
        context: *mut ibv_context,
        attr: *mut ibv_cq_init_attr_ex,
    ) -> Result<NonNull<ibv_cq_ex>, Error> {
        let offset = offset_of!(verbs_context, create_cq_ex);
        // SAFETY: an open context; `CreateCq` is the type of the field.
        let op = unsafe { extended_op::<CreateCq>(context, offset, "create_cq_ex") }?;
        // SAFETY: the caller's.
        null(unsafe { op(context, attr) })
    }

    /// Creates a queue pair whose requests are built by functions. See `ibv_create_qp_ex(3)`. Where nothing but the
    /// protection domain is given besides the classic attributes, it is a classic queue pair.
    ///
    /// # Errors
    /// [`Error::NoOperation`] where the library or provider can't; `errno`.
    ///
    /// # Safety
    /// `context` is open; `attr` and what it names are valid.
    pub unsafe fn ibv_create_qp_ex(
        &self,
        context: *mut ibv_context,
        attr: *mut ibv_qp_init_attr_ex,
    ) -> Result<NonNull<ibv_qp>, Error> {
        // SAFETY: the caller's.
        let ibv_qp_init_attr_ex { comp_mask, pd, .. } = unsafe { attr.read() };
        if comp_mask == IBV_QP_INIT_ATTR_PD {
            // SAFETY: the caller's; the classic attributes are the first fields of the extended ones.
            return unsafe { self.ibv_create_qp(pd, attr.cast()) };
        }
        let offset = offset_of!(verbs_context, create_qp_ex);
        // SAFETY: an open context; `CreateQp` is the type of the field.
        let op = unsafe { extended_op::<CreateQp>(context, offset, "create_qp_ex") }?;
        // SAFETY: the caller's.
        null(unsafe { op(context, attr) })
    }
}

// What the casts above rely on: the older attributes are the first bytes of the newer ones.
const _: () = {
    use crate::{ibv_device_attr, ibv_qp_init_attr};
    assert!(offset_of!(ibv_device_attr_ex, orig_attr) == 0);
    assert!(size_of::<ibv_device_attr>() <= size_of::<ibv_device_attr_ex>());
    assert!(offset_of!(ibv_qp_init_attr_ex, cap) == offset_of!(ibv_qp_init_attr, cap));
    assert!(offset_of!(ibv_qp_init_attr_ex, sq_sig_all) == offset_of!(ibv_qp_init_attr, sq_sig_all));
};
