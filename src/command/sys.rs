//! What the command needs from the system below the standard library: the clock and the processor time that both
//! processes share, plain memory in pages, memory shared by two processes, and the streaming copy.
//!
//! The only module of the command with `unsafe` code.

#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
mod streaming;

use std::fs::File;
use std::io;
use std::net::TcpStream;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// The size of a page. Only the stride of touching depends on it: larger pages are merely touched more than once.
pub(crate) const PAGE: usize = 4096;

/// Nanoseconds of `CLOCK_MONOTONIC`: one clock for every process of a host.
pub(crate) fn now_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid timespec that the call fills; this clock exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// User and system time of this process so far, all its threads, in seconds.
pub(crate) fn cpu_seconds() -> f64 {
    let zero = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let mut usage = libc::rusage {
        ru_utime: zero,
        ru_stime: zero,
        ru_maxrss: 0,
        ru_ixrss: 0,
        ru_idrss: 0,
        ru_isrss: 0,
        ru_minflt: 0,
        ru_majflt: 0,
        ru_nswap: 0,
        ru_inblock: 0,
        ru_oublock: 0,
        ru_msgsnd: 0,
        ru_msgrcv: 0,
        ru_nsignals: 0,
        ru_nvcsw: 0,
        ru_nivcsw: 0,
    };
    // SAFETY: `usage` is a valid rusage that the call fills.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) };
    let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 * 1e-6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

/// Posts reads into memory that nobody looks at: the limit of RDMA moves bytes for their time alone.
pub(crate) fn post_reads(
    queue_pair: &towline_verbs::QueuePair,
    requests: Vec<towline_verbs::WorkRequest>,
) -> towline_verbs::Result<()> {
    // SAFETY: the reads fill memory of `limits::rdma::End`, of which no slice is ever made.
    unsafe { queue_pair.post_send(requests) }
}

/// Which of the cores that this thread may run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Core {
    First,
    Last,
}

/// Keeps this thread on one core while it lives.
#[derive(Debug)]
pub(crate) struct OnCore {
    before: Option<libc::cpu_set_t>,
}

impl OnCore {
    /// On a system that does not allow it the thread stays free: the measurement is then as good as the scheduler's
    /// choice.
    pub(crate) fn keep(core: Core) -> Self {
        let size = size_of::<libc::cpu_set_t>();
        // SAFETY: a `cpu_set_t` is a plain bit set, for which all zeros is the empty set.
        let mut before: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        // SAFETY: thread 0 is the calling one; `before` is a valid place of `size` bytes for its set.
        if unsafe { libc::sched_getaffinity(0, size, &raw mut before) } != 0 {
            return Self { before: None };
        }
        // SAFETY: `cpu` is below the number of bits of the set.
        let mut cores = (0..libc::CPU_SETSIZE as usize).filter(|cpu| unsafe { libc::CPU_ISSET(*cpu, &before) });
        let chosen = match core {
            Core::First => cores.next(),
            Core::Last => cores.next_back(),
        };
        let Some(chosen) = chosen else { return Self { before: None } };
        // SAFETY: as above.
        let mut one: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        // SAFETY: `chosen` is below the number of bits of the set.
        unsafe { libc::CPU_SET(chosen, &mut one) };
        // SAFETY: thread 0 is the calling one; `one` is a valid set of `size` bytes.
        let kept = unsafe { libc::sched_setaffinity(0, size, &raw const one) } == 0;
        Self { before: kept.then_some(before) }
    }
}

impl Drop for OnCore {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            // SAFETY: as in `keep`; the set is the one that the thread had.
            let _free_again = unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), before) };
        }
    }
}

/// Asks the kernel to kill this process when the thread that started it ends.
pub(crate) fn die_with_parent() -> io::Result<()> {
    // SAFETY: this option takes one integer and touches no memory.
    let answer = unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Waits until some of `streams` can be read, or have ended; says which.
pub(crate) fn readable(streams: &[BorrowedFd<'_>], limit: Duration) -> io::Result<Vec<bool>> {
    let poll = |stream: &BorrowedFd<'_>| libc::pollfd { fd: stream.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let mut polls: Vec<libc::pollfd> = streams.iter().map(poll).collect();
    let limit = i32::try_from(limit.as_millis()).unwrap_or(i32::MAX);
    // SAFETY: `polls` has that many entries, which the call fills.
    let answer = unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, limit) };
    match answer {
        -1 if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted => Err(io::Error::last_os_error()),
        _ => Ok(polls.iter().map(|poll| answer > 0 && poll.revents != 0).collect()),
    }
}

/// The congestion control of a TCP socket.
pub(crate) fn congestion(socket: &TcpStream) -> io::Result<String> {
    let mut name = [0u8; 32];
    let mut len = name.len() as libc::socklen_t;
    // SAFETY: `name` has `len` writable bytes, and the kernel writes at most that many and the length it wrote.
    let answer = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_CONGESTION,
            name.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    if answer != 0 {
        return Err(io::Error::last_os_error());
    }
    let end = name.iter().position(|&b| b == 0).unwrap_or(name.len());
    Ok(String::from_utf8_lossy(&name[..end]).into_owned())
}

