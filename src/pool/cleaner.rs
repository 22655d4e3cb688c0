//! The cleaner: writes what the hand is about to take, and what rests.
//!
//! While pages leave, the cleaner goes over the resident pages a little ahead of the hand. What is dirty and
//! leaves when the hand comes is written, neighbours in one request, so that a reclaim finds clean pages.
//! Warm pages are not written: one that is changed all the time would be written all the time. Each page
//! is looked at once in a lap of the hand.
//!
//! While no page comes to or leaves a pool that is nearly full, dirty pages that are not changed any more are written: a
//! demand for much memory at once, and a flush, find less to write. What fits is left to the flushes: TPC-C
//! on a pool with room to spare had a page written for every second new order otherwise
//! (`book/src/measurements/cooperative.md`, victims). Pages that come count, because the hand moves in steps: between two
//! of them TPC-C at 400 transactions a second looked like rest, and 3.3 times as many pages were written as without a cleaner.

use super::frames::{BATCH_MAX, PoolFrames};
use super::latch::LatchWord;
use super::write_back::PageWriter;
use crate::base::units::{ByteCount, PageId};
use arrayvec::ArrayVec;
use std::time::{Duration, Instant};

/// The cleaner is ahead of the hand by 1/AHEAD_PART of a lap, at most. Further ahead, more of what it writes
/// is touched again before the hand comes, and is written in vain.
const AHEAD_PART: u64 = 8;

/// 64-page steps looked at without a pause.
const STEPS_MAX: usize = 4096;

/// A page that was not changed for so long rests.
const RESTING: Duration = Duration::from_millis(100);

/// Pages that are watched at a time: some 20,000 a second are found to rest.
const WATCHED_MAX: usize = 2048;

/// Where the worker is with cleaning.
pub(super) struct Cleaner {
    /// The next step ahead of the hand that is looked at, counted as the hand counts.
    next: u64,
    watch: Watch,
}

/// Dirty pages that are watched for changes while the hand rests.
struct Watch {
    /// With the version that each had.
    pages: Vec<(PageId, u64)>,
    since: Instant,
    /// How far the hands of the pool had moved, and what it was charged.
    moved: u64,
    used: ByteCount,
    /// The next step whose pages are watched.
    next: usize,
}

impl Cleaner {
    /// Bytes that a cleaner takes.
    pub(super) const BYTES: usize = WATCHED_MAX * size_of::<(PageId, u64)>();

    pub(super) fn new() -> Cleaner {
        let pages = Vec::with_capacity(WATCHED_MAX);
        let (since, used) = (Instant::now(), ByteCount::ZERO);
        Cleaner { next: 0, watch: Watch { pages, since, moved: 0, used, next: 0 } }
    }

    /// Writes up to a batch of pages of each kind, with the hand before step `hand` of this table, and the
    /// hands of all tables of the pool `moved` so far; returns whether there was any.
    pub(super) fn turn(
        &mut self,
        frames: &PoolFrames,
        write_back: &PageWriter,
        hand: u64,
        moved: u64,
    ) -> bool {
        let mut batch: ArrayVec<PageId, BATCH_MAX> = ArrayVec::new();
        self.take_leaving(frames, hand, &mut batch);
        let used = frames.account.account().used();
        if self.watch.is_at_rest(moved, used) && batch.is_empty() && frames.account.is_nearly_full()
        {
            self.watch.take_resting(frames, &mut batch);
        }
        batch.sort_unstable();
        write_back.clean(frames, &batch) > 0
    }

    /// Marks pages for writing that leave soon.
    fn take_leaving(
        &mut self,
        frames: &PoolFrames,
        hand: u64,
        batch: &mut ArrayVec<PageId, BATCH_MAX>,
    ) {
        let steps = frames.table.steps() as u64;
        let end = hand + steps.div_ceil(AHEAD_PART);
        self.next = self.next.max(hand);
        for _ in 0..STEPS_MAX {
            let pages = frames.resident.pages((self.next % steps) as usize);
            if self.next >= end || batch.len() + pages.len() > BATCH_MAX {
                break;
            }
            for page in pages {
                begin_write_if(frames, page, LatchWord::is_cold, batch);
            }
            self.next += 1;
        }
    }
}

impl Watch {
    /// True if no page came or left since the pages are watched.
    fn is_at_rest(&mut self, moved: u64, used: ByteCount) -> bool {
        let is_at_rest = (self.moved, self.used) == (moved, used);
        if !is_at_rest {
            (self.moved, self.used) = (moved, used);
            self.pages.clear();
        }
        is_at_rest
    }

    /// Marks watched pages for writing that rest; watches the next ones when there are none left.
    fn take_resting(&mut self, frames: &PoolFrames, batch: &mut ArrayVec<PageId, BATCH_MAX>) {
        if self.pages.is_empty() {
            self.begin(frames);
        } else if self.since.elapsed() >= RESTING {
            let first = self.pages.len().saturating_sub(BATCH_MAX);
            for (page, version) in self.pages.drain(first..) {
                let is_resting = |seen: LatchWord| seen.is_free() && seen.version() == version;
                begin_write_if(frames, page, is_resting, batch);
            }
        }
    }

    /// Watches the dirty pages from the next step on.
    fn begin(&mut self, frames: &PoolFrames) {
        let steps = frames.table.steps();
        for _ in 0..steps.min(STEPS_MAX) {
            let pages = frames.resident.pages(self.next % steps);
            if self.pages.len() + pages.len() > WATCHED_MAX {
                break;
            }
            let words = pages.map(|page| (page, frames.table.word(page).load()));
            let dirty = words.filter(|(_, word)| word.dirty());
            self.pages.extend(dirty.map(|(page, word)| (page, word.version())));
            self.next = (self.next + 1) % steps;
        }
        self.since = Instant::now();
    }
}

/// Marks a page for writing that is dirty and, by its word, `due`.
fn begin_write_if(
    frames: &PoolFrames,
    page: PageId,
    due: impl Fn(LatchWord) -> bool,
    batch: &mut ArrayVec<PageId, BATCH_MAX>,
) {
    let latch = frames.table.word(page);
    let seen = latch.load();
    if due(seen) && latch.try_begin_write(seen) {
        batch.push(page);
    }
}
