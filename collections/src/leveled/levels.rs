//! The levels of a tree: for each the collective that its nodes live in, and their shape.

#![expect(unsafe_code, reason = "makes nodes in memory that it allocated, moves and frees them")]

use super::node::Node;
use crate::pairs::Shape;
use crate::sub::{AllocError, Collective, SubAllocator};
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;

/// Where the nodes of each level live; the last entry is for all levels from there on.
pub(super) struct Levels<K, V> {
    levels: Vec<(Arc<Collective>, Shape)>,
    _pairs: PhantomData<fn() -> (K, V)>,
}

impl<K, V> Clone for Levels<K, V> {
    fn clone(&self) -> Levels<K, V> {
        Levels { levels: self.levels.clone(), _pairs: PhantomData }
    }
}

impl<K, V> Levels<K, V> {
    /// Levels whose nodes are as large as their collectives' pages.
    pub(super) fn new(
        leaves: Arc<Collective>,
        above: Vec<Arc<Collective>>,
    ) -> Result<Levels<K, V>, AllocError> {
        let page = |collective: &Collective| collective.page_size().as_usize();
        let too_large = |size, max| AllocError::TooLarge { size: 2 * size, max };
        let (leaf_page, pair) = (page(&leaves), size_of::<K>() + size_of::<V>());
        let shape = Shape::new::<K, V>(leaf_page).ok_or(too_large(pair, leaf_page))?;
        let above = if above.is_empty() { vec![leaves.clone()] } else { above };
        let mut levels = vec![(leaves, shape)];
        for collective in above {
            let (page, entry) = (page(&collective), size_of::<(K, Node<K, V>)>());
            let shape = Shape::new::<K, Node<K, V>>(page).ok_or(too_large(entry, page))?;
            levels.push((collective, shape));
        }
        Ok(Levels { levels, _pairs: PhantomData })
    }

    fn entry(&self, level: usize) -> &(Arc<Collective>, Shape) {
        &self.levels[level.min(self.levels.len() - 1)]
    }

    pub(super) fn collective(&self, level: usize) -> &Arc<Collective> {
        &self.entry(level).0
    }

    pub(super) fn shape(&self, level: usize) -> Shape {
        self.entry(level).1
    }

    /// Brings a node in that is about to be searched.
    pub(super) fn bring_in(&self, node: &Node<K, V>) {
        self.collective(node.level()).bring_in(node.memory().as_ptr());
    }

    pub(super) fn is_full(&self, node: &Node<K, V>) -> bool {
        node.len() == self.shape(node.level()).capacity
    }

    /// True if nobody else uses any of the collectives.
    pub(super) fn are_alone(&self) -> bool {
        self.levels.iter().all(|(collective, _)| {
            let own = self.levels.iter().filter(|(other, _)| Arc::ptr_eq(other, collective));
            Arc::strong_count(collective) == own.count()
        })
    }

    /// An empty node: a leaf in a page of its own, a node above in local memory while that has
    /// room, and else in a page too.
    pub(super) fn allocate(&self, level: usize) -> Result<Node<K, V>, AllocError> {
        let memory = match level {
            0 => self.allocate_far(0)?,
            _ => self.allocate_local(level).or_else(|_| self.allocate_far(level))?,
        };
        // SAFETY: just allocated with the layout of the level's shape.
        Ok(unsafe { Node::create(memory, level as u32) })
    }

    fn allocate_local(&self, level: usize) -> Result<NonNull<u8>, AllocError> {
        let (collective, shape) = self.entry(level);
        collective.purely_local().allocate(shape.layout)
    }

    fn allocate_far(&self, level: usize) -> Result<NonNull<u8>, AllocError> {
        let (collective, shape) = self.entry(level);
        collective.new_page()?.allocate(shape.layout)
    }

    pub(super) fn is_local(&self, node: &Node<K, V>) -> bool {
        self.collective(node.level()).is_local(node.memory().as_ptr())
    }

    /// Moves a node to local memory, or from there to a page.
    pub(super) fn relocate(&self, node: &mut Node<K, V>, local: bool) -> Result<(), AllocError> {
        let level = node.level();
        let memory = if local { self.allocate_local(level) } else { self.allocate_far(level) }?;
        // SAFETY: just allocated with the level's layout; `&mut` rules references out.
        let old = unsafe { node.move_to(self.shape(level), memory) };
        self.free_memory(level, old);
        Ok(())
    }

    /// Frees a node, which holds no pair any more.
    pub(super) fn free(&self, node: Node<K, V>) {
        assert_eq!(node.len(), 0, "a node is emptied before it is freed");
        self.free_memory(node.level(), node.memory());
    }

    fn free_memory(&self, level: usize, memory: NonNull<u8>) {
        let (collective, shape) = self.entry(level);
        // SAFETY: the memory came from this level's collective with this layout; its node is gone
        // or has moved.
        unsafe { collective.deallocate(memory, shape.layout) };
    }
}
