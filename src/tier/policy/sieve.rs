//! SIEVE (Zhang et al., NSDI 2024) for pages without accessed bits.
//!
//! One list by arrival. The hand moves from the oldest to newer pages and tries each by letting
//! it cool. A page that comes back keeps its place, which the hand has passed by then; only a
//! whole lap later is it tried again. New pages arrive ahead of the hand, so that what is
//! touched once leaves soon. Turns, as in the clock, let a page skip laps.

use super::pages::{List, Pages, Place};
use super::{EvictionPolicy, Hint, Insert, PolicyKind, SKIPS_MAX, TURNS_MAX};
use crate::base::units::{PageCount, PageId};

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Sieve {
    pages: Pages,
    arrivals: List,
    /// The next page to try; `None`: start over at the oldest.
    hand: Option<PageId>,
}

impl Sieve {
    pub(super) fn new(pages: Pages) -> Sieve {
        Sieve { pages, arrivals: List::new(), hand: None }
    }

    /// Takes the next page without turns left off the list and moves the hand past it.
    fn advance(&mut self) -> Option<PageId> {
        let mut skips = 0;
        loop {
            let page = self.hand.or(self.arrivals.oldest())?;
            if skips == SKIPS_MAX || !self.pages.take_turn(page) {
                self.unlink(page);
                return Some(page);
            }
            self.hand = self.pages.newer_than(page);
            skips += 1;
        }
    }

    /// Takes a resident page off the list; a hand that points at it moves on.
    fn unlink(&mut self, page: PageId) {
        if self.hand.or(self.arrivals.oldest()) == Some(page) {
            self.hand = self.pages.newer_than(page);
        }
        self.pages.unlink(&mut self.arrivals, page);
    }
}

impl EvictionPolicy for Sieve {
    fn kind(&self) -> PolicyKind {
        PolicyKind::Sieve
    }

    fn resident(&self) -> PageCount {
        PageCount(self.arrivals.len())
    }

    fn inserted(&mut self, page: PageId, _how: Insert) {
        if !self.pages.place(page).is_resident() {
            self.pages.push_newest(&mut self.arrivals, page, Place::Main);
        }
    }

    fn retouched(&mut self, page: PageId) {
        if self.pages.place(page).is_victim() {
            self.pages.reward(page, TURNS_MAX);
            match self.hand {
                Some(hand) => {
                    self.pages.push_older_than(&mut self.arrivals, hand, page, Place::Main);
                }
                None => self.pages.push_newest(&mut self.arrivals, page, Place::Main),
            }
        }
    }

    fn evicted(&mut self, page: PageId) {
        if self.pages.place(page).is_victim() {
            self.pages.forget(page);
        }
    }

    fn removed(&mut self, page: PageId) {
        if self.pages.place(page).is_resident() {
            self.unlink(page);
        }
        self.pages.forget(page);
    }

    fn victims(&mut self, want: PageCount, out: &mut dyn FnMut(PageId)) -> PageCount {
        let named = want.get().min(self.arrivals.len());
        for _ in 0..named {
            let page = self.advance().expect("bounded by the length above");
            self.pages.set_place(page, Place::MainVictim);
            out(page);
        }
        PageCount(named)
    }

    fn advise(&mut self, page: PageId, hint: Hint) {
        if !self.pages.place(page).is_resident() {
            return;
        }
        self.unlink(page);
        match hint {
            Hint::Cold => {
                self.pages.forget(page);
                match self.hand {
                    Some(hand) => {
                        self.pages.push_older_than(&mut self.arrivals, hand, page, Place::Main);
                    }
                    None => self.pages.push_oldest(&mut self.arrivals, page, Place::Main),
                }
                self.hand = Some(page);
            }
            Hint::WillNeed => self.pages.push_newest(&mut self.arrivals, page, Place::Main),
        }
    }

    fn resize(&mut self, _resident: PageCount) {}
}
