//! How large tables are: the bytes that describe pages and slots, and how much of a limit they may take.
//!
//! Known here for all kinds of tables together, because an allocation is granted only if the tables
//! of all that is allocated fit; `tables` charges them when they are used.

use crate::base::units::{ByteCount, PageCount, SlotCount};
use crate::paging::page::{CHUNK_LEN, PAGE};
use crate::store::slots::GROUP_SLOTS;

/// Pages whose tags in the policy share a page.
pub(in crate::paging) const BLOCK_PAGES: u64 = PAGE as u64;

/// Bytes of a chunk's page table.
pub(in crate::paging) const CHUNK_TABLE: u64 = PAGE as u64;
/// Bytes of a chunk's page words, and of the policy's.
pub(in crate::paging) const CHUNK_WORDS: u64 = 2 * PAGE as u64;
/// Bytes of a block: the policy's tags, and what is noted of returns.
pub(in crate::paging) const BLOCK_TABLES: u64 = 2 * PAGE as u64;
/// Bytes of a slot's hash and its bits in the slot map.
pub(in crate::paging) const SLOT_TABLES: u64 = 9;
/// The same of the slots whose hashes share a page.
pub(in crate::paging) const SLOT_GROUP_TABLES: u64 = GROUP_SLOTS * SLOT_TABLES;
/// Bytes that the policy keeps of each page of its main set.
pub(in crate::paging) const RESIDENT_TABLES: u64 = 4;

/// Slots that are kept ready beside a quarter of those in use, so that evicting, which makes room,
/// never has to wait for room for a table.
pub(in crate::paging) const SLOTS_READY: u64 = 1024;
/// Tables of all that is allocated may take 1/PART of the limit.
const PART: u64 = 2;

/// Committed memory, in pages and in the spans of addresses whose tables come and go together: how
/// many of each have at least one live page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::paging) struct Committed {
    pub(in crate::paging) pages: u64,
    pub(in crate::paging) chunks: u64,
    pub(in crate::paging) blocks: u64,
}

impl Committed {
    /// The spans that `bytes` take when they begin at a multiple of all spans.
    pub(in crate::paging) fn of(bytes: u64) -> Committed {
        let spans = |pages: u64| bytes.div_ceil(pages * PAGE as u64);
        Committed { pages: spans(1), chunks: spans(CHUNK_LEN.0), blocks: spans(BLOCK_PAGES) }
    }

    /// Each count joined with the other's.
    pub(in crate::paging) fn with(
        self,
        other: Committed,
        join: impl Fn(u64, u64) -> u64,
    ) -> Committed {
        Committed {
            pages: join(self.pages, other.pages),
            chunks: join(self.chunks, other.chunks),
            blocks: join(self.blocks, other.blocks),
        }
    }
}

/// Maximum number of bytes that the tables of the committed spans take.
pub(in crate::paging) fn tables_max(
    committed: &Committed,
    resident: PageCount,
    slots: SlotCount,
) -> ByteCount {
    let stored = committed.pages.saturating_add(committed.pages / 4).saturating_add(SLOTS_READY);
    let slots = stored.min(slots.0).next_multiple_of(GROUP_SLOTS);
    let sum = [
        (committed.chunks, CHUNK_TABLE + CHUNK_WORDS),
        (committed.blocks, BLOCK_TABLES),
        (slots, SLOT_TABLES),
        (resident.0, RESIDENT_TABLES),
    ];
    ByteCount(
        sum.iter().fold(0, |sum, (count, bytes)| sum.saturating_add(count.saturating_mul(*bytes))),
    )
}

/// How much of a limit tables may take.
pub(in crate::paging) fn tables_allowed(limit: ByteCount) -> ByteCount {
    ByteCount(limit.0 / PART)
}
