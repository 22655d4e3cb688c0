//! Address ranges of a region: which are handed out, and which parts hold live data.
//!
//! Ranges are whole pages; a bit of each says if it is live. Neighbours: `heap` asks for ranges, the pager drops pages.
//!
//! # Invariants
//! 1. A page is discarded only while it is the caller's.
//! 2. Committed pages never outnumber what limit and device can keep together.

use crate::base::error::{Error, Result};
use crate::base::sync::{Rank, Ranked};
use crate::base::units::{ByteCount, PageCount, PageId};
use crate::meta::LazyArray;
use crate::paging::page::PAGE;
use crate::paging::table_sizes::Committed;
use std::ops::Range;

/// Released ranges that are remembered for reuse; more are forgotten (address space is plentiful).
const RELEASED_MAX: usize = 4096;

/// Pages that are opened at a time, 64 MiB. Addresses that nobody has reserved are closed: `mlockall(2)` makes the kernel
/// fill all that can be touched, which took a process with a region of 1 TiB half a minute, and its tables the limit.
const OPEN_STEP: usize = (64 << 20) / PAGE;

/// A range of pages, counted from the region's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PageRange {
    first: usize,
    count: usize,
}

impl PageRange {
    fn end(self) -> usize {
        self.first + self.count
    }

    /// The part that lies in another range.
    fn within(self, other: PageRange) -> PageRange {
        let first = self.first.max(other.first);
        PageRange { first, count: self.end().min(other.end()).saturating_sub(first) }
    }
}

/// The address ranges of one region.
#[derive(Debug)]
pub(in crate::paging) struct RangeAllocator {
    state: Ranked<RangeState>,
    /// Address of the first page, in pages: addresses are what is aligned, and the region itself is to 2 MiB only.
    base: usize,
    total: usize,
}

#[derive(Debug)]
struct RangeState {
    /// Everything from here on was never handed out.
    fresh: usize,
    /// Everything from here on cannot be touched; not below `fresh`.
    closed: usize,
    /// Released ranges, sorted, merged.
    released: Vec<PageRange>,
    /// One bit per page: committed.
    live: LazyArray<u64>,
    committed: Committed,
}

impl RangeAllocator {
    /// The ranges of a region of `span` bytes at `base`, all of them unused.
    pub(in crate::paging) fn new(base: usize, span: usize) -> Result<RangeAllocator> {
        let total = span / PAGE;
        let state = RangeState {
            fresh: 0,
            closed: 0,
            released: Vec::with_capacity(RELEASED_MAX),
            live: LazyArray::new(total.div_ceil(64))?,
            committed: Committed::default(),
        };
        let base = base / PAGE;
        Ok(RangeAllocator { state: Ranked::new(Rank::Space, state), base, total })
    }

    /// Live pages, and spans of tables with at least one of them.
    pub(in crate::paging) fn committed(&self) -> Committed {
        self.state.lock().committed
    }

    /// Pages up to the end of everything that was ever handed out.
    pub(in crate::paging) fn fresh_pages(&self) -> PageCount {
        PageCount(self.state.lock().fresh as u64)
    }

    /// Hands out `len` bytes whose address is a multiple of `align`; the offset from the region's start. Opens them by `open` where
    /// they are closed.
    ///
    /// # Errors
    /// [`Error::AddressSpace`], and as `open`, which is called with the lock held.
    pub(in crate::paging) fn reserve(
        &self,
        len: usize,
        align: usize,
        open: impl FnOnce(Range<usize>) -> Result<()>,
    ) -> Result<usize> {
        let no_space = Error::AddressSpace { len: ByteCount(len as u64) };
        let count = len / PAGE;
        let align = (align / PAGE).max(1);
        let aligned = |page: usize| (self.base + page).next_multiple_of(align) - self.base;
        let mut state = self.state.lock();
        if let Some(first) = state.reuse(count, aligned) {
            return Ok(first * PAGE);
        }
        let first = aligned(state.fresh);
        let end = first.checked_add(count).filter(|end| *end <= self.total).ok_or(no_space)?;
        state.take_fresh(first, end, self.total, open)?;
        Ok(first * PAGE)
    }

