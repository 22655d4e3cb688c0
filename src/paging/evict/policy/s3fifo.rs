//! S3-FIFO (Yang et al., SOSP 2023) for pages without accessed bits.
//!
//! New pages enter a small probation queue; what leaves it untouched becomes a ghost, and a
//! ghost that is read again soon enters the main queue at once. So a scan passes through the
//! small queue and leaves the main one alone. A touch while cooling is the sign of use that the
//! original reads from its counters: it promotes to the main queue, and there earns turns.
//!
//! Ghosts need neither queue nor hash: a page's word holds the time it left, counted in pages
//! that left, and a ghost older than the ghost queue would be long counts as forgotten.

use crate::base::error::Result;
use crate::base::units::{PageCount, PageId};
use crate::paging::evict::policy::api::{Hint, Insert, TURNS_MAX};
use crate::paging::evict::policy::order::Order;
use crate::paging::evict::policy::pages::{List, Pages, Place};

/// The probation queue's share of the resident pages, in percent.
const SMALL_PCT: u64 = 10;

/// How many ghosts are remembered, in percent of the resident pages.
const GHOSTS_PCT: u64 = 90;

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct S3Fifo {
    small: List,
    main: List,
    /// Pages that a hint gave up; they go before all others.
    cold: List,
    small_target: u64,
    ghosts_max: u64,
    /// Pages that became ghosts so far: the clock of [`Pages::ghost_time`].
    time: u64,
}

impl S3Fifo {
    /// Whether `page` left so lately that it should not have.
    fn is_live_ghost(&self, pages: &Pages, page: PageId) -> bool {
        pages.ghost_time(page).is_some_and(|left| self.time - left <= self.ghosts_max)
    }
}

impl Order for S3Fifo {
    fn create(_pages: &Pages, resident: PageCount) -> Result<S3Fifo> {
        let mut order = S3Fifo {
            small: List::new(),
            main: List::new(),
            cold: List::new(),
            small_target: 0,
            ghosts_max: 0,
            time: 0,
        };
        order.resize(resident);
        Ok(order)
    }

    fn len(&self) -> u64 {
        self.small.len() + self.main.len() + self.cold.len()
    }

    fn arrive(&mut self, pages: &mut Pages, page: PageId, how: Insert) {
        // Readahead's guess is no proof of use: it starts on probation, ghost or not.
        if how == Insert::Filled && self.is_live_ghost(pages, page) {
            pages.push_newest(&mut self.main, page, Place::Main);
        } else {
            pages.push_newest(&mut self.small, page, Place::Small);
        }
    }

    fn come_back(&mut self, pages: &mut Pages, page: PageId, victim: Place) {
        if victim == Place::MainVictim {
            pages.reward(page, TURNS_MAX);
        }
        pages.push_newest(&mut self.main, page, Place::Main);
    }

    fn leave(&mut self, pages: &mut Pages, page: PageId) {
        pages.set_ghost(page, self.time);
        self.time += 1;
    }

    fn unlink(&mut self, pages: &mut Pages, page: PageId) {
        match pages.place(page) {
            Place::Small => pages.unlink(&mut self.small, page),
            Place::Main => pages.unlink(&mut self.main, page),
            Place::Cold => pages.unlink(&mut self.cold, page),
            other => unreachable!("{page} is on no queue: {other:?}"),
        }
    }

    fn next(&mut self, pages: &mut Pages) -> Option<(PageId, Place)> {
        if let Some(page) = pages.pop_oldest(&mut self.cold) {
            return Some((page, Place::SmallVictim));
        }
        let from_small = self.small.len() >= self.small_target && self.small.len() > 0;
        if from_small || self.main.len() == 0 {
            return pages.pop_oldest(&mut self.small).map(|page| (page, Place::SmallVictim));
        }
        pages.pop_without_turns(&mut self.main).map(|page| (page, Place::MainVictim))
    }

    fn advise(&mut self, pages: &mut Pages, page: PageId, hint: Hint) {
        match hint {
            Hint::Cold => {
                pages.forget(page);
                pages.push_newest(&mut self.cold, page, Place::Cold);
            }
            Hint::WillNeed => pages.push_newest(&mut self.main, page, Place::Main),
        }
    }

    fn resize(&mut self, resident: PageCount) {
        self.small_target = (resident.get() * SMALL_PCT / 100).max(1);
        self.ghosts_max = resident.get() * GHOSTS_PCT / 100;
    }
}
