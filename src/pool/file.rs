//! The table file: the store that holds the pages, and the queues to it.
#![expect(unsafe_code, reason = "lends page memory to the device")]

use super::account::PoolAccount;
use super::checksum;
use super::frames::BATCH_MAX;
use super::page_table::TablePages;
use crate::base::error::{Error, Result};
use crate::base::local::keep_local;
use crate::base::sync::{AtomicBool, AtomicU64, Ordering, Rank, Ranked};
use crate::base::units::{ByteCount, PageId};
use crate::store::{OnlyUser, Op, Queue, Request, may_come_late, queue_bytes};
use arrayvec::ArrayVec;
use std::cell::Cell;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::time::Duration;

/// Requests in flight of one group.
pub(super) const DEPTH: usize = 64;

/// Longest wait for the device at a time.
const WAIT: Duration = Duration::from_secs(1);

/// Reads that are submitted together.
const SUBMIT_EVERY: usize = 8;

/// Bytes that are charged when a device queue is opened: a thread that reads or writes a group of
/// pages uses one, and lists of the group on its stack.
fn queue_charge() -> ByteCount {
    const LISTS: usize = 12 << 10;
    ByteCount((queue_bytes(DEPTH as u32, 1) + LISTS) as u64)
}

/// Queues of a table that nobody uses at the moment.
#[derive(Default)]
struct Idle {
    queues: Vec<Box<dyn Queue>>,
    /// How many of them nobody has used since the last [`TableFile::close_spare`].
    spare: usize,
}

/// One store with pages. Page `n` lies `n` page sizes from its beginning.
pub(super) struct TableFile {
    store: OnlyUser,
    path: PathBuf,
    /// True if pages carry checksums.
    checksum: bool,
    /// Random, in the header and in the checksum of every page: a page of an older table on the same
    /// device is not taken for one of this. Set before the first page is read or written.
    identity: AtomicU64,
    /// A sync failed. What it covers is not known to be on the device, and a later sync that succeeds
    /// would not say so: the kernel tells of a write that it lost once.
    is_sync_lost: AtomicBool,
    idle: Ranked<Idle>,
    /// Queues that the limit had no room for when they were opened.
    uncharged: AtomicU64,
}

impl TableFile {
    pub(super) fn new(store: OnlyUser, path: PathBuf, checksum: bool) -> TableFile {
        let idle = Ranked::new(Rank::Leaf, Idle::default());
        TableFile {
            store,
            path,
            checksum,
            identity: AtomicU64::new(0),
            is_sync_lost: AtomicBool::new(false),
            idle,
            uncharged: AtomicU64::new(0),
        }
    }

    pub(super) fn identity(&self) -> u64 {
        self.identity.load(Ordering::Relaxed)
    }

    pub(super) fn set_identity(&self, identity: u64) {
        self.identity.store(identity, Ordering::Relaxed);
    }

    /// Waits until the device keeps what was written so far.
    ///
    /// # Errors
    /// [`Error::Device`] when it does not say so, and from then on.
    pub(super) fn sync(&self) -> Result<()> {
        const REMEDY: &str = "what was written since the last flush may not outlive a power cut, and \
            this pool flushes no more: open the table again, and repeat the changes from a log";
        if self.is_sync_lost.load(Ordering::Relaxed) {
            return Err(self.refused(format!("could not be synced before; {REMEDY}")));
        }
        let panicked = || Err(Error::Os { call: "sync (it panicked)", errno: crate::sys::EIO });
        let synced = survived(|| self.store.sync()).unwrap_or_else(panicked);
        synced.map_err(|error| {
            if matches!(error, Error::Io { errno: libc::ENOTCONN | libc::EAGAIN, .. }) {
                return error; // The server of a table is away, and has what it had.
            }
            self.is_sync_lost.store(true, Ordering::Relaxed);
            self.refused(format!("cannot be synced: {error}; {REMEDY}"))
        })
    }

    /// The error of a flush.
    pub(super) fn explain(&self, error: Error) -> Error {
        const REMEDY: &str = "the connection broke, and the server may carry the write out later, over what is written \
            there after it: these pages stay in memory, changed, and this pool flushes no more; see to it that the \
            server has ended that connection (start it anew), open the table again, and repeat the changes from a log";
        if may_come_late(&error) { self.refused(format!("{error}; {REMEDY}")) } else { error }
    }

    /// Gives the device's space of `pages` pages from `first` on back. A device that refuses keeps it.
    ///
    /// # Safety
    /// The pages are free, and locked by the caller; no header that counts says otherwise.
    pub(super) unsafe fn give_back(&self, table: &TablePages, first: PageId, pages: u64) {
        let (offset, len) = (table.offset(first), pages * table.page_size().0);
        // SAFETY: nobody needs the content of these pages: the caller's promise.
        let _ = survived(|| unsafe { self.store.discard(offset, len) });
    }

    pub(super) fn has_checksums(&self) -> bool {
        self.checksum
    }

    pub(super) fn describe(&self) -> String {
        self.store.describe()
    }

    /// The error of a transfer that came to nothing.
    fn failed(&self, op: &'static str, offset: u64, len: u64) -> Error {
        Error::Io { op, store: self.store.name(), offset, len, errno: crate::sys::EIO }
    }

