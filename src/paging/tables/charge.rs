//! Charging tables when they are first used, and giving them back.

#![expect(unsafe_code, reason = "drops the memory of tables that hold nothing")]

use crate::base::error::{Error, Result};
use crate::base::sync::Ordering;
use crate::base::units::{ByteCount, PageCount, PageId, SlotCount};
use crate::limit::manager::MemoryManager;
use crate::paging::page::chunks::{CHUNK, ChunkId};
use crate::paging::page::word::Word;
use crate::paging::pager::Pager;
use crate::paging::table_sizes::{
    BLOCK_PAGES, BLOCK_TABLES, CHUNK_TABLE, GROUP_PAGES, GROUP_TABLES, RESIDENT_TABLES,
    SLOT_GROUP_TABLES, SLOTS_READY,
};
use crate::paging::tables::{clear_bit, has_bit};
use crate::store::slots::GROUP_SLOTS;
use crate::sys::signals::SignalsBlocked;
use crate::sys::vm::{KERNEL_PAGE, Piece};

/// While tables of slots take less than this part of the limit, there may be more of them, so that
/// long runs are found.
const SLOTS_PART: u64 = 32;
/// Maximum number of slot groups that are given back in one turn of the evictor: a call of the kernel each,
/// for which faults that need room would wait.
const ASLEEP_MAX: usize = 64;

/// Charges the tables that describe a chunk, once. `false`: the limit leaves no room. The
/// caller has entered the chunk, so that the tables stay until it leaves.
pub(in crate::paging) fn count_tables(pager: &Pager, chunk: ChunkId) -> bool {
    let needs = ByteCount(pager.tables().needs(chunk));
    if needs == ByteCount::ZERO {
        return true;
    }
    if !pager.pool().charge_leaving(needs, ByteCount::ZERO) {
        return false;
    }
    let noted = pager.tables().note(chunk);
    // Another thread counted the rest; a bit that was looked at stays set meanwhile.
    pager.budget().uncharge(ByteCount(needs.0 - noted));
    true
}

/// Charges what a region has from its start on, before there is anything to evict.
///
/// # Errors
/// When there is no room for the first slots, without which nothing could ever be written.
pub(in crate::paging) fn start_tables(
    pager: &Pager,
    manager: Option<&MemoryManager>,
) -> Result<()> {
    count_tables_of_limit(pager);
    ready_slots(pager, SlotCount(1));
    if pager.slots().map().awake().0 > SlotCount(0) {
        return Ok(());
    }
    let bytes = ByteCount(SLOT_GROUP_TABLES);
    match (manager, pager.managed().account()) {
        (Some(manager), Some(account)) => manager.charge(account, bytes)?,
        _ => {
            let (limit, charged) = (pager.budget().limit(), pager.budget().charged());
            return Err(Error::LimitTooSmall { limit, minimum: ByteCount(charged.0 + bytes.0) });
        }
    }
    wake_slots(pager);
    Ok(())
}

/// Charges what follows from the limit, as far as there is room now; gives back what a limit that
/// was lowered needs no more. What the policy has ever listed stays charged. For the evictor.
pub(in crate::paging) fn count_tables_of_limit(pager: &Pager) {
    let listed = pager.policy().lock().resident().0;
    let listed_max = pager.tables().listed_max.fetch_max(listed, Ordering::Relaxed).max(listed);
    let pages = (pager.budget().limit().0 / pager.page_bytes() as u64).max(listed_max);
    let pages = pages.min(pager.page_count().0);
    let bytes = (pages * RESIDENT_TABLES).next_multiple_of(KERNEL_PAGE as u64);
    let counted = pager.tables().of_limit.load(Ordering::Relaxed);
    if bytes > counted && pager.budget().try_charge(ByteCount(bytes - counted)) {
        pager.tables().of_limit.store(bytes, Ordering::Relaxed);
    } else if bytes < counted {
        pager.tables().of_limit.store(bytes, Ordering::Relaxed);
        pager.budget().uncharge(ByteCount(counted - bytes));
        pager.managed().gave_back(counted - bytes);
    }
}

/// Gives back tables of chunks that hold nothing any more; returns how many bytes that were.
pub(in crate::paging) fn release_tables(pager: &Pager) -> u64 {
    // Acquire: pairs with the release in `note_emptied`.
    if !pager.tables().any_emptied.swap(false, Ordering::AcqRel) {
        return 0;
    }
    // No handler of a signal may need a chunk that its thread has latched.
    let _blocked = SignalsBlocked::new();
    let mut freed = 0;
    let words = pager.tables().emptied_words.load(Ordering::Relaxed);
    for at in 0..words {
        if pager.tables().emptied[at].load(Ordering::Relaxed) == 0 {
            continue;
        }
        let mut bits = pager.tables().emptied[at].swap(0, Ordering::Relaxed);
        while bits != 0 {
            freed += release_spans_of(pager, ChunkId(at * 64 + bits.trailing_zeros() as usize));
            bits &= bits - 1;
        }
    }
    pager.managed().gave_back(freed);
    freed
}

