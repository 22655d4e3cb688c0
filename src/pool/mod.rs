//! The buffer pool: pages of a table file at fixed addresses.
//!
//! A page's address is the pool's base plus its number times the page size, so that a hit is one
//! look at the page's word and no translation (the idea of vmcache). [`BufferPool::fix_shared`]
//! and its kin return guards; what is not resident is read from the table file, and the memory
//! manager makes room. [`BTree`] is an index on a pool. Layer 5, sibling of `paging`: uses
//! `store`, `meta`, `limit`.
//!
//! Every page ends in a trailer of [`TRAILER`] bytes that belongs to the pool: the number of the
//! log record that changed the page last, and a checksum.
//!
//! # Invariants
//! 1. A page's memory is changed, read in or dropped only by who holds its latch `Locked`, and
//!    written to the file only under the latch; see `latch`.
//! 2. A page's bit in `resident` is set from before its word leaves `Locked` after a load until
//!    after it is locked for eviction.
//! 3. A page is charged before it has memory and uncharged after it lost it.
//! 4. The pool does no I/O for a page that is resident and clean.
//! 5. A page that is not in the table's first `end` becomes one of them locked, by who allocates it.

mod batch;
mod btree;
mod cleaner;
mod coalescing;
mod donate;
mod evict;
mod fix;
mod free_list;
mod guard;
mod header;
mod huge;
mod io;
mod latch;
mod multi_page;
mod replacement;
mod write_result;

pub use btree::{BTree, ENTRY_MAX_DIVISOR, Scan};
pub use guard::{ExclusiveGuard, OptimisticGuard, SharedGuard};
pub use replacement::{Arrival, Clock, Proven, Replacement, Worth};

use crate::base::error::{Error, Result};
use crate::base::local::keep_local;
use crate::base::sync::{AtomicBool, AtomicU64, Ordering, Rank, Ranked};
use crate::base::units::{ByteCount, PageCount, PageId};
use crate::limit::admission::Turn;
use crate::limit::manager::{Account, Effort, HandOver, MemoryManager, Reclaim};
use crate::meta::LazyArray;
use crate::store::{BlockStore, Queue, Store};
use crate::sys::vm::{Discarder, HUGE_PAGE, Huge, KERNEL_PAGE, Mapping};
use crossbeam_utils::CachePadded;
use latch::{Holder, Latch};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

/// Bytes at the end of each page (or of each buffer of several pages) that belong to the pool.
pub const TRAILER: usize = 16;

/// Pages whose words share one kernel page, charged together.
const CHUNK_PAGES: usize = KERNEL_PAGE / 8;

/// Limit from which on page words are kept in huge pages: one of them is below 1 % then.
const HUGE_WORDS_LIMIT: ByteCount = ByteCount::mib(256);

/// What a pool keeps for itself however large it is, charged when it starts: the list of pages to
/// be prefetched (64 KiB), its worker's stack, the manager's thread, upper page tables. Measured:
/// `docs/design/memory.md`.
const FIXED: ByteCount = ByteCount::kib(384);

/// Bytes of a device queue, charged when one is opened: a thread that reads or writes a group of
/// pages uses one.
const QUEUE: ByteCount = ByteCount::kib(96);

/// Asked before a page is written back: the write-ahead log must hold record `lsn` first.
pub type BeforeWrite = dyn Fn(PageId, u64) -> Result<()> + Send + Sync;

/// How a pool is set up.
///
/// # Examples
/// ```
/// use farheap::ByteCount;
/// use farheap::pool::PoolConfig;
/// use farheap::store::MemStore;
/// use farheap::limit::manager::{MemoryManager, Mode};
/// use std::sync::Arc;
///
/// let manager = MemoryManager::start(ByteCount::mib(16), Mode::Cooperative)?;
/// let store = Arc::new(MemStore::new(ByteCount::mib(64))?);
/// let pool = PoolConfig::new().create_on(store, &manager)?;
/// let mut page = pool.allocate()?;
/// page[0] = 42;
/// let id = page.id();
/// drop(page);
/// assert_eq!(pool.fix_shared(id)?[0], 42);
/// # Ok::<(), farheap::Error>(())
/// ```
#[must_use]
pub struct PoolConfig {
    page: ByteCount,
    checksum: bool,
    cleaner: bool,
    huge_frames: bool,
    deadline: Duration,
    replacement: Box<dyn Replacement>,
    before_write: Option<Box<BeforeWrite>>,
    batch: usize,
    overwrite: bool,
}

