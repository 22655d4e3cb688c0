//! Chunks of 2 MiB: which of them the kernel fills, and which came in as one huge page.
//!
//! Each run of open chunks is a mapping of its own for the kernel, and cuts the region's in two; a
//! process may have `vm.max_map_count` of them. So no run begins when there are many, and a chunk
//! whose close would cut its run in two is then closed together with its whole run. How chunks are
//! opened and closed: `kernel_filled`.
//!
//! # Invariants
//! 1. `runs` is the number of runs of bits in `open`; both change under the lock of `runs`.

use crate::base::error::Result;
use crate::base::sync::{AtomicBool, AtomicU64, Ordering, Rank};
use crate::base::units::ByteCount;
use crate::meta::LazyArray;
use crate::paging::page::backoff;
use crate::paging::page::chunk_state::{ChunkState, ChunkView, Entered, Phase};
use crate::sys::pagemap::Pagemap;
use crate::sys::signals::FaultLock;
use crate::sys::vm::HUGE_PAGE;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Bytes of a chunk: a huge page.
pub(in crate::paging) const CHUNK: usize = HUGE_PAGE;

/// Maximum number of runs of open chunks: 1/RUN_MAPPINGS_PART of the mappings that the process may
/// have. Each run costs two, and the program needs most of them for itself.
const RUN_MAPPINGS_PART: u64 = 16;

/// A chunk: its index from the region's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::paging) struct ChunkId(pub(in crate::paging) usize);

/// The chunks of one region.
#[derive(Debug)]
pub(crate) struct Chunks {
    states: LazyArray<ChunkState>,
    /// One bit per chunk: open.
    open: LazyArray<AtomicU64>,
    open_count: AtomicU64,
    /// One bit per chunk: its pages, read together, came in as one huge page and none has left.
    /// A hint: they go as they came.
    whole: LazyArray<AtomicU64>,
    /// A chunk has come in as one huge page: more may come.
    any_whole: AtomicBool,
    /// Where the evictor goes on looking for open chunks.
    hand: AtomicU64,
    /// Runs of neighbouring open chunks; held while a bit of `open` changes.
    runs: FaultLock<u64>,
    /// The most there may be.
    runs_max: u64,
    /// Held while a run is closed as a whole.
    closing_run: Mutex<()>,
    pagemap: Option<Pagemap>,
}

impl Chunks {
    /// State for `span` bytes. Without `allowed`, or without `/proc/self/pagemap`, no chunk is
    /// ever opened.
    pub(in crate::paging) fn new(span: usize, allowed: bool) -> Result<Chunks> {
        let count = span / CHUNK;
        Ok(Chunks {
            states: LazyArray::new(count)?,
            open: LazyArray::new(count.div_ceil(64))?,
            open_count: AtomicU64::new(0),
            whole: LazyArray::new(count.div_ceil(64))?,
            any_whole: AtomicBool::new(false),
            hand: AtomicU64::new(0),
            runs: FaultLock::new(Rank::Leaf, 0),
            runs_max: (crate::sys::kernel::mappings_max() / RUN_MAPPINGS_PART).max(1),
            closing_run: Mutex::new(()),
            pagemap: if allowed { Pagemap::open()? } else { None },
        })
    }

    /// Bytes of all open chunks.
    pub(in crate::paging) fn open_bytes(&self) -> ByteCount {
        ByteCount(self.open_count.load(Ordering::Relaxed) * CHUNK as u64)
    }

    pub(in crate::paging) fn any_open(&self) -> bool {
        self.open_count.load(Ordering::Relaxed) > 0
    }

    /// All chunks.
    pub(in crate::paging) fn count(&self) -> usize {
        self.states.len()
    }

    /// The kernel's page map; `None`: no chunk is ever opened.
    pub(in crate::paging) fn pagemap(&self) -> Option<&Pagemap> {
        self.pagemap.as_ref()
    }

