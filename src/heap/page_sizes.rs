//! Which size the blocks of each page have, for those that are freed without saying it.
//!
//! jemalloc knows it too: by its tree of addresses and the extent's record, three loads that depend on each other, in a
//! function that first looks up the thread. That took a third of a pair of `malloc` and `free` under `farheap run`. Here
//! it is one byte for each page, written where jemalloc hands a block out, in the slow path. A forked child has the table
//! too, as it has jemalloc's. Uses `magazine` and `sys`; used by `far_arenas`.
//!
//! # Invariants
//! 1. All blocks that start on a page and are in use have the same class: jemalloc has slabs of one class, and no
//!    extent shares a page with another one. Each of them was noted when jemalloc handed it out; so what a slab says
//!    that was here before is written over before a block of another class is in use.

#![expect(unsafe_code, reason = "keeps a table in a mapping")]

use super::jemalloc::PAGE;
use super::placement::TIERS_MAX;
use super::thread_cache::magazine;
use crate::base::error::{Error, Result};
use crate::sys::{block, inherited};
use std::alloc::Layout;
use std::slice;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

/// A mapping, for ever: who has a tier, which lives for ever, has it too.
type SizeTable = &'static [AtomicU8];

/// Tables of tiers that have ended.
static SPARES: Mutex<[Option<SizeTable>; TIERS_MAX]> = Mutex::new([None; TIERS_MAX]);

/// See the module's documentation.
pub(super) struct PageSizes {
    /// Address of the first page.
    base: usize,
    /// A block's class and 1; 0 where the page's blocks have none, or there are none. Relaxed: who frees a block has its
    /// address from the thread that it was handed out to.
    classes: SizeTable,
}

// Every class and 1 fits.
const _: () = assert!(magazine::CLASSES < u8::MAX as usize);

impl PageSizes {
    /// Of the pages from `base` on, in the table of a tier that has ended, or a new one.
    ///
    /// # Errors
    /// [`Error::Os`] when the address space is exhausted.
    pub(super) fn new(base: usize, span: usize) -> Result<PageSizes> {
        let len = span.div_ceil(PAGE);
        let is_right = |spare: &Option<SizeTable>| spare.is_some_and(|table| table.len() == len);
        let mut spares = SPARES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(classes) =
            spares.iter_mut().find(|spare| is_right(spare)).and_then(Option::take)
        {
            return Ok(PageSizes { base, classes });
        }
        let mapped = inherited::map(len, PAGE);
        let refused = |errno| Error::Os { call: "mmap", errno: errno as i32 };
        let start = mapped.map_err(refused)?.cast::<AtomicU8>();
        // A huge page of it would be 2 MiB for what is 4 KiB mostly.
        block::avoid_huge_pages(start.addr().get(), len);
        // SAFETY: mapped above, for ever: `len` zeros, which are values of this type.
        Ok(PageSizes { base, classes: unsafe { slice::from_raw_parts(start.as_ptr(), len) } })
    }

    /// The tier has ended, and no block is in use any more: gives the table's memory back, and its address space to the
    /// next tier.
    pub(super) fn end(&self) {
        // SAFETY: a private mapping; zeros are values, and change what atomics hold, which others may do at any time.
        unsafe { block::discard(self.classes.as_ptr().addr(), self.classes.len()) };
        let mut spares = SPARES.lock().unwrap_or_else(PoisonError::into_inner);
        // As many as there are tiers: without a place are those of other lengths, in tests.
        if let Some(free) = spares.iter_mut().find(|spare| spare.is_none()) {
            *free = Some(self.classes);
        }
    }

    fn of(&self, ptr: *const u8) -> Option<&AtomicU8> {
        self.classes.get(ptr.addr().wrapping_sub(self.base) / PAGE)
    }

    /// Notes a block that jemalloc has handed out, or changed the size of.
    pub(super) fn note(&self, ptr: *const u8, layout: Layout) {
        let noted = magazine::class_of(layout).map_or(0, |class| class as u8 + 1);
        if let Some(class) = self.of(ptr)
            // Mostly it is the same: then the line stays shared between processors.
            && class.load(Relaxed) != noted
        {
            class.store(noted, Relaxed);
        }
    }

    /// The class of a block in use; `None`: jemalloc knows its size.
    #[inline]
    pub(super) fn class_of(&self, ptr: *const u8) -> Option<u8> {
        self.of(ptr)?.load(Relaxed).checked_sub(1)
    }

    /// The size of a block in use; `None`: jemalloc knows.
    #[inline]
    pub(super) fn size_of(&self, ptr: *const u8) -> Option<usize> {
        self.class_of(ptr).map(|class| magazine::block_size(usize::from(class)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_the_size_that_was_noted_last() {
        let base = 7 << 20;
        let sizes = PageSizes::new(base, 1 << 20).expect("a page");
        let at = |offset: usize| std::ptr::without_provenance(base + offset);
        let layout = |size, align| Layout::from_size_align(size, align).expect("valid");
        assert_eq!(sizes.size_of(at(0)), None, "nothing was noted");
        sizes.note(at(64), layout(100, 16));
        assert_eq!(sizes.size_of(at(4095)), Some(112));
        assert_eq!(sizes.size_of(at(4096)), None, "another page");
        sizes.note(at(0), layout(100, 64));
        assert_eq!(sizes.size_of(at(64)), Some(128), "its alignment has larger blocks");
        sizes.note(at(0), layout(magazine::SIZE_MAX + 1, 16));
        assert_eq!(sizes.size_of(at(0)), None, "jemalloc's own");
        assert_eq!(sizes.size_of(at(1 << 20)), None, "behind the last page");
        assert_eq!(sizes.size_of(std::ptr::without_provenance(base - 1)), None, "before the first");
    }
}
