//! The pool itself: composes its parts, and is what the memory manager asks for memory.

use super::cleaner::Cleaner;
use super::config::PoolConfig;
use super::donate::Donor;
use super::evict::{Dirty, Evictor};
use super::file::TableFile;
use super::frames::Frames;
use super::header::Header;
use super::huge::Collapser;
use super::latch::Holder;
use super::load::Loader;
use super::page_table::TRAILER;
use super::stats::PoolStats;
use super::worker::Worker;
use super::write_back::WriteBack;
#[cfg(doc)]
use crate::base::error::Error;
use crate::base::error::Result;
use crate::base::local::keep_local;
use crate::base::units::{ByteCount, PageCount, PageId};
use crate::limit::manager::{Account, Donation, Effort, MemoryManager, Reclaim};
use crate::store::{BlockStore, OnlyUser, Store};
use crate::sys::thread::THREAD_BYTES;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Pause between batches of the cleaner while it finds something to write.
const PAUSE: Duration = Duration::from_millis(1);

/// Pause between rounds that found nothing.
const IDLE: Duration = Duration::from_millis(20);

/// Pause between runs that are put into huge pages: an eighth of a processor's time.
const BETWEEN_RUNS: Duration = Duration::from_millis(5);

/// Bytes that a pool keeps for itself however large it is, charged when it starts: the lists of pages
/// to be read ahead and of pages to be cleaned, the worker's thread and the manager's, and what no part knows of.
const FIXED: usize = {
    /// Upper page tables, small objects. Measured: `docs/design/memory.md`.
    const OTHERS: usize = 352 << 10;
    Loader::BYTES + Cleaner::BYTES + 2 * THREAD_BYTES + OTHERS
};

/// A buffer pool; see the module's documentation.
pub struct BufferPool {
    pub(super) frames: Frames,
    pub(super) loader: Loader,
    pub(super) donor: Donor,
    pub(super) worker: Worker,
    file: Arc<TableFile>,
    header: Header,
    write_back: WriteBack,
    evictor: Evictor,
}

