//! The mover: writes blocks anew whose spans are to be free, or whose rows are not whole any more.
//!
//! ```text
//!   few spans are free, or
//!   most places of those in
//!   use are no block's ------> the span with the fewest blocks --\
//!                                                                 hold it; read each block; write it as a user does, to
//!   a server began anew -----> each span of which it lacks rows --/  count only if it still is there; let the span go
//! ```
//! The second, and giving the space of free spans back to the servers, is for times when nobody writes.
//!
//! The reference to the old span keeps its places from being used again meanwhile, so that a block that was written at the
//! same time is seen to be elsewhere, and stays what its writer made it. A block that cannot be read stays where it is.
//!
//! Users that find no rows wait for the mover; it has free spans of its own, so that it never waits for them.

#![expect(unsafe_code, reason = "lends pages of its own to its queue")]

use crate::blocks::BLOCK;
use crate::ends::{Ending, IDLE_END, NbdBuffer, NbdEnd};
use crate::resident::{reserved, zeroed};
use crate::spans::{MOVER_SPANS, RowPlace, RowsFor, SPAN_ROWS};
use crate::striped_queue::StripedQueue;
use crate::stripes::Stripes;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Blocks that it moves at once.
const DEPTH: usize = SPAN_ROWS as usize;
/// How often it looks for work.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// After this long without a span that was taken nobody writes.
const QUIET: Duration = Duration::from_millis(500);
/// Free spans that it makes room for: this number, and one of a number of all.
const FREE_MIN: u64 = 4;
const SPANS_PER_FREE: u64 = 64;

/// Runs on a thread of its own.
pub(crate) struct SpanMover {
    stripes: Arc<Stripes>,
    queue: StripedQueue,
    pages: Box<[u8]>,
    living: Vec<(u64, RowPlace)>,
    ends: Vec<NbdEnd>,
    /// The span that could not be emptied, by its references: fuller ones are tried.
    stuck: Option<(u32, u64)>,
    /// Spans that users had taken at the last look, and since when they have taken no more.
    taken: u64,
    quiet_since: Instant,
}

impl SpanMover {
    pub(crate) fn new(stripes: Arc<Stripes>) -> io::Result<SpanMover> {
        let blocks = SPAN_ROWS as usize * stripes.layout().data;
        Ok(SpanMover {
            queue: StripedQueue::new(Arc::clone(&stripes), RowsFor::Mover, DEPTH)?,
            // It works when memory is short.
            pages: zeroed(DEPTH * BLOCK as usize),
            living: reserved(blocks, (0, RowPlace { span: 0, row: 0, column: 0 })),
            ends: reserved(DEPTH, IDLE_END),
            stuck: None,
            taken: 0,
            quiet_since: Instant::now(),
            stripes,
        })
    }

    /// Works until the client ends.
    pub(crate) fn run(mut self) {
        self.stripes.set_mover(std::thread::current());
        let mut from = 0;
        while !self.stripes.is_closed() {
            let start = Instant::now();
            let (is_short, is_quiet) = (self.is_short(), self.is_quiet(start));
            let is_wanted = is_short || is_quiet && self.stripes.spans.is_sparse();
            let has_freed = is_wanted && self.empty_one();
            let has_mended = self.mend_one(&mut from);
            let has_trimmed = is_quiet && self.stripes.trim_some() == Ok(true);
            match (has_freed, has_mended || has_trimmed) {
                // Writers may wait for it.
                (true, false) if is_short => {}
                (false, false) => std::thread::park_timeout(LOOK_EVERY),
                // As much time for others as this has taken.
                _ => std::thread::park_timeout(start.elapsed()),
            }
        }
    }

    /// True if no user has taken a span for a while.
    fn is_quiet(&mut self, now: Instant) -> bool {
        let taken = self.stripes.spans.taken();
        if taken != self.taken {
            (self.taken, self.quiet_since) = (taken, now);
        }
        now.saturating_duration_since(self.quiet_since) >= QUIET
    }

    fn is_short(&self) -> bool {
        self.stripes.spans.free() < FREE_MIN + self.stripes.layout().spans / SPANS_PER_FREE
    }

    /// Empties the span with the fewest blocks; returns whether there was one that is not full.
    fn empty_one(&mut self) -> bool {
        let spans = &self.stripes.spans;
        let (open, stuck) = (spans.open(), self.stuck.take());
        let is_closed = |span: &u64| !open.contains(&Some(*span));
        let fullness = |span| Some((spans.references(span)?, span));
        let closed = (0..self.stripes.layout().spans).filter(is_closed).filter_map(fullness);
        let Some(emptiest) = closed.filter(|span| Some(*span) > stuck).min() else { return false };
        // Full, or fuller than others can be while servers are away: that would take more than it gives.
        if u64::from(emptiest.0) >= self.queue.room() {
            return false;
        }
        let has_moved = self.empty(emptiest.1) > 0;
        self.stuck = (!has_moved).then_some(emptiest);
        has_moved
    }

