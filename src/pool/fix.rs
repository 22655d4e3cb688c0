//! Fixing pages: the ways to a guard.

use super::latch::{Holder, ORDER_MAX};
use super::{BufferPool, ExclusiveGuard, OptimisticGuard, SharedGuard};
use crate::base::error::{Error, Result};
use crate::base::units::{PageCount, PageId};
use std::time::{Duration, Instant};

/// Looks at a held page before the thread gives up its time slice.
const SPINS_MAX: u32 = 32;

/// Time slices given up before the thread sleeps.
const YIELDS_MAX: u32 = 64;

/// One sleep while waiting for a latch.
const NAP: Duration = Duration::from_micros(50);

/// Optimistic attempts before a read takes a shared latch.
const OPTIMISTIC_MAX: u32 = 8;

/// Waits for a latch, first spinning, then yielding, then sleeping.
pub(super) struct Patience {
    turns: u32,
    began: Option<Instant>,
    deadline: Duration,
}

impl Patience {
    pub(super) fn new(deadline: Duration) -> Patience {
        Patience { turns: 0, began: None, deadline }
    }

    /// Waits a little; `false` when the deadline has passed.
    pub(super) fn wait(&mut self) -> bool {
        self.turns += 1;
        if self.turns <= SPINS_MAX {
            std::hint::spin_loop();
            return true;
        }
        let began = *self.began.get_or_insert_with(Instant::now);
        if self.turns <= SPINS_MAX + YIELDS_MAX {
            std::thread::yield_now();
        } else {
            // Latches are one word: there is no queue to wait in.
            std::thread::sleep(NAP);
        }
        began.elapsed() < self.deadline
    }

    pub(super) fn waited(&self) -> Duration {
        self.began.map(|began| began.elapsed()).unwrap_or_default()
    }
}

