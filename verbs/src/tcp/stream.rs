//! One stream of a queue pair: its socket, who works on it, and what it waits for.

use super::congestion::{self, Control};
use super::receive::Receiver;
use super::sys::Epoll;
use super::transmit::Transmitter;
use super::{lock, sys};
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};

/// Always of interest: that the peer is gone. (Errors and hang-ups are reported anyway.)
const ALWAYS: i32 = libc::EPOLLRDHUP | libc::EPOLLONESHOT;

/// One stream.
#[derive(Debug)]
pub(super) struct Stream {
    /// As the epoll reports it.
    key: u64,
    socket: Mutex<Option<Socket>>,
    pub(super) receiver: Turn<Receiver>,
    pub(super) transmitter: Turn<Transmitter>,
    /// Whether somebody has to read when there is something.
    pub(super) wants_in: AtomicBool,
    /// Whether there is something to write that did not fit.
    pub(super) wants_out: AtomicBool,
    /// Whether the next message in it can't be dealt with yet; nothing is read meanwhile.
    pub(super) stalled: AtomicBool,
    /// The number by which the peer's hello called it. At the passive end streams come in any order.
    pub(super) called: AtomicU8,
    /// What the epoll reports, once; `None` after it has.
    armed: Mutex<Option<i32>>,
    control: Mutex<Control>,
    /// How many bytes make the socket readable, and of which attempt to connect this is true.
    low_water: Mutex<(u32, u32)>,
}

/// The socket of a stream; a dial that failed is followed by another to the next address.
#[derive(Debug, Clone)]
pub(super) struct Socket {
    pub(super) tcp: Arc<TcpStream>,
    /// Counts the sockets of this stream, from 1 on.
    pub(super) attempt: u32,
}

impl Stream {
    pub(super) fn new(key: u64) -> Self {
        Self {
            key,
            socket: Mutex::new(None),
            receiver: Turn::new(Receiver::new()),
            transmitter: Turn::new(Transmitter::new()),
            wants_in: AtomicBool::new(false),
            wants_out: AtomicBool::new(false),
            stalled: AtomicBool::new(false),
            called: AtomicU8::new(0),
            armed: Mutex::new(None),
            control: Mutex::new(congestion::first()),
            low_water: Mutex::new((0, 1)),
        }
    }

    /// The socket, to be held no longer than the queue pair's gate.
    pub(super) fn socket(&self) -> Option<Socket> {
        lock(&self.socket).clone()
    }

    /// Which attempt to connect this is.
    pub(super) fn attempt(&self) -> u32 {
        lock(&self.socket).as_ref().map_or(0, |socket| socket.attempt)
    }

    /// Takes a socket into use.
    pub(super) fn open(&self, socket: TcpStream, epoll: &Epoll, interest: i32) -> std::io::Result<()> {
        let tcp = Arc::new(socket);
        let mut armed = lock(&self.armed);
        let mut current = lock(&self.socket);
        let attempt = current.as_ref().map_or(0, |before| before.attempt) + 1;
        let before = current.replace(Socket { tcp: tcp.clone(), attempt });
        drop(current);
        *armed = Some(interest);
        let added = epoll.add(tcp.as_fd(), self.key, interest | ALWAYS);
        drop(before);
        added
    }

    /// Gives it a congestion control, if it doesn't have it.
    pub(super) fn set_control(&self, control: Control) {
        let mut current = lock(&self.control);
        if let (true, Some(socket)) = (*current != control, self.socket()) {
            // It was asked before whether the system allows it; if not now, the stream stays as it is.
            let _refused = sys::set_congestion_control(socket.tcp.as_fd(), control.name());
            *current = control;
        }
    }

    /// Has the socket be readable once `bytes` are there (or its end is).
    pub(super) fn set_low_water(&self, bytes: u32) {
        let Some(socket) = self.socket() else { return };
        let mut current = lock(&self.low_water);
        if current.0 != socket.attempt {
            *current = (socket.attempt, 1);
        }
        if current.1 != bytes && sys::set_low_water(socket.tcp.as_fd(), bytes).is_ok() {
            current.1 = bytes;
        }
    }

    /// Closes it, once nobody is using it any more.
    pub(super) fn close(&self) {
        drop(lock(&self.socket).take());
    }

    /// Notes that the epoll has reported and does so no more.
    pub(super) fn disarm(&self) {
        *lock(&self.armed) = None;
    }

    /// Has the epoll report what is wanted now. Whoever sets a want calls this afterwards; under its lock the newest
    /// wants win.
    pub(super) fn arm(&self, epoll: &Epoll) -> std::io::Result<()> {
        let Some(socket) = self.socket() else { return Ok(()) };
        let mut armed = lock(&self.armed);
        let input = if self.wants_in.load(Ordering::SeqCst) { libc::EPOLLIN } else { 0 };
        let output = if self.wants_out.load(Ordering::SeqCst) { libc::EPOLLOUT } else { 0 };
        let wanted = input | output;
        if armed.is_some_and(|armed| armed & wanted == wanted) {
            return Ok(());
        }
        epoll.modify(socket.tcp.as_fd(), self.key, wanted | ALWAYS)?;
        *armed = Some(wanted);
        Ok(())
    }
}

/// Something that one thread at a time works on, without waiting: a thread that finds another at work leaves, and the one
/// at work goes round once more.
#[derive(Debug)]
pub(super) struct Turn<T> {
    /// Calls since the thread at work came; 0 when nobody is.
    calls: AtomicU32,
    inner: Mutex<T>,
}

impl<T> Turn<T> {
    pub(super) fn new(inner: T) -> Self {
        Self { calls: AtomicU32::new(0), inner: Mutex::new(inner) }
    }

    /// Has `work` done at least once after this call began, here or by the thread that is at it.
    pub(super) fn run(&self, mut work: impl FnMut(&mut T)) {
        if self.calls.fetch_add(1, Ordering::SeqCst) != 0 {
            return;
        }
        let mut inner = lock(&self.inner);
        loop {
            let seen = self.calls.load(Ordering::SeqCst);
            work(&mut inner);
            if self.calls.compare_exchange(seen, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
                return;
            }
        }
    }

    /// The thing itself, when nobody can be at work.
    pub(super) fn alone(&self) -> std::sync::MutexGuard<'_, T> {
        lock(&self.inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_call_is_followed_by_work_and_nobody_works_twice_at_once() {
        let turn = Turn::new(0u64);
        let (posted, done, inside) = (AtomicU32::new(0), AtomicU32::new(0), AtomicU32::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        posted.fetch_add(1, Ordering::SeqCst);
                        turn.run(|runs| {
                            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                            done.store(posted.load(Ordering::SeqCst), Ordering::SeqCst);
                            *runs += 1;
                            inside.fetch_sub(1, Ordering::SeqCst);
                        });
                    }
                });
            }
        });
        assert_eq!(done.load(Ordering::SeqCst), 80_000);
        assert!(*turn.alone() <= 80_000);
    }
}
