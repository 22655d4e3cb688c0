//! A map beyond the paper: leaves fill pages, and the leaves that are used live in local memory.
//!
//! Pairs lie in leaves of exactly one page; the directory of leaves is local. A lookup touches one
//! page, a scan of `n` pairs `n / capacity + 1`. Every use of a leaf is counted in the directory,
//! which costs no page; [`FarPagedMap::place_by_heat`] then moves the leaves used most to
//! purely-local memory, and those that have cooled back to pages. Page size is chosen by level: the
//! directory's nodes are small and local, leaves are as large as the collective's pages.
//!
//! # Invariants
//! 1. All keys of a leaf are at or above its key in the directory, and below that of the next leaf.
//!    No leaf is empty.
//! 2. Memory for a new leaf is allocated before anything changes.

#![expect(unsafe_code, reason = "hands out leaves in memory that it allocated, and frees them")]

mod leaf;

use super::{Links, Refused};
use crate::base::units::ByteCount;
use crate::sub::{AllocError, Collective, SubAllocator};
use leaf::{Leaf, Shape};
use std::borrow::Borrow;
use std::collections::{BTreeMap, btree_map};
use std::fmt;
use std::ops::Bound;
use std::ptr::NonNull;
use std::sync::Arc;

/// An ordered map in far memory whose leaves fill pages and are placed by how they are used.
///
/// # Examples
/// ```
/// use farheap::containers::FarPagedMap;
/// use farheap::store::MemStore;
/// use farheap::sub::{Collective, CollectiveConfig};
/// use farheap::ByteCount;
/// use std::sync::Arc;
///
/// let store = Arc::new(MemStore::new(ByteCount::mib(64))?);
/// let config = CollectiveConfig { local: ByteCount::kib(64), ..CollectiveConfig::default() };
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
        Ok(FarPagedMap { directory: BTreeMap::new(), len: 0, shape, collective })
    }

    /// Number of pairs.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no pair.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of leaves: of pages, far or local.
    #[must_use]
    pub fn leaves(&self) -> usize {
        self.directory.len()
    }

    /// The allocator that the leaves come from.
    #[must_use]
    pub fn collective(&self) -> &Arc<Collective> {
        &self.collective
    }

    /// Bytes of local memory that a directory of so many leaves takes: entries in nodes that are
    /// two thirds full.
    #[must_use]
    pub fn directory_bytes(leaves: usize) -> ByteCount {
        ByteCount((leaves * size_of::<(K, Leaf<K, V>)>() * 3 / 2) as u64)
    }

    /// Pairs in a leaf that is full.
    #[must_use]
    pub fn leaf_capacity(&self) -> usize {
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

    /// All pairs in key order.
    #[must_use]
    pub fn iter(&self) -> PagedIter<'_, K, V> {
        PagedIter {
            leaves: Leaves::All(self.directory.values()),
            keys: &[],
            values: &[],
            shape: self.shape,
        }
    }

    /// Moves the leaves that were used most to purely-local memory, as many as fit, and those
    /// there that were used less to pages; then halves all counts, so that old uses fade.
    ///
    /// # Errors
    /// [`AllocError`] when there is no page for a leaf that must leave; the map is whole.
    pub fn place_by_heat(&mut self) -> Result<(), AllocError> {
        let room = self.collective.local_capacity().get() as usize / self.shape.layout.size();
        let mut heats: Vec<u32> = self.directory.values().map(Leaf::heat).collect();
        let room = room.min(heats.len());
        if room == 0 {
            return Ok(());
        }
        let (_, least, _) = heats.select_nth_unstable_by(room - 1, |a, b| b.cmp(a));
        let least = *least;
        let above = self.directory.values().filter(|leaf| leaf.heat() > least).count();
        let mut ties = room - above;
        let mut chosen = |leaf: &Leaf<K, V>| {
            let tie = leaf.heat() == least && ties > 0;
            ties -= usize::from(tie);
            leaf.heat() > least || tie
        };
        let (collective, shape) = (self.collective.clone(), self.shape);
        let marks: Vec<bool> = self.directory.values().map(&mut chosen).collect();
        for (leaf, stays) in self.directory.values_mut().zip(&marks) {
            if !stays && collective.is_local(leaf.memory().as_ptr()) {
                let memory = collective.new_page()?.allocate(shape.layout)?;
                move_leaf(&collective, shape, leaf, memory);
            }
        }
        for (leaf, stays) in self.directory.values_mut().zip(&marks) {
            if *stays && !collective.is_local(leaf.memory().as_ptr()) {
                // Full before all have moved: something else uses local memory too.
                let Ok(memory) = collective.purely_local().allocate(shape.layout) else { break };
                move_leaf(&collective, shape, leaf, memory);
            }
        }
        self.directory.values().for_each(Leaf::cool);
        Ok(())
    }
}

