//! Where a paged map's leaves live: which are purely local, and how full they are.
#![expect(unsafe_code, reason = "moves leaves to memory that it allocated")]

use super::FarPagedMap;
use super::leaf::Leaf;
use crate::pairs::Shape;
use crate::sub::{AllocError, Collective, SubAllocator};
use std::collections::{BTreeMap, btree_map};
use std::ptr::NonNull;

impl<K, V> FarPagedMap<K, V> {
    /// Moves the leaves that were used most to purely-local memory, as many as fit, and those
    /// there that were used less to pages; then halves all counts, so that old uses fade. For
    /// maps that have been watched for a while.
    ///
    /// # Errors
    /// [`AllocError`] when there is no page for a leaf that must leave; the map is whole.
    pub fn place_by_heat(&mut self) -> Result<(), AllocError> {
        self.place(|leaf| u64::from(leaf.heat()), 1)?;
        self.directory.values().for_each(Leaf::cool);
        Ok(())
    }

    /// Moves the leaves that were used last, inserts included, to purely-local memory, each with
    /// the `run - 1` leaves behind it that a scan from there comes to; and others there to pages.
    /// For maps that have just been loaded, where what is new is what is asked for.
    ///
    /// # Errors
    /// [`AllocError`] when there is no page for a leaf that must leave; the map is whole.
    pub fn place_by_recency(&mut self, run: usize) -> Result<(), AllocError> {
        self.place(Leaf::used_at, run)
    }

    /// Makes the leaves of the highest ranks purely local, each with `run - 1` that follow it.
    ///
    /// One leaf moves at a time, those that leave first: it takes one page more than the map has,
    /// at most, and can be repeated at any time.
    fn place(&mut self, rank: impl Fn(&Leaf<K, V>) -> u64, run: usize) -> Result<(), AllocError> {
        let room = self.collective.local_capacity().get() as usize / self.shape.layout.size();
        let mut ranks: Vec<(u64, usize)> =
            self.directory.values().enumerate().map(|(at, leaf)| (rank(leaf), at)).collect();
        ranks.sort_unstable_by(|a, b| b.cmp(a));
        let mut stays = vec![false; ranks.len()];
        let mut left = room;
        for (_, at) in ranks {
            for stay in stays.iter_mut().skip(at).take(run.max(1)) {
                if left > 0 && !*stay {
                    *stay = true;
                    left -= 1;
                }
            }
        }
        let (collective, shape) = (self.collective.clone(), self.shape);
        for (leaf, stays) in self.directory.values_mut().zip(&stays) {
            if !stays && collective.is_local(leaf.memory().as_ptr()) {
                let memory = collective.new_page()?.allocate(shape.layout)?;
                move_leaf(&collective, shape, leaf, memory);
            }
        }
        for (leaf, stays) in self.directory.values_mut().zip(&stays) {
            if *stays && !collective.is_local(leaf.memory().as_ptr()) {
                // Full before all have moved: something else uses local memory too.
                let Ok(memory) = collective.purely_local().allocate(shape.layout) else { break };
                move_leaf(&collective, shape, leaf, memory);
            }
        }
        Ok(())
    }
}

fn move_leaf<K, V>(
    collective: &Collective,
    shape: Shape,
    leaf: &mut Leaf<K, V>,
    memory: NonNull<u8>,
) {
    // SAFETY: just allocated with the shape's layout; `&mut` on the map rules references out.
    let old = unsafe { leaf.move_to(shape, memory) };
    // SAFETY: it came from this collective with this layout, and the leaf has left it.
    unsafe { collective.deallocate(old, shape.layout) };
}

impl<K: Ord + Clone, V> FarPagedMap<K, V> {
    /// Packs the pairs into as few leaves as possible, each filled to `fill` (0 to 1; one for a map
    /// that is only read or changed in place). All leaves are far then; counts of use
    /// start anew, and a leaf was used last when one was whose pairs it got.
    ///
    /// # Errors
    /// [`AllocError`] when there is no page to pack into; the map is whole, partly packed.
    pub fn pack(&mut self, fill: f64) -> Result<(), AllocError> {
        let shape = self.shape;
        let most = ((shape.capacity as f64 * fill) as usize).clamp(1, shape.capacity);
        let mut old = std::mem::take(&mut self.directory);
        let mut packed: BTreeMap<K, Leaf<K, V>> = BTreeMap::new();
        let mut outcome = Ok(());
        'leaves: while let Some((first, mut leaf)) = old.pop_first() {
            while leaf.len() > 0 {
                let last = packed.last_entry().map(btree_map::OccupiedEntry::into_mut);
                let Some(last) = last.filter(|last| last.len() < most) else {
                    match self.allocate_far() {
                        // SAFETY: just allocated with the shape's layout.
                        Ok(memory) => drop(
                            packed.insert(leaf.keys()[0].clone(), unsafe { Leaf::create(memory) }),
                        ),
                        Err(error) => {
                            outcome = Err(error);
                            let first =
                                if packed.is_empty() { first } else { leaf.keys()[0].clone() };
                            old.insert(first, leaf);
                            break 'leaves;
                        }
                    }
                    continue;
                };
                last.inherit(&leaf);
                let count = leaf.len().min(most - last.len());
                leaf.move_head(shape, count, last, shape);
            }
            self.free(leaf.memory());
        }
        packed.append(&mut old);
        self.directory = packed;
        outcome
    }
}
