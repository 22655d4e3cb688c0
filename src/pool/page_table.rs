//! The page table: each page's latch word, and its memory at a fixed address.
//!
//! A page's address is the base of the mapping plus its number times the page size, and the place of
//! its word says its number: a guard keeps the word's address and needs no translation.
//!
//! # Invariants
//! 1. A page that is not among the first `end` becomes one of them locked, by the thread that
//!    allocates it.
#![expect(unsafe_code, reason = "drops the memory of locked pages")]

use super::backoff::Backoff;
use super::latch::{Holder, Latch};
use crate::base::error::{Error, Result};
use crate::base::strict_assert;
use crate::base::sync::{AtomicU64, Ordering};
use crate::base::units::{ByteCount, PageId};
use crate::meta::LazyArray;
use crate::sys::vm::{Discarder, HUGE_PAGE, Huge, Mapping, Piece};
use crossbeam_utils::CachePadded;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::ptr::slice_from_raw_parts_mut;

/// Bytes at the end of each page that belong to the pool.
pub(super) const TRAILER: usize = 16;

/// Format of a table's pages: their size, and whether they end in a trailer.
#[derive(Clone, Copy)]
pub(super) struct PageShape {
    bytes: ByteCount,
    trailer: usize,
}

impl PageShape {
    /// Pages of `bytes`; `whole`: all of each is the user's.
    pub(super) fn new(bytes: ByteCount, whole: bool) -> PageShape {
        PageShape { bytes, trailer: if whole { 0 } else { TRAILER } }
    }

    pub(super) fn bytes(self) -> ByteCount {
        self.bytes
    }
}

/// The first page that is not a copy of the header.
pub(super) const FIRST: PageId = PageId(2);

/// Words and memory of all pages that the table file has room for.
pub(super) struct TablePages {
    /// Names the table file in errors.
    path: PathBuf,
    page_shift: u32,
    page_bytes: usize,
    /// [`TRAILER`], or 0 where pages are the user's whole.
    trailer: usize,
    /// Bytes of pages for each byte of their words.
    pages_per_words: usize,
    /// Where the page would be whose word is at address 0: see `ptr_of`.
    origin: usize,
    words: LazyArray<Latch>,
    /// Pages that may be changed: all, or of a table that is only read, none.
    changeable: usize,
    mapping: Mapping,
    discarder: Discarder,
    /// Pages of the table, used and free. Changes under the lock of the free pages.
    end: CachePadded<AtomicU64>,
}

impl TablePages {
    /// A table of pages of this shape on a store of `capacity`; `huge_words`: the words come in
    /// huge pages; `read_only`: no page may be changed.
    pub(super) fn new(
        page: PageShape,
        capacity: ByteCount,
        huge_words: bool,
        read_only: bool,
        path: &Path,
    ) -> Result<TablePages> {
        let page_bytes = page.bytes.as_usize();
        let pages = capacity.as_usize() / page_bytes;
        let len = (pages * page_bytes).next_multiple_of(HUGE_PAGE);
        let mapping = Mapping::reserve(len, HUGE_PAGE, Huge::No)?;
        let words: LazyArray<Latch> =
            if huge_words { LazyArray::new_huge(pages) } else { LazyArray::new(pages) }?;
        let pages_per_words = page_bytes / size_of::<Latch>();
        let first_word = words.as_ptr().addr();
        Ok(TablePages {
            path: path.to_path_buf(),
            page_shift: page_bytes.trailing_zeros(),
            page_bytes,
            trailer: page.trailer,
            pages_per_words,
            origin: mapping.addr().wrapping_sub(first_word.wrapping_mul(pages_per_words)),
            words,
            changeable: if read_only { 0 } else { pages },
            mapping,
            discarder: Discarder::new(),
            end: CachePadded::new(AtomicU64::new(FIRST.0)),
        })
    }

    /// Pages that the store has room for.
    pub(super) fn capacity(&self) -> usize {
        self.words.len()
    }

    /// Pages of the table, used and free.
    pub(super) fn end(&self) -> u64 {
        // Pairs with the release of `set_end`: the last page's word is seen locked.
        self.end.load(Ordering::Acquire)
    }

    pub(super) fn set_end(&self, end: u64) {
        self.end.store(end, Ordering::Release);
    }

    /// Words of the resident set that the table's pages take.
    pub(super) fn steps(&self) -> usize {
        (self.end() as usize).div_ceil(64)
    }

    /// True if a page is one of the table, and none of the header.
    pub(super) fn contains(&self, page: PageId) -> bool {
        page >= FIRST && page.0 < self.end()
    }

    #[inline]
    pub(super) fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    pub(super) fn page_size(&self) -> ByteCount {
        ByteCount(self.page_bytes as u64)
    }

    /// Bytes of a page that are its user's.
    #[inline]
    pub(super) fn payload_bytes(&self) -> usize {
        self.page_bytes - self.trailer
    }

    /// True if pages end in a trailer: else they have neither a checksum nor the number of a log record.
    pub(super) fn has_trailer(&self) -> bool {
        self.trailer > 0
    }

    /// Where in a page the number of the log record is, if it has one: aligned, for the page sizes and the
    /// trailer's are multiples of 8.
    pub(super) fn lsn_at(&self) -> Option<usize> {
        self.has_trailer().then(|| self.payload_bytes())
    }

    /// Whole pages in `bytes`.
    pub(super) fn pages_in(&self, bytes: ByteCount) -> u64 {
        bytes.0 >> self.page_shift
    }

