//! What others ask of the evictor, and what it does when nobody does.

use crate::base::deadline::Deadline;
use crate::base::units::PageId;
use crate::paging::diagnostics;
use crate::paging::evict::Evictor;
use crate::paging::evict::device_space::LONG_BYTES;
use crate::paging::evict::victims::Listed;
use crate::paging::kernel_filled;
use crate::paging::page::BATCH_MAX;
use std::time::{Duration, Instant};

impl Evictor {
    /// Gives the device space of a run of freed slots back: any run when somebody has asked, while the
    /// device is quiet, or when it is full; a long one when more slots are stale than in use. Returns
    /// whether there was one.
    pub(super) fn discard_slots(&mut self) -> bool {
        // Before the count, so that what was freed before somebody asked is counted.
        self.space.is_asked |= self.requests.take_discard();
        let is_quiet = self.space.is_quiet(self.pager.slots().transfers(), Instant::now());
        let (stale, used) = self.pager.slots().map().stale();
        if stale.0 == 0 {
            self.space.is_asked = false;
            return false;
        }
        if self.space.is_asked || is_quiet || self.device_is_full() {
            return self.pager.discard_freed(0);
        }
        stale > used && self.pager.discard_freed(LONG_BYTES)
    }

    /// Evicts ranges that somebody asked to be evicted; answers when they are out.
    pub(super) fn serve_requests(&mut self) -> bool {
        let Some(request) = self.requests.take() else { return false };
        let mut batch = [PageId(0); BATCH_MAX];
        let mut next = request.first.0;
        let end = request.first.0 + request.count.0;
        // Half of the frames for what is on its way out, half for the next batch: a page that
        // finds no frame would stay.
        let half = self.pager.frames().singles() / 2;
        while next < end {
            let count = BATCH_MAX.min(half).min((end - next) as usize);
            self.settle_until(half);
            batch.iter_mut().zip(next..).for_each(|(page, id)| *page = PageId(id));
            // Where the process has too many mappings to close a chunk, its pages stay.
            for page in &batch[..count] {
                let _ = kernel_filled::close_around(&self.pager, *page);
            }
            self.take_out(&mut batch[..count], Listed::Yes);
            self.settle_cooling(0);
            if let Err(error) = self.collect(Duration::ZERO) {
                diagnostics::fatal("the evictor lost its device queue", &error);
            }
            next += count as u64;
        }
        self.finish_everything();
        self.requests.answer(request.id);
        true
    }

    /// Whether anything is on its way out that the device has not failed to answer.
    fn has_hope(&self) -> bool {
        let waiting =
            self.leaving.cooling.len() + self.device.dirty.len() + self.leaving.lingering.len();
        self.is_writing() || waiting > 0
    }

    /// Whether the device has a write that it has not failed to answer.
    pub(super) fn is_writing(&self) -> bool {
        self.device.writes.iter().any(|write| !write.pages.is_empty() && !write.overdue)
    }

    /// Waits, for a bounded time, until all that is cooling or being written has settled.
    fn finish_everything(&mut self) {
        self.settle_until(0);
    }

    /// Waits, for a bounded time, until at most `most` pages are on their way out.
    fn settle_until(&mut self, most: usize) {
        let mut deadline = Deadline::new(self.device.deadline);
        while self.has_hope() && self.leaving() > most {
            self.settle_cooling(0);
            self.settle_lingering();
            if let Err(error) = self.collect(Duration::from_millis(1)) {
                diagnostics::fatal("the evictor lost its device queue", &error);
            }
            if self.pager.health().is_stopping() || deadline.is_over() {
                return;
            }
        }
    }
}