    /// Commits what is free of a range, in a place that somebody else has chosen, if what is committed then `fits`;
    /// returns its bytes. `None`, and nothing has changed: not all of it is free, and it was to be (`all_free`).
    ///
    /// # Errors
    /// [`Error::BadRange`] where a part is reserved and not committed; as `open` and `fits`, which are called with
    /// the lock held. What was free before that part stays committed.
    pub(in crate::paging) fn claim(
        &self,
        offset: usize,
        len: usize,
        all_free: bool,
        open: impl FnOnce(Range<usize>) -> Result<()>,
        fits: impl Fn(&Committed) -> Result<()>,
    ) -> Result<Option<usize>> {
        let range = pages(offset, len);
        let mut state = self.state.lock();
        if range.end() > state.fresh {
            state.take_fresh(range.end(), range.end(), self.total, open)?;
        }
        if all_free
            && state.released.iter().map(|free| free.within(range).count).sum::<usize>()
                < range.count
        {
            return Ok(None);
        }
        let mut claimed = 0;
        while let Some(at) = state.released.iter().position(|free| free.within(range).count > 0) {
            let taken = state.released[at].within(range);
            let after = state.committed.with(self.without_live(&state, taken), |a, b| a + b);
            fits(&after)?;
            state.take(at, taken);
            state.committed = after;
            state.set(taken, true);
            claimed += taken.count * PAGE;
        }
        match state.is_live(range) {
            true => Ok(Some(claimed)),
            false => Err(Error::BadRange { reason: "is reserved for others".into() }),
        }
    }

    /// Takes a range back for reuse; it must not be committed.
    pub(in crate::paging) fn release(&self, offset: usize, len: usize) {
        self.state.lock().give_back(pages(offset, len));
    }

    /// Makes a reserved range usable, if what is committed then `fits`.
    ///
    /// # Errors
    /// As `fits`, which is called with the lock held.
    pub(in crate::paging) fn commit(
        &self,
        offset: usize,
        len: usize,
        fits: impl FnOnce(&Committed) -> Result<()>,
    ) -> Result<()> {
        let range = pages(offset, len);
        let mut state = self.state.lock();
        let after = state.committed.with(self.without_live(&state, range), |a, b| a + b);
        fits(&after)?;
        state.committed = after;
        state.set(range, true);
        Ok(())
    }

    /// True if all of a range is committed.
    pub(in crate::paging) fn is_live(&self, offset: usize, len: usize) -> bool {
        self.state.lock().is_live(pages(offset, len))
    }

    /// Ends the use of a committed range, whose pages `discard` gets.
    pub(in crate::paging) fn decommit(
        &self,
        offset: usize,
        len: usize,
        discard: impl FnOnce(PageId, PageCount),
    ) {
        let range = pages(offset, len);
        discard(PageId(range.first as u64), PageCount(range.count as u64));
        let mut state = self.state.lock();
        state.set(range, false);
        state.committed = state.committed.with(self.without_live(&state, range), |a, b| a - b);
    }

    /// The pages of a range, none of which is live at the moment, and the spans it touches that have no live page.
    fn without_live(&self, state: &RangeState, range: PageRange) -> Committed {
        Committed::by(|per_span| {
            let per_span = per_span as usize;
            let (first, end) = (range.first.div_ceil(per_span), range.end() / per_span);
            let inner = end.saturating_sub(first) as u64;
            let is_unused = |span: &usize| {
                let first = span * per_span;
                let count = per_span.min(self.total - first);
                let mut words = masks(PageRange { first, count });
                words.all(|(word, mask)| state.live[word] & mask == 0)
            };
            inner + edges(range, per_span).filter(is_unused).count() as u64
        })
    }
}