fn move_leaf<K, V>(
    collective: &Collective,
    shape: Shape,
    leaf: &mut Leaf<K, V>,
    memory: NonNull<u8>,
) {
    // SAFETY: just allocated with the shape's layout; `&mut` on the map rules references out.
    let old = unsafe { leaf.move_to(shape, memory) };
    // SAFETY: it came from this collective with this layout, and the leaf has left it.
    unsafe { collective.deallocate(old, shape.layout) };
}

impl<K: Ord, V> FarPagedMap<K, V> {
    /// The leaf that a key belongs to.
    fn leaf<Q>(&self, key: &Q) -> Option<&Leaf<K, V>>
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        let below = (Bound::Unbounded, Bound::Included(key));
        self.directory.range::<Q, _>(below).next_back().map(|(_, leaf)| leaf)
    }

    fn leaf_mut<Q>(&mut self, key: &Q) -> Option<&mut Leaf<K, V>>
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        let below = (Bound::Unbounded, Bound::Included(key));
        self.directory.range_mut::<Q, _>(below).next_back().map(|(_, leaf)| leaf)
    }

    /// The value of a key.
    #[must_use]
    pub fn get<Q>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        let leaf = self.leaf(key)?;
        leaf.warm();
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
        let leaf = self.leaf_mut(key)?;
        leaf.warm();
        leaf.search(key).ok().map(|at| leaf.value_mut(shape, at))
    }

    /// The pairs from a key on, in key order.
    pub fn iter_from<Q>(&self, key: &Q) -> PagedIter<'_, K, V>
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        let below = (Bound::Unbounded, Bound::Included(key));
        let Some((first, leaf)) = self.directory.range::<Q, _>(below).next_back() else {
            return self.iter();
        };
        leaf.warm();
        let at = leaf.search(key).unwrap_or_else(|at| at);
        PagedIter {
            leaves: Leaves::From(
                self.directory.range::<K, _>((Bound::Excluded(first), Bound::Unbounded)),
            ),
            keys: &leaf.keys()[at..],
            values: &leaf.values(self.shape)[at..],
            shape: self.shape,
        }
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
        let (removed, value) = leaf.remove(shape, at);
        let is_empty = leaf.len() == 0;
        self.len -= 1;
        if is_empty {
            let below = (Bound::Unbounded, Bound::Included(&removed));
            let entry = self.directory.range::<K, _>(below).next_back();
            let first = entry.expect("the leaf is in the directory").0.clone();
            let leaf = self.directory.remove::<K>(&first).expect("just found");
            self.free(leaf.memory());
        }
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
            // The first leaf's key in the directory is a lower bound like all others.
            let (_, leaf) = first.remove_entry();
            self.directory.insert(key.clone(), leaf);
        }
        let is_last = self.directory.last_key_value().is_none_or(|(last, _)| *last <= key);
        let Some(leaf) = self.leaf_mut(&key) else {
            return self.insert_into_new_leaf(key, value);
        };
        match leaf.search(&key) {
            Ok(at) => return Ok(Some(std::mem::replace(leaf.value_mut(shape, at), value))),
            Err(at) if leaf.len() < shape.capacity => leaf.insert(shape, at, key, value),
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
        self.directory.insert(first, leaf);
        self.len += 1;
        Ok(None)
    }

    /// Moves the upper half of a key's leaf to a new leaf.
    fn split(&mut self, key: &K) -> Result<(), AllocError> {
        let memory = self.allocate_far()?;
        // SAFETY: just allocated with the shape's layout.
        let mut upper = unsafe { Leaf::create(memory) };
        let shape = self.shape;
        let leaf = self.leaf_mut(key).expect("a full leaf was found for this key");
        leaf.move_tail(shape, shape.capacity / 2, &mut upper);
        let first = upper.keys()[0].clone();
        self.directory.insert(first, upper);
        Ok(())
    }

    /// Packs the pairs into as few leaves as possible, each filled to `fill` (0 to 1; one for a map
    /// that is only read or changed in place). All leaves are far then, and counts of use start anew.
    ///
    /// # Errors
    /// [`AllocError`] when there is no page to pack into; the map is whole, partly packed.
    pub fn pack(&mut self, fill: f64) -> Result<(), AllocError> {
        let shape = self.shape;
        let most = ((shape.capacity as f64 * fill) as usize).clamp(1, shape.capacity);
        let mut old = std::mem::take(&mut self.directory);
        let mut packed: BTreeMap<K, Leaf<K, V>> = BTreeMap::new();
        let mut outcome = Ok(());
        'leaves: while let Some((first, mut leaf)) = old.pop_first() {
            while leaf.len() > 0 {
                let last = packed.last_entry().map(btree_map::OccupiedEntry::into_mut);
                let Some(last) = last.filter(|last| last.len() < most) else {
                    match self.allocate_far() {
                        // SAFETY: just allocated with the shape's layout.
                        Ok(memory) => drop(
                            packed.insert(leaf.keys()[0].clone(), unsafe { Leaf::create(memory) }),
                        ),
                        Err(error) => {
                            outcome = Err(error);
                            let first =
                                if packed.is_empty() { first } else { leaf.keys()[0].clone() };
                            old.insert(first, leaf);
                            break 'leaves;
                        }
                    }
                    continue;
                };
                // From the front of the one to the end of the other.
                let count = leaf.len().min(most - last.len());
                for _ in 0..count {
                    let (key, value) = leaf.remove(shape, 0);
                    last.insert(shape, last.len(), key, value);
                }
            }
            self.free(leaf.memory());
        }
        packed.append(&mut old);
        self.directory = packed;
        outcome
    }
}

