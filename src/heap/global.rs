//! Local and far memory, and the global allocator.
//!
//! [`FarHeap`] decides for each allocation whether it is local or of which far tier. Uses `tiers`,
//! `far_arenas`, `local`, `placement`; `handle` and `c_malloc` use it.
//!
//! # Policy
//! 1. The handles [`Far`](crate::Far), [`Local`](crate::Local) and [`Tier`]: what they say.
//! 2. A pinned thread: local.
//! 3. The innermost [`Scope`](crate::Scope): what it says.
//! 4. The default tier's size threshold, which is zero where everything is to be far, and off where system calls cannot be given far memory
//!    (`runtime::threshold`).
//!
//! `realloc` stays in its tier, with one exception: a local allocation moves when it grows and
//! the policy sends the new size far. So a vector that grows past the threshold becomes far; one
//! that shrinks below it stays far.
//!
//! # Invariants
//! 1. A pointer goes back to where its address says it came from, whatever the policy says by
//!    then.

#![expect(unsafe_code, reason = "implements a global allocator")]

use super::far_arenas::FarArenas;
use super::local;
use super::placement::{self, Fill, Tier};
use super::tiers::{self, Origin, is_far, origin};
use super::{check, tail};
use std::alloc::{GlobalAlloc, Layout};
use std::ptr;

/// The tier for an allocation of `size` bytes; `None`: local.
#[inline]
pub(super) fn arenas_for(size: usize) -> Option<&'static FarArenas> {
    match placement::placement() {
        None if size < tiers::threshold() => None,
        Some(Tier::LOCAL) => None,
        Some(tier) => tiers::find(tier),
        _ => tiers::default_tier(),
    }
}

/// Allocates where it is asked for; null when that tier does not run, or there is no memory left.
///
/// # Safety
/// The layout's size is not zero.
#[inline]
pub(super) unsafe fn allocate_at(tier: Tier, layout: Layout, fill: Fill) -> *mut u8 {
    let arenas = match tier {
        // SAFETY: the size is not zero.
        Tier::LOCAL => return unsafe { local::allocate(layout, fill) },
        Tier::FAR => tiers::default_tier(),
        tier => tiers::find(tier),
    };
    // SAFETY: as above.
    unsafe { allocate_from(arenas, layout, fill) }
}

/// Allocates far memory or none; in a forked child that has its parent's far memory, local memory.
///
/// # Safety
/// The layout's size is not zero.
#[inline]
unsafe fn allocate_from(arenas: Option<&'static FarArenas>, layout: Layout, fill: Fill) -> *mut u8 {
    match arenas.filter(|_| fill == Fill::Any).and_then(|arenas| arenas.take(layout)) {
        Some(block) => block.as_ptr(),
        // SAFETY: the size is not zero.
        None => unsafe { allocate_from_elsewhere(arenas, layout, fill) },
    }
}

/// As [`allocate_from`], where no cache has a block.
///
/// # Safety
/// The layout's size is not zero.
#[inline(never)]
unsafe fn allocate_from_elsewhere(
    arenas: Option<&'static FarArenas>,
    layout: Layout,
    fill: Fill,
) -> *mut u8 {
    let Some(arenas) = arenas else {
        if tiers::inherits() {
            // A child that has its parent's far memory gets what it asks for, though it is local.
            // SAFETY: the size is not zero.
            return unsafe { local::allocate(layout, fill) };
        }
        return ptr::null_mut();
    };
    // SAFETY: the size is not zero. A tier that is just closing has no memory.
    unsafe { arenas.allocate(layout, fill) }.unwrap_or(ptr::null_mut())
}

/// Allocates from `tier`, or locally when it has just been shut down, or is full while the thread
/// [reports a failure](placement::reports_failure).
///
/// # Safety
/// The layout's size is not zero.
#[inline]
pub(super) unsafe fn allocate(
    arenas: Option<&'static FarArenas>,
    layout: Layout,
    fill: Fill,
) -> *mut u8 {
    let Some(arenas) = arenas else {
        // SAFETY: the size is not zero.
        return unsafe { local::allocate(layout, fill) };
    };
    let taken = if fill == Fill::Any { arenas.take(layout) } else { None };
    match taken {
        Some(block) => block.as_ptr(),
        // SAFETY: the size is not zero.
        None => unsafe { allocate_elsewhere(arenas, layout, fill) },
    }
}

/// True if the policy says that a block is local, and it is [plain](local::is_plain): as many answers as can be had
/// for one look at the thread and one at the tiers. That it is small need not be asked: both say so.
#[inline]
fn is_plain_local(layout: Layout) -> bool {
    let is_small_local =
        layout.size() < placement::small_below() && layout.size() < tiers::small_below();
    is_small_local && local::is_plain(layout)
}

