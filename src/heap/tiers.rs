//! The far tiers of this process: which there are, and which of them an address lies in.
//!
//! [`install`] adds a tier, [`uninstall`] ends some; [`origin`] tells a pointer's tier. Slot 0 is the
//! *default tier's*: what is far by a scope, by its size or through [`Far`](crate::Far) comes from
//! it. Others are asked for by their name ([`Tier`]). Uses `far_arenas`, `local`; used by `global` and
//! the runtime.
//!
//! An address is looked up in two steps. All tiers lie within [`All::low`] and [`All::high`], so local
//! pointers cost one compare, however many tiers there are: 0.8 ns, where a look into a table costs
//! 28. Regions come to lie side by side mostly, but local memory may be mapped between two of them: what
//! is within the bounds is compared with each tier, the default one first.
//!
//! # Invariants
//! 1. While a tier may have allocations, both bounds include its reservation. They change one at a time,
//!    but each of them alone includes all tiers that stay.
//! 2. Tiers are installed and uninstalled by one thread at a time: the runtime's lock sees to it.
//! 3. A tier in [`All::tiers`] is never freed (invariant 1 of `far_arenas`), and its place never changes.

#![expect(unsafe_code, reason = "keeps references as atomic pointers")]

use super::accounting::Usage;
use super::ending::{self, Keeper};
use super::far_arenas::{ClosedArenas, FarArenas};
use super::hooks::ExtentSource;
use super::jemalloc::{self, JemallocArena};
use super::placement::{self, SMALL_END, TIERS_MAX, Tier};
use super::{local, tail};
use crate::base::error::{Error, Result};
use crate::base::sync::{
    AtomicBool, AtomicPtr, AtomicUsize,
    Ordering::{Acquire, Relaxed, Release},
};
use crate::base::units::ByteCount;
use crate::sys::fork;
use std::ptr;

/// Data that allocations and frees ask for, in one cache line that only starting and stopping write.
#[repr(C, align(64))]
struct All {
    /// The first address of any tier, and the one behind the last; without a tier nothing is between.
    low: AtomicUsize,
    high: AtomicUsize,
    /// The default tier; null in a forked child. Its range is here too, so that a free looks at one line;
    /// a span of 0 contains nothing.
    default: AtomicPtr<FarArenas>,
    base: AtomicUsize,
    span: AtomicUsize,
    /// Its size threshold; and that of small blocks, which every allocation asks.
    threshold: AtomicUsize,
    small_below: AtomicUsize,
    /// This process was forked from one with a far tier: far pointers may exist, which must not count as
    /// local ones, so that it cannot have a tier of its own.
    is_inherited: AtomicBool,
    /// All tiers by their slots; the parent's in a forked child.
    tiers: [AtomicPtr<FarArenas>; TIERS_MAX],
}

static ALL: All = All {
    low: AtomicUsize::new(usize::MAX),
    high: AtomicUsize::new(0),
    default: AtomicPtr::new(ptr::null_mut()),
    base: AtomicUsize::new(0),
    span: AtomicUsize::new(0),
    threshold: AtomicUsize::new(usize::MAX),
    small_below: AtomicUsize::new(SMALL_END),
    is_inherited: AtomicBool::new(false),
    tiers: [const { AtomicPtr::new(ptr::null_mut()) }; TIERS_MAX],
};

/// jemalloc's tree of addresses has 1/TREE_SHARE of the memory's bytes: 8 for a page.
const TREE_SHARE: u64 = 512;

