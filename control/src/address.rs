//! Network addresses as text and as bytes.
//!
//! Text: `192.0.2.1:7000`, `[2001:db8::1]:7000`, `[fe80::1%3]:7000`, `[fe80::1%eth0]:7000`, `host.example:7000`, and
//! `@name` for an abstract Unix socket (bytes of the name outside letters, digits and `-_./:` as `%XX`). Nothing here
//! asks the system anything; [`socket::resolve`](crate::socket::resolve) does.

use core::fmt;
use core::str::FromStr;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

/// Where an endpoint listens.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Address {
    /// An IPv4 or IPv6 address and port. The scope of an IPv6 address is its number on the machine that uses it; the
    /// flow label is always zero.
    Ip(SocketAddr),
    /// A name for the system's resolver, and a port.
    Host(Host),
    /// A name in the abstract namespace of Unix sockets.
    Unix(UnixName),
}

/// A host name and port; an IPv6 address whose scope is an interface's name counts as one, since only the system can
/// say which number that is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Host {
    name: Box<str>,
    port: u16,
}

/// A name in the abstract namespace of Unix sockets, without the leading zero byte.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct UnixName(Box<[u8]>);

/// Longest host name, in bytes (RFC 1035).
pub const MAX_HOST: usize = 255;

/// Longest abstract name, in bytes: `sun_path` of `struct sockaddr_un` less the leading zero byte.
pub const MAX_UNIX_NAME: usize = 107;

impl Host {
    /// A host name of letters, digits, `-`, `_` and `.`, not of digits and dots alone; or an IPv6 address with a scope.
    ///
    /// # Errors
    /// [`AddressError::Host`].
    pub fn new(name: &str, port: u16) -> Result<Self, AddressError> {
        if !is_host(name) {
            return Err(AddressError::Host);
        }
        Ok(Self { name: name.into(), port })
    }

    /// The name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The port.
    #[must_use]
    pub const fn port(&self) -> u16 {
        self.port
    }
}

pub(crate) fn is_host(name: &str) -> bool {
    if name.is_empty() || name.len() > MAX_HOST {
        return false;
    }
    let plain = |text: &str| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
    match name.split_once('%') {
        Some((address, scope)) => !scope.is_empty() && plain(scope) && Ipv6Addr::from_str(address).is_ok(),
        // Digits and dots alone would be an IPv4 address, and what is none is a mistyped one.
        None => plain(name) && !name.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.'),
    }
}

impl UnixName {
    /// A name of 1 to [`MAX_UNIX_NAME`] bytes.
    ///
    /// # Errors
    /// [`AddressError::UnixName`].
    pub fn new(name: &[u8]) -> Result<Self, AddressError> {
        if name.is_empty() || name.len() > MAX_UNIX_NAME {
            return Err(AddressError::UnixName);
        }
        Ok(Self(name.into()))
    }

    /// Its bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl Address {
    /// The port, if it has one.
    #[must_use]
    pub fn port(&self) -> Option<u16> {
        match self {
            Self::Ip(address) => Some(address.port()),
            Self::Host(host) => Some(host.port),
            Self::Unix(_) => None,
        }
    }
}

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Self {
        Self::Ip(match address {
            SocketAddr::V4(_) => address,
            SocketAddr::V6(v6) => SocketAddrV6::new(*v6.ip(), v6.port(), 0, v6.scope_id()).into(),
        })
    }
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        if let Some(name) = text.strip_prefix('@') {
            return Ok(Self::Unix(UnixName::new(&unescape(name)?)?));
        }
        if let Ok(address) = SocketAddr::from_str(text) {
            return Ok(address.into());
        }
        let (name, port) = match text.strip_prefix('[') {
            // Only an IPv6 address whose scope is a name gets here: the others are read above.
            Some(rest) => rest.split_once("]:").ok_or(AddressError::Form)?,
            None => text.rsplit_once(':').ok_or(AddressError::Form)?,
        };
        if !port.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(AddressError::Port);
        }
        let port = port.parse().map_err(|_| AddressError::Port)?;
        // An IPv6 address belongs in brackets, a name does not.
        if text.starts_with('[') != name.contains('%') {
            return Err(AddressError::Host);
        }
        Ok(Self::Host(Host::new(name, port)?))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(address) => address.fmt(f),
            Self::Host(Host { name, port }) if name.contains(':') => write!(f, "[{name}]:{port}"),
            Self::Host(Host { name, port }) => write!(f, "{name}:{port}"),
            Self::Unix(name) => name.fmt(f),
        }
    }
}

