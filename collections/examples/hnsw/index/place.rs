//! Where the records of a graph index live: at insertion, and after rearrangement.
//!
//! A search passes the records of upper layers first; then it looks at all neighbours of each
//! record it comes near to. So records that link to each other share pages.
#![expect(unsafe_code, reason = "moves records to memory that it allocated")]

use super::strategy::{GraphStrategy, Watched};
use super::{Entry, FarGraphIndex, Neighbour};
use farheap_collections::sub::{AllocError, Collective, SubAllocator};
use farheap_collections::{Links, PageFiller};
use std::collections::{HashMap, VecDeque};
use std::ptr::NonNull;
use std::sync::Arc;

impl FarGraphIndex {
    /// [`search`](FarGraphIndex::search), noting in local memory which records are used, and which
    /// after which: some 24 bytes for each pair of linked records that searches pass.
    /// [`make_page_aware`](FarGraphIndex::make_page_aware) uses the notes up.
    ///
    /// # Panics
    /// As [`search`](FarGraphIndex::search).
    pub(crate) fn search_watched(
        &mut self,
        vector: &[f32],
        count: usize,
        width: usize,
    ) -> Vec<Neighbour> {
        let mut watched = std::mem::take(&mut self.watched);
        let found =
            self.search_noting(vector, count, width, &mut |from, to| watched.note(from, to));
        self.watched = watched;
        found
    }

    /// Memory for a new record, near the nearest there is.
    pub(crate) fn place(&self, level: u8, nearest: Option<u32>) -> Result<NonNull<u8>, AllocError> {
        let layout = self.shape.layout(level);
        if self.strategy.uses_local() && level > 0 {
            match self.collective.purely_local().allocate(layout) {
                Err(AllocError::Full | AllocError::TooLarge { .. }) => {}
                done => return done,
            }
        }
        if self.strategy.shares_pages()
            && let Some(nearest) = nearest.map(|id| self.entry(id).record.as_ptr())
            && !self.collective.is_local(nearest)
        {
            let beside = self.collective.suballocator_of(nearest).expect("a record of this index");
            match beside.allocate(layout) {
                Err(AllocError::Full | AllocError::TooLarge { .. }) => {}
                done => return done,
            }
        }
        self.collective.swappable().allocate(layout)
    }

    pub(crate) fn free(&self, record: super::Record, level: u8) {
        // SAFETY: the record came from this collective with this layout; its last use is over.
        unsafe { self.collective.deallocate(record.memory(), self.shape.layout(level)) };
    }

    /// Moves a record into `memory`, which was allocated for it, and frees the old one.
    fn relocate(&mut self, id: u32, memory: NonNull<u8>) {
        let Entry { record, level } = self.entry(id);
        // SAFETY: the memory has this record's layout.
        let moved = unsafe { record.copy_to(memory, self.shape, level) };
        self.table[id as usize].record = moved;
        self.free(record, level);
    }

    /// A copy of this index in another collective, in the order of insertion. The graph is the
    /// same: searches find the same.
    ///
    /// # Errors
    /// [`AllocError`] when the other collective has no room.
    pub(crate) fn copy_to(
        &self,
        collective: Arc<Collective>,
        strategy: GraphStrategy,
    ) -> Result<FarGraphIndex, AllocError> {
        let mut copy = FarGraphIndex {
            table: Vec::with_capacity(self.table.len()),
            start: None,
            strategy,
            watched: Watched::default(),
            collective,
            ..*self
        };
        for Entry { record, level } in &self.table {
            let memory = copy.place(*level, None)?;
            // SAFETY: just allocated for a record of this level.
            let record = unsafe { record.copy_to(memory, self.shape, *level) };
            copy.table.push(Entry { record, level: *level });
        }
        copy.start = self.start;
        Ok(copy)
    }