    /// Finds the next span of which a server lacks something; returns whether something was moved.
    fn mend_one(&mut self, from: &mut u64) -> bool {
        let layout = *self.stripes.layout();
        let lack = |at: usize| self.stripes.server(at).lacking.count() > 0;
        if !(0..layout.columns()).any(lack) {
            return false;
        }
        self.stripes.forget_margins();
        for _ in 0..layout.spans {
            let span = *from % layout.spans;
            *from = span + 1;
            let lacks = |column: &usize| self.stripes.lacks(span, *column, 0, SPAN_ROWS);
            if !(0..layout.columns()).any(|column| lacks(&column)) {
                continue;
            }
            let stripes = Arc::clone(&self.stripes);
            if stripes.spans.with_free(span, || stripes.begin(span)) {
                continue;
            }
            let behind =
                (0..layout.columns()).filter(lacks).fold(0_u64, |all, column| all | 1 << column);
            stripes.spans.close(span);
            let moved = self.empty(span);
            if stripes.spans.is_given_up(span) {
                stripes.begin(span); // What it lacks there nobody will miss.
            }
            for column in (0..layout.columns()).filter(|column| behind >> column & 1 == 1) {
                stripes.server(layout.server(span, column)).count_copied(moved * BLOCK);
            }
            if moved > 0 {
                return true;
            }
        }
        false
    }

    /// Writes the blocks of a span anew; returns how many. Of the last free spans none is taken for a span that would
    /// not be free afterwards, or that needs more than one: nothing could make room for others then.
    fn empty(&mut self, span: u64) -> u64 {
        let stripes = Arc::clone(&self.stripes);
        if !stripes.spans.hold(span) {
            return 0;
        }
        self.living.clear();
        self.living.extend(stripes.spans.living(span));
        let is_last = || stripes.spans.free() <= MOVER_SPANS;
        let (room, count) = (self.queue.room(), self.living.len());
        let (is_fitting, mut moved) = (count as u64 <= room, 0);
        // Whole rows at once.
        let columns = (room / SPAN_ROWS).max(1) as usize;
        let batches = |n: usize| {
            let len = DEPTH / columns * columns;
            (n * len < count).then(|| n * len..count.min((n + 1) * len))
        };
        if !is_last() || is_fitting && (0..).map_while(batches).all(|batch| self.read(batch)) {
            for batch in (0..).map_while(batches) {
                self.read(batch.clone());
                let failed = self.ends.iter().filter(|end| end.ending != Ending::Done);
                let failed: Vec<u64> = failed.map(|end| end.token).collect();
                self.run_all(batch.filter(|n| !failed.contains(&(*n as u64))), false);
                moved += self.ends.iter().filter(|end| end.ending == Ending::Done).count();
            }
        }
        stripes.spans.release(span, 1);
        moved as u64
    }

    /// Reads a batch of blocks; returns whether all could be.
    fn read(&mut self, batch: Range<usize>) -> bool {
        self.run_all(batch, true);
        self.ends.iter().all(|end| end.ending == Ending::Done)
    }

    /// Reads or writes blocks of one batch, and waits for all ends.
    fn run_all(&mut self, blocks: impl Iterator<Item = usize>, is_read: bool) {
        self.ends.clear();
        for n in blocks {
            let (block, place) = self.living[n];
            let ptr = self.pages[n % DEPTH * BLOCK as usize..].as_mut_ptr();
            let buffer = NbdBuffer { ptr, len: BLOCK as usize };
            let pushed = if is_read {
                let buffers = std::iter::once(buffer);
                // SAFETY: the pages live as long as the mover, whose queue is dropped first, and each block has its own.
                // Users may write the block at the same time: what is read then counts for nothing, because the block is
                // elsewhere afterwards.
                unsafe { self.queue.push(n as u64, true, block * BLOCK, buffers) }
            } else {
                // SAFETY: as above; the caller holds the span.
                unsafe { self.queue.push_move(n as u64, block, buffer, place) }
            };
            assert!(pushed, "fewer than the depth are in flight");
        }
        while self.queue.in_flight() > 0 {
            // Without memory to wait with there is nothing to do but to go round.
            let _ = self.queue.wait_once();
            self.queue.report(&mut |end| self.ends.push(end));
        }
    }
}
