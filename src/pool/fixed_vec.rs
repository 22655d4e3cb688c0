//! A vector of bounded length on the stack: what makes room must not allocate.

use std::ops::{Deref, DerefMut};

/// Up to `N` elements.
pub(super) struct FixedVec<T, const N: usize> {
    items: [T; N],
    len: usize,
}

impl<T: Copy, const N: usize> FixedVec<T, N> {
    /// An empty vector; `filler` is what its free places hold.
    pub(super) fn new(filler: T) -> FixedVec<T, N> {
        FixedVec { items: [filler; N], len: 0 }
    }

    pub(super) fn push(&mut self, item: T) {
        self.items[self.len] = item;
        self.len += 1;
    }

    pub(super) fn is_full(&self) -> bool {
        self.len == N
    }

    pub(super) fn clear(&mut self) {
        self.len = 0;
    }
}

impl<T, const N: usize> Deref for FixedVec<T, N> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.items[..self.len]
    }
}

impl<T, const N: usize> DerefMut for FixedVec<T, N> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.items[..self.len]
    }
}
