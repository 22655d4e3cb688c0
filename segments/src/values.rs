//! The values of one copy of a segment, in the memory of one tier.

#![expect(unsafe_code, reason = "takes in what the tier has copied, drops what freed values hold")]

use crate::error::SegmentError;
use crate::stream::{self, CHUNK};
use crate::sys;
use farheap::allocator_api2::alloc::Allocator;
use farheap::allocator_api2::collections::TryReserveError;
use farheap::allocator_api2::vec::Vec;
use farheap::region::Region;
use farheap::{ByteCount, Far, Local, Placement, Tier};
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::ptr::slice_from_raw_parts_mut;

/// An array that does not grow beyond what it was made for.
pub(super) enum Values<T> {
    Local(Vec<T, Local>),
    Far(Vec<T, Far>),
    Tier(Vec<T, Tier>),
}

impl<T: Copy> Values<T> {
    /// Room for `len` values.
    ///
    /// # Errors
    /// [`SegmentError::NoMemory`].
    pub(super) fn with_capacity(to: Placement, len: usize) -> Result<Values<T>, SegmentError> {
        let reserved = match to {
            Placement::Local => with_capacity_in(len, Local).map(Values::Local),
            Placement::Far => with_capacity_in(len, Far).map(Values::Far),
            Placement::Tier(tier) => with_capacity_in(len, tier).map(Values::Tier),
        };
        let bytes = ByteCount(len.saturating_mul(size_of::<T>()) as u64);
        reserved.map_err(|_| SegmentError::NoMemory { bytes, to })
    }

    pub(super) fn push(&mut self, value: T) {
        match self {
            Values::Local(values) => values.push(value),
            Values::Far(values) => values.push(value),
            Values::Tier(values) => values.push(value),
        }
    }

    pub(super) fn extend(&mut self, more: &[T]) {
        match self {
            Values::Local(values) => values.extend_from_slice(more),
            Values::Far(values) => values.extend_from_slice(more),
            Values::Tier(values) => values.extend_from_slice(more),
        }
    }

    /// How many values more there are up to the next border of a chunk, or beyond it where that is in one.
    pub(super) fn len_to_chunk(&self) -> usize {
        let next = self.as_ptr().wrapping_add(self.len()).addr();
        (CHUNK - next % CHUNK).div_ceil(size_of::<T>().max(1))
    }

    /// Takes the first chunk of `more` in by way of the device, past the memory of the tier, if one begins here and
    /// the tier can do it; returns how many values that were.
    pub(super) fn store_chunk(&mut self, more: &[T], tier: &Region) -> usize {
        match self {
            Values::Local(_) => 0,
            Values::Far(values) => store_chunk(values, more, tier),
            Values::Tier(values) => store_chunk(values, more, tier),
        }
    }

    /// Frees the array and returns its memory to the kernel at once, for migrations are done to make room.
    pub(super) fn free_now(self) {
        match self {
            Values::Local(values) => free_now(values, |ptr, len| {
                // SAFETY: local memory, of values that are freed.
                unsafe { sys::give_back(ptr, len) };
            }),
            Values::Far(values) => free_now(values, discard),
            Values::Tier(values) => free_now(values, discard),
        }
    }
}

fn with_capacity_in<T, A: Allocator>(
    len: usize,
    allocator: A,
) -> Result<Vec<T, A>, TryReserveError> {
    let mut values = Vec::new_in(allocator);
    values.try_reserve_exact(len).map(|()| values)
}

/// Frees a vector, after `forget` has dropped what its memory holds: what the allocator keeps for reuse is the
/// addresses alone.
fn free_now<T: Copy, A: Allocator>(values: Vec<T, A>, forget: impl FnOnce(*const u8, usize)) {
    let mut values = ManuallyDrop::new(values);
    forget(values.as_ptr().cast(), values.capacity() * size_of::<T>());
    // SAFETY: not used again; its elements, whose bytes have changed, are `Copy` and not dropped.
    unsafe { ManuallyDrop::drop(&mut values) };
}

/// Drops what far memory holds whose values are freed.
fn discard(ptr: *const u8, len: usize) {
    if let Some(tier) = stream::tier_of(ptr) {
        // SAFETY: nobody reads the values any more. It fails for ranges of others only.
        let _ = unsafe { tier.region().discard(slice_from_raw_parts_mut(ptr.cast_mut(), len)) };
    }
}

/// See [`Values::store_chunk`].
fn store_chunk<T: Copy, A: Allocator>(values: &mut Vec<T, A>, more: &[T], tier: &Region) -> usize {
    let (len, size) = (values.len(), size_of::<T>());
    let next = values.spare_capacity_mut().as_mut_ptr();
    let is_whole = size > 0 && CHUNK.is_multiple_of(size) && next.addr().is_multiple_of(CHUNK);
    let count = if is_whole { CHUNK / size } else { return 0 };
    if more.len() < count || values.capacity() - len < count {
        return 0;
    }
    // SAFETY: the vector has room for `count` values more at a multiple of a chunk, which it alone uses.
    if !unsafe { tier.store_chunk(next.cast(), &more[..count]) } {
        return 0;
    }
    // SAFETY: that many values more have the bytes of others, of a type that is `Copy`.
    unsafe { values.set_len(len + count) };
    count
}

impl<T> Deref for Values<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        match self {
            Values::Local(values) => values,
            Values::Far(values) => values,
            Values::Tier(values) => values,
        }
    }
}
