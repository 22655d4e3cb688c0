//! Slots: one thread's share of a tier, its magazines, explicit cache and counters.
//!
//! A thread claims a slot of the tier's [`Slots`] at its first far allocation and gives it back
//! when it exits; the next thread takes it over with its cache. Who may use a slot's inside, its
//! owner or who has barred it, `bar` says. Uses `bar`, `jemalloc`, `magazine`; owned by `Tier`.
//!
//! # Invariants
//! 1. At most one [`Access`] or [`Barred`] of a slot exists.
//! 2. Slots are barred by one thread at a time, the holder of the tier's control flag.
//! 3. `counts` are written through an `Access` only.
//! 4. A slot is never freed: a sleeping thread may hold a reference into a tier that is gone.

#![expect(unsafe_code, reason = "hands out the inside of a slot")]

use super::allowance::{Allowance, Part};
use super::bar::Bar;
use super::counts::Counts;
use super::jemalloc::{self, Cache, Flags};
use super::magazine::{self, Magazines, SmallClass};
use super::thread;
use crate::base::sync::{
    AtomicBool, AtomicU64, AtomicUsize,
    Ordering::{Acquire, Relaxed, Release},
};
use crate::sys::fork::Born;
use std::alloc::Layout;
use std::cell::UnsafeCell;
use std::mem::ManuallyDrop;
use std::sync::OnceLock;

/// Most slots of a tier: as many as jemalloc has explicit caches, about.
pub(super) const SLOTS_MAX: usize = 4096;

/// Whether new memory must be zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fill {
    /// Contents do not matter.
    Any,
    /// All bytes are zero.
    Zero,
}

/// One thread's share of a tier.
#[repr(align(128))] // Two lines: neighbours are prefetched in pairs.
pub(super) struct Slot {
    bar: Bar,
    owned: AtomicBool,
    /// Bytes allocated and freed through this slot.
    counts: Counts,
    /// The traffic of `counts` when the slot was last looked at for idleness, and when it was last
    /// flushed for that.
    seen: AtomicU64,
    flushed: AtomicU64,
    /// What all slots may keep, and what this one may.
    allowance: &'static Allowance,
    part: Part,
    born: Born,
    inside: UnsafeCell<Inside>,
}

// SAFETY: `inside` is used through an `Access` or a `Barred` only, and there is at most one
// (invariant 1); its pointers are objects that the slot owns.
unsafe impl Sync for Slot {}

// SAFETY: as for `Sync`; nothing in a slot belongs to a thread.
unsafe impl Send for Slot {}

struct Inside {
    /// Dropped when the tier closes, 29 KiB a slot. The slot stays, see invariant 4.
    magazines: ManuallyDrop<Magazines>,
    /// `None` when jemalloc had no cache left, or after the tier has closed.
    cache: Option<Cache>,
    /// What goes through `cache` at present.
    cached: Cached,
    /// The slot's arena, through `cache` if there is one.
    flags: Flags,
    /// The slot's arena, past the cache.
    uncached: Flags,
}

/// Which objects go through jemalloc's cache: it cannot be told how much to keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cached {
    None,
    /// Up to this size.
    UpTo(usize),
}

/// What jemalloc's cache can hold of objects up to [`magazine::SMALL_MAX`], and of those up to
/// [`CACHED_SIZE`]: sums over its classes of 20 to 200 objects (jemalloc 5.3.1, `tcache.c`).
const CACHE_BYTES: usize = 5 << 20;
const CACHE_BYTES_SMALL: usize = 512 << 10;

/// What goes through jemalloc's cache where there is no allowance for more, in bytes: for small
/// objects the arena's locks are most of the price.
const CACHED_SIZE: usize = 1 << 10;

/// The owner's exclusive use of a slot's inside. Ends when dropped.
pub(super) struct Access<'a> {
    slot: &'a Slot,
}

/// The exclusive use of the inside of a slot by who has barred it. Ends with the bar.
pub(super) struct Barred<'a> {
    slot: &'a Slot,
}

