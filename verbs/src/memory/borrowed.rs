//! Host memory of the caller's.
#![allow(unsafe_code)]

use super::map::page_size;
use super::{MemoryBacking, MemoryKind, copy_in, copy_out};
use std::os::fd::BorrowedFd;

/// Memory of the caller's.
#[derive(Debug)]
pub(super) struct Borrowed {
    address: *mut u8,
    len: usize,
}

impl Borrowed {
    pub(super) fn new(address: *mut u8, len: usize) -> Self {
        Self { address, len }
    }
}

// SAFETY: a pointer is only a number here; every access is by the contract of `MemoryBacking`, which allows any thread.
unsafe impl Send for Borrowed {}
// SAFETY: as above.
unsafe impl Sync for Borrowed {}

// SAFETY: the creator of `Memory::borrowed` promised validity until the last handle is gone.
unsafe impl MemoryBacking for Borrowed {
    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }
    fn len(&self) -> u64 {
        self.len as u64
    }
    fn address(&self) -> *mut u8 {
        self.address
    }
    fn segment(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    fn page_size(&self) -> u64 {
        page_size()
    }
    fn read(&self, offset: u64, out: &mut [u8]) {
        copy_out(self.address, offset, out);
    }
    fn write(&self, offset: u64, bytes: &[u8]) {
        copy_in(self.address, offset, bytes);
    }
}
