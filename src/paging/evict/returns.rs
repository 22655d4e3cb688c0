//! Which data comes back soon after it has left: fresh data, or data that was read from the device.
//!
//! The policy hears nothing of fresh data in open chunks, so it cannot weigh that data against the pages on
//! its lists: the evictor has to choose between the two (`victims`). Which choice was right shows afterwards,
//! by what is read again. Tables that an engine loads are not needed again soon, hash tables of its next
//! query are, and nothing tells one from the other before.
//!
//! ```text
//!            evicted                 read again: did it come back soon?
//!   fresh ------------> left, fresh ------------------------------------> read
//!     ^                                evicted                              |
//!     |  discarded    read ------------> left, read -----------------------+
//!     +------------- (any)               read again: did it come back soon?
//! ```
//! A page comes back *soon* when a fault reads it before as many pages have left as the limit has room for:
//! it would have been hit, had others left in its place (the refault distance of Linux's working-set
//! detection, `mm/workingset.c`). Where fresh data is to stay, what is read ahead of a fault does not count, as it costs
//! little; where data that is scanned again is to stay, it does, because nearly all of a scan is read ahead.

use crate::base::error::Result;
use crate::base::units::{PageCount, PageId};
use crate::meta::LazyArray;
use crate::paging::evict::policy::Insert;
use std::ops::Range;

/// A note of a page, zero for a fresh one:
///
/// ```text
/// 7 it has left | 6 it was read | 5..0 in which span it left, modulo 64
/// ```
const LEFT: u8 = 1 << 7;
const READ: u8 = 1 << 6;
const SPAN: u8 = READ - 1;

/// Spans in which a limit of pages leaves.
const SPANS: u8 = 8;

/// Pages of one kind that left lately.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    left: u64,
    /// Read again soon by a fault.
    came_back: u64,
    /// Read again soon, by a fault or ahead of one.
    read_again: u64,
}

