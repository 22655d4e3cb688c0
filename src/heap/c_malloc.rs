//! Memory as C asks for it: freed and resized without saying how large it was.
//!
//! Uses `global`, `tiers`; for hosts in other languages (`ffi`). A block is asked for in a size that
//! jemalloc gives back exactly (`fitting`), so that the size found by asking jemalloc is the one
//! that magazines file the block under and that counters count.
//!
//! # Invariants
//! 1. The usable size of every block from here is `fitting` of what was asked for.

#![expect(unsafe_code, reason = "allocates")]

use super::far_arenas::FarArenas;
use super::global;
use super::jemalloc::{self, Flags};
use super::placement::{Fill, Tier};
use super::thread_cache::{self, magazine, magazine::SmallClass};
use super::tiers::{self, Origin};
use super::{check, tail};
use crate::base::units::ByteCount;
use std::alloc::Layout;
use std::ptr::NonNull;

/// Alignment that every size class has; from 16 bytes up they have 16.
const ALIGN: usize = 8;

/// The layout to allocate for `size` bytes at `align`; `None` when there is none such.
#[inline]
fn fitting(size: usize, align: usize) -> Option<Layout> {
    let layout = Layout::from_size_align(size.max(1), align).ok()?;
    let size = match magazine::class_size(layout) {
        Some(size) => size,
        None => jemalloc::usable_size_or_zero(layout.size(), Flags::LOCAL.aligned(size, align)),
    };
    // Zero: jemalloc has no such size.
    if size == 0 { None } else { Layout::from_size_align(size, align).ok() }
}

/// The layout of a block, whatever its alignment was.
///
/// # Safety
/// `ptr` is a block of this heap that has not been freed.
#[inline]
unsafe fn layout_of(ptr: NonNull<u8>) -> Layout {
    // SAFETY: as the caller promises.
    let size = unsafe { usable_size(ptr) };
    Layout::from_size_align(size, ALIGN).expect("a block's size is valid")
}

/// Allocates `size` bytes aligned to `align`, a power of two; zeroed if asked for.
///
/// `tier` says where; `None` leaves it to the thread's [`Scope`](crate::Scope) and the
/// size threshold, as with [`FarHeap`](crate::FarHeap). A size of 0 is one of 1. Returns `None`
/// when there is no such memory: for [`Tier::FAR`] also while no far heap is running.
///
/// # Examples
/// ```
/// use farheap::{Tier, malloc};
///
/// let block = malloc::allocate(100, 16, Some(Tier::LOCAL), false).expect("memory");
/// // SAFETY: a block of this heap, freed once.
/// unsafe { malloc::free(block) };
/// ```
#[inline]
#[must_use]
pub fn allocate(
    size: usize,
    align: usize,
    tier: Option<Tier>,
    zeroed: bool,
) -> Option<NonNull<u8>> {
    if tier == Some(Tier::FAR)
        && !zeroed
        && let Some(block) = allocate_at_hand(size, align)
    {
        return Some(block);
    }
    allocate_any(size, align, tier, zeroed)
}

/// Allocates far memory if the size is small, the alignment at most 16, and the calling thread has
/// such a block at hand, which it mostly has; else there is [`allocate`].
///
/// This is what is asked for most often, in a fourth of the instructions (`book/src/measurements/allocations.md`).
#[inline(always)] // Its callers are entry points that do little else.
#[must_use]
pub fn allocate_at_hand(size: usize, align: usize) -> Option<NonNull<u8>> {
    let class = SmallClass::of(size, align)?;
    tiers::default_tier()?.take_small(class)
}

/// As [`allocate_at_hand`], for all sizes, if blocks of this one are far by themselves
/// ([`Heap::threshold`](crate::Heap::threshold)), whatever [`Scope`](crate::Scope) the thread has.
#[inline(always)]
#[must_use]
pub fn allocate_at_hand_by_size(size: usize, align: usize) -> Option<NonNull<u8>> {
    if size < tiers::threshold() {
        return None;
    }
    let arenas = tiers::default_tier()?;
    match SmallClass::of(size, align) {
        Some(class) => arenas.take_small(class),
        None => {
            let size = magazine::class_size(Layout::from_size_align(size, align).ok()?)?;
            arenas.take(Layout::from_size_align(size, align).ok()?)
        }
    }
}

