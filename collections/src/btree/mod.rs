//! A B-tree whose nodes are placed by a strategy: the paper's 2-3 tree with pairs inside of nodes.
//!
//! `node` holds nodes, `path` ways through the tree, `remove` and `bulk` what their names say.
//! Everything about where nodes live is in `place` (which sub-allocator a new node comes from),
//! `local` (which node leaves local memory), and `rearrange` (moving nodes in batches).
//!
//! # Invariants
//! 1. All leaves are at height 0, all nodes but the root have 1 or 2 pairs, keys ascend.
//! 2. Memory for everything that an insert splits is allocated before anything changes.
//! 3. A node is in the set of local nodes exactly while it is linked and purely local.

#![expect(unsafe_code, reason = "hands out references into nodes and frees nodes")]

mod ahead;
mod bulk;
mod local;
mod node;
mod path;
mod place;
mod rearrange;
mod remove;

pub use place::TreeStrategy;

use super::{Links, Refused};
use crate::local_set::LocalSet;
use crate::ordered::{MapCursor, linked_map, map_traits};
use crate::sub::Collective;
use node::Link;
use path::Path;
use std::borrow::Borrow;
use std::cmp::Ordering;
use std::marker::PhantomData;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

/// An ordered map in far memory.
///
/// Lookups follow plain pointers; a node that is not resident faults. Where nodes live is decided
/// by a [`TreeStrategy`]. Dropping the map frees its nodes; when it is the last user of its
/// collective and nothing needs dropping, it does so without touching them.
///
/// # Examples
/// ```
/// use farheap_collections::{FarBTreeMap, TreeStrategy};
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
/// let mut map = FarBTreeMap::new(collective, TreeStrategy::LocalDfs);
/// for key in 0..1000_u64 {
///     map.insert(key, key.to_string())?;
/// }
/// map.make_page_aware()?;
/// assert_eq!(map.get(&42).map(String::as_str), Some("42"));
/// assert_eq!(map.range(10..20).count(), 10);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct FarBTreeMap<K, V> {
    root: Option<Link<K, V>>,
    len: usize,
    collective: Arc<Collective>,
    strategy: TreeStrategy,
    local: LocalSet<Link<K, V>>,
    /// Where a rearrangement in parts goes on: the next child at each level.
    rearranged_to: Vec<usize>,
    _owns: PhantomData<(K, V)>,
}

// SAFETY: the map owns its nodes and pairs; the collective is shared between threads by design.
unsafe impl<K: Send, V: Send> Send for FarBTreeMap<K, V> {}
// SAFETY: `&FarBTreeMap` only reads nodes and hands out `&K` and `&V`.
unsafe impl<K: Sync, V: Sync> Sync for FarBTreeMap<K, V> {}

impl<K, V> FarBTreeMap<K, V> {
    /// An empty map. Nothing is allocated.
    #[must_use]
    pub fn new(collective: Arc<Collective>, strategy: TreeStrategy) -> FarBTreeMap<K, V> {
        let local = LocalSet::new();
        let rearranged_to = Vec::new();
        let (root, len, _owns) = (None, 0, PhantomData);
        FarBTreeMap { root, len, collective, strategy, local, rearranged_to, _owns }
    }

    /// Places nodes by another strategy from now on. Those that there are stay where they are until
    /// [`make_page_aware`](FarBTreeMap::make_page_aware) moves them; it moves none out of purely-local
    /// memory.
    pub fn set_strategy(&mut self, strategy: TreeStrategy) {
        self.strategy = strategy;
        self.rearranged_to.clear();
    }

    /// All pairs in key order.
    #[must_use]
    pub fn iter(&self) -> Iter<'_, K, V> {
        Iter::new(Path::first(self.root, |_| Ordering::Greater), self.len)
    }

    /// Counts the links between nodes by where their ends are.
    #[must_use]
    pub fn links(&self) -> Links {
        let mut links = Links::default();
        let mut open: Vec<Link<K, V>> = self.root.into_iter().collect();
        while let Some(node) = open.pop() {
            if node.is_leaf() {
                continue;
            }
            for child in (0..=node.len()).map(|at| node.child(at)) {
                links.count(&self.collective, node.as_ptr(), child.as_ptr());
                open.push(child);
            }
        }
        links
    }

    /// Removes all pairs. If dropping one panics, those that are left are leaked.
    pub fn clear(&mut self) {
        let mut open: Vec<Link<K, V>> = self.root.take().into_iter().collect();
        self.len = 0;
        // First: a node whose pairs are dropped, which may panic, is not to be found any more.
        self.local = LocalSet::new();
        while let Some(node) = open.pop() {
            if !node.is_leaf() {
                open.extend((0..=node.len()).map(|at| node.child(at)));
            }
            for at in 0..node.len() {
                // SAFETY: an initialised pair of a node that is not in the tree any more.
                unsafe { node.pair(at).drop_in_place() };
            }
            self.free_unlinked(node);
        }
    }
}

