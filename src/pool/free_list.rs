//! The free pages of a table.

use crate::base::local::keep_local;
use crate::base::units::PageId;
use std::collections::BTreeSet;
use std::ops::Range;

/// Free pages; the lowest is taken first, so that free pages gather at the table's end, which is cut off.
/// May allocate: the pool is not below any heap.
#[derive(Debug, Default)]
pub(super) struct FreeList(BTreeSet<u64>);

impl FreeList {
    pub(super) fn take(&mut self) -> Option<PageId> {
        let _ours = keep_local();
        self.0.pop_first().map(PageId)
    }

    /// Takes this page. `false` when it is not free.
    pub(super) fn take_page(&mut self, page: PageId) -> bool {
        let _ours = keep_local();
        self.0.remove(&page.0)
    }

    /// `false` when it is free already.
    pub(super) fn put(&mut self, page: PageId) -> bool {
        let _ours = keep_local();
        self.0.insert(page.0)
    }

    pub(super) fn put_range(&mut self, pages: Range<u64>) {
        let _ours = keep_local();
        self.0.extend(pages);
    }

    /// Where the free pages begin that lie before `end` without a page in use between, and not before
    /// `least`.
    pub(super) fn tail(&self, least: u64, end: u64) -> u64 {
        let is_free = |page: &u64| *page >= least && self.0.contains(page);
        (0..end).rev().take_while(is_free).last().unwrap_or(end)
    }

    /// Forgets the free pages from `start` on, behind which the table ends now.
    pub(super) fn cut(&mut self, start: u64) {
        let _ours = keep_local();
        self.0.split_off(&start);
    }

    /// The free pages before `end`, in descending order: the list in the file lies in those that come first,
    /// and they are to be taken last.
    pub(super) fn before(&self, end: u64) -> Vec<u64> {
        let _ours = keep_local();
        self.0.range(..end).rev().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_page_is_taken_first_and_one_that_is_not_free_not_at_all() {
        let mut free = FreeList::default();
        free.put_range(16..19);
        assert!(free.put(PageId(3)) && !free.put(PageId(17)));
        assert!(free.take_page(PageId(17)) && !free.take_page(PageId(17)));
        assert_eq!(free.before(18), [16, 3]);
        let taken: Vec<_> = std::iter::from_fn(|| free.take()).map(|page| page.0).collect();
        assert_eq!(taken, [3, 16, 18]);
    }

    #[test]
    fn the_tail_reaches_back_to_the_last_page_in_use_and_is_cut_off() {
        let mut free = FreeList::default();
        free.put(PageId(3));
        free.put_range(8..16);
        assert_eq!((free.tail(0, 16), free.tail(0, 17), free.tail(0, 12)), (8, 17, 8));
        assert_eq!((free.tail(12, 16), free.tail(13, 16)), (12, 13));
        free.cut(12);
        assert_eq!(free.before(u64::MAX), [11, 10, 9, 8, 3]);
        assert_eq!(FreeList::default().tail(0, 7), 7);
    }
}
