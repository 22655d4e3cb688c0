//! The resident set: which pages have memory, and when others left.
//!
//! One bit a page, in address order, so that victims are neighbours. Time is counted in pages that
//! left: an absent page's stamp says how much the pool has replaced since it was evicted.
//!
//! # Invariants
//! 1. A page's bit is set from before its word says that it was loaded, while it is locked, until after it
//!    is locked for eviction.
#![expect(unsafe_code, reason = "gives back bits of which none is set")]

use super::latch::{HEAT_MAX, LatchWord, STAMPS};
use super::replacement::{Replacement, Worth};
use crate::base::error::Result;
use crate::base::sync::{AtomicU64, Ordering};
use crate::base::units::{ByteCount, PageId};
use crate::meta::LazyArray;
use crossbeam_utils::CachePadded;
use std::ops::Range;
use std::sync::Arc;

/// Steps of the replacement clock in which as many pages leave as fit into the pool.
const STAMPS_PER_POOL: u64 = 64;

/// The pages with memory, and the policy that values them.
pub(super) struct ResidentSet {
    bits: LazyArray<AtomicU64>,
    /// Bytes of the pages in the set.
    bytes: CachePadded<AtomicU64>,
    /// Pages that were evicted or donated. Statistics show it.
    departed: CachePadded<AtomicU64>,
    /// The same of all tables of the pool: the replacement clock.
    clock: Arc<CachePadded<AtomicU64>>,
    policy: Box<dyn Replacement>,
}

impl ResidentSet {
    /// An empty set of `pages` pages of a table of the pool that has this `clock`.
    pub(super) fn new(
        pages: usize,
        policy: Box<dyn Replacement>,
        clock: Arc<CachePadded<AtomicU64>>,
    ) -> Result<ResidentSet> {
        Ok(ResidentSet {
            bits: LazyArray::new(pages.div_ceil(64))?,
            bytes: CachePadded::default(),
            departed: CachePadded::default(),
            clock,
            policy,
        })
    }

    pub(super) fn bytes(&self) -> ByteCount {
        ByteCount(self.bytes.load(Ordering::Relaxed))
    }

    /// Adds a locked page of `bytes`.
    pub(super) fn insert(&self, page: PageId, bytes: usize) {
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        self.bits[page.as_usize() / 64].fetch_or(1 << (page.0 % 64), Ordering::Relaxed);
    }

    /// Removes a locked page.
    pub(super) fn remove(&self, page: PageId, bytes: usize) {
        self.bytes.fetch_sub(bytes as u64, Ordering::Relaxed);
        self.bits[page.as_usize() / 64].fetch_and(!(1 << (page.0 % 64)), Ordering::Relaxed);
    }

    /// Removes from a range within one step the locked pages that `leaves` picks, of
    /// `page_bytes` each. Returns them as bits of the step.
    pub(super) fn remove_where(
        &self,
        range: Range<usize>,
        page_bytes: usize,
        leaves: impl Fn(PageId) -> bool,
    ) -> u64 {
        let step = range.start / 64;
        let gone = self
            .pages(step)
            .filter(|page| range.contains(&page.as_usize()) && leaves(*page))
            .fold(0u64, |bits, page| bits | 1 << (page.0 % 64));
        let bytes = u64::from(gone.count_ones()) * page_bytes as u64;
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.bits[step].fetch_and(!gone, Ordering::Relaxed);
        gone
    }

    pub(super) fn contains(&self, index: usize) -> bool {
        self.bits[index / 64].load(Ordering::Relaxed) & 1 << (index % 64) != 0
    }

    /// True if all 64 pages of each step are resident.
    pub(super) fn is_full(&self, steps: Range<usize>) -> bool {
        self.bits[steps].iter().all(|bits| bits.load(Ordering::Relaxed) == u64::MAX)
    }

    /// True if no page of these steps is resident.
    pub(super) fn is_empty(&self, steps: Range<usize>) -> bool {
        self.bits[steps].iter().all(|bits| bits.load(Ordering::Relaxed) == 0)
    }

    /// Gives back the memory of the bits of `pages`, none of which is resident or becomes so meanwhile.
    /// `false` when the kernel refuses.
    ///
    /// # Safety
    /// No page of these becomes resident meanwhile.
    pub(super) unsafe fn drop_bits(&self, pages: Range<usize>) -> bool {
        let steps = pages.start / 64..pages.end / 64;
        // SAFETY: all of these bits are zero, and nobody sets one: the caller's promise.
        unsafe { self.bits.give_back_shared(steps) }.is_ok()
    }

