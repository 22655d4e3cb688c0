//! A B+-tree on a buffer pool: variable-length keys and values, in the order of the keys' bytes.
//!
//! ```text
//! node:  leaf 1 | run 1 | count 2 | heap 2 | garbage 2 | stamp 8 | last 2 | skip 2 | slots -> ... <- entries
//! slot:  place of the entry 2 | head of its key 2
//! entry: key length 1 or 2 | value length 1 or 2 | key | value     (inner nodes: value = page 8, stamp 8)
//! ```
//! Readers descend optimistically and validate each node after they read the number of its child
//! (optimistic lock coupling). Writers descend the same way and lock the leaf alone; only a change
//! of the tree's shape takes exclusive latches from the root down, one after the other, and
//! splits full nodes, or merges nearly empty ones, on its way.
//!
//! The root's page never changes: a root that is full moves its contents to a new child.
//!
//! Every change of the range of keys that a node stands for gives the node a new stamp, which its
//! parent notes beside the node's page. After a crash pages are of different times; a child that is
//! not of its parent's time bears another stamp, and what is asked of it is [`Error::StalePage`]
//! instead of a wrong answer.
//!
//! # Invariants
//! 1. An inner node's first key is not looked at: its first child takes all smaller keys.
//! 2. A node that is locked on the way down has room for one more separator.
//! 3. A node's stamp is the one its parent notes, as seen by the parent's holder.
//! 4. What was read optimistically is used only after validation, and bounds are checked before.

mod cursor;
mod load;
mod node;
mod shape;

pub use cursor::{Cursor, Scan};
use farheap::pool::{BufferPool, ExclusiveGuard, OptimisticGuard, SharedGuard};
use farheap::{Error, PageId, Result};
use node::{Child, Node, NodeMut, View, entry_bytes};
use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::{BuildHasher, Hasher};
use std::ops::{Deref, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// An entry, key and value together, may take a page's payload divided by this, less 8 bytes.
pub(super) const ENTRY_MAX_DIVISOR: usize = 4;

/// Optimistic descents before one takes shared latches.
const RESTARTS_MAX: u32 = 64;

/// Deepest tree: more means that a page is damaged.
const DEPTH_MAX: u32 = 32;

/// An ordered map from bytes to bytes in pages of a pool.
///
/// # Examples
/// ```
/// use farheap::ByteCount;
/// use farheap::pool::PoolConfig;
/// use farheap_collections::pool::BTree;
/// use farheap::store::MemStore;
/// use farheap::manager::MemoryManager;
/// use std::sync::Arc;
///
/// let manager = MemoryManager::start(ByteCount::mib(16))?;
/// let pool = PoolConfig::new().create_on(Arc::new(MemStore::new(ByteCount::mib(64))?), &manager)?;
/// let tree = BTree::create(&pool)?;
/// tree.insert(b"key", b"value")?;
/// assert_eq!(tree.get(b"key")?.as_deref(), Some(&b"value"[..]));
/// # Ok::<(), farheap::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct BTree {
    pool: Arc<BufferPool>,
    root: PageId,
    /// The next stamp. Begins anywhere in 2^64: those of earlier runs do not come again.
    stamps: Arc<AtomicU64>,
}

impl BTree {
    /// Creates an empty tree.
    ///
    /// # Errors
    /// As for [`BufferPool::allocate`]; [`Error::BadRange`] in a pool of
    /// [whole pages](farheap::pool::PoolConfig::whole_pages) of 64 KiB, of smaller ones not.
    pub fn create(pool: &Arc<BufferPool>) -> Result<BTree> {
        if pool.payload() > usize::from(u16::MAX) {
            // A node says its end in 16 bits.
            return Err(Error::BadRange {
                reason: "a tree's pages are smaller than 64 KiB whole".into(),
            });
        }
        let mut root = pool.allocate()?;
        let id = root.id();
        NodeMut(&mut root).clear(true);
        drop(root);
        Ok(BTree::open(pool, id))
    }

