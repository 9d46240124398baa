//! The bytes on a stream, and the address of a queue pair.
//!
//! Everything is little-endian and of fixed size but the data itself. After the preface that the endpoint's listening
//! port asks for, a stream begins with a [`Hello`] by the end that dialled and one by the end that accepted; from then
//! on each direction is a sequence of [`Header`]s, some followed by data. Parsers reject what they don't know, unused
//! fields that are not zero included (I7).

use super::MAX_STREAMS;
use crate::{CompletionStatus, Token};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

/// Length of a header.
pub(super) const HEADER: usize = 40;
/// Length of what follows the data of a [`Op::ReadData`].
pub(super) const TRAILER: usize = 8;
/// Length of a hello.
pub(super) const HELLO: usize = 16;
/// Most addresses that an [`Address`] can hold: with all of them it stays below the 512 bytes that
/// [`QueuePair::address`](crate::QueuePair::address) allows.
pub(super) const MAX_ADDRESSES: usize = 16;

const HEADER_MARK: u8 = 0xA7;
const TRAILER_MARK: u8 = 0xE7;
const HELLO_MARK: [u8; 8] = *b"twl-tcp\x01";
const ADDRESS_MARK: [u8; 4] = *b"twT\x01";
const ADDRESS_FIXED: usize = 4 + 1 + 1 + 2 + 16;
const ADDRESS_EACH: usize = 2 + 2 + 4 + 16;

/// Why bytes were refused.
pub(super) type Refused = &'static str;

/// What a header says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Op {
    /// Asks for `len` bytes at `address` under `rkey`; answered by `ReadData`s that cover them, or one `Refusal`. Not to
    /// be done before everything of a sequence number below `seq` is.
    ReadRequest,
    /// Followed by `len` bytes for the read `id`, from its byte `address` on, and a trailer.
    ReadData,
    /// Followed by `len` bytes for `address` under `rkey`. Answered by an `Ack` of its `seq`.
    Write,
    /// Consumes a receive with `imm`, when everything of a sequence number below its own is done. `len` is the length of
    /// the write that it ends. Answered by an `Ack`.
    Immediate,
    /// Followed by `len` bytes for a receive, when everything of a sequence number below its own is done. Answered by an
    /// `Ack`.
    Send,
    /// As `Send`, with `imm`.
    SendWithImmediate,
    /// The message of sequence number `seq` is delivered, or refused with `status`.
    Ack,
    /// The read `id` is refused with `status`.
    Refusal,
}

impl Op {
    fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            1 => Self::ReadRequest,
            2 => Self::ReadData,
            3 => Self::Write,
            4 => Self::Immediate,
            5 => Self::Send,
            6 => Self::SendWithImmediate,
            7 => Self::Ack,
            8 => Self::Refusal,
            _ => return None,
        })
    }

    const fn code(self) -> u8 {
        match self {
            Self::ReadRequest => 1,
            Self::ReadData => 2,
            Self::Write => 3,
            Self::Immediate => 4,
            Self::Send => 5,
            Self::SendWithImmediate => 6,
            Self::Ack => 7,
            Self::Refusal => 8,
        }
    }
}

/// One header. Fields that an operation does not use are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) op: Op,
    pub(super) status: CompletionStatus,
    pub(super) id: u32,
    pub(super) seq: u32,
    pub(super) imm: u32,
    pub(super) address: u64,
    pub(super) len: u64,
    pub(super) rkey: u64,
}

impl Header {
    /// A header of `op` with nothing in it.
    pub(super) const fn new(op: Op) -> Self {
        Self { op, status: CompletionStatus::Success, id: 0, seq: 0, imm: 0, address: 0, len: 0, rkey: 0 }
    }