impl Default for PoolConfig {
    fn default() -> Self {
        PoolConfig::new()
    }
}

impl fmt::Debug for PoolConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolConfig").field("page", &self.page).finish_non_exhaustive()
    }
}

impl PoolConfig {
    /// The defaults: 4 KiB pages, checksums, a background cleaner, [`Proven`].
    pub fn new() -> PoolConfig {
        PoolConfig {
            page: ByteCount::kib(4),
            checksum: true,
            cleaner: true,
            huge_frames: true,
            deadline: Duration::from_secs(30),
            replacement: Box::new(Proven),
            before_write: None,
            batch: evict::BATCH_MAX,
            overwrite: false,
        }
    }

    /// Page size, 4 KiB to 64 KiB, a power of two; 4 KiB unless set. Fixed when a file is created.
    pub fn page_size(mut self, page: ByteCount) -> PoolConfig {
        self.page = page;
        self
    }

    /// Whether pages carry checksums that are compared when they are read; on unless set.
    pub fn checksum(mut self, on: bool) -> PoolConfig {
        self.checksum = on;
        self
    }

    /// Whether a background thread writes dirty pages ahead of eviction; on unless set.
    pub fn cleaner(mut self, on: bool) -> PoolConfig {
        self.cleaner = on;
        self
    }

    /// Whether the background thread puts runs of 2 MiB into huge pages while nothing leaves the
    /// pool; on unless set. Only pages of 4 KiB are, and only where the kernel can (6.1). It costs
    /// 0.6 ms of processor time a run, during which its pages cannot be changed; the first page to
    /// leave the run costs 0.2 to 0.4 ms more.
    pub fn huge_frames(mut self, on: bool) -> PoolConfig {
        self.huge_frames = on;
        self
    }

    /// How long a fix waits for a latch; 30 seconds unless set. Time in which the process is stopped
    /// does not count.
    pub fn deadline(mut self, deadline: Duration) -> PoolConfig {
        self.deadline = deadline;
        self
    }

    /// Which pages leave first; [`Proven`] unless set.
    pub fn replacement(mut self, policy: impl Replacement + 'static) -> PoolConfig {
        self.replacement = Box::new(policy);
        self
    }

    /// Calls `hook` before a page is written back, with the number given by
    /// [`ExclusiveGuard::set_lsn`]. It makes the log durable up to that record. If it cannot, an
    /// error keeps the page in memory: eviction takes others, [`BufferPool::flush`] fails. A panic
    /// counts as an error.
    pub fn before_write(
        mut self,
        hook: impl Fn(PageId, u64) -> Result<()> + Send + Sync + 'static,
    ) -> PoolConfig {
        self.before_write = Some(Box::new(hook));
        self
    }

    /// Pages evicted at a time, 1 to 256; 256 unless set. For measurements.
    pub fn evict_batch(mut self, pages: usize) -> PoolConfig {
        self.batch = pages.clamp(1, evict::BATCH_MAX);
        self
    }

    /// Whether [`create`](PoolConfig::create) may take the place of data, of an older table too;
    /// off unless set.
    pub fn overwrite(mut self, on: bool) -> PoolConfig {
        self.overwrite = on;
        self
    }

    fn check(&self) -> Result<()> {
        let page = self.page;
        if page.is_power_of_two() && (ByteCount::kib(4)..=ByteCount::kib(64)).contains(&page) {
            return Ok(());
        }
        Err(Error::Config {
            key: "page_size".to_owned(),
            reason: format!("{page} is not a power of two from 4 KiB to 64 KiB"),
        })
    }

    /// Creates a table file, or takes a raw block device, of at most `capacity` bytes at `path`.
    /// What exists there has to be free, as [`BlockStore::create`] says, unless
    /// [`overwrite`](PoolConfig::overwrite) allows it to be lost. A file becomes its owner's only.
    ///
    /// # Errors
    /// [`Error::Device`] when the path cannot be used, or with the data that it holds;
    /// [`Error::Config`] for a bad page size.
    pub fn create(
        self,
        path: impl AsRef<Path>,
        capacity: ByteCount,
        manager: &Arc<MemoryManager>,
    ) -> Result<Arc<BufferPool>> {
        let _ours = keep_local();
        let path = path.as_ref();
        self.check()?; // Before anything is overwritten.
        let store = BlockStore::create(path, Some(capacity), self.overwrite)?;
        BufferPool::start(self, path.to_path_buf(), Arc::new(store), manager, true)
    }

