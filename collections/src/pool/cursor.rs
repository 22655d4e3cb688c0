//! Cursors: places between two entries of a tree, from which entries are read in both directions.
//!
//! A cursor has a copy of its leaf and of the leaf's parent, each as it was at one moment. So it holds
//! no page between two calls, entries are lent from the copy, and the next leaf is the parent's next
//! child, as long as the parent is as it was; else, and where the parent ends, it is found by its key.
//! A copy is a tenth of what the descent costs that it saves (`book/src/design/pool.md`, the B+-tree).

use super::node::Node;
use super::{BTree, DEPTH_MAX, KeyValue, RESTARTS_MAX};
use farheap::pool::{OptimisticGuard, PageVersion};
use farheap::{Error, PageId, Result};
use std::borrow::Cow;
use std::fmt;

/// A place between two entries of a [`BTree`], or at an end of it.
///
/// Entries of a leaf are as they were at one moment; changes of later leaves are seen. A cursor holds
/// no page.
///
/// # Examples
/// ```
/// # use farheap::{ByteCount, pool::PoolConfig, store::MemStore};
/// # use farheap_collections::pool::BTree;
/// # use farheap::manager::MemoryManager;
/// # let manager = MemoryManager::start(ByteCount::mib(16))?;
/// # let store = std::sync::Arc::new(MemStore::new(ByteCount::mib(64))?);
/// # let pool = PoolConfig::new().create_on(store, &manager)?;
/// # let tree = BTree::create(&pool)?;
/// for key in [b"a", b"c", b"e"] {
///     tree.insert(key, b"value")?;
/// }
/// let mut cursor = tree.cursor(b"b");
/// assert_eq!(cursor.next()?, Some((&b"c"[..], &b"value"[..])));
/// assert_eq!(cursor.prev()?.map(|(key, _)| key), Some(&b"c"[..]), "back over it");
/// assert_eq!(cursor.prev()?.map(|(key, _)| key), Some(&b"a"[..]));
/// assert_eq!(cursor.prev()?, None);
/// assert_eq!(tree.cursor_at_end().prev()?.map(|(key, _)| key), Some(&b"e"[..]));
/// # Ok::<(), farheap::Error>(())
/// ```
pub struct Cursor<'t> {
    tree: Cow<'t, BTree>,
    /// A copy of the leaf.
    leaf: Vec<u8>,
    /// The entry behind the cursor.
    slot: usize,
    /// Unless the root is the leaf.
    parent: Option<Parent>,
    /// Where the cursor is to go before anything is read from the leaf.
    pending: Option<Seek>,
    /// The key that this is about.
    target: Vec<u8>,
}

/// The node above the leaf.
struct Parent {
    copy: Vec<u8>,
    /// Its page when it was copied.
    seen: PageVersion,
    /// The leaf's slot.
    slot: usize,
    /// The range of keys that the node stands for, where it has ends.
    low: Option<Vec<u8>>,
    high: Option<Vec<u8>>,
}

/// A place to go to.
#[derive(Clone, Copy, Debug)]
enum Seek {
    /// Before the first entry from the target on.
    From,
    /// The same, in the leaf of the entries below the target.
    Below,
    /// Behind the last entry.
    End,
}

impl Seek {
    fn child_slot(self, node: Node<'_>, target: &[u8]) -> usize {
        match self {
            Seek::From => node.child_slot(target),
            Seek::Below => node.child_slot_below(target),
            Seek::End => node.count() - 1,
        }
    }

    fn slot(self, leaf: Node<'_>, target: &[u8]) -> usize {
        match self {
            Seek::From | Seek::Below => leaf.lower_bound(target),
            Seek::End => leaf.count(),
        }
    }
}

/// Where to look for the leaf beside.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Forward,
    Backward,
}

impl Parent {
    fn node(&self) -> Node<'_> {
        Node(&self.copy)
    }

    /// The slot of the leaf beside, if this node has it.
    fn beside(&self, direction: Direction) -> Option<usize> {
        match direction {
            Direction::Forward => Some(self.slot + 1).filter(|slot| *slot < self.node().count()),
            Direction::Backward => self.slot.checked_sub(1),
        }
    }

    /// Where the range of the leaf's keys ends; `None` where the tree does.
    fn bound(&self, direction: Direction) -> Option<&[u8]> {
        match direction {
            Direction::Forward if self.slot + 1 < self.node().count() => {
                Some(self.node().key(self.slot + 1))
            }
            Direction::Forward => self.high.as_deref(),
            // The first key of an inner node says nothing.
            Direction::Backward if self.slot > 0 => Some(self.node().key(self.slot)),
            Direction::Backward => self.low.as_deref(),
        }
    }
}

