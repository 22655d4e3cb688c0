//! Rearrangement in batches: nodes that are used together move to the same page.
//!
//! Each node moves by itself: whatever fails on the way, the tree is whole. Old pages are given
//! back as they empty. Nodes in purely-local memory stay.

use super::FarBTreeMap;
use super::local::Cell;
use super::node::{self, Link};
use super::place::TreeStrategy;
use crate::sub::AllocError;
use crate::{FILL_DEFAULT, PageFiller};

impl<K, V> FarBTreeMap<K, V> {
    /// Moves nodes so that those used together share pages, as the strategy says; leaves 30 % of
    /// each page for later inserts. Does nothing for strategies that place no pages.
    ///
    /// # Errors
    /// [`AllocError`] when there is no memory to move to; the map is whole, partly rearranged.
    pub fn make_page_aware(&mut self) -> Result<(), AllocError> {
        self.make_page_aware_to(FILL_DEFAULT)
    }

    /// [`make_page_aware`](FarBTreeMap::make_page_aware), starting a new page once one is filled
    /// to `fill` (0 to 1).
    ///
    /// # Errors
    /// As [`make_page_aware`](FarBTreeMap::make_page_aware).
    pub fn make_page_aware_to(&mut self, fill: f64) -> Result<(), AllocError> {
        match self.strategy {
            TreeStrategy::Plain | TreeStrategy::Local => Ok(()),
            TreeStrategy::Hint => self.rearrange_by_hint(),
            TreeStrategy::Dfs | TreeStrategy::LocalDfs => self.rearrange_dfs(fill),
            TreeStrategy::Veb | TreeStrategy::LocalVeb => self.rearrange_veb(fill),
        }
    }

    /// A part of [`make_page_aware`](FarBTreeMap::make_page_aware): moves at most `nodes` nodes
    /// (at least one), and returns whether the map is through; the next call then starts anew.
    /// The map may change between calls: what is inserted behind the place that was reached waits
    /// for the next round. Each call starts a page, so `nodes` should fill some. Only the strategies
    /// that place depth-first work in parts, the others do all at once.
    ///
    /// # Errors
    /// As [`make_page_aware`](FarBTreeMap::make_page_aware); the next call goes on where this one
    /// started.
    pub fn make_page_aware_step(&mut self, nodes: usize) -> Result<bool, AllocError> {
        if !matches!(self.strategy, TreeStrategy::Dfs | TreeStrategy::LocalDfs) {
            return self.make_page_aware().map(|()| true);
        }
        let collective = self.collective.clone();
        let mut page = PageFiller::new(&collective, FILL_DEFAULT);
        let mut left = nodes.max(1);
        let from = self.rearranged_to.clone();
        let stopped = self.post_order_from(&from, |map, cell| {
            map.relocate_to(cell, &mut page)?;
            left -= 1;
            Ok(left > 0)
        })?;
        self.rearranged_to = stopped;
        Ok(self.rearranged_to.is_empty())
    }

    /// Calls `visit` for the cell of every node, children before their parents.
    fn post_order(
        &mut self,
        mut visit: impl FnMut(&mut FarBTreeMap<K, V>, Cell<K, V>) -> Result<(), AllocError>,
    ) -> Result<(), AllocError> {
        self.post_order_from(&[], |map, cell| visit(map, cell).map(|()| true)).map(drop)
    }

    /// [`post_order`](FarBTreeMap::post_order) from where an earlier call was stopped by a `visit`
    /// that returned `false`: for each level the next child. Returns where this one was stopped;
    /// nothing: it is through.
    fn post_order_from(
        &mut self,
        from: &[usize],
        mut visit: impl FnMut(&mut FarBTreeMap<K, V>, Cell<K, V>) -> Result<bool, AllocError>,
    ) -> Result<Vec<usize>, AllocError> {
        let mut open = self.reopen(from);
        while let Some((cell, next)) = open.last_mut() {
            let Some(node) = self.at(*cell) else { break };
            if !node.is_leaf() && *next <= node.len() {
                let child = Cell::Child(node, *next);
                *next += 1;
                open.push((child, 0));
                continue;
            }
            let cell = *cell;
            open.pop();
            if !visit(self, cell)? {
                return Ok(open.into_iter().map(|(_, next)| next).collect());
            }
        }
        Ok(Vec::new())
    }