impl Slot {
    /// A slot that belongs to its creator, with a cache if there is one.
    fn new(arena: u32, large_max: usize, allowance: &'static Allowance) -> Slot {
        let cache = Cache::create();
        let uncached = Flags::uncached(arena);
        let flags = cache.as_ref().map_or(uncached, |cache| Flags::cached(arena, cache.index()));
        let magazines = ManuallyDrop::new(Magazines::new(large_max));
        let inside = Inside { magazines, cache, cached: Cached::None, flags, uncached };
        Slot {
            bar: Bar::new(),
            owned: AtomicBool::new(true),
            counts: Counts::new(),
            seen: AtomicU64::new(0),
            flushed: AtomicU64::new(0),
            allowance,
            part: Part::new(),
            born: Born::here(),
            inside: UnsafeCell::new(inside),
        }
    }

    /// Opens the slot for its owner; `None` while it is barred.
    #[inline]
    pub(super) fn access(&self) -> Option<Access<'_>> {
        // Not `then_some`: one that is made is dropped, and leaves.
        self.bar.enter().then(|| Access { slot: self })
    }

    /// Keeps the owner out from its next access on. Follow with a barrier on all threads.
    pub(super) fn bar(&self) {
        self.bar.set();
    }

    /// Lets the owner in again.
    pub(super) fn unbar(&self) {
        self.bar.lift();
    }

    /// Opens a barred slot for the thread that barred it; `None` while the owner is still inside.
    ///
    /// # Safety
    /// The caller has barred the slot and run a barrier on all threads since, and uses what it gets
    /// until it lifts the bar at the latest, with no other one beside it.
    pub(super) unsafe fn access_barred(&self) -> Option<Barred<'_>> {
        self.bar.is_empty().then_some(Barred { slot: self })
    }

    /// Ends the ownership of the calling thread, after emptying the slot.
    pub(super) fn give_back(&self) {
        if !self.born.is_here() {
            return; // What is in the slot is the parent's of this forked child.
        }
        // When the slot is barred, who barred it empties it now or at the next round.
        if let Some(mut access) = self.access() {
            access.flush();
        }
        self.owned.store(false, Release);
    }

    /// Whether nothing has happened in the slot since the last call; told once per idle time.
    pub(super) fn has_become_idle(&self) -> bool {
        let now = self.counts.traffic();
        let idle = self.seen.swap(now, Relaxed) == now;
        idle && self.flushed.swap(now, Relaxed) != now
    }

    /// Whether the slot may keep more than its fair share.
    pub(super) fn has_too_much(&self) -> bool {
        self.part.bytes() > self.allowance.share()
    }

    pub(super) fn is_barred(&self) -> bool {
        self.bar.is_set()
    }

    /// Bytes allocated and freed so far.
    pub(super) fn counts(&self) -> &Counts {
        &self.counts
    }
}

