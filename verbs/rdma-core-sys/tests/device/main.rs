//! The verbs on a real device: each test is ignored where there is none, and is run in a guest with soft-RoCE devices by
//! `tests/rxe/run`. `TOWLINE_DEVICES` names two devices, `rxe0,rxe1` if it is not set, whose ports reach each other.
#![allow(unsafe_code, reason = "verbs are foreign functions")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that meets the unexpected ends")]

mod bed;
mod extended;
mod failures;
mod objects;
mod transfers;
