//! SIEVE (Zhang et al., NSDI 2024) for pages without accessed bits.
//!
//! One list by arrival. The hand moves from the oldest to newer pages and tries each by letting
//! it cool. A page that comes back keeps its place, which the hand has passed by then; only a
//! whole lap later is it tried again. New pages arrive ahead of the hand, so that what is
//! touched once leaves soon. Turns, as in the clock, let a page skip laps.

use crate::base::error::Result;
use crate::base::units::{PageCount, PageId};
use crate::paging::evict::policy::api::{Hint, Insert, SKIPS_MAX, TURNS_MAX};
use crate::paging::evict::policy::order::Order;
use crate::paging::evict::policy::pages::{List, Pages, Place};

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Sieve {
    arrivals: List,
    /// The next page to try; `None`: start over at the oldest.
    hand: Option<PageId>,
}

impl Sieve {
    /// Lists a page just behind the hand.
    fn push_behind(&mut self, pages: &mut Pages, hand: PageId, page: PageId) {
        pages.push_older_than(&mut self.arrivals, hand, page, Place::Main);
    }
}

impl Order for Sieve {
    fn create(_pages: &Pages, _resident: PageCount) -> Result<Sieve> {
        Ok(Sieve { arrivals: List::new(), hand: None })
    }

    fn len(&self) -> u64 {
        self.arrivals.len()
    }

    fn arrive(&mut self, pages: &mut Pages, page: PageId, _how: Insert) {
        pages.push_newest(&mut self.arrivals, page, Place::Main);
    }

    fn come_back(&mut self, pages: &mut Pages, page: PageId, _victim: Place) {
        pages.reward(page, TURNS_MAX);
        match self.hand {
            Some(hand) => self.push_behind(pages, hand, page),
            None => pages.push_newest(&mut self.arrivals, page, Place::Main),
        }
    }

    /// A hand that points at the page moves on.
    fn unlink(&mut self, pages: &mut Pages, page: PageId) {
        if self.hand.or(self.arrivals.oldest()) == Some(page) {
            self.hand = pages.newer_than(page);
        }
        pages.unlink(&mut self.arrivals, page);
    }

    /// The next page without turns left, if one is near; the hand moves past it.
    fn next(&mut self, pages: &mut Pages) -> Option<(PageId, Place)> {
        let mut skips = 0;
        loop {
            let page = self.hand.or(self.arrivals.oldest())?;
            if skips == SKIPS_MAX || !pages.take_turn(page) {
                self.unlink(pages, page);
                return Some((page, Place::MainVictim));
            }
            self.hand = pages.newer_than(page);
            skips += 1;
        }
    }

    fn advise(&mut self, pages: &mut Pages, page: PageId, hint: Hint) {
        match hint {
            Hint::Cold => {
                pages.forget(page);
                match self.hand {
                    Some(hand) => self.push_behind(pages, hand, page),
                    None => pages.push_oldest(&mut self.arrivals, page, Place::Main),
                }
                self.hand = Some(page);
            }
            Hint::WillNeed => pages.push_newest(&mut self.arrivals, page, Place::Main),
        }
    }
}
