//! Memory regions. What is larger than the device takes in one (`max_mr_size`) is registered in several pieces, never cut
//! (I5, B8): all of them but the last are equally long, a multiple of the page size, so that the piece of an offset is found
//! by a division.
//!
//! Each piece has keys of its own, so what crosses a border between two is no single range for a device:
//!
//! | what crosses | what becomes of it |
//! |---|---|
//! | a local slice of a send request | it is a slice in each piece, as many as `max_sge` allows |
//! | a receive; a remote slice; a window | refused: [`Cause::AcrossPieces`] |

use super::domain::Domain;
use super::queue_pair::bind;
use super::{failed, sys};
use crate::backend::{MrBackend, MwBackend, QpBackend};
use crate::memory::Loan;
use crate::{Access, Cause, Error, Memory, MemoryKind, RemoteSlice, Result};
use core::any::Any;
use core::fmt;
use rdma_core_sys::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_MW_BIND, IBV_ACCESS_RELAXED_ORDERING, IBV_ACCESS_REMOTE_READ,
    IBV_ACCESS_REMOTE_WRITE, ibv_sge,
};
use std::sync::Arc;

const VERB: &str = "reg_mr";
/// Most pieces of a region (I9).
const MAX_PIECES: u64 = 1 << 12;
/// Borders lie where a huge page could end, if pieces are long enough.
const HUGE: u64 = 2 << 20;

/// `IBV_ACCESS_*` for the rights. A device gives a peer the right to write only where it may write itself.
fn rights(access: Access) -> i32 {
    let mut rights = 0;
    for (ours, theirs) in [
        (Access::LOCAL_WRITE, IBV_ACCESS_LOCAL_WRITE),
        (Access::REMOTE_WRITE, IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_LOCAL_WRITE),
        (Access::REMOTE_READ, IBV_ACCESS_REMOTE_READ),
        (Access::MW_BIND, IBV_ACCESS_MW_BIND),
        (Access::RELAXED_ORDERING, IBV_ACCESS_RELAXED_ORDERING),
    ] {
        if access.contains(ours) {
            rights |= theirs;
        }
    }
    rights
}

/// Into how long pieces `len` bytes are cut, of pages of `page` bytes, where a device takes `max_size` in one and `max_count`
/// of them.
fn piece_len(len: u64, page: u64, max_size: u64, max_count: u64) -> Result<u64> {
    if len <= max_size {
        return Ok(u64::MAX);
    }
    let align = if max_size >= 2 * HUGE { page.max(HUGE) } else { page };
    let piece = max_size / align * align;
    if piece == 0 {
        return Err(Error::new(VERB, Cause::Limit { what: "max_mr_size", have: max_size, need: align }));
    }
    let (have, need) = (max_count.min(MAX_PIECES), len.div_ceil(piece));
    if need > have {
        return Err(Error::new(VERB, Cause::Limit { what: "pieces of a region (of max_mr_size)", have, need }));
    }
    Ok(piece)
}

/// A memory region. The device lets go of the memory before we do: the pieces are dropped first.
pub(super) struct Region {
    pieces: Box<[sys::Region]>,
    /// Bytes of each piece but the last; more than there are if there is only one.
    piece: u64,
    /// The local key of the first.
    local_key: u32,
    pub(super) domain: Arc<sys::Domain>,
    pub(super) access: Access,
    /// Whether this process's processor reaches it too.
    pub(super) is_near: bool,
    /// The address of the first byte, as the device knows it.
    base: u64,
    len: u64,
    memory: Memory,
}

// The keys are secrets (I14).
impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IbvRegion")
            .field("len", &self.len)
            .field("pieces", &self.pieces.len())
            .field("access", &self.access)
            .finish_non_exhaustive()
    }
}

impl Region {
    /// Registers all of `memory`, which has bytes.
    #[allow(unsafe_code)]
    pub(super) fn register(domain: &Domain, memory: Memory, access: Access) -> Result<Self> {
        let port = &domain.device.port;
        let len = memory.len();
        let piece = piece_len(len, memory.page_size(), port.max_region, port.max_regions)?;
        let mut pieces = Vec::new();
        let mut offset = 0;
        while offset < len {
            let bytes = piece.min(len - offset);
            let start = memory.address().wrapping_add(offset as usize);
            // SAFETY: these bytes lie in memory that is mapped as long as a clone of it lives, and the region keeps one; it
            // gives the rights that the caller asked for.
            let raw = unsafe { sys::Region::register(&domain.raw, start, bytes as usize, rights(access)) };
            pieces.push(raw.map_err(|error| refused(error, len))?);
            offset += bytes;
        }
        Ok(Self::of(pieces, piece, domain.raw.clone(), memory, access))
    }

    /// A region of one piece.
    pub(super) fn whole(raw: sys::Region, domain: Arc<sys::Domain>, memory: Memory, access: Access) -> Self {
        Self::of(vec![raw], u64::MAX, domain, memory, access)
    }

