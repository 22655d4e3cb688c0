//! Prefetch: what faults and requests lead to is read before it is touched.
//!
//! A stream's window is read at once, as far as there is room; the rest, and what programs ask for,
//! waits in the region's queue of requests (`readahead`), from which each handler takes runs of pages.

use crate::base::units::{PageCount, PageId};
use crate::paging::fault::huge_reads::{ChunkStart, HugeReads};
use crate::paging::fault::in_memory;
use crate::paging::fault::reads::Reads;
use crate::paging::fault::status::{FaultStatus, Purpose};
use crate::paging::page::word::State;
use crate::paging::pager::Pager;
use crate::paging::readahead::{FaultOn, PrefetchRun, Window};
use std::sync::Arc;

/// Pages to read ahead after a fault on a page.
pub(in crate::paging) fn next_window(pager: &Pager, page: PageId, on: FaultOn) -> Option<Window> {
    let chunk = if pager.reads_chunks() { pager.pages_per_chunk() } else { 1 };
    let is_stored = |page: u64| {
        page < pager.page_count().0 && pager.word(PageId(page)).load().state() == State::Stored
    };
    pager.readahead().after_fault(page, on, pager.budget().limit(), chunk, &is_stored)
}

/// Pages that one handler prefetches.
pub(super) struct Prefetch {
    pager: Arc<Pager>,
    /// The run that it has taken from the region's queue, and has not accepted all of.
    run: Option<PrefetchRun>,
    /// The run waits for a run of frames, not for room.
    waits_for_frames: bool,
    /// It is counted with those that wait for room.
    is_starving: bool,
}

impl Prefetch {
    pub(super) fn new(pager: Arc<Pager>) -> Prefetch {
        Prefetch { pager, run: None, waits_for_frames: false, is_starving: false }
    }

    /// Whether pages wait for room, or for the device.
    pub(super) fn is_waiting(&self) -> bool {
        self.run.is_some()
    }

    /// Whether there is something that the handler has to finish.
    pub(super) fn has_work(&self) -> bool {
        self.run.is_some() || self.is_starving
    }

    // For streams.

    /// Asks for what a stream leads to after a fault on a page.
    pub(super) fn follow(
        &self,
        page: PageId,
        on: FaultOn,
        reads: &mut Reads,
        huge_reads: &mut HugeReads,
    ) {
        let Some(mut window) = next_window(&self.pager, page, on) else { return };
        let end = self.pager.page_count().0;
        let per_chunk = self.pager.pages_per_chunk();
        let chunks = window.split_chunks(per_chunk, end);
        let mut room = true;
        for page in window.pages(end) {
            room = room && self.start_page(page, reads);
            if !room {
                self.ask_later(page, 1);
            }
        }
        let Some((first, count)) = chunks else { return };
        for page in (first.0..first.0 + count.0).step_by(per_chunk as usize).map(PageId) {
            room = room && self.start_chunk(page, reads, huge_reads);
            if !room {
                self.ask_later(page, per_chunk);
            }
        }
    }

    /// Accepts a read of a page that a stream leads to; `false`: there is no room at the moment.
    fn start_page(&self, page: PageId, reads: &mut Reads) -> bool {
        let word = self.pager.word(page).load();
        if word.state() != State::Stored {
            return true;
        }
        let status = reads.accept(page, word, None);
        let is_reading = status == Some(FaultStatus::Reading);
        self.pager.counters().pages_read_ahead.add(u64::from(is_reading));
        status.is_none() || is_reading
    }

    /// Accepts a read of a chunk that a stream leads to; `false`: there is no room at the moment.
    fn start_chunk(&self, first: PageId, reads: &mut Reads, huge_reads: &mut HugeReads) -> bool {
        let per_chunk = self.pager.pages_per_chunk();
        match huge_reads.start(first, true, reads) {
            ChunkStart::Started => {
                self.pager.counters().pages_read_ahead.add(per_chunk);
                true
            }
            ChunkStart::Unfit => {
                let mut pages = (first.0..first.0 + per_chunk).map(PageId);
                pages.all(|page| self.start_page(page, reads))
            }
            ChunkStart::NoRoom | ChunkStart::Wait => false,
        }
    }

    /// Asks for pages that a stream leads to when the evictor has made room.
    fn ask_later(&self, first: PageId, count: u64) {
        let count = PageCount(count);
        self.pager.readahead().request(PrefetchRun { first, count, for_stream: true });
    }

    // On request.

    /// Accepts pages that were requested, as long as there are frames.
    pub(super) fn accept_requests(&mut self, reads: &mut Reads, huge_reads: &mut HugeReads) {
        while let Some(mut run) = self.run.take().or_else(|| self.pager.readahead().next_request())
        {
            while run.count.0 > 0 {
                let Some(accepted) = self.accept(run, reads, huge_reads) else {
                    // Requests are not worth waiting for when nothing can be evicted.
                    let hopeless = self.pager.health().is_exhausted();
                    self.run = (!hopeless).then_some(run);
                    return;
                };
                run.first = PageId(run.first.0 + accepted);
                run.count = PageCount(run.count.0 - accepted);
            }
        }
    }

    /// Accepts the chunk or the page that a run begins with. Returns how many pages that were; `None`:
    /// there is no room at the moment.
    fn accept(
        &mut self,
        run: PrefetchRun,
        reads: &mut Reads,
        huge_reads: &mut HugeReads,
    ) -> Option<u64> {
        self.waits_for_frames = false;
        let per_chunk = self.pager.pages_per_chunk();
        if run.first.0.is_multiple_of(per_chunk) && run.count.0 >= per_chunk {
            match huge_reads.start(run.first, run.for_stream, reads) {
                ChunkStart::Unfit => {}
                ChunkStart::Started => {
                    self.pager.counters().pages_prefetched.add(per_chunk);
                    return Some(per_chunk);
                }
                ChunkStart::Wait => {
                    self.waits_for_frames = true;
                    return None;
                }
                ChunkStart::NoRoom => return None,
            }
        }
        self.accept_page(run.first, reads).then_some(1)
    }

    /// Accepts one page; `false`: there is no room, or the device has enough to do.
    fn accept_page(&self, page: PageId, reads: &mut Reads) -> bool {
        let word = self.pager.word(page).load();
        match word.state() {
            State::Stored => match reads.accept(page, word, None) {
                Some(FaultStatus::Resolved | FaultStatus::Reading) => {
                    self.pager.counters().pages_prefetched.bump();
                    true
                }
                Some(_) => false,
                None => true,
            },
            State::Cooling => {
                let status = in_memory::take_back(&self.pager, page, word, Purpose::Prefetch);
                status != Some(FaultStatus::NoRoom)
            }
            _ => true,
        }
    }

    /// Tells the evictor whether this handler waits for room.
    pub(super) fn note_starving(&mut self) {
        let is_starving = self.run.is_some() && !self.waits_for_frames;
        if is_starving != self.is_starving {
            self.is_starving = is_starving;
            if is_starving {
                self.pager.pool().waiters().begin_starving();
            } else {
                self.pager.pool().waiters().end_starving();
            }
        }
        if is_starving {
            self.pager.pool().waiters().call_evictor();
        }
    }
}
