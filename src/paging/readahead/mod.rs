//! Read-ahead: which pages will be touched next, and whether a page will be written.
//!
//! [`Readahead`] keeps what the program has said of its accesses, the streams that its faults
//! make, the requests that handlers have not accepted yet, and an estimate of how many of the
//! pages that are read in are written. It only answers questions: handlers do the reading.
//!
//! | module | does |
//! |---|---|
//! | this one | what the program said, requests, and the two below under one roof |
//! | `streams` | faults that follow each other at a steady distance |
//! | `shares` | how many pages that are read in are written, how many faults are followed by their neighbours' |

mod shares;
mod streams;

pub(in crate::paging) use streams::{FaultOn, Window};

use crate::base::error::Result;
use crate::base::sync::{AtomicU32, Ordering, Rank};
use crate::base::units::{ByteCount, PageCount, PageId};
use crate::meta::LazyArray;
use crate::paging::page::{CHUNK_PAGES, PAGE};
use crate::paging::pager::table::{CLUSTER_PAGES, CLUSTER_SHIFT};
use crate::sys::signals::FaultLock;
use crate::sys::vm::HUGE_PAGE;
use crossbeam_queue::ArrayQueue;
use shares::Shares;
use streams::{Streams, WindowLimits};

/// Number of the last pages that the share of a chunk that is written follows: as many as it has, because they come in by
/// hundreds, and none of them is written yet.
const WRITES_MEMORY: u32 = CHUNK_PAGES as u32;
/// A guess is cheaper where more than one page in this number is written: a fault of 9 us that is saved against 4 us for each
/// page that was guessed wrong.
const WRITES_PART: u32 = 3;

/// Requests for read-ahead that may wait at the same time; more are dropped.
const REQUESTS_MAX: usize = 1024;

/// Advice of a program about its accesses to a range, see
/// [`Region::advise`](crate::paging::region::Region::advise). The first three last, for the chunks of 2 MiB that a range
/// touches.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Advice {
    /// Nothing: streams of faults are detected.
    #[default]
    Normal,
    /// Scattered accesses: nothing is read ahead.
    Random,
    /// Ascending accesses: reading ahead starts with the first fault.
    Sequential,
    /// Needed soon: begins to bring pages in, much cheaper than by as many faults, and keeps what is resident
    /// as if just used. Pages for which there is no room are left out when too many requests wait.
    WillNeed,
    /// Needed at once, from a store that answers at once, as memory does: in
    /// [in-thread mode](crate::config::FaultMode::InThread) the calling thread reads the pages itself, one after
    /// the other, and nobody is woken. A page costs what its fault would, without the exception, the signal and
    /// the return from it. Pages for which there is no room at the moment are left out. With handler threads it
    /// is `WillNeed`.
    WillNeedNow,
    /// Not needed soon: the next to be evicted.
    Cold,
    /// Written, and not needed soon: begins to evict resident pages. Where many such requests wait, this one is left
    /// out, and the pages leave when their memory is needed. Pages that cannot be written stay. Whole chunks of
    /// 2 MiB leave fastest: fresh ones by one write.
    PageOut,
    /// Evicted when the call returns, but for pages that are pinned, in use by the kernel, or read ahead meanwhile.
    PageOutNow,
}

impl Advice {
    /// Advice that lasts, as a number; the rest acts at once.
    fn encode(self) -> u32 {
        match self {
            Advice::Random => 1,
            Advice::Sequential => 2,
            _ => 0,
        }
    }
}

/// A request to read `count` pages from `first` ahead of their faults.
#[derive(Clone, Copy, Debug)]
pub(in crate::paging) struct PrefetchRun {
    pub(in crate::paging) first: PageId,
    pub(in crate::paging) count: PageCount,
    /// A stream leads there: chunks are held until it does.
    pub(in crate::paging) for_stream: bool,
}

/// Predictions of a region's future accesses. Pages are grouped by chunks of 2 MiB.
#[derive(Debug)]
pub(in crate::paging) struct Readahead {
    /// Streams of device faults; `None`: they are not detected.
    streams: Option<FaultLock<Streams>>,
    /// Per chunk: what the program says of it.
    advice: LazyArray<AtomicU32>,
    requests: ArrayQueue<PrefetchRun>,
    writes: Shares,
}

impl Readahead {
    /// For `span` bytes. With `detects_streams` pages are asked for that
    /// the program has not requested.
    ///
    /// # Errors
    /// When the kernel refuses the mappings.
    pub(in crate::paging) fn new(span: ByteCount, detects_streams: bool) -> Result<Readahead> {
        let chunks = span.as_usize() / HUGE_PAGE;
        let streams = detects_streams.then(|| Streams::new(chunks)).transpose()?;
        Ok(Readahead {
            streams: streams.map(|streams| FaultLock::new(Rank::Leaf, streams)),
            advice: LazyArray::new(chunks)?,
            requests: ArrayQueue::new(REQUESTS_MAX),
            writes: Shares::new(chunks, WRITES_MEMORY, WRITES_PART)?,
        })
    }

    // Streams and advice.

    /// Remembers what the program says of the chunk of a page.
    pub(in crate::paging) fn advise(&self, page: PageId, advice: Advice) {
        // Relaxed: advice orders nothing.
        self.advice[page.as_usize() / CHUNK_PAGES].store(advice.encode(), Ordering::Relaxed);
    }

    /// Pages to read ahead after a fault, where `limit` bytes may be resident at most and chunks can be read whole,
    /// or not. `is_stored` says which pages can fault.
    pub(in crate::paging) fn after_fault(
        &self,
        page: PageId,
        on: FaultOn,
        limit: ByteCount,
        by_chunks: bool,
        is_stored: &dyn Fn(u64) -> bool,
    ) -> Option<Window> {
        /// Bytes that all streams together may have read ahead, as a part of the limit: less than the
        /// policy keeps of pages that were not seen used (`evict::policy::tenure`). By chunks, which are held until
        /// their reader gets there, it is more: four streams have chunks above a limit of 112 MiB then, not of 192.
        const LIMIT_PART: u64 = 12;
        const LIMIT_PART_BY_CHUNKS: u64 = 7;
        let streams = self.streams.as_ref()?;
        let advice = self.advice[page.as_usize() / CHUNK_PAGES].load(Ordering::Relaxed);
        if advice == Advice::Random.encode() {
            return None;
        }
        let clusters = |part: u64| limit.0 / part / (CLUSTER_PAGES * PAGE) as u64;
        let in_chunks = if by_chunks { clusters(LIMIT_PART_BY_CHUNKS) } else { 0 };
        let limits = WindowLimits { in_total: clusters(LIMIT_PART), in_chunks };
        let cluster = page.0 >> CLUSTER_SHIFT;
        let is_stored = |cluster: u64| is_stored(cluster << CLUSTER_SHIFT);
        streams.lock().fault(cluster, on, limits, advice == Advice::Sequential.encode(), &is_stored)
    }

    // Requests.

    /// Requests a run of pages; `false`: too many requests wait, and this one is dropped, which
    /// costs time only, because requests are guesses and advice.
    pub(in crate::paging) fn request(&self, run: PrefetchRun) -> bool {
        self.requests.push(run).is_ok()
    }

    /// The oldest request that no handler has accepted yet.
    pub(in crate::paging) fn next_request(&self) -> Option<PrefetchRun> {
        self.requests.pop()
    }

    /// How many of the pages that are mapped for a read are written.
    pub(in crate::paging) fn writes(&self) -> &Shares {
        &self.writes
    }
}
