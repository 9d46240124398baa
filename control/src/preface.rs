//! The first bytes on any connection to an endpoint's port: what the connection is for.
//!
//! One port serves control and data connections. Whoever connects sends a [`Preface`] before anything else; whoever
//! accepts reads exactly [`Preface::LEN`] bytes and decides. A data connection carries the one-time token that the
//! control connection handed out, and what follows its preface is the data provider's own business.

use core::fmt;
use static_assertions::const_assert_eq;
use zerocopy::little_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// What a connection says first.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Preface {
    /// What the connection is for.
    pub purpose: Purpose,
}

/// What a connection is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// A control session in clear: frames follow.
    Control,
    /// A control session under Noise with a shared secret: a handshake follows.
    ControlNoise,
    /// A data connection of a queue pair that the control session bound to this one-time token.
    Data {
        /// The token.
        token: [u8; 16],
    },
}

/// The version of the preface and of the framing behind it. What the frames say is negotiated in their Hello.
pub const PREFACE_VERSION: u16 = 1;

const MAGIC: [u8; 8] = *b"\x89towline";
const CONTROL: u8 = 1;
const CONTROL_NOISE: u8 = 2;
const DATA: u8 = 3;

/// Magic and version keep their place in every later version, so that an old end can always say what it speaks.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Raw {
    magic: [u8; 8],
    version: U16,
    purpose: u8,
    reserved: [u8; 5],
    token: [u8; 16],
}
const_assert_eq!(size_of::<Raw>(), Preface::LEN);

impl Preface {
    /// Bytes of an encoded preface.
    pub const LEN: usize = 32;

    /// The preface of a connection for `purpose`.
    #[must_use]
    pub const fn new(purpose: Purpose) -> Self {
        Self { purpose }
    }

    /// Its bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::LEN] {
        let (purpose, token) = match self.purpose {
            Purpose::Control => (CONTROL, [0; 16]),
            Purpose::ControlNoise => (CONTROL_NOISE, [0; 16]),
            Purpose::Data { token } => (DATA, token),
        };
        zerocopy::transmute!(Raw { magic: MAGIC, version: PREFACE_VERSION.into(), purpose, reserved: [0; 5], token })
    }

    /// Reads a preface.
    ///
    /// # Errors
    /// [`PrefaceError`]. On [`PrefaceError::Version`] the acceptor answers with a
    /// [`Reject`](crate::wire::Reject) of code `Version`; on any other error it closes, since the peer is not one of
    /// ours.
    pub fn decode(bytes: &[u8; Self::LEN]) -> Result<Self, PrefaceError> {
        let raw: &Raw = zerocopy::transmute_ref!(bytes);
        if raw.magic != MAGIC {
            return Err(PrefaceError::Magic);
        }
        if raw.version.get() != PREFACE_VERSION {
            return Err(PrefaceError::Version { theirs: raw.version.get() });
        }
        if raw.reserved != [0; 5] {
            return Err(PrefaceError::Reserved);
        }
        let purpose = match raw.purpose {
            CONTROL => Purpose::Control,
            CONTROL_NOISE => Purpose::ControlNoise,
            DATA => return Ok(Self::new(Purpose::Data { token: raw.token })),
            found => return Err(PrefaceError::Purpose { found }),
        };
        if raw.token != [0; 16] {
            return Err(PrefaceError::Reserved);
        }
        Ok(Self::new(purpose))
    }
}

impl fmt::Debug for Preface {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Preface").field(&self.purpose).finish()
    }
}

impl fmt::Debug for Purpose {
    /// A token opens a data connection, so it is not printed (I14).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Control => "Control",
            Self::ControlNoise => "ControlNoise",
            Self::Data { .. } => "Data { token: <redacted> }",
        })
    }
}

/// Why bytes are no preface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PrefaceError {
    /// They do not begin as a preface does: the peer speaks something else.
    Magic,
    /// A version that this end does not speak; it speaks [`PREFACE_VERSION`].
    Version {
        /// The peer's version.
        theirs: u16,
    },
    /// A purpose that this version does not know.
    Purpose {
        /// Its number.
        found: u8,
    },
    /// Bytes that must be zero are not.
    Reserved,
}

impl fmt::Display for PrefaceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Magic => f.write_str("preface: the peer does not speak towline's protocol"),
            Self::Version { theirs } => {
                write!(f, "preface: the peer speaks version {theirs}, this end speaks version {PREFACE_VERSION}")
            }
            Self::Purpose { found } => write!(f, "preface: unknown purpose {found}"),
            Self::Reserved => f.write_str("preface: reserved bytes are not zero"),
        }
    }
}

impl std::error::Error for PrefaceError {}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Purpose; 3] = [Purpose::Control, Purpose::ControlNoise, Purpose::Data { token: *b"0123456789abcdef" }];

    #[test]
    fn every_purpose_survives_the_wire() {
        for purpose in ALL {
            let preface = Preface::new(purpose);
            assert_eq!(Preface::decode(&preface.encode()), Ok(preface));
        }
    }

    #[test]
    fn a_flipped_bit_outside_the_token_never_reads_as_the_same_preface() {
        for purpose in ALL {
            let preface = Preface::new(purpose);
            for bit in 0..Preface::LEN * 8 {
                let mut bytes = preface.encode();
                bytes[bit / 8] ^= 1 << (bit % 8);
                assert_ne!(Preface::decode(&bytes), Ok(preface), "bit {bit}");
            }
        }
    }

    #[test]
    fn each_fault_has_its_own_error() {
        let good = Preface::new(Purpose::Control).encode();
        let with = |at: usize, byte: u8| {
            let mut bytes = good;
            bytes[at] = byte;
            Preface::decode(&bytes)
        };
        assert_eq!(with(0, b'G'), Err(PrefaceError::Magic));
        assert_eq!(with(8, 9), Err(PrefaceError::Version { theirs: 9 }));
        assert_eq!(with(10, 200), Err(PrefaceError::Purpose { found: 200 }));
        assert_eq!(with(11, 1), Err(PrefaceError::Reserved));
        assert_eq!(with(31, 1), Err(PrefaceError::Reserved), "a control connection has no token");
    }

    #[test]
    fn a_token_is_not_printed() {
        let text = format!("{:?}", Preface::new(Purpose::Data { token: [0xAB; 16] }));
        assert!(text.contains("redacted") && !text.contains("171") && !text.to_lowercase().contains("ab,"), "{text}");
    }
}