impl<K: Ord, V> FarBTreeMap<K, V> {
    /// The pair of a key.
    fn pair<Q>(&self, key: &Q) -> Option<*mut (K, V)>
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        let mut node = self.root?;
        loop {
            match path::search(node, key) {
                Ok(at) => return Some(node.pair(at)),
                Err(_) if node.is_leaf() => return None,
                Err(at) => node = node.child(at),
            }
        }
    }

    /// The pairs whose keys are in a range, in key order.
    pub fn range<Q, R>(&self, range: R) -> Range<'_, K, V, R, Q>
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
        R: RangeBounds<Q>,
    {
        let path = Path::first(self.root, |key: &K| match range.start_bound() {
            Bound::Included(start) => key.borrow().cmp(start),
            // The pair after an equal key is the first.
            Bound::Excluded(start) => key.borrow().cmp(start).then(Ordering::Less),
            Bound::Unbounded => Ordering::Greater,
        });
        Range::new(path, range)
    }

    /// Inserts a pair; returns the value that the key had before.
    ///
    /// # Errors
    /// [`Refused`] gives the pair back when there is no memory for it: the map is as it was, but
    /// for the places of nodes.
    pub fn insert(&mut self, key: K, value: V) -> Result<Option<V>, Refused<K, V>> {
        let (mut path, found) = Path::find(self.root, &key);
        if found {
            let step = path.last().expect("a key is found in a node");
            // SAFETY: an initialised pair; `&mut self` makes this the only reference.
            let old = unsafe { &mut (*step.node.pair(usize::from(step.at))).1 };
            return Ok(Some(std::mem::replace(old, value)));
        }
        let fresh = match self.allocate_for_insert(&mut path) {
            Ok(fresh) => fresh,
            Err(error) => return Err(Refused { key, value, error }),
        };
        self.insert_at(&path, (key, value), fresh);
        self.len += 1;
        Ok(None)
    }

    /// Inserts a pair at the end of a path, using up the nodes that this takes.
    fn insert_at(&mut self, path: &Path<K, V>, pair: (K, V), fresh: Vec<Link<K, V>>) {
        let mut carried = (pair, None);
        let mut fresh = fresh.into_iter();
        for depth in (0..path.depth()).rev() {
            let step = path.step_at(depth);
            let (node, at) = (step.node, usize::from(step.at));
            let (pair, right) = carried;
            if !node.is_full() {
                if let Some(right) = right {
                    node.insert_child(at + 1, node.len() + 1, right);
                }
                node.insert_pair(at, pair);
                return;
            }
            let new = fresh.next().expect("one node was allocated for each split");
            carried = (split(node, at, pair, right, new), Some(new));
        }
        let root = fresh.next().expect("a node was allocated for the new root");
        let (pair, right) = carried;
        if let (Some(left), Some(right)) = (self.root, right) {
            root.set_child(0, left);
            root.set_child(1, right);
        }
        root.insert_pair(0, pair);
        self.root = Some(root);
    }
}

/// Splits a full node around its middle: `new` takes the upper part.
fn split<K, V>(
    node: Link<K, V>,
    at: usize,
    pair: (K, V),
    right: Option<Link<K, V>>,
    new: Link<K, V>,
) -> (K, V) {
    if let Some(right) = right {
        let mut children = [node.child(0), node.child(1), node.child(2), right];
        children[at + 1..].rotate_right(1);
        for (place, child) in children.into_iter().enumerate() {
            let half = if place < 2 { node } else { new };
            half.set_child(place % 2, child);
        }
    }
    match at {
        0 => {
            new.insert_pair(0, node.remove_pair(1));
            node.replace_pair(0, pair)
        }
        1 => {
            new.insert_pair(0, node.remove_pair(1));
            pair
        }
        _ => {
            new.insert_pair(0, pair);
            node.remove_pair(1)
        }
    }
}

map_traits!(FarBTreeMap, Iter);
linked_map!(FarBTreeMap, Path, Iter, Range);
