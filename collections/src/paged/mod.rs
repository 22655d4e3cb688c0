//! A map beyond the paper: leaves fill pages, and the leaves that are used live in local memory.
//!
//! Pairs lie in leaves of exactly one page; the directory of leaves is local. A lookup touches one
//! page, a scan of `n` pairs `n / capacity + 1`. Every use of a leaf is counted in the directory,
//! which costs no page; `place` moves the leaves used most, or last, to purely-local memory, and
//! others back to pages. The directory is local whatever its size; see [`super::leveled`] for one that
//! can be far.
//!
//! # Invariants
//! 1. All keys of a leaf are at or above its key in the directory, and below that of the next leaf.
//!    No leaf is empty.
//! 2. Memory for a new leaf is allocated before anything changes.

#![expect(unsafe_code, reason = "hands out leaves in memory that it allocated, and frees them")]

mod iter;
mod leaf;
mod place;

pub use iter::PagedIter;

use super::ordered::map_traits;
use super::pairs::Shape;
use super::{Links, Refused};
use crate::sub::{AllocError, Collective, SubAllocator};
use farheap::ByteCount;
use leaf::Leaf;
use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// An ordered map in far memory whose leaves fill pages and are placed by how they are used.
///
/// # Examples
/// ```
/// use farheap_collections::FarPagedMap;
/// use farheap::store::MemStore;
/// use farheap_collections::sub::{Collective, CollectiveConfig};
/// use farheap::ByteCount;
/// use std::sync::Arc;
///
/// let store = Arc::new(MemStore::new(ByteCount::mib(64))?);
/// let config = CollectiveConfig::new().local(ByteCount::kib(64));
/// let collective = match Collective::create(config, store) {
///     Ok(collective) => Arc::new(collective),
///     // Without permission for userfaultfd; the message says how to get it.
///     Err(error) => return Ok(println!("{error}")),
/// };
/// let mut map = FarPagedMap::new(collective)?;
/// for key in 0..10_000_u64 {
///     map.insert(key, key * 2)?;
/// }
/// for _ in 0..10 {
///     assert_eq!(map.get(&77), Some(&154));
/// }
/// map.place_by_heat()?; // Now 77's page is in local memory.
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct FarPagedMap<K, V> {
    directory: BTreeMap<K, Leaf<K, V>>,
    len: usize,
    shape: Shape,
    collective: Arc<Collective>,
    /// Uses of leaves so far: the time of the next one.
    clock: AtomicU64,
}

// SAFETY: the map owns its leaves; the collective is shared between threads by design.
unsafe impl<K: Send, V: Send> Send for FarPagedMap<K, V> {}
// SAFETY: `&FarPagedMap` reads leaves, hands out `&K` and `&V`, and counts in atomics.
unsafe impl<K: Sync, V: Sync> Sync for FarPagedMap<K, V> {}

impl<K, V> FarPagedMap<K, V> {
    /// An empty map. Nothing is allocated.
    ///
    /// # Errors
    /// [`AllocError::TooLarge`] when not even two pairs fit into a page.
    pub fn new(collective: Arc<Collective>) -> Result<FarPagedMap<K, V>, AllocError> {
        let page = collective.page_size().as_usize();
        let size = 2 * (size_of::<K>() + size_of::<V>());
        let shape = Shape::new::<K, V>(page).ok_or(AllocError::TooLarge { size, max: page })?;
        let clock = AtomicU64::new(1);
        Ok(FarPagedMap { directory: BTreeMap::new(), len: 0, shape, collective, clock })
    }

    /// Number of leaves: of pages, far or local.
    #[must_use]
    pub fn leaves(&self) -> usize {
        self.directory.len()
    }

    /// Bytes of local memory that a directory of this number of leaves takes: entries in nodes that are
    /// two thirds full.
    #[must_use]
    pub fn directory_bytes(leaves: usize) -> ByteCount {
        ByteCount((leaves * size_of::<(K, Leaf<K, V>)>() * 3 / 2) as u64)
    }

    /// Pairs in a leaf that is full.
    pub(crate) fn leaf_capacity(&self) -> usize {
        self.shape.capacity
    }

    /// Counts the links from a leaf to the next by where their ends are.
    #[must_use]
    pub fn links(&self) -> Links {
        let mut links = Links::default();
        let leaves = || self.directory.values().map(|leaf| leaf.memory().as_ptr().cast_const());
        for (from, to) in leaves().zip(leaves().skip(1)) {
            links.count(&self.collective, from, to);
        }
        links
    }

    /// Notes that a leaf is used now.
    fn note_use(&self, leaf: &Leaf<K, V>) {
        // Relaxed: a statistic; two uses at the same time do no harm.
        let now = self.clock.load(Ordering::Relaxed);
        self.clock.store(now + 1, Ordering::Relaxed);
        leaf.warm(now);
    }

    fn bring_in(&self, leaf: &Leaf<K, V>) {
        self.collective.bring_in(leaf.memory().as_ptr().cast());
    }

    fn allocate_far(&self) -> Result<NonNull<u8>, AllocError> {
        self.collective.new_page()?.allocate(self.shape.layout)
    }

    fn free(&self, memory: NonNull<u8>) {
        // SAFETY: the memory came from this collective with this layout; its leaf is gone or moved.
        unsafe { self.collective.deallocate(memory, self.shape.layout) };
    }