    /// Opens an existing table file or device.
    ///
    /// # Errors
    /// [`Error::Device`] naming what is wrong: missing, read-only, no table file, shorter than
    /// its header says, or created with another page size.
    pub fn open(
        self,
        path: impl AsRef<Path>,
        manager: &Arc<MemoryManager>,
    ) -> Result<Arc<BufferPool>> {
        let _ours = keep_local();
        let path = path.as_ref();
        let store = BlockStore::open(path, None)?;
        BufferPool::start(self, path.to_path_buf(), Arc::new(store), manager, false)
    }

    /// Creates a table on a store; what that holds is lost.
    ///
    /// # Errors
    /// As for [`PoolConfig::create`].
    pub fn create_on(
        self,
        store: Arc<dyn Store>,
        manager: &Arc<MemoryManager>,
    ) -> Result<Arc<BufferPool>> {
        let _ours = keep_local();
        BufferPool::start(self, PathBuf::from("(store)"), store, manager, true)
    }

    /// Opens the table on a store.
    ///
    /// # Errors
    /// As for [`PoolConfig::open`].
    pub fn open_on(
        self,
        store: Arc<dyn Store>,
        manager: &Arc<MemoryManager>,
    ) -> Result<Arc<BufferPool>> {
        let _ours = keep_local();
        BufferPool::start(self, PathBuf::from("(store)"), store, manager, false)
    }
}

/// A pool's figures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Bytes of resident pages.
    pub resident: ByteCount,
    /// Of these, in huge pages; see [`PoolConfig::huge_frames`].
    pub huge: ByteCount,
    /// Bytes of page words, resident set and page tables, which are within the limit too.
    pub metadata: ByteCount,
    /// Bytes that the pool keeps for itself whatever it holds: queues to the device, lists, its
    /// thread's stack. Within the limit as well.
    pub fixed: ByteCount,
    /// Fixes that found their page absent.
    pub misses: u64,
    /// Pages read.
    pub pages_read: u64,
    /// Pages written.
    pub pages_written: u64,
    /// Of these, by the background cleaner.
    pub pages_cleaned: u64,
    /// Pages evicted.
    pub evicted: u64,
    /// Of these, donated to temporary memory with their frames.
    pub handed_over: u64,
    /// Writes that failed.
    pub write_errors: u64,
    /// Times that [`PoolConfig::before_write`] refused a page.
    pub write_refusals: u64,
}

#[derive(Debug, Default)]
struct Counters {
    resident: CachePadded<AtomicU64>,
    huge: AtomicU64,
    metadata: AtomicU64,
    fixed: AtomicU64,
    /// Queues that the limit had no room for when they were opened.
    queues_owed: AtomicU64,
    misses: CachePadded<AtomicU64>,
    read: AtomicU64,
    written: CachePadded<AtomicU64>,
    cleaned: AtomicU64,
    evicted: CachePadded<AtomicU64>,
    handed_over: AtomicU64,
    write_errors: AtomicU64,
    refused: AtomicU64,
}

/// See the module's documentation.
pub struct BufferPool {
    page_shift: u32,
    page_bytes: usize,
    /// Bytes of pages for each byte of their words.
    pages_per_words: usize,
    /// Where the page would be whose word is at address 0: see `ptr_of`.
    origin: usize,
    words: LazyArray<Latch>,
    /// Words come in huge pages: the first touch of one costs that much of the limit.
    huge_words: bool,
    mapping: Mapping,
    resident: LazyArray<AtomicU64>,
    /// Per chunk of words: 1 when it is charged.
    charged: LazyArray<AtomicU64>,
    /// Pages of the table, used and free.
    end: CachePadded<AtomicU64>,
    hand: CachePadded<AtomicU64>,
    /// Where the next search for runs to hand over begins.
    run_hand: AtomicU64,
    alloc: Ranked<free_list::FreeLists>,
    /// Whose turn it is to write the header.
    header: Turn,
    queues: Ranked<Vec<Box<dyn Queue>>>,
    store: Arc<dyn Store>,
    path: PathBuf,
    account: Account,
    manager: Arc<MemoryManager>,
    discarder: Discarder,
    checksum: bool,
    batch: usize,
    deadline: Duration,
    replacement: Box<dyn Replacement>,
    before_write: Option<Box<BeforeWrite>>,
    counters: Counters,
    stop: Arc<AtomicBool>,
    prefetches: crossbeam_queue::ArrayQueue<PageId>,
    worker: Ranked<Option<JoinHandle<()>>>,
}