    /// The resident pages among the 64 of `step`, as they were at one moment.
    pub(super) fn pages(&self, step: usize) -> StepPages {
        StepPages { bits: self.bits[step].load(Ordering::Relaxed), first: (step * 64) as u64 }
    }

    /// Counts pages that have left.
    pub(super) fn depart(&self, pages: usize) {
        self.departed.fetch_add(pages as u64, Ordering::Relaxed);
        self.clock.fetch_add(pages as u64, Ordering::Relaxed);
    }

    /// Pages that have left since the table was opened.
    pub(super) fn departed(&self) -> u64 {
        self.departed.load(Ordering::Relaxed)
    }

    /// Pages that have left any table of the pool.
    pub(super) fn departed_from_pool(&self) -> u64 {
        self.clock.load(Ordering::Relaxed)
    }

    /// The replacement clock, 1 to [`STAMPS`]: a step every 1/[`STAMPS_PER_POOL`] of a pool of
    /// `pool_pages`.
    pub(super) fn stamp(&self, pool_pages: u64) -> u64 {
        let step = pool_pages.max(STAMPS_PER_POOL) / STAMPS_PER_POOL;
        self.departed_from_pool() / step % STAMPS + 1
    }

    /// Verdict of the policy on an arriving page that had this word, in a pool of `pool_pages`.
    pub(super) fn worth(&self, was: LatchWord, pool_pages: u64, prefetched: bool) -> Worth {
        let away = (was.stamp() > 0).then(|| {
            let passed = (self.stamp(pool_pages) + STAMPS - was.stamp()) % STAMPS;
            passed as f32 / STAMPS_PER_POOL as f32
        });
        let worth = self.policy.arrives(away, prefetched);
        Worth { laps: worth.laps.min(HEAT_MAX), ..worth }
    }

    /// Heat of a page that the hand passes and that was touched since its last pass.
    pub(super) fn passes_touched(&self, seen: LatchWord) -> u8 {
        self.policy.passes_touched(seen.heat()).min(HEAT_MAX)
    }
}

/// Resident pages of one step, in address order.
pub(super) struct StepPages {
    bits: u64,
    first: u64,
}

impl Iterator for StepPages {
    type Item = PageId;

    fn next(&mut self) -> Option<PageId> {
        let page = PageId(self.first + u64::from(self.bits.trailing_zeros()));
        (self.bits != 0).then(|| {
            self.bits &= self.bits - 1;
            page
        })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let count = self.bits.count_ones() as usize;
        (count, Some(count))
    }
}

impl ExactSizeIterator for StepPages {}

#[cfg(test)]
mod tests {
    use super::super::latch::Latch;
    use super::super::replacement::Proven;
    use super::*;

    const BYTES: usize = 4096;

    fn set() -> ResidentSet {
        ResidentSet::new(1000, Box::new(Proven), Arc::default()).expect("mapped")
    }

    #[test]
    fn pages_come_in_address_order_and_their_bytes_are_counted() {
        let set = set();
        for page in [130, 128, 64, 191] {
            set.insert(PageId(page), BYTES);
        }
        assert_eq!(set.pages(2).map(|page| page.0).collect::<Vec<_>>(), [128, 130, 191]);
        assert_eq!((set.pages(2).len(), set.pages(0).len()), (3, 0));
        set.remove(PageId(128), BYTES);
        assert!(!set.contains(128) && set.contains(64));
        assert_eq!(set.bytes(), ByteCount(3 * BYTES as u64));
    }

    #[test]
    fn only_pages_of_the_range_that_leave_are_removed_together() {
        let set = set();
        (64..128).for_each(|page| set.insert(PageId(page), BYTES));
        assert!(set.is_full(1..2) && !set.is_full(1..3));
        let gone = set.remove_where(96..112, BYTES, |page| page.0 % 2 == 0);
        assert_eq!(gone, 0x5555 << 32);
        assert_eq!((set.pages(1).len(), set.bytes()), (56, ByteCount(56 * BYTES as u64)));
    }

    #[test]
    fn what_was_away_for_less_than_a_pool_is_worth_more_than_what_is_new() {
        let (set, pool_pages) = (set(), 6400);
        let latch = Latch::absent();
        let new = set.worth(latch.load(), pool_pages, false);
        assert!(latch.try_begin_load(latch.load()));
        latch.evicted(set.stamp(pool_pages));
        set.depart(3200);
        let back = set.worth(latch.load(), pool_pages, false);
        assert!(back.laps > new.laps, "away for half a pool");
        assert_eq!(set.worth(latch.load(), pool_pages, true), new, "nobody asked for it");
        set.depart(6400);
        assert_eq!(set.worth(latch.load(), pool_pages, false), new, "away for too long");
    }
}
