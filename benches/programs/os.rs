//! Arrays in files, and the clock of a thread.
#![expect(unsafe_code, reason = "maps files and sets the scheduling class")]
#![expect(clippy::disallowed_methods, reason = "baselines do without the library's wrappers")]

use crate::{Failure, Result};
use std::ops::{Deref, DerefMut};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::Duration;

/// Numbers.
///
/// # Safety
/// All bits zero are a value, and so are all other bits.
pub(crate) unsafe trait Plain: Copy + Default {}

// SAFETY: any bits are a number.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for u64 {}
// SAFETY: as above.
unsafe impl Plain for f64 {}

/// Numbers in memory of the global allocator, or in a mapped file.
pub(crate) enum Array<T: Plain> {
    Owned(Vec<T>),
    Mapped(Mapped<T>),
}

/// A mapping of a file that has no name and no other user.
pub(crate) struct Mapped<T> {
    ptr: *mut T,
    len: usize,
}

// SAFETY: owns what it points to, as a vector does.
unsafe impl<T: Plain + Send> Send for Mapped<T> {}
// SAFETY: as above.
unsafe impl<T: Plain + Sync> Sync for Mapped<T> {}

impl<T: Plain> Array<T> {
    /// Zeros in a new file in this directory.
    pub(crate) fn mapped(dir: &Path, len: usize) -> Result<Array<T>> {
        let file = tempfile::tempfile_in(dir).map_err(Failure::io)?;
        let bytes = (len * size_of::<T>()).max(1);
        file.set_len(bytes as u64).map_err(Failure::io)?;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let (null, fd) = (std::ptr::null_mut(), file.as_raw_fd());
        // SAFETY: a new mapping at an address of the kernel's choice.
        let ptr = unsafe { libc::mmap(null, bytes, access, libc::MAP_SHARED, fd, 0) };
        if ptr == libc::MAP_FAILED {
            return Err(Failure::io(std::io::Error::last_os_error()));
        }
        Ok(Array::Mapped(Mapped { ptr: ptr.cast(), len }))
    }
}

impl<T: Plain> Deref for Array<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Array::Owned(numbers) => numbers,
            // SAFETY: as many numbers are mapped at page-aligned memory that this borrows; a file
            // without a name changes by this mapping alone.
            Array::Mapped(Mapped { ptr, len }) => unsafe { std::slice::from_raw_parts(*ptr, *len) },
        }
    }
}

impl<T: Plain> DerefMut for Array<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Array::Owned(numbers) => numbers,
            // SAFETY: as in `deref`, and borrowed for writing.
            Array::Mapped(Mapped { ptr, len }) => unsafe {
                std::slice::from_raw_parts_mut(*ptr, *len)
            },
        }
    }
}

impl<T> Drop for Mapped<T> {
    fn drop(&mut self) {
        let bytes = (self.len * size_of::<T>()).max(1);
        // SAFETY: mapped by `Array::mapped` with this length, and nobody borrows it any more.
        unsafe { libc::munmap(self.ptr.cast(), bytes) };
    }
}

/// Processor time of one thread, which other threads can look at.
#[derive(Clone, Copy)]
pub(crate) struct ThreadClock(libc::clockid_t);

impl ThreadClock {
    pub(crate) fn of_this() -> ThreadClock {
        let mut clock = 0;
        // SAFETY: takes nothing.
        let this = unsafe { libc::pthread_self() };
        // SAFETY: a thread's own handle is valid, and so is `clock` for the write.
        let error = unsafe { libc::pthread_getcpuclockid(this, &mut clock) };
        assert_eq!(error, 0, "a thread has a clock");
        ThreadClock(clock)
    }

    pub(crate) fn now(self) -> Duration {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `time` is valid for the write.
        unsafe { libc::clock_gettime(self.0, &mut time) };
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    }
}
