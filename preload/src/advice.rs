//! `madvise(2)` and `process_madvise(2)` for far memory: what the program drops reads as zero, also where it has left memory. And
//! `mlockall(2)`, which does not bring all of far memory in.
//!
//! The kernel knows nothing of a page that has left, so that by itself it drops nothing there, and the
//! page comes back as it was.
//!
//! # Invariants
//! 1. What farheap and jemalloc advise goes to the kernel as it is, by the linker: not all of it is done
//!    inside of an allocation as `own` knows it, and a discard that discards again waits for itself.

#![expect(unsafe_code, reason = "exports a function of C that takes its pointers")]

use crate::exec::open;
use crate::own::{enter, keep_errno, set_errno};
use crate::report;
use farheap::{Error, Far, Heap};
use libc::{c_int, c_uint, c_void, iovec, size_t, ssize_t};
use std::ffi::CStr;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::slice;

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

/// `process_madvise(2)`: of this process, each range as by `madvise(2)`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
unsafe extern "C" fn process_madvise(
    process: c_int,
    ranges: *const iovec,
    count: size_t,
    advice: c_int,
    flags: c_uint,
) -> ssize_t {
    let kernel = |ranges: *const iovec, count: size_t| {
        #[expect(clippy::disallowed_methods, reason = "the C library's function is this one")]
        // SAFETY: as the caller promises; the arguments of this call.
        unsafe {
            libc::syscall(libc::SYS_process_madvise, process, ranges, count, advice, flags)
                as ssize_t
        }
    };
    let is_far = |range: &iovec| range.iov_len > 0 && Far::contains(range.iov_base.cast::<u8>());
    if ranges.is_null() || count > libc::UIO_MAXIOV as usize || flags != 0 {
        return kernel(ranges, count);
    }
    // SAFETY: as the caller promises.
    let each = unsafe { slice::from_raw_parts(ranges, count) };
    if !each.iter().any(is_far) || !is_this_process(process) {
        return kernel(ranges, count);
    }
    let mut advised = 0;
    for range in each {
        let is_refused = if is_far(range) {
            // SAFETY: as the caller promises.
            let refused = unsafe { advise(range.iov_base, range.iov_len, advice) };
            refused != 0
        } else {
            kernel(range, 1) < 0
        };
        if is_refused {
            return if advised == 0 { -1 } else { advised };
        }
        advised += range.iov_len as ssize_t;
    }
    advised
}

/// True if a descriptor of a process is that of this one, as far as `/proc` tells.
fn is_this_process(process: c_int) -> bool {
    // PIDFD_SELF and PIDFD_SELF_PROCESS of Linux 6.14.
    const THREAD: c_int = -10_000;
    const PROCESS: c_int = -10_001;
    let _kept = keep_errno();
    let mut text = [0; 256];
    let is_named = write!(&mut text[..], "/proc/self/fdinfo/{process}\0").is_ok();
    let file = CStr::from_bytes_until_nul(&text).ok().filter(|_| is_named).and_then(open);
    let read = file.and_then(|file| file.read_at(&mut text, 0).ok()).unwrap_or(0);
    let pid =
        text[..read].split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"Pid:\t"));
    let pid = pid.and_then(|pid| str::from_utf8(pid).ok()?.parse::<u32>().ok());
    matches!(process, THREAD | PROCESS) || pid == Some(std::process::id())
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
    unsafe { Heap::madvise(std::ptr::slice_from_raw_parts_mut(start, len), advice) }
}

/// Makes a range read as zero. `false`: it is not far memory, or for the kernel to refuse.
///
/// # Safety
/// The program gives up what the range holds.
pub(crate) unsafe fn drop_far(start: *mut u8, len: usize) -> bool {
    // SAFETY: as the caller promises.
    matches!(unsafe { advise_far(start, len, libc::MADV_DONTNEED) }, Ok(true))
}
