//! How a pool is set up.

use super::frames::BATCH_MAX;
use super::group::TableGroup;
use super::replacement::{Proven, Replacement};
use super::write_back::BeforeWrite;
use crate::base::error::{Error, Result};
use crate::base::units::{ByteCount, PageId};
use crate::limit::manager::MemoryManager;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// How a pool is set up.
///
/// # Examples
/// ```
/// use farheap::ByteCount;
/// use farheap::pool::PoolConfig;
/// use farheap::store::MemStore;
/// use farheap::manager::MemoryManager;
/// use std::sync::Arc;
///
/// let manager = MemoryManager::start(ByteCount::mib(16))?;
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
    pub(super) page: ByteCount,
    /// Unless said, pages with a trailer have checksums.
    checksum: Option<bool>,
    pub(super) whole_pages: bool,
    pub(super) cleaner: bool,
    pub(super) huge_frames: bool,
    pub(super) deadline: Duration,
    pub(super) replacement: Box<dyn Replacement>,
    pub(super) before_write: Option<Box<BeforeWrite>>,
    pub(super) batch: usize,
    pub(super) overwrite: bool,
    pub(super) read_only: bool,
    pub(super) beside: Option<Arc<TableGroup>>,
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

/// Methods that set what is on or off.
macro_rules! switches {
    ($($(#[$doc:meta])* $name:ident;)*) => { $(
        $(#[$doc])*
        pub fn $name(mut self, on: bool) -> PoolConfig {
            self.$name = on;
            self
        }
    )* };
}

impl PoolConfig {
    /// The defaults: 4 KiB pages, checksums, a background cleaner, [`Proven`].
    pub fn new() -> PoolConfig {
        PoolConfig {
            page: ByteCount::kib(4),
            checksum: None,
            whole_pages: false,
            cleaner: true,
            huge_frames: true,
            deadline: Duration::from_secs(30),
            replacement: Box::new(Proven),
            before_write: None,
            batch: BATCH_MAX,
            overwrite: false,
            read_only: false,
            beside: None,
        }
    }

    /// Sets the page size, 4 KiB to 64 KiB, a power of two; 4 KiB unless set. Fixed when a file is
    /// created.
    pub fn page(mut self, page: ByteCount) -> PoolConfig {
        self.page = page;
        self
    }

    /// Sets whether pages carry checksums that are compared when they are read; on unless set, off with
    /// [`whole_pages`](PoolConfig::whole_pages), which have no room for them.
    pub fn checksum(mut self, on: bool) -> PoolConfig {
        self.checksum = Some(on);
        self
    }

    pub(super) fn has_checksums(&self) -> bool {
        self.checksum.unwrap_or(!self.whole_pages)
    }

    /// Sets how long a fix waits for a latch; 30 seconds unless set. Time in which the process is stopped
    /// does not count.
    pub fn deadline(mut self, deadline: Duration) -> PoolConfig {
        self.deadline = deadline;
        self
    }

    /// Sets which pages leave first; [`Proven`] unless set.
    pub fn replacement(mut self, policy: impl Replacement + 'static) -> PoolConfig {
        self.replacement = Box::new(policy);
        self
    }

    /// Calls `hook` before a page is written back, with the number given by
    /// [`ExclusiveGuard::set_lsn`](crate::pool::ExclusiveGuard::set_lsn), 0 without one. It makes the log durable up to that record. If it cannot, an
    /// error keeps the page in memory: eviction takes others, [`BufferPool::flush`](crate::pool::BufferPool::flush) fails. A panic
    /// counts as an error.
    pub fn before_write(
        mut self,
        hook: impl Fn(PageId, u64) -> Result<()> + Send + Sync + 'static,
    ) -> PoolConfig {
        self.before_write = Some(Box::new(hook));
        self
    }

    /// Sets the number of pages evicted at a time, 1 to 256; 256 unless set. For measurements.
    #[doc(hidden)]
    pub fn evict_batch(mut self, pages: usize) -> PoolConfig {
        self.batch = pages.clamp(1, BATCH_MAX);
        self
    }

    switches! {
        /// Sets whether all bytes of a page are the user's; off unless set. Fixed when a file is created. For
        /// programs with pages of a layout of their own, which fills them: the pool's trailer of 16 bytes is left
        /// out, and [`payload`](crate::pool::BufferPool::payload) is the page size.
        ///
        /// Such pages have no checksum: one that a power cut has torn, that the device has changed, or that is of an
        /// older table is read as if it were right, and the program has to tell by checks of its own. They have
        /// no number of a log record: `lsn` is 0, `set_lsn` panics, and [`before_write`](PoolConfig::before_write) is
        /// told 0.
        whole_pages;
        /// Sets whether a background thread writes dirty pages that are about to be evicted, and while the
        /// memory is nearly used up and nothing is evicted, those that are not changed any more; on unless set.
        cleaner;
        /// Sets whether the background thread puts runs of 2 MiB into huge pages while nothing leaves the
        /// pool; on unless set. Only pages of 4 KiB are, and only where the kernel can (6.1). It costs
        /// 0.6 ms of processor time a run, during which its pages cannot be changed; the first page to
        /// leave the run costs 0.2 to 0.4 ms more.
        huge_frames;
        /// Sets whether [`create`](PoolConfig::create) may overwrite what the file or device holds, an older table
        /// too; off unless set, and then it is refused.
        overwrite;
        /// Sets whether a table is only read; off unless set. It may then lie in a file that cannot be written,
        /// and several pools, also of several processes, may read it at once; they keep out a pool that changes
        /// it. Its pages are those of its last flush, or later ones that were evicted: whatever would change one
        /// is [`Error::Device`], [`try_fix_exclusive`](crate::pool::BufferPool::try_fix_exclusive) gives `None`, and
        /// a guard cannot be upgraded.
        read_only;
    }

    /// # Errors
    /// [`Error::Config`] for a bad page size, for checksums of whole pages, for a new table that is only read,
    /// and for a pool of another manager.
    pub(super) fn check(&self, is_new: bool, manager: &Arc<MemoryManager>) -> Result<()> {
        let is_other = |group: &Arc<TableGroup>| !Arc::ptr_eq(group.share().manager(), manager);
        if self.beside.as_ref().is_some_and(is_other) {
            return Err(Error::config("beside", "the other table is under another memory manager"));
        }
        if is_new && self.read_only {
            return Err(Error::config("read_only", "a new table has to be written"));
        }
        if self.whole_pages && self.has_checksums() {
            let reason = "pages have no room for one with `whole_pages`: leave one of the two out";
            return Err(Error::config("checksum", reason));
        }
        let page = self.page;
        if page.0.is_power_of_two() && (ByteCount::kib(4)..=ByteCount::kib(64)).contains(&page) {
            return Ok(());
        }
        Err(Error::config("page", format!("{page} is not a power of two from 4 KiB to 64 KiB")))
    }
}
