//! Local memory: jemalloc's automatic arenas and caches, and for large blocks a cache of our own.
//!
//! Blocks up to [`SMALL_MAX`](magazine::SMALL_MAX) go to jemalloc, which caches them. From there to
//! [`SIZE_MAX`](magazine::SIZE_MAX) it takes an arena's locks each time: a pair of allocate and free
//! costs 450 ns, churn of 16 to 256 KiB 1.5 us. So a thread keeps what it frees of those sizes in a
//! [`ThreadCache`], the same as for far memory, and an allocation takes it from there. Works without a
//! far heap; while one runs, its maintenance thread empties the caches of idle threads. Uses
//! `jemalloc`, `thread_cache`; used by `global` and `far_arenas`.
//!
//! # Invariants
//! 1. Every local block above `SMALL_MAX` is allocated, resized and freed with its
//!    [`fitting_size`](magazine::fitting_size), so that blocks of a class can replace each other.
//! 2. Only local blocks enter a cache of local memory.

#![expect(unsafe_code, reason = "allocates")]

use super::jemalloc::{self, Flags};
use super::placement::Fill;
use super::tail;
use super::thread_cache::{self, Allowance, Flush, ThreadCache, ThreadCaches, magazine};
use crate::base::strict_assert;
use crate::base::sync::{AtomicUsize, Ordering::Relaxed};
use crate::base::units::ByteCount;
use std::alloc::Layout;

/// Bytes that the caches of all threads keep at most: one thread can keep a block of the largest class and
/// more. See `far_arenas::CACHE_MAX`.
const CACHE_MAX: ByteCount = ByteCount::mib(24);
const CACHE_MAX_MORE: ByteCount = ByteCount::mib(2);

/// Larger blocks go the way of large blocks. Changed by [`keep_nothing`] only.
static SMALL_UP_TO: AtomicUsize = AtomicUsize::new(magazine::SMALL_MAX);

static ALLOWANCE: Allowance = Allowance::new(CACHE_MAX.0 as usize);
static CACHES: ThreadCaches = ThreadCaches::new(&ALLOWANCE, 0);

/// Allocates; null when out of memory.
///
/// # Safety
/// The layout's size is not zero.
#[inline]
pub(super) unsafe fn allocate(layout: Layout, fill: Fill) -> *mut u8 {
    if layout.size() > SMALL_UP_TO.load(Relaxed) {
        // SAFETY: the size is not zero.
        return unsafe { allocate_large(layout, fill) };
    }
    // SAFETY: the size is not zero.
    unsafe { allocate_new(layout.size(), layout.align(), fill) }
}

/// True if a small block needs no alignment that its size does not have: most are so.
#[inline]
pub(super) fn is_plain(layout: Layout) -> bool {
    strict_assert!(layout.size() <= magazine::SMALL_MAX, "{layout:?} is not small");
    Flags::is_natural(layout.size(), layout.align())
}

/// As [`allocate`], of a [plain](is_plain) block of `size` bytes.
///
/// # Safety
/// As for [`allocate`].
#[inline]
pub(super) unsafe fn allocate_plain(size: usize) -> *mut u8 {
    // SAFETY: as the caller promises; automatic caches belong to their threads.
    unsafe { jemalloc::allocate(size, Flags::LOCAL) }
}

/// Frees.
///
/// # Safety
/// `ptr` was allocated by [`allocate`] or [`reallocate`] with this layout and is not used again.
#[inline]
pub(super) unsafe fn free(ptr: *mut u8, layout: Layout) {
    if layout.size() > magazine::SMALL_MAX {
        // SAFETY: as the caller promises.
        return unsafe { free_large(ptr, layout) };
    }
    if Flags::is_natural(layout.size(), layout.align()) {
        // SAFETY: as the caller promises; automatic caches belong to their threads.
        return unsafe { jemalloc::free(ptr, layout.size(), Flags::LOCAL) };
    }
    // SAFETY: as the caller promises.
    unsafe { free_aligned(ptr, layout) }
}

/// As [`free`], of a small block with more than its natural alignment. Out of line as [`allocate_large`] is.
///
/// # Safety
/// As for [`free`].
#[inline(never)]
unsafe fn free_aligned(ptr: *mut u8, layout: Layout) {
    let flags = Flags::LOCAL.aligned(layout.size(), layout.align());
    // SAFETY: as the caller promises; automatic caches belong to their threads.
    unsafe { jemalloc::free(ptr, layout.size(), flags) }
}

