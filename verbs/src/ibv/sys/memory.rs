//! Protection domains, memory regions, memory windows.

use super::Context;
use crate::Result;
use crate::ibv::failed;
use core::ptr::NonNull;
use rdma_core_sys::*;
use std::sync::Arc;

/// A protection domain.
#[derive(Debug)]
pub(in crate::ibv) struct Domain {
    pub(super) context: Arc<Context>,
    pub(super) raw: NonNull<ibv_pd>,
}

// SAFETY: see the head of `sys`.
unsafe impl Send for Domain {}
// SAFETY: see the head of `sys`.
unsafe impl Sync for Domain {}

impl Domain {
    pub(in crate::ibv) fn new(context: &Arc<Context>) -> Result<Self> {
        // SAFETY: open.
        let raw = unsafe { context.library.ibv_alloc_pd(context.raw.as_ptr()) };
        let raw = raw.map_err(|error| failed("alloc_pd", "ibv_alloc_pd", error))?;
        Ok(Self { context: context.clone(), raw })
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        if !self.context.is_inherited() {
            // SAFETY: allocated, and regions and queue pairs of it would hold it.
            let _refused = unsafe { self.context.library.ibv_dealloc_pd(self.raw.as_ptr()) };
        }
    }
}

/// A memory region.
#[derive(Debug)]
pub(in crate::ibv) struct Region {
    pub(super) domain: Arc<Domain>,
    pub(super) raw: NonNull<ibv_mr>,
}

// SAFETY: see the head of `sys`.
unsafe impl Send for Region {}
// SAFETY: see the head of `sys`.
unsafe impl Sync for Region {}

impl Region {
    /// Registers memory.
    ///
    /// # Safety
    /// `start..start + len` stays mapped as long as the region lives, and the holders of the keys may do with it what
    /// `access` (`IBV_ACCESS_*`) says.
    pub(in crate::ibv) unsafe fn register(
        domain: &Arc<Domain>,
        start: *mut u8,
        len: usize,
        access: i32,
    ) -> core::result::Result<Self, rdma_core_sys::Error> {
        // SAFETY: the domain is alive; the rest is the caller's.
        let raw = unsafe { domain.context.library.ibv_reg_mr(domain.raw.as_ptr(), start.cast(), len, access) }?;
        Ok(Self { domain: domain.clone(), raw })
    }

    pub(in crate::ibv) fn local_key(&self) -> u32 {
        // SAFETY: registered.
        unsafe { self.raw.as_ref() }.lkey
    }

    pub(in crate::ibv) fn remote_key(&self) -> u32 {
        // SAFETY: registered.
        unsafe { self.raw.as_ref() }.rkey
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if !self.domain.context.is_inherited() {
            // SAFETY: registered, once; requests that use it would hold it.
            let _refused = unsafe { self.domain.context.library.ibv_dereg_mr(self.raw.as_ptr()) };
        }
    }
}

/// A memory window of type 2: a key that work requests bind to a part of a region, and make invalid again.
#[derive(Debug)]
pub(in crate::ibv) struct Window {
    domain: Arc<Domain>,
    raw: NonNull<ibv_mw>,
    is_freed: bool,
}

// SAFETY: see the head of `sys`.
unsafe impl Send for Window {}
// SAFETY: see the head of `sys`.
unsafe impl Sync for Window {}

impl Window {
    pub(in crate::ibv) fn new(domain: &Arc<Domain>) -> core::result::Result<Self, rdma_core_sys::Error> {
        // SAFETY: alive.
        let raw = unsafe { ibv_alloc_mw(domain.raw.as_ptr(), IBV_MW_TYPE_2) }?;
        Ok(Self { domain: domain.clone(), raw, is_freed: false })
    }

    /// The key that it came with, or was bound to last.
    pub(in crate::ibv) fn key(&self) -> u32 {
        // SAFETY: alive.
        unsafe { self.raw.as_ref() }.rkey
    }

    /// A request that binds it to `key` was posted. Providers take the key that it has from here when it is bound anew, and
    /// leave it to the caller to say so (the library does that itself for windows of type 1 alone).
    pub(in crate::ibv) fn posted(&mut self, key: u32) {
        // SAFETY: alive; this handle's alone.
        unsafe { self.raw.as_mut() }.rkey = key;
    }

    /// The request that opens `len` bytes from `address`, of `region`, for reads under `key`.
    pub(in crate::ibv) fn bind(&self, key: u32, region: &Region, address: u64, len: u64) -> ibv_send_wr {
        let bind_info = ibv_mw_bind_info {
            mr: region.raw.as_ptr(),
            addr: address,
            length: len,
            mw_access_flags: IBV_ACCESS_REMOTE_READ.cast_unsigned(),
        };
        let bind_mw = ibv_send_wr_bind_mw { mw: self.raw.as_ptr(), rkey: key, bind_info };
        ibv_send_wr { opcode: IBV_WR_BIND_MW, send_flags: IBV_SEND_SIGNALED, bind_mw, ..zeroed() }
    }

    /// The request that makes `key` invalid.
    pub(in crate::ibv) fn invalidate(key: u32) -> ibv_send_wr {
        ibv_send_wr { opcode: IBV_WR_LOCAL_INV, send_flags: IBV_SEND_SIGNALED, imm_data: key, ..zeroed() }
    }

    /// Frees it: nobody reaches anything by its key after that. If the library refuses, it comes back.
    pub(in crate::ibv) fn free(mut self) -> core::result::Result<(), Self> {
        // SAFETY: alive; what is refused stays so.
        if unsafe { ibv_dealloc_mw(self.raw.as_ptr()) }.is_err() {
            return Err(self);
        }
        self.is_freed = true;
        Ok(())
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        if !self.is_freed && !self.domain.context.is_inherited() {
            // SAFETY: alive, once. Nothing is bound to it, or the queue pair that it is bound to is gone.
            let _refused = unsafe { ibv_dealloc_mw(self.raw.as_ptr()) };
        }
    }
}
