//! Eviction: the hand finds victims, batches of them leave together.
//!
//! The hand goes over the bitmap of resident pages in address order, 64 pages at a step; each
//! step is taken by one thread, so that several evict side by side without a lock. Victims of a
//! batch are dropped by one vectored call, neighbours as one range (`coalescing`).
#![expect(unsafe_code, reason = "drops the memory of victims")]

use super::chunk::CHUNK_PAGES;
use super::coalescing::LockedGaps;
use super::frames::{BATCH_MAX, PoolFrames};
use super::write_back::PageWriter;
use crate::base::sync::{AtomicU64, Ordering};
use crate::base::units::{ByteCount, PageId};
use crate::sys::vm::Piece;
use arrayvec::ArrayVec;
use crossbeam_utils::CachePadded;

/// Laps of the hand after which a reclaim gives up: a page may have to be passed once for each
/// lap it earned, once to be cooled and once to be taken.
const LAPS_MAX: u64 = 6;

/// Treatment of dirty pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dirty {
    /// Pass them: all clean pages may leave, warm ones too.
    Skip,
    /// Pass some, and then leave the rest to a call that writes: heat comes before cost. Without the stop a
    /// pool without a cleaner kept cold dirty pages and evicted warm clean ones, the inner nodes of trees,
    /// in their place (`book/src/measurements/cooperative.md`, victims).
    Defer,
    Write,
}

/// With [`Dirty::Defer`], bytes of dirty victims that are passed for each byte that is wanted, at most.
const DEFERRED_MAX: u64 = 1;

/// Victims of a batch.
#[derive(Default)]
struct Batch {
    /// Locked.
    clean: ArrayVec<PageId, BATCH_MAX>,
    /// Held for writing.
    dirty: ArrayVec<PageId, BATCH_MAX>,
    /// Dirty victims that were passed.
    passed: u64,
}

impl Batch {
    fn len(&self) -> usize {
        self.clean.len() + self.dirty.len()
    }
}

/// Work left to a call that makes room.
pub(super) struct RoomRequest {
    want: u64,
    freed: u64,
    dirty: Dirty,
    /// Steps that may still be passed.
    steps_left: u64,
    /// Bytes of dirty victims that may still be passed, beside those that leave.
    deferred_left: u64,
}

impl RoomRequest {
    /// For `want` bytes of tables that have `steps` together.
    pub(super) fn new(want: ByteCount, dirty: Dirty, steps: u64) -> RoomRequest {
        // Without writing, what a few laps do not find is dirty or hot: writing comes next.
        let laps = if dirty == Dirty::Write { LAPS_MAX } else { LAPS_MAX / 2 };
        let deferred_left = match dirty {
            Dirty::Defer => want.0.saturating_mul(DEFERRED_MAX),
            Dirty::Skip | Dirty::Write => u64::MAX,
        };
        RoomRequest { want: want.0, freed: 0, dirty, steps_left: steps * laps, deferred_left }
    }

    /// True if more has to leave, and may be looked for.
    pub(super) fn is_open(&self) -> bool {
        self.freed < self.want && self.steps_left > 0
    }

    pub(super) fn freed(&self) -> ByteCount {
        ByteCount(self.freed)
    }
}

/// Evicts pages of one table.
pub(super) struct PoolEvictor {
    /// The step that the hand passes next, modulo the steps of the table.
    hand: CachePadded<AtomicU64>,
    /// Maximum number of pages evicted at a time.
    batch: usize,
}

impl PoolEvictor {
    pub(super) fn new(batch: usize) -> PoolEvictor {
        PoolEvictor { hand: CachePadded::default(), batch }
    }

    /// True if pages may leave together.
    pub(super) fn batches(&self) -> bool {
        self.batch > 1
    }

    /// The step that the hand passes next, counted from when the table was opened.
    pub(super) fn hand(&self) -> u64 {
        self.hand.load(Ordering::Relaxed)
    }

    /// Evicts about `want` bytes of the pages of a table, whatever the limit; returns how many.
    pub(super) fn evict(
        &self,
        frames: &PoolFrames,
        write_back: &PageWriter,
        want: ByteCount,
        dirty: Dirty,
    ) -> ByteCount {
        let mut demand = RoomRequest::new(want, dirty, frames.table.steps() as u64);
        while demand.is_open() {
            self.sweep(frames, write_back, &mut demand);
        }
        demand.freed()
    }

