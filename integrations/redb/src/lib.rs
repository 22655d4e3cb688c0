//! A storage backend of [redb] in a buffer pool of [farheap]: databases and the rest of a program under one limit.
//!
//! redb caches its file by itself, up to a size that is set once. With [`PoolBackend`] the pages are in a
//! [`BufferPool`] instead, whose memory a [`MemoryManager`](farheap::manager::MemoryManager) takes back when another
//! consumer needs it, and which grows into what the others leave. Give redb itself a small cache, such as 4 MiB: it
//! keeps what a transaction has written, and is beside the manager's limit. A page that is not in it is copied from the
//! pool: where all of a database fits, a lookup takes 1.3 us, and 0.5 in a file with a cache that holds everything.
//!
//! ```text
//! table file:  page 0, 1 header of the pool | page 2: magic, length | page 3.. the database, page by page
//! ```
//! Pages that were never written are free in the pool, take no space, and read as zeros.
//!
//! # Durability
//! A commit is durable when redb says so. [`sync_data`](StorageBackend::sync_data) writes all pages that were written
//! since the last one and syncs the device; where pages came into use or were freed, it flushes the pool, which syncs twice.
//! In between the pool may write pages in any order, as the kernel does with a file. The tests cut the power of a
//! simulated device at many moments: what was committed is there.
//!
//! # Errors
//! Those of farheap are inside of the [`std::io::Error`] that redb returns, whose kind is `StorageFull` where the table
//! is full, `OutOfMemory` where the manager has no room within the pool's deadline, `TimedOut` where a latch is not free,
//! and that of the device's error number. As after any I/O error, redb refuses to go on: drop the database and open it
//! again. If the device could not be synced, drop the pool too and open both, because its flushes fail from then on.
//!
//! # Limits
//! 1. Pages have no checksums of the pool's (`whole_pages`), because redb's pages fill them: redb finds damage where it
//!    looks for it, in `check_integrity` and after a crash.
//! 2. redb doubles a database that grows, and beyond 4 GiB adds 4 GiB; the length must fit into the table's capacity.
//!    Unused capacity costs nothing, so make it large.
//! 3. One process: the pool locks the table file, and a table has one backend. redb's modes with several processes are
//!    refused.
//! 4. The file is a pool's, not a redb file. To move data, copy tables from one [`Database`](redb::Database) to another.
//!
//! # Examples
//! ```
//! use farheap::ByteCount;
//! use farheap::manager::MemoryManager;
//! use farheap::pool::PoolConfig;
//! use farheap_redb::PoolBackend;
//! use redb::{Database, ReadableDatabase, TableDefinition};
//!
//! const WORDS: TableDefinition<u64, &str> = TableDefinition::new("words");
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let manager = MemoryManager::start(ByteCount::mib(64))?;
//! let path = std::env::temp_dir().join(format!("words-{}", std::process::id()));
//! let pool = PoolConfig::new().whole_pages(true).create(&path, ByteCount::gib(64), &manager)?;
//! let backend = PoolBackend::new(&pool)?;
//! let database = Database::builder().set_cache_size(4 << 20).create_with_backend(backend)?;
//! let writing = database.begin_write()?;
//! writing.open_table(WORDS)?.insert(7, "seven")?;
//! writing.commit()?;
//! assert_eq!(database.begin_read()?.open_table(WORDS)?.get(7)?.expect("committed").value(), "seven");
//! # std::fs::remove_file(path)?;
//! # Ok(())
//! # }
//! ```
//!
//! [farheap]: https://docs.rs/farheap
//! [redb]: https://docs.rs/redb

/// Its program is compiled as those of this page.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod blocks;
mod streams;

use blocks::BlockSet;
use farheap::pool::{BufferPool, OptimisticGuard};
use farheap::{Error, PageId};
use redb::{BackendError, StorageBackend};
use std::io;
use std::ops::{Bound, Range};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use streams::Streams;

/// The page with magic and length; those of the database follow.
const META: PageId = PageId(2);
const FIRST: u64 = META.0 + 1;
const MAGIC: u64 = u64::from_le_bytes(*b"farredb1");

/// Addresses of the pools that have a backend: what one knows of its table is wrong once another has changed it.
static TAKEN: Mutex<Vec<usize>> = Mutex::new(Vec::new());

