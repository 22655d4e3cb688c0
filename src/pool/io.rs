//! Reading pages in, alone and in groups, and writing them back.
#![expect(unsafe_code, reason = "lends page memory to the device")]

use super::guard::{Held, SharedGuard};
use super::latch::{HeldWord, LatchWord, STAMPS};
use super::replacement::Arrival;
use super::write_result::WriteResult;
use super::{BufferPool, CHUNK_PAGES, QUEUE, TRAILER};
use crate::base::error::{Error, Result};
use crate::base::local::keep_local;
use crate::base::sync::Ordering;
use crate::base::units::{ByteCount, PageId};
use crate::store::{Op, Queue, Request, Segment};
use crate::sys::vm::{HUGE_PAGE, KERNEL_PAGE, Piece};
use std::cell::Cell;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

/// Requests in flight of one group.
pub(super) const DEPTH: usize = 64;

/// Pages that may wait to be prefetched; more are forgotten.
pub(super) const PREFETCH_MAX: usize = 4096;

/// Pages whose words share one huge page.
const HUGE_WORDS: usize = HUGE_PAGE / 8;

/// Bits of a chunk's note: its page tables, and words, are charged ...
const CHARGED: u64 = 1;

/// ... and so is the huge page of words that begins with the chunk's. Others: `multi_page`.
const HUGE_CHARGED: u64 = 2;

/// All memory of the chunk lies in one huge page; see `huge`.
pub(super) const HUGE: u64 = 16;

/// Longest wait for the device at a time.
const WAIT: Duration = Duration::from_secs(1);

/// Pages of one group read: a bigger request is served in several.
const GROUP_MAX: usize = 256;
/// Reads of a group that are submitted together.
const SUBMIT_EVERY: usize = 8;

/// A page with the word it had: locked in order to be read.
#[derive(Clone, Copy)]
pub(super) struct Loading {
    pub(super) page: PageId,
    pub(super) was: LatchWord,
}

/// There was no memory.
struct Full;

impl BufferPool {
    pub(super) fn take_queue(&self) -> Result<Box<dyn Queue>> {
        let _ours = keep_local();
        let idle = self.queues.lock().pop();
        if let Some(queue) = idle {
            return Ok(queue);
        }
        let queue = self.store.open_queue(DEPTH as u32)?;
        // Who holds pages cannot wait for room: what does not fit is charged when it does.
        self.counters.queues_owed.fetch_add(1, Ordering::Relaxed);
        self.charge_queue();
        Ok(queue)
    }

