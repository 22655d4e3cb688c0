//! The page table: the region's mapping, its geometry, and a word for each page.
//!
//! Every thread that changes a word does so as [`protocol`](crate::paging::page::protocol) says.

#![expect(unsafe_code, reason = "passes the promise of who drops words on")]

use crate::base::error::Result;
use crate::base::strict_assert;
use crate::base::sync::{AtomicU64, Ordering};
use crate::base::units::{PageCount, PageId};
use crate::meta::LazyArray;
use crate::paging::page::chunks::{CHUNK, ChunkId};
use crate::paging::page::word::{PageWord, State, Word};
use crate::paging::page::{CHUNK_PAGES, PAGE};
use crate::sys::signals;
use crate::sys::vm::{HUGE_PAGE, Huge, Mapping, Piece};
use std::ops::Range;

/// Pages of a *cluster*, as a power of two: aligned neighbours, 16 KiB, that streams count by, and that come in together
/// where they have left together.
pub(in crate::paging) const CLUSTER_SHIFT: u32 = 2;

/// Pages of a cluster.
pub(in crate::paging) const CLUSTER_PAGES: usize = 1 << CLUSTER_SHIFT;

/// Addresses and words of one region's pages.
#[derive(Debug)]
pub(in crate::paging) struct PageTable {
    region: Mapping,
    words: LazyArray<PageWord>,
    /// Pages with at least one pin. Changed only together with a page word that it counts.
    pinned: AtomicU64,
}

impl PageTable {
    /// Reserves `span` bytes.
    ///
    /// # Errors
    /// When the address space cannot be reserved.
    pub(super) fn new(span: usize) -> Result<PageTable> {
        let region = Mapping::reserve_closed(span, HUGE_PAGE, Huge::Yes)?;
        region.keep_place_in_children();
        Ok(PageTable { region, words: LazyArray::new(span / PAGE)?, pinned: AtomicU64::new(0) })
    }

    // The region's mapping.

    /// First address.
    pub(in crate::paging) fn start(&self) -> usize {
        self.region.addr()
    }

    /// Bytes of address space.
    pub(in crate::paging) fn len(&self) -> usize {
        self.region.len()
    }

    pub(in crate::paging) fn contains(&self, addr: usize) -> bool {
        addr.wrapping_sub(self.start()) < self.len()
    }

