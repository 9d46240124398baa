//! What one end tells the other to be connected to: 64 bytes, little-endian.

use super::probe::Target;
use crate::{Cause, Error, Result};

const VERSION: u8 = 2;
const LEN: usize = 64;

/// Where a queue pair is, and what it can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Address {
    /// 24 bits.
    pub(super) number: u32,
    /// 24 bits, random: the first packet's sequence number.
    pub(super) psn: u32,
    pub(super) gid: [u8; 16],
    /// Only InfiniBand has it; 0 otherwise.
    pub(super) lid: u16,
    /// The partition, by value.
    pub(super) pkey: u16,
    /// `IBV_LINK_LAYER_*`.
    pub(super) link_layer: u8,
    /// `IBV_MTU_*`.
    pub(super) mtu: u8,
    /// Reads that it answers at a time.
    pub(super) responder_depth: u8,
    /// Longest message, in bytes.
    pub(super) max_message: u64,
    /// What the other end is to read first.
    pub(super) probe: Target,
}

impl Address {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![VERSION, self.link_layer, self.mtu, self.responder_depth];
        bytes.extend(self.number.to_le_bytes());
        bytes.extend(self.psn.to_le_bytes());
        bytes.extend(self.gid);
        bytes.extend(self.lid.to_le_bytes());
        bytes.extend(self.pkey.to_le_bytes());
        bytes.extend(self.max_message.to_le_bytes());
        bytes.extend(self.probe.address.to_le_bytes());
        bytes.extend(self.probe.nonce.to_le_bytes());
        bytes.extend(self.probe.key.to_le_bytes());
        bytes.extend([0; 4]);
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self> {
        let malformed = |what| Err(Error::new("connect", Cause::Malformed { what }));
        let Ok(bytes) = <&[u8; LEN]>::try_from(bytes) else { return malformed("length of the address") };
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        if bytes[0] != VERSION {
            return malformed("version of the address");
        }
        let mut gid = [0; 16];
        gid.copy_from_slice(&bytes[12..28]);
        let address = Self {
            link_layer: bytes[1],
            mtu: bytes[2],
            responder_depth: bytes[3],
            number: word(4),
            psn: word(8),
            gid,
            lid: half(28),
            pkey: half(30),
            max_message: long(32),
            probe: Target { address: long(40), nonce: long(48), key: word(56) },
        };
        if address.number >> 24 != 0 || address.psn >> 24 != 0 {
            return malformed("a number of more than 24 bits in the address");
        }
        if !(1..=5).contains(&address.mtu) {
            return malformed("path MTU in the address");
        }
        if bytes[60..].iter().any(|&byte| byte != 0) {
            return malformed("reserved bytes of the address");
        }
        Ok(address)
    }

    /// Whether the GID is an IPv4 address that is written as one of IPv6.
    pub(super) fn is_ipv4(gid: &[u8; 16]) -> bool {
        gid[..12] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Address {
        Address {
            number: 0x12_3456,
            psn: 0xff_ffff,
            gid: *b"0123456789abcdef",
            lid: 7,
            pkey: 0xffff,
            link_layer: 2,
            mtu: 3,
            responder_depth: 16,
            max_message: 1 << 31,
            probe: Target { address: 0x1234_5678_9abc_def0, nonce: 0x0fed_cba9_8765_4321, key: 0xf00d_beef },
        }
    }

    #[test]
    fn an_address_of_a_device_round_trips_and_nothing_shorter_or_longer_does() {
        let bytes = example().encode();
        assert_eq!((bytes.len(), Address::decode(&bytes).unwrap()), (LEN, example()));
        for len in 0..LEN {
            assert!(matches!(Address::decode(&bytes[..len]).unwrap_err().cause, Cause::Malformed { .. }));
        }
        assert!(Address::decode(&[&bytes[..], b"x"].concat()).is_err());
    }

    #[test]
    fn each_rule_of_a_devices_address_is_checked() {
        let changed = |at: usize, to: u8| {
            let mut bytes = example().encode();
            bytes[at] = to;
            match Address::decode(&bytes).map_err(|error| error.cause) {
                Err(Cause::Malformed { what }) => what,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(changed(0, 1), "version of the address");
        assert_eq!((changed(2, 0), changed(2, 6)), ("path MTU in the address", "path MTU in the address"));
        assert_eq!(changed(7, 1), "a number of more than 24 bits in the address");
        assert_eq!(changed(11, 1), "a number of more than 24 bits in the address");
        for at in 60..LEN {
            assert_eq!(changed(at, 1), "reserved bytes of the address");
        }
    }
}