impl Tally {
    fn fade(&mut self) {
        let Tally { left, came_back, read_again } = *self;
        *self = Tally { left: left / 2, came_back: came_back / 2, read_again: read_again / 2 };
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Returns {
    notes: LazyArray<u8>,
    /// Pages that leave in a span.
    span_pages: u64,
    /// The number of this span, and how many pages have left in it.
    span: u8,
    left_in_span: u64,
    fresh: Tally,
    read: Tally,
}

impl Returns {
    /// Of a region of `pages` pages, of which `limit` fit into memory.
    ///
    /// # Errors
    /// When the kernel refuses the mapping.
    pub(super) fn new(pages: PageCount, limit: PageCount) -> Result<Returns> {
        let mut returns = Returns {
            notes: LazyArray::new(pages.as_usize())?,
            span_pages: 1,
            span: 0,
            left_in_span: 0,
            fresh: Tally::default(),
            read: Tally::default(),
        };
        returns.resize(limit);
        Ok(returns)
    }

    /// From now on `limit` pages fit into memory.
    pub(super) fn resize(&mut self, limit: PageCount) {
        self.span_pages = (limit.0 / u64::from(SPANS)).max(1);
    }

    /// A page has left.
    pub(super) fn leave(&mut self, page: PageId) {
        let note = &mut self.notes[page.as_usize()];
        // A note may say that the page had left before: then the kernel has filled its chunk since, and the page
        // is fresh.
        let was_read = *note == READ;
        *note = LEFT | self.span | if was_read { READ } else { 0 };
        if was_read { &mut self.read } else { &mut self.fresh }.left += 1;
        self.left_in_span += 1;
        if self.left_in_span >= self.span_pages {
            self.left_in_span = 0;
            self.span = (self.span + 1) & SPAN;
            // A limit's worth is remembered: with half of that, a query of DataFusion wrote 1.3 times as much.
            if self.fresh.left + self.read.left > u64::from(SPANS) * self.span_pages {
                self.fresh.fade();
                self.read.fade();
            }
        }
    }

    /// A page has come in. What left eight limits ago counts as what left now, which does not matter: it does
    /// for both kinds.
    pub(super) fn arrive(&mut self, page: PageId, how: Insert) {
        let note = &mut self.notes[page.as_usize()];
        let before = *note;
        let now = if how == Insert::Fresh { 0 } else { READ };
        // Not written where nothing changes: that would take memory.
        if before != now {
            *note = now;
        }
        if how != Insert::Fresh && self.left_lately(before) {
            let was_read = before & READ != 0;
            let tally = if was_read { &mut self.read } else { &mut self.fresh };
            tally.read_again += 1;
            tally.came_back += u64::from(how == Insert::Filled);
        }
    }

    fn left_lately(&self, note: u8) -> bool {
        note & LEFT != 0 && self.span.wrapping_sub(note) & SPAN <= SPANS
    }

    /// True if a page, which was fresh, left less than a limit of pages ago.
    pub(super) fn left_fresh(&self, page: PageId) -> bool {
        let note = self.notes[page.as_usize()];
        note & READ == 0 && self.left_lately(note)
    }

    /// The content of a page was discarded.
    pub(super) fn forget(&mut self, page: PageId) {
        let note = &mut self.notes[page.as_usize()];
        if *note != 0 {
            *note = 0;
        }
    }

    /// Gives the memory of the notes of `pages` back; all of them are empty.
    pub(super) fn release(&mut self, pages: Range<usize>) {
        // What the kernel refuses to take back stays with this process: it costs nothing but memory.
        let _ = self.notes.give_back(pages.start..pages.end.min(self.notes.len()));
    }

    /// True if more of the fresh data that left came back by faults than of the data that had been read, by half as
    /// much again: below that it is chance, as where all data is used alike.
    pub(super) fn fresh_return_more(&self) -> bool {
        let Returns { fresh, read, .. } = self;
        2 * fresh.came_back * (read.left + 1) > 3 * read.came_back * (fresh.left + 1)
    }

    /// True if more of the data that had been read was read again, by a fault or ahead of one, than of the fresh data: as
    /// that of queries that scan the same columns.
    pub(super) fn read_return_more(&self) -> bool {
        let Returns { fresh, read, .. } = self;
        2 * read.read_again * (fresh.left + 1) > 3 * fresh.read_again * (read.left + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pages that fit into memory.
    const LIMIT: u64 = 64;

    fn returns() -> Returns {
        Returns::new(PageCount(10_000), PageCount(LIMIT)).expect("address space for 10,000 notes")
    }

    fn leave(returns: &mut Returns, pages: Range<u64>) {
        pages.for_each(|page| returns.leave(PageId(page)));
    }

    fn arrive(returns: &mut Returns, pages: Range<u64>, how: Insert) {
        pages.for_each(|page| returns.arrive(PageId(page), how));
    }

    #[test]
    fn nothing_is_known_at_first() {
        assert!(!returns().fresh_return_more());
    }

    #[test]
    fn fresh_data_that_is_read_again_stays_rather_than_data_that_is_not() {
        let mut returns = returns();
        arrive(&mut returns, 1_000..1_020, Insert::Filled);
        leave(&mut returns, 1_000..1_020);
        leave(&mut returns, 0..20);
        assert!(!returns.fresh_return_more());
        arrive(&mut returns, 0..10, Insert::Filled);
        assert!(returns.fresh_return_more());
        // As much of both: then fresh data goes.
        arrive(&mut returns, 1_000..1_010, Insert::Filled);
        assert!(!returns.fresh_return_more());
    }

    #[test]
    fn data_that_is_scanned_again_stays_rather_than_fresh_data_that_is_not() {
        let mut returns = returns();
        assert!(!returns.read_return_more(), "nothing is known");
        leave(&mut returns, 0..20);
        arrive(&mut returns, 0..10, Insert::Prefetched);
        assert!(!returns.read_return_more(), "these were fresh ones");
        leave(&mut returns, 0..10);
        arrive(&mut returns, 0..10, Insert::Prefetched);
        assert!(returns.read_return_more());
        assert!(!returns.fresh_return_more(), "no fault has waited for them");
        // As much of the fresh data: then that stays.
        arrive(&mut returns, 10..20, Insert::Filled);
        assert!(!returns.read_return_more());
    }

    #[test]
    fn what_comes_back_late_or_ahead_of_a_fault_does_not_count() {
        let mut returns = returns();
        leave(&mut returns, 0..20);
        arrive(&mut returns, 0..10, Insert::Prefetched);
        assert!(!returns.fresh_return_more());
        leave(&mut returns, 100..100 + 2 * LIMIT);
        arrive(&mut returns, 10..20, Insert::Filled);
        assert!(!returns.fresh_return_more());
    }

    #[test]
    fn a_page_that_was_read_counts_as_read_until_it_is_discarded() {
        let mut returns = returns();
        arrive(&mut returns, 0..10, Insert::Filled);
        leave(&mut returns, 0..10);
        arrive(&mut returns, 0..10, Insert::Filled);
        assert!(!returns.fresh_return_more(), "these were no fresh ones");
        (0..10).for_each(|page| returns.forget(PageId(page)));
        leave(&mut returns, 0..10);
        arrive(&mut returns, 0..10, Insert::Filled);
        leave(&mut returns, 0..10);
        let (fresh, read) = (returns.fresh, returns.read);
        assert_eq!((fresh.left, fresh.came_back), (10, 10));
        assert_eq!((read.left, read.came_back), (20, 10));
    }

    #[test]
    fn a_page_that_the_kernel_filled_after_it_had_left_is_fresh() {
        let mut returns = returns();
        arrive(&mut returns, 0..1, Insert::Filled);
        leave(&mut returns, 0..1);
        leave(&mut returns, 0..1);
        assert_eq!((returns.read.left, returns.fresh.left), (1, 1));
    }

    #[test]
    fn pages_left_as_fresh_ones_until_they_are_read_or_a_limit_of_others_has_left() {
        let mut returns = returns();
        assert!(!returns.left_fresh(PageId(1)), "it has not left");
        leave(&mut returns, 1..3);
        assert!(returns.left_fresh(PageId(1)));
        arrive(&mut returns, 1..2, Insert::Filled);
        leave(&mut returns, 1..2);
        assert!(!returns.left_fresh(PageId(1)), "it was read");
        leave(&mut returns, 100..100 + 2 * LIMIT);
        assert!(!returns.left_fresh(PageId(2)), "long ago");
    }

    #[test]
    fn what_was_learnt_fades() {
        let mut returns = returns();
        leave(&mut returns, 0..LIMIT);
        arrive(&mut returns, 0..LIMIT, Insert::Filled);
        assert!(returns.fresh_return_more());
        // From now on what was read returns, and fresh data does not.
        for turn in 1..20 {
            leave(&mut returns, 100 * turn..100 * turn + LIMIT / 2);
            leave(&mut returns, 0..LIMIT / 4);
            arrive(&mut returns, 0..LIMIT / 4, Insert::Filled);
        }
        assert!(!returns.fresh_return_more());
        assert!(returns.fresh.left + returns.read.left <= 2 * LIMIT, "{returns:?}");
    }
}
