//! The pool itself: composes the parts of one table, and joins it to the other tables of its pool.

use super::account::PoolAccount;
use super::cleaner::Cleaner;
use super::config::PoolConfig;
use super::donate::Donor;
use super::evict::{Dirty, PoolEvictor};
use super::file::TableFile;
use super::frames::PoolFrames;
use super::group::{PoolTable, TableGroup};
use super::header::Header;
use super::huge::Collapser;
use super::latch::Holder;
use super::load::Loader;
use super::page_table::{FIRST, PageShape};
use super::stats::PoolStats;
use super::write_back::PageWriter;
#[cfg(doc)]
use crate::base::error::Error;
use crate::base::error::Result;
use crate::base::local::keep_local;
use crate::base::sync::{Rank, Ranked};
use crate::base::units::{ByteCount, PageId};
use crate::limit::manager::{Account, Donation, MemoryManager};
use crate::store::{BlockStore, OnlyUser, Store, Use};
#[cfg(feature = "network")]
use crate::store::{NetworkStore, servers_of};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Maximum number of pages that wait to be read ahead; more are forgotten.
const WAITING_MAX: usize = 4096;

/// The same of a table beside others.
const WAITING_BESIDE_MAX: usize = 512;

/// Bytes that a table keeps for itself whatever it has in memory, charged when it is opened: the lists of
/// pages to be read ahead and of pages to be cleaned, upper page tables, small objects.
const fn fixed(waiting_max: usize) -> ByteCount {
    /// Measured with 64 tables beside one: `book/src/design/memory.md`.
    const OTHERS: usize = 64 << 10;
    ByteCount((Loader::bytes(waiting_max) + Cleaner::BYTES + OTHERS) as u64)
}

/// A table in a buffer pool; see the module's documentation.
///
/// A pool has one table file or several ([`PoolConfig::beside`]): this is the handle of one of them, and page
/// numbers are its own. Dropping it closes the file, without a [`flush`](Self::flush).
pub struct BufferPool {
    pub(super) frames: PoolFrames,
    pub(super) loader: Loader,
    pub(super) donor: Donor,
    pub(super) group: Arc<TableGroup>,
    /// Work of the group's thread for this table; taken out while it does.
    chores: Ranked<Chores>,
    pub(super) file: Arc<TableFile>,
    header: Header,
    write_back: PageWriter,
    evictor: PoolEvictor,
}

#[derive(Default)]
struct Chores {
    cleaner: Option<Cleaner>,
    collapser: Option<Collapser>,
}

impl fmt::Debug for BufferPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BufferPool({}, {:?})", self.file.describe(), self.stats())
    }
}

impl BufferPool {
    /// Bytes of a page that its user may use: the page size without the trailer of 16
    /// bytes, or all of it with [`whole_pages`](PoolConfig::whole_pages).
    #[inline]
    #[must_use]
    pub fn payload(&self) -> usize {
        self.frames.table.payload_bytes()
    }

    /// Page size.
    #[must_use]
    pub fn page_size(&self) -> ByteCount {
        self.frames.table.page_size()
    }

