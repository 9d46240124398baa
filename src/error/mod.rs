//! What went wrong: the operation, what it was about, the cause, whether a retry can help, and the way out.

mod advice;
mod kind;
#[cfg(test)]
mod tests;

pub use kind::{ErrorKind, Gone};

use crate::element::TypeError;
use core::fmt;
use towline_control::session::SecretError;

/// The result of an operation of an endpoint.
pub type Result<T, E = Error> = core::result::Result<T, E>;

/// A failed operation. Its text is one line that names the operation, what it was about, the cause and the way out:
///
/// ```text
/// get: key `step 7` at 192.0.2.1:7000: the deadline passed while waiting for a payload to be put under the key (check
/// the key and that its producer puts it, or use a later deadline)
/// ```
///
/// `Debug` gives the same line, so that it is also what `unwrap` and a `main` that returns the error show; `{:#?}` gives
/// the fields.
#[derive(Clone, PartialEq, Eq)]
pub struct Error {
    operation: &'static str,
    subject: Option<Box<Subject>>,
    kind: ErrorKind,
}

/// What an operation was about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Subject {
    /// The key, ticket or option.
    pub(crate) what: String,
    /// The peer; empty if there is none.
    pub(crate) peer: String,
}

impl Error {
    pub(crate) const fn new(operation: &'static str, kind: ErrorKind) -> Self {
        Self { operation, subject: None, kind }
    }

    pub(crate) fn os(operation: &'static str, call: &'static str, error: &std::io::Error) -> Self {
        Self::new(operation, ErrorKind::Os { call, errno: error.raw_os_error().unwrap_or(libc::EIO) })
    }

    /// The same error, said to be about `what`.
    pub(crate) fn about(self, what: impl Into<String>) -> Self {
        self.about_subject(Subject { what: what.into(), peer: String::new() })
    }

    /// The same error, said to be about this.
    pub(crate) fn about_subject(mut self, subject: Subject) -> Self {
        self.subject = Some(Box::new(subject));
        self
    }

    /// The operation that failed: `put`, `get`, `alloc`, ...
    #[must_use]
    pub const fn operation(&self) -> &'static str {
        self.operation
    }

    /// Why it failed.
    #[must_use]
    pub const fn kind(&self) -> &ErrorKind {
        &self.kind
    }

    /// Whether the same call can succeed later without a change by the caller.
    #[must_use]
    pub fn can_retry(&self) -> bool {
        self.kind.can_retry()
    }

    /// What the caller can do about it. There is always something today; `None` is left for causes to come.
    #[must_use]
    pub fn way_out(&self) -> Option<&'static str> {
        Some(self.kind.way_out())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cause = self.kind.to_string();
        write!(f, "{}: ", self.operation)?;
        if let Some(subject) = &self.subject {
            // Nothing is named twice.
            if !cause.contains(&subject.what) {
                f.write_str(&subject.what)?;
                if !subject.peer.is_empty() && !cause.contains(&subject.peer) {
                    write!(f, " at {}", subject.peer)?;
                }
                f.write_str(": ")?;
            }
        }
        write!(f, "{cause} ({})", self.kind.way_out())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !f.alternate() {
            return fmt::Display::fmt(self, f);
        }
        let mut debug = f.debug_struct("Error");
        debug.field("operation", &self.operation).field("subject", &self.subject).field("kind", &self.kind).finish()
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.kind {
            ErrorKind::Type(e) => Some(e),
            ErrorKind::Verbs(e) => Some(e),
            _ => None,
        }
    }
}

/// Bytes that a peer or user chose, as one short line: what is no plain text is escaped, what is long is cut.
pub(crate) fn printable(bytes: &[u8]) -> String {
    const LONGEST: usize = 80;
    let mut text = String::new();
    for chunk in bytes.utf8_chunks() {
        text.extend(chunk.valid().chars().flat_map(char::escape_debug));
        text.extend(chunk.invalid().iter().map(|byte| format!("\\x{byte:02x}")));
        if text.chars().count() > LONGEST {
            return text.chars().take(LONGEST).chain("...".chars()).collect();
        }
    }
    text
}

/// So that a function which returns [`Result`] can ask for elements with `?`.
impl From<TypeError> for Error {
    fn from(error: TypeError) -> Self {
        Self::new("elements", ErrorKind::Type(error))
    }
}

/// So that a function which returns [`Result`] can make a [`Secret`](crate::Secret) with `?`.
impl From<SecretError> for Error {
    fn from(error: SecretError) -> Self {
        let why = format!("it has {} bytes", error.len);
        Self::new("secret", ErrorKind::BadOption { option: "secret", why })
    }
}