/// Where a pointer is from.
pub(super) enum Origin {
    Local,
    Far(&'static FarArenas),
    /// A far tier of the process that this one was forked from: nothing can be done with it.
    Parent,
}

/// Adds a tier in its slot.
///
/// # Errors
/// [`Error::AlreadyRunning`] when there is one in this slot.
pub(crate) fn install(arenas: &'static FarArenas) -> Result<()> {
    let (slot, this) = (arenas.tier().slot(), ptr::from_ref(arenas).cast_mut());
    if is_left_to_parent() || !ALL.tiers[slot].load(Relaxed).is_null() {
        return Err(Error::AlreadyRunning);
    }
    ending::watch(Keeper { keep: pin, release: unpin });
    // A thread that sees the bounds sees the tier.
    ALL.tiers[slot].store(this, Release);
    set_bounds();
    if slot == 0 {
        let (base, end) = arenas.bounds();
        ALL.base.store(base, Relaxed);
        // Pairs with the Acquire in `origin`: a thread that sees the span sees its base.
        ALL.span.store(if tail::is_on() { 0 } else { end - base }, Release);
        set_threshold(arenas.threshold().map_or(usize::MAX, ByteCount::as_usize));
        // A thread that allocates far has seen all of this; one that frees has the pointer from there.
        ALL.default.store(this, Release);
    }
    Ok(())
}

/// Ends tiers and takes them away, all or none of them.
///
/// # Errors
/// [`Error::InUse`] when memory of one is allocated: then all stay. [`Error::Jemalloc`] when jemalloc
/// keeps an arena; all have ended then.
pub(crate) fn uninstall(tiers: &[&'static FarArenas]) -> Result<()> {
    let _pinned = placement::pin(); // Else the list may keep one of the tiers from closing.
    let closed: Vec<ClosedArenas> = tiers.iter().map(|tier| tier.close()).collect::<Result<_>>()?;
    let ended = closed.into_iter().map(ClosedArenas::end).fold(Ok(()), Result::and);
    for tier in tiers {
        let slot = tier.tier().slot();
        if slot == 0 {
            ALL.default.store(ptr::null_mut(), Relaxed);
            ALL.span.store(0, Relaxed);
            set_threshold(usize::MAX);
        }
        ALL.tiers[slot].store(ptr::null_mut(), Relaxed);
    }
    // No pointer into these tiers exists any more, so nobody can miss their ranges.
    set_bounds();
    ended
}

/// Pins a range of a far tier for a thread that ends; `false`: it is not far, or cannot be pinned.
fn pin(start: usize, len: usize) -> bool {
    with_source(start, |source, ptr| source.pin(ptr, ByteCount(len as u64))) == Some(true)
}

/// Ends [`pin`].
fn unpin(start: usize, len: usize) {
    with_source(start, |source, ptr| source.unpin(ptr, ByteCount(len as u64)));
}

fn with_source<T>(start: usize, take: impl FnOnce(&dyn ExtentSource, *const u8) -> T) -> Option<T> {
    let ptr = ptr::with_exposed_provenance::<u8>(start);
    let Origin::Far(arenas) = origin(ptr) else { return None };
    Some(take(&*arenas.source()?, ptr))
}

/// Sets the default tier's threshold.
fn set_threshold(bytes: usize) {
    ALL.threshold.store(bytes, Relaxed);
    ALL.small_below.store(if tail::is_on() { 0 } else { bytes.min(SMALL_END) }, Relaxed);
}

/// From now on no answer is had at once: [`origin_at_once`] is `None` for every pointer, and no small block is local
/// without a further look.
pub(super) fn look_at_every_free() {
    ALL.span.store(0, Relaxed);
    ALL.small_below.store(0, Relaxed);
    ALL.low.store(0, Relaxed);
    ALL.high.store(usize::MAX, Release);
}

/// Sets the bounds to those of all tiers together.
fn set_bounds() {
    let (mut low, mut high) = if tail::is_on() { (0, usize::MAX) } else { (usize::MAX, 0) };
    for (first, end) in all_known().map(FarArenas::bounds) {
        (low, high) = (low.min(first), high.max(end));
    }
    ALL.low.store(low, Relaxed);
    // Pairs with the Acquire in `may_be_far`: for a caller that has seen nothing before.
    ALL.high.store(high, Release);
}

/// Leaves all tiers to the parent, for a forked child, which has the allocator's state but neither
/// the far pages nor their tables: everything new is local, and to free a far pointer does nothing.
///
/// Only stores to memory, so it may run right after the fork.
pub(crate) extern "C" fn leave_to_parent() {
    ALL.default.store(ptr::null_mut(), Relaxed);
    ALL.span.store(0, Relaxed);
    if ALL.high.load(Relaxed) != 0 {
        ALL.is_inherited.store(true, Relaxed);
    }
}

/// True if this process was forked from one with a far tier.
#[inline]
pub(crate) fn is_left_to_parent() -> bool {
    ALL.is_inherited.load(Relaxed)
}

/// True if this process was forked from one with far tiers, and can use what it has inherited: of all of
/// them, for it cannot copy what it cannot read.
pub(super) fn inherits() -> bool {
    is_left_to_parent() && all_known().all(|tier| fork::is_inherited(tier.bounds().0))
}

/// The process's default tier; none in a forked child of the process that has it.
#[inline]
pub(crate) fn default_tier() -> Option<&'static FarArenas> {
    // Pairs with the Release in `install`.
    // SAFETY: null or a tier, which is never freed.
    unsafe { ALL.default.load(Acquire).as_ref() }
}

/// The size from which the default tier gets what has no placement.
#[inline]
pub(super) fn threshold() -> usize {
    ALL.threshold.load(Relaxed)
}

/// The same for small blocks: below it they are local, unless the thread says otherwise.
#[inline]
pub(super) fn small_below() -> usize {
    ALL.small_below.load(Relaxed)
}

/// The tier of this name, if it runs in this process.
#[inline]
pub(super) fn find(tier: Tier) -> Option<&'static FarArenas> {
    known(tier.slot()).filter(|arenas| arenas.tier() == tier && !is_left_to_parent())
}

/// How many tiers run.
pub(crate) fn count() -> usize {
    all_known().count()
}

/// The tier in a slot, the parent's in a forked child.
#[inline]
fn known(slot: usize) -> Option<&'static FarArenas> {
    // Pairs with the Release in `install`.
    // SAFETY: null or a tier, which is never freed.
    unsafe { ALL.tiers[slot].load(Acquire).as_ref() }
}

fn all_known() -> impl Iterator<Item = &'static FarArenas> {
    (0..TIERS_MAX).filter_map(known)
}

