//! Which pages of the table are in use.

use super::BufferPool;
use super::guard::{ExclusiveGuard, Held};
use super::latch::{Note, ORDER_MAX};
use crate::base::error::{Error, Result};
use crate::base::local::keep_local;
use crate::base::sync::Ordering;
use crate::base::units::{ByteCount, PageId, SlotCount};

/// Free buffers by order. May allocate: the pool is not below any heap.
#[derive(Debug, Default)]
pub(super) struct Alloc {
    pub(super) free: [Vec<u64>; ORDER_MAX as usize + 1],
}

impl Alloc {
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
        let bytes = self.buffer_bytes(order);
        self.manager.charge(&self.account, ByteCount(bytes as u64))?;
        let Some(page) = self.take_page(order) else {
            self.account.uncharge(ByteCount(bytes as u64));
            return Ok(None);
        };
        let page = PageId(page);
        if let Err(error) = self.charge_metadata(page) {
            self.account.uncharge(ByteCount(bytes as u64));
            self.alloc.lock().put(order, page);
            return Err(error);
        }
        self.note_buffer(page, order);
        let latch = self.word(page);
        loop {
            let seen = latch.load();
            assert!(!seen.is_readable(), "{page} was free, but is {seen:?}");
            if latch.try_begin_load(seen) {
                break;
            }
            // Its neighbours are handed over, or it holds a part of the free list that is being
            // written: over soon.
            std::thread::yield_now();
        }
        // Memory that was dropped, or never touched, is zero.
        latch.loaded(false, 0, order);
        self.now_resident(page, order);
        let held = Held::new(self, latch, Note::locked(latch.load())).changed();
        Ok(Some(ExclusiveGuard(held)))
    }

    fn take_page(&self, order: u8) -> Option<u64> {
        let mut alloc = self.alloc.lock();
        if let Some(page) = alloc.take(order) {
            return Some(page);
        }
        let count = 1u64 << order;
        let end = self.end.load(Ordering::Relaxed);
        let after = end.checked_add(count).filter(|after| *after <= self.words.len() as u64)?;
        self.end.store(after, Ordering::Release);
        Some(end)
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
