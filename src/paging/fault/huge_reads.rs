//! Chunks that a stream leads to: read whole into a huge page, mapped whole by one MOVE.
//!
//! A device is paid by request and by segment, a mapping by page. A run of frames is one huge page:
//! a read into it has one segment, and MOVE carries it into the region, and later out again, without
//! taking it apart. So where a stream leads through all of a chunk, its pages get the frames of
//! one run, and are mapped together when the last of them has been read.
//!
//! ```text
//!   Stored x n --ask--> Filling, in one run --read, checked--> held --fault--> MOVE of all, Resident
//!                                    '-- one fails, or dies --> page by page
//! ```
//! What was read for a stream is *held*, not mapped, until somebody faults on it: that fault tells
//! where the reader is, which is when more is asked for, and what is never used is not mapped. Nobody
//! who waits for a page of it is held up: a fault on a chunk that has been read maps it.
//!
//! # Invariants
//! 1. The pages of an open chunk are `Filling` with the frames of its run, in order, and nothing is
//!    mapped at their addresses.
//! 2. A chunk ends by being mapped or broken; its pages are then like any others.

use crate::base::sync::Ordering;
use crate::base::units::{PageCount, PageId};
use crate::paging::fault::handler::{DEPTH, Handler};
use crate::paging::fault::reads::{Access, Fill, Intent};
use crate::paging::page::chunks::CHUNK_PAGES_MAX;
use crate::paging::page::protocol::{self, Filled};
use crate::paging::page::word::{FrameId, State, Word};
use crate::paging::pager::room::NoRun;
use crate::paging::readahead::{FaultOn, PrefetchRun};
use std::time::{Duration, Instant};

/// How long a chunk that was read is held for its stream. Then it is mapped, so that it can be
/// evicted.
const HOLD_MAX: Duration = Duration::from_millis(50);

/// A chunk that is being read, or held.
#[derive(Clone, Copy, Debug)]
pub(in crate::paging) struct Chunk {
    page: PageId,
    frame: FrameId,
    /// A bit for each page that has been read and checked.
    read: u64,
    /// Until when it is held once it has been read; `None`: it is not.
    hold: Option<Instant>,
}

/// What became of a chunk that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    Started,
    /// Its pages are not all on the device, or runs are not to be had: page by page.
    Unfit,
    /// When there is room.
    Starved,
    /// When one of this handler's chunks is mapped, or the device has answered.
    Wait,
}

impl Handler {
    /// Asks for the whole chunks that a stream leads to.
    pub(in crate::paging) fn ask_chunks(
        &mut self,
        first: PageId,
        count: PageCount,
        mut room: bool,
    ) {
        let per_chunk = self.pager.pages_per_chunk();
        for page in (first.0..first.0 + count.0).step_by(per_chunk as usize).map(PageId) {
            if room {
                match self.start_chunk(page, true) {
                    Asked::Started => {
                        self.pager.counters().pages_read_ahead.add(per_chunk);
                        continue;
                    }
                    Asked::Unfit => {
                        let mut pages = (page.0..page.0 + per_chunk).map(PageId);
                        room = pages.all(|page| self.start_ahead(page));
                    }
                    Asked::Starved | Asked::Wait => room = false,
                }
            }
            if !room {
                let count = PageCount(per_chunk);
                // When there is some.
                self.pager.readahead.request(PrefetchRun { first: page, count, for_stream: true });
            }
        }
    }

    /// Accepts the chunk that `run` begins with, if it does. `None`: page by page. Else what is left
    /// of `run`, or that it has to wait.
    pub(in crate::paging) fn accept_chunk(
        &mut self,
        run: PrefetchRun,
    ) -> Option<Result<PrefetchRun, ()>> {
        let per_chunk = self.pager.pages_per_chunk();
        if !run.first.0.is_multiple_of(per_chunk) || run.count.0 < per_chunk {
            return None;
        }
        self.waits_for_run = false;
        match self.start_chunk(run.first, run.for_stream) {
            Asked::Unfit => None,
            Asked::Started => {
                self.pager.counters().pages_prefetched.add(per_chunk);
                let first = PageId(run.first.0 + per_chunk);
                Some(Ok(PrefetchRun { first, count: PageCount(run.count.0 - per_chunk), ..run }))
            }
            Asked::Wait => {
                self.waits_for_run = true;
                Some(Err(()))
            }
            Asked::Starved => Some(Err(())),
        }
    }

