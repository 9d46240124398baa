//! The values of options, as people write them.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use towline_control::address::Address;

/// The path asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Path {
    /// The best that there is
    Auto,
    /// Shared memory
    Shm,
    /// TCP
    Tcp,
    /// RDMA through libibverbs
    Rdma,
}

/// The way of use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Mode {
    /// Mapped in place on the same host: no byte is copied
    View,
    /// From the producer's pool to the consumer's
    ZeroCopy,
    /// From bytes outside the producer's pool to bytes outside the consumer's
    Copy,
    /// 64 tensors of unequal size in scattered buffers
    Tree,
    /// The same tensors through a general serializer: the naive way
    Serialized,
    /// From device memory to device memory (not available in this build)
    Gpu,
}

/// How much is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Verify {
    /// Nothing
    None,
    /// Layout, lengths, first and last block of each part, and 64 blocks of 4 KiB at seeded places
    Sampled,
    /// Every byte
    Full,
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Rdma => "rdma",
        })
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::View => "view",
            Self::ZeroCopy => "zero-copy",
            Self::Copy => "copy",
            Self::Tree => "tree",
            Self::Serialized => "serialized",
            Self::Gpu => "gpu",
        })
    }
}

/// Where the JSON goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Json {
    /// Standard output, which then has nothing else.
    Standard,
    /// This file.
    File(PathBuf),
}

impl FromStr for Json {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "" => Err("the name of a file, or - for standard output".into()),
            "-" => Ok(Self::Standard),
            name => Ok(Self::File(name.into())),
        }
    }
}

/// A number of bytes, written as people do: with KiB, MiB or GiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Size(pub(crate) u64);

const UNITS: [(&str, u64); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

impl FromStr for Size {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let help = "a number of bytes, or with a unit: 4KiB, 190MiB, 1GiB";
        let text = text.trim();
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let number: u64 = number.parse().map_err(|_| help.to_string())?;
        let scale = match unit.trim() {
            "" | "B" => 1,
            unit => {
                let known = UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit));
                known.ok_or_else(|| format!("the unit {unit} is none of KiB, MiB, GiB: 4KiB is 4096 bytes"))?.1
            }
        };
        match number.checked_mul(scale) {
            Some(0) => Err("a payload has at least one byte".into()),
            Some(bytes) if bytes <= 1 << 40 => Ok(Self(bytes)),
            _ => Err("more than 1 TiB".into()),
        }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS.iter().find(|(_, scale)| self.0 >= *scale && self.0.is_multiple_of(*scale)) {
            Some((name, scale)) => write!(f, "{} {name}", self.0 / scale),
            None => write!(f, "{} B", self.0),
        }
    }
}

/// Reads a number of at least 1.
pub(super) fn at_least_one(text: &str) -> Result<u64, String> {
    text.parse().ok().filter(|number| *number > 0).ok_or_else(|| "expected a whole number of at least 1".to_string())
}

/// Reads the name of an RDMA device, with or without a port and the index of a GID.
pub(super) fn port_name(text: &str) -> Result<String, String> {
    let named = text.parse::<towline_verbs::ibv::PortName>();
    named.map(|name| name.to_string()).map_err(|why| format!("expected NAME, NAME:PORT or NAME:PORT:GID_INDEX: {why}"))
}

/// Reads an address in the network.
pub(super) fn host_port(text: &str) -> Result<String, String> {
    match text.parse() {
        Ok(Address::Ip(_) | Address::Host(_)) => Ok(text.to_string()),
        _ => Err("expected HOST:PORT, such as 192.0.2.1:7000, [2001:db8::1]:7000 or name:7000".to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_written() {
        let size = |text: &str| text.parse::<Size>().map(|s| s.0);
        assert_eq!(size("4KiB"), Ok(4096));
        assert_eq!(size("190MiB"), Ok(190 << 20));
        assert_eq!(size("1GiB"), Ok(1 << 30));
        assert_eq!(size("1 gib"), Ok(1 << 30));
        assert_eq!(size("12345"), Ok(12345));
        assert_eq!(size("7B"), Ok(7));
        for wrong in ["", "0", "0KiB", "-1", "x", "KiB", "1MB", "1.5GiB", "99999999999999999999", "99999999999GiB"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
        assert!(size("1MB").unwrap_err().contains("MiB"));
    }

    #[test]
    fn sizes_are_written_as_read() {
        for (bytes, text) in [(4096, "4 KiB"), (190 << 20, "190 MiB"), (1 << 30, "1 GiB"), (1000, "1000 B")] {
            assert_eq!(Size(bytes).to_string(), text);
        }
    }

    #[test]
    fn addresses_have_a_host_and_a_port() {
        for right in ["127.0.0.1:0", "[::1]:7000", "name.example:7000", "[fe80::1%eth0]:7000"] {
            assert_eq!(host_port(right).as_deref(), Ok(right));
        }
        for wrong in ["", "foo", "7000", ":7000", "127.0.0.1", "a:b", "a:99999", "::1:7000", "@name"] {
            assert!(host_port(wrong).is_err_and(|why| why.contains("HOST:PORT")), "{wrong}");
        }
        assert_eq!(at_least_one("1"), Ok(1));
        for wrong in ["0", "-1", "x", ""] {
            assert!(at_least_one(wrong).is_err(), "{wrong}");
        }
    }
}
