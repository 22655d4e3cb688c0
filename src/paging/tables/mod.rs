//! Tables: what describes pages and slots counts against the limit, and comes back.
//!
//! Tables are arrays that take memory where they are touched (`meta::LazyArray`), and the kernel's
//! page tables. They are charged when a page is first used, by span, and given back when
//! nothing in the span holds anything:
//!
//! | span | of it | bytes |
//! |---|---|---|
//! | chunk, 512 pages | the kernel's page table | 4 KiB |
//! | chunk | page words | 4 KiB |
//! | pair of chunks | the policy's words | 4 KiB |
//! | block, 8 chunks | the policy's tags | 4 KiB |
//! | slot group, 512 slots | hashes; bits of the slot map | 4,424 |
//!
//! and 4 bytes a page that fits into the limit (the policy's lists), or what the lists take if that is more: 12 for a
//! page in a queue.
//!
//! An allocation is refused if the tables of all that is allocated, each page touched and stored,
//! could take more than half of the limit: then there is always room to evict for a table, and a
//! touch of memory that was granted never fails for want of one.
//!
//! A fault does not wait for tables alone: it charges 16 KiB at most, spare frames give way to them, and a page that
//! it maps leaves more than that free.
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
use crate::paging::page::CHUNK_LEN;
use crate::paging::page::chunks::{CHUNK, ChunkId};
use crate::paging::table_sizes::{CHUNK_TABLE, OF_POLICY, Span, WORDS};

/// A kind of span, and a bit for each of a region: its tables are charged.
#[derive(Debug)]
struct SpanCharges {
    chunks: usize,
    bytes: u64,
    charged: LazyArray<AtomicU64>,
}

impl SpanCharges {
    /// In a region of `count` chunks.
    fn new((pages, bytes): Span, count: usize) -> Result<SpanCharges> {
        let chunks = (pages / CHUNK_LEN.0) as usize;
        Ok(SpanCharges { chunks, bytes, charged: bits(count.div_ceil(chunks))? })
    }

    /// The word and the bit of the span that a chunk is in.
    fn bit(&self, chunk: ChunkId) -> (&AtomicU64, u64) {
        bit(&self.charged, chunk.0 / self.chunks)
    }

    /// True if its tables are charged.
    fn has(&self, chunk: ChunkId) -> bool {
        let (word, bit) = self.bit(chunk);
        word.load(Ordering::Relaxed) & bit != 0
    }

    /// Notes that its tables are charged; returns how many bytes this call noted.
    fn note(&self, chunk: ChunkId) -> u64 {
        let (word, bit) = self.bit(chunk);
        if word.fetch_or(bit, Ordering::Relaxed) & bit == 0 { self.bytes } else { 0 }
    }

    /// Notes that they are not any more; returns how many bytes this call noted.
    fn clear(&self, chunk: ChunkId) -> u64 {
        let (word, bit) = self.bit(chunk);
        if word.fetch_and(!bit, Ordering::Relaxed) & bit != 0 { self.bytes } else { 0 }
    }
}

fn bits(count: usize) -> Result<LazyArray<AtomicU64>> {
    LazyArray::new(count.div_ceil(64))
}

/// The word that a bit is in, and the bit.
fn bit(bits: &LazyArray<AtomicU64>, at: usize) -> (&AtomicU64, u64) {
    (&bits[at / 64], 1 << (at % 64))
}

/// Charges for a region's tables.
#[derive(Debug)]
pub(in crate::paging) struct Tables {
    count: usize,
    page_tables: SpanCharges,
    words: SpanCharges,
    of_policy: [SpanCharges; OF_POLICY.len()],
    /// A bit per chunk: pages of it were discarded, and its tables may hold nothing.
    emptied: LazyArray<AtomicU64>,
    any_emptied: AtomicBool,
    /// Words of `emptied` that may have a bit.
    emptied_words: AtomicUsize,
    /// Bytes charged for spans.
    of_pages: AtomicU64,
    /// Bytes charged for slots.
    of_slots: AtomicU64,
    /// Bytes charged for the policy's lists.
    of_limit: AtomicU64,
    /// Maximum number of [numbers](crate::paging::evict::policy::Policy::list_numbers) that the policy was seen to list.
    listed_max: AtomicU64,
    /// The kernel frees the page table of a range that is dropped.
    frees_page_tables: bool,
}

impl Tables {
    pub(in crate::paging) fn new(span: usize) -> Result<Tables> {
        let chunks = span / CHUNK;
        Ok(Tables {
            count: chunks,
            page_tables: SpanCharges::new((CHUNK_LEN.0, CHUNK_TABLE), chunks)?,
            words: SpanCharges::new(WORDS, chunks)?,
            of_policy: [
                SpanCharges::new(OF_POLICY[0], chunks)?,
                SpanCharges::new(OF_POLICY[1], chunks)?,
            ],
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

    /// Pages of the main set, with whose numbers the policy's lists would take what they were seen to take: that stays charged.
    pub(in crate::paging) fn listed_max(&self) -> PageCount {
        PageCount(self.listed_max.load(Ordering::Relaxed))
    }

    /// Notes that pages of a chunk were discarded.
    pub(in crate::paging) fn note_emptied(&self, chunk: ChunkId) {
        let (word, bit) = bit(&self.emptied, chunk.0);
        if word.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
            self.emptied_words.fetch_max(chunk.0 / 64 + 1, Ordering::Relaxed);
            // Pairs with the acquire in `release_tables`: the bit is seen.
            self.any_emptied.store(true, Ordering::Release);
        }
    }

    fn spans(&self) -> impl Iterator<Item = &SpanCharges> {
        [&self.page_tables, &self.words].into_iter().chain(&self.of_policy)
    }

    fn needs(&self, chunk: ChunkId) -> u64 {
        self.spans().filter(|span| !span.has(chunk)).map(|span| span.bytes).sum()
    }

    /// Notes that a chunk's tables are charged; returns how many bytes this call noted.
    fn note(&self, chunk: ChunkId) -> u64 {
        let bytes = self.spans().map(|span| span.note(chunk)).sum();
        self.of_pages.fetch_add(bytes, Ordering::Relaxed);
        bytes
    }
}