/// The one or two spans that a range covers only in part.
fn edges(range: PageRange, per_span: usize) -> impl Iterator<Item = usize> {
    let head = (!range.first.is_multiple_of(per_span)).then_some(range.first / per_span);
    let tail = (!range.end().is_multiple_of(per_span)).then_some(range.end() / per_span);
    head.into_iter().chain(tail.filter(move |tail| head != Some(*tail)))
}

impl RangeState {
    /// Takes `count` pages out of the released ranges, from a page on that is `aligned`.
    fn reuse(&mut self, count: usize, aligned: impl Fn(usize) -> usize) -> Option<usize> {
        let fits = |range: &PageRange| aligned(range.first) + count <= range.end();
        let at = self.released.iter().position(fits)?;
        let first = aligned(self.released[at].first);
        self.take(at, PageRange { first, count });
        Some(first)
    }

    /// Takes a part out of a released range.
    fn take(&mut self, at: usize, taken: PageRange) {
        let range = self.released.remove(at);
        self.give_back(PageRange { first: range.first, count: taken.first - range.first });
        self.give_back(PageRange { first: taken.end(), count: range.end() - taken.end() });
    }

    /// Takes fresh pages from `first` to `end`, opens what is closed of them, and releases those before.
    fn take_fresh(
        &mut self,
        first: usize,
        end: usize,
        total: usize,
        open: impl FnOnce(Range<usize>) -> Result<()>,
    ) -> Result<()> {
        if end > self.closed {
            let closed = end.next_multiple_of(OPEN_STEP).min(total);
            open(self.closed * PAGE..closed * PAGE)?;
            self.closed = closed;
        }
        let skipped = PageRange { first: self.fresh, count: first - self.fresh };
        self.fresh = end;
        self.give_back(skipped);
        Ok(())
    }

    fn give_back(&mut self, range: PageRange) {
        if range.count == 0 {
            return;
        }
        let at = self.released.partition_point(|other| other.first < range.first);
        let before = at.checked_sub(1).filter(|at| self.released[*at].end() == range.first);
        let after = self.released.get(at).copied().filter(|next| next.first == range.end());
        match (before, after) {
            (Some(before), Some(after)) => {
                self.released[before].count += range.count + after.count;
                self.released.remove(at);
            }
            (Some(before), None) => self.released[before].count += range.count,
            (None, Some(after)) => {
                let count = range.count + after.count;
                self.released[at] = PageRange { first: range.first, count };
            }
            (None, None) if self.released.len() < RELEASED_MAX => self.released.insert(at, range),
            (None, None) => {}
        }
    }

    fn set(&mut self, range: PageRange, live: bool) {
        for (word, mask) in masks(range) {
            let bits = &mut self.live[word];
            *bits = if live { *bits | mask } else { *bits & !mask };
        }
    }

    fn is_live(&self, range: PageRange) -> bool {
        masks(range).all(|(word, mask)| self.live[word] & mask == mask)
    }
}

/// The words of a bitmap that a range covers, with the covered bits of each.
fn masks(range: PageRange) -> impl Iterator<Item = (usize, u64)> {
    let (first, end) = (range.first, range.end());
    (first / 64..end.div_ceil(64)).map(move |word| {
        let low = if word == first / 64 { u64::MAX << (first % 64) } else { u64::MAX };
        let high = if end < (word + 1) * 64 { (1 << (end % 64)) - 1 } else { u64::MAX };
        (word, low & high)
    })
}

