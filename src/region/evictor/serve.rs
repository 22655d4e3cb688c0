//! What others ask of the evictor, and what it does when nobody does.

use super::Evictor;
use super::take::Listed;
use crate::base::sync::Ordering;
use crate::base::units::{PageId, SlotCount};
use crate::region::pager::BATCH_MAX;
use crate::region::{guarded, report};
use std::time::{Duration, Instant};

impl Evictor {
    /// Returns device space of freed slots, a run at a time, while pages neither come nor go. A
    /// file system that returns space lets nobody read or write the file meanwhile, and what is
    /// written next has to be given space again: under load only what exceeds a reserve goes.
    pub(super) fn discard_slots(&mut self) -> bool {
        const CALM: Duration = Duration::from_millis(50);
        const RESERVE_BYTES: u64 = 64 << 20;
        const RESERVE_PART: u64 = 8;
        let calm = self.traffic_since().elapsed() >= CALM;
        let slots = &self.pager.slots;
        let reserve = RESERVE_BYTES / self.pager.page_bytes as u64;
        let keep = if calm { 0 } else { reserve.max(slots.in_use().0 / RESERVE_PART) };
        let Some((first, count)) = slots.next_discardable(SlotCount(keep)) else { return false };
        let len = count.0 * self.pager.page_bytes as u64;
        let (store, offset) = (&self.pager.store, self.pager.slot_offset(first));
        let result = guarded(&self.pager, || store.discard(offset, len)).unwrap_or(Ok(()));
        if let Err(error) = result {
            report::warn("device space could not be returned", &error);
        }
        self.pager.slots.discarded((first, count));
        true
    }

    /// When a page was last seen coming from the device or going there.
    fn traffic_since(&mut self) -> Instant {
        let counters = &self.pager.counters;
        let pages = counters.pages_in.get() + counters.pages_out.get();
        if pages != self.traffic.0 || !self.idle() {
            self.traffic = (pages, Instant::now());
        }
        self.traffic.1
    }

    /// Evicts ranges that somebody asked to be evicted; answers when they are out.
    pub(super) fn serve_requests(&mut self) -> bool {
        let Some(request) = self.requests.take() else { return false };
        let mut batch = [PageId(0); BATCH_MAX];
        let mut next = request.first.0;
        let end = request.first.0 + request.count.0;
        // Half of the frames for what is on its way out, half for the next batch: a page that
        // finds no frame would stay.
        let half = self.pager.frames.singles() / 2;
        while next < end {
            let count = BATCH_MAX.min(half).min((end - next) as usize);
            self.settle_until(half);
            batch.iter_mut().zip(next..).for_each(|(page, id)| *page = PageId(id));
            batch[..count].iter().for_each(|page| self.pager.close_around(*page));
            self.take_out(&mut batch[..count], Listed::Yes);
            self.settle_cooling(0);
            if let Err(error) = self.collect(Duration::ZERO) {
                report::fatal("the evictor lost its device queue", &error);
            }
            next += count as u64;
        }
        self.finish_everything();
        self.requests.answer(request.id);
        true
    }

    /// Whether anything is on its way out that the device has not failed to answer.
    fn has_hope(&self) -> bool {
        let writing = self.writes.iter().any(|write| !write.pages.is_empty() && !write.overdue);
        let waiting = self.cooling.len() + self.dirty.len() + self.lingering.len();
        writing || waiting > 0
    }

    /// Waits, for a bounded time, until all that is cooling or being written has settled.
    fn finish_everything(&mut self) {
        self.settle_until(0);
    }

    /// Waits, for a bounded time, until at most `most` pages are on their way out.
    fn settle_until(&mut self, most: usize) {
        let started = Instant::now();
        while self.has_hope() && self.leaving() > most {
            self.settle_cooling(0);
            self.settle_lingering();
            if let Err(error) = self.collect(Duration::from_millis(1)) {
                report::fatal("the evictor lost its device queue", &error);
            }
            if self.pager.stop.load(Ordering::Acquire) || started.elapsed() > self.deadline {
                return;
            }
        }
    }
}
