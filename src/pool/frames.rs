//! Frames: the memory of pages, and what it costs of the limit.
//!
//! Composes the parts that must agree about a page: its word and memory, its chunk, the resident set
//! and the account. What reads, writes, evicts or allocates pages goes through here.
//!
//! # Invariants
//! 1. A page is charged before it has memory and uncharged after it lost it.
//! 2. A page leaves a chunk singly only with `huge` cleared after the page was locked: the kernel would
//!    keep the memory of all 2 MiB otherwise, and the limit would not hold.

use super::account::PoolAccount;
use super::backoff::Backoff;
use super::chunk::{CHUNK_PAGES, Chunks};
use super::free_list::FreeLists;
use super::latch::LatchWord;
use super::page_table::PageTable;
use super::replacement::Replacement;
use super::resident::ResidentSet;
use crate::base::error::Result;
use crate::base::sync::{Rank, Ranked};
use crate::base::units::{ByteCount, PageId};
use crate::limit::manager::MemoryManager;
use std::sync::Arc;
use std::time::Duration;

/// Maximum number of pages that are written, or leave, together. One page a call costs several times as
/// much; see `docs/measurements/pool.md`, eviction.
pub(super) const BATCH_MAX: usize = 256;

/// Limit from which on page words are kept in huge pages: one of them is below 1 % then.
const HUGE_WORDS_LIMIT: ByteCount = ByteCount::mib(256);

/// Time slices given up for writes to end before a huge page is split all the same. Then the kernel
/// keeps the memory of what leaves the huge page until it needs it, or all of it has left.
const SPLIT_YIELDS_MAX: u32 = 10_000;

/// What all work on pages needs.
pub(super) struct Frames {
    pub(super) table: PageTable,
    pub(super) chunks: Chunks,
    pub(super) resident: ResidentSet,
    pub(super) account: PoolAccount,
    pub(super) free: Ranked<FreeLists>,
    /// How long a fix waits for a latch.
    deadline: Duration,
}

impl Frames {
    /// Frames for pages of `page` bytes on a store of `capacity`.
    ///
    /// # Errors
    /// When the address space cannot be reserved, or no account can be opened.
    pub(super) fn new(
        page: ByteCount,
        capacity: ByteCount,
        deadline: Duration,
        policy: Box<dyn Replacement>,
        manager: &Arc<MemoryManager>,
    ) -> Result<Frames> {
        let huge_words = manager.limit() >= HUGE_WORDS_LIMIT;
        let table = PageTable::new(page, capacity, huge_words)?;
        let pages = table.capacity();
        Ok(Frames {
            chunks: Chunks::new(pages, table.page_bytes(), huge_words)?,
            resident: ResidentSet::new(pages, policy)?,
            account: PoolAccount::open(manager)?,
            free: Ranked::new(Rank::Space, FreeLists::default()),
            table,
            deadline,
        })
    }

    /// A wait for a latch, as long as a fix waits.
    pub(super) fn backoff(&self) -> Backoff {
        Backoff::new(self.deadline)
    }

    fn bytes(&self, order: u8) -> ByteCount {
        ByteCount(self.table.buffer_bytes(order) as u64)
    }

    /// Charges the memory of a buffer.
    ///
    /// # Errors
    /// As for [`MemoryManager::charge`].
    pub(super) fn charge(&self, order: u8) -> Result<()> {
        self.account.charge(self.bytes(order))
    }

    pub(super) fn uncharge(&self, order: u8) {
        self.account.uncharge(self.bytes(order));
    }

    /// Charges the words and page tables around a page.
    ///
    /// # Errors
    /// As for [`MemoryManager::charge`].
    pub(super) fn charge_metadata(&self, page: PageId) -> Result<()> {
        self.chunks.charge(page, |bytes| self.account.charge(bytes))
    }

    /// Charges a buffer and the metadata around its pages, and keeps its chunks from being frozen:
    /// all that must be before it is locked in order to have memory.
    ///
    /// # Errors
    /// That of `charge`; nothing is charged but metadata then.
    pub(super) fn charge_all<E>(
        &self,
        page: PageId,
        order: u8,
        charge: impl Fn(ByteCount) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        charge(self.bytes(order))?;
        let last = PageId(page.0 + (1 << order) - 1);
        let metadata = self.chunks.charge(page, &charge);
        let metadata = metadata.and_then(|()| self.chunks.charge(last, &charge));
        metadata.inspect_err(|_| self.uncharge(order))?;
        self.chunks.note_multi_page(page, order);
        Ok(())
    }

    /// Adds a locked page, whose memory is charged, to the resident set.
    pub(super) fn arrive(&self, page: PageId, order: u8) {
        self.resident.insert(page, self.table.buffer_bytes(order));
    }

    /// Removes a locked page from the resident set; its memory is still there.
    pub(super) fn leave(&self, page: PageId, order: u8) {
        self.resident.remove(page, self.table.buffer_bytes(order));
    }

    /// Pages that fit into the pool at most.
    pub(super) fn pool_pages(&self) -> u64 {
        self.table.pages_in(self.account.account().ceiling())
    }

    /// The replacement clock.
    pub(super) fn stamp(&self) -> u64 {
        self.resident.stamp(self.pool_pages())
    }

    /// Locks a free page that leaves singly; not one that lies in a huge page again.
    pub(super) fn lock_victim(&self, page: PageId, seen: LatchWord) -> bool {
        let latch = self.table.word(page);
        let is_locked = latch.try_lock_victim(seen);
        if is_locked && self.chunks.is_huge(page) {
            latch.unlock(false);
            return false;
        }
        is_locked
    }

    /// Splits the huge page that a resident page lies in, if it does, so that it can leave. `false`
    /// while a page of it is written: the kernel splits none that a device holds.
    pub(super) fn split_around(&self, page: PageId) -> bool {
        if !self.chunks.is_huge(page) {
            return true;
        }
        let chunk = page.as_usize() / CHUNK_PAGES;
        let latches = self.table.words(chunk * CHUNK_PAGES..(chunk + 1) * CHUNK_PAGES);
        if latches.iter().any(|latch| latch.load().writing()) {
            return false;
        }
        self.split(page);
        true
    }

    /// As [`split_around`](Self::split_around), for a page that leaves in any case: waits a little
    /// for writes to end.
    pub(super) fn split_for(&self, page: PageId) {
        for _ in 0..SPLIT_YIELDS_MAX {
            if self.split_around(page) {
                return;
            }
            std::thread::yield_now();
        }
        self.split(page);
    }

    fn split(&self, page: PageId) {
        if self.chunks.end_huge(page.as_usize() / CHUNK_PAGES) {
            let split = self.table.mapping().split(self.table.offset(page) as usize);
            assert!(split.is_ok(), "splitting the huge page around {page}: {split:?}");
        }
    }
}
