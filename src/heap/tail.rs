//! Tails of blocks, and where blocks begin: what the option `check` looks for wrong frees by (`check`).
//!
//! Every block gets a *tail* behind the bytes that were asked for, and a table has the state of each address that may begin a
//! block. [`wrong`] ends the process. Uses `jemalloc` and `placement`; `local`, `far_arenas` and `thread_cache` use it.
//!
//! ```text
//!  block:  | bytes asked for | TAIL, 8 and more | their number, xor KEY |
//!  state:  0 --cover--> BLOCK --try_free--> FREED --cover--> BLOCK
//! ```
//!
//! # Invariants
//! 1. Once it is on, it stays on.
//! 2. It takes no lock and allocates nothing, so that a forked child goes on with its copy.

#![expect(unsafe_code, reason = "writes tails, keeps a table in mappings")]

use super::jemalloc;
use super::placement;
use crate::base::sync::{
    AtomicBool, AtomicPtr,
    Ordering::{AcqRel, Acquire, Release},
};
use crate::sys::{block, inherited};
use std::alloc::Layout;
use std::fmt;
use std::io::Write;
use std::ptr;
use std::slice;
use std::sync::atomic::AtomicU8;

/// Bytes that a tail has at least: its last word is the number of bytes that were asked for.
const TAIL_MIN: usize = 2 * WORD;
const WORD: usize = size_of::<usize>();
const TAIL: u8 = 0xFA;
const KEY: usize = 0x5AFE_B10C_5AFE_B10C;

/// Addresses that may begin a block: with a tail none is smaller.
pub(super) const GRAIN: usize = 16;
/// A leaf of the table is a byte for each grain of this range, mapped when the first block of it is there.
const LEAF_RANGE: usize = 16 << 30;
const LEAF: usize = LEAF_RANGE / GRAIN;
const LEAVES: usize = (1 << 47) / LEAF_RANGE;
/// How far before an address a block that holds it is looked for.
const SEARCH_MAX: usize = 16 << 20;

/// States of an address, beside that of a new leaf: nothing has begun there.
const BLOCK: u8 = 1;
const FREED: u8 = 2;

static ON: AtomicBool = AtomicBool::new(false);
static TABLE: [AtomicPtr<AtomicU8>; LEAVES] = [const { AtomicPtr::new(ptr::null_mut()) }; LEAVES];

/// True if the process looks for wrong frees.
#[inline]
pub(super) fn is_on() -> bool {
    ON.load(Acquire) // Pairs with the Release in `begin`.
}

/// From now on it does. Blocks that are older than this have no tail and no state.
pub(super) fn begin() {
    ON.store(true, Release);
}

/// Size to ask jemalloc for, for a block of this layout.
pub(super) fn with_tail(layout: Layout) -> Layout {
    if !is_on() {
        return layout;
    }
    let size = layout.size().saturating_add(TAIL_MIN);
    // One that is too large is refused by jemalloc, as it would be with its tail.
    Layout::from_size_align(size, layout.align()).unwrap_or(layout)
}

/// Gives a new block its tail and its state, if the process looks for wrong frees; null is no block.
///
/// # Safety
/// The block was allocated [`with_tail`], and is nobody else's.
pub(super) unsafe fn cover(ptr: *mut u8, asked: usize) {
    if !is_on() || ptr.is_null() {
        return;
    }
    // SAFETY: allocated just now.
    let size = unsafe { jemalloc::size_of_block(ptr) };
    if size < asked + TAIL_MIN {
        return; // Asked for before it was switched on.
    }
    // SAFETY: the bytes from there to the end of the block.
    unsafe { ptr.wrapping_add(asked).write_bytes(TAIL, size - WORD - asked) };
    // SAFETY: the last word of the block, which need not be aligned to words.
    unsafe { ptr.wrapping_add(size - WORD).cast::<usize>().write_unaligned(asked ^ KEY) };
    let state = state_of(ptr, true).expect("a block is aligned, and in user space");
    if state.swap(BLOCK, AcqRel) == BLOCK {
        wrong(ptr, format_args!("allocated twice"));
    }
}

/// Makes a block a freed one; `false`: none begins there, or it is free.
pub(super) fn try_free(ptr: *const u8) -> bool {
    let is_block = |state: &AtomicU8| state.compare_exchange(BLOCK, FREED, AcqRel, Acquire).is_ok();
    state_of(ptr, false).is_some_and(is_block)
}

/// True if a block with a tail begins there.
pub(super) fn is_block(ptr: *const u8) -> bool {
    state_of(ptr, false).is_some_and(|state| state.load(Acquire) == BLOCK)
}

/// Ends the process because of a block at this address.
#[cold]
#[inline(never)]
pub(super) fn wrong(ptr: *const u8, cause: fmt::Arguments<'_>) -> ! {
    let _pinned = placement::pin();
    let text = format!("farheap: {ptr:p}: {cause}\n");
    // In one piece, and without a panic where nobody reads it.
    let _ = std::io::stderr().write_all(text.as_bytes());
    std::process::abort()
}

/// Ends the process because of a block that is free already.
// Of C, so that its callers need no way to unwind: these are the shortest functions of the heap.
#[cold]
#[inline(never)]
pub(super) extern "C" fn freed_twice(ptr: *const u8) -> ! {
    wrong(ptr, format_args!("freed twice: this block is free already"))
}

