//! What this crate asks of the operating system and of raw memory directly; nothing else in it is unsafe.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;
use towline_verbs::memory::MemoryBacking;
use towline_verbs::{Memory, MemoryKind, QueuePair, WorkRequest};

/// Nanoseconds of a clock that also counts while the machine is suspended (I4), from an arbitrary start.
pub(crate) fn boot_clock() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid place for the result.
    let status = unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut time) };
    debug_assert_eq!(status, 0, "CLOCK_BOOTTIME is there since Linux 2.6.39");
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Waits until `fd` is readable, but no longer than `timeout`, or for a shorter time; with the precision of the system's
/// timers, which is better than a millisecond.
pub(crate) fn wait_readable(fd: RawFd, timeout: Duration) {
    let mut fd = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let timeout = libc::timespec {
        tv_sec: timeout.as_secs().try_into().unwrap_or(libc::time_t::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    };
    // SAFETY: one entry, which is valid and written to only during the call, as is the timeout read; no signal mask.
    let _readable = unsafe { libc::ppoll(&raw mut fd, 1, &raw const timeout, std::ptr::null()) };
}

/// The user that this process acts as: what peers see of a Unix socket made by it.
pub(crate) fn effective_user() -> u32 {
    // SAFETY: it takes nothing, always succeeds, and touches no memory.
    unsafe { libc::geteuid() }
}

/// 16 random bytes from the system's generator.
pub(crate) fn random_16() -> io::Result<[u8; 16]> {
    let mut bytes = [0u8; 16];
    loop {
        // SAFETY: the pointer and length are those of `bytes`.
        let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
        match got {
            16 => return Ok(bytes),
            -1 if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted => {
                return Err(io::Error::last_os_error());
            }
            _ => {} // interrupted before it was complete: requests up to 256 bytes are all or nothing once started
        }
    }
}

/// Posts reads whose destination is owned by the transfer that they belong to.
pub(crate) fn post_reads(queue_pair: &QueuePair, requests: Vec<WorkRequest>) -> towline_verbs::Result<()> {
    // SAFETY: the destination of every read that the engine builds is a pool buffer or an owned destination that has
    // been moved into the get's transfer (engine::fetch). It is handed out, or given back to the pool, only after the
    // last completion of that transfer has been polled (I1, I3), so nobody else reads or writes it meanwhile.
    unsafe { queue_pair.post_send(requests) }
}

/// The bytes of an exclusively owned pool extent.
pub(crate) fn owned_bytes(memory: &Memory, offset: u64, len: u64) -> &[u8] {
    // SAFETY: called by `Buffer`, the only owner of the extent (I1): it is not published and no read into it is
    // outstanding while a `Buffer` for it is in a caller's hands, and peers can't write pool memory (sealed against
    // writable mappings; no region of the pool is registered with REMOTE_WRITE). The borrow of the `Buffer` keeps out
    // its own `&mut`.
    let bytes = unsafe { memory.slice(offset, len) };
    bytes.unwrap_or(&[])
}

/// As [`owned_bytes`], to write.
#[allow(clippy::mut_from_ref)]
pub(crate) fn owned_bytes_mut(memory: &Memory, offset: u64, len: u64) -> &mut [u8] {
    // SAFETY: as in `owned_bytes`, and called with the `Buffer` borrowed mutably, so that this is the only slice. Peers
    // read an extent only while it is published, which a `Buffer` in a caller's hands is not.
    let bytes = unsafe { memory.slice_mut(offset, len) };
    bytes.unwrap_or(&mut [])
}

/// Bytes of the caller's own, moved in so that they stay alive and in place while a read fills them.
#[derive(Debug)]
pub(crate) struct OwnedBytes {
    address: *mut u8,
    len: usize,
}

impl OwnedBytes {
    pub(crate) fn new(bytes: Box<[u8]>) -> Arc<Self> {
        let len = bytes.len();
        Arc::new(Self { address: Box::into_raw(bytes).cast(), len })
    }

    /// Gives the bytes back once no region or request holds them any more.
    pub(crate) fn into_inner(this: Arc<Self>) -> Result<Box<[u8]>, Arc<Self>> {
        let this = Arc::try_unwrap(this)?;
        let slice = core::ptr::slice_from_raw_parts_mut(this.address, this.len);
        core::mem::forget(this);
        // SAFETY: `address` and `len` came from `Box::into_raw` in `new`; this was the last handle, and `forget` keeps
        // `drop` from freeing them too.
        Ok(unsafe { Box::from_raw(slice) })
    }

    /// The bytes; the caller holds a handle with which no read can be outstanding.
    pub(crate) fn as_slice(&self) -> &[u8] {
        // SAFETY: `address` is valid for `len` bytes while `self` lives. Only a finished payload calls this, after the
        // last completion of the get that filled it (I3), and nothing writes it afterwards.
        unsafe { core::slice::from_raw_parts(self.address, self.len) }
    }
}

impl Drop for OwnedBytes {
    fn drop(&mut self) {
        let slice = core::ptr::slice_from_raw_parts_mut(self.address, self.len);
        // SAFETY: as in `into_inner`; this is the last handle.
        drop(unsafe { Box::from_raw(slice) });
    }
}

// SAFETY: it owns its bytes, as a `Box<[u8]>` does, which is `Send`.
unsafe impl Send for OwnedBytes {}
// SAFETY: shared use is only by the contract of `MemoryBacking`, which makes its accesses safe from any thread.
unsafe impl Sync for OwnedBytes {}

// SAFETY: `address` is valid for `len` bytes while the value lives, and never changes.
unsafe impl MemoryBacking for OwnedBytes {
    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }
    fn len(&self) -> u64 {
        self.len as u64
    }
    fn address(&self) -> *mut u8 {
        self.address
    }
    fn segment(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        None
    }
    fn page_size(&self) -> u64 {
        4096
    }
    fn read(&self, offset: u64, out: &mut [u8]) {
        // SAFETY: the range was checked by `Memory::read`; `out` is another object.
        unsafe { core::ptr::copy(self.address.wrapping_add(offset as usize), out.as_mut_ptr(), out.len()) }
    }
    fn write(&self, offset: u64, bytes: &[u8]) {
        // SAFETY: the range was checked by `Memory::write`; `bytes` is another object.
        unsafe { core::ptr::copy(bytes.as_ptr(), self.address.wrapping_add(offset as usize), bytes.len()) }
    }
}

/// A slice over mapped memory of another process; the whole contract is the caller's.
///
/// # Safety
/// `view` stays alive and nobody writes its bytes while the slice lives.
pub(crate) unsafe fn view_bytes(view: &towline_verbs::MappedView) -> &[u8] {
    // SAFETY: the view's pointer is valid for its length while it lives; that nobody writes is the caller's promise.
    unsafe { core::slice::from_raw_parts(view.as_ptr(), view.len() as usize) }
}