impl fmt::Display for UnixName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("@")?;
        for &byte in &self.0 {
            if byte.is_ascii_alphanumeric() || b"-_./:".contains(&byte) {
                write!(f, "{}", byte as char)?;
            } else {
                write!(f, "%{byte:02X}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for UnixName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UnixName({self})")
    }
}

/// The inverse of what [`UnixName`] prints; bytes that need no escape may have one.
fn unescape(text: &str) -> Result<Vec<u8>, AddressError> {
    let mut out = Vec::new();
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if out.len() == MAX_UNIX_NAME {
            return Err(AddressError::UnixName);
        }
        out.push(if byte == b'%' {
            let mut digit = || bytes.next().and_then(|digit| (digit as char).to_digit(16));
            let (Some(high), Some(low)) = (digit(), digit()) else { return Err(AddressError::UnixName) };
            (high * 16 + low) as u8
        } else {
            byte
        });
    }
    Ok(out)
}

/// Why a text or a name is no address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AddressError {
    /// None of the forms.
    Form,
    /// The port is no number from 0 to 65535.
    Port,
    /// The host is empty, too long, or has characters that no host name has.
    Host,
    /// The abstract name is empty, longer than [`MAX_UNIX_NAME`], or a `%` is not followed by two hexadecimal digits.
    UnixName,
    /// More than [`MAX_ADVERTISED`](crate::wire::MAX_ADVERTISED) addresses.
    TooMany,
    /// An abstract name among network addresses; a Hello has a field of its own for it.
    NotNetwork,
}

impl fmt::Display for AddressError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Form => "address: expected IPV4:PORT, [IPV6]:PORT, [IPV6%SCOPE]:PORT, HOST:PORT or @NAME",
            Self::Port => "address: the port is not a number from 0 to 65535",
            Self::Host => "address: not a host name, and not an IP address (IPv6 is written in brackets)",
            Self::UnixName => {
                "address: an abstract name has 1 to 107 bytes, and % is followed by two hexadecimal digits"
            }
            Self::TooMany => "address: more than 8 addresses",
            Self::NotNetwork => "address: an abstract Unix name is not a network address",
        })
    }
}

impl std::error::Error for AddressError {}

const KIND_V4: u8 = 4;
const KIND_V6: u8 = 6;
const KIND_HOST: u8 = 1;

/// Appends one network address as it is on the wire: kind, port, then by kind 4 bytes; 16 bytes and the scope; or a
/// length and the name.
pub(crate) fn encode(address: &Address, out: &mut Vec<u8>) -> Result<(), AddressError> {
    match address {
        Address::Ip(SocketAddr::V4(v4)) => {
            out.push(KIND_V4);
            out.extend(v4.port().to_le_bytes());
            out.extend(v4.ip().octets());
        }
        Address::Ip(SocketAddr::V6(v6)) => {
            out.push(KIND_V6);
            out.extend(v6.port().to_le_bytes());
            out.extend(v6.ip().octets());
            out.extend(v6.scope_id().to_le_bytes());
        }
        Address::Host(host) => {
            // `Host::new` keeps names within one byte's length.
            let len = u8::try_from(host.name.len()).map_err(|_| AddressError::Host)?;
            out.push(KIND_HOST);
            out.extend(host.port.to_le_bytes());
            out.push(len);
            out.extend(host.name.as_bytes());
        }
        Address::Unix(_) => return Err(AddressError::NotNetwork),
    }
    Ok(())
}

/// One network address on the wire, still borrowed.
pub(crate) enum Raw<'a> {
    Ip(SocketAddr),
    Host(&'a str, u16),
}

