//! Extent hooks: jemalloc's requests for address space, passed to an [`ExtentSource`], which is what
//! the heap asks of a region.
//!
//! An [`Hooks`] value is one arena's table plus its context; jemalloc hands the table's address
//! to every call. Uses `jemalloc`, `placement`; owned by `FarArenas`.
//!
//! An extent's life: `alloc` (address only) -> `commit` (charged, zero inside) -> used, freed,
//! kept dirty by jemalloc -> `decommit` (contents dropped) -> `commit` again, ... -> `destroy`
//! when the arena goes. jemalloc splits and merges as it likes in between, also across what two
//! `alloc` calls gave. An extent of metadata, where that is far, is committed from the beginning, and
//! given back when the arena goes.
//!
//! # Invariants
//! 1. A hook runs with its thread pinned local: whatever it allocates never comes from the arena
//!    that waits for it.
//! 2. A hook never unwinds into C: `extern "C"` aborts.
//! 3. After a refused `commit`, the same allocation gets no new address space: without this,
//!    every failing allocation would grow the arena.
//! 4. jemalloc is told that committed memory reads as zero, but never asked for zeroed memory of an
//!    arena with these hooks: it would rely on that, or clear pages under its locks. What was
//!    committed for the allocation under way is noted ([`CommittedRange`]), and need not be cleared.

#![expect(unsafe_code, reason = "is called by jemalloc; declares the unsafe call that clears")]

