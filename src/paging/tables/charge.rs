//! Charging tables when they are first used, and giving them back.

#![expect(unsafe_code, reason = "drops the memory of tables that hold nothing")]

use crate::base::error::{Error, Result};
use crate::base::sync::Ordering;
use crate::base::units::{ByteCount, PageCount, PageId, SlotCount};
use crate::limit::manager::MemoryManager;
use crate::paging::page::chunk_state::Phase;
use crate::paging::page::chunks::{CHUNK, ChunkId};
use crate::paging::page::word::Word;
use crate::paging::page::{CHUNK_PAGES, PAGE};
use crate::paging::pager::memory::RegionMemory;
use crate::paging::pager::slot_store::SlotStore;
use crate::paging::table_sizes::{RESIDENT_TABLES, SLOT_GROUP_TABLES, SLOTS_READY};
use crate::paging::tables::{SpanCharges, Tables};
use crate::store::slots::GROUP_SLOTS;
use crate::sys::signals::SignalsBlocked;
use crate::sys::vm::Piece;
use std::ops::Range;

/// While tables of slots take less than this part of the limit, there may be more of them, so that long runs are found,
/// and they stay while slots are in use. Charged and given back in turns, they made pages leave each time: without that a
/// B-tree map of twice its group's memory reads 185 to 191 thousand times, with it 194.
const SLOTS_PART: u64 = 64;
/// Maximum number of slot groups that are given back in one turn of the evictor: a call of the kernel each,
/// for which faults that need room would wait.
const ASLEEP_MAX: usize = 64;

impl Tables {
    /// Charges the tables that describe a chunk, once. `false`: the limit leaves no room. The
    /// caller has entered the chunk, so that the tables stay until it leaves.
    pub(in crate::paging) fn count_chunk(&self, memory: &RegionMemory, chunk: ChunkId) -> bool {
        let needs = ByteCount(self.needs(chunk));
        if needs == ByteCount::ZERO {
            return true;
        }
        if !memory.pool().charge_with_spares(needs, ByteCount::ZERO) {
            return false;
        }
        let noted = self.note(chunk);
        // Another thread counted the rest; a bit that was looked at stays set meanwhile.
        memory.budget().uncharge(ByteCount(needs.0 - noted));
        true
    }

    /// Charges what a region has from its start on, before there is anything to evict.
    ///
    /// # Errors
    /// When there is no room for the first slots, without which nothing could ever be written.
    pub(in crate::paging) fn start(
        &self,
        memory: &RegionMemory,
        slots: &SlotStore,
        manager: Option<&MemoryManager>,
    ) -> Result<()> {
        self.count_of_limit(memory);
        self.ready_slots(memory, slots, SlotCount(1));
        if slots.map().awake().0 > SlotCount(0) {
            return Ok(());
        }
        let bytes = ByteCount(SLOT_GROUP_TABLES);
        match (manager, memory.pool().managed().account()) {
            (Some(manager), Some(account)) => manager.charge(account, bytes)?,
            _ => {
                let (limit, charged) = (memory.budget().limit(), memory.budget().charged());
                return Err(Error::LimitTooSmall {
                    limit,
                    minimum: ByteCount(charged.0 + bytes.0),
                });
            }
        }
        self.wake_slots(slots);
        Ok(())
    }

    /// Charges what follows from the limit, as far as there is room now; gives back what a limit that
    /// was lowered needs no more. What the policy's lists were seen to take stays charged. For the evictor.
    pub(in crate::paging) fn count_of_limit(&self, memory: &RegionMemory) {
        let listed = memory.policy().lock().policy.list_numbers();
        let listed_max = self.listed_max.fetch_max(listed, Ordering::Relaxed).max(listed);
        let pages = memory.budget().limit().0 / PAGE as u64;
        let numbers = pages.min(memory.table().page_count().0).max(listed_max);
        let bytes = (numbers * RESIDENT_TABLES).next_multiple_of(PAGE as u64);
        let counted = self.of_limit.load(Ordering::Relaxed);
        if bytes > counted && memory.budget().try_charge(ByteCount(bytes - counted)) {
            self.of_limit.store(bytes, Ordering::Relaxed);
        } else if bytes < counted {
            self.of_limit.store(bytes, Ordering::Relaxed);
            memory.budget().uncharge(ByteCount(counted - bytes));
            memory.pool().managed().gave_back(counted - bytes);
        }
    }

    /// Gives back tables of chunks that hold nothing any more; returns how many bytes that were.
    pub(in crate::paging) fn release(&self, memory: &RegionMemory) -> u64 {
        // Acquire: pairs with the release in `note_emptied`.
        if !self.any_emptied.swap(false, Ordering::AcqRel) {
            return 0;
        }
        // No handler of a signal may need a chunk that its thread has latched.
        let _blocked = SignalsBlocked::new();
        let mut freed = 0;
        let words = self.emptied_words.load(Ordering::Relaxed);
        for at in 0..words {
            if self.emptied[at].load(Ordering::Relaxed) == 0 {
                continue;
            }
            let mut bits = self.emptied[at].swap(0, Ordering::Relaxed);
            while bits != 0 {
                freed += self
                    .release_spans_of(memory, ChunkId(at * 64 + bits.trailing_zeros() as usize));
                bits &= bits - 1;
            }
        }
        memory.pool().managed().gave_back(freed);
        freed
    }

