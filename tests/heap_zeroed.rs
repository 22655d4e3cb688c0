//! Zeroed far memory is zero, also where it was used before and shares pages with live data.
#![expect(unsafe_code, reason = "allocates through the allocator trait")]

mod common;

use allocator_api2::alloc::Allocator;
use common::watchdog;
use farheap::{ByteCount, Config, Error, Far, Heap};
use std::alloc::Layout;
use std::time::Duration;

const BLOCK: usize = 96 << 10;
const BLOCKS: usize = 400;

fn layout() -> Layout {
    Layout::from_size_align(BLOCK, 4096).expect("a valid layout")
}

#[test]
fn recycled_memory_is_zero_when_asked_for_at_every_page_size() {
    let _watchdog = watchdog("heap_zeroed", Duration::from_secs(120));
    for page in [ByteCount::kib(4), ByteCount::kib(64), ByteCount::mib(2)] {
        let config = Config::builder().limit(ByteCount::mib(128)).page(page).build();
        let heap = match Heap::start(config.expect("a valid configuration")) {
            Ok(heap) => heap,
            Err(Error::UffdUnavailable { reasons }) => {
                println!("skipped: userfaultfd is not permitted here: {reasons}");
                return;
            }
            Err(error) => panic!("{error}"),
        };
        let dirty = || {
            let block = Far.allocate(layout()).expect("below the limit").cast::<u8>();
            // SAFETY: the block is `BLOCK` bytes of this test's.
            unsafe { block.as_ptr().write_bytes(0xAB, BLOCK) };
            block
        };
        let mut blocks: Vec<_> = (0..BLOCKS).map(|_| dirty()).collect();
        // Every other block goes, so that most pages keep live neighbours.
        for at in (0..BLOCKS).step_by(2) {
            // SAFETY: allocated above with this layout, and replaced below.
            unsafe { Far.deallocate(blocks[at], layout()) };
        }
        heap.purge();
        for at in (0..BLOCKS).step_by(2) {
            let zeroed = Far.allocate_zeroed(layout()).expect("below the limit").cast::<u8>();
            // SAFETY: the block is `BLOCK` initialised bytes of this test's.
            let bytes = unsafe { std::slice::from_raw_parts(zeroed.as_ptr(), BLOCK) };
            let wrong = bytes.iter().position(|byte| *byte != 0);
            assert_eq!(wrong, None, "{page}: block {at} is not zero");
            blocks[at] = zeroed;
        }
        for (at, block) in blocks.into_iter().enumerate() {
            // SAFETY: inside of the block.
            let middle = unsafe { block.as_ptr().add(BLOCK / 2) };
            // SAFETY: as above.
            let byte = unsafe { middle.read() };
            assert_eq!(byte, if at % 2 == 0 { 0 } else { 0xAB }, "{page}: block {at}");
            // SAFETY: allocated above with this layout.
            unsafe { Far.deallocate(block, layout()) };
        }
        heap.shutdown().expect("everything was freed");
    }
}
