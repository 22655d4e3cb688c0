//! Page donation: whole runs of 2 MiB leave the pool with their frames.
//!
//! A large temporary allocation takes the frames of pages that have to go anyway. A *run* is what
//! one page table maps, 2 MiB of neighbouring pages. All its pages are locked, absent ones too;
//! then the kernel moves the page table. Pages that are dirty, or that earned laps, are copied
//! back, if they are few. A run with a fixed page stays.
//!
//! # Invariants
//! 1. While a run's memory moves, its words are all `Locked` by one thread and no buffer of
//!    several pages, whose word may lie elsewhere, reaches into it: its chunks are frozen.
//! 2. A page that was away comes back under another version.
#![expect(unsafe_code, reason = "moves the memory of locked pages")]

use super::chunk::CHUNK_PAGES;
use super::frames::PoolFrames;
use super::stats::PoolStats;
use crate::base::counter::Counter;
use crate::base::sync::{AtomicU64, Ordering};
use crate::base::units::{ByteCount, PageId};
use crate::limit::manager::Donation;
use crate::sys::vm::{HUGE_PAGE, Piece};
use arrayvec::ArrayVec;

/// Runs that move together: one call for neighbours.
const GROUP_MAX: usize = 16;

/// At most 1/ODD_PAGES of a run's pages may be absent, and as many may be copied back: with more of
/// either, evicting the others singly is cheaper.
const ODD_PAGES: usize = 8;

/// Pages copied back before their other copies are dropped together.
const KEPT_MAX: usize = 64;

/// Runs next to each other whose pages are all locked.
struct LockedRuns {
    start: usize,
    end: usize,
    /// How many pages leave; the others are absent or copied back.
    leaving: usize,
}

/// Donates runs of a pool.
pub(super) struct Donor {
    /// The run at which the next search begins.
    hand: AtomicU64,
    donated: Counter,
}

impl Donor {
    pub(super) fn new() -> Donor {
        Donor { hand: AtomicU64::new(0), donated: Counter::default() }
    }

    /// Adds this part's statistics.
    pub(super) fn show(&self, stats: &mut PoolStats) {
        stats.donated = self.donated.reading();
    }

    /// Fills `room` with runs: first of those from which nothing has to be copied back.
    pub(super) fn donate_runs(&self, frames: &PoolFrames, room: &mut Donation<'_>) {
        let per_run = run_pages(frames);
        let used = (frames.table.end() as usize).div_ceil(per_run);
        let runs = used.min(frames.table.capacity() / per_run);
        for kept_max in [0, per_run / ODD_PAGES] {
            let start = self.hand.load(Ordering::Relaxed) as usize;
            let mut passed = 0;
            while passed < runs && room.wanted() > 0 {
                let run = (start + passed) % runs;
                let most = (room.wanted() / HUGE_PAGE).min(runs - run.max(passed)).min(GROUP_MAX);
                let Some(group) = lock_group(frames, run, most, kept_max) else {
                    passed += 1;
                    continue;
                };
                passed += (group.end - group.start) / per_run;
                let Some(pages) = donate_group(frames, room, &group) else { return };
                frames.resident.depart(pages);
                self.donated.add(pages as u64);
            }
            self.hand.store((start + passed) as u64, Ordering::Relaxed);
        }
    }
}

fn run_pages(frames: &PoolFrames) -> usize {
    HUGE_PAGE / frames.table.page_bytes()
}

/// Locks up to `most` runs from `run` on, as far as they qualify.
fn lock_group(frames: &PoolFrames, run: usize, most: usize, kept_max: usize) -> Option<LockedRuns> {
    let per_run = run_pages(frames);
    let first = run * per_run;
    let mut group = LockedRuns { start: first, end: first, leaving: 0 };
    while group.end < first + most * per_run && qualifies(frames, group.end, kept_max) {
        let (start, chunk) = (group.end, group.end / CHUNK_PAGES);
        let is_frozen = start > first && !start.is_multiple_of(CHUNK_PAGES);
        if !is_frozen && !frames.chunks.try_freeze(chunk) {
            break;
        }
        let Some(leaving) = lock_run(frames, start) else {
            if !is_frozen {
                frames.unfreeze(chunk);
            }
            break;
        };
        group.leaving += leaving;
        group.end += per_run;
    }
    (group.end > first).then_some(group)
}

