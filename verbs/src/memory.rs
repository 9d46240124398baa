//! Memory that can be registered: who owns it, of what kind it is, how bytes get in and out.
//!
//! The pool of an endpoint is one [`Memory::shared`]: an anonymous file (memfd), populated and sealed, so that every
//! provider can register it and the shared-memory provider can hand it to peers read-only. It is mapped shared, so a
//! fork leaves it whole (I13): the child gets the same pages and not copies made on the next write, and what a peer or
//! a NIC sees stays what this process sees.
//!
//! Bytes go in and out by copies that are foreign code to the compiler ([`crate::copy`]), since a peer may be writing.

use crate::Result;
use crate::memory_region::check_range;
use core::fmt::Debug;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

mod borrowed;
mod fork;
mod loan;
mod map;
mod segment;

pub(crate) use fork::generation;
pub(crate) use loan::{Entry, Lent};
pub use loan::{Loan, lend};
pub(crate) use map::{Mapping, page_size};
pub(crate) use segment::SEALS;

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
    /// The sealed file behind it, where a peer process can be handed one. Its first byte is the memory's.
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
    /// Allocates `len` bytes (at least one), rounded up to whole pages, in an anonymous file that is populated, and
    /// sealed against shrinking, growing, and writable mappings by others. The bytes are zero; the address is a
    /// multiple of 64 KiB and of the page size.
    ///
    /// Blocks while the kernel clears the pages: about 0.2 s a GiB. From 32 MiB on a second thread helps meanwhile.
    /// Transparent huge pages are used where the administrator allows them for shared memory on advice.
    ///
    /// # Errors
    /// What the system says; [`Cause::Limit`](crate::Cause::Limit) when huge pages are required and not free, with the
    /// numbers of huge pages, or when `len` is more than an address space holds, or than this machine has free.
    pub fn shared(len: u64, huge_pages: HugePages) -> Result<Self> {
        Ok(Self(Arc::new(segment::Shared::create(len, huge_pages)?)))
    }

    /// Memory of the caller's own.
    ///
    /// # Safety
    /// `address..address + len` stays valid for reads and writes until the last clone of the result is gone; while
    /// operations on it are outstanding the caller does not touch it otherwise.
    #[allow(unsafe_code)]
    #[must_use]
    pub unsafe fn borrowed(address: *mut u8, len: usize) -> Self {
        Self(Arc::new(borrowed::Borrowed::new(address, len)))
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

/// Copies out of memory that others may be writing; the range has been checked.
#[allow(unsafe_code)]
fn copy_out(base: *mut u8, offset: u64, out: &mut [u8]) {
    // SAFETY: `offset + out.len()` lies within the memory at `base`, as the caller checked; nobody else uses `out`, so
    // it can't overlap memory that is read here.
    unsafe { crate::copy::copy(out.as_mut_ptr(), base.wrapping_add(offset as usize), out.len()) }
}

/// Copies into memory that others may be reading; the range has been checked.
#[allow(unsafe_code)]
fn copy_in(base: *mut u8, offset: u64, bytes: &[u8]) {
    // SAFETY: as in `copy_out`; nobody writes what `bytes` borrows, so it can't overlap memory that is written here.
    unsafe { crate::copy::copy(base.wrapping_add(offset as usize), bytes.as_ptr(), bytes.len()) }
}

#[cfg(test)]
#[allow(unsafe_code)]
mod tests {
    use super::*;
    use crate::{Cause, Error};
    use std::fs::File;
    use std::os::fd::AsRawFd;

    fn file_of(memory: &Memory) -> File {
        File::from(memory.segment().unwrap().try_clone_to_owned().unwrap())
    }

    #[test]
    fn shared_memory_is_zero_whole_pages_and_aligned() {
        for len in [0u64, 1, 4096, 4097, 65_537, (2 << 20) + 1, 33 << 20] {
            let memory = Memory::shared(len, HugePages::Off).unwrap();
            assert!(memory.len() >= len.max(1) && memory.len() < len.max(1) + memory.page_size());
            assert_eq!(memory.len() % memory.page_size(), 0);
            assert_eq!(memory.address() as usize % (64 << 10), 0);
            assert_eq!(file_of(&memory).metadata().unwrap().len(), memory.len());
            let mut bytes = vec![1u8; memory.len() as usize];
            memory.read(0, &mut bytes).unwrap();
            assert!(bytes.iter().all(|&b| b == 0));
        }
    }

    #[test]
    fn every_page_is_there_before_anybody_sees_it() {
        use std::os::unix::fs::MetadataExt;
        let memory = Memory::shared(40 << 20, HugePages::Off).unwrap();
        assert!(file_of(&memory).metadata().unwrap().blocks() * 512 >= memory.len());
        let mut resident = vec![0u8; (memory.len() / page_size()) as usize];
        // SAFETY: the range is the memory's, the vector has a byte for each page.
        let rc = unsafe { libc::mincore(memory.address().cast(), memory.len() as usize, resident.as_mut_ptr()) };
        assert_eq!(rc, 0);
        assert!(resident.iter().all(|page| page & 1 == 1));
    }

    #[test]
    fn the_seals_hold() {
        let memory = Memory::shared(1 << 20, HugePages::Off).unwrap();
        let file = file_of(&memory);
        // SAFETY: fcntl with F_GET_SEALS takes no further argument.
        assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) }, SEALS);
        assert!(file.set_len(1).is_err(), "shrunk");
        assert!(file.set_len(2 << 20).is_err(), "grown");
        assert!(std::os::unix::fs::FileExt::write_all_at(&file, b"x", 0).is_err(), "written");
        assert!(Mapping::writable(memory.segment().unwrap(), 1 << 20, 1 << 16).is_err(), "mapped writable");
        // SAFETY: fcntl with F_ADD_SEALS takes an integer.
        assert!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_WRITE) } < 0, "sealed again");
        // SAFETY: fallocate takes a descriptor and three integers.
        let punched = unsafe {
            libc::fallocate(file.as_raw_fd(), libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, 0, 4096)
        };
        assert!(punched < 0, "a hole punched");
        memory.write(0, b"the owner still writes").unwrap();
        let reader = Mapping::read_only(memory.segment().unwrap(), 1 << 20, 1 << 16).unwrap();
        let mut seen = [0; 9];
        copy_out(reader.address(), 0, &mut seen);
        assert_eq!(&seen, b"the owner");
    }

    #[test]
    fn bytes_go_in_and_out_at_any_place() {
        let memory = Memory::shared(2 << 20, HugePages::Off).unwrap();
        let bytes: Vec<u8> = (0..copy_len()).map(|i| (i % 251) as u8).collect();
        memory.write(4097, &bytes).unwrap();
        let mut out = vec![0; bytes.len()];
        memory.read(4097, &mut out).unwrap();
        assert!(out == bytes);
        // SAFETY: nobody writes the memory now.
        assert!(unsafe { memory.slice(4097, bytes.len() as u64) }.unwrap() == bytes);
        let mut around = [1; 1];
        memory.read(4096, &mut around).unwrap();
        assert_eq!(around, [0]);
    }

    fn copy_len() -> usize {
        crate::copy::LARGE + 12_345
    }

    #[test]
    fn ranges_are_checked_also_where_they_overflow() {
        let memory = Memory::shared(4096, HugePages::Off).unwrap();
        let size = memory.len();
        for (offset, len) in [(size, 1), (size - 1, 2), (u64::MAX, 1), (u64::MAX, 2)] {
            let range = Cause::OutOfRange { offset, len: len as u64, size };
            assert_eq!(memory.read(offset, &mut vec![0; len]).unwrap_err(), Error::new("read_memory", range.clone()));
            assert_eq!(memory.write(offset, &vec![0; len]).unwrap_err(), Error::new("write_memory", range));
            // SAFETY: no slice comes out.
            assert!(unsafe { memory.slice(offset, len as u64) }.is_none());
        }
        memory.read(size, &mut []).unwrap();
    }

    #[test]
    fn borrowed_memory_is_the_callers() {
        let mut own = vec![7u8; 10_000];
        // SAFETY: `own` outlives `memory` and isn't touched meanwhile.
        let memory = unsafe { Memory::borrowed(own.as_mut_ptr(), own.len()) };
        memory.write(100, b"hello").unwrap();
        assert!(memory.segment().is_none());
        assert_eq!(memory.len(), 10_000);
        drop(memory);
        assert_eq!(&own[99..106], b"\x07hello\x07");
    }

    #[test]
    fn too_much_is_a_limit() {
        for len in [u64::MAX, isize::MAX as u64] {
            let error = Memory::shared(len, HugePages::Off).unwrap_err();
            assert_eq!(error.cause, Cause::Limit { what: "address space", have: isize::MAX as u64, need: len });
        }
        let need = 1u64 << 45; // more than any machine that runs this test has
        let error = Memory::shared(need, HugePages::Off).unwrap_err();
        let Cause::Limit { what: "free memory of this machine", have, .. } = error.cause else { panic!("{error}") };
        assert!(have > 1 << 20 && have < need);
    }

    #[test]
    fn huge_pages_fall_back_or_say_how_many_are_missing() {
        let len = 1u64 << 40; // more than any machine that runs this test has
        match Memory::shared(len, HugePages::Require) {
            Err(Error { cause: Cause::Limit { what: "free huge pages", have, need }, .. }) => {
                assert!(need > 0 && have < need);
            }
            other => panic!("{other:?}"),
        }
        let memory = Memory::shared(3 << 20, HugePages::Try).unwrap();
        assert_eq!(memory.address() as u64 % memory.page_size(), 0);
        assert!(memory.len() >= 3 << 20);
        memory.write(memory.len() - 1, &[1]).unwrap();
        // SAFETY: fcntl with F_GET_SEALS takes no further argument.
        assert_eq!(unsafe { libc::fcntl(memory.segment().unwrap().as_raw_fd(), libc::F_GET_SEALS) }, SEALS);
    }
}