/// The pages of a redb database in a buffer pool.
///
/// The pool's table is the database's alone. The pool may be used meanwhile, for its statistics, or to have other
/// tables [beside](farheap::pool::PoolConfig::beside) this one.
#[derive(Debug)]
pub struct PoolBackend {
    pool: Arc<BufferPool>,
    page_bytes: u64,
    /// Length in bytes, as in page [`META`].
    len: AtomicU64,
    changes: Mutex<Changes>,
    /// Held while a page comes into use in part. redb's readers write too, beside its writer: of two that write to one
    /// large page for the first time, the second would get zeros and lose what the first has written.
    claiming: Mutex<()>,
    /// Held while pages are being synced: who comes meanwhile finds nothing written, and must not return before that is
    /// durable.
    syncing: Mutex<()>,
    streams: Mutex<Streams>,
}

/// Pages in use, and what is not durable yet.
#[derive(Debug, Default)]
struct Changes {
    /// Pages of the database that are in use in the pool.
    used: BlockSet,
    /// Pages that were written since the last sync; some more than once.
    written: Vec<PageId>,
    /// Pages came into use or were freed since the last sync: the pool's header has to be written.
    is_reshaped: bool,
}

impl Changes {
    /// Notes a page that was written. Transactions that need not be durable write some again and again without a sync.
    fn note(&mut self, page: PageId) {
        if self.written.len() == self.written.capacity() {
            self.written.sort_unstable();
            self.written.dedup();
            // Not at the next page again.
            self.written.reserve(self.written.len() + 1);
        }
        self.written.push(page);
    }
}

/// A part of a page, and where it is in a buffer.
struct Part {
    page: PageId,
    /// Bytes within the page.
    within: Range<usize>,
    /// The same bytes within the buffer.
    buffer: Range<usize>,
}

impl PoolBackend {
    /// Takes a table for a database: a new one becomes an empty database, another one is that of an earlier backend.
    ///
    /// # Errors
    /// [`Error::Config`] unless the pool has [whole pages](farheap::pool::PoolConfig::whole_pages); [`Error::Device`]
    /// when the table has pages of another user, or another backend, which ends with its database; those of the pool.
    pub fn new(pool: &Arc<BufferPool>) -> farheap::Result<PoolBackend> {
        let page_bytes = pool.page_size().0;
        if pool.payload() as u64 != page_bytes {
            let reason = "pages of redb fill pages of the pool: set it".to_owned();
            return Err(Error::Config { key: "whole_pages".to_owned(), reason });
        }
        let refused = |reason: &str| Error::Device {
            path: pool.path().to_owned(),
            reason: reason.to_owned(),
        };
        let mut taken = taken();
        if taken.contains(&Arc::as_ptr(pool).addr()) {
            return Err(refused("is the table of another backend"));
        }
        if pool.pages_in_use().next().is_none() {
            let mut meta = pool.fix_to_overwrite(META)?;
            meta[..8].copy_from_slice(&MAGIC.to_le_bytes());
            drop(meta);
            // A crash before this leaves a table without pages, which is new again.
            pool.flush()?;
        }
        let foreign = || refused("is a table of another user, not of a redb database");
        let words = pool.read_optimistic(META, |meta| (meta.u64(0), meta.u64(8)));
        let (Some(MAGIC), Some(len)) = words.map_err(|error| match error {
            Error::NoSuchPage { .. } => foreign(),
            error => error,
        })?
        else {
            return Err(foreign());
        };
        let mut used = BlockSet::default();
        pool.pages_in_use().filter(|page| page.0 >= FIRST).for_each(|page| used.insert(page.0));
        let changes = Changes { used, ..Changes::default() };
        taken.push(Arc::as_ptr(pool).addr());
        Ok(PoolBackend {
            pool: Arc::clone(pool),
            page_bytes,
            len: AtomicU64::new(len),
            changes: Mutex::new(changes),
            claiming: Mutex::default(),
            syncing: Mutex::default(),
            streams: Mutex::default(),
        })
    }

    /// The parts of pages that a range of the database covers.
    fn parts(&self, offset: u64, len: usize) -> impl ExactSizeIterator<Item = Part> {
        let (page_bytes, end) = (self.page_bytes, offset + len as u64);
        let count = end.div_ceil(page_bytes) - offset / page_bytes;
        (0..count as usize).map(move |at| self.part(at as u64, offset, len))
    }