impl fmt::Debug for BufferPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BufferPool({}, {:?})", self.file.describe(), self.stats())
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
        config.check(create)?;
        let store = OnlyUser::of(store)?;
        let (capacity, policy, is_reading) =
            (store.capacity(), config.replacement, config.read_only);
        let frames =
            Frames::new(config.page, capacity, config.deadline, policy, is_reading, manager)?;
        let file = Arc::new(TableFile::new(store, path, config.checksum));
        let pool = Arc::new(BufferPool {
            frames,
            loader: Loader::new(Arc::clone(&file)),
            donor: Donor::new(),
            worker: Worker::new(),
            header: Header::new(Arc::clone(&file)),
            write_back: WriteBack::new(Arc::clone(&file), config.before_write),
            evictor: Evictor::new(config.batch),
            file,
        });
        let frames = &pool.frames;
        frames.account.charge_fixed(ByteCount(FIXED as u64))?;
        if create {
            pool.header.create(frames)?;
        } else {
            pool.header.read(frames)?;
        }
        let weak = Arc::downgrade(&pool);
        frames.account.account().set_reclaimer(Weak::<BufferPool>::clone(&weak));
        let mut cleaner = (config.cleaner && !is_reading).then(Cleaner::new);
        let mut collapser = config.huge_frames.then(Collapser::new);
        pool.worker.start(weak, move |pool| pool.work(cleaner.as_mut(), collapser.as_mut()))?;
        Ok(pool)
    }

    /// One turn of the worker thread: what was asked to be read ahead, then dirty pages, and when
    /// there is nothing to write, huge pages. Returns how long it may rest.
    fn work(
        &self,
        cleaner: Option<&mut Cleaner>,
        collapser: Option<&mut Collapser>,
    ) -> Option<Duration> {
        let is_prefetching = self.loader.serve_prefetches(&self.frames);
        let hand = self.evictor.hand();
        if cleaner.is_some_and(|cleaner| cleaner.turn(&self.frames, &self.write_back, hand)) {
            return (!is_prefetching).then_some(PAUSE);
        }
        if is_prefetching {
            return None;
        }
        let is_collapsing = collapser.is_some_and(|collapser| collapser.turn(&self.frames));
        Some(if is_collapsing { BETWEEN_RUNS } else { IDLE })
    }

    /// Bytes of a page that its user may use: the page size without the trailer of 16
    /// bytes.
    #[must_use]
    pub fn payload(&self) -> usize {
        self.frames.table.page_bytes() - TRAILER
    }

    /// Page size.
    #[must_use]
    pub fn page_size(&self) -> ByteCount {
        self.frames.table.page_size()
    }

    /// Pages of the table, used and free, pages 0 and 1 (copies of the header) included.
    #[must_use]
    pub fn pages(&self) -> PageCount {
        PageCount(self.frames.table.end())
    }

    /// The memory manager that the pool belongs to.
    #[must_use]
    pub fn manager(&self) -> &Arc<MemoryManager> {
        self.frames.account.manager()
    }

    /// The pool's account, to set floor and ceiling.
    #[must_use]
    pub fn account(&self) -> &Account {
        self.frames.account.account()
    }

    /// The figures at the moment.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        let Frames { chunks, resident, account, .. } = &self.frames;
        let mut stats = PoolStats {
            resident_bytes: resident.bytes(),
            huge_bytes: chunks.huge_bytes(),
            metadata_bytes: chunks.metadata(),
            fixed_bytes: account.fixed(),
            evicted: resident.departed(),
            ..PoolStats::default()
        };
        self.loader.show(&mut stats);
        self.write_back.show(&mut stats);
        self.donor.show(&mut stats);
        stats
    }

    /// Checks that pages may be changed.
    ///
    /// # Errors
    /// [`Error::Device`] of a table that is only read.
    pub(super) fn check_changeable(&self) -> Result<()> {
        match self.frames.table.is_read_only() {
            true => Err(self.file.refused("is open to be read only: its pages cannot be changed")),
            false => Ok(()),
        }
    }

    /// Fixes at the moment: shared holders and exclusive ones of all pages.
    #[must_use]
    pub fn holders(&self) -> u64 {
        let Frames { table, resident, .. } = &self.frames;
        let pages = (0..table.steps()).flat_map(|step| resident.pages(step));
        let holders = pages.map(|page| {
            let word = table.word(page).load();
            match word.holder() {
                Holder::Absent | Holder::Free => 0,
                // The thread that writes the page back is one of the shared holders, but no fix.
                Holder::Shared(n) => n - u64::from(word.writing()).min(n),
                Holder::Locked => 1,
            }
        });
        holders.sum()
    }

    fn evict(&self, want: ByteCount, dirty: Dirty) -> ByteCount {
        self.evictor.evict(&self.frames, &self.write_back, want, dirty)
    }

    /// Evicts about `want` bytes of clean pages now, whatever the limit; returns how many.
    pub fn evict_clean(&self, want: ByteCount) -> ByteCount {
        self.evict(want, Dirty::Skip)
    }

    /// Evicts all pages without a holder; dirty ones are written, which is no [`flush`](Self::flush).
    ///
    /// # Errors
    /// [`Error::Io`] and [`Error::LatchTimeout`] as for `flush`; with [`Error::WriteRefused`] all other
    /// pages are evicted.
    pub fn evict_all(&self) -> Result<()> {
        let refusal = self.write_back.write_all(&self.frames)?;
        let Frames { resident, table, .. } = &self.frames;
        // Pages that others bring in meanwhile may stay.
        let end = resident.departed() + table.pages_in(resident.bytes());
        // What is freed counts words and page tables, too: one call may leave pages.
        while resident.departed() < end
            && self.evict(resident.bytes(), Dirty::Write) > ByteCount::ZERO
        {}
        refusal.map_or(Ok(()), Err)
    }

    /// Checkpoint: makes the table as it is now durable. All dirty pages are written and the device
    /// synced, then the header is written and the device synced again.
    ///
    /// When this returns `Ok`, all pages that were allocated before the call are in use after a power
    /// cut, and each has the content that it had at the call, or a later one. Pages that are changed
    /// meanwhile may or may not be written in their newest state; pages held exclusively are waited
    /// for, with no other page held. So a log is not needed any more up to the record that was its
    /// last when the call began, if each change is logged while its page is held.
    ///
    /// Free pages at the end of the table leave it then, and their space on the device is given back.
    ///
    /// What a power cut can leave of pages that were changed, freed or allocated after the last
    /// flush: their content of that flush or any later one that was evicted; nothing whole, which is
    /// [`Error::CorruptPage`]; and of pages allocated since, [`Error::NoSuchPage`]. Never the bytes
    /// of another page or of an older table. Without
    /// [`checksum`](super::PoolConfig::checksum) a page that is not whole cannot be told.
    ///
    /// # Errors
    /// After an error the last flush that succeeded counts, and the log must be kept from there.
    /// [`Error::Io`] when pages could not be written (they stay dirty in memory),
    /// [`Error::WriteRefused`] when [`before_write`](super::PoolConfig::before_write) refused pages
    /// (the same; all others and the header are durable, and a refused page that was never written is
    /// a [`Error::CorruptPage`] after a crash),
    /// [`Error::LatchTimeout`] when a page is held exclusively for too long, or another flush takes
    /// too long to write the header,
    /// [`Error::Device`] when the device could not be synced. What was written since the last flush
    /// is in doubt then, and no later sync tells: this pool's flushes fail from then on.
    pub fn flush(&self) -> Result<()> {
        if self.frames.table.is_read_only() {
            return Ok(());
        }
        // Before the pages: what the header names is written then.
        let snapshot = self.header.snapshot(&self.frames);
        let refusal = self.write_back.write_all(&self.frames)?;
        self.header.write(&self.frames, &snapshot)?;
        refusal.map_or(Ok(()), Err)
    }

    /// Makes the present content of `pages`, or a later one, durable. The others may or may not be
    /// written, and the header is not: a page that was allocated since the last
    /// [`flush`](Self::flush) is not in use after a power cut.
    ///
    /// # Errors
    /// As for [`flush`](Self::flush), for these pages; [`Error::NoSuchPage`].
    pub fn flush_pages(&self, pages: &[PageId]) -> Result<()> {
        let _ours = keep_local();
        let table = &self.frames.table;
        let mut sorted = pages.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        let is_page =
            |page: &PageId| table.contains(*page, 0) && !table.word(*page).load().is_unused();
        if let Some(page) = sorted.iter().find(|page| !is_page(page)) {
            return Err(table.no_such_page(*page));
        }
        let refusal = self.write_back.write_those(&self.frames, sorted.into_iter())?;
        self.file.sync()?;
        refusal.map_or(Ok(()), Err)
    }
}

