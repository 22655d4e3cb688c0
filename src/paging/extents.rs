//! Extents: what of a region's address space is in use, and whether more may be.
//!
//! The heap cuts its extents from here (`heap::ExtentSource` has the contract), in whole pages; `ranges` knows which
//! parts are in use.
#![expect(unsafe_code, reason = "clears memory of the region")]

use crate::base::error::{Error, Result};
use crate::base::local::keep_local;
use crate::base::sync::{AtomicBool, Ordering::Relaxed};
use crate::base::units::{ByteCount, PageCount, PageId, SlotCount};
use crate::paging::diagnostics;
use crate::paging::kernel_filled;
use crate::paging::page::PAGE;
use crate::paging::page::word::State;
use crate::paging::pager::Pager;
use crate::paging::pager::discard;
use crate::paging::pager::health::NO_SLOT;
use crate::paging::ranges::RangeAllocator;
use crate::paging::table_sizes::{Committed, tables_allowed, tables_max};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

/// See [module](self).
#[derive(Debug)]
pub(crate) struct Extents {
    pager: Arc<Pager>,
    ranges: RangeAllocator,
    /// See [`end`](Extents::end).
    is_over: AtomicBool,
}

impl Extents {
    /// All of a region's address space, unused.
    ///
    /// # Errors
    /// When the tables of ranges cannot be mapped.
    pub(in crate::paging) fn new(pager: Arc<Pager>) -> Result<Extents> {
        let table = pager.table();
        let ranges = RangeAllocator::new(table.start(), table.len())?;
        Ok(Extents { pager, ranges, is_over: AtomicBool::new(false) })
    }

    /// Refuses hints and control from now on: the heap over the region has ended.
    #[cfg(feature = "heap")]
    pub(crate) fn end(&self) {
        self.is_over.store(true, Relaxed);
    }

    /// # Errors
    /// [`Error::NotRunning`] after the [`end`](Extents::end).
    pub(in crate::paging) fn check_runs(&self) -> Result<()> {
        if self.is_over.load(Relaxed) { Err(Error::NotRunning) } else { Ok(()) }
    }

    /// The first address.
    fn base(&self) -> usize {
        self.pager.table().start()
    }

    /// Pages that are committed.
    pub(in crate::paging) fn committed(&self) -> PageCount {
        PageCount(self.ranges.committed().pages)
    }

    /// Maximum number of bytes that the tables of what is committed take, while `resident` pages are in memory.
    pub(in crate::paging) fn tables_max(&self, resident: PageCount) -> ByteCount {
        tables_max(&self.ranges.committed(), resident, self.pager.slots().map().slots())
    }

    /// Pages from the first on of which one was ever reserved.
    pub(in crate::paging) fn fresh_pages(&self) -> PageCount {
        self.ranges.fresh_pages()
    }

    /// A length in whole pages.
    pub(in crate::paging) fn whole_pages(&self, len: ByteCount) -> Result<usize> {
        if len.0 == 0 {
            return Err(Error::BadRange { reason: "length is zero".into() });
        }
        let len = len.as_usize().checked_next_multiple_of(PAGE);
        len.ok_or(Error::BadRange { reason: "length overflows".into() })
    }

    /// Where a range lies.
    pub(in crate::paging) fn offset_of(&self, ptr: *const u8, len: usize) -> Result<usize> {
        let end = (ptr as usize).checked_add(len);
        let end = end.ok_or(Error::BadRange { reason: "length overflows".into() })?;
        let region = self.base()..self.base() + self.pager.table().len();
        if (ptr as usize) < region.start || end > region.end {
            let reason = format!("{len} bytes at {ptr:p} lie outside of the region, {region:#x?}");
            return Err(Error::BadRange { reason: reason.into() });
        }
        Ok(ptr as usize - region.start)
    }

    /// First and number of the pages that a range touches.
    pub(in crate::paging) fn pages_of(
        &self,
        ptr: *const u8,
        len: ByteCount,
    ) -> Result<(PageId, PageCount)> {
        self.check_runs()?;
        if len.0 == 0 {
            return Err(Error::BadRange { reason: "length is zero".into() });
        }
        let offset = self.offset_of(ptr, len.as_usize())?;
        let first = offset / PAGE;
        let end = (offset + len.as_usize()).div_ceil(PAGE);
        Ok((PageId(first as u64), PageCount((end - first) as u64)))
    }

    /// Reserves and commits `len` bytes at a multiple of `align`.
    ///
    /// # Errors
    /// As [`Region::map`](crate::paging::region::Region::map).
    pub(in crate::paging) fn map(&self, len: usize, align: usize) -> Result<NonNull<u8>> {
        if !self.pager.table().is_here() {
            return Err(Error::Forked { what: "a region" });
        }
        let offset = self.reserve_at(len, align)?;
        let capacity = self.capacity();
        if let Err(error) = self.ranges.commit(offset, len, |after| self.fits(after, capacity)) {
            self.ranges.release(offset, len);
            return Err(if let Error::StoreFull { .. } = error { self.full() } else { error });
        }
        let addr = self.base() + offset;
        Ok(NonNull::new(addr as *mut u8).expect("a region is never at address zero"))
    }

