//! Huge frames: runs of pages that lie in one page of 2 MiB.
//!
//! While nothing leaves the pool, its worker asks the kernel to put whole runs into huge pages: what
//! is read at random misses the TLB less, and temporary memory that takes a run over is touched at
//! half the cost (`docs/design/pool.md`). A run of which a page has to leave is split before, for the
//! kernel would keep the memory of all 2 MiB otherwise, and the limit would not hold.
//!
//! # Invariants
//! 1. `HUGE` is set in a chunk's note while all its pages are held still, after the kernel collapsed
//!    it. All its pages are resident as long as it is set.
//! 2. A page leaves a chunk singly only with `HUGE` cleared after the page was locked.

use super::io::HUGE;
use super::latch::LatchWord;
use super::multi_page::FROZEN;
use super::{BufferPool, CHUNK_PAGES, PageId};
use crate::base::sync::Ordering;
use crate::base::units::ByteCount;
use crate::sys::vm::HUGE_PAGE;
use std::time::{Duration, Instant};

/// How long nothing must have left the pool before runs are collapsed.
const AT_REST: Duration = Duration::from_millis(250);

/// How long no run is collapsed after the kernel refused.
const REFUSED: Duration = Duration::from_secs(10);

/// Memory that a collapse takes while it copies.
const COPY: ByteCount = ByteCount(HUGE_PAGE as u64);

/// Time slices given up for writes to end. After them the kernel keeps the memory of what leaves a
/// huge page until it needs it, or all of it has left.
const YIELDS_MAX: u32 = 10_000;

/// Where the worker is with collapsing.
pub(super) struct Collapser {
    at: usize,
    evicted: u64,
    not_before: Instant,
}

impl Collapser {
    pub(super) fn new() -> Collapser {
        Collapser { at: 0, evicted: 0, not_before: Instant::now() + AT_REST }
    }

    /// Collapses one run, if the pool is at rest; returns whether it did.
    pub(super) fn turn(&mut self, pool: &BufferPool) -> bool {
        let evicted = pool.counters.evicted.load(Ordering::Relaxed);
        if evicted != self.evicted {
            self.evicted = evicted;
            self.not_before = Instant::now() + AT_REST;
        }
        // Of other page sizes a chunk is not a run.
        if pool.page_bytes * CHUNK_PAGES != HUGE_PAGE || Instant::now() < self.not_before {
            return false;
        }
        let chunks = pool.end.load(Ordering::Acquire) as usize / CHUNK_PAGES;
        for _ in 0..chunks {
            self.at = if self.at + 1 < chunks { self.at + 1 } else { 0 };
            if pool.is_whole(self.at) {
                let is_done = pool.collapse(self.at);
                if !is_done {
                    self.not_before = Instant::now() + REFUSED;
                }
                return is_done;
            }
        }
        false
    }
}

fn is_at_rest(seen: LatchWord) -> bool {
    seen.is_readable() && !seen.dirty() && !seen.writing() && seen.order() == 0
}

impl BufferPool {
    /// Whether a chunk can be collapsed: a look without locks.
    fn is_whole(&self, chunk: usize) -> bool {
        let first = chunk * CHUNK_PAGES;
        let bits = &self.resident[first / 64..(first + CHUNK_PAGES) / 64];
        self.charged[chunk].load(Ordering::Relaxed) & (HUGE | FROZEN) == 0
            && bits.iter().all(|word| word.load(Ordering::Relaxed) == u64::MAX)
            && self.words[first..first + CHUNK_PAGES].iter().all(|latch| is_at_rest(latch.load()))
    }

    /// Holds a chunk's pages still and puts them into one huge page. `false` when there is no room
    /// for the copy, or the kernel refuses; pages that are in use only delay it.
    fn collapse(&self, chunk: usize) -> bool {
        if !self.account.try_charge(COPY) {
            return false;
        }
        let mut is_done = true;
        if self.try_freeze(chunk) {
            let latches = &self.words[chunk * CHUNK_PAGES..(chunk + 1) * CHUNK_PAGES];
            let is_held = |latch: &&super::latch::Latch| latch.try_hold_still(latch.load());
            let held = latches.iter().take_while(is_held).count();
            if held == CHUNK_PAGES {
                is_done = self.mapping.collapse(chunk * HUGE_PAGE).is_ok();
                if is_done {
                    // Pairs with the acquire of who locks one of the pages.
                    self.charged[chunk].fetch_or(HUGE, Ordering::Release);
                    self.counters.huge.fetch_add(COPY.0, Ordering::Relaxed);
                }
            }
            latches[..held].iter().for_each(|latch| latch.end_write(false));
            self.unfreeze(chunk);
        }
        self.account.uncharge(COPY);
        is_done
    }

    pub(super) fn is_huge(&self, page: PageId) -> bool {
        self.charged[page.as_usize() / CHUNK_PAGES].load(Ordering::Relaxed) & HUGE != 0
    }

    /// Notes that a chunk's memory does not lie in a huge page any more; `false` when it did not.
    pub(super) fn end_huge(&self, chunk: usize) -> bool {
        let was = self.charged[chunk].fetch_and(!HUGE, Ordering::Relaxed) & HUGE != 0;
        if was {
            self.counters.huge.fetch_sub(COPY.0, Ordering::Relaxed);
        }
        was
    }

    /// Splits the huge page that a resident page lies in, if it does, so that it can leave. `false`
    /// while a page of it is written: the kernel splits none that a device holds.
    pub(super) fn split_around(&self, page: PageId) -> bool {
        if !self.is_huge(page) {
            return true;
        }
        let chunk = page.as_usize() / CHUNK_PAGES;
        let latches = &self.words[chunk * CHUNK_PAGES..(chunk + 1) * CHUNK_PAGES];
        if latches.iter().any(|latch| latch.load().writing()) {
            return false;
        }
        self.split_at_once(page);
        true
    }

    /// As [`split_around`](Self::split_around), for a page that leaves in any case: waits a little
    /// for writes to end.
    pub(super) fn split_for(&self, page: PageId) {
        for _ in 0..YIELDS_MAX {
            if self.split_around(page) {
                return;
            }
            std::thread::yield_now();
        }
        self.split_at_once(page);
    }

    fn split_at_once(&self, page: PageId) {
        if self.end_huge(page.as_usize() / CHUNK_PAGES) {
            let split = self.mapping.split(self.offset(page) as usize);
            assert!(split.is_ok(), "splitting the huge page around {page}: {split:?}");
        }
    }
}