use super::jemalloc::{extent_hooks_t, plain_hooks};
use super::placement;
use crate::base::strict_assert;
use crate::base::sync::{AtomicU64, Ordering::Relaxed};
use crate::base::units::ByteCount;
use crate::sys::fork::Born;
use std::cell::Cell;
use std::ffi::{c_uint, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// A source of far address space for one arena set.
///
/// Called from extent hooks, that is with jemalloc's arena locks held: nothing here may allocate
/// from the heap it serves or wait for a device.
///
/// All addresses and lengths are multiples of 4 KiB.
pub(crate) trait ExtentSource: Send + Sync {
    /// First address of the reservation; "is this pointer far?" is one compare.
    fn base(&self) -> usize;

    /// Bytes of the reservation.
    fn span(&self) -> usize;

    /// Hands out an unused, uncommitted range. `None`: no address range of this size and alignment
    /// is left.
    fn reserve(&self, len: ByteCount, align: ByteCount) -> Option<NonNull<u8>>;

    /// Charges `[ptr, ptr + len)` against the tier's capacity, before its first use. It reads as
    /// zero afterwards. `false`, and nothing has changed: limit and device together could not keep it.
    fn commit(&self, ptr: NonNull<u8>, len: ByteCount) -> bool;

    /// Makes `[ptr, ptr + len)`, which is committed, read as zero. This may wait for a device: not
    /// to be called from a hook.
    ///
    /// # Safety
    /// The caller alone uses the range, and needs nothing of what it holds.
    unsafe fn clear(&self, ptr: NonNull<u8>, len: ByteCount);

    /// Drops the contents of `[ptr, ptr + len)`, which is committed: frames, slots and pending
    /// writes go; the range must be committed again before use.
    fn decommit(&self, ptr: NonNull<u8>, len: ByteCount);

    /// Returns an uncommitted range for ever: it may be handed out by a later `reserve`.
    fn release(&self, ptr: NonNull<u8>, len: ByteCount);

    /// Pins `[ptr, ptr + len)`, which is committed, until [`unpin`](ExtentSource::unpin). `false`: it cannot be.
    fn pin(&self, _ptr: *const u8, _len: ByteCount) -> bool {
        false
    }

    /// Ends a pin; of memory that was given back meanwhile there is none.
    fn unpin(&self, _ptr: *const u8, _len: ByteCount) {}

    /// True if it has memory to spare: what is free, and kept for a while, costs nobody anything then.
    fn has_plenty(&self) -> bool {
        false
    }
}

/// One arena's hooks. The table comes first: jemalloc's pointer to it is a pointer to all.
#[repr(C)]
pub(super) struct Hooks {
    table: extent_hooks_t,
    /// Kept alive by the tier, until the arena is destroyed.
    source: *const dyn ExtentSource,
    /// Bytes committed and not decommitted.
    committed: AtomicU64,
    born: Born,
}

// SAFETY: the source is `Sync`, and all else is too.
unsafe impl Sync for Hooks {}

// SAFETY: the source is used by reference from any thread, for which `Sync` suffices.
unsafe impl Send for Hooks {}

impl Hooks {
    /// Hooks for the data of an arena, over `source`.
    ///
    /// # Safety
    /// `source` outlives the arena that gets the hooks.
    pub(super) unsafe fn of_data(source: &Arc<dyn ExtentSource>) -> Hooks {
        let table = extent_hooks_t {
            destroy: Some(destroy),
            commit: Some(commit),
            decommit: Some(decommit),
            split: Some(split),
            merge: Some(merge),
            ..plain_hooks(alloc, dalloc)
        };
        Hooks::new(source, table)
    }

    /// Hooks for the metadata of an arena, over `source`.
    ///
    /// # Safety
    /// As for [`of_data`](Self::of_data).
    pub(super) unsafe fn of_metadata(source: &Arc<dyn ExtentSource>) -> Hooks {
        Hooks::new(source, plain_hooks(alloc_metadata, dalloc_metadata))
    }

    fn new(source: &Arc<dyn ExtentSource>, table: extent_hooks_t) -> Hooks {
        let source = Arc::as_ptr(source);
        Hooks { table, source, committed: AtomicU64::new(0), born: Born::here() }
    }

    /// Pointer for jemalloc: the table's address, which is that of all.
    pub(super) fn as_table(&self) -> *mut extent_hooks_t {
        ptr::from_ref(self).cast_mut().cast()
    }

    fn source(&self) -> &dyn ExtentSource {
        // SAFETY: called from hooks, or while memory of the arena is allocated: so the arena lives,
        // and the source with it (`new`).
        unsafe { &*self.source }
    }

    /// Bytes the arena has charged to the source at the moment.
    pub(super) fn committed(&self) -> ByteCount {
        ByteCount(self.committed.load(Relaxed))
    }

    /// True if the source can be used: not in a forked child, which has no part of it.
    fn is_here(&self) -> bool {
        self.born.is_here()
    }

    fn reserve(&self, len: usize, align: usize) -> Option<NonNull<u8>> {
        self.source().reserve(ByteCount(len as u64), ByteCount(align as u64))
    }

    fn reserve_committed(&self, size: usize, align: usize) -> Option<NonNull<u8>> {
        let ptr = self.reserve(size, align)?;
        if self.commit(ptr, size) {
            return Some(ptr);
        }
        self.release(ptr, size);
        None
    }

    fn release(&self, ptr: NonNull<u8>, len: usize) {
        self.source().release(ptr, ByteCount(len as u64));
    }

    fn commit(&self, ptr: NonNull<u8>, len: usize) -> bool {
        let is_committed = self.source().commit(ptr, ByteCount(len as u64));
        if is_committed {
            self.committed.fetch_add(len as u64, Relaxed);
            note_committed(CommittedRange { start: ptr.addr().get(), len });
        }
        is_committed
    }

    /// Makes memory of the arena read as zero; may wait for a device.
    ///
    /// # Safety
    /// As for [`ExtentSource::clear`], and something of the arena is allocated, so that the source
    /// lives.
    pub(super) unsafe fn clear(&self, ptr: NonNull<u8>, len: usize) {
        // SAFETY: as the caller promises.
        unsafe { self.source().clear(ptr, ByteCount(len as u64)) }
    }

    fn decommit(&self, ptr: NonNull<u8>, len: usize) {
        self.source().decommit(ptr, ByteCount(len as u64));
        let before = self.committed.fetch_sub(len as u64, Relaxed);
        strict_assert!(before >= len as u64, "decommit of {len} bytes with {before} committed");
    }
}

/// A range that a source has committed: it reads as zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CommittedRange {
    start: usize,
    len: usize,
}