    #[inline]
    pub(super) fn get(&self, page: PageId) -> Option<&Latch> {
        self.words.get(page.as_usize())
    }

    /// The same, of a page that may be changed.
    #[inline]
    pub(super) fn get_to_change(&self, page: PageId) -> Option<&Latch> {
        self.words[..self.changeable].get(page.as_usize())
    }

    /// Name of the table file in errors.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn is_read_only(&self) -> bool {
        self.changeable == 0
    }

    /// Checks that pages may be changed.
    ///
    /// # Errors
    /// [`Error::Device`] of a table that is only read.
    pub(super) fn check_changeable(&self) -> Result<()> {
        if !self.is_read_only() {
            return Ok(());
        }
        let reason = "is open to be read only: its pages cannot be changed".to_owned();
        Err(Error::Device { path: self.path.clone(), reason })
    }

    #[inline]
    pub(super) fn word(&self, page: PageId) -> &Latch {
        &self.words[page.as_usize()]
    }

    pub(super) fn words(&self, range: Range<usize>) -> &[Latch] {
        &self.words[range]
    }

    /// The page whose latch is in the array at this place.
    #[inline]
    pub(super) fn page_of(&self, latch: &Latch) -> PageId {
        let bytes = std::ptr::from_ref(latch).addr() - self.words.as_ptr().addr();
        PageId((bytes / size_of::<Latch>()) as u64)
    }

    /// The first byte of the page whose latch this is, in a multiplication and an addition.
    #[inline]
    pub(super) fn ptr_of(&self, latch: &Latch) -> *mut u8 {
        let from_origin = std::ptr::from_ref(latch).addr().wrapping_mul(self.pages_per_words);
        self.mapping.as_ptr().with_addr(self.origin.wrapping_add(from_origin))
    }

    /// A page's first byte.
    #[inline]
    pub(super) fn ptr(&self, page: PageId) -> *mut u8 {
        strict_assert!(page.as_usize() < self.words.len(), "{page} is outside");
        self.mapping.as_ptr().wrapping_add(page.as_usize() << self.page_shift)
    }

    /// The page in whose memory an address is, whether the page is in use or not; never of the header.
    pub(super) fn page_at(&self, address: usize) -> Option<PageId> {
        let page = address.checked_sub(self.mapping.addr())? >> self.page_shift;
        let is_page = page >= FIRST.as_usize() && page < self.words.len();
        is_page.then_some(PageId(page as u64))
    }

    /// Where a page is in the table file, which is where it is in the mapping.
    pub(super) fn offset(&self, page: PageId) -> u64 {
        page.0 << self.page_shift
    }

    /// `bytes` of memory from a page on, for the device.
    pub(super) fn segment(&self, page: PageId, bytes: usize) -> *mut [u8] {
        slice_from_raw_parts_mut(self.ptr(page), bytes)
    }

    pub(super) fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// Drops the memory of a page.
    pub(super) fn discard(&self, page: PageId) {
        let pieces = [Piece::new(self.ptr(page).addr(), self.page_bytes)];
        // SAFETY: callers hold the page locked and need its contents no more.
        unsafe { self.discard_all(&pieces) };
    }

    /// Drops the memory of several ranges in one call.
    ///
    /// # Safety
    /// Nobody needs the contents of the ranges, and nobody touches them meanwhile.
    pub(super) unsafe fn discard_all(&self, pieces: &[Piece]) {
        // SAFETY: the caller's promise.
        let dropped = unsafe { self.discarder.discard(pieces) };
        assert!(dropped.is_ok(), "dropping {} ranges: {dropped:?}", pieces.len());
    }

    /// Gives back the words of a chunk of pages, and the kernel's page tables of their memory, if the
    /// kernel frees any. `false` when it refuses; then all is as it was.
    ///
    /// # Safety
    /// The pages are absent, and nobody locks one of them meanwhile.
    pub(super) unsafe fn drop_tables(&self, pages: Range<usize>) -> bool {
        let first = PageId(pages.start as u64);
        let memory = [Piece::new(self.ptr(first).addr(), pages.len() << self.page_shift)];
        // SAFETY: zero is what an absent word may always be, and nobody changes one.
        let is_dropped = unsafe { self.words.give_back_shared(pages) }.is_ok();
        if is_dropped {
            // SAFETY: absent pages have no contents.
            unsafe { self.discard_all(&memory) };
        }
        is_dropped
    }

    pub(super) fn no_such_page(&self, page: PageId) -> Error {
        Error::NoSuchPage { page, table: self.path.clone(), pages: self.end() }
    }

    /// The error of a table that the store has no room for more pages of.
    pub(super) fn full(&self) -> Error {
        let pages = self.capacity() as u64;
        Error::StoreFull { store: self.path.display().to_string().into(), pages }
    }

    /// The error of a wait for a page's latch that took too long.
    pub(super) fn timeout(&self, page: PageId, backoff: &Backoff) -> Error {
        let holder = match self.word(page).load().holder() {
            Holder::Shared(1) => "1 reader".to_owned(),
            Holder::Shared(n) => format!("{n} readers"),
            Holder::Locked => "a writer or a load".to_owned(),
            Holder::Absent | Holder::Free => "nobody any more".to_owned(),
        };
        self.timed_out(page, holder, backoff)
    }

    /// The same, with a holder that the page's word does not tell of.
    pub(super) fn timed_out(&self, page: PageId, holder: String, backoff: &Backoff) -> Error {
        let (table, waited) = (self.path.clone(), backoff.waited());
        Error::LatchTimeout { page, table, holder, waited }
    }
}