    /// Evicts a batch, at most up to the end of the hand's lap over this table. Returns whether the lap
    /// is over: it is the next table's turn.
    pub(super) fn sweep(
        &self,
        frames: &PoolFrames,
        write_back: &PageWriter,
        demand: &mut RoomRequest,
    ) -> bool {
        let (steps, page_bytes) = (frames.table.steps() as u64, frames.table.page_size().0);
        let pages = (demand.want - demand.freed).div_ceil(page_bytes);
        let target = (pages as usize).min(self.batch);
        let (mut batch, mut is_lap_over) = (Batch::default(), false);
        while batch.len() < target && !is_lap_over && demand.steps_left > 0 {
            if batch.passed * page_bytes >= demand.deferred_left {
                demand.steps_left = 0;
                break;
            }
            demand.steps_left -= 1;
            let step = self.hand.fetch_add(1, Ordering::Relaxed) % steps;
            is_lap_over = step + 1 == steps;
            for page in frames.resident.pages(step as usize) {
                if batch.len() == target {
                    break;
                }
                sweep_page(frames, page, demand.dirty, &mut batch);
            }
        }
        demand.deferred_left = demand.deferred_left.saturating_sub(batch.passed * page_bytes);
        demand.freed += self.finish(frames, write_back, &mut batch);
        is_lap_over
    }

    /// Writes the dirty victims and drops what is clean then.
    fn finish(&self, frames: &PoolFrames, write_back: &PageWriter, batch: &mut Batch) -> u64 {
        // The clean ones go first: a thread that waits for one of them need not wait for the device.
        let freed = self.drop_locked(frames, &batch.clean);
        if batch.dirty.is_empty() {
            return freed;
        }
        batch.clean.clear();
        batch.dirty.sort_unstable();
        write_back.write(frames, &batch.dirty);
        for page in &*batch.dirty {
            let seen = frames.table.word(*page).load();
            let is_unwanted = seen.is_cold() && !seen.dirty();
            if is_unwanted && frames.lock_victim(*page, seen) {
                batch.clean.push(*page);
            }
        }
        freed + self.drop_locked(frames, &batch.clean)
    }

    /// Drops pages that this thread locked; returns their bytes.
    fn drop_locked(&self, frames: &PoolFrames, pages: &[PageId]) -> u64 {
        if pages.is_empty() {
            return 0;
        }
        let mut pieces: ArrayVec<Piece, BATCH_MAX> = ArrayVec::new();
        let len = frames.table.page_bytes();
        let mut gaps = LockedGaps::default();
        // One past the page before.
        let mut after = usize::MAX;
        for page in pages {
            frames.leave(*page);
            let start = frames.table.ptr(*page).addr();
            match pieces.last_mut() {
                Some(last) if last.start() + last.len() == start => last.grow(len),
                Some(last) if self.batches() && gaps.lock(frames, after, page.as_usize()) => {
                    last.grow(start + len - last.start() - last.len());
                }
                _ => pieces.push(Piece::new(start, len)),
            }
            after = page.as_usize() + 1;
        }
        // SAFETY: this thread holds the pages locked and their contents are on the device; what lies
        // between them within a range is absent and locked, too (`coalescing`).
        unsafe { frames.table.discard_all(&pieces) };
        let stamp = frames.stamp();
        for page in pages {
            frames.table.word(*page).evicted(stamp);
        }
        gaps.unlock(frames);
        frames.resident.depart(pages.len());
        let bytes = (pages.len() * len) as u64;
        frames.account.uncharge(ByteCount(bytes));
        bytes + give_back_around(frames, pages)
    }
}

/// Gives back what the chunks of pages that were dropped cost, if they were the last in them. Victims
/// come in the order of their addresses, or nearly: looking at a chunk twice costs little.
fn give_back_around(frames: &PoolFrames, pages: &[PageId]) -> u64 {
    let chunk = |page: &PageId| page.as_usize() / CHUNK_PAGES;
    let runs = pages.chunk_by(|a, b| chunk(a) == chunk(b));
    runs.map(|run| frames.give_back_around(run[0])).sum()
}

/// The hand passes one page. A lost race leaves it for the next lap.
fn sweep_page(frames: &PoolFrames, page: PageId, dirty: Dirty, batch: &mut Batch) {
    let latch = frames.table.word(page);
    let seen = latch.load();
    if !seen.is_readable() {
        return;
    }
    if !seen.cool() {
        latch.try_cool(seen, frames.resident.passes_touched(seen));
    } else if seen.heat() > 0 {
        latch.try_cool(seen, seen.heat() - 1);
    } else if !seen.is_free() {
        // Held.
    } else if seen.dirty() && dirty != Dirty::Write {
        batch.passed += 1;
    } else if !frames.split_around(page) {
        // Its neighbours are written at the moment.
    } else if !seen.dirty() {
        if frames.lock_victim(page, seen) {
            batch.clean.push(page);
        }
    } else if latch.try_begin_write(seen) {
        batch.dirty.push(page);
    }
}