    /// The part of this number, of those that a range covers.
    fn part(&self, at: u64, offset: u64, len: usize) -> Part {
        let block = offset / self.page_bytes + at;
        let start = block * self.page_bytes;
        let (from, to) = (start.max(offset), (start + self.page_bytes).min(offset + len as u64));
        Part {
            page: PageId(FIRST + block),
            within: (from - start) as usize..(to - start) as usize,
            buffer: (from - offset) as usize..(to - offset) as usize,
        }
    }

    /// Fails where a range is not within the database.
    fn check(&self, offset: u64, len: usize) -> io::Result<()> {
        let end = offset.checked_add(len as u64);
        if end.is_none_or(|end| end > self.len.load(Ordering::Acquire)) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }

    /// Reads ahead what follows, if a read continues a stream.
    fn read_ahead(&self, pages: Range<u64>) {
        // Not waited for: another thread's read is noted then, and a stream goes on at the next page.
        let Ok(mut streams) = self.streams.try_lock() else { return };
        let Some(ahead) = streams.note(pages) else { return };
        drop(streams);
        let end = FIRST + self.len.load(Ordering::Acquire).div_ceil(self.page_bytes);
        let pages: Vec<PageId> = (ahead.start..ahead.end.min(end)).map(PageId).collect();
        self.pool.prefetch(&pages);
    }

    fn changes(&self) -> MutexGuard<'_, Changes> {
        // No change is left half made by a panic: each is one assignment or one push.
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes a page; `change` gets it as it is, or zeros if it is not in use or `is_whole` says that all of it is
    /// overwritten.
    fn change(
        &self,
        page: PageId,
        is_whole: bool,
        change: impl FnOnce(&mut [u8]),
    ) -> farheap::Result<()> {
        let claim = || self.claiming.lock().unwrap_or_else(PoisonError::into_inner);
        let claiming = (!is_whole).then(claim);
        let is_used = self.changes().used.contains(page.0);
        let mut guard = if is_used && !is_whole {
            drop(claiming);
            self.pool.fix_exclusive(page)?
        } else {
            let guard = self.pool.fix_to_overwrite(page)?;
            let mut changes = self.changes();
            changes.is_reshaped |= !is_used;
            changes.used.insert(page.0);
            guard
        };
        change(&mut guard);
        self.changes().note(page);
        Ok(())
    }

    /// Frees what is behind a length: it reads as zeros when the database grows again.
    fn cut(&self, len: u64) -> farheap::Result<()> {
        let behind = FIRST + len.div_ceil(self.page_bytes);
        let last = FIRST + len / self.page_bytes;
        if behind > last && self.changes().used.contains(last) {
            let kept = (len % self.page_bytes) as usize;
            self.change(PageId(last), false, |bytes| bytes[kept..].fill(0))?;
        }
        let freed = self.changes().used.from(behind);
        for page in freed {
            self.pool.fix_to_overwrite(PageId(page))?.free();
            let mut changes = self.changes();
            changes.used.remove(page);
            changes.is_reshaped = true;
        }
        self.changes().written.retain(|page| page.0 < behind);
        Ok(())
    }
}

fn taken() -> MutexGuard<'static, Vec<usize>> {
    TAKEN.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for PoolBackend {
    fn drop(&mut self) {
        // The pool is alive, so no other has its address.
        taken().retain(|pool| *pool != Arc::as_ptr(&self.pool).addr());
    }
}

/// The error that redb gets: farheap's is inside.
fn io_error(error: Error) -> io::Error {
    let kind = match &error {
        Error::StoreFull { .. } => io::ErrorKind::StorageFull,
        Error::OutOfMemory { .. } => io::ErrorKind::OutOfMemory,
        Error::LatchTimeout { .. } => io::ErrorKind::TimedOut,
        Error::Io { errno, .. } | Error::Os { errno, .. } => {
            io::Error::from_raw_os_error(*errno).kind()
        }
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error)
}