/// Chooses the congestion control of a TCP socket; an error where the kernel lacks it or keeps it for root.
pub(crate) fn set_congestion(socket: &TcpStream, name: &str) -> io::Result<()> {
    // SAFETY: `name` has `name.len()` readable bytes, which the kernel copies.
    let answer = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_CONGESTION,
            name.as_ptr().cast(),
            name.len() as libc::socklen_t,
        )
    };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// A new memfd of `len` bytes.
pub(crate) fn memfd(len: usize) -> io::Result<OwnedFd> {
    // SAFETY: the name is a constant C string.
    let fd = unsafe { libc::memfd_create(c"towline-bench".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has just returned this descriptor, which nothing else owns.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let file = File::from(fd);
    file.set_len(len as u64)?;
    Ok(file.into())
}

/// A mapping; unmapped when dropped.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread; who may access it when is for the two types below.
unsafe impl Send for Mapping {}
// SAFETY: as above: a shared reference to a `Mapping` itself gives no access to its memory.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(len: usize, fd: Option<&OwnedFd>) -> io::Result<Self> {
        let len = len.max(1).next_multiple_of(PAGE);
        let (flags, fd) = match fd {
            Some(fd) => (libc::MAP_SHARED, fd.as_raw_fd()),
            None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
        };
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, fd, 0) };
        match NonNull::new(start.cast::<u8>()) {
            Some(start) if start.as_ptr().cast::<libc::c_void>() != libc::MAP_FAILED => Ok(Self { start, len }),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this range was mapped by `new`, is unmapped only here, and no reference into it outlives `self`.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Plain private memory, page aligned and zeroed, with pages of the system's usual size.
#[derive(Debug)]
pub(crate) struct Pages {
    mapping: Mapping,
    len: usize,
}

impl Pages {
    /// `len` bytes; their pages come with the first touch.
    pub(crate) fn new(len: usize) -> io::Result<Self> {
        Ok(Self { mapping: Mapping::new(len, None)?, len })
    }

    /// `len` bytes of a memfd of this process's own, every page present and mapped.
    pub(crate) fn populated_memfd(len: usize) -> io::Result<Self> {
        let fd = memfd(len.max(1).next_multiple_of(PAGE))?;
        let mut pages = Self { mapping: Mapping::new(len, Some(&fd))?, len };
        pages.touch();
        Ok(pages)
    }

    /// Writes one byte of every page, so that all are there.
    pub(crate) fn touch(&mut self) {
        for byte in self.iter_mut().step_by(PAGE) {
            *std::hint::black_box(byte) = 1;
        }
    }
}

impl Deref for Pages {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `len` bytes are mapped and initialised (the kernel gives zeroes), no other process has the mapping
        // or its descriptor, and writing needs `&mut self`.
        unsafe { std::slice::from_raw_parts(self.mapping.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.mapping.start.as_ptr(), self.len) }
    }
}

/// Reads one byte of every page of a view, as the consumer of a view does that looks at all of it.
pub(crate) fn read_pages_of(part: &towline::ViewPart<'_>) {
    let start = part.as_ptr();
    for offset in (0..part.layout().len as usize).step_by(PAGE) {
        // SAFETY: within the part, which is valid for reads of its length while the view lives.
        let byte = unsafe { start.add(offset) };
        // SAFETY: as above; volatile, since the producer's process could write it meanwhile.
        std::hint::black_box(unsafe { byte.read_volatile() });
    }
}

/// Reads one byte of every page.
pub(crate) fn read_pages(bytes: &[u8]) {
    for byte in bytes.iter().step_by(PAGE) {
        // SAFETY: a reference is valid for reads.
        std::hint::black_box(unsafe { std::ptr::from_ref(byte).read_volatile() });
    }
}

/// Memory that two processes share: one page of words, then the data.
#[derive(Debug)]
pub(crate) struct Shared {
    mapping: Mapping,
}

impl Shared {
    /// Words at the start, each on a cache line pair of its own.
    pub(crate) const WORDS: usize = PAGE / 128;

    /// Maps `fd` with room for `len` bytes of data, making the file longer if needed.
    pub(crate) fn map(fd: &OwnedFd, len: usize) -> io::Result<Self> {
        let need = PAGE + len.next_multiple_of(PAGE);
        let file = File::from(fd.as_fd().try_clone_to_owned()?);
        if file.metadata()?.len() < need as u64 {
            file.set_len(need as u64)?;
        }
        Ok(Self { mapping: Mapping::new(need, Some(fd))? })
    }