impl Access<'_> {
    fn inside(&mut self) -> &mut Inside {
        // SAFETY: this is the only access (invariant 1), borrowed exclusively.
        unsafe { &mut *self.slot.inside.get() }
    }

    /// Takes a block from the magazines, with whatever it contains.
    #[inline]
    pub(super) fn take(&mut self, layout: Layout) -> Option<*mut u8> {
        let magazines = &mut self.inside().magazines;
        let class = magazine::class_of(layout)?;
        let object = magazines.take(class)?;
        if object.addr() & (layout.align() - 1) != 0 {
            // Possible with `cache_oblivious`, which moves large objects off page borders.
            magazines.put(class, object);
            return None;
        }
        Some(object)
    }

    /// Puts a block into the magazines; `false` when there is no room.
    ///
    /// # Safety
    /// `ptr` is an allocation of the slot's tier with this layout and is not used again.
    #[inline]
    pub(super) unsafe fn put(&mut self, ptr: *mut u8, layout: Layout) -> bool {
        magazine::class_of(layout).is_some_and(|class| self.inside().magazines.put(class, ptr))
    }

    /// Takes a block of a small class from the magazines, and counts it.
    #[inline]
    pub(super) fn take_small(&mut self, class: SmallClass) -> Option<*mut u8> {
        let object = self.inside().magazines.take_small(class)?;
        self.count_allocated(class.size());
        Some(object)
    }

    /// Puts a block of a small class into the magazines, and counts it; `false` when there is no
    /// room.
    ///
    /// # Safety
    /// `ptr` is an allocation of the slot's tier of this class and is not used again.
    #[inline]
    pub(super) unsafe fn put_small(&mut self, ptr: *mut u8, class: SmallClass) -> bool {
        let is_kept = self.inside().magazines.put_small(class, ptr);
        if is_kept {
            self.count_freed(class.size());
        }
        is_kept
    }

    /// Makes room for a block of this layout in the magazines, if they are allowed more.
    pub(super) fn make_room(&mut self, layout: Layout) -> bool {
        let slot = self.slot;
        let magazines = &mut self.inside().magazines;
        let Some(class) = magazine::class_of(layout) else { return false };
        let Some(bytes) = magazines.next_room(class) else { return false };
        let is_allowed = slot.part.take(slot.allowance, bytes);
        if is_allowed {
            magazines.add_room(class, bytes);
        }
        is_allowed
    }

    /// Where an object that the magazines do not serve comes from or goes.
    fn flags_for(&mut self, size: usize) -> Flags {
        let slot = self.slot;
        let inside = self.inside();
        if inside.cached == Cached::None && inside.cache.is_some() {
            if slot.part.take(slot.allowance, CACHE_BYTES) {
                inside.cached = Cached::UpTo(magazine::SMALL_MAX);
            } else if slot.part.take(slot.allowance, CACHE_BYTES_SMALL) {
                inside.cached = Cached::UpTo(CACHED_SIZE);
            }
        }
        match inside.cached {
            Cached::UpTo(most) if size <= most => inside.flags,
            _ => inside.uncached,
        }
    }

    /// Allocates past the magazines; null when the arena cannot.
    ///
    /// # Safety
    /// The layout's size is not zero.
    pub(super) unsafe fn allocate(&mut self, layout: Layout) -> *mut u8 {
        let size = magazine::fitting_size(layout);
        let flags = self.flags_for(size).aligned(size, layout.align());
        // SAFETY: the size is not zero; the cache in `flags` is the slot's, which this access
        // holds.
        unsafe { jemalloc::allocate(size, flags) }
    }

    /// Frees past the magazines.
    ///
    /// # Safety
    /// As for [`put`](Self::put).
    pub(super) unsafe fn free(&mut self, ptr: *mut u8, layout: Layout) {
        let size = magazine::fitting_size(layout);
        let flags = self.flags_for(size).aligned(size, layout.align());
        // SAFETY: as the caller promises; the cache is the slot's and its tier that of `ptr`.
        unsafe { jemalloc::free(ptr, size, flags) }
    }

    /// Resizes within the tier; null leaves the allocation as it was.
    ///
    /// # Safety
    /// As for [`put`](Self::put), and `new` has the same alignment and a size above zero.
    pub(super) unsafe fn reallocate(&mut self, ptr: *mut u8, old: Layout, new: Layout) -> *mut u8 {
        // The cache also takes what the object leaves behind.
        let flags = self.flags_for(magazine::fitting_size(old).max(magazine::fitting_size(new)));
        // SAFETY: as the caller promises.
        unsafe { reallocate_with(flags, ptr, old, new) }
    }

    #[inline]
    pub(super) fn count_allocated(&mut self, bytes: usize) {
        self.slot.counts.allocated_alone(bytes);
    }

    #[inline]
    pub(super) fn count_freed(&mut self, bytes: usize) {
        self.slot.counts.freed_alone(bytes);
    }

    /// Returns everything cached to the arenas.
    pub(super) fn flush(&mut self) {
        self.inside().flush();
        self.slot.part.give_back(self.slot.allowance);
    }
}

impl Barred<'_> {
    fn inside(&mut self) -> &mut Inside {
        // SAFETY: this is the only access (invariant 1), borrowed exclusively.
        unsafe { &mut *self.slot.inside.get() }
    }

    /// Returns everything cached to the arenas.
    pub(super) fn flush(&mut self) {
        self.inside().flush();
        self.slot.part.give_back(self.slot.allowance);
    }

    /// Flushes, and gives the explicit cache back to jemalloc and the magazines' memory back for
    /// good.
    ///
    /// # Safety
    /// The bar is never lifted again.
    pub(super) unsafe fn close(mut self) {
        self.flush();
        let inside = self.inside();
        inside.flags = inside.uncached;
        if let Some(cache) = inside.cache.take() {
            cache.destroy();
        }
        let _pinned = thread::pin();
        // SAFETY: the inside is used by its owner or by who has barred it; the owner stays out, as
        // the caller promises, and this is consumed.
        unsafe { ManuallyDrop::drop(&mut inside.magazines) };
    }
}

