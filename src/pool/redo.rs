//! Redo: what recovery from a log needs beside fixing pages.
//!
//! After a crash a page may be torn, or be in use for the log and not for the table, or the other way
//! round (`book/src/design/pool.md`, durability). A log that has the whole page, or all its changes since it
//! was allocated, makes each of them right by [`BufferPool::fix_to_overwrite`].

use super::allocate;
use super::buffer_pool::BufferPool;
use super::fix::{Exclusive, Hold};
use super::guard::{ExclusiveGuard, Held};
use super::latch::HeldWord;
use super::page_table::FIRST;
#[cfg(doc)]
use crate::base::error::Error;
use crate::base::error::Result;
use crate::base::units::PageId;

impl BufferPool {
    /// Fixes a page for overwriting all of it, whatever it is: resident, absent, damaged, free, or
    /// beyond the end of the table. It is in use then, zeroed, with 0 for the log record that changed
    /// it last, and dirty. What the table file has of it is not read. Pages between the table's end and
    /// a page beyond become free.
    ///
    /// For redo from a log; a program that runs takes the page that [`allocate`](Self::allocate)
    /// gives. No other thread should allocate pages meanwhile: it may be given the same number.
    ///
    /// # Errors
    /// [`Error::LatchTimeout`],
    /// [`Error::OutOfMemory`],
    /// [`Error::StoreFull`] for a page that the store has no room for,
    /// [`Error::NoSuchPage`] for the header's.
    ///
    /// # Examples
    /// ```
    /// # use farheap::{ByteCount, Error, PageId, pool::PoolConfig, store::MemStore};
    /// # use farheap::manager::MemoryManager;
    /// # let manager = MemoryManager::start(ByteCount::mib(16))?;
    /// # let store = std::sync::Arc::new(MemStore::new(ByteCount::mib(64))?);
    /// # let pool = PoolConfig::new().create_on(store, &manager)?;
    /// // A record of the log: the page, and what it was after the change.
    /// let (id, lsn, image) = (PageId(7), 41, b"what it was");
    /// let is_newer = match pool.fix_shared(id) {
    ///     Ok(page) => page.lsn() >= lsn,
    ///     Err(Error::CorruptPage { .. } | Error::NoSuchPage { .. }) => false,
    ///     Err(error) => return Err(error),
    /// };
    /// if !is_newer {
    ///     let mut page = pool.fix_to_overwrite(id)?;
    ///     page[..image.len()].copy_from_slice(image);
    ///     page.set_lsn(lsn);
    /// }
    /// assert_eq!(pool.pages_in_use().collect::<Vec<_>>(), [id]);
    /// assert!(pool.allocate()?.id() < id, "what lies before is free");
    /// # Ok::<(), farheap::Error>(())
    /// ```
    pub fn fix_to_overwrite(&self, page: PageId) -> Result<ExclusiveGuard<'_>> {
        let frames = &self.frames;
        let table = &frames.table;
        table.check_changeable()?;
        if page < FIRST {
            return Err(table.no_such_page(page));
        }
        let latch = table.get(page).ok_or_else(|| table.full())?;
        let mut backoff = frames.backoff();
        loop {
            let seen = latch.load();
            if page.0 >= table.end() || seen.is_unused() {
                if let Some(word) = allocate::claim(frames, page)? {
                    return Ok(ExclusiveGuard(Held::new(frames, latch, word)));
                }
                if !backoff.wait() {
                    return Err(table.timeout(page, &backoff));
                }
            } else if seen.is_absent() {
                if self.loader.load_blank(frames, page)? {
                    let word = HeldWord::locked(latch.load()).changed();
                    return Ok(ExclusiveGuard(Held::new(frames, latch, word)));
                }
            } else if Exclusive::take(latch, seen) {
                let mut guard =
                    ExclusiveGuard(Held::new(frames, latch, Exclusive::held_word(latch)));
                guard.blank();
                return Ok(guard);
            } else if Exclusive::is_blocked(seen) && !backoff.wait() {
                return Err(table.timeout(page, &backoff));
            }
        }
    }

    /// The pages that are in use, in ascending order: a page that is allocated or freed meanwhile may
    /// or may not be among them. After a crash these are the pages that the last header names, some
    /// of which a log may have to [free](ExclusiveGuard::free) again.
    pub fn pages_in_use(&self) -> impl Iterator<Item = PageId> + '_ {
        let frames = &self.frames;
        let is_free = |page: &PageId| {
            // Free pages are locked while the list of them is written.
            let word = frames.table.word(*page).load();
            word.is_unused_when_locked() && !frames.resident.contains(page.as_usize())
        };
        (FIRST.0..frames.table.end()).map(PageId).filter(move |page| !is_free(page))
    }

    /// The pages that were changed and not written since, in ascending order: what the next
    /// [`flush`](Self::flush) writes, if nobody changes more. A page that is changed or written meanwhile
    /// may or may not be among them.
    pub fn dirty_pages(&self) -> impl Iterator<Item = PageId> + '_ {
        let frames = &self.frames;
        let resident = (0..frames.table.steps()).flat_map(|step| frames.resident.pages(step));
        resident.filter(|page| frames.table.word(*page).load().dirty())
    }
}