impl CommittedRange {
    const NOTHING: CommittedRange = CommittedRange { start: 0, len: 0 };

    /// True if all of `[start, start + len)` was committed.
    pub(super) fn has(self, start: usize, len: usize) -> bool {
        self.start <= start && start + len <= self.start + self.len
    }
}

/// Notes of hooks for the allocation under way on this thread. Constant and without a
/// destructor, as in `placement`.
struct Notes {
    /// See [`take_commit_refused`].
    commit_refused: Cell<bool>,
    /// See [`take_committed`].
    committed: Cell<CommittedRange>,
}

thread_local! {
    static NOTES: Notes = const {
        Notes { commit_refused: Cell::new(false), committed: Cell::new(CommittedRange::NOTHING) }
    };
}

/// True if a source has refused to commit since the last call.
pub(super) fn take_commit_refused() -> bool {
    NOTES.with(|notes| notes.commit_refused.take())
}

/// Remembers what a source has committed for the allocation under way.
fn note_committed(committed: CommittedRange) {
    NOTES.with(|notes| notes.committed.set(committed));
}

/// Memory that sources have committed on this thread since the last call: the last of it, or nothing.
pub(super) fn take_committed() -> CommittedRange {
    NOTES.with(|notes| notes.committed.replace(CommittedRange::NOTHING))
}

/// Does what a hook was called for, pinned local; `None` in a forked child, which has nothing of the source.
///
/// # Safety
/// `hooks` is the table of a living [`Hooks`].
unsafe fn serve<T>(hooks: *mut extent_hooks_t, work: impl FnOnce(&Hooks) -> T) -> Option<T> {
    let _pinned = placement::pin();
    // SAFETY:
    // - Only tables inside a `Hooks`, at its start (repr C), are given to jemalloc.
    // - The tier keeps them until the arena is destroyed; all fields are shared-access safe.
    let this = unsafe { &*hooks.cast::<Hooks>() };
    this.is_here().then(|| work(this))
}

/// Address of `[addr + offset ..)`; jemalloc never passes null.
fn at(addr: *mut c_void, offset: usize) -> NonNull<u8> {
    NonNull::new(addr.cast::<u8>().wrapping_add(offset)).expect("extents are not at address zero")
}

unsafe extern "C" fn alloc(
    hooks: *mut extent_hooks_t,
    new_addr: *mut c_void,
    size: usize,
    align: usize,
    zero: *mut bool,
    commit: *mut bool,
    _arena: c_uint,
) -> *mut c_void {
    // A wish for a certain address is a wish for growth in place, which the arena's retained
    // extents serve; invariant 3 for the second condition.
    if !new_addr.is_null() || take_commit_refused() {
        return ptr::null_mut();
    }
    // SAFETY: jemalloc passes a valid pointer.
    let wants_commit = unsafe { commit.read() };
    let reserve = |this: &Hooks| match wants_commit {
        true => this.reserve_committed(size, align),
        false => this.reserve(size, align),
    };
    // SAFETY: called by jemalloc with the table of a living `Hooks`.
    let Some(ptr) = unsafe { serve(hooks, reserve) }.flatten() else { return ptr::null_mut() };
    // SAFETY: jemalloc passes a valid pointer. Nobody asks it for zeroed memory (invariant 4).
    unsafe { zero.write(true) };
    ptr.as_ptr().cast()
}

