//! Page donation: whole runs of 2 MiB leave the pool with their frames.
//!
//! A large temporary allocation takes the frames of pages that have to go anyway. A *run* is what
//! one page table maps, 2 MiB of neighbouring pages. All its pages are locked, absent ones too;
//! then the kernel moves the page table. Pages that are dirty, or that earned laps, are copied
//! back, if they are few. A run with a fixed page stays.
//!
//! # Invariants
//! 1. While a run's memory moves, its words are all `Locked` by one thread and no buffer of
//!    several pages, whose word may lie elsewhere, reaches into it (`FROZEN`, `BUFFERS` in `multi_page`).
//! 2. A page that was away comes back under another version.
#![expect(unsafe_code, reason = "moves the memory of locked pages")]

use super::{BufferPool, CHUNK_PAGES, PageId};
use crate::base::sync::Ordering;
use crate::base::units::ByteCount;
use crate::limit::manager::HandOver;
use crate::sys::vm::{HUGE_PAGE, KERNEL_PAGE, Piece};

/// Runs that move together: one call for neighbours.
const GROUP_MAX: usize = 16;

/// At most 1/ODD_PAGES of a run's pages may be absent, and as many may be copied back: with more of
/// either, evicting the others singly is cheaper.
const ODD_PAGES: usize = 8;

/// Pages copied back before their other copies are dropped together.
const KEPT_MAX: usize = 64;

/// Runs next to each other whose pages are all locked.
struct Group {
    start: usize,
    end: usize,
    leaving: Leaving,
}

/// Which pages of a group leave, as bits: what was seen when they were locked stays true.
struct Leaving {
    /// A multiple of 64, so that words are those of the resident set.
    base: usize,
    words: [u64; GROUP_WORDS],
}

/// Bits of a group of the smallest pages.
const GROUP_WORDS: usize = GROUP_MAX * (HUGE_PAGE / KERNEL_PAGE) / 64;

impl Leaving {
    fn from(start: usize) -> Leaving {
        Leaving { base: start / 64 * 64, words: [0; GROUP_WORDS] }
    }

    fn add(&mut self, index: usize) {
        let bit = index - self.base;
        self.words[bit / 64] |= 1 << (bit % 64);
    }

    fn remove(&mut self, index: usize) {
        let bit = index - self.base;
        self.words[bit / 64] &= !(1 << (bit % 64));
    }

    /// The bits of 64 pages, of which `index` is one.
    fn word_of(&self, index: usize) -> u64 {
        self.words[(index - self.base) / 64]
    }

    fn count(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }
}

impl BufferPool {
    fn run_pages(&self) -> usize {
        HUGE_PAGE >> self.page_shift
    }

    /// Fills `room` with runs: first of those from which nothing has to be copied back.
    pub(super) fn donate_runs(&self, room: &mut HandOver<'_>) {
        if self.batch == 1 {
            // Told to evict one page at a time.
            return;
        }
        let per_run = self.run_pages();
        let used = (self.end.load(Ordering::Acquire) as usize).div_ceil(per_run);
        let runs = used.min(self.words.len() / per_run);
        for kept_max in [0, per_run / ODD_PAGES] {
            let start = self.run_hand.load(Ordering::Relaxed) as usize;
            let mut passed = 0;
            while passed < runs && room.wanted() > 0 {
                let run = (start + passed) % runs;
                let most = (room.wanted() / HUGE_PAGE).min(runs - run.max(passed)).min(GROUP_MAX);
                let Some(group) = self.lock_group(run, most, kept_max) else {
                    passed += 1;
                    continue;
                };
                passed += (group.end - group.start) / per_run;
                if !self.donate_group(room, &group) {
                    return;
                }
            }
            self.run_hand.store((start + passed) as u64, Ordering::Relaxed);
        }
    }

