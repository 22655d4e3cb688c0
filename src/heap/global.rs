//! The process's far tier and the global allocator in front of it.
//!
//! [`FarHeap`] decides for each allocation whether it is local or far: [`install`] names the tier
//! that far ones come from, [`uninstall`] takes it away. Uses `far_arenas`, `local`, `placement`;
//! `handle` uses it.
//!
//! # Policy
//! 1. The handles [`Far`](crate::Far) and [`Local`](crate::Local): what they say.
//! 2. A pinned thread: local.
//! 3. The innermost [`scope`](crate::scope()): what it says.
//! 4. The tier's size threshold, which is zero where everything is to be far, and off where system calls cannot be given far memory
//!    (`runtime::threshold`).
//!
//! `realloc` stays in its tier, with one exception: a local allocation moves when it grows and
//! the policy sends the new size far. So a vector that grows past the threshold becomes far; one
//! that shrinks below it stays far.
//!
//! # Invariants
//! 1. A pointer goes back to where its address says it came from, whatever the policy says by
//!    then.
//! 2. The range in [`FAR`] is that of the installed tier from before its first allocation until
//!    after its last free.

#![expect(unsafe_code, reason = "implements a global allocator")]

use super::far_arenas::FarArenas;
use super::local;
use super::placement::{self, Fill, Placement};
use crate::base::error::{Error, Result};
use crate::base::sync::{
    AtomicUsize,
    Ordering::{Acquire, Relaxed, Release},
};
use crate::base::units::ByteCount;
use std::alloc::{GlobalAlloc, Layout};
use std::ptr;
use std::sync::atomic::AtomicPtr;

/// The installed tier, in one cache line that only starting and stopping write.
#[repr(align(64))]
struct Installed {
    arenas: AtomicPtr<FarArenas>,
    /// The same while it serves new allocations.
    serving: AtomicPtr<FarArenas>,
    /// Its reservation; a span of 0 contains nothing.
    base: AtomicUsize,
    span: AtomicUsize,
    /// Its size threshold.
    threshold: AtomicUsize,
    /// The right to install: see [`install`].
    control: AtomicUsize,
}

static FAR: Installed = Installed {
    arenas: AtomicPtr::new(ptr::null_mut()),
    serving: AtomicPtr::new(ptr::null_mut()),
    base: AtomicUsize::new(0),
    span: AtomicUsize::new(0),
    threshold: AtomicUsize::new(usize::MAX),
    control: AtomicUsize::new(VACANT),
};

const VACANT: usize = 0;
const CHANGING: usize = 1;
const TAKEN: usize = 2;
/// A parent's tier: far pointers may exist, which must not count as local ones, so that this process
/// cannot have a tier of its own.
const INHERITED: usize = 3;

/// Makes `tier` the process's far tier.
///
/// # Errors
/// [`Error::AlreadyRunning`] when there is one.
pub(crate) fn install(arenas: &'static FarArenas) -> Result<()> {
    FAR.control
        .compare_exchange(VACANT, CHANGING, Acquire, Relaxed)
        .map_err(|_| Error::AlreadyRunning)?;
    FAR.base.store(arenas.base(), Relaxed);
    // Pairs with the Acquire in `is_far`: who sees this span sees the base that it belongs to.
    FAR.span.store(arenas.span(), Release);
    FAR.threshold.store(arenas.threshold().map_or(usize::MAX, ByteCount::as_usize), Relaxed);
    FAR.arenas.store(ptr::from_ref(arenas).cast_mut(), Relaxed);
    // A thread that allocates far has seen all of this; one that frees has the pointer from there.
    FAR.serving.store(ptr::from_ref(arenas).cast_mut(), Release);
    FAR.control.store(TAKEN, Release);
    Ok(())
}

/// Takes the process's far tier away and ends it. From then on everything is local.
///
/// # Errors
/// [`Error::NotRunning`] when there is none; [`Error::InUse`] when far memory is allocated, in
/// which case the tier stays.
pub(crate) fn uninstall() -> Result<()> {
    FAR.control
        .compare_exchange(TAKEN, CHANGING, Acquire, Relaxed)
        .map_err(|_| Error::NotRunning)?;
    let arenas = installed().expect("a arenas is installed while the control says so");
    let result = arenas.close();
    if matches!(result, Err(Error::InUse { .. })) {
        FAR.control.store(TAKEN, Release);
        return result;
    }
    FAR.serving.store(ptr::null_mut(), Relaxed);
    FAR.arenas.store(ptr::null_mut(), Relaxed);
    FAR.threshold.store(usize::MAX, Relaxed);
    // No far pointer exists any more, so nobody can miss the range.
    FAR.span.store(0, Relaxed);
    FAR.control.store(VACANT, Release);
    result
}

/// Leaves the tier to the parent, for a forked child, which has the allocator's state but neither
/// the far pages nor their tables: everything new is local, and to free a far pointer does nothing.
///
/// Only stores to memory, so it may run right after the fork.
pub(crate) extern "C" fn leave_to_parent() {
    FAR.serving.store(ptr::null_mut(), Relaxed);
    FAR.arenas.store(ptr::null_mut(), Relaxed);
    if FAR.span.load(Relaxed) != 0 {
        FAR.control.store(INHERITED, Relaxed);
    }
}

/// Whether this process was forked from one with a far tier.
pub(crate) fn is_left_to_parent() -> bool {
    FAR.control.load(Relaxed) == INHERITED
}