impl Raw<'_> {
    pub(crate) fn to_address(&self) -> Address {
        match self {
            Self::Ip(address) => Address::Ip(*address),
            Self::Host(name, port) => Address::Host(Host { name: (*name).into(), port: *port }),
        }
    }
}

/// Reads one network address off the front of `bytes`; `None` if they are not one.
pub(crate) fn decode<'a>(bytes: &mut &'a [u8]) -> Option<Raw<'a>> {
    let (&[kind, low, high], rest) = bytes.split_first_chunk::<3>()?;
    let port = u16::from_le_bytes([low, high]);
    let (raw, rest) = match kind {
        KIND_V4 => {
            let (ip, rest) = rest.split_first_chunk::<4>()?;
            (Raw::Ip(SocketAddrV4::new(Ipv4Addr::from(*ip), port).into()), rest)
        }
        KIND_V6 => {
            let (ip, rest) = rest.split_first_chunk::<16>()?;
            let (scope, rest) = rest.split_first_chunk::<4>()?;
            let scope = u32::from_le_bytes(*scope);
            (Raw::Ip(SocketAddrV6::new(Ipv6Addr::from(*ip), port, 0, scope).into()), rest)
        }
        KIND_HOST => {
            let (&len, rest) = rest.split_first()?;
            let (name, rest) = rest.split_at_checked(usize::from(len))?;
            let name = core::str::from_utf8(name).ok().filter(|name| is_host(name))?;
            (Raw::Host(name, port), rest)
        }
        _ => return None,
    };
    *bytes = rest;
    Some(raw)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_is_read_and_printed_the_same() {
        for text in [
            "192.0.2.1:7000",
            "[2001:db8::1]:7000",
            "[fe80::1%3]:7000",
            "[fe80::1%eth0]:7000",
            "[fe80::1%br-lan.7]:0",
            "host.example:65535",
            "node_7:1",
            "@towline/1234",
            "@a%00%25%FFb:c",
        ] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn a_numbered_scope_is_an_ip_address_and_a_named_one_is_for_the_resolver() {
        let Address::Ip(SocketAddr::V6(v6)) = "[fe80::1%3]:7000".parse().unwrap() else { panic!("not IPv6") };
        assert_eq!((v6.scope_id(), v6.port()), (3, 7000));
        let Address::Host(host) = "[fe80::1%eth0]:7000".parse().unwrap() else { panic!("not a host") };
        assert_eq!((host.name(), host.port()), ("fe80::1%eth0", 7000));
    }

    #[test]
    fn what_is_no_address_says_why() {
        for (text, error) in [
            ("", AddressError::Form),
            ("localhost", AddressError::Form),
            ("[::1]", AddressError::Form),
            ("[::1%lo]7000", AddressError::Form),
            ("host:", AddressError::Port),
            ("host:+1", AddressError::Port),
            ("host:65536", AddressError::Port),
            ("[fe80::1%eth0]:x", AddressError::Port),
            (":7000", AddressError::Host),
            ("::1:7000", AddressError::Host),
            ("fe80::1%eth0:7000", AddressError::Host),
            ("[host]:7000", AddressError::Host),
            ("[host%eth0]:7000", AddressError::Host),
            ("[fe80::1%]:7000", AddressError::Host),
            ("ho st:7000", AddressError::Host),
            ("1.2.3:7000", AddressError::Host),
            ("1.2.3.256:7000", AddressError::Host),
            ("@", AddressError::UnixName),
            ("@a%4", AddressError::UnixName),
            ("@a%xy", AddressError::UnixName),
        ] {
            assert_eq!(text.parse::<Address>(), Err(error), "{text:?}");
        }
        assert_eq!(format!("@{}", "a".repeat(108)).parse::<Address>(), Err(AddressError::UnixName));
        assert_eq!(format!("{}:1", "a".repeat(256)).parse::<Address>(), Err(AddressError::Host));
    }

    #[test]
    fn the_flow_label_is_dropped() {
        let address = SocketAddrV6::new(Ipv6Addr::LOCALHOST, 1, 99, 7);
        assert_eq!(Address::from(SocketAddr::from(address)).to_string(), "[::1%7]:1");
    }
}
