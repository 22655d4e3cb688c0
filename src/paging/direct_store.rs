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
//! (docs/design/write_back.md, *Direct store*).
//!
//! # Invariants
//! 1. The run is the thread's until it is handed over. Its memory never was in the region, so nobody else can read it,
//!    and it may be filled again once its pages are stored (`page::frames`).
#![expect(unsafe_code, reason = "copies what the caller promises into frames")]

use crate::base::units::{ByteCount, PageId};
use crate::paging::evict::requests::Requests;
use crate::paging::kernel_filled;
use crate::paging::page::chunk_state::Phase;
use crate::paging::page::chunks::{CHUNK, ChunkId};
use crate::paging::page::word::{FrameId, State};
use crate::paging::pager::Pager;
use crate::paging::pager::frame_pool::NoRun;
use crate::paging::region::Region;
use crate::paging::tables::charge;
use crate::sys::signals::SignalsBlocked;
use std::time::{Duration, Instant};

/// Gives a chunk of 2 MiB the content of `from`, and has it written to the device. `false`: nothing has changed;
/// the caller writes to the memory itself. That is so where the chunk holds something, for small limits, while
/// writes fail, and when no room was made for a while.
///
/// # Safety
/// `ptr` begins a chunk of the region that the caller alone uses, and needs nothing of. 2 MiB can be read at
/// `from`, and do not change meanwhile.
pub(crate) unsafe fn store_chunk(region: &Region, ptr: *const u8, from: *const u8) -> bool {
    let pager = &*region.pager;
    let Ok((first, _)) = region.extents.pages_of(ptr, ByteCount(CHUNK as u64)) else {
        return false;
    };
    let chunk = pager.chunk_of(first);
    let may_store = region.is_here() && first.0.is_multiple_of(pager.pages_per_chunk());
    if !may_store || !holds_nothing(pager, chunk) {
        return false;
    }
    let Some(run) = run_to_fill(pager, &region.requests) else { return false };
    // Before the chunk is latched: `from` may be far, and its faults may need threads that wait for latches.
    // SAFETY: the caller's bytes; the run is this thread's, as long, and nobody else's (invariant 1).
    unsafe { std::ptr::copy_nonoverlapping(from, pager.frames().ptr(run), CHUNK) };
    // From here on the evictor gets the pages of the run, or nobody does.
    let _blocked = SignalsBlocked::new();
    if !cool(pager, chunk, run) {
        pager.pool().free_run(run);
        return false;
    }
    region.requests.hand_over(run);
    pager.pool().waiters().call_evictor();
    true
}

/// A run of frames with memory; waits for a while until one is written.
fn run_to_fill(pager: &Pager, requests: &Requests) -> Option<FrameId> {
    /// Longest wait: a slow device needs some milliseconds for a run. Then the thread writes to the memory, where
    /// it waits for room as any other does.
    const PATIENCE: Duration = Duration::from_millis(200);
    /// The evictor tells of each run; nobody tells of room that others made, or that the region ends.
    const LOOK_EVERY: Duration = Duration::from_millis(2);
    if !pager.pool().moves().evict || !pager.frames().has_runs() {
        return None;
    }
    let able = || pager.health().write_errno() == 0 && !pager.health().is_stopping();
    let begun = Instant::now();
    while able() && begun.elapsed() < PATIENCE {
        let seen = requests.freed();
        match pager.pool().charged_run() {
            Ok(run) => {
                pager.pool().check_low();
                return Some(run);
            }
            Err(NoRun::AllInUse) => requests.wait_for_freed(seen, LOOK_EVERY),
            Err(NoRun::Starved) => {
                let waiters = pager.pool().waiters();
                waiters.begin_starving();
                waiters.call_evictor();
                requests.wait_for_freed(seen, LOOK_EVERY);
                waiters.end_starving();
            }
        }
    }
    None
}

/// Whether a chunk has no content, as far as can be seen without its latch.
fn holds_nothing(pager: &Pager, chunk: ChunkId) -> bool {
    let is_empty = |page: PageId| pager.word(page).load().state() == State::Empty;
    pager.chunks().is_closed(chunk) && pager.table().pages_of_chunk(chunk).all(is_empty)
}

/// Has the pages of a chunk that holds nothing cool in a run of frames. `false`: nothing has changed.
fn cool(pager: &Pager, chunk: ChunkId, run: FrameId) -> bool {
    // As for a fault on an empty page: the tables stay until the words keep them.
    let Some(_entered) = pager.chunks().enter(chunk) else { return false };
    if !charge::count_tables(pager, chunk) || !pager.chunks().latch(chunk, Phase::Closed) {
        return false;
    }
    let is_own = pager.mapper().owns(pager.table().chunk_addr(chunk), CHUNK);
    let claimed = is_own && kernel_filled::claim_all(pager, chunk);
    if claimed {
        kernel_filled::cool_all(pager, chunk, run);
    }
    pager.chunks().unlatch(chunk, Phase::Closed, Phase::Closed);
    claimed
}
