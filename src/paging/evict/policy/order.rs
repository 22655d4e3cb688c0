//! What all policies have in common: which call fits which page.
//!
//! An [`Order`] is what makes one policy different from another: where an arrival goes, which page
//! goes next. [`Ordered`] turns it into an [`EvictionPolicy`]: it looks at the page's place first,
//! so that a call that does not fit does nothing, and an order is never asked for nonsense.

use crate::base::error::Result;
use crate::base::units::{PageCount, PageId};
use crate::paging::evict::policy::api::{EvictionPolicy, Hint, Insert};
use crate::paging::evict::policy::pages::{Pages, Place};
use std::fmt::Debug;

/// The order in which pages go. It has lists; what is known of each page is in `pages`, which every
/// call gets.
pub(super) trait Order: Send + Debug {
    /// The order of no pages yet, of which about `resident` will fit into RAM.
    ///
    /// # Errors
    /// When the kernel refuses a mapping.
    fn create(pages: &Pages, resident: PageCount) -> Result<Self>
    where
        Self: Sized;

    /// Pages on the lists.
    fn len(&self) -> u64;

    /// Lists a page that is on no list and no victim; it may be a ghost.
    fn arrive(&mut self, pages: &mut Pages, page: PageId, how: Insert);

    /// Lists a victim that was touched before it left.
    fn come_back(&mut self, pages: &mut Pages, page: PageId, victim: Place);

    /// A victim left RAM.
    fn leave(&mut self, pages: &mut Pages, page: PageId) {
        pages.forget(page);
    }

    /// Takes a page off its list. Its place is `Unknown` then.
    fn unlink(&mut self, pages: &mut Pages, page: PageId);

    /// Takes the next victim off its list and says which of the places of victims is its; `None`
    /// only when no page is listed.
    fn next(&mut self, pages: &mut Pages) -> Option<(PageId, Place)>;

    /// Lists a page, which was just unlinked, again, where a hint says.
    fn advise(&mut self, pages: &mut Pages, page: PageId, hint: Hint);

    /// About `resident` pages fit into RAM from now on.
    fn resize(&mut self, _resident: PageCount) {}
}

/// A policy that follows an [`Order`].
#[derive(Debug)]
pub(super) struct Ordered<T> {
    pages: Pages,
    order: T,
}

impl<T: Order> Ordered<T> {
    /// # Errors
    /// When the kernel refuses a mapping.
    pub(super) fn new(pages: Pages, resident: PageCount) -> Result<Ordered<T>> {
        let order = T::create(&pages, resident)?;
        Ok(Ordered { pages, order })
    }
}

impl<T: Order> EvictionPolicy for Ordered<T> {
    fn resident(&self) -> PageCount {
        PageCount(self.order.len())
    }

    fn inserted(&mut self, page: PageId, how: Insert) {
        if !self.pages.place(page).is_resident() {
            self.order.arrive(&mut self.pages, page, how);
        }
    }

    fn retouched(&mut self, page: PageId) {
        let place = self.pages.place(page);
        if place.is_victim() {
            self.order.come_back(&mut self.pages, page, place);
        }
    }

    fn evicted(&mut self, page: PageId) {
        if self.pages.place(page).is_victim() {
            self.order.leave(&mut self.pages, page);
        }
    }

    fn bypassed(&mut self, page: PageId) {
        if !self.pages.place(page).is_resident() {
            self.pages.set_place(page, Place::SmallVictim);
        }
    }

    fn removed(&mut self, page: PageId) {
        if self.pages.place(page).is_resident() {
            self.order.unlink(&mut self.pages, page);
        }
        self.pages.forget(page);
    }

    fn victims(&mut self, want: PageCount, out: &mut dyn FnMut(PageId)) -> PageCount {
        let named = want.min(self.resident());
        for _ in 0..named.get() {
            let next = self.order.next(&mut self.pages);
            let (page, place) = next.expect("bounded by the pages listed above");
            self.pages.set_place(page, place);
            out(page);
        }
        named
    }

    fn released(&mut self, first: PageId, count: PageCount) {
        let is_listed = |page| self.pages.place(PageId(page)).is_resident();
        let end = (first.0 + count.0).min(self.pages.count().0);
        if !(first.0..end).any(is_listed) {
            self.pages.release(first, count);
        }
    }

    fn advise(&mut self, page: PageId, hint: Hint) {
        if self.pages.place(page).is_resident() {
            self.order.unlink(&mut self.pages, page);
            self.order.advise(&mut self.pages, page, hint);
        }
    }

    fn resize(&mut self, resident: PageCount) {
        self.order.resize(resident);
    }
}
