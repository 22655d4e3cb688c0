//! Write-back: dirty pages are written to the table file, neighbours in one request.
#![expect(unsafe_code, reason = "lends page memory to the device")]

use super::file::{TableFile, survived};
use super::frames::{BATCH_MAX, PoolFrames};
use super::stats::PoolStats;
use super::write_result::WriteResult;
use crate::base::counter::Counter;
use crate::base::error::{Error, Result};
use crate::base::local::keep_local;
use crate::base::sync::{AtomicBool, Ordering, Rank, Ranked};
use crate::base::units::PageId;
use crate::store::Op;
use arrayvec::ArrayVec;
use std::sync::Arc;

/// Asked before a page is written back: the write-ahead log must hold record `lsn` first.
pub(super) type BeforeWrite = dyn Fn(PageId, u64) -> Result<()> + Send + Sync;

/// Pages next to each other in the file that are written by one request.
#[derive(Clone, Copy, Default)]
struct PageRun {
    /// Where the run begins in the batch.
    first: usize,
    count: usize,
}

/// Writes pages of one table file.
pub(super) struct PageWriter {
    file: Arc<TableFile>,
    before_write: Option<Box<BeforeWrite>>,
    written: Counter,
    cleaned: Counter,
    failed: Counter,
    refused: Counter,
    /// Why pages of the last batch could not be written: what cannot be evicted for it stays in memory.
    trouble: Ranked<Option<Error>>,
    is_troubled: AtomicBool,
}

impl PageWriter {
    pub(super) fn new(file: Arc<TableFile>, before_write: Option<Box<BeforeWrite>>) -> PageWriter {
        let [written, cleaned, failed, refused] = [(); 4].map(|()| Counter::default());
        let trouble = Ranked::new(Rank::Leaf, None);
        let is_troubled = AtomicBool::new(false);
        PageWriter { file, before_write, written, cleaned, failed, refused, trouble, is_troubled }
    }

    /// Why pages could not be written the last time that any were to be.
    pub(super) fn trouble(&self) -> Option<Error> {
        self.trouble.lock().clone()
    }

    fn note_trouble(&self, frames: &PoolFrames, result: &WriteResult) {
        let trouble = result.trouble();
        frames.account.set_troubled(trouble.is_some());
        let was_troubled = self.is_troubled.swap(trouble.is_some(), Ordering::Relaxed);
        if was_troubled || trouble.is_some() {
            let _ours = keep_local();
            *self.trouble.lock() = trouble.cloned();
        }
    }

    /// Adds this part's statistics.
    pub(super) fn show(&self, stats: &mut PoolStats) {
        stats.pages_written = self.written.reading();
        stats.pages_cleaned = self.cleaned.reading();
        stats.write_errors = self.failed.reading();
        stats.write_refusals = self.refused.reading();
    }

    /// As [`write`](Self::write), ahead of eviction; returns how many pages were written.
    pub(super) fn clean(&self, frames: &PoolFrames, pages: &[PageId]) -> u64 {
        let written = self.write(frames, pages).written;
        self.cleaned.add(written);
        written
    }

    /// Writes pages that this thread marked by `try_begin_write`, in address order, neighbours in
    /// one request; ends each write.
    pub(super) fn write(&self, frames: &PoolFrames, pages: &[PageId]) -> WriteResult {
        let table = &frames.table;
        let mut runs: ArrayVec<PageRun, BATCH_MAX> = ArrayVec::new();
        let mut result = WriteResult::default();
        for (index, page) in pages.iter().enumerate() {
            let latch = table.word(*page);
            if let Err(reason) = self.prepare(frames, *page) {
                latch.end_write(false);
                self.refused.add(1);
                result.refuse(*page, reason);
                continue;
            }
            if let Some(run) = runs.last_mut()
                && run.first + run.count == index
                && pages[run.first].0 + run.count as u64 == page.0
            {
                run.count += 1;
            } else {
                runs.push(PageRun { first: index, count: 1 });
            }
        }
        self.write_runs(frames, pages, &runs, &mut result);
        if !pages.is_empty() {
            self.note_trouble(frames, &result);
        }
        result
    }

