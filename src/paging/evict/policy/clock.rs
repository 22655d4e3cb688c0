//! Clock (second chance) for pages without accessed bits.
//!
//! Where a clock's hand reads and clears an accessed bit, this one unmaps the page and lets it
//! cool: a touch in that time is the bit that was set. The page comes back at the new end, as
//! behind the hand, and earns turns: laps of the hand during which it is not tried again, one
//! more with every return in a row (a generalised clock). Turns save minor faults of hot pages.

use crate::base::error::Result;
use crate::base::units::{PageCount, PageId};
use crate::paging::evict::policy::api::{Hint, Insert, TURNS_MAX};
use crate::paging::evict::policy::order::Order;
use crate::paging::evict::policy::pages::{List, Pages, Place};

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Clock {
    /// From the hand (oldest) round to the page it passed last (newest).
    lap: List,
}

impl Order for Clock {
    fn create(_pages: &Pages, _resident: PageCount) -> Result<Clock> {
        Ok(Clock { lap: List::new() })
    }

    fn len(&self) -> u64 {
        self.lap.len()
    }

    fn arrive(&mut self, pages: &mut Pages, page: PageId, _how: Insert) {
        pages.push_newest(&mut self.lap, page, Place::Main);
    }

    fn come_back(&mut self, pages: &mut Pages, page: PageId, _victim: Place) {
        pages.reward(page, TURNS_MAX);
        pages.push_newest(&mut self.lap, page, Place::Main);
    }

    fn unlink(&mut self, pages: &mut Pages, page: PageId) {
        pages.unlink(&mut self.lap, page);
    }

    fn next(&mut self, pages: &mut Pages) -> Option<(PageId, Place)> {
        pages.pop_without_turns(&mut self.lap).map(|page| (page, Place::MainVictim))
    }

    fn advise(&mut self, pages: &mut Pages, page: PageId, hint: Hint) {
        match hint {
            Hint::Cold => {
                pages.forget(page);
                pages.push_oldest(&mut self.lap, page, Place::Main);
            }
            Hint::WillNeed => pages.push_newest(&mut self.lap, page, Place::Main),
        }
    }
}
