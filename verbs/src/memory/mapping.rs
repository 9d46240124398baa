//! Host memory: an anonymous file of our own, or memory of the caller's.
#![allow(unsafe_code)]

use super::{HugePages, MemoryBacking, MemoryKind};
use crate::{Error, Result};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd};

/// An anonymous, populated, sealed file, mapped shared.
#[derive(Debug)]
pub(super) struct Shared {
    file: File,
    map: memmap2::MmapRaw,
}

impl Shared {
    pub(super) fn create(len: u64, _huge_pages: HugePages) -> Result<Self> {
        const VERB: &str = "allocate_memory";
        let page = 4096;
        let len = len.max(1).next_multiple_of(page);
        // SAFETY: the name is a NUL-terminated string; the call has no other precondition.
        let fd = unsafe { libc::memfd_create(c"towline".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
        if fd < 0 {
            return Err(Error::last_os(VERB, "memfd_create"));
        }
        // SAFETY: `fd` was just made and nobody else has it.
        let file = unsafe { File::from_raw_fd(fd) };
        file.set_len(len).map_err(|e| Error::from_io(VERB, "ftruncate", &e))?;
        let map = memmap2::MmapOptions::new()
            .len(len as usize)
            .populate()
            .map_raw(&file)
            .map_err(|e| Error::from_io(VERB, "mmap", &e))?;
        Ok(Self { file, map })
    }
}

// SAFETY: the mapping is `map`'s, of exactly `len` bytes, readable and writable, unmapped only when `map` is dropped.
unsafe impl MemoryBacking for Shared {
    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }
    fn len(&self) -> u64 {
        self.map.len() as u64
    }
    fn address(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }
    fn segment(&self) -> Option<BorrowedFd<'_>> {
        Some(self.file.as_fd())
    }
    fn page_size(&self) -> u64 {
        4096
    }
    fn read(&self, offset: u64, out: &mut [u8]) {
        copy_out(self.address(), offset, out);
    }
    fn write(&self, offset: u64, bytes: &[u8]) {
        copy_in(self.address(), offset, bytes);
    }
}

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
        4096
    }
    fn read(&self, offset: u64, out: &mut [u8]) {
        copy_out(self.address, offset, out);
    }
    fn write(&self, offset: u64, bytes: &[u8]) {
        copy_in(self.address, offset, bytes);
    }
}

fn copy_out(base: *mut u8, offset: u64, out: &mut [u8]) {
    // SAFETY: the caller checked that `offset + out.len()` lies within the memory behind `base`; `out` is a distinct
    // object.
    unsafe { core::ptr::copy(base.wrapping_add(offset as usize), out.as_mut_ptr(), out.len()) }
}

fn copy_in(base: *mut u8, offset: u64, bytes: &[u8]) {
    // SAFETY: as in `copy_out`.
    unsafe { core::ptr::copy(bytes.as_ptr(), base.wrapping_add(offset as usize), bytes.len()) }
}
