//! The values of one copy of a segment, in the memory of one tier.

#![expect(unsafe_code, reason = "takes in what the tier has copied, drops what freed values hold")]

use crate::error::SegmentError;
use crate::stream::{self, CHUNK};
use crate::sys;
use farheap::allocator_api2::vec::Vec;
use farheap::region::Region;
use farheap::{ByteCount, Tier};
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::ptr::slice_from_raw_parts_mut;

/// An array that does not grow beyond what it was made for.
pub(super) struct Values<T>(Vec<T, Tier>);

impl<T: Copy> Values<T> {
    /// Room for `len` values.
    ///
    /// # Errors
    /// [`SegmentError::NoMemory`].
    pub(super) fn with_capacity(to: Tier, len: usize) -> Result<Values<T>, SegmentError> {
        let bytes = ByteCount(len.saturating_mul(size_of::<T>()) as u64);
        let mut values = Vec::new_in(to);
        values.try_reserve_exact(len).map_err(|_| SegmentError::NoMemory { bytes, to })?;
        Ok(Values(values))
    }

    pub(super) fn tier(&self) -> Tier {
        *self.0.allocator()
    }

    pub(super) fn push(&mut self, value: T) {
        self.0.push(value);
    }

    pub(super) fn extend(&mut self, more: &[T]) {
        self.0.extend_from_slice(more);
    }

    /// How many values more there are up to the next border of a chunk, or beyond it where that is in one.
    pub(super) fn len_to_chunk(&self) -> usize {
        let next = self.as_ptr().wrapping_add(self.len()).addr();
        (CHUNK - next % CHUNK).div_ceil(size_of::<T>().max(1))
    }

    /// Takes the first chunk of `more` in by way of the device, past the memory of the tier, if one begins here and
    /// the tier can do it; returns how many values that were.
    pub(super) fn store_chunk(&mut self, more: &[T], tier: &Region) -> usize {
        let (len, size) = (self.len(), size_of::<T>());
        let next = self.0.spare_capacity_mut().as_mut_ptr();
        let is_whole = size > 0 && CHUNK.is_multiple_of(size) && next.addr().is_multiple_of(CHUNK);
        let count = if is_whole && self.tier() != Tier::LOCAL { CHUNK / size } else { return 0 };
        if more.len() < count || self.0.capacity() - len < count {
            return 0;
        }
        // SAFETY: the vector has room for `count` values more at a multiple of a chunk, which it alone uses.
        if !unsafe { tier.store_chunk(next.cast(), &more[..count]) } {
            return 0;
        }
        // SAFETY: that many values more have the bytes of others, of a type that is `Copy`.
        unsafe { self.0.set_len(len + count) };
        count
    }

    /// Frees the array and returns its memory to the kernel at once, for migrations are done to make room: what the
    /// allocator keeps for reuse is the addresses alone.
    pub(super) fn free_now(self) {
        let is_local = self.tier() == Tier::LOCAL;
        let mut values = ManuallyDrop::new(self.0);
        let (ptr, len) = (values.as_ptr().cast::<u8>(), values.capacity() * size_of::<T>());
        if is_local {
            // SAFETY: local memory, of values that are freed.
            unsafe { sys::give_back(ptr, len) };
        } else if let Some(tier) = stream::tier_of(ptr) {
            let range = slice_from_raw_parts_mut(ptr.cast_mut(), len);
            // SAFETY: nobody reads the values any more. It fails for ranges of others only.
            let _ = unsafe { tier.region().discard(range) };
        }
        // SAFETY: not used again; its elements, whose bytes have changed, are `Copy` and not dropped.
        unsafe { ManuallyDrop::drop(&mut values) };
    }
}

impl<T> Deref for Values<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        &self.0
    }
}