/// True if an address is within the bounds of all tiers: a local one mostly is not.
#[inline]
pub(super) fn may_be_far(ptr: *const u8) -> bool {
    let addr = ptr.addr();
    // The holder of a far pointer has seen bounds that include it (invariant 1). That of a local one may
    // see one bound of a tier that is starting, or has ended, beside another: then the tiers are asked.
    let (high, low) = (ALL.high.load(Acquire), ALL.low.load(Relaxed));
    // One comparison: local blocks lie on both sides of the tiers, and which of two comparisons is false the
    // processor could not foretell.
    addr.wrapping_sub(low) < high.wrapping_sub(low)
}

/// Where `ptr` is from.
#[inline]
pub(super) fn origin(ptr: *const u8) -> Origin {
    origin_at_once(ptr).unwrap_or_else(|| origin_elsewhere(ptr.addr()))
}

/// Where `ptr` is from, if it is in the default tier, or local and outside of the bounds: these cost what they
/// would without other tiers. Calls nothing, see [`FarArenas::take`].
#[inline]
pub(super) fn origin_at_once(ptr: *const u8) -> Option<Origin> {
    if may_be_far(ptr) { default_tier_of(ptr).map(Origin::Far) } else { Some(Origin::Local) }
}

/// The default tier, if a pointer that [may be far](may_be_far) is from there.
#[inline]
pub(super) fn default_tier_of(ptr: *const u8) -> Option<&'static FarArenas> {
    // Holders of far pointers have seen both, and they stay while any tier runs: the default one ends last.
    // (Only a thread that is stopped between the two lines, while one heap ends and another one starts,
    // could take local memory for the new one's, where that is smaller.)
    let span = ALL.span.load(Acquire);
    if ptr.addr().wrapping_sub(ALL.base.load(Relaxed)) >= span {
        return None;
    }
    default_tier()
}

/// The rest of [`origin`].
#[inline(never)]
fn origin_elsewhere(addr: usize) -> Origin {
    match all_known().find(|arenas| arenas.contains(addr)) {
        None => Origin::Local, // Between two tiers.
        Some(_) if is_left_to_parent() => Origin::Parent,
        Some(arenas) => Origin::Far(arenas),
    }
}

/// True if `ptr` points into far memory.
#[inline]
pub(super) fn is_far(ptr: *const u8) -> bool {
    !matches!(origin(ptr), Origin::Local)
}

// Local memory is what is of no tier.

/// Empties the caches of local memory of threads that did nothing since the last call, and gives back what
/// has decayed: jemalloc looks at the time only where threads allocate. To be called from one thread,
/// that of the default tier.
pub(crate) fn maintain_local() {
    local::maintain();
    for_local_arenas(JemallocArena::decay);
}

/// Does something for each arena of local memory.
fn for_local_arenas(each: impl FnMut(JemallocArena)) {
    let is_local = |arena: &JemallocArena| !all_known().any(|tier| tier.arenas().owns(*arena));
    jemalloc::arenas().into_iter().flatten().filter(is_local).for_each(each);
}

/// Gives back what is free of local memory, if it is more than `least`.
pub(crate) fn give_local_back(least: ByteCount) {
    local::give_back(least);
    jemalloc::advance_epoch();
    for_local_arenas(|arena| {
        if arena.pages().is_ok_and(|pages| pages.dirty * jemalloc::PAGE > least.as_usize()) {
            arena.purge();
        }
    });
}

/// Resident bytes that jemalloc holds for local memory, its metadata included.
pub(crate) fn local_resident() -> ByteCount {
    jemalloc::advance_epoch();
    let of_tiers = if is_left_to_parent() {
        0
    } else {
        all_known().map(|t| t.arenas().seems_resident().0).sum()
    };
    let all = jemalloc::resident().unwrap_or_default().0;
    ByteCount(all.saturating_sub(of_tiers + untouched_tree(all)))
}

/// Bytes of jemalloc's tree of addresses that it takes for resident though nobody has touched them: a node
/// has 2 MiB, and what has been written of it is a page for 2 MiB of extents. `extents` are their bytes.
fn untouched_tree(extents: u64) -> u64 {
    let tree = jemalloc::address_tree().unwrap_or_default().0;
    tree.saturating_sub(extents / TREE_SHARE)
}

/// Uses of local memory; without the metadata of tiers.
pub(crate) fn local_memory() -> Usage {
    jemalloc::advance_epoch();
    let mut of_arenas = Usage::default();
    for_local_arenas(|arena| of_arenas = of_arenas.plus(&Usage::of_arena(arena)));
    let pages = of_arenas.active_bytes.0 + of_arenas.dirty_bytes.0;
    let far: u64 = all_known().map(|tier| tier.arenas().seems_resident().0).sum();
    // Of an arena it is what of its metadata is resident.
    let metadata = of_arenas.resident_bytes.0.saturating_sub(untouched_tree(pages + far));
    Usage { resident_bytes: ByteCount(metadata + pages), ..of_arenas }
}
