//! Leaves: sorted pairs that fill a page, keys first.
//!
//! ```text
//! | key 0 | key 1 | ... | key capacity-1 | value 0 | value 1 | ... | value capacity-1 |
//! ```
//! How many pairs there are is written in the directory, in local memory: a page holds nothing but
//! pairs.
//!
//! # Invariants
//! 1. A leaf's memory has the shape's layout and is the leaf's own until it is freed.
//! 2. The first `len` keys and values are initialised; keys ascend.
#![expect(unsafe_code, reason = "reads and writes pairs through raw pointers")]

use crate::base::sync::{AtomicU32, AtomicU64, Ordering};
use std::alloc::Layout;
use std::borrow::Borrow;
use std::marker::PhantomData;
use std::ptr::NonNull;

/// Pairs in a leaf of pairs without a size.
const UNSIZED_MAX: usize = 1024;

/// How pairs lie in a leaf.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) layout: Layout,
    pub(super) capacity: usize,
    values_at: usize,
}

impl Shape {
    /// The shape that puts most pairs into `bytes`; `None` when not even two fit.
    pub(super) fn new<K, V>(bytes: usize) -> Option<Shape> {
        let align = align_of::<K>().max(align_of::<V>());
        let pair = size_of::<K>() + size_of::<V>();
        let values_at =
            |capacity: usize| (capacity * size_of::<K>()).next_multiple_of(align_of::<V>());
        let mut capacity = bytes.checked_div(pair).unwrap_or(UNSIZED_MAX);
        // Padding between keys and values may cost a pair.
        while capacity > 0 && values_at(capacity) + capacity * size_of::<V>() > bytes {
            capacity -= 1;
        }
        let layout = Layout::from_size_align(bytes, align).ok()?;
        (capacity >= 2).then(|| Shape { layout, capacity, values_at: values_at(capacity) })
    }
}

/// A leaf, as the directory knows it.
#[derive(Debug)]
pub(super) struct Leaf<K, V> {
    memory: NonNull<u8>,
    len: u32,
    /// How often it was used, halved now and then.
    heat: AtomicU32,
    /// When it was used last, in uses of the map's leaves; zero: never.
    used_at: AtomicU64,
    _pairs: PhantomData<(K, V)>,
}

impl<K, V> Leaf<K, V> {
    /// Makes an empty leaf.
    ///
    /// # Safety
    /// The memory is valid for the layout of the shape that all calls give, and the leaf's own.
    pub(super) unsafe fn create(memory: NonNull<u8>) -> Leaf<K, V> {
        let (heat, used_at) = (AtomicU32::new(0), AtomicU64::new(0));
        Leaf { memory, len: 0, heat, used_at, _pairs: PhantomData }
    }

    /// Copies the leaf to new memory, and returns the old.
    ///
    /// # Safety
    /// As [`create`](Leaf::create); nobody has a reference into the leaf.
    pub(super) unsafe fn move_to(&mut self, shape: Shape, memory: NonNull<u8>) -> NonNull<u8> {
        for (start, len) in
            [(0, self.len() * size_of::<K>()), (shape.values_at, self.len() * size_of::<V>())]
        {
            let from = self.memory.as_ptr().wrapping_add(start);
            // SAFETY: both have the shape's layout; fresh memory does not overlap.
            unsafe { memory.as_ptr().wrapping_add(start).copy_from_nonoverlapping(from, len) };
        }
        std::mem::replace(&mut self.memory, memory)
    }

    pub(super) fn memory(&self) -> NonNull<u8> {
        self.memory
    }

    pub(super) fn len(&self) -> usize {
        self.len as usize
    }

    /// Notes a use at a time.
    pub(super) fn warm(&self, now: u64) {
        // Relaxed, here and below: a statistic; a lost count does no harm.
        self.heat.store(self.heat.load(Ordering::Relaxed).saturating_add(1), Ordering::Relaxed);
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
        self.heat.load(Ordering::Relaxed)
    }

    pub(super) fn cool(&self) {
        self.heat.store(self.heat() / 2, Ordering::Relaxed);
    }

