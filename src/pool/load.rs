//! Loading: absent pages are read from the table file, alone and in groups.
#![expect(unsafe_code, reason = "lends page memory to the device")]

use super::file::{DEPTH, TableFile};
use super::frames::PoolFrames;
use super::latch::{Latch, LatchWord};
use super::page_table::TablePages;
use super::stats::PoolStats;
use crate::base::counter::Counter;
use crate::base::error::{Error, Result};
use crate::base::units::PageId;
use crate::store::Op;
use crossbeam_queue::ArrayQueue;
use std::sync::Arc;

/// A page with the word it had: locked in order to be read.
#[derive(Clone, Copy, Default)]
struct Loading {
    page: PageId,
    was: LatchWord,
}

/// There was no memory.
struct Full;

/// Outcome of reading a group of pages.
pub(super) struct GroupRead {
    /// Reads that were started.
    pages: usize,
    /// True if the rest was left out because there was no memory.
    is_full: bool,
    /// The last read that failed.
    pub(super) failed: Option<Error>,
}

/// Reads pages of one table file.
pub(super) struct Loader {
    file: Arc<TableFile>,
    /// Pages to be read ahead.
    prefetches: ArrayQueue<PageId>,
    misses: Counter,
    read: Counter,
}

impl Loader {
    /// A loader in which up to `waiting_max` pages wait to be read ahead.
    pub(super) fn new(file: Arc<TableFile>, waiting_max: usize) -> Loader {
        let prefetches = ArrayQueue::new(waiting_max);
        Loader { file, prefetches, misses: Counter::default(), read: Counter::default() }
    }

    /// Bytes of the list of pages to be read ahead: of each its number and a stamp.
    pub(super) const fn bytes(waiting_max: usize) -> usize {
        waiting_max * (size_of::<PageId>() + size_of::<usize>())
    }

    /// Adds this part's statistics.
    pub(super) fn show(&self, stats: &mut PoolStats) {
        stats.misses = self.misses.reading();
        stats.pages_read = self.read.reading();
    }

    /// Brings an absent page in. `true`: it is resident and this thread holds it locked; `false`:
    /// another thread was faster.
    #[cold]
    pub(super) fn load(&self, frames: &PoolFrames, page: PageId, seen: LatchWord) -> Result<bool> {
        let table = &frames.table;
        if !table.contains(page) || seen.is_unused() {
            return Err(table.no_such_page(page));
        }
        if !lock_absent(frames, page)? {
            return Ok(false);
        }
        self.misses.add(1);
        let read = self.file.read_now(table, page);
        self.finish(frames, Loading { page, was: seen }, false, read).map(|()| true)
    }

    /// As [`load`](Self::load), without looking at the table file: the page is zeros.
    pub(super) fn load_blank(&self, frames: &PoolFrames, page: PageId) -> Result<bool> {
        if !lock_absent(frames, page)? {
            return Ok(false);
        }
        // Memory that was dropped, or never touched, is zero.
        frames.arrive(page);
        frames.table.word(page).loaded(false, 0);
        Ok(true)
    }

    /// Ends the load of a locked page: it is resident now, and still locked, or absent as before.
    ///
    /// # Errors
    /// That of the read.
    fn finish(
        &self,
        frames: &PoolFrames,
        Loading { page, was }: Loading,
        prefetched: bool,
        read: Result<()>,
    ) -> Result<()> {
        let latch = frames.table.word(page);
        if read.is_ok() {
            let worth = frames.resident.worth(was, frames.pool_pages(), prefetched);
            frames.arrive(page);
            latch.loaded(!worth.touched, worth.laps);
            self.read.add(1);
        } else {
            frames.table.discard(page);
            latch.abort_load();
            frames.uncharge();
            frames.give_back_around(page);
        }
        read
    }

    /// Charges and locks an absent page, if nothing is in the way.
    ///
    /// # Errors
    /// When there is no memory for it after a moment.
    fn begin(
        &self,
        frames: &PoolFrames,
        page: PageId,
    ) -> std::result::Result<Option<Loading>, Full> {
        let Some(was) = frames.table.get(page).map(Latch::load) else { return Ok(None) };
        if !frames.table.contains(page) || !was.is_absent() || was.is_unused() {
            return Ok(None);
        }
        let charge = |bytes| frames.account.charge_briefly(bytes).then_some(()).ok_or(Full);
        let entered = frames.charge_all(page, charge)?;
        let is_locked = lock_within(&frames.table, page);
        drop(entered);
        if !is_locked {
            frames.uncharge();
            frames.give_back_around(page);
            return Ok(None);
        }
        self.misses.add(1);
        Ok(Some(Loading { page, was }))
    }