    fn write_runs(
        &self,
        frames: &PoolFrames,
        pages: &[PageId],
        runs: &[PageRun],
        result: &mut WriteResult,
    ) {
        let table = &frames.table;
        let mut finish = |run: PageRun, written: Result<()>| {
            let count = run.count as u64;
            for page in &pages[run.first..run.first + run.count] {
                table.word(*page).end_write(written.is_ok());
            }
            if let Err(error) = written {
                self.failed.add(count);
                result.failure.get_or_insert(error);
            } else {
                self.written.add(count);
                result.written += count;
            }
        };
        let mut next = runs.iter().map(|run| {
            let first = pages[run.first];
            (*run, table.segment(first, run.count * table.page_bytes()), table.offset(first))
        });
        let (account, next) = (&frames.account, || next.next());
        // SAFETY: this thread is a shared holder of the pages until `finish`, so nobody changes them,
        // and their only writer.
        if let Err(error) = unsafe { self.file.transfer(account, Op::Write, next, &mut finish) } {
            runs.iter().for_each(|run| finish(*run, Err(error.clone())));
        }
    }

    /// Asks the log and sets the checksum.
    ///
    /// # Errors
    /// Answer of the log, or its panic.
    fn prepare(&self, frames: &PoolFrames, page: PageId) -> Result<()> {
        let table = &frames.table;
        if let Some(hook) = &self.before_write {
            let place = table.lsn_at().map(|at| table.ptr(page).wrapping_add(at).cast::<u64>());
            // SAFETY: within the trailer of a page of which this thread is a shared holder: the
            // number does not change; aligned to 8.
            let lsn = place.map_or(0, |place| unsafe { place.read() });
            let panicked = Error::Os { call: "before_write (it panicked)", errno: crate::sys::EIO };
            survived(|| hook(page, lsn)).unwrap_or(Err(panicked))?;
        }
        self.file.seal(table, page);
        Ok(())
    }

    /// Writes all dirty pages, as [`BufferPool::flush`](super::BufferPool::flush) says.
    ///
    /// # Errors
    /// As for [`write_those`](Self::write_those).
    pub(super) fn write_all(&self, frames: &PoolFrames) -> Result<Option<Error>> {
        let steps = 0..frames.table.steps();
        self.write_those(frames, steps.flat_map(|step| frames.resident.pages(step)))
    }

    /// Writes those of `pages`, in address order, that are dirty. Returns the error of pages that the
    /// log refused, if there were any.
    ///
    /// # Errors
    /// [`Error::LatchTimeout`] when a page is held exclusively for too long; that of the first write
    /// that the device did not take, mostly [`Error::Io`].
    pub(super) fn write_those(
        &self,
        frames: &PoolFrames,
        pages: impl Iterator<Item = PageId>,
    ) -> Result<Option<Error>> {
        let mut result = WriteResult::default();
        let mut batch: ArrayVec<PageId, BATCH_MAX> = ArrayVec::new();
        for page in pages {
            let is_held = match try_hold(frames, page) {
                Some(is_held) => is_held,
                None => {
                    // The page's holder may itself wait for one of the pages held here.
                    result.add(self.write(frames, &batch));
                    batch.clear();
                    hold(frames, page)?
                }
            };
            if is_held {
                batch.push(page);
            }
            if batch.is_full() {
                result.add(self.write(frames, &batch));
                batch.clear();
            }
        }
        result.add(self.write(frames, &batch));
        match result.failure.take() {
            Some(error) => Err(error),
            None => Ok(result.into_refusal(frames.table.path())),
        }
    }
}

/// Holds a dirty page for writing; `false` when it is clean or gone.
fn hold(frames: &PoolFrames, page: PageId) -> Result<bool> {
    let mut backoff = frames.backoff();
    let held = backoff.until(|| try_hold(frames, page));
    held.ok_or_else(|| frames.table.timeout(page, &backoff))
}

/// The same without waiting. `None`: another holder is in the way.
fn try_hold(frames: &PoolFrames, page: PageId) -> Option<bool> {
    let latch = frames.table.word(page);
    loop {
        let seen = latch.load();
        if seen.is_absent() || seen.is_readable() && !seen.dirty() {
            return Some(false);
        }
        if latch.try_begin_write(seen) {
            return Some(true);
        }
        if !seen.is_readable() || seen.writing() || !seen.has_room() {
            return None;
        }
    }
}
