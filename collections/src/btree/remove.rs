//! Removing pairs: takes no memory, so it cannot fail.

use super::FarBTreeMap;
use super::node::{CHILDREN, Link};
use super::path::Path;
use std::borrow::Borrow;

impl<K: Ord, V> FarBTreeMap<K, V> {
    /// Removes a key; returns the pair.
    pub fn remove_entry<Q>(&mut self, key: &Q) -> Option<(K, V)>
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        let (mut path, found) = Path::find(self.root, key);
        let step = path.last().filter(|_| found)?;
        let (node, at) = (step.node, usize::from(step.at));
        let removed = if node.is_leaf() {
            node.remove_pair(at)
        } else {
            // The largest pair before it, which is in a leaf, takes its place.
            let leaf = walk_to_last_leaf(&mut path, node.child(at));
            node.replace_pair(at, leaf.remove_pair(leaf.len() - 1))
        };
        self.len -= 1;
        self.refill(&path);
        Some(removed)
    }

    /// Gives nodes without pairs one from a sibling, or merges them, from the leaf upwards.
    fn refill(&mut self, path: &Path<K, V>) {
        for depth in (0..path.depth()).rev() {
            let node = path.step_at(depth).node;
            if node.len() > 0 {
                return;
            }
            if depth == 0 {
                self.root = (!node.is_leaf()).then(|| node.child(0));
                self.free_node(node);
                return;
            }
            let above = path.step_at(depth - 1);
            let (parent, at) = (above.node, usize::from(above.at));
            let left = at.checked_sub(1).map(|at| parent.child(at));
            let right = (at < parent.len()).then(|| parent.child(at + 1));
            match (left, right) {
                (Some(left), _) if left.is_full() => take_from_left(parent, at, left, node),
                (_, Some(right)) if right.is_full() => take_from_right(parent, at, node, right),
                (Some(left), _) => {
                    merge_into_left(parent, at, left, node);
                    self.free_node(node);
                }
                (None, Some(right)) => {
                    merge_into_right(parent, node, right);
                    self.free_node(node);
                }
                (None, None) => unreachable!("a node with a pair has two children"),
            }
        }
    }
}

fn walk_to_last_leaf<K, V>(path: &mut Path<K, V>, from: Link<K, V>) -> Link<K, V> {
    let mut node = from;
    while !node.is_leaf() {
        path.push(node, node.len());
        node = node.child(node.len());
    }
    path.push(node, node.len() - 1);
    node
}

fn take_from_left<K, V>(parent: Link<K, V>, at: usize, left: Link<K, V>, node: Link<K, V>) {
    if !node.is_leaf() {
        node.insert_child(0, 1, left.child(left.len()));
    }
    let pair = left.remove_pair(left.len() - 1);
    node.insert_pair(0, parent.replace_pair(at - 1, pair));
}

fn take_from_right<K, V>(parent: Link<K, V>, at: usize, node: Link<K, V>, right: Link<K, V>) {
    if !node.is_leaf() {
        node.set_child(1, right.child(0));
        right.remove_child(0, right.len() + 1);
    }
    let pair = right.remove_pair(0);
    node.insert_pair(0, parent.replace_pair(at, pair));
}

fn merge_into_left<K, V>(parent: Link<K, V>, at: usize, left: Link<K, V>, node: Link<K, V>) {
    if !node.is_leaf() {
        left.set_child(CHILDREN - 1, node.child(0));
    }
    parent.remove_child(at, parent.len() + 1);
    left.insert_pair(left.len(), parent.remove_pair(at - 1));
}

fn merge_into_right<K, V>(parent: Link<K, V>, node: Link<K, V>, right: Link<K, V>) {
    if !node.is_leaf() {
        right.insert_child(0, right.len() + 1, node.child(0));
    }
    parent.remove_child(0, parent.len() + 1);
    right.insert_pair(0, parent.remove_pair(0));
}
