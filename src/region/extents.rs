//! Extents: what the heap asks of a region.
//!
//! Addresses and lengths are multiples of 4 KiB, whatever the page size; `space` knows which
//! parts are in use. See `heap::source` for the contract.
#![expect(unsafe_code, reason = "clears memory that was just committed")]

use super::Region;
use crate::base::units::{ByteCount, PageId};
use std::ptr::NonNull;

impl Region {
    pub(crate) fn base(&self) -> usize {
        self.pager.region.addr()
    }

    pub(crate) fn span(&self) -> usize {
        self.pager.region.len()
    }

    pub(crate) fn reserve_extent(&self, len: ByteCount, align: ByteCount) -> Option<NonNull<u8>> {
        let offset = self.space.reserve(len.as_usize(), align.as_usize()).ok()?;
        NonNull::new((self.base() + offset) as *mut u8)
    }

    pub(crate) fn commit_extent(&self, ptr: NonNull<u8>, len: ByteCount) -> bool {
        let offset = ptr.as_ptr() as usize - self.base();
        if !self.space.commit(offset, len.as_usize(), self.capacity()) {
            return false;
        }
        for page in self.space.partly_covered(offset, len.as_usize()) {
            self.zero_part(page, offset, len.as_usize());
        }
        true
    }

    /// Clears what a page that other extents share has left of an earlier use.
    fn zero_part(&self, page: PageId, offset: usize, len: usize) {
        if self.pager.holds_nothing(page) {
            return;
        }
        let page_start = self.pager.addr(page) - self.base();
        let start = offset.max(page_start);
        let end = (offset + len).min(page_start + self.pager.page_bytes);
        zero((self.base() + start) as *mut u8, end - start);
    }

    pub(crate) fn decommit_extent(&self, ptr: NonNull<u8>, len: ByteCount) {
        self.space.decommit(ptr.as_ptr() as usize - self.base(), len.as_usize(), &self.pager);
    }

    pub(crate) fn release_extent(&self, ptr: NonNull<u8>, len: ByteCount) {
        self.space.release(ptr.as_ptr() as usize - self.base(), len.as_usize());
    }
}

/// Zeroes far memory.
fn zero(ptr: *mut u8, len: usize) {
    // SAFETY: the range lies in the region and was just committed: nobody uses it yet.
    unsafe { std::ptr::write_bytes(ptr, 0, len) };
}
