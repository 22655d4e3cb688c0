//! Rebuilding the tree: full nodes, other page sizes, upper levels in local memory first.

use super::FarLeveledMap;
use super::leaves::DrainedLeaves;
use super::levels::Levels;
use super::node::{ByKindMut, Node};
use super::plan;
use crate::sub::{AllocError, Collective};
use std::sync::Arc;

impl<K: Ord + Clone, V> FarLeveledMap<K, V> {
    /// Packs the pairs into as few leaves as possible, each filled to `fill` (0 to 1; one for a map
    /// that is only read or changed in place), and the levels above them to the last entry.
    ///
    /// # Errors
    /// [`AllocError`] when there are not enough pages; the map is as it was.
    pub fn repack(&mut self, fill: f64) -> Result<(), AllocError> {
        let levels = self.levels.clone();
        self.repack_to(levels, fill)
    }

    /// As [`repack`](FarLeveledMap::repack), to other collectives: to change page sizes.
    ///
    /// # Errors
    /// As [`repack`](FarLeveledMap::repack) and [`with_levels`](FarLeveledMap::with_levels); the map
    /// is as it was.
    pub fn repack_into(
        &mut self,
        leaves: Arc<Collective>,
        above: Vec<Arc<Collective>>,
        fill: f64,
    ) -> Result<(), AllocError> {
        self.repack_to(Levels::new(leaves, above)?, fill)
    }

    /// All nodes are allocated before a pair moves. Pages take no memory before they are filled,
    /// and leaves are freed as they are emptied.
    fn repack_to(&mut self, to: Levels<K, V>, fill: f64) -> Result<(), AllocError> {
        let shape = to.shape(0);
        let most = ((shape.capacity as f64 * fill) as usize).clamp(1, shape.capacity);
        let mut fresh = allocate_all(&to, self.len, most)?;
        let from = std::mem::replace(&mut self.levels, to);
        let (len, to) = (std::mem::take(&mut self.len), &self.levels);
        let mut old = DrainedLeaves::of(self.root.take());
        let mut done: Vec<(K, Node<K, V>)> = Vec::new();
        while let Some(mut node) = old.next(&from) {
            let ByKindMut::Leaf(source) = node.kind_mut() else { continue };
            while source.len() > 0 {
                let last = done.last_mut().filter(|(_, last)| last.len() < most);
                let Some((_, last)) = last else {
                    let leaf = fresh[0].pop().expect("as many as the pairs fill");
                    done.push((source.keys()[0].clone(), leaf));
                    continue;
                };
                let ByKindMut::Leaf(last) = last.kind_mut() else { continue };
                let count = source.len().min(most - last.len());
                source.move_head(from.shape(0), count, last, shape);
            }
            from.free(node);
        }
        for (level, nodes) in fresh.into_iter().enumerate().skip(1) {
            done = raise(to, level, nodes, done);
        }
        (self.root, self.len) = (done.pop().map(|(_, root)| root), len);
        // Nodes that were allocated beside the old directory may have been refused local memory
        // that is free now. Advice: where it cannot be followed, nodes stay where they are.
        let _ = self.place_directory();
        Ok(())
    }
}

/// All nodes of a tree with full levels above its leaves, upper levels first; none when one is
/// refused.
fn allocate_all<K, V>(
    to: &Levels<K, V>,
    len: usize,
    most: usize,
) -> Result<Vec<Vec<Node<K, V>>>, AllocError> {
    let counts = plan::level_counts(len, most, |level| to.shape(level).capacity);
    let mut fresh: Vec<Vec<Node<K, V>>> = counts.iter().map(|_| Vec::new()).collect();
    for (level, count) in counts.into_iter().enumerate().rev() {
        for _ in 0..count {
            match to.allocate(level) {
                Ok(node) => fresh[level].push(node),
                Err(error) => {
                    fresh.into_iter().flatten().for_each(|node| to.free(node));
                    return Err(error);
                }
            }
        }
    }
    // The first one allocated is the first one used.
    fresh.iter_mut().for_each(|nodes| nodes.reverse());
    Ok(fresh)
}

/// Puts nodes into the level above them.
fn raise<K: Clone, V>(
    to: &Levels<K, V>,
    level: usize,
    mut fresh: Vec<Node<K, V>>,
    below: Vec<(K, Node<K, V>)>,
) -> Vec<(K, Node<K, V>)> {
    let shape = to.shape(level);
    let mut done: Vec<(K, Node<K, V>)> = Vec::new();
    for (bound, child) in below {
        if done.last().is_none_or(|(_, last)| last.len() == shape.capacity) {
            done.push((bound.clone(), fresh.pop().expect("as many as the nodes below fill")));
        }
        let (_, last) = done.last_mut().expect("there is one");
        let inner = last.inner_mut().expect("it is above leaves");
        inner.insert(shape, inner.len(), bound, child);
    }
    done
}

impl<K, V> FarLeveledMap<K, V> {
    /// Moves nodes above the leaves so that upper levels are purely local before lower ones, as far
    /// as local memory goes. For maps that have grown: a node finds local memory full when it is
    /// made, however high it is.
    ///
    /// # Errors
    /// [`AllocError`] when there is no page for a node that must leave; the map is whole.
    pub(super) fn place_directory(&mut self) -> Result<(), AllocError> {
        let counts = self.nodes();
        let mut stay: Vec<u64> = counts.iter().map(|(_, local)| *local).collect();
        // From the top: what a level may keep is what those above it leave of their collective.
        for level in (1..counts.len()).rev() {
            let collective = self.levels.collective(level);
            let bytes = |level: usize| self.levels.shape(level).layout.size() as u64;
            let same = |other: &usize| Arc::ptr_eq(self.levels.collective(*other), collective);
            let above: u64 =
                (level + 1..counts.len()).filter(same).map(|l| stay[l] * bytes(l)).sum();
            let room = collective.local_capacity().get().saturating_sub(above);
            stay[level] = counts[level].0.min(room / bytes(level).max(1));
        }
        self.move_nodes(&stay, false)?;
        self.move_nodes(&stay, true)
    }

    /// Moves nodes to local memory, or out of it, until as many of each level are local.
    fn move_nodes(&mut self, wanted: &[u64], in_or_out: bool) -> Result<(), AllocError> {
        let mut local: Vec<u64> = self.nodes().iter().map(|(_, local)| *local).collect();
        let levels = &self.levels;
        let mut open: Vec<&mut Node<K, V>> = self.root.iter_mut().collect();
        while let Some(node) = open.pop() {
            let level = node.level();
            if level == 0 {
                continue;
            }
            let (have, want) = (&mut local[level], wanted[level]);
            let is_wrong = if in_or_out { *have < want } else { *have > want };
            if is_wrong && levels.is_local(node) != in_or_out {
                match levels.relocate(node, in_or_out) {
                    Ok(()) if in_or_out => *have += 1,
                    Ok(()) => *have -= 1,
                    // Something else uses the local memory too.
                    Err(_) if in_or_out => return Ok(()),
                    Err(error) => return Err(error),
                }
            }
            if let ByKindMut::Inner(inner) = node.kind_mut()
                && level > 1
            {
                open.extend(inner.values_mut(levels.shape(level)));
            }
        }
        Ok(())
    }
}