    /// Locks up to `most` runs from `run` on, as far as they qualify.
    fn lock_group(&self, run: usize, most: usize, kept_max: usize) -> Option<Group> {
        let per_run = self.run_pages();
        let first = run * per_run;
        let mut group = Group { start: first, end: first, leaving: Leaving::from(first) };
        while group.end < first + most * per_run {
            let start = group.end;
            let is_begun = start > first && !start.is_multiple_of(CHUNK_PAGES);
            if !self.qualifies(start, kept_max) {
                break;
            }
            if !is_begun && !self.try_freeze(start / CHUNK_PAGES) {
                break;
            }
            if !self.lock_run(start, &mut group.leaving) {
                if !is_begun {
                    self.unfreeze(start / CHUNK_PAGES);
                }
                break;
            }
            group.end += per_run;
        }
        (group.end > first).then_some(group)
    }

    /// Whether a run is worth it: a look without locks.
    fn qualifies(&self, start: usize, kept_max: usize) -> bool {
        let per_run = self.run_pages();
        let (mut absent, mut kept) = (0, 0);
        for latch in &self.words[start..start + per_run] {
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
        is_worth_it && (kept == 0 || self.split_around(PageId(start as u64)))
    }

    fn lock_run(&self, start: usize, leaving: &mut Leaving) -> bool {
        let end = start + self.run_pages();
        let is_huge = self.is_huge(PageId(start as u64));
        for (index, latch) in (start..end).zip(&self.words[start..end]) {
            let seen = latch.load();
            let is_locked = if seen.is_absent() {
                latch.try_begin_load(seen)
            } else {
                // Of what stays, a huge frame could not give a part back.
                (seen.is_idle() || !is_huge) && latch.try_lock_victim(seen)
            };
            if !is_locked {
                self.unlock_unmoved(start, index, false);
                (start..index).for_each(|index| leaving.remove(index));
                return false;
            }
            if seen.is_idle() {
                leaving.add(index);
            }
        }
        true
    }

    /// Lets go of locked pages whose memory is where it was; `was_away`: it may have been moved and
    /// moved back.
    fn unlock_unmoved(&self, start: usize, end: usize, was_away: bool) {
        for index in start..end {
            let latch = &self.words[index];
            match self.is_resident(index) {
                true if was_away => latch.returned(),
                true => latch.unlock(false),
                false => latch.abort_load(),
            }
        }
    }

    fn is_resident(&self, index: usize) -> bool {
        self.resident[index / 64].load(Ordering::Relaxed) & 1 << (index % 64) != 0
    }

    /// Moves a group's memory into `room` and unlocks its pages. `false` when there is no use in
    /// trying again.
    fn donate_group(&self, room: &mut HandOver<'_>, group: &Group) -> bool {
        let (start, end) = (group.start, group.end);
        let leaving = group.leaving.count();
        let bytes = ByteCount((leaving << self.page_shift) as u64);
        let (offset, len) = (start << self.page_shift, (end - start) << self.page_shift);
        // SAFETY:
        // - The range is whole runs; this thread holds all its pages locked, and a device reads
        //   or writes a page only while it is locked or held by somebody else. No buffer of
        //   several pages reaches into it (invariant 1).
        // - What is not in `bytes` is absent, or copied back and dropped in `unlock_moved`.
        let taken = unsafe { room.take(&self.mapping, offset, len, self.account.budget(), bytes) };
        let given = match taken {
            Ok(Some(place)) => {
                if self.run_pages() == CHUNK_PAGES {
                    // Before a page is unlocked: it comes back to memory of its own.
                    (start / CHUNK_PAGES..end / CHUNK_PAGES)
                        .for_each(|chunk| _ = self.end_huge(chunk));
                }
                self.unlock_moved(group, place);
                let pages = leaving as u64;
                self.counters.resident.fetch_sub(bytes.0, Ordering::Relaxed);
                self.counters.evicted.fetch_add(pages, Ordering::Relaxed);
                self.counters.handed_over.fetch_add(pages, Ordering::Relaxed);
                true
            }
            not_taken => {
                // A move that fails in its middle is undone by the kernel.
                self.unlock_unmoved(start, end, not_taken.is_err());
                false
            }
        };
        for chunk in start / CHUNK_PAGES..end.div_ceil(CHUNK_PAGES) {
            self.unfreeze(chunk);
        }
        given
    }

    /// Unlocks pages whose memory is at `place` now: copies back what stays and drops its other
    /// copy; the others have left.
    fn unlock_moved(&self, group: &Group, place: *mut u8) {
        let (start, end) = (group.start, group.end);
        let stamp = self.stamp_now();
        let mut copied = Copied { pieces: [Piece::new(0, 0); KEPT_MAX], count: 0 };
        let mut at = start;
        while at < end {
            let until = end.min((at / 64 + 1) * 64);
            // A page that is unlocked may come back at once: its bit must be gone before.
            let gone = group.leaving.word_of(at);
            let before = self.resident[at / 64].fetch_and(!gone, Ordering::Relaxed);
            for index in at..until {
                let (latch, bit) = (&self.words[index], 1 << (index % 64));
                if gone & bit != 0 {
                    latch.evicted(stamp);
                } else if before & bit == 0 {
                    latch.abort_load();
                } else {
                    let from = place.wrapping_add((index - start) << self.page_shift);
                    self.copy_back(PageId(index as u64), from);
                    copied.push(self, from);
                    latch.returned();
                }
            }
            at = until;
        }
        copied.drop_all(self);
    }

    fn copy_back(&self, page: PageId, from: *mut u8) {
        // SAFETY: both are whole pages of different mappings; this thread holds the page locked,
        // and its content lies at `from` since the move.
        unsafe { std::ptr::copy_nonoverlapping(from, self.ptr(page), self.page_bytes) };
    }
}

/// Pages that were copied back; their other copies have no memory that is charged.
struct Copied {
    pieces: [Piece; KEPT_MAX],
    count: usize,
}

impl Copied {
    fn push(&mut self, pool: &BufferPool, from: *mut u8) {
        if self.count == KEPT_MAX {
            self.drop_all(pool);
        }
        self.pieces[self.count] = Piece::new(from.addr(), pool.page_bytes);
        self.count += 1;
    }