/// Fails for ranges other than the whole storage, which the pool has locked already: no other process has it.
fn whole(start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
    match (start, end) {
        (Bound::Unbounded | Bound::Included(0), Bound::Unbounded) => Ok(()),
        _ => Err(BackendError::Unsupported),
    }
}

impl StorageBackend for PoolBackend {
    fn len(&self) -> io::Result<u64> {
        Ok(self.len.load(Ordering::Acquire))
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.check(offset, out.len())?;
        let first = FIRST + offset / self.page_bytes;
        let read = |pages: &[PageId], out: &mut [u8]| {
            let copy = |guard: OptimisticGuard<'_>| {
                let part = self.part(guard.id().0 - first, offset, out.len());
                let copied = guard.copy_to(part.within.start, &mut out[part.buffer]);
                // The last copy of a page counts; a guard that is no longer valid reads again.
                copied.expect("a part is within its page, and no page of the pool is read into");
            };
            match pages {
                [page] => self.pool.read_optimistic(*page, copy),
                _ => self.pool.read_many(pages, 0, copy, |_, ()| ()),
            }
        };
        let count = self.parts(offset, out.len()).len();
        self.read_ahead(first..first + count as u64);
        // One page is the usual case, and needs no list.
        if count > 1 {
            let pages: Vec<PageId> = self.parts(offset, out.len()).map(|part| part.page).collect();
            match read(&pages, out) {
                Err(Error::NoSuchPage { .. }) => {} // One of them was never written.
                ended => return ended.map_err(io_error),
            }
        }
        for part in self.parts(offset, out.len()) {
            match read(&[part.page], out) {
                Err(Error::NoSuchPage { .. }) => out[part.buffer].fill(0),
                ended => ended.map_err(io_error)?,
            }
        }
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let last = PageId(FIRST + len.div_ceil(self.page_bytes).saturating_sub(1));
        if self.pool.page_address(last).is_none() {
            let table = self.pool.path().display();
            let reason = format!("{table}: the table has no room for a database of {len} bytes");
            return Err(io::Error::new(io::ErrorKind::StorageFull, reason));
        }
        let set = || {
            let before = self.len.load(Ordering::Acquire);
            // Reads behind the new end fail from here on. Behind the old one there are pages after a crash that kept the
            // length and not which pages are free, or after an error.
            self.len.store(len.min(before), Ordering::Release);
            self.cut(len.min(before))?;
            let mut meta = self.pool.fix_exclusive(META)?;
            meta[8..16].copy_from_slice(&len.to_le_bytes());
            self.changes().note(META);
            self.len.store(len, Ordering::Release);
            Ok(())
        };
        set().map_err(io_error)
    }

    fn sync_data(&self) -> io::Result<()> {
        let _syncing = self.syncing.lock().unwrap_or_else(PoisonError::into_inner);
        let (written, is_reshaped) = {
            let mut changes = self.changes();
            (std::mem::take(&mut changes.written), std::mem::take(&mut changes.is_reshaped))
        };
        let synced = if is_reshaped {
            self.pool.flush()
        } else if written.is_empty() {
            Ok(())
        } else {
            self.pool.flush_pages(&written)
        };
        synced.map_err(|error| {
            let mut changes = self.changes();
            changes.written.extend(written);
            changes.is_reshaped |= is_reshaped;
            io_error(error)
        })
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.check(offset, data.len())?;
        for Part { page, within, buffer } in self.parts(offset, data.len()) {
            let is_whole = within.len() as u64 == self.page_bytes;
            self.change(page, is_whole, |bytes| bytes[within].copy_from_slice(&data[buffer]))
                .map_err(io_error)?;
        }
        Ok(())
    }

    fn try_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        whole(start, end).map(|()| true)
    }

    fn try_lock_shared_range(
        &self,
        start: Bound<u64>,
        end: Bound<u64>,
    ) -> Result<bool, BackendError> {
        whole(start, end).map(|()| true)
    }

    fn unlock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        whole(start, end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_are_written_again_take_no_more_memory() {
        let mut changes = Changes::default();
        (0..100_000).for_each(|at| changes.note(PageId(at % 10)));
        assert!(changes.written.len() <= 64, "{}", changes.written.len());
        changes.written.sort_unstable();
        changes.written.dedup();
        assert_eq!(changes.written, (0..10).map(PageId).collect::<Vec<_>>());
    }
}
