//! Prefetch: what faults and requests lead to is read before it is touched.
//!
//! A stream's window is read at once, as far as there is room; the rest, and what programs ask for,
//! waits in the region's queue of requests (`readahead`), from which each handler takes runs of pages.

use crate::base::units::{ByteCount, PageCount, PageId};
use crate::paging::fault::huge_reads::HugeReads;
use crate::paging::fault::in_memory;
use crate::paging::fault::reads::Reads;
use crate::paging::fault::status::{FaultStatus, Purpose};
use crate::paging::page::CHUNK_LEN;
use crate::paging::page::word::State;
use crate::paging::pager::Pager;
use crate::paging::readahead::{FaultOn, PrefetchRun, Window};
use std::iter::once;
use std::sync::Arc;

/// Pages to read ahead after a fault on a page.
pub(in crate::paging) fn next_window(pager: &Pager, page: PageId, on: FaultOn) -> Option<Window> {
    let is_stored = |page: u64| {
        page < pager.table().page_count().0
            && pager.word(PageId(page)).load().state() == State::Stored
    };
    // Others may hold most of the limit: a chunk that is read into the rest pushes the one before it out.
    let within = ByteCount(pager.budget().charged().0 + pager.budget().free().0);
    let by_chunks = pager.memory().reads_chunks();
    pager.readahead().after_fault(page, on, within, by_chunks, &is_stored)
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

    /// True if pages wait for room, or for the device.
    pub(super) fn is_waiting(&self) -> bool {
        self.run.is_some()
    }

    /// True if there is something that the handler has to finish.
    pub(super) fn has_work(&self) -> bool {
        self.run.is_some() || self.is_starving
    }

    /// Accepts what a stream leads to after a fault on a page, as far as there is room; asks for the rest.
    pub(super) fn follow(
        &mut self,
        page: PageId,
        mut window: Window,
        reads: &mut Reads,
        huge_reads: &mut HugeReads,
    ) {
        let end = self.pager.table().page_count().0;
        let chunks = window.split_chunks(end).map(|first| (first, CHUNK_LEN.0));
        let mut room = true;
        let cluster = self.pager.table().pages_of_cluster(page);
        let cluster = once((PageId(cluster.start), cluster.end - cluster.start));
        for (first, count) in cluster.chain(window.rows(end)).chain(chunks) {
            let mut run = PrefetchRun { first, count: PageCount(count), for_stream: true };
            room = room && self.accept_run(&mut run, reads, huge_reads);
            if !room {
                self.pager.readahead().request(run);
            }
        }
    }

    /// Accepts pages that were requested, as long as there are frames.
    pub(super) fn accept_requests(&mut self, reads: &mut Reads, huge_reads: &mut HugeReads) {
        while let Some(mut run) = self.run.take().or_else(|| self.pager.readahead().next_request())
        {
            if !self.accept_run(&mut run, reads, huge_reads) {
                // Requests are not worth waiting for when nothing can be evicted.
                self.run = (!self.pager.health().is_exhausted()).then_some(run);
                return;
            }
        }
    }

    /// Accepts the pages of a run as far as there is room, and leaves the others in it. Returns whether there are none.
    fn accept_run(
        &mut self,
        run: &mut PrefetchRun,
        reads: &mut Reads,
        huge_reads: &mut HugeReads,
    ) -> bool {
        while run.count.0 > 0 {
            let Some(accepted) = self.accept(*run, reads, huge_reads) else { return false };
            run.first = PageId(run.first.0 + accepted);
            run.count = PageCount(run.count.0 - accepted);
        }
        true
    }

    /// Accepts the chunk, or the pages that are stored, that a run begins with. Returns how many pages that were; `None`:
    /// there is no room at the moment.
    fn accept(
        &mut self,
        run: PrefetchRun,
        reads: &mut Reads,
        huge_reads: &mut HugeReads,
    ) -> Option<u64> {
        self.waits_for_frames = false;
        let counters = self.pager.counters();
        let reading = match run.for_stream {
            true => &counters.pages_read_ahead,
            false => &counters.pages_prefetched,
        };
        if run.first.0.is_multiple_of(CHUNK_LEN.0)
            && run.count.0 >= CHUNK_LEN.0
            && let Some(status) = huge_reads.start(run.first, run.for_stream, reads)
        {
            self.waits_for_frames = status == FaultStatus::QueueFull;
            let is_reading = status == FaultStatus::Reading;
            reading.add(if is_reading { CHUNK_LEN.0 } else { 0 });
            return is_reading.then_some(CHUNK_LEN.0);
        }
        let word = self.pager.word(run.first).load();
        let status = match word.state() {
            State::Stored => {
                let (looked, accepted) = reads.accept_row(run.first, run.count.0)?;
                reading.add(accepted);
                return Some(looked);
            }
            State::Cooling => in_memory::take_back(&self.pager, run.first, word, Purpose::Prefetch),
            _ => None,
        };
        (status != Some(FaultStatus::NoRoom)).then_some(1)
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
