//! Which pages of the table are in use.

use super::BufferPool;
use super::guard::{ExclusiveGuard, Held};
use super::latch::{HeldWord, ORDER_MAX};
use crate::base::error::{Error, Result};
use crate::base::local::keep_local;
use crate::base::sync::Ordering;
use crate::base::units::{ByteCount, PageId, SlotCount};

/// Free buffers by order. May allocate: the pool is not below any heap.
#[derive(Debug, Default)]
pub(super) struct FreeLists {
    pub(super) free: [Vec<u64>; ORDER_MAX as usize + 1],
}

impl FreeLists {
    fn take(&mut self, order: u8) -> Option<u64> {
        self.free[usize::from(order)].pop()
    }

    fn put(&mut self, order: u8, page: PageId) {
        let _ours = keep_local();
        self.free[usize::from(order)].push(page.0);
    }
}

impl BufferPool {
    /// Allocates a page, zeroed and fixed exclusively.
    ///
    /// # Errors
    /// [`Error::StoreFull`] when the table has reached its capacity, [`Error::OutOfMemory`].
    pub fn allocate(&self) -> Result<ExclusiveGuard<'_>> {
        self.allocate_locked(0)?.ok_or_else(|| self.full())
    }

    pub(super) fn full(&self) -> Error {
        Error::StoreFull { slots: SlotCount(self.words.len() as u64) }
    }

    pub(super) fn allocate_locked(&self, order: u8) -> Result<Option<ExclusiveGuard<'_>>> {
        let bytes = ByteCount(self.buffer_bytes(order) as u64);
        self.manager.charge(&self.account, bytes)?;
        let page = match self.take_page(order) {
            Ok(Some(page)) => page,
            none => {
                self.account.uncharge(bytes);
                return none.map(|_| None);
            }
        };
        self.note_buffer(page, order);
        let latch = self.word(page);
        // Memory that was dropped, or never touched, is zero.
        latch.loaded(false, 0, order);
        self.now_resident(page, order);
        let held = Held::new(self, latch, HeldWord::locked(latch.load())).changed();
        Ok(Some(ExclusiveGuard(held)))
    }

    /// Takes a free page, or a fresh one behind the last, and locks it; its words are charged.
    /// `None` when there is none.
    fn take_page(&self, order: u8) -> Result<Option<PageId>> {
        loop {
            let mut alloc = self.alloc.lock();
            if let Some(page) = alloc.take(order) {
                drop(alloc);
                return self.lock_free(PageId(page), order).map(Some);
            }
            let end = self.end.load(Ordering::Relaxed);
            let after = end.checked_add(1 << order);
            let Some(after) = after.filter(|after| *after <= self.words.len() as u64) else {
                return Ok(None);
            };
            let (first, last) = (PageId(end), PageId(after - 1));
            if !self.is_charged(first) || !self.is_charged(last) {
                drop(alloc);
                self.charge_metadata(first)?;
                self.charge_metadata(last)?;
            } else if self.make_parts(first, order) && self.lock_absent(first) {
                // Last: who sees the page within the table finds its word locked.
                self.end.store(after, Ordering::Release);
                return Ok(Some(first));
            } else {
                drop(alloc);
                std::thread::yield_now();
            }
        }
    }

    /// Locks a page that was in the free list.
    fn lock_free(&self, page: PageId, order: u8) -> Result<PageId> {
        if let Err(error) = self.charge_metadata(page) {
            self.alloc.lock().put(order, page);
            return Err(error);
        }
        while !self.lock_absent(page) {
            std::thread::yield_now();
        }
        Ok(page)
    }

    /// Locks a page that is not allocated. `false`: its chunk is frozen, or it holds a
    /// part of the free list that is being written; both are over soon.
    fn lock_absent(&self, page: PageId) -> bool {
        let seen = self.word(page).load();
        assert!(!seen.is_readable(), "{page} was free, but is {seen:?}");
        self.word(page).try_begin_load(seen)
    }

    /// Drops a page that is locked and makes its number free.
    pub(super) fn free_locked(&self, page: PageId, order: u8) {
        self.split_for(page);
        self.leave_resident(page, order);
        self.discard_buffer(page, order);
        self.word(page).freed();
        self.account.uncharge(ByteCount(self.buffer_bytes(order) as u64));
        self.alloc.lock().put(order, page);
    }
}