    /// Opens the tree with this root.
    #[must_use]
    pub fn open(pool: &Arc<BufferPool>, root: PageId) -> BTree {
        let first = RandomState::new().build_hasher().finish();
        BTree { pool: Arc::clone(pool), root, stamps: Arc::new(AtomicU64::new(first)) }
    }

    /// The root's page, by which the tree is opened again.
    #[must_use]
    pub fn root(&self) -> PageId {
        self.root
    }

    fn new_stamp(&self) -> u64 {
        self.stamps.fetch_add(1, Ordering::Relaxed)
    }

    /// Locks a child whose parent is locked.
    fn lock_child(&self, child: Child) -> Result<ExclusiveGuard<'_>> {
        let guard = self.pool.fix_exclusive(PageId(child.page))?;
        self.check_stamp(child, Node(&guard).stamp())?;
        Ok(guard)
    }

    fn check_entry(&self, key: &[u8], value: &[u8]) -> Result<()> {
        if key.len() + value.len() + 8 <= self.pool.payload() / ENTRY_MAX_DIVISOR {
            Ok(())
        } else {
            Err(Error::BadRange { reason: "the entry is too long for the pool's pages".into() })
        }
    }

    /// The value of a key.
    ///
    /// # Errors
    /// As for [`BufferPool::fix_shared`]; [`Error::StalePage`] when a crash has torn the tree here.
    pub fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        for _ in 0..RESTARTS_MAX {
            let Some(leaf) = self.descend(key)? else { continue };
            let found = View(leaf).value_of(key);
            if leaf.validate()
                && let Some(found) = found
            {
                return Ok(found);
            }
        }
        let leaf = self.leaf_coupled(key)?;
        let node = Node(&leaf);
        Ok(node.find(key).ok().map(|slot| node.value(slot).to_vec()))
    }

    /// The value of a key, lent: its page is held together with other readers until the guard is dropped.
    /// A thread that has the guard must not change the tree, or it waits for itself.
    ///
    /// # Errors
    /// As for [`get`](Self::get).
    pub fn get_ref(&self, key: &[u8]) -> Result<Option<ValueGuard<'_>>> {
        let leaf = self.leaf_shared(key)?;
        let node = Node(&leaf);
        let range = node.find(key).ok().map(|slot| node.value_range(slot));
        Ok(range.map(|range| ValueGuard { leaf, range }))
    }

    /// The leaf for `key`, held together with other readers.
    fn leaf_shared(&self, key: &[u8]) -> Result<SharedGuard<'_>> {
        for _ in 0..RESTARTS_MAX {
            if let Some(leaf) = self.descend(key)?
                && let Some(shared) = leaf.try_share()
            {
                return Ok(shared);
            }
        }
        self.leaf_coupled(key)
    }

    /// The same, by latch coupling.
    fn leaf_coupled(&self, key: &[u8]) -> Result<SharedGuard<'_>> {
        let mut guard = self.pool.fix_shared(self.root)?;
        while !Node(&guard).is_leaf() {
            let child = Node(&guard).child_of(key);
            let next = self.pool.fix_shared(PageId(child.page))?;
            self.check_stamp(child, Node(&next).stamp())?;
            guard = next;
        }
        Ok(guard)
    }

    /// The leaf for `key`, reached optimistically; `None` when another thread interfered.
    fn descend(&self, key: &[u8]) -> Result<Option<OptimisticGuard<'_>>> {
        let mut guard = self.pool.fix_optimistic(self.root)?;
        for _ in 0..DEPTH_MAX {
            let view = View(guard);
            if view.is_leaf() {
                return Ok(guard.validate().then_some(guard));
            }
            let child = view.child_of(key);
            if !guard.validate() {
                return Ok(None);
            }
            let Some(child) = child else { return Ok(None) };
            let next = match self.pool.fix_optimistic(PageId(child.page)) {
                Ok(next) => next,
                // A child that was merged away meanwhile is a page that is not in use.
                Err(Error::NoSuchPage { .. }) if !guard.validate() => return Ok(None),
                Err(error) => return Err(error),
            };
            // The child was still this node's when it was looked at first.
            if !guard.validate() {
                return Ok(None);
            }
            let stamp = View(next).stamp();
            if !next.validate() {
                return Ok(None);
            }
            self.check_stamp(child, stamp.unwrap_or_default())?;
            guard = next;
        }
        Ok(None)
    }

    /// The leaf for `key`, locked, by latch coupling.
    fn leaf_locked(&self, key: &[u8]) -> Result<ExclusiveGuard<'_>> {
        let mut guard = self.pool.fix_exclusive(self.root)?;
        while !Node(&guard).is_leaf() {
            let child = Node(&guard).child_of(key);
            guard = self.lock_child(child)?;
        }
        Ok(guard)
    }

    /// The leaf for `key`, locked after an optimistic descent.
    fn leaf(&self, key: &[u8]) -> Result<ExclusiveGuard<'_>> {
        for _ in 0..RESTARTS_MAX {
            if let Some(leaf) = self.descend(key)?
                && let Some(locked) = leaf.try_upgrade()
            {
                return Ok(locked);
            }
        }
        self.leaf_locked(key)
    }

    /// Sets a key's value; returns whether the key is new.
    ///
    /// # Errors
    /// [`Error::BadRange`] for an entry that is too long, else as for [`BufferPool::allocate`].
    pub fn insert(&self, key: &[u8], value: &[u8]) -> Result<bool> {
        self.check_entry(key, value)?;
        let mut leaf = self.leaf(key)?;
        if let Some(is_new) = NodeMut(&mut leaf).put(key, value) {
            return Ok(is_new);
        }
        drop(leaf);
        let mut leaf = self.leaf_with_room(key, entry_bytes(key, value))?;
        let is_new = NodeMut(&mut leaf).put(key, value);
        Ok(is_new.expect("a leaf that was split has room for an entry"))
    }

    /// Changes a key's value in place, under the leaf's latch; returns whether there is the key.
    ///
    /// # Errors
    /// As for [`BufferPool::fix_exclusive`].
    pub fn update(&self, key: &[u8], change: impl FnOnce(&mut [u8])) -> Result<bool> {
        let mut leaf = self.leaf(key)?;
        let Ok(slot) = Node(&leaf).find(key) else { return Ok(false) };
        change(NodeMut(&mut leaf).value_mut(slot));
        Ok(true)
    }

    /// Removes a key; returns whether there was one.
    ///
    /// # Errors
    /// As for [`BufferPool::fix_exclusive`].
    pub fn remove(&self, key: &[u8]) -> Result<bool> {
        let mut leaf = self.leaf(key)?;
        let Ok(slot) = Node(&leaf).find(key) else { return Ok(false) };
        NodeMut(&mut leaf).remove(slot);
        let is_sparse = leaf.id() != self.root && Node(&leaf).used() < self.sparse_max();
        drop(leaf);
        if is_sparse {
            self.merge_towards(key)?;
        }
        Ok(true)
    }

    /// Fails if a child does not bear the stamp that its parent noted.
    fn check_stamp(&self, child: Child, stamp: u64) -> Result<()> {
        if child.stamp == stamp {
            return Ok(());
        }
        let table = self.pool.path().to_path_buf();
        Err(Error::StalePage { page: PageId(child.page), table })
    }
}

/// A value in its page, which is held; see [`BTree::get_ref`].
pub struct ValueGuard<'t> {
    leaf: SharedGuard<'t>,
    range: Range<usize>,
}

impl<'t> ValueGuard<'t> {
    /// The page that has the value, and where in it.
    pub fn into_page(self) -> (SharedGuard<'t>, Range<usize>) {
        (self.leaf, self.range)
    }
}

impl Deref for ValueGuard<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.leaf[self.range.clone()]
    }
}

impl fmt::Debug for ValueGuard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ValueGuard({:?} of {:?})", self.range, self.leaf)
    }
}

/// A key with its value.
type KeyValue = (Vec<u8>, Vec<u8>);
