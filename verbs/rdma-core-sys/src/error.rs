//! What a verb answers, and the five ways in which the library says it.

use core::ffi::c_int;
use core::fmt;
use core::ptr::NonNull;

/// Why a verb failed. Three different answers, since three different things help.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Error {
    /// The library, the provider or the kernel said no, with this error number.
    Errno(c_int),
    /// The libibverbs of this machine is too old: it lacks this function. A newer rdma-core helps.
    NoSymbol(&'static str),
    /// The device, or its provider, has no such operation. Another device helps.
    NoOperation(&'static str),
}

impl Error {
    /// The error number; what lacks something is `EOPNOTSUPP`, as the header's own functions have it.
    #[must_use]
    pub const fn errno(self) -> c_int {
        match self {
            Self::Errno(errno) => errno,
            Self::NoSymbol(_) | Self::NoOperation(_) => libc::EOPNOTSUPP,
        }
    }

    /// This thread's `errno`, `EIO` if it is 0: for a call that failed without saying why.
    #[must_use]
    pub fn last() -> Self {
        match std::io::Error::last_os_error().raw_os_error() {
            None | Some(0) => Self::Errno(libc::EIO),
            Some(errno) => Self::Errno(errno),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Errno(errno) => write!(f, "{}", std::io::Error::from_raw_os_error(*errno)),
            Self::NoSymbol(name) => write!(f, "the installed libibverbs is too old: it has no {name}"),
            Self::NoOperation(name) => write!(f, "this device has no operation {name}"),
        }
    }
}

impl std::error::Error for Error {}

/// NULL and `errno` (`ibv_create_qp`, `ibv_reg_mr`, `ibv_open_device`, …).
///
/// # Errors
/// `errno` for NULL.
pub(crate) fn null<T>(pointer: *mut T) -> Result<NonNull<T>, Error> {
    NonNull::new(pointer).ok_or_else(Error::last)
}

/// The error number as the return value (`ibv_modify_qp`, `ibv_post_send`, `ibv_dereg_mr`, …). Some providers return it
/// negated, or -1 and `errno`; both are understood.
///
/// # Errors
/// The number.
pub(crate) fn errno(rc: c_int) -> Result<(), Error> {
    match rc {
        0 => Ok(()),
        -1 => Err(Error::last()),
        ..0 => Err(Error::Errno(rc.saturating_neg())),
        _ => Err(Error::Errno(rc)),
    }
}

/// -1 and `errno` (`ibv_query_gid`, `ibv_get_cq_event`, …); other values are results.
///
/// # Errors
/// `errno` for a negative value.
pub(crate) fn minus_one(rc: c_int) -> Result<c_int, Error> {
    if rc < 0 { Err(Error::last()) } else { Ok(rc) }
}

/// A count, or a negated error number (`_ibv_query_gid_table`).
///
/// # Errors
/// The number.
pub(crate) fn count(rc: isize) -> Result<usize, Error> {
    usize::try_from(rc).map_err(|_| Error::Errno(c_int::try_from(rc.saturating_neg()).unwrap_or(libc::EIO)))
}

/// A count, or a negative value that means nothing further (`ibv_poll_cq`).
///
/// # Errors
/// [`Error::Errno`] with `EIO`.
pub(crate) fn polled(rc: c_int) -> Result<usize, Error> {
    usize::try_from(rc).map_err(|_| Error::Errno(libc::EIO))
}

/// The value is the answer (`ibv_wc_status_str`, functions that return nothing).
pub(crate) fn plain<T>(value: T) -> T {
    value
}

/// The value is the answer, of a function that may be missing.
pub(crate) fn plain_ok<T>(value: T) -> Result<T, Error> {
    Ok(value)
}

/// NULL means no, and says nothing in `errno` (`ibv_qp_to_qp_ex`).
pub(crate) fn maybe<T>(pointer: *mut T) -> Result<Option<NonNull<T>>, Error> {
    Ok(NonNull::new(pointer))
}
