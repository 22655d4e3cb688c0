//! Reading a paged map in key order.

use super::FarPagedMap;
use super::leaf::Leaf;

use farheap::region::Advice;
use std::borrow::Borrow;
use std::collections::btree_map;
use std::fmt;
use std::ops::Bound;

impl<K, V> FarPagedMap<K, V> {
    /// All pairs in key order.
    #[must_use]
    pub fn iter(&self) -> PagedIter<'_, K, V> {
        let leaves = Leaves::All(self.directory.values());
        PagedIter { leaves, keys: &[], values: &[], map: self }
    }
}

impl<K: Ord, V> FarPagedMap<K, V> {
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
        self.note_use(leaf);
        let at = leaf.search(key).unwrap_or_else(|at| at);
        let behind = (Bound::Excluded(first), Bound::Unbounded);
        PagedIter {
            leaves: Leaves::From(self.directory.range::<K, _>(behind)),
            keys: &leaf.keys()[at..],
            values: &leaf.values(self.shape)[at..],
            map: self,
        }
    }

    /// Starts to bring in the leaves of the next `pairs` pairs from a key on, all at once, and
    /// returns without waiting: the directory knows them, so that a scan's length is the only
    /// thing to say. Worth it where a read of the store takes longer than waking a thread.
    pub fn prefetch_from<Q>(&self, key: &Q, pairs: usize)
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        // The scan may start at the last pair of its first leaf.
        let pairs = pairs.saturating_add(self.shape.capacity);
        // Advice: a leaf of pairs without a size is no page, and what is refused is read later.
        let _ = self.collective.region().advise(&self.pages_from(key, pairs), Advice::WillNeed);
    }

    /// Brings in the leaves of the next `pairs` pairs from a key on, before a scan comes to them one
    /// by one: see [`Advice::WillNeedNow`]. Worth it where the
    /// store answers at once, as memory does.
    pub fn fetch_from<Q>(&self, key: &Q, pairs: usize)
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        let below = (Bound::Unbounded, Bound::Included(key));
        let start = self.directory.range::<Q, _>(below).next_back();
        let passed = start.map_or(0, |(_, leaf)| leaf.search(key).unwrap_or_else(|at| at));
        let pairs = pairs.saturating_add(passed);
        // As above.
        let _ = self.collective.region().advise(&self.pages_from(key, pairs), Advice::WillNeedNow);
    }

    /// The far leaves of this number of pairs from the first of a key's leaf on.
    fn pages_from<Q>(&self, key: &Q, pairs: usize) -> Vec<*const [u8]>
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        let below = (Bound::Unbounded, Bound::Included(key));
        let start = self.directory.range::<Q, _>(below).next_back();
        let from = start.map_or(Bound::Unbounded, |(first, _)| Bound::Included(first));
        let (mut left, mut ranges) = (pairs, Vec::new());
        for (_, leaf) in self.directory.range::<K, _>((from, Bound::Unbounded)) {
            if left == 0 {
                break;
            }
            let memory = leaf.memory().as_ptr().cast_const();
            if !self.collective.is_local(memory) {
                ranges.push(self.collective.page_around(memory.cast()));
            }
            left = left.saturating_sub(leaf.len());
        }
        ranges
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
    map: &'a FarPagedMap<K, V>,
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
            self.map.note_use(leaf);
            self.map.bring_in(leaf);
            (self.keys, self.values) = (leaf.keys(), leaf.values(self.map.shape));
        }
        let (key, keys) = self.keys.split_first()?;
        let (value, values) = self.values.split_first()?;
        (self.keys, self.values) = (keys, values);
        Some((key, value))
    }
}
