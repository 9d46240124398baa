//! Protection domains and memory regions.

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
