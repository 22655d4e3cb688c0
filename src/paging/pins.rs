//! Pins: pages that stay in memory while a guard lives.
//!
//! A page counts its pins in its word, and the page table counts the pages that have one.
#![expect(unsafe_code, reason = "touches pages")]

use crate::base::error::{Error, Result};
use crate::base::sync::{AtomicU32, Ordering};
use crate::base::units::{PageCount, PageId};
use crate::paging::kernel_filled;
use crate::paging::page::word::State;
use crate::paging::page::{PAGE, backoff};
use crate::paging::pager::Pager;
use std::sync::{Arc, Mutex, PoisonError};

/// Keeps pages resident while it lives, see [`Region::pin`](crate::region::Region::pin).
#[must_use = "the pages are pinned while the guard lives"]
#[derive(Debug)]
pub struct PinGuard<'r> {
    pub(in crate::paging) pins: &'r Pins,
    pub(in crate::paging) first: PageId,
    pub(in crate::paging) count: PageCount,
}

impl Drop for PinGuard<'_> {
    fn drop(&mut self) {
        // A forked child has no pins, and not always the page table.
        if self.pins.pager.table().is_here() {
            let _one = self.pins.lock.lock().unwrap_or_else(PoisonError::into_inner);
            self.pins.end(self.first, self.count);
        }
    }
}

/// See [module](self).
#[derive(Debug)]
pub(in crate::paging) struct Pins {
    pager: Arc<Pager>,
    /// Held while pins are added or ended.
    lock: Mutex<()>,
}

impl Pins {
    pub(in crate::paging) fn new(pager: Arc<Pager>) -> Pins {
        Pins { pager, lock: Mutex::new(()) }
    }

    /// Pins pages, for [`Region::pin`](crate::paging::region::Region::pin), which names the errors.
    pub(in crate::paging) fn pin(&self, first: PageId, count: PageCount) -> Result<()> {
        // One at a time: the sum of the pins stays below the bound.
        let _one = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        let pinned = self.pager.table().pinned();
        let room = self.pager.budget().limit().0 / PAGE as u64 * 3 / 4;
        // Pages that are pinned already cost nothing more; a range of more than can be pinned is not
        // looked through.
        let new = if count.0 > room { count.0 } else { self.unpinned(first, count) };
        if pinned.saturating_add(new) > room {
            let reason = format!("{} pinned pages of {room} possible", pinned.saturating_add(new));
            return Err(Error::LimitExceeded { reason });
        }
        for page in (first.0..first.0 + count.0).map(PageId) {
            if let Err(error) = self.pin_page(page) {
                self.end(first, PageCount(page.0 - first.0));
                return Err(error);
            }
        }
        Ok(())
    }

    /// Ends a pin of each page, if all have one.
    ///
    /// # Errors
    /// [`Error::BadRange`].
    pub(in crate::paging) fn unpin(&self, first: PageId, count: PageCount) -> Result<()> {
        let _one = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        let all = (first.0..first.0 + count.0)
            .map(PageId)
            .all(|page| self.pager.word(page).load().pins() > 0);
        if !all {
            return Err(Error::BadRange { reason: "is not pinned".into() });
        }
        self.end(first, count);
        Ok(())
    }

    /// Pages of a range without a pin.
    fn unpinned(&self, first: PageId, count: PageCount) -> u64 {
        let pages = (first.0..first.0 + count.0).map(PageId);
        pages.filter(|page| self.pager.word(*page).load().pins() == 0).count() as u64
    }

    fn pin_page(&self, page: PageId) -> Result<()> {
        loop {
            let word = self.pager.word(page).load();
            if word.state() != State::Resident {
                if !kernel_filled::close_around(self.pager.memory(), page) {
                    let reason = "the process has too many mappings (vm.max_map_count)".to_owned();
                    return Err(Error::LimitExceeded { reason });
                }
                if !self.pager.memory().owns_page(page) {
                    let reason = "the program has mapped or unmapped memory there";
                    return Err(Error::BadRange { reason: reason.into() });
                }
                touch(self.pager.table().addr(page) as *const u8);
                std::thread::yield_now();
                continue;
            }
            let Some(pinned) = word.pinned() else {
                let reason = "a page has 255 pins already".to_owned();
                return Err(Error::LimitExceeded { reason });
            };
            // Counted first: a discard that takes the pins away again finds the page counted.
            let new = u64::from(word.pins() == 0);
            self.pager.table().count_pinned(new);
            if self.pager.word(page).try_change(word, pinned).is_ok() {
                // A system call that writes to a protected page would fail with EFAULT.
                if word.protected() && !self.pager.mapper().serves_kernel_faults() {
                    touch_to_write(self.pager.table().addr(page) as *const AtomicU32);
                }
                return Ok(());
            }
            self.pager.table().count_unpinned(new);
        }
    }

    /// Ends one pin of each page.
    fn end(&self, first: PageId, count: PageCount) {
        for page in (first.0..first.0 + count.0).map(PageId) {
            let mut spins = 0;
            loop {
                let word = self.pager.word(page).load();
                // A pinned page is `Resident`, or for microseconds `Moving`.
                if word.state() == State::Moving {
                    backoff(&mut spins);
                    continue;
                }
                let Some(unpinned) = word.unpinned() else { break };
                if self.pager.word(page).try_change(word, unpinned).is_ok() {
                    let last = u64::from(unpinned.pins() == 0);
                    self.pager.table().count_unpinned(last);
                    break;
                }
            }
        }
    }
}

/// Reads one byte of far memory, so that its page comes in.
fn touch(ptr: *const u8) {
    // SAFETY: the address lies in the region, which is readable for as long as it exists; a
    // volatile read of a byte others may write is discarded.
    let _ = unsafe { ptr.read_volatile() };
}

/// Writes a word of far memory as it is, so that its page's protection is lifted.
fn touch_to_write(word: *const AtomicU32) {
    // SAFETY: as above, and aligned as pages are; others use it through raw pointers only.
    let word = unsafe { &*word };
    let mut seen = word.load(Ordering::Relaxed);
    // Not `fetch_add(0)`, which compilers replace by a fence and a load.
    while let Err(now) = word.compare_exchange(seen, seen, Ordering::Relaxed, Ordering::Relaxed) {
        seen = now;
    }
}
