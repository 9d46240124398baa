//! The control connection between two towline endpoints: its bytes and its sessions.
//!
//! - [`preface`]: the first bytes on any connection to an endpoint's port, which say what it is for.
//! - [`wire`]: the frames and their checked, bounded, little-endian form.
//! - [`session`]: the machine that both ends run: no socket, no clock, no thread. With a shared secret (feature `noise`)
//!   it authenticates and encrypts.
//! - [`address`]: network addresses as text and as bytes.
//! - [`socket`]: non-blocking TCP and Unix sockets for a readiness loop; [`exchange`]: a session over one of them, for a
//!   caller who waits.
//!
//! **Guaranteed:** no bytes from a peer panic, allocate without bound or are taken for other than what they say; every
//! failed handshake ends as a typed error on both ends; no secret, token or remote key is printed. **Not guaranteed:**
//! that a peer answers (deadlines are the driver's), and that what a frame names exists (keys, layouts and addresses of
//! queue pairs are opaque bytes here). This crate knows no verbs object, payload or tensor, and none of towline's other
//! crates.
//!
//! ```
//! use towline_control::preface::Preface;
//! use towline_control::session::{Event, Identity, Session, SessionConfig};
//! use towline_control::wire::{AddressList, Frame, Get, GetFlags, Target};
//!
//! let identity = |name: u8| Identity {
//!     incarnation: [name; 16],
//!     boot_id: [0; 16],
//!     process: [name; 16],
//!     unix_name: Vec::new(),
//!     advertised: AddressList::new(),
//!     features: 0,
//! };
//! let mut consumer = Session::initiator(SessionConfig::new(identity(1)))?;
//! let get = Get {
//!     request: 1,
//!     target: Target::Key(b"layer/0"),
//!     wait_us: 1_000_000,
//!     sent_at: 42,
//!     max_eager: 4096,
//!     flags: GetFlags::empty(),
//!     provider: 1,
//! };
//! consumer.send(&Frame::Get(get))?;
//!
//! // The producer's driver reads the preface, and gives all that follows to a session.
//! let (preface, rest) = consumer.output().split_first_chunk::<{ Preface::LEN }>().ok_or("no preface")?;
//! let mut producer = Session::responder(SessionConfig::new(identity(2)), &Preface::decode(preface)?)?;
//! producer.receive(rest)?;
//! assert!(matches!(producer.next_event()?, Some(Event::Established(peer)) if peer.hello.incarnation == [1; 16]));
//! assert_eq!(producer.next_event()?, Some(Event::Frame(Frame::Get(get))));
//! assert_eq!(producer.next_event()?, None);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("towline-control runs on 64-bit Linux only");

pub mod address;
pub mod exchange;
#[doc(hidden)]
pub mod fuzzing;
pub mod preface;
pub mod session;
pub mod socket;
pub mod wire;
