//! libibverbs, found at run time: its types, its functions through `dlopen`, its `static inline` verbs written anew.
//!
//! Building this crate needs Rust and nothing else: no header, no C compiler, no library to link with. A program that
//! uses it starts on any machine, and [`Library::load`] says what is there:
//!
//! | this machine has | answer |
//! |---|---|
//! | no `libibverbs.so.1` | [`Unavailable::NoLibrary`] |
//! | the library, and a kernel without RDMA (`ib_uverbs`) | [`Unavailable::NoKernelSupport`], from [`Library::devices`] |
//! | both, and no device | [`Unavailable::NoDevice`], from [`Library::devices`] |
//! | a library too old to be of use | [`Unavailable::MissingSymbol`] |
//!
//! ```
//! use rdma_core_sys::{Library, Unavailable};
//!
//! match Library::load().and_then(|library| library.devices().map(|list| list.len())) {
//!     Ok(devices) => println!("{devices} devices"),
//!     Err(Unavailable::NoDevice) => println!("ready, but nothing is plugged in"),
//!     Err(reason) => println!("no RDMA here: {reason}"),
//! }
//! ```
//!
//! # What is here
//!
//! - C types and constants under their C names, from the public header `infiniband/verbs.h`: what reliable connections,
//!   shared receive queues, memory regions and windows need, in the form that all versions from rdma-core 24 (2019) on
//!   agree on. Enumerations are integers, since a newer library may return a value that no header knew.
//! - [`Library`]: the exported functions, each with the symbol version that it was declared for. Those that every
//!   distribution has are required, later ones optional ([`Error::NoSymbol`] where missing).
//! - The verbs that C has as `static inline` functions: [`ibv_post_send`], [`ibv_poll_cq`] and others that go through the
//!   device's own table, and the extended ones ([`Library::ibv_query_port`], [`Library::ibv_create_qp_ex`]) that go
//!   through a table whose size has to be looked at first.
//!
//! The library reports errors in five ways; all of them come back as [`Error`]. Nothing else is changed: pointers are raw,
//! every verb is `unsafe`, and the order of teardown is the caller's affair. `towline-verbs` is the safe layer.
//!
//! # What is not here
//!
//! Datagrams beyond address handles, multicast, flow steering, work queues, device memory, counters, extended reliable
//! connections, `librdmacm`, and what is specific to one vendor.
//!
//! # Why not an existing package
//!
//! The published package `rdma-core-sys` can't be compiled by any current compiler: it uses language features that were
//! removed, and builds a vendored rdma-core 18 for musl with shell scripts. Others need cmake, libclang and libnl to
//! build, bind to the headers of the build machine, or compile a C shim into every program. Hence the name
//! `towline-rdma-core-sys`, to be imported under the shorter one.
//!
//! # How it is proved
//!
//! A test lists every declared size, offset, field type, constant and function signature from the Rust side, compiles the
//! same list against the installed headers, and compares. What headers can't show, in-process tables of fakes and runs on
//! a device do.
#![allow(unsafe_code, reason = "this crate is the foreign function interface")]
#![allow(non_camel_case_types, non_snake_case, reason = "C names")]

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("towline-rdma-core-sys supports 64-bit Linux only");

#[macro_use]
mod declare;

mod completion;
mod context;
mod device;
mod discovery;
mod error;
mod extended;
mod inline;
mod library;
mod memory;
mod plain;
mod queue_pair;
#[cfg(test)]
mod tests;

pub use completion::*;
pub use context::*;
pub use device::*;
pub use discovery::{DeviceList, Unavailable};
pub use error::Error;
pub use inline::*;
pub use library::Library;
pub use memory::*;
pub use plain::{Plain, Unused, zeroed};
pub use queue_pair::*;