    /// Takes back a range of whole pages; in a forked child, nothing.
    ///
    /// # Errors
    /// [`Error::BadRange`] when the range is not one of this region's, or not all of it is mapped.
    ///
    /// # Safety
    /// As for [`Region::unmap`](crate::paging::region::Region::unmap).
    pub(in crate::paging) unsafe fn unmap(&self, ptr: NonNull<u8>, len: usize) -> Result<()> {
        let offset = self.offset_of(ptr.as_ptr(), len)?;
        if !(offset | len).is_multiple_of(PAGE) {
            return Err(Error::BadRange { reason: "does not consist of whole pages".into() });
        }
        if !self.pager.table().is_here() {
            return Ok(());
        }
        if !self.ranges.is_live(offset, len) {
            return Err(Error::BadRange { reason: "is not mapped".into() });
        }
        self.decommit(ptr, ByteCount(len as u64));
        self.release(ptr, ByteCount(len as u64));
        Ok(())
    }

    /// As [`unmap`](Self::unmap), for a range of which parts may be free; returns how many bytes were not.
    ///
    /// # Errors
    /// [`Error::BadRange`] when the range is not one of this region's, or a part of it is reserved for others.
    ///
    /// # Safety
    /// As there.
    pub(in crate::paging) unsafe fn unmap_parts(
        &self,
        ptr: NonNull<u8>,
        len: usize,
    ) -> Result<usize> {
        let offset = self.offset_of(ptr.as_ptr(), len)?;
        let mut free = 0;
        if self.pager.table().is_here() && !self.ranges.is_live(offset, len) {
            // What a system call that nobody saw has mapped over a free part goes, too.
            let open = |range| self.pager.table().open(range);
            free = self.ranges.claim(offset, len, false, open, |_| Ok(()))?.unwrap_or_default();
        }
        // SAFETY: as the caller promises; what was free is nobody else's.
        unsafe { self.unmap(ptr, len) }?;
        Ok(len - free)
    }

    /// True if all of a range lies in the region, and the program has mapped nothing over it.
    pub(in crate::paging) fn is_far(&self, ptr: NonNull<u8>, len: ByteCount) -> bool {
        self.offset_of(ptr.as_ptr(), len.as_usize()).is_ok()
            && self.pager.mapper().owns(ptr.as_ptr() as usize, len.as_usize())
    }

    /// Pages that limit and device can keep together.
    fn capacity(&self) -> PageCount {
        let pager = &self.pager;
        let failing = !matches!(pager.health().write_errno(), 0 | NO_SLOT);
        // What was said when there was no room, the evictor takes back in its next turn only.
        let has_room = pager.pool().available() >= pager.pool().watermarks().low();
        if failing && pager.health().is_exhausted() && !has_room {
            return PageCount(0);
        }
        // What the device has taken is all that can be said while it takes no more.
        let stored = if failing { pager.slots().map().in_use() } else { self.slots_with_space() };
        let resident = pager
            .pool()
            .managed()
            .guaranteed(pager.budget().limit())
            .0
            // Pages without a slot cannot have that.
            .saturating_sub(pager.pool().watermarks().high());
        PageCount(stored.0.saturating_add(resident / PAGE as u64))
    }

    /// Slots that the store has space for now: others may fill its file system.
    fn slots_with_space(&self) -> SlotCount {
        let pager = &self.pager;
        let room = SlotCount(pager.slots().store().room().0 / PAGE as u64);
        let all = pager.slots().map().slots().min(room);
        SlotCount(all.0.saturating_sub(pager.slots().map().in_limbo().0))
    }

    /// Why nothing more can be mapped.
    fn full(&self) -> Error {
        let store = self.pager.slots().store();
        let (room, capacity) = (store.room(), store.capacity());
        let what_to_do = "free space there, or have it reserved at the start: `reserve:on`";
        let reason = match self.pager.health().write_errno() {
            0 | NO_SLOT if room >= capacity => return self.pager.slots().full(),
            0 | NO_SLOT => {
                format!("its file system has space for {room} of {capacity} only; {what_to_do}")
            }
            errno => {
                let write = Error::Os { call: "a write", errno: errno.cast_signed() };
                format!(
                    "it takes no writes ({write}): until it does, there is no more far memory than the limit \
                     and what it has taken"
                )
            }
        };
        Error::Device { path: store.describe().into(), reason }
    }

    /// Checks that limit and device can keep so much, of `capacity` pages, and describe it.
    ///
    /// # Errors
    /// [`Error::StoreFull`], [`Error::LimitExceeded`].
    fn fits(&self, committed: &Committed, capacity: PageCount) -> Result<()> {
        let limit = self.pager.budget().limit();
        let resident = PageCount(limit.0 / PAGE as u64);
        let most = tables_max(committed, resident, self.pager.slots().map().slots());
        // Tables take room of the limit from pages: without them here, touching the last pages granted was SIGBUS.
        if committed.pages.saturating_add(most.0.div_ceil(PAGE as u64)) > capacity.0 {
            return Err(self.pager.slots().full());
        }
        let allowed = tables_allowed(limit);
        if most > allowed {
            let far = ByteCount(committed.pages * PAGE as u64);
            // Asked for by a heap, an error is only read.
            let _ours = keep_local();
            let reason = format!(
                "the tables of {far} of far memory may take {most}, of {allowed} that a limit of \
                 {limit} allows them: raise the limit"
            );
            return Err(Error::LimitExceeded { reason });
        }
        Ok(())
    }

