//! Fixing pages: the ways to a guard.

use super::allocate;
use super::backoff::Backoff;
use super::buffer_pool::BufferPool;
use super::guard::{ExclusiveGuard, Held, OptimisticGuard, PageVersion, SharedGuard};
use super::latch::{HeldWord, Latch, LatchWord};
use super::page_table::TablePages;
#[cfg(doc)]
use crate::base::error::Error;
use crate::base::error::Result;
use crate::base::units::PageId;
use std::time::Duration;

/// Optimistic attempts before a read takes a shared latch.
const OPTIMISTIC_MAX: u32 = 8;

/// A way to hold a page.
pub(super) trait Hold {
    /// The word of a page that may be held so.
    fn get(table: &TablePages, page: PageId) -> Option<&Latch>;

    /// Takes a page that is resident; fails when another holder is in the way.
    fn take(latch: &Latch, seen: LatchWord) -> bool;

    /// As `take`, for the page that hits mostly meet: touched since the hand passed, and no
    /// holder is in the way.
    fn take_ready(latch: &Latch, seen: LatchWord) -> bool;

    /// Turns the latch of a page that this thread has just loaded, and holds locked, into this hold.
    fn after_load(latch: &Latch);

    /// Part of the word that the guard of such a page keeps.
    fn held_word(latch: &Latch) -> HeldWord;

    /// True if another hold is in the way of taking a resident page.
    fn is_blocked(seen: LatchWord) -> bool;
}

/// Together with other readers.
pub(super) struct Shared;

impl Hold for Shared {
    #[inline]
    fn get(table: &TablePages, page: PageId) -> Option<&Latch> {
        table.get(page)
    }

    #[inline]
    fn take(latch: &Latch, seen: LatchWord) -> bool {
        latch.try_share(seen)
    }

    #[inline]
    fn take_ready(latch: &Latch, seen: LatchWord) -> bool {
        latch.try_share_ready(seen)
    }

    fn after_load(latch: &Latch) {
        latch.downgrade(false);
    }

    fn held_word(latch: &Latch) -> HeldWord {
        HeldWord::seen(latch.load())
    }

    fn is_blocked(seen: LatchWord) -> bool {
        !seen.is_readable() || !seen.has_room()
    }
}

/// Alone.
pub(super) struct Exclusive;

impl Hold for Exclusive {
    #[inline]
    fn get(table: &TablePages, page: PageId) -> Option<&Latch> {
        table.get_to_change(page)
    }

    #[inline]
    fn take(latch: &Latch, seen: LatchWord) -> bool {
        latch.try_lock(seen)
    }

    #[inline]
    fn take_ready(latch: &Latch, seen: LatchWord) -> bool {
        latch.try_lock_ready(seen)
    }

    fn after_load(_: &Latch) {}

    fn held_word(latch: &Latch) -> HeldWord {
        HeldWord::locked(latch.load())
    }

    fn is_blocked(seen: LatchWord) -> bool {
        !seen.is_free()
    }
}

impl PageVersion {
    /// True if the page was neither changed nor evicted since: what [`OptimisticGuard::validate`] tells, where the
    /// guard was not kept. It tells nothing for another pool than the guard's.
    ///
    /// # Examples
    /// ```
    /// # use farheap::{ByteCount, pool::PoolConfig, store::MemStore};
    /// # use farheap::manager::MemoryManager;
    /// # let manager = MemoryManager::start(ByteCount::mib(16))?;
    /// # let store = std::sync::Arc::new(MemStore::new(ByteCount::mib(64))?);
    /// let pool = PoolConfig::new().create_on(store, &manager)?;
    /// let page = pool.allocate()?.id();
    /// let seen = pool.fix_shared(page)?.version();
    /// assert!(seen.is_current(&pool));
    /// pool.fix_exclusive(page)?[0] = 1;
    /// assert!(!seen.is_current(&pool));
    /// # Ok::<(), farheap::Error>(())
    /// ```
    #[inline]
    #[must_use]
    pub fn is_current(&self, pool: &BufferPool) -> bool {
        pool.frames.table.get(self.page).is_some_and(|latch| latch.is_unchanged(self.seen))
    }
}

impl BufferPool {
    /// Holds a page; returns its latch and what to note of it. What comes back fits registers: a
    /// guard that is passed through memory is stored in pieces and loaded as a whole, and the
    /// processor then waits for all that went before (`book/src/design/pool.md`, hits).
    #[inline]
    fn hold<H: Hold>(
        &self,
        page: PageId,
        deadline: Option<Duration>,
    ) -> Result<(&Latch, HeldWord)> {
        if let Some(latch) = H::get(&self.frames.table, page) {
            let seen = latch.load();
            if H::take_ready(latch, seen) {
                return Ok((latch, HeldWord::seen(seen)));
            }
        }
        self.hold_slowly::<H>(page, deadline)
    }

    /// Without a deadline, the pool's.
    #[cold]
    #[inline(never)]
    fn hold_slowly<H: Hold>(
        &self,
        page: PageId,
        deadline: Option<Duration>,
    ) -> Result<(&Latch, HeldWord)> {
        let Some(latch) = H::get(&self.frames.table, page) else {
            // A page that is there may only be read.
            let table = &self.frames.table;
            table.get(page).map_or(Ok(()), |_| table.check_changeable())?;
            return Err(self.frames.table.no_such_page(page));
        };
        let mut backoff = deadline.map_or_else(|| self.frames.backoff(), Backoff::new);
        loop {
            let seen = latch.load();
            if H::take(latch, seen) {
                return Ok((latch, H::held_word(latch)));
            }
            if seen.is_absent() {
                if self.loader.load(&self.frames, page, seen)? {
                    H::after_load(latch);
                    return Ok((latch, H::held_word(latch)));
                }
            } else if H::is_blocked(seen) && !backoff.wait() {
                return Err(self.frames.table.timeout(page, &backoff));
            }
        }
    }