    fn key_at(&self, at: usize) -> *mut K {
        self.memory.as_ptr().cast::<K>().wrapping_add(at)
    }

    fn value_at(&self, shape: Shape, at: usize) -> *mut V {
        self.memory.as_ptr().wrapping_add(shape.values_at).cast::<V>().wrapping_add(at)
    }

    pub(super) fn keys(&self) -> &[K] {
        // SAFETY: `len` initialised keys from the start (invariant 2).
        unsafe { std::slice::from_raw_parts(self.key_at(0), self.len()) }
    }

    pub(super) fn values(&self, shape: Shape) -> &[V] {
        // SAFETY: `len` initialised values (invariant 2).
        unsafe { std::slice::from_raw_parts(self.value_at(shape, 0), self.len()) }
    }

    pub(super) fn value_mut(&mut self, shape: Shape, at: usize) -> &mut V {
        assert!(at < self.len(), "value {at} of {}", self.len());
        // SAFETY: initialised (checked above), and `&mut self` is the only access.
        unsafe { &mut *self.value_at(shape, at) }
    }

    pub(super) fn search<Q>(&self, key: &Q) -> Result<usize, usize>
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        self.keys().binary_search_by(|other| other.borrow().cmp(key))
    }

    pub(super) fn insert(&mut self, shape: Shape, at: usize, key: K, value: V) {
        let len = self.len();
        assert!(at <= len && len < shape.capacity, "insert at {at} of {len}");
        let (key_place, value_place) = (self.key_at(at), self.value_at(shape, at));
        // SAFETY: `len - at` keys move up by one, below the capacity.
        unsafe { key_place.copy_to(key_place.wrapping_add(1), len - at) };
        // SAFETY: as above, for values.
        unsafe { value_place.copy_to(value_place.wrapping_add(1), len - at) };
        // SAFETY: inside the leaf; what was here has moved.
        unsafe { key_place.write(key) };
        // SAFETY: as above.
        unsafe { value_place.write(value) };
        self.len += 1;
    }

    pub(super) fn remove(&mut self, shape: Shape, at: usize) -> (K, V) {
        let len = self.len();
        assert!(at < len, "remove {at} of {len}");
        let (key_place, value_place) = (self.key_at(at), self.value_at(shape, at));
        // SAFETY: initialised; the copy left behind is overwritten or cut off.
        let key = unsafe { key_place.read() };
        // SAFETY: as above.
        let value = unsafe { value_place.read() };
        // SAFETY: the keys after it move down by one.
        unsafe { key_place.copy_from(key_place.wrapping_add(1), len - at - 1) };
        // SAFETY: as above, for values.
        unsafe { value_place.copy_from(value_place.wrapping_add(1), len - at - 1) };
        self.len -= 1;
        (key, value)
    }

    /// Moves the pairs from `at` on to the end of another leaf.
    pub(super) fn move_tail(&mut self, shape: Shape, at: usize, to: &mut Leaf<K, V>) {
        let count = self.len() - at;
        assert!(to.len() + count <= shape.capacity, "{} + {count} pairs", to.len());
        to.inherit(self);
        let end = to.len();
        // SAFETY: the other leaf has room (checked above) and is another object.
        unsafe { to.key_at(end).copy_from_nonoverlapping(self.key_at(at), count) };
        let values = self.value_at(shape, at);
        // SAFETY: as above, for values.
        unsafe { to.value_at(shape, end).copy_from_nonoverlapping(values, count) };
        to.len += count as u32;
        self.len = at as u32;
    }

    /// Drops all pairs.
    pub(super) fn clear(&mut self, shape: Shape) {
        let len = std::mem::take(&mut self.len) as usize;
        let keys = std::ptr::slice_from_raw_parts_mut(self.key_at(0), len);
        let values = std::ptr::slice_from_raw_parts_mut(self.value_at(shape, 0), len);
        // SAFETY: they were initialised, and are no part of the leaf any more.
        unsafe { keys.drop_in_place() };
        // SAFETY: as above.
        unsafe { values.drop_in_place() };
    }
}
