//! The secret that the ends of a session share.

use core::fmt;
use core::str::FromStr;

/// A secret of at least [`Secret::MIN_LEN`] bytes. It is never printed and never sent; a session proves that its peer
/// has the same one.
#[derive(Clone)]
#[cfg_attr(not(feature = "noise"), expect(dead_code, reason = "only Noise reads it; without, a session says NoNoise"))]
pub struct Secret(Box<[u8]>);

impl Secret {
    /// Fewest bytes of a secret. They should be random ones: whoever records a handshake can try guesses against it for
    /// as long as it likes.
    pub const MIN_LEN: usize = 16;

    /// Most bytes of a secret.
    pub const MAX_LEN: usize = 1024;

    /// A secret of these bytes.
    ///
    /// # Errors
    /// [`SecretError`] if there are too few or too many.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, SecretError> {
        let len = bytes.len();
        if !(Self::MIN_LEN..=Self::MAX_LEN).contains(&len) {
            return Err(SecretError { len });
        }
        Ok(Self(bytes.into()))
    }

    #[cfg(feature = "noise")]
    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl FromStr for Secret {
    type Err = SecretError;

    /// The bytes of the text without white space at its ends, so that a line of a file is the same secret as the text.
    fn from_str(text: &str) -> Result<Self, SecretError> {
        Self::from_bytes(text.trim().as_bytes())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(<redacted>)")
    }
}

/// A secret is too short or too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SecretError {
    /// Its length in bytes.
    pub len: usize,
}

impl fmt::Display for SecretError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "secret: {} bytes; it needs {} to {}", self.len, Secret::MIN_LEN, Secret::MAX_LEN)
    }
}

impl std::error::Error for SecretError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn length_is_checked_at_both_ends() {
        for (len, good) in [(0, false), (15, false), (16, true), (1024, true), (1025, false)] {
            let secret = Secret::from_bytes(&vec![7; len]);
            assert_eq!(secret.map(|_| ()), if good { Ok(()) } else { Err(SecretError { len }) });
        }
        assert!("  0123456789abcde \n".parse::<Secret>().is_err(), "white space does not count");
    }

    #[test]
    fn a_secret_is_not_printed() {
        let secret: Secret = "correct horse battery staple\n".parse().unwrap();
        let text = format!("{secret:?} {secret:#?}");
        assert!(!text.contains("horse") && !text.contains("111"), "{text}");
    }
}
