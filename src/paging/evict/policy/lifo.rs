//! Last in, first out: the page that came in last goes first.

use crate::base::error::Result;
use crate::base::units::{PageCount, PageId};
use crate::paging::evict::policy::api::{Hint, Insert};
use crate::paging::evict::policy::order::Order;
use crate::paging::evict::policy::pages::{List, Pages, Place};

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Lifo {
    pages: Pages,
    queue: List,
}

impl Lifo {
    pub(super) fn new(pages: Pages) -> Lifo {
        Lifo { pages, queue: List::new() }
    }
}

impl Order for Lifo {
    fn create(pages: Pages, _resident: PageCount) -> Result<Lifo> {
        Ok(Lifo::new(pages))
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
        self.pages.push_oldest(&mut self.queue, page, Place::Main);
    }

    fn come_back(&mut self, page: PageId, _victim: Place) {
        self.pages.push_oldest(&mut self.queue, page, Place::Main);
    }

    fn unlink(&mut self, page: PageId) {
        self.pages.unlink(&mut self.queue, page);
    }

    fn next(&mut self) -> Option<(PageId, Place)> {
        self.pages.pop_oldest(&mut self.queue).map(|page| (page, Place::MainVictim))
    }

    fn advise(&mut self, page: PageId, hint: Hint) {
        match hint {
            Hint::Cold => self.pages.push_newest(&mut self.queue, page, Place::Main),
            Hint::WillNeed => self.pages.push_oldest(&mut self.queue, page, Place::Main),
        }
    }
}
