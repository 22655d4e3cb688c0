//! Tables: what describes pages and slots counts against the limit, and comes back.
//!
//! Tables are arrays that take memory where they are touched (`meta::LazyArray`), and the kernel's
//! page tables. They are charged when a page is first used, by [span](Spans), and given back when
//! nothing in the span holds anything:
//!
//! | span | of it | bytes |
//! |---|---|---|
//! | chunk, 2 MiB | the kernel's page table | 4 KiB |
//! | group, 512 pages | page words; the policy's words | 8 KiB |
//! | block, 8 groups | the policy's tags | 4 KiB |
//! | slot group, 256 slots | hashes; bits of the slot map | 4,352 |
//!
//! and 4 bytes a page that fits into the limit (the policy's main set).
//!
//! An allocation is refused if the tables of all that is allocated, each page touched and stored,
//! could take more than half of the limit: then there is always room to evict for a table, and a
//! touch of memory that was granted never fails for want of one.
//!
//! A span is given back by the evictor, when it has nothing to do or memory is short, and by who
//! reclaims for others: all its chunks are latched, and no thread is between charging the tables
//! and changing a word of theirs ([`ChunkState::enter`](crate::paging::page::chunk_state)); if all words are
//! `Empty`, dropping their memory changes nothing.
//!
//! # Invariants
//! 1. Tables of a page are charged before its word is other than `Empty`.
//! 2. A slot's tables are charged before it is given out.
//! 3. The memory of a span's tables is dropped only while all its chunks are latched.
#![expect(unsafe_code, reason = "drops the memory of tables that hold nothing")]

use crate::base::error::Result;
use crate::base::sync::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use crate::base::units::{ByteCount, PageCount, PageId, SlotCount};
use crate::meta::LazyArray;
use crate::paging::page::chunks::{CHUNK, ChunkId};
use crate::paging::page::word::Word;
use crate::paging::pager::Pager;
use crate::paging::table_sizes::{
    BLOCK_PAGES, BLOCK_TABLES, CHUNK_TABLE, GROUP_PAGES, GROUP_TABLES, RESIDENT_TABLES,
    SLOT_GROUP_TABLES, SLOTS_READY,
};
use crate::store::slots::GROUP_SLOTS;
use crate::sys::signals::SignalsBlocked;
use crate::sys::vm::{KERNEL_PAGE, Piece};

/// While tables of slots take less than this part of the limit, there may be more of them, so that
/// long runs are found.
const SLOTS_PART: u64 = 32;
/// Most slot groups that are given back in one turn of the evictor.
const ASLEEP_MAX: usize = 64;

/// How many pages each kind of span has.
#[derive(Clone, Copy, Debug)]
struct Spans {
    pages_per_chunk: u64,
    chunks: usize,
    chunks_per_group: usize,
    chunks_per_block: usize,
}

/// What is charged of a region's tables.
#[derive(Debug)]
pub(in crate::paging) struct Tables {
    spans: Spans,
    /// A bit per chunk, group and block: charged.
    chunks: LazyArray<AtomicU64>,
    groups: LazyArray<AtomicU64>,
    blocks: LazyArray<AtomicU64>,
    /// A bit per chunk: pages of it were discarded, and its tables may hold nothing.
    emptied: LazyArray<AtomicU64>,
    any_emptied: AtomicBool,
    /// Words of `emptied` that may have a bit.
    emptied_words: AtomicUsize,
    /// Bytes charged for chunks, groups and blocks.
    of_pages: AtomicU64,
    /// Bytes charged for slots.
    of_slots: AtomicU64,
    /// Bytes charged for the policy's main set.
    of_limit: AtomicU64,
    /// Maximum number of pages that the policy was seen to list.
    listed_max: AtomicU64,
    /// The kernel frees the page table of a range that is dropped.
    frees_page_tables: bool,
}

fn bits(count: usize) -> Result<LazyArray<AtomicU64>> {
    LazyArray::new(count.div_ceil(64))
}

fn has_bit(bits: &LazyArray<AtomicU64>, at: usize) -> bool {
    bits[at / 64].load(Ordering::Relaxed) & (1 << (at % 64)) != 0
}

/// Sets a bit; returns whether this call did.
fn set_bit(bits: &LazyArray<AtomicU64>, at: usize) -> bool {
    let bit = 1 << (at % 64);
    bits[at / 64].fetch_or(bit, Ordering::Relaxed) & bit == 0
}

