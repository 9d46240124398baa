//! The library's objects as owned handles: each holds what it depends on, and is destroyed once, in the process that made
//! it. The calls themselves are safe but where memory or work requests go through them.
//!
//! A library that refuses to destroy an object (a device that is gone can do that) leaves it to the kernel, which has the
//! pages of a region pinned until the process ends. Only for a queue pair is that not enough, and [`Pair::destroy`] tells.
//!
//! All of them may be used by any thread at any time: libibverbs and its providers lock for themselves (`verbs(7)`).
#![allow(unsafe_code)]

mod context;
mod memory;
mod pair;
mod post;
mod queue;
mod system;

pub(super) use context::Context;
pub(super) use memory::{Domain, Region, Window};
pub(super) use pair::Pair;
pub(super) use post::{Chain, Request};
pub(super) use queue::{Channel, Queue};
pub(super) use system::{Any, Bell, gid_bytes, memlock_limit, random_24, random_64};
