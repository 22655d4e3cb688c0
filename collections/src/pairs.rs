//! Sorted pairs in one piece of memory, keys first.
//!
//! ```text
//! | key 0 | key 1 | ... | key capacity-1 | value 0 | value 1 | ... | value capacity-1 |
//! ```
//! How many pairs there are is written down by the owner, elsewhere: the memory, a page as a rule,
//! holds nothing but pairs.
//!
//! # Invariants
//! 1. The memory has the shape's layout and belongs to these pairs until it is freed.
//! 2. The first `len` keys and values are initialised; keys ascend.
#![expect(unsafe_code, reason = "reads and writes pairs through raw pointers")]

use std::alloc::Layout;
use std::borrow::Borrow;
use std::marker::PhantomData;
use std::ptr::NonNull;

/// Pairs in a piece of memory when they have no size.
const UNSIZED_MAX: usize = 1024;

/// How pairs lie in their memory.
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

/// Pairs, as their owner knows them: where and how many, and four bytes for the owner's use.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Pairs<K, V, X> {
    memory: NonNull<u8>,
    len: u32,
    pub(super) extra: X,
    _pairs: PhantomData<(K, V)>,
}

impl<K, V, X> Pairs<K, V, X> {
    /// No pairs yet.
    ///
    /// # Safety
    /// The memory is valid for the layout of the shape that all calls give, and belongs to nobody
    /// else.
    pub(super) unsafe fn create(memory: NonNull<u8>, extra: X) -> Pairs<K, V, X> {
        Pairs { memory, len: 0, extra, _pairs: PhantomData }
    }

    /// Copies the pairs to new memory, and returns the old.
    ///
    /// # Safety
    /// As [`create`](Pairs::create); nobody has a reference to a pair.
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

    pub(super) fn values_mut(&mut self, shape: Shape) -> &mut [V] {
        // SAFETY: as above, and `&mut self` is the only access.
        unsafe { std::slice::from_raw_parts_mut(self.value_at(shape, 0), self.len()) }
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
        // SAFETY: inside the memory; what was here has moved.
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

    /// Moves the pairs from `at` on to the end of others.
    pub(super) fn move_tail(&mut self, shape: Shape, at: usize, to: &mut Self) {
        let count = self.len() - at;
        self.copy_to(shape, at, count, to, shape);
        self.len = at as u32;
    }

    /// Moves the first `count` pairs to the end of others, whose shape may be another.
    pub(super) fn move_head(&mut self, shape: Shape, count: usize, to: &mut Self, to_shape: Shape) {
        self.copy_to(shape, 0, count, to, to_shape);
        let left = self.len() - count;
        // SAFETY: the keys behind those that have moved move down, inside the memory.
        unsafe { self.key_at(0).copy_from(self.key_at(count), left) };
        let (start, rest) = (self.value_at(shape, 0), self.value_at(shape, count));
        // SAFETY: as above, for values.
        unsafe { start.copy_from(rest, left) };
        self.len = left as u32;
    }

    /// Copies pairs to the end of others, to which they belong then: the caller cuts them off.
    fn copy_to(&mut self, shape: Shape, from: usize, count: usize, to: &mut Self, to_shape: Shape) {
        let end = to.len();
        assert!(from + count <= self.len(), "{count} pairs from {from} of {}", self.len());
        assert!(end + count <= to_shape.capacity, "{end} + {count} pairs");
        // SAFETY: the others have room (checked above) and are another object.
        unsafe { to.key_at(end).copy_from_nonoverlapping(self.key_at(from), count) };
        let values = self.value_at(shape, from);
        // SAFETY: as above, for values.
        unsafe { to.value_at(to_shape, end).copy_from_nonoverlapping(values, count) };
        to.len += count as u32;
    }

    /// Drops all pairs.
    pub(super) fn clear(&mut self, shape: Shape) {
        let len = std::mem::take(&mut self.len) as usize;
        let keys = std::ptr::slice_from_raw_parts_mut(self.key_at(0), len);
        let values = std::ptr::slice_from_raw_parts_mut(self.value_at(shape, 0), len);
        // SAFETY: they were initialised, and are no part of this any more.
        unsafe { keys.drop_in_place() };
        // SAFETY: as above.
        unsafe { values.drop_in_place() };
    }
}