    /// Accepts a read of the chunk that begins with `first`.
    fn start_chunk(&mut self, first: PageId, held: bool) -> Asked {
        let per_chunk = self.pager.pages_per_chunk();
        let pages = (first.0..first.0 + per_chunk).map(PageId);
        let is_stored = |page: PageId| self.pager.word(page).load().state() == State::Stored;
        if !self.pager.reads_chunks || !pages.clone().all(is_stored) {
            return Asked::Unfit;
        }
        let asked = self.fills.len() + self.queue.in_flight() as usize;
        if asked + per_chunk as usize > DEPTH as usize {
            return Asked::Wait;
        }
        if self.pager.starved.len() > 0 {
            return Asked::Starved; // Faults go first.
        }
        let frame = match self.pager.charged_run() {
            Ok(frame) => frame,
            Err(NoRun::Starved) => return Asked::Starved,
            // Else others have them, for who knows how long.
            Err(NoRun::AllInUse) if self.chunks_open > 0 => return Asked::Wait,
            Err(NoRun::AllInUse) => return Asked::Unfit,
        };
        let mut claimed = 0;
        for (page, frame) in pages.zip((frame.0..).map(FrameId)) {
            claimed += u64::from(self.claim_for_chunk(page, frame));
        }
        // Else what was claimed comes page by page.
        if claimed == per_chunk {
            let run = self.pager.frames.run_of(frame).expect("a frame of a run");
            let hold = held.then(|| Instant::now() + HOLD_MAX);
            self.chunks[run] = Some(Chunk { page: first, frame, read: 0, hold });
            self.chunks_open += 1;
        }
        self.pager.check_low();
        Asked::Started
    }

    /// Makes a page of a chunk `Filling`; gives its frame back if it is not `Stored` any more.
    fn claim_for_chunk(&mut self, page: PageId, frame: FrameId) -> bool {
        let word = self.pager.word(page).load();
        if word.state() == State::Stored {
            let slot = word.slot().expect("a stored page has a slot");
            self.pager.frames.note(frame, page, Some(slot));
            if self.pager.word(page).try_change(word, Word::filling(frame)).is_ok() {
                let (access, arrived) = (Access::Ahead, self.arrived);
                self.intents[frame.0 as usize] = Intent::new(access, arrived);
                self.fills.push(Fill { slot, frame, ahead: true });
                return true;
            }
        }
        self.pager.cancel_fill(frame);
        false
    }

    /// Whether a frame that is being read is of an open chunk of this handler's.
    pub(in crate::paging) fn is_of_chunk(&self, frame: FrameId) -> bool {
        self.pager.frames.run_of(frame).is_some_and(|run| self.chunks[run].is_some())
    }

    /// Notes that a page of an open chunk has been read and checked.
    pub(in crate::paging) fn chunk_page_read(&mut self, frame: FrameId) {
        let run = self.pager.frames.run_of(frame).expect("asked for above");
        let chunk = self.chunks[run].as_mut().expect("asked for above");
        chunk.read |= 1 << (frame.0 - chunk.frame.0);
    }

    /// Somebody faulted on a page of a chunk that has not been mapped: tells who holds it, and asks
    /// for what the stream leads to next.
    pub(in crate::paging) fn chunk_wanted(&mut self, page: PageId, frame: FrameId) {
        if !self.is_of_chunk(frame) {
            self.pager.sched.call_all();
        }
        if let Some(window) = self.pager.next_window(page, FaultOn::PageReadAhead) {
            self.ask_ahead(window);
        }
    }

    /// Maps the chunks that have been read and are not held any longer.
    pub(in crate::paging) fn map_chunks(&mut self) {
        if self.chunks_open == 0 {
            return;
        }
        let starving = self.pager.starving.load(Ordering::Acquire) > 0;
        for run in 0..self.chunks.len() {
            let Some(chunk) = self.chunks[run] else { continue };
            let is_read = chunk.read.count_ones() == self.pager.pages_per_chunk() as u32;
            if is_read && (starving || !self.is_held(&chunk)) {
                self.end_chunk(run);
                self.map_chunk(&chunk);
            }
        }
    }

