//! Nodes of the B-tree, as plain pointers into memory of any kind.
//!
//! ```text
//! leaf:  len u8 | height u8 | slot u32 | pair | pair
//! inner: the same, then child | child | child
//! ```
//! # Invariants
//! 1. A [`Link`] points to an initialised node, from [`Link::create`] until [`Link::retire`]; only
//!    this tree uses it, and changes it under the tree's `&mut`.
//! 2. The first `len` pairs of a node, and the first `len + 1` children of an inner node, are
//!    initialised.
//! 3. Inner nodes have a height above zero.
#![expect(unsafe_code, reason = "reads and writes nodes through raw pointers")]

use crate::local_set::SetNode;
use crate::ordered::node_pointer;
use std::alloc::Layout;
use std::mem::MaybeUninit;
use std::ptr::NonNull;

/// Maximum number of pairs of a node: a 2-3 tree.
pub(super) const PAIRS: usize = 2;
/// Maximum number of children of a node.
pub(super) const CHILDREN: usize = PAIRS + 1;

#[repr(C)]
struct Head {
    len: u8,
    height: u8,
    /// Position among the purely-local nodes of this height.
    slot: u32,
}

#[repr(C)]
pub(super) struct Node<K, V> {
    head: Head,
    pairs: [MaybeUninit<(K, V)>; PAIRS],
}

#[repr(C)]
struct Inner<K, V> {
    node: Node<K, V>,
    children: [MaybeUninit<Link<K, V>>; CHILDREN],
}

node_pointer!(Link, Node);

/// Memory that a node of this height takes.
pub(super) fn layout<K, V>(height: u8) -> Layout {
    if height == 0 { Layout::new::<Node<K, V>>() } else { Layout::new::<Inner<K, V>>() }
}

/// Purely-local memory that any node takes: of one size, so that each can take another's place.
pub(super) fn local_layout<K, V>() -> Layout {
    layout::<K, V>(1)
}

impl<K, V> Link<K, V> {
    /// Makes an empty node of `height` in fresh memory.
    ///
    /// # Safety
    /// The memory is valid for writes of [`layout`]`(height)` and the node's own until it retires.
    pub(super) unsafe fn create(memory: NonNull<u8>, height: u8) -> Link<K, V> {
        let link = Link(memory.cast::<Node<K, V>>());
        let head = memory.cast::<Head>();
        // SAFETY: the node starts with its head, and the caller gives its memory.
        unsafe { head.write(Head { len: 0, height, slot: 0 }) };
        link
    }

    /// Copies the node to new memory, where it lives on; the old one is only bytes then.
    ///
    /// # Safety
    /// As [`create`](Link::create); every other copy of the old link is replaced before its use.
    pub(super) unsafe fn move_to(self, memory: NonNull<u8>) -> Link<K, V> {
        let size = layout::<K, V>(self.height()).size();
        // SAFETY: both are valid for a node of this height; fresh memory does not overlap.
        unsafe { memory.as_ptr().copy_from_nonoverlapping(self.as_ptr(), size) };
        Link(memory.cast())
    }

    /// Ends the node: its memory and what it takes to free it. Pairs are not dropped.
    pub(super) fn retire(self, is_local: bool) -> (NonNull<u8>, Layout) {
        let far = layout::<K, V>(self.height());
        (self.0.cast(), if is_local { local_layout::<K, V>() } else { far })
    }

    pub(super) fn as_ptr(self) -> *mut u8 {
        self.0.as_ptr().cast()
    }

    fn head(self) -> *mut Head {
        self.0.as_ptr().cast()
    }

    pub(super) fn len(self) -> usize {
        // SAFETY: invariant 1.
        usize::from(unsafe { (*self.head()).len })
    }

    fn set_len(self, len: usize) {
        // SAFETY: invariant 1.
        unsafe { (*self.head()).len = len as u8 };
    }

    pub(super) fn height(self) -> u8 {
        // SAFETY: invariant 1.
        unsafe { (*self.head()).height }
    }

    pub(super) fn is_leaf(self) -> bool {
        self.height() == 0
    }

    pub(super) fn is_full(self) -> bool {
        self.len() == PAIRS
    }

    // Pairs.

