//! A tree that is taken apart, leaf by leaf.

use super::levels::Levels;
use super::node::Node;

/// The leaves of a tree that is taken apart, in key order.
pub(super) struct DrainedLeaves<K, V> {
    open: Vec<Node<K, V>>,
}

impl<K, V> DrainedLeaves<K, V> {
    pub(super) fn of(root: Option<Node<K, V>>) -> DrainedLeaves<K, V> {
        DrainedLeaves { open: root.into_iter().collect() }
    }

    /// The next leaf, which is the caller's; nodes above are freed when their last child is open.
    pub(super) fn next(&mut self, levels: &Levels<K, V>) -> Option<Node<K, V>> {
        loop {
            let mut node = self.open.pop()?;
            let shape = levels.shape(node.level());
            let Some(inner) = node.inner_mut() else { return Some(node) };
            while let Some(last) = inner.len().checked_sub(1) {
                self.open.push(inner.remove(shape, last).1);
            }
            levels.free(node);
        }
    }
}