    /// Word `index`, seen by both processes.
    pub(crate) fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < Self::WORDS, "the page of words has {} of them", Self::WORDS);
        // SAFETY: `index` was checked, so the word lies in the first page of the mapping.
        let word = unsafe { self.mapping.start.as_ptr().add(index * 128) };
        // SAFETY: the word is mapped as long as `self` is borrowed, aligned to 128, and only ever accessed atomically.
        unsafe { AtomicU64::from_ptr(word.cast()) }
    }

    /// Copies `from` to the data at `offset`.
    ///
    /// The two processes order their accesses by the words (release, acquire); a process that breaks this order
    /// gets wrong figures.
    pub(crate) fn write(&self, offset: usize, from: &[u8], copy: Copier) {
        let to = self.data(offset, from.len());
        // SAFETY: `data` checked the range; private memory and the shared mapping don't overlap.
        unsafe { copy.run(to, from.as_ptr(), from.len()) };
    }

    /// Copies the data at `offset` to `to`; ordered as for [`write`](Self::write).
    pub(crate) fn read(&self, offset: usize, to: &mut [u8], copy: Copier) {
        let from = self.data(offset, to.len());
        // SAFETY: `data` checked the range; private memory and the shared mapping don't overlap.
        unsafe { copy.run(to.as_mut_ptr(), from, to.len()) };
    }

    /// Writes one byte of every page of the data's first `len` bytes.
    pub(crate) fn touch(&self, len: usize) {
        for offset in (0..len).step_by(PAGE) {
            let byte = self.data(offset, 1);
            // SAFETY: `data` checked that this byte is mapped.
            unsafe { byte.write_volatile(0) };
        }
    }

    fn data(&self, offset: usize, len: usize) -> *mut u8 {
        let room = self.mapping.len - PAGE;
        assert!(offset <= room && len <= room - offset, "{len} bytes at {offset} of {room} shared ones");
        // SAFETY: the range was checked against the mapping.
        unsafe { self.mapping.start.as_ptr().add(PAGE + offset) }
    }
}

/// How bytes are copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Copier {
    /// The C library's `memcpy`.
    Plain,
    /// Streaming stores that walk four pages in turn, so that more pages of the memory chips are open at once.
    Streaming,
}

impl Copier {
    /// The ways that this processor has.
    pub(crate) fn available() -> &'static [Self] {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            return &[Self::Plain, Self::Streaming];
        }
        &[Self::Plain]
    }

    /// Copies `from` to `to`, which have the same length.
    pub(crate) fn copy(self, to: &mut [u8], from: &[u8]) {
        assert_eq!(to.len(), from.len());
        // SAFETY: both slices have this length, and an exclusive one can't overlap another.
        unsafe { self.run(to.as_mut_ptr(), from.as_ptr(), from.len()) };
    }

    /// # Safety
    /// `from` can be read and `to` written for `len` bytes, and the two don't overlap.
    unsafe fn run(self, to: *mut u8, from: *const u8, len: usize) {
        #[cfg(target_arch = "x86_64")]
        if self == Self::Streaming && is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has AVX2; the ranges are the caller's promise.
            return unsafe { streaming::copy(to, from, len) };
        }
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn every_copier_copies_every_byte_at_any_alignment() {
        let source: Vec<u8> = (0..100_000u32).map(|i| (i * 31 + i / 251) as u8).collect();
        for &copier in Copier::available() {
            for (start, len) in
                [(0, 0), (0, 1), (3, 31), (1, 16384), (7, 16385), (5, 49_153), (0, 99_999), (31, 65_536)]
            {
                for shift in [0, 1, 17] {
                    let mut target = vec![0xAAu8; len + shift + 64];
                    copier.copy(&mut target[shift..shift + len], &source[start..start + len]);
                    assert_eq!(target[shift..shift + len], source[start..start + len], "{copier:?} {start} {len}");
                    assert!(target[..shift].iter().all(|&b| b == 0xAA), "nothing before the target");
                    assert!(target[shift + len..].iter().all(|&b| b == 0xAA), "nothing behind the target");
                }
            }
        }
    }

    #[test]
    fn two_mappings_of_one_memfd_share_words_and_data() {
        let fd = memfd(0).unwrap();
        let (one, other) = (Shared::map(&fd, 10_000).unwrap(), Shared::map(&fd, 10_000).unwrap());
        one.word(3).store(42, Ordering::Release);
        assert_eq!(other.word(3).load(Ordering::Acquire), 42);
        one.write(9_000, &[7; 1000], Copier::Plain);
        let mut back = [0; 1000];
        other.read(9_000, &mut back, Copier::Plain);
        assert_eq!(back, [7; 1000]);
    }

    #[test]
    #[should_panic(expected = "shared ones")]
    fn shared_memory_is_checked_against_its_length() {
        let fd = memfd(0).unwrap();
        Shared::map(&fd, 4096).unwrap().write(4000, &[0; 100], Copier::Plain);
    }

    #[test]
    fn clocks_go_forward_and_work_costs_processor_time() {
        let (start, cpu) = (now_ns(), cpu_seconds());
        while cpu_seconds() - cpu < 0.002 {
            std::hint::spin_loop();
        }
        assert!(now_ns() > start);
    }

    #[test]
    fn congestion_control_can_be_read_and_a_wrong_one_is_refused() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let name = congestion(&socket).unwrap();
        assert!(!name.is_empty() && name.is_ascii());
        set_congestion(&socket, &name).unwrap();
        assert!(set_congestion(&socket, "no-such-thing").is_err());
        assert_eq!(congestion(&socket).unwrap(), name);
    }
}
