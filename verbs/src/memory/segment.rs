//! Shared host memory: an anonymous file of our own, populated and sealed.
#![allow(unsafe_code)]

use super::map::{Mapping, page_size};
use super::{HugePages, MemoryBacking, MemoryKind, copy_in, copy_out};
use crate::{Cause, Error, Result};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd};
use std::thread;

const VERB: &str = "allocate_memory";

/// Every mapping begins at a multiple of this, whatever the page size (64 KiB is the largest ordinary page of Linux).
const ALIGN: usize = 64 << 10;
/// From this length on mappings begin where a huge page could.
const HUGE_ALIGN: usize = 2 << 20;
/// From this length on two threads populate, which took 0.7 of the time of one (190 MiB and 1 GiB, two processors).
const PARALLEL: usize = 32 << 20;

/// The seals that a segment has before anybody else sees it: its size is final, and nobody but the mapping that we
/// already have can ever write it. Peers refuse a segment without them.
pub(crate) const SEALS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_SEAL;

/// An anonymous, populated, sealed file, mapped shared.
#[derive(Debug)]
pub(super) struct Shared {
    file: File,
    map: Mapping,
    page: u64,
}

impl Shared {
    pub(super) fn create(len: u64, huge_pages: HugePages) -> Result<Self> {
        match huge_pages {
            HugePages::Off => Self::ordinary(len),
            HugePages::Try => Self::huge(len).or_else(|_| Self::ordinary(len)),
            HugePages::Require => Self::huge(len),
        }
    }

    fn ordinary(len: u64) -> Result<Self> {
        let file = memfd(0).map_err(|e| Error::from_io(VERB, "memfd_create", &e))?;
        Self::build(file, len, page_size())
    }

    fn huge(len: u64) -> Result<Self> {
        let no_pages = |have: u64, page: u64| {
            let need = len.max(1).div_ceil(page);
            Error::new(VERB, Cause::Limit { what: "free huge pages", have, need })
        };
        // The file says how large its pages are: the system's default huge page.
        let Ok(file) = memfd(libc::MFD_HUGETLB) else { return Err(no_pages(0, HUGE_ALIGN as u64)) };
        let page = block_size(&file).map_err(|e| Error::from_io(VERB, "fstat", &e))?;
        Self::build(file, len, page).map_err(|error| match error.cause {
            Cause::Os { errno: libc::ENOMEM | libc::ENOSPC | libc::EFAULT | libc::EHWPOISON, .. } => {
                no_pages(free_huge_pages(page), page)
            }
            _ => error,
        })
    }

    /// Sizes, maps, populates and seals `file`, in the only order that works: our writable mapping has to be there
    /// before F_SEAL_FUTURE_WRITE forbids others, the size before the seals that freeze it.
    fn build(file: File, len: u64, page: u64) -> Result<Self> {
        let too_large = Error::new(VERB, Cause::Limit { what: "address space", have: isize::MAX as u64, need: len });
        let Some(len) = len.max(1).checked_next_multiple_of(page) else { return Err(too_large) };
        let size = match usize::try_from(len) {
            Ok(size) if size <= isize::MAX as usize - HUGE_ALIGN => size,
            _ => return Err(too_large),
        };
        // To populate more than there is would have the kernel end some process.
        if page == page_size()
            && size >= PARALLEL
            && let Some(have) = free_memory().filter(|have| *have < len)
        {
            return Err(Error::new(VERB, Cause::Limit { what: "free memory of this machine", have, need: len }));
        }
        file.set_len(len).map_err(|e| Error::from_io(VERB, "ftruncate", &e))?;
        let align = if size >= HUGE_ALIGN { HUGE_ALIGN } else { ALIGN }.max(page as usize);
        let map = Mapping::writable(file.as_fd(), size, align).map_err(|e| Error::from_io(VERB, "mmap", &e))?;
        if page == page_size() {
            // Transparent huge pages, where the administrator set shmem_enabled to `advise`; elsewhere no effect.
            map.advise(libc::MADV_HUGEPAGE).ok();
        }
        populate(&map, &file)?;
        // SAFETY: fcntl with F_ADD_SEALS takes an integer.
        let rc = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) };
        if rc != 0 {
            return Err(Error::last_os(VERB, "fcntl(F_ADD_SEALS)"));
        }
        Ok(Self { file, map, page })
    }
}

