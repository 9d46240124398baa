//! How a region is divided, and how much storage its metadata needs.

use super::shape::Shape;
use core::fmt;

/// Smallest granule in bytes: one cache line.
pub const MIN_GRANULE: u64 = 64;
/// Largest granule in bytes: one huge page of x86-64 and of 4 KiB-page arm64.
pub const MAX_GRANULE: u64 = 2 << 20;
/// Largest region in bytes: 16 TiB.
pub const MAX_REGION: u64 = 16 << 40;

/// The length of a region and the granule that extents are whole numbers of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PoolLayout {
    region_len: u64,
    granule_bits: u32,
}

impl PoolLayout {
    /// A region of `region_len` bytes in granules of `granule` bytes.
    ///
    /// # Errors
    /// The granule is not a power of two from [`MIN_GRANULE`] to [`MAX_GRANULE`], or the region is not a whole number
    /// of granules, at least one, up to [`MAX_REGION`].
    pub const fn new(region_len: u64, granule: u64) -> Result<Self, LayoutError> {
        if !granule.is_power_of_two() || granule < MIN_GRANULE || granule > MAX_GRANULE {
            return Err(LayoutError::Granule { granule });
        }
        if region_len == 0 || region_len > MAX_REGION || !region_len.is_multiple_of(granule) {
            return Err(LayoutError::Region { region_len, granule });
        }
        Ok(Self { region_len, granule_bits: granule.trailing_zeros() })
    }

    /// Bytes in the region.
    #[must_use]
    pub const fn region_len(&self) -> u64 {
        self.region_len
    }

    /// Bytes in a granule.
    #[must_use]
    pub const fn granule(&self) -> u64 {
        1 << self.granule_bits
    }

    /// Granules in the region.
    #[must_use]
    pub const fn granules(&self) -> u64 {
        self.region_len >> self.granule_bits
    }

    /// Granules that hold `len` bytes: the quotient rounded up, nothing more.
    #[must_use]
    pub const fn granules_for(&self, len: u64) -> u64 {
        if len == 0 { 0 } else { ((len - 1) >> self.granule_bits) + 1 }
    }

    /// Words of storage that a pool of this layout needs: a little more than one for each granule.
    #[must_use]
    pub const fn words(&self) -> usize {
        Shape::new(self).words
    }

    pub(crate) const fn granule_bits(&self) -> u32 {
        self.granule_bits
    }
}

/// A region that no pool can manage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LayoutError {
    /// The granule is no power of two between the limits.
    Granule {
        /// As given, in bytes.
        granule: u64,
    },
    /// The region's length is no whole number of granules between the limits.
    Region {
        /// As given, in bytes.
        region_len: u64,
        /// As given, in bytes.
        granule: u64,
    },
}

impl fmt::Display for LayoutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Granule { granule } => {
                write!(f, "pool granule of {granule} bytes: must be a power of two from {MIN_GRANULE} to {MAX_GRANULE}")
            }
            Self::Region { region_len, granule } => write!(
                f,
                "pool region of {region_len} bytes: must be a whole number of granules of {granule} bytes, at least \
                 one, and at most {MAX_REGION} bytes"
            ),
        }
    }
}

impl core::error::Error for LayoutError {}
