//! Anonymous memory that a forked child inherits, as it does the C library's heap. Uses nothing of
//! the crate: tests compile it in together with the heap.

#![expect(unsafe_code, reason = "maps and unmaps address space")]

use std::ptr::NonNull;

/// Maps `len` zeros at a multiple of `align`; `None`, with `errno` set, when the kernel refuses.
/// See `mmap(2)`.
///
/// # Panics
/// When the sum of the two overflows.
pub(crate) fn map(len: usize, align: usize) -> Option<NonNull<u8>> {
    let padded = len.checked_add(align).expect("the length of a mapping");
    // SAFETY: a new private anonymous mapping at an address of the kernel's choice touches no
    // existing memory.
    let raw = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            padded,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if raw == libc::MAP_FAILED {
        return None;
    }
    let start = raw as usize;
    let base = start.next_multiple_of(align);
    // SAFETY: what was just mapped too much; nobody knows it.
    unsafe { unmap(start, base - start) };
    // SAFETY: as above.
    unsafe { unmap(base + len, start + padded - (base + len)) };
    Some(NonNull::new(base as *mut u8).expect("the kernel never maps address zero"))
}

/// Unmaps `len` bytes at `start`, of a range from [`map`]. See `munmap(2)`.
///
/// # Safety
/// Nobody uses them any more.
pub(crate) unsafe fn unmap(start: usize, len: usize) {
    if len > 0 && cfg!(not(miri)) {
        // SAFETY: as the caller promises.
        unsafe { libc::munmap(start as *mut _, len) };
    }
}
