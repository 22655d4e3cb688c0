//! A far tier: arenas over one [`ExtentSource`], and what threads keep of them.
//!
//! A [`FarArenas`] allocates, frees and resizes far memory. The common way is the calling thread's
//! cache; the *shared path* (past all caches) serves threads that have none: beyond
//! `CACHES_MAX` threads, at thread exit, or while a cache is revoked.
//! [`maintain`](FarArenas::maintain) gives memory back. Uses `jemalloc`, `hooks`, `placement`, `thread_cache`;
//! used by `tiers` and `global`.
//!
//! # Giving back
//! Freed memory stays dirty in the arena for [`decay`](FarArenasOptions::decay) so that data that dies
//! young is reused without system calls. `maintain` decays all arenas, and empties the caches of threads
//! that did nothing since the last call. Once more than half of [`dirty_max`](FarArenasOptions::dirty_max)
//! has been freed since the last look, the thread that frees looks, and purges everything if so much is
//! dirty: so there is never more than that, but while half of the limit is free, where what is dirty costs nothing
//! and only its decay counts. Thread caches keep at most
//! [`cache_max`](FarArenasOptions::cache_max) together; those that have more than their share while
//! others want some are emptied. When memory is short ([`give_back`](FarArenas::give_back)) all large
//! blocks of caches go, too: they would be evicted, and written.
//!
//! # Invariants
//! 1. A tier is never freed, and its address never reused for another one; threads keep it.
//! 2. Every operation on an arena runs inside an [`Access`] to a cache that is not revoked, or is
//!    counted by its [`Entrance`]; what only asks jemalloc for numbers, by that of its controls. So
//!    [`close`](FarArenas::close) knows when nobody is inside.
//! 3. Only pointers inside the reservation reach `free` and `reallocate`.

#![expect(unsafe_code, reason = "allocates")]

mod closing;

pub(crate) use closing::ClosedArenas;

use super::accounting::Usage;
use super::arena_set::ArenaSet;
use super::counts::{self, Counts};
use super::dirty_bound::DirtyBound;
use super::entry::{Entrance, TierClosed};
use super::far_options::FarArenasOptions;
use super::hooks::{self, ExtentSource};
use super::jemalloc::{self, Flags};
use super::page_sizes::PageSizes;
use super::placement::{self, Fill, Tier};
use super::tail;
use super::thread_cache::magazine::{self, SmallClass};
use super::thread_cache::{self, Access, Allowance, Flush, ThreadCache, ThreadCaches};
use crate::base::error::Result;
use crate::base::strict_assert;
use crate::base::sync::{Rank, Ranked};
use crate::base::units::ByteCount;
use std::alloc::Layout;
use std::cell::Cell;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// Caches keep at most 1/KEPT_SHARE of the limit, and as much may be dirty.
const KEPT_SHARE: u64 = 8;

thread_local! {
    /// How the calling thread's last attempt to give everything free back ended: whether memory was
    /// refused even then. Constant and without a destructor, as in `placement`.
    static REFUSED: Cell<bool> = const { Cell::new(false) };
}

/// True if giving everything free back again is in vain: it just was, and this thread panics. A
/// backtrace in a far scope allocates thousands of times, and each attempt takes milliseconds.
fn gives_up() -> bool {
    REFUSED.get() && placement::reports_failure()
}

/// Data of a tier that frees ask for: never changed, and in a cache line that nothing else changes.
#[repr(align(64))]
struct TierRange {
    base: usize,
    span: usize,
    tier: Tier,
}

/// A far tier; see the module's documentation.
pub(crate) struct FarArenas {
    place: TierRange,
    options: FarArenasOptions,
    arenas: ArenaSet,
    /// Keeps the source alive for the hooks; gone once the arenas are.
    source: Ranked<Option<Arc<dyn ExtentSource>>>,
    caches: ThreadCaches,
    sizes: PageSizes,
    /// See [`FarArenasOptions::dirty_max`].
    dirty: DirtyBound,
    entry: Entrance,
    /// Bytes through the shared path.
    shared_counts: Counts,
}

