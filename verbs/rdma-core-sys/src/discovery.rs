//! What this machine has: the library, the kernel's part, devices.

use crate::{Error, Library, ibv_device};
use core::ffi::{CStr, c_int};
use core::fmt;
use core::ptr::NonNull;

/// Why there are no devices to use.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unavailable {
    /// There is no `libibverbs.so.1`, or it can't be loaded (a dependency is missing, it is for another processor).
    NoLibrary {
        /// What the loader says.
        reason: String,
    },
    /// The library lacks a function that every supported version has.
    MissingSymbol {
        /// The function.
        symbol: &'static CStr,
        /// The version of it.
        version: &'static CStr,
    },
    /// The library is here, but the running kernel has no RDMA: `ib_uverbs` is not loaded or not built.
    NoKernelSupport,
    /// Library and kernel are ready, and no device is there (or none that an installed provider knows).
    NoDevice,
    /// The devices could not be listed, for another reason.
    NoList(Error),
}

/// The devices found, at least one. The list is freed when it is dropped; devices that were opened stay.
#[derive(Debug)]
pub struct DeviceList<'l> {
    library: &'l Library,
    first: NonNull<*mut ibv_device>,
    len: usize,
}

impl Library {
    /// Lists the devices.
    ///
    /// # Errors
    /// [`Unavailable::NoKernelSupport`], [`Unavailable::NoDevice`], [`Unavailable::NoList`].
    #[doc(alias = "ibv_get_device_list")]
    pub fn devices(&self) -> Result<DeviceList<'_>, Unavailable> {
        let mut len: c_int = 0;
        // SAFETY: `len` is valid for a write; nothing else is asked for.
        let first = unsafe { self.ibv_get_device_list(&raw mut len) }.map_err(|error| match error {
            Error::Errno(libc::ENOSYS) => Unavailable::NoKernelSupport,
            other => Unavailable::NoList(other),
        })?;
        let list = DeviceList { library: self, first, len: usize::try_from(len).unwrap_or(0) };
        if list.is_empty() { Err(Unavailable::NoDevice) } else { Ok(list) }
    }
}

impl DeviceList<'_> {
    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none; never, for a list that [`Library::devices`] returned.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Device number `index`, in the library's order. It is valid while this list lives, and as long as it is open.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<NonNull<ibv_device>> {
        if index >= self.len {
            return None;
        }
        // SAFETY: the library says that the list has `len` entries, and `index` is less.
        let entry = unsafe { self.first.add(index) };
        // SAFETY: as above.
        NonNull::new(unsafe { entry.read() })
    }

    /// The name of device number `index` (`mlx5_0`, `rxe0`).
    #[must_use]
    #[doc(alias = "ibv_get_device_name")]
    pub fn name(&self, index: usize) -> Option<String> {
        let device = self.get(index)?;
        // SAFETY: a device of this list, which is alive.
        let name = unsafe { self.library.ibv_get_device_name(device.as_ptr()) };
        if name.is_null() {
            return None;
        }
        // SAFETY: the library returns a C string that lives as long as the device.
        Some(unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
    }
}

impl Drop for DeviceList<'_> {
    fn drop(&mut self) {
        // SAFETY: the list came from this library and is freed once.
        unsafe { self.library.ibv_free_device_list(self.first.as_ptr()) };
    }
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoLibrary { reason } => {
                write!(f, "libibverbs.so.1 can't be loaded: {reason}; install rdma-core (libibverbs1)")
            }
            Self::MissingSymbol { symbol, version } => {
                let (symbol, version) = (symbol.to_string_lossy(), version.to_string_lossy());
                write!(f, "libibverbs.so.1 has no {symbol}@{version}; install rdma-core 24 or newer")
            }
            Self::NoKernelSupport => {
                write!(f, "libibverbs.so.1 is here, but this kernel has no RDMA; load ib_uverbs (modprobe ib_uverbs)")
            }
            Self::NoDevice => {
                write!(
                    f,
                    "libibverbs.so.1 and the kernel are ready, but there is no RDMA device with a provider for it"
                )
            }
            Self::NoList(error) => write!(f, "libibverbs.so.1 is here, but its devices can't be listed: {error}"),
        }
    }
}

impl std::error::Error for Unavailable {}
