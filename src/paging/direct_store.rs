//! Direct store: what goes to the device as a whole, and is not used meanwhile, is never mapped.
//!
//! A chunk that holds nothing gets its content by a copy into a run of frames, in which its pages then *cool*, as if
//! the evictor had just taken them out: it hashes and writes them, and a fault brings them back before.
//!
//! ```text
//!   thread:  charged run <-- copy of 2 MiB     Empty x n --latched--> Moving --> Cooling, in the run
//!                 ^                                                                 |
//!   evictor:      '--- keeps its memory, for the next <--- written, Stored <--------'
//! ```
//! Filled by the kernel and taken out again, the same chunk costs a fault, memory that the kernel clears, a change of
//! the mappings at either end, and a MOVE; and it takes room from pages that are in use
//! (book/src/design/write_back.md, *Direct store*).
//!
//! # Invariants
//! 1. The run is the thread's until it is handed over. Its memory never was in the region, so nobody else can read it,
//!    and it may be filled again once its pages are stored (`page::frames`).
#![expect(unsafe_code, reason = "copies what the caller promises into frames")]

use crate::base::units::{ByteCount, PageId};
use crate::paging::evict::requests::Requests;
use crate::paging::kernel_filled;
use crate::paging::page::CHUNK_PAGES;
use crate::paging::page::chunk_state::Phase;
use crate::paging::page::chunks::{CHUNK, ChunkId};
use crate::paging::page::word::{FrameId, State};
use crate::paging::pager::frame_pool::{FramePool, NoRun};
use crate::paging::pager::health::Health;
use crate::paging::pager::memory::RegionMemory;
use crate::paging::region::Region;
use crate::paging::tables::Tables;
use crate::sys::signals::SignalsBlocked;
use std::time::{Duration, Instant};

impl Region {
    /// Gives a chunk of 2 MiB the content of `from` and begins to write it to the device, past the memory that is in
    /// use: for a program that writes what it will not need soon. Returns `false` where the caller must write to the
    /// memory itself, because nothing has changed: where `to` is no multiple of 2 MiB or the chunk holds something,
    /// where `from` has not 2 MiB, for small limits, while writes fail, and when no room was made for a while.
    ///
    /// [`PageOutNow`](crate::region::Advice::PageOutNow) of the range waits until it is written.
    ///
    /// # Safety
    /// The 2 MiB at `to` are mapped, the caller alone uses them, and needs nothing of what they hold. (What lies
    /// outside of the region is left alone.)
    ///
    /// # Examples
    /// ```
    /// use farheap::ByteCount;
    /// use farheap::region::{Region, RegionConfig};
    /// use farheap::store::MemStore;
    /// use std::sync::Arc;
    ///
    /// const CHUNK: usize = 2 << 20;
    /// let store = Arc::new(MemStore::new(ByteCount::mib(64))?);
    /// match Region::create(RegionConfig::new().limit(ByteCount::mib(16)), store) {
    ///     Ok(region) => {
    ///         let (len, column) = (ByteCount::mib(32), vec![7_u8; CHUNK]);
    ///         let ptr = region.map(len)?.cast::<u8>().as_ptr();
    ///         for chunk in (0..32 << 20).step_by(CHUNK).map(|at| ptr.wrapping_add(at)) {
    ///             // SAFETY: mapped above, and nobody else uses it; a region begins at a multiple of 2 MiB, and what
    ///             // is not stored as a whole is written.
    ///             unsafe {
    ///                 if !region.store_chunk(chunk, &column) {
    ///                     std::ptr::copy_nonoverlapping(column.as_ptr(), chunk, CHUNK);
    ///                 }
    ///             }
    ///         }
    ///         // SAFETY: mapped and filled above.
    ///         assert_eq!(unsafe { ptr.add(5 << 20).read() }, 7);
    ///     }
    ///     Err(error) => println!("{error}"), // It tells how to allow userfaultfd.
    /// }
    /// # Ok::<(), farheap::Error>(())
    /// ```
    pub unsafe fn store_chunk<T: Copy>(&self, to: *mut T, from: &[T]) -> bool {
        let pager = &*self.pager;
        let Ok((first, _)) = self.extents.pages_of(to.cast(), ByteCount(CHUNK as u64)) else {
            return false;
        };
        let chunk = pager.table().chunk_of(first);
        let is_whole = size_of_val(from) == CHUNK && to.addr().is_multiple_of(CHUNK);
        if !self.is_here() || !is_whole || !holds_nothing(pager.memory(), chunk) {
            return false;
        }
        let Some(run) = run_to_fill(pager.pool(), pager.health(), &self.requests) else {
            return false;
        };
        // Before the chunk is latched: `from` may be far, and its faults may need threads that wait for latches.
        // SAFETY: `from` has this many bytes; the run is this thread's, as long, and nobody else's (invariant 1).
        unsafe {
            from.as_ptr().cast::<u8>().copy_to_nonoverlapping(pager.frames().ptr(run), CHUNK)
        };
        // From here on the evictor gets the pages of the run, or nobody does.
        let _blocked = SignalsBlocked::new();
        if !cool(pager.memory(), pager.tables(), chunk, run) {
            pager.pool().free(run, CHUNK_PAGES);
            return false;
        }
        self.requests.hand_over(run);
        pager.pool().waiters().call_evictor();
        true
    }
}

