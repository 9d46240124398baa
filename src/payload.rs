//! Payloads: what is put, what a get brings, and views.

use crate::element::{self, Element, TypeError};
use crate::endpoint::Shared;
use crate::engine::{Delivery, HeldLease, Storage};
use crate::layout::{DType, Layout, PartLayout};
use crate::sys::{self, OwnedBytes};
use crate::{Buffer, Path};
use core::fmt;
use std::sync::Arc;
use towline_verbs::MappedView;

/// One part of a payload to be put.
#[derive(Debug)]
pub struct Part<'a> {
    pub(crate) name: &'a str,
    pub(crate) dtype: DType,
    pub(crate) shape: &'a [u64],
    pub(crate) data: Data<'a>,
}

#[derive(Debug)]
pub(crate) enum Data<'a> {
    Buffer(Buffer),
    Bytes(&'a [u8]),
}

impl<'a> Part<'a> {
    /// A buffer of the endpoint's own pool: published as it is, without a copy.
    #[must_use]
    pub fn buffer(name: &'a str, dtype: DType, shape: &'a [u64], buffer: Buffer) -> Self {
        Self { name, dtype, shape, data: Data::Buffer(buffer) }
    }

    /// Bytes of the caller's: copied into the pool while whoever waits for them reads behind the copy or in its place. May
    /// be empty.
    #[must_use]
    pub fn bytes(name: &'a str, dtype: DType, shape: &'a [u64], bytes: &'a [u8]) -> Self {
        Self { name, dtype, shape, data: Data::Bytes(bytes) }
    }
}

/// How a payload came.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TransferInfo {
    /// The path that its bytes took.
    pub path: Path,
    /// Why that path.
    pub path_reason: String,
    /// Rails that its bytes were spread over.
    pub rails: u32,
    /// How often the get was tried again.
    pub retries: u32,
    /// Bytes of the payload.
    pub bytes: u64,
    /// Bytes that came by another path than the first choice for that peer.
    pub fallback_bytes: u64,
}

impl TransferInfo {
    fn of(delivery: &Delivery) -> Self {
        Self {
            path: delivery.path,
            path_reason: delivery.reason.clone(),
            rails: delivery.rails,
            retries: delivery.retries,
            bytes: delivery.layout.payload_len(),
            fallback_bytes: delivery.fallback_bytes,
        }
    }
}

/// A received payload. Dropping it gives its memory back.
pub struct Payload {
    layout: Layout,
    offsets: Vec<u64>,
    storage: Storage,
    info: TransferInfo,
}

impl Payload {
    pub(crate) fn new(delivery: Delivery) -> Self {
        let info = TransferInfo::of(&delivery);
        let offsets = delivery.layout.offsets().collect();
        Self { layout: delivery.layout, offsets, storage: delivery.storage, info }
    }

    /// How it came.
    #[must_use]
    pub fn info(&self) -> &TransferInfo {
        &self.info
    }

    /// Its layout.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Number of parts.
    #[must_use]
    pub fn len(&self) -> usize {
        self.layout.parts().len()
    }

    /// Never: a payload has a part at least.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.layout.parts().is_empty()
    }

    /// Its parts, in the order in which they were put.
    pub fn parts(&self) -> impl Iterator<Item = PartRef<'_>> {
        (0..self.len()).filter_map(|index| self.part(index))
    }

    /// The part at `index`.
    #[must_use]
    pub fn part(&self, index: usize) -> Option<PartRef<'_>> {
        let layout = self.layout.parts().get(index)?;
        let start = *self.offsets.get(index)? as usize;
        let bytes = self.all().get(start..start + layout.len as usize)?;
        Some(PartRef { layout, bytes })
    }

    /// The first part called `name`.
    #[must_use]
    pub fn named(&self, name: &str) -> Option<PartRef<'_>> {
        self.layout.parts().iter().position(|part| part.name == name).and_then(|index| self.part(index))
    }

    /// The pool buffer it lies in, each part at its offset of the layout; `None` if it lies in the caller's own memory
    /// or has no bytes. A buffer can be put again without a copy.
    #[must_use]
    pub fn into_buffer(self) -> Option<Buffer> {
        match self.storage {
            Storage::Pool(buffer) => Some(buffer),
            _ => None,
        }
    }

    /// The caller's own memory, if it was given to the get; `None` otherwise.
    #[must_use]
    pub fn into_vec(self) -> Option<Vec<u8>> {
        match self.storage {
            Storage::Own(own) => Some(match OwnedBytes::into_inner(own.0) {
                Ok(bytes) => bytes.into_vec(),
                // A provider's thread is still dropping its handle: the bytes are complete, they are copied instead.
                Err(shared) => shared.as_slice().to_vec(),
            }),
            _ => None,
        }
    }

    fn all(&self) -> &[u8] {
        match &self.storage {
            Storage::Pool(buffer) => buffer.as_slice(),
            Storage::Own(own) => own.0.as_slice(),
            Storage::Empty | Storage::Views(_) => &[],
        }
    }
}

impl fmt::Debug for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Payload").field("parts", &self.layout.parts()).field("info", &self.info).finish_non_exhaustive()
    }
}

/// One part of a received payload.
#[derive(Debug, Clone, Copy)]
pub struct PartRef<'a> {
    layout: &'a PartLayout,
    bytes: &'a [u8],
}