    /// An error that names the file.
    pub(super) fn refused(&self, reason: impl Into<String>) -> Error {
        Error::Device { path: self.path.clone(), reason: reason.into() }
    }

    /// Reads or writes what `next` gives, many requests at a time, and calls `done` once for each, with
    /// what `next` gave beside it. Returns how many there were, at most [`BATCH_MAX`].
    ///
    /// # Errors
    /// As for [`Store::open_queue`](crate::store::Store::open_queue); `next` was not called then.
    ///
    /// # Safety
    /// Until `done` is called for it, nobody else uses the memory of a read or changes that of a write,
    /// and no other request touches its bytes of the file.
    pub(super) unsafe fn transfer<T: Copy + Default>(
        &self,
        account: &PoolAccount,
        op: Op,
        mut next: impl FnMut() -> Option<(T, *mut [u8], u64)>,
        mut done: impl FnMut(T, Result<()>),
    ) -> Result<usize> {
        let mut queue = self.take_queue(account)?;
        let mut tags: ArrayVec<T, BATCH_MAX> = ArrayVec::new();
        let done_count = Cell::new(0);
        let mut wait = |queue: &mut dyn Queue, tags: &[T]| {
            let waited = queue.wait(WAIT, &mut |token, result| {
                done_count.set(done_count.get() + 1);
                done(tags[token as usize], result);
            });
            // The kernel refuses to wait only when it is out of memory for it: try again.
            if waited.is_err() {
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        while !tags.is_full()
            && let Some((tag, segment, offset)) = next()
        {
            let token = tags.len() as u64;
            tags.push(tag);
            let request = Request { token, op, offset, segments: &[segment] };
            // SAFETY: the caller's promise.
            while !unsafe { queue.push(request) } {
                wait(&mut *queue, &tags);
            }
            // `next` makes room for a page that is read: meanwhile the device has work.
            if op == Op::Read && tags.len().is_multiple_of(SUBMIT_EVERY) {
                // What is not taken now is submitted with the next ones, or by the wait.
                let _ = queue.submit();
            }
        }
        while done_count.get() < tags.len() {
            wait(&mut *queue, &tags);
        }
        self.give_queue(queue, account);
        Ok(tags.len())
    }

    fn take_queue(&self, account: &PoolAccount) -> Result<Box<dyn Queue>> {
        let _ours = keep_local();
        let idle = {
            let mut idle = self.idle.lock();
            let queue = idle.queues.pop();
            idle.spare = idle.spare.min(idle.queues.len());
            queue
        };
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
        if taken.is_ok() && !account.try_charge_fixed(queue_charge()) {
            self.uncharged.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Keeps a queue for the next user.
    fn give_queue(&self, queue: Box<dyn Queue>, account: &PoolAccount) {
        let _ours = keep_local();
        self.idle.lock().queues.push(queue);
        if self.uncharged.load(Ordering::Relaxed) > 0 {
            self.charge_queue(account);
        }
    }

    /// Closes the queues that nobody has used since the last call, but for one: a process that has no
    /// descriptor left can write its pages.
    pub(super) fn close_spare(&self, account: &PoolAccount) {
        let _ours = keep_local();
        let spare = {
            let mut idle = self.idle.lock();
            let spare = idle.spare.min(idle.queues.len().saturating_sub(1));
            idle.spare = idle.queues.len() - spare;
            // The last one is used first: those at the front are spare.
            idle.queues.drain(..spare).collect::<Vec<_>>()
        };
        for queue in spare {
            drop(queue);
            let take = |uncharged: u64| uncharged.checked_sub(1);
            let taken = self.uncharged.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
            if taken.is_err() {
                account.uncharge_fixed(queue_charge());
            }
        }
    }

    /// Reads a locked page and compares its checksum.
    ///
    /// # Errors
    /// [`Error::Io`], also when the store panics; [`Error::CorruptPage`].
    pub(super) fn read_now(&self, table: &TablePages, page: PageId) -> Result<()> {
        let (len, offset) = (table.page_bytes(), table.offset(page));
        let into = table.segment(page, len);
        // SAFETY: the caller holds the page locked, so the memory is its own, and nobody writes
        // the page's place in the file.
        let read = survived(|| unsafe { self.store.read_now(offset, into) });
        let len = len as u64;
        read.unwrap_or_else(|| Err(self.failed("read", offset, len)))?;
        self.check(table, page)
    }

    /// Compares the checksum of a locked page that was read.
    ///
    /// # Errors
    /// [`Error::CorruptPage`].
    pub(super) fn check(&self, table: &TablePages, page: PageId) -> Result<()> {
        let is_whole = !self.checksum || checksum::matches(table, page, self.identity());
        if is_whole {
            Ok(())
        } else {
            Err(Error::CorruptPage { page, table: table.path().to_path_buf() })
        }
    }

    /// Sets the checksum of a page that the caller is about to write, if pages have one.
    pub(super) fn seal(&self, table: &TablePages, page: PageId) {
        if self.checksum {
            checksum::set(table, page, self.identity());
        }
    }
}

/// Calls code of the host, which may panic while this thread holds pages. `None`: it did.
pub(super) fn survived<T>(call: impl FnOnce() -> T) -> Option<T> {
    std::panic::catch_unwind(AssertUnwindSafe(call)).ok()
}
