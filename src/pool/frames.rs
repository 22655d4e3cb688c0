//! Frames: the memory of pages, and what it costs of the limit.
//!
//! Composes the parts that must agree about a page: its word and memory, its chunk, the resident set
//! and the account. What reads, writes, evicts or allocates pages goes through here.
//!
//! # Invariants
//! 1. A page is charged before it has memory and uncharged after it lost it.
//! 2. A page leaves a chunk singly only with `huge` cleared after the page was locked: the kernel would
//!    keep the memory of all 2 MiB otherwise, and the limit would not hold.
//! 3. A page becomes resident only by a thread that has entered its chunk (`chunk_note`), or from a
//!    word that keeps the chunk: unused, or behind the table's end, under the lock of the free pages.
//!    So the last page to leave a chunk finds nobody, or a thread that brings the next page in, or
//!    that gives the chunk back itself.
//! 4. Words behind the end are given back under the lock under which the table grows. A thread that saw a
//!    page in the table before looks again once it has locked the page, whose word may have begun anew.
#![expect(unsafe_code, reason = "gives back words of which no page is resident")]

use super::account::PoolAccount;
use super::backoff::Backoff;
use super::chunk::{CHUNK_PAGES, PoolChunks};
use super::chunk_note::ChunkHold;
use super::free_list::FreeList;
use super::latch::{Latch, LatchWord};
use super::page_table::{PageShape, TablePages};
use super::replacement::Replacement;
use super::resident::ResidentSet;
use crate::base::error::Result;
use crate::base::sync::{Rank, Ranked};
use crate::base::units::{ByteCount, PageId};
use crate::sys::vm::HUGE_PAGE;
use std::path::Path;
use std::time::Duration;

/// Maximum number of pages that are written, or leave, together. One page a call costs several times as
/// much; see `book/src/measurements/pool_rates.md`, eviction.
pub(super) const BATCH_MAX: usize = 256;

/// Limit from which on page words are kept in huge pages: one of them is below 1 % then.
const HUGE_WORDS_LIMIT: ByteCount = ByteCount::mib(256);

/// Words come in huge pages if all of them take at most 1/HUGE_WORDS_PART of the limit: they are never
/// given back. Page tables of pages of 4 KiB take as much again.
const HUGE_WORDS_PART: u64 = 16;

/// Time slices given up for writes to end before a huge page is split all the same. Then the kernel
/// keeps the memory of what leaves the huge page until it needs it, or all of it has left.
const SPLIT_YIELDS_MAX: u32 = 10_000;

/// Parts that all work on pages needs.
pub(super) struct PoolFrames {
    pub(super) table: TablePages,
    pub(super) chunks: PoolChunks,
    pub(super) resident: ResidentSet,
    pub(super) account: PoolAccount,
    pub(super) free: Ranked<FreeList>,
    /// How long a fix waits for a latch.
    deadline: Duration,
}

/// As long as words and page tables of all tables take less than this part of the pool's memory, they stay. To give
/// them back and to take them anew costs 5 us for each chunk of 2 MiB: where pages left for temporary memory
/// of half the limit and came back, it took 1.4 to 1.8 times as long.
const KEPT_SHARE: u64 = 64;

impl PoolFrames {
    /// Frames for pages of this shape on a store of `capacity`.
    ///
    /// # Errors
    /// When the address space cannot be reserved.
    pub(super) fn new(
        page: PageShape,
        capacity: ByteCount,
        deadline: Duration,
        policy: Box<dyn Replacement>,
        read_only: bool,
        account: PoolAccount,
        path: &Path,
    ) -> Result<PoolFrames> {
        let words = capacity.0 / page.bytes().0 * size_of::<Latch>() as u64;
        let (limit, tables) = (account.manager().limit(), account.tables());
        let few_words = words <= limit.0 / HUGE_WORDS_PART / tables;
        // The first word of a small table would cost 2 MiB, of each of many.
        let fills_huge = tables == 1 || words >= HUGE_PAGE as u64;
        let huge_words = limit >= HUGE_WORDS_LIMIT && few_words && fills_huge;
        let table = TablePages::new(page, capacity, huge_words, read_only, path)?;
        let pages = table.capacity();
        Ok(PoolFrames {
            chunks: PoolChunks::new(pages, table.page_bytes(), huge_words)?,
            resident: ResidentSet::new(pages, policy, account.clock())?,
            account,
            free: Ranked::new(Rank::Space, FreeList::default()),
            table,
            deadline,
        })
    }

