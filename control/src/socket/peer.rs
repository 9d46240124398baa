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

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn the_way_of_older_kernels_finds_the_same_process() {
        let open = sys::pidfd_open(std::process::id() as libc::pid_t);
        let process = PeerProcess { pid: 0, uid: 0, gid: 0, pidfd: open.unwrap() };
        assert!(!process.has_ended().unwrap());
        let (end, _other) = UnixStream::pair().unwrap();
        let peer = PeerProcess::of(end.as_fd()).unwrap();
        assert_eq!(peer.pid(), std::process::id());
        let pid_of = |process: &PeerProcess| {
            use std::os::fd::AsRawFd;
            let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", process.pidfd.as_raw_fd())).unwrap();
            info.lines().find_map(|line| line.strip_prefix("Pid:")).unwrap().trim().to_owned()
        };
        assert_eq!(pid_of(&process), pid_of(&peer));
    }

    #[test]
    fn a_process_that_is_gone_is_an_error() {
        let mut child = std::process::Command::new("/proc/self/exe")
            .arg("--list")
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let pid = child.id() as libc::pid_t;
        child.wait().unwrap();
        assert_eq!(sys::pidfd_open(pid).unwrap_err().raw_os_error(), Some(libc::ESRCH));
    }
}
