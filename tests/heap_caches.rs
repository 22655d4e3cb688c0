//! What threads keep of freed memory has one bound, however many threads there are.
#![expect(unsafe_code, reason = "allocates through the allocator trait")]

mod common;

use allocator_api2::alloc::Allocator;
use common::{Dice, heap, seed, watchdog};
use farheap::Far;
use std::alloc::Layout;
use std::sync::Barrier;
use std::time::Duration;

/// Each thread's live data is a batch, at most; what a thread would keep alone is 4 MiB and more.
const THREADS: u64 = 64;
const BATCH: usize = 64 << 10;
const ROUNDS: usize = 300;

/// A batch of blocks of one size, as a request's buffers: allocated, written, freed.
fn batch(size: usize) {
    let layout = Layout::from_size_align(size, 8).expect("a valid layout");
    let blocks: Vec<_> = (0..(BATCH / size).max(1))
        .map(|_| {
            let block = Far.allocate(layout).expect("the device has room").cast::<u8>();
            for at in (0..size).step_by(4096) {
                // SAFETY: inside of the block.
                let byte = unsafe { block.as_ptr().add(at) };
                // SAFETY: as above; the block is this thread's.
                unsafe { byte.write(1) };
            }
            block
        })
        .collect();
    for block in blocks {
        // SAFETY: allocated above with this layout.
        unsafe { Far.deallocate(block, layout) };
    }
}

#[test]
fn freed_data_is_not_written_however_many_threads_keep_some() {
    let _watchdog = watchdog("heap_caches", Duration::from_secs(240));
    let seed = seed("heap_caches");
    let Some(heap) = heap("limit:32MiB,capacity:1GiB") else { return };
    let all = Barrier::new(THREADS as usize);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let all = &all;
            scope.spawn(move || {
                let mut dice = Dice::new(seed ^ thread);
                for round in 0..ROUNDS {
                    let size = 1024 << dice.below(6);
                    batch(size + size / 4 * dice.below(4) as usize);
                    if round % 10 == 0 {
                        all.wait(); // Each has freed something lately, and none has ended.
                    }
                }
            });
        }
    });
    let stats = heap.stats();
    println!("{} KiB were written", stats.bytes_written.0 >> 10);
    // Without the common bound: more than 200 MiB.
    assert!(stats.bytes_written.0 <= 8 << 20, "{} MiB were written", stats.bytes_written.0 >> 20);
    heap.shutdown().expect("everything was freed");
}