/// Resizes; null leaves the allocation as it was.
///
/// # Safety
/// As for [`free`], and `new` has the same alignment and a size above zero.
#[inline]
pub(super) unsafe fn reallocate(ptr: *mut u8, old: Layout, new: Layout) -> *mut u8 {
    // SAFETY: as the caller promises; automatic caches belong to their threads.
    unsafe { thread_cache::reallocate_with(Flags::LOCAL, ptr, old, new) }
}

/// Empties the caches of threads that did nothing since the last call, and of those that have more
/// than their share while others need it.
pub(super) fn maintain() {
    let some_have_too_much = CACHES.some_have_too_much();
    // Both are asked: idleness is told by comparing with the last time.
    let choose = |cache: &ThreadCache| {
        cache.has_become_idle() | (some_have_too_much && cache.has_too_much())
    };
    flush(choose);
}

/// Empties all caches, if they may hold more than `least`.
pub(super) fn give_back(least: ByteCount) {
    if CACHES.room() > least {
        flush(|_| true);
    }
}

/// Sets what caches keep at most: an amount that suits the machine, and `most` at most.
pub(crate) fn set_cache_max(most: ByteCount) {
    let most = if tail::is_on() { ByteCount::ZERO } else { most };
    CACHES.set_max(most.min(thread_cache::suited(CACHE_MAX, CACHE_MAX_MORE)));
}

/// Makes every block come from jemalloc by the way of large ones, and caches keep none.
pub(super) fn keep_nothing() {
    SMALL_UP_TO.store(0, Relaxed);
    set_cache_max(ByteCount::ZERO);
    give_back(ByteCount::ZERO);
}

/// Bytes that the caches have room for.
#[cfg(test)]
pub(super) fn cache_room() -> ByteCount {
    CACHES.room()
}

fn flush(choose: impl Fn(&ThreadCache) -> bool) {
    if let Some(control) = CACHES.take_control() {
        control.flush(choose, Flush::All);
    }
}

/// Allocates from jemalloc.
///
/// # Safety
/// The size is not zero.
#[inline]
unsafe fn allocate_new(size: usize, align: usize, fill: Fill) -> *mut u8 {
    let flags = Flags::LOCAL.aligned(size, align);
    let flags = if fill == Fill::Zero { flags.zeroed() } else { flags };
    // SAFETY: the size is not zero; automatic caches belong to their threads.
    unsafe { jemalloc::allocate(size, flags) }
}

/// Out of line, so that small blocks cost what they cost without it.
#[inline(never)]
unsafe fn allocate_large(layout: Layout, fill: Fill) -> *mut u8 {
    if let Some(mut access) = thread_cache::access_local() {
        let taken = access.take(layout);
        access.count_allocated(layout.size());
        drop(access);
        if let Some(ptr) = taken {
            if fill == Fill::Zero {
                // SAFETY: the block has `size` bytes and is nobody else's.
                unsafe { ptr.write_bytes(0, layout.size()) };
            }
            return ptr;
        }
    }
    let size = magazine::fitting_size(tail::with_tail(layout));
    // SAFETY: the caller passes no empty layout.
    let mut ptr = unsafe { allocate_new(size, layout.align(), fill) };
    if ptr.is_null() && CACHES.room() > ByteCount::ZERO {
        // The address space may be limited, and what caches keep may be what is missing.
        give_back(ByteCount::ZERO);
        // SAFETY: the caller passes no empty layout.
        ptr = unsafe { allocate_new(size, layout.align(), fill) };
    }
    // SAFETY: allocated just now, with a tail.
    unsafe { tail::cover(ptr, layout.size()) };
    ptr
}

/// Out of line as [`allocate_large`] is.
#[inline(never)]
unsafe fn free_large(ptr: *mut u8, layout: Layout) {
    if let Some(mut access) = thread_cache::access_local() {
        access.count_freed(layout.size());
        // SAFETY: as the caller promises: a local block.
        if unsafe { access.put(ptr, layout) } {
            return;
        }
    }
    // SAFETY: as the caller promises; no magazine has taken it.
    unsafe { free_missed(ptr, layout) }
}

#[cold]
unsafe fn free_missed(ptr: *mut u8, layout: Layout) {
    if magazine::class_of(layout).is_some() {
        thread_cache::claim_local(|| CACHES.claim(|_, allowance| ThreadCache::of_local(allowance)));
        if let Some(mut access) = thread_cache::access_local() {
            // SAFETY: as the caller promises.
            if access.make_room(layout) && unsafe { access.put(ptr, layout) } {
                return;
            }
        }
    }
    let size = magazine::fitting_size(layout);
    let flags = Flags::LOCAL.aligned(size, layout.align());
    // SAFETY: as the caller promises; allocated with this size.
    unsafe { jemalloc::free(ptr, size, flags) }
}
