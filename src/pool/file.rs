//! The table file: the store that holds the pages, and the queues to it.
#![expect(unsafe_code, reason = "lends page memory to the device")]

use super::account::PoolAccount;
use super::checksum;
use super::page_table::PageTable;
use crate::base::error::{Error, Result};
use crate::base::local::keep_local;
use crate::base::sync::{AtomicU64, Ordering, Rank, Ranked};
use crate::base::units::{ByteCount, PageId};
use crate::store::{Queue, Store};
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Requests in flight of one group.
pub(super) const DEPTH: usize = 64;

/// Longest wait for the device at a time.
pub(super) const WAIT: Duration = Duration::from_secs(1);

/// Bytes of a device queue, charged when one is opened: a thread that reads or writes a group of
/// pages uses one.
const QUEUE: ByteCount = ByteCount::kib(96);

/// One store with pages. Page `n` lies `n` page sizes from its beginning.
pub(super) struct TableFile {
    store: Arc<dyn Store>,
    path: PathBuf,
    /// Whether pages carry checksums.
    checksum: bool,
    idle: Ranked<Vec<Box<dyn Queue>>>,
    /// Queues that the limit had no room for when they were opened.
    uncharged: AtomicU64,
}

impl TableFile {
    pub(super) fn new(store: Arc<dyn Store>, path: PathBuf, checksum: bool) -> TableFile {
        let idle = Ranked::new(Rank::Leaf, Vec::new());
        TableFile { store, path, checksum, idle, uncharged: AtomicU64::new(0) }
    }

    pub(super) fn has_checksums(&self) -> bool {
        self.checksum
    }

    pub(super) fn describe(&self) -> String {
        self.store.describe()
    }

    /// An error that names the file.
    pub(super) fn refused(&self, reason: impl Into<String>) -> Error {
        Error::Device { path: self.path.clone(), reason: reason.into() }
    }

    /// A queue of the caller's own, idle.
    ///
    /// # Errors
    /// As for [`Store::open_queue`].
    pub(super) fn take_queue(&self, account: &PoolAccount) -> Result<Box<dyn Queue>> {
        let _ours = keep_local();
        let idle = self.idle.lock().pop();
        if let Some(queue) = idle {
            return Ok(queue);
        }
        let queue = self.store.open_queue(DEPTH as u32)?;
        // A thread that holds pages cannot wait for room: what does not fit is charged when it does.
        self.uncharged.fetch_add(1, Ordering::Relaxed);
        self.charge_queue(account);
        Ok(queue)
    }

    /// Charges a queue that is not charged yet, if there is one and it fits.
    fn charge_queue(&self, account: &PoolAccount) {
        let take = |uncharged: u64| uncharged.checked_sub(1);
        let taken = self.uncharged.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        if taken.is_ok() && !account.try_charge_fixed(QUEUE) {
            self.uncharged.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Keeps a queue for the next user. One that failed is not given back.
    pub(super) fn give_queue(&self, queue: Box<dyn Queue>, account: &PoolAccount) {
        if queue.in_flight() == 0 {
            let _ours = keep_local();
            self.idle.lock().push(queue);
        }
        if self.uncharged.load(Ordering::Relaxed) > 0 {
            self.charge_queue(account);
        }
    }

    /// Reads a locked page and compares its checksum.
    ///
    /// # Errors
    /// [`Error::Io`], also when the store panics; [`Error::CorruptPage`].
    pub(super) fn read_now(&self, table: &PageTable, page: PageId, order: u8) -> Result<()> {
        let (ptr, len, offset) = (table.ptr(page), table.buffer_bytes(order), table.offset(page));
        // SAFETY: the caller holds the page locked, so the memory is its own, and nobody writes
        // the page's place in the file.
        let read = survived(|| unsafe { self.store.read_now(offset, ptr, len) });
        let len = len as u64;
        let panicked = Error::Io { op: "read", offset, len, errno: crate::sys::EIO };
        read.unwrap_or(Err(panicked))?;
        self.check(table, page, order)
    }

    /// Compares the checksum of a locked page that was read.
    ///
    /// # Errors
    /// [`Error::CorruptPage`].
    pub(super) fn check(&self, table: &PageTable, page: PageId, order: u8) -> Result<()> {
        let is_whole = !self.checksum || checksum::matches(table, page, order);
        if is_whole { Ok(()) } else { Err(Error::CorruptPage { page }) }
    }
}

/// Calls code of the host, which may panic while this thread holds pages. `None`: it did.
pub(super) fn survived<T>(call: impl FnOnce() -> T) -> Option<T> {
    std::panic::catch_unwind(AssertUnwindSafe(call)).ok()
}