    /// Charges a queue that is not charged yet, if there is one and it fits.
    fn charge_queue(&self) {
        let owed = &self.counters.queues_owed;
        let take = |owed: u64| owed.checked_sub(1);
        if owed.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_err() {
            return;
        }
        if self.account.try_charge(QUEUE) {
            self.counters.fixed.fetch_add(QUEUE.0, Ordering::Relaxed);
        } else {
            owed.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Keeps a queue for the next user. One that failed is not given back.
    pub(super) fn give_queue(&self, queue: Box<dyn Queue>) {
        if queue.in_flight() == 0 {
            let _ours = keep_local();
            self.queues.lock().push(queue);
        }
        if self.counters.queues_owed.load(Ordering::Relaxed) > 0 {
            self.charge_queue();
        }
    }

    /// Brings an absent page in. `true`: it is resident and this thread holds it locked; `false`:
    /// somebody else was faster.
    #[cold]
    pub(super) fn load(&self, page: PageId, seen: LatchWord, order: u8) -> Result<bool> {
        // Who asks with another order than it has is refused when it is resident.
        let order = seen.known_order().unwrap_or(order);
        let end = self.end.load(Ordering::Acquire);
        let inside = page.0.checked_add(1 << order).is_some_and(|after| after <= end);
        if !inside || page.0 == 0 || seen.is_unused() {
            return Err(self.no_such_page(page));
        }
        let bytes = ByteCount(self.buffer_bytes(order) as u64);
        self.manager.charge(&self.account, bytes)?;
        let last = PageId(page.0 + (1 << order) - 1);
        if let Err(error) = self.charge_metadata(page).and_then(|()| self.charge_metadata(last)) {
            self.account.uncharge(bytes);
            return Err(error);
        }
        self.note_buffer(page, order);
        let latch = self.word(page);
        if !latch.try_begin_load(seen) {
            self.account.uncharge(bytes);
            return Ok(false);
        }
        let inside = match self.lock_inside(page, seen, order) {
            Ok(inside) => inside,
            Err(error) => {
                latch.abort_load();
                self.account.uncharge(bytes);
                return Err(error);
            }
        };
        self.counters.misses.fetch_add(1, Ordering::Relaxed);
        let (ptr, len) = (self.ptr(page), bytes.as_usize());
        let offset = self.offset(page);
        // SAFETY: this thread holds the page locked, so the memory is its own, and nobody writes
        // the page's place in the file.
        let read = survived(|| unsafe { self.store.read_now(offset, ptr, len) });
        let len = bytes.0;
        let panicked = Error::Io { op: "read", offset, len, errno: crate::sys::EIO };
        let read = read.unwrap_or(Err(panicked));
        let loading = Loading { page, was: seen };
        match read.and_then(|()| self.check(page, order)) {
            Ok(()) => {
                inside.become_parts();
                self.arrived(loading, order, false);
                Ok(true)
            }
            Err(error) => {
                self.give_up(loading, order);
                Err(error)
            }
        }
    }

    /// A locked page was read: it is resident now, and still locked.
    fn arrived(&self, loading: Loading, order: u8, prefetched: bool) {
        let away = self.away(loading.was);
        let worth = self.replacement.arrives(Arrival { away, prefetched });
        self.word(loading.page).loaded(!worth.touched, worth.laps.min(3), order);
        self.counters.read.fetch_add(1 << order, Ordering::Relaxed);
        self.now_resident(loading.page, order);
    }

    /// A locked page could not be read.
    fn give_up(&self, loading: Loading, order: u8) {
        self.discard_buffer(loading.page, order);
        self.word(loading.page).abort_load();
        self.account.uncharge(ByteCount(self.buffer_bytes(order) as u64));
    }

    /// Evictions since the page left, in pools.
    fn away(&self, was: LatchWord) -> Option<f32> {
        if was.stamp() == 0 {
            return None;
        }
        let passed = (self.stamp_now() + STAMPS - was.stamp()) % STAMPS;
        Some(passed as f32 / STAMPS_PER_POOL as f32)
    }

    /// The eviction clock: a step every 1/[`STAMPS_PER_POOL`] of a pool.
    pub(super) fn stamp_now(&self) -> u64 {
        let pool_pages = (self.account.ceiling().0 >> self.page_shift).max(STAMPS_PER_POOL);
        let evicted = self.counters.evicted.load(Ordering::Relaxed);
        evicted / (pool_pages / STAMPS_PER_POOL) % STAMPS + 1
    }

    pub(super) fn now_resident(&self, page: PageId, order: u8) {
        let bytes = self.buffer_bytes(order) as u64;
        self.counters.resident.fetch_add(bytes, Ordering::Relaxed);
        let (word, bit) = (page.as_usize() / 64, page.0 % 64);
        self.resident[word].fetch_or(1 << bit, Ordering::Relaxed);
    }

    pub(super) fn leave_resident(&self, page: PageId, order: u8) {
        let bytes = self.buffer_bytes(order) as u64;
        self.counters.resident.fetch_sub(bytes, Ordering::Relaxed);
        let (word, bit) = (page.as_usize() / 64, page.0 % 64);
        self.resident[word].fetch_and(!(1 << bit), Ordering::Relaxed);
    }

    pub(super) fn discard_buffer(&self, page: PageId, order: u8) {
        let pieces = [Piece::new(self.ptr(page).addr(), self.buffer_bytes(order))];
        // SAFETY: this thread holds the page locked and nobody needs its contents.
        let dropped = unsafe { self.discarder.discard(&pieces) };
        assert!(dropped.is_ok(), "dropping {page}: {dropped:?}");
    }

    /// Whether [`charge_metadata`](Self::charge_metadata) was called for a page's neighbourhood.
    pub(super) fn is_charged(&self, page: PageId) -> bool {
        self.charged[page.as_usize() / CHUNK_PAGES].load(Ordering::Relaxed) & CHARGED != 0
    }

    /// Charges the words, bitmap and page tables of a page's neighbourhood at its first touch.
    pub(super) fn charge_metadata(&self, page: PageId) -> Result<()> {
        self.charge_metadata_by(page, |bytes| self.manager.charge(&self.account, bytes))
    }

    fn charge_metadata_by<E>(
        &self,
        page: PageId,
        charge: impl FnOnce(ByteCount) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let chunk = &self.charged[page.as_usize() / CHUNK_PAGES];
        if self.is_charged(page) || chunk.fetch_or(CHARGED, Ordering::Relaxed) & CHARGED != 0 {
            return Ok(());
        }
        // One kernel page of words, and a page table for each 2 MiB of pages.
        let tables = (CHUNK_PAGES << self.page_shift).div_ceil(512 * KERNEL_PAGE);
        let words = if self.huge_words { self.huge_words_due(page) } else { KERNEL_PAGE };
        let bytes = ByteCount((words + tables * KERNEL_PAGE) as u64);
        if let Err(error) = charge(bytes) {
            chunk.fetch_and(!CHARGED, Ordering::Relaxed);
            if words == HUGE_PAGE {
                let first = page.as_usize() / HUGE_WORDS * (HUGE_WORDS / CHUNK_PAGES);
                self.charged[first].fetch_and(!HUGE_CHARGED, Ordering::Relaxed);
            }
            return Err(error);
        }
        self.counters.metadata.fetch_add(bytes.0, Ordering::Relaxed);
        Ok(())
    }

    /// Bytes to charge for the huge page of words around `page`: all of it the first time.
    fn huge_words_due(&self, page: PageId) -> usize {
        let first = page.as_usize() / HUGE_WORDS * (HUGE_WORDS / CHUNK_PAGES);
        let before = self.charged[first].fetch_or(HUGE_CHARGED, Ordering::Relaxed);
        if before & HUGE_CHARGED == 0 { HUGE_PAGE } else { 0 }
    }

    // Checksums.

    fn sum(&self, page: PageId, order: u8) -> u64 {
        let len = self.buffer_bytes(order) - 8;
        // SAFETY: the caller holds the page, so that its payload does not change; the sum itself,
        // which the writer changes, lies behind `len`.
        let bytes = unsafe { std::slice::from_raw_parts(self.ptr(page), len) };
        let sum = twox_hash::XxHash3_128::oneshot_with_seed(page.0, bytes) as u64;
        // 0 stands for a page that was never written.
        sum.max(1)
    }

    fn sum_at(&self, page: PageId, order: u8) -> *mut u64 {
        self.ptr(page).wrapping_add(self.buffer_bytes(order) - 8).cast()
    }

    fn check(&self, page: PageId, order: u8) -> Result<()> {
        if !self.checksum {
            return Ok(());
        }
        // SAFETY: within a page that this thread holds locked; aligned to 8.
        let stored = unsafe { self.sum_at(page, order).read() };
        if stored == self.sum(page, order) || stored == 0 && self.is_zero(page, order) {
            Ok(())
        } else {
            Err(Error::CorruptPage { page })
        }
    }

    /// A page that was allocated and lost in a crash before it was ever written reads as zeros.
    fn is_zero(&self, page: PageId, order: u8) -> bool {
        // SAFETY: this thread holds the page locked.
        let bytes = unsafe { std::slice::from_raw_parts(self.ptr(page), self.buffer_bytes(order)) };
        bytes.iter().all(|byte| *byte == 0)
    }

    // Groups.

    /// Fixes many pages for reading; those that are absent are read at once. The guards come in
    /// the order of `pages`, which must not name a page twice.
    ///
    /// A thread that calls this should not hold pages exclusively: it may wait for another that
    /// does the same.
    ///
    /// # Errors
    /// As for [`fix_shared`](Self::fix_shared), for any of the pages; none is fixed then.
    pub fn fix_many(&self, pages: &[PageId]) -> Result<Vec<SharedGuard<'_>>> {
        let mut guards: Vec<Option<SharedGuard<'_>>> = Vec::with_capacity(pages.len());
        guards.resize_with(pages.len(), || None);
        for (pages, guards) in pages.chunks(GROUP_MAX).zip(guards.chunks_mut(GROUP_MAX)) {
            self.fix_group(pages, guards)?;
        }
        for (page, guard) in pages.iter().zip(&mut guards) {
            if guard.is_none() {
                *guard = Some(self.fix_shared(*page)?);
            }
        }
        Ok(guards.into_iter().flatten().collect())
    }

    /// Fixes what is resident and reads what is absent, up to the first page for which there is no
    /// memory at once: pages that are read are not let go before all are. Others keep the rest.
    fn fix_group<'p>(
        &'p self,
        pages: &[PageId],
        guards: &mut [Option<SharedGuard<'p>>],
    ) -> Result<()> {
        let (mut absent, mut count) = ([0; GROUP_MAX], 0);
        for (index, page) in pages.iter().enumerate() {
            guards[index] = self.try_fix_shared(*page);
            if guards[index].is_none() {
                absent[count] = index;
                count += 1;
            }
        }
        let absent = &absent[..count];
        let (mut failed, mut is_full) = (None, false);
        self.read_group(
            count,
            &mut |i| {
                let page = Some(pages[absent[i]]).filter(|_| !is_full)?;
                self.begin_load(page).unwrap_or_else(|Full| {
                    is_full = true;
                    None
                })
            },
            &mut |i, loading, result| match result {
                Ok(()) => {
                    self.arrived(loading, 0, false);
                    self.word(loading.page).downgrade(false);
                    let latch = self.word(loading.page);
                    guards[absent[i]] =
                        Some(SharedGuard(Held::new(self, latch, HeldWord::seen(latch.load()))));
                }
                Err(error) => {
                    self.give_up(loading, 0);
                    failed = Some(error);
                }
            },
        )?;
        failed.map_or(Ok(()), Err)
    }

    /// Charges and locks an absent page, if nobody is in the way.
    ///
    /// # Errors
    /// When there is no memory for it after a moment.
    fn begin_load(&self, page: PageId) -> std::result::Result<Option<Loading>, Full> {
        let Some(latch) = self.words.get(page.as_usize()) else { return Ok(None) };
        let was = latch.load();
        let inside = page.0 > 0 && page.0 < self.end.load(Ordering::Acquire);
        let is_page = was.known_order().unwrap_or(0) == 0 && !was.is_unused();
        if !inside || !was.is_absent() || !is_page {
            return Ok(None);
        }
        let charge = |bytes| {
            let is_charged = self.manager.charge_briefly(&self.account, bytes);
            if is_charged { Ok(()) } else { Err(Full) }
        };
        let bytes = self.page_size();
        charge(bytes)?;
        let charged = self.charge_metadata_by(page, charge);
        if charged.is_err() || !latch.try_begin_load(was) {
            self.account.uncharge(bytes);
            return charged.map(|()| None);
        }
        self.counters.misses.fetch_add(1, Ordering::Relaxed);
        Ok(Some(Loading { page, was }))
    }

    /// Reads up to `count` pages, many at a time: those that `begin` locks, which makes room for
    /// the next while the device reads the ones before. Calls `each` once for every one. Returns
    /// how many there were.
    fn read_group(
        &self,
        count: usize,
        begin: &mut dyn FnMut(usize) -> Option<Loading>,
        each: &mut dyn FnMut(usize, Loading, Result<()>),
    ) -> Result<usize> {
        if count == 0 {
            return Ok(0);
        }
        let mut loads = [Loading { page: PageId(0), was: LatchWord::default() }; GROUP_MAX];
        let mut queue = self.take_queue()?;
        let (mut started, done) = (0, Cell::new(0));
        let mut wait = |queue: &mut dyn Queue, loads: &[Loading]| {
            let waited = queue.wait(WAIT, &mut |completion| {
                done.set(done.get() + 1);
                let i = completion.token as usize;
                let result = completion.result.and_then(|()| self.check(loads[i].page, 0));
                each(i, loads[i], result);
            });
            // The kernel refuses to wait only when it is out of memory for it: try again.
            if waited.is_err() {
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        for i in 0..count {
            let Some(loading) = begin(i) else { continue };
            loads[i] = loading;
            let segments = [Segment { ptr: self.ptr(loading.page), len: self.page_bytes }];
            let offset = self.offset(loading.page);
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
        self.give_queue(queue);
        Ok(started)
    }

    /// Asks for pages to be read ahead, in the background. Pages that cannot be queued, or for
    /// which there is no memory without waiting, are forgotten.
    pub fn prefetch(&self, pages: &[PageId]) {
        for page in pages {
            let absent = self.words.get(page.as_usize()).is_some_and(|w| w.load().is_absent());
            if absent && self.prefetches.push(*page).is_err() {
                break;
            }
        }
        if !self.prefetches.is_empty() {
            self.wake_worker();
        }
    }

    /// Reads pages that were asked for ahead; returns whether there were any.
    pub(super) fn serve_prefetches(&self) -> bool {
        if self.prefetches.is_empty() {
            return false;
        }
        let mut is_full = false;
        let mut begin = || {
            while !is_full {
                match self.begin_load(self.prefetches.pop()?) {
                    Ok(None) => {}
                    Ok(loading) => return loading,
                    Err(Full) => is_full = true,
                }
            }
            None
        };
        // An error shows again when somebody fixes the page.
        let read = self.read_group(DEPTH, &mut |_| begin(), &mut |_, loading, result| {
            if result.is_ok() {
                self.arrived(loading, 0, true);
                self.word(loading.page).unlock(false);
            } else {
                self.give_up(loading, 0);
            }
        });
        if is_full {
            // For the others there is no memory either.
            (0..PREFETCH_MAX).map_while(|_| self.prefetches.pop()).for_each(drop);
        }
        read.is_ok_and(|pages| pages > 0)
    }

    // Write-back.

    /// Writes pages that this thread marked by `try_begin_write`, in address order, neighbours in
    /// one request; ends each write.
    pub(super) fn write_group(&self, pages: &[PageId]) -> WriteResult {
        let mut runs = [(0usize, 0usize, 0usize); super::evict::BATCH_MAX];
        let mut run_count = 0;
        let mut total = WriteResult::default();
        for (index, page) in pages.iter().enumerate() {
            let order = self.word(*page).load().order();
            if let Err(reason) = self.prepare_write(*page, order) {
                self.word(*page).end_write(false);
                self.counters.refused.fetch_add(1, Ordering::Relaxed);
                total.refuse(*page, reason);
                continue;
            }
            let bytes = self.buffer_bytes(order);
            if let Some((first, count, len)) = runs[..run_count].last_mut()
                && *first + *count == index
                && self.offset(pages[*first]) + *len as u64 == self.offset(*page)
            {
                *count += 1;
                *len += bytes;
            } else {
                runs[run_count] = (index, 1, bytes);
                run_count += 1;
            }
        }
        self.write_runs(pages, &runs[..run_count], &mut total);
        total
    }

    fn write_runs(
        &self,
        pages: &[PageId],
        runs: &[(usize, usize, usize)],
        total: &mut WriteResult,
    ) {
        let mut finish = |(first, count, _): (usize, usize, usize), ok: bool| {
            for page in &pages[first..first + count] {
                self.word(*page).end_write(ok);
            }
            let (counter, sum) = if ok {
                (&*self.counters.written, &mut total.written)
            } else {
                (&self.counters.write_errors, &mut total.failed)
            };
            counter.fetch_add(count as u64, Ordering::Relaxed);
            *sum += count as u64;
        };
        let Ok(mut queue) = self.take_queue() else {
            return runs.iter().for_each(|run| finish(*run, false));
        };
        let (mut next, mut done) = (0, 0);
        while done < runs.len() {
            while next < runs.len() {
                let (first, _, len) = runs[next];
                let segments = [Segment { ptr: self.ptr(pages[first]), len }];
                let offset = self.offset(pages[first]);
                let request =
                    Request { token: next as u64, op: Op::Write, offset, segments: &segments };
                // SAFETY: this thread is a shared holder of the pages until the completion, so
                // nobody changes them, and their only writer.
                if !unsafe { queue.push(request) } {
                    break;
                }
                next += 1;
            }
            let waited = queue.wait(WAIT, &mut |completion| {
                done += 1;
                finish(runs[completion.token as usize], completion.result.is_ok());
            });
            if waited.is_err() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        self.give_queue(queue);
    }

    /// Asks the log and sets the checksum.
    ///
    /// # Errors
    /// What the log said, or that it panicked.
    fn prepare_write(&self, page: PageId, order: u8) -> Result<()> {
        if let Some(hook) = &self.before_write {
            let at = self.buffer_bytes(order) - TRAILER;
            // SAFETY: within the trailer of a page of which this thread is a shared holder: the
            // number does not change; aligned to 8.
            let lsn = unsafe { self.ptr(page).wrapping_add(at).cast::<u64>().read() };
            let panicked = Error::Os { call: "before_write (it panicked)", errno: crate::sys::EIO };
            survived(|| hook(page, lsn)).unwrap_or(Err(panicked))?;
        }
        if self.checksum {
            let sum = self.sum(page, order);
            // SAFETY: the sum belongs to the page's only writer, this thread; nobody reads it
            // while the page is resident.
            unsafe { self.sum_at(page, order).write(sum) };
        }
        Ok(())
    }
}

/// Calls code of the host, which may panic while this thread holds pages. `None`: it did.
fn survived<T>(call: impl FnOnce() -> T) -> Option<T> {
    std::panic::catch_unwind(AssertUnwindSafe(call)).ok()
}

/// Steps of the eviction clock in which as many pages are evicted as fit into the pool.
const STAMPS_PER_POOL: u64 = 64;
