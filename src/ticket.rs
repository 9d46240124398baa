//! Tickets: what a producer hands to its consumers so that they find a payload.
//!
//! A ticket names the payload by (incarnation, slot, generation) (I4), says where its producer listens, and carries
//! the layout. It holds no memory address, no remote key and no secret: whoever has it must still be let in.
//!
//! Binary form, little-endian: `version: u8 = 1, boot: 16 bytes, incarnation: 16 bytes, slot: u32, generation: u32,
//! addresses: u8`, per address `len: u8` and its text, then `layout_len: u32`, the layout, and the CRC32C of all
//! before. Text form: `towline1:` and the binary form in base64url (RFC 4648 section 5) without padding: one word.

use crate::layout::Layout;
use crate::{Error, ErrorKind, Result};
use core::fmt;
use core::str::FromStr;

/// The beginning of every ticket's text form.
pub const TICKET_PREFIX: &str = "towline1:";

const VERSION: u8 = 1;
const MAX_ADDRESSES: usize = 8;

/// Names a payload to a consumer. `Display` gives its text form, `FromStr` reads it back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ticket {
    pub(crate) boot: [u8; 16],
    pub(crate) incarnation: [u8; 16],
    pub(crate) slot: u32,
    pub(crate) generation: u32,
    pub(crate) addresses: Vec<String>,
    pub(crate) layout: Layout,
}

impl Ticket {
    /// Where the producer listens.
    #[must_use]
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// The payload's parts.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The binary form.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = vec![VERSION];
        out.extend(self.boot);
        out.extend(self.incarnation);
        out.extend(self.slot.to_le_bytes());
        out.extend(self.generation.to_le_bytes());
        out.push(self.addresses.len() as u8);
        for address in &self.addresses {
            out.push(address.len() as u8);
            out.extend(address.as_bytes());
        }
        let mut layout = Vec::new();
        self.layout.encode(&mut layout);
        out.extend((layout.len() as u32).to_le_bytes());
        out.extend(layout);
        out.extend(crc32c::crc32c(&out).to_le_bytes());
        out
    }

    /// Reads the binary form.
    ///
    /// # Errors
    /// [`ErrorKind::TicketMalformed`] for anything that [`to_bytes`](Self::to_bytes) does not make.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        decode(bytes).map_err(|what| Error::new("ticket", ErrorKind::TicketMalformed { what }))
    }
}

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{TICKET_PREFIX}{}", encode_base64(&self.to_bytes()))
    }
}

impl FromStr for Ticket {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let malformed = |what| Error::new("ticket", ErrorKind::TicketMalformed { what });
        let word = text.trim().strip_prefix(TICKET_PREFIX).ok_or(malformed("it does not begin with `towline1:`"))?;
        let bytes = decode_base64(word).ok_or(malformed("not base64url"))?;
        Self::from_bytes(&bytes)
    }
}

fn decode(bytes: &[u8]) -> Result<Ticket, &'static str> {
    let (body, crc) = bytes.split_last_chunk::<4>().ok_or("truncated")?;
    let mut rest = body;
    let [version] = take(&mut rest)?;
    if version != VERSION {
        return Err("unknown version");
    }
    if crc32c::crc32c(body) != u32::from_le_bytes(*crc) {
        return Err("damaged: its checksum is wrong");
    }
    let boot = take(&mut rest)?;
    let incarnation = take(&mut rest)?;
    let slot = u32::from_le_bytes(take(&mut rest)?);
    let generation = u32::from_le_bytes(take(&mut rest)?);
    let [count] = take(&mut rest)?;
    if usize::from(count) > MAX_ADDRESSES {
        return Err("too many addresses");
    }
    let mut addresses = Vec::with_capacity(usize::from(count));
    for _ in 0..count {
        let [len] = take(&mut rest)?;
        let (address, after) = rest.split_at_checked(usize::from(len)).ok_or("truncated")?;
        rest = after;
        addresses.push(core::str::from_utf8(address).map_err(|_| "an address is not UTF-8")?.to_owned());
    }
    let layout_len = u32::from_le_bytes(take(&mut rest)?);
    if rest.len() != layout_len as usize {
        return Err("its length is wrong");
    }
    Ok(Ticket { boot, incarnation, slot, generation, addresses, layout: Layout::decode(rest)? })
}

fn take<const N: usize>(bytes: &mut &[u8]) -> Result<[u8; N], &'static str> {
    let (head, rest) = bytes.split_first_chunk::<N>().ok_or("truncated")?;
    *bytes = rest;
    Ok(*head)
}

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

fn encode_base64(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let word = chunk.iter().fold(0u32, |word, byte| word << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for digit in 0..=chunk.len() {
            out.push(char::from(ALPHABET[(word >> (18 - 6 * digit)) as usize & 63]));
        }
    }
    out
}

/// `None` for a foreign character, an impossible length, or bits left over that are not zero.
fn decode_base64(text: &str) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(text.len() / 4 * 3 + 2);
    for chunk in text.as_bytes().chunks(4) {
        let mut word = 0u32;
        for character in chunk {
            word = word << 6 | ALPHABET.iter().position(|a| a == character)? as u32;
        }
        word <<= 6 * (4 - chunk.len());
        let whole = chunk.len() * 6 / 8;
        if whole == 0 || word & ((1 << (24 - 8 * whole)) - 1) != 0 {
            return None;
        }
        out.extend(&word.to_be_bytes()[1..=whole]);
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::DType;

    fn sample() -> Ticket {
        let mut layout = Layout::default();
        layout.push("kv", DType::BF16, &[2, 3], 12).unwrap();
        Ticket {
            boot: [7; 16],
            incarnation: [9; 16],
            slot: 3,
            generation: 0xdead_beef,
            addresses: vec!["10.0.0.1:4711".into(), "[fe80::1%2]:9".into()],
            layout,
        }
    }

    #[test]
    fn text_form_is_one_word_that_round_trips() {
        let text = sample().to_string();
        assert!(text.starts_with("towline1:") && !text.contains(char::is_whitespace));
        assert_eq!(text.parse::<Ticket>().unwrap(), sample());
        assert_eq!(format!(" {text}\n").parse::<Ticket>().unwrap(), sample());
    }

    #[test]
    fn every_damaged_character_is_noticed() {
        let text = sample().to_string();
        for at in 0..text.len() {
            let mut damaged = text.clone().into_bytes();
            damaged[at] = if damaged[at] == b'x' { b'y' } else { b'x' };
            assert!(String::from_utf8(damaged).unwrap().parse::<Ticket>().is_err(), "character {at}");
            assert!(text[..at].parse::<Ticket>().is_err(), "cut at {at}");
        }
    }

    #[test]
    fn base64_agrees_with_the_vectors_of_rfc_4648() {
        for (bytes, text) in
            [("f", "Zg"), ("fo", "Zm8"), ("foo", "Zm9v"), ("foob", "Zm9vYg"), ("fooba", "Zm9vYmE"), ("", "")]
        {
            assert_eq!(encode_base64(bytes.as_bytes()), text);
            assert_eq!(decode_base64(text).as_deref(), Some(bytes.as_bytes()));
        }
        for wrong in ["Z", "Zh", "Zm9=", "Zg==", "Zm 9", "Zm9v+A"] {
            assert_eq!(decode_base64(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_version_from_the_future_is_named() {
        let mut bytes = sample().to_bytes();
        bytes[0] = 2;
        let error = Ticket::from_bytes(&bytes).unwrap_err();
        assert_eq!(error.kind(), &ErrorKind::TicketMalformed { what: "unknown version" });
    }
}
