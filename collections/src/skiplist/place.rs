//! Where the skip list's nodes live: at insertion, by priority, and after rearrangement.
//!
//! A node's levels are its priority: a search passes tall nodes first.
#![expect(unsafe_code, reason = "moves nodes to memory that it allocated")]

use super::node::{self, LEVELS_MAX, Link};
use super::{FarSkipList, Preds};
use crate::sub::{AllocError, SubAllocator};
use crate::{FILL_DEFAULT, PageFiller};
use std::fmt;
use std::ptr::NonNull;

/// Nodes that leave local memory, at most, to make room for one taller node: one is enough for most,
/// and one that is taller than the usual needs two that are neighbours, as about every second is.
const VICTIMS_MAX: usize = 16;

/// Where a skip list's nodes live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ListStrategy {
    /// Swappable memory in the order of allocation.
    Plain,
    /// Near the neighbour if its page has room, by an allocator that knows hints only.
    Hint,
    /// Tall nodes purely local, the others swappable.
    Local,
    /// Neighbours share pages.
    Page,
    /// Both [`Local`](ListStrategy::Local) and [`Page`](ListStrategy::Page).
    LocalPage,
}

impl ListStrategy {
    /// All strategies.
    pub const ALL: [ListStrategy; 5] = [
        ListStrategy::Plain,
        ListStrategy::Hint,
        ListStrategy::Local,
        ListStrategy::Page,
        ListStrategy::LocalPage,
    ];

    /// True if tall nodes go to purely-local memory.
    #[must_use]
    pub fn uses_local(self) -> bool {
        matches!(self, ListStrategy::Local | ListStrategy::LocalPage)
    }
}

impl fmt::Display for ListStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ListStrategy::Plain => "plain",
            ListStrategy::Hint => "hint",
            ListStrategy::Local => "local",
            ListStrategy::Page => "page",
            ListStrategy::LocalPage => "local+page",
        })
    }
}

impl<K, V> FarSkipList<K, V> {
    /// Moves a node into `memory`, which was allocated for it, and frees the old one. `preds` are
    /// the nodes before it.
    fn relocate(
        &mut self,
        old: Link<K, V>,
        preds: &Preds<K, V>,
        memory: NonNull<u8>,
    ) -> Link<K, V> {
        // SAFETY: the memory has this node's layout; all links to it are replaced below.
        let new = unsafe { old.move_to(memory) };
        for (level, pred) in preds.iter().enumerate().take(new.levels()) {
            self.set_next_of(*pred, level, Some(new));
        }
        self.free_node(old);
        if self.collective.is_local(new.as_ptr()) {
            self.local.add(new);
        }
        new
    }

    /// Moves nodes so that neighbours share pages, as the strategy says; leaves 30 % of each page
    /// for later inserts. Does nothing for strategies that place no pages.
    ///
    /// # Errors
    /// [`AllocError`] when there is no memory to move to; the list is whole, partly rearranged.
    pub fn make_page_aware(&mut self) -> Result<(), AllocError> {
        self.make_page_aware_to(FILL_DEFAULT)
    }

    /// [`make_page_aware`](FarSkipList::make_page_aware), starting a new page once one is filled
    /// to `fill` (0 to 1).
    ///
    /// # Errors
    /// As [`make_page_aware`](FarSkipList::make_page_aware).
    pub fn make_page_aware_to(&mut self, fill: f64) -> Result<(), AllocError> {
        if matches!(self.strategy, ListStrategy::Plain | ListStrategy::Local) {
            return Ok(());
        }
        let collective = self.collective.clone();
        let mut pages = PageFiller::new(&collective, fill);
        let mut preds: Preds<K, V> = [None; LEVELS_MAX];
        let mut next = self.next_of(None, 0);
        while let Some(mut node) = next {
            let layout = node::layout::<K, V>(node.levels());
            if self.strategy == ListStrategy::Hint {
                let hint = preds[0].map(|pred| pred.as_ptr().cast_const());
                let memory = self.collective.hint_only().allocate(layout, hint)?;
                node = self.relocate(node, &preds, memory);
            } else if !self.collective.is_local(node.as_ptr()) {
                let memory = pages.allocate(layout)?;
                node = self.relocate(node, &preds, memory);
            }
            preds[..node.levels()].fill(Some(node));
            next = node.next(0);
        }
        Ok(())
    }
}

impl<K: Ord, V> FarSkipList<K, V> {
    /// Memory for a new node after `preds`; those of them that move are replaced.
    pub(super) fn place(
        &mut self,
        preds: &mut Preds<K, V>,
        levels: usize,
    ) -> Result<NonNull<u8>, AllocError> {
        let layout = node::layout::<K, V>(levels);
        if self.strategy == ListStrategy::Hint {
            let hint = preds[0].map(|pred| pred.as_ptr().cast_const());
            return self.collective.hint_only().allocate(layout, hint);
        }
        if self.strategy.uses_local()
            && let Some(memory) = self.place_local(preds, levels)?
        {
            return Ok(memory);
        }
        if matches!(self.strategy, ListStrategy::Page | ListStrategy::LocalPage) {
            let far = |link: &Link<K, V>| !self.collective.is_local(link.as_ptr());
            let beside = preds[0].filter(far).or_else(|| self.next_of(preds[0], 0).filter(far));
            let sub = beside.and_then(|node| self.collective.suballocator_of(node.as_ptr()));
            match sub.map(|sub| sub.allocate(layout)) {
                None | Some(Err(AllocError::Full | AllocError::TooLarge { .. })) => {}
                Some(done) => return done,
            }
        }
        self.collective.swappable().allocate(layout)
    }

    /// Purely-local memory for a node with this number of levels, if need be in place of lower ones.
    fn place_local(
        &mut self,
        preds: &mut Preds<K, V>,
        levels: usize,
    ) -> Result<Option<NonNull<u8>>, AllocError> {
        let layout = node::local_layout::<K, V>(levels);
        for _ in 0..VICTIMS_MAX {
            match self.collective.purely_local().allocate(layout) {
                Err(AllocError::Full) => {}
                // An object that local memory can never hold goes elsewhere.
                Err(AllocError::TooLarge { .. } | AllocError::Align { .. }) => return Ok(None),
                done => return done.map(Some),
            }
            let address = |link: Link<K, V>| link.as_ptr() as usize;
            let Some(victim) = self.local.lowest_by_address(levels, address) else {
                return Ok(None);
            };
            let (before, _) = self.find(victim.key());
            let linked = |level: usize| self.next_of(before[level], level) == Some(victim);
            // An inconsistent `Ord` can hide a node; it stays where it is then.
            if !(0..victim.levels()).all(linked) {
                return Ok(None);
            }
            let memory =
                self.collective.swappable().allocate(node::layout::<K, V>(victim.levels()))?;
            let moved = self.relocate(victim, &before, memory);
            for pred in preds.iter_mut().filter(|pred| **pred == Some(victim)) {
                *pred = Some(moved);
            }
        }
        Ok(None)
    }
}
