//! Memory that can be registered: who owns it, of what kind it is, how bytes get in and out.
//!
//! The pool of an endpoint is one [`Memory::shared`]: an anonymous file (memfd), populated and sealed, so that every
//! provider can register it and the shared-memory provider can hand it to peers read-only.

use crate::Result;
use crate::memory_region::check_range;
use core::fmt::Debug;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

mod mapping;

/// Where memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryKind {
    /// Ordinary memory of this machine.
    Host,
    /// Memory of an accelerator.
    Device,
}

/// Whether huge pages back a shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum HugePages {
    /// The system's ordinary pages.
    #[default]
    Off,
    /// Huge pages if the system has them free, ordinary ones otherwise; [`Memory::page_size`] says which.
    Try,
    /// Huge pages or an error that says how many there are and how many were needed.
    Require,
}

/// What owns a piece of memory. Implemented here for shared and borrowed host memory, and by other crates for
/// accelerators.
///
/// # Safety
/// [`address`](Self::address), if not null, is valid for reads and writes of [`len`](Self::len) bytes as long as the
/// value lives, and stays the same.
#[allow(unsafe_code)]
pub unsafe trait MemoryBacking: Debug + Send + Sync {
    /// Its kind.
    fn kind(&self) -> MemoryKind;
    /// Length in bytes.
    fn len(&self) -> u64;
    /// Whether it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Address of the first byte for this process's processor; null where it has none.
    fn address(&self) -> *mut u8;
    /// The sealed file behind it, where a peer process can be handed one.
    fn segment(&self) -> Option<BorrowedFd<'_>>;
    /// Size of the pages behind it.
    fn page_size(&self) -> u64;
    /// Copies `out.len()` bytes from `offset`; the range has been checked.
    fn read(&self, offset: u64, out: &mut [u8]);
    /// Copies `bytes` to `offset`; the range has been checked.
    fn write(&self, offset: u64, bytes: &[u8]);
}

/// Memory that can be registered. Clones are handles of the same memory; it is unmapped when the last is gone.
#[derive(Debug, Clone)]
pub struct Memory(Arc<dyn MemoryBacking>);

impl Memory {
    /// Allocates `len` bytes, rounded up to whole pages, in an anonymous file that is populated, and sealed against
    /// shrinking, growing, and writable mappings by others.
    ///
    /// # Errors
    /// What the system says; [`Cause::Limit`](crate::Cause::Limit) when huge pages are required and not free.
    pub fn shared(len: u64, huge_pages: HugePages) -> Result<Self> {
        Ok(Self(Arc::new(mapping::Shared::create(len, huge_pages)?)))
    }

    /// Memory of the caller's own.
    ///
    /// # Safety
    /// `address..address + len` stays valid for reads and writes until the last clone of the result is gone; while
    /// operations on it are outstanding the caller does not touch it otherwise.
    #[allow(unsafe_code)]
    #[must_use]
    pub unsafe fn borrowed(address: *mut u8, len: usize) -> Self {
        Self(Arc::new(mapping::Borrowed::new(address, len)))
    }

    /// Memory with an owner of another crate (an accelerator's).
    #[must_use]
    pub fn from_backing(backing: Arc<dyn MemoryBacking>) -> Self {
        Self(backing)
    }

    /// Its kind.
    #[must_use]
    pub fn kind(&self) -> MemoryKind {
        self.0.kind()
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.0.len()
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Address of the first byte, null where this process's processor can't reach it. Valid while a clone lives.
    #[must_use]
    pub fn address(&self) -> *mut u8 {
        self.0.address()
    }

    /// The sealed file behind it, if there is one.
    #[must_use]
    pub fn segment(&self) -> Option<BorrowedFd<'_>> {
        self.0.segment()
    }

    /// Size of the pages behind it, in bytes.
    #[must_use]
    pub fn page_size(&self) -> u64 {
        self.0.page_size()
    }

    /// Copies `out.len()` bytes from `offset`. What is written at the same time can make the bytes wrong, not the
    /// program.
    ///
    /// # Errors
    /// [`Cause::OutOfRange`](crate::Cause::OutOfRange).
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        check_range("read_memory", offset, out.len() as u64, self.len())?;
        self.0.read(offset, out);
        Ok(())
    }

    /// Copies `bytes` to `offset`.
    ///
    /// # Errors
    /// [`Cause::OutOfRange`](crate::Cause::OutOfRange).
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        check_range("write_memory", offset, bytes.len() as u64, self.len())?;
        self.0.write(offset, bytes);
        Ok(())
    }

    /// Bytes `offset..offset + len` as a slice; `None` out of range or where the processor can't reach it.
    ///
    /// # Safety
    /// While the slice lives nobody writes these bytes: no [`write`](Self::write), no posted read or receive, no peer.
    #[allow(unsafe_code)]
    #[must_use]
    pub unsafe fn slice(&self, offset: u64, len: u64) -> Option<&[u8]> {
        let address = self.reachable(offset, len)?;
        // SAFETY: `reachable` checked that the range lies within the memory, which is valid while `self` is borrowed
        // (contract of `MemoryBacking`); the caller promises that nobody writes it meanwhile.
        Some(unsafe { core::slice::from_raw_parts(address, len as usize) })
    }

    /// Bytes `offset..offset + len` as a mutable slice; `None` out of range or where the processor can't reach it.
    ///
    /// # Safety
    /// While the slice lives nobody else reads or writes these bytes.
    #[allow(unsafe_code)]
    #[allow(clippy::mut_from_ref)]
    #[must_use]
    pub unsafe fn slice_mut(&self, offset: u64, len: u64) -> Option<&mut [u8]> {
        let address = self.reachable(offset, len)?;
        // SAFETY: as in `slice`; the caller promises that the range is his alone.
        Some(unsafe { core::slice::from_raw_parts_mut(address, len as usize) })
    }

    fn reachable(&self, offset: u64, len: u64) -> Option<*mut u8> {
        check_range("slice", offset, len, self.len()).ok()?;
        let address = self.address();
        (!address.is_null()).then(|| address.wrapping_add(offset as usize))
    }
}
