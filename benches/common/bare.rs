//! The allocator that farheap is compared with.

#![expect(unsafe_code, reason = "allocates by hand")]

use std::alloc::{GlobalAlloc, Layout};
use tikv_jemallocator::Jemalloc;

/// jemalloc as a program has it by `tikv-jemallocator`. Out of line, as a global allocator always is behind
/// `__rust_alloc`; [`FarHeap`](farheap::FarHeap) is here, too.
pub(crate) struct Bare;

// SAFETY: passes every call on.
unsafe impl GlobalAlloc for Bare {
    #[inline(never)]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller promises.
        unsafe { Jemalloc.alloc(layout) }
    }

    #[inline(never)]
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { Jemalloc.dealloc(ptr, layout) }
    }
}