    /// Reserves addresses; `None`: no range is left.
    pub(crate) fn reserve(&self, len: ByteCount, align: ByteCount) -> Option<NonNull<u8>> {
        let offset = self.reserve_at(len.as_usize(), align.as_usize()).ok()?;
        NonNull::new((self.base() + offset) as *mut u8)
    }

    fn reserve_at(&self, len: usize, align: usize) -> Result<usize> {
        let mapper = self.pager.mapper();
        loop {
            let offset = self.ranges.reserve(len, align, |range| self.pager.table().open(range))?;
            let start = self.base() + offset;
            if mapper.owns(start, len) {
                return Ok(offset);
            }
            // A system call that nobody saw has mapped something over what was free: that has its owner.
            let mut next = start;
            let split = |theirs: Range<usize>, end: usize| {
                let (at, len) = (theirs.start - self.base(), theirs.len());
                // (A chunk that was being opened at that moment looks like theirs.)
                if len > 0 && mapper.owns(theirs.start, len) {
                    self.ranges.release(at, len);
                } else if len > 0 {
                    self.ranges.commit(at, len, |_| Ok(())).expect("nothing is refused");
                }
                if theirs.end < end {
                    self.ranges.release(theirs.end - self.base(), end - theirs.end);
                }
            };
            mapper.each_far(start, len, |from, len| {
                split(next..from, from + len);
                next = from + len;
                Ok(())
            })?;
            split(next..start + len, start + len);
        }
    }

    /// Gives the program a range of its choice, for which see [`Region::claim`].
    ///
    /// # Errors
    /// As there.
    ///
    /// [`Region::claim`]: crate::paging::region::Region::claim
    pub(in crate::paging) fn claim(
        &self,
        ptr: NonNull<u8>,
        len: usize,
        all_free: bool,
    ) -> Result<Option<usize>> {
        let offset = self.offset_of(ptr.as_ptr(), len)?;
        if !self.pager.table().is_here() {
            return Err(Error::Forked { what: "a region" });
        }
        let (open, capacity) = (|range| self.pager.table().open(range), self.capacity());
        self.ranges.claim(offset, len, all_free, open, |after| self.fits(after, capacity))
    }

    /// Commits a range, which reads as zero then. `false`: limit and device could not keep it.
    pub(crate) fn commit(&self, ptr: NonNull<u8>, len: ByteCount) -> bool {
        let (offset, capacity) = (ptr.as_ptr() as usize - self.base(), self.capacity());
        let fits = |after: &Committed| self.fits(after, capacity);
        let committed = self.ranges.commit(offset, len.as_usize(), fits);
        if let Err(error @ Error::LimitExceeded { .. }) = &committed {
            diagnostics::warn("far memory is refused", error);
        }
        committed.is_ok()
    }

    /// Makes a range read as zero that the caller alone uses. Pages that it covers whole are not
    /// read from the device for that.
    ///
    /// # Safety
    /// The range is committed, nobody else uses it, and nobody needs what it holds.
    pub(crate) unsafe fn clear(&self, ptr: NonNull<u8>, len: ByteCount) {
        let mut start = ptr.as_ptr() as usize - self.base();
        let end = start + len.as_usize();
        while start < end {
            let page = PageId((start / PAGE) as u64);
            let part_end = ((start / PAGE + 1) * PAGE).min(end);
            let whole = part_end - start == PAGE;
            if whole && self.is_away(page) {
                discard::discard(&self.pager, page, PageCount(1));
            } else if !kernel_filled::holds_nothing(self.pager.memory(), page) {
                let part = (self.base() + start) as *mut u8;
                // SAFETY: the part lies in the caller's range.
                unsafe { part.write_bytes(0, part_end - start) };
            }
            start = part_end;
        }
    }

    /// True if a page's content is elsewhere than in the region, or lost.
    fn is_away(&self, page: PageId) -> bool {
        use State::{Cooling, Filling, Poisoned, Stored, Writing};
        let state = self.pager.word(page).load().state();
        matches!(state, Stored | Filling | Cooling | Writing | Poisoned)
    }

    /// Drops what committed pages hold.
    pub(crate) fn decommit(&self, ptr: NonNull<u8>, len: ByteCount) {
        let offset = ptr.as_ptr() as usize - self.base();
        let discard = |first, count| discard::discard(&self.pager, first, count);
        self.ranges.decommit(offset, len.as_usize(), discard);
    }

    /// Takes reserved addresses back.
    pub(crate) fn release(&self, ptr: NonNull<u8>, len: ByteCount) {
        let offset = ptr.as_ptr() as usize - self.base();
        self.ranges.release(offset, len.as_usize());
    }
}
