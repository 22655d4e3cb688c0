//! Many pages at once: read by one request to the device, or fetched by the processor side by side.
//!
//! A processor waits for several misses of its cache at a time only as far as it sees the
//! instructions that cause them, and between two pages lie some forty. Told beforehand which pages
//! come, it fetches their words and bytes side by side (`book/src/design/pool.md`, hits).
#![expect(unsafe_code, reason = "tells the processor what will be read")]

use super::buffer_pool::BufferPool;
use super::frames::BATCH_MAX;
use super::guard::{Held, OptimisticGuard, SharedGuard};
use super::latch::HeldWord;
use super::page_table::TablePages;
use crate::base::error::Result;
use crate::base::units::PageId;
use arrayvec::ArrayVec;

/// Pages whose lines are asked for before the first of them is read: what a cache of the first
/// level takes beside everything else.
const AHEAD: usize = 32;

/// Prefetches the cache line at `place`, which need not be mapped.
#[inline]
fn ask_for<T>(place: *const T) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a hint, which reads nothing as far as the program can see and never faults (Intel's
    // and AMD's manuals, PREFETCHh); SSE is part of x86-64.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(place.cast())
    };
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = place;
}

/// Tells the processor that these pages are about to be read around `at`.
fn announce(table: &TablePages, pages: &[PageId], at: usize) {
    let at = at.min(table.page_bytes() - 1);
    for page in pages {
        if let Some(latch) = table.get(*page) {
            ask_for(latch);
            ask_for(table.ptr_of(latch).wrapping_add(at));
        }
    }
}

impl BufferPool {
    /// Reads from many pages optimistically, as [`read_optimistic`](Self::read_optimistic) does
    /// from one; `each` gets every page's place in `pages` and what was read of it, once. The order
    /// is that of `pages`, but for pages that are absent: they are read from the table file
    /// together and come last in their group of 32.
    ///
    /// The processor is told of all pages of a group before the first is read, so that it fetches
    /// their bytes around `at` side by side. For pages that are not in its caches this is faster
    /// than one call after the other; for pages that are, it is a little slower.
    ///
    /// `pages` should not name an absent page twice within 32, or it is waited for.
    ///
    /// # Errors
    /// As for [`fix_shared`](Self::fix_shared), for any of the pages; `each` was called for pages
    /// of the groups before, and may have been for some of the page's own.
    ///
    /// # Examples
    /// ```
    /// # use farheap::{ByteCount, pool::PoolConfig, store::MemStore};
    /// # use farheap::manager::MemoryManager;
    /// # let manager = MemoryManager::start(ByteCount::mib(16))?;
    /// # let store = std::sync::Arc::new(MemStore::new(ByteCount::mib(64))?);
    /// # let pool = PoolConfig::new().create_on(store, &manager)?;
    /// let mut pages = Vec::new();
    /// for n in 0..100u64 {
    ///     let mut page = pool.allocate()?;
    ///     page[..8].copy_from_slice(&n.to_le_bytes());
    ///     pages.push(page.id());
    /// }
    /// let mut sum = 0;
    /// pool.read_many(&pages, 0, |page| page.u64(0), |_, n| sum += n.unwrap_or(0))?;
    /// assert_eq!(sum, 4950);
    /// # Ok::<(), farheap::Error>(())
    /// ```
    pub fn read_many<T>(
        &self,
        pages: &[PageId],
        at: usize,
        mut read: impl FnMut(OptimisticGuard<'_>) -> T,
        mut each: impl FnMut(usize, T),
    ) -> Result<()> {
        let table = &self.frames.table;
        let mut first = 0;
        announce(table, &pages[..pages.len().min(AHEAD)], at);
        for group in pages.chunks(AHEAD) {
            let next = pages.len().min(first + AHEAD);
            announce(table, &pages[next..pages.len().min(next + AHEAD)], at);
            let mut absent: ArrayVec<_, AHEAD> = ArrayVec::new();
            for (index, page) in (first..).zip(group) {
                if table.get(*page).is_some_and(|latch| latch.load().is_absent()) {
                    absent.push((index, *page));
                } else {
                    each(index, self.read_optimistic(*page, &mut read)?);
                }
            }
            if !absent.is_empty() {
                let wanted: Vec<PageId> = absent.iter().map(|(_, page)| *page).collect();
                // Held until all of them were read.
                let _guards = self.fix_many(&wanted)?;
                for (index, page) in &*absent {
                    each(*index, self.read_optimistic(*page, &mut read)?);
                }
            }
            first = next;
        }
        Ok(())
    }

    /// Fixes many pages for reading; those that are absent are read at once. The guards come in
    /// the order of `pages`, which must not name a page twice.
    ///
    /// A thread that calls this should not hold pages exclusively: it may wait for another that
    /// does the same.
    ///
    /// # Errors
    /// As for [`fix_shared`](Self::fix_shared), for any of the pages; none is fixed then.
    pub fn fix_many(&self, pages: &[PageId]) -> Result<Vec<SharedGuard<'_>>> {
        let mut guards: Vec<Option<SharedGuard<'_>>> = Vec::with_capacity(pages.len());
        guards.resize_with(pages.len(), || None);
        for (pages, guards) in pages.chunks(BATCH_MAX).zip(guards.chunks_mut(BATCH_MAX)) {
            self.fix_group(pages, guards)?;
        }
        for (page, guard) in pages.iter().zip(&mut guards) {
            if guard.is_none() {
                *guard = Some(self.fix_shared(*page)?);
            }
        }
        Ok(guards.into_iter().flatten().collect())
    }

    /// Fixes what is resident and reads what is absent, up to the first page for which there is no
    /// memory at once: pages that are read are not let go before all are. The caller fixes the rest.
    fn fix_group<'p>(
        &'p self,
        pages: &[PageId],
        guards: &mut [Option<SharedGuard<'p>>],
    ) -> Result<()> {
        let mut absent: ArrayVec<_, BATCH_MAX> = ArrayVec::new();
        for (index, page) in pages.iter().enumerate() {
            guards[index] = self.try_fix_shared(*page);
            if guards[index].is_none() {
                absent.push((index, *page));
            }
        }
        if absent.is_empty() {
            return Ok(());
        }
        let (frames, absent) = (&self.frames, absent.iter().copied());
        let group = self.loader.load_group(frames, absent, BATCH_MAX, false, |index, page| {
            let latch = frames.table.word(page);
            latch.downgrade(false);
            let word = HeldWord::seen(latch.load());
            guards[index] = Some(SharedGuard(Held::new(frames, latch, word)));
        })?;
        group.failed.map_or(Ok(()), Err)
    }

    /// Asks for pages to be read ahead, in the background. Pages that cannot be queued, or for
    /// which there is no memory without waiting, are forgotten.
    pub fn prefetch(&self, pages: &[PageId]) {
        if self.loader.prefetch(&self.frames, pages) {
            self.group.wake();
        }
    }
}
