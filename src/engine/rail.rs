//! Rails: devices with what the engine needs on them.

use crate::Path;
use towline_verbs::{Access, CompletionQueue, Device, Memory, MemoryRegion, ProtectionDomain};

/// A device that payloads travel by, with the objects that the engine uses on it.
#[derive(Debug)]
pub struct Rail {
    pub(crate) path: Path,
    pub(crate) device: Device,
    pub(crate) pd: ProtectionDomain,
    pub(crate) cq: CompletionQueue,
    pub(crate) pool: MemoryRegion,
}

impl Rail {
    /// Opens what is needed on `device`, and registers the pool with it: peers may read it, our own reads may fill it,
    /// nobody may write it from outside (I14).
    ///
    /// # Errors
    /// What the device says.
    pub fn new(path: Path, device: Device, pool: &Memory) -> towline_verbs::Result<Self> {
        let capabilities = device.info().capabilities;
        let pd = device.alloc_pd()?;
        let cq = device.create_cq(capabilities.max_cqe)?;
        let mut access = Access::LOCAL_WRITE | Access::REMOTE_READ;
        if capabilities.scoped_keys {
            access |= Access::MW_BIND;
        }
        let pool = pd.register(pool.clone(), access)?;
        Ok(Self { path, device, pd, cq, pool })
    }
}
