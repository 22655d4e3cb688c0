//! Leaves: sorted pairs that fill a page, and how they were used.

#![expect(unsafe_code, reason = "makes pairs in memory that it is given")]

use crate::pairs::{Pairs, Shape};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A leaf, as the directory knows it.
#[derive(Debug)]
pub(super) struct Leaf<K, V> {
    /// The pairs, and how often they were used, halved now and then.
    pairs: Pairs<K, V, AtomicU32>,
    /// When it was used last, in uses of the map's leaves; zero: never.
    used_at: AtomicU64,
}

impl<K, V> Leaf<K, V> {
    /// Makes an empty leaf.
    ///
    /// # Safety
    /// The memory is valid for the layout of the shape that all calls give, and the leaf's own.
    pub(super) unsafe fn create(memory: NonNull<u8>) -> Leaf<K, V> {
        // SAFETY: promised by the caller.
        let pairs = unsafe { Pairs::create(memory, AtomicU32::new(0)) };
        Leaf { pairs, used_at: AtomicU64::new(0) }
    }

    /// Notes a use at a time.
    pub(super) fn warm(&self, now: u64) {
        // Relaxed, here and below: a statistic; a lost count does no harm.
        self.extra.store(self.heat().saturating_add(1), Ordering::Relaxed);
        self.stamp(now);
    }

    /// Notes that it was changed at a time, which does not say that it will be looked at.
    pub(super) fn stamp(&self, now: u64) {
        self.used_at.store(now, Ordering::Relaxed);
    }

    /// When it was used last; zero: never.
    pub(super) fn used_at(&self) -> u64 {
        self.used_at.load(Ordering::Relaxed)
    }

    /// Takes over that another leaf, of which it holds pairs now, was used.
    pub(super) fn inherit(&self, other: &Leaf<K, V>) {
        self.used_at.store(self.used_at().max(other.used_at()), Ordering::Relaxed);
    }

    pub(super) fn heat(&self) -> u32 {
        self.extra.load(Ordering::Relaxed)
    }

    pub(super) fn cool(&self) {
        self.extra.store(self.heat() / 2, Ordering::Relaxed);
    }

    /// Moves the pairs from `at` on to the end of another leaf.
    pub(super) fn move_tail(&mut self, shape: Shape, at: usize, to: &mut Leaf<K, V>) {
        to.inherit(self);
        self.pairs.move_tail(shape, at, &mut to.pairs);
    }
}

impl<K, V> Deref for Leaf<K, V> {
    type Target = Pairs<K, V, AtomicU32>;

    fn deref(&self) -> &Pairs<K, V, AtomicU32> {
        &self.pairs
    }
}

impl<K, V> DerefMut for Leaf<K, V> {
    fn deref_mut(&mut self) -> &mut Pairs<K, V, AtomicU32> {
        &mut self.pairs
    }
}
