//! Endpoints over RDMA, in processes of their own: each test is ignored where there is no device, and is run in a guest with
//! soft-RoCE devices by `tests/rxe/run`; those of `long`, which take minutes, by `tests/rxe/run --full` alone.
//! `TOWLINE_DEVICES` names two devices, `rxe0,rxe1` if it is not set, whose ports reach each other; `TOWLINE_RAILS` two more of
//! a second network, `rxe2,rxe3`.
#![allow(clippy::unwrap_used)] // also in the helpers of tests

#[path = "../common/mod.rs"]
mod common;

mod bed;
mod choice;
mod ending;
mod limits;
mod long;
mod transfers;
mod weather;
