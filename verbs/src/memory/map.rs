//! A range of address space that is ours: the one place that maps, advises and unmaps.
#![allow(unsafe_code)]

use core::ptr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::OnceLock;

/// A mapping, unmapped when dropped. It is only a range of addresses: who may read and write it is its holder's business.
#[derive(Debug)]
pub(crate) struct Mapping {
    address: *mut u8,
    len: usize,
}

// SAFETY: the address is only a number here; it may be unmapped from any thread.
unsafe impl Send for Mapping {}
// SAFETY: as above; no method changes a byte but `touch_fresh`, whose contract says when.
unsafe impl Sync for Mapping {}

/// Size of the system's ordinary pages, asked once.
pub(crate) fn page_size() -> u64 {
    static SIZE: OnceLock<u64> = OnceLock::new();
    *SIZE.get_or_init(|| {
        // SAFETY: the call has no precondition.
        let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        u64::try_from(size).unwrap_or(4096)
    })
}

impl Mapping {
    /// Private memory of zeros.
    pub(crate) fn anonymous(len: usize) -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        map(ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1)
    }

    /// The first `len` bytes of `file`, shared and writable, at a multiple of `align` (a power of two).
    pub(crate) fn writable(file: BorrowedFd<'_>, len: usize, align: usize) -> io::Result<Self> {
        Self::aligned(file, len, align, libc::PROT_READ | libc::PROT_WRITE)
    }

    /// The first `len` bytes of `file`, shared and read-only, at a multiple of `align` (a power of two).
    pub(crate) fn read_only(file: BorrowedFd<'_>, len: usize, align: usize) -> io::Result<Self> {
        Self::aligned(file, len, align, libc::PROT_READ)
    }

    fn aligned(file: BorrowedFd<'_>, len: usize, align: usize, protection: i32) -> io::Result<Self> {
        let Some(room) = len.checked_add(align) else { return Err(io::Error::from_raw_os_error(libc::ENOMEM)) };
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let mut reserved = map(ptr::null_mut(), room, libc::PROT_NONE, flags, -1)?;
        let skip = reserved.address.align_offset(align);
        let start = reserved.address.wrapping_add(skip);
        // The file replaces the middle of what was reserved; both ends go back when `front` and `reserved` are dropped.
        let file_flags = libc::MAP_SHARED | libc::MAP_FIXED;
        let mapped = map(start, len, protection, file_flags, file.as_raw_fd())?;
        let front = Self { address: reserved.address, len: skip };
        reserved.address = start.wrapping_add(len);
        reserved.len = room - skip - len;
        drop(front);
        Ok(mapped)
    }

    /// Address of the first byte.
    pub(crate) fn address(&self) -> *mut u8 {
        self.address
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// `madvise` over the whole.
    pub(crate) fn advise(&self, advice: i32) -> io::Result<()> {
        self.advise_range(0, self.len, advice)
    }

    fn advise_range(&self, offset: usize, len: usize, advice: i32) -> io::Result<()> {
        debug_assert!(offset + len <= self.len);
        // SAFETY: the range is part of this mapping; none of the advices that this crate gives changes its bytes.
        let rc = unsafe { libc::madvise(self.address.wrapping_add(offset).cast(), len, advice) };
        if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Makes the pages of a range present and writable, or says why there is no memory for them. EINVAL before
    /// Linux 5.14. `offset` is a multiple of the page size.
    pub(crate) fn populate_write(&self, offset: usize, len: usize) -> io::Result<()> {
        self.advise_retrying(offset, len, libc::MADV_POPULATE_WRITE)
    }

    /// Makes the pages of a range present for reading. EINVAL before Linux 5.14.
    pub(crate) fn populate_read(&self, offset: usize, len: usize) -> io::Result<()> {
        self.advise_retrying(offset, len, libc::MADV_POPULATE_READ)
    }

    /// Writes a zero into each page: the same as populating, for memory that is fresh and that nobody else has yet.
    pub(crate) fn touch_fresh(&self) {
        for page in (0..self.len).step_by(page_size() as usize) {
            // SAFETY: the byte is in this mapping, which is writable; by the contract of this method it is zero and
            // ours alone.
            unsafe { self.address.wrapping_add(page).write_volatile(0) };
        }
    }

    fn advise_retrying(&self, offset: usize, len: usize, advice: i32) -> io::Result<()> {
        loop {
            match self.advise_range(offset, len, advice) {
                Err(e) if matches!(e.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) => {}
                other => return other,
            }
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: the range was mapped by us and nobody uses it after its holder is gone.
            let rc = unsafe { libc::munmap(self.address.cast(), self.len) };
            debug_assert_eq!(rc, 0, "munmap: {}", io::Error::last_os_error());
        }
    }
}

fn map(at: *mut u8, len: usize, protection: i32, flags: i32, file: RawFd) -> io::Result<Mapping> {
    // SAFETY: with MAP_FIXED, `at..at + len` lies in a range that the caller reserved; otherwise the kernel chooses.
    let address = unsafe { libc::mmap(at.cast(), len, protection, flags, file, 0) };
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(Mapping { address: address.cast(), len })
}
