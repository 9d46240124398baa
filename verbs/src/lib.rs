//! Devices, protection domains, memory regions, completion queues and queue pairs: the objects of RDMA verbs, over
//! whatever this machine has.
//!
//! A [`Provider`] offers [`Device`]s of one kind: shared memory ([`shm`]), TCP ([`tcp`]), InfiniBand and RoCE ([`ibv`])
//! or, with the feature `sim`, a simulated network. All give the same five objects with the same rules, those of the verbs
//! specification:
//!
//! - work requests of one queue pair are started in the order posted, and each ends in exactly one [`Completion`];
//! - a queue pair in the error state flushes: every request not yet done completes with
//!   [`CompletionStatus::Flushed`], and after that completion the provider touches its memory no more (the fence of
//!   I3);
//! - a completed read has its bytes in local memory; a completed write has been *delivered* into remote memory;
//! - remote access is checked by the owner of the memory: key, bounds and [`Access`] flags.
//!
//! What this crate does not do: it knows no payload, lease, peer or retry (the crate `towline` does), opens no control
//! connection (`towline-control` does), and keeps no thread but the copy helpers of [`shm`], whose number is fixed.
//!
//! Handles are owned and counted: a queue pair keeps its protection domain, completion queues and device alive, and a
//! posted request keeps its memory regions alive, so that teardown happens in the only legal order by construction.

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("towline-verbs supports 64-bit Linux only: it is built on memfd, epoll and process descriptors");

pub mod backend;
mod completion_queue;
pub mod copy;
mod device;
mod error;
pub mod ibv;
pub mod memory;
mod memory_region;
mod protection_domain;
mod queue_pair;
pub mod shm;
#[cfg(feature = "sim")]
pub mod sim;
pub mod tcp;
mod work;

pub use backend::Provider;
pub use completion_queue::CompletionQueue;
pub use device::{Capabilities, Device, DeviceInfo, Progress, ProviderKind, Token};
pub use error::{Cause, Error, QueuePairState, Result};
pub use memory::{Memory, MemoryKind};
pub use memory_region::{Access, MemoryRegion, MemoryWindow, RemoteSlice};
pub use protection_domain::ProtectionDomain;
pub use queue_pair::{MappedView, QueuePair, QueuePairCapacity};
pub use work::{Completion, CompletionStatus, LocalSlice, Opcode, ReceiveRequest, WorkRequest};