/// True if a run is worth it: a look without locks.
fn qualifies(frames: &PoolFrames, start: usize, kept_max: usize) -> bool {
    let per_run = run_pages(frames);
    let (mut absent, mut kept) = (0, 0);
    for latch in frames.table.words(start..start + per_run) {
        let seen = latch.load();
        if seen.is_idle() {
            continue;
        }
        if !seen.is_absent() && !seen.is_free() {
            return false;
        }
        absent += usize::from(seen.is_absent());
        kept += usize::from(!seen.is_absent());
    }
    let is_worth_it = absent <= per_run / ODD_PAGES && kept <= kept_max;
    // A part of a huge page cannot come back.
    is_worth_it && (kept == 0 || frames.split_around(PageId(start as u64)))
}

/// Locks all pages of a run; returns how many of them leave.
fn lock_run(frames: &PoolFrames, start: usize) -> Option<usize> {
    let end = start + run_pages(frames);
    let is_huge = frames.chunks.is_huge(PageId(start as u64));
    let mut leaving = 0;
    for (index, latch) in (start..end).zip(frames.table.words(start..end)) {
        let seen = latch.load();
        let is_locked = if seen.is_absent() {
            latch.try_begin_load(seen)
        } else {
            // Of what stays, a huge frame could not give a part back.
            (seen.is_idle() || !is_huge) && latch.try_lock_victim(seen)
        };
        if !is_locked {
            unlock_unmoved(frames, start, index, false);
            return None;
        }
        leaving += usize::from(seen.is_idle());
    }
    Some(leaving)
}

/// Lets go of locked pages whose memory is where it was; `was_away`: it may have been moved and
/// moved back.
fn unlock_unmoved(frames: &PoolFrames, start: usize, end: usize, was_away: bool) {
    for index in start..end {
        let latch = frames.table.word(PageId(index as u64));
        match frames.resident.contains(index) {
            true if was_away => latch.returned(),
            true => latch.unlock(false),
            false => latch.abort_load(),
        }
    }
}

/// Moves a group's memory into `room` and unlocks its pages. Returns how many left; `None` when there
/// is no use in trying again.
fn donate_group(frames: &PoolFrames, room: &mut Donation<'_>, group: &LockedRuns) -> Option<usize> {
    let (start, end) = (group.start, group.end);
    let page_bytes = frames.table.page_bytes();
    let bytes = ByteCount((group.leaving * page_bytes) as u64);
    let (offset, len) = (start * page_bytes, (end - start) * page_bytes);
    let (mapping, giver) = (frames.table.mapping(), frames.account.account().budget());
    // SAFETY:
    // - The range is whole runs; this thread holds all its pages locked, and a device reads
    //   or writes a page only while it is locked or held by somebody else. No buffer of
    //   several pages reaches into it (invariant 1).
    // - What is not in `bytes` is absent, or copied back and dropped in `unlock_moved`.
    let taken = unsafe { room.take(mapping, offset, len, giver, bytes) };
    let is_moved = match taken {
        Ok(Some(place)) => {
            if run_pages(frames) == CHUNK_PAGES {
                // Before a page is unlocked: it comes back to memory of its own.
                (start / CHUNK_PAGES..end / CHUNK_PAGES)
                    .for_each(|chunk| _ = frames.chunks.end_huge(chunk));
            }
            unlock_moved(frames, group, place);
            true
        }
        not_taken => {
            // A move that fails in its middle is undone by the kernel.
            unlock_unmoved(frames, start, end, not_taken.is_err());
            false
        }
    };
    for chunk in start / CHUNK_PAGES..end.div_ceil(CHUNK_PAGES) {
        frames.unfreeze(chunk);
    }
    is_moved.then_some(group.leaving)
}

