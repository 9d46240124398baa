//! What one queue pair tells the other so that they can connect: the opaque bytes of
//! [`QueuePair::address`](crate::QueuePair::address).
//!
//! | byte | what |
//! |---|---|
//! | 0 | version, 1 |
//! | 1 | length of the name, 1 to 107 |
//! | 2..6 | number of the queue pair, little-endian |
//! | 6..22 | one-time token |
//! | 22.. | abstract name of the endpoint's Unix socket, without the leading zero |

use crate::{Cause, Error, Result, Token};
use core::fmt;

const VERSION: u8 = 1;
const FIXED: usize = 22;

/// Most bytes of an abstract name: `sun_path` has 108 bytes (unix(7)), and the first is the zero that makes it abstract.
pub(super) const MAX_NAME: usize = 107;

/// Where a queue pair is reached.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) number: u32,
    pub(super) token: Token,
    pub(super) name: Vec<u8>,
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Address({}, @{})", self.number, self.name.escape_ascii()) // the token is a secret (I14)
    }
}

impl Address {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(FIXED + self.name.len());
        bytes.push(VERSION);
        bytes.push(self.name.len() as u8);
        bytes.extend_from_slice(&self.number.to_le_bytes());
        bytes.extend_from_slice(&self.token.0);
        bytes.extend_from_slice(&self.name);
        bytes
    }

    /// Takes nothing but what [`encode`](Self::encode) makes.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self> {
        let malformed = |what| Err(Error::new("modify_qp", Cause::Malformed { what }));
        let Some((fixed, name)) = bytes.split_first_chunk::<FIXED>() else {
            return malformed("address of a queue pair is too short");
        };
        if fixed[0] != VERSION {
            return malformed("address of a queue pair has another version");
        }
        if name.is_empty() || name.len() > MAX_NAME || name.len() != usize::from(fixed[1]) {
            return malformed("address of a queue pair has a name of a wrong length");
        }
        let mut number = [0; 4];
        number.copy_from_slice(&fixed[2..6]);
        let mut token = [0; 16];
        token.copy_from_slice(&fixed[6..FIXED]);
        Ok(Self { number: u32::from_le_bytes(number), token: Token(token), name: name.to_vec() })
    }
}

/// Whether two tokens are the same, in a time that doesn't tell where they differ.
pub(super) fn same_token(a: &Token, b: &Token) -> bool {
    let difference = a.0.iter().zip(&b.0).fold(0, |sum, (x, y)| sum | (x ^ y));
    core::hint::black_box(difference) == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn example() -> Address {
        Address { number: 0x0102_0304, token: Token([9; 16]), name: b"towline/test".to_vec() }
    }

    #[test]
    fn a_shorter_or_longer_one_is_malformed() {
        let bytes = example().encode();
        for len in 0..bytes.len() {
            assert!(matches!(Address::decode(&bytes[..len]).unwrap_err().cause, Cause::Malformed { .. }), "{len}");
        }
        let mut longer = bytes.clone();
        longer.push(0);
        assert!(matches!(Address::decode(&longer).unwrap_err().cause, Cause::Malformed { .. }));
    }

    #[test]
    fn another_version_is_malformed() {
        let mut bytes = example().encode();
        bytes[0] = 2;
        assert!(matches!(Address::decode(&bytes).unwrap_err().cause, Cause::Malformed { .. }));
    }

    #[test]
    fn the_token_is_not_printed() {
        let shown = format!("{:?}", Address { token: Token([0xab; 16]), ..example() });
        assert!(!shown.contains("171") && !shown.contains("ab"), "{shown}");
    }

    #[test]
    fn tokens_are_the_same_only_when_all_bytes_are() {
        let token = Token([7; 16]);
        assert!(same_token(&token, &Token([7; 16])));
        for byte in 0..16 {
            let mut other = token;
            other.0[byte] ^= 0x80;
            assert!(!same_token(&token, &other));
        }
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(number: u32, token: [u8; 16], name in prop::collection::vec(any::<u8>(), 1..=107)) {
            let address = Address { number, token: Token(token), name };
            prop_assert!(Address::decode(&address.encode()).unwrap() == address);
        }

        #[test]
        fn whatever_decodes_is_canonical(bytes in prop::collection::vec(any::<u8>(), 0..160)) {
            if let Ok(address) = Address::decode(&bytes) {
                prop_assert_eq!(address.encode(), bytes);
            }
        }
    }
}
