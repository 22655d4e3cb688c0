//! The cleaner: writes dirty pages ahead of their eviction.
//!
//! It goes over the resident pages in address order, a batch at a time: what is dirty and has no holder
//! is written, neighbours in one request, so that a reclaim finds clean pages and a page that
//! stays unchanged is written once. What the hand has cooled goes at once, for it leaves next; the rest
//! more slowly, because a page that is changed all the time would be written all the time
//! (`docs/measurements/cooperative.md`, the cleaner).

use super::fixed_vec::FixedVec;
use super::frames::{BATCH_MAX, Frames};
use super::latch::LatchWord;
use super::write_back::WriteBack;
use crate::base::units::PageId;
use std::time::{Duration, Instant};

/// Pause between batches of pages that are still in use: 256 pages then are 13,000 a second.
const SLOWLY: Duration = Duration::from_millis(20);

/// 64-page steps looked at without a pause.
const STEPS_MAX: usize = 4096;

/// Where the worker is with cleaning.
pub(super) struct Cleaner {
    /// The next step whose cool pages are written.
    cool_at: usize,
    /// The next step whose other pages are written too.
    all_at: usize,
    last_all: Instant,
}

impl Cleaner {
    pub(super) fn new() -> Cleaner {
        Cleaner { cool_at: 0, all_at: 0, last_all: Instant::now() }
    }

    /// Writes up to a batch of pages of each kind that is due; returns whether any was written.
    pub(super) fn turn(&mut self, frames: &Frames, write_back: &WriteBack) -> bool {
        let mut is_any = clean_some(frames, write_back, &mut self.cool_at, LatchWord::cool);
        if self.last_all.elapsed() >= SLOWLY {
            is_any |= clean_some(frames, write_back, &mut self.all_at, |_| true);
            self.last_all = Instant::now();
        }
        is_any
    }
}

/// Writes up to a batch of those dirty pages from step `at` on that are `due`.
fn clean_some(
    frames: &Frames,
    write_back: &WriteBack,
    at: &mut usize,
    due: impl Fn(LatchWord) -> bool,
) -> bool {
    let steps = frames.table.steps();
    let mut batch: FixedVec<PageId, BATCH_MAX> = FixedVec::new(PageId(0));
    for _ in 0..steps.min(STEPS_MAX) {
        if *at >= steps {
            *at = 0;
        }
        let pages = frames.resident.pages(*at);
        if batch.len() + pages.len() > BATCH_MAX {
            break;
        }
        for page in pages {
            let latch = frames.table.word(page);
            let seen = latch.load();
            if seen.dirty() && seen.is_free() && due(seen) && latch.try_begin_write(seen) {
                batch.push(page);
            }
        }
        *at += 1;
    }
    batch.sort_unstable();
    write_back.clean(frames, &batch) > 0
}
