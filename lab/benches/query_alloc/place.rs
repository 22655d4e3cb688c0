//! A run in this process, with the allocator that it was started for.
#![expect(unsafe_code, reason = "allocates by hand")]

use crate::Result;
use crate::bare::Bare;
use crate::engine::{self, Load, Seen};
use crate::sides::{Side, with_heap};
use allocator_api2::alloc::Allocator;
use farheap::{ByteCount, Far, Local};
use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::{self, NonNull};

/// What nothing reaches.
const LIMIT: ByteCount = ByteCount::gib(4);

/// Runs the load.
///
/// # Errors
/// [`crate::Failure::Skipped`] without permission for far memory; [`crate::Failure::Broken`] when the library that
/// should serve this process was not loaded.
pub(crate) fn run(side: Side, load: Load) -> Result<Seen> {
    match side {
        Side::Local => with_heap(LIMIT, || engine::run(Placed(Local), load)),
        Side::Far => with_heap(LIMIT, || engine::run(Placed(Far), load)),
        Side::Jemalloc => Ok(engine::run(Bare, load)),
        Side::System | Side::Preloaded(..) => {
            side.check_loaded()?;
            Ok(engine::run(System, load))
        }
    }
}

/// A handle of ours as other allocators are.
struct Placed<A>(A);

// SAFETY: passes every call on to an allocator of the same promises.
unsafe impl<A: Allocator> GlobalAlloc for Placed<A> {
    #[inline(never)]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.0.allocate(layout).map_or(ptr::null_mut(), |block| block.as_ptr().cast())
    }

    #[inline(never)]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.0.allocate_zeroed(layout).map_or(ptr::null_mut(), |block| block.as_ptr().cast())
    }

    #[inline(never)]
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        let ptr = NonNull::new(ptr).expect("no block is at address zero");
        // SAFETY: as the caller promises.
        unsafe { self.0.deallocate(ptr, layout) }
    }
}
