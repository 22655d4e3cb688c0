//! A map beyond the paper: a B+-tree whose levels have page sizes, and memory, of their own.
//!
//! ```text
//!   level 2          [ . . ]              a collective for each level, or one for some:
//!   level 1   [ . . . ]   [ . . . ]       purely local while there is room, else far
//!   level 0   [==] [==] [==] [==] [==]    leaves: far, as large as their collective's pages
//! ```
//! Every node fills a page of its level's collective. What finds local memory full becomes far: a
//! directory of leaves that does not fit into local memory costs faults, not the map. The upper
//! levels stay local longest. Which page size is best depends on how long scans are and on what a
//! fault and a byte cost: [`LevelPlan`] computes it.
//!
//! # Invariants
//! 1. The keys of a node's `i`-th child, `i > 0`, are at or above the `i`-th key, and below the next.
//! 2. No node is empty. Only the tree has a length; nodes are counted by their parents.
//! 3. Memory for a new node is allocated before anything changes.

mod insert;
mod iter;
mod leaves;
mod levels;
mod node;
mod plan;
mod repack;

pub use iter::{LevelIter, LevelRange};
pub use plan::{FaultCost, LevelPlan, Workload};

use super::Links;
use super::pairs::Shape;
use crate::sub::{AllocError, Collective};
use farheap::ByteCount;
use leaves::DrainedLeaves;
use levels::Levels;
use node::{ByKind, ByKindMut, Inner, Leaf, Node};
use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;

/// An ordered map in far memory: a B+-tree whose levels live in collectives of their own.
///
/// # Examples
/// ```
/// use farheap_collections::FarLeveledMap;
/// use farheap::region::RegionConfig;
/// use farheap::store::MemStore;
/// use farheap_collections::sub::{Collective, CollectiveConfig};
/// use farheap::ByteCount;
/// use std::sync::Arc;
///
/// let collective = |page, local| {
///     let store = Arc::new(MemStore::new(ByteCount::mib(64))?);
///     let config = CollectiveConfig::new().local(local).page(page);
///     Ok::<_, farheap::Error>(Arc::new(Collective::create(config, store)?))
/// };
/// // Leaves of 16 KiB; above them nodes of 4 KiB, purely local while 64 KiB last.
/// let leaves = match collective(ByteCount::kib(16), ByteCount::ZERO) {
///     Ok(leaves) => leaves,
///     // Without permission for userfaultfd; the message says how to get it.
///     Err(error) => return Ok(println!("{error}")),
/// };
/// let above = collective(ByteCount::kib(4), ByteCount::kib(64))?;
/// let mut map = FarLeveledMap::with_levels(leaves, vec![above])?;
/// for key in 0..100_000_u64 {
///     map.insert(key, key * 2)?;
/// }
/// assert_eq!(map.get(&77), Some(&154));
/// assert!(map.range(500..510).map(|(key, _)| *key).eq(500..510));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct FarLeveledMap<K, V> {
    root: Option<Node<K, V>>,
    len: usize,
    levels: Levels<K, V>,
}

impl<K, V> FarLeveledMap<K, V> {
    /// An empty map with all levels in one collective. Nothing is allocated.
    ///
    /// # Errors
    /// [`AllocError::TooLarge`] when not even two pairs fit into a page.
    pub fn new(collective: Arc<Collective>) -> Result<FarLeveledMap<K, V>, AllocError> {
        FarLeveledMap::with_levels(collective, Vec::new())
    }

    /// An empty map with leaves in one collective and the levels above in others, from level 1
    /// up; the last of them is for all levels from there on.
    ///
    /// # Errors
    /// [`AllocError::TooLarge`] when not even two pairs, or two keys with what is known of a node,
    /// fit into a page.
    pub fn with_levels(
        leaves: Arc<Collective>,
        above: Vec<Arc<Collective>>,
    ) -> Result<FarLeveledMap<K, V>, AllocError> {
        Ok(FarLeveledMap { root: None, len: 0, levels: Levels::new(leaves, above)? })
    }

    /// Number of pairs.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there is no pair.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of levels, leaves included.
    #[must_use]
    pub fn height(&self) -> usize {
        self.root.as_ref().map_or(0, |root| root.level() + 1)
    }

    /// The collective that the nodes of a level come from; 0 is the leaves' level.
    #[must_use]
    pub fn collective(&self, level: usize) -> &Arc<Collective> {
        self.levels.collective(level)
    }

    /// Nodes of each level, leaves first, and how many of them are purely local. Touches no leaf.
    #[must_use]
    pub fn nodes(&self) -> Vec<(u64, u64)> {
        let mut counts = vec![(0, 0); self.height()];
        self.visit(|node| {
            let (all, local) = &mut counts[node.level()];
            *all += 1;
            *local += u64::from(self.levels.is_local(node));
        });
        counts
    }

    /// Counts the links from a node to its children by where their ends are.
    #[must_use]
    pub fn links(&self) -> Links {
        let mut links = Links::default();
        self.visit(|node| {
            let ByKind::Inner(inner) = node.kind() else { return };
            let is_local = self.levels.is_local(node);
            for child in inner.values(self.levels.shape(node.level())) {
                match is_local && self.levels.is_local(child) {
                    true => links.purely_local += 1,
                    false => links.cross_page += 1,
                }
            }
        });
        links
    }

    /// Calls a function for every node; what it says of leaves is read in their parents.
    fn visit(&self, mut see: impl FnMut(&Node<K, V>)) {
        let mut open: Vec<&Node<K, V>> = self.root.iter().collect();
        while let Some(node) = open.pop() {
            see(node);
            if let ByKind::Inner(inner) = node.kind() {
                open.extend(inner.values(self.levels.shape(node.level())));
            }
        }
    }