    /// Makes a range of addresses, from the region's first one, such that it can be touched.
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os) when the kernel refuses.
    pub(in crate::paging) fn open(&self, range: Range<usize>) -> Result<()> {
        self.region.open(range.start, range.len())
    }

    /// True if this process made the region, and not the one that it was forked from.
    pub(in crate::paging) fn is_here(&self) -> bool {
        self.region.is_here()
    }

    /// Lets children that are forked from now on have the region's memory, or not.
    pub(in crate::paging) fn set_inherited(&self, inherited: bool) -> Result<()> {
        self.region.set_inherited(inherited)
    }

    /// Makes words readable in all children.
    pub(in crate::paging) fn inherit_words(&self) -> Result<()> {
        self.words.set_inherited(true)
    }

    /// Binds pages to a NUMA node.
    pub(super) fn bind(&self, node: u32) -> Result<()> {
        self.region.bind(node)
    }

    /// True if a part of a range of the region is locked (`mlock`).
    pub(in crate::paging) fn is_locked(&self, addr: usize, len: usize) -> bool {
        self.region.is_locked(addr - self.start(), len)
    }

    /// Ends all memory locks of the region.
    pub(in crate::paging) fn unlock(&self) {
        self.region.unlock();
    }

    /// Adds a page to a list of ranges, growing the last one when the page follows it.
    pub(in crate::paging) fn push_piece(
        &self,
        pieces: &mut [Piece],
        count: &mut usize,
        page: PageId,
    ) {
        let start = self.addr(page);
        if let Some(last) = count.checked_sub(1).map(|last| &mut pieces[last])
            && last.start() + last.len() == start
        {
            last.grow(PAGE);
            return;
        }
        pieces[*count] = Piece::new(start, PAGE);
        *count += 1;
    }

    /// Makes a touch of a page SIGBUS, on kernels that cannot poison.
    pub(in crate::paging) fn fence(&self, page: PageId) -> Result<()> {
        self.region.fence(self.offset(page))
    }

    /// Maps memory without content where a page is; `register` makes it the handlers' before anybody
    /// can touch it.
    pub(in crate::paging) fn map_anew(
        &self,
        page: PageId,
        register: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        self.region.map_anew(self.offset(page), register)
    }

    // Geometry.

    pub(in crate::paging) fn page_count(&self) -> PageCount {
        PageCount(self.words.len() as u64)
    }

    pub(in crate::paging) fn addr(&self, page: PageId) -> usize {
        self.region.addr() + self.offset(page)
    }

    /// The page an address of the region lies in.
    pub(in crate::paging) fn page_at(&self, addr: usize) -> PageId {
        PageId(((addr - self.region.addr()) / PAGE) as u64)
    }

    fn offset(&self, page: PageId) -> usize {
        page.as_usize() * PAGE
    }

    /// The chunk a page lies in.
    pub(in crate::paging) fn chunk_of(&self, page: PageId) -> ChunkId {
        ChunkId(page.as_usize() / CHUNK_PAGES)
    }

    pub(in crate::paging) fn chunk_addr(&self, chunk: ChunkId) -> usize {
        self.region.addr() + chunk.0 * CHUNK
    }

    pub(in crate::paging) fn pages_of_chunk(
        &self,
        chunk: ChunkId,
    ) -> impl Iterator<Item = PageId> + use<> {
        let first = chunk.0 * CHUNK_PAGES;
        (first as u64..(first + CHUNK_PAGES) as u64).map(PageId)
    }

    /// The pages of a page's cluster.
    pub(in crate::paging) fn pages_of_cluster(&self, page: PageId) -> Range<u64> {
        let cluster = page.0 >> CLUSTER_SHIFT;
        cluster << CLUSTER_SHIFT..(cluster + 1) << CLUSTER_SHIFT
    }

    // Words.

    pub(in crate::paging) fn word(&self, page: PageId) -> &PageWord {
        &self.words[page.as_usize()]
    }

    /// True if there is a page of this number, and it is resident.
    pub(in crate::paging) fn is_resident(&self, page: u64) -> bool {
        self.words.get(page as usize).is_some_and(|word| word.load().state() == State::Resident)
    }

    /// True if there is a page of this number, and it is in use: mapped, on its way, or stored.
    pub(in crate::paging) fn holds_something(&self, page: u64) -> bool {
        self.words.get(page as usize).is_some_and(|word| word.load().state() != State::Empty)
    }

    /// Ends this thread's `Moving`, during which no signal handler may have run on it: one that
    /// touched this page, or waited for a thread that waits for it, would wait for ever.
    pub(in crate::paging) fn publish(&self, page: PageId, from: Word, to: Word) {
        strict_assert!(signals::are_blocked(), "{page} was moved with signals let in");
        if let Err(now) = self.word(page).try_change(from, to) {
            panic!("{page} changed from {from:?} to {now:?} while being moved");
        }
    }

    /// Gives the memory of words back that are all `Empty`.
    ///
    /// # Safety
    /// Nobody changes one of the words meanwhile.
    pub(in crate::paging) unsafe fn drop_words(&self, pages: Range<usize>) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.words.give_back_shared(pages) }
    }

    // Pins.

    /// Pages with at least one pin.
    pub(in crate::paging) fn pinned(&self) -> u64 {
        self.pinned.load(Ordering::Relaxed)
    }

    /// Counts `pages` as pinned.
    pub(in crate::paging) fn count_pinned(&self, pages: u64) {
        self.pinned.fetch_add(pages, Ordering::Relaxed);
    }

    /// Takes that back.
    pub(in crate::paging) fn count_unpinned(&self, pages: u64) {
        self.pinned.fetch_sub(pages, Ordering::Relaxed);
    }
}
