//! `madvise(2)` for far memory: what the program drops reads as zero, also where it has left memory. And
//! `mlockall(2)`, which does not bring all of far memory in.
//!
//! The kernel knows nothing of a page that has left, so that by itself it drops nothing there, and the
//! page comes back as it was.
//!
//! # Invariants
//! 1. What farheap and jemalloc advise goes to the kernel as it is, by the linker: not all of it is done
//!    inside of an allocation as `own` knows it, and a discard that discards again waits for itself.

#![expect(unsafe_code, reason = "exports a function of C that takes its pointers")]

use crate::own::{enter, set_errno};
use crate::report;
use farheap::{ByteCount, Error, Far, Heap};
use libc::{c_int, c_void, size_t};

/// `madvise(2)`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
unsafe extern "C" fn madvise(start: *mut c_void, len: size_t, advice: c_int) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { advise(start, len, advice) }
}

/// `madvise(2)`, by a name that the linker leaves alone.
///
/// # Safety
/// As there.
unsafe fn advise(start: *mut c_void, len: size_t, advice: c_int) -> c_int {
    // SAFETY: as the caller promises.
    match unsafe { advise_far(start.cast(), len, advice) } {
        Ok(true) => 0,
        Err(Error::Unsupported { .. }) => {
            if enter().is_some() {
                report::say(&format!("madvise({advice}) of far memory is not supported: EINVAL"));
            }
            set_errno(libc::EINVAL);
            -1
        }
        // SAFETY: as the caller promises. (What cannot be dropped is for the kernel to refuse.)
        Ok(false) | Err(_) => unsafe { kernel_madvise(start, len, advice) },
    }
}

/// `madvise(2)` itself: for this library, by the linker (`build.rs`), and for what is not far.
///
/// # Safety
/// As there.
#[unsafe(export_name = "__wrap_madvise")]
pub(crate) unsafe extern "C" fn kernel_madvise(
    start: *mut c_void,
    len: size_t,
    advice: c_int,
) -> c_int {
    #[expect(clippy::disallowed_methods, reason = "the function of that name is this library's")]
    // SAFETY: as the caller promises; the arguments of this call.
    unsafe {
        libc::syscall(libc::SYS_madvise, start, len, advice) as c_int
    }
}

/// `mlockall(2)`: locks memory when it is touched. By itself the call would touch all of the address space that far memory
/// is given from, 1 TiB, and so would each later `mmap`.
#[unsafe(no_mangle)]
extern "C" fn mlockall(flags: c_int) -> c_int {
    if flags & libc::MCL_ONFAULT == 0 && enter().is_some() {
        report::say(
            "the program locks all of its memory (mlockall): far memory leaves all the same",
        );
    }
    #[expect(clippy::disallowed_methods, reason = "the C library's function is this one")]
    // SAFETY: locks memory, changes nothing; takes no pointers.
    unsafe {
        libc::syscall(libc::SYS_mlockall, flags | libc::MCL_ONFAULT) as c_int
    }
}

/// Follows advice for far memory, see [`Heap::madvise`]. `false`: it is for the kernel.
///
/// # Safety
/// As for `madvise(2)`.
unsafe fn advise_far(start: *mut u8, len: usize, advice: c_int) -> farheap::Result<bool> {
    if len == 0 || !Far::contains(start) {
        return Ok(false);
    }
    let Some(_inside) = enter() else { return Ok(false) };
    // SAFETY: as the caller promises.
    unsafe { Heap::madvise(start, ByteCount(len as u64), advice) }
}

/// Makes a range read as zero. `false`: it is not far memory, or for the kernel to refuse.
///
/// # Safety
/// The program gives up what the range holds.
pub(crate) unsafe fn drop_far(start: *mut u8, len: usize) -> bool {
    // SAFETY: as the caller promises.
    matches!(unsafe { advise_far(start, len, libc::MADV_DONTNEED) }, Ok(true))
}
