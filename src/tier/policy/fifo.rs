//! First in, first out: the page that came in first goes first, as in UMap.
//!
//! A page touched while it cools starts anew at the new end ("segmented FIFO", as in VMS);
//! with a cooling share of zero this is UMap's order exactly.

use super::pages::{List, Pages, Place};
use super::{EvictionPolicy, Hint, Insert, PolicyKind};
use crate::base::units::{PageCount, PageId};

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

impl EvictionPolicy for Fifo {
    fn kind(&self) -> PolicyKind {
        PolicyKind::Fifo
    }

    fn resident(&self) -> PageCount {
        PageCount(self.queue.len())
    }

    fn inserted(&mut self, page: PageId, _how: Insert) {
        if !self.pages.place(page).is_resident() {
            self.pages.push_newest(&mut self.queue, page, Place::Main);
        }
    }

    fn retouched(&mut self, page: PageId) {
        if self.pages.place(page).is_victim() {
            self.pages.push_newest(&mut self.queue, page, Place::Main);
        }
    }

    fn evicted(&mut self, page: PageId) {
        if self.pages.place(page).is_victim() {
            self.pages.forget(page);
        }
    }

    fn removed(&mut self, page: PageId) {
        if self.pages.place(page).is_resident() {
            self.pages.unlink(&mut self.queue, page);
        }
        self.pages.forget(page);
    }

    fn victims(&mut self, want: PageCount, out: &mut dyn FnMut(PageId)) -> PageCount {
        let named = want.get().min(self.queue.len());
        for _ in 0..named {
            let page = self.queue.oldest().expect("bounded by the length above");
            self.pages.unlink(&mut self.queue, page);
            self.pages.set_place(page, Place::MainVictim);
            out(page);
        }
        PageCount(named)
    }

    fn advise(&mut self, page: PageId, hint: Hint) {
        if self.pages.place(page).is_resident() {
            self.pages.unlink(&mut self.queue, page);
            match hint {
                Hint::Cold => self.pages.push_oldest(&mut self.queue, page, Place::Main),
                Hint::WillNeed => self.pages.push_newest(&mut self.queue, page, Place::Main),
            }
        }
    }

    fn resize(&mut self, _resident: PageCount) {}
}
