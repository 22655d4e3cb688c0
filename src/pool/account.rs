//! The pool's account at the memory manager: its share of the limit.

use crate::base::error::Result;
use crate::base::sync::{AtomicU64, Ordering};
use crate::base::units::ByteCount;
use crate::limit::manager::{Account, MemoryManager};
use std::sync::Arc;

/// Less than 1/ROOM_PART of what a pool may have is free: it is nearly full. Twice as much as the manager
/// keeps free for those who need memory at once.
const ROOM_PART: u64 = 16;

/// What is charged for a pool.
pub(super) struct PoolAccount {
    manager: Arc<MemoryManager>,
    account: Account,
    /// Bytes that stay charged whatever the pool holds.
    fixed: AtomicU64,
}

impl PoolAccount {
    /// Opens an account.
    ///
    /// # Errors
    /// As for [`MemoryManager::join`].
    pub(super) fn open(manager: &Arc<MemoryManager>) -> Result<PoolAccount> {
        let account = manager.join("pool")?;
        Ok(PoolAccount { manager: Arc::clone(manager), account, fixed: AtomicU64::new(0) })
    }

    /// Charges what every pool needs.
    ///
    /// # Errors
    /// As for [`MemoryManager::charge`].
    pub(super) fn charge_fixed(&self, bytes: ByteCount) -> Result<()> {
        self.charge(bytes)?;
        self.fixed.store(bytes.0, Ordering::Relaxed);
        Ok(())
    }

    /// Charges bytes that the pool keeps until its end, if they fit without making room.
    pub(super) fn try_charge_fixed(&self, bytes: ByteCount) -> bool {
        let is_charged = self.account.try_charge(bytes);
        if is_charged {
            self.fixed.fetch_add(bytes.0, Ordering::Relaxed);
        }
        is_charged
    }

    pub(super) fn fixed(&self) -> ByteCount {
        ByteCount(self.fixed.load(Ordering::Relaxed))
    }

    /// Charges bytes; others make room for them.
    ///
    /// # Errors
    /// As for [`MemoryManager::charge`].
    pub(super) fn charge(&self, bytes: ByteCount) -> Result<()> {
        self.manager.charge(&self.account, bytes)
    }

    /// Charges bytes that the caller can do without.
    pub(super) fn charge_briefly(&self, bytes: ByteCount) -> bool {
        self.manager.charge_briefly(&self.account, bytes)
    }

    pub(super) fn uncharge(&self, bytes: ByteCount) {
        self.account.uncharge(bytes);
    }

    /// Whether pages may have to leave soon.
    pub(super) fn is_nearly_full(&self) -> bool {
        self.account.budget().free().0 < self.account.ceiling().0 / ROOM_PART
    }

    pub(super) fn account(&self) -> &Account {
        &self.account
    }

    pub(super) fn manager(&self) -> &Arc<MemoryManager> {
        &self.manager
    }
}
