//! Putting and getting: buffers, parts, keys, tickets, consumers.

#![allow(clippy::unwrap_used)] // also in the helpers of tests

#[path = "../common/mod.rs"]
mod common;

mod buffers;
mod consumers;
mod keys;
mod parts;
