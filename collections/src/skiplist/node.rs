//! Nodes of the skip list: a pair and as many forward links as the node has levels.
//!
//! ```text
//! levels u8 | slot u32 | key, value | next at level 0 | next at level 1 | ...
//! ```
//! # Invariants
//! 1. A [`Link`] points to an initialised node, from [`Link::create`] until [`Link::retire`]; only
//!    this list uses it, and changes it under the list's `&mut`.
//! 2. A node has 1 to [`LEVELS_MAX`] levels, for life, and all their links are initialised.
#![expect(unsafe_code, reason = "reads and writes nodes through raw pointers")]

use crate::local_set::SetNode;
use crate::ordered::node_pointer;
use std::alloc::Layout;
use std::ptr::NonNull;

/// Maximum number of levels of a node.
pub(super) const LEVELS_MAX: usize = 32;

#[repr(C)]
pub(super) struct Node<K, V> {
    levels: u8,
    /// Position among the purely-local nodes of as many levels.
    slot: u32,
    pair: (K, V),
}

node_pointer!(Link, Node);

/// Memory that a node with this number of levels takes, and where its links start.
fn parts<K, V>(levels: usize) -> (Layout, usize) {
    let links = Layout::array::<Option<Link<K, V>>>(levels).expect("a few links");
    Layout::new::<Node<K, V>>().extend(links).expect("a node and a few links")
}

/// Memory that a node with this number of levels takes.
pub(super) fn layout<K, V>(levels: usize) -> Layout {
    parts::<K, V>(levels).0
}

/// Purely-local memory that a node takes: of one size for nearly all, so that each can take
/// another's place, and of one for nearly all that are taller. One node in 2^7 is taller than the
/// usual ones, one in 2^16 than the tall ones.
pub(super) fn local_layout<K, V>(levels: usize) -> Layout {
    const LEVELS_USUAL: usize = 7;
    const LEVELS_TALL: usize = 16;
    let room_for = if levels <= LEVELS_USUAL { LEVELS_USUAL } else { levels.max(LEVELS_TALL) };
    layout::<K, V>(room_for)
}

impl<K, V> Link<K, V> {
    /// Makes a node in fresh memory; its links lead nowhere.
    ///
    /// # Safety
    /// The memory is valid for writes of [`layout`]`(levels)` and the node's own until it retires.
    pub(super) unsafe fn create(memory: NonNull<u8>, levels: usize, pair: (K, V)) -> Link<K, V> {
        assert!((1..=LEVELS_MAX).contains(&levels), "{levels} levels");
        let link = Link(memory.cast::<Node<K, V>>());
        // SAFETY: the caller gives memory for a node and its links.
        unsafe { link.0.write(Node { levels: levels as u8, slot: 0, pair }) };
        for level in 0..levels {
            link.set_next(level, None);
        }
        link
    }

    /// Copies the node to new memory, where it lives on; the old one is only bytes then.
    ///
    /// # Safety
    /// As [`create`](Link::create); every other copy of the old link is replaced before its use.
    pub(super) unsafe fn move_to(self, memory: NonNull<u8>) -> Link<K, V> {
        let size = layout::<K, V>(self.levels()).size();
        // SAFETY: both are valid for this node; fresh memory does not overlap.
        unsafe { memory.as_ptr().copy_from_nonoverlapping(self.as_ptr(), size) };
        Link(memory.cast())
    }

    /// Ends the node: its memory and what it takes to free it. The pair is not dropped.
    pub(super) fn retire(self, is_local: bool) -> (NonNull<u8>, Layout) {
        let of = if is_local { local_layout::<K, V> } else { layout::<K, V> };
        (self.0.cast(), of(self.levels()))
    }

    pub(super) fn as_ptr(self) -> *mut u8 {
        self.0.as_ptr().cast()
    }

    pub(super) fn levels(self) -> usize {
        // SAFETY: invariant 1.
        usize::from(unsafe { (*self.0.as_ptr()).levels })
    }

    pub(super) fn pair(self) -> *mut (K, V) {
        // SAFETY: invariant 1; this names a place and reads nothing.
        unsafe { &raw mut (*self.0.as_ptr()).pair }
    }

    /// The key; the caller borrows it no longer than the list stays as it is.
    pub(super) fn key<'a>(self) -> &'a K {
        // SAFETY: invariant 1; it changes under the list's `&mut` only.
        unsafe { &(*self.pair()).0 }
    }

    /// The pair, borrowed as [`key`](Link::key) is.
    pub(super) fn entry<'a>(self) -> (&'a K, &'a V) {
        // SAFETY: invariant 1; it changes under the list's `&mut` only.
        let (key, value) = unsafe { &*self.pair() };
        (key, value)
    }

    fn next_place(self, level: usize) -> *mut Option<Link<K, V>> {
        let (_, start) = parts::<K, V>(0);
        let links = self.as_ptr().wrapping_add(start).cast::<Option<Link<K, V>>>();
        links.wrapping_add(level)
    }

    pub(super) fn next(self, level: usize) -> Option<Link<K, V>> {
        debug_assert!(level < self.levels(), "level {level}");
        // SAFETY: initialised (invariant 2): callers come to a node at a level that it has.
        unsafe { self.next_place(level).read() }
    }

    pub(super) fn set_next(self, level: usize, next: Option<Link<K, V>>) {
        assert!(level < self.levels(), "level {level}");
        // SAFETY: inside the node's memory, checked above.
        unsafe { self.next_place(level).write(next) };
    }
}

impl<K, V> SetNode for Link<K, V> {
    fn priority(self) -> usize {
        self.levels()
    }

    fn slot(self) -> usize {
        // SAFETY: invariant 1.
        unsafe { (*self.0.as_ptr()).slot as usize }
    }

    fn set_slot(self, slot: usize) {
        // SAFETY: invariant 1.
        unsafe { (*self.0.as_ptr()).slot = slot as u32 };
    }
}
