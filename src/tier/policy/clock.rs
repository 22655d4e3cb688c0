//! Clock (second chance) for pages without accessed bits.
//!
//! Where a clock's hand reads and clears an accessed bit, this one unmaps the page and lets it
//! cool: a touch in that time is the bit that was set. The page comes back at the new end, as
//! behind the hand, and earns turns: laps of the hand during which it is not tried again, one
//! more with every return in a row (a generalised clock). Turns save minor faults of hot pages.

use super::pages::{List, Pages, Place};
use super::{EvictionPolicy, Hint, Insert, PolicyKind, SKIPS_MAX, TURNS_MAX};
use crate::base::units::{PageCount, PageId};

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Clock {
    pages: Pages,
    /// From the hand (oldest) round to the page it passed last (newest).
    lap: List,
}

impl Clock {
    pub(super) fn new(pages: Pages) -> Clock {
        Clock { pages, lap: List::new() }
    }

    /// Takes the next page without turns left off the list.
    fn advance(&mut self) -> Option<PageId> {
        for _ in 0..SKIPS_MAX {
            let page = self.lap.oldest()?;
            self.pages.unlink(&mut self.lap, page);
            if !self.pages.take_turn(page) {
                return Some(page);
            }
            self.pages.push_newest(&mut self.lap, page, Place::Main);
        }
        let page = self.lap.oldest()?;
        self.pages.unlink(&mut self.lap, page);
        Some(page)
    }
}

impl EvictionPolicy for Clock {
    fn kind(&self) -> PolicyKind {
        PolicyKind::Clock
    }

    fn resident(&self) -> PageCount {
        PageCount(self.lap.len())
    }

    fn inserted(&mut self, page: PageId, _how: Insert) {
        if !self.pages.place(page).is_resident() {
            self.pages.push_newest(&mut self.lap, page, Place::Main);
        }
    }

    fn retouched(&mut self, page: PageId) {
        if self.pages.place(page).is_victim() {
            self.pages.reward(page, TURNS_MAX);
            self.pages.push_newest(&mut self.lap, page, Place::Main);
        }
    }

    fn evicted(&mut self, page: PageId) {
        if self.pages.place(page).is_victim() {
            self.pages.forget(page);
        }
    }

    fn removed(&mut self, page: PageId) {
        if self.pages.place(page).is_resident() {
            self.pages.unlink(&mut self.lap, page);
        }
        self.pages.forget(page);
    }

    fn victims(&mut self, want: PageCount, out: &mut dyn FnMut(PageId)) -> PageCount {
        let named = want.get().min(self.lap.len());
        for _ in 0..named {
            let page = self.advance().expect("bounded by the length above");
            self.pages.set_place(page, Place::MainVictim);
            out(page);
        }
        PageCount(named)
    }

    fn advise(&mut self, page: PageId, hint: Hint) {
        if self.pages.place(page).is_resident() {
            self.pages.unlink(&mut self.lap, page);
            match hint {
                Hint::Cold => {
                    self.pages.forget(page);
                    self.pages.push_oldest(&mut self.lap, page, Place::Main);
                }
                Hint::WillNeed => self.pages.push_newest(&mut self.lap, page, Place::Main),
            }
        }
    }

    fn resize(&mut self, _resident: PageCount) {}
}