    /// Where a pair is, or would be.
    pub(super) fn pair(self, at: usize) -> *mut (K, V) {
        debug_assert!(at < PAIRS);
        // SAFETY: invariant 1; this names a place and reads nothing.
        let pairs = unsafe { &raw mut (*self.0.as_ptr()).pairs };
        pairs.cast::<(K, V)>().wrapping_add(at)
    }

    /// A key; the caller borrows it no longer than the tree stays as it is.
    pub(super) fn key<'a>(self, at: usize) -> &'a K {
        assert!(at < self.len(), "key {at} of {}", self.len());
        // SAFETY: invariant 2, checked above; it changes under the tree's `&mut` only.
        unsafe { &(*self.pair(at)).0 }
    }

    /// A pair, borrowed as [`key`](Link::key) is. Reads nothing but the pair.
    pub(super) fn entry<'a>(self, at: usize) -> (&'a K, &'a V) {
        // SAFETY: invariant 2: paths and searches name pairs that there are.
        let (key, value) = unsafe { &*self.pair(at) };
        (key, value)
    }

    /// Exchanges a pair.
    pub(super) fn replace_pair(self, at: usize, pair: (K, V)) -> (K, V) {
        assert!(at < self.len(), "pair {at} of {}", self.len());
        // SAFETY: an initialised pair (invariant 2) of a tree that the caller may change.
        unsafe { self.pair(at).replace(pair) }
    }

    pub(super) fn insert_pair(self, at: usize, pair: (K, V)) {
        let len = self.len();
        assert!(at <= len && len < PAIRS, "insert at {at} of {len}");
        // SAFETY: `len - at` pairs move up by one, within the array.
        unsafe { self.pair(at).copy_to(self.pair(0).wrapping_add(at + 1), len - at) };
        // SAFETY: the place is inside the array and free: its pair has moved.
        unsafe { self.pair(at).write(pair) };
        self.set_len(len + 1);
    }

    pub(super) fn remove_pair(self, at: usize) -> (K, V) {
        let len = self.len();
        assert!(at < len, "remove {at} of {len}");
        // SAFETY: initialised (invariant 2); the copy left behind is overwritten or cut off.
        let pair = unsafe { self.pair(at).read() };
        let next = self.pair(0).wrapping_add(at + 1);
        // SAFETY: the pairs after it move down by one, within the array.
        unsafe { self.pair(at).copy_from(next, len - at - 1) };
        self.set_len(len - 1);
        pair
    }

    // Children.

    fn children(self) -> *mut Link<K, V> {
        assert!(!self.is_leaf(), "a leaf has no children");
        let inner = self.0.as_ptr().cast::<Inner<K, V>>();
        // SAFETY: an inner node (invariant 3); this names a place and reads nothing.
        let children = unsafe { &raw mut (*inner).children };
        children.cast()
    }

    pub(super) fn child(self, at: usize) -> Link<K, V> {
        assert!(at <= self.len(), "child {at} of {}", self.len());
        // SAFETY: initialised (invariant 2, checked above).
        unsafe { self.children().wrapping_add(at).read() }
    }

    pub(super) fn set_child(self, at: usize, child: Link<K, V>) {
        assert!(at < CHILDREN, "child {at}");
        // SAFETY: inside the array of an inner node.
        unsafe { self.children().wrapping_add(at).write(child) };
    }

    /// Inserts a child among `count`.
    pub(super) fn insert_child(self, at: usize, count: usize, child: Link<K, V>) {
        assert!(at <= count && count < CHILDREN, "child {at} of {count}");
        let place = self.children().wrapping_add(at);
        // SAFETY: `count - at` children move up by one, within the array.
        unsafe { place.copy_to(place.wrapping_add(1), count - at) };
        self.set_child(at, child);
    }

    /// Removes a child of `count`.
    pub(super) fn remove_child(self, at: usize, count: usize) {
        assert!(at < count && count <= CHILDREN, "child {at} of {count}");
        let place = self.children().wrapping_add(at);
        // SAFETY: the children after it move down by one, within the array.
        unsafe { place.copy_from(place.wrapping_add(1), count - at - 1) };
    }
}

impl<K, V> SetNode for Link<K, V> {
    fn priority(self) -> usize {
        usize::from(self.height())
    }

    fn slot(self) -> usize {
        // SAFETY: invariant 1.
        unsafe { (*self.head()).slot as usize }
    }

    fn set_slot(self, slot: usize) {
        // SAFETY: invariant 1.
        unsafe { (*self.head()).slot = slot as u32 };
    }
}