/// Bytes of memory and swap that can still be had, if the system tells.
fn free_memory() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    Some(meminfo(&text, "MemAvailable:")?.saturating_add(meminfo(&text, "SwapFree:").unwrap_or(0)))
}

fn meminfo(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Makes every page present, so that neither a copy nor a peer's view meets a page that has yet to be allocated.
fn populate(map: &Mapping, file: &File) -> Result<()> {
    let error = |e: io::Error| Error::from_io(VERB, "madvise(MADV_POPULATE_WRITE)", &e);
    match map.populate_write(0, map.len().min(ALIGN)) {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => return allocate_and_touch(map, file),
        outcome => outcome.map_err(error)?,
    }
    if map.len() < PARALLEL {
        return map.populate_write(0, map.len()).map_err(error);
    }
    let half = (map.len() / 2).next_multiple_of(HUGE_ALIGN);
    let rest = map.len() - half;
    thread::scope(|scope| {
        let other = thread::Builder::new()
            .name("towline-populate".into())
            .spawn_scoped(scope, || map.populate_write(half, rest));
        let mine = map.populate_write(0, half);
        let others = match other {
            Ok(thread) => thread.join().unwrap_or_else(|_| map.populate_write(half, rest)),
            Err(_no_thread) => map.populate_write(half, rest),
        };
        mine.and(others)
    })
    .map_err(error)
}

/// Before Linux 5.14. A touch that finds no memory would kill the process, so the pages are allocated first.
fn allocate_and_touch(map: &Mapping, file: &File) -> Result<()> {
    // SAFETY: the call takes a descriptor and three integers.
    let rc = unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, map.len() as libc::off_t) };
    if rc != 0 {
        return Err(Error::last_os(VERB, "fallocate"));
    }
    map.touch_fresh();
    Ok(())
}

fn memfd(flags: libc::c_uint) -> io::Result<File> {
    let flags = flags | libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: the name is a NUL-terminated string; the call has no other precondition.
    let fd = unsafe { libc::memfd_create(c"towline".as_ptr(), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` was just made and nobody else has it.
    Ok(unsafe { File::from_raw_fd(fd) })
}

fn block_size(file: &File) -> io::Result<u64> {
    use std::os::unix::fs::MetadataExt;
    Ok(file.metadata()?.blksize().max(page_size()))
}

/// Huge pages of this size that are free and not promised to another mapping; 0 where the system doesn't say.
fn free_huge_pages(page: u64) -> u64 {
    let count = |name: &str| -> u64 {
        let path = format!("/sys/kernel/mm/hugepages/hugepages-{}kB/{name}", page >> 10);
        fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
    };
    count("free_hugepages").saturating_sub(count("resv_hugepages"))
}

// SAFETY: the mapping is `map`'s, readable and writable, and unmapped only when `map` is dropped.
unsafe impl MemoryBacking for Shared {
    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }
    fn len(&self) -> u64 {
        self.map.len() as u64
    }
    fn address(&self) -> *mut u8 {
        self.map.address()
    }
    fn segment(&self) -> Option<BorrowedFd<'_>> {
        Some(self.file.as_fd())
    }
    fn page_size(&self) -> u64 {
        self.page
    }
    fn read(&self, offset: u64, out: &mut [u8]) {
        copy_out(self.address(), offset, out);
    }
    fn write(&self, offset: u64, bytes: &[u8]) {
        copy_in(self.address(), offset, bytes);
    }
}