impl fmt::Debug for Cursor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cursor").field("tree", &self.tree.root).finish_non_exhaustive()
    }
}

impl BTree {
    /// A cursor before the first entry whose key is `from` or greater.
    #[must_use]
    pub fn cursor(&self, from: &[u8]) -> Cursor<'_> {
        Cursor::new(Cow::Borrowed(self), Seek::From, from)
    }

    /// A cursor behind the last entry.
    #[must_use]
    pub fn cursor_at_end(&self) -> Cursor<'_> {
        Cursor::new(Cow::Borrowed(self), Seek::End, b"")
    }

    /// As [`cursor`](BTree::cursor), for a caller that cannot borrow the tree meanwhile.
    #[must_use]
    pub fn into_cursor(self, from: &[u8]) -> Cursor<'static> {
        Cursor::new(Cow::Owned(self), Seek::From, from)
    }

    /// As [`cursor_at_end`](BTree::cursor_at_end), for a caller that cannot borrow the tree meanwhile.
    #[must_use]
    pub fn into_cursor_at_end(self) -> Cursor<'static> {
        Cursor::new(Cow::Owned(self), Seek::End, b"")
    }
}

impl<'t> Cursor<'t> {
    fn new(tree: Cow<'t, BTree>, seek: Seek, target: &[u8]) -> Cursor<'t> {
        let leaf = vec![0; tree.pool.payload()];
        Cursor { tree, leaf, slot: 0, parent: None, pending: Some(seek), target: target.to_vec() }
    }

    /// The entry behind the cursor, key and value, over which the cursor goes.
    ///
    /// # Errors
    /// As for [`BTree::get`]. The cursor is where it was.
    #[expect(clippy::should_implement_trait, reason = "lends from the cursor")]
    pub fn next(&mut self) -> Result<Option<(&[u8], &[u8])>> {
        self.settle()?;
        while self.slot == Node(&self.leaf).count() {
            if !self.go(Direction::Forward)? {
                return Ok(None);
            }
        }
        self.slot += 1;
        Ok(Some(self.entry(self.slot - 1)))
    }

    /// The entry before the cursor, back over which the cursor goes.
    ///
    /// # Errors
    /// As for [`next`](Self::next).
    pub fn prev(&mut self) -> Result<Option<(&[u8], &[u8])>> {
        self.settle()?;
        while self.slot == 0 {
            if !self.go(Direction::Backward)? {
                return Ok(None);
            }
        }
        self.slot -= 1;
        Ok(Some(self.entry(self.slot)))
    }

    fn entry(&self, slot: usize) -> (&[u8], &[u8]) {
        let leaf = Node(&self.leaf);
        (leaf.key(slot), leaf.value(slot))
    }

    /// Goes to the leaf beside; `false` at the end of the tree.
    fn go(&mut self, direction: Direction) -> Result<bool> {
        let Some(parent) = &self.parent else { return Ok(false) };
        let Some(bound) = parent.bound(direction) else { return Ok(false) };
        self.target.clear();
        self.target.extend_from_slice(bound);
        let beside = parent.beside(direction);
        // The leaf's copy is overwritten from here on.
        self.pending = Some(if direction == Direction::Forward { Seek::From } else { Seek::Below });
        if let Some(slot) = beside
            && self.copy_child(slot)?.is_some()
        {
            let count = Node(&self.leaf).count();
            self.slot = if direction == Direction::Forward { 0 } else { count };
            self.pending = None;
            return Ok(true);
        }
        self.settle().map(|()| true)
    }

    /// Goes to where the cursor is to be.
    fn settle(&mut self) -> Result<()> {
        let Some(seek) = self.pending else { return Ok(()) };
        let mut is_there = false;
        for _ in 0..RESTARTS_MAX {
            if self.descend(seek)? {
                is_there = true;
                break;
            }
        }
        if !is_there {
            self.descend_locked(seek)?;
        }
        self.slot = seek.slot(Node(&self.leaf), &self.target);
        self.pending = None;
        Ok(())
    }

    /// Copies leaf and parent of the place; `false` when another thread interfered.
    fn descend(&mut self, seek: Seek) -> Result<bool> {
        self.parent = None;
        let guard = self.tree.pool.fix_optimistic(self.tree.root)?;
        let Some(mut seen) = copy_node(guard, &mut self.leaf) else { return Ok(false) };
        for _ in 0..DEPTH_MAX {
            if Node(&self.leaf).is_leaf() {
                return Ok(true);
            }
            let slot = self.descend_from(seen, seek);
            let Some(child) = self.copy_child(slot)? else { return Ok(false) };
            seen = child;
        }
        Ok(false)
    }

    /// Goes on with the copied leaf as the parent; returns the slot of the child on the way.
    fn descend_from(&mut self, seen: PageVersion, seek: Seek) -> usize {
        let size = self.leaf.len();
        let [low, high] = match &self.parent {
            None => [None, None],
            Some(above) => [Direction::Backward, Direction::Forward]
                .map(|direction| above.bound(direction).map(<[u8]>::to_vec)),
        };
        let spare = self.parent.take().map_or_else(|| vec![0; size], |above| above.copy);
        let copy = std::mem::replace(&mut self.leaf, spare);
        let slot = seek.child_slot(Node(&copy), &self.target);
        self.parent = Some(Parent { copy, seen, slot, low, high });
        slot
    }

    /// Copies a child of the parent as the leaf, if the parent is as it was; returns its page as it was.
    fn copy_child(&mut self, slot: usize) -> Result<Option<PageVersion>> {
        let parent = self.parent.as_mut().expect("a child has a parent");
        let child = parent.node().child(slot);
        let pool = &self.tree.pool;
        let guard = match pool.fix_optimistic(PageId(child.page)) {
            Ok(guard) => guard,
            // A child that was merged away meanwhile is a page that is not in use.
            Err(Error::NoSuchPage { .. }) if !parent.seen.is_current(pool) => return Ok(None),
            Err(error) => return Err(error),
        };
        let Some(seen) = copy_node(guard, &mut self.leaf) else { return Ok(None) };
        if !parent.seen.is_current(pool) {
            return Ok(None);
        }
        self.tree.check_stamp(child, Node(&self.leaf).stamp())?;
        parent.slot = slot;
        Ok(Some(seen))
    }

    /// As [`descend`](Self::descend), under shared latches.
    fn descend_locked(&mut self, seek: Seek) -> Result<()> {
        self.parent = None;
        let tree = self.tree.clone();
        let mut guard = tree.pool.fix_shared(tree.root)?;
        loop {
            self.leaf.copy_from_slice(&guard);
            if Node(&guard).is_leaf() {
                return Ok(());
            }
            let slot = self.descend_from(guard.version(), seek);
            let child = Node(&guard).child(slot);
            let next = tree.pool.fix_shared(PageId(child.page))?;
            tree.check_stamp(child, Node(&next).stamp())?;
            guard = next;
        }
    }
}

/// Copies a node; `None` when it changed meanwhile.
fn copy_node(guard: OptimisticGuard<'_>, into: &mut [u8]) -> Option<PageVersion> {
    guard.copy_to(0, into)?;
    guard.validate().then(|| guard.version())
}

/// Entries in order, copied one by one; see [`Cursor`], which lends them.
#[derive(Debug)]
pub struct Scan<'t>(Option<Cursor<'t>>);

impl BTree {
    /// Entries from `from` on, in order; see [`Scan`].
    #[must_use]
    pub fn scan(&self, from: &[u8]) -> Scan<'_> {
        Scan(Some(self.cursor(from)))
    }
}

impl Iterator for Scan<'_> {
    type Item = Result<KeyValue>;

    fn next(&mut self) -> Option<Result<KeyValue>> {
        let entry = match self.0.as_mut()?.next() {
            Ok(entry) => entry.map(|(key, value)| Ok((key.to_vec(), value.to_vec()))),
            Err(error) => Some(Err(error)),
        };
        if !matches!(entry, Some(Ok(_))) {
            self.0 = None;
        }
        entry
    }
}
