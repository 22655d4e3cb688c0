//! A thread cache: one thread's magazines of a tier, its explicit cache of jemalloc, and its counters.
//!
//! A thread claims a cache (`caches`) at its first far allocation, or its first free of a large local
//! block, and gives it back when it exits; the next thread takes it over. Its contents are protected by
//! a [`BiasedLock`]. A cache of local memory keeps large blocks only: for others jemalloc's own caches
//! are as fast. Uses `allowance`, `biased_lock`, `magazine`, `large`, `jemalloc`; owned by `caches`.
//!
//! # Invariants
//! 1. At most one [`Access`] or [`Revoked`] of a cache exists.
//! 2. Caches are revoked by one thread at a time, the holder of their [`Revoker`](super::caches::Revoker).
//! 3. `counts` are written through an `Access` only.
//! 4. A cache is never freed: a sleeping thread may hold a reference into a tier that is gone.

#![expect(unsafe_code, reason = "hands out what a lock protects")]

use super::allowance::{Allowance, CacheShare};
use super::biased_lock::BiasedLock;
use super::large::LargeMagazines;
use super::magazine::{self, Magazines, SMALL_LAST, SmallClass};
use crate::base::sync::{
    AtomicBool, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};
use crate::heap::counts::Counts;
use crate::heap::dirty_bound;
use crate::heap::jemalloc::{self, Cache, Flags};
use crate::heap::placement;
use crate::sys::fork::Born;
use std::alloc::Layout;
use std::cell::UnsafeCell;
use std::mem::ManuallyDrop;

/// One thread's share of a tier.
#[repr(align(128))] // Two lines: neighbours are prefetched in pairs.
pub(in crate::heap) struct ThreadCache {
    lock: BiasedLock,
    owned: AtomicBool,
    /// Bytes allocated and freed through this cache.
    counts: Counts,
    /// The traffic of `counts` when the cache was last looked at for idleness, and when it was last
    /// flushed for that.
    seen: AtomicU64,
    flushed: AtomicU64,
    /// Allowance of all caches, and of this one.
    allowance: &'static Allowance,
    part: CacheShare,
    /// The process whose memory the cache keeps; `None`: a forked child has that memory, too.
    born: Option<Born>,
    contents: UnsafeCell<CacheContents>,
}

// SAFETY: `contents` is used through an `Access` or a `Revoked` only, and there is at most one
// (invariant 1); its pointers are objects that the cache owns.
unsafe impl Sync for ThreadCache {}

// SAFETY: as for `Sync`; nothing in a cache belongs to a thread.
unsafe impl Send for ThreadCache {}

struct CacheContents {
    /// Dropped when the tier closes, 29 KiB a cache. The cache stays, see invariant 4.
    magazines: ManuallyDrop<Magazines>,
    large: ManuallyDrop<LargeMagazines>,
    /// The arena whose small objects may go through a cache of jemalloc's; `None` when it had none left, and for
    /// local memory, where its automatic ones are used.
    arena: Option<u32>,
    /// That cache, from when it is first used until the thread is idle: one takes 33 KiB, and a thousand threads
    /// of four tiers would have 130 MiB of empty ones.
    explicit: Option<Cache>,
    /// Sizes that go through `explicit` at present.
    cached: Cached,
    /// The cache's arena, through `explicit` if there is one.
    flags: Flags,
    /// The cache's arena, past the cache.
    uncached: Flags,
    /// Bytes freed past the magazines that the tier has not been told of.
    freed: usize,
}

/// Which objects go through jemalloc's cache: it cannot be told how much to keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cached {
    None,
    /// Up to this size.
    UpTo(usize),
}

/// Number that jemalloc's cache can hold of objects up to [`magazine::SMALL_MAX`], and of those up to
/// [`CACHED_SIZE`]: sums over its classes of 20 to 200 objects (jemalloc 5.3.1, `tcache.c`).
const CACHE_BYTES: usize = 5 << 20;
const CACHE_BYTES_SMALL: usize = 512 << 10;

