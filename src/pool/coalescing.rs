//! Coalescing: the absent pages between victims are locked, so that one range is dropped instead of
//! many.
//!
//! Dropping a range costs the kernel half a microsecond beside what the pages in it cost, and locking
//! an absent page takes some ten nanoseconds (`docs/measurements/pool.md`, scattered). So victims with a few
//! absent pages between them leave as one range.
//!
//! # Invariants
//! 1. A page between two victims of one range is absent and locked by the thread that drops, and no
//!    buffer of several pages, whose word may lie elsewhere, reaches into its chunk, which is frozen.

use super::chunk::CHUNK_PAGES;
use super::frames::{BATCH_MAX, Frames};
use crate::base::units::PageId;

/// Maximum number of absent pages between two victims of one range.
const GAP_MAX: usize = 32;

/// Maximum number of chunks with locked gaps in one batch.
const CHUNKS_MAX: usize = 64;

/// The locked gaps of a batch.
pub(super) struct Gaps {
    gaps: [(usize, usize); BATCH_MAX],
    gap_count: usize,
    chunks: [usize; CHUNKS_MAX],
    chunk_count: usize,
}

impl Gaps {
    pub(super) fn new() -> Gaps {
        Gaps { gaps: [(0, 0); BATCH_MAX], gap_count: 0, chunks: [0; CHUNKS_MAX], chunk_count: 0 }
    }

    /// Locks the pages from `from` up to `to`, if there are few and all are absent.
    pub(super) fn lock(&mut self, frames: &Frames, from: usize, to: usize) -> bool {
        let chunk = from / CHUNK_PAGES;
        let is_short = from < to && to - from <= GAP_MAX && to / CHUNK_PAGES == chunk;
        if !is_short || !self.begin(frames, chunk) {
            return false;
        }
        for index in from..to {
            let latch = frames.table.word(PageId(index as u64));
            let seen = latch.load();
            if !seen.is_absent() || !latch.try_begin_load(seen) {
                frames.table.words(from..index).iter().for_each(|latch| latch.abort_load());
                return false;
            }
        }
        self.gaps[self.gap_count] = (from, to);
        self.gap_count += 1;
        true
    }

    fn begin(&mut self, frames: &Frames, chunk: usize) -> bool {
        if self.gap_count == BATCH_MAX || self.chunk_count == CHUNKS_MAX {
            return false;
        }
        // Victims come in the order of their addresses.
        let is_begun = self.chunks[..self.chunk_count].last() == Some(&chunk);
        if !is_begun {
            if !frames.chunks.try_freeze(chunk) {
                return false;
            }
            self.chunks[self.chunk_count] = chunk;
            self.chunk_count += 1;
        }
        true
    }

    /// Unlocks all of them.
    pub(super) fn unlock(self, frames: &Frames) {
        for (from, to) in &self.gaps[..self.gap_count] {
            frames.table.words(*from..*to).iter().for_each(|latch| latch.abort_load());
        }
        for chunk in &self.chunks[..self.chunk_count] {
            frames.chunks.unfreeze(*chunk);
        }
    }
}
