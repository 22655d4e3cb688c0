//! Tables: what describes pages and slots counts against the limit, and comes back.
//!
//! Tables are arrays that take memory where they are touched (`meta::LazyArray`), and the kernel's
//! page tables. They are charged when a page is first used, by span, and given back when
//! nothing in the span holds anything:
//!
//! | span | of it | bytes |
//! |---|---|---|
//! | chunk, 512 pages | the kernel's page table | 4 KiB |
//! | chunk | page words; the policy's words | 8 KiB |
//! | block, 8 chunks | the policy's tags; notes of returns | 8 KiB |
//! | slot group, 512 slots | hashes; bits of the slot map | 4,608 |
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
pub(in crate::paging) mod charge;

use crate::base::error::Result;
use crate::base::sync::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use crate::base::units::{ByteCount, PageCount};
use crate::meta::LazyArray;
use crate::paging::page::CHUNK_PAGES;
use crate::paging::page::chunks::{CHUNK, ChunkId};
use crate::paging::table_sizes::{BLOCK_PAGES, BLOCK_TABLES, CHUNK_TABLE, CHUNK_WORDS};

/// Chunks of a block.
const BLOCK_CHUNKS: usize = BLOCK_PAGES as usize / CHUNK_PAGES;

/// Charges for a region's tables.
#[derive(Debug)]
pub(in crate::paging) struct Tables {
    count: usize,
    /// A bit per chunk: its page table is charged; its words are; and a bit per block.
    chunks: LazyArray<AtomicU64>,
    words: LazyArray<AtomicU64>,
    blocks: LazyArray<AtomicU64>,
    /// A bit per chunk: pages of it were discarded, and its tables may hold nothing.
    emptied: LazyArray<AtomicU64>,
    any_emptied: AtomicBool,
    /// Words of `emptied` that may have a bit.
    emptied_words: AtomicUsize,
    /// Bytes charged for chunks and blocks.
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
    pub(in crate::paging) fn new(span: usize) -> Result<Tables> {
        let chunks = span / CHUNK;
        Ok(Tables {
            count: chunks,
            chunks: bits(chunks)?,
            words: bits(chunks)?,
            blocks: bits(chunks.div_ceil(BLOCK_CHUNKS))?,
            emptied: bits(chunks)?,
            any_emptied: AtomicBool::new(false),
            emptied_words: AtomicUsize::new(0),
            of_pages: AtomicU64::new(0),
            of_slots: AtomicU64::new(0),
            of_limit: AtomicU64::new(0),
            listed_max: AtomicU64::new(0),
            frees_page_tables: crate::sys::kernel::frees_page_tables(),
        })
    }

    /// Bytes charged.
    pub(in crate::paging) fn bytes(&self) -> ByteCount {
        let all = [&self.of_pages, &self.of_slots, &self.of_limit];
        ByteCount(all.iter().map(|bytes| bytes.load(Ordering::Relaxed)).sum())
    }

    /// Maximum number of pages that the policy was seen to list, whose tables stay charged.
    pub(in crate::paging) fn listed_max(&self) -> PageCount {
        PageCount(self.listed_max.load(Ordering::Relaxed))
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
            + missing(has_bit(&self.words, chunk.0), CHUNK_WORDS)
            + missing(has_bit(&self.blocks, chunk.0 / BLOCK_CHUNKS), BLOCK_TABLES)
    }

    /// Notes that a chunk's tables are charged; returns how many bytes this call noted.
    fn note(&self, chunk: ChunkId) -> u64 {
        let noted = |set: bool, bytes: u64| if set { bytes } else { 0 };
        let bytes = noted(set_bit(&self.chunks, chunk.0), CHUNK_TABLE)
            + noted(set_bit(&self.words, chunk.0), CHUNK_WORDS)
            + noted(set_bit(&self.blocks, chunk.0 / BLOCK_CHUNKS), BLOCK_TABLES);
        self.of_pages.fetch_add(bytes, Ordering::Relaxed);
        bytes
    }
}