/// Unlocks pages whose memory is at `place` now: copies back what stays and drops its other
/// copy; the others have left.
fn unlock_moved(frames: &PoolFrames, group: &LockedRuns, place: *mut u8) {
    let page_bytes = frames.table.page_bytes();
    let (start, end) = (group.start, group.end);
    let stamp = frames.stamp();
    let mut copied: ArrayVec<Piece, KEPT_MAX> = ArrayVec::new();
    let mut at = start;
    while at < end {
        let until = end.min((at / 64 + 1) * 64);
        // A page that is unlocked may come back at once: its bit must be gone before.
        let leaves = |page| frames.table.word(page).load().is_worthless();
        let gone = frames.resident.remove_where(at..until, page_bytes, leaves);
        for (index, latch) in (at..until).zip(frames.table.words(at..until)) {
            if gone & 1 << (index % 64) != 0 {
                latch.evicted(stamp);
            } else if !frames.resident.contains(index) {
                latch.abort_load();
            } else {
                let from = place.wrapping_add((index - start) * page_bytes);
                let to = frames.table.ptr(PageId(index as u64));
                // SAFETY: both are whole pages of different mappings; this thread holds the page
                // locked, and its content lies at `from` since the move.
                unsafe { std::ptr::copy_nonoverlapping(from, to, page_bytes) };
                if copied.is_full() {
                    drop_copied(frames, &mut copied);
                }
                copied.push(Piece::new(from.addr(), page_bytes));
                latch.returned();
            }
        }
        at = until;
    }
    drop_copied(frames, &mut copied);
}

/// Drops the other copies of pages that were copied back: their memory is not charged.
fn drop_copied(frames: &PoolFrames, copied: &mut ArrayVec<Piece, KEPT_MAX>) {
    if !copied.is_empty() {
        // SAFETY: the pieces were copied from, and nobody uses the taker's room yet.
        unsafe { frames.table.discard_all(copied) };
        copied.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::manager::MemoryManager;
    use crate::pool::PoolConfig;
    use crate::store::MemStore;
    use std::sync::Arc;

    #[test]
    #[cfg_attr(miri, ignore = "moves page tables")]
    fn pages_that_the_kernel_did_not_move_are_whole_and_of_another_version() {
        let manager = MemoryManager::start(ByteCount::mib(16)).expect("starts");
        let store = Arc::new(MemStore::new(ByteCount::mib(8)).expect("store"));
        let config = PoolConfig::new().cleaner(false).huge_frames(false);
        let pool = config.create_on(store, &manager).expect("pool");
        for number in 2..CHUNK_PAGES as u64 {
            let mut page = pool.allocate().expect("page");
            assert_eq!(page.id(), PageId(number));
            page.fill(number as u8);
        }
        pool.flush().expect("written");
        let used = pool.account().used();
        let seen = pool.fix_optimistic(PageId(9)).expect("page");
        // There is one run, and the kernel refuses to move it onto itself (EINVAL).
        let mut room = Donation::new(pool.frames.table.mapping(), manager.temporary().budget());
        room.allow(ByteCount(HUGE_PAGE as u64));
        pool.donor.donate_runs(&pool.frames, &mut room);
        assert_eq!((room.charged(), pool.account().used()), (ByteCount::ZERO, used));
        assert!(!seen.validate(), "it may have read while the memory was away");
        for number in 2..CHUNK_PAGES as u64 {
            let page = pool.try_fix_shared(PageId(number)).expect("resident");
            assert!(page.iter().all(|byte| *byte == number as u8), "{number}");
        }
        assert_eq!((pool.holders(), pool.stats().evicted), (0, 0));
    }
}
