//! Bringing in the nodes of a scan before it comes to them.
//!
//! After a rearrangement nodes that follow each other share a page. Every `2^h`th node, on average, has
//! more than `h` levels: with some more nodes to a page, the chain at level `h` leads from page to page.
//! Where its nodes are purely local, it tells of all pages before one is read.

use super::node::{self, Link};
use super::{FarSkipList, ListStrategy};
use crate::base::units::ByteCount;
use crate::containers::FILL_DEFAULT;
use std::borrow::Borrow;

/// Maximum number of nodes whose pages one call brings in: they must not push each other out.
const NODES_MAX: usize = 128;

impl<K: Ord, V> FarSkipList<K, V> {
    /// Brings in the pages of the next `pairs` pairs from a key on, some 64 at most, before a scan
    /// comes to them one by one: see [`Region::fetch_many`](crate::paging::region::Region::fetch_many). How
    /// many pairs are on a page is an estimate, so that some may be brought in in vain, and some not.
    pub fn fetch_from<Q>(&self, key: &Q, pairs: usize)
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        let level = self.pages_level();
        let preds = self.seek(|other| other.borrow() < key);
        let mut at = self.next_of(preds[level], level);
        let mut wanted = Vec::new();
        for _ in 0..(pairs >> level).min(NODES_MAX) {
            let Some(node) = at else { break };
            if self.collective.is_local(node.as_ptr()) {
                // The pairs behind it are in far memory from some node on.
                wanted.extend(self.first_far(node, 1 << level));
            } else {
                // Its page is read to go on from it.
                wanted.push(node);
                self.fetch(&wanted);
                wanted.clear();
            }
            at = node.next(level);
        }
        self.fetch(&wanted);
    }

    fn fetch(&self, nodes: &[Link<K, V>]) {
        let page = |node: &Link<K, V>| (node.as_ptr().cast_const(), ByteCount(1));
        let pages: Vec<(*const u8, ByteCount)> = nodes.iter().map(page).collect();
        // Advice: what is refused is read when it is touched.
        let _ = self.collective.region().fetch_many(&pages);
    }

    /// The first node behind a local one that is not local, if it is one of the next `most`.
    fn first_far(&self, node: Link<K, V>, most: usize) -> Option<Link<K, V>> {
        let mut next = node.next(0);
        for _ in 0..most {
            let found = next?;
            if !self.collective.is_local(found.as_ptr()) {
                return Some(found);
            }
            next = found.next(0);
        }
        None
    }

    /// A level of whose nodes a page has two or more, on average: one page in eight has none then.
    fn pages_level(&self) -> usize {
        if !matches!(self.strategy, ListStrategy::Page | ListStrategy::LocalPage) {
            return 0;
        }
        // Two levels are what a node has on average.
        let size = node::layout::<K, V>(2).size() as f64;
        let nodes = self.collective.page_size().get() as f64 * FILL_DEFAULT / size;
        (nodes.max(1.0) as usize).ilog2().saturating_sub(1) as usize
    }
}
