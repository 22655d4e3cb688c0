//! Bulk load: a tree of entries that come in ascending order, its nodes full.
//!
//! One node of each level is open, in memory; an entry that finds no room closes it: it gets a page, and
//! the level above an entry that names it. No page is looked at twice.

use super::BTree;
use super::node::{Child, NodeMut};
use super::shape::separator;
use farheap::pool::{BufferPool, ExclusiveGuard};
use farheap::{Error, PageId, Result};
use std::sync::Arc;

/// The open node of a level.
struct OpenNode {
    node: Vec<u8>,
    /// Where its range of keys begins.
    from: Vec<u8>,
}

impl OpenNode {
    fn new(tree: &BTree, level: usize, from: Vec<u8>) -> OpenNode {
        let mut node = vec![0; tree.pool.payload()];
        NodeMut(&mut node).clear(level == 0);
        OpenNode { node, from }
    }
}

/// Entry of a closed node for the level above.
struct ClosedNode {
    from: Vec<u8>,
    child: Child,
}

struct BulkLoader {
    tree: BTree,
    /// Leaves first.
    levels: Vec<OpenNode>,
    /// Pages of closed nodes.
    closed: Vec<PageId>,
}

impl BTree {
    /// Creates a tree of `entries`, which come in ascending order of their keys, each key once. Its
    /// nodes are full: it takes the least room that it can, and the first inserts anywhere but at its
    /// end split nodes.
    ///
    /// # Errors
    /// [`Error::BadRange`] for a key that is not greater than the one before, and for an entry that is
    /// too long, else as for [`BufferPool::allocate`]. All pages are free again then.
    ///
    /// # Examples
    /// ```
    /// # use farheap::{ByteCount, pool::PoolConfig, store::MemStore};
    /// # use farheap_collections::pool::BTree;
    /// # use farheap::manager::MemoryManager;
    /// # let manager = MemoryManager::start(ByteCount::mib(16))?;
    /// # let store = std::sync::Arc::new(MemStore::new(ByteCount::mib(64))?);
    /// # let pool = PoolConfig::new().create_on(store, &manager)?;
    /// let squares = (0..1000u32).map(|n| (n.to_be_bytes(), (n * n).to_be_bytes()));
    /// let tree = BTree::load(&pool, squares)?;
    /// assert_eq!(tree.get(&7u32.to_be_bytes())?, Some(49u32.to_be_bytes().to_vec()));
    /// # Ok::<(), farheap::Error>(())
    /// ```
    pub fn load<K: AsRef<[u8]>, V: AsRef<[u8]>>(
        pool: &Arc<BufferPool>,
        entries: impl IntoIterator<Item = (K, V)>,
    ) -> Result<BTree> {
        let tree = BTree::create(pool)?;
        let leaves = OpenNode::new(&tree, 0, Vec::new());
        let mut loader = BulkLoader { tree, levels: vec![leaves], closed: Vec::new() };
        match loader.load(entries) {
            Ok(()) => Ok(loader.tree),
            Err(error) => {
                for page in loader.closed.iter().chain([&loader.tree.root]) {
                    // A page that cannot be read any more stays in use, which costs its room only.
                    let _ = pool.fix_exclusive(*page).map(ExclusiveGuard::free);
                }
                Err(error)
            }
        }
    }
}

impl BulkLoader {
    fn load<K: AsRef<[u8]>, V: AsRef<[u8]>>(
        &mut self,
        entries: impl IntoIterator<Item = (K, V)>,
    ) -> Result<()> {
        let mut last: Option<Vec<u8>> = None;
        for (key, value) in entries {
            let (key, value) = (key.as_ref(), value.as_ref());
            self.tree.check_entry(key, value)?;
            if last.as_deref().is_some_and(|last| last >= key) {
                return Err(Error::BadRange { reason: "the keys to load do not ascend".into() });
            }
            if !NodeMut(&mut self.levels[0].node).try_push(key, value) {
                let below = last.as_deref().expect("an empty leaf has room for an entry");
                let named = self.close(0, &separator(below, key))?;
                NodeMut(&mut self.levels[0].node).push(key, value);
                self.add_above(0, named)?;
            }
            let last = last.get_or_insert_default();
            last.clear();
            last.extend_from_slice(key);
        }
        self.finish()
    }

    /// Adds to the level above `level` what names a node that was closed.
    fn add_above(&mut self, mut level: usize, mut named: ClosedNode) -> Result<()> {
        loop {
            level += 1;
            if level == self.levels.len() {
                self.levels.push(OpenNode::new(&self.tree, level, named.from.clone()));
            }
            let entry = named.child.to_bytes();
            if NodeMut(&mut self.levels[level].node).try_push(&named.from, &entry) {
                return Ok(());
            }
            let above = self.close(level, &named.from)?;
            NodeMut(&mut self.levels[level].node).push(&named.from, &entry);
            named = above;
        }
    }

    /// Gives the open node of a level a page of its own, and begins the next one at `from`.
    fn close(&mut self, level: usize, from: &[u8]) -> Result<ClosedNode> {
        let mut page = self.tree.pool.allocate()?;
        self.closed.push(page.id());
        let open = &mut self.levels[level];
        page.copy_from_slice(&open.node);
        let child = self.tree.stamped(&mut page);
        NodeMut(&mut open.node).clear(level == 0);
        Ok(ClosedNode { from: std::mem::replace(&mut open.from, from.to_vec()), child })
    }

    /// Closes what is open; the node of the last level is the root.
    fn finish(&mut self) -> Result<()> {
        let mut level = 0;
        while level + 1 < self.levels.len() {
            let named = self.close(level, b"")?;
            self.add_above(level, named)?;
            level += 1;
        }
        self.tree.pool.fix_exclusive(self.tree.root)?.copy_from_slice(&self.levels[level].node);
        Ok(())
    }
}
