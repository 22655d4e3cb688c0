//! Chunks that a stream leads to: read whole into a huge page, mapped whole by one MOVE.
//!
//! A device is paid by request and by segment, a mapping by page. A run of frames is one huge page:
//! a read into it has one segment, and MOVE carries it into the region, and later out again, without
//! taking it apart. So where a stream leads through all of a chunk, its pages get the frames of
//! one run, and are mapped together when the last of them has been read.
//!
//! ```text
//!   Stored x n --start--> Filling, in one run --read, checked--> held --fault--> MOVE of all, Resident
//!                                    '-- one fails, or is discarded --> page by page
//! ```
//! Pages read for a stream are *held*, not mapped, until a thread faults on it: that fault tells
//! where the reader is, which is when more is asked for, and what is never used is not mapped. No
//! thread that waits for a page of it is held up: a fault on a chunk that has been read maps it.
//!
//! # Invariants
//! 1. The pages of an open chunk are `Filling` with the frames of its run, in order, and nothing is
//!    mapped at their addresses.
//! 2. A chunk ends by being mapped or broken up; its pages are then like any others.

use crate::base::units::PageId;
use crate::paging::fault::reads::{Reads, RequestCount, WakeContext};
use crate::paging::fault::status::FaultStatus;
use crate::paging::page::word::{FrameId, State, Word};
use crate::paging::page::{CHUNK_LEN, CHUNK_PAGES};
use crate::paging::pager::Pager;
use crate::paging::pager::frame_pool::NoRun;
use crate::paging::pager::table::PageTable;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a chunk that was read is held for its stream. Then it is mapped, so that it can be
/// evicted.
const HOLD_MAX: Duration = Duration::from_millis(50);

/// Maximum number of requests that a chunk is read with.
const REQUESTS_MAX: usize = 64;

/// A chunk that is being read, or held.
#[derive(Clone, Copy, Debug)]
struct ChunkRead {
    page: PageId,
    frame: FrameId,
    read: PageBits,
    /// Until when it is held once it has been read; `None`: it is not.
    hold: Option<Instant>,
}

/// A bit for each page of a chunk that has been read and checked.
#[derive(Clone, Copy, Debug, Default)]
struct PageBits([u64; CHUNK_PAGES / 64]);

impl PageBits {
    fn add(&mut self, page: u32) {
        self.0[page as usize / 64] |= 1 << (page % 64);
    }

    fn has(&self, page: u32) -> bool {
        self.0[page as usize / 64] & 1 << (page % 64) != 0
    }

    fn is_full(&self) -> bool {
        self.0.iter().all(|bits| *bits == u64::MAX)
    }
}

/// The requests that read the pages of a chunk; `None`: not all are stored, or they lie so far apart that nothing is won.
fn requests_of(table: &PageTable, pages: impl Iterator<Item = PageId>) -> Option<usize> {
    let mut requests = RequestCount::default();
    for page in pages {
        let word = table.word(page).load();
        if word.state() != State::Stored {
            return None;
        }
        requests.add(word.slot().expect("a stored page has a slot"));
    }
    (requests.count() <= REQUESTS_MAX).then_some(requests.count())
}

/// The chunks that one handler reads.
pub(super) struct HugeReads {
    pager: Arc<Pager>,
    /// By run of frames.
    chunks: Vec<Option<ChunkRead>>,
    /// How many of them there are.
    open: usize,
}

impl HugeReads {
    pub(super) fn new(pager: Arc<Pager>) -> HugeReads {
        HugeReads { chunks: vec![None; pager.frames().runs()], open: 0, pager }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.open == 0
    }

