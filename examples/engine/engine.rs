//! A transactional key-value store on a buffer pool, a B+-tree, and a log: the pattern to copy.
//!
//! The pool may write pages of the table in any order, and a crash may tear one. What is committed is in
//! the log before it is in the tree; the table is made whole by these rules (`book/src/how_to/engine.md` says why):
//!
//! 1. Between two checkpoints no page of the table is written: [`PoolConfig::before_write`] refuses. So
//!    after a crash the table is what the last checkpoint left, and the log has what was committed since.
//! 2. A checkpoint first puts all pages that it is about to write into the log, and makes that durable.
//!    Then it lets the pool write. A crash in the middle leaves pages that are old, new, or torn, and
//!    recovery overwrites each of them with what the log has ([`BufferPool::fix_to_overwrite`]).
//! 3. After the checkpoint's [`BufferPool::flush`] the log begins anew.
//!
//! Changes of a transaction are kept beside the tree until they are committed: to roll back is to
//! forget them. One transaction writes at a time; readers see all of a transaction or nothing.

// By its path: the test has this file in another place.
#[path = "log.rs"]
mod log;

use farheap::manager::MemoryManager;
use farheap::pool::{BufferPool, PoolConfig};
use farheap::store::Store;
use farheap::{ByteCount, Error, PageId};
use farheap_collections::pool::BTree;
pub(crate) use log::Medium;
use log::{Changes, Log, Record};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

/// What failed, for people.
pub(crate) type Result<T, E = Box<dyn std::error::Error + Send + Sync>> = std::result::Result<T, E>;

/// A checkpoint is due after as many changes as 1/DIRTY_PART of the pool has pages, and a transaction has
/// at most as many. A change makes a leaf dirty, and where it splits nodes two more: less than half of
/// the pool, so that there are always pages to evict.
const DIRTY_PART: u64 = 16;

/// An open store.
pub(crate) struct Engine {
    pool: Arc<BufferPool>,
    tree: BTree,
    /// Whether the pool may write pages: the log has them.
    may_write: Arc<AtomicBool>,
    /// Held exclusively while a transaction's changes go into the tree, so that nobody sees a part.
    visible: RwLock<()>,
    writer: Mutex<Writer>,
}

/// What the one transaction that writes needs.
struct Writer {
    log: Log,
    /// Changes since the last checkpoint, and how many there may be.
    changes: u64,
    changes_max: u64,
    /// Something failed between log and table: what is in memory may be neither old nor new.
    is_broken: bool,
}

/// A transaction: changes that nobody else sees before they are committed. Dropped, it never was.
pub(crate) struct Transaction<'e> {
    engine: &'e Engine,
    writer: MutexGuard<'e, Writer>,
    changes: Changes,
}

impl Engine {
    /// Opens the store whose table and log these are, and recovers from a crash; or creates one, if the
    /// log never began. Pages take at most `limit` of memory.
    pub(crate) fn open(
        table: Arc<dyn Store>,
        medium: Box<dyn Medium>,
        limit: ByteCount,
    ) -> Result<Engine> {
        let manager = MemoryManager::start(limit)?;
        let may_write = Arc::new(AtomicBool::new(true));
        let gate = Arc::clone(&may_write);
        // The cleaner would only be refused.
        let config = PoolConfig::new().cleaner(false).before_write(move |_, _| {
            let is_open = gate.load(Ordering::Acquire);
            let refused =
                Error::BadRange { reason: "pages are written by checkpoints only".into() };
            if is_open { Ok(()) } else { Err(refused) }
        });
        let changes_max = limit.get() / 4096 / DIRTY_PART;
        let writer = |log| Writer { log, changes: 0, changes_max, is_broken: false };
        let engine = |pool, tree, log| Engine {
            pool,
            tree,
            may_write,
            visible: RwLock::new(()),
            writer: Mutex::new(writer(log)),
        };
        let medium = match Log::open(medium)? {
            Ok(log) => {
                let pool = config.open_on(table, &manager)?;
                let tree = BTree::open(&pool, log.root());
                let engine = engine(pool, tree, log);
                engine.recover(&mut engine.lock())?;
                return Ok(engine);
            }
            Err(medium) => medium,
        };
        let pool = config.create_on(table, &manager)?;
        let tree = BTree::create(&pool)?;
        // The table is durable before the log says that there is one.
        pool.flush()?;
        let log = Log::create(medium, tree.root())?;
        let engine = engine(pool, tree, log);
        engine.may_write.store(false, Ordering::Release);
        Ok(engine)
    }

    fn lock(&self) -> MutexGuard<'_, Writer> {
        // A thread that panicked with the lock left the flag behind that says so.
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the table what it was at the end of the log.
    fn recover(&self, writer: &mut Writer) -> Result<()> {
        let mut in_use = None;
        writer.log.read(|record| {
            if let Record::Checkpoint(ranges) = record {
                in_use = Some(ranges);
            }
            Ok(())
        })?;
        // What another process has read may be in memory only, and is about to be acted upon.
        writer.log.sync()?;
        writer.log.rewind()?;
        let Some(in_use) = in_use else {
            // The table is as the last checkpoint left it.
            self.may_write.store(false, Ordering::Release);
            let mut changes = 0;
            writer.log.read(|record| {
                if let Record::Commit(committed) = record {
                    changes += committed.len() as u64;
                    self.apply(&committed)?;
                }
                Ok(()) // A checkpoint was begun that has written nothing.
            })?;
            writer.changes = changes;
            return Ok(());
        };
        // A checkpoint was writing: what it has not, or not whole, is written again.
        writer.log.read(|record| {
            if let Record::Image(page, bytes) = record {
                self.pool.fix_to_overwrite(page)?.copy_from_slice(bytes);
            }
            Ok(())
        })?;
        let is_used = |page: &PageId| in_use.iter().any(|(a, b)| (*a..*b).contains(&page.0));
        let freed: Vec<PageId> = self.pool.pages_in_use().filter(|page| !is_used(page)).collect();
        for page in freed {
            self.pool.fix_to_overwrite(page)?.free();
        }
        self.end_checkpoint(writer)
    }