    /// Removes all pairs.
    pub fn clear(&mut self) {
        self.len = 0;
        for (_, mut leaf) in std::mem::take(&mut self.directory) {
            leaf.clear(self.shape);
            self.free(leaf.memory());
        }
    }
}

impl<K: Ord, V> FarPagedMap<K, V> {
    /// The leaf that a key belongs to.
    fn leaf<Q>(&self, key: &Q) -> Option<&Leaf<K, V>>
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        let below = (Bound::Unbounded, Bound::Included(key));
        let leaf = self.directory.range::<Q, _>(below).next_back().map(|(_, leaf)| leaf)?;
        self.bring_in(leaf);
        Some(leaf)
    }

    fn leaf_mut<Q>(&mut self, key: &Q) -> Option<&mut Leaf<K, V>>
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        let below = (Bound::Unbounded, Bound::Included(key));
        let leaf = self.directory.range_mut::<Q, _>(below).next_back().map(|(_, leaf)| leaf)?;
        self.collective.bring_in(leaf.memory().as_ptr().cast());
        Some(leaf)
    }

    /// The value of a key.
    #[must_use]
    pub fn get<Q>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        let leaf = self.leaf(key)?;
        self.note_use(leaf);
        leaf.search(key).ok().map(|at| &leaf.values(self.shape)[at])
    }

    /// The value of a key, for changing it in place.
    #[must_use]
    pub fn get_mut<Q>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        let shape = self.shape;
        self.note_use(self.leaf(key)?);
        let leaf = self.leaf_mut(key)?;
        leaf.search(key).ok().map(|at| &mut leaf.values_mut(shape)[at])
    }

    /// Removes a key; returns its value.
    pub fn remove<Q>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q> + Clone,
        Q: Ord + ?Sized,
    {
        let shape = self.shape;
        let leaf = self.leaf_mut(key)?;
        let at = leaf.search(key).ok()?;
        if leaf.len() > 1 {
            let (_, value) = leaf.remove(shape, at);
            self.len -= 1;
            return Some(value);
        }
        // The leaf goes as well. Cloned while the map is whole: it may panic.
        let below = (Bound::Unbounded, Bound::Included(leaf.keys()[at].clone()));
        let entry = self.directory.range::<K, _>(below).next_back();
        let first = entry.expect("the leaf is in the directory").0.clone();
        let mut leaf = self.directory.remove::<K>(&first).expect("just found");
        let (_, value) = leaf.remove(shape, at);
        self.free(leaf.memory());
        self.len -= 1;
        Some(value)
    }
}

impl<K: Ord + Clone, V> FarPagedMap<K, V> {
    /// Inserts a pair; returns the value that the key had before.
    ///
    /// # Errors
    /// [`Refused`] gives the pair back when there is no page for it; the map is as it was.
    pub fn insert(&mut self, key: K, value: V) -> Result<Option<V>, Refused<K, V>> {
        let shape = self.shape;
        if let Some(first) = self.directory.first_entry()
            && key < *first.key()
        {
            // The first leaf's key in the directory is a lower bound like all others. Cloned while
            // the map is whole: it may panic.
            let bound = key.clone();
            let (_, leaf) = first.remove_entry();
            self.directory.insert(bound, leaf);
        }
        let is_last = self.directory.last_key_value().is_none_or(|(last, _)| *last <= key);
        let now = *self.clock.get_mut();
        let Some(leaf) = self.leaf_mut(&key) else {
            return self.insert_into_new_leaf(key, value);
        };
        match leaf.search(&key) {
            Ok(at) => return Ok(Some(std::mem::replace(&mut leaf.values_mut(shape)[at], value))),
            Err(at) if leaf.len() < shape.capacity => {
                leaf.insert(shape, at, key, value);
                leaf.stamp(now);
            }
            // Keys that arrive in order fill their leaves.
            Err(at) if at == shape.capacity && is_last => {
                return self.insert_into_new_leaf(key, value);
            }
            Err(_) => {
                if let Err(error) = self.split(&key) {
                    return Err(Refused { key, value, error });
                }
                return self.insert(key, value);
            }
        }
        self.len += 1;
        *self.clock.get_mut() += 1;
        Ok(None)
    }

    fn insert_into_new_leaf(&mut self, key: K, value: V) -> Result<Option<V>, Refused<K, V>> {
        let memory = match self.allocate_far() {
            Ok(memory) => memory,
            Err(error) => return Err(Refused { key, value, error }),
        };
        // SAFETY: just allocated with the shape's layout.
        let mut leaf = unsafe { Leaf::create(memory) };
        let first = key.clone();
        leaf.insert(self.shape, 0, key, value);
        leaf.stamp(*self.clock.get_mut());
        *self.clock.get_mut() += 1;
        self.directory.insert(first, leaf);
        self.len += 1;
        Ok(None)
    }

    /// Moves the upper half of a key's leaf to a new leaf.
    fn split(&mut self, key: &K) -> Result<(), AllocError> {
        let half = self.shape.capacity / 2;
        // Cloned while the map is whole: it may panic.
        let leaf = self.leaf_mut(key).expect("a full leaf was found for this key");
        let first = leaf.keys()[half].clone();
        let memory = self.allocate_far()?;
        // SAFETY: just allocated with the shape's layout.
        let mut upper = unsafe { Leaf::create(memory) };
        let shape = self.shape;
        let leaf = self.leaf_mut(key).expect("as before");
        leaf.move_tail(shape, half, &mut upper);
        self.directory.insert(first, upper);
        Ok(())
    }
}

map_traits!(FarPagedMap, PagedIter);
