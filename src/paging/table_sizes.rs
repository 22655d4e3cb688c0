//! How large tables are: the bytes that describe pages and slots, and how much of a limit they may take.
//!
//! Known here for all kinds of tables together, because an allocation is granted only if the tables
//! of all that is allocated fit; `tables` charges them when they are used.

use crate::base::units::{ByteCount, PageCount, SlotCount};
use crate::paging::page::{CHUNK_LEN, PAGE};
use crate::store::slots::GROUP_SLOTS;

/// Bytes of a chunk's page table.
pub(in crate::paging) const CHUNK_TABLE: u64 = PAGE as u64;

/// Tables that come and go together: the number of neighbouring pages that they are of, and their bytes.
pub(in crate::paging) type Span = (u64, u64);
/// The words of a chunk's pages.
pub(in crate::paging) const WORDS: Span = (CHUNK_LEN.0, PAGE as u64);
/// The policy's words, as many as share a page of memory, and its tags.
pub(in crate::paging) const OF_POLICY: [Span; 2] =
    [(PAGE as u64 / 4, PAGE as u64), (PAGE as u64, PAGE as u64)];
/// All kinds of spans, with the page table among a chunk's.
const SPANS: [Span; 3] = [(WORDS.0, WORDS.1 + CHUNK_TABLE), OF_POLICY[0], OF_POLICY[1]];

/// Bytes of tables that a fault may have to charge.
pub(in crate::paging) const FAULT_TABLES: u64 = SPANS[0].1 + SPANS[1].1 + SPANS[2].1;

/// Bytes of a group of slots: hashes of 8 bytes; five bits of each slot in sets, one of them a fork's; and eight bytes of
/// the sets' upper levels.
pub(in crate::paging) const SLOT_GROUP_TABLES: u64 = GROUP_SLOTS * 8 + 5 * GROUP_SLOTS / 8 + 8;
/// Bytes that the policy keeps of each page of its main set.
pub(in crate::paging) const RESIDENT_TABLES: u64 = 4;

/// Slots that are kept ready beside a quarter of those in use, so that evicting, which makes room,
/// never has to wait for room for a table.
pub(in crate::paging) const SLOTS_READY: u64 = 1024;
/// Tables of all that is allocated may take 1/PART of the limit.
const PART: u64 = 2;

/// Committed memory, in pages and in [spans](SPANS): how many of each kind have at least one live page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::paging) struct Committed {
    pub(in crate::paging) pages: u64,
    pub(in crate::paging) spans: [u64; SPANS.len()],
}

impl Committed {
    /// As many spans as `count` returns for the pages of one.
    pub(in crate::paging) fn by(count: impl Fn(u64) -> u64) -> Committed {
        Committed { pages: count(1), spans: SPANS.map(|(pages, _)| count(pages)) }
    }

    /// The spans that `bytes` take when they begin at a multiple of all spans.
    pub(in crate::paging) fn of(bytes: u64) -> Committed {
        Committed::by(|pages| bytes.div_ceil(pages * PAGE as u64))
    }

    /// Each count joined with the other's.
    pub(in crate::paging) fn with(
        self,
        other: Committed,
        join: impl Fn(u64, u64) -> u64,
    ) -> Committed {
        let spans = std::array::from_fn(|at| join(self.spans[at], other.spans[at]));
        Committed { pages: join(self.pages, other.pages), spans }
    }
}

/// Maximum number of bytes that the tables of the committed spans take.
pub(in crate::paging) fn tables_max(
    committed: &Committed,
    resident: PageCount,
    slots: SlotCount,
) -> ByteCount {
    let stored = committed.pages.saturating_add(committed.pages / 4).saturating_add(SLOTS_READY);
    let slot_groups = stored.min(slots.0).div_ceil(GROUP_SLOTS);
    let spans = committed.spans.into_iter().zip(SPANS.map(|(_, bytes)| bytes));
    let others = [(slot_groups, SLOT_GROUP_TABLES), (resident.0, RESIDENT_TABLES)];
    let add =
        |sum: u64, (count, bytes): (u64, u64)| sum.saturating_add(count.saturating_mul(bytes));
    ByteCount(spans.chain(others).fold(0, add))
}

/// How much of a limit tables may take.
pub(in crate::paging) fn tables_allowed(limit: ByteCount) -> ByteCount {
    ByteCount(limit.0 / PART)
}
