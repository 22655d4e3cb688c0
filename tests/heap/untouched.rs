//! Allocating does not wait for the device, also where a block shares pages with evicted data.
//!
//! Guards: G4.
#![expect(unsafe_code, reason = "allocates through the allocator trait")]

use crate::common::child::alone;
use crate::common::{bytes, heap, watchdog};
use allocator_api2::alloc::Allocator;
use farheap::region::{Advice, Stats};
use farheap::{ByteCount, Far, Heap};
use std::alloc::Layout;
use std::ptr::NonNull;
use std::time::Duration;

const BLOCK: usize = 80 << 10;
const BLOCKS: usize = 200;
/// A block beyond what threads keep of freed ones.
const LARGE: usize = (1 << 20) + (20 << 10);

fn layout(size: usize) -> Layout {
    Layout::from_size_align(size, 4096).expect("a valid layout")
}

fn allocate(size: usize) -> NonNull<u8> {
    Far.allocate(layout(size)).expect("the device has room").cast()
}

fn fill(block: NonNull<u8>, size: usize, byte: u8) {
    // SAFETY: the block is `size` bytes of this test's.
    unsafe { block.as_ptr().write_bytes(byte, size) };
}

fn holds(block: NonNull<u8>, size: usize, byte: u8) -> bool {
    // SAFETY: the block is `size` initialised bytes of this test's.
    let bytes = unsafe { std::slice::from_raw_parts(block.as_ptr(), size) };
    bytes.iter().all(|seen| *seen == byte)
}

fn free(blocks: Vec<NonNull<u8>>, size: usize) {
    for block in blocks {
        // SAFETY: allocated by this test with this layout, once.
        unsafe { Far.deallocate(block, layout(size)) };
    }
}

fn byte_of(at: usize) -> u8 {
    (at % 200) as u8 + 1
}

/// Blocks of data, with holes of the same size beside them that were used and freed, all evicted.
fn data_beside_holes(heap: &Heap, size: usize, count: usize) -> Vec<NonNull<u8>> {
    let (mut kept, mut holes) = (Vec::new(), Vec::new());
    for at in 0..count {
        for (blocks, byte) in [(&mut kept, byte_of(at)), (&mut holes, 0xEE)] {
            let block = allocate(size);
            fill(block, size, byte);
            blocks.push(block);
        }
    }
    free(holes, size);
    heap.purge();
    for block in &kept {
        heap.region()
            .advise(&[bytes(block.as_ptr(), ByteCount(size as u64))], Advice::PageOutNow)
            .expect("the device has room");
    }
    kept
}

fn came_in(before: &Stats, after: &Stats) -> [u64; 3] {
    [
        after.bytes_read.0 - before.bytes_read.0,
        after.faults_read - before.faults_read,
        after.faults_cooling - before.faults_cooling,
    ]
}

#[test]
fn a_block_that_nobody_touches_brings_no_page_in() {
    const TEST: &str = "a_block_that_nobody_touches_brings_no_page_in";
    alone(TEST, || {
        let _watchdog = watchdog(TEST, Duration::from_secs(120));
        let Some(heap) = heap("far_limit:64MiB,capacity:512MiB,readahead:off") else { return };
        let kept = data_beside_holes(&heap, BLOCK, BLOCKS);
        let before = heap.stats();
        let again: Vec<_> = (0..BLOCKS).map(|_| allocate(BLOCK)).collect();
        assert_eq!(came_in(&before, &heap.stats()), [0; 3], "bytes and faults");
        again.iter().for_each(|block| fill(*block, BLOCK, 0xDD));
        let right = kept.iter().enumerate().all(|(at, block)| holds(*block, BLOCK, byte_of(at)));
        assert!(right, "a neighbour's bytes");
        free(kept, BLOCK);
        free(again, BLOCK);
        heap.shutdown().expect("everything was freed");
    });
}

#[test]
fn zeroed_blocks_beside_evicted_data_are_zero_and_harm_nobody() {
    const TEST: &str = "zeroed_blocks_beside_evicted_data_are_zero_and_harm_nobody";
    alone(TEST, || {
        let _watchdog = watchdog(TEST, Duration::from_secs(120));
        let Some(heap) = heap("far_limit:64MiB,capacity:512MiB,readahead:off") else { return };
        for (size, count) in [(BLOCK, BLOCKS), (LARGE, 40)] {
            let kept = data_beside_holes(&heap, size, count);
            let zeroed: Vec<NonNull<u8>> = (0..count)
                .map(|_| Far.allocate_zeroed(layout(size)).expect("the device has room").cast())
                .collect();
            assert!(zeroed.iter().all(|block| holds(*block, size, 0)), "{size} bytes of zeros");
            zeroed.iter().for_each(|block| fill(*block, size, 0xDD));
            let data = || kept.iter().enumerate();
            assert!(data().all(|(at, block)| holds(*block, size, byte_of(at))), "a neighbour's");
            free(kept, size);
            free(zeroed, size);
        }
        heap.shutdown().expect("everything was freed");
    });
}

/// Freed memory that is reused before it was given back, and was evicted meanwhile.
#[test]
fn zeroed_memory_is_not_read_from_the_device_to_be_cleared() {
    const TEST: &str = "zeroed_memory_is_not_read_from_the_device_to_be_cleared";
    alone(TEST, || {
        let _watchdog = watchdog(TEST, Duration::from_secs(120));
        let Some(heap) = heap("far_limit:64MiB,capacity:512MiB,readahead:off") else { return };
        let size = 8 << 20;
        let block = allocate(size);
        fill(block, size, 0xEE);
        heap.region().evict_all().expect("the device has room");
        let before = heap.stats();
        free(vec![block], size);
        let zeroed = Far.allocate_zeroed(layout(size)).expect("room").cast::<u8>();
        // At most the pages that it shares with others at its ends.
        let read = heap.stats().bytes_read.0 - before.bytes_read.0;
        assert!(read <= 2 * 4096, "{read} bytes were read");
        assert!(holds(zeroed, size, 0));
        free(vec![zeroed], size);
        heap.shutdown().expect("everything was freed");
    });
}
