//! Address space: anonymous mappings.

#![expect(unsafe_code, reason = "maps and unmaps address space")]

use crate::base::error::{Error, Result};
use crate::base::units::ByteCount;
use std::ptr::{self, NonNull};

/// Maps `bytes` of anonymous memory that reads as zero and takes RAM only where it is written.
/// The range is nobody else's until it is handed to [`release`].
///
/// # Errors
/// [`Error::Os`] when the kernel has no such range or may not overcommit it (mmap(2)).
pub(crate) fn reserve_zeroed(bytes: ByteCount) -> Result<NonNull<u8>> {
    // Miri knows neither the flag nor the advice below; both only save memory.
    let lazily = if cfg!(miri) { 0 } else { libc::MAP_NORESERVE };
    // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
    let base = unsafe {
        libc::mmap(
            ptr::null_mut(),
            bytes.as_usize(),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | lazily,
            -1,
            0,
        )
    };
    if base == libc::MAP_FAILED {
        return Err(last_error("mmap"));
    }
    if !cfg!(miri) {
        // A huge page would be filled for one touched word. Only advice: kernels without
        // transparent huge pages refuse it with EINVAL, and then there is nothing to avoid.
        // SAFETY: the range was mapped above; the advice does not change what it holds.
        unsafe { libc::madvise(base, bytes.as_usize(), libc::MADV_NOHUGEPAGE) };
    }
    Ok(NonNull::new(base.cast()).expect("mmap returned a mapping, which is never at null"))
}

/// Unmaps a range of [`reserve_zeroed`].
///
/// # Safety
/// `base` and `bytes` are those of one `reserve_zeroed`, not released before, and nobody uses
/// the range any more.
pub(crate) unsafe fn release(base: NonNull<u8>, bytes: ByteCount) {
    // SAFETY: the whole of a mapping of ours that, by this function's contract, nobody uses.
    let result = unsafe { libc::munmap(base.as_ptr().cast(), bytes.as_usize()) };
    assert_eq!(result, 0, "munmap of {bytes} at {base:p}: {}", last_error("munmap"));
}

/// The calling thread's `errno` as an error of `call`.
fn last_error(call: &'static str) -> Error {
    let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
    Error::Os { call, errno }
}
