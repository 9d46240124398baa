//! From building to closing: removal, expiry, leases, closing with operations in flight, forks, and that nothing is left.

#![allow(clippy::unwrap_used)] // also in the helpers of tests

#[path = "../common/mod.rs"]
mod common;

mod closing;
mod cycles;
mod expiry;
mod forks;
mod removal;

use common::*;
use std::time::Duration;

/// A consumer that has a lease and waits for room: a get in progress that goes no further until its pool is free.
struct Stalled {
    consumer: towline::Endpoint,
    room: Option<towline::Buffer>,
}

impl Stalled {
    fn new(way: Way, lease: Duration) -> Self {
        let consumer = way.options().pool(MIB).lease(lease).build().unwrap();
        let room = consumer.alloc(MIB as usize).unwrap();
        Self { consumer, room: Some(room) }
    }

    /// Lets it go on.
    fn free(&mut self) {
        self.room = None;
    }
}

const LEASE: Duration = Duration::from_secs(30);
const TWO: [Way; 2] = [Way::Direct, Way::Tcp];
