//! Nodes: pairs of keys and values in leaves, of keys and nodes above.
//!
//! A node is known by its parent, which holds its address, length and level: the node's own page
//! holds nothing but pairs.
//!
//! # Invariants
//! 1. A node of level 0 is a leaf; one of another level holds nodes of the level below.
#![expect(unsafe_code, reason = "a union of the two kinds of nodes; makes and moves them")]

use crate::pairs::{Pairs, Shape};
use std::borrow::Borrow;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;

/// Pairs whose extra word is the level.
pub(super) type Leaf<K, V> = Pairs<K, V, u32>;
pub(super) type Inner<K, V> = Pairs<K, Node<K, V>, u32>;

/// A node, as its parent knows it: address, length and level in 16 bytes.
pub(super) union Node<K, V> {
    leaf: ManuallyDrop<Leaf<K, V>>,
    inner: ManuallyDrop<Inner<K, V>>,
}

const _: () = assert!(size_of::<Node<u64, [u8; 150]>>() == 16);

// SAFETY: a node owns its pairs, as a box would.
unsafe impl<K: Send, V: Send> Send for Node<K, V> {}
// SAFETY: `&Node` hands out `&K` and `&V` only.
unsafe impl<K: Sync, V: Sync> Sync for Node<K, V> {}

impl<K, V> Node<K, V> {
    /// An empty node.
    ///
    /// # Safety
    /// The memory is valid for the layout of the level's shape, and the node's own.
    pub(super) unsafe fn create(memory: NonNull<u8>, level: u32) -> Node<K, V> {
        if level == 0 {
            // SAFETY: promised by the caller.
            return Node { leaf: ManuallyDrop::new(unsafe { Pairs::create(memory, level) }) };
        }
        // SAFETY: as above.
        Node { inner: ManuallyDrop::new(unsafe { Pairs::create(memory, level) }) }
    }

    /// Moves the node to new memory, and returns the old.
    ///
    /// # Safety
    /// As [`create`](Node::create) for its level; nobody has a reference into the node.
    pub(super) unsafe fn move_to(&mut self, shape: Shape, memory: NonNull<u8>) -> NonNull<u8> {
        match self.kind_mut() {
            // SAFETY: promised by the caller.
            ByKindMut::Leaf(leaf) => unsafe { leaf.move_to(shape, memory) },
            // SAFETY: as above.
            ByKindMut::Inner(inner) => unsafe { inner.move_to(shape, memory) },
        }
    }

    /// Its distance from the leaves.
    pub(super) fn level(&self) -> usize {
        // SAFETY: both kinds have the same words at the same places (`repr(C)`).
        let leaf = unsafe { &self.leaf };
        leaf.extra as usize
    }

    pub(super) fn kind(&self) -> ByKind<'_, K, V> {
        if self.level() == 0 {
            // SAFETY: a node of level 0 is a leaf (invariant 1).
            return ByKind::Leaf(unsafe { &self.leaf });
        }
        // SAFETY: and no other is.
        ByKind::Inner(unsafe { &self.inner })
    }

    pub(super) fn kind_mut(&mut self) -> ByKindMut<'_, K, V> {
        if self.level() == 0 {
            // SAFETY: a node of level 0 is a leaf (invariant 1).
            return ByKindMut::Leaf(unsafe { &mut self.leaf });
        }
        // SAFETY: and no other is.
        ByKindMut::Inner(unsafe { &mut self.inner })
    }

    pub(super) fn inner_mut(&mut self) -> Option<&mut Inner<K, V>> {
        match self.kind_mut() {
            ByKindMut::Leaf(_) => None,
            ByKindMut::Inner(inner) => Some(inner),
        }
    }

    pub(super) fn memory(&self) -> NonNull<u8> {
        match self.kind() {
            ByKind::Leaf(leaf) => leaf.memory(),
            ByKind::Inner(inner) => inner.memory(),
        }
    }

    pub(super) fn len(&self) -> usize {
        match self.kind() {
            ByKind::Leaf(leaf) => leaf.len(),
            ByKind::Inner(inner) => inner.len(),
        }
    }
}

/// A node by its kind.
pub(super) enum ByKind<'a, K, V> {
    Leaf(&'a Leaf<K, V>),
    Inner(&'a Inner<K, V>),
}

/// As [`ByKind`], for changing it.
pub(super) enum ByKindMut<'a, K, V> {
    Leaf(&'a mut Leaf<K, V>),
    Inner(&'a mut Inner<K, V>),
}

impl<K, V> Inner<K, V> {
    /// Which child a key belongs to. The first has no lower bound: its key is not looked at.
    pub(super) fn child_of<Q>(&self, key: &Q) -> usize
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        let bounds = self.keys().get(1..).unwrap_or_default();
        bounds.partition_point(|bound| bound.borrow() <= key)
    }
}
