//! Tests of bump allocators that go at once.

#![expect(unsafe_code, reason = "allocates by hand")]

#[path = "../../../tests/common/mod.rs"]
mod common;
#[path = "../../../src/base/testing.rs"]
mod testing;

use common::Dice;
use farheap::allocator_api2::alloc::{Allocator, Layout};
use farheap::allocator_api2::boxed::Box as BumpBox;
use farheap::allocator_api2::vec::Vec as BumpVec;
use farheap::{ByteCount, Heap, Tier};
use farheap_collections::Bump;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{slice, thread};
use testing::ExpectedPanic;

/// The process has one heap at a time.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn start() -> Option<Heap> {
    common::heap("far_limit:64MiB,capacity:1GiB")
}

fn layout(size: usize, align: usize) -> Layout {
    Layout::from_size_align(size, align).expect("a valid layout")
}

/// Allocates blocks of all sizes by hand, of which most are never freed, and checks that they keep their
/// bytes.
fn work(bump: &Bump, seed: u64, rounds: usize) {
    let mut dice = Dice::new(seed);
    let mut blocks: Vec<(NonNull<u8>, Layout, u8)> = Vec::new();
    for round in 0..rounds {
        let most = 1 << dice.below(18);
        let size = 1 + dice.below(most) as usize;
        let layout = layout(size, 1 << dice.below(8));
        let ptr = bump.allocate(layout).expect("there is memory").cast::<u8>();
        assert_eq!(ptr.addr().get() % layout.align(), 0);
        // SAFETY: the block is ours, and as large.
        unsafe { ptr.write_bytes(round as u8, layout.size()) };
        blocks.push((ptr, layout, round as u8));
        let at = dice.below(blocks.len() as u64) as usize;
        match dice.below(8) {
            0 => {
                let (ptr, layout, byte) = blocks.swap_remove(at);
                check(ptr, layout.size(), byte);
                // SAFETY: our block.
                unsafe { bump.deallocate(ptr, layout) };
            }
            1 => {
                let (ptr, old, byte) = blocks[at];
                let new = self::layout(old.size() + dice.below(90_000) as usize, old.align());
                // SAFETY: our block, which grows.
                let grown = unsafe { bump.grow(ptr, old, new) }.expect("there is memory").cast();
                check(grown, old.size(), byte);
                // SAFETY: the block is ours, and as large.
                unsafe { grown.write_bytes(byte, new.size()) };
                blocks[at] = (grown, new, byte);
            }
            2 => {
                let (ptr, old, byte) = blocks[at];
                let new = self::layout(1 + dice.below(old.size() as u64) as usize, old.align());
                // SAFETY: our block, which shrinks.
                let less = unsafe { bump.shrink(ptr, old, new) }.expect("there is memory").cast();
                check(less, new.size(), byte);
                blocks[at] = (less, new, byte);
            }
            _ => {}
        }
    }
    blocks.into_iter().for_each(|(ptr, layout, byte)| check(ptr, layout.size(), byte));
}

fn check(ptr: NonNull<u8>, len: usize, byte: u8) {
    // SAFETY: a block of the caller's, written whole.
    let bytes = unsafe { slice::from_raw_parts(ptr.as_ptr(), len) };
    assert!(bytes.iter().all(|seen| *seen == byte), "{len} bytes at {ptr:p} changed");
}

#[test]
fn a_bump_allocator_goes_at_once_with_live_blocks_of_many_threads() {
    let _turn = turn();
    let Some(heap) = start() else { return };
    for placement in [Tier::FAR, heap.tier()] {
        let bump = Bump::new(placement);
        thread::scope(|all| {
            for seed in 0..8 {
                let bump = &bump;
                all.spawn(move || work(bump, seed, 500));
            }
        });
        assert!(bump.reserved() > ByteCount::mib(8), "{}", bump.reserved());
        assert!(heap.usage().allocated_bytes >= bump.reserved());
        drop(bump);
        assert_eq!(heap.usage().allocated_bytes, ByteCount::ZERO);
    }
    heap.shutdown().expect("everything was freed");
}

#[test]
fn a_bump_allocator_that_is_reset_is_used_again() {
    let _turn = turn();
    let mut bump = Bump::new(Tier::LOCAL);
    for seed in 0..20 {
        work(&bump, seed, 300);
        assert!(bump.reserved() > ByteCount::ZERO);
        bump.reset();
        assert_eq!(bump.reserved(), ByteCount::ZERO);
    }
}

#[test]
fn zeroed_blocks_of_a_bump_allocator_are_zero_also_where_others_were() {
    let _turn = turn();
    let Some(heap) = start() else { return };
    for placement in [Tier::FAR, Tier::LOCAL] {
        let mut bump = Bump::new(placement);
        for _ in 0..3 {
            for size in [1, 100, 5_000, 40_000, 200_000] {
                let layout = layout(size, 16);
                let ptr = bump.allocate_zeroed(layout).expect("there is memory").cast::<u8>();
                check(ptr, size, 0);
                // SAFETY: the block is ours, and as large.
                unsafe { ptr.write_bytes(0xA5, size) };
            }
            bump.reset();
        }
    }
    heap.shutdown().expect("everything was freed");
}

#[test]
fn the_last_block_of_a_bump_allocator_grows_where_it_is() {
    let _turn = turn();
    let bump = Bump::new(Tier::LOCAL);
    let mut numbers = BumpVec::with_capacity_in(16, &bump);
    numbers.extend(0..16_u64);
    let place = numbers.as_ptr();
    numbers.extend(16..1_000);
    assert_eq!(numbers.as_ptr(), place);
    let other = BumpBox::new_in(7_u64, &bump);
    numbers.extend(1_000..3_000);
    assert_ne!(numbers.as_ptr(), place, "something lies behind it");
    numbers.extend(3_000..100_000); // A large block from here on.
    assert!(numbers.iter().zip(0..).all(|(seen, n)| *seen == n));
    assert_eq!((numbers.len(), *other), (100_000, 7));
}

#[test]
#[should_panic(expected = "was freed")]
fn a_large_block_that_is_freed_twice_is_noticed() {
    let _expected = ExpectedPanic::saying("was freed");
    let _turn = turn();
    let bump = Bump::new(Tier::LOCAL);
    let layout = layout(100_000, 8);
    let ptr = bump.allocate(layout).expect("there is memory").cast();
    for _ in 0..2 {
        // SAFETY: the second time it is not, and the allocator panics before it touches anything.
        unsafe { bump.deallocate(ptr, layout) };
    }
}

#[test]
fn a_bump_allocator_of_far_memory_without_a_heap_has_none() {
    let _turn = turn();
    assert!(Bump::new(Tier::FAR).allocate(layout(8, 8)).is_err());
    assert!(Bump::new(Tier::FAR).allocate(layout(100_000, 8)).is_err());
}
