//! Which sub-allocator a new node comes from.
#![expect(unsafe_code, reason = "makes nodes in memory that it allocated")]

use super::FarBTreeMap;
use super::node::{self, Link};
use super::path::Path;
use crate::sub::{AllocError, SubAllocator};
use std::fmt;
use std::ptr::NonNull;

/// Where a tree's nodes live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TreeStrategy {
    /// Swappable memory in the order of allocation.
    Plain,
    /// Near the parent if its page has room, by an allocator that knows hints only.
    Hint,
    /// Shallow nodes purely local, the others swappable.
    Local,
    /// Nodes that are close in a depth-first traversal share pages.
    Dfs,
    /// Both [`Local`](TreeStrategy::Local) and [`Dfs`](TreeStrategy::Dfs).
    LocalDfs,
    /// Pages hold pieces of the van Emde Boas layout.
    Veb,
    /// Both [`Local`](TreeStrategy::Local) and [`Veb`](TreeStrategy::Veb).
    LocalVeb,
}

impl TreeStrategy {
    /// All strategies.
    pub const ALL: [TreeStrategy; 7] = [
        TreeStrategy::Plain,
        TreeStrategy::Hint,
        TreeStrategy::Local,
        TreeStrategy::Dfs,
        TreeStrategy::LocalDfs,
        TreeStrategy::Veb,
        TreeStrategy::LocalVeb,
    ];

    /// True if shallow nodes go to purely-local memory.
    #[must_use]
    pub fn uses_local(self) -> bool {
        matches!(self, TreeStrategy::Local | TreeStrategy::LocalDfs | TreeStrategy::LocalVeb)
    }
}

impl fmt::Display for TreeStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TreeStrategy::Plain => "plain",
            TreeStrategy::Hint => "hint",
            TreeStrategy::Local => "local",
            TreeStrategy::Dfs => "dfs",
            TreeStrategy::LocalDfs => "local+dfs",
            TreeStrategy::Veb => "veb",
            TreeStrategy::LocalVeb => "local+veb",
        })
    }
}

impl<K: Ord, V> FarBTreeMap<K, V> {
    /// Allocates the nodes that inserting at the end of `path` takes: one for each full node from
    /// the leaf upwards, and a root if all are full. Nodes of `path` that move are replaced in it.
    pub(super) fn allocate_for_insert(
        &mut self,
        path: &mut Path<K, V>,
    ) -> Result<Vec<Link<K, V>>, AllocError> {
        let mut fresh = Vec::new();
        let outcome = self.allocate_splits(path, &mut fresh);
        if let Err(error) = outcome {
            for node in fresh {
                self.free_unlinked(node);
            }
            return Err(error);
        }
        for node in &fresh {
            if self.collective.is_local(node.as_ptr()) {
                self.local.add(*node);
            }
        }
        Ok(fresh)
    }

    fn allocate_splits(
        &mut self,
        path: &mut Path<K, V>,
        fresh: &mut Vec<Link<K, V>>,
    ) -> Result<(), AllocError> {
        for depth in (0..path.depth()).rev() {
            let node = path.step_at(depth).node;
            if !node.is_full() {
                return Ok(());
            }
            let height = node.height();
            let memory = self.place_sibling(path, depth)?;
            // SAFETY: just allocated for a node of this height.
            fresh.push(unsafe { Link::create(memory, height) });
        }
        let height = path.depth() as u8;
        let memory = self.place_root(path, height)?;
        // SAFETY: as above.
        fresh.push(unsafe { Link::create(memory, height) });
        Ok(())
    }

    /// Memory for the other half of the node at `depth`.
    fn place_sibling(
        &mut self,
        path: &mut Path<K, V>,
        depth: usize,
    ) -> Result<NonNull<u8>, AllocError> {
        let node = path.step_at(depth).node;
        let parent = if depth == 0 { node } else { path.step_at(depth - 1).node };
        let layout = node::layout::<K, V>(node.height());
        match self.strategy {
            TreeStrategy::Plain => self.collective.swappable().allocate(layout),
            TreeStrategy::Hint => {
                self.collective.hint_only().allocate(layout, Some(parent.as_ptr()))
            }
            TreeStrategy::Local => self.place_near(path, node, node),
            _ => self.place_near(path, parent, node),
        }
    }

    /// Memory for a new root.
    fn place_root(&mut self, path: &mut Path<K, V>, height: u8) -> Result<NonNull<u8>, AllocError> {
        let layout = node::layout::<K, V>(height);
        if self.strategy == TreeStrategy::Hint {
            let hint = self.root.map(|root| root.as_ptr().cast_const());
            return self.collective.hint_only().allocate(layout, hint);
        }
        if self.strategy.uses_local()
            && let Some(memory) = self.place_local(path, height)?
        {
            return Ok(memory);
        }
        self.collective.swappable().allocate(layout)
    }

    /// Memory where `near` is, for a sibling of `node`; swappable memory when that is full.
    fn place_near(
        &mut self,
        path: &mut Path<K, V>,
        near: Link<K, V>,
        node: Link<K, V>,
    ) -> Result<NonNull<u8>, AllocError> {
        let layout = node::layout::<K, V>(node.height());
        let near_is_local = self.collective.is_local(near.as_ptr());
        let beside = if near_is_local { node::local_layout::<K, V>() } else { layout };
        let sub = self.collective.suballocator_of(near.as_ptr()).expect("a node of this tree");
        match sub.allocate(beside) {
            // Too large for a page, or for local memory: swappable memory may hold it.
            Err(AllocError::Full | AllocError::TooLarge { .. } | AllocError::Align { .. }) => {}
            done => return done,
        }
        drop(sub);
        if self.collective.is_local(node.as_ptr()) {
            if let Some(memory) = self.place_local(path, node.height())? {
                return Ok(memory);
            }
            if self.strategy == TreeStrategy::Local {
                // The nodes that the new one will be read with: it is allocated behind them then, and
                // those that come next find local memory.
                if let Some((cell, above)) = self.cell_of(node) {
                    self.move_out(path, cell, above)?;
                }
            }
        }
        self.collective.swappable().allocate(layout)
    }
}