/// A run of frames with memory; waits for a while until one is written.
fn run_to_fill(pool: &FramePool, health: &Health, requests: &Requests) -> Option<FrameId> {
    /// Longest wait: a slow device needs some milliseconds for a run. Then the thread writes to the memory, where
    /// it waits for room as any other does.
    const PATIENCE: Duration = Duration::from_millis(200);
    /// The evictor tells of each run; nobody tells of room that others made, or that the region ends.
    const LOOK_EVERY: Duration = Duration::from_millis(2);
    if !pool.moves() || !pool.staging().has_runs() {
        return None;
    }
    let able = || health.write_errno() == 0 && !health.is_stopping();
    let begun = Instant::now();
    while able() && begun.elapsed() < PATIENCE {
        let seen = requests.freed();
        match pool.charged_run() {
            Ok(run) => {
                pool.check_low();
                return Some(run);
            }
            Err(NoRun::AllInUse) => requests.wait_for_freed(seen, LOOK_EVERY),
            Err(NoRun::Starved) => {
                let waiters = pool.waiters();
                waiters.begin_starving();
                waiters.call_evictor();
                requests.wait_for_freed(seen, LOOK_EVERY);
                waiters.end_starving();
            }
        }
    }
    None
}

/// True if a chunk has no content, as far as can be seen without its latch.
fn holds_nothing(memory: &RegionMemory, chunk: ChunkId) -> bool {
    let is_empty = |page: PageId| memory.word(page).load().state() == State::Empty;
    memory.chunks().is_closed(chunk) && memory.table().pages_of_chunk(chunk).all(is_empty)
}

/// Lets the pages of a chunk that holds nothing cool in a run of frames. `false`: nothing has changed.
fn cool(memory: &RegionMemory, tables: &Tables, chunk: ChunkId, run: FrameId) -> bool {
    // As for a fault on an empty page: the tables stay until the words keep them.
    let Some(_entered) = memory.chunks().enter(chunk) else { return false };
    if !tables.count_chunk(memory, chunk) || !memory.chunks().latch(chunk, Phase::Closed) {
        return false;
    }
    let is_own = memory.mapper().owns(memory.table().chunk_addr(chunk), CHUNK);
    let claimed = is_own && kernel_filled::claim_all(memory.table(), chunk);
    if claimed {
        kernel_filled::cool_all(memory, chunk, run);
    }
    memory.chunks().unlatch(chunk, Phase::Closed, Phase::Closed);
    claimed
}
