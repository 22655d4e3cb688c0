//! The pool's account at the memory manager: its share of the limit, which all its tables have in common.

use crate::base::error::{Error, Result};
use crate::base::sync::{AtomicBool, AtomicU64, Ordering};
use crate::base::units::ByteCount;
use crate::limit::manager::{Account, MemoryManager};
use crossbeam_utils::CachePadded;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Less than 1/ROOM_PART of what a pool may have is free: it is nearly full. Twice as much as the manager
/// keeps free for those who need memory at once.
const ROOM_PART: u64 = 16;

/// Parts that the tables of one pool share: one account, and the clock by which pages are valued.
pub(super) struct PoolShare {
    manager: Arc<MemoryManager>,
    account: Account,
    /// Pages that left any of the tables: the replacement clock.
    clock: Arc<CachePadded<AtomicU64>>,
    tables: AtomicU64,
    /// Pages of the last batch could not be written.
    is_troubled: AtomicBool,
    /// Time of the clock when a charge waited in vain for pages to be written, and 1; 0: none did.
    in_vain: AtomicU64,
}

impl PoolShare {
    /// Opens an account.
    ///
    /// # Errors
    /// As for [`MemoryManager::join`].
    pub(super) fn open(manager: &Arc<MemoryManager>) -> Result<Arc<PoolShare>> {
        Ok(Arc::new(PoolShare {
            manager: Arc::clone(manager),
            account: manager.join("pool")?,
            clock: Arc::default(),
            tables: AtomicU64::new(0),
            is_troubled: AtomicBool::new(false),
            in_vain: AtomicU64::new(0),
        }))
    }

    pub(super) fn account(&self) -> &Account {
        &self.account
    }

    pub(super) fn manager(&self) -> &Arc<MemoryManager> {
        &self.manager
    }

    /// Tables that are open, at least 1.
    pub(super) fn tables(&self) -> u64 {
        self.tables.load(Ordering::Relaxed).max(1)
    }
}

/// Charges for one table of a pool.
pub(super) struct PoolAccount {
    share: Arc<PoolShare>,
    /// The table file, for errors.
    path: PathBuf,
    /// Bytes that stay charged whatever the table holds in memory.
    fixed: AtomicU64,
}

impl Drop for PoolAccount {
    fn drop(&mut self) {
        self.share.tables.fetch_sub(1, Ordering::Relaxed);
    }
}

impl PoolAccount {
    pub(super) fn of(share: &Arc<PoolShare>, path: &Path) -> PoolAccount {
        share.tables.fetch_add(1, Ordering::Relaxed);
        let (share, path) = (Arc::clone(share), path.to_path_buf());
        PoolAccount { share, path, fixed: AtomicU64::new(0) }
    }

    pub(super) fn clock(&self) -> Arc<CachePadded<AtomicU64>> {
        Arc::clone(&self.share.clock)
    }

    /// Tables of the pool.
    pub(super) fn tables(&self) -> u64 {
        self.share.tables()
    }

    /// Charges what every table needs.
    ///
    /// # Errors
    /// As for [`MemoryManager::charge`].
    pub(super) fn charge_fixed(&self, bytes: ByteCount) -> Result<()> {
        self.charge(bytes)?;
        self.fixed.store(bytes.0, Ordering::Relaxed);
        Ok(())
    }

    /// Charges bytes that the table keeps until it is closed, if they fit without making room.
    pub(super) fn try_charge_fixed(&self, bytes: ByteCount) -> bool {
        let is_charged = self.share.account.try_charge(bytes);
        if is_charged {
            self.fixed.fetch_add(bytes.0, Ordering::Relaxed);
        }
        is_charged
    }

    /// Gives back bytes that [`try_charge_fixed`](Self::try_charge_fixed) charged.
    pub(super) fn uncharge_fixed(&self, bytes: ByteCount) {
        self.fixed.fetch_sub(bytes.0, Ordering::Relaxed);
        self.share.account.uncharge(bytes);
    }

    pub(super) fn fixed(&self) -> ByteCount {
        ByteCount(self.fixed.load(Ordering::Relaxed))
    }

    /// Charges bytes; others make room for them. While pages cannot be written, charges wait for one
    /// deadline together: once one has, the next ones try to make room once, until a page leaves.
    ///
    /// # Errors
    /// As for [`MemoryManager::charge`], naming the table file.
    pub(super) fn charge(&self, bytes: ByteCount) -> Result<()> {
        let share = &*self.share;
        let is_brief = self.is_troubled() && share.in_vain.load(Ordering::Relaxed) == self.left();
        let charged = share.manager.charge_for(&share.account, bytes, is_brief);
        charged.map_err(|error| self.refused(error))
    }

    /// Pages that have left, and 1.
    fn left(&self) -> u64 {
        self.share.clock.load(Ordering::Relaxed) + 1
    }

    #[cold]
    fn refused(&self, mut error: Error) -> Error {
        if let Error::OutOfMemory { by, .. } = &mut error {
            *by = self.path.display().to_string();
            if self.is_troubled() {
                self.share.in_vain.store(self.left(), Ordering::Relaxed);
            }
        }
        error
    }

    fn is_troubled(&self) -> bool {
        self.share.is_troubled.load(Ordering::Relaxed)
    }

    /// Notes whether pages of a batch could not be written.
    pub(super) fn set_troubled(&self, is_troubled: bool) {
        if self.is_troubled() != is_troubled {
            self.share.is_troubled.store(is_troubled, Ordering::Relaxed);
        }
    }

    /// Charges bytes that the caller can do without.
    pub(super) fn charge_briefly(&self, bytes: ByteCount) -> bool {
        self.share.manager.charge_briefly(&self.share.account, bytes)
    }

    pub(super) fn uncharge(&self, bytes: ByteCount) {
        self.share.account.uncharge(bytes);
    }

    /// True if pages may have to leave soon.
    pub(super) fn is_nearly_full(&self) -> bool {
        let account = &self.share.account;
        account.budget().free().0 < account.ceiling().0 / ROOM_PART
    }

    pub(super) fn account(&self) -> &Account {
        &self.share.account
    }

    pub(super) fn manager(&self) -> &Arc<MemoryManager> {
        &self.share.manager
    }
}
