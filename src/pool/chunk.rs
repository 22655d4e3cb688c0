//! Chunks: what 512 neighbouring pages cost beside their memory, and when that comes back.
//!
//! | span | of it | bytes | charged |
//! |---|---|---|---|
//! | chunk, 512 pages | words; the kernel's page tables, one for each 2 MiB | 4 KiB; 4 KiB each | while one of its pages is resident or free |
//! | group, 64 chunks | bits of the resident set | 4 KiB | while one of its chunks is |
//! | group | notes; the kernel's upper tables | [`KEPT_OF_GROUP`], and 512 for each 4 KiB of a page | once |
//!
//! Where words come in huge pages, whose first touch costs 2 MiB of the limit, nothing of this comes
//! back: there may not be many of them (`frames`). Nor do page tables where the kernel frees none.

use super::chunk_note::{ChunkHold, ChunkNote};
use crate::base::error::Result;
use crate::base::sync::{AtomicU64, Ordering, Rank, Ranked};
use crate::base::units::{ByteCount, PageId};
use crate::meta::LazyArray;
use crate::sys::kernel::frees_page_tables;
use crate::sys::vm::{HUGE_PAGE, KERNEL_PAGE};
use std::ops::Range;

/// Pages of a chunk.
pub(super) const CHUNK_PAGES: usize = KERNEL_PAGE / 8;

/// Chunks whose words share one huge page.
const HUGE_WORDS_CHUNKS: usize = HUGE_PAGE / KERNEL_PAGE;

/// Chunks whose bits of the resident set share one kernel page.
const GROUP_CHUNKS: usize = KERNEL_PAGE * 8 / CHUNK_PAGES;

/// Bytes of a group's notes, and of the page table that maps its words.
const KEPT_OF_GROUP: usize = 1024;

/// The chunks of a pool.
pub(super) struct PoolChunks {
    notes: LazyArray<ChunkNote>,
    /// Bytes of page tables for each chunk: one table for each 2 MiB of pages.
    table_bytes: usize,
    /// Bytes that stay charged for each group that was ever used.
    kept_bytes: usize,
    /// Words come in huge pages: the first touch of one costs that much of the limit.
    huge_words: bool,
    /// The kernel frees the page table of a range that is dropped.
    frees_tables: bool,
    /// Held while a chunk begins to be charged, or is given back.
    changing: Ranked<()>,
    /// Bytes charged for all of this.
    metadata: AtomicU64,
    /// How many chunks are `huge`. Nothing is decided by it.
    huge: AtomicU64,
}

impl PoolChunks {
    /// The chunks of `pages` pages of `page_bytes`.
    pub(super) fn new(pages: usize, page_bytes: usize, huge_words: bool) -> Result<PoolChunks> {
        Ok(PoolChunks {
            notes: LazyArray::new(pages.div_ceil(CHUNK_PAGES))?,
            table_bytes: (CHUNK_PAGES * page_bytes).div_ceil(512 * KERNEL_PAGE) * KERNEL_PAGE,
            // A table of tables for each GiB of pages, which are 8 groups of pages of 4 KiB.
            kept_bytes: KEPT_OF_GROUP + page_bytes / 8,
            huge_words,
            frees_tables: frees_page_tables(),
            changing: Ranked::new(Rank::Leaf, ()),
            metadata: AtomicU64::new(0),
            huge: AtomicU64::new(0),
        })
    }

    /// Bytes of words, resident set and page tables that are charged.
    pub(super) fn metadata(&self) -> ByteCount {
        ByteCount(self.metadata.load(Ordering::Relaxed))
    }

    /// Bytes in huge pages.
    pub(super) fn huge_bytes(&self) -> ByteCount {
        ByteCount(self.huge.load(Ordering::Relaxed) * HUGE_PAGE as u64)
    }

    fn of(&self, page: PageId) -> &ChunkNote {
        &self.notes[page.as_usize() / CHUNK_PAGES]
    }

    /// True if the metadata around a page is charged.
    pub(super) fn is_charged(&self, page: PageId) -> bool {
        self.of(page).is_charged()
    }

