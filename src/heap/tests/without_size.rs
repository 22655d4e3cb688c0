//! Blocks that are freed and resized without saying how large they are.

#![expect(unsafe_code, reason = "allocates by hand")]

use super::*;
use std::collections::HashMap;

/// Puts a far block of this size at hand: one that was freed.
fn have_at_hand(size: usize) {
    let block = c_malloc::allocate(size, 16, Some(Tier::FAR), false).expect("memory");
    // SAFETY: allocated just now, not used any more.
    unsafe { c_malloc::free(block) }
}

#[test]
fn a_far_block_that_c_resizes_stays_far_with_its_bytes_and_is_counted_once() {
    let running = start_default();
    have_at_hand(500);
    let block = c_malloc::allocate(100, 16, Some(Tier::FAR), false).expect("memory");
    // SAFETY: the block has 100 bytes.
    unsafe { block.write_bytes(7, 100) };
    // SAFETY: allocated above. 112 bytes of it can be used.
    let same = unsafe { c_malloc::reallocate(block, 112) }.expect("memory");
    assert_eq!(same, block);
    // SAFETY: allocated above.
    let moved = unsafe { c_malloc::reallocate(block, 500) }.expect("memory");
    assert!(moved != block && Far::contains(moved.as_ptr()));
    // SAFETY: the block has 500 bytes, of which 100 were copied.
    assert!(unsafe { slice::from_raw_parts(moved.as_ptr(), 100) }.iter().all(|byte| *byte == 7));
    assert_eq!(running.arenas.allocated(), ByteCount(512));
    // SAFETY: allocated above, not used any more.
    unsafe { c_malloc::free(moved) };
    assert_eq!(running.arenas.allocated(), ByteCount::ZERO);
    running.stop();
}

#[test]
fn the_size_of_a_far_block_is_jemallocs_whatever_was_on_its_page_before() {
    let running = start_default();
    let (mut on_page, mut changed) = (HashMap::new(), 0);
    for (size, align) in
        [(16, 16), (100, 16), (100, 64), (3000, 16), (20_000, 4096), (90_000, 16), (48, 16)]
    {
        let far = |_| c_malloc::allocate(size, align, Some(Tier::FAR), false).expect("memory");
        let mut blocks: Vec<_> = (0..(1 << 20) / size).map(far).collect();
        for block in &mut blocks {
            // SAFETY: allocated above. (What it was aligned to beyond 16 is lost.)
            *block = unsafe { c_malloc::reallocate(*block, size + size / 3) }.expect("memory");
            // SAFETY: the block is in use.
            let right = unsafe { jemalloc::size_of_block(block.as_ptr()) };
            // SAFETY: the block is in use.
            assert_eq!(unsafe { c_malloc::usable_size(*block) }, right, "{size} at {align}");
            let before = on_page.insert(block.as_ptr().addr() / jemalloc::PAGE, right);
            changed += usize::from(before.is_some_and(|before| before != right));
        }
        // SAFETY: allocated above, not used any more.
        blocks.into_iter().for_each(|block| unsafe { c_malloc::free(block) });
        running.arenas.give_back(ByteCount::ZERO);
    }
    assert!(changed > 100, "{changed} pages had blocks of another size before");
    assert_eq!(running.arenas.allocated(), ByteCount::ZERO);
    running.stop();
}

#[test]
fn a_block_at_hand_is_taken_by_its_size_whatever_the_scope_says() {
    for (threshold, is_far) in [(ByteCount::ZERO, true), (ByteCount::kib(64), false)] {
        let options = FarArenasOptions { threshold: Some(threshold), ..Default::default() };
        let running = start(ByteCount::gib(1), options);
        for size in [64, 3000] {
            have_at_hand(size);
            let _local = Scope::enter(Tier::LOCAL);
            let taken = c_malloc::allocate_at_hand_by_size(size, 16);
            assert_eq!(taken.is_some(), is_far, "{size} of {threshold}");
            // SAFETY: allocated above.
            taken.into_iter().for_each(|block| unsafe { c_malloc::free(block) });
        }
        running.stop();
    }
}