/// As [`allocate`], for any request.
#[inline(never)]
fn allocate_any(
    size: usize,
    align: usize,
    tier: Option<Tier>,
    zeroed: bool,
) -> Option<NonNull<u8>> {
    let layout = fitting(size, align)?;
    let fill = if zeroed { Fill::Zero } else { Fill::Any };
    let ptr = match tier {
        // SAFETY: the size is not zero.
        Some(tier) => unsafe { global::allocate_at(tier, layout, fill) },
        // SAFETY: the size is not zero.
        None => unsafe { global::allocate(global::arenas_for(layout.size()), layout, fill) },
    };
    NonNull::new(ptr)
}

/// Resizes a block to `size` bytes (0 is 1), aligned to 16, or 8 if smaller; it stays in its tier unless it grows
/// and the policy sends the new size far. `None` leaves it as it was.
///
/// # Safety
/// `ptr` is a block from this module that has not been freed; it is not used again if the result
/// is not `None`.
#[must_use]
pub unsafe fn reallocate(ptr: NonNull<u8>, size: usize) -> Option<NonNull<u8>> {
    let new = fitting(size, ALIGN)?;
    // SAFETY: as the caller promises.
    let old = unsafe { layout_of(ptr) };
    if new.size() == old.size() {
        return Some(ptr);
    }
    // SAFETY: as the caller promises.
    if let Some(moved) = unsafe { move_small(ptr, old, new) } {
        return Some(moved);
    }
    // SAFETY: as the caller promises; sizes are not zero and alignments equal.
    NonNull::new(unsafe { global::resize(ptr.as_ptr(), old, new) })
}

/// Moves a far block to another small class of its tier, if the thread has such a block at hand. By way of jemalloc, past the
/// magazines, it costs twice as much.
///
/// # Safety
/// As for [`reallocate`]; the block has the old layout.
#[inline]
unsafe fn move_small(ptr: NonNull<u8>, old: Layout, new: Layout) -> Option<NonNull<u8>> {
    let Some(Origin::Far(arenas)) = tiers::origin_at_once(ptr.as_ptr()) else { return None };
    SmallClass::of(old.size(), old.align())?;
    let moved = arenas.take_small(SmallClass::of(new.size(), new.align())?)?;
    // SAFETY: both have that many bytes, and the new block overlaps nothing.
    unsafe { moved.copy_from_nonoverlapping(ptr, old.size().min(new.size())) };
    // SAFETY: as the caller promises.
    unsafe { free_sized(ptr, old.size(), old.align()) };
    Some(moved)
}

/// Frees a block.
///
/// # Safety
/// `ptr` is a block from this module that has not been freed and is not used again.
#[inline]
pub unsafe fn free(ptr: NonNull<u8>) {
    match tiers::origin_at_once(ptr.as_ptr()) {
        // SAFETY: as the caller promises.
        Some(origin) => unsafe { free_at(origin, ptr) },
        // SAFETY: as the caller promises.
        None => unsafe { free_elsewhere(ptr) },
    }
}

/// # Safety
/// As for [`free`], and `ptr` is from there.
#[inline]
unsafe fn free_at(origin: Origin, ptr: NonNull<u8>) {
    match origin {
        Origin::Far(arenas) => {
            if let Some(class) = arenas.sizes().class_of(ptr.as_ptr()).and_then(SmallClass::of_class)
                // SAFETY: as the caller promises; the block has this class (invariant 1 of `page_sizes`).
                && unsafe { arenas.put_small(ptr.as_ptr(), class) }
            {
                return;
            }
            // SAFETY: as the caller promises.
            unsafe { free_far(arenas, ptr) }
        }
        // A large block starts on a page border; to look up the size of every block would cost more.
        // SAFETY: as the caller promises.
        Origin::Local if is_on_page(ptr) => unsafe { free_local(ptr) },
        // SAFETY: as the caller promises.
        Origin::Local => unsafe { jemalloc::free_unsized(ptr.as_ptr()) },
        Origin::Parent => {}
    }
}

