//! The values of one copy of a segment, in the memory of one tier.

use super::error::SegmentError;
use crate::base::units::ByteCount;
use crate::heap::{self, Far, Local, Placement, Tier};
use allocator_api2::alloc::Allocator;
use allocator_api2::collections::TryReserveError;
use allocator_api2::vec::Vec;
use std::ops::Deref;

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

    /// Frees the array and returns its memory to the kernel at once, for migrations are done to make room.
    pub(super) fn free_now(self) {
        match self {
            Values::Local(values) => heap::free_now(values),
            Values::Far(values) => heap::free_now(values),
            Values::Tier(values) => heap::free_now(values),
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
