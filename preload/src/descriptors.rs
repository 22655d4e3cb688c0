//! `close(2)` and its like: the program does not close farheap's descriptors, and does not choose their numbers.
//!
//! Daemons close all descriptors that they do not know (`closefrom(3)`), and shells choose numbers (`exec 3<file`).
//! With the last descriptor of its userfaultfd far memory that had left would read as zero. So these functions
//! say that the descriptor is not open, or leave it out. What calls the kernel itself is not seen.

#![expect(unsafe_code, reason = "exports functions of C")]
#![expect(clippy::disallowed_methods, reason = "the C library's functions are these")]

use crate::own::{enter, set_errno};
use crate::report;
use farheap::region::Region;
use libc::{c_int, c_long, c_uint};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// Farheap's descriptors are numbered from here on, or from half of what the process may have: programs choose
/// lower ones.
const NUMBER_MIN: RawFd = 512;

/// Flags of `close_range(2)`.
const UNSHARE: c_uint = 2;
const CLOEXEC: c_uint = 4;

/// Result of a system call, as the C library passes it on.
fn result(returned: c_long) -> c_int {
    returned as c_int
}

/// Makes the kernel enlarge the table of descriptors for farheap's now, where there is one thread: later it
/// would keep the thread that opens one waiting for all processors (18 ms).
pub(crate) fn make_room() {
    drop(nothing().and_then(|nothing| copy(&nothing, number_min())));
}

/// Keeps low numbers from being used until it is dropped: the kernel gives out the lowest that is free.
pub(crate) fn keep_low_numbers() -> Vec<OwnedFd> {
    let end = number_min();
    let mut kept = Vec::from_iter(nothing());
    while let Some(next) = kept.first().and_then(|nothing| copy(nothing, 0)) {
        if next.as_raw_fd() >= end {
            break;
        }
        kept.push(next);
    }
    kept
}

fn number_min() -> RawFd {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: there is room for the answer.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    RawFd::try_from(limit.rlim_cur / 2).unwrap_or(NUMBER_MIN).min(NUMBER_MIN)
}

/// A descriptor of no file, for which nothing needs to be mounted.
fn nothing() -> Option<OwnedFd> {
    // SAFETY: takes no pointers.
    owned(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) })
}

/// A copy of a descriptor, numbered from `least` on.
fn copy(fd: &OwnedFd, least: RawFd) -> Option<OwnedFd> {
    // SAFETY: takes no pointers.
    owned(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, least) })
}

/// Descriptor that a system call has just opened.
fn owned(fd: c_int) -> Option<OwnedFd> {
    // SAFETY: nobody else owns a descriptor that was just made.
    (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// `close(2)`.
#[unsafe(no_mangle)]
extern "C" fn close(fd: c_int) -> c_int {
    if Region::owns_descriptor(fd) {
        return refused(libc::EBADF);
    }
    kernel_close(fd)
}

/// `close(2)` itself: for this library, by the linker, and for what is the program's.
#[unsafe(export_name = "__wrap_close")]
extern "C" fn kernel_close(fd: c_int) -> c_int {
    // SAFETY: takes no pointers.
    result(unsafe { libc::syscall(libc::SYS_close, fd) })
}

/// `close_range(2)`.
#[unsafe(no_mangle)]
extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    let call = |first: c_uint, last: c_uint, flags: c_uint| {
        // SAFETY: takes no pointers.
        result(unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) })
    };
    let (mut from, mut flags) = (first, flags as c_uint);
    // Farheap's are closed by `exec` anyway.
    if first <= last && flags & CLOEXEC == 0 {
        let ends = first..=last.min(OWN_MAX as c_uint);
        for own in ends.filter(|fd| Region::owns_descriptor(*fd as RawFd)) {
            if own > from && call(from, own - 1, flags) != 0 {
                return -1;
            }
            if own > from {
                flags &= !UNSHARE; // It was done.
            }
            from = own + 1;
        }
        if from > last {
            return 0;
        }
    }
    call(from, last, flags)
}

/// The highest number that a descriptor of farheap's can have and is known to have.
const OWN_MAX: RawFd = (1 << 16) - 1;

/// `closefrom(3)`.
#[unsafe(no_mangle)]
extern "C" fn closefrom(first: c_int) {
    let first = first.max(0) as c_uint;
    if close_range(first, c_uint::MAX, 0) != 0 {
        // SAFETY: takes no pointers.
        let end = unsafe { libc::sysconf(libc::_SC_OPEN_MAX) };
        (first as c_int..c_int::try_from(end).unwrap_or(OWN_MAX)).for_each(|fd| {
            close(fd);
        });
    }
}

/// `dup2(2)`.
#[unsafe(no_mangle)]
extern "C" fn dup2(old: c_int, new: c_int) -> c_int {
    if Region::owns_descriptor(new) && old != new {
        return taken(new);
    }
    // SAFETY: takes no pointers.
    result(unsafe { libc::syscall(libc::SYS_dup2, old, new) })
}

/// `dup3(2)`.
#[unsafe(no_mangle)]
extern "C" fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int {
    if Region::owns_descriptor(new) && old != new {
        return taken(new);
    }
    // SAFETY: takes no pointers.
    result(unsafe { libc::syscall(libc::SYS_dup3, old, new, flags) })
}

fn refused(errno: c_int) -> c_int {
    set_errno(errno);
    -1
}

/// The program wants to have a number that is farheap's.
fn taken(fd: c_int) -> c_int {
    static TOLD: AtomicBool = AtomicBool::new(false);
    if !TOLD.swap(true, Ordering::Relaxed) {
        let _inside = enter();
        report::say(&format!("descriptor {fd} is farheap's: the program cannot have this number"));
    }
    refused(libc::EBUSY)
}
