//! The libibverbs provider on real devices: each test is ignored where there is none, and is run in a guest with soft-RoCE
//! devices by `tests/rxe/run`. `TOWLINE_DEVICES` names two devices, `rxe0,rxe1` if it is not set, whose ports reach each
//! other.
#![allow(unsafe_code, clippy::unwrap_used)]

mod ending;
mod examples;
mod harness;
mod objects;
mod probe;
mod refusals;
mod regions;
mod transfers;
mod weather;
mod windows;
