//! Loading: absent pages are read from the table file, alone and in groups.
#![expect(unsafe_code, reason = "lends page memory to the device")]

use super::file::{DEPTH, TableFile, WAIT};
use super::frames::Frames;
use super::latch::LatchWord;
use super::multi_page::Inside;
use crate::base::error::Result;
use crate::base::sync::{AtomicU64, Ordering};
use crate::base::units::PageId;
use crate::store::{Op, Queue, Request, Segment};
use crossbeam_queue::ArrayQueue;
use crossbeam_utils::CachePadded;
use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

/// Maximum number of pages that wait to be prefetched; more are forgotten.
const PREFETCH_MAX: usize = 4096;

/// Maximum number of pages of one group: a bigger request is served in several.
pub(super) const GROUP_MAX: usize = 256;

/// Reads of a group that are submitted together.
const SUBMIT_EVERY: usize = 8;

/// A page with the word it had: locked in order to be read.
#[derive(Clone, Copy)]
pub(super) struct Loading {
    pub(super) page: PageId,
    was: LatchWord,
}

/// There was no memory.
pub(super) struct Full;

/// Reads pages of one table file.
pub(super) struct Loader {
    file: Arc<TableFile>,
    /// Pages to be read ahead.
    prefetches: ArrayQueue<PageId>,
    misses: CachePadded<AtomicU64>,
    read: AtomicU64,
}

impl Loader {
    pub(super) fn new(file: Arc<TableFile>) -> Loader {
        let prefetches = ArrayQueue::new(PREFETCH_MAX);
        Loader { file, prefetches, misses: CachePadded::default(), read: AtomicU64::new(0) }
    }

    /// Fixes that found their page absent.
    pub(super) fn misses(&self) -> u64 {
        self.misses.load(Ordering::Relaxed)
    }