impl FarArenas {
    /// Creates a tier over `source`. It lives for ever; after [`close`](Self::close) it holds no
    /// far memory.
    ///
    /// # Errors
    /// [`Error::Jemalloc`](crate::Error::Jemalloc) when an arena cannot be made.
    pub(crate) fn create(
        source: Arc<dyn ExtentSource>,
        options: FarArenasOptions,
    ) -> Result<&'static FarArenas> {
        let _pinned = placement::pin();
        let tier = Tier::new(options.slot);
        let place = TierRange { base: source.base(), span: source.span(), tier };
        // SAFETY: the tier drops the source after the arenas only.
        let arenas = unsafe { ArenaSet::create(&source, &options) }?;
        let sizes = PageSizes::new(place.base, place.span)?;
        let cache_max = if tail::is_on() { ByteCount::ZERO } else { options.cache_max };
        let options = FarArenasOptions { cache_max, ..options };
        let allowance = Box::leak(Box::new(Allowance::new(cache_max.as_usize())));
        Ok(Box::leak(Box::new(FarArenas {
            place,
            options,
            arenas,
            source: Ranked::new(Rank::Leaf, Some(source)),
            caches: ThreadCaches::new(allowance, options.slot),
            sizes,
            dirty: DirtyBound::new(options.dirty_max.0),
            entry: Entrance::new(),
            shared_counts: Counts::new(),
        })))
    }

    /// First address of the tier's reservation, and the one behind its last.
    pub(super) fn bounds(&self) -> (usize, usize) {
        (self.place.base, self.place.base + self.place.span)
    }

    /// The arenas.
    pub(crate) fn arenas(&self) -> &ArenaSet {
        &self.arenas
    }

    /// Blocks that threads keep.
    #[cfg(test)]
    pub(super) fn caches(&self) -> &ThreadCaches {
        &self.caches
    }

    /// The tier's name.
    #[inline]
    pub(crate) fn tier(&self) -> Tier {
        self.place.tier
    }

    /// Smallest size that goes far by itself; `None`: no size does.
    pub(crate) fn threshold(&self) -> Option<ByteCount> {
        self.options.threshold
    }

    /// True if `addr` lies in the tier's reservation.
    #[inline]
    pub(super) fn contains(&self, addr: usize) -> bool {
        addr.wrapping_sub(self.place.base) < self.place.span
    }

    /// Takes a block that the calling thread's cache has; `None`: [`allocate`](Self::allocate) finds one.
    /// Calls nothing: without registers to save, a pair of this and of a free costs a quarter less.
    #[inline(always)]
    pub(super) fn take(&'static self, layout: Layout) -> Option<NonNull<u8>> {
        let mut access = thread_cache::access_at_once(&self.caches)?;
        let ptr = access.take(layout)?;
        access.count_allocated(layout.size());
        strict_assert!(self.contains(ptr.addr()), "{ptr:p} is not far");
        NonNull::new(ptr)
    }

    /// Allocates far memory; null when there is none left, even after giving back all that is
    /// free.
    ///
    /// # Errors
    /// [`TierClosed`].
    ///
    /// # Safety
    /// The layout's size is not zero.
    pub(super) unsafe fn allocate(
        &'static self,
        layout: Layout,
        fill: Fill,
    ) -> std::result::Result<*mut u8, TierClosed> {
        let Some(mut access) = self.access() else {
            // SAFETY: the size is not zero.
            return unsafe { self.allocate_shared(layout, fill) };
        };
        let Some(ptr) = access.take(layout) else {
            // SAFETY: the size is not zero.
            return unsafe { self.allocate_missed(access, layout, fill) };
        };
        access.count_allocated(layout.size());
        drop(access);
        strict_assert!(self.contains(ptr.addr()), "{ptr:p} is not far");
        if fill == Fill::Zero && layout.size() > magazine::SMALL_MAX {
            // Pages of it may have been evicted: those are not brought back to be cleared.
            // SAFETY: the block has `size` bytes and is nobody else's.
            unsafe { self.arenas.clear(ptr, layout.size()) };
        } else if fill == Fill::Zero {
            // SAFETY: the block has `size` bytes and is nobody else's.
            unsafe { ptr.write_bytes(0, layout.size()) };
        }
        Ok(ptr)
    }

    /// Frees far memory.
    ///
    /// # Safety
    /// `ptr` is an allocation of this tier with this layout and is not used again.
    #[inline(always)]
    pub(super) unsafe fn free(&'static self, ptr: *mut u8, layout: Layout) {
        strict_assert!(self.contains(ptr.addr()), "{ptr:p} is not far");
        match thread_cache::access_at_once(&self.caches) {
            // SAFETY: as the caller promises.
            Some(access) => unsafe { self.free_into(access, ptr, layout) },
            // SAFETY: as the caller promises.
            None => unsafe { self.free_elsewhere(ptr, layout) },
        }
    }

    /// # Safety
    /// As for [`free`](Self::free).
    #[inline(always)]
    unsafe fn free_into(&self, mut access: Access<'_>, ptr: *mut u8, layout: Layout) {
        access.count_freed(layout.size());
        // SAFETY: as the caller promises.
        if !unsafe { access.put(ptr, layout) } {
            // SAFETY: as the caller promises; the magazines have not taken it.
            unsafe { self.free_missed(access, ptr, layout) };
        }
    }

    /// Frees where the tier is not the default one, or the thread has no cache that it can use. Out of line,
    /// see [`take`](Self::take).
    ///
    /// # Safety
    /// As for [`free`](Self::free).
    #[inline(never)]
    unsafe fn free_elsewhere(&'static self, ptr: *mut u8, layout: Layout) {
        match self.access() {
            // SAFETY: as the caller promises.
            Some(access) => unsafe { self.free_into(access, ptr, layout) },
            // SAFETY: as the caller promises.
            None => unsafe { self.free_shared(ptr, layout) },
        }
    }

    /// Allocates a block of a small class if the thread has one at hand; else
    /// [`allocate`](Self::allocate).
    #[inline]
    pub(super) fn take_small(&'static self, class: SmallClass) -> Option<NonNull<u8>> {
        let ptr = thread_cache::access_own(&self.caches)?.take_small(class)?;
        strict_assert!(self.contains(ptr.addr()), "{ptr:p} is not far");
        NonNull::new(ptr)
    }

    /// Sizes of its blocks.
    #[inline]
    pub(super) fn sizes(&self) -> &PageSizes {
        &self.sizes
    }

    /// Frees a block of a small class if the thread has room for it; `false`: use
    /// [`free`](Self::free).
    ///
    /// # Safety
    /// As for [`free`](Self::free), with a layout of this class.
    #[inline]
    pub(super) unsafe fn put_small(&'static self, ptr: *mut u8, class: SmallClass) -> bool {
        strict_assert!(self.contains(ptr.addr()), "{ptr:p} is not far");
        // SAFETY: as the caller promises.
        thread_cache::access_own(&self.caches)
            .is_some_and(|mut access| unsafe { access.put_small(ptr, class) })
    }

    /// Resizes within the tier; null leaves the allocation as it was.
    ///
    /// # Safety
    /// As for [`free`](Self::free), and `new` has the same alignment and a size above zero.
    pub(super) unsafe fn reallocate(
        &'static self,
        ptr: *mut u8,
        old: Layout,
        new: Layout,
    ) -> *mut u8 {
        strict_assert!(self.contains(ptr.addr()), "{ptr:p} is not far");
        if let Some(mut access) = self.access() {
            // SAFETY: as the caller promises.
            let moved = unsafe { access.reallocate(ptr, old, new) };
            if !moved.is_null() {
                self.sizes.note(moved, new);
                access.count_allocated(new.size());
                access.count_freed(old.size());
                let freed = access.take_freed();
                drop(access);
                self.note_freed(freed);
                return moved;
            }
        }
        // SAFETY: as the caller promises.
        unsafe { self.reallocate_shared(ptr, old, new) }
    }

    /// Gives memory back, in batches: what has decayed, what idle threads keep, and everything
    /// free when there is too much of it. To be called every 100 ms or so, from one thread that
    /// never touches far memory.
    pub(crate) fn maintain(&self) {
        let Ok(_inside) = self.entry.enter() else { return };
        let some_have_too_much = self.caches.some_have_too_much();
        // Both are asked: idleness is told by comparing with the last time.
        let choose = |cache: &ThreadCache| {
            cache.has_become_idle() | (some_have_too_much && cache.has_too_much())
        };
        self.flush_caches(choose, Flush::All);
        self.arenas.decay();
        self.bound_dirty(self.dirty.most());
    }

    /// Gives everything free back if more than `most` bytes are dirty, and memory is not plentiful: there the
    /// next use of what was given back would wait for fresh pages, for nobody's good (churn of 16 B to 8 MiB on
    /// two threads took 1.1 us instead of 0.3 under a limit that nothing reached).
    fn bound_dirty(&self, most: u64) {
        // The block that has just been freed kept the tier from being closed; nothing does any more.
        let Ok(_inside) = self.entry.enter() else { return };
        if self.source.lock().as_ref().is_some_and(|source| source.has_plenty()) {
            return;
        }
        // What is committed and not in use bounds what is dirty, without asking jemalloc.
        let free = self.arenas.committed().get().saturating_sub(self.allocated().get());
        if free > most && self.arenas.dirty().get() > most {
            self.arenas.purge();
        }
    }

    /// Counts bytes that were freed past the magazines; gives back what is free when that is too much.
    #[inline]
    pub(super) fn note_freed(&self, bytes: usize) {
        if self.dirty.freed(bytes) {
            self.bound_dirty(self.dirty.half());
        }
    }

    /// Follows a limit on resident memory that may have changed: caches keep an eighth of it at most, and
    /// as much may be dirty. What caches of all `tiers` keep together is bounded as that of one is.
    pub(crate) fn follow_limit(&self, limit: ByteCount, tiers: usize) {
        let share = ByteCount(limit.0 / KEPT_SHARE);
        let of_tier = ByteCount(self.options.cache_max.0 / tiers.max(1) as u64);
        self.caches.set_max(of_tier.min(share));
        self.dirty.set_most(self.options.dirty_max.min(share).0);
    }

    /// For a source that is short of memory: gives back what is free, large blocks of caches included,
    /// if that is more than `least`. To be called from the thread that [maintains](Self::maintain).
    pub(crate) fn give_back(&self, least: ByteCount) {
        let Ok(_inside) = self.entry.enter() else { return };
        if self.caches.room() > least {
            self.flush_caches(|_| true, Flush::Large);
        }
        if self.arenas.dirty() > least {
            self.arenas.purge();
        }
    }

    /// Uses of the tier's memory now, but for the far memory that is resident.
    pub(crate) fn memory(&self) -> Usage {
        let of_arenas = self.arenas.memory();
        Usage { allocated_bytes: self.allocated(), ..of_arenas }
    }

    /// Gives back all that is free now, what caches keep included.
    pub(crate) fn give_all_back(&self) {
        let Ok(_inside) = self.entry.enter() else { return };
        self.flush_caches(|_| true, Flush::All);
        self.arenas.purge();
    }

    /// Where the tier's memory is from; `None`: it has ended.
    pub(super) fn source(&self) -> Option<Arc<dyn ExtentSource>> {
        self.source.lock().clone()
    }

    /// Opens the calling thread's cache; `None`: take the shared path.
    fn access(&'static self) -> Option<Access<'static>> {
        thread_cache::access(&self.caches, || self.claim_cache())
    }

    /// Claims a cache for the calling thread; `None`: all are taken.
    ///
    /// # Errors
    /// [`TierClosed`].
    pub(super) fn claim_cache(
        &'static self,
    ) -> std::result::Result<Option<&'static ThreadCache>, TierClosed> {
        // At once: a thread that gives back what is free, inside the shared path, gets here too.
        let _inside = self.entry.enter()?;
        let make = |index, allowance| {
            ThreadCache::of_arena(self.arenas.of_index(index).arena().index(), allowance)
        };
        Ok(self.caches.claim(make))
    }

    /// Empties the caches that `choose` selects, unless their owners are inside or somebody else
    /// is at it.
    fn flush_caches(&self, choose: impl Fn(&ThreadCache) -> bool, what: Flush) {
        let Some(control) = self.caches.take_control() else {
            return;
        };
        // Else this thread slept meanwhile; the caches are empty, and revoked for good.
        if !self.entry.is_closed() {
            control.flush(choose, what);
        }
    }

    /// Gives back what can be had for an allocation that has just failed.
    fn reclaim(&'static self) {
        if let Some(mut access) = self.access() {
            access.flush(Flush::All);
        }
        self.flush_caches(|_| true, Flush::All);
        self.arenas.purge();
        // A refusal before the purge says nothing about now.
        hooks::take_commit_refused();
    }

    /// Allocates past the magazines. Out of line: the registers that it needs saved would cost
    /// the common way a third of its time.
    #[inline(never)]
    unsafe fn allocate_missed(
        &'static self,
        mut access: Access<'_>,
        layout: Layout,
        fill: Fill,
    ) -> std::result::Result<*mut u8, TierClosed> {
        if fill == Fill::Zero {
            hooks::take_committed();
        }
        let with_tail = tail::with_tail(layout);
        // SAFETY: the caller passes no empty layout.
        let ptr = self.only_far(unsafe { access.allocate(with_tail) })?;
        if ptr.is_null() {
            drop(access);
            // SAFETY: the caller passes no empty layout.
            return unsafe { self.allocate_shared(layout, fill) };
        }
        self.sizes.note(ptr, with_tail);
        access.count_allocated(layout.size());
        drop(access);
        if fill == Fill::Zero {
            // SAFETY: allocated just now, and forgotten above what was committed before.
            unsafe { self.arenas.clear_new(ptr, layout.size()) };
        }
        // SAFETY: allocated just now, with a tail.
        unsafe { tail::cover(ptr, layout.size()) };
        Ok(ptr)
    }

    /// Refuses what is not far. Once jemalloc's destructor of an ending thread has run, jemalloc serves
    /// this thread from its first arena, which is local, whatever arena it is asked for.
    fn only_far(&self, ptr: *mut u8) -> std::result::Result<*mut u8, TierClosed> {
        if ptr.is_null() || self.contains(ptr.addr()) {
            return Ok(ptr);
        }
        // SAFETY: allocated by the caller just now, locally; nobody uses it.
        unsafe { jemalloc::free_unsized(ptr) };
        Err(TierClosed)
    }

    /// Frees past the magazines. Out of line as `allocate_missed` is.
    #[inline(never)]
    unsafe fn free_missed(&self, mut access: Access<'_>, ptr: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        if !access.make_room(layout) || !unsafe { access.put(ptr, layout) } {
            // SAFETY: as the caller promises; the magazines have not taken it.
            unsafe { access.free(ptr, layout) }
        }
        let freed = access.take_freed();
        drop(access);
        self.note_freed(freed);
    }

    #[cold]
    unsafe fn allocate_shared(
        &'static self,
        layout: Layout,
        fill: Fill,
    ) -> std::result::Result<*mut u8, TierClosed> {
        let with_tail = tail::with_tail(layout);
        let size = magazine::fitting_size(with_tail);
        let flags = self.shared_flags().aligned(size, layout.align());
        let inside = self.entry.enter()?;
        if fill == Fill::Zero {
            hooks::take_committed();
        }
        // SAFETY: the caller passes no empty layout; the flags name no cache.
        let ptr = self.only_far(self.with_retry(|| unsafe { jemalloc::allocate(size, flags) }))?;
        if !ptr.is_null() {
            self.sizes.note(ptr, with_tail);
            self.shared_counts.allocated(layout.size());
        }
        drop(inside);
        if !ptr.is_null() && fill == Fill::Zero {
            // SAFETY: as in `allocate_missed`.
            unsafe { self.arenas.clear_new(ptr, layout.size()) };
        }
        // SAFETY: allocated just now, with a tail.
        unsafe { tail::cover(ptr, layout.size()) };
        Ok(ptr)
    }

    #[cold]
    unsafe fn free_shared(&self, ptr: *mut u8, layout: Layout) {
        let size = magazine::fitting_size(layout);
        let flags = self.shared_flags().aligned(size, layout.align());
        // Not refused when the tier is closing: that `ptr` exists will stop it.
        let _inside = self.entry.enter_even_if_closed();
        // SAFETY: as the caller promises; the flags name no cache.
        unsafe { jemalloc::free(ptr, size, flags) };
        self.shared_counts.freed(layout.size());
        self.note_freed(size);
    }

    #[cold]
    unsafe fn reallocate_shared(&'static self, ptr: *mut u8, old: Layout, new: Layout) -> *mut u8 {
        // Not refused when the tier is closing, as in `free_shared`.
        let _inside = self.entry.enter_even_if_closed();
        let flags = self.shared_flags();
        // SAFETY: as the caller promises; the flags name no cache.
        let moved =
            self.with_retry(|| unsafe { thread_cache::reallocate_with(flags, ptr, old, new) });
        if !moved.is_null() {
            self.sizes.note(moved, new);
            self.shared_counts.allocated(new.size());
            self.shared_counts.freed(old.size());
            self.note_freed(if moved == ptr { 0 } else { old.size() });
        }
        moved
    }

    /// Runs `attempt`, and when it yields null once more after [`reclaim`](Self::reclaim).
    fn with_retry(&'static self, attempt: impl Fn() -> *mut u8) -> *mut u8 {
        let first = attempt();
        if !first.is_null() {
            return first;
        }
        if gives_up() {
            return first;
        }
        self.reclaim();
        let second = attempt();
        REFUSED.set(second.is_null());
        second
    }

    fn shared_flags(&self) -> Flags {
        Flags::uncached(self.arenas.of_index(0).arena().index())
    }

    /// Large blocks that the calling thread's cache keeps.
    #[cfg(test)]
    pub(super) fn large_bytes(&'static self) -> usize {
        self.access().map_or(0, |mut access| access.large_bytes())
    }

    /// Bytes allocated and not freed, as callers asked for them; what caches hold is not in use.
    pub(crate) fn allocated(&self) -> ByteCount {
        let of_slots = || self.caches.iter().map(|cache| cache.counts());
        ByteCount(counts::in_use(|| of_slots().chain([&self.shared_counts])))
    }
}

/// Frees a block of a tier that `check` has kept back, of `size` bytes with its tail.
///
/// # Safety
/// It is jemalloc's and of this tier, and nobody uses it.
#[cold]
pub(super) unsafe fn free_kept(arenas: &FarArenas, ptr: *mut u8, size: usize, asked: usize) {
    let _inside = arenas.entry.enter_even_if_closed();
    // SAFETY: as the caller promises; the flags name no cache.
    unsafe { jemalloc::free(ptr, size, arenas.shared_flags()) };
    arenas.shared_counts.freed(asked);
    arenas.note_freed(size);
}

impl fmt::Debug for FarArenas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.tier().fmt(f)
    }
}