/// Clears a bit; returns whether this call did.
fn clear_bit(bits: &LazyArray<AtomicU64>, at: usize) -> bool {
    let bit = 1 << (at % 64);
    bits[at / 64].fetch_and(!bit, Ordering::Relaxed) & bit != 0
}

impl Tables {
    pub(in crate::paging) fn new(span: usize, page_bytes: usize) -> Result<Tables> {
        let chunks = span / CHUNK;
        let pages_per_chunk = (CHUNK / page_bytes) as u64;
        let spans = Spans {
            pages_per_chunk,
            chunks,
            chunks_per_group: (GROUP_PAGES / pages_per_chunk) as usize,
            chunks_per_block: (BLOCK_PAGES / pages_per_chunk) as usize,
        };
        Ok(Tables {
            spans,
            chunks: bits(chunks)?,
            groups: bits(chunks.div_ceil(spans.chunks_per_group))?,
            blocks: bits(chunks.div_ceil(spans.chunks_per_block))?,
            emptied: bits(chunks)?,
            any_emptied: AtomicBool::new(false),
            emptied_words: AtomicUsize::new(0),
            of_pages: AtomicU64::new(0),
            of_slots: AtomicU64::new(0),
            of_limit: AtomicU64::new(0),
            listed_max: AtomicU64::new(0),
            frees_page_tables: crate::sys::vm::frees_page_tables(),
        })
    }

    fn group_of(&self, chunk: ChunkId) -> usize {
        chunk.0 / self.spans.chunks_per_group
    }

    fn block_of(&self, chunk: ChunkId) -> usize {
        chunk.0 / self.spans.chunks_per_block
    }

    /// Bytes charged.
    pub(in crate::paging) fn bytes(&self) -> ByteCount {
        let all = [&self.of_pages, &self.of_slots, &self.of_limit];
        ByteCount(all.iter().map(|bytes| bytes.load(Ordering::Relaxed)).sum())
    }

    /// Notes that pages of a chunk were discarded.
    pub(in crate::paging) fn note_emptied(&self, chunk: ChunkId) {
        if set_bit(&self.emptied, chunk.0) {
            self.emptied_words.fetch_max(chunk.0 / 64 + 1, Ordering::Relaxed);
            // Pairs with the acquire in `release_tables`: the bit is seen.
            self.any_emptied.store(true, Ordering::Release);
        }
    }

    fn needs(&self, chunk: ChunkId) -> u64 {
        let missing = |charged: bool, bytes: u64| if charged { 0 } else { bytes };
        missing(has_bit(&self.chunks, chunk.0), CHUNK_TABLE)
            + missing(has_bit(&self.groups, self.group_of(chunk)), GROUP_TABLES)
            + missing(has_bit(&self.blocks, self.block_of(chunk)), BLOCK_TABLES)
    }

    /// Notes that a chunk's tables are charged; returns how many bytes this call noted.
    fn note(&self, chunk: ChunkId) -> u64 {
        let noted = |set: bool, bytes: u64| if set { bytes } else { 0 };
        let bytes = noted(set_bit(&self.chunks, chunk.0), CHUNK_TABLE)
            + noted(set_bit(&self.groups, self.group_of(chunk)), GROUP_TABLES)
            + noted(set_bit(&self.blocks, self.block_of(chunk)), BLOCK_TABLES);
        self.of_pages.fetch_add(bytes, Ordering::Relaxed);
        bytes
    }
}

impl Pager {
    /// Charges the tables that describe a chunk, once. `false`: the limit leaves no room. The
    /// caller has entered the chunk, so that the tables stay until it leaves.
    pub(in crate::paging) fn count_tables(&self, chunk: ChunkId) -> bool {
        let needs = ByteCount(self.tables().needs(chunk));
        if needs == ByteCount::ZERO {
            return true;
        }
        if !self.pool().charge_leaving(needs, ByteCount::ZERO) {
            return false;
        }
        self.note_tables(chunk, needs);
        true
    }

    /// The same whatever the limit, for a page that is to be marked as lost.
    pub(in crate::paging) fn count_tables_anyway(&self, chunk: ChunkId) {
        let needs = ByteCount(self.tables().needs(chunk));
        self.budget().charge(needs);
        self.note_tables(chunk, needs);
    }