    /// The open chunks, in order, as far as they stay open meanwhile.
    pub(in crate::paging) fn all_open(&self) -> impl Iterator<Item = ChunkId> {
        let words = if self.any_open() { self.open.len() } else { 0 };
        (0..words).flat_map(|at| {
            let bits = self.open[at].load(Ordering::Relaxed);
            (0..64).filter(move |bit| bits & 1 << bit != 0).map(move |bit| ChunkId(at * 64 + bit))
        })
    }

    /// Closes of whole runs, one at a time.
    pub(in crate::paging) fn lock_closing_run(&self) -> MutexGuard<'_, ()> {
        self.closing_run.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How the chunk looks now, for [`is_as_seen`](Self::is_as_seen).
    pub(in crate::paging) fn look(&self, chunk: ChunkId) -> ChunkView {
        self.states[chunk.0].look()
    }

    /// True if the kernel fills the chunk at the moment.
    pub(in crate::paging) fn is_open(&self, chunk: ChunkId) -> bool {
        self.states.get(chunk.0).is_some_and(|state| state.look().phase() == Phase::Open)
    }

    /// True if faults in the chunk are for the handlers at the moment.
    pub(in crate::paging) fn is_closed(&self, chunk: ChunkId) -> bool {
        self.states[chunk.0].look().phase() == Phase::Closed
    }

    /// True if a page that the caller has just made `Moving` is in a chunk whose pages are the
    /// handlers': it may have been opened since the caller looked last.
    pub(in crate::paging) fn is_still_closed(&self, chunk: ChunkId) -> bool {
        self.states[chunk.0].is_still_closed()
    }