    /// Accepts reads of all pages of the chunk that begins with `first`. With `for_stream` the chunk is
    /// held until its reader gets there. `QueueFull`: it waits until one of this handler's chunks is mapped, or the
    /// device has answered. `None`: its pages are not all on the device, or there is no run of frames: page by page.
    pub(super) fn start(
        &mut self,
        first: PageId,
        for_stream: bool,
        reads: &mut Reads,
    ) -> Option<FaultStatus> {
        let pages = (first.0..).take(CHUNK_PAGES).map(PageId);
        if !self.pager.memory().reads_chunks() {
            return None;
        }
        let requests = requests_of(self.pager.table(), pages.clone())?;
        if !reads.has_room_for(requests) {
            return Some(FaultStatus::QueueFull);
        }
        if self.pager.starved().len() > 0 {
            return Some(FaultStatus::NoRoom); // Faults go first.
        }
        let frame = match self.pager.pool().charged_run() {
            Ok(frame) => frame,
            Err(NoRun::Starved) => return Some(FaultStatus::NoRoom),
            // Other threads may have them for long; this handler's own come back.
            Err(NoRun::AllInUse) if self.open > 0 => return Some(FaultStatus::QueueFull),
            Err(NoRun::AllInUse) => return None,
        };
        let accepted = reads.accept_run(frame, pages);
        // Else what was accepted comes page by page.
        if accepted == CHUNK_LEN.0 {
            let run = self.pager.frames().run_of(frame).expect("a frame of a run");
            let hold = for_stream.then(|| Instant::now() + HOLD_MAX);
            let read = PageBits::default();
            self.chunks[run] = Some(ChunkRead { page: first, frame, read, hold });
            self.open += 1;
        }
        self.pager.pool().check_low();
        Some(FaultStatus::Reading)
    }

    /// True if a frame that is being read is of an open chunk of this handler's.
    pub(super) fn contains(&self, frame: FrameId) -> bool {
        self.pager.frames().run_of(frame).is_some_and(|run| self.chunks[run].is_some())
    }

    /// A page has been read and checked. Returns whether it is of an open chunk, and so is not to be
    /// mapped alone.
    pub(super) fn page_read(&mut self, frame: FrameId) -> bool {
        let Some(run) = self.pager.frames().run_of(frame) else { return false };
        let Some(chunk) = &mut self.chunks[run] else { return false };
        chunk.read.add(frame.0 - chunk.frame.0);
        true
    }

    /// Maps the chunks that have been read and are not held any longer.
    pub(super) fn map_ready(&mut self, reads: &mut Reads, context: WakeContext<'_>) {
        if self.open == 0 {
            return;
        }
        let starving = self.pager.pool().waiters().is_starving();
        for run in 0..self.chunks.len() {
            let Some(chunk) = self.chunks[run] else { continue };
            if chunk.read.is_full() && (starving || !self.is_held(&chunk)) {
                self.end(run);
                reads.map(chunk.frame, CHUNK_PAGES, 1, context);
            }
        }
    }

    /// True if no fault has asked for a chunk yet and there is time for that.
    fn is_held(&self, chunk: &ChunkRead) -> bool {
        let untouched = |(page, frame): (u64, u32)| {
            // Neither wanted nor discarded.
            self.pager.word(PageId(page)).load() == Word::filling(FrameId(frame))
        };
        chunk.hold.is_some_and(|until| Instant::now() < until)
            && (chunk.page.0..).zip(chunk.frame.0..).take(CHUNK_PAGES).all(untouched)
    }

    fn end(&mut self, run: usize) {
        self.chunks[run] = None;
        self.open -= 1;
    }

    /// Ends the chunk that a frame is of, if there is one: a page of it could not be read. What has
    /// been read is mapped page by page, and so is the rest when it comes.
    pub(super) fn break_up(&mut self, frame: FrameId, reads: &mut Reads, context: WakeContext<'_>) {
        let Some(run) = self.pager.frames().run_of(frame) else { return };
        let Some(chunk) = self.chunks[run] else { return };
        self.end(run);
        let is_read = |n: &u32| chunk.read.has(*n);
        for n in (0..CHUNK_PAGES as u32).filter(is_read) {
            reads.map(FrameId(chunk.frame.0 + n), 1, 1, context);
        }
    }
}
