//! What the tests ask of the operating system directly; nothing else in them is unsafe.
#![allow(unsafe_code)]

/// Signals that tests send to processes which they started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    Stop,
    Continue,
    Kill,
}

/// Sends `signal` to a child of this process that has not been waited for.
pub fn send(process: u32, signal: Signal) {
    let number = match signal {
        Signal::Stop => libc::SIGSTOP,
        Signal::Continue => libc::SIGCONT,
        Signal::Kill => libc::SIGKILL,
    };
    // SAFETY: no memory is involved. The process is a child that has not been waited for, so its number is not reused.
    let status = unsafe { libc::kill(process as i32, number) };
    assert_eq!(status, 0, "kill: {}", std::io::Error::last_os_error());
}

/// Has this process killed when the thread that started it ends.
pub fn die_with_parent() {
    // SAFETY: prctl with these arguments touches no memory.
    let status = unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) };
    assert_eq!(status, 0, "prctl: {}", std::io::Error::last_os_error());
}

/// Runs `child` in a forked process and gives its exit status; a child that a signal ended gives 128 and the signal.
pub fn forked(child: impl FnOnce() -> u8) -> i32 {
    // SAFETY: the child runs `child`, which its caller keeps to what is allowed after a fork of a process with threads
    // (glibc's allocator is), and leaves by `_exit` without unwinding into the parent's frames.
    let process = unsafe { libc::fork() };
    assert!(process >= 0, "fork: {}", std::io::Error::last_os_error());
    if process == 0 {
        let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(101);
        // SAFETY: ends the process at once.
        unsafe { libc::_exit(code.into()) };
    }
    let mut status = 0;
    // SAFETY: `status` is a valid place for the result; the process is a child of this one.
    let waited = unsafe { libc::waitpid(process, &raw mut status, 0) };
    assert_eq!(waited, process, "waitpid: {}", std::io::Error::last_os_error());
    if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { 128 + libc::WTERMSIG(status) }
}

/// Posts a read of all of `remote` into the start of `region`, or a write the other way.
pub fn post(
    queue_pair: &towline_verbs::QueuePair,
    id: u64,
    opcode: towline_verbs::Opcode,
    region: &towline_verbs::MemoryRegion,
    remote: towline_verbs::RemoteSlice,
) -> towline_verbs::Result<()> {
    let local = towline_verbs::LocalSlice { region: region.clone(), offset: 0, len: remote.len };
    let request = towline_verbs::WorkRequest { id, opcode, local: vec![local], remote: Some(remote) };
    // SAFETY: nobody touches the region's memory before the request's completion has been polled; it was made for it.
    unsafe { queue_pair.post_send(vec![request]) }
}

/// Raises how many descriptors this process may have to `most`, or as far as it may be raised; gives the number that it is.
pub fn raise_descriptors(most: u64) -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a valid place for the result.
    let status = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    assert_eq!(status, 0, "getrlimit: {}", std::io::Error::last_os_error());
    if limit.rlim_cur < most {
        limit.rlim_cur = most.min(limit.rlim_max);
        // SAFETY: `limit` is valid for reads; nothing else is touched.
        let status = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
        assert_eq!(status, 0, "setrlimit: {}", std::io::Error::last_os_error());
    }
    limit.rlim_cur
}

/// Sets how many descriptors this process may have; gives the number before.
pub fn limit_descriptors(most: u64) -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a valid place for the result.
    let status = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    assert_eq!(status, 0, "getrlimit: {}", std::io::Error::last_os_error());
    let before = std::mem::replace(&mut limit.rlim_cur, most);
    // SAFETY: `limit` is valid for reads; nothing else is touched.
    let status = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    assert_eq!(status, 0, "setrlimit: {}", std::io::Error::last_os_error());
    before
}

/// A part of a view as a plain slice.
pub fn view_slice<'a>(part: &towline::ViewPart<'a>) -> &'a [u8] {
    // SAFETY: its producer is an endpoint of ours, which keeps to the rules.
    unsafe { part.as_slice() }
}
