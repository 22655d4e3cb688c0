//! Bytes for direct I/O that leave no trace in the process's memory.
//!
//! The C library keeps more freed memory for itself once it was given a large block back: after a
//! buffer of 1 MiB on its heap, up to 2 MiB stay resident that no limit counts (`mallopt(3)`,
//! `M_TRIM_THRESHOLD`). A mapping of its own goes back to the kernel whole.

#![expect(unsafe_code, reason = "sees a mapping as a slice")]

use crate::base::error::Result;
use crate::sys::vm::{Huge, KERNEL_PAGE, Mapping};
use std::ops::{Deref, DerefMut};

/// Zeroed bytes at a multiple of a kernel page.
pub(crate) struct Buffer {
    mapping: Mapping,
    len: usize,
}

impl Buffer {
    /// # Errors
    /// [`Error::Os`](crate::Error::Os) when the kernel refuses the mapping.
    pub(crate) fn new(len: usize) -> Result<Buffer> {
        let whole = len.max(1).next_multiple_of(KERNEL_PAGE);
        Ok(Buffer { mapping: Mapping::reserve(whole, KERNEL_PAGE, Huge::No)?, len })
    }

    /// Forgets all bytes from `len` on.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping is at least `len` readable bytes, zero at first, and nobody else has
        // its address.
        unsafe { std::slice::from_raw_parts(self.mapping.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and writable.
        unsafe { std::slice::from_raw_parts_mut(self.mapping.as_ptr(), self.len) }
    }
}
