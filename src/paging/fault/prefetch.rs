//! Prefetch: what faults and requests lead to is read before it is touched.

use crate::base::units::PageId;
use crate::paging::page::word::State;
use crate::paging::pager::Pager;
use crate::paging::readahead::{FaultOn, Window};

impl Pager {
    /// What to read ahead after a fault on a page.
    pub(super) fn next_window(&self, page: PageId, on: FaultOn) -> Option<Window> {
        let chunk = if self.reads_chunks { self.pages_per_chunk() } else { 1 };
        let is_stored = |page: u64| {
            page < self.page_count().0 && self.word(PageId(page)).load().state() == State::Stored
        };
        self.readahead.after_fault(page, on, self.budget.limit(), chunk, &is_stored)
    }
}