    pub(super) fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[0] = HEADER_MARK;
        bytes[1] = self.op.code();
        bytes[2] = status_code(self.status);
        bytes[4..8].copy_from_slice(&self.id.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.seq.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.imm.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.address.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.len.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.rkey.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; HEADER]) -> Result<Self, Refused> {
        let [mark, op, status, reserved, rest @ ..] = bytes;
        if *mark != HEADER_MARK {
            return Err("a header does not begin with its mark");
        }
        let op = Op::from_code(*op).ok_or("an unknown operation")?;
        let status = status_from_code(*status).ok_or("an unknown status")?;
        if *reserved != 0 {
            return Err("a reserved byte is not zero");
        }
        let word = |at: usize| u32::from_le_bytes([rest[at], rest[at + 1], rest[at + 2], rest[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let header = Self {
            op,
            status,
            id: word(0),
            seq: word(4),
            imm: word(8),
            address: long(12),
            len: long(20),
            rkey: long(28),
        };
        header.check().map(|()| header)
    }

    fn check(&self) -> Result<(), Refused> {
        let Self { op, status, id, seq, imm, address, len, rkey } = *self;
        let unused = match op {
            Op::ReadRequest => imm == 0,
            Op::ReadData => seq == 0 && imm == 0 && rkey == 0,
            Op::Write => id == 0 && imm == 0,
            Op::Immediate => id == 0 && address == 0 && rkey == 0,
            Op::Send => id == 0 && imm == 0 && address == 0 && rkey == 0,
            Op::SendWithImmediate => id == 0 && address == 0 && rkey == 0,
            Op::Ack => id == 0 && imm == 0 && address == 0 && len == 0 && rkey == 0,
            Op::Refusal => seq == 0 && imm == 0 && address == 0 && len == 0 && rkey == 0,
        };
        if !unused {
            return Err("a field that the operation does not use is not zero");
        }
        let answer = match op {
            Op::Ack => true,
            Op::Refusal => status != CompletionStatus::Success,
            _ => status == CompletionStatus::Success,
        };
        if !answer {
            return Err("a status where there can be none");
        }
        if address.checked_add(len).is_none() { Err("a range that overflows") } else { Ok(()) }
    }
}

/// What ends the data of a [`Op::ReadData`]: whether all of it came from memory that the peer was allowed to read until
/// the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Trailer {
    pub(super) status: CompletionStatus,
    pub(super) id: u32,
}

impl Trailer {
    pub(super) fn encode(self) -> [u8; TRAILER] {
        let [a, b, c, d] = self.id.to_le_bytes();
        [TRAILER_MARK, status_code(self.status), 0, 0, a, b, c, d]
    }

    pub(super) fn decode(bytes: &[u8; TRAILER]) -> Result<Self, Refused> {
        let [mark, status, 0, 0, a, b, c, d] = *bytes else { return Err("a reserved byte is not zero") };
        if mark != TRAILER_MARK {
            return Err("a trailer does not begin with its mark");
        }
        let status = status_from_code(status).ok_or("an unknown status")?;
        Ok(Self { status, id: u32::from_le_bytes([a, b, c, d]) })
    }
}

/// The first bytes of each direction: which of how many streams this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) index: u8,
    pub(super) streams: u8,
    /// Whether the end that was dialled says it.
    pub(super) answer: bool,
}

impl Hello {
    pub(super) fn encode(self) -> [u8; HELLO] {
        let mut bytes = [0; HELLO];
        bytes[..8].copy_from_slice(&HELLO_MARK);
        bytes[8] = self.index;
        bytes[9] = self.streams;
        bytes[10] = u8::from(self.answer);
        bytes
    }

    pub(super) fn decode(bytes: &[u8; HELLO]) -> Result<Self, Refused> {
        let [mark @ .., index, streams, answer, 0, 0, 0, 0, 0] = *bytes else {
            return Err("a reserved byte is not zero");
        };
        if mark != HELLO_MARK {
            return Err("a stream does not begin with the mark of this protocol and version");
        }
        if streams == 0 || usize::from(streams) > MAX_STREAMS || index >= streams || answer > 1 {
            return Err("a hello that makes no sense");
        }
        Ok(Self { index, streams, answer: answer == 1 })
    }
}

/// What [`QueuePair::address`](crate::QueuePair::address) tells: where to dial, with which token, how often.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) token: Token,
    pub(super) streams: u8,
    pub(super) dial: Vec<SocketAddr>,
}

