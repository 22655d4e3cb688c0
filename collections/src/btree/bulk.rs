//! Building a tree from sorted pairs, bottom up.
#![expect(unsafe_code, reason = "makes nodes in memory that it allocated")]

use super::node::{self, CHILDREN, Link};
use super::{FarBTreeMap, TreeStrategy};
use crate::sub::{AllocError, Collective, SubAllocator};
use crate::{FILL_DEFAULT, PageFiller};
use std::ptr::NonNull;
use std::sync::Arc;

/// One level while it is built: nodes with a pair between each two.
struct Level<K, V> {
    nodes: Vec<Link<K, V>>,
    between: Vec<(K, V)>,
}

/// Sizes of groups of 2 or 3 that `count` (at least 2) divides into.
fn groups(count: usize) -> impl Iterator<Item = usize> {
    let groups = count.div_ceil(CHILDREN);
    let twos = groups * CHILDREN - count;
    (0..groups).map(move |at| if at < groups - twos { CHILDREN } else { CHILDREN - 1 })
}

impl<K: Ord, V> FarBTreeMap<K, V> {
    /// Builds a map of pairs in ascending key order: full nodes, and no page written twice. The
    /// strategy's placement is that of [`make_page_aware`](FarBTreeMap::make_page_aware).
    ///
    /// # Errors
    /// [`AllocError`] when memory ran out; the pairs are dropped.
    ///
    /// # Panics
    /// When the keys do not ascend.
    pub fn bulk_load(
        collective: Arc<Collective>,
        strategy: TreeStrategy,
        pairs: impl IntoIterator<Item = (K, V), IntoIter: ExactSizeIterator>,
    ) -> Result<FarBTreeMap<K, V>, AllocError> {
        let pairs = pairs.into_iter();
        let mut map = FarBTreeMap::new(collective.clone(), strategy);
        if pairs.len() == 0 {
            return Ok(map);
        }
        let builder = NodeMaker { collective: &collective, strategy };
        let len = pairs.len();
        let mut level = builder.leaves(pairs)?;
        while level.nodes.len() > 1 {
            level = builder.level_above(level)?;
        }
        map.root = level.nodes.pop();
        map.len = len;
        if strategy.uses_local() {
            map.fill_local();
        }
        map.make_page_aware()?;
        Ok(map)
    }

    /// Moves nodes to local memory, the highest first, until it is full.
    fn fill_local(&mut self) {
        let mut cells = vec![super::local::Cell::Root];
        while !cells.is_empty() {
            let mut below = Vec::new();
            for cell in cells {
                if self.at(cell).is_none() {
                    continue;
                }
                let layout = node::local_layout::<K, V>();
                let Ok(memory) = self.collective.purely_local().allocate(layout) else { return };
                let node = self.relocate(cell, memory);
                if !node.is_leaf() {
                    let cells = (0..=node.len()).map(|at| super::local::Cell::Child(node, at));
                    below.extend(cells);
                }
            }
            cells = below;
        }
    }
}

/// Maker of the nodes of a map that is built.
struct NodeMaker<'a> {
    collective: &'a Arc<Collective>,
    strategy: TreeStrategy,
}

impl NodeMaker<'_> {
    fn leaves<K: Ord, V>(
        &self,
        mut pairs: impl ExactSizeIterator<Item = (K, V)>,
    ) -> Result<Level<K, V>, AllocError> {
        let mut pages = PageFiller::new(self.collective, FILL_DEFAULT);
        let mut level = Level { nodes: Vec::new(), between: Vec::new() };
        // `n` pairs with one left out after each leaf but the last: `n + 1` in groups of len + 1.
        for group in groups(pairs.len() + 1) {
            if !level.nodes.is_empty() {
                let pair = pairs.next().expect("the groups add up");
                level.between.push(pair);
            }
            let leaf = match self.node(0, &mut pages) {
                Ok(leaf) => leaf,
                Err(error) => return Err(self.give_up(level, error)),
            };
            for at in 0..group - 1 {
                leaf.insert_pair(at, pairs.next().expect("the groups add up"));
            }
            assert_ascending(&level, leaf);
            level.nodes.push(leaf);
        }
        Ok(level)
    }

    fn level_above<K, V>(&self, below: Level<K, V>) -> Result<Level<K, V>, AllocError> {
        let mut pages = PageFiller::new(self.collective, FILL_DEFAULT);
        let count = below.nodes.len();
        let height = below.nodes[0].height() + 1;
        let (mut nodes, mut between) = (below.nodes.into_iter(), below.between.into_iter());
        let mut level = Level { nodes: Vec::new(), between: Vec::new() };
        for group in groups(count) {
            if !level.nodes.is_empty() {
                level.between.push(between.next().expect("the groups add up"));
            }
            let node = match self.node(height, &mut pages) {
                Ok(node) => node,
                Err(error) => {
                    level.nodes.extend(nodes);
                    return Err(self.give_up(level, error));
                }
            };
            node.set_child(0, nodes.next().expect("the groups add up"));
            for at in 1..group {
                node.set_child(at, nodes.next().expect("the groups add up"));
                node.insert_pair(at - 1, between.next().expect("the groups add up"));
            }
            level.nodes.push(node);
        }
        Ok(level)
    }

    fn node<K, V>(&self, height: u8, pages: &mut PageFiller<'_>) -> Result<Link<K, V>, AllocError> {
        let layout = node::layout::<K, V>(height);
        let memory: NonNull<u8> = match self.strategy {
            TreeStrategy::Hint => self.collective.hint_only().allocate(layout, None)?,
            TreeStrategy::Plain | TreeStrategy::Local => {
                self.collective.swappable().allocate(layout)?
            }
            _ => pages.allocate(layout)?,
        };
        // SAFETY: just allocated for a node of this height.
        Ok(unsafe { Link::create(memory, height) })
    }

    /// Drops what was built; the subtrees of an unfinished level are whole trees.
    fn give_up<K, V>(&self, level: Level<K, V>, error: AllocError) -> AllocError {
        let mut map = FarBTreeMap::new(self.collective.clone(), self.strategy);
        for root in level.nodes {
            map.root = Some(root);
            map.clear();
        }
        error
    }
}

/// Checks a new leaf against itself, and against the pair before it and the leaf before that.
fn assert_ascending<K: Ord, V>(level: &Level<K, V>, leaf: Link<K, V>) {
    let before = level.nodes.last().map(|last| last.key(last.len() - 1));
    let between = level.between.last().map(|(key, _)| key);
    let keys = (0..leaf.len()).map(|at| leaf.key(at));
    let ascend = before.into_iter().chain(between).chain(keys).is_sorted_by(|a, b| a < b);
    assert!(ascend, "the keys of a bulk load ascend");
}
