//! The allocator that farheap is compared with.

#![expect(unsafe_code, reason = "allocates by hand")]

use std::alloc::{GlobalAlloc, Layout};

/// jemalloc as `tikv-jemallocator` calls it. Out of line, as a global allocator always is behind
/// `__rust_alloc`; [`FarHeap`] is here, too.
pub(crate) struct Bare;

// SAFETY: jemalloc's functions keep the contract; layouts here need no alignment above 16.
unsafe impl GlobalAlloc for Bare {
    #[inline(never)]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: any size is allowed.
        unsafe { tikv_jemalloc_sys::malloc(layout.size()) }.cast()
    }

    #[inline(never)]
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: allocated above with this size.
        unsafe { tikv_jemalloc_sys::sdallocx(ptr.cast(), layout.size(), 0) }
    }
}
