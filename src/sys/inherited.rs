//! Anonymous memory that a forked child inherits, as it does the C library's heap. Uses nothing of
//! the crate: tests compile it in together with the heap.

#![expect(unsafe_code, reason = "maps and unmaps address space")]

use nix::errno::Errno;
use nix::sys::mman::{ProtFlags, mprotect, munlock, munmap};
use std::ptr::NonNull;

/// Maps `len` zeros at a multiple of `align`. See `mmap(2)`.
///
/// It is not locked although the process may lock all that it maps (`mlockall(2)` with `MCL_FUTURE`): the kernel would fill
/// it at once, and a region has a TiB. What cannot be read is not filled.
///
/// # Panics
/// When the sum of the two overflows.
pub(crate) fn map(len: usize, align: usize) -> nix::Result<NonNull<u8>> {
    let base = map_closed(len, align)?;
    open(base, len).inspect_err(|_| {
        // SAFETY: what was just mapped; nobody knows it.
        unsafe { unmap(base.addr().get(), len) };
    })?;
    Ok(base)
}

/// As [`map`], but nothing of it can be touched until it is [opened](open).
pub(crate) fn map_closed(len: usize, align: usize) -> nix::Result<NonNull<u8>> {
    let padded = len.checked_add(align).expect("the length of a mapping");
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let (anywhere, no_file) = (std::ptr::null_mut::<libc::c_void>(), -1);
    // Not by the C library's function: under `farheap run` it gives far memory, which has a userfaultfd already.
    // SAFETY: a new private anonymous mapping at an address of the kernel's choice touches no
    // existing memory.
    let start = unsafe {
        libc::syscall(libc::SYS_mmap, anywhere, padded, libc::PROT_NONE, flags, no_file, 0)
    };
    let start = NonNull::new(Errno::result(start)? as *mut libc::c_void);
    let start = start.expect("the kernel never maps address zero");
    // SAFETY: ends a lock; contents stay.
    let _ = unsafe { munlock(start, padded) };
    let start = start.as_ptr() as usize;
    let base = start.next_multiple_of(align);
    // SAFETY: what was just mapped too much; nobody knows it.
    unsafe { unmap(start, base - start) };
    // SAFETY: as above.
    unsafe { unmap(base + len, start + padded - (base + len)) };
    Ok(NonNull::new(base as *mut u8).expect("the kernel never maps address zero"))
}

/// Makes a part of a range from [`map_closed`] readable and writable. See `mprotect(2)`.
pub(crate) fn open(start: NonNull<u8>, len: usize) -> nix::Result<()> {
    // Else the kernel fills what is locked as it becomes writable, here and now.
    // SAFETY: ends a lock; contents stay.
    let _ = unsafe { munlock(start.cast(), len) };
    // SAFETY: nobody can have touched the range, so nobody relies on its protection.
    unsafe { mprotect(start.cast(), len, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE) }
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
