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
    pages: Pages,
    queue: List,
}

impl Fifo {
    pub(super) fn new(pages: Pages) -> Fifo {
        Fifo { pages, queue: List::new() }
    }
}

impl Order for Fifo {
    fn create(pages: Pages, _resident: PageCount) -> Result<Fifo> {
        Ok(Fifo::new(pages))
    }

    fn pages(&self) -> &Pages {
        &self.pages
    }

    fn pages_mut(&mut self) -> &mut Pages {
        &mut self.pages
    }

    fn len(&self) -> u64 {
        self.queue.len()
    }

    fn arrive(&mut self, page: PageId, _how: Insert) {
        self.pages.push_newest(&mut self.queue, page, Place::Main);
    }

    fn come_back(&mut self, page: PageId, _victim: Place) {
        self.pages.push_newest(&mut self.queue, page, Place::Main);
    }

    fn unlink(&mut self, page: PageId) {
        self.pages.unlink(&mut self.queue, page);
    }

    fn next(&mut self) -> Option<(PageId, Place)> {
        self.pages.pop_oldest(&mut self.queue).map(|page| (page, Place::MainVictim))
    }

    fn advise(&mut self, page: PageId, hint: Hint) {
        match hint {
            Hint::Cold => self.pages.push_oldest(&mut self.queue, page, Place::Main),
            Hint::WillNeed => self.pages.push_newest(&mut self.queue, page, Place::Main),
        }
    }
}
