//! The TCP provider over loopback: two devices in one process, and two processes.
#![allow(unsafe_code, clippy::unwrap_used)]

mod connecting;
mod ending;
mod harness;
mod hostile;
mod lending;
mod processes;
mod refusals;
mod transfers;