/// Allocates by the policy. Out of line: the registers that it needs saved would cost plain local blocks a fifth of
/// their time. For any `Program`, so that it is compiled with the program: code of a library, which may be loaded
/// later, calls a function for each thread-local value, and saves more registers for that.
///
/// # Safety
/// The layout's size is not zero.
#[inline(never)]
#[expect(clippy::extra_unused_type_parameters, reason = "says where it is compiled")]
unsafe fn allocate_by_policy<Program>(layout: Layout) -> *mut u8 {
    match placement::placement() {
        // SAFETY: the size is not zero.
        Some(Tier::LOCAL) => return unsafe { local::allocate(layout, Fill::Any) },
        None if layout.size() < tiers::threshold() => {
            // SAFETY: the size is not zero.
            return unsafe { local::allocate(layout, Fill::Any) };
        }
        None | Some(Tier::FAR) => {
            if let Some(block) = tiers::default_tier().and_then(|arenas| arenas.take(layout)) {
                return block.as_ptr();
            }
        }
        Some(_) => {}
    }
    // SAFETY: the size is not zero.
    unsafe { allocate_any_by_policy(layout, Fill::Any) }
}

/// Allocates by the policy, out of line, see [`FarArenas::take`].
///
/// # Safety
/// The layout's size is not zero.
#[inline(never)]
unsafe fn allocate_any_by_policy(layout: Layout, fill: Fill) -> *mut u8 {
    // SAFETY: the size is not zero.
    unsafe { allocate(arenas_for(layout.size()), layout, fill) }
}

/// As [`allocate`], where the thread's cache has no block.
///
/// # Safety
/// The layout's size is not zero.
#[inline(never)]
unsafe fn allocate_elsewhere(arenas: &'static FarArenas, layout: Layout, fill: Fill) -> *mut u8 {
    // SAFETY: the size is not zero.
    if let Ok(ptr) = unsafe { arenas.allocate(layout, fill) }
        && (!ptr.is_null() || !placement::reports_failure())
    {
        return ptr;
    }
    // SAFETY: the size is not zero.
    unsafe { local::allocate(layout, fill) }
}

/// Frees, wherever `ptr` came from.
///
/// # Safety
/// `ptr` was allocated by this module with `layout` and is not used again.
#[inline]
pub(super) unsafe fn free(ptr: *mut u8, layout: Layout) {
    // SAFETY: as the caller promises.
    unsafe { free_in::<()>(ptr, layout) }
}

/// As [`free`], compiled with the `Program`, as [`allocate_by_policy`] is.
///
/// # Safety
/// As for [`free`].
#[inline]
unsafe fn free_in<Program>(ptr: *mut u8, layout: Layout) {
    if tiers::may_be_far(ptr) {
        // SAFETY: as the caller promises.
        return unsafe { free_far::<Program>(ptr, layout) };
    }
    // SAFETY: outside of all tiers, so allocated by `local`.
    unsafe { local::free(ptr, layout) }
}

/// As [`free`], of a pointer that [may be far](tiers::may_be_far). Out of line, as [`allocate_by_policy`] is.
///
/// # Safety
/// As for [`free`].
#[inline(never)]
#[expect(clippy::extra_unused_type_parameters, reason = "says where it is compiled")]
unsafe fn free_far<Program>(ptr: *mut u8, layout: Layout) {
    match tiers::default_tier_of(ptr) {
        // SAFETY: as the caller promises; `ptr` lies in the tier's reservation.
        Some(arenas) => unsafe { arenas.free(ptr, layout) },
        // SAFETY: as the caller promises.
        None => unsafe { free_elsewhere(ptr, layout) },
    }
}

/// # Safety
/// As for [`free`], and `ptr` is from there.
#[inline]
unsafe fn free_at(origin: Origin, ptr: *mut u8, layout: Layout) {
    match origin {
        // SAFETY: not far, so allocated by `local`.
        Origin::Local => unsafe { local::free(ptr, layout) },
        // SAFETY: `ptr` lies in the tier's reservation.
        Origin::Far(arenas) => unsafe { arenas.free(ptr, layout) },
        Origin::Parent => {} // Nothing is to be done.
    }
}

/// As [`free`], where it takes more to tell what a pointer is.
///
/// # Safety
/// As for [`free`].
#[inline(never)]
unsafe fn free_elsewhere(ptr: *mut u8, layout: Layout) {
    if tail::is_on() {
        // SAFETY: as the caller promises.
        return unsafe { check::free(ptr, Some(layout)) };
    }
    // SAFETY: as the caller promises.
    unsafe { free_at(origin(ptr), ptr, layout) }
}

/// Makes a part of an allocation read as zero.
///
/// # Safety
/// The caller alone uses the range, and needs nothing of what it holds.
pub(super) unsafe fn clear(ptr: *mut u8, len: usize) {
    match origin(ptr) {
        // SAFETY: as the caller promises.
        Origin::Far(arenas) => unsafe { arenas.arenas().clear(ptr, len) },
        // SAFETY: as the caller promises.
        Origin::Local | Origin::Parent => unsafe { ptr.write_bytes(0, len) },
    }
}

