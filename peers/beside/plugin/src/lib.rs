//! A plug-in whose global allocator is farheap's.

#![expect(unsafe_code, reason = "exports functions of C")]

use farheap::allocator_api2::vec::Vec as FarVec;
use farheap::{Far, FarHeap, Heap};
use std::ffi::c_int;

#[global_allocator]
static HEAP: FarHeap = FarHeap::new();

/// As the tests of C and C++: the machine does not allow it.
const SKIPPED: c_int = 77;

/// Starts a heap, uses it, ends it. Returns 0 if every sum was right.
// SAFETY: no other function has this name.
#[unsafe(no_mangle)]
pub extern "C" fn plugin_work() -> c_int {
    let options = Heap::builder().parse("capacity:128MiB").expect("a configuration");
    let heap = match options.start() {
        Ok(heap) => heap,
        Err(error) => {
            println!("skipped: {error}");
            return SKIPPED;
        }
    };
    let mut far: FarVec<u64, Far> = FarVec::new_in(Far);
    far.extend(0..1 << 20);
    heap.region().evict_all().expect("a device");
    let is_right = far.iter().sum::<u64>() == (0..1_u64 << 20).sum::<u64>();
    drop(far);
    heap.shutdown().expect("nothing is allocated");
    c_int::from(!is_right)
}

/// Uses the global allocator on the calling thread, without a heap.
// SAFETY: no other function has this name.
#[unsafe(no_mangle)]
pub extern "C" fn plugin_allocate() -> c_int {
    let blocks: Vec<Vec<u8>> = (1..100).map(|size| vec![1; size * 1000]).collect();
    c_int::from(blocks.iter().map(Vec::len).sum::<usize>() != 4_950_000)
}