/// As [`alloc`], for metadata: committed, and all zeros, which jemalloc relies on.
unsafe extern "C" fn alloc_metadata(
    hooks: *mut extent_hooks_t,
    new_addr: *mut c_void,
    size: usize,
    align: usize,
    zero: *mut bool,
    commit: *mut bool,
    _arena: c_uint,
) -> *mut c_void {
    if !new_addr.is_null() {
        return ptr::null_mut();
    }
    let reserve = |this: &Hooks| this.reserve_committed(size, align);
    // SAFETY: called by jemalloc with the table of a living `Hooks`.
    let Some(ptr) = unsafe { serve(hooks, reserve) }.flatten() else { return ptr::null_mut() };
    // SAFETY: jemalloc passes a valid pointer.
    unsafe { zero.write(true) };
    // SAFETY: jemalloc passes a valid pointer.
    unsafe { commit.write(true) };
    ptr.as_ptr().cast()
}

/// Takes metadata back, when jemalloc destroys the arena. Returns `false`, which is success.
unsafe extern "C" fn dalloc_metadata(
    hooks: *mut extent_hooks_t,
    addr: *mut c_void,
    size: usize,
    _committed: bool,
    arena: c_uint,
) -> bool {
    // SAFETY: as for this function. Metadata is always committed.
    unsafe { destroy(hooks, addr, size, true, arena) };
    false
}

/// Refuses: jemalloc then decommits the extent and keeps its address range for reuse.
unsafe extern "C" fn dalloc(
    _hooks: *mut extent_hooks_t,
    _addr: *mut c_void,
    _size: usize,
    _committed: bool,
    _arena: c_uint,
) -> bool {
    true
}

unsafe extern "C" fn destroy(
    hooks: *mut extent_hooks_t,
    addr: *mut c_void,
    size: usize,
    committed: bool,
    _arena: c_uint,
) {
    let give_back = |this: &Hooks| {
        if committed {
            this.decommit(at(addr, 0), size);
        }
        this.release(at(addr, 0), size);
    };
    // SAFETY: called by jemalloc with the table of a living `Hooks`.
    let _ = unsafe { serve(hooks, give_back) };
}

/// Returns whether it failed, as jemalloc wants it.
unsafe extern "C" fn commit(
    hooks: *mut extent_hooks_t,
    addr: *mut c_void,
    _size: usize,
    offset: usize,
    len: usize,
    _arena: c_uint,
) -> bool {
    let commit = |this: &Hooks| this.commit(at(addr, offset), len);
    // SAFETY: called by jemalloc with the table of a living `Hooks`.
    let is_refused = unsafe { serve(hooks, commit) } != Some(true);
    if is_refused {
        NOTES.with(|notes| notes.commit_refused.set(true));
    }
    is_refused
}

/// Never fails.
unsafe extern "C" fn decommit(
    hooks: *mut extent_hooks_t,
    addr: *mut c_void,
    _size: usize,
    offset: usize,
    len: usize,
    _arena: c_uint,
) -> bool {
    let decommit = |this: &Hooks| this.decommit(at(addr, offset), len);
    // SAFETY: called by jemalloc with the table of a living `Hooks`.
    let _ = unsafe { serve(hooks, decommit) };
    false
}

/// Succeeds: a range of the source has no borders inside.
unsafe extern "C" fn split(
    _hooks: *mut extent_hooks_t,
    _addr: *mut c_void,
    _size: usize,
    _size_a: usize,
    _size_b: usize,
    _committed: bool,
    _arena: c_uint,
) -> bool {
    false
}

/// Succeeds, as [`split`] does.
unsafe extern "C" fn merge(
    _hooks: *mut extent_hooks_t,
    _addr_a: *mut c_void,
    _size_a: usize,
    _addr_b: *mut c_void,
    _size_b: usize,
    _committed: bool,
    _arena: c_uint,
) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_committed_last_is_noted_once() {
        let committed = CommittedRange { start: 1000, len: 100 };
        let has = |start, len| committed.has(start, len);
        assert!(has(1000, 100) && has(1005, 80) && !has(990, 20) && !has(1050, 51));
        note_committed(committed);
        assert_eq!((take_committed(), take_committed()), (committed, CommittedRange::NOTHING));
    }
}