/// A cache keeps at most 1/LARGE_SHARE of the allowance in large blocks: with two threads, each can
/// keep the largest.
const LARGE_SHARE: usize = 2;

/// Sizes that go through jemalloc's cache where there is no allowance for more, in bytes: for small
/// objects the arena's locks are most of the price.
const CACHED_SIZE: usize = 1 << 10;

/// Blocks that a cache returns when it is flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::heap) enum Flush {
    All,
    /// Blocks above [`magazine::SMALL_MAX`]: whole pages. Small ones share theirs with live data.
    Large,
}

/// The owner's exclusive use of a cache's contents. Ends when dropped.
pub(in crate::heap) struct Access<'a> {
    cache: &'a ThreadCache,
}

/// The revoker's exclusive use of a cache's contents. Ends when the cache is restored.
pub(in crate::heap) struct Revoked<'a> {
    cache: &'a ThreadCache,
}

impl ThreadCache {
    /// A cache of an arena, with an explicit one of jemalloc if there is one left. It belongs to its
    /// creator.
    pub(in crate::heap) fn of_arena(arena: u32, allowance: &'static Allowance) -> ThreadCache {
        let uncached = Flags::uncached(arena);
        ThreadCache::new(Magazines::new(), Some(arena), uncached, allowance, Some(Born::here()))
    }

    /// A cache of large local blocks. It belongs to its creator.
    pub(in crate::heap) fn of_local(allowance: &'static Allowance) -> ThreadCache {
        ThreadCache::new(Magazines::none(), None, Flags::LOCAL, allowance, None)
    }

    fn new(
        magazines: Magazines,
        arena: Option<u32>,
        uncached: Flags,
        allowance: &'static Allowance,
        born: Option<Born>,
    ) -> ThreadCache {
        let magazines = ManuallyDrop::new(magazines);
        let large = ManuallyDrop::new(LargeMagazines::new());
        let contents = CacheContents {
            magazines,
            large,
            arena,
            explicit: None,
            cached: Cached::None,
            flags: uncached,
            uncached,
            freed: 0,
        };
        ThreadCache {
            lock: BiasedLock::new(),
            owned: AtomicBool::new(true),
            counts: Counts::new(),
            seen: AtomicU64::new(0),
            flushed: AtomicU64::new(0),
            allowance,
            part: CacheShare::new(),
            born,
            contents: UnsafeCell::new(contents),
        }
    }

    /// Makes the cache the caller's if another thread has given it back.
    pub(super) fn try_own(&self) -> bool {
        !self.owned.load(Relaxed)
            // Pairs with the Release in `give_back`.
            && self.owned.compare_exchange(false, true, Acquire, Relaxed).is_ok()
    }

    /// Opens the cache for its owner; `None` while it is revoked.
    #[inline]
    pub(in crate::heap) fn access(&self) -> Option<Access<'_>> {
        // Not `then_some`: one that is made is dropped, and leaves.
        self.lock.enter().then(|| Access { cache: self })
    }

    /// Keeps the owner out from its next access on. Follow with a barrier on all threads.
    pub(in crate::heap) fn revoke(&self) {
        self.lock.revoke();
    }

    /// Lets the owner in again.
    pub(in crate::heap) fn restore(&self) {
        self.lock.restore();
    }

    /// Opens a revoked cache for the thread that revoked it; `None` while the owner is inside.
    ///
    /// # Safety
    /// The caller has revoked the cache and run a barrier on all threads since, and uses what it gets
    /// until it restores the cache at the latest, with no other one beside it.
    pub(in crate::heap) unsafe fn access_revoked(&self) -> Option<Revoked<'_>> {
        self.lock.is_idle().then_some(Revoked { cache: self })
    }

    /// Ends the ownership of the calling thread, after emptying the cache.
    pub(in crate::heap) fn give_back(&self) {
        if self.born.is_some_and(|born| !born.is_here()) {
            return; // What is in the cache is the parent's of this forked child.
        }
        // When the cache is revoked, the revoker empties it now or at the next round.
        if let Some(mut access) = self.access() {
            access.flush(Flush::All);
        }
        self.owned.store(false, Release);
    }

    /// True if nothing has happened in the cache since the last call; told once per idle time.
    pub(in crate::heap) fn has_become_idle(&self) -> bool {
        let now = self.counts.traffic();
        let idle = self.seen.swap(now, Relaxed) == now;
        idle && self.flushed.swap(now, Relaxed) != now
    }

    /// True if the cache may keep more than its fair share.
    pub(in crate::heap) fn has_too_much(&self) -> bool {
        self.part.bytes() > self.allowance.share()
    }

    pub(in crate::heap) fn is_revoked(&self) -> bool {
        self.lock.is_revoked()
    }

    /// Bytes allocated and freed so far.
    pub(in crate::heap) fn counts(&self) -> &Counts {
        &self.counts
    }
}

