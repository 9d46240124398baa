//! One adapter for each peer. Sizes and places are in granules.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Mutex;
use towline_core::Word;
use towline_core::pool::{BufferPool, Extent, PoolLayout};

pub const GRANULE: u64 = 4096;

/// A peer as the bench drives it, from any thread.
pub trait Pool: Sync {
    type Token: Copy + Send + Default;
    fn make(granules: u64) -> Self;
    fn alloc(&self, granules: u64) -> Option<Self::Token>;
    fn free(&self, token: Self::Token, granules: u64);
    fn place(token: &Self::Token) -> u64;
}

pub struct Towline(BufferPool<Box<[Word]>>);

/// An extent, or none yet.
#[derive(Clone, Copy)]
pub struct Ours(Extent);

impl Default for Ours {
    fn default() -> Self {
        Self(Extent::from_parts(0, 0, 0, 0))
    }
}

impl Pool for Towline {
    type Token = Ours;

    fn make(granules: u64) -> Self {
        let layout = PoolLayout::new(granules * GRANULE, GRANULE).expect("a legal layout");
        let storage = (0..layout.words()).map(|_| Word::default()).collect();
        Self(BufferPool::new(storage, layout).expect("enough storage"))
    }

    fn alloc(&self, granules: u64) -> Option<Ours> {
        self.0.allocate(granules * GRANULE, 1).ok().map(Ours)
    }

    fn free(&self, token: Ours, _: u64) {
        self.0.release(token.0).expect("a live extent");
    }

    fn place(token: &Ours) -> u64 {
        token.0.offset() / GRANULE
    }
}

/// A peer that needs outside locking.
pub trait Raw: Send {
    type Token: Copy + Send + Default;
    fn make(granules: u64) -> Self;
    fn alloc(&mut self, granules: u64) -> Option<Self::Token>;
    fn free(&mut self, token: Self::Token, granules: u64);
    fn place(token: &Self::Token) -> u64;
}

/// Without a lock, for one thread.
pub struct Bare<R>(UnsafeCell<R>);

// SAFETY: the bench gives it to one thread only.
unsafe impl<R> Sync for Bare<R> {}

impl<R: Raw> Pool for Bare<R> {
    type Token = R::Token;

    fn make(granules: u64) -> Self {
        Self(UnsafeCell::new(R::make(granules)))
    }

    fn alloc(&self, granules: u64) -> Option<R::Token> {
        // SAFETY: one thread, and no reference outlives its call.
        unsafe { &mut *self.0.get() }.alloc(granules)
    }

    fn free(&self, token: R::Token, granules: u64) {
        // SAFETY: as above.
        unsafe { &mut *self.0.get() }.free(token, granules);
    }

    fn place(token: &R::Token) -> u64 {
        R::place(token)
    }
}

macro_rules! locked {
    ($name:ident, $mutex:ty, $lock:expr) => {
        pub struct $name<R>($mutex);

        impl<R: Raw> Pool for $name<R> {
            type Token = R::Token;

            fn make(granules: u64) -> Self {
                Self(<$mutex>::new(R::make(granules)))
            }

            fn alloc(&self, granules: u64) -> Option<R::Token> {
                $lock(&self.0).alloc(granules)
            }

            fn free(&self, token: R::Token, granules: u64) {
                $lock(&self.0).free(token, granules);
            }

            fn place(token: &R::Token) -> u64 {
                R::place(token)
            }
        }
    };
}

locked!(StdMutex, Mutex<R>, lock_std);
locked!(ParkingLot, parking_lot::Mutex<R>, parking_lot::Mutex::lock);

fn lock_std<R>(mutex: &Mutex<R>) -> std::sync::MutexGuard<'_, R> {
    mutex.lock().expect("no thread has panicked")
}

pub struct OffsetAllocator(offset_allocator::Allocator<u32>);

#[derive(Clone, Copy, Default)]
pub struct Offset(Option<offset_allocator::Allocation<u32>>);

