//! Reading a leveled map in key order.

use super::FarLeveledMap;
use super::node::{ByKind, Node};
use crate::ordered::is_before_end;
use crate::pairs::Shape;

use farheap::region::Advice;
use std::borrow::Borrow;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Bound, RangeBounds};
use std::slice;

impl<K, V> FarLeveledMap<K, V> {
    /// All pairs in key order.
    #[must_use]
    pub fn iter(&self) -> LevelIter<'_, K, V> {
        LevelIter { map: self, open: vec![self.root.as_slice().iter()], keys: &[], values: &[] }
    }

    fn shape_of(&self, node: &Node<K, V>) -> Shape {
        self.levels.shape(node.level())
    }
}

impl<K: Ord, V> FarLeveledMap<K, V> {
    /// The pairs whose keys are in a range, in key order. A range that ends before it starts holds
    /// nothing.
    pub fn range<R, Q>(&self, range: R) -> LevelRange<'_, K, V, R, Q>
    where
        K: Borrow<Q>,
        R: RangeBounds<Q>,
        Q: Ord + ?Sized,
    {
        let iter = match range.start_bound() {
            Bound::Unbounded => self.iter(),
            Bound::Included(key) => self.iter_from(key, false),
            Bound::Excluded(key) => self.iter_from(key, true),
        };
        LevelRange { iter, range, _bounds: PhantomData }
    }

    /// Brings in the leaves of the next `pairs` pairs from a key on, before a scan comes to them one
    /// by one: see [`Advice::WillNeedNow`]. Worth it where the
    /// store answers at once, as memory does.
    pub fn fetch_from<Q>(&self, key: &Q, pairs: usize)
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        let home = self.levels.collective(0);
        let mut scan = self.iter_from(key, false);
        let (mut left, mut pages) = (pairs.saturating_sub(scan.keys.len()), Vec::new());
        // A leaf is counted by the node above it: it is not touched here.
        while left > 0
            && let Some(node) = scan.next_node()
        {
            match node.kind() {
                ByKind::Inner(inner) => scan.open.push(inner.values(self.shape_of(node)).iter()),
                ByKind::Leaf(leaf) => {
                    pages.push(home.page_around(leaf.memory().as_ptr().cast_const().cast()));
                    left = left.saturating_sub(leaf.len());
                }
            }
        }
        // Advice: leaves of pairs without a size are no pages, and what is refused is read later.
        let _ = home.region().advise(&pages, Advice::WillNeedNow);
    }

    fn iter_from<Q>(&self, key: &Q, is_behind: bool) -> LevelIter<'_, K, V>
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        let mut iter = LevelIter { map: self, open: Vec::new(), keys: &[], values: &[] };
        let Some(mut node) = self.root.as_ref() else { return iter };
        loop {
            let shape = self.shape_of(node);
            self.levels.bring_in(node);
            match node.kind() {
                ByKind::Inner(inner) => {
                    let (at, children) = (inner.child_of(key), inner.values(shape));
                    iter.open.push(children[at + 1..].iter());
                    node = &children[at];
                }
                ByKind::Leaf(leaf) => {
                    let at = match leaf.search(key) {
                        Ok(at) => at + usize::from(is_behind),
                        Err(at) => at,
                    };
                    (iter.keys, iter.values) = (&leaf.keys()[at..], &leaf.values(shape)[at..]);
                    return iter;
                }
            }
        }
    }
}

/// Pairs of a leveled map in key order.
pub struct LevelIter<'a, K, V> {
    map: &'a FarLeveledMap<K, V>,
    /// The rest of each node on the path, root first.
    open: Vec<slice::Iter<'a, Node<K, V>>>,
    keys: &'a [K],
    values: &'a [V],
}

impl<K, V> fmt::Debug for LevelIter<'_, K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LevelIter").finish_non_exhaustive()
    }
}

impl<'a, K, V> LevelIter<'a, K, V> {
    /// The next node that is not open.
    fn next_node(&mut self) -> Option<&'a Node<K, V>> {
        loop {
            match self.open.last_mut()?.next() {
                None => drop(self.open.pop()),
                node => return node,
            }
        }
    }
}

impl<'a, K, V> Iterator for LevelIter<'a, K, V> {
    type Item = (&'a K, &'a V);

    fn next(&mut self) -> Option<(&'a K, &'a V)> {
        while self.keys.is_empty() {
            let node = self.next_node()?;
            let shape = self.map.shape_of(node);
            self.map.levels.bring_in(node);
            match node.kind() {
                ByKind::Inner(inner) => self.open.push(inner.values(shape).iter()),
                ByKind::Leaf(leaf) => (self.keys, self.values) = (leaf.keys(), leaf.values(shape)),
            }
        }
        let (key, keys) = self.keys.split_first()?;
        let (value, values) = self.values.split_first()?;
        (self.keys, self.values) = (keys, values);
        Some((key, value))
    }
}

impl<K, V> std::iter::FusedIterator for LevelIter<'_, K, V> {}

/// The pairs of a leveled map whose keys are in a range, in key order.
pub struct LevelRange<'a, K, V, R, Q: ?Sized> {
    iter: LevelIter<'a, K, V>,
    range: R,
    _bounds: PhantomData<fn(&Q)>,
}

impl<K, V, R: fmt::Debug, Q: ?Sized> fmt::Debug for LevelRange<'_, K, V, R, Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LevelRange").field("range", &self.range).finish_non_exhaustive()
    }
}

impl<'a, K, V, R, Q> Iterator for LevelRange<'a, K, V, R, Q>
where
    K: Borrow<Q>,
    Q: Ord + ?Sized,
    R: RangeBounds<Q>,
{
    type Item = (&'a K, &'a V);

    fn next(&mut self) -> Option<(&'a K, &'a V)> {
        let (key, value) = self.iter.next()?;
        if is_before_end(&self.range, key) {
            return Some((key, value));
        }
        self.iter.open.clear();
        self.iter.keys = &[];
        None
    }
}