impl<'a> PartRef<'a> {
    /// Name, dtype and shape.
    #[must_use]
    pub fn layout(&self) -> &'a PartLayout {
        self.layout
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Its elements, in the order of its shape's last dimension running fastest.
    ///
    /// # Errors
    /// When it holds another dtype than `T` stands for, or lies at an address that `T` can't be read from.
    pub fn elements<T: Element>(&self) -> Result<&'a [T], TypeError> {
        element::check::<T>(self.layout.dtype)?;
        element::slice_of(self.bytes)
    }
}

/// A read-only view of a payload in its producer's memory, under a lease that ends when this is dropped. No byte was
/// copied.
///
/// The producer promises not to write the pages while the lease lives, but nothing forces it to keep the promise. So
/// bytes are read by copies that stay harmless if it doesn't, and a plain slice is `unsafe`.
pub struct View {
    layout: Layout,
    views: Vec<Option<MappedView>>,
    info: TransferInfo,
    lease: Option<HeldLease>,
    endpoint: Arc<Shared>,
}

impl View {
    pub(crate) fn new(delivery: Delivery, endpoint: Arc<Shared>) -> Self {
        let info = TransferInfo::of(&delivery);
        let views = match delivery.storage {
            Storage::Views(views) => views,
            _ => vec![None; delivery.layout.parts().len()],
        };
        Self { layout: delivery.layout, views, info, lease: delivery.lease, endpoint }
    }

    /// How it came.
    #[must_use]
    pub fn info(&self) -> &TransferInfo {
        &self.info
    }

    /// Its layout.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Its parts, in the order in which they were put.
    pub fn parts(&self) -> impl Iterator<Item = ViewPart<'_>> {
        (0..self.layout.parts().len()).filter_map(|index| self.part(index))
    }

    /// The part at `index`.
    #[must_use]
    pub fn part(&self, index: usize) -> Option<ViewPart<'_>> {
        Some(ViewPart { layout: self.layout.parts().get(index)?, view: self.views.get(index)?.as_ref() })
    }

    /// The first part called `name`.
    #[must_use]
    pub fn named(&self, name: &str) -> Option<ViewPart<'_>> {
        self.layout.parts().iter().position(|part| part.name == name).and_then(|index| self.part(index))
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // The mapping stays; from here on nothing of this view reads it, which is the reader's word that the lease's
        // fence asks for.
        self.views.clear();
        if let Some(lease) = self.lease.take() {
            self.endpoint.release(lease);
        }
    }
}

impl fmt::Debug for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("View").field("parts", &self.layout.parts()).field("info", &self.info).finish_non_exhaustive()
    }
}

/// One part of a view.
#[derive(Debug, Clone, Copy)]
pub struct ViewPart<'a> {
    layout: &'a PartLayout,
    view: Option<&'a MappedView>,
}

impl<'a> ViewPart<'a> {
    /// Name, dtype and shape.
    #[must_use]
    pub fn layout(&self) -> &'a PartLayout {
        self.layout
    }

    /// Copies `out.len()` bytes from byte `offset` of the part; `false`, and nothing is copied, if they do not all lie
    /// within it.
    #[must_use]
    pub fn read(&self, offset: u64, out: &mut [u8]) -> bool {
        match self.view {
            Some(view) => view.read(offset, out).is_ok(),
            None => offset == 0 && out.is_empty(),
        }
    }

    /// All its bytes, copied.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.layout.len as usize];
        let read = self.read(0, &mut bytes);
        debug_assert!(read, "a part is as long as its layout says");
        bytes
    }

    /// Copies `out.len()` elements from element `first` of the part on, in the order of its shape's last dimension
    /// running fastest. A copy is what stays harmless if the producer breaks its promise and writes meanwhile.
    ///
    /// # Errors
    /// When the part holds another dtype than `T` stands for, or not all of these elements lie within it; nothing is
    /// copied then.
    pub fn read_elements<T: Element>(&self, first: u64, out: &mut [T]) -> Result<(), TypeError> {
        element::check::<T>(self.layout.dtype)?;
        let elements = self.layout.len / size_of::<T>() as u64;
        let outside = TypeError::OutOfRange { first, count: out.len() as u64, elements };
        let offset = first.checked_mul(size_of::<T>() as u64).ok_or(outside)?;
        if self.read(offset, element::bytes_of_mut(out)) { Ok(()) } else { Err(outside) }
    }

    /// All its elements, copied.
    ///
    /// # Errors
    /// When the part holds another dtype than `T` stands for.
    pub fn to_elements<T: Element>(&self) -> Result<Vec<T>, TypeError> {
        element::check::<T>(self.layout.dtype)?;
        let mut elements = vec![T::new_zeroed(); self.layout.len as usize / size_of::<T>()];
        self.read_elements(0, &mut elements)?;
        Ok(elements)
    }

    /// Address of its first byte; null if it has none. Valid for reads of its length while the view lives.
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.view.map_or(core::ptr::null(), MappedView::as_ptr)
    }

    /// Its bytes as a plain slice.
    ///
    /// # Safety
    /// The producer keeps its promise: nobody writes these bytes while the slice lives. An endpoint of this crate does
    /// not write them while the view lives; a hostile process can.
    #[allow(unsafe_code)]
    #[must_use]
    pub unsafe fn as_slice(&self) -> &'a [u8] {
        match self.view {
            // SAFETY: passed on to the caller, word for word.
            Some(view) => unsafe { sys::view_bytes(view) },
            None => &[],
        }
    }
}