/// The process's far tier; none in a forked child of the process that has it.
#[inline]
pub(crate) fn installed() -> Option<&'static FarArenas> {
    // Pairs with the Release in `install`, by way of the pointer that is asked about or of
    // `serving`; Acquire for a caller that has seen nothing before.
    // SAFETY: null or a tier, which is never freed.
    unsafe { FAR.arenas.load(Acquire).as_ref() }
}

/// The process's far tier, if it serves new allocations.
#[inline]
pub(super) fn serving() -> Option<&'static FarArenas> {
    // Pairs with the Release in `install`.
    // SAFETY: null or a tier, which is never freed.
    unsafe { FAR.serving.load(Acquire).as_ref() }
}

/// Whether `ptr` points into far memory.
#[inline]
pub(super) fn is_far(ptr: *const u8) -> bool {
    // A holder of a far pointer has seen both, and they stay while it is allocated. That of a local one
    // may come in the middle of a start: the span first, or it might be the new heap's beside the
    // base of one that has ended, where local memory is now. (A span of one that ended beside a new
    // base would take a thread that is stopped here while that happens, and a smaller heap; to ask
    // the tier as well costs each far free 0.3 ns.)
    let span = FAR.span.load(Acquire);
    ptr.addr().wrapping_sub(FAR.base.load(Relaxed)) < span
}

/// The tier for an allocation of `size` bytes; `None`: local.
#[inline]
pub(super) fn arenas_for(size: usize) -> Option<&'static FarArenas> {
    match placement::placement() {
        None if size < FAR.threshold.load(Relaxed) => None,
        Some(Placement::Local) => None,
        _ => serving(),
    }
}

/// Allocates locally; null when out of memory.
///
/// # Safety
/// The layout's size is not zero.
#[inline]
pub(super) unsafe fn allocate_local(layout: Layout, fill: Fill) -> *mut u8 {
    // SAFETY: the size is not zero.
    unsafe { local::allocate(layout, fill) }
}

/// Allocates far memory; null when no tier serves, or it has none left.
///
/// # Safety
/// The layout's size is not zero.
#[inline]
pub(super) unsafe fn allocate_far(layout: Layout, fill: Fill) -> *mut u8 {
    let Some(arenas) = serving() else {
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
    if let Some(arenas) = arenas {
        // SAFETY: the size is not zero.
        if let Ok(ptr) = unsafe { arenas.allocate(layout, fill) }
            && (!ptr.is_null() || !placement::reports_failure())
        {
            return ptr;
        }
    }
    // SAFETY: the size is not zero.
    unsafe { allocate_local(layout, fill) }
}

/// Frees, wherever `ptr` came from.
///
/// # Safety
/// `ptr` was allocated by this module with `layout` and is not used again.
#[inline]
pub(super) unsafe fn free(ptr: *mut u8, layout: Layout) {
    if is_far(ptr) {
        // Without a tier it is the parent's, in a forked child: nothing is to be done.
        if let Some(arenas) = installed() {
            // SAFETY: `ptr` lies in the tier's reservation.
            unsafe { arenas.free(ptr, layout) }
        }
    } else {
        // SAFETY: not far, so allocated by `local`.
        unsafe { local::free(ptr, layout) }
    }
}

/// Makes a part of an allocation read as zero.
///
/// # Safety
/// The caller alone uses the range, and needs nothing of what it holds.
pub(super) unsafe fn clear(ptr: *mut u8, len: usize) {
    match installed().filter(|_| is_far(ptr)) {
        // SAFETY: as the caller promises.
        Some(arenas) => unsafe { arenas.clear(ptr, len) },
        // SAFETY: as the caller promises.
        None => unsafe { ptr.write_bytes(0, len) },
    }
}

/// Resizes within the tier that `ptr` is in; null leaves the allocation as it was, as for whatever
/// is to grow of a parent's far memory in a forked child.
///
/// # Safety
/// As for [`free`], and `new` has the same alignment and a size above zero.
#[inline]
pub(super) unsafe fn reallocate_in_tier(ptr: *mut u8, old: Layout, new: Layout) -> *mut u8 {
    if is_far(ptr) {
        match installed() {
            // SAFETY: `ptr` lies in the tier's reservation.
            Some(arenas) => unsafe { arenas.reallocate(ptr, old, new) },
            // The parent's, which cannot be copied in a forked child: it can only stay as it is.
            None if new.size() <= old.size() => ptr,
            None => ptr::null_mut(),
        }
    } else {
        // SAFETY: not far, so allocated by `local`; the size is not zero.
        unsafe { local::reallocate(ptr, old, new) }
    }
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

/// The global allocator: jemalloc, with a far tier once a heap is running.
///
/// Usable before `main` and while threads exit. Until a far heap is started, and after it has
/// been shut down, every allocation is local. While one runs, allocations at least as large as its
/// [threshold](crate::Heap::threshold) are far, and those of far [scopes](crate::scope()).
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
        // SAFETY: the caller passes no empty layout.
        unsafe { allocate(arenas_for(layout.size()), layout, Fill::Any) }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller passes no empty layout.
        unsafe { allocate(arenas_for(layout.size()), layout, Fill::Zero) }
    }

    #[inline]
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { free(ptr, layout) }
    }

    #[inline]
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: the caller guarantees that the rounded size fits.
        let new = unsafe { Layout::from_size_align_unchecked(new_size, layout.align()) };
        // SAFETY: as the caller promises.
        unsafe { resize(ptr, layout, new) }
    }
}
