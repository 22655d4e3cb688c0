//! The tables of one pool, and what they have in common: the share of the limit, the order in which
//! pages leave, and the thread that works for them.
//!
//! Each table has words, file and hand of its own; the hands go one after the other, each a lap, so that
//! all tables together are swept as one would be. A table joins when it is open, and is forgotten when its
//! owner drops it: what uses it meanwhile holds it for the length of a batch.
//!
//! # Invariants
//! 1. Nobody waits for a table's pages, or for its device, under the lock of the list.

use super::account::PoolShare;
use super::evict::{Dirty, PoolEvictor, RoomRequest};
use super::frames::PoolFrames;
use super::worker::Worker;
use super::write_back::PageWriter;
use crate::base::error::Result;
use crate::base::local::keep_local;
use crate::base::sync::{AtomicU64, Ordering, Rank, Ranked};
use crate::base::units::ByteCount;
use crate::limit::manager::{Donation, MemoryManager, Reclaim, ReclaimCost};
use crate::sys::fork::Born;
use crate::sys::thread::THREAD_BYTES;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Pause between batches of the cleaner while it finds something to write.
const PAUSE: Duration = Duration::from_millis(1);

/// Pause between rounds that found nothing.
const IDLE: Duration = Duration::from_millis(20);

/// Pause between runs that are put into huge pages: an eighth of a processor's time.
const BETWEEN_RUNS: Duration = Duration::from_millis(5);

/// How long a queue to a device is not used before it is closed, at least: opening one takes some 50 us.
const TIDY_EVERY: Duration = Duration::from_secs(1);

/// Maximum number of tables that an error names.
const NAMED_MAX: usize = 4;

/// A table of a pool.
pub(super) trait PoolTable: Send + Sync {
    fn frames(&self) -> &PoolFrames;

    fn write_back(&self) -> &PageWriter;

    fn evictor(&self) -> &PoolEvictor;

    /// Reads what was asked to be read ahead; returns whether there was any.
    fn read_ahead(&self) -> bool;

    /// Writes dirty pages ahead of eviction, with the hands of all tables `moved` so far; returns whether
    /// there were any.
    fn clean(&self, moved: u64) -> bool;

    /// Closes queues to the device that nobody has used since the last time.
    fn close_spare_queues(&self);

    /// Puts a run into a huge page; returns whether it did.
    fn collapse(&self) -> bool;

    /// Fills `room` with runs.
    fn donate(&self, room: &mut Donation<'_>);

    /// Fixes at the moment.
    fn holders(&self) -> u64;
}

type Members = Arc<[Weak<dyn PoolTable>]>;

/// The tables of a pool.
pub(super) struct TableGroup {
    share: Arc<PoolShare>,
    /// Taken out as a whole, so that a reclaim needs no memory.
    members: Ranked<Members>,
    /// Whose turn it is to be swept, modulo their number.
    turn: AtomicU64,
    /// The table with which the next donation begins.
    giver: AtomicU64,
    worker: Worker,
    /// When queues were closed that nobody used.
    tidied: Ranked<Instant>,
    born: Born,
}

impl TableGroup {
    /// Bytes that a pool keeps for itself whatever its tables are: the stack of its thread and of the
    /// manager's, page tables, and what no part knows of. Measured: `book/src/design/memory.md`.
    pub(super) const FIXED: ByteCount = ByteCount((2 * THREAD_BYTES + (288 << 10)) as u64);

    /// A pool without tables.
    ///
    /// # Errors
    /// As for [`MemoryManager::join`] and [`MemoryManager::charge`].
    pub(super) fn new(manager: &Arc<MemoryManager>) -> Result<Arc<TableGroup>> {
        let none: Members = Arc::new([]);
        let share = PoolShare::open(manager)?;
        manager.charge(share.account(), TableGroup::FIXED)?;
        let group = Arc::new(TableGroup {
            share,
            members: Ranked::new(Rank::Leaf, none),
            turn: AtomicU64::new(0),
            giver: AtomicU64::new(0),
            worker: Worker::new(),
            tidied: Ranked::new(Rank::Leaf, Instant::now()),
            born: Born::here(),
        });
        let weak = Arc::downgrade(&group);
        group.share.account().set_reclaimer(weak);
        Ok(group)
    }

    pub(super) fn share(&self) -> &Arc<PoolShare> {
        &self.share
    }

    /// A table is open. The first one starts the thread.
    ///
    /// # Errors
    /// As for [`Worker::start`].
    pub(super) fn join(self: &Arc<Self>, member: Weak<dyn PoolTable>) -> Result<()> {
        self.change(Some(member));
        self.worker.start(Arc::downgrade(self), TableGroup::work)
    }

    /// A table is gone.
    pub(super) fn leave(&self) {
        // In a forked child the lock may be held by a thread of the parent's.
        if self.born.is_here() {
            self.change(None);
        }
    }

