//! Extents: what the heap asks of a region.
//!
//! Addresses and lengths are multiples of 4 KiB, whatever the page size; `space` knows which
//! parts are in use. See `heap::ExtentSource` for the contract.
#![expect(unsafe_code, reason = "clears memory of the region")]

use crate::base::error::{Error, Result};
use crate::base::units::{ByteCount, PageCount, PageId};
use crate::paging::diagnostics;
use crate::paging::kernel_filled;
use crate::paging::mapped_over;
use crate::paging::page::word::State;
use crate::paging::pager::discard;
use crate::paging::region::Region;
use crate::paging::table_sizes::Committed;
use crate::sys::vm::KERNEL_PAGE;
use std::ptr::NonNull;

impl Region {
    /// [`map`](Region::map) in units of 4 KiB: of the last page, what lies behind the range may be in use
    /// by others. For memory that is taken back in parts.
    ///
    /// # Errors
    /// As [`map`](Region::map).
    #[doc(hidden)]
    pub fn map_part_pages(&self, len: ByteCount) -> Result<NonNull<u8>> {
        if !self.is_here() {
            return Err(Error::Forked { what: "a region" });
        }
        let len = len.as_usize().next_multiple_of(KERNEL_PAGE);
        let offset = self.ranges.reserve(len, self.page_size().as_usize())?;
        let capacity = self.capacity();
        if let Err(error) = self.ranges.commit(offset, len, |after| self.fits(after, capacity)) {
            self.ranges.release(offset, len);
            return Err(error);
        }
        let start = NonNull::new((self.base() + offset) as *mut u8).expect("not at address zero");
        let tail = len % self.page_size().as_usize();
        if tail > 0 {
            // SAFETY: lies in what was just committed.
            let last = unsafe { start.add(len - tail) };
            // SAFETY: the last part of what was just committed, which nobody else uses.
            unsafe { self.clear_extent(last, ByteCount(tail as u64)) };
        }
        Ok(start)
    }

    /// Takes back a part of what [`map_part_pages`](Region::map_part_pages) returned: any multiple of 4 KiB.
    ///
    /// # Errors
    /// [`Error::BadRange`] when the range is not one of this region's, or not all of it is mapped.
    ///
    /// # Safety
    /// As for [`unmap`](Region::unmap).
    #[doc(hidden)]
    pub unsafe fn unmap_part_pages(&self, ptr: NonNull<u8>, len: ByteCount) -> Result<()> {
        let offset = self.offset_of(ptr.as_ptr(), len.as_usize())?;
        if !(offset | len.as_usize()).is_multiple_of(KERNEL_PAGE) {
            return Err(Error::BadRange { reason: "is not in whole kernel pages" });
        }
        if !self.ranges.is_live(offset, len.as_usize()) {
            return Err(Error::BadRange { reason: "is not mapped" });
        }
        self.decommit_extent(ptr, len);
        self.release_extent(ptr, len);
        Ok(())
    }

    /// Whether all of a range is far memory still: in this region, and nothing mapped over it by the program.
    #[doc(hidden)]
    #[must_use]
    pub fn is_far(&self, ptr: NonNull<u8>, len: ByteCount) -> bool {
        self.offset_of(ptr.as_ptr(), len.as_usize()).is_ok()
            && self.pager.mapper().owns(ptr.as_ptr() as usize, len.as_usize())
    }

    pub(crate) fn base(&self) -> usize {
        self.pager.table().start()
    }

    pub(crate) fn span(&self) -> usize {
        self.pager.table().len()
    }

    pub(crate) fn reserve_extent(&self, len: ByteCount, align: ByteCount) -> Option<NonNull<u8>> {
        let offset = self.ranges.reserve(len.as_usize(), align.as_usize()).ok()?;
        NonNull::new((self.base() + offset) as *mut u8)
    }

    /// Commits a range; returns how many bytes at its start and at its end may hold what an earlier
    /// use has left, because they lie in pages that the range covers only in part. They are not
    /// cleared here: such a page may be on the device, and the caller holds an allocator's locks.
    pub(crate) fn commit_extent(&self, ptr: NonNull<u8>, len: ByteCount) -> Option<(usize, usize)> {
        let (offset, len) = (ptr.as_ptr() as usize - self.base(), len.as_usize());
        let capacity = self.capacity();
        let fits = |after: &Committed| self.fits(after, capacity);
        if let Err(error) = self.ranges.commit(offset, len, fits) {
            if let Error::LimitExceeded { .. } = error {
                diagnostics::warn("far memory is refused", &error);
            }
            return None;
        }
        let page_bytes = self.pager.page_bytes();
        let (mut head, mut tail) = (0, 0);
        for page in self.ranges.partly_covered(offset, len) {
            // What holds nothing now reads as zero in this range until the caller writes there.
            if kernel_filled::holds_nothing(&self.pager, page) {
                continue;
            }
            let start = page.as_usize() * page_bytes;
            match start < offset {
                true => head = len.min(start + page_bytes - offset),
                false => tail = offset + len - start,
            }
        }
        Some((head, tail))
    }

    /// Makes a range read as zero that the caller alone uses. Pages that it covers whole are not
    /// read from the device for that.
    ///
    /// # Safety
    /// The range is committed, nobody else uses it, and nobody needs what it holds.
    pub(crate) unsafe fn clear_extent(&self, ptr: NonNull<u8>, len: ByteCount) {
        let page_bytes = self.pager.page_bytes();
        let mut start = ptr.as_ptr() as usize - self.base();
        let end = start + len.as_usize();
        while start < end {
            let page = PageId((start / page_bytes) as u64);
            let part_end = ((start / page_bytes + 1) * page_bytes).min(end);
            let whole = part_end - start == page_bytes;
            if whole && self.is_away(page) {
                discard::discard(&self.pager, page, PageCount(1));
            } else if !kernel_filled::holds_nothing(&self.pager, page) {
                let part = (self.base() + start) as *mut u8;
                // SAFETY: the part lies in the caller's range.
                unsafe { part.write_bytes(0, part_end - start) };
            }
            start = part_end;
        }
    }

    /// Whether a page's content is elsewhere than in the region, or lost.
    fn is_away(&self, page: PageId) -> bool {
        use State::{Cooling, Filling, Poisoned, Stored, Writing};
        let state = self.pager.word(page).load().state();
        matches!(state, Stored | Filling | Cooling | Writing | Poisoned)
    }

    pub(crate) fn decommit_extent(&self, ptr: NonNull<u8>, len: ByteCount) {
        let offset = ptr.as_ptr() as usize - self.base();
        // Before others can have them: of pages that stay in use, nobody else looks.
        for page in self.ranges.partly_covered(offset, len.as_usize()) {
            let start = page.as_usize() * self.pager.page_bytes();
            let part =
                start.max(offset)..(start + self.pager.page_bytes()).min(offset + len.as_usize());
            mapped_over::take_part_over(&self.pager, self.base() + part.start, part.len());
        }
        let discard = |first, count| discard::discard(&self.pager, first, count);
        self.ranges.decommit(offset, len.as_usize(), discard);
    }

    pub(crate) fn release_extent(&self, ptr: NonNull<u8>, len: ByteCount) {
        self.ranges.release(ptr.as_ptr() as usize - self.base(), len.as_usize());
    }
}
