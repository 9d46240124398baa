//! Segments of peers: checked, mapped read-only, kept, and viewed.
#![allow(unsafe_code)]

use super::{lock, sys};
use crate::backend::ViewBackend;
use crate::memory::{Mapping, SEALS, generation, page_size};
use crate::{Cause, Error};
use core::mem::ManuallyDrop;
use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, OnceLock, Weak};

/// Every mapping begins at a multiple of this, as the owner's does.
const ALIGN: usize = 64 << 10;
const HUGE_ALIGN: usize = 2 << 20;

/// A peer's segment in this process's address space, read-only. Unmapped when the last key, view and copy that use it
/// are gone.
#[derive(Debug)]
pub(super) struct Segment {
    map: ManuallyDrop<Mapping>,
    /// Of the process that has it mapped; its children don't.
    generation: u64,
}

impl Drop for Segment {
    fn drop(&mut self) {
        if self.is_mapped() {
            // SAFETY: the field is not used after this.
            unsafe { ManuallyDrop::drop(&mut self.map) }
        }
    }
}

/// The segments that this process has mapped, by device and inode of the file: many queue pairs of one process to
/// another, and many regions of one segment, share a mapping.
fn mapped() -> &'static Mutex<Mapped> {
    static MAPPED: OnceLock<Mutex<Mapped>> = OnceLock::new();
    MAPPED.get_or_init(Mutex::default)
}

/// Device, inode, and the generation of the process, since a child inherits the table and not the mappings.
type Mapped = HashMap<(u64, u64, u64), Weak<Segment>>;

/// Why a descriptor that a peer sent is not used.
fn refused(what: &'static str) -> Error {
    Error::new("map_segment", Cause::Malformed { what })
}

impl Segment {
    /// Checks and maps a segment that must hold at least `len` bytes, or finds the mapping that there is. The second
    /// value says whether it is new, with pages not present yet. The descriptor is closed in any case.
    ///
    /// What is checked makes it impossible that the peer harms us through the mapping (I7): it can't become shorter
    /// under our reads (SIGBUS), its owner has paid for every page (we allocate none), and nobody but the owner writes.
    pub(super) fn open(fd: OwnedFd, len: u64) -> Result<(Arc<Self>, bool), Error> {
        // Seals first: only a memfd or a file like it has any, so nothing below waits for a file system.
        let Ok(seals) = sys::seals(fd.as_fd()) else { return Err(refused("segment is not a sealed memory file")) };
        if seals & SEALS != SEALS {
            return Err(refused("segment lacks seals"));
        }
        let file = File::from(fd);
        let facts = file.metadata().map_err(|e| Error::from_io("map_segment", "fstat", &e))?;
        if !facts.is_file() {
            return Err(refused("segment is not a memory file"));
        }
        let size = match usize::try_from(facts.len()) {
            Ok(size) if facts.len() >= len && size > 0 && size <= isize::MAX as usize / 2 => size,
            _ => return Err(refused("segment is shorter than its region")),
        };
        if facts.blocks().saturating_mul(512) < facts.len() {
            return Err(refused("segment is not populated"));
        }
        // The lock is held while mapping, so that no two threads map the same segment; mapping takes microseconds.
        let generation = generation();
        let name = (facts.dev(), facts.ino(), generation);
        let mut table = lock(mapped());
        if let Some(segment) = table.get(&name).and_then(Weak::upgrade)
            && segment.map.len() == size
        {
            return Ok((segment, false));
        }
        let page = facts.blksize().max(page_size()); // of a huge-page file: its page
        let align = if size >= HUGE_ALIGN { HUGE_ALIGN } else { ALIGN };
        let align = if page.is_power_of_two() { align.max(page as usize) } else { align };
        let map =
            Mapping::read_only(file.as_fd(), size, align).map_err(|e| Error::from_io("map_segment", "mmap", &e))?;
        // A child of ours must not keep a peer's memory mapped (I13).
        map.advise(libc::MADV_DONTFORK).map_err(|e| Error::from_io("map_segment", "madvise(MADV_DONTFORK)", &e))?;
        let segment = Arc::new(Self { map: ManuallyDrop::new(map), generation });
        table.retain(|_, segment| segment.strong_count() > 0);
        table.insert(name, Arc::downgrade(&segment));
        Ok((segment, true))
    }

    fn is_mapped(&self) -> bool {
        self.generation == generation()
    }

    /// Length in bytes.
    pub(super) fn len(&self) -> usize {
        self.map.len()
    }

    /// The `len` bytes at `offset`, if the segment has them.
    pub(super) fn range(&self, offset: u64, len: u64) -> Option<*const u8> {
        let end = offset.checked_add(len)?;
        (end <= self.map.len() as u64).then(|| self.map.address().wrapping_add(offset as usize).cast_const())
    }

    /// Makes pages present, so that views and copies meet no fault; `offset` is a multiple of the page size. A failure
    /// only means that they will be made present when they are read.
    pub(super) fn populate(&self, offset: usize, len: usize) {
        self.map.populate_read(offset, len).ok();
    }
}

/// A view of a part of a segment; keeps it mapped.
#[derive(Debug)]
pub(super) struct View {
    segment: Arc<Segment>,
    offset: u64,
    len: u64,
}

impl View {
    /// `None` when the segment doesn't have the range.
    pub(super) fn new(segment: Arc<Segment>, offset: u64, len: u64) -> Option<Self> {
        segment.range(offset, len)?;
        Some(Self { segment, offset, len })
    }
}

impl ViewBackend for View {
    /// Nothing in a forked child, so that it can't read where nothing is mapped (I13).
    fn len(&self) -> u64 {
        if self.segment.is_mapped() { self.len } else { 0 }
    }

    fn as_ptr(&self) -> *const u8 {
        self.segment.map.address().wrapping_add(self.offset as usize).cast_const()
    }

    fn read(&self, offset: u64, out: &mut [u8]) {
        // SAFETY: the caller checked that the range lies within the view, which lies within the mapping (`new`); `out`
        // is exclusively borrowed and so no part of it.
        unsafe { crate::copy::copy(out.as_mut_ptr(), self.as_ptr().wrapping_add(offset as usize), out.len()) }
    }
}
