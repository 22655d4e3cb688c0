//! The arenas of a far tier, all over one source.
//!
//! Threads are spread over them by the index of their cache. Uses `far_arena`, `hooks`; owned by
//! [`FarArenas`](super::far_arenas::FarArenas).

#![expect(unsafe_code, reason = "creates, clears and destroys memory of arenas")]

use super::accounting::Usage;
use super::far_arena::FarArena;
use super::far_options::FarArenasOptions;
use super::hooks::{self, ExtentSource};
use super::jemalloc::{self, JemallocArena};
use super::thread_cache::magazine;
use crate::base::error::Result;
use crate::base::units::ByteCount;
use std::ptr::NonNull;
use std::sync::Arc;

/// See the module's documentation. Never empty.
pub(crate) struct ArenaSet {
    arenas: Box<[FarArena]>,
}

impl ArenaSet {
    /// Creates as many arenas over `source` as the options say, at least one.
    ///
    /// # Errors
    /// [`Error::Jemalloc`](crate::Error::Jemalloc).
    ///
    /// # Safety
    /// `source` outlives the arenas.
    pub(super) unsafe fn create(
        source: &Arc<dyn ExtentSource>,
        options: &FarArenasOptions,
    ) -> Result<ArenaSet> {
        let arenas = (0..options.arenas.max(1))
            // SAFETY: as the caller promises.
            .map(|_| unsafe { FarArena::create(source, options) })
            .collect::<Result<Box<[FarArena]>>>()?;
        Ok(ArenaSet { arenas })
    }

    /// The arena for the cache, or the path, of an index.
    pub(super) fn of_index(&self, index: usize) -> &FarArena {
        &self.arenas[index % self.arenas.len()]
    }

    /// True if an arena of jemalloc is one of the tier.
    pub(super) fn owns(&self, arena: JemallocArena) -> bool {
        self.arenas.iter().any(|far| far.arena() == arena)
    }

    /// Bytes charged to the source.
    pub(super) fn committed(&self) -> ByteCount {
        ByteCount(self.arenas.iter().map(FarArena::committed).sum())
    }

    /// Bytes of address space that jemalloc takes for resident in the tier, as of its last epoch.
    pub(super) fn seems_resident(&self) -> ByteCount {
        ByteCount(self.arenas.iter().map(FarArena::seems_resident).sum())
    }

    /// Uses of all arenas' memory now.
    pub(super) fn memory(&self) -> Usage {
        jemalloc::advance_epoch();
        self.arenas.iter().fold(Usage::default(), |sum, far| sum.plus(&far.memory()))
    }

    /// Bytes that are free and not yet given back.
    pub(super) fn dirty(&self) -> ByteCount {
        jemalloc::advance_epoch();
        let pages = |far: &FarArena| far.arena().pages().map_or(0, |pages| pages.dirty);
        ByteCount((self.arenas.iter().map(pages).sum::<usize>() * jemalloc::PAGE) as u64)
    }

    /// Gives back all that is free now.
    pub(super) fn purge(&self) {
        self.arenas.iter().for_each(|far| far.arena().purge());
    }

    /// Gives back what has decayed.
    pub(super) fn decay(&self) {
        self.arenas.iter().for_each(|far| far.arena().decay());
    }

    /// Makes a block of the tier, or a part of one, read as zero; may wait for a device.
    ///
    /// # Safety
    /// The caller alone uses the range, and needs nothing of what it holds.
    pub(super) unsafe fn clear(&self, ptr: *mut u8, len: usize) {
        let Some(ptr) = NonNull::new(ptr).filter(|_| len > 0) else { return };
        // SAFETY: as the caller promises; the range is part of an allocation. All arenas have the
        // same source.
        unsafe { self.arenas[0].hooks().clear(ptr, len) }
    }

    /// Makes a block read as zero that jemalloc has just handed out.
    ///
    /// # Safety
    /// The block has `size` bytes, is nobody else's, and was allocated by this thread, which has
    /// forgotten before what was committed earlier.
    pub(super) unsafe fn clear_new(&self, ptr: *mut u8, size: usize) {
        let committed = hooks::take_committed();
        // Above the sizes that share extents: other threads may have used, and freed, a small block
        // of an extent that was committed for this one.
        let large = size > magazine::SMALL_MAX;
        if !large || !committed.has(ptr.addr(), size) {
            // SAFETY: as the caller promises.
            unsafe { self.clear(ptr, size) }
        }
    }

    /// Destroys the arenas, so that the source gets all its ranges back.
    ///
    /// # Errors
    /// [`Error::Jemalloc`](crate::Error::Jemalloc) when jemalloc keeps an arena.
    ///
    /// # Safety
    /// As for [`FarArena::destroy`], for all of them.
    pub(super) unsafe fn destroy(&self) -> Result<()> {
        for far in &self.arenas {
            // SAFETY: as the caller promises.
            unsafe { far.destroy() }?;
        }
        Ok(())
    }
}