impl BufferPool {
    /// Fixes a page for reading, together with other readers.
    ///
    /// # Errors
    /// [`Error::NoSuchPage`], [`Error::LatchTimeout`], [`Error::OutOfMemory`] when all pages are
    /// fixed, [`Error::Io`] and [`Error::CorruptPage`].
    #[inline]
    pub fn fix_shared(&self, page: PageId) -> Result<SharedGuard<'_>> {
        if let Some(latch) = self.words.get(page.as_usize()) {
            let seen = latch.load();
            if latch.try_share(seen) {
                return Ok(SharedGuard { pool: self, page, order: seen.order() });
            }
        }
        self.fix_shared_within(page, self.deadline)
    }

    /// As [`fix_shared`](Self::fix_shared), waiting no longer than `deadline`.
    ///
    /// # Errors
    /// As there.
    pub fn fix_shared_within(&self, page: PageId, deadline: Duration) -> Result<SharedGuard<'_>> {
        self.fix_shared_buffer(page, 0, deadline)
    }

    fn fix_shared_buffer(
        &self,
        page: PageId,
        order: u8,
        deadline: Duration,
    ) -> Result<SharedGuard<'_>> {
        let latch = self.words.get(page.as_usize()).ok_or_else(|| self.no_such_page(page))?;
        let mut patience = Patience::new(deadline);
        loop {
            let seen = latch.load();
            if latch.try_share(seen) {
                return Ok(SharedGuard { pool: self, page, order: seen.order() });
            }
            if seen.is_absent() {
                if self.load(page, seen, order)? {
                    latch.downgrade(false);
                    return Ok(SharedGuard { pool: self, page, order });
                }
            } else if !seen.is_free() && !patience.wait() {
                return Err(self.timeout(page, &patience));
            }
        }
    }

    /// Fixes a page for changing it.
    ///
    /// # Errors
    /// As for [`fix_shared`](Self::fix_shared).
    #[inline]
    pub fn fix_exclusive(&self, page: PageId) -> Result<ExclusiveGuard<'_>> {
        if let Some(latch) = self.words.get(page.as_usize()) {
            let seen = latch.load();
            if latch.try_lock(seen) {
                let order = seen.order();
                return Ok(ExclusiveGuard { pool: self, page, order, changed: false });
            }
        }
        self.fix_exclusive_within(page, self.deadline)
    }

    /// As [`fix_exclusive`](Self::fix_exclusive), waiting no longer than `deadline`.
    ///
    /// # Errors
    /// As there.
    pub fn fix_exclusive_within(
        &self,
        page: PageId,
        deadline: Duration,
    ) -> Result<ExclusiveGuard<'_>> {
        self.fix_exclusive_buffer(page, 0, deadline)
    }

    fn fix_exclusive_buffer(
        &self,
        page: PageId,
        order: u8,
        deadline: Duration,
    ) -> Result<ExclusiveGuard<'_>> {
        let latch = self.words.get(page.as_usize()).ok_or_else(|| self.no_such_page(page))?;
        let mut patience = Patience::new(deadline);
        loop {
            let seen = latch.load();
            if latch.try_lock(seen) {
                let order = seen.order();
                return Ok(ExclusiveGuard { pool: self, page, order, changed: false });
            }
            if seen.is_absent() {
                if self.load(page, seen, order)? {
                    return Ok(ExclusiveGuard { pool: self, page, order, changed: false });
                }
            } else if !seen.is_free() && !patience.wait() {
                return Err(self.timeout(page, &patience));
            }
        }
    }

    /// Fixes a page for reading if that needs neither waiting nor I/O.
    #[must_use]
    pub fn try_fix_shared(&self, page: PageId) -> Option<SharedGuard<'_>> {
        let latch = self.words.get(page.as_usize())?;
        loop {
            let seen = latch.load();
            if latch.try_share(seen) {
                return Some(SharedGuard { pool: self, page, order: seen.order() });
            }
            if !seen.is_readable() {
                return None;
            }
        }
    }

    /// Fixes a page for changing it if that needs neither waiting nor I/O.
    #[must_use]
    pub fn try_fix_exclusive(&self, page: PageId) -> Option<ExclusiveGuard<'_>> {
        let latch = self.words.get(page.as_usize())?;
        loop {
            let seen = latch.load();
            if latch.try_lock(seen) {
                let order = seen.order();
                return Some(ExclusiveGuard { pool: self, page, order, changed: false });
            }
            if !seen.is_free() {
                return None;
            }
        }
    }

    /// Looks at a page without holding it; brings it in when it is absent.
    ///
    /// # Errors
    /// As for [`fix_shared`](Self::fix_shared).
    #[inline]
    pub fn fix_optimistic(&self, page: PageId) -> Result<OptimisticGuard<'_>> {
        if let Some(latch) = self.words.get(page.as_usize()) {
            let seen = latch.load();
            if seen.is_readable() && !seen.cool() {
                return Ok(OptimisticGuard { pool: self, page, seen });
            }
        }
        self.fix_optimistic_slowly(page)
    }

    #[cold]
    fn fix_optimistic_slowly(&self, page: PageId) -> Result<OptimisticGuard<'_>> {
        let latch = self.words.get(page.as_usize()).ok_or_else(|| self.no_such_page(page))?;
        let mut patience = Patience::new(self.deadline);
        loop {
            let seen = latch.load();
            if seen.is_readable() {
                if seen.cool() && !latch.try_touch(seen) {
                    continue;
                }
                return Ok(OptimisticGuard { pool: self, page, seen });
            }
            if seen.is_absent() {
                if self.load(page, seen, 0)? {
                    latch.unlock(false);
                }
            } else if !patience.wait() {
                return Err(self.timeout(page, &patience));
            }
        }
    }

    /// Reads from a page optimistically: calls `read` again until nobody changed the page
    /// meanwhile; after a few attempts under a shared latch.
    ///
    /// # Errors
    /// As for [`fix_shared`](Self::fix_shared).
    #[inline]
    pub fn read_optimistic<T>(
        &self,
        page: PageId,
        mut read: impl FnMut(OptimisticGuard<'_>) -> T,
    ) -> Result<T> {
        for _ in 0..OPTIMISTIC_MAX {
            let guard = self.fix_optimistic(page)?;
            let value = read(guard);
            if guard.validate() {
                return Ok(value);
            }
        }
        let held = self.fix_shared(page)?;
        let seen = self.word(page).load();
        let value = read(OptimisticGuard { pool: self, page, seen });
        drop(held);
        Ok(value)
    }

    /// Allocates a buffer of 2^`order` consecutive pages, zeroed, under one latch: that of its
    /// first page, whose number names it.
    ///
    /// # Errors
    /// [`Error::StoreFull`], [`Error::OutOfMemory`]; [`Error::BadRange`] for an order above 7.
    pub fn allocate_buffer(&self, order: u8) -> Result<ExclusiveGuard<'_>> {
        check_order(order)?;
        self.allocate_locked(order)?.ok_or_else(|| self.full())
    }

    /// Fixes a buffer of 2^`order` pages for reading; the order is that of its allocation.
    ///
    /// # Errors
    /// As for [`fix_shared`](Self::fix_shared); [`Error::BadRange`] when it is resident with
    /// another order.
    pub fn fix_buffer_shared(&self, first: PageId, order: u8) -> Result<SharedGuard<'_>> {
        check_order(order)?;
        let guard = self.fix_shared_buffer(first, order, self.deadline)?;
        if guard.order == order { Ok(guard) } else { Err(WRONG_ORDER) }
    }

    /// Fixes a buffer of 2^`order` pages for changing it.
    ///
    /// # Errors
    /// As for [`fix_buffer_shared`](Self::fix_buffer_shared).
    pub fn fix_buffer_exclusive(&self, first: PageId, order: u8) -> Result<ExclusiveGuard<'_>> {
        check_order(order)?;
        let guard = self.fix_exclusive_buffer(first, order, self.deadline)?;
        if guard.order == order { Ok(guard) } else { Err(WRONG_ORDER) }
    }

    pub(super) fn no_such_page(&self, page: PageId) -> Error {
        Error::NoSuchPage { page, pages: PageCount(self.pages().0) }
    }

    pub(super) fn timeout(&self, page: PageId, patience: &Patience) -> Error {
        let holder = match self.word(page).load().holder() {
            Holder::Shared(1) => "1 reader".to_owned(),
            Holder::Shared(n) => format!("{n} readers"),
            Holder::Locked => "a writer, or a load,".to_owned(),
            Holder::Absent | Holder::Free => "nobody any more".to_owned(),
        };
        Error::LatchTimeout { page, holder, waited: patience.waited() }
    }
}

const WRONG_ORDER: Error = Error::BadRange { reason: "the buffer has another order" };

fn check_order(order: u8) -> Result<()> {
    if order <= ORDER_MAX {
        Ok(())
    } else {
        Err(Error::BadRange { reason: "a buffer has at most 128 pages" })
    }
}
