//! Chunks: what is noted of 512 neighbouring pages, whose words share one kernel page.
//!
//! ```text
//! bit 4 huge | 3 frozen | 2 multi-page | 1 huge page of words charged | 0 charged
//! ```
//! `charged`: the chunk's words and page tables are within the limit. `multi-page`: a buffer of several
//! pages reaches into the chunk, so that its words do not say which of its memory is in use. `frozen`:
//! one thread changes the memory of the chunk as a whole: it moves it away, drops it together with
//! absent neighbours, or collapses it. `huge`: all its memory lies in one huge page.
//!
//! # Invariants
//! 1. A chunk is never `multi-page` and frozen by a thread that froze it later.
//! 2. `huge` is set while all pages of the chunk are held still, after the kernel collapsed it, and all
//!    its pages are resident as long as it is set.

use crate::base::error::Result;
use crate::base::sync::{AtomicU64, Ordering};
use crate::base::units::{ByteCount, PageId};
use crate::meta::LazyArray;
use crate::sys::vm::{HUGE_PAGE, KERNEL_PAGE};

/// Pages of a chunk.
pub(super) const CHUNK_PAGES: usize = KERNEL_PAGE / 8;

/// Chunks whose words share one huge page.
const HUGE_WORDS_CHUNKS: usize = HUGE_PAGE / KERNEL_PAGE;

const CHARGED: u64 = 1;
/// In the first chunk of a huge page of words.
const HUGE_WORDS_CHARGED: u64 = 2;
const MULTI_PAGE: u64 = 4;
const FROZEN: u64 = 8;
const HUGE: u64 = 16;

/// The chunks of a pool.
pub(super) struct Chunks {
    notes: LazyArray<AtomicU64>,
    /// Bytes of page tables for each chunk: one table for each 2 MiB of pages.
    table_bytes: usize,
    /// Words come in huge pages: the first touch of one costs that much of the limit.
    huge_words: bool,
    /// Bytes charged for words and page tables.
    metadata: AtomicU64,
    /// How many chunks are `huge`. Nothing is decided by it.
    huge: AtomicU64,
}

impl Chunks {
    /// The chunks of `pages` pages of `page_bytes`.
    pub(super) fn new(pages: usize, page_bytes: usize, huge_words: bool) -> Result<Chunks> {
        Ok(Chunks {
            notes: LazyArray::new(pages.div_ceil(CHUNK_PAGES))?,
            table_bytes: (CHUNK_PAGES * page_bytes).div_ceil(512 * KERNEL_PAGE) * KERNEL_PAGE,
            huge_words,
            metadata: AtomicU64::new(0),
            huge: AtomicU64::new(0),
        })
    }

    /// Bytes of words and page tables that are charged.
    pub(super) fn metadata(&self) -> ByteCount {
        ByteCount(self.metadata.load(Ordering::Relaxed))
    }

    /// Bytes of pages in huge pages.
    pub(super) fn huge_bytes(&self) -> ByteCount {
        ByteCount(self.huge.load(Ordering::Relaxed) * HUGE_PAGE as u64)
    }

    fn of(&self, page: PageId) -> &AtomicU64 {
        &self.notes[page.as_usize() / CHUNK_PAGES]
    }

    /// Whether the metadata around a page is charged.
    pub(super) fn is_charged(&self, page: PageId) -> bool {
        self.of(page).load(Ordering::Relaxed) & CHARGED != 0
    }

    /// Charges the words, bitmap and page tables around a page at its first touch, by `charge`.
    ///
    /// # Errors
    /// That of `charge`; nothing is noted then.
    pub(super) fn charge<E>(
        &self,
        page: PageId,
        charge: impl FnOnce(ByteCount) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let chunk = self.of(page);
        if self.is_charged(page) || chunk.fetch_or(CHARGED, Ordering::Relaxed) & CHARGED != 0 {
            return Ok(());
        }
        let words = if self.huge_words { self.huge_words_due(page) } else { KERNEL_PAGE };
        let bytes = ByteCount((words + self.table_bytes) as u64);
        if let Err(error) = charge(bytes) {
            chunk.fetch_and(!CHARGED, Ordering::Relaxed);
            if words == HUGE_PAGE {
                self.first_of_huge(page).fetch_and(!HUGE_WORDS_CHARGED, Ordering::Relaxed);
            }
            return Err(error);
        }
        self.metadata.fetch_add(bytes.0, Ordering::Relaxed);
        Ok(())
    }

    /// Bytes to charge for the huge page of words around `page`: all of it the first time.
    fn huge_words_due(&self, page: PageId) -> usize {
        let before = self.first_of_huge(page).fetch_or(HUGE_WORDS_CHARGED, Ordering::Relaxed);
        if before & HUGE_WORDS_CHARGED == 0 { HUGE_PAGE } else { 0 }
    }

    /// The chunk with which the huge page of words around `page` begins.
    fn first_of_huge(&self, page: PageId) -> &AtomicU64 {
        let chunk = page.as_usize() / CHUNK_PAGES;
        &self.notes[chunk / HUGE_WORDS_CHUNKS * HUGE_WORDS_CHUNKS]
    }

