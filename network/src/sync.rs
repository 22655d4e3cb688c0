//! Atomics, which models replace.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

/// Atomic zeros, which take no memory until they are changed: as many as an export has blocks.
#[cfg(not(loom))]
pub(crate) use bytemuck::zeroed_slice_box as zeros;
#[cfg(loom)]
pub(crate) fn zeros<T: Default>(count: usize) -> Box<[T]> {
    (0..count).map(|_| T::default()).collect()
}
