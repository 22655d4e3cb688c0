//! The eviction policy: which resident page goes next.
//!
//! The pager tells the [`Policy`] what becomes resident and what is discarded, and asks
//! it for victims. Userfaultfd shows no accessed bits, so hits on resident pages are invisible:
//! instead a victim is unmapped and kept in RAM a little while ("cooling"). A touch in that time
//! costs a minor fault and comes back as [`retouched`](Policy::retouched); otherwise the
//! page leaves and is [`evicted`](Policy::evicted). How it was chosen among others:
//! `book/src/design/eviction.md`.
//!
//! ```text
//!              inserted                 victims                evicted
//!   (absent) ------------> resident ---------------> cooling -----------> (absent, maybe a ghost)
//!                             ^----------------------'  |
//!                                    retouched          '-- removed from any state: forgotten
//! ```
//! [`Policy`] looks at the page's place first, so that a call that does not fit does nothing; in which
//! order pages go is decided in `tenure`. Uses `base` and `meta`; owned by the pager, under its policy lock.
//!
//! # Invariants
//! 1. A page is on at most one list; [`victims`](Policy::victims) takes what it names
//!    off its list, so that no page is named twice unless it came back in between.
//! 2. After construction nothing allocates and every call is O(1) (`victims`: O(1) a victim).

pub(in crate::paging) mod bag;
pub(in crate::paging) mod events;
pub(in crate::paging) mod pages;
pub(in crate::paging) mod queues;
pub(in crate::paging) mod tally;
pub(in crate::paging) mod tenure;
#[cfg(test)]
mod tests;

pub use crate::paging::evict::policy::events::{Hint, Insert};

use crate::base::error::Result;
pub use crate::base::units::PageCount;
use crate::base::units::PageId;
use crate::paging::evict::policy::pages::{Place, PolicyPages};
use crate::paging::evict::policy::tenure::Tenure;

/// Decides which resident page goes next.
///
/// A policy that names a wrong page costs time, never soundness, because the pager
/// checks each victim's state. In turn a call that does not fit the page's state (such as
/// `evicted` of a page that was no victim) does nothing.
///
/// # Panics
/// Every method that takes a page may panic when it lies outside of the region that the policy
/// was built for.
///
/// # Examples
/// ```
/// use farheap::region::policy::{Insert, PageCount, Policy};
/// use farheap::PageId;
///
/// let mut policy = Policy::new(PageCount(1_000), PageCount(2))?;
/// policy.inserted(PageId(7), Insert::Fresh);
/// policy.inserted(PageId(3), Insert::Filled);
/// let mut victims = Vec::new();
/// policy.victims(PageCount(2), |page| victims.push(page));
/// assert_eq!(victims.len(), 2);
/// policy.evicted(PageId(7));
/// # Ok::<(), farheap::Error>(())
/// ```
#[derive(Debug)]
pub struct Policy {
    pages: PolicyPages,
    order: Tenure,
}

impl Policy {
    /// Builds the policy of a region of `pages` pages of which about `resident` fit into RAM.
    ///
    /// Its memory is mappings of up to 5 bytes a page that take RAM only for pages ever
    /// inserted, and 4 to 12 more for those that were listed at once.
    ///
    /// # Errors
    /// [`BadRange`](crate::Error::BadRange) for 2^31 - 1 pages or more, [`Os`](crate::Error::Os) when the
    /// kernel refuses the mapping.
    pub fn new(pages: PageCount, resident: PageCount) -> Result<Policy> {
        let pages = PolicyPages::new(pages)?;
        let order = Tenure::new(&pages, resident)?;
        Ok(Policy { pages, order })
    }

    /// Returns how many pages are on the lists: inserted, and neither removed nor named as victims.
    #[must_use]
    pub fn resident(&self) -> PageCount {
        PageCount(self.order.len())
    }

    /// Notes that an absent page became resident. Returns how many pages have left since it left itself, if it is
    /// remembered.
    pub fn inserted(&mut self, page: PageId, how: Insert) -> Option<u64> {
        let is_listed = self.pages.place(page).is_resident();
        if is_listed { None } else { self.order.arrive(&mut self.pages, page, how) }
    }

    /// Notes that a victim was touched before it left: it is resident again, and known hot.
    pub fn retouched(&mut self, page: PageId) {
        let place = self.pages.place(page);
        if place.is_victim() {
            self.order.come_back(&mut self.pages, page, place);
        }
    }

    /// Notes that a victim left RAM. The policy may remember it as a ghost.
    pub fn evicted(&mut self, page: PageId) {
        if self.pages.place(page).is_victim() {
            self.order.leave(&mut self.pages, page);
        }
    }

    /// Notes that a page is on its way out that the policy has not named. One that was on no list counts as fresh.
    pub fn bypassed(&mut self, page: PageId) {
        let is_listed = self.pages.place(page).is_resident();
        let was_read = is_listed && self.pages.was_read(page);
        if is_listed {
            self.order.unlink(&mut self.pages, page);
        }
        self.pages.set_place(page, Place::SmallVictim);
        self.pages.set_read(page, was_read);
    }

    /// True if a page that the policy remembers was read when it came in.
    pub(in crate::paging) fn was_read(&self, page: PageId) -> bool {
        self.pages.was_read(page)
    }

    /// How many pages have left since a page did that is remembered.
    pub(in crate::paging) fn absence(&self, page: PageId) -> Option<u64> {
        self.order.absence(&self.pages, page)
    }

    /// Numbers of 32 bits that the lists take.
    pub(in crate::paging) fn list_numbers(&self) -> u64 {
        self.order.numbers()
    }

    /// Forgets a page whose contents were dropped, wherever it is.
    pub fn removed(&mut self, page: PageId) {
        if self.pages.place(page).is_resident() {
            self.order.unlink(&mut self.pages, page);
        }
        self.pages.forget(page);
    }

    /// Names up to `want` victims and returns how many. It names fewer only when no page is
    /// resident any more. A page named is not resident in the policy's eyes from then on.
    pub fn victims(&mut self, want: PageCount, mut out: impl FnMut(PageId)) -> PageCount {
        let named = want.min(self.resident());
        // What is resident besides, as chunks that the kernel fills, takes the rest of the limit.
        self.order.resize(self.resident());
        for _ in 0..named.get() {
            let next = self.order.next(&mut self.pages);
            let (page, place) = next.expect("bounded by the pages listed above");
            self.pages.set_place(page, place);
            out(page);
        }
        named
    }

    /// Forgets all pages of a range and gives back what memory it keeps of them alone, if none of
    /// them is resident.
    pub fn released(&mut self, first: PageId, count: PageCount) {
        let is_listed = |page| self.pages.place(PageId(page)).is_resident();
        let end = (first.0 + count.0).min(self.pages.count().0);
        if !(first.0..end).any(is_listed) {
            self.pages.release(first, count);
        }
    }

    /// Takes a hint about a resident page; about any other page it does nothing.
    pub fn advise(&mut self, page: PageId, hint: Hint) {
        if self.pages.place(page).is_resident() {
            self.order.unlink(&mut self.pages, page);
            self.order.advise(&mut self.pages, page, hint);
        }
    }

    /// Notes that about `resident` pages fit into RAM from now on.
    pub fn resize(&mut self, resident: PageCount) {
        self.order.resize(resident);
    }
}
