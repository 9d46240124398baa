//! The bench's other process: this program once more, which takes its orders from a socket that is its standard
//! input. Its standard output is memory that both share: nothing else has to be passed.

use super::message::{Channel, Stream};
use crate::command::Failure;
use crate::command::sys;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

/// The word that makes this program a worker.
pub(crate) const WORKER: &str = "bench-worker";

/// A running worker; killed and reaped when dropped.
#[derive(Debug)]
pub(crate) struct Worker {
    child: Child,
}

impl Worker {
    /// Starts a worker that shares `memory`. It dies with the thread that calls this.
    pub(crate) fn start(name: &str, memory: &OwnedFd) -> Result<(Self, Channel), Failure> {
        let failed = |e: io::Error| Failure::failed(format!("starting {name}"), e);
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        command.arg(WORKER);
        command.stdin(OwnedFd::from(theirs)).stdout(memory.try_clone().map_err(failed)?).stderr(Stdio::inherit());
        let child = command.spawn().map_err(failed)?;
        Ok((Self { child }, Channel::new(Stream::Unix(ours), name, None)?))
    }

    /// Waits for the worker's end; its channel must have been dropped.
    pub(crate) fn join(mut self) -> Result<(), Failure> {
        let status = self.child.wait().map_err(|e| Failure::failed("waiting for the second process", e))?;
        if status.success() { Ok(()) } else { Err(Failure::failed("the second process", status)) }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Both fail only where there is nothing left to do: the worker has ended and was reaped by `join`.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The two ends that a worker was started with.
///
/// # Errors
/// [`Failure::Refused`] when this process wasn't started by [`Worker::start`].
pub(crate) fn inherited() -> Result<(Channel, OwnedFd), Failure> {
    let refused = |e: io::Error| Failure::Refused(format!("{WORKER} is started by `towline bench` only: {e}"));
    sys::die_with_parent().map_err(|e| Failure::failed("prctl(PR_SET_PDEATHSIG)", e))?;
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned().map_err(refused)?);
    socket.peer_addr().map_err(refused)?;
    let memory = io::stdout().as_fd().try_clone_to_owned().map_err(refused)?;
    Ok((Channel::new(Stream::Unix(socket), "the bench", None)?, memory))
}