impl Raw for OffsetAllocator {
    type Token = Offset;

    fn make(granules: u64) -> Self {
        let most = (granules as u32).min(128 * 1024);
        Self(offset_allocator::Allocator::with_max_allocs(granules as u32, most))
    }

    fn alloc(&mut self, granules: u64) -> Option<Offset> {
        self.0.allocate(granules as u32).map(|allocation| Offset(Some(allocation)))
    }

    fn free(&mut self, token: Offset, _: u64) {
        self.0.free(token.0.expect("allocated"));
    }

    fn place(token: &Offset) -> u64 {
        token.0.as_ref().map_or(0, |allocation| u64::from(allocation.offset))
    }
}

/// Memory for those that keep their headers in what they manage, and touched: where it begins, at a multiple of the largest
/// extent, and the length. One, used again by the next pool: only one lives at a time.
fn arena(granules: u64) -> (usize, usize) {
    static ARENA: Mutex<Option<usize>> = Mutex::new(None);
    let len = (granules * GRANULE) as usize;
    let mut made = ARENA.lock().expect("no thread has panicked");
    let arena = made.get_or_insert_with(|| {
        let align = 2048 * GRANULE as usize;
        let bytes = vec![1u8; len + align].leak();
        (bytes.as_ptr() as usize).next_multiple_of(align)
    });
    (*arena, len)
}

/// Rounds every length up to a power of two.
pub struct Buddy {
    heap: buddy_system_allocator::Heap<31>,
    arena: usize,
}

fn memory_layout(granules: u64) -> std::alloc::Layout {
    std::alloc::Layout::from_size_align((granules * GRANULE) as usize, GRANULE as usize).expect("small enough")
}

impl Raw for Buddy {
    type Token = At;

    fn make(granules: u64) -> Self {
        let (arena, len) = arena(granules);
        let mut heap = buddy_system_allocator::Heap::empty();
        // SAFETY: the arena is leaked, `len` bytes long from this place, and no other pool of it lives.
        unsafe { heap.init(arena, len) };
        Self { heap, arena }
    }

    fn alloc(&mut self, granules: u64) -> Option<At> {
        self.heap.alloc(memory_layout(granules)).ok().map(|at| At(at.as_ptr() as usize, self.arena))
    }

    fn free(&mut self, token: At, granules: u64) {
        let at = NonNull::new(token.0 as *mut u8).expect("allocated");
        // SAFETY: allocated by this pool with this layout, and freed once.
        unsafe { self.heap.dealloc(at, memory_layout(granules)) };
    }

    fn place(token: &At) -> u64 {
        (token.0 - token.1) as u64 / GRANULE
    }
}

/// It keeps its headers in the memory that it manages.
pub struct Rlsf {
    tlsf: rlsf::Tlsf<'static, u32, u32, 28, 32>,
    arena: usize,
}

#[derive(Clone, Copy, Default)]
pub struct At(usize, usize);

impl Raw for Rlsf {
    type Token = At;

    fn make(granules: u64) -> Self {
        let (arena, len) = arena(granules);
        let mut tlsf = rlsf::Tlsf::new();
        // SAFETY: the arena is leaked, `len` bytes long from this aligned place, and no other pool of it lives.
        let block = unsafe { std::slice::from_raw_parts_mut(arena as *mut MaybeUninit<u8>, len) };
        tlsf.insert_free_block(block);
        Self { tlsf, arena }
    }

    fn alloc(&mut self, granules: u64) -> Option<At> {
        self.tlsf.allocate(memory_layout(granules)).map(|at| At(at.as_ptr() as usize, self.arena))
    }

    fn free(&mut self, token: At, _: u64) {
        let at = NonNull::new(token.0 as *mut u8).expect("allocated");
        // SAFETY: allocated by this pool with this alignment, and freed once.
        unsafe { self.tlsf.deallocate(at, GRANULE as usize) };
    }

    fn place(token: &At) -> u64 {
        (token.0 - token.1) as u64 / GRANULE
    }
}
