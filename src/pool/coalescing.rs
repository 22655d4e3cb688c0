//! Coalescing: the absent pages between victims are locked, so that one range is dropped instead of
//! many.
//!
//! Dropping a range costs the kernel half a microsecond beside what the pages in it cost, and locking
//! an absent page takes some ten nanoseconds (`book/src/measurements/pool_rates.md`, scattered). So victims with a few
//! absent pages between them leave as one range.
//!
//! # Invariants
//! 1. A page between two victims of one range is absent and locked by the thread that drops, and its
//!    chunk is frozen.

use super::chunk::CHUNK_PAGES;
use super::frames::{BATCH_MAX, PoolFrames};
use super::latch::Latch;
use arrayvec::ArrayVec;

/// Maximum number of absent pages between two victims of one range.
const GAP_MAX: usize = 32;

/// Maximum number of chunks with locked gaps in one batch.
const CHUNKS_MAX: usize = 64;

/// The locked gaps of a batch.
#[derive(Default)]
pub(super) struct LockedGaps {
    gaps: ArrayVec<(usize, usize), BATCH_MAX>,
    /// The chunks of the gaps, frozen.
    chunks: ArrayVec<usize, CHUNKS_MAX>,
}

impl LockedGaps {
    /// Locks the pages from `from` up to `to`, if there are few and all are absent.
    pub(super) fn lock(&mut self, frames: &PoolFrames, from: usize, to: usize) -> bool {
        let chunk = from / CHUNK_PAGES;
        let is_short = from < to && to - from <= GAP_MAX && to / CHUNK_PAGES == chunk;
        if !is_short || self.gaps.is_full() || !self.freeze(frames, chunk) {
            return false;
        }
        let latches = frames.table.words(from..to);
        let locks = |latch: &&Latch| latch.try_begin_load(latch.load());
        let locked = latches.iter().take_while(locks).count();
        if locked < latches.len() {
            latches[..locked].iter().for_each(Latch::abort_load);
            return false;
        }
        self.gaps.push((from, to));
        true
    }

    fn freeze(&mut self, frames: &PoolFrames, chunk: usize) -> bool {
        // Victims come in the order of their addresses.
        if self.chunks.last() == Some(&chunk) {
            return true;
        }
        let is_frozen = !self.chunks.is_full() && frames.chunks.try_freeze(chunk);
        if is_frozen {
            self.chunks.push(chunk);
        }
        is_frozen
    }

    /// Unlocks all of them.
    pub(super) fn unlock(self, frames: &PoolFrames) {
        for (from, to) in &*self.gaps {
            frames.table.words(*from..*to).iter().for_each(Latch::abort_load);
        }
        for chunk in &*self.chunks {
            frames.unfreeze(*chunk);
        }
    }
}