    /// A region of `pieces`, one at least.
    fn of(pieces: Vec<sys::Region>, piece: u64, domain: Arc<sys::Domain>, memory: Memory, access: Access) -> Self {
        let local_key = pieces[0].local_key();
        // Exposed, as the library's provider makes a pointer of it when it takes bytes at once.
        let base = memory.address().expose_provenance() as u64;
        let (is_near, len) = (memory.kind() == MemoryKind::Host, memory.len());
        Self { pieces: pieces.into(), piece, local_key, domain, access, is_near, base, len, memory }
    }

    pub(super) fn memory(&self) -> &Memory {
        &self.memory
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has one piece only.
    pub(super) fn is_whole(&self) -> bool {
        self.pieces.len() == 1
    }

    /// Bytes `offset..offset + length` of a region of one piece, for a request; the range has been checked.
    #[inline]
    pub(super) fn sge(&self, offset: u64, length: u32) -> ibv_sge {
        debug_assert!(self.is_whole());
        ibv_sge { addr: self.base + offset, length, lkey: self.local_key }
    }

    /// The slices, one in each piece, of bytes `offset..offset + length`; the range has been checked.
    pub(super) fn sges(&self, offset: u64, length: u32) -> impl Iterator<Item = ibv_sge> {
        let (mut at, end) = (offset, offset + u64::from(length));
        core::iter::from_fn(move || {
            let index = at / self.piece;
            let length = end.min((index + 1).saturating_mul(self.piece)) - at;
            let addr = self.base + at;
            at += length;
            (length > 0).then(|| ibv_sge { addr, length: length as u32, lkey: self.pieces[index as usize].local_key() })
        })
    }

    /// The piece that the byte at `offset` lies in; the last for what lies at the end.
    pub(super) fn piece_at(&self, offset: u64) -> &sys::Region {
        let index = (offset / self.piece) as usize;
        &self.pieces[index.min(self.pieces.len() - 1)]
    }

    /// The same, by the address of the byte as the device knows it.
    pub(super) fn piece_of(&self, address: u64) -> &sys::Region {
        self.piece_at(address - self.base)
    }

    /// The address of the byte at `offset`, as the device knows it.
    pub(super) fn address(&self, offset: u64) -> u64 {
        self.base + offset
    }
}

/// Why `len` bytes could not be registered.
fn refused(error: rdma_core_sys::Error, need: u64) -> Error {
    match (error.errno(), sys::memlock_limit()) {
        (libc::ENOMEM, Some(have)) if have < need => {
            Error::new(VERB, Cause::Limit { what: "memlock (ulimit -l)", have, need })
        }
        _ => failed(VERB, "ibv_reg_mr", error),
    }
}

impl MrBackend for Region {
    fn piece_len(&self) -> u64 {
        self.piece
    }

    fn remote(&self, offset: u64, len: u64) -> RemoteSlice {
        RemoteSlice { address: self.address(offset), len, rkey: self.piece_at(offset).remote_key().into() }
    }

    fn bind(
        self: Arc<Self>,
        queue_pair: &dyn QpBackend,
        offset: u64,
        len: u64,
        _loan: Option<Arc<Loan>>,
    ) -> Result<Arc<dyn MwBackend>> {
        bind(self, queue_pair, offset, len)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_are_the_least_that_the_device_takes() {
        assert_eq!(rights(Access::empty()), 0);
        assert_eq!(rights(Access::REMOTE_READ), IBV_ACCESS_REMOTE_READ);
        assert_eq!(rights(Access::LOCAL_WRITE), IBV_ACCESS_LOCAL_WRITE);
        assert_eq!(rights(Access::REMOTE_WRITE), IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_LOCAL_WRITE);
        assert_eq!(rights(Access::RELAXED_ORDERING), IBV_ACCESS_RELAXED_ORDERING);
        assert_eq!(rights(Access::all()), 0b1_0111 | 1 << 20);
    }

    #[test]
    fn pieces_are_whole_pages_and_no_more_than_there_may_be() {
        let page = 4096;
        let limit = |what, have, need| Err(Error::new(VERB, Cause::Limit { what, have, need }));
        assert_eq!(piece_len(5 << 30, page, 5 << 30, 1), Ok(u64::MAX));
        assert_eq!(piece_len(5 << 30, page, (2 << 30) + 4097, 100), Ok(2 << 30), "a border between huge pages");
        assert_eq!(piece_len(100_000, page, 10_000, 100), Ok(8192), "one between pages");
        assert_eq!(piece_len(100_000, 65_536, 10_000, 100), limit("max_mr_size", 10_000, 65_536));
        let what = "pieces of a region (of max_mr_size)";
        assert_eq!(piece_len(10 << 30, page, 1 << 30, 9), limit(what, 9, 10));
        assert_eq!(piece_len(1 << 40, page, 1 << 20, u64::MAX), limit(what, MAX_PIECES, 1 << 20));
    }
}