    /// Pages of the table, used and free, pages 0 and 1 (copies of the header) included.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.frames.table.end()
    }

    /// The table file, or what stands for it in errors of a store of another kind.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.frames.table.path()
    }

    /// The address of a page's first byte: pages do not move, so it is the same as long as the pool exists,
    /// whether the page is in use and resident or not. `None` of a page that the table has no room for, and
    /// of pages 0 and 1.
    ///
    /// An address holds nothing. What is read there counts only while a guard holds the page, or when an
    /// optimistic guard made before [validates](crate::pool::OptimisticGuard::validate) afterwards; reads under
    /// the latter are volatile or atomic. What is written there without an exclusive guard of the page is
    /// undefined behaviour; what is written under one, but not through it, may be lost.
    #[must_use]
    pub fn page_address(&self, page: PageId) -> Option<*const u8> {
        let table = &self.frames.table;
        let is_page = page >= FIRST && table.get(page).is_some();
        is_page.then(|| table.ptr(page).cast_const())
    }

    /// The page in whose memory this address is: that of [`page_address`](Self::page_address), or of a byte
    /// behind it. It may be free. `None` of an address that
    /// is in no page of this table.
    ///
    /// # Examples
    /// ```
    /// # use farheap::{ByteCount, pool::PoolConfig, store::MemStore};
    /// # use farheap::manager::MemoryManager;
    /// # let manager = MemoryManager::start(ByteCount::mib(16))?;
    /// # let store = std::sync::Arc::new(MemStore::new(ByteCount::mib(64))?);
    /// let pool = PoolConfig::new().create_on(store, &manager)?;
    /// let page = pool.allocate()?;
    /// assert_eq!(pool.page_address(page.id()), Some(page.as_ptr()));
    /// assert_eq!(pool.page_at(&raw const page[100]), Some(page.id()));
    /// # Ok::<(), farheap::Error>(())
    /// ```
    #[must_use]
    pub fn page_at(&self, address: *const u8) -> Option<PageId> {
        self.frames.table.page_at(address.addr())
    }

    /// The memory manager that the pool belongs to.
    #[must_use]
    pub fn manager(&self) -> &Arc<MemoryManager> {
        self.frames.account.manager()
    }

    /// The pool's account, to set floor and ceiling: of all its tables together.
    #[must_use]
    pub fn account(&self) -> &Account {
        self.frames.account.account()
    }

    /// The figures at the moment.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        let PoolFrames { chunks, resident, account, .. } = &self.frames;
        let mut stats = PoolStats {
            resident_bytes: resident.bytes(),
            huge_bytes: chunks.huge_bytes(),
            metadata_bytes: chunks.metadata(),
            fixed_bytes: ByteCount(account.fixed().0 + TableGroup::FIXED.0),
            evicted: resident.departed(),
            ..PoolStats::default()
        };
        self.loader.show(&mut stats);
        self.write_back.show(&mut stats);
        self.donor.show(&mut stats);
        stats
    }

    /// Fixes at the moment: shared holders and exclusive ones of all pages. A page that the pool itself locks for
    /// a moment, to evict it or to bring it in, counts as well.
    #[must_use]
    pub fn holders(&self) -> u64 {
        PoolTable::holders(self)
    }

    /// Evicts about `want` bytes of this table's clean pages now, whatever the limit; returns how many.
    pub fn evict_clean(&self, want: ByteCount) -> ByteCount {
        self.evictor.evict(&self.frames, &self.write_back, want, Dirty::Skip)
    }

    /// Evicts all pages without a holder; dirty ones are written, which is no [`flush`](Self::flush).
    ///
    /// # Errors
    /// [`Error::Io`] and [`Error::LatchTimeout`] as for `flush`; with [`Error::WriteRefused`] all other
    /// pages are evicted.
    pub fn evict_all(&self) -> Result<()> {
        let refusal = self.write_back.write_all(&self.frames)?;
        let PoolFrames { resident, table, .. } = &self.frames;
        let evict = || {
            let want = resident.bytes();
            self.evictor.evict(&self.frames, &self.write_back, want, Dirty::Write)
        };
        // Pages that others bring in meanwhile may stay.
        let end = resident.departed() + table.pages_in(resident.bytes());
        // What is freed counts words and page tables, too: one call may leave pages.
        while resident.departed() < end && evict() > ByteCount::ZERO {}
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
    /// State after a power cut of pages that were changed, freed or allocated after the last
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
    /// is in doubt then, and no later sync tells: this pool's flushes fail from then on. They do as well when a server's
    /// connection broke with a write under way, which it may carry out later: the page stays in memory. [`Error::Io`] of a
    /// server that is away loses nothing.
    pub fn flush(&self) -> Result<()> {
        if self.frames.table.is_read_only() {
            return Ok(());
        }
        // Before the pages: what the header names is written then.
        let snapshot = self.header.snapshot(&self.frames);
        let written = self.write_back.write_all(&self.frames).and_then(|refusal| {
            self.header.write(&self.frames, &snapshot)?;
            refusal.map_or(Ok(()), Err)
        });
        written.map_err(|error| self.file.explain(error))
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
            |page: &PageId| table.contains(*page) && !table.word(*page).load().is_unused();
        if let Some(page) = sorted.iter().find(|page| !is_page(page)) {
            return Err(table.no_such_page(*page));
        }
        let written = self.write_back.write_those(&self.frames, sorted.into_iter());
        let refusal = written.map_err(|error| self.file.explain(error))?;
        self.file.sync()?;
        refusal.map_or(Ok(()), Err)
    }
}

