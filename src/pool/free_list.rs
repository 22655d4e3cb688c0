//! Free buffers by order.

use super::latch::ORDER_MAX;
use crate::base::local::keep_local;
use crate::base::units::PageId;
use std::ops::Range;

/// Bits of a page number in an entry of the table file; the order lies above.
const ORDER_SHIFT: u32 = 56;

/// Free buffers of a table, last freed first. May allocate: the pool is not below any heap.
#[derive(Debug, Default)]
pub(super) struct FreeLists([Vec<PageId>; ORDER_MAX as usize + 1]);

impl FreeLists {
    pub(super) fn take(&mut self, order: u8) -> Option<PageId> {
        self.0[usize::from(order)].pop()
    }

    pub(super) fn put(&mut self, order: u8, page: PageId) {
        let _ours = keep_local();
        self.0[usize::from(order)].push(page);
    }

    /// Takes the pages of a range. `false`, and takes none, when one of them is not free.
    ///
    /// A log brings pages into use in the order in which they were taken: mostly the last is it. Else
    /// all free buffers are looked at.
    pub(super) fn take_range(&mut self, range: Range<u64>) -> bool {
        let _ours = keep_local();
        if range.end - range.start == 1 {
            let singles = &mut self.0[0];
            if let Some(at) = singles.iter().rposition(|page| page.0 == range.start) {
                singles.remove(at);
                return true;
            }
        }
        let (mut met, mut covered) = (Vec::new(), 0);
        for (order, pages) in self.0.iter_mut().enumerate() {
            pages.retain(|page| {
                let end = page.0 + (1 << order);
                let common = range.end.min(end).saturating_sub(range.start.max(page.0));
                covered += common;
                if common > 0 {
                    met.push(page.0..end);
                }
                common == 0
            });
        }
        let is_free = covered == range.end - range.start;
        for buffer in met {
            if is_free {
                self.put_range(buffer.start..range.start.max(buffer.start));
                self.put_range(range.end.min(buffer.end)..buffer.end);
            } else {
                self.put_range(buffer);
            }
        }
        is_free
    }

    /// Puts the pages of a range as buffers as large as can be.
    pub(super) fn put_range(&mut self, range: Range<u64>) {
        let mut at = range.start;
        while at < range.end {
            let order = (range.end - at).ilog2().min(ORDER_MAX.into()) as u8;
            self.put(order, PageId(at));
            at += 1 << order;
        }
    }

    /// Where the free pages begin that lie before `end` without a page in use between, and not before
    /// `least`.
    pub(super) fn tail(&self, least: u64, end: u64) -> u64 {
        let _ours = keep_local();
        let of_order = |(order, pages): (usize, &Vec<PageId>)| {
            let behind = pages.iter().map(|page| page.0).filter(|page| *page >= least);
            behind.map(|page| page..page + (1 << order)).collect::<Vec<_>>()
        };
        let mut buffers: Vec<Range<u64>> = self.0.iter().enumerate().flat_map(of_order).collect();
        buffers.sort_unstable_by_key(|buffer| std::cmp::Reverse(buffer.end));
        let adjoins =
            |at: u64, buffer: &Range<u64>| if buffer.end == at { buffer.start } else { at };
        buffers.iter().fold(end, adjoins)
    }

    /// Forgets the free buffers from `start` on, behind which the table ends now.
    pub(super) fn cut(&mut self, start: u64) {
        self.0.iter_mut().for_each(|pages| pages.retain(|page| page.0 < start));
    }

    /// All free buffers as the table file names them.
    pub(super) fn entries(&self) -> Vec<FreeBuffer> {
        let of_order = |(order, pages): (usize, &Vec<PageId>)| {
            pages.iter().map(move |page| FreeBuffer::new(*page, order as u8)).collect::<Vec<_>>()
        };
        self.0.iter().enumerate().flat_map(of_order).collect()
    }
}

/// A free buffer as the table file names it: `order << 56 | page`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FreeBuffer(pub(super) u64);

impl FreeBuffer {
    fn new(page: PageId, order: u8) -> FreeBuffer {
        FreeBuffer(page.0 | u64::from(order) << ORDER_SHIFT)
    }

    pub(super) fn page(self) -> PageId {
        PageId(self.0 & ((1 << ORDER_SHIFT) - 1))
    }

    /// `None` for an order that no buffer has.
    pub(super) fn order(self) -> Option<u8> {
        u8::try_from(self.0 >> ORDER_SHIFT).ok().filter(|order| *order <= ORDER_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn free_pages(lists: &FreeLists) -> Vec<u64> {
        let pages = lists.entries().into_iter().flat_map(|entry| {
            let first = entry.page().0;
            first..first + (1 << entry.order().expect("an order"))
        });
        let mut pages: Vec<u64> = pages.collect();
        pages.sort_unstable();
        pages
    }

    #[test]
    fn a_range_is_taken_out_of_whatever_buffers_it_lies_in_or_not_at_all() {
        let mut lists = FreeLists::default();
        lists.put(3, PageId(16));
        lists.put(0, PageId(24));
        lists.put(2, PageId(25));
        let all: Vec<u64> = (16..29).collect();
        assert!(!lists.take_range(15..17) && !lists.take_range(28..30) && !lists.take_range(2..3));
        assert_eq!(free_pages(&lists), all);
        // The end of one buffer, a page, and the start of another.
        assert!(lists.take_range(22..26) && !lists.take_range(22..23));
        assert_eq!(free_pages(&lists), [16, 17, 18, 19, 20, 21, 26, 27, 28]);
        assert!(lists.take_range(18..19) && lists.take_range(28..29));
        assert_eq!(free_pages(&lists), [16, 17, 19, 20, 21, 26, 27]);
    }

    #[test]
    fn the_tail_reaches_back_to_the_last_page_in_use_and_is_cut_off() {
        let mut lists = FreeLists::default();
        for (order, page) in [(0, 3), (2, 8), (0, 13), (1, 14), (0, 12)] {
            lists.put(order, PageId(page));
        }
        assert_eq!((lists.tail(0, 16), lists.tail(0, 17), lists.tail(0, 12)), (8, 17, 8));
        assert_eq!((lists.tail(12, 16), lists.tail(13, 16)), (12, 13));
        lists.cut(12);
        assert_eq!(free_pages(&lists), [3, 8, 9, 10, 11]);
        assert_eq!(FreeLists::default().tail(0, 7), 7);
    }

    #[test]
    fn an_entry_names_page_and_order() {
        let mut lists = FreeLists::default();
        lists.put(7, PageId(128));
        lists.put(0, PageId(3));
        let entries = lists.entries();
        let named: Vec<_> = entries.iter().map(|entry| (entry.page().0, entry.order())).collect();
        assert_eq!(named, [(3, Some(0)), (128, Some(7))]);
        assert_eq!(FreeBuffer(8 << ORDER_SHIFT | 1).order(), None);
    }
}