impl Address {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(ADDRESS_FIXED + ADDRESS_EACH * self.dial.len());
        bytes.extend_from_slice(&ADDRESS_MARK);
        bytes.push(self.streams);
        bytes.push(self.dial.len() as u8);
        bytes.extend_from_slice(&[0; 2]);
        bytes.extend_from_slice(&self.token.0);
        for address in &self.dial {
            let (family, scope, ip) = match address {
                SocketAddr::V4(v4) => {
                    let mut ip = [0; 16];
                    ip[..4].copy_from_slice(&v4.ip().octets());
                    (4u16, 0, ip)
                }
                SocketAddr::V6(v6) => (6, v6.scope_id(), v6.ip().octets()),
            };
            bytes.extend_from_slice(&family.to_le_bytes());
            bytes.extend_from_slice(&address.port().to_le_bytes());
            bytes.extend_from_slice(&scope.to_le_bytes());
            bytes.extend_from_slice(&ip);
        }
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, Refused> {
        let (fixed, each) = bytes.split_at_checked(ADDRESS_FIXED).ok_or("an address that is too short")?;
        let (mark, rest) = fixed.split_at(4);
        if mark != ADDRESS_MARK {
            return Err("not an address of the TCP provider, or of another version");
        }
        let [streams, count, 0, 0, token @ ..] = rest else { return Err("a reserved byte is not zero") };
        let token = Token(token.try_into().map_err(|_| "an address that is too short")?);
        if *streams == 0 || usize::from(*streams) > MAX_STREAMS {
            return Err("an address with an impossible number of streams");
        }
        if usize::from(*count) > MAX_ADDRESSES || each.len() != ADDRESS_EACH * usize::from(*count) {
            return Err("an address of the wrong length");
        }
        let dial = each.chunks_exact(ADDRESS_EACH).map(socket_address).collect::<Result<_, _>>()?;
        Ok(Self { token, streams: *streams, dial })
    }
}

fn socket_address(bytes: &[u8]) -> Result<SocketAddr, Refused> {
    let [f0, f1, p0, p1, s0, s1, s2, s3, ip @ ..] = bytes else { return Err("an address that is too short") };
    let ip: [u8; 16] = ip.try_into().map_err(|_| "an address that is too short")?;
    let (family, port) = (u16::from_le_bytes([*f0, *f1]), u16::from_le_bytes([*p0, *p1]));
    let scope = u32::from_le_bytes([*s0, *s1, *s2, *s3]);
    if port == 0 {
        return Err("an address without a port");
    }
    let address = match (family, ip) {
        (4, [a, b, c, d, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]) if scope == 0 => {
            SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::new(a, b, c, d), port))
        }
        (6, ip) => SocketAddr::V6(SocketAddrV6::new(Ipv6Addr::from(ip), port, 0, scope)),
        _ => return Err("an address of an unknown family"),
    };
    if is_no_host(address.ip()) { Err("an address that names no single host") } else { Ok(address) }
}

/// Whether nobody can be dialled at `ip`.
pub(super) fn is_no_host(ip: IpAddr) -> bool {
    ip.is_unspecified() || ip.is_multicast()
}

fn status_code(status: CompletionStatus) -> u8 {
    match status {
        CompletionStatus::Success => 0,
        CompletionStatus::RemoteAccess => 1,
        CompletionStatus::RemoteInvalidRequest => 2,
        CompletionStatus::ReceiverNotReadyExceeded => 3,
        // What else there is, is of one end alone and never sent.
        _ => 4,
    }
}