    /// Bytes of local memory that the levels above the leaves take when this number of pairs has been
    /// [repacked](FarLeveledMap::repack), for pages of these sizes.
    #[must_use]
    pub fn directory_bytes(pairs: usize, leaf_page: ByteCount, page: ByteCount) -> ByteCount {
        plan::directory::<K, V>(pairs, leaf_page, page).map_or(ByteCount::ZERO, |counts| {
            ByteCount(counts.iter().sum::<usize>() as u64 * page.get())
        })
    }

    /// Removes all pairs.
    pub fn clear(&mut self) {
        self.len = 0;
        let mut leaves = DrainedLeaves::of(self.root.take());
        while let Some(mut leaf) = leaves.next(&self.levels) {
            let level = leaf.level();
            if let ByKindMut::Leaf(leaf) = leaf.kind_mut() {
                leaf.clear(self.levels.shape(level));
            }
            self.levels.free(leaf);
        }
    }
}

impl<K: Ord, V> FarLeveledMap<K, V> {
    /// The leaf that a key belongs to.
    fn leaf<Q>(&self, key: &Q) -> Option<&Leaf<K, V>>
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        let mut node = self.root.as_ref()?;
        loop {
            self.levels.bring_in(node);
            match node.kind() {
                ByKind::Leaf(leaf) => return Some(leaf),
                ByKind::Inner(inner) => {
                    let shape = self.levels.shape(node.level());
                    node = &inner.values(shape)[inner.child_of(key)];
                }
            }
        }
    }

    fn leaf_mut<Q>(&mut self, key: &Q) -> Option<&mut Leaf<K, V>>
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        let mut node = self.root.as_mut()?;
        loop {
            let level = node.level();
            self.levels.bring_in(node);
            match node.kind_mut() {
                ByKindMut::Leaf(leaf) => return Some(leaf),
                ByKindMut::Inner(inner) => {
                    let at = inner.child_of(key);
                    node = &mut inner.values_mut(self.levels.shape(level))[at];
                }
            }
        }
    }

    /// The value of a key.
    #[must_use]
    pub fn get<Q>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        let leaf = self.leaf(key)?;
        leaf.search(key).ok().map(|at| &leaf.values(self.levels.shape(0))[at])
    }

    /// The value of a key, for changing it in place.
    #[must_use]
    pub fn get_mut<Q>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        let shape = self.levels.shape(0);
        let leaf = self.leaf_mut(key)?;
        leaf.search(key).ok().map(|at| &mut leaf.values_mut(shape)[at])
    }

    /// Removes a key; returns its value. Nodes are freed when they are empty, not before:
    /// [`repack`](FarLeveledMap::repack) merges those that are nearly so.
    pub fn remove<Q>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        let shape = self.levels.shape(0);
        let leaf = self.leaf_mut(key)?;
        let at = leaf.search(key).ok()?;
        let (_, value) = leaf.remove(shape, at);
        let is_empty = leaf.len() == 0;
        self.len -= 1;
        if is_empty {
            self.prune(key);
        }
        Some(value)
    }

    /// The lowest node on a key's path that has more than one child, with the child's index.
    fn fork_above<Q>(&mut self, key: &Q) -> Option<(&mut Inner<K, V>, usize, Shape)>
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        let (mut fork, mut node) = (None, self.root.as_ref()?);
        while let ByKind::Inner(inner) = node.kind() {
            if inner.len() > 1 {
                fork = Some(node.level());
            }
            node = &inner.values(self.levels.shape(node.level()))[inner.child_of(key)];
        }
        let (fork, mut node) = (fork?, self.root.as_mut()?);
        loop {
            let (level, shape) = (node.level(), self.levels.shape(node.level()));
            let inner = node.inner_mut()?;
            let at = inner.child_of(key);
            if level == fork {
                return Some((inner, at, shape));
            }
            node = &mut inner.values_mut(shape)[at];
        }
    }

    /// Frees the empty leaf that a key belongs to, with the nodes that hold nothing else.
    fn prune<Q>(&mut self, key: &Q)
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        let dead = match self.fork_above(key) {
            None => self.root.take(),
            Some((fork, at, shape)) => Some(fork.remove(shape, at).1),
        };
        let mut leaves = DrainedLeaves::of(dead);
        while let Some(leaf) = leaves.next(&self.levels) {
            self.levels.free(leaf);
        }
        while let Some(root) = self.root.as_mut()
            && root.len() == 1
            && let shape = self.levels.shape(root.level())
            && let Some(inner) = root.inner_mut()
        {
            let (_, child) = inner.remove(shape, 0);
            let old = std::mem::replace(root, child);
            self.levels.free(old);
        }
    }
}

impl<K, V> Drop for FarLeveledMap<K, V> {
    fn drop(&mut self) {
        // The last user of a collective drops all pages at once, without touching them.
        if std::mem::needs_drop::<(K, V)>() || !self.levels.are_alone() {
            self.clear();
        }
    }
}

impl<K: fmt::Debug, V: fmt::Debug> fmt::Debug for FarLeveledMap<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self).finish()
    }
}

impl<'a, K, V> IntoIterator for &'a FarLeveledMap<K, V> {
    type Item = (&'a K, &'a V);
    type IntoIter = LevelIter<'a, K, V>;
    fn into_iter(self) -> LevelIter<'a, K, V> {
        self.iter()
    }
}