fn pages(offset: usize, len: usize) -> PageRange {
    assert!(offset.is_multiple_of(PAGE), "offset {offset} is not a multiple of 4 KiB");
    assert!(len.is_multiple_of(PAGE) && len > 0, "length {len} is not a multiple of 4 KiB");
    PageRange { first: offset / PAGE, count: len / PAGE }
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::sys::vm::HUGE_PAGE;

    fn reserve(ranges: &RangeAllocator, len: usize, align: usize) -> Result<usize> {
        ranges.reserve(len, align, |_| Ok(()))
    }

    #[test]
    fn ranges_are_aligned_disjoint_and_reused_after_release() {
        let ranges = RangeAllocator::new(0, 64 * PAGE).expect("a small space");
        let a = reserve(&ranges, 3 * PAGE, PAGE).expect("fresh space");
        let b = reserve(&ranges, PAGE, 4 * PAGE).expect("fresh space");
        assert_eq!((a, b), (0, 4 * PAGE));
        let c = reserve(&ranges, PAGE, PAGE).expect("the gap left by the alignment");
        assert_eq!(c, 3 * PAGE);
        ranges.release(b, PAGE);
        assert_eq!(reserve(&ranges, PAGE, 4 * PAGE).expect("just released"), b);
    }

    #[test]
    fn addresses_are_aligned_wherever_the_region_lies() {
        let base = 3 * HUGE_PAGE;
        let ranges = RangeAllocator::new(base, 8 * HUGE_PAGE).expect("a small space");
        let a = reserve(&ranges, PAGE, 4 * HUGE_PAGE).expect("fresh space");
        assert_eq!(a, HUGE_PAGE, "at 4 chunks");
        ranges.release(a, PAGE);
        assert_eq!(reserve(&ranges, PAGE, 4 * HUGE_PAGE).expect("just released"), a);
        assert_eq!(reserve(&ranges, PAGE, 8 * HUGE_PAGE).expect("fresh space"), 5 * HUGE_PAGE);
        for align in [16 * HUGE_PAGE, 1 << 40, 1 << 63] {
            reserve(&ranges, PAGE, align).expect_err("no such address is in the region");
        }
    }

    #[test]
    fn what_was_claimed_is_not_handed_out_until_it_is_released() {
        let ranges = RangeAllocator::new(0, 64 * PAGE).expect("a small space");
        let claim = |first: usize, pages: usize, all_free| {
            ranges.claim(first * PAGE, pages * PAGE, all_free, |_| Ok(()), |_| Ok(()))
        };
        assert_eq!(reserve(&ranges, 16 * PAGE, PAGE).expect("fresh space"), 0);
        ranges.commit(0, 16 * PAGE, |_| Ok(())).expect("nothing is refused");
        ranges.decommit(4 * PAGE, 8 * PAGE, |_, _| ());
        ranges.release(4 * PAGE, 8 * PAGE);
        assert_eq!(claim(3, 4, true), Ok(None), "the first page is in use");
        assert_eq!(claim(3, 4, false), Ok(Some(3 * PAGE)));
        assert_eq!(ranges.committed().pages, 11);
        assert_eq!(reserve(&ranges, 4 * PAGE, PAGE), Ok(7 * PAGE));
        assert_eq!(reserve(&ranges, 2 * PAGE, PAGE), Ok(16 * PAGE), "one page is left of the hole");
        claim(9, 4, false).expect_err("two pages are reserved for others");
        assert_eq!(claim(20, 2, true), Ok(Some(2 * PAGE)), "where nobody was yet");
        assert_eq!(reserve(&ranges, 2 * PAGE, PAGE), Ok(18 * PAGE));
        assert_eq!(reserve(&ranges, PAGE, PAGE), Ok(22 * PAGE));
        ranges.decommit(4 * PAGE, 3 * PAGE, |_, _| ());
        ranges.release(4 * PAGE, 3 * PAGE);
        assert_eq!(reserve(&ranges, 3 * PAGE, PAGE), Ok(4 * PAGE));
    }

    #[test]
    fn a_full_space_says_so() {
        let ranges = RangeAllocator::new(0, 4 * PAGE).expect("a small space");
        reserve(&ranges, 3 * PAGE, PAGE).expect("fresh space");
        let error = reserve(&ranges, 2 * PAGE, PAGE).expect_err("one page is left");
        assert_eq!(error, Error::AddressSpace { len: ByteCount(2 * PAGE as u64) });
        reserve(&ranges, PAGE, PAGE).expect("the last page");
    }

    #[test]
    fn what_is_handed_out_was_opened_once_and_little_more() {
        let step = OPEN_STEP * PAGE;
        let ranges = RangeAllocator::new(0, 3 * step + PAGE).expect("a space");
        let mut opened = 0;
        let mut reserve = |len| {
            let open = |range: Range<usize>| {
                assert_eq!(range.start, opened, "what follows on what is open");
                opened = range.end;
                Ok(())
            };
            let offset = ranges.reserve(len, PAGE, open).expect("fresh space");
            assert!(offset + len <= opened, "{offset} {opened}");
            (offset, opened)
        };
        let first = reserve(PAGE);
        assert_eq!(first, (0, step), "a step at a time");
        assert_eq!(reserve(step), (PAGE, 2 * step));
        ranges.release(0, PAGE);
        assert_eq!(reserve(PAGE), (0, 2 * step), "open already");
        assert_eq!(reserve(2 * step), (step + PAGE, 3 * step + PAGE), "not beyond the end");
    }

    #[test]
    fn what_cannot_be_opened_is_not_handed_out() {
        let ranges = RangeAllocator::new(0, 4 * PAGE).expect("a small space");
        let refused = Error::BadRange { reason: "refused".into() };
        let error = ranges.reserve(PAGE, PAGE, |_| Err(refused.clone()));
        assert_eq!(error.expect_err("it is closed"), refused);
        assert_eq!(reserve(&ranges, PAGE, PAGE).expect("fresh space"), 0);
    }

    #[test]
    fn committing_counts_each_page_once_and_stops_at_the_capacity() {
        let ranges = RangeAllocator::new(0, 64 * PAGE).expect("a small space");
        reserve(&ranges, 8 * PAGE, PAGE).expect("fresh space");
        let commit = |offset, len| {
            let full = Error::BadRange { reason: "full".into() };
            ranges.commit(offset, len, |after| if after.pages > 2 { Err(full) } else { Ok(()) })
        };
        commit(0, PAGE).expect("the first page");
        assert_eq!(ranges.committed().pages, 1);
        commit(PAGE, 2 * PAGE).expect_err("three pages");
        commit(PAGE, PAGE).expect("the second page");
        assert_eq!(ranges.committed().pages, 2);
    }

    #[test]
    fn spans_are_counted_by_the_live_pages_in_them() {
        let ranges = RangeAllocator::new(0, 2 * HUGE_PAGE + 8 * PAGE).expect("a small space");
        reserve(&ranges, 2 * HUGE_PAGE + 8 * PAGE, PAGE).expect("fresh space");
        let mut seen = Committed::default();
        let mut commit = |offset, len| {
            let look = |after: &Committed| {
                seen = *after;
                Ok(())
            };
            ranges.commit(offset, len, look).expect("nothing is refused");
            (seen.pages, seen.spans)
        };
        assert_eq!(commit(0, PAGE), (1, [1, 1, 1]));
        assert_eq!(commit(2 * PAGE, PAGE), (2, [1, 1, 1]));
        assert_eq!(commit(HUGE_PAGE - PAGE, 2 * PAGE), (4, [2, 1, 1]));
        assert_eq!(commit(2 * HUGE_PAGE + 7 * PAGE, PAGE), (5, [3, 2, 1]), "the last, in part");
        let of = Committed::of(3 * HUGE_PAGE as u64 + 1);
        assert_eq!((of.pages, of.spans), (1537, [4, 2, 1]));
    }

    #[test]
    fn masks_cover_exactly_the_range() {
        for (first, count) in [(0, 1), (63, 2), (5, 59), (64, 64), (1, 200)] {
            let bits: u32 =
                masks(PageRange { first, count }).map(|(_, mask)| mask.count_ones()).sum();
            assert_eq!(bits as usize, count, "{first} + {count}");
        }
    }
}