    /// Reads up to `count` of those `pages` that are absent, many at a time, up to the first for which
    /// there is no memory: room is made for the next while the device reads the ones before. Calls
    /// `loaded` once for every page that was read, with the number beside it; the page is locked.
    ///
    /// # Errors
    /// When there is no queue.
    pub(super) fn load_group(
        &self,
        frames: &PoolFrames,
        mut pages: impl Iterator<Item = (usize, PageId)>,
        count: usize,
        prefetched: bool,
        mut loaded: impl FnMut(usize, PageId),
    ) -> Result<GroupRead> {
        let (table, account) = (&frames.table, &frames.account);
        let (mut left, mut is_full, mut failed) = (count, false, None);
        let next = || {
            while left > 0 && !is_full {
                let (number, page) = pages.next()?;
                match self.begin(frames, page) {
                    Ok(None) => {}
                    Ok(Some(loading)) => {
                        left -= 1;
                        let segment = table.segment(page, table.page_bytes());
                        return Some(((number, loading), segment, table.offset(page)));
                    }
                    Err(Full) => is_full = true,
                }
            }
            None
        };
        let done = |(number, loading): (usize, Loading), read: Result<()>| {
            let read = read.and_then(|()| self.file.check(table, loading.page));
            match self.finish(frames, loading, prefetched, read) {
                Ok(()) => loaded(number, loading.page),
                Err(error) => failed = Some(error),
            }
        };
        // SAFETY: the pages are locked by this thread until `done`; nobody else reads into their
        // memory or writes their places in the file.
        let pages = unsafe { self.file.transfer(account, Op::Read, next, done) }?;
        Ok(GroupRead { pages, is_full, failed })
    }

    /// Queues absent pages to be read ahead. Returns whether any wait.
    pub(super) fn prefetch(&self, frames: &PoolFrames, pages: &[PageId]) -> bool {
        for page in pages {
            let is_absent = frames.table.get(*page).is_some_and(|latch| latch.load().is_absent());
            if is_absent && self.prefetches.push(*page).is_err() {
                break;
            }
        }
        !self.prefetches.is_empty()
    }

    /// Reads pages that were queued to be read ahead; returns whether there were any.
    pub(super) fn serve_prefetches(&self, frames: &PoolFrames) -> bool {
        if self.prefetches.is_empty() {
            return false;
        }
        let pages = std::iter::from_fn(|| self.prefetches.pop().map(|page| (0, page)));
        let group = self.load_group(frames, pages, DEPTH, true, |_, page| {
            frames.table.word(page).unlock(false);
        });
        // An error shows again when the page is fixed.
        let Ok(group) = group else { return false };
        if group.is_full {
            // For the others there is no memory either.
            (0..self.prefetches.capacity()).map_while(|_| self.prefetches.pop()).for_each(drop);
        }
        group.pages > 0
    }
}

/// Charges and locks an absent page of the table. `false`: another thread was faster.
fn lock_absent(frames: &PoolFrames, page: PageId) -> Result<bool> {
    let entered = frames.charge_all(page, |bytes| frames.account.charge(bytes))?;
    let is_locked = lock_within(&frames.table, page);
    drop(entered);
    if !is_locked {
        frames.uncharge();
        frames.give_back_around(page);
    }
    Ok(is_locked)
}

/// Locks an absent page whose chunk the caller has entered. What it was before may have been given back:
/// the word may have begun anew, and the page be behind the table's end. `false` when the page is not
/// absent any more, or no page of the table.
fn lock_within(table: &TablePages, page: PageId) -> bool {
    let latch = table.word(page);
    let was = latch.load();
    if was.is_unused() || !latch.try_begin_load(was) {
        return false;
    }
    // From here on the page stays in the table: only free pages leave it.
    let is_there = table.contains(page);
    if !is_there {
        latch.abort_load();
    }
    is_there
}
