//! Arrays that cost memory only where they were touched.
//!
//! [`LazyArray`] holds per-page state of a region: sized for its whole address space, zero until
//! written, resident in proportion to what was ever used.
#![expect(unsafe_code, reason = "hands out references into an anonymous mapping")]

use crate::base::error::{Error, Result};
use crate::base::sync::{AtomicU32, AtomicU64};
use crate::sys::vm::{HUGE_PAGE, Huge, KERNEL_PAGE, Mapping};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};

/// Types that are valid when all their bytes are zero and that may be shared between threads.
///
/// # Safety
/// The all-zero bit pattern is a valid value, and the type needs no drop.
pub(crate) unsafe trait Zeroed: Sync {}
// SAFETY: zero is a valid integer; atomics have the layout of their integers.
unsafe impl Zeroed for AtomicU64 {}
// SAFETY: as above.
unsafe impl Zeroed for AtomicU32 {}
// SAFETY: zero is a valid integer.
unsafe impl Zeroed for u64 {}
// SAFETY: zero is a valid integer.
unsafe impl Zeroed for u32 {}
// SAFETY: zero is a valid integer.
unsafe impl Zeroed for u8 {}
// SAFETY: an array of valid values.
unsafe impl<T: Zeroed, const N: usize> Zeroed for [T; N] {}

/// A fixed-length array in lazily touched memory.
#[derive(Debug)]
pub(crate) struct LazyArray<T> {
    mapping: Mapping,
    len: usize,
    _owns: PhantomData<T>,
}

impl<T: Zeroed> LazyArray<T> {
    /// Reserves `len` zeroed elements.
    ///
    /// # Errors
    /// [`Error::Os`] when the address space is exhausted.
    pub(crate) fn new(len: usize) -> Result<LazyArray<T>> {
        LazyArray::with(len, KERNEL_PAGE, Huge::No)
    }

    /// As [`new`](Self::new), in huge pages where the system has them: for arrays that are
    /// touched at random, where a miss of the TLB costs as much as one of the cache.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn new_huge(len: usize) -> Result<LazyArray<T>> {
        LazyArray::with(len, HUGE_PAGE, Huge::Yes)
    }

    fn with(len: usize, unit: usize, huge: Huge) -> Result<LazyArray<T>> {
        let bytes = len
            .checked_mul(size_of::<T>())
            .and_then(|bytes| bytes.checked_next_multiple_of(unit))
            .ok_or(Error::BadRange { reason: "array length overflows".into() })?;
        let mapping = Mapping::reserve(bytes.max(unit), unit, huge)?;
        Ok(LazyArray { mapping, len, _owns: PhantomData })
    }

    /// Lets forked children have a copy of the array as it is at the fork, or none.
    ///
    /// # Errors
    /// [`Error::Os`] when the process has too many mappings.
    pub(crate) fn set_inherited(&self, inherited: bool) -> Result<()> {
        self.mapping.set_inherited(inherited)
    }

    /// Gives the memory of a range of elements back, as far as it is whole kernel pages: these read
    /// as zero afterwards. The others stay as they are.
    ///
    /// # Errors
    /// [`Error::Os`] when the kernel refuses; the elements are as they were, or zero.
    pub(crate) fn give_back(&mut self, range: Range<usize>) -> Result<()> {
        // SAFETY: `&mut self` is the only access, and zero is a valid element.
        unsafe { self.give_back_shared(range) }
    }

    /// As [`give_back`](Self::give_back), while others may use other elements.
    ///
    /// # Safety
    /// Nobody writes the elements meanwhile, and zero is what they are to be.
    pub(crate) unsafe fn give_back_shared(&self, range: Range<usize>) -> Result<()> {
        let end =
            if range.end >= self.len { self.mapping.len() } else { range.end * size_of::<T>() };
        let first = (range.start * size_of::<T>()).next_multiple_of(KERNEL_PAGE);
        let len = (end / KERNEL_PAGE * KERNEL_PAGE).saturating_sub(first);
        if len == 0 || cfg!(miri) {
            return Ok(());
        }
        // SAFETY: the pages hold elements of the range only, or lie behind the last; the caller
        // allows them to become zero. No reference says otherwise: `T` is zero, or is changed by
        // its own interior mutability only.
        unsafe { self.mapping.discard(first, len) }
    }
}

impl<T: Zeroed> Deref for LazyArray<T> {
    type Target = [T];
    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: the mapping holds `len` elements, page-aligned; zero is valid for `T`; it lives
        // as long as `self` and is written only through `T`'s own interior mutability.
        unsafe { std::slice::from_raw_parts(self.mapping.as_ptr().cast(), self.len) }
    }
}

impl<T: Zeroed> DerefMut for LazyArray<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`; `&mut self` is the only access.
        unsafe { std::slice::from_raw_parts_mut(self.mapping.as_ptr().cast(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::sync::Ordering;

    #[test]
    #[cfg_attr(miri, ignore = "takes address space by the gigabyte")]
    fn a_huge_array_is_zero_and_writable_anywhere() {
        let array: LazyArray<AtomicU64> = LazyArray::new(1 << 30).expect("8 GiB of address space");
        assert_eq!(array[(1 << 30) - 1].load(Ordering::Relaxed), 0);
        array[1 << 29].store(7, Ordering::Relaxed);
        assert_eq!(array[1 << 29].load(Ordering::Relaxed), 7);
    }

    #[test]
    #[cfg_attr(miri, ignore = "memory is not given back there")]
    fn only_whole_pages_of_a_range_are_given_back() {
        let mut array: LazyArray<u64> = LazyArray::new(1_100).expect("small");
        array.fill(7);
        array.give_back(500..1_030).expect("own memory");
        assert!(array[..512].iter().all(|n| *n == 7), "shares a page with others");
        assert!(array[512..1_024].iter().all(|n| *n == 0));
        assert!(array[1_024..].iter().all(|n| *n == 7));
        array.give_back(1_024..1_100).expect("own memory");
        assert!(array[1_024..].iter().all(|n| *n == 0), "nothing is behind the last");
    }

    #[test]
    fn an_array_is_zero_and_keeps_what_is_written() {
        let mut array: LazyArray<[u32; 3]> = LazyArray::new(1_000).expect("small");
        assert_eq!((array.len(), array[999]), (1_000, [0; 3]));
        array[998] = [1, 2, 3];
        assert_eq!((array[997], array[998], array[999]), ([0; 3], [1, 2, 3], [0; 3]));
    }
}