/// As [`free`], where it takes more to tell what a pointer is.
///
/// # Safety
/// As there.
#[inline(never)]
unsafe fn free_elsewhere(ptr: NonNull<u8>) {
    if tail::is_on() {
        // SAFETY: as the caller promises.
        return unsafe { check::free(ptr.as_ptr(), None) };
    }
    // SAFETY: as the caller promises.
    unsafe { free_at(tiers::origin(ptr.as_ptr()), ptr) }
}

/// Frees a far block that the thread has no room for, or that is not small.
///
/// # Safety
/// As for [`free`], and `ptr` is of this tier.
#[inline(never)]
unsafe fn free_far(arenas: &'static FarArenas, ptr: NonNull<u8>) {
    if arenas.sizes().size_of(ptr.as_ptr()).is_none() {
        tail::expect_known(ptr.as_ptr()); // Huge, or nothing at all.
    }
    // SAFETY: as the caller promises.
    let layout = unsafe { layout_of(ptr) };
    if layout.size() >= magazine::EXTENT_MIN && !is_on_page(ptr) {
        let size = layout.size();
        tail::wrong(
            ptr.as_ptr(),
            format_args!("no block begins here, in the first page of one of {size} bytes"),
        );
    }
    // SAFETY: as the caller promises; a block's usable size is its class's (invariant 1).
    unsafe { arenas.free(ptr.as_ptr(), layout) }
}

#[inline]
fn is_on_page(ptr: NonNull<u8>) -> bool {
    ptr.as_ptr().addr().is_multiple_of(jemalloc::PAGE)
}

/// Frees a local block that may be large.
///
/// # Safety
/// As for [`free`].
#[inline(never)]
unsafe fn free_local(ptr: NonNull<u8>) {
    // SAFETY: as the caller promises.
    let layout = unsafe { layout_of(ptr) };
    // SAFETY: as the caller promises; a block's usable size is its class's (invariant 1).
    unsafe { global::free(ptr.as_ptr(), layout) }
}

/// Frees a block whose size and alignment the caller knows, which is faster for far memory.
///
/// # Safety
/// As for [`free`], and the block was allocated with this size and alignment.
#[inline]
pub unsafe fn free_sized(ptr: NonNull<u8>, size: usize, align: usize) {
    if let Origin::Far(arenas) = tiers::origin(ptr.as_ptr())
        // SAFETY: as the caller promises.
        && unsafe { put_small(arenas, ptr, size, align) }
    {
        return;
    }
    // SAFETY: as the caller promises.
    unsafe { free_any(ptr, size, align) }
}

/// Frees a far block if it is small and the thread has room for it.
///
/// # Safety
/// As for [`free_sized`], and the block is of this tier.
#[inline]
unsafe fn put_small(
    arenas: &'static FarArenas,
    ptr: NonNull<u8>,
    size: usize,
    align: usize,
) -> bool {
    // SAFETY: as the caller promises.
    SmallClass::of(size, align)
        .is_some_and(|class| unsafe { arenas.put_small(ptr.as_ptr(), class) })
}

/// As [`free_sized`], for any block.
///
/// # Safety
/// As there.
#[inline(never)]
unsafe fn free_any(ptr: NonNull<u8>, size: usize, align: usize) {
    // Where no block has such a size the one at hand knows better.
    // SAFETY: as the caller promises.
    let layout = fitting(size, align).unwrap_or_else(|| unsafe { layout_of(ptr) });
    // SAFETY: as the caller promises.
    unsafe { global::free(ptr.as_ptr(), layout) }
}

