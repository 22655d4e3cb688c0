//! Splits and merges: the changes of the tree's shape, under exclusive latches from the root down.
//!
//! A page that a merge frees is locked by the merging thread, under its parent's latch; readers
//! that are on their way to it fail to validate the parent.

use super::node::{Child, Node, NodeMut};
use super::{BTree, ENTRY_MAX_DIVISOR};
use farheap::Result;
use farheap::pool::ExclusiveGuard;

impl BTree {
    /// Bytes of entries below which a node is merged with a neighbour if both fit into one.
    pub(super) fn sparse_max(&self) -> usize {
        self.pool.payload() / 4
    }

    /// True if a node can take any entry, or any separator.
    fn has_room(&self, node: Node<'_>) -> bool {
        node.used() + self.pool.payload() / ENTRY_MAX_DIVISOR + 8 <= node.room()
    }

    /// The leaf for `key`, locked, with room for an entry of `need` bytes: splits all full nodes on the
    /// way.
    pub(super) fn leaf_with_room(&self, key: &[u8], need: usize) -> Result<ExclusiveGuard<'_>> {
        let mut parent = self.pool.fix_exclusive(self.root)?;
        if !self.has_room(Node(&parent)) {
            self.grow(&mut parent)?;
        }
        while !Node(&parent).is_leaf() {
            let child = self.lock_child(Node(&parent).child_of(key))?;
            if self.has_room(Node(&child)) {
                parent = child;
            } else {
                parent = self.split(&mut parent, child, key, need)?;
            }
        }
        Ok(parent)
    }

    /// Moves the root's contents to a new page below it: the tree is one level deeper.
    fn grow(&self, root: &mut ExclusiveGuard<'_>) -> Result<()> {
        let mut child = self.pool.allocate()?;
        child.copy_from_slice(root);
        let below = self.stamped(&mut child);
        let mut node = NodeMut(root);
        node.clear(false);
        node.push(b"", &below.to_bytes());
        Ok(())
    }

    /// Gives a node a new stamp; returns what its parent has to note.
    pub(super) fn stamped(&self, node: &mut ExclusiveGuard<'_>) -> Child {
        let child = Child { page: node.id().0, stamp: self.new_stamp() };
        NodeMut(node).set_stamp(child.stamp);
        child
    }

    /// Splits a child of `parent`; returns the half that `key` belongs to.
    fn split<'p>(
        &'p self,
        parent: &mut ExclusiveGuard<'_>,
        mut child: ExclusiveGuard<'p>,
        key: &[u8],
        need: usize,
    ) -> Result<ExclusiveGuard<'p>> {
        let mut right = self.pool.allocate()?;
        let old = child.to_vec();
        let old = Node(&old);
        let Cut { at, separator } = cut(old, key, need);
        let mut node = NodeMut(&mut right);
        node.clear(old.is_leaf());
        node.append(old, at..old.count());
        node.set_run(old.run().before(0));
        let mut node = NodeMut(&mut child);
        node.clear(old.is_leaf());
        node.append(old, 0..at);
        node.set_run(old.run().before(at));
        let slot = Node(parent).child_slot(key);
        let left = self.stamped(&mut child).to_bytes();
        NodeMut(parent).value_mut(slot).copy_from_slice(&left);
        let below = self.stamped(&mut right).to_bytes();
        let put = NodeMut(parent).put(&separator, &below);
        assert_eq!(put, Some(true), "a node on the way down has room for a separator");
        Ok(if key < &separator[..] { child } else { right })
    }

    /// Merges nearly empty nodes on the way to `key` with a neighbour.
    pub(super) fn merge_towards(&self, key: &[u8]) -> Result<()> {
        let mut parent = self.pool.fix_exclusive(self.root)?;
        while !Node(&parent).is_leaf() {
            let slot = Node(&parent).child_slot(key);
            let child = self.lock_child(Node(&parent).child(slot))?;
            if Node(&child).used() >= self.sparse_max() || Node(&parent).count() < 2 {
                parent = child;
                continue;
            }
            // The left of the two keeps the page; nodes are locked from left to right.
            let left_slot = if slot + 1 < Node(&parent).count() { slot } else { slot - 1 };
            drop(child);
            let left = self.lock_child(Node(&parent).child(left_slot))?;
            let right = self.lock_child(Node(&parent).child(left_slot + 1))?;
            let (left, right) = self.merge(&mut parent, left_slot, left, right);
            let goes_right = slot > left_slot;
            parent = match right {
                Some(right) if goes_right => right,
                _ => left,
            };
        }
        drop(parent);
        self.shrink()
    }

    /// Merges two neighbours if they fit into one; returns what is left.
    fn merge<'p>(
        &self,
        parent: &mut ExclusiveGuard<'_>,
        left_slot: usize,
        mut left: ExclusiveGuard<'p>,
        right: ExclusiveGuard<'p>,
    ) -> (ExclusiveGuard<'p>, Option<ExclusiveGuard<'p>>) {
        let separator = Node(parent).key(left_slot + 1).to_vec();
        let need = Node(&left).used() + Node(&right).used() + separator.len();
        if need > Node(&left).room() {
            return (left, Some(right));
        }
        let (a, b) = (left.to_vec(), right.to_vec());
        let (a, b) = (Node(&a), Node(&b));
        let mut node = NodeMut(&mut left);
        node.clear(a.is_leaf());
        node.append(a, 0..a.count());
        if a.is_leaf() {
            node.append(b, 0..b.count());
        } else {
            // The first key of an inner node may be smaller than what it stands for.
            node.push(&separator, b.value(0));
            node.append(b, 1..b.count());
        }
        let below = self.stamped(&mut left).to_bytes();
        let mut above = NodeMut(parent);
        above.value_mut(left_slot).copy_from_slice(&below);
        above.remove(left_slot + 1);
        right.free();
        (left, None)
    }

    /// While the root has one child, the child's contents become the root's.
    fn shrink(&self) -> Result<()> {
        let mut root = self.pool.fix_exclusive(self.root)?;
        while !Node(&root).is_leaf() && Node(&root).count() == 1 {
            let child = self.lock_child(Node(&root).child(0))?;
            root.copy_from_slice(&child);
            child.free();
        }
        Ok(())
    }
}