/// Gives back the tables of a chunk, and of the group and the block that it is the last of.
fn release_spans_of(pager: &Pager, chunk: ChunkId) -> u64 {
    let tables = pager.tables();
    let mut freed = 0;
    if tables.frees_page_tables && has_bit(&tables.chunks, chunk.0) {
        freed += release_span(pager, chunk, chunk.0, 1, || {
            let piece = Piece::new(pager.table().chunk_addr(chunk), CHUNK);
            if !pager.mapper().owns(piece.start(), CHUNK) {
                return 0;
            }
            // SAFETY: nothing is mapped in the chunk: all its words are `Empty`, it is closed,
            // and nobody can change that while it is latched.
            let dropped = unsafe { pager.mapper().discard(&[piece]) }.is_ok();
            if dropped && clear_bit(&tables.chunks, chunk.0) { CHUNK_TABLE } else { 0 }
        });
    }
    let (group, per_group) = (tables.group_of(chunk), tables.spans.chunks_per_group);
    if has_bit(&tables.groups, group) {
        freed += release_span(pager, chunk, group * per_group, per_group, || {
            let first = PageId(group as u64 * GROUP_PAGES);
            pager.policy().lock().released(first, PageCount(GROUP_PAGES));
            let words = first.as_usize()..(first.0 + GROUP_PAGES) as usize;
            // SAFETY: all of these words are `Empty`, which is zero, and nobody changes one
            // that is before it has entered its chunk, which is latched.
            let dropped = unsafe { pager.table().drop_words(words) }.is_ok();
            if dropped && clear_bit(&tables.groups, group) { GROUP_TABLES } else { 0 }
        });
    }
    let (block, per_block) = (tables.block_of(chunk), tables.spans.chunks_per_block);
    let groups = per_block / per_group;
    let in_use = |group: usize| group < tables.group_count() && has_bit(&tables.groups, group);
    let is_unused = |block: usize| !(block * groups..(block + 1) * groups).any(in_use);
    if has_bit(&tables.blocks, block) && is_unused(block) {
        freed += release_span(pager, chunk, block * per_block, per_block, || {
            let first = PageId(block as u64 * BLOCK_PAGES);
            pager.policy().lock().released(first, PageCount(BLOCK_PAGES));
            if clear_bit(&tables.blocks, block) { BLOCK_TABLES } else { 0 }
        });
    }
    freed
}

/// Runs `release` while `count` chunks from `first` on are latched, if no page of them holds
/// anything; what it gave back is not charged any more then. `because` is looked at again later
/// if one of them is in use at this moment.
fn release_span(
    pager: &Pager,
    because: ChunkId,
    first: usize,
    count: usize,
    release: impl FnOnce() -> u64,
) -> u64 {
    let end = (first + count).min(pager.tables().spans.chunks);
    let latched =
        (first..end).take_while(|at| pager.chunks().latch_unentered(ChunkId(*at))).count();
    let is_whole = first + latched == end;
    let per_chunk = pager.tables().spans.pages_per_chunk;
    let mut pages = first as u64 * per_chunk..end as u64 * per_chunk;
    let is_empty = |page: u64| pager.word(PageId(page)).load() == Word::EMPTY;
    let bytes = if is_whole && pages.all(is_empty) { release() } else { 0 };
    (first..first + latched).for_each(|at| pager.chunks().unlatch_closed(ChunkId(at)));
    if !is_whole && pager.chunks().is_busy(ChunkId(first + latched)) {
        pager.tables().note_emptied(because);
    }
    pager.tables().of_pages.fetch_sub(bytes, Ordering::Relaxed);
    pager.budget().uncharge(ByteCount(bytes));
    bytes
}

// Slots.

/// Sees to it that there are slots to give out whose tables are charged. For the evictor.
pub(in crate::paging) fn ready_slots(pager: &Pager, want: SlotCount) {
    let part = pager.budget().limit().0 / SLOTS_PART;
    loop {
        let (free, used) = pager.slots().map().awake();
        let of_slots = pager.tables().of_slots.load(Ordering::Relaxed);
        let enough = free.0 >= SLOTS_READY + used.0 / 4;
        let roomy = of_slots >= part || pager.slots().map().has_run(want);
        if enough && roomy || !pager.slots().map().has_asleep() {
            return;
        }
        if !pager.pool().charge_slots(ByteCount(SLOT_GROUP_TABLES), !enough) {
            return;
        }
        wake_slots(pager);
    }
}

/// Lets a group of slots be given out, whose tables were charged.
fn wake_slots(pager: &Pager) {
    pager.tables().of_slots.fetch_add(SLOT_GROUP_TABLES, Ordering::Relaxed);
    let woken = pager.slots().map().wake();
    debug_assert!(woken, "the caller has looked, and nobody else wakes");
}

/// Gives back tables of slots that nobody uses; returns whether there may be more. For the
/// evictor, which alone gives slots out.
pub(in crate::paging) fn sleep_slots(pager: &Pager) -> bool {
    for _ in 0..ASLEEP_MAX {
        let (free, used) = pager.slots().map().awake();
        if free.0 < 2 * (SLOTS_READY + used.0 / 4) {
            return false;
        }
        let Some(first) = pager.slots().map().sleep() else { return false };
        let range = first.as_usize()..first.as_usize() + GROUP_SLOTS as usize;
        // SAFETY: the slots sleep, so none is in use, and only this thread gives slots out.
        if unsafe { pager.slots().drop_hashes(range) }.is_ok() {
            pager.tables().of_slots.fetch_sub(SLOT_GROUP_TABLES, Ordering::Relaxed);
            pager.budget().uncharge(ByteCount(SLOT_GROUP_TABLES));
            pager.managed().gave_back(SLOT_GROUP_TABLES);
        }
    }
    true
}