impl PoolConfig {
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
        self.check(true)?; // Before anything is overwritten.
        let store = BlockStore::create(path, Some(capacity), self.overwrite)?;
        BufferPool::start(self, path.to_path_buf(), Arc::new(store), manager, true)
    }

    /// Opens an existing table file or device.
    ///
    /// # Errors
    /// [`Error::Device`] naming what is wrong: missing, in use, no table file, shorter than
    /// its header says, created with another page size, or read-only and not opened as
    /// [`read_only`](PoolConfig::read_only).
    pub fn open(
        self,
        path: impl AsRef<Path>,
        manager: &Arc<MemoryManager>,
    ) -> Result<Arc<BufferPool>> {
        let _ours = keep_local();
        let path = path.as_ref();
        let store = match self.read_only {
            true => BlockStore::open_read_only(path),
            false => BlockStore::open(path, None),
        }?;
        BufferPool::start(self, path.to_path_buf(), Arc::new(store), manager, false)
    }

    /// Creates a table on a store; what that holds is lost.
    ///
    /// # Errors
    /// As for [`PoolConfig::create`]; [`Error::Device`] while another pool or region uses the store.
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
    /// As for [`PoolConfig::open`]; [`Error::Device`] while another pool or region uses the store.
    pub fn open_on(
        self,
        store: Arc<dyn Store>,
        manager: &Arc<MemoryManager>,
    ) -> Result<Arc<BufferPool>> {
        let _ours = keep_local();
        BufferPool::start(self, PathBuf::from("(store)"), store, manager, false)
    }
}

impl Reclaim for BufferPool {
    fn reclaim(&self, want: ByteCount, effort: Effort) -> ByteCount {
        match effort {
            Effort::Spare => ByteCount::ZERO,
            Effort::Clean => self.evict(want, Dirty::Defer),
            Effort::Write => self.evict(want, Dirty::Write),
        }
    }

    fn donate(&self, room: &mut Donation<'_>) {
        // A pool that is told to evict one page at a time donates none together either.
        if self.evictor.batches() {
            self.donor.donate_runs(&self.frames, room);
        }
    }

    fn cost(&self, effort: Effort) -> u32 {
        // Clean table pages are the cheapest of their kind: nothing to unmap in a handler.
        if effort == Effort::Clean { 10 } else { 100 }
    }

    fn metadata(&self) -> ByteCount {
        self.frames.chunks.metadata()
    }

    fn describe_held(&self) -> String {
        format!(" (fixed by {} holders)", self.holders())
    }
}