impl Access<'_> {
    fn contents(&mut self) -> &mut CacheContents {
        // SAFETY: this is the only access (invariant 1), borrowed exclusively.
        unsafe { &mut *self.cache.contents.get() }
    }

    /// Takes a block from the magazines, with whatever it contains.
    #[inline(always)] // As `put`: a call costs a third of what it does, and its callers registers to save.
    pub(in crate::heap) fn take(&mut self, layout: Layout) -> Option<*mut u8> {
        let class = magazine::class_of(layout)?;
        self.contents().take(class, layout.align())
    }

    /// Puts a block into the magazines; `false` when there is no room.
    ///
    /// # Safety
    /// `ptr` is an allocation of the cache's tier with this layout and is not used again.
    #[inline(always)]
    pub(in crate::heap) unsafe fn put(&mut self, ptr: *mut u8, layout: Layout) -> bool {
        magazine::class_of(layout).is_some_and(|class| self.contents().put(class, ptr))
    }

    /// Takes a block of a small class from the magazines, and counts it.
    #[inline]
    pub(in crate::heap) fn take_small(&mut self, class: SmallClass) -> Option<*mut u8> {
        let object = self.contents().magazines.take_small(class)?;
        self.count_allocated(class.size());
        Some(object)
    }

    /// Puts a block of a small class into the magazines, and counts it; `false` when there is no
    /// room.
    ///
    /// # Safety
    /// `ptr` is an allocation of the cache's tier of this class and is not used again.
    #[inline]
    pub(in crate::heap) unsafe fn put_small(&mut self, ptr: *mut u8, class: SmallClass) -> bool {
        let is_kept = self.contents().magazines.put_small(class, ptr);
        if is_kept {
            self.count_freed(class.size());
        }
        is_kept
    }

    /// Makes room for a block of this layout in the magazines: they get more if they are allowed
    /// more, else large blocks that are used less make place for a large one.
    pub(in crate::heap) fn make_room(&mut self, layout: Layout) -> bool {
        let Some(class) = magazine::class_of(layout) else { return false };
        let cache = self.cache;
        let contents = self.contents();
        if class <= SMALL_LAST {
            let bytes = contents.magazines.next_room(class);
            let Some(bytes) = bytes.filter(|bytes| cache.part.take(cache.allowance, *bytes)) else {
                return false;
            };
            contents.magazines.add_room(class, bytes);
            return true;
        }
        let bytes = contents.large.next_room(class, cache.allowance.total() / LARGE_SHARE);
        if let Some(bytes) = bytes.filter(|bytes| cache.part.take(cache.allowance, *bytes)) {
            contents.large.add_room(bytes);
            return true;
        }
        let (uncached, mut freed) = (contents.uncached, 0);
        let free = |block, size| {
            freed += size;
            // SAFETY: the magazines own the block, whose class has this size.
            unsafe { jemalloc::free(block, size, uncached) }
        };
        let has_place = contents.large.make_place(class, free);
        contents.freed += freed;
        has_place
    }

    /// Bytes freed past the magazines since the last call, once they are worth counting; else 0.
    pub(in crate::heap) fn take_freed(&mut self) -> usize {
        let freed = &mut self.contents().freed;
        if *freed < dirty_bound::STEP { 0 } else { std::mem::take(freed) }
    }

    /// Where an object that the magazines do not serve comes from or goes.
    fn flags_for(&mut self, size: usize) -> Flags {
        let cache = self.cache;
        let contents = self.contents();
        if contents.cached == Cached::None && contents.arena.is_some() {
            let takes = |bytes| cache.part.take(cache.allowance, bytes);
            if takes(CACHE_BYTES) {
                contents.cache_up_to(magazine::SMALL_MAX);
            } else if takes(CACHE_BYTES_SMALL) {
                contents.cache_up_to(CACHED_SIZE);
            }
        }
        match contents.cached {
            Cached::UpTo(most) if size <= most => contents.flags,
            _ => contents.uncached,
        }
    }

    /// Allocates past the magazines; null when the arena cannot.
    ///
    /// # Safety
    /// The layout's size is not zero.
    pub(in crate::heap) unsafe fn allocate(&mut self, layout: Layout) -> *mut u8 {
        let size = magazine::fitting_size(layout);
        let flags = self.flags_for(size).aligned(size, layout.align());
        // SAFETY: the size is not zero; the cache in `flags` is the cache's, which this access
        // holds.
        unsafe { jemalloc::allocate(size, flags) }
    }

    /// Frees past the magazines.
    ///
    /// # Safety
    /// As for [`put`](Self::put).
    pub(in crate::heap) unsafe fn free(&mut self, ptr: *mut u8, layout: Layout) {
        let size = magazine::fitting_size(layout);
        let flags = self.flags_for(size).aligned(size, layout.align());
        self.contents().freed += size;
        // SAFETY: as the caller promises; the cache is the cache's and its tier that of `ptr`.
        unsafe { jemalloc::free(ptr, size, flags) }
    }

    /// Resizes within the tier; null leaves the allocation as it was.
    ///
    /// # Safety
    /// As for [`put`](Self::put), and `new` has the same alignment and a size above zero.
    pub(in crate::heap) unsafe fn reallocate(
        &mut self,
        ptr: *mut u8,
        old: Layout,
        new: Layout,
    ) -> *mut u8 {
        // The cache also takes what the object leaves behind.
        let flags = self.flags_for(magazine::fitting_size(old).max(magazine::fitting_size(new)));
        // SAFETY: as the caller promises.
        let moved = unsafe { reallocate_with(flags, ptr, old, new) };
        if !moved.is_null() && moved != ptr {
            self.contents().freed += old.size();
        }
        moved
    }

    #[inline]
    pub(in crate::heap) fn count_allocated(&mut self, bytes: usize) {
        self.cache.counts.allocated_alone(bytes);
    }

    #[inline]
    pub(in crate::heap) fn count_freed(&mut self, bytes: usize) {
        self.cache.counts.freed_alone(bytes);
    }

    /// Returns what it holds to the arenas.
    pub(in crate::heap) fn flush(&mut self, what: Flush) {
        let bytes = self.contents().flush(what);
        self.cache.part.give_back(self.cache.allowance, bytes);
    }

    /// Bytes of large blocks that it keeps.
    #[cfg(test)]
    pub(in crate::heap) fn large_bytes(&mut self) -> usize {
        self.contents().large.bytes()
    }
}

