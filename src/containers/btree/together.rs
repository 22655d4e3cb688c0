//! Rearrangement by co-access: nodes whose keys are read together move to the same pages.

use super::FarBTreeMap;
use super::local::Cell;
use super::node;
use super::path::search;
use crate::containers::PageFiller;
use crate::sub::AllocError;
use std::collections::HashSet;

impl<K: Ord, V> FarBTreeMap<K, V> {
    /// Moves the far nodes of each group's keys to a page, or to pages that follow each other.
    pub fn place_together<G: IntoIterator<Item = K>>(
        &mut self,
        groups: impl IntoIterator<Item = G>,
        fill: f64,
        leaves: bool,
    ) -> Result<usize, AllocError> {
        let collective = self.collective.clone();
        let mut pages = PageFiller::new(&collective, fill);
        let mut moved = HashSet::new();
        for key in groups.into_iter().flatten() {
            let mut cell = Cell::Root;
            while let Some(here) = self.at(cell) {
                let (Err(at), false) = (search(here, &key), here.is_leaf()) else { break };
                cell = Cell::Child(here, at);
            }
            let Some(node) = self.at(cell) else { continue };
            let stays = collective.is_local(node.as_ptr()) || moved.contains(&node.as_ptr());
            if stays || (leaves && !node.is_leaf()) {
                continue;
            }
            let memory = pages.allocate(node::layout::<K, V>(node.height()))?;
            moved.insert(self.relocate(cell, memory).as_ptr());
        }
        Ok(moved.len())
    }
}
