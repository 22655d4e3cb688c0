//! Arrays sized for a whole region that take RAM only where they are written.
//!
//! [`LazyArray`] is a zeroed mapping seen as a slice; an untouched stretch costs page-table
//! entries at most. Uses `sys::vm`; used by the eviction policies.
//!
//! # Invariants
//! 1. `base` is a live mapping of at least `len` elements that only this array refers to.
//! 2. Every element is all-zero or was written as a `T`.

#![expect(unsafe_code, reason = "sees a mapping as a slice")]

use crate::base::error::{Error, Result};
use crate::base::units::{ByteCount, PageCount};
use crate::sys::vm;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::slice;

/// Plain data whose all-zero bytes are a valid value.
///
/// # Safety
/// All-zero bytes are a valid value of the type, and its alignment is at most 4,096.
pub(crate) unsafe trait Zeroable: Copy {}

// SAFETY: an integer; zero is a value of it.
unsafe impl Zeroable for u8 {}
// SAFETY: an integer; zero is a value of it.
unsafe impl Zeroable for u32 {}
// SAFETY: an integer; zero is a value of it.
unsafe impl Zeroable for u64 {}

/// A slice of zeroes whose memory arrives on first write.
pub(crate) struct LazyArray<T: Zeroable> {
    base: NonNull<T>,
    len: usize,
    bytes: ByteCount,
}

impl<T: Zeroable> LazyArray<T> {
    /// Maps an array with an element for each of `pages`, all zero.
    ///
    /// # Errors
    /// [`Error::BadRange`] when the array does not fit into the address space, [`Error::Os`] when
    /// the kernel refuses the mapping.
    pub(crate) fn new(pages: PageCount) -> Result<LazyArray<T>> {
        let size = (pages.get().max(1))
            .checked_mul(size_of::<T>() as u64)
            .filter(|&size| size <= isize::MAX as u64)
            .ok_or(Error::BadRange { reason: "an array of this many pages overflows" })?;
        let bytes = ByteCount(size);
        let base = vm::reserve_zeroed(bytes)?.cast();
        Ok(LazyArray { base, len: pages.as_usize(), bytes })
    }
}

impl<T: Zeroable> Deref for LazyArray<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `len` valid elements (invariants 1 and 2), aligned because a mapping starts at
        // a page and `Zeroable` bounds the alignment; only `&mut self` writes them.
        unsafe { slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl<T: Zeroable> DerefMut for LazyArray<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`; `&mut self` makes this the only reference.
        unsafe { slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

impl<T: Zeroable> Drop for LazyArray<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`, released once; no slice outlives `self`.
        unsafe { vm::release(self.base.cast(), self.bytes) }
    }
}

impl<T: Zeroable> fmt::Debug for LazyArray<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LazyArray({} elements)", self.len)
    }
}

// SAFETY: owns its mapping like a `Box<[T]>`; which thread uses or unmaps it does not matter.
unsafe impl<T: Zeroable + Send> Send for LazyArray<T> {}
// SAFETY: `&LazyArray` gives nothing but `&[T]`.
unsafe impl<T: Zeroable + Sync> Sync for LazyArray<T> {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_array_reads_as_zero_and_keeps_what_is_written() {
        let mut array = LazyArray::<u32>::new(PageCount(10_000)).expect("40 kB can be mapped");
        assert!(array.iter().all(|&element| element == 0));
        array[9_999] = 7;
        assert_eq!((array[9_998], array[9_999]), (0, 7));
    }

    #[test]
    fn an_array_of_no_elements_is_an_empty_slice() {
        let array = LazyArray::<u64>::new(PageCount(0)).expect("one page can be mapped");
        assert!(array.is_empty());
    }

    #[test]
    fn an_array_larger_than_the_address_space_is_an_error() {
        let error = LazyArray::<u64>::new(PageCount(u64::MAX)).expect_err("2^67 bytes");
        assert!(matches!(error, Error::BadRange { .. }), "{error}");
    }

    #[test]
    #[cfg_attr(miri, ignore = "reads /proc")]
    fn untouched_elements_take_no_memory() {
        let resident_kib = || {
            let status = std::fs::read_to_string("/proc/self/smaps_rollup").expect("Linux");
            let line = status.lines().find(|line| line.starts_with("Rss:")).expect("has Rss");
            line.split_whitespace().nth(1).and_then(|n| n.parse::<u64>().ok()).expect("kB")
        };
        let before_kib = resident_kib();
        let mut array = LazyArray::<u64>::new(PageCount(1 << 28)).expect("2 GiB lazily");
        array[1 << 27] = 1;
        let grown_kib = resident_kib().saturating_sub(before_kib);
        assert!(grown_kib < 64 << 10, "{grown_kib} KiB for one element (other tests included)");
    }
}
