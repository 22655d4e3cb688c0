//! Anonymous memory of the system: zero until it is written, there only where it was touched.
#![expect(unsafe_code, reason = "maps memory, and hands out references into it")]
#![expect(clippy::disallowed_methods, reason = "system calls are made here and nowhere else")]

use farheap::{Error, Result};
use std::ptr::{self, NonNull};

/// A mapping of words, unmapped when dropped.
#[derive(Debug)]
pub(crate) struct WordMapping {
    start: NonNull<u64>,
    bytes: usize,
    /// Bytes that were mapped before `start`, for its alignment.
    before: usize,
    mapped: usize,
}

// SAFETY: plain memory that belongs to the mapping alone; references to it borrow the mapping.
unsafe impl Send for WordMapping {}
// SAFETY: as above: shared references only read.
unsafe impl Sync for WordMapping {}

impl WordMapping {
    /// Maps this number of bytes, a multiple of 8, from a multiple of `align` on, which is a power of two.
    ///
    /// # Errors
    /// [`Error::Os`] when the address space is exhausted.
    pub(crate) fn map(bytes: usize, align: usize) -> Result<WordMapping> {
        let too_long = || Error::BadRange { reason: "length overflows".into() };
        let mapped = bytes.max(1).checked_add(align).ok_or_else(too_long)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let (anywhere, no_file) = (ptr::null_mut::<libc::c_void>(), -1);
        // Not by the C library's function, which gives far memory under `farheap run`; and closed, so that the
        // kernel fills nothing where the process locks all that it maps (`mlockall(2)` with `MCL_FUTURE`).
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            libc::syscall(libc::SYS_mmap, anywhere, mapped, libc::PROT_NONE, flags, no_file, 0)
        };
        let base = ptr::with_exposed_provenance_mut::<libc::c_void>(base as usize);
        if base == libc::MAP_FAILED {
            return Err(refused("mmap"));
        }
        // SAFETY: ends a lock; contents stay.
        unsafe { libc::munlock(base, mapped) };
        // SAFETY: nobody can have touched the range, so nobody relies on its protection.
        if unsafe { libc::mprotect(base, mapped, libc::PROT_READ | libc::PROT_WRITE) } != 0 {
            let error = refused("mprotect");
            // SAFETY: what was just mapped; nobody knows it.
            unsafe { libc::syscall(libc::SYS_munmap, base, mapped) };
            return Err(error);
        }
        let before = base.addr().next_multiple_of(align) - base.addr();
        let start = NonNull::new(base.wrapping_byte_add(before).cast()).expect("not at zero");
        Ok(WordMapping { start, bytes, before, mapped })
    }

    pub(crate) fn addr(&self) -> usize {
        self.start.addr().get()
    }

    pub(crate) fn words(&self) -> &[u64] {
        // SAFETY: the words are mapped, aligned and valid when zero; `&self` is no writer.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes / 8) }
    }

    pub(crate) fn words_mut(&mut self) -> &mut [u64] {
        // SAFETY: as above; `&mut self` is the only access.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes / 8) }
    }
}

/// The kernel's refusal of `call`.
fn refused(call: &'static str) -> Error {
    let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::ENOMEM);
    Error::Os { call, errno }
}

impl Drop for WordMapping {
    fn drop(&mut self) {
        let base = self.start.as_ptr().wrapping_byte_sub(self.before);
        // SAFETY: this mapping's own range, which nothing borrows any more.
        let unmapped = unsafe { libc::syscall(libc::SYS_munmap, base, self.mapped) };
        debug_assert_eq!(unmapped, 0, "a mapping of its own");
    }
}