    /// A wait for a latch, as long as a fix waits.
    pub(super) fn backoff(&self) -> Backoff {
        Backoff::new(self.deadline)
    }

    /// Charges the memory of a page.
    ///
    /// # Errors
    /// As for [`MemoryManager::charge`](crate::manager::MemoryManager::charge).
    pub(super) fn charge(&self) -> Result<()> {
        self.account.charge(self.table.page_size())
    }

    pub(super) fn uncharge(&self) {
        self.account.uncharge(self.table.page_size());
    }

    /// Charges the words and page tables around a page, whose word keeps them: it is behind the table's
    /// end, or free.
    ///
    /// # Errors
    /// As for [`MemoryManager::charge`](crate::manager::MemoryManager::charge).
    pub(super) fn charge_metadata(&self, page: PageId) -> Result<()> {
        self.enter(page, |bytes| self.account.charge(bytes)).map(drop)
    }

    fn enter<E>(
        &self,
        page: PageId,
        charge: impl Fn(ByteCount) -> std::result::Result<(), E>,
    ) -> std::result::Result<ChunkHold<'_>, E> {
        let uncharge = |bytes| self.account.uncharge(bytes);
        self.chunks.enter(page, charge, uncharge, |pages, version| {
            self.table.words(pages).iter().for_each(|latch| latch.begin_at(version));
        })
    }

    /// Charges a page and the metadata around it: all that must be before it is locked in order to have
    /// memory. Its word stays until the page is locked and what is returned dropped.
    ///
    /// # Errors
    /// That of `charge`; nothing is charged but metadata then.
    pub(super) fn charge_all<E>(
        &self,
        page: PageId,
        charge: impl Fn(ByteCount) -> std::result::Result<(), E>,
    ) -> std::result::Result<ChunkHold<'_>, E> {
        charge(self.table.page_size())?;
        self.enter(page, &charge).inspect_err(|_| {
            self.uncharge();
            self.give_back_around(page);
        })
    }

    /// Gives back what the chunk of a page costs, if it is whole, if no page of it is resident or free, and
    /// if all chunks together cost enough. Returns how many bytes that were.
    pub(super) fn give_back_around(&self, page: PageId) -> u64 {
        let share = KEPT_SHARE * self.account.tables();
        let kept = ByteCount(self.account.account().ceiling().0 / share);
        if self.chunks.metadata() <= kept {
            return 0;
        }
        let chunk = page.as_usize() / CHUNK_PAGES;
        let pages = chunk * CHUNK_PAGES..(chunk + 1) * CHUNK_PAGES;
        // Pages are allocated behind the end, in words that are charged, and that nobody enters.
        let is_inside = pages.end as u64 <= self.table.end();
        if !is_inside || !self.resident.is_empty(pages.start / 64..pages.end / 64) {
            return 0;
        }
        self.give_back(chunk, false)
    }

    /// Gives back what the chunks behind the table's end cost, up to `end`, where it was before. The
    /// caller holds the lock of the free pages, so that the table does not grow meanwhile. However little
    /// it is: what the table lost has been given back on the device too, which took longer.
    pub(super) fn give_back_behind(&self, end: u64, _free: &FreeList) {
        let first = (self.table.end() as usize).div_ceil(CHUNK_PAGES);
        for chunk in first..(end as usize).div_ceil(CHUNK_PAGES) {
            self.give_back(chunk, true);
        }
    }

    /// Gives back what a chunk costs, if no page of it is resident, nor free, unless all are `unused`. Returns how many bytes that were.
    fn give_back(&self, chunk: usize, unused: bool) -> u64 {
        let pages = chunk * CHUNK_PAGES..self.table.capacity().min((chunk + 1) * CHUNK_PAGES);
        let drop_words = |first_version| {
            let latches = self.table.words(pages.clone());
            let words = || latches.iter().map(Latch::load);
            let next = LatchWord::version_after(first_version, words());
            let is_droppable =
                words().all(|word| word.is_droppable() || unused && word.is_unused());
            // SAFETY: all pages are absent, and nobody locks one: the chunk is frozen, and not charged.
            // Of pages behind the end that were free, the words need not say so.
            (is_droppable && unsafe { self.table.drop_tables(pages.clone()) }).then_some(next)
        };
        // SAFETY: a thread enters the chunk of a page before it brings that in, and no chunk is charged
        // while this runs.
        let drop_bits = |pages| unsafe { self.resident.drop_bits(pages) };
        let bytes = self.chunks.give_back(chunk, drop_words, drop_bits);
        self.account.uncharge(bytes);
        bytes.0
    }

    /// Ends what a chunk was frozen for.
    pub(super) fn unfreeze(&self, chunk: usize) {
        self.chunks.unfreeze(chunk);
        // What another thread evicted meanwhile, it could not give back.
        self.give_back_around(PageId((chunk * CHUNK_PAGES) as u64));
    }

    /// Adds a locked page, whose memory is charged, to the resident set.
    pub(super) fn arrive(&self, page: PageId) {
        self.resident.insert(page, self.table.page_bytes());
    }

    /// Removes a locked page from the resident set; its memory is still there.
    pub(super) fn leave(&self, page: PageId) {
        self.resident.remove(page, self.table.page_bytes());
    }

    /// Pages that fit into the pool at most.
    pub(super) fn pool_pages(&self) -> u64 {
        self.table.pages_in(self.account.account().ceiling())
    }

    /// The replacement clock.
    pub(super) fn stamp(&self) -> u64 {
        self.resident.stamp(self.pool_pages())
    }

    /// Locks a free page that leaves singly; not one that lies in a huge page again.
    pub(super) fn lock_victim(&self, page: PageId, seen: LatchWord) -> bool {
        let latch = self.table.word(page);
        let is_locked = latch.try_lock_victim(seen);
        if is_locked && self.chunks.is_huge(page) {
            latch.unlock(false);
            return false;
        }
        is_locked
    }

    /// Splits the huge page that a resident page lies in, if it does, so that it can leave. `false`
    /// while a page of it is written: the kernel splits none that a device holds.
    pub(super) fn split_around(&self, page: PageId) -> bool {
        if !self.chunks.is_huge(page) {
            return true;
        }
        let chunk = page.as_usize() / CHUNK_PAGES;
        let latches = self.table.words(chunk * CHUNK_PAGES..(chunk + 1) * CHUNK_PAGES);
        if latches.iter().any(|latch| latch.load().writing()) {
            return false;
        }
        self.split(page);
        true
    }

    /// As [`split_around`](Self::split_around), for a page that leaves in any case: waits a little
    /// for writes to end.
    pub(super) fn split_for(&self, page: PageId) {
        for _ in 0..SPLIT_YIELDS_MAX {
            if self.split_around(page) {
                return;
            }
            std::thread::yield_now();
        }
        self.split(page);
    }

    fn split(&self, page: PageId) {
        if self.chunks.end_huge(page.as_usize() / CHUNK_PAGES) {
            let split = self.table.mapping().split(self.table.offset(page) as usize);
            assert!(split.is_ok(), "splitting the huge page around {page}: {split:?}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::manager::MemoryManager;
    use crate::pool::PoolConfig;
    use crate::sys::kernel::frees_page_tables;
    use crate::sys::pagemap::Pagemap;
    use crate::sys::vm::KERNEL_PAGE;
    use std::sync::Arc;

    /// GiB of table that are scanned; `FARHEAP_TEST_SCAN_GIB` sets more. 1,024 took 17 s of processor time.
    const SCANNED_GIB: u64 = 64;

    /// Bytes of page words in RAM, by the kernel's page map: by `smaps`, words that lie beside another
    /// mapping may be counted with it.
    fn resident_words(table: &TablePages) -> u64 {
        let words = table.words(0..table.capacity());
        let mut there = vec![false; size_of_val(words) / KERNEL_PAGE];
        let pagemap = Pagemap::open().expect("a descriptor").expect("/proc");
        pagemap.scan(words.as_ptr().addr(), &mut there).expect("readable");
        (there.into_iter().filter(|there| *there).count() * KERNEL_PAGE) as u64
    }

    fn page_tables() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").expect("proc");
        let line = status.lines().find_map(|line| line.strip_prefix("VmPTE:"));
        let kib = line.expect("the line is there").trim().trim_end_matches(" kB");
        kib.parse::<u64>().expect("a number") << 10
    }

    /// Reads a page of each chunk, in a table of zeros.
    fn scan(frames: &PoolFrames, pool: &crate::pool::BufferPool) {
        for chunk in 1..frames.table.capacity() / CHUNK_PAGES {
            let page = chunk * CHUNK_PAGES + chunk * 7919 % CHUNK_PAGES;
            let guard = pool.fix_shared(PageId(page as u64)).expect("page");
            assert!(guard.iter().all(|byte| *byte == 0), "{page}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "reads a file of many gigabytes")]
    fn a_scan_of_a_table_of_any_size_leaves_the_pool_as_it_was() {
        let gib = std::env::var("FARHEAP_TEST_SCAN_GIB").ok().and_then(|gib| gib.parse().ok());
        let bytes = ByteCount(gib.unwrap_or(SCANNED_GIB) << 30);
        let manager = MemoryManager::start(ByteCount::mib(128)).expect("manager");
        let dir = tempfile::tempdir().expect("directory");
        let config = PoolConfig::new().checksum(false).cleaner(false).huge_frames(false);
        let pool = config.create(dir.path().join("table"), bytes, &manager).expect("pool");
        let frames = &pool.frames;
        for number in 2..CHUNK_PAGES as u64 {
            pool.allocate().expect("page").fill(number as u8);
        }
        pool.flush().expect("flush");
        let metadata = pool.stats().metadata_bytes;
        // The rest of the file was never written: without sums its pages are zeros.
        frames.table.set_end(frames.table.capacity() as u64);
        let tables = page_tables();
        for _ in 0..2 {
            scan(frames, &pool);
            assert!(manager.stats().used_bytes_max <= manager.limit(), "{:?}", manager.stats());
        }
        let added = page_tables().saturating_sub(tables);
        // Of all that were scanned they would be 2 MiB a GiB. Other tests run beside this one.
        let most = pool.stats().metadata_bytes.0 + (32 << 20);
        assert!(!frees_page_tables() || added <= most, "{added} bytes of page tables");
        // What is resident at once is as before: nearly all of the limit.
        for page in 0..ByteCount::mib(128).0 / 4096 {
            let guard = pool.fix_shared(PageId((1 << 20) + page)).expect("page");
            assert_eq!(guard[0], 0);
        }
        let stats = pool.stats();
        // What stays charged of a TiB is 12 MiB, and the share that is not given back, which the
        // pages do not get.
        let kept_max = (bytes.0 >> 30) * (12 << 10) + manager.limit().0 / KEPT_SHARE;
        assert!(stats.resident_bytes.0 >= (116 << 20) - kept_max, "{stats:?}");
        pool.evict_all().expect("evicted");
        let kept = pool.stats().metadata_bytes.0 - metadata.0;
        assert!(!frees_page_tables() || kept <= kept_max, "{kept} bytes stay");
        let words = resident_words(&frames.table);
        assert!(words <= 1 << 20, "{words} bytes of words");
        for number in 2..CHUNK_PAGES as u64 {
            let guard = pool.fix_shared(PageId(number)).expect("page");
            assert!(guard.iter().all(|byte| *byte == number as u8), "{number}");
        }
        assert!(manager.stats().used_bytes_max <= manager.limit(), "{:?}", manager.stats());
    }

    #[test]
    #[cfg_attr(miri, ignore = "opens a file")]
    fn free_pages_keep_their_words() {
        let manager = MemoryManager::start(ByteCount::mib(8)).expect("manager");
        let store = Arc::new(crate::store::MemStore::new(ByteCount::mib(48)).expect("store"));
        let config = PoolConfig::new().cleaner(false).huge_frames(false);
        let pool = config.create_on(store, &manager).expect("pool");
        let pages: Vec<PageId> =
            (0..20 * CHUNK_PAGES).map(|_| pool.allocate().expect("page").id()).collect();
        let freed = pages[CHUNK_PAGES + 7];
        pool.fix_exclusive(freed).expect("page").free();
        pool.evict_all().expect("evicted");
        let charged = |page: PageId| pool.frames.chunks.is_charged(page);
        assert!(charged(freed));
        let mut others = (2..20).map(|chunk| pages[chunk * CHUNK_PAGES + 7]);
        assert!(others.any(|page| !charged(page)), "all of its pages are in use");
        assert!(pool.fix_shared(freed).is_err(), "free as before");
        assert_eq!(pool.allocate().expect("page").id(), freed);
    }
}