impl Drop for BufferPool {
    fn drop(&mut self) {
        if !self.frames.table.mapping().is_here() {
            // A forked child has neither the thread nor the memory.
            self.worker.forget();
            return;
        }
        self.worker.stop();
        let Frames { chunks, resident, account, .. } = &self.frames;
        let bytes = resident.bytes().0 + chunks.metadata().0 + account.fixed().0;
        account.uncharge(ByteCount(bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::manager::Mode;
    use crate::pool::Clock;
    use crate::store::MemStore;

    /// A pool without a thread that cleans, and its first pages, dirty.
    fn pool(limit: ByteCount, pages: u64) -> Arc<BufferPool> {
        let manager = MemoryManager::start(limit, Mode::Cooperative).expect("manager");
        let store = Arc::new(MemStore::new(ByteCount::mib(64)).expect("store"));
        let config = PoolConfig::new().cleaner(false).huge_frames(false).replacement(Clock);
        let pool = config.create_on(store, &manager).expect("pool");
        (0..pages).for_each(|_| drop(pool.allocate().expect("page")));
        pool
    }

    fn dirty(pool: &BufferPool) -> Vec<u64> {
        pool.dirty_pages().map(|page| page.0).collect()
    }

    fn change(pool: &BufferPool, page: u64) {
        pool.fix_exclusive(PageId(page)).expect("page")[0] += 1;
    }

    #[test]
    #[cfg_attr(miri, ignore = "maps the pages")]
    fn what_is_dirty_and_cold_leaves_before_what_is_clean_and_warm() {
        const WARM: u64 = 64;
        let pool = pool(ByteCount::mib(4), 4_000);
        pool.evict_all().expect("written");
        let mut missed = 0;
        for page in (2 + WARM..4_000).chain(2 + WARM..4_000) {
            change(&pool, page);
            for warm in (2..2 + WARM).map(PageId) {
                missed += u64::from(pool.try_fix_shared(warm).is_none());
                drop(pool.fix_shared(warm).expect("page"));
            }
        }
        // All but these are changed: clean before dirty took them all in every round.
        assert!(missed <= 4 * WARM, "{missed} warm pages were missed");
    }

    #[test]
    #[cfg_attr(miri, ignore = "maps the pages")]
    fn the_cleaner_writes_what_leaves_next_and_nothing_warm() {
        let pool = pool(ByteCount::mib(16), 510);
        let mut cleaner = Cleaner::new();
        let mut turn = || cleaner.turn(&pool.frames, &pool.write_back, pool.evictor.hand());
        assert!(!turn(), "nothing leaves");
        // The hand passes all pages, which are dirty, and are cool from then on.
        assert_eq!(pool.evict_clean(ByteCount(4096)), ByteCount::ZERO);
        (2..512).step_by(2).for_each(|page| drop(pool.fix_shared(PageId(page)).expect("page")));
        let next = pool.evictor.hand() % 8 * 64;
        assert!(turn());
        let written: Vec<u64> = (2..512).filter(|page| !dirty(&pool).contains(page)).collect();
        let expected = (next..next + 64).filter(|page| *page >= 2 && page % 2 == 1);
        assert_eq!(written, expected.collect::<Vec<_>>(), "an eighth of a lap is one step here");
        assert!(!turn(), "all that leaves next is clean");
    }

    #[test]
    #[cfg_attr(miri, ignore = "maps the pages")]
    fn the_cleaner_writes_what_is_not_changed_any_more_while_nothing_leaves() {
        let pool = pool(ByteCount::mib(16), 100);
        let mut cleaner = Cleaner::new();
        let mut turn = || cleaner.turn(&pool.frames, &pool.write_back, pool.evictor.hand());
        let take_room = |but: ByteCount| {
            let ballast = pool.manager().join("ballast").expect("account");
            let free = pool.account().budget().free();
            assert!(ballast.try_charge(ByteCount(free.0 - but.0)));
            ballast
        };
        let half = take_room(ByteCount::mib(4));
        assert!(!turn());
        std::thread::sleep(Duration::from_millis(150)); // Longer than a page has to rest.
        assert!(!turn() && dirty(&pool).len() == 100, "there is room to spare");
        let _rest = take_room(ByteCount::kib(512));
        assert!(!turn(), "it watches the pages");
        change(&pool, 50);
        while !turn() {
            std::thread::sleep(Duration::from_millis(10)); // Until they have rested.
        }
        assert_eq!(dirty(&pool), [50]);
        while !turn() {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(dirty(&pool), []);
        drop(half);
    }
}
