//! The reactor: epoll, and which devices have work. Whoever holds it drives.

use super::net::Readiness;
use crate::sys;
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Registry, Token, Waker};
use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;
use towline_verbs::{Device, Progress};

/// Tokens: the waker, then devices, then whatever the net registers (from [`FIRST_NET`] on).
const WAKER: Token = Token(0);
const FIRST_DEVICE: usize = 1;
/// The first token that belongs to a connection or listener.
pub(super) const FIRST_NET: usize = 64;

#[derive(Debug)]
pub(super) struct Reactor {
    poll: Poll,
    events: Events,
    ready: Vec<bool>,
    net: Vec<(Token, Readiness)>,
}

impl Reactor {
    pub(super) fn new() -> io::Result<(Self, Waker)> {
        let poll = Poll::new()?;
        let waker = Waker::new(poll.registry(), WAKER)?;
        Ok((Self { poll, events: Events::with_capacity(256), ready: Vec::new(), net: Vec::new() }, waker))
    }

    pub(super) fn registry(&self) -> io::Result<Registry> {
        self.poll.registry().try_clone()
    }

    pub(super) fn watch_devices(&mut self, devices: &[Device]) -> io::Result<()> {
        for (index, device) in devices.iter().enumerate() {
            if let Some(fd) = device.event_fd() {
                self.poll.registry().register(
                    &mut SourceFd(&fd.as_raw_fd()),
                    Token(FIRST_DEVICE + index),
                    Interest::READABLE,
                )?;
            }
        }
        self.ready = vec![true; devices.len()];
        Ok(())
    }

    pub(super) fn mark_ready(&mut self, device: usize) {
        if let Some(ready) = self.ready.get_mut(device) {
            *ready = true;
        }
    }

    pub(super) fn any_ready(&self) -> bool {
        self.ready.contains(&true)
    }

    /// Waits for events, and sorts them.
    pub(super) fn poll(&mut self, timeout: Duration) {
        self.net.clear();
        let timeout = self.rest(timeout);
        if self.poll.poll(&mut self.events, Some(timeout)).is_err() {
            return; // interrupted by a signal: the next turn looks again
        }
        for event in &self.events {
            let token = event.token();
            if token == WAKER {
                continue;
            }
            if token.0 < FIRST_NET {
                if let Some(ready) = self.ready.get_mut(token.0 - FIRST_DEVICE) {
                    *ready = true;
                }
                continue;
            }
            let readiness = Readiness {
                readable: event.is_readable() || event.is_read_closed() || event.is_error(),
                writable: event.is_writable() || event.is_write_closed() || event.is_error(),
            };
            self.net.push((token, readiness));
        }
    }

    /// Waits that are shorter than a millisecond, which is the least that `epoll_wait` knows. What is left to wait.
    fn rest(&self, timeout: Duration) -> Duration {
        if timeout.is_zero() || timeout >= Duration::from_millis(1) {
            return timeout;
        }
        sys::wait_readable(self.poll.as_raw_fd(), timeout);
        Duration::ZERO
    }

    pub(super) fn has_net_events(&self) -> bool {
        !self.net.is_empty()
    }

    pub(super) fn dispatch(&mut self, mut handle: impl FnMut(Token, Readiness)) {
        for (token, readiness) in self.net.drain(..) {
            handle(token, readiness);
        }
    }

    /// Gives each device that has work a turn; whether any had.
    pub(super) fn progress(&mut self, devices: &[Device]) -> bool {
        let mut any = false;
        for (device, ready) in devices.iter().zip(&mut self.ready) {
            if *ready {
                any = true;
                *ready = device.progress() == Progress::More;
            }
        }
        any
    }
}
