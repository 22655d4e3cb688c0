//! Anonymous memory that a forked child inherits, as it does the C library's heap. Uses nothing of
//! the crate: tests compile it in together with the heap.

#![expect(unsafe_code, reason = "maps and unmaps address space")]

use nix::errno::Errno;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, mprotect, munlock, munmap};
use std::num::NonZeroUsize;
use std::ptr::NonNull;

/// Maps `len` zeros at a multiple of `align`. See `mmap(2)`.
///
/// It is not locked although the process may lock all that it maps (`mlockall(2)` with `MCL_FUTURE`): the kernel would fill
/// it at once, and a region has a TiB. What cannot be read is not filled.
///
/// # Panics
/// When the sum of the two overflows.
pub(crate) fn map(len: usize, align: usize) -> nix::Result<NonNull<u8>> {
    let padded = len.checked_add(align).expect("the length of a mapping");
    let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
    let bytes = NonZeroUsize::new(padded).ok_or(Errno::EINVAL)?;
    // SAFETY: a new private anonymous mapping at an address of the kernel's choice touches no
    // existing memory.
    let start = unsafe { mmap_anonymous(None, bytes, ProtFlags::PROT_NONE, flags) }?;
    // SAFETY: ends a lock; contents stay.
    let _ = unsafe { munlock(start, padded) };
    // SAFETY: nobody knows the range yet.
    let opened = unsafe { mprotect(start, padded, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE) };
    let start = start.as_ptr() as usize;
    if let Err(refused) = opened {
        // SAFETY: what was just mapped; nobody knows it.
        unsafe { unmap(start, padded) };
        return Err(refused);
    }
    let base = start.next_multiple_of(align);
    // SAFETY: what was just mapped too much; nobody knows it.
    unsafe { unmap(start, base - start) };
    // SAFETY: as above.
    unsafe { unmap(base + len, start + padded - (base + len)) };
    Ok(NonNull::new(base as *mut u8).expect("the kernel never maps address zero"))
}

/// Unmaps `len` bytes at `start`, of a range from [`map`]. See `munmap(2)`.
///
/// # Safety
/// Nobody uses them any more.
pub(crate) unsafe fn unmap(start: usize, len: usize) {
    let start = NonNull::new(start as *mut _).expect("the kernel never maps address zero");
    if len > 0 && cfg!(not(miri)) {
        // SAFETY: as the caller promises.
        let _ = unsafe { munmap(start, len) };
    }
}
