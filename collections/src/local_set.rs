//! Which nodes of a container are purely local, by priority.
//!
//! The nodes remember their position in the set, so that leaving it takes constant time. All of
//! it is local memory: keeping it up to date never faults.

/// A node that can be in a [`LocalSet`].
pub(super) trait SetNode: Copy {
    /// Its priority; higher ones stay longer.
    fn priority(self) -> usize;
    /// Its position among those of its priority.
    fn slot(self) -> usize;
    /// Remembers its position.
    fn set_slot(self, slot: usize);
}

/// The purely-local nodes of a container.
#[derive(Debug)]
pub(super) struct LocalSet<N> {
    by_priority: Vec<Vec<N>>,
    /// The highest priority whose nodes have been put in the order of their addresses.
    ordered: usize,
}

impl<N: SetNode> LocalSet<N> {
    pub(super) fn new() -> LocalSet<N> {
        LocalSet { by_priority: Vec::new(), ordered: 0 }
    }

    pub(super) fn add(&mut self, node: N) {
        let priority = node.priority();
        if self.by_priority.len() <= priority {
            self.by_priority.resize_with(priority + 1, Vec::new);
        }
        let peers = &mut self.by_priority[priority];
        node.set_slot(peers.len());
        peers.push(node);
    }

    pub(super) fn remove(&mut self, node: N) {
        let peers = &mut self.by_priority[node.priority()];
        peers.swap_remove(node.slot());
        if let Some(moved) = peers.get(node.slot()) {
            moved.set_slot(node.slot());
        }
    }

    /// A node of the lowest priority, if that is below `priority`.
    pub(super) fn lowest_below(&self, priority: usize) -> Option<N> {
        let lower = self.by_priority.iter().take(priority);
        lower.filter_map(|peers| peers.last().copied()).next()
    }

    /// The same; nodes of one priority leave by descending address, more or less, so that two that
    /// leave one after the other often make room for a larger one.
    pub(super) fn lowest_by_address(
        &mut self,
        priority: usize,
        address: impl Fn(N) -> usize,
    ) -> Option<N> {
        let lowest = self.lowest_below(priority)?.priority();
        // Those of the lowest priority leave until none is left: they are put in order once.
        if lowest > self.ordered {
            self.ordered = lowest;
            let peers = &mut self.by_priority[lowest];
            peers.sort_unstable_by_key(|node| address(*node));
            peers.iter().enumerate().for_each(|(slot, node)| node.set_slot(slot));
        }
        self.lowest_below(priority)
    }
}