    /// Begins a transaction; waits for the one that writes at the moment.
    pub(crate) fn begin(&self) -> Result<Transaction<'_>> {
        let writer = self.lock();
        if writer.is_broken {
            return Err("an earlier commit failed half-way: open the store again".into());
        }
        Ok(Transaction { engine: self, writer, changes: Changes::new() })
    }

    /// The committed value of a key.
    pub(crate) fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let _all_or_nothing = self.visible.read().unwrap_or_else(PoisonError::into_inner);
        Ok(self.tree.get(key)?)
    }

    /// Calls `each` for committed entries from `from` on, in order, while it returns `true`. No
    /// transaction is committed meanwhile: `each` must not wait for one.
    pub(crate) fn scan(
        &self,
        from: &[u8],
        mut each: impl FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<()> {
        let _all_or_nothing = self.visible.read().unwrap_or_else(PoisonError::into_inner);
        let mut cursor = self.tree.cursor(from);
        while let Some((key, value)) = cursor.next()? {
            if !each(key, value) {
                break;
            }
        }
        Ok(())
    }

    fn apply(&self, changes: &Changes) -> Result<()> {
        for (key, value) in changes {
            match value {
                Some(value) => self.tree.insert(key, value).map(drop)?,
                None => self.tree.remove(key).map(drop)?,
            }
        }
        Ok(())
    }

    /// Brings the table up to date, so that the log can begin anew.
    pub(crate) fn checkpoint(&self) -> Result<()> {
        self.checkpoint_as(&mut self.lock())
    }

    fn checkpoint_as(&self, writer: &mut Writer) -> Result<()> {
        writer.is_broken = true;
        let dirty: Vec<PageId> = self.pool.dirty_pages().collect();
        for page in dirty {
            let bytes = self.pool.fix_shared(page)?;
            writer.log.append(&Record::Image(page, &bytes))?;
        }
        writer.log.append(&Record::Checkpoint(self.ranges_in_use()))?;
        writer.log.sync()?;
        self.end_checkpoint(writer)?;
        writer.is_broken = false;
        Ok(())
    }

    /// The log has all that is to be written.
    fn end_checkpoint(&self, writer: &mut Writer) -> Result<()> {
        self.may_write.store(true, Ordering::Release);
        let flushed = self.pool.flush();
        self.may_write.store(false, Ordering::Release);
        flushed?;
        writer.changes = 0;
        writer.log.begin_epoch()
    }

    /// Pages in use, as ranges.
    fn ranges_in_use(&self) -> Vec<(u64, u64)> {
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        for page in self.pool.pages_in_use() {
            match ranges.last_mut() {
                Some((_, end)) if *end == page.0 => *end += 1,
                _ => ranges.push((page.0, page.0 + 1)),
            }
        }
        ranges
    }
}

impl Transaction<'_> {
    /// The value of a key as this transaction sees it.
    pub(crate) fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        match self.changes.get(key) {
            Some(changed) => Ok(changed.clone()),
            None => self.engine.get(key),
        }
    }

    /// Sets a key's value.
    pub(crate) fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        // What cannot be applied must not be committed.
        if key.len() + value.len() + 8 > self.engine.pool.payload() / 4 {
            return Err("the entry is too long".into());
        }
        self.change(key, Some(value.to_vec()))
    }

    /// Removes a key.
    pub(crate) fn remove(&mut self, key: &[u8]) -> Result<()> {
        self.change(key, None)
    }

    fn change(&mut self, key: &[u8], value: Option<Vec<u8>>) -> Result<()> {
        if self.changes.len() as u64 >= self.writer.changes_max {
            return Err("the transaction is too long for the memory that the store may take".into());
        }
        self.changes.insert(key.to_vec(), value);
        Ok(())
    }

    /// Makes the changes durable, and then visible. After an error they may be either, as after a
    /// crash: opening the store again tells.
    pub(crate) fn commit(mut self) -> Result<()> {
        if self.changes.is_empty() {
            return Ok(());
        }
        let (engine, writer) = (self.engine, &mut *self.writer);
        writer.is_broken = true;
        let record = Record::Commit(std::mem::take(&mut self.changes));
        writer.log.append(&record)?;
        writer.log.sync()?;
        // Committed from here on.
        if let Record::Commit(changes) = &record {
            let _all_or_nothing = engine.visible.write().unwrap_or_else(PoisonError::into_inner);
            engine.apply(changes)?;
            writer.changes += changes.len() as u64;
        }
        writer.is_broken = false;
        if writer.changes >= writer.changes_max {
            engine.checkpoint_as(writer)?;
        }
        Ok(())
    }
}
