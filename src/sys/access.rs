//! Memory whose protection the program has chosen: given up all the same; and the effects of its
//! advice. Uses `vm`; used by what does `madvise(2)` for the program.

#![expect(unsafe_code, reason = "changes protections, and drops memory that the program gives up")]

use super::refused;
use super::vm::{HUGE_PAGE, KERNEL_PAGE, READ_WRITE, madvise};
use crate::base::error::{Error, Result};
use linux_raw_sys::general as kernel;
use nix::sys::mman::{ProtFlags, mprotect};
use std::ffi::c_void;
use std::ptr::NonNull;

/// Drops what kernel pages hold that a forked child has inherited, whatever their protection, which stays as
/// it is: they read as zero.
///
/// Pages that have left memory are not dropped by the kernel, and the child's thread may take pages out and bring them in
/// meanwhile: so it is looked at afterwards. What cannot be dropped, because it is locked, is filled with zeros. A page that
/// the length covers in part counts whole.
///
/// # Errors
/// [`Error::Os`] when one is not mapped, or its protection cannot be changed.
///
/// # Safety
/// Nobody needs what the range holds.
pub(crate) unsafe fn drop_inherited(start: usize, len: usize) -> Result<()> {
    /// Each time the page would have to leave between a read and the call that follows it.
    const TRIES_MAX: u32 = 16;
    with_access(start, len, |place, len| {
        for _ in 0..TRIES_MAX {
            // SAFETY: as the caller promises.
            if unsafe { madvise(place.cast(), len, libc::MADV_DONTNEED) }.is_err() {
                break;
            }
            let mut words = (0..len / size_of::<u64>()).map(|at| {
                // SAFETY: in bounds, and readable at the moment; others may write there, so that it is volatile.
                unsafe { place.cast::<u64>().as_ptr().wrapping_add(at).read_volatile() }
            });
            if words.all(|word| word == 0) {
                return;
            }
        }
        // SAFETY: these pages can be written at the moment, and nobody needs their content.
        unsafe { place.write_bytes(0, len) };
    })
}

/// Calls `act` with parts of a range, in kernel pages, that can be read and written meanwhile, whatever their
/// protection, which stays as it is.
fn with_access(start: usize, len: usize, mut act: impl FnMut(NonNull<u8>, usize)) -> Result<()> {
    if !start.is_multiple_of(KERNEL_PAGE) {
        return Err(Error::BadRange { reason: "does not begin at a multiple of 4 KiB".into() });
    }
    let unmapped = || Error::Os { call: "madvise", errno: libc::ENOMEM };
    let end = start.checked_add(len).and_then(|end| end.checked_next_multiple_of(KERNEL_PAGE));
    let end = end.ok_or_else(unmapped)?;
    let mut at = start;
    while at < end {
        let place = NonNull::new(at as *mut c_void).ok_or_else(unmapped)?;
        let mut len = HUGE_PAGE.min(end - at);
        // Tells by the way whether they may be accessed (5.14), as reading the list below would.
        // SAFETY: gives the pages memory, and changes nothing of what they hold.
        if unsafe { madvise(place, len, libc::MADV_POPULATE_WRITE) }.is_ok() {
            act(place.cast(), len);
        } else {
            let (until, before) = protection(at).ok_or_else(unmapped)?;
            len = len.min(until - at);
            // SAFETY: the pages can be written for the time of the two calls.
            unsafe { mprotect(place, len, READ_WRITE) }.map_err(refused("mprotect"))?;
            act(place.cast(), len);
            // SAFETY: as it was.
            unsafe { mprotect(place, len, before) }.map_err(refused("mprotect"))?;
        }
        at += len;
    }
    Ok(())
}

/// Where the mapping at an address ends, and its protection, by `proc_pid_maps(5)`.
fn protection(addr: usize) -> Option<(usize, ProtFlags)> {
    // (By the thread: the process's has none once its first thread has ended.)
    let text = std::fs::read_to_string("/proc/thread-self/maps").ok()?;
    let (end, flags) = text.lines().find_map(|line| {
        let (start, rest) = line.split_once('-')?;
        let (end, flags) = rest.split_once(' ')?;
        let [start, end] = [start, end].map(|number| usize::from_str_radix(number, 16));
        let (start, end) = (start.ok()?, end.ok()?);
        (start..end).contains(&addr).then_some((end, flags))
    })?;
    let all = [ProtFlags::PROT_READ, ProtFlags::PROT_WRITE, ProtFlags::PROT_EXEC];
    let flags = flags.bytes().zip(all).filter(|(is, _)| *is != b'-').map(|(_, flag)| flag);
    Some((end, flags.collect()))
}

/// Effects of advice of `madvise(2)` on far memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Advised {
    /// The content is given up.
    Dropped,
    /// None: the kernel's mappings of far memory have to be in children, all or none.
    Ignored,
    /// The content stays, so that the kernel can follow it.
    Kept,
    /// Not known.
    Unknown,
}

impl Advised {
    pub(crate) fn by(advice: i32) -> Advised {
        match advice {
            libc::MADV_DONTNEED | libc::MADV_FREE => Advised::Dropped,
            advice if advice == kernel::MADV_DONTNEED_LOCKED as i32 => Advised::Dropped,
            libc::MADV_DONTFORK | libc::MADV_DOFORK => Advised::Ignored,
            libc::MADV_NORMAL..=libc::MADV_WILLNEED
            | libc::MADV_REMOVE // Refused for anonymous memory; what the program has mapped over far memory is its own.
            | libc::MADV_MERGEABLE..=libc::MADV_POPULATE_WRITE => Advised::Kept,
            advice if advice == kernel::MADV_COLLAPSE as i32 => Advised::Kept,
            _ => Advised::Unknown,
        }
    }
}

const _: () = assert!(
    libc::MADV_MERGEABLE == 12 && libc::MADV_POPULATE_WRITE == 23,
    "what lies between is listed"
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_that_is_not_known_to_keep_content_is_not_passed_on() {
        // To 25 they have numbers in a row; MADV_GUARD_INSTALL and MADV_GUARD_REMOVE are 102 and 103.
        let kept = |advice: &i32| Advised::by(*advice) == Advised::Kept;
        let all: Vec<i32> = (-1..200).filter(kept).collect();
        let known: Vec<i32> = (0..=3).chain([9]).chain(12..=23).chain([25]).collect();
        assert_eq!(all, known);
        assert_eq!(Advised::by(24), Advised::Dropped);
        assert_eq!([102, 103, 26, i32::MAX].map(Advised::by), [Advised::Unknown; 4]);
    }
}