impl PoolConfig {
    /// Sets that the table joins the pool of another: one limit, one order in which pages leave, whatever
    /// table they are of, and one background thread. All else is the table's own: file, header, page
    /// size, [`flush`](BufferPool::flush), [`read_only`](PoolConfig::read_only), log. It has to be
    /// opened under the same memory manager.
    ///
    /// Tables may join and be dropped at any time; none is the first. A table beside others costs
    /// 104 KiB of the limit while it is open, and 29 KiB for each queue to its device.
    ///
    /// # Examples
    /// ```
    /// # use farheap::{ByteCount, pool::PoolConfig, store::MemStore};
    /// # use farheap::manager::MemoryManager;
    /// # use std::sync::Arc;
    /// # let manager = MemoryManager::start(ByteCount::mib(16))?;
    /// # let store = || MemStore::new(ByteCount::mib(64)).map(Arc::new);
    /// let orders = PoolConfig::new().create_on(store()?, &manager)?;
    /// let items = PoolConfig::new().beside(&orders).create_on(store()?, &manager)?;
    /// let page = items.allocate()?.id();
    /// items.flush()?;
    /// drop(items); // Its file is closed; the pool goes on.
    /// assert!(orders.fix_shared(page).is_err(), "a page of the other table");
    /// # Ok::<(), farheap::Error>(())
    /// ```
    pub fn beside(mut self, table: &BufferPool) -> PoolConfig {
        self.beside = Some(Arc::clone(&table.group));
        self
    }

    /// Creates a table file, or takes a raw block device, of at most `capacity` bytes at `path`.
    /// An existing file there has to be free, as [`BlockStore::create`] says, unless
    /// [`overwrite`](PoolConfig::overwrite) allows it to be lost. A file becomes its owner's only.
    ///
    /// `nbd://HOST/EXPORT` and the other addresses of a server take its export in the same way, those of up to four, with
    /// commas between, an export of each, which hold copies (feature `network`): `book/src/how_to/network.md`.
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
        self.check(true, manager)?; // Before anything is overwritten.
        let what = Use::NewTable { overwrite: self.overwrite };
        let store = self.open_store(what, path, Some(capacity))?;
        start(self, path.to_path_buf(), store, manager, true)
    }

    /// Opens an existing table file or device, or a table on a server.
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
        let what = if self.read_only { Use::Reading } else { Use::OldTable };
        let store = self.open_store(what, path, None)?;
        start(self, path.to_path_buf(), store, manager, false)
    }

    /// Opens the store of a table: a file, a device, or the export of a server.
    fn open_store(
        &self,
        what: Use,
        path: &Path,
        capacity: Option<ByteCount>,
    ) -> Result<Arc<dyn Store>> {
        #[cfg(feature = "network")]
        if let Some(servers) = servers_of(path)? {
            return Ok(Arc::new(NetworkStore::open_table(what, servers, capacity, self.deadline)?));
        }
        Ok(Arc::new(BlockStore::open_for(what, path, capacity)?))
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
        let path = PathBuf::from(&*store.name());
        start(self, path, store, manager, true)
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
        let path = PathBuf::from(&*store.name());
        start(self, path, store, manager, false)
    }
}

/// Opens the table of a store, or makes one, and has it join its group.
fn start(
    config: PoolConfig,
    path: PathBuf,
    store: Arc<dyn Store>,
    manager: &Arc<MemoryManager>,
    create: bool,
) -> Result<Arc<BufferPool>> {
    config.check(create, manager)?;
    let page = PageShape::new(config.page, config.whole_pages);
    let has_checksums = config.has_checksums();
    let store = OnlyUser::of(store)?;
    let group = config.beside.map_or_else(|| TableGroup::new(manager), Ok)?;
    let account = PoolAccount::of(group.share(), &path);
    let waiting_max = if account.tables() == 1 { WAITING_MAX } else { WAITING_BESIDE_MAX };
    let (capacity, policy, is_reading) = (store.capacity(), config.replacement, config.read_only);
    let frames =
        PoolFrames::new(page, capacity, config.deadline, policy, is_reading, account, &path)?;
    let file = Arc::new(TableFile::new(store, path, has_checksums));
    let chores = Chores {
        cleaner: (config.cleaner && !is_reading).then(Cleaner::new),
        collapser: config.huge_frames.then(Collapser::new),
    };
    let pool = Arc::new(BufferPool {
        frames,
        loader: Loader::new(Arc::clone(&file), waiting_max),
        donor: Donor::new(),
        group,
        chores: Ranked::new(Rank::Leaf, chores),
        header: Header::new(Arc::clone(&file)),
        write_back: PageWriter::new(Arc::clone(&file), config.before_write),
        evictor: PoolEvictor::new(config.batch),
        file,
    });
    let frames = &pool.frames;
    frames.account.charge_fixed(fixed(waiting_max))?;
    if create {
        pool.header.create(frames)?;
    } else {
        pool.header.read(frames)?;
    }
    let weak = Arc::downgrade(&pool);
    pool.group.join(weak)?;
    Ok(pool)
}