    /// The nodes that are open at a place in the tree, or near to it: the tree may have changed.
    fn reopen(&self, from: &[usize]) -> Vec<(Cell<K, V>, usize)> {
        let mut open = vec![(Cell::Root, from.first().copied().unwrap_or(0))];
        for next in from.iter().skip(1) {
            let (cell, after) = *open.last().expect("the root is there");
            let parent = self.at(cell).filter(|node| !node.is_leaf());
            let Some(parent) = parent.filter(|node| (1..=node.len() + 1).contains(&after)) else {
                break;
            };
            open.push((Cell::Child(parent, after - 1), *next));
        }
        open
    }

    fn rearrange_by_hint(&mut self) -> Result<(), AllocError> {
        let mut previous: Option<Link<K, V>> = None;
        self.post_order(|map, cell| {
            let node = map.at(cell).expect("a visited cell has a node");
            let layout = node::layout::<K, V>(node.height());
            let hint = previous.map(|link| link.as_ptr().cast_const());
            let memory = map.collective.hint_only().allocate(layout, hint)?;
            previous = Some(map.relocate(cell, memory));
            Ok(())
        })
    }

    fn rearrange_dfs(&mut self, fill: f64) -> Result<(), AllocError> {
        let collective = self.collective.clone();
        let mut page = PageFiller::new(&collective, fill);
        self.post_order(|map, cell| map.relocate_to(cell, &mut page))
    }

    /// Moves a node to the page being filled, unless it is purely local.
    fn relocate_to(
        &mut self,
        cell: Cell<K, V>,
        pages: &mut PageFiller<'_>,
    ) -> Result<(), AllocError> {
        let node = self.at(cell).expect("a visited cell has a node");
        if self.collective.is_local(node.as_ptr()) {
            return Ok(());
        }
        let memory = pages.allocate(node::layout::<K, V>(node.height()))?;
        self.relocate(cell, memory);
        Ok(())
    }

    fn rearrange_veb(&mut self, fill: f64) -> Result<(), AllocError> {
        let collective = self.collective.clone();
        let mut page = PageFiller::new(&collective, fill);
        let Some(root) = self.root else { return Ok(()) };
        let mut open = vec![TreePiece::Tree(Cell::Root, usize::from(root.height()) + 1)];
        while let Some(piece) = open.pop() {
            match piece {
                TreePiece::Tree(_, 0) => {}
                TreePiece::Tree(cell, 1) => self.relocate_to(cell, &mut page)?,
                TreePiece::Tree(cell, height) => {
                    let lower = height / 2;
                    open.push(TreePiece::Below(cell, height - lower, lower));
                    open.push(TreePiece::Tree(cell, height - lower));
                }
                // The nodes above have moved by now, so these cells stay.
                TreePiece::Below(cell, down, height) => {
                    let mut roots = self.descendants(cell, down);
                    roots.reverse();
                    open.extend(roots.into_iter().map(|cell| TreePiece::Tree(cell, height)));
                }
            }
        }
        Ok(())
    }

    /// The cells of all nodes `down` levels below a cell, in key order.
    fn descendants(&self, cell: Cell<K, V>, down: usize) -> Vec<Cell<K, V>> {
        let mut cells = vec![cell];
        for _ in 0..down {
            let parents = cells.into_iter().filter_map(|cell| self.at(cell));
            let inner = parents.filter(|node| !node.is_leaf());
            cells = inner
                .flat_map(|node| (0..=node.len()).map(move |at| Cell::Child(node, at)))
                .collect();
        }
        cells
    }
}

/// A part of a tree that waits for its van Emde Boas layout.
enum TreePiece<K, V> {
    /// The upper levels, this many, of the subtree in a cell.
    Tree(Cell<K, V>, usize),
    /// All subtrees that begin this number of levels below a cell, each with this number of levels.
    Below(Cell<K, V>, usize, usize),
}