    /// Enters a closed chunk, so that its tables stay; `None` while it is not closed.
    pub(in crate::paging) fn enter(&self, chunk: ChunkId) -> Option<Entered<'_>> {
        self.states[chunk.0].enter()
    }

    /// Latches a closed chunk that nobody has entered.
    pub(in crate::paging) fn latch_unentered(&self, chunk: ChunkId) -> bool {
        self.states[chunk.0].latch_unentered()
    }

    /// True if a thread is at the chunk at this moment.
    pub(in crate::paging) fn is_busy(&self, chunk: ChunkId) -> bool {
        self.states[chunk.0].is_busy()
    }

    /// Notes whether a chunk's pages are in one huge page.
    pub(in crate::paging) fn set_whole(&self, chunk: ChunkId, whole: bool) {
        let (bits, bit) = (&self.whole[chunk.0 / 64], 1 << (chunk.0 % 64));
        if whole {
            bits.fetch_or(bit, Ordering::Relaxed);
            self.any_whole.store(true, Ordering::Relaxed);
        } else if bits.load(Ordering::Relaxed) & bit != 0 {
            bits.fetch_and(!bit, Ordering::Relaxed);
        }
    }

    /// True if chunks have ever come in whole.
    pub(in crate::paging) fn has_had_whole(&self) -> bool {
        self.any_whole.load(Ordering::Relaxed)
    }

    /// True if a chunk's pages came in together and should go together.
    pub(in crate::paging) fn is_whole(&self, chunk: ChunkId) -> bool {
        self.whole[chunk.0 / 64].load(Ordering::Relaxed) & 1 << (chunk.0 % 64) != 0
    }

    /// Latches a chunk that is in the state `from`.
    pub(in crate::paging) fn latch(&self, chunk: ChunkId, from: Phase) -> bool {
        self.states[chunk.0].latch(from)
    }

    pub(in crate::paging) fn unlatch(&self, chunk: ChunkId, was: Phase, to: Phase) {
        let bit = 1 << (chunk.0 % 64);
        if to == Phase::Open && was != Phase::Open {
            let mut runs = self.runs.lock();
            *runs = *runs + 1 - self.open_beside(chunk);
            self.open[chunk.0 / 64].fetch_or(bit, Ordering::Relaxed);
            self.open_count.fetch_add(1, Ordering::Relaxed);
        } else if to == Phase::Closed && was == Phase::Open {
            let mut runs = self.runs.lock();
            *runs = *runs + self.open_beside(chunk) - 1;
            self.open[chunk.0 / 64].fetch_and(!bit, Ordering::Relaxed);
            self.open_count.fetch_sub(1, Ordering::Relaxed);
        }
        self.states[chunk.0].unlatch(to);
    }

    /// How many of a chunk's two neighbours are noted as open.
    fn open_beside(&self, chunk: ChunkId) -> u64 {
        let is_noted = |at: usize| {
            let bits = self.open.get(at / 64).map_or(0, |bits| bits.load(Ordering::Relaxed));
            bits & 1 << (at % 64) != 0
        };
        u64::from(chunk.0.checked_sub(1).is_some_and(is_noted)) + u64::from(is_noted(chunk.0 + 1))
    }

    /// True if the mappings that opening a chunk costs are few enough.
    pub(in crate::paging) fn may_open(&self, chunk: ChunkId) -> bool {
        self.open_beside(chunk) > 0 || *self.runs.lock() < self.runs_max
    }

    /// True if closing a chunk by itself would make one run too many.
    pub(in crate::paging) fn cuts_too_many(&self, chunk: ChunkId) -> bool {
        self.open_beside(chunk) == 2 && *self.runs.lock() >= self.runs_max
    }

    /// True if nobody has latched the chunk since it was seen closed.
    pub(in crate::paging) fn is_as_seen(&self, chunk: ChunkId, seen: ChunkView) -> bool {
        self.states[chunk.0].is_as_seen(seen)
    }

    /// Latches an open chunk; waits while another thread is at it. Else as what it was seen closed.
    pub(in crate::paging) fn latch_open(
        &self,
        chunk: ChunkId,
    ) -> std::result::Result<(), ChunkView> {
        let mut spins = 0;
        loop {
            let seen = self.states[chunk.0].look();
            match seen.phase() {
                Phase::Closed => return Err(seen),
                Phase::Open if self.latch(chunk, Phase::Open) => return Ok(()),
                _ => backoff(&mut spins),
            }
        }
    }

    /// The next open chunk, going round.
    pub(in crate::paging) fn next_open(&self) -> Option<ChunkId> {
        if !self.any_open() {
            return None;
        }
        let words = self.open.len();
        let hand = self.hand.load(Ordering::Relaxed) as usize % (words * 64);
        for step in 0..=words {
            let at = (hand / 64 + step) % words;
            let mut bits = self.open[at].load(Ordering::Relaxed);
            if step == 0 {
                bits &= u64::MAX << (hand % 64);
            }
            if bits != 0 {
                let chunk = at * 64 + bits.trailing_zeros() as usize;
                self.hand.store(chunk as u64 + 1, Ordering::Relaxed);
                return Some(ChunkId(chunk));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_open_chunks_are_counted_and_bounded() {
        let mut chunks = Chunks::new(200 * CHUNK, false).expect("small");
        chunks.runs_max = 3;
        let open = |at: usize| {
            assert!(chunks.latch(ChunkId(at), Phase::Closed));
            chunks.unlatch(ChunkId(at), Phase::Closed, Phase::Open);
        };
        let close = |at: usize| {
            assert!(chunks.latch(ChunkId(at), Phase::Open));
            chunks.unlatch(ChunkId(at), Phase::Open, Phase::Closed);
        };
        let runs = || *chunks.runs.lock();
        [0, 1, 2, 63, 64, 199].into_iter().for_each(open);
        assert_eq!(runs(), 3);
        assert!(!chunks.may_open(ChunkId(100)), "a run more");
        assert!(chunks.may_open(ChunkId(65)) && chunks.may_open(ChunkId(62)));
        assert!(chunks.cuts_too_many(ChunkId(1)) && !chunks.cuts_too_many(ChunkId(0)));
        close(1);
        assert_eq!(runs(), 4);
        open(1);
        assert_eq!(runs(), 3, "joined again");
        [63, 64].into_iter().for_each(close);
        assert_eq!(runs(), 2);
        assert!(chunks.may_open(ChunkId(100)) && !chunks.cuts_too_many(ChunkId(1)));
        [0, 1, 2, 199].into_iter().for_each(close);
        assert_eq!((runs(), chunks.any_open()), (0, false));
    }
}
