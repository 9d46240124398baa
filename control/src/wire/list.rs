//! What frames carry lists of. Each item has the form it has on the wire, so a decoded list is a slice of the input.

use super::Outcome;
use crate::address::{self, Address, AddressError};
use core::fmt;
use static_assertions::const_assert_eq;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// A contiguous piece of a payload in the producer's memory, as the consumer's work requests name it.
#[derive(Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Segment {
    address: U64,
    len: U64,
    rkey: U64,
}
const_assert_eq!(size_of::<Segment>(), 24);

impl Segment {
    /// `len` bytes at `address` under the remote key `rkey`.
    #[must_use]
    pub const fn new(address: u64, len: u64, rkey: u64) -> Self {
        Self { address: U64::new(address), len: U64::new(len), rkey: U64::new(rkey) }
    }

    /// The remote address of its first byte.
    #[must_use]
    pub const fn address(&self) -> u64 {
        self.address.get()
    }

    /// Its length in bytes.
    #[must_use]
    #[allow(clippy::len_without_is_empty)]
    pub const fn len(&self) -> u64 {
        self.len.get()
    }

    /// Its remote key.
    #[must_use]
    pub const fn rkey(&self) -> u64 {
        self.rkey.get()
    }
}

impl fmt::Debug for Segment {
    /// A remote key is a right, so it is not printed (I14).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Segment {{ address: {:#x}, len: {}, rkey: <redacted> }}", self.address, self.len)
    }
}

/// A lease that ended, and how.
#[derive(Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct CloseEntry {
    lease: U64,
    outcome: u8,
}
const_assert_eq!(size_of::<CloseEntry>(), 9);

impl CloseEntry {
    /// `lease` ended with `outcome`.
    #[must_use]
    pub fn new(lease: u64, outcome: Outcome) -> Self {
        Self { lease: lease.into(), outcome: outcome.into() }
    }

    /// The lease.
    #[must_use]
    pub const fn lease(&self) -> u64 {
        self.lease.get()
    }

    /// How it ended.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        self.outcome.into()
    }
}

impl fmt::Debug for CloseEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CloseEntry").field("lease", &self.lease()).field("outcome", &self.outcome()).finish()
    }
}

/// A lease's number in a list.
#[derive(Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(transparent)]
pub struct LeaseId(U64);

impl LeaseId {
    /// The lease of that number.
    #[must_use]
    pub const fn new(lease: u64) -> Self {
        Self(U64::new(lease))
    }

    /// Its number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0.get()
    }
}

impl From<u64> for LeaseId {
    fn from(lease: u64) -> Self {
        Self::new(lease)
    }
}

impl fmt::Debug for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LeaseId({})", self.0)
    }
}

/// Most network addresses that an endpoint advertises.
pub const MAX_ADVERTISED: usize = 8;

/// Up to [`MAX_ADVERTISED`] network addresses in their wire form: a count, then each address.
///
/// The form stands by itself, so a ticket can carry it too.
#[derive(Clone, PartialEq, Eq)]
pub struct AddressList(Vec<u8>);

impl AddressList {
    /// No address.
    #[must_use]
    pub fn new() -> Self {
        Self(vec![0])
    }

    /// Adds an address.
    ///
    /// # Errors
    /// [`AddressError::TooMany`]; [`AddressError::NotNetwork`] for an abstract Unix name.
    pub fn push(&mut self, address: &Address) -> Result<(), AddressError> {
        if usize::from(self.0[0]) == MAX_ADVERTISED {
            return Err(AddressError::TooMany);
        }
        address::encode(address, &mut self.0)?;
        self.0[0] += 1;
        Ok(())
    }

    /// A list of `addresses`.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub fn from_addresses(addresses: &[Address]) -> Result<Self, AddressError> {
        let mut list = Self::new();
        addresses.iter().try_for_each(|address| list.push(address))?;
        Ok(list)
    }

    /// The list, borrowed.
    #[must_use]
    pub fn as_addresses(&self) -> Addresses<'_> {
        Addresses(&self.0)
    }
}

impl Default for AddressList {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for AddressList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_addresses().fmt(f)
    }
}

/// A borrowed, checked [`AddressList`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Addresses<'a>(&'a [u8]);

impl<'a> Addresses<'a> {
    /// No address.
    pub const NONE: Addresses<'static> = Addresses(&[0]);

    /// Reads a list off the front of `bytes`; gives it and the rest, or `None` if that is not a list.
    #[must_use]
    pub fn decode(bytes: &'a [u8]) -> Option<(Self, &'a [u8])> {
        let (&count, mut rest) = bytes.split_first()?;
        if usize::from(count) > MAX_ADVERTISED {
            return None;
        }
        for _ in 0..count {
            address::decode(&mut rest)?;
        }
        let (list, rest) = bytes.split_at(bytes.len() - rest.len());
        Some((Self(list), rest))
    }

    /// Its wire form.
    #[must_use]
    pub const fn as_bytes(&self) -> &'a [u8] {
        self.0
    }

    /// The addresses, in the order of preference of the end that advertises them.
    pub fn iter(&self) -> impl Iterator<Item = Address> + use<'a> {
        // The list was checked when it was made, so this ends at its end and nowhere else.
        let mut rest = &self.0[1..];
        core::iter::from_fn(move || address::decode(&mut rest).map(|raw| raw.to_address()))
    }

    /// How many there are.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.0[0] as usize
    }

    /// Whether there is none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// An owned copy.
    #[must_use]
    pub fn to_list(&self) -> AddressList {
        AddressList(self.0.to_vec())
    }
}

impl fmt::Debug for Addresses<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter().map(|address| address.to_string())).finish()
    }
}
