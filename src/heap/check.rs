//! Looks for wrong frees, and for writes outside of blocks (option `check`).
//!
//! While it is on, blocks have tails and states (`tail`), and what is freed is filled with a pattern and kept back for a
//! while. What is wrong ends the process with a message that names address and cause. Uses `tail`, `tiers`, `local`,
//! `jemalloc`; `global` and `c_malloc` ask it, the runtime switches it on.
//!
//! The common way of allocation and free does not ask whether it is on: caches keep nothing then, so that each allocation
//! takes the way past them, and each pointer [may be far](tiers::may_be_far), so that each free takes the way out of line.
//!
//! # Invariants
//! 1. No block with a tail is freed or resized past this module: `begin` has all frees come here before the first block
//!    gets a tail.
//! 2. It takes no lock and allocates nothing, so that a forked child goes on with its copy.
//! 3. A block that is kept back counts as allocated. [`let_all_go`] is called before tiers end.

#![expect(unsafe_code, reason = "frees and fills blocks")]

use super::jemalloc::{self, Flags};
use super::placement::Fill;
use super::tail::{self, GRAIN, sizes_of, wrong};
use super::tiers::{self, Origin};
use super::{far_arenas, local};
use crate::base::sync::{
    AtomicPtr, AtomicUsize,
    Ordering::{AcqRel, Relaxed},
};
use std::alloc::Layout;
use std::ptr;

/// Fill of freed blocks, up to this size: others may have left memory.
const FREED_BYTE: u8 = 0xF5;
const FILLED_MAX: usize = jemalloc::SMALL_MAX;

/// Blocks that are kept back at most, their bytes, and the largest of them.
const KEPT: usize = 4096;
const KEPT_BYTES: usize = 8 << 20;
const KEPT_SIZE_MAX: usize = KEPT_BYTES / 8;

/// Blocks that are kept back: a ring, whose places are exchanged.
static PLACES: [AtomicPtr<u8>; KEPT] = [const { AtomicPtr::new(ptr::null_mut()) }; KEPT];
static PUT: AtomicUsize = AtomicUsize::new(0);
static TAKEN: AtomicUsize = AtomicUsize::new(0);
static BYTES: AtomicUsize = AtomicUsize::new(0);

/// From now on it does. Blocks that are older than this have no tail and no state.
pub(crate) fn begin() {
    // First all frees, then the first tail (invariant 1).
    tiers::look_at_every_free();
    tail::begin();
    local::keep_nothing();
}

/// Frees a block, wherever it is from. `layout` is what its owner says that it has.
///
/// # Safety
/// `ptr` is not used again. Nothing else is believed.
#[inline(never)]
pub(super) unsafe fn free(ptr: *mut u8, layout: Option<Layout>) {
    let origin = tiers::origin(ptr);
    if !tail::try_free(ptr) {
        expect_older(ptr, &origin);
        // SAFETY: an older block, in use as far as can be told.
        return unsafe { jemalloc::free_unsized(ptr) };
    }
    if matches!(origin, Origin::Parent) {
        return; // The parent's. Its end may be unreadable here.
    }
    // SAFETY: it was a block until now, with a tail.
    let (size, asked) = unsafe { sizes_of(ptr) };
    if let Some(said) = layout.map(|layout| layout.size())
        && said.next_multiple_of(GRAIN) != asked.next_multiple_of(GRAIN)
    {
        wrong(ptr, format_args!("freed as a block of {said} bytes, but has {asked}"));
    }
    if size <= FILLED_MAX {
        // SAFETY: the block, which nobody uses any more.
        unsafe { ptr.write_bytes(FREED_BYTE, asked) };
    }
    keep(ptr, size);
}