    /// Holds a page if that needs neither waiting nor I/O.
    #[inline]
    pub(super) fn try_hold<H: Hold>(&self, page: PageId) -> Option<Held<'_>> {
        let latch = H::get(&self.frames.table, page)?;
        loop {
            let seen = latch.load();
            if H::take(latch, seen) {
                return Some(Held::new(&self.frames, latch, H::held_word(latch)));
            }
            if H::is_blocked(seen) {
                return None;
            }
        }
    }

    /// Fixes a page for reading, together with other readers.
    ///
    /// # Errors
    /// [`Error::NoSuchPage`], [`Error::LatchTimeout`], [`Error::OutOfMemory`] when all pages are
    /// fixed, [`Error::Io`] and [`Error::CorruptPage`].
    #[inline]
    pub fn fix_shared(&self, page: PageId) -> Result<SharedGuard<'_>> {
        let (latch, word) = self.hold::<Shared>(page, None)?;
        Ok(SharedGuard(Held::new(&self.frames, latch, word)))
    }

    /// As [`fix_shared`](Self::fix_shared), waiting no longer than `deadline`.
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn fix_shared_within(&self, page: PageId, deadline: Duration) -> Result<SharedGuard<'_>> {
        let (latch, word) = self.hold::<Shared>(page, Some(deadline))?;
        Ok(SharedGuard(Held::new(&self.frames, latch, word)))
    }

    /// Fixes a page for changing it.
    ///
    /// # Errors
    /// As for [`fix_shared`](Self::fix_shared).
    #[inline]
    pub fn fix_exclusive(&self, page: PageId) -> Result<ExclusiveGuard<'_>> {
        let (latch, word) = self.hold::<Exclusive>(page, None)?;
        Ok(ExclusiveGuard(Held::new(&self.frames, latch, word)))
    }

    /// As [`fix_exclusive`](Self::fix_exclusive), waiting no longer than `deadline`.
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn fix_exclusive_within(
        &self,
        page: PageId,
        deadline: Duration,
    ) -> Result<ExclusiveGuard<'_>> {
        let (latch, word) = self.hold::<Exclusive>(page, Some(deadline))?;
        Ok(ExclusiveGuard(Held::new(&self.frames, latch, word)))
    }

    /// Fixes a page for reading if that needs neither waiting nor I/O.
    #[must_use]
    pub fn try_fix_shared(&self, page: PageId) -> Option<SharedGuard<'_>> {
        self.try_hold::<Shared>(page).map(SharedGuard)
    }

    /// Fixes a page for changing it if that needs neither waiting nor I/O.
    #[must_use]
    pub fn try_fix_exclusive(&self, page: PageId) -> Option<ExclusiveGuard<'_>> {
        self.try_hold::<Exclusive>(page).map(ExclusiveGuard)
    }

    /// Looks at a page without holding it; brings it in when it is absent.
    ///
    /// # Errors
    /// As for [`fix_shared`](Self::fix_shared).
    #[inline]
    pub fn fix_optimistic(&self, page: PageId) -> Result<OptimisticGuard<'_>> {
        let Some(latch) = self.frames.table.get(page) else {
            return Err(self.frames.table.no_such_page(page));
        };
        let mut seen = latch.load();
        if !seen.is_ready() {
            seen = self.look_slowly(page)?;
        }
        Ok(OptimisticGuard { frames: &self.frames, latch, seen })
    }

    #[cold]
    #[inline(never)]
    fn look_slowly(&self, page: PageId) -> Result<LatchWord> {
        let latch = self.frames.table.word(page);
        let mut backoff = self.frames.backoff();
        loop {
            let seen = latch.load();
            if seen.is_readable() {
                if seen.cool() && !latch.try_touch(seen) {
                    continue;
                }
                return Ok(seen);
            }
            if seen.is_absent() {
                if self.loader.load(&self.frames, page, seen)? {
                    latch.unlock(false);
                }
            } else if !backoff.wait() {
                return Err(self.frames.table.timeout(page, &backoff));
            }
        }
    }

    /// Reads from a page optimistically: calls `read` again until the page did not change
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
        // The first attempt mostly does. All else stays out of its way, with calls that do not come
        // back here: where two ways meet, the compiler keeps in registers what it could compute.
        if let Some(latch) = self.frames.table.get(page) {
            let seen = latch.load();
            if seen.is_ready() {
                let guard = OptimisticGuard { frames: &self.frames, latch, seen };
                let value = read(guard);
                if guard.validate() {
                    return Ok(value);
                }
            }
        }
        self.read_again(page, read)
    }

    #[cold]
    #[inline(never)]
    fn read_again<T>(
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
        let guard = self.fix_shared(page)?;
        let latch = guard.0.latch();
        Ok(read(OptimisticGuard { frames: &self.frames, latch, seen: latch.load() }))
    }

    /// Allocates a page, zeroed and fixed exclusively.
    ///
    /// # Errors
    /// [`Error::StoreFull`] when the table has reached its capacity, [`Error::OutOfMemory`].
    pub fn allocate(&self) -> Result<ExclusiveGuard<'_>> {
        self.frames.table.check_changeable()?;
        let (page, word) = allocate::allocate(&self.frames)?;
        let latch = self.frames.table.word(page);
        Ok(ExclusiveGuard(Held::new(&self.frames, latch, word)))
    }
}