impl Revoked<'_> {
    fn contents(&mut self) -> &mut CacheContents {
        // SAFETY: this is the only access (invariant 1), borrowed exclusively.
        unsafe { &mut *self.cache.contents.get() }
    }

    /// Returns what it holds to the arenas, with all also jemalloc's cache: its owner is not about to use it, as
    /// the next owner of one that was given back is.
    pub(in crate::heap) fn flush(&mut self, what: Flush) {
        let bytes = self.contents().flush(what);
        self.cache.part.give_back(self.cache.allowance, bytes);
        if what == Flush::All {
            self.contents().drop_explicit();
        }
    }

    /// Flushes, and gives the explicit cache back to jemalloc and the magazines' memory back for
    /// good.
    ///
    /// # Safety
    /// The cache is never restored.
    pub(in crate::heap) unsafe fn close(mut self) {
        self.flush(Flush::All);
        let contents = self.contents();
        let _pinned = placement::pin();
        // SAFETY: the contents are used by the owner or by the revoker; the owner stays out, as
        // the caller promises, and this is consumed.
        unsafe { ManuallyDrop::drop(&mut contents.magazines) };
        // SAFETY: as above.
        unsafe { ManuallyDrop::drop(&mut contents.large) };
    }
}

impl CacheContents {
    #[inline]
    fn take(&mut self, class: usize, align: usize) -> Option<*mut u8> {
        if class <= SMALL_LAST {
            self.magazines.take(class, align)
        } else {
            self.large.take(class, align)
        }
    }

