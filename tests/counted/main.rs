//! Tests for which the program's allocations are counted: by the system's allocator, which is the global one.

#![expect(unsafe_code, reason = "counts allocations")]

#[path = "../common/mod.rs"]
mod common;
mod restart;
mod transfers;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes allocated and not freed.
static ALLOCATED: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

fn bytes_allocated() -> u64 {
    ALLOCATED.load(Ordering::Relaxed)
}

fn allocations_of_this_thread() -> u64 {
    ALLOCATIONS.get()
}

struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

// SAFETY: all calls are passed on as they are.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: as the caller promises.
        let ptr = unsafe { System.alloc(layout) };
        if !ptr.is_null() {
            ALLOCATED.fetch_add(layout.size() as u64, Ordering::Relaxed);
        }
        ptr
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: as the caller promises; `alloc` had it from the same allocator.
        unsafe { System.dealloc(ptr, layout) };
    }
}
