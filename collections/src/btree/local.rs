//! Purely-local placement by priority: shallow nodes first.
//!
//! Heights are for life, and all nodes of a height have the same depth, so a node's height is its
//! priority. When local memory is full a node of lower height gives way.
#![expect(unsafe_code, reason = "moves nodes to memory that it allocated")]

use super::FarBTreeMap;
use super::node::{self, Link};
use super::path::{Path, search};
use crate::sub::{AllocError, SubAllocator};
use std::ptr::NonNull;

/// Where a link is kept.
#[derive(Debug)]
pub(super) enum Cell<K, V> {
    Root,
    Child(Link<K, V>, usize),
}

impl<K, V> Clone for Cell<K, V> {
    fn clone(&self) -> Cell<K, V> {
        *self
    }
}

impl<K, V> Copy for Cell<K, V> {}

impl<K, V> FarBTreeMap<K, V> {
    pub(super) fn at(&self, cell: Cell<K, V>) -> Option<Link<K, V>> {
        match cell {
            Cell::Root => self.root,
            Cell::Child(parent, at) => Some(parent.child(at)),
        }
    }

    /// Moves the node of a cell into `memory`, which was allocated for it, and frees the old one.
    pub(super) fn relocate(&mut self, cell: Cell<K, V>, memory: NonNull<u8>) -> Link<K, V> {
        let old = self.at(cell).expect("a cell of a node");
        // SAFETY: the memory has this node's layout; the one link to it is replaced below.
        let new = unsafe { old.move_to(memory) };
        match cell {
            Cell::Root => self.root = Some(new),
            Cell::Child(parent, at) => parent.set_child(at, new),
        }
        self.free_node(old);
        if self.collective.is_local(new.as_ptr()) {
            self.local.add(new);
        }
        new
    }
}

impl<K: Ord, V> FarBTreeMap<K, V> {
    /// Purely-local memory for a node of `height`, if need be in place of a lower one.
    pub(super) fn place_local(
        &mut self,
        path: &mut Path<K, V>,
        height: u8,
    ) -> Result<Option<NonNull<u8>>, AllocError> {
        let layout = node::local_layout::<K, V>();
        loop {
            match self.collective.purely_local().allocate(layout) {
                Err(AllocError::Full) => {}
                // An object that local memory can never hold goes elsewhere.
                Err(AllocError::TooLarge { .. } | AllocError::Align { .. }) => return Ok(None),
                done => return done.map(Some),
            }
            let Some(victim) = self.local.lowest_below(usize::from(height)) else {
                return Ok(None);
            };
            // An inconsistent `Ord` can hide a node; it stays where it is then.
            let Some((cell, above)) = self.cell_of(victim) else { return Ok(None) };
            self.move_out(path, cell, above)?;
        }
    }

    /// Moves a node from local to swappable memory, and with it all that have the same grandparent:
    /// scans want them together, and together they lie on a page or two. Their places are taken
    /// soon.
    pub(super) fn move_out(
        &mut self,
        path: &mut Path<K, V>,
        cell: Cell<K, V>,
        above: Cell<K, V>,
    ) -> Result<(), AllocError> {
        let parents = match (above, cell) {
            (Cell::Child(grandparent, _), Cell::Child(..)) => {
                (0..=grandparent.len()).map(|at| grandparent.child(at)).collect()
            }
            (Cell::Root, Cell::Child(parent, _)) => vec![parent],
            (_, Cell::Root) => Vec::new(),
        };
        let children =
            |parent: Link<K, V>| (0..=parent.len()).map(move |at| Cell::Child(parent, at));
        let family: Vec<Cell<K, V>> = parents.into_iter().flat_map(children).collect();
        for cell in if family.is_empty() { vec![cell] } else { family } {
            let node = self.at(cell).expect("a cell of a node");
            if self.collective.is_local(node.as_ptr()) {
                let layout = node::layout::<K, V>(node.height());
                let memory = self.collective.swappable().allocate(layout)?;
                let moved = self.relocate(cell, memory);
                path.moved(node, moved);
            }
        }
        Ok(())
    }

    /// Where the link to a node is kept, and that to its parent: the way there is through nodes of
    /// higher priority.
    pub(super) fn cell_of(&self, node: Link<K, V>) -> Option<(Cell<K, V>, Cell<K, V>)> {
        let key = node.key(0);
        let (mut cell, mut above) = (Cell::Root, Cell::Root);
        while let Some(here) = self.at(cell) {
            if here == node {
                return Some((cell, above));
            }
            let (Err(at), false) = (search(here, key), here.is_leaf()) else { return None };
            (cell, above) = (Cell::Child(here, at), cell);
        }
        None
    }
}