    #[inline]
    fn put(&mut self, class: usize, object: *mut u8) -> bool {
        if class <= SMALL_LAST {
            self.magazines.put(class, object)
        } else {
            self.large.put(class, object)
        }
    }

    /// Sends objects up to this size through jemalloc's cache, if there is one or one can be made.
    #[cold]
    fn cache_up_to(&mut self, most: usize) {
        let Some(arena) = self.arena else { return };
        if self.explicit.is_none() {
            self.explicit = Cache::create();
        }
        let Some(explicit) = &self.explicit else {
            self.arena = None; // Not asked for again and again.
            return;
        };
        self.flags = Flags::cached(arena, explicit.index());
        self.cached = Cached::UpTo(most);
    }

    /// Gives jemalloc's cache back to it.
    fn drop_explicit(&mut self) {
        self.flags = self.uncached;
        if let Some(explicit) = self.explicit.take() {
            explicit.destroy();
        }
    }

    /// Returns blocks to the arenas; yields how much of its part the cache needs no more.
    fn flush(&mut self, what: Flush) -> usize {
        let uncached = self.uncached;
        // SAFETY: the magazines own the object, whose class has this size.
        let free = |object, size| unsafe { jemalloc::free(object, size, uncached) };
        let room = self.large.drain(free);
        if what == Flush::Large {
            return room;
        }
        self.magazines.drain(free);
        if let Some(explicit) = self.explicit.as_ref().filter(|_| self.cached != Cached::None) {
            explicit.flush();
        }
        self.cached = Cached::None;
        usize::MAX
    }
}

impl Drop for Access<'_> {
    #[inline]
    fn drop(&mut self) {
        self.cache.lock.leave();
    }
}

/// Resizes within the tier that `flags` name, in place if possible.
///
/// # Safety
/// As for [`Access::reallocate`]; a cache in `flags` is the caller's.
pub(in crate::heap) unsafe fn reallocate_with(
    flags: Flags,
    ptr: *mut u8,
    old: Layout,
    new: Layout,
) -> *mut u8 {
    if let (Some(from), Some(to)) = (magazine::class_of(old), magazine::class_of(new))
        && from == to
    {
        return ptr;
    }
    let size = magazine::fitting_size(new);
    let flags = flags.aligned(size, new.align());
    // SAFETY: as the caller promises. The flags name the arena and a cache of the same tier, so
    // that neither the new object nor the old one crosses.
    unsafe { jemalloc::reallocate(ptr, size, flags) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_on_the_way_in_is_seen_though_somebody_was_inside_meanwhile() {
        let cache = ThreadCache::of_arena(0, Box::leak(Box::new(Allowance::new(0))));
        cache.revoke();
        {
            // SAFETY: revoked; there is no other thread that a barrier would have to reach.
            let mut revoked = unsafe { cache.access_revoked() }.expect("nobody is inside");
            cache.lock.announce(); // A processor may stop the owner here, before it looks.
            revoked.flush(Flush::All);
        }
        cache.restore();
        // The owner goes on and finds the cache restored. The next round comes before it has left.
        cache.revoke();
        // SAFETY: as above.
        assert!(unsafe { cache.access_revoked() }.is_none(), "two are inside");
        cache.lock.leave();
        // SAFETY: as above.
        assert!(unsafe { cache.access_revoked() }.is_some());
        cache.restore();
    }
}