    /// Forgets tables that are gone; adds one.
    fn change(&self, added: Option<Weak<dyn PoolTable>>) {
        let _ours = keep_local();
        let mut members = self.members.lock();
        let here = members.iter().filter(|member| member.strong_count() > 0).cloned();
        *members = here.chain(added).collect();
    }

    fn members(&self) -> Members {
        Arc::clone(&self.members.lock())
    }

    /// Ends a rest of the thread.
    pub(super) fn wake(&self) {
        self.worker.wake();
    }

    /// One turn of the thread: what was asked to be read ahead, then dirty pages, and when there is
    /// nothing to write, huge pages. Returns how long it may rest.
    fn work(&self) -> Option<Duration> {
        let members = self.members();
        let here = || members.iter().filter_map(Weak::upgrade);
        let moved = here().fold(0u64, |sum, member| sum.wrapping_add(member.evictor().hand()));
        let (mut is_reading, mut is_writing) = (false, false);
        for member in here() {
            is_reading |= member.read_ahead();
            is_writing |= member.clean(moved);
        }
        if self.is_time_to_tidy() {
            here().for_each(|member| member.close_spare_queues());
        }
        if is_writing {
            return (!is_reading).then_some(PAUSE);
        }
        if is_reading {
            return None;
        }
        let is_collapsing = here().any(|member| member.collapse());
        Some(if is_collapsing { BETWEEN_RUNS } else { IDLE })
    }

    fn is_time_to_tidy(&self) -> bool {
        let mut tidied = self.tidied.lock();
        let is_time = tidied.elapsed() >= TIDY_EVERY;
        if is_time {
            *tidied = Instant::now();
        }
        is_time
    }

    /// Evicts about `want` bytes of all tables.
    fn evict(&self, want: ByteCount, dirty: Dirty) -> ByteCount {
        let members = self.members();
        let steps = |member: Arc<dyn PoolTable>| member.frames().table.steps() as u64;
        let steps = members.iter().filter_map(Weak::upgrade).map(steps).sum();
        let mut demand = RoomRequest::new(want, dirty, steps);
        let mut gone = 0;
        while demand.is_open() && gone < members.len() {
            let turn = self.turn.load(Ordering::Relaxed);
            let member = members[(turn % members.len() as u64) as usize].upgrade();
            let is_over = member.as_ref().is_none_or(|member| {
                member.evictor().sweep(member.frames(), member.write_back(), &mut demand)
            });
            gone = if member.is_some() { 0 } else { gone + 1 };
            if is_over {
                // Another thread that swept beside this one may have said so before.
                let (from, to) = (turn, turn.wrapping_add(1));
                let _ = self.turn.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed);
            }
        }
        demand.freed()
    }

    fn sum(&self, of: impl Fn(&dyn PoolTable) -> u64) -> u64 {
        self.members().iter().filter_map(Weak::upgrade).map(|member| of(&*member)).sum()
    }
}

impl Reclaim for TableGroup {
    fn reclaim(&self, want: ByteCount, cost: ReclaimCost) -> ByteCount {
        match cost {
            ReclaimCost::Free => ByteCount::ZERO,
            ReclaimCost::Reread => self.evict(want, Dirty::Defer),
            ReclaimCost::WriteBack => self.evict(want, Dirty::Write),
        }
    }

    fn donate(&self, room: &mut Donation<'_>) {
        let members = self.members();
        let first = self.giver.fetch_add(1, Ordering::Relaxed) as usize;
        for n in 0..members.len() {
            if room.wanted() == 0 {
                return;
            }
            if let Some(member) = members[first.wrapping_add(n) % members.len()].upgrade() {
                member.donate(room);
            }
        }
    }

    fn order(&self, cost: ReclaimCost) -> u32 {
        // Clean table pages are the cheapest of their kind: nothing to unmap in a handler.
        if cost == ReclaimCost::Reread { 10 } else { 100 }
    }

    fn metadata(&self) -> ByteCount {
        ByteCount(self.sum(|member| member.frames().chunks.metadata().0))
    }

    fn describe_held(&self) -> String {
        let members = self.members();
        let (mut holders, mut tables, mut troubles) = (0, Vec::new(), String::new());
        for member in members.iter().filter_map(Weak::upgrade) {
            let here = member.holders();
            if here > 0 {
                tables.push(format!("{here} of {}", member.frames().table.path().display()));
            }
            if let Some(trouble) = member.write_back().trouble() {
                troubles += &format!("; {trouble}");
            }
            holders += here;
        }
        let more = tables.len().saturating_sub(NAMED_MAX);
        tables.truncate(NAMED_MAX);
        if more > 0 {
            tables.push(format!("others of {more} more"));
        }
        let tables = if holders > 0 { format!(": {}", tables.join(", ")) } else { String::new() };
        format!(" (fixed by {holders} holders{tables}{troubles})")
    }
}

impl Drop for TableGroup {
    fn drop(&mut self) {
        // A forked child does not have the thread.
        if self.born.is_here() {
            self.worker.stop();
            self.share.account().uncharge(TableGroup::FIXED);
        } else {
            self.worker.forget();
        }
    }
}