    /// Enters the chunk of a page, so that its words stay, and charges its metadata before if need be,
    /// by `charge`, which `uncharge` takes back. `begin` gives words of pages their first version.
    ///
    /// # Errors
    /// That of `charge`; nothing is noted then.
    pub(super) fn enter<E>(
        &self,
        page: PageId,
        charge: impl Fn(ByteCount) -> std::result::Result<(), E>,
        uncharge: impl Fn(ByteCount),
        begin: impl Fn(Range<usize>, u64),
    ) -> std::result::Result<ChunkHold<'_>, E> {
        let (chunk, note) = (page.as_usize() / CHUNK_PAGES, self.of(page));
        loop {
            if let Some(entered) = note.enter() {
                return Ok(entered);
            }
            // Not under the lock: others may have to give chunks back first.
            let charged = self.due(chunk);
            charge(charged)?;
            let changing = self.changing.lock();
            let due = self.due(chunk);
            if note.is_charged() || due > charged {
                drop(changing);
                uncharge(charged);
                continue;
            }
            let first_version = note.first_version();
            if first_version > 0 {
                begin(chunk * CHUNK_PAGES..(chunk + 1) * CHUNK_PAGES, first_version);
            }
            if self.huge_words {
                self.first_of_huge(chunk).charge_huge_words();
            }
            let entered = note.begin_use();
            self.metadata.fetch_add(due.0, Ordering::Relaxed);
            drop(changing);
            uncharge(ByteCount(charged.0 - due.0));
            return Ok(entered);
        }
    }

    /// Bytes to charge for a chunk that is not.
    fn due(&self, chunk: usize) -> ByteCount {
        let words = match self.huge_words {
            false => KERNEL_PAGE,
            true if self.first_of_huge(chunk).has_huge_words() => 0,
            true => HUGE_PAGE,
        };
        let tables = if self.notes[chunk].has_tables() { 0 } else { self.table_bytes };
        let group = self.group_of(chunk);
        let is_kept = group.iter().any(ChunkNote::is_kept);
        let kept = if is_kept { 0 } else { self.kept_bytes };
        ByteCount((words + tables + self.bits_due(group) + kept) as u64)
    }

    /// Bytes to charge for a group's bits of the resident set.
    fn bits_due(&self, group: &[ChunkNote]) -> usize {
        if group.iter().any(ChunkNote::is_charged) { 0 } else { KERNEL_PAGE }
    }

    fn group_of(&self, chunk: usize) -> &[ChunkNote] {
        let first = chunk / GROUP_CHUNKS * GROUP_CHUNKS;
        &self.notes[first..self.notes.len().min(first + GROUP_CHUNKS)]
    }

    /// The chunk with which the huge page of words around `chunk` begins.
    fn first_of_huge(&self, chunk: usize) -> &ChunkNote {
        &self.notes[chunk / HUGE_WORDS_CHUNKS * HUGE_WORDS_CHUNKS]
    }

    /// Gives back what a chunk costs, if it is charged and nobody is at it. `drop_words` looks whether
    /// none of its words is in use any more and drops them with the page tables; it returns the version
    /// with which they begin next. `drop_bits` drops the bits of pages none of which is resident.
    /// Returns the bytes to uncharge.
    pub(super) fn give_back(
        &self,
        chunk: usize,
        drop_words: impl FnOnce(u64) -> Option<u64>,
        drop_bits: impl FnOnce(Range<usize>) -> bool,
    ) -> ByteCount {
        let note = &self.notes[chunk];
        if self.huge_words || !note.is_charged() {
            return ByteCount::ZERO;
        }
        let _changing = self.changing.lock();
        if !note.begin_drop() {
            return ByteCount::ZERO;
        }
        let Some(first_version) = drop_words(note.first_version()) else {
            note.undo_drop();
            return ByteCount::ZERO;
        };
        note.end_drop(first_version, !self.frees_tables);
        let tables = if self.frees_tables { self.table_bytes } else { 0 };
        let first = chunk / GROUP_CHUNKS * GROUP_CHUNKS;
        let pages = first * CHUNK_PAGES..(first + GROUP_CHUNKS) * CHUNK_PAGES;
        let is_group = self.bits_due(self.group_of(chunk)) > 0 && drop_bits(pages);
        let bits = if is_group { KERNEL_PAGE } else { 0 };
        let bytes = (KERNEL_PAGE + tables + bits) as u64;
        self.metadata.fetch_sub(bytes, Ordering::Relaxed);
        ByteCount(bytes)
    }

    /// As [`ChunkNote::try_freeze`].
    pub(super) fn try_freeze(&self, chunk: usize) -> bool {
        self.notes[chunk].try_freeze()
    }

    pub(super) fn unfreeze(&self, chunk: usize) {
        self.notes[chunk].unfreeze();
    }

    /// True if a chunk is neither huge nor frozen.
    pub(super) fn is_plain(&self, chunk: usize) -> bool {
        self.notes[chunk].is_plain()
    }

    /// True if a page's memory lies in a huge page.
    pub(super) fn is_huge(&self, page: PageId) -> bool {
        self.of(page).is_huge()
    }

    /// Notes that a chunk, whose pages the caller holds still, was collapsed.
    pub(super) fn set_huge(&self, chunk: usize) {
        self.notes[chunk].set_huge();
        self.huge.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes that a chunk's memory does not lie in a huge page any more; `false` when it did not.
    pub(super) fn end_huge(&self, chunk: usize) -> bool {
        let was = self.notes[chunk].end_huge();
        if was {
            self.huge.fetch_sub(1, Ordering::Relaxed);
        }
        was
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    const PAGE: PageId = PageId(CHUNK_PAGES as u64 + 3);

    fn chunks(huge_words: bool) -> PoolChunks {
        PoolChunks::new(1000 * CHUNK_PAGES, KERNEL_PAGE, huge_words).expect("mapped")
    }

    /// Enters the chunk of a page and leaves it; returns the bytes that were charged.
    fn charge(chunks: &PoolChunks, page: PageId) -> u64 {
        let charged = Cell::new(0);
        let take = |bytes: ByteCount| {
            charged.set(charged.get() + bytes.0);
            Ok::<(), ()>(())
        };
        let give = |bytes: ByteCount| charged.set(charged.get() - bytes.0);
        drop(chunks.enter(page, take, give, |_, _| ()).expect("charged"));
        charged.get()
    }

    fn freezable(chunks: &PoolChunks, chunk: usize) -> bool {
        charge(chunks, PageId((chunk * CHUNK_PAGES) as u64));
        chunks.try_freeze(chunk)
    }

    #[test]
    fn a_charge_that_fails_leaves_nothing_charged_and_is_tried_again() {
        for huge_words in [false, true] {
            let chunks = chunks(huge_words);
            let refused = chunks.enter(PAGE, |_| Err(7), |_| (), |_, _| ());
            assert_eq!(refused.map(drop), Err(7));
            assert!(!chunks.is_charged(PAGE) && chunks.metadata() == ByteCount::ZERO);
            let words = if huge_words { HUGE_PAGE } else { KERNEL_PAGE };
            let all = words + 2 * KERNEL_PAGE + KEPT_OF_GROUP + 512;
            assert_eq!(charge(&chunks, PAGE), all as u64);
            assert_eq!(charge(&chunks, PageId(PAGE.0 + 1)), 0, "charged before");
            assert_eq!(chunks.metadata(), ByteCount(all as u64));
        }
    }

    #[test]
    fn a_huge_page_of_words_is_charged_once_for_all_its_chunks() {
        let chunks = chunks(true);
        let last = PageId((HUGE_WORDS_CHUNKS * CHUNK_PAGES - 1) as u64);
        let groups = [PAGE, last].map(|page| charge(&chunks, page) as usize - KERNEL_PAGE);
        let of_group = KERNEL_PAGE + KEPT_OF_GROUP + 512;
        assert_eq!(groups, [HUGE_PAGE + of_group, of_group]);
    }

    #[test]
    fn what_is_given_back_is_charged_again_and_words_begin_behind_the_versions_they_had() {
        let chunks = chunks(false);
        let other = PageId(2 * CHUNK_PAGES as u64);
        let all = charge(&chunks, PAGE);
        let second = charge(&chunks, other);
        let tables = if chunks.frees_tables { KERNEL_PAGE as u64 } else { 0 };
        let chunk_bytes = KERNEL_PAGE as u64 + tables;
        let none = chunks.give_back(1, |_| None, |_| panic!("another chunk of the group is used"));
        assert_eq!((none, chunks.is_charged(PAGE)), (ByteCount::ZERO, true), "a word is in use");
        let given = chunks.give_back(1, |first| Some(first + 9), |_| panic!("as above"));
        assert_eq!((given.0, chunks.is_charged(PAGE)), (chunk_bytes, false));
        let given = chunks.give_back(2, |first| Some(first + 1), |pages| pages == (0..64 * 512));
        assert_eq!(given.0, chunk_bytes + KERNEL_PAGE as u64);
        assert_eq!(chunks.metadata().0, all + second - given.0 - chunk_bytes);
        let begun = Cell::new((0..0, 0));
        let begin = |pages: Range<usize>, version| begun.set((pages, version));
        drop(chunks.enter(PAGE, |_| Ok::<(), ()>(()), |_| (), begin).expect("charged"));
        assert_eq!(begun.take(), (512..1024, 9));
    }

    #[test]
    fn a_chunk_is_frozen_by_one_thread_and_only_with_words() {
        let chunks = chunks(false);
        assert!(!chunks.try_freeze(1), "without words");
        assert!(freezable(&chunks, 1) && !chunks.try_freeze(1) && freezable(&chunks, 2));
        chunks.unfreeze(1);
        assert!(freezable(&chunks, 1));
    }

    #[test]
    fn huge_chunks_are_counted_until_they_are_split() {
        let chunks = chunks(false);
        chunks.set_huge(1);
        assert!(chunks.is_huge(PAGE) && !chunks.is_plain(1) && chunks.is_plain(0));
        assert_eq!(chunks.huge_bytes(), ByteCount(HUGE_PAGE as u64));
        assert!(chunks.end_huge(1) && !chunks.end_huge(1) && !chunks.is_huge(PAGE));
        assert_eq!(chunks.huge_bytes(), ByteCount::ZERO);
    }
}