/// Bytes of a block that may be used: at least what was asked for.
///
/// # Safety
/// `ptr` is a block from this module that has not been freed.
#[inline]
#[must_use]
pub unsafe fn usable_size(ptr: NonNull<u8>) -> usize {
    let noted = match tiers::origin_at_once(ptr.as_ptr()) {
        Some(Origin::Far(arenas)) => arenas.sizes().size_of(ptr.as_ptr()),
        Some(Origin::Local | Origin::Parent) => None,
        // SAFETY: as the caller promises.
        None => return unsafe { usable_size_elsewhere(ptr) },
    };
    // SAFETY: as the caller promises.
    noted.unwrap_or_else(|| unsafe { jemalloc::size_of_block(ptr.as_ptr()) })
}

/// As [`usable_size`], where it takes more to tell what a pointer is.
///
/// # Safety
/// As there.
#[cold]
unsafe fn usable_size_elsewhere(ptr: NonNull<u8>) -> usize {
    if tail::is_on() {
        // SAFETY: as the caller promises.
        return unsafe { check::usable_size(ptr.as_ptr()) };
    }
    // SAFETY: as the caller promises.
    unsafe { jemalloc::size_of_block(ptr.as_ptr()) }
}

/// True if far memory is being handed out: a heap runs, and this is not a forked child.
#[must_use]
pub fn serves_far() -> bool {
    tiers::default_tier().is_some()
}

/// Keeps in memory, from the end of the calling thread's function on, what the kernel reads and writes after that for a thread that ends:
/// the robust mutexes that it holds, and the word by which others wait for it. Threads that allocate far memory do so by
/// themselves; this is for others that use some.
///
/// To be called when the thread starts: destructors of thread-local variables run in the opposite order of their registration.
pub fn watch_end_of_thread() {
    thread_cache::register_exit();
}

/// Bytes of RAM that the allocator has for what is not far; also where no far heap runs.
#[must_use]
pub fn local_resident() -> ByteCount {
    tiers::local_resident()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_has_the_size_that_was_fitted_for_it() {
        let sizes = (0..=9000).chain((9000..=9 << 20).step_by(12_281));
        for size in sizes {
            for align in [1, 16, 64, 4096, 8192, 64 << 10] {
                let layout = fitting(size, align).expect("a possible size");
                assert!(layout.size() >= size);
                let block = allocate(size, align, Some(Tier::LOCAL), false).expect("memory");
                assert_eq!(block.as_ptr().addr() % align, 0);
                // SAFETY: allocated above.
                let usable = unsafe { usable_size(block) };
                assert_eq!(usable, layout.size(), "{size} at {align}");
                let found = Layout::from_size_align(usable, ALIGN).expect("valid");
                let class = magazine::class_of(found);
                let right = class.is_none_or(|_| magazine::class_size(found) == Some(usable));
                assert!(right, "{size} at {align} would be filed under another class");
                // SAFETY: allocated above with this size and alignment, not used any more.
                unsafe { free_sized(block, size, align) };
            }
        }
    }

    #[test]
    fn impossible_sizes_and_alignments_are_refused() {
        for size in [usize::MAX, isize::MAX as usize, isize::MAX as usize - 4096] {
            assert_eq!(allocate(size, 16, Some(Tier::LOCAL), false), None);
        }
        for align in [0, 3, 48] {
            assert_eq!(allocate(64, align, Some(Tier::LOCAL), false), None);
        }
    }

    #[test]
    fn a_resized_block_keeps_its_bytes() {
        let block = allocate(100, 16, Some(Tier::LOCAL), true).expect("memory");
        // SAFETY: the block has 100 bytes.
        unsafe { block.write_bytes(7, 100) };
        // SAFETY: allocated above.
        let block = unsafe { reallocate(block, 1 << 20) }.expect("memory");
        // SAFETY: the block has 100 bytes and more.
        let bytes = unsafe { std::slice::from_raw_parts(block.as_ptr(), 100) };
        assert!(bytes.iter().all(|byte| *byte == 7));
        // SAFETY: the block from above, not used any more.
        unsafe { free(block) };
    }
}
