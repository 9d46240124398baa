//! Paths: how the bytes of a payload travel, and which ways are allowed.

use core::fmt;

/// How the bytes of a payload travelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Path {
    /// Both endpoints are in one process: memory shared without another process. [`Shm`](Self::Shm) alone does not allow
    /// it, and is never used there.
    Direct,
    /// Memory shared between two processes of one host.
    Shm,
    /// RDMA.
    Rdma,
    /// TCP.
    Tcp,
}

impl Path {
    /// Its name, as in completions, tables and options.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Shm => "shm",
            Self::Rdma => "rdma",
            Self::Tcp => "tcp",
        }
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Which paths an endpoint may use. What is not allowed is an error, never a fallback.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Paths(u8);

impl Paths {
    /// All there are.
    pub const ALL: Self = Self(0b1111);
    /// None.
    pub const NONE: Self = Self(0);

    /// Only `path`.
    #[must_use]
    pub const fn only(path: Path) -> Self {
        Self(1 << path as u8)
    }

    /// These and `path`.
    #[must_use]
    pub const fn and(self, path: Path) -> Self {
        Self(self.0 | 1 << path as u8)
    }

    /// These without `path`.
    #[must_use]
    pub const fn except(self, path: Path) -> Self {
        Self(self.0 & !(1 << path as u8))
    }

    /// Whether `path` is one of them.
    #[must_use]
    pub const fn allow(self, path: Path) -> bool {
        self.0 & 1 << path as u8 != 0
    }
}

impl Default for Paths {
    fn default() -> Self {
        Self::ALL
    }
}

impl fmt::Display for Paths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut first = true;
        for path in [Path::Direct, Path::Shm, Path::Rdma, Path::Tcp] {
            if self.allow(path) {
                if !first {
                    f.write_str(", ")?;
                }
                first = false;
                f.write_str(path.name())?;
            }
        }
        if first { f.write_str("none") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_of_paths_are_named_and_tested() {
        assert_eq!(Paths::ALL.to_string(), "direct, shm, rdma, tcp");
        assert_eq!(Paths::NONE.to_string(), "none");
        let paths = Paths::only(Path::Tcp).and(Path::Shm);
        assert!(paths.allow(Path::Tcp) && paths.allow(Path::Shm) && !paths.allow(Path::Direct));
        assert_eq!(paths.except(Path::Tcp).to_string(), "shm");
    }
}