    fn drop_all(&mut self, pool: &BufferPool) {
        let pieces = &self.pieces[..self.count];
        if pieces.is_empty() {
            return;
        }
        // SAFETY: the pieces were copied from, and nobody uses the taker's room yet.
        let dropped = unsafe { pool.discarder.discard(pieces) };
        assert!(dropped.is_ok(), "dropping {} ranges: {dropped:?}", pieces.len());
        self.count = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::manager::{MemoryManager, Mode};
    use crate::pool::PoolConfig;
    use crate::store::MemStore;
    use std::sync::Arc;

    #[test]
    #[cfg_attr(miri, ignore = "moves page tables")]
    fn pages_that_the_kernel_did_not_move_are_whole_and_of_another_version() {
        let manager = MemoryManager::start(ByteCount::mib(16), Mode::Cooperative).expect("starts");
        let store = Arc::new(MemStore::new(ByteCount::mib(8)).expect("store"));
        let config = PoolConfig::new().cleaner(false).huge_frames(false);
        let pool = config.create_on(store, &manager).expect("pool");
        for number in 1..CHUNK_PAGES as u64 {
            let mut page = pool.allocate().expect("page");
            assert_eq!(page.id(), PageId(number));
            page.fill(number as u8);
        }
        pool.flush().expect("written");
        let used = pool.account().used();
        let seen = pool.fix_optimistic(PageId(9)).expect("page");
        // There is one run, and the kernel refuses to move it onto itself (EINVAL).
        let mut room = HandOver::new(&pool.mapping, manager.temporary().budget());
        room.allow(ByteCount(HUGE_PAGE as u64));
        pool.donate_runs(&mut room);
        assert_eq!((room.charged(), pool.account().used()), (ByteCount::ZERO, used));
        assert!(!seen.validate(), "it may have read while the memory was away");
        for number in 1..CHUNK_PAGES as u64 {
            let page = pool.try_fix_shared(PageId(number)).expect("resident");
            assert!(page.iter().all(|byte| *byte == number as u8), "{number}");
        }
        assert_eq!((pool.holders(), pool.stats().evicted), (0, 0));
    }
}
