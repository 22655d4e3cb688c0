//! Starting and stopping the far heap again and again: what each round leaves behind.

use crate::bytes_allocated;
use crate::common::child::alone;
use crate::common::heap;
use allocator_api2::vec::Vec as FarVec;
use farheap::Far;

/// Bytes of address space that are mapped, and mappings.
fn mapped() -> (u64, usize) {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("readable");
    let bytes = maps.lines().map(|line| {
        let (range, _) = line.split_once(' ').expect("a range");
        let (from, to) = range.split_once('-').expect("two addresses");
        let address = |text| u64::from_str_radix(text, 16).expect("hexadecimal");
        address(to) - address(from)
    });
    (bytes.sum(), maps.lines().count())
}

/// Starts a heap, uses it from two threads, and stops it; `false` where that is not permitted.
fn round() -> bool {
    let Some(heap) = heap("far_limit:16MiB,capacity:32MiB,span:1GiB") else { return false };
    let work = || {
        let mut numbers: FarVec<u64, Far> = FarVec::new_in(Far);
        numbers.extend(0..100_000);
        for len in 1..200 {
            let small: FarVec<u8, Far> = FarVec::with_capacity_in(len * 16, Far);
            assert!(small.capacity() >= len * 16);
        }
        assert_eq!(numbers.iter().sum::<u64>(), 100_000 * 99_999 / 2);
    };
    std::thread::scope(|scope| {
        scope.spawn(work);
        work();
    });
    heap.shutdown().expect("nothing is in use");
    true
}

#[test]
fn a_heap_that_was_stopped_leaves_little_behind() {
    alone("a_heap_that_was_stopped_leaves_little_behind", || {
        const ROUNDS: u64 = 20;
        // What is made once, and the stacks that the C library keeps for the next threads.
        for _ in 0..5 {
            if !round() {
                return;
            }
        }
        // Beside other work threads end later, and the C library keeps more stacks. What is left behind is so each time.
        let leaves_little = || {
            let (bytes, ranges) = mapped();
            let allocated = bytes_allocated();
            for _ in 0..ROUNDS {
                round();
            }
            let (bytes_after, ranges_after) = mapped();
            let left = bytes_allocated().saturating_sub(allocated) / ROUNDS;
            let mapped = bytes_after.saturating_sub(bytes) / ROUNDS;
            println!("a round leaves {left} bytes allocated and {mapped} mapped");
            println!("{ranges} mappings before, {ranges_after} after");
            let few = ranges_after <= ranges + ROUNDS as usize / 2;
            left <= 16 << 10 && mapped <= 256 << 10 && few
        };
        assert!((0..5).any(|_| leaves_little()), "it leaves as much each time, see above");
    });
}