    /// Keeps the chunks into which a buffer of several pages is about to reach from being frozen.
    pub(super) fn note_multi_page(&self, page: PageId, order: u8) {
        if order == 0 {
            return;
        }
        let (first, last) = (page.as_usize(), page.as_usize() + (1 << order) - 1);
        for note in &self.notes[first / CHUNK_PAGES..=last / CHUNK_PAGES] {
            // What froze the chunk before is done in microseconds.
            while note.fetch_or(MULTI_PAGE, Ordering::AcqRel) & FROZEN != 0 {
                std::thread::yield_now();
            }
        }
    }

    /// Reserves a chunk's memory for one change of all of it; `false` while another thread does so,
    /// or when a buffer of several pages reaches into it.
    pub(super) fn try_freeze(&self, chunk: usize) -> bool {
        let note = &self.notes[chunk];
        let seen = note.load(Ordering::Acquire);
        // Pairs with `note_multi_page`: the second of the two sees the other's bit.
        seen & (MULTI_PAGE | FROZEN) == 0
            && note
                .compare_exchange(seen, seen | FROZEN, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
    }

    pub(super) fn unfreeze(&self, chunk: usize) {
        self.notes[chunk].fetch_and(!FROZEN, Ordering::Release);
    }

    /// Whether a chunk is neither huge nor frozen.
    pub(super) fn is_plain(&self, chunk: usize) -> bool {
        self.notes[chunk].load(Ordering::Relaxed) & (HUGE | FROZEN) == 0
    }

    /// Whether a page's memory lies in a huge page.
    pub(super) fn is_huge(&self, page: PageId) -> bool {
        self.of(page).load(Ordering::Relaxed) & HUGE != 0
    }

    /// Notes that a chunk, whose pages the caller holds still, was collapsed.
    pub(super) fn set_huge(&self, chunk: usize) {
        // Pairs with the acquire of the thread that locks one of the pages next.
        self.notes[chunk].fetch_or(HUGE, Ordering::Release);
        self.huge.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes that a chunk's memory does not lie in a huge page any more; `false` when it did not.
    pub(super) fn end_huge(&self, chunk: usize) -> bool {
        let was = self.notes[chunk].fetch_and(!HUGE, Ordering::Relaxed) & HUGE != 0;
        if was {
            self.huge.fetch_sub(1, Ordering::Relaxed);
        }
        was
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: PageId = PageId(CHUNK_PAGES as u64 + 3);

    fn chunks(huge_words: bool) -> Chunks {
        Chunks::new(1000 * CHUNK_PAGES, KERNEL_PAGE, huge_words).expect("mapped")
    }

    #[test]
    fn a_charge_that_fails_leaves_nothing_charged_and_is_tried_again() {
        for huge_words in [false, true] {
            let chunks = chunks(huge_words);
            assert_eq!(chunks.charge(PAGE, |_| Err(7)), Err(7));
            assert!(!chunks.is_charged(PAGE) && chunks.metadata() == ByteCount::ZERO);
            let mut asked = ByteCount::ZERO;
            let mut take = |bytes| {
                asked = bytes;
                Ok::<(), ()>(())
            };
            assert_eq!(chunks.charge(PAGE, &mut take), Ok(()));
            assert_eq!(chunks.charge(PageId(PAGE.0 + 1), |_| Err(())), Ok(()), "charged before");
            assert_eq!(chunks.metadata(), asked);
            let words = if huge_words { HUGE_PAGE } else { KERNEL_PAGE };
            assert_eq!(asked, ByteCount((words + KERNEL_PAGE) as u64));
        }
    }

    #[test]
    fn a_huge_page_of_words_is_charged_once_for_all_its_chunks() {
        let chunks = chunks(true);
        let last = PageId((HUGE_WORDS_CHUNKS * CHUNK_PAGES - 1) as u64);
        for page in [PAGE, last] {
            assert_eq!(chunks.charge(page, |_| Ok::<(), ()>(())), Ok(()));
        }
        assert_eq!(chunks.metadata(), ByteCount((HUGE_PAGE + 2 * KERNEL_PAGE) as u64));
    }

    #[test]
    fn a_chunk_is_frozen_by_one_thread_and_never_with_a_buffer_of_several_pages() {
        let chunks = chunks(false);
        assert!(chunks.try_freeze(1) && !chunks.try_freeze(1) && chunks.try_freeze(2));
        chunks.unfreeze(1);
        // Two chunks that a buffer of eight pages reaches into.
        chunks.unfreeze(2);
        chunks.note_multi_page(PageId(2 * CHUNK_PAGES as u64 - 4), 3);
        assert!(!chunks.try_freeze(1) && !chunks.try_freeze(2) && chunks.try_freeze(3));
        chunks.note_multi_page(PageId(4 * CHUNK_PAGES as u64), 0);
        assert!(chunks.try_freeze(4), "a single page is said by its word");
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