    /// Gives back the tables of a chunk, and of the spans of the policy that it is the last of.
    fn release_spans_of(&self, memory: &RegionMemory, chunk: ChunkId) -> u64 {
        let mut freed = 0;
        if self.frees_page_tables {
            freed += self.release_span(memory, chunk, &self.page_tables, |_| {
                let piece = Piece::new(memory.table().chunk_addr(chunk), CHUNK);
                // SAFETY: nothing is mapped in the chunk: all its words are `Empty`, it is closed,
                // and nobody can change that while it is latched.
                memory.mapper().owns(piece.start(), CHUNK)
                    && unsafe { memory.mapper().discard(&[piece]) }.is_ok()
            });
        }
        freed += self.release_span(memory, chunk, &self.words, |pages| {
            // SAFETY: all of these words are `Empty`, which is zero, and nobody changes one
            // that is before it has entered its chunk, which is latched.
            unsafe { memory.table().drop_words(pages) }.is_ok()
        });
        if self.words.has(chunk) {
            return freed;
        }
        for span in &self.of_policy {
            freed += self.release_span(memory, chunk, span, |pages| {
                let (first, count) = (PageId(pages.start as u64), PageCount(pages.len() as u64));
                memory.policy().lock().released(first, count);
                true
            });
        }
        freed
    }

    /// Runs `release` while all chunks of the span that `chunk` is in are latched, if it is charged and no page of it holds
    /// anything; returns the bytes that are not charged any more then. `chunk` is looked at again later
    /// if one of them is in use at this moment.
    fn release_span(
        &self,
        memory: &RegionMemory,
        chunk: ChunkId,
        span: &SpanCharges,
        release: impl FnOnce(Range<usize>) -> bool,
    ) -> u64 {
        let first = chunk.0 / span.chunks * span.chunks;
        let end = (first + span.chunks).min(self.count);
        let others_in_use = || (first..end).any(|at| at != chunk.0 && self.words.has(ChunkId(at)));
        if !span.has(chunk) || others_in_use() {
            return 0;
        }
        let latched =
            (first..end).take_while(|at| memory.chunks().latch_unentered(ChunkId(*at))).count();
        let is_whole = first + latched == end;
        let pages = first * CHUNK_PAGES..end * CHUNK_PAGES;
        let is_empty = |page: usize| memory.word(PageId(page as u64)).load() == Word::EMPTY;
        let is_released = is_whole && pages.clone().all(is_empty) && release(pages);
        let bytes = if is_released { span.clear(chunk) } else { 0 };
        let closed = Phase::Closed;
        (first..first + latched)
            .for_each(|at| memory.chunks().unlatch(ChunkId(at), closed, closed));
        if !is_whole && memory.chunks().is_busy(ChunkId(first + latched)) {
            self.note_emptied(chunk);
        }
        self.of_pages.fetch_sub(bytes, Ordering::Relaxed);
        memory.budget().uncharge(ByteCount(bytes));
        bytes
    }

    // Slots.

    /// Sees to it that there are slots to give out whose tables are charged. For the evictor.
    pub(in crate::paging) fn ready_slots(
        &self,
        memory: &RegionMemory,
        slots: &SlotStore,
        want: SlotCount,
    ) {
        loop {
            let (free, used) = slots.map().awake();
            let enough = free.0 >= SLOTS_READY + used.0 / 4;
            let roomy = !self.slots_may_grow(memory) || slots.map().has_run(want);
            if enough && roomy || !slots.map().has_asleep() {
                return;
            }
            if !memory.pool().charge_slots(ByteCount(SLOT_GROUP_TABLES), !enough) {
                return;
            }
            self.wake_slots(slots);
        }
    }

    /// True while tables of slots take less than their part of the limit.
    fn slots_may_grow(&self, memory: &RegionMemory) -> bool {
        self.of_slots.load(Ordering::Relaxed) < memory.budget().limit().0 / SLOTS_PART
    }

    /// Lets a group of slots be given out, whose tables were charged.
    fn wake_slots(&self, slots: &SlotStore) {
        self.of_slots.fetch_add(SLOT_GROUP_TABLES, Ordering::Relaxed);
        let woken = slots.map().wake();
        debug_assert!(woken, "the caller has looked, and nobody else wakes");
    }

    /// Gives back tables of slots that nobody uses; returns whether there may be more. For the
    /// evictor, which alone gives slots out.
    pub(in crate::paging) fn sleep_slots(&self, memory: &RegionMemory, slots: &SlotStore) -> bool {
        for _ in 0..ASLEEP_MAX {
            let (free, used) = slots.map().awake();
            let are_for_runs = self.slots_may_grow(memory) && free.0 < 4 * used.0;
            if are_for_runs || free.0 < 2 * (SLOTS_READY + used.0 / 4) {
                return false;
            }
            let Some(first) = slots.map().sleep() else { return false };
            let range = first.as_usize()..first.as_usize() + GROUP_SLOTS as usize;
            // SAFETY: the slots sleep, so none is in use, and only this thread gives slots out.
            if unsafe { slots.drop_hashes(range) }.is_err() {
                // As of locked memory (mlockall): it stays, and charged.
                slots.map().wake_again(first);
                return false;
            }
            self.of_slots.fetch_sub(SLOT_GROUP_TABLES, Ordering::Relaxed);
            memory.budget().uncharge(ByteCount(SLOT_GROUP_TABLES));
            memory.pool().managed().gave_back(SLOT_GROUP_TABLES);
        }
        true
    }
}