    /// Pages read.
    pub(super) fn pages_read(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    /// Brings an absent page in. `true`: it is resident and this thread holds it locked; `false`:
    /// another thread was faster.
    #[cold]
    pub(super) fn load(
        &self,
        frames: &Frames,
        page: PageId,
        seen: LatchWord,
        order: u8,
    ) -> Result<bool> {
        let table = &frames.table;
        // A caller that names another order than the page's is refused when it is resident.
        let order = seen.known_order().unwrap_or(order);
        if !table.contains(page, order) || seen.is_unused() {
            return Err(table.no_such_page(page));
        }
        frames.charge_all(page, order)?;
        let latch = table.word(page);
        if !latch.try_begin_load(seen) {
            frames.uncharge(order);
            return Ok(false);
        }
        let inside =
            Inside::lock(table, page, seen, order, frames.backoff()).inspect_err(|_| {
                latch.abort_load();
                frames.uncharge(order);
            })?;
        self.misses.fetch_add(1, Ordering::Relaxed);
        let read = self.file.read_now(table, page, order);
        if read.is_ok() {
            inside.become_parts();
        }
        self.finish(frames, Loading { page, was: seen }, order, false, read).map(|()| true)
    }

    /// Ends the load of a locked page: it is resident now, and still locked, or absent as before.
    ///
    /// # Errors
    /// That of the read.
    pub(super) fn finish(
        &self,
        frames: &Frames,
        Loading { page, was }: Loading,
        order: u8,
        prefetched: bool,
        read: Result<()>,
    ) -> Result<()> {
        let latch = frames.table.word(page);
        if read.is_ok() {
            let worth = frames.resident.worth(was, frames.pool_pages(), prefetched);
            latch.loaded(!worth.touched, worth.laps, order);
            self.read.fetch_add(1 << order, Ordering::Relaxed);
            frames.arrive(page, order);
        } else {
            frames.table.discard(page, order);
            latch.abort_load();
            frames.uncharge(order);
        }
        read
    }

    /// Charges and locks an absent page, if nothing is in the way.
    ///
    /// # Errors
    /// When there is no memory for it after a moment.
    pub(super) fn begin(
        &self,
        frames: &Frames,
        page: PageId,
    ) -> std::result::Result<Option<Loading>, Full> {
        let Some(latch) = frames.table.get(page) else { return Ok(None) };
        let was = latch.load();
        let is_page = was.known_order().unwrap_or(0) == 0 && !was.is_unused();
        if !frames.table.contains(page, 0) || !was.is_absent() || !is_page {
            return Ok(None);
        }
        let charge = |bytes| {
            let is_charged = frames.account.charge_briefly(bytes);
            if is_charged { Ok(()) } else { Err(Full) }
        };
        charge(frames.table.page_size())?;
        let charged = frames.chunks.charge(page, charge);
        if charged.is_err() || !latch.try_begin_load(was) {
            frames.uncharge(0);
            return charged.map(|()| None);
        }
        self.misses.fetch_add(1, Ordering::Relaxed);
        Ok(Some(Loading { page, was }))
    }

    /// Reads up to `count` pages, many at a time: those that `begin` locks, which makes room for
    /// the next while the device reads the ones before. Calls `each` once for every one. Returns
    /// how many there were.
    pub(super) fn read_group(
        &self,
        frames: &Frames,
        count: usize,
        begin: &mut dyn FnMut(usize) -> Option<Loading>,
        each: &mut dyn FnMut(usize, Loading, Result<()>),
    ) -> Result<usize> {
        if count == 0 {
            return Ok(0);
        }
        let table = &frames.table;
        let mut loads = [Loading { page: PageId(0), was: LatchWord::default() }; GROUP_MAX];
        let mut queue = self.file.take_queue(&frames.account)?;
        let (mut started, done) = (0, Cell::new(0));
        let mut wait = |queue: &mut dyn Queue, loads: &[Loading]| {
            let waited = queue.wait(WAIT, &mut |completion| {
                done.set(done.get() + 1);
                let i = completion.token as usize;
                let check = || self.file.check(table, loads[i].page, 0);
                each(i, loads[i], completion.result.and_then(|()| check()));
            });
            // The kernel refuses to wait only when it is out of memory for it: try again.
            if waited.is_err() {
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        for i in 0..count {
            let Some(loading) = begin(i) else { continue };
            loads[i] = loading;
            let segments = [Segment { ptr: table.ptr(loading.page), len: table.page_bytes() }];
            let offset = table.offset(loading.page);
            let request = Request { token: i as u64, op: Op::Read, offset, segments: &segments };
            // SAFETY: the page is locked by this thread until its completion is reported; nobody
            // else reads into its memory or writes its place in the file.
            while !unsafe { queue.push(request) } {
                wait(&mut *queue, &loads);
            }
            started += 1;
            if started % SUBMIT_EVERY == 0 {
                // What is not taken now is submitted with the next ones, or by the wait.
                let _ = queue.submit();
            }
        }
        while done.get() < started {
            wait(&mut *queue, &loads);
        }
        self.file.give_queue(queue, &frames.account);
        Ok(started)
    }

    /// Queues absent pages to be read ahead. Returns whether any wait.
    pub(super) fn prefetch(&self, frames: &Frames, pages: &[PageId]) -> bool {
        for page in pages {
            let is_absent = frames.table.get(*page).is_some_and(|latch| latch.load().is_absent());
            if is_absent && self.prefetches.push(*page).is_err() {
                break;
            }
        }
        !self.prefetches.is_empty()
    }

    /// Reads pages that were queued to be read ahead; returns whether there were any.
    pub(super) fn serve_prefetches(&self, frames: &Frames) -> bool {
        if self.prefetches.is_empty() {
            return false;
        }
        let mut is_full = false;
        let mut begin = || {
            while !is_full {
                match self.begin(frames, self.prefetches.pop()?) {
                    Ok(None) => {}
                    Ok(loading) => return loading,
                    Err(Full) => is_full = true,
                }
            }
            None
        };
        let read = self.read_group(frames, DEPTH, &mut |_| begin(), &mut |_, loading, result| {
            // An error shows again when the page is fixed.
            if self.finish(frames, loading, 0, true, result).is_ok() {
                frames.table.word(loading.page).unlock(false);
            }
        });
        if is_full {
            // For the others there is no memory either.
            (0..PREFETCH_MAX).map_while(|_| self.prefetches.pop()).for_each(drop);
        }
        read.is_ok_and(|pages| pages > 0)
    }
}