/// Where a node is split.
struct Cut {
    /// The first slot of the right half.
    at: usize,
    /// Where the range of keys of the right half begins.
    separator: Vec<u8>,
}

impl Cut {
    /// A cut of a leaf before the entry at `at`.
    fn between(node: Node<'_>, at: usize) -> Cut {
        Cut { at, separator: separator(node.key(at - 1), node.key(at)) }
    }
}

/// Where to split a full node so that an entry with `key`, of `need` bytes, can be added: in the middle, or
/// where keys come in ascending order, so that what is behind them stays full. What lies between them and
/// the node's end is left behind as soon as the entry fits before it: 10 ascending parts of a tree, each
/// with a tail of the next to carry along, took 17 % more.
fn cut(node: Node<'_>, key: &[u8], need: usize) -> Cut {
    let count = node.count();
    if !node.is_leaf() {
        // The last child of a node is split again and again where keys ascend.
        let is_last = node.child_slot(key) == count - 1;
        let at = if is_last { count - 1 } else { middle(node) };
        return Cut { at, separator: node.key(at).to_vec() };
    }
    let slot = node.find(key).err().filter(|slot| *slot > 0 && node.run().reaches(*slot));
    match slot {
        None => Cut::between(node, middle(node)),
        Some(at) if at < count && node.used_by(0..at) + need <= node.room() => {
            Cut { at, separator: separator(key, node.key(at)) }
        }
        Some(at) => Cut { at, separator: separator(node.key(at - 1), key) },
    }
}

/// The shortest key above `below` and not above `from`: inner nodes have room for more of them.
pub(super) fn separator(below: &[u8], from: &[u8]) -> Vec<u8> {
    let common = below.iter().zip(from).take_while(|(a, b)| a == b).count();
    from[..from.len().min(common + 1)].to_vec()
}

/// Where to split: half of the bytes on each side, at least one entry.
fn middle(node: Node<'_>) -> usize {
    let half = node.used() / 2;
    let mut bytes = 0;
    for slot in 0..node.count() {
        bytes += node.used_by(slot..slot + 1);
        if bytes >= half {
            return (slot + 1).clamp(1, node.count() - 1);
        }
    }
    node.count() - 1
}