/// Takes the chores out, lets `turn` go on with them, and puts them back.
fn chore(place: &Ranked<Chores>, turn: impl FnOnce(&mut Chores) -> bool) -> bool {
    let mut chores = std::mem::take(&mut *place.lock());
    let is_done = turn(&mut chores);
    *place.lock() = chores;
    is_done
}

impl PoolTable for BufferPool {
    fn frames(&self) -> &PoolFrames {
        &self.frames
    }

    fn write_back(&self) -> &PageWriter {
        &self.write_back
    }

    fn evictor(&self) -> &PoolEvictor {
        &self.evictor
    }

    fn read_ahead(&self) -> bool {
        self.loader.serve_prefetches(&self.frames)
    }

    fn clean(&self, moved: u64) -> bool {
        let hand = self.evictor.hand();
        chore(&self.chores, |chores| {
            let cleaner = chores.cleaner.as_mut();
            cleaner.is_some_and(|it| it.turn(&self.frames, &self.write_back, hand, moved))
        })
    }

    fn close_spare_queues(&self) {
        self.file.close_spare(&self.frames.account);
    }

    fn collapse(&self) -> bool {
        chore(&self.chores, |chores| {
            chores.collapser.as_mut().is_some_and(|collapser| collapser.turn(&self.frames))
        })
    }

    fn donate(&self, room: &mut Donation<'_>) {
        // A pool that is told to evict one page at a time donates none together either.
        if self.evictor.batches() {
            self.donor.donate_runs(&self.frames, room);
        }
    }

    fn holders(&self) -> u64 {
        let PoolFrames { table, resident, .. } = &self.frames;
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
}

impl Drop for BufferPool {
    fn drop(&mut self) {
        self.group.leave();
        if !self.frames.table.mapping().is_here() {
            // A forked child does not have the memory.
            return;
        }
        let PoolFrames { chunks, resident, account, .. } = &self.frames;
        let bytes = resident.bytes().0 + chunks.metadata().0 + account.fixed().0;
        account.uncharge(ByteCount(bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Clock;
    use crate::store::MemStore;
    use std::time::Duration;

    /// A pool without a thread that cleans, and its first pages, dirty.
    fn pool(limit: ByteCount, pages: u64) -> Arc<BufferPool> {
        let manager = MemoryManager::start(limit).expect("manager");
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
        let mut turn = || {
            let hand = pool.evictor.hand();
            cleaner.turn(&pool.frames, &pool.write_back, hand, hand)
        };
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
        let mut turn = || {
            let hand = pool.evictor.hand();
            cleaner.turn(&pool.frames, &pool.write_back, hand, hand)
        };
        let half = take_room(&pool, ByteCount::mib(4));
        assert!(!turn());
        std::thread::sleep(Duration::from_millis(150)); // Longer than a page has to rest.
        assert!(!turn() && dirty(&pool).len() == 100, "there is room to spare");
        let _rest = take_room(&pool, ByteCount::kib(512));
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

    /// Leaves a pool little room: no page has to leave, but one may have to soon.
    fn take_room(pool: &BufferPool, but: ByteCount) -> Account {
        let ballast = pool.manager().join("ballast").expect("account");
        let free = pool.account().budget().free();
        assert!(ballast.try_charge(ByteCount(free.0 - but.0)));
        ballast
    }

    #[test]
    #[cfg_attr(miri, ignore = "maps the pages")]
    fn the_cleaner_does_not_take_the_time_between_two_pages_that_come_for_rest() {
        let pool = pool(ByteCount::mib(16), 100);
        let mut cleaner = Cleaner::new();
        let mut turn = || {
            let hand = pool.evictor.hand();
            cleaner.turn(&pool.frames, &pool.write_back, hand, hand)
        };
        let _ballast = take_room(&pool, ByteCount::kib(512));
        for page in 0..3 {
            assert!(!turn(), "page {page} is to come");
            std::thread::sleep(Duration::from_millis(150)); // Longer than a page has to rest.
            drop(pool.allocate().expect("a page"));
        }
        assert_eq!(dirty(&pool).len(), 103);
    }
}
