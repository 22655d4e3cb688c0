//! Inserting: nodes that are full are split on the way down.

use super::FarLeveledMap;
use super::levels::Levels;
use super::node::{ByKindMut, Inner, Node};
use crate::Refused;
use crate::sub::AllocError;

impl<K: Ord + Clone, V> FarLeveledMap<K, V> {
    /// Inserts a pair; returns the value that the key had before. Keys that arrive in order fill
    /// their leaves.
    ///
    /// # Errors
    /// [`Refused`] gives the pair back when there is no page for it; the map holds what it held.
    pub fn insert(&mut self, key: K, value: V) -> Result<Option<V>, Refused<K, V>> {
        let shape = self.levels.shape(0);
        let Some(leaf) = self.leaf_mut(&key) else {
            return match self.levels.allocate(0) {
                Ok(mut leaf) => {
                    fill_first(&self.levels, &mut leaf, key, value);
                    self.root = Some(leaf);
                    self.len = 1;
                    Ok(None)
                }
                Err(error) => Err(Refused { key, value, error }),
            };
        };
        match leaf.search(&key) {
            Ok(at) => return Ok(Some(std::mem::replace(&mut leaf.values_mut(shape)[at], value))),
            Err(at) if leaf.len() < shape.capacity => leaf.insert(shape, at, key, value),
            Err(at) => {
                let is_behind = at == shape.capacity;
                if let Err(error) = self.make_room(&key) {
                    return Err(Refused { key, value, error });
                }
                self.insert_beside(key, value, is_behind)?;
            }
        }
        self.len += 1;
        Ok(None)
    }

    /// Splits all nodes above a key's leaf that are full, so that the leaf can be.
    fn make_room(&mut self, key: &K) -> Result<(), AllocError> {
        let levels = &self.levels;
        let root = self.root.as_mut().expect("a leaf was found for this key");
        let mut is_refused = false;
        if levels.is_full(root) {
            let level = root.level() + 1;
            let fresh = levels.allocate(level)?;
            is_refused |= !levels.is_local(&fresh);
            // The first child's key is not looked at. Cloned while the tree is whole: it may panic.
            let bound = key.clone();
            let child = std::mem::replace(root, fresh);
            let inner = root.inner_mut().expect("it is above a node");
            inner.insert(levels.shape(level), 0, bound, child);
        }
        let mut node = root;
        loop {
            let (level, shape) = (node.level(), levels.shape(node.level()));
            let Some(inner) = node.inner_mut().filter(|_| level > 1) else { break };
            let mut at = inner.child_of(key);
            if levels.is_full(&inner.values(shape)[at]) {
                is_refused |= split_child(levels, inner, level, at)? && level > 2;
                at = inner.child_of(key);
            }
            node = &mut inner.values_mut(shape)[at];
        }
        if is_refused {
            // Advice: where it cannot be followed, an upper node stays far.
            let _ = self.place_directory();
        }
        Ok(())
    }

    /// Splits a key's leaf, whose parent has room, and inserts the pair.
    fn insert_beside(&mut self, key: K, value: V, is_behind: bool) -> Result<(), Refused<K, V>> {
        let levels = &self.levels;
        let mut node = self.root.as_mut().expect("a leaf was found for this key");
        let mut is_last = true;
        loop {
            let (level, shape) = (node.level(), levels.shape(node.level()));
            let inner = node.inner_mut().expect("leaves are below");
            let at = inner.child_of(&key);
            is_last &= at + 1 == inner.len();
            if level > 1 {
                node = &mut inner.values_mut(shape)[at];
                continue;
            }
            let mut fresh = match levels.allocate(0) {
                Ok(fresh) => fresh,
                Err(error) => return Err(Refused { key, value, error }),
            };
            if is_last && is_behind {
                let bound = key.clone();
                fill_first(levels, &mut fresh, key, value);
                inner.insert(shape, at + 1, bound, fresh);
                return Ok(());
            }
            add_upper_half(levels, inner, level, at, fresh);
            let at = inner.child_of(&key);
            if let ByKindMut::Leaf(leaf) = inner.values_mut(shape)[at].kind_mut() {
                let at = leaf.search(&key).expect_err("the key is new");
                leaf.insert(levels.shape(0), at, key, value);
            }
            return Ok(());
        }
    }
}

/// Puts the first pair into a leaf.
fn fill_first<K, V>(levels: &Levels<K, V>, leaf: &mut Node<K, V>, key: K, value: V) {
    if let ByKindMut::Leaf(leaf) = leaf.kind_mut() {
        leaf.insert(levels.shape(0), 0, key, value);
    }
}

/// Moves the upper half of a child to a new node beside it; whether that was refused local memory.
fn split_child<K: Clone, V>(
    levels: &Levels<K, V>,
    parent: &mut Inner<K, V>,
    level: usize,
    at: usize,
) -> Result<bool, AllocError> {
    let fresh = levels.allocate(level - 1)?;
    let is_refused = !levels.is_local(&fresh);
    add_upper_half(levels, parent, level, at, fresh);
    Ok(is_refused)
}

fn add_upper_half<K: Clone, V>(
    levels: &Levels<K, V>,
    parent: &mut Inner<K, V>,
    level: usize,
    at: usize,
    mut upper: Node<K, V>,
) {
    let (shape, below) = (levels.shape(level), levels.shape(level - 1));
    let half = below.capacity / 2;
    let child = &mut parent.values_mut(shape)[at];
    let bound = match child.kind_mut() {
        ByKindMut::Leaf(leaf) => leaf.keys()[half].clone(),
        ByKindMut::Inner(inner) => inner.keys()[half].clone(),
    };
    match (child.kind_mut(), upper.kind_mut()) {
        (ByKindMut::Leaf(leaf), ByKindMut::Leaf(upper)) => leaf.move_tail(below, half, upper),
        (ByKindMut::Inner(inner), ByKindMut::Inner(upper)) => inner.move_tail(below, half, upper),
        _ => unreachable!("both are of one level"),
    }
    parent.insert(shape, at + 1, bound, upper);
}