/// Ends the process unless a block may begin there that is older than tails.
pub(super) fn expect_older(ptr: *const u8) {
    if let Some(start) = block_around(ptr) {
        let offset = ptr.addr() - start.addr();
        // SAFETY: a block with a tail.
        let asked = unsafe { sizes_of(start) }.1;
        wrong(
            ptr,
            format_args!(
                "no block begins here, {offset} bytes into that of {asked} bytes at {start:p}"
            ),
        );
    }
    if state_of(ptr, false).is_some_and(|state| state.load(Acquire) == FREED) {
        freed_twice(ptr);
    }
    expect_known(ptr);
}

/// Ends the process unless jemalloc has memory at an address.
pub(super) fn expect_known(ptr: *const u8) {
    if !jemalloc::knows(ptr) {
        wrong(ptr, format_args!("no block of farheap is at this address"));
    }
}

/// The block that an address is in, behind its first byte.
fn block_around(ptr: *const u8) -> Option<*const u8> {
    let nearest = (0..SEARCH_MAX / GRAIN).find_map(|grains| {
        let start = ptr.map_addr(|addr| (addr & !(GRAIN - 1)).wrapping_sub(grains * GRAIN));
        state_of(start, false)?.load(Acquire).eq(&BLOCK).then_some(start)
    })?;
    // SAFETY: a block begins there.
    let size = unsafe { jemalloc::size_of_block(nearest) };
    (nearest != ptr && nearest.addr() + size > ptr.addr()).then_some(nearest)
}

/// Bytes of a block with its tail and without, after a look at the tail.
///
/// # Safety
/// A block with a tail.
pub(super) unsafe fn sizes_of(ptr: *const u8) -> (usize, usize) {
    // SAFETY: a block.
    let size = unsafe { jemalloc::size_of_block(ptr) };
    // SAFETY: its last word, which need not be aligned.
    let asked = unsafe { ptr.wrapping_add(size - WORD).cast::<usize>().read_unaligned() } ^ KEY;
    let is_whole = (0..=size - TAIL_MIN).contains(&asked)
        // SAFETY: from the end of what was asked for to the last word.
        && unsafe { are_all(ptr.wrapping_add(asked), size - WORD - asked, TAIL) };
    if !is_whole {
        wrong(
            ptr,
            format_args!("written to behind its end: a block of {size} bytes with its tail"),
        );
    }
    (size, asked)
}

/// True if bytes have a value: looked at by words, because by bytes it was most of what the option costs.
///
/// # Safety
/// They can be read, and nobody writes to them meanwhile.
pub(super) unsafe fn are_all(ptr: *const u8, len: usize, value: u8) -> bool {
    // SAFETY: as the caller promises.
    let (words, rest) = unsafe { slice::from_raw_parts(ptr, len) }.as_chunks();
    words.iter().all(|word| *word == [value; WORD]) && rest.iter().all(|byte| *byte == value)
}

/// The state of an address that may begin a block; `None` where none has ever begun, but for one to `make`.
fn state_of(ptr: *const u8, make: bool) -> Option<&'static AtomicU8> {
    let addr = ptr.addr();
    if !addr.is_multiple_of(GRAIN) {
        return None;
    }
    let leaf = TABLE.get(addr / LEAF_RANGE)?;
    let mut states = leaf.load(Acquire); // Pairs with the exchange in `make_leaf`.
    if states.is_null() {
        if !make {
            return None;
        }
        states = make_leaf(leaf);
    }
    // SAFETY: a leaf has a byte for each grain of its range.
    let state = unsafe { states.add(addr % LEAF_RANGE / GRAIN) };
    // SAFETY: leaves are mapped for ever, filled with zeros, and used as atomics only.
    Some(unsafe { &*state })
}

#[cold]
fn make_leaf(leaf: &AtomicPtr<AtomicU8>) -> *mut AtomicU8 {
    let made = inherited::map(LEAF, jemalloc::PAGE).expect("address space for a table");
    block::avoid_huge_pages(made.addr().get(), LEAF);
    let made = made.cast::<AtomicU8>().as_ptr();
    match leaf.compare_exchange(ptr::null_mut(), made, AcqRel, Acquire) {
        Ok(_) => made,
        Err(first) => {
            // SAFETY: nobody else has seen it.
            unsafe { inherited::unmap(made.addr(), LEAF) };
            first
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_a_value_if_each_of_them_has_wherever_they_begin() {
        const LEN: usize = 4 * WORD;
        let have = |bytes: &[u8]| {
            // SAFETY: bytes of this test.
            unsafe { are_all(bytes.as_ptr(), bytes.len(), TAIL) }
        };
        for (from, end) in (0..LEN).flat_map(|from| (from..=LEN).map(move |end| (from, end))) {
            let mut bytes = [!TAIL; LEN];
            bytes[from..end].fill(TAIL);
            assert!(have(&bytes[from..end]), "{from}..{end}");
            for at in from..end {
                bytes[at] ^= 1;
                assert!(!have(&bytes[from..end]), "{from}..{end}, but {at}");
                bytes[at] ^= 1;
            }
        }
    }
}