    /// Whether nobody has asked for a chunk yet and there is time for that.
    fn is_held(&self, chunk: &Chunk) -> bool {
        let untouched = |(page, frame): (u64, u32)| {
            // Neither wanted nor discarded.
            self.pager.word(PageId(page)).load() == Word::filling(FrameId(frame))
        };
        let count = self.pager.pages_per_chunk() as usize;
        chunk.hold.is_some_and(|until| Instant::now() < until)
            && (chunk.page.0..).zip(chunk.frame.0..).take(count).all(untouched)
    }

    fn end_chunk(&mut self, run: usize) {
        self.chunks[run] = None;
        self.chunks_open -= 1;
    }

    /// Ends the chunk that a frame is of, if it is: a page of it could not be read. What has been
    /// read is mapped page by page, and so is the rest when it comes.
    pub(in crate::paging) fn break_chunk(&mut self, frame: FrameId) {
        let Some(run) = self.pager.frames.run_of(frame) else { return };
        let Some(chunk) = self.chunks[run] else { return };
        self.end_chunk(run);
        let is_read = |n: &u32| chunk.read & 1 << n != 0;
        for n in (0..self.pager.pages_per_chunk() as u32).filter(is_read) {
            self.install(FrameId(chunk.frame.0 + n), 1);
        }
    }

    /// Maps a chunk that has been read, and wakes who waits for it.
    fn map_chunk(&mut self, chunk: &Chunk) {
        let count = self.pager.pages_per_chunk() as usize;
        let mut filled = [None; CHUNK_PAGES_MAX];
        for (n, filled) in filled[..count].iter_mut().enumerate() {
            *filled = self.fill_ended(FrameId(chunk.frame.0 + n as u32));
        }
        let mut moving = [(Word::EMPTY, false); CHUNK_PAGES_MAX];
        let alive = filled[..count].iter().flatten().zip(&mut moving);
        let alive = alive.map(|(from, to)| *to = *from).count();
        let whole = alive == count;
        let mapped = if whole { self.pager.map_chunk(chunk.page, chunk.frame) } else { 0 };
        self.pager.settle_read(chunk.page, &moving[..mapped]);
        self.note_mapped(chunk, &moving[..mapped]);
        for (n, filled) in filled[..count].iter().enumerate().skip(mapped) {
            if let Some((moving, wanted)) = *filled {
                let frame = FrameId(chunk.frame.0 + n as u32);
                self.map_filled(frame, moving, wanted, 1);
            }
        }
    }

    /// The page whose slot was read into `frame` becomes `Moving`; says so, and whether somebody
    /// waits for it. `None`: it was discarded.
    pub(in crate::paging) fn fill_ended(&mut self, frame: FrameId) -> Option<(Word, bool)> {
        let page = self.pager.frames.page(frame);
        let slot = self.pager.frames.slot(frame);
        self.intents[frame.0 as usize].pending = false;
        match protocol::filled(self.pager.word(page), frame, slot) {
            Filled::Moving { moving, wanted } => Some((moving, wanted)),
            Filled::Died(dead) => {
                self.bury(page, dead, slot);
                self.pager.cancel_fill(frame);
                None
            }
        }
    }

    /// Counts the first pages of a chunk, which are mapped, and wakes who waits for them.
    fn note_mapped(&mut self, chunk: &Chunk, mapped: &[(Word, bool)]) {
        let counters = self.pager.counters();
        counters.pages_in.add(mapped.len() as u64);
        counters.chunks_read.add(u64::from(mapped.len() as u64 == self.pager.pages_per_chunk()));
        let mut wanted = false;
        for (n, _) in mapped.iter().enumerate().filter(|(_, (_, wanted))| *wanted) {
            counters.faults_read.bump();
            let intent = self.intents[chunk.frame.0 as usize + n];
            match intent.access {
                // It is another handler's fault.
                Access::Ahead => counters.prefetch_hits.bump(),
                _ => self.pager.counters().fault_times[self.index].add(intent.arrived.elapsed()),
            }
            wanted = true;
        }
        if wanted {
            self.rest_if_last(0);
            self.pager.wake_chunk(chunk.page);
        }
    }
}