/// Resizes within the tier that `ptr` is in; null leaves the allocation as it was. What is to grow of a
/// parent's far memory in a forked child becomes local, if the child can read it.
///
/// # Safety
/// As for [`free`], and `new` has the same alignment and a size above zero.
#[inline]
pub(super) unsafe fn reallocate_in_tier(ptr: *mut u8, old: Layout, new: Layout) -> *mut u8 {
    let origin = match tiers::origin_at_once(ptr) {
        Some(origin) => origin,
        None => match origin(ptr) {
            Origin::Local | Origin::Far(_) if tail::is_on() => {
                // SAFETY: as the caller promises.
                return unsafe { check::reallocate(ptr, old, new) };
            }
            origin => origin,
        },
    };
    match origin {
        // SAFETY: not far, so allocated by `local`; the size is not zero.
        Origin::Local => unsafe { local::reallocate(ptr, old, new) },
        // SAFETY: `ptr` lies in the tier's reservation.
        Origin::Far(arenas) => unsafe { arenas.reallocate(ptr, old, new) },
        // SAFETY: as the caller promises.
        Origin::Parent => unsafe { move_from_parent(ptr, old, new) },
    }
}

/// As [`reallocate_in_tier`], of a parent's far memory in a forked child.
///
/// # Safety
/// As there.
#[cold]
unsafe fn move_from_parent(ptr: *mut u8, old: Layout, new: Layout) -> *mut u8 {
    if new.size() <= old.size() {
        return ptr;
    }
    if !tiers::inherits() {
        return ptr::null_mut();
    }
    // SAFETY: as the caller promises.
    unsafe { move_to(None, ptr, old, new) }
}

/// Moves an allocation to `tier`, or to local memory; null leaves it as it was.
///
/// # Safety
/// As for [`reallocate_in_tier`].
unsafe fn move_to(
    arenas: Option<&'static FarArenas>,
    ptr: *mut u8,
    old: Layout,
    new: Layout,
) -> *mut u8 {
    // SAFETY: the size is not zero.
    let moved = unsafe { allocate(arenas, new, Fill::Any) };
    if !moved.is_null() {
        // SAFETY: both are valid for the smaller size; the new one overlaps nothing.
        unsafe { ptr::copy_nonoverlapping(ptr, moved, old.size().min(new.size())) };
        // SAFETY: as the caller promises.
        unsafe { free(ptr, old) };
    }
    moved
}

/// Resizes: within the tier that `ptr` is in, unless the allocation is local, grows, and the
/// policy sends the new size far, or it is far and the thread
/// [reports a failure](placement::reports_failure). Null leaves it as it was.
///
/// # Safety
/// As for [`reallocate_in_tier`].
#[inline]
pub(super) unsafe fn resize(ptr: *mut u8, old: Layout, new: Layout) -> *mut u8 {
    if new.size() > old.size()
        && !is_far(ptr)
        && let Some(arenas) = arenas_for(new.size())
    {
        // SAFETY: as the caller promises.
        return unsafe { move_to(Some(arenas), ptr, old, new) };
    }
    // SAFETY: as the caller promises.
    let resized = unsafe { reallocate_in_tier(ptr, old, new) };
    if resized.is_null() && is_far(ptr) && placement::reports_failure() {
        // SAFETY: as the caller promises.
        return unsafe { move_to(None, ptr, old, new) };
    }
    resized
}

/// The global allocator: jemalloc, with far tiers once a heap is running.
///
/// Usable before `main` and while threads exit. Until a far heap is started, and after it has
/// been shut down, every allocation is local. While one runs, allocations at least as large as its
/// [threshold](crate::Heap::threshold) are far, and those of far [scopes](crate::Scope).
///
/// # Examples
/// ```
/// use farheap::FarHeap;
///
/// #[global_allocator]
/// static HEAP: FarHeap = FarHeap::new();
///
/// let numbers: Vec<u32> = (0..1000).collect();
/// assert_eq!(numbers.iter().sum::<u32>(), 499_500);
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct FarHeap(());

impl FarHeap {
    /// Creates the allocator; all values are the same heap.
    #[must_use]
    pub const fn new() -> FarHeap {
        FarHeap(())
    }
}

// SAFETY:
// - Blocks come from jemalloc, which hands out disjoint ones that fit the layout, and are valid
//   until freed: far ones too, whose pages are brought back when touched.
// - Nothing here unwinds: failures are null, broken invariants abort in `extern "C"` hooks or
//   panic in debug builds before anything is handed out.
unsafe impl GlobalAlloc for FarHeap {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if is_plain_local(layout) {
            // SAFETY: the caller passes no empty layout.
            return unsafe { local::allocate_plain(layout.size()) };
        }
        // SAFETY: the caller passes no empty layout.
        unsafe { allocate_by_policy::<Self>(layout) }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller passes no empty layout.
        unsafe { allocate_any_by_policy(layout, Fill::Zero) }
    }

    #[inline]
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { free_in::<Self>(ptr, layout) }
    }

    #[inline]
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: the caller guarantees that the rounded size fits.
        let new = unsafe { Layout::from_size_align_unchecked(new_size, layout.align()) };
        // SAFETY: as the caller promises.
        unsafe { resize(ptr, layout, new) }
    }
}
