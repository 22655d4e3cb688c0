//! Huge frames: runs of pages that lie in one page of 2 MiB.
//!
//! While nothing leaves the pool, its worker asks the kernel to put whole runs into huge pages: what
//! is read at random misses the TLB less, and temporary memory that takes a run over is touched at
//! half the cost (`book/src/design/pool.md`). A run of which a page has to leave is split before, for the
//! kernel would keep the memory of all 2 MiB otherwise, and the limit would not hold.
//!
//! # Invariants
//! 1. A chunk is noted as huge while all its pages are held still, after the kernel collapsed it
//!    (`chunk`). How it is split: `frames`.

use super::chunk::CHUNK_PAGES;
use super::frames::PoolFrames;
use super::latch::{Latch, LatchWord};
use crate::base::units::ByteCount;
use crate::sys::vm::HUGE_PAGE;
use std::time::{Duration, Instant};

/// How long nothing must have left the pool before runs are collapsed.
const AT_REST: Duration = Duration::from_millis(250);

/// How long no run is collapsed after the kernel refused.
const REFUSED: Duration = Duration::from_secs(10);

/// Memory that a collapse takes while it copies.
const COPY: ByteCount = ByteCount(HUGE_PAGE as u64);

/// Where the worker is with collapsing.
pub(super) struct Collapser {
    at: usize,
    /// Pages that had left the pool at the last turn.
    departed: u64,
    not_before: Instant,
}

impl Collapser {
    pub(super) fn new() -> Collapser {
        Collapser { at: 0, departed: 0, not_before: Instant::now() + AT_REST }
    }

    /// Collapses one run, if the pool is at rest; returns whether it did.
    pub(super) fn turn(&mut self, frames: &PoolFrames) -> bool {
        let departed = frames.resident.departed_from_pool();
        if departed != self.departed {
            self.departed = departed;
            self.not_before = Instant::now() + AT_REST;
        }
        // Of other page sizes a chunk is not a run.
        if frames.table.page_bytes() * CHUNK_PAGES != HUGE_PAGE || Instant::now() < self.not_before
        {
            return false;
        }
        let chunks = frames.table.end() as usize / CHUNK_PAGES;
        for _ in 0..chunks {
            self.at = if self.at + 1 < chunks { self.at + 1 } else { 0 };
            if is_whole(frames, self.at) {
                let is_done = collapse(frames, self.at);
                if !is_done {
                    self.not_before = Instant::now() + REFUSED;
                }
                return is_done;
            }
        }
        false
    }
}

fn is_at_rest(seen: LatchWord) -> bool {
    seen.is_readable() && !seen.dirty() && !seen.writing()
}

/// True if a chunk can be collapsed: a look without locks.
fn is_whole(frames: &PoolFrames, chunk: usize) -> bool {
    let (first, end) = (chunk * CHUNK_PAGES, (chunk + 1) * CHUNK_PAGES);
    frames.chunks.is_plain(chunk)
        && frames.resident.is_full(first / 64..end / 64)
        && frames.table.words(first..end).iter().all(|latch| is_at_rest(latch.load()))
}

/// Holds a chunk's pages still and puts them into one huge page. `false` when there is no room for the
/// copy, or the kernel refuses; pages that are in use only delay it.
fn collapse(frames: &PoolFrames, chunk: usize) -> bool {
    if !frames.account.account().try_charge(COPY) {
        return false;
    }
    let mut is_done = true;
    if frames.chunks.try_freeze(chunk) {
        let latches = frames.table.words(chunk * CHUNK_PAGES..(chunk + 1) * CHUNK_PAGES);
        let is_held = |latch: &&Latch| latch.try_hold_still(latch.load());
        let held = latches.iter().take_while(is_held).count();
        if held == CHUNK_PAGES {
            is_done = frames.table.mapping().collapse(chunk * HUGE_PAGE).is_ok();
            if is_done {
                frames.chunks.set_huge(chunk);
            }
        }
        latches[..held].iter().for_each(|latch| latch.end_write(false));
        frames.unfreeze(chunk);
    }
    frames.account.uncharge(COPY);
    is_done
}
