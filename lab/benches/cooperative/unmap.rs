//! What the kernel takes to take pages back, and nothing else: what no pool is faster than whose pages leave
//! one by one, or all at once.
#![expect(unsafe_code, reason = "maps memory and gives it back")]
#![expect(clippy::disallowed_methods, reason = "baselines do without the library's wrappers")]

use std::io;
use std::ptr;
use std::time::{Duration, Instant};

pub(crate) const PAGE: usize = 4096;

/// The time to give `bytes` of touched pages back in calls of `piece` bytes, each behind as many that stay;
/// both whole numbers of pages.
///
/// # Errors
/// Those of mmap(2) and madvise(2).
pub(crate) fn give_back(bytes: usize, piece: usize) -> io::Result<Duration> {
    let len = 2 * bytes;
    let (access, kind) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at a place of the kernel's choice.
    let start = unsafe { libc::mmap(ptr::null_mut(), len, access, kind, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let start = start.cast::<u8>();
    advise(start, len, libc::MADV_NOHUGEPAGE)?;
    for at in (0..len).step_by(PAGE) {
        // SAFETY: within the mapping, which nobody else knows.
        unsafe { start.wrapping_add(at).write_volatile(1) };
    }
    let began = Instant::now();
    for at in (0..len).step_by(2 * piece) {
        advise(start.wrapping_add(at), piece, libc::MADV_DONTNEED)?;
    }
    let took = began.elapsed();
    // SAFETY: mapped above, and not used after this.
    unsafe { libc::munmap(start.cast(), len) };
    Ok(took)
}

fn advise(start: *mut u8, len: usize, advice: i32) -> io::Result<()> {
    // SAFETY: the range is part of the mapping that `give_back` has made for itself; what is in it may go.
    match unsafe { libc::madvise(start.cast(), len, advice) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
