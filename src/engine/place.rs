//! Places: where the bytes of a get go.

use super::gets::{OwnBytes, Storage};
use crate::layout::Layout;
use crate::sys::OwnedBytes;
use crate::{Buffer, ErrorKind, Result};
use std::sync::Arc;
use towline_verbs::Memory;

/// Where the bytes of a get go.
#[derive(Debug)]
pub(super) enum Place {
    Pool(Buffer),
    Own(Arc<OwnedBytes>),
}

impl Place {
    /// Puts bytes that came in a message into their places.
    pub(super) fn fill(self, layout: &Layout, bytes: &[u8]) -> Result<Storage, ErrorKind> {
        let mut rest = bytes;
        let mut copies = Vec::with_capacity(layout.parts().len());
        for (part, offset) in layout.parts().iter().zip(layout.offsets()) {
            let Some((head, tail)) = rest.split_at_checked(part.len as usize) else {
                return Err(ErrorKind::LayoutMismatch { what: "the bytes in the grant" });
            };
            copies.push((offset, head));
            rest = tail;
        }
        match self {
            Self::Pool(buffer) => {
                let memory = buffer.pool().memory();
                for (offset, bytes) in copies {
                    memory.write(buffer.offset() + offset, bytes).map_err(ErrorKind::Verbs)?;
                }
                Ok(Storage::Pool(buffer))
            }
            Self::Own(own) => {
                let memory = Memory::from_backing(own.clone());
                for (offset, bytes) in copies {
                    memory.write(offset, bytes).map_err(ErrorKind::Verbs)?;
                }
                Ok(Storage::Own(OwnBytes(own)))
            }
        }
    }

    pub(super) fn into_storage(self) -> Storage {
        match self {
            Self::Pool(buffer) => Storage::Pool(buffer),
            Self::Own(own) => Storage::Own(OwnBytes(own)),
        }
    }

    /// What may hold another payload's bytes is overwritten before anybody sees it (I4).
    pub(super) fn poison(&self) {
        const POISON: [u8; 4096] = [0xdb; 4096];
        let (memory, base, len) = match self {
            Self::Pool(buffer) => (buffer.pool().memory().clone(), buffer.offset(), buffer.len() as u64),
            Self::Own(own) => {
                let memory = Memory::from_backing(own.clone());
                let len = memory.len();
                (memory, 0, len)
            }
        };
        let mut at = 0;
        while at < len {
            let step = (len - at).min(POISON.len() as u64);
            let written = memory.write(base + at, &POISON[..step as usize]);
            debug_assert!(written.is_ok(), "the range is the place's own");
            at += step;
        }
    }
}