    fn note_tables(&self, chunk: ChunkId, charged: ByteCount) {
        let noted = self.tables().note(chunk);
        // Another thread counted the rest; a bit that was looked at stays set meanwhile.
        self.budget().uncharge(ByteCount(charged.0 - noted));
    }

    /// Charges what a region has from its start on, before there is anything to evict.
    pub(in crate::paging) fn start_tables(&self) {
        self.count_tables_of_limit();
        self.ready_slots(SlotCount(1));
    }

    /// Charges what follows from the limit, as far as there is room now; gives back what a limit that
    /// was lowered needs no more. What the policy has ever listed stays charged. For the evictor.
    pub(in crate::paging) fn count_tables_of_limit(&self) {
        let listed = self.policy().lock().resident().0;
        let listed_max = self.tables().listed_max.fetch_max(listed, Ordering::Relaxed).max(listed);
        let pages = (self.budget().limit().0 / self.page_bytes() as u64).max(listed_max);
        let pages = pages.min(self.page_count().0);
        let bytes = (pages * RESIDENT_TABLES).next_multiple_of(KERNEL_PAGE as u64);
        let counted = self.tables().of_limit.load(Ordering::Relaxed);
        if bytes > counted && self.budget().try_charge(ByteCount(bytes - counted)) {
            self.tables().of_limit.store(bytes, Ordering::Relaxed);
        } else if bytes < counted {
            self.tables().of_limit.store(bytes, Ordering::Relaxed);
            self.budget().uncharge(ByteCount(counted - bytes));
            self.managed().gave_back(counted - bytes);
        }
    }

    /// Gives back tables of chunks that hold nothing any more; returns how many bytes that were.
    pub(in crate::paging) fn release_tables(&self) -> u64 {
        // Acquire: pairs with the release in `note_emptied`.
        if !self.tables().any_emptied.swap(false, Ordering::AcqRel) {
            return 0;
        }
        // No handler of a signal may need a chunk that its thread has latched.
        let _blocked = SignalsBlocked::new();
        let mut freed = 0;
        let words = self.tables().emptied_words.load(Ordering::Relaxed);
        for at in 0..words {
            if self.tables().emptied[at].load(Ordering::Relaxed) == 0 {
                continue;
            }
            let mut bits = self.tables().emptied[at].swap(0, Ordering::Relaxed);
            while bits != 0 {
                freed += self.release_spans_of(ChunkId(at * 64 + bits.trailing_zeros() as usize));
                bits &= bits - 1;
            }
        }
        self.managed().gave_back(freed);
        freed
    }

    /// Gives back the tables of a chunk, and of the group and the block that it is the last of.
    fn release_spans_of(&self, chunk: ChunkId) -> u64 {
        let tables = self.tables();
        let mut freed = 0;
        if tables.frees_page_tables && has_bit(&tables.chunks, chunk.0) {
            freed += self.release_span(chunk, chunk.0, 1, || {
                let piece = Piece::new(self.table().chunk_addr(chunk), CHUNK);
                if !self.mapper().owns(piece.start(), CHUNK) {
                    return 0;
                }
                // SAFETY: nothing is mapped in the chunk: all its words are `Empty`, it is closed,
                // and nobody can change that while it is latched.
                let dropped = unsafe { self.mapper().discard(&[piece]) }.is_ok();
                if dropped && clear_bit(&tables.chunks, chunk.0) { CHUNK_TABLE } else { 0 }
            });
        }
        let (group, per_group) = (tables.group_of(chunk), tables.spans.chunks_per_group);
        if has_bit(&tables.groups, group) {
            freed += self.release_span(chunk, group * per_group, per_group, || {
                let first = PageId(group as u64 * GROUP_PAGES);
                self.policy().lock().released(first, PageCount(GROUP_PAGES));
                let words = first.as_usize()..(first.0 + GROUP_PAGES) as usize;
                // SAFETY: all of these words are `Empty`, which is zero, and nobody changes one
                // that is before it has entered its chunk, which is latched.
                let dropped = unsafe { self.table().drop_words(words) }.is_ok();
                if dropped && clear_bit(&tables.groups, group) { GROUP_TABLES } else { 0 }
            });
        }
        let (block, per_block) = (tables.block_of(chunk), tables.spans.chunks_per_block);
        let groups = per_block / per_group;
        let in_use = |group: usize| group < tables.group_count() && has_bit(&tables.groups, group);
        let is_unused = |block: usize| !(block * groups..(block + 1) * groups).any(in_use);
        if has_bit(&tables.blocks, block) && is_unused(block) {
            freed += self.release_span(chunk, block * per_block, per_block, || {
                let first = PageId(block as u64 * BLOCK_PAGES);
                self.policy().lock().released(first, PageCount(BLOCK_PAGES));
                if clear_bit(&tables.blocks, block) { BLOCK_TABLES } else { 0 }
            });
        }
        freed
    }

