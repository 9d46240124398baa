//! A libibverbs of fakes in this process: every function is there, and answers what the test wants.

use crate::{__VERBS_ABI_IS_EXTENDED, library};
use crate::{Library, Plain, Unavailable, ibv_context, ibv_cq, ibv_mw, ibv_pd, ibv_qp, ibv_srq, verbs_context, zeroed};
use core::cell::Cell;
use core::ffi::c_int;
use core::ptr;

thread_local! {
    /// What this thread's fakes return, and what they leave in `errno`.
    static ANSWER: Cell<(i64, c_int)> = const { Cell::new((0, 0)) };
}

/// Sets this thread's `errno`.
pub(crate) fn set_errno(errno: c_int) {
    // SAFETY: the call has no precondition.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: this thread's own.
    unsafe { place.write(errno) };
}

/// What the fakes of this thread are to return, and to leave in `errno`.
pub(crate) fn set_answer(value: i64, errno: c_int) {
    ANSWER.set((value, errno));
}

/// A type that fakes return.
pub(crate) trait Answer {
    fn from(value: i64) -> Self;
}

macro_rules! integers {
    ($($ty:ty)+) => {
        $(impl Answer for $ty {
            fn from(value: i64) -> Self {
                value as $ty
            }
        })+
    };
}
integers!(c_int u32 u64 isize);

impl Answer for () {
    fn from(_: i64) {}
}

impl<T> Answer for *mut T {
    fn from(value: i64) -> Self {
        ptr::without_provenance_mut(value as usize)
    }
}

impl<T> Answer for *const T {
    fn from(value: i64) -> Self {
        ptr::without_provenance(value as usize)
    }
}

/// Gives the answer.
pub(crate) fn answer<T: Answer>() -> T {
    let (value, errno) = ANSWER.get();
    set_errno(errno);
    T::from(value)
}

/// The table of fakes, without the function `missing`.
pub(crate) fn library_without(missing: &str) -> Result<Library, Unavailable> {
    let lookup = |symbol: &core::ffi::CStr, _: &core::ffi::CStr| match symbol.to_str() {
        Ok(name) if name != missing => library::fakes::find(name),
        _ => ptr::null_mut(),
    };
    // SAFETY: each fake was declared with the signature of the function that it stands for.
    unsafe { Library::resolve(lookup) }
}

/// The whole table of fakes.
pub(crate) fn library() -> Library {
    library_without("").unwrap()
}

/// An open device of which nothing is there but the tables.
pub(crate) struct FakeContext {
    table: *mut verbs_context,
}

impl FakeContext {
    /// A context within a `verbs_context` as this crate declares it, every operation empty.
    pub(crate) fn new() -> Self {
        let mut table = Box::new(zeroed::<verbs_context>());
        table.sz = size_of::<verbs_context>();
        table.context.abi_compat = ptr::without_provenance_mut(__VERBS_ABI_IS_EXTENDED);
        Self { table: Box::into_raw(table) }
    }

    /// The tables, to be filled in.
    pub(crate) fn table(&mut self) -> &mut verbs_context {
        // SAFETY: allocated by `new`, and borrowed for as long as `self`.
        unsafe { &mut *self.table }
    }

    /// What `ibv_open_device` would return.
    pub(crate) fn context(&self) -> *mut ibv_context {
        // SAFETY: a field of an allocation that is alive.
        unsafe { &raw mut (*self.table).context }
    }
}

impl Drop for FakeContext {
    fn drop(&mut self) {
        // SAFETY: made by `Box::into_raw` in `new`, once.
        drop(unsafe { Box::from_raw(self.table) });
    }
}

/// An object of a context.
pub(crate) trait OfContext: Plain {
    fn context(&mut self) -> &mut *mut ibv_context;
}

macro_rules! of_context {
    ($($ty:ident)+) => {
        $(impl OfContext for $ty {
            fn context(&mut self) -> &mut *mut ibv_context {
                &mut self.context
            }
        })+
    };
}
of_context!(ibv_cq ibv_qp ibv_srq ibv_pd ibv_mw);

/// An object of `context` of which nothing else is filled in.
pub(crate) fn object<T: OfContext>(context: &FakeContext) -> T {
    let mut object = zeroed::<T>();
    *object.context() = context.context();
    object
}