impl fmt::Debug for BufferPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BufferPool({}, {:?})", self.store.describe(), self.stats())
    }
}

impl BufferPool {
    fn start(
        config: PoolConfig,
        path: PathBuf,
        store: Arc<dyn Store>,
        manager: &Arc<MemoryManager>,
        create: bool,
    ) -> Result<Arc<BufferPool>> {
        config.check()?;
        let page_bytes = config.page.as_usize();
        let pages = store.capacity().as_usize() / page_bytes;
        let len = (pages * page_bytes).next_multiple_of(HUGE_PAGE);
        let mapping = Mapping::reserve(len, HUGE_PAGE, Huge::No)?;
        let huge_words = manager.limit() >= HUGE_WORDS_LIMIT;
        let words: LazyArray<Latch> =
            if huge_words { LazyArray::new_huge(pages) } else { LazyArray::new(pages) }?;
        let pages_per_words = page_bytes / size_of::<Latch>();
        let first_word = words.as_ptr().addr();
        let pool = Arc::new(BufferPool {
            page_shift: page_bytes.trailing_zeros(),
            page_bytes,
            pages_per_words,
            origin: mapping.addr().wrapping_sub(first_word.wrapping_mul(pages_per_words)),
            words,
            huge_words,
            mapping,
            resident: LazyArray::new(pages.div_ceil(64))?,
            charged: LazyArray::new(pages.div_ceil(CHUNK_PAGES))?,
            end: CachePadded::new(AtomicU64::new(1)),
            hand: CachePadded::new(AtomicU64::new(0)),
            run_hand: AtomicU64::new(0),
            alloc: Ranked::new(Rank::Space, free_list::FreeLists::default()),
            header: Turn::new(),
            queues: Ranked::new(Rank::Leaf, Vec::new()),
            store,
            path,
            account: manager.join("pool")?,
            manager: Arc::clone(manager),
            discarder: Discarder::new(),
            checksum: config.checksum,
            batch: config.batch,
            deadline: config.deadline,
            replacement: config.replacement,
            before_write: config.before_write,
            counters: Counters::default(),
            stop: Arc::new(AtomicBool::new(false)),
            prefetches: crossbeam_queue::ArrayQueue::new(io::PREFETCH_MAX),
            worker: Ranked::new(Rank::Leaf, None),
        });
        manager.charge(&pool.account, FIXED)?;
        pool.counters.fixed.store(FIXED.0, Ordering::Relaxed);
        if create {
            pool.write_header()?
        } else {
            pool.read_header()?
        }
        let weak: Weak<BufferPool> = Arc::downgrade(&pool);
        pool.account.set_reclaimer(weak);
        *pool.worker.lock() = Some(cleaner::spawn(&pool, config.cleaner, config.huge_frames)?);
        Ok(pool)
    }

    /// Bytes of a page that its user may use: the page size without the trailer.
    #[must_use]
    pub fn payload(&self) -> usize {
        self.page_bytes - TRAILER
    }

    /// Page size.
    #[must_use]
    pub fn page_size(&self) -> ByteCount {
        ByteCount(self.page_bytes as u64)
    }

    /// Pages of the table, used and free, page 0 (the header) included.
    #[must_use]
    pub fn pages(&self) -> PageCount {
        PageCount(self.end.load(Ordering::Acquire))
    }

    /// The memory manager that the pool belongs to.
    #[must_use]
    pub fn manager(&self) -> &Arc<MemoryManager> {
        &self.manager
    }

    /// The pool's account, to set floor and ceiling.
    #[must_use]
    pub fn account(&self) -> &Account {
        &self.account
    }