    /// Moves records as the strategy says, starting a new page once one is filled to `fill` (0 to 1; one for
    /// an index that is only searched). Does nothing for [`GraphStrategy::Plain`].
    ///
    /// # Errors
    /// [`AllocError`] when there is no memory to move to; the index is whole, partly rearranged.
    pub(crate) fn make_page_aware(&mut self, fill: f64) -> Result<(), AllocError> {
        let watched = std::mem::take(&mut self.watched);
        let local =
            if self.strategy.uses_local() { self.choose_local(&watched) } else { Vec::new() };
        let mut is_chosen = vec![false; self.table.len()];
        local.iter().for_each(|id| is_chosen[*id as usize] = true);
        let collective = self.collective.clone();
        for id in 0..self.table.len() as u32 {
            let leaves =
                !is_chosen[id as usize] && collective.is_local(self.entry(id).record.as_ptr());
            if leaves {
                let layout = self.shape.layout(self.entry(id).level);
                let memory = collective.swappable().allocate(layout)?;
                self.relocate(id, memory);
            }
        }
        for id in local {
            let Entry { record, level } = self.entry(id);
            if !collective.is_local(record.as_ptr()) {
                // Full before all have moved: something else uses local memory too.
                let layout = self.shape.layout(level);
                let Ok(memory) = collective.purely_local().allocate(layout) else { break };
                self.relocate(id, memory);
            }
        }
        if self.strategy.shares_pages() {
            let mut pages = PageFiller::new(&collective, fill);
            for id in self.order(&watched, fill) {
                let memory = pages.allocate(self.shape.layout(self.entry(id).level))?;
                self.relocate(id, memory);
            }
        }
        Ok(())
    }

    /// The records for purely-local memory: those of the highest layers, or those used most, as
    /// many as fit.
    fn choose_local(&self, watched: &Watched) -> Vec<u32> {
        let rank = |id: &u32| match self.strategy {
            GraphStrategy::Watched => watched.heat(*id),
            _ => u32::from(self.entry(*id).level),
        };
        let mut ids: Vec<u32> = (0..self.table.len() as u32).filter(|id| rank(id) > 0).collect();
        ids.sort_by_key(|id| std::cmp::Reverse(rank(id)));
        let mut left = self.collective.local_capacity().as_usize();
        ids.retain(|id| {
            let size = self.shape.layout(self.entry(*id).level).size().next_multiple_of(16);
            let fits = size <= left;
            left -= if fits { size } else { 0 };
            fits
        });
        ids
    }

    /// The records that are not purely local, those of a page after one another: each page grows
    /// from one record by those with most links into it.
    fn order(&self, watched: &Watched, fill: f64) -> Vec<u32> {
        let page = self.collective.page_size().as_usize() as f64;
        let size = self.shape.layout(0).size().next_multiple_of(16) as f64;
        let per_page = ((page * fill / size).ceil()).min((page / size).floor()).max(1.0) as usize;
        let is_far = |id: u32| !self.collective.is_local(self.entry(id).record.as_ptr());
        let mut waits: Vec<bool> = (0..self.table.len() as u32).map(is_far).collect();
        let mut order = Vec::with_capacity(self.table.len());
        let mut seeds: VecDeque<u32> = self.start.into_iter().collect();
        let mut rest = 0..self.table.len() as u32;
        while let Some(seed) = seeds.pop_front().or_else(|| rest.next()) {
            if !waits[seed as usize] {
                continue;
            }
            let mut gains: HashMap<u32, u32> = HashMap::from([(seed, 0)]);
            for _ in 0..per_page {
                // The lower number of equals: the order does not depend on the map's.
                let best = gains.iter().max_by_key(|(id, gain)| (**gain, std::cmp::Reverse(**id)));
                let Some(id) = best.map(|(id, _)| *id) else { break };
                gains.remove(&id);
                waits[id as usize] = false;
                order.push(id);
                for next in self.entry(id).record.links(self.shape, 0) {
                    if waits[*next as usize] {
                        *gains.entry(*next).or_default() += watched.weight(id, *next);
                    }
                }
            }
            let mut left: Vec<(u32, u32)> =
                gains.into_iter().map(|(id, gain)| (gain, id)).collect();
            left.sort_unstable_by(|a, b| b.cmp(a));
            seeds.extend(left.into_iter().map(|(_, id)| id));
        }
        order
    }

    /// Counts the links of the lowest layer by where their ends are.
    #[must_use]
    pub(crate) fn links(&self) -> Links {
        let mut links = Links::default();
        for Entry { record, .. } in &self.table {
            for to in record.links(self.shape, 0) {
                links.count(&self.collective, record.as_ptr(), self.entry(*to).record.as_ptr());
            }
        }
        links
    }
}
