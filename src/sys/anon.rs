//! Anonymous memory of our own: zero until written, untouched pages cost nothing.
//!
//! [`AnonMapping`] backs the memory store and the slot map's bitmaps; it is never far memory and
//! never comes from the Rust heap. See `mmap(2)`, `madvise(2)`.

#![expect(unsafe_code, reason = "maps and unmaps memory")]

use crate::sys::file::Errno;
use std::ops::Range;
use std::ptr::NonNull;

/// A private, readable and writable mapping; unmapped when dropped.
#[derive(Debug)]
pub(crate) struct AnonMapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is plain memory that this value owns; nothing ties it to a thread.
unsafe impl Send for AnonMapping {}
// SAFETY: shared access hands out a raw pointer only; who dereferences it answers for races.
unsafe impl Sync for AnonMapping {}

impl AnonMapping {
    /// Maps `len` bytes of zeros without reserving memory or swap for them.
    pub(crate) fn new(len: usize) -> Result<AnonMapping, Errno> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing (mmap(2)).
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(Errno::last());
        }
        let start = NonNull::new(start.cast()).expect("mmap maps nothing at address 0");
        Ok(AnonMapping { start, len })
    }

    /// Keeps the mapping out of children: their memory does not grow by a copy of ours.
    pub(crate) fn dont_fork(&self) -> Result<(), Errno> {
        self.advise(0..self.len, libc::MADV_DONTFORK)
    }

    /// Keeps the mapping out of core dumps.
    pub(crate) fn dont_dump(&self) -> Result<(), Errno> {
        self.advise(0..self.len, libc::MADV_DONTDUMP)
    }

    /// Gives the memory of `range` (whole pages) back; it reads as zero afterwards.
    pub(crate) fn discard(&self, range: Range<usize>) -> Result<(), Errno> {
        self.advise(range, libc::MADV_DONTNEED)
    }

    /// First byte of the mapping.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Bytes mapped.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The mapping as words.
    pub(crate) fn words_mut(&mut self) -> &mut [u64] {
        let words = self.len / size_of::<u64>();
        // SAFETY:
        // - The mapping is `len` bytes long, zero-filled by the kernel (any bytes are a `u64`) and
        //   aligned to a page.
        // - The exclusive borrow of its owner covers every safe way to reach it.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().cast(), words) }
    }

    fn advise(&self, range: Range<usize>, advice: libc::c_int) -> Result<(), Errno> {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        // SAFETY: the start is within the mapping, checked above.
        let start = unsafe { self.start.as_ptr().add(range.start) };
        // SAFETY: the range is ours, checked above; both kinds of advice that callers in this
        // module pass leave the mapping in place.
        let result = unsafe { libc::madvise(start.cast(), range.len(), advice) };
        Errno::check(result).map(drop)
    }
}

impl Drop for AnonMapping {
    fn drop(&mut self) {
        // SAFETY: this value owns exactly this mapping, and nobody can use it any more.
        let result = unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert_eq!(result, 0, "munmap of an own mapping: {}", Errno::last());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn discarded_memory_reads_as_zero() {
        let mut mapping = AnonMapping::new(8192).expect("two pages");
        mapping.words_mut().fill(7);
        mapping.discard(4096..8192).expect("discard");
        assert_eq!(mapping.words_mut()[511..513], [7, 0]);
    }
}