fn status_from_code(code: u8) -> Option<CompletionStatus> {
    Some(match code {
        0 => CompletionStatus::Success,
        1 => CompletionStatus::RemoteAccess,
        2 => CompletionStatus::RemoteInvalidRequest,
        3 => CompletionStatus::ReceiverNotReadyExceeded,
        4 => CompletionStatus::RemoteOperation,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn request() -> Header {
        Header { id: 7, seq: 9, address: 4096, len: 1 << 30, rkey: u64::MAX, ..Header::new(Op::ReadRequest) }
    }

    #[test]
    fn headers_come_back_as_they_went() {
        let ack = Header { seq: 5, status: CompletionStatus::RemoteAccess, ..Header::new(Op::Ack) };
        let data = Header { id: u32::MAX, address: 1, len: 2, ..Header::new(Op::ReadData) };
        let send = Header { seq: 1, imm: 3, len: 0, ..Header::new(Op::SendWithImmediate) };
        for header in [request(), ack, data, send] {
            assert_eq!(Header::decode(&header.encode()), Ok(header));
        }
    }

    #[test]
    fn a_header_that_breaks_a_rule_is_refused() {
        let spoil = |at: usize, with: u8| {
            let mut bytes = request().encode();
            bytes[at] = with;
            Header::decode(&bytes)
        };
        assert!(spoil(0, 0).is_err(), "mark");
        assert!(spoil(1, 0).is_err(), "operation");
        assert!(spoil(1, 9).is_err(), "operation");
        assert!(spoil(2, 9).is_err(), "status");
        assert!(spoil(2, 1).is_err(), "status in a request");
        assert!(spoil(3, 1).is_err(), "reserved");
        assert!(spoil(12, 1).is_err(), "immediate in a read request");
        let overflow = Header { address: u64::MAX, ..request() };
        assert!(Header::decode(&overflow.encode()).is_err());
        assert!(Header::decode(&Header::new(Op::Refusal).encode()).is_err(), "a refusal that succeeds");
    }

    #[test]
    fn trailers_and_hellos_come_back_and_are_checked() {
        let trailer = Trailer { status: CompletionStatus::RemoteAccess, id: 77 };
        assert_eq!(Trailer::decode(&trailer.encode()), Ok(trailer));
        let hello = Hello { index: 1, streams: 2, answer: true };
        assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
        for (at, with) in [(0, 0), (1, 77), (2, 1), (3, 1)] {
            let mut bytes = trailer.encode();
            bytes[at] = with;
            assert!(Trailer::decode(&bytes).is_err(), "{at}");
        }
        for (at, with) in [(0, 0), (7, 2), (8, 2), (9, 0), (9, 99), (10, 2), (11, 1), (15, 1)] {
            let mut bytes = hello.encode();
            bytes[at] = with;
            assert!(Hello::decode(&bytes).is_err(), "{at}");
        }
    }

    fn address() -> Address {
        let dial = ["127.0.0.1:80", "[::1]:81", "[fe80::1%3]:82"];
        Address { token: Token([9; 16]), streams: 2, dial: dial.iter().map(|a| a.parse().unwrap()).collect() }
    }

    #[test]
    fn addresses_keep_families_and_scopes() {
        assert_eq!(Address::decode(&address().encode()), Ok(address()));
        let full = Address { dial: vec!["[fe80::1%3]:82".parse().unwrap(); MAX_ADDRESSES], ..address() };
        assert!(full.encode().len() <= 512);
        assert_eq!(Address::decode(&full.encode()), Ok(full));
    }

    #[test]
    fn an_address_of_another_length_or_version_or_host_is_refused() {
        let good = address().encode();
        for len in 0..good.len() {
            assert!(Address::decode(&good[..len]).is_err(), "{len}");
        }
        let mut longer = good.clone();
        longer.push(0);
        assert!(Address::decode(&longer).is_err());
        for (at, with) in [(0, 0), (3, 2), (4, 0), (4, 200), (5, 2), (6, 1), (24, 5), (26, 0), (28, 1)] {
            let mut bytes = good.clone();
            bytes[at] = with;
            if at == 26 {
                bytes[27] = 0; // the whole port
            }
            assert!(Address::decode(&bytes).is_err(), "byte {at}");
        }
        for host in ["0.0.0.0:1", "224.0.0.1:1", "[::]:1", "[ff02::1]:1"] {
            let none = Address { dial: vec![host.parse().unwrap()], ..address() };
            assert!(Address::decode(&none.encode()).is_err(), "{host}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_decode_to_what_encodes_to_them_or_not_at_all(bytes in any::<[u8; HEADER]>(), op in 0u8..10) {
            let mut bytes = bytes;
            bytes[0] = HEADER_MARK;
            bytes[1] = op;
            bytes[2] %= 6;
            bytes[3] = 0;
            if let Ok(header) = Header::decode(&bytes) {
                prop_assert_eq!(header.encode(), bytes);
            }
        }

        #[test]
        fn any_bytes_are_an_address_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            if let Ok(address) = Address::decode(&bytes) {
                prop_assert_eq!(address.encode(), bytes);
            }
        }
    }
}
