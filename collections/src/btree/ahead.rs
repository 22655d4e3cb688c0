//! Bringing in the nodes of a scan before it comes to them.
//!
//! Nodes that lie on one page after a rearrangement are a subtree of some levels, a *unit*. The
//! nodes above the units know where each unit starts; they are read for the search anyway, and are
//! purely local or stay in the page cache.

use super::FarBTreeMap;
use super::node::{self, Link};
use super::path::search;
use crate::sub::Collective;

use farheap::region::Advice;
use std::borrow::Borrow;

/// Maximum number of units that one call brings in: they must not push each other out.
const UNITS_MAX: usize = 64;
/// Part of a unit that a scan must reach for its page to be brought in: a unit may lie on two pages,
/// and the second, where its root is, need not be wanted.
const SLACK: f64 = 0.5;

impl<K: Ord, V> FarBTreeMap<K, V> {
    /// Brings in the pages of the next `pairs` pairs from a key on, some 64 at most, before a scan
    /// comes to them one by one: see [`Advice::WillNeedNow`].
    /// Which pages these are is known from the nodes above them, where a rearrangement put nodes
    /// that follow each other together; their number is estimated from how full nodes are on
    /// average, so that some may be brought in in vain.
    pub fn fetch_from<Q>(&self, key: &Q, pairs: usize)
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        let units = UnitRecord::of(self);
        let open = units.descend_to(self.root, key);
        units.fetch(&units.behind(open, pairs));
    }
}

/// Record of a tree's units, kept without touching them.
struct UnitRecord<'a> {
    collective: &'a Collective,
    /// For each height at which a subtree fills a page at most, the pairs of such a subtree.
    pairs: Vec<f64>,
}

impl UnitRecord<'_> {
    fn of<K, V>(map: &FarBTreeMap<K, V>) -> UnitRecord<'_> {
        let levels = map.root.map_or(0, |root| usize::from(root.height()) + 1);
        let children = (map.len as f64 + 1.0).powf(1.0 / levels.max(1) as f64);
        let page = map.collective.page_size().get() as f64;
        let size = node::layout::<K, V>(0).size() as f64;
        let (mut pairs, mut nodes, mut level) = (Vec::new(), 1.0, 1.0);
        while pairs.is_empty() || (nodes * size <= page && pairs.len() < levels) {
            pairs.push(nodes * (children - 1.0));
            level *= children;
            nodes += level;
        }
        UnitRecord { collective: &map.collective, pairs }
    }

    fn fetch<K, V>(&self, nodes: &[Link<K, V>]) {
        let page =
            |node: &Link<K, V>| self.collective.page_around(node.as_ptr().cast_const().cast());
        let pages: Vec<*const [u8]> = nodes.iter().map(page).collect();
        // Advice: what is refused is read when it is touched.
        let _ = self.collective.region().advise(&pages, Advice::WillNeedNow);
    }

    /// The way to a key, whose unit it brings in.
    fn descend_to<K, V, Q>(&self, root: Option<Link<K, V>>, key: &Q) -> Vec<Open<K, V>>
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        let mut open = Vec::new();
        let mut next = root.map(|root| (root, usize::from(root.height())));
        let mut is_above = true;
        while let Some((node, height)) = next {
            if is_above && !self.is_above(node, height) {
                is_above = false;
                self.fetch(&[node]);
            }
            let found = search(node, key);
            let (Ok(at) | Err(at)) = found;
            open.push(Open { node, height, next: at + 1 });
            let below = height > 0 && found.is_err();
            next = below.then(|| (node.child(at), height - 1));
        }
        open
    }

    /// The roots of the units behind a place that hold the next `pairs` pairs.
    fn behind<K, V>(&self, mut open: Vec<Open<K, V>>, pairs: usize) -> Vec<Link<K, V>> {
        let mut behind = Vec::new();
        let mut left = pairs as f64;
        while left > 0.0 && behind.len() < UNITS_MAX {
            let Some(last) = open.last_mut() else { break };
            if last.height == 0 || last.next > last.node.len() {
                open.pop();
                continue;
            }
            if last.next > 0 {
                // The pair between two children.
                left -= 1.0;
            }
            let (node, height) = (last.node.child(last.next), last.height - 1);
            last.next += 1;
            if !self.is_above(node, height) {
                if left <= self.pairs[height] * SLACK {
                    break;
                }
                behind.push(node);
                left -= self.pairs[height];
            } else if height == 0 {
                left -= node.len() as f64;
            } else {
                open.push(Open { node, height, next: 0 });
            }
        }
        behind
    }

    /// True if a node tells where units are.
    fn is_above<K, V>(&self, node: Link<K, V>, height: usize) -> bool {
        height >= self.pairs.len() || self.collective.is_local(node.as_ptr())
    }
}

/// A node on the way, and the next child to go to.
struct Open<K, V> {
    node: Link<K, V>,
    height: usize,
    next: usize,
}
