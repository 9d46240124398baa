//! Names of transfers, as work requests and immediates carry them.

/// Bits of a slot number.
pub(super) const SLOT_BITS: u32 = 16;
/// Bits of a generation.
pub(super) const GENERATION_BITS: u32 = 26;
/// Bits of a chunk number.
pub(super) const CHUNK_BITS: u32 = 22;

const SLOT: u32 = (1 << SLOT_BITS) - 1;
pub(super) const GENERATION: u32 = (1 << GENERATION_BITS) - 1;

/// The largest chunk number: 2^22 - 1.
pub const MAX_CHUNK: u32 = (1 << CHUNK_BITS) - 1;

/// Names one transfer of one table. The generation moves each time the slot is released and wraps after 2^26 transfers
/// in one slot; until then an id of an earlier transfer is always told from that of a live one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TransferId {
    slot: u32,
    generation: u32,
}

impl TransferId {
    pub(super) const fn new(slot: u32, generation: u32) -> Self {
        Self { slot: slot & SLOT, generation: generation & GENERATION }
    }

    /// Its place in the table, below the table's capacity: for a parallel array of the caller's own.
    #[must_use]
    pub const fn slot(self) -> u32 {
        self.slot
    }

    /// Which of the transfers in this slot; below 2^26.
    #[must_use]
    pub const fn generation(self) -> u32 {
        self.generation
    }

    /// The id of a work request that moves chunk `chunk` of this transfer; `None` beyond [`MAX_CHUNK`].
    #[must_use]
    pub const fn work_request(self, chunk: u32) -> Option<WorkRequestId> {
        if chunk > MAX_CHUNK {
            return None;
        }
        let high = (self.generation as u64) << (SLOT_BITS + CHUNK_BITS);
        Some(WorkRequestId(high | ((self.slot as u64) << CHUNK_BITS) | chunk as u64))
    }

    /// The immediate that tells a peer of this transfer.
    #[must_use]
    pub const fn immediate(self) -> Immediate {
        Immediate((self.generation << SLOT_BITS) | self.slot)
    }
}

/// The 64 bits that travel in a work request and come back in its completion: generation (26), slot (16), chunk (22).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WorkRequestId(u64);

impl WorkRequestId {
    /// As a completion gives it. Any number is legal; one that names no live transfer is refused by the table.
    #[must_use]
    pub const fn from_u64(bits: u64) -> Self {
        Self(bits)
    }

    /// As a work request carries it.
    #[must_use]
    pub const fn to_u64(self) -> u64 {
        self.0
    }

    /// The transfer that the request belongs to.
    #[must_use]
    pub const fn transfer(self) -> TransferId {
        TransferId::new((self.0 >> CHUNK_BITS) as u32, (self.0 >> (SLOT_BITS + CHUNK_BITS)) as u32)
    }

    /// The chunk that the request moves.
    #[must_use]
    pub const fn chunk(self) -> u32 {
        self.0 as u32 & MAX_CHUNK
    }
}

/// The 32 bits of immediate data that name a transfer: the lower 16 bits of its generation, and its slot (16).
///
/// [`TransferTable::resolve`](super::TransferTable::resolve) gives the transfer back. It detects a stale immediate
/// unless a multiple of 2^16 transfers went through the slot since.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Immediate(u32);

impl Immediate {
    /// As a completion gives it. Any number is legal.
    #[must_use]
    pub const fn from_u32(bits: u32) -> Self {
        Self(bits)
    }

    /// As a work request carries it.
    #[must_use]
    pub const fn to_u32(self) -> u32 {
        self.0
    }

    pub(super) const fn slot(self) -> u32 {
        self.0 & SLOT
    }

    pub(super) const fn names(self, generation: u32) -> bool {
        self.0 >> SLOT_BITS == generation & SLOT
    }
}
