//! How a queue pair sends: the chooser's decisions carried out, and what it is told in return.

use super::chooser::{Chooser, Setting};
use super::queue_pair::Core;
use super::stream::Stream;
use super::{congestion, lock};
use core::net::IpAddr;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::Mutex;
use std::time::Instant;

/// What is in force, and who decides.
#[derive(Debug)]
pub(super) struct Pace {
    /// The streams that new messages go over, a bit for each.
    carriers: AtomicU32,
    /// Most bytes of data to give to a socket in one call.
    write: AtomicUsize,
    began: Instant,
    /// From the moment that all streams are there.
    chooser: Mutex<Option<(Chooser, IpAddr)>>,
}

impl Pace {
    pub(super) fn new() -> Self {
        Self {
            carriers: AtomicU32::new(1),
            write: AtomicUsize::new(1 << 20),
            began: Instant::now(),
            chooser: Mutex::new(None),
        }
    }
}

impl Core {
    /// Whether `stream` is one that new messages go over.
    pub(super) fn carries(&self, stream: &Stream) -> bool {
        self.carriers() & 1 << self.index_of(stream) != 0
    }

    pub(super) fn carriers(&self) -> u32 {
        self.pace.carriers.load(Ordering::SeqCst)
    }

    pub(super) fn write_size(&self) -> usize {
        self.pace.write.load(Ordering::Relaxed)
    }

    /// How it sends now, and whether that has been found best; `None` before it is connected.
    pub(super) fn setting(&self) -> Option<(Setting, bool)> {
        lock(&self.pace.chooser).as_ref().map(|(chooser, _)| (chooser.setting(), chooser.settled().is_some()))
    }

    /// Begins to choose: all streams are there.
    pub(super) fn start_choosing(&self) {
        let Some(socket) = self.streams().first().and_then(Stream::socket) else { return };
        let Ok(peer) = socket.tcp.peer_addr() else { return };
        let within_host = peer.ip().is_loopback() || socket.tcp.local_addr().is_ok_and(|own| own.ip() == peer.ip());
        let known = self.device.known(peer.ip());
        let chooser = Chooser::new(congestion::choices(self.streams().len() as u8, within_host), known);
        let setting = chooser.setting();
        *lock(&self.pace.chooser) = Some((chooser, peer.ip()));
        self.apply(setting);
    }

    /// There is nothing to send.
    pub(super) fn rests(&self) {
        if let Some((chooser, _)) = &mut *lock(&self.pace.chooser) {
            chooser.rests(self.pace.began.elapsed());
        }
    }

    /// A socket has taken `bytes` of data.
    pub(super) fn sent(&self, bytes: usize) {
        let mut locked = lock(&self.pace.chooser);
        let Some((chooser, peer)) = &mut *locked else { return };
        let (before, was_settled) = (chooser.setting(), chooser.settled().is_some());
        chooser.sent(self.pace.began.elapsed(), bytes as u64);
        let (after, settled, peer) = (chooser.setting(), chooser.settled(), *peer);
        // Still under the lock: two changes are carried out in their order.
        if after != before {
            self.apply(after);
        }
        drop(locked);
        if let (Some(best), false) = (settled, was_settled) {
            self.device.learn(peer, best);
        }
    }

    fn apply(&self, setting: Setting) {
        let all = self.streams().len() as u8;
        let carriers = congestion::carriers(setting.control, setting.streams, all);
        for (at, stream) in self.streams().iter().enumerate() {
            if carriers & 1 << at != 0 {
                stream.set_control(setting.control);
            }
        }
        self.pace.write.store(setting.write, Ordering::Relaxed);
        self.pace.carriers.store(carriers, Ordering::SeqCst);
    }
}