impl<K, V> Drop for FarPagedMap<K, V> {
    fn drop(&mut self) {
        let alone = Arc::get_mut(&mut self.collective).is_some();
        if !alone || std::mem::needs_drop::<(K, V)>() {
            self.clear();
        }
    }
}

impl<K: fmt::Debug, V: fmt::Debug> fmt::Debug for FarPagedMap<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self).finish()
    }
}

impl<'a, K, V> IntoIterator for &'a FarPagedMap<K, V> {
    type Item = (&'a K, &'a V);
    type IntoIter = PagedIter<'a, K, V>;
    fn into_iter(self) -> PagedIter<'a, K, V> {
        self.iter()
    }
}

/// The leaves that an iterator has not reached yet.
enum Leaves<'a, K, V> {
    All(btree_map::Values<'a, K, Leaf<K, V>>),
    From(btree_map::Range<'a, K, Leaf<K, V>>),
}

/// Pairs of a paged map in key order.
pub struct PagedIter<'a, K, V> {
    leaves: Leaves<'a, K, V>,
    keys: &'a [K],
    values: &'a [V],
    shape: Shape,
}

impl<K, V> fmt::Debug for PagedIter<'_, K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PagedIter").finish_non_exhaustive()
    }
}

impl<'a, K, V> Iterator for PagedIter<'a, K, V> {
    type Item = (&'a K, &'a V);

    fn next(&mut self) -> Option<(&'a K, &'a V)> {
        if self.keys.is_empty() {
            let leaf = match &mut self.leaves {
                Leaves::All(leaves) => leaves.next()?,
                Leaves::From(leaves) => leaves.next()?.1,
            };
            leaf.warm();
            (self.keys, self.values) = (leaf.keys(), leaf.values(self.shape));
        }
        let (key, keys) = self.keys.split_first()?;
        let (value, values) = self.values.split_first()?;
        (self.keys, self.values) = (keys, values);
        Some((key, value))
    }
}