/// Resizes a block by moving it; null leaves it as it was. What is a parent's becomes local.
///
/// # Safety
/// As for [`free`]; the new size is not zero.
pub(super) unsafe fn reallocate(ptr: *mut u8, old: Layout, new: Layout) -> *mut u8 {
    let origin = tiers::origin(ptr);
    // SAFETY: as the caller promises.
    let had = unsafe { usable_size(ptr) };
    let moved = match origin {
        Origin::Far(arenas) => {
            // SAFETY: the size is not zero.
            unsafe { arenas.allocate(new, Fill::Any) }.unwrap_or(ptr::null_mut())
        }
        // SAFETY: the size is not zero.
        Origin::Local | Origin::Parent => unsafe { local::allocate(new, Fill::Any) },
    };
    if !moved.is_null() {
        let len = old.size().min(new.size()).min(had);
        // SAFETY: both blocks have that many bytes, and the new one overlaps nothing.
        unsafe { ptr::copy_nonoverlapping(ptr, moved, len) };
        // SAFETY: as the caller promises.
        unsafe { free(ptr, Some(old)) };
    }
    moved
}

/// Bytes that the owner of a block may use.
///
/// # Safety
/// None of `ptr` is believed; but a block must not be freed meanwhile.
#[inline(never)]
pub(super) unsafe fn usable_size(ptr: *mut u8) -> usize {
    if tail::is_block(ptr) {
        // SAFETY: a block with a tail.
        return unsafe { sizes_of(ptr) }.1;
    }
    expect_older(ptr, &tiers::origin(ptr));
    // SAFETY: jemalloc has memory there, of before the tails.
    unsafe { jemalloc::size_of_block(ptr) }
}

/// Lets all blocks go that are kept back.
pub(crate) fn let_all_go() {
    if tail::is_on() {
        PLACES.iter().for_each(empty);
    }
}

/// Ends the process unless a local block may begin there that is older than tails.
fn expect_older(ptr: *const u8, origin: &Origin) {
    tail::expect_older(ptr);
    if !matches!(origin, Origin::Local) {
        wrong(ptr, format_args!("no block begins here, in far memory"));
    }
}

/// Keeps a freed block back, in place of the oldest ones.
fn keep(ptr: *mut u8, size: usize) {
    if size > KEPT_SIZE_MAX {
        return let_go(ptr);
    }
    BYTES.fetch_add(size, Relaxed);
    let place = &PLACES[PUT.fetch_add(1, Relaxed) % KEPT];
    let before = place.swap(ptr, AcqRel);
    if !before.is_null() {
        take_out(before);
    }
    for _ in 0..KEPT {
        if BYTES.load(Relaxed) <= KEPT_BYTES {
            break;
        }
        empty(&PLACES[TAKEN.fetch_add(1, Relaxed) % KEPT]);
    }
}

fn empty(place: &AtomicPtr<u8>) {
    let kept = place.swap(ptr::null_mut(), AcqRel);
    if !kept.is_null() {
        take_out(kept);
    }
}

fn take_out(ptr: *mut u8) {
    // SAFETY: a block that was kept back.
    BYTES.fetch_sub(unsafe { jemalloc::size_of_block(ptr) }, Relaxed);
    let_go(ptr);
}

/// Gives a freed block to jemalloc, after a look at whether somebody has used it meanwhile.
fn let_go(ptr: *mut u8) {
    let origin = tiers::origin(ptr);
    if matches!(origin, Origin::Parent) {
        return; // What a forked child has of what its parent kept back.
    }
    // SAFETY: freed, but a block still, with its tail.
    let (size, asked) = unsafe { sizes_of(ptr) };
    // SAFETY: the block's bytes, which nobody may use.
    if size <= FILLED_MAX && !unsafe { tail::are_all(ptr, asked, FREED_BYTE) } {
        wrong(ptr, format_args!("written to after it was freed: a block of {asked} bytes"));
    }
    match origin {
        // SAFETY: jemalloc's block of this size, which nobody uses.
        Origin::Local => unsafe { jemalloc::free(ptr, size, Flags::LOCAL) },
        // SAFETY: as above, of this tier.
        Origin::Far(arenas) => unsafe { far_arenas::free_kept(arenas, ptr, size, asked) },
        Origin::Parent => {}
    }
}
