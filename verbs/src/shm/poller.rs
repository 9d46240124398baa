//! The one descriptor that a driver waits on: an epoll instance over the streams of all queue pairs, a flag that threads
//! raise, and a timer for calls that the kernel told to come again.

use super::sys::{self, EpollChange};
use crate::{Error, Result};
use core::sync::atomic::{AtomicBool, Ordering};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

const FLAG: u64 = u64::MAX;
const TIMER: u64 = u64::MAX - 1;

/// Most events taken at once; the others stay ready.
const EVENTS: usize = 32;

#[derive(Debug)]
pub(super) struct Poller {
    epoll: OwnedFd,
    flag: OwnedFd,
    raised: AtomicBool,
    timer: OwnedFd,
}

/// What is ready.
#[derive(Debug, Default)]
pub(super) struct Ready {
    /// Numbers of queue pairs, each with whether its stream is closed or broken.
    pub(super) streams: Vec<(u32, bool)>,
    pub(super) timer: bool,
    /// There may be more than this.
    pub(super) more: bool,
}

impl Poller {
    pub(super) fn new() -> Result<Self> {
        const VERB: &str = "open_device";
        let from = |call| move |e: io::Error| Error::from_io(VERB, call, &e);
        let epoll = sys::epoll().map_err(from("epoll_create1"))?;
        let flag = sys::eventfd().map_err(from("eventfd"))?;
        let timer = sys::timerfd().map_err(from("timerfd_create"))?;
        for (fd, data) in [(&flag, FLAG), (&timer, TIMER)] {
            sys::epoll_set(epoll.as_fd(), EpollChange::Add, fd.as_fd(), libc::EPOLLIN as u32, data)
                .map_err(from("epoll_ctl"))?;
        }
        Ok(Self { epoll, flag, raised: AtomicBool::new(false), timer })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Makes the descriptor readable until [`ready`](Self::ready) is next called. What it is raised for must be visible
    /// before.
    pub(super) fn raise(&self) {
        if !self.raised.swap(true, Ordering::SeqCst) {
            sys::eventfd_raise(self.flag.as_fd());
        }
    }

    /// Lowers the flag and says what else is ready. Whoever calls this looks *afterwards* for whatever flags are raised
    /// for: a thread that raises while we lower does it in vain, but what it did before is seen then.
    pub(super) fn ready(&self) -> Ready {
        if self.raised.load(Ordering::SeqCst) {
            sys::counter_clear(self.flag.as_fd());
            self.raised.store(false, Ordering::SeqCst);
        }
        let mut room = [libc::epoll_event { events: 0, u64: 0 }; EVENTS];
        let mut ready = Ready::default();
        // An error can only be a bad descriptor, which ours are not; nothing is ready then.
        let events = sys::epoll_ready(self.epoll.as_fd(), &mut room).unwrap_or_default();
        ready.more = events.len() == EVENTS;
        for event in events {
            match event.u64 {
                FLAG => {} // raised meanwhile: it stays readable, and the next call lowers it
                TIMER => {
                    sys::counter_clear(self.timer.as_fd());
                    ready.timer = true;
                }
                number => {
                    let closed = event.events & (libc::EPOLLHUP | libc::EPOLLERR) as u32 != 0;
                    ready.streams.push((number as u32, closed));
                }
            }
        }
        ready
    }

    /// Has [`Ready::timer`] set after `delay`.
    pub(super) fn come_again(&self, delay: Duration) -> io::Result<()> {
        sys::timerfd_after(self.timer.as_fd(), delay)
    }

    pub(super) fn watch(
        &self,
        change: EpollChange,
        stream: BorrowedFd<'_>,
        interest: u32,
        number: u32,
    ) -> io::Result<()> {
        sys::epoll_set(self.epoll.as_fd(), change, stream, interest, number.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    fn readable(poller: &Poller) -> bool {
        let mut poll = libc::pollfd { fd: poller.fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one `pollfd`, no waiting.
        #[allow(unsafe_code)]
        let rc = unsafe { libc::poll(&mut poll, 1, 0) };
        rc == 1
    }

    #[test]
    fn a_raised_flag_makes_it_readable_until_looked_at() {
        let poller = Poller::new().unwrap();
        assert!(!readable(&poller));
        poller.raise();
        poller.raise();
        assert!(readable(&poller) && readable(&poller));
        poller.ready();
        assert!(!readable(&poller));
        poller.raise();
        assert!(readable(&poller));
    }

    #[test]
    fn the_timer_comes_once() {
        let poller = Poller::new().unwrap();
        poller.come_again(Duration::from_micros(1)).unwrap();
        let mut poll = libc::pollfd { fd: poller.fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one `pollfd`, at most 5 s.
        #[allow(unsafe_code)]
        let rc = unsafe { libc::poll(&mut poll, 1, 5000) };
        assert_eq!(rc, 1);
        assert!(poller.ready().timer);
        assert!(!readable(&poller) && !poller.ready().timer);
    }
}
