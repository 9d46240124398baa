//! The process at the other end of a Unix socket.

use super::{Readiness, SocketError, sys};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// A peer process, as the kernel knows it.
///
/// It is the process that connected, or that began to listen; if it has handed the socket on, that is not seen.
#[derive(Debug)]
pub struct PeerProcess {
    pid: u32,
    uid: u32,
    gid: u32,
    pidfd: OwnedFd,
}

impl PeerProcess {
    pub(super) fn of(socket: BorrowedFd<'_>) -> Result<Self, SocketError> {
        let credentials = sys::peer_credentials(socket).map_err(|error| SocketError::new("SO_PEERCRED", error))?;
        let pidfd = match sys::peer_pidfd(socket) {
            // Linux before 6.5 does not have it. By the number another process could be meant, if the peer has ended
            // and its number was given anew in between: then the credentials above were of the one, and the end that is
            // watched is of the other.
            Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => {
                sys::pidfd_open(credentials.pid).map_err(|error| SocketError::new("pidfd_open", error))?
            }
            pidfd => pidfd.map_err(|error| SocketError::new("SO_PEERPIDFD", error))?,
        };
        // A process outside this one's pid namespace has number 0, and is never negative.
        let pid = credentials.pid.unsigned_abs();
        Ok(Self { pid, uid: credentials.uid, gid: credentials.gid, pidfd })
    }

    /// Its number in this process's pid namespace; 0 if it has none there.
    #[must_use]
    pub const fn pid(&self) -> u32 {
        self.pid
    }

    /// The user it ran as when it connected or began to listen.
    #[must_use]
    pub const fn uid(&self) -> u32 {
        self.uid
    }

    /// The group it ran as then.
    #[must_use]
    pub const fn gid(&self) -> u32 {
        self.gid
    }

    /// Whether it has ended. Its [descriptor](Self::as_fd) becomes readable when it does.
    ///
    /// # Errors
    /// [`SocketError`] with what the system said.
    pub fn has_ended(&self) -> Result<bool, SocketError> {
        sys::wait(self.pidfd.as_fd(), Readiness::Read, Some(Duration::ZERO))
            .map_err(|error| SocketError::new("poll", error))
    }
}

impl AsFd for PeerProcess {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}