impl Inside {
    fn flush(&mut self) {
        let uncached = self.uncached;
        self.magazines.drain(|object, size| {
            // SAFETY: the magazines own the object, whose class has this size.
            unsafe { jemalloc::free(object, size, uncached) };
        });
        if let Some(cache) = self.cache.as_ref().filter(|_| self.cached != Cached::None) {
            cache.flush();
        }
        self.cached = Cached::None;
    }
}

impl Drop for Access<'_> {
    #[inline]
    fn drop(&mut self) {
        self.slot.bar.leave();
    }
}

/// Resizes within the tier that `flags` name, in place if possible.
///
/// # Safety
/// As for [`Access::reallocate`]; a cache in `flags` is the caller's.
pub(super) unsafe fn reallocate_with(
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

/// Slots whose places are allocated together. A tier is never freed: places for all that it could
/// have would leak 64 KiB with each.
const SEGMENT: usize = 64;

/// Places of slots.
type Segment = [OnceLock<&'static Slot>; SEGMENT];

/// The slots of a tier.
pub(super) struct Slots {
    segments: [OnceLock<Box<Segment>>; SLOTS_MAX / SEGMENT],
    /// Slots that exist: all below this index, but for one that is just being made.
    len: AtomicUsize,
    large_max: usize,
    allowance: &'static Allowance,
}

impl Slots {
    /// `large_max` bounds what one slot keeps of large objects, `cache_max` what all slots keep.
    pub(super) fn new(large_max: usize, cache_max: usize) -> Slots {
        let segments = [const { OnceLock::new() }; SLOTS_MAX / SEGMENT];
        let allowance = Box::leak(Box::new(Allowance::new(cache_max)));
        Slots { segments, len: AtomicUsize::new(0), large_max, allowance }
    }

    /// What all slots may keep.
    pub(super) fn allowance(&self) -> &'static Allowance {
        self.allowance
    }

    /// Claims a slot for the calling thread: one that another thread has given back, else a new
    /// one on the arena that `arena_of` names for its index. `None`: all are taken.
    pub(super) fn claim(&self, arena_of: impl Fn(usize) -> u32) -> Option<&'static Slot> {
        let free = self.iter().find(|slot| {
            !slot.owned.load(Relaxed)
                // Pairs with the Release in `give_back`.
                && slot.owned.compare_exchange(false, true, Acquire, Relaxed).is_ok()
        });
        if free.is_some() {
            return free;
        }
        let next = |len| (len < SLOTS_MAX).then_some(len + 1);
        let index = self.len.fetch_update(Relaxed, Relaxed, next).ok()?;
        let _pinned = thread::pin();
        let slot = Slot::new(arena_of(index), self.large_max, self.allowance);
        let slot: &'static Slot = Box::leak(Box::new(slot));
        let segment = self.segments[index / SEGMENT]
            .get_or_init(|| Box::new([const { OnceLock::new() }; SEGMENT]));
        segment[index % SEGMENT].set(slot).ok().expect("the index was claimed above, once");
        Some(slot)
    }

    /// All slots that exist.
    pub(super) fn iter(&self) -> impl Iterator<Item = &'static Slot> {
        let len = self.len.load(Relaxed);
        (0..len).filter_map(|index| {
            self.segments[index / SEGMENT].get()?[index % SEGMENT].get().copied()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_on_the_way_in_is_seen_though_somebody_was_inside_meanwhile() {
        let slot = Slot::new(0, 0, Box::leak(Box::new(Allowance::new(0))));
        slot.bar();
        {
            // SAFETY: barred; there is no other thread that a barrier would have to reach.
            let mut barred = unsafe { slot.access_barred() }.expect("nobody is inside");
            slot.bar.knock(); // A processor may stop the owner here, before it looks at the bar.
            barred.flush();
        }
        slot.unbar();
        // The owner goes on and finds no bar. The next round comes before it has left.
        slot.bar();
        // SAFETY: as above.
        assert!(unsafe { slot.access_barred() }.is_none(), "two are inside");
        slot.bar.leave();
        // SAFETY: as above.
        assert!(unsafe { slot.access_barred() }.is_some());
        slot.unbar();
    }
}
