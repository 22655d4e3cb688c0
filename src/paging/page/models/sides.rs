//! What a joined store adds to the model: which side slots are of, and what a retier asks for.

use crate::base::sync::{AtomicUsize, Ordering};
use crate::base::units::SlotId;

/// Half of them are of each side, where there are two.
pub(super) const SLOTS: usize = 8;

/// What a joined store adds.
#[derive(Default)]
pub(super) struct Sides {
    /// `Wants::of` the page's chunk.
    pub(super) wants: AtomicUsize,
    /// What the retier has asked the evictor for: [`ASKED`], then [`ANSWERED`].
    pub(super) request: AtomicUsize,
    /// The frame pool's lock: who takes a frame has seen what its last owner wrote of it. Here that matters,
    /// because a page may lose its slot while a frame that was not used after all names it.
    pool: AtomicUsize,
}

pub(super) const FIRST: usize = 0;
pub(super) const SECOND: usize = 1;
pub(super) const ASKED: usize = 1;
pub(super) const ANSWERED: usize = 2;

/// The side that a slot is of.
pub(super) fn side_of(slot: SlotId) -> usize {
    if slot.as_usize() < SLOTS / 2 { FIRST } else { SECOND }
}

impl Sides {
    /// As the frame pool does where a frame is taken or freed.
    pub(super) fn lock_pool(&self, order: Ordering) {
        self.pool.fetch_add(1, order);
    }
}
