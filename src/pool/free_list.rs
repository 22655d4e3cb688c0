//! Free buffers by order.

use super::latch::ORDER_MAX;
use crate::base::local::keep_local;
use crate::base::units::PageId;

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