    /// The figures at the moment.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        let c = &self.counters;
        PoolStats {
            resident: ByteCount(c.resident.load(Ordering::Relaxed)),
            huge: ByteCount(c.huge.load(Ordering::Relaxed)),
            metadata: ByteCount(c.metadata.load(Ordering::Relaxed)),
            fixed: ByteCount(c.fixed.load(Ordering::Relaxed)),
            misses: c.misses.load(Ordering::Relaxed),
            pages_read: c.read.load(Ordering::Relaxed),
            pages_written: c.written.load(Ordering::Relaxed),
            pages_cleaned: c.cleaned.load(Ordering::Relaxed),
            evicted: c.evicted.load(Ordering::Relaxed),
            handed_over: c.handed_over.load(Ordering::Relaxed),
            write_errors: c.write_errors.load(Ordering::Relaxed),
            write_refusals: c.refused.load(Ordering::Relaxed),
        }
    }

    /// Fixes at the moment: shared holders and exclusive ones of all pages.
    #[must_use]
    pub fn holders(&self) -> u64 {
        let mut holders = 0;
        self.for_each_resident(|page| {
            let word = self.word(page).load();
            holders += match word.holder() {
                Holder::Absent | Holder::Free => 0,
                // Who writes the page back is one of the shared holders, but no fix.
                Holder::Shared(n) => n - u64::from(word.writing()).min(n),
                Holder::Locked => 1,
            };
        });
        holders
    }

    fn for_each_resident(&self, mut each: impl FnMut(PageId)) {
        let words = (self.end.load(Ordering::Acquire) as usize).div_ceil(64);
        for (index, word) in self.resident[..words].iter().enumerate() {
            let mut bits = word.load(Ordering::Relaxed);
            while bits != 0 {
                each(PageId((index * 64) as u64 + u64::from(bits.trailing_zeros())));
                bits &= bits - 1;
            }
        }
    }

    #[inline]
    fn word(&self, page: PageId) -> &Latch {
        &self.words[page.as_usize()]
    }

    /// The page whose latch is in the array at this place.
    #[inline]
    fn page_of(&self, latch: &Latch) -> PageId {
        let bytes = std::ptr::from_ref(latch).addr() - self.words.as_ptr().addr();
        PageId((bytes / size_of::<Latch>()) as u64)
    }

    /// The first byte of the page whose latch this is, in a multiplication and an addition.
    #[inline]
    fn ptr_of(&self, latch: &Latch) -> *mut u8 {
        let from_origin = std::ptr::from_ref(latch).addr().wrapping_mul(self.pages_per_words);
        self.mapping.as_ptr().with_addr(self.origin.wrapping_add(from_origin))
    }

    /// A page's first byte.
    #[inline]
    fn ptr(&self, page: PageId) -> *mut u8 {
        crate::base::strict_assert!(page.as_usize() < self.words.len(), "{page} is outside");
        self.mapping.as_ptr().wrapping_add(page.as_usize() << self.page_shift)
    }

    fn offset(&self, page: PageId) -> u64 {
        page.0 << self.page_shift
    }

    #[inline]
    fn buffer_bytes(&self, order: u8) -> usize {
        self.page_bytes << order
    }
}

impl Reclaim for BufferPool {
    fn reclaim(&self, want: ByteCount, effort: Effort) -> ByteCount {
        match effort {
            Effort::Spare => ByteCount::ZERO,
            Effort::Clean => self.evict(want, evict::Dirty::Skip),
            Effort::Write => self.evict(want, evict::Dirty::Write),
        }
    }

    fn hand_over(&self, room: &mut HandOver<'_>) {
        self.donate_runs(room);
    }

    fn cost(&self, effort: Effort) -> u32 {
        // Clean table pages are the cheapest of their kind: nothing to unmap in a handler.
        if effort == Effort::Clean { 10 } else { 100 }
    }

    fn metadata(&self) -> ByteCount {
        ByteCount(self.counters.metadata.load(Ordering::Relaxed))
    }

    fn describe_held(&self) -> String {
        format!(" (fixed by {} holders)", self.holders())
    }
}

impl Drop for BufferPool {
    fn drop(&mut self) {
        if !self.mapping.is_here() {
            // A forked child has neither the thread nor the memory.
            std::mem::forget(self.worker.get_mut().take());
            return;
        }
        self.stop.store(true, Ordering::Release);
        let worker = self.worker.lock().take();
        if let Some(worker) = worker {
            worker.thread().unpark();
            if worker.thread().id() != std::thread::current().id() {
                let _ = worker.join();
            }
        }
        let c = &self.counters;
        let tables = c.metadata.load(Ordering::Relaxed) + c.fixed.load(Ordering::Relaxed);
        let bytes = c.resident.load(Ordering::Relaxed) + tables;
        self.account.uncharge(ByteCount(bytes));
    }
}
