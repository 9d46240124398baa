//! What is read from a peer before anything else is: bytes that both ends can work out from a random number.
//!
//! A path that carries small packets may lose large ones (another MTU on the way), and an address or key of somebody else
//! may answer: so the bytes are more than a packet has room for, and each is compared.

use super::{address::Address, failed, region::Region, sys};
use crate::memory::HugePages;
use crate::{Access, Error, Memory, Result};
use core::fmt;
use rdma_core_sys::{IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_READ};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of the probe: more than two packets of the largest MTU.
pub(super) const LEN: u32 = 12 << 10;
/// Most paths that are remembered.
const MOST_PATHS: usize = 1024;

/// The bytes that a number stands for (SplitMix64, Steele et al. 2014).
fn pattern(nonce: u64) -> Vec<u8> {
    let word = |index: u64| {
        let mut z = nonce.wrapping_add((index + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ z >> 31).to_le_bytes()
    };
    (0..u64::from(LEN) / 8).flat_map(word).collect()
}

/// Where the bytes are to be read.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Target {
    pub(super) address: u64,
    pub(super) key: u32,
    pub(super) nonce: u64,
}

// The key is one.
impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Target").finish_non_exhaustive()
    }
}

/// What a protection domain lets its peers read: the bytes of a number, and nothing else.
#[derive(Debug)]
pub(super) struct Shown {
    raw: sys::Region,
    memory: Memory,
    nonce: u64,
}

impl Shown {
    #[allow(unsafe_code)]
    pub(super) fn new(domain: &Arc<sys::Domain>) -> Result<Self> {
        const VERB: &str = "create_qp";
        let nonce = sys::random_64().map_err(|error| Error::from_io(VERB, "getrandom", &error))?;
        let memory = Memory::shared(LEN.into(), HugePages::Off)?;
        memory.write(0, &pattern(nonce))?;
        // SAFETY: the memory is mapped as long as a clone of it lives, and this keeps one.
        let raw = unsafe { sys::Region::register(domain, memory.address(), LEN as usize, IBV_ACCESS_REMOTE_READ) };
        Ok(Self { raw: raw.map_err(|error| failed(VERB, "ibv_reg_mr", error))?, memory, nonce })
    }

    pub(super) fn target(&self) -> Target {
        Target { address: self.memory.address().addr() as u64, key: self.raw.remote_key(), nonce: self.nonce }
    }
}

/// Memory for what is read.
#[derive(Debug)]
pub(super) struct Read {
    region: Arc<Region>,
    nonce: u64,
}

impl Read {
    /// Room for the bytes of `nonce`, with others in it.
    #[allow(unsafe_code)]
    pub(super) fn new(domain: &Arc<sys::Domain>, nonce: u64) -> Result<Self> {
        const VERB: &str = "connect";
        let memory = Memory::shared(LEN.into(), HugePages::Off)?;
        let others: Vec<u8> = pattern(nonce).iter().map(|byte| !byte).collect();
        memory.write(0, &others)?;
        // SAFETY: the memory is mapped as long as a clone of it lives, and the region keeps one.
        let raw = unsafe { sys::Region::register(domain, memory.address(), LEN as usize, IBV_ACCESS_LOCAL_WRITE) };
        let raw = raw.map_err(|error| failed(VERB, "ibv_reg_mr", error))?;
        let region = Region::whole(raw, domain.clone(), memory, Access::LOCAL_WRITE);
        Ok(Self { region: Arc::new(region), nonce })
    }

    pub(super) fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Whether the peer's bytes have arrived, all of them. The read has completed.
    pub(super) fn is_right(&self) -> bool {
        let mut found = vec![0; LEN as usize];
        self.region.memory().read(0, &mut found).is_ok() && found == pattern(self.nonce)
    }

    pub(super) fn into_region(self) -> Arc<Region> {
        self.region
    }
}

/// The paths from one port that have carried a probe and no trouble since.
#[derive(Debug, Default)]
pub(super) struct Proven(Mutex<BTreeSet<([u8; 16], u16)>>);

impl Proven {
    fn of(remote: &Address) -> ([u8; 16], u16) {
        (remote.gid, remote.lid)
    }

    pub(super) fn contains(&self, remote: &Address) -> bool {
        self.paths().contains(&Self::of(remote))
    }

    pub(super) fn insert(&self, remote: &Address) {
        let mut paths = self.paths();
        if paths.len() >= MOST_PATHS {
            paths.clear(); // each is probed once more
        }
        paths.insert(Self::of(remote));
    }

    /// After trouble on the way to `remote`.
    pub(super) fn remove(&self, remote: &Address) {
        self.paths().remove(&Self::of(remote));
    }

    /// After trouble with the port.
    pub(super) fn clear(&self) {
        self.paths().clear();
    }

    fn paths(&self) -> std::sync::MutexGuard<'_, BTreeSet<([u8; 16], u16)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_of_the_number_changes_every_part_of_the_bytes() {
        let bytes = pattern(0);
        assert_eq!(bytes.len(), LEN as usize);
        for bit in 0..64 {
            let other = pattern(1 << bit);
            assert!(bytes.chunks(64).zip(other.chunks(64)).all(|(a, b)| a != b), "bit {bit}");
        }
    }
}
