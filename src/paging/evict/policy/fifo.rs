//! First in, first out: the page that came in first goes first, as in UMap.
//!
//! A page touched while it cools starts anew at the new end ("segmented FIFO", as in VMS);
//! with a cooling share of zero this is UMap's order exactly.

use crate::base::error::Result;
use crate::base::units::{PageCount, PageId};
use crate::paging::evict::policy::api::{Hint, Insert};
use crate::paging::evict::policy::order::Order;
use crate::paging::evict::policy::pages::{List, Pages, Place};

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Fifo {
    queue: List,
}

impl Order for Fifo {
    fn create(_pages: &Pages, _resident: PageCount) -> Result<Fifo> {
        Ok(Fifo { queue: List::new() })
    }

    fn len(&self) -> u64 {
        self.queue.len()
    }

    fn arrive(&mut self, pages: &mut Pages, page: PageId, _how: Insert) {
        pages.push_newest(&mut self.queue, page, Place::Main);
    }

    fn come_back(&mut self, pages: &mut Pages, page: PageId, _victim: Place) {
        pages.push_newest(&mut self.queue, page, Place::Main);
    }

    fn unlink(&mut self, pages: &mut Pages, page: PageId) {
        pages.unlink(&mut self.queue, page);
    }

    fn next(&mut self, pages: &mut Pages) -> Option<(PageId, Place)> {
        pages.pop_oldest(&mut self.queue).map(|page| (page, Place::MainVictim))
    }

    fn advise(&mut self, pages: &mut Pages, page: PageId, hint: Hint) {
        match hint {
            Hint::Cold => pages.push_oldest(&mut self.queue, page, Place::Main),
            Hint::WillNeed => pages.push_newest(&mut self.queue, page, Place::Main),
        }
    }
}