    /// Runs `release` while `count` chunks from `first` on are latched, if no page of them holds
    /// anything; what it gave back is not charged any more then. `because` is looked at again later
    /// if one of them is in use at this moment.
    fn release_span(
        &self,
        because: ChunkId,
        first: usize,
        count: usize,
        release: impl FnOnce() -> u64,
    ) -> u64 {
        let end = (first + count).min(self.tables().spans.chunks);
        let latched =
            (first..end).take_while(|at| self.chunks().latch_unentered(ChunkId(*at))).count();
        let is_whole = first + latched == end;
        let per_chunk = self.tables().spans.pages_per_chunk;
        let mut pages = first as u64 * per_chunk..end as u64 * per_chunk;
        let is_empty = |page: u64| self.word(PageId(page)).load() == Word::EMPTY;
        let bytes = if is_whole && pages.all(is_empty) { release() } else { 0 };
        (first..first + latched).for_each(|at| self.chunks().unlatch_closed(ChunkId(at)));
        if !is_whole && self.chunks().is_busy(ChunkId(first + latched)) {
            self.tables().note_emptied(because);
        }
        self.tables().of_pages.fetch_sub(bytes, Ordering::Relaxed);
        self.budget().uncharge(ByteCount(bytes));
        bytes
    }

    // Slots.

    /// Sees to it that there are slots to give out whose tables are charged. For the evictor.
    pub(in crate::paging) fn ready_slots(&self, want: SlotCount) {
        let part = self.budget().limit().0 / SLOTS_PART;
        loop {
            let (free, used) = self.slots().map().awake();
            let of_slots = self.tables().of_slots.load(Ordering::Relaxed);
            let enough = free.0 >= SLOTS_READY + used.0 / 4;
            let roomy = of_slots >= part || self.slots().map().has_run(want);
            if enough && roomy || !self.slots().map().has_asleep() {
                return;
            }
            // The evictor has spare memory, or makes some: this is the last resort.
            let must = free.0 == 0;
            if !self.charge_slot_group(must) {
                return;
            }
            self.tables().of_slots.fetch_add(SLOT_GROUP_TABLES, Ordering::Relaxed);
            let woken = self.slots().map().wake();
            debug_assert!(woken, "looked at above, and nobody else wakes");
        }
    }

    fn charge_slot_group(&self, must: bool) -> bool {
        let bytes = ByteCount(SLOT_GROUP_TABLES);
        while !self.pool().charge_leaving(bytes, ByteCount::ZERO) {
            match self.frames().take_spare() {
                Some(frame) => self.pool().free_frame(frame),
                None if must => {
                    self.budget().charge(bytes);
                    return true;
                }
                None => return false,
            }
        }
        true
    }

    /// Gives back tables of slots that nobody uses; returns whether there may be more. For the
    /// evictor, which alone gives slots out.
    pub(in crate::paging) fn sleep_slots(&self) -> bool {
        for _ in 0..ASLEEP_MAX {
            let (free, used) = self.slots().map().awake();
            if free.0 < 2 * (SLOTS_READY + used.0 / 4) {
                return false;
            }
            let Some(first) = self.slots().map().sleep() else { return false };
            let range = first.as_usize()..first.as_usize() + GROUP_SLOTS as usize;
            // SAFETY: the slots sleep, so none is in use, and only this thread gives slots out.
            if unsafe { self.slots().drop_hashes(range) }.is_ok() {
                self.tables().of_slots.fetch_sub(SLOT_GROUP_TABLES, Ordering::Relaxed);
                self.budget().uncharge(ByteCount(SLOT_GROUP_TABLES));
                self.managed().gave_back(SLOT_GROUP_TABLES);
            }
        }
        true
    }
}

impl Tables {
    fn group_count(&self) -> usize {
        self.spans.chunks.div_ceil(self.spans.chunks_per_group)
    }
}
