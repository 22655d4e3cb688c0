//! Requests to the evictor, and its work when there are none.

use crate::base::deadline::Deadline;
use crate::base::units::{PageId, SlotCount};
use crate::paging::evict::Evictor;
use crate::paging::evict::content::Listed;
use crate::paging::evict::device_space::LONG;
use crate::paging::evict::victims::Chunkwise;
use crate::paging::kernel_filled;
use crate::paging::page::{BATCH_MAX, CHUNK_LEN};
use std::time::{Duration, Instant};

impl Evictor {
    /// Gives the device space of a run of freed slots back: any run when somebody has asked, while the
    /// device is quiet, or when it is full; a long one when more slots have been stale than in use for a
    /// while. Returns whether there was one.
    pub(super) fn discard_slots(&mut self) -> bool {
        // Before the count, so that what was freed before somebody asked is counted.
        self.space.is_asked |= self.requests.take_discard();
        let now = Instant::now();
        // Not while writes wait for a device: one that hangs is no quiet one, and would keep the evictor.
        let is_quiet =
            self.space.is_quiet(self.pager.slots().transfers(), now) && self.writes.is_idle();
        let (stale, used) = self.pager.slots().map().stale();
        let is_plenty = self.space.is_plenty(stale, used, now);
        if stale.0 == 0 {
            self.space.is_asked = false;
            return false;
        }
        if self.space.is_asked || is_quiet || self.writes.is_full() {
            return self.pager.discard_freed(SlotCount(1));
        }
        is_plenty && self.pager.discard_freed(LONG)
    }

    /// Evicts ranges that somebody asked to be evicted; answers when they are out.
    pub(super) fn serve_requests(&mut self) -> bool {
        let request = self.requests.take();
        // After it: what was handed over before somebody asked is on its way out when that is answered.
        let took = self.take_filled();
        let Some(request) = request else { return took };
        let (mut next, end) = (request.first.0, request.first.0 + request.count.0);
        while next < end {
            next += match self.take_chunk_of(PageId(next), end) {
                true => CHUNK_LEN.0,
                false => self.take_batch_of(PageId(next), end),
            };
            self.outgoing.make_due();
            self.finish_cooling(0);
            self.collect(Duration::ZERO);
        }
        if let Some(id) = request.id {
            self.finish_until(0);
            self.requests.answer(id);
        }
        true
    }

    /// Takes the runs of frames that direct stores have filled: their pages cool. Returns whether there were any.
    fn take_filled(&mut self) -> bool {
        let mut took = false;
        while let Some(first) = self.requests.take_filled() {
            self.pager.frames().spare_runs().set_filled(first, true);
            self.cool_run(first, Instant::now());
            took = true;
        }
        if took {
            self.outgoing.make_due();
            self.finish_cooling(0);
        }
        took
    }

    /// Takes the chunk that begins with `first` out whole, if it is open and ends before `end`. Page by
    /// page its huge page is split, and each page costs a MOVE and a release of its own
    /// (`book/src/design/write_back.md`).
    fn take_chunk_of(&mut self, first: PageId, end: u64) -> bool {
        let chunk = self.pager.table().chunk_of(first);
        let is_all = first.0.is_multiple_of(CHUNK_LEN.0) && first.0 + CHUNK_LEN.0 <= end;
        if !is_all || !self.pager.chunks().is_open(chunk) || !self.takes_chunks() {
            return false;
        }
        let mut run = self.take_run();
        while run.is_none()
            && self.outgoing_pages() > 0
            && self.finish_until(self.outgoing_pages() - 1)
        {
            run = self.take_run();
        }
        run.is_some_and(|run| {
            let took = self.take_chunk(run, |memory| kernel_filled::close_into(memory, chunk, run));
            took == Chunkwise::Went
        })
    }

    /// Takes pages out one by one, from `first` on and before `end`; returns how many it has looked at.
    fn take_batch_of(&mut self, first: PageId, end: u64) -> u64 {
        /// A fault beside the pages may open their chunk, or try to, between the close and the taking. Their
        /// words are `Empty` then, and they stayed in memory, asked for or not. Once one has left, its chunk
        /// is not opened again.
        const TRIES: u32 = 16;
        let mut batch = [PageId(0); BATCH_MAX];
        // Half of the frames for what is on its way out, half for the next batch: a page that
        // finds no frame would stay.
        let half = self.pager.frames().singles() / 2;
        let end = end.min(first.0 + BATCH_MAX as u64);
        // Up to a chunk that may leave whole.
        let mut stop = (first.0 + 1).next_multiple_of(CHUNK_LEN.0);
        while stop < end && !self.pager.chunks().is_open(self.pager.table().chunk_of(PageId(stop)))
        {
            stop += CHUNK_LEN.0;
        }
        let count = (end.min(stop) - first.0) as usize;
        let batch = &mut batch[..count];
        batch.iter_mut().zip(first.0..).for_each(|(page, id)| *page = PageId(id));
        let mut seen = [self.pager.chunks().look(self.pager.table().chunk_of(first)); BATCH_MAX];
        for _ in 0..TRIES {
            self.finish_until(half);
            for (page, seen) in batch.iter().zip(&mut seen) {
                // Where the process has too many mappings to close a chunk, its pages stay.
                let _ = kernel_filled::close_around(self.pager.memory(), *page);
                *seen = self.pager.chunks().look(self.pager.table().chunk_of(*page));
            }
            self.take_out(batch, Listed::Yes);
            let chunks = self.pager.chunks();
            let is_as_seen =
                |(page, seen)| chunks.is_as_seen(self.pager.table().chunk_of(page), seen);
            if batch.iter().copied().zip(seen).all(is_as_seen) {
                break;
            }
        }
        count as u64
    }

    /// True if anything is on its way out that the device has not failed to answer.
    fn has_hope(&self) -> bool {
        let waiting =
            self.outgoing.cooling.len() + self.writes.dirty.len() + self.outgoing.borrowed.len();
        self.writes.is_writing() || waiting > 0
    }

    /// Waits, for a bounded time, until at most `most` pages are on their way out; returns whether it has
    /// come to that.
    fn finish_until(&mut self, most: usize) -> bool {
        let mut deadline = Deadline::new(self.pager.health().deadline());
        while self.has_hope() && self.outgoing_pages() > most {
            self.outgoing.make_due();
            self.finish_cooling(0);
            self.finish_borrowed();
            self.collect(Duration::from_millis(1));
            if self.pager.health().is_stopping() || deadline.is_over() {
                return false;
            }
        }
        self.outgoing_pages() <= most
    }
}
