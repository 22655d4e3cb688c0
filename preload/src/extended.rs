//! jemalloc's functions beside the malloc family, see `jemalloc(3)`.
//!
//! A program that is linked to jemalloc would else have these from there, and the malloc family from here: a block from
//! `malloc` that it frees by `sdallocx` would end it. `mallctl` stays jemalloc's, and is true of its idle allocator.

#![expect(unsafe_code, reason = "exports functions of C that take its pointers")]

use crate::entry::{self, given};
use libc::{c_int, c_void, size_t};

/// Of jemalloc's flags: the binary logarithm of the alignment, and whether the memory is zeroed. The others name
/// arenas and caches, of which there are none here.
const LOG_ALIGN: c_int = 0x3f;
const ZERO: c_int = 0x40;

fn align_of(flags: c_int) -> usize {
    1 << (flags & LOG_ALIGN)
}

/// `mallocx`.
#[unsafe(no_mangle)]
extern "C" fn mallocx(size: size_t, flags: c_int) -> *mut c_void {
    given(entry::allocate_for(0, size, align_of(flags), flags & ZERO != 0))
}

/// `rallocx`.
///
/// # Safety
/// As there: a block that was not freed.
#[unsafe(no_mangle)]
unsafe extern "C" fn rallocx(block: *mut c_void, size: size_t, flags: c_int) -> *mut c_void {
    let new = mallocx(size, flags);
    if !new.is_null() {
        // SAFETY: as the caller promises.
        let had = unsafe { entry::malloc_usable_size(block) };
        // SAFETY: both have that many bytes, and one is new.
        unsafe { new.copy_from_nonoverlapping(block, had.min(size)) };
        // SAFETY: as the caller promises.
        unsafe { entry::free(block) };
    }
    new
}

/// `xallocx`: no block grows or shrinks in place.
///
/// # Safety
/// As there: a block that was not freed.
#[unsafe(no_mangle)]
unsafe extern "C" fn xallocx(
    block: *mut c_void,
    _size: size_t,
    _extra: size_t,
    _flags: c_int,
) -> size_t {
    // SAFETY: as the caller promises.
    unsafe { entry::malloc_usable_size(block) }
}

/// `sallocx`.
///
/// # Safety
/// As there: a block that was not freed.
#[unsafe(no_mangle)]
unsafe extern "C" fn sallocx(block: *mut c_void, _flags: c_int) -> size_t {
    // SAFETY: as the caller promises.
    unsafe { entry::malloc_usable_size(block) }
}

/// `nallocx`: what a block of this size has at least.
#[unsafe(no_mangle)]
extern "C" fn nallocx(size: size_t, flags: c_int) -> size_t {
    size.checked_next_multiple_of(align_of(flags)).unwrap_or(0)
}

/// `dallocx`.
///
/// # Safety
/// As there: a block that was not freed, and is not used again.
#[unsafe(no_mangle)]
unsafe extern "C" fn dallocx(block: *mut c_void, _flags: c_int) {
    // SAFETY: as the caller promises.
    unsafe { entry::free(block) }
}

/// `sdallocx`.
///
/// # Safety
/// As there: a block of that size that was not freed, and is not used again.
#[unsafe(no_mangle)]
unsafe extern "C" fn sdallocx(block: *mut c_void, _size: size_t, _flags: c_int) {
    // SAFETY: as the caller promises.
    unsafe { entry::free(block) }
}
